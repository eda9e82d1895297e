//! What is asked of the model and what it answers, in no vendor's words: the seam between the wire formats and the engine.
//!
//! A wire format reads an [`Ask`] out of a body, hands it to [`drive::begin`](super::drive::begin) and writes the
//! [`Update`]s of its [`Running`] answer. Chat and completions are two of them; another is a file beside theirs.

use std::time::Duration;

use serde_json::Value;
use tokio::sync::mpsc::UnboundedReceiver;

use super::conversations::Placed;
use super::transient::TransientKey;
use crate::runtime::session::store::SessionName;
use crate::runtime::{Finish, Limits, Logprob, Outcome, Reuse, Sampling, Timings, Token, Usage};
use crate::serve::error::ApiError;
use crate::serve::owner::Caller;
use crate::serve::preparing::bytes_of;
pub use crate::serve::wire::shape::Shape;
use crate::template::{Content, Conversation, Message, Role, ToolCall, ToolChoice};

/// One request of any wire format.
#[derive(Debug, Clone)]
pub struct Ask {
    pub prompt: Prompt,
    /// Answers to each prompt.
    pub num_choices: usize,
    /// Answers to one prompt draw from `seed`, `seed + 1` and so on.
    pub sampling: Sampling,
    pub limits: Limits,
    pub logprobs: Option<usize>,
    /// Those of the prompt's tokens too, each with so many alternatives.
    pub prompt_logprobs: Option<usize>,
    /// The conversation that this is a turn of.
    pub session: Option<Session>,
    /// What the answer keeps to; not beside tools.
    pub shape: Option<Shape>,
    pub tools: ToolUse,
    /// The reader gets the answer as it comes.
    pub is_streamed: bool,
    /// The `x-request-id` in force.
    pub request_id: String,
}

/// The tools of a request.
#[derive(Debug, Clone, Default)]
pub struct ToolUse {
    /// In OpenAI's form.
    pub definitions: Vec<Value>,
    pub choice: ToolChoice,
    /// More than one call in an answer.
    pub parallel: bool,
    /// Arguments may have members that their schema does not name, unless it forbids them.
    pub schema_open: bool,
}

impl ToolUse {
    /// Whether the answer may call any.
    pub fn is_on(&self) -> bool {
        !self.definitions.is_empty() && self.choice != ToolChoice::None
    }

    /// Those whose calls are looked for.
    pub fn heard(&self) -> &[Value] {
        if self.is_on() { &self.definitions } else { &[] }
    }
}

/// What is to be answered or gone on with.
#[derive(Debug, Clone)]
pub enum Prompt {
    Chat(Conversation),
    /// Texts that are gone on with as they are, each on its own.
    Texts(Vec<RawText>),
}

impl Prompt {
    /// How much text is to become tokens, about.
    pub fn num_bytes(&self) -> usize {
        match self {
            Prompt::Chat(conversation) => bytes_of(conversation),
            Prompt::Texts(texts) => texts.iter().map(RawText::num_bytes).sum(),
        }
    }
}

impl RawText {
    fn num_bytes(&self) -> usize {
        match self {
            RawText::Text(text) => text.len(),
            RawText::Ids(ids) => ids.len(),
            RawText::Between { prefix, suffix } => prefix.len() + suffix.len(),
        }
    }
}

/// A text that no template touches.
#[derive(Debug, Clone, PartialEq)]
pub enum RawText {
    Text(String),
    Ids(Vec<u32>),
    /// What stands between the two is asked for, of a model that has learnt that.
    Between {
        prefix: String,
        suffix: String,
    },
}

/// Which conversation a request belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Session {
    Stored(InSession),
    /// A client's hint: it costs the request nothing.
    Transient(TransientKey),
}

/// The part of a saved conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InSession {
    pub caller: Caller,
    pub name: SessionName,
    /// The messages are new ones behind those that are saved, instead of the whole conversation.
    pub appends: bool,
}

/// An answer on its way. Dropping it cancels the request; what a session has heard by then is kept.
#[derive(Debug)]
pub struct Running {
    pub prompts: Vec<Sent>,
    /// Where the turn goes; nothing yet for one that waits for its session.
    pub placed: Option<Placed>,
    pub updates: UnboundedReceiver<Update>,
}

/// A prompt as the engine got it.
#[derive(Debug, Clone, Default)]
pub struct Sent {
    /// Where the ask was for texts.
    pub text: String,
    pub tokens: Vec<u32>,
}

impl Running {
    /// Of all prompts.
    pub fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.tokens.len()).sum()
    }
}

/// News of an answer. `Ended` or `Failed` is last.
#[derive(Debug)]
pub enum Update {
    Progress(Progress),
    /// More of one choice. The tokens are those since the last update; they may have no delta yet.
    Said {
        choice: usize,
        deltas: Vec<Delta>,
        tokens: Vec<Token>,
    },
    /// Log-probabilities of the next tokens of a choice's prompt, beginning with the second.
    Scored {
        choice: usize,
        logprobs: Vec<Logprob>,
    },
    /// One choice is complete, and saved where it belongs to a session.
    Finished {
        choice: usize,
        answer: Answered,
    },
    /// What was said before does not count: the engine was lost, and another begins again. Not in a stream, whose reader has
    /// seen it.
    Again,
    /// All choices are complete.
    Ended(Totals),
    Failed(ApiError),
}

