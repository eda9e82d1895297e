//! Routing: assigns the rows of a step to experts.

use crate::runtime::kernel::math;
use crate::runtime::model::config::{ExpertWeights, ExpertsConfig};

/// Assignment of a step's rows to experts.
#[derive(Debug, Default)]
pub struct Routing {
    /// `[rows, experts]`.
    pub scores: Vec<f32>,
    /// Rows by expert.
    pub visitors: Vec<Visitors>,
    /// Experts of the current row, sorted by score.
    order: Vec<usize>,
}

/// The rows of one expert, ascending, with their weights.
#[derive(Debug, Default)]
pub struct Visitors {
    pub rows: Vec<usize>,
    pub weights: Vec<f32>,
}

impl Routing {
    /// Assigns each row of `scores` to its highest-scoring experts; ties go to the lower number.
    pub fn choose(&mut self, config: &ExpertsConfig) {
        let Self { scores, visitors, order } = self;
        visitors.resize_with(config.count, Visitors::default);
        for Visitors { rows, weights } in visitors.iter_mut() {
            rows.clear();
            weights.clear();
        }
        for (row, scores) in scores.chunks_exact(config.count).enumerate() {
            order.clear();
            order.extend(0..config.count);
            order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
            let used = &order[..config.used];
            let highest = scores[used[0]];
            let share = |expert: usize| math::exp(scores[expert] - highest);
            let total: f32 = match config.weights {
                ExpertWeights::OfAll => (0..config.count).map(share).sum(),
                ExpertWeights::OfUsed => used.iter().map(|&expert| share(expert)).sum(),
            };
            for &expert in used {
                visitors[expert].rows.push(row);
                visitors[expert].weights.push(share(expert) / total);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::model::config::{Activation, MlpConfig};

    fn choose(weights: ExpertWeights, scores: &[f32]) -> Vec<(Vec<usize>, Vec<f32>)> {
        let mlp = MlpConfig { intermediate_size: 1, activation: Activation::Silu, is_gated: true };
        let config = ExpertsConfig { count: 3, used: 2, mlp, weights, has_norms: false };
        let mut routing = Routing { scores: vec![7.0; 9], ..Routing::default() };
        routing.choose(&config); // left by another step; must be replaced
        routing.scores = scores.to_vec();
        routing.choose(&config);
        routing.visitors.into_iter().map(|visitors| (visitors.rows, visitors.weights)).collect()
    }

    #[test]
    fn rows_go_to_their_best_experts_and_weights_sum_to_one_over_those_used() {
        let (two, four) = (2f32.ln(), 4f32.ln());
        let visitors = choose(ExpertWeights::OfUsed, &[four, 0.0, two, 0.0, two, two]);
        let rows: Vec<&[usize]> = visitors.iter().map(|(rows, _)| &rows[..]).collect();
        assert_eq!(rows, [&[0][..], &[1], &[0, 1]]);
        let close = |got: &[f32], wanted: &[f32]| {
            got.len() == wanted.len() && got.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6)
        };
        assert!(close(&visitors[0].1, &[4.0 / 6.0]) && close(&visitors[1].1, &[0.5]), "{visitors:?}");
        assert!(close(&visitors[2].1, &[2.0 / 6.0, 0.5]), "{visitors:?}");
        let of_all = choose(ExpertWeights::OfAll, &[four, 0.0, two]);
        assert!(close(&of_all[0].1, &[4.0 / 7.0]) && close(&of_all[2].1, &[2.0 / 7.0]), "{of_all:?}");
    }

    #[test]
    fn of_equal_experts_the_first_are_used_and_no_number_is_no_panic() {
        let visitors = choose(ExpertWeights::OfUsed, &[1.0; 3]);
        assert_eq!(visitors.iter().map(|(rows, _)| rows.len()).collect::<Vec<_>>(), [1, 1, 0]);
        let broken = choose(ExpertWeights::OfUsed, &[f32::NAN; 3]);
        assert_eq!(broken.iter().map(|(rows, _)| rows.len()).sum::<usize>(), 2);
    }
}
