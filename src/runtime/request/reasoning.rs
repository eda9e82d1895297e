//! The limit on an answer's reasoning, and following an answer's text to know when it is reached.
//!
//! Invariant: only the text of the answer decides, token by token, so that the end comes at the same token
//! whatever else the engine computes.

use serde::{Deserialize, Serialize};

/// Ends reasoning that has used up its tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReasoningLimit {
    /// Tokens of reasoning, at least 1, after which it is ended.
    pub max_tokens: usize,
    /// Text that opens reasoning at the start of an answer; `None` if the prompt has opened it.
    pub open: Option<String>,
    /// Text that closes it.
    pub close: String,
    /// Tokens that are generated in the model's place when the limit is reached.
    pub closing: Vec<u32>,
}

/// Follows one answer.
#[derive(Debug)]
pub struct ReasoningWatch {
    limit: ReasoningLimit,
    state: State,
}

#[derive(Debug)]
enum State {
    /// The text so far, which may begin the reasoning.
    Before(String),
    /// `tail` is the end of the text, in which the closing text may have begun.
    Inside { num_tokens: usize, tail: String },
    /// The answer continues without reasoning.
    Over,
}

impl ReasoningWatch {
    pub fn new(limit: ReasoningLimit) -> Self {
        let state = match &limit.open {
            Some(_) => State::Before(String::new()),
            None => State::Inside { num_tokens: 0, tail: String::new() },
        };
        Self { limit, state }
    }

    /// Takes the text of one more token, empty while a character is incomplete. Returns the tokens that must come next if the
    /// limit is reached.
    pub fn push(&mut self, text: &str) -> Option<&[u32]> {
        match &mut self.state {
            State::Over => return None,
            State::Before(seen) => {
                seen.push_str(text);
                let (seen, open) = (seen.trim_start(), self.limit.open.as_deref().unwrap_or_default());
                match seen.strip_prefix(open) {
                    Some(rest) => {
                        let num_tokens = usize::from(!rest.is_empty());
                        self.state = State::Inside { num_tokens, tail: rest.to_owned() };
                    }
                    None if open.starts_with(seen) => return None,
                    None => self.state = State::Over,
                }
            }
            State::Inside { num_tokens, tail } => {
                *num_tokens += 1;
                tail.push_str(text);
            }
        }
        self.check()
    }

    fn check(&mut self) -> Option<&[u32]> {
        let State::Inside { num_tokens, tail } = &mut self.state else { return None };
        if tail.contains(&self.limit.close) {
            self.state = State::Over;
            return None;
        }
        let mut cut = tail.len().saturating_sub(self.limit.close.len());
        while !tail.is_char_boundary(cut) {
            cut -= 1;
        }
        tail.drain(..cut);
        if *num_tokens < self.limit.max_tokens {
            return None;
        }
        self.state = State::Over;
        Some(&self.limit.closing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the index of the token after which the reasoning is ended.
    fn ended_at(open: Option<&str>, texts: &[&str]) -> Option<usize> {
        let limit = ReasoningLimit {
            max_tokens: 3,
            open: open.map(str::to_owned),
            close: "</think>".to_owned(),
            closing: vec![7],
        };
        let mut watch = ReasoningWatch::new(limit);
        let ended: Vec<usize> = (0..texts.len()).filter(|&at| watch.push(texts[at]).is_some()).collect();
        assert!(ended.len() <= 1, "{ended:?}");
        ended.first().copied()
    }

    #[test]
    fn reasoning_ends_after_its_tokens_unless_it_ended_before() {
        assert_eq!(ended_at(None, &["a", "b", "c", "d"]), Some(2));
        assert_eq!(ended_at(None, &["é", "", "c", "d"]), Some(2), "a part of a character is a token");
        assert_eq!(ended_at(None, &["a", "</thi", "nk>", "c", "d", "e"]), None);
        assert_eq!(ended_at(None, &["a b</think>c", "d", "e", "f"]), None);
        assert_eq!(ended_at(None, &["ééééé", "</", "x"]), Some(2));
    }

    #[test]
    fn tokens_that_open_it_do_not_count_and_an_answer_without_it_has_no_limit() {
        assert_eq!(ended_at(Some("<think>"), &["\n<th", "ink>", "a", "b", "c", "d"]), Some(4));
        assert_eq!(ended_at(Some("<think>"), &["<think>a", "b", "c"]), Some(2));
        assert_eq!(ended_at(Some("<think>"), &["Yes", "<think>", "b", "c", "d", "e"]), None);
        assert_eq!(ended_at(Some("<think>"), &["<th", "ree", "b", "c", "d", "e"]), None);
    }
}
