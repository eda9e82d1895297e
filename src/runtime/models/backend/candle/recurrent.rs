//! Recurrent states: convolutions, the gated delta rule and Mamba-2. Sequences with equally many rows are computed together.
//!
//! A step leaves a state after its known rows. What the drafted rows feed to it is kept until the next step, see
//! [`keep_drafted`].

use candle_core::{Result, Tensor};
use candle_nn::ops::{sigmoid, silu};

use super::heads::{Drafted, DraftedInputs, HeadRows};
use super::kv::CandleKv;
use super::{
    Activation, Candle, ConvSpec, DeltaShape, DeltaSpec, PageId, Recurrence, RowSpan, SsmShape, SsmSpec, ops,
};

/// Sequences of a step that are computed together: equally many rows, of which equally many are drafted.
struct StateGroup<'a> {
    spans: &'a [RowSpan],
    rows: usize,
    num_known: usize,
}

impl<'a> StateGroup<'a> {
    fn of_step(spans: &'a [RowSpan]) -> impl Iterator<Item = StateGroup<'a>> {
        let alike = |a: &RowSpan, b: &RowSpan| (a.rows.len(), a.num_drafted) == (b.rows.len(), b.num_drafted);
        spans.chunk_by(alike).map(|spans| {
            let rows = spans[0].rows.len();
            StateGroup { spans, rows, num_known: rows - spans[0].num_drafted }
        })
    }

    /// Returns the group's rows of `x`, `[sequences, rows, width]`.
    fn of(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, width) = (self.spans.len(), x.dim(1)?);
        x.narrow(0, self.spans[0].rows.start, batch * self.rows)?.reshape((batch, self.rows, width))
    }

    /// Keeps what the drafted rows feed to a state.
    fn keep(
        &self,
        kv: &mut CandleKv,
        store: usize,
        inputs: impl FnOnce() -> Result<DraftedInputs>,
    ) -> Result<()> {
        if self.num_known < self.rows {
            let pages = self.spans.iter().map(|span| span.pages[0]).collect();
            kv.drafted_mut(store).push(Drafted { pages, inputs: inputs()? });
        }
        Ok(())
    }
}

/// Computes [`super::Backend::recur`].
pub fn recur(kv: &mut CandleKv, recurrence: &Recurrence<'_, Candle>, spans: &[RowSpan]) -> Result<Tensor> {
    match recurrence {
        Recurrence::Convolution(spec, x) => convolve(kv, spec, x.get()?, spans),
        Recurrence::Delta(spec, [qkv, rate, decay]) => {
            delta_rule(kv, spec, [qkv.get()?, rate.get()?, decay.get()?], spans)
        }
        Recurrence::Ssm(spec, [xbc, step]) => ssm_scan(kv, spec, [xbc.get()?, step.get()?], spans),
    }
}

/// Computes a causal convolution over each channel.
fn convolve(kv: &mut CandleKv, spec: &ConvSpec<'_, Tensor>, x: &Tensor, spans: &[RowSpan]) -> Result<Tensor> {
    kv.drafted_mut(spec.store).clear();
    let mut parts = Vec::new();
    for group in StateGroup::of_step(spans) {
        let (batch, rows, width) = (group.spans.len(), group.rows, x.dim(1)?);
        let state = kv.states(spec.store, group.spans)?.reshape((batch, (), width))?;
        let kept = state.dim(1)?;
        let seen = Tensor::cat(&[state, group.of(x)?], 1)?;
        let state = seen.narrow(1, group.num_known, kept)?.contiguous()?;
        kv.set_states(spec.store, group.spans, &state.reshape((batch, kept * width))?)?;
        let drafted = || seen.narrow(1, group.num_known, seen.dim(1)? - group.num_known);
        group.keep(kv, spec.store, || drafted().map(DraftedInputs::Shift))?;
        let kernel = spec.kernel.reshape((kept + 1, width))?;
        let tap = |tap| seen.narrow(1, tap, rows)?.broadcast_mul(&kernel.narrow(0, tap, 1)?);
        let sum = (1..=kept).try_fold(tap(0)?, |sum, next| sum + tap(next)?)?;
        let sum = spec.bias.map_or(Ok(sum.clone()), |bias| sum.broadcast_add(bias))?;
        let out = if spec.silu { silu(&sum)? } else { sum };
        parts.push(out.reshape((batch * rows, width))?);
    }
    Tensor::cat(&parts, 0)
}

