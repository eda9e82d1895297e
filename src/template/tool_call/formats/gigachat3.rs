//! A message of the role `function call` with `{"name": ..., "arguments": {...}}` (GigaChat 3)

use super::{Frame, ToolCallSpec, named_object, objects};

pub const GIGACHAT3: ToolCallSpec = ToolCallSpec {
    name: "gigachat3",
    signs: &[&["function call", "<|role_sep|>", "<|message_sep|>"]],
    openers: &["<|message_sep|>\n\nfunction call<|role_sep|>\n"],
    marks: &["<|role_sep|>"],
    dropped: &["<|message_sep|>"],
    call: named_object,
    reader: |_| objects(None),
    frame: Frame::PLAIN,
    ..ToolCallSpec::PLAIN
};
