//! Fuzz targets: one function per format that comes from outside, through the functions that the product uses.
//!
//! A target may not panic, hang or take memory beyond its input's size, and holds what it reads to the promises of its module.
//! `fuzz/` runs these with coverage as the guide; `tests/fuzzing.rs` replays what was found. No model is needed.

use std::path::{Path, PathBuf};

use llmctl_base::{Error, GivenSampling, StoreError};
use llmctl_engine::Limits;
use llmctl_engine::session::store::{SessionName, SessionStore};
use llmctl_engine::worker::protocol::{KeptImages, Op, Reply, WorkerCall};
use llmctl_models::kv::disk::page;
use llmctl_models::kv::disk::{DiskPageKey, PageLabel, PageName};
use llmctl_models::load::gguf::Gguf;
use llmctl_models::load::hf;
use llmctl_models::load::packed::PackedTensors;
use llmctl_models::load::safetensors::Safetensors;
use llmctl_models::load::tokenizer;
use llmctl_models::model::arch::ConfigReader;
use llmctl_models::model::recognise::{Recognised, recognise};
use llmctl_models::tensor::TensorSource;
use llmctl_models::text::{Encode, HfSettings, Tokenizer};
use llmctl_serve::wire::{Fields, Problems, message, ollama, options, params, shape, switches, tools};
use llmctl_template::{
    ChatTemplate, Content, Conversation, Message, OutputMarkup, OutputParser, Piece, ReasoningFormat,
    RenderOptions, Role, SpecialTokens, TemplateVariables, ToolCall, ToolCallFormat, parse_answer,
};
use serde_json::{Map, Value, json};

use super::formats;
use crate::common::stored_tensors::{StoredTensor, StoredTensors};

