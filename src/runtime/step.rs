//! One step of the model for any mix of sequences: extend, forward, sample. The only caller of
//! `Model::forward`, for prompt chunks and generated tokens, sessions and requests.
//!
//! Invariants: an error or panic in the forward pass fails and poisons every sequence of the batch, so that
//! no wrong rows look valid. An error in sampling fails its own sequence only; if the grammar failed, the
//! sequence keeps its rows. Drafted rows get logits too; they are sampled from only after the tokens before
//! them were sampled and accepted, by the same path and with the same inputs as without a draft.

use std::borrow::Cow;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rayon::iter::{IntoParallelIterator, ParallelIterator};

use super::grammar::{GrammarState, TokenMask};
use super::request::{Logprob, Token};
use super::sample::{Sampler, Turn};
use super::sequence::{Resident, Sequence};
use super::spec::EngineSpec;
use llmctl_base::Sampling;
use llmctl_base::error::{Error, GrammarError, Result, panic_text};
use llmctl_models::adapters::AdapterUse;
use llmctl_models::images::{ImageKey, ImageRows, ImageSpan, RowRule, TwoWay, VisionSpec, angles_of};
use llmctl_models::kv::{PagePool, PageRef, PageTable, Tokens};
use llmctl_models::model::{Batch, BatchImage, Logits, Model, Row};
use llmctl_models::tensor::SharedBytes;
use llmctl_models::text::Vocabulary;

/// From this many masks on, they are computed in parallel; waking the threads costs as much as a few masks.
const MASKS_WORTH_THREADS: usize = 8;

/// Most bytes of KV memory that are made ready before they are needed.
const MOST_PREPARED: usize = 128 << 20;

/// Input of one sequence to a step. Afterwards its pending token is the sampled one, if any.
#[derive(Debug)]
pub struct SequenceFeed<'a> {
    pub sequence: &'a mut Sequence,
    pub input: FeedInput<'a>,
    /// Images of the whole sequence, those of other rows too.
    pub images: FedImages<'a>,
    /// Tokens that are computed after the input because they may be sampled next; only after an input that
    /// is sampled after.
    pub drafted: &'a [u32],
    pub sampling: &'a Sampling,
    /// Constraint of the sampled token. Nothing is sampled if the grammar is complete.
    pub grammar: Option<&'a mut GrammarState>,
    /// Token that is taken in place of a sampled one, unless the grammar forbids it.
    pub forced: Option<u32>,
    /// Log-probabilities to compute for a chunk.
    pub scores: Option<Scores<'a>>,
}

impl<'a> SequenceFeed<'a> {
    /// A feed of text alone, without a draft and a constraint.
    pub fn new(sequence: &'a mut Sequence, input: FeedInput<'a>, sampling: &'a Sampling) -> Self {
        let (images, drafted) = (FedImages::default(), &[][..]);
        Self { sequence, input, images, drafted, sampling, grammar: None, forced: None, scores: None }
    }
}

/// Images of a sequence, with the embeddings of those that are fed.
#[derive(Debug, Clone, Copy, Default)]
pub struct FedImages<'a> {
    pub spans: &'a [ImageSpan],
    pub rows: &'a [(ImageKey, Arc<ImageRows>)],
}

/// Rows of a step that take embeddings of an image.
#[derive(Debug)]
struct EmbeddedRows {
    rows: Range<usize>,
    embeddings: Arc<ImageRows>,
    first: usize,
}

impl EmbeddedRows {
    fn in_batch(&self) -> BatchImage<'_> {
        BatchImage { rows: self.rows.clone(), embeddings: &self.embeddings, first: self.first }
    }
}

/// Request for the log-probabilities of a chunk's following tokens.
#[derive(Debug)]
pub struct Scores<'a> {
    /// The token after each token of the chunk; the last token of a prompt has none.
    pub following: &'a [u32],
    pub num_alternatives: usize,
    /// Receives one entry per token of `following`.
    pub found: &'a mut Vec<Logprob>,
}

#[derive(Debug, Clone, Copy)]
pub enum FeedInput<'a> {
    /// Part of a prompt or of forced tokens; nothing is sampled after it.
    Chunk(&'a [u32]),
    /// The end of a prompt or of forced tokens; a token is sampled after it.
    LastChunk(&'a [u32]),
    /// The sequence's pending token.
    Pending,
}

/// Rows of a feed in the last step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FedRows {
    /// The first row of the feed, and the position of its token.
    pub first: usize,
    pub position: usize,
    /// Row of the logits of the next drafted token, from which nothing was sampled.
    pub next_drafted: usize,
}

