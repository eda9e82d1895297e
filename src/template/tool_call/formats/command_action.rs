//! `<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>` (Command A)

use super::{Frame, ToolCallSpec, objects};
use crate::tool_call::json_text::quoted;

pub const COMMAND_ACTION: ToolCallSpec = ToolCallSpec {
    name: "command-action",
    signs: &[&["<|START_ACTION|>", "tool_name"]],
    openers: &["<|START_ACTION|>"],
    marks: &["<|END_ACTION|>"],
    end: "<|END_ACTION|>",
    frame: Frame { open: "[\n    ", separator: Some(",\n    "), close: "\n]<|END_ACTION|>", ..Frame::PLAIN },
    call: |writer, tool, _| {
        let between = format!("\", \"tool_name\": {}, \"parameters\": ", quoted(&tool.name));
        writer.numbered("{\"tool_call_id\": \"", &between, "}", tool)
    },
    reader: |_| objects(Some("<|END_ACTION|>")),
    ..ToolCallSpec::PLAIN
};
