//! As `deepseek_v32`, in `<｜DSML｜tool_calls>` (DeepSeek V4)

use super::deepseek_v32::{DEEPSEEK_V32, TAGS};
use super::{Frame, ToolCallSpec};
use crate::tool_call::xml::{Tags, XmlCalls};

pub const DEEPSEEK_V4: ToolCallSpec = ToolCallSpec {
    name: "deepseek-v4",
    signs: &[&["｜DSML｜", "tool_calls>"]],
    openers: &["<｜DSML｜tool_calls>"],
    end: "</｜DSML｜tool_calls>",
    frame: Frame { close: "\n</｜DSML｜tool_calls>", ..DEEPSEEK_V32.frame },
    reader: |opener| Some(Box::new(XmlCalls::new(&V4_TAGS, opener))),
    ..DEEPSEEK_V32
};

const V4_TAGS: Tags = Tags { section_end: "</｜DSML｜tool_calls>", ..TAGS };
