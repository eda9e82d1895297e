//! From the hidden states of texts to their vectors, or to the scores of pairs.
//!
//! Invariant: a text's result has the same bits whichever texts are computed with it.

use llmctl_kernel::matmul::MatmulShape;
use llmctl_kernel::{isa, math, matmul};

/// Choice of the hidden states that a vector is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// Mean of all tokens.
    Mean,
    /// The first token.
    Cls,
    /// The last token.
    Last,
    /// The largest of all tokens, value by value.
    Max,
}

impl Pooling {
    pub fn name(self) -> &'static str {
        match self {
            Pooling::Mean => "mean",
            Pooling::Cls => "cls",
            Pooling::Last => "last",
            Pooling::Max => "max",
        }
    }

    /// Pools the hidden states of one text, `[tokens, width]`, at least one.
    pub fn pool(self, hidden: &[f32], width: usize) -> Vec<f32> {
        let rows = hidden.chunks_exact(width);
        match self {
            Pooling::Cls => hidden[..width].to_vec(),
            Pooling::Last => hidden[hidden.len() - width..].to_vec(),
            Pooling::Max => rows.fold(vec![f32::NEG_INFINITY; width], |mut most, row| {
                most.iter_mut().zip(row).for_each(|(most, value)| *most = most.max(*value));
                most
            }),
            Pooling::Mean => {
                let count = rows.len() as f64;
                let mut sums = vec![0.0f64; width];
                for row in rows {
                    sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
                }
                sums.into_iter().map(|sum| (sum / count) as f32).collect()
            }
        }
    }
}

/// Function after a [`Dense`] layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseActivation {
    Identity,
    Tanh,
    Gelu,
}

/// A small layer behind the pooling: `activation(weight x + bias)`.
#[derive(Debug, Clone, PartialEq)]
pub struct Dense {
    /// `[out, in]`.
    pub weight: Vec<f32>,
    /// `[out]`, or empty.
    pub bias: Vec<f32>,
    pub inputs: usize,
    pub activation: DenseActivation,
}

impl Dense {
    fn outputs(&self) -> usize {
        self.weight.len() / self.inputs
    }

    /// Applies the layer to each row of `x`, `[rows, inputs]`; returns `[rows, outputs]`. One product reads the matrix once for
    /// all rows, with the sums that a row alone has.
    pub fn apply(&self, x: &[f32]) -> Vec<f32> {
        let (rows, outputs) = (x.len() / self.inputs, self.outputs());
        let mut products = vec![0.0; outputs * rows];
        let shape = MatmulShape { k: self.inputs, m: rows };
        matmul::block(isa::isa(), shape, &self.weight, x, &mut products);
        let activation = |value: f32| match self.activation {
            DenseActivation::Identity => value,
            DenseActivation::Tanh => math::tanh(value),
            DenseActivation::Gelu => math::gelu_erf(value),
        };
        let products = &products;
        let bias = |output: usize| self.bias.get(output).copied().unwrap_or(0.0);
        let row = |row: usize| {
            (0..outputs).map(move |output| activation(products[output * rows + row] + bias(output)))
        };
        (0..rows).flat_map(row).collect()
    }
}

/// Returns whether the layers take values of `width`, one after another.
pub fn fit_together(dense: &[Dense], width: usize) -> bool {
    let step = |width: usize, dense: &Dense| (dense.inputs == width).then(|| dense.outputs());
    dense.iter().try_fold(width, step).is_some()
}

/// Pools each text and applies the layers to all of them; returns `[texts, values]`.
fn pooled(pooling: Pooling, dense: &[Dense], texts: &[&[f32]], width: usize) -> Vec<f32> {
    let pooled: Vec<f32> = texts.iter().flat_map(|hidden| pooling.pool(hidden, width)).collect();
    dense.iter().fold(pooled, |x, dense| dense.apply(&x))
}

/// A vector from a text's hidden states.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingHead {
    pub pooling: Pooling,
    pub dense: Vec<Dense>,
    /// True if vectors are scaled to length 1.
    pub is_normalized: bool,
}

impl EmbeddingHead {
    /// Returns the number of values of a vector.
    pub fn width(&self, hidden_size: usize) -> usize {
        self.dense.last().map_or(hidden_size, Dense::outputs)
    }

    /// Computes the vectors of texts from their hidden states, each `[tokens, width]` of at least one token, and cuts them to
    /// their first `dimensions` values where given.
    pub fn apply(&self, texts: &[&[f32]], width: usize, dimensions: &[Option<usize>]) -> Vec<Vec<f32>> {
        let values = pooled(self.pooling, &self.dense, texts, width);
        let vector = |(values, dimensions): (&[f32], &Option<usize>)| {
            let mut vector = values[..dimensions.unwrap_or(usize::MAX).min(values.len())].to_vec();
            if self.is_normalized {
                normalize(&mut vector);
            }
            vector
        };
        values.chunks_exact(self.width(width)).zip(dimensions).map(vector).collect()
    }
}

