//! Products of a block of weight rows with a batch of activation rows, all f32.
//!
//! Every output is one inner product in [`dot`](super::dot)'s order, so the result depends neither on tiling
//! nor on batch size.

use super::dot::sum_lanes;
use super::wide::{LANES, Wide, dispatch_wide};

/// Rows of `w` and of `x` that one task computes together: their 16 sums fit the registers.
const TILE: usize = 4;

/// Shapes of one call of [`block`].
#[derive(Debug, Clone, Copy)]
pub struct MatmulShape {
    /// Length of every row.
    pub k: usize,
    /// Activation rows.
    pub m: usize,
}

dispatch_wide! {
    /// Computes `out[n, m] = w[n, k] . x[m, k]^T`: one row of `out` per weight row. `k` must not be 0.
    pub fn block(shape: MatmulShape, w: &[f32], x: &[f32], out: &mut [f32]) = block_body
}

/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn block_body<V: Wide>(MatmulShape { k, m }: MatmulShape, w: &[f32], x: &[f32], out: &mut [f32]) {
    for (w, out) in w.chunks(TILE * k).zip(out.chunks_mut(TILE * m)) {
        for (index, x) in x.chunks(TILE * k).enumerate() {
            // SAFETY: by this function's contract.
            unsafe {
                match (w.len() / k, x.len() / k) {
                    (TILE, TILE) => tile::<V, TILE, TILE>([k, m], w, x, index * TILE, out),
                    (TILE, 1) => tile::<V, TILE, 1>([k, m], w, x, index * TILE, out),
                    (rows, columns) => {
                        for row in 0..rows {
                            for column in 0..columns {
                                let (w, x) = (&w[row * k..][..k], &x[column * k..][..k]);
                                let out = &mut out[row * m..][..m];
                                tile::<V, 1, 1>([k, m], w, x, index * TILE + column, out);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Multiplies `R` weight rows with `C` activation rows; the results go to the columns of `out` from `at` on.
///
/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn tile<V: Wide, const R: usize, const C: usize>(
    [k, m]: [usize; 2],
    w: &[f32],
    x: &[f32],
    at: usize,
    out: &mut [f32],
) {
    let blocks = k / LANES;
    let w: [_; R] = std::array::from_fn(|row| w[row * k..][..k].as_chunks::<LANES>());
    let x: [_; C] = std::array::from_fn(|column| x[column * k..][..k].as_chunks::<LANES>());
    // SAFETY: by this function's contract.
    unsafe {
        let mut sums = [[V::zero(); C]; R];
        for block in 0..blocks {
            let mut columns = [V::zero(); C];
            for column in 0..C {
                columns[column] = V::load(&x[column].0[block]);
            }
            for row in 0..R {
                let weights = V::load(&w[row].0[block]);
                for column in 0..C {
                    sums[row][column] = sums[row][column].fma(weights, columns[column]);
                }
            }
        }
        for row in 0..R {
            for column in 0..C {
                let mut lanes = sums[row][column].lanes();
                for (lane, (a, b)) in lanes.iter_mut().zip(w[row].1.iter().zip(x[column].1)) {
                    *lane = a.mul_add(*b, *lane);
                }
                out[row * m + at + column] = sum_lanes(lanes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::dot::dot;
    use super::super::isa::{Isa, available};
    use super::*;

    #[test]
    fn every_output_is_the_inner_product_of_its_rows_bit_for_bit() {
        for (n, m, k) in [
            (1, 1, 1),
            (2, 4, 16),
            (3, 5, 33),
            (4, 17, 64),
            (5, 3, 100),
            (7, 9, 31),
            (16, 8, 48),
            (6, 13, 20),
        ] {
            let w: Vec<f32> = (0..n * k).map(|i| ((i * 37 % 101) as f32 - 50.0) / 13.0).collect();
            let x: Vec<f32> = (0..m * k).map(|i| ((i * 53 % 97) as f32 - 48.0) / 7.0).collect();
            for isa in available() {
                let mut out = vec![0.0; n * m];
                block(isa, MatmulShape { k, m }, &w, &x, &mut out);
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
