//! Formats with a tag for each parameter.

use super::{Frame, ToolCallSpec};
use crate::tool_call::arguments::Tagging;
use crate::tool_call::xml::{Tags, XmlCalls};

/// `<function=NAME><parameter=K>` value `</parameter></function>`, usually in `<tool_call>` (Qwen3-Coder, Qwen 3.5)
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

const TAGGING: Tagging = Tagging {
    behind_name: ">\n",
    before_key: "<parameter=",
    behind_key: |_| &[">\n"],
    behind_value: "\n</parameter>\n",
    end: "</function>",
};

const TAGS: Tags = Tags {
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

/// As `qwen_xml`, in `<seed:tool_call>` and with values on the lines of their tags (Seed-OSS)
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

/// `<function name="NAME"><param name="K">` value `</param></function>`, values with markup in CDATA (MiniCPM5)
pub const MINICPM5: ToolCallSpec = ToolCallSpec {
    name: "minicpm5",
    signs: &[&["<function name=\"", "<param name=\""]],
    openers: &["<function name=\""],
    marks: &["</function>", "<param", "</param>"],
    end: "</function>",
    frame: Frame { between: "\n", ..Frame::PLAIN },
    call: |writer, tool, _| writer.tagged(tool, &MINICPM_TAGGING),
    reader: |opener| Some(Box::new(XmlCalls::new(&MINICPM_TAGS, opener))),
    ..ToolCallSpec::PLAIN
};

const MINICPM_TAGGING: Tagging = Tagging {
    behind_name: "\">",
    before_key: "<param name=\"",
    behind_key: |_| &["\">"],
    behind_value: "</param>",
    end: "</function>",
};

const MINICPM_TAGS: Tags = Tags {
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
