#![no_main]
llmctl_fuzz::fuzz!(worker_line);
