//! Formats whose calls are a name, a separator and a JSON object.

use super::{Frame, Notation, ToolCallSpec};
use crate::tool_call::named_json::NamedJsonMarks;
use crate::tool_call::spec::Messages;

/// ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}`` (DeepSeek V3.1)
pub const DEEPSEEK_V31: ToolCallSpec = ToolCallSpec {
    marks: &["<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
    frame: Frame::each("", "<｜tool▁calls▁end｜>"),
    // Of both notations: models of one write the other now and then.
    notation: Notation::Named(NamedJsonMarks {
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
            Some((name.trim(), None))
        },
    }),
    call: |_, writer, tool, _| {
        let texts = ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"];
        writer.json_call(tool, &tool.name, texts)
    },
    ..ToolCallSpec::new(
        "deepseek-v3.1",
        &[&["<｜tool▁call▁begin｜>"]],
        &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
        "<｜tool▁calls▁end｜>",
    )
};

/// ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` and a JSON code block (DeepSeek V3, R1)
pub const DEEPSEEK_V3: ToolCallSpec = ToolCallSpec {
    name: "deepseek-v3",
    signs: &[&["<｜tool▁call▁begin｜>", "```json"]],
    frame: Frame { separator: Some("\n"), ..DEEPSEEK_V31.frame },
    call: |_, writer, tool, _| {
        let before = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>";
        writer.json_call(tool, &tool.name, [before, "\n```json\n", "\n```<｜tool▁call▁end｜>"])
    },
    ..DEEPSEEK_V31
};

/// `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` (Kimi K2)
pub const KIMI: ToolCallSpec = ToolCallSpec {
    name: "kimi",
    signs: &[&["<|tool_call_begin|>", "<|tool_call_argument_begin|>"]],
    openers: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    marks: &["<|tool_call_argument_begin|>", "<|tool_call_end|>"],
    end: "<|tool_calls_section_end|>",
    frame: Frame::each("", "<|tool_calls_section_end|>"),
    notation: Notation::Named(NamedJsonMarks {
        begin: "<|tool_call_begin|>",
        separator: "<|tool_call_argument_begin|>",
        end: "<|tool_call_end|>",
        section_end: "<|tool_calls_section_end|>",
        name: |head| {
            let head = head.trim();
            let name = head.strip_prefix("functions.").unwrap_or(head);
            Some((name.rsplit_once(':').map_or(name, |(name, _)| name), None))
        },
    }),
    call: |_, writer, tool, _| {
        let head = format!("<|tool_call_begin|>functions.{}:", tool.name);
        writer.numbered(&head, "<|tool_call_argument_begin|>", "<|tool_call_end|>", tool)
    },
    ..ToolCallSpec::PLAIN
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
    notation: Notation::Named(NamedJsonMarks {
        begin: "<|tool_call:begin|>",
        separator: "<|tool_call:args|>",
        end: "<|tool_call:end|>",
        section_end: "<|calls|>",
        name: |head| Some((head.split_once("<|tool_call:name|>")?.1.trim(), None)),
    }),
    call: |_, writer, tool, _| {
        let id = writer.terminal("/[a-zA-Z0-9_\\-]{1,24}/");
        let texts = ["<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"];
        let call = writer.json_call(tool, &tool.name, texts);
        format!("{} {id} {call}", writer.literal("<|tool_call:begin|>"))
    },
    ..ToolCallSpec::PLAIN
};

/// `<function=NAME>{...}</function>` (Functionary 3.1)
pub const FUNCTION_TAG: ToolCallSpec = ToolCallSpec {
    frame: Frame { close: "</function>", ..Frame::PLAIN },
    notation: Notation::Named(NamedJsonMarks {
        begin: "",
        separator: ">",
        end: "</function>",
        section_end: "",
        name: |head| Some((head.trim(), None)),
    }),
    call: |_, writer, tool, _| writer.json_call(tool, &tool.name, ["", ">", ""]),
    ..ToolCallSpec::new("function-tag", &[&["<function=", "</function>"]], &["<function="], "</function>")
};
