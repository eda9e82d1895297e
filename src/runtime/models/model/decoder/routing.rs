//! Routing: assigns the rows of a step to experts.

use crate::model::config::{ExpertGroups, ExpertWeights, ExpertsConfig};
use llmctl_kernel::math;

/// Assignment of a step's rows to experts.
#[derive(Debug, Default)]
pub struct Routing {
    /// `[rows, experts]`.
    pub scores: Vec<f32>,
    /// Rows by expert.
    pub visitors: Vec<Visitors>,
    /// Experts of the current row, sorted by merit.
    order: Vec<usize>,
    /// Scores of the current row for the choice of experts.
    merits: Vec<f32>,
    groups: GroupSpace,
}

/// Merits of a row's groups of experts, and the groups sorted by them.
#[derive(Debug, Default)]
struct GroupSpace {
    merits: Vec<f32>,
    order: Vec<usize>,
}

/// The rows of one expert, ascending, with their weights.
#[derive(Debug, Default)]
pub struct Visitors {
    pub rows: Vec<usize>,
    pub weights: Vec<f32>,
}

impl Routing {
    /// Assigns each row of `scores` to its highest-scoring experts; ties go to the lower number. `bias` is added to the
    /// scores for this choice alone.
    pub fn choose(&mut self, config: &ExpertsConfig, bias: Option<&[f32]>) {
        let Self { scores, visitors, order, merits, groups } = self;
        visitors.resize_with(config.count, Visitors::default);
        for Visitors { rows, weights } in visitors.iter_mut() {
            rows.clear();
            weights.clear();
        }
        for (row, scores) in scores.chunks_exact_mut(config.count).enumerate() {
            if config.weights.is_sigmoid() {
                scores.iter_mut().for_each(|score| *score = math::sigmoid(*score));
            }
            merits.clear();
            merits.extend_from_slice(scores);
            if bias.is_some() && !config.weights.is_sigmoid() {
                to_softmax(merits);
            }
            for (merit, bias) in merits.iter_mut().zip(bias.into_iter().flatten()) {
                *merit += bias;
            }
            if let Some(of_experts) = config.groups {
                leave_groups_out(merits, of_experts, config.weights.is_sigmoid(), groups);
            }
            sort_by_merit(order, merits);
            let used = &order[..config.used];
            let (share, total) = (shares(config.weights, scores, used), total(config.weights, scores, used));
            for &expert in used {
                visitors[expert].rows.push(row);
                visitors[expert].weights.push(share(expert) / total * config.weight_scale);
            }
        }
    }
}

impl ExpertWeights {
    fn is_sigmoid(self) -> bool {
        matches!(self, ExpertWeights::Sigmoid | ExpertWeights::SigmoidOfUsed)
    }
}

/// Returns the unnormalised weight of each expert.
fn shares(weights: ExpertWeights, scores: &[f32], used: &[usize]) -> impl Fn(usize) -> f32 {
    let highest = used.iter().map(|expert| scores[*expert]).fold(f32::NEG_INFINITY, f32::max);
    move |expert| match weights {
        ExpertWeights::OfAll | ExpertWeights::OfUsed => math::exp(scores[expert] - highest),
        ExpertWeights::Sigmoid | ExpertWeights::SigmoidOfUsed => scores[expert],
    }
}

/// Replaces scores by their softmax, to which a bias is added for the choice (ERNIE 4.5).
fn to_softmax(scores: &mut [f32]) {
    let highest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|score| *score = math::exp(*score - highest));
    let total: f32 = scores.iter().sum();
    scores.iter_mut().for_each(|score| *score /= total);
}

/// Returns the number by which the weights are divided.
fn total(weights: ExpertWeights, scores: &[f32], used: &[usize]) -> f32 {
    /// Keeps the sum of underflowed sigmoids above 0, as the reference does.
    const LEAST: f32 = 1e-20;
    let share = shares(weights, scores, used);
    match weights {
        ExpertWeights::OfAll => (0..scores.len()).map(share).sum(),
        ExpertWeights::OfUsed => used.iter().map(|&expert| share(expert)).sum(),
        ExpertWeights::Sigmoid => 1.0,
        ExpertWeights::SigmoidOfUsed => used.iter().map(|&expert| share(expert)).sum::<f32>() + LEAST,
    }
}

/// Sorts indices by falling merit, equal ones by number.
fn sort_by_merit(order: &mut Vec<usize>, merits: &[f32]) {
    order.clear();
    order.extend(0..merits.len());
    order.sort_by(|a, b| merits[*b].total_cmp(&merits[*a]).then(a.cmp(b)));
}

