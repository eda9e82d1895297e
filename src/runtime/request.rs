//! Requests to the engine and its answers: plain data, with no behaviour but validation.
//!
//! One definition of the sampling parameters ([`sampling`]) serves every frontend, so that a range is the
//! same on the command line, in a batch row and over HTTP.

mod answer_text;
mod images;
mod loop_guard;
mod reasoning;
mod session_name;

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Deserializer, Serialize};

use super::grammar::Grammar;
use super::spec::EngineSpec;
pub(super) use answer_text::AnswerText;
use llmctl_base::{Sampling, error::Error};
use llmctl_image::ImageFile;
use llmctl_models::adapters::{AdapterSpec, AdapterUse};
use llmctl_models::images::{ImageKey, ImageSpan};
use llmctl_models::kv::Tokens;
pub use loop_guard::LoopGuard;
pub use reasoning::ReasoningLimit;
pub(super) use reasoning::ReasoningWatch;
pub use session_name::EngineSessionName;

/// One generation: prompt ids in, a stream of [`Event`]s out.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Prompt token ids, beginning-of-sequence included where the model wants it.
    pub prompt: Vec<u32>,
    /// The images of the prompt, in the order of their rows, which hold placeholder tokens.
    pub images: Vec<PromptImage>,
    pub sampling: Sampling,
    pub limits: Limits,
    /// Report log-probabilities, each with this many alternatives (0 to [`MAX_LOGPROBS`]).
    pub logprobs: Option<usize>,
    /// Report log-probabilities of the prompt's tokens too, each with this many alternatives. The whole prompt is computed
    /// then, a few tokens in each step; only then may `max_tokens` be 0.
    pub prompt_logprobs: Option<usize>,
    /// Let special (control) tokens appear in the text; by default they produce none.
    pub render_special: bool,
    /// Special tokens that appear in the text although `render_special` is off: markup that the caller reads.
    pub markup: Arc<[u32]>,
    /// Constraint on the answer. End-of-generation tokens are allowed only where the answer is complete. An answer that only the
    /// end can follow ends by itself, as [`Finish::Complete`].
    pub grammar: Option<Grammar>,
    /// Ends reasoning that has used up its tokens or repeats itself, as far as the grammar allows the tokens that end it.
    pub reasoning: Option<ReasoningLimit>,
    /// Tokens that the answer may begin with or contain. A hint: they are drafted from, and change no answer.
    pub prediction: Vec<u32>,
    /// LoRA adapters of all rows, as [`AdapterUse::list`] makes them; `None` for those that the model was loaded with. Rows of
    /// others are not reused.
    pub adapters: Option<Vec<AdapterUse>>,
    /// The session that the request is a turn of. The first request creates it; it keeps tokens and KV for the next one. `None`
    /// keeps only what the prefix index still finds.
    pub session: Option<EngineSessionName>,
}

/// An image of a prompt.
#[derive(Debug, Clone)]
pub struct PromptImage {
    pub file: Arc<ImageFile>,
    pub key: ImageKey,
    /// Its runs of rows, in ascending order; all have its key.
    pub spans: Vec<ImageSpan>,
}

impl Request {
    /// Returns what follows the reasoning of the answer, if that is limited.
    pub(super) fn reasoning_watch(&self) -> Option<ReasoningWatch> {
        let limit = self.reasoning.clone()?;
        Some(ReasoningWatch::new(limit, self.limits.loop_guard.reasoning))
    }

    /// Returns whether a token ends the answer. Under `ignore_eos`, a grammar allows one that ends a generation only if no other
    /// can follow.
    pub(super) fn ends_with(&self, id: u32, spec: &EngineSpec) -> bool {
        let counts = !self.limits.ignore_eos || self.grammar.is_some();
        (counts && spec.ends_generation(id)) || self.limits.stop_ids.contains(&id)
    }

