#![no_main]
llmctl_fuzz::fuzz!(kept_panels);
