//! The tensors of a Hugging Face folder under their names in GGUF, rearranged as llama.cpp's converter does.
//!
//! Names come from the family's [`Naming`], which the loader uses in the other direction. Every tensor of the
//! decoder gets a name or is refused: none is dropped silently. Source of the rearrangements: llama.cpp's
//! `conversion/`.

use std::collections::BTreeMap;

use super::folder_keys::ExportFamily;
use super::{ExportTensor, TensorOrigin};
use crate::model::arch::Description;
use crate::model::weights::{TensorFacts, WeightFile};
use crate::model::{MixerConfig, Names, Naming, RopeScaling};
use crate::tensor::TensorSource;
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_kernel::Dtype;

/// Buffers that some checkpoints store although they follow from the configuration.
const COMPUTED: [&str; 2] = ["rotary_emb.inv_freq", "masked_bias"];

/// Lists the tensors to write, in the order of the file.
///
/// # Errors
/// [`LoadError::Tensor`] for a tensor that has no name in GGUF.
pub(super) fn tensors(
    source: &dyn TensorSource,
    description: &Description,
    family: &ExportFamily,
) -> LoadResult<Vec<ExportTensor>> {
    let file = WeightFile::new(source, &description.naming)?;
    let num_layers = description.config.layers.len();
    let mut list = TensorList { family, description, experts: BTreeMap::new(), found: computed(description) };
    for tensor in file.decoder_tensors(num_layers) {
        if !COMPUTED.iter().any(|part| tensor.0.ends_with(part)) {
            list.add(file.prefix(), tensor)?;
        }
    }
    list.finish()
}

/// Returns the tensors that llama.cpp computes from the configuration: divisors of rotary frequencies.
fn computed(description: &Description) -> Vec<ExportTensor> {
    let rope = &description.config.ropes[0];
    let values = |name: &str, values: Vec<f32>| ExportTensor {
        name: name.to_owned(),
        shape: vec![values.len()],
        stored: Dtype::F32,
        origin: TensorOrigin::Values(values),
    };
    match &rope.scaling {
        RopeScaling::Llama3 { .. } => {
            let frequency = |pair: usize| 1.0 / rope.theta.powf(2.0 * pair as f32 / rope.dim as f32);
            let divisors = (0..rope.dim / 2).map(|pair| llama3_divisor(frequency(pair), &rope.scaling));
            vec![values("rope_freqs.weight", divisors.collect())]
        }
        RopeScaling::LongRope { short, long, .. } => vec![
            values("rope_factors_long.weight", long.clone()),
            values("rope_factors_short.weight", short.clone()),
        ],
        _ => Vec::new(),
    }
}

/// Returns the divisor of a frequency in Llama 3's scaling.
fn llama3_divisor(frequency: f32, scaling: &RopeScaling) -> f32 {
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } = scaling else {
        return 1.0;
    };
    let context = *original_context as f32;
    let wavelength = 2.0 * std::f32::consts::PI / frequency;
    if wavelength < context / high_freq_factor {
        1.0
    } else if wavelength > context / low_freq_factor {
        *factor
    } else {
        let smooth = (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
        1.0 / ((1.0 - smooth) / factor + smooth)
    }
}

struct TensorList<'a> {
    family: &'a ExportFamily,
    description: &'a Description,
    /// Modules of experts by the stacked tensor's name, each with its number.
    experts: BTreeMap<String, ExpertStack>,
    found: Vec<ExportTensor>,
}

struct ExpertStack {
    members: BTreeMap<usize, String>,
    shape: Vec<usize>,
    stored: Dtype,
}

