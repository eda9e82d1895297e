//! One request in flight: its sequence, its text on the way out, its limits and its clock.
//!
//! Invariants: events come in the order of [`Event`]'s variants and end with exactly one `Done` or `Failed`; every
//! generated token appears in one `Text`, also when it adds no text yet; text held back is flushed before the end
//! unless it belongs to the stop string that ended it. Pages go back when this is dropped, unless a session takes the
//! sequence over: then it holds what was said and nothing beyond. Tokens that a grammar forces are delivered as soon as they
//! are known and computed in one chunk with the token before them; where log-probabilities are asked for they are computed
//! one by one, and are the same.

use std::time::{Duration, Instant};

use crate::runtime::error::{Error, Result};
use crate::runtime::grammar::GrammarState;
use crate::runtime::kv::{PageName, PagePool};
use crate::runtime::repetition::repeats;
use crate::runtime::request::{Event, Finish, Logprob, Outcome, Request, Started, Timings, Token, Usage};
use crate::runtime::sample::draw_seed;
use crate::runtime::sequence::{Resumed, Sequence, TurnStart};
use crate::runtime::spec::EngineSpec;
use crate::runtime::step::{FeedInput, Scores, SequenceFeed};
use crate::runtime::text::{StopMatcher, Utf8Stream, Vocabulary};

/// Tokens of a prompt in a step when their log-probabilities are asked for: each takes a row of logits, which are as many as
/// there are tokens in the vocabulary.
const MAX_SCORED_ROWS: usize = 16;

/// Names a request of one engine; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(super) u64);

/// Where the events of all requests go.
pub type EngineEvents = Vec<(RequestId, Event)>;

#[derive(Debug)]
pub struct Generation {
    id: RequestId,
    request: Request,
    sequence: Sequence,
    /// The limit in force; at most what the context leaves.
    max_tokens: usize,
    /// The model's own limit, where the request has none; with it, an answer that goes round in circles ends too.
    usual: Option<usize>,
    /// The answer so far, where there is such a limit.
    answer: Vec<u32>,
    seed: u64,
    num_cached: usize,
    num_generated: usize,
    last_scheduled: u64,
    /// Where the answer stands in the request's grammar, from its start on.
    grammar: Option<GrammarState>,
    /// The last sampled token and those forced after it, when there are any: delivered, and the last of them to be computed.
    forced: Vec<u32>,
    /// Log-probabilities of prompt tokens that nobody has been told yet.
    scores: Vec<Logprob>,
    utf8: Utf8Stream,
    stop: StopMatcher,
    delivered: DeliveredText,
    clock: Clock,
}

/// Which generated tokens the delivered text stands for, in bytes of text.
#[derive(Debug, Default)]
struct DeliveredText {
    /// Text of all tokens so far.
    num_bytes: usize,
    num_delivered: usize,
    /// Where each token's text ends; one beyond, when its last character is unfinished.
    ends: Vec<usize>,
}

