#![no_main]
llmctl_fuzz::fuzz!(config_toml);
