//! `--encrypt`: nothing of a session lies in clear, whatever is put back after a removal cannot be read, and keys that are missing,
//! damaged or others cost an error that says so, never a byte and never an answer.

use std::fs;
use std::io::Write;

use llmctl_base::{StoreError, Vault};
use llmctl_engine::session::store::{Blobs, SavedSession, SessionWriter, StoredTurn};
use llmctl_image::{ImageFile, ImageHash, ImageInfo, ImageSet, Picture};
use llmctl_models::images::{ImageKey, ImageRows, ImageSpan};
use llmctl_models::kv::disk::{
    DiskEvent, DiskPageKey, ImageFolder, MissingReason, PageLabel, Saving, WarmPrompt, names,
};
use llmctl_template::ImageRef;

use crate::common::prelude::*;

const LONG: Duration = Duration::from_secs(60);
const PAGE: usize = PAGE_TOKENS;
/// Bytes of a page's payload.
const PAYLOAD: usize = 5000;
const KEY: ImageKey = ImageKey([3; 32]);

fn model() -> ModelFingerprint {
    ModelFingerprint { name: "m".to_owned(), fingerprint: "f".to_owned(), reference: None }
}

/// As many tokens as `pages` pages have; those of one `text` are its own.
fn tokens(text: u32, pages: usize) -> Vec<u32> {
    (0..(pages * PAGE) as u32).map(|n| text * 100_000 + n).collect()
}

fn turn(kept: usize, added: Vec<u32>) -> StoredTurn {
    stored_turn(["the secret question", "the secret answer"], kept, vec![], added)
}

/// A turn whose question has an image of these bytes, and the bytes.
fn seeing(content: &[u8], added: Vec<u32>) -> (StoredTurn, Blobs) {
    let hash = ImageHash::of(content);
    let info = ImageInfo { media_type: "image/png", width: 2, height: 1 };
    let picture = Picture { width: 2, height: 1, rgb: vec![0; 6] };
    let mut files = ImageSet::default();
    files.insert(Arc::new(ImageFile { hash, bytes: content.into(), info, picture }));
    let mut blobs = Blobs::default();
    blobs.keep(&files);
    let (sha256, media_type) = (hash.to_string(), "image/png".to_owned());
    let image = ImageRef { sha256, width: 2, height: 1, media_type, name: None };
    let question = Message { content: Some(Content::Parts(vec![image.to_part()])), ..Message::user("") };
    let span = ImageSpan { rows: 1..3, key: KEY, first: 0, grid: [1, 2] };
    let turn = StoredTurn {
        messages: vec![question, Message::assistant("a dot")],
        spans: vec![span],
        prompt_tail: added,
        generated: vec![],
        ..turn(0, vec![])
    };
    (turn, blobs)
}

fn payload(text: u32) -> Vec<u8> {
    format!("payload of {text};").bytes().cycle().take(PAYLOAD).collect()
}

struct Home {
    folder: TempDir,
}

impl Home {
    fn new() -> Self {
        Self { folder: TempDir::new().expect("a scratch folder") }
    }

    fn path(&self, below: &str) -> PathBuf {
        self.folder.path().join(below)
    }

    fn vault(&self) -> Vault {
        Vault::open(&self.path("keys"), None).expect("opened")
    }

    fn plain(&self) -> SessionStore {
        SessionStore::new(self.path("data/sessions")).with_kv(Some(self.path("data/kv")))
    }

    fn store(&self) -> SessionStore {
        self.plain().with_vault(Some(self.vault()))
    }

    fn config(&self, vault: Option<Vault>) -> DiskConfig {
        DiskConfig {
            root: self.path("data/kv"),
            limit_bytes: 1 << 30,
            fingerprint: "f".to_owned(),
            description: json!({}),
            queue_bytes: 64 << 20,
            vault,
        }
    }

    fn pages(&self, is_sealed: bool) -> DiskStore {
        DiskStore::open(self.config(is_sealed.then(|| self.vault()))).expect("opened")
    }

    /// A session that says one text after the other, each of so many pages, all on disk.
    fn session(&self, store: &SessionStore, session: &str, texts: &[(u32, usize)]) -> SessionWriter {
        let mut writer = store.create(&name(session), &model()).expect("created");
        let mut all = Vec::new();
        for &(text, pages) in texts {
            writer.append(&model(), &turn(all.len(), tokens(text, pages))).expect("saved");
            all.extend(tokens(text, pages));
        }
        save(&self.pages(writer.is_sealed()), &all);
        writer
    }

    fn transcript(&self, session: &str) -> PathBuf {
        self.path("data/sessions").join(session).join("transcript.jsonl")
    }

