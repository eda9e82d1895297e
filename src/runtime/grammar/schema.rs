//! JSON Schemas on their way to llguidance: checked, and put into the one layout in which answers are written; and its
//! messages as our errors.

use serde_json::{Value, json};

use crate::runtime::error::GrammarError;

/// Arrays and objects within each other.
const MAX_DEPTH: usize = 64;

/// llguidance reads its options from this member of a schema.
const OPTIONS: &str = "x-guidance";

/// The schema with our options in it.
///
/// # Errors
/// [`GrammarError::Invalid`] for what is no schema, [`GrammarError::TooComplex`] for one too deep, and
/// [`GrammarError::Unsupported`] for one that carries options of its own, since those can make the library ignore keywords.
pub fn prepare(schema: &Value) -> Result<Value, GrammarError> {
    if depth(schema) > MAX_DEPTH {
        return Err(GrammarError::TooComplex(format!("more than {MAX_DEPTH} levels deep")));
    }
    let mut schema = match schema {
        Value::Object(members) => members.clone(),
        Value::Bool(true) => serde_json::Map::new(),
        Value::Bool(false) => {
            return Err(GrammarError::Invalid("nothing satisfies the schema false".to_owned()));
        }
        _ => return Err(GrammarError::Invalid("a schema is an object or a boolean".to_owned())),
    };
    if schema.contains_key(OPTIONS) {
        let message = "options of the grammar library are not for requests".to_owned();
        return Err(GrammarError::Unsupported { keyword: OPTIONS.to_owned(), message });
    }
    schema.insert(OPTIONS.to_owned(), layout());
    Ok(Value::Object(schema))
}

/// White space as Python's `json.dumps` writes it, the layout that models have seen most. A fixed one leaves no choice
/// around names and punctuation, so that they are forced, and no way to go on with white space for ever.
fn layout() -> Value {
    json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "})
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(members) => 1 + members.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// What the library's refusal means. It has no kinds of errors, only words.
pub fn explain(error: &impl std::fmt::Display) -> GrammarError {
    GrammarError::Invalid(error.to_string())
}
