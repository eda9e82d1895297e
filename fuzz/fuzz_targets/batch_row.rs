#![no_main]
llmctl_fuzz::fuzz!(batch_row);
