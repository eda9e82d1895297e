//! Promise: gpt-oss is the same model in each of its published forms: experts as floats, experts in MXFP4 as two tensors of
//! bytes, and GGUF with MXFP4 blocks. No fixture has the last two: they are written here from the checkpoint, whose experts are
//! first rounded to what MXFP4 can hold, under the names of the published files.

use half::bf16;
use safetensors::Dtype;

use crate::common::convert::facts;
use crate::common::prelude::*;

const F32: u32 = 0;
const MXFP4: u32 = 39;

const LAYERS: usize = 4;
const EXPERTS: usize = 4;
const HIDDEN: usize = 32;
const INNER: usize = 96;

/// Values of 4-bit floats by code.
const VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// 32 values that share a scale.
struct Block {
    exponent: u8,
    codes: [u8; 32],
}

impl Block {
    /// The nearest there is, with the largest value just within reach.
    fn of(values: &[f32]) -> Self {
        let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        let exponent = (127.0 + (largest / 6.0).log2().ceil()) as u8;
        let scale = 2f32.powi(i32::from(exponent) - 127);
        let nearest = |value: &f32| {
            let distance = |code: usize| (VALUES[code] * scale - value).abs();
            (0..16).min_by(|a, b| distance(*a).total_cmp(&distance(*b))).expect("16 codes") as u8
        };
        let codes: Vec<u8> = values.iter().map(nearest).collect();
        Self { exponent, codes: codes.try_into().expect("32 values") }
    }

    fn values(&self) -> impl Iterator<Item = f32> + '_ {
        let scale = 2f32.powi(i32::from(self.exponent) - 127);
        self.codes.iter().map(move |&code| VALUES[usize::from(code)] * scale)
    }

    /// Two neighbours a byte, the first in the low nibble.
    fn pairs(&self) -> impl Iterator<Item = u8> + '_ {
        self.codes.chunks(2).map(|pair| pair[0] | pair[1] << 4)
    }

    /// ggml's: the scale, then the first half in the low nibbles.
    fn ggml(&self) -> impl Iterator<Item = u8> + '_ {
        let (low, high) = self.codes.split_at(16);
        std::iter::once(self.exponent).chain(low.iter().zip(high).map(|(low, high)| low | high << 4))
    }
}

/// A stack of matrices `[rows, cols]` in blocks.
struct Stack {
    rows: usize,
    cols: usize,
    blocks: Vec<Block>,
}

impl Stack {
    /// From the checkpoint, where matrices are `[cols, rows]`.
    fn read(source: &Safetensors, name: &str, [rows, cols]: [usize; 2]) -> Self {
        let stored = floats(source, name);
        let value = |at: usize| {
            let (expert, row, col) = (at / (rows * cols), at / cols % rows, at % cols);
            stored[(expert * cols + col) * rows + row]
        };
        let values: Vec<f32> = (0..EXPERTS * rows * cols).map(value).collect();
        Self { rows, cols, blocks: values.chunks(32).map(Block::of).collect() }
    }

    /// As floats in the checkpoint's order.
    fn transposed(&self) -> Vec<u8> {
        let values: Vec<f32> = self.blocks.iter().flat_map(Block::values).collect();
        let (rows, cols) = (self.rows, self.cols);
        let value = |at: usize| {
            let (expert, col, row) = (at / (rows * cols), at / rows % cols, at % rows);
            values[(expert * rows + row) * cols + col]
        };
        (0..values.len()).flat_map(|at| bf16::from_f32(value(at)).to_le_bytes()).collect()
    }

    /// Blocks of every `step`th row from `first` on, as GGUF has them.
    fn ggml_rows(&self, first: usize, step: usize) -> Vec<u8> {
        let per_row = self.cols / 32;
        let rows = (0..EXPERTS * self.rows).filter(|row| row % self.rows % step == first);
        rows.flat_map(|row| self.blocks[row * per_row..][..per_row].iter().flat_map(Block::ggml)).collect()
    }
}

fn floats(source: &Safetensors, name: &str) -> Vec<f32> {
    let tensor = source.tensor(name).expect("readable").unwrap_or_else(|| panic!("no {name}"));
    tensor.bytes.as_chunks().0.iter().map(|&raw| bf16::from_le_bytes(raw).to_f32()).collect()
}

