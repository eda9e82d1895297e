//! One request in flight: its sequence, its undelivered text, its limits and its clock.
//!
//! Invariants: events come in the order of [`Event`]'s variants and end with exactly one `Done` or `Failed`.
//! Every generated token is in one `Text` event, even if it adds no text yet. Text held back is flushed
//! before the end, unless it belongs to the stop string that ended the generation. Dropping a generation
//! frees its pages unless a session takes the sequence, which then ends where the delivered text ends. Tokens
//! that a grammar forces are delivered at once and computed in one chunk with the token before them. If
//! log-probabilities are wanted they are sampled one by one, with the same result. Between steps a generation
//! is as if nothing had ever been drafted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::speculate::{DraftOffer, DraftText, Drafting, Drafts, Followed, KnownText};
use crate::grammar::GrammarState;
use crate::repetition::repeats;
use crate::request::{
    AnswerText, EngineSessionName, Event, Finish, ImageUsage, Logprob, ModelDrafter, Outcome, PromptImage,
    Request, RequestClock, Started, Token, Usage,
};
use crate::sample::draw_seed;
use crate::sequence::{Resumed, Sequence, TurnStart};
use crate::spec::{EngineSpec, Speculation};
use crate::step::{Executor, FedImages, FedRows, FeedInput, Scores, SequenceFeed};
use llmctl_base::error::{Error, Result};
use llmctl_models::images::{ImageKey, ImageRows, ImageSpan};
use llmctl_models::kv::{PageName, PagePool, Tokens};
use llmctl_models::text::Vocabulary;

/// Prompt tokens per step when their log-probabilities are wanted: each takes a row of logits as long as the
/// vocabulary.
const MAX_SCORED_ROWS: usize = 16;

/// Identifier of a request within one engine; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(super) u64);

/// Events of all requests, in order.
pub type EngineEvents = Vec<(RequestId, Event)>;

#[derive(Debug)]
pub struct Generation {
    id: RequestId,
    request: Request,
    sequence: Sequence,
    /// Limit in force; at most what the context leaves.
    max_tokens: usize,
    /// The model's own limit, if the request has none. With it, an answer that repeats itself ends too.
    usual: Option<usize>,
    /// The answer so far; recorded only if `usual` is set.
    answer: Vec<u32>,
    seed: u64,
    num_cached: usize,
    /// Leading tokens of the prompt that another session computed.
    num_shared: usize,
    num_generated: usize,
    last_scheduled: u64,
    /// State of the request's grammar; set when the request starts.
    grammar: Option<GrammarState>,
    /// The token sampled last and the tokens forced after it. All are delivered; the last ones are still to
    /// be computed.
    forced: Vec<u32>,
    drafts: Drafts,
    images: GivenImages,
    /// Log-probabilities of prompt tokens, not delivered yet.
    scores: Vec<Logprob>,
    text: AnswerText,
    delivered: DeliveredText,
    clock: RequestClock,
}

/// Images of the prompt, with the embeddings that its next rows take.
#[derive(Debug, Default)]
struct GivenImages {
    spans: Vec<ImageSpan>,
    rows: Vec<(ImageKey, Arc<ImageRows>)>,
    usage: ImageUsage,
    /// Slices of the images that were encoded for it.
    num_slices: usize,
}

/// Rows that a running request may have in the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextRows {
    /// Rows of the prompt or of forced tokens; 0 if it generates one token per step.
    pub most: usize,
    /// Number of the first rows that one step computes all or none of; 0 without any.
    pub whole: usize,
    /// True if it waits for an image before its next row.
    pub waits: bool,
}

/// Maps delivered text back to generated tokens, in bytes of text.
#[derive(Debug, Default)]
struct DeliveredText {
    num_delivered: usize,
    /// End of each token's text; one more if its last character is unfinished.
    ends: Vec<usize>,
}

