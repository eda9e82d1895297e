//! Embeddings of n-grams (Qwen3.8-Flash-Next): a hash of a token and of those before it chooses rows of a large table, which a layer
//! adds to its residual streams before its mixer. Sources: transformers `Qwen4ExpTextNGramEmbedding` and `Qwen4ExpTextPLELayer`;
//! llama.cpp's `qwen4exp` and its converter for GGUF's names.
//!
//! ```text
//! e       = the rows of all heads
//! gate    = r(norm(key . e)[stream] . norm(x)[stream] / sqrt(hidden))    r(g) = sign(g) * sqrt(max(|g|, 1e-6))
//! gated   = sigmoid(gate) * value . e                                    of each stream
//! x      += gated + silu(convolution(norm(gated)))
//! ```
//!
//! The table is read row by row where the file is mapped: it is never in memory as a whole, nor on a device. The tokens before a row
//! are the state of a convolution that moves them, so that they are kept, copied and rewound as other states are.

use super::StoreIndex;
use super::buffers::{LayerBuffers, LayerContext, Projection};
use super::load::Loader;
use super::stream::{HyperBuffers, Stream};
use crate::backend::{Backend, ConvSpec, Recurrence};
use crate::model::config::{Names, NgramConfig};
use crate::tensor::HostTensor;
use llmctl_base::error::{LoadError, LoadResult, Result};
use llmctl_kernel::dequantize_row;

/// Hugging Face's name of the table within its layer, and GGUF's.
const TABLE: Names = ["ple.ple_embedding.ngram_embedding", "per_layer_token_embd"];
/// Norms of keys, of streams, and before the convolution.
const NORMS: [Names; 3] = [
    ["ple.norm_key", "ple_norm_key"],
    ["ple.norm_query", "ple_norm_query"],
    ["ple.norm_conv", "ple_norm_conv"],
];

/// Returns whether a tensor is a table of n-grams, which takes no memory.
pub fn is_table(name: &str) -> bool {
    let [hugging_face, gguf] = TABLE;
    name.contains(hugging_face) || name.starts_with(gguf)
}

/// The embeddings of one layer.
pub struct Ngrams<B: Backend> {
    config: NgramConfig,
    num_streams: usize,
    eps: f32,
    table: RowTable,
    /// State of the tokens before a row's own.
    tokens: StoreIndex,
    /// Kernel that gives each of those tokens a channel.
    moves: B::Vector,
    conv: StoreIndex,
    kernel: B::Vector,
    key: Projection<B>,
    value: Projection<B>,
    norms: [B::Vector; 3],
}

impl<B: Backend> Ngrams<B> {
    pub const NUM_STORES: usize = 2;

    /// Loads the embeddings of a layer whose last stores are those of tokens and of the convolution.
    ///
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(
        loader: &Loader<'_, B>,
        config: &NgramConfig,
        num_streams: usize,
        [tokens, conv]: [StoreIndex; 2],
    ) -> LoadResult<Self> {
        let (backend, file, layer, hidden) = (loader.backend, loader.file, loader.layer, loader.hidden);
        let (wide, width, before) = (num_streams * hidden, config.width(), config.num_before());
        let taps = file.conv(layer, ["ple.conv1d", "ple_conv1d"], [wide, config.kernel])?;
        // Channel c is the token c + 1 before a row's own; the kernel's last tap is the row's own.
        let moves = (0..=before).flat_map(|tap| (0..before).map(move |c| (tap + c + 1 == before).into()));
        let [key, query, conv_norm] = NORMS.map(|names| loader.norm(names, wide));
        Ok(Self {
            num_streams,
            eps: loader.eps,
            table: RowTable::new(file.row_tables(layer, TABLE, config.row_dim)?, config)?,
            tokens,
            moves: backend.vector(moves.map(|one: u8| one.into()).collect())?,
            conv,
            kernel: backend.vector(spread_taps(&taps, wide, config.multipliers.len()))?,
            key: loader.linear(["ple.key_proj", "ple_key"], [wide, width])?,
            value: loader.linear(["ple.value_proj", "ple_value"], [hidden, width])?,
            norms: [key?, query?, conv_norm?],
            config: config.clone(),
        })
    }

