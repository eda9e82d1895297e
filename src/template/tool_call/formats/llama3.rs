//! The whole answer is `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`, which the model writes for
//! built-in tools only (Llama 3.1 on)

use super::{Frame, JsonCalls, ToolCallSpec};
use crate::tool_call::json_text::quoted;
use crate::tool_call::pythonic::PythonTag;

pub const LLAMA3: ToolCallSpec = ToolCallSpec {
    name: "llama3",
    signs: &[&["{\"name\": ", "\"parameters\": ", "ipython"]],
    openers: &["<|python_tag|>"],
    dropped: &["<|python_start|>", "<|python_end|>"],
    bare: Some('{'),
    bare_call: Some("\\s*\\{\\s*\"(?s:.*)"),
    frame: Frame { separator: Some("; "), ..Frame::PLAIN },
    call: |writer, tool, _| {
        writer.json_call(&format!("{{\"name\": {}, \"parameters\": ", quoted(&tool.name)), tool, "}")
    },
    reader: |opener| match opener {
        "" => Some(Box::new(JsonCalls::bare())),
        _ => Some(Box::new(PythonTag::new())),
    },
    ..ToolCallSpec::PLAIN
};
