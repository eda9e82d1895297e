#![no_main]
llmctl_fuzz::fuzz!(ollama_body);
