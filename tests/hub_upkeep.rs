//! Promise: `llmctl models` erases only what was asked for and nothing that something else needs, and finds damage in a
//! cache that other tools share.

#![cfg(unix)]

use std::fs;
use std::process::Output;
use std::time::SystemTime;

use llmctl_engine::session::store::StoredTurn;
use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::common::prelude::*;
use crate::common::terminal;

const OLD: &str = "0123456789abcdef0123456789abcdef01234567";
const NEW: &str = "fedcba9876543210fedcba9876543210fedcba98";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A home with a cache as huggingface_hub writes it.
struct Home {
    dir: TempDir,
}

impl Home {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("tempdir") }
    }

    fn path(&self, relative: &str) -> PathBuf {
        self.dir.path().join(relative)
    }

    fn repo(&self, repo: &str) -> PathBuf {
        self.path(".cache/huggingface/hub").join(format!("models--{}", repo.replace('/', "--")))
    }

    fn write(&self, path: &Path, content: &str) {
        fs::create_dir_all(path.parent().expect("a parent")).expect("mkdir");
        fs::write(path, content).expect("write");
    }

    /// Adds a snapshot: weights are blobs named by sha256, other files by git's id. Returns the blobs.
    fn snapshot(&self, repo: &str, commit: &str, files: &[(&str, &str)]) -> Vec<PathBuf> {
        let folder = self.repo(repo);
        let add = |(name, content): &(&str, &str)| {
            let is_large = name.ends_with(".gguf") || name.ends_with(".safetensors");
            let hash = match is_large {
                true => hex(&Sha256::digest(content)),
                false => hex(&Sha1::digest(format!("blob {}\0{content}", content.len()))),
            };
            self.write(&folder.join("blobs").join(&hash), content);
            let link = folder.join("snapshots").join(commit).join(name);
            fs::create_dir_all(link.parent().expect("a parent")).expect("mkdir");
            let up = "../".repeat(2 + name.matches('/').count());
            std::os::unix::fs::symlink(format!("{up}blobs/{hash}"), &link).expect("symlink");
            folder.join("blobs").join(hash)
        };
        files.iter().map(add).collect()
    }

    fn set_ref(&self, repo: &str, name: &str, commit: &str) {
        self.write(&self.repo(repo).join("refs").join(name), commit);
    }

    /// Adds a session that continues with the model of a reference.
    fn session(&self, name: &str, reference: &str) {
        let store = SessionStore::new(self.path(".local/share/llmctl/sessions"));
        let reference = Some(reference.to_owned());
        let model = ModelFingerprint { name: "m".to_owned(), fingerprint: "f".to_owned(), reference };
        let mut writer = store.create(&SessionName::new(name).expect("a name"), &model).expect("created");
        let turn = StoredTurn {
            messages: vec![Message::user("?"), Message::assistant("!")],
            kept_tokens: 0,
            prompt_tail: vec![1],
            generated: vec![],
            adapters: Vec::new(),
            spans: Vec::new(),
            splice_after: None,
            sampling: Sampling::default(),
            finish: Finish::Eos(2),
            usage: Usage { prompt_tokens: 1, cached_tokens: 0, completion_tokens: 0, ..Usage::default() },
            started_ms: 1,
            finished_ms: 2,
            receipt: None,
        };
        writer.append(&model, &turn).expect("saved");
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_llmctl"));
        command.arg("models").args(words).env_clear().env("HOME", self.dir.path());
        command.current_dir(self.dir.path());
        command
    }

    fn models(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("llmctl starts")
    }

    /// Runs a command that exits with `code`; returns stdout and stderr with `~` for the home.
    #[track_caller]
    fn check(&self, words: &[&str], code: i32) -> (String, String) {
        let output = self.models(words);
        let text = |bytes: &[u8]| {
            String::from_utf8_lossy(bytes).replace(&self.dir.path().display().to_string(), "~")
        };
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "{words:?}\n{stdout}\n{stderr}");
        (stdout, stderr)
    }

    #[track_caller]
    fn json(&self, words: &[&str], code: i32) -> Value {
        let (stdout, _) = self.check(&[words, &["--output", "json"]].concat(), code);
        serde_json::from_str(&stdout).expect("JSON on stdout")
    }
}

