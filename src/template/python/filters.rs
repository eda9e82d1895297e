//! Jinja's filters with Jinja2's results: what is lazy there is a generator here, what sorts there sorts here.

use minijinja::{Environment, State, Value};

use super::json::{self, Layout};
use super::methods::{self, is_space};
use super::object::{Generator, Seq, SeqKind};
use super::{
    Args, Native, Py, Result, budget, int_of, int_value, items_of, list, markup, ops, percent, py, str_arg,
    string, text, truthy, type_error, type_name, undefined_error,
};

const FILTERS: &[(&str, Native)] = &[
    ("abs", abs),
    ("attr", attr),
    ("batch", batch),
    ("capitalize", |state, args| on_text(state, args, "capitalize", methods::capitalize)),
    ("center", center),
    ("count", length),
    ("d", default),
    ("default", default),
    ("dictsort", dictsort),
    ("e", escape),
    ("escape", escape),
    ("first", first),
    ("float", float),
    ("forceescape", force_escape),
    ("format", |state, mut args| {
        let spec = text::str_of(&take_input(&mut args))?;
        percent::printf(state, &spec, args)
    }),
    ("groupby", groupby),
    ("indent", indent),
    ("int", int),
    ("items", items),
    ("join", join),
    ("last", last),
    ("length", length),
    ("list", |state, mut args| {
        let items = items_of(state, &take_input(&mut args))?;
        list(state, items)
    }),
    ("lower", |state, args| on_text(state, args, "lower", str::to_lowercase)),
    ("map", map),
    ("max", |state, args| extreme(state, args, true)),
    ("min", |state, args| extreme(state, args, false)),
    ("pprint", |state, mut args| {
        let input = take_input(&mut args);
        budget::spend(state, ops::weight(&input))?;
        text::repr_of(&input).map(Value::from)
    }),
    ("reject", |state, args| select(state, args, false, false)),
    ("rejectattr", |state, args| select(state, args, true, false)),
    ("replace", |state, mut args| {
        let input = text::str_of(&take_input(&mut args))?;
        let [old, new, count] = args.bind("replace", ["old", "new", "count"])?;
        let args: Vec<Value> = [old, new, count].into_iter().flatten().collect();
        methods::replace(state, &input, &args)
    }),
    ("reverse", reverse),
    ("round", round),
    ("safe", |state, mut args| {
        let input = take_input(&mut args);
        budget::spend(state, ops::weight(&input))?;
        text::str_of(&input).map(Value::from_safe_string)
    }),
    ("select", |state, args| select(state, args, false, true)),
    ("selectattr", |state, args| select(state, args, true, true)),
    ("slice", slice),
    ("sort", sort),
    ("string", |state, mut args| {
        let input = take_input(&mut args);
        budget::spend(state, ops::weight(&input))?;
        text::str_of(&input).map(|text| ops::same_safety(&input, text))
    }),
    ("striptags", |state, args| on_text(state, args, "striptags", strip_tags)),
    ("sum", sum),
    ("title", |state, args| on_text(state, args, "title", title)),
    ("tojson", tojson),
    ("trim", trim),
    ("truncate", truncate),
    ("unique", unique),
    ("upper", |state, args| on_text(state, args, "upper", str::to_uppercase)),
    ("urlencode", urlencode),
    ("wordcount", |_, mut args| {
        let input = text::str_of(&take_input(&mut args))?;
        let words = input.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty());
        Ok(Value::from(words.count()))
    }),
];

/// Filters of minijinja that Jinja2 has not; a template that uses one would fail elsewhere.
const FOREIGN: &[&str] = &["bool", "chain", "lines", "split", "zip"];

pub(super) fn install(env: &mut Environment<'static>) {
    for name in FOREIGN {
        env.remove_filter(name);
    }
    for (name, native) in FILTERS {
        super::add_filter(env, name, *native);
    }
}

/// The value left of the `|`.
fn take_input(args: &mut Args) -> Value {
    if args.positional.is_empty() { Value::UNDEFINED } else { args.positional.remove(0) }
}

fn flag(value: Option<Value>) -> bool {
    value.is_some_and(|value| truthy(&value))
}

