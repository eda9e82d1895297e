//! Grammars of free text, rewritten for the places where a tool call carries text: inside a JSON string, or
//! between tags.
//!
//! Invariants: a text follows the grammar exactly if its form in JSON, with the shortest escapes, follows
//! [`TextGrammar::in_json`]; in [`TextGrammar::between_tags`] every terminal also follows the terminal
//! [`TAGGED_TEXT`], which the embedding grammar defines and which keeps the closing tag out of a terminal's
//! text. What cannot be rewritten is refused by name. Pure.

use std::collections::VecDeque;

use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind, Repetition};
use serde_json::Value;

use super::GrammarSource;
use llmctl_base::error::GrammarError;
use llmctl_template::TAGGED_TEXT;

/// The terminal that every terminal of a text between tags follows too.
const TEXT: &str = TAGGED_TEXT;

/// A grammar of text, as items of a Lark grammar that begins at `start`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextGrammar {
    pub in_json: String,
    pub between_tags: String,
}

type Result<T> = std::result::Result<T, GrammarError>;

impl TextGrammar {
    /// Rewrites a grammar.
    ///
    /// # Errors
    /// [`GrammarError::Unsupported`] for what a text grammar cannot contain; [`GrammarError::Invalid`] for malformed ones.
    pub fn new(source: &GrammarSource) -> Result<Self> {
        let lark = match source {
            GrammarSource::Lark(lark) => lark.clone(),
            GrammarSource::Regex(regex) => {
                format!("start: {TEXT}_0\n{TEXT}_0: /{}/\n", between_slashes(unanchored(regex)))
            }
            GrammarSource::JsonObject | GrammarSource::JsonSchema(_) | GrammarSource::Gbnf(_) => {
                return Err(unsupported("format", "a grammar of text is Lark or a regular expression"));
            }
        };
        let items = items(&lark)?;
        let rewritten = |place| rewritten(&items, place);
        Ok(Self { in_json: rewritten(Place::Json)?, between_tags: rewritten(Place::Tags)? })
    }
}

/// A regular expression matches the whole text, with anchors and without.
fn unanchored(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        Some(rest) if !rest.ends_with('\\') => rest,
        _ => regex,
    }
}

/// Position of the text in its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Json,
    Tags,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum LarkToken {
    /// Name of a rule or a terminal, with the marks in front of it.
    Name(String),
    /// A text between quotes.
    Text { text: String, ignores_case: bool },
    /// A regular expression between slashes.
    Regex { pattern: String, flags: String },
    /// `%` and a word.
    Directive(String),
    /// One of the marks of the notation.
    Mark(String),
    /// The end of a line.
    Newline,
}

/// One definition or directive.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Item(Vec<LarkToken>);

fn unsupported(keyword: &str, message: &str) -> GrammarError {
    GrammarError::Unsupported { keyword: keyword.to_owned(), message: message.to_owned() }
}

fn invalid(message: &str) -> GrammarError {
    GrammarError::Invalid(message.to_owned())
}

/// Splits a grammar into items. An alternative on a line of its own belongs to the line before.
fn items(lark: &str) -> Result<Vec<Item>> {
    let mut items: Vec<Item> = Vec::new();
    let (mut is_new, mut depth) = (true, 0_usize);
    for token in tokens(lark)? {
        match &token {
            LarkToken::Newline => {
                is_new = depth == 0;
                continue;
            }
            LarkToken::Mark(mark) if mark == "|" => is_new = false,
            LarkToken::Mark(mark) if mark == "(" || mark == "[" => depth += 1,
            LarkToken::Mark(mark) if mark == ")" || mark == "]" => depth = depth.saturating_sub(1),
            _ => {}
        }
        match items.last_mut().filter(|_| !is_new) {
            Some(item) => item.0.push(token),
            None => items.push(Item(vec![token])),
        }
        is_new = false;
    }
    Ok(items)
}

