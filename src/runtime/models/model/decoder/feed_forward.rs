//! The feed-forward part of a layer: a network for every token, experts of which a token uses a few, or both.
//!
//! Invariant: the result of a row does not depend on the other rows. They determine which rows an expert
//! computes together, but a product computes each row on its own, and the results of a row's experts are
//! added in the order of the experts' numbers.

use super::buffers::{AdaptedRows, LayerBuffers, LayerContext, Projection};
use super::load::Loader;
use super::routing::Visitors;
use crate::backend::{Backend, GatedNetwork, WeightedRows};
use crate::model::config::{Activation, ExpertsConfig, FeedForwardConfig, MlpConfig, Names};
use crate::model::weights::{ExpertLinears, Linear};
use llmctl_base::error::{LoadResult, Result};

pub struct FeedForward<B: Backend> {
    hidden: usize,
    dense: Option<Mlp<B>>,
    dense_gate: Option<Projection<B>>,
    experts: Option<Experts<B>>,
}

impl<B: Backend> FeedForward<B> {
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(
        loader: &Loader<'_, B>,
        config: &FeedForwardConfig,
        gate_cutoff: Option<f32>,
    ) -> LoadResult<Self> {
        let names = match &config.experts {
            None => loader.naming.parts.mlp,
            Some(_) => loader.naming.parts.mlp_beside_experts,
        };
        let dense = config.dense.as_ref().map(|config| Mlp::load(loader, names, config)).transpose()?;
        let dense = dense.map(|dense| Mlp { gate_cutoff, ..dense });
        let experts = config.experts.as_ref().map(|config| Experts::load(loader, config)).transpose()?;
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
        let LayerContext { backend, step, work, .. } = context;
        match &self.dense {
            Some(dense) => {
                let LayerBuffers { gate, up, .. } = &mut **work;
                dense.apply(*backend, input, &step.adapted, [gate, up], out)?;
            }
            None => backend.zeros(step.tokens.len(), self.hidden, out)?,
        }
        if let Some(gate) = &self.dense_gate {
            Self::weigh(context, gate, input, out)?;
        }
        self.experts.as_ref().map_or(Ok(()), |experts| experts.add(context, [input, residual], out))
    }

    /// Multiplies each row of `out` by the sigmoid of `gate`'s product with its input.
    fn weigh(
        LayerContext { backend, work, .. }: &mut LayerContext<'_, B>,
        gate: &Projection<B>,
        input: &B::Buffer,
        out: &mut B::Buffer,
    ) -> Result<()> {
        let scores = &mut work.scores;
        gate.apply(backend, input, scores)?;
        backend.activate(Activation::Sigmoid, scores)?;
        backend.scale_heads(out, scores)
    }
}

struct Mlp<B: Backend> {
    activation: Activation,
    /// Standard deviations above the mean at which gates are cut off (Gemma 3n).
    gate_cutoff: Option<f32>,
    gate: Option<Projection<B>>,
    up: Projection<B>,
    down: Projection<B>,
}

impl<B: Backend> Mlp<B> {
    fn load(loader: &Loader<'_, B>, [gate, up, down]: [Names; 3], config: &MlpConfig) -> LoadResult<Self> {
        let inner = config.intermediate_size;
        let fused = loader.naming.parts.mlp_fused;
        let (gate, up) = if config.is_gated {
            let both = loader.file.linears(loader.layer, [gate, up], fused, [inner; 2], loader.hidden)?;
            let [gate, up] = both;
            (Some(gate), up)
        } else {
            (None, loader.file.linear(loader.layer, up, [inner, loader.hidden])?)
        };
        let down = loader.file.linear(loader.layer, down, [loader.hidden, inner])?;
        Self::of(learned(loader, config.activation)?, gate, [up, down], |linear| loader.adapted(linear))
    }

    fn of(
        activation: Activation,
        gate: Option<Linear>,
        [up, down]: [Linear; 2],
        upload: impl Fn(Linear) -> LoadResult<Projection<B>>,
    ) -> LoadResult<Self> {
        Ok(Self {
            activation,
            gate_cutoff: None,
            gate: gate.map(&upload).transpose()?,
            up: upload(up)?,
            down: upload(down)?,
        })
    }

    fn apply(
        &self,
        backend: &B,
        input: &B::Buffer,
        adapted: &AdaptedRows,
        [gate, up]: [&mut B::Buffer; 2],
        out: &mut B::Buffer,
    ) -> Result<()> {
        if let Some(to_gate) = self.gate.as_ref().filter(|_| self.gate_cutoff.is_none()) {
            let inner = [to_gate.adapted(adapted, gate), self.up.adapted(adapted, up)];
            let down = self.down.adapted(adapted, out);
            return backend.feed_forward(input, GatedNetwork { activation: self.activation, inner, down });
        }
        let inner = match &self.gate {
            None => {
                backend.matmul_each(input, &mut [self.up.adapted(adapted, up)])?;
                backend.activate(self.activation, up)?;
                up
            }
            Some(to_gate) => {
                let products = &mut [to_gate.adapted(adapted, gate), self.up.adapted(adapted, up)];
                backend.matmul_each(input, products)?;
                self.gate_cutoff.map_or(Ok(()), |deviations| backend.cut_off(gate, deviations))?;
                backend.gated(self.activation, gate, up)?;
                gate
            }
        };
        backend.matmul_each(inner, &mut [self.down.adapted(adapted, out)])
    }

