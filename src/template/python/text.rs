//! `str()` and `repr()` of values, as CPython 3 prints them.

use std::fmt::Write;

use minijinja::Value;

use super::object::{Dict, Seq, SeqKind};
use super::{Py, Result, py};

/// Returns what `{{ value }}` prints: strings as they are, undefined as the empty string.
pub(super) fn str_of(value: &Value) -> Result<String> {
    match py(value) {
        Py::Undefined => Ok(String::new()),
        Py::Str(text) => Ok(text.to_owned()),
        _ => repr_of(value),
    }
}

/// Returns `repr()` of a value, as inside a printed list.
pub(super) fn repr_of(value: &Value) -> Result<String> {
    let mut out = String::new();
    write_repr(&mut out, value);
    Ok(out)
}

fn write_repr(out: &mut String, value: &Value) {
    match py(value) {
        Py::Undefined => out.push_str("Undefined"),
        Py::None => out.push_str("None"),
        Py::Bool(true) => out.push_str("True"),
        Py::Bool(false) => out.push_str("False"),
        Py::Int(int) => out.push_str(&int.to_string()),
        Py::Float(float) => out.push_str(&float_repr(float)),
        Py::Str(text) => write_str_repr(out, text),
        Py::Seq(seq) => write_seq(out, seq),
        Py::Dict(dict) => write_dict(out, dict),
        Py::Generator(_) => out.push_str("<generator object>"),
        Py::Namespace(_) => out.push_str("<Namespace>"),
        Py::Method(_) | Py::Other => out.push_str(&value.to_string()),
    }
}

fn write_seq(out: &mut String, seq: &Seq) {
    if seq.kind == SeqKind::Range {
        return write_range(out, seq);
    }
    let (open, close) = match seq.kind {
        SeqKind::List => ("[", "]"),
        SeqKind::Tuple => ("(", if seq.items.len() == 1 { ",)" } else { ")" }),
        SeqKind::Keys => ("dict_keys([", "])"),
        SeqKind::Values => ("dict_values([", "])"),
        SeqKind::Items => ("dict_items([", "])"),
        SeqKind::Range => ("", ""),
    };
    out.push_str(open);
    for (at, item) in seq.items.iter().enumerate() {
        out.push_str(if at > 0 { ", " } else { "" });
        write_repr(out, item);
    }
    out.push_str(close);
}

fn write_range(out: &mut String, seq: &Seq) {
    let at = |index: usize| seq.items.get(index).and_then(Value::as_i64);
    let (start, step) = (at(0).unwrap_or(0), at(1).zip(at(0)).map_or(1, |(second, first)| second - first));
    let stop = seq.items.last().and_then(Value::as_i64).map_or(0, |last| last + step.signum());
    let _ = match step {
        1 => write!(out, "range({start}, {stop})"),
        step => write!(out, "range({start}, {stop}, {step})"),
    };
}

fn write_dict(out: &mut String, dict: &Dict) {
    out.push('{');
    for (at, (key, value)) in dict.entries.iter().enumerate() {
        out.push_str(if at > 0 { ", " } else { "" });
        write_repr(out, key);
        out.push_str(": ");
        write_repr(out, value);
    }
    out.push('}');
}

fn write_str_repr(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => {
                let code = c as u32;
                let _ = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// `str.isprintable` for one character: no controls, separators (but the space), formats or private use.
/// Unassigned code points, which would need the Unicode tables, count as printable.
fn is_printable(c: char) -> bool {
    let format_or_private = matches!(c as u32,
        0xad | 0x600..=0x605 | 0x61c | 0x6dd | 0x70f | 0x180e | 0x200b..=0x200f | 0x202a..=0x202e
        | 0x2060..=0x206f | 0xfeff | 0xfff9..=0xfffb | 0xe000..=0xf8ff | 0xe0000..=0xe007f | 0xf0000..);
    c == ' ' || !(c.is_control() || c.is_whitespace() || format_or_private)
}

/// `repr(float)`: the shortest digits that read back the same, with an exponent below 1e-4 and from 1e16 on.
pub(super) fn float_repr(float: f64) -> String {
    if float.is_nan() {
        return "nan".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if float != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{float}");
    if plain.contains('.') { plain } else { format!("{plain}.0") }
}

/// Shows a value in an error message, shortened.
pub(super) fn brief(value: &Value) -> String {
    let shown = repr_of(value).unwrap_or_default();
    match shown.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &shown[..at]),
        None => shown,
    }
}
