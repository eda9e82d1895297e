//! Text <-> conversation, both ways. Imports nothing from the rest of the crate.
//!
//! `message` is the vocabulary, `jinja` renders a conversation with a model's own chat template, `prompt` fills the
//! variables of prompt files. Both run on minijinja with `python` (values and operations), `link` (puts them in place
//! of minijinja's) and `source` (checks and rewrites what is parsed). `clock` is the time that templates may print.
//! `probe` finds out what a template shows, `accommodate` and `arrange` fit conversations to what it does not, `images` their images. `output_markup` names the markup
//! of answers, `output` parses them, `begun` writes their beginning, `tool_grammar` writes grammars for them, `check` judges a template.

mod accommodate;
mod arrange;
mod begun;
pub mod check;
mod clock;
mod environment;
mod error;
mod images;
mod jinja;
mod link;
mod marked;
pub mod message;
mod named;
mod output;
mod output_markup;
mod piece;
mod probe;
mod prompt;
mod python;
mod reasoning;
mod reasoning_switch;
mod source;
mod tool_call;
mod tool_grammar;
mod variables;

pub use accommodate::Accommodation;
pub use arrange::CallIds;
pub use clock::DateTime;
pub use error::TemplateError;
pub use images::{ImageForm, ImageMarkup, leave_out_images};
pub use jinja::{ChatTemplate, RenderOptions, SpecialTokens};
pub use message::{Content, Conversation, ImageRef, Message, Role, ToolCall, text_part};
pub use named::UnknownFormat;
pub use output::{OutputParser, ParsedAnswer, ParsedCall, parse_answer};
pub use output_markup::{OutputMarkup, ToolChoice};
pub use piece::Piece;
pub use probe::{CallEvidence, PrintedTurn, Shown, Sign, SystemMessages};
pub use prompt::{PromptTemplate, RenderedPrompt, render_prompt};
pub use reasoning::ReasoningFormat;
pub use reasoning_switch::{Effort, Reasoning, THINKING_SWITCHES, TemplateVariables, Unexpressed};
pub use tool_call::{COUNT_KEYWORDS, TAGGED_TEXT, TEXT_GRAMMAR, ToolCallFormat, has_word, resolve_reference};
