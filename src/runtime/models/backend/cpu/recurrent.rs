//! Recurrent layers: cuts their rows into tasks. Rows of a sequence are sequential; channels and heads are
//! independent.
//!
//! States take in the known rows of a step; see [`super::drafted`] for the others.
//!
//! Inputs of a state are computed in f64 and rounded once: the norm after it magnifies earlier errors.

use super::drafted::StateUpdate;
use super::kv::CpuKv;
use super::{Cpu, CpuBuffer};
use crate::backend::{ConvSpec, DeltaShape, DeltaSpec, PageId, RowSpan, SsmShape, SsmSpec};
use llmctl_base::error::{Error, Result};
use llmctl_kernel::math::softplus;
use llmctl_kernel::{Isa, conv, delta, dot, ssm};

impl Cpu {
    /// Computes a causal convolution over each channel.
    pub(super) fn convolve(
        &self,
        kv: &mut CpuKv,
        spec: &ConvSpec<'_, Vec<f32>>,
        x: &CpuBuffer,
        spans: &[RowSpan],
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let width = x.width();
        out.resize(x.num_rows(), width);
        let scratch = &mut *self.scratch.borrow_mut();
        kv.drafted_mut(spec.store).begin(StateUpdate::Shift { width });
        for span in spans {
            let mut record = kv.drafted_mut(spec.store).start(span, 1);
            let state = kv.state_mut(spec.store, span)?;
            // The inputs of the tokens before the step, then the step's own.
            let seen = &mut scratch.reordered;
            seen.clear();
            seen.extend_from_slice(state);
            seen.extend_from_slice(&x.values()[span.rows.start * width..span.rows.end * width]);
            let num_known = span.rows.len() - span.num_drafted;
            state.copy_from_slice(&seen[num_known * width..][..state.len()]);
            record.values.copy_from_slice(&seen[state.len() + num_known * width..]);
            kv.drafted_mut(spec.store).add(record);
            let (isa, work) = (self.isa, span.rows.len() * spec.kernel.len());
            let out = &mut out.values_mut()[span.rows.start * width..span.rows.end * width];
            let bias = spec.bias.map_or(&[][..], |bias| bias);
            self.for_chunks(out, width, work, |row, out| {
                let seen = &seen[row * width..][..spec.kernel.len()];
                conv::convolve(isa, spec.kernel, bias, seen, spec.silu, out);
            });
        }
        Ok(())
    }

    /// Computes the gated delta rule, with a task for each head of each span.
    pub(super) fn apply_delta_rule(
        &self,
        kv: &mut CpuKv,
        spec: &DeltaSpec<'_, Vec<f32>>,
        [qkv, rate, decay]: [&CpuBuffer; 3],
        spans: &[RowSpan],
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let DeltaShape { value_heads, key_dim, value_dim, .. } = spec.shape;
        out.resize(qkv.num_rows(), value_heads * value_dim);
        let heads = Heads { count: value_heads, state_len: key_dim * value_dim, dim: value_dim };
        let decays = spec.num_decays();
        kv.drafted_mut(spec.store).begin(StateUpdate::Delta { key_dim, value_dim, decays });
        for span in spans {
            let inputs = HeadInputs { isa: self.isa, spec, qkv, rate, decay, span };
            self.for_heads(heads, kv, (spec.store, span), out, |head, states, out| {
                inputs.run(head, states, out);
            })?;
        }
        Ok(())
    }

    /// Computes the recurrence of Mamba-2, with a task for each head of each span.
    pub(super) fn scan(
        &self,
        kv: &mut CpuKv,
        spec: &SsmSpec<'_, Vec<f32>>,
        [xbc, step]: [&CpuBuffer; 2],
        spans: &[RowSpan],
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let SsmShape { heads, head_dim, state_dim, .. } = spec.shape;
        out.resize(xbc.num_rows(), spec.shape.inner());
        let heads = Heads { count: heads, state_len: state_dim * head_dim, dim: head_dim };
        kv.drafted_mut(spec.store).begin(StateUpdate::Ssm { head_dim, state_dim });
        for span in spans {
            let inputs = SsmInputs { isa: self.isa, spec, xbc, step, span };
            self.for_heads(heads, kv, (spec.store, span), out, |head, states, out| {
                inputs.run(head, states, out);
            })?;
        }
        Ok(())
    }

