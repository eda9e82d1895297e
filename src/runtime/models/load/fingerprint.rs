//! Fingerprint of a loaded model: equal only for models that give the same bits, so that one process can use
//! what another has computed.
//!
//! It is the SHA-256 of the facts stored beside it as JSON, and a function of nothing else. No path or file
//! name is among them, so a model that is moved, or copied with its times, keeps its fingerprint. Hashing
//! gigabytes at every start would cost more than it saves. Files that describe the weights are hashed whole;
//! for the weights themselves the facts are the size, the modification time in nanoseconds and 64 samples of
//! 64 KiB, including the first and the last bytes. A program that writes a file changes its time, another
//! quantisation or training of the model differs in nearly every sample, and a truncated download filled with
//! zeros differs in the samples at the end. Not detected: an edit of weights between samples that keeps the
//! size and restores the time, another GPU model behind the same device index, and kernels that changed
//! without a new version of llmctl.

use std::path::Path;
use std::time::SystemTime;

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::files::ModelFiles;
use super::hf::MAX_FILE_BYTES;
use super::{Device, LoadOptions};
use crate::backend::PAGE_TOKENS;
use crate::kv::disk::FORMAT_VERSION;
use crate::model::config::{DecoderConfig, RopeConfig, RopeScaling};
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_base::read::read_optional;
use llmctl_kernel::Dtype;

/// Version of the facts below; changes if they are gathered differently.
const SCHEME: u32 = 2;
const SAMPLES: usize = 64;
const SAMPLE_BYTES: usize = 64 << 10;

/// Name of a weight file's modification time among its facts.
const MODIFIED: &str = "modified_ns";

/// Files of a folder that describe its weights and its text side.
const FOLDER_FILES: [&str; 6] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
];

#[derive(Debug, Clone, PartialEq)]
pub struct Fingerprint {
    /// 64 hexadecimal digits.
    pub hex: String,
    /// The hashed facts, for people; equal whenever the fingerprint is.
    pub facts: Value,
}

