//! The one decoder: every family runs through this code, driven by [`DecoderConfig`].
//!
//! KV comes in from outside and is addressed by page tables, so rewinding, sharing and batching are the caller's to
//! decide. A row's result depends on its own sequence only.

use super::config::{DecoderConfig, LayerConfig, Naming, QkNorm, RopeScaling};
use super::rope::Rope;
use super::weights::{Linear, WeightFile};
use super::{Batch, Logits, Model, ModelSpec};
use crate::runtime::backend::{AttentionSpec, Backend, KvLayout, KvShape, KvType, LayerKv, Product, Span};
use crate::runtime::error::{Error, LoadError, Result};
use crate::runtime::kernel::attention::ScoreRule;
use crate::runtime::kernel::{isa, math};
use crate::runtime::kv::{Keep, PAGE_TOKENS, Place, StateGroup};
use crate::runtime::tensor::{HostTensor, TensorSource};

/// What a decoder is built from, besides the backend.
pub struct Parts<'a> {
    pub config: DecoderConfig,
    pub naming: Naming,
    pub source: &'a dyn TensorSource,
    /// The most tokens a sequence may hold; decides LongRoPE's divisors.
    pub context_length: usize,
    pub kv_type: KvType,
    /// Converts a matrix to the type it is to be kept in.
    pub convert: Convert<'a>,
    /// Told after each layer: layers done, of how many.
    pub progress: &'a mut dyn FnMut(usize, usize),
}

/// Told a matrix's name and what it is for, gives it back in the type it is to be kept in.
pub type Convert<'a> = &'a (dyn Fn(&str, Matrix, HostTensor) -> Result<HostTensor, LoadError> + 'a);

/// What a matrix is for: the table of tokens is more sensitive to rounding than the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// Embedding table or output matrix, `[vocab, hidden]`.
    Vocabulary,
    /// A projection within a layer.
    Projection,
}

/// Weights on a backend, and the KV they write.
pub struct Decoder<B: Backend> {
    backend: B,
    config: DecoderConfig,
    spec: ModelSpec,
    ropes: Vec<Rope>,
    embedding: B::Weight,
    head: Option<B::Weight>,
    final_norm: B::Vector,
    layers: Vec<Layer<B>>,
    kv: B::Kv,
    /// Of each layer's KV.
    groups: Vec<usize>,
    scratch: Scratch<B>,
    step: Step<B>,
    /// Memory for the next step's logits.
    logits: Vec<f32>,
}

struct Projection<B: Backend> {
    weight: B::Weight,
    bias: Option<B::Vector>,
}

impl<B: Backend> Projection<B> {
    fn onto<'a>(&'a self, out: &'a mut B::Buffer) -> Product<'a, B> {
        Product { weight: &self.weight, bias: self.bias.as_ref(), out }
    }

    fn apply(&self, backend: &B, x: &B::Buffer, out: &mut B::Buffer) -> Result<()> {
        backend.matmul(x, &self.weight, self.bias.as_ref(), out)
    }
}

struct Layer<B: Backend> {
    pre_mixer: Option<B::Vector>,
    post_mixer: Option<B::Vector>,
    pre_mlp: Option<B::Vector>,
    post_mlp: Option<B::Vector>,
    q: Projection<B>,
    k: Projection<B>,
    v: Projection<B>,
    output: Projection<B>,
    qk_norms: Option<[B::Vector; 2]>,
    gate: Projection<B>,
    up: Projection<B>,
    down: Projection<B>,
}

/// Buffers kept from step to step.
struct Scratch<B: Backend> {
    residual: B::Buffer,
    normed: B::Buffer,
    q: B::Buffer,
    k: B::Buffer,
    v: B::Buffer,
    mixed: B::Buffer,
    added: B::Buffer,
    gate: B::Buffer,
    up: B::Buffer,
    /// Of its own, because growing another to the vocabulary would write zeros into it at every step.
    logits: B::Buffer,
}

impl<B: Backend> Scratch<B> {
    fn new(backend: &B) -> Self {
        let buffer = || backend.buffer();
        Self {
            residual: buffer(),
            normed: buffer(),
            q: buffer(),
            k: buffer(),
            v: buffer(),
            mixed: buffer(),
            added: buffer(),
            gate: buffer(),
            up: buffer(),
            logits: buffer(),
        }
    }
}

