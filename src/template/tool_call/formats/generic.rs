//! `<tool_call>` `{"name": ..., "arguments": {...}}` `</tool_call>`, as asked for by a system prompt: for templates that show
//! models no tools, or no way to call them. No template is known by it.

use super::Notation;
use super::hermes::HERMES;

pub const GENERIC: Notation = Notation { name: "generic", signs: &[], ..HERMES };
