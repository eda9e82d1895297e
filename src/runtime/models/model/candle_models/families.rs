//! The families, with one row and one function each: names, sizes, candle-transformers' assumptions, and the
//! constructor.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{
    falcon, gemma, helium, mamba, mamba2, olmo, phi, qwen2_moe, rwkv_v5, rwkv_v6, stable_lm, starcoder2,
};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::config::{CandleConfig, Usual, read};
use super::sequence::{Begin, Prefill, Stepper};
use super::weights::WeightAdaptation;
use super::{CandleFamily, CandlePlan, Sizes};
use crate::model::arch::{ConfigReader, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH};
use llmctl_base::error::LoadResult;
use llmctl_base::notice::Notice;

/// Constructor of candle-transformers' model from a config and tensors.
pub type OpenModel = fn(Map<String, Value>, VarBuilder<'static>) -> candle_core::Result<Begin>;

/// Every family that runs through candle-transformers.
pub const FAMILIES: &[CandleFamily] = &[
    family("falcon", &["falcon", "RefinedWebModel"], &["falcon"], falcon),
    family("gemma", &["gemma"], &["gemma"], gemma),
    family("helium", &["helium"], &[], helium),
    family("mamba", &["mamba"], &["mamba"], mamba),
    family("mamba2", &["mamba2"], &["mamba2"], mamba2),
    family("olmo", &["olmo"], &["olmo"], olmo),
    family("phi", &["phi"], &["phi2"], phi),
    family("qwen2-moe", &["qwen2_moe"], &["qwen2moe"], qwen2_moe),
    family("rwkv5", &["rwkv5"], &[], rwkv5),
    family("rwkv6", &["rwkv6"], &["rwkv6"], rwkv6),
    family("stablelm", &["stablelm", "stablelm_epoch"], &["stablelm"], stablelm),
    family("starcoder2", &["starcoder2"], &["starcoder2"], starcoder2),
];

const fn family(
    name: &'static str,
    model_types: &'static [&'static str],
    gguf_names: &'static [&'static str],
    plan: fn(&ConfigReader) -> LoadResult<CandlePlan>,
) -> CandleFamily {
    CandleFamily { name, model_types, gguf_names, plan }
}

/// Context of recurrent models, which have no limit; the engine's bookkeeping needs one.
const RECURRENT_CONTEXT: usize = 1 << 15;

/// Name of the embedding table in most families.
const EMBEDDINGS: &str = "model.embed_tokens.weight";

/// Step of a model, given the tokens `[1, n]` and the number of earlier ones.
type StepFn<T> = fn(&mut T, &Tensor, usize) -> candle_core::Result<Tensor>;

/// A model with the state of one sequence.
struct RunningModel<T> {
    inside: T,
    step: StepFn<T>,
    fork: Option<fn(&T) -> T>,
}

impl<T: Send + 'static> Stepper for RunningModel<T> {
    fn forward(&mut self, tokens: &Tensor, position: usize) -> candle_core::Result<Tensor> {
        (self.step)(&mut self.inside, tokens, position)
    }

    fn fork(&self) -> Option<Box<dyn Stepper>> {
        let (step, fork) = (self.step, self.fork);
        fork.map(|copy| Box::new(RunningModel { inside: copy(&self.inside), step, fork }) as Box<dyn Stepper>)
    }
}

/// Wraps a model that holds its state and can be cloned; clones share the tensors.
fn cloned<M: Clone + Send + Sync + 'static>(model: M, step: StepFn<M>) -> Begin {
    Box::new(move || Ok(Box::new(RunningModel { inside: model.clone(), step, fork: Some(M::clone) })))
}

/// Wraps a model that is constructed per sequence from the same tensors, or whose state is separate from it.
fn made<T: Send + 'static>(
    make: impl Fn() -> candle_core::Result<T> + Send + Sync + 'static,
    step: StepFn<T>,
) -> Begin {
    Box::new(move || Ok(Box::new(RunningModel { inside: make()?, step, fork: None })))
}

