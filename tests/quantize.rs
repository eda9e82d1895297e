//! Promise: `llmctl quantize` writes the model that it reads, with the types that llama.cpp's quantiser would choose.
//!
//! A file in f32 computes the folder's logits to the bit and equals the file that llama.cpp's converter made;
//! `mixes.json` holds llama.cpp's choice for each tensor of models that differ where the rules do (recorded by
//! `llama_cpp_mixes.py`). Quantised files stay within bounds of the divergence, and an importance matrix lowers it.

use llmctl_models::load::divergence::{Divergence, Predictions};
use llmctl_models::load::export::{Export, ExportOptions, Imatrix, MIXES, QuantMix, WriteEnd};
use llmctl_models::text::Encode;

use crate::common::gguf::F32;
use crate::common::k_quants::write_k_quants;
use crate::common::prelude::*;
#[cfg(unix)]
use crate::common::terminal;

/// Families whose folders can be written, by folder of the parity table.
const FAMILIES: &str =
    "gemma2 gemma3 granite llama llama-untied mistral olmo2 phi3 qwen2 qwen3 qwen3-moe smollm3";

fn mix(name: &str) -> QuantMix {
    MIXES.into_iter().find(|mix| mix.name == name).expect(name)
}

fn source(path: &Path) -> ModelSource {
    if path.is_dir() { ModelSource::Folder(path.into()) } else { ModelSource::Gguf(path.into()) }
}

fn write(from: &Path, to: &Path, name: &str, imatrix: Option<&Imatrix>) -> Result<(), LoadError> {
    let files = ModelFiles::open(&source(from))?;
    let export = Export::plan(&files, &ExportOptions { mix: mix(name), imatrix, name: "model" })?;
    assert_eq!(export.write(to, &mut |_, _| true)?, WriteEnd::Done);
    Ok(())
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/quantize").join(name)
}

/// Names and shapes of the tensors that `llama_cpp_mixes.py` writes, in its order.
fn recorded_tensors(model: &Value) -> Vec<(String, Vec<usize>)> {
    let count = |key: &str| model[key].as_u64().expect(key) as usize;
    let (cols, experts, is_falcon) = (count("columns"), count("experts"), model["architecture"] == "falcon");
    let mut tensors = vec![("token_embd.weight".to_owned(), vec![2, cols])];
    if model["tied"] == false {
        tensors.push(("output.weight".to_owned(), vec![2, cols]));
    }
    tensors.push(("output_norm.weight".to_owned(), vec![cols]));
    for layer in 0..count("layers") {
        let mut add = |part: &str, shape: &[usize]| {
            tensors.push((format!("blk.{layer}.{part}.weight"), shape.to_vec()));
        };
        add("attn_norm", &[cols]);
        let attention = if is_falcon { &["attn_qkv"][..] } else { &["attn_q", "attn_k", "attn_v"] };
        attention.iter().for_each(|part| add(part, &[2, cols]));
        add("attn_output", &[2, cols]);
        if experts > 0 {
            add("ffn_gate_inp", &[experts, cols]);
        }
        let parts = if is_falcon { &["up", "down"][..] } else { &["gate", "up", "down"] };
        for part in parts {
            match experts {
                0 => add(&format!("ffn_{part}"), &[2, cols]),
                _ => add(&format!("ffn_{part}_exps"), &[experts, 2, cols]),
            }
        }
    }
    tensors
}

fn recorded_file(model: &Value, tensors: &[(String, Vec<usize>)]) -> Vec<u8> {
    let architecture = model["architecture"].as_str().expect("architecture");
    let number = |key: &str| model[key].as_u64().expect(key) as u32;
    let mut file = GgufBuilder::new().text("general.architecture", architecture);
    for (key, value) in [
        ("block_count", number("layers")),
        ("attention.head_count", number("heads")),
        ("attention.head_count_kv", number("kv_heads")),
    ] {
        file = file.u32(&format!("{architecture}.{key}"), value);
    }
    for (name, shape) in tensors {
        let len: usize = shape.iter().product();
        file = file.tensor(name, shape, F32, &vec![0; 4 * len]);
    }
    file.build()
}

