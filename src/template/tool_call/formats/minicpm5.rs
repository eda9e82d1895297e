//! `<function name="NAME"><param name="K">` value `</param></function>`, values with markup in CDATA (MiniCPM5)

use super::{Frame, ToolCallSpec};
use crate::tool_call::arguments::Tagging;
use crate::tool_call::xml::{Tags, XmlCalls};

pub const MINICPM5: ToolCallSpec = ToolCallSpec {
    name: "minicpm5",
    signs: &[&["<function name=\"", "<param name=\""]],
    openers: &["<function name=\""],
    marks: &["</function>", "<param", "</param>"],
    end: "</function>",
    frame: Frame { between: "\n", ..Frame::PLAIN },
    call: |writer, tool, _| writer.tagged(tool, &TAGGING),
    reader: |opener| Some(Box::new(XmlCalls::new(&TAGS, opener))),
    ..ToolCallSpec::PLAIN
};

const TAGGING: Tagging = Tagging {
    behind_name: "\">",
    before_key: "<param name=\"",
    behind_key: |_| &["\">"],
    behind_value: "</param>",
    end: "</function>",
};

const TAGS: Tags = Tags {
    call: "<function name=\"",
    call_end: "</function>",
    parameter: "<param name=\"",
    parameter_end: "</param>",
    head_end: ">",
    section_end: "",
    is_many: false,
    has_line_breaks: false,
    has_cdata: true,
    text_attribute: None,
};