    /// Adds its result for some rows of `input`, each with a weight, to these rows of `out`.
    fn add(
        &self,
        backend: &B,
        input: &B::Buffer,
        to: WeightedRows<'_>,
        adapted: &AdaptedRows,
        [gate, up, selected, result]: [&mut B::Buffer; 4],
        out: &mut B::Buffer,
    ) -> Result<()> {
        let adapted = &adapted.within(to.rows);
        let Some(to_gate) = self.gate.as_ref().filter(|_| self.gate_cutoff.is_none()) else {
            backend.select_rows(input, to.rows, selected)?;
            self.apply(backend, selected, adapted, [gate, up], result)?;
            return backend.add_rows(out, result, to.rows, to.weights);
        };
        let inner = [to_gate.adapted(adapted, gate), self.up.adapted(adapted, up)];
        let down = self.down.adapted(adapted, result);
        let network = GatedNetwork { activation: self.activation, inner, down };
        backend.add_feed_forward(input, to, network, [selected, out])
    }
}

/// Returns the activation with the layer's learned parameters, which Hugging Face's form has as tensors (Apertus).
fn learned<B: Backend>(loader: &Loader<'_, B>, activation: Activation) -> LoadResult<Activation> {
    if loader.naming.gguf || !matches!(activation, Activation::Xielu { .. }) {
        return Ok(activation);
    }
    let mut parameters = [0.0; 4];
    for (parameter, name) in parameters.iter_mut().zip(["alpha_p", "alpha_n", "beta", "eps"]) {
        let name = format!("mlp.act_fn.{name}");
        *parameter = loader.file.flat_values(loader.layer, [&name, ""], 1)?[0];
    }
    Ok(Activation::xielu(parameters))
}

struct Experts<B: Backend> {
    hidden: usize,
    config: ExpertsConfig,
    router: Projection<B>,
    /// Biases for the choice of experts.
    bias: Option<Vec<f32>>,
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
    fn load(loader: &Loader<'_, B>, config: &ExpertsConfig) -> LoadResult<Self> {
        let names = &loader.naming.parts;
        let router = loader.file.linear(loader.layer, names.router, [config.count, loader.hidden])?;
        let shape = [config.mlp.intermediate_size, loader.hidden];
        let is_gated = config.mlp.is_gated;
        let each = loader.file.experts(loader.layer, names.experts, config.count, shape, is_gated)?;
        let expert = |ExpertLinears { gate, up, down }| {
            Mlp::of(config.mlp.activation, gate, [up, down], |linear| loader.expert(linear))
        };
        let bias = |_| loader.file.flat_values(loader.layer, names.expert_bias, config.count);
        Ok(Self {
            hidden: loader.hidden,
            config: config.clone(),
            router: loader.gate(router)?,
            bias: config.has_bias.then_some(()).map(bias).transpose()?,
            each: each.into_iter().map(expert).collect::<Result<_, _>>()?,
            norms: config.has_norms.then(|| ExpertNorms::load(loader, config.count)).transpose()?,
            eps: loader.eps,
        })
    }

    /// Adds the experts' results, computed from `input` or, if they have norms of their own, from `residual`.
    fn add(
        &self,
        context: &mut LayerContext<'_, B>,
        [input, residual]: [&B::Buffer; 2],
        out: &mut B::Buffer,
    ) -> Result<()> {
        let Some(norms) = &self.norms else {
            self.route(context, input, None)?;
            return self.visit(context, input, out);
        };
        let (backend, num_rows) = (context.backend, context.step.tokens.len());
        let (mut space, mut sum) =
            (std::mem::take(&mut context.work.q), std::mem::take(&mut context.work.mixed));
        backend.rms_norm(residual, &norms.router, self.eps, &mut space)?;
        self.route(context, &space, Some(&norms.scales))?;
        backend.rms_norm(residual, &norms.experts, self.eps, &mut space)?;
        backend.zeros(num_rows, self.hidden, &mut sum)?;
        self.visit(context, &space, &mut sum)?;
        backend.rms_norm(out, &norms.dense_out, self.eps, &mut space)?;
        std::mem::swap(out, &mut space);
        backend.rms_norm(&sum, &norms.experts_out, self.eps, &mut space)?;
        backend.add_scaled(out, &space, 1.0)?;
        (context.work.q, context.work.mixed) = (space, sum);
        Ok(())
    }

    /// Computes the router's scores and assigns rows to experts.
    fn route(
        &self,
        context: &mut LayerContext<'_, B>,
        input: &B::Buffer,
        scales: Option<&[f32]>,
    ) -> Result<()> {
        let LayerContext { backend, work, .. } = context;
        let LayerBuffers { scores, routing, .. } = &mut **work;
        self.router.apply(backend, input, scores)?;
        backend.read(scores, &mut routing.scores)?;
        routing.choose(&self.config, self.bias.as_deref());
        for (visitors, scale) in routing.visitors.iter_mut().zip(scales.into_iter().flatten()) {
            visitors.weights.iter_mut().for_each(|weight| *weight *= scale);
        }
        Ok(())
    }

    /// Runs the experts and adds their results in the order of the experts' numbers.
    fn visit(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer, out: &mut B::Buffer) -> Result<()> {
        let LayerContext { backend, step, work, .. } = context;
        let LayerBuffers { routing, sent, returned, gate, up, .. } = &mut **work;
        for (expert, Visitors { rows, weights }) in self.each.iter().zip(&routing.visitors) {
            if !rows.is_empty() {
                let space = [&mut *gate, &mut *up, &mut *sent, &mut *returned];
                expert.add(*backend, input, WeightedRows { rows, weights }, &step.adapted, space, out)?;
            }
        }
        Ok(())
    }
}

impl<B: Backend> ExpertNorms<B> {
    fn load(loader: &Loader<'_, B>, count: usize) -> LoadResult<Self> {
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
