//! Load on an OpenAI-compatible server.
//!
//! `drive` sends requests as `arrivals` or a `trace` says, through `client`; `sse` reads the streams, `text`
//! makes prompts of a length, `meet` asks before the load. Nothing here knows the engine.

mod arrivals;
pub mod client;
pub mod drive;
pub mod meet;
mod sse;
mod text;
pub mod trace;