/// Gives a file a time at which no download that is running has written it.
fn make_old(path: &Path) {
    let time = SystemTime::now() - Duration::from_secs(3600);
    File::options().write(true).open(path).and_then(|file| file.set_modified(time)).expect("older");
}

#[test]
fn rm_erases_one_model_and_leaves_its_neighbours() {
    let home = Home::new();
    let blobs = home.snapshot(
        "o/m",
        NEW,
        &[("m-Q4_0.gguf", "four"), ("sub/m-Q8_0.gguf", "eight"), ("README.md", "read")],
    );
    home.set_ref("o/m", "main", NEW);
    let (stdout, _) = home.check(&["rm", "o/m:Q8_0", "--yes"], 0);
    assert_eq!(stdout, "o/m:Q8_0 is erased, 5 B freed\n");
    assert_eq!(blobs.iter().map(|blob| blob.exists()).collect::<Vec<_>>(), [true, false, true]);
    let snapshot = home.repo("o/m").join("snapshots").join(NEW);
    assert!(!snapshot.join("sub").exists(), "no empty folder is left");
    assert!(snapshot.join("m-Q4_0.gguf").is_file() && snapshot.join("README.md").is_file());
    assert!(home.repo("o/m").join("refs/main").is_file());
    home.check(&["rm", "o/m:Q4_0", "--yes"], 0);
    assert!(!home.repo("o/m").exists(), "the rest goes with the last model");
    home.check(&["rm", "o/m", "--yes"], 66);
}

#[test]
fn rm_keeps_what_another_revision_links_to() {
    let home = Home::new();
    let old = home.snapshot("o/m", OLD, &[("m-Q4_0.gguf", "four"), ("README.md", "old")]);
    let new = home.snapshot("o/m", NEW, &[("m-Q4_0.gguf", "four"), ("README.md", "new")]);
    home.set_ref("o/m", "main", NEW);
    home.set_ref("o/m", "v1", OLD);
    assert_eq!(old[0], new[0]);
    let (stdout, _) = home.check(&["rm", "o/m@v1", "--yes"], 0);
    assert_eq!(stdout, "o/m@v1 is erased, 3 B freed; kept for revision fedcba987654\n");
    assert!(new.iter().all(|blob| blob.exists()) && !old[1].exists());
    let left: Vec<_> =
        fs::read_dir(home.repo("o/m").join("snapshots")).expect("readable").flatten().collect();
    assert_eq!(left.len(), 1);
    assert!(!home.repo("o/m").join("refs/v1").exists() && home.repo("o/m").join("refs/main").exists());
    assert_eq!(
        home.json(&["rm", "o/m", "-y"], 0),
        json!({"schema": "llmctl.models.v1", "removed": ["o/m"], "bytes": 7, "sessions": []})
    );
    assert!(!home.repo("o/m").exists());
}

#[test]
fn nothing_is_erased_without_consent() {
    let home = Home::new();
    let blobs = home.snapshot("o/m", NEW, &[("m-Q4_0.gguf", "four")]);
    home.write(&home.repo("o/m").join("blobs/orphan"), "orphan");
    make_old(&home.repo("o/m").join("blobs/orphan"));
    let (_, stderr) = home.check(&["rm", "o/m"], 2);
    assert!(stderr.contains("o/m (10 B, 2 files, all revisions)") && stderr.contains("--yes"), "{stderr}");
    let (_, stderr) = home.check(&["prune"], 2);
    assert!(stderr.contains("blobs/orphan") && stderr.contains("--yes"), "{stderr}");
    assert!(blobs[0].exists() && home.repo("o/m").join("blobs/orphan").exists());
}

