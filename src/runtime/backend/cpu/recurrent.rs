//! Layers that keep a state: how their rows are cut into tasks. Rows of a sequence follow each other, channels and heads are
//! independent.

use super::kv::CpuKv;
use super::{Cpu, CpuBuffer};
use crate::runtime::backend::{ConvSpec, Span};
use crate::runtime::error::Result;
use crate::runtime::kernel::math;

impl Cpu {
    /// Causal convolution over each channel; every output is the sum of its taps, the oldest first.
    pub(super) fn convolve_rows(
        &self,
        kv: &mut CpuKv,
        spec: &ConvSpec<'_, Vec<f32>>,
        x: &CpuBuffer,
        spans: &[Span],
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let (width, taps) = (x.width, spec.kernel.len() / x.width);
        let scratch = &mut *self.scratch.borrow_mut();
        for span in spans {
            let state = kv.state_mut(spec.store, span)?;
            // The inputs of the tokens before the step, then the step's own.
            let seen = &mut scratch.reordered;
            seen.clear();
            seen.extend_from_slice(state);
            seen.extend_from_slice(&x.values[span.rows.start * width..span.rows.end * width]);
            state.copy_from_slice(&seen[seen.len() - state.len()..]);
            let (isa, work) = (self.isa, span.rows.len() * spec.kernel.len());
            let out = &mut out.values[span.rows.start * width..span.rows.end * width];
            self.for_chunks(out, width, work, |row, out| {
                out.fill(0.0);
                let seen = seen[row * width..].chunks_exact(width);
                for (kernel, seen) in spec.kernel.chunks_exact(width).zip(seen).take(taps) {
                    math::mul_add(isa, kernel, seen, out);
                }
                if spec.silu {
                    math::silu_all(isa, out);
                }
            });
        }
        Ok(())
    }
}
