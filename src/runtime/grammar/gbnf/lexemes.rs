//! Decides which regular parts of a grammar become lexemes.
//!
//! llguidance takes the longest text that one of the allowed lexemes matches. That loses a derivation if a lexeme matches a
//! text that another one, or itself, continues with a character that may also follow. Such lexemes are split into their
//! parts, in the end into characters, of which none begins another. The check errs on the side of splitting: it assumes that all
//! lexemes are allowed everywhere, and compares characters by the first byte of their UTF-8 form.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::regular::Rules;
use super::{Node, Result};
use llmctl_base::error::GrammarError;

/// Most characters of a lexeme beside others, and most parts within each other. One beyond is split.
const MAX_SIZE: usize = 1024;
const MAX_DEPTH: usize = 64;

/// Most parts and pairs of places that are looked at, in all.
const MAX_WORK: usize = 1 << 22;

/// A set of first bytes of characters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Firsts([u64; 4]);

impl Firsts {
    const ALL: Self = Self([u64::MAX; 4]);

    fn of(ranges: &[(char, char)]) -> Self {
        let first_byte = |c: char| usize::from(c.encode_utf8(&mut [0; 4]).as_bytes()[0]);
        let mut set = Self::default();
        for &(first, last) in ranges {
            for byte in first_byte(first)..=first_byte(last) {
                set.0[byte / 64] |= 1 << (byte % 64);
            }
        }
        set
    }

    fn of_char(c: char) -> Self {
        Self::of(&[(c, c)])
    }

    /// Adds a set; returns whether that changes something.
    fn add(&mut self, other: Self) -> bool {
        let before = *self;
        self.0.iter_mut().zip(other.0).for_each(|(own, other)| *own |= other);
        *self != before
    }

    fn meets(self, other: Self) -> bool {
        self.0.iter().zip(other.0).any(|(own, other)| own & other != 0)
    }
}

/// The places of a regular expression's characters (Glushkov's automaton). A repetition counts as one without an end.
#[derive(Default)]
struct CharAutomaton {
    characters: Vec<Firsts>,
    /// The places that may come next.
    next: Vec<BTreeSet<usize>>,
}

/// A part's places.
#[derive(Clone, Default)]
struct Span {
    is_empty_allowed: bool,
    first: Vec<usize>,
    last: Vec<usize>,
}

impl CharAutomaton {
    fn add(&mut self, character: Firsts) -> usize {
        self.characters.push(character);
        self.next.push(BTreeSet::new());
        self.characters.len() - 1
    }

    fn connect(&mut self, from: &[usize], to: &[usize]) {
        from.iter().for_each(|&place| self.next[place].extend(to));
    }

    fn span(&mut self, rules: &Rules, node: &Node) -> Span {
        match node {
            Node::Text(text) => {
                let places: Vec<usize> = text.chars().map(|c| self.add(Firsts::of_char(c))).collect();
                places.windows(2).for_each(|pair| self.connect(&pair[..1], &pair[1..]));
                let ends = |place: Option<&usize>| place.copied().into_iter().collect();
                Span { is_empty_allowed: false, first: ends(places.first()), last: ends(places.last()) }
            }
            Node::Class(ranges) => {
                let place = self.add(Firsts::of(ranges));
                Span { is_empty_allowed: false, first: vec![place], last: vec![place] }
            }
            Node::Sequence(parts) => {
                let mut whole = Span { is_empty_allowed: true, ..Span::default() };
                for part in parts {
                    let part = self.span(rules, part);
                    self.connect(&whole.last, &part.first);
                    if whole.is_empty_allowed {
                        whole.first.extend(&part.first);
                    }
                    if !part.is_empty_allowed {
                        whole.last.clear();
                    }
                    whole.last.extend(&part.last);
                    whole.is_empty_allowed &= part.is_empty_allowed;
                }
                whole
            }
            Node::Choice(options) => {
                let options = options.iter().map(|option| self.span(rules, option));
                options.fold(Span::default(), |mut whole, option| {
                    whole.is_empty_allowed |= option.is_empty_allowed;
                    whole.first.extend(option.first);
                    whole.last.extend(option.last);
                    whole
                })
            }
            Node::Repeat { node, min, max } => {
                let mut part = self.span(rules, node);
                if *max != Some(1) {
                    self.connect(&part.last, &part.first);
                }
                part.is_empty_allowed |= *min == 0;
                part
            }
            Node::Rule(index) => self.span(rules, &rules.bodies[*index]),
            Node::Token { .. } => Span::default(),
        }
    }
}

