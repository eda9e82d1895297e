//! The engine. No terminal, no HTTP, no vendor's words, no environment variables.
//!
//! Everything outside imports from this facade only.

pub mod backend;
pub mod error;
pub mod kernel;
pub mod kv;
pub mod load;
pub mod machine;
pub mod memory;
pub mod model;
pub mod request;
pub mod tensor;
pub mod text;

pub use error::{Error, LoadError, Result};
pub use request::{
    Event, Finish, Limits, Logprob, MAX_LOGPROBS, Outcome, Request, Sampling, Started, Timings, Token, Usage,
};
