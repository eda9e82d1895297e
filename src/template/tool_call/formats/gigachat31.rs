//! `<|function_call|>{"name": ..., "arguments": {...}}` (GigaChat 3.1)

use super::{ToolCallSpec, named_object, objects};

pub const GIGACHAT31: ToolCallSpec = ToolCallSpec {
    name: "gigachat3.1",
    signs: &[&["<|function_call|>"]],
    openers: &["<|function_call|>"],
    dropped: &["<|message_sep|>"],
    call: named_object,
    reader: |_| objects(None),
    ..ToolCallSpec::PLAIN
};