/// Computes the gated delta rule.
fn delta_rule(
    kv: &mut CandleKv,
    spec: &DeltaSpec<'_, Tensor>,
    [qkv, rate, decay]: [&Tensor; 3],
    spans: &[RowSpan],
) -> Result<Tensor> {
    let DeltaShape { key_heads, value_heads, key_dim, value_dim, tiled } = spec.shape;
    let decays = spec.decay_bias.elem_count() / value_heads;
    let decay = decay.broadcast_add(spec.decay_bias)?.reshape(((), value_heads, decays))?;
    let fading = spec.fading.reshape((value_heads, 1))?;
    let decay = match spec.decay_bound {
        None => ops::activated(Activation::Softplus, &decay)?.broadcast_mul(&fading)?.neg()?,
        Some(bound) => ops::scaled(&sigmoid(&decay.broadcast_mul(&fading)?)?, bound)?,
    };
    let (decay, rate) = (decay.flatten_from(1)?, sigmoid(rate)?);
    let normalised = |first: usize, scale: f64| {
        let width = key_heads * key_dim;
        let weight = scale / (key_dim as f64).sqrt();
        let weight = Tensor::full(weight as f32, key_dim, qkv.device())?;
        ops::rms_norm(&qkv.narrow(1, first * width, width)?.contiguous()?, &weight, 1e-6 / key_dim as f32)
    };
    let (query, key) = (normalised(0, 1.0 / (key_dim as f64).sqrt())?, normalised(1, 1.0)?);
    let value = qkv.narrow(1, 2 * key_heads * key_dim, value_heads * value_dim)?;
    let heads = [value_heads, key_dim, value_dim];
    run_heads(kv, spec.store, heads, spans, |group| {
        let spread = |x: &Tensor| spread_heads(&group.of(x)?, [key_heads, value_heads], tiled);
        Ok(HeadRows {
            key: spread(&key)?,
            query: spread(&query)?,
            value: by_head(&group.of(&value)?, value_heads)?,
            decay: by_head(&group.of(&decay)?, value_heads)?,
            rate: Some(by_head(&group.of(&rate)?, value_heads)?),
        })
    })
}

/// Computes the recurrence of Mamba-2.
fn ssm_scan(
    kv: &mut CandleKv,
    spec: &SsmSpec<'_, Tensor>,
    [xbc, step]: [&Tensor; 2],
    spans: &[RowSpan],
) -> Result<Tensor> {
    let SsmShape { heads, head_dim, groups, state_dim } = spec.shape;
    let [least, most] = spec.step_limits.map(f64::from);
    let step = match spec.step_bias {
        Some(bias) => ops::activated(Activation::Softplus, &step.broadcast_add(bias)?)?.clamp(least, most)?,
        None => Tensor::ones((xbc.dim(0)?, heads), xbc.dtype(), xbc.device())?,
    };
    let decay = step.broadcast_mul(spec.fading)?.neg()?;
    let x = xbc.narrow(1, 0, spec.shape.inner())?.reshape(((), heads, head_dim))?;
    let value = x.broadcast_mul(&step.unsqueeze(2)?)?.flatten_from(1)?;
    let part =
        |first: usize| xbc.narrow(1, spec.shape.inner() + first * groups * state_dim, groups * state_dim);
    let (key, query) = (part(0)?, part(1)?);
    let out = run_heads(kv, spec.store, [heads, state_dim, head_dim], spans, |group| {
        let spread = |x: &Tensor| spread_heads(&group.of(x)?, [groups, heads], false);
        Ok(HeadRows {
            key: spread(&key)?,
            query: spread(&query)?,
            value: by_head(&group.of(&value)?, heads)?,
            decay: by_head(&group.of(&decay)?, heads)?,
            rate: None,
        })
    })?;
    out + x.broadcast_mul(&spec.skip.reshape((heads, 1))?)?.flatten_from(1)?
}