/// A target: its name, which is also that of its corpus, and the function, which says whether the input was accepted.
pub type Target = (&'static str, fn(&[u8]) -> bool);

pub const TARGETS: &[Target] = &[
    ("gguf", gguf),
    ("safetensors", safetensors),
    ("packed", packed),
    ("config_json", config_json),
    ("tokenizer_json", tokenizer_json),
    ("chat_template", chat_template),
    ("transcript", transcript),
    ("kv_page", kv_page),
    ("sealed", formats::sealed),
    ("session_archive", formats::session_archive),
    ("http_body", http_body),
    ("ollama_body", ollama_body),
    ("worker_line", worker_line),
    ("tool_call", tool_call),
    ("imatrix", formats::imatrix),
    ("model_folder", formats::model_folder),
    ("tokenizer_file", formats::tokenizer_file),
    ("gguf_split", formats::gguf_split),
    ("kept_panels", formats::kept_panels),
    ("hub_listing", formats::hub_listing),
    ("ollama_manifest", formats::ollama_manifest),
    ("config_toml", formats::config_toml),
    ("tools_file", formats::tools_file),
    ("mcp_config", formats::mcp_config),
    ("mcp_answer", formats::mcp_answer),
    ("engine_events", formats::engine_events),
    ("endpoint_events", formats::endpoint_events),
    ("batch_row", formats::batch_row),
    ("http_api", formats::http_api),
    ("image", formats::image),
    ("mmproj", formats::mmproj),
    ("tower_config", formats::tower_config),
    ("adapter", formats::adapter),
    ("gbnf", formats::gbnf),
    ("recorded", formats::recorded),
];

/// Text that tokenizers are asked for: words, numbers, line breaks, marks, emoji, an added token.
const PROBE: &str = "Hello, wörld's 12345\r\n\n  <|im_end|> don't 漢字 👩‍👩‍👧\u{200d}\0x";

// ---- model files

/// A GGUF file, its tensors, the family it names and its vocabulary.
pub fn gguf(data: &[u8]) -> bool {
    let Ok(gguf) = Gguf::from_bytes("fuzz.gguf", data.to_vec()) else { return false };
    tensors(&gguf, data.len());
    let metadata = gguf.metadata();
    let keys: Vec<&str> = metadata.keys().collect();
    assert!(keys.iter().all(|key| metadata.contains(key)), "a key that is listed is there");
    let Ok(tokenizer) = tokenizer::from_gguf(metadata) else { return false };
    encodes(&tokenizer);
    true
}

/// A safetensors file and its tensors.
pub fn safetensors(data: &[u8]) -> bool {
    let Ok(file) = Safetensors::from_bytes("fuzz.safetensors", data.to_vec()) else { return false };
    tensors(&file, data.len());
    true
}

pub fn tensors(source: &dyn TensorSource, num_bytes: usize) {
    for name in source.names() {
        let described = source.describe(&name);
        let Ok(tensor) = source.tensor(&name) else { continue };
        let tensor = tensor.expect("a tensor that is listed is there");
        let (shape, dtype) = described.expect("what is read can be described");
        assert_eq!((&tensor.shape, tensor.dtype), (&shape, dtype), "{name}");
        assert!(tensor.bytes.len() <= num_bytes, "{name} is larger than its file");
    }
}

/// The folders of tests/packed.
pub const PACKED_FORMS: [&str; 18] = [
    "awq",
    "fp8-block",
    "fp8-channel",
    "fp8-tensor",
    "gptq",
    "gptq-3bit",
    "gptq-8bit",
    "gptq-order",
    "gptq-symmetric",
    "int4",
    "int4-zeros",
    "int8",
    "mlx-3bit",
    "mlx-4bit",
    "mlx-6bit",
    "mlx-8bit",
    "nvfp4",
    "fp8-fused",
];

/// A byte that changes nothing in an input of [`packed`].
pub const UNCHANGED: u8 = 0xff;

/// A quantised folder: the first byte chooses a form of tests/packed, each four that follow change its config.json, or the type,
/// shape or bytes of a tensor.
pub fn packed(data: &[u8]) -> bool {
    let Some((form, changes)) = data.split_first() else { return false };
    let (mut config, mut tensors) = packed_form(PACKED_FORMS[usize::from(*form) % PACKED_FORMS.len()]);
    changes.as_chunks::<4>().0.iter().for_each(|change| change_packed(*change, &mut config, &mut tensors));
    let Ok(files) = Safetensors::from_bytes("fuzz.safetensors", tensors.to_bytes()) else { return false };
    let Ok(Ok(packed)) = PackedTensors::of(Path::new("fuzz/config.json"), &config, files) else {
        return false;
    };
    packed.facts();
    let is_ruled_out = packed.check().is_err();
    let mut is_read = true;
    for name in packed.names() {
        match packed.tensor(&name) {
            Ok(tensor) => {
                let found = tensor.map(|tensor| tensor.shape);
                assert_eq!(found, packed.describe(&name).map(|(shape, _)| shape), "{name}");
                is_read &= found.is_some();
            }
            Err(error) => {
                assert!(error.to_string().contains(&*name), "{error}");
                is_read = false;
            }
        }
    }
    assert!(!(is_ruled_out && is_read), "what the headers rule out is not read");
    is_read
}

/// The config.json of a form and the tensors of one of its matrices.
fn packed_form(form: &str) -> (Value, StoredTensors) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let roots = [here.join("tests/packed"), here.join("../tests/packed")]; // fuzz/ is a package of its own
    let read = |file: &str| roots.iter().find_map(|root| std::fs::read(root.join(form).join(file)).ok());
    let config = serde_json::from_slice(&read("config.json").expect("a form")).expect("JSON");
    let mut tensors = StoredTensors::from_bytes(&read("model.safetensors").expect("a form"));
    tensors
        .0
        .retain(|tensor| tensor.name.contains(".k_proj") || tensor.name.contains(".0.self_attn.qkv_proj"));
    (config, tensors)
}

