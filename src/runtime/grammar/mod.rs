//! Constrained decoding: which tokens may come next so that an answer keeps to a JSON Schema, a regular expression or a
//! Lark grammar.
//!
//! A [`GrammarCompiler`] belongs to a model's tokenizer and turns sources into [`Grammar`]s; a [`GrammarState`] follows one
//! answer. Invariants: what a state allows is a function of its grammar and of the tokens accepted so far, never of other
//! answers under the same grammar; sources are hostile, so size, depth, work and time are bounded, and a panic in the
//! library is an error here. Knows no request, sequence or model.

mod closed;
mod compiler;
mod satisfiable;
mod schema;
mod state;
mod vocabulary;

pub use self::closed::closed;
pub use self::compiler::{Grammar, GrammarCompiler};
pub use self::schema::{prepare as prepare_schema, simplified};
pub use self::state::{AllowedTokens, GrammarState, TokenMask};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What an answer must keep to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", content = "value", rename_all = "snake_case", deny_unknown_fields)]
pub enum GrammarSource {
    /// Any JSON object.
    JsonObject,
    /// JSON that validates against this schema, in the dialect that `$schema` names, else 2020-12. Members come in the
    /// order of the schema's `properties`, separated by `", "` and `": "`.
    JsonSchema(Value),
    /// The whole answer matches this regular expression, in the syntax of Rust's `regex` without look-around.
    Regex(String),
    /// A grammar in llguidance's variant of Lark, beginning at its rule `start`.
    Lark(String),
}

impl GrammarSource {
    /// With the objects of a schema closed, as [`closed`] does.
    pub fn closed(self) -> Self {
        match self {
            GrammarSource::JsonSchema(schema) => GrammarSource::JsonSchema(closed(&schema)),
            other => other,
        }
    }
}
