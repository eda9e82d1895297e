//! An undo, edit, restore or rename keeps removed turns as a branch, and files of the first schema still open.

use std::fs;

use llmctl_base::StoreError;
use llmctl_engine::session::store::{BranchReason, SessionWriter, StoredTurn};

use crate::common::prelude::*;

fn model() -> ModelFingerprint {
    ModelFingerprint {
        name: "m".to_owned(),
        fingerprint: "m-1".to_owned(),
        reference: Some("/models/m.gguf".to_owned()),
    }
}

/// As an older llmctl knows it.
fn model_v1() -> ModelFingerprint {
    ModelFingerprint { reference: None, ..model() }
}

fn turn(text: &str) -> StoredTurn {
    stored_turn([text, "yes"], 0, vec![1, 2], vec![3])
}

struct Place {
    folder: TempDir,
    store: SessionStore,
}

impl Place {
    fn new() -> Self {
        let folder = TempDir::new().expect("a scratch folder");
        let store = SessionStore::new(folder.path()).of_owner("anna");
        Self { folder, store }
    }

    fn path(&self, session: &str) -> PathBuf {
        self.folder.path().join(".owners/anna").join(session).join("transcript.jsonl")
    }

    fn session(&self, session: &str, turns: &[&str]) -> SessionWriter {
        let mut writer = self.store.create(&name(session), &model()).expect("created");
        turns.iter().for_each(|text| writer.append(&model(), &turn(text)).expect("saved"));
        writer
    }

    /// A closed session as the first schema tells it.
    fn session_v1(&self, session: &str, turns: &[&str]) {
        drop(self.session(session, turns));
        let mut chain = String::new();
        let mut text = String::new();
        for line in self.lines(session) {
            let mut record = line["record"].clone();
            if record["type"] == "header" {
                let header = record.as_object_mut().expect("an object");
                header.insert("schema".to_owned(), "llmctl.session.v1".into());
                header.retain(|key, _| key != "id" && key != "owner");
                header["model"].as_object_mut().expect("an object").retain(|key, _| key != "reference");
            }
            let body = record.to_string();
            chain = format!("{:08x}", crc32fast::hash(format!("{chain}{body}").as_bytes()));
            text.push_str(&format!("{{\"crc32\":\"{chain}\",\"record\":{body}}}\n"));
        }
        fs::write(self.path(session), text).expect("written");
    }

    fn lines(&self, session: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(session)).expect("there");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    fn schema(&self, session: &str) -> String {
        self.lines(session)[0]["record"]["schema"].as_str().expect("a text").to_owned()
    }

    fn texts(&self, session: &str) -> Vec<String> {
        texts(
            &self
                .store
                .read(&name(session))
                .expect("readable")
                .turns
                .iter()
                .map(|t| t.turn.clone())
                .collect::<Vec<_>>(),
        )
    }

    fn names(&self) -> Vec<String> {
        self.store.list().expect("listed").iter().map(|listed| listed.name.to_string()).collect()
    }

    fn branches(&self, session: &str) -> Vec<String> {
        let branches = self.store.branches(&name(session)).expect("listed");
        branches.iter().map(|listed| listed.name.to_string()).collect()
    }
}

fn texts(turns: &[StoredTurn]) -> Vec<String> {
    let text = |turn: &StoredTurn| match &turn.messages[0].content {
        Some(Content::Text(text)) => text.clone(),
        other => panic!("no text: {other:?}"),
    };
    turns.iter().map(text).collect()
}

#[test]
fn a_session_knows_its_owner_and_what_reopens_its_model() {
    let place = Place::new();
    drop(place.session("a", &["1"]));
    place.store.rename(&name("a"), &name("b")).expect("renamed");
    drop(place.store.fork(&name("b"), &name("c"), None).expect("forked"));
    for listed in place.store.list().expect("listed") {
        let summary = listed.summary.expect("readable");
        assert_eq!((summary.owner.as_deref(), summary.model), (Some("anna"), model()), "{}", listed.name);
    }
    let moved = ModelFingerprint { reference: Some("hf:o/r@c:m.gguf".to_owned()), ..model() };
    place.store.open(&name("c")).expect("opened").append(&moved, &turn("2")).expect("saved");
    let saved = place.store.read(&name("c")).expect("readable");
    let references: Vec<_> = saved.turns.iter().map(|turn| turn.model.reference.as_deref()).collect();
    assert_eq!(references, [Some("/models/m.gguf"), Some("hf:o/r@c:m.gguf")]);
    assert_eq!(saved.tokens_of(&model()).map(|tokens| tokens.ids.len()), Some(3), "the same model elsewhere");
    let local = SessionStore::new(place.folder.path());
    let unowned = local.create(&name("d"), &model_v1()).expect("created");
    assert_eq!((&unowned.saved().owner, &unowned.saved().model.reference), (&None, &None));
}

