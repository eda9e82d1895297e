#![no_main]
llmctl_fuzz::fuzz!(model_folder);
