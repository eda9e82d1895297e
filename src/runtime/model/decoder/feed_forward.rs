//! The feed-forward part of a layer: a network for every token, experts of which a token uses a few, or both.
//!
//! Invariant: the result of a row does not depend on the other rows. They determine which rows an expert computes
//! together, but a product computes each row on its own, and the results of a row's experts are added in the order of
//! the experts' numbers.

use super::layer::{LayerBuffers, LayerContext, Projection};
use super::load::Loader;
use crate::runtime::backend::Backend;
use crate::runtime::error::{LoadError, Result};
use crate::runtime::kernel::math;
use crate::runtime::model::config::{Activation, ExpertWeights, ExpertsConfig, FeedForwardConfig, MlpConfig};
use crate::runtime::model::weights::Linear;

pub struct FeedForward<B: Backend> {
    hidden: usize,
    dense: Option<Mlp<B>>,
    dense_gate: Option<Projection<B>>,
    experts: Option<Experts<B>>,
}

impl<B: Backend> FeedForward<B> {
    /// # Errors
    /// [`LoadError::Tensor`] naming the tensor that is missing or has the wrong shape.
    pub fn load(loader: &Loader<'_, B>, config: &FeedForwardConfig, eps: f32) -> Result<Self, LoadError> {
        let dense = config.dense.as_ref().map(|config| Mlp::load(loader, config)).transpose()?;
        let experts = config.experts.as_ref().map(|config| Experts::load(loader, config, eps)).transpose()?;
        let hidden = loader.hidden;
        let dense_gate = |_| {
            let gate = loader.file.linear(loader.layer, loader.naming.parts.dense_gate, [1, hidden])?;
            loader.gate(gate)
        };
        let dense_gate = config.gates_dense.then_some(()).map(dense_gate).transpose()?;
        Ok(Self { hidden, dense, dense_gate, experts })
    }

    /// Computes the part from `input`, the normalised residual stream.
    pub fn apply(
        &self,
        context: &mut LayerContext<'_, B>,
        input: &B::Buffer,
        residual: &B::Buffer,
        out: &mut B::Buffer,
    ) -> Result<()> {
        let (backend, num_rows, work) = (context.backend, context.step.tokens.len(), &mut *context.work);
        match &self.dense {
            Some(dense) => dense.apply(backend, input, [&mut work.gate, &mut work.up], out)?,
            None => backend.zeros(num_rows, self.hidden, out)?,
        }
        if let Some(gate) = &self.dense_gate {
            self.weigh(backend, gate, input, work, out)?;
        }
        match &self.experts {
            None => Ok(()),
            Some(experts) => experts.add(backend, [num_rows, self.hidden], [input, residual], work, out),
        }
    }

    /// Multiplies each row of `out` by the sigmoid of `gate`'s product with its input.
    fn weigh(
        &self,
        backend: &B,
        gate: &Projection<B>,
        input: &B::Buffer,
        work: &mut LayerBuffers<B>,
        out: &mut B::Buffer,
    ) -> Result<()> {
        let LayerBuffers { scores, routing: Routing { scores: weights, .. }, mixed, .. } = work;
        gate.apply(backend, input, scores)?;
        backend.read(scores, weights)?;
        weights.iter_mut().for_each(|weight| *weight = math::sigmoid(*weight));
        let rows: Vec<usize> = (0..weights.len()).collect();
        backend.zeros(weights.len(), self.hidden, mixed)?;
        backend.add_rows(mixed, out, &rows, weights)?;
        std::mem::swap(out, mixed);
        Ok(())
    }
}

struct Mlp<B: Backend> {
    activation: Activation,
    gate: Projection<B>,
    up: Projection<B>,
    down: Projection<B>,
}

impl<B: Backend> Mlp<B> {
    fn load(loader: &Loader<'_, B>, config: &MlpConfig) -> Result<Self, LoadError> {
        let [gate, up, down] = loader.naming.parts.mlp;
        let inner = config.intermediate_size;
        let fused = ["mlp.gate_up_proj", "ffn_up"];
        let [gate, up] = loader.file.linears(loader.layer, [gate, up], fused, [inner; 2], loader.hidden)?;
        let down = loader.file.linear(loader.layer, down, [loader.hidden, inner])?;
        Self::of(loader, config.activation, [gate, up, down])
    }

    fn of(loader: &Loader<'_, B>, activation: Activation, parts: [Linear; 3]) -> Result<Self, LoadError> {
        let [gate, up, down] = parts;
        Ok(Self {
            activation,
            gate: loader.projection(gate)?,
            up: loader.projection(up)?,
            down: loader.projection(down)?,
        })
    }

    fn apply(
        &self,
        backend: &B,
        input: &B::Buffer,
        [gate, up]: [&mut B::Buffer; 2],
        out: &mut B::Buffer,
    ) -> Result<()> {
        let inner = [self.gate.onto(gate), self.up.onto(up)];
        backend.feed_forward(input, self.activation, inner, self.down.onto(out))
    }
}

struct Experts<B: Backend> {
    config: ExpertsConfig,
    router: Projection<B>,
    each: Vec<Mlp<B>>,
    norms: Option<ExpertNorms<B>>,
    eps: f32,
}

/// Gemma 4's norms around experts beside a dense part.
struct ExpertNorms<B: Backend> {
    /// Norm of the residual stream before the router.
    router: B::Vector,
    experts: B::Vector,
    /// Norm of the dense part's output.
    dense_out: B::Vector,
    experts_out: B::Vector,
    /// Factors of the weights, by expert.
    scales: Vec<f32>,
}

