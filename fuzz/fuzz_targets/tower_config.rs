#![no_main]
llmctl_fuzz::fuzz!(tower_config);
