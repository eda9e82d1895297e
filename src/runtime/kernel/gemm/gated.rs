//! The first half of a gated feed-forward network in one region: `act(x . gate^T) * (x . up^T)`, quantised
//! when computed.
//!
//! Invariant: the blocks equal those of two products, the activation and [`Activations::quantize`], in this
//! order. For a prompt the intermediate values exceed the caches; here they are computed and used 32 columns
//! (one block) at a time. For few rows this is slower than separate operations: a thread would alternate
//! between two matrices.

use std::cell::RefCell;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::activation::{ActivationBlock, Activations, quantize_row};
use super::format::{BLOCK, ROWS, with_format};
use super::low_rank::{self, LowRankSum};
use super::{GemmInput, Kernels, OutputMatrix, Packed, Variant, compute_panels, with_input, with_kernels};
use crate::isa::Isa;
use crate::math::{self, Activation};
use crate::pool::Pool;

/// Packed panels per block of columns.
const STRIP_PANELS: usize = BLOCK / ROWS;

const _: () = assert!(BLOCK == low_rank::COLUMNS, "a strip is a block of a sum");

thread_local! {
    /// Results of a strip's gate and up, `[rows, 32]` each.
    static STRIP: RefCell<[Vec<f32>; 2]> = RefCell::default();
}

/// Sums that adapters add to a gated network, and a second output.
#[derive(Default)]
pub struct GatedSums<'a> {
    /// Sums for the products with gate and up; they are added before the activation.
    pub sums: [&'a [LowRankSum<'a>]; 2],
    /// Receives the result in f32, `[rows, outputs]`, if it is not empty.
    pub values: &'a mut [f32],
}

