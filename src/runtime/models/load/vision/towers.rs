//! Towers of the families, from `vision_config` of config.json or the metadata of an mmproj file.
//!
//! Sizes that a tensor shows are taken from its shape; names are those of transformers' checkpoints and of llama.cpp's
//! converter. Sources: transformers' `modeling_*.py` of each family; llama.cpp's `clip.cpp` and converter for GGUF.

use super::VisionSource;
use crate::backend::Activation;
use crate::vision::{
    Deepstack, NormConfig, NormKind, PatchEmbedding, Positions, ProjectorStep, Resampling, RopeFrequencies,
    RopePairs, TowerConfig, TowerNames, TowerQkNorm, TowerRope, Windows,
};
use llmctl_base::error::LoadError;

/// Limit for counts in a file, generous compared to the largest published towers.
const MOST: usize = 1 << 20;

/// Names of llama.cpp's converter.
fn gguf_names() -> TowerNames {
    TowerNames {
        patches: "v.patch_embd",
        positions: "v.position_embd",
        class_row: "v.class_embd",
        layers: "v.blk",
        qkv: ["attn_q", "attn_k", "attn_v"],
        fused_qkv: "attn_qkv",
        attention_output: "attn_out",
        gate: "ffn_gate",
        up: "ffn_up",
        down: "ffn_down",
        matrix: "",
        norms: ["ln1", "ln2"],
        post_norms: ["attn_post_norm", "ffn_post_norm"],
        qk_norms: ["attn_q_norm", "attn_k_norm"],
        layer_scales: ["ls1", "ls2"],
        ..TowerNames::default()
    }
}

/// Names of SigLIP, behind the prefix of its model.
fn siglip_names() -> TowerNames {
    TowerNames {
        patches: "embeddings.patch_embedding",
        positions: "embeddings.position_embedding",
        layers: "encoder.layers",
        qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        attention_output: "self_attn.out_proj",
        up: "mlp.fc1",
        down: "mlp.fc2",
        norms: ["layer_norm1", "layer_norm2"],
        ..TowerNames::default()
    }
}

/// Names of Qwen's towers.
fn qwen_names() -> TowerNames {
    TowerNames {
        patches: "patch_embed.proj",
        positions: "pos_embed",
        layers: "blocks",
        fused_qkv: "attn.qkv",
        attention_output: "attn.proj",
        gate: "mlp.gate_proj",
        up: "mlp.up_proj",
        down: "mlp.down_proj",
        norms: ["norm1", "norm2"],
        ..TowerNames::default()
    }
}

fn gemma4_names() -> TowerNames {
    TowerNames {
        patches: "patch_embedder.input_proj",
        positions: "patch_embedder.position_embedding_table",
        attention_output: "self_attn.o_proj",
        gate: "mlp.gate_proj",
        up: "mlp.up_proj",
        down: "mlp.down_proj",
        matrix: ".linear",
        norms: ["input_layernorm", "pre_feedforward_layernorm"],
        post_norms: ["post_attention_layernorm", "post_feedforward_layernorm"],
        qk_norms: ["self_attn.q_norm", "self_attn.k_norm"],
        ..siglip_names()
    }
}

fn pixtral_names() -> TowerNames {
    TowerNames {
        patches: "patch_conv",
        layers: "transformer.layers",
        qkv: ["attention.q_proj", "attention.k_proj", "attention.v_proj"],
        attention_output: "attention.o_proj",
        gate: "feed_forward.gate_proj",
        up: "feed_forward.up_proj",
        down: "feed_forward.down_proj",
        norms: ["attention_norm", "ffn_norm"],
        ..TowerNames::default()
    }
}

fn internvl_names() -> TowerNames {
    TowerNames {
        patches: "embeddings.patch_embeddings.projection",
        positions: "embeddings.position_embeddings",
        class_row: "embeddings.cls_token",
        layers: "encoder.layer",
        qkv: ["attention.q_proj", "attention.k_proj", "attention.v_proj"],
        attention_output: "attention.projection_layer",
        up: "mlp.fc1",
        down: "mlp.fc2",
        norms: ["layernorm_before", "layernorm_after"],
        qk_norms: ["attention.q_norm", "attention.k_norm"],
        layer_scales: ["lambda_1", "lambda_2"],
        ..TowerNames::default()
    }
}