impl Generation {
    /// Creates a waiting generation. `request` has been validated, with `max_tokens` as the result.
    pub fn new(id: RequestId, request: Request, max_tokens: usize, pool: &PagePool, now: Instant) -> Self {
        Self {
            id,
            sequence: Sequence::new(pool),
            max_tokens,
            usual: None,
            answer: Vec::new(),
            seed: request.sampling.seed.unwrap_or_else(draw_seed),
            num_cached: 0,
            num_shared: 0,
            num_generated: 0,
            last_scheduled: 0,
            grammar: None,
            forced: Vec::new(),
            drafts: Drafts::default(),
            images: GivenImages { spans: request.spans(), ..GivenImages::default() },
            scores: Vec::new(),
            text: AnswerText::new(&request, request.reasoning_watch()),
            delivered: DeliveredText::default(),
            clock: RequestClock::begin(now),
            request,
        }
    }

    /// Sets the model's own limit for requests without one.
    pub fn limited_to(mut self, usual: Option<usize>) -> Self {
        self.usual = usual;
        self.max_tokens = usual.map_or(self.max_tokens, |usual| usual.min(self.max_tokens));
        self
    }

    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Returns the prompt tokens still to compute; 0 while generating.
    pub fn prompt_left(&self) -> usize {
        self.request.prompt.len().saturating_sub(self.sequence.position())
    }

    /// Returns the tokens that are known and still to compute.
    fn num_known(&self) -> usize {
        (self.request.prompt.len() + self.num_generated).saturating_sub(self.sequence.position())
    }

    /// Returns the tokens to compute before the next can be sampled; 0 if only the last sampled one is.
    pub fn rows_left(&self) -> usize {
        match self.sequence.pending() {
            Some(_) if self.num_known() == 1 => 0,
            _ => self.num_known(),
        }
    }

    /// Returns the time limit, counted from submission.
    pub fn deadline(&self) -> Option<Duration> {
        self.request.limits.deadline
    }

    pub fn is_overdue(&self, now: Instant) -> bool {
        self.deadline()
            .is_some_and(|deadline| now.saturating_duration_since(self.clock.submitted) >= deadline)
    }

    /// Returns when it last had a row; see [`super::schedule::RunningRequest::last_scheduled`].
    pub fn last_scheduled(&self) -> u64 {
        self.last_scheduled
    }

    pub fn set_last_scheduled(&mut self, last_scheduled: u64) {
        self.last_scheduled = last_scheduled;
    }

    /// Returns the most tokens that can become resident.
    pub fn longest(&self) -> usize {
        self.request.prompt.len() + self.max_tokens
    }

