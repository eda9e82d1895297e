//! Per-layer inputs (Gemma 3n, Gemma 4 E): a second embedding of each token, mixed with a projection of the
//! first; each layer adds its own part of them to the residual stream. Source: transformers
//! `Gemma4TextModel.project_per_layer_inputs`.

use std::ops::Range;

use super::buffers::{LayerBuffers, LayerContext, Projection};
use super::load::Loader;
use crate::backend::{Activation, Backend};
use crate::model::config::{DecoderConfig, PerLayerInputs};
use llmctl_base::error::{LoadResult, Result};

/// The inputs of all layers.
pub struct PerLayer<B: Backend> {
    table: B::Weight,
    num_rows: usize,
    /// The step's tokens; those without a row of the table have that of token 0.
    tokens: Vec<u32>,
    projection: B::Weight,
    norm: B::Vector,
    eps: f32,
    /// Factor of the table's rows.
    table_scale: f32,
    /// Factor of the projection.
    projection_scale: f32,
    /// `[rows, layers * size]`.
    inputs: B::Buffer,
}

impl<B: Backend> PerLayer<B> {
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(loader: &Loader<'_, B>, config: &DecoderConfig, inputs: &PerLayerInputs) -> LoadResult<Self> {
        let (backend, file) = (loader.backend, loader.file);
        let (width, hidden) = (config.layers.len() * inputs.size, config.hidden_size);
        let names = ["embed_tokens_per_layer", "per_layer_token_embd"];
        let table = loader.vocabulary(file.global_linear(names, [inputs.num_rows, width])?)?;
        let names = ["per_layer_model_projection", "per_layer_model_proj"];
        let projection = loader.projection(file.global_linear(names, [width, hidden])?)?;
        let norm = file.global_norm(["per_layer_projection_norm", "per_layer_proj_norm"], inputs.size)?;
        Ok(Self {
            table: backend.table(&table)?,
            num_rows: inputs.num_rows,
            tokens: Vec::new(),
            projection: projection.weight,
            norm: backend.vector(norm)?,
            eps: config.final_norm_eps,
            table_scale: (inputs.size as f32).sqrt(),
            projection_scale: 1.0 / (hidden as f32).sqrt(),
            inputs: B::Buffer::default(),
        })
    }

    /// Computes the inputs of another step, whose embeddings are `embedded`.
    pub fn turn_to(
        &mut self,
        backend: &B,
        tokens: &[u32],
        embedded: &B::Buffer,
        work: &mut LayerBuffers<B::Buffer>,
    ) -> Result<()> {
        let LayerBuffers { mixed, gate, .. } = work;
        backend.matmul(embedded, &self.projection, None, mixed)?;
        backend.scale(mixed, self.projection_scale)?;
        backend.rms_norm(mixed, &self.norm, self.eps, &mut self.inputs)?;
        self.tokens.clear();
        let with_row = |&token: &u32| if (token as usize) < self.num_rows { token } else { 0 };
        self.tokens.extend(tokens.iter().map(with_row));
        backend.embed(&self.table, &self.tokens, self.table_scale, gate)?;
        backend.add_scaled(&mut self.inputs, gate, 1.0)?;
        backend.scale(&mut self.inputs, std::f32::consts::FRAC_1_SQRT_2)
    }

    /// Drops the inputs of all other rows; `space` is overwritten.
    pub fn keep_rows(&mut self, backend: &B, rows: &[usize], space: &mut B::Buffer) -> Result<()> {
        backend.select_rows(&self.inputs, rows, space)?;
        std::mem::swap(&mut self.inputs, space);
        Ok(())
    }

    pub fn inputs(&self) -> &B::Buffer {
        &self.inputs
    }
}

/// One layer's gate and projection for its part.
pub struct LayerInput<B: Backend> {
    activation: Activation,
    columns: Range<usize>,
    gate: Projection<B>,
    projection: Projection<B>,
    norm: B::Vector,
    eps: f32,
}

impl<B: Backend> LayerInput<B> {
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(loader: &Loader<'_, B>, inputs: &PerLayerInputs) -> LoadResult<Self> {
        let (layer, hidden, size) = (loader.layer, loader.hidden, inputs.size);
        Ok(Self {
            activation: inputs.activation,
            columns: layer * size..(layer + 1) * size,
            gate: loader.linear(["per_layer_input_gate", "inp_gate"], [size, hidden])?,
            projection: loader.linear(["per_layer_projection", "proj"], [hidden, size])?,
            norm: loader.norm(["post_per_layer_input_norm", "post_norm"], hidden)?,
            eps: loader.eps,
        })
    }

    /// Computes into `out` what the layer's part of `inputs` adds to the residual stream.
    pub fn compute(
        &self,
        LayerContext { backend, work, .. }: &mut LayerContext<'_, B>,
        [inputs, residual]: [&B::Buffer; 2],
        out: &mut B::Buffer,
    ) -> Result<()> {
        let LayerBuffers { mixed, gate, up, .. } = &mut **work;
        self.gate.apply(backend, residual, gate)?;
        backend.select_columns(inputs, self.columns.clone(), up)?;
        backend.gated(self.activation, gate, up)?;
        self.projection.apply(backend, gate, mixed)?;
        backend.rms_norm(mixed, &self.norm, self.eps, out)
    }
}
