//! From text to rules.

use std::collections::HashMap;

use regex_syntax::hir::{ClassUnicode, ClassUnicodeRange};

use super::{FindToken, Node, Result};
use llmctl_base::error::GrammarError;

/// Most groups within each other, and most parts of all rules.
const MAX_NESTING: usize = 128;
const MAX_PARTS: usize = 1 << 15;

/// Most repetitions, those within each other multiplied. llama.cpp's limit is 2,000.
const MAX_TIMES: u32 = 10_000;

/// Most marks of repetition behind one part.
const MAX_MARKS: usize = 4;

/// The rule where a grammar begins.
const ROOT: &str = "root";

pub fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

/// Reads a grammar. Returns the bodies of its rules; the first is that of `root`. A rule that is defined twice is what its last
/// definition says, as in llama.cpp.
pub fn read(gbnf: &str, find_token: FindToken<'_>) -> Result<Vec<Node>> {
    let mut reader = GbnfReader {
        text: gbnf,
        rest: gbnf,
        find_token,
        names: HashMap::new(),
        rules: Vec::new(),
        current: String::new(),
        depth: 0,
        num_parts: 0,
    };
    reader.rule_named(ROOT);
    reader.skip_space(true);
    while !reader.rest.is_empty() {
        reader.rule()?;
    }
    reader.finish()
}

/// A rule that is defined or used.
struct NamedRule {
    name: String,
    body: Option<Node>,
    /// The place of its first use, and the rule that uses it.
    used: Option<(usize, String)>,
}

struct GbnfReader<'a> {
    text: &'a str,
    rest: &'a str,
    find_token: FindToken<'a>,
    names: HashMap<String, usize>,
    rules: Vec<NamedRule>,
    /// The name of the rule that is being read.
    current: String,
    depth: usize,
    num_parts: usize,
}

impl<'a> GbnfReader<'a> {
    fn line(&self) -> usize {
        1 + self.text[..self.text.len() - self.rest.len()].matches('\n').count()
    }

    fn place(&self) -> String {
        match self.current.as_str() {
            "" => format!("line {}", self.line()),
            name => format!("rule {name}, line {}", self.line()),
        }
    }

    fn invalid<T>(&self, message: &str) -> Result<T> {
        Err(GrammarError::Invalid(format!("GBNF: {}: {message}", self.place())))
    }

    fn too_complex<T>(&self, message: &str) -> Result<T> {
        Err(GrammarError::TooComplex(format!("GBNF: {}: {message}", self.place())))
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    /// Takes `text` if it comes next.
    fn takes(&mut self, text: &str) -> bool {
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn take_while(&mut self, is_part: impl Fn(char) -> bool) -> &'a str {
        let (taken, rest) = self.rest.split_at(self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len()));
        self.rest = rest;
        taken
    }

    /// Skips blanks and comments.
    fn skip_space(&mut self, skips_lines: bool) {
        loop {
            let skipped =
                self.take_while(|c| matches!(c, ' ' | '\t') || (skips_lines && matches!(c, '\r' | '\n')));
            let comment =
                if self.rest.starts_with('#') { self.take_while(|c| !matches!(c, '\r' | '\n')) } else { "" };
            if skipped.is_empty() && comment.is_empty() {
                return;
            }
        }
    }

    fn rule_named(&mut self, name: &str) -> usize {
        if let Some(&index) = self.names.get(name) {
            return index;
        }
        self.names.insert(name.to_owned(), self.rules.len());
        self.rules.push(NamedRule { name: name.to_owned(), body: None, used: None });
        self.rules.len() - 1
    }

    fn rule(&mut self) -> Result<()> {
        self.current.clear();
        let name = self.take_while(is_name);
        if name.is_empty() {
            return self.invalid("the name of a rule is expected");
        }
        name.clone_into(&mut self.current);
        self.skip_space(false);
        if !self.takes("::=") {
            return self.invalid("`::=` is expected behind the name");
        }
        self.skip_space(true);
        let body = self.choice(false)?;
        if !self.rest.is_empty() && !self.rest.starts_with(['\r', '\n']) {
            return self.invalid("the end of the line is expected");
        }
        let index = self.rule_named(name);
        self.rules[index].body = Some(body);
        self.skip_space(true);
        Ok(())
    }

    /// Reads alternatives. Within a group, lines do not matter; elsewhere a line may begin with `|`, as xgrammar allows.
    fn choice(&mut self, is_nested: bool) -> Result<Node> {
        let mut options = vec![self.sequence(is_nested)?];
        loop {
            let before = self.rest;
            self.skip_space(true);
            if !self.takes("|") {
                self.rest = before;
                break;
            }
            self.skip_space(true);
            options.push(self.sequence(is_nested)?);
        }
        Ok(if options.len() == 1 { options.remove(0) } else { Node::Choice(options) })
    }