/// Scales a vector to length 1; zeros stay.
fn normalize(vector: &mut [f32]) {
    let square: f64 = vector.iter().map(|value| f64::from(*value).powi(2)).sum();
    let length = square.sqrt().max(1e-12);
    vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
}

/// The score of a pair from its hidden states.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreHead {
    pub pooling: Pooling,
    /// The last has one output, or two: those for "yes" and "no".
    pub dense: Vec<Dense>,
}

impl ScoreHead {
    /// Computes the scores of pairs from their hidden states, each between 0 and 1: the probability that it is relevant.
    pub fn apply(&self, texts: &[&[f32]], width: usize) -> Vec<f32> {
        let outputs = self.dense.last().map_or(width, Dense::outputs);
        let values = pooled(self.pooling, &self.dense, texts, width);
        let score = |out: &[f32]| math::sigmoid(out[0] - out.get(1).copied().unwrap_or(0.0));
        values.chunks_exact(outputs).map(score).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use llmctl_kernel::dot;

    const HIDDEN: [f32; 6] = [1.0, -2.0, 3.0, 4.0, 2.0, 1.0];

    fn vector(head: &EmbeddingHead, hidden: &[f32], dimensions: Option<usize>) -> Vec<f32> {
        head.apply(&[hidden], 2, &[dimensions]).remove(0)
    }

    #[test]
    fn a_vector_is_pooled_cut_and_scaled_to_length_one() {
        let all = [Pooling::Mean, Pooling::Cls, Pooling::Last, Pooling::Max];
        let pooled = all.map(|pooling| pooling.pool(&HIDDEN, 2));
        assert_eq!(pooled, [[2.0, 1.0], [1.0, -2.0], [2.0, 1.0], [3.0, 4.0]]);
        let head = EmbeddingHead { pooling: Pooling::Max, dense: vec![], is_normalized: true };
        assert_eq!(vector(&head, &HIDDEN, None), [0.6, 0.8]);
        assert_eq!(vector(&head, &HIDDEN, Some(1)), [1.0], "scaled after the cut");
        let mean = EmbeddingHead { pooling: Pooling::Mean, ..head };
        assert_eq!(vector(&mean, &[0.0; 4], None), [0.0; 2]);
    }

    #[test]
    fn dense_layers_follow_the_pooling() {
        let dense = Dense {
            weight: vec![1.0, 0.0, 0.5, 0.5, 0.0, 1.0],
            bias: vec![0.0, 1.0, 0.0],
            inputs: 2,
            activation: DenseActivation::Identity,
        };
        let head = EmbeddingHead { pooling: Pooling::Last, dense: vec![dense.clone()], is_normalized: false };
        assert!(fit_together(&head.dense, 2) && !fit_together(&head.dense, 3));
        assert_eq!((head.width(2), vector(&head, &HIDDEN, None)), (3, vec![2.0, 2.5, 1.0]));
        let last = Dense { weight: vec![1.0, 1.0, 1.0], bias: vec![], inputs: 3, ..dense.clone() };
        let score = ScoreHead { pooling: Pooling::Last, dense: vec![dense, last] };
        assert_eq!(score.apply(&[&HIDDEN], 2), [math::sigmoid(5.5)]);
        let yes_and_no = Dense { weight: vec![1.0, 0.0, 0.0, 1.0], bias: vec![], ..score.dense[0].clone() };
        let score = ScoreHead { pooling: Pooling::Last, dense: vec![yes_and_no] };
        assert_eq!(score.apply(&[&HIDDEN], 2), [math::sigmoid(1.0)]);
    }

    #[test]
    fn a_layer_gives_a_text_the_bits_of_its_own_inner_products() {
        let (inputs, outputs) = (37, 6);
        let values = |count: usize, seed: f32| -> Vec<f32> {
            (0..count).map(|at| libm::sinf(at as f32 * 0.7 + seed)).collect()
        };
        for activation in [DenseActivation::Identity, DenseActivation::Tanh, DenseActivation::Gelu] {
            let (weight, bias) = (values(outputs * inputs, 0.1), values(outputs, 0.5));
            let dense = Dense { weight, bias, inputs, activation };
            for rows in [1, 3, 4, 9] {
                let x = values(rows * inputs, 1.3);
                let together: Vec<u32> = dense.apply(&x).into_iter().map(f32::to_bits).collect();
                let alone = x.chunks(inputs).flat_map(|x| dense.apply(x));
                assert_eq!(together, alone.map(f32::to_bits).collect::<Vec<_>>(), "{activation:?} {rows}");
            }
            let x = values(inputs, 1.3);
            let linear = Dense { activation: DenseActivation::Identity, ..dense };
            let by_row = linear.weight.chunks(inputs).zip(&linear.bias);
            let sums: Vec<f32> = by_row.map(|(row, bias)| dot::dot(isa::isa(), row, &x) + bias).collect();
            assert_eq!(linear.apply(&x), sums);
        }
    }
}
