//! Formats whose calls are one value: a JSON object, a list of them, or a name with its arguments.

use super::named_json::DEEPSEEK_V31;
use super::{Frame, ToolCallSpec};
use crate::tool_call::gemma::GemmaCall;
use crate::tool_call::json_object::JsonCalls;
use crate::tool_call::json_text::quoted;
use crate::tool_call::named_json::{MistralCalls, Recipient};
use crate::tool_call::pythonic::{PythonTag, PythonicCalls};
use crate::tool_call::spec::Messages;
use crate::tool_call::writer::ValueStyle;

/// `<tool_call>` `{"name": ..., "arguments": {...}}` `</tool_call>` (Qwen 2.5 and 3, Hermes)
pub const HERMES: ToolCallSpec = ToolCallSpec {
    name: "hermes",
    signs: &[&["<tool_call>", "arguments", "tools"]],
    openers: &["<tool_call>"],
    marks: &["</tool_call>"],
    end: "</tool_call>",
    frame: Frame { open: "\n", close: "\n</tool_call>", between: "\n", ..Frame::PLAIN },
    ..ToolCallSpec::PLAIN
};

/// `<tool_call>` `{"name": ..., "arguments": {...}}` `</tool_call>`, as asked for by a system prompt: for templates that show
/// models no tools, or no way to call them. No template is known by it. DeepSeek's models often write their own calls all the same.
pub const GENERIC: ToolCallSpec = ToolCallSpec {
    name: "generic",
    signs: &[],
    unwritten_openers: DEEPSEEK_V31.openers,
    marks: &["</tool_call>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
    reader: |spec, opener| match HERMES.openers.contains(&opener) {
        true => (HERMES.reader)(spec, opener),
        false => (DEEPSEEK_V31.reader)(&DEEPSEEK_V31, opener),
    },
    ..HERMES
};

/// `<|tool_call|>[{"name": ..., "arguments": {...}}]` (Granite 3)
pub const GRANITE: ToolCallSpec = ToolCallSpec {
    name: "granite",
    signs: &[&["<|tool_call|>"]],
    openers: &["<|tool_call|>"],
    frame: Frame { open: "[", separator: Some(", "), close: "]", ..Frame::PLAIN },
    ..ToolCallSpec::PLAIN
};

/// `<|tools_prefix|>[{NAME: {...}}]<|tools_suffix|>` (Apertus)
pub const APERTUS: ToolCallSpec = ToolCallSpec {
    name: "apertus",
    signs: &[&["<|tools_prefix|>"]],
    openers: &["<|tools_prefix|>"],
    marks: &["<|tools_suffix|>"],
    end: "<|tools_suffix|>",
    frame: Frame { open: "[", separator: Some(", "), close: "]<|tools_suffix|>", ..Frame::PLAIN },
    call: |writer, tool, _| writer.json_call(&format!("{{{}: ", quoted(&tool.name)), tool, "}"),
    reader: |_, _| Box::new(JsonCalls::keyed(Some("<|tools_suffix|>"))),
    ..ToolCallSpec::PLAIN
};

/// `functools[{"name": ..., "arguments": {...}}]` (Firefunction)
pub const FUNCTOOLS: ToolCallSpec = ToolCallSpec {
    name: "functools",
    signs: &[&["functools["]],
    openers: &["functools["],
    frame: Frame { separator: Some(", "), close: "]", ..Frame::PLAIN },
    reader: |_, _| Box::new(JsonCalls::in_list(None)),
    ..ToolCallSpec::PLAIN
};

/// `<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>` (Command A)
pub const COMMAND_ACTION: ToolCallSpec = ToolCallSpec {
    name: "command-action",
    signs: &[&["<|START_ACTION|>", "tool_name"]],
    openers: &["<|START_ACTION|>"],
    marks: &["<|END_ACTION|>"],
    end: "<|END_ACTION|>",
    frame: Frame { open: "[\n    ", separator: Some(",\n    "), close: "\n]<|END_ACTION|>", ..Frame::PLAIN },
    call: |writer, tool, _| {
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
    frame: Frame { open: "\n[\n", separator: Some(",\n"), close: "\n]```", ..Frame::PLAIN },
    call: |writer, tool, _| {
        let name = quoted(&tool.name);
        let head = format!("    {{\n        \"tool_name\": {name},\n        \"parameters\": ");
        writer.json_call(&head, tool, "\n    }")
    },
    ..ToolCallSpec::PLAIN
};

/// A message of the role `function call` with `{"name": ..., "arguments": {...}}` (GigaChat 3)
pub const GIGACHAT3: ToolCallSpec = ToolCallSpec {
    name: "gigachat3",
    signs: &[&["function call", "<|role_sep|>", "<|message_sep|>"]],
    openers: &["<|message_sep|>\n\nfunction call<|role_sep|>\n"],
    marks: &["<|role_sep|>"],
    dropped: &["<|message_sep|>"],
    ..ToolCallSpec::PLAIN
};

/// `<|function_call|>{"name": ..., "arguments": {...}}` (GigaChat 3.1)
pub const GIGACHAT31: ToolCallSpec = ToolCallSpec {
    name: "gigachat3.1",
    signs: &[&["<|function_call|>"]],
    openers: &["<|function_call|>"],
    dropped: &["<|message_sep|>"],
    ..ToolCallSpec::PLAIN
};

/// The whole answer is `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`, which the model writes for
/// built-in tools only (Llama 3.1 on)
pub const LLAMA3: ToolCallSpec = ToolCallSpec {
    name: "llama3",
    signs: &[&["{\"name\": ", "\"parameters\": ", "ipython"]],
    openers: &["<|python_tag|>"],
    dropped: &["<|python_start|>", "<|python_end|>"],
    bare: Some('{'),
    bare_call: Some("\\s*\\{\\s*\"(?s:.*)"),
    frame: Frame { separator: Some("; "), ..Frame::PLAIN },
    call: |writer, tool, _| {
        writer.json_call(&format!("{{\"name\": {}, \"parameters\": ", quoted(&tool.name)), tool, "}")
    },
    reader: |_, opener| match opener {
        "" => Box::new(JsonCalls::bare()),
        _ => Box::new(PythonTag::default()),
    },
    ..ToolCallSpec::PLAIN
};

/// `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` (Mistral v2 to v7)
pub const MISTRAL: ToolCallSpec = ToolCallSpec {
    name: "mistral",
    signs: &[&["[TOOL_CALLS]"]],
    openers: &["[TOOL_CALLS]"],
    frame: Frame { open: " [", separator: Some(", "), close: "]", ..Frame::PLAIN },
    reader: |_, _| Box::new(MistralCalls::default()),
    ..ToolCallSpec::PLAIN
};

/// `[TOOL_CALLS]NAME[ARGS]{...}`, perhaps with `[CALL_ID]` (Mistral v11 on)
pub const MISTRAL_ARGS: ToolCallSpec = ToolCallSpec {
    name: "mistral-args",
    signs: &[&["[TOOL_CALLS]", "[ARGS]"]],
    openers: &["[TOOL_CALLS]"],
    marks: &["[CALL_ID]", "[ARGS]"],
    call: |writer, tool, _| {
        let id = writer.terminal("/[a-zA-Z0-9]{9}/");
        let id = format!("({} {id})?", writer.literal("[CALL_ID]"));
        let arguments = writer.json_arguments(tool);
        format!("{} {id} {} {arguments}", writer.literal(&tool.name), writer.literal("[ARGS]"))
    },
    reader: |_, _| Box::new(MistralCalls::default()),
    ..ToolCallSpec::PLAIN
};

/// `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>` (Jamba, Apriel)
pub const TOOL_CALLS_TAG: ToolCallSpec = ToolCallSpec {
    name: "tool-calls-tag",
    signs: &[&["<tool_calls>[", "\"arguments\""], &["\"<tool_calls>\"", "\\\"arguments\\\""]],
    openers: &["<tool_calls>"],
    marks: &["</tool_calls>"],
    end: "</tool_calls>",
    frame: Frame { open: "[", separator: Some(", "), close: "]</tool_calls>", ..Frame::PLAIN },
    ..ToolCallSpec::PLAIN
};

/// `<tool_calls>`, a line `{"name": ..., "arguments": {...}}` for each call, `</tool_calls>` (MiniMax M1)
pub const MINIMAX_M1: ToolCallSpec = ToolCallSpec {
    name: "minimax-m1",
    signs: &[&["<tool_calls>\n{", "</tool_calls>"], &["<tool_calls>\\n{", "</tool_calls>"]],
    frame: Frame { open: "\n", separator: Some("\n"), close: "\n</tool_calls>", ..Frame::PLAIN },
    ..TOOL_CALLS_TAG
};

/// `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>` (Nemotron Nano v2)
pub const TOOLCALL_TAG: ToolCallSpec = ToolCallSpec {
    name: "toolcall-tag",
    signs: &[&["<TOOLCALL>["]],
    openers: &["<TOOLCALL>"],
    marks: &["</TOOLCALL>"],
    end: "</TOOLCALL>",
    frame: Frame { open: "[", separator: Some(", "), close: "]</TOOLCALL>", ..Frame::PLAIN },
    ..TOOL_CALLS_TAG
};

/// `>>>NAME`, a line break and `{...}`; text stands behind `>>>all` (Functionary 3.2). The prompt ends with `>>>`.
pub const FUNCTIONARY32: ToolCallSpec = ToolCallSpec {
    name: "functionary-3.2",
    signs: &[&[">>>all\\n", "'>>>'"], &[">>>all\n", "'>>>'"]],
    openers: &[">>>"],
    prompt_opener: Some(">>>"),
    messages: Some(Messages { texts: &[("all\n", ">>>")], end: "", calls_end: "" }),
    frame: Frame { separator: Some(">>>"), ..Frame::PLAIN },
    call: |writer, tool, _| writer.json_call(&format!("{}\n", tool.name), tool, ""),
    reader: |_, _| Box::new(Recipient::default()),
    ..ToolCallSpec::PLAIN
};

/// `[f(a=1), g()]` as the whole answer (Llama 4)
///
/// Text may begin with a bracket as well. A lexeme is as long as it can be, so what tells the two apart must lie within one:
/// the bracket, the name and the parenthesis.
pub const PYTHONIC: ToolCallSpec = ToolCallSpec {
    name: "pythonic",
    signs: &[&["[func_name1(", "tools"]],
    openers: &["<|python_start|>"],
    marks: &["<|python_end|>"],
    bare: Some('['),
    bare_call: Some("\\s*\\[\\s*[A-Za-z_][A-Za-z0-9_.\\-]*\\s*\\((?s:.*)"),
    frame: Frame { lead: "[", separator: Some(", "), close: "]", ..Frame::PLAIN },
    call: |writer, tool, lead| writer.object_call(tool, ValueStyle::Python, lead, ("(", ")")),
    reader: |_, opener| match opener {
        "" => Box::new(PythonicCalls::new(None, true)),
        _ => Box::new(PythonicCalls::new(Some("<|python_end|>"), false)),
    },
    ..ToolCallSpec::PLAIN
};

/// `<|tool_call_start|>[f(a=1)]<|tool_call_end|>` (LFM2)
///
/// LFM2's own templates print calls only as part of the content; the list of tools is the model's sign.
pub const LFM2: ToolCallSpec = ToolCallSpec {
    name: "lfm2",
    signs: &[&["<|tool_call_start|>"], &["<|tool_list_start|>"], &["List of tools: ["]],
    openers: &["<|tool_call_start|>"],
    marks: &["<|tool_call_end|>"],
    end: "<|tool_call_end|>",
    bare_call: None,
    frame: Frame { open: "[", separator: Some(", "), close: "]<|tool_call_end|>", ..Frame::PLAIN },
    reader: |_, opener| match opener {
        "" => Box::new(PythonicCalls::new(None, true)),
        _ => Box::new(PythonicCalls::new(Some("<|tool_call_end|>"), false)),
    },
    ..PYTHONIC
};

/// `<|tool_call>call:NAME{key:value}<tool_call|>`, strings between `<|"|>` (Gemma 4)
pub const GEMMA: ToolCallSpec = ToolCallSpec {
    name: "gemma",
    signs: &[&["<|tool_call>", "<tool_call|>"]],
    openers: &["<|tool_call>"],
    marks: &["<tool_call|>", "<|\"|>"],
    end: "<tool_call|>",
    frame: Frame { open: "call:", close: "<tool_call|>", ..Frame::PLAIN },
    call: |writer, tool, lead| writer.object_call(tool, ValueStyle::Gemma, lead, ("{", "}")),
    reader: |_, _| Box::new(GemmaCall::default()),
    ..ToolCallSpec::PLAIN
};
