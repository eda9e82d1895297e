//! Errors of compiling and rendering templates.
//!
//! A template is data from a model file or from the user, so every failure is an ordinary value: a reason that can
//! be shown, the line where the template is at fault, and one variant per thing that a caller can do about it.

use serde::{Deserialize, Serialize};

/// Why a template gave no text. Lines count from 1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "type", content = "value", rename_all = "snake_case")]
pub enum TemplateError {
    /// The model brings no chat template; the caller must send raw text or name a template file.
    #[error("the model has no chat template")]
    Missing,

    /// The source is not a template: nothing can be rendered from it.
    #[error("template line {line}: {message}")]
    Syntax { line: usize, message: String },

    /// The template called `raise_exception`: its author refuses this conversation.
    #[error("the chat template refuses this conversation: {message} (template line {line})")]
    Raised { line: usize, message: String },

    /// The template does something that its own data does not allow, e.g. reads a member of nothing.
    #[error("template line {line}: {message}")]
    Render { line: usize, message: String },

    /// A bound on source size, steps, memory or nesting was hit; the text names it.
    #[error("the template is too expensive: {0}")]
    TooExpensive(String),

    /// A prompt file uses variables that were not given.
    #[error("undefined variable {} (given: {})", quoted(missing), quoted(known))]
    UndefinedVariables { missing: Vec<String>, known: Vec<String> },
}

fn quoted(names: &[String]) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
