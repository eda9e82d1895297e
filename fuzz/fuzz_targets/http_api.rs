#![no_main]
llmctl_fuzz::fuzz!(http_api);
