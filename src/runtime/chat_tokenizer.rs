//! The text side of a loaded model: conversations to text with its chat template, text to token ids, ids to
//! bytes.
//!
//! Immutable and shared. The caller passes the time that templates may print with each rendering: a
//! conversation keeps its date, because a changed date makes every prompt new. Knows no weights, no session
//! and no engine.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value};

use super::images::{PromptVision, invalid};
use super::infill::Infill;
use llmctl_base::error::Result;
use llmctl_base::notice::Notice;
use llmctl_image::ImagePlan;
use llmctl_models::hints::{Frontend, Hints};
use llmctl_models::images::VisionSpec;
use llmctl_models::load::ModelTexts;
use llmctl_models::text::Tokenizer;
use llmctl_template::{
    Accommodation, CallIds, ChatTemplate, Conversation, DateTime, ImageMarkup, ImageRef, Message,
    OutputMarkup, Reasoning, ReasoningFormat, RenderOptions, Role, Shown, SpecialTokens, SystemMessages,
    TemplateError, TemplateVariables, ToolCallFormat,
};

/// For templates that show no tools or no calls.
const GENERIC: ToolCallFormat = ToolCallFormat::Generic;

/// Special tokens that templates put around an image (Qwen, GLM).
const IMAGE_MARKS: [[&str; 2]; 2] =
    [["<|vision_start|>", "<|vision_end|>"], ["<|begin_of_image|>", "<|end_of_image|>"]];

/// A model without its weights.
pub struct ChatTokenizer {
    texts: ModelTexts,
    /// The template in force; `Err` if the source does not compile, which `render` reports.
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
    /// Of that engine, if it has a tower.
    vision: OnceLock<PromptVision>,
    /// Name of the engine's family, for refusals.
    family: OnceLock<String>,
    /// See [`EngineConfig::build`](super::spec::EngineConfig::build).
    build: OnceLock<String>,
}

