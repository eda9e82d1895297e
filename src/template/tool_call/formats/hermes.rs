//! `<tool_call>` `{"name": ..., "arguments": {...}}` `</tool_call>` (Qwen 2.5 and 3, Hermes)

use super::{Frame, ToolCallSpec, named_object, objects};

pub const HERMES: ToolCallSpec = ToolCallSpec {
    name: "hermes",
    signs: &[&["<tool_call>", "arguments", "tools"]],
    openers: &["<tool_call>"],
    marks: &["</tool_call>"],
    end: "</tool_call>",
    frame: Frame { open: "\n", close: "\n</tool_call>", between: "\n", ..Frame::PLAIN },
    call: named_object,
    reader: |_| objects(Some("</tool_call>")),
    ..ToolCallSpec::PLAIN
};
