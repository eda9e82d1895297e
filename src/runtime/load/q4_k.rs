//! Quantisation to Q4_K: 256 values as 8 groups of 32, each `scale * q - min` with `q` in 0 to 15; scales and
//! minimums have 6 bits and share two half-precision factors.
//!
//! candle has quantisers for all other types; its own for Q4_K turns constant groups into zeros and searches less.
//! The search follows ggml (`make_qkx2_quants`): try several widths of the grid, fit scale and minimum to each by
//! weighted least squares, keep the best. Input must be finite and within f16's range (`quantize` checks this).

use half::f16;

const GROUP: usize = 32;
const GROUPS: usize = 8;
const BLOCK_BYTES: usize = 144;
const MAX_QUANT: f32 = 15.0;
const MAX_SIX_BITS: f32 = 63.0;

/// Parameters of a group: `scale * q - min`, neither negative.
#[derive(Debug, Clone, Copy, Default)]
struct GroupFit {
    scale: f32,
    min: f32,
}

impl GroupFit {
    /// Returns the nearest number on the grid.
    fn quant(self, value: f32) -> f32 {
        if self.scale > 0.0 { ((value + self.min) / self.scale).round().clamp(0.0, MAX_QUANT) } else { 0.0 }
    }
}

/// Writes blocks; `values` must be a multiple of 256 values, and `out` 144 bytes for each 256.
pub(super) fn quantize(values: &[f32], out: &mut [u8]) {
    let blocks = values.as_chunks::<{ GROUP * GROUPS }>().0;
    for (values, out) in blocks.iter().zip(out.as_chunks_mut::<BLOCK_BYTES>().0) {
        quantize_block(values, out);
    }
}

fn quantize_block(values: &[f32; GROUP * GROUPS], out: &mut [u8; BLOCK_BYTES]) {
    let groups = values.as_chunks::<GROUP>().0;
    let mut fits = [GroupFit::default(); GROUPS];
    for (fit, group) in fits.iter_mut().zip(groups) {
        *fit = best_fit(group);
    }
    let (scale, scales) = six_bits(fits.map(|fit| fit.scale));
    let (min, mins) = six_bits(fits.map(|fit| fit.min));
    let (head, quants) = out.split_at_mut(16);
    head[..2].copy_from_slice(&scale.to_le_bytes());
    head[2..4].copy_from_slice(&min.to_le_bytes());
    head[4..].copy_from_slice(&packed(scales, mins));
    let (scale, min) = (scale.to_f32(), min.to_f32());
    for (pair, out) in quants.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
        let fit =
            |group| GroupFit { scale: scale * f32::from(scales[group]), min: min * f32::from(mins[group]) };
        let (low, high) = (2 * pair, 2 * pair + 1);
        for (i, out) in out.iter_mut().enumerate() {
            *out = fit(low).quant(groups[low][i]) as u8 | (fit(high).quant(groups[high][i]) as u8) << 4;
        }
    }
}

/// Encodes numbers as 6-bit multiples of one factor.
fn six_bits(numbers: [f32; GROUPS]) -> (f16, [u8; GROUPS]) {
    let most = numbers.iter().copied().fold(0.0, f32::max);
    let factor = f16::from_f32(most / MAX_SIX_BITS);
    let unit = factor.to_f32();
    let steps =
        |number: f32| if unit > 0.0 { (number / unit).round().clamp(0.0, MAX_SIX_BITS) as u8 } else { 0 };
    (factor, numbers.map(steps))
}

/// Packs 8 scales and 8 minimums into 12 bytes as ggml does: the first four of each whole, in the low 6 bits of bytes
/// 0 to 7; the others as nibbles in bytes 8 to 11, with their upper 2 bits in the free bits of bytes 0 to 7.
fn packed(scales: [u8; GROUPS], mins: [u8; GROUPS]) -> [u8; 12] {
    let mut bytes = [0; 12];
    for i in 0..4 {
        bytes[i] = scales[i] | scales[i + 4] >> 4 << 6;
        bytes[i + 4] = mins[i] | mins[i + 4] >> 4 << 6;
        bytes[i + 8] = scales[i + 4] & 15 | mins[i + 4] << 4;
    }
    bytes
}

fn best_fit(values: &[f32; GROUP]) -> GroupFit {
    let lowest = values.iter().copied().fold(0.0, f32::min);
    let highest = values.iter().copied().fold(lowest, f32::max);
    let range = highest - lowest;
    let mut best = GroupFit { scale: range / MAX_QUANT, min: -lowest };
    if range < f32::MIN_POSITIVE * MAX_QUANT {
        return best;
    }
    let weights = weights(values);
    let mut least = error(values, &weights, best);
    // The search covers one grid step less to one more, in tenths.
    for tenth in -10..=10 {
        let grid = GroupFit { scale: range / (MAX_QUANT + tenth as f32 / 10.0), min: -lowest };
        let Some(fit) = least_squares(values, &weights, grid) else { continue };
        let error = error(values, &weights, fit);
        if error < least {
            (best, least) = (fit, error);
        }
    }
    best
}

/// Weights the values of a group: large values matter more, because they meet large activations; adding the mean
/// keeps small ones from being ignored.
fn weights(values: &[f32; GROUP]) -> [f32; GROUP] {
    let mean_square = values.iter().map(|value| value * value).sum::<f32>() / GROUP as f32;
    values.map(|value| mean_square.sqrt() + value.abs())
}

fn error(values: &[f32; GROUP], weights: &[f32; GROUP], fit: GroupFit) -> f32 {
    let squared = |(value, weight): (&f32, &f32)| {
        let difference = fit.scale * fit.quant(*value) - fit.min - value;
        weight * difference * difference
    };
    values.iter().zip(weights).map(squared).sum()
}

/// Fits scale and minimum by least squares, with the number that `grid` gives to each value.
fn least_squares(values: &[f32; GROUP], weights: &[f32; GROUP], grid: GroupFit) -> Option<GroupFit> {
    let [mut w, mut wq, mut wqq, mut wx, mut wqx] = [0.0f32; 5];
    for (&x, &weight) in values.iter().zip(weights) {
        let q = grid.quant(x);
        w += weight;
        wq += weight * q;
        wqq += weight * q * q;
        wx += weight * x;
        wqx += weight * q * x;
    }
    let determinant = w * wqq - wq * wq;
    let both =
        GroupFit { scale: (w * wqx - wx * wq) / determinant, min: (wq * wqx - wqq * wx) / determinant };
    // A minimum cannot be negative; without one, the line goes through the origin.
    let fit = if both.min >= 0.0 { both } else { GroupFit { scale: wqx / wqq, min: 0.0 } };
    (determinant > 0.0 && fit.scale > 0.0 && fit.scale.is_finite() && fit.min.is_finite()).then_some(fit)
}
