//! Python's values and operations inside minijinja, as far as chat templates can see them.
//!
//! Owns the containers (`Seq`, `Dict`, `Generator`, `Namespace`): every list, tuple or mapping that a chat template
//! touches is one of these, converted on the way in or built by [`ops`]. Invariant: a container knows its nesting
//! depth and the size of everything below it, and cannot be built beyond [`MAX_DEPTH`] or [`MAX_WEIGHT`]; therefore
//! printing, comparing and dropping any value is bounded, also for lists that contain the same list many times.
//! Must not know conversations or files.

pub(super) mod budget;
mod compare;
mod filters;
mod functions;
mod json;
mod markup;
mod members;
mod methods;
mod object;
mod ops;
mod percent;
mod predicates;
mod protocol;
mod text;

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior, Value};

pub(super) use json::push_escaped;
pub(super) use object::{Dict, adopt, from_json};
use object::{Generator, Method, Namespace, Seq, SeqKind};

/// Deepest nesting of containers. JSON parsers stop at 128; Python's own limit is near 1000.
const MAX_DEPTH: u32 = 200;
/// Largest number of bytes that one value may print to, counted with repetition.
const MAX_WEIGHT: u64 = 1 << 30;

type Result<T> = std::result::Result<T, Error>;

/// Installs Python's operators, filters, tests, functions, methods and printing into an environment.
pub(super) fn install(env: &mut Environment<'static>) {
    ops::install(env);
    filters::install(env);
    predicates::install(env);
    functions::install(env);
    env.set_formatter(|out, state, value| {
        let printed = text::str_of(value)?;
        budget::spend(state, printed.len())?;
        out.write_str(&printed).map_err(Error::from)
    });
    env.set_unknown_method_callback(|state, receiver, name, args| {
        methods::call(state, receiver, name, Args::new(args.to_vec()))
    });
}

/// JSON as Python's `json.dumps(value, ensure_ascii=False)` prints it.
pub(super) fn dumps(value: &serde_json::Value) -> Result<String> {
    json::dumps(&from_json(value)?, &json::Layout::default())
}

fn add_filter(
    env: &mut Environment<'static>,
    name: &'static str,
    native: impl Fn(&mut State, Args) -> Result<Value> + Send + Sync + 'static,
) {
    env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
        let args = Args::new(args.into_values());
        // Prompt files are strict: nothing but `default` takes what is not there.
        let strict = state.env().undefined_behavior() == UndefinedBehavior::Strict;
        if strict && !matches!(name, "default" | "d") && args.positional.iter().any(Value::is_undefined) {
            return Err(undefined_error("an undefined value is used"));
        }
        native(state, args)
    });
}

/// Positional and named arguments of one call.
#[derive(Debug, Default)]
struct Args {
    positional: Vec<Value>,
    named: Vec<(String, Value)>,
}

impl Args {
    fn new(mut values: Vec<Value>) -> Self {
        let mut named = Vec::new();
        if values.last().is_some_and(Value::is_kwargs)
            && let Some(kwargs) = values.pop()
            && let Some(object) = kwargs.as_object()
        {
            for (key, value) in object.try_iter_pairs().into_iter().flatten() {
                named.push((key.as_str().unwrap_or_default().to_owned(), value));
            }
        }
        Self { positional: values, named }
    }

    /// Takes the value left of the `|`.
    fn take_input(&mut self) -> Value {
        if self.positional.is_empty() { Value::UNDEFINED } else { self.positional.remove(0) }
    }

    /// Binds the arguments to parameter names; an argument that has no place is Python's TypeError.
    fn bind<const N: usize>(self, call: &str, names: [&str; N]) -> Result<[Option<Value>; N]> {
        if self.positional.len() > N {
            let given = self.positional.len();
            return Err(type_error(format!("{call}() takes at most {N} arguments ({given} given)")));
        }
        let mut bound: [Option<Value>; N] = std::array::from_fn(|_| None);
        for (slot, value) in bound.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|known| *known == name) {
                Some(at) if bound[at].is_none() => bound[at] = Some(value),
                _ => return Err(type_error(format!("{call}() got an unexpected argument '{name}'"))),
            }
        }
        Ok(bound)
    }

    fn no_names(self, call: &str) -> Result<Vec<Value>> {
        match self.named.first() {
            None => Ok(self.positional),
            Some(_) => Err(type_error(format!("{call}() takes no keyword arguments"))),
        }
    }
}