/// Computes `out = act(x . gate^T) * (x . up^T)`, for `[gate, up]` with the same number of rows, a multiple of 32.
///
/// Panics if the shapes disagree.
pub fn gated(
    isa: Isa,
    x: &Activations,
    weights: [&Packed; 2],
    activation: Activation,
    (sums, out): (GatedSums<'_>, &mut Activations),
    pool: &Pool,
) {
    gated_by(Variant::best(isa), isa, x, weights, activation, (sums, out), pool);
}

/// `variant` comes from [`Variant::within`] of `isa`, so the processor has its instructions.
pub(super) fn gated_by(
    variant: Variant,
    isa: Isa,
    x: &Activations,
    weights: [&Packed; 2],
    activation: Activation,
    (GatedSums { sums, values }, out): (GatedSums<'_>, &mut Activations),
    pool: &Pool,
) {
    let cols = weights[0].rows();
    sums.into_iter().flatten().for_each(|sum| sum.check(isa, cols));
    assert!(values.is_empty() || values.len() == x.rows() * cols, "a value for each output");
    let values = (!values.is_empty()).then(|| OutputMatrix::new(values, cols));
    assert_eq!(cols, weights[1].rows(), "a gate for every value");
    assert!(weights.iter().all(|w| x.blocks_per_row() * BLOCK >= w.cols()), "rows of one length");
    let blocks = out.reset(x.rows(), cols);
    let (len, first) = (blocks.len(), AtomicPtr::new(blocks.as_mut_ptr()));
    let per_row = len.checked_div(x.rows()).unwrap_or(0);
    with_input(variant, x, pool, |x| {
        let job = GatedProduct { isa, x, weights, activation, sums, values, first, len, per_row };
        with_kernels!(variant, K => job.run::<K>(pool));
    });
}

struct GatedProduct<'a> {
    isa: Isa,
    x: GemmInput<'a>,
    weights: [&'a Packed; 2],
    activation: Activation,
    sums: [&'a [LowRankSum<'a>]; 2],
    values: Option<OutputMatrix>,
    /// Pointer to the blocks of the result, `len` of them.
    first: AtomicPtr<ActivationBlock>,
    len: usize,
    per_row: usize,
}

impl GatedProduct<'_> {
    fn run<K: Kernels>(&self, pool: &Pool) {
        pool.for_each(self.weights[0].rows() / BLOCK, |strip| self.strip::<K>(strip));
    }

    /// Computes 32 columns of all rows.
    fn strip<K: Kernels>(&self, strip: usize) {
        STRIP.with_borrow_mut(|values| {
            for ((w, sums), values) in self.weights.iter().zip(self.sums).zip(&mut *values) {
                values.resize(self.x.rows.rows() * BLOCK, 0.0);
                let out = OutputMatrix::new(values, BLOCK);
                let panels = strip * STRIP_PANELS..(strip + 1) * STRIP_PANELS;
                with_format!(w.dtype(), F => compute_panels::<K, F>(w, self.x, panels, &out, 0), unreachable!());
                for sum in sums {
                    sum.add_block(self.isa, strip, 0..sum.to.rows.len(), (&out, 0));
                }
            }
            let [gate, up] = values;
            math::activate(self.isa, self.activation, gate, up);
            for (row, values) in gate.chunks_exact(BLOCK).enumerate() {
                quantize_row(self.isa, values, std::slice::from_mut(self.block(row, strip)));
                self.values.iter().for_each(|out| out.store(row, strip * BLOCK, values));
            }
        });
    }

    /// Returns block `strip` of a row of the result, which no other task uses.
    #[allow(clippy::mut_from_ref, reason = "tasks write through what they share")]
    fn block(&self, row: usize, strip: usize) -> &mut ActivationBlock {
        let index = row * self.per_row + strip;
        assert!(strip < self.per_row && index < self.len, "within the result");
        // SAFETY: in bounds by the assertion, of blocks that stay borrowed mutably during `gated_by`; every strip is given out
        // once, and within it every row.
        unsafe { &mut *self.first.load(Ordering::Relaxed).add(index) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{GemmRandom, random_weights};
    use super::super::{LowRankUp, MatrixSource, WeightedRows, matmul};
    use super::*;
    use crate::Dtype;
    use crate::memory::Arena;

    const RANK: usize = 3;
    const ACTIVATIONS: [Activation; 3] =
        [Activation::Silu, Activation::GeluTanh, Activation::ClampedSwish { alpha: 1.702, limit: 7.0 }];

    /// Generates `[gate, up]` of different types with the same rows and columns.
    fn weights(types: [Dtype; 2], [n, k]: [usize; 2], random: &mut GemmRandom, pool: &Pool) -> [Packed; 2] {
        types.map(|dtype| {
            let bytes = random_weights(dtype, n * k, random.next());
            Packed::pack(&MatrixSource::new(dtype, [n, k], &bytes), &Arena::default(), pool).unwrap().unwrap()
        })
    }

    #[test]
    fn one_region_gives_the_bits_of_the_steps_by_every_variant() {
        let mut random = GemmRandom(71);
        let pools = [1, 3].map(|threads| Pool::new(threads).unwrap());
        let types = [[Dtype::Q4K, Dtype::Q4K], [Dtype::Q4_0, Dtype::Q6K], [Dtype::Q8_0, Dtype::Q5_0]];
        // Few rows, many rows, and more blocks than are unpacked together; an odd number of blocks, so that there is
        // padding.
        let shapes: &[[usize; 3]] = match cfg!(miri) {
            true => &[[32, 256, 2]],
            false => &[[32, 256, 1], [96, 512, 7], [160, 256, 100], [32, 4096 + 512, 97]],
        };
        for (types, activation) in types.into_iter().zip(ACTIVATIONS) {
            for &[n, k, m] in shapes {
                let [gate, up] = weights(types, [n, k], &mut random, &pools[0]);
                let mut x = Activations::default();
                x.quantize(Isa::Scalar, &random.values(m * k), k, &pools[0]);
                let [mut a, mut b] = [(); 2].map(|()| vec![0.0; m * n]);
                matmul(Isa::Scalar, &gate, &x, &mut a, &pools[0]);
                matmul(Isa::Scalar, &up, &x, &mut b, &pools[0]);
                // Every second row gets something more.
                let rows: Vec<usize> = (0..m).step_by(2).collect();
                let (weights, inner) = (vec![0.5; rows.len()], random.values(rows.len() * RANK));
                let to = WeightedRows { rows: &rows, weights: &weights };
                let matrices = [(); 2].map(|()| {
                    let values = random.values(n * RANK);
                    LowRankUp::new(Dtype::F32, [n, RANK], bytemuck::cast_slice(&values))
                });
                let added = matrices.each_ref().map(|up| [LowRankSum { up, x: &inner, to, factor: 2.0 }]);
                added[0][0].add(Isa::Scalar, &mut a, &pools[0]);
                added[1][0].add(Isa::Scalar, &mut b, &pools[0]);
                math::activate(Isa::Scalar, activation, &mut a, &b);
                let mut expected = Activations::default();
                expected.quantize(Isa::Scalar, &a, n, &pools[0]);
                let variants = Isa::available().flat_map(|isa| Variant::within(isa).map(move |v| (isa, v)));
                // Contents of an earlier call must not matter.
                let mut got = Activations::default();
                got.quantize(Isa::Scalar, &[1.0; 640], 64, &pools[0]);
                for ((isa, variant), pool) in
                    variants.flat_map(|variant| pools.iter().map(move |p| (variant, p)))
                {
                    let mut values = vec![0.0; m * n];
                    let sums =
                        GatedSums { sums: added.each_ref().map(|sums| &sums[..]), values: &mut values };
                    gated_by(variant, isa, &x, [&gate, &up], activation, (sums, &mut got), pool);
                    assert!(values == a, "{types:?} {n} x {k}, {m} rows, {variant:?}");
                    assert_eq!((got.rows(), got.blocks_per_row()), (m, expected.blocks_per_row()));
                    let same = (0..m).all(|row| got.row(row) == expected.row(row));
                    assert!(same, "{types:?} {n} x {k}, {m} rows, {variant:?}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "a gate for every value")]
    fn gates_that_do_not_fit_are_refused() {
        let pool = Pool::new(1).unwrap();
        let mut random = GemmRandom(1);
        let [gate, _] = weights([Dtype::Q8_0; 2], [32, 32], &mut random, &pool);
        let [_, up] = weights([Dtype::Q8_0; 2], [64, 32], &mut random, &pool);
        let mut x = Activations::default();
        x.quantize(Isa::Scalar, &[1.0; 32], 32, &pool);
        let out = (GatedSums::default(), &mut Activations::default());
        gated(Isa::Scalar, &x, [&gate, &up], Activation::Silu, out, &pool);
    }
}
