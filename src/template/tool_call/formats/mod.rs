//! The tool-call formats, a file each. To add one, add a file here and a row to the table in `format`.

use super::json_object::JsonCalls;
use super::spec::{Frame, ToolCallSpec};
use super::writer::Writer;
use super::{CallParser, ToolDefinition};

pub mod apertus;
pub mod command_action;
pub mod command_r;
pub mod deepseek_v3;
pub mod deepseek_v31;
pub mod deepseek_v32;
pub mod deepseek_v4;
pub mod function_tag;
pub mod functionary32;
pub mod functools;
pub mod gemma;
pub mod generic;
pub mod gigachat3;
pub mod gigachat31;
pub mod glm;
pub mod granite;
pub mod harmony;
pub mod hermes;
pub mod hy3;
pub mod kimi;
pub mod kimi_k3;
pub mod lfm2;
pub mod llama3;
pub mod minicpm5;
pub mod minimax_m1;
pub mod minimax_m2;
pub mod minimax_m3;
pub mod mistral;
pub mod mistral_args;
pub mod muse_glimmer;
pub mod pythonic;
pub mod qwen_xml;
pub mod seed_xml;
pub mod solar_open;
pub mod tool_calls_tag;
pub mod toolcall_tag;

/// `{"name": NAME, "arguments": {...}}`
fn named_object(writer: &mut Writer<'_>, tool: &ToolDefinition, _lead: &str) -> String {
    let head = format!("{{\"name\": {}, \"arguments\": ", super::json_text::quoted(&tool.name));
    writer.json_call(&head, tool, "}")
}

/// A reader of call objects that a marker ends.
fn objects(close: Option<&'static str>) -> Option<Box<dyn CallParser>> {
    Some(Box::new(JsonCalls::new(close)))
}
