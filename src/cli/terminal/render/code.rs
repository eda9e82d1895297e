//! A fenced block of code, coloured while it comes.
//!
//! A run of letters, of blanks or of punctuation is printed when the first character after it is there: then
//! the grammar, applied to the line so far, says what it is. So the colour of a character depends on what was
//! written and not on how it was split. A line of more than [`MAX_LINE`] bytes continues without colours, as
//! the grammars are not made for such.

use std::sync::LazyLock;

use syntect::parsing::{ParseState, Scope, ScopeStack, SyntaxSet};

use super::style::{Styled, TextStyle};

const MAX_LINE: usize = 1000;

static SYNTAXES: LazyLock<SyntaxSet> = LazyLock::new(SyntaxSet::load_defaults_newlines);

/// Scopes of the grammars and their colours, the more special first.
static COLORS: LazyLock<Vec<(Scope, TextStyle)>> = LazyLock::new(|| {
    let (red, green, yellow, blue, magenta, cyan) = (31, 32, 33, 34, 35, 36);
    let table = [
        ("comment", TextStyle::DIM),
        ("constant.character.escape", TextStyle::colored(magenta)),
        ("string", TextStyle::colored(green)),
        ("constant", TextStyle::colored(yellow)),
        ("entity.name.function", TextStyle::colored(blue)),
        ("support.function", TextStyle::colored(blue)),
        ("variable.function", TextStyle::colored(blue)),
        ("entity.name.tag", TextStyle::colored(blue)),
        ("entity.other.attribute-name", TextStyle::colored(cyan)),
        ("entity.name", TextStyle::colored(cyan)),
        ("support.type", TextStyle::colored(cyan)),
        ("storage.type", TextStyle::colored(magenta)),
        ("storage", TextStyle::colored(magenta)),
        ("keyword.operator", TextStyle::PLAIN),
        ("keyword", TextStyle::colored(magenta)),
        ("variable.language", TextStyle::colored(magenta)),
        ("markup.inserted", TextStyle::colored(green)),
        ("markup.deleted", TextStyle::colored(red)),
    ];
    let scope = |(name, style)| (Scope::new(name).expect("a scope of at most eight parts"), style);
    table.into_iter().map(scope).collect()
});

/// One block.
pub struct Code {
    /// Before the line, where the language is known.
    grammar: Option<(ParseState, ScopeStack)>,
    line: String,
    /// Bytes of the line that are printed.
    printed: usize,
}

impl Code {
    /// `info` is what follows the opening fence: the language, and perhaps more.
    pub fn new(info: &str) -> Self {
        let token = info.split(|c: char| !(c.is_alphanumeric() || "+#-_.".contains(c))).next().unwrap_or("");
        let syntax = SYNTAXES.find_syntax_by_token(token).filter(|_| !token.is_empty());
        let grammar = syntax.map(|syntax| (ParseState::new(syntax), ScopeStack::new()));
        Self { grammar, line: String::new(), printed: 0 }
    }

    pub fn push(&mut self, c: char, out: &mut Styled) {
        let before = self.line.len();
        let ends_run = self.line.chars().next_back().is_some_and(|last| class(last) != class(c));
        self.line.push(c);
        if c == '\n' {
            self.print(self.line.len(), out);
            self.next_line();
        } else if self.grammar.is_none() || self.line.len() > MAX_LINE {
            out.push(&self.line[self.printed..], TextStyle::PLAIN);
            self.printed = self.line.len();
        } else if ends_run {
            self.print(before, out);
        }
    }

    /// Writes the text that is held back.
    pub fn finish(&mut self, out: &mut Styled) {
        self.print(self.line.len(), out);
    }

    /// Prints the line up to `end`, as the grammar reads it with all that is known of the line.
    fn print(&mut self, end: usize, out: &mut Styled) {
        let parsed =
            self.grammar.as_ref().filter(|_| self.line.len() <= MAX_LINE).and_then(|(state, stack)| {
                let ops = state.clone().parse_line(&self.line, &SYNTAXES).ok()?;
                Some((ops, stack.clone()))
            });
        let Some((ops, mut stack)) = parsed else {
            out.push(&self.line[self.printed..end], TextStyle::PLAIN);
            self.printed = end;
            return;
        };
        for (at, op) in ops {
            self.print_as(at.min(end), &stack, out);
            if stack.apply(&op).is_err() {
                break; // a grammar that pops too much: the rest keeps its colour
            }
        }
        self.print_as(end, &stack, out);
    }

    fn print_as(&mut self, end: usize, stack: &ScopeStack, out: &mut Styled) {
        if end > self.printed {
            out.push(&self.line[self.printed..end], style_of(stack));
            self.printed = end;
        }
    }

    fn next_line(&mut self) {
        if let Some((state, stack)) = &mut self.grammar {
            let ops = state.parse_line(&self.line, &SYNTAXES).unwrap_or_default();
            let _ = ops.iter().try_for_each(|(_, op)| stack.apply(op));
        }
        self.line.clear();
        self.printed = 0;
    }
}

#[derive(PartialEq, Eq)]
enum Class {
    Word,
    Blank,
    Other,
}

fn class(c: char) -> Class {
    match c {
        _ if c.is_alphanumeric() || c == '_' => Class::Word,
        _ if c.is_whitespace() => Class::Blank,
        _ => Class::Other,
    }
}

/// Returns the colour of the innermost scope that has one.
fn style_of(stack: &ScopeStack) -> TextStyle {
    let color =
        |scope: &Scope| COLORS.iter().find(|(known, _)| known.is_prefix_of(*scope)).map(|(_, style)| *style);
    stack.as_slice().iter().rev().find_map(color).unwrap_or(TextStyle::PLAIN)
}

#[cfg(test)]
mod tests {
    use super::super::style::tests::plain;
    use super::*;

    fn colored(info: &str, text: &str) -> String {
        let (mut code, mut out) = (Code::new(info), Styled::new(true, None));
        text.chars().for_each(|c| code.push(c, &mut out));
        code.finish(&mut out);
        out.reset();
        out.take()
    }

    #[test]
    fn a_known_language_has_colours() {
        let rust = colored("rust", "fn main() { // hi\n    \"a\"\n}");
        assert!(rust.contains("\x1b[35mfn"), "{rust:?}");
        assert!(rust.contains("\x1b[34mmain"), "{rust:?}");
        assert!(rust.contains("\x1b[2m// hi"), "{rust:?}");
        assert!(rust.contains("\x1b[32m\"a\""), "{rust:?}");
        let python = colored("python title=\"x\"", "def f():\n    return 1\n");
        assert!(python.contains("\x1b[35m") && python.contains("\x1b[33m1"), "{python:?}");
    }

    #[test]
    fn what_spans_lines_is_known_in_the_next() {
        let comment = colored("c", "/* a\nint b;\n*/ int c;\n");
        assert!(!comment.contains("\x1b[35mint\x1b[0m b"), "{comment:?}");
        assert!(comment.contains("\x1b[35mint\x1b[0m c"), "{comment:?}");
    }

    #[test]
    fn an_unknown_language_and_a_very_long_line_are_text() {
        assert_eq!(colored("klingon", "fn x\n"), "fn x\n");
        assert_eq!(colored("", "fn x"), "fn x");
        let long = format!("let x = \"{}\";\n", "y".repeat(2 * MAX_LINE));
        assert_eq!(plain(&colored("rust", &long)), long);
    }
}