/// Numbers of a family's class that a config.json may leave out.
struct TowerClass {
    layers: usize,
    heads: usize,
    patch: usize,
    eps: f32,
}

impl VisionSource<'_> {
    fn gguf(&self) -> bool {
        self.vision.is_gguf()
    }

    /// Returns a name: as it is in GGUF, behind the folder's root in a checkpoint.
    fn name(&self, hugging_face: &str, gguf: &str) -> String {
        if self.gguf() { gguf.to_owned() } else { format!("{}{hugging_face}", self.root()) }
    }

    /// Returns what stands before all names of a checkpoint's vision parts.
    fn root(&self) -> &'static str {
        let is_below = |name: &str| name.strip_prefix("model.").is_some_and(|inner| inner.starts_with("vis"));
        if self.tensors.names().iter().any(|name| is_below(name)) { "model." } else { "" }
    }

    /// Returns the names of the tower below the first of `prefixes` that the checkpoint has, or those of GGUF.
    fn names(&self, names: TowerNames, prefixes: &[&str]) -> TowerNames {
        if self.gguf() {
            return gguf_names();
        }
        let prefix = |prefix: &&str| format!("{}{prefix}", self.root());
        let has = |prefix: &String| self.shape(&format!("{prefix}{}", names.patches)).is_some();
        let found = prefixes.iter().map(prefix).find(has).or(prefixes.first().map(prefix));
        TowerNames { prefix: found.unwrap_or_default(), ..names }
    }

    /// Returns a tensor's shape by its name, with `.weight` or without.
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let described = self.tensors.describe(&format!("{name}.weight"));
        described.or_else(|| self.tensors.describe(name)).map(|(shape, _)| shape)
    }

    fn has(&self, name: &str) -> bool {
        self.shape(name).is_some()
    }

    /// Returns the first dimension of a tensor.
    fn rows(&self, name: &str) -> Result<usize, LoadError> {
        let rows = self.shape(name).and_then(|shape| shape.first().copied());
        rows.ok_or_else(|| crate::model::weights::missing(&format!("{name}.weight")))
    }

    /// Returns a count of the tower, under the first of Hugging Face's keys that is there, or `default`.
    fn count(&self, keys: &[&'static str], gguf: &'static str, default: usize) -> Result<usize, LoadError> {
        let reader = self.vision;
        if self.gguf() {
            return reader.size_or(gguf, default, MOST);
        }
        let key = keys.iter().find(|key| reader.value(key).is_some());
        match key.map(|key| (key, reader.first_count(key))) {
            None => Ok(default),
            Some((_, Ok(Some(count)))) if (1..=MOST).contains(&count) => Ok(count),
            Some((key, Ok(_))) => Err(reader.error(key, format!("is not a count between 1 and {MOST}"))),
            Some((_, Err(error))) => Err(error),
        }
    }

    fn activation(&self, default: Activation) -> Result<Activation, LoadError> {
        let reader = self.vision;
        if self.gguf() {
            let is_silu = reader.flag("use_silu")? == Some(true);
            return Ok(if is_silu { Activation::Silu } else { default });
        }
        let key =
            if reader.value("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
        match reader.string(key)?.as_deref() {
            None => Ok(default),
            Some("silu") => Ok(Activation::Silu),
            Some("gelu") => Ok(Activation::GeluErf),
            Some("gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
            Some(other) => Err(reader.error(key, format!("activation {other:?} is not supported"))),
        }
    }

    /// Parses what all towers have, and leaves the layers out.
    fn without_layers(&self, class: &TowerClass, names: TowerNames) -> Result<TowerConfig, LoadError> {
        let hidden_size = self.rows(&format!("{}{}", names.prefix, names.patches))?;
        let eps_key = match self.vision.value("rms_norm_eps") {
            Some(_) if !self.gguf() => "rms_norm_eps",
            _ => self.vision.pick("layer_norm_eps", "vision.attention.layer_norm_epsilon"),
        };
        Ok(TowerConfig {
            hidden_size,
            num_heads: 1,
            num_kv_heads: 1,
            head_dim: hidden_size,
            intermediate_size: hidden_size,
            norm_eps: self.vision.number(eps_key)?.unwrap_or(class.eps),
            score_scale: 1.0,
            patches: PatchEmbedding {
                size: self.count(&["patch_size"], "vision.patch_size", class.patch)?,
                frames: 1,
                scale: [1.0, 0.0],
                ..PatchEmbedding::default()
            },
            merge: 1,
            output_size: self.decoder.config.hidden_size,
            names,
            ..TowerConfig::default()
        })
    }

    /// Parses what most towers have: LayerNorms before the parts of a layer, plain networks, no rotary positions.
    fn tower(&self, class: &TowerClass, names: TowerNames) -> Result<TowerConfig, LoadError> {
        let up = format!("{}{}.0.{}{}", names.prefix, names.layers, names.up, names.matrix);
        let heads =
            self.count(&["num_attention_heads", "num_heads"], "vision.attention.head_count", class.heads)?;
        let base = self.without_layers(class, names)?;
        let head_dim = base.hidden_size / heads;
        Ok(TowerConfig {
            num_layers: self.count(&["num_hidden_layers", "depth"], "vision.block_count", class.layers)?,
            num_heads: heads,
            num_kv_heads: heads,
            head_dim,
            intermediate_size: self.rows(&up)?,
            activation: self.activation(Activation::GeluTanh)?,
            score_scale: 1.0 / (head_dim as f32).sqrt(),
            ..base
        })
    }

    /// Returns a square table of positions, whose side its rows give; `first` rows of it are no patches'.
    fn square(
        &self,
        names: &TowerNames,
        first: usize,
        resampling: Resampling,
    ) -> Result<Positions, LoadError> {
        let name = format!("{}{}", names.prefix, names.positions);
        let shape = self.shape(&name).unwrap_or_default();
        let rows = shape.len().checked_sub(2).map_or(0, |at| shape[at]);
        let side = rows.saturating_sub(first).isqrt();
        if side == 0 {
            return Err(crate::model::weights::missing(&format!("{name}.weight")));
        }
        Ok(Positions::Square { side, resampling })
    }

    fn theta(&self, default: f32) -> Result<f32, LoadError> {
        let nested = self.vision.value("rope_parameters").and_then(|rope| rope.get("rope_theta")?.as_f64());
        let theta = nested.map(|theta| theta as f32).or(self.vision.number("rope_theta")?).unwrap_or(default);
        match theta > 0.0 && theta.is_finite() {
            true => Ok(theta),
            false => Err(self.vision.error("rope_theta", format!("{theta} is not above 0"))),
        }
    }

    fn merge(&self) -> Result<usize, LoadError> {
        let from = |reader: &crate::model::arch::ConfigReader| reader.value("spatial_merge_size").is_some();
        match !self.gguf() && !from(self.vision) && from(self.top) {
            true => self.top.size("spatial_merge_size", 64),
            false => self.count(&["spatial_merge_size"], "vision.spatial_merge_size", 2),
        }
    }

    fn linear(&self, hugging_face: &str, gguf: &str) -> Result<ProjectorStep, LoadError> {
        let name = self.name(hugging_face, gguf);
        Ok(ProjectorStep::Linear { out: self.rows(&name)?, name, transposed: false })
    }

    fn norm(&self, kind: NormKind, eps: f32, hugging_face: &str, gguf: &str) -> NormConfig {
        NormConfig { kind, eps, name: self.name(hugging_face, gguf) }
    }
}

const AXIAL: TowerRope = TowerRope {
    theta: 1e4,
    frequencies: RopeFrequencies::Same,
    pairs: RopePairs::Halves,
    columns_first: false,
};

const JOIN: ProjectorStep = ProjectorStep::Join { channels_first: false };
const GELU: ProjectorStep = ProjectorStep::Activation(Activation::GeluErf);

pub fn qwen3_vl(source: &VisionSource) -> Result<TowerConfig, LoadError> {
    let class = TowerClass { layers: 27, heads: 16, patch: 16, eps: 1e-6 };
    let own = TowerNames { up: "mlp.linear_fc1", down: "mlp.linear_fc2", ..qwen_names() };
    let names = source.names(own, &["visual."]);
    let tower = source.tower(&class, names)?;
    let norm = |hugging_face: &str, gguf: &str| {
        ProjectorStep::Norm(source.norm(NormKind::Layer, 1e-6, hugging_face, gguf))
    };
    let level = |(index, layer): (usize, usize)| {
        let hugging_face = |part: &str| format!("visual.deepstack_merger_list.{index}.{part}");
        let gguf = |part: &str| format!("v.deepstack.{layer}.{part}");
        let linear = |from: &str, to: &str| source.linear(&hugging_face(from), &gguf(to));
        let projector = vec![
            JOIN,
            norm(&hugging_face("norm"), &gguf("norm")),
            linear("linear_fc1", "fc1")?,
            GELU,
            linear("linear_fc2", "fc2")?,
        ];
        Ok(Deepstack { layer, projector })
    };
    let layers = deepstack_layers(source, tower.num_layers)?;
    Ok(TowerConfig {
        positions: source.square(&tower.names, 0, Resampling::Corners)?,
        rope: Some(TowerRope { theta: source.theta(1e4)?, ..AXIAL }),
        patches: PatchEmbedding { frames: frames(source)?, ..tower.patches },
        merge: source.merge()?,
        projector: vec![
            norm("visual.merger.norm", "v.post_ln"),
            JOIN,
            source.linear("visual.merger.linear_fc1", "mm.0")?,
            GELU,
            source.linear("visual.merger.linear_fc2", "mm.2")?,
        ],
        deepstack: layers.into_iter().enumerate().map(level).collect::<Result<_, LoadError>>()?,
        ..tower
    })
}

/// Returns the layers behind which the decoder is given rows: as listed, none if the file has no projectors for them.
fn deepstack_layers(source: &VisionSource, num_layers: usize) -> Result<Vec<usize>, LoadError> {
    const KEY: &str = "vision.is_deepstack_layers";
    if !source.gguf() {
        let listed = source.vision.listed_layers("deepstack_visual_indexes")?;
        let has_some = source.has(&source.name("visual.deepstack_merger_list.0.norm", ""));
        return Ok(listed.unwrap_or_else(|| if has_some { vec![8, 16, 24] } else { Vec::new() }));
    }
    let flags: Vec<bool> = match source.vision.value(KEY) {
        None => return Ok(Vec::new()),
        Some(value) => serde_json::from_value(value)
            .map_err(|error| source.vision.error(KEY, format!("is not a list of layers: {error}")))?,
    };
    let layers = flags.iter().enumerate().filter(|(layer, is)| **is && *layer < num_layers);
    Ok(layers.map(|(layer, _)| layer).collect())
}

fn frames(source: &VisionSource) -> Result<usize, LoadError> {
    if source.gguf() { Ok(2) } else { source.count(&["temporal_patch_size"], "", 2) }
}

pub fn qwen2_5_vl(source: &VisionSource) -> Result<TowerConfig, LoadError> {
    let class = TowerClass { layers: 32, heads: 16, patch: 14, eps: 1e-6 };
    let names = source.names(qwen_names(), &["visual."]);
    let tower = source.tower(&class, names)?;
    let merge = source.merge()?;
    let window = source.count(&["window_size"], "vision.window_size", 112)?;
    let full_layers = match source.gguf() {
        true => {
            let period = source.count(&[], "vision.n_wa_pattern", 8)?;
            (0..tower.num_layers).filter(|layer| (layer + 1).is_multiple_of(period)).collect()
        }
        false => source.vision.listed_layers("fullatt_block_indexes")?.unwrap_or(vec![7, 15, 23, 31]),
    };
    Ok(TowerConfig {
        norm: NormKind::Rms,
        norm_eps: 1e-6,
        is_gated: true,
        activation: source.activation(Activation::Silu)?,
        windows: Some(Windows { side: window / merge / tower.patches.size, full_layers }),
        rope: Some(TowerRope { theta: source.theta(1e4)?, ..AXIAL }),
        patches: PatchEmbedding { frames: frames(source)?, ..tower.patches },
        merge,
        projector: vec![
            ProjectorStep::Norm(source.norm(NormKind::Rms, 1e-6, "visual.merger.ln_q", "v.post_ln")),
            JOIN,
            source.linear("visual.merger.mlp.0", "mm.0")?,
            GELU,
            source.linear("visual.merger.mlp.2", "mm.2")?,
        ],
        ..tower
    })
}

const SIGLIP_CLASS: TowerClass = TowerClass { layers: 12, heads: 12, patch: 16, eps: 1e-6 };
const SIGLIP_PREFIXES: [&str; 2] = ["vision_tower.vision_model.", "vision_tower."];

/// Returns the norm behind SigLIP's last layer.
fn last_norm(source: &VisionSource, tower: &TowerConfig) -> ProjectorStep {
    let name = match source.gguf() {
        true => "v.post_ln".to_owned(),
        false => format!("{}post_layernorm", tower.names.prefix),
    };
    ProjectorStep::Norm(NormConfig { kind: NormKind::Layer, eps: tower.norm_eps, name })
}

pub fn gemma3(source: &VisionSource) -> Result<TowerConfig, LoadError> {
    let names = source.names(siglip_names(), &SIGLIP_PREFIXES);
    let tower = source.tower(&SIGLIP_CLASS, names)?;
    let positions = source.square(&tower.names, 0, Resampling::None)?;
    let merge = match (source.gguf(), positions) {
        (true, _) => source.count(&[], "vision.projector.scale_factor", 4)?,
        (false, Positions::Square { side, .. }) => {
            let tokens = source.top.size_or("mm_tokens_per_image", 256, MOST)?;
            (side / tokens.isqrt()).max(1)
        }
        _ => 1,
    };
    let kind = if source.gguf() { NormKind::Rms } else { NormKind::RmsAroundOne };
    let norm =
        source.norm(kind, tower.norm_eps, "multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm");
    let name = source.name("multi_modal_projector.mm_input_projection_weight", "mm.input_projection");
    let out = source
        .shape(&name)
        .and_then(|shape| shape.get(1).copied())
        .unwrap_or(source.decoder.config.hidden_size);
    Ok(TowerConfig {
        positions,
        merge,
        projector: vec![
            last_norm(source, &tower),
            ProjectorStep::Average { factor: 1.0 },
            ProjectorStep::Norm(norm),
            ProjectorStep::Linear { name, out, transposed: true },
        ],
        ..tower
    })
}

pub fn gemma4(source: &VisionSource) -> Result<TowerConfig, LoadError> {
    let class = TowerClass { layers: 16, heads: 12, patch: 16, eps: 1e-6 };
    let names = source.names(gemma4_names(), &["vision_tower."]);
    let tower = source.tower(&class, names)?;
    let positions = format!("{}{}", tower.names.prefix, tower.names.positions);
    let q_norm = format!("{}{}.0.{}", tower.names.prefix, tower.names.layers, tower.names.qk_norms[0]);
    let head_dim = source.rows(&q_norm)?;
    let heads = tower.num_heads;
    let std = |part: &str| source.name(&format!("vision_tower.{part}"), &format!("v.{part}"));
    let clamp = format!("{}{}.0.{}.input_min", tower.names.prefix, tower.names.layers, tower.names.qkv[0]);
    let mut projector = vec![ProjectorStep::Average { factor: (tower.hidden_size as f32).sqrt() }];
    if source.has(&std("std_bias")) {
        projector.push(ProjectorStep::Standardise { bias: std("std_bias"), scale: std("std_scale") });
    }
    let alone = NormConfig { kind: NormKind::RmsAlone, eps: tower.norm_eps, name: String::new() };
    projector.push(ProjectorStep::Norm(alone));
    projector.push(source.linear("embed_vision.embedding_projection", "mm.input_projection")?);
    Ok(TowerConfig {
        norm: NormKind::Rms,
        is_gated: true,
        post_norms: true,
        num_kv_heads: source.count(&["num_key_value_heads"], "vision.attention.head_count_kv", heads)?,
        head_dim,
        qk_norm: TowerQkNorm::PerHead,
        value_norm: true,
        score_scale: 1.0,
        rope: Some(TowerRope {
            theta: source.theta(100.0)?,
            pairs: RopePairs::Quarters,
            columns_first: true,
            ..AXIAL
        }),
        clamps: source.has(&clamp),
        patches: PatchEmbedding { channels_last: !source.gguf(), scale: [2.0, -1.0], ..tower.patches },
        positions: Positions::Axes {
            len: source.shape(&positions).and_then(|shape| shape.get(1).copied()).unwrap_or(0),
            interleaved: false,
        },
        merge: source.count(&["pooling_kernel_size"], "vision.projector.scale_factor", 3)?,
        projector,
        ..tower
    })
}

pub fn gemma4_unified(source: &VisionSource) -> Result<TowerConfig, LoadError> {
    let class = TowerClass { layers: 0, heads: 1, patch: 16, eps: 1e-6 };
    let own = TowerNames { patches: "patch_dense", positions: "pos_embedding", ..TowerNames::default() };
    let names = source.names(own, &["vision_embedder."]);
    let base = source.without_layers(&class, names)?;
    let norm = |hugging_face: &str, gguf: &str| {
        Some(source.norm(NormKind::Layer, 1e-5, &format!("vision_embedder.{hugging_face}"), gguf))
    };
    let merge = source.count(&["pooling_kernel_size"], "vision.projector.scale_factor", 3)?;
    let positions = source.shape(&format!("{}{}", base.names.prefix, base.names.positions));
    let axis = usize::from(source.gguf());
    let alone = NormConfig { kind: NormKind::RmsAlone, eps: base.norm_eps, name: String::new() };
    Ok(TowerConfig {
        patches: PatchEmbedding {
            size: base.patches.size * merge,
            channels_last: !source.gguf(),
            pixel_norm: norm("patch_ln1", "v.patch_norm.1"),
            norm: norm("patch_ln2", "v.patch_norm.2"),
            position_norm: norm("pos_norm", "v.patch_norm.3"),
            ..base.patches
        },
        positions: Positions::Axes {
            len: positions.and_then(|shape| shape.get(axis).copied()).unwrap_or(0),
            interleaved: !source.gguf(),
        },
        projector: vec![
            ProjectorStep::Norm(alone),
            source.linear("embed_vision.embedding_projection", "mm.input_projection")?,
        ],
        ..base
    })
}

pub fn idefics3(source: &VisionSource) -> Result<TowerConfig, LoadError> {
    let class = TowerClass { layers: 12, heads: 16, patch: 32, eps: 1e-6 };
    let names = source.names(siglip_names(), &["vision_model."]);
    let tower = source.tower(&class, names)?;
    let merge = match source.gguf() {
        true => source.count(&[], "vision.projector.scale_factor", 2)?,
        false => source.top.size_or("scale_factor", 2, 64)?,
    };
    Ok(TowerConfig {
        positions: source.square(&tower.names, 0, Resampling::None)?,
        merge,
        projector: vec![
            last_norm(source, &tower),
            JOIN,
            source.linear("connector.modality_projection.proj", "mm.model.fc")?,
        ],
        ..tower
    })
}

pub fn lfm2_vl(source: &VisionSource) -> Result<TowerConfig, LoadError> {
    let names = source.names(siglip_names(), &SIGLIP_PREFIXES);
    let tower = source.tower(&SIGLIP_CLASS, names)?;
    let merge = match source.gguf() {
        true => source.count(&[], "vision.projector.scale_factor", 2)?,
        false => source.top.size_or("downsample_factor", 2, 64)?,
    };
    let norm = source.norm(NormKind::Layer, 1e-5, "multi_modal_projector.layer_norm", "mm.input_norm");
    let has_norm = source.has(&norm.name);
    let mut projector = vec![last_norm(source, &tower), JOIN];
    projector.extend(has_norm.then_some(ProjectorStep::Norm(norm)));
    projector.extend([
        source.linear("multi_modal_projector.linear_1", "mm.1")?,
        GELU,
        source.linear("multi_modal_projector.linear_2", "mm.2")?,
    ]);
    Ok(TowerConfig {
        positions: source.square(&tower.names, 0, Resampling::Antialias)?,
        patches: PatchEmbedding { channels_last: !source.gguf(), ..tower.patches },
        merge,
        projector,
        ..tower
    })
}

pub fn pixtral(source: &VisionSource) -> Result<TowerConfig, LoadError> {
    let class = TowerClass { layers: 24, heads: 16, patch: 16, eps: 1e-5 };
    let names = source.names(pixtral_names(), &["vision_tower."]);
    let tower = source.tower(&class, names)?;
    let head_dim = source.count(&["head_dim"], "vision.attention.head_dim", tower.head_dim)?;
    // llama.cpp's converter puts rotary pairs side by side.
    let pairs = if source.gguf() { RopePairs::Neighbours } else { RopePairs::Halves };
    let norm = |eps, hugging_face, gguf| source.norm(NormKind::Rms, eps, hugging_face, gguf);
    Ok(TowerConfig {
        head_dim,
        score_scale: 1.0 / (head_dim as f32).sqrt(),
        norm: NormKind::Rms,
        norm_eps: 1e-5,
        is_gated: true,
        activation: source.activation(Activation::GeluErf)?,
        rope: Some(TowerRope {
            theta: source.theta(1e4)?,
            frequencies: RopeFrequencies::Alternating,
            pairs,
            columns_first: false,
        }),
        patches: PatchEmbedding {
            norm: Some(norm(1e-5, "vision_tower.ln_pre", "v.pre_ln")),
            ..tower.patches
        },
        merge: source.merge()?,
        projector: vec![
            ProjectorStep::Norm(norm(
                source.decoder.config.final_norm_eps,
                "multi_modal_projector.norm",
                "mm.input_norm",
            )),
            ProjectorStep::Join { channels_first: true },
            source.linear("multi_modal_projector.patch_merger.merging_layer", "mm.patch_merger")?,
            source.linear("multi_modal_projector.linear_1", "mm.1")?,
            GELU,
            source.linear("multi_modal_projector.linear_2", "mm.2")?,
        ],
        ..tower
    })
}

pub fn internvl(source: &VisionSource) -> Result<TowerConfig, LoadError> {
    let class = TowerClass { layers: 24, heads: 16, patch: 14, eps: 1e-6 };
    let names = source.names(internvl_names(), &["vision_tower."]);
    let tower = source.tower(&class, names)?;
    let layer = |part: &str| format!("{}{}.0.{part}", tower.names.prefix, tower.names.layers);
    let is_rms = !source.has(&format!("{}.bias", layer(tower.names.norms[0])));
    let has_qk_norm = source.has(&layer(tower.names.qk_norms[0]));
    let ratio = source.top.number("downsample_ratio")?.unwrap_or(0.5);
    let merge = match source.gguf() {
        true => source.count(&[], "vision.projector.scale_factor", 2)?,
        false if ratio > 0.0 && ratio <= 1.0 => (1.0 / ratio).round() as usize,
        false => return Err(source.top.error("downsample_ratio", format!("{ratio} is not within 0 to 1"))),
    };
    let norm = source.norm(NormKind::Layer, 1e-5, "multi_modal_projector.layer_norm", "mm.model.mlp.0");
    Ok(TowerConfig {
        norm: if is_rms { NormKind::Rms } else { NormKind::Layer },
        qk_norm: if has_qk_norm { TowerQkNorm::Whole } else { TowerQkNorm::None },
        layer_scales: true,
        activation: source.activation(Activation::GeluErf)?,
        class_row: true,
        positions: source.square(&tower.names, 1, Resampling::None)?,
        merge,
        projector: vec![
            JOIN,
            ProjectorStep::Norm(norm),
            source.linear("multi_modal_projector.linear_1", "mm.model.mlp.1")?,
            GELU,
            source.linear("multi_modal_projector.linear_2", "mm.model.mlp.3")?,
        ],
        ..tower
    })
}

pub fn glm4v(source: &VisionSource) -> Result<TowerConfig, LoadError> {
    let class = TowerClass { layers: 24, heads: 12, patch: 14, eps: 1e-5 };
    let own = TowerNames { positions: "embeddings.position_embedding", ..qwen_names() };
    let names = source.names(own, &["visual."]);
    let tower = source.tower(&class, names)?;
    let rms = |hugging_face, gguf| source.norm(NormKind::Rms, tower.norm_eps, hugging_face, gguf);
    let merger = |part: &str| source.name(&format!("visual.merger.{part}_proj"), &format!("mm.{part}"));
    let names = ["gate", "up", "down"].map(merger);
    let activation = source.activation(Activation::Silu)?;
    let gated = ProjectorStep::Gated {
        inner: source.rows(&names[0])?,
        out: source.rows(&names[2])?,
        names,
        activation,
    };
    let after = source.norm(NormKind::Layer, 1e-5, "visual.merger.post_projection_norm", "mm.post_norm");
    Ok(TowerConfig {
        norm: NormKind::Rms,
        is_gated: true,
        activation,
        rope: Some(TowerRope { theta: source.theta(1e4)?, ..AXIAL }),
        positions: source.square(&tower.names, 0, Resampling::Cubic)?,
        merge: source.merge()?,
        projector: vec![
            ProjectorStep::Norm(rms("visual.post_layernorm", "v.post_ln")),
            ProjectorStep::Join { channels_first: true },
            source.linear("visual.downsample", "mm.patch_merger")?,
            source.linear("visual.merger.proj", "mm.model.fc")?,
            ProjectorStep::Norm(after),
            GELU,
            gated,
        ],
        patches: PatchEmbedding {
            frames: frames(source)?,
            norm: Some(rms("visual.post_conv_layernorm", "v.norm_embd")),
            ..tower.patches
        },
        ..tower
    })
}
