//! Formats whose calls are a name, a separator and a JSON object.

use super::{Frame, ToolCallSpec};
use crate::tool_call::named_json::{NamedJson, NamedJsonMarks};
use crate::tool_call::spec::Messages;

/// ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}`` (DeepSeek V3.1)
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
    reader: |_, opener| Box::new(NamedJson::new(&DEEPSEEK_MARKS, opener)),
    ..ToolCallSpec::PLAIN
};

/// Of both notations: models of one write the other now and then.
const DEEPSEEK_MARKS: NamedJsonMarks = NamedJsonMarks {
    begin: "<｜tool▁call▁begin｜>",
    separator: "{",
    end: "<｜tool▁call▁end｜>",
    section_end: "<｜tool▁calls▁end｜>",
    name: |head| {
        let (before, after) = head.split_once("<｜tool▁sep｜>")?;
        let name = match after.trim() {
            "" => before,
            code => code.strip_suffix("```json").or_else(|| code.strip_suffix("```"))?,
        };
        Some(name.trim())
    },
};

/// ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` and a JSON code block (DeepSeek V3, R1)
pub const DEEPSEEK_V3: ToolCallSpec = ToolCallSpec {
    name: "deepseek-v3",
    signs: &[&["<｜tool▁call▁begin｜>", "```json"]],
    frame: Frame { separator: Some("\n"), close: "<｜tool▁calls▁end｜>", ..Frame::PLAIN },
    call: |writer, tool, _| {
        let head = format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n", tool.name);
        writer.json_call(&head, tool, "\n```<｜tool▁call▁end｜>")
    },
    ..DEEPSEEK_V31
};

/// `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` (Kimi K2)
pub const KIMI: ToolCallSpec = ToolCallSpec {
    name: "kimi",
    signs: &[&["<|tool_call_begin|>", "<|tool_call_argument_begin|>"]],
    openers: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    marks: &["<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"],
    end: "<|tool_calls_section_end|>",
    frame: Frame { separator: Some(""), close: "<|tool_calls_section_end|>", ..Frame::PLAIN },
    call: |writer, tool, _| {
        let head = format!("<|tool_call_begin|>functions.{}:", tool.name);
        writer.numbered(&head, "<|tool_call_argument_begin|>", "<|tool_call_end|>", tool)
    },
    reader: |_, opener| Box::new(NamedJson::new(&KIMI_MARKS, opener)),
    ..ToolCallSpec::PLAIN
};

const KIMI_MARKS: NamedJsonMarks = NamedJsonMarks {
    begin: "<|tool_call_begin|>",
    separator: "<|tool_call_argument_begin|>",
    end: "<|tool_call_end|>",
    section_end: "<|tool_calls_section_end|>",
    name: |head| {
        let head = head.trim();
        let name = head.strip_prefix("functions.").unwrap_or(head);
        Some(name.rsplit_once(':').map_or(name, |(name, _)| name))
    },
};

/// `<|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>` (Solar Open)
pub const SOLAR_OPEN: ToolCallSpec = ToolCallSpec {
    name: "solar-open",
    signs: &[&["<|tool_call:begin|>", "<|tool_call:args|>"]],
    openers: &["<|tool_calls|>", "<|tool_call:begin|>"],
    marks: &[
        "<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
        "<|calls|>",
        "<|begin|>",
        "<|think|>",
        "<|content|>",
        "<|end|>",
        "<|flush|>",
    ],
    end: "<|calls|>",
    messages: Some(Messages {
        texts: &[("<|think|>", "<|end|><|begin|>assistant"), ("<|content|>", "<|end|><|begin|>assistant")],
        end: "<|flush|>",
        calls_end: "<|calls|>",
    }),
    frame: Frame { open: "<|tool_calls|>", separator: Some(""), ..Frame::PLAIN },
    call: |writer, tool, _| {
        let id = writer.terminal("/[a-zA-Z0-9_\\-]{1,24}/");
        let head = writer.literal("<|tool_call:begin|>");
        let between = format!("<|tool_call:name|>{}<|tool_call:args|>", tool.name);
        let call = writer.json_call(&between, tool, "<|tool_call:end|>");
        format!("{head} {id} {call}")
    },
    reader: |_, opener| Box::new(NamedJson::new(&SOLAR_MARKS, opener)),
    ..ToolCallSpec::PLAIN
};

const SOLAR_MARKS: NamedJsonMarks = NamedJsonMarks {
    begin: "<|tool_call:begin|>",
    separator: "<|tool_call:args|>",
    end: "<|tool_call:end|>",
    section_end: "<|calls|>",
    name: |head| Some(head.split_once("<|tool_call:name|>")?.1.trim()),
};

/// `<function=NAME>{...}</function>` (Functionary 3.1)
pub const FUNCTION_TAG: ToolCallSpec = ToolCallSpec {
    name: "function-tag",
    signs: &[&["<function=", "</function>"]],
    openers: &["<function="],
    end: "</function>",
    frame: Frame { close: "</function>", ..Frame::PLAIN },
    call: |writer, tool, _| writer.json_call(&format!("{}>", tool.name), tool, ""),
    reader: |_, opener| Box::new(NamedJson::new(&FUNCTION_MARKS, opener)),
    ..ToolCallSpec::PLAIN
};

const FUNCTION_MARKS: NamedJsonMarks = NamedJsonMarks {
    begin: "",
    separator: ">",
    end: "</function>",
    section_end: "",
    name: |head| Some(head.trim()),
};
