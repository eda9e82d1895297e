//! Fuzz targets of the smaller formats: files beside weights, caches, configurations, answers of servers, bodies of requests.
//!
//! Those that are read from a folder are written into one in memory. Where an input has several forms, its first byte chooses one.

use std::io::ErrorKind;
use std::path::{Component, Path};
use std::sync::OnceLock;

use llmctl::cli::batch::row;
use llmctl::cli::declared_tools::Toolbox;
use llmctl::cli::endpoint::answer::EndpointAnswer;
use llmctl::cli::mcp::{McpConfig, parse_result, parse_tools};
use llmctl::cli::{command, config};
use llmctl_base::error::LoadError;
use llmctl_base::vault::{KeyId, KeyKind, SEALED_HEADER, Vault};
use llmctl_engine::grammar::gbnf_to_lark;
use llmctl_engine::http_engine::{ChunkReader, EngineKind, SseParser};
use llmctl_engine::session::store::{Archive, Import, SessionName, SessionStore};
use llmctl_hub::{FileRequest, HubPaths, ListedFile, ModelRef, ModelSource, RemoteFile, Resolved, Selector};
use llmctl_image::{ImageFile, ImageHash, ImageLimits, PixelRule, ResizeFilter, SizeRule, inspect};
use llmctl_kernel::Dtype;
use llmctl_kernel::memory::Arena;
use llmctl_kernel::pool::Pool;
use llmctl_models::kv::disk::{file_name, page};
use llmctl_models::load::export::Imatrix;
use llmctl_models::load::gguf::Gguf;
use llmctl_models::load::safetensors::Safetensors;
use llmctl_models::load::{
    CpuOptions, Device, Fingerprint, KvType, LoadOptions, ModelFiles, PanelPlace, TextFiles, adapter, hf,
    text_task, tokenizer, vision,
};
use llmctl_models::memory::Demand;
use llmctl_models::model::low_rank::Adapter;
use llmctl_models::model::recognise::{Recognised, recognise};
use llmctl_models::panels::{LoadedPanels, PanelStore};
use llmctl_template::TemplateVariables;
use serde_json::{Value, json};

use super::server::Server;
use super::targets::{Folder, encodes, framed, tensors};

// ---- sessions

