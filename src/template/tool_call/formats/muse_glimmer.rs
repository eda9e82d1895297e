//! ` to=NAME<|message|><atem:function_calls><atem:invoke name="NAME"><atem:parameter name="K">` value (Muse Glimmer)

use super::{Frame, ToolCallSpec};
use crate::tool_call::arguments::Tagging;
use crate::tool_call::harmony::{ATEM_CALLS, Protocol};
use crate::tool_call::spec::Messages;

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
    call: |writer, tool, _| {
        let name = &tool.name;
        let head = format!(" to={name}<|message|>{ATEM_CALLS}\n<atem:invoke name=\"{name}");
        let body = writer.tagged_body(tool, &TAGGING);
        format!("{} {body} {}", writer.literal(&head), writer.markup("\n</atem:function_calls>"))
    },
    ..ToolCallSpec::PLAIN
};

const TAGGING: Tagging = Tagging {
    behind_name: "\">\n",
    before_key: "<atem:parameter name=\"",
    behind_key: |_| &["\">"],
    behind_value: "</atem:parameter>\n",
    end: "</atem:invoke>",
};
