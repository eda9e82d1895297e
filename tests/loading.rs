//! Promise: real files load exactly, and a damaged or lying file is an error that names what is wrong, never a panic
//! and never a large allocation.

use llmctl_base::TopK;
use llmctl_kernel::dequantize_row;
use llmctl_models::load::hf;
use llmctl_models::load::tokenizer;
use llmctl_models::tensor::HostTensor;
use proptest::prelude::*;

use crate::common::alloc::largest_allocation;
use crate::common::gguf::{F16, F32, Q4_0, text_bytes};
use crate::common::prelude::*;

/// A parser may need some times the bytes it reads, but not more.
fn allocation_bound(file_bytes: usize) -> usize {
    64 * file_bytes + 4096
}

fn values(tensor: &HostTensor) -> Vec<f32> {
    let (rows, cols) = tensor.rows_cols();
    let mut values = vec![0.0; rows * cols];
    dequantize_row(tensor.dtype, &tensor.bytes, &mut values);
    values
}

fn read(source: &dyn TensorSource, name: &str) -> Option<HostTensor> {
    source.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn files_with_extension(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = vec![];
    for entry in std::fs::read_dir(folder).expect("a fixture folder") {
        let path = entry.expect("a folder entry").path();
        if path.is_dir() {
            found.extend(files_with_extension(&path, extension));
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}

// ---- real GGUF files

#[test]
fn every_gguf_fixture_reads_as_candle_reads_it() {
    use candle_core::quantized::gguf_file::Content;
    let Some(fixtures) = fixtures() else { return };
    let files: Vec<_> = ["models", "parity-gguf", "tokenizers"]
        .iter()
        .flat_map(|folder| files_with_extension(&fixtures.join(folder), "gguf"))
        .filter(|path| !path.to_string_lossy().contains("-of-0000"))
        .collect();
    assert!(files.len() > 40, "only {} files", files.len());
    for path in files {
        let gguf = Gguf::open(&path).unwrap_or_else(|error| panic!("{error}"));
        let mut file = File::open(&path).unwrap();
        let content = Content::read(&mut file).unwrap();
        assert_eq!(gguf.metadata().keys().count(), content.metadata.len(), "{}", path.display());
        assert_eq!(gguf.names().len(), content.tensor_infos.len(), "{}", path.display());
        for name in gguf.names() {
            let tensor = read(&gguf, &name).expect("a name that was listed");
            let candle = content.tensor(&mut file, &name, &candle_core::Device::Cpu).unwrap();
            assert_eq!(tensor.shape, candle.shape().dims(), "{name}");
            let expected = candle.dequantize(&candle_core::Device::Cpu).unwrap();
            let expected: Vec<f32> = expected.flatten_all().unwrap().to_vec1().unwrap();
            assert!(values(&tensor) == expected, "{}: {name}", path.display());
        }
    }
}

#[test]
fn vocabularies_read_completely() {
    let Some(fixtures) = fixtures() else { return };
    for path in files_with_extension(&fixtures.join("tokenizers"), "gguf") {
        let gguf = Gguf::open(&path).unwrap();
        let metadata = gguf.metadata();
        let tokens: Vec<&str> = metadata.require("tokenizer.ggml.tokens").unwrap();
        assert!(tokens.len() > 20_000, "{}: {} tokens", path.display(), tokens.len());
        let kinds: Vec<i32> = metadata.require("tokenizer.ggml.token_type").unwrap();
        assert_eq!(tokens.len(), kinds.len());
        if let Some(scores) = metadata.get::<Vec<f32>>("tokenizer.ggml.scores").unwrap() {
            assert_eq!(tokens.len(), scores.len());
        }
        let error = metadata.require::<Vec<u32>>("tokenizer.ggml.tokens").unwrap_err().to_string();
        assert!(error.contains("tokenizer.ggml.tokens") && error.contains("array of text"), "{error}");
    }
}

#[test]
fn a_split_model_reads_like_the_whole_from_either_shard() {
    let Some(fixtures) = fixtures() else { return };
    let folder = fixtures.join("models/gguf-dummy");
    let whole = Gguf::open(folder.join("dummy.gguf")).unwrap();
    for shard in ["dummy-00001-of-00002.gguf", "dummy-00002-of-00002.gguf"] {
        let split = Gguf::open(folder.join(shard)).unwrap();
        assert_eq!(split.paths().count(), 2);
        assert_eq!(split.names(), whole.names());
        for name in whole.names() {
            let (a, b) = (read(&split, &name).unwrap(), read(&whole, &name).unwrap());
            assert!(a.shape == b.shape && a.dtype == b.dtype && *a.bytes == *b.bytes, "{name}");
        }
        let keys = |gguf: &Gguf| gguf.metadata().keys().map(str::to_owned).collect::<Vec<_>>();
        let mut expected = keys(&whole);
        expected.extend(["split.count", "split.no", "split.tensors.count"].map(str::to_owned));
        expected.sort();
        assert_eq!(keys(&split), expected);
    }
}

#[test]
fn gguf_and_safetensors_of_one_model_hold_the_same_numbers() {
    const NAMES: [(&str, &str); 6] = [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.1.attn_norm.weight", "model.layers.1.input_layernorm.weight"),
        ("blk.1.ffn_gate.weight", "model.layers.1.mlp.gate_proj.weight"),
        ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
    ];
    let Some(fixtures) = fixtures() else { return };
    for model in words("llama llama-untied mistral qwen2 qwen3 gemma2 gemma3 olmo2 granite smollm3") {
        let gguf = Gguf::open(fixtures.join(format!("parity-gguf/{model}-f32.gguf"))).unwrap();
        let safetensors = Safetensors::open(fixtures.join("parity").join(model)).unwrap();
        let mut compared = 0;
        for (ours, theirs) in NAMES {
            let Some(b) = read(&safetensors, theirs) else { continue };
            let a = read(&gguf, ours).unwrap_or_else(|| panic!("{model} has no {ours}"));
            assert_eq!((a.dtype, b.dtype), (Dtype::F32, Dtype::Bf16), "{model}: {ours}");
            assert_eq!(a.shape, b.shape, "{model}: {ours}");
            // llama.cpp's converter adds Gemma's 1 to its norms.
            let plus = if model.starts_with("gemma") && ours.contains("norm") { 1.0 } else { 0.0 };
            let expected: Vec<f32> = values(&b).iter().map(|value| value + plus).collect();
            assert!(values(&a) == expected, "{model}: {ours}");
            compared += 1;
        }
        assert!(compared >= 5, "{model}: {compared} tensors");
    }
}

// ---- GGUF as written by tests

fn sample_gguf() -> GgufBuilder {
    let ramp: Vec<u8> = (0..12).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let halves: Vec<u8> =
        [1.0f32, -2.0, 0.5].iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect();
    GgufBuilder::new()
        .text("general.architecture", "llama")
        .u32("llama.block_count", 2)
        .f32("llama.rope.freq_base", 10000.0)
        .bool("tokenizer.ggml.add_bos_token", true)
        .u32s("llama.attention.head_count_kv", &[4, 2])
        .f32s("tokenizer.ggml.scores", &[0.0, -1.5])
        .texts("tokenizer.ggml.tokens", &["<s>", "ä"])
        .texts("broken.texts", &[&b"ok"[..], &[0xff]])
        .raw("wide.integer", 10, &7u64.to_le_bytes())
        .raw("negative.integer", 5, &(-3i32).to_le_bytes())
        .tensor("matrix", &[3, 4], F32, &ramp)
        .tensor("vector", &[3], F16, &halves)
        .tensor("blocks", &[2, 32], Q4_0, &[0x11; 36])
}

#[test]
fn metadata_getters_convert_widths_and_name_the_key_when_they_cannot() {
    let gguf = Gguf::from_bytes("sample.gguf", sample_gguf().build()).unwrap();
    let metadata = gguf.metadata();
    assert_eq!(metadata.get::<&str>("general.architecture").unwrap(), Some("llama"));
    assert_eq!(metadata.get::<u64>("llama.block_count").unwrap(), Some(2));
    assert_eq!(metadata.get::<u32>("wide.integer").unwrap(), Some(7));
    assert_eq!(metadata.get::<f32>("wide.integer").unwrap(), Some(7.0));
    assert_eq!(metadata.get::<i32>("negative.integer").unwrap(), Some(-3));
    assert_eq!(metadata.get::<bool>("tokenizer.ggml.add_bos_token").unwrap(), Some(true));
    assert_eq!(metadata.get::<Vec<&str>>("tokenizer.ggml.tokens").unwrap(), Some(vec!["<s>", "ä"]));
    assert_eq!(metadata.get::<Vec<f32>>("tokenizer.ggml.scores").unwrap(), Some(vec![0.0, -1.5]));
    assert_eq!(metadata.get::<Vec<&[u8]>>("broken.texts").unwrap(), Some(vec![&b"ok"[..], &[0xff]]));
    assert_eq!(metadata.get::<u32>("absent").unwrap(), None);
    assert_eq!(metadata.get::<Vec<u32>>("llama.attention.head_count_kv").unwrap(), Some(vec![4, 2]));
    for (error, words) in [
        (
            metadata.get::<u32>("general.architecture").map(drop),
            ["general.architecture", "is text, not an integer"],
        ),
        (metadata.get::<u32>("negative.integer").map(drop), ["negative.integer", "-3 is out of range"]),
        (metadata.get::<&str>("wide.integer").map(drop), ["wide.integer", "not text"]),
        (metadata.get::<bool>("wide.integer").map(drop), ["wide.integer", "not a bool"]),
        (metadata.get::<Vec<&str>>("broken.texts").map(drop), ["broken.texts", "element 1"]),
        (metadata.require::<u32>("absent").map(drop), ["absent", "missing"]),
    ] {
        assert_names(&error.unwrap_err(), &words);
    }
}

#[test]
fn tensors_come_out_with_their_shape_type_and_values_in_both_versions() {
    for version in [2, 3] {
        let gguf = Gguf::from_bytes("sample.gguf", sample_gguf().version(version).build()).unwrap();
        assert_eq!(gguf.names(), ["matrix", "vector", "blocks"]);
        let matrix = read(&gguf, "matrix").unwrap();
        assert_eq!((matrix.shape.as_slice(), matrix.dtype), (&[3, 4][..], Dtype::F32));
        assert_eq!(values(&matrix.slice_rows(1, 2)), [4.0, 5.0, 6.0, 7.0]);
        assert_eq!(values(&read(&gguf, "vector").unwrap()), [1.0, -2.0, 0.5]);
        assert_eq!(gguf.describe("blocks"), Some((vec![2, 32], Dtype::Q4_0)));
        assert!(read(&gguf, "absent").is_none() && gguf.describe("absent").is_none());
    }
}

#[test]
fn data_at_alignments_below_the_types_own_is_still_aligned_in_memory() {
    let ramp: Vec<u8> = (0..3).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let bytes = GgufBuilder::new()
        .alignment(1)
        .text("odd", "x")
        .tensor("byte", &[1], F16, &[0, 0])
        .tensor("ramp", &[3], F32, &ramp)
        .build();
    let gguf = Gguf::from_bytes("odd.gguf", bytes).unwrap();
    let tensor = read(&gguf, "ramp").unwrap();
    assert!((tensor.bytes.as_ptr() as usize).is_multiple_of(4));
    assert_eq!(values(&tensor), [0.0, 1.0, 2.0]);
}

#[test]
fn a_tensor_of_an_unsupported_type_fails_only_when_it_is_asked_for() {
    for (kind, name) in [(36, "number 36"), (255, "number 255"), (9, "9 (Q8_1)"), (4, "number 4")] {
        let bytes = sample_gguf().tensor("exotic", &[2, 64], kind, &[0; 72]).build();
        let gguf = Gguf::from_bytes("exotic.gguf", bytes).unwrap();
        assert!(read(&gguf, "matrix").is_some());
        assert_eq!(gguf.describe("exotic"), None);
        let error = gguf.tensor("exotic").unwrap_err();
        assert!(matches!(&error, LoadError::Tensor { tensor, .. } if tensor == "exotic"));
        assert_names(&error, &["exotic", name]);
    }
}

fn assert_names(error: &LoadError, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
}

#[test]
fn gguf_lies_are_named() {
    let array = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    let nested: Vec<u8> = (0..64).flat_map(|_| array(9, 1)).chain(array(0, 0)).collect();
    let b = GgufBuilder::new;
    let ok = [0u8; 48];
    let lies: Vec<(GgufBuilder, &[&str])> = vec![
        (b().claim_counts(u64::MAX, 0), &["header", "tensor count", "18446744073709551615"]),
        (b().claim_counts(0, u64::MAX), &["header", "metadata count"]),
        (b().claim_counts(1, 0), &["header", "tensor count"]),
        (sample_gguf().claim_counts(3, 11), &["tensor entry 1 of 3"]),
        (b().raw("huge.text", 8, &u64::MAX.to_le_bytes()), &["huge.text", "18446744073709551615 bytes"]),
        (b().raw("huge.text", 8, &(u64::MAX - 7).to_le_bytes()), &["huge.text"]),
        (b().raw("huge.array", 9, &array(8, u64::MAX)), &["huge.array", "claims 18446744073709551615 items"]),
        (b().raw("huge.array", 9, &array(4, 1 << 62)), &["huge.array"]),
        (b().raw("huge.array", 9, &array(0, 1 << 40)), &["huge.array"]),
        (b().raw("deep.array", 9, &nested), &["deep.array", "nested"]),
        (b().raw("odd.type", 13, &[0; 8]), &["odd.type", "value type 13"]),
        (b().raw("odd.type", 9, &array(99, 0)), &["odd.type", "value type 99"]),
        (b().raw("odd.bool", 7, &[2]), &["odd.bool", "2 is no bool"]),
        (b().raw("odd.text", 8, &text_bytes(&[0xc3, 0x28])), &["odd.text", "UTF-8"]),
        (b().u32("twice", 1).u32("twice", 1), &["twice", "appears twice"]),
        (b().u32("general.alignment", 0), &["general.alignment"]),
        (b().u32("general.alignment", 3), &["general.alignment"]),
        (b().u32("general.alignment", 1 << 31), &["general.alignment"]),
        (b().raw("general.alignment", 10, &(1u64 << 63).to_le_bytes()), &["general.alignment"]),
        (b().text("general.alignment", "32"), &["general.alignment", "text"]),
        (b().tensor("t", &[12], F32, &ok).tensor("t", &[12], F32, &ok), &["\"t\"", "twice"]),
        (b().tensor("a", &[12], F32, &ok).claim_tensor("b", &[4], F32, 32), &["overlaps"]),
        (b().tensor("a", &[12], F32, &ok).claim_tensor("b", &[1], F32, 4), &["\"b\"", "not aligned to 32"]),
        (b().claim_tensor("b", &[4], F32, 1 << 40), &["\"b\"", "truncated"]),
        (b().claim_tensor("b", &[4], F32, (-32i64) as u64), &["\"b\""]),
        (b().claim_tensor("b", &[1 << 60], F32, 0), &["\"b\""]),
        (b().claim_tensor("b", &[1 << 32, 1 << 32], F32, 0), &["\"b\"", "too many values"]),
        (b().claim_tensor("b", &[u64::MAX, u64::MAX, u64::MAX, u64::MAX], F32, 0), &["\"b\""]),
        (b().claim_tensor("b", &[0, 1 << 62], F32, 0), &["\"b\"", "zero"]),
        (b().claim_tensor("b", &[1, 1, 1, 1, 1], F32, 0), &["\"b\"", "5 dimensions"]),
        (b().tensor("b", &[2, 31], Q4_0, &ok), &["\"b\"", "31 values"]),
        (b().tensor("short", &[13], F32, &ok), &["short", "truncated"]),
        (b().tensor("long", &[2], F32, &[0; 96]), &["88 bytes follow"]),
        (b().version(1), &["version 1"]),
        (b().version(4), &["version 4"]),
        (b().version(3u32.swap_bytes()), &["big-endian"]),
    ];
    for (builder, words) in lies {
        let bytes = builder.build();
        let (len, input) = (bytes.len(), bytes);
        let (result, largest) = largest_allocation(|| Gguf::from_bytes("lie.gguf", input));
        match result {
            Err(error) => assert_names(&error, &[words, &["lie.gguf"]].concat()),
            Ok(gguf) => panic!("{words:?} was believed: {gguf:?}"),
        }
        assert!(largest <= allocation_bound(len), "{words:?}: {largest} bytes for a file of {len}");
    }
    for (bytes, word) in [(&b""[..], "header"), (b"GGU", "header"), (b"PK\x03\x04....", "not a GGUF file")] {
        assert_names(&Gguf::from_bytes("lie.gguf", bytes.to_vec()).unwrap_err(), &[word]);
    }
}

fn split_folder(shards: &[(&str, GgufBuilder)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, builder) in shards {
        std::fs::write(folder.path().join(name), builder.build()).unwrap();
    }
    folder
}

fn shard(number: u32, count: u32, total: u32) -> GgufBuilder {
    let kind_u16 = 2;
    GgufBuilder::new()
        .raw("split.no", kind_u16, &(number as u16).to_le_bytes())
        .raw("split.count", kind_u16, &(count as u16).to_le_bytes())
        .u32("split.tensors.count", total)
        .tensor(&format!("t{number}"), &[1], F32, &1f32.to_le_bytes())
}

#[test]
fn damaged_splits_are_named() {
    let (first, second) = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf");
    let whole = split_folder(&[(first, shard(0, 2, 2)), (second, shard(1, 2, 2))]);
    assert_eq!(Gguf::open(whole.path().join(second)).unwrap().names(), ["t0", "t1"]);
    let alone = split_folder(&[(first, shard(0, 2, 2))]);
    let error = Gguf::open(alone.path().join(first)).unwrap_err();
    assert!(matches!(&error, LoadError::NotFound(path) if path.ends_with(second)), "{error}");
    let opened = |shards: &[(&str, GgufBuilder)]| {
        let folder = split_folder(shards);
        Gguf::open(folder.path().join(shards[0].0)).unwrap_err()
    };
    assert_names(
        &opened(&[(first, shard(0, 2, 3)), (second, shard(1, 2, 3))]),
        &["split.tensors.count", "claims 3"],
    );
    assert_names(&opened(&[(first, shard(0, 2, 2)), (second, shard(0, 2, 2))]), &[second, "shard 2 of 2"]);
    assert_names(&opened(&[(first, shard(0, 2, 2)), (second, shard(1, 3, 2))]), &[second, "shard 2 of 2"]);
    assert_names(&opened(&[("renamed.gguf", shard(0, 2, 2))]), &["renamed.gguf", "-00001-of-00002.gguf"]);
    assert_names(&opened(&[(first, shard(5, 2, 2))]), &["split.no"]);
    let twice = shard(1, 2, 3).tensor("t0", &[1], F32, &[0; 4]);
    assert_names(&opened(&[(first, shard(0, 2, 3)), (second, twice)]), &["t0", "twice"]);
}

#[test]
fn an_error_of_a_tensor_names_its_file_among_several() {
    let folder =
        split_folder(&[("m-00001-of-00002.gguf", shard(0, 2, 2)), ("m-00002-of-00002.gguf", shard(1, 2, 2))]);
    let files = ModelFiles::open(&ModelSource::Gguf(folder.path().join("m-00001-of-00002.gguf"))).unwrap();
    let placed = |tensor: &str| {
        let error = LoadError::Tensor { tensor: tensor.to_owned(), message: "has shape [1]".to_owned() };
        files.placed(error).to_string()
    };
    assert!(placed("t1").contains("has shape [1] (in ") && placed("t1").ends_with("m-00002-of-00002.gguf)"));
    assert_eq!(placed("t9"), "tensor \"t9\": has shape [1]");
}

/// Parses and reads everything; the result does not matter, only that nothing panics or asks for much memory.
fn exercise_gguf(bytes: Vec<u8>) -> Result<(), LoadError> {
    let len = bytes.len();
    let (result, largest) = largest_allocation(|| {
        let gguf = Gguf::from_bytes("damaged.gguf", bytes)?;
        for name in gguf.names() {
            if let Ok(Some(tensor)) = gguf.tensor(&name) {
                assert!(tensor.bytes.len() <= len);
            }
        }
        for key in gguf.metadata().keys() {
            let _ = gguf.metadata().get::<Vec<&str>>(key);
            let _ = gguf.metadata().get::<Vec<f32>>(key);
            let _ = gguf.metadata().get::<&str>(key);
            let _ = gguf.metadata().get::<u32>(key);
        }
        Ok(())
    });
    assert!(largest <= allocation_bound(len), "{largest} bytes for a file of {len}");
    result
}

// ---- safetensors as written by tests

fn safetensors_file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

fn sample_safetensors() -> Vec<u8> {
    let header = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]},
        "f":{"dtype":"F32","shape":[2,1],"data_offsets":[6,14]},"i":{"dtype":"I64","shape":[1],"data_offsets":[14,22]}}"#;
    let data = [&[0x80, 0x3f, 0, 0x40, 0, 0xc0][..], &1.5f32.to_le_bytes(), &(-4f32).to_le_bytes(), &[0; 8]]
        .concat();
    safetensors_file(header, &data)
}