/// The model, its spec and the sampler.
pub struct Executor {
    model: Box<dyn Model>,
    spec: EngineSpec,
    sampler: Sampler,
    /// Logits of the last step.
    logits: Logits,
    /// Kept between steps to reuse the allocation.
    rows: Vec<Row>,
    images: Vec<EmbeddedRows>,
    /// Time in which states took in drafted tokens of the last step.
    ending_drafts: Duration,
}

impl Executor {
    pub fn new(model: Box<dyn Model>, spec: EngineSpec) -> Self {
        Self {
            model,
            spec,
            sampler: Sampler::default(),
            logits: Logits::default(),
            rows: Vec::new(),
            images: Vec::new(),
            ending_drafts: Duration::ZERO,
        }
    }

    /// Tells the texts of tokens, where samplers need them.
    pub fn set_vocabulary(&mut self, vocabulary: Arc<dyn Vocabulary>) {
        self.sampler.set_vocabulary(vocabulary);
    }

    pub fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    /// Takes images from here on.
    pub fn set_vision(&mut self, vision: &VisionSpec) {
        self.spec.set_vision(vision);
    }

    /// Returns the width of the hidden states that the model reads; see [`Model::hidden_width`].
    pub fn hidden_width(&self) -> Option<usize> {
        self.model.hidden_width()
    }

    /// Returns the hidden states of these rows of the last step, which succeeded; empty if the model keeps none.
    pub fn hidden(&self, rows: Range<usize>) -> &[f32] {
        let all = self.model.hidden();
        let width = all.len().checked_div(self.rows.len()).unwrap_or(0);
        &all[rows.start * width..rows.end * width]
    }

    /// Appends the content of a page to `out`.
    ///
    /// # Errors
    /// [`Error::Backend`], here and below.
    pub fn export_page(&self, page_ref: PageRef, out: &mut Vec<u8>) -> Result<()> {
        guarded(|| self.model.export_page(page_ref, out))
    }

    /// Makes memory ready for a page of KV. Returns false if enough of `pool`'s capacity is; see [`Model::prepare_page`].
    pub fn prepare_page(&mut self, pool: &PagePool) -> bool {
        let unused = pool.capacity() - pool.allocated_bytes();
        self.model.prepare_page(MOST_PREPARED.min(pool.capacity() / 8).min(unused))
    }

    /// Fills a page of `pool` that has no other holder.
    pub fn import_page(&mut self, pool: &PagePool, page_ref: PageRef, bytes: SharedBytes) -> Result<()> {
        free_dropped(&mut *self.model, pool);
        guarded(|| self.model.import_page(page_ref, bytes))
    }