    /// The files with conversations and KV.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut files = BTreeMap::new();
        read_below(&self.path("data"), &mut files);
        files
    }

    fn num_keys(&self, kind: &str) -> usize {
        let keys = fs::read_dir(self.path("keys").join(kind)).into_iter().flatten().flatten();
        keys.filter(|key| key.metadata().expect("there").len() > 0).count() // an erased one of a session is empty
    }

    /// Puts files back, as from a backup.
    fn restore(&self, files: &BTreeMap<PathBuf, Vec<u8>>) {
        for (path, content) in files {
            fs::create_dir_all(path.parent().expect("a folder")).expect("created");
            fs::write(path, content).expect("put back");
        }
    }
}

fn read_below(folder: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.path() {
            path if path.is_dir() => read_below(&path, files),
            path => {
                let content = fs::read(&path).expect("readable");
                files.insert(path, content);
            }
        }
    }
}

fn labels(tokens: &[u32]) -> Vec<PageLabel> {
    let mut parent = None;
    let pages = names(tokens).zip(tokens.chunks(PAGE)).enumerate();
    let label = |(number, (name, tokens)): (usize, (_, &[u32]))| PageLabel {
        key: DiskPageKey { name, group: 0 },
        parent: parent.replace(name),
        tokens: tokens.into(),
        depth: number as u32,
    };
    pages.map(label).collect()
}

fn save(store: &DiskStore, tokens: &[u32]) {
    for label in labels(tokens) {
        let text = label.tokens[0] / 100_000;
        assert_ne!(store.save(label, payload(text)), Saving::Dropped);
    }
    assert!(store.flush(LONG));
}

/// Why the pages of a sequence are missing; nothing of those that come back, which are right.
fn missing(store: &DiskStore, tokens: &[u32]) -> Vec<MissingReason> {
    let labels = labels(tokens);
    let text_of = |key: &DiskPageKey| {
        let label = labels.iter().find(|label| label.key == *key).expect("asked for");
        label.tokens[0] / 100_000
    };
    labels.iter().for_each(|label| store.load(label.clone(), PAYLOAD));
    let (mut missing, mut num_answers) = (Vec::new(), 0);
    while num_answers < labels.len() {
        assert!(store.wait(LONG), "in time");
        for event in store.poll() {
            num_answers += 1;
            match event {
                DiskEvent::Loaded { key, bytes } => assert_eq!(*bytes, payload(text_of(&key))),
                DiskEvent::Missing { reason, .. } => missing.push(reason),
                DiskEvent::Notice(notice) => panic!("{notice}"),
            }
        }
    }
    missing
}

fn turns(saved: &SavedSession) -> Vec<StoredTurn> {
    saved.turns.iter().map(|saved| saved.turn.clone()).collect()
}

fn refusal<T>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Store(StoreError::Unsupported { path, message })) => {
            format!("{}: {message}", path.display())
        }
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("not refused"),
    }
}

fn has(files: &BTreeMap<PathBuf, Vec<u8>>, needle: &[u8]) -> Option<PathBuf> {
    let found = |content: &Vec<u8>| content.windows(needle.len()).any(|window| window == needle);
    files.iter().find(|(_, content)| found(content)).map(|(path, _)| path.clone())
}

