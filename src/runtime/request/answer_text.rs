//! The text of an answer while its tokens come.
//!
//! Invariant: text that may belong to an unfinished character or to a stop string is held back until it is known, or until
//! [`AnswerText::flush`].

use std::collections::VecDeque;

use super::{Finish, ReasoningWatch, Request};
use crate::repetition::Repetition;
use llmctl_models::text::{StopMatcher, Utf8Stream, Vocabulary};

/// The text of an answer, with what in it ends the answer or its reasoning.
#[derive(Debug)]
pub struct AnswerText {
    utf8: Utf8Stream,
    stop: StopMatcher,
    /// Set if the request limits the reasoning.
    reasoning: Option<ReasoningWatch>,
    /// Follows the answer behind the reasoning, if it must not repeat itself.
    repetition: Option<Repetition>,
    /// Tokens that end the reasoning and come next, in the model's place.
    pub closing: VecDeque<u32>,
    /// Length of the text of all tokens so far, with what is held back.
    num_bytes: usize,
}

impl AnswerText {
    pub fn new(request: &Request, reasoning: Option<ReasoningWatch>) -> Self {
        Self {
            utf8: Utf8Stream::new(),
            stop: StopMatcher::new(request.limits.stop.iter().cloned()),
            reasoning,
            repetition: request.limits.loop_guard.answer.map(Repetition::new),
            closing: VecDeque::new(),
            num_bytes: 0,
        }
    }

    /// Takes the next token; returns the text that can be delivered.
    pub fn push(&mut self, id: u32, request: &Request, vocabulary: &dyn Vocabulary) -> String {
        let is_hidden = vocabulary.is_special(id) && !request.render_special && !request.markup.contains(&id);
        let bytes = if is_hidden { None } else { vocabulary.token_bytes(id) };
        let complete = self.utf8.push(&bytes.unwrap_or_default());
        if let Some(closing) = self.reasoning.as_mut().and_then(|watch| watch.push(id, &complete)) {
            self.closing = closing.iter().copied().collect();
        }
        self.num_bytes += complete.len();
        self.stop.push(&complete)
    }

    /// Returns the text held back.
    pub fn flush(&mut self) -> String {
        let unfinished = self.utf8.finish();
        self.stop.push(&unfinished) + &self.stop.finish()
    }

    /// Returns where the text of the tokens so far ends, in bytes; one more if its last character is unfinished.
    pub fn end(&self) -> usize {
        self.num_bytes + usize::from(self.utf8.is_pending())
    }

    /// Returns the end of the answer if its text has a stop string.
    pub fn stopped(&self) -> Option<Finish> {
        self.stop.hit().map(|stop| Finish::StopString(stop.to_owned()))
    }

    /// Follows the answer behind the reasoning. Returns whether it has repeated itself.
    pub fn has_looped(&mut self, id: u32) -> bool {
        let is_answer = self.reasoning.as_ref().is_none_or(|watch| !watch.is_inside());
        self.repetition.as_mut().filter(|_| is_answer).is_some_and(|repetition| repetition.push(id))
    }

    /// Returns whether reasoning was ended that repeated itself.
    pub fn looped_reasoning(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningWatch::has_looped)
    }
}
