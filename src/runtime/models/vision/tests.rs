//! Towers of the fixture families against transformers' rows for the same patches.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use llmctl_image::Patches;
use llmctl_kernel::isa::isa;
use llmctl_kernel::{Dtype, Isa};
use serde_json::Value;

use super::TowerJob;
use super::config::*;
use super::job::{Job, Vit};
use super::load::TowerFile;
use crate::backend::Activation;
use crate::backend::cpu::{Cpu, CpuOptions};
use crate::images::ImageRows;
use crate::load::quantize;
use crate::load::safetensors::Safetensors;
use llmctl_base::error::LoadError;

/// Returns a fixture family's folder, or prints that the test is skipped.
fn fixture(family: &str) -> Option<PathBuf> {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../../shared/fixtures");
    let folder = std::env::var_os("LLMCTL_FIXTURES").map_or_else(default, PathBuf::from);
    let folder = folder.join("vision").join(family);
    if !folder.is_dir() {
        eprintln!("skipped: no {}", folder.display());
    }
    folder.is_dir().then_some(folder)
}

/// Reference numbers: shapes and values by name.
struct Golden(BTreeMap<String, (Vec<usize>, Vec<f32>)>);

impl Golden {
    fn read(folder: &Path) -> Self {
        let bytes = std::fs::read(folder.join("golden.safetensors")).unwrap();
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let header: BTreeMap<String, Value> = serde_json::from_slice(header).unwrap();
        let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
        let read = |(name, facts): (String, Value)| {
            let numbers = |value: &Value| -> Vec<usize> {
                value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as usize).collect()
            };
            let range = numbers(&facts["data_offsets"]);
            let bytes = &data[range[0]..range[1]];
            let values = match facts["dtype"].as_str().unwrap() {
                "F32" => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
                "I64" => bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes) as f32).collect(),
                _ => Vec::new(),
            };
            (name, (numbers(&facts["shape"]), values))
        };
        Self(tensors.map(read).collect())
    }

    fn images(&self) -> Vec<String> {
        let name =
            |name: &String| Some(name.strip_prefix("image/")?.strip_suffix("/pixel_values")?.to_owned());
        self.0.keys().filter_map(name).collect()
    }

    fn get(&self, name: &str) -> Option<&(Vec<usize>, Vec<f32>)> {
        self.0.get(name)
    }

    /// Returns an image's patches row by row, whatever the processor's order.
    fn patches(&self, image: &str, config: &TowerConfig) -> Patches {
        let (size, merge) = (config.patches.size, config.merge);
        let (shape, values) = self.get(&format!("image/{image}/pixel_values")).unwrap();
        let area = size * size;
        let place: Box<dyn Fn([usize; 2], [usize; 3]) -> usize>;
        let grid;
        if let Some((_, thw)) = self.get(&format!("image/{image}/image_grid_thw")) {
            grid = [thw[1] as usize, thw[2] as usize];
            let frames = shape[1] / area / 3;
            place = Box::new(move |[row, column], [channel, y, x]| {
                let block = row / merge * (grid[1] / merge) + column / merge;
                let patch = block * merge * merge + row % merge * merge + column % merge;
                (patch * 3 + channel) * frames * area + y * size + x
            });
        } else if let Some((_, places)) = self.get(&format!("image/{image}/image_position_ids")) {
            let most = |axis: usize| {
                places.iter().skip(axis).step_by(2).fold(0.0, |a: f32, b| a.max(*b)) as usize + 1
            };
            grid = [most(1), most(0)];
            place = Box::new(move |[row, column], [channel, y, x]| {
                (((row * grid[1] + column) * size + y) * size + x) * 3 + channel
            });
        } else {
            grid = [shape[2] / size, shape[3] / size];
            let [height, width] = [shape[2], shape[3]];
            place = Box::new(move |[row, column], [channel, y, x]| {
                (channel * height + row * size + y) * width + column * size + x
            });
        }
        let patches = (0..grid[0]).flat_map(|row| (0..grid[1]).map(move |column| [row, column]));
        let pixels: Vec<[usize; 3]> =
            (0..3 * area).map(|at| [at / area, at % area / size, at % size]).collect();
        let values = patches
            .flat_map(|patch| pixels.iter().map(|pixel| values[place(patch, *pixel)]).collect::<Vec<_>>());
        Patches { grid: grid.map(|side| side as u32), values: values.collect() }
    }
}

