//! The text side of a loaded model: conversations to text with its chat template, text to token ids, ids to bytes.
//!
//! Immutable and shared by everything that speaks to the model. The time that templates may print is handed in with each
//! rendering: whoever keeps a conversation decides how long its date stands, because a date that moves makes every prompt
//! a new one. Knows no weights, no session and no engine.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value};

use super::error::Result;
use super::hints::{Frontend, Hints};
use super::infill::Infill;
use super::load::ModelTexts;
use super::text::Tokenizer;
use crate::template::{
    Accommodation, ChatTemplate, Conversation, DateTime, Message, OutputMarkup, ReasoningFormat,
    RenderOptions, Shown, SpecialTokens, SystemMessages, THINKING_SWITCHES, TemplateError, ToolCallFormat,
};

/// For templates that show no tools or no calls.
const GENERIC: ToolCallFormat = ToolCallFormat::Generic;

/// A model without its weights.
pub struct ChatTokenizer {
    texts: ModelTexts,
    /// The template in force; `Err` is why the source does not compile, said when it is needed.
    template: std::result::Result<ChatTemplate, TemplateError>,
    /// The parts of a conversation that the template shows.
    shown: Shown,
    /// The markup of answers.
    output_markup: OutputMarkup,
    /// Changes to conversations, so that the template shows all of them.
    accommodation: Accommodation,
    /// Hints that prompts of the model's own template get besides the conversation.
    hints: Option<Hints>,
    /// The frontend that those prompts are written for.
    frontend: Frontend,
    /// Of the engine that prompts go to, once it is known.
    context_tokens: OnceLock<usize>,
}

/// Special tokens that templates print.
pub fn special_tokens(tokenizer: &Tokenizer) -> SpecialTokens {
    let token = |id: Option<u32>| id.and_then(|id| tokenizer.id_to_token(id)).map(str::to_owned);
    SpecialTokens { bos: token(tokenizer.bos()), eos: token(tokenizer.eos()), ..SpecialTokens::default() }
}

impl ChatTokenizer {
    /// `template` is used in place of the model's own.
    pub fn new(texts: ModelTexts, template: Option<&str>) -> Self {
        let specials = special_tokens(&texts.tokenizer);
        let hints = texts.hints.filter(|_| template.is_none());
        let source = template.or(texts.chat_templates.default.as_deref());
        let template =
            source.map_or(Err(TemplateError::Missing), |source| ChatTemplate::new(source, specials));
        let shown = template.as_ref().map(Shown::of);
        let accommodation = shown.as_ref().map(Shown::accommodation).unwrap_or_default();
        let shown = shown.unwrap_or_default();
        let tool_calls =
            if accommodation.spells_tools { Some(GENERIC) } else { shown.output_markup.tool_calls };
        let output_markup = OutputMarkup { tool_calls, ..shown.output_markup };
        let (frontend, context_tokens) = (Frontend::default(), OnceLock::new());
        Self { texts, template, shown, output_markup, accommodation, hints, frontend, context_tokens }
    }

    /// Prompts are for a context of so many tokens from now on: one far beyond it is refused before it is tokenised whole. What is
    /// said first stays.
    pub fn set_context_tokens(&self, context_tokens: usize) {
        let _ = self.context_tokens.set(context_tokens); // there is one engine, or several alike
    }

    /// Takes this for the format of the model's calls, whatever its template shows.
    pub fn set_tool_format(&mut self, format: ToolCallFormat) {
        self.output_markup.tool_calls = Some(format);
        self.accommodation.spells_tools = format == GENERIC || !self.shown.tools;
    }

    /// Sets the format of the model's reasoning, whatever its template shows.
    pub fn set_reasoning_format(&mut self, format: ReasoningFormat) {
        self.output_markup.reasoning = Some(format);
    }

    /// Whether the model is told of the tools of a conversation, and in a format that its calls are read in.
    pub fn shows_tools(&self) -> bool {
        let is_generic = matches!(self.output_markup.tool_calls, Some(GENERIC | ToolCallFormat::Hermes));
        self.output_markup.tool_calls.is_some() && (!self.accommodation.spells_tools || is_generic)
    }

    /// Whether tools are described by llmctl, and calls asked for in its generic format.
    pub fn spells_tools(&self) -> bool {
        self.accommodation.spells_tools && self.has_template()
    }

