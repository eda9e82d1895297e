//! Python's ordering and membership, and what it costs to look at a value.

use std::cmp::Ordering;

use minijinja::{State, Value};

use super::object::equal;
use super::{Py, Result, budget, items_of, num, py, type_error, type_name, undefined_error};

/// Bytes that a look at the whole value costs.
pub(super) fn weight(value: &Value) -> usize {
    match py(value) {
        Py::Str(text) => text.len(),
        Py::Seq(seq) => usize::try_from(seq.cost.weight).unwrap_or(usize::MAX),
        Py::Dict(dict) => usize::try_from(dict.cost.weight).unwrap_or(usize::MAX),
        _ => 16,
    }
}

/// Python's ordering: numbers among numbers, strings by code point, sequences item by item.
fn order(op: &str, left: &Value, right: &Value) -> Result<Ordering> {
    if let (Some(a), Some(b)) = (num(left), num(right)) {
        return Ok(match (a.0, b.0) {
            (Some(a), Some(b)) => a.cmp(&b),
            _ => a.1.partial_cmp(&b.1).unwrap_or(Ordering::Equal),
        });
    }
    match (py(left), py(right)) {
        (Py::Str(a), Py::Str(b)) => Ok(a.cmp(b)),
        (Py::Seq(a), Py::Seq(b)) if a.kind == b.kind && !a.kind.is_view() => {
            for (a, b) in a.items.iter().zip(&b.items) {
                if !equal(a, b) {
                    return order(op, a, b);
                }
            }
            Ok(a.items.len().cmp(&b.items.len()))
        }
        (Py::Undefined, _) | (_, Py::Undefined) => {
            Err(undefined_error(format!("an operand of `{op}` is undefined")))
        }
        _ => {
            let (left, right) = (type_name(left), type_name(right));
            Err(type_error(format!("'{op}' not supported between instances of '{left}' and '{right}'")))
        }
    }
}

/// `==`, paid for.
pub(super) fn paid_equal(state: &mut State, left: &Value, right: &Value) -> Result<bool> {
    budget::spend(state, weight(left).min(weight(right)))?;
    Ok(equal(left, right))
}

/// Python's ordering, paid for.
pub(super) fn compare(state: &mut State, op: &str, left: &Value, right: &Value) -> Result<Ordering> {
    budget::spend(state, weight(left).min(weight(right)))?;
    order(op, left, right)
}

/// Sorts stably by a key; of keys that cannot be compared the first such pair is the error. Equal values need no
/// order, so `[None, None]` sorts.
pub(super) fn sort_by<T>(items: &mut [T], key: impl Fn(&T) -> Value) -> Result<()> {
    let mut failure = None;
    items.sort_by(|a, b| {
        let (a, b) = (key(a), key(b));
        if equal(&a, &b) {
            return Ordering::Equal;
        }
        order("<", &a, &b).unwrap_or_else(|error| {
            failure.get_or_insert(error);
            Ordering::Equal
        })
    });
    failure.map_or(Ok(()), Err)
}

/// `needle in haystack`.
pub(super) fn contains(state: &mut State, needle: &Value, haystack: &Value) -> Result<bool> {
    budget::spend(state, if matches!(py(haystack), Py::Dict(_)) { 16 } else { weight(haystack) })?;
    match (py(haystack), py(needle)) {
        (Py::Undefined, _) => Ok(false),
        (Py::Str(text), Py::Str(part)) => Ok(text.contains(part)),
        (Py::Str(_), _) => Err(type_error(format!(
            "'in <string>' requires string as left operand, not {}",
            type_name(needle)
        ))),
        (Py::Dict(dict), _) => Ok(dict.get(needle).is_some()),
        (Py::Seq(_) | Py::Generator(_), _) => {
            Ok(items_of(state, haystack)?.iter().any(|item| equal(item, needle)))
        }
        _ => Err(type_error(format!("argument of type '{}' is not iterable", type_name(haystack)))),
    }
}