fn change_packed([kind, which, place, value]: [u8; 4], config: &mut Value, tensors: &mut StoredTensors) {
    const TYPES: [&str; 12] =
        ["I32", "U32", "U8", "I8", "I64", "F32", "F16", "BF16", "F8_E4M3", "F4", "F64", "BOOL"];
    const SIZES: [u64; 12] = [0, 1, 2, 3, 4, 7, 8, 31, 32, 64, 1 << 40, u64::MAX];
    let numbers = [
        json!(0),
        json!(1),
        json!(3),
        json!(4),
        json!(8),
        json!(64),
        json!(-1),
        json!(u64::MAX),
        json!(1e300),
        json!(null),
    ];
    let (which, place, value) = (usize::from(which), usize::from(place), usize::from(value));
    let count = tensors.0.len().max(1);
    let Some(StoredTensor { dtype, shape, bytes, .. }) = tensors.0.get_mut(which % count) else { return };
    match kind >> 5 {
        0 => *dtype = TYPES[value % TYPES.len()].to_owned(),
        1 if place % 8 == 7 => shape.truncate(value % 3),
        1 if shape.is_empty() => shape.push(SIZES[value % SIZES.len()]),
        1 => {
            let rank = shape.len();
            shape[place % rank] = SIZES[value % SIZES.len()];
        }
        2 | 3 => {
            for key in ["quantization_config", "quantization", "num_key_value_heads"] {
                let mut found = config.get_mut(key).map(numbers_in).unwrap_or_default();
                let num_found = found.len().max(1);
                if let Some(number) = found.get_mut(place % num_found) {
                    **number = numbers[value % numbers.len()].clone();
                }
            }
        }
        4 => bytes.fill(value as u8),
        5 if !bytes.is_empty() => {
            let len = bytes.len();
            bytes[place % len] = value as u8;
        }
        6 => drop(tensors.0.remove(which % count)),
        _ => {}
    }
    tensors.0.iter_mut().for_each(StoredTensor::refit);
}

fn numbers_in(value: &mut Value) -> Vec<&mut Value> {
    match value {
        Value::Object(map) => map.values_mut().flat_map(numbers_in).collect(),
        Value::Array(list) => list.iter_mut().flat_map(numbers_in).collect(),
        Value::Number(_) => vec![value],
        _ => vec![],
    }
}

/// A config.json: the family it names, and what ends its answers.
pub fn config_json(data: &[u8]) -> bool {
    let Ok(config) = serde_json::from_slice::<Value>(data) else { return false };
    if !config.is_object() {
        return false;
    }
    let ends = hf::config_eos_ids(Path::new("fuzz"), &config);
    assert_eq!(format!("{ends:?}"), format!("{:?}", hf::config_eos_ids(Path::new("fuzz"), &config)));
    let facts = ConfigReader::hugging_face(PathBuf::from("fuzz/config.json"), config);
    match recognise(&facts) {
        Ok(Recognised::Native(description)) => {
            let config = &description.config;
            assert!(!config.layers.is_empty() && config.vocab_size > 0 && config.context_length > 0);
        }
        #[cfg(feature = "candle-families")]
        Ok(Recognised::CandleModel(plan)) => assert!(plan.sizes.num_layers > 0 && plan.sizes.vocab_size > 0),
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    }
    true
}

/// A tokenizer.json: its ids lie in its vocabulary, and each has bytes.
pub fn tokenizer_json(data: &[u8]) -> bool {
    let Ok(tokenizer) = Tokenizer::from_json(data, &HfSettings::default()) else { return false };
    encodes(&tokenizer);
    true
}

pub fn encodes(tokenizer: &Tokenizer) {
    let size = tokenizer.vocab_size();
    for options in [Encode { add_special: true, parse_special: true }, Encode::default()] {
        let Ok(ids) = tokenizer.encode(PROBE, options) else { continue };
        assert!(ids.iter().all(|&id| (id as usize) < size), "{ids:?} of {size}");
        assert_eq!(tokenizer.encode(PROBE, options).expect("as before"), ids, "the same text, the same ids");
        tokenizer.decode(&ids, true);
        tokenizer.decode(&ids, false);
    }
    for id in [0, 1, size as u32 / 2, size as u32, u32::MAX] {
        let has_bytes = tokenizer.token_bytes(id).is_some();
        assert!(!has_bytes || (id as usize) < size, "{id} of {size}");
    }
}

