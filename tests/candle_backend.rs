//! Promise: the candle backend computes what the CPU backend computes. Operation by operation on random inputs, and whole
//! models against the reference's logits. Run on candle's CPU device, which shares all of our code with its GPUs.

use std::fmt::Write;
use std::ops::Range;

use candle_core::Device;
use llmctl_kernel::attention::ScoreRule;
use llmctl_models::backend::candle::{Candle, DeviceKind};
use llmctl_models::backend::cpu::Cpu;
use llmctl_models::backend::{
    Activation, AttentionSpec, Backend, ConvSpec, DeltaShape, DeltaSpec, IndexerSpec, KeyBlocks, KvLayout,
    KvShape, KvValues, LowRankChange, Product, Reach, Recurrence, RowSpan, SelectedKeys, SsmShape, SsmSpec,
    Store, StoreShape, TextHeads, WeightedRows,
};
use llmctl_models::load;
use llmctl_models::load::quantize::convert;
use llmctl_models::load::{AskedTask, Pooling};
use llmctl_models::model::TextIds;
use llmctl_models::tensor::HostTensor;

use crate::common;
use crate::common::golden::{GoldenPrompt, checkpoint, feed, last_logits, reference_checkpoint};
use crate::common::prelude::*;
use crate::embedder;
use crate::parity_table::tolerance;

/// Float operations: relative to the largest value of the result, for another order of summation and another `exp`.
const FLOAT: f32 = 2e-6;

/// Recurrent states: prompts are taken in by chunks, whose sums of decays are differences of larger ones. Measured: at most 1.3e-6.
const STATES: f32 = 4e-6;

/// Of two-byte weights, which the CPU backend takes as 14 bits of the largest of 32 values, and activations too.
const HALF: f32 = 2e-4;
/// Products with quantised matrices: candle rounds the input to 8 bits per block too, our kernels do not.
const BLOCKS: f32 = 1e-2;
/// Checkpoints whose logits are further from the reference's than on the CPU, which computes in f64 what states take in; norms
/// of random weights magnify the rounding. Measured: 1.1e-4 and 1.9e-4, on the CPU 8.2e-5 and 9.2e-5.
const ROUNDED_STATES: [(&str, f32); 2] = [("qwen3.5", 2e-4), ("qwen3.5-moe", 3e-4)];
/// Logits of quantised models, root mean square relative to the logits': [`BLOCKS`] through all layers. Measured at most
/// 5.6e-2 on these checkpoints, whose rows are one to three blocks; rounding the weights to q8_0 moves them by 7e-2.
const BLOCK_LOGITS: f32 = 8e-2;

/// Bound of the logits of float models, absolute: that of the parity table, with few exceptions.
pub fn bound(family: &str) -> f32 {
    let rounded = ROUNDED_STATES.iter().find(|row| row.0 == family);
    rounded.map_or_else(|| tolerance(family), |row| row.1)
}

/// Failures of all families, reported together.
#[derive(Default)]
struct Wrong(Vec<String>);

impl Wrong {
    fn check(&mut self, what: String, distance: f32, bound: f32) {
        if distance.is_nan() || distance > bound {
            self.0.push(format!("{what}: {distance:e} above {bound:e}"));
        }
    }

    #[track_caller]
    fn assert_none(&self) {
        assert!(self.0.is_empty(), "{}", self.0.join("\n"));
    }
}

fn candle() -> Candle {
    Candle::new(Device::Cpu).unwrap()
}

fn cpu() -> Cpu {
    Cpu::new(1).unwrap()
}

/// Loads through candle on the CPU; matrices in f32 or as the file has them.
fn load_candle(path: &Path, dtype: Option<Dtype>) -> Box<dyn Model> {
    let options = LoadOptions { device: load::Device::Candle(DeviceKind::Cpu), dtype, ..exact() };
    load_model(path, &options).unwrap_or_else(|error| panic!("{}: {error}", path.display())).model
}

#[test]
fn candle_reproduces_the_reference_in_any_chunks() {
    let mut wrong = Wrong::default();
    for family in families() {
        let (folder, _copy) = reference_checkpoint(family);
        let mut model = load_candle(&folder, Some(Dtype::F32));
        let mut line = format!("{family:<13}");
        for prompt in golden_prompts(&folder) {
            for chunk in [usize::MAX, 1, 7, 64] {
                let logits = Fed::new(&mut *model).feed(&prompt.tokens, chunk);
                let worst = worst_difference(&prompt, &logits);
                let _ = write!(line, " {worst:.1e}");
                wrong.check(format!("{family} {} in chunks of {chunk}", prompt.name), worst, bound(family));
            }
        }
        eprintln!("{line}");
    }
    wrong.assert_none();
}

