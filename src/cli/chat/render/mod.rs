//! An answer on a terminal: Markdown styled while it comes.
//!
//! Invariants: what is printed is what the model wrote, character for character, with colours between; nothing printed is
//! ever printed again, moved or wrapped, so that any width, a resize in the middle and copying all do what the terminal
//! does with text. How a stream is split changes no byte. Control characters arrive as symbols.

mod code;
mod markdown;
mod style;

pub use markdown::Markdown;
