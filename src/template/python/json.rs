//! `json.dumps` as Hugging Face's `tojson` filter calls it: `ensure_ascii=False`, key order kept, `", "` and `": "`
//! between members. (The filter that Jinja2 itself brings escapes HTML; chat templates never see that one.)

use minijinja::{State, Value};

use super::{
    Args, Py, Result, budget, compare, flag, int_of, items_of, py, str_arg, string, text, type_error,
    type_name,
};

/// The keyword arguments of `json.dumps` that templates use.
#[derive(Debug, Default)]
pub(super) struct Layout {
    indent: Option<String>,
    /// Between items, and between a key and its value, where they are not the usual ones.
    separators: Option<[String; 2]>,
    sort_keys: bool,
    ensure_ascii: bool,
}

impl Layout {
    fn separators(&self) -> [&str; 2] {
        match &self.separators {
            Some(separators) => separators.each_ref().map(String::as_str),
            None => [if self.indent.is_some() { "," } else { ", " }, ": "],
        }
    }
}

pub(super) fn dumps(value: &Value, layout: &Layout) -> Result<String> {
    let mut out = String::new();
    write(&mut out, value, layout, 0)?;
    Ok(out)
}

fn write(out: &mut String, value: &Value, layout: &Layout, level: usize) -> Result<()> {
    match py(value) {
        Py::None => out.push_str("null"),
        Py::Bool(flag) => out.push_str(if flag { "true" } else { "false" }),
        Py::Int(int) => out.push_str(&int.to_string()),
        Py::Float(float) => out.push_str(&float_json(float)),
        Py::Str(text) => write_str(out, text, layout.ensure_ascii),
        Py::Seq(seq) if !seq.kind.is_view() => {
            write_members(out, layout, level, ('[', ']'), seq.items.len(), |out, at| {
                write(out, &seq.items[at], layout, level + 1)
            })?;
        }
        Py::Dict(dict) => {
            let mut entries: Vec<_> = dict.entries.iter().collect();
            if layout.sort_keys {
                compare::sort_by(&mut entries, |(key, _)| key.clone())?;
            }
            write_members(out, layout, level, ('{', '}'), entries.len(), |out, at| {
                let (key, value) = entries[at];
                write_key(out, key, layout)?;
                out.push_str(layout.separators()[1]);
                write(out, value, layout, level + 1)
            })?;
        }
        _ => return Err(type_error(format!("Object of type {} is not JSON serializable", type_name(value)))),
    }
    Ok(())
}

fn write_members(
    out: &mut String,
    layout: &Layout,
    level: usize,
    (open, close): (char, char),
    count: usize,
    mut member: impl FnMut(&mut String, usize) -> Result<()>,
) -> Result<()> {
    let new_line = |out: &mut String, level: usize| {
        if let Some(indent) = &layout.indent {
            out.push('\n');
            (0..level).for_each(|_| out.push_str(indent));
        }
    };
    out.push(open);
    for at in 0..count {
        if at > 0 {
            out.push_str(layout.separators()[0]);
        }
        new_line(out, level + 1);
        member(out, at)?;
    }
    if count > 0 {
        new_line(out, level);
    }
    out.push(close);
    Ok(())
}

fn write_key(out: &mut String, key: &Value, layout: &Layout) -> Result<()> {
    let text = match py(key) {
        Py::Str(text) => text.to_owned(),
        Py::None | Py::Bool(_) | Py::Int(_) | Py::Float(_) => dumps(key, layout)?,
        _ => {
            let kind = type_name(key);
            return Err(type_error(format!("keys must be str, int, float, bool or None, not {kind}")));
        }
    };
    write_str(out, &text, layout.ensure_ascii);
    Ok(())
}

fn float_json(float: f64) -> String {
    match float {
        f if f.is_nan() => "NaN".to_owned(),
        f if f.is_infinite() => if f > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
        f => text::float_repr(f),
    }
}

/// A character inside a JSON string.
pub fn push_escaped(c: char, out: &mut String) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c if (c as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", c as u32)),
        c => out.push(c),
    }
}

fn write_str(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if ensure_ascii && !c.is_ascii() => {
                c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
            }
            c => push_escaped(c, out),
        }
    }
    out.push('"');
}

/// The filter `tojson`, with the arguments that Hugging Face gives it.
pub(super) fn tojson(state: &mut State, input: &Value, args: Args) -> Result<Value> {
    let [ascii, indent, separators, sort] =
        args.bind("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) if indent.as_str().is_some() => indent.as_str().map(str::to_owned),
        Some(width) => Some(" ".repeat(usize::try_from(int_of(&width)?.clamp(0, 64)).unwrap_or(0))),
    };
    let separators = match separators.filter(|separators| !separators.is_none()) {
        None => None,
        Some(pair) => {
            let [item, key] = <[Value; 2]>::try_from(items_of(state, &pair)?)
                .map_err(|_| type_error("separators must be a pair of strings"))?;
            Some([str_arg("separators", &item)?.to_owned(), str_arg("separators", &key)?.to_owned()])
        }
    };
    let layout = Layout { indent, separators, sort_keys: flag(sort), ensure_ascii: flag(ascii) };
    let padding = layout.indent.as_ref().map_or(0, String::len);
    let separators: usize = layout.separators().iter().map(|text| text.len()).sum();
    budget::spend(state, compare::weight(input).saturating_mul(1 + padding + separators / 8))?;
    let printed = dumps(input, &layout)?;
    string(state, printed)
}