fn bytes_of(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

/// Bytes that must not lie in clear: words, tokens as text and as numbers, images, KV and embeddings.
fn traces() -> Vec<Vec<u8>> {
    vec![
        b"secret".to_vec(),
        b"100001,100002".to_vec(),
        bytes_of(&tokens(1, 1)[..2]),
        b"pixels".to_vec(),
        b"payload of".to_vec(),
        bytes_of(&[0.625_f32.to_bits(); 2]),
    ]
}

/// A session with texts, an image, pages and embeddings.
fn whole_session(home: &Home, store: &SessionStore) -> Vec<StoredTurn> {
    let mut writer = home.session(store, "a", &[(1, 2), (2, 1)]);
    let (with_image, blobs) = seeing(b"pixels of an image", tokens(1, 1));
    writer.take_blobs(&blobs);
    writer.append_after(0, &model(), &with_image).expect("saved");
    let vault = writer.is_sealed().then(|| home.vault());
    let rows = ImageRows { width: 2, embeddings: vec![0.625; 4], deep: vec![] };
    let folder = ImageFolder::new(&home.path("data/kv"), 1 << 30).with_vault(vault);
    folder.write(KEY, &rows).expect("written");
    turns(writer.saved())
}

#[test]
fn nothing_of_a_session_lies_in_clear_and_all_of_it_comes_back() {
    let home = Home::new();
    let plain = Home::new();
    whole_session(&plain, &plain.plain());
    for trace in traces() {
        assert!(has(&plain.files(), &trace).is_some(), "the test would not find {trace:?}");
    }
    let said = whole_session(&home, &home.store());
    for trace in traces() {
        assert_eq!(has(&home.files(), &trace), None, "{}", String::from_utf8_lossy(&trace));
    }
    let saved = home.store().read(&name("a")).expect("reads");
    assert_eq!(turns(&saved), said);
    let hash = ImageHash::of(b"pixels of an image");
    assert_eq!(saved.blobs.read(&hash).as_deref(), Ok(&b"pixels of an image"[..]));
    assert_eq!(missing(&home.pages(true), &[tokens(1, 2), tokens(2, 1)].concat()), []);
    let folder = ImageFolder::new(&home.path("data/kv"), 1 << 30);
    assert!(folder.clone().with_vault(Some(home.vault())).read(KEY, 2).is_some());
    assert!(folder.read(KEY, 2).is_none(), "without keys");
    assert!(folder.with_vault(Some(home.vault())).read(KEY, 2).is_some(), "nobody has removed it");
    assert_eq!(home.store().list().expect("listed")[0].summary.as_ref().expect("readable").turns, 1);
}

#[test]
fn what_was_removed_cannot_be_read_from_a_copy() {
    let home = Home::new();
    let store = home.store();
    whole_session(&home, &store);
    // Another session begins with the same two pages and has a third of its own.
    drop(home.session(&store, "b", &[(1, 2), (3, 1)]));
    drop(home.session(&store, "c", &[(7, 3)]));
    assert_eq!((home.num_keys("session"), home.num_keys("image"), home.num_keys("rows")), (3, 1, 1));
    assert_eq!(home.num_keys("page"), 7);
    let backup = home.files();
    assert_eq!(store.remove(&name("a")).expect("removed").num_pages, 1);
    store.remove(&name("c")).expect("removed");
    assert_eq!((home.num_keys("session"), home.num_keys("image"), home.num_keys("rows")), (1, 0, 0));
    assert_eq!(home.num_keys("page"), 3, "those of b");
    home.restore(&backup);
    let store = home.store();
    for session in ["a", "c"] {
        let gone = refusal(store.read(&name(session)));
        assert!(gone.contains(&format!("session \"{session}\" is encrypted, and its key in ")), "{gone}");
        assert!(gone.contains("it was erased"), "{gone}");
        assert_eq!(refusal(store.open(&name(session)).map(drop)), gone);
    }
    let lost = missing(&home.pages(true), &tokens(7, 3));
    assert_eq!(lost.len(), 3);
    assert!(lost.iter().all(|reason| reason.to_string().contains("it was erased")), "{lost:?}");
    let folder = ImageFolder::new(&home.path("data/kv"), 1 << 30).with_vault(Some(home.vault()));
    assert!(folder.read(KEY, 2).is_none());
    // The other session is as it was, and the copies can be removed.
    assert_eq!(turns(&store.read(&name("b")).expect("reads")).len(), 2);
    assert_eq!(missing(&home.pages(true), &[tokens(1, 2), tokens(3, 1)].concat()), []);
    store.remove(&name("a")).expect("removed");
    assert!(!home.transcript("a").exists());
}

#[test]
fn a_page_that_was_computed_again_does_not_bring_old_copies_back() {
    let home = Home::new();
    let store = home.store();
    drop(home.session(&store, "a", &[(1, 2)]));
    let backup = home.files();
    store.remove(&name("a")).expect("removed");
    drop(home.session(&store, "b", &[(1, 2)]));
    home.restore(&backup);
    let lost = missing(&home.pages(true), &tokens(1, 2));
    assert!(lost.iter().all(|reason| matches!(reason, MissingReason::Damaged(_))), "{lost:?}");
    assert_eq!(lost.len(), 2, "sealed with the earlier key");
    save(&home.pages(true), &tokens(1, 2));
    assert_eq!(missing(&home.pages(true), &tokens(1, 2)), []);
}

#[test]
fn undone_content_is_erased_in_copies_too_when_it_is_purged() {
    let home = Home::new();
    let store = home.store();
    let mut writer = home.session(&store, "a", &[(1, 1), (2, 2)]);
    writer.truncate(1).expect("undone");
    drop(writer);
    let backup = home.files();
    store.purge(&name("a")).expect("purged");
    assert_eq!((home.num_keys("session"), home.num_keys("page")), (1, 1));
    let saved = turns(&store.read(&name("a")).expect("reads"));
    home.restore(&backup);
    let gone = refusal(home.store().read(&name("a")));
    assert!(gone.contains("it was erased"), "{gone}");
    assert_eq!(missing(&home.pages(true), &[tokens(1, 1), tokens(2, 2)].concat()).len(), 2);
    assert_eq!(saved.len(), 1);
}

#[test]
fn a_sealed_session_needs_its_keys_and_nothing_changes_without_them() {
    let home = Home::new();
    whole_session(&home, &home.store());
    let before = home.files();
    let plain = home.plain();
    let needed = "session \"a\" is encrypted, and its folder of keys is needed (--encrypt DIR)";
    for refused in [
        refusal(plain.read(&name("a"))),
        refusal(plain.open(&name("a")).map(drop)),
        refusal(plain.open_or_create(&name("a"), &model()).map(drop)),
        refusal(plain.repair(&name("a"))),
        refusal(plain.purge(&name("a"))),
        refusal(plain.rename(&name("a"), &name("z"))),
        refusal(plain.fork(&name("a"), &name("z"), None).map(drop)),
    ] {
        assert!(refused.ends_with(needed), "{refused}");
    }
    let refused = refusal(plain.remove(&name("a")));
    assert!(refused.contains("its key has to be erased") && refused.contains("--encrypt DIR"), "{refused}");
    let listed = plain.list().expect("listed");
    assert!(listed[0].summary.as_ref().expect_err("sealed").to_string().ends_with(needed));
    // Another folder of keys has another key.
    let other = Vault::open(&home.path("other"), None).expect("opened");
    let other = home.plain().with_vault(Some(other));
    let refused = refusal(other.open(&name("a")).map(drop));
    assert!(refused.contains("belongs to another folder of keys"), "{refused}");
    let refused = refusal(other.remove(&name("a")));
    assert!(refused.contains("its key has to be erased"), "{refused}");
    assert_eq!(home.files(), before);
    // A plain session beside it goes on, and removing it touches nothing that is sealed.
    drop(home.session(&plain, "p", &[(1, 2), (9, 1)]));
    plain.remove(&name("p")).expect("removed");
    assert_eq!(turns(&home.store().read(&name("a")).expect("reads")).len(), 1);
    let hash = ImageHash::of(b"pixels of an image");
    assert!(home.store().read(&name("a")).expect("reads").blobs.read(&hash).is_ok());
}

#[test]
fn a_copy_with_the_same_key_is_not_lost_with_the_session() {
    let home = Home::new();
    let store = home.store();
    whole_session(&home, &store);
    let copy = home.path("data/sessions/b/transcript.jsonl");
    fs::create_dir_all(copy.parent().expect("a folder")).expect("created");
    fs::copy(home.transcript("a"), &copy).expect("copied");
    let refused = refusal(store.remove(&name("a")));
    assert!(
        refused.starts_with(&copy.display().to_string()) && refused.contains("the same key"),
        "{refused}"
    );
    assert_eq!(turns(&store.read(&name("a")).expect("reads")).len(), 1);
    fs::remove_dir_all(copy.parent().expect("a folder")).expect("removed by hand");
    store.remove(&name("a")).expect("removed");
}

#[test]
fn a_removal_that_was_cut_short_is_finished_by_the_next() {
    let home = Home::new();
    let store = home.store();
    whole_session(&home, &store);
    drop(home.session(&store, "c", &[(7, 3)]));
    let sessions = home.path("data/sessions");
    fs::rename(sessions.join("a"), sessions.join(".unfinished-removed-1-2-3")).expect("taken away");
    // Without the keys it stays.
    home.plain().remove(&name("a")).expect_err("there is none");
    assert!(sessions.join(".unfinished-removed-1-2-3").exists());
    store.remove(&name("c")).expect("removed");
    assert!(!sessions.join(".unfinished-removed-1-2-3").exists());
    assert_eq!((home.num_keys("session"), home.num_keys("page"), home.num_keys("image")), (0, 0, 0));
}

#[test]
fn what_cannot_be_read_of_a_removed_session_is_told() {
    for damage in [|line: &[u8]| [&line[..20], b"!", &line[21..]].concat(), |_: &[u8]| Vec::new()] {
        let home = Home::new();
        let store = home.store();
        drop(home.session(&store, "a", &[(1, 2), (2, 1)]));
        let whole = fs::read(home.transcript("a")).expect("there");
        fs::write(home.transcript("a"), damage(&whole)).expect("damaged");
        let problem = store.remove(&name("a")).expect("removed").problem.expect("a warning");
        assert!(problem.contains("could not be read"), "{problem}");
    }
}

#[test]
fn a_plain_session_goes_on_only_when_it_is_encrypted() {
    let home = Home::new();
    let said = whole_session(&home, &home.plain());
    let store = home.store();
    let before = home.files();
    assert_eq!(turns(&store.read(&name("a")).expect("can be read")), said);
    let refused = refusal(store.open(&name("a")).map(drop));
    assert!(refused.contains("the session is plain text: `llmctl sessions encrypt a`"), "{refused}");
    assert_eq!(home.files(), before);
    assert!(store.encrypt(&name("a")).expect("encrypted"));
    for trace in traces() {
        assert_eq!(has(&home.files(), &trace), None, "{}", String::from_utf8_lossy(&trace));
    }
    assert!(!store.encrypt(&name("a")).expect("a second time"));
    let mut writer = store.open(&name("a")).expect("goes on");
    assert_eq!(turns(writer.saved()), said);
    let hash = ImageHash::of(b"pixels of an image");
    assert_eq!(writer.saved().blobs.read(&hash).as_deref(), Ok(&b"pixels of an image"[..]));
    writer.append(&model(), &turn(PAGE, tokens(5, 1))).expect("saved");
    drop(writer);
    assert_eq!(home.store().read(&name("a")).expect("reads").turns.len(), 2);
    assert!(refusal(home.plain().encrypt(&name("a")).map(drop)).contains("--encrypt"));
}

#[test]
fn an_image_of_a_plain_and_a_sealed_session_is_kept_for_both() {
    let home = Home::new();
    let (with_image, blobs) = seeing(b"pixels", tokens(1, 1));
    let hash = ImageHash::of(b"pixels");
    for (store, session) in [(home.plain(), "p"), (home.store(), "s")] {
        let mut writer = store.create(&name(session), &model()).expect("created");
        writer.take_blobs(&blobs);
        writer.append(&model(), &with_image).expect("saved");
    }
    home.store().remove(&name("s")).expect("removed");
    assert_eq!(home.num_keys("image"), 0);
    assert!(home.plain().read(&name("p")).expect("reads").blobs.read(&hash).is_ok());
    let forked = home.store().fork(&name("p"), &name("f"), None).expect("a sealed copy");
    assert!(forked.is_sealed());
    drop(forked);
    home.plain().remove(&name("p")).expect("removed");
    assert!(home.store().read(&name("f")).expect("reads").blobs.read(&hash).is_ok());
    assert_eq!(has(&home.files(), b"pixels"), None);
}

#[test]
fn a_removal_that_was_cut_short_keeps_no_image() {
    let home = Home::new();
    let (with_image, blobs) = seeing(b"pixels", tokens(1, 1));
    let mut writer = home.plain().create(&name("a"), &model()).expect("created");
    writer.take_blobs(&blobs);
    writer.append(&model(), &with_image).expect("saved");
    drop((writer, home.session(&home.plain(), "b", &[(2, 1)])));
    let doomed = home.path("data/sessions/.unfinished-removed-1-2-3");
    fs::rename(home.path("data/sessions/a"), &doomed).expect("taken away");
    home.plain().purge(&name("b")).expect("purged");
    assert_eq!(has(&home.files(), b"pixels"), None);
    assert!(doomed.exists(), "the next removal finds it");
}

#[test]
fn damage_is_found_by_line_and_repaired_and_torn_ends_are_cut_off() {
    let home = Home::new();
    let store = home.store();
    let texts: Vec<(u32, usize)> = (1..=4).map(|text| (text, 1)).collect();
    drop(home.session(&store, "a", &texts));
    let (path, whole) = (home.transcript("a"), fs::read(home.transcript("a")).expect("there"));
    let said = turns(&store.read(&name("a")).expect("reads"));
    let ends: Vec<usize> = (0..whole.len()).filter(|at| whole[*at] == b'\n').map(|at| at + 1).collect();
    assert_eq!(ends.len(), 6, "keys, header, four turns");
    for cut in (ends[1]..whole.len()).step_by(97).chain(ends[1..].iter().copied()) {
        fs::write(&path, &whole[..cut]).expect("cut");
        let kept = ends.iter().filter(|end| **end <= cut).count() - 2;
        let writer = store.open(&name("a")).unwrap_or_else(|error| panic!("cut at {cut}: {error}"));
        let whole_but_feed = usize::from(ends.contains(&(cut + 1)));
        assert_eq!(turns(writer.saved()), said[..kept + whole_but_feed], "cut at {cut}");
    }
    // Two sealed lines change places, with the right checksums: their numbers are others.
    let lines: Vec<&str> = str::from_utf8(&whole).expect("text").lines().collect();
    let record = |line: &str| line[line.find("\"record\":").expect("framed") + 9..line.len() - 1].to_owned();
    let mut records: Vec<String> = lines.iter().map(|line| record(line)).collect();
    records.swap(3, 4);
    let framed = crate::fuzzing::framed(records.join("\n").as_bytes());
    fs::write(&path, framed).expect("written");
    let Err(Error::Store(StoreError::Damaged { line, message, .. })) = store.read(&name("a")) else {
        panic!("not found")
    };
    assert_eq!((line, message.as_str()), (4, "cannot be decrypted with the session's key"));
    let repaired = store.repair(&name("a")).expect("repaired").expect("it was damaged");
    assert_eq!((repaired.line, repaired.turns), (4, 1));
    assert_eq!(turns(&store.read(&name("a")).expect("reads")), said[..1]);
    for trace in traces() {
        assert_eq!(has(&home.files(), &trace), None, "in the copy");
    }
    store.purge(&name("a")).expect("purged");
    assert!(!repaired.backup.exists());
    assert_eq!(home.num_keys("session"), 1);
}

#[test]
fn sealed_pages_are_missing_with_a_reason_when_they_cannot_be_opened() {
    let home = Home::new();
    let (first, second) = (tokens(1, 2), tokens(2, 1));
    save(&home.pages(false), &second);
    save(&home.pages(true), &first);
    assert_eq!(missing(&home.pages(true), &second), [], "plain pages are read as before");
    // Without keys they are missing, stay where they are, and are computed and saved again.
    let plain = home.pages(false);
    let reasons = missing(&plain, &first);
    assert_eq!(reasons.len(), 2);
    for reason in reasons {
        assert!(matches!(&reason, MissingReason::Io(text) if text.contains("--encrypt DIR")), "{reason}");
    }
    assert_eq!(missing(&home.pages(true), &first), []);
    save(&plain, &first);
    assert_eq!(missing(&home.pages(false), &first), []);
    // Each byte counts.
    let home = Home::new();
    save(&home.pages(true), &tokens(1, 1));
    let path = home.files().into_keys().find(|path| path.extension().is_some_and(|end| end == "kv"));
    let (path, label) = (path.expect("a page"), tokens(1, 1));
    let whole = fs::read(&path).expect("there");
    for at in (0..whole.len()).step_by(41) {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        fs::write(&path, damaged).expect("damaged");
        let reason = missing(&home.pages(true), &label);
        assert!(!reason.is_empty(), "byte {at}");
        fs::write(&path, &whole[..at]).expect("cut");
        assert!(!missing(&home.pages(true), &label).is_empty(), "cut at {at}");
        save(&home.pages(true), &label);
        assert_eq!(missing(&home.pages(true), &label), [], "computed again");
        fs::write(&path, &whole).expect("put back");
    }
    // A damaged key loses the page, which gets another.
    let key = fs::read_dir(home.path("keys/page")).expect("keys").flatten().next().expect("one").path();
    fs::write(key, "no key").expect("damaged");
    assert!(missing(&home.pages(true), &label)[0].to_string().contains(".key is damaged"));
    save(&home.pages(true), &label);
    assert_eq!(missing(&home.pages(true), &label), []);
}

#[test]
fn pages_that_make_room_lose_their_keys_and_kept_ones_do_not() {
    let home = Home::new();
    let kept = tokens(1, 2);
    save(&home.pages(true), &kept);
    let prompt =
        WarmPrompt::new("p".to_owned(), "m".to_owned(), 1, names(&kept).collect()).expect("a prompt");
    prompt.keep(&home.path("data/kv")).expect("kept");
    let limit_bytes = 10 * (PAYLOAD as u64 + 400);
    let store =
        DiskStore::open(DiskConfig { limit_bytes, ..home.config(Some(home.vault())) }).expect("opened");
    (2..40).for_each(|text| save(&store, &tokens(text, 1)));
    assert!(store.stats().removed_pages > 20);
    let num_pages =
        home.files().keys().filter(|path| path.extension().is_some_and(|end| end == "kv")).count();
    assert_eq!(home.num_keys("page"), num_pages, "a key for each page that is there");
    assert_eq!(missing(&home.pages(true), &kept), []);
    // A session that begins with the prompt goes without it.
    drop(home.session(&home.store(), "a", &[(1, 2), (50, 1)]));
    home.store().remove(&name("a")).expect("removed");
    assert_eq!(missing(&home.pages(true), &kept), []);
    assert_eq!(missing(&home.pages(true), &[kept, tokens(50, 1)].concat()).len(), 1);
}

/// Where the child below finds its folders; set only by the test that starts it.
const CHILD_HOME: &str = "LLMCTL_TEST_ENCRYPTION";

/// Not a test by itself: the process that is killed. It appends, purges and removes, and says which turns are saved.
#[test]
fn child_that_encrypts() {
    let Some(root) = std::env::var_os(CHILD_HOME).map(PathBuf::from) else { return };
    let vault = Vault::open(&root.join("keys"), None).expect("opened");
    let store = SessionStore::new(root.join("data/sessions")).with_kv(Some(root.join("data/kv")));
    let store = store.with_vault(Some(vault));
    let mut writer = store.open_or_create(&name("a"), &model()).expect("opened");
    let say = |line: String| {
        let mut out = std::io::stdout();
        writeln!(out, "\n{line}").and_then(|()| out.flush()).expect("a pipe");
    };
    say("opened".to_owned());
    for n in writer.saved().turns.len().. {
        writer.append(&model(), &turn(PAGE * n, tokens(n as u32 + 1, 1))).expect("saved");
        say(format!("saved {}", n + 1));
        if n % 5 == 0 {
            writer.compact().expect("compacted");
            drop(store.create(&name("short"), &model()).and_then(SessionWriter::remove));
        }
    }
}

#[test]
fn sigkill_while_saving_sealed_turns_loses_none_that_was_reported() {
    let home = Home::new();
    let mut reported = 0;
    for round in 0..20_usize {
        let (mut child, mut lines) =
            child_of_test("encryption::child_that_encrypts", (CHILD_HOME, home.folder.path()));
        assert!(lines.any(|line| line == "opened"), "round {round}: the child could not open the session");
        let mut saved_number = |line: String| {
            let number = line.strip_prefix("saved ")?.parse().ok();
            reported = number.unwrap_or(reported);
            number
        };
        lines.by_ref().filter_map(&mut saved_number).nth(round * 7 % 6).expect("the child saves");
        (0..round * 7919 % 40_000).for_each(|_| std::hint::spin_loop());
        child.kill().expect("killed");
        lines.for_each(|line| {
            saved_number(line);
        });
        child.wait().expect("gone");
        let saved = home.store().read(&name("a")).unwrap_or_else(|error| panic!("round {round}: {error}"));
        assert!(saved.turns.len() >= reported, "round {round}: {} of {reported}", saved.turns.len());
        assert_eq!(saved.num_tokens(), saved.turns.len() * PAGE);
        assert_eq!(has(&home.files(), b"secret"), None, "round {round}");
    }
    assert!(reported >= 20);
    // Opening finishes a rewrite that was cut short: one key of the session is left.
    drop(home.store().open(&name("a")).expect("opens"));
    let backup = home.files();
    home.store().remove(&name("a")).expect("removed");
    home.restore(&backup);
    let gone = refusal(home.store().read(&name("a")));
    assert!(gone.contains("it was erased"), "{gone}");
}

// ---- the program

fn asked(place: &Place, more: &[&str]) -> Value {
    let args = [&["run", "-m", "guide", "--temperature", "0", "--output", "json"], more].concat();
    serde_json::from_str(&place.run(&args).check(0, "").stdout).expect("JSON")
}

fn copy_of(place: &Place) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    read_below(&place.path(".local"), &mut files);
    read_below(&place.path(".cache/llmctl/kv"), &mut files);
    files
}

