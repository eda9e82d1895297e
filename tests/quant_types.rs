//! Promise: a GGUF file in any type of llama.cpp's quantisers gives llama.cpp's distribution of the next token.
//!
//! `tests/quant_types/make.py` wrote the files with llama.cpp's own quantisers, and put llama.cpp's logits into their metadata.
//! The files in the repository have one layer of random weights. `LLMCTL_QUANT_TYPES` names a folder of larger ones, made from
//! the trained models of the shared fixtures.

use llmctl_base::notice::Notice;
use llmctl_kernel::dequantize_row;
use llmctl_models::load::DeviceKind;

use crate::common::gguf::F32;
use crate::common::prelude::*;

/// Largest KL divergence of the next token's distribution, in nats, as a mean over the positions of a text.
const MAX_KL: f64 = 1e-3;

/// Lead in logits from which the most likely token must be the same: the error of 8-bit activations may decide a smaller one.
const LEAD: f32 = 0.25;

const TYPES: [&str; 15] = [
    "iq4_xs", "iq4_nl", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "tq2_0", "tq1_0",
    "q2_0", "q1_0", "nvfp4", "mxfp4",
];

/// A file and what llama.cpp computes for its tokens, `[tokens, vocab]`.
struct Subject {
    path: PathBuf,
    tokens: Vec<u32>,
    logits: Vec<f32>,
    /// With weights widened to f32.
    exact: Vec<f32>,
}

impl Subject {
    fn open(path: PathBuf) -> Subject {
        let gguf = Gguf::open(&path).expect("a file of make.py");
        let metadata = gguf.metadata();
        let [logits, exact] = ["test.logits", "test.exact"].map(|key| metadata.require(key).expect("logits"));
        Subject { tokens: metadata.require("test.tokens").expect("tokens"), logits, exact, path }
    }

    fn run(&self, options: &LoadOptions, chunk: usize) -> Vec<f32> {
        let mut model = load_model(&self.path, options).expect("loads").model;
        Fed::new(&mut *model).feed(&self.tokens, chunk)
    }

    fn distance(&self, got: &[f32], expected: &[f32]) -> Distance {
        let vocab = got.len() / self.tokens.len();
        let positions = || got.chunks(vocab).zip(expected.chunks(vocab));
        let same = |(got, expected): &(&[f32], &[f32])| top_two(got).0 == top_two(expected).0;
        let kl = positions().map(|(got, expected)| divergence(expected, got)).sum::<f64>();
        let others = positions().filter(|pair| !same(pair));
        Distance {
            kl: kl / self.tokens.len() as f64,
            same_best: positions().filter(same).count() as f64 / self.tokens.len() as f64,
            largest_lead_lost: others.map(|(_, expected)| top_two(expected).1).fold(0.0, f32::max),
        }
    }
}

struct Distance {
    kl: f64,
    /// Part of the positions with the same most likely token.
    same_best: f64,
    /// The largest lead of a token that is no longer the most likely one.
    largest_lead_lost: f32,
}

fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let largest = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
    logits.iter().map(|logit| f64::from(*logit) - largest - sum.ln()).collect()
}

/// Returns the KL divergence of the distribution of `got` from that of `expected`, in nats.
fn divergence(expected: &[f32], got: &[f32]) -> f64 {
    let [expected, got] = [expected, got].map(log_probabilities);
    expected.iter().zip(got).map(|(expected, got)| expected.exp() * (expected - got)).sum()
}

/// Options that keep the file's types.
fn stored() -> LoadOptions {
    LoadOptions { dtype: None, ..exact() }
}

/// Distances of a file as stored: to llama.cpp; to f32; and of llama.cpp to f32.
fn measure(subject: &Subject) -> [Distance; 3] {
    let got = subject.run(&stored(), usize::MAX);
    let distances = [
        subject.distance(&got, &subject.logits),
        subject.distance(&got, &subject.exact),
        subject.distance(&subject.logits, &subject.exact),
    ];
    let [same, ours, theirs] = &distances;
    eprintln!(
        "{:28} to llama.cpp: KL {:.1e}, top-1 {:.3}, lead lost {:.2}; to f32: KL {:.1e}, top-1 {:.3}; llama.cpp: KL {:.1e}, top-1 {:.3}",
        subject.path.file_stem().unwrap_or_default().display(),
        same.kl,
        same.same_best,
        same.largest_lead_lost,
        ours.kl,
        ours.same_best,
        theirs.kl,
        theirs.same_best
    );
    distances
}

fn committed() -> impl Iterator<Item = Subject> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/quant_types");
    TYPES.into_iter().map(move |name| Subject::open(folder.join(format!("{name}.gguf"))))
}

#[test]
fn every_type_gives_the_distribution_of_llama_cpp() {
    for subject in committed() {
        let [same, ..] = measure(&subject);
        assert!(same.kl < MAX_KL && same.largest_lead_lost < LEAD, "{:?}", subject.path);
        let whole = subject.run(&stored(), usize::MAX);
        let cut = subject.run(&stored(), 5);
        assert!(
            whole.iter().zip(&cut).all(|(a, b)| a.to_bits() == b.to_bits()),
            "{:?} in chunks",
            subject.path
        );
    }
}

#[test]
fn widened_weights_are_those_of_llama_cpp() {
    for subject in committed() {
        let difference = largest_difference(&subject.run(&exact(), usize::MAX), &subject.exact);
        assert!(difference < 1e-4, "{:?}: {difference}", subject.path);
    }
}

#[test]
fn candle_computes_types_that_it_lacks_from_halves() {
    let candle = LoadOptions { device: Device::Candle(DeviceKind::Cpu), ..stored() };
    for subject in committed() {
        let distance = subject.distance(&subject.run(&candle, usize::MAX), &subject.exact);
        assert!(
            distance.kl < MAX_KL && distance.largest_lead_lost < LEAD,
            "{:?} {}",
            subject.path,
            distance.kl
        );
    }
}