/// Makes a plan for a model that takes chunks and whose config candle-transformers reads as a `C`; families change
/// the fields that differ.
fn plan<C: DeserializeOwned>(
    name: &'static str,
    mut config: CandleConfig<'_>,
    sizes: Sizes,
    context_length: usize,
    open: OpenModel,
) -> LoadResult<CandlePlan> {
    config.put("max_position_embeddings", context_length);
    let refused =
        |error: candle_core::Error| config.reader.unsupported(format!("candle-transformers: {error}"));
    read::<C>(config.map.clone()).map_err(refused)?;
    Ok(CandlePlan {
        architecture: name,
        sizes,
        context_length,
        prefill: Prefill::Chunks,
        state_bytes: None,
        notices: Vec::new(),
        config: config.map,
        weights: WeightAdaptation { tied: config.tied, ..WeightAdaptation::default() },
        open,
    })
}

fn falcon(reader: &ConfigReader) -> LoadResult<CandlePlan> {
    // Positions in candle-transformers' rotary tables, which ignore the config.
    const POSITIONS: usize = 5000;
    let (mut config, sizes) = falcon_config(reader)?;
    let is_tied = reader.flag("tie_word_embeddings")?.unwrap_or(true);
    config.tied = is_tied.then_some("transformer.word_embeddings.weight");
    let context = config.context(2048)?.min(POSITIONS);
    let open: OpenModel = |config, weights| {
        let mut model = falcon::Falcon::load(weights.clone(), read(config)?)?;
        // The first step makes rotary tables and keeps them: run it here, for all sequences.
        model.forward(&Tensor::zeros((1, 1), DType::U32, weights.device())?)?;
        model.clear_kv_cache();
        Ok(cloned(model, |model, tokens, _| model.forward(tokens)))
    };
    Ok(CandlePlan {
        prefill: Prefill::Beginning,
        notices: vec![Notice::ApproximateGelu],
        ..plan::<falcon::Config>("falcon", config, sizes, context, open)?
    })
}

/// Reads the config of the older of two architectures, with one key-value head: candle-transformers supports no
/// other.
fn falcon_config(reader: &ConfigReader) -> LoadResult<(CandleConfig<'_>, Sizes)> {
    let mut config = CandleConfig::new(reader);
    for (key, value) in [("multi_query", true), ("alibi", false), ("new_decoder_architecture", false)] {
        config.only(key, value)?;
        config.put(key, value);
    }
    let named = |new: &'static str, old: &'static str| if reader.is_absent(new) { old } else { new };
    let vocab_size = reader.size("vocab_size", MAX_VOCAB)?;
    let hidden_size = config.size("hidden_size", None)?;
    let num_layers = reader.size(named("num_hidden_layers", "n_layer"), MAX_LAYERS)?;
    let num_heads = reader.size(named("num_attention_heads", "n_head"), MAX_WIDTH)?;
    let head_dim = hidden_size / num_heads;
    if !hidden_size.is_multiple_of(num_heads) {
        return Err(reader.error("num_attention_heads", "does not divide the hidden size into heads"));
    }
    if config.rope(10_000.0, head_dim)? != 10_000.0 {
        return Err(
            reader.unsupported("candle-transformers supports only a rotary base of 10000 for this family")
        );
    }
    let inner = 4 * hidden_size;
    config.only("activation", "gelu")?;
    config.only("ffn_hidden_size", inner)?;
    config.positive(&["layer_norm_epsilon"], 1e-5)?;
    config.flag("bias", false)?;
    config.flag("parallel_attn", true)?;
    config.put("vocab_size", vocab_size);
    config.put("num_hidden_layers", num_layers);
    config.put("num_attention_heads", num_heads);
    config.put("use_cache", true);
    // Required but unused.
    for key in ["initializer_range", "bos_token_id", "eos_token_id", "hidden_dropout", "attention_dropout"] {
        config.put(key, 0);
    }
    let sizes =
        Sizes { vocab_size, hidden_size, num_layers, num_heads, num_kv_heads: 1, head_dim, widest: inner };
    Ok((config, sizes))
}

