//! One sequence in a model of candle-transformers: its tokens and states.
//!
//! candle's products choose their order of summation by size: a run of tokens gives other bits than the same
//! tokens one by one. So that reuse, company and chunks change no bit all the same, how the tokens before a
//! row are cut depends on nothing but their number: up to the last multiple of [`CHUNK`] in whole runs, then
//! one by one. Tokens of an answer are computed one by one at first, and again as a run when they fill it.
//!
//! ```text
//! Chunks     |--run--|--run--|--run--|. . . . .      a run continues from the state of the previous one
//! Beginning  |----------run----------|. . . . .      a run goes from the first token, up to LONGEST_BEGINNING
//! Single      . . . . . . . . . . . . . . . . .
//! ```
//!
//! Tokens whose logits are not wanted are deferred until they fill a chunk, or form the longest run from the
//! beginning.

use candle_core::{Device, Result, Tensor};

use crate::backend::PAGE_TOKENS;

/// Tokens per run: enough to be worth reading the weights, few enough to compute one by one.
pub const CHUNK: usize = PAGE_TOKENS;

/// Longest run from the first token; the memory for its scores grows with the square of the length.
pub const LONGEST_BEGINNING: usize = 512;

/// Number of tokens that a model of candle-transformers takes at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefill {
    /// Several at any position; the state can be kept and resumed.
    Chunks,
    /// Several at the beginning only, or without a state to return to.
    Beginning,
    /// One by one.
    Single,
}

/// Returns the end of the last whole run within `len` tokens.
fn run_end(len: usize) -> usize {
    len / CHUNK * CHUNK
}

/// A model with the state of one sequence in it.
pub trait Stepper: Send {
    /// Returns the logits after the last of `tokens`, `[1, n]`, which follow `position` others.
    fn forward(&mut self, tokens: &Tensor, position: usize) -> Result<Tensor>;

    /// Returns a copy that can be continued separately; `None` if candle-transformers cannot copy the state.
    fn fork(&self) -> Option<Box<dyn Stepper>>;
}

/// Constructor of models without tokens, all over the same weights.
pub type Begin = Box<dyn Fn() -> Result<Box<dyn Stepper>> + Send + Sync>;

/// The constructor, prefill mode and device that all sequences of a model share.
pub struct ModelParts {
    pub begin: Begin,
    pub prefill: Prefill,
    pub device: Device,
}

/// One sequence.
#[derive(Default)]
pub struct CandleSequence {
    tokens: Vec<u32>,
    /// Number of tokens that were computed in runs.
    num_in_runs: usize,
    /// The state after those, if another run can continue from it.
    base: Option<Box<dyn Stepper>>,
    /// The state after `num_computed` tokens; if `None`, that is `base` or the empty sequence.
    now: Option<Box<dyn Stepper>>,
    num_computed: usize,
}

impl ModelParts {
    fn forward(&self, state: &mut dyn Stepper, tokens: &[u32], position: usize) -> Result<Vec<f32>> {
        let tokens = Tensor::new(tokens, &self.device)?.unsqueeze(0)?;
        state.forward(&tokens, position)?.flatten_all()?.to_vec1()
    }
}

impl CandleSequence {
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Appends a token, and returns the logits after it if they are wanted.
    ///
    /// # Errors
    /// candle's errors; the sequence is then unusable.
    pub fn feed(&mut self, source: &ModelParts, token: u32, wants_logits: bool) -> Result<Option<Vec<f32>>> {
        self.tokens.push(token);
        let len = self.tokens.len();
        let logits = match source.prefill {
            Prefill::Chunks if len == run_end(len) => Some(self.compute_chunk(source)?),
            Prefill::Chunks if wants_logits => self.catch_up(source, None)?,
            Prefill::Beginning if wants_logits || len >= LONGEST_BEGINNING => {
                let last = self.compute_beginning(source)?;
                self.catch_up(source, last)?
            }
            Prefill::Chunks | Prefill::Beginning => None,
            Prefill::Single => self.catch_up(source, None)?,
        };
        Ok(logits.filter(|_| wants_logits))
    }

    /// Computes the chunk that ends here and returns the logits after it.
    fn compute_chunk(&mut self, source: &ModelParts) -> Result<Vec<f32>> {
        let (start, len) = (self.num_in_runs, self.tokens.len());
        let mut state = self.base.take().map_or_else(|| (source.begin)(), Ok)?;
        let logits = source.forward(&mut *state, &self.tokens[start..], start)?;
        (self.num_in_runs, self.num_computed) = (len, len);
        (self.base, self.now) = (Some(state), None);
        Ok(logits)
    }

    /// Computes the longest run from the first token, if it is longer than the last one, and returns the logits after
    /// it.
    fn compute_beginning(&mut self, source: &ModelParts) -> Result<Option<Vec<f32>>> {
        let end = run_end(self.tokens.len()).min(LONGEST_BEGINNING);
        if end <= self.num_in_runs {
            return Ok(None);
        }
        let mut state = (source.begin)()?;
        let logits = source.forward(&mut *state, &self.tokens[..end], 0)?;
        (self.num_in_runs, self.num_computed) = (end, end);
        self.now = Some(state);
        Ok(Some(logits))
    }

