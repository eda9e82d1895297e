//! Experts that few rows use, together: three parallel regions for up to [`EXPERTS_TOGETHER`] of them, where each by itself would
//! take as many. A row's parts are added in the order of the experts, so that the bits are those of one expert after the other.

use super::{Cpu, CpuBuffer, CpuScratch, packed_network};
use crate::backend::{EXPERTS_TOGETHER, ExpertVisit};
use crate::model::config::Activation;
use llmctl_kernel::gemm::FewProduct;
use llmctl_kernel::{dot, gemm, math};

impl Cpu {
    /// Adds the experts' parts to `out`. Returns false, and has done nothing, for a single expert, more than few rows of one, or
    /// weights that are not quantised.
    pub(super) fn add_few(
        &self,
        x: &CpuBuffer,
        activation: Activation,
        visits: &[Option<ExpertVisit<'_, Cpu>>; EXPERTS_TOGETHER],
        out: &mut CpuBuffer,
    ) -> bool {
        let isa = self.isa;
        let each = || visits.iter().flatten();
        let are_few = each().count() > 1 && each().all(|visit| gemm::is_few(isa, visit.to.rows.len()));
        let Some(quantized) = x.quantized().filter(|_| are_few) else { return false };
        self.prepare(each().flat_map(|visit| visit.weights));
        let CpuScratch { quantized: selected, gated, reordered: space, visited, .. } =
            &mut *self.scratch.borrow_mut();
        visited.clear();
        let parts = visits.each_ref().map(|visit| {
            let visit = visit.as_ref()?;
            let first = visited.len();
            visited.extend(visit.to.rows);
            Some((packed_network(x.width(), visit.weights)?, first..visited.len()))
        });
        let mut shapes = parts.iter().flatten().map(|([gate, _, down], _)| [gate.rows(), down.rows()]);
        let Some([inner, hidden]) = shapes.next() else { return false };
        if parts.iter().flatten().count() != each().count() || shapes.any(|shape| shape != [inner, hidden]) {
            return false;
        }
        selected.select(quantized, visited, &self.pool());
        let len = visited.len() * inner;
        space.resize((2 * len).max(visited.len() * hidden), 0.0);
        let (gates, ups) = space.split_at_mut(len);
        let mut rests = [&mut *gates, &mut *ups];
        let first_half: [Option<FewProduct<'_>>; 2 * EXPERTS_TOGETHER] = std::array::from_fn(|at| {
            let (weights, rows) = parts[at / 2].as_ref()?;
            let out = rests[at % 2].split_off_mut(..rows.len() * inner)?;
            Some((weights[at % 2], rows.clone(), out))
        });
        gemm::matmul_few(isa, selected, first_half, &self.pool());
        gated.quantize_made(isa, gates, inner, &self.pool(), |row, gate| {
            math::activate(isa, activation, gate, &ups[row * inner..][..inner]);
        });
        let mut rest = &mut space[..];
        let second_half: [Option<FewProduct<'_>>; EXPERTS_TOGETHER] = std::array::from_fn(|at| {
            let ([_, _, down], rows) = parts[at].as_ref()?;
            Some((*down, rows.clone(), rest.split_off_mut(..rows.len() * hidden)?))
        });
        gemm::matmul_few(isa, gated, second_half, &self.pool());
        let weights = each().flat_map(|visit| visit.to.weights);
        for ((&row, weight), result) in visited.iter().zip(weights).zip(space.chunks_exact(hidden)) {
            dot::axpy(isa, *weight, result, &mut out.values_mut()[row * hidden..][..hidden]);
        }
        true
    }
}