    /// Runs one step. Returns one result per feed, in order.
    ///
    /// # Errors
    /// Per feed: [`Error::Backend`], with the sequence poisoned; [`Error::InvalidState`] with the sequence
    /// unchanged if it has no pending token to feed; [`Error::Grammar`] with the sequence fed and nothing
    /// sampled.
    pub fn step(&mut self, feeds: &mut [SequenceFeed<'_>]) -> Vec<Result<FedRows>> {
        self.step_after(feeds, None)
    }

    /// Runs one step as [`Self::step`] does. For a block that predicts further tokens, `hidden` has a hidden state for each
    /// row; see [`Model::predict`].
    ///
    /// # Errors
    /// Those of `step`.
    pub fn step_after(
        &mut self,
        feeds: &mut [SequenceFeed<'_>],
        hidden: Option<&[f32]>,
    ) -> Vec<Result<FedRows>> {
        self.rows.clear();
        self.images.clear();
        self.ending_drafts = Duration::ZERO;
        self.model.reuse(std::mem::take(&mut self.logits));
        let mut num_tables = 0;
        let mut results = Vec::with_capacity(feeds.len());
        for feed in feeds.iter_mut() {
            let fed = FedRows { first: self.rows.len(), position: feed.sequence.position(), next_drafted: 0 };
            let result = self.append_rows(feed, num_tables);
            num_tables += usize::from(result.is_ok());
            results.push(result.map(|()| fed));
        }
        if num_tables > 0 {
            match self.forward(feeds, &results, hidden) {
                Ok(logits) => {
                    self.logits = logits;
                    self.sample(feeds, &mut results);
                }
                Err(error) => results.iter_mut().filter(|r| r.is_ok()).for_each(|r| *r = Err(error.clone())),
            }
        }
        results
    }

    /// Lets the model's assistant tell what follows a token behind each table, given the hidden states of the tokens before
    /// these, `[rows, width]`. Returns the likeliest token of each row, with its log-probability; [`Self::hidden`] has what takes
    /// the place of the tokens' hidden states.
    ///
    /// # Errors
    /// [`Error::Backend`], also if there is no assistant; no sequence is touched.
    pub fn predict(&mut self, rows: &[(u32, &PageTable)], hidden: &[f32]) -> Result<Vec<Token>> {
        self.model.reuse(std::mem::take(&mut self.logits));
        let row = |(index, (token, table)): (usize, &(u32, &PageTable))| {
            Row::known(*token, table.len().saturating_sub(1), index, true)
        };
        self.rows.clear();
        self.images.clear();
        self.rows.extend(rows.iter().enumerate().map(row));
        let tables: Vec<_> = rows.iter().map(|(_, table)| *table).collect();
        self.logits = self.run((&tables, &[]), Some(hidden))?;
        let (greedy, turn) = (Sampling::default(), Turn { logprobs: Some(0), ..Turn::default() });
        let sample = |index| self.sampler.sample(self.logits.row(index), &greedy, &turn);
        (0..rows.len()).map(sample).collect()
    }

    fn forward(
        &mut self,
        feeds: &[SequenceFeed<'_>],
        results: &[Result<FedRows>],
        hidden: Option<&[f32]>,
    ) -> Result<Logits> {
        let fed = feeds.iter().zip(results).filter(|(_, result)| result.is_ok());
        let fed: Vec<&Resident> = fed.map(|(feed, _)| feed.sequence.resident()).collect();
        let tables: Vec<_> = fed.iter().map(|resident| resident.table()).collect();
        let adapters: Vec<_> = fed.iter().map(|resident| resident.content().adapters).collect();
        self.run((&tables, &adapters), hidden)
    }

    /// Computes the rows, whose sequences have these tables and adapters.
    fn run(
        &mut self,
        (tables, adapters): (&[&PageTable], &[&[AdapterUse]]),
        hidden: Option<&[f32]>,
    ) -> Result<Logits> {
        let images: Vec<BatchImage<'_>> = self.images.iter().map(EmbeddedRows::in_batch).collect();
        let batch = Batch { rows: &self.rows, tables, images: &images, adapters };
        let model = &mut self.model;
        let mut logits = guarded(|| match hidden {
            None => model.forward(&batch),
            Some(hidden) => model.predict(&batch, hidden),
        })?;
        let wanted = self.rows.iter().filter(|row| row.wants_logits).count();
        let vocab_size = self.spec.vocab_size();
        if logits.values.len() != wanted * vocab_size || (wanted > 0 && logits.vocab_size != vocab_size) {
            let message = format!("{} rows of logits of {}, not {wanted}", logits.len(), logits.vocab_size);
            return Err(Error::Backend(message));
        }
        // No answer holds a placeholder, because no prompt may that has no image there.
        if let Some(placeholder) = self.spec.placeholder().map(|id| id as usize).filter(|id| *id < vocab_size)
        {
            logits.values.chunks_exact_mut(vocab_size).for_each(|row| row[placeholder] = f32::NEG_INFINITY);
        }
        Ok(logits)
    }

    /// Extends the feed's sequence and appends its rows. After an error no rows are appended, and the sequence is
    /// unchanged, or poisoned if a page could not be copied.
    ///
    /// Copies are made at once, because a page released in this step may be given to the next sequence of it.
    fn append_rows(&mut self, feed: &mut SequenceFeed<'_>, sequence: usize) -> Result<()> {
        let pending;
        let tokens = match feed.input {
            FeedInput::Chunk(tokens) | FeedInput::LastChunk(tokens) => tokens,
            FeedInput::Pending => {
                pending = [feed.sequence.pending().ok_or(Error::InvalidState("no pending token"))?.id];
                &pending
            }
        };
        let start = feed.sequence.position();
        let exhausted = |_| Error::Backend("no KV page is free".to_owned());
        let all: Cow<'_, [u32]> = match feed.drafted {
            [] => Cow::Borrowed(tokens),
            drafted => Cow::Owned([tokens, drafted].concat()),
        };
        let images = embedded(feed.images, start..start + tokens.len(), self.rows.len())?;
        let copies =
            feed.sequence.begin_feed(&all, feed.images.spans, feed.drafted.len()).map_err(exhausted)?;
        free_dropped(&mut *self.model, feed.sequence.resident().table().pool());
        for copy in copies {
            guarded(|| self.model.copy_page(copy.from, copy.to))?;
        }
        self.images.extend(images);
        let first_row = self.rows.len();
        let last = tokens.len().checked_sub(1).filter(|_| !matches!(feed.input, FeedInput::Chunk(_)));
        let row = |(index, &token)| {
            let wants_logits = last.is_some_and(|last| index >= last) || self.is_scored(feed, index);
            let is_drafted = index >= tokens.len();
            Row { is_drafted, ..Row::known(token, start + index, sequence, wants_logits) }
        };
        let rows: Vec<Row> = all.iter().enumerate().map(row).collect();
        self.rows.extend(rows);
        if let Some(vision) = self.spec.vision.as_ref().filter(|_| !feed.images.spans.is_empty()) {
            place(&mut self.rows[first_row..], feed.images.spans, vision.rows);
        }
        Ok(())
    }

    /// Returns whether the log-probability after a row of the feed is wanted: an image's row follows with none.
    fn is_scored(&self, feed: &SequenceFeed<'_>, index: usize) -> bool {
        let following = feed.scores.as_ref().and_then(|scores| scores.following.get(index));
        following.is_some_and(|id| Some(*id) != self.spec.placeholder())
    }

    fn sample(&mut self, feeds: &mut [SequenceFeed<'_>], results: &mut [Result<FedRows>]) {
        let mut next_row = 0;
        let mut masks = masks(feeds, results).into_iter();
        for (feed, result) in feeds.iter_mut().zip(results).filter(|(_, result)| result.is_ok()) {
            let first_row = next_row;
            let samples = !matches!(feed.input, FeedInput::Chunk(_));
            let row = first_row + self.num_scored(feed);
            next_row = row + usize::from(samples) + feed.drafted.len();
            let mask = feed.grammar.as_ref().filter(|_| samples).and_then(|_| masks.next());
            let fed = result.as_ref().copied().unwrap_or_default();
            let sampled = match self.score(feed, first_row) {
                Ok(()) if samples => self.sample_row(feed, mask, row),
                Ok(()) => {
                    feed.sequence.settle(None);
                    Ok(())
                }
                Err(error) => Err(error),
            };
            *result = sampled.map(|()| FedRows { next_drafted: row + 1, ..fed });
        }
    }

    /// Samples the token after the feed's last known one, whose logits are the row `row` of the last step.
    ///
    /// # Errors
    /// As [`Executor::step`].
    pub fn sample_drafted(&mut self, feed: &mut SequenceFeed<'_>, row: usize) -> Result<()> {
        let mask = feed.grammar.as_deref_mut().map(GrammarState::mask);
        self.sample_row(feed, mask, row)
    }

    /// Returns the time that `end_draft` has taken since the last step.
    pub fn ending_drafts(&self) -> Duration {
        self.ending_drafts
    }

    /// Ends the draft of the last step: the sequence's states take in the drafted tokens that were confirmed, and the
    /// others go.
    ///
    /// # Errors
    /// [`Error::Backend`], with the sequence poisoned.
    pub fn end_draft(&mut self, sequence: &mut Sequence) -> Result<()> {
        let count = sequence.num_confirmed();
        if count > 0 && !sequence.is_poisoned() {
            let (model, begun) = (&mut self.model, Instant::now());
            let mut states = sequence.resident().table().states();
            let kept = guarded(|| states.try_for_each(|state| model.keep_drafted(state, count)));
            drop(states);
            self.ending_drafts += begun.elapsed();
            kept.inspect_err(|_| sequence.poison())?;
        }
        sequence.end_draft();
        Ok(())
    }

    /// Samples from a row of logits; `mask` is what the feed's grammar allows.
    fn sample_row(
        &mut self,
        feed: &mut SequenceFeed<'_>,
        mask: Option<Result<Option<TokenMask>, GrammarError>>,
        row: usize,
    ) -> Result<()> {
        let mask = match mask {
            None => feed.forced.map(TokenMask::Forced),
            Some(Ok(Some(mask))) => {
                Some(feed.forced.filter(|&id| mask.allows(id)).map_or(mask, TokenMask::Forced))
            }
            Some(not_sampled) => {
                feed.sequence.settle(None);
                return not_sampled.map(drop).map_err(Error::Grammar);
            }
        };
        let start = feed.sequence.turn();
        let turn = Turn {
            tokens: feed.sequence.known(),
            generated_from: start.generated_from,
            seed: start.seed,
            logprobs: start.logprobs,
            mask: mask.as_ref(),
            surprise_bound: feed.sequence.surprise_bound(),
        };
        let token = self.sampler.sample(self.logits.row(row), feed.sampling, &turn)?;
        feed.sequence.set_surprise_bound(self.sampler.surprise_bound());
        feed.sequence.settle(Some(token));
        Ok(())
    }

    /// Stores the log-probabilities of `following`, from the logits of the rows from `first_row` on.
    fn score(&mut self, feed: &mut SequenceFeed<'_>, first_row: usize) -> Result<()> {
        let Some(Scores { following, num_alternatives, found }) = &mut feed.scores else { return Ok(()) };
        let (placeholder, mut row) = (self.spec.placeholder(), first_row);
        for &id in *following {
            if Some(id) == placeholder {
                found.push(Logprob::none());
                continue;
            }
            found.push(self.sampler.score(self.logits.row(row), id, *num_alternatives)?);
            row += 1;
        }
        Ok(())
    }

    /// Returns the number of rows with log-probabilities.
    fn num_scored(&self, feed: &SequenceFeed<'_>) -> usize {
        let following = feed.scores.as_ref().map_or(0, |scores| scores.following.len());
        (0..following).filter(|&index| self.is_scored(feed, index)).count()
    }
}

/// Computes the token masks of feeds that sample under a grammar, in their order.
///
/// On the engine's thread, not beside the forward pass, because a mask takes a hundredth of a step: with a
/// vocabulary of 150 000, 1 microsecond for a known lexer state, tens of them on average.
fn masks(
    feeds: &mut [SequenceFeed<'_>],
    results: &[Result<FedRows>],
) -> Vec<Result<Option<TokenMask>, GrammarError>> {
    let sampled = feeds.iter_mut().zip(results).filter(|(_, result)| result.is_ok());
    let sampled = sampled.filter(|(feed, _)| !matches!(feed.input, FeedInput::Chunk(_)));
    let states: Vec<_> = sampled.filter_map(|(feed, _)| feed.grammar.as_deref_mut()).collect();
    if states.len() < MASKS_WORTH_THREADS {
        states.into_iter().map(GrammarState::mask).collect()
    } else {
        states.into_par_iter().map(GrammarState::mask).collect()
    }
}

/// Returns what the rows at these positions take of images, as rows of the step from `first_row` on.
fn embedded(images: FedImages<'_>, positions: Range<usize>, first_row: usize) -> Result<Vec<EmbeddedRows>> {
    let first = images.spans.partition_point(|span| span.rows.end <= positions.start);
    let spans = images.spans[first..].iter().take_while(|span| span.rows.start < positions.end);
    let taken = |span: &ImageSpan| {
        let start = span.rows.start.max(positions.start);
        let rows = start..span.rows.end.min(positions.end);
        let known = images.rows.iter().find(|(key, _)| *key == span.key);
        let (_, embeddings) = known.ok_or(Error::Backend("an image was not encoded".to_owned()))?;
        Ok(EmbeddedRows {
            rows: first_row + rows.start - positions.start..first_row + rows.end - positions.start,
            embeddings: Arc::clone(embeddings),
            first: span.first + rows.start - span.rows.start,
        })
    };
    spans.map(taken).collect()
}

/// Sets angles and sight of consecutive rows of a sequence with images.
fn place(rows: &mut [Row], spans: &[ImageSpan], rule: RowRule) {
    let Some(start) = rows.first().map(|row| row.position) else { return };
    let angles = angles_of(spans, rule.mrope, start..start + rows.len());
    let tokens = Tokens { images: spans, ..Tokens::default() };
    for (row, angles) in rows.iter_mut().zip(angles) {
        row.angles = angles;
        if let Some(span) = tokens.image_at(row.position).filter(|_| rule.two_way != TwoWay::Never) {
            row.visible = span.rows.end;
        }
    }
}

/// Frees the memory of pages that the pool has given to other groups, before it is written again.
fn free_dropped(model: &mut dyn Model, pool: &PagePool) {
    pool.take_dropped().into_iter().for_each(|place| model.free_page(place));
}

/// Turns a panic into an error. Unwind safety: a panic may leave incomplete KV rows, whose sequences stay
/// poisoned, and scratch space of the model, which the next call overwrites.
pub(crate) fn guarded<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|panic| Err(Error::Backend(format!("the model panicked: {}", panic_text(&*panic)))))
}
