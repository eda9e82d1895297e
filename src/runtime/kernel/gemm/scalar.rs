//! The scalar twin: plain Rust, always built, the definition of what every other variant must give bit for bit.

use std::ops::Range;

use super::activation::{Activations, Block};
use super::format::{EMPTY_TILE, Format, ROWS, Tile};
use super::pack::{scale_and_min, unpack_tile};
use super::{Input, Kernels, MAX_WIDTH, Panel, Sums};

pub struct Scalar;

impl Kernels for Scalar {
    const WIDTH: usize = 0;
    const DIRECT_ROWS: usize = 4;
    const PANEL_ROWS: usize = 1;

    unsafe fn direct<F: Format>(panel: &[u8], x: &Activations, first: usize, out: &mut [[f32; ROWS]]) {
        direct::<F>(panel, x, first, out);
    }

    unsafe fn unpack<F: Format>(_: [&[u8]; MAX_WIDTH], _: Range<usize>, _: &mut Panel) {
        unreachable!("there is no panel path");
    }

    unsafe fn multiply<F: Format>(_: &Panel, _: Input<'_>, _: [usize; 2], _: Sums) {
        unreachable!("there is no panel path");
    }
}

/// `out[t][row]` = product of panel row `row` with activation row `first + t`.
pub fn direct<F: Format>(panel: &[u8], x: &Activations, first: usize, out: &mut [[f32; ROWS]]) {
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

/// Adds the part of one scale: a whole tile, or half of it.
fn add_half<F: Format>(
    tile: &Tile,
    half: usize,
    facts: &[[f32; 2]; ROWS],
    block: &Block,
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