    /// Validates the request before any work. Returns the limit on generated tokens in force.
    ///
    /// # Errors
    /// [`Error::PromptEmpty`]; [`Error::PromptTooLong`] if no room is left for an answer;
    /// [`Error::ContextExceeded`] under [`Overflow::Refuse`]; [`Error::InvalidParameter`] naming the field.
    pub fn validate(&self, spec: &EngineSpec) -> Result<usize, Error> {
        let (vocab_size, context_length) = (spec.vocab_size(), spec.context_length());
        let prompt_tokens = self.prompt.len();
        self.check_images(spec.vision.as_deref())?;
        validate_prompt(self.tokens(&self.spans()), vocab_size)?;
        if prompt_tokens >= context_length {
            return Err(Error::PromptTooLong { prompt_tokens, context_tokens: context_length });
        }
        self.sampling.validate(vocab_size)?;
        for (name, count) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            if count.is_some_and(|alternatives| alternatives > MAX_LOGPROBS) {
                let message = format!("at most {MAX_LOGPROBS} alternatives can be reported");
                return Err(Error::InvalidParameter { name, message });
            }
        }
        if self.prompt_logprobs.is_some() && self.session.is_some() {
            let message = "a session computes of its prompt only what is new".to_owned();
            return Err(Error::InvalidParameter { name: "prompt_logprobs", message });
        }
        let lists: [(&'static str, &[u32]); 3] = [
            ("stop_token_ids", &self.limits.stop_ids),
            ("markup", &self.markup),
            ("prediction", &self.prediction),
        ];
        for (name, ids) in lists {
            if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
                return Err(foreign_id(name, *id, vocab_size));
            }
        }
        self.check_adapters(&spec.model.adapters)?;
        if let Some(limit) = &self.reasoning {
            let is_foreign = limit.closing.iter().any(|&id| id as usize >= vocab_size);
            if limit.max_tokens == Some(0) || limit.closing.is_empty() || is_foreign || limit.close.is_empty()
            {
                let message =
                    "needs a limit of at least 1, and the text and known tokens that end it".to_owned();
                return Err(Error::InvalidParameter { name: "reasoning", message });
            }
        }
        if let Some(tokens) = self.limits.loop_guard.out_of_range() {
            let message = format!("{tokens} is not in [{}, {}]", LoopGuard::LEAST, LoopGuard::MOST);
            return Err(Error::InvalidParameter { name: "loop_guard", message });
        }
        if let Some(grammar) = self.grammar.as_ref().filter(|grammar| grammar.vocab_size() != vocab_size) {
            let message = format!("made for a vocabulary of {}, not {vocab_size}", grammar.vocab_size());
            return Err(Error::InvalidParameter { name: "grammar", message });
        }
        self.limits.resolve(prompt_tokens, context_length, self.prompt_logprobs.is_some())
    }

    fn check_adapters(&self, known: &[AdapterSpec]) -> Result<(), Error> {
        let is_known = |adapter: &AdapterUse| known.iter().any(|spec| spec.key == adapter.key);
        let message = match &self.adapters {
            Some(list) if !list.iter().all(is_known) => "names an adapter that is not loaded",
            Some(list) if AdapterUse::list(list.iter().copied()).as_ref() != Ok(list) => {
                "is not in order, or has a scale of 0 or one that is not finite"
            }
            _ => return Ok(()),
        };
        Err(Error::InvalidParameter { name: "lora", message: message.to_owned() })
    }
}

/// Checks that a prompt has tokens and that all of them but those of images are in the vocabulary.
///
/// # Errors
/// [`Error::PromptEmpty`], or [`Error::InvalidParameter`] naming the first foreign id.
pub(super) fn validate_prompt<'a>(prompt: impl Into<Tokens<'a>>, vocab_size: usize) -> Result<(), Error> {
    let prompt = prompt.into();
    if prompt.is_empty() {
        return Err(Error::PromptEmpty);
    }
    let is_foreign =
        |&(position, &id): &(usize, &u32)| id as usize >= vocab_size && prompt.image_at(position).is_none();
    match prompt.ids.iter().enumerate().find(is_foreign) {
        None => Ok(()),
        Some((_, id)) => Err(foreign_id("prompt", *id, vocab_size)),
    }
}

fn foreign_id(name: &'static str, id: u32, vocab_size: usize) -> Error {
    let message = format!("token id {id} is not in the vocabulary of {vocab_size}");
    Error::InvalidParameter { name, message }
}

/// Most alternatives of a token's log-probability (OpenAI's limit).
pub const MAX_LOGPROBS: usize = 20;

/// Limits that end a generation before an end-of-generation token does.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Limits {
    /// At most this many generated tokens, at least 1; `None` runs to the end of the context.
    pub max_tokens: Option<usize>,
    /// Handling of a prompt that does not fit the context together with `max_tokens`.
    pub overflow: Overflow,
    /// Strings that end the generation; they are not part of the text. Empty ones are ignored.
    pub stop: Vec<String>,
    /// Tokens that end the generation beside those of the model, also with `ignore_eos`.
    pub stop_ids: Vec<u32>,
    /// Treat end-of-generation tokens as ordinary ones.
    pub ignore_eos: bool,
    /// Longest time from submission to the end, including the wait. The engine checks it before each step, so a request overruns
    /// it by at most one step. A waiting request fails with [`Error::DeadlineExceeded`]; a running one ends with its answer so
    /// far, as [`Finish::Deadline`].
    pub deadline: Option<Duration>,
    /// Ends what repeats itself.
    pub loop_guard: LoopGuard,
}

