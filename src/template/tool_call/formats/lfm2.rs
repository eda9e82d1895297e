//! `<|tool_call_start|>[f(a=1)]<|tool_call_end|>` (LFM2)
//!
//! LFM2's own templates print calls only as part of the content; the list of tools is the model's sign.

use super::pythonic::PYTHONIC;
use super::{Frame, ToolCallSpec};
use crate::tool_call::pythonic::PythonicCalls;

pub const LFM2: ToolCallSpec = ToolCallSpec {
    name: "lfm2",
    signs: &[&["<|tool_call_start|>"], &["<|tool_list_start|>"], &["List of tools: ["]],
    openers: &["<|tool_call_start|>"],
    marks: &["<|tool_call_end|>"],
    end: "<|tool_call_end|>",
    bare_call: None,
    frame: Frame { open: "[", separator: Some(", "), close: "]<|tool_call_end|>", ..Frame::PLAIN },
    reader: |opener| match opener {
        "" => Some(Box::new(PythonicCalls::new(None, true))),
        _ => Some(Box::new(PythonicCalls::new(Some("<|tool_call_end|>"), false))),
    },
    ..PYTHONIC
};
