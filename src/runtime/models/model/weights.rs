//! Finds a decoder's tensors in a file: names, shapes, and the rearrangements that published forms need.
//!
//! Two naming schemes cover all families: Hugging Face's modules and GGUF's blocks. Shapes are checked here
//! against the description, so that the decoder never meets a wrong one.

use half::f16;

use super::config::{Names, Naming, SELF_ATTENTION};
use super::low_rank::{self, Adapter, LowRank};
use crate::tensor::{HostTensor, TensorSource};
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_kernel::{Dtype, quant};

/// A tensor's name, shape and stored type.
pub type TensorFacts = (String, Vec<usize>, Dtype);

/// The tensors of one model, found by role.
pub struct WeightFile<'a> {
    source: &'a dyn TensorSource,
    naming: &'a Naming,
    /// Prefix of Hugging Face's names: `model.`, or longer for the text part of a multimodal model. In GGUF, that of names
    /// outside the layers: empty but for a block that predicts further tokens.
    prefix: String,
    adapters: &'a [Adapter],
}

/// Prefixes of the text decoder in Hugging Face checkpoints, most common first.
const PREFIXES: [&str; 6] =
    ["model.", "model.language_model.", "language_model.model.", "model.text_model.", "backbone.", ""];

/// Prefix of the block that predicts further tokens.
const PREDICTION_PREFIX: &str = "mtp.";

/// Prefix in GGUF of the tensors that join an assistant to its model.
const ASSISTANT_PREFIX: &str = "nextn.";

impl<'a> WeightFile<'a> {
    pub fn new(source: &'a dyn TensorSource, naming: &'a Naming) -> LoadResult<Self> {
        let prefix = match naming.gguf {
            true => String::new(),
            false => PREFIXES
                .iter()
                .find(|prefix| source.describe(&format!("{prefix}{}.weight", naming.embedding)).is_some())
                .ok_or_else(|| missing(&format!("model.{}.weight", naming.embedding)))?
                .to_string(),
        };
        Ok(Self { source, naming, prefix, adapters: &[] })
    }

    /// Reads matrices with what adapters add to them.
    #[must_use]
    pub fn adapted(self, adapters: &'a [Adapter]) -> Self {
        Self { adapters, ..self }
    }

    /// Returns the tensors of the block that predicts further tokens, which Hugging Face's files have beside the decoder's;
    /// `None` if there is no such block behind `num_layers` layers.
    pub fn of_prediction(
        source: &'a dyn TensorSource,
        naming: &'a Naming,
        num_layers: usize,
    ) -> Option<Self> {
        let prefix = match naming.gguf {
            true => format!("blk.{num_layers}.nextn."),
            false => PREDICTION_PREFIX.to_owned(),
        };
        let file = Self { source, naming, prefix, adapters: &[] };
        file.has_global(["fc", "eh_proj"]).then_some(file)
    }

    /// Returns the tensors of an assistant that join it to its model, which stand beside the decoder's.
    pub fn of_assistant(source: &'a dyn TensorSource, naming: &'a Naming) -> Self {
        let prefix = if naming.gguf { ASSISTANT_PREFIX } else { "" };
        Self { source, naming, prefix: prefix.to_owned(), adapters: &[] }
    }

    /// Lists the tensors of a file of [`Self::of_prediction`], as [`Self::decoder_tensors`] does.
    pub fn prediction_tensors(&self, num_layers: usize) -> Vec<TensorFacts> {
        let ours = |name: &str| match self.naming.gguf {
            true => self.layer_of(name) == Some(num_layers),
            false => name.starts_with(&self.prefix),
        };
        let described =
            |name: &str| self.source.describe(name).map(|(shape, dtype)| (name.to_owned(), shape, dtype));
        self.source.names().iter().filter(|name| ours(name)).filter_map(|name| described(name)).collect()
    }

    /// Returns whether the file has tensors that predict further tokens, of whatever form.
    pub fn has_prediction(&self, num_layers: usize) -> bool {
        let is_of_one = |name: &str| {
            self.layer_of(name).is_some_and(|layer| layer >= num_layers)
                || !self.naming.gguf && name.starts_with(PREDICTION_PREFIX)
        };
        self.source.names().iter().any(|name| is_of_one(name))
    }