impl<B: Backend> Experts<B> {
    fn load(loader: &Loader<'_, B>, config: &ExpertsConfig, eps: f32) -> Result<Self, LoadError> {
        let names = &loader.naming.parts;
        let router = loader.file.linear(loader.layer, names.router, [config.count, loader.hidden])?;
        let shape = [config.mlp.intermediate_size, loader.hidden];
        let each = loader.file.experts(loader.layer, names.experts, config.count, shape)?;
        let expert = |parts| Mlp::of(loader, config.mlp.activation, parts);
        Ok(Self {
            config: config.clone(),
            router: loader.gate(router)?,
            each: each.into_iter().map(expert).collect::<Result<_, _>>()?,
            norms: config.has_norms.then(|| ExpertNorms::load(loader, config.count)).transpose()?,
            eps,
        })
    }

    /// Adds the experts' results, computed from `input` or, if they have norms of their own, from `residual`.
    fn add(
        &self,
        backend: &B,
        [num_rows, hidden]: [usize; 2],
        [input, residual]: [&B::Buffer; 2],
        work: &mut LayerBuffers<B>,
        out: &mut B::Buffer,
    ) -> Result<()> {
        let Some(norms) = &self.norms else {
            self.route(backend, input, work, None)?;
            return self.visit(backend, input, work, out);
        };
        let (mut space, mut sum) = (std::mem::take(&mut work.q), std::mem::take(&mut work.mixed));
        backend.rms_norm(residual, &norms.router, self.eps, &mut space)?;
        self.route(backend, &space, work, Some(&norms.scales))?;
        backend.rms_norm(residual, &norms.experts, self.eps, &mut space)?;
        backend.zeros(num_rows, hidden, &mut sum)?;
        self.visit(backend, &space, work, &mut sum)?;
        backend.rms_norm(out, &norms.dense_out, self.eps, &mut space)?;
        std::mem::swap(out, &mut space);
        backend.rms_norm(&sum, &norms.experts_out, self.eps, &mut space)?;
        (work.q, work.mixed) = (space, sum);
        backend.add_scaled(out, &work.q, 1.0)
    }

    /// Computes the router's scores and assigns rows to experts.
    fn route(
        &self,
        backend: &B,
        input: &B::Buffer,
        work: &mut LayerBuffers<B>,
        scales: Option<&[f32]>,
    ) -> Result<()> {
        let LayerBuffers { scores, routing, .. } = work;
        self.router.apply(backend, input, scores)?;
        backend.read(scores, &mut routing.scores)?;
        routing.choose(&self.config);
        for (visitors, scale) in routing.visitors.iter_mut().zip(scales.into_iter().flatten()) {
            visitors.weights.iter_mut().for_each(|weight| *weight *= scale);
        }
        Ok(())
    }

    /// Runs the experts and adds their results in the order of the experts' numbers.
    fn visit(
        &self,
        backend: &B,
        input: &B::Buffer,
        work: &mut LayerBuffers<B>,
        out: &mut B::Buffer,
    ) -> Result<()> {
        let LayerBuffers { routing, sent, returned, gate, up, .. } = work;
        for (expert, visitors) in self.each.iter().zip(&routing.visitors) {
            if !visitors.rows.is_empty() {
                backend.select_rows(input, &visitors.rows, sent)?;
                expert.apply(backend, sent, [&mut *gate, &mut *up], returned)?;
                backend.add_rows(out, returned, &visitors.rows, &visitors.weights)?;
            }
        }
        Ok(())
    }
}

impl<B: Backend> ExpertNorms<B> {
    fn load(loader: &Loader<'_, B>, count: usize) -> Result<Self, LoadError> {
        let (file, layer, hidden) = (loader.file, loader.layer, loader.hidden);
        let mut router = file.values(layer, ["router.scale", "ffn_gate_inp.scale"], hidden)?;
        router.iter_mut().for_each(|weight| *weight /= (hidden as f32).sqrt());
        Ok(Self {
            router: loader.backend.vector(router)?,
            experts: loader.norm(["pre_feedforward_layernorm_2", "pre_ffw_norm_2"], hidden)?,
            dense_out: loader.norm(["post_feedforward_layernorm_1", "post_ffw_norm_1"], hidden)?,
            experts_out: loader.norm(["post_feedforward_layernorm_2", "post_ffw_norm_2"], hidden)?,
            scales: file.values(layer, ["router.per_expert_scale", "ffn_down_exps.scale"], count)?,
        })
    }
}

/// Assignment of a step's rows to experts.
#[derive(Debug, Default)]
pub struct Routing {
    /// `[rows, experts]`.
    scores: Vec<f32>,
    /// Rows by expert.
    visitors: Vec<Visitors>,
    /// Experts of the current row, sorted by score.
    order: Vec<usize>,
}

/// The rows of one expert, ascending, with their weights.
#[derive(Debug, Default)]
struct Visitors {
    rows: Vec<usize>,
    weights: Vec<f32>,
}

impl Routing {
    /// Assigns each row of `scores` to its highest-scoring experts; ties go to the lower number.
    fn choose(&mut self, config: &ExpertsConfig) {
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

    fn choose(weights: ExpertWeights, scores: &[f32]) -> Vec<(Vec<usize>, Vec<f32>)> {
        let mlp = MlpConfig { intermediate_size: 1, activation: Activation::Silu };
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