/// The context is never cut silently: a `max_tokens` that cannot be honoured is refused, or lowered because the
/// request says so; then `Started` reports the limit in force, and reaching it is `ContextFull`, not `MaxTokens`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overflow {
    #[default]
    Refuse,
    Clamp,
}

impl Limits {
    /// Returns whether the request sets no limit on the answer's length.
    pub fn is_open(&self) -> bool {
        self.max_tokens.is_none() && !self.ignore_eos
    }

    /// Returns the limit on generated tokens in force. `prompt_tokens` is below `context_length`.
    fn resolve(
        &self,
        prompt_tokens: usize,
        context_length: usize,
        may_be_none: bool,
    ) -> Result<usize, Error> {
        let room = context_length - prompt_tokens;
        match self.max_tokens {
            None => Ok(room),
            Some(0) if !may_be_none => {
                let message = "must be at least 1; leave it out to use the whole context".to_owned();
                Err(Error::InvalidParameter { name: "max_tokens", message })
            }
            Some(max_tokens) if max_tokens > room && self.overflow == Overflow::Refuse => {
                Err(Error::ContextExceeded { prompt_tokens, max_tokens, context_tokens: context_length })
            }
            Some(max_tokens) => Ok(max_tokens.min(room)),
        }
    }
}

/// One generated token, with its log-probability if the request wants it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Token {
    pub id: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprob: Option<Logprob>,
}

/// Natural-log probabilities under the model's distribution before temperature and truncation
/// (after penalties and bias), as OpenAI reports them. A grammar does not change them: a forced token
/// may be unlikely, and `top` may hold tokens that the grammar forbids.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Logprob {
    /// Negative infinity if the model rules the token out; null in JSON, which has no infinity.
    #[serde(deserialize_with = "null_is_impossible")]
    pub logprob: f32,
    /// The most likely tokens, best first.
    pub top: Vec<(u32, f32)>,
}

impl Logprob {
    /// Returns what stands for the log-probability of an image's row, which is no token.
    pub fn none() -> Self {
        Self { logprob: f32::NEG_INFINITY, top: Vec::new() }
    }
}

fn null_is_impossible<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f32, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f32::NEG_INFINITY))
}

/// Event of a request. The last one is `Done` or `Failed`.
#[derive(Debug, Clone)]
pub enum Event {
    /// The request waits in the queue; position 1 is next. Sent if the first step after the submission does not admit it, and
    /// when the position changes, which only decreases. At most [`crate::runtime::engine::MAX_BYPASSES`] smaller requests may
    /// start first.
    Queued { position: usize },
    /// The request leaves the queue; sent before any work. A request that is cancelled while it waits never starts.
    Started(Started),
    /// Slices of work on the request's images that are done, and of all. Comes before `Prefill` or between two of them.
    Encoding { done: usize, total: usize },
    /// Prompt tokens computed so far.
    Prefill { done: usize, total: usize },
    /// Log-probabilities of the next tokens of the prompt, in order. The first token of a prompt has none: they begin with the
    /// second. An image's rows have [`Logprob::none`].
    Prompt { logprobs: Vec<Logprob> },
    /// New text: complete UTF-8, never part of a stop string. `tokens` are those generated since the last event;
    /// text may be empty while characters are incomplete or held back.
    Text { text: String, tokens: Vec<Token> },
    /// The end of a request that was answered, or cancelled.
    Done(Outcome),
    /// The end of a request without an outcome.
    Failed(Error),
}

/// Decisions at admission.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Started {
    pub prompt_tokens: usize,
    /// The limit in force: the request's, or what the context leaves.
    pub max_tokens: usize,
    /// The seed in force, drawn or given.
    pub seed: u64,
    pub reuse: Reuse,
    /// The first difference between session and prompt; `None` if [`Reuse::first_difference`] is `None`.
    pub difference: Option<Difference>,
}

/// The first difference between the tokens of a session and of a prompt, with tokens around it. One of the two may end there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Difference {
    /// Number of equal tokens before it.
    pub position: usize,
    /// The last of those tokens.
    pub before: Vec<u32>,
    /// The session's tokens from there on.
    pub session: Vec<u32>,
    /// The prompt's tokens from there on.
    pub prompt: Vec<u32>,
    /// Set if an image begins there in one of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageDifference>,
}

