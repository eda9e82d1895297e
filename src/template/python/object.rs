//! The containers and callable values that Python has and minijinja has not, or has with other behaviour.
//!
//! All are immutable but `Namespace` and the position of a `Generator`, as in Hugging Face's immutable sandbox.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::ValueKind;
use minijinja::{State, Value};

use super::{MAX_DEPTH, MAX_WEIGHT, Py, Result, budget, num, py, type_error};

/// Nesting below a value and the bytes that printing it takes, counted with repetition.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Cost {
    pub depth: u32,
    pub weight: u64,
}

impl Cost {
    /// Returns what a value adds to the cost of the container that holds it.
    pub fn of(value: &Value) -> Result<Cost> {
        Ok(match py(value) {
            Py::Str(text) => Cost { depth: 0, weight: text.len() as u64 + 4 },
            Py::Seq(seq) => seq.cost,
            Py::Dict(dict) => dict.cost,
            Py::Generator(generator) => generator.cost,
            Py::Method(method) => Cost { depth: method.depth, weight: 64 },
            Py::Namespace(namespace) => Cost { depth: namespace.hold(), weight: 40 },
            // The loop object holds its items, whose depth is not counted.
            Py::Other if !value.get_attr("depth0").unwrap_or_default().is_undefined() => {
                return Err(type_error("the loop object cannot be stored in another value"));
            }
            _ => Cost { depth: 0, weight: 40 },
        })
    }

    fn sum<'v>(values: impl Iterator<Item = &'v Value>) -> Result<Cost> {
        let mut total = Cost { depth: 1, weight: 16 };
        for value in values {
            let cost = Cost::of(value)?;
            total.depth = total.depth.max(cost.depth + 1);
            total.weight = total.weight.saturating_add(cost.weight);
        }
        if total.depth > MAX_DEPTH {
            return Err(budget::exhausted("its values nest too deeply"));
        }
        if total.weight > MAX_WEIGHT {
            return Err(budget::exhausted("it builds a value that is too large"));
        }
        Ok(total)
    }
}

/// One of Python's sequence types; they differ in printing and in their operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SeqKind {
    List,
    Tuple,
    Range,
    Keys,
    Values,
    Items,
}

impl SeqKind {
    pub(super) fn type_name(self) -> &'static str {
        match self {
            SeqKind::List => "list",
            SeqKind::Tuple => "tuple",
            SeqKind::Range => "range",
            SeqKind::Keys => "dict_keys",
            SeqKind::Values => "dict_values",
            SeqKind::Items => "dict_items",
        }
    }

    /// Views of a mapping have neither an index nor slices.
    pub(super) fn is_view(self) -> bool {
        matches!(self, SeqKind::Keys | SeqKind::Values | SeqKind::Items)
    }
}

/// A list, tuple, range or view.
#[derive(Debug)]
pub(crate) struct Seq {
    pub(super) kind: SeqKind,
    pub(super) items: Vec<Value>,
    pub(super) cost: Cost,
}

impl Seq {
    /// Builds a sequence without a rendering at hand (constants and inputs).
    pub(super) fn value(kind: SeqKind, items: Vec<Value>) -> Result<Value> {
        let cost = Cost::sum(items.iter())?;
        Ok(Value::from_object(Seq { kind, items, cost }))
    }

    pub(super) fn build(state: &mut State, kind: SeqKind, items: Vec<Value>) -> Result<Value> {
        budget::spend(state, 64 + items.len() * size_of::<Value>())?;
        Seq::value(kind, items)
    }
}

/// A mapping that keeps its order.
#[derive(Debug)]
pub(crate) struct Dict {
    pub(super) entries: Vec<(Value, Value)>,
    /// Positions of string keys, once a linear search would be slow.
    index: Option<HashMap<Arc<str>, usize>>,
    pub(super) cost: Cost,
}

const INDEX_FROM: usize = 12;

