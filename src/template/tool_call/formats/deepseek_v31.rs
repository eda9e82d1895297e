//! ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}`` (DeepSeek V3.1)

use super::{Frame, ToolCallSpec};
use crate::tool_call::named_json::{NamedJson, NamedJsonMarks};

pub const DEEPSEEK_V31: ToolCallSpec = ToolCallSpec {
    name: "deepseek-v3.1",
    signs: &[&["<｜tool▁call▁begin｜>"]],
    openers: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    marks: &["<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
    end: "<｜tool▁calls▁end｜>",
    frame: Frame { separator: Some(""), close: "<｜tool▁calls▁end｜>", ..Frame::PLAIN },
    call: |writer, tool, _| {
        let head = format!("<｜tool▁call▁begin｜>{}<｜tool▁sep｜>", tool.name);
        writer.json_call(&head, tool, "<｜tool▁call▁end｜>")
    },
    reader: |opener| Some(Box::new(NamedJson::new(&MARKS, opener))),
    ..ToolCallSpec::PLAIN
};

/// Of both notations: models of one write the other now and then.
const MARKS: NamedJsonMarks = NamedJsonMarks {
    begin: "<｜tool▁call▁begin｜>",
    separator: "{",
    end: "<｜tool▁call▁end｜>",
    section_end: Some("<｜tool▁calls▁end｜>"),
    name: |head| {
        let (before, after) = head.split_once("<｜tool▁sep｜>")?;
        let name = match after.trim() {
            "" => before,
            code => code.strip_suffix("```json").or_else(|| code.strip_suffix("```"))?,
        };
        Some(name.trim())
    },
};
