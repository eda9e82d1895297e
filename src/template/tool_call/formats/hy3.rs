//! `<tool_calls:opensource><tool_call:opensource>NAME<tool_sep:opensource>`, then keys and values as in `glm`, with the same
//! suffix on every tag (Hy3)

use super::{Frame, ToolCallSpec};
use crate::tool_call::arguments::Tagging;
use crate::tool_call::glm::{GlmCall, GlmMarks};

pub const HY3: ToolCallSpec = ToolCallSpec {
    name: "hy3",
    // Its template puts the tags together.
    signs: &[&["<tool_sep{}>", ":opensource"], &["<tool_sep:opensource>"]],
    openers: &["<tool_calls:opensource>", "<tool_call:opensource>"],
    marks: &[
        "</tool_calls:opensource>",
        "</tool_call:opensource>",
        "<tool_sep:opensource>",
        "<arg_key:opensource>",
        "</arg_key:opensource>",
        "<arg_value:opensource>",
        "</arg_value:opensource>",
    ],
    end: "</tool_calls:opensource>",
    frame: Frame {
        open: "\n<tool_call:opensource>",
        separator: Some("\n<tool_call:opensource>"),
        close: "\n</tool_calls:opensource>",
        ..Frame::PLAIN
    },
    call: |writer, tool, _| writer.tagged(tool, &TAGGING),
    reader: |opener| Some(Box::new(GlmCall::new(&MARKS, opener))),
    ..ToolCallSpec::PLAIN
};

const TAGGING: Tagging = Tagging {
    behind_name: "<tool_sep:opensource>\n",
    before_key: "<arg_key:opensource>",
    behind_key: |_| &["</arg_key:opensource>\n<arg_value:opensource>"],
    behind_value: "</arg_value:opensource>\n",
    end: "</tool_call:opensource>",
};

const MARKS: GlmMarks = GlmMarks {
    call: Some("<tool_call:opensource>"),
    separator: Some("<tool_sep:opensource>"),
    key: "<arg_key:opensource>",
    key_end: "</arg_key:opensource>",
    value: "<arg_value:opensource>",
    value_end: "</arg_value:opensource>",
    close: "</tool_call:opensource>",
    section_end: Some("</tool_calls:opensource>"),
};
