//! Removing a session takes what only it used, in files and in KV: what others begin with stays warm, and no deleted text
//! stays in clear.

use std::fs;

use llmctl_engine::session::store::{BranchReason, Forgotten, SessionWriter, StoredTurn};
use llmctl_models::kv::disk::{DiskPageKey, PageLabel, Saving, names};

use crate::common::prelude::*;

/// Tokens per page of KV.
const PAGE: usize = PAGE_TOKENS;

fn model() -> ModelFingerprint {
    ModelFingerprint { name: "m".to_owned(), fingerprint: "f".to_owned(), reference: None }
}

/// As many tokens as `pages` pages have; those of one `text` are its own.
fn tokens(text: u32, pages: usize) -> Vec<u32> {
    (0..(pages * PAGE) as u32).map(|n| text * 100_000 + n).collect()
}

/// A turn whose answer ends the conversation's tokens with `added`, after the first `kept`.
fn turn(kept: usize, added: Vec<u32>) -> StoredTurn {
    stored_turn(["?", "!"], kept, added, vec![])
}

struct Place {
    folder: TempDir,
    store: SessionStore,
}

impl Place {
    fn new() -> Self {
        let folder = TempDir::new().expect("a scratch folder");
        let store = SessionStore::new(folder.path().join("sessions")).with_kv(Some(folder.path().join("kv")));
        Self { folder, store }
    }

    /// A session that says one text after the other, each of so many pages, all on disk.
    fn session(&self, session: &str, texts: &[(u32, usize)]) -> SessionWriter {
        let mut writer = self.store.create(&name(session), &model()).expect("created");
        let mut all = Vec::new();
        for &(text, pages) in texts {
            writer.append(&model(), &turn(all.len(), tokens(text, pages))).expect("saved");
            all.extend(tokens(text, pages));
        }
        self.save(&all);
        writer
    }

    /// Puts the pages of a sequence on disk, as the engine does.
    fn save(&self, tokens: &[u32]) {
        for fingerprint in ["f", "other"] {
            let store = DiskStore::open(DiskConfig {
                root: self.folder.path().join("kv"),
                limit_bytes: 1 << 30,
                fingerprint: fingerprint.to_owned(),
                description: serde_json::json!({}),
                queue_bytes: 1 << 20,
                vault: None,
            });
            let store = store.expect("opened");
            let mut parent = None;
            for (number, (name, tokens)) in names(tokens).zip(tokens.chunks(PAGE)).enumerate() {
                let key = DiskPageKey { name, group: 0 };
                let label = PageLabel { key, parent, tokens: tokens.into(), depth: number as u32 };
                assert_ne!(store.save(label, vec![7; 16]), Saving::Dropped);
                parent = Some(name);
            }
            assert!(store.flush(Duration::from_secs(60)));
        }
    }

    /// The texts of which any page is on disk, by their first tokens.
    fn texts_on_disk(&self) -> BTreeSet<u32> {
        let files = files_below(&self.folder.path().join("kv")).into_iter();
        let pages = files.filter(|path| path.extension().is_some_and(|extension| extension == "kv"));
        let first = |path: PathBuf| {
            let bytes = fs::read(path).expect("readable");
            u32::from_le_bytes(bytes[96..100].try_into().expect("four bytes")) / 100_000
        };
        pages.map(first).collect()
    }

    fn remove(&self, session: &str) -> Forgotten {
        self.store.remove(&name(session)).expect("removed")
    }

    fn transcript(&self, session: &str) -> PathBuf {
        self.folder.path().join("sessions").join(session).join("transcript.jsonl")
    }
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.file_type().expect("known").is_dir() {
            true => files.extend(files_below(&entry.path())),
            false => files.push(entry.path()),
        }
    }
    files
}

fn texts(texts: &[u32]) -> BTreeSet<u32> {
    texts.iter().copied().collect()
}

#[test]
fn only_pages_that_no_other_session_begins_with_go() {
    let place = Place::new();
    // 1 is a system prompt that three share; a fork shares all.
    drop(place.session("a", &[(1, 2), (2, 3)]));
    drop(place.session("b", &[(1, 2), (3, 1)]));
    drop(place.session("c", &[(4, 1)]));
    drop(place.store.fork(&name("a"), &name("fork"), Some(2)).expect("forked"));
    let kept = place.remove("a");
    assert_eq!(
        (kept.num_pages, place.texts_on_disk()),
        (0, texts(&[1, 2, 3, 4])),
        "the fork goes on with all"
    );
    let removed = place.remove("fork");
    assert_eq!(removed, Forgotten { num_pages: 6, ..Forgotten::default() }, "three pages of two models");
    assert_eq!(place.texts_on_disk(), texts(&[1, 3, 4]), "what b begins with stays");
    place.remove("b");
    assert_eq!(place.texts_on_disk(), texts(&[4]));
    place.remove("c");
    assert_eq!(place.texts_on_disk(), texts(&[]));
}

