//! Promise: a model named by its repository is downloaded, checked and linked as other tools expect, once.

use std::fs;

use crate::common::fake_hub::{Access, FakeHub, Faults, TOKEN, sha256};
use crate::common::prelude::*;
#[cfg(unix)]
use crate::common::terminal;

/// A user with an empty cache and a hub.
pub struct Downloader {
    pub place: Place,
    pub hub: FakeHub,
}

impl Downloader {
    pub fn new() -> Self {
        Self { place: Place::new(), hub: FakeHub::start() }
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = self.place.command(args);
        command
            .env_remove("HF_HUB_OFFLINE")
            .env("HF_ENDPOINT", &self.hub.url)
            .env("HF_HUB_CACHE", self.cache());
        command
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        finish(self.command(args), "")
    }

    pub fn cache(&self) -> PathBuf {
        self.place.path("hub")
    }

    /// A file of the folder of a repository.
    pub fn in_repo(&self, repo: &str, path: &str) -> PathBuf {
        self.cache().join(format!("models--{}", repo.replace('/', "--"))).join(path)
    }

    /// Files and links below the cache's folder of a repository, sorted, without locks.
    pub fn tree(&self, repo: &str) -> Vec<String> {
        let root = self.in_repo(repo, "");
        let mut found = Vec::new();
        let mut folders = vec![root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                match entry.file_type().expect("a type").is_dir() {
                    true => folders.push(entry.path()),
                    false => {
                        let path = entry.path();
                        found.push(path.strip_prefix(&root).expect("below").to_string_lossy().into_owned());
                    }
                }
            }
        }
        found.sort();
        found
    }
}

/// Bytes without a period that a part or a piece could hide.
pub fn content(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2) + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// The tiny Llama of the parity tests, as the files of a repository.
pub fn tiny_checkpoint() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/llama");
    let names = fs::read_dir(&folder).expect("tests/parity/llama").flatten();
    names
        .map(|entry| {
            (entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path()).expect("a file"))
        })
        .collect()
}

pub fn borrowed(files: &[(String, Vec<u8>)]) -> Vec<(&str, &[u8])> {
    files.iter().map(|(path, bytes)| (path.as_str(), bytes.as_slice())).collect()
}

#[test]
fn pull_writes_the_layout_of_huggingface_hub() {
    let user = Downloader::new();
    let (weights, other) = (content(300_000, 1), content(1000, 2));
    let files: [(&str, &[u8]); 3] =
        [("m-Q4_K_M.gguf", &weights), ("sub/m-Q8_0.gguf", &other), ("README.md", b"# m")];
    let commit = user.hub.publish("org/m", Access::Open, &files);
    let ran = user.run(&["pull", "org/m"]);
    ran.check(0, "org/m has Q4_K_M, Q8_0; using Q4_K_M");
    let link = user.in_repo("org/m", &format!("snapshots/{commit}/m-Q4_K_M.gguf"));
    assert_eq!(ran.stdout.trim(), link.to_string_lossy());
    let hash = sha256(&weights);
    let expected = [
        format!("blobs/{hash}"),
        "refs/main".to_owned(),
        format!("snapshots/{commit}/m-Q4_K_M.gguf"),
        format!("trees/{commit}.json"),
    ];
    assert_eq!(user.tree("org/m"), expected);
    assert_eq!(fs::read_to_string(user.in_repo("org/m", "refs/main")).expect("a ref"), commit);
    assert_eq!(fs::read(&link).expect("a link to the blob"), weights);
    #[cfg(unix)]
    assert_eq!(fs::read_link(&link).expect("a link"), Path::new(&format!("../../blobs/{hash}")));
    assert!(
        fs::read_to_string(user.cache().join("CACHEDIR.TAG"))
            .expect("a tag")
            .starts_with("Signature: 8a477f59")
    );
    assert!(user.cache().join(format!(".locks/models--org--m/{hash}.lock")).is_file());

    user.run(&["pull", "org/m:Q8_0"]).check(0, "");
    let nested = user.in_repo("org/m", &format!("snapshots/{commit}/sub/m-Q8_0.gguf"));
    #[cfg(unix)]
    assert_eq!(
        fs::read_link(&nested).expect("a link"),
        Path::new(&format!("../../../blobs/{}", sha256(&other)))
    );
    assert_eq!(fs::read(nested).expect("a link to the blob"), other);

    user.hub.forget();
    user.run(&["pull", "org/m"]).check(0, "is here already");
    assert!(user.hub.transfers().is_empty(), "{:?}", user.hub.seen());
}