#[test]
fn mixes_choose_the_types_that_llama_cpp_chooses() {
    let json = std::fs::read_to_string(data("mixes.json")).expect("mixes.json");
    let models: BTreeMap<String, Value> = serde_json::from_str(&json).expect("mixes.json");
    let folder = tempfile::tempdir().expect("a folder");
    let mut compared = 0;
    for (name, model) in &models {
        let tensors = recorded_tensors(model);
        let path = folder.path().join(format!("{name}.gguf"));
        std::fs::write(&path, recorded_file(model, &tensors)).expect("a file");
        let files = ModelFiles::open(&ModelSource::Gguf(path)).expect("opens");
        let imatrix = (model["has_importance"] == true).then(|| importance_of(folder.path(), &tensors));
        for (mix_name, expected) in model["types"].as_object().expect("types") {
            let options = ExportOptions { mix: mix(mix_name), imatrix: imatrix.as_ref(), name: "model" };
            let export = Export::plan(&files, &options).expect("a plan");
            let expected: Vec<&str> = expected.as_str().expect("runs").split(' ').flat_map(run).collect();
            let found: Vec<&str> = export.types().map(|(_, dtype)| dtype.name()).collect();
            for (((tensor, _), found), expected) in tensors.iter().zip(&found).zip(&expected) {
                assert_eq!(found, expected, "{name}: {mix_name}: {tensor}");
            }
            assert_eq!(found.len(), expected.len(), "{name}: {mix_name}");
            compared += found.len();
        }
    }
    assert!(compared > 10_000, "{compared} tensors");
}

/// `q4_k*3` is three tensors of this type.
fn run(run: &str) -> impl Iterator<Item = &str> {
    let (name, count) = run.split_once('*').unwrap_or((run, "1"));
    std::iter::repeat_n(name, count.parse().expect("a count"))
}

/// Equal importance for every column of every matrix.
fn importance_of(folder: &Path, tensors: &[(String, Vec<usize>)]) -> Imatrix {
    let matrices: Vec<_> = tensors.iter().filter(|(_, shape)| shape.len() > 1).collect();
    let mut file = (matrices.len() as u32).to_le_bytes().to_vec();
    for (name, shape) in matrices {
        file.extend((name.len() as u32).to_le_bytes());
        file.extend(name.as_bytes());
        file.extend(1u32.to_le_bytes());
        let cols = shape[shape.len() - 1];
        file.extend((cols as u32).to_le_bytes());
        file.extend(1f32.to_le_bytes().repeat(cols));
    }
    let path = folder.join("ones.dat");
    std::fs::write(&path, file).expect("a file");
    Imatrix::open(&path).expect("an importance matrix")
}

#[test]
fn a_folder_written_in_f32_has_the_same_logits_to_the_bit() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in FAMILIES.split(' ') {
        let (checkpoint, path) = (parity_folder().join(name), folder.path().join(format!("{name}.gguf")));
        write(&checkpoint, &path, "F32", None).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut before = load_model(&checkpoint, &exact()).expect(name);
        let mut after = load_model(&path, &exact()).unwrap_or_else(|error| panic!("{name}: {error}"));
        for prompt in golden_prompts(&checkpoint) {
            let [from_folder, from_gguf] =
                [&mut before, &mut after].map(|loaded| Fed::new(&mut *loaded.model).feed(&prompt.tokens, 64));
            assert!(same_bits(&from_folder, &from_gguf), "{name} {}", prompt.name);
        }
        let text = "I'LL say: na\u{ef}ve \u{6f22}\u{5b57} 12345 <|im_end|>\n\t  x";
        let encode = |loaded: &LoadedModel| {
            let options = Encode { add_special: true, parse_special: true };
            loaded.texts.tokenizer.encode(text, options).expect("encodes")
        };
        assert_eq!(encode(&before), encode(&after), "{name}");
        assert_eq!(before.texts.chat_templates, after.texts.chat_templates, "{name}");
        assert_eq!(before.texts.end_of_generation, after.texts.end_of_generation, "{name}");
    }
}

/// Keys that llama.cpp's converter derives from the name of the folder, and those that it leaves to defaults.
fn is_beside_the_model(key: &str) -> bool {
    ["general.name", "general.size_label"].contains(&key)
        || ["add_bos_token", "add_eos_token"].iter().any(|part| key.ends_with(part))
}

