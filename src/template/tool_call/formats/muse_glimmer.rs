//! ` to=NAME<|message|><atem:function_calls><atem:invoke name="NAME"><atem:parameter name="K">` value (Muse Glimmer)

use super::{Frame, Notation};
use crate::tool_call::Reader;
use crate::tool_call::grammar::{Messages, Tagging};
use crate::tool_call::harmony::Protocol;
use crate::tool_call::xml::{Tags, XmlCalls};

pub const SECTION: &str = "<atem:function_calls>";

pub const MUSE_GLIMMER: Notation = Notation {
    name: "muse-glimmer",
    signs: &[&[SECTION]],
    marks: &["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"],
    protocol: Some(Protocol::Atem),
    messages: Some(Messages {
        texts: &[
            (" to=self<|message|>", "<|eom|><|start|>assistant"),
            (" to=user<|message|>", "<|eom|><|start|>assistant"),
        ],
        end: "<|eot|>",
        calls_end: "<|eot|>",
    }),
    frame: Frame { separator: Some("<|eom|><|start|>assistant"), ..Frame::PLAIN },
    call: |writer, tool, _| {
        let name = &tool.name;
        let head = format!(" to={name}<|message|>{SECTION}\n<atem:invoke name=\"{name}");
        let body = writer.tagged_body(tool, &TAGGING);
        format!("{} {body} {}", writer.literal(&head), writer.literal("\n</atem:function_calls>"))
    },
    ..Notation::PLAIN
};

/// Reads what stands behind the section's marker.
pub fn reader() -> Option<Box<dyn Reader>> {
    Some(Box::new(XmlCalls::new(&TAGS, SECTION)))
}

const TAGGING: Tagging = Tagging {
    behind_name: "\">\n",
    before_key: "<atem:parameter name=\"",
    behind_key: |_| &["\">"],
    behind_value: "</atem:parameter>\n",
    end: "</atem:invoke>",
};

const TAGS: Tags = Tags {
    call: "<atem:invoke name=\"",
    call_end: "</atem:invoke>",
    parameter: "<atem:parameter name=\"",
    parameter_end: "</atem:parameter>",
    head_end: ">",
    section_end: "</atem:function_calls>",
    is_many: true,
    has_line_breaks: false,
    has_cdata: false,
    text_attribute: None,
};
