//! The methods of `str` and `dict`. What would change its receiver is refused, as in Hugging Face's immutable sandbox.

use minijinja::{State, Value};

use super::members::{attribute, has_method};
use super::object::{Dict, Seq, SeqKind};
use super::{
    Args, Py, Result, budget, int_of, items_of, list, markup, percent, py, str_arg, string, tuple,
    type_error, type_name, undefined_error,
};

/// `receiver.name(args)`.
pub(super) fn call(state: &mut State, receiver: &Value, name: &str, args: Args) -> Result<Value> {
    if has_method(receiver, name) {
        return match py(receiver) {
            Py::Str(text) if receiver.is_safe() => {
                let args = markup::escape_args(state, name, args)?;
                let result = str_method(state, text, name, args)?;
                markup::mark(state, result)
            }
            Py::Str(text) => str_method(state, text, name, args),
            Py::Dict(dict) => dict_method(state, dict, name, args),
            _ => Err(unknown(receiver, name)),
        };
    }
    let changes = match (py(receiver), name) {
        (Py::Seq(seq), _) if seq.kind != SeqKind::List => false,
        (
            Py::Seq(_) | Py::Dict(_),
            "append" | "clear" | "extend" | "insert" | "pop" | "popitem" | "remove" | "reverse"
            | "setdefault" | "sort" | "update",
        ) => true,
        _ => false,
    };
    if changes {
        let kind = type_name(receiver);
        return Err(type_error(format!("access to attribute '{name}' of '{kind}' object is unsafe")));
    }
    match attribute(receiver, name)? {
        member if member.is_undefined() => Err(unknown(receiver, name)),
        member => member.call(state, &raw(args)),
    }
}

/// Arguments as minijinja passes them.
pub(super) fn raw(args: Args) -> Vec<Value> {
    let mut values = args.positional;
    if !args.named.is_empty() {
        values.push(Value::from(args.named.into_iter().collect::<minijinja::value::Kwargs>()));
    }
    values
}

fn unknown(receiver: &Value, name: &str) -> minijinja::Error {
    undefined_error(format!("'{} object' has no attribute '{name}'", type_name(receiver)))
}

fn dict_method(state: &mut State, dict: &Dict, name: &str, args: Args) -> Result<Value> {
    let mut args = args.no_names(name)?.into_iter();
    let (kind, items) = match name {
        "get" => {
            let key = args.next().ok_or_else(|| type_error("get expected at least 1 argument, got 0"))?;
            let fallback = args.next().unwrap_or(Value::from(()));
            return Ok(dict.get(&key).cloned().unwrap_or(fallback));
        }
        "keys" => (SeqKind::Keys, dict.entries.iter().map(|(key, _)| key.clone()).collect()),
        "values" => (SeqKind::Values, dict.entries.iter().map(|(_, value)| value.clone()).collect()),
        _ => (SeqKind::Items, pairs(state, dict)?),
    };
    Seq::build(state, kind, items)
}

/// The members of a mapping as tuples.
pub(super) fn pairs(state: &mut State, dict: &Dict) -> Result<Vec<Value>> {
    dict.entries.iter().map(|(key, value)| tuple(state, vec![key.clone(), value.clone()])).collect()
}

fn str_method(state: &mut State, text: &str, name: &str, args: Args) -> Result<Value> {
    budget::spend(state, text.len())?;
    match name {
        "format" => percent::str_format(state, text, args),
        "split" | "rsplit" => split(state, text, name, args),
        "splitlines" => {
            let [] = args.bind(name, [])?;
            list(state, lines(text).into_iter().map(Value::from).collect())
        }
        "join" => {
            let [items] = args.bind(name, ["iterable"])?;
            let items = items.ok_or_else(|| type_error("join() takes exactly one argument (0 given)"))?;
            join(state, text, &items)
        }
        _ => {
            let args = args.no_names(&format!("str.{name}"))?;
            positional(state, text, name, &args)
        }
    }
}

/// Methods whose arguments have no names.
fn positional(state: &mut State, text: &str, name: &str, args: &[Value]) -> Result<Value> {
    let all = |test: fn(char) -> bool| Ok(Value::from(!text.is_empty() && text.chars().all(test)));
    match (name, args) {
        ("strip" | "lstrip" | "rstrip", [] | [_]) => strip(text, name, args.first()).map(Value::from),
        ("upper", []) => string(state, text.to_uppercase()),
        ("lower", []) => string(state, text.to_lowercase()),
        ("title", []) => string(state, title(text, |c| !(c.is_lowercase() || c.is_uppercase()))),
        ("capitalize", []) => string(state, capitalize(text)),
        ("isalnum", []) => all(char::is_alphanumeric),
        ("isalpha", []) => all(char::is_alphabetic),
        ("isdigit", []) => all(char::is_numeric),
        ("isspace", []) => all(is_space),
        (_, []) => Err(type_error(format!("{name}() takes at least 1 argument (0 given)"))),
        ("replace", _) => replace(state, text, args),
        ("startswith" | "endswith", [other]) => affix(text, name, other),
        ("removeprefix" | "removesuffix", [other]) => {
            let other = str_arg(name, other)?;
            let is_prefix = name == "removeprefix";
            let rest = if is_prefix { text.strip_prefix(other) } else { text.strip_suffix(other) };
            Ok(Value::from(rest.unwrap_or(text)))
        }
        ("find" | "rfind" | "count", [other]) => search(text, name, other),
        _ => Err(type_error(format!("str.{name}() with {} arguments is not supported", args.len()))),
    }
}