#[test]
fn a_gguf_comes_with_its_mmproj_file_unless_it_is_declined() {
    let (weights, tower) = (content(5000, 1), content(2000, 2));
    let files: [(&str, &[u8]); 4] = [
        ("m-Q4_K_M.gguf", &weights),
        ("mmproj-F16.gguf", &tower),
        ("mmproj-F32.gguf", b"GGUF"),
        ("mmproj-Q8_0.gguf", b"GGUF"),
    ];
    for (flags, is_there) in [(&["pull", "org/m"][..], true), (&["pull", "--no-mmproj", "org/m"], false)] {
        let user = Downloader::new();
        let commit = user.hub.publish("org/m", Access::Open, &files);
        let ran = user.run(flags);
        assert!(ran.check(0, "").stdout.trim().ends_with("m-Q4_K_M.gguf"), "{ran:?}");
        let snapshot = |name: &str| user.in_repo("org/m", &format!("snapshots/{commit}/{name}"));
        assert_eq!(fs::read(snapshot("mmproj-F16.gguf")).ok(), is_there.then(|| tower.clone()), "{flags:?}");
        assert!(!snapshot("mmproj-F32.gguf").exists() && !snapshot("mmproj-Q8_0.gguf").exists());
        user.run(&["models", "rm", "--yes", "org/m:Q4_K_M"]).check(0, "");
        assert_eq!(user.tree("org/m"), [""; 0], "the tower goes with its model");
    }
}

#[test]
fn a_checkpoint_comes_with_what_it_needs_and_runs() {
    let user = Downloader::new();
    let mut files = tiny_checkpoint();
    let weights = files.iter().position(|(name, _)| name == "model.safetensors").expect("weights");
    let weights = files.remove(weights).1;
    let index = br#"{"weight_map": {"a": "model.safetensors", "b": "shards/part.safetensors"}}"#.to_vec();
    files.push(("unused.safetensors".to_owned(), content(1000, 1)));
    files.push(("pytorch_model.bin".to_owned(), content(1000, 2)));
    let mut whole = files.clone();
    whole.push(("model.safetensors".to_owned(), weights.clone()));
    user.hub.publish("org/tiny", Access::Open, &borrowed(&whole));

    let texts = user.run(&["pull", "--texts", "org/tiny"]);
    texts.check(0, "");
    assert!(!Path::new(texts.stdout.trim()).join("model.safetensors").exists());
    assert!(user.hub.transfers().is_empty(), "texts need no weights");
    user.run(&["pull", "org/tiny"]).check(0, "");
    assert_eq!(user.hub.transfers().len(), 1, "{:?}", user.hub.transfers());
    let names = user.tree("org/tiny");
    assert!(!names.iter().any(|name| name.contains("unused") || name.contains("pytorch")), "{names:?}");
    assert!(names.iter().any(|name| name.starts_with(".no_exist/")), "{names:?}");
    let offline = ["run", "--offline", "--model", "org/tiny", "--raw", "Once", "--max-tokens", "2"];
    user.run(&offline).check(0, "");

    files.push(("model.safetensors.index.json".to_owned(), index));
    files.push(("model-x.safetensors".to_owned(), content(9, 3)));
    user.hub.publish("org/sharded", Access::Open, &borrowed(&files));
    user.run(&["pull", "org/sharded"]).check(65, "which its model.safetensors.index.json names");
    files.push(("shards/part.safetensors".to_owned(), content(50_000, 4)));
    files.push(("model.safetensors".to_owned(), weights));
    // Without the single file, the index decides.
    files
        .iter_mut()
        .filter(|(name, _)| name == "model.safetensors")
        .for_each(|(name, _)| *name = "a.safetensors".to_owned());
    for (name, bytes) in &mut files {
        if name == "model.safetensors.index.json" {
            *bytes = br#"{"weight_map": {"a": "a.safetensors", "b": "shards/part.safetensors"}}"#.to_vec();
        }
    }
    user.hub.publish("org/sharded", Access::Open, &borrowed(&files));
    user.hub.forget();
    user.run(&["pull", "org/sharded"]).check(0, "");
    let got: Vec<_> = user.hub.transfers().iter().map(|seen| seen.target.clone()).collect();
    assert_eq!(got.len(), 2, "{got:?}");
}