fn norm(kind: NormKind, eps: f32, name: &str) -> NormConfig {
    NormConfig { kind, eps, name: name.to_owned() }
}

fn linear(name: &str, out: usize) -> ProjectorStep {
    ProjectorStep::Linear { name: name.to_owned(), out, transposed: false }
}

fn rope(theta: f32) -> TowerRope {
    TowerRope { theta, frequencies: RopeFrequencies::Same, pairs: RopePairs::Halves, columns_first: false }
}

const JOIN: ProjectorStep = ProjectorStep::Join { channels_first: false };

fn qwen3(deepstack: &[usize]) -> TowerConfig {
    let merger = |name: &str, is_first: bool| {
        let norm_step =
            |name: &str| ProjectorStep::Norm(norm(NormKind::Layer, 1e-6, &format!("{name}.norm")));
        let mut steps = if is_first { vec![norm_step(name), JOIN] } else { vec![JOIN, norm_step(name)] };
        let [first, second] = [1, 2].map(|at| format!("{name}.linear_fc{at}"));
        steps.extend([
            linear(&first, 128),
            ProjectorStep::Activation(Activation::GeluErf),
            linear(&second, 32),
        ]);
        steps
    };
    let level = |(index, &layer): (usize, &usize)| {
        let projector = merger(&format!("model.visual.deepstack_merger_list.{index}"), false);
        Deepstack { layer, projector }
    };
    TowerConfig {
        hidden_size: 32,
        num_layers: 4,
        num_heads: 2,
        num_kv_heads: 2,
        head_dim: 16,
        intermediate_size: 64,
        activation: Activation::GeluTanh,
        is_gated: false,
        norm: NormKind::Layer,
        norm_eps: 1e-6,
        post_norms: false,
        layer_scales: false,
        qk_norm: TowerQkNorm::None,
        value_norm: false,
        score_scale: 0.25,
        rope: Some(rope(10_000.0)),
        windows: None,
        clamps: false,
        patches: PatchEmbedding {
            size: 16,
            frames: 2,
            channels_last: false,
            scale: [1.0, 0.0],
            pixel_norm: None,
            norm: None,
            position_norm: None,
        },
        positions: Positions::Square { side: 6, resampling: Resampling::Corners },
        class_row: false,
        merge: 2,
        projector: merger("model.visual.merger", true),
        deepstack: deepstack.iter().enumerate().map(level).collect(),
        output_size: 32,
        names: TowerNames {
            prefix: "model.visual.".to_owned(),
            patches: "patch_embed.proj",
            positions: "pos_embed",
            layers: "blocks",
            fused_qkv: "attn.qkv",
            attention_output: "attn.proj",
            gate: "mlp.gate_proj",
            up: "mlp.linear_fc1",
            down: "mlp.linear_fc2",
            norms: ["norm1", "norm2"],
            ..TowerNames::default()
        },
    }
}

fn qwen2_5() -> TowerConfig {
    let base = qwen3(&[]);
    let projector = vec![
        ProjectorStep::Norm(norm(NormKind::Rms, 1e-6, "visual.merger.ln_q")),
        JOIN,
        linear("visual.merger.mlp.0", 128),
        ProjectorStep::Activation(Activation::GeluErf),
        linear("visual.merger.mlp.2", 32),
    ];
    TowerConfig {
        intermediate_size: 48,
        activation: Activation::Silu,
        is_gated: true,
        norm: NormKind::Rms,
        windows: Some(Windows { side: 4, full_layers: vec![1, 3] }),
        patches: PatchEmbedding { size: 14, ..base.patches },
        positions: Positions::None,
        projector,
        names: TowerNames {
            prefix: "visual.".to_owned(),
            up: "mlp.up_proj",
            down: "mlp.down_proj",
            ..base.names
        },
        ..base
    }
}