fn stacks(source: &Safetensors, layer: usize) -> [(&'static str, Stack); 2] {
    let read =
        |part, shape| (part, Stack::read(source, &format!("model.layers.{layer}.mlp.experts.{part}"), shape));
    [read("gate_up_proj", [2 * INNER, HIDDEN]), read("down_proj", [HIDDEN, INNER])]
}

/// A copy of the checkpoint with its experts rounded, as floats or as bytes.
fn folder(checkpoint: &Path, as_bytes: bool) -> TempDir {
    let copy = tempfile::tempdir().expect("tempdir");
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(checkpoint.join(file), copy.path().join(file)).expect("copied");
    }
    let source = Safetensors::open(checkpoint).expect("opens");
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for name in source.names() {
        let tensor = source.tensor(&name).expect("readable").expect("listed");
        tensors.push((name.to_string(), Dtype::BF16, tensor.shape, tensor.bytes.to_vec()));
    }
    for layer in 0..LAYERS {
        for (part, stack) in stacks(&source, layer) {
            let name = format!("model.layers.{layer}.mlp.experts.{part}");
            let at = tensors.iter().position(|(other, ..)| *other == name).expect("listed");
            let (name, _, shape, _) = tensors.swap_remove(at);
            if as_bytes {
                let blocks = vec![EXPERTS, stack.rows, stack.cols / 32];
                let bytes = stack.blocks.iter().flat_map(Block::pairs).collect();
                tensors.push((format!("{name}_blocks"), Dtype::U8, [&blocks[..], &[16]].concat(), bytes));
                let scales = stack.blocks.iter().map(|block| block.exponent).collect();
                tensors.push((format!("{name}_scales"), Dtype::U8, blocks, scales));
            } else {
                tensors.push((name, Dtype::BF16, shape, stack.transposed()));
            }
        }
    }
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).expect("fits its shape"))
    });
    let file = copy.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &file).expect("writable");
    copy
}

fn write_gguf(checkpoint: &Path, path: &Path) {
    let source = Safetensors::open(checkpoint).expect("opens");
    let copied = |file: GgufBuilder, from: &str, to: &str| {
        let (shape, _) = source.describe(from).unwrap_or_else(|| panic!("no {from}"));
        let bytes: Vec<u8> = floats(&source, from).iter().flat_map(|value| value.to_le_bytes()).collect();
        file.tensor(to, &shape, F32, &bytes)
    };
    let mut file = facts("gpt-oss", &[]);
    for (from, to) in
        [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")]
    {
        file = copied(file, &format!("{from}.weight"), &format!("{to}.weight"));
    }
    for layer in 0..LAYERS {
        let ours = |part: &str| format!("model.layers.{layer}.{part}");
        let theirs = |part: &str| format!("blk.{layer}.{part}");
        for (from, to) in [
            ("input_layernorm.weight", "attn_norm.weight"),
            ("post_attention_layernorm.weight", "post_attention_norm.weight"),
            ("self_attn.sinks", "attn_sinks.weight"),
            ("mlp.router.weight", "ffn_gate_inp.weight"),
            ("mlp.router.bias", "ffn_gate_inp.bias"),
            ("mlp.experts.down_proj_bias", "ffn_down_exps.bias"),
        ] {
            file = copied(file, &ours(from), &theirs(to));
        }
        for (from, to) in
            [("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v"), ("o_proj", "attn_output")]
        {
            for kind in ["weight", "bias"] {
                file = copied(
                    file,
                    &ours(&format!("self_attn.{from}.{kind}")),
                    &theirs(&format!("{to}.{kind}")),
                );
            }
        }
        let [(_, both), (_, down)] = stacks(&source, layer);
        let biases = floats(&source, &ours("mlp.experts.gate_up_proj_bias"));
        for (first, part) in [(0, "ffn_gate_exps"), (1, "ffn_up_exps")] {
            let bias: Vec<u8> =
                biases.iter().skip(first).step_by(2).flat_map(|value| value.to_le_bytes()).collect();
            file = file.tensor(&theirs(&format!("{part}.bias")), &[EXPERTS, INNER], F32, &bias);
            let shape = [EXPERTS, INNER, HIDDEN];
            file = file.tensor(&theirs(&format!("{part}.weight")), &shape, MXFP4, &both.ggml_rows(first, 2));
        }
        let shape = [EXPERTS, HIDDEN, INNER];
        file = file.tensor(&theirs("ffn_down_exps.weight"), &shape, MXFP4, &down.ggml_rows(0, 1));
    }
    std::fs::write(path, file.build()).expect("writable");
}

#[test]
fn floats_bytes_and_gguf_are_one_model() {
    let checkpoint = parity_folder().join("gpt-oss");
    let (as_floats, as_bytes) = (folder(&checkpoint, false), folder(&checkpoint, true));
    let gguf = as_bytes.path().join("gpt-oss.gguf");
    write_gguf(&checkpoint, &gguf);
    let tokens = &golden_prompts(&checkpoint)[2].tokens;
    let logits = |path: &Path, options: &LoadOptions| {
        let mut model = load_model(path, options).unwrap_or_else(|error| panic!("{error}")).model;
        let whole = Fed::new(&mut *model).feed(tokens, usize::MAX);
        assert_eq!(Fed::new(&mut *model).feed(tokens, 7), whole, "in chunks");
        whole
    };
    let expected = logits(as_floats.path(), &exact());
    assert_eq!(logits(as_bytes.path(), &exact()), expected, "MXFP4 in safetensors, widened");
    assert_eq!(logits(&gguf, &exact()), expected, "MXFP4 in GGUF, widened");
    // As stored: activations are rounded, so that few logits move much; the GGUF's other matrices are f32, those here bf16.
    let stored = LoadOptions { dtype: None, ..exact() };
    for (name, path) in [("safetensors", as_bytes.path()), ("gguf", &*gguf)] {
        let packed = logits(path, &stored);
        let distance = relative_distance(&packed, &expected);
        eprintln!("gpt-oss as stored in {name}: {distance:.1e}");
        assert!(distance > 0.0 && distance < 0.1, "{name}: {distance}");
    }
}
