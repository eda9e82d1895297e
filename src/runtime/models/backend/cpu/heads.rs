//! Products and rearrangements by head, for latent attention.

use super::{Cpu, CpuBuffer, CpuWeight};
use crate::backend::Backend;
use llmctl_base::error::Result;

impl Cpu {
    /// Computes a product of each head's part of `x` with the head's own matrix.
    pub(super) fn multiply_heads(
        &self,
        x: &CpuBuffer,
        weights: &[CpuWeight],
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let [input, output] = &mut *self.head.borrow_mut();
        let (len, heads) = (x.width() / weights.len(), weights.len());
        let width = weights.first().map_or(0, |weight| weight.rows_cols().0);
        out.resize(x.num_rows(), heads * width);
        for (head, weight) in weights.iter().enumerate() {
            self.select_columns(x, head * len..(head + 1) * len, input)?;
            self.matmul(input, weight, None, output)?;
            let rows = out.values_mut().chunks_exact_mut(heads * width);
            for (out, computed) in rows.zip(output.values().chunks_exact(width)) {
                out[head * width..(head + 1) * width].copy_from_slice(computed);
            }
        }
        Ok(())
    }
}

/// Joins two parts of each head.
pub fn join(parts: [&CpuBuffer; 2], num_heads: usize, out: &mut CpuBuffer) {
    let lens = parts.map(|part| part.width() / num_heads);
    out.resize(parts[0].num_rows(), parts[0].width() + parts[1].width());
    let heads = parts[0].values().chunks_exact(lens[0]).zip(parts[1].values().chunks_exact(lens[1]));
    for (out, (first, second)) in out.values_mut().chunks_exact_mut(lens[0] + lens[1]).zip(heads) {
        out[..lens[0]].copy_from_slice(first);
        out[lens[0]..].copy_from_slice(second);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::HostTensor;
    use llmctl_kernel::Dtype;

    fn buffer(cpu: &Cpu, width: usize, values: &[f32]) -> CpuBuffer {
        let mut buffer = cpu.buffer();
        buffer.resize(values.len() / width, width);
        buffer.values_mut().copy_from_slice(values);
        buffer
    }

    #[test]
    fn each_head_has_a_matrix_of_its_own() {
        let cpu = Cpu::new(2).unwrap();
        let weight = |values: [f32; 6]| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            cpu.weight(&HostTensor::new(Dtype::F32, vec![3, 2], bytes.into()).unwrap()).unwrap()
        };
        let weights = vec![weight([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]), weight([2.0, 0.0, 0.0, 2.0, 1.0, -1.0])];
        let mut out = cpu.buffer();
        cpu.matmul_heads(&buffer(&cpu, 4, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]), &weights, &mut out)
            .unwrap();
        assert_eq!(out.values(), [1.0, 2.0, 3.0, 6.0, 8.0, -1.0, 5.0, 6.0, 11.0, 14.0, 16.0, -1.0]);
    }

    #[test]
    fn parts_of_a_head_lie_side_by_side() {
        let cpu = Cpu::new(1).unwrap();
        let (first, second) = (buffer(&cpu, 4, &[1.0, 2.0, 3.0, 4.0]), buffer(&cpu, 2, &[5.0, 6.0]));
        let mut out = cpu.buffer();
        cpu.join_heads([&first, &second], 2, &mut out).unwrap();
        assert_eq!((out.width(), out.values()), (6, &[1.0, 2.0, 5.0, 3.0, 4.0, 6.0][..]));
    }
}