fn gemma(reader: &ConfigReader) -> LoadResult<CandlePlan> {
    let mut config = CandleConfig::new(reader);
    let sizes = config.transformer(Usual { head_dim: Some(256), ..Usual::default() })?;
    config.rope(10_000.0, sizes.head_dim)?;
    config.positive(&["rms_norm_eps"], 1e-6)?;
    config.flag("attention_bias", false)?;
    // Files say `gelu` in hidden_act and mean this one: transformers only reads hidden_activation.
    config.text("hidden_activation", "gelu_pytorch_tanh")?;
    config.only("tie_word_embeddings", true)?;
    config.tied = Some(EMBEDDINGS);
    let context = config.context(8192)?;
    let open: OpenModel = |config, weights| {
        let model = gemma::Model::new(false, &read(config)?, weights)?;
        Ok(cloned(model, gemma::Model::forward))
    };
    plan::<gemma::Config>("gemma", config, sizes, context, open)
}

fn helium(reader: &ConfigReader) -> LoadResult<CandlePlan> {
    let mut config = CandleConfig::new(reader);
    let sizes = config.transformer(Usual { head_dim: Some(128), ..Usual::default() })?;
    config.rope(100_000.0, sizes.head_dim)?;
    config.positive(&["rms_norm_eps"], 1e-8)?;
    config.text("hidden_act", "silu")?;
    config.only("attention_bias", false)?;
    config.put("attention_bias", false);
    config.flag("mlp_bias", false)?;
    config.put("bos_token_id", 0); // required but unused
    config.put("eos_token_id", 0);
    config.ties(false, EMBEDDINGS)?;
    let context = config.context(4096)?;
    let open: OpenModel = |config, weights| {
        let model = helium::Model::new(&read(config)?, weights)?;
        Ok(cloned(model, helium::Model::forward))
    };
    plan::<helium::Config>("helium", config, sizes, context, open)
}

/// Makes a plan for a model whose state has a constant size.
fn recurrent<C: DeserializeOwned>(
    name: &'static str,
    config: CandleConfig<'_>,
    sizes: Sizes,
    state_values: usize,
    weights: WeightAdaptation,
    open: OpenModel,
) -> LoadResult<CandlePlan> {
    let state_bytes = Some(sizes.num_layers.saturating_mul(state_values).saturating_mul(size_of::<f32>()));
    let prefill = Prefill::Single;
    let plan = plan::<C>(name, config, sizes, RECURRENT_CONTEXT, open)?;
    Ok(CandlePlan { prefill, state_bytes, weights, ..plan })
}

fn mamba(reader: &ConfigReader) -> LoadResult<CandlePlan> {
    let mut config = CandleConfig::new(reader);
    let body = config.body()?;
    let inner = 2 * body.hidden_size;
    check_mamba(&config, body.hidden_size)?;
    config.put("d_model", body.hidden_size);
    config.put("n_layer", body.num_layers);
    config.put("pad_vocab_size_multiple", 1); // the file counts the rows of the table
    let open: OpenModel = |config, weights| {
        let config: mamba::Config = read(config)?;
        let device = weights.device().clone();
        let model = Arc::new(mamba::Model::new(&config, weights)?);
        let make = move || Ok((model.clone(), mamba::State::new(1, &config, DType::F32, &device)?));
        Ok(made(make, |(model, state), tokens, _| model.forward(&tokens.squeeze(0)?, state)))
    };
    let weights = WeightAdaptation {
        renamed: &[("backbone.embeddings.", "embedding."), ("backbone.", "")],
        tied: Some("embedding.weight"),
        scaled: None,
    };
    recurrent::<mamba::Config>(
        "mamba",
        config,
        Sizes { widest: 2 * inner, ..body },
        inner * (16 + 4),
        weights,
        open,
    )
}

