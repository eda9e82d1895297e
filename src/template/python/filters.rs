//! Jinja's filters with Jinja2's results: what is lazy there is a generator here, what sorts there sorts here.

use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::methods::{self, is_space};
use super::object::{Generator, equal};
use super::{
    Args, Py, Result, budget, compare, flag, int_of, int_value, items_of, json, list, markup, members, num,
    py, str_arg, string, text, type_error, type_name, undefined_error,
};

/// A filter: the value left of the `|`, and the arguments.
type Filter = fn(&mut State, &Value, Args) -> Result<Value>;

/// By their names.
const FILTERS: &[(&str, Filter)] = &[
    ("abs", abs),
    ("capitalize", |state, input, args| on_text(state, input, args, "capitalize", methods::capitalize)),
    ("default d", default),
    ("dictsort", dictsort),
    ("escape e", escape),
    ("first", first),
    ("float", float),
    ("indent", indent),
    ("int", int),
    ("items", items),
    ("join", join),
    ("last", last),
    ("length count", length),
    ("list", |state, input, _| {
        let items = items_of(state, input)?;
        list(state, items)
    }),
    ("lower", |state, input, args| on_text(state, input, args, "lower", str::to_lowercase)),
    ("map", map),
    ("reject", |state, input, args| select(state, input, None, args, false)),
    ("rejectattr", |state, input, args| select_by_attribute(state, input, args, false)),
    ("replace", |state, input, args| {
        let [old, new, count] = args.bind("replace", ["old", "new", "count"])?;
        let args: Vec<Value> = [old, new, count].into_iter().flatten().collect();
        methods::replace(state, &text::str_of(input)?, &args)
    }),
    ("reverse", reverse),
    ("safe", |state, input, _| printed(state, input).map(Value::from_safe_string)),
    ("select", |state, input, args| select(state, input, None, args, true)),
    ("selectattr", |state, input, args| select_by_attribute(state, input, args, true)),
    ("sort", sort),
    ("string", |state, input, _| printed(state, input).map(|text| markup::same_safety(input, text))),
    ("sum", sum),
    ("title", |state, input, args| {
        let begins = |c| is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
        on_text(state, input, args, "title", |text| methods::title(text, begins))
    }),
    ("tojson", json::tojson),
    ("trim", |state, input, args| {
        let text = printed(state, input)?;
        let [chars] = args.bind("trim", ["chars"])?;
        Ok(markup::same_safety(input, methods::strip(&text, "trim", chars.as_ref())?))
    }),
    ("unique", unique),
    ("upper", |state, input, args| on_text(state, input, args, "upper", str::to_uppercase)),
];

pub(super) fn install(env: &mut Environment<'static>) {
    for &(names, filter) in FILTERS {
        for name in names.split(' ') {
            super::add_filter(env, name, move |state, mut args| {
                let input = args.take_input();
                filter(state, &input, args)
            });
        }
    }
}

/// A value as text, paid for.
fn printed(state: &mut State, value: &Value) -> Result<String> {
    budget::spend(state, compare::weight(value))?;
    text::str_of(value)
}

fn on_text(
    state: &mut State,
    input: &Value,
    args: Args,
    name: &str,
    map: impl Fn(&str) -> String,
) -> Result<Value> {
    let [] = args.bind(name, [])?;
    let mapped = map(&printed(state, input)?);
    let keeps_safety = name == "upper" || name == "lower";
    Ok(if keeps_safety { markup::same_safety(input, mapped) } else { Value::from(mapped) })
}

fn items(state: &mut State, input: &Value, _: Args) -> Result<Value> {
    let pairs = match py(input) {
        Py::Undefined => Vec::new(),
        Py::Dict(dict) => methods::pairs(state, dict)?,
        _ => return Err(type_error("Can only get item pairs from a mapping.")),
    };
    Generator::build(state, pairs)
}

fn length(_state: &mut State, input: &Value, _: Args) -> Result<Value> {
    Ok(Value::from(match py(input) {
        Py::Undefined => 0,
        Py::Str(text) => text.chars().count(),
        Py::Seq(seq) => seq.items.len(),
        Py::Dict(dict) => dict.entries.len(),
        _ => return Err(type_error(format!("object of type '{}' has no len()", type_name(input)))),
    }))
}