/// Sequences share every step with chunks of unequal length, single rows among them, and take pages in turns, so that none
/// lies in consecutive pages.
#[test]
fn candle_keeps_the_sequences_of_a_batch_apart() {
    let mut wrong = Wrong::default();
    for family in families() {
        let (folder, _copy) = reference_checkpoint(family);
        let mut model = load_candle(&folder, Some(Dtype::F32));
        let prompts = golden_prompts(&folder);
        let prompts = [2, 1, 0, 2, 2].map(|index| &prompts[index]);
        for (prompt, logits) in prompts.iter().zip(feed_together(&mut *model, &prompts)) {
            wrong.check(
                format!("{family} {}", prompt.name),
                worst_difference(prompt, &logits),
                bound(family),
            );
        }
    }
    wrong.assert_none();
}

#[test]
fn candle_misses_no_rows_that_are_not_wanted() {
    let mut wrong = Wrong::default();
    for family in families() {
        let folder = checkpoint(family);
        let prompt = golden_prompts(&folder).pop().expect("the long prompt").tokens;
        let [all, last] = [true, false].map(|all| {
            let mut model = load_candle(&folder, Some(Dtype::F32));
            let mut table = PageTable::new(&page_pool(&*model, 64));
            last_logits(&mut *model, &mut table, &prompt, all)
        });
        assert!(!all.is_empty(), "{family}");
        wrong.check(family.to_owned(), largest_difference(&all, &last), bound(family));
    }
    wrong.assert_none();
}

#[test]
fn candle_keeps_kv_in_f16_instead_of_blocks_and_says_so() {
    let load = |kv_type| {
        let device = load::Device::Candle(DeviceKind::Cpu);
        load_model(&parity_folder().join("llama"), &LoadOptions { device, kv_type, ..exact() })
            .expect("loads")
    };
    let [mut blocks, mut halves] = [KvType::Q6_0, KvType::F16].map(load);
    let notices: Vec<String> = blocks.notices.iter().map(ToString::to_string).collect();
    assert!(notices.iter().any(|notice| notice.contains("q8_0") && notice.contains("f16")), "{notices:?}");
    assert!(halves.notices.is_empty(), "{:?}", halves.notices);
    assert_eq!(blocks.fingerprint, halves.fingerprint);
    let tokens = &golden_prompts(&parity_folder().join("llama"))[1].tokens;
    let [blocks, halves] =
        [&mut blocks, &mut halves].map(|loaded| Fed::new(&mut *loaded.model).feed(tokens, usize::MAX));
    assert_eq!(blocks, halves);
}

/// Two sequences share their beginning up to the middle of a page; the first to go on gets a copy of it.
#[test]
fn forked_sequences_do_not_write_into_each_other() {
    let families = ["gemma3", "qwen3.5", "nemotron-h-moe", "kimi-linear", "mistral4", "deepseek3.2"];
    let each =
        families.into_iter().flat_map(|family| [KvType::F32, KvType::F16].map(|kv_type| (family, kv_type)));
    for (family, mut model, kv_type) in each.flat_map(|(family, kv_type)| {
        let devices = [load::Device::Cpu(common::cpu(1)), load::Device::Candle(DeviceKind::Cpu)];
        devices.map(|device| {
            let options = LoadOptions { device, kv_type, ..exact() };
            (family, load_model(&checkpoint(family), &options).expect("loads").model, kv_type)
        })
    }) {
        let folder = checkpoint(family);
        let tokens = &golden_prompts(&folder)[2].tokens;
        let (shared, rest) = tokens.split_at(50);
        let other: Vec<u32> = rest.iter().rev().copied().collect();
        let pool = page_pool(&*model, 32);
        let mut alone = |tokens| {
            let mut table = PageTable::new(&pool);
            feed(&mut *model, &mut table, shared);
            feed(&mut *model, &mut table, tokens)
        };
        let expected = [alone(rest), alone(&other)];
        let mut table = PageTable::new(&pool);
        feed(&mut *model, &mut table, shared);
        let mut fork = table.fork();
        let forked = feed(&mut *model, &mut fork, &other);
        let kept = feed(&mut *model, &mut table, rest);
        assert_eq!([kept, forked], expected, "{family} {}", kv_type.name());
    }
}

/// Hidden states of texts, relative to the largest: encoders with whole attention and with windows, and decoders. Measured: at most 8.4e-6.
const TEXTS: f32 = 2e-5;