impl TensorList<'_> {
    fn add(&mut self, prefix: &str, (name, shape, stored): TensorFacts) -> LoadResult<()> {
        if name.contains("lm_head.") {
            // A stored copy of a tied matrix is the embedding table again.
            if self.description.naming.tied != Some(true) {
                self.push("output.weight".to_owned(), shape, stored, TensorOrigin::Whole(name));
            }
            return Ok(());
        }
        let within = name.strip_prefix(prefix).unwrap_or(&name).to_owned();
        let in_layer = within.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
        let layer = in_layer.and_then(|(number, rest)| Some((number.parse::<usize>().ok()?, rest)));
        match layer {
            Some((layer, rest)) => self.add_in_layer(layer, rest, (name.clone(), shape, stored)),
            None => self.add_global(&within, (name.clone(), shape, stored)),
        }
        .ok_or_else(|| {
            let message = format!("has no name in GGUF files of {:?}", self.family.gguf_name);
            LoadError::Tensor { tensor: name.clone(), message }
        })
    }

    fn push(&mut self, name: String, shape: Vec<usize>, stored: Dtype, origin: TensorOrigin) {
        self.found.push(ExportTensor { name, shape, stored, origin });
    }

    fn add_global(&mut self, within: &str, (name, shape, stored): TensorFacts) -> Option<()> {
        let (stem, part) = within.rsplit_once('.')?;
        if stem == "embed_tokens" {
            self.push("token_embd.weight".to_owned(), shape, stored, TensorOrigin::Whole(name));
            return Some(());
        }
        let [hf, gguf] = self.description.naming.norms.last;
        (stem == hf).then(|| {
            let origin = self.norm(name);
            self.push(format!("{gguf}.{part}"), shape, stored, origin);
        })
    }

    fn norm(&self, name: String) -> TensorOrigin {
        match self.description.naming.norm_offset {
            0.0 => TensorOrigin::Whole(name),
            offset => TensorOrigin::Offset { name, offset },
        }
    }

    fn add_in_layer(&mut self, layer: usize, rest: &str, tensor: TensorFacts) -> Option<()> {
        let experts = self.description.naming.parts.experts[0];
        if let Some(part) = rest.strip_prefix(experts).and_then(|part| part.strip_prefix('.')) {
            return self.add_expert(layer, part, tensor);
        }
        let (name, shape, stored) = tensor;
        let (stem, part) = rest.rsplit_once('.').filter(|(_, part)| ["weight", "bias"].contains(part))?;
        let gguf = layer_names(&self.description.naming).find(|[hf, _]| *hf == stem)?[1];
        let origin = match self.head_dim(layer, stem) {
            Some(head_dim) => TensorOrigin::Interleaved { name, head_dim },
            None if stem.ends_with("norm") => self.norm(name),
            None => TensorOrigin::Whole(name),
        };
        self.push(format!("blk.{layer}.{gguf}.{part}"), shape, stored, origin);
        Some(())
    }

    /// Returns the head size if this is a projection whose rotary pairs GGUF stores side by side.
    fn head_dim(&self, layer: usize, stem: &str) -> Option<usize> {
        let is_rotated = self.family.interleaves && ["self_attn.q_proj", "self_attn.k_proj"].contains(&stem);
        match &self.description.config.layers.get(layer)?.mixer {
            MixerConfig::Attention(attention) if is_rotated => Some(attention.head_dim),
            _ => None,
        }
    }

    /// Adds a tensor of experts: a module of one, or all of them stacked, gate and up perhaps in one tensor.
    fn add_expert(&mut self, layer: usize, part: &str, (name, shape, stored): TensorFacts) -> Option<()> {
        let stacked = |kind: &str| format!("blk.{layer}.ffn_{kind}_exps.weight");
        if part == "gate_up_proj" {
            let [count, rows, cols] = shape.try_into().ok()?;
            for (kind, start) in [("gate", 0), ("up", rows / 2)] {
                let origin = TensorOrigin::Rows { name: name.clone(), start, end: start + rows / 2 };
                self.push(stacked(kind), vec![count, rows / 2, cols], stored, origin);
            }
            return Some(());
        }
        if part == "down_proj" {
            self.push(stacked("down"), shape, stored, TensorOrigin::Whole(name));
            return Some(());
        }
        let (number, module) = part.split_once('.')?;
        let kind =
            module.strip_suffix("_proj.weight").filter(|kind| ["gate", "up", "down"].contains(kind))?;
        let stack = self.experts.entry(stacked(kind)).or_insert_with(|| ExpertStack {
            members: BTreeMap::new(),
            shape: shape.clone(),
            stored,
        });
        stack.members.insert(number.parse().ok()?, name);
        (stack.shape == shape).then_some(())
    }

    fn finish(mut self) -> LoadResult<Vec<ExportTensor>> {
        for (name, ExpertStack { members, shape, stored }) in std::mem::take(&mut self.experts) {
            if let Some(missing) = (0..members.len()).find(|number| !members.contains_key(number)) {
                let message = format!("expert {missing} is missing");
                return Err(LoadError::Tensor { tensor: name, message });
            }
            let shape = [vec![members.len()], shape].concat();
            self.push(name, shape, stored, TensorOrigin::Stack(members.into_values().collect()));
        }
        Ok(self.found)
    }
}

/// Iterates over the names of a layer's parts, without `.weight` and `.bias`.
fn layer_names(naming: &Naming) -> impl Iterator<Item = Names> {
    let (norms, parts) = (&naming.norms, &naming.parts);
    let fixed = [
        ["self_attn.q_proj", "attn_q"],
        ["self_attn.k_proj", "attn_k"],
        ["self_attn.v_proj", "attn_v"],
        ["self_attn.qkv_proj", "attn_qkv"],
        ["mlp.gate_up_proj", "ffn_up"],
        norms.pre_mixer,
        norms.post_mixer,
        norms.pre_mlp,
        norms.post_mlp,
        parts.attention_output,
        parts.router,
    ];
    let names: Vec<Names> = fixed.into_iter().chain(norms.qk).chain(parts.mlp).collect();
    names.into_iter().filter(|[hf, _]| !hf.is_empty())
}
