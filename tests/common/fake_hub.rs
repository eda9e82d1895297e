//! A Hugging Face hub on two ports of 127.0.0.1: one answers as the hub, the other as the storage host behind its redirects.
//!
//! Speaks what huggingface_hub and llmctl ask: revisions, trees in pages, file facts, bytes with ranges. [`Faults`] makes it
//! misbehave; [`FakeHub::seen`] is every request that came, with its range and whether it carried a token.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// Who may read a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Open,
    /// Only with [`TOKEN`], after terms were accepted.
    Gated,
    /// With [`TOKEN`] only; without it the hub does not say that it exists.
    Private,
    Disabled,
}

/// The token that the hub accepts.
pub const TOKEN: &str = "hf_fake_token";

/// Misbehaviour; the default is none.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// So many answers of the hub are a 429 with these headers.
    pub busy: (usize, Vec<(&'static str, String)>),
    /// So many answers of the hub are this status.
    pub failing: (usize, u16),
    /// So many bodies of the storage host end after this many bytes.
    pub cuts: (usize, usize),
    /// The storage host answers 200 with the whole file to every range.
    pub ignores_ranges: bool,
    /// The storage host answers a request for a whole file with a later part of it.
    pub later_part: bool,
    /// The storage host sends other bytes of the same number.
    pub corrupt: bool,
    /// The hub announces this hash in the redirect, as if the file had changed since it was listed.
    pub other_etag: Option<String>,
    /// Pause after every 16 KiB of a body.
    pub pause: Option<Duration>,
    /// Files in a page of a tree.
    pub page: Option<usize>,
    /// `X-Error-Code` is left out, as by some mirrors.
    pub bare_errors: bool,
}

#[derive(Debug, Clone)]
struct FakeRepo {
    commit: String,
    files: BTreeMap<String, FakeFile>,
    access: Access,
}

impl Faults {
    /// Returns the failure that the next answer of the hub is to be, and counts it.
    fn next(&mut self) -> Option<Reply> {
        if self.busy.0 > 0 {
            self.busy.0 -= 1;
            let headers = self.busy.1.iter();
            return Some(
                headers.fold(Reply::new(429), |reply, (name, value)| reply.with(name, value.clone())),
            );
        }
        self.failing.0 = self.failing.0.checked_sub(1)?;
        Some(Reply::new(self.failing.1))
    }

    fn refusal(&self, status: u16, code: &str, message: &str) -> Reply {
        let reply = Reply::new(status).with("X-Error-Message", message.to_owned());
        if self.bare_errors || code.is_empty() { reply } else { reply.with("X-Error-Code", code.to_owned()) }
    }
}

impl FakeRepo {
    fn facts(&self, repo: &str) -> Reply {
        let siblings: Vec<_> = self.files.keys().map(|path| serde_json::json!({"rfilename": path})).collect();
        Reply::json(&serde_json::json!({"id": repo, "modelId": repo, "sha": self.commit, "private": false,
            "gated": self.access == Access::Gated, "disabled": false, "tags": [], "downloads": 0, "likes": 0,
            "siblings": siblings}))
    }

    fn refs(&self) -> Reply {
        let named =
            |name: &str| serde_json::json!([{"name": name, "ref": name, "targetCommit": self.commit}]);
        Reply::json(&serde_json::json!({"branches": named("main"), "tags": named("v1.0"), "converts": []}))
    }
}

/// A file, with its hashes computed once.
#[derive(Debug, Clone)]
struct FakeFile {
    bytes: Arc<Vec<u8>>,
    git: String,
    sha256: String,
}

/// A request that came.
#[derive(Debug, Clone)]
pub struct Seen {
    pub is_storage: bool,
    pub method: String,
    pub target: String,
    pub range: Option<String>,
    pub has_token: bool,
}

#[derive(Default)]
struct State {
    repos: BTreeMap<String, FakeRepo>,
    renamed: BTreeMap<String, String>,
    faults: Faults,
    seen: Vec<Seen>,
}

/// The running hub; its threads end with the process.
#[derive(Clone)]
pub struct FakeHub {
    state: Arc<Mutex<State>>,
    pub url: String,
    storage: String,
}

impl FakeHub {
    pub fn start() -> Self {
        let bind = || TcpListener::bind("127.0.0.1:0").expect("a port");
        let (hub, storage) = (bind(), bind());
        let url = |listener: &TcpListener| format!("http://{}", listener.local_addr().expect("bound"));
        // Another name of the same machine, so that a client that compares only hosts is found out, too.
        let storage_url = url(&storage).replace("127.0.0.1", "localhost");
        let fake = Self { state: Arc::default(), url: url(&hub), storage: storage_url };
        for (listener, is_storage) in [(hub, false), (storage, true)] {
            let fake = fake.clone();
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let fake = fake.clone();
                    thread::spawn(move || fake.serve(stream, is_storage));
                }
            });
        }
        fake
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test panics while it holds this")
    }

    /// Adds a repository, or a commit to it that becomes `main`. Returns the commit.
    pub fn publish(&self, repo: &str, access: Access, files: &[(&str, &[u8])]) -> String {
        let all: Vec<u8> = files.iter().flat_map(|(path, bytes)| [path.as_bytes(), bytes].concat()).collect();
        let commit = hex(&Sha1::digest(&all));
        let file = |bytes: &[u8]| FakeFile {
            bytes: Arc::new(bytes.to_vec()),
            git: git_hash(bytes),
            sha256: sha256(bytes),
        };
        let files = files.iter().map(|(path, bytes)| ((*path).to_owned(), file(bytes))).collect();
        self.state().repos.insert(repo.to_owned(), FakeRepo { commit: commit.clone(), files, access });
        commit
    }

    pub fn rename(&self, old: &str, new: &str) {
        self.state().renamed.insert(old.to_owned(), new.to_owned());
    }

    pub fn misbehave(&self, faults: Faults) {
        self.state().faults = faults;
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.state().seen.clone()
    }

    pub fn forget(&self) {
        self.state().seen.clear();
    }

    /// Returns the requests for bytes of files, at the storage host.
    pub fn transfers(&self) -> Vec<Seen> {
        self.seen().into_iter().filter(|seen| seen.is_storage && seen.method == "GET").collect()
    }

    fn serve(&self, stream: TcpStream, is_storage: bool) {
        // A client may go at any time.
        let _ = self.answer(&stream, is_storage);
        let _ = stream.shutdown(Shutdown::Both);
    }

    fn answer(&self, stream: &TcpStream, is_storage: bool) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream);
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
                break;
            }
            head.push(line.trim().to_owned());
        }
        let mut first = head.first().cloned().unwrap_or_default();
        first.truncate(first.rfind(' ').unwrap_or(0));
        let Some((method, target)) = first.split_once(' ') else { return Ok(()) };
        let header = |name: &str| {
            head.iter().skip(1).find_map(|line| {
                let (key, value) = line.split_once(':')?;
                key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
            })
        };
        let authorization = header("authorization");
        let seen = Seen {
            is_storage,
            method: method.to_owned(),
            target: target.to_owned(),
            range: header("range"),
            has_token: authorization.is_some(),
        };
        self.state().seen.push(seen.clone());
        let is_allowed = authorization.as_deref() == Some(&format!("Bearer {TOKEN}"));
        let is_wrong = authorization.is_some() && !is_allowed;
        let reply = match is_storage {
            true => self.bytes(&seen),
            false => self.hub(&seen, is_allowed, is_wrong),
        };
        self.send(stream, &seen, reply)
    }

    fn send(&self, mut stream: &TcpStream, seen: &Seen, reply: Reply) -> std::io::Result<()> {
        let pause = self.state().faults.pause;
        let mut text = format!("HTTP/1.1 {} x\r\nConnection: close\r\n", reply.status);
        for (name, value) in &reply.headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        text.push_str(&format!("Content-Length: {}\r\n\r\n", reply.body.len()));
        stream.write_all(text.as_bytes())?;
        if seen.method == "HEAD" {
            return Ok(());
        }
        let sent = &reply.body[..reply.cut.unwrap_or(reply.body.len()).min(reply.body.len())];
        for piece in sent.chunks(16 << 10) {
            stream.write_all(piece)?;
            if let Some(pause) = pause.filter(|_| seen.is_storage) {
                thread::sleep(pause);
            }
        }
        Ok(())
    }

    /// Answers as the storage host: `/<repo>|<path>`, with a signature.
    fn bytes(&self, seen: &Seen) -> Reply {
        let mut state = self.state();
        let name = decoded(seen.target.trim_start_matches('/').split('?').next().unwrap_or_default());
        let found =
            name.split_once('|').and_then(|(repo, path)| state.repos.get(repo)?.files.get(path)).cloned();
        let Some(file) = found else { return Reply::new(404) };
        let cut = (state.faults.cuts.0 > 0).then_some(state.faults.cuts.1);
        if cut.is_some() && seen.method == "GET" {
            state.faults.cuts.0 -= 1;
        }
        let range = seen.range.as_deref().filter(|_| !state.faults.ignores_ranges).and_then(|range| {
            let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()))
        });
        let total = file.bytes.len();
        let (is_corrupt, is_later_part) = (state.faults.corrupt, state.faults.later_part);
        // The copy is made without the lock, so that connections do not wait for each other.
        drop(state);
        let sent = |first: usize, end: usize| {
            let mut body = file.bytes[first..end].to_vec();
            body.iter_mut().filter(|_| is_corrupt).for_each(|byte| *byte ^= 0x55);
            body
        };
        match range {
            Some((first, _)) if first >= total => Reply::new(416),
            Some((first, last)) => {
                let end = last.map_or(total, |last| (last + 1).min(total));
                let reply = Reply { body: sent(first, end), cut, ..Reply::new(206) };
                reply.with("Content-Range", format!("bytes {first}-{}/{total}", end - 1))
            }
            None if is_later_part => {
                let reply = Reply { body: sent(5, total), ..Reply::new(206) };
                reply.with("Content-Range", format!("bytes 5-{}/{total}", total - 1))
            }
            None => Reply { body: sent(0, total), cut, ..Reply::new(200) },
        }
    }

    /// Answers as the hub.
    fn hub(&self, seen: &Seen, is_allowed: bool, is_wrong: bool) -> Reply {
        let mut state = self.state();
        if let Some(fault) = state.faults.next() {
            return fault;
        }
        if is_wrong {
            let message = "Invalid credentials in Authorization header".to_owned();
            return Reply::new(401).with("X-Error-Message", message);
        }
        let (path, query) = seen.target.split_once('?').unwrap_or((&seen.target, ""));
        let is_api = path.starts_with("/api/models/");
        let rest = path.trim_start_matches("/api/models/").trim_start_matches('/');
        let mut words = rest.splitn(3, '/');
        let (org, name) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let (repo, rest) = (format!("{org}/{name}"), words.next().unwrap_or_default());
        if let Some(new) = state.renamed.get(&repo) {
            return Reply::new(307).with("Location", seen.target.replacen(&repo, new, 1));
        }
        let refused = |status, code, message| state.faults.refusal(status, code, message);
        let Some(found) = state.repos.get(&repo) else {
            return refused(if is_allowed { 404 } else { 401 }, "RepoNotFound", "Repository not found");
        };
        match found.access {
            Access::Private if !is_allowed => return refused(401, "RepoNotFound", "Repository not found"),
            // The facts of a gated repository are public, its files are not.
            Access::Gated if !is_allowed && !is_api => {
                return refused(401, "GatedRepo", "Access to model is restricted.");
            }
            Access::Disabled => return refused(403, "", "Access to this resource is disabled."),
            _ => {}
        }
        let is_known = |revision: &str| ["main", "v1.0", &found.commit].contains(&decoded(revision).as_str());
        let mut words = rest.splitn(3, '/');
        match (is_api, words.next().unwrap_or_default(), words.next(), words.next()) {
            (true, "" | "revision", revision, None) if revision.is_none_or(is_known) => found.facts(&repo),
            (true, "refs", ..) => found.refs(),
            (true, "tree", Some(revision), None) if is_known(revision) => {
                let (page, next) = self.tree(found, state.faults.page, query);
                let link = |next| format!("<{}{path}?recursive=true&cursor={next}>; rel=\"next\"", self.url);
                next.map(link).into_iter().fold(Reply::json(&page), |reply, link| reply.with("Link", link))
            }
            (false, "resolve", Some(revision), Some(file)) if is_known(revision) => {
                match found.files.get(&decoded(file)) {
                    Some(bytes) => self.file(&repo, &found.commit, &decoded(file), bytes, &state.faults),
                    None => refused(404, "EntryNotFound", "Entry not found")
                        .with("X-Repo-Commit", found.commit.clone()),
                }
            }
            _ => refused(404, "RevisionNotFound", "Invalid rev id"),
        }
    }

    fn tree(&self, repo: &FakeRepo, page: Option<usize>, query: &str) -> (serde_json::Value, Option<usize>) {
        let cursor =
            query.split('&').find_map(|part| part.strip_prefix("cursor=")?.parse().ok()).unwrap_or(0);
        let page = page.unwrap_or(usize::MAX);
        let entry = |(path, file): (&String, &FakeFile)| {
            let size = file.bytes.len();
            match is_large(path) {
                true => serde_json::json!({"type": "file", "path": path, "size": size, "oid": file.git,
                    "lfs": {"oid": file.sha256, "size": size, "pointerSize": 130}}),
                false => serde_json::json!({"type": "file", "path": path, "size": size, "oid": file.git}),
            }
        };
        let entries: Vec<_> = repo.files.iter().skip(cursor).take(page).map(entry).collect();
        let next = cursor.saturating_add(page);
        (entries.into(), (next < repo.files.len()).then_some(next))
    }

    /// Answers with a small file itself, and with a redirect and facts for a large one.
    fn file(&self, repo: &str, commit: &str, path: &str, file: &FakeFile, faults: &Faults) -> Reply {
        let commit = commit.to_owned();
        if !is_large(path) {
            let reply = Reply { body: file.bytes.to_vec(), ..Reply::new(200) };
            return reply.with("ETag", format!("\"{}\"", file.git)).with("X-Repo-Commit", commit);
        }
        let hash = faults.other_etag.as_ref().unwrap_or(&file.sha256);
        Reply::new(302)
            .with(
                "Location",
                format!("{}/{repo}|{}?signature=secret", self.storage, path.replace('/', "%2F")),
            )
            .with("X-Linked-Etag", format!("\"{hash}\""))
            .with("X-Linked-Size", file.bytes.len().to_string())
            .with("X-Repo-Commit", commit)
    }
}

struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// The connection ends after so many bytes of the body.
    cut: Option<usize>,
}

impl Reply {
    fn new(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Vec::new(), cut: None }
    }

    fn json(value: &serde_json::Value) -> Self {
        Self { body: value.to_string().into_bytes(), ..Self::new(200) }
            .with("Content-Type", "application/json".to_owned())
    }

    fn with(mut self, name: &str, value: String) -> Self {
        self.headers.push((name.to_owned(), value));
        self
    }
}

fn is_large(path: &str) -> bool {
    path.ends_with(".gguf") || path.ends_with(".safetensors")
}

/// The name that git gives to a file's content.
pub fn git_hash(bytes: &[u8]) -> String {
    hex(&Sha1::digest([format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat()))
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let code =
            (byte == b'%' && after.len() >= 2).then(|| std::str::from_utf8(&after[..2]).ok()).flatten();
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(code) => (bytes.push(code), rest = &after[2..]).1,
            None => (bytes.push(byte), rest = after).1,
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
