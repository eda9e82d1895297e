//! Writes rules of a grammar, as Lark text for llguidance.
//!
//! A marker that is a special token is that token, which no text can contain; any other marker ends the text in front
//! of it by a lazy lexeme, so that from there on only a call is possible.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::json_text;
use super::shape::Shape;

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
    /// Names of the rules by what is behind their letter.
    known: HashMap<String, String>,
    pub style: ValueStyle,
    /// The first keyword of a schema that no rule can express; what stands for it allows any value.
    pub refused: Option<String>,
}

/// A member of an object as a grammar writes it.
pub struct MemberForms {
    /// Where another one follows.
    pub before_more: String,
    pub last: String,
}

/// The empty text.
pub const NOTHING: &str = "\"\"";

/// Most members that come in any order, which a parameter of 64 bits notes.
pub const MAX_MEMBERS: usize = 60;

impl<'a> Writer<'a> {
    pub fn new(markup: Vec<&'static str>, special: &'a dyn Fn(&str) -> Option<u32>) -> Self {
        let (rules, known, style) = (String::new(), HashMap::new(), ValueStyle::Json);
        Self { markup, special, rules, num_rules: 0, known, style, refused: None }
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
        let rule = format!("{letter}{options}: {body}");
        if let Some(name) = self.known.get(&rule) {
            return name.clone();
        }
        let name = self.new_name(letter);
        writeln!(self.rules, "{name}{options}: {body}").expect("a string takes everything");
        self.known.insert(rule, name.clone());
        name
    }

    /// White space that models may write between two parts of markup. Without a bound a model could go on with it for ever.
    pub fn space(&mut self) -> String {
        format!("{}?", self.terminal("/[ \\t\\r\\n]{1,16}/"))
    }

    /// A literal text whose white space models may leave out or write otherwise, at its beginning and behind punctuation.
    pub fn markup(&mut self, text: &str) -> String {
        let (mut parts, mut fixed, mut is_free) = (Vec::new(), String::new(), true);
        for c in text.chars() {
            if c.is_whitespace() && is_free {
                if !fixed.is_empty() {
                    parts.push(self.literal(&std::mem::take(&mut fixed)));
                }
                let space = self.space();
                parts.extend(Some(space).filter(|space| parts.last() != Some(space)));
                continue;
            }
            fixed.push(c);
            is_free = ":,;{}[]>`".contains(c);
        }
        if !fixed.is_empty() || parts.is_empty() {
            parts.push(self.literal(&fixed));
        }
        parts.join(" ")
    }

    /// Members in any order, each at most once. `other` is a member of another name. Returns nothing for an object that has too
    /// many members.
    pub fn any_order(&mut self, shape: &Shape, items: &[MemberForms], other: Option<&MemberForms>) -> String {
        let other = other.filter(|_| shape.most.is_none_or(|most| most > 0));
        // Members of other names have bits as long as their number matters, the first one the lowest.
        let num_counted = other.map_or(0, |_| shape.most.unwrap_or(shape.least));
        let num_bits = items.len() + num_counted;
        if num_bits > MAX_MEMBERS {
            self.refused.get_or_insert_with(|| format!("properties (more than {MAX_MEMBERS})"));
            return NOTHING.to_owned();
        }
        let is_open = other.is_some() && shape.most.is_none();
        let most = shape.most.unwrap_or(usize::MAX).min(if is_open { usize::MAX } else { num_bits });
        let name = self.new_name("m");
        let mut choices = Vec::new();
        let mut add = |item: &MemberForms, next: String, bit: Option<usize>, before: Option<String>| {
            let clear = bit.map(|bit| format!("bit_clear({bit})"));
            let room = (most < usize::MAX).then(|| format!("bit_count_lt(_, {})", most.saturating_sub(1)));
            // The required members always have room.
            let (required, bit) = (shape.num_required, bit.unwrap_or(usize::MAX));
            let is_limited = most < num_bits && bit >= required;
            let fits = is_limited
                .then(|| format!("bit_count_lt([{required}:{num_bits}], {})", most.saturating_sub(required)));
            let conditions = clear.into_iter().chain(before).chain(fits);
            if most > 1 {
                let when = condition(conditions.clone().chain(room));
                choices.push(format!("{} {name}::{next}{when}", item.before_more));
            }
            let enough = (shape.least > 1).then(|| format!("bit_count_ge(_, {})", shape.least - 1));
            let whole = [(0, bit.min(required)), (bit.saturating_add(1), required)].into_iter();
            let whole =
                whole.filter(|(from, to)| from < to).map(|(from, to)| format!("is_ones([{from}:{to}])"));
            choices.push(format!("{}{}", item.last, condition(conditions.chain(whole).chain(enough))));
        };
        let counted = other.into_iter().flat_map(|other| std::iter::repeat_n(other, num_counted));
        for (bit, item) in items.iter().chain(counted).enumerate() {
            let before = (bit > items.len()).then(|| format!("bit_set({})", bit - 1));
            add(item, format!("set_bit({bit})"), Some(bit), before);
        }
        if let Some(other) = other.filter(|_| is_open) {
            let before = (num_counted > 0).then(|| format!("bit_set({})", num_bits - 1));
            add(other, "_".to_owned(), None, before);
        }
        let may_be_empty = shape.num_required == 0 && shape.least == 0;
        if choices.is_empty() || most == 0 {
            return NOTHING.to_owned();
        }
        writeln!(self.rules, "{name}::_: {}", choices.join(" | ")).expect("a string takes everything");
        format!("({name}::0){}", if may_be_empty { "?" } else { "" })
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
        if parts.is_empty() { NOTHING.to_owned() } else { parts.join(" ") }
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

    /// Writes a rule for text and the marker that ends it. If the marker holds a special token, no text can contain it; otherwise
    /// the rule excludes the marker from the text.
    pub fn text_to(&mut self, end: &str) -> String {
        let Some(before) = self.before_special(end) else {
            let mark = escaped(end.trim());
            let text = self.terminal(&format!("/(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/"));
            return self.terminal(&format!("{text} {}", quoted(end)));
        };
        // A lexeme is as long as it can be, so what stands in front of the token is part of the text's.
        let text = format!("/(?s:.*){}/ & /(?s:.+)/", escaped(before));
        let mark = if before.is_empty() { "?" } else { "" };
        format!("{}{mark} {}", self.terminal(&text), self.literal(&end[before.len()..]))
    }
}

/// Returns the condition of a choice under which all of the given ones hold.
fn condition(all: impl Iterator<Item = String>) -> String {
    let joined = all.reduce(|all, one| format!("and({all}, {one})"));
    joined.map_or_else(String::new, |all| format!(" %if {all}"))
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