#[test]
fn a_terminal_is_asked_before_anything_is_erased() {
    use expectrl::Expect;
    let home = Home::new();
    let files = home.snapshot("o/m", NEW, &[("m-Q8_0.gguf", "12345")]);
    home.write(&home.repo("o/m").join("blobs/orphan"), "123");
    make_old(&home.repo("o/m").join("blobs/orphan"));
    let ask = |words: &[&str], question: &str, typed: &str, expected: &str| {
        let mut session = terminal::spawn(home.command(words), 200).expect("a terminal");
        session.set_expect_timeout(Some(Duration::from_secs(60)));
        session.expect(question).expect("the question");
        session.send(typed).expect("typed");
        session.expect(expected).expect(expected);
    };
    for kept in ["\r", "n\r", "nay\r", "\x04"] {
        ask(&["rm", "o/m"], "erase 8 B? y(es), n(o): ", kept, "nothing is erased");
        ask(&["prune"], "erase 3 B? y(es), n(o): ", kept, "nothing is erased");
    }
    assert!(files[0].exists());
    ask(&["prune"], "erase 3 B? y(es), n(o): ", "yes\r", "1 item erased");
    assert!(files[0].exists() && !home.repo("o/m").join("blobs/orphan").exists());
    ask(&["rm", "o/m"], "erase 5 B? y(es), n(o): ", "y\r", "o/m is erased");
    assert!(!files[0].exists());
}

#[test]
fn other_references_are_refused_with_advice() {
    let home = Home::new();
    home.snapshot("o/m", NEW, &[("m-Q4_0.gguf", "four")]);
    for (reference, code, word) in [
        ("./m.gguf", 2, "path"),
        ("ollama:llama3.2", 2, "ollama rm"),
        ("guide", 2, "part of llmctl"),
        ("o/x", 66, "llmctl models"),
        ("o/m@v2", 66, "no such revision"),
        ("o/m:Q8_0", 66, "o/m"),
    ] {
        let (_, stderr) = home.check(&["rm", reference, "--yes"], code);
        assert!(stderr.contains(word), "{reference}: {stderr}");
    }
}

#[test]
fn a_model_in_use_is_not_erased() {
    let home = Home::new();
    let blobs = home.snapshot("o/m", NEW, &[("m-Q4_0.gguf", "four")]);
    let hash = blobs[0].file_name().expect("a name").to_str().expect("UTF-8").to_owned();
    let lock = home.path(".cache/huggingface/hub/.locks/models--o--m").join(format!("{hash}.lock"));
    home.write(&lock, "");
    let held = File::options().write(true).open(&lock).expect("opened");
    held.lock().expect("locked");
    let (_, stderr) = home.check(&["rm", "o/m", "--yes"], 75);
    assert!(stderr.contains("a download of it is running"), "{stderr}");
    // Not by closing it: a process that another test is starting may have the file open as well.
    held.unlock().expect("unlocked");
    if cfg!(target_os = "linux") {
        let map = SharedBytes::map_file(&blobs[0]).expect("mapped");
        let (_, stderr) = home.check(&["rm", "o/m", "--yes"], 75);
        assert!(stderr.contains(&format!("({})", std::process::id())), "{stderr}");
        drop(map);
    }
    assert!(blobs[0].exists());
    home.check(&["rm", "o/m", "--yes"], 0);
}

#[test]
fn sessions_that_need_a_model_are_named() {
    let home = Home::new();
    home.snapshot("o/m", NEW, &[("m-Q4_0.gguf", "four"), ("m-Q8_0.gguf", "eight")]);
    home.set_ref("o/m", "main", NEW);
    home.session("trip", &format!("hf:o/m@{NEW}:m-Q4_0.gguf"));
    home.session("other", "guide");
    assert_eq!(home.json(&["rm", "o/m:Q8_0", "-y"], 0)["sessions"], json!([]));
    let (stdout, _) = home.check(&["rm", "o/m:Q4_0", "-y"], 0);
    assert!(stdout.ends_with("sessions that continue with it: trip\n"), "{stdout}");
}

