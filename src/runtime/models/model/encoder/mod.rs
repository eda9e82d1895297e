//! The one encoder: BERT and its descendants, driven by [`EncoderConfig`]. It reads texts whole, many in one
//! step, and keeps nothing of them.
//!
//! A row's result depends on its own text only: products are computed row by row, attention text by text.

mod config;
mod families;
mod load;

pub use config::{EncoderConfig, EncoderNames};
pub use families::parse_encoder;

use std::ops::Range;

use super::decoder::{Convert, Projection};
use super::rope::Rope;
use super::{TextIds, TextModel, TextModelSpec, text_rows};
use crate::backend::{Backend, GatedNetwork, Reach, ScoreRule, TextHeads};
use crate::tensor::TensorSource;
use config::EncoderLayerConfig;
use llmctl_base::error::{LoadResult, Result};
use load::EncoderFile;

/// The inputs of an encoder's construction, besides the backend.
pub struct EncoderParts<'a> {
    pub config: EncoderConfig,
    pub source: &'a dyn TensorSource,
    /// Limit of tokens per text, at most the model's.
    pub context_length: usize,
    pub convert: Convert<'a>,
    /// Called after each layer with the number of loaded layers and their total.
    pub progress: &'a mut dyn FnMut(usize, usize),
}

/// A norm's weights and biases.
struct EncoderNorm<B: Backend> {
    weight: B::Vector,
    bias: B::Vector,
}

struct EncoderLayer<B: Backend> {
    config: EncoderLayerConfig,
    qkv: [Projection<B>; 3],
    output: Projection<B>,
    /// `None` in ModernBERT's first layer, whose input is normalised already.
    attention_norm: Option<EncoderNorm<B>>,
    gate: Option<Projection<B>>,
    up: Projection<B>,
    down: Projection<B>,
    mlp_norm: EncoderNorm<B>,
}

/// An encoder: weights on a backend, and buffers that are kept between steps.
pub struct Encoder<B: Backend> {
    backend: B,
    config: EncoderConfig,
    spec: TextModelSpec,
    ropes: Vec<Rope>,
    words: B::Weight,
    positions: Option<B::Weight>,
    types: Option<B::Weight>,
    embedding_norm: EncoderNorm<B>,
    layers: Vec<EncoderLayer<B>>,
    last_norm: Option<EncoderNorm<B>>,
    stream: EncoderStream<B::Buffer>,
    angles: Vec<B::Angles>,
}

/// The residual stream and temporary values of a step.
#[derive(Default)]
struct EncoderStream<T> {
    residual: T,
    normed: T,
    added: T,
    q: T,
    k: T,
    v: T,
    up: T,
}

/// A step of all layers, besides its stream.
struct EncoderStep<'a, B: Backend> {
    backend: &'a B,
    config: &'a EncoderConfig,
    angles: &'a [B::Angles],
    /// Rows of each text.
    spans: &'a [Range<usize>],
}

impl<B: Backend> Encoder<B> {
    /// Reads all weights.
    ///
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(backend: B, parts: EncoderParts<'_>) -> LoadResult<Self> {
        let EncoderParts { config, source, context_length, convert, progress } = parts;
        let (names, hidden) = (config.names, config.hidden_size);
        let file = EncoderFile::new(&backend, source, convert, &names)?;
        let num_positions = config.first_position.map(|first| first + config.context_length);
        let num_types = Some(config.num_types).filter(|types| *types > 0);
        let table = |name, rows: Option<usize>| rows.map(|rows| file.table(name, [rows, hidden])).transpose();
        let words = file.table(names.words, [config.vocab_size, hidden])?;
        let (positions, types) = (table(names.positions, num_positions)?, table(names.types, num_types)?);
        let embedding_norm = file.norm(names.embedding_norm, hidden)?;
        let mut layers = Vec::with_capacity(config.layers.len());
        for (index, layer) in config.layers.iter().enumerate() {
            layers.push(EncoderLayer::load(&file, &config, *layer, index)?);
            progress(index + 1, config.layers.len());
        }
        Ok(Self {
            spec: TextModelSpec {
                architecture: config.architecture,
                vocab_size: config.vocab_size,
                hidden_size: hidden,
                context_length,
            },
            ropes: config.ropes.iter().map(|rope| Rope::new(rope, context_length)).collect(),
            words,
            positions,
            types,
            embedding_norm,
            layers,
            last_norm: config.pre_norms.then(|| file.norm(names.last_norm, hidden)).transpose()?,
            stream: EncoderStream::default(),
            angles: config.ropes.iter().map(|_| B::Angles::default()).collect(),
            backend,
            config,
        })
    }