    /// Describes to people how conversations with tools are changed; `None` if the template shows all of them.
    pub fn notice_of_tools(&self) -> Option<&'static str> {
        let why = match (self.shown.tools, self.shown.output_markup.tool_calls) {
            _ if !self.spells_tools() => return None,
            (false, _) => {
                "the chat template shows no tools: they are described in the system prompt, and calls asked for in a generic JSON format"
            }
            (true, _) => {
                "the chat template shows no format of calls that is known: tools are described in the system prompt, and calls asked for in a generic JSON format"
            }
        };
        Some(why)
    }

    /// Describes to people how system prompts are changed; `None` if the template prints them.
    pub fn notice_of_system(&self) -> Option<&'static str> {
        match self.shown.system {
            SystemMessages::Printed => None,
            SystemMessages::Dropped => {
                Some("the chat template drops system prompts: they go in front of the first question")
            }
            SystemMessages::Refused => {
                Some("the chat template refuses system prompts: they go in front of the first question")
            }
        }
    }

    /// Describes to people what this conversation's prompt changes; `None` if the template gets it as it is. The tools have a
    /// notice of their own.
    pub fn notice_of_moved_system(&self, messages: &[Message]) -> Option<String> {
        let num_moved = self.accommodation.num_moved_system(messages);
        let (what, verb) = if num_moved == 1 { ("message", "is") } else { ("messages", "are") };
        let takes = if self.accommodation.merges_system { "none" } else { "one at the start only" };
        (num_moved > 0).then(|| {
            format!("{num_moved} system {what} {verb} put into the user turn beside: the chat template takes {takes}")
        })
    }

    /// Says where the conversations come from: the built-in model's prompts depend on it, no other's do.
    pub fn set_frontend(&mut self, frontend: Frontend) {
        self.frontend = frontend;
    }

    pub fn texts(&self) -> &ModelTexts {
        &self.texts
    }

    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.texts.tokenizer
    }

    /// The markup of the model's answers: what its chat template shows, and the generic format of calls where that shows none;
    /// nothing without a template.
    pub fn output_markup(&self) -> OutputMarkup {
        self.output_markup
    }

    /// The id of a special token by its text.
    pub fn special(&self, text: &str) -> Option<u32> {
        self.tokenizer().token_to_id(text).filter(|&id| self.tokenizer().is_special(id))
    }

    /// The tokens that ask for the text between two others; `None` if the model was not trained for it.
    pub fn infill(&self) -> Option<Infill> {
        Infill::detect(|text| self.tokenizer().token_to_id(text))
    }

    /// Returns the ids of an answer's markers that are special tokens: parsers of answers must see them as text.
    pub fn markup(&self, output_markup: &OutputMarkup) -> Arc<[u32]> {
        output_markup.markers().into_iter().filter_map(|mark| self.special(mark)).collect()
    }

    /// Whether there is a chat template, be it one that does not compile.
    pub fn has_template(&self) -> bool {
        !matches!(self.template, Err(TemplateError::Missing))
    }

    /// The chat template in force as it is written, when there is one that compiles.
    pub fn template_source(&self) -> Option<&str> {
        self.template.as_ref().ok().map(ChatTemplate::source)
    }

    /// Whether the chat template in force tells messages of this role apart; `None` without one.
    pub fn template_knows_role(&self, role: &str) -> Option<bool> {
        self.template.as_ref().ok().map(|template| template.has_literal(role))
    }

    /// Whether the chat template in force reads a variable of this name.
    pub fn template_reads(&self, variable: &str) -> bool {
        self.template.as_ref().is_ok_and(|template| template.reads(variable))
    }

    /// Returns the template variables that switch reasoning on or off; empty if the template reads none.
    pub fn thinking_variables(&self, is_on: bool) -> Map<String, Value> {
        let switches = THINKING_SWITCHES.into_iter().filter(|switch| self.template_reads(switch));
        switches.map(|switch| (switch.to_owned(), is_on.into())).collect()
    }

    /// The conversation as text that ends with the header of the answer.
    ///
    /// # Errors
    /// [`TemplateError::Missing`] without a template; the template's refusal or breakage.
    pub fn render(
        &self,
        conversation: &Conversation,
        now: DateTime,
    ) -> std::result::Result<String, TemplateError> {
        let template = self.template.as_ref().map_err(TemplateError::clone)?;
        let options = RenderOptions { add_generation_prompt: true, now, ..RenderOptions::default() };
        let annotated = self.hints.map(|hints| hints.annotate(conversation, self.frontend));
        let conversation = annotated.as_ref().unwrap_or(conversation);
        template.render(&self.accommodation.apply(conversation), &options)
    }

    /// Ids of a rendered prompt, special tokens recognised, with the beginning-of-sequence token the model wants, once.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode_chat_for`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.texts.tokenizer.encode_chat_for(text, self.context_tokens.get().copied())
    }

    /// Ids of text that follows other ids of the same prompt.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode_chat_rest_for`].
    pub fn encode_rest(&self, text: &str) -> Result<Vec<u32>> {
        self.texts.tokenizer.encode_chat_rest_for(text, self.context_tokens.get().copied())
    }

    /// The bytes a token stands for; they need not be whole characters. None for ids without a token.
    pub fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        self.texts.tokenizer.token_bytes(id).unwrap_or_default()
    }
}