/// What all layers of a step share; kept for its memory.
struct Step<B: Backend> {
    /// By group.
    spans: Vec<Vec<Span>>,
    /// By rope.
    angles: Vec<B::Angles>,
    positions: Vec<usize>,
    tokens: Vec<u32>,
    /// Rows that want logits.
    wanted: Vec<usize>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl<B: Backend> Step<B> {
    fn new(num_groups: usize, num_ropes: usize) -> Self {
        Self {
            spans: vec![Vec::new(); num_groups],
            angles: std::iter::repeat_with(B::Angles::default).take(num_ropes).collect(),
            positions: Vec::new(),
            tokens: Vec::new(),
            wanted: Vec::new(),
            cos: Vec::new(),
            sin: Vec::new(),
        }
    }

    /// Takes on another batch.
    fn turn_to(&mut self, backend: &B, ropes: &[Rope], batch: &Batch<'_>) -> Result<()> {
        let Self { spans, angles, positions, tokens, wanted, cos, sin } = self;
        positions.clear();
        positions.extend(batch.rows.iter().map(|row| row.position));
        tokens.clear();
        tokens.extend(batch.rows.iter().map(|row| row.token));
        wanted.clear();
        wanted.extend((0..batch.rows.len()).filter(|&index| batch.rows[index].wants_logits));
        for (rope, angles) in ropes.iter().zip(angles) {
            rope.angles(positions, cos, sin);
            backend.angles(cos, sin, positions.len(), angles)?;
        }
        spans.iter_mut().enumerate().try_for_each(|(group, spans)| find_spans(batch, group, spans))
    }
}

impl<B: Backend> Decoder<B> {
    /// Reads all weights.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] naming the tensor that is missing or has the wrong shape.
    pub fn load(backend: B, parts: Parts<'_>) -> Result<Self, LoadError> {
        let Parts { mut config, naming, source, context_length, kv_type, convert, progress } = parts;
        let file = WeightFile::new(source, &naming)?;
        if naming.gguf {
            apply_divisors(&mut config, &file)?;
        }
        file.check_layers(config.layers.len())?;
        let (layout, _) = kv_layout(&config);
        let kv = backend.kv(&layout, kv_type)?;
        let loader =
            LayerLoader { backend: &backend, file: &file, naming: &naming, convert, config: &config };
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let vocabulary = |table: Linear| convert(&table.name, Matrix::Vocabulary, table.weight);
        let embedding = vocabulary(file.embedding(vocab, hidden)?)?;
        // Without a head of its own the model multiplies with the embedding table: one copy serves both.
        let (embedding, head) = match file.head(vocab, hidden)? {
            Some(head) => (backend.table(&embedding)?, Some(backend.weight(&vocabulary(head)?)?)),
            None => (backend.weight(&embedding)?, None),
        };
        let final_norm = backend.vector(file.final_norm(hidden)?)?;
        let mut layers = Vec::with_capacity(config.layers.len());
        for (index, layer) in config.layers.iter().enumerate() {
            layers.push(loader.layer(index, layer)?);
            progress(index + 1, config.layers.len());
        }
        let groups = layout.layers.iter().map(|layer| layer.group).collect();
        let ropes: Vec<Rope> = config.ropes.iter().map(|rope| Rope::new(rope, context_length)).collect();
        let spec = ModelSpec {
            architecture: config.architecture.to_owned(),
            vocab_size: vocab,
            context_length,
            groups: state_groups(&config, kv_type),
            can_rewind: true,
        };
        let scratch = Scratch::new(&backend);
        let step = Step::new(spec.groups.len(), ropes.len());
        let logits = Vec::new();
        Ok(Self {
            backend,
            config,
            spec,
            ropes,
            embedding,
            head,
            final_norm,
            layers,
            kv,
            groups,
            scratch,
            step,
            logits,
        })
    }