/// Texts of unequal length and pairs share a step.
#[test]
fn candle_computes_the_hidden_states_of_texts() {
    let encoders = embedder::FAMILIES.into_iter().filter_map(embedder::encoder);
    let decoders = ["qwen3", "gemma2", "gemma3", "cohere2", "olmo2", "qwen3-moe", "smollm3"].map(checkpoint);
    let mut wrong = Wrong::default();
    for path in encoders.chain(decoders) {
        let [expected, got] = [exact(), on_candle()].map(|options| {
            let loaded = embedder::load(&path, Some(AskedTask::Pooling(Pooling::Mean)), &options);
            let mut model = loaded.unwrap_or_else(|error| panic!("{}: {error}", path.display())).model;
            let ids = |len: usize| (0..len).map(|at| ((at * 7 + len) % 300 + 3) as u32).collect();
            let texts: [Vec<u32>; 5] = [1, 9, 130, 64, 200].map(ids);
            let texts = texts.each_ref().map(|ids| TextIds { ids, second: ids.len().div_ceil(2) });
            let (mut together, mut alone) = (Vec::new(), Vec::new());
            model.encode(&texts, &mut together).expect("hidden states");
            model.encode(&texts[2..3], &mut alone).expect("hidden states");
            [together, alone]
        });
        for (expected, got) in expected.iter().zip(&got) {
            let relative = largest_difference(got, expected) / largest(expected);
            eprintln!("{} {relative:.1e}", path.display());
            wrong.check(path.display().to_string(), relative, TEXTS);
        }
    }
    wrong.assert_none();
}

/// Logits of all positions of each prompt, all of them computed in the same steps.
fn feed_together(model: &mut dyn Model, prompts: &[&GoldenPrompt]) -> Vec<Vec<f32>> {
    const CHUNKS: [usize; 6] = [13, 1, 1, 32, 1, 5];
    let pool = page_pool(model, 64);
    let mut tables: Vec<PageTable> = prompts.iter().map(|_| PageTable::new(&pool)).collect();
    let mut all = vec![Vec::new(); prompts.len()];
    for step in 0.. {
        let mut rows = Vec::new();
        for (sequence, (prompt, table)) in prompts.iter().zip(&mut tables).enumerate() {
            let start = table.len();
            let end = prompt.tokens.len().min(start + CHUNKS[(step + sequence) % CHUNKS.len()]);
            table.extend(end - start).unwrap();
            let row = |position| Row::known(prompt.tokens[position], position, sequence, true);
            rows.extend((start..end).map(row));
        }
        if rows.is_empty() {
            break;
        }
        let tables: Vec<&PageTable> = tables.iter().collect();
        let logits = model.forward(&Batch::new(&rows, &tables)).unwrap();
        for (index, row) in rows.iter().enumerate() {
            all[row.sequence].extend_from_slice(logits.row(index));
        }
    }
    all
}

/// The blocks mean the same to both, as widening them on load shows; multiplied as they are, candle's rounding of the
/// activations comes on top.
#[test]
fn candle_reads_gguf_as_the_cpu_backend_does() {
    let (mut seen, mut wrong) = (Vec::new(), Wrong::default());
    for (family, dtype) in families().flat_map(|family| ["f32", "q8_0", "q4_0"].map(|dtype| (family, dtype)))
    {
        let Some(path) = parity_gguf(&format!("{family}-{dtype}.gguf")) else { continue };
        seen.push(dtype);
        let mut line = format!("{family:<13} {dtype:<4}");
        let mut expected = load_model(&path, &exact()).unwrap().model;
        let (mut widened, mut model) = (load_candle(&path, Some(Dtype::F32)), load_candle(&path, None));
        for prompt in golden_prompts(&checkpoint(family)) {
            let expected = Fed::new(&mut *expected).feed(&prompt.tokens, usize::MAX);
            let exact = largest_difference(&Fed::new(&mut *widened).feed(&prompt.tokens, 7), &expected);
            let rounded = relative_distance(&Fed::new(&mut *model).feed(&prompt.tokens, 7), &expected);
            let _ = write!(line, "  {exact:.1e} {rounded:.1e}");
            let what = format!("{family} {dtype} {}", prompt.name);
            // Each may be as far from the reference, on opposite sides.
            wrong.check(format!("{what}, widened"), exact, 2.0 * bound(family));
            wrong.check(what, rounded, BLOCK_LOGITS);
        }
        eprintln!("{line}");
    }
    wrong.assert_none();
    assert!(["f32", "q8_0", "q4_0"].iter().all(|dtype| seen.contains(dtype)), "{seen:?}");
}

/// The result of one operation.
struct Output {
    what: String,
    tolerance: f32,
    values: Vec<f32>,
}

/// Runs operations on inputs that depend on the order of the calls only, not on the backend.
struct Bench<'a, B: Backend<Buffer: Clone>> {
    backend: &'a B,
    random: u32,
    outputs: Vec<Output>,
}