    /// Computes the remaining tokens one by one and returns the logits after the last; `last` if none remain.
    fn catch_up(&mut self, source: &ModelParts, mut last: Option<Vec<f32>>) -> Result<Option<Vec<f32>>> {
        let mut state = match (self.now.take(), &self.base) {
            (Some(state), _) => state,
            (None, Some(base)) => base.fork().ok_or_else(|| {
                candle_core::Error::msg("a model that takes chunks must be one that can be cloned")
            })?,
            (None, None) => (source.begin)()?,
        };
        for position in self.num_computed..self.tokens.len() {
            last = Some(source.forward(&mut *state, &self.tokens[position..=position], position)?);
        }
        self.now = Some(state);
        self.num_computed = self.tokens.len();
        Ok(last)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    type Calls = Arc<Mutex<Vec<(usize, usize)>>>;

    /// Records position and length of every run; its logits encode the tokens it has seen.
    struct Noting {
        seen: Vec<u32>,
        calls: Calls,
        forks: bool,
    }

    impl Stepper for Noting {
        fn forward(&mut self, tokens: &Tensor, position: usize) -> Result<Tensor> {
            assert_eq!(position, self.seen.len(), "a state of another position");
            let tokens = tokens.flatten_all()?.to_vec1::<u32>()?;
            self.calls.lock().unwrap().push((position, tokens.len()));
            self.seen.extend(tokens);
            Tensor::new(self.seen.iter().map(|&token| token as f32).collect::<Vec<_>>(), &Device::Cpu)
        }

        fn fork(&self) -> Option<Box<dyn Stepper>> {
            let (seen, calls, forks) = (self.seen.clone(), self.calls.clone(), true);
            self.forks.then(|| Box::new(Noting { seen, calls, forks }) as Box<dyn Stepper>)
        }
    }

    fn source(prefill: Prefill) -> (ModelParts, Calls) {
        let calls = Calls::default();
        let noted = calls.clone();
        let begin: Begin = Box::new(move || {
            let forks = prefill == Prefill::Chunks;
            Ok(Box::new(Noting { seen: Vec::new(), calls: noted.clone(), forks }) as Box<dyn Stepper>)
        });
        (ModelParts { begin, prefill, device: Device::Cpu }, calls)
    }

    /// Feeds `len` tokens, with logits wanted from `wanted` on; checks the logits and the runs, given as position and
    /// length.
    #[track_caller]
    fn check(prefill: Prefill, len: usize, wanted: usize, expected: &[(usize, usize)]) {
        let (source, calls) = source(prefill);
        let mut sequence = CandleSequence::default();
        for position in 0..len {
            let logits = sequence.feed(&source, position as u32, position >= wanted).unwrap();
            let history = (0..=position).map(|token| token as f32).collect::<Vec<_>>();
            assert_eq!(logits, (position >= wanted).then_some(history), "{prefill:?} {position}");
        }
        assert_eq!(*calls.lock().unwrap(), expected, "{prefill:?} {len} {wanted}");
    }

    fn singles(positions: std::ops::Range<usize>) -> Vec<(usize, usize)> {
        positions.map(|position| (position, 1)).collect()
    }

    #[test]
    fn chunks_go_on_from_each_other_and_the_rest_is_single() {
        let prompt = [&[(0, CHUNK), (CHUNK, CHUNK)], &*singles(2 * CHUNK..2 * CHUNK + 3)].concat();
        check(Prefill::Chunks, 2 * CHUNK + 3, 2 * CHUNK + 2, &prompt);
        check(Prefill::Chunks, 2 * CHUNK, 2 * CHUNK - 1, &prompt[..2]);
        check(Prefill::Chunks, 2 * CHUNK, 2 * CHUNK, &prompt[..2]);
        check(Prefill::Chunks, CHUNK - 1, CHUNK, &[]);
    }

    #[test]
    fn an_answer_that_fills_a_chunk_is_computed_again_as_one() {
        let before = singles(0..CHUNK - 1);
        let after = [(0, CHUNK), (CHUNK, 1)];
        check(Prefill::Chunks, CHUNK + 1, 0, &[&*before, &after].concat());
        check(Prefill::Beginning, CHUNK + 1, 0, &[&*before, &after].concat());
    }

    #[test]
    fn a_run_from_the_beginning_begins_there_until_it_is_too_long() {
        let end = 3 * CHUNK + 2;
        check(Prefill::Beginning, end, end - 1, &[&[(0, 3 * CHUNK)], &*singles(3 * CHUNK..end)].concat());
        let end = LONGEST_BEGINNING + CHUNK + 1;
        let expected = [&[(0, LONGEST_BEGINNING)], &*singles(LONGEST_BEGINNING..end)].concat();
        check(Prefill::Beginning, end, end - 1, &expected);
    }

    #[test]
    fn nothing_waits_where_there_are_no_runs() {
        let (source, calls) = source(Prefill::Single);
        let mut sequence = CandleSequence::default();
        for token in 0..3 {
            assert_eq!(sequence.feed(&source, token, false).unwrap(), None);
        }
        assert_eq!(*calls.lock().unwrap(), singles(0..3));
    }
}
