//! From the hidden states of a text to what is asked for: a vector, or the score of a pair.

use crate::runtime::kernel::{dot, isa, math};

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
    pub const ALL: [Pooling; 4] = [Pooling::Mean, Pooling::Cls, Pooling::Last, Pooling::Max];

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
    pub fn apply(&self, x: &[f32]) -> Vec<f32> {
        let rows = self.weight.chunks_exact(self.inputs);
        let bias = self.bias.iter().copied().chain(std::iter::repeat(0.0));
        let out = rows.zip(bias).map(|(row, bias)| dot::dot(isa::isa(), row, x) + bias);
        let activation = |value: f32| match self.activation {
            DenseActivation::Identity => value,
            DenseActivation::Tanh => math::tanh(value),
            DenseActivation::Gelu => 0.5 * value * (1.0 + math::erf(value * std::f32::consts::FRAC_1_SQRT_2)),
        };
        out.map(activation).collect()
    }
}

/// A vector from a text's hidden states.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingHead {
    pub pooling: Pooling,
    pub dense: Vec<Dense>,
    /// Whether vectors are scaled to length 1.
    pub is_normalized: bool,
}

impl EmbeddingHead {
    /// Returns the number of values of a vector.
    pub fn width(&self, hidden_size: usize) -> usize {
        self.dense.last().map_or(hidden_size, |dense| dense.weight.len() / dense.inputs)
    }

    /// Computes the vector of a text of at least one token, cut to its first `dimensions` values if given.
    pub fn apply(&self, hidden: &[f32], width: usize, dimensions: Option<usize>) -> Vec<f32> {
        let pooled = self.pooling.pool(hidden, width);
        let mut vector = self.dense.iter().fold(pooled, |x, dense| dense.apply(&x));
        vector.truncate(dimensions.unwrap_or(usize::MAX));
        if self.is_normalized {
            normalize(&mut vector);
        }
        vector
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
    /// Computes the score of a pair, between 0 and 1: the probability that it is relevant.
    pub fn apply(&self, hidden: &[f32], width: usize) -> f32 {
        let pooled = self.pooling.pool(hidden, width);
        let out = self.dense.iter().fold(pooled, |x, dense| dense.apply(&x));
        math::sigmoid(out[0] - out.get(1).copied().unwrap_or(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIDDEN: [f32; 6] = [1.0, -2.0, 3.0, 4.0, 2.0, 1.0];

    #[test]
    fn a_vector_is_pooled_cut_and_scaled_to_length_one() {
        let pooled = Pooling::ALL.map(|pooling| pooling.pool(&HIDDEN, 2));
        assert_eq!(pooled, [[2.0, 1.0], [1.0, -2.0], [2.0, 1.0], [3.0, 4.0]]);
        let head = EmbeddingHead { pooling: Pooling::Max, dense: vec![], is_normalized: true };
        assert_eq!(head.apply(&HIDDEN, 2, None), [0.6, 0.8]);
        assert_eq!(head.apply(&HIDDEN, 2, Some(1)), [1.0], "scaled after the cut");
        let zeros = EmbeddingHead { pooling: Pooling::Mean, ..head }.apply(&[0.0; 4], 2, None);
        assert_eq!(zeros, [0.0; 2]);
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
        assert_eq!((head.width(2), head.apply(&HIDDEN, 2, None)), (3, vec![2.0, 2.5, 1.0]));
        let last = Dense { weight: vec![1.0, 1.0, 1.0], bias: vec![], inputs: 3, ..dense.clone() };
        let score = ScoreHead { pooling: Pooling::Last, dense: vec![dense, last] };
        assert_eq!(score.apply(&HIDDEN, 2), math::sigmoid(5.5));
        let yes_and_no = Dense { weight: vec![1.0, 0.0, 0.0, 1.0], bias: vec![], ..score.dense[0].clone() };
        let score = ScoreHead { pooling: Pooling::Last, dense: vec![yes_and_no] };
        assert_eq!(score.apply(&HIDDEN, 2), math::sigmoid(1.0));
    }
}
