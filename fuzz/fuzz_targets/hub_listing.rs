#![no_main]
llmctl_fuzz::fuzz!(hub_listing);
