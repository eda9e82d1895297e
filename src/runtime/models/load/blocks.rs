//! Quantisation to ggml's block types, optionally with an importance for each column (llama.cpp's imatrix).
//!
//! A group of values is stored as `scale * q - min` or as `scale * q`. A search finds the parameters: try
//! several widths of the grid, fit the parameters to each by weighted least squares, keep the best. The idea
//! is that of ggml's `make_qkx2_quants` and `make_qx_quants`; layouts are those of `kernel::quant`. Without
//! importance, the types with one scale per block (Q4_0 to Q8_0) are rounded as ggml's reference rounds them,
//! to the bit. Input must be finite and within f16's range (`quantize` checks this).

use half::f16;

use llmctl_kernel::Dtype;

/// Most values in a group.
const GROUP: usize = 32;

/// Quantises whole blocks. `importance` has one weight per column; `values` are whole rows of as many columns.
///
/// # Errors
/// A sentence if this type cannot be written.
pub(super) fn quantize(
    dtype: Dtype,
    values: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), String> {
    match dtype {
        Dtype::Q4_0 => {
            blocks::<32, 18>(values, importance, out, |values, by, out| one_scale(values, by, 8.0, out))
        }
        Dtype::Q4_1 => {
            blocks::<32, 20>(values, importance, out, |values, by, out| scale_and_min(values, by, 15.0, out))
        }
        Dtype::Q5_0 => {
            blocks::<32, 22>(values, importance, out, |values, by, out| one_scale(values, by, 16.0, out))
        }
        Dtype::Q5_1 => {
            blocks::<32, 24>(values, importance, out, |values, by, out| scale_and_min(values, by, 31.0, out))
        }
        Dtype::Q8_0 => blocks(values, importance, out, q8_0),
        Dtype::Q2K => blocks(values, importance, out, q2_k),
        Dtype::Q3K => blocks(values, importance, out, q3_k),
        Dtype::Q4K => blocks(values, importance, out, q4_k),
        Dtype::Q5K => blocks(values, importance, out, q5_k),
        Dtype::Q6K => blocks(values, importance, out, q6_k),
        _ => return Err(format!("weights cannot be converted to {}", dtype.name())),
    }
    Ok(())
}

/// Calls `block` for the values, the importance and the output of each block.
fn blocks<const VALUES: usize, const BYTES: usize>(
    values: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
    block: impl Fn(&[f32; VALUES], Option<&[f32]>, &mut [u8; BYTES]),
) {
    let pairs = values.as_chunks::<VALUES>().0.iter().zip(out.as_chunks_mut::<BYTES>().0);
    for (index, (values, out)) in pairs.enumerate() {
        let part = importance.map(|all| {
            let start = index * VALUES % all.len();
            &all[start..start + VALUES]
        });
        block(values, part, out);
    }
}

/// Returns the value of largest magnitude, with its sign.
fn extreme(values: &[f32]) -> f32 {
    values.iter().copied().fold(0.0, |most: f32, value| if value.abs() > most.abs() { value } else { most })
}

fn mean_square(values: &[f32]) -> f32 {
    values.iter().map(|value| value * value).sum::<f32>() / values.len() as f32
}

/// Weights the values of a group by their importance and magnitude: large values matter more, because they meet large
/// activations; `spread`, the mean square of the block, keeps small ones from being ignored.
fn weigh(values: &[f32], importance: &[f32], spread: f32) -> [f32; GROUP] {
    let mut weights = [0.0; GROUP];
    for ((weight, value), importance) in weights.iter_mut().zip(values).zip(importance) {
        *weight = importance * (2.0 * spread + value * value).sqrt();
    }
    weights
}

/// Weights the values of a group of a block by the block's importance, or by their magnitude if nothing else is known of them.
fn group_weights(values: &[f32], importance: Option<&[f32]>, group: usize, spread: f32) -> [f32; GROUP] {
    if let Some(all) = importance {
        return weigh(values, &all[group * values.len()..], spread);
    }
    let root = mean_square(values).sqrt();
    let mut weights = [0.0; GROUP];
    weights.iter_mut().zip(values).for_each(|(weight, value)| *weight = root + value.abs());
    weights
}

/// Fits `scale * q` with `q` from `-half` to `half - 1`; the scale is negative if the largest value is positive.
fn signed_fit(values: &[f32], weights: &[f32], half: f32) -> f32 {
    let most = extreme(values);
    if most.abs() < 1e-15 {
        return 0.0;
    }
    let (mut best, mut gain) = (-most / half, 0.0);
    // The search covers nine tenths of a grid step less to nine tenths more.
    for tenth in -9..=9 {
        let inverse = -(half + tenth as f32 / 10.0) / most;
        let [mut wxq, mut wqq] = [0.0f32; 2];
        for (value, weight) in values.iter().zip(weights) {
            let q = (value * inverse).round().clamp(-half, half - 1.0);
            wxq += weight * value * q;
            wqq += weight * q * q;
        }
        if wqq > 0.0 && wxq * wxq > gain * wqq {
            (best, gain) = (wxq / wqq, wxq * wxq / wqq);
        }
    }
    best
}

