//! The response object of an answer, for the client and for the session.

use std::fmt;
use std::sync::Arc;

use serde_json::{Value, json};

use super::super::generate::{FinishedChoice, TurnNote};
use super::super::reply::{self, Head};
use crate::wire::responses::object::ResponseShape;
use llmctl_engine::Token;
use llmctl_engine::turn::Answer;

/// Writes the objects of one response. Clones write the same ones.
#[derive(Clone)]
pub struct ResponseWriter {
    pub shape: Arc<ResponseShape>,
    pub has_logprobs: bool,
    head: Head,
}

impl ResponseWriter {
    pub fn new(head: Head, shape: ResponseShape, has_logprobs: bool) -> Self {
        Self { shape: Arc::new(shape), has_logprobs, head }
    }

    /// Returns the log-probabilities of a message's tokens, if the request asks for them.
    pub fn logprobs(&self, tokens: &[Token]) -> Value {
        match self.has_logprobs {
            true => self.head.chat_logprobs(tokens)["content"].take(),
            false => json!([]),
        }
    }

    /// Adds the timings and the session, as in every answer of this server.
    pub fn with_report(mut object: Value, finished: &FinishedChoice) -> Value {
        object["timings"] = reply::choice_timings(&finished.answer);
        if let Some((name, placed)) = finished.placed.as_ref().map(reply::placed) {
            object[name] = placed;
        }
        object
    }

    pub fn whole(&self, answer: &Answer) -> Value {
        self.shape.whole(answer, &self.logprobs(&answer.content_tokens))
    }
}

/// The session keeps the object beside the turn.
impl TurnNote for ResponseWriter {
    fn note(&self, answer: &Answer) -> Value {
        json!({"response": self.whole(answer)})
    }
}

impl fmt::Debug for ResponseWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseWriter").field("shape", &self.shape).finish_non_exhaustive()
    }
}
