//! Writes rules of a grammar, as Lark text for llguidance.
//!
//! A marker that is a special token is that token, which no text can contain; any other marker ends the text in front
//! of it by a lazy lexeme, so that from there on only a call is possible.

use std::fmt::Write as _;

use super::json_text;

/// The syntax of argument values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueStyle {
    Json,
    Python,
    Gemma,
}

/// The rules of one grammar as they are written.
pub struct Writer<'a> {
    /// Markers that may be special tokens.
    markup: Vec<&'static str>,
    /// Returns the id of a special token, by its text.
    special: &'a dyn Fn(&str) -> Option<u32>,
    pub rules: String,
    num_rules: usize,
    pub style: ValueStyle,
}

impl<'a> Writer<'a> {
    pub fn new(markup: Vec<&'static str>, special: &'a dyn Fn(&str) -> Option<u32>) -> Self {
        Self { markup, special, rules: String::new(), num_rules: 0, style: ValueStyle::Json }
    }

    /// Returns the name of a rule that is not written yet, for rules that contain themselves.
    pub fn new_name(&mut self, letter: &str) -> String {
        self.num_rules += 1;
        format!("{letter}{}", self.num_rules)
    }

    pub fn rule(&mut self, body: &str) -> String {
        self.named_rule("r", "", body)
    }

    pub fn terminal(&mut self, body: &str) -> String {
        self.named_rule("T", "", body)
    }

    pub fn named_rule(&mut self, letter: &str, options: &str, body: &str) -> String {
        let name = self.new_name(letter);
        writeln!(self.rules, "{name}{options}: {body}").expect("a string takes everything");
        name
    }

    /// A literal text in which special tokens stand as such.
    pub fn literal(&self, text: &str) -> String {
        let mut parts = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let tokens = self.markup.iter().filter_map(|mark| {
                let id = (self.special)(mark)?;
                Some((rest.find(mark)?, *mark, id))
            });
            let Some((at, mark, id)) =
                tokens.min_by_key(|(at, mark, _)| (*at, std::cmp::Reverse(mark.len())))
            else {
                parts.push(quoted(rest));
                break;
            };
            if at > 0 {
                parts.push(quoted(&rest[..at]));
            }
            parts.push(format!("<[{id}]>"));
            rest = &rest[at + mark.len()..];
        }
        if parts.is_empty() { "\"\"".to_owned() } else { parts.join(" ") }
    }

    /// Returns the text in front of the first special token; `None` if there is no special token.
    pub fn before_special<'t>(&self, text: &'t str) -> Option<&'t str> {
        let is_token = |mark: &&&str| (self.special)(mark).is_some();
        let first = self.markup.iter().filter(is_token).filter_map(|mark| text.find(mark)).min()?;
        Some(&text[..first])
    }

    pub fn is_special(&self, mark: &str) -> bool {
        self.before_special(mark) == Some("")
    }

    /// Writes a rule for text of a length and the marker that ends it. If the marker holds a special token, no text can contain
    /// it; otherwise the rule excludes the marker from the text.
    pub fn text_to(&mut self, (min, max): (u64, &str), pattern: &str, end: &str) -> String {
        let Some(before) = self.before_special(end) else {
            let mark = escaped(end.trim());
            let text = format!("/(?s:.{{{min},{max}}})/ & ~/(?s:.*){mark}(?s:.*)/{pattern}");
            let text = self.terminal(&text);
            return self.terminal(&format!("{text} {}", quoted(end)));
        };
        let rest = self.literal(&end[before.len()..]);
        if before.is_empty() {
            let text = self.terminal(&format!("/(?s:.{{{},{max}}})/{pattern}", min.max(1)));
            return format!("{text}{} {rest}", if min == 0 { "?" } else { "" });
        }
        // A lexeme is as long as it can be, so what stands in front of the token is part of the text's.
        let text = format!("/(?s:.{{{min},{max}}})/{pattern}");
        let text = self.terminal(&text);
        let text = self.terminal(&format!("{text} {}", quoted(before)));
        format!("{text} {rest}")
    }
}

/// A Lark string.
pub fn quoted(text: &str) -> String {
    json_text::quoted(text).replace('\u{7f}', "\\u007f")
}

/// A text as a regular expression between slashes.
pub fn escaped(text: &str) -> String {
    let is_meta = |c: char| "\\.+*?()|[]{}^$#&-~/".contains(c);
    text.chars().flat_map(|c| is_meta(c).then_some('\\').into_iter().chain([c])).collect()
}
