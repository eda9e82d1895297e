//! One answer of a remote engine: from token ids to events, with llmctl's own text, stop strings and limits.
//!
//! Invariants: events come in the order of [`Event`]'s variants and end with exactly one `Done` or `Failed`,
//! unless the answer is dropped; every generated token is in one `Text` event. An answer that has delivered
//! no token may begin anew elsewhere.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::refusal::beside_limited_reasoning;
use super::wire::EngineFinish;
use crate::client::Sink;
use crate::grammar::{GrammarSource, GrammarState};
use crate::request::{
    AnswerText, Difference, Event, Finish, Outcome, RemoteUsage, Request, RequestClock, Reuse, ReuseReason,
    Started, Token, Usage,
};
use crate::spec::EngineSpec;
use llmctl_base::error::Error;
use llmctl_models::text::Vocabulary;

/// Called before the last event, with the tokens of prompt and answer; `None` after a failure.
pub type OnEnd = Box<dyn FnOnce(Option<Vec<u32>>) + Send>;

/// A value that is dropped before the last event, so that its reader finds the request gone.
type HeldUntilEnd = Option<Box<dyn Send>>;

/// Inputs of an answer besides its request.
pub struct AnswerSetting {
    pub vocabulary: Arc<dyn Vocabulary>,
    pub spec: Arc<EngineSpec>,
    pub max_tokens: usize,
    pub seed: u64,
    /// The first place where the session's tokens and the prompt differ.
    pub difference: Option<Difference>,
    pub on_end: OnEnd,
}

pub struct RemoteAnswer {
    pub request: Request,
    setting: AnswerSetting,
    on_end: Option<OnEnd>,
    place: HeldUntilEnd,
    engine: HeldUntilEnd,
    /// `None` after the last event, or when its reader has gone.
    sink: Option<Sink>,
    is_started: bool,
    /// The reader wants no more.
    is_left: bool,
    generated: Vec<u32>,
    text: AnswerText,
    /// Follows a constraint whose meaning may differ at the engine.
    grammar: Option<GrammarState>,
    cached_tokens: Option<usize>,
    clock: RequestClock,
}

impl RemoteAnswer {
    pub fn new(request: Request, mut setting: AnswerSetting, sink: Sink) -> Self {
        let on_end = std::mem::replace(&mut setting.on_end, Box::new(|_| ()));
        let is_followed =
            |source: &GrammarSource| matches!(source, GrammarSource::Regex(_) | GrammarSource::Lark(_));
        let grammar = request.grammar.as_ref().filter(|grammar| is_followed(grammar.source()));
        let reasoning = request.reasoning_watch().filter(|_| beside_limited_reasoning(&request).is_none());
        let clock = RequestClock::begin(Instant::now());
        Self {
            setting,
            on_end: Some(on_end),
            place: None,
            engine: None,
            sink: Some(sink),
            is_started: false,
            is_left: false,
            generated: Vec::new(),
            text: AnswerText::new(&request, reasoning),
            grammar: grammar.map(|grammar| GrammarState::new(grammar, request.limits.ignore_eos)),
            cached_tokens: None,
            clock,
            request,
        }
    }

    /// Returns whether no token has been delivered, so that another engine may answer.
    pub fn is_untouched(&self) -> bool {
        self.generated.is_empty()
    }

    /// Returns whether the reader wants no more.
    pub fn is_left(&self) -> bool {
        self.is_left
    }

    /// Keeps its place among the running requests until it ends.
    pub fn hold_place(&mut self, place: impl Send + 'static) {
        self.place = Some(Box::new(place));
    }

    /// Keeps its count at an engine until it ends.
    pub fn hold_engine(&mut self, engine: Option<Box<dyn Send>>) {
        self.engine = engine;
    }

    /// Reports that other requests come first.
    pub fn wait(&mut self, position: usize) {
        self.emit(Event::Queued { position });
    }

    pub fn seed(&self) -> u64 {
        self.setting.seed
    }

    /// Returns the prompt and the tokens generated.
    pub fn tokens(&self) -> Vec<u32> {
        self.request.prompt.iter().chain(&self.generated).copied().collect()
    }

    /// Returns how many tokens may still be generated.
    pub fn tokens_left(&self) -> usize {
        self.setting.max_tokens.saturating_sub(self.generated.len())
    }

    /// Returns the time left until the deadline; `None` without one.
    pub fn time_left(&self) -> Option<Duration> {
        let deadline = self.request.limits.deadline?;
        Some(deadline.saturating_sub(self.clock.submitted.elapsed()))
    }

    /// Notes that the request is sent. Prefill is measured from here, because some engines answer nothing before the first token:
    /// it includes a wait there.
    pub fn note_sent(&mut self) {
        if !self.is_started {
            self.clock.started = Some(Instant::now());
        }
    }

    /// Reports that an engine has taken the request. Only the first report counts.
    pub fn start(&mut self) {
        if std::mem::replace(&mut self.is_started, true) {
            return;
        }
        self.clock.started.get_or_insert_with(Instant::now);
        let difference = self.setting.difference.clone();
        let first_difference = difference.as_ref().map(|difference| difference.position);
        let reason = ReuseReason::RemoteEngine;
        let reuse = Reuse { reason, first_difference, ..Reuse::default() };
        let (prompt_tokens, max_tokens) = (self.request.prompt.len(), self.setting.max_tokens);
        let started = Started { prompt_tokens, max_tokens, seed: self.setting.seed, reuse, difference };
        self.emit(Event::Started(started));
    }

