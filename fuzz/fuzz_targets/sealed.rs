#![no_main]
llmctl_fuzz::fuzz!(sealed);