#[test]
fn answers_are_the_same_with_encryption_cold_and_warm_and_removal_holds_against_a_backup() {
    let place = Place::new();
    let rules = "Answer in one sentence. ".repeat(30);
    place.write("rules.txt", &rules);
    let first = ["--system-file", "rules.txt", "How do I save a session?"];
    let second = ["And how do I remove the flamingo session?"];
    let with = |flags: &[&str], session: &str| {
        let session = ["--session", session];
        let one = asked(&place, &[&session[..], flags, &first].concat());
        let two = asked(&place, &[&session[..], flags, &second].concat());
        (one, two)
    };
    let plain = with(&[], "plain");
    place.run(&["sessions", "rm", "plain", "--yes"]).check(0, "");
    let sealed = with(&["--encrypt", "keys"], "trip");
    assert_eq!((&sealed.0["text"], &sealed.1["text"]), (&plain.0["text"], &plain.1["text"]));
    assert_eq!(sealed.1["reuse"], plain.1["reuse"]);
    assert_eq!(sealed.1["reuse"]["reason"], "restored");
    let cold = asked(&place, &["--session", "trip", "--encrypt", "keys", "--no-warm-resume", "More?"]);
    assert_eq!(cold["usage"]["cached_tokens"], 0);
    let backup = copy_of(&place);
    assert_eq!(has(&backup, b"flamingo"), None);
    // Without keys: by name, with the flag, and nothing is written.
    let needs = "session \"trip\" is encrypted, and its folder of keys is needed (--encrypt DIR)";
    place.run(&["run", "-m", "guide", "--session", "trip", "hi"]).check(65, needs);
    place.run(&["sessions", "show", "trip"]).check(65, needs);
    place.run(&["sessions", "rm", "trip", "--yes"]).check(65, "its key has to be erased");
    assert!(place.run(&["sessions"]).check(0, "").stdout.contains("is encrypted"));
    assert_eq!(copy_of(&place), backup);
    let keys = ["--encrypt", "keys"];
    let shown = place.run(&[&["sessions", "show", "trip"], &keys[..]].concat()).check(0, "").stdout.clone();
    assert!(shown.contains("flamingo"), "{shown}");
    // Another master key.
    let master = fs::read(place.path("keys/master")).expect("there");
    fs::write(place.path("keys/master"), [9; 32]).expect("another");
    place.run(&[&["sessions", "show", "trip"], &keys[..]].concat()).check(65, "under another master key");
    fs::write(place.path("keys/master"), master).expect("put back");
    place.run(&[&["sessions", "rm", "trip", "--yes"], &keys[..]].concat()).check(0, "");
    for (path, content) in &backup {
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        fs::write(path, content).expect("put back");
    }
    place.run(&[&["sessions", "show", "trip"], &keys[..]].concat()).check(65, "it was erased");
    let again = asked(&place, &[&first[..], &["--session", "new"], &keys].concat());
    assert_eq!(again["text"], plain.0["text"]);
    assert_eq!(again["usage"]["cached_tokens"], 0, "the KV in the backup opens no more");
}

