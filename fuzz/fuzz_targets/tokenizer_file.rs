#![no_main]
llmctl_fuzz::fuzz!(tokenizer_file);
