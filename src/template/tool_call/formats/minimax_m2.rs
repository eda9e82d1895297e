//! `<minimax:tool_call><invoke name="NAME"><parameter name="K">` value `</parameter></invoke></minimax:tool_call>` (MiniMax M2)

use super::{Frame, ToolCallSpec};
use crate::tool_call::arguments::Tagging;
use crate::tool_call::xml::{Tags, XmlCalls};

pub const MINIMAX_M2: ToolCallSpec = ToolCallSpec {
    name: "minimax-m2",
    signs: &[&["<minimax:tool_call>", "<invoke name="]],
    openers: &["<minimax:tool_call>"],
    marks: &["</minimax:tool_call>"],
    end: "</minimax:tool_call>",
    frame: Frame {
        open: "\n<invoke name=\"",
        separator: Some("\n<invoke name=\""),
        close: "\n</minimax:tool_call>",
        ..Frame::PLAIN
    },
    call: |writer, tool, _| writer.tagged(tool, &TAGGING),
    reader: |opener| Some(Box::new(XmlCalls::new(&TAGS, opener))),
    ..ToolCallSpec::PLAIN
};

pub const TAGGING: Tagging = Tagging {
    behind_name: "\">\n",
    before_key: "<parameter name=\"",
    behind_key: |_| &["\">"],
    behind_value: "</parameter>\n",
    end: "</invoke>",
};

pub const TAGS: Tags = Tags {
    call: "<invoke name=\"",
    call_end: "</invoke>",
    parameter: "<parameter name=\"",
    parameter_end: "</parameter>",
    head_end: ">",
    section_end: "</minimax:tool_call>",
    is_many: true,
    has_line_breaks: false,
    has_cdata: false,
    text_attribute: None,
};
