//! `'...' % values` and `'...'.format(values)`.
//!
//! The directives are minijinja's; this file turns values into what Python would print for `%s` and keeps widths
//! and precisions from asking for gigabytes.

use minijinja::formatting::{FormatStyle, format as native};
use minijinja::value::Kwargs;
use minijinja::{State, Value};

use super::object::SeqKind;
use super::{Args, Py, Result, budget, compare, py, string, text};

/// Digits that a width or precision may have.
const MAX_WIDTH_DIGITS: usize = 4;

/// The `%` operator on a string.
pub(super) fn format(state: &mut State, spec: &str, values: &Value) -> Result<Value> {
    let args = match py(values) {
        Py::Seq(seq) if seq.kind == SeqKind::Tuple => seq.items.to_vec(),
        _ => vec![values.clone()],
    };
    run(state, FormatStyle::Printf, spec, Args { positional: args, named: Vec::new() })
}

/// The `str.format` method.
pub(super) fn str_format(state: &mut State, spec: &str, args: Args) -> Result<Value> {
    run(state, FormatStyle::StrFormat, spec, args)
}

fn run(state: &mut State, style: FormatStyle, spec: &str, args: Args) -> Result<Value> {
    let mut digits = 0;
    for c in spec.chars() {
        digits = if c.is_ascii_digit() { digits + 1 } else { 0 };
        if digits > MAX_WIDTH_DIGITS {
            return Err(budget::exhausted("a format string asks for a very wide field"));
        }
    }
    let largest =
        args.positional.iter().chain(args.named.iter().map(|(_, value)| value)).map(compare::weight).max();
    let directives = spec.matches(['%', '{']).count();
    let width = 10_usize.pow(MAX_WIDTH_DIGITS as u32);
    budget::spend(state, spec.len() + directives.saturating_mul(largest.unwrap_or(0).saturating_add(width)))?;

    let mut values = args.positional.iter().map(printable).collect::<Result<Vec<_>>>()?;
    if !args.named.is_empty() {
        let named = args.named.iter().map(|(name, value)| Ok((name.clone(), printable(value)?)));
        values.push(Value::from(named.collect::<Result<Kwargs>>()?));
    }
    let out = native(style, spec, &values)?;
    string(state, out)
}

/// Numbers and strings go through the directives as they are; the rest prints as Python's `str()`.
fn printable(value: &Value) -> Result<Value> {
    match py(value) {
        Py::Int(_) | Py::Float(_) | Py::Str(_) | Py::Dict(_) => Ok(value.clone()),
        _ => text::str_of(value).map(Value::from),
    }
}