fn glm() -> TowerConfig {
    let base = qwen2_5();
    let name = |name: &str| format!("model.visual.{name}");
    let merger = |part: &str| name(&format!("merger.{part}"));
    let projector = vec![
        ProjectorStep::Norm(norm(NormKind::Rms, 1e-5, &name("post_layernorm"))),
        ProjectorStep::Join { channels_first: true },
        linear(&name("downsample"), 32),
        linear(&merger("proj"), 32),
        ProjectorStep::Norm(norm(NormKind::Layer, 1e-5, &merger("post_projection_norm"))),
        ProjectorStep::Activation(Activation::GeluErf),
        ProjectorStep::Gated {
            names: ["gate_proj", "up_proj", "down_proj"].map(merger),
            inner: 48,
            out: 32,
            activation: Activation::Silu,
        },
    ];
    TowerConfig {
        num_layers: 3,
        intermediate_size: 32,
        norm_eps: 1e-5,
        windows: None,
        patches: PatchEmbedding {
            norm: Some(norm(NormKind::Rms, 1e-5, &name("post_conv_layernorm"))),
            ..base.patches
        },
        positions: Positions::Square { side: 4, resampling: Resampling::Cubic },
        projector,
        names: TowerNames { prefix: name(""), positions: "embeddings.position_embedding", ..base.names },
        ..base
    }
}

fn gemma3() -> TowerConfig {
    let base = qwen3(&[]);
    let projector = vec![
        ProjectorStep::Norm(norm(NormKind::Layer, 1e-6, "vision_tower.vision_model.post_layernorm")),
        ProjectorStep::Average { factor: 1.0 },
        ProjectorStep::Norm(norm(NormKind::RmsAroundOne, 1e-6, "multi_modal_projector.mm_soft_emb_norm")),
        ProjectorStep::Linear {
            name: "multi_modal_projector.mm_input_projection_weight".to_owned(),
            out: 32,
            transposed: true,
        },
    ];
    TowerConfig {
        num_layers: 3,
        rope: None,
        patches: PatchEmbedding { size: 14, frames: 1, ..base.patches },
        positions: Positions::Square { side: 4, resampling: Resampling::None },
        projector,
        names: TowerNames {
            prefix: "vision_tower.vision_model.".to_owned(),
            patches: "embeddings.patch_embedding",
            positions: "embeddings.position_embedding",
            layers: "encoder.layers",
            qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            attention_output: "self_attn.out_proj",
            up: "mlp.fc1",
            down: "mlp.fc2",
            norms: ["layer_norm1", "layer_norm2"],
            ..TowerNames::default()
        },
        ..base
    }
}

fn gemma4(is_standardised: bool) -> TowerConfig {
    let base = gemma3();
    let name = |name: &str| format!("model.vision_tower.{name}");
    let mut projector = vec![ProjectorStep::Average { factor: 32f32.sqrt() }];
    if is_standardised {
        projector.push(ProjectorStep::Standardise { bias: name("std_bias"), scale: name("std_scale") });
    }
    projector.extend([
        ProjectorStep::Norm(norm(NormKind::RmsAlone, 1e-6, "")),
        linear("model.embed_vision.embedding_projection", 32),
    ]);
    TowerConfig {
        is_gated: true,
        norm: NormKind::Rms,
        post_norms: true,
        qk_norm: TowerQkNorm::PerHead,
        value_norm: true,
        score_scale: 1.0,
        rope: Some(TowerRope { pairs: RopePairs::Quarters, columns_first: true, ..rope(100.0) }),
        clamps: !is_standardised,
        patches: PatchEmbedding { size: 4, channels_last: true, scale: [2.0, -1.0], ..base.patches },
        positions: Positions::Axes { len: 256, interleaved: false },
        merge: 3,
        projector,
        names: TowerNames {
            prefix: name(""),
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
            ..base.names
        },
        ..base
    }
}

