#![no_main]
llmctl_fuzz::fuzz!(session_archive);
