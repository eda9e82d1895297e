//! `Action:` and a code block of `[{"tool_name": ..., "parameters": {...}}]` (Command R and R+)

use super::{Frame, ToolCallSpec, objects};
use crate::tool_call::json_text::quoted;

pub const COMMAND_R: ToolCallSpec = ToolCallSpec {
    name: "command-r",
    signs: &[&["Action:", "```json", "\"tool_name\": "]],
    openers: &["Action:\n```json"],
    end: "```",
    frame: Frame { open: "\n[\n", separator: Some(",\n"), close: "\n]```", ..Frame::PLAIN },
    call: |writer, tool, _| {
        let name = quoted(&tool.name);
        let head = format!("    {{\n        \"tool_name\": {name},\n        \"parameters\": ");
        writer.json_call(&head, tool, "\n    }")
    },
    reader: |_| objects(Some("```")),
    ..ToolCallSpec::PLAIN
};
