//! Drafts of a second, smaller model with the same vocabulary: it computes the text of a generation after the
//! generation's own model, and then goes on by itself, always with its likeliest token.
//!
//! Invariants: what it costs is measured, and is spent only if the account allows it. It changes no answer and fails no
//! request: a draft model that cannot go on drafts nothing, and the generation's track says why. Its pages are freed
//! with the generation's track; they stay findable, so that the next turn of a session begins with them.
//!
//! A long prompt is read only as far as the account pays for it, because only accepted drafts bring the time back: its first
//! tokens, to which many models attend from everywhere, and its last ones.

use std::time::{Duration, Instant};

use super::costs::{MAX_ROWS, StepCosts};
use super::track::{DraftTrack, KnownText};
use crate::runtime::error::Result;
use crate::runtime::kv::{PAGE_TOKENS, PagePool, PageTable};
use crate::runtime::model::Model;
use crate::runtime::notice::Notice;
use crate::runtime::request::{DraftStop, Sampling};
use crate::runtime::sequence::Sequence;
use crate::runtime::spec::EngineSpec;
use crate::runtime::step::{Executor, FeedInput, SequenceFeed};

/// First tokens of a text that are read if those after them are skipped.
const NUM_FIRST: usize = 4;

/// Least number of tokens read of a longer text.
const MIN_READ: usize = 24;

/// Part of what may be spent on reading that pays for reading a text again which was read in part.
const REREAD: f64 = 0.25;

/// Rows of a step that measures the cost of reading.
const MEASURED_ROWS: usize = 4 * MAX_ROWS;

/// Weight of a new measurement of reading.
const NEW_WEIGHT: f64 = 0.25;

/// Returns the time since some moment.
pub type StepClock = Box<dyn Fn() -> Duration + Send>;

/// Returns a clock that starts now.
pub fn wall_clock() -> StepClock {
    let start = Instant::now();
    Box::new(move || start.elapsed())
}

/// A generation that the draft model may draft for.
#[derive(Debug)]
pub struct Followed<'a> {
    pub track: &'a mut DraftTrack,
    pub text: KnownText<'a>,
    /// Receives the draft.
    pub draft: &'a mut Vec<u32>,
    /// Most tokens of the draft.
    pub most: usize,
    /// Probability that a token is accepted if those before it were.
    pub acceptance: f64,
}

/// A draft that a generation gets.
struct Ask<'a> {
    followed: Followed<'a>,
    /// Tokens to compute before the draft.
    lacking: Vec<u32>,
    len: usize,
}

/// The draft model, its pages and what its steps cost.
pub struct DraftModel {
    executor: Executor,
    pool: PagePool,
    /// Tokens of the vocabulary that both models have.
    vocab_size: usize,
    steps: StepCosts,
    /// Seconds per row of steps with more than [`MAX_ROWS`] rows.
    read_row: f64,
    clock: StepClock,
    /// Whether a step failed: it computes nothing any more.
    has_failed: bool,
    notice: Option<Notice>,
}

impl DraftModel {
    /// Prepares a model to draft for the model of `spec`, and measures it.
    ///
    /// # Errors
    /// [`Error::NotSupported`](crate::runtime::Error) if it cannot drop rows; that of its first steps.
    pub fn new(model: Box<dyn Model>, spec: &EngineSpec, clock: StepClock) -> Result<Self> {
        let own = spec.for_draft_model(model.spec())?;
        let vocab_size = own.vocab_size().min(spec.vocab_size());
        let mut drafter = Self {
            pool: PagePool::new(&own.model.groups, own.kv_memory),
            executor: Executor::new(model, own),
            vocab_size,
            steps: StepCosts::default(),
            read_row: 0.0,
            clock,
            has_failed: false,
            notice: None,
        };
        drafter.measure()?;
        Ok(drafter)
    }

    /// Returns what the user should know of it, once.
    pub fn take_notice(&mut self) -> Option<Notice> {
        self.notice.take()
    }

    /// Computes a few steps, twice because the first ones touch all memory for the first time.
    fn measure(&mut self) -> Result<()> {
        let rows = MEASURED_ROWS.min(self.executor.spec().context_length() - 2).max(1);
        for _ in 0..2 {
            self.read_row = 0.0;
            let mut sequence = Sequence::new(&self.pool);
            let tokens = vec![0; rows];
            self.step(&mut [(&mut sequence, FeedInput::LastChunk(&tokens))])?;
            self.step(&mut [(&mut sequence, FeedInput::Pending)])?;
        }
        Ok(())
    }

