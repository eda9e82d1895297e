#![no_main]
llmctl_fuzz::fuzz!(engine_events);