#[test]
fn verify_finds_damaged_and_missing_files() {
    let home = Home::new();
    let blobs = home.snapshot("o/m", NEW, &[("m-Q4_0.gguf", "four"), ("README.md", "read")]);
    let other = home.snapshot("o/x", NEW, &[("x-00001-of-00002.gguf", "one"), ("config.json", "{}")]);
    home.write(&home.repo("o/x").join("blobs/ab.12345678.incomplete"), "part");
    let (stdout, _) = home.check(&["verify", "o/m"], 0);
    assert_eq!(stdout, "hashes compared: 2 files (8 B) undamaged, 0 damaged, 0 missing\n");
    fs::write(&blobs[0], "fouR").expect("damaged");
    fs::remove_file(&other[1]).expect("removed");
    let (stdout, stderr) = home.check(&["verify"], 65);
    let lines: Vec<&str> = stdout.lines().collect();
    let hash = hex(&Sha256::digest("fouR"));
    assert!(
        lines[0].starts_with("damaged: ~/") && lines[0].ends_with(&format!(" of o/m: its hash is {hash}")),
        "{stdout}"
    );
    assert!(lines[1].contains("missing: ~/") && lines[1].ends_with("config.json"), "{stdout}");
    assert!(lines[2].ends_with("x-00002-of-00002.gguf") && lines[3].starts_with("not checked: "), "{stdout}");
    assert_eq!(lines[4], "hashes compared: 2 files (7 B) undamaged, 1 damaged, 2 missing");
    assert!(stderr.contains("llmctl models rm o/m"), "{stderr}");
    let report = home.json(&["verify"], 65);
    assert_eq!((&report["good"], &report["damaged"][0]["hash"]), (&json!(2), &json!(hash)));
    assert_eq!(report["missing"].as_array().map(Vec::len), Some(2));
}

#[test]
fn prune_erases_what_no_revision_has() {
    let home = Home::new();
    let old = home.snapshot("o/m", OLD, &[("m-Q4_0.gguf", "old weights"), ("README.md", "same")]);
    let new = home.snapshot("o/m", NEW, &[("m-Q4_0.gguf", "new weights"), ("README.md", "same")]);
    home.set_ref("o/m", "main", NEW);
    let blobs = home.repo("o/m").join("blobs");
    let (orphan, partial) = (blobs.join("a".repeat(64)), blobs.join("b.llmctl.incomplete"));
    for path in [&orphan, &partial] {
        home.write(path, "1234");
    }
    // Only an unpinned repository has replaced revisions.
    home.snapshot("o/pinned", OLD, &[("m-Q4_0.gguf", "pinned")]);
    // A download that runs has files that are complete, for however long, and links them at its end.
    let done = home.repo("o/pinned").join("blobs").join("d".repeat(64));
    let fresh = home.repo("o/pinned").join("blobs/c.00000000.incomplete");
    for path in [&done, &fresh] {
        home.write(path, "1234");
    }
    for path in [&orphan, &partial, &done] {
        make_old(path);
    }

    let (stdout, _) = home.check(&["prune", "--dry-run"], 0);
    let lines: Vec<&str> = stdout.lines().collect();
    assert_eq!(lines.len(), 4, "{stdout}");
    assert!(lines[0].contains("aaaa") && lines[0].ends_with("4 B   no revision has it"), "{stdout}");
    assert!(lines[1].contains("b.llmctl.incomplete") && lines[1].ends_with("download given up"), "{stdout}");
    assert!(lines[2].contains(OLD) && lines[2].ends_with("11 B  replaced revision"), "{stdout}");
    assert_eq!(lines[3], "19 B could be freed; nothing is erased");
    assert!(orphan.exists() && partial.exists());

    home.session("trip", &format!("hf:o/m@{OLD}:m-Q4_0.gguf"));
    let report = home.json(&["prune", "--yes"], 0);
    assert_eq!((&report["erased"], &report["bytes"]), (&json!(2), &json!(8)));
    assert_eq!(report["garbage"][2]["kept_because"], "kept for trip");
    assert!(!orphan.exists() && !partial.exists() && fresh.exists() && done.exists() && old[0].exists());

    // Its model is not known any more.
    let transcript = home.path(".local/share/llmctl/sessions/trip/transcript.jsonl");
    fs::write(transcript, "damaged\n").expect("written");
    let (stdout, _) = home.check(&["prune", "-y"], 0);
    assert!(stdout.contains("kept for trip (cannot be read") && old[0].exists(), "{stdout}");

    fs::remove_dir_all(home.path(".local")).expect("no session");
    let (stdout, _) = home.check(&["prune", "-y"], 0);
    assert!(stdout.ends_with("1 item erased, 11 B freed\n"), "{stdout}");
    assert!(!old[0].exists() && new.iter().all(|blob| blob.exists()));
    assert!(home.check(&["prune", "-y"], 0).0.ends_with("nothing to erase\n"));
    [done, fresh].iter().for_each(|path| fs::remove_file(path).expect("there"));
    home.check(&["verify"], 0);
}

