//! `<tool_call><invoke name="NAME"><K>` value `</K></invoke></tool_call>`, the token `]<]minimax[>[` in front of every tag
//! (MiniMax M3)

use super::{Frame, ToolCallSpec};
use crate::tool_call::minimax_m3::{M3Calls, TOKEN};

pub const MINIMAX_M3: ToolCallSpec = ToolCallSpec {
    name: "minimax-m3",
    signs: &[&[TOKEN, "<invoke name="]],
    openers: &["]<]minimax[>[<tool_call>"],
    marks: &[TOKEN],
    end: "]<]minimax[>[</tool_call>",
    frame: Frame {
        open: "\n]<]minimax[>[<invoke name=\"",
        separator: Some("\n]<]minimax[>[<invoke name=\""),
        close: "\n]<]minimax[>[</tool_call>",
        ..Frame::PLAIN
    },
    call: |writer, tool, _| {
        let head = writer.literal(&format!("{}\">", tool.name));
        let members = writer.elements(&tool.parameters, TOKEN);
        format!("{head} {members} {}", writer.literal("]<]minimax[>[</invoke>"))
    },
    reader: |_| Some(Box::new(M3Calls::new())),
    ..ToolCallSpec::PLAIN
};
