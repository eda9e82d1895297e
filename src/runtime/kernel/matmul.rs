//! Products of a block of weight rows with a batch of activation rows, all f32.
//!
//! Every output is one inner product in [`dot`](super::dot)'s order, so tiling and batch size do not show in the result.

use super::dot::{TILE_X, dot_body, tile_body};
use super::isa::dispatch;

/// Shapes of one call of [`block`].
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Length of every row.
    pub k: usize,
    /// Activation rows.
    pub m: usize,
}

#[inline(always)]
fn block_body(shape: Shape, w: &[f32], x: &[f32], out: &mut [f32]) {
    let Shape { k, m } = shape;
    let mut w_rows = w.chunks_exact(2 * k);
    let mut outs = out.chunks_exact_mut(2 * m);
    for (pair, out) in w_rows.by_ref().zip(outs.by_ref()) {
        let (w0, w1) = pair.split_at(k);
        let (out0, out1) = out.split_at_mut(m);
        pair_body(k, [w0, w1], x, [out0, out1]);
    }
    let last = w_rows.remainder();
    if !last.is_empty() {
        for (out, x) in outs.into_remainder().iter_mut().zip(x.chunks_exact(k)) {
            *out = dot_body(last, x);
        }
    }
}

#[inline(always)]
fn pair_body(k: usize, w: [&[f32]; 2], x: &[f32], out: [&mut [f32]; 2]) {
    let [out0, out1] = out;
    let mut tiles = x.chunks_exact(TILE_X * k);
    let mut at = 0;
    for tile in tiles.by_ref() {
        let rows = std::array::from_fn(|row| &tile[row * k..(row + 1) * k]);
        let sums = tile_body(w, rows);
        out0[at..at + TILE_X].copy_from_slice(&sums[0]);
        out1[at..at + TILE_X].copy_from_slice(&sums[1]);
        at += TILE_X;
    }
    for x in tiles.remainder().chunks_exact(k) {
        out0[at] = dot_body(w[0], x);
        out1[at] = dot_body(w[1], x);
        at += 1;
    }
}

dispatch! {
    /// `out[n, m] = w[n, k] . x[m, k]^T`: one row of `out` per weight row. `k` must not be 0.
    pub fn block(shape: Shape, w: &[f32], x: &[f32], out: &mut [f32]) = block_body
}

#[cfg(test)]
mod tests {
    use super::super::dot::dot;
    use super::super::isa::{Isa, available};
    use super::*;

    #[test]
    fn every_output_is_the_inner_product_of_its_rows_bit_for_bit() {
        for (n, m, k) in [(1, 1, 1), (2, 4, 16), (3, 5, 33), (4, 17, 64), (5, 3, 100), (7, 9, 31)] {
            let w: Vec<f32> = (0..n * k).map(|i| ((i * 37 % 101) as f32 - 50.0) / 13.0).collect();
            let x: Vec<f32> = (0..m * k).map(|i| ((i * 53 % 97) as f32 - 48.0) / 7.0).collect();
            for isa in available() {
                let mut out = vec![0.0; n * m];
                block(isa, Shape { k, m }, &w, &x, &mut out);
                for row in 0..n {
                    for column in 0..m {
                        let expected =
                            dot(Isa::Scalar, &w[row * k..(row + 1) * k], &x[column * k..(column + 1) * k]);
                        assert_eq!(
                            out[row * m + column].to_bits(),
                            expected.to_bits(),
                            "{isa:?} {n} {m} {k}"
                        );
                    }
                }
            }
        }
    }
}