    pub fn prompt(&self) -> Tokens<'_> {
        let adapters = self.request.adapters.as_deref().unwrap_or_default();
        Tokens { ids: &self.request.prompt, images: &self.images.spans, adapters }
    }

    /// Returns the name of its session.
    pub fn session(&self) -> Option<&EngineSessionName> {
        self.request.session.as_ref()
    }

    /// Returns how many leading tokens of the prompt another session has computed.
    pub fn num_shared(&self) -> usize {
        self.num_shared
    }

    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Starts decoding from `resumed` KV and emits `Started`.
    pub fn start(&mut self, resumed: Resumed, events: &mut EngineEvents) {
        let Resumed { sequence, reuse, states_at, difference, num_shared } = resumed;
        self.num_shared = num_shared;
        self.clock.started = Some(Instant::now());
        self.num_cached = reuse.cached_tokens;
        self.sequence = sequence;
        let ends_last = self.request.limits.ignore_eos;
        self.grammar = self.request.grammar.as_ref().map(|grammar| GrammarState::new(grammar, ends_last));
        let generated_from = self.request.prompt.len();
        let (seed, logprobs) = (self.seed, self.request.logprobs);
        self.sequence.begin_turn(TurnStart { generated_from, seed, logprobs, states_at });
        let (prompt_tokens, max_tokens) = (self.request.prompt.len(), self.max_tokens);
        let started = Started { prompt_tokens, max_tokens, seed: self.seed, reuse, difference };
        self.emit(events, Event::Started(started));
    }

    /// Returns whether every prompt token must be computed.
    pub fn scores_prompt(&self) -> bool {
        self.request.prompt_logprobs.is_some()
    }

    /// Takes over pages of the prompt that other requests have computed in the meantime.
    pub fn catch_up(&mut self) {
        if self.prompt_left() > 1 && !self.scores_prompt() {
            let adapters = self.request.adapters.as_deref().unwrap_or_default();
            let prompt = Tokens { ids: &self.request.prompt, images: &self.images.spans, adapters };
            self.num_cached += self.sequence.catch_up(prompt, prompt.len() - 1);
        }
    }

    /// Returns the name of the page that the next prompt tokens fill; `None` if others could not take it
    /// over.
    pub fn next_page(&self) -> Option<PageName> {
        let table = self.sequence.resident().table();
        let may_share = table.is_shareable() && !self.scores_prompt();
        table.next_page(self.prompt()).filter(|_| may_share).map(|page| page.name)
    }

    /// Returns the most bytes of KV that feeding `rows` and the draft takes.
    pub fn bytes_needed(&self, rows: usize) -> usize {
        let left = self.rows_left().max(1);
        self.sequence.resident().table().bytes_needed(rows.min(left) + self.drafts.tokens().len())
    }

    /// Returns whether the answer has begun and its next token is sampled in a step with `rows` of its rows.
    pub fn samples(&self, rows: usize) -> bool {
        rows > 0 && self.sequence.pending().is_some() && rows >= self.rows_left()
    }

    /// Returns how many tokens were drafted, and how many of them were accepted.
    pub fn draft_totals(&self) -> (usize, usize) {
        self.drafts.totals()
    }

    /// Returns the input of the next step: `rows` tokens of the prompt or of forced ones, or the pending
    /// token, and the draft.
    pub fn feed(&mut self, rows: usize) -> SequenceFeed<'_> {
        let left = self.rows_left();
        let scored = self.request.prompt_logprobs.filter(|_| self.prompt_left() > 0);
        let rows =
            if scored.is_some() { rows.min(MAX_SCORED_ROWS).max(self.next_rows().whole) } else { rows };
        let known = if self.prompt_left() > 0 { &self.request.prompt } else { &self.forced };
        let chunk = &known[known.len() - left..][..self.sequence.rows_allowed(rows.min(left))];
        let following = &known[(known.len() - left + 1).min(known.len())..];
        let following = &following[..following.len().min(chunk.len())];
        let input = match left {
            0 => FeedInput::Pending,
            _ if chunk.len() < left || self.max_tokens == 0 => FeedInput::Chunk(chunk),
            _ => FeedInput::LastChunk(chunk),
        };
        let found = &mut self.scores;
        let scores = scored.map(|num_alternatives| Scores { following, num_alternatives, found });
        let grammar = self.grammar.as_mut();
        SequenceFeed {
            sequence: &mut self.sequence,
            input,
            images: FedImages { spans: &self.images.spans, rows: &self.images.rows },
            drafted: self.drafts.tokens(),
            sampling: &self.request.sampling,
            grammar,
            forced: self.text.closing.front().copied(),
            scores,
        }
    }

    /// Handles a step that succeeded, and samples from drafted rows as far as the draft holds. Returns true
    /// if it ended the generation.
    pub fn advance(
        &mut self,
        executor: &mut Executor,
        fed: FedRows,
        vocabulary: &dyn Vocabulary,
        events: &mut EngineEvents,
    ) -> bool {
        if self.num_generated == 0 {
            let total = self.request.prompt.len();
            let position = self.sequence.position();
            if self.images.spans.last().is_some_and(|span| span.rows.end <= position) {
                self.images.rows.clear();
            }
            self.emit(events, Event::Prefill { done: total - self.prompt_left(), total });
        }
        if !self.scores.is_empty() {
            let logprobs = std::mem::take(&mut self.scores);
            self.emit(events, Event::Prompt { logprobs });
        }
        let ended = self.accept_sampled(executor, fed, vocabulary, events);
        let ended = executor.end_draft(&mut self.sequence).and(ended);
        match ended {
            Ok(None) => {
                let FedRows { first, position, .. } = fed;
                let count = self.sequence.position() - position;
                self.drafts.note_hidden(position, count, executor.hidden(first..first + count));
                return false;
            }
            Ok(Some(finish)) => self.finish(finish, events),
            Err(error) => self.fail(error, events),
        }
        true
    }

    /// Accepts the sampled token, and samples and accepts further ones while the draft holds.
    fn accept_sampled(
        &mut self,
        executor: &mut Executor,
        fed: FedRows,
        vocabulary: &dyn Vocabulary,
        events: &mut EngineEvents,
    ) -> Result<Option<Finish>> {
        let (mut next_row, mut num_accepted) = (fed.next_drafted, 0);
        loop {
            let Some(token) = self.sequence.pending().cloned() else {
                self.drafts.end(num_accepted, false);
                return Ok(self.end_without_token());
            };
            let ended = self.accept_with_forced(token, executor.spec(), vocabulary, events)?;
            let num_foreseen = self.sequence.num_foreseen(&self.forced);
            num_accepted += num_foreseen;
            if ended.is_some() || num_foreseen < self.forced.len() {
                self.drafts.end(num_accepted, ended.is_none());
                return Ok(ended);
            }
            self.sequence.confirm(num_foreseen);
            next_row += num_foreseen;
            let mut feed = SequenceFeed {
                grammar: self.grammar.as_mut(),
                forced: self.text.closing.front().copied(),
                ..SequenceFeed::new(&mut self.sequence, FeedInput::Pending, &self.request.sampling)
            };
            executor.sample_drafted(&mut feed, next_row - 1)?;
        }
    }

    /// Returns why a step ends the generation that sampled no token; `None` if it continues.
    fn end_without_token(&self) -> Option<Finish> {
        if self.max_tokens == 0 && self.prompt_left() == 0 {
            return Some(Finish::MaxTokens);
        }
        self.is_complete().then_some(Finish::Complete)
    }

    /// Accepts a sampled token, and tokens that the grammar forces after it.
    fn accept_with_forced(
        &mut self,
        token: Token,
        spec: &EngineSpec,
        vocabulary: &dyn Vocabulary,
        events: &mut EngineEvents,
    ) -> Result<Option<Finish>> {
        self.forced.clear();
        self.forced.push(token.id);
        if self.text.closing.pop_front().is_some_and(|closing| closing != token.id) {
            self.text.closing.clear(); // the grammar continues in another way
        }
        let mut ended = self.accept(token, spec, vocabulary, events)?;
        while ended.is_none()
            && self.request.logprobs.is_none()
            && self.text.closing.is_empty()
            && let Some(id) = self.grammar.as_ref().and_then(GrammarState::forced)
        {
            self.forced.push(id);
            ended = self.accept(Token { id, logprob: None }, spec, vocabulary, events)?;
        }
        Ok(ended)
    }

    fn is_complete(&self) -> bool {
        self.num_known() == 0 && self.grammar.as_ref().is_some_and(GrammarState::is_complete)
    }

    /// Accepts a token. The end of generation is checked before the full context, so it is recognised there
    /// too.
    fn accept(
        &mut self,
        token: Token,
        spec: &EngineSpec,
        vocabulary: &dyn Vocabulary,
        events: &mut EngineEvents,
    ) -> Result<Option<Finish>> {
        let now = Instant::now();
        self.clock.first_token.get_or_insert(now);
        if self.request.ends_with(token.id, spec) {
            return Ok(Some(Finish::Eos(token.id)));
        }
        if self.request.prompt.len() + self.num_generated >= spec.context_length() {
            return Ok(Some(Finish::ContextFull));
        }
        let id = token.id;
        self.clock.last_token = Some(now);
        self.num_generated += 1;
        let text = self.text.push(id, &self.request, vocabulary);
        self.delivered.num_delivered += text.len();
        self.delivered.ends.push(self.text.end());
        self.emit(events, Event::Text { text, tokens: vec![token] });
        if let Some(stopped) = self.text.stopped() {
            return Ok(Some(stopped));
        }
        if let Some(grammar) = &mut self.grammar {
            grammar.accept(id)?;
            if grammar.is_complete() {
                return Ok(Some(Finish::Complete));
            }
        }
        // If the limit comes from the context, allow one more step: the model may end the generation by
        // itself.
        let most = self.request.limits.max_tokens.or(self.usual);
        if most == Some(self.num_generated) || self.is_stuck(id) {
            return Ok(Some(Finish::MaxTokens));
        }
        Ok(self.text.has_looped(id).then_some(Finish::Repetition))
    }

    /// Appends the token, and returns whether the answer has started to repeat itself.
    fn is_stuck(&mut self, id: u32) -> bool {
        if self.usual.is_none() {
            return false;
        }
        self.answer.push(id);
        repeats(&self.answer)
    }

    /// Ends with `finish`, or with a stop string that completes in the text held back.
    pub fn finish(&mut self, finish: Finish, events: &mut EngineEvents) {
        self.flush(events);
        let stopped = self.text.stopped().filter(|_| finish != Finish::Cancelled);
        let usage = Usage {
            prompt_tokens: self.request.prompt.len() - self.prompt_left(),
            cached_tokens: self.num_cached,
            completion_tokens: self.num_generated,
            drafted_tokens: self.drafts.totals().0,
            accepted_tokens: self.drafts.totals().1,
            draft_model: self.drafts.by_model(),
            looped_reasoning: self.text.looped_reasoning(),
            images: self.images.usage,
            remote: None,
        };
        let outcome = Outcome {
            finish: stopped.unwrap_or(finish),
            usage,
            timings: self.clock.timings(),
            seed: self.seed,
            adapters: self.request.adapters.clone().unwrap_or_default(),
        };
        self.emit(events, Event::Done(outcome));
    }

    /// Ends with an error. Text held back is still delivered.
    pub fn fail(&mut self, error: Error, events: &mut EngineEvents) {
        self.flush(events);
        self.emit(events, Event::Failed(error));
    }

    fn flush(&mut self, events: &mut EngineEvents) {
        let text = self.text.flush();
        if !text.is_empty() {
            self.delivered.num_delivered += text.len();
            self.emit(events, Event::Text { text, tokens: Vec::new() });
        }
    }

    /// Returns the sequence for the session. If a stop string cut the text, the sequence is cut to the
    /// delivered text.
    pub fn into_sequence(mut self, can_rewind: bool) -> Sequence {
        self.sequence.clear_pending();
        if self.text.stopped().is_some() && can_rewind {
            let num_said = self.delivered.ends.partition_point(|&end| end <= self.delivered.num_delivered);
            let end = self.request.prompt.len() + num_said;
            // If the model cannot resume there, the session keeps the longer sequence, and the next prompt
            // differs from it.
            let _ = self.sequence.truncate(end.min(self.sequence.position()));
        }
        self.sequence
    }

    fn emit(&self, events: &mut EngineEvents, event: Event) {
        events.push((self.id, event));
    }
}