    fn layer(&mut self, index: usize) -> Result<()> {
        let Self { backend, config, layers, kv, groups, scratch: s, step, .. } = self;
        let (facts, layer) = (&config.layers[index], &layers[index]);
        let eps = facts.norm_eps;

        let input = normed(backend, layer.pre_mixer.as_ref(), eps, &s.residual, &mut s.normed)?;
        attention(
            backend,
            (index, facts),
            layer,
            (step, &step.spans[groups[index]]),
            kv,
            Attention {
                input,
                q: &mut s.q,
                k: &mut s.k,
                v: &mut s.v,
                mixed: &mut s.mixed,
                added: &mut s.added,
            },
        )?;
        let added = normed(backend, layer.post_mixer.as_ref(), eps, &s.added, &mut s.mixed)?;
        backend.add_scaled(&mut s.residual, added, facts.residual_scale)?;

        let input = normed(backend, layer.pre_mlp.as_ref(), eps, &s.residual, &mut s.normed)?;
        backend.matmul_each(input, &mut [layer.gate.onto(&mut s.gate), layer.up.onto(&mut s.up)])?;
        backend.gated(facts.mlp.activation, &mut s.gate, &s.up)?;
        layer.down.apply(backend, &s.gate, &mut s.added)?;
        let added = normed(backend, layer.post_mlp.as_ref(), eps, &s.added, &mut s.mixed)?;
        backend.add_scaled(&mut s.residual, added, facts.residual_scale)
    }

    /// Logits of the rows that want them.
    fn logits(&mut self) -> Result<Logits> {
        let vocab_size = self.config.vocab_size;
        let mut values = std::mem::take(&mut self.logits);
        if self.step.wanted.is_empty() {
            values.clear();
            return Ok(Logits { values, vocab_size });
        }
        let Self { backend, config, scratch: s, .. } = self;
        backend.select_rows(&s.residual, &self.step.wanted, &mut s.added)?;
        backend.rms_norm(&s.added, &self.final_norm, config.final_norm_eps, &mut s.normed)?;
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        backend.matmul(&s.normed, head, None, &mut s.logits)?;
        backend.read(&mut s.logits, &mut values)?;
        if config.logit_scale != 1.0 {
            values.iter_mut().for_each(|value| *value *= config.logit_scale);
        }
        if let Some(cap) = config.final_softcap {
            math::softcap(isa::isa(), &mut values, cap);
        }
        Ok(Logits { values, vocab_size })
    }
}

impl<B: Backend> Model for Decoder<B> {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits> {
        self.step.turn_to(&self.backend, &self.ropes, batch)?;
        let scale = self.config.embedding_scale;
        self.backend.embed(&self.embedding, &self.step.tokens, scale, &mut self.scratch.residual)?;
        for index in 0..self.layers.len() {
            self.layer(index)?;
        }
        self.logits()
    }

    fn reuse(&mut self, logits: Logits) {
        self.logits = logits.values;
    }

    fn copy_page(&mut self, from: Place, to: Place) -> Result<()> {
        self.backend.copy_page(&mut self.kv, from.group, from.page, to.page)
    }

    fn free_page(&mut self, place: Place) {
        self.backend.free_page(&mut self.kv, place.group, place.page);
    }

    fn export_page(&self, place: Place, out: &mut Vec<u8>) -> Result<()> {
        self.backend.export_page(&self.kv, place.group, place.page, out)
    }

    fn import_page(&mut self, place: Place, bytes: &[u8]) -> Result<()> {
        self.backend.import_page(&mut self.kv, place.group, place.page, bytes)
    }
}

/// Buffers of one attention block.
struct Attention<'a, Buffer> {
    input: &'a Buffer,
    q: &'a mut Buffer,
    k: &'a mut Buffer,
    v: &'a mut Buffer,
    mixed: &'a mut Buffer,
    added: &'a mut Buffer,
}

fn attention<B: Backend>(
    backend: &B,
    (index, facts): (usize, &LayerConfig),
    layer: &Layer<B>,
    (step, spans): (&Step<B>, &[Span]),
    kv: &mut B::Kv,
    buffers: Attention<'_, B::Buffer>,
) -> Result<()> {
    let Attention { input, q, k, v, mixed, added } = buffers;
    let attention = &facts.attention;
    backend.matmul_each(input, &mut [layer.q.onto(q), layer.k.onto(k), layer.v.onto(v)])?;
    if let Some([q_norm, k_norm]) = &layer.qk_norms {
        backend.rms_norm(q, q_norm, facts.norm_eps, mixed)?;
        std::mem::swap(q, mixed);
        backend.rms_norm(k, k_norm, facts.norm_eps, mixed)?;
        std::mem::swap(k, mixed);
    }
    if let Some(rope) = attention.rope {
        backend.rope(q, attention.head_dim, &step.angles[rope])?;
        backend.rope(k, attention.head_dim, &step.angles[rope])?;
    }
    backend.store_kv(kv, index, k, v, spans)?;
    let spec = AttentionSpec {
        layer: index,
        num_heads: attention.num_heads,
        rule: ScoreRule { scale: attention.scale, softcap: attention.softcap },
        window: attention.window,
        sinks: None,
    };
    backend.attend(kv, &spec, q, spans, mixed)?;
    layer.output.apply(backend, mixed, added)
}