#[test]
fn nothing_behind_a_link_is_erased() {
    for linked in ["blobs", &format!("snapshots/{OLD}"), "snapshots", ""] {
        let home = Home::new();
        home.snapshot("o/m", OLD, &[("m-Q4_0.gguf", "old weights")]);
        home.snapshot("o/m", NEW, &[("m-Q4_0.gguf", "new weights")]);
        home.set_ref("o/m", "main", NEW);
        let other = home.path("other");
        let folder = match linked {
            "" => home.repo("o/m"),
            linked => home.repo("o/m").join(linked),
        };
        // The files of the cache, and others that nothing refers to.
        fs::rename(&folder, &other).expect("moved");
        let strangers =
            [other.join("a".repeat(64)), other.join("blobs/x"), other.join(OLD).join("deep/file")];
        strangers.iter().for_each(|path| {
            home.write(path, "precious");
            make_old(path);
        });
        let count = || strangers.iter().filter(|path| path.exists()).count();
        std::os::unix::fs::symlink(&other, &folder).expect("a link");
        for words in
            [&["prune", "--yes"][..], &["rm", &format!("o/m@{OLD}"), "--yes"], &["rm", "o/m", "--yes"]]
        {
            let ran = home.models(words);
            assert_eq!(count(), strangers.len(), "{linked:?} {words:?}: {ran:?}");
        }
    }
}

#[test]
fn the_list_has_sizes_contexts_last_use_and_ollamas_models() {
    let home = Home::new();
    let gguf = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/parity-gguf/llama-q4_0.gguf");
    let folder = home.repo("o/m").join("snapshots").join(NEW);
    fs::create_dir_all(&folder).expect("mkdir");
    fs::copy(gguf, folder.join("m-Q4_0.gguf")).expect("copied");
    home.snapshot("o/m", NEW, &[("cut-Q8_0-00001-of-00002.gguf", "GGUF")]);
    let digest = "a".repeat(64);
    let store = home.path(".ollama/models");
    fs::create_dir_all(store.join("blobs")).expect("mkdir");
    fs::copy(gguf, store.join(format!("blobs/sha256-{digest}"))).expect("copied");
    let layer = json!({"mediaType": "application/vnd.ollama.image.model", "digest": format!("sha256:{digest}"), "size": 7});
    let manifest = json!({"schemaVersion": 2, "layers": [layer]}).to_string();
    home.write(&store.join("manifests/registry.ollama.ai/library/tiny/latest"), &manifest);

    let list = home.json(&[], 0);
    let [cut, whole] = list["models"].as_array().map(Vec::as_slice).expect("models") else {
        panic!("{list}")
    };
    assert_eq!((&cut["complete"], &cut["context_length"]), (&json!(false), &Value::Null));
    assert_eq!((&whole["model"], &whole["type"]), (&json!("o/m:Q4_0"), &json!("Q4_0")));
    let context = home.json(&["show", "o/m:Q4_0"], 0)["context_length"].clone();
    assert!(context.as_u64().is_some_and(|tokens| tokens > 0));
    assert_eq!((&whole["complete"], &whole["context_length"]), (&json!(true), &context));
    assert_eq!(
        (&list["ollama"][0]["model"], &list["ollama"][0]["context_length"]),
        (&json!("ollama:tiny:latest"), &context)
    );
    assert_eq!(list["built_in"][0]["last_used_ms"], Value::Null);

    let run = Command::new(env!("CARGO_BIN_EXE_llmctl"))
        .args(["run", "-q", "-m", "guide", "--max-tokens", "1", "hello"])
        .env_clear()
        .env("HOME", home.dir.path())
        .output()
        .expect("llmctl starts");
    assert!(run.status.success(), "{run:?}");
    assert!(home.json(&[], 0)["built_in"][0]["last_used_ms"].as_u64().is_some());
    let (table, _) = home.check(&[], 0);
    let line = |word: &str| {
        table.lines().find(|line| line.starts_with(word)).unwrap_or_else(|| panic!("{table}")).to_owned()
    };
    assert!(line("guide").contains("just now") && line("o/m:Q4_0").contains("never"), "{table}");
    assert!(line("o/m:Q8_0").contains("incomplete"), "{table}");
    assert!(line("ollama:tiny:latest").contains("/.ollama/models/blobs/sha256-"), "{table}");
}