#[test]
fn flags_variables_and_commands_for_keys() {
    let place = Place::new();
    place.run(&["sessions", "--encrypt-key-command", "echo x"]).check(2, "give --encrypt DIR too");
    let mut empty = place.command(&["sessions"]);
    empty.env("LLMCTL_ENCRYPT", "");
    let empty = finish(empty, "");
    empty.check(2, "LLMCTL_ENCRYPT is empty");
    place.run(&["sessions", "--encrypt", "fresh"]).check(0, "fresh is a new folder of keys");
    let again = place.run(&["sessions", "--encrypt", "fresh"]);
    assert!(!again.check(0, "").stderr.contains("new folder"), "{again:?}");
    let by_command = ["--encrypt", "keys", "--encrypt-key-command", "printf 0123456789abcdef0123"];
    asked(&place, &[&["hi", "-n", "3", "--session", "a"], &by_command[..]].concat());
    assert!(!place.path("keys/master").exists());
    place.run(&[&["sessions", "show", "a"], &by_command[..]].concat()).check(0, "");
    let other = ["--encrypt", "keys", "--encrypt-key-command", "printf 0123456789abcdef0124"];
    place.run(&[&["sessions", "show", "a"], &other[..]].concat()).check(65, "under another master key");
    let failing = ["sessions", "--encrypt", "keys", "--encrypt-key-command", "exit 3"];
    place.run(&failing).check(1, "--encrypt-key-command: the command failed");
    // A plain session is refused and converted.
    let keys = ["--encrypt", "own"];
    asked(&place, &["hi", "-n", "3", "--session", "p"]);
    let goes_on = [&["run", "-m", "guide", "hi", "-n", "3", "--session", "p"], &keys[..]].concat();
    place.run(&goes_on).check(65, "llmctl sessions encrypt p");
    place.run(&["sessions", "encrypt", "p"]).check(2, "--encrypt DIR is missing");
    let told = place.run(&[&["sessions", "encrypt", "p"], &keys[..]].concat()).check(0, "").stdout.clone();
    assert!(told.starts_with("session p is encrypted\n"), "{told}");
    place.run(&goes_on).check(0, "");
    let exported = [&["sessions", "export", "p", "--with-kv", "p.zst"], &keys[..]].concat();
    let told = place.run(&exported).check(0, "").stdout.clone();
    assert!(told.contains("the file is not encrypted"), "{told}");
    let import = [&["sessions", "import", "p.zst", "--as", "q"], &keys[..]].concat();
    place.run(&import).check(0, "");
    place.run(&["sessions", "show", "q"]).check(65, "is encrypted");
    place
        .run(&[&["sessions", "import", "-", "--as", "r"], &keys[..]].concat())
        .check(2, "name the file instead");
}