impl<B: Backend<Buffer: Clone>> Bench<'_, B> {
    /// Uniform in -1..1 (xorshift).
    fn random(&mut self, count: usize) -> Vec<f32> {
        let mut next = || {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 17;
            self.random ^= self.random << 5;
            self.random as f32 / u32::MAX as f32 * 2.0 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    fn matrix(&mut self, dtype: Dtype, rows: usize, cols: usize) -> HostTensor {
        let bytes: Vec<u8> =
            self.random(rows * cols).into_iter().flat_map(|value| value.to_le_bytes()).collect();
        let floats = HostTensor::new(Dtype::F32, vec![rows, cols], bytes.into()).unwrap();
        convert("random", &floats, dtype).unwrap()
    }

    fn weight(&mut self, dtype: Dtype, rows: usize, cols: usize) -> B::Weight {
        let matrix = self.matrix(dtype, rows, cols);
        assert_eq!(matrix.dtype, dtype);
        self.backend.weight(&matrix).unwrap()
    }

    fn vector(&mut self, len: usize) -> B::Vector {
        let values = self.random(len);
        self.backend.vector(values).unwrap()
    }

    /// Random rows, up to `scale` in size.
    fn rows(&mut self, rows: usize, width: usize, scale: f32) -> B::Buffer {
        let table = self.weight(Dtype::F32, rows, width);
        let tokens: Vec<u32> = (0..rows as u32).collect();
        let mut out = self.backend.buffer();
        self.backend.embed(&table, &tokens, scale, &mut out).unwrap();
        out
    }

    fn backend_ones(&self, rows: usize, cols: usize) -> B::Buffer {
        let bytes: Vec<u8> = (0..cols).flat_map(|_| 1f32.to_le_bytes()).collect();
        let table = HostTensor::new(Dtype::F32, vec![1, cols], bytes.into()).unwrap();
        let table = self.backend.weight(&table).unwrap();
        let mut out = self.backend.buffer();
        self.backend.embed(&table, &vec![0; rows], 1.0, &mut out).unwrap();
        out
    }

    fn record(&mut self, what: impl Into<String>, tolerance: f32, result: &B::Buffer) {
        let mut values = Vec::new();
        self.backend.read(&mut result.clone(), &mut values).unwrap();
        self.outputs.push(Output { what: what.into(), tolerance, values });
    }

    /// Look-ups and products for every type, at sizes that take candle's packed kernels and at sizes that do not.
    fn weights(&mut self) {
        use Dtype::*;
        for dtype in [F32, F16, Bf16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
            let (lookup, tolerance) = match dtype {
                F32 => (FLOAT, FLOAT),
                F16 | Bf16 => (HALF, HALF),
                _ => (FLOAT, BLOCKS),
            };
            for (out_rows, cols) in [(48, 512), (7, 256)] {
                let name = format!("{} [{out_rows}, {cols}]", dtype.name());
                let weight = self.weight(dtype, out_rows, cols);
                let mut out = self.backend.buffer();
                self.backend.embed(&weight, &[3, 0, 6, 3], 1.5, &mut out).unwrap();
                self.record(format!("embed {name}"), lookup, &out);
                let bias = self.vector(out_rows);
                for rows in [1, 3, 40] {
                    let x = self.rows(rows, cols, 2.0);
                    self.backend.matmul(&x, &weight, None, &mut out).unwrap();
                    self.record(format!("matmul {name} x {rows}"), tolerance, &out);
                    self.backend.matmul(&x, &weight, Some(&bias), &mut out).unwrap();
                    self.record(format!("matmul {name} x {rows} + bias"), tolerance, &out);
                    let mut second = self.backend.buffer();
                    let product = |bias, out| Product::new(&weight, bias, out);
                    let mut both = [product(None, &mut out), product(Some(&bias), &mut second)];
                    self.backend.matmul_each(&x, &mut both).unwrap();
                    self.record(format!("matmul_each {name} x {rows}"), tolerance, &out);
                    self.record(format!("matmul_each {name} x {rows} + bias"), tolerance, &second);
                }
            }
        }
    }

    /// Products of which adapters change every second row.
    fn changes(&mut self) {
        for (dtype, tolerance) in [(Dtype::F32, FLOAT), (Dtype::F16, HALF), (Dtype::Bf16, HALF)] {
            let [down, up] = [self.matrix(dtype, 5, 512), self.matrix(dtype, 48, 5)];
            let matrices = &self.backend.low_rank([&down, &up], 0.5).unwrap();
            let (weight, bias) = (self.weight(dtype, 48, 512), self.vector(48));
            for rows in [1, 3, 40] {
                let (x, changed) = (self.rows(rows, 512, 2.0), (0..rows).step_by(2).collect::<Vec<_>>());
                let to = WeightedRows { rows: &changed, weights: &vec![0.3; changed.len()] };
                let mut out = self.backend.buffer();
                let changes = vec![LowRankChange { matrices, to }];
                let product = Product { changes, ..Product::new(&weight, Some(&bias), &mut out) };
                self.backend.matmul_each(&x, &mut [product]).unwrap();
                self.record(format!("changed {} x {rows}", dtype.name()), tolerance, &out);
            }
        }
    }

    fn elements(&mut self) {
        let mut out = self.backend.buffer();
        for (rows, len) in [(1, 64), (3, 16), (70, 64)] {
            let (x, weight) = (self.rows(rows, 64, 3.0), self.vector(len));
            self.backend.rms_norm(&x, &weight, 1e-5, &mut out).unwrap();
            self.record(format!("rms_norm {rows} by {len}"), FLOAT, &out);
        }
        for (rows, head_dim, half) in [(1, 16, 8), (5, 16, 4), (33, 8, 4)] {
            let mut x = self.rows(rows, 64, 3.0);
            let (cos, sin) = (self.random(rows * half), self.random(rows * half));
            let mut angles = B::Angles::default();
            self.backend.angles(&cos, &sin, rows, &mut angles).unwrap();
            self.backend.rope(&mut x, head_dim, &angles).unwrap();
            self.record(format!("rope {} of {head_dim}", 2 * half), FLOAT, &x);
        }
        let clamped = Activation::ClampedSwish { alpha: 1.7, limit: 3.0 };
        for activation in
            [Activation::None, Activation::Silu, Activation::GeluTanh, Activation::Sigmoid, clamped]
        {
            let (mut gate, up) = (self.rows(4, 96, 12.0), self.rows(4, 96, 2.0));
            self.backend.gated(activation, &mut gate, &up).unwrap();
            self.record(format!("gated {activation:?}"), FLOAT, &gate);
        }
        for scale in [1.0, 0.22] {
            let (mut x, y) = (self.rows(4, 32, 1.0), self.rows(4, 32, 5.0));
            self.backend.add_scaled(&mut x, &y, scale).unwrap();
            self.record(format!("add_scaled {scale}"), FLOAT, &x);
        }
        let mut x = self.rows(6, 32, 1.0);
        self.backend.scale(&mut x, 0.3).unwrap();
        self.record("scale", FLOAT, &x);
        let (y, weights) = (self.rows(3, 32, 1.0), self.random(3));
        self.backend.add_rows(&mut x, &y, &[5, 0, 2], &weights).unwrap();
        self.record("add_rows", FLOAT, &x);
        self.backend.select_columns(&x, 3..19, &mut out).unwrap();
        self.record("select_columns", FLOAT, &out);
        self.backend.zeros(2, 5, &mut out).unwrap();
        self.backend.add_scaled(&mut out, &self.backend_ones(2, 5), 2.0).unwrap();
        self.record("zeros", 0.0, &out);
        let x = self.rows(6, 32, 1.0);
        self.backend.select_rows(&x, &[5, 0, 5], &mut out).unwrap();
        self.record("select_rows", 0.0, &out);
    }

    /// Layer norms, and attention within texts: blocks of rows that end within a text, and windows.
    fn texts(&mut self) {
        let mut out = self.backend.buffer();
        let (x, weight, bias) = (self.rows(5, 48, 3.0), self.vector(48), self.vector(48));
        self.backend.layer_norm(&x, [&weight, &bias], 1e-5, &mut out).unwrap();
        self.record("layer_norm", FLOAT, &out);
        for ends in [&[700][..], &[1, 40, 47, 600], &[9]] {
            let texts: Vec<Range<usize>> =
                [&[0], ends].concat().windows(2).map(|pair| pair[0]..pair[1]).collect();
            let rows = ends[ends.len() - 1];
            let [q, k, v] = [48, 16, 16].map(|width| self.rows(rows, width, 2.0));
            for reach in [Reach::WHOLE, Reach::both(16), Reach::causal(None), Reach::causal(Some(7))] {
                for softcap in [None, Some(1.5)] {
                    let rule = ScoreRule { scale: 0.5, softcap };
                    let heads = TextHeads { num_heads: 6, num_kv_heads: 2, head_dim: 8, rule, reach };
                    self.backend.attend_texts(&heads, [&q, &k, &v], &texts, &mut out).unwrap();
                    self.record(format!("attend_texts {rows} {reach:?} {softcap:?}"), 4.0 * FLOAT, &out);
                }
            }
        }
    }

    /// Two steps over sequences in scattered pages: prompts of unequal length, then single rows beside a new prompt.
    fn attention(&mut self) {
        let span = |rows, start, pages: &[u32]| RowSpan {
            rows,
            start,
            num_drafted: 0,
            pages: pages.to_vec(),
            seen_besides: Vec::new(),
        };
        let steps = [
            vec![span(0..40, 0, &[5, 2]), span(40..47, 0, &[0]), span(47..113, 0, &[9, 10, 11])],
            vec![
                span(0..1, 40, &[5, 2]),
                span(1..2, 7, &[0]),
                span(2..3, 66, &[9, 10, 11]),
                span(3..8, 0, &[7]),
            ],
            vec![span(0..1, 67, &[9, 10, 11])],
        ];
        let shape = KvShape { num_kv_heads: 2, head_dim: 8, values: KvValues::Own };
        let store = |shape| Store { shape: StoreShape::Rows(shape), group: 0 };
        let stores =
            vec![store(KvShape { num_kv_heads: 1, head_dim: 4, values: KvValues::Own }), store(shape)];
        let (num_heads, layout) = (6, KvLayout { stores, num_groups: 1 });
        for kv_type in [KvType::F32, KvType::F16] {
            for (window, softcap) in [(None, None), (Some(16), None), (None, Some(1.5)), (Some(1), Some(2.0))]
            {
                let mut kv = self.backend.kv(&layout, kv_type).unwrap();
                for (step, spans) in steps.iter().enumerate() {
                    let rows = spans[spans.len() - 1].rows.end;
                    let [k, v] = [2.0, 1.0].map(|scale| self.rows(rows, 16, scale));
                    let q = self.rows(rows, 48, 2.0);
                    self.backend.store_kv(&mut kv, 1, &k, &v, spans).unwrap();
                    let rule = ScoreRule { scale: 0.5, softcap };
                    let sinks = window.map(|_| self.vector(num_heads));
                    let spec = AttentionSpec {
                        store: 1,
                        num_heads,
                        rule,
                        window,
                        is_two_way: false,
                        sinks: sinks.as_ref(),
                        selected: None,
                    };
                    let mut out = self.backend.buffer();
                    self.backend.attend(&kv, &spec, &q, spans, &mut out).unwrap();
                    let name = kv_type.name();
                    self.record(
                        format!("attend {name} {window:?} {softcap:?} step {step}"),
                        2.0 * FLOAT,
                        &out,
                    );
                }
            }
        }
    }
}

/// Rows of a span with a state in `page`, the last of which are drafted.
fn state_span(rows: Range<usize>, start: usize, num_drafted: usize, page: u32) -> RowSpan {
    RowSpan { rows, start, num_drafted, pages: vec![page], seen_besides: Vec::new() }
}

/// The spans of a step, and how many drafted rows are kept over which pages.
type StateStep = (Vec<RowSpan>, Vec<(u32, usize)>);

/// Steps over sequences with states: prompts of unequal length, with chunks and without; single rows together, beside a new
/// prompt in a page that was used; drafted rows, some of which are kept, alone and behind a prompt; and what goes on from them.
fn state_steps() -> Vec<StateStep> {
    vec![
        (vec![state_span(0..40, 0, 0, 3), state_span(40..47, 0, 0, 0), state_span(47..117, 0, 0, 9)], vec![]),
        (vec![state_span(0..1, 40, 0, 3), state_span(1..2, 7, 0, 0), state_span(2..3, 70, 0, 9)], vec![]),
        (
            vec![state_span(0..6, 41, 5, 3), state_span(6..12, 8, 5, 0), state_span(12..48, 0, 2, 9)],
            vec![(3, 5), (0, 2), (9, 1)],
        ),
        (
            vec![state_span(0..1, 47, 0, 3), state_span(1..2, 11, 0, 0), state_span(2..5, 35, 3, 9)],
            vec![(9, 3)],
        ),
        (vec![state_span(0..1, 38, 0, 9)], vec![]),
    ]
}

impl<B: Backend<Buffer: Clone>> Bench<'_, B> {
    /// Runs `compute` over the steps, on rows of these widths, and records its results.
    fn with_states(
        &mut self,
        what: &str,
        len: usize,
        widths: &[usize],
        compute: impl Fn(&B, &mut B::Kv, &[B::Buffer], &[RowSpan], &mut B::Buffer),
    ) {
        let store = |len| Store { shape: StoreShape::State(len), group: 0 };
        let layout = KvLayout { stores: vec![store(3), store(len)], num_groups: 1 };
        let mut kv = self.backend.kv(&layout, KvType::F16).unwrap();
        // The store beside has states of its own, which every step must leave a record for.
        let kernel = self.vector(2 * 3);
        for (step, (spans, kept)) in state_steps().iter().enumerate() {
            let rows = spans[spans.len() - 1].rows.end;
            let inputs: Vec<B::Buffer> = widths.iter().map(|width| self.rows(rows, *width, 2.0)).collect();
            let (beside, mut out) = (self.rows(rows, 3, 1.0), self.backend.buffer());
            let conv = ConvSpec { store: 0, kernel: &kernel, bias: None, silu: false };
            self.backend.recur(&mut kv, &Recurrence::Convolution(conv, &beside), spans, &mut out).unwrap();
            compute(self.backend, &mut kv, &inputs, spans, &mut out);
            self.record(format!("{what} step {step}"), STATES, &out);
            for (page, count) in kept {
                self.backend.keep_drafted(&mut kv, 0, *page, *count).unwrap();
            }
            if step == 2 {
                assert!(self.backend.keep_drafted(&mut kv, 0, 3, 6).is_err(), "{what}: five were drafted");
                self.backend.copy_page(&mut kv, 0, 9, 4).unwrap();
                let (mut bytes, mut copy) = (Vec::new(), Vec::new());
                self.backend.export_page(&kv, 0, 9, &mut bytes).unwrap();
                self.backend.export_page(&kv, 0, 4, &mut copy).unwrap();
                assert_eq!((bytes.len(), &bytes), (layout.page_bytes(0, KvType::F16), &copy), "{what}");
                self.backend.import_page(&mut kv, 0, 9, bytes.into()).unwrap();
            }
        }
    }

    fn states(&mut self) {
        for (silu, has_bias) in [(true, true), (false, false)] {
            let (kernel, bias) = (self.vector(4 * 10), self.vector(10));
            self.with_states(&format!("convolve {silu}"), 30, &[10], |backend, kv, inputs, spans, out| {
                let spec = ConvSpec { store: 1, kernel: &kernel, bias: has_bias.then_some(&bias), silu };
                backend.recur(kv, &Recurrence::Convolution(spec, &inputs[0]), spans, out).unwrap();
            });
        }
        for (tiled, decays, decay_bound) in [
            (true, 1, None),
            (false, 1, None),
            (false, 8, None),
            (false, 8, Some(-5.0)),
            (false, 1, Some(-5.0)),
        ] {
            let shape = DeltaShape { key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 12, tiled };
            let fading: Vec<f32> = self.random(4).iter().map(|value| 1.0 + value).collect();
            let (fading, bias) = (self.backend.vector(fading).unwrap(), self.vector(4 * decays));
            let what = format!("delta {tiled} {decays} {decay_bound:?}");
            let widths = [shape.conv_width(), 4, 4 * decays];
            self.with_states(&what, shape.state_len(), &widths, |backend, kv, inputs, spans, out| {
                let spec = DeltaSpec { store: 1, shape, fading: &fading, decay_bound, decay_bias: &bias };
                let [qkv, rate, decay] = inputs else { panic!("three widths") };
                backend.recur(kv, &Recurrence::Delta(spec, [qkv, rate, decay]), spans, out).unwrap();
            });
        }
        for step_limits in [[0.0, f32::INFINITY], [0.1, 0.8]] {
            let shape = SsmShape { heads: 6, head_dim: 5, groups: 2, state_dim: 7 };
            let fading: Vec<f32> = self.random(6).iter().map(|value| 20.0 + 19.0 * value).collect();
            let fading = self.backend.vector(fading).unwrap();
            let [step_bias, skip] = [(); 2].map(|()| self.vector(6));
            let widths = [shape.conv_width(), 6];
            self.with_states(
                &format!("ssm {step_limits:?}"),
                shape.state_len(),
                &widths,
                |backend, kv, inputs, spans, out| {
                    let spec = SsmSpec {
                        store: 1,
                        shape,
                        fading: &fading,
                        step_bias: Some(&step_bias),
                        step_limits,
                        skip: &skip,
                    };
                    let [xbc, step] = inputs else { panic!("two widths") };
                    backend.recur(kv, &Recurrence::Ssm(spec, [xbc, step]), spans, out).unwrap();
                },
            );
        }
    }

    /// Products by head, and attention over rows that hold keys and values together, or narrow values, with a choice and without.
    fn latent(&mut self) {
        let mut out = self.backend.buffer();
        for (dtype, tolerance) in [(Dtype::F32, FLOAT), (Dtype::F16, HALF), (Dtype::Q8_0, BLOCKS)] {
            let heads = (0..3).map(|_| self.weight(dtype, 24, 32)).collect();
            let heads = self.backend.head_weights(heads).unwrap();
            for rows in [1, 9] {
                let x = self.rows(rows, 96, 2.0);
                self.backend.matmul_heads(&x, &heads, &mut out).unwrap();
                self.record(format!("matmul_heads {} x {rows}", dtype.name()), tolerance, &out);
            }
        }
        let (first, second) = (self.rows(5, 12, 1.0), self.rows(5, 9, 1.0));
        let third = self.rows(5, 3, 1.0);
        self.backend.join_heads(&[&first, &second, &third], 3, &mut out).unwrap();
        self.record("join_heads", 0.0, &out);
        let [x, y] = [(); 2].map(|()| self.rows(5, 24, 3.0));
        self.backend.gate_groups([&x, &y], 4, &mut out).unwrap();
        self.record("gate_groups", FLOAT, &out);
        let (x, weight) = (self.rows(5, 24, 3.0), self.vector(24));
        self.backend.rms_norm_groups(&x, &weight, 4, 1e-5, &mut out).unwrap();
        self.record("rms_norm_groups", FLOAT, &out);
        self.chosen_attention();
    }

    fn chosen_attention(&mut self) {
        let span =
            |rows, start, pages: &[u32]| RowSpan { pages: pages.to_vec(), ..state_span(rows, start, 0, 0) };
        let steps = [
            vec![span(0..60, 0, &[5, 2]), span(60..67, 0, &[0])],
            vec![span(0..1, 60, &[5, 2]), span(1..2, 7, &[0]), span(2..42, 0, &[7, 8])],
        ];
        for (values, top_k) in [
            (KvValues::InKeys(16), None),
            (KvValues::InKeys(16), Some(12)),
            (KvValues::InKeys(16), Some(50)),
            (KvValues::Narrow(10), None),
        ] {
            let store = |num_kv_heads, head_dim, values| {
                let shape = KvShape { num_kv_heads, head_dim, values };
                Store { shape: StoreShape::Rows(shape), group: 0 }
            };
            let num_kv_heads = if values == KvValues::Narrow(10) { 2 } else { 1 };
            let stores = vec![store(num_kv_heads, 24, values), store(1, 8, KvValues::None)];
            let layout = KvLayout { stores, num_groups: 1 };
            let mut kv = self.backend.kv(&layout, KvType::F32).unwrap();
            for (step, spans) in steps.iter().enumerate() {
                let (what, rows) =
                    (format!("{values:?} {top_k:?} step {step}"), spans[spans.len() - 1].rows.end);
                let widths = [num_kv_heads * 24, num_kv_heads * 10, 6 * 24];
                let [k, v, q] = widths.map(|width| self.rows(rows, width, 2.0));
                let [keys, queries, weights] = [8, 3 * 8, 3].map(|width| self.rows(rows, width, 1.0));
                self.backend.store_kv(&mut kv, 0, &k, &v, spans).unwrap();
                self.backend.store_kv(&mut kv, 1, &keys, &keys, spans).unwrap();
                let mut selected = SelectedKeys::default();
                if let Some(top_k) = top_k {
                    let spec = IndexerSpec { store: 1, top_k, blocks: KeyBlocks::SINGLE, is_per_head: false };
                    self.backend.select_keys(&kv, &spec, [&queries, &weights], spans, &mut selected).unwrap();
                    let beyond = spans.iter().flat_map(|span| span.first_beyond(top_k)..span.rows.end);
                    let chosen = beyond.flat_map(|row| selected.positions[row * top_k..][..top_k].to_vec());
                    let values = chosen.map(|position| position as f32).collect();
                    self.outputs.push(Output { what: format!("select_keys {what}"), tolerance: 0.0, values });
                }
                let spec = AttentionSpec {
                    store: 0,
                    num_heads: 6,
                    rule: ScoreRule { scale: 0.5, softcap: None },
                    window: None,
                    is_two_way: false,
                    sinks: None,
                    selected: top_k.map(|_| &selected),
                };
                let mut out = self.backend.buffer();
                self.backend.attend(&kv, &spec, &q, spans, &mut out).unwrap();
                self.record(format!("attend {what}"), 4.0 * FLOAT, &out);
            }
        }
    }
}