#[derive(Debug)]
struct Clock {
    submitted: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl Generation {
    /// `request` has been validated, with `max_tokens` as the result.
    pub fn new(id: RequestId, request: Request, max_tokens: usize, pool: &PagePool, now: Instant) -> Self {
        Self {
            id,
            sequence: Sequence::new(pool),
            max_tokens,
            usual: None,
            answer: Vec::new(),
            seed: request.sampling.seed.unwrap_or_else(draw_seed),
            num_cached: 0,
            num_generated: 0,
            last_scheduled: 0,
            grammar: None,
            forced: Vec::new(),
            scores: Vec::new(),
            utf8: Utf8Stream::new(),
            stop: StopMatcher::new(request.limits.stop.iter().cloned()),
            delivered: DeliveredText::default(),
            clock: Clock { submitted: now, started: None, first_token: None, last_token: None },
            request,
        }
    }

    /// With the limit that the model has where the request has none.
    pub fn limited_to(mut self, usual: Option<usize>) -> Self {
        self.usual = usual;
        self.max_tokens = usual.map_or(self.max_tokens, |usual| usual.min(self.max_tokens));
        self
    }

    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Prompt tokens still to compute; 0 when it generates.
    pub fn prompt_left(&self) -> usize {
        self.request.prompt.len().saturating_sub(self.sequence.position())
    }

    /// Tokens that are known and still to compute.
    fn num_known(&self) -> usize {
        (self.request.prompt.len() + self.num_generated).saturating_sub(self.sequence.position())
    }

    /// Tokens to compute before the next can be sampled; 0 when it is only the one sampled last.
    pub fn rows_left(&self) -> usize {
        match self.sequence.pending() {
            Some(_) if self.num_known() == 1 => 0,
            _ => self.num_known(),
        }
    }

    /// How long it may take from submission.
    pub fn deadline(&self) -> Option<Duration> {
        self.request.limits.deadline
    }

    pub fn is_overdue(&self, now: Instant) -> bool {
        self.deadline()
            .is_some_and(|deadline| now.saturating_duration_since(self.clock.submitted) >= deadline)
    }

    /// When it had its last row; see [`super::schedule::RunningRequest::last_scheduled`].
    pub fn last_scheduled(&self) -> u64 {
        self.last_scheduled
    }

    pub fn set_last_scheduled(&mut self, last_scheduled: u64) {
        self.last_scheduled = last_scheduled;
    }

    /// The most tokens that can become resident.
    pub fn longest(&self) -> usize {
        self.request.prompt.len() + self.max_tokens
    }

    pub fn prompt(&self) -> &[u32] {
        &self.request.prompt
    }

    /// Name of the session it runs in.
    pub fn session(&self) -> Option<&str> {
        self.request.session.as_deref()
    }

    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Leaves the queue with what is computed already.
    pub fn start(&mut self, resumed: Resumed, events: &mut EngineEvents) {
        let Resumed { sequence, reuse, states_at, difference } = resumed;
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

    /// Whether it has to compute all of its prompt.
    pub fn scores_prompt(&self) -> bool {
        self.request.prompt_logprobs.is_some()
    }

    /// Takes over what others have computed of the prompt in the meantime.
    pub fn catch_up(&mut self) {
        if self.prompt_left() > 1 && !self.scores_prompt() {
            self.num_cached += self.sequence.catch_up(&self.request.prompt, self.request.prompt.len() - 1);
        }
    }

    /// The name of the page that the prompt's next tokens fill, when others could take it over once it is computed.
    pub fn next_page(&self) -> Option<PageName> {
        let table = self.sequence.resident().table();
        let may_share = table.is_shareable() && !self.scores_prompt();
        let (name, _) = table.next_name(&self.request.prompt).filter(|_| may_share)?;
        Some(name)
    }

    /// Bytes of KV that feeding `rows` takes at most.
    pub fn bytes_needed(&self, rows: usize) -> usize {
        let left = self.rows_left().max(1);
        self.sequence.resident().table().bytes_needed(rows.min(left))
    }

    /// What goes into the next step: `rows` tokens of the prompt or of forced ones, or the pending token.
    pub fn feed(&mut self, rows: usize) -> SequenceFeed<'_> {
        let left = self.rows_left();
        let scored = self.request.prompt_logprobs.filter(|_| self.prompt_left() > 0);
        let rows = if scored.is_some() { rows.min(MAX_SCORED_ROWS) } else { rows };
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
            sampling: &self.request.sampling,
            grammar,
            scores,
        }
    }

    /// Takes note of a step that went well; true when the generation has ended with it.
    pub fn advance(
        &mut self,
        spec: &EngineSpec,
        vocabulary: &dyn Vocabulary,
        events: &mut EngineEvents,
    ) -> bool {
        if self.num_generated == 0 {
            let total = self.request.prompt.len();
            self.emit(events, Event::Prefill { done: total - self.prompt_left(), total });
        }
        if !self.scores.is_empty() {
            let logprobs = std::mem::take(&mut self.scores);
            self.emit(events, Event::Prompt { logprobs });
        }
        let ended = match self.sequence.pending().cloned() {
            Some(token) => self.accept_with_forced(token, spec, vocabulary, events),
            None if self.max_tokens == 0 && self.prompt_left() == 0 => Ok(Some(Finish::MaxTokens)),
            None if self.is_complete() => Ok(Some(Finish::Complete)),
            None => Ok(None),
        };
        match ended {
            Ok(None) => return false,
            Ok(Some(finish)) => self.finish(finish, events),
            Err(error) => self.fail(error, events),
        }
        true
    }