    pub fn naming(&self) -> &'a Naming {
        self.naming
    }

    pub fn adapters(&self) -> &[Adapter] {
        self.adapters
    }

    /// Returns the prefix of Hugging Face's names, e.g. `model.`.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Lists names, shapes and types of the text decoder's tensors, without other parts of the file (vision, audio,
    /// prediction heads).
    pub fn decoder_tensors(&self, num_layers: usize) -> impl Iterator<Item = TensorFacts> + '_ {
        let names = self.source.names();
        let ours = move |name: &str| {
            let is_decoders = self.naming.gguf || name.starts_with(&self.prefix) || name.contains("lm_head.");
            is_decoders && self.layer_of(name).is_none_or(|layer| layer < num_layers)
        };
        names.into_iter().filter(move |name| ours(name)).filter_map(|name| {
            let (shape, dtype) = self.source.describe(&name)?;
            Some((name.into_owned(), shape, dtype))
        })
    }

    /// Checks that the file has no more layers than its configuration.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] naming a tensor of a surplus layer.
    pub fn check_layers(&self, num_layers: usize) -> LoadResult<()> {
        let most = num_layers + self.naming.prediction_layers;
        match self.source.names().iter().find(|name| self.layer_of(name).is_some_and(|layer| layer >= most)) {
            Some(name) => {
                let message = format!("belongs to a layer after the configuration's {num_layers} layers");
                Err(LoadError::Tensor { tensor: name.to_string(), message })
            }
            None => Ok(()),
        }
    }

    /// Returns the name of a tensor outside the layers, e.g. `embed_tokens.weight` / `token_embd.weight`.
    fn global_name(&self, hf: &str, gguf: &str) -> String {
        format!("{}{}", self.prefix, if self.naming.gguf { gguf } else { hf })
    }

    fn layer_name(&self, layer: usize, [hf, gguf]: [&str; 2]) -> String {
        if self.naming.gguf {
            return format!("blk.{layer}.{gguf}");
        }
        match hf.strip_prefix(SELF_ATTENTION) {
            Some(rest) => format!("{}layers.{layer}.{}{rest}", self.prefix, self.naming.attention),
            None => format!("{}layers.{layer}.{hf}", self.prefix),
        }
    }

    /// Returns the layer that a tensor belongs to.
    fn layer_of(&self, name: &str) -> Option<usize> {
        let within = match self.naming.gguf {
            true => name.strip_prefix("blk."),
            false => name.strip_prefix(&self.prefix)?.strip_prefix("layers."),
        };
        within?.split('.').next()?.parse().ok()
    }

    fn find(&self, name: &str, shape: &[usize]) -> LoadResult<Option<HostTensor>> {
        let Some(mut tensor) = self.source.tensor(name)? else { return Ok(None) };
        // GGUF's writers store a matrix of one row as a vector.
        if self.naming.gguf && shape.first() == Some(&1) && tensor.shape == shape[1..] {
            tensor.shape.insert(0, 1);
        }
        if tensor.shape != shape {
            let message = format!("has shape {:?}, but the configuration needs {shape:?}", tensor.shape);
            return Err(LoadError::Tensor { tensor: name.to_owned(), message });
        }
        Ok(Some(tensor))
    }

    /// Reads the embedding table, `[vocab, hidden]`.
    pub fn embedding(&self, vocab: usize, hidden: usize) -> LoadResult<Linear> {
        let name = self.global_name(&format!("{}.weight", self.naming.embedding), "token_embd.weight");
        let weight = self.find(&name, &[vocab, hidden])?.ok_or_else(|| missing(&name))?;
        Ok(Linear::new(name, weight, None))
    }

    /// Reads the output matrix, `[vocab, hidden]`; `None` if it is the embedding table.
    pub fn head(&self, vocab: usize, hidden: usize) -> LoadResult<Option<Linear>> {
        if self.naming.tied == Some(true) {
            return Ok(None);
        }
        let names: &[&str] = match self.naming.gguf {
            true => &["output.weight"],
            false => &["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight"],
        };
        for name in names {
            if let Some(weight) = self.find(name, &[vocab, hidden])? {
                return Ok(Some(Linear::new(*name, weight, None)));
            }
        }
        if self.naming.tied == Some(false) { Err(missing(names[0])) } else { Ok(None) }
    }

    pub fn final_norm(&self, hidden: usize) -> LoadResult<Vec<f32>> {
        let [hf, gguf] = self.naming.norms.last;
        self.norm(&format!("{}.weight", self.global_name(hf, gguf)), hidden, self.naming.last_norm_offset)
    }

    /// Reads a layer's norm weights in f32, and adds Gemma's offset of 1 if the file stores them without it.
    pub fn layer_norm(&self, layer: usize, names: Names, len: usize) -> LoadResult<Vec<f32>> {
        self.norm(&format!("{}.weight", self.layer_name(layer, names)), len, self.naming.norm_offset)
    }

    fn norm(&self, name: &str, len: usize, offset: f32) -> LoadResult<Vec<f32>> {
        let tensor = match self.find(name, &[len])? {
            // llama.cpp's converter leaves the ending out for Falcon-H1's second norm.
            None if self.naming.gguf => self.find(name.trim_end_matches(".weight"), &[len])?,
            found => found,
        };
        let tensor = tensor.ok_or_else(|| missing(name))?;
        let mut values = to_f32(&tensor);
        if offset != 0.0 {
            values.iter_mut().for_each(|value| *value += offset);
        }
        Ok(values)
    }

    /// Reads a projection and its bias, if it has one.
    pub fn linear(&self, layer: usize, names: [&str; 2], [rows, cols]: [usize; 2]) -> LoadResult<Linear> {
        let name = self.layer_name(layer, names);
        self.optional_linear(&name, [rows, cols])?.ok_or_else(|| missing(&format!("{name}.weight")))
    }

    fn optional_linear(&self, name: &str, [rows, cols]: [usize; 2]) -> LoadResult<Option<Linear>> {
        let Some(weight) = self.find(&format!("{name}.weight"), &[rows, cols])? else { return Ok(None) };
        let bias = self.find(&format!("{name}.bias"), &[rows])?.map(|bias| to_f32(&bias));
        let adapters = low_rank::find(self.adapters, name, &[rows, cols], None)?;
        Ok(Some(Linear { adapters, ..Linear::new(format!("{name}.weight"), weight, bias) }))
    }

    pub fn has_linear(&self, layer: usize, names: [&str; 2]) -> bool {
        self.source.describe(&format!("{}.weight", self.layer_name(layer, names))).is_some()
    }

    /// Reads the values of a layer's small tensor by its full name.
    pub fn values(&self, layer: usize, names: [&str; 2], len: usize) -> LoadResult<Vec<f32>> {
        self.optional_values(layer, names, len)?.ok_or_else(|| missing(&self.layer_name(layer, names)))
    }

    /// Reads values as [`Self::values`] does; `None` if the file lacks them.
    pub fn optional_values(
        &self,
        layer: usize,
        names: [&str; 2],
        len: usize,
    ) -> LoadResult<Option<Vec<f32>>> {
        Ok(self.find(&self.layer_name(layer, names), &[len])?.map(|tensor| to_f32(&tensor)))
    }

    /// Reads values as [`Self::values`] does, from a tensor of any shape: llama.cpp's converter stores the vectors of
    /// state spaces as matrices.
    pub fn flat_values(&self, layer: usize, names: [&str; 2], len: usize) -> LoadResult<Vec<f32>> {
        let name = self.layer_name(layer, names);
        let shape = self.source.describe(&name).map(|(shape, _)| shape);
        let shape = shape.filter(|shape| shape.iter().product::<usize>() == len).unwrap_or(vec![len]);
        Ok(to_f32(&self.find(&name, &shape)?.ok_or_else(|| missing(&name))?))
    }

    /// Reads the values of a layer's small matrix by its full name, row by row.
    pub fn matrix_values(&self, layer: usize, names: Names, shape: [usize; 2]) -> LoadResult<Vec<f32>> {
        let name = self.layer_name(layer, names);
        Ok(to_f32(&self.find(&name, &shape)?.ok_or_else(|| missing(&name))?))
    }

    /// Returns the number of rows of a layer's matrix.
    pub fn num_rows(&self, layer: usize, names: Names) -> LoadResult<usize> {
        let name = format!("{}.weight", self.layer_name(layer, names));
        let (shape, _) = self.source.describe(&name).ok_or_else(|| missing(&name))?;
        shape.first().copied().ok_or_else(|| missing(&name))
    }

    /// Reads a matrix outside the layers.
    pub fn global_linear(&self, names: [&str; 2], shape: [usize; 2]) -> LoadResult<Linear> {
        let missing = || missing(&format!("{}.weight", self.global_name(names[0], names[1])));
        self.optional_global_linear(names, shape)?.ok_or_else(missing)
    }

    /// Reads a matrix as [`Self::global_linear`] does; `None` if the file lacks it.
    pub fn optional_global_linear(
        &self,
        [hf, gguf]: [&str; 2],
        shape: [usize; 2],
    ) -> LoadResult<Option<Linear>> {
        self.optional_linear(&self.global_name(hf, gguf), shape)
    }

    /// Reads matrices of one shape outside the layers: modules with numbers, or one tensor of all.
    pub fn global_matrices(&self, names: Names, count: usize, shape: [usize; 2]) -> LoadResult<Vec<Linear>> {
        let name = self.global_name(names[0], names[1]);
        if self.naming.gguf {
            return self.stack(&format!("{name}.weight"), [count, shape[0], shape[1]]);
        }
        let module = |index| {
            let name = format!("{name}.{index}");
            self.optional_linear(&name, shape)?.ok_or_else(|| missing(&format!("{name}.weight")))
        };
        (0..count).map(module).collect()
    }

    /// Returns the parts of a table with rows of `cols` values that are read one by one, with their names: Hugging Face's files have
    /// one tensor in a layer or several with numbers, GGUF has one outside the layers.
    pub fn row_tables(
        &self,
        layer: usize,
        [hf, gguf]: Names,
        cols: usize,
    ) -> LoadResult<Vec<(String, HostTensor)>> {
        let stem = if self.naming.gguf { gguf.to_owned() } else { self.layer_name(layer, [hf, ""]) };
        let part = |name: String| -> LoadResult<Option<_>> {
            let shape = self.source.describe(&name).map(|(shape, _)| shape);
            let Some(&rows) = shape.as_ref().and_then(|shape| shape.first()) else { return Ok(None) };
            Ok(self.find(&name, &[rows, cols])?.map(|tensor| (name, tensor)))
        };
        if let Some(whole) = part(format!("{stem}.weight"))? {
            return Ok(vec![whole]);
        }
        let parts = (0..).map_while(|index| part(format!("{stem}.shard_{index}.weight")).transpose());
        let parts = parts.collect::<LoadResult<Vec<_>>>()?;
        if parts.is_empty() { Err(missing(&format!("{stem}.weight"))) } else { Ok(parts) }
    }

    /// Reads a norm outside the layers.
    pub fn global_norm(&self, [hf, gguf]: [&str; 2], len: usize) -> LoadResult<Vec<f32>> {
        self.norm(&format!("{}.weight", self.global_name(hf, gguf)), len, self.naming.norm_offset)
    }

    /// Returns name, shape and type of a tensor outside the layers, given its names without `.weight`.
    pub fn describe_global(&self, [hf, gguf]: [&str; 2]) -> Option<TensorFacts> {
        let name = format!("{}.weight", self.global_name(hf, gguf));
        self.source.describe(&name).map(|(shape, dtype)| (name, shape, dtype))
    }

    /// Returns whether the file has a tensor outside the layers, given its names without `.weight`.
    pub fn has_global(&self, [hf, gguf]: [&str; 2]) -> bool {
        self.describe_global([hf, gguf]).is_some()
    }

    /// Reads projections stored separately, or as consecutive rows of one matrix (Phi-3).
    pub fn linears<const N: usize>(
        &self,
        layer: usize,
        separate: [[&str; 2]; N],
        fused: [&str; 2],
        rows: [usize; N],
        cols: usize,
    ) -> LoadResult<[Linear; N]> {
        // GGUF gives Phi-3's fused gate and up the name of up alone: the presence of a separate gate decides.
        let [first, together] = [separate[0], fused].map(|names| self.layer_name(layer, names));
        let has = |name: &str| self.source.describe(&format!("{name}.weight")).is_some();
        if !has(&first) && has(&together) {
            return self.stacked(layer, fused, rows, cols);
        }
        let mut parts = Vec::with_capacity(N);
        for (names, rows) in separate.into_iter().zip(rows) {
            parts.push(self.linear(layer, names, [rows, cols])?);
        }
        Ok(parts.try_into().unwrap_or_else(|_| unreachable!("N parts were pushed")))
    }

    /// Reads projections stored as consecutive rows of one matrix.
    pub fn stacked<const N: usize>(
        &self,
        layer: usize,
        names: [&str; 2],
        rows: [usize; N],
        cols: usize,
    ) -> LoadResult<[Linear; N]> {
        let whole = self.linear(layer, names, [rows.iter().sum(), cols])?;
        let whole = match self.naming.qkv_parts {
            parts if parts > 1 && names == self.naming.parts.attention_fused => whole.of_parts(parts, &rows),
            _ => whole,
        };
        let mut start = 0;
        Ok(rows.map(|count| {
            start += count;
            whole.slice_rows(start - count, start)
        }))
    }

    /// Reads the kernel of a convolution over each channel, `[taps, channels]`, the oldest tap first. Files store it
    /// by channel.
    pub fn conv(&self, layer: usize, names: [&str; 2], [channels, taps]: [usize; 2]) -> LoadResult<Vec<f32>> {
        let name = format!("{}.weight", self.layer_name(layer, names));
        // llama.cpp's converter writes Kimi's kernels with two dimensions more.
        let kimi = [1, channels, 1, taps];
        let is_kimi = self.source.describe(&name).is_some_and(|(shape, _)| shape == kimi);
        let shape: &[usize] = match self.naming.gguf {
            true if is_kimi => &kimi,
            true => &[channels, taps],
            false => &[channels, 1, taps],
        };
        let by_channel = to_f32(&self.find(&name, shape)?.ok_or_else(|| missing(&name))?);
        Ok((0..taps * channels).map(|at| by_channel[at % channels * taps + at / channels]).collect())
    }

    /// Reads the matrices of each of `count` experts, which are separate modules or stacked in one tensor; gate and up may
    /// be stacked too.
    pub fn experts(
        &self,
        layer: usize,
        names: Names,
        count: usize,
        [inner, hidden]: [usize; 2],
        is_gated: bool,
    ) -> LoadResult<Vec<ExpertLinears>> {
        let name = self.layer_name(layer, names);
        let mut experts = self.stored_experts(&name, count, [inner, hidden], is_gated)?;
        if !self.naming.gguf && !self.adapters.is_empty() {
            self.adapt_experts(&name, &mut experts)?;
        }
        Ok(experts)
    }

    /// Adds what adapters add to experts that are stored in another form than that for which the adapters were made: a module for
    /// each expert, or one tensor of all.
    fn adapt_experts(&self, name: &str, experts: &mut [ExpertLinears]) -> LoadResult<()> {
        let count = experts.len();
        let [both_name, down_name] = self.naming.parts.expert_stacks;
        for (index, ExpertLinears { gate, up, down }) in experts.iter_mut().enumerate() {
            let stacked = |part: &str, [rows, cols]: [usize; 2]| {
                low_rank::find(self.adapters, &format!("{name}.{part}"), &[count, rows, cols], Some(index))
            };
            let [(inner, hidden), down_shape] = [&*up, &*down].map(|linear| linear.weight.rows_cols());
            if let Some(gate) = gate.as_mut().filter(|gate| gate.adapters.is_empty()) {
                let both = stacked(both_name, [2 * inner, hidden])?;
                let rows = |start: usize| {
                    let mut part = both.clone();
                    part.iter_mut()
                        .for_each(|of| of.matrices.up = of.matrices.up.slice_rows(start, start + inner));
                    part
                };
                (gate.adapters, up.adapters) = (rows(0), rows(inner));
            }
            if down.adapters.is_empty() {
                down.adapters = stacked(down_name, down_shape.into())?;
            }
            let parts = [gate.as_mut(), Some(up), Some(down)];
            for (part, linear) in self.naming.parts.expert_mlp.iter().zip(parts) {
                if let Some(linear) = linear.filter(|linear| linear.adapters.is_empty()) {
                    let shape = &linear.weight.shape;
                    let module = format!("{name}.{index}.{part}");
                    linear.adapters = low_rank::find(self.adapters, &module, shape, None)?;
                }
            }
        }
        Ok(())
    }

    fn stored_experts(
        &self,
        name: &str,
        count: usize,
        [inner, hidden]: [usize; 2],
        is_gated: bool,
    ) -> LoadResult<Vec<ExpertLinears>> {
        if self.naming.alternating_experts {
            return self.alternating_experts(name, count, [inner, hidden]);
        }
        let has = |name: &str| self.source.describe(name).is_some();
        let [both, gate, up, down] = if self.naming.gguf {
            ["gate_up", "gate", "up", "down"].map(|part| format!("{name}_{part}_exps.weight"))
        } else {
            let [both, down] = self.naming.parts.expert_stacks;
            let stacked = |part| Some(format!("{name}.{part}")).filter(|name| has(name));
            let parts = [both, "gate_proj", "up_proj", down];
            parts.map(|part| stacked(part).unwrap_or_else(|| format!("{name}.{part}.weight")))
        };
        if is_gated && has(&both) {
            return self.experts_with_gates_beside([&both, &down], count, [inner, hidden]);
        }
        if !has(&up) {
            return self.expert_modules(name, count, [inner, hidden], is_gated);
        }
        let gates = match is_gated {
            true => self.stack(&gate, [count, inner, hidden])?.into_iter().map(Some).collect(),
            false => vec![None; count],
        };
        let ups = self.stack(&up, [count, inner, hidden])?;
        let downs = self.stack(&down, [count, hidden, inner])?;
        let parts = gates.into_iter().zip(ups).zip(downs);
        Ok(parts.map(|((gate, up), down)| ExpertLinears { gate, up, down }).collect())
    }

    /// Reads experts as [`Self::experts`] does, from one tensor of all gates and ups and one of all downs.
    fn experts_with_gates_beside(
        &self,
        [both, down]: [&str; 2],
        count: usize,
        [inner, hidden]: [usize; 2],
    ) -> LoadResult<Vec<ExpertLinears>> {
        let both = self.oriented_stack(both, [count, 2 * inner, hidden])?;
        let down = self.oriented_stack(down, [count, hidden, inner])?;
        let expert = |(both, down): (Linear, Linear)| {
            let [gate, up] = [both.slice_rows(0, inner), both.slice_rows(inner, 2 * inner)];
            ExpertLinears { gate: Some(gate), up, down }
        };
        Ok(both.into_iter().zip(down).map(expert).collect())
    }

    /// Splits a tensor as [`Self::stack`] does; in Hugging Face's form the matrices may be transposed (Qwen 3 VL).
    fn oriented_stack(&self, name: &str, [count, rows, cols]: [usize; 3]) -> LoadResult<Vec<Linear>> {
        let shape = self.source.describe(name).map(|(shape, _)| shape);
        if !self.naming.gguf && rows != cols && shape.is_some_and(|shape| shape == [count, cols, rows]) {
            let stored = self.stack(name, [count, cols, rows])?;
            return Ok(stored.into_iter().map(|linear| linear.transposed()).collect());
        }
        self.stack(name, [count, rows, cols])
    }

    /// Reads experts as [`Self::experts`] does, from tensors of each. GGUF had them before 2024-04 (Mixtral).
    fn expert_modules(
        &self,
        name: &str,
        count: usize,
        [inner, hidden]: [usize; 2],
        is_gated: bool,
    ) -> LoadResult<Vec<ExpertLinears>> {
        let module = |expert: usize, part: &str, shape: [usize; 2]| {
            let name = match self.naming.gguf {
                true => format!("{name}_{part}.{expert}"),
                false => format!("{name}.{expert}.{part}"),
            };
            self.optional_linear(&name, shape)?.ok_or_else(|| missing(&format!("{name}.weight")))
        };
        let [gate, up, down] = match self.naming.gguf {
            true => ["gate", "up", "down"],
            false => self.naming.parts.expert_mlp,
        };
        let expert = |expert| {
            let gate = is_gated.then(|| module(expert, gate, [inner, hidden])).transpose()?;
            let [up, down] = [module(expert, up, [inner, hidden])?, module(expert, down, [hidden, inner])?];
            Ok(ExpertLinears { gate, up, down })
        };
        (0..count).map(expert).collect()
    }

    /// Reads experts as [`Self::experts`] does, in the form of [`Naming::alternating_experts`].
    fn alternating_experts(
        &self,
        name: &str,
        count: usize,
        [inner, hidden]: [usize; 2],
    ) -> LoadResult<Vec<ExpertLinears>> {
        let stack = |part: &str, rows: usize, cols: usize| {
            let name = format!("{name}.{part}");
            let is_transposed = self.source.describe(&name).is_some_and(|(_, dtype)| !dtype.is_quantized());
            let stored = if is_transposed { [count, cols, rows] } else { [count, rows, cols] };
            let matrices = self.stack(&name, stored)?.into_iter();
            let turned = matrices.map(|linear| if is_transposed { linear.transposed() } else { linear });
            self.with_biases(turned.collect(), &format!("{name}_bias"), rows)
        };
        let both = stack("gate_up_proj", 2 * inner, hidden)?;
        let down = stack("down_proj", hidden, inner)?;
        let pair = |(both, down): (Linear, Linear)| {
            let [gate, up] = [0, 1].map(|first| both.gather_rows((first..2 * inner).step_by(2)));
            ExpertLinears { gate: Some(gate), up, down }
        };
        Ok(both.into_iter().zip(down).map(pair).collect())
    }

    /// Reads a matrix `[rows, cols]` for each of `heads` heads from one tensor.
    pub fn stacked_heads(&self, layer: usize, names: Names, shape: [usize; 3]) -> LoadResult<Vec<Linear>> {
        self.stack(&format!("{}.weight", self.layer_name(layer, names)), shape)
    }

    /// Splits a tensor `[count, rows, cols]` into matrices, with the biases of the same name if there are some.
    fn stack(&self, name: &str, [count, rows, cols]: [usize; 3]) -> LoadResult<Vec<Linear>> {
        let all = self.find(name, &[count, rows, cols])?.ok_or_else(|| missing(name))?;
        let stem = name.strip_suffix(".weight");
        let matrix = |index| {
            let adapters =
                low_rank::find(self.adapters, stem.unwrap_or(name), &[count, rows, cols], Some(index))?;
            Ok(Linear { adapters, ..Linear::new(name, all.slice_outer(index), None) })
        };
        let matrices = (0..count).map(matrix).collect::<Result<_, _>>()?;
        match stem {
            Some(stem) => self.with_biases(matrices, &format!("{stem}.bias"), rows),
            None => Ok(matrices),
        }
    }

    /// Adds the rows of `name`, `[matrices, rows]`, to the matrices as biases, if the file has it.
    fn with_biases(&self, mut matrices: Vec<Linear>, name: &str, rows: usize) -> LoadResult<Vec<Linear>> {
        if let Some(all) = self.find(name, &[matrices.len(), rows])? {
            for (linear, bias) in matrices.iter_mut().zip(to_f32(&all).chunks_exact(rows)) {
                linear.bias = Some(bias.to_vec());
            }
        }
        Ok(matrices)
    }

    /// Reads rotary divisors; `None` if the GGUF lacks them. Where fewer pairs are rotated than a head has, the file may have some
    /// for all (Step 3.5).
    pub fn divisors(&self, name: &str, pairs: usize) -> LoadResult<Option<Vec<f32>>> {
        let stored = self.source.describe(name).and_then(|(shape, _)| shape.first().copied());
        let stored = stored.filter(|stored| *stored == 2 * pairs).unwrap_or(pairs);
        Ok(self.find(name, &[stored])?.map(|tensor| to_f32(&tensor)[..pairs].to_vec()))
    }
}

