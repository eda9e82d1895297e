//! Global functions: Jinja's own, and the two that Hugging Face adds.

use minijinja::value::{Rest, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::budget::{self, Raised};
use super::object::{Dict, Namespace, Seq, SeqKind};
use super::{Args, Py, Result, int_of, items_of, py, str_arg, string, text, type_error};

/// A function written against Python's calling convention.
type Native = fn(&mut State, Args) -> Result<Value>;

/// Jinja's sandbox refuses longer ranges.
const MAX_RANGE: i128 = 100_000;

pub(super) fn install(env: &mut Environment<'static>) {
    let functions: [(&'static str, Native); 5] = [
        ("range", range),
        ("dict", dict),
        ("namespace", namespace),
        ("raise_exception", raise_exception),
        ("strftime_now", strftime_now),
    ];
    for (name, native) in functions {
        env.add_function(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            native(state, Args::new(args.into_values()))
        });
    }
}

fn range(state: &mut State, args: Args) -> Result<Value> {
    let bounds = args.no_names("range")?.iter().map(int_of).collect::<Result<Vec<_>>>()?;
    let (start, stop, step) = match bounds[..] {
        [stop] => (0, stop, 1),
        [start, stop] => (start, stop, 1),
        [_, _, 0] => return Err(type_error("range() arg 3 must not be zero")),
        [start, stop, step] => (start, stop, step),
        _ => return Err(type_error(format!("range expected 1 to 3 arguments, got {}", bounds.len()))),
    };
    let span = if step > 0 { stop.saturating_sub(start) } else { start.saturating_sub(stop) };
    let pace = step.saturating_abs();
    if span / pace > MAX_RANGE {
        return Err(budget::exhausted("a range has more than 100000 items"));
    }
    let count = if span <= 0 { 0 } else { (span - 1) / pace + 1 };
    let items = (0..count).map(|at| super::int_value(start.saturating_add(at.saturating_mul(step))));
    Seq::build(state, SeqKind::Range, items.collect())
}

fn dict(state: &mut State, args: Args) -> Result<Value> {
    let mut pairs = Vec::new();
    for source in &args.positional {
        match py(source) {
            Py::Dict(dict) => pairs.extend_from_slice(&dict.entries),
            _ => {
                for pair in items_of(state, source)? {
                    let [key, value] = <[Value; 2]>::try_from(items_of(state, &pair)?)
                        .map_err(|_| type_error("dict() needs pairs of a key and a value"))?;
                    pairs.push((key, value));
                }
            }
        }
    }
    pairs.extend(args.named.into_iter().map(|(name, value)| (Value::from(name), value)));
    Dict::build(state, pairs)
}

fn raise_exception(_state: &mut State, args: Args) -> Result<Value> {
    let [message] = args.bind("raise_exception", ["message"])?;
    let message = message.map_or(Ok(String::new()), |message| text::str_of(&message))?;
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn strftime_now(state: &mut State, args: Args) -> Result<Value> {
    let [format] = args.bind("strftime_now", ["format"])?;
    let format = format.ok_or_else(|| type_error("strftime_now() needs a format"))?;
    let format = str_arg("strftime_now()", &format)?;
    budget::spend(state, format.len() * 16)?;
    let formatted = budget::now(state).strftime(format);
    string(state, formatted)
}

/// `namespace(...)`: members from mappings and keyword arguments.
fn namespace(state: &mut State, args: Args) -> Result<Value> {
    let mut members = Vec::new();
    for source in &args.positional {
        let Py::Dict(dict) = py(source) else {
            return Err(type_error("namespace() takes mappings and keyword arguments"));
        };
        for (key, value) in &dict.entries {
            members.push((key.as_str().unwrap_or_default().to_owned(), value.clone()));
        }
    }
    members.extend(args.named);
    budget::spend(state, 64 + members.len() * 64)?;
    Namespace::value(members)
}
