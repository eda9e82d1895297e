//! DeepSeek V2 and V3 and GLM-4.7-Flash: latent attention; the first layers are dense, the others have
//! experts beside a shared network. V2 weighs experts by softmax, V3 and GLM by sigmoid, with a bias for
//! their choice. Mistral 4 is like V3 with V2's weights. Sources: transformers `DeepseekV2Config`, `DeepseekV3Config` and `Glm4MoeLiteConfig`;
//! llama.cpp's `deepseek2` for GGUF, which covers all three.

use super::dense::{ConfigDefaults, MAX_WIDTH, decoder};
use super::dense_families::temperature;
use super::experts::{ExpertKeys, experts, shared_width, weight_scale, with_shared};
use super::rope::yarn_score_factor;
use super::{ConfigReader, Description, Family};
use crate::model::config::{
    ExpertGroups, ExpertWeights, ExpertsConfig, FeedForwardConfig, LatentConfig, MixerConfig, MlpConfig,
    PartNames, RopeScaling, SeenKeys,
};
use llmctl_base::error::LoadResult;

pub const V2_FAMILY: Family =
    Family { parse: parse_config, ..Family::new("deepseek2", &["deepseek_v2"], &["deepseek2"]) };

/// Also Kimi K2, whose files have a name of their own for the same architecture.
pub const V3_FAMILY: Family =
    Family { parse: parse_config, ..Family::new("deepseek3", &["deepseek_v3", "kimi_k2"], &[]) };

pub const GLM_FAMILY: Family =
    Family { parse: parse_config, ..Family::new("glm4-moe-lite", &["glm4_moe_lite"], &[]) };

/// Mistral Small 4 and Large 3: softmax weights that sum to 1, and queries that grow with the position. Sources: transformers
/// `Mistral4Config`; llama.cpp's `mistral4`.
pub const MISTRAL4_FAMILY: Family = Family {
    parse: |family, reader| {
        let mut description = parse_config(family, reader)?;
        let temperature = temperature(&description, reader)?;
        for layer in &mut description.config.layers {
            if let MixerConfig::Latent(latent) = &mut layer.mixer {
                latent.temperature = temperature;
            }
        }
        Ok(description)
    },
    ..Family::new("mistral4", &["mistral4"], &["mistral4"])
};