/// An image at which a session and a prompt part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageDifference {
    /// Number of images before it, which are equal: its index in the prompt.
    pub index: usize,
    pub in_session: bool,
    pub in_prompt: bool,
}

/// Tokens of a prompt that were reused, and the reason for the rest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reuse {
    /// Prompt tokens whose KV was reused.
    pub cached_tokens: usize,
    /// Those of them that were read from disk.
    pub restored_tokens: usize,
    pub reason: ReuseReason,
    /// The first position at which the session's tokens and the prompt differ, or one of them ends; `None` if the prompt
    /// continues the session or there was no session to compare.
    pub first_difference: Option<usize>,
}

/// Reason for the extent of reuse.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ReuseReason {
    /// No tokens were known: there is no session, or it is new, or reuse is off.
    #[default]
    New,
    /// The prompt continues where the session ended.
    ExactPrefix,
    /// The prompt equals the session's tokens; at most its last token is recomputed.
    Equal,
    /// The session was truncated to the prefix that it shares with the prompt.
    PartialPrefix,
    /// They differ from the first token on, or the model cannot be rewound.
    Mismatch,
    /// The session's rows were computed with other LoRA adapters.
    Adapters,
    /// A step of the session failed, and its rows were dropped.
    Dirty,
    /// The idle session's pages were evicted for others.
    Evicted,
    /// Another request or session had computed the same beginning, or this one before it was evicted.
    PrefixCache,
    /// As `PrefixCache`, from pages on disk.
    Restored,
    /// The request wants log-probabilities of the prompt, which needs all of it computed.
    PromptLogprobs,
    /// The engine that held the session was lost, and none of its KV was on disk. The server sets it when it moves a session to
    /// another engine.
    EngineLost,
    /// A remote engine keeps the KV, and reports what it reused when it has answered.
    RemoteEngine,
}

impl ReuseReason {
    /// Returns the name on the wire, which is the reference server's if that has the reason too.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// Reason for the end of a generation.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    pub finish: Finish,
    pub usage: Usage,
    pub timings: Timings,
    pub seed: u64,
    /// Adapters with which the rows were computed.
    pub adapters: Vec<AdapterUse>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", content = "value", rename_all = "snake_case")]
pub enum Finish {
    /// An end-of-generation token (its id).
    Eos(u32),
    /// The grammar is complete and nothing can follow.
    Complete,
    /// A stop string.
    StopString(String),
    /// `max_tokens` generated.
    MaxTokens,
    /// The context is full, and the token that would have come next does not end the generation.
    ContextFull,
    /// The caller asked to stop, or went away.
    Cancelled,
    /// The request's deadline has passed.
    Deadline,
    /// The answer has repeated itself; see [`LoopGuard`].
    Repetition,
}

impl Finish {
    /// Returns whether something else than the model ended the answer.
    pub fn is_cut(&self) -> bool {
        !matches!(self, Finish::Eos(_) | Finish::Complete)
    }

    /// OpenAI's word for it. A deadline is a length: like `max_tokens` it is a limit that the caller has set, and clients
    /// know from the word that the answer is cut.
    pub fn reason(&self) -> &'static str {
        match self {
            Finish::Eos(_) | Finish::Complete | Finish::StopString(_) => "stop",
            Finish::MaxTokens | Finish::ContextFull | Finish::Deadline => "length",
            Finish::Cancelled => "cancelled",
            Finish::Repetition => "repetition",
        }
    }
}

/// Token counts of one request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens resident at the end: all of them, unless the request ended before its first token.
    pub prompt_tokens: usize,
    /// Prompt tokens whose KV was reused instead of computed.
    pub cached_tokens: usize,
    /// Generated tokens, the end-of-generation token excluded.
    pub completion_tokens: usize,
    /// Tokens that were computed before they were sampled.
    pub drafted_tokens: usize,
    /// Those of them that were sampled then.
    pub accepted_tokens: usize,
    /// Drafts of a draft model, or of the model's own block; `None` if it was never asked.
    pub draft_model: Option<DraftModelUsage>,
    /// True if reasoning that repeated itself was ended.
    pub looped_reasoning: bool,
    /// Images of the prompt.
    pub images: ImageUsage,
    /// Set if a remote engine has answered, which promises neither the same bits nor KV on this disk.
    pub remote: Option<RemoteUsage>,
}