/// `x` normalised into `out`, or `x` itself where the family has no norm here.
fn normed<'a, B: Backend>(
    backend: &B,
    weight: Option<&B::Vector>,
    eps: f32,
    x: &'a B::Buffer,
    out: &'a mut B::Buffer,
) -> Result<&'a B::Buffer> {
    match weight {
        None => Ok(x),
        Some(weight) => {
            backend.rms_norm(x, weight, eps, out)?;
            Ok(out)
        }
    }
}

/// Consecutive rows of one sequence, with its pages in `group`, into `spans`, whose memory is used again.
fn find_spans(batch: &Batch<'_>, group: usize, spans: &mut Vec<Span>) -> Result<()> {
    let mut count = 0;
    let mut last = None;
    for (index, row) in batch.rows.iter().enumerate() {
        let table = *batch
            .tables
            .get(row.sequence)
            .ok_or_else(|| Error::Backend(format!("row {index} names sequence {}", row.sequence)))?;
        if row.position >= table.len() {
            return Err(Error::Backend(format!("row {index} is not covered by its page table")));
        }
        if last == Some((row.sequence, row.position.wrapping_sub(1))) {
            spans[count - 1].rows.end += 1;
        } else {
            if count == spans.len() {
                spans.push(Span { rows: 0..0, start: 0, pages: Vec::new() });
            }
            let span = &mut spans[count];
            (span.rows, span.start) = (index..index + 1, row.position);
            span.pages.clear();
            span.pages.extend(table.page_ids(group));
            count += 1;
        }
        last = Some((row.sequence, row.position));
    }
    spans.truncate(count);
    Ok(())
}

/// Which layers share pages: those with the same window, in the order in which the windows first occur.
fn kv_layout(config: &DecoderConfig) -> (KvLayout, Vec<Keep>) {
    let mut keeps: Vec<Keep> = Vec::new();
    let layer = |layer: &LayerConfig| {
        let attention = &layer.attention;
        let keep = attention.window.map_or(Keep::All, Keep::Window);
        let group = keeps.iter().position(|known| *known == keep).unwrap_or_else(|| {
            keeps.push(keep);
            keeps.len() - 1
        });
        let shape = KvShape { num_kv_heads: attention.num_kv_heads, head_dim: attention.head_dim };
        LayerKv { shape, group }
    };
    let layers = config.layers.iter().map(layer).collect();
    (KvLayout { layers, num_groups: keeps.len() }, keeps)
}

/// What a sequence of this model keeps.
pub fn state_groups(config: &DecoderConfig, kv_type: KvType) -> Vec<StateGroup> {
    let (layout, keeps) = kv_layout(config);
    let group = |(group, keep)| StateGroup { keep, page_bytes: layout.page_bytes(group, kv_type) };
    keeps.into_iter().enumerate().map(group).collect()
}

/// Bytes of keys and values that one token adds while every layer sees it.
pub fn kv_bytes_per_token(config: &DecoderConfig, kv_type: KvType) -> usize {
    state_groups(config, kv_type).iter().map(|group| group.page_bytes / PAGE_TOKENS).sum()
}

