//! The one integration test binary: one module per promise.

mod common;

mod architecture;
mod candle_backend;
mod cli;
mod config;
mod conversation;
mod engine;
mod engine_models;
mod engine_queue;
mod engine_thread;
mod fingerprint;
mod gpt_oss_files;
mod hub;
mod kv;
mod kv_disk;
mod kv_restore;
mod kv_types;
mod load_options;
mod loading;
mod oracle;
mod parity_table;
mod phi3_gguf;
mod quantized_products;
mod real_models;
mod same_answer;
mod session;
mod session_store;
mod session_transcript;
mod state_groups;
mod steady_steps;
mod templates;
mod tokenizers;
mod warm_resume;
