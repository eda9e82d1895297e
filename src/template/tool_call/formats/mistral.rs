//! `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` (Mistral v2 to v7)

use super::{Frame, ToolCallSpec, named_object};
use crate::tool_call::named_json::MistralCalls;

pub const MISTRAL: ToolCallSpec = ToolCallSpec {
    name: "mistral",
    signs: &[&["[TOOL_CALLS]"]],
    openers: &["[TOOL_CALLS]"],
    frame: Frame { open: " [", separator: Some(", "), close: "]", ..Frame::PLAIN },
    call: named_object,
    reader: |_| Some(Box::new(MistralCalls::new())),
    ..ToolCallSpec::PLAIN
};