    /// Adds the embeddings of a step's tokens to the streams.
    ///
    /// # Errors
    /// Errors of the backend.
    pub fn apply(&self, context: &mut LayerContext<'_, B>, stream: &mut Stream<B::Buffer>) -> Result<()> {
        let Stream { residual, hyper, .. } = stream;
        self.embed(context, hyper)?;
        self.gate(context, residual, hyper)?;
        let LayerContext { backend, step, kv, work, .. } = context;
        let LayerBuffers { mixed, up, v, scores, .. } = &mut **work;
        let wide = &mut hyper.wide;
        backend.join_heads(&vec![&*v; self.num_streams], 1, wide)?;
        backend.scale_heads(wide, scores)?;
        backend.rms_norm_groups(wide, &self.norms[2], self.num_streams, self.eps, mixed)?;
        let spec = ConvSpec { store: self.conv.index, kernel: &self.kernel, bias: None, silu: true };
        backend.recur(kv, &Recurrence::Convolution(spec, mixed), &step.spans[self.conv.group], up)?;
        backend.add_scaled(wide, up, 1.0)?;
        backend.add_scaled(residual, wide, 1.0)
    }

    /// Reads the tokens' rows, and computes their keys into `up` and their values into `v`.
    fn embed(
        &self,
        LayerContext { backend, step, kv, work, .. }: &mut LayerContext<'_, B>,
        HyperBuffers { values, others, rows, .. }: &mut HyperBuffers<B::Buffer>,
    ) -> Result<()> {
        let LayerBuffers { q, k, v, up, .. } = &mut **work;
        let before = self.config.num_before();
        values.clear();
        // 0 is left for the time before a sequence.
        values.extend(step.tokens.iter().flat_map(|token| std::iter::repeat_n((token + 1) as f32, before)));
        backend.write(values, before, q)?;
        let spec = ConvSpec { store: self.tokens.index, kernel: &self.moves, bias: None, silu: false };
        backend.recur(kv, &Recurrence::Convolution(spec, q), &step.spans[self.tokens.group], k)?;
        backend.read(k, others)?;
        rows.clear();
        for (token, before) in step.tokens.iter().zip(others.chunks_exact(before)) {
            self.config.find_rows(*token, before, rows);
        }
        self.table.read(rows, values);
        backend.write(values, self.config.width(), q)?;
        backend.matmul_each(q, &mut [self.key.onto(up), self.value.onto(v)])
    }

    /// Computes the gates of all streams into `scores`, from keys in `up`.
    fn gate(
        &self,
        LayerContext { backend, work, .. }: &mut LayerContext<'_, B>,
        residual: &B::Buffer,
        HyperBuffers { normed, .. }: &mut HyperBuffers<B::Buffer>,
    ) -> Result<()> {
        let LayerBuffers { mixed, up, scores, .. } = &mut **work;
        let [of_key, of_query, _] = &self.norms;
        backend.rms_norm_groups(up, of_key, self.num_streams, self.eps, mixed)?;
        backend.rms_norm_groups(residual, of_query, self.num_streams, self.eps, normed)?;
        backend.gate_groups([mixed, normed], self.num_streams, scores)
    }
}

/// Moves the taps of a kernel, `[taps, channels]`, `distance` tokens apart, with zeros between.
fn spread_taps(taps: &[f32], channels: usize, distance: usize) -> Vec<f32> {
    let (first, others) = taps.split_at(channels);
    let mut spread = first.to_vec();
    for tap in others.chunks_exact(channels) {
        spread.resize(spread.len() + (distance - 1) * channels, 0.0);
        spread.extend_from_slice(tap);
    }
    spread
}

impl NgramConfig {
    /// Appends the rows of a token's heads. `before` are the tokens before it plus 1, the last first; 0 for none.
    fn find_rows(&self, token: u32, before: &[f32], rows: &mut Vec<u64>) {
        let per_length = self.heads.len() / before.len();
        let (mut hash, mut is_cut) = (u64::from(token).wrapping_mul(self.multipliers[0]), false);
        let heads = self.heads.chunks_exact(per_length);
        for ((before, multiplier), heads) in before.iter().zip(&self.multipliers[1..]).zip(heads) {
            let token = (*before as u32).checked_sub(1).filter(|token| *token != self.end && !is_cut);
            is_cut = token.is_none();
            hash ^= u64::from(token.unwrap_or(self.end)).wrapping_mul(*multiplier);
            rows.extend(heads.iter().map(|head| head.start + hash % (head.end - head.start)));
        }
    }
}

/// A table in one or several parts, whose rows are read where the file has them.
struct RowTable {
    /// Each with the number of rows before it.
    parts: Vec<(u64, HostTensor)>,
    /// Bytes and values of a row.
    row_bytes: usize,
    row_dim: usize,
}

