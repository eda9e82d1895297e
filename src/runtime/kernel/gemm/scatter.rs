//! The second half of an expert's feed-forward network in one region: adds `weight * (x . w^T)` to some rows
//! of the output.
//!
//! Invariant: the bits equal those of a product and an [`axpy`] for every row. A task adds its columns when
//! it has computed them, so that the product never leaves the cache and all threads add.

use std::cell::RefCell;

use super::{
    Activations, BLOCK, Kernels, OutputMatrix, Packed, PackedProduct, QuantFormat, ROWS, Variant,
    compute_panels, with_format, with_input, with_kernels,
};
use crate::dot::axpy;
use crate::isa::Isa;
use crate::pool::Pool;

thread_local! {
    /// Products of one task, `[rows, columns]`.
    static PRODUCTS: RefCell<Vec<f32>> = RefCell::default();
}

/// Rows of an output, with the weight of what is added to each.
#[derive(Debug, Clone, Copy)]
pub struct WeightedRows<'a> {
    pub rows: &'a [usize],
    pub weights: &'a [f32],
}

/// Computes `out[rows[i]] += weights[i] * (x[i] . w^T)` for all i, with `out` `[any, n]` for `w` `[n, k]`.
///
/// Panics if the shapes disagree.
pub fn add_matmul(isa: Isa, w: &Packed, x: &Activations, to: WeightedRows<'_>, out: &mut [f32], pool: &Pool) {
    add_matmul_by(Variant::best(isa), isa, w, x, to, out, pool);
}

/// `variant` comes from [`Variant::within`] of `isa`, so the processor has its instructions.
fn add_matmul_by(
    variant: Variant,
    isa: Isa,
    w: &Packed,
    x: &Activations,
    to: WeightedRows<'_>,
    out: &mut [f32],
    pool: &Pool,
) {
    assert_eq!([to.rows.len(), to.weights.len()], [x.rows(); 2], "a row and a weight for every product");
    assert!(x.blocks_per_row() * BLOCK >= w.cols(), "rows of one length");
    with_input(variant, x, pool, |x| {
        let product = PackedProduct { w, x, out: OutputMatrix::new(out, w.rows()), threads: pool.threads() };
        with_kernels!(variant, K => {
            pool.for_each(product.tasks::<K>(), |task| product.add::<K>(isa, task, to));
        });
    });
}

impl PackedProduct<'_> {
    fn add<K: Kernels>(&self, isa: Isa, task: usize, to: WeightedRows<'_>) {
        with_format!(self.w.dtype(), F => self.add_format::<K, F>(isa, task, to), unreachable!());
    }

    fn add_format<K: Kernels, F: QuantFormat>(&self, isa: Isa, task: usize, to: WeightedRows<'_>) {
        let panels = self.panels_of_task::<K>(task);
        let columns = panels.start * ROWS..self.w.rows().min(panels.end * ROWS);
        PRODUCTS.with_borrow_mut(|products| {
            products.resize(self.x.rows.rows() * columns.len(), 0.0);
            compute_panels::<K, F>(self.w, self.x, panels, &OutputMatrix::new(products, columns.len()), 0);
            let sums = to.rows.iter().zip(to.weights).zip(products.chunks_exact(columns.len()));
            for ((&row, &weight), product) in sums {
                self.out.update(row, columns.start, product.len(), |sum| axpy(isa, weight, product, sum));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{GemmRandom, random_weights};
    use super::super::{MatrixSource, matmul};
    use super::*;
    use crate::Dtype;
    use crate::memory::Arena;

    #[test]
    fn sums_are_those_of_products_and_additions_by_every_variant() {
        let mut random = GemmRandom(5);
        let pools = [1, 3].map(|threads| Pool::new(threads).unwrap());
        // Few and many rows; a last panel of fewer than 16 rows, and one panel alone.
        let shapes: &[[usize; 3]] = match cfg!(miri) {
            true => &[[20, 256, 2]],
            false => &[[16, 256, 1], [100, 512, 7], [72, 256, 40], [200, 4096 + 256, 130]],
        };
        for (&[n, k, m], dtype) in shapes.iter().zip([Dtype::Q4K, Dtype::Q6K, Dtype::Q8_0, Dtype::Q4_0]) {
            let bytes = random_weights(dtype, n * k, random.next());
            let source = MatrixSource::new(dtype, [n, k], &bytes);
            let w = Packed::pack(&source, &Arena::default(), &pools[0]).unwrap().unwrap();
            let mut x = Activations::default();
            x.quantize(Isa::Scalar, &random.values(m * k), k, &pools[0]);
            let rows: Vec<usize> = (0..m).map(|row| 2 * row + 1).collect();
            let (weights, before) = (random.values(m), random.values((2 * m + 1) * n));
            let (mut product, mut expected) = (vec![0.0; m * n], before.clone());
            matmul(Isa::Scalar, &w, &x, &mut product, &pools[0]);
            for ((row, weight), product) in rows.iter().zip(&weights).zip(product.chunks_exact(n)) {
                axpy(Isa::Scalar, *weight, product, &mut expected[row * n..][..n]);
            }
            let to = WeightedRows { rows: &rows, weights: &weights };
            let variants = Isa::available().flat_map(|isa| Variant::within(isa).map(move |v| (isa, v)));
            for ((isa, variant), pool) in variants.flat_map(|variant| pools.iter().map(move |p| (variant, p)))
            {
                let mut sums = before.clone();
                add_matmul_by(variant, isa, &w, &x, to, &mut sums, pool);
                let same = sums.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{dtype:?} {n} x {k}, {m} rows, {variant:?}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "within the output")]
    fn rows_past_the_output_are_refused() {
        let pool = Pool::new(1).unwrap();
        let bytes = random_weights(Dtype::Q8_0, 32 * 32, 1);
        let source = MatrixSource::new(Dtype::Q8_0, [32, 32], &bytes);
        let w = Packed::pack(&source, &Arena::default(), &pool).unwrap().unwrap();
        let mut x = Activations::default();
        x.quantize(Isa::Scalar, &[1.0; 32], 32, &pool);
        let to = WeightedRows { rows: &[2], weights: &[1.0] };
        add_matmul(Isa::Scalar, &w, &x, to, &mut [0.0; 64], &pool);
    }
}
