//! The tool-call formats, a constant each, in files by the form of their calls. To add one, add a constant, and a row to the
//! table in `format`.

use super::spec::{Frame, Notation, ToolCallSpec};

pub mod glm;
pub mod headed;
pub mod named_json;
pub mod parameter_tags;
pub mod plain;
