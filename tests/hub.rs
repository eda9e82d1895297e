//! Promise: a model reference means what conventions say, on a Hugging Face cache as other tools lay it out.

use std::fs;

use llmctl_hub::{Aliases, HubPaths, ModelKind, ModelRef, list, resolve};

use crate::common::prelude::*;

const COMMIT_A: &str = "0123456789abcdef0123456789abcdef01234567";
const COMMIT_B: &str = "fedcba9876543210fedcba9876543210fedcba98";

/// A home with a cache and a few folders of models, laid out as huggingface_hub does.
struct Home {
    dir: TempDir,
    aliases: Aliases,
}

impl Home {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("tempdir"), aliases: Aliases::new() }
    }

    fn path(&self, relative: &str) -> PathBuf {
        self.dir.path().join(relative)
    }

    fn write(&self, relative: &str, content: &str) -> PathBuf {
        let path = self.path(relative);
        fs::create_dir_all(path.parent().expect("a parent")).expect("mkdir");
        fs::write(&path, content).expect("write");
        path
    }

    /// A snapshot whose files are links into blobs/.
    fn snapshot(&self, repo: &str, commit: &str, files: &[&str]) -> PathBuf {
        let repo = format!("hub/models--{}", repo.replace('/', "--"));
        let snapshot = self.path(&format!("{repo}/snapshots/{commit}"));
        fs::create_dir_all(&snapshot).expect("mkdir");
        for (n, file) in files.iter().enumerate() {
            let blob = self.write(&format!("{repo}/blobs/{commit}{n}"), &format!("content of {file}"));
            let link = snapshot.join(file);
            fs::create_dir_all(link.parent().expect("a parent")).expect("mkdir");
            link_file(&blob, &link);
        }
        snapshot
    }

    fn set_ref(&self, repo: &str, name: &str, commit: &str) {
        self.write(&format!("hub/models--{}/refs/{name}", repo.replace('/', "--")), commit);
    }

    fn paths(&self) -> HubPaths {
        HubPaths {
            cache: Some(self.path("hub")),
            home: Some(self.dir.path().to_path_buf()),
            ollama: vec![self.path("ollama")],
            memory: None,
        }
    }

    fn resolve(&self, text: &str) -> Result<Resolved, LoadError> {
        resolve(&ModelRef::parse(text)?, &self.paths(), &self.aliases)
    }

    fn found(&self, text: &str) -> (String, ModelSource) {
        let resolved = self.resolve(text).unwrap_or_else(|error| panic!("{text}: {error:?}"));
        (resolved.name, resolved.source)
    }

    fn candidates(&self, text: &str) -> Vec<String> {
        match self.resolve(text) {
            Err(LoadError::UnknownModel { candidates, .. }) => candidates,
            Err(LoadError::AmbiguousModel { candidates, .. }) => {
                candidates.into_iter().map(|candidate| candidate.reference).collect()
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[cfg(unix)]
fn link_file(blob: &Path, link: &Path) {
    std::os::unix::fs::symlink(blob, link).expect("symlink");
}

#[cfg(not(unix))]
fn link_file(blob: &Path, link: &Path) {
    fs::copy(blob, link).expect("copy");
}

fn gguf(path: PathBuf) -> ModelSource {
    ModelSource::Gguf(path)
}

#[test]
fn a_checkpoint_in_the_cache() {
    let home = Home::new();
    let snapshot = home.snapshot("Org/Model-1B", COMMIT_A, &["config.json", "model.safetensors"]);
    home.set_ref("Org/Model-1B", "main", COMMIT_A);
    let expected = ("Org/Model-1B".to_owned(), ModelSource::Folder(snapshot));
    for text in ["Org/Model-1B", "org/model-1b", "hf:Org/Model-1B", "Model-1B", "Org/Model-1B@main"] {
        assert_eq!(home.found(text), expected, "{text}");
    }
}

#[test]
fn revisions_by_branch_tag_commit_and_prefix() {
    let home = Home::new();
    let old = home.snapshot("o/m", COMMIT_A, &["config.json", "model.safetensors"]);
    let new = home.snapshot("o/m", COMMIT_B, &["config.json", "model.safetensors"]);
    home.set_ref("o/m", "main", &format!("{COMMIT_B}\n"));
    home.set_ref("o/m", "v1.0", COMMIT_A);
    home.set_ref("o/m", "refs/pr/7", COMMIT_A);
    for (text, expected) in [
        ("o/m", &new),
        ("o/m@v1.0", &old),
        ("o/m@refs/pr/7", &old),
        ("o/m@0123456", &old),
        ("o/m@FEDC", &new),
        (&format!("hf:o/m@{COMMIT_A}"), &old),
    ] {
        assert_eq!(home.found(text).1, ModelSource::Folder(expected.clone()), "{text}");
    }
    for text in ["o/m@v2", "o/m@012", "o/m@0123456789abcdee"] {
        assert_eq!(home.candidates(text), ["o/m@refs/pr/7", "o/m@main"], "{text}");
    }
}

#[test]
fn without_main_the_only_snapshot_counts() {
    let home = Home::new();
    let snapshot = home.snapshot("o/m", COMMIT_A, &["m.gguf"]);
    assert_eq!(home.found("o/m"), ("o/m:m.gguf".to_owned(), gguf(snapshot.join("m.gguf"))));
    home.snapshot("o/m", COMMIT_B, &["m.gguf"]);
    assert_eq!(home.candidates("o/m"), ["o/m@0123456789ab", "o/m@fedcba987654"]);
    assert!(matches!(home.resolve("o/m"), Err(LoadError::AmbiguousModel { .. })));
}

#[test]
fn quantisations_by_tag_file_and_preference() {
    let home = Home::new();
    let files =
        ["README.md", "config.json", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-UD-Q2_K_XL.gguf", "mmproj-F16.gguf"];
    let dir = home.snapshot("o/m-GGUF", COMMIT_A, &files);
    home.set_ref("o/m-GGUF", "main", COMMIT_A);
    for (text, name, file) in [
        ("o/m-GGUF", "o/m-GGUF:Q4_K_M", "m-Q4_K_M.gguf"),
        ("o/m-GGUF:Q8_0", "o/m-GGUF:Q8_0", "m-Q8_0.gguf"),
        ("o/m-GGUF:q8_0", "o/m-GGUF:Q8_0", "m-Q8_0.gguf"),
        ("o/m-GGUF@main:q2_k_xl", "o/m-GGUF:UD-Q2_K_XL", "m-UD-Q2_K_XL.gguf"),
        ("hf:o/m-GGUF@main:m-Q8_0.gguf", "o/m-GGUF:Q8_0", "m-Q8_0.gguf"),
    ] {
        assert_eq!(home.found(text), (name.to_owned(), gguf(dir.join(file))), "{text}");
        assert_eq!(home.resolve(text).expect("found").mmproj, Some(dir.join("mmproj-F16.gguf")), "{text}");
    }
    let notices = home.resolve("o/m-GGUF").expect("found").notices;
    let [notice] = &notices[..] else { panic!("{notices:?}") };
    assert_eq!(notice.to_string(), "o/m-GGUF is cached as Q4_K_M, Q8_0, UD-Q2_K_XL; using Q4_K_M");
    assert_eq!(home.candidates("o/m-GGUF:Q6_K"), ["o/m-GGUF:Q4_K_M", "o/m-GGUF:Q8_0", "o/m-GGUF:UD-Q2_K_XL"]);
    assert_eq!(home.candidates("hf:o/m-GGUF:other.gguf").len(), 3);
}

#[test]
fn two_models_of_one_quantisation_are_ambiguous() {
    let home = Home::new();
    home.snapshot("o/m", COMMIT_A, &["base-Q8_0.gguf", "chat-Q8_0.gguf"]);
    let expected = ["hf:o/m:base-Q8_0.gguf", "hf:o/m:chat-Q8_0.gguf"];
    assert_eq!(home.candidates("o/m"), expected);
    assert_eq!(home.candidates("o/m:Q8_0"), expected);
    for text in expected {
        assert!(home.resolve(text).is_ok(), "{text}");
    }
}

#[test]
fn a_split_file_in_a_folder_of_its_own() {
    let home = Home::new();
    let parts = ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"];
    let dir = home.snapshot("o/m", COMMIT_A, &[parts[0], parts[1], "m-Q8_0.gguf"]);
    let expected = ("o/m:BF16".to_owned(), gguf(dir.join(parts[0])));
    assert_eq!(home.found("o/m:bf16"), expected);
    assert_eq!(home.found(&format!("hf:o/m:{}", parts[1])), expected);
    fs::remove_file(dir.join(parts[0])).expect("remove");
    match home.resolve("o/m:bf16") {
        Err(LoadError::NotFound(path)) => assert_eq!(path, dir.join(parts[0])),
        other => panic!("{other:?}"),
    }
}

#[test]
fn local_paths() {
    let home = Home::new();
    let file = home.write("models/tiny-Q4_0.gguf", "GGUF....");
    let other = home.write("split/x-00002-of-00002.gguf", "GGUF");
    let first = home.write("split/x-00001-of-00002.gguf", "GGUF");
    let folder = home.path("checkpoint");
    let config = home.write("checkpoint/config.json", "{}");
    let weights = home.write("checkpoint/model.safetensors", "");
    let blob = home.write("blobs/sha256-1234", "GGUF and more");
    let check = |path: &Path, name: &str, source: ModelSource| {
        assert_eq!(
            home.found(path.to_str().expect("utf-8")),
            (name.to_owned(), source),
            "{}",
            path.display()
        );
    };
    check(&file, "tiny-Q4_0", gguf(file.clone()));
    check(&home.path("models"), "models", gguf(file.clone()));
    check(&first, "x", gguf(first.clone()));
    check(&other, "x", gguf(first.clone()));
    check(&home.path("split"), "split", gguf(first.clone()));
    check(&blob, "sha256-1234", gguf(blob.clone()));
    for path in [&folder, &config, &weights] {
        check(path, "checkpoint", ModelSource::Folder(folder.clone()));
    }
    assert_eq!(home.found("~/models/tiny-Q4_0.gguf").1, gguf(home.path("models/tiny-Q4_0.gguf")));
}

#[test]
fn a_folder_with_several_models_is_ambiguous() {
    let home = Home::new();
    let a = home.write("models/a.gguf", "GGUF");
    let b = home.write("models/b.gguf", "GGUF");
    home.write("models/mmproj-b.gguf", "GGUF");
    let candidates = home.candidates(home.path("models").to_str().expect("utf-8"));
    assert_eq!(candidates, [a.display().to_string(), b.display().to_string()]);
}

#[test]
fn what_holds_no_model_says_so() {
    let home = Home::new();
    home.write("empty/readme.txt", "hello");
    home.write("pytorch/config.json", "{}");
    home.write("pytorch/pytorch_model.bin", "x");
    home.snapshot("o/tokenizer-only", COMMIT_A, &["tokenizer.json"]);
    for (text, word) in [
        (home.path("empty").display().to_string(), "neither"),
        (home.path("empty/readme.txt").display().to_string(), "neither"),
        (home.path("pytorch").display().to_string(), ".bin"),
        ("o/tokenizer-only".to_owned(), "neither"),
    ] {
        match home.resolve(&text) {
            Err(LoadError::Unsupported { message, .. }) => {
                assert!(message.contains(word), "{text}: {message}")
            }
            other => panic!("{text}: {other:?}"),
        }
    }
    let missing = home.path("nothing/here.gguf").display().to_string();
    assert!(matches!(home.resolve(&missing), Err(LoadError::NotFound(path)) if path == Path::new(&missing)));
}

#[test]
fn unknown_names_list_what_resembles_them() {
    let mut home = Home::new();
    home.snapshot("HuggingFaceTB/SmolLM2-135M-Instruct", COMMIT_A, &["config.json", "model.safetensors"]);
    home.snapshot("Qwen/Qwen3-0.6B", COMMIT_A, &["config.json", "model.safetensors"]);
    home.aliases.insert("smol".into(), "HuggingFaceTB/SmolLM2-135M-Instruct".into());
    assert_eq!(home.candidates("SmolLM2-135M"), ["HuggingFaceTB/SmolLM2-135M-Instruct", "smol"]);
    assert_eq!(home.candidates("qwen/qwen3-0.5b"), ["Qwen/Qwen3-0.6B"]);
    assert!(home.candidates("zzz/unrelated").is_empty());
    assert!(matches!(home.resolve("zzz/unrelated"), Err(LoadError::UnknownModel { .. })));
}

#[test]
fn a_bare_name_of_two_owners_is_ambiguous() {
    let home = Home::new();
    home.snapshot("a/m", COMMIT_A, &["m.gguf"]);
    home.snapshot("b/M", COMMIT_A, &["m.gguf"]);
    assert_eq!(home.candidates("m"), ["a/m", "b/M"]);
    assert!(matches!(home.resolve("m"), Err(LoadError::AmbiguousModel { .. })));
}

#[test]
fn aliases_lead_to_references_and_not_in_circles() {
    let mut home = Home::new();
    let dir = home.snapshot("o/m", COMMIT_A, &["m-Q8_0.gguf", "m-Q4_0.gguf"]);
    home.aliases.insert("small".into(), "o/m:Q4_0".into());
    home.aliases.insert("default".into(), "small".into());
    home.aliases.insert("a".into(), "b".into());
    home.aliases.insert("b".into(), "a".into());
    home.aliases.insert("bad".into(), "hf:../x".into());
    let resolved = home.resolve("default").expect("found");
    assert_eq!(resolved.source, gguf(dir.join("m-Q4_0.gguf")));
    let notices: Vec<String> = resolved.notices.iter().map(ToString::to_string).collect();
    assert_eq!(notices, ["default is an alias of small", "small is an alias of o/m:Q4_0"]);
    for text in ["a", "bad"] {
        assert!(matches!(home.resolve(text), Err(LoadError::InvalidReference { .. })), "{text}");
    }
}

#[test]
fn hostile_references_and_caches_do_not_lead_out() {
    let home = Home::new();
    let outside = home.write("outside/config.json", "{}");
    home.write("outside/model.safetensors", "");
    home.snapshot("o/m", COMMIT_A, &["tokenizer.json"]);
    home.set_ref("o/m", "main", "../../../outside");
    home.set_ref("o/m", "evil", &outside.display().to_string());
    fs::create_dir_all(home.path("hub/models--..--outside/snapshots")).expect("mkdir");
    assert!(matches!(home.resolve("o/m"), Err(LoadError::Unsupported { .. })));
    assert!(matches!(home.resolve("o/m@evil"), Err(LoadError::UnknownModel { .. })));
    for text in ["hf:../outside", "hf:o/m@../../outside", "hf:o/m:../../../outside/x.gguf"] {
        assert!(matches!(home.resolve(text), Err(LoadError::InvalidReference { .. })), "{text}");
    }
    assert!(matches!(home.resolve("odd name/x"), Err(LoadError::InvalidReference { .. })));
}

#[test]
fn the_list_names_each_model_so_that_it_is_found() {
    let home = Home::new();
    home.snapshot("o/ckpt", COMMIT_A, &["config.json", "model.safetensors"]);
    let config = home.path("hub/models--o--ckpt/snapshots").join(COMMIT_A).join("config.json");
    fs::remove_file(&config).expect("remove the link");
    fs::write(&config, r#"{"text_config": {"torch_dtype": "bfloat16"}}"#).expect("write");
    home.snapshot("o/g", COMMIT_A, &["m-Q8_0.gguf", "x-F16.gguf", "y-F16.gguf", "plain.gguf"]);
    home.snapshot("o/g", COMMIT_B, &["m-Q8_0.gguf"]);
    home.set_ref("o/g", "main", COMMIT_A);
    home.snapshot("o/cut", COMMIT_A, &["c-00001-of-00002.gguf"]);
    home.snapshot("o/tokenizer-only", COMMIT_A, &["tokenizer.json"]);
    let models = list(home.paths().cache.as_deref());
    let references: Vec<&str> = models.iter().map(|m| m.reference.as_str()).collect();
    assert_eq!(
        references,
        [
            "o/ckpt",
            "hf:o/cut:c-00001-of-00002.gguf",
            "o/g:Q8_0",
            "hf:o/g:plain.gguf",
            "hf:o/g:x-F16.gguf",
            "hf:o/g:y-F16.gguf",
            "o/g@fedcba987654:Q8_0",
        ]
    );
    for model in &models {
        match home.resolve(&model.reference) {
            Ok(found) => assert_eq!(found.source.path(), model.path, "{}", model.reference),
            Err(error) => assert!(model.missing.is_some(), "{}: {error:?}", model.reference),
        }
    }
    assert_eq!((models[0].kind, models[0].quantization.as_deref()), (ModelKind::Safetensors, Some("bf16")));
    assert_eq!(models[2].bytes, "content of m-Q8_0.gguf".len() as u64);
}

#[test]
fn an_absent_cache_is_an_empty_one() {
    let home = Home::new();
    assert!(list(None).is_empty() && list(Some(&home.path("nowhere"))).is_empty());
    assert!(home.candidates("o/m").is_empty());
    let nowhere = HubPaths::default();
    let reference = ModelRef::parse("o/m").expect("valid");
    assert!(matches!(resolve(&reference, &nowhere, &Aliases::new()), Err(LoadError::UnknownModel { .. })));
}

#[test]
fn a_reference_finds_the_same_files_from_anywhere() {
    let mut home = Home::new();
    home.snapshot("o/m", COMMIT_A, &["m-Q4_0.gguf", "sub/m-Q8_0.gguf"]);
    home.set_ref("o/m", "main", COMMIT_A);
    home.snapshot("o/check", COMMIT_B, &["config.json", "model.safetensors"]);
    home.set_ref("o/check", "main", COMMIT_B);
    home.aliases.insert("short".to_owned(), "o/m:Q8_0".to_owned());
    let file = home.write("here/own.gguf", "GGUF").display().to_string();
    for (text, expected) in [
        ("o/m:Q4_0", format!("hf:o/m@{COMMIT_A}:m-Q4_0.gguf")),
        ("short", format!("hf:o/m@{COMMIT_A}:sub/m-Q8_0.gguf")),
        ("o/check", format!("hf:o/check@{COMMIT_B}:safetensors")),
        (&file, file.clone()),
        ("guide", "guide".to_owned()),
    ] {
        let found = home.resolve(text).unwrap_or_else(|error| panic!("{text}: {error:?}"));
        let reference = found.reference().expect("a text");
        assert_eq!(reference, expected, "{text}");
        assert_eq!(home.resolve(&reference).expect("found again").source, found.source, "{text}");
    }
    let relative = Resolved::new("own".to_owned(), ModelSource::Gguf(PathBuf::from("own.gguf")));
    let reference = relative.reference().expect("a text");
    assert!(Path::new(&reference).is_absolute() && reference.ends_with("own.gguf"), "{reference}");
}

impl Home {
    /// Writes a model of ollama's store: a blob per layer and the manifest that names them. Returns the blobs.
    fn ollama(&self, name: &str, layers: &[(&str, &str)]) -> Vec<PathBuf> {
        let mut described = Vec::new();
        let mut blobs = Vec::new();
        for (n, (kind, content)) in layers.iter().enumerate() {
            let hex = format!("{:064x}", name.len() * 100 + n);
            blobs.push(self.write(&format!("ollama/blobs/sha256-{hex}"), content));
            let (media_type, size) = (format!("application/vnd.ollama.image.{kind}"), content.len());
            described.push(
                serde_json::json!({"mediaType": media_type, "digest": format!("sha256:{hex}"), "size": size}),
            );
        }
        let config = format!("{:064x}", name.len() * 100 + 99);
        self.write(
            &format!("ollama/blobs/sha256-{config}"),
            r#"{"model_format": "gguf", "file_type": "Q4_K_M"}"#,
        );
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": format!("sha256:{config}")},
            "layers": described,
        });
        self.write(&format!("ollama/manifests/{name}"), &manifest.to_string());
        blobs
    }
}

#[test]
fn a_model_of_ollama_is_opened_by_its_name() {
    let home = Home::new();
    let layers = [("model", "GGUF..."), ("template", "{{ .Prompt }}"), ("license", "MIT"), ("params", "{}")];
    let blobs = home.ollama("registry.ollama.ai/library/llama3.2/1b", &layers);
    home.ollama("registry.ollama.ai/library/llama3.2/latest", &[("model", "GGUF")]);
    let other = home.ollama("hf.co/org/repo/Q8_0", &[("model", "GGUF"), ("projector", "GGUF")]);
    let found = home.resolve("ollama:llama3.2:1b").expect("found");
    assert_eq!((found.name.as_str(), found.source), ("ollama:llama3.2:1b", gguf(blobs[0].clone())));
    let notices: Vec<String> = found.notices.iter().map(ToString::to_string).collect();
    assert_eq!(notices, ["of ollama:llama3.2:1b only the weights are used, not ollama's template, params"]);
    assert!(home.resolve("ollama:llama3.2").expect("found").notices.is_empty());
    let seeing = home.resolve("ollama:hf.co/org/repo:Q8_0").expect("found");
    assert_eq!((seeing.source, seeing.mmproj), (gguf(other[0].clone()), Some(other[1].clone())));
    assert!(seeing.notices.is_empty(), "{:?}", seeing.notices);
    assert_eq!(home.candidates("ollama:llama3.2:3b"), ["ollama:llama3.2:1b", "ollama:llama3.2:latest"]);
    fs::remove_file(&blobs[0]).expect("remove");
    assert!(matches!(home.resolve("ollama:llama3.2:1b"), Err(LoadError::NotFound(path)) if path == blobs[0]));
}

#[test]
fn models_of_ollama_that_are_not_one_gguf_file_are_refused() {
    let home = Home::new();
    home.ollama("registry.ollama.ai/library/mlx/a", &[("tensor", "1"), ("tensor", "2"), ("json", "{}")]);
    home.ollama("registry.ollama.ai/library/split/a", &[("model", "GGUF"), ("model", "GGUF")]);
    home.ollama("registry.ollama.ai/library/lora/a", &[("model", "GGUF"), ("adapter", "GGUF")]);
    home.ollama("registry.ollama.ai/library/cloud/a", &[]);
    home.write("ollama/manifests/registry.ollama.ai/library/broken/a", "{");
    home.write(
        "ollama/manifests/registry.ollama.ai/library/evil/a",
        r#"{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../etc/passwd"}]}"#,
    );
    for (name, word) in [
        ("mlx", "MLX"),
        ("split", "several GGUF layers"),
        ("lora", "adapter"),
        ("cloud", "no weights"),
        ("broken", "manifest"),
        ("evil", "no digest"),
    ] {
        let message = home.resolve(&format!("ollama:{name}:a")).expect_err(name).to_string();
        assert!(message.contains(word) && message.contains(name), "{name}: {message}");
    }
    let listed = llmctl_hub::ollama::list(&[home.path("ollama"), home.path("nowhere")]);
    assert_eq!(listed.len(), 6);
    assert!(listed.iter().all(|model| model.file.is_err()), "{listed:?}");
    assert_eq!(listed[5].quantization.as_deref(), Some("Q4_K_M"));
}