fn tokens(lark: &str) -> Result<Vec<LarkToken>> {
    let mut tokens = Vec::new();
    let mut rest = lark;
    while let Some(c) = rest.chars().next() {
        let length = match c {
            ' ' | '\t' | '\r' => 1,
            '\n' => {
                tokens.push(LarkToken::Newline);
                1
            }
            '#' => line_length(rest),
            '/' if rest.starts_with("//") => line_length(rest),
            '"' | '/' => quoted(rest, c, &mut tokens)?,
            '~' | '<' | '@' => {
                return Err(unsupported(&c.to_string(), "a grammar of a tool's text has no such part"));
            }
            '%' => {
                let name = word(&rest[1..]);
                tokens.push(LarkToken::Directive(name.to_owned()));
                1 + name.len()
            }
            _ if is_name(c) || "!?".contains(c) && rest[1..].starts_with(is_name) => {
                let name = word(&rest[1..]).len() + 1;
                tokens.push(LarkToken::Name(rest[..name].to_owned()));
                name
            }
            _ => {
                let mark = ["->", ".."].into_iter().find(|mark| rest.starts_with(mark));
                let mark = mark.unwrap_or(&rest[..c.len_utf8()]);
                tokens.push(LarkToken::Mark(mark.to_owned()));
                mark.len()
            }
        };
        rest = &rest[length..];
    }
    Ok(tokens)
}

fn line_length(text: &str) -> usize {
    text.find('\n').unwrap_or(text.len())
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphabetic() || c == '_'
}

fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '-');
    // The arrow of an alias may stand right behind a name.
    let word = &text[..end.unwrap_or(text.len())];
    if text[word.len()..].starts_with('>') { word.strip_suffix('-').unwrap_or(word) } else { word }
}

/// Reads a string or a regular expression with the flags behind it; returns its length.
fn quoted(text: &str, quote: char, tokens: &mut Vec<LarkToken>) -> Result<usize> {
    let mut is_escaped = false;
    let end = text[1..].find(|c: char| {
        let is_end = c == quote && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        is_end || c == '\n'
    });
    let end = end.map(|end| end + 1).filter(|end| text[*end..].starts_with(quote));
    let end = end.ok_or_else(|| invalid("a string or a regular expression is not closed"))?;
    let behind = &text[end + 1..];
    let flags = if quote == '"' { "i" } else { "imslux" };
    let flags = &behind[..behind.find(|c: char| !flags.contains(c)).unwrap_or(behind.len())];
    tokens.push(if quote == '"' {
        let read: serde_json::Result<String> = serde_json::from_str(&text[..=end]);
        let text = read.map_err(|error| invalid(&format!("{} is no string: {error}", &text[..=end])))?;
        LarkToken::Text { text, ignores_case: !flags.is_empty() }
    } else {
        LarkToken::Regex { pattern: text[1..end].to_owned(), flags: flags.to_owned() }
    });
    Ok(end + 1 + flags.len())
}

/// Rewritten items, and the terminals that they need.
struct Rewriter {
    place: Place,
    lark: String,
    num_terminals: usize,
}

fn rewritten(items: &[Item], place: Place) -> Result<String> {
    let mut rewriter = Rewriter { place, lark: String::new(), num_terminals: 0 };
    items.iter().try_for_each(|item| rewriter.item(item))?;
    Ok(rewriter.lark)
}

impl Rewriter {
    fn item(&mut self, item: &Item) -> Result<()> {
        let line = match &item.0[..] {
            [LarkToken::Directive(name), body @ ..] => match name.as_str() {
                "ignore" => format!("%ignore {}", self.body(body, false)?),
                "import" => return self.import(body),
                other => {
                    return Err(unsupported(&format!("%{other}"), "a tool's text has no such directive"));
                }
            },
            [LarkToken::Name(_), ..] => self.definition(&item.0)?,
            _ => return Err(invalid("a line is neither a rule nor a directive")),
        };
        self.lark.push_str(&line);
        self.lark.push('\n');
        Ok(())
    }

