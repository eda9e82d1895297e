//! GBNF, the grammars of llama.cpp (its grammars/README.md and src/llama-grammar.cpp), translated to Lark.
//!
//! A GBNF grammar is over characters, and llguidance cuts a text into lexemes first, each as long as possible. `reader` reads
//! rules, `regular` finds what is regular in them, `lexemes` decides what may be one lexeme, `writer` writes Lark. Invariants: the
//! Lark grammar has the language of the GBNF grammar; sizes are bounded before work; an error names the rule and its line. Pure.

mod lexemes;
mod reader;
mod regular;
mod writer;

use llmctl_base::error::GrammarError;

type Result<T> = std::result::Result<T, GrammarError>;

/// Finds the token of a name: its text (`<think>`) or its number (`<[7]>`).
pub type FindToken<'a> = &'a dyn Fn(&str) -> Option<u32>;

/// Part of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Node {
    /// A literal, not empty.
    Text(String),
    /// One character of these ranges, in ascending order.
    Class(Vec<(char, char)>),
    Sequence(Vec<Node>),
    /// One of these.
    Choice(Vec<Node>),
    Repeat {
        node: Box<Node>,
        min: u32,
        /// `None` has no end.
        max: Option<u32>,
    },
    /// The rule at this index.
    Rule(usize),
    /// This token, or any other.
    Token {
        id: u32,
        is_negated: bool,
    },
}

impl Node {
    /// Returns the parts, in order.
    fn parts(&self) -> &[Node] {
        match self {
            Node::Sequence(parts) | Node::Choice(parts) => parts,
            Node::Repeat { node, .. } => std::slice::from_ref(node),
            Node::Text(_) | Node::Class(_) | Node::Rule(_) | Node::Token { .. } => &[],
        }
    }

    /// Returns whether `is_wanted` holds for this part or one within it.
    fn has(&self, is_wanted: &dyn Fn(&Node) -> bool) -> bool {
        is_wanted(self) || self.parts().iter().any(|part| part.has(is_wanted))
    }
}

/// Returns whether a text is GBNF: a line begins with a name and `::=`, which no line of Lark does.
pub fn is_gbnf(text: &str) -> bool {
    let defines = |line: &str| {
        let name = line.split_once("::=").map(|(name, _)| name.trim());
        name.is_some_and(|name| !name.is_empty() && name.chars().all(reader::is_name))
    };
    text.lines().any(defines)
}

/// Translates a grammar that begins at rule `root`. Left recursion, which llama.cpp refuses, is allowed.
///
/// # Errors
/// [`GrammarError::Invalid`] for what is malformed or undefined, [`GrammarError::Unsupported`] for a token that is not in the
/// vocabulary, [`GrammarError::TooComplex`] beyond the limits.
pub fn to_lark(gbnf: &str, find_token: FindToken<'_>) -> Result<String> {
    let bodies = reader::read(gbnf, find_token)?;
    let rules = regular::Rules::new(bodies);
    writer::write(&rules)
}
