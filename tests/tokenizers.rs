//! Tokenizers against every recorded id there is, and against each other.
//!
//! References: Hugging Face's tokenizers (Python), OpenAI's tiktoken and Google's sentencepiece on the same texts
//! (`vectors/tokenizer`), llama.cpp's own test vectors (`gguf-vocab/*.inp`, `.out`), and the two files of one model
//! (tokenizer.json and GGUF), which must agree on whole corpora. Large corpora are read in slices at fixed
//! places, so that all of this stays below a minute and a half on one core.

use std::fs;
use std::sync::OnceLock;

use llmctl_models::load::tokenizer::{from_gguf, hf_settings};
use llmctl_models::text::{Encode, TokenKind, Utf8Stream, VocabSpec};

use crate::common::prelude::*;

const PLAIN: Encode = Encode { add_special: false, parse_special: false };
const FULL: Encode = Encode { add_special: true, parse_special: true };
const PARSE: Encode = Encode { add_special: false, parse_special: true };

fn read_json(path: &Path) -> Value {
    let text = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A tokenizer.json with the settings of a folder, which need not be its own: the assembled ones have theirs elsewhere.
fn from_json_file(path: &Path, settings: &HfSettings) -> Tokenizer {
    let json = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Tokenizer::from_json(&json, settings).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn from_gguf_file(path: &Path) -> Tokenizer {
    let file = Gguf::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    from_gguf(file.metadata()).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("a list of ids").iter();
    ids.map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn texts(value: &Value) -> Vec<String> {
    let texts = value.as_array().expect("a list of texts").iter();
    texts.map(|text| text.as_str().expect("a text").to_owned()).collect()
}

/// Encodes and says where the first difference is: a dump of two lists of 100 000 ids helps nobody.
#[track_caller]
fn check(name: &str, tokenizer: &Tokenizer, text: &str, options: Encode, expected: &[u32]) {
    let found = tokenizer.encode(text, options).unwrap_or_else(|error| panic!("{name}: {error}: {text:?}"));
    if found == expected {
        return;
    }
    let at = found.iter().zip(expected).take_while(|(found, expected)| found == expected).count();
    let around = |ids: &[u32]| {
        let ids = &ids[at.saturating_sub(2).min(ids.len())..(at + 6).min(ids.len())];
        let texts: Vec<_> = ids.iter().map(|&id| (id, tokenizer.id_to_token(id))).collect();
        format!("{texts:?}")
    };
    let start: String = text.chars().take(80).collect();
    panic!(
        "{name}: id {at} of {start:?} differs\n  found    {}\n  expected {}",
        around(&found),
        around(expected)
    );
}

#[test]
fn hugging_face_ids() {
    let Some(root) = fixtures() else { return };
    let texts = texts(&read_json(&root.join("vectors/tokenizer/reference-encodings.json"))["texts"]);
    let vectors = read_json(&root.join("vectors/tokenizer/hf-encodings.json"));
    let mut checked = 0;
    for (file, expected) in vectors["ids"].as_object().expect("ids by file") {
        let path = root.join("tokenizers").join(file);
        if !path.exists() {
            crate::common::skip(format!("ids are recorded for {file}, which is not among the fixtures"));
            continue;
        }
        let tokenizer = from_json_file(&path, &HfSettings::default());
        let expected = expected.as_array().expect("ids by text");
        assert_eq!(expected.len(), texts.len());
        for (text, expected) in texts.iter().zip(expected) {
            check(file, &tokenizer, text, PARSE, &ids(expected));
        }
        checked += 1;
    }
    assert!(checked >= 13, "only {checked} files");
}

#[test]
fn tiktoken_and_sentencepiece_ids() {
    let Some(root) = fixtures() else { return };
    let vectors = read_json(&root.join("vectors/tokenizer/reference-encodings.json"));
    let texts = texts(&vectors["texts"]);
    for (name, reference) in vectors["independent"].as_object().expect("references by name") {
        let file = reference["tokenizer"].as_str().expect("a file");
        let tokenizer = from_json_file(&root.join("tokenizers").join(file), &HfSettings::default());
        let expected = reference["ids"].as_array().expect("ids by text");
        assert_eq!(expected.len(), texts.len());
        for (text, expected) in texts.iter().zip(expected) {
            check(name, &tokenizer, text, PLAIN, &ids(expected));
        }
    }
}

/// The texts of llama.cpp's `.inp` and the ids of its `.out`.
fn llama_cpp_vectors(path: &Path) -> Vec<(String, Vec<u32>)> {
    let read = |suffix: &str| {
        let path = PathBuf::from(format!("{}{suffix}", path.display()));
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let (input, output) = (read(".inp"), read(".out"));
    let mut texts: Vec<&str> = input.split("\n__ggml_vocab_test__\n").collect();
    assert_eq!(texts.pop(), Some(""), "the file ends with a separator");
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(texts.len(), lines.len());
    let numbers = |line: &str| line.split_whitespace().map(|id| id.parse().expect("an id")).collect();
    texts.into_iter().zip(lines).map(|(text, line)| (text.to_owned(), numbers(line))).collect()
}

#[test]
fn llama_cpp_vectors_from_gguf() {
    let Some(root) = fixtures() else { return };
    let folder = root.join("tokenizers/gguf-vocab");
    let assembled = root.join("tokenizers/gguf-vocab-assembled");
    let mut checked = Vec::new();
    let mut names: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    for input in names.iter().filter(|path| path.extension().is_some_and(|extension| extension == "inp")) {
        let path = input.with_extension("");
        let name = path.file_stem().unwrap().to_str().unwrap().trim_start_matches("ggml-vocab-").to_owned();
        let path_of_vocab = match name.as_str() {
            // Of these the vectors are there, the GGUF is not; the assembled ones are the same vocabularies.
            "llama-bpe" => assembled.join("vocab-llama3.2.gguf"),
            "qwen2" => assembled.join("vocab-qwen2.5.gguf"),
            "command-r" => {
                crate::common::skip(
                    "llama.cpp's vectors for command-r, whose vocabulary is not among the fixtures",
                );
                continue;
            }
            _ => path.clone(),
        };
        let tokenizer = from_gguf_file(&path_of_vocab);
        for (text, expected) in llama_cpp_vectors(&path) {
            check(&name, &tokenizer, &text, PLAIN, &expected);
        }
        checked.push(name);
    }
    let all =
        words("bert-bge deepseek-coder deepseek-llm falcon gpt-2 llama-bpe llama-spm phi-3 qwen2 starcoder");
    assert_eq!(checked, all);
}

/// A model's tokenizer from each of its files.
struct Pair {
    name: &'static str,
    json: Tokenizer,
    gguf: Tokenizer,
}

/// All twins, loaded once: tokenizers are made to be shared.
fn pairs(root: &Path) -> &'static [Pair] {
    static PAIRS: OnceLock<Vec<Pair>> = OnceLock::new();
    // Both files of one model: tokenizer.json with the folder of its settings, and the GGUF.
    let load = |(name, json, settings, gguf): (&'static str, &str, &str, &str)| {
        let settings = hf_settings(&root.join(settings)).unwrap();
        let json = from_json_file(&root.join(json).join("tokenizer.json"), &settings);
        Pair { name, json, gguf: from_gguf_file(&root.join(gguf)) }
    };
    PAIRS.get_or_init(|| listed("tokenizers", "twins").into_iter().map(load).collect())
}

fn pair(root: &Path, name: &str) -> &'static Pair {
    pairs(root).iter().find(|pair| pair.name == name).expect("a known name")
}

/// Three stretches of each corpus, at fixed places.
fn corpus_slices(root: &Path, bytes: usize) -> Vec<String> {
    let files = ["tinyshakespeare.txt", "war-and-peace.txt", "wikitext-2/test.txt", "wikitext-2/valid.txt"];
    let slices = files.iter().flat_map(|file| {
        let text = fs::read_to_string(root.join("corpora").join(file)).unwrap();
        let boundary = |at: usize| (at..).find(|&at| text.is_char_boundary(at)).expect("the end is one");
        let slice = |part: usize| {
            let start = boundary(text.len() / 3 * part);
            text[start..boundary(start + bytes)].to_owned()
        };
        (0..3).map(slice).collect::<Vec<_>>()
    });
    slices.collect()
}

/// Short texts that break things: the naughty strings, and each line of the UTF-8 stress test (its invalid
/// sequences replaced: a prompt is text).
fn naughty_texts(root: &Path) -> Vec<String> {
    let mut naughty = texts(&read_json(&root.join("corpora/blns/blns.json")));
    let stress = fs::read(root.join("corpora/UTF-8-test.txt")).unwrap();
    let stress = String::from_utf8_lossy(&stress);
    naughty.extend(stress.lines().map(str::to_owned));
    naughty.push(stress.into_owned());
    naughty
}

#[test]
fn both_files_of_a_model_agree() {
    let Some(root) = fixtures() else { return };
    let corpora = corpus_slices(&root, 64 * 1024);
    let naughty = naughty_texts(&root);
    for Pair { name, json, gguf } in pairs(&root) {
        for text in naughty.iter().chain(&corpora) {
            check(name, gguf, text, PLAIN, &json.encode(text, PLAIN).unwrap());
        }
    }
}

#[test]
fn war_and_peace_whole() {
    let Some(root) = fixtures() else { return };
    let text = fs::read_to_string(root.join("corpora/war-and-peace.txt")).unwrap();
    for Pair { name, json, gguf } in ["llama3.2", "llama-spm"].map(|name| pair(&root, name)) {
        let expected = json.encode(&text, PLAIN).unwrap();
        assert_eq!(json.decode(&expected, false), text, "{}", name);
        check(name, gguf, &text, PLAIN, &expected);
    }
}

#[test]
fn every_parity_model_has_one_vocabulary() {
    let Some(root) = fixtures() else { return };
    let texts = naughty_texts(&root);
    let mut checked = 0;
    for entry in fs::read_dir(root.join("parity")).unwrap() {
        let folder = entry.unwrap().path();
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let json = from_folder(&folder).unwrap();
        assert_eq!(json.vocab_size(), 384, "{name}");
        let gguf = root.join(format!("parity-gguf/{name}-f32.gguf"));
        if !gguf.exists() {
            continue;
        }
        let gguf = from_gguf_file(&gguf);
        for text in texts.iter().step_by(7) {
            check(&name, &gguf, text, PARSE, &json.encode(text, PARSE).unwrap());
        }
        assert_eq!((gguf.bos(), gguf.eos()), (json.bos(), json.eos()), "{name}");
        checked += 1;
    }
    assert!(checked >= 15, "only {checked} models");
}

#[test]
fn token_bytes_are_the_text() {
    let Some(root) = fixtures() else { return };
    let mut corpora = corpus_slices(&root, 4 * 1024);
    corpora.extend(naughty_texts(&root));
    for Pair { name, json, gguf } in pairs(&root) {
        let has = single_bytes(gguf);
        for text in &corpora {
            let text = if *name == "qwen2.5" { composed(text) } else { text.clone() };
            // What a vocabulary cannot spell, its publisher's tokenizer drops silently as well.
            let spelled = |c: &char| c.to_string().bytes().all(|byte| has[usize::from(byte)]);
            let text: String = text.chars().filter(spelled).collect();
            round_trip(name, json, &text);
            round_trip(name, gguf, &text);
        }
    }
}

/// Qwen's tokenizer composes characters (NFC) before anything else; what it returns is the composed text.
fn composed(text: &str) -> String {
    use tokenizers::{NormalizedString, Normalizer, normalizers::NFC};
    let mut text = NormalizedString::from(text);
    NFC.normalize(&mut text).unwrap();
    text.get().to_owned()
}

/// Returns whether each byte has a token of its own. The vocabularies of SmolLM and Falcon lack some control characters.
fn single_bytes(tokenizer: &Tokenizer) -> [bool; 256] {
    let mut has = [false; 256];
    for id in 0..tokenizer.vocab_size() as u32 {
        if let Some(&[byte]) = tokenizer.token_bytes(id).as_deref() {
            has[usize::from(byte)] = true;
        }
    }
    // 0xf1 to 0xf4 begin characters of planes that are not in use.
    let in_text = (b'\t'..=b'\n').chain(b' '..=b'~').chain(0x80..=0xbf).chain(0xc2..=0xf0);
    let missing: Vec<u8> = in_text.filter(|&byte| !has[usize::from(byte)]).collect();
    assert!(missing.is_empty(), "{missing:x?}: only control characters may be missing");
    has
}

fn round_trip(name: &str, tokenizer: &Tokenizer, text: &str) {
    let ids = tokenizer.encode(text, PLAIN).unwrap();
    let bytes: Vec<u8> =
        ids.iter().flat_map(|&id| tokenizer.token_bytes(id).expect("a token").into_owned()).collect();
    let found = String::from_utf8(bytes).unwrap_or_else(|error| panic!("{name}: {error} in {text:?}"));
    // SentencePiece vocabularies put one space before a text; decoding takes it away.
    let sentencepiece = tokenizer.token_to_id("▁").is_some() && !text.is_empty();
    let expected = if sentencepiece { format!(" {text}") } else { text.to_owned() };
    assert_eq!(found, expected, "{name}");
    assert_eq!(tokenizer.decode(&ids, false), text, "{name}");
}

/// The tokenizers that swift-transformers' vectors name, as far as they are among the fixtures.
fn swift_tokenizer(root: &Path, model: &str) -> Option<Tokenizer> {
    let (json, settings) = match model {
        "gpt2" | "distilgpt2" | "openai-community/gpt2" => ("assembled/gpt2", "gpt2"),
        "Qwen/Qwen2.5-0.5B" => ("assembled/qwen2.5", "qwen2.5"),
        // TinyLlama kept Llama 2's vocabulary.
        "llama" | "coreml-projects/Llama-2-7b-chat-coreml" | "TinyLlama/TinyLlama-1.1B-Chat-v1.0" => {
            ("llama2", "llama2")
        }
        "llama_3.2" | "pcuenq/Llama-3.2-1B-Instruct-tokenizer" => {
            ("assembled/llama3.2", "assembled/llama3.2")
        }
        "falcon" | "tiiuae/falcon-7b" => ("falcon", "falcon"),
        _ => return None,
    };
    let folder = root.join("tokenizers");
    let settings = hf_settings(&folder.join(settings)).unwrap();
    Some(from_json_file(&folder.join(json).join("tokenizer.json"), &settings))
}

#[test]
fn swift_transformers_documents() {
    let Some(root) = fixtures() else { return };
    let folder = root.join("vectors/tokenizer/swift-transformers");
    let files = [
        ("gpt2", "gpt2_encoded_tokens"),
        ("llama", "llama_encoded"),
        ("llama_3.2", "llama_3.2_encoded"),
        ("falcon", "falcon_encoded"),
    ];
    for (model, file) in files {
        let tokenizer = swift_tokenizer(&root, model).expect("a known name");
        let vector = read_json(&folder.join(format!("{file}.json")));
        let expected = ids(&vector["token_ids"]);
        check(model, &tokenizer, vector["text"].as_str().expect("a text"), FULL, &expected);
        let decoded = vector["decoded_text"].as_str().expect("a text");
        assert_eq!(tokenizer.decode(&expected, false), decoded, "{model}");
    }
}

/// Whose vectors were recorded with transformers' `clean_up_tokenization_spaces`: a repair for tokenizers that split
/// words from punctuation. It damages any other text ("a ." becomes "a."), so decoding does not do it.
fn cleans_up(model: &str) -> bool {
    ["distilgpt2", "tiiuae/falcon-7b", "pcuenq/Llama-3.2-1B-Instruct-tokenizer"].contains(&model)
}

fn cleaned_up(text: &str) -> String {
    let joined = [" .", " ?", " !", " ,", " n't", " 'm", " 's", " 've", " 're"];
    let text =
        joined.iter().take(4).fold(text.to_owned(), |text, from| text.replace(from, from.trim_start()));
    let text = text.replace(" ' ", "'");
    joined.iter().skip(4).fold(text, |text, from| text.replace(from, from.trim_start()))
}

#[test]
fn swift_transformers_cases() {
    let Some(root) = fixtures() else { return };
    let vectors = read_json(&root.join("vectors/tokenizer/swift-transformers/tokenizer_tests.json"));
    let mut checked = Vec::new();
    for (model, cases) in vectors.as_object().expect("cases by model") {
        let Some(tokenizer) = swift_tokenizer(&root, model) else {
            crate::common::skip(format!("the tokenizer of {model} is not among the fixtures"));
            continue;
        };
        for case in cases.as_array().expect("cases") {
            let expected = ids(&case["encoded"]["input_ids"]);
            check(model, &tokenizer, case["input"].as_str().expect("a text"), FULL, &expected);
            for (field, skip_special) in [("decoded_with_special", false), ("decoded_without_special", true)]
            {
                let found = tokenizer.decode(&expected, skip_special);
                let found = if cleans_up(model) { cleaned_up(&found) } else { found };
                assert_eq!(found, case[field].as_str().expect("a text"), "{model} {field}");
            }
        }
        checked.push(model);
    }
    assert_eq!(checked.len(), 4, "{checked:?}");
}

#[test]
fn swift_transformers_baselines() {
    let Some(root) = fixtures() else { return };
    let folder = root.join("vectors/tokenizer/swift-transformers");
    let inputs = read_json(&folder.join("inputs.json"));
    let mut checked = 0;
    for name in ["gpt2", "qwen2_5", "tinyllama"] {
        let vector = read_json(&folder.join(format!("baselines/{name}_multilingual.json")));
        let tokenizer = swift_tokenizer(&root, vector["metadata"]["model_id"].as_str().unwrap()).unwrap();
        let entries = vector["entries"].as_array().expect("entries");
        for (input, entry) in inputs.as_array().expect("inputs").iter().zip(entries) {
            assert_eq!(input["id"], entry["id"]);
            let expected = ids(&entry["input_ids"]);
            check(name, &tokenizer, input["text"].as_str().expect("a text"), FULL, &expected);
            checked += 1;
        }
    }
    assert_eq!(checked, 3 * 83);
}

/// GPT-NeoX's GGUF names no pre-tokenizer (it is older than the key), and its tokenizer.json is not among the
/// fixtures, but the ids that Hugging Face's tokenizer gives are recorded.
#[test]
fn gpt_neox_gguf_without_a_pre_tokenizer_name() {
    let Some(root) = fixtures() else { return };
    let texts = texts(&read_json(&root.join("vectors/tokenizer/reference-encodings.json"))["texts"]);
    let vectors = read_json(&root.join("vectors/tokenizer/hf-encodings.json"));
    let tokenizer = from_gguf_file(&root.join("tokenizers/gguf-vocab/ggml-vocab-gpt-neox.gguf"));
    let expected = vectors["ids"]["gpt-neox-20b/tokenizer.json"].as_array().expect("ids by text");
    for (text, expected) in texts.iter().zip(expected) {
        check("gpt-neox", &tokenizer, text, PARSE, &ids(expected));
    }
}

/// A tokenizer.json as GGUF's converter would store it, under the given pre-tokenizer name.
fn as_gguf(json: &Value, pre: &str) -> VocabSpec {
    let vocab = json["model"]["vocab"].as_object().expect("a vocabulary");
    let mut entries: Vec<(u32, String, TokenKind)> = vocab
        .iter()
        .map(|(text, id)| (id.as_u64().expect("an id") as u32, text.clone(), TokenKind::Normal))
        .collect();
    for added in json["added_tokens"].as_array().expect("added tokens") {
        let kind = if added["special"] == true { TokenKind::Control } else { TokenKind::UserDefined };
        let id = added["id"].as_u64().expect("an id") as u32;
        entries.push((id, added["content"].as_str().expect("a text").to_owned(), kind));
    }
    let size = entries.iter().map(|(id, ..)| *id as usize + 1).max().expect("tokens");
    let mut tokens: Vec<String> = (0..size).map(|id| format!("[PAD{id}]")).collect();
    let mut kinds = vec![TokenKind::Unused; size];
    for (id, text, kind) in entries {
        tokens[id as usize] = text;
        kinds[id as usize] = kind;
    }
    let merge = |merge: &Value| match merge {
        Value::String(merge) => merge.clone(),
        pair => texts(pair).join(" "),
    };
    let merges = json["model"]["merges"].as_array().expect("merges").iter().map(merge).collect();
    let pre = Some(pre.to_owned());
    VocabSpec { model: "gpt2".to_owned(), pre, tokens, kinds, merges, ..VocabSpec::default() }
}

/// No GGUF of these is among the fixtures; their pre-tokenizer rules must still give the publisher's ids.
#[test]
fn pre_tokenizer_rules_of_tokenizers_without_a_gguf() {
    let Some(root) = fixtures() else { return };
    let mut samples = naughty_texts(&root);
    samples.extend(corpus_slices(&root, 4 * 1024));
    for (name, pre) in [("gpt-oss", "gpt-4o"), ("phi-4", "dbrx"), ("qwen3", "qwen2")] {
        let path = root.join(format!("tokenizers/assembled/{name}/tokenizer.json"));
        let published = from_json_file(&path, &HfSettings::default());
        let spec = as_gguf(&read_json(&path), pre);
        let tokenizer = Tokenizer::from_vocab(&spec).unwrap();
        assert_eq!(tokenizer.vocab_size(), published.vocab_size(), "{name}");
        for text in &samples {
            check(name, &tokenizer, text, PLAIN, &published.encode(text, PLAIN).unwrap());
        }
    }
}

#[test]
fn never_two_bos() {
    let Some(root) = fixtures() else { return };
    for name in ["llama3.2", "llama-spm", "stories260K", "deepseek-coder"] {
        let Pair { json, gguf, .. } = pair(&root, name);
        // The assembled llama3.2 has no settings of its own; its post-processor names the BOS.
        for tokenizer in [json, gguf] {
            let bos = tokenizer.bos().expect("a BOS");
            let written = tokenizer.id_to_token(bos).unwrap().to_owned();
            assert!(tokenizer.adds_bos() && tokenizer.is_special(bos), "{name}");
            let count = |ids: &[u32]| ids.iter().filter(|&&id| id == bos).count();
            for text in ["Hello".to_owned(), format!("{written}Hello")] {
                let chat = tokenizer.encode_chat(&text).unwrap();
                let full = tokenizer.encode(&text, FULL).unwrap();
                assert_eq!((chat[0], count(&chat)), (bos, 1), "{name} {text:?}");
                assert_eq!(full, chat, "{name} {text:?}");
            }
            assert_eq!(tokenizer.encode_chat("").unwrap(), [bos], "{name}");
            assert_eq!(count(&tokenizer.encode("Hello", PARSE).unwrap()), 0, "{name}");
        }
        assert_eq!(json.encode("Hello", FULL).unwrap(), gguf.encode("Hello", FULL).unwrap(), "{name}");
    }
    let Pair { json, gguf, .. } = pair(&root, "qwen2.5");
    for tokenizer in [json, gguf] {
        assert!(!tokenizer.adds_bos());
        assert_eq!(tokenizer.encode_chat("Hello").unwrap(), tokenizer.encode("Hello", PLAIN).unwrap());
    }
}

#[test]
fn special_tokens_are_text_unless_asked_for() {
    let Some(root) = fixtures() else { return };
    for Pair { name, json, gguf } in pairs(&root) {
        for tokenizer in [json, gguf] {
            assert!(tokenizer.special_tokens().count() > 0, "{}", name);
            for (id, text) in tokenizer.special_tokens() {
                assert!(tokenizer.is_special(id));
                assert_eq!(tokenizer.token_to_id(text), Some(id), "{} {text:?}", name);
                assert_eq!(tokenizer.token_bytes(id).as_deref(), Some(text.as_bytes()), "{}", name);
                let plain = tokenizer.encode(text, PLAIN).unwrap();
                assert!(!plain.iter().any(|&id| tokenizer.is_special(id)), "{} {text:?}: {plain:?}", name);
                assert_eq!(tokenizer.encode(text, PARSE).unwrap(), [id], "{} {text:?}", name);
                assert_eq!(tokenizer.decode(&[id], true), "");
            }
        }
        let names = |tokenizer: &Tokenizer| -> Vec<String> {
            tokenizer.special_tokens().map(|(id, text)| format!("{id} {text}")).collect()
        };
        assert_eq!(names(json), names(gguf), "{}", name);
    }
}

/// As in a rendered conversation: special tokens at the ends, next to each other, before and after spaces.
#[test]
fn special_tokens_amid_text() {
    let Some(root) = fixtures() else { return };
    for Pair { name, json, gguf } in pairs(&root) {
        let special: Vec<&str> = json.special_tokens().map(|(_, text)| text).take(8).collect();
        let (first, last) = (special[0], special[special.len() - 1]);
        let mut text = format!("{first}[INST] Hello [/INST] Hi {last}{first}[INST] how");
        special.iter().for_each(|token| text.push_str(&format!("{token}are{token} you\n{token}")));
        let expected = json.encode(&text, PARSE).unwrap();
        assert!(
            expected.iter().filter(|&&id| json.is_special(id)).count() == 3 + 3 * special.len(),
            "{name}"
        );
        check(name, gguf, &text, PARSE, &expected);
    }
}

#[test]
fn turn_terminators_of_known_models() {
    let Some(root) = fixtures() else { return };
    let names = |tokenizer: &Tokenizer| -> Vec<String> {
        let ids = tokenizer.turn_terminators().iter();
        ids.map(|&id| tokenizer.id_to_token(id).unwrap().to_owned()).collect()
    };
    let expected: [(&str, &[&str]); 6] = [
        ("qwen2.5", &["<|endoftext|>", "<|im_end|>"]),
        ("llama3.2", &["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),
        ("smollm2", &["<|endoftext|>", "<|im_end|>"]),
        ("phi-3", &["<|endoftext|>", "<|end|>"]),
        ("llama-spm", &["</s>"]),
        ("stories260K", &["</s>"]),
    ];
    for (name, expected) in expected {
        let Pair { json, gguf, .. } = pair(&root, name);
        assert_eq!(names(json), expected, "{name}");
        assert_eq!(names(gguf), expected, "{name}");
    }
    let settings = hf_settings(&root.join("tokenizers/gpt-oss")).unwrap();
    let gpt_oss = from_json_file(&root.join("tokenizers/assembled/gpt-oss/tokenizer.json"), &settings);
    assert_eq!(names(&gpt_oss), ["<|endoftext|>", "<|return|>", "<|call|>"]);
    assert_eq!(gpt_oss.eos().and_then(|eos| gpt_oss.id_to_token(eos)), Some("<|return|>"));
}

#[test]
fn phi3_special_tokens_swallow_white_space_in_both_files() {
    let Some(root) = fixtures() else { return };
    let Pair { json, gguf, .. } = pair(&root, "phi-3");
    let text = "<|user|>\n  Hi there <|end|>\n<|assistant|>\n Yes.<|endoftext|> <s> x</s> y";
    let expected = json.encode(text, PARSE).unwrap();
    check("phi-3", gguf, text, PARSE, &expected);
    let swallowed = "<|user|> Hi there <|end|><|assistant|> Yes.<|endoftext|>  <s>  x</s> y";
    assert_eq!(json.decode(&expected, false), swallowed);
    // Here the two files disagree: Microsoft turned the BOS off later than the GGUF was made.
    assert_eq!((json.adds_bos(), gguf.adds_bos()), (false, true));
}

#[test]
fn streamed_tokens_are_the_decoded_text() {
    let Some(root) = fixtures() else { return };
    let text = "naïve 🦙 漢字 कि \u{1f468}\u{200d}\u{1f469}";
    for Pair { name, json, .. } in pairs(&root) {
        let ids = json.encode(text, PLAIN).unwrap();
        let mut stream = Utf8Stream::new();
        let mut streamed = String::new();
        for &id in &ids {
            streamed.push_str(&stream.push(&json.token_bytes(id).expect("a token")));
        }
        streamed.push_str(&stream.finish());
        let expected = json.decode(&ids, false);
        assert_eq!(streamed.strip_prefix(' ').unwrap_or(&streamed), expected, "{}", name);
    }
}

#[test]
fn holes_and_ids_out_of_range() {
    let Some(root) = fixtures() else { return };
    let Pair { json, gguf, .. } = pair(&root, "qwen2.5");
    assert_eq!(
        (json.vocab_size(), gguf.vocab_size()),
        (151_665, 151_936),
        "the GGUF is padded to the embedding"
    );
    for id in [151_665, 151_935, 151_936, u32::MAX] {
        assert_eq!((gguf.token_bytes(id), gguf.id_to_token(id), gguf.is_special(id)), (None, None, false));
        assert_eq!(json.token_bytes(id), None);
    }
    assert_eq!(gguf.decode(&[9707, 151_935, 1879, u32::MAX], false), "Hello world");
    assert_eq!(gguf.token_to_id("[PAD151935]"), None);
}

#[test]
fn unigram_vocabularies_of_gguf_are_refused() {
    let spec = VocabSpec { model: "t5".to_owned(), tokens: vec!["a".to_owned()], ..VocabSpec::default() };
    let message = Tokenizer::from_vocab(&spec).unwrap_err().to_string();
    assert!(message.contains("unigram"), "{message}");
}

#[test]
fn bert_puts_its_tokens_around_a_text() {
    let Some(root) = fixtures() else { return };
    let tokenizer = from_gguf_file(&root.join("tokenizers/gguf-vocab/ggml-vocab-bert-bge.gguf"));
    let options = Encode { add_special: true, parse_special: true };
    assert_eq!(tokenizer.encode("Hello world", options).unwrap(), [101, 7592, 2088, 102]);
    let unknown = tokenizer.token_to_id("[UNK]").unwrap();
    assert_eq!(tokenizer.encode("Hé \u{10ffff}x", options).unwrap(), [101, 2002, unknown, 102]);
}

/// Folders without tokenizer.json: SentencePiece's tokenizer.model, and tiktoken's of Llama 3.
#[test]
fn tokenizer_model_gives_the_ids_of_tokenizer_json() {
    let Some(root) = fixtures() else { return };
    let tokenizers = root.join("tokenizers");
    for (name, config, json) in [
        ("llama2", "llama2/tokenizer_config.json", "llama2/tokenizer.json"),
        ("mistral-v1", "mistral-v1/tokenizer_config.json", "mistral-v1/tokenizer.json"),
        ("llama3", "llama3/tokenizer_config.llama-3.2-1b-instruct.json", "assembled/llama3.2/tokenizer.json"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        fs::copy(tokenizers.join(name).join("tokenizer.model"), path("tokenizer.model")).expect("a copy");
        fs::copy(tokenizers.join(config), path("tokenizer_config.json")).expect("a copy");
        let alone = from_folder(folder.path()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let settings = hf_settings(folder.path()).expect("settings");
        let reference = from_json_file(&tokenizers.join(json), &settings);
        assert_eq!((alone.bos(), alone.eos()), (reference.bos(), reference.eos()), "{name}");
        assert_eq!(alone.turn_terminators(), reference.turn_terminators(), "{name}");
        let mut texts = corpus_slices(&root, 20_000);
        texts.extend(naughty_texts(&root));
        for text in &texts {
            for options in [PLAIN, FULL] {
                let expected = reference.encode(text, options).expect("encodes");
                check(name, &alone, text, options, &expected);
            }
        }
        let marked =
            "<s>[INST] Hi</s><|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>";
        check(name, &alone, marked, PARSE, &reference.encode(marked, PARSE).expect("encodes"));
    }
}

/// Mistral's Tekken, of which no fixture exists: its special tokens come first, then all bytes and a few merges.
#[test]
fn tekken_ids_follow_from_ranks() {
    use base64::Engine;
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    tokens.extend([&b"he"[..], b"ll", b"hell", b"hello", b" h", b"unreachable"].map(<[u8]>::to_vec));
    let entry = |(rank, bytes): (usize, &Vec<u8>)| {
        let encoded = base64::prelude::BASE64_STANDARD.encode(bytes);
        serde_json::json!({"rank": rank, "token_bytes": encoded, "token_str": null})
    };
    let vocab: Vec<Value> = tokens.iter().enumerate().map(entry).collect();
    let folder = tempfile::tempdir().expect("a folder");
    let write = |size: usize, vocab: &[Value]| {
        let config = serde_json::json!({"default_vocab_size": size, "default_num_special_tokens": 10});
        let json = serde_json::json!({"config": config, "vocab": vocab}).to_string();
        fs::write(folder.path().join("tekken.json"), json).expect("a file");
        from_folder(folder.path())
    };
    let tokenizer = write(10 + tokens.len(), &vocab).expect("builds");
    let id = |token: &[u8]| 10 + tokens.iter().position(|known| known == token).expect("a token") as u32;
    check("tekken", &tokenizer, "hello", PLAIN, &[id(b"hello")]);
    check("tekken", &tokenizer, "hell h", PLAIN, &[id(b"hell"), id(b" h")]);
    check("tekken", &tokenizer, "unreachable", PLAIN, &[id(b"unreachable")]);
    check("tekken", &tokenizer, "</s>", PARSE, &[2]);
    check("tekken", &tokenizer, "h", FULL, &[1, id(b"h")]);
    // Tokens beyond the size of the vocabulary are left out.
    let short = write(10 + 256, &vocab).expect("builds");
    check("tekken", &short, "he", PLAIN, &[id(b"h"), id(b"e")]);
    let message = write(266, &vocab[1..]).expect_err("ranks are wrong").to_string();
    assert!(message.contains("tekken.json") && message.contains("token 0"), "{message}");
}

#[test]
fn vocabularies_of_unknown_rules_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |content: &str| {
        fs::write(folder.path().join("tokenizer.model"), content).expect("a file");
        from_folder(folder.path()).expect_err("refused").to_string()
    };
    let small = write("IQ== 0\nIg== 1\n");
    assert!(small.contains("tokenizer.model") && small.contains("tokenizer.json works"), "{small}");
    let damaged = write("IQ== 0\nIg== 5\n");
    assert!(damaged.contains("line 2"), "{damaged}");
}
