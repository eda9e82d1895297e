#![no_main]
llmctl_fuzz::fuzz!(mcp_answer);