#[test]
fn a_folder_becomes_the_file_that_llama_cpps_converter_makes() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in FAMILIES.split(' ') {
        let Some(theirs) = parity_gguf(&format!("{name}-f32.gguf")) else {
            eprintln!("{name:14} has no GGUF form here");
            continue;
        };
        let path = folder.path().join(format!("{name}.gguf"));
        write(&parity_folder().join(name), &path, "F32", None).expect(name);
        let (ours, theirs) = (Gguf::open(&path).expect(name), Gguf::open(&theirs).expect(name));
        let entries = |gguf: &Gguf| -> BTreeMap<String, Vec<u8>> {
            let all = gguf.metadata().encoded();
            all.map(|(key, value)| (key.to_owned(), value.to_vec()))
                .filter(|(key, _)| !is_beside_the_model(key))
                .collect()
        };
        let (mut our_keys, their_keys) = (entries(&ours), entries(&theirs));
        // llama.cpp's form does not carry the window, and leaves Gemma 2's only frequency to the default.
        if name == "mistral" {
            assert!(our_keys.remove("llama.attention.sliding_window").is_some());
        }
        if name == "gemma2" {
            assert!(our_keys.remove("gemma2.rope.freq_base").is_some());
        }
        for (key, value) in &their_keys {
            assert_eq!(our_keys.get(key), Some(value), "{name}: {key}");
        }
        let more: Vec<_> = our_keys.keys().filter(|key| !their_keys.contains_key(*key)).collect();
        assert!(more.is_empty(), "{name}: {more:?}");
        let sorted = |gguf: &Gguf| {
            let mut names: Vec<String> = gguf.names().iter().map(ToString::to_string).collect();
            names.sort();
            names
        };
        assert_eq!(sorted(&ours), sorted(&theirs), "{name}");
        for tensor in sorted(&ours) {
            let [a, b] = [&ours, &theirs].map(|gguf| gguf.tensor(&tensor).expect("reads").expect("is there"));
            assert_eq!((a.dtype, &a.shape), (b.dtype, &b.shape), "{name}: {tensor}");
            assert_eq!(*a.bytes, *b.bytes, "{name}: {tensor}");
        }
    }
}

#[test]
fn a_gguf_file_written_in_its_own_type_keeps_every_tensor_and_key() {
    let Some(theirs) = parity_gguf("qwen3-q8_0.gguf") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("again.gguf");
    write(&theirs, &path, "Q8_0", None).expect("writes");
    let (before, after) = (Gguf::open(&theirs).expect("opens"), Gguf::open(&path).expect("opens"));
    assert!(before.metadata().encoded().eq(after.metadata().encoded()));
    for name in before.names() {
        let [a, b] = [&before, &after].map(|gguf| gguf.tensor(&name).expect("reads").expect("is there"));
        assert_eq!((a.dtype, &a.shape, &*a.bytes), (b.dtype, &b.shape, &*b.bytes), "{name}");
    }
}

/// The predictions of a file, as stored, over a story.
fn predictions(path: &Path) -> Predictions {
    let options = LoadOptions { dtype: None, ..exact() };
    let mut loaded = load_model(path, &options).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let text = include_str!("../src/cli/model/quantize_check.txt");
    let tokens = loaded.texts.tokenizer.encode(text, Encode::default()).expect("encodes");
    Predictions::of(&mut *loaded.model, &tokens).expect("computes")
}

fn divergence(before: &Predictions, path: &Path) -> Divergence {
    before.divergence(&predictions(path)).expect("compares")
}

/// A trained model of 1 million weights, whose rows hold blocks of 32 but not of 256.
#[test]
fn each_mix_stays_within_its_divergence_and_importance_lowers_it() {
    let Some(model) = fixtures().map(|fixtures| fixtures.join("models/babyllama-361/hf")) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("out.gguf");
    let before = predictions(&model);
    for (name, bound) in
        listed::<(&str, f64)>("quantize", "each_mix_stays_within_its_divergence_and_importance_lowers_it")
    {
        write(&model, &path, name, None).expect(name);
        let found = divergence(&before, &path);
        eprintln!("{name:7} {found:?}");
        assert!(found.mean_kl <= bound, "{name}: {found:?}");
        assert!(found.num_tokens > 500 && found.same_top > 0.8, "{name}: {found:?}");
    }
    let plain = |name| {
        write(&model, &path, name, None).expect(name);
        divergence(&before, &path).mean_kl
    };
    for form in ["babyllama.gguf", "babyllama.dat"] {
        let imatrix = Imatrix::open(&data(form)).expect(form);
        for name in ["Q4_0", "Q4_K_S", "Q3_K_S"] {
            let without = plain(name);
            write(&model, &path, name, Some(&imatrix)).expect(name);
            let with = divergence(&before, &path).mean_kl;
            eprintln!("{name:7} {without} without importance, {with} with {form}");
            assert!(with < without, "{name}: {with} with importance, {without} without");
        }
    }
}