#[test]
fn revisions_files_and_split_models() {
    let user = Downloader::new();
    let parts = [content(40_000, 1), content(30_000, 2)];
    let files: [(&str, &[u8]); 3] = [
        ("BF16/m-BF16-00001-of-00002.gguf", &parts[0]),
        ("BF16/m-BF16-00002-of-00002.gguf", &parts[1]),
        ("m-Q8_0.gguf", b"GGUF"),
    ];
    let commit = user.hub.publish("org/m", Access::Open, &files);
    user.hub.misbehave(Faults { page: Some(1), ..Faults::default() });
    let by_file = user.run(&["pull", "hf:org/m@v1.0:BF16/m-BF16-00002-of-00002.gguf"]);
    by_file.check(0, "");
    assert!(by_file.stdout.trim().ends_with("BF16/m-BF16-00001-of-00002.gguf"), "{by_file:?}");
    assert_eq!(fs::read_to_string(user.in_repo("org/m", "refs/v1.0")).expect("a ref"), commit);
    assert!(!user.in_repo("org/m", "refs/main").exists(), "only the revision that was asked for has a ref");
    for (n, part) in parts.iter().enumerate() {
        let path = format!("snapshots/{commit}/BF16/m-BF16-0000{}-of-00002.gguf", n + 1);
        assert_eq!(&fs::read(user.in_repo("org/m", &path)).expect("a part"), part);
    }
    user.run(&["pull", &format!("org/m@{commit}:Q8_0")]).check(0, "");
    assert!(!user.in_repo("org/m", &format!("refs/{commit}")).exists(), "a commit needs no ref");
    user.run(&["pull", "org/m:Q4_K_M"]).check(66, "org/m has no Q4_K_M").check(66, "org/m:BF16 (");
    user.run(&["pull", "org/m@v9"])
        .check(66, "org/m has no revision \"v9\"")
        .check(66, "there is: main, v1.0");
    user.run(&["pull", "./m.gguf"]).check(2, "it is a path");
    let listed = user.run(&["pull", "--dry-run", "org/m:BF16"]);
    assert!(listed.check(0, "").stdout.contains("BF16/m-BF16-00002-of-00002.gguf"), "{listed:?}");
}

#[test]
fn refusals_differ_and_say_what_helps() {
    let user = Downloader::new();
    let files: [(&str, &[u8]); 1] = [("m-Q8_0.gguf", b"GGUF")];
    for (repo, access) in [
        ("o/gated", Access::Gated),
        ("o/private", Access::Private),
        ("o/off", Access::Disabled),
        ("o/new", Access::Open),
    ] {
        user.hub.publish(repo, access, &files);
    }
    user.hub.publish("o/bin", Access::Open, &[("config.json", b"{}"), ("pytorch_model.bin", b"x")]);
    user.hub.rename("o/old", "o/new");
    let page = format!("{}/o/gated", user.hub.url);
    user.run(&["pull", "o/gated"]).check(77, "is gated").check(77, &page).check(77, "HF_TOKEN");
    user.run(&["pull", "o/private"])
        .check(66, "o/private is not on")
        .check(66, "for a private repository make a token");
    user.run(&["pull", "o/none"]).check(66, "o/none is not on");
    user.run(&["pull", "o/off"]).check(66, "disabled by the hub");
    user.run(&["pull", "o/bin"]).check(65, "PyTorch .bin files are not read");
    user.run(&["pull", "o/old"]).check(0, "o/old is now o/new on the hub");
    assert!(user.in_repo("o/old", "refs/main").is_file(), "the name that was asked for finds it again");

    let with = |token: &str, repo: &str| {
        let mut command = user.command(&["pull", repo]);
        command.env("HF_TOKEN", token);
        finish(command, "")
    };
    with(TOKEN, "o/gated").check(0, "");
    with(TOKEN, "o/private").check(0, "");
    with("hf_wrong", "o/private")
        .check(77, "does not accept the token")
        .check(77, "HF_TOKEN or the saved token");
    with(TOKEN, "o/none").check(66, "a token of a user who may read it");

    user.hub.misbehave(Faults { bare_errors: true, ..Faults::default() });
    user.run(&["pull", "o/nothing"]).check(66, "o/nothing is not on");
    let mut command = user.command(&["pull", "o/new"]);
    command.env("HF_ENDPOINT", "http://127.0.0.1:1");
    finish(command, "").check(69, "HF_ENDPOINT");
    let mut command = user.command(&["pull", "o/new"]);
    command.env("HF_ENDPOINT", "nonsense");
    finish(command, "").check(78, "HF_ENDPOINT: \"nonsense\" is not an http or https address");
    let mut command = user.command(&["pull", "o/new"]);
    command.env("HF_HUB_OFFLINE", "1");
    finish(command, "").check(69, "HF_HUB_OFFLINE forbids downloading");
}

