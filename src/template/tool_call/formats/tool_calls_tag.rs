//! `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>` (Jamba, Apriel)

use super::{Frame, ToolCallSpec, named_object, objects};

pub const TOOL_CALLS_TAG: ToolCallSpec = ToolCallSpec {
    name: "tool-calls-tag",
    signs: &[&["<tool_calls>[", "\"arguments\""], &["\"<tool_calls>\"", "\\\"arguments\\\""]],
    openers: &["<tool_calls>"],
    marks: &["</tool_calls>"],
    end: "</tool_calls>",
    frame: Frame { open: "[", separator: Some(", "), close: "]</tool_calls>", ..Frame::PLAIN },
    call: named_object,
    reader: |_| objects(Some("</tool_calls>")),
    ..ToolCallSpec::PLAIN
};