/// Special tokens that templates print.
pub fn special_tokens(tokenizer: &Tokenizer) -> SpecialTokens {
    let token = |id: Option<u32>| id.and_then(|id| tokenizer.id_to_token(id)).map(str::to_owned);
    SpecialTokens { bos: token(tokenizer.bos()), eos: token(tokenizer.eos()) }
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
        Self {
            texts,
            template,
            shown,
            output_markup,
            accommodation,
            hints,
            frontend: Frontend::default(),
            context_tokens: OnceLock::new(),
            vision: OnceLock::new(),
            family: OnceLock::new(),
            build: OnceLock::new(),
        }
    }

    /// Sets the context, so that `encode` refuses a prompt far beyond it before it tokenises all of it. The first call counts.
    pub fn set_context_tokens(&self, context_tokens: usize) {
        let _ = self.context_tokens.set(context_tokens); // there is one engine, or several alike
    }

    /// Sets what decides the engine's bits beside the files. The first call counts.
    pub fn set_build(&self, build: &str) {
        let _ = self.build.set(build.to_owned()); // there is one engine, or several alike
    }

    /// Returns what decides the engine's bits beside the files; empty if it is not known.
    pub fn build(&self) -> &str {
        self.build.get().map_or("", String::as_str)
    }

    /// Sets the family of the engine and its vision tower, if it has one, so that conversations may have images. The first call counts.
    pub fn set_vision(&self, family: &str, spec: Option<&Arc<VisionSpec>>) {
        let _ = self.family.set(family.to_owned()); // there is one engine, or several alike
        let Some(spec) = spec else { return };
        let (printed, placeholder) = (&spec.text.printed, &spec.text.placeholder);
        let markup = self.template.as_ref().map_or_else(
            |_| ImageMarkup::of_text(printed, placeholder),
            |template| ImageMarkup::of(template, printed, placeholder),
        );
        let around = IMAGE_MARKS.iter().find(|marks| marks.iter().all(|mark| self.special(mark).is_some()));
        let spelt = around.map(|[before, after]| format!("{before}{printed}{after}"));
        let markup = ImageMarkup { spelt: spelt.unwrap_or_else(|| printed.clone()), ..markup };
        let _ = self.vision.set(PromptVision::new(Arc::clone(spec), markup));
    }

    /// Returns the engine's vision tower; `None` if the model reads text alone.
    pub fn vision(&self) -> Option<&PromptVision> {
        self.vision.get()
    }

    fn image_markup(&self) -> Option<&ImageMarkup> {
        self.vision().map(PromptVision::markup)
    }

    /// Returns the images that a rendered conversation has, in its order.
    pub fn images(&self, conversation: &Conversation) -> Vec<ImageRef> {
        match conversation.images().next() {
            None => Vec::new(),
            Some(_) => self.accommodation.placed(conversation, self.image_markup()).images().collect(),
        }
    }

    /// Returns what becomes of images of these sizes.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] naming an image that the model does not take.
    pub fn image_plans(&self, images: &[ImageRef]) -> Result<Vec<ImagePlan>> {
        match (self.vision(), images.first()) {
            (Some(vision), _) => vision.plans(images),
            (None, None) => Ok(Vec::new()),
            (None, Some(image)) => {
                let family = self.family.get().map(|family| format!(" ({family})")).unwrap_or_default();
                Err(invalid(format!("{}: this model reads text alone{family}", image.tag())))
            }
        }
    }

    /// Encodes a rendered conversation, whose images need no files for it.
    ///
    /// # Errors
    /// As [`Self::encode`] and [`Self::image_plans`].
    pub fn encode_chat(&self, rendered: &str, conversation: &Conversation) -> Result<Vec<u32>> {
        let plans = self.image_plans(&self.images(conversation))?;
        self.encode_with_images(rendered, true, &mut plans.iter())
    }

    /// Returns what becomes of images that are left out or moved, those of tool results; `None` if there are none.
    pub fn notice_of_images<'a>(&self, messages: impl Iterator<Item = &'a Message>) -> Option<Notice> {
        let markup = self.image_markup();
        let told = messages.filter(|message| markup.is_none() || message.role == Role::Tool);
        let count = told.flat_map(Message::images).count();
        let stays = self.spells_tools() || markup.is_some_and(|markup| markup.in_tool.is_some());
        let is_shown = markup.is_some();
        (count > 0 && !(is_shown && stays)).then_some(Notice::MovedImages { count, is_shown })
    }

    /// Sets the format of the model's calls, whatever its template shows.
    pub fn set_tool_format(&mut self, format: ToolCallFormat) {
        self.output_markup.tool_calls = Some(format);
        self.accommodation.spells_tools = format == GENERIC || !self.shown.tools;
    }

    /// Sets the format of the model's reasoning, whatever its template shows.
    pub fn set_reasoning_format(&mut self, format: ReasoningFormat) {
        self.output_markup.reasoning = Some(format);
    }

    /// Returns whether prompts describe the tools of a conversation, in a format whose calls can be parsed.
    pub fn shows_tools(&self) -> bool {
        let is_generic = matches!(self.output_markup.tool_calls, Some(GENERIC | ToolCallFormat::Hermes));
        self.output_markup.tool_calls.is_some() && (!self.accommodation.spells_tools || is_generic)
    }

    /// Returns whether llmctl describes the tools, and asks for calls in its generic format.
    pub fn spells_tools(&self) -> bool {
        self.accommodation.spells_tools && self.has_template()
    }

    /// Returns how conversations with tools are changed; `None` if the template shows all of them.
    pub fn notice_of_tools(&self) -> Option<Notice> {
        self.spells_tools().then_some(Notice::GenericTools { shows_tools: self.shown.tools })
    }

    /// Returns how system prompts are changed; `None` if the template prints them.
    pub fn notice_of_system(&self) -> Option<Notice> {
        let is_refused = match self.shown.system {
            SystemMessages::Printed => return None,
            SystemMessages::Dropped => false,
            SystemMessages::Refused => true,
        };
        Some(Notice::FoldedSystem { is_refused })
    }

    /// Returns how this conversation's system messages are changed; `None` if the template gets them as they are.
    pub fn notice_of_moved_system(&self, messages: &[Message]) -> Option<Notice> {
        let count = self.accommodation.num_moved_system(messages);
        let takes_none = self.accommodation.merges_system;
        (count > 0).then_some(Notice::MovedSystem { count, takes_none })
    }

    /// Sets the frontend, on which only the built-in model's prompts depend.
    pub fn set_frontend(&mut self, frontend: Frontend) {
        self.frontend = frontend;
    }

    pub fn texts(&self) -> &ModelTexts {
        &self.texts
    }

    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.texts.tokenizer
    }

    /// Returns the markup of the model's answers: that of its chat template, with the generic format of calls if the template
    /// shows none. Without a template there is no markup.
    pub fn output_markup(&self) -> OutputMarkup {
        self.output_markup
    }

    /// Returns the id of a special token by its text.
    pub fn special(&self, text: &str) -> Option<u32> {
        self.tokenizer().token_to_id(text).filter(|&id| self.tokenizer().is_special(id))
    }

    /// Returns the tokens that ask for the text between two others; `None` if the model was not trained for it.
    pub fn infill(&self) -> Option<Infill> {
        Infill::detect(|text| self.tokenizer().token_to_id(text))
    }

    /// Returns the ids of an answer's markers that are special tokens: parsers of answers must see them as text.
    pub fn markup(&self, output_markup: &OutputMarkup) -> Arc<[u32]> {
        output_markup.markers().into_iter().filter_map(|mark| self.special(mark)).collect()
    }

    /// Returns whether there is a chat template, even one that does not compile.
    pub fn has_template(&self) -> bool {
        !matches!(self.template, Err(TemplateError::Missing))
    }

    /// Returns the source of the chat template in force; `None` if it does not compile.
    pub fn template_source(&self) -> Option<&str> {
        self.template.as_ref().ok().map(ChatTemplate::source)
    }

    /// Returns whether the chat template names this role; `None` without a template.
    pub fn template_knows_role(&self, role: &str) -> Option<bool> {
        self.template.as_ref().ok().map(|template| template.has_literal(role))
    }

    /// Returns whether the chat template reads a variable of this name.
    pub fn template_reads(&self, variable: &str) -> bool {
        self.template.as_ref().is_ok_and(|template| template.reads(variable))
    }

    /// Returns the template variables that ask for this reasoning; empty if the template reads none.
    pub fn reasoning_variables(&self, reasoning: Reasoning) -> Map<String, Value> {
        let mut variables = Map::new();
        self.with_template(|template| reasoning.set(template, &mut variables));
        variables
    }

    /// Calls `read` with what the chat template knows.
    pub fn with_template<T>(&self, read: impl FnOnce(TemplateVariables<'_>) -> T) -> T {
        read(TemplateVariables {
            reads: &|name| self.template_reads(name),
            says: &|word| self.template_knows_role(word).unwrap_or(false),
            ends_reasoning: self.output_markup.reasoning.and_then(ReasoningFormat::closing).is_some(),
        })
    }

    /// Returns the conversation with as many messages, its calls and results as the template takes them.
    pub fn arranged<'a>(&self, conversation: &'a Conversation) -> Cow<'a, Conversation> {
        self.accommodation.arrange(conversation)
    }

    /// Returns the form of the ids that new calls get.
    pub fn call_ids(&self) -> CallIds {
        self.accommodation.call_ids
    }

    /// Renders the conversation as text that ends with the header of the answer.
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
        template.render(&self.accommodation.apply(conversation, self.image_markup()), &options)
    }

    /// Returns the answer that the hints have for the last question of a rendered prompt, if the model has not learnt it.
    pub fn known_answer(&self, prompt: &str) -> Option<&'static str> {
        self.hints?.answer(prompt)
    }

    /// Returns the tokens of the engine's context; without an engine there is no limit.
    pub fn context_tokens(&self) -> usize {
        self.context_tokens.get().copied().unwrap_or(usize::MAX)
    }

    /// Encodes a rendered prompt with its special tokens, and one beginning-of-sequence token if the model wants it. No text becomes an
    /// image's placeholder.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode_chat_for`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_segment(&self.guarded(text), true)
    }

    /// Encodes text that follows other ids of the same prompt. No text becomes an image's placeholder.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode_chat_rest_for`].
    pub fn encode_rest(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_segment(&self.guarded(text), false)
    }

    /// Returns a text that is no part of a rendered conversation with no image in it.
    pub fn guarded<'a>(&self, text: &'a str) -> Cow<'a, str> {
        self.image_markup().map_or(Cow::Borrowed(text), |markup| Cow::Owned(markup.guarded(text)))
    }

    /// Encodes a text of a prompt, the first one if `is_start`. What it has for images is expanded by their plans, in its order.
    ///
    /// # Errors
    /// Those of [`Self::encode`]; [`Error::PromptOversized`]; [`Error::InvalidParameter`] if the text has more images than there are
    /// plans.
    pub fn encode_with_images<'p>(
        &self,
        text: &str,
        is_start: bool,
        plans: &mut impl Iterator<Item = &'p ImagePlan>,
    ) -> Result<Vec<u32>> {
        match self.vision() {
            None => self.encode_segment(text, is_start),
            Some(vision) => {
                self.encode_segment(&vision.expanded(text, plans, self.context_tokens())?, is_start)
            }
        }
    }

    fn encode_segment(&self, text: &str, is_start: bool) -> Result<Vec<u32>> {
        let limit = self.context_tokens.get().copied();
        match is_start {
            true => self.texts.tokenizer.encode_chat_for(text, limit),
            false => self.texts.tokenizer.encode_chat_rest_for(text, limit),
        }
    }

    /// Returns the bytes of a token, which may be incomplete characters; none for ids without a token.
    pub fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        self.texts.tokenizer.token_bytes(id).unwrap_or_default()
    }
}
