//! The scalar twin: plain Rust, always built; it defines the bits that every other variant must produce.

use std::ops::Range;

use super::activation::{ActivationBlock, Activations};
use super::format::{CodeTile, EMPTY_TILE, QuantFormat, ROWS};
use super::pack::{scale_and_min, unpack_tile};
use super::{GemmInput, Kernels, Panels, SumsPtr, WeightPanel};

pub struct Scalar;

impl Kernels for Scalar {
    const WIDTH: usize = 0;
    const DIRECT_ROWS: usize = 4;
    const PANEL_ROWS: usize = 1;

    unsafe fn direct<F: QuantFormat>(panel: &[u8], x: &Activations, first: usize, out: &mut [[f32; ROWS]]) {
        direct::<F>(panel, x, first, out);
    }

    unsafe fn unpack<F: QuantFormat>(_: Panels<'_>, _: Range<usize>, _: &mut WeightPanel) {
        unreachable!("there is no panel path");
    }

    unsafe fn multiply<F: QuantFormat>(_: &WeightPanel, _: GemmInput<'_>, _: [usize; 2], _: SumsPtr) {
        unreachable!("there is no panel path");
    }
}

/// Computes `out[t][row]` = product of panel row `row` with activation row `first + t`.
pub fn direct<F: QuantFormat>(panel: &[u8], x: &Activations, first: usize, out: &mut [[f32; ROWS]]) {
    out.fill([0.0; ROWS]);
    let mut tile = EMPTY_TILE;
    for (index, unit) in panel.chunks_exact(F::UNIT_BYTES).enumerate() {
        for at in 0..F::TILES {
            unpack_tile::<F>(unit, at, &mut tile);
            for half in 0..F::SCALES.per_tile() {
                let facts: [[f32; 2]; ROWS] =
                    std::array::from_fn(|row| scale_and_min(F::SCALES, unit, at, half, row));
                for (token, sums) in out.iter_mut().enumerate() {
                    let block = &x.row(first + token)[index * F::TILES + at];
                    add_half::<F>(&tile, half, &facts, block, sums);
                }
            }
        }
    }
}

/// Adds the products for one scale: a whole tile, or half of it.
fn add_half<F: QuantFormat>(
    tile: &CodeTile,
    half: usize,
    facts: &[[f32; 2]; ROWS],
    block: &ActivationBlock,
    sums: &mut [f32; ROWS],
) {
    let whole = F::SCALES.per_tile() == 1;
    let groups = tile.len() / F::SCALES.per_tile();
    let (minus_sum, scaled_sum) = match whole {
        true => (block.minus_sum, block.scaled_sum),
        false => (block.half_minus_sums[half], block.half_scaled_sums[half]),
    };
    let mut dots = [F::ZERO * minus_sum; ROWS];
    let codes = block.codes.chunks_exact(4).skip(half * groups);
    for (group, x) in tile[half * groups..][..groups].iter().zip(codes) {
        for (dot, w) in dots.iter_mut().zip(group.chunks_exact(4)) {
            for j in 0..4 {
                *dot += i32::from(w[j]) * i32::from(x[j]);
            }
        }
    }
    for ((sum, dot), [scale, min]) in sums.iter_mut().zip(dots).zip(facts) {
        *sum = (dot as f32).mul_add(scale * block.scale, *sum);
        if F::SCALES.has_min() {
            *sum = min.mul_add(scaled_sum, *sum);
        }
    }
}