    fn definition(&mut self, tokens: &[LarkToken]) -> Result<String> {
        let colon = tokens.iter().position(|token| *token == LarkToken::Mark(":".to_owned()));
        let colon = colon.ok_or_else(|| invalid("a line is neither a rule nor a directive"))?;
        let head: String = tokens[..colon].iter().map(plain).collect();
        let is_terminal = head.starts_with(|c: char| c.is_ascii_uppercase())
            || head.strip_prefix('_').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()));
        let body = self.body(&tokens[colon + 1..], is_terminal)?;
        Ok(if is_terminal { self.terminal(&head, &body) } else { format!("{head}: {body}") })
    }

    fn terminal(&self, name: &str, body: &str) -> String {
        match self.place {
            Place::Json => format!("{name}: {body}"),
            Place::Tags => format!("{name}: ({body}) & {TEXT}"),
        }
    }

    /// Rewrites the right side of a definition.
    fn body(&mut self, tokens: &[LarkToken], is_terminal: bool) -> Result<String> {
        let mut tokens: VecDeque<&LarkToken> = tokens.iter().collect();
        let mut parts: Vec<String> = Vec::new();
        while let Some(token) = tokens.pop_front() {
            let lexeme = match token {
                LarkToken::Text { text, .. } if is_range(&tokens) => {
                    tokens.pop_front();
                    let Some(LarkToken::Text { text: last, .. }) = tokens.pop_front() else {
                        return Err(invalid("a range has no end"));
                    };
                    Some(self.regex(
                        &format!("[{}-{}]", regex_syntax::escape(text), regex_syntax::escape(last)),
                        "",
                    )?)
                }
                LarkToken::Text { text, ignores_case: true } => {
                    Some(self.regex(&regex_syntax::escape(text), "i")?)
                }
                LarkToken::Text { text, .. } => Some(self.text(text)),
                LarkToken::Regex { pattern, flags } => Some(self.regex(pattern, flags)?),
                LarkToken::Directive(name) => {
                    return Err(unsupported(
                        &format!("%{name}"),
                        "a grammar of a tool's text has no such part",
                    ));
                }
                LarkToken::Newline => None,
                other => {
                    parts.push(plain(other));
                    None
                }
            };
            if let Some(lexeme) = lexeme {
                parts.push(self.placed(lexeme, is_terminal));
            }
        }
        Ok(parts.join(" "))
    }

    /// Returns a lexeme for a body. Between tags it must be a terminal, because only terminals have intersections.
    fn placed(&mut self, lexeme: String, is_terminal: bool) -> String {
        if is_terminal || self.place == Place::Json || lexeme == "\"\"" {
            return lexeme;
        }
        self.num_terminals += 1;
        let name = format!("{TEXT}_{}", self.num_terminals);
        let line = self.terminal(&name, &lexeme);
        self.lark.push_str(&line);
        self.lark.push('\n');
        name
    }

    fn text(&self, text: &str) -> String {
        let text = if self.place == Place::Json { in_json(text) } else { text.to_owned() };
        Value::String(text).to_string().replace('\u{7f}', "\\u007f")
    }

    fn regex(&self, pattern: &str, flags: &str) -> Result<String> {
        let flagged = if flags.is_empty() { pattern.to_owned() } else { format!("(?{flags}){pattern}") };
        // Slashes are escaped between slashes only.
        let flagged = flagged.replace("\\/", "/");
        if self.place == Place::Tags {
            return Ok(format!("/{}/", between_slashes(&flagged)));
        }
        let parsed =
            regex_syntax::parse(&flagged).map_err(|error| invalid(&format!("/{pattern}/: {error}")))?;
        Ok(format!("/{}/", between_slashes(&hir_in_json(&parsed)?.to_string())))
    }

    /// Defines the terminals that a grammar imports from Lark's common ones.
    fn import(&mut self, tokens: &[LarkToken]) -> Result<()> {
        let names: Vec<&str> = tokens
            .iter()
            .filter_map(|token| match token {
                LarkToken::Name(name) => Some(name.as_str()),
                _ => None,
            })
            .collect();
        let [library, names @ ..] = &names[..] else { return Err(invalid("%import names nothing")) };
        if *library != "common" {
            return Err(unsupported("%import", "only terminals of common can be imported"));
        }
        let has_alias = tokens.contains(&LarkToken::Mark("->".to_owned()));
        let pairs: Vec<(&str, &str)> = match names {
            [name, alias] if has_alias => vec![(*name, *alias)],
            names => names.iter().map(|name| (*name, *name)).collect(),
        };
        for (name, alias) in pairs {
            let known = COMMON.iter().find(|(known, _)| *known == name);
            let (_, pattern) =
                known.ok_or_else(|| unsupported(&format!("%import common.{name}"), "it is not known"))?;
            let body = self.regex(pattern, "")?;
            let line = self.terminal(alias, &body);
            self.lark.push_str(&line);
            self.lark.push('\n');
        }
        Ok(())
    }
}

