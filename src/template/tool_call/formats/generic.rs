//! `<tool_call>` `{"name": ..., "arguments": {...}}` `</tool_call>`, as asked for by a system prompt: for templates that show
//! models no tools, or no way to call them. No template is known by it. DeepSeek's models often write their own calls all the same.

use super::ToolCallSpec;
use super::deepseek_v31::DEEPSEEK_V31;
use super::plain::HERMES;

pub const GENERIC: ToolCallSpec = ToolCallSpec {
    name: "generic",
    signs: &[],
    unwritten_openers: DEEPSEEK_V31.openers,
    marks: &["</tool_call>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
    reader: |opener| match HERMES.openers.contains(&opener) {
        true => (HERMES.reader)(opener),
        false => (DEEPSEEK_V31.reader)(opener),
    },
    ..HERMES
};
