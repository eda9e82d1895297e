//! The limit on an answer's reasoning, and following an answer to know when it is reached.
//!
//! Invariant: only the tokens of the answer decide, one by one, so that the end comes at the same token
//! whatever else the engine computes.

use serde::{Deserialize, Serialize};

use crate::repetition::Repetition;

/// Ends reasoning that has used up its tokens or repeats itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReasoningLimit {
    /// Tokens of reasoning, at least 1, after which it is ended; `None` ends it only if it repeats itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
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
    repetition: Option<Repetition>,
    has_looped: bool,
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
    /// `loop_tokens` is the threshold of the [`LoopGuard`](super::LoopGuard).
    pub fn new(limit: ReasoningLimit, loop_tokens: Option<usize>) -> Self {
        let state = match &limit.open {
            Some(_) => State::Before(String::new()),
            None => State::Inside { num_tokens: 0, tail: String::new() },
        };
        Self { limit, state, repetition: loop_tokens.map(Repetition::new), has_looped: false }
    }

    pub fn is_inside(&self) -> bool {
        matches!(self.state, State::Inside { .. })
    }

    /// Returns whether reasoning was ended that repeated itself.
    pub fn has_looped(&self) -> bool {
        self.has_looped
    }

    /// Takes one more token and its text, empty while a character is incomplete. Returns the tokens that must come next if the
    /// limit is reached.
    pub fn push(&mut self, id: u32, text: &str) -> Option<&[u32]> {
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
        self.check(id)
    }

    fn check(&mut self, id: u32) -> Option<&[u32]> {
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
        let is_used_up = self.limit.max_tokens.is_some_and(|most| *num_tokens >= most);
        self.has_looped = self.repetition.as_mut().is_some_and(|repetition| repetition.push(id));
        if !is_used_up && !self.has_looped {
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
            max_tokens: Some(3),
            open: open.map(str::to_owned),
            close: "</think>".to_owned(),
            closing: vec![7],
        };
        let mut watch = ReasoningWatch::new(limit, None);
        let ended: Vec<usize> = (0..texts.len()).filter(|&at| watch.push(0, texts[at]).is_some()).collect();
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

    #[test]
    fn reasoning_that_repeats_itself_is_ended_and_an_answer_is_not() {
        let limit = ReasoningLimit { close: "</think>".to_owned(), closing: vec![7], ..Default::default() };
        let mut watch = ReasoningWatch::new(limit.clone(), Some(16));
        let ended = (0..99).position(|n| watch.push(n % 3, "x").is_some());
        assert_eq!((ended, watch.has_looped(), watch.is_inside()), (Some(15), true, false));
        let mut watch = ReasoningWatch::new(limit, Some(16));
        assert_eq!(watch.push(1, "</think>"), None);
        assert!((0..99).all(|_| watch.push(2, "x").is_none()) && !watch.has_looped());
    }
}