/// The matrices of one expert; `gate` is `None` for an expert of two matrices.
pub struct ExpertLinears {
    pub gate: Option<Linear>,
    pub up: Linear,
    pub down: Linear,
}

/// A matrix `[out, in]` with an optional bias.
#[derive(Debug, Clone)]
pub struct Linear {
    /// Name of the tensor it was read from.
    pub name: String,
    pub weight: HostTensor,
    pub bias: Option<Vec<f32>>,
    /// Its changes by adapters.
    pub adapters: Vec<LowRank>,
}

impl Linear {
    /// Returns a matrix without adapters.
    pub fn new(name: impl Into<String>, weight: HostTensor, bias: Option<Vec<f32>>) -> Linear {
        Linear { name: name.into(), weight, bias, adapters: Vec::new() }
    }

    pub fn slice_rows(&self, start: usize, end: usize) -> Linear {
        let bias = self.bias.as_ref().map(|bias| bias[start..end].to_vec());
        let adapters = self.adapters_with(|up| up.slice_rows(start, end));
        Linear { adapters, ..Linear::new(&*self.name, self.weight.slice_rows(start, end), bias) }
    }

    /// Returns the adapters with other rows: each output is a row of an adapter's second matrix.
    fn adapters_with(&self, rows: impl Fn(&HostTensor) -> HostTensor) -> Vec<LowRank> {
        let mut adapters = self.adapters.clone();
        adapters.iter_mut().for_each(|adapter| adapter.matrices.up = rows(&adapter.matrices.up));
        adapters
    }

