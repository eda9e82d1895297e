//! Python's operators. [`super::super::link`] replaces minijinja's own operator instructions by calls of these, so
//! that semantics are Python's and every result is paid for from the budget.
//!
//! The names contain a colon: a template cannot spell them.

use minijinja::{Environment, State, Value};

use super::compare::{compare, contains, paid_equal, weight};
use super::members::{attribute, item};
use super::object::{Dict, Seq, SeqKind};
use super::{
    Args, Py, Result, add_filter, budget, int_of, int_value, items_of, list, markup, num, percent, py,
    string, text, type_error, type_name, undefined_error,
};

pub(super) fn install(env: &mut Environment<'static>) {
    add_filter(env, "py:list", |state, args| list(state, args.positional));
    add_filter(env, "py:tuple", |state, args| super::tuple(state, args.positional));
    add_filter(env, "py:dict", |state, args| {
        let pairs = args.positional.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone()));
        Dict::build(state, pairs.collect())
    });
    for (name, operator) in BINARY {
        add_filter(env, name, |state, args| operator(state, &args.positional[0], &args.positional[1]));
    }
    add_filter(env, "py:neg", |_, args| negate(&args.positional[0]));
    add_filter(env, "py:slice", |state, args| slice(state, &args.positional));
    add_filter(env, "py:attr", |_, args| attribute(&args.positional[0], text_at(&args, 1)));
    add_filter(env, "py:item", |_, args| item(&args.positional[0], &args.positional[1]));
    add_filter(env, "py:setattr", |_, args| set_attribute(&args.positional, text_at(&args, 2)));
    add_filter(env, "py:iter", |state, args| iterate(state, &args.positional[0]));
    add_filter(env, "py:scalar", |state, args| scalar(state, &args.positional[0]));
    add_filter(env, "py:no_loader", |_, _| {
        Err(type_error("include, import and extends need other files, which a chat template has not"))
    });
}

type Binary = fn(&mut State, &Value, &Value) -> Result<Value>;

const BINARY: &[(&str, Binary)] = &[
    ("py:add", add),
    ("py:sub", |_, left, right| arithmetic("-", left, right)),
    ("py:mul", multiply),
    ("py:div", |_, left, right| arithmetic("/", left, right)),
    ("py:floordiv", |_, left, right| arithmetic("//", left, right)),
    ("py:rem", remainder),
    ("py:pow", |_, left, right| arithmetic("**", left, right)),
    ("py:concat", concat),
    ("py:eq", |state, left, right| paid_equal(state, left, right).map(Value::from)),
    ("py:ne", |state, left, right| paid_equal(state, left, right).map(|same| Value::from(!same))),
    ("py:lt", |state, left, right| compare(state, "<", left, right).map(|order| Value::from(order.is_lt()))),
    ("py:le", |state, left, right| compare(state, "<=", left, right).map(|order| Value::from(order.is_le()))),
    ("py:gt", |state, left, right| compare(state, ">", left, right).map(|order| Value::from(order.is_gt()))),
    ("py:ge", |state, left, right| compare(state, ">=", left, right).map(|order| Value::from(order.is_ge()))),
    ("py:in", |state, left, right| contains(state, left, right).map(Value::from)),
];

fn text_at(args: &Args, at: usize) -> &str {
    args.positional.get(at).and_then(Value::as_str).unwrap_or_default()
}

fn unsupported(op: &str, left: &Value, right: &Value) -> minijinja::Error {
    if left.is_undefined() || right.is_undefined() {
        return undefined_error(format!("an operand of `{op}` is undefined"));
    }
    match (op, py(left)) {
        ("+", Py::Str(_)) => {
            type_error(format!("can only concatenate str (not \"{}\") to str", type_name(right)))
        }
        _ => {
            let (left, right) = (type_name(left), type_name(right));
            type_error(format!("unsupported operand type(s) for {op}: '{left}' and '{right}'"))
        }
    }
}