/// Refuses settings that candle-transformers' Mamba fixes otherwise.
fn check_mamba(config: &CandleConfig<'_>, hidden_size: usize) -> LoadResult<()> {
    let rank = hidden_size.div_ceil(16);
    if config.reader.value("time_step_rank") != Some(json!("auto")) {
        config.only("time_step_rank", rank)?;
    }
    for (key, value) in [
        ("state_size", json!(16)),
        ("conv_kernel", json!(4)),
        ("expand", json!(2)),
        ("intermediate_size", json!(2 * hidden_size)),
        ("layer_norm_epsilon", json!(1e-5)),
        ("use_bias", json!(false)),
        ("use_conv_bias", json!(true)),
        ("hidden_act", json!("silu")),
        ("tie_word_embeddings", json!(true)),
    ] {
        config.only(key, value)?;
    }
    Ok(())
}

fn mamba2(reader: &ConfigReader) -> LoadResult<CandlePlan> {
    let mut config = CandleConfig::new(reader);
    let body = config.body()?;
    let expand = config.size("expand", Some(2))?;
    let state = config.size("state_size", Some(128))?;
    let head_dim = config.size("head_dim", Some(64))?;
    let groups = config.size("n_groups", Some(8))?;
    let inner = expand.saturating_mul(body.hidden_size);
    let num_heads = inner / head_dim;
    if !inner.is_multiple_of(head_dim) || !num_heads.is_multiple_of(groups) {
        return Err(reader.error("head_dim", "heads and groups do not divide the inner width evenly"));
    }
    for (key, value) in [
        ("num_heads", json!(num_heads)),
        ("conv_kernel", json!(4)),
        ("layer_norm_epsilon", json!(1e-5)),
        ("rms_norm", json!(true)),
        ("use_bias", json!(false)),
        ("use_conv_bias", json!(true)),
        ("hidden_act", json!("silu")),
    ] {
        config.only(key, value)?;
    }
    // transformers' default is a separate output matrix, which candle-transformers does not read: it would be
    // reported as unused.
    config.ties(false, "embeddings.weight")?;
    config.put("pad_vocab_size_multiple", 1); // the file counts the rows of the table
    let open: OpenModel = |config, weights| {
        let config: mamba2::Config = read(config)?;
        let device = weights.device().clone();
        let model = Arc::new(mamba2::Model::new(&config, weights)?);
        let make = move || Ok((model.clone(), mamba2::State::new(1, &config, DType::F32, &device)?));
        Ok(made(make, |(model, state), tokens, _| model.forward(&tokens.squeeze(0)?, state)))
    };
    let weights = WeightAdaptation { renamed: &[("backbone.", "")], tied: config.tied, scaled: None };
    let conv = inner.saturating_add(2 * groups.saturating_mul(state));
    let values = inner.saturating_mul(state).saturating_add(4 * conv);
    let sizes = Sizes { widest: inner.saturating_add(conv), ..body };
    recurrent::<mamba2::Config>("mamba2", config, sizes, values, weights, open)
}

/// Reads the number of experts, and the number used per token.
fn experts(
    config: &mut CandleConfig<'_>,
    key: &'static str,
    usual: usize,
    usual_used: usize,
) -> LoadResult<()> {
    let count = config.size(key, Some(usual))?;
    let used = config.size("num_experts_per_tok", Some(usual_used))?;
    match used <= count {
        true => Ok(()),
        false => Err(config.reader.error("num_experts_per_tok", format!("{used} of {count} experts"))),
    }
}