    /// Joins the rows of each projection, of which each of `parts` parts of the matrix holds a share; `rows` counts all of them.
    fn of_parts(&self, parts: usize, rows: &[usize]) -> Linear {
        let part_rows = rows.iter().sum::<usize>() / parts;
        let (mut order, mut first) = (Vec::new(), 0);
        for share in rows.iter().map(|rows| rows / parts) {
            let of_part = |part: usize| (first..first + share).map(move |row| part * part_rows + row);
            order.extend((0..parts).flat_map(of_part));
            first += share;
        }
        self.gather_rows(order.into_iter())
    }

    /// Reorders the rows of rotary pairs that are stored side by side to half-split order.
    ///
    /// llama.cpp's converter stores q and k of the llama family so that rotary pairs are (2i, 2i+1), and some families are
    /// published so; undoing it lets every family use one rotation, and makes GGUF and safetensors of one model the same
    /// matrix. Only the first `rotated` values of a head are pairs.
    pub fn deinterleave(self, head_dim: usize, rotated: usize) -> Linear {
        let (rows, _) = self.weight.rows_cols();
        self.gather_rows((0..rows).map(|row| deinterleaved(row, head_dim, rotated)))
    }

    /// Returns some of the rows, in the given order.
    pub fn gather_rows(&self, rows: impl Iterator<Item = usize> + Clone) -> Linear {
        let weight = gather(&self.weight, rows.clone());
        let adapters = self.adapters_with(|up| gather(up, rows.clone()));
        let bias = self.bias.as_ref().map(|bias| rows.map(|row| bias[row]).collect());
        Linear { adapters, ..Linear::new(&*self.name, weight, bias) }
    }

