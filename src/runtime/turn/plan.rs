//! From a turn's input to prompt tokens, a grammar and parser settings.
//!
//! Pure but for the grammar compiler's cache; rendering, encoding and compiling may take long, so servers
//! plan on blocking threads. A [`TurnPlan`] borrows nothing and holds no lock: it can be sent to another
//! engine when the first is lost.

use std::sync::Arc;

use super::answer::ParserConfig;
use super::constraint::{AnswerForm, PromptEnd};
use super::images::{AskedImages, not_given};
use super::tool_grammar::{ToolGrammar, tool_grammar};
use super::{AnswerStart, OutputConstraint, TextPrompt, TurnError, TurnInput, TurnRequest};
use crate::chat_tokenizer::ChatTokenizer;
use crate::grammar::{Grammar, GrammarCompiler, GrammarSource};
use crate::receipt::{AnswerRecipe, Receipt};
use crate::request::{Finish, PromptImage, ReasoningLimit, Request};
use crate::session::transcript::SplicedPrompt;
use llmctl_base::error::{Error, Result};
use llmctl_base::notice::Notice;
use llmctl_models::load::fingerprint::sha256;
use llmctl_template::{Conversation, DateTime, Message, OutputMarkup, Reasoning, ReasoningFormat};

/// Stands for an image in a text prompt, as llama.cpp's clients write it.
const MEDIA: &str = "<__media__>";

/// Tokens at the end of a prompt that say where its answer begins.
const TAIL_TOKENS: usize = 64;

/// Plans turns for one model.
#[derive(Clone, Copy)]
pub struct Planner<'a> {
    pub chat_tokenizer: &'a ChatTokenizer,
    pub grammars: &'a GrammarCompiler,
}

/// Everything that the engine and the parser need for one answer.
#[derive(Debug, Clone)]
pub struct TurnPlan {
    /// The prompt, including the beginning of the answer.
    pub tokens: Vec<u32>,
    /// Its images, in the order of their rows.
    pub images: Vec<PromptImage>,
    /// The prompt as text, if it was planned outside a session.
    pub text: String,
    pub grammar: Option<Grammar>,
    pub reasoning: Option<ReasoningLimit>,
    /// Special tokens that the parser must see as text.
    pub markup: Arc<[u32]>,
    pub parser: ParserConfig,
    /// Tokens of the predicted text.
    pub prediction: Vec<u32>,
    /// Keywords of the tools' schemas that the grammar does not enforce: `tools.NAME.KEYWORD`.
    pub relaxed: Vec<String>,
}

impl TurnPlan {
    /// Returns what the user should know of the plan.
    pub fn notices(&self) -> impl Iterator<Item = Notice> {
        self.relaxed.iter().map(|path| Notice::Unenforced { path: path.clone() })
    }

    /// Returns the engine's request, in no session.
    pub fn request(&self, turn: &TurnRequest) -> Request {
        Request {
            prompt: self.tokens.clone(),
            images: self.images.clone(),
            sampling: turn.sampling(),
            limits: turn.limits.clone(),
            logprobs: turn.logprobs,
            prompt_logprobs: turn.prompt_logprobs,
            grammar: self.grammar.clone(),
            reasoning: self.reasoning.clone(),
            markup: self.markup.clone(),
            prediction: self.prediction.clone(),
            adapters: turn.adapters.clone(),
            ..Request::default()
        }
    }
}