impl Fingerprint {
    /// Names what decides the bits of results beside the files: the program's version, the backend and the load options.
    pub fn build(&self) -> String {
        let fact = |name: &str| self.facts[name].as_str().map(|value| format!(", {name} {value}"));
        let version = self.facts["llmctl"].as_str().unwrap_or_default();
        let others = ["backend", "dtype", "quantize", "kv_type"].into_iter().filter_map(fact);
        let ropes = self.facts["rope"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let scaled = ropes.filter(|rope| *rope != "as in the files").map(|rope| format!(", rope {rope}"));
        format!("llmctl {version}{}", others.chain(scaled).collect::<String>())
    }

    /// Returns the fingerprint with these facts.
    pub fn of(facts: Value) -> Self {
        Self { hex: sha256(&[facts.to_string().as_bytes()]), facts }
    }

    /// Returns why no model that this build loads has this fingerprint; `None` if one may.
    pub fn is_of_other_build(&self) -> Option<String> {
        let differs = |(name, ours): (&str, Value)| {
            let theirs = &self.facts[name];
            (*theirs != ours).then(|| format!("{name} is {theirs} there and {ours} here"))
        };
        build_facts().into_iter().find_map(differs)
    }

    /// Returns whether the files of a model are those whose facts these are, times included.
    pub fn is_of(&self, files: &ModelFiles) -> bool {
        source(files)
            .is_ok_and(|source| ["sha256", "weights"].iter().all(|name| source[name] == self.facts[name]))
    }

    /// Returns whether it has modification times, so that it says nothing about the model's files on another machine.
    pub fn has_times(&self) -> bool {
        without_times(&self.facts) != self.facts
    }

    /// Returns whether both differ in the modification times of the weight files at most.
    pub fn is_same_but_times(&self, other: &Self) -> bool {
        without_times(&self.facts) == without_times(&other.facts)
    }
}

/// Returns how a model was loaded otherwise when `theirs` were its facts than with `ours`; `None` for another model or build.
pub fn loaded_otherwise(ours: &Value, theirs: &Value) -> Option<String> {
    let [here, there] = [ours, theirs].map(|facts| facts["kv_type"].as_str());
    let mut theirs = without_times(theirs);
    *theirs.get_mut("kv_type")? = here.into();
    let words = match (here?, there?) {
        (here, there) if here == there => {
            "the model's file had another time when they were computed".to_owned()
        }
        (here, there) => format!("they were computed with --kv-type {there}, and it is {here} now"),
    };
    (theirs == without_times(ours)).then_some(words)
}

/// The facts that depend on the build alone.
fn build_facts() -> [(&'static str, Value); 4] {
    [
        ("scheme", json!(SCHEME)),
        ("llmctl", json!(env!("CARGO_PKG_VERSION"))),
        ("page_tokens", json!(PAGE_TOKENS)),
        ("page_format", json!(FORMAT_VERSION)),
    ]
}

/// Fingerprints the model that `options` make of `files`, with a context of `context_length` tokens.
///
/// Reads at most 4 MiB of each weight file besides its header.
///
/// # Errors
/// [`LoadError`] naming the file that cannot be read.
pub fn fingerprint(
    files: &ModelFiles,
    config: &DecoderConfig,
    context_length: usize,
    options: &LoadOptions,
) -> LoadResult<Fingerprint> {
    let ropes: Vec<&str> = config.ropes.iter().map(|rope| rope_in_force(rope, context_length)).collect();
    fingerprint_as(files, config.architecture, (&native_backend(options.device), &ropes), options)
}

/// Fingerprints a model of an architecture that candle computes.
///
/// # Errors
/// Errors of [`fingerprint`].
#[cfg(feature = "candle-families")]
pub(super) fn candle_fingerprint(
    files: &ModelFiles,
    architecture: &str,
    options: &LoadOptions,
) -> LoadResult<Fingerprint> {
    fingerprint_as(files, architecture, (&candle_backend(options.device), &[]), options)
}

/// Fingerprints a model, given the source of its bits and the part of its rotary settings that depends on the context.
fn fingerprint_as(
    files: &ModelFiles,
    architecture: &str,
    (backend, ropes): (&str, &[&str]),
    options: &LoadOptions,
) -> LoadResult<Fingerprint> {
    // Fields are listed one by one, so that a new option must be considered here. Memory and the requested context
    // only affect `context_length`; the device is in `backend`. A block that drafts changes no bit of the model's; a
    // vision tower is a part of the keys of its images, and adapters are of the names of pages.
    let LoadOptions {
        device: _,
        dtype,
        quantize,
        kv_type,
        context: _,
        kv_memory: _,
        available_memory: _,
        packed: _,
        prediction: _,
        images: _,
        adapters: _,
    } = options;
    let facts = json!({
        "scheme": SCHEME,
        "llmctl": env!("CARGO_PKG_VERSION"),
        "architecture": architecture,
        "backend": backend,
        "dtype": dtype.map(Dtype::name),
        "quantize": quantize.map(Dtype::name),
        "kv_type": kv_type.name(),
        "page_tokens": PAGE_TOKENS,
        "page_format": FORMAT_VERSION,
        "rope": ropes,
        "sha256": files.folder().map(folder).transpose()?,
        "weights": weights(files)?,
    });
    Ok(Fingerprint::of(facts))
}

/// Identifies the model as published, independent of load options and of modification times: equal identities have
/// equal token ids, because the header or the folder's files, which are hashed whole, have the vocabulary. Reads as many bytes
/// as [`fingerprint`].
///
/// # Errors
/// [`LoadError`] naming the file that cannot be read.
pub fn identity(files: &ModelFiles) -> LoadResult<String> {
    let facts = without_times(&source(files)?);
    Ok(sha256(&[facts.to_string().as_bytes()]))
}

/// Identifies the files as they are on this machine: as [`identity`], with their modification times.
///
/// # Errors
/// [`LoadError`] naming the file that cannot be read.
pub(super) fn stamped_identity(files: &ModelFiles) -> LoadResult<String> {
    Ok(sha256(&[source(files)?.to_string().as_bytes()]))
}

/// The facts that files contribute to a fingerprint.
fn source(files: &ModelFiles) -> LoadResult<Value> {
    Ok(json!({
        "sha256": files.folder().map(folder).transpose()?,
        "weights": weights(files)?,
    }))
}

/// Returns facts without the modification times in them.
fn without_times(facts: &Value) -> Value {
    let mut facts = facts.clone();
    let weights = facts.get_mut("weights").and_then(Value::as_array_mut);
    weights
        .into_iter()
        .flatten()
        .filter_map(Value::as_object_mut)
        .for_each(|file| drop(file.remove(MODIFIED)));
    facts
}

/// Returns the SHA-256 of each weight file, whole, as hexadecimal digits: what two machines compare, because modification times
/// say nothing there. Reads the files whole.
pub fn content_hashes(files: &ModelFiles) -> Vec<String> {
    files.contents().into_iter().map(|(_, bytes, _)| sha256(&[bytes])).collect()
}

/// Identifies the texts of a model whose weights are elsewhere, in `path`: equal identities have equal token ids.
///
/// # Errors
/// [`LoadError`] naming the file that cannot be read.
pub fn texts_identity(path: &Path) -> LoadResult<String> {
    let facts = json!({"sha256": folder(path)?, "weights": null});
    Ok(sha256(&[facts.to_string().as_bytes()]))
}

/// Extends an identity by the active chat template, which determines what ids stand for in a conversation.
pub fn with_template(identity: &str, template: Option<&str>) -> String {
    sha256(&[identity.as_bytes(), template.unwrap_or_default().as_bytes()])
}

/// Names the packed form of a model's weights: the same for equal bytes only. `identity` is that of [`stamped_identity`], so another
/// size, time or content of a weight file gives another name; `layout` is that of the kernels (`PANEL_LAYOUT`).
pub fn panel_key(architecture: &str, identity: &str, layout: &str) -> String {
    let facts = json!({
        "llmctl": env!("CARGO_PKG_VERSION"),
        "layout": layout,
        "architecture": architecture,
        "model": identity,
    });
    sha256(&[facts.to_string().as_bytes()])
}

/// Names the source of a native model's bits. Our kernels and `libm`, which no compute path bypasses
/// (tests/architecture), give the same bits on every instruction set, operating system and number of threads
/// (tests/same_bits.rs), and pages are little-endian. So sessions and pages stay warm when their folder moves between
/// x86-64 and aarch64. Only a NaN's payload differs between processors, and a model that computes one has no answer to
/// keep.
fn native_backend(device: Device) -> String {
    match device {
        Device::Cpu(_) if cfg!(target_endian = "little") => "cpu".to_owned(),
        Device::Cpu(_) => "cpu big-endian".to_owned(),
        Device::Candle(_) => candle_backend(device),
    }
}

/// Names the source of bits that candle computes, which differ between processors.
fn candle_backend(device: Device) -> String {
    let processor = if cfg!(target_arch = "x86_64") {
        "x86_64"
    } else if cfg!(target_arch = "aarch64") {
        "aarch64"
    } else {
        "other"
    };
    match device {
        Device::Cpu(_) => format!("candle cpu {processor}"),
        Device::Candle(kind) => format!("candle {kind:?} {processor}"),
    }
}

/// Names the active rotary settings. They are in the files; only LongRoPE's also depend on the context.
fn rope_in_force(rope: &RopeConfig, context_length: usize) -> &'static str {
    match &rope.scaling {
        RopeScaling::LongRope { original_context, .. } if context_length > *original_context => "long",
        RopeScaling::LongRope { .. } => "short",
        _ => "as in the files",
    }
}

/// Hashes the listed files that exist in `folder`.
fn folder(folder: &Path) -> LoadResult<Value> {
    let hash = |name: &&str| -> LoadResult<(String, Value)> {
        let bytes = read_optional(&folder.join(name), MAX_FILE_BYTES)?;
        Ok(((*name).to_owned(), json!(bytes.map(|bytes| sha256(&[&bytes])))))
    };
    let mut hashes = FOLDER_FILES.iter().map(hash).collect::<LoadResult<Map<_, _>>>()?;
    // These are read in place of tokenizer.json, and listed there alone, so that other folders keep their fingerprint.
    if hashes["tokenizer.json"].is_null() {
        let others = ["tokenizer.model", "tekken.json"].iter().map(hash).collect::<LoadResult<Vec<_>>>()?;
        hashes.extend(others.into_iter().filter(|(_, hash)| !hash.is_null()));
    }
    Ok(hashes.into())
}

/// Describes each weight file.
fn weights(files: &ModelFiles) -> LoadResult<Vec<Value>> {
    let facts = |(path, bytes, header_len)| {
        let mut facts = content(bytes, header_len);
        if !files.is_built_in() {
            facts[MODIFIED] = json!(modified_ns(path)?);
        }
        Ok(facts)
    };
    files.contents().into_iter().map(facts).collect()
}

fn modified_ns(path: &Path) -> LoadResult<String> {
    let metadata = std::fs::metadata(path).map_err(|error| LoadError::io(path, &error))?;
    metadata.modified().map(nanoseconds).map_err(|error| LoadError::io(path, &error))
}

fn content(bytes: &[u8], header_len: usize) -> Value {
    json!({
        "bytes": bytes.len(),
        "header_sha256": sha256(&[&bytes[..header_len]]),
        "samples_sha256": sha256(&samples(bytes)),
    })
}

/// Formats the nanoseconds since 1970, with a sign.
fn nanoseconds(time: SystemTime) -> String {
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => after.as_nanos().to_string(),
        Err(before) => format!("-{}", before.duration().as_nanos()),
    }
}

