//! What is regular in a grammar: rules that lead to no recursion and to no token.

use super::Node;

pub struct Rules {
    /// The first begins the grammar.
    pub bodies: Vec<Node>,
    is_regular: Vec<bool>,
    /// Characters and depth of a regular rule, those of the rules that it uses included.
    sizes: Vec<(usize, usize)>,
}

impl Rules {
    pub fn new(mut bodies: Vec<Node>) -> Self {
        for (index, body) in bodies.iter_mut().enumerate() {
            if let Some(repeated) = repeated(index, body) {
                *body = repeated;
            }
        }
        let num_rules = bodies.len();
        let mut rules = Self { bodies, is_regular: vec![false; num_rules], sizes: vec![(0, 0); num_rules] };
        rules.find_regular();
        rules
    }

    /// A rule is regular once all that it uses are: those that use each other never become so.
    fn find_regular(&mut self) {
        let mut left: Vec<usize> = (0..self.bodies.len()).collect();
        loop {
            let num_left = left.len();
            left.reverse(); // rules stand before what they use, mostly, or behind it
            left.retain(|&index| {
                let body = &self.bodies[index];
                let is_regular = self.is_regular(body);
                if is_regular {
                    (self.sizes[index], self.is_regular[index]) = (self.size(body), true);
                }
                !is_regular
            });
            if left.len() == num_left {
                return;
            }
        }
    }

    pub fn is_regular(&self, node: &Node) -> bool {
        !node.has(&|part| match part {
            Node::Rule(index) => !self.is_regular[*index],
            Node::Token { .. } => true,
            _ => false,
        })
    }

    /// Returns the characters of a regular part, and how deep parts lie within each other.
    pub fn size(&self, node: &Node) -> (usize, usize) {
        let (size, depth) = match node {
            Node::Text(text) => (text.chars().count(), 0),
            Node::Class(_) => (1, 0),
            Node::Rule(index) => self.sizes[*index],
            Node::Sequence(_) | Node::Choice(_) | Node::Repeat { .. } | Node::Token { .. } => {
                let parts = node.parts().iter().map(|part| self.size(part));
                parts.fold((0, 0), |(size, depth), part| (part.0.saturating_add(size), part.1.max(depth)))
            }
        };
        (size, depth + 1)
    }
}

/// Returns the body of a rule whose only use of itself is at the end of alternatives (`ws ::= ([ \t] ws)?`) as a repetition.
/// GBNF often writes repetitions so, and llguidance's parser takes long for them.
fn repeated(rule: usize, body: &Node) -> Option<Node> {
    let is_self = |part: &Node| *part == Node::Rule(rule);
    let (mut again, mut last) = (Vec::new(), Vec::new());
    let options = match body {
        Node::Repeat { node, min: 0, max: Some(1) } => {
            last.push(Node::Sequence(Vec::new()));
            node
        }
        body => body,
    };
    let options = match options {
        Node::Choice(options) => options,
        option => std::slice::from_ref(option),
    };
    for option in options {
        match option {
            Node::Sequence(parts) if parts.last().is_some_and(is_self) => {
                again.push(Node::Sequence(parts[..parts.len() - 1].to_vec()));
            }
            other => last.push(other.clone()),
        }
    }
    if again.is_empty() || last.is_empty() || again.iter().chain(&last).any(|part| part.has(&is_self)) {
        return None;
    }
    let again = Node::Repeat { node: Box::new(Node::Choice(again)), min: 0, max: None };
    Some(Node::Sequence(vec![again, Node::Choice(last)]))
}
