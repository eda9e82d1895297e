//! Measurements of engines and of servers, and what is made of them. Knows no flags, no terminal and no
//! environment.
//!
//! `plan` turns sweeps into cases, `runner` measures them in turns on a [`runner::BenchSubject`] (`engine`,
//! or a mock in tests), `record` is what is left of it, `machine` and `cost` say what would be possible,
//! `validity` what speaks against a result, `stats` does the sums, `report` and `plot` show it, `compare`
//! judges one result by another (also one of `llama_bench`). `http` puts load on a server, `point` holds its
//! figures, `serve_report` shows them.

pub mod compare;
pub mod cost;
pub mod engine;
mod error;
mod figures;
pub mod http;
mod llama_bench;
pub mod machine;
pub mod plan;
pub mod plot;
pub mod point;
pub mod record;
pub mod report;
pub mod runner;
mod serve_report;
mod stats;
pub mod validity;

pub use error::{BenchError, RequestFailure};