/// Returns the nearest `q` from 0 to `2 * half - 1` that stands for `scale * (q - half)`.
fn signed_quant(value: f32, scale: f32, half: f32) -> u8 {
    let q = if scale == 0.0 { 0.0 } else { (value / scale).round().clamp(-half, half - 1.0) };
    (q + half) as u8
}

/// Quantises a block of one signed scale.
fn one_scale(values: &[f32; 32], importance: Option<&[f32]>, half: f32, out: &mut [u8]) {
    let Some(importance) = importance else {
        let scale = extreme(values) / -half;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let quants = values.map(|value| (value * inverse + half + 0.5).min(2.0 * half - 1.0) as u8);
        return write_block(f16::from_f32(scale), None, &quants, out);
    };
    let weights = weigh(values, importance, mean_square(values));
    let scale = f16::from_f32(signed_fit(values, &weights, half));
    write_block(scale, None, &values.map(|value| signed_quant(value, scale.to_f32(), half)), out);
}

/// Quantises a block of one scale and one minimum, `scale * q + min`.
fn scale_and_min(values: &[f32; 32], importance: Option<&[f32]>, top: f32, out: &mut [u8]) {
    let lowest = values.iter().copied().fold(f32::INFINITY, f32::min);
    let highest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (highest - lowest) / top;
    let Some(importance) = importance else {
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let quants = values.map(|value| ((value - lowest) * inverse + 0.5).min(top) as u8);
        return write_block(f16::from_f32(scale), Some(f16::from_f32(lowest)), &quants, out);
    };
    let weights = weigh(values, importance, mean_square(values));
    let fit = min_fit(values, &weights, top, GroupFit { scale, min: -lowest }, false);
    let (scale, min) = (f16::from_f32(fit.scale), f16::from_f32(-fit.min));
    let rounded = GroupFit { scale: scale.to_f32(), min: -min.to_f32() };
    write_block(scale, Some(min), &values.map(|value| rounded.quant(value, top) as u8), out);
}

/// Writes a block of Q4_0, Q4_1, Q5_0 or Q5_1: the scale, the minimum if there is one, the fifth bits if `out` has room for
/// them, and the lower four bits, those of value `i` in the low nibble of byte `i` and those of value `i + 16` in the high one.
pub(super) fn write_block(scale: f16, min: Option<f16>, quants: &[u8; 32], out: &mut [u8]) {
    let (head, nibbles) = out.split_at_mut(out.len() - 16);
    let (numbers, fifths) = head.split_at_mut(if min.is_some() { 4 } else { 2 });
    numbers[..2].copy_from_slice(&scale.to_le_bytes());
    if let Some(min) = min {
        numbers[2..].copy_from_slice(&min.to_le_bytes());
    }
    let bits = quants.iter().enumerate().fold(0u32, |bits, (i, q)| bits | u32::from(q >> 4) << i);
    fifths.copy_from_slice(&bits.to_le_bytes()[..fifths.len()]);
    for (i, out) in nibbles.iter_mut().enumerate() {
        *out = quants[i] & 15 | quants[i + 16] << 4;
    }
}