fn default(_state: &mut State, input: &Value, args: Args) -> Result<Value> {
    let [fallback, boolean] = args.bind("default", ["default_value", "boolean"])?;
    Ok(or_else(input.clone(), fallback.unwrap_or_else(|| Value::from("")), flag(boolean)))
}

fn first(state: &mut State, input: &Value, _: Args) -> Result<Value> {
    let first = match py(input) {
        Py::Generator(generator) => generator.next(),
        Py::Str(text) => text.chars().next().map(Value::from),
        Py::Seq(seq) => seq.items.first().cloned(),
        _ => items_of(state, input)?.into_iter().next(),
    };
    Ok(first.unwrap_or(Value::UNDEFINED))
}

fn last(state: &mut State, input: &Value, _: Args) -> Result<Value> {
    let last = match py(input) {
        Py::Generator(_) => return Err(type_error("'generator' object is not reversible")),
        Py::Str(text) => text.chars().next_back().map(Value::from),
        Py::Seq(seq) => seq.items.last().cloned(),
        _ => items_of(state, input)?.pop(),
    };
    Ok(last.unwrap_or(Value::UNDEFINED))
}

fn reverse(state: &mut State, input: &Value, _: Args) -> Result<Value> {
    match py(input) {
        Py::Str(text) => string(state, text.chars().rev().collect::<String>()),
        Py::Generator(_) => Err(type_error("argument must be iterable")),
        _ => {
            let mut items = items_of(state, input)?;
            items.reverse();
            Generator::build(state, items)
        }
    }
}

fn escape(state: &mut State, input: &Value, _: Args) -> Result<Value> {
    markup::escaped(state, input).map(Value::from_safe_string)
}

fn indent(state: &mut State, input: &Value, args: Args) -> Result<Value> {
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"])?;
    let prefix = match width {
        None => " ".repeat(4),
        Some(width) if width.as_str().is_some() => text::str_of(&width)?,
        Some(width) => {
            let width = usize::try_from(int_of(&width)?.max(0)).unwrap_or(usize::MAX);
            budget::spend(state, width)?;
            " ".repeat(width)
        }
    };
    // Jinja2 appends a newline before it splits, so that a final one keeps its empty line.
    let source = text::str_of(input)? + "\n";
    let (first, blank) = (flag(first), flag(blank));
    let lines = methods::lines(&source);
    budget::spend(state, source.len().saturating_add(lines.len().saturating_mul(prefix.len() + 1)))?;
    let mut out = String::new();
    for (at, line) in lines.iter().enumerate() {
        out.push_str(if at > 0 { "\n" } else { "" });
        let wanted = if at == 0 { first } else { blank || !line.is_empty() };
        out.push_str(if wanted { &prefix } else { "" });
        out.push_str(line);
    }
    Ok(Value::from(out))
}

fn int(_state: &mut State, input: &Value, args: Args) -> Result<Value> {
    let [fallback] = args.bind("int", ["default"])?;
    let parsed = match py(input) {
        Py::Str(text) => {
            let text = text.trim_matches(is_space).replace('_', "");
            text.parse().ok().or_else(|| text.parse().ok().and_then(float_to_int))
        }
        _ => num(input).and_then(|(int, float)| int.or_else(|| float_to_int(float))),
    };
    Ok(parsed.map_or_else(|| fallback.unwrap_or(Value::from(0)), int_value))
}

fn float_to_int(float: f64) -> Option<i128> {
    // 2^126 is far from every boundary of i128.
    (float.is_finite() && float.abs() < 8.5e37).then_some(float as i128)
}

fn float(_state: &mut State, input: &Value, args: Args) -> Result<Value> {
    let [fallback] = args.bind("float", ["default"])?;
    let parsed = match py(input) {
        Py::Str(text) => text.trim_matches(is_space).replace('_', "").parse().ok(),
        _ => num(input).map(|(_, float)| float),
    };
    Ok(parsed.map_or_else(|| fallback.unwrap_or(Value::from(0.0)), Value::from))
}

fn abs(_state: &mut State, input: &Value, _: Args) -> Result<Value> {
    match num(input) {
        Some((Some(int), _)) => Ok(int_value(int.saturating_abs())),
        Some((None, float)) => Ok(Value::from(float.abs())),
        None => Err(type_error(format!("bad operand type for abs(): '{}'", type_name(input)))),
    }
}

