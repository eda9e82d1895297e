//! llmctl runs large language models from the terminal; `run`, `chat`, `serve` and `bench` are four mouths of
//! one engine.
//!
//! [`cli`] has flags, configuration and the terminal: the only place that reads the environment. The rest are
//! crates, below it: `llmctl-serve`, `llmctl-engine`, `llmctl-models`, `llmctl-hub`, `llmctl-template`,
//! `llmctl-kernel`, `llmctl-base`. ARCHITECTURE.md has the map.

pub mod cli;