    /// Computes the input of the first layer.
    fn embed(&mut self, texts: &[TextIds<'_>]) -> Result<()> {
        let Self { backend, config, ropes, stream, angles, .. } = self;
        let EncoderStream { residual, normed, added, .. } = stream;
        let tokens: Vec<u32> = texts.iter().flat_map(|text| text.ids).copied().collect();
        backend.embed(&self.words, &tokens, 1.0, residual)?;
        let positions: Vec<usize> = texts.iter().flat_map(|text| 0..text.ids.len()).collect();
        if let Some(types) = &self.types {
            let last = config.num_types - 1;
            let of_text = |text: &TextIds<'_>| {
                let second = text.second;
                (0..text.ids.len()).map(move |at| usize::from(at >= second).min(last) as u32)
            };
            let ids: Vec<u32> = texts.iter().flat_map(of_text).collect();
            backend.embed(types, &ids, 1.0, added)?;
            backend.add_scaled(residual, added, 1.0)?;
        }
        if let (Some(table), Some(first)) = (&self.positions, config.first_position) {
            let ids: Vec<u32> = positions.iter().map(|&position| (first + position) as u32).collect();
            backend.embed(table, &ids, 1.0, added)?;
            backend.add_scaled(residual, added, 1.0)?;
        }
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        let positions: Vec<_> = positions.iter().map(|&position| [position as u32; 3]).collect();
        for (rope, angles) in ropes.iter().zip(angles) {
            rope.angles(&positions, &mut cos, &mut sin);
            backend.angles(&cos, &sin, positions.len(), angles)?;
        }
        self.embedding_norm.apply(backend, residual, config.norm_eps, normed)?;
        std::mem::swap(residual, normed);
        Ok(())
    }
}

impl<B: Backend> TextModel for Encoder<B> {
    fn spec(&self) -> &TextModelSpec {
        &self.spec
    }

    fn encode(&mut self, texts: &[TextIds<'_>], out: &mut Vec<f32>) -> Result<()> {
        let spans = text_rows(texts, self.spec.context_length)?;
        if spans.last().is_none_or(|last| last.end == 0) {
            out.clear();
            return Ok(());
        }
        self.embed(texts)?;
        let Self { backend, config, stream, angles, .. } = self;
        let step = EncoderStep { backend, config, angles, spans: &spans };
        for layer in &self.layers {
            layer.apply(&step, stream)?;
        }
        let EncoderStream { residual, normed, .. } = stream;
        if let Some(norm) = &self.last_norm {
            norm.apply(backend, residual, config.norm_eps, normed)?;
            std::mem::swap(residual, normed);
        }
        backend.read(residual, out)
    }
}

impl<B: Backend> EncoderNorm<B> {
    fn apply(&self, backend: &B, x: &B::Buffer, eps: f32, out: &mut B::Buffer) -> Result<()> {
        backend.layer_norm(x, [&self.weight, &self.bias], eps, out)
    }
}

impl<B: Backend> EncoderLayer<B> {
    fn load(
        file: &EncoderFile<'_, B>,
        config: &EncoderConfig,
        layer: EncoderLayerConfig,
        index: usize,
    ) -> LoadResult<Self> {
        let EncoderNames { layers, .. } = config.names;
        let name = |part: &str| format!("{layers}.{index}.{part}");
        let (names, hidden, inner) = (config.names, config.hidden_size, config.intermediate_size);
        let linear = |part: &str, shape| file.projection(file.linear(&name(part), shape)?);
        let (gate, up) = match config.is_gated {
            true => {
                let parts = [names.gate, names.up].map(name);
                let [gate, up] = file.projections(parts, &name(names.gate_up), [inner, hidden])?;
                (Some(gate), up)
            }
            false => (None, linear(names.up, [inner, hidden])?),
        };
        let is_first_of_modern = config.pre_norms && index == 0;
        let attention_norm = match is_first_of_modern && !file.has(&name(names.attention_norm)) {
            true => None,
            false => Some(file.norm(&name(names.attention_norm), hidden)?),
        };
        Ok(Self {
            config: layer,
            qkv: file.projections(names.qkv.map(name), &name(names.fused_qkv), [hidden, hidden])?,
            output: linear(names.attention_output, [hidden, hidden])?,
            attention_norm,
            gate,
            up,
            down: linear(names.down, [hidden, inner])?,
            mlp_norm: file.norm(&name(names.mlp_norm), hidden)?,
        })
    }

