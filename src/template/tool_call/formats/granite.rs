//! `<|tool_call|>[{"name": ..., "arguments": {...}}]` (Granite 3)

use super::{Frame, ToolCallSpec, named_object, objects};

pub const GRANITE: ToolCallSpec = ToolCallSpec {
    name: "granite",
    signs: &[&["<|tool_call|>"]],
    openers: &["<|tool_call|>"],
    frame: Frame { open: "[", separator: Some(", "), close: "]", ..Frame::PLAIN },
    call: named_object,
    reader: |_| objects(None),
    ..ToolCallSpec::PLAIN
};
