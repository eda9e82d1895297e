#![no_main]
llmctl_fuzz::fuzz!(tools_file);