#[test]
fn safetensors_read_exactly_and_aligned() {
    let model = Safetensors::from_bytes("m.safetensors", sample_safetensors()).unwrap();
    assert_eq!(model.names(), ["b", "f", "i"]);
    assert_eq!(values(&read(&model, "b").unwrap()), [1.0, 2.0, -2.0]);
    let unaligned_in_the_file = read(&model, "f").unwrap();
    assert!((unaligned_in_the_file.bytes.as_ptr() as usize).is_multiple_of(4));
    assert_eq!(values(&unaligned_in_the_file), [1.5, -4.0]);
    assert_eq!(model.describe("f"), Some((vec![2, 1], Dtype::F32)));
    assert_names(&model.tensor("i").unwrap_err(), &["\"i\"", "I64"]);
    assert!(read(&model, "absent").is_none());
}

#[test]
fn safetensors_lies_are_named() {
    let one = |entry: &str, data: usize| safetensors_file(&format!("{{\"t\":{entry}}}"), &vec![0; data]);
    // Sizes below 2^61 whose offsets add up to just under 2^64: a sum with the header's length would wrap.
    let step = (1u64 << 60) - 8;
    let wrapping: Vec<String> = (0..16u64)
        .map(|i| {
            let (start, end) = (i * step, (i + 1) * step);
            format!(r#""t{i}":{{"dtype":"U8","shape":[{step}],"data_offsets":[{start},{end}]}}"#)
        })
        .collect();
    let lies: Vec<(Vec<u8>, &[&str])> = vec![
        (vec![], &["header"]),
        (vec![1, 2, 3], &["header"]),
        (u64::MAX.to_le_bytes().to_vec(), &["header", "18446744073709551615"]),
        (9u64.to_le_bytes().to_vec(), &["header", "claims 9 bytes"]),
        (safetensors_file("{", &[]), &["header", "line 1"]),
        (safetensors_file("[]", &[]), &["header"]),
        (safetensors_file(&"[".repeat(100_000), &[]), &["header"]),
        (safetensors_file("\u{0}\u{1}", &[]), &["header"]),
        (one(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#, 4), &["header"]),
        (one(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#, 8), &["header", "t"]),
        (one(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,0]}"#, 4), &["header", "t"]),
        (one(r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#, 4), &["header"]),
        (one(r#"{"dtype":"F99","shape":[1],"data_offsets":[0,4]}"#, 4), &["header", "F99"]),
        (one(r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}"#, 4), &["header"]),
        (one(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#, 3), &["\"t\"", "truncated"]),
        (one(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#, 5), &["end of file", "1 bytes follow"]),
        (safetensors_file(&format!("{{{}}}", wrapping.join(",")), &[]), &["truncated"]),
    ];
    for (bytes, words) in lies {
        let len = bytes.len();
        let (result, largest) = largest_allocation(|| Safetensors::from_bytes("lie.safetensors", bytes));
        match result {
            Err(error) => assert_names(&error, &[words, &["lie.safetensors"]].concat()),
            Ok(model) => panic!("{words:?} was believed: {model:?}"),
        }
        assert!(largest <= allocation_bound(len), "{words:?}: {largest} bytes for a file of {len}");
    }
}

#[test]
fn shards_and_their_index_must_agree() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    let tensor = |name: &str| {
        let header = format!(r#"{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
        safetensors_file(&header, &1f32.to_le_bytes())
    };
    write("one.safetensors", &tensor("a"));
    write("two.safetensors", &tensor("b"));
    let open = |map: &str| {
        write(
            "model.safetensors.index.json",
            format!(r#"{{"metadata":{{}},"weight_map":{map}}}"#).as_bytes(),
        );
        Safetensors::open(folder.path())
    };
    let good = open(r#"{"b":"two.safetensors","a":"one.safetensors"}"#).unwrap();
    assert_eq!(values(&read(&good, "b").unwrap()), [1.0]);
    assert_eq!((good.names().len(), good.paths().count()), (2, 2));
    for (map, words) in [
        (r#"{"a":"one.safetensors","b":"three.safetensors"}"#, &["three.safetensors", "no such file"][..]),
        (r#"{"a":"one.safetensors","c":"two.safetensors"}"#, &["\"c\"", "does not have it"]),
        (r#"{"a":"two.safetensors","b":"one.safetensors"}"#, &["\"a\"", "does not have it"]),
        (r#"{"a":"one.safetensors","b":"one.safetensors"}"#, &["\"b\"", "does not have it"]),
        (r#"{"a":"../one.safetensors"}"#, &["\"a\"", "not a plain file name"]),
        (r#"{"a":"/etc/passwd"}"#, &["\"a\"", "not a plain file name"]),
        (r#"{"a":".."}"#, &["\"a\"", "not a plain file name"]),
        (r#"{"a":""}"#, &["\"a\"", "not a plain file name"]),
        (r#"{"a":7}"#, &["weight_map"]),
        (r#"{}"#, &["weight_map", "no tensors"]),
        (r#"[]"#, &["weight_map"]),
    ] {
        assert_names(&open(map).unwrap_err(), words);
    }
    write("two.safetensors", &tensor("a"));
    let error = open(r#"{"a":"one.safetensors","b":"two.safetensors"}"#).unwrap_err();
    assert_names(&error, &["two.safetensors", "\"a\"", "two shards"]);
    let both = r#"{"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"c":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
    write("two.safetensors", &safetensors_file(both, &[0; 8]));
    let error = open(r#"{"a":"one.safetensors","b":"two.safetensors"}"#).unwrap_err();
    assert_names(&error, &["two.safetensors", "\"c\"", "not in the index"]);
}

fn exercise_safetensors(bytes: Vec<u8>) -> Result<(), LoadError> {
    let len = bytes.len();
    let (result, largest) = largest_allocation(|| {
        let model = Safetensors::from_bytes("damaged.safetensors", bytes)?;
        for name in model.names() {
            if let Ok(Some(tensor)) = model.tensor(&name) {
                assert!(tensor.bytes.len() <= len);
            }
        }
        Ok(())
    });
    assert!(largest <= allocation_bound(len), "{largest} bytes for a file of {len}");
    result
}

// ---- damage at random

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_truncated_file_is_an_error(fraction in 0.0..1.0f64) {
        let gguf = sample_gguf().build();
        let cut = (fraction * gguf.len() as f64) as usize;
        prop_assert!(exercise_gguf(gguf[..cut].to_vec()).is_err(), "cut to {} bytes", cut);
        let safetensors = sample_safetensors();
        let cut = (fraction * safetensors.len() as f64) as usize;
        prop_assert!(exercise_safetensors(safetensors[..cut].to_vec()).is_err(), "cut to {} bytes", cut);
    }

    #[test]
    fn flipped_bytes_neither_panic_nor_allocate_much(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        extreme in any::<bool>(),
    ) {
        for (mut bytes, exercise) in [
            (sample_gguf().build(), exercise_gguf as fn(Vec<u8>) -> _),
            (sample_safetensors(), exercise_safetensors),
        ] {
            for (index, value) in &flips {
                let at = index.index(bytes.len());
                bytes[at] = if extreme { 0xff } else { *value };
            }
            let _ = exercise(bytes);
        }
    }

    #[test]
    fn noise_after_the_magic_is_an_error(noise in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(&noise);
        // Counts of zero make a valid empty file; anything else would need names that noise does not have.
        if noise.len() >= 16 && noise[..16] != [0; 16] {
            prop_assert!(exercise_gguf(bytes).is_err());
        }
        let _ = exercise_safetensors(safetensors_file(&String::from_utf8_lossy(&noise), &noise));
    }
}

// ---- Hugging Face folders

#[test]
fn every_hugging_face_fixture_reads() {
    let Some(fixtures) = fixtures() else { return };
    let mut with_template = 0;
    let configs = ["models", "parity", "tokenizers"]
        .iter()
        .flat_map(|folder| files_with_extension(&fixtures.join(folder), "json"))
        .filter(|path| path.ends_with("tokenizer_config.json"));
    for path in configs {
        let folder = path.parent().unwrap();
        let config = hf::tokenizer_config(folder).unwrap();
        let templates = hf::chat_templates(folder, config.as_ref()).unwrap();
        with_template += usize::from(templates.default.is_some());
        tokenizer::hf_settings(folder).unwrap();
        hf::generation_config(folder).unwrap();
    }
    assert!(with_template >= 15, "{with_template} templates");
    let stories = fixtures.join("models/stories260K/hf");
    assert_eq!(hf::generation_config(&stories).unwrap().unwrap().eos_token_ids, [1, 2]);
    assert_eq!(hf::config(&stories).unwrap()["model_type"], "llama");
    let model = Safetensors::open(&stories).unwrap();
    assert!(!model.names().is_empty());
}

fn generation_config(json: &str) -> Result<hf::GenerationConfig, LoadError> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("generation_config.json"), json).unwrap();
    hf::generation_config(folder.path()).map(|config| config.expect("the file is there"))
}

#[test]
fn generation_defaults_are_read_as_the_publisher_means_them() {
    let config = generation_config(
        r#"{"do_sample":true,"temperature":0.6,"top_k":20,"top_p":0.95,"min_p":0.05,"repetition_penalty":1.05,"typical_p":0.9,
            "eos_token_id":[7,9],"pad_token_id":null}"#,
    )
    .unwrap();
    assert_eq!(config.eos_token_ids, [7, 9]);
    assert_eq!(config.defaults.top_k, Some(TopK::Best(20)));
    let defaults = config.defaults.numbers;
    assert_eq!((defaults.temperature, defaults.top_p), (Some(0.6), Some(0.95)));
    assert_eq!((defaults.min_p, defaults.repetition_penalty), (Some(0.05), Some(1.05)));
    assert_eq!((defaults.typical_p, defaults.top_n_sigma), (Some(0.9), None));
    let gemma = generation_config(r#"{"do_sample":true,"top_k":64}"#).unwrap().defaults;
    assert_eq!(gemma.numbers.temperature, Some(1.0), "as transformers samples");
    let one = generation_config(r#"{"eos_token_id":7,"top_k":0,"temperature":null}"#).unwrap();
    assert_eq!((one.eos_token_ids, one.defaults), (vec![7], Default::default()));
    let greedy = r#"{"do_sample":false,"temperature":0.6,"top_p":0.9,"top_k":5,"repetition_penalty":1.1}"#;
    let greedy = generation_config(greedy).unwrap().defaults;
    assert_eq!(greedy.top_k, None);
    let greedy = greedy.numbers;
    assert_eq!((greedy.temperature, greedy.top_p), (Some(0.0), None));
    assert_eq!(greedy.repetition_penalty, Some(1.1));
}

#[test]
fn bad_generation_defaults_name_the_key() {
    for (json, words) in [
        (r#"{"temperature":"hot"}"#, &["temperature", "\"hot\" is not a number"][..]),
        (r#"{"temperature":-1}"#, &["temperature", "-1 is not in [0, 2]"]),
        (r#"{"temperature":1e999}"#, &["generation_config.json"]),
        (r#"{"top_p":0}"#, &["top_p"]),
        (r#"{"top_k":1.5}"#, &["top_k", "1.5"]),
        (r#"{"top_k":-2}"#, &["top_k", "-2"]),
        (r#"{"min_p":2}"#, &["min_p"]),
        (r#"{"repetition_penalty":0}"#, &["repetition_penalty"]),
        (r#"{"do_sample":"no"}"#, &["do_sample"]),
        (r#"{"eos_token_id":-1}"#, &["eos_token_id", "-1"]),
        (r#"{"eos_token_id":[1,"2"]}"#, &["eos_token_id"]),
        (r#"{"eos_token_id":4294967296}"#, &["eos_token_id"]),
        (r#"[]"#, &["not an object"]),
        ("{\"a\": 1,\n\"b\" 2}", &["line 2 column 5"]),
    ] {
        let error = generation_config(json).unwrap_err();
        assert_names(&error, &[words, &["generation_config.json"]].concat());
    }
}

#[test]
fn chat_templates_come_from_the_first_place_that_has_them() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let read = || {
        let config = hf::tokenizer_config(folder.path())?;
        hf::chat_templates(folder.path(), config.as_ref())
    };
    assert_eq!(read().unwrap(), hf::ChatTemplates::default());
    write(
        "tokenizer_config.json",
        r#"{"chat_template":[{"name":"tool_use","template":"T"},{"name":"default","template":"D"}]}"#,
    );
    let several = read().unwrap();
    assert_eq!(several.default.as_deref(), Some("D"));
    assert_eq!(several.others, [("tool_use".to_owned(), "T".to_owned())]);
    assert!(several.notice().unwrap().to_string().contains("tool_use"));
    write("tokenizer_config.json", r#"{"chat_template":[{"name":"rag","template":"R"}]}"#);
    assert_eq!(read().unwrap().default.as_deref(), Some("R"));
    write("tokenizer_config.json", r#"{"chat_template":"S"}"#);
    assert_eq!(read().unwrap().default.as_deref(), Some("S"));
    write("chat_template.json", r#"{"chat_template":"J"}"#);
    assert_eq!(read().unwrap().default.as_deref(), Some("J"));
    write("chat_template.jinja", "{{ x }}");
    assert_eq!(read().unwrap().default.as_deref(), Some("{{ x }}"));
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    for bad in
        [r#"{"chat_template":7}"#, r#"{"chat_template":[{"name":"default"}]}"#, r#"{"chat_template":["x"]}"#]
    {
        write("chat_template.json", bad);
        assert_names(&read().unwrap_err(), &["chat_template.json", "chat_template"]);
    }
}

#[test]
fn odd_files_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing.gguf");
    assert!(matches!(Gguf::open(&missing), Err(LoadError::NotFound(path)) if path == missing));
    assert!(
        matches!(Safetensors::open(folder.path()), Err(LoadError::NotFound(path)) if path.ends_with("model.safetensors"))
    );
    assert!(
        matches!(hf::config(folder.path()), Err(LoadError::NotFound(path)) if path.ends_with("config.json"))
    );
    assert_names(&Gguf::open(folder.path()).unwrap_err(), &["not a regular file"]);
    let empty = folder.path().join("empty.gguf");
    std::fs::write(&empty, "").unwrap();
    assert_names(&Gguf::open(&empty).unwrap_err(), &["empty.gguf", "header"]);
    let long = folder.path().join("config.json");
    let file = File::create(&long).unwrap();
    file.set_len(hf::MAX_FILE_BYTES + 1).unwrap();
    assert_names(&hf::config(folder.path()).unwrap_err(), &["config.json", "longer than"]);
}