#[test]
fn text_that_was_edited_undone_or_never_saved_goes_too() {
    let place = Place::new();
    let mut writer = place.session("a", &[(1, 1), (2, 2)]);
    writer.append_after(1, &model(), &turn(PAGE, tokens(3, 1))).expect("edited");
    place.save(&[tokens(1, 1), tokens(3, 1)].concat());
    writer.truncate(1).expect("undone");
    // An answer that was stopped before its first token is in no transcript.
    place.save(&[tokens(1, 1), tokens(5, 2)].concat());
    drop(writer);
    assert_eq!(place.texts_on_disk(), texts(&[1, 2, 3, 5]));
    place.remove("a");
    assert_eq!(place.texts_on_disk(), texts(&[]));
}

#[test]
fn purging_erases_what_does_not_count_and_keeps_the_conversation_and_its_branches() {
    let place = Place::new();
    let mut writer = place.session("a", &[(1, 1), (2, 1)]);
    writer.append_after(1, &model(), &turn(PAGE, tokens(3, 1))).expect("edited, without a branch");
    place.save(&[tokens(1, 1), tokens(3, 1)].concat());
    let branch = writer.keep(BranchReason::Undo).expect("kept").expect("a branch");
    writer.truncate(1).expect("undone");
    let saved = writer.saved().clone();
    drop(writer);
    fs::copy(place.transcript("a"), place.transcript("a").with_file_name("transcript.damaged-1.jsonl"))
        .expect("copied");
    let purged = place.store.purge(&name("a")).expect("purged");
    assert_eq!(purged.kv.num_pages, 2, "of the edited turn, of two models");
    assert!(purged.num_bytes > 0);
    assert_eq!(place.texts_on_disk(), texts(&[1, 3]), "what the branch holds stays");
    let text = fs::read_to_string(place.transcript("a")).expect("there");
    assert!(!text.contains("200000") && !text.contains("300000") && text.contains("100000"), "{text}");
    let left = files_below(place.transcript("a").parent().expect("a folder")).len();
    assert_eq!(left, 2, "the transcript and the lock");
    let now = place.store.read(&name("a")).expect("readable");
    assert_eq!((now.turns, now.id, now.created_ms), (saved.turns, saved.id, saved.created_ms));
    assert_eq!(place.store.read(&branch).expect("readable").turns.len(), 2);
}

#[test]
fn damage_of_one_session_stops_no_erasing_of_anothers_text() {
    let place = Place::new();
    drop(place.session("a", &[(1, 1), (2, 1), (6, 1)]));
    drop(place.session("damaged", &[(1, 1), (2, 1), (6, 1), (7, 1)]));
    drop(place.session("elsewhere", &[(1, 1), (8, 1)]));
    for (session, line) in [("damaged", 3), ("elsewhere", 2)] {
        let text = fs::read_to_string(place.transcript(session)).expect("there");
        let lines: Vec<&str> = text.lines().collect();
        let cut: Vec<&str> =
            lines.iter().enumerate().map(|(at, text)| if at == line { "garbage" } else { text }).collect();
        fs::write(place.transcript(session), cut.join("\n") + "\n").expect("damaged");
    }
    // "damaged" lost its third turn, and may have gone on as "a" does: then it computes that again, with what follows.
    let removed = place.remove("a");
    assert_eq!((removed.num_pages, place.texts_on_disk()), (4, texts(&[1, 2, 8])));
    assert_eq!(removed.unreadable, [name("damaged"), name("elsewhere")]);
    assert!(removed.warning().expect("a warning").ends_with("compute erased KV again: damaged, elsewhere"));
    place.remove("damaged");
    place.remove("elsewhere");
    drop(place.session("b", &[(9, 1)]));
    drop(place.session("c", &[(10, 1), (11, 1)]));
    let text = fs::read_to_string(place.transcript("c")).expect("there");
    fs::write(place.transcript("c"), text.replacen("header", "hEader", 1)).expect("damaged");
    assert_eq!(place.remove("b").num_pages, 2, "c says enough to be known to use other pages");
}

#[test]
fn restoring_a_branch_keeps_its_pages() {
    let place = Place::new();
    let mut writer = place.session("a", &[(1, 1), (2, 1)]);
    let branch = writer.keep(BranchReason::Undo).expect("kept").expect("a branch");
    writer.truncate(0).expect("undone");
    writer.restore(&branch).expect("restored");
    assert_eq!(place.texts_on_disk(), texts(&[1, 2]));
}

#[test]
fn what_a_compaction_erases_leaves_no_kv() {
    let place = Place::new();
    let mut writer = place.session("a", &[(1, 1), (2, 1)]);
    writer.truncate(1).expect("undone");
    assert_eq!(writer.compact().expect("compacted").num_pages, 2, "of two models");
    assert_eq!(place.texts_on_disk(), texts(&[1]));
}