    /// Lets the states in a page take in the first `count` drafted rows of the last step.
    ///
    /// # Errors
    /// [`Error::Backend`] if so many were not drafted.
    pub(super) fn take_in_drafted(
        &self,
        kv: &mut CpuKv,
        group: usize,
        page: PageId,
        count: usize,
    ) -> Result<()> {
        let mut parts = Vec::new();
        for (state, records) in kv.states_with_records(group, page)? {
            let Some((update, record)) = records.find(page, count) else {
                return Err(Error::Backend(format!("{count} rows were not drafted over page {page}")));
            };
            let state_len = update.state_len(state.len()).max(1);
            let states = state.chunks_exact_mut(state_len);
            let rows = record.values.chunks_exact(record.num_rows * update.record_len());
            parts.extend(states.zip(rows).map(|(state, records)| DraftedState { update, state, records }));
        }
        let isa = self.isa;
        self.pool().chunks_mut(&mut parts, 1, |_, part| {
            let DraftedState { update, state, records } = &mut part[0];
            update.take_in(isa, state, records, count);
        });
        Ok(())
    }

    /// Runs `task` for every head, given its number, its part of the store's state and its results of the span's rows,
    /// `[rows, dim]`, which are then written to the rows of `out`.
    fn for_heads(
        &self,
        Heads { count, state_len, dim }: Heads,
        kv: &mut CpuKv,
        (store, span): (usize, &RowSpan),
        out: &mut CpuBuffer,
        task: impl Fn(usize, HeadState<'_>, &mut [f32]) + Sync,
    ) -> Result<()> {
        let mut record = kv.drafted_mut(store).start(span, count);
        let state = kv.state_mut(store, span)?;
        let by_head = &mut self.scratch.borrow_mut().reordered;
        by_head.resize(count * span.rows.len() * dim, 0.0);
        let states = state.chunks_exact_mut(state_len);
        let outs = by_head.chunks_exact_mut(span.rows.len() * dim);
        let per_head = record.values.len() / count;
        let mut records = &mut record.values[..];
        let mut next_records = || {
            let (next, rest) = std::mem::take(&mut records).split_at_mut(per_head);
            records = rest;
            next
        };
        let mut heads: Vec<_> = states.zip(outs).map(|(state, out)| (state, next_records(), out)).collect();
        let num_known = span.rows.len() - span.num_drafted;
        self.pool().chunks_mut(&mut heads, 1, |head, one| {
            let (known, records, out) = &mut one[0];
            task(
                head,
                HeadState { num_known, num_drafted: span.num_drafted, known, guess: Vec::new(), records },
                out,
            );
        });
        kv.drafted_mut(store).add(record);
        let width = out.width();
        let rows = out.values_mut()[span.rows.start * width..].chunks_exact_mut(width);
        for (row, out) in rows.take(span.rows.len()).enumerate() {
            for (head, out) in out.chunks_exact_mut(dim).enumerate() {
                let first = (head * span.rows.len() + row) * dim;
                out.copy_from_slice(&by_head[first..first + dim]);
            }
        }
        Ok(())
    }
}

/// The state of one head, or all of a state without heads, and its records.
struct DraftedState<'a> {
    update: StateUpdate,
    state: &'a mut [f32],
    records: &'a [f32],
}

/// The heads of a recurrent layer.
#[derive(Debug, Clone, Copy)]
struct Heads {
    count: usize,
    /// Values of a head's state.
    state_len: usize,
    /// Values of a head's result.
    dim: usize,
}

/// The state of one head while the rows of a span are computed.
struct HeadState<'a> {
    num_known: usize,
    num_drafted: usize,
    /// The state after the known rows.
    known: &'a mut [f32],
    /// The state from which drafted rows continue; empty before the first.
    guess: Vec<f32>,
    /// One for each drafted row.
    records: &'a mut [f32],
}