    /// A sampled token, and those that the grammar leaves no choice about.
    fn accept_with_forced(
        &mut self,
        token: Token,
        spec: &EngineSpec,
        vocabulary: &dyn Vocabulary,
        events: &mut EngineEvents,
    ) -> Result<Option<Finish>> {
        self.forced.clear();
        self.forced.push(token.id);
        let mut ended = self.accept(token, spec, vocabulary, events)?;
        while ended.is_none()
            && self.request.logprobs.is_none()
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

    /// Judges a token. An end of generation is seen before a full context, and so at a full context too.
    fn accept(
        &mut self,
        token: Token,
        spec: &EngineSpec,
        vocabulary: &dyn Vocabulary,
        events: &mut EngineEvents,
    ) -> Result<Option<Finish>> {
        let now = Instant::now();
        self.clock.first_token.get_or_insert(now);
        // A grammar allows such a token under ignore_eos only where nothing else can come.
        if spec.ends_generation(token.id) && (!self.request.limits.ignore_eos || self.grammar.is_some()) {
            return Ok(Some(Finish::Eos(token.id)));
        }
        if self.request.limits.stop_ids.contains(&token.id) {
            return Ok(Some(Finish::Eos(token.id)));
        }
        if self.request.prompt.len() + self.num_generated >= spec.context_length() {
            return Ok(Some(Finish::ContextFull));
        }
        let id = token.id;
        self.clock.last_token = Some(now);
        self.num_generated += 1;
        let text = self.text_of(token.id, vocabulary);
        self.delivered.num_delivered += text.len();
        self.delivered.ends.push(self.delivered.num_bytes + usize::from(self.utf8.is_pending()));
        self.emit(events, Event::Text { text, tokens: vec![token] });
        if let Some(stop) = self.stop.hit() {
            return Ok(Some(Finish::StopString(stop.to_owned())));
        }
        if let Some(grammar) = &mut self.grammar {
            grammar.accept(id)?;
            if grammar.is_complete() {
                return Ok(Some(Finish::Complete));
            }
        }
        // A limit that the context set is reached when the context is: one more step tells whether the generation
        // would have ended by itself.
        let most = self.request.limits.max_tokens.or(self.usual);
        Ok((most == Some(self.num_generated) || self.is_stuck(id)).then_some(Finish::MaxTokens))
    }

    /// Whether the answer, with this token, has begun to repeat itself and will not stop.
    fn is_stuck(&mut self, id: u32) -> bool {
        if self.usual.is_none() {
            return false;
        }
        self.answer.push(id);
        repeats(&self.answer)
    }

    fn text_of(&mut self, id: u32, vocabulary: &dyn Vocabulary) -> String {
        if vocabulary.is_special(id) && !self.request.render_special && !self.request.markup.contains(&id) {
            return String::new();
        }
        let bytes = vocabulary.token_bytes(id).unwrap_or_default();
        let complete = self.utf8.push(&bytes);
        self.delivered.num_bytes += complete.len();
        self.stop.push(&complete)
    }

    /// Ends well. The text held back may prove to hold a stop string after all, which is then why it ended.
    pub fn finish(&mut self, finish: Finish, events: &mut EngineEvents) {
        self.flush(events);
        let finish = match self.stop.hit() {
            Some(stop) if finish != Finish::Cancelled => Finish::StopString(stop.to_owned()),
            _ => finish,
        };
        let usage = Usage {
            prompt_tokens: self.request.prompt.len() - self.prompt_left(),
            cached_tokens: self.num_cached,
            completion_tokens: self.num_generated,
        };
        let outcome = Outcome { finish, usage, timings: self.clock.timings(), seed: self.seed };
        self.emit(events, Event::Done(outcome));
    }

    /// Ends badly; the text so far is still delivered.
    pub fn fail(&mut self, error: Error, events: &mut EngineEvents) {
        self.flush(events);
        self.emit(events, Event::Failed(error));
    }

    fn flush(&mut self, events: &mut EngineEvents) {
        let unfinished = self.utf8.finish();
        let mut text = self.stop.push(&unfinished);
        text.push_str(&self.stop.finish());
        if !text.is_empty() {
            self.delivered.num_delivered += text.len();
            self.emit(events, Event::Text { text, tokens: Vec::new() });
        }
    }

    /// What is left for a session: the sequence, cut back to what was said when a stop string cut the text.
    pub fn into_sequence(mut self, can_rewind: bool) -> Sequence {
        self.sequence.clear_pending();
        if self.stop.hit().is_some() && can_rewind {
            let num_said = self.delivered.ends.partition_point(|&end| end <= self.delivered.num_delivered);
            let end = self.request.prompt.len() + num_said;
            // Where the model cannot go on from there, the session keeps what it cannot cut; the next prompt parts from it.
            let _ = self.sequence.truncate(end.min(self.sequence.position()));
        }
        self.sequence
    }

    fn emit(&self, events: &mut EngineEvents, event: Event) {
        events.push((self.id, event));
    }
}

impl Clock {
    fn timings(&self) -> Timings {
        let end = Instant::now();
        let between = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from),
            _ => Duration::ZERO,
        };
        Timings {
            queue: self.started.unwrap_or(end).saturating_duration_since(self.submitted),
            prefill: between(self.started, self.first_token.or(Some(end))),
            decode: between(self.first_token, self.last_token),
            time_to_first_token: self.first_token.map(|at| at.saturating_duration_since(self.submitted)),
            total: end.saturating_duration_since(self.submitted),
        }
    }
}