/// Eight bits are enough without a search, so importance is not used.
fn q8_0(values: &[f32; 32], _: Option<&[f32]>, out: &mut [u8; 34]) {
    let scale = extreme(values).abs() / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    out[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    for (out, value) in out[2..].iter_mut().zip(values) {
        *out = (value * inverse).round() as i8 as u8;
    }
}

/// Parameters of a group: `scale * q - min`.
#[derive(Debug, Clone, Copy, Default)]
struct GroupFit {
    scale: f32,
    min: f32,
}

impl GroupFit {
    /// Returns the nearest number on the grid.
    fn quant(self, value: f32, top: f32) -> f32 {
        if self.scale > 0.0 { ((value + self.min) / self.scale).round().clamp(0.0, top) } else { 0.0 }
    }

    fn error(self, values: &[f32], weights: &[f32], top: f32) -> f32 {
        let squared = |(value, weight): (&f32, &f32)| {
            let difference = self.scale * self.quant(*value, top) - self.min - value;
            weight * difference * difference
        };
        values.iter().zip(weights).map(squared).sum()
    }
}

/// Searches the best parameters near `first`, the grid from the lowest to the highest value. With `is_min_positive`
/// the minimum is not negative, as the K types store it.
fn min_fit(values: &[f32], weights: &[f32], top: f32, first: GroupFit, is_min_positive: bool) -> GroupFit {
    let range = first.scale * top;
    if range < f32::MIN_POSITIVE * top {
        return first;
    }
    let mut best = first;
    let mut least = first.error(values, weights, top);
    // The search covers one grid step less to one more, in tenths.
    for tenth in -10..=10 {
        let grid = GroupFit { scale: range / (top + tenth as f32 / 10.0), min: first.min };
        let Some(fit) = least_squares(values, weights, top, grid, is_min_positive) else { continue };
        let error = fit.error(values, weights, top);
        if error < least {
            (best, least) = (fit, error);
        }
    }
    best
}

/// Fits scale and minimum by least squares, with the number that `grid` gives to each value.
fn least_squares(
    values: &[f32],
    weights: &[f32],
    top: f32,
    grid: GroupFit,
    is_min_positive: bool,
) -> Option<GroupFit> {
    let [mut w, mut wq, mut wqq, mut wx, mut wqx] = [0.0f32; 5];
    for (&x, &weight) in values.iter().zip(weights) {
        let q = grid.quant(x, top);
        w += weight;
        wq += weight * q;
        wqq += weight * q * q;
        wx += weight * x;
        wqx += weight * q * x;
    }
    let determinant = w * wqq - wq * wq;
    let both =
        GroupFit { scale: (w * wqx - wx * wq) / determinant, min: (wq * wqx - wqq * wx) / determinant };
    // Without a minimum, the line goes through the origin.
    let is_allowed = both.min >= 0.0 || !is_min_positive;
    let fit = if is_allowed { both } else { GroupFit { scale: wqx / wqq, min: 0.0 } };
    (determinant > 0.0 && fit.scale > 0.0 && fit.scale.is_finite() && fit.min.is_finite()).then_some(fit)
}

/// A block of groups with a scale and a minimum each, both multiples of a factor of the block.
struct MinBlock<const GROUPS: usize> {
    scale: f16,
    min: f16,
    scales: [u8; GROUPS],
    mins: [u8; GROUPS],
    quants: [u8; 256],
}

impl<const GROUPS: usize> MinBlock<GROUPS> {
    /// `top` is the largest number of a value, `top_scale` that of a group's scale and minimum.
    fn new(values: &[f32; 256], importance: Option<&[f32]>, top: f32, top_scale: f32) -> Self {
        let len = 256 / GROUPS;
        let spread = mean_square(values);
        let mut fits = [GroupFit::default(); GROUPS];
        for (group, (fit, values)) in fits.iter_mut().zip(values.chunks_exact(len)).enumerate() {
            let weights = group_weights(values, importance, group, spread);
            let lowest = values.iter().copied().fold(0.0, f32::min);
            let highest = values.iter().copied().fold(lowest, f32::max);
            let first = GroupFit { scale: (highest - lowest) / top, min: -lowest };
            *fit = min_fit(values, &weights, top, first, true);
        }
        let (scale, scales) = multiples(fits.map(|fit| fit.scale), top_scale);
        let (min, mins) = multiples(fits.map(|fit| fit.min), top_scale);
        let mut quants = [0; 256];
        for (index, (quant, value)) in quants.iter_mut().zip(values).enumerate() {
            let group = index / len;
            let fit = GroupFit {
                scale: scale.to_f32() * f32::from(scales[group]),
                min: min.to_f32() * f32::from(mins[group]),
            };
            *quant = fit.quant(*value, top) as u8;
        }
        Self { scale, min, scales, mins, quants }
    }
}

/// Encodes numbers, none negative, as multiples of one factor.
fn multiples<const GROUPS: usize>(numbers: [f32; GROUPS], top: f32) -> (f16, [u8; GROUPS]) {
    let most = numbers.iter().copied().fold(0.0, f32::max);
    let factor = f16::from_f32(most / top);
    let unit = factor.to_f32();
    let steps = |number: f32| if unit > 0.0 { (number / unit).round().clamp(0.0, top) as u8 } else { 0 };
    (factor, numbers.map(steps))
}

fn q2_k(values: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 84]) {
    let block = MinBlock::<16>::new(values, importance, 3.0, 15.0);
    out.fill(0);
    for group in 0..16 {
        out[group] = block.scales[group] | block.mins[group] << 4;
    }
    two_bits(&block.quants, &mut out[16..80]);
    out[80..82].copy_from_slice(&block.scale.to_le_bytes());
    out[82..84].copy_from_slice(&block.min.to_le_bytes());
}