fn on_text(state: &mut State, mut args: Args, name: &str, map: impl Fn(&str) -> String) -> Result<Value> {
    let input = take_input(&mut args);
    let [] = args.bind(name, [])?;
    budget::spend(state, ops::weight(&input))?;
    let mapped = map(&text::str_of(&input)?);
    Ok(if name == "upper" || name == "lower" {
        ops::same_safety(&input, mapped)
    } else {
        Value::from(mapped)
    })
}

fn tojson(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let [ascii, indent, separators, sort] =
        args.bind("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) if indent.as_str().is_some() => indent.as_str().map(str::to_owned),
        Some(width) => Some(" ".repeat(usize::try_from(int_of(&width)?.clamp(0, 64)).unwrap_or(0))),
    };
    let mut layout = Layout {
        item_separator: if indent.is_some() { "," } else { ", " }.to_owned(),
        key_separator: ": ".to_owned(),
        sort_keys: flag(sort),
        ensure_ascii: flag(ascii),
        indent,
    };
    if let Some(separators) = separators.filter(|separators| !separators.is_none()) {
        let [item, key] = <[Value; 2]>::try_from(items_of(state, &separators)?)
            .map_err(|_| type_error("separators must be a pair of strings"))?;
        layout.item_separator = str_arg("separators", &item)?.to_owned();
        layout.key_separator = str_arg("separators", &key)?.to_owned();
    }
    let padding = layout.indent.as_ref().map_or(0, |indent| 8 * indent.len());
    let separators = layout.item_separator.len() + layout.key_separator.len();
    budget::spend(state, ops::weight(&input).saturating_mul(1 + padding / 8 + separators / 8))?;
    let printed = json::dumps(&input, &layout)?;
    string(state, printed)
}

fn items(state: &mut State, mut args: Args) -> Result<Value> {
    let pairs = match py(&take_input(&mut args)) {
        Py::Undefined => Vec::new(),
        Py::Dict(dict) => methods::pairs(state, dict)?,
        _ => return Err(type_error("Can only get item pairs from a mapping.")),
    };
    Generator::build(state, pairs)
}

fn length(_state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    Ok(Value::from(match py(&input) {
        Py::Undefined => 0,
        Py::Str(text) => text.chars().count(),
        Py::Seq(seq) => seq.items().len(),
        Py::Dict(dict) => dict.entries().len(),
        _ => return Err(type_error(format!("object of type '{}' has no len()", type_name(&input)))),
    }))
}

fn default(_state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let [fallback, boolean] = args.bind("default", ["default_value", "boolean"])?;
    Ok(ops::or_else(input, fallback.unwrap_or_else(|| Value::from("")), flag(boolean)))
}

fn first(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let first = match py(&input) {
        Py::Generator(generator) => generator.next(),
        Py::Str(text) => text.chars().next().map(Value::from),
        Py::Seq(seq) => seq.items().first().cloned(),
        _ => items_of(state, &input)?.into_iter().next(),
    };
    Ok(first.unwrap_or(Value::UNDEFINED))
}

fn last(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let last = match py(&input) {
        Py::Generator(_) => return Err(type_error("'generator' object is not reversible")),
        Py::Str(text) => text.chars().next_back().map(Value::from),
        Py::Seq(seq) => seq.items().last().cloned(),
        _ => items_of(state, &input)?.pop(),
    };
    Ok(last.unwrap_or(Value::UNDEFINED))
}

fn reverse(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    match py(&input) {
        Py::Str(text) => string(state, text.chars().rev().collect::<String>()),
        Py::Generator(_) => Err(type_error("argument must be iterable")),
        _ => {
            let mut items = items_of(state, &input)?;
            items.reverse();
            Generator::build(state, items)
        }
    }
}

fn trim(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    budget::spend(state, ops::weight(&input))?;
    let printed = text::str_of(&input)?;
    let [chars] = args.bind("trim", ["chars"])?;
    Ok(match chars.filter(|chars| !chars.is_none()) {
        None => ops::same_safety(&input, printed.trim_matches(is_space)),
        Some(chars) => {
            let chars: Vec<char> = str_arg("trim", &chars)?.chars().take(4096).collect();
            ops::same_safety(&input, printed.trim_matches(&chars[..]))
        }
    })
}