#[test]
fn the_token_goes_to_the_hub_and_to_no_other_host() {
    let user = Downloader::new();
    let weights = content(100_000, 1);
    user.hub.publish("o/private", Access::Private, &[("m-Q8_0.gguf", &weights), ("config.json", b"{}")]);
    user.place.write("token", format!("{TOKEN}\n"));
    let mut command = user.command(&["pull", "o/private"]);
    command.env("HF_TOKEN_PATH", user.place.path("token"));
    let ran = finish(command, "");
    ran.check(0, "");
    assert!(!ran.stderr.contains(TOKEN) && !ran.stderr.contains("signature"), "{ran:?}");
    let seen = user.hub.seen();
    assert!(seen.iter().filter(|seen| !seen.is_storage).all(|seen| seen.has_token), "{seen:?}");
    let storage: Vec<_> = seen.iter().filter(|seen| seen.is_storage).collect();
    assert!(!storage.is_empty() && storage.iter().all(|seen| !seen.has_token), "{storage:?}");

    user.hub.forget();
    let mut command = user.command(&["pull", "o/private"]);
    command.env("HF_TOKEN", TOKEN).env("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1");
    finish(command, "").check(66, "is not on");
    assert!(user.hub.seen().iter().all(|seen| !seen.has_token));
}

#[test]
fn events_are_one_json_object_per_line() {
    let user = Downloader::new();
    let weights = content(200_000, 1);
    user.hub.publish("o/m", Access::Open, &[("m-Q8_0.gguf", &weights)]);
    let ran = user.run(&["pull", "o/m", "--output", "jsonl"]);
    let events: Vec<Value> =
        ran.check(0, "").stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let names: Vec<_> = events.iter().map(|event| event["event"].as_str().expect("a name")).collect();
    assert_eq!(
        (names[0], names[1], *names.last().expect("events")),
        ("plan", "file_started", "done"),
        "{names:?}"
    );
    assert!(names.contains(&"progress") && names.contains(&"file_done"), "{names:?}");
    assert_eq!(events[0]["files"][0]["hash"], sha256(&weights));
    let done = events.last().expect("events");
    assert_eq!((&done["bytes"], &done["received_bytes"]), (&200_000.into(), &200_000.into()));
    assert!(
        done["path"].as_str().is_some_and(|path| fs::read(path).is_ok_and(|bytes| bytes == weights)),
        "{done}"
    );
}

