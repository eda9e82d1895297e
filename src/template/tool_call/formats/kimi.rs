//! `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` (Kimi K2)

use super::{Frame, ToolCallSpec};
use crate::tool_call::named_json::{NamedJson, NamedJsonMarks};

pub const KIMI: ToolCallSpec = ToolCallSpec {
    name: "kimi",
    signs: &[&["<|tool_call_begin|>", "<|tool_call_argument_begin|>"]],
    openers: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    marks: &["<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"],
    end: "<|tool_calls_section_end|>",
    frame: Frame { separator: Some(""), close: "<|tool_calls_section_end|>", ..Frame::PLAIN },
    call: |writer, tool, _| {
        let head = format!("<|tool_call_begin|>functions.{}:", tool.name);
        writer.numbered(&head, "<|tool_call_argument_begin|>", "<|tool_call_end|>", tool)
    },
    reader: |opener| Some(Box::new(NamedJson::new(&MARKS, opener))),
    ..ToolCallSpec::PLAIN
};

const MARKS: NamedJsonMarks = NamedJsonMarks {
    begin: "<|tool_call_begin|>",
    separator: "<|tool_call_argument_begin|>",
    end: "<|tool_call_end|>",
    section_end: Some("<|tool_calls_section_end|>"),
    name: |head| {
        let head = head.trim();
        let name = head.strip_prefix("functions.").unwrap_or(head);
        Some(name.rsplit_once(':').map_or(name, |(name, _)| name))
    },
};
