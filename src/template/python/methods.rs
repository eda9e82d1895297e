//! The methods of `str` and `dict`. What would change its receiver is refused, as in Hugging Face's immutable sandbox.

use minijinja::{State, Value};

use super::members::{attribute, has_method};
use super::object::{Dict, Seq, SeqKind};
use super::{
    Args, Py, Result, budget, int_of, items_of, list, markup, percent, py, str_arg, string, truthy, tuple,
    type_error, type_name, undefined_error,
};

const MUTATING: &[&str] = &[
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
];

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
    let container = match py(receiver) {
        Py::Seq(seq) => seq.kind() == SeqKind::List,
        Py::Dict(_) => true,
        _ => false,
    };
    if container && MUTATING.contains(&name) {
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
    let view = |state: &mut State, kind, items| Seq::build(state, kind, items);
    match name {
        "get" => {
            let key = args.next().ok_or_else(|| type_error("get expected at least 1 argument, got 0"))?;
            let fallback = args.next().unwrap_or(Value::from(()));
            Ok(dict.get(&key).cloned().unwrap_or(fallback))
        }
        "keys" => view(state, SeqKind::Keys, dict.entries().iter().map(|(key, _)| key.clone()).collect()),
        "values" => {
            view(state, SeqKind::Values, dict.entries().iter().map(|(_, value)| value.clone()).collect())
        }
        _ => {
            let pairs = pairs(state, dict)?;
            view(state, SeqKind::Items, pairs)
        }
    }
}

/// The members of a mapping as tuples.
pub(super) fn pairs(state: &mut State, dict: &Dict) -> Result<Vec<Value>> {
    dict.entries().iter().map(|(key, value)| tuple(state, vec![key.clone(), value.clone()])).collect()
}

fn str_method(state: &mut State, text: &str, name: &str, args: Args) -> Result<Value> {
    budget::spend(state, text.len())?;
    match name {
        "format" => percent::str_format(state, text, args),
        "split" | "rsplit" => split(state, text, name == "rsplit", args),
        "splitlines" => {
            let [keep] = args.bind(name, ["keepends"])?;
            let lines = lines(text, keep.is_some_and(|keep| truthy(&keep)));
            list(state, lines.into_iter().map(Value::from).collect())
        }
        "join" => {
            let [items] = args.bind(name, ["iterable"])?;
            join(
                state,
                text,
                &items.ok_or_else(|| type_error("join() takes exactly one argument (0 given)"))?,
            )
        }
        _ => {
            let args = args.no_names(&format!("str.{name}"))?;
            match args.is_empty() {
                true => nullary(state, text, name),
                false => with_args(state, text, name, &args),
            }
        }
    }
}

/// Methods without arguments.
fn nullary(state: &mut State, text: &str, name: &str) -> Result<Value> {
    let all = |test: fn(char) -> bool| Value::from(!text.is_empty() && text.chars().all(test));
    Ok(match name {
        "strip" | "lstrip" | "rstrip" => Value::from(strip(text, name, None)?),
        "upper" => return string(state, text.to_uppercase()),
        "lower" => return string(state, text.to_lowercase()),
        "title" => return string(state, title(text, |c| !(c.is_lowercase() || c.is_uppercase()))),
        "capitalize" => return string(state, capitalize(text)),
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isdigit" => all(char::is_numeric),
        "isspace" => all(is_space),
        _ => return Err(type_error(format!("{name}() takes at least 1 argument (0 given)"))),
    })
}

