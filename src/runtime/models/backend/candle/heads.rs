//! States of heads, which decay, take in a key and a value, and answer a query.
//!
//! Few rows are taken in one after the other. Those of a prompt are taken in by chunks, in products: within a chunk, what the
//! delta rule writes for a row depends on what it wrote for those before, a triangular system that is solved for all chunks at
//! once (Yang, Wang, Zhang, Shen and Kim 2024, "Parallelizing linear transformers with the delta rule"). Keys that fade by
//! themselves would need quotients that overflow: their rows are always taken in one by one.

use std::ops::Range;

use candle_core::{DType, Result, Tensor};

use super::PageId;

/// Rows of a chunk.
const CHUNK: usize = 32;

/// Rows from which chunks pay.
const LEAST_CHUNKED: usize = 4;

/// Logarithm of the least factor of a row in a chunk. It leaves nothing of a state in f32; differences of sums stay exact.
const LEAST_DECAY: f64 = -30.0;

/// The inputs that the drafted rows of sequences have for their states.
#[derive(Debug)]
pub struct Drafted {
    pub pages: Vec<PageId>,
    pub inputs: DraftedInputs,
}

#[derive(Debug)]
pub enum DraftedInputs {
    /// The last inputs of a convolution and those of the drafted rows, `[sequences, rows, width]`.
    Shift(Tensor),
    Heads(HeadRows),
}

/// The inputs of a step's rows for the states of heads: `state = exp(decay) * state + key x written`, where `written` is the value, or with
/// a rate, that share of the value's distance from what the faded state has for the key. A row's result is `query . state`.
#[derive(Debug)]
pub struct HeadRows {
    /// `[heads, rows, key_dim]`, of all sequences, as the query.
    pub key: Tensor,
    pub query: Tensor,
    /// `[heads, rows, value_dim]`.
    pub value: Tensor,
    /// `[heads, rows, 1]`, or `[heads, rows, key_dim]` if each key's values have a factor of their own.
    pub decay: Tensor,
    /// `[heads, rows, 1]`.
    pub rate: Option<Tensor>,
}

impl HeadRows {
    fn map(&self, change: impl Fn(&Tensor) -> Result<Tensor>) -> Result<HeadRows> {
        Ok(HeadRows {
            key: change(&self.key)?,
            query: change(&self.query)?,
            value: change(&self.value)?,
            decay: change(&self.decay)?,
            rate: self.rate.as_ref().map(&change).transpose()?,
        })
    }

    pub fn part(&self, heads: Range<usize>, rows: Range<usize>) -> Result<HeadRows> {
        self.map(|x| x.narrow(0, heads.start, heads.len())?.narrow(1, rows.start, rows.len())?.contiguous())
    }

    /// Takes all rows into `state`, `[heads, key_dim, value_dim]`. Returns it with the results, `[heads, rows, value_dim]`.
    pub fn run(&self, state: Tensor) -> Result<(Tensor, Tensor)> {
        if self.key.dim(1)? >= LEAST_CHUNKED && self.decay.dim(2)? == 1 {
            return self.run_chunks(state);
        }
        let mut outs = Vec::new();
        let mut state = state;
        for row in 0..self.key.dim(1)? {
            let row = self.map(|x| x.narrow(1, row, 1)?.contiguous())?;
            let faded = state.broadcast_mul(&row.decay.exp()?.transpose(1, 2)?)?;
            let written = match &row.rate {
                None => row.value,
                Some(rate) => (row.value - row.key.matmul(&faded)?)?.broadcast_mul(rate)?,
            };
            state = (faded + row.key.transpose(1, 2)?.matmul(&written)?)?;
            outs.push(row.query.matmul(&state)?);
        }
        Ok((state, Tensor::cat(&outs, 1)?))
    }

    /// Does what [`Self::run`] does, by chunks of rows. Rows that fill the last chunk feed nothing.
    fn run_chunks(&self, state: Tensor) -> Result<(Tensor, Tensor)> {
        let (heads, rows, _) = self.key.dims3()?;
        let len = rows.min(CHUNK);
        let count = rows.div_ceil(len);
        let chunks = self
            .map(|x| x.pad_with_zeros(1, 0, count * len - rows)?.reshape((heads * count, len, x.dim(2)?)))?;
        let HeadRows { key, query, value, decay, rate } = chunks;
        let triangle = Tensor::tril2(len, DType::F32, key.device())?;
        // Logarithms of what is left, after each row, of the state before the chunk.
        let decay = decay.maximum(LEAST_DECAY)?.cumsum(1)?.contiguous()?;
        let left = decay.exp()?;
        // `[.., row, earlier]`: the share of an earlier row's, or the row's own, writing that is left after the row.
        let between = decay.broadcast_sub(&decay.transpose(1, 2)?)?.minimum(0.0)?.exp()?;
        let between = between.broadcast_mul(&triangle)?;
        let seen = (query.matmul(&key.transpose(1, 2)?)? * &between)?;
        let query = query.broadcast_mul(&left)?;
        let last = decay.narrow(1, len - 1, 1)?;
        let kept = key.broadcast_mul(&last.broadcast_sub(&decay)?.exp()?)?;
        // Rows write `value - recalled . state`.
        let (value, recalled) = match rate {
            None => (value, None),
            Some(rate) => {
                let one = Tensor::eye(len, DType::F32, key.device())?;
                let below = between.broadcast_sub(&one)?;
                let depends = (key.matmul(&key.transpose(1, 2)?)? * below)?.broadcast_mul(&rate)?;
                let solved = solve(&depends, &one)?;
                let recalled = key.broadcast_mul(&(&left * &rate)?)?;
                (solved.matmul(&value.broadcast_mul(&rate)?)?, Some(solved.matmul(&recalled)?))
            }
        };
        let mut state = state;
        let mut outs = Vec::new();
        for chunk in 0..count {
            let of =
                |x: &Tensor| x.reshape((heads, count, x.dim(1)?, x.dim(2)?))?.narrow(1, chunk, 1)?.squeeze(1);
            let written = match &recalled {
                None => of(&value)?,
                Some(recalled) => (of(&value)? - of(recalled)?.matmul(&state)?)?,
            };
            outs.push((of(&query)?.matmul(&state)? + of(&seen)?.matmul(&written)?)?);
            let faded = state.broadcast_mul(&of(&last)?.exp()?)?;
            state = (faded + of(&kept)?.transpose(1, 2)?.matmul(&written)?)?;
        }
        Ok((state, Tensor::cat(&outs, 1)?.narrow(1, 0, rows)?))
    }
}

/// Returns the inverse of `one + x` for matrices `x` whose values are below the diagonal, row by row.
fn solve(x: &Tensor, one: &Tensor) -> Result<Tensor> {
    let (count, len, _) = x.dims3()?;
    let unit = |row| one.narrow(0, row, 1)?.broadcast_as((count, 1, len));
    let mut rows = unit(0)?.contiguous()?;
    for row in 1..len {
        let weights = x.narrow(1, row, 1)?.narrow(2, 0, row)?.contiguous()?;
        rows = Tensor::cat(&[&rows, &(unit(row)? - weights.matmul(&rows)?)?], 1)?;
    }
    Ok(rows)
}
