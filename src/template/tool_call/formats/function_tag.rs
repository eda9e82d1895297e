//! `<function=NAME>{...}</function>` (Functionary 3.1)

use super::{Frame, ToolCallSpec};
use crate::tool_call::named_json::{NamedJson, NamedJsonMarks};

pub const FUNCTION_TAG: ToolCallSpec = ToolCallSpec {
    name: "function-tag",
    signs: &[&["<function=", "</function>"]],
    openers: &["<function="],
    end: "</function>",
    frame: Frame { close: "</function>", ..Frame::PLAIN },
    call: |writer, tool, _| writer.json_call(&format!("{}>", tool.name), tool, ""),
    reader: |opener| Some(Box::new(NamedJson::new(&MARKS, opener))),
    ..ToolCallSpec::PLAIN
};

const MARKS: NamedJsonMarks = NamedJsonMarks {
    begin: "",
    separator: ">",
    end: "</function>",
    section_end: None,
    name: |head| Some(head.trim()),
};
