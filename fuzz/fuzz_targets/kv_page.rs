#![no_main]
llmctl_fuzz::fuzz!(kv_page);
