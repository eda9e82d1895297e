#![no_main]
llmctl_fuzz::fuzz!(tool_call);
