//! Jinja's tests (`x is ...`) with Python's idea of what is a sequence, a number or a mapping.

use minijinja::value::{Rest, ValueOrKwargs};
use minijinja::{Environment, State, Value};

use super::compare::{compare, contains, paid_equal};
use super::{Args, Py, Result, int_of, object, py, text, type_error};

/// A test: the subject and its arguments.
type Test = fn(&mut State, &Value, &[Value]) -> Result<bool>;

/// By their names.
const TESTS: &[(&str, Test)] = &[
    ("defined", |_, value, _| Ok(!value.is_undefined())),
    ("undefined", |_, value, _| Ok(value.is_undefined())),
    ("none", |_, value, _| Ok(value.is_none())),
    ("true", |_, value, _| Ok(matches!(py(value), Py::Bool(true)))),
    ("false", |_, value, _| Ok(matches!(py(value), Py::Bool(false)))),
    ("boolean", |_, value, _| Ok(matches!(py(value), Py::Bool(_)))),
    ("integer", |_, value, _| Ok(matches!(py(value), Py::Int(_)))),
    ("float", |_, value, _| Ok(matches!(py(value), Py::Float(_)))),
    ("number", |_, value, _| Ok(matches!(py(value), Py::Int(_) | Py::Float(_) | Py::Bool(_)))),
    ("string", |_, value, _| Ok(matches!(py(value), Py::Str(_)))),
    ("mapping", |_, value, _| Ok(matches!(py(value), Py::Dict(_)))),
    ("sequence", |_, value, _| Ok(is_sequence(value))),
    ("iterable", |_, value, _| Ok(is_sequence(value) || matches!(py(value), Py::Seq(_) | Py::Generator(_)))),
    ("callable", |_, value, _| Ok(matches!(py(value), Py::Method(_) | Py::Other))),
    ("lower", |_, value, _| cased(value, char::is_lowercase, char::is_uppercase)),
    ("upper", |_, value, _| cased(value, char::is_uppercase, char::is_lowercase)),
    ("odd", |_, value, _| Ok(int_of(value)?.rem_euclid(2) == 1)),
    ("even", |_, value, _| Ok(int_of(value)?.rem_euclid(2) == 0)),
    ("sameas", |_, value, args| {
        // Identity of small values is what templates ask for: `x is sameas true`.
        let other = argument(args)?;
        Ok(value.kind() == other.kind() && object::equal(value, other))
    }),
    ("in", |state, value, args| contains(state, value, argument(args)?)),
    ("eq equalto ==", |state, value, args| paid_equal(state, value, argument(args)?)),
    ("ne !=", |state, value, args| paid_equal(state, value, argument(args)?).map(|same| !same)),
    ("lt lessthan <", |state, value, args| Ok(compare(state, "<", value, argument(args)?)?.is_lt())),
    ("gt greaterthan >", |state, value, args| Ok(compare(state, ">", value, argument(args)?)?.is_gt())),
    ("le <=", |state, value, args| Ok(compare(state, "<=", value, argument(args)?)?.is_le())),
    ("ge >=", |state, value, args| Ok(compare(state, ">=", value, argument(args)?)?.is_ge())),
];

pub(super) fn install(env: &mut Environment<'static>) {
    for &(names, test) in TESTS {
        for name in names.split(' ') {
            env.add_test(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
                let args = Args::new(args.into_values()).no_names(name)?;
                let (subject, rest) = args.split_first().ok_or_else(|| type_error("a test needs a value"))?;
                test(state, subject, rest)
            });
        }
    }
}

fn argument(args: &[Value]) -> Result<&Value> {
    args.first().ok_or_else(|| type_error("the test needs an argument"))
}

/// Has a length and an index; in Python that holds for strings and mappings too, and for Jinja's undefined.
fn is_sequence(value: &Value) -> bool {
    match py(value) {
        Py::Str(_) | Py::Dict(_) | Py::Undefined => true,
        Py::Seq(seq) => !seq.kind.is_view(),
        _ => false,
    }
}

fn cased(value: &Value, wanted: fn(char) -> bool, other: fn(char) -> bool) -> Result<bool> {
    let text = text::str_of(value)?;
    Ok(text.chars().any(wanted) && !text.chars().any(other))
}
