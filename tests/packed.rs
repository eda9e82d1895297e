//! Promise: quantised safetensors folders hold exactly the values that their tools read from them.
//!
//! `packed/make.py` wrote a tiny Llama in every form, with the values that each packed matrix stands for. Integers are
//! kept in a block type that holds them exactly; with `--dtype f32` the logits are those of the dequantised weights.

use llmctl_kernel::dequantize_row;
use llmctl_models::load::model_facts;
use safetensors::SafeTensors;

use crate::common::prelude::*;
use crate::common::stored_tensors::{StoredTensor, StoredTensors};

/// The type that each form becomes; floats of 8 and 4 bits are f32 until they are loaded.
const FORMS: [(&str, Dtype); 17] = [
    ("awq", Dtype::Q5_0),
    ("fp8-block", Dtype::F32),
    ("fp8-channel", Dtype::F32),
    ("fp8-tensor", Dtype::F32),
    ("gptq", Dtype::Q5_0),
    ("gptq-3bit", Dtype::Q4_0),
    ("gptq-8bit", Dtype::Q8_0),
    ("gptq-order", Dtype::F32),
    ("gptq-symmetric", Dtype::Q4_0),
    ("int4", Dtype::Q4_0),
    ("int4-zeros", Dtype::Q5_0),
    ("int8", Dtype::Q8_0),
    ("mlx-3bit", Dtype::Q4_1),
    ("mlx-4bit", Dtype::Q4_1),
    ("mlx-6bit", Dtype::F32),
    ("mlx-8bit", Dtype::F32),
    ("nvfp4", Dtype::F32),
];

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/packed").join(name)
}

/// MiMo V2.5's form: matrices in parts that have their own blocks of scales.
const FUSED: &str = "fp8-fused";

/// The tensors of the checkpoint mimo-v2.5 that are not stored in [`FUSED`].
fn beside_fused() -> Vec<u8> {
    let file = crate::common::golden::checkpoint("mimo-v2.5").join("model.safetensors");
    let mut tensors = StoredTensors::from_bytes(&std::fs::read(file).expect("weights"));
    tensors.0.retain(|tensor| !tensor.name.contains("qkv_proj"));
    tensors.to_bytes()
}

/// Puts a model folder together: a form's file of matrices, the other tensors and a tokenizer.
fn folder(form: &str, weights: &str, config: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("config.json"), config).expect("a file");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(parity_folder().join("llama").join(name), path(name)).expect("a copy");
    }
    let mut map = BTreeMap::new();
    let read = |path: PathBuf| std::fs::read(path).expect("weights");
    let others = if form == FUSED { beside_fused() } else { read(data("others.safetensors")) };
    for (bytes, to) in [(read(data(form).join(weights)), "a.safetensors"), (others, "b.safetensors")] {
        let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
        map.extend(tensors.names().into_iter().map(|name| (name.to_owned(), to)));
        std::fs::write(path(to), &bytes).expect("a file");
    }
    let index = serde_json::json!({ "weight_map": map }).to_string();
    std::fs::write(path("model.safetensors.index.json"), index).expect("a file");
    folder
}

fn config(form: &str) -> String {
    std::fs::read_to_string(data(form).join("config.json")).expect("config.json")
}

fn packed(form: &str) -> TempDir {
    folder(form, "model.safetensors", &config(form))
}

/// The same model with plain weights.
fn plain(form: &str) -> TempDir {
    let mut config: Value = serde_json::from_str(&config(form)).expect("JSON");
    for key in ["quantization_config", "quantization", "attention_projection_layout"] {
        config.as_object_mut().expect("an object").remove(key);
    }
    folder(form, "dequantized.safetensors", &config.to_string())
}

/// MLX adds the minimum in one operation with the product, so that the last bit may differ.
fn tolerance(form: &str) -> f32 {
    if form.starts_with("mlx") { 1e-6 } else { 0.0 }
}

#[test]
fn every_packed_matrix_has_the_values_that_its_tool_reads() {
    for (form, expected) in FORMS {
        let folder = packed(form);
        let files = ModelFiles::open(&ModelSource::Folder(folder.path().into())).expect(form);
        let bytes = std::fs::read(data(form).join("dequantized.safetensors")).expect("weights");
        let reference = SafeTensors::deserialize(&bytes).expect("safetensors");
        let names = files.tensors().names();
        assert_eq!(names.len(), reference.names().len() + 4, "{form}: {names:?}");
        for name in reference.names() {
            let tensor = files.tensors().tensor(name).unwrap_or_else(|error| panic!("{form}: {error}"));
            let tensor = tensor.unwrap_or_else(|| panic!("{form}: no {name}"));
            let wanted = reference.tensor(name).expect("is there");
            assert_eq!(tensor.shape, wanted.shape(), "{form}: {name}");
            assert_eq!(tensor.dtype, expected, "{form}: {name} is {}", tensor.dtype.name());
            let described = files.tensors().describe(name).expect("described");
            assert_eq!(described.0, tensor.shape, "{form}: {name}");
            let mut values = vec![0.0; tensor.shape.iter().product()];
            dequantize_row(tensor.dtype, &tensor.bytes, &mut values);
            let wanted = wanted.data().as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw));
            for (at, (value, wanted)) in values.iter().zip(wanted).enumerate() {
                let difference = (value - wanted).abs();
                assert!(difference <= tolerance(form), "{form}: {name} at {at}: {value} instead of {wanted}");
            }
        }
    }
}