/// A lexeme, and what may follow it.
struct Lexeme {
    places: CharAutomaton,
    span: Span,
    first: Firsts,
    follow: Firsts,
}

impl Lexeme {
    fn new(rules: &Rules, node: &Node) -> Self {
        let mut places = CharAutomaton::default();
        let span = places.span(rules, node);
        let mut first = Firsts::default();
        span.first.iter().for_each(|&place| _ = first.add(places.characters[place]));
        Self { places, span, first, follow: Firsts::default() }
    }

    /// Returns whether `other` continues a text that this lexeme matches with a character that may also follow. Adds the pairs
    /// that it looked at to `work`.
    fn is_overrun_by(&self, other: &Lexeme, work: &mut usize) -> bool {
        *work += 1;
        if !self.first.meets(other.first) {
            return false;
        }
        let meet = |&(own, others): &(usize, usize)| {
            self.places.characters[own].meets(other.places.characters[others])
        };
        let pairs = |own: Vec<usize>, others: Vec<usize>| {
            own.into_iter().flat_map(move |own| others.clone().into_iter().map(move |others| (own, others)))
        };
        let mut found: Vec<(usize, usize)> =
            pairs(self.span.first.clone(), other.span.first.clone()).filter(meet).collect();
        let mut seen: BTreeSet<(usize, usize)> = found.iter().copied().collect();
        while let Some((own, others)) = found.pop() {
            let continues = |&next: &usize| other.places.characters[next].meets(self.follow);
            let is_end = self.span.last.contains(&own);
            if *work > MAX_WORK || is_end && other.places.next[others].iter().any(continues) {
                return true;
            }
            let next = |places: &BTreeSet<usize>| places.iter().copied().collect();
            let next = pairs(next(&self.places.next[own]), next(&other.places.next[others]));
            *work += self.places.next[own].len() * other.places.next[others].len();
            found.extend(next.filter(meet).filter(|pair| seen.insert(*pair)));
        }
        false
    }
}

/// What is known of a rule that is no lexeme.
#[derive(Clone, Copy, Default)]
struct RuleFacts {
    is_empty_allowed: bool,
    first: Firsts,
    follow: Firsts,
}

/// The lexemes of a grammar.
pub struct Lexemes<'a> {
    rules: &'a Rules,
    /// Regular parts that are no lexemes.
    split: HashSet<Node>,
    found: HashMap<Node, Lexeme>,
    facts: HashMap<usize, RuleFacts>,
    /// What repeated parts begin with.
    repeated: HashMap<*const Node, Firsts>,
    work: usize,
}

impl<'a> Lexemes<'a> {
    /// # Errors
    /// [`GrammarError::TooComplex`] if they take too long to tell apart.
    pub fn of(rules: &'a Rules) -> Result<Self> {
        let (split, found, facts, repeated) = Default::default();
        let mut lexemes = Self { rules, split, found, facts, repeated, work: 0 };
        if rules.is_regular(&rules.bodies[0]) {
            return Ok(lexemes); // one lexeme, which nothing follows
        }
        loop {
            lexemes.find();
            lexemes.follow();
            let (found, work) = (&lexemes.found, &mut lexemes.work);
            let mut is_overrunning =
                |lexeme: &Lexeme| found.values().any(|other| other.is_overrun_by(lexeme, work));
            let split = found.iter().filter(|(_, lexeme)| is_overrunning(lexeme));
            let split: Vec<Node> = split.map(|(node, _)| node.clone()).collect();
            if lexemes.work > MAX_WORK {
                let message = "GBNF: too many parts that continue each other".to_owned();
                return Err(GrammarError::TooComplex(message));
            }
            if split.is_empty() {
                return Ok(lexemes);
            }
            lexemes.split.extend(split);
        }
    }

    /// Returns whether a part is one lexeme.
    pub fn is_lexeme(&self, node: &Node) -> bool {
        self.rules.is_regular(node) && !self.split.contains(node) && !self.is_too_large(node)
    }

    fn is_too_large(&self, node: &Node) -> bool {
        let is_whole = self.found.is_empty() && self.facts.is_empty(); // the whole grammar is regular
        let (size, depth) = self.rules.size(node);
        !is_whole && (size > MAX_SIZE || depth > MAX_DEPTH)
    }