/// Methods with positional arguments.
fn with_args(state: &mut State, text: &str, name: &str, args: &[Value]) -> Result<Value> {
    let first = &args[0];
    match name {
        "strip" | "lstrip" | "rstrip" => strip(text, name, Some(first)).map(Value::from),
        "startswith" | "endswith" => affix(text, name, args),
        "removeprefix" => Ok(Value::from(text.strip_prefix(str_arg(name, first)?).unwrap_or(text))),
        "removesuffix" => Ok(Value::from(text.strip_suffix(str_arg(name, first)?).unwrap_or(text))),
        "replace" => replace(state, text, args),
        "find" | "rfind" | "count" => search(text, name, args),
        _ => Err(type_error(format!("str.{name}() takes no arguments ({} given)", args.len()))),
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

/// The part of a text that optional start and end arguments select, with the character index where it begins.
fn window<'t>(text: &'t str, args: &[Value]) -> Result<(&'t str, usize)> {
    if args.len() < 2 {
        return Ok((text, 0));
    }
    let len = text.chars().count() as i128;
    let bound = |at: usize, default: i128| match args.get(at) {
        None => Ok(default),
        Some(none) if none.is_none() => Ok(default),
        Some(value) => {
            int_of(value).map(|index| if index < 0 { (index + len).max(0) } else { index.min(len) })
        }
    };
    let (start, end) = (bound(1, 0)?, bound(2, len)?);
    let byte = |index: i128| text.char_indices().nth(index as usize).map_or(text.len(), |(at, _)| at);
    Ok((if start < end { &text[byte(start)..byte(end)] } else { "" }, start as usize))
}

fn affix(text: &str, name: &str, args: &[Value]) -> Result<Value> {
    let (text, _) = window(text, args)?;
    let test =
        |affix: &str| if name == "startswith" { text.starts_with(affix) } else { text.ends_with(affix) };
    let wrong = |value: &Value| {
        let kind = type_name(value);
        type_error(format!("{name} first arg must be str or a tuple of str, not {kind}"))
    };
    match py(&args[0]) {
        Py::Str(affix) => Ok(Value::from(test(affix))),
        Py::Seq(seq) if seq.kind() == SeqKind::Tuple => {
            let mut found = false;
            for affix in seq.items() {
                found |= test(affix.as_str().ok_or_else(|| wrong(affix))?);
            }
            Ok(Value::from(found))
        }
        _ => Err(wrong(&args[0])),
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

fn search(text: &str, name: &str, args: &[Value]) -> Result<Value> {
    let needle = str_arg(name, &args[0])?;
    let (text, offset) = window(text, args)?;
    let chars = |at: usize| text[..at].chars().count() + offset;
    let found = match name {
        "count" if needle.is_empty() => return Ok(Value::from(text.chars().count() + 1)),
        "count" => return Ok(Value::from(text.matches(needle).count())),
        "find" => text.find(needle),
        _ => text.rfind(needle),
    };
    Ok(found.map_or(Value::from(-1), |at| Value::from(chars(at))))
}

fn split(state: &mut State, text: &str, from_right: bool, args: Args) -> Result<Value> {
    let [separator, limit] = args.bind("split", ["sep", "maxsplit"])?;
    let limit = limit.map_or(Ok(-1), |limit| int_of(&limit))?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = match separator.filter(|separator| !separator.is_none()) {
        Some(separator) => {
            let separator = str_arg("split()", &separator)?.to_owned();
            if separator.is_empty() {
                return Err(type_error("empty separator"));
            }
            let pieces = limit.saturating_add(1);
            match from_right {
                true => text.rsplitn(pieces, separator.as_str()).collect(),
                false => text.splitn(pieces, separator.as_str()).collect(),
            }
        }
        None => split_space(text, limit, from_right),
    };
    if from_right {
        parts.reverse();
    }
    budget::spend(state, parts.len() * size_of::<Value>() * 2)?;
    list(state, parts.into_iter().map(Value::from).collect())
}

/// The parts between white space; those of a split from the right, last part first.
fn split_space(text: &str, limit: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest =
        if from_right { text.trim_end_matches(is_space) } else { text.trim_start_matches(is_space) };
    while !rest.is_empty() {
        let space = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = space.filter(|_| parts.len() < limit) else {
            parts.push(rest); // with the white space at its other end, as in Python
            break;
        };
        let (before, behind) =
            (rest[..at].trim_end_matches(is_space), rest[at..].trim_start_matches(is_space));
        let (part, others) = if from_right { (behind, before) } else { (before, behind) };
        parts.push(part);
        rest = others;
    }
    parts
}

/// Lines at every line boundary that Python knows.
pub(super) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut start = 0;
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        if !matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        ) {
            continue;
        }
        let mut end = at + c.len_utf8();
        if c == '\r' && chars.next_if(|(_, next)| *next == '\n').is_some() {
            end += 1;
        }
        lines.push(&text[start..if keep_ends { end } else { at }]);
        start = end;
    }
    if start < text.len() {
        lines.push(&text[start..]);
    }
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