#[test]
fn a_file_of_the_first_schema_stays_one_until_it_must_say_more() {
    let place = Place::new();
    place.session_v1("a", &["1", "2", "3"]);
    let before = fs::read(place.path("a")).expect("there");
    let mut writer = place.store.open(&name("a")).expect("opened");
    let id = writer.saved().id.clone();
    assert_eq!(fs::read(place.path("a")).expect("there"), before, "opening changes nothing");
    writer.truncate(2).expect("undone");
    writer.append(&model_v1(), &turn("4")).expect("saved");
    drop(writer);
    place.store.rename(&name("a"), &name("b")).expect("renamed");
    assert_eq!(place.schema("b"), "llmctl.session.v1");
    let old_lines = place.lines("b");
    assert_eq!(&fs::read(place.path("b")).expect("there")[..before.len()], before);

    let mut writer = place.store.open(&name("b")).expect("opened");
    writer.append(&model(), &turn("5")).expect("saved, with the reference");
    drop(writer);
    assert_eq!(place.schema("b"), "llmctl.session.v2");
    assert_eq!(place.texts("b"), ["1", "2", "4", "5"]);
    let saved = place.store.read(&name("b")).expect("readable");
    assert_eq!((saved.id, saved.model.reference.as_deref()), (id, Some("/models/m.gguf")));
    let lines = place.lines("b");
    let record = |line: &Value| line["record"].clone();
    let kept: Vec<Value> = lines[1..old_lines.len()].iter().map(record).collect();
    let old: Vec<Value> = old_lines[1..].iter().map(record).collect();
    assert_eq!(kept, old, "also what was undone");
    assert_eq!(lines.len(), old_lines.len() + 2, "the model and the turn");
}

#[test]
fn a_record_of_a_later_schema_than_the_header_s_is_damage() {
    let place = Place::new();
    place.session_v1("a", &["1"]);
    let chain = place.lines("a")[1]["crc32"].as_str().expect("a text").to_owned();
    let body = r#"{"type":"model","model":{"name":"m","fingerprint":"f","reference":"r"}}"#;
    let crc = crc32fast::hash(format!("{chain}{body}").as_bytes());
    let mut text = fs::read_to_string(place.path("a")).expect("there");
    text.push_str(&format!("{{\"crc32\":\"{crc:08x}\",\"record\":{body}}}\n"));
    fs::write(place.path("a"), text).expect("written");
    let error = place.store.read(&name("a")).expect_err("an older llmctl would refuse it too");
    assert!(matches!(error, Error::Store(StoreError::Damaged { line: 3, .. })), "{error}");
}

#[test]
fn what_is_taken_back_is_kept_in_a_branch_and_comes_back() {
    let place = Place::new();
    let mut writer = place.session("trip", &["1", "2", "3"]);
    let undone = writer.keep(BranchReason::Undo).expect("kept").expect("there are turns");
    writer.truncate(2).expect("undone");
    assert_eq!((undone.as_str(), place.texts("trip~1").len(), place.texts("trip").len()), ("trip~1", 3, 2));
    assert_eq!(
        writer.keep(BranchReason::Undo).expect("kept"),
        Some(undone.clone()),
        "the branch holds it already"
    );
    let listed = place.store.branches(&name("trip")).expect("listed");
    let branch = listed[0].branch().expect("a branch");
    assert_eq!((branch.reason, branch.of.as_str()), (BranchReason::Undo, writer.saved().id.as_str()));
    assert_eq!(listed[0].summary.as_ref().expect("readable").owner.as_deref(), Some("anna"));

    assert_eq!(writer.restore(&undone).expect("restored"), None, "nothing else was there");
    assert_eq!(
        (place.texts("trip"), place.names()),
        (vec!["1".into(), "2".into(), "3".into()], vec!["trip".to_owned()])
    );
    assert_eq!(writer.saved().turns.len(), 3);

    writer.keep(BranchReason::Edit).expect("kept");
    writer.append_after(1, &model(), &turn("other")).expect("edited");
    let swapped = writer.restore(&name("trip~1")).expect("restored").expect("what it held is kept");
    assert_eq!(place.texts("trip"), ["1", "2", "3"]);
    assert_eq!((swapped.as_str(), place.texts("trip~2")), ("trip~2", vec!["1".to_owned(), "other".into()]));
    writer.append(&model(), &turn("4")).expect("goes on");
    assert_eq!(place.names(), ["trip", "trip~2"]);
    let empty = place.store.create(&name("empty"), &model()).expect("created");
    assert_eq!(empty.keep(BranchReason::Reset).expect("nothing to do"), None);
}