/// Packs the lower two bits of each number: 32 bytes hold 128 values, two bits of each byte at a time.
fn two_bits(quants: &[u8; 256], out: &mut [u8]) {
    for (index, q) in quants.iter().enumerate() {
        out[index / 128 * 32 + index % 32] |= (q & 3) << (index % 128 / 32 * 2);
    }
}

fn q4_k(values: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 144]) {
    let block = MinBlock::<8>::new(values, importance, 15.0, 63.0);
    min_block_head(&block, out);
    paired_nibbles(&block.quants, &mut out[16..]);
}

fn q5_k(values: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 176]) {
    let block = MinBlock::<8>::new(values, importance, 31.0, 63.0);
    min_block_head(&block, out);
    out[16..48].fill(0);
    for (index, q) in block.quants.iter().enumerate() {
        out[16 + index % 32] |= (q >> 4) << (index / 32);
    }
    paired_nibbles(&block.quants, &mut out[48..]);
}

/// Packs low nibbles so that 32 bytes hold two groups of 32, the first in the lower halves.
fn paired_nibbles(quants: &[u8; 256], out: &mut [u8]) {
    for (at, out) in out.iter_mut().enumerate() {
        let first = at / 32 * 64 + at % 32;
        *out = quants[first] & 15 | quants[first + 32] << 4;
    }
}

/// Packs factors, 8 scales and 8 minimums as ggml does: the first four of each whole, in the low 6 bits of 8 bytes;
/// the others as nibbles in 4 bytes, with their upper 2 bits in the free bits of the first 8.
fn min_block_head(block: &MinBlock<8>, out: &mut [u8]) {
    out[..2].copy_from_slice(&block.scale.to_le_bytes());
    out[2..4].copy_from_slice(&block.min.to_le_bytes());
    let (scales, mins, bytes) = (&block.scales, &block.mins, &mut out[4..16]);
    for i in 0..4 {
        bytes[i] = scales[i] | scales[i + 4] >> 4 << 6;
        bytes[i + 4] = mins[i] | mins[i + 4] >> 4 << 6;
        bytes[i + 8] = scales[i + 4] & 15 | mins[i + 4] << 4;
    }
}

/// A block of 16 groups with a signed scale each, a multiple of a factor of the block.
struct SignedBlock {
    scale: f16,
    scales: [i8; 16],
    quants: [u8; 256],
}

impl SignedBlock {
    /// Values are `scale * (q - half)`; scales are from `-top_scale` to `top_scale - 1`.
    fn new(values: &[f32; 256], importance: Option<&[f32]>, half: f32, top_scale: f32) -> Self {
        let spread = mean_square(values);
        let mut fits = [0.0; 16];
        for (group, (fit, values)) in fits.iter_mut().zip(values.as_chunks::<16>().0).enumerate() {
            let weights = group_weights(values, importance, group, spread);
            *fit = signed_fit(values, &weights, half);
        }
        let scale = f16::from_f32(extreme(&fits) / -top_scale);
        let unit = scale.to_f32();
        let multiple = |fit: f32| match unit == 0.0 {
            true => 0,
            false => (fit / unit).round().clamp(-top_scale, top_scale - 1.0) as i8,
        };
        let scales = fits.map(multiple);
        let mut quants = [0; 256];
        for (index, (quant, value)) in quants.iter_mut().zip(values).enumerate() {
            *quant = signed_quant(*value, unit * f32::from(scales[index / 16]), half);
        }
        Self { scale, scales, quants }
    }
}

fn q3_k(values: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 110]) {
    let block = SignedBlock::new(values, importance, 4.0, 32.0);
    out.fill(0);
    for (index, q) in block.quants.iter().enumerate() {
        out[index % 32] |= (q >> 2) << (index / 32);
    }
    two_bits(&block.quants, &mut out[32..96]);
    for (i, scale) in block.scales.iter().enumerate() {
        let scale = (scale + 32) as u8;
        out[96 + i % 8] |= (scale & 15) << (i / 8 * 4);
        out[104 + i % 4] |= (scale >> 4) << (i / 4 * 2);
    }
    out[108..].copy_from_slice(&block.scale.to_le_bytes());
}

fn q6_k(values: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 210]) {
    let block = SignedBlock::new(values, importance, 32.0, 128.0);
    out.fill(0);
    for (index, q) in block.quants.iter().enumerate() {
        let (half, quarter, at) = (index / 128, index % 128 / 32, index % 32);
        out[64 * half + 32 * (quarter % 2) + at] |= (q & 15) << (quarter / 2 * 4);
        out[128 + 32 * half + at] |= (q >> 4) << (quarter * 2);
    }
    for (out, scale) in out[192..208].iter_mut().zip(block.scales) {
        *out = scale as u8;
    }
    out[208..].copy_from_slice(&block.scale.to_le_bytes());
}