#[test]
fn what_cannot_be_written_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("out.gguf");
    let refusal = |from: &Path, name: &str, imatrix: Option<&Imatrix>| {
        write(from, &path, name, imatrix).expect_err(name).to_string()
    };
    let parity = parity_folder();
    let other = refusal(&parity.join("gpt-oss"), "Q8_0", None);
    assert!(other.contains("\"gpt-oss\"") && other.contains("smollm3"), "{other}");
    let wide = folder.path().join("wide.gguf");
    write_k_quants(&wide);
    let needy = refusal(&wide, "Q2_K_S", None);
    assert!(needy.contains("--imatrix") && needy.contains("blk.0."), "{needy}");
    let imatrix = Imatrix::open(&data("babyllama.gguf")).expect("opens");
    let foreign = refusal(&parity.join("llama"), "Q8_0", Some(&imatrix));
    assert!(foreign.contains("blk.0.") && foreign.contains("another model"), "{foreign}");
    let damaged = folder.path().join("bad.dat");
    for content in [&b"\xff\xff\xff\xff"[..], &[1, 0, 0, 0, 200, 0, 0, 0, b'a'], b"", &[0; 4]] {
        std::fs::write(&damaged, content).expect("a file");
        let error = Imatrix::open(&damaged).expect_err("damaged").to_string();
        assert!(error.contains("bad.dat"), "{error}");
    }
    assert!(!path.exists());
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 2, "only what this test wrote");
}

#[test]
fn a_stopped_write_leaves_nothing_and_keeps_the_old_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("out.gguf");
    std::fs::write(&path, "old").expect("a file");
    let files = ModelFiles::open(&source(&parity_folder().join("qwen3"))).expect("opens");
    let options = ExportOptions { mix: mix("Q8_0"), imatrix: None, name: "model" };
    let export = Export::plan(&files, &options).expect("a plan");
    let mut calls = 0;
    let end = export.write(&path, &mut |_, _| {
        calls += 1;
        calls < 5
    });
    assert_eq!(end.expect("stops"), WriteEnd::Stopped);
    assert_eq!(std::fs::read_to_string(&path).expect("the old file"), "old");
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1);
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_the_command_and_leaves_nothing() {
    use expectrl::Expect;
    let place = Place::new();
    // 28 million values take seconds to quantise, so that the key comes in the middle.
    let model = json!({"architecture": "llama", "layers": 8, "heads": 8, "kv_heads": 2, "experts": 0, "columns": 1 << 18,
        "tied": true});
    let path = place.path("in.gguf");
    std::fs::write(&path, recorded_file(&model, &recorded_tensors(&model))).expect("a file");
    let count = || std::fs::read_dir(path.parent().expect("a folder")).expect("a folder").count();
    let before = count();
    let command = place.command(&["quantize", "./in.gguf", "out.gguf", "--type", "Q4_K_M"]);
    let mut session = terminal::spawn(command, 200).expect("a terminal");
    session.set_expect_timeout(Some(Duration::from_secs(60)));
    session.expect("writing out.gguf").expect("progress");
    session.send("\x03").expect("typed");
    session.expect("interrupted; out.gguf is not written").expect("the end");
    let status = session.get_process_mut().child.wait().expect("an end");
    assert_eq!(status.code(), Some(130));
    assert_eq!(count(), before, "only the input is left");
}