    /// Transposes `[in, out]` to `[out, in]`. Block-quantised values become F16: their blocks lie along rows.
    pub fn transposed(&self) -> Linear {
        if self.weight.dtype.is_quantized() {
            return self.widened().transposed();
        }
        let (rows, cols) = self.weight.rows_cols();
        let size = self.weight.dtype.block_bytes();
        let mut bytes = Vec::with_capacity(self.weight.bytes.len());
        for column in 0..cols {
            for row in 0..rows {
                bytes.extend_from_slice(&self.weight.bytes[(row * cols + column) * size..][..size]);
            }
        }
        let weight = HostTensor { dtype: self.weight.dtype, shape: vec![cols, rows], bytes: bytes.into() };
        Linear { weight, ..self.clone() }
    }
}

/// Returns where a value of half-split order is stored, if rotary pairs are stored side by side; see [`Linear::deinterleave`].
pub fn deinterleaved(row: usize, head_dim: usize, rotated: usize) -> usize {
    let (head, within) = (row / head_dim, row % head_dim);
    let (part, pair) = (within / (rotated / 2), within % (rotated / 2));
    head * head_dim + if within < rotated { 2 * pair + part } else { within }
}

impl Linear {
    /// Converts the values to F16.
    fn widened(&self) -> Linear {
        let (rows, cols) = self.weight.rows_cols();
        let halves = to_f32(&self.weight).into_iter().map(f16::from_f32);
        let bytes: Vec<u8> = halves.flat_map(f16::to_le_bytes).collect();
        let weight = HostTensor { dtype: Dtype::F16, shape: vec![rows, cols], bytes: bytes.into() };
        Linear { weight, ..self.clone() }
    }
}