fn gemma4_unified() -> TowerConfig {
    let base = gemma4(true);
    let name = |name: &str| format!("model.vision_embedder.{name}");
    let layer_norm = |part: &str| Some(norm(NormKind::Layer, 1e-5, &name(part)));
    TowerConfig {
        num_layers: 0,
        patches: PatchEmbedding {
            size: 12,
            scale: [1.0, 0.0],
            pixel_norm: layer_norm("patch_ln1"),
            norm: layer_norm("patch_ln2"),
            position_norm: layer_norm("pos_norm"),
            ..base.patches
        },
        positions: Positions::Axes { len: 64, interleaved: true },
        merge: 1,
        projector: base.projector[2..].to_vec(),
        names: TowerNames {
            prefix: name(""),
            patches: "patch_dense",
            positions: "pos_embedding",
            ..base.names
        },
        ..base
    }
}

fn families() -> Vec<(&'static str, TowerConfig)> {
    vec![
        ("qwen3-vl", qwen3(&[0, 1, 2])),
        ("qwen3-vl-moe", qwen3(&[1, 3])),
        ("qwen3.5", qwen3(&[])),
        ("qwen3.5-moe", qwen3(&[])),
        ("qwen2.5-vl", qwen2_5()),
        ("glm4.1v", glm()),
        ("gemma3", gemma3()),
        ("gemma4", gemma4(true)),
        ("gemma4-moe", gemma4(true)),
        ("gemma4-e", gemma4(false)),
        ("gemma4-unified", gemma4_unified()),
    ]
}

/// Loads a family's tower, its matrices as they are or in another type.
fn tower(
    folder: &Path,
    config: &TowerConfig,
    threads: usize,
    isa: Isa,
    dtype: Option<Dtype>,
) -> Result<Vit, LoadError> {
    let source = Safetensors::open(folder)?;
    let options = CpuOptions { threads, threads_batch: threads, isa, ..CpuOptions::new(1) };
    let cpu = Cpu::with(options).unwrap();
    config.check()?;
    let convert = |name: &str, _, tensor: crate::tensor::HostTensor| {
        let wanted = dtype.unwrap_or(tensor.dtype);
        quantize::convert(name, &tensor, wanted)
    };
    let weights = TowerFile::new(&cpu, &source, &convert).weights(config)?;
    Ok(Vit { cpu, config: config.clone(), weights })
}

fn rows(vit: Vit, tiles: Vec<Patches>, slice_work: Option<usize>) -> (ImageRows, usize) {
    let mut job = Job::new(Arc::new(Mutex::new(vit)), tiles, slice_work).unwrap();
    let mut slices = 0;
    loop {
        slices += 1;
        let rows = job.advance().unwrap();
        let (done, all) = job.progress();
        assert_eq!(rows.is_some(), done == all);
        if let Some(rows) = rows {
            return (rows, slices);
        }
    }
}

fn largest_difference(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).map(|(got, expected)| (got - expected).abs()).fold(0.0, f32::max)
}