fn olmo(reader: &ConfigReader) -> LoadResult<CandlePlan> {
    let mut config = CandleConfig::new(reader);
    let sizes = config.transformer(Usual::default())?;
    config.rope(10_000.0, sizes.head_dim)?;
    config.text("hidden_act", "silu")?;
    config.flag("attention_bias", false)?;
    if reader.value("clip_qkv").is_some() {
        config.positive(&["clip_qkv"], 1.0)?;
    }
    config.ties(false, EMBEDDINGS)?;
    let context = config.context(2048)?;
    let open: OpenModel = |config, weights| {
        let model = olmo::Model::new(&read(config)?, weights)?;
        Ok(cloned(model, olmo::Model::forward))
    };
    plan::<olmo::Config>("olmo", config, sizes, context, open)
}

fn phi(reader: &ConfigReader) -> LoadResult<CandlePlan> {
    let mut config = CandleConfig::new(reader);
    let sizes = config.transformer(Usual::default())?;
    let rotated = config.rotated(&["partial_rotary_factor"], 0.5, sizes.head_dim)?;
    config.rope(10_000.0, rotated)?;
    config.positive(&["layer_norm_eps"], 1e-5)?;
    config.text("hidden_act", "gelu_new")?;
    config.only("qk_layernorm", false)?;
    config.put("qk_layernorm", false);
    config.ties(false, EMBEDDINGS)?;
    let context = config.context(2048)?;
    let open: OpenModel = |config, weights| {
        let model = phi::Model::new(&read(config)?, weights)?;
        Ok(cloned(model, |model, tokens, _| model.forward(tokens)))
    };
    Ok(CandlePlan {
        prefill: Prefill::Beginning,
        ..plan::<phi::Config>("phi", config, sizes, context, open)?
    })
}

fn qwen2_moe(reader: &ConfigReader) -> LoadResult<CandlePlan> {
    let mut config = CandleConfig::new(reader);
    let sizes = config.transformer(Usual { num_kv_heads: Some(16), ..Usual::default() })?;
    config.rope(10_000.0, sizes.head_dim)?;
    config.positive(&["rms_norm_eps"], 1e-6)?;
    config.text("hidden_act", "silu")?;
    experts(&mut config, "num_experts", 60, 4)?;
    config.size("moe_intermediate_size", None)?;
    config.size("shared_expert_intermediate_size", None)?;
    config.size("decoder_sparse_step", Some(1))?;
    config.flag("norm_topk_prob", false)?;
    config.only("mlp_only_layers", json!([]))?;
    config.only("qkv_bias", true)?;
    config.ties(false, EMBEDDINGS)?;
    let most = config.context(32_768)?;
    let is_used = reader.flag("use_sliding_window")?.unwrap_or(false);
    let (context, notice) = config.within_window(most, is_used)?;
    config.put("use_sliding_window", false);
    config.put("sliding_window", context);
    config.put("max_window_layers", 0);
    let open: OpenModel = |config, weights| {
        let model = qwen2_moe::Model::new(&read(config)?, weights)?;
        Ok(cloned(model, qwen2_moe::Model::forward))
    };
    Ok(CandlePlan {
        notices: notice.into_iter().collect(),
        ..plan::<qwen2_moe::Config>("qwen2-moe", config, sizes, context, open)?
    })
}

fn rwkv5(reader: &ConfigReader) -> LoadResult<CandlePlan> {
    rwkv("rwkv5", reader, |config, weights| {
        let config: rwkv_v5::Config = read(config)?;
        let device = weights.device().clone();
        let model = Arc::new(rwkv_v5::Model::new(&config, weights)?);
        let make = move || Ok((model.clone(), rwkv_v5::State::new(1, &config, &device)?));
        Ok(made(make, |(model, state), tokens, _| model.forward(tokens, state)))
    })
}

fn rwkv6(reader: &ConfigReader) -> LoadResult<CandlePlan> {
    rwkv("rwkv6", reader, |config, weights| {
        let config: rwkv_v6::Config = read(config)?;
        let device = weights.device().clone();
        let model = Arc::new(rwkv_v6::Model::new(&config, weights)?);
        let make = move || Ok((model.clone(), rwkv_v6::State::new(1, &config, &device)?));
        Ok(made(make, |(model, state), tokens, _| model.forward(tokens, state)))
    })
}