/// Upper-cases what follows a space, dash or opening bracket, and lower-cases the rest.
fn title(input: &str) -> String {
    let mut out = String::with_capacity(input.len());
    let mut begins = true;
    for c in input.chars() {
        if begins {
            out.extend(c.to_uppercase())
        } else {
            out.extend(c.to_lowercase())
        }
        begins = is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
    }
    out
}

fn strip_tags(input: &str) -> String {
    let mut out = String::new();
    let mut rest = input;
    while let Some((before, tag)) = rest.split_once('<') {
        out.push_str(before);
        let close = if tag.starts_with("!--") { "-->" } else { ">" };
        let Some((_, after)) = tag.split_once(close) else {
            rest = &rest[before.len()..];
            break;
        };
        rest = after;
    }
    out.push_str(rest);
    out.split(is_space).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

fn escape(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    markup::escaped(state, &input).map(Value::from_safe_string)
}

fn force_escape(state: &mut State, mut args: Args) -> Result<Value> {
    let input = text::str_of(&take_input(&mut args))?;
    markup::escaped(state, &Value::from(input)).map(Value::from_safe_string)
}

fn urlencode(state: &mut State, mut args: Args) -> Result<Value> {
    let input = text::str_of(&take_input(&mut args))?;
    let mut out = String::with_capacity(input.len());
    for byte in input.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' | b'/' => {
                out.push(byte.into())
            }
            byte => out.push_str(&format!("%{byte:02X}")),
        }
    }
    string(state, out)
}

fn center(state: &mut State, mut args: Args) -> Result<Value> {
    let input = text::str_of(&take_input(&mut args))?;
    let [width] = args.bind("center", ["width"])?;
    let width = width.unwrap_or(Value::from(80));
    methods::call(state, &Value::from(input), "center", Args { positional: vec![width], named: Vec::new() })
}

fn truncate(state: &mut State, mut args: Args) -> Result<Value> {
    let input = text::str_of(&take_input(&mut args))?;
    let [length, kill_words, end, leeway] =
        args.bind("truncate", ["length", "killwords", "end", "leeway"])?;
    let number = |value: Option<Value>, default: i128| value.map_or(Ok(default), |value| int_of(&value));
    let (length, leeway) = (number(length, 255)?, number(leeway, 5)?);
    let end = end.map_or(Ok("...".to_owned()), |end| text::str_of(&end))?;
    if input.chars().count() as i128 <= length.saturating_add(leeway) {
        return string(state, input);
    }
    let room = usize::try_from(length - end.chars().count() as i128).unwrap_or(0);
    let cut: String = input.chars().take(room).collect();
    let kept = match flag(kill_words) {
        true => cut.as_str(),
        false => cut.rsplit_once(' ').map_or(cut.as_str(), |(words, _)| words),
    };
    string(state, format!("{kept}{end}"))
}

fn indent(state: &mut State, mut args: Args) -> Result<Value> {
    let input = text::str_of(&take_input(&mut args))?;
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
    let source = input + "\n";
    let (first, blank) = (flag(first), flag(blank));
    let lines = methods::lines(&source, false);
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

fn int(_state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let [fallback, base] = args.bind("int", ["default", "base"])?;
    let base = base.map_or(Ok(10), |base| int_of(&base))?;
    let parsed = match py(&input) {
        Py::Int(int) => Some(int),
        Py::Bool(flag) => Some(flag.into()),
        Py::Float(float) => float_to_int(float),
        Py::Str(text) => parse_int(text, base),
        _ => None,
    };
    Ok(parsed.map_or_else(|| fallback.unwrap_or(Value::from(0)), int_value))
}

fn float_to_int(float: f64) -> Option<i128> {
    // 2^126 is far from every boundary of i128.
    (float.is_finite() && float.abs() < 8.5e37).then_some(float as i128)
}

fn parse_int(text: &str, base: i128) -> Option<i128> {
    let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base))?;
    let text = text.trim_matches(is_space).replace('_', "");
    let prefix = match base {
        16 => "0x",
        8 => "0o",
        2 => "0b",
        _ => "",
    };
    let digits = text.to_lowercase();
    let parsed = i128::from_str_radix(digits.strip_prefix(prefix).unwrap_or(&digits), base).ok();
    parsed.or_else(|| text.parse::<f64>().ok().filter(|_| base == 10).and_then(float_to_int))
}

