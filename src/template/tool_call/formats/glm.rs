//! Formats with keys and values in turn, each in tags of its own.

use super::{Frame, Notation, ToolCallSpec};
use crate::tool_call::arguments::Tagging;
use crate::tool_call::glm::GlmMarks;

/// `<tool_call>NAME` with `<arg_key>` and `<arg_value>` (GLM 4.5 on, Ling 3)
pub const GLM: ToolCallSpec = ToolCallSpec {
    marks: &["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    frame: Frame { between: "\n", ..Frame::PLAIN },
    notation: Notation::Pairs(GlmMarks {
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
    }),
    ..ToolCallSpec::new("glm", &[&["<arg_key>", "<arg_value>"]], &["<tool_call>"], "</tool_call>")
};

/// `<tool_calls:opensource><tool_call:opensource>NAME<tool_sep:opensource>`, then keys and values as in `glm`, with the same
/// suffix on every tag (Hy3)
pub const HY3: ToolCallSpec = ToolCallSpec {
    name: "hy3",
    // Its template puts the tags together.
    signs: &[&["<tool_sep{}>", ":opensource"], &["<tool_sep:opensource>"]],
    openers: &["<tool_calls:opensource>", "<tool_call:opensource>"],
    marks: &[
        "</tool_call:opensource>",
        "<tool_sep:opensource>",
        "<arg_key:opensource>",
        "</arg_key:opensource>",
        "<arg_value:opensource>",
        "</arg_value:opensource>",
    ],
    end: "</tool_calls:opensource>",
    frame: Frame::each("\n<tool_call:opensource>", "\n</tool_calls:opensource>"),
    notation: Notation::Pairs(GlmMarks {
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
    }),
    ..ToolCallSpec::PLAIN
};
