//! Products of several weights, each with activation rows of its own, in one region: what experts compute for the few
//! rows that each has.
//!
//! Invariant: every output is that of [`matmul`](super::matmul) with the same row and weights. All use the direct path, so this is
//! meant for products of [few](super::is_few) rows.

use std::ops::Range;

use super::activation::Activations;
use super::format::{BLOCK, ROWS, with_format};
use super::{Kernels, OutputMatrix, Packed, SERIAL_LIMIT, TASK_BYTES, Variant, direct, with_kernels};
use crate::isa::Isa;
use crate::pool::Pool;

/// A product with some of the activation rows: `out[rows.len(), n] = x[rows] . w[n, k]^T`.
pub struct RowsProduct<'a> {
    pub w: &'a Packed,
    pub rows: Range<usize>,
    pub out: &'a mut [f32],
}

/// Computes all products in one parallel region. Panics if the shapes disagree.
pub fn matmul_grouped<'a>(
    isa: Isa,
    x: &Activations,
    products: impl IntoIterator<Item = RowsProduct<'a>>,
    pool: &Pool,
) {
    grouped_by(Variant::best(isa), x, products, pool);
}

/// `variant` comes from [`Variant::within`], so the processor has its instructions.
fn grouped_by<'a>(
    variant: Variant,
    x: &Activations,
    products: impl IntoIterator<Item = RowsProduct<'a>>,
    pool: &Pool,
) {
    let (mut end, mut work) = (0, 0);
    let parts: Vec<GroupedProduct<'a>> = products
        .into_iter()
        .map(|RowsProduct { w, rows, out }| {
            assert!(rows.end <= x.rows() && x.blocks_per_row() * BLOCK >= w.cols(), "rows of one length");
            assert_eq!(out.len(), rows.len() * w.rows(), "an output for every pair of rows");
            let panels_per_task = TASK_BYTES.div_ceil(w.panel_bytes());
            let first_task = end;
            end += w.panels().div_ceil(panels_per_task);
            work += w.rows() * w.cols() * rows.len();
            GroupedProduct { w, rows, out: OutputMatrix::new(out, w.rows()), panels_per_task, first_task }
        })
        .collect();
    let task = |index: usize| {
        let part = &parts[parts.partition_point(|part| part.first_task <= index) - 1];
        with_kernels!(variant, K => part.compute::<K>(x, index - part.first_task));
    };
    if work >= SERIAL_LIMIT { pool.for_each(end, task) } else { (0..end).for_each(task) }
}

struct GroupedProduct<'a> {
    w: &'a Packed,
    rows: Range<usize>,
    out: OutputMatrix,
    panels_per_task: usize,
    /// Number of its first task among those of all products.
    first_task: usize,
}

impl GroupedProduct<'_> {
    fn compute<K: Kernels>(&self, x: &Activations, task: usize) {
        let first = task * self.panels_per_task;
        let panels = first..self.w.panels().min(first + self.panels_per_task);
        with_format!(
            self.w.dtype(),
            F => panels.for_each(|panel| direct::<K, F>(self.w, x, self.rows.clone(), panel, &self.out, panel * ROWS)),
            unreachable!()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{GemmRandom, random_weights};
    use super::super::{MatrixSource, matmul_by};
    use super::*;
    use crate::Dtype;
    use crate::memory::Arena;

    #[test]
    fn every_product_has_the_bits_of_its_rows_alone_by_every_variant() {
        let mut random = GemmRandom(83);
        let pools = [1, 3].map(|threads| Pool::new(threads).unwrap());
        let k = 512;
        // Types, numbers of outputs and rows: some without any rows, an odd number of outputs, more rows than a call takes.
        let shapes = [
            (Dtype::Q4K, 96, 0..1),
            (Dtype::Q6K, 40, 1..1),
            (Dtype::Q4K, 19, 1..14),
            (Dtype::Q8_0, 160, 14..16),
            (Dtype::Mxfp4, 16, 3..7),
        ];
        let weights: Vec<Packed> = shapes
            .iter()
            .map(|(dtype, n, _)| {
                let bytes = random_weights(*dtype, n * k, random.next());
                let source = MatrixSource::new(*dtype, [*n, k], &bytes);
                Packed::pack(&source, &Arena::default(), &pools[0]).unwrap().unwrap()
            })
            .collect();
        let mut x = Activations::default();
        x.quantize(Isa::Scalar, &random.values(16 * k), k, &pools[0]);
        for variant in Isa::available().flat_map(Variant::within) {
            for pool in &pools {
                let lens = shapes.iter().map(|(_, n, rows)| n * rows.len());
                let mut outs: Vec<Vec<f32>> = lens.map(|len| vec![f32::NAN; len]).collect();
                let products = weights.iter().zip(&shapes).zip(&mut outs);
                let products = products.map(|((w, (_, _, rows)), out)| RowsProduct {
                    w,
                    rows: rows.clone(),
                    out: &mut out[..],
                });
                grouped_by(variant, &x, products, pool);
                for ((w, (dtype, n, rows)), got) in weights.iter().zip(&shapes).zip(&outs) {
                    for (row, got) in rows.clone().zip(got.chunks_exact(*n)) {
                        let mut alone = Activations::default();
                        alone.gather(&x, std::iter::once(row));
                        let mut expected = vec![0.0; *n];
                        matmul_by(Variant::Scalar, &alone, [(w, &mut expected[..])], pool);
                        assert!(*got == expected[..], "{dtype:?}, row {row}, {variant:?}");
                    }
                }
            }
        }
    }
}