impl Dict {
    /// Builds a mapping; of equal keys the first position and the last value stay, as in Python.
    pub(crate) fn value(pairs: Vec<(Value, Value)>) -> Result<Value> {
        let mut dict = Dict { entries: Vec::with_capacity(pairs.len()), index: None, cost: Cost::default() };
        for (key, value) in pairs {
            if matches!(py(&key), Py::Dict(_) | Py::Namespace(_) | Py::Generator(_))
                || matches!(py(&key), Py::Seq(seq) if seq.kind != SeqKind::Tuple)
            {
                return Err(type_error(format!("unhashable type: '{}'", super::type_name(&key))));
            }
            match dict.position(&key) {
                Some(at) => dict.entries[at].1 = value,
                None => dict.push(key, value),
            }
        }
        dict.cost = Cost::sum(dict.entries.iter().flat_map(|(key, value)| [key, value]))?;
        Ok(Value::from_object(dict))
    }

    pub(super) fn build(state: &mut State, pairs: Vec<(Value, Value)>) -> Result<Value> {
        // Keys that are not strings are searched linearly.
        let others = pairs.iter().filter(|(key, _)| key.as_str().is_none()).count();
        budget::spend(state, 64 + pairs.len() * 4 * size_of::<Value>() + others * others)?;
        Dict::value(pairs)
    }

    fn push(&mut self, key: Value, value: Value) {
        let at = self.entries.len();
        if let (Some(index), Some(text)) = (&mut self.index, key.to_str()) {
            index.insert(text, at);
        }
        self.entries.push((key, value));
        if self.index.is_none() && self.entries.len() >= INDEX_FROM {
            let strings = self.entries.iter().enumerate();
            self.index = Some(strings.filter_map(|(at, (key, _))| Some((key.to_str()?, at))).collect());
        }
    }

    fn position(&self, key: &Value) -> Option<usize> {
        match (&self.index, key.as_str()) {
            (Some(index), Some(text)) => index.get(text).copied(),
            (None, Some(text)) => self.entries.iter().position(|(known, _)| known.as_str() == Some(text)),
            (_, None) => self.entries.iter().position(|(known, _)| equal(known, key)),
        }
    }

    pub(super) fn get(&self, key: &Value) -> Option<&Value> {
        self.position(key).map(|at| &self.entries[at].1)
    }
}

/// The result of lazy filters: it has no length, no index, and can be walked once.
#[derive(Debug)]
pub(super) struct Generator {
    items: Mutex<Vec<Value>>,
    cost: Cost,
}

impl Generator {
    pub fn build(state: &mut State, mut items: Vec<Value>) -> Result<Value> {
        budget::spend(state, 64 + items.len() * size_of::<Value>())?;
        let cost = Cost::sum(items.iter())?;
        items.reverse(); // taken from the end
        Ok(Value::from_object(Generator { items: Mutex::new(items), cost }))
    }

    pub fn drain(&self) -> Vec<Value> {
        let mut items = std::mem::take(&mut *self.items.lock().unwrap_or_else(PoisonError::into_inner));
        items.reverse();
        items
    }