/// `a.b.0` read off an item, as `map(attribute=...)`, `sort` and others do.
fn path(item: &Value, attribute: &Value) -> Result<Value> {
    let Some(path) = attribute.as_str() else {
        return members::item(item, attribute);
    };
    path.split('.').try_fold(item.clone(), |value, part| match part.parse::<i64>() {
        Ok(index) => members::item(&value, &Value::from(index)),
        Err(_) => members::item(&value, &Value::from(part)),
    })
}

/// The item, or the part of it that an attribute names.
fn looked_at(item: &Value, attribute: Option<&Value>) -> Result<Value> {
    attribute.map_or_else(|| Ok(item.clone()), |attribute| path(item, attribute))
}

fn sort_key(item: &Value, attribute: Option<&Value>, case_sensitive: bool) -> Result<Value> {
    let key = looked_at(item, attribute)?;
    Ok(match key.as_str() {
        Some(text) if !case_sensitive => Value::from(text.to_lowercase()),
        _ => key,
    })
}

/// Items with their sort keys. `sort` also takes several attributes, separated by commas.
fn keyed(
    state: &mut State,
    input: &Value,
    attribute: Option<&Value>,
    case_sensitive: bool,
) -> Result<Vec<(Value, Value)>> {
    let items = items_of(state, input)?;
    budget::spend(state, compare::weight(input))?;
    let several = attribute.and_then(Value::as_str).filter(|names| names.contains(','));
    let key = |state: &mut State, item: &Value| match several {
        None => sort_key(item, attribute, case_sensitive),
        Some(names) => {
            let part = |name| sort_key(item, Some(&Value::from(name)), case_sensitive);
            let parts = names.split(',').map(part).collect::<Result<_>>()?;
            list(state, parts)
        }
    };
    items.into_iter().map(|item| Ok((key(state, &item)?, item))).collect()
}

fn sort(state: &mut State, input: &Value, args: Args) -> Result<Value> {
    let [reverse, case_sensitive, attribute] =
        args.bind("sort", ["reverse", "case_sensitive", "attribute"])?;
    sorted(state, input, flag(reverse), flag(case_sensitive), attribute.as_ref())
}

fn sorted(
    state: &mut State,
    input: &Value,
    reverse: bool,
    case_sensitive: bool,
    attribute: Option<&Value>,
) -> Result<Value> {
    let mut items = keyed(state, input, attribute, case_sensitive)?;
    if reverse {
        items.reverse(); // Python keeps equal items in their order also when it sorts downwards
    }
    compare::sort_by(&mut items, |(key, _)| key.clone())?;
    if reverse {
        items.reverse();
    }
    list(state, items.into_iter().map(|(_, item)| item).collect())
}

fn unique(state: &mut State, input: &Value, args: Args) -> Result<Value> {
    let [case_sensitive, attribute] = args.bind("unique", ["case_sensitive", "attribute"])?;
    let mut seen: Vec<Value> = Vec::new();
    let mut kept = Vec::new();
    for (key, item) in keyed(state, input, attribute.as_ref(), flag(case_sensitive))? {
        budget::spend(state, seen.len() * 16)?;
        if !seen.iter().any(|known| equal(known, &key)) {
            seen.push(key);
            kept.push(item);
        }
    }
    Generator::build(state, kept)
}

fn sum(state: &mut State, input: &Value, args: Args) -> Result<Value> {
    let [attribute, start] = args.bind("sum", ["attribute", "start"])?;
    let mut total = start.unwrap_or(Value::from(0));
    for item in items_of(state, input)? {
        let item = looked_at(&item, attribute.as_ref())?;
        total = state.apply_filter("py:add", &[total, item])?;
    }
    Ok(total)
}

