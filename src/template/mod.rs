//! Text <-> conversation, both ways. Imports nothing from the rest of the crate.
//!
//! `message` is the vocabulary, `jinja` renders a conversation with a model's own chat template.

pub mod message;

pub use message::{Content, Conversation, Message, Role, ToolCall};
