//! `functools[{"name": ..., "arguments": {...}}]` (Firefunction)

use super::{Frame, JsonCalls, Notation, named_object};

pub const FUNCTOOLS: Notation = Notation {
    name: "functools",
    signs: &[&["functools["]],
    openers: &["functools["],
    frame: Frame { separator: Some(", "), close: "]", ..Frame::PLAIN },
    call: named_object,
    reader: |_| Some(Box::new(JsonCalls::in_list(None))),
    ..Notation::PLAIN
};
