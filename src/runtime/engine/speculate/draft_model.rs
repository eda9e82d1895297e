//! Drafts of a second, smaller model with the same vocabulary: it computes the text of a generation after the
//! generation's own model, and then continues by itself, always with its likeliest token.
//!
//! Invariants: what it costs is measured, and is spent only if the account allows it. It changes no answer
//! and fails no request: a draft model that cannot continue drafts nothing, and the generation's track says
//! why. Its pages are freed with the generation's track; they stay findable, so that the next turn of a
//! session begins with them.
//!
//! The model's own block that predicts further tokens
//! ([`PredictionBlock`](llmctl_models::model::decoder::PredictionBlock)) drafts in the same way. It cannot
//! read a text: each of its rows needs the hidden state of the token before it, of which the track has the
//! last ones. What it drafts after its own hidden states is computed again from the model's.
//!
//! A long prompt is read only as far as the account pays for it, because only accepted drafts bring the time
//! back: its first tokens, to which many models attend from everywhere, and its last ones.

use std::time::{Duration, Instant};

use super::costs::{MAX_ROWS, StepCosts};
use super::track::{DraftTrack, KnownText};
use super::{ComputingDrafter, DraftProgress};
use crate::request::{DraftStop, ModelDrafter};
use crate::sequence::Sequence;
use crate::spec::EngineSpec;
use crate::step::{Executor, FeedInput, SequenceFeed};
use llmctl_base::Sampling;
use llmctl_base::error::Result;
use llmctl_base::notice::Notice;
use llmctl_models::kv::{PAGE_TOKENS, PagePool, PageTable};
use llmctl_models::model::Model;

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
    /// Pages of the generation's own KV, which an assistant reads.
    pub table: Option<&'a PageTable>,
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
    /// Hidden states of the next rows of a block; empty for a draft model.
    hidden: Vec<f32>,
    progress: DraftProgress,
}

/// Rows of a generation in a step.
struct Fed<'f, 'a> {
    followed: &'f mut Followed<'a>,
    input: FeedInput<'f>,
    /// See [`Ask::hidden`].
    hidden: &'f [f32],
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
    drafter: ModelDrafter,
    /// True after a failed step: it computes nothing any more.
    has_failed: bool,
    notice: Option<Notice>,
}

