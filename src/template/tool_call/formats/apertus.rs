//! `<|tools_prefix|>[{NAME: {...}}]<|tools_suffix|>` (Apertus)

use super::{Frame, JsonCalls, ToolCallSpec};
use crate::tool_call::json_text::quoted;

pub const APERTUS: ToolCallSpec = ToolCallSpec {
    name: "apertus",
    signs: &[&["<|tools_prefix|>"]],
    openers: &["<|tools_prefix|>"],
    marks: &["<|tools_suffix|>"],
    end: "<|tools_suffix|>",
    frame: Frame { open: "[", separator: Some(", "), close: "]<|tools_suffix|>", ..Frame::PLAIN },
    call: |writer, tool, _| writer.json_call(&format!("{{{}: ", quoted(&tool.name)), tool, "}"),
    reader: |_| Some(Box::new(JsonCalls::keyed(Some("<|tools_suffix|>")))),
    ..ToolCallSpec::PLAIN
};