#[test]
fn a_packed_folder_has_the_logits_of_its_dequantised_weights() {
    let tokens: Vec<u32> = (0..40).map(|index| index * 37 % 380).collect();
    let logits = |folder: &Path, options: &LoadOptions| {
        let mut loaded = load_model(folder, options).unwrap_or_else(|error| panic!("{error}"));
        let notices: Vec<String> = loaded.notices.iter().map(ToString::to_string).collect();
        (Fed::new(&mut *loaded.model).feed(&tokens, 64), notices.join("\n"))
    };
    for (form, dtype) in FORMS {
        let (packed, plain) = (packed(form), plain(form));
        let (wanted, _) = logits(plain.path(), &exact());
        let (found, _) = logits(packed.path(), &exact());
        let most = if tolerance(form) > 0.0 { 1e-3 } else { 0.0 };
        let worst = wanted.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= most, "{form}: {worst}");
        // As loaded by default, integers are computed with as they are, and small floats in bf16.
        let (by_default, notices) = logits(packed.path(), &LoadOptions { dtype: None, ..exact() });
        let off = wanted.iter().zip(&by_default).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let scale = wanted.iter().map(|logit| logit.abs()).fold(0.0, f32::max);
        assert!(off < 0.05 * scale, "{form}: {off} of {scale}");
        assert!(notices.contains("7 matrices in ") && notices.contains("MiB"), "{form}: {notices}");
        assert_eq!(notices.contains("--dtype f32"), dtype == Dtype::F32, "{form}: {notices}");
    }
}

#[test]
fn matrices_in_parts_are_those_that_were_joined() {
    let tokens: Vec<u32> = (0..40).map(|index| index * 37 % 380).collect();
    let logits = |folder: &Path| {
        let mut loaded = load_model(folder, &exact()).unwrap_or_else(|error| panic!("{error}"));
        Fed::new(&mut *loaded.model).feed(&tokens, 64)
    };
    let (fused, plain) = (logits(packed(FUSED).path()), logits(plain(FUSED).path()));
    assert!(same_bits(&fused, &plain));
    // The scales of both parts begin anew, so that other parts have other values.
    let one = folder(FUSED, "model.safetensors", &config(FUSED).replace("\"fused_qkv\"", "\"split\""));
    let error = load_model(one.path(), &exact()).err().expect("rows of scales").to_string();
    assert!(error.contains("layers.0.self_attn.qkv_proj.weight") && error.contains("scales for"), "{error}");
}

#[test]
fn damaged_and_unknown_forms_are_refused_by_name() {
    for (form, from, to, word) in [
        ("awq", "\"gemm\"", "\"gemv\"", "gemv"),
        ("gptq", "\"gptq\"", "\"bitsandbytes\"", "bitsandbytes"),
        ("int4", "pack-quantized", "marlin-24", "marlin-24"),
    ] {
        let folder = folder(form, "model.safetensors", &config(form).replace(from, to));
        let error = load_model(folder.path(), &exact()).err().expect(form).to_string();
        assert!(error.contains(word) && error.contains("GGUF"), "{error}");
    }
    // Scales of another group size than config.json says.
    let awq = folder(
        "awq",
        "model.safetensors",
        &config("awq").replace("\"group_size\": 32", "\"group_size\": 64"),
    );
    let error = load_model(awq.path(), &exact()).err().expect("awq").to_string();
    assert!(error.contains("model.layers.0.") && error.contains("scales for"), "{error}");
}