fn float(_state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let [fallback] = args.bind("float", ["default"])?;
    let parsed = match py(&input) {
        Py::Int(int) => Some(int as f64),
        Py::Bool(flag) => Some(flag.into()),
        Py::Float(float) => Some(float),
        Py::Str(text) => text.trim_matches(is_space).replace('_', "").parse().ok(),
        _ => None,
    };
    Ok(parsed.map_or_else(|| fallback.unwrap_or(Value::from(0.0)), Value::from))
}

fn abs(_state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    match py(&input) {
        Py::Int(int) => Ok(int_value(int.saturating_abs())),
        Py::Bool(flag) => Ok(Value::from(i64::from(flag))),
        Py::Float(float) => Ok(Value::from(float.abs())),
        _ => Err(type_error(format!("bad operand type for abs(): '{}'", type_name(&input)))),
    }
}

fn round(_state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let [precision, method] = args.bind("round", ["precision", "method"])?;
    let precision = precision.map_or(Ok(0), |precision| int_of(&precision))?.clamp(-300, 300) as i32;
    let number = match py(&input) {
        Py::Int(int) => return Ok(int_value(int)),
        Py::Float(float) => float,
        _ => return Err(type_error(format!("type {} doesn't define __round__ method", type_name(&input)))),
    };
    let scale = 10_f64.powi(precision);
    Ok(Value::from(match method.as_ref().and_then(Value::as_str).unwrap_or("common") {
        "ceil" => (number * scale).ceil() / scale,
        "floor" => (number * scale).floor() / scale,
        // Correct rounding of the decimal expansion, ties to even, as CPython does it.
        _ if precision >= 0 => format!("{number:.0$}", precision as usize).parse().unwrap_or(number),
        _ => (number * scale).round_ties_even() / scale,
    }))
}

fn attr(_state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let [name] = args.bind("attr", ["name"])?;
    let name = name.ok_or_else(|| type_error("attr() needs a name"))?;
    let name = str_arg("attr", &name)?;
    // Only true attributes: a member of a mapping is none.
    if matches!(py(&input), Py::Dict(_)) && !methods::has(&input, name) {
        return Ok(Value::UNDEFINED);
    }
    ops::attribute(&input, name)
}

/// `a.b.0` read off an item, as `map(attribute=...)`, `sort` and others do.
fn path(item: &Value, attribute: &Value) -> Result<Value> {
    let Some(path) = attribute.as_str() else {
        return ops::item(item, attribute);
    };
    path.split('.').try_fold(item.clone(), |value, part| match part.parse::<i64>() {
        Ok(index) => ops::item(&value, &Value::from(index)),
        Err(_) => ops::item(&value, &Value::from(part)),
    })
}

fn sort_key(item: &Value, attribute: Option<&Value>, case_sensitive: bool) -> Result<Value> {
    let key = attribute.map_or_else(|| Ok(item.clone()), |attribute| path(item, attribute))?;
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
    budget::spend(state, ops::weight(input))?;
    let attributes: Option<Vec<Value>> = attribute
        .and_then(Value::as_str)
        .filter(|names| names.contains(','))
        .map(|names| names.split(',').map(Value::from).collect());
    let key = |state: &mut State, item: &Value| match &attributes {
        None => sort_key(item, attribute, case_sensitive),
        Some(names) => {
            let parts = names.iter().map(|name| sort_key(item, Some(name), case_sensitive));
            let parts = parts.collect::<Result<Vec<_>>>()?;
            list(state, parts)
        }
    };
    items.into_iter().map(|item| Ok((key(state, &item)?, item))).collect()
}

fn sort(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let [reverse, case_sensitive, attribute] =
        args.bind("sort", ["reverse", "case_sensitive", "attribute"])?;
    let mut items = keyed(state, &input, attribute.as_ref(), flag(case_sensitive))?;
    let reverse = flag(reverse);
    if reverse {
        items.reverse(); // Python keeps equal items in their order also when it sorts downwards
    }
    ops::sort_by(&mut items, |(key, _)| key.clone())?;
    if reverse {
        items.reverse();
    }
    list(state, items.into_iter().map(|(_, item)| item).collect())
}

