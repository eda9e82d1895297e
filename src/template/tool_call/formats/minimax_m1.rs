//! `<tool_calls>`, a line `{"name": ..., "arguments": {...}}` for each call, `</tool_calls>` (MiniMax M1)

use super::plain::TOOL_CALLS_TAG;
use super::{Frame, ToolCallSpec};

pub const MINIMAX_M1: ToolCallSpec = ToolCallSpec {
    name: "minimax-m1",
    signs: &[&["<tool_calls>\n{", "</tool_calls>"], &["<tool_calls>\\n{", "</tool_calls>"]],
    frame: Frame { open: "\n", separator: Some("\n"), close: "\n</tool_calls>", ..Frame::PLAIN },
    ..TOOL_CALLS_TAG
};