/// `str.isspace` for one character: Unicode's white space and four ASCII separators.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Upper-cases the first character and what follows one that `begins` is true of, and lower-cases the rest.
pub(super) fn title(text: &str, begins: fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    let mut is_first = true;
    for c in text.chars() {
        match is_first {
            true => out.extend(c.to_uppercase()),
            false => out.extend(c.to_lowercase()),
        }
        is_first = begins(c);
    }
    out
}

pub(super) fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let first: String = chars.next().into_iter().flat_map(char::to_uppercase).collect();
    first + &chars.as_str().to_lowercase()
}

/// Removes these characters, else white space, from both ends, or from one for `lstrip` and `rstrip`.
pub(super) fn strip<'t>(text: &'t str, name: &str, chars: Option<&Value>) -> Result<&'t str> {
    let chars: Option<Vec<char>> = match chars.filter(|chars| !chars.is_none()) {
        Some(chars) => Some(str_arg(name, chars)?.chars().take(4096).collect()),
        None => None,
    };
    let is_stripped = |c: char| chars.as_ref().map_or_else(|| is_space(c), |chars| chars.contains(&c));
    let text = if name == "rstrip" { text } else { text.trim_start_matches(is_stripped) };
    Ok(if name == "lstrip" { text } else { text.trim_end_matches(is_stripped) })
}

fn affix(text: &str, name: &str, affix: &Value) -> Result<Value> {
    let test = |affix: &Value| match affix.as_str() {
        Some(affix) => Ok(if name == "startswith" { text.starts_with(affix) } else { text.ends_with(affix) }),
        None => {
            let kind = type_name(affix);
            Err(type_error(format!("{name} first arg must be str or a tuple of str, not {kind}")))
        }
    };
    match py(affix) {
        Py::Seq(seq) if seq.kind == SeqKind::Tuple => {
            let found = seq.items.iter().map(test).collect::<Result<Vec<bool>>>()?;
            Ok(Value::from(found.contains(&true)))
        }
        _ => test(affix).map(Value::from),
    }
}

/// `str.replace`, also the filter.
pub(super) fn replace(state: &mut State, text: &str, args: &[Value]) -> Result<Value> {
    let [old, new, rest @ ..] = args else {
        return Err(type_error("replace expected at least 2 arguments, got 1"));
    };
    let (old, new) = (str_arg("replace()", old)?, str_arg("replace()", new)?);
    let limit = match rest.first() {
        Some(limit) if !limit.is_none() => usize::try_from(int_of(limit)?).unwrap_or(usize::MAX),
        _ => usize::MAX,
    };
    let hits = if old.is_empty() { text.chars().count() + 1 } else { text.matches(old).count() }.min(limit);
    budget::spend(state, text.len().saturating_add(hits.saturating_mul(new.len())))?;
    Ok(Value::from(text.replacen(old, new, limit)))
}

fn search(text: &str, name: &str, needle: &Value) -> Result<Value> {
    let needle = str_arg(name, needle)?;
    let found = match name {
        "count" if needle.is_empty() => return Ok(Value::from(text.chars().count() + 1)),
        "count" => return Ok(Value::from(text.matches(needle).count())),
        "find" => text.find(needle),
        _ => text.rfind(needle),
    };
    Ok(found.map_or(Value::from(-1), |at| Value::from(text[..at].chars().count())))
}

fn split(state: &mut State, text: &str, name: &str, args: Args) -> Result<Value> {
    let [separator, limit] = args.bind("split", ["sep", "maxsplit"])?;
    let limit = limit.map_or(Ok(-1), |limit| int_of(&limit))?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let separator = separator.filter(|separator| !separator.is_none());
    let separator = separator.as_ref().map(|separator| str_arg("split()", separator)).transpose()?;
    let parts: Vec<&str> = match (separator, name) {
        (Some(""), _) => return Err(type_error("empty separator")),
        (Some(separator), "split") => text.splitn(limit.saturating_add(1), separator).collect(),
        (Some(separator), _) => {
            let mut parts: Vec<&str> = text.rsplitn(limit.saturating_add(1), separator).collect();
            parts.reverse();
            parts
        }
        (None, "split") => split_space(text, limit),
        (None, _) if limit == usize::MAX => split_space(text, limit),
        (None, _) => return Err(type_error("rsplit() with a limit needs a separator")),
    };
    budget::spend(state, parts.len() * size_of::<Value>() * 2)?;
    list(state, parts.into_iter().map(Value::from).collect())
}

/// The parts between white space; the last one keeps the white space at its end if the limit has been reached.
fn split_space(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        let at = rest.find(is_space).filter(|_| parts.len() < limit).unwrap_or(rest.len());
        parts.push(&rest[..at]);
        rest = rest[at..].trim_start_matches(is_space);
    }
    parts
}

/// Lines at every line boundary that Python knows.
pub(super) fn lines(text: &str) -> Vec<String> {
    let is_end = |c| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines: Vec<String> = text.replace("\r\n", "\n").split(is_end).map(str::to_owned).collect();
    lines.pop_if(|last| last.is_empty());
    lines
}

fn join(state: &mut State, separator: &str, items: &Value) -> Result<Value> {
    let items = items_of(state, items)?;
    let mut out = String::new();
    for (at, item) in items.iter().enumerate() {
        let item = item.as_str().ok_or_else(|| {
            type_error(format!("sequence item {at}: expected str instance, {} found", type_name(item)))
        })?;
        budget::spend(state, separator.len() + item.len())?;
        out.push_str(if at > 0 { separator } else { "" });
        out.push_str(item);
    }
    Ok(Value::from(out))
}
