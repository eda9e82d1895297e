//! Activations between the operations of a step, with their quantised form if an operation produced it.
//!
//! Invariant: a quantised form that is present matches the values: every mutable access drops it.

use llmctl_kernel::gemm::Activations;

/// `[rows, width]` activations, row-major.
#[derive(Debug, Clone, Default)]
pub struct CpuBuffer {
    values: Vec<f32>,
    width: usize,
    quantized: Activations,
    is_quantized: bool,
}

impl CpuBuffer {
    pub fn width(&self) -> usize {
        self.width
    }

    pub fn num_rows(&self) -> usize {
        self.values.len().checked_div(self.width).unwrap_or(0)
    }

    pub fn values(&self) -> &[f32] {
        &self.values
    }

    pub fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.width..(index + 1) * self.width]
    }

    /// Returns the quantised form of the values, if present.
    pub fn quantized(&self) -> Option<&Activations> {
        self.is_quantized.then_some(&self.quantized)
    }

    pub fn resize(&mut self, rows: usize, width: usize) {
        self.is_quantized = false;
        self.width = width;
        self.values.resize(rows * width, 0.0);
    }

    pub fn values_mut(&mut self) -> &mut [f32] {
        self.is_quantized = false;
        &mut self.values
    }

    /// Swaps the values with `values`.
    pub fn swap(&mut self, values: &mut Vec<f32>) {
        self.is_quantized = false;
        std::mem::swap(&mut self.values, values);
    }

    /// Returns values and quantised form, for a writer that writes both.
    pub fn both_mut(&mut self) -> (&mut [f32], &mut Activations) {
        self.is_quantized = true;
        (&mut self.values, &mut self.quantized)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_may_change_the_values_drops_their_quantised_form() {
        let changes: [fn(&mut CpuBuffer); 3] = [
            |buffer| buffer.resize(2, 32),
            |buffer| drop(buffer.values_mut().last_mut()),
            |buffer| buffer.swap(&mut Vec::new()),
        ];
        for change in changes {
            let mut buffer = CpuBuffer::default();
            buffer.resize(1, 32);
            assert!(buffer.quantized().is_none());
            buffer.both_mut();
            assert!(buffer.quantized().is_some());
            change(&mut buffer);
            assert!(buffer.quantized().is_none());
        }
    }
}
