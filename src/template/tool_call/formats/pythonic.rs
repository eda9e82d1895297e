//! `[f(a=1), g()]` as the whole answer (Llama 4)
//!
//! Text may begin with a bracket as well. A lexeme is as long as it can be, so what tells the two apart must lie within one:
//! the bracket, the name and the parenthesis.

use super::{Frame, ToolCallSpec};
use crate::tool_call::pythonic::PythonicCalls;
use crate::tool_call::writer::ValueStyle;

pub const PYTHONIC: ToolCallSpec = ToolCallSpec {
    name: "pythonic",
    signs: &[&["[func_name1(", "tools"]],
    openers: &["<|python_start|>"],
    marks: &["<|python_end|>"],
    bare: Some('['),
    bare_call: Some("\\s*\\[\\s*[A-Za-z_][A-Za-z0-9_.\\-]*\\s*\\((?s:.*)"),
    frame: Frame { lead: "[", separator: Some(", "), close: "]", ..Frame::PLAIN },
    call: |writer, tool, lead| writer.object_call(tool, ValueStyle::Python, lead, ("(", ")")),
    reader: |opener| match opener {
        "" => Some(Box::new(PythonicCalls::new(None, true))),
        _ => Some(Box::new(PythonicCalls::new(Some("<|python_end|>"), false))),
    },
    ..ToolCallSpec::PLAIN
};
