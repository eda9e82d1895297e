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

/// Joins the parts of each head.
pub fn join(parts: &[&CpuBuffer], num_heads: usize, out: &mut CpuBuffer) {
    let width = parts.iter().map(|part| part.width()).sum();
    out.resize(parts[0].num_rows(), width);
    for (head, mut out) in out.values_mut().chunks_exact_mut(width / num_heads).enumerate() {
        for part in parts {
            let len = part.width() / num_heads;
            out.split_off_mut(..len)
                .expect("as wide as the parts")
                .copy_from_slice(&part.values()[head * len..][..len]);
        }
    }
}

/// Computes the gate of a group's values, in f64, rounded once.
pub fn gate_of(key: &[f32], query: &[f32]) -> f32 {
    let product: f64 = key.iter().zip(query).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    let score = product / (key.len() as f64).sqrt();
    let root = if score == 0.0 { 0.0 } else { score.abs().max(1e-6).sqrt().copysign(score) };
    (1.0 / (1.0 + libm::exp(-root))) as f32
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
        cpu.join_heads(&[&first, &second], 2, &mut out).unwrap();
        assert_eq!((out.width(), out.values()), (6, &[1.0, 2.0, 5.0, 3.0, 4.0, 6.0][..]));
    }

    #[test]
    fn a_gate_is_the_signed_root_of_the_product() {
        let sigmoid = |x: f64| (1.0 / (1.0 + (-x).exp())) as f32;
        assert_eq!(gate_of(&[2.0; 4], &[-2.0; 4]), sigmoid(-8f64.sqrt()));
        assert_eq!(gate_of(&[1e-5, 0.0], &[1e-5, 1.0]), sigmoid(1e-3));
        assert_eq!(gate_of(&[0.0; 4], &[3.0; 4]), 0.5);
    }
}