// ---- conversations

/// A chat template over a conversation with all that a conversation may have.
pub fn chat_template(data: &[u8]) -> bool {
    let Ok(source) = std::str::from_utf8(data) else { return false };
    OutputMarkup::detect(source);
    let Ok(template) = ChatTemplate::new(source, SpecialTokens::default()) else { return false };
    let conversation = conversation();
    for options in [
        RenderOptions { add_generation_prompt: true, ..RenderOptions::default() },
        RenderOptions { continue_final_message: true, ..RenderOptions::default() },
    ] {
        let first = template.render(&conversation, &options);
        let again = template.render(&conversation, &options);
        assert_eq!(first.is_ok(), again.is_ok());
        if let (Ok(first), Ok(again)) = (first, again) {
            assert_eq!(first, again, "a template has no memory");
        }
    }
    true
}

fn conversation() -> Conversation {
    let call = ToolCall {
        id: Some("abcdefghi".to_owned()),
        name: "get_weather".to_owned(),
        arguments: json!({"city": "Łódź", "days": 3}),
    };
    let mut asks = Message::assistant("");
    asks.tool_calls = vec![call];
    asks.reasoning = Some("They want the weather.".to_owned());
    let mut result = Message::new(Role::Tool, "{\"sky\": \"<clear>\"}");
    result.tool_call_id = Some("abcdefghi".to_owned());
    let mut parts = Message::user("");
    parts.content = Some(Content::Parts(vec![json!({"type": "text", "text": "In parts."})]));
    let messages = vec![
        Message::system("Be brief."),
        Message::user("Weather?"),
        asks,
        result,
        parts,
        Message::assistant("Clear."),
    ];
    Conversation { messages, tools: tools(), ..Conversation::default() }
}

