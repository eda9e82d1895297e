//! Formats with keys and values in turn, each in tags of its own.

use super::{Frame, ToolCallSpec};
use crate::tool_call::arguments::Tagging;
use crate::tool_call::glm::{GlmCall, GlmMarks};

/// `<tool_call>NAME` with `<arg_key>` and `<arg_value>` (GLM 4.5 on, Ling 3)
pub const GLM: ToolCallSpec = ToolCallSpec {
    name: "glm",
    signs: &[&["<arg_key>", "<arg_value>"]],
    openers: &["<tool_call>"],
    marks: &["</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    end: "</tool_call>",
    frame: Frame { between: "\n", ..Frame::PLAIN },
    call: |writer, tool, _| writer.tagged(tool, &MARKS.tagging),
    reader: |_, opener| Box::new(GlmCall::new(&MARKS, opener)),
    ..ToolCallSpec::PLAIN
};

const MARKS: GlmMarks = GlmMarks {
    call: "",
    separator: None,
    key_end: "</arg_key>",
    value: "<arg_value>",
    section_end: "",
    tagging: Tagging {
        behind_name: "",
        before_key: "<arg_key>",
        behind_key: |_| &["</arg_key>\n<arg_value>"],
        behind_value: "</arg_value>",
        end: "</tool_call>",
    },
};

/// `<tool_calls:opensource><tool_call:opensource>NAME<tool_sep:opensource>`, then keys and values as in `glm`, with the same
/// suffix on every tag (Hy3)
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
    call: |writer, tool, _| writer.tagged(tool, &HY3_MARKS.tagging),
    reader: |_, opener| Box::new(GlmCall::new(&HY3_MARKS, opener)),
    ..ToolCallSpec::PLAIN
};

const HY3_MARKS: GlmMarks = GlmMarks {
    call: "<tool_call:opensource>",
    separator: Some("<tool_sep:opensource>"),
    key_end: "</arg_key:opensource>",
    value: "<arg_value:opensource>",
    section_end: "</tool_calls:opensource>",
    tagging: Tagging {
        behind_name: "<tool_sep:opensource>",
        before_key: "<arg_key:opensource>",
        behind_key: |_| &["</arg_key:opensource>\n<arg_value:opensource>"],
        behind_value: "</arg_value:opensource>",
        end: "</tool_call:opensource>",
    },
};
