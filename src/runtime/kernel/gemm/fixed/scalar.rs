//! The scalar twin: plain Rust, always built; it defines the bits that every other variant must produce.

use super::{BLOCK, FixedPanel, FixedRow, MAX_ROWS, ROWS, RowSums, TILE};

pub fn multiply(w: &[FixedPanel<'_>], x: [FixedRow<'_>; MAX_ROWS], blocks: usize, sums: &mut [RowSums]) {
    for (sums, x) in sums.iter_mut().zip(x) {
        for (sums, w) in sums.chunks_exact_mut(ROWS).zip(w.iter().copied()) {
            for block in 0..blocks {
                add_block(w, x, block, sums);
            }
        }
    }
}

fn add_block(w: FixedPanel<'_>, x: FixedRow<'_>, block: usize, sums: &mut [f32]) {
    let mut dots = [0i32; ROWS];
    let pairs = w.codes[block * TILE..][..TILE].chunks_exact(TILE / (BLOCK / 2));
    for (pair, x) in pairs.zip(x[block].codes.as_chunks::<2>().0) {
        for (dot, w) in dots.iter_mut().zip(pair.as_chunks::<2>().0) {
            *dot += i32::from(w[0]) * i32::from(x[0]) + i32::from(w[1]) * i32::from(x[1]);
        }
    }
    for (row, (sum, dot)) in sums.iter_mut().zip(dots).enumerate() {
        *sum = (dot as f32).mul_add(w.scale(block, row) * x[block].scale, *sum);
    }
}
