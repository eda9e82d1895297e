//! Vision towers as data: every difference between the families is a field here.
//!
//! A tower embeds the patches of a tile, computes its layers over all of them, and a projector makes the decoder's rows of
//! the result. All rows of a tile see each other, but for windows.

use crate::backend::Activation;
use llmctl_base::error::LoadError;

/// A whole tower with its projector.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TowerConfig {
    /// Width of the rows.
    pub hidden_size: usize,
    /// None for a projector alone (Gemma 4 unified).
    pub num_layers: usize,
    pub num_heads: usize,
    /// Divides `num_heads`.
    pub num_kv_heads: usize,
    /// Even.
    pub head_dim: usize,
    /// Width inside the feed-forward part.
    pub intermediate_size: usize,
    pub activation: Activation,
    /// True if the feed-forward part is `down(activation(gate(x)) * up(x))` instead of `down(activation(up(x)))`.
    pub is_gated: bool,
    /// Norms before the parts of a layer, and behind them if `post_norms`.
    pub norm: NormKind,
    pub norm_eps: f32,
    /// True if a norm stands behind each part of a layer, too (Gemma 4).
    pub post_norms: bool,
    /// True if the results of a layer's parts are multiplied by learned vectors (InternVL).
    pub layer_scales: bool,
    pub qk_norm: TowerQkNorm,
    /// True if each head's values are normalised, without a weight (Gemma 4).
    pub value_norm: bool,
    /// Factor of scores: mostly 1 / sqrt(head_dim).
    pub score_scale: f32,
    pub rope: Option<TowerRope>,
    pub windows: Option<Windows>,
    /// True if inputs and results of a layer's matrices are limited to numbers in the file (Gemma 4 E).
    pub clamps: bool,
    pub patches: PatchEmbedding,
    pub positions: Positions,
    /// True if a learned row, which sees all patches and is seen by all, stands beside them and is dropped behind the last
    /// layer. Its position is the first of the table.
    pub class_row: bool,
    /// Patches of a side of the block that becomes one row of the decoder. Divides the sides of every tile.
    pub merge: usize,
    /// From the last layer's rows to the decoder's, which are `output_size` wide. With a norm behind the last layer first.
    pub projector: Vec<ProjectorStep>,
    /// Projectors of what the decoder adds behind its first layers, in their order (Qwen3-VL).
    pub deepstack: Vec<Deepstack>,
    /// Width of the decoder's rows.
    pub output_size: usize,
    pub names: TowerNames,
}

/// A projector of the rows behind an earlier layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Deepstack {
    /// Its input is the result of this layer, counted from 0.
    pub layer: usize,
    pub projector: Vec<ProjectorStep>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NormKind {
    /// `(x - mean) / deviation * weight + bias`.
    #[default]
    Layer,
    /// `x / root mean square * weight`.
    Rms,
    /// As `Rms`, with weights that are stored without their 1.
    RmsAroundOne,
    /// As `Rms`, without a weight.
    RmsAlone,
}

/// A norm outside the layers.
#[derive(Debug, Clone, PartialEq)]
pub struct NormConfig {
    pub kind: NormKind,
    pub eps: f32,
    /// Full name without `.weight` and `.bias`; not read for [`NormKind::RmsAlone`].
    pub name: String,
}

/// The norms of queries and keys before their rotation: RMS norms with a weight.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TowerQkNorm {
    #[default]
    None,
    /// Of each head, with one weight for all.
    PerHead,
    /// Of all heads together.
    Whole,
}

/// Rotary positions by rows and columns of patches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TowerRope {
    pub theta: f32,
    pub frequencies: RopeFrequencies,
    pub pairs: RopePairs,
    /// True if the column's angles stand before the row's (Gemma 4).
    pub columns_first: bool,
}

/// The frequencies of the two axes, with `d` for head_dim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeFrequencies {
    /// Both have `theta^(-4i/d)` for `i < d/4` (Qwen, GLM, Gemma 4).
    Same,
    /// Of `theta^(-2i/d)` for `i < d/2`, rows have those with even `i`, and columns the others (Pixtral).
    Alternating,
}

/// The two values of a head that an angle rotates, as the file has them. Angles of the first axis come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// `i` and `i + d/2` of the head.
    Halves,
    /// `2i` and `2i + 1` of the head.
    Neighbours,
    /// In each half of the head, which is one axis, `i` and `i + d/4` (Gemma 4).
    Quarters,
}

/// Attention within square windows of a tile, which are cut from its upper left corner; those at the edges are smaller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Windows {
    /// Blocks of [`TowerConfig::merge`] on a side.
    pub side: usize,
    /// The layers that see the whole tile.
    pub full_layers: Vec<usize>,
}

/// From a patch's pixels to its row: one matrix `[hidden_size, 3 * size * size]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PatchEmbedding {
    /// Pixels of a side.
    pub size: usize,
    /// Pictures that a patch of a film has, one behind the other; for a still they are equal, so their matrices are added.
    /// In a file, they lie within the tensor (Hugging Face) or in tensors `.weight`, `.weight.1` (GGUF).
    pub frames: usize,
    /// True if the values of a pixel lie side by side in the matrix's rows: `[size, size, 3]` instead of `[3, size, size]`.
    pub channels_last: bool,
    /// Factor and addend of the values before all else.
    pub scale: [f32; 2],
    /// Of the patch's values, in the matrix's order.
    pub pixel_norm: Option<NormConfig>,
    /// Behind the matrix.
    pub norm: Option<NormConfig>,
    /// Behind the matrix and the positions.
    pub position_norm: Option<NormConfig>,
}

