//! Constrained decoding: the tokens that may come next so that an answer satisfies a JSON Schema, a regular
//! expression, or a grammar in Lark's or llama.cpp's notation.
//!
//! A [`GrammarCompiler`] belongs to a model's tokenizer and turns sources into [`Grammar`]s; a
//! [`GrammarState`] follows one answer. Invariants: what a state allows depends only on its grammar and the
//! accepted tokens, never on other answers. Sources are hostile, so size, depth, work and time are bounded,
//! and a panic in the library becomes an error. Knows no request, sequence or model.

mod closed;
mod compiled;
mod compiler;
mod gbnf;
mod plain;
mod satisfiable;
mod schema;
mod state;
mod text_grammar;
mod vocabulary;

pub use self::closed::closed;
pub use self::compiled::Grammar;
pub use self::compiler::GrammarCompiler;
pub use self::gbnf::{FindToken, to_lark as gbnf_to_lark};
pub use self::schema::{check_repeats, prepare as prepare_schema, simplified, without};
pub use self::state::{AllowedTokens, GrammarState, TokenMask};
pub use self::text_grammar::{TextGrammar, between_slashes};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Source of a constraint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", content = "value", rename_all = "snake_case", deny_unknown_fields)]
pub enum GrammarSource {
    /// Any JSON object.
    JsonObject,
    /// JSON that validates against this schema, in the dialect that `$schema` names, else 2020-12. Members
    /// come in the order of `properties`, separated by `", "` and `": "`.
    JsonSchema(Value),
    /// The whole answer matches this regular expression, in the syntax of Rust's `regex` without look-around.
    Regex(String),
    /// A grammar in llguidance's variant of Lark that starts at rule `start`.
    Lark(String),
    /// A grammar in llama.cpp's notation that starts at rule `root`. It is compiled as Lark.
    Gbnf(String),
}

impl GrammarSource {
    /// Returns a grammar in the notation that its form shows: GBNF if a line defines a rule with `::=`, else Lark.
    pub fn grammar(text: String) -> Self {
        if gbnf::is_gbnf(&text) { GrammarSource::Gbnf(text) } else { GrammarSource::Lark(text) }
    }

    /// Closes the objects of a schema, see [`closed`].
    pub fn closed(self) -> Self {
        match self {
            GrammarSource::JsonSchema(schema) => GrammarSource::JsonSchema(closed(&schema)),
            other => other,
        }
    }
}