/// Makes experts outside a row's best groups the last choice. A group's merit is its best expert's, or with `by_two` the sum
/// of its two best.
fn leave_groups_out(merits: &mut [f32], groups: ExpertGroups, by_two: bool, space: &mut GroupSpace) {
    let size = merits.len() / groups.count;
    let GroupSpace { merits: of_groups, order } = space;
    of_groups.clear();
    for group in merits.chunks_exact(size) {
        let mut best = [f32::NEG_INFINITY; 2];
        for &merit in group {
            if merit > best[0] {
                best = [merit, best[0]];
            } else if merit > best[1] {
                best[1] = merit;
            }
        }
        of_groups.push(if by_two && size > 1 { best[0] + best[1] } else { best[0] });
    }
    sort_by_merit(order, of_groups);
    for &group in &order[groups.used..] {
        merits[group * size..(group + 1) * size].fill(f32::NEG_INFINITY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::{Activation, MlpConfig};

    fn config(count: usize, weights: ExpertWeights) -> ExpertsConfig {
        let mlp = MlpConfig { intermediate_size: 1, activation: Activation::Silu, is_gated: true };
        ExpertsConfig {
            count,
            used: 2,
            mlp,
            weights,
            weight_scale: 1.0,
            has_bias: false,
            groups: None,
            has_norms: false,
        }
    }

    fn choose(weights: ExpertWeights, scores: &[f32]) -> Vec<(Vec<usize>, Vec<f32>)> {
        let config = config(3, weights);
        let mut routing = Routing { scores: vec![7.0; 9], ..Routing::default() };
        routing.choose(&config, None); // left by another step; must be replaced
        routing.scores = scores.to_vec();
        routing.choose(&config, None);
        routing.visitors.into_iter().map(|visitors| (visitors.rows, visitors.weights)).collect()
    }

    /// Returns the experts of one row, with their weights.
    fn chosen(config: &ExpertsConfig, bias: &[f32], scores: &[f32]) -> Vec<(usize, f32)> {
        let mut routing = Routing { scores: scores.to_vec(), ..Routing::default() };
        routing.choose(config, Some(bias));
        let weights = routing
            .visitors
            .iter()
            .enumerate()
            .flat_map(|(expert, visitors)| visitors.weights.iter().map(move |weight| (expert, *weight)));
        weights.collect()
    }

    #[test]
    fn a_bias_changes_the_choice_of_experts_but_not_their_weights() {
        let logit = |p: f32| (p / (1.0 - p)).ln();
        let scores = [0.8, 0.4, 0.2].map(logit);
        let mut config = ExpertsConfig { weight_scale: 2.5, ..config(3, ExpertWeights::SigmoidOfUsed) };
        let close = |got: &[(usize, f32)], wanted: &[(usize, f32)]| {
            let same = |(a, b): (&(usize, f32), &(usize, f32))| a.0 == b.0 && (a.1 - b.1).abs() < 1e-6;
            got.len() == wanted.len() && got.iter().zip(wanted).all(same)
        };
        let got = chosen(&config, &[0.0, 0.0, 0.3], &scores);
        assert!(close(&got, &[(0, 2.5 * 0.8), (2, 2.5 * 0.2)]), "{got:?}");
        config.weights = ExpertWeights::Sigmoid;
        let got = chosen(&config, &[-1.0, 0.0, 0.0], &scores);
        assert!(close(&got, &[(1, 2.5 * 0.4), (2, 2.5 * 0.2)]), "{got:?}");
    }

    #[test]
    fn a_bias_of_softmax_weights_is_added_to_probabilities() {
        let scores = [0.5, 0.3, 0.2].map(f32::ln);
        let config = config(3, ExpertWeights::OfUsed);
        let got = chosen(&config, &[0.0, 0.0, 0.15], &scores);
        let wanted = [(0, 0.5 / 0.7), (2, 0.2 / 0.7)];
        let same = |(a, b): (&(usize, f32), &(usize, f32))| a.0 == b.0 && (a.1 - b.1).abs() < 1e-6;
        assert!(got.len() == 2 && got.iter().zip(&wanted).all(same), "{got:?}");
    }

    #[test]
    fn experts_come_from_the_best_groups() {
        let experts = |weights, scores: [f32; 6]| -> Vec<usize> {
            let groups = Some(ExpertGroups { count: 3, used: 1 });
            let config = ExpertsConfig { groups, ..config(6, weights) };
            chosen(&config, &[], &scores).into_iter().map(|(expert, _)| expert).collect()
        };
        // The first group has the best expert, the second the best two.
        let scores = [3.0, -3.0, 2.0, 1.5, -2.0, -2.0];
        assert_eq!(experts(ExpertWeights::OfAll, scores), [0, 1]);
        assert_eq!(experts(ExpertWeights::Sigmoid, scores), [2, 3]);
        assert_eq!(experts(ExpertWeights::Sigmoid, [f32::NAN; 6]).len(), 2);
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