fn outputs<B: Backend<Buffer: Clone>>(backend: &B) -> Vec<Output> {
    let mut bench = Bench { backend, random: 0x9e37_79b9, outputs: Vec::new() };
    bench.weights();
    bench.elements();
    bench.texts();
    bench.attention();
    bench.changes();
    bench.states();
    bench.latent();
    bench.outputs
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest, value| largest.max(value.abs()))
}

#[test]
fn every_operation_of_candle_agrees_with_the_cpu_backend() {
    let (expected, got) = (outputs(&cpu()), outputs(&candle()));
    assert_eq!(expected.len(), got.len());
    let mut wrong = Wrong::default();
    for (expected, got) in expected.iter().zip(&got) {
        let relative = largest_difference(&got.values, &expected.values)
            / largest(&expected.values).max(f32::MIN_POSITIVE);
        eprintln!("{:<50} {relative:.1e}", expected.what);
        wrong.check(expected.what.clone(), relative, expected.tolerance);
    }
    wrong.assert_none();
}

/// As on a GPU, where two-byte weights stay: input and result of a product are rounded to f16 (candle has no bf16 products
/// on the CPU).
#[test]
fn weights_kept_in_f16_cost_their_rounding_and_no_more() {
    let outputs = |backend: &Candle| {
        let mut bench = Bench { backend, random: 7, outputs: Vec::new() };
        let (weight, x) = (bench.weight(Dtype::F16, 48, 512), bench.rows(9, 512, 1e5));
        let mut out = backend.buffer();
        backend.matmul(&x, &weight, None, &mut out).unwrap();
        bench.record("matmul", 0.0, &out);
        backend.embed(&weight, &[1, 2], 1.0, &mut out).unwrap();
        bench.record("embed", 0.0, &out);
        bench.outputs
    };
    let (wide, kept) = (outputs(&candle()), outputs(&candle().keep_halves(true)));
    let product = largest_difference(&kept[0].values, &wide[0].values) / largest(&wide[0].values);
    assert!((1e-6..2e-3).contains(&product), "{product:e}");
    assert_eq!(kept[1].values, wide[1].values);
}