impl DraftModel {
    /// Prepares a model to draft for the model of `spec`, and measures it.
    ///
    /// # Errors
    /// [`Error::NotSupported`](llmctl_base::Error) if it cannot drop rows; that of its first steps.
    pub fn new(model: Box<dyn Model>, spec: &EngineSpec, clock: StepClock) -> Result<Self> {
        let own = spec.for_draft_model(model.spec())?;
        let vocab_size = own.vocab_size().min(spec.vocab_size());
        // A block's rows depend on more than its tokens.
        let (drafter, pool): (_, fn(&_, _) -> _) = match model.hidden_width() {
            None => (ModelDrafter::DraftModel, PagePool::new),
            Some(_) => (ModelDrafter::PredictionBlock, PagePool::without_index),
        };
        let mut drafter = Self {
            pool: pool(&own.model.groups, own.kv_memory),
            drafter,
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

    /// Computes a few steps, twice because the first ones touch all memory for the first time.
    fn measure(&mut self) -> Result<()> {
        let rows = MEASURED_ROWS.min(self.executor.spec().context_length() - 2).max(1);
        for _ in 0..2 {
            self.read_row = 0.0;
            let mut sequence = Sequence::new(&self.pool);
            let tokens = vec![0; rows];
            let hidden = vec![0.0; rows * self.executor.hidden_width().unwrap_or(0)];
            self.step(&mut [(&mut sequence, FeedInput::LastChunk(&tokens))], &hidden)?;
            self.step(&mut [(&mut sequence, FeedInput::Pending)], &hidden[..hidden.len() / rows])?;
        }
        Ok(())
    }

    /// Runs one step, and learns what it costs.
    fn step(&mut self, feeds: &mut [(&mut Sequence, FeedInput<'_>)], hidden: &[f32]) -> Result<()> {
        let greedy = Sampling::default();
        let num_rows: usize = feeds.iter().map(|(_, input)| num_rows(*input)).sum();
        let begun = (self.clock)();
        let mut feeds: Vec<SequenceFeed<'_>> =
            feeds.iter_mut().map(|(sequence, input)| SequenceFeed::new(sequence, *input, &greedy)).collect();
        let hidden = self.executor.hidden_width().map(|_| hidden);
        let result = self.executor.step_after(&mut feeds, hidden).into_iter().collect::<Result<Vec<_>>>();
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
            let spent = self.feed_chunk(followed, &lacking[..rows], &[]);
            if let Some(budget) = budget {
                *budget -= spent;
                let is_done = lacking.len() - rows <= MAX_ROWS;
                return followed.track.sequence().filter(|_| is_done).map(|_| lacking.len() - rows);
            }
        }
    }

    /// Lets a block read hidden states until few enough are left to be read with the draft, and gives up the oldest ones if
    /// `budget` is too small for all. Returns the number that is left; `None` without any, or if the track has ended.
    fn read_hidden(&mut self, followed: &mut Followed<'_>, budget: &mut Option<f64>) -> Option<usize> {
        if !followed.track.has_begun() {
            followed.track.begin_block(Sequence::new(&self.pool));
        }
        loop {
            let unread = followed.track.align_block(followed.text);
            if unread <= MAX_ROWS {
                return (unread > 0 && followed.track.has_begun()).then_some(unread);
            }
            // One row is left for the draft to begin after.
            let affordable = budget.map_or(unread, |budget| (budget / self.read_row) as usize);
            if affordable < unread - 1 {
                followed.track.skip_unread(affordable.max(MAX_ROWS - 1) + 1);
            }
            if affordable >= MAX_ROWS {
                let rows = (unread - 1).min(affordable).min(self.executor.spec().config.step_tokens);
                let (tokens, hidden) = followed.track.unread(followed.text, rows);
                let spent = self.feed_chunk(followed, &tokens, &hidden);
                followed.track.note_read(rows);
                if let Some(budget) = budget {
                    *budget -= spent;
                }
            }
        }
    }

    /// Feeds a part of one generation's text. Returns the seconds that it took.
    fn feed_chunk(&mut self, followed: &mut Followed<'_>, tokens: &[u32], hidden: &[f32]) -> f64 {
        let begun = (self.clock)();
        self.feed(&mut [Fed { followed, input: FeedInput::Chunk(tokens), hidden }]);
        (self.clock)().saturating_sub(begun).as_secs_f64()
    }

    /// Feeds generations that the pool has room for. The tracks of the others end; all end if the model fails. Returns the
    /// hidden state of the last row of each, which is empty for a draft model.
    fn feed(&mut self, fed: &mut [Fed<'_, '_>]) -> Vec<Vec<f32>> {
        let mut room = self.pool.free_bytes();
        for Fed { followed, input, .. } in fed.iter_mut() {
            let sequence = followed.track.sequence();
            let needed = sequence.map(|sequence| sequence.resident().table().bytes_needed(num_rows(*input)));
            match needed.and_then(|needed| room.checked_sub(needed)) {
                Some(left) => room = left,
                None if needed.is_some() => followed.track.end(DraftStop::Memory),
                None => {}
            }
        }
        let hidden: Vec<f32> = fed
            .iter()
            .filter(|fed| fed.followed.track.has_begun())
            .flat_map(|fed| fed.hidden)
            .copied()
            .collect();
        let mut feeds: Vec<(&mut Sequence, FeedInput<'_>)> = fed
            .iter_mut()
            .filter_map(|Fed { followed, input, .. }| Some((followed.track.sequence()?, *input)))
            .collect();
        if let Err(error) = self.step(&mut feeds, &hidden) {
            fed.iter_mut().for_each(|fed| fed.followed.track.end(DraftStop::Failed));
            self.has_failed = true;
            let (drafter, reason) = (self.drafter.name(), error.to_string());
            self.notice = Some(Notice::DrafterFailed { drafter, reason });
            return vec![Vec::new(); fed.len()];
        }
        let mut end = 0;
        let last_hidden = |fed: &Fed<'_, '_>| {
            end += if fed.followed.track.has_begun() { num_rows(fed.input) } else { return Vec::new() };
            self.executor.hidden(end - 1..end).to_vec()
        };
        fed.iter().map(last_hidden).collect()
    }

    fn ask<'a>(&self, mut followed: Followed<'a>, len: usize) -> Ask<'a> {
        let Followed { track, text, .. } = &mut followed;
        let (lacking, hidden) = match self.drafter {
            ModelDrafter::PredictionBlock => track.unread(*text, usize::MAX),
            _ => (track.align(*text), Vec::new()),
        };
        Ask { followed, lacking, hidden, progress: DraftProgress::new(len) }
    }
}

impl ComputingDrafter for DraftModel {
    fn drafter(&self) -> ModelDrafter {
        self.drafter
    }

    fn take_notice(&mut self) -> Option<Notice> {
        self.notice.take()
    }

    fn cost(&self, num_rows: usize) -> f64 {
        match num_rows <= MAX_ROWS {
            // It computes nothing, so that nobody is told that it is too slow.
            _ if self.has_failed => 0.0,
            true => self.steps.of(num_rows),
            false => self.read_row * num_rows as f64,
        }
    }

    fn prepare(&mut self, followed: &mut Followed<'_>, budget: &mut Option<f64>) -> Option<(usize, usize)> {
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
        if self.drafter == ModelDrafter::PredictionBlock {
            return Some((self.read_hidden(followed, budget)?, followed.most));
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

    fn draft(&mut self, _: &mut Executor, asked: Vec<(Followed<'_>, usize)>, least: f64) -> f64 {
        let begun = (self.clock)();
        let mut asks: Vec<Ask<'_>> =
            asked.into_iter().map(|(followed, len)| self.ask(followed, len)).collect();
        let mut is_first = true;
        while asks.iter().any(|ask| ask.progress.goes_on()) {
            let mut drafting: Vec<_> = asks.iter_mut().filter(|ask| ask.progress.goes_on()).collect();
            let mut fed: Vec<_> = drafting.iter_mut().map(|ask| ask.next_rows(is_first)).collect();
            let hidden = self.feed(&mut fed);
            for (ask, hidden) in drafting.into_iter().zip(hidden) {
                if is_first && self.drafter == ModelDrafter::PredictionBlock {
                    ask.followed.track.note_read(ask.lacking.len());
                }
                ask.hidden = hidden;
                ask.take_drafted(self.vocab_size, least);
            }
            is_first = false;
        }
        (self.clock)().saturating_sub(begun).as_secs_f64()
    }
}

impl<'a> Ask<'a> {
    /// Returns the rows of a step: what is lacking in the first one, then the token drafted last.
    fn next_rows(&mut self, is_first: bool) -> Fed<'_, 'a> {
        let Self { followed, lacking, hidden, .. } = self;
        let input = if is_first { FeedInput::LastChunk(lacking) } else { FeedInput::Pending };
        Fed { followed, input, hidden }
    }

    /// Appends the token that the drafter comes to; without one, or if it is improbable, the draft ends.
    fn take_drafted(&mut self, vocab_size: usize, least: f64) {
        let pending = self.followed.track.sequence().and_then(|sequence| sequence.pending().cloned());
        let token = pending.filter(|token| (token.id as usize) < vocab_size);
        let logprob = token.as_ref().and_then(|token| token.logprob.as_ref()).map_or(0.0, |of| of.logprob);
        match token.filter(|_| self.progress.takes(logprob, least)) {
            Some(token) => self.followed.draft.push(token.id),
            None => self.progress.end(),
        }
    }
}

fn num_rows(input: FeedInput<'_>) -> usize {
    match input {
        FeedInput::Chunk(tokens) | FeedInput::LastChunk(tokens) => tokens.len(),
        FeedInput::Pending => 1,
    }
}
