//! `<tool_call>NAME` with `<arg_key>` and `<arg_value>` (GLM 4.5 on, Ling 3)

use super::{Frame, ToolCallSpec};
use crate::tool_call::arguments::Tagging;
use crate::tool_call::glm::{GlmCall, GlmMarks};

pub const GLM: ToolCallSpec = ToolCallSpec {
    name: "glm",
    signs: &[&["<arg_key>", "<arg_value>"]],
    openers: &["<tool_call>"],
    marks: &["</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    end: "</tool_call>",
    frame: Frame { between: "\n", ..Frame::PLAIN },
    call: |writer, tool, _| writer.tagged(tool, &TAGGING),
    reader: |opener| Some(Box::new(GlmCall::new(&MARKS, opener))),
    ..ToolCallSpec::PLAIN
};

const TAGGING: Tagging = Tagging {
    behind_name: "\n",
    before_key: "<arg_key>",
    behind_key: |_| &["</arg_key>\n<arg_value>"],
    behind_value: "</arg_value>\n",
    end: "</tool_call>",
};

const MARKS: GlmMarks = GlmMarks {
    call: None,
    separator: None,
    key: "<arg_key>",
    key_end: "</arg_key>",
    value: "<arg_value>",
    value_end: "</arg_value>",
    close: "</tool_call>",
    section_end: None,
};
