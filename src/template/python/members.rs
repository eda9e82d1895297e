//! Attributes and items of values. The methods listed here are those that published templates call, with their closest
//! relatives; any other name is an error that names it.

use minijinja::Value;

use super::markup::same_safety;
use super::object::Method;
use super::text::brief;
use super::{Py, Result, int_of, py, undefined_error};

/// Returns whether Python would find a method of this name before it looks for a member.
pub(super) fn has_method(value: &Value, name: &str) -> bool {
    match name {
        "capitalize" | "count" | "endswith" | "find" | "format" | "isalnum" | "isalpha" | "isdigit"
        | "isspace" | "join" | "lower" | "lstrip" | "removeprefix" | "removesuffix" | "replace" | "rfind"
        | "rsplit" | "rstrip" | "split" | "splitlines" | "startswith" | "strip" | "title" | "upper" => {
            matches!(py(value), Py::Str(_))
        }
        "get" | "items" | "keys" | "values" => matches!(py(value), Py::Dict(_)),
        _ => false,
    }
}

/// `value.name`: Python's own attribute first, then the member of that name.
pub(super) fn attribute(value: &Value, name: &str) -> Result<Value> {
    match py(value) {
        Py::Undefined => Err(undefined_error(format!("attribute '{name}' is read from an undefined value"))),
        Py::Namespace(namespace) => Ok(namespace.get(name).unwrap_or(Value::UNDEFINED)),
        Py::Other => value.get_attr(name),
        _ if has_method(value, name) => Method::value(value, name),
        Py::Dict(dict) => Ok(dict.get(&Value::from(name)).cloned().unwrap_or(Value::UNDEFINED)),
        _ => Ok(Value::UNDEFINED),
    }
}

/// `value[key]`: the member first, then an attribute of that name. What is not there is undefined.
pub(super) fn item(value: &Value, key: &Value) -> Result<Value> {
    let found = match (py(value), py(key)) {
        (Py::Undefined, _) => {
            let key = brief(key);
            return Err(undefined_error(format!("member {key} is read from an undefined value")));
        }
        (Py::Dict(dict), _) => dict.get(key).cloned(),
        (Py::Seq(seq), Py::Int(_) | Py::Bool(_)) if !seq.kind.is_view() => {
            position(int_of(key)?, seq.items.len()).map(|at| seq.items[at].clone())
        }
        (Py::Str(text), Py::Int(_) | Py::Bool(_)) => {
            char_at(text, int_of(key)?).map(|c| same_safety(value, c))
        }
        _ => None,
    };
    match (found, key.as_str()) {
        (Some(found), _) => Ok(found),
        (None, Some(name)) => attribute(value, name),
        (None, None) => Ok(Value::UNDEFINED),
    }
}

fn position(index: i128, len: usize) -> Option<usize> {
    let index = if index < 0 { index + len as i128 } else { index };
    usize::try_from(index).ok().filter(|at| *at < len)
}

fn char_at(text: &str, index: i128) -> Option<char> {
    match usize::try_from(index) {
        Ok(at) => text.chars().nth(at),
        Err(_) => text.chars().rev().nth(usize::try_from(-(index + 1)).ok()?),
    }
}