    /// Finds the lexemes, and the rules that are none.
    fn find(&mut self) {
        self.found.clear();
        self.facts = HashMap::from([(0, RuleFacts::default())]);
        let mut left = vec![0];
        while let Some(rule) = left.pop() {
            let rules = self.rules;
            self.find_in(&rules.bodies[rule], &mut left);
        }
    }

    fn find_in(&mut self, node: &Node, left: &mut Vec<usize>) {
        if self.is_lexeme(node) {
            if !self.found.contains_key(node) {
                self.found.insert(node.clone(), Lexeme::new(self.rules, node));
            }
        } else if let Node::Text(text) = node {
            text.chars().for_each(|c| self.find_in(&Node::Class(vec![(c, c)]), left));
        } else if let Node::Rule(index) = node {
            if self.facts.insert(*index, self.facts.get(index).copied().unwrap_or_default()).is_none() {
                left.push(*index);
            }
        } else {
            node.parts().iter().for_each(|part| self.find_in(part, left));
        }
    }

    /// Computes what may follow each lexeme, as the least fixed point.
    fn follow(&mut self) {
        let mut indices: Vec<usize> = self.facts.keys().copied().collect();
        indices.sort_unstable();
        let mut is_changed = true;
        while std::mem::take(&mut is_changed) && self.work <= MAX_WORK {
            indices.reverse(); // facts go from rules to those that they use, and back
            for &index in &indices {
                let follow = self.facts[&index].follow;
                let (is_empty_allowed, first) = self.pass(&self.rules.bodies[index], follow, &mut is_changed);
                let Some(facts) = self.facts.get_mut(&index) else { continue };
                is_changed |= facts.first.add(first) | (facts.is_empty_allowed != is_empty_allowed);
                facts.is_empty_allowed = is_empty_allowed;
            }
        }
    }

    /// Tells the lexemes and the rules of a part what follows it. Returns whether it may be empty, and its first characters.
    fn pass(&mut self, node: &Node, follow: Firsts, is_changed: &mut bool) -> (bool, Firsts) {
        self.work += 1;
        if let Some(lexeme) = self.found.get_mut(node) {
            *is_changed |= lexeme.follow.add(follow);
            return (lexeme.span.is_empty_allowed, lexeme.first);
        }
        match node {
            Node::Text(text) => {
                let characters: Vec<Node> = text.chars().map(|c| Node::Class(vec![(c, c)])).collect();
                self.pass_sequence(&characters, follow, is_changed)
            }
            Node::Sequence(parts) => self.pass_sequence(parts, follow, is_changed),
            Node::Choice(options) => {
                let mut whole = (false, Firsts::default());
                for option in options {
                    let (is_empty_allowed, first) = self.pass(option, follow, is_changed);
                    whole.0 |= is_empty_allowed;
                    whole.1.add(first);
                }
                whole
            }
            Node::Repeat { node, min, max } => {
                // What it begins with follows it too, as far as earlier passes have found.
                let (key, mut behind) = (std::ptr::from_ref(&**node), follow);
                if *max != Some(1) {
                    behind.add(self.repeated.get(&key).copied().unwrap_or_default());
                }
                let (is_empty_allowed, first) = self.pass(node, behind, is_changed);
                *is_changed |= self.repeated.entry(key).or_default().add(first);
                (is_empty_allowed || *min == 0, first)
            }
            Node::Rule(index) => {
                let Some(facts) = self.facts.get_mut(index) else { return (false, Firsts::default()) };
                *is_changed |= facts.follow.add(follow);
                (facts.is_empty_allowed, facts.first)
            }
            // Any other token may begin with anything.
            Node::Token { is_negated: true, .. } => (false, Firsts::ALL),
            Node::Token { .. } | Node::Class(_) => (false, Firsts::default()),
        }
    }

    fn pass_sequence(&mut self, parts: &[Node], mut follow: Firsts, is_changed: &mut bool) -> (bool, Firsts) {
        let (mut is_whole_empty, mut whole_first) = (true, Firsts::default());
        for part in parts.iter().rev() {
            let (is_empty_allowed, first) = self.pass(part, follow, is_changed);
            if !is_empty_allowed {
                (follow, whole_first) = (Firsts::default(), Firsts::default());
            }
            follow.add(first);
            whole_first.add(first);
            is_whole_empty &= is_empty_allowed;
        }
        (is_whole_empty, whole_first)
    }
}
