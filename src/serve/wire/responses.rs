//! OpenAI's Responses API on the wire: `input` and `tools` become the messages and tools of a conversation,
//! and an answer becomes output items and the response object.
//!
//! Invariants: an item or a tool of an unknown type is left out and reported as ignored, a malformed one of a
//! known type is refused by its index; an output item that comes back as input is read as the message that it
//! was made of; the ids of items follow from the response's id, so that all encodings of one answer agree.

pub mod input;
pub mod items;
pub mod object;
pub mod tools;
