//! `functools[{"name": ..., "arguments": {...}}]` (Firefunction)

use super::{Frame, JsonCalls, ToolCallSpec, named_object};

pub const FUNCTOOLS: ToolCallSpec = ToolCallSpec {
    name: "functools",
    signs: &[&["functools["]],
    openers: &["functools["],
    frame: Frame { separator: Some(", "), close: "]", ..Frame::PLAIN },
    call: named_object,
    reader: |_| Some(Box::new(JsonCalls::in_list(None))),
    ..ToolCallSpec::PLAIN
};