impl HeadState<'_> {
    /// Returns the state before the span's row `index`. What a drafted row feeds to it is recorded: `inputs`, in order.
    fn before(&mut self, index: usize, inputs: &[&[f32]]) -> &mut [f32] {
        let Some(drafted) = index.checked_sub(self.num_known) else { return self.known };
        if drafted == 0 {
            self.guess.extend_from_slice(self.known);
        }
        let first = drafted * self.records.len() / self.num_drafted;
        let mut record = &mut self.records[first..];
        for input in inputs {
            let (place, rest) = record.split_at_mut(input.len());
            place.copy_from_slice(input);
            record = rest;
        }
        &mut self.guess
    }
}

/// The inputs that the heads of a Mamba-2 mixer share.
struct SsmInputs<'a> {
    isa: Isa,
    spec: &'a SsmSpec<'a, Vec<f32>>,
    xbc: &'a CpuBuffer,
    step: &'a CpuBuffer,
    span: &'a RowSpan,
}

impl SsmInputs<'_> {
    /// Computes one head's rows, `[rows, head_dim]`, into `out`.
    fn run(&self, head: usize, mut states: HeadState<'_>, out: &mut [f32]) {
        let SsmShape { heads, head_dim, groups, state_dim } = self.spec.shape;
        let group = head / (heads / groups);
        let mut input = vec![0.0; head_dim];
        for (index, (row, out)) in self.span.rows.clone().zip(out.chunks_exact_mut(head_dim)).enumerate() {
            let (x, keys_and_queries) = self.xbc.row(row).split_at(heads * head_dim);
            let (keys, queries) = keys_and_queries.split_at(groups * state_dim);
            let x = &x[head * head_dim..][..head_dim];
            let step = self.step_of(row, head);
            input.iter_mut().zip(x).for_each(|(input, x)| *input = (step * f64::from(*x)) as f32);
            let token = ssm::SsmToken {
                x,
                input: &input,
                key: &keys[group * state_dim..][..state_dim],
                query: &queries[group * state_dim..][..state_dim],
                decay: libm::exp(-f64::from(self.spec.fading[head]) * step) as f32,
                skip: self.spec.skip[head],
            };
            let state = states.before(index, &[token.input, token.key, &[token.decay]]);
            ssm::step(self.isa, state, token, out);
        }
    }

    /// Returns the length of a row's time step.
    fn step_of(&self, row: usize, head: usize) -> f64 {
        let Some(bias) = self.spec.step_bias else { return 1.0 };
        let [least, most] = self.spec.step_limits.map(f64::from);
        softplus((self.step.row(row)[head] + bias[head]).into()).clamp(least, most)
    }
}

/// The inputs that the heads of a span share.
struct HeadInputs<'a> {
    isa: Isa,
    spec: &'a DeltaSpec<'a, Vec<f32>>,
    qkv: &'a CpuBuffer,
    rate: &'a CpuBuffer,
    decay: &'a CpuBuffer,
    span: &'a RowSpan,
}

impl HeadInputs<'_> {
    /// Computes one head's rows, `[rows, value_dim]`, into `out`.
    fn run(&self, head: usize, mut states: HeadState<'_>, out: &mut [f32]) {
        let DeltaShape { key_heads, key_dim, value_dim, .. } = self.spec.shape;
        let key_head = self.spec.shape.key_head(head);
        let fading = f64::from(self.spec.fading[head]);
        let num_decays = self.spec.num_decays();
        let decays = head * num_decays..(head + 1) * num_decays;
        let mut decay = vec![0.0; num_decays];
        let (mut query, mut key, mut error) = (vec![0.0; key_dim], vec![0.0; key_dim], vec![0.0; value_dim]);
        for (index, (row, out)) in self.span.rows.clone().zip(out.chunks_exact_mut(value_dim)).enumerate() {
            let qkv = self.qkv.row(row);
            let keys = key_heads * key_dim;
            let scale = 1.0 / (key_dim as f64).sqrt();
            normalize(self.isa, &qkv[key_head * key_dim..][..key_dim], scale, &mut query);
            normalize(self.isa, &qkv[keys + key_head * key_dim..][..key_dim], 1.0, &mut key);
            let inputs =
                self.decay.row(row)[decays.clone()].iter().zip(&self.spec.decay_bias[decays.clone()]);
            for (decay, (input, bias)) in decay.iter_mut().zip(inputs) {
                *decay = kept(fading, self.spec.decay_bound, input + bias);
            }
            let token = delta::DeltaToken {
                key: &key,
                query: &query,
                value: &qkv[2 * keys + head * value_dim..][..value_dim],
                decay: &decay,
                rate: (1.0 / (1.0 + libm::exp(-f64::from(self.rate.row(row)[head])))) as f32,
            };
            let state = states.before(index, &[token.key, token.value, token.decay, &[token.rate]]);
            delta::step(self.isa, state, token, &mut error, out);
        }
    }
}