#[test]
fn rows_and_deepstack_are_the_references() {
    let mut wrong = Vec::new();
    for (family, config) in families() {
        let Some(folder) = fixture(family) else { continue };
        let golden = Golden::read(&folder);
        assert!(golden.images().len() >= 9, "{family}");
        // Gemma 4 unified divides patches of nearly one colour by their own deviation, which is as small as the roundings.
        let exact = if family == "gemma4-unified" { 5e-3 } else { 1e-4 };
        for (dtype, most) in [(Some(Dtype::F32), exact), (None, 1e-2)] {
            for image in golden.images() {
                let patches = golden.patches(&image, &config);
                let vit = tower(&folder, &config, 2, isa(), dtype).unwrap();
                let (rows, _) = rows(vit, vec![patches], None);
                let expected = |what: &str| golden.get(&format!("prompt/image:{image}/{what}"));
                let difference = largest_difference(&rows.embeddings, &expected("image_rows").unwrap().1);
                let deepstack =
                    expected("deepstack").map(|(_, deep)| largest_difference(&rows.deep.concat(), deep));
                let worst = difference.max(deepstack.unwrap_or(0.0));
                if worst.is_nan() || worst > most {
                    wrong.push(format!("{family} {image} {dtype:?}: {worst:e}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn assert_same_bits(got: &ImageRows, expected: &ImageRows, what: &str) {
    let bits = |rows: &ImageRows| -> Vec<u32> {
        rows.embeddings.iter().chain(rows.deep.iter().flatten()).map(|value| value.to_bits()).collect()
    };
    assert!(!got.is_empty() && bits(got) == bits(expected), "{what}");
}

#[test]
fn threads_processors_slices_and_other_jobs_change_no_bit() {
    for (family, config) in families() {
        let Some(folder) = fixture(family) else { continue };
        let golden = Golden::read(&folder);
        let tiles = || ["large.png", "noise.png"].map(|image| golden.patches(image, &config)).to_vec();
        let load = |threads, isa| tower(&folder, &config, threads, isa, None).unwrap();
        let (expected, slices) = rows(load(1, Isa::Scalar), tiles(), None);
        assert_eq!(slices, 1, "{family}: small tiles take one slice");
        for isa in Isa::available() {
            for threads in [1, 2] {
                let (got, slices) = rows(load(threads, isa), tiles(), Some(1));
                assert!(slices >= 2 + 2 * config.num_layers, "{family}: {slices} slices");
                assert_same_bits(&got, &expected, &format!("{family} {isa:?} {threads} threads"));
            }
        }
        let vit = Arc::new(Mutex::new(load(2, Isa::Scalar)));
        let mut jobs = [tiles(), vec![golden.patches("tall.png", &config)]]
            .map(|tiles| Job::new(vit.clone(), tiles, Some(1)).unwrap());
        let [mut got, mut other] = [None, None];
        while got.is_none() {
            got = jobs[0].advance().unwrap();
            if other.is_none() {
                other = jobs[1].advance().unwrap();
            }
        }
        assert_same_bits(&got.unwrap(), &expected, &format!("{family} beside another"));
    }
}

/// Spoils a setting.
type Change = fn(&mut TowerConfig);

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let cases: [(&str, Change); 8] = [
        ("merge", |config| config.merge = 0),
        ("num_heads", |config| config.num_heads = 0),
        ("num_kv_heads", |config| config.num_kv_heads = 3),
        ("head_dim", |config| config.head_dim = 18),
        ("window", |config| config.windows = Some(Windows { side: 0, full_layers: Vec::new() })),
        ("patch_size", |config| config.patches.size = 0),
        ("position_embedding", |config| {
            config.positions = Positions::Square { side: 0, resampling: Resampling::Cubic };
        }),
        ("deepstack layer", |config| config.deepstack[0].layer = 4),
    ];
    assert!(qwen3(&[0, 1, 2]).check().is_ok());
    for (key, change) in cases {
        let mut config = qwen3(&[0, 1, 2]);
        change(&mut config);
        let error = config.check().unwrap_err().to_string();
        assert!(error.contains(&format!("vision {key}\"")), "{key}: {error}");
    }
}

#[test]
fn patches_of_another_form_are_refused() {
    let Some(folder) = fixture("gemma3") else { return };
    let config = gemma3();
    let golden = Golden::read(&folder);
    let vit = Arc::new(Mutex::new(tower(&folder, &config, 1, Isa::Scalar, None).unwrap()));
    let patches = golden.patches("noise.png", &config);
    for (grid, len) in [([0, 4], 0), ([4, 3], 12), ([4, 4], 15), ([8, 4], 32), ([u32::MAX; 2], 16)] {
        let values = patches.values.iter().copied().cycle().take(len * 3 * 14 * 14).collect();
        assert!(Job::new(vit.clone(), vec![Patches { grid, values }], None).is_err(), "{grid:?}");
    }
    assert!(Job::new(vit, vec![patches], None).is_ok());
}
