//! Promise: every processor computes the same bits. The logits of each checkpoint in the repository, and the rows of images by each
//! tower of the fixtures, are recorded as hashes, as x86 computed them; each instruction set of x86-64 and aarch64 gives the
//! same. So pages and sessions keep their worth when they are moved to another processor (src/runtime/load/fingerprint.rs).
//!
//! A change that means to change last bits records them again (`INSTA_UPDATE=always`).

use std::fmt::Write;

use llmctl_image::{ImageFile, ImageLimits, Picture};
use llmctl_models::vision::Tower;
use sha2::{Digest, Sha256};

use crate::common::k_quants::write_k_quants;
use crate::common::prelude::*;

/// Tokens that are fed together, more than a window of most checkpoints; those after them are fed one by one.
const TOGETHER: usize = 96;
const TOKENS: usize = 107;

/// Types of weights, quantisation while loading, and types of KV. `None` keeps the weights of the file.
const WAYS: [(Option<Dtype>, Option<Dtype>, KvType); 6] = [
    (None, None, KvType::F32),
    (Some(Dtype::F32), None, KvType::Q8_0),
    (None, Some(Dtype::Q8_0), KvType::F16),
    (None, Some(Dtype::Q4_0), KvType::Q8_0),
    (None, None, KvType::Q6_0),
    (None, None, KvType::Q5_1),
];

/// Returns the entries of a folder of the repository, sorted, that are checkpoints.
fn checkpoints(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let entries =
        std::fs::read_dir(&folder).expect("in the repository").map(|entry| entry.expect("an entry").path());
    let is_model =
        |path: &PathBuf| path.is_dir() || path.extension().is_some_and(|extension| extension == "gguf");
    let mut found: Vec<PathBuf> = entries.filter(is_model).collect();
    found.sort();
    found
}

/// Returns the first 8 bytes of the SHA-256 of all logits of a text, each as 4 bytes, the lowest first.
fn hash_of_logits(path: &Path, options: &LoadOptions) -> String {
    let mut loaded = load_model(path, options).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let vocab = loaded.model.spec().vocab_size;
    let tokens: Vec<u32> = (0..TOKENS).map(|n| ((n * n * 7 + n) % vocab) as u32).collect();
    let mut fed = Fed::new(&mut *loaded.model);
    let mut logits = fed.feed(&tokens[..TOGETHER], usize::MAX);
    logits.extend(fed.feed(&tokens[TOGETHER..], 1));
    assert!(logits.iter().all(|logit| logit.is_finite()), "{}: logits are numbers", path.display());
    hash(logits.iter())
}

fn hash<'a>(values: impl Iterator<Item = &'a f32>) -> String {
    let bytes: Vec<u8> = values.flat_map(|value| value.to_le_bytes()).collect();
    Sha256::digest(bytes)[..8].iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("a string takes it");
        hex
    })
}

/// Returns the hash of the rows that a tower makes of a picture.
fn hash_of_rows(tower: &dyn Tower, picture: &Picture) -> String {
    let patches = tower.spec().pixels.patches(picture).expect("patches");
    let mut job = tower.begin(patches).expect("a job");
    let rows = loop {
        if let Some(rows) = job.advance().expect("rows") {
            break rows;
        }
    };
    hash(rows.embeddings.iter().chain(rows.deep.iter().flatten()))
}

fn row(path: &Path, options: &LoadOptions) -> String {
    let name = path.file_name().expect("a name").to_string_lossy().into_owned();
    let dtype = options.quantize.or(options.dtype).map_or("stored", Dtype::name);
    format!("{name:24} {dtype:6} {:5} {}\n", options.kv_type.name(), hash_of_logits(path, options))
}

#[test]
fn every_processor_computes_the_recorded_bits() {
    let mut table = String::new();
    for path in checkpoints("tests/parity") {
        for (dtype, quantize, kv_type) in WAYS {
            table += &row(&path, &LoadOptions { dtype, quantize, kv_type, ..exact() });
        }
    }
    let as_stored = LoadOptions { dtype: None, kv_type: KvType::F16, ..exact() };
    for path in checkpoints("tests/parity-gguf") {
        table += &row(&path, &as_stored);
    }
    let folder = tempfile::tempdir().expect("tempdir");
    let k_quants = folder.path().join("q4_k-q6_k.gguf");
    write_k_quants(&k_quants);
    table += &row(&k_quants, &as_stored);
    insta::assert_snapshot!(table);
}

#[test]
fn every_processor_computes_the_recorded_bits_of_images() {
    let Some(folder) = fixtures().map(|folder| folder.join("vision")) else { return };
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/images");
    let mut table = String::new();
    for family in std::fs::read_dir(&folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
        if !family.join("config.json").is_file() {
            continue;
        }
        let tower = load_model(&family, &exact()).expect("a model").tower.expect("a tower");
        let name = family.file_name().expect("a name").to_string_lossy().into_owned();
        for image in ["progressive.jpg", "deep.png", "lossy.webp"] {
            let bytes = std::fs::read(images.join(image)).expect("an image");
            let file = ImageFile::read(bytes.into(), &ImageLimits::default()).expect("an image");
            writeln!(table, "{name:16} {image:16} {}", hash_of_rows(&*tower, &file.picture))
                .expect("written");
        }
    }
    let mut rows: Vec<&str> = table.lines().collect();
    rows.sort_unstable();
    insta::assert_snapshot!(rows.join("\n"));
}
