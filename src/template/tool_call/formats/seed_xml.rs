//! As `qwen_xml`, in `<seed:tool_call>` and with values on the lines of their tags (Seed-OSS)

use super::qwen_xml::{TAGGING, TAGS};
use super::{Frame, ToolCallSpec};
use crate::tool_call::arguments::Tagging;
use crate::tool_call::xml::{Tags, XmlCalls};

pub const SEED_XML: ToolCallSpec = ToolCallSpec {
    name: "seed-xml",
    signs: &[&["<seed:tool_call>", "<function=", "<parameter="]],
    openers: &["<seed:tool_call>", "<function="],
    marks: &["</seed:tool_call>"],
    end: "</seed:tool_call>",
    frame: Frame { open: "\n<function=", close: "\n</seed:tool_call>", between: "\n", ..Frame::PLAIN },
    call: |writer, tool, _| writer.tagged(tool, &SEED_TAGGING),
    reader: |opener| Some(Box::new(XmlCalls::new(&SEED_TAGS, opener))),
    ..ToolCallSpec::PLAIN
};

const SEED_TAGGING: Tagging = Tagging { behind_key: |_| &[">"], behind_value: "</parameter>\n", ..TAGGING };

const SEED_TAGS: Tags = Tags { section_end: "</seed:tool_call>", has_line_breaks: false, ..TAGS };