/// Images.
impl Generation {
    /// Returns the images whose embeddings the rows after the resident ones take, and which it was not given.
    pub fn lacking_images(&self) -> impl Iterator<Item = &PromptImage> {
        let position = self.sequence.position();
        let is_ahead = move |image: &&PromptImage| {
            image.spans.iter().any(|span| span.rows.end > position) && !self.has_image(image.key)
        };
        self.request.images.iter().filter(is_ahead)
    }

    fn has_image(&self, key: ImageKey) -> bool {
        self.images.rows.iter().any(|(given, _)| *given == key)
    }

    pub fn lacks_image(&self, key: ImageKey) -> bool {
        self.lacking_images().any(|image| image.key == key)
    }

    /// Takes an image's embeddings: encoded in so many slices, or known.
    pub fn give_image(&mut self, key: ImageKey, rows: &Arc<ImageRows>, slices: Option<usize>) {
        let count = self.lacking_images().filter(|image| image.key == key).count();
        let ImageUsage { encoded, found } = &mut self.images.usage;
        *if slices.is_some() { encoded } else { found } += count;
        self.images.num_slices += slices.unwrap_or(0);
        if count > 0 {
            self.images.rows.push((key, Arc::clone(rows)));
        }
    }

    /// Notes a slice of an image that it lacks, of which so many are done. The images after it count as if they took as many.
    pub fn note_slice(&mut self, (done, total): (usize, usize), took: Duration, events: &mut EngineEvents) {
        self.spend_on_images(took);
        let num_lacking = self.lacking_images().count();
        let before = self.images.num_slices;
        self.emit(events, Event::Encoding { done: before + done, total: before + total * num_lacking });
    }