fn unique(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let [case_sensitive, attribute] = args.bind("unique", ["case_sensitive", "attribute"])?;
    let mut seen: Vec<Value> = Vec::new();
    let mut kept = Vec::new();
    for (key, item) in keyed(state, &input, attribute.as_ref(), flag(case_sensitive))? {
        budget::spend(state, seen.len() * 16)?;
        if !seen.iter().any(|known| ops::equal(known, &key)) {
            seen.push(key);
            kept.push(item);
        }
    }
    Generator::build(state, kept)
}

fn extreme(state: &mut State, mut args: Args, largest: bool) -> Result<Value> {
    let input = take_input(&mut args);
    let [case_sensitive, attribute] = args.bind("min/max", ["case_sensitive", "attribute"])?;
    let mut best: Option<(Value, Value)> = None;
    for (key, item) in keyed(state, &input, attribute.as_ref(), flag(case_sensitive))? {
        let better = match &best {
            None => true,
            Some((known, _)) if largest => ops::order(">", &key, known)?.is_gt(),
            Some((known, _)) => ops::order("<", &key, known)?.is_lt(),
        };
        if better {
            best = Some((key, item));
        }
    }
    Ok(best.map_or(Value::UNDEFINED, |(_, item)| item))
}

fn sum(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let [attribute, start] = args.bind("sum", ["attribute", "start"])?;
    let mut total = start.unwrap_or(Value::from(0));
    for item in items_of(state, &input)? {
        let item = attribute.as_ref().map_or_else(|| Ok(item.clone()), |attribute| path(&item, attribute))?;
        total = state.apply_filter("py:add", &[total, item])?;
    }
    Ok(total)
}

fn dictsort(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let [case_sensitive, by, reverse] = args.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
    let Py::Dict(dict) = py(&input) else {
        return Err(match input.is_undefined() {
            true => undefined_error("dictsort is applied to an undefined value"),
            false => type_error(format!("'{} object' has no attribute 'items'", type_name(&input))),
        });
    };
    let at = match by.as_ref().and_then(Value::as_str).unwrap_or("key") {
        "key" => 0,
        "value" => 1,
        _ => return Err(type_error("You can only sort by either \"key\" or \"value\"")),
    };
    let mut sort_args = Args { positional: Vec::new(), named: Vec::new() };
    let pairs = methods::pairs(state, dict)?;
    sort_args.positional.push(list(state, pairs)?);
    sort_args.named.push(("attribute".to_owned(), Value::from(at)));
    for (name, value) in [("case_sensitive", case_sensitive), ("reverse", reverse)] {
        sort_args.named.extend(value.map(|value| (name.to_owned(), value)));
    }
    sort(state, sort_args)
}

fn groupby(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let [attribute, fallback, case_sensitive] =
        args.bind("groupby", ["attribute", "default", "case_sensitive"])?;
    let attribute = attribute.ok_or_else(|| type_error("groupby() needs an attribute"))?;
    let case_sensitive = flag(case_sensitive);
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for item in items_of(state, &input)? {
        let value =
            ops::or_else(path(&item, &attribute)?, fallback.clone().unwrap_or(Value::UNDEFINED), false);
        let key = sort_key(&value, None, case_sensitive)?;
        budget::spend(state, groups.len() * 16)?;
        match groups.iter_mut().find(|(known, ..)| ops::equal(known, &key)) {
            Some((.., items)) => items.push(item),
            None => groups.push((key, value, vec![item])),
        }
    }
    ops::sort_by(&mut groups, |(key, ..)| key.clone())?;
    let mut pairs = Vec::with_capacity(groups.len());
    for (_, value, items) in groups {
        let items = list(state, items)?;
        pairs.push(Seq::build(state, SeqKind::Group, vec![value, items])?);
    }
    list(state, pairs)
}

fn join(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let [separator, attribute] = args.bind("join", ["d", "attribute"])?;
    let separator = separator.map_or(Ok(String::new()), |separator| text::str_of(&separator))?;
    let mut out = String::new();
    for (at, item) in items_of(state, &input)?.into_iter().enumerate() {
        let item = attribute.as_ref().map_or_else(|| Ok(item.clone()), |attribute| path(&item, attribute))?;
        budget::spend(state, separator.len() + ops::weight(&item))?;
        out.push_str(if at > 0 { &separator } else { "" });
        out.push_str(&text::str_of(&item)?);
    }
    string(state, out)
}