fn dictsort(state: &mut State, input: &Value, args: Args) -> Result<Value> {
    let [case_sensitive, by, reverse] = args.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
    let Py::Dict(dict) = py(input) else {
        return Err(match input.is_undefined() {
            true => undefined_error("dictsort is applied to an undefined value"),
            false => type_error(format!("'{} object' has no attribute 'items'", type_name(input))),
        });
    };
    let at = match by.as_ref().and_then(Value::as_str).unwrap_or("key") {
        "key" => 0,
        "value" => 1,
        _ => return Err(type_error("You can only sort by either \"key\" or \"value\"")),
    };
    let pairs = methods::pairs(state, dict)?;
    let pairs = list(state, pairs)?;
    sorted(state, &pairs, flag(reverse), flag(case_sensitive), Some(&Value::from(at)))
}

fn join(state: &mut State, input: &Value, args: Args) -> Result<Value> {
    let [separator, attribute] = args.bind("join", ["d", "attribute"])?;
    let separator = separator.map_or(Ok(String::new()), |separator| text::str_of(&separator))?;
    let mut out = String::new();
    for (at, item) in items_of(state, input)?.into_iter().enumerate() {
        let item = looked_at(&item, attribute.as_ref())?;
        budget::spend(state, separator.len() + compare::weight(&item))?;
        out.push_str(if at > 0 { &separator } else { "" });
        out.push_str(&text::str_of(&item)?);
    }
    string(state, out)
}

fn map(state: &mut State, input: &Value, mut args: Args) -> Result<Value> {
    let mut mapped = Vec::new();
    let [attribute, fallback] = ["attribute", "default"]
        .map(|name| args.named.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone()));
    if args.positional.is_empty() && attribute.is_none() {
        return Err(type_error("map requires a filter argument"));
    }
    let filter = args.take_input();
    for item in items_unless_false(state, input)? {
        mapped.push(match &attribute {
            Some(attribute) => {
                or_else(path(&item, attribute)?, fallback.clone().unwrap_or(Value::UNDEFINED), false)
            }
            None => {
                let positional = std::iter::once(item).chain(args.positional.iter().cloned()).collect();
                let call = methods::raw(Args { positional, named: args.named.clone() });
                let name = filter_name(&filter)?;
                state.apply_filter(&name, &call).map_err(|error| named("filter", &name, error))?
            }
        });
    }
    Generator::build(state, mapped)
}

/// `map` and `select` take anything false, also None, for empty.
fn items_unless_false(state: &mut State, input: &Value) -> Result<Vec<Value>> {
    if input.is_true() { items_of(state, input) } else { Ok(Vec::new()) }
}

/// Adds the name to the error for an unknown filter or test, as Jinja2 words it.
fn named(kind: &str, name: &str, error: Error) -> Error {
    match error.kind() {
        ErrorKind::UnknownFilter | ErrorKind::UnknownTest => type_error(format!("No {kind} named '{name}'.")),
        _ => error,
    }
}

/// The name of a filter or test that a template hands over as text; our operators are not reachable this way.
fn filter_name(name: &Value) -> Result<String> {
    let name = str_arg("filter name", name)?.replace(is_space, "");
    if name.contains(':') { Err(type_error(format!("No filter named '{name}'."))) } else { Ok(name) }
}

fn select_by_attribute(state: &mut State, input: &Value, mut args: Args, keep: bool) -> Result<Value> {
    match args.take_input() {
        name if name.is_undefined() => Err(type_error("Missing parameter for attribute name")),
        name => select(state, input, Some(&name), args, keep),
    }
}

fn select(
    state: &mut State,
    input: &Value,
    attribute: Option<&Value>,
    mut args: Args,
    keep: bool,
) -> Result<Value> {
    let test = if args.positional.is_empty() { None } else { Some(filter_name(&args.take_input())?) };
    let mut kept = Vec::new();
    for item in items_unless_false(state, input)? {
        let subject = looked_at(&item, attribute)?;
        let passes = match &test {
            None => subject.is_true(),
            Some(test) => {
                let call: Vec<Value> = [subject].into_iter().chain(args.positional.iter().cloned()).collect();
                state.perform_test(test, &call).map_err(|error| named("test", test, error))?
            }
        };
        if passes == keep {
            kept.push(item);
        }
    }
    Generator::build(state, kept)
}

/// `a if a.is_true() else b`, for filters that take a fallback.
fn or_else(value: Value, fallback: Value, falsy_too: bool) -> Value {
    let missing = value.is_undefined() || (falsy_too && !value.is_true());
    if missing { fallback } else { value }
}
