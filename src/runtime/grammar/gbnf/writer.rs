//! From rules to Lark.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::lexemes::Lexemes;
use super::regular::Rules;
use super::{Node, Result};
use llmctl_base::error::GrammarError;

/// Deepest group in one definition; llguidance takes 30.
const MAX_DEPTH: usize = 20;

/// Most bytes of what is written: as many as a grammar of llmctl's own may have.
const MAX_BYTES: usize = 1 << 20;

struct LarkWriter<'a> {
    lexemes: Lexemes<'a>,
    lark: String,
    /// Rules that are used and not written, each as a rule and as a terminal.
    left: Vec<(usize, bool)>,
    used: HashSet<(usize, bool)>,
    /// Names of the terminals that have none in the grammar, by their bodies.
    terminals: HashMap<String, usize>,
    num_rules: usize,
}

/// Writes Lark that begins at rule `start`.
pub fn write(rules: &Rules) -> Result<String> {
    let lexemes = Lexemes::of(rules)?;
    let (left, used, terminals) = Default::default();
    let mut writer = LarkWriter { lexemes, lark: String::new(), left, used, terminals, num_rules: 0 };
    let start = writer.node(&Node::Rule(0), false, 0);
    let mut lark = format!("start: {start}\n");
    while let Some((index, is_terminal)) = writer.left.pop() {
        let name = rule_name(index, is_terminal);
        let body = writer.body(&rules.bodies[index], is_terminal);
        writer.define(&name, &body);
        if writer.lark.len() > MAX_BYTES {
            return Err(GrammarError::TooComplex(format!("GBNF: more than {MAX_BYTES} bytes as Lark")));
        }
    }
    lark.push_str(&writer.lark);
    Ok(lark)
}

fn rule_name(index: usize, is_terminal: bool) -> String {
    if is_terminal { format!("T{index}") } else { format!("r{index}") }
}

impl LarkWriter<'_> {
    fn define(&mut self, name: &str, body: &str) {
        self.lark.push_str(&format!("{name}: {body}\n"));
    }

    /// Returns the right side of a rule's definition.
    fn body(&mut self, node: &Node, is_terminal: bool) -> String {
        match node {
            Node::Choice(options) if is_terminal || !self.lexemes.is_lexeme(node) => {
                self.options(options, is_terminal, 0)
            }
            node => self.node(node, is_terminal, 0),
        }
    }

    /// Returns a part as an expression that an operator can follow. `is_terminal` is true within a terminal.
    fn node(&mut self, node: &Node, is_terminal: bool, depth: usize) -> String {
        let is_lexeme = !is_terminal && self.lexemes.is_lexeme(node);
        match node {
            Node::Text(text) if is_terminal || is_lexeme => literal(text),
            Node::Text(text) => {
                let parts: Vec<String> = text.chars().map(|c| literal(c.encode_utf8(&mut [0; 4]))).collect();
                format!("({})", parts.join(" "))
            }
            Node::Class(ranges) => class(ranges),
            Node::Token { id, is_negated } => format!("<[{}{id}]>", if *is_negated { "^" } else { "" }),
            Node::Rule(index) => {
                let key = (*index, is_terminal || is_lexeme);
                if self.used.insert(key) {
                    self.left.push(key);
                }
                rule_name(key.0, key.1)
            }
            Node::Sequence(parts) if parts.is_empty() => "\"\"".to_owned(),
            node if is_lexeme => {
                let body = self.body(node, true);
                let (known, number) = (self.terminals.get(&body).copied(), self.terminals.len());
                let name = format!("L{}", known.unwrap_or(number));
                if known.is_none() {
                    self.define(&name, &body);
                    self.terminals.insert(body, number);
                }
                name
            }
            node if depth >= MAX_DEPTH => {
                let body = self.body(node, is_terminal);
                self.num_rules += 1;
                let name = format!("{}{}", if is_terminal { "G" } else { "g" }, self.num_rules);
                self.define(&name, &body);
                name
            }
            Node::Sequence(_) => {
                format!("({})", self.options(std::slice::from_ref(node), is_terminal, depth + 1))
            }
            Node::Choice(options) => format!("({})", self.options(options, is_terminal, depth + 1)),
            Node::Repeat { node, min, max } => {
                let node = self.node(node, is_terminal, depth + 1);
                match (min, max) {
                    (0, Some(0)) => "\"\"".to_owned(),
                    (0, Some(1)) => format!("({node})?"),
                    (0, None) => format!("({node})*"),
                    (1, None) => format!("({node})+"),
                    (min, Some(max)) => format!("({node}){{{min},{max}}}"),
                    (min, None) => format!("({node}){{{min},}}"),
                }
            }
        }
    }

    fn options(&mut self, options: &[Node], is_terminal: bool, depth: usize) -> String {
        let mut texts = Vec::with_capacity(options.len());
        for option in options {
            let text = match option {
                Node::Sequence(parts)
                    if !parts.is_empty() && (is_terminal || !self.lexemes.is_lexeme(option)) =>
                {
                    let parts: Vec<String> =
                        parts.iter().map(|part| self.node(part, is_terminal, depth)).collect();
                    parts.join(" ")
                }
                option => self.node(option, is_terminal, depth),
            };
            texts.push(text);
        }
        texts.join(" | ")
    }
}

/// Returns a text as a literal in the syntax of JSON, which is Lark's.
fn literal(text: &str) -> String {
    Value::String(text.to_owned()).to_string().replace('\u{7f}', "\\u007f")
}

fn class(ranges: &[(char, char)]) -> String {
    let range =
        |&(first, last): &(char, char)| format!("\\x{{{:X}}}-\\x{{{:X}}}", u32::from(first), u32::from(last));
    match ranges {
        [('\0', char::MAX)] => "/(?s:.)/".to_owned(),
        [(only, last)] if only == last => literal(only.encode_utf8(&mut [0; 4])),
        [] => "/[^\\x{0}-\\x{10FFFF}]/".to_owned(),
        ranges => format!("/[{}]/", ranges.iter().map(range).collect::<String>()),
    }
}
