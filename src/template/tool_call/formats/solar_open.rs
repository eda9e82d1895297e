//! `<|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>` (Solar Open)

use super::{Frame, ToolCallSpec};
use crate::tool_call::named_json::{NamedJson, NamedJsonMarks};
use crate::tool_call::spec::Messages;

pub const SOLAR_OPEN: ToolCallSpec = ToolCallSpec {
    name: "solar-open",
    signs: &[&["<|tool_call:begin|>", "<|tool_call:args|>"]],
    openers: &["<|tool_calls|>", "<|tool_call:begin|>"],
    marks: &[
        "<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
        "<|calls|>",
        "<|begin|>",
        "<|think|>",
        "<|content|>",
        "<|end|>",
        "<|flush|>",
    ],
    end: "<|calls|>",
    messages: Some(Messages {
        texts: &[("<|think|>", "<|end|><|begin|>assistant"), ("<|content|>", "<|end|><|begin|>assistant")],
        end: "<|flush|>",
        calls_end: "<|calls|>",
    }),
    frame: Frame { open: "<|tool_calls|>", separator: Some(""), ..Frame::PLAIN },
    call: |writer, tool, _| {
        let id = writer.terminal("/[a-zA-Z0-9_\\-]{1,24}/");
        let head = writer.literal("<|tool_call:begin|>");
        let between = format!("<|tool_call:name|>{}<|tool_call:args|>", tool.name);
        let call = writer.json_call(&between, tool, "<|tool_call:end|>");
        format!("{head} {id} {call}")
    },
    reader: |opener| Some(Box::new(NamedJson::new(&MARKS, opener))),
    ..ToolCallSpec::PLAIN
};

const MARKS: NamedJsonMarks = NamedJsonMarks {
    begin: "<|tool_call:begin|>",
    separator: "<|tool_call:args|>",
    end: "<|tool_call:end|>",
    section_end: Some("<|calls|>"),
    name: |head| Some(head.split_once("<|tool_call:name|>")?.1.trim()),
};
