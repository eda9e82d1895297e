//! One turn of a conversation, for every frontend: a request becomes a plan, and the model's text becomes an
//! answer.
//!
//! `plan` turns a [`TurnRequest`] and its input into prompt tokens, a grammar and parser settings. `answer`
//! turns the text that the engine streams into [`Delta`]s and one [`Answer`]. `session_chat` keeps a
//! conversation's turns and saves them. `images` gives the images of a prompt their rows.
//!
//! Invariants: no frontend compiles an answer's grammar or parses a model's text; [`Answer::to_message`] is
//! the only way from an answer into a session and into the next prompt; a tool call gets its id once, when it
//! is parsed.

pub mod answer;
pub mod constraint;
mod content_tokens;
mod images;
pub mod plan;
pub mod session_chat;
mod tool_grammar;

use std::collections::BTreeMap;

use serde_json::Value;

use super::grammar::GrammarSource;
use super::request::Limits;
use llmctl_base::error::Error;
use llmctl_base::{GivenSampling, Sampling};
use llmctl_image::ImageSet;
use llmctl_models::adapters::AdapterUse;
use llmctl_template::{Conversation, ImageRef, OutputMarkup, ToolChoice};

pub use super::infill::InfillPrompt;
pub use answer::{Answer, AnswerStream, AnsweredCall, Delta, ParserConfig};
pub use constraint::OutputConstraint;
pub use images::{images_at, saved_images};
pub use plan::{Planner, TurnPlan};
pub use session_chat::{Finished, PlannedTurn, PromptedTurn, SessionChat, num_repeated};

/// Request for an answer. The input is separate, because one request may have several.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TurnRequest {
    /// Beginning of the answer, before the first generated token.
    pub answer_start: AnswerStart,
    pub tools: ToolUse,
    /// Constraint on the answer.
    pub constraint: Option<OutputConstraint>,
    /// The reader sees the deltas.
    pub is_streamed: bool,
    /// Tokens of reasoning after which the engine ends it, if the model's markup has an end that a model continues behind.
    pub reasoning_budget: Option<usize>,
    /// As given; [`Self::sampling`] is in force.
    pub sampling: GivenSampling,
    pub limits: Limits,
    pub logprobs: Option<usize>,
    /// Log-probabilities of the prompt's tokens, with this many alternatives each.
    pub prompt_logprobs: Option<usize>,
    /// Text that the answer may consist of: a source of drafts, which changes no answer.
    pub prediction: String,
    /// Files of the images that the input names; those of earlier turns may be the session's.
    pub images: ImageSet,
    /// LoRA adapters; `None` for those that the model was loaded with.
    pub adapters: Option<Vec<AdapterUse>>,
}

impl TurnRequest {
    /// Returns the sampling in force. An answer that is held to a form has no room for variety: it is no free text.
    pub fn sampling(&self) -> Sampling {
        let must_call = matches!(self.tools.choice, ToolChoice::Required | ToolChoice::Named(_));
        self.sampling.sampling(self.constraint.is_none() && !(must_call && self.tools.is_on()))
    }
}

/// The input of a turn.
#[derive(Debug, Clone, PartialEq)]
pub enum TurnInput {
    /// Messages to answer, and the tools and variables that the template sees.
    Chat(Conversation),
    /// Text to continue, without the chat template.
    Text(TextPrompt),
}

/// A prompt without a chat template.
#[derive(Debug, Clone, PartialEq)]
pub enum TextPrompt {
    /// A text, which is encoded.
    Text(String),
    /// A text with an image in place of each `<__media__>`; without such a mark the images come first.
    WithImages { text: String, images: Vec<ImageRef> },
    /// Token ids, each time with the text after them.
    Ids(Vec<(Vec<u32>, String)>),
    /// Asks for the text between two others, of a model that was trained for it.
    Infill(InfillPrompt),
}

impl TextPrompt {
    pub fn is_infill(&self) -> bool {
        matches!(self, Self::Infill(_))
    }
}

/// Given beginning of an answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum AnswerStart {
    #[default]
    Nothing,
    /// Text, tokenized together with the prompt.
    Text(String),
    /// Generated tokens of the answer that is continued.
    Tokens(Vec<u32>),
    /// The answer to continue, as a client gives it; put into the model's markup.
    Message { reasoning: String, content: String },
}

impl AnswerStart {
    /// Returns the text behind a prompt that ends with `prompt_tail`; empty for generated tokens.
    ///
    /// # Errors
    /// `continue_final_message` if answers are messages whose headers are not known.
    pub fn in_markup(&self, markup: OutputMarkup, prompt_tail: &str) -> Result<String, TurnError> {
        match self {
            Self::Nothing | Self::Tokens(_) => Ok(String::new()),
            Self::Text(text) => Ok(text.clone()),
            Self::Message { reasoning, content } => {
                markup.begun(prompt_tail, reasoning, content).ok_or(TurnError::Unsupported {
                    param: "continue_final_message",
                    message: "continue_final_message: this model's answers are messages with unknown headers",
                })
            }
        }
    }
}

/// The tools of a request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolUse {
    /// In OpenAI's form.
    pub definitions: Vec<Value>,
    pub choice: ToolChoice,
    /// Allows more than one call in an answer.
    pub is_parallel: bool,
    /// Arguments may have members that their schema does not name, unless the schema forbids them.
    pub schema_open: bool,
    /// Grammars of the argument `input`, by the tool's name.
    pub inputs: BTreeMap<String, GrammarSource>,
}

impl ToolUse {
    /// Returns whether the answer may call any.
    pub fn is_on(&self) -> bool {
        !self.definitions.is_empty() && self.choice != ToolChoice::None
    }

    /// Returns the tools that the answer may call. The prompt shows all definitions, whatever the choice, so that it begins as those
    /// of other requests do.
    pub fn offered(&self) -> &[Value] {
        if self.is_on() { &self.definitions } else { &[] }
    }
}

/// Why a turn cannot be planned.
#[derive(Debug, thiserror::Error)]
pub enum TurnError {
    /// The request asks for something that this model's format does not allow.
    #[error("{message}")]
    Unsupported { param: &'static str, message: &'static str },
    /// An error of one parameter.
    #[error("{error}")]
    Param { param: &'static str, error: Error },
    #[error(transparent)]
    Other(#[from] Error),
}