fn tools() -> Vec<Value> {
    let tool = |name: &str, properties: Value| {
        let parameters = json!({"type": "object", "properties": properties});
        json!({"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}})
    };
    vec![
        tool("get_weather", json!({"city": {"type": "string"}, "days": {"type": "integer"}})),
        tool(
            "write_file",
            json!({"path": {"type": "string"}, "lines": {"type": "array"}, "flag": {"type": "boolean"}}),
        ),
        tool("now", json!({})),
    ]
}

/// An answer in each notation: however it is split the same pieces come out, and a complete call has an object of arguments.
///
/// The first byte chooses the notation, the second how reasoning is marked, whether the answer is cut, and the splits.
pub fn tool_call(data: &[u8]) -> bool {
    let [format, variant, text @ ..] = data else { return false };
    let Ok(text) = std::str::from_utf8(text) else { return false };
    let formats: Vec<_> = ToolCallFormat::ALL.iter().copied().map(Some).chain([None]).collect();
    let reasonings: Vec<_> = ReasoningFormat::ALL.iter().copied().map(Some).chain([None]).collect();
    let output_markup = OutputMarkup {
        tool_calls: formats[usize::from(*format) % formats.len()],
        reasoning: reasonings[usize::from(*variant >> 2) % reasonings.len()],
    };
    let (is_cut, tail) = (variant & 1 == 1, if variant & 2 == 0 { "" } else { "<think>\n" });
    let whole = pieces(&output_markup, tail, &[text], is_cut);
    let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let single: Vec<&str> = ends.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
    assert_eq!(whole, pieces(&output_markup, tail, &single, is_cut), "character by character");
    let halves: Vec<&str> = single
        .iter()
        .step_by(3)
        .enumerate()
        .map(|(at, _)| {
            let end = ends.get(at * 3 + 3).copied().unwrap_or(text.len());
            &text[ends[at * 3]..end]
        })
        .collect();
    assert_eq!(whole, pieces(&output_markup, tail, &halves, is_cut), "by three characters");

    let answer = parse_answer(&output_markup, &tools(), tail, text, is_cut);
    let names = ["get_weather", "write_file", "now"];
    for call in &answer.calls {
        let arguments: Result<Map<String, Value>, _> = serde_json::from_str(&call.arguments);
        assert!(arguments.is_ok(), "{:?}: {}", output_markup.tool_calls, call.arguments);
        // Harmony's calls of tools that were not given are calls, too (src/template/tool_call/harmony.rs).
        let may_be_any = output_markup.tool_calls == Some(ToolCallFormat::Harmony)
            || output_markup.reasoning == Some(ReasoningFormat::Harmony);
        assert!(may_be_any || names.contains(&call.name.as_str()), "{}", call.name);
    }
    let ended = whole.iter().filter(|piece| matches!(piece, Piece::CallEnd { .. })).count();
    assert!(answer.calls.is_empty() || answer.calls.len() == ended, "{answer:?}");
    !answer.calls.is_empty()
}

/// The pieces of an answer that comes in `chunks`; adjacent ones of a kind joined.
fn pieces(output_markup: &OutputMarkup, prompt_tail: &str, chunks: &[&str], is_cut: bool) -> Vec<Piece> {
    let mut parser = OutputParser::new(output_markup, &tools(), prompt_tail);
    let mut all: Vec<Piece> = chunks.iter().flat_map(|chunk| parser.push(chunk)).collect();
    all.extend(parser.finish(is_cut));
    let mut joined: Vec<Piece> = Vec::new();
    for piece in all {
        match (joined.last_mut(), piece) {
            (Some(Piece::Content(before)), Piece::Content(text))
            | (Some(Piece::Reasoning(before)), Piece::Reasoning(text)) => before.push_str(&text),
            (
                Some(Piece::CallArguments { index: same, fragment: before }),
                Piece::CallArguments { index, fragment },
            ) if *same == index => before.push_str(&fragment),
            (_, piece) => joined.push(piece),
        }
    }
    joined
}

// ---- what is on disk

/// A session's file, as it is (even first byte) or with its lines framed and their checksums right (odd): what is read stays the
/// same however often it is read, opened, written anew; what is damaged can be repaired, or is an error that says why.
pub fn transcript(data: &[u8]) -> bool {
    let Some((kind, rest)) = data.split_first() else { return false };
    let bytes = if kind % 2 == 0 { rest.to_vec() } else { framed(rest) };
    let folder = Folder::new();
    let store = SessionStore::new(&folder.0);
    let name = SessionName::new("s").expect("a name");
    std::fs::create_dir_all(folder.0.join("s")).expect("a folder in memory");
    std::fs::write(folder.0.join("s/transcript.jsonl"), &bytes).expect("a file in memory");
    let read = match store.read(&name) {
        Ok(saved) => saved,
        Err(Error::Store(StoreError::Damaged { line, .. })) => {
            assert!(line >= 1);
            let Ok(repaired) = store.repair(&name) else { return false };
            let repaired = repaired.expect("there was damage");
            let saved = store.read(&name).expect("what was repaired can be read");
            assert_eq!(saved.turns.len(), repaired.turns);
            assert_eq!(std::fs::read(&repaired.backup).expect("the damaged file is kept"), bytes);
            assert!(store.repair(&name).expect("nothing is wrong any more").is_none());
            saved
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    let turns = |saved: &llmctl_engine::session::store::SavedSession| format!("{:?}", saved.turns);
    let mut writer = store.open(&name).expect("what can be read can be opened");
    assert_eq!(turns(writer.saved()), turns(&read));
    writer.compact().expect("what was opened can be written anew");
    drop(writer);
    let compacted = store.read(&name).expect("what was written can be read");
    assert_eq!(turns(&compacted), turns(&read));
    assert_eq!(compacted.tokens(), read.tokens());
    assert_eq!((compacted.model, compacted.created_ms), (read.model, read.created_ms));
    true
}

/// The lines of `text` as records with their checksums (`llmctl.session.v1`).
pub fn framed(text: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut before = String::new();
    for body in text.split(|&byte| byte == b'\n') {
        let crc = crc32fast::hash(&[before.as_bytes(), body].concat());
        before = format!("{crc:08x}");
        file.extend_from_slice(format!("{{\"crc32\":\"{before}\",\"record\":").as_bytes());
        file.extend_from_slice(body);
        file.extend_from_slice(b"}\n");
    }
    file
}

/// A folder that goes when it is dropped; in memory where the system has such a place.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Self {
        static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let memory = Path::new("/dev/shm");
        let root = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let path = root.join(format!("llmctl-fuzz-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    /// Writes a file, and the folders that its path names.
    pub fn write(&self, name: &str, content: &[u8]) {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder in memory");
        std::fs::write(path, content).expect("a file in memory");
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A page of the KV cache: what is written is read back, and a file that is read is what writing that page makes.
///
/// The page that is asked for is what the file says of itself, so that reading gets as far as it can; with an odd first byte the
/// checksum is made right.
pub fn kv_page(data: &[u8]) -> bool {
    let Some((kind, rest)) = data.split_first() else { return false };
    let mut file = rest.to_vec();
    if kind % 2 == 1 && file.len() >= 4 {
        let end = file.len() - 4;
        let crc = crc32fast::hash(&file[..end]);
        file[end..].copy_from_slice(&crc.to_le_bytes());
    }
    let (label, num_bytes) = claimed(&file);
    let mut is_page = false;
    if let Ok(payload) = page::find_payload(&file, &label, num_bytes) {
        assert_eq!(payload.len(), num_bytes);
        let mut written = Vec::new();
        page::write(&mut written, &label, &file[payload]).expect("memory takes it");
        assert_eq!(written, file, "what was read is what is written");
        is_page = true;
    }
    let mut written = Vec::new();
    page::write(&mut written, &label, rest).expect("memory takes it");
    assert_eq!(written.len() as u64, page::file_len(&label, rest.len()));
    let read = page::find_payload(&written, &label, rest.len());
    assert_eq!(read.map(|payload| &written[payload]), Ok(rest));
    is_page
}

/// The label that a file's header claims, and the length of its payload.
fn claimed(file: &[u8]) -> (PageLabel, usize) {
    let number = |range: std::ops::Range<usize>| {
        let bytes = file.get(range).unwrap_or_default();
        bytes.iter().rev().fold(0u64, |number, &byte| number << 8 | u64::from(byte))
    };
    let name = |at: usize| file.get(at..at + 32).and_then(|bytes| bytes.try_into().ok()).map(PageName);
    let tokens = file.get(96..).unwrap_or_default().chunks_exact(4).take(number(16..20) as usize);
    let label = PageLabel {
        key: DiskPageKey { name: name(32).unwrap_or(PageName([0; 32])), group: number(12..16) as u8 },
        parent: name(64).filter(|_| number(20..24) == 1),
        tokens: tokens.map(|token| u32::from_le_bytes(token.try_into().expect("four bytes"))).collect(),
        depth: 0,
    };
    (label, usize::try_from(number(24..32)).unwrap_or(usize::MAX))
}

// ---- what comes over a wire

/// The body of a request to either endpoint: its messages go there and back.
pub fn http_body(data: &[u8]) -> bool {
    let Ok(body) = serde_json::from_slice::<Map<String, Value>>(data) else { return false };
    let mut is_fine = false;
    for lenient in [false, true] {
        let mut problems = Problems::new(lenient);
        let mut fields = Fields::new(body.clone(), &mut problems);
        let messages = message::messages(&mut fields, &|_| true);
        let sampling = params::sampling(&mut fields, &GivenSampling::default()).sampling(true);
        let limits = params::limits(&mut fields, &Limits::default(), false);
        params::logprobs(&mut fields, None);
        let template = TemplateVariables {
            reads: &|name| name == "enable_thinking",
            says: &|_| false,
            ends_reasoning: true,
        };
        switches::switches(&mut fields, template, None);
        tools::tools(&mut fields, false);
        shape::shape(&mut fields, false);
        params::labels(&mut fields);
        fields.end();
        let _ = sampling.validate(usize::MAX);
        assert!(limits.stop.len() <= 64 || problems.check().is_err());
        if problems.check().is_ok() {
            come_back(&messages);
            is_fine = true;
        }
    }
    is_fine
}

/// The body of a request of Ollama's: its messages go there and back, also as a context.
pub fn ollama_body(data: &[u8]) -> bool {
    let Ok(body) = serde_json::from_slice::<Map<String, Value>>(data) else { return false };
    let mut problems = Problems::new(false);
    let mut fields = Fields::new(body, &mut problems);
    let messages = ollama::messages(&mut fields, &|_| true).unwrap_or_default();
    let before = ollama::context(&mut fields);
    let (sampling, limits) =
        options::options(&mut fields, &GivenSampling::default(), &Limits::default(), false);
    let _ = sampling.sampling(true).validate(usize::MAX);
    switches::ollama(&mut fields, &mut switches::Wish::default());
    ollama::format(&mut fields, false);
    ollama::cuts(&mut fields);
    let _ = fields.take("keep_alive").as_ref().map(ollama::keep_alive);
    ["model", "prompt", "system"].iter().for_each(|name| drop(fields.text(name)));
    fields.end();
    assert!(limits.stop.len() <= 64 || problems.check().is_err());
    let is_fine = problems.check().is_ok();
    if is_fine {
        [&messages, &before].into_iter().filter(|messages| !messages.is_empty()).for_each(|it| come_back(it));
        if let Some(context) = ollama::context_of(&messages).filter(|_| !messages.is_empty()) {
            let mut problems = Problems::new(false);
            let body = Map::from_iter([("context".to_owned(), context)]);
            let read = ollama::context(&mut Fields::new(body, &mut problems));
            let shown = |messages: &[Message]| messages.iter().map(message::message_json).collect::<Vec<_>>();
            assert_eq!(shown(&read), shown(&messages));
        }
    }
    is_fine
}

fn come_back(messages: &[Message]) {
    let sent: Vec<Value> = messages.iter().map(message::message_json).collect();
    let mut problems = Problems::default();
    let body = Map::from_iter([("messages".to_owned(), Value::from(sent.clone()))]);
    let mut fields = Fields::new(body, &mut problems);
    let read = message::messages(&mut fields, &|_| true);
    fields.end();
    assert!(problems.check().is_ok(), "{sent:?}");
    let again: Vec<Value> = read.iter().map(message::message_json).collect();
    assert_eq!(again, sent, "what is shown is read as the same");
}

/// A line of the worker protocol, either way: what is understood is written so that it is understood as the same.
pub fn worker_line(data: &[u8]) -> bool {
    let (call, reply) = (WorkerCall::parse(data), Reply::parse(data));
    let is_understood = call.is_ok() || reply.is_ok();
    if let Ok(call) = call {
        let line = serde_json::to_vec(&call).expect("a call is JSON");
        assert_eq!(WorkerCall::parse(&line).ok().as_ref(), Some(&call), "{}", String::from_utf8_lossy(&line));
        if let Op::Generate(generate) = call.op {
            let encode = |text: &str, _: bool| Ok(text.bytes().map(u32::from).collect());
            let no_grammar = |_: &_| Err(Error::PromptEmpty);
            let files = KeptImages::default().files(&generate.images).map(|(files, _)| files);
            let _ = generate.into_request(encode, no_grammar, files.unwrap_or_default());
        }
    }
    if let Ok(reply) = reply {
        let line = serde_json::to_vec(&reply).expect("a reply is JSON");
        let again = Reply::parse(&line).expect("what was understood is understood again");
        assert_eq!(format!("{again:?}"), format!("{reply:?}"));
    }
    is_understood
}