impl Planner<'_> {
    /// Plans a turn that belongs to no session. `now` is the time that chat templates see.
    ///
    /// # Errors
    /// Errors of the template, the tokenizer, the tools and the constraint.
    pub fn plan(&self, input: &TurnInput, now: DateTime, turn: &TurnRequest) -> Result<TurnPlan, TurnError> {
        match input {
            TurnInput::Chat(conversation) => self.plan_chat(conversation, now, turn),
            TurnInput::Text(text) => self.plan_text(text, turn),
        }
    }

    /// Plans the answer to a conversation that belongs to no session.
    ///
    /// # Errors
    /// As [`Self::plan`].
    pub fn plan_chat(
        &self,
        conversation: &Conversation,
        now: DateTime,
        turn: &TurnRequest,
    ) -> Result<TurnPlan, TurnError> {
        let mut text = self.chat_tokenizer.render(conversation, now).map_err(Error::from)?;
        let num_prompt_bytes = text.len();
        if let AnswerStart::Text(start) = &turn.answer_start {
            text.push_str(&self.chat_tokenizer.guarded(start));
        }
        let asked = AskedImages::of(self.chat_tokenizer, conversation)?;
        let encoded = asked.encode(&SplicedPrompt::text(text.clone()))?;
        let images = asked.placed(&encoded, &turn.images, |image, _| Err(not_given(image)))?;
        let end = PromptEnd {
            text: &text[..num_prompt_bytes],
            is_reasoning_off: Reasoning::is_off_in(&conversation.kwargs),
        };
        let plan = self.plan_answer(encoded.tokens, end, turn)?;
        Ok(TurnPlan { text, images, ..plan })
    }

    /// Plans the continuation of a text.
    ///
    /// # Errors
    /// As [`Self::plan`]; `suffix` if the model has no tokens for infilling.
    pub fn plan_text(&self, prompt: &TextPrompt, turn: &TurnRequest) -> Result<TurnPlan, TurnError> {
        let tokenizer = self.chat_tokenizer;
        let start = match &turn.answer_start {
            AnswerStart::Text(start) => start.as_str(),
            _ => "",
        };
        let (tokens, images, text) = match prompt {
            TextPrompt::Text(text) => {
                let text = format!("{text}{start}");
                (tokenizer.encode(&text)?, Vec::new(), text)
            }
            TextPrompt::WithImages { text, images } => {
                let text = self.with_images(&format!("{text}{start}"), images.len());
                let asked = AskedImages::new(tokenizer, images.clone())?;
                let encoded = asked.encode(&SplicedPrompt::text(text.clone()))?;
                let images = asked.placed(&encoded, &turn.images, |image, _| Err(not_given(image)))?;
                (encoded.tokens, images, text)
            }
            TextPrompt::Ids(parts) => {
                let mut all: Vec<u32> = Vec::new();
                for (ids, text) in parts {
                    let is_start = all.is_empty() && ids.is_empty();
                    all.extend(ids);
                    let encoded = if is_start { tokenizer.encode(text) } else { tokenizer.encode_rest(text) };
                    all.extend(encoded?);
                }
                let text = tokenizer.tokenizer().decode(&all, true);
                (all, Vec::new(), text)
            }
            TextPrompt::Infill(asked) => {
                let message = "suffix: this model has no such tokens";
                let infill = tokenizer.infill().ok_or(TurnError::Unsupported { param: "suffix", message })?;
                let ids = infill.prompt(tokenizer.tokenizer(), asked, tokenizer.context_tokens())?;
                (ids, Vec::new(), asked.prefix.clone())
            }
        };
        let compile = |constraint: &OutputConstraint| {
            self.grammars.compile(&constraint.source).map_err(constraint.blamed())
        };
        let grammar = turn.constraint.as_ref().map(compile).transpose()?;
        let parser = ParserConfig::plain(start);
        let (markup, prediction) = (Arc::default(), self.prediction(turn));
        let relaxed = Vec::new();
        Ok(TurnPlan { tokens, images, text, grammar, reasoning: None, markup, parser, prediction, relaxed })
    }

    /// Returns what decides every answer of the model.
    pub fn model_recipe(&self) -> AnswerRecipe {
        let texts = self.chat_tokenizer.texts();
        AnswerRecipe {
            model: texts.identity.clone(),
            template: sha256(&[self.chat_tokenizer.template_source().unwrap_or_default().as_bytes()]),
            build: self.chat_tokenizer.build().to_owned(),
            ends: texts.end_of_generation.clone(),
            ..AnswerRecipe::default()
        }
    }

    /// Returns what decides the answer to a planned turn beside its prompt and its sampling.
    pub fn recipe(&self, plan: &TurnPlan, turn: &TurnRequest) -> AnswerRecipe {
        let limits = &turn.limits;
        AnswerRecipe {
            stop: limits.stop.clone(),
            stop_ids: limits.stop_ids.clone(),
            ignore_eos: limits.ignore_eos,
            loop_guard: limits.loop_guard,
            markup: plan.markup.to_vec(),
            reasoning: plan.reasoning.clone(),
            grammar: plan.grammar.as_ref().map(|grammar| grammar.source().clone()),
            ..self.model_recipe()
        }
    }

    /// Returns the text of a recorded answer as the engine streams it: without a stop string that ended it.
    pub fn recorded_text(&self, receipt: &Receipt) -> String {
        let mut text = self.shown_text(&receipt.answer, &receipt.recipe.markup);
        if let Finish::StopString(stop) = &receipt.finish
            && let Some(at) = text.rfind(stop.as_str())
        {
            text.truncate(at);
        }
        text
    }

    /// Returns whether a message is what a recorded answer says. Of calls only the names are looked for: a receipt does not have the
    /// tools, without whose schemas arguments cannot be read.
    pub fn is_said(&self, receipt: &Receipt, prompt: &[u32], message: &Message) -> bool {
        let text = self.recorded_text(receipt);
        if !message.tool_calls.is_empty() {
            return message.tool_calls.iter().all(|call| text.contains(&call.name));
        }
        let tail = &prompt[prompt.len().saturating_sub(TAIL_TOKENS)..];
        let tail = self.chat_tokenizer.tokenizer().decode(tail, false);
        let (markup, call_ids) = (self.chat_tokenizer.output_markup(), self.chat_tokenizer.call_ids());
        let (mut stream, _) = ParserConfig::chat(markup, &[], call_ids, &tail).stream();
        stream.push(&text, &[]);
        stream.says(message, receipt.finish.is_cut())
    }

    /// Returns a text with the mark of each image where it holds [`MEDIA`], or at its start if it holds none.
    fn with_images(&self, text: &str, num_images: usize) -> String {
        let text = self.chat_tokenizer.guarded(text);
        let Some(vision) = self.chat_tokenizer.vision().filter(|_| num_images > 0) else {
            return text.into_owned();
        };
        let printed = &vision.spec().text.printed;
        match text.contains(MEDIA) {
            true => text.replace(MEDIA, printed),
            false => printed.repeat(num_images) + &text,
        }
    }

    /// Plans the answer to a rendered prompt. `tokens` contain [`AnswerStart::Text`] already, and no other beginning.
    pub(super) fn plan_answer(
        &self,
        mut tokens: Vec<u32>,
        end: PromptEnd<'_>,
        turn: &TurnRequest,
    ) -> Result<TurnPlan, TurnError> {
        // Markup of calls that the request does not offer is text like any other, and must reach the reader.
        let markup = self.chat_tokenizer.markup(&self.chat_tokenizer.output_markup());
        let ToolGrammar { grammar, relaxed } = self.grammar(end, turn)?;
        let (output_markup, tools) = (self.output_markup(turn), turn.tools.offered());
        let call_ids = self.chat_tokenizer.call_ids();
        let parser = ParserConfig::chat(output_markup, tools, call_ids, end.text);
        let (start, ids) = match &turn.answer_start {
            AnswerStart::Nothing => (String::new(), Vec::new()),
            AnswerStart::Text(text) => (text.clone(), Vec::new()),
            AnswerStart::Tokens(ids) => (self.shown_text(ids, &markup), ids.clone()),
            start @ AnswerStart::Message { .. } => {
                let text = start.in_markup(self.chat_tokenizer.output_markup(), end.text)?;
                let ids = self.chat_tokenizer.encode_rest(&text)?;
                (self.shown_text(&ids, &markup), ids)
            }
        };
        tokens.extend(&ids);
        let reasoning = self.reasoning_limit(&format!("{}{start}", end.text), turn)?;
        let parser = parser.starting_with(&start, &ids);
        let prediction = self.prediction(turn);
        let (text, images) = (String::new(), Vec::new());
        Ok(TurnPlan { tokens, images, text, grammar, reasoning, markup, parser, prediction, relaxed })
    }

    /// Returns the tokens of the predicted text. A text that is longer than the context drafts nothing, because a hint
    /// must fail no request.
    fn prediction(&self, turn: &TurnRequest) -> Vec<u32> {
        match turn.prediction.as_str() {
            "" => Vec::new(),
            text => self.chat_tokenizer.encode_rest(text).unwrap_or_default(),
        }
    }

    /// Returns the limit on the reasoning of an answer that continues `text`; `None` without a budget and a guard, or if `text` has
    /// ended the reasoning.
    fn reasoning_limit(&self, text: &str, turn: &TurnRequest) -> Result<Option<ReasoningLimit>> {
        let max_tokens = turn.reasoning_budget;
        if max_tokens.is_none() && turn.limits.loop_guard.reasoning.is_none() {
            return Ok(None);
        }
        let output_markup = self.chat_tokenizer.output_markup();
        let Some(closing) = output_markup.reasoning.and_then(ReasoningFormat::closing) else {
            return Ok(None);
        };
        let place = match output_markup.open_reasoning(text) {
            Some(close) => Some((None, close)),
            None => output_markup.first_reasoning(text).map(|(open, close)| (Some(open.to_owned()), close)),
        };
        let Some((open, close)) = place else { return Ok(None) };
        let closing = self.chat_tokenizer.encode_rest(closing)?;
        Ok(Some(ReasoningLimit { max_tokens, open, close: close.to_owned(), closing }))
    }

    /// Returns the markup that the answer may use.
    fn output_markup(&self, turn: &TurnRequest) -> OutputMarkup {
        let output_markup = self.chat_tokenizer.output_markup();
        OutputMarkup { tool_calls: output_markup.tool_calls.filter(|_| turn.tools.is_on()), ..output_markup }
    }

    fn grammar(&self, end: PromptEnd<'_>, turn: &TurnRequest) -> Result<ToolGrammar, TurnError> {
        let known = self.known_answer(end, turn);
        let constraint = turn.constraint.as_ref().or(known.as_ref());
        // Tools that the model sees and may not call: an answer without another form must not begin a call.
        let forbids_calls = !turn.tools.is_on() && !turn.tools.definitions.is_empty() && constraint.is_none();
        let output_markup = match forbids_calls {
            true => &self.chat_tokenizer.output_markup(),
            false => &self.output_markup(turn),
        };
        let form = AnswerForm { chat_tokenizer: self.chat_tokenizer, output_markup, end };
        let compile = |constraint: &OutputConstraint| {
            form.compile(self.grammars, &constraint.source).map_err(constraint.blamed())
        };
        // Compiled beside tools too, so that an error names the constraint and not the tools.
        let constrained = constraint.map(compile).transpose()?;
        match turn.tools.is_on() || forbids_calls {
            true => tool_grammar(self.grammars, form, &turn.tools, constraint),
            false => Ok(ToolGrammar { grammar: constrained, relaxed: Vec::new() }),
        }
    }

    /// Returns the constraint to the one answer that a built-in model's hints have for a question.
    fn known_answer(&self, end: PromptEnd<'_>, turn: &TurnRequest) -> Option<OutputConstraint> {
        let is_open = !turn.tools.is_on() && matches!(turn.answer_start, AnswerStart::Nothing);
        let answer = self.chat_tokenizer.known_answer(end.text).filter(|_| is_open)?;
        Some(OutputConstraint { source: GrammarSource::Regex(regex_syntax::escape(answer)), param: "prompt" })
    }

    /// Returns the text of generated tokens as the engine streams it: special tokens have none, unless they are markup.
    fn shown_text(&self, ids: &[u32], markup: &[u32]) -> String {
        let tokenizer = self.chat_tokenizer.tokenizer();
        let is_shown = |id: &&u32| !tokenizer.is_special(**id) || markup.contains(id);
        let bytes: Vec<u8> = ids
            .iter()
            .filter(is_shown)
            .flat_map(|&id| self.chat_tokenizer.token_bytes(id).into_owned())
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
