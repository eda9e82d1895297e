//! Causal convolution of few taps over each channel separately.
//!
//! Every output is the sum of its bias and its taps in f64, the oldest first, rounded to f32 once, after SiLU
//! if requested. The exponential is not the system's, which differs between systems.

use super::isa::dispatch;

#[inline(always)]
fn convolve_body(kernel: &[f32], bias: &[f32], seen: &[f32], silu: bool, out: &mut [f32]) {
    let width = out.len();
    for (channel, out) in out.iter_mut().enumerate() {
        let mut sum = bias.get(channel).map_or(0.0, |bias| f64::from(*bias));
        for (kernel, seen) in kernel.chunks_exact(width).zip(seen.chunks_exact(width)) {
            sum += f64::from(kernel[channel]) * f64::from(seen[channel]);
        }
        *out = if silu { sum / (1.0 + libm::exp(-sum)) } else { sum } as f32;
    }
}

dispatch! {
    /// Computes one token's outputs, `[channels]`, from `kernel` and the visible inputs `seen`, both `[taps,
    /// channels]` with the oldest first, and `bias`, `[channels]` or empty for none.
    pub fn convolve(kernel: &[f32], bias: &[f32], seen: &[f32], silu: bool, out: &mut [f32]) = convolve_body
}

#[cfg(test)]
mod tests {
    use super::super::isa::{Isa, available};
    use super::*;

    #[test]
    fn taps_are_added_by_channel() {
        let (kernel, seen) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 1.0, 0.5, 0.25, -1.0, 0.0]);
        let mut out = [9.0; 2];
        convolve(Isa::Scalar, &kernel, &[], &seen, false, &mut out);
        assert_eq!(out, [1.0 + 1.5 - 5.0, 2.0 + 1.0]);
        convolve(Isa::Scalar, &kernel, &[0.5, -1.0], &seen, false, &mut out);
        assert_eq!(out, [1.0 + 1.5 - 5.0 + 0.5, 2.0]);
        convolve(Isa::Scalar, &kernel, &[], &seen, true, &mut out);
        assert!((out[0] + 2.5 / (1.0 + 2.5f32.exp())).abs() < 1e-6, "{out:?}");
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let noise = |seed: usize| -> Vec<f32> {
            (0..4 * 67).map(|i| ((i * 41 + seed * 13) % 199) as f32 / 37.0 - 2.5).collect()
        };
        let run = |isa| {
            let mut out = vec![0.0; 67];
            convolve(isa, &noise(1), &noise(3)[..67], &noise(2), true, &mut out);
            out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        for isa in available() {
            assert_eq!(run(isa), run(Isa::Scalar), "{isa:?}");
        }
    }
}