/// Returns evenly spaced samples, including the first and the last bytes; the whole file if it is small.
fn samples(bytes: &[u8]) -> Vec<&[u8]> {
    if bytes.len() < SAMPLES * SAMPLE_BYTES {
        return vec![bytes];
    }
    let span = bytes.len() - SAMPLE_BYTES; // from the first sample's start to the last one's
    // For a file of more than 2^57 bytes the product would overflow.
    let start = |n: usize| (span as u128 * n as u128 / (SAMPLES as u128 - 1)) as usize;
    (0..SAMPLES).map(|n| &bytes[start(n)..][..SAMPLE_BYTES]).collect()
}

/// Returns the SHA-256 of parts, one after the other, as 64 hexadecimal digits.
pub fn sha256(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sha256_has_the_published_value() {
        // FIPS 180-2, appendix B.1.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256(&[b"a", b"bc"]), expected);
    }

    #[test]
    fn samples_are_even_and_reach_both_ends() {
        let most = SAMPLES * SAMPLE_BYTES;
        for len in [0, 1, most - 1] {
            assert_eq!(samples(&vec![0; len])[0].len(), len);
        }
        for len in [most, most + 1, most + 63, 3 * most + 17] {
            let bytes = vec![0; len];
            let samples = samples(&bytes);
            let starts: Vec<usize> =
                samples.iter().map(|sample| sample.as_ptr() as usize - bytes.as_ptr() as usize).collect();
            assert!(samples.iter().all(|sample| sample.len() == SAMPLE_BYTES));
            assert_eq!((samples.len(), starts[0], starts[63]), (64, 0, len - SAMPLE_BYTES));
            let steps: Vec<usize> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let (least, most) = (steps.iter().min(), steps.iter().max());
            assert!(most.zip(least).is_some_and(|(most, least)| most - least <= 1), "{len}: {steps:?}");
        }
    }

    #[test]
    fn times_before_1970_differ_from_those_after() {
        let second = std::time::Duration::from_secs(1);
        assert_eq!(nanoseconds(SystemTime::UNIX_EPOCH + second), "1000000000");
        assert_eq!(nanoseconds(SystemTime::UNIX_EPOCH - second), "-1000000000");
    }

    #[test]
    fn only_long_rope_depends_on_the_context() {
        let scaling = RopeScaling::LongRope {
            short: vec![],
            long: vec![],
            original_context: 4096,
            attention_factor: 1.0,
        };
        let long_rope = RopeConfig::new(8, 1e4, scaling);
        assert_eq!([4096, 4097].map(|context| rope_in_force(&long_rope, context)), ["short", "long"]);
        let plain = RopeConfig { scaling: RopeScaling::None, ..long_rope };
        assert_eq!(rope_in_force(&plain, 4096), rope_in_force(&plain, 1 << 20));
    }
}
