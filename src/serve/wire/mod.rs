//! The wire formats: OpenAI's, of HTTP bodies and the rows of a batch alike, `anthropic`, which is
//! Anthropic's, and `ollama`, which is Ollama's.
//!
//! Invariants: every field is taken out of its object by name, and what is left over is refused by name; all
//! that is wrong with a body is gathered first, and the first group that is not empty is what the caller is
//! told. Knows neither the engine's state nor HTTP beyond the words of an
//! [`ApiError`](super::error::ApiError).

pub mod answer;
pub mod anthropic;
pub mod fields;
pub mod hints;
pub mod image_files;
pub mod images;
pub mod json;
pub mod lora;
pub mod message;
pub mod ollama;
pub mod options;
pub mod params;
pub mod record;
pub mod responses;
pub mod shape;
pub mod switches;
pub mod tools;

pub use fields::{Fields, Problems};
