//! Changes of products by matrices of low rank. Those of one input and the same rows are computed together.

use super::{Cpu, CpuBuffer, CpuWeight};
use crate::backend::{Backend, LowRankChange, Product};
use crate::tensor::HostTensor;
use llmctl_base::error::{LoadError, Result};
use llmctl_kernel::gemm::{LowRankSum, LowRankUp};

/// Matrices of a change. `down` is packed, and its panels are not kept on disk: it is small.
pub struct CpuLowRank {
    down: CpuWeight,
    up: LowRankUp,
    factor: f32,
}

/// Memory for changes: selected rows of the input, and for each change the product with `down`.
#[derive(Default)]
pub struct LowRankScratch {
    selected: CpuBuffer,
    inner: Vec<CpuBuffer>,
}

impl Cpu {
    /// # Errors
    /// Those of [`Backend::low_rank`].
    pub(super) fn upload_low_rank(
        &self,
        [down, up]: [&HostTensor; 2],
        factor: f32,
    ) -> Result<CpuLowRank, LoadError> {
        let rearranged = LowRankUp::new(up.dtype, up.rows_cols().into(), &up.bytes);
        Ok(CpuLowRank { down: self.packed(down)?, up: rearranged, factor })
    }

    /// Calls `with` with the sum that each of `changes` adds to a product of `x`.
    pub(super) fn with_sums(
        &self,
        x: &CpuBuffer,
        changes: &[&LowRankChange<'_, Self>],
        with: impl FnOnce(&[LowRankSum<'_>]),
    ) -> Result<()> {
        let LowRankScratch { selected, inner } = &mut *self.low_rank.borrow_mut();
        if inner.len() < changes.len() {
            inner.resize_with(changes.len(), CpuBuffer::default);
        }
        let mut rest: Vec<_> = changes.iter().zip(&mut *inner).collect();
        while let Some((first, _)) = rest.first() {
            let rows = first.to.rows;
            let (group, others): (Vec<_>, Vec<_>) =
                rest.into_iter().partition(|(change, _)| std::ptr::eq(change.to.rows, rows));
            rest = others;
            let is_part = rows.len() < x.num_rows();
            if is_part {
                self.select_rows(x, rows, selected)?;
            }
            let product = |(change, out)| {
                let change: &&LowRankChange<'_, Self> = change;
                Product::new(&change.matrices.down, None, out)
            };
            let mut products: Vec<_> = group.into_iter().map(product).collect();
            self.matmul_each(if is_part { &*selected } else { x }, &mut products)?;
        }
        let sums = changes.iter().zip(&*inner).map(|(change, inner)| LowRankSum {
            up: &change.matrices.up,
            x: inner.values(),
            to: change.to,
            factor: change.matrices.factor,
        });
        with(&sums.collect::<Vec<_>>());
        Ok(())
    }

    /// Changes the results of products of `x`, and empties their lists of changes.
    pub(super) fn change_each(&self, x: &CpuBuffer, products: &mut [Product<'_, Self>]) -> Result<()> {
        if products.iter().all(|product| product.changes.is_empty()) {
            return Ok(());
        }
        let of_products: Vec<Vec<_>> =
            products.iter_mut().map(|product| std::mem::take(&mut product.changes)).collect();
        let changes: Vec<_> = of_products.iter().flatten().collect();
        self.with_sums(x, &changes, |sums| {
            let mut sums = sums.iter();
            for (Product { out, .. }, changes) in products.iter_mut().zip(&of_products) {
                let sums = sums.by_ref().take(changes.len());
                sums.for_each(|sum| sum.add(self.isa, out.values_mut(), &self.pool()));
            }
        })
    }
}