/// Lets the states in a page take in the first `count` drafted rows of the last step.
///
/// # Errors
/// If so many were not drafted over the page.
pub fn keep_drafted(kv: &mut CandleKv, group: usize, page: PageId, count: usize) -> Result<()> {
    for store in kv.layers_of(group) {
        let state = kv.state(store, page)?;
        let mut drafted = kv.drafted_mut(store).iter();
        let found = drafted.find_map(|drafted| {
            let at = drafted.pages.iter().position(|of| *of == page)?;
            Some((at, drafted.pages.len(), &drafted.inputs))
        });
        let state = match found {
            Some((at, _, DraftedInputs::Shift(seen))) => {
                let kept = state.elem_count() / seen.dim(2)?;
                seen.narrow(0, at, 1)?.narrow(1, count, kept)?.reshape(state.shape())?
            }
            Some((at, pages, DraftedInputs::Heads(rows))) => {
                let heads = rows.key.dim(0)? / pages;
                let shape = (heads, rows.key.dim(2)?, rows.value.dim(2)?);
                let rows = rows.part(at * heads..(at + 1) * heads, 0..count)?;
                rows.run(state.reshape(shape)?)?.0.reshape(state.shape())?
            }
            None => candle_core::bail!("{count} rows were not drafted over page {page}"),
        };
        kv.set_state(store, page, &state)?;
    }
    Ok(())
}

/// Runs the heads of all sequences, `heads` being their number, the length of keys and that of values. Returns `[rows, heads *
/// value_dim]`.
fn run_heads(
    kv: &mut CandleKv,
    store: usize,
    [heads, key_dim, value_dim]: [usize; 3],
    spans: &[RowSpan],
    inputs: impl Fn(&StateGroup<'_>) -> Result<HeadRows>,
) -> Result<Tensor> {
    kv.drafted_mut(store).clear();
    let mut parts = Vec::new();
    for group in StateGroup::of_step(spans) {
        let (batch, inputs) = (group.spans.len(), inputs(&group)?);
        let mut state = kv.states(store, group.spans)?.reshape((batch * heads, key_dim, value_dim))?;
        let mut outs = Vec::new();
        if group.num_known > 0 {
            let (known, out) = inputs.part(0..batch * heads, 0..group.num_known)?.run(state)?;
            kv.set_states(store, group.spans, &known.reshape((batch, heads * key_dim * value_dim))?)?;
            outs.push(out);
            state = known;
        }
        if group.num_known < group.rows {
            let drafted = inputs.part(0..batch * heads, group.num_known..group.rows)?;
            outs.push(drafted.run(state)?.1);
            group.keep(kv, store, || Ok(DraftedInputs::Heads(drafted)))?;
        }
        let out = Tensor::cat(&outs, 1)?.reshape((batch, heads, group.rows, value_dim))?;
        parts.push(out.transpose(1, 2)?.contiguous()?.reshape((batch * group.rows, heads * value_dim))?);
    }
    Tensor::cat(&parts, 0)
}

/// Returns rows of heads, `[sequences, rows, heads * dim]`, by head: `[sequences * heads, rows, dim]`.
fn by_head(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, rows, width) = x.dims3()?;
    let x = x.reshape((batch, rows, heads, width / heads))?.transpose(1, 2)?;
    x.contiguous()?.reshape((batch * heads, rows, width / heads))
}

/// Returns rows of `from` heads by head, as [`by_head`], each for all of `to` heads that share it: consecutive ones, or if
/// `tiled`, every `from`th.
fn spread_heads(x: &Tensor, [from, to]: [usize; 2], tiled: bool) -> Result<Tensor> {
    let (batch, rows, width) = x.dims3()?;
    let (shared, dim) = (to / from, width / from);
    let x = match tiled {
        true => x.reshape((batch, rows, 1, from, dim))?.broadcast_as((batch, rows, shared, from, dim))?,
        false => x.reshape((batch, rows, from, 1, dim))?.broadcast_as((batch, rows, from, shared, dim))?,
    };
    by_head(&x.reshape((batch, rows, to * dim))?, to)
}
