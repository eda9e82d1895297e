//! MarkupSafe's strings: what went through `safe` or `escape` stays marked, and escapes what is joined to it.
//!
//! Chat templates run without autoescape, so this shows only where a template adds a plain string to a safe one. That
//! published templates do so (by accident) is why it is here: their models were trained on the escaped text.

use minijinja::value::ValueKind;
use minijinja::{State, Value};

use super::object::Seq;
use super::{Args, Py, Result, budget, items_of, list, py, text};

/// The characters that HTML gives a meaning to, as entities.
pub(super) fn escape(input: &str) -> String {
    let mut out = String::with_capacity(input.len());
    for c in input.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A value as text that may stand beside safe text.
pub(super) fn escaped(state: &mut State, value: &Value) -> Result<String> {
    let text = text::str_of(value)?;
    let text = if value.is_safe() { text } else { escape(&text) };
    budget::spend(state, text.len())?;
    Ok(text)
}

/// Marks text, also inside a list or tuple of texts.
pub(super) fn mark(state: &mut State, value: Value) -> Result<Value> {
    match py(&value) {
        Py::Str(text) => Ok(Value::from_safe_string(text.to_owned())),
        Py::Seq(seq) => {
            let marked = seq.items.iter().cloned().map(|item| mark(state, item)).collect::<Result<_>>()?;
            Seq::build(state, seq.kind, marked)
        }
        _ => Ok(value),
    }
}

/// The arguments of a method of safe text: what ends up in its result is escaped.
pub(super) fn escape_args(state: &mut State, method: &str, mut args: Args) -> Result<Args> {
    let searches = ["count", "endswith", "find", "rfind", "rsplit", "split", "startswith"];
    if searches.contains(&method) {
        return Ok(args);
    }
    if method == "join" {
        for items in &mut args.positional {
            let parts = items_of(state, items)?;
            let parts = parts.iter().map(|item| escape_one(state, item)).collect::<Result<_>>()?;
            *items = list(state, parts)?;
        }
        return Ok(args);
    }
    for value in args.positional.iter_mut().chain(args.named.iter_mut().map(|(_, value)| value)) {
        *value = escape_one(state, value)?;
    }
    Ok(args)
}

/// Escapes a string; other values stay what they are.
pub(super) fn escape_one(state: &mut State, value: &Value) -> Result<Value> {
    match value.kind() {
        ValueKind::String => escaped(state, value).map(Value::from_safe_string),
        _ => Ok(value.clone()),
    }
}

/// A text made of another one, safe if that was.
pub(super) fn same_safety(of: &Value, text: impl Into<String>) -> Value {
    if of.is_safe() { Value::from_safe_string(text.into()) } else { Value::from(text.into()) }
}