/// Learned positions, added to the rows of the patches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Positions {
    #[default]
    None,
    /// A table of `side * side` patches, row by row, brought to the size of the tile.
    Square { side: usize, resampling: Resampling },
    /// One table for columns and one for rows, of `len` rows each; the two are added. `[2, len, hidden_size]`, or `[len, 2,
    /// hidden_size]` if they are interleaved.
    Axes { len: usize, interleaved: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resampling {
    /// Every tile has the table's size.
    None,
    /// Linear, with corners on corners (Qwen3-VL).
    Corners,
    /// Linear with half-pixel centres; a smaller tile averages over more of the table (LFM2-VL).
    Antialias,
    /// Cubic with a = -0.75 and half-pixel centres (GLM-4V).
    Cubic,
}

/// One step of a projector. Names are full, without `.weight` and `.bias`; biases are those that the file has.
#[derive(Debug, Clone, PartialEq)]
pub enum ProjectorStep {
    /// A norm of each row.
    Norm(NormConfig),
    /// Joins the rows of a block, row by row, to one; `channels_first` has the patches of a channel side by side (an unfolded
    /// picture, and a convolution's matrix).
    Join { channels_first: bool },
    /// Averages the rows of a block and multiplies by `factor`.
    Average { factor: f32 },
    /// `(x - bias) * scale`, by the full names of the vectors.
    Standardise { bias: String, scale: String },
    /// A matrix `[out, in]`, `[in, out]` if it is transposed. Further dimensions of the file's count as one.
    Linear { name: String, out: usize, transposed: bool },
    /// An activation of each value.
    Activation(Activation),
    /// `down(activation(gate(x)) * up(x))`.
    Gated { names: [String; 3], inner: usize, out: usize, activation: Activation },
}

/// Names of the tower's tensors, behind `prefix`; without `.weight` and `.bias`, which single vectors may lack. Names of a layer
/// stand behind `layers` and its number.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TowerNames {
    /// E.g. `model.visual.`.
    pub prefix: String,
    pub patches: &'static str,
    pub positions: &'static str,
    pub class_row: &'static str,
    pub layers: &'static str,
    /// Projections of queries, keys and values, where they are apart.
    pub qkv: [&'static str; 3],
    /// The three as consecutive rows of one matrix.
    pub fused_qkv: &'static str,
    pub attention_output: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
    /// What matrices' names have behind these (Gemma 4: `.linear`); names of clamps, `.input_min` and so on, do not.
    pub matrix: &'static str,
    /// Before attention and feed-forward part.
    pub norms: [&'static str; 2],
    /// Behind them.
    pub post_norms: [&'static str; 2],
    /// Of queries and keys.
    pub qk_norms: [&'static str; 2],
    pub layer_scales: [&'static str; 2],
}

/// Limits for numbers in a file, generous compared to the largest published towers.
const MAX_LAYERS: usize = 1 << 10;
const MAX_WIDTH: usize = 1 << 20;
const MAX_SIDE: usize = 1 << 12;

impl TowerConfig {
    /// Checks that sizes are in range and fit together.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] naming the setting at fault.
    pub fn check(&self) -> Result<(), LoadError> {
        let wrong =
            |key: &str, message: String| LoadError::Tensor { tensor: format!("vision {key}"), message };
        let within = |key, value: usize, least: usize, most: usize| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(wrong(key, format!("{value} is not within {least} to {most}"))),
        };
        within("num_layers", self.num_layers, 0, MAX_LAYERS)?;
        within("merge", self.merge, 1, MAX_SIDE)?;
        within("patch_size", self.patches.size, 1, MAX_SIDE)?;
        within("frames", self.patches.frames, 1, 16)?;
        for (key, size) in [("hidden_size", self.hidden_size), ("output_size", self.output_size)] {
            within(key, size, 1, MAX_WIDTH)?;
        }
        match self.positions {
            Positions::None => (),
            Positions::Square { side, .. } => within("position_embedding", side, 1, MAX_SIDE)?,
            Positions::Axes { len, .. } => within("position_embedding", len, 1, MAX_WIDTH)?,
        }
        if let Some(Windows { side, .. }) = &self.windows {
            within("window", *side, 1, MAX_SIDE)?;
        }
        if self.num_layers > 0 {
            within("num_heads", self.num_heads, 1, MAX_WIDTH)?;
            within("num_kv_heads", self.num_kv_heads, 1, self.num_heads)?;
            within("head_dim", self.head_dim, 2, MAX_SIDE)?;
            within("intermediate_size", self.intermediate_size, 1, MAX_WIDTH)?;
            let unit = if self.rope.is_some() { 4 } else { 2 };
            if !self.head_dim.is_multiple_of(unit) {
                return Err(wrong("head_dim", format!("{} is not a multiple of {unit}", self.head_dim)));
            }
            if !self.num_heads.is_multiple_of(self.num_kv_heads) {
                return Err(wrong("num_kv_heads", format!("does not divide {} heads", self.num_heads)));
            }
            within("heads times head_dim", self.num_heads * self.head_dim, 1, MAX_WIDTH)?;
        }
        if self.class_row && self.windows.is_some() {
            return Err(wrong("window", "does not go with a class row".to_owned()));
        }
        let layers = self.deepstack.iter().map(|level| level.layer);
        layers
            .into_iter()
            .try_for_each(|layer| within("deepstack layer", layer, 0, self.num_layers.saturating_sub(1)))?;
        within("layers with deepstack", self.deepstack.len(), 0, self.num_layers)
    }
}
