//! `[TOOL_CALLS]NAME[ARGS]{...}`, perhaps with `[CALL_ID]` (Mistral v11 on)

use super::ToolCallSpec;
use crate::tool_call::named_json::MistralCalls;

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
    reader: |_| Some(Box::new(MistralCalls::new())),
    ..ToolCallSpec::PLAIN
};