/// A value by its Python type.
enum Py<'v> {
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(&'v str),
    Seq(&'v Seq),
    Dict(&'v Dict),
    Generator(&'v Generator),
    Namespace(&'v Namespace),
    Method(&'v Method),
    /// Macros, the loop object, functions.
    Other,
}

fn py(value: &Value) -> Py<'_> {
    match value.kind() {
        ValueKind::Undefined => Py::Undefined,
        ValueKind::None => Py::None,
        ValueKind::Bool => Py::Bool(value.is_true()),
        ValueKind::String => Py::Str(value.as_str().unwrap_or_default()),
        ValueKind::Number => number(value),
        _ => object(value),
    }
}

fn number<'v>(value: &Value) -> Py<'v> {
    if value.is_integer()
        && let Ok(int) = i128::try_from(value.clone())
    {
        return Py::Int(int);
    }
    f64::try_from(value.clone()).map_or(Py::Other, Py::Float)
}

fn object(value: &Value) -> Py<'_> {
    if let Some(seq) = value.downcast_object_ref::<Seq>() {
        Py::Seq(seq)
    } else if let Some(dict) = value.downcast_object_ref::<Dict>() {
        Py::Dict(dict)
    } else if let Some(generator) = value.downcast_object_ref::<Generator>() {
        Py::Generator(generator)
    } else if let Some(namespace) = value.downcast_object_ref::<Namespace>() {
        Py::Namespace(namespace)
    } else if let Some(method) = value.downcast_object_ref::<Method>() {
        Py::Method(method)
    } else {
        Py::Other
    }
}

/// A number for arithmetic: as an integer, where it is one (bool counts as 0 or 1), and as a float.
fn num(value: &Value) -> Option<(Option<i128>, f64)> {
    match py(value) {
        Py::Int(int) => Some((Some(int), int as f64)),
        Py::Bool(flag) => Some((Some(flag.into()), flag.into())),
        Py::Float(float) => Some((None, float)),
        _ => None,
    }
}

/// The name that Python's error messages give to a value's type.
fn type_name(value: &Value) -> &'static str {
    match py(value) {
        Py::Undefined => "Undefined",
        Py::None => "NoneType",
        Py::Bool(_) => "bool",
        Py::Int(_) => "int",
        Py::Float(_) => "float",
        Py::Str(_) => "str",
        Py::Seq(seq) => seq.kind.type_name(),
        Py::Dict(_) => "dict",
        Py::Generator(_) => "generator",
        Py::Namespace(_) => "Namespace",
        Py::Method(_) => "builtin_function_or_method",
        Py::Other => "object",
    }
}

/// Returns whether an optional argument is given and true.
fn flag(value: Option<Value>) -> bool {
    value.is_some_and(|value| value.is_true())
}

fn type_error(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

fn undefined_error(what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::UndefinedError, what.to_string())
}

/// The items that a `for` would see. A generator is used up by it.
fn items_of(state: &mut State, value: &Value) -> Result<Vec<Value>> {
    let items = match py(value) {
        Py::Undefined => Vec::new(),
        Py::Str(text) => text.chars().map(Value::from).collect(),
        Py::Seq(seq) => seq.items.to_vec(),
        Py::Dict(dict) => dict.entries.iter().map(|(key, _)| key.clone()).collect(),
        Py::Generator(generator) => generator.drain(),
        _ => return Err(type_error(format!("'{}' object is not iterable", type_name(value)))),
    };
    budget::spend(state, items.len() * size_of::<Value>())?;
    Ok(items)
}

/// An integer where Python demands one (bool counts).
fn int_of(value: &Value) -> Result<i128> {
    match py(value) {
        Py::Int(int) => Ok(int),
        Py::Bool(flag) => Ok(flag.into()),
        _ => Err(type_error(format!("'{}' object cannot be interpreted as an integer", type_name(value)))),
    }
}

/// A string where Python demands one.
fn str_arg<'v>(call: &str, value: &'v Value) -> Result<&'v str> {
    value
        .as_str()
        .ok_or_else(|| type_error(format!("{call}: a string is needed, not '{}'", type_name(value))))
}

fn int_value(int: i128) -> Value {
    i64::try_from(int).map_or_else(|_| Value::from(int), Value::from)
}

fn list(state: &mut State, items: Vec<Value>) -> Result<Value> {
    Seq::build(state, SeqKind::List, items)
}

fn tuple(state: &mut State, items: Vec<Value>) -> Result<Value> {
    Seq::build(state, SeqKind::Tuple, items)
}

fn string(state: &mut State, text: impl Into<String>) -> Result<Value> {
    let text = text.into();
    budget::spend(state, text.len())?;
    Ok(Value::from(text))
}
