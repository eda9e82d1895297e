#![no_main]
llmctl_fuzz::fuzz!(endpoint_events);