#[test]
fn branches_follow_their_session_by_what_it_is_not_by_its_name() {
    let place = Place::new();
    drop(place.session("trip", &["1", "2"]));
    drop(place.store.branch(&name("trip"), Some(1), BranchReason::Request).expect("branched"));
    let mut branch = place.store.open(&name("trip~1")).expect("opened");
    branch.append(&model(), &turn("2b")).expect("saved");
    let second = branch.branch(None, BranchReason::Edit).expect("branched off a branch");
    assert_eq!(second.name().as_str(), "trip~2");
    drop((branch, second));
    place.store.rename(&name("trip"), &name("oslo")).expect("renamed");
    drop(place.session("trip", &["another"]));
    assert_eq!(place.branches("oslo"), ["trip~1", "trip~2"]);
    assert_eq!(place.branches("trip~2"), ["trip~1", "trip~2"], "of the same session");
    assert!(place.branches("trip").is_empty());
    assert_eq!(place.store.session_of(&name("trip~2")).expect("found"), Some(name("oslo")));
    let mut other = place.store.open(&name("trip")).expect("opened");
    let error = other.restore(&name("trip~1")).expect_err("another session's");
    assert!(matches!(error, Error::InvalidParameter { name: "branch", .. }), "{error}");
    drop(other);
    let (session, kept) = place.store.restore(&name("trip~2")).expect("restored");
    assert_eq!((session.as_str(), kept.map(|kept| kept.to_string())), ("oslo", Some("oslo~1".to_owned())));
    assert_eq!(
        (place.texts("oslo"), place.texts("oslo~1")),
        (vec!["1".to_owned(), "2b".into()], vec!["1".to_owned(), "2".into()])
    );

    place.store.rename(&name("trip~1"), &name("bergen")).expect("renamed");
    assert_eq!(place.branches("oslo"), ["oslo~1"], "a name of its own makes it a session");
    assert!(place.store.read(&name("bergen")).expect("readable").branch().is_none());
    place.store.remove(&name("oslo")).expect("removed");
    assert_eq!(place.store.session_of(&name("oslo~1")).expect("read"), None);
    let error = place.store.restore(&name("oslo~1")).map(drop).expect_err("its session is gone");
    assert!(matches!(&error, Error::SessionNotFound(name) if name == "oslo"), "{error}");
    let error = place.store.restore(&name("bergen")).map(drop).expect_err("no branch");
    assert!(matches!(error, Error::InvalidParameter { name: "branch", .. }), "{error}");
}

#[test]
fn a_branch_that_cannot_be_read_is_found_by_its_name() {
    let place = Place::new();
    let writer = place.session("trip", &["1", "2"]);
    (0..2).for_each(|_| drop(writer.branch(None, BranchReason::Edit).expect("branched")));
    drop((writer, place.session("other", &["1"])));
    fs::write(place.path("trip%7e1"), "damaged\n").expect("written");
    assert_eq!(place.branches("trip"), ["trip~2", "trip~1"], "at the end");
    assert_eq!(place.branches("trip~2"), ["trip~2", "trip~1"]);
    assert!(place.branches("other").is_empty());
    let package = place.store.pack(&name("trip"), |_, _| None).expect("packed");
    assert!(package.notices[0].starts_with("branch trip~1 is left out: "), "{:?}", package.notices);
}

#[test]
fn branches_of_long_names_and_of_names_that_look_like_branches_are_free() {
    let place = Place::new();
    for long in ["x".repeat(128), format!("a~{}", "9".repeat(40)), "a~1".to_owned(), "a~01".to_owned()] {
        let writer = place.session(&long.clone(), &["1"]);
        let names: Vec<String> = (0..12)
            .map(|_| writer.branch(None, BranchReason::Retry).expect("branched").name().to_string())
            .collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), 12, "{names:?}");
        assert_eq!(place.branches(&long), names);
    }
}

#[test]
fn only_what_never_had_a_turn_is_removed_as_empty() {
    let place = Place::new();
    assert!(place.session("a", &[]).remove_if_empty().expect("removed"));
    assert!(!place.session("b", &["1"]).remove_if_empty().expect("kept"));
    let mut undone = place.session("c", &["1"]);
    undone.truncate(0).expect("undone");
    assert!(!undone.remove_if_empty().expect("kept"), "the turn is in the file");
    assert_eq!(place.names(), ["b", "c"]);
}
