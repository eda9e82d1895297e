//! `<tool_call>` `{"name": ..., "arguments": {...}}` `</tool_call>`, as asked for by a system prompt: for templates that show
//! models no tools, or no way to call them. No template is known by it.

use super::ToolCallSpec;
use super::hermes::HERMES;

pub const GENERIC: ToolCallSpec = ToolCallSpec { name: "generic", signs: &[], ..HERMES };