fn rwkv(name: &'static str, reader: &ConfigReader, open: OpenModel) -> LoadResult<CandlePlan> {
    let mut config = CandleConfig::new(reader);
    let body = config.body()?;
    let head_size = config.size("head_size", Some(64))?;
    if !body.hidden_size.is_multiple_of(head_size) {
        return Err(reader.error("head_size", "does not divide the hidden size into heads"));
    }
    config.only("attention_hidden_size", body.hidden_size)?;
    config.put("attention_hidden_size", body.hidden_size);
    // candle-transformers divides by this "number of heads" as if it were a head size.
    config.put("num_attention_heads", head_size);
    let usual_inner = (body.hidden_size as f64 * 3.5) as usize / 32 * 32;
    let inner = config.size("intermediate_size", Some(usual_inner))?;
    config.positive(&["layer_norm_epsilon"], 1e-5)?;
    config.put("rescale_every", 0); // only for f16
    let divisor = config.positive(&["head_size_divisor"], 8.0)?;
    if config.flag("tie_word_embeddings", false)? {
        return Err(reader.unsupported("candle-transformers needs a separate output matrix"));
    }
    // The published model divides the attention output by this before a norm whose epsilon matters;
    // candle-transformers does not. The division is moved to the values, in which the output is linear.
    let scaled = Some(("attention.value.weight", 1.0 / divisor));
    let weights = WeightAdaptation { scaled, ..WeightAdaptation::default() };
    let values = body.hidden_size.saturating_mul(head_size + 2);
    recurrent::<rwkv_v5::Config>(name, config, Sizes { widest: inner, ..body }, values, weights, open)
}

fn stablelm(reader: &ConfigReader) -> LoadResult<CandlePlan> {
    let mut config = CandleConfig::new(reader);
    let sizes = config.transformer(Usual::default())?;
    let rotated = config.rotated(&["partial_rotary_factor", "rope_pct"], 0.25, sizes.head_dim)?;
    config.rope(10_000.0, rotated)?;
    config.positive(&["layer_norm_eps", "norm_eps"], 1e-5)?;
    config.text("hidden_act", "silu")?;
    config.flag("use_qkv_bias", false)?;
    for key in ["qk_layernorm", "use_parallel_residual"] {
        config.only(key, false)?;
    }
    config.put("use_cache", true);
    config.ties(false, EMBEDDINGS)?;
    let context = config.context(4096)?;
    let open: OpenModel = |config, weights| {
        let config: stable_lm::Config = read(config)?;
        let make = move || stable_lm::Model::new(&config, weights.clone());
        drop(make()?); // reports errors in the tensors now
        Ok(made(make, stable_lm::Model::forward))
    };
    Ok(CandlePlan {
        prefill: Prefill::Beginning, // its model cannot be cloned
        ..plan::<stable_lm::Config>("stablelm", config, sizes, context, open)?
    })
}

fn starcoder2(reader: &ConfigReader) -> LoadResult<CandlePlan> {
    let mut config = CandleConfig::new(reader);
    let sizes = config.transformer(Usual { num_kv_heads: Some(2), ..Usual::default() })?;
    config.rope(10_000.0, sizes.head_dim)?;
    config.positive(&["norm_epsilon"], 1e-5)?;
    config.text("hidden_act", "gelu_pytorch_tanh")?;
    config.flag("use_bias", true)?;
    config.only("tie_word_embeddings", true)?;
    config.tied = Some(EMBEDDINGS);
    let most = config.context(4096)?;
    let (context, notice) = config.within_window(most, true)?;
    let open: OpenModel = |config, weights| {
        let model = starcoder2::Model::new(&read(config)?, weights)?;
        Ok(cloned(model, starcoder2::Model::forward))
    };
    Ok(CandlePlan {
        notices: notice.into_iter().collect(),
        ..plan::<starcoder2::Config>("starcoder2", config, sizes, context, open)?
    })
}