    /// Notes what the engine reports as cached. The first report counts: later ones are of continued requests.
    pub fn note_cached(&mut self, tokens: Option<usize>) {
        self.cached_tokens = self.cached_tokens.or(tokens);
    }

    /// Returns whether the reasoning must be ended in the model's place.
    pub fn is_closing(&self) -> bool {
        !self.text.closing.is_empty()
    }

    /// Delivers the tokens that end the reasoning. Returns why the answer ends with them; `None` if the engine must be asked
    /// for the rest of it.
    ///
    /// # Errors
    /// Those of [`Self::push`].
    pub fn close_reasoning(&mut self) -> Result<Option<Finish>, Error> {
        for id in std::mem::take(&mut self.text.closing) {
            let finish = self.push(Token { id, logprob: None })?;
            if finish.is_some() {
                return Ok(finish);
            }
        }
        Ok(None)
    }

    /// Takes the next token. Returns why it ends the answer, if it does.
    ///
    /// # Errors
    /// [`Error::RemoteRefused`] if the answer does not keep to its constraint or to the vocabulary; those of the constraint.
    pub fn push(&mut self, token: Token) -> Result<Option<Finish>, Error> {
        let (now, vocab_size) = (Instant::now(), self.setting.spec.vocab_size());
        if token.id as usize >= vocab_size {
            let message =
                format!("the remote engine's answer has token {}, and there are {vocab_size}", token.id);
            return Err(Error::RemoteRefused(message));
        }
        if self.generated.is_empty() {
            self.clock.first_token.get_or_insert(now);
            let total = self.request.prompt.len();
            self.emit(Event::Prefill { done: total, total });
        }
        if self.request.ends_with(token.id, &self.setting.spec) {
            return Ok(Some(Finish::Eos(token.id)));
        }
        let id = token.id;
        self.clock.last_token = Some(now);
        self.generated.push(id);
        let text = self.text.push(id, &self.request, &*self.setting.vocabulary);
        self.emit(Event::Text { text, tokens: vec![token] });
        if let Some(stopped) = self.text.stopped() {
            return Ok(Some(stopped));
        }
        if let Some(grammar) = &mut self.grammar {
            grammar.accept(id).map_err(|error| {
                Error::RemoteRefused(format!(
                    "the remote engine's answer does not keep to the constraint: {error}"
                ))
            })?;
            if grammar.is_complete() {
                return Ok(Some(Finish::Complete));
            }
        }
        if self.tokens_left() == 0 {
            return Ok(Some(self.limit()));
        }
        Ok(self.text.has_looped(id).then_some(Finish::Repetition))
    }

    /// Returns the name of the limit on generated tokens: the request's, or what the context leaves.
    fn limit(&self) -> Finish {
        match self.request.limits.max_tokens == Some(self.generated.len()) {
            true => Finish::MaxTokens,
            false => Finish::ContextFull,
        }
    }

    /// Ends the answer as the engine has ended it.
    pub fn end(&mut self, finish: EngineFinish) {
        match finish {
            EngineFinish::Stop(id) => {
                self.clock.first_token.get_or_insert_with(Instant::now);
                let first = self.setting.spec.config.end_of_generation.first();
                self.finish(Finish::Eos(id.or(first.copied()).unwrap_or_default()));
            }
            EngineFinish::Length => self.finish(self.limit()),
            EngineFinish::Other(reason) => {
                let message = format!("the remote engine has ended the answer: {reason}");
                self.fail(Error::RemoteRefused(message));
            }
        }
    }

    /// Ends the answer, or with a stop string that completes in the text held back.
    pub fn finish(&mut self, finish: Finish) {
        self.flush();
        let stopped = self.text.stopped().filter(|_| finish != Finish::Cancelled);
        let prompt_tokens = self.clock.first_token.map_or(0, |_| self.request.prompt.len());
        let usage = Usage {
            prompt_tokens,
            cached_tokens: self.cached_tokens.unwrap_or_default().min(prompt_tokens),
            completion_tokens: self.generated.len(),
            looped_reasoning: self.text.looped_reasoning(),
            remote: Some(RemoteUsage { reports_cached: self.cached_tokens.is_some() }),
            ..Usage::default()
        };
        let outcome = Outcome {
            finish: stopped.unwrap_or(finish),
            usage,
            timings: self.clock.timings(),
            seed: self.setting.seed,
            adapters: Vec::new(),
        };
        self.emit(Event::Done(outcome));
    }

    /// Ends the answer with an error, after the text held back.
    pub fn fail(&mut self, error: Error) {
        self.flush();
        self.emit(Event::Failed(error));
    }

    fn flush(&mut self) {
        let text = self.text.flush();
        if !text.is_empty() {
            self.emit(Event::Text { text, tokens: Vec::new() });
        }
    }

    fn emit(&mut self, event: Event) {
        let is_last = matches!(event, Event::Done(_) | Event::Failed(_));
        if is_last {
            let tokens = matches!(event, Event::Done(_)).then(|| self.tokens());
            self.release(tokens);
        }
        if let Some(sink) = &mut self.sink {
            self.is_left |= sink(event).is_break();
        }
        if is_last {
            self.sink = None;
        }
    }

    fn release(&mut self, tokens: Option<Vec<u32>>) {
        (self.place, self.engine) = (None, None);
        if let Some(on_end) = self.on_end.take() {
            on_end(tokens);
        }
    }
}

/// An answer that is dropped without its last event has failed.
impl Drop for RemoteAnswer {
    fn drop(&mut self) {
        self.release(None);
    }
}
