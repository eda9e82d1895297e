//! The tool-call formats, a constant each. To add one, add a constant here, with a file of its own if it has more than that, and a row to
//! the table in `format`.

use super::json_object::JsonCalls;
use super::spec::{Frame, ToolCallSpec};
use super::writer::Writer;
use super::{CallParser, ToolDefinition};

pub mod deepseek_v3;
pub mod deepseek_v31;
pub mod deepseek_v32;
pub mod deepseek_v4;
pub mod gemma;
pub mod generic;
pub mod glm;
pub mod harmony;
pub mod hy3;
pub mod kimi;
pub mod kimi_k3;
pub mod minimax_m1;
pub mod minimax_m2;
pub mod minimax_m3;
pub mod muse_glimmer;
pub mod parameter_tags;
pub mod plain;
pub mod solar_open;

/// `{"name": NAME, "arguments": {...}}`
fn named_object(writer: &mut Writer<'_>, tool: &ToolDefinition, _lead: &str) -> String {
    let head = format!("{{\"name\": {}, \"arguments\": ", super::json_text::quoted(&tool.name));
    writer.json_call(&head, tool, "}")
}

/// A reader of call objects that a marker ends.
fn objects(close: Option<&'static str>) -> Option<Box<dyn CallParser>> {
    Some(Box::new(JsonCalls::new(close)))
}