/// Terminals of Lark's library `common`.
const COMMON: [(&str, &str); 19] = [
    ("DIGIT", "[0-9]"),
    ("HEXDIGIT", "[0-9A-Fa-f]"),
    ("INT", "[0-9]+"),
    ("SIGNED_INT", "[+-]?[0-9]+"),
    ("DECIMAL", r"[0-9]+\.[0-9]*|\.[0-9]+"),
    ("FLOAT", r"(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+"),
    ("SIGNED_FLOAT", r"[+-]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)"),
    ("NUMBER", r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"),
    ("SIGNED_NUMBER", r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"),
    ("ESCAPED_STRING", r#""(?:[^"\\]|\\.)*""#),
    ("LCASE_LETTER", "[a-z]"),
    ("UCASE_LETTER", "[A-Z]"),
    ("LETTER", "[A-Za-z]"),
    ("WORD", "[A-Za-z]+"),
    ("CNAME", "[A-Za-z_][A-Za-z0-9_]*"),
    ("WS_INLINE", r"[ \t]+"),
    ("WS", r"[ \t\f\r\n]+"),
    ("LF", r"\n"),
    ("NEWLINE", r"(?:\r?\n)+"),
];

fn is_range(rest: &VecDeque<&LarkToken>) -> bool {
    rest.front().is_some_and(|token| **token == LarkToken::Mark("..".to_owned()))
}

fn plain(token: &LarkToken) -> String {
    match token {
        LarkToken::Name(text) | LarkToken::Mark(text) => text.clone(),
        LarkToken::Directive(name) => format!("%{name}"),
        LarkToken::Text { .. } | LarkToken::Regex { .. } | LarkToken::Newline => String::new(),
    }
}

/// Returns a regular expression for between slashes: those that are not escaped yet are.
pub fn between_slashes(regex: &str) -> String {
    let (mut text, mut is_escaped) = (String::with_capacity(regex.len()), false);
    for c in regex.chars() {
        if c == '/' && !is_escaped {
            text.push('\\');
        }
        is_escaped = c == '\\' && !is_escaped;
        text.push(c);
    }
    text
}

/// Returns a text as it stands inside a JSON string.
fn in_json(text: &str) -> String {
    let quoted = Value::String(text.to_owned()).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Returns an expression for the JSON form of what `hir` matches. Characters are rewritten one by one, so that an expression of
/// characters is rewritten by rewriting its parts.
fn hir_in_json(hir: &Hir) -> Result<Hir> {
    let all = |parts: &[Hir]| parts.iter().map(hir_in_json).collect::<Result<Vec<Hir>>>();
    Ok(match hir.kind() {
        HirKind::Empty => Hir::empty(),
        HirKind::Literal(literal) => {
            let text = str::from_utf8(&literal.0).map_err(|_| invalid("a literal is not UTF-8"))?;
            Hir::literal(in_json(text).into_bytes())
        }
        HirKind::Class(Class::Unicode(class)) => class_in_json(class),
        HirKind::Class(Class::Bytes(class)) => {
            let class = class.to_unicode_class().ok_or_else(|| invalid("a class of bytes is not text"))?;
            class_in_json(&class)
        }
        HirKind::Look(_) => {
            return Err(unsupported("^", "a regular expression of a tool's text has no anchors"));
        }
        HirKind::Repetition(Repetition { min, max, greedy, sub }) => {
            let sub = Box::new(hir_in_json(sub)?);
            Hir::repetition(Repetition { min: *min, max: *max, greedy: *greedy, sub })
        }
        HirKind::Capture(capture) => hir_in_json(&capture.sub)?,
        HirKind::Concat(parts) => Hir::concat(all(parts)?),
        HirKind::Alternation(parts) => Hir::alternation(all(parts)?),
    })
}

fn class_in_json(class: &ClassUnicode) -> Hir {
    let range = |first, last| ClassUnicodeRange::new(first, last);
    let escaped = ClassUnicode::new([range('\0', '\x1f'), range('"', '"'), range('\\', '\\')]);
    let mut plain = class.clone();
    plain.difference(&escaped);
    let mut special = class.clone();
    special.intersect(&escaped);
    let chars = special.iter().flat_map(|range| range.start()..=range.end());
    let literals = chars.map(|c| Hir::literal(in_json(&c.to_string()).into_bytes()));
    Hir::alternation(std::iter::once(Hir::class(Class::Unicode(plain))).chain(literals).collect())
}

#[cfg(test)]
mod tests {
    use llguidance::api::TopLevelGrammar;
    use llguidance::toktrie::ApproximateTokEnv;
    use llguidance::{Matcher, ParserFactory};

    use super::*;

    fn of(lark: &str) -> TextGrammar {
        TextGrammar::new(&GrammarSource::Lark(lark.to_owned())).expect("a grammar")
    }

    /// Returns whether llguidance accepts `text` under the rewritten expression, from the first byte to the last.
    fn matches(regex: &str, text: &str) -> bool {
        let hir = regex_syntax::parse(regex).expect("an expression");
        let rewritten = hir_in_json(&hir).expect("rewritten").to_string();
        let factory = ParserFactory::new_simple(&ApproximateTokEnv::single_byte_env()).expect("a factory");
        let parser = factory.create_parser(TopLevelGrammar::from_regex(&rewritten));
        let mut matcher = Matcher::new(parser);
        let is_taken =
            |byte: u8| matcher.try_consume_tokens(&[u32::from(byte)]).is_ok_and(|count| count == 1);
        text.bytes().all(is_taken) && matcher.is_accepting().expect("no error")
    }

    #[test]
    fn a_slash_in_a_regular_expression_is_escaped_once() {
        for (given, expected) in [("a/b", "a\\/b"), ("a\\/b", "a\\/b"), ("\\\\/", "\\\\\\/"), ("ab", "ab")] {
            assert_eq!(between_slashes(given), expected, "{given}");
        }
    }

    #[test]
    fn a_regular_expression_matches_the_json_form_of_what_it_matched() {
        for (regex, good, bad) in [
            ("a.c", "a\tc", "a\nc"),
            ("[^a]+", "\"\\\n\u{1}é", "a"),
            ("(?i)q\"{2}", "Q\"\"", "q\""),
            ("(x|\\n)*", "x\nx", "xy"),
            ("\\\\/", "\\/", "/"),
        ] {
            assert!(matches(regex, &in_json(good)), "{regex} {good:?}");
            assert!(!matches(regex, &in_json(bad)), "{regex} {bad:?}");
            if in_json(good) != good {
                assert!(!matches(regex, good), "{regex} {good:?} unescaped");
            }
        }
    }

    #[test]
    fn strings_ranges_and_imports_are_rewritten() {
        let grammar = of(
            "start: line+ // one or more\nline: \"+\" /(.*)/ LF -> added\n    | \"a\"..\"c\" \"\\\"\"i\n%import common.LF\n",
        );
        assert_eq!(grammar.in_json.lines().next(), Some("start: line +"),);
        assert!(grammar.in_json.contains("| /[a-c]/ /"), "{}", grammar.in_json);
        assert!(grammar.in_json.contains("LF: /(?:\\\\n)/"), "{}", grammar.in_json);
        assert!(grammar.between_tags.contains("LF: (/\\n/) & LLMCTL_TEXT"), "{}", grammar.between_tags);
        assert!(grammar.between_tags.contains(": (\"+\") & LLMCTL_TEXT"), "{}", grammar.between_tags);
    }

    #[test]
    fn what_cannot_be_rewritten_is_named() {
        for (lark, keyword) in [
            ("start: ~/a/", "~"),
            ("start: <|end|>", "<"),
            ("start: %json {}", "%json"),
            ("%import python.NAME\nstart: NAME", "%import"),
            ("%import common.NOTHING\nstart: NOTHING", "%import common.NOTHING"),
            ("%declare X\nstart: X", "%declare"),
        ] {
            match TextGrammar::new(&GrammarSource::Lark(lark.to_owned())) {
                Err(GrammarError::Unsupported { keyword: named, .. }) => assert_eq!(named, keyword),
                other => panic!("{lark}: {other:?}"),
            }
        }
        for lark in ["start: \"a", "start", "| x", "start: /(/"] {
            let refused = TextGrammar::new(&GrammarSource::Lark(lark.to_owned()));
            assert!(matches!(refused, Err(GrammarError::Invalid(_))), "{lark}: {refused:?}");
        }
    }
}