/// Where a request is before its first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Its session has another request in it.
    Session,
    /// In the queue, from 1.
    Waiting { position: usize },
    /// Prompt tokens that are computed or were there, and how long the rest will take, once that can be told.
    Prompt { done: usize, total: usize, left: Option<Duration> },
}

/// A part of an answer, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Delta {
    Content(String),
    Reasoning(String),
    /// A tool call begins.
    Call {
        index: usize,
        id: String,
        name: String,
    },
    /// The fragments of one call are together JSON text.
    Arguments {
        index: usize,
        fragment: String,
    },
    /// A tool call is complete.
    CallEnd {
        index: usize,
    },
}

/// All that was said.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Said {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<SaidCall>,
    /// Tokens of the reasoning, its markup included.
    pub num_reasoning_tokens: usize,
}

#[derive(Debug, Clone, PartialEq)]
pub struct SaidCall {
    pub id: String,
    pub name: String,
    /// JSON text of an object, unless the answer was cut within.
    pub arguments: String,
    pub is_whole: bool,
}

/// A complete choice.
#[derive(Debug, Clone)]
pub struct Answered {
    pub said: Said,
    pub outcome: Outcome,
    /// How its prompt began.
    pub reuse: Reuse,
    /// Where the turn is kept, if it is.
    pub placed: Option<Placed>,
}

/// Counts and times of all choices together.
#[derive(Debug, Clone, Default)]
pub struct Totals {
    /// A prompt counts once, however many answers it has.
    pub usage: Usage,
    pub num_reasoning_tokens: usize,
    pub timings: Timings,
    /// Of the first choice: the others find what it has left.
    pub reuse: Reuse,
}

impl Said {
    pub fn add(&mut self, delta: &Delta) {
        match delta {
            Delta::Content(text) => self.content.push_str(text),
            Delta::Reasoning(text) => self.reasoning.push_str(text),
            Delta::Call { id, name, .. } => {
                let (id, name) = (id.clone(), name.clone());
                self.calls.push(SaidCall { id, name, arguments: String::new(), is_whole: false });
            }
            Delta::Arguments { index, fragment } => {
                if let Some(call) = self.calls.get_mut(*index) {
                    call.arguments.push_str(fragment);
                }
            }
            Delta::CallEnd { index } => {
                if let Some(call) = self.calls.get_mut(*index) {
                    call.is_whole = true;
                }
            }
        }
    }

    /// The message as a conversation keeps it: a call that was cut short is not shown to the model again.
    pub fn to_message(&self) -> Message {
        let call = |call: &SaidCall| ToolCall {
            id: Some(call.id.clone()),
            name: call.name.clone(),
            arguments: serde_json::from_str(&call.arguments)
                .unwrap_or_else(|_| call.arguments.as_str().into()),
        };
        let whole = || self.calls.iter().filter(|call| call.is_whole);
        let is_call_only = self.content.is_empty() && whole().next().is_some();
        Message {
            content: (!is_call_only).then(|| Content::Text(self.content.clone())),
            reasoning: (!self.reasoning.is_empty()).then(|| self.reasoning.clone()),
            tool_calls: whole().map(call).collect(),
            ..Message::new(Role::Assistant, "")
        }
    }

    /// Whether there are calls, none of them cut short.
    fn has_whole_calls(&self) -> bool {
        !self.calls.is_empty() && self.calls.iter().all(|call| call.is_whole)
    }
}

impl Answered {
    /// OpenAI's word for why it ended: tool calls that are whole come first, then what the engine says.
    pub fn finish_reason(&self) -> &'static str {
        match &self.outcome.finish {
            Finish::Cancelled => "length", // OpenAI has no word for it, and this one says that the answer is cut
            _ if self.said.has_whole_calls() => "tool_calls",
            finish => finish.reason(),
        }
    }
}

impl Totals {
    /// Adds a choice; `is_first` of its prompt.
    pub fn add(&mut self, answer: &Answered, is_first: bool) {
        let Outcome { usage, timings, .. } = &answer.outcome;
        if is_first {
            if self.usage.prompt_tokens == 0 {
                self.reuse = answer.reuse;
            }
            self.usage.prompt_tokens += usage.prompt_tokens;
            self.usage.cached_tokens += usage.cached_tokens;
        }
        self.usage.completion_tokens += usage.completion_tokens;
        self.num_reasoning_tokens += answer.said.num_reasoning_tokens;
        let all = &mut self.timings;
        all.queue = all.queue.max(timings.queue);
        all.prefill = all.prefill.max(timings.prefill);
        all.decode = all.decode.max(timings.decode);
        all.total = all.total.max(timings.total);
        all.time_to_first_token = match (all.time_to_first_token, timings.time_to_first_token) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
}
