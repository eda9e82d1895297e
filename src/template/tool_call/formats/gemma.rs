//! `<|tool_call>call:NAME{key:value}<tool_call|>`, strings between `<|"|>` (Gemma 4)

use super::{Frame, ToolCallSpec};
use crate::tool_call::gemma::GemmaCall;
use crate::tool_call::writer::ValueStyle;

pub const GEMMA: ToolCallSpec = ToolCallSpec {
    name: "gemma",
    signs: &[&["<|tool_call>", "<tool_call|>"]],
    openers: &["<|tool_call>"],
    marks: &["<tool_call|>", "<|\"|>"],
    end: "<tool_call|>",
    frame: Frame { open: "call:", close: "<tool_call|>", ..Frame::PLAIN },
    call: |writer, tool, lead| writer.object_call(tool, ValueStyle::Gemma, lead, ("{", "}")),
    reader: |_| Some(Box::new(GemmaCall::new())),
    ..ToolCallSpec::PLAIN
};