fn add(state: &mut State, left: &Value, right: &Value) -> Result<Value> {
    match (py(left), py(right)) {
        (Py::Str(_), Py::Str(_)) if left.is_safe() || right.is_safe() => {
            let joined = markup::escaped(state, left)? + &markup::escaped(state, right)?;
            Ok(Value::from_safe_string(joined))
        }
        (Py::Str(a), Py::Str(b)) => {
            budget::spend(state, a.len() + b.len())?;
            Ok(Value::from([a, b].concat()))
        }
        (Py::Seq(a), Py::Seq(b)) if a.kind == b.kind && matches!(a.kind, SeqKind::List | SeqKind::Tuple) => {
            let items = [&a.items[..], &b.items].concat();
            Seq::build(state, a.kind, items)
        }
        _ => arithmetic("+", left, right),
    }
}

fn multiply(state: &mut State, left: &Value, right: &Value) -> Result<Value> {
    let is_repeated = |value: &Value| matches!(py(value), Py::Str(_) | Py::Seq(_));
    let int = |value: &Value| num(value).and_then(|number| number.0);
    let (repeated, times) = match (int(left), int(right)) {
        (_, Some(times)) if is_repeated(left) => (left, times),
        (Some(times), _) if is_repeated(right) => (right, times),
        _ => return arithmetic("*", left, right),
    };
    let times = usize::try_from(times.max(0)).unwrap_or(usize::MAX);
    match py(repeated) {
        Py::Str(text) => {
            budget::spend(state, text.len().saturating_mul(times))?;
            Ok(markup::same_safety(repeated, text.repeat(times)))
        }
        Py::Seq(seq) if matches!(seq.kind, SeqKind::List | SeqKind::Tuple) => {
            budget::spend(state, size_of_val(&seq.items[..]).saturating_mul(times))?;
            let times = if seq.items.is_empty() { 0 } else { times };
            let items = std::iter::repeat_n(&seq.items, times).flatten().cloned();
            Seq::build(state, seq.kind, items.collect())
        }
        _ => Err(unsupported("*", left, right)),
    }
}

fn remainder(state: &mut State, left: &Value, right: &Value) -> Result<Value> {
    match py(left) {
        Py::Str(format) if left.is_safe() => {
            let escaped = match py(right) {
                Py::Seq(seq) if seq.kind == SeqKind::Tuple => {
                    let items = seq.items.iter().map(|item| markup::escape_one(state, item));
                    let items = items.collect::<Result<_>>()?;
                    super::tuple(state, items)?
                }
                _ => markup::escape_one(state, right)?,
            };
            let formatted = percent::format(state, format, &escaped)?;
            markup::mark(state, formatted)
        }
        Py::Str(format) => percent::format(state, format, right),
        _ => arithmetic("%", left, right),
    }
}

/// `~`: both sides as `str()`.
fn concat(state: &mut State, left: &Value, right: &Value) -> Result<Value> {
    budget::spend(state, weight(left).saturating_add(weight(right)))?;
    string(state, text::str_of(left)? + &text::str_of(right)?)
}

fn arithmetic(op: &str, left: &Value, right: &Value) -> Result<Value> {
    let (Some(a), Some(b)) = (num(left), num(right)) else {
        return Err(unsupported(op, left, right));
    };
    if matches!(op, "/" | "//" | "%") && b.1 == 0.0 {
        return Err(type_error("division by zero"));
    }
    match (a.0, b.0) {
        (Some(a), Some(b)) if op != "/" && !(op == "**" && b < 0) => {
            int_arithmetic(op, a, b).map(int_value).ok_or_else(|| type_error("an integer is too large"))
        }
        _ => Ok(Value::from(float_arithmetic(op, a.1, b.1))),
    }
}

fn int_arithmetic(op: &str, a: i128, b: i128) -> Option<i128> {
    match op {
        "+" => a.checked_add(b),
        "-" => a.checked_sub(b),
        "*" => a.checked_mul(b),
        "**" => a.checked_pow(u32::try_from(b).ok()?),
        "//" => {
            let quotient = a.checked_div(b)?;
            let inexact = a.checked_rem(b)? != 0;
            Some(if inexact && (a < 0) != (b < 0) { quotient - 1 } else { quotient })
        }
        _ => {
            let rest = a.checked_rem(b)?;
            Some(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest })
        }
    }
}