    /// Adds time that went into its images.
    pub fn spend_on_images(&mut self, took: Duration) {
        self.clock.encode += took;
    }

    /// Returns the rows of its longest image that one step has to compute whole.
    pub fn longest_image(&self) -> usize {
        self.images.spans.iter().map(|span| span.rows.len()).max().unwrap_or(0)
    }

    /// Returns the rows of the next step: up to an image that it lacks, and where images are computed whole, one image alone
    /// or up to one.
    pub fn next_rows(&self) -> NextRows {
        let (left, position) = (self.rows_left(), self.sequence.position());
        let lacking = self.lacking_images().flat_map(|image| &image.spans);
        let lacking = lacking.map(|span| span.rows.clone()).find(|rows| rows.end > position);
        let known = lacking.map_or(left, |rows| left.min(rows.start.saturating_sub(position)));
        let (pool, prompt) = (self.sequence.resident().table().pool(), self.prompt());
        let whole = prompt.image_at(position).filter(|_| pool.keeps_images_whole() && known > 0);
        let whole = whole.map_or(0, |span| span.rows.end - position);
        let next = self.images.spans.iter().map(|span| span.rows.start).find(|start| *start > position);
        let most = match next.filter(|_| pool.keeps_images_whole()) {
            _ if whole > 0 => whole,
            Some(start) => known.min(start - position),
            None => known,
        };
        NextRows { most, whole, waits: most == 0 && left > 0 }
    }
}