    pub fn next(&self) -> Option<Value> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

/// `namespace(...)`: the only value whose members a template can assign.
///
/// Once it is part of another value it takes flat values only. So the depth that its holder counted stays true, and
/// no cycle can be built.
#[derive(Debug, Default)]
pub(super) struct Namespace {
    state: Mutex<NamespaceState>,
}

#[derive(Debug, Default)]
struct NamespaceState {
    members: Vec<(String, Value)>,
    /// Deepest nesting ever assigned.
    depth: u32,
    held: bool,
}

/// Members are searched linearly.
const MAX_MEMBERS: usize = 1000;

impl Namespace {
    pub fn value(members: Vec<(String, Value)>) -> Result<Value> {
        let namespace = Namespace::default();
        for (name, value) in members {
            namespace.set(&name, value)?;
        }
        Ok(Value::from_object(namespace))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, NamespaceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that another value holds this one; gives its depth.
    fn hold(&self) -> u32 {
        let mut state = self.lock();
        state.held = true;
        state.depth + 1
    }

    pub fn set(&self, name: &str, value: Value) -> Result<()> {
        let depth = Cost::of(&value)?.depth; // before the lock: the value may be this very namespace
        let mut state = self.lock();
        if state.held && depth > 0 {
            return Err(type_error("a namespace inside another value takes only plain values"));
        }
        if depth >= MAX_DEPTH {
            return Err(budget::exhausted("its values nest too deeply"));
        }
        state.depth = state.depth.max(depth);
        match state.members.iter().position(|(known, _)| known == name) {
            Some(at) => state.members[at].1 = value,
            None if state.members.len() >= MAX_MEMBERS => {
                return Err(budget::exhausted("a namespace has too many members"));
            }
            None => state.members.push((name.to_owned(), value)),
        }
        Ok(())
    }

    pub fn get(&self, name: &str) -> Option<Value> {
        self.lock().members.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
    }
}

/// A method taken off its value without a call, e.g. `tool.items` where `items` is Python's method.
#[derive(Debug)]
pub(super) struct Method {
    pub receiver: Value,
    pub name: String,
    pub depth: u32,
}

impl Method {
    pub fn value(receiver: &Value, name: &str) -> Result<Value> {
        let depth = Cost::of(receiver)?.depth + 1;
        if depth > MAX_DEPTH {
            return Err(budget::exhausted("its values nest too deeply"));
        }
        Ok(Value::from_object(Method { receiver: receiver.clone(), name: name.to_owned(), depth }))
    }
}

/// JSON as Python's `json.loads` would give it.
///
/// # Errors
/// When the value nests deeper than [`MAX_DEPTH`] or is too large.
pub(crate) fn from_json(json: &serde_json::Value) -> Result<Value> {
    Ok(match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(flag) => Value::from(*flag),
        serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(int), _) => Value::from(int),
            (_, Some(int)) => Value::from(int),
            _ => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(items) => {
            Seq::value(SeqKind::List, items.iter().map(from_json).collect::<Result<_>>()?)?
        }
        serde_json::Value::Object(members) => {
            let pair = |(key, value): (&String, _)| Ok((Value::from(key.as_str()), from_json(value)?));
            Dict::value(members.iter().map(pair).collect::<Result<_>>()?)?
        }
    })
}

/// A constant that minijinja folded into its own containers, as ours.
///
/// # Errors
/// When it nests too deeply or is too large.
pub(crate) fn adopt(value: &Value) -> Result<Value> {
    if value.is_kwargs() {
        return Ok(value.clone());
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let kind = if value.is_tuple() { SeqKind::Tuple } else { SeqKind::List };
            let items = value.try_iter()?.map(|item| adopt(&item)).collect::<Result<_>>()?;
            Seq::value(kind, items)
        }
        ValueKind::Map => {
            let pairs = value.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten();
            Dict::value(pairs.map(|(key, item)| Ok((key, adopt(&item)?))).collect::<Result<_>>()?)
        }
        _ => Ok(value.clone()),
    }
}

/// Python's `==`.
pub(super) fn equal(left: &Value, right: &Value) -> bool {
    if let (Some(a), Some(b)) = (num(left), num(right)) {
        return if let (Some(a), Some(b)) = (a.0, b.0) { a == b } else { a.1 == b.1 };
    }
    match (py(left), py(right)) {
        (Py::Undefined, Py::Undefined) | (Py::None, Py::None) => true,
        (Py::Str(a), Py::Str(b)) => a == b,
        (Py::Seq(a), Py::Seq(b)) => {
            a.kind == b.kind
                && a.items.len() == b.items.len()
                && a.items.iter().zip(&b.items).all(|(a, b)| equal(a, b))
        }
        (Py::Dict(a), Py::Dict(b)) => {
            a.entries.len() == b.entries.len()
                && a.entries.iter().all(|(key, value)| b.get(key).is_some_and(|other| equal(value, other)))
        }
        _ => false,
    }
}