/// Images of a request. KV that was reused needs no embeddings of its images.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageUsage {
    /// Those whose embeddings were computed while the request waited.
    pub encoded: usize,
    /// Those whose embeddings were known, in memory or on disk.
    pub found: usize,
}

impl ImageUsage {
    pub fn is_zero(&self) -> bool {
        *self == Self::default()
    }
}

/// Report of a remote engine about a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoteUsage {
    /// True if it reports the prompt tokens that it had cached; else `cached_tokens` is 0 and means nothing.
    pub reports_cached: bool,
}

/// Kind of drafter that computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelDrafter {
    #[default]
    DraftModel,
    /// The block of the model's own file that predicts further tokens.
    PredictionBlock,
    /// Layers of another file that read the model's KV.
    Assistant,
}

impl ModelDrafter {
    /// Returns its name for users.
    pub fn name(self) -> &'static str {
        match self {
            ModelDrafter::DraftModel => "the draft model",
            ModelDrafter::PredictionBlock => "the prediction block",
            ModelDrafter::Assistant => "the assistant",
        }
    }

    fn is_draft_model(&self) -> bool {
        *self == ModelDrafter::DraftModel
    }
}

/// Drafts of a computing drafter, which the totals of [`Usage`] contain.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftModelUsage {
    /// Absent for a draft model.
    #[serde(default, skip_serializing_if = "ModelDrafter::is_draft_model")]
    pub drafter: ModelDrafter,
    pub drafted_tokens: usize,
    pub accepted_tokens: usize,
    /// Why it drafted nothing from some token on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<DraftStop>,
}

/// Reason for which a draft model drafts nothing more for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DraftStop {
    #[error("its context is full")]
    Context,
    #[error("its KV memory is full")]
    Memory,
    #[error("the text has a token that it lacks")]
    Token,
    #[error("it failed")]
    Failed,
}

impl Usage {
    /// Adds what was drafted for another request.
    pub fn add_drafts(&mut self, other: &Usage) {
        self.drafted_tokens += other.drafted_tokens;
        self.accepted_tokens += other.accepted_tokens;
        if let Some(other) = other.draft_model {
            let drafter = other.drafter;
            let sum =
                self.draft_model.get_or_insert(DraftModelUsage { drafter, ..DraftModelUsage::default() });
            sum.drafted_tokens += other.drafted_tokens;
            sum.accepted_tokens += other.accepted_tokens;
            sum.stop = sum.stop.or(other.stop);
        }
    }
}

/// Wall times of one request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Timings {
    /// From submission to the start of work.
    pub queue: Duration,
    /// Computation of images.
    pub encode: Duration,
    /// Prompt computation, the first token's sampling included, images excluded.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Submission to first token.
    pub time_to_first_token: Option<Duration>,
    pub total: Duration,
}

/// The moments of a request.
#[derive(Debug)]
pub struct RequestClock {
    pub submitted: Instant,
    pub started: Option<Instant>,
    /// Time spent on the request's images.
    pub encode: Duration,
    pub first_token: Option<Instant>,
    pub last_token: Option<Instant>,
}

impl RequestClock {
    pub fn begin(submitted: Instant) -> Self {
        Self { submitted, started: None, encode: Duration::ZERO, first_token: None, last_token: None }
    }

    /// Returns the times of a request that ends now.
    pub fn timings(&self) -> Timings {
        let end = Instant::now();
        let between = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from),
            _ => Duration::ZERO,
        };
        Timings {
            queue: self.started.unwrap_or(end).saturating_duration_since(self.submitted),
            encode: self.encode,
            prefill: between(self.started, self.first_token.or(Some(end))).saturating_sub(self.encode),
            decode: between(self.first_token, self.last_token),
            time_to_first_token: self.first_token.map(|at| at.saturating_duration_since(self.submitted)),
            total: end.saturating_duration_since(self.submitted),
        }
    }
}

impl Timings {
    /// Computed prompt tokens per second; `None` when nothing was computed or no time passed.
    pub fn prefill_rate(&self, usage: &Usage) -> Option<f64> {
        rate(usage.prompt_tokens - usage.cached_tokens, self.prefill)
    }

    /// Decode steps per second: the first token belongs to prefill, as in llama-bench and vLLM.
    pub fn decode_rate(&self, usage: &Usage) -> Option<f64> {
        rate(usage.completion_tokens.saturating_sub(1), self.decode)
    }
}

fn rate(tokens: usize, time: Duration) -> Option<f64> {
    (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64())
}