fn float_arithmetic(op: &str, a: f64, b: f64) -> f64 {
    match op {
        "+" => a + b,
        "-" => a - b,
        "*" => a * b,
        "/" => a / b,
        "**" => a.powf(b),
        "//" => (a / b).floor(),
        _ => {
            let rest = a % b;
            if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }
        }
    }
}

fn negate(value: &Value) -> Result<Value> {
    match num(value) {
        Some((Some(int), _)) => {
            int.checked_neg().map(int_value).ok_or_else(|| type_error("an integer is too large"))
        }
        Some((None, float)) => Ok(Value::from(-float)),
        None if value.is_undefined() => Err(undefined_error("the operand of `-` is undefined")),
        None => Err(type_error(format!("bad operand type for unary -: '{}'", type_name(value)))),
    }
}

fn set_attribute(args: &[Value], name: &str) -> Result<Value> {
    match py(&args[1]) {
        Py::Namespace(namespace) => {
            namespace.set(name, args[0].clone())?;
            Ok(Value::UNDEFINED)
        }
        _ => Err(type_error("cannot assign attribute on non-namespace object")),
    }
}

/// Returns the sequence that a `for` loop iterates over. minijinja's loop needs a sequence whose length is known.
fn iterate(state: &mut State, value: &Value) -> Result<Value> {
    match py(value) {
        Py::Seq(_) => Ok(value.clone()),
        _ => {
            let items = items_of(state, value)?;
            list(state, items)
        }
    }
}

/// Guards the middle operand of a chained comparison, which minijinja compares itself.
fn scalar(state: &mut State, value: &Value) -> Result<Value> {
    budget::spend(state, weight(value))?;
    match py(value) {
        Py::Int(_) | Py::Float(_) | Py::Bool(_) | Py::Str(_) | Py::None => Ok(value.clone()),
        _ => Err(type_error(format!("'{}' cannot be part of a chained comparison", type_name(value)))),
    }
}

/// Indices that `[start:stop:step]` selects of `len` items.
fn selected(args: &[Value], len: usize) -> Result<Vec<usize>> {
    let part = |at: usize| match &args[at] {
        none if none.is_none() => Ok(None),
        value => int_of(value).map(Some).map_err(|_| type_error("slice indices must be integers or None")),
    };
    let (start, stop, step) = (part(1)?, part(2)?, part(3)?.unwrap_or(1));
    if step == 0 {
        return Err(type_error("slice step cannot be zero"));
    }
    let len = len as i128;
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |index: i128| (if index < 0 { index + len } else { index }).clamp(low, high);
    let mut at = start.map_or(if step > 0 { low } else { high }, clamp);
    let stop = stop.map_or(if step > 0 { high } else { low }, clamp);
    let mut indices = Vec::new();
    while (step > 0 && at < stop) || (step < 0 && at > stop) {
        indices.push(at as usize);
        at = at.saturating_add(step);
    }
    Ok(indices)
}

fn slice(state: &mut State, args: &[Value]) -> Result<Value> {
    budget::spend(state, weight(&args[0]))?;
    match py(&args[0]) {
        Py::Str(text) => {
            let chars: Vec<char> = text.chars().collect();
            let picked: String = selected(args, chars.len())?.into_iter().map(|at| chars[at]).collect();
            budget::spend(state, picked.len())?;
            Ok(markup::same_safety(&args[0], picked))
        }
        Py::Seq(seq) if !seq.kind.is_view() => {
            let picked = selected(args, seq.items.len())?.into_iter().map(|at| seq.items[at].clone());
            let kind = if seq.kind == SeqKind::Tuple { SeqKind::Tuple } else { SeqKind::List };
            Seq::build(state, kind, picked.collect())
        }
        Py::Undefined => Err(undefined_error("a slice is taken of an undefined value")),
        Py::Dict(_) => Err(type_error("unhashable type: 'slice'")),
        _ => Err(type_error(format!("'{}' object is not subscriptable", type_name(&args[0])))),
    }
}
