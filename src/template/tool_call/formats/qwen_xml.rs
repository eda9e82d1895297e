//! `<function=NAME><parameter=K>` value `</parameter></function>`, usually in `<tool_call>` (Qwen3-Coder, Qwen 3.5)

use super::{Frame, ToolCallSpec};
use crate::tool_call::arguments::Tagging;
use crate::tool_call::xml::{Tags, XmlCalls};

pub const QWEN_XML: ToolCallSpec = ToolCallSpec {
    name: "qwen-xml",
    signs: &[&["<function=", "<parameter="]],
    openers: &["<tool_call>", "<function="],
    marks: &["</tool_call>"],
    end: "</tool_call>",
    frame: Frame { open: "\n<function=", close: "\n</tool_call>", between: "\n", ..Frame::PLAIN },
    call: |writer, tool, _| writer.tagged(tool, &TAGGING),
    reader: |opener| Some(Box::new(XmlCalls::new(&TAGS, opener))),
    ..ToolCallSpec::PLAIN
};

pub const TAGGING: Tagging = Tagging {
    behind_name: ">\n",
    before_key: "<parameter=",
    behind_key: |_| &[">\n"],
    behind_value: "\n</parameter>\n",
    end: "</function>",
};

pub const TAGS: Tags = Tags {
    call: "<function=",
    call_end: "</function>",
    parameter: "<parameter=",
    parameter_end: "</parameter>",
    head_end: ">",
    section_end: "</tool_call>",
    is_many: false,
    has_line_breaks: true,
    has_cdata: false,
    text_attribute: None,
};