/// GGUF keeps frequency divisors as tensors: one set for Llama 3, two for LongRoPE.
fn apply_divisors(config: &mut DecoderConfig, file: &WeightFile<'_>) -> Result<(), LoadError> {
    for rope in &mut config.ropes {
        let pairs = rope.dim / 2;
        match &mut rope.scaling {
            RopeScaling::None => {
                if let Some(divisors) = file.divisors("rope_freqs.weight", pairs)? {
                    rope.scaling = RopeScaling::Divisors(divisors);
                }
            }
            RopeScaling::LongRope { short, long, .. } if short.is_empty() => {
                let found = (
                    file.divisors("rope_factors_short.weight", pairs)?,
                    file.divisors("rope_factors_long.weight", pairs)?,
                );
                match found {
                    (Some(from_file_short), Some(from_file_long)) => {
                        (*short, *long) = (from_file_short, from_file_long);
                    }
                    (None, None) => rope.scaling = RopeScaling::None,
                    _ => {
                        let tensor = "rope_factors_short.weight".to_owned();
                        let message = "comes with rope_factors_long.weight or not at all".to_owned();
                        return Err(LoadError::Tensor { tensor, message });
                    }
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Reads one layer after another.
struct LayerLoader<'a, B: Backend> {
    backend: &'a B,
    file: &'a WeightFile<'a>,
    naming: &'a Naming,
    convert: Convert<'a>,
    config: &'a DecoderConfig,
}

impl<B: Backend> LayerLoader<'_, B> {
    fn layer(&self, index: usize, facts: &LayerConfig) -> Result<Layer<B>, LoadError> {
        let (file, hidden, attention) = (self.file, self.config.hidden_size, &facts.attention);
        let q_width = attention.num_heads * attention.head_dim;
        let kv_width = attention.num_kv_heads * attention.head_dim;
        let names = self.naming.norms;
        let norm = |wanted: bool, hf: &str, gguf: &str| -> Result<_, LoadError> {
            if !wanted {
                return Ok(None);
            }
            let weights = file.layer_norm(index, hf, gguf, hidden)?;
            Ok(Some(self.backend.vector(weights)?))
        };
        let [mut q, mut k, v] = file.linears(
            index,
            [["self_attn.q_proj", "attn_q"], ["self_attn.k_proj", "attn_k"], ["self_attn.v_proj", "attn_v"]],
            ["self_attn.qkv_proj", "attn_qkv"],
            [q_width, kv_width, kv_width],
            hidden,
        )?;
        if self.naming.interleaved_qk {
            (q, k) = (q.deinterleave(attention.head_dim), k.deinterleave(attention.head_dim));
        }
        let [gate, up] = file.linears(
            index,
            [["mlp.gate_proj", "ffn_gate"], ["mlp.up_proj", "ffn_up"]],
            ["mlp.gate_up_proj", "ffn_up"],
            [facts.mlp.intermediate_size; 2],
            hidden,
        )?;
        let down =
            file.linear(index, ["mlp.down_proj", "ffn_down"], [hidden, facts.mlp.intermediate_size])?;
        let output = file.linear(index, ["self_attn.o_proj", "attn_output"], [hidden, q_width])?;
        Ok(Layer {
            pre_mixer: norm(facts.pre_norms, names.pre_mixer, "attn_norm.weight")?,
            post_mixer: norm(facts.post_norms, names.post_mixer, "post_attention_norm.weight")?,
            pre_mlp: norm(facts.pre_norms, names.pre_mlp, "ffn_norm.weight")?,
            post_mlp: norm(facts.post_norms, names.post_mlp, "post_ffw_norm.weight")?,
            qk_norms: self.qk_norms(index, facts)?,
            q: self.projection(q)?,
            k: self.projection(k)?,
            v: self.projection(v)?,
            output: self.projection(output)?,
            gate: self.projection(gate)?,
            up: self.projection(up)?,
            down: self.projection(down)?,
        })
    }

    fn qk_norms(&self, index: usize, facts: &LayerConfig) -> Result<Option<[B::Vector; 2]>, LoadError> {
        let attention = &facts.attention;
        let [q_len, k_len] = match attention.qk_norm {
            QkNorm::None => return Ok(None),
            QkNorm::PerHead => [attention.head_dim; 2],
            QkNorm::Whole => [attention.num_heads, attention.num_kv_heads].map(|n| n * attention.head_dim),
        };
        let norm = |hf, gguf, len| self.backend.vector(self.file.layer_norm(index, hf, gguf, len)?);
        Ok(Some([
            norm("self_attn.q_norm.weight", "attn_q_norm.weight", q_len)?,
            norm("self_attn.k_norm.weight", "attn_k_norm.weight", k_len)?,
        ]))
    }

    fn projection(&self, linear: Linear) -> Result<Projection<B>, LoadError> {
        let weight =
            self.backend.weight(&(self.convert)(&linear.name, Matrix::Projection, linear.weight)?)?;
        let bias = linear.bias.map(|bias| self.backend.vector(bias)).transpose()?;
        Ok(Projection { weight, bias })
    }
}
