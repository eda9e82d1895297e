//! llmctl runs large language models from the terminal; `run`, `chat`, `serve` and `bench` are four mouths of
//! one engine.
//!
//! - [`cli`]: flags, configuration and the terminal; the only place that reads the environment
//! - [`template`]: conversation <-> text; a crate of its own, `llmctl-template`
//! - [`serve`]: the OpenAI-compatible server
//! - [`runtime`]: loading, the decoder, sessions, sampling, the engine and its thread
//!
//! Imports go one way: `main -> cli -> serve -> runtime -> template`. ARCHITECTURE.md has the map.

pub mod cli;
pub mod runtime;
pub mod serve;

pub use llmctl_template as template;