    /// Runs one step, and learns what it costs.
    fn step(&mut self, feeds: &mut [(&mut Sequence, FeedInput<'_>)]) -> Result<()> {
        let greedy = Sampling::default();
        let num_rows: usize = feeds.iter().map(|(_, input)| num_rows(*input)).sum();
        let begun = (self.clock)();
        let mut feeds: Vec<SequenceFeed<'_>> = feeds
            .iter_mut()
            .map(|(sequence, input)| SequenceFeed {
                sequence,
                input: *input,
                drafted: &[],
                sampling: &greedy,
                grammar: None,
                forced: None,
                scores: None,
            })
            .collect();
        let result = self.executor.step(&mut feeds).into_iter().collect::<Result<Vec<_>>>();
        let took = (self.clock)().saturating_sub(begun);
        self.learn(num_rows, took);
        result.map(drop)
    }

    fn learn(&mut self, num_rows: usize, took: Duration) {
        if num_rows <= MAX_ROWS {
            return self.steps.learn(num_rows, num_rows, took);
        }
        let row = took.as_secs_f64() / num_rows as f64;
        let weight = if self.read_row == 0.0 { 1.0 } else { NEW_WEIGHT };
        self.read_row += (row - self.read_row) * weight;
    }

    /// Returns the seconds of a step of `num_rows` rows.
    fn cost(&self, num_rows: usize) -> f64 {
        if num_rows <= MAX_ROWS { self.steps.of(num_rows) } else { self.read_row * num_rows as f64 }
    }

    /// Returns the seconds of drafts of `lens` tokens, each after as many tokens as `lacking` says.
    pub fn drafting_cost(&self, lacking: &[usize], lens: &[usize]) -> f64 {
        let first: usize = lacking.iter().zip(lens).filter(|(_, len)| **len > 0).map(|(rows, _)| rows).sum();
        let rows =
            |step: usize| lens.iter().zip(lacking).filter(|(len, rows)| **len > step && **rows > 0).count();
        let longest = lens.iter().zip(lacking).filter(|(_, rows)| **rows > 0).map(|(len, _)| *len).max();
        let later: f64 = (1..longest.unwrap_or(0)).map(|step| self.cost(rows(step))).sum();
        if first == 0 { 0.0 } else { self.cost(first) + later }
    }

    /// Prepares a draft: computes of the text what is far behind, as far as `budget` seconds allow, in one step or, without
    /// a budget, in as many as it takes. Returns the number of tokens to compute before the draft, and how long the draft
    /// can be; `None` if there can be none in this step. Takes what it spends from `budget`.
    pub fn prepare(
        &mut self,
        followed: &mut Followed<'_>,
        budget: &mut Option<f64>,
    ) -> Option<(usize, usize)> {
        if self.has_failed {
            followed.track.end(DraftStop::Failed);
        }
        if followed.track.stop().is_some() || followed.most == 0 {
            return None;
        }
        if followed.track.len_of(followed.text) + followed.most > self.executor.spec().context_length() {
            followed.track.end(DraftStop::Context);
            return None;
        }
        let can_begin = !followed.track.has_begun() || self.reads_again(followed, *budget);
        if can_begin && !self.begin(followed, *budget) {
            return None;
        }
        let lacking = self.read(followed, budget)?;
        let sequence = followed.track.sequence()?;
        // A recurrent state that has taken in a refused token is of no use: it is left only after known tokens.
        let known = sequence.position() + lacking;
        let most = match sequence.resident().table().has_state() {
            true => followed.most.min(PAGE_TOKENS - known % PAGE_TOKENS),
            false => followed.most,
        };
        Some((lacking, most))
    }

    fn reads_again(&self, followed: &Followed<'_>, budget: Option<f64>) -> bool {
        let cost = self.cost(followed.text.len());
        followed.track.has_skipped() && budget.is_none_or(|budget| cost <= budget * REREAD)
    }

    /// Begins the sequence of a generation with what is known of its text already. Returns false if that has to wait.
    fn begin(&self, followed: &mut Followed<'_>, budget: Option<f64>) -> bool {
        let least = self.cost(MIN_READ.min(followed.text.len()));
        if budget.is_some_and(|budget| least > budget) {
            return false;
        }
        let text: Vec<u32> = followed.text.from(0).collect();
        if text.iter().any(|&token| token as usize >= self.vocab_size) {
            followed.track.end(DraftStop::Token);
            return false;
        }
        let (table, _) = PageTable::from_index(&self.pool, &text, text.len() - 1);
        let lacking = text.len() - table.len();
        let affordable = match budget {
            Some(budget) if self.cost(lacking) > budget => (budget / self.read_row) as usize,
            _ => lacking,
        };
        if affordable < lacking.min(MIN_READ) {
            return false;
        }
        let (sequence, skipped) = match affordable < lacking {
            true => (Sequence::new(&self.pool), NUM_FIRST..text.len() - (affordable - NUM_FIRST)),
            false => (Sequence::resume(&text[..table.len()], table), 0..0),
        };
        followed.track.begin(sequence, skipped, text.len());
        true
    }

    /// Computes what the generation's sequence lacks until few enough tokens are left to be computed with the draft.
    /// Returns their number; `None` if more are left, or the track has ended.
    fn read(&mut self, followed: &mut Followed<'_>, budget: &mut Option<f64>) -> Option<usize> {
        loop {
            let lacking = followed.track.align(followed.text);
            let step_tokens = self.executor.spec().config.step_tokens;
            let sequence = followed.track.sequence()?;
            let rows = sequence.rows_allowed(lacking.len());
            if rows == lacking.len() && rows <= MAX_ROWS {
                return Some(rows);
            }
            // One token is left for the draft to begin after.
            let rows = rows.min(step_tokens).min(lacking.len() - 1);
            if budget.is_some_and(|budget| self.cost(rows) > budget) {
                return None;
            }
            let begun = (self.clock)();
            self.feed(&mut [(&mut *followed, FeedInput::Chunk(&lacking[..rows]))]);
            let spent = (self.clock)().saturating_sub(begun).as_secs_f64();
            if let Some(budget) = budget {
                *budget -= spent;
                let is_done = lacking.len() - rows <= MAX_ROWS;
                return followed.track.sequence().filter(|_| is_done).map(|_| lacking.len() - rows);
            }
        }
    }

    /// Feeds generations that the pool has room for. The tracks of the others end; all end if the model fails.
    fn feed(&mut self, fed: &mut [(&mut Followed<'_>, FeedInput<'_>)]) {
        let mut room = self.pool.free_bytes();
        for (followed, input) in fed.iter_mut() {
            let needed = followed
                .track
                .sequence()
                .map(|sequence| sequence.resident().table().bytes_needed(num_rows(*input)));
            match needed.and_then(|needed| room.checked_sub(needed)) {
                Some(left) => room = left,
                None if needed.is_some() => followed.track.end(DraftStop::Memory),
                None => {}
            }
        }
        let mut feeds: Vec<(&mut Sequence, FeedInput<'_>)> = fed
            .iter_mut()
            .filter_map(|(followed, input)| Some((followed.track.sequence()?, *input)))
            .collect();
        if let Err(error) = self.step(&mut feeds) {
            fed.iter_mut().for_each(|(followed, _)| followed.track.end(DraftStop::Failed));
            self.has_failed = true;
            self.notice = Some(Notice::DraftModelFailed(error.to_string()));
        }
    }

    /// Drafts up to `len` tokens for each generation. Returns the seconds that it took.
    pub fn draft(&mut self, asked: Vec<(Followed<'_>, usize)>) -> f64 {
        let begun = (self.clock)();
        let asks = asked.into_iter().map(|(followed, len)| {
            let lacking = followed.track.align(followed.text);
            Ask { followed, lacking, len }
        });
        let mut asks: Vec<Ask<'_>> = asks.collect();
        let longest = asks.iter().map(|ask| ask.len).max().unwrap_or(0);
        for step in 0..longest {
            let drafting = asks.iter_mut().filter(|ask| ask.len > step);
            let input = |lacking| if step == 0 { FeedInput::LastChunk(lacking) } else { FeedInput::Pending };
            let mut fed: Vec<_> =
                drafting.map(|Ask { followed, lacking, .. }| (followed, input(&lacking[..]))).collect();
            self.feed(&mut fed);
            for ask in asks.iter_mut().filter(|ask| ask.len > step) {
                ask.take_drafted(self.vocab_size);
            }
        }
        (self.clock)().saturating_sub(begun).as_secs_f64()
    }
}

impl Ask<'_> {
    /// Appends the token that the draft model comes to; without one, the draft ends.
    fn take_drafted(&mut self, vocab_size: usize) {
        let pending = self.followed.track.sequence().and_then(|sequence| sequence.pending().cloned());
        match pending.filter(|token| (token.id as usize) < vocab_size) {
            Some(token) => self.followed.draft.push(token.id),
            None => self.len = 0,
        }
    }
}

fn num_rows(input: FeedInput<'_>) -> usize {
    match input {
        FeedInput::Chunk(tokens) | FeedInput::LastChunk(tokens) => tokens.len(),
        FeedInput::Pending => 1,
    }
}
