//! The scalar twin: plain Rust, always built, the definition of what every other variant must give bit for bit.

use std::ops::Range;

use super::{BLOCK, MAX_ROWS, Panel, ROWS, Row, Sums, TILE, WIDTH};

pub fn multiply(w: [Panel<'_>; WIDTH], x: [Row<'_>; MAX_ROWS], blocks: Range<usize>, sums: &mut [Sums]) {
    for (sums, x) in sums.iter_mut().zip(x) {
        for (sums, w) in sums.chunks_exact_mut(ROWS).zip(w) {
            for block in blocks.clone() {
                add_block(w, x, block, sums);
            }
        }
    }
}

fn add_block(w: Panel<'_>, x: Row<'_>, block: usize, sums: &mut [f32]) {
    let mut dots = [0i32; ROWS];
    let pairs = w.codes[block * TILE..][..TILE].chunks_exact(TILE / (BLOCK / 2));
    for (pair, x) in pairs.zip(x.codes[block].as_chunks::<2>().0) {
        for (dot, w) in dots.iter_mut().zip(pair.as_chunks::<2>().0) {
            *dot += i32::from(w[0]) * i32::from(x[0]) + i32::from(w[1]) * i32::from(x[1]);
        }
    }
    for (row, (sum, dot)) in sums.iter_mut().zip(dots).enumerate() {
        *sum = (dot as f32).mul_add(w.scale(block, row) * x.scales[block], *sum);
    }
}
