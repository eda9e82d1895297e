//! Formats whose calls are messages with headers.

use super::{Frame, ToolCallSpec};
use crate::tool_call::harmony::{ATEM_CALLS, ATEM_TAGS, MARKUP, Protocol};
use crate::tool_call::spec::Messages;

/// `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>` (gpt-oss)
pub const HARMONY: ToolCallSpec = ToolCallSpec {
    name: "harmony",
    signs: &[&["functions.", "<|channel|>commentary"]],
    marks: MARKUP,
    protocol: Some(Protocol::Harmony),
    call: |_, writer, tool, _| {
        let name = &tool.name;
        let json = format!("({} | {})?", writer.literal(" <|constrain|>json"), writer.literal(" json"));
        let to = ["commentary", "analysis"].map(|channel| {
            let behind = writer.literal(&format!("<|channel|>{channel} to=functions.{name}"));
            format!("{behind} | {}", writer.literal(&format!(" to=functions.{name}<|channel|>{channel}")))
        });
        let arguments = writer.json_arguments(tool);
        let end = writer.literal("<|call|>");
        format!("({}) {json} {} {arguments} ({end})?", to.join(" | "), writer.literal("<|message|>"))
    },
    ..ToolCallSpec::PLAIN
};

/// ` to=NAME<|message|><atem:function_calls><atem:invoke name="NAME"><atem:parameter name="K">` value (Muse Glimmer)
pub const MUSE_GLIMMER: ToolCallSpec = ToolCallSpec {
    name: "muse-glimmer",
    signs: &[&[ATEM_CALLS]],
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
    call: |_, writer, tool, _| {
        let name = &tool.name;
        let head = format!(" to={name}<|message|>{ATEM_CALLS}\n<atem:invoke name=\"{name}");
        let body = writer.tagged_body(tool, &ATEM_TAGS.tagging);
        format!("{} {body} {}", writer.literal(&head), writer.markup("\n</atem:function_calls>"))
    },
    ..ToolCallSpec::PLAIN
};