/// A session for another machine: a file as it is, a tar archive with a sound checksum, or parts with sound checksums. What is
/// taken can be imported, and written anew.
pub fn session_archive(data: &[u8]) -> bool {
    let Some((form, rest)) = data.split_first() else { return false };
    let bytes = match form % 3 {
        0 => rest.to_vec(),
        1 => sealed_archive(rest),
        _ => sealed_archive(&archive_of(rest)),
    };
    let folder = Folder::new();
    folder.write("archive", &bytes);
    let open = |path: &Path| Archive::open(path, std::fs::File::open(path).expect("a file in memory"));
    let mut archive = match open(&folder.0.join("archive")) {
        Ok(archive) => archive,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    let store = SessionStore::new(folder.0.join("sessions")).with_kv(Some(folder.0.join("kv")));
    if !archive.prompts().is_empty() {
        let imported = store.import_prompts(&mut archive, 1 << 20).expect("what was checked is imported");
        let package = store.pack_prompts(archive.prompts(), |_, _| None).expect("what was imported is read");
        assert!(package.num_pages >= imported.num_pages);
        return true;
    }
    let import = Import { name: None, kv_limit: 1 << 20 };
    let imported = store.import(&mut archive, import).expect("what was checked is imported");
    let package = store.pack(&imported.name, |_, _| None).expect("what was imported is read");
    let mut written = Vec::new();
    package.write(&mut written).expect("memory takes it");
    folder.write("again", &written);
    assert_eq!(open(&folder.0.join("again")).expect("sound").num_pages(), imported.pages.num_pages);
    true
}

/// Compresses a tar archive and adds the checksum.
pub fn sealed_archive(tar: &[u8]) -> Vec<u8> {
    let mut archive = zstd::encode_all(tar, 1).expect("memory takes it");
    let hash = ImageHash::of(&archive);
    archive.extend_from_slice(b"\x50\x2a\x4d\x18\x30\x00\x00\x00llmctl archive 1");
    archive.extend_from_slice(&hash.0);
    archive
}

/// Makes a tar archive of parts, each behind two bytes with its length: the records of a conversation, then pages, with a manifest
/// for them.
pub fn archive_of(mut data: &[u8]) -> Vec<u8> {
    let mut parts = Vec::new();
    while let Some((len, rest)) = data.split_first_chunk() {
        let (part, rest) = rest.split_at(usize::from(u16::from_le_bytes(*len)).min(rest.len()));
        parts.push(part);
        data = rest;
    }
    let transcript = framed(parts.first().copied().unwrap_or_default());
    parts.iter_mut().take(1).for_each(|first| *first = &transcript);
    let folder = Folder::new();
    folder.write("s/transcript.jsonl", &transcript);
    let read = SessionStore::new(&folder.0).read(&SessionName::new("s").expect("a name"));
    let name = |at: usize, part: &[u8]| match (at, page::read_any(part)) {
        (0, _) => "sessions/0.jsonl".to_owned(),
        (_, Ok((label, _))) => format!("kv/0/{}", file_name(label.key)),
        (_, Err(_)) => format!("images/{}", ImageHash::of(part)),
    };
    let named: Vec<(String, &[u8])> =
        parts.iter().enumerate().map(|(at, part)| (name(at, part), *part)).collect();
    let listed = named.iter().map(
        |(name, part)| json!({"name": name, "bytes": part.len(), "sha256": ImageHash::of(part).to_string()}),
    );
    let facts = json!({"fuzz": true});
    let turns = read.map_or(0, |saved| saved.turns.len());
    let manifest = json!({
        "schema": "llmctl.session-archive.v1", "llmctl": "", "created_ms": 0,
        "sessions": [{"name": "s", "turns": turns}],
        "models": [{"fingerprint": Fingerprint::of(facts.clone()).hex, "made_of": facts, "weights_sha256": null}],
        "parts": listed.collect::<Vec<_>>(),
    });
    let mut tar = tar::Builder::new(Vec::new());
    let manifest = manifest.to_string();
    for (name, part) in std::iter::once(("manifest.json".to_owned(), manifest.as_bytes())).chain(named) {
        let mut header = tar::Header::new_ustar();
        header.set_size(part.len() as u64);
        tar.append_data(&mut header, name, part).expect("memory takes it");
    }
    tar.into_inner().expect("memory takes it")
}

// ---- grammars

/// A grammar of llama.cpp: its translation is Lark, of a size in proportion to its own.
pub fn gbnf(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else { return false };
    let find_token = |name: &str| (name.len() < 9).then_some(7);
    let Ok(lark) = gbnf_to_lark(text, &find_token) else { return false };
    assert!(lark.starts_with("start: ") && lark.ends_with('\n'));
    assert!(lark.len() <= 200 + 100 * text.len(), "{} bytes of {}", lark.len(), text.len());
    true
}

// ---- pictures

/// An image file: what its header says holds for its pixels, and a tower's rule plans what it makes.
pub fn image(data: &[u8]) -> bool {
    let limits = ImageLimits { pixels: 1 << 20, ..ImageLimits::default() };
    let info = inspect(data, &limits);
    let Ok(file) = ImageFile::read(data.into(), &limits) else { return false };
    assert_eq!(info, Ok(file.info));
    let picture = &file.picture;
    assert_eq!((picture.width, picture.height), (file.info.width, file.info.height));
    assert_eq!(picture.rgb.len() as u64, 3 * u64::from(picture.width) * u64::from(picture.height));
    let size = SizeRule::EdgeTiles { longest: 64, tile: 32, split: true };
    let [mean, std] = [[0.5; 3]; 2];
    let (least_tokens, most_tokens) = (None, None);
    let rule = PixelRule {
        filter: ResizeFilter::Lanczos,
        patch: 8,
        merge: 2,
        mean,
        std,
        size,
        least_tokens,
        most_tokens,
    };
    let plan = rule.plan(picture.width, picture.height).expect("a size within limits");
    let made: Vec<[u32; 2]> =
        rule.patches(picture).expect("a size within limits").iter().map(|tile| tile.grid).collect();
    assert_eq!(made, plan.tiles.iter().map(|tile| tile.patches).collect::<Vec<_>>());
    true
}

/// An mmproj file beside a text model.
pub fn mmproj(data: &[u8]) -> bool {
    let folder = Folder::new();
    folder.write("text.gguf", &super::format_seeds::seeing_text());
    folder.write("mmproj.gguf", data);
    let (text, tower) = (folder.0.join("text.gguf"), folder.0.join("mmproj.gguf"));
    let resolved = Resolved::new("fuzz".to_owned(), ModelSource::Gguf(text));
    sees(&Resolved { mmproj: Some(tower), ..resolved }, 1 << 20)
}

/// The configuration of a folder with a tower, and of how it prepares images: an object with the content of both files.
pub fn tower_config(data: &[u8]) -> bool {
    let Ok(files) = serde_json::from_slice::<Value>(data) else { return false };
    let folder = Folder::new();
    folder.write("config.json", files["config"].to_string().as_bytes());
    folder.write("preprocessor_config.json", files["preprocessor"].to_string().as_bytes());
    folder.write("model.safetensors", &super::format_seeds::tower_tensors());
    folder.write("tokenizer.model", &super::format_seeds::sentencepiece()[1..]);
    sees(&Resolved::new("fuzz".to_owned(), ModelSource::Folder(folder.0.clone())), 1 << 20)
}

/// A LoRA adapter: a GGUF file, or the configuration or the weights of a folder of PEFT.
pub fn adapter(data: &[u8]) -> bool {
    let Some((form, data)) = data.split_first() else { return false };
    let folder = Folder::new();
    let read = match form % 3 {
        0 => Gguf::from_bytes("fuzz.gguf", data.to_vec())
            .and_then(|gguf| adapter::of_gguf(&gguf, Path::new("fuzz.gguf"), Some("llama"))),
        form => {
            let [config, weights] = super::format_seeds::peft_adapter();
            let [config, weights] = if form == 1 { [data, &weights[..]] } else { [&config[..], data] };
            folder.write("adapter_model.safetensors", weights);
            let Ok(config) = serde_json::from_slice(config) else { return false };
            adapter::of_peft(&config, &folder.0)
        }
    };
    let Ok(matrices) = read else { return false };
    drop(Adapter::new("fuzz".to_owned(), 1.0, matrices));
    true
}

/// Reads what a model sees, plans images of all sizes, estimates and loads its tower, whose weights have at most so many bytes.
fn sees(resolved: &Resolved, most: u64) -> bool {
    let options = LoadOptions {
        device: Device::Cpu(CpuOptions::new(1)),
        kv_type: KvType::F32,
        ..LoadOptions::default()
    };
    let read = || {
        let files = ModelFiles::of(resolved)?;
        let Recognised::Native(description) = recognise(files.config_reader())? else { return Ok(false) };
        let mut notices = Vec::new();
        let found = vision::find(&files, &description, options.images, &mut notices)?;
        let Some(found) = found else { return Ok(false) };
        for [width, height] in [[1, 1], [640, 480], [16_384, 82], [82, 16_384], [8192, 8192]] {
            if let Ok(plan) = found.pixels.plan(width, height) {
                assert!(plan.tiles.iter().all(|tile| tile.tokens.iter().all(|side| *side > 0)));
            }
        }
        let demand = found.add_demand(Demand::default(), &files, &options)?;
        assert!(demand.weights <= most, "weights are in the file");
        let tower = found.load(&files, &options, None, &files.tokenizer()?, &mut notices)?;
        Ok::<_, LoadError>(tower.is_some())
    };
    read().unwrap_or(false)
}

// ---- model files

/// An importance matrix of either form.
pub fn imatrix(data: &[u8]) -> bool {
    let folder = Folder::new();
    folder.write("fuzz.imatrix", data);
    let Ok(imatrix) = Imatrix::open(&folder.0.join("fuzz.imatrix")) else { return false };
    assert!(!imatrix.is_empty());
    for shape in [&[2, 3][..], &[2, 0], &[2, 5, 3], &[]] {
        let columns = imatrix.columns("a", shape);
        let fine = |values: &[f32]| values.iter().all(|value| value.is_finite() && *value >= 0.0);
        assert!(columns.is_err() || columns.is_ok_and(|values| values.is_none_or(fine)));
    }
    true
}

/// Files of a folder that lie beside its weights; each is read with sound ones around it.
pub const BESIDE_WEIGHTS: [&str; 13] = [
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "config_sentence_transformers.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "modules.json",
    "sentence_bert_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
];

/// A file of [`BESIDE_WEIGHTS`], and everything that reads such files.
pub fn model_folder(data: &[u8]) -> bool {
    let Some((which, content)) = data.split_first() else { return false };
    let name = BESIDE_WEIGHTS[usize::from(*which) % BESIDE_WEIGHTS.len()];
    let folder = Folder::new();
    let sound = super::format_seeds::model_folder();
    let sound = sound.iter().filter(|(other, _)| *other != name).map(|(name, content)| (*name, &content[..]));
    for (name, content) in sound.chain([(name, content)]) {
        folder.write(name, content);
    }
    let path = &folder.0;
    let texts = TextFiles::open(&ModelSource::Folder(path.clone()));
    let generation = hf::generation_config(path);
    if let Ok(Some(generation)) = &generation {
        generation.defaults.sampling(false).validate(usize::MAX).expect("what is read is in range");
    }
    let settings = tokenizer::hf_settings(path);
    let task = text_task::folder_task(path);
    let weights = Safetensors::open(path.join("model.safetensors.index.json"));
    if let Ok(weights) = &weights {
        tensors(weights, 1 << 20);
    }
    let unused = llmctl_models::load::safetensors::has_unused_shards(path);
    texts.is_ok()
        && generation.is_ok()
        && settings.is_ok()
        && task.is_ok()
        && weights.is_ok()
        && unused.is_ok()
}

/// A vocabulary without tokenizer.json: Tekken's, or tokenizer.model of SentencePiece or tiktoken.
pub fn tokenizer_file(data: &[u8]) -> bool {
    let Some((which, content)) = data.split_first() else { return false };
    let folder = Folder::new();
    folder.write(if which % 2 == 0 { "tokenizer.model" } else { "tekken.json" }, content);
    match tokenizer::from_folder(&folder.0) {
        Ok(tokenizer) => {
            encodes(&tokenizer);
            true
        }
        // A vocabulary of tiktoken that is read whole, and is not the one of 128,000 tokens that llmctl runs.
        Err(error) => error.to_string().contains("a tiktoken vocabulary of"),
    }
}

/// A model in two GGUF files; the first two bytes are the length of the first.
pub fn gguf_split(data: &[u8]) -> bool {
    let Some((length, files)) = data.split_first_chunk::<2>() else { return false };
    let (first, second) = files.split_at(files.len().min(u16::from_le_bytes(*length).into()));
    let folder = Folder::new();
    folder.write("m-00001-of-00002.gguf", first);
    folder.write("m-00002-of-00002.gguf", second);
    let [opened, from_second] =
        ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"].map(|name| Gguf::open(folder.0.join(name)));
    let (Ok(opened), Ok(_)) = (opened, from_second) else { return false };
    tensors(&opened, data.len());
    opened.paths().count() == 2
}

// ---- caches

/// Kept panels of two matrices. An odd first byte makes the index's checksum right.
pub fn kept_panels(data: &[u8]) -> bool {
    let Some((kind, content)) = data.split_first() else { return false };
    let mut file = content.to_vec();
    if kind % 2 == 1
        && let Some((content, end)) = file.split_last_chunk_mut::<32>()
    {
        let start = u64::from_le_bytes(*end.first_chunk().expect("32 bytes"));
        let index = usize::try_from(start).ok().and_then(|start| content.get(start..)).unwrap_or_default();
        end[8..12].copy_from_slice(&crc32fast::hash(index).to_le_bytes());
    }
    let folder = Folder::new();
    folder.write("aa.panels", &file);
    let place = PanelPlace { folder: folder.0.clone(), limit_bytes: 1 << 20, least_bytes: u64::MAX };
    let open = || PanelStore::open(place.clone(), "aa".to_owned());
    let (pool, arena, shape) = (Pool::new(1).expect("one thread"), Arena::default(), [4, 32]);
    // As a load does, which takes note of each matrix.
    let noted = |store: &PanelStore| {
        store.loaded(
            Dtype::Q4_0,
            shape,
            LoadedPanels::Late { len: 0, get: Box::new(|| Err(ErrorKind::Other.into())) },
        );
    };
    let late = open();
    let copied = [(); 2].map(|()| {
        let panels = late.next_in_place(Dtype::Q4_0, shape, &pool);
        noted(&late);
        panels.map(|panels| {
            let mut copy = vec![0; panels.num_bytes()];
            assert!(panels.copy_to(&mut copy, &pool), "as it was checked");
            copy
        })
    });
    let store = open();
    let read = [(); 2].map(|()| {
        let panels = store.next(Dtype::Q4_0, shape, &arena, &pool);
        noted(&store);
        panels
    });
    for (read, copied) in read.iter().zip(&copied) {
        assert_eq!(read.as_deref(), copied.as_deref(), "read and copied");
        assert!(read.as_ref().is_none_or(|read| read.len() <= file.len()));
    }
    let is_whole = read.iter().all(Option::is_some);
    store.finish();
    is_whole
}

/// A page of a hub's list of files, and the choice of a model among them.
pub fn hub_listing(data: &[u8]) -> bool {
    let Ok(page) = serde_json::from_slice::<Value>(data) else { return false };
    let entries = page.as_array().map(Vec::as_slice).unwrap_or_default();
    let files: Vec<RemoteFile> = entries.iter().filter_map(RemoteFile::of_entry).collect();
    for file in &files {
        let inside = Path::new(&file.path).components().all(|part| matches!(part, Component::Normal(_)));
        assert!(inside && !file.path.is_empty() && file.hash.hex().len() >= 40, "{file:?}");
    }
    let listed: Vec<ListedFile> =
        files.iter().map(|file| ListedFile { path: file.path.clone(), bytes: file.size }).collect();
    let quant = Selector::Quant("Q4_K_M".to_owned());
    for selector in [None, Some(&quant)] {
        let request =
            FileRequest { id: "o/m", files: &listed, selector, memory: Some(1 << 30), is_cached: false };
        if let Ok(chosen) = llmctl_hub::choose(&request) {
            let is_listed = |path: &String| listed.iter().any(|file| file.path == *path);
            assert!(chosen.missing.is_some() || chosen.files.iter().all(is_listed), "{:?}", chosen.files);
        }
    }
    llmctl_hub::text_files(&listed);
    let _ = files.iter().map(|file| file.size).sum::<u64>();
    !files.is_empty()
}

/// A manifest of ollama.
pub fn ollama_manifest(data: &[u8]) -> bool {
    let store = Folder::new();
    store.write("manifests/registry.ollama.ai/library/m/latest", data);
    store.write(&format!("blobs/sha256-{}", "a".repeat(64)), b"GGUF");
    store.write(&format!("blobs/sha256-{}", "c".repeat(64)), br#"{"file_type": "Q4_0"}"#);
    let listed = llmctl_hub::ollama::list(std::slice::from_ref(&store.0));
    assert_eq!(listed.len(), 1);
    let paths = HubPaths { ollama: vec![store.0.clone()], ..HubPaths::default() };
    let resolved =
        ModelRef::parse("ollama:m").and_then(|name| llmctl_hub::resolve(&name, &paths, &Default::default()));
    if let Ok(resolved) = &resolved {
        assert!(resolved.source.path().starts_with(&store.0), "{resolved:?}");
    }
    resolved.is_ok()
}

// ---- configurations

/// llmctl.toml.
pub fn config_toml(data: &[u8]) -> bool {
    static COMMAND: OnceLock<clap::Command> = OnceLock::new();
    let Ok(text) = std::str::from_utf8(data) else { return false };
    let read = config::file::parse(Path::new("fuzz.toml"), text, COMMAND.get_or_init(command));
    for problem in read.as_ref().err().into_iter().flatten() {
        assert!(
            problem.line >= 1 && problem.column >= 1 && problem.line <= text.lines().count() + 1,
            "{problem}"
        );
    }
    read.is_ok()
}

/// Tools of the user's, in TOML or JSON.
pub fn tools_file(data: &[u8]) -> bool {
    let folder = Folder::new();
    folder.write("tools", data);
    let Ok(tools) = Toolbox::read(folder.0.join("tools").to_str().expect("UTF-8")) else { return false };
    for tool in &tools.tools {
        let words = tool.command_line(&serde_json::json!({"a": "{b}", "b": 1}), &folder.0);
        assert_eq!(words.len(), tool.argv.len());
    }
    tools.rows();
    tools.names().count() > 0
}

/// The servers of an MCP configuration.
pub fn mcp_config(data: &[u8]) -> bool {
    let folder = Folder::new();
    folder.write("mcp.json", data);
    let lookup = |name: &str| (name == "A").then(|| "${A}".to_owned());
    let Ok(config) = McpConfig::read(&[folder.0.join("mcp.json")], &lookup) else { return false };
    for server in &config.servers {
        assert!(!server.name.is_empty() && !server.name.contains("__"), "{}", server.name);
    }
    !config.servers.is_empty()
}

// ---- answers of servers

/// What an MCP server answers: a list of tools, or the result of a call.
pub fn mcp_answer(data: &[u8]) -> bool {
    let tools = parse_tools("s", data);
    let mut names = std::collections::BTreeSet::new();
    for tool in tools.iter().flatten() {
        assert!(tool.offered.starts_with("s__") && tool.offered.len() <= 64 && names.insert(&tool.offered));
        tool.definition();
    }
    let result = parse_result(data);
    if let Ok(result) = &result {
        assert!(result.text.len() <= (64 << 10) + 100, "{}", result.text.len());
    }
    tools.is_ok_and(|tools| !tools.is_empty()) || result.is_ok()
}

/// The events of a remote engine's stream; the first byte says which, and whether log-probabilities were asked for.
pub fn engine_events(data: &[u8]) -> bool {
    let Some((kind, stream)) = data.split_first() else { return false };
    let kinds = [EngineKind::Vllm, EngineKind::Sglang, EngineKind::Llmctl];
    let logprobs = (kind & 4 != 0).then_some(2);
    let mut reader = ChunkReader::new(kinds[usize::from(kind & 3) % 3], logprobs);
    let (mut num_tokens, mut is_fine) = (0, true);
    for data in events(stream) {
        match reader.read(&data) {
            Ok(chunk) => {
                num_tokens += chunk.tokens.len();
                let is_as_asked =
                    |token: &llmctl_engine::Token| token.logprob.is_some() == logprobs.is_some();
                assert!(chunk.tokens.iter().all(is_as_asked), "{chunk:?}");
            }
            Err(_) => is_fine = false,
        }
    }
    is_fine && num_tokens > 0
}

/// The events of an endpoint's answer.
pub fn endpoint_events(data: &[u8]) -> bool {
    let mut answer = EndpointAnswer::begin();
    let mut is_fine = true;
    for data in events(data).iter().filter(|data| *data != "[DONE]") {
        is_fine &= answer.take(data).is_ok();
    }
    let is_ended = answer.is_ended();
    let end = answer.end();
    let (_, answer) = answer.finish(&end, None);
    for call in answer.tool_calls.iter().filter(|call| call.is_whole) {
        let arguments = serde_json::from_str::<Value>(&call.arguments);
        assert!(arguments.is_ok_and(|arguments| arguments.is_object()), "{call:?}");
    }
    is_fine && is_ended
}

/// The data of a stream's events, which are the same however the stream is cut.
fn events(stream: &[u8]) -> Vec<String> {
    let in_parts = |size: usize| {
        let mut parser = SseParser::default();
        stream.chunks(size).flat_map(|part| parser.push(part).expect("short events")).collect::<Vec<_>>()
    };
    let events = in_parts(usize::MAX);
    assert_eq!(events, in_parts(1));
    events.into_iter().filter_map(|event| event.data).collect()
}

// ---- requests

/// A row of a batch file.
pub fn batch_row(data: &[u8]) -> bool {
    let template = TemplateVariables {
        reads: &|name| name == "enable_thinking",
        says: &|_| false,
        ends_reasoning: true,
    };
    let (id, row) = row::parse(data, 1, &row::Defaults::default(), template);
    assert!(!id.is_empty());
    match &row {
        Ok(row) => assert!(row.num_choices >= 1, "{row:?}"),
        Err(error) => {
            assert!(!error.message.is_empty() && error.message.len() < 4000 + data.len(), "{error:?}")
        }
    }
    row.is_ok()
}

/// A file of `run --batch --record`, whose receipt makes a request: one that is taken has a hash that stays the same.
pub fn recorded(data: &[u8]) -> bool {
    use llmctl::cli::replay::folder;
    let answer = match folder::recorded(data, Path::new("/nowhere")) {
        Ok(answer) => answer,
        Err(reason) => {
            assert!(!reason.is_empty() && reason.len() < 4000 + data.len(), "{reason}");
            return false;
        }
    };
    let text = serde_json::to_string(&answer.receipt).expect("JSON");
    let again: llmctl_engine::receipt::Receipt =
        serde_json::from_str(&text).expect("what was written can be read");
    assert_eq!(again.hash(), answer.receipt.hash());
    let refuse = |_: &llmctl_engine::GrammarSource| Err(llmctl_base::Error::PromptEmpty);
    let request = answer.receipt.request(&answer.prompt, Vec::new(), refuse);
    assert!(answer.fault.is_some() || request.is_ok() || answer.receipt.recipe.grammar.is_some());
    answer.fault.is_none()
}

/// A body for an endpoint of the server, which the first byte chooses, with the status of a sound one: the model is no embedder,
/// and its vocabulary has no tokens for text to fill in.
pub const ENDPOINTS: [(&str, u16); 17] = [
    ("/v1/chat/completions", 200),
    ("/v1/completions", 200),
    ("/v1/messages", 200),
    ("/v1/messages/count_tokens", 200),
    ("/v1/responses", 200),
    ("/v1/responses/input_tokens", 200),
    ("/v1/embeddings", 400),
    ("/v1/rerank", 400),
    ("/tokenize", 200),
    ("/detokenize", 200),
    ("/infill", 400),
    ("/completion", 200),
    ("/api/chat", 200),
    ("/api/generate", 200),
    ("/api/show", 200),
    ("/api/embed", 400),
    ("/api/pull", 403),
];

pub fn http_api(data: &[u8]) -> bool {
    static SERVER: OnceLock<Server> = OnceLock::new();
    let Some((which, body)) = data.split_first() else { return false };
    let (path, expected) = ENDPOINTS[usize::from(*which) % ENDPOINTS.len()];
    let (status, answer) = SERVER.get_or_init(Server::start).post(path, body);
    assert!(status < 500, "{path}: {status} {answer}");
    status == expected
}

/// The key of the page of [`sealed`].
pub const SEALED_ID: KeyId = KeyId([7; 32]);
const KEY_FILE_BYTES: usize = 80;

/// A folder of keys that is the same on every run.
pub fn sealed_vault(folder: &Path) -> Vault {
    Vault::open(&folder.join("keys"), Some(b"the secret of fuzzing")).expect("a folder in memory")
}

/// Returns the name of the key in the first line of a transcript.
pub fn sealed_session_id(transcript: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(transcript);
    let id = text.split_once("\"key\":\"")?.1.get(..64)?;
    id.bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| id.to_owned())
}

/// The file of a key, and a file that it may seal: a page (even first byte), or a transcript (odd) whose checksums are made right.
/// The target seals opened content and opens it again; any other input is an error.
pub fn sealed(data: &[u8]) -> bool {
    let Some((kind, rest)) = data.split_first() else { return false };
    let (key, file) = rest.split_at(rest.len().min(KEY_FILE_BYTES));
    let folder = Folder::new();
    let vault = sealed_vault(&folder.0);
    if kind % 2 == 0 {
        folder.write(&format!("keys/page/{SEALED_ID}.key"), key);
        let mut opened = file.to_vec();
        if vault.open_file(KeyKind::Page, &mut opened).is_err() {
            return false;
        }
        let again = vault.seal_file(KeyKind::Page, SEALED_ID, &opened[SEALED_HEADER..], 0).expect("sealed");
        let mut again = again;
        vault.open_file(KeyKind::Page, &mut again).expect("opens");
        assert_eq!(again[SEALED_HEADER..], opened[SEALED_HEADER..]);
        return true;
    }
    let Some(id) = sealed_session_id(file) else { return false };
    folder.write(&format!("keys/session/{id}.key"), key);
    folder.write("sessions/s/transcript.jsonl", file);
    let store = SessionStore::new(folder.0.join("sessions")).with_vault(Some(vault));
    let name = SessionName::new("s").expect("a name");
    let Ok(saved) = store.read(&name) else {
        drop(store.repair(&name));
        drop(store.remove(&name));
        return false;
    };
    let Ok(mut writer) = store.open(&name) else { return false };
    writer.compact().expect("what was opened can be written anew");
    drop(writer);
    assert_eq!(store.read(&name).expect("reads").id, saved.id);
    true
}
