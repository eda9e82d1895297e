#![no_main]
llmctl_fuzz::fuzz!(chat_template);