/// Facts about experts beside a shared network, which differ between the families that read them as DeepSeek's are read.
pub struct ExpertFacts {
    pub keys: ExpertKeys,
    /// The shared network in config.json and in GGUF.
    pub shared: [SharedNetwork; 2],
    /// config.json's factor of the weights.
    pub scale: &'static str,
    /// config.json's number of first layers that are dense, and the class's default.
    pub dense: (&'static str, usize),
    pub parts: PartNames,
}

/// Key by which a file gives the width of the network that all tokens pass.
pub enum SharedNetwork {
    /// A number of experts, with the class's default.
    Count(&'static str, usize),
    Width(&'static str),
}

impl SharedNetwork {
    pub const GGUF_WIDTH: Self = Self::Width("expert_shared_feed_forward_length");
}

impl ExpertFacts {
    pub const DEEPSEEK: Self = Self {
        keys: ExpertKeys { count: "n_routed_experts", ..ExpertKeys::QWEN },
        shared: [SharedNetwork::Count("n_shared_experts", 0), SharedNetwork::Count("expert_shared_count", 0)],
        scale: "routed_scaling_factor",
        dense: ("first_k_dense_replace", 0),
        parts: PartNames::SHARED_EXPERTS,
    };

    /// Names of most families that do not follow DeepSeek's.
    pub const NUMBERED: Self = Self {
        keys: ExpertKeys::QWEN,
        shared: [
            SharedNetwork::Count("num_shared_experts", 1),
            SharedNetwork::Count("expert_shared_count", 0),
        ],
        dense: ("first_k_dense_replace", 1),
        ..Self::DEEPSEEK
    };
}

fn parse_config(family: &Family, reader: &ConfigReader) -> LoadResult<Description> {
    parse_latent(family, reader, &ExpertFacts::DEEPSEEK)
}

/// Parses a model whose layers all have latent attention and, except for the first ones, experts.
pub fn parse_latent(family: &Family, reader: &ConfigReader, facts: &ExpertFacts) -> LoadResult<Description> {
    let latent = latent(reader)?;
    let defaults = ConfigDefaults { experts: true, context_length: 4096, ..ConfigDefaults::CLASS };
    let rotary_dim = latent.rotary_dim;
    let mut description = decoder(family.name, reader, MixerConfig::Latent(latent), rotary_dim, defaults)?;
    description.leave_prediction_out(reader, "num_nextn_predict_layers")?;
    if reader.is_gguf() && reader.number("rope.scaling.yarn_log_multiplier")?.is_some() {
        // The magnitudes of rotations and scores, which the files do not tell apart, are equal in all published models.
        if let RopeScaling::Yarn { attention_factor, .. } = &mut description.config.ropes[0].scaling {
            *attention_factor = Some(1.0);
        }
    }
    set_experts(&mut description, reader, facts)?;
    Ok(description)
}

/// Replaces the dense part of all layers but the first by experts beside a shared network.
pub fn set_experts(
    description: &mut Description,
    reader: &ConfigReader,
    facts: &ExpertFacts,
) -> LoadResult<()> {
    description.naming.parts = facts.parts;
    let is_sparse = sparse_layers(reader, description.config.layers.len(), facts)?;
    description.replace_dense(|layer| is_sparse[layer], |dense| feed_forward(reader, dense, facts))
}

/// Parses the attention of every layer. GGUF's keys give the widths of heads; those for the absorbed form, which newer files
/// have beside them, are derived here.
fn latent(reader: &ConfigReader) -> LoadResult<LatentConfig> {
    let size = |hugging_face, gguf| reader.size(reader.pick(hugging_face, gguf), MAX_WIDTH);
    let query_key = reader.pick("q_lora_rank", "attention.q_lora_rank");
    let rotary_dim = size("qk_rope_head_dim", "rope.dimension_count")?;
    let (plain_dim, value_dim) = match reader.is_gguf() {
        false => (size("qk_nope_head_dim", "")?, size("v_head_dim", "")?),
        true => gguf_head_dims(reader, rotary_dim)?,
    };
    if !rotary_dim.is_multiple_of(2) {
        let key = reader.pick("qk_rope_head_dim", "rope.dimension_count");
        return Err(reader.error(key, format!("{rotary_dim} values cannot be rotated in pairs")));
    }
    Ok(LatentConfig {
        num_heads: size("num_attention_heads", "attention.head_count")?,
        query_rank: match reader.count(query_key)? {
            None => None,
            Some(_) => Some(reader.size(query_key, MAX_WIDTH)?),
        },
        kv_rank: size("kv_lora_rank", "attention.kv_lora_rank")?,
        plain_dim,
        rotary_dim,
        value_dim,
        scale: yarn_score_factor(reader)? / ((plain_dim + rotary_dim) as f32).sqrt(),
        temperature: None,
        rope: Some(0),
        interleaved: reader.flag("rope_interleave")?.unwrap_or(true),
        seen: SeenKeys::All,
        has_gate: false,
    })
}

/// Returns the widths of a head's plain key and of its value.
fn gguf_head_dims(reader: &ConfigReader, rotary_dim: usize) -> LoadResult<(usize, usize)> {
    let key = |absorbed: &'static str, plain: &'static str| match reader.is_absent(absorbed) {
        true => plain,
        false => absorbed,
    };
    let key_name = key("attention.key_length_mla", "attention.key_length");
    let whole = reader.size(key_name, MAX_WIDTH)?;
    let value = reader.size(key("attention.value_length_mla", "attention.value_length"), MAX_WIDTH)?;
    match whole.checked_sub(rotary_dim).filter(|plain| *plain > 0) {
        Some(plain) => Ok((plain, value)),
        None => {
            Err(reader.error(key_name, format!("{whole} leaves nothing beside {rotary_dim} rotated values")))
        }
    }
}

/// Returns which layers have experts: those after the first dense ones, or as listed.
fn sparse_layers(reader: &ConfigReader, num_layers: usize, facts: &ExpertFacts) -> LoadResult<Vec<bool>> {
    const LIST: &str = "mlp_layer_types";
    const STEP: &str = "moe_layer_freq";
    if reader.value(LIST).is_some_and(|list| list.is_array()) {
        let listed = reader.layers_named(LIST, num_layers, [&["sparse"], &["dense"]])?;
        return Ok(listed.unwrap_or_default());
    }
    if let Some(step) = reader.count(STEP)?.filter(|step| *step != 1) {
        return Err(reader.error(STEP, format!("experts in every {step}th layer are not supported")));
    }
    let count_key = reader.pick(facts.keys.count, "expert_count");
    if reader.count(count_key)?.or(reader.count("num_local_experts")?).unwrap_or(0) == 0 {
        return Ok(vec![false; num_layers]);
    }
    let (dense_key, default) = (reader.pick(facts.dense.0, "leading_dense_block_count"), facts.dense.1);
    match reader.count(dense_key)? {
        // Some of llama.cpp's converters leave it to the tensors.
        None if reader.is_gguf() && default > 0 => {
            let has_router = |layer| reader.value(&format!("blk.{layer}.ffn_gate_inp.weight")).is_some();
            Ok((0..num_layers).map(has_router).collect())
        }
        dense => {
            let dense = dense.unwrap_or(if reader.is_gguf() { 0 } else { default });
            Ok((0..num_layers).map(|layer| layer >= dense).collect())
        }
    }
}

/// Parses a layer with experts beside a network for every token.
pub fn feed_forward(
    reader: &ConfigReader,
    dense: MlpConfig,
    facts: &ExpertFacts,
) -> LoadResult<FeedForwardConfig> {
    let weights = weights(reader)?;
    let is_sigmoid = matches!(weights, ExpertWeights::Sigmoid | ExpertWeights::SigmoidOfUsed);
    let of_one = experts(reader, &facts.keys, &dense, weights)?;
    let experts = ExpertsConfig {
        weight_scale: weight_scale(reader, facts.scale)?,
        has_bias: is_sigmoid,
        groups: groups(reader, of_one.count, of_one.used, is_sigmoid)?,
        ..of_one
    };
    match facts.shared[usize::from(reader.is_gguf())] {
        SharedNetwork::Count(key, default) => {
            with_shared(reader, key, reader.count(key)?.unwrap_or(default), experts, dense)
        }
        SharedNetwork::Width(key) => {
            let width = shared_width(reader, key)?;
            let shared = width.map(|intermediate_size| MlpConfig { intermediate_size, ..dense });
            Ok(FeedForwardConfig { dense: shared, experts: Some(experts), gates_dense: false })
        }
    }
}

fn weights(reader: &ConfigReader) -> LoadResult<ExpertWeights> {
    let name = reader.architecture()?;
    let is_v2 = name == "deepseek_v2";
    let normalizes = reader.flag(reader.pick("norm_topk_prob", "expert_weights_norm"))?;
    let normalizes = normalizes.unwrap_or(!reader.is_gguf() && !is_v2);
    let is_sigmoid = match reader.is_gguf() {
        true => gguf_is_sigmoid(reader)?,
        false => !is_v2 && name != "mistral4",
    };
    Ok(if is_sigmoid { ExpertWeights::sigmoid(normalizes) } else { ExpertWeights::softmax(normalizes) })
}

/// Returns whether GGUF's weights are sigmoids. Files without the key are of DeepSeek V2, of a family that
/// has sigmoids always, or GLM-4.7-Flash's by their vocabulary, as in llama.cpp.
fn gguf_is_sigmoid(reader: &ConfigReader) -> LoadResult<bool> {
    const KEY: &str = "expert_gating_func";
    const GLM_VOCAB: usize = 154_880;
    match reader.count(KEY)? {
        None | Some(0) => {
            const SIGMOID: &str =
                "glm4moe nemotron_h_moe afmoe hy_v3 laguna step35 kimi-linear deepseek32 glm-dsa mimo2";
            let name = reader.architecture()?;
            let is_sigmoid = SIGMOID.split(' ').any(|known| known == name);
            Ok(reader.count("vocab_size")? == Some(GLM_VOCAB) || is_sigmoid)
        }
        Some(1) => Ok(false),
        Some(2) => Ok(true),
        Some(other) => Err(reader.error(KEY, format!("{other} is not a known weighting of experts"))),
    }
}

/// Parses groups of experts; `None` if the model has one, or if it is a V2 that ignores them.
fn groups(
    reader: &ConfigReader,
    count: usize,
    num_used: usize,
    is_sigmoid: bool,
) -> LoadResult<Option<ExpertGroups>> {
    let limits = reader.is_gguf() || is_sigmoid;
    if !limits && reader.string("topk_method")?.as_deref() != Some("group_limited_greedy") {
        return Ok(None);
    }
    let (count_key, used_key) =
        (reader.pick("n_group", "expert_group_count"), reader.pick("topk_group", "expert_group_used_count"));
    let groups = reader.count(count_key)?.unwrap_or(1);
    if groups <= 1 {
        return Ok(None);
    }
    if !count.is_multiple_of(groups) {
        return Err(
            reader.error(count_key, format!("{count} experts cannot be divided into {groups} groups"))
        );
    }
    let used = reader.size(used_key, groups)?;
    if used * (count / groups) < num_used {
        return Err(reader.error(used_key, format!("{used} groups have fewer than {num_used} experts")));
    }
    Ok(Some(ExpertGroups { count: groups, used }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::KvType;
    use crate::model::decoder::kv_bytes_per_token;
    use serde_json::{Value, json};

    fn description(config: Value) -> Description {
        let reader = ConfigReader::hugging_face("config.json".into(), config);
        super::super::parse_config(&reader).expect("valid").expect("a native family")
    }

    /// DeepSeek-V2-Lite's published configuration, as far as it matters here.
    fn v2_lite() -> Value {
        json!({
            "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
            "num_key_value_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408, "vocab_size": 102400,
            "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
            "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": null, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "norm_topk_prob": false, "routed_scaling_factor": 1.0,
            "topk_method": "greedy", "n_group": 1, "topk_group": 1, "max_position_embeddings": 163840,
            "rope_theta": 10000, "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
                "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
        })
    }

    #[test]
    fn pages_hold_one_latent_row_per_token_and_layer() {
        let lite = description(v2_lite());
        // Two bytes for each of 512 + 64 values.
        assert_eq!(kv_bytes_per_token(&lite.config, KvType::F16), 27 * 576 * 2);
        let layer = &lite.config.layers[1].feed_forward;
        assert_eq!(layer.dense.as_ref().map(|shared| shared.intermediate_size), Some(2 * 1408));
        assert!(lite.config.layers[0].feed_forward.experts.is_none() && layer.experts.is_some());
    }

    #[test]
    fn yarn_scales_scores_instead_of_rotations() {
        let config = description(v2_lite()).config;
        let MixerConfig::Latent(latent) = &config.layers[0].mixer else { panic!("latent attention") };
        let magnitude = 0.1 * 0.707 * 40f32.ln() + 1.0;
        assert!((latent.scale - magnitude * magnitude / 192f32.sqrt()).abs() < 1e-7, "{}", latent.scale);
        let RopeScaling::Yarn { attention_factor, .. } = config.ropes[0].scaling else { panic!("yarn") };
        assert_eq!(attention_factor, Some(1.0));
        let mut plain = v2_lite();
        plain["rope_scaling"]["mscale_all_dim"] = Value::Null;
        let MixerConfig::Latent(latent) = &description(plain).config.layers[0].mixer else {
            panic!("latent attention")
        };
        assert!((latent.scale - 1.0 / 192f32.sqrt()).abs() < 1e-7, "{}", latent.scale);
    }

    #[test]
    fn groups_limit_the_choice_where_the_class_says_so() {
        let groups = |change: &dyn Fn(&mut Value)| {
            let mut config = v2_lite();
            change(&mut config);
            let config = description(config).config;
            config.layers[1].feed_forward.experts.as_ref().and_then(|experts| experts.groups)
        };
        let limited = Some(ExpertGroups { count: 8, used: 3 });
        let set = |config: &mut Value, method: &str, model_type: &str| {
            config["topk_method"] = json!(method);
            config["model_type"] = json!(model_type);
            (config["n_group"], config["topk_group"]) = (json!(8), json!(3));
        };
        assert_eq!(groups(&|config| set(config, "group_limited_greedy", "deepseek_v2")), limited);
        assert_eq!(groups(&|config| set(config, "greedy", "deepseek_v2")), None);
        assert_eq!(groups(&|config| set(config, "noaux_tc", "deepseek_v3")), limited);
    }
}