impl RowTable {
    fn new(tensors: Vec<(String, HostTensor)>, config: &NgramConfig) -> LoadResult<Self> {
        let needed = config.heads.iter().map(|head| head.end).max().unwrap_or(0);
        let (mut num_rows, mut parts) = (0, Vec::with_capacity(tensors.len()));
        let (mut name, row_dim) = (String::new(), config.row_dim);
        let error = |name: &str, message: String| LoadError::Tensor { tensor: name.to_owned(), message };
        for (of_part, tensor) in tensors {
            name = of_part;
            if parts.first().is_some_and(|(_, first): &(u64, HostTensor)| first.dtype != tensor.dtype) {
                return Err(error(&name, "has another type than the table's first part".to_owned()));
            }
            let rows = tensor.rows_cols().0 as u64;
            parts.push((num_rows, tensor));
            num_rows += rows;
        }
        let row_bytes = parts.first().and_then(|(_, part)| part.dtype.row_bytes(row_dim));
        match row_bytes {
            Some(row_bytes) if num_rows >= needed => Ok(Self { parts, row_bytes, row_dim }),
            _ => Err(error(&name, format!("ends a table of {num_rows} rows, of which {needed} are needed"))),
        }
    }

    /// Replaces `out` by the values of rows, each of which the table has.
    fn read(&self, rows: &[u64], out: &mut Vec<f32>) {
        out.resize(rows.len() * self.row_dim, 0.0);
        for (row, out) in rows.iter().zip(out.chunks_exact_mut(self.row_dim)) {
            let (before, part) = &self.parts[self.parts.partition_point(|(before, _)| before <= row) - 1];
            let first = (row - before) as usize * self.row_bytes;
            dequantize_row(part.dtype, &part.bytes[first..][..self.row_bytes], out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::SharedBytes;
    use llmctl_kernel::Dtype;

    fn config() -> NgramConfig {
        NgramConfig {
            multipliers: vec![16304757896083889, 11435418644576253, 7275717464594479, 10634470178853139],
            heads: vec![0..211, 211..434, 434..661],
            row_dim: 2,
            end: 1,
            kernel: 3,
        }
    }

    /// The rows are those of transformers' `Qwen4ExpTextNGramEmbedding`.
    #[test]
    fn a_hash_takes_in_the_tokens_behind_the_last_end() {
        let tokens = [5, 7, 1, 9, 300, 383, 1, 1, 2];
        let mut rows = Vec::new();
        for (at, token) in tokens.into_iter().enumerate() {
            let before: Vec<f32> =
                (1..=3).map(|by| at.checked_sub(by).map_or(0, |at| tokens[at] + 1) as f32).collect();
            config().find_rows(token, &before, &mut rows);
        }
        let expected = [
            [28, 254, 502],
            [63, 379, 458],
            [116, 328, 580],
            [76, 414, 608],
            [42, 375, 486],
            [159, 225, 613],
            [194, 387, 627],
            [46, 342, 613],
            [17, 247, 532],
        ];
        assert_eq!(rows, expected.as_flattened());
    }

    fn part(rows: std::ops::Range<usize>) -> (String, HostTensor) {
        let values = rows.clone().flat_map(|row| [row as f32, -(row as f32)]);
        let bytes: Vec<u8> = values.flat_map(|value| value.to_le_bytes()).collect();
        let tensor = HostTensor::new(Dtype::F32, vec![rows.len(), 2], SharedBytes::from(bytes));
        (format!("from {}", rows.start), tensor.expect("a table"))
    }

    #[test]
    fn rows_are_read_from_the_part_that_has_them() {
        let table = RowTable::new(vec![part(0..300), part(300..301), part(301..700)], &config());
        let mut out = vec![9.0];
        table.expect("enough rows").read(&[301, 0, 300, 660, 299], &mut out);
        assert_eq!(out, [301.0, -301.0, 0.0, 0.0, 300.0, -300.0, 660.0, -660.0, 299.0, -299.0]);
        let error =
            RowTable::new(vec![part(0..300), part(300..660)], &config()).err().expect("a row is missing");
        assert!(error.to_string().contains("from 300"), "{error}");
    }

    #[test]
    fn taps_lie_as_far_apart_as_a_hash_has_tokens() {
        assert_eq!(spread_taps(&[1.0, 2.0, 3.0, 4.0], 2, 3), [1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 3.0, 4.0]);
        assert_eq!(config().conv_reach(), 8);
    }
}