    fn sequence(&mut self, is_nested: bool) -> Result<Node> {
        let mut parts: Vec<Node> = Vec::new();
        while let Some(mut part) = self.part(is_nested)? {
            let mut num_marks = 0;
            while let Some((min, max)) = self.repetition(is_nested)? {
                part = self.repeated(part, min, max)?;
                num_marks += 1;
                if num_marks > MAX_MARKS {
                    return self.too_complex("repetitions of repetitions");
                }
            }
            parts.push(part);
            self.num_parts += 1;
            if self.num_parts > MAX_PARTS {
                return self.too_complex(&format!("more than {MAX_PARTS} parts"));
            }
        }
        if matches!(self.peek(), Some('*' | '+' | '?' | '{')) {
            return self.invalid("there is nothing to repeat");
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Node::Sequence(parts) })
    }

    /// Reads what can be repeated, and the space behind it; `None` at the end of a sequence.
    fn part(&mut self, is_nested: bool) -> Result<Option<Node>> {
        let node = match self.peek() {
            Some('"') => self.literal()?,
            Some('[') => self.class()?,
            Some('<' | '!') => self.token()?,
            Some('(') => self.group()?,
            Some('.') => {
                self.rest = &self.rest[1..];
                Node::Class(vec![('\0', char::MAX)])
            }
            Some(c) if is_name(c) => {
                let line = self.line();
                let name = self.take_while(is_name);
                let (index, user) = (self.rule_named(name), self.current.clone());
                self.rules[index].used.get_or_insert((line, user));
                Node::Rule(index)
            }
            _ => return Ok(None),
        };
        self.skip_space(is_nested);
        Ok(Some(node))
    }

    fn group(&mut self) -> Result<Node> {
        self.depth += 1;
        if self.depth > MAX_NESTING {
            return self.too_complex(&format!("more than {MAX_NESTING} groups within each other"));
        }
        self.rest = &self.rest[1..];
        self.skip_space(true);
        let node = self.choice(true)?;
        if !self.takes(")") {
            return self.invalid("a group is not closed: `)` is expected");
        }
        self.depth -= 1;
        Ok(node)
    }

    fn literal(&mut self) -> Result<Node> {
        self.rest = &self.rest[1..];
        let mut text = String::new();
        while !self.takes("\"") {
            let value = self.character("a literal is not closed")?;
            match char::from_u32(value) {
                Some(c) => text.push(c),
                None => return self.invalid(&format!("U+{value:04X} is half of a character")),
            }
        }
        Ok(if text.is_empty() { Node::Sequence(Vec::new()) } else { Node::Text(text) })
    }

    fn class(&mut self) -> Result<Node> {
        self.rest = &self.rest[1..];
        let is_negated = self.takes("^");
        let mut class = ClassUnicode::empty();
        let mut is_empty = true;
        while !self.takes("]") {
            is_empty = false;
            let first = self.character("a class is not closed")?;
            let is_range = self.rest.starts_with('-') && !self.rest.starts_with("-]");
            let last = match is_range {
                true => {
                    self.rest = &self.rest[1..];
                    self.character("a class is not closed")?
                }
                false => first,
            };
            if last < first {
                return self.invalid("a range ends before it begins");
            }
            // Halves of characters are in no text.
            let ends = [first..=last.min(0xD7FF), first.max(0xE000)..=last].map(|range| range.into_inner());
            for (first, last) in ends.into_iter().filter(|(first, last)| first <= last) {
                let [Some(first), Some(last)] = [first, last].map(char::from_u32) else { continue };
                class.push(ClassUnicodeRange::new(first, last));
            }
        }
        if is_empty {
            return Ok(Node::Sequence(Vec::new())); // so does llama.cpp
        }
        if is_negated {
            class.negate();
        }
        Ok(Node::Class(class.iter().map(|range| (range.start(), range.end())).collect()))
    }

    /// Reads a character of a literal or a class, as its code point. `unclosed` is the error at the end of the text.
    fn character(&mut self, unclosed: &str) -> Result<u32> {
        let Some(c) = self.peek() else { return self.invalid(unclosed) };
        self.rest = &self.rest[c.len_utf8()..];
        if c != '\\' {
            return Ok(u32::from(c));
        }
        let Some(escape) = self.peek() else { return self.invalid(unclosed) };
        self.rest = &self.rest[escape.len_utf8()..];
        match escape {
            'x' => self.hexadecimal(2),
            'u' => self.hexadecimal(4),
            'U' => self.hexadecimal(8),
            't' => Ok(u32::from('\t')),
            'r' => Ok(u32::from('\r')),
            'n' => Ok(u32::from('\n')),
            '\\' | '"' | '[' | ']' | '-' => Ok(u32::from(escape)),
            other => self.invalid(&format!("the escape \\{other} is unknown")),
        }
    }

    fn hexadecimal(&mut self, num_digits: usize) -> Result<u32> {
        let digits =
            self.rest.get(..num_digits).filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
        let value = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok());
        match value {
            None => self.invalid(&format!("{num_digits} hexadecimal digits are expected")),
            Some(value) if value > u32::from(char::MAX) => self.invalid("there is no such character"),
            Some(value) => {
                self.rest = &self.rest[num_digits..];
                Ok(value)
            }
        }
    }

    fn token(&mut self) -> Result<Node> {
        let is_negated = self.takes("!");
        if !self.rest.starts_with('<') {
            return self.invalid("a token is expected behind `!`");
        }
        let Some(end) = self.rest.find(['>', '\n']).filter(|end| self.rest[*end..].starts_with('>')) else {
            return self.invalid("a token is not closed: `>` is expected");
        };
        let (name, rest) = self.rest.split_at(end + 1);
        let Some(id) = (self.find_token)(name) else {
            let message = format!("GBNF: {}: the vocabulary has no such token", self.place());
            return Err(GrammarError::Unsupported { keyword: name.to_owned(), message });
        };
        self.rest = rest;
        Ok(Node::Token { id, is_negated })
    }

    fn number(&mut self) -> Result<u32> {
        match self.take_while(|c| c.is_ascii_digit()).parse() {
            Ok(number) => Ok(number),
            Err(_) => self.invalid("a number is expected"),
        }
    }

    /// Reads `*`, `+`, `?` or numbers in braces, and the space behind them.
    fn repetition(&mut self, is_nested: bool) -> Result<Option<(u32, Option<u32>)>> {
        let times = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => {
                let times = self.braces(is_nested)?;
                self.skip_space(is_nested);
                return Ok(Some(times));
            }
            _ => return Ok(None),
        };
        self.rest = &self.rest[1..];
        self.skip_space(is_nested);
        Ok(Some(times))
    }

    fn braces(&mut self, is_nested: bool) -> Result<(u32, Option<u32>)> {
        self.rest = &self.rest[1..];
        self.skip_space(is_nested);
        let min = self.number()?;
        self.skip_space(is_nested);
        let max = if self.takes(",") {
            self.skip_space(is_nested);
            let max = if self.rest.starts_with('}') { None } else { Some(self.number()?) };
            self.skip_space(is_nested);
            max
        } else {
            Some(min)
        };
        if !self.takes("}") {
            return self.invalid("`}` is expected behind the numbers of repetitions");
        }
        if max.is_some_and(|max| max < min) {
            return self.invalid(&format!("{min} repetitions are more than {}", max.unwrap_or_default()));
        }
        Ok((min, max))
    }

    /// Returns `node` repeated, unless the numbers of repetitions within each other multiply to too many.
    fn repeated(&self, node: Node, min: u32, max: Option<u32>) -> Result<Node> {
        if times(&node).saturating_mul(max.unwrap_or(min).max(1)) > MAX_TIMES {
            return self.too_complex(&format!("more than {MAX_TIMES} repetitions"));
        }
        Ok(Node::Repeat { node: Box::new(node), min, max })
    }

    /// Checks that what is used is defined.
    fn finish(mut self) -> Result<Vec<Node>> {
        self.current.clear();
        let undefined = self.rules.iter().find(|rule| rule.body.is_none());
        if let Some(NamedRule { name, used, .. }) = undefined {
            let message = match used {
                Some((line, user)) => format!("GBNF: rule {user}, line {line}: no rule is called {name}"),
                None => format!("GBNF: no rule is called {name}, where a grammar begins"),
            };
            return Err(GrammarError::Invalid(message));
        }
        Ok(self.rules.into_iter().filter_map(|rule| rule.body).collect())
    }
}

/// Returns the product of the repetitions within each other, at the most.
fn times(node: &Node) -> u32 {
    let own = match node {
        Node::Repeat { min, max, .. } => max.unwrap_or(*min).max(1),
        _ => 1,
    };
    own.saturating_mul(node.parts().iter().map(times).max().unwrap_or(1))
}