#[test]
fn commands_download_at_first_use_and_work_offline_afterwards() {
    let user = Downloader::new();
    let files = tiny_checkpoint();
    user.hub.publish("org/tiny", Access::Open, &borrowed(&files));
    let run = ["run", "--model", "org/tiny", "--raw", "Once", "--max-tokens", "3", "--seed", "1"];
    user.run(&[&run[..], &["--offline"]].concat()).check(66, "--offline forbids downloading it");
    assert!(user.hub.seen().is_empty(), "offline asks nothing");
    let first = user.run(&run);
    first.check(0, "downloading org/tiny (").check(0, &user.hub.url);
    user.hub.forget();
    let second = user.run(&[&run[..], &["--offline"]].concat());
    assert_eq!(second.check(0, "").stdout, first.stdout);
    let online = user.run(&run);
    assert!(!online.check(0, "").stderr.contains("downloading"), "{online:?}");
    assert!(user.hub.seen().is_empty(), "what is here is used without asking the hub: {:?}", user.hub.seen());

    user.hub.publish("org/other", Access::Open, &borrowed(&files));
    let bench = words("bench --model org/other -p 8 -n 2 -r 1 --no-probe --quiet --output csv");
    user.run(&bench).check(0, "");
    user.run(&["run", "--model", "org/othr", "hi"]).check(66, "did you mean org/other");
}

#[cfg(unix)]
#[test]
fn on_a_terminal_the_user_is_asked_and_the_size_is_shown() {
    use expectrl::Expect;
    let user = Downloader::new();
    let guide =
        fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/guide/guide.gguf")).expect("the guide");
    user.hub.publish("org/guide", Access::Open, &[("guide.gguf", &guide)]);
    let start = |args: &[&str]| {
        let mut session = terminal::spawn(user.command(args), 200).expect("a terminal");
        session.set_expect_timeout(Some(Duration::from_secs(60)));
        session
    };
    let mut declined = start(&["chat", "--model", "org/guide"]);
    declined.expect("guide.gguf (5.7 MiB, 1 file) is not here. Download it from").expect("the question");
    declined.send("n\r").expect("typed");
    declined.expect("is not downloaded").expect("the refusal");
    assert!(user.hub.transfers().is_empty());

    // Ctrl-C declines: a command ends, a chat goes on with its model.
    let mut stopped = start(&["run", "--model", "org/guide", "hi"]);
    stopped.expect("[Y/n]").expect("the question");
    stopped.send("\x03").expect("typed");
    stopped.expect("interrupted before the download began").expect("the reason");
    let mut chat = start(&["chat", "--ephemeral", "--model", "guide"]);
    chat.expect("/4,096 > ").expect("the chat has started");
    chat.send("/model org/guide\r").expect("typed");
    chat.expect("[Y/n]").expect("the question");
    chat.send("\x03").expect("typed");
    chat.expect("interrupted before the download began").expect("the reason");
    chat.expect("/4,096 > ").expect("the chat goes on");
    chat.send("What is KV?\r").expect("typed");
    chat.expect("/4,096 > ").expect("an answer");
    assert!(user.hub.transfers().is_empty());

    let mut agreed = start(&["chat", "--model", "org/guide"]);
    agreed.expect("[Y/n]").expect("the question");
    agreed.send("\r").expect("typed");
    agreed.expect("downloaded 5.7 MiB").expect("the download");
    agreed.expect("/4,096 > ").expect("the chat has started");
    drop(agreed);
    user.hub.forget();
    let mut quick = start(&["chat", "--yes", "--model", "org/guide"]);
    quick.expect("/4,096 > ").expect("no question");
    assert!(user.hub.seen().is_empty());

    // Nothing names a model: some that fit are offered, and the one that is chosen is asked for without another question.
    let mut offered = start(&["chat", "--ephemeral"]);
    offered.expect("models for this machine").expect("the menu");
    offered.expect("number, or Enter for guide:").expect("the question");
    offered.send("7\r").expect("typed");
    offered.expect("a number from 1 to 3, or Enter").expect("the refusal");
    offered.expect("number, or Enter for guide:").expect("the question again");
    offered.send("\r").expect("typed");
    offered.expect("/4,096 > ").expect("guide answers");
    drop(offered);
    user.hub.forget();
    let mut chosen = start(&["chat", "--ephemeral"]);
    chosen.expect("number, or Enter for guide:").expect("the question");
    chosen.send("1\r").expect("typed");
    chosen.expect("error:").expect("the test's hub does not have it");
    assert!(!user.hub.seen().is_empty(), "the hub was asked");
}