/// Computes `scale * x / sqrt(sum(x^2) + eps)`, rounded once; `eps` is the reference's.
fn normalize(isa: Isa, x: &[f32], scale: f64, out: &mut [f32]) {
    let factor = scale / (f64::from(dot::dot(isa, x, x)) + 1e-6).sqrt();
    for (out, x) in out.iter_mut().zip(x) {
        *out = (f64::from(*x) * factor) as f32;
    }
}

/// Computes `exp(-fading * softplus(x))`, or `exp(bound * sigmoid(fading * x))`, in f64, so that the result is exact to f32.
fn kept(fading: f64, bound: Option<f32>, x: f32) -> f32 {
    let x = f64::from(x);
    libm::exp(match bound {
        None => -fading * softplus(x),
        Some(bound) => f64::from(bound) / (1.0 + libm::exp(-fading * x)),
    }) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_keeps_less_the_larger_its_input() {
        assert!((kept(1.0, None, 0.0) - 0.5).abs() < 1e-7, "softplus(0) is ln 2");
        assert!((kept(2.0, None, 30.0) - (-60f32).exp()).abs() < 1e-30);
        assert_eq!(kept(1.0, None, -200.0), 1.0);
        let bound = Some(-5.0);
        assert!((kept(3.0, bound, 0.0) - (-2.5f32).exp()).abs() < 1e-7);
        assert_eq!((kept(1.0, bound, 1e9), kept(1.0, bound, -1e9)), ((-5f64).exp() as f32, 1.0));
    }

    #[test]
    fn normalised_rows_have_length_one_and_zeros_stay() {
        let mut out = [9.0; 2];
        normalize(Isa::Scalar, &[30.0, 40.0], 1.0, &mut out);
        assert!((out[0] - 0.6).abs() < 1e-6 && (out[1] - 0.8).abs() < 1e-6);
        normalize(Isa::Scalar, &[0.0; 2], 1.0, &mut out);
        assert_eq!(out, [0.0; 2]);
    }

    #[test]
    fn rows_that_were_not_drafted_cannot_be_kept() {
        use crate::backend::{KvLayout, KvType, Store, StoreShape};
        let stores = vec![Store { shape: StoreShape::State(4), group: 0 }];
        let mut kv = CpuKv::new(&KvLayout { stores, num_groups: 1 }, KvType::F32);
        let cpu = Cpu::new(1).expect("a backend");
        let span = RowSpan { rows: 0..3, start: 5, num_drafted: 2, pages: vec![3], seen_besides: vec![] };
        let records = kv.drafted_mut(0);
        records.begin(StateUpdate::Shift { width: 2 });
        let mut record = records.start(&span, 1);
        record.values.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
        records.add(record);
        assert!(cpu.take_in_drafted(&mut kv, 0, 3, 3).is_err(), "two rows were drafted");
        assert!(cpu.take_in_drafted(&mut kv, 0, 4, 1).is_err(), "another page");
        assert!(cpu.take_in_drafted(&mut kv, 0, 3, 1).is_ok());
        assert_eq!(kv.state_mut(0, &span).expect("a state"), [0.0, 0.0, 1.0, 2.0]);
        kv.drafted_mut(0).begin(StateUpdate::Shift { width: 2 });
        assert!(cpu.take_in_drafted(&mut kv, 0, 3, 1).is_err(), "another step");
    }
}