#[test]
fn the_command_writes_a_file_that_runs_and_prints_sizes_and_agreement() {
    let place = Place::new();
    let model = parity_folder().join("qwen3").to_string_lossy().into_owned();
    let args = ["quantize", &model, "out.gguf", "--type", "q8_0", "--check"];
    let ran = place.run(&args);
    ran.check(0, "");
    assert!(ran.stdout.contains("Q8_0, weights") && ran.stdout.contains("bits per weight"), "{ran:?}");
    assert!(ran.stdout.contains("mean KL") && ran.stdout.contains("same top token"), "{ran:?}");
    let again = place.run(&args);
    again.check(2, "out.gguf exists already");
    assert!(again.stderr.contains("--force"), "{again:?}");
    place.run(&["quantize", &model, "out.gguf", "--type", "F16", "--force"]).check(0, "");
    place.run(&["run", "--model", "./out.gguf", "--raw", "--max-tokens", "3", "once"]).check(0, "");
    let itself = ["quantize", "./out.gguf", "out.gguf", "--type", "Q8_0", "--force"];
    place.run(&[&itself[..], &["--check"]].concat()).check(2, "both are one file");
    let missing = place.run(&["quantize", "./out.gguf", "a.gguf", "--type", "Q4_K_M", "--check=text.txt"]);
    missing.check(66, "text.txt");
    place.write("text.txt", "Once upon a time there was a little dog.");
    let checked = place.run(&["quantize", "./out.gguf", "b.gguf", "--type", "Q4_K_M", "--check=text.txt"]);
    let narrow = "are not whole blocks of 256 values: they get a larger type";
    assert!(checked.check(0, narrow).stdout.contains("same top token"), "{checked:?}");
    let again = place.run(&["quantize", "./b.gguf", "c.gguf", "--type", "Q8_0"]);
    again.check(0, "a second time");
    place.run(&["quantize", &model, "x.gguf", "--type", "Q9"]).check(2, "Q4_K_M");
    place.run(&["quantize", &model, ".", "--type", "F16", "--force"]).check(2, "folder");
    place.run(&["quantize", "./no.gguf", "x.gguf", "--type", "F16"]).check(66, "no.gguf");
    place.run(&["quantize", &model, "no/x.gguf", "--type", "F16"]).check(74, "no/x.gguf");
    // A window smaller than a step.
    let windowed = parity_folder().join("gemma3").to_string_lossy().into_owned();
    let checked = place.run(&["quantize", &windowed, "w.gguf", "--type", "F16", "--check"]);
    assert!(checked.check(0, "").stdout.contains("same top token"), "{checked:?}");
}

#[cfg(unix)]
#[test]
fn what_is_no_file_is_not_replaced_and_a_link_is_followed() {
    use std::os::unix::fs::{FileTypeExt, symlink};
    let place = Place::new();
    let model = parity_folder().join("qwen3").to_string_lossy().into_owned();
    let quantize = |out: &str| place.run(&["quantize", &model, out, "--type", "F16", "--force"]);
    rustix::fs::mkfifoat(rustix::fs::CWD, place.path("pipe"), rustix::fs::Mode::RWXU).expect("a pipe");
    quantize("pipe").check(74, "pipe: it is no regular file, and is not replaced");
    assert!(std::fs::metadata(place.path("pipe")).expect("there").file_type().is_fifo());
    place.write("real.gguf", "old");
    symlink("real.gguf", place.path("link.gguf")).expect("a link");
    quantize("link.gguf").check(0, "");
    assert!(place.path("link.gguf").is_symlink());
    assert!(std::fs::metadata(place.path("real.gguf")).expect("there").len() > 1000);
    let left = std::fs::read_dir(place.path(".")).expect("a folder").flatten();
    let left: Vec<_> =
        left.map(|entry| entry.file_name()).filter(|n| n.to_string_lossy().contains(".part")).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// llama.cpp itself opens the files, in a python that has `llama_cpp`.
#[test]
fn llama_cpp_opens_what_is_written() {
    let Some(python) = std::env::var_os("LLMCTL_TEST_PYTHON") else {
        crate::common::skip("LLMCTL_TEST_PYTHON is not set");
        return;
    };
    let place = Place::new();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&python);
        command.current_dir(place.folder.path()).args(arguments);
        finish(command, "")
    };
    if run(&["-c", "import llama_cpp"]).code != Some(0) {
        crate::common::skip(format!("{} has no llama_cpp", python.display()));
        return;
    }
    const OPEN: &str = "
import llama_cpp, sys
model = llama_cpp.Llama(sys.argv[1], n_ctx=64, logits_all=True, verbose=False)
tokens = model.tokenize(b'Once upon a time', add_bos=False)
model.eval(tokens)
print(max(range(model.n_vocab()), key=lambda i: model.scores[len(tokens) - 1][i]))
";
    for family in FAMILIES.split(' ') {
        for name in ["F32", "Q8_0", "Q4_K_M", "Q2_K"] {
            let file = format!("{family}-{name}.gguf");
            write(&parity_folder().join(family), &place.path(&file), name, None).expect(family);
            let ran = run(&["-c", OPEN, &file]);
            assert_eq!(ran.code, Some(0), "{family} {name}: {}", ran.stderr);
        }
    }
}