/// Returns some of a matrix's rows, in the given order.
fn gather(matrix: &HostTensor, rows: impl Iterator<Item = usize>) -> HostTensor {
    let (_, cols) = matrix.rows_cols();
    let row_bytes = matrix.dtype.row_bytes(cols).expect("the loader checked that rows are whole blocks");
    let mut bytes = Vec::with_capacity(rows.size_hint().0 * row_bytes);
    for row in rows {
        bytes.extend_from_slice(&matrix.bytes[row * row_bytes..(row + 1) * row_bytes]);
    }
    HostTensor { dtype: matrix.dtype, shape: vec![bytes.len() / row_bytes, cols], bytes: bytes.into() }
}

/// Converts a small tensor's values to f32.
pub fn to_f32(tensor: &HostTensor) -> Vec<f32> {
    let (rows, cols) = tensor.rows_cols();
    let mut values = vec![0.0; rows * cols];
    quant::dequantize_row(tensor.dtype, &tensor.bytes, &mut values);
    values
}

/// What is wrong with a tensor that the file lacks.
pub const MISSING: &str = "not in the file";

/// Returns the error for a tensor that the file lacks.
pub fn missing(name: &str) -> LoadError {
    LoadError::Tensor { tensor: name.to_owned(), message: MISSING.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deinterleave_splits_the_pairs_of_the_rotated_part() {
        // Two heads of four rows, one value per row: the converter stores rows 0 2 1 3 of each head.
        let stored = [0.0f32, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0];
        let bytes: Vec<u8> = stored.iter().flat_map(|value| value.to_le_bytes()).collect();
        let weight = HostTensor { dtype: Dtype::F32, shape: vec![8, 1], bytes: bytes.into() };
        let linear = Linear::new("q", weight, Some(stored.to_vec()));
        let expected: Vec<f32> = (0..8).map(|row| row as f32).collect();
        let whole = linear.clone().deinterleave(4, 4);
        assert_eq!(to_f32(&whole.weight), expected);
        assert_eq!(whole.bias, Some(expected));
        // One head of eight rows, of which four are rotated.
        assert_eq!(to_f32(&linear.deinterleave(8, 4).weight), [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
    }
}