impl Generation {
    /// Returns how many of `most` tokens may be drafted: none that the limit on generated tokens rules out, so that the
    /// bytes promised suffice, and none behind the place where a state is saved, because that is saved after a whole step.
    fn most_drafted(&self, most: usize) -> usize {
        let most = most.min(self.max_tokens.saturating_sub(self.num_generated + 1));
        let num_known = self.rows_left().max(1);
        self.sequence.rows_allowed(num_known + most).saturating_sub(num_known)
    }
}

impl Drafting for Generation {
    fn propose(&mut self, mode: Speculation, most: usize) -> Option<DraftOffer> {
        let most = self.most_drafted(most);
        let Self { request, sequence, grammar, text, forced, drafts, images, .. } = self;
        let forced_next = grammar.iter().flat_map(GrammarState::forced_tokens);
        let foreseen = text.closing.iter().copied().chain(forced_next.filter(|_| text.closing.is_empty()));
        let KnownText { resident, following } = known_text(request, self.num_generated, sequence, forced);
        let text = DraftText {
            prediction: &request.prediction,
            prompt_len: request.prompt.len(),
            placeholder: images.spans.first().map(|span| request.prompt[span.rows.start]),
            resident,
            following,
        };
        if most == 0 { None } else { drafts.propose(mode, most, foreseen, text) }
    }

    fn follow(&mut self, drafter: ModelDrafter, most: usize) -> Followed<'_> {
        let most = self.most_drafted(most);
        let Self { request, sequence, forced, drafts, .. } = self;
        let text = known_text(request, self.num_generated, sequence, forced);
        drafts.follow(drafter, (text, Some(sequence.resident().table())), most)
    }

    fn model_acceptance(&self) -> Option<f64> {
        self.drafts.model_acceptance()
    }

    fn pass(&mut self) {
        self.drafts.pass();
    }

    fn decline(&mut self) {
        self.drafts.decline();
    }

    fn keep_draft(&mut self, len: usize) {
        self.drafts.keep(len);
    }

    fn draft_len(&self) -> usize {
        self.drafts.tokens().len()
    }
}

/// Returns the prompt and the tokens generated, of which the last are in `forced`.
fn known_text<'a>(
    request: &Request,
    num_generated: usize,
    sequence: &'a Sequence,
    forced: &'a [u32],
) -> KnownText<'a> {
    let resident = sequence.known();
    let num_known = request.prompt.len() + num_generated;
    KnownText { resident, following: &forced[forced.len() - (num_known - resident.len())..] }
}