/// Trained models of this size do not survive two bits: llama.cpp, whose activations have a scale for each 256 values, is then
/// itself further from f32 than [`MAX_KL`].
#[test]
fn trained_models_are_as_close_to_f32_as_in_llama_cpp() {
    let Some(folder) = std::env::var_os("LLMCTL_QUANT_TYPES") else {
        crate::common::skip("LLMCTL_QUANT_TYPES names no folder of `make.py trained`");
        return;
    };
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let mut files: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|ending| ending == "gguf")).collect();
    files.sort();
    assert!(!files.is_empty(), "no files");
    for path in files {
        let [_, ours, theirs] = measure(&Subject::open(path.clone()));
        assert!(ours.kl < MAX_KL.max(1.5 * theirs.kl), "{path:?}");
    }
}

const F16: u32 = 1;
const IQ1_S: u32 = 19;

/// A Llama of one layer of zeros, with matrices of one type.
fn empty_llama(kind: u32, inner: usize) -> Vec<u8> {
    let (width, vocab) = (256, 32);
    let names: Vec<String> = (0..vocab).map(|id| format!("<{id}>")).collect();
    let mut file = GgufBuilder::new()
        .text("general.architecture", "llama")
        .u32("llama.context_length", 64)
        .u32("llama.embedding_length", width as u32)
        .u32("llama.block_count", 1)
        .u32("llama.feed_forward_length", inner as u32)
        .u32("llama.attention.head_count", 1)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &names)
        .f32s("tokenizer.ggml.scores", &vec![0.0; vocab])
        .u32("tokenizer.ggml.unknown_token_id", 0)
        .u32("tokenizer.ggml.eos_token_id", 1);
    for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"] {
        file = file.tensor(&format!("{name}.weight"), &[width], F32, &vec![0; 4 * width]);
    }
    for (name, shape) in [
        ("token_embd", [vocab, width]),
        ("blk.0.attn_q", [width, width]),
        ("blk.0.attn_k", [width, width]),
        ("blk.0.attn_v", [width, width]),
        ("blk.0.attn_output", [width, width]),
        ("blk.0.ffn_gate", [inner, width]),
        ("blk.0.ffn_up", [inner, width]),
        ("blk.0.ffn_down", [width, inner]),
    ] {
        let row_bytes = if kind == IQ1_S { 50 } else { 512 };
        file = file.tensor(
            &format!("{name}.weight"),
            &shape,
            kind,
            &vec![0; shape[0] * shape[1] / 256 * row_bytes],
        );
    }
    file.build()
}

#[test]
fn memory_beyond_that_of_the_file_is_counted_and_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("low.gguf");
    std::fs::write(&path, empty_llama(IQ1_S, 8192)).expect("writable");
    let loaded = load_model(&path, &stored()).expect("loads");
    let widened = loaded.notices.iter().find_map(|notice| match notice {
        Notice::WidenedTypes { types, mebibytes } => Some((types.clone(), *mebibytes)),
        _ => None,
    });
    // Bits of a value: 1.5625 in the file, 3.375 in memory.
    let num_values = 32 * 256 + 4 * 256 * 256 + 3 * 8192 * 256;
    let more = (num_values as f64 * (3.375 - 1.5625) / 8.0) as usize >> 20;
    assert_eq!(widened, Some((vec!["iq1_s"], more)), "{:?}", loaded.notices);
    let needed = |kind, device| {
        std::fs::write(&path, empty_llama(kind, 8192)).expect("writable");
        let options = LoadOptions { device, available_memory: Some(1), ..stored() };
        match load_model(&path, &options).map(|_| ()).unwrap_err() {
            LoadError::TooBig { needed, .. } => needed,
            other => panic!("{other}"),
        }
    };
    let difference = |device| needed(F16, device) - needed(IQ1_S, device);
    assert_eq!(difference(stored().device), (num_values as f64 * (16.0 - 3.375) / 8.0) as u64);
    assert_eq!(difference(Device::Candle(DeviceKind::Cpu)), 0, "candle keeps both as F16");
}

#[test]
fn factors_of_nvfp4_are_checked() {
    let nvfp4 = |scale: &[usize], kind: u32, value: f32| {
        let bytes = value.to_le_bytes().repeat(scale.iter().product());
        GgufBuilder::new()
            .tensor("a.weight", &[2, 64], 40, &[0x38; 72])
            .tensor("a.scale", scale, kind, if kind == F32 { &bytes } else { &bytes[..2 * bytes.len() / 4] })
            .build()
    };
    let open = |bytes| Gguf::from_bytes("a.gguf", bytes).expect("opens");
    let tensor = open(nvfp4(&[1], F32, 0.5)).tensor("a.weight").expect("reads").expect("is there");
    let mut values = vec![0.0; 128];
    dequantize_row(tensor.dtype, &tensor.bytes, &mut values);
    // 0x38 is 1 as a scale; as two codes it is 0 (sign set) and 1.5.
    assert_eq!((values[0], values[8]), (0.0, 0.75));
    assert_eq!(open(nvfp4(&[1], F32, 0.5)).names(), ["a.weight"], "the factor is part of the matrix");
    for (file, words) in [
        (nvfp4(&[3], F32, 1.0), "3 values"),
        (nvfp4(&[1], 1, 1.0), "type 1 (F16)"),
        (nvfp4(&[1], F32, f32::NAN), "NaN"),
    ] {
        let error = open(file).tensor("a.weight").unwrap_err().to_string();
        assert!(error.contains("a.scale") && error.contains(words), "{error}");
    }
}