/// A damage to the numbers of config.json or to the tensors whose names end so.
enum Damage {
    Group(u64),
    Type(&'static str, &'static str),
    Shape(&'static str, &'static [u64]),
    Bytes(&'static str, u8),
    Gone(&'static str),
}

use Damage::{Bytes, Gone, Group, Shape, Type};

/// What ended the process once, and its relatives, with words of the refusal. All but those of `Bytes` show in the headers.
const DAMAGES: [(&str, &[Damage], &str); 25] = [
    ("mlx-4bit", &[Group(0)], "groups of 0"),
    ("mlx-4bit", &[Group(48)], "groups of 48"),
    ("mlx-4bit", &[Group(u64::MAX)], "groups of"),
    ("mlx-4bit", &[Type(".biases", "I32")], "minimums of type I32"),
    ("awq", &[Group(0), Gone(".qzeros")], "groups of 0"),
    ("awq", &[Type(".qweight", "U8")], "words of type U8"),
    ("awq", &[Type(".qzeros", "I8")], "words of zero points of type I8"),
    ("awq", &[Shape(".scales", &[0])], "has 0 scales"),
    ("awq", &[Shape(".qweight", &[64, 0]), Shape(".scales", &[0])], "impossible shapes"),
    ("fp8-channel", &[Shape(".weight_scale", &[0])], "has 0 scales"),
    ("fp8-tensor", &[Shape(".weight_scale", &[0])], "has 0 scales"),
    ("fp8-block", &[Shape(".weight_scale_inv", &[0])], "has 0 scales"),
    ("int8", &[Shape(".weight_scale", &[0])], "has 0 scales"),
    ("int8", &[Type(".weight_scale", "I8")], "scales of type I8"),
    ("int4", &[Type(".weight_packed", "U8")], "words of type U8"),
    ("int4-zeros", &[Type(".weight_zero_point", "I8")], "words of zero points of type I8"),
    ("gptq", &[Type(".qweight", "U8")], "words of type U8"),
    ("gptq", &[Shape(".qweight", &[8, 0])], "impossible shapes"),
    ("gptq-order", &[Type(".g_idx", "F32")], "groups of columns of type F32"),
    ("gptq-order", &[Bytes(".g_idx", 7)], "has no group"),
    ("nvfp4", &[Type(".weight_packed", "F4")], "codes of type F4"),
    ("nvfp4", &[Shape(".weight_global_scale", &[0])], "no global scale"),
    (FUSED, &[Shape(".weight_scale_inv", &[3, 2])], "has 6 scales for 176 rows"),
    (FUSED, &[Shape(".weight", &[175, 32])], "has 175 rows in 2 parts"),
    (FUSED, &[Type(".weight_scale_inv", "F8_E4M3")], "scales of type F8_E4M3"),
];

fn damaged(form: &str, damages: &[Damage]) -> TempDir {
    let folder = packed(form);
    let file = folder.path().join("a.safetensors");
    let mut tensors = StoredTensors::from_bytes(&std::fs::read(&file).expect("weights"));
    for damage in damages {
        let damages = |tensor: &&mut StoredTensor, end: &str| tensor.name.ends_with(end);
        let tensors = &mut tensors.0;
        match *damage {
            Group(size) => {
                let config = config(form).replace("\"group_size\": 32", &format!("\"group_size\": {size}"));
                std::fs::write(folder.path().join("config.json"), config).expect("a file");
            }
            Type(end, dtype) => {
                tensors.iter_mut().filter(|it| damages(it, end)).for_each(|it| it.dtype = dtype.to_owned())
            }
            Shape(end, shape) => {
                tensors.iter_mut().filter(|it| damages(it, end)).for_each(|it| it.shape = shape.to_owned())
            }
            Bytes(end, byte) => {
                tensors.iter_mut().filter(|it| damages(it, end)).for_each(|it| it.bytes.fill(byte))
            }
            Gone(end) => tensors.retain(|tensor| !tensor.name.ends_with(end)),
        }
    }
    tensors.0.iter_mut().for_each(StoredTensor::refit);
    std::fs::write(&file, tensors.to_bytes()).expect("a file");
    let index = folder.path().join("model.safetensors.index.json");
    let mut map: Value = serde_json::from_slice(&std::fs::read(&index).expect("an index")).expect("JSON");
    let gone = |name: &str| damages.iter().any(|damage| matches!(damage, Gone(end) if name.ends_with(end)));
    map["weight_map"].as_object_mut().expect("an object").retain(|name, _| !gone(name));
    std::fs::write(&index, map.to_string()).expect("a file");
    folder
}

#[test]
fn damaged_parts_are_refused_with_the_tensors_name() {
    for (form, damages, words) in DAMAGES {
        let folder = damaged(form, damages);
        let error = load_model(folder.path(), &exact()).err().unwrap_or_else(|| panic!("{form}: {words}"));
        assert!(matches!(error, LoadError::Tensor { .. }), "{form}: {error:?}");
        let message = error.to_string();
        assert!(message.contains("model.layers.0.") && message.contains(words), "{form}: {message}");
        let shows = matches!(damages, [Bytes(..)]);
        let facts = model_facts(&ModelSource::Folder(folder.path().into())).expect(form);
        assert_eq!(facts.decoder.is_ok(), shows, "{form}, {words}: {:?}", facts.decoder);
    }
    let sound = model_facts(&ModelSource::Folder(packed("awq").path().into())).expect("awq");
    assert!(sound.decoder.is_ok(), "{:?}", sound.decoder);
}