    fn apply(&self, step: &EncoderStep<'_, B>, stream: &mut EncoderStream<B::Buffer>) -> Result<()> {
        let EncoderStep { backend, config, .. } = *step;
        let eps = config.norm_eps;
        let pre_norm = self.attention_norm.as_ref().filter(|_| config.pre_norms);
        if let Some(norm) = pre_norm {
            norm.apply(backend, &stream.residual, eps, &mut stream.normed)?;
        }
        self.attend(step, pre_norm.is_some(), stream)?;
        let post_norm = self.attention_norm.as_ref().filter(|_| !config.pre_norms);
        add(backend, post_norm, eps, stream)?;
        if config.pre_norms {
            self.mlp_norm.apply(backend, &stream.residual, eps, &mut stream.normed)?;
        }
        self.feed_forward(step, stream)?;
        add(backend, Some(&self.mlp_norm).filter(|_| !config.pre_norms), eps, stream)
    }

    /// Computes the attention of `normed`, or of the residual stream, into `added`.
    fn attend(
        &self,
        step: &EncoderStep<'_, B>,
        is_normed: bool,
        stream: &mut EncoderStream<B::Buffer>,
    ) -> Result<()> {
        let EncoderStep { backend, config, angles, spans } = *step;
        let EncoderStream { residual, normed, added, q, k, v, .. } = stream;
        let input = if is_normed { &*normed } else { &*residual };
        let [to_q, to_k, to_v] = &self.qkv;
        backend.matmul_each(input, &mut [to_q.onto(q), to_k.onto(k), to_v.onto(v)])?;
        let head_dim = config.hidden_size / config.num_heads;
        if let Some(rope) = self.config.rope {
            backend.rope(q, head_dim, &angles[rope])?;
            backend.rope(k, head_dim, &angles[rope])?;
        }
        let heads = TextHeads {
            num_heads: config.num_heads,
            num_kv_heads: config.num_heads,
            head_dim,
            rule: ScoreRule { scale: 1.0 / (head_dim as f32).sqrt(), softcap: None },
            reach: self.config.distance.map_or(Reach::WHOLE, Reach::both),
        };
        backend.attend_texts(&heads, [q, k, v], spans, normed)?;
        backend.matmul_each(normed, &mut [self.output.onto(added)])
    }

    /// Computes the feed-forward part of `normed`, or of the residual stream, into `added`.
    fn feed_forward(&self, step: &EncoderStep<'_, B>, stream: &mut EncoderStream<B::Buffer>) -> Result<()> {
        let EncoderStep { backend, config, .. } = *step;
        let EncoderStream { residual, normed, added, q: inner, up, .. } = stream;
        let input = if config.pre_norms { &*normed } else { &*residual };
        match &self.gate {
            Some(gate) => {
                let products = [gate.onto(inner), self.up.onto(up)];
                let down = self.down.onto(added);
                backend.feed_forward(
                    input,
                    GatedNetwork { activation: config.activation, inner: products, down },
                )
            }
            None => {
                backend.matmul_each(input, &mut [self.up.onto(inner)])?;
                backend.activate(config.activation, inner)?;
                backend.matmul_each(inner, &mut [self.down.onto(added)])
            }
        }
    }
}

/// Adds `added` to the residual stream, and normalises the sum if a norm is given.
fn add<B: Backend>(
    backend: &B,
    norm: Option<&EncoderNorm<B>>,
    eps: f32,
    stream: &mut EncoderStream<B::Buffer>,
) -> Result<()> {
    let EncoderStream { residual, normed, added, .. } = stream;
    backend.add_scaled(residual, added, 1.0)?;
    if let Some(norm) = norm {
        norm.apply(backend, residual, eps, normed)?;
        std::mem::swap(residual, normed);
    }
    Ok(())
}
