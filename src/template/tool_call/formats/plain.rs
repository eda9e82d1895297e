//! Formats whose calls are one value: a JSON object, a list of them, or a name with its arguments.

use super::named_json::DEEPSEEK_V31;
use super::{Frame, Notation, ToolCallSpec};
use crate::tool_call::JsonOr;
use crate::tool_call::gemma::GemmaCall;
use crate::tool_call::json_object::JsonCalls;
use crate::tool_call::json_text::quoted;
use crate::tool_call::named_json::{NamedJson, NamedJsonMarks, Recipient};
use crate::tool_call::pythonic::PythonicCalls;
use crate::tool_call::spec::Messages;
use crate::tool_call::writer::ValueStyle;

/// `<tool_call>` `{"name": ..., "arguments": {...}}` `</tool_call>` (Qwen 2.5 and 3, Hermes)
pub const HERMES: ToolCallSpec = ToolCallSpec {
    frame: Frame { open: "\n", close: "\n</tool_call>", between: "\n", ..Frame::PLAIN },
    ..ToolCallSpec::new("hermes", &[&["<tool_call>", "arguments", "tools"]], &["<tool_call>"], "</tool_call>")
};

/// `<tool_call>` `{"name": ..., "arguments": {...}}` `</tool_call>`, as asked for by a system prompt: for templates that show
/// models no tools, or no way to call them. No template is known by it. DeepSeek's models often write their own calls all the same.
pub const GENERIC: ToolCallSpec = ToolCallSpec {
    name: "generic",
    signs: &[],
    unwritten_openers: DEEPSEEK_V31.openers,
    marks: &["<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
    notation: Notation::Own(|opener| match HERMES.openers.contains(&opener) {
        true => ToolCallSpec::reader(&HERMES, opener),
        false => ToolCallSpec::reader(&DEEPSEEK_V31, opener),
    }),
    ..HERMES
};

/// `<|tool_call|>[{"name": ..., "arguments": {...}}]` (Granite 3)
pub const GRANITE: ToolCallSpec = ToolCallSpec {
    frame: Frame::LIST,
    ..ToolCallSpec::new("granite", &[&["<|tool_call|>"]], &["<|tool_call|>"], "")
};

/// `<|tools_prefix|>[{NAME: {...}}]<|tools_suffix|>` (Apertus)
pub const APERTUS: ToolCallSpec = ToolCallSpec {
    frame: Frame { close: "]<|tools_suffix|>", ..Frame::LIST },
    notation: Notation::Own(|_| Box::new(JsonCalls::keyed(Some("<|tools_suffix|>")))),
    call: |_, writer, tool, _| writer.object_call(tool, ["{", ": ", "}"]),
    ..ToolCallSpec::new("apertus", &[&["<|tools_prefix|>"]], &["<|tools_prefix|>"], "<|tools_suffix|>")
};

/// `functools[{"name": ..., "arguments": {...}}]` (Firefunction)
pub const FUNCTOOLS: ToolCallSpec = ToolCallSpec {
    frame: Frame { open: "", ..Frame::LIST },
    notation: Notation::Own(|_| Box::new(JsonCalls::in_list(None))),
    ..ToolCallSpec::new("functools", &[&["functools["]], &["functools["], "")
};

/// `<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>` (Command A)
pub const COMMAND_ACTION: ToolCallSpec = ToolCallSpec {
    name: "command-action",
    signs: &[&["<|START_ACTION|>", "tool_name"]],
    openers: &["<|START_ACTION|>"],
    end: "<|END_ACTION|>",
    frame: Frame { open: "[\n    ", separator: Some(",\n    "), close: "\n]<|END_ACTION|>", ..Frame::PLAIN },
    call: |_, writer, tool, _| {
        let between = format!("\", \"tool_name\": {}, \"parameters\": ", quoted(&tool.name));
        writer.numbered("{\"tool_call_id\": \"", &between, "}", tool)
    },
    ..ToolCallSpec::PLAIN
};

/// `Action:` and a code block of `[{"tool_name": ..., "parameters": {...}}]` (Command R and R+)
pub const COMMAND_R: ToolCallSpec = ToolCallSpec {
    name: "command-r",
    signs: &[&["Action:", "```json", "\"tool_name\": "]],
    openers: &["Action:\n```json"],
    end: "```",
    frame: Frame { open: "\n[\n", separator: Some(",\n"), close: "\n]\n```", ..Frame::PLAIN },
    call: |_, writer, tool, _| {
        let between = ",\n        \"parameters\": ";
        writer.object_call(tool, ["    {\n        \"tool_name\": ", between, "\n    }"])
    },
    ..ToolCallSpec::PLAIN
};

/// A message of the role `function call` with `{"name": ..., "arguments": {...}}` (GigaChat 3)
pub const GIGACHAT3: ToolCallSpec = ToolCallSpec {
    name: "gigachat3",
    signs: &[&["function call", "<|role_sep|>", "<|message_sep|>"]],
    openers: &["<|message_sep|>\n\nfunction call<|role_sep|>\n"],
    marks: &["<|role_sep|>"],
    ..GIGACHAT31
};

/// `<|function_call|>{"name": ..., "arguments": {...}}` (GigaChat 3.1)
pub const GIGACHAT31: ToolCallSpec = ToolCallSpec {
    dropped: &["<|message_sep|>"],
    ..ToolCallSpec::new("gigachat3.1", &[&["<|function_call|>"]], &["<|function_call|>"], "")
};

/// The whole answer is `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`, which the model writes for
/// built-in tools only (Llama 3.1 on)
pub const LLAMA3: ToolCallSpec = ToolCallSpec {
    dropped: &["<|python_start|>", "<|python_end|>"],
    bare: Some('{'),
    bare_call: Some("\\s*\\{\\s*\"(?s:.*)"),
    frame: Frame { separator: Some("; "), ..Frame::PLAIN },
    notation: Notation::Own(|opener| match opener {
        "" => Box::new(JsonCalls::bare()),
        _ => Box::new(JsonOr::new(|| Box::new(PythonicCalls::single()))),
    }),
    call: |_, writer, tool, _| writer.object_call(tool, ["{\"name\": ", ", \"parameters\": ", "}"]),
    ..ToolCallSpec::new("llama3", &[&["{\"name\": ", "\"parameters\": ", "ipython"]], &["<|python_tag|>"], "")
};

/// `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, perhaps with `"id"` (Mistral v2 to v7)
pub const MISTRAL: ToolCallSpec = ToolCallSpec {
    frame: Frame { open: " [", ..Frame::LIST },
    call: |_, writer, tool, _| {
        let call = writer.object_call(tool, ["{\"name\": ", ", \"arguments\": ", ""]);
        let (before, id) = (writer.markup(", \"id\": "), writer.terminal("/\"[a-zA-Z0-9]{9}\"/"));
        format!("{call} ({before} {id})? \"}}\"")
    },
    notation: Notation::Own(|_| Box::new(JsonOr::new(|| Box::new(NamedJson::new(&MISTRAL_MARKS, ""))))),
    ..ToolCallSpec::new("mistral", &[&["[TOOL_CALLS]"]], &["[TOOL_CALLS]"], "")
};

/// Of the later versions.
const MISTRAL_MARKS: NamedJsonMarks = NamedJsonMarks {
    begin: "",
    separator: "[ARGS]",
    end: "",
    section_end: "",
    name: |head| {
        let (name, id) = head.split_once("[CALL_ID]").unwrap_or((head, ""));
        let is_id = |id: &&str| id.len() == 9 && id.bytes().all(|c| c.is_ascii_alphanumeric());
        Some((name.trim(), Some(id.trim()).filter(is_id)))
    },
};

/// `[TOOL_CALLS]NAME[ARGS]{...}`, perhaps with `[CALL_ID]` (Mistral v11 on)
pub const MISTRAL_ARGS: ToolCallSpec = ToolCallSpec {
    name: "mistral-args",
    signs: &[&["[TOOL_CALLS]", "[ARGS]"]],
    marks: &["[CALL_ID]", "[ARGS]"],
    frame: Frame::PLAIN,
    call: |_, writer, tool, _| {
        let id = writer.terminal("/[a-zA-Z0-9]{9}/");
        let id = format!("({} {id})?", writer.literal("[CALL_ID]"));
        let arguments = writer.json_arguments(tool);
        format!("{} {id} {} {arguments}", writer.literal(&tool.name), writer.literal("[ARGS]"))
    },
    ..MISTRAL
};

/// `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>` (Jamba, Apriel)
pub const TOOL_CALLS_TAG: ToolCallSpec = ToolCallSpec {
    name: "tool-calls-tag",
    signs: &[&["<tool_calls>[", "\"arguments\""], &["\"<tool_calls>\"", "\\\"arguments\\\""]],
    openers: &["<tool_calls>"],
    end: "</tool_calls>",
    frame: Frame { close: "]</tool_calls>", ..Frame::LIST },
    ..ToolCallSpec::PLAIN
};

/// `<tool_calls>`, a line `{"name": ..., "arguments": {...}}` for each call, `</tool_calls>` (MiniMax M1)
pub const MINIMAX_M1: ToolCallSpec = ToolCallSpec {
    name: "minimax-m1",
    signs: &[&["<tool_calls>\n{", "</tool_calls>"], &["<tool_calls>\\n{", "</tool_calls>"]],
    frame: Frame::each("\n", "\n</tool_calls>"),
    ..TOOL_CALLS_TAG
};

/// `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>` (Nemotron Nano v2)
pub const TOOLCALL_TAG: ToolCallSpec = ToolCallSpec {
    frame: Frame { close: "]</TOOLCALL>", ..Frame::LIST },
    ..ToolCallSpec::new("toolcall-tag", &[&["<TOOLCALL>["]], &["<TOOLCALL>"], "</TOOLCALL>")
};

/// `>>>NAME`, a line break and `{...}`; text stands behind `>>>all` (Functionary 3.2). The prompt ends with `>>>`.
pub const FUNCTIONARY32: ToolCallSpec = ToolCallSpec {
    prompt_opener: Some(">>>"),
    messages: Some(Messages { texts: &[("all\n", ">>>")], end: "", calls_end: "" }),
    frame: Frame { separator: Some(">>>"), ..Frame::PLAIN },
    notation: Notation::Own(|_| Box::new(Recipient::default())),
    call: |_, writer, tool, _| writer.json_call(tool, &tool.name, ["", "\n", ""]),
    ..ToolCallSpec::new("functionary-3.2", &[&[">>>all\\n", "'>>>'"], &[">>>all\n", "'>>>'"]], &[">>>"], "")
};

/// `[f(a=1), g()]` as the whole answer (Llama 4)
///
/// Text may begin with a bracket as well. A lexeme is as long as it can be, so what tells the two apart must lie within one:
/// the bracket, the name and the parenthesis.
pub const PYTHONIC: ToolCallSpec = ToolCallSpec {
    marks: &["<|python_end|>"],
    bare: Some('['),
    bare_call: Some("\\s*\\[\\s*[A-Za-z_][A-Za-z0-9_.\\-]*\\s*\\((?s:.*)"),
    frame: Frame { open: "", lead: "[", ..Frame::LIST },
    notation: Notation::Own(|opener| Box::new(PythonicCalls::new(opener, "<|python_end|>"))),
    call: |_, writer, tool, lead| writer.literal_call(tool, ValueStyle::Python, lead, ("(", ")")),
    ..ToolCallSpec::new("pythonic", &[&["[func_name1(", "tools"]], &["<|python_start|>"], "")
};

/// `<|tool_call_start|>[f(a=1)]<|tool_call_end|>` (LFM2)
///
/// LFM2's own templates print calls only as part of the content; the list of tools is the model's sign.
pub const LFM2: ToolCallSpec = ToolCallSpec {
    name: "lfm2",
    signs: &[&["<|tool_call_start|>"], &["<|tool_list_start|>"], &["List of tools: ["]],
    openers: &["<|tool_call_start|>"],
    marks: &[],
    end: "<|tool_call_end|>",
    bare_call: None,
    frame: Frame { close: "]<|tool_call_end|>", ..Frame::LIST },
    notation: Notation::Own(|opener| Box::new(PythonicCalls::new(opener, "<|tool_call_end|>"))),
    ..PYTHONIC
};

/// `<|tool_call>call:NAME{key:value}<tool_call|>`, strings between `<|"|>` (Gemma 4)
pub const GEMMA: ToolCallSpec = ToolCallSpec {
    marks: &["<|\"|>"],
    frame: Frame { open: "call:", close: "<tool_call|>", ..Frame::PLAIN },
    notation: Notation::Own(|_| Box::new(GemmaCall::default())),
    call: |_, writer, tool, lead| writer.literal_call(tool, ValueStyle::Gemma, lead, ("{", "}")),
    ..ToolCallSpec::new("gemma", &[&["<|tool_call>", "<tool_call|>"]], &["<|tool_call>"], "<tool_call|>")
};
