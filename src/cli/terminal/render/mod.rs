//! An answer on a terminal: Markdown styled while it comes.
//!
//! Invariants: what is printed is what the model wrote, character for character, with colours between and
//! line breaks in place of blanks where a word would not fit its line; nothing printed is ever printed again
//! or moved, so that a resize in the middle changes only what comes. How a stream is split changes no byte.
//! Control characters arrive as symbols.

mod code;
mod markdown;
mod style;

pub use markdown::Markdown;
pub use style::{Styled, TextStyle};
