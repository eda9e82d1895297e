//! `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>` (gpt-oss)

use super::ToolCallSpec;
use crate::tool_call::harmony::{MARKUP, Protocol};

pub const HARMONY: ToolCallSpec = ToolCallSpec {
    name: "harmony",
    signs: &[&["functions.", "<|channel|>commentary"]],
    marks: MARKUP,
    protocol: Some(Protocol::Harmony),
    call: |writer, tool, _| {
        let name = &tool.name;
        let json = format!("({} | {})?", writer.literal(" <|constrain|>json"), writer.literal(" json"));
        let to = format!(
            "({} | {})",
            writer.literal(&format!("<|channel|>commentary to=functions.{name}")),
            writer.literal(&format!(" to=functions.{name}<|channel|>commentary")),
        );
        let arguments = writer.json_arguments(tool);
        let end = writer.literal("<|call|>");
        format!("{to} {json} {} {arguments} ({end})?", writer.literal("<|message|>"))
    },
    ..ToolCallSpec::PLAIN
};
