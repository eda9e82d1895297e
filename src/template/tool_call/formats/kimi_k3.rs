//! `<|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="K" type="string"<|sep|>` value `<|close|>argument<|sep|>` in
//! `<|open|>tools<|sep|>` (Kimi K3)

use super::{Frame, ToolCallSpec};
use crate::tool_call::arguments::Tagging;
use crate::tool_call::spec::Messages;
use crate::tool_call::xml::{Tags, XmlCalls};

pub const KIMI_K3: ToolCallSpec = ToolCallSpec {
    name: "kimi-k3",
    signs: &[&["<|open|>", "<|close|>", "<|sep|>"]],
    openers: &["<|open|>tools<|sep|>"],
    marks: &["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    end: "<|close|>tools<|sep|>",
    messages: Some(Messages {
        texts: &[
            ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
            ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        ],
        end: "<|close|>message<|sep|>",
        calls_end: "<|close|>message<|sep|>",
    }),
    frame: Frame {
        open: "<|open|>tools<|sep|><|open|>call tool=\"",
        separator: Some("<|open|>call tool=\""),
        close: "<|close|>tools<|sep|>",
        ..Frame::PLAIN
    },
    call: |writer, tool, _| {
        let number = writer.terminal("/[1-9][0-9]{0,3}/");
        let head = writer.literal(&format!("{}\" index=\"", tool.name));
        let body = writer.tagged_body(tool, &TAGGING);
        format!("{head} {number} {} {body}", writer.literal("\"<|sep|>"))
    },
    reader: |opener| Some(Box::new(XmlCalls::new(&TAGS, opener))),
    ..ToolCallSpec::PLAIN
};

const TAGGING: Tagging = Tagging {
    behind_name: "",
    before_key: "<|open|>argument key=\"",
    behind_key: |types| {
        if types.is_text() {
            return &["\" type=\"string\"<|sep|>"];
        }
        &[
            "\" type=\"number\"<|sep|>",
            "\" type=\"boolean\"<|sep|>",
            "\" type=\"object\"<|sep|>",
            "\" type=\"array\"<|sep|>",
            "\" type=\"null\"<|sep|>",
        ]
    },
    behind_value: "<|close|>argument<|sep|>",
    end: "<|close|>call<|sep|>",
};

const TAGS: Tags = Tags {
    call: "<|open|>call tool=\"",
    call_end: "<|close|>call<|sep|>",
    parameter: "<|open|>argument key=\"",
    parameter_end: "<|close|>argument<|sep|>",
    head_end: "<|sep|>",
    section_end: "<|close|>tools<|sep|>",
    is_many: true,
    has_line_breaks: false,
    has_cdata: false,
    text_attribute: Some("type=\"string\""),
};
