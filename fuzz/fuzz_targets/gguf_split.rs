#![no_main]
llmctl_fuzz::fuzz!(gguf_split);
