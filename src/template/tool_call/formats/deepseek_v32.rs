//! `<｜DSML｜function_calls><｜DSML｜invoke name="NAME"><｜DSML｜parameter name="K" string="true">` value (DeepSeek V3.2)

use super::{Frame, ToolCallSpec};
use crate::tool_call::arguments::Tagging;
use crate::tool_call::xml::{Tags, XmlCalls};

pub const DEEPSEEK_V32: ToolCallSpec = ToolCallSpec {
    name: "deepseek-v3.2",
    signs: &[&["｜DSML｜", "function_calls>"]],
    openers: &["<｜DSML｜function_calls>"],
    marks: &["｜DSML｜"],
    end: "</｜DSML｜function_calls>",
    frame: Frame {
        open: "\n<｜DSML｜invoke name=\"",
        separator: Some("\n<｜DSML｜invoke name=\""),
        close: "\n</｜DSML｜function_calls>",
        ..Frame::PLAIN
    },
    call: |writer, tool, _| writer.tagged(tool, &TAGGING),
    reader: |opener| Some(Box::new(XmlCalls::new(&TAGS, opener))),
    ..ToolCallSpec::PLAIN
};

const TAGGING: Tagging = Tagging {
    behind_name: "\">\n",
    before_key: "<｜DSML｜parameter name=\"",
    behind_key: |types| if types.is_text() { &["\" string=\"true\">"] } else { &["\" string=\"false\">"] },
    behind_value: "</｜DSML｜parameter>\n",
    end: "</｜DSML｜invoke>",
};

pub const TAGS: Tags = Tags {
    call: "<｜DSML｜invoke name=\"",
    call_end: "</｜DSML｜invoke>",
    parameter: "<｜DSML｜parameter name=\"",
    parameter_end: "</｜DSML｜parameter>",
    head_end: ">",
    section_end: "</｜DSML｜function_calls>",
    is_many: true,
    has_line_breaks: false,
    has_cdata: false,
    text_attribute: Some("string=\"true\""),
};
