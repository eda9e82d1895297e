//! Python literals to JSON text: strings, numbers, `True`, `False`, `None`, lists, tuples and dictionaries.
//!
//! Templates print strings between quotes without escaping what is inside, so a quote ends a string only when what follows
//! can follow a value (`,`, a closing bracket, `:` or the end); any other quote is part of the string.

use super::json_text::{is_json_number, members, quoted};

const MAX_DEPTH: usize = 100;

/// Returns whether a string may end before this text.
pub fn can_follow(rest: &str) -> bool {
    rest.trim_start().chars().next().is_none_or(|c| matches!(c, ',' | ')' | ']' | '}' | ':'))
}

/// One literal that fills the whole text, as JSON text.
pub fn whole_value(text: &str) -> Option<String> {
    let (value, rest) = value(text, 0)?;
    rest.trim().is_empty().then_some(value)
}

/// One literal and what follows it.
fn value(text: &str, depth: usize) -> Option<(String, &str)> {
    let text = text.trim_start();
    match text.chars().next().filter(|_| depth < MAX_DEPTH)? {
        quote @ ('"' | '\'') => {
            let (content, rest) = string(&text[1..], quote)?;
            Some((quoted(&content), rest))
        }
        open @ ('[' | '(') => {
            members(&text[1..], if open == '[' { ']' } else { ')' }, |rest| value(rest, depth + 1))
        }
        '{' => dictionary(&text[1..], depth),
        _ => {
            let end = text.find([',', ')', ']', '}', ':', ' ', '\n', '\t']).unwrap_or(text.len());
            Some((word(&text[..end])?, &text[end..]))
        }
    }
}

fn word(word: &str) -> Option<String> {
    let plain = word.replace('_', "");
    let number = plain.strip_prefix('+').unwrap_or(&plain);
    match word {
        "True" | "true" => Some("true".to_owned()),
        "False" | "false" => Some("false".to_owned()),
        "None" | "null" => Some("null".to_owned()),
        _ if !word.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.')) => None,
        _ => match number.parse::<f64>().ok()? {
            value if !value.is_finite() => Some(quoted(word)), // as the JSON scanner has it
            _ if is_json_number(number) => Some(number.to_owned()),
            value => serde_json::to_string(&value).ok(),
        },
    }
}

fn string(text: &str, quote: char) -> Option<(String, &str)> {
    let mut content = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => escape(&mut chars, &mut content)?,
            c if c == quote && can_follow(chars.as_str()) => return Some((content, chars.as_str())),
            c => content.push(c),
        }
    }
    None
}

/// The escapes of Python's string literals; an unknown one stays as it is, as in Python.
fn escape(chars: &mut std::str::Chars<'_>, content: &mut String) -> Option<()> {
    let c = chars.next()?;
    let num_digits = match c {
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => 0,
    };
    match c {
        'n' => content.push('\n'),
        't' => content.push('\t'),
        'r' => content.push('\r'),
        'b' => content.push('\u{8}'),
        'f' => content.push('\u{c}'),
        '\\' | '\'' | '"' => content.push(c),
        '\n' => {}
        'x' | 'u' | 'U' => {
            let mut code = hex(chars, num_digits)?;
            // JSON's spelling of a character beyond U+FFFF: two escapes.
            if (0xD800..0xDC00).contains(&code) && chars.as_str().starts_with("\\u") {
                let mut ahead = chars.clone();
                ahead.nth(1);
                if let Some(low @ 0xDC00..=0xDFFF) = hex(&mut ahead, 4) {
                    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
                    *chars = ahead;
                }
            }
            content.push(char::from_u32(code).unwrap_or('\u{fffd}'));
        }
        c => content.extend(['\\', c]),
    }
    Some(())
}

fn hex(chars: &mut std::str::Chars<'_>, num_digits: usize) -> Option<u32> {
    let digits = chars.as_str().get(..num_digits)?;
    *chars = chars.as_str()[num_digits..].chars();
    u32::from_str_radix(digits, 16).ok()
}

fn dictionary(text: &str, depth: usize) -> Option<(String, &str)> {
    members(text, '}', |rest| {
        let (key, after) = value(rest, depth + 1)?;
        let key = if key.starts_with('"') { key } else { quoted(&key) };
        let (value, after) = value(after.trim_start().strip_prefix(':')?, depth + 1)?;
        Some((format!("{key}: {value}"), after))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Option<&str>) {
        assert_eq!(whole_value(text).as_deref(), expected, "{text}");
        if let Some(expected) = expected {
            serde_json::from_str::<serde_json::Value>(expected).expect("the expectation is JSON");
        }
    }

    #[test]
    fn literals() {
        check("True", Some("true"));
        check(" None ", Some("null"));
        check("-12", Some("-12"));
        check("1_000", Some("1000"));
        check(".5", Some("0.5"));
        check("[1e999, -inf]", Some(r#"["1e999", "-inf"]"#));
        check("'a\\n\\'b\"'", Some(r#""a\n'b\"""#));
        check(r#""\ud83d\ude00 \u00e9 \x41 \d""#, Some("\"😀 é A \\\\d\""));
        check("[1, 'a', (True,), {'k': [None]}]", Some(r#"[1, "a", [true], {"k": [null]}]"#));
        check("{}", Some("{}"));
        check("{1: 2}", Some(r#"{"1": 2}"#));
    }

    #[test]
    fn an_unescaped_quote_inside_is_text() {
        check("'it's'", Some(r#""it's""#));
        check("['it's', 'b']", Some(r#"["it's", "b"]"#));
    }

    #[test]
    fn what_is_no_literal() {
        for text in ["", "x", "inf", "nan", "f(1)", "'a", "[1", "{1}", "1 2"] {
            check(text, None);
        }
        check(&"[".repeat(5000), None);
    }
}