fn map(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let mut mapped = Vec::new();
    let attribute = args.named.iter().find(|(name, _)| name == "attribute").map(|(_, value)| value.clone());
    let fallback = args.named.iter().find(|(name, _)| name == "default").map(|(_, value)| value.clone());
    if args.positional.is_empty() && attribute.is_none() {
        return Err(type_error("map requires a filter argument"));
    }
    let filter = take_input(&mut args);
    for item in items_unless_false(state, &input)? {
        mapped.push(match &attribute {
            Some(attribute) => {
                ops::or_else(path(&item, attribute)?, fallback.clone().unwrap_or(Value::UNDEFINED), false)
            }
            None => {
                let mut call = vec![item];
                call.extend(args.positional.iter().cloned());
                if !args.named.is_empty() {
                    call.push(args.named.iter().cloned().collect::<minijinja::value::Kwargs>().into());
                }
                state.apply_filter(&filter_name(&filter)?, &call)?
            }
        });
    }
    Generator::build(state, mapped)
}

/// `map` and `select` take anything false, also None, for empty.
fn items_unless_false(state: &mut State, input: &Value) -> Result<Vec<Value>> {
    if truthy(input) { items_of(state, input) } else { Ok(Vec::new()) }
}

/// The name of a filter or test that a template hands over as text; our operators are not reachable this way.
fn filter_name(name: &Value) -> Result<String> {
    let name = str_arg("filter name", name)?.replace(is_space, "");
    if name.contains(':') { Err(type_error(format!("No filter named '{name}'."))) } else { Ok(name) }
}

fn select(state: &mut State, mut args: Args, by_attribute: bool, keep: bool) -> Result<Value> {
    let input = take_input(&mut args);
    let attribute = by_attribute.then(|| take_input(&mut args));
    if attribute.as_ref().is_some_and(Value::is_undefined) {
        return Err(type_error("Missing parameter for attribute name"));
    }
    let test = if args.positional.is_empty() { None } else { Some(filter_name(&take_input(&mut args))?) };
    let mut kept = Vec::new();
    for item in items_unless_false(state, &input)? {
        let subject =
            attribute.as_ref().map_or_else(|| Ok(item.clone()), |attribute| path(&item, attribute))?;
        let passes = match &test {
            None => truthy(&subject),
            Some(test) => {
                let mut call = vec![subject];
                call.extend(args.positional.iter().cloned());
                state.perform_test(test, &call)?
            }
        };
        if passes == keep {
            kept.push(item);
        }
    }
    Generator::build(state, kept)
}

fn batch(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let [count, fill] = args.bind("batch", ["linecount", "fill_with"])?;
    let count = count.map_or(Ok(0), |count| int_of(&count))?;
    let count = usize::try_from(count).ok().filter(|count| *count > 0);
    let count = count.ok_or_else(|| type_error("batch() needs a positive line count"))?;
    let items = items_of(state, &input)?;
    let mut rows = Vec::new();
    for row in items.chunks(count) {
        let mut row = row.to_vec();
        if let Some(fill) = fill.as_ref().filter(|fill| !fill.is_none()) {
            budget::spend(state, (count - row.len()).saturating_mul(size_of::<Value>()))?;
            row.resize(count, fill.clone());
        }
        rows.push(list(state, row)?);
    }
    Generator::build(state, rows)
}

fn slice(state: &mut State, mut args: Args) -> Result<Value> {
    let input = take_input(&mut args);
    let [count, fill] = args.bind("slice", ["slices", "fill_with"])?;
    let count = count.map_or(Ok(0), |count| int_of(&count))?;
    let count = usize::try_from(count).ok().filter(|count| *count > 0);
    let count = count.ok_or_else(|| type_error("slice() needs a positive number of slices"))?;
    let items = items_of(state, &input)?;
    budget::spend(state, count.saturating_mul(128))?;
    let (each, longer) = (items.len() / count, items.len() % count);
    let mut rest = items.into_iter();
    let mut rows = Vec::new();
    for at in 0..count {
        let mut row: Vec<Value> = rest.by_ref().take(each + usize::from(at < longer)).collect();
        if at >= longer && longer > 0 {
            row.extend(fill.clone().filter(|fill| !fill.is_none()));
        }
        rows.push(list(state, row)?);
    }
    Generator::build(state, rows)
}
