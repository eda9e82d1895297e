//! Sessions survive what happens to processes and disks: a kill at any moment, cut, flipped and missing bytes, folders that
//! cannot be written, a second process. Nothing that was reported as saved is lost, and nothing panics.

use std::fs;
use std::io::Write;

use llmctl_base::StoreError;
use llmctl_engine::session::store::StoredTurn;
use llmctl_engine::session::transcript::{SplicedSegment, Transcript};

use crate::common::prelude::*;
#[cfg(unix)]
use crate::common::unprivileged;

fn model(name: &str) -> ModelFingerprint {
    ModelFingerprint { name: name.to_owned(), fingerprint: format!("{name}-1"), reference: None }
}

/// The `n`th turn (from 1) of a conversation; each keeps all before it, 6 tokens per turn.
fn turn(n: usize) -> StoredTurn {
    let id = n as u32;
    StoredTurn {
        messages: vec![
            Message::user(format!("question {n} \u{20ac}")),
            Message::assistant(format!("answer {n}\n")),
        ],
        kept_tokens: 6 * (n - 1),
        prompt_tail: vec![id, id + 1, id + 2, id + 3],
        generated: vec![id + 100, id + 200],
        adapters: Vec::new(),
        spans: Vec::new(),
        splice_after: Some(format!("<user>{n}<assistant>")),
        sampling: Sampling { temperature: 0.7, seed: Some(n as u64), ..Sampling::default() },
        finish: Finish::Eos(2),
        usage: Usage {
            prompt_tokens: 6 * (n - 1) + 4,
            cached_tokens: 6 * (n - 1),
            completion_tokens: 2,
            ..Usage::default()
        },
        started_ms: 1_700_000_000_000 + n as u64,
        finished_ms: 1_700_000_000_500 + n as u64,
        receipt: None,
    }
}

fn store() -> (TempDir, SessionStore) {
    let folder = TempDir::new().expect("a scratch folder");
    let store = SessionStore::new(folder.path().join("state/sessions"));
    (folder, store)
}

/// A session of `turns` turns, closed.
fn saved(store: &SessionStore, session: &str, turns: usize) {
    let mut writer = store.create(&name(session), &model("m")).expect("created");
    (1..=turns).for_each(|n| writer.append(&model("m"), &turn(n)).expect("saved"));
}

fn transcript_path(folder: &TempDir, session: &str) -> PathBuf {
    folder.path().join("state/sessions").join(session).join("transcript.jsonl")
}

fn turns_of(store: &SessionStore, session: &str) -> Vec<StoredTurn> {
    let saved = store.read(&name(session)).expect("readable");
    saved.turns.iter().map(|saved| saved.turn.clone()).collect()
}

fn first_turns(count: usize) -> Vec<StoredTurn> {
    (1..=count).map(turn).collect()
}

/// SplitMix64, for cuts that are random and the same every time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

#[test]
fn a_session_comes_back_with_all_it_had() {
    let (folder, store) = store();
    assert!(store.list().expect("no folder yet").is_empty());
    saved(&store, "work", 3);
    assert_eq!(turns_of(&store, "work"), first_turns(3));
    let mut writer = store.open(&name("work")).expect("opened");
    assert!(writer.notices().is_empty());
    writer.append(&model("other"), &turn(4)).expect("saved");
    let session = store.read(&name("work")).expect("readable while it is open");
    assert_eq!(&session, writer.saved());
    assert_eq!(session.tokens().len(), 24);
    assert_eq!(session.tokens()[18..], [4, 5, 6, 7, 104, 204]);
    let models: Vec<&str> = session.turns.iter().map(|saved| saved.model.name.as_str()).collect();
    assert_eq!(models, ["m", "m", "m", "other"]);
    let listed = store.list().expect("listed");
    let summary = listed[0].summary.as_ref().expect("readable");
    assert_eq!((listed.len(), listed[0].name.as_str(), summary.turns, summary.tokens), (1, "work", 4, 24));
    assert_eq!((summary.last_used_ms >= turn(4).finished_ms, &summary.model), (true, &model("other")));
    assert_eq!(summary.num_bytes, fs::metadata(transcript_path(&folder, "work")).expect("there").len());
    let first = fs::read_to_string(transcript_path(&folder, "work")).expect("text");
    let header: Value = serde_json::from_str(first.lines().next().expect("a line")).expect("JSON");
    assert_eq!(header["record"]["schema"], "llmctl.session.v2");
}

#[cfg(unix)]
#[test]
fn only_the_owner_can_read_sessions() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, store) = store();
    saved(&store, "a", 1);
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
    let transcript = transcript_path(&folder, "a");
    let session = transcript.parent().expect("a folder");
    assert_eq!((mode(&transcript), mode(&session.join("lock"))), (0o600, 0o600));
    assert_eq!((mode(session), mode(session.parent().expect("a folder"))), (0o700, 0o700));
    store.open(&name("a")).expect("opened").compact().expect("compacted");
    assert_eq!(mode(&transcript), 0o600);
}

#[test]
fn undo_edit_and_compaction_keep_what_counts() {
    let (folder, store) = store();
    saved(&store, "a", 4);
    let mut writer = store.open(&name("a")).expect("opened");
    writer.truncate(2).expect("undone");
    writer.truncate(2).expect("nothing to do");
    let refused = writer.truncate(3).expect_err("gone");
    assert!(matches!(refused, Error::InvalidParameter { .. }), "{refused}");
    let edited = StoredTurn { kept_tokens: 9, prompt_tail: vec![90, 91, 92], ..turn(3) };
    writer.append(&model("m"), &edited).expect("saved");
    let gap = writer
        .append(&model("m"), &StoredTurn { kept_tokens: 99, ..turn(4) })
        .expect_err("keeps what is not there");
    assert!(matches!(gap, Error::InvalidParameter { .. }), "{gap}");
    let wanted = [turn(1), turn(2), edited];
    assert_eq!(turns_of(&store, "a"), wanted);
    let tokens = writer.saved().tokens();
    assert_eq!(tokens[..9], [1, 2, 3, 4, 101, 201, 2, 3, 4], "the third turn keeps half of the second");
    assert_eq!(tokens[9..], [90, 91, 92, 103, 203]);
    let long = fs::metadata(transcript_path(&folder, "a")).expect("there").len();
    writer.compact().expect("compacted");
    assert!(fs::metadata(transcript_path(&folder, "a")).expect("there").len() < long);
    writer.append(&model("m2"), &StoredTurn { kept_tokens: 14, ..turn(4) }).expect("saved after compaction");
    writer.compact().expect("compacted");
    drop(writer);
    assert_eq!(turns_of(&store, "a")[..3], wanted);
    assert_eq!(store.read(&name("a")).expect("readable").turns[3].model.name, "m2");
    store.open(&name("a")).expect("opened").truncate(0).expect("emptied");
    assert!(turns_of(&store, "a").is_empty());
}

#[test]
fn forks_renames_and_removals() {
    let (_folder, store) = store();
    saved(&store, "a", 3);
    let fork = store.fork(&name("a"), &name("b/c".replace('/', ":").as_str()), Some(2)).expect("forked");
    assert_eq!(fork.saved().fork_of.as_ref().map(|fork| (fork.name.as_str(), fork.turns)), Some(("a", 2)));
    assert_eq!(fork.saved().turns.len(), 2);
    drop(fork);
    assert_eq!(turns_of(&store, "b:c"), first_turns(2));
    assert_eq!(store.read(&name("b:c")).expect("readable").fork_of.map(|fork| fork.turns), Some(2));
    for (what, result) in [
        ("too many turns", store.fork(&name("a"), &name("d"), Some(4)).map(drop)),
        ("taken", store.fork(&name("a"), &name("b:c"), None).map(drop)),
        ("taken", store.create(&name("a"), &model("m")).map(drop)),
        ("taken", store.rename(&name("a"), &name("b:c"))),
    ] {
        let error = result.expect_err(what);
        assert!(matches!(error, Error::InvalidParameter { .. }), "{what}: {error}");
    }
    store.rename(&name("a"), &name("A")).expect("another name, also where case does not count");
    saved(&store, "a", 1);
    assert_eq!((turns_of(&store, "A").len(), turns_of(&store, "a").len()), (3, 1));
    store.open(&name("A")).expect("opened").append(&model("m"), &turn(4)).expect("saved");
    let names: Vec<String> = store.list().expect("listed").iter().map(|l| l.name.to_string()).collect();
    assert_eq!(names, ["A", "a", "b:c"]);
    store.remove(&name("A")).expect("removed");
    for error in [
        store.remove(&name("A")).expect_err("gone"),
        store.open(&name("A")).map(drop).expect_err("gone"),
        store.read(&name("A")).map(drop).expect_err("gone"),
        store.rename(&name("A"), &name("x")).expect_err("gone"),
        store.fork(&name("A"), &name("x"), None).map(drop).expect_err("gone"),
    ] {
        assert!(matches!(&error, Error::SessionNotFound(name) if name == "A"), "{error}");
    }
    assert_eq!(turns_of(&store, "a").len(), 1, "its namesake stays");
}

#[test]
fn a_kill_at_any_moment_of_writing_keeps_every_finished_turn() {
    let (folder, store) = store();
    saved(&store, "a", 12);
    let path = transcript_path(&folder, "a");
    let whole = fs::read(&path).expect("there");
    let ends: Vec<usize> =
        whole.iter().enumerate().filter(|(_, b)| **b == b'\n').map(|(at, _)| at + 1).collect();
    let mut random = Random(1);
    for _ in 0..200 {
        let cut = ends[0] + random.below(whole.len() - ends[0] + 1);
        fs::write(&path, &whole[..cut]).expect("cut");
        let finished = ends.iter().filter(|end| **end <= cut).count() - 1;
        let is_whole_but_for_the_feed = ends.contains(&(cut + 1));
        let kept = finished + usize::from(is_whole_but_for_the_feed);
        assert_eq!(turns_of(&store, "a"), first_turns(kept), "cut at {cut}, read");
        let mut writer = store.open(&name("a")).unwrap_or_else(|error| panic!("cut at {cut}: {error}"));
        assert_eq!(writer.notices().len(), usize::from(!ends.contains(&cut)), "cut at {cut}");
        (kept + 1..=12).for_each(|n| writer.append(&model("m"), &turn(n)).expect("saved"));
        assert!(fs::read(&path).expect("there") == whole, "cut at {cut}: goes on as if nothing had been");
    }
}

#[test]
fn truncated_and_garbled_files_never_panic_and_repair_keeps_what_is_intact() {
    let (folder, store) = store();
    saved(&store, "a", 4);
    let path = transcript_path(&folder, "a");
    let whole = fs::read(&path).expect("there");
    let lines = |bytes: &[u8]| bytes.iter().filter(|b| **b == b'\n').count();
    let mut random = Random(2);
    for _ in 0..300 {
        let mut bytes = whole.clone();
        let at = random.below(whole.len() - 1);
        bytes[at] ^= 1 << random.below(8);
        fs::write(&path, &bytes).expect("flipped");
        let damaged_line = lines(&whole[..at]) + 1;
        let error = store.read(&name("a")).map(drop).expect_err("a flipped bit");
        let Error::Store(StoreError::Damaged { line, path: named, .. }) = &error else {
            panic!("{at}: {error}")
        };
        assert_eq!((*line, named), (damaged_line, &path), "byte {at}");
        assert!(store.open(&name("a")).is_err(), "nothing is written behind damage");
        assert!(store.list().expect("listed")[0].summary.is_err(), "listed with its problem");
        assert!(fs::read(&path).expect("there") == bytes, "and nothing is changed unasked");
        if damaged_line == 1 {
            assert!(store.repair(&name("a")).is_err(), "nothing to keep");
            continue;
        }
        let repaired = store.repair(&name("a")).expect("repaired").expect("there was damage");
        assert_eq!((repaired.line, repaired.turns), (damaged_line, damaged_line - 2));
        assert!(fs::read(&repaired.backup).expect("kept") == bytes);
        assert_eq!(turns_of(&store, "a"), first_turns(repaired.turns));
        fs::remove_file(repaired.backup).expect("tidied");
        assert_eq!(store.repair(&name("a")).expect("fine now"), None);
    }
    for _ in 0..100 {
        fs::write(&path, &whole[..random.below(whole.len())]).expect("cut");
        drop((store.read(&name("a")), store.open(&name("a")).map(drop)));
        let garbage: Vec<u8> = (0..random.below(300)).map(|_| random.below(256) as u8).collect();
        fs::write(&path, [&whole[..random.below(whole.len())], &garbage].concat()).expect("garbled");
        drop((store.read(&name("a")), store.repair(&name("a")), store.open(&name("a")).map(drop)));
    }
    store.remove(&name("a")).expect("what is damaged can be removed");
}

#[test]
fn what_a_newer_llmctl_wrote_is_refused_and_left_alone() {
    let (folder, store) = store();
    saved(&store, "a", 1);
    let path = transcript_path(&folder, "a");
    let body = r#"{"type":"header","schema":"llmctl.session.v7","soul":true}"#;
    let line = format!("{{\"crc32\":\"{:08x}\",\"record\":{body}}}\n", crc32_by_the_bit(body.as_bytes()));
    fs::write(&path, &line).expect("written");
    for result in [
        store.open(&name("a")).map(drop),
        store.read(&name("a")).map(drop),
        store.repair(&name("a")).map(drop),
    ] {
        let error = result.expect_err("newer");
        assert!(matches!(&error, Error::Store(StoreError::Unsupported { .. })), "{error}");
        assert!(error.to_string().contains("llmctl.session.v7"), "{error}");
    }
    assert_eq!(fs::read_to_string(&path).expect("there"), line);
}

/// The textbook form, unlike the store's table.
fn crc32_by_the_bit(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for &byte in bytes {
        crc ^= u32::from(byte);
        (0..8).for_each(|_| crc = if crc & 1 == 1 { crc >> 1 ^ 0xEDB8_8320 } else { crc >> 1 });
    }
    !crc
}

#[test]
fn folders_that_cannot_be_written_are_errors_with_a_path() {
    let (folder, store) = store();
    saved(&store, "a", 2);
    let file = folder.path().join("file");
    fs::write(&file, "").expect("a file");
    let mut nowhere = vec![SessionStore::new(&file), SessionStore::new(file.join("below"))];
    if cfg!(target_os = "linux") {
        nowhere.push(SessionStore::new("/proc/self/sessions"));
    }
    for store in nowhere {
        let error = store.create(&name("x"), &model("m")).map(drop).expect_err("no folder can be there");
        assert!(matches!(&error, Error::Store(StoreError::Io { .. })), "{error}");
    }
    let path = transcript_path(&folder, "a");
    fs::remove_file(&path).expect("removed");
    fs::create_dir(&path).expect("a folder in its place");
    let error = store.read(&name("a")).map(drop).expect_err("not a file");
    assert!(matches!(&error, Error::Store(StoreError::Io { path: named, .. }) if *named == path), "{error}");
}

#[cfg(unix)]
#[test]
fn a_read_only_folder_can_be_read() {
    if !unprivileged(read_in_a_read_only_folder) {
        crate::common::skip("this user may write everywhere");
    }
}

#[cfg(unix)]
fn read_in_a_read_only_folder() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, store) = store();
    saved(&store, "a", 2);
    let root = folder.path().join("state/sessions");
    let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("ours");
    set(&root, 0o500);
    set(&root.join("a"), 0o500);
    set(&root.join("a/lock"), 0o400);
    set(&root.join("a/transcript.jsonl"), 0o400);
    fs::write(root.join("probe"), "").expect_err("read-only");
    assert_eq!(turns_of(&store, "a"), first_turns(2));
    assert_eq!(store.list().expect("listed").len(), 1);
    for (what, result) in [
        ("open", store.open(&name("a")).map(drop)),
        ("create", store.create(&name("b"), &model("m")).map(drop)),
        ("rename", store.rename(&name("a"), &name("c"))),
        ("remove", store.remove(&name("a")).map(drop)),
        ("fork", store.fork(&name("a"), &name("d"), None).map(drop)),
    ] {
        let error = result.expect_err(what);
        assert!(matches!(&error, Error::Store(StoreError::Io { .. })), "{what}: {error}");
    }
    assert_eq!(turns_of(&store, "a"), first_turns(2), "untouched");
    set(&root, 0o700);
    set(&root.join("a"), 0o700);
}

#[test]
fn a_second_writer_finds_the_session_busy() {
    let (_folder, store) = store();
    let mut writer = store.create(&name("a"), &model("m")).expect("created");
    for (what, result) in [
        ("open", store.open(&name("a")).map(drop)),
        ("rename", store.rename(&name("a"), &name("b"))),
        ("remove", store.remove(&name("a")).map(drop)),
        ("repair", store.repair(&name("a")).map(drop)),
    ] {
        let error = result.expect_err(what);
        assert!(matches!(&error, Error::SessionBusy(name) if name == "a"), "{what}: {error}");
    }
    writer.append(&model("m"), &turn(1)).expect("the first writer goes on");
    assert_eq!(turns_of(&store, "a"), first_turns(1), "and anyone reads");
    writer.compact().expect("compacted");
    assert!(matches!(store.open(&name("a")), Err(Error::SessionBusy(_))), "compaction keeps the lock");
    drop(writer);
    store.open(&name("a")).expect("free again");
}

#[test]
fn who_asks_for_a_session_that_may_be_begun_is_never_told_that_there_is_none() {
    let (_folder, store) = store();
    let ask = |number: usize| {
        let mut opened = 0;
        for _ in 0..200 {
            match store.open_or_create(&name("new"), &model("m")) {
                Ok(writer) if number.is_multiple_of(2) => drop(writer.remove_if_empty().expect("removed")),
                Ok(writer) => drop(writer),
                Err(Error::SessionBusy(_)) => continue,
                Err(error) => panic!("{error}"),
            }
            opened += 1;
        }
        opened
    };
    let opened: usize = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..4).map(|number| scope.spawn(move || ask(number))).collect();
        asking.into_iter().map(|thread| thread.join().expect("no other error")).sum()
    });
    assert!(opened > 0);
}

#[test]
fn a_session_that_rests_is_not_read_again_for_a_list() {
    let (folder, store) = store();
    saved(&store, "a", 2);
    saved(&store, "b", 1);
    let turns = |store: &SessionStore| -> Vec<Option<usize>> {
        let listed = store.list().expect("listed");
        listed.into_iter().map(|listed| listed.summary.ok().map(|summary| summary.turns)).collect()
    };
    assert_eq!(turns(&store), [Some(2), Some(1)]);
    // Other bytes in the same file, of the same length and time: who reads them finds damage.
    let path = transcript_path(&folder, "a");
    let modified = fs::metadata(&path).and_then(|metadata| metadata.modified()).expect("known");
    let len = fs::read(&path).expect("there").len();
    let file = fs::OpenOptions::new().write(true).open(&path).expect("opened");
    (&file).write_all(&vec![b'x'; len]).and_then(|()| file.set_modified(modified)).expect("written");
    assert_eq!(turns(&SessionStore::new(folder.path().join("state/sessions"))), [None, Some(1)]);
    assert_eq!(turns(&store), [Some(2), Some(1)]);
    store.open(&name("b")).expect("opened").append(&model("m"), &turn(2)).expect("saved");
    assert_eq!(turns(&store), [Some(2), Some(2)], "what was added is seen");
    store.open(&name("b")).expect("opened").compact().expect("compacted");
    store.remove(&name("a")).expect("removed");
    assert_eq!(turns(&store), [Some(2)]);
}

#[cfg(unix)]
#[test]
fn a_pipe_in_place_of_a_transcript_is_refused_and_not_waited_for() {
    let (folder, store) = store();
    let pipe = transcript_path(&folder, "pipe");
    fs::create_dir_all(pipe.parent().expect("a folder")).expect("created");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).expect("a pipe");
    let listed = store.list().expect("listed");
    let error = listed[0].summary.as_ref().expect_err("no file").to_string();
    assert!(error.contains("not a regular file"), "{error}");
}

#[test]
fn leftovers_of_crashes_are_no_sessions() {
    let (folder, store) = store();
    saved(&store, "a", 1);
    let root = folder.path().join("state/sessions");
    for stray in [".unfinished-1-2-3", "%41%", "B", "lost+found"] {
        fs::create_dir(root.join(stray)).expect("a folder");
        fs::write(root.join(stray).join("transcript.jsonl"), "").expect("a file");
    }
    fs::create_dir(root.join("empty")).expect("a folder");
    fs::write(root.join("note"), "").expect("a file");
    fs::write(root.join("a/transcript.new"), "half a compac").expect("a file");
    assert_eq!(store.list().expect("listed").len(), 1);
    assert!(matches!(store.open(&name("empty")), Err(Error::SessionNotFound(_))));
    let mut writer = store.open(&name("a")).expect("opened");
    writer.compact().expect("over the leftover");
    writer.append(&model("m"), &turn(2)).expect("saved");
    assert_eq!(turns_of(&store, "a"), first_turns(2));
    store.create(&name("b"), &model("m")).expect("beside leftovers");
}

#[test]
fn answers_from_disk_go_back_into_prompts_of_the_same_model_only() {
    let (_folder, store) = store();
    let render = |c: &Conversation| {
        let line = |m: &Message| match &m.content {
            Some(Content::Text(text)) => format!("<{}>{text}", m.role.as_str()),
            _ => String::new(),
        };
        Ok::<_, ()>(c.messages.iter().map(line).collect::<String>() + "<assistant>")
    };
    let mut live = Transcript::default();
    let mut messages = Vec::new();
    let mut writer = store.create(&name("a"), &model("m")).expect("created");
    for n in 1..=3 {
        messages.push(turn(n).messages[0].clone());
        let conversation = Conversation { messages: messages.clone(), ..Conversation::default() };
        let prompt = live.splice(&conversation, render).expect("renders");
        let turn = StoredTurn { splice_after: Some(prompt.splice_after().to_owned()), ..turn(n) };
        live.record(&messages, &turn.messages[1], prompt.splice_after(), Some(&turn.generated));
        writer.append(&model("m"), &turn).expect("saved");
        messages.push(turn.messages[1].clone());
    }
    drop(writer);
    let session = store.read(&name("a")).expect("readable");
    assert_eq!(session.transcript(&model("m")), live);
    assert!(session.transcript(&model("other")).is_empty());
    let conversation = Conversation { messages, ..Conversation::default() };
    let prompt = session.transcript(&model("m")).splice(&conversation, render).expect("renders");
    assert_eq!(prompt.num_spliced(), 3);
    assert!(prompt.segments.contains(&SplicedSegment::Ids(vec![103, 203])));
}

/// Where the child below finds its store; set only by the test that starts it.
const CHILD_STORE: &str = "LLMCTL_TEST_SESSION_STORE";

/// Not a test by itself: the process that is killed. It appends turns for ever and says which are saved.
#[test]
fn child_that_appends() {
    let Some(root) = std::env::var_os(CHILD_STORE) else { return };
    let store = SessionStore::new(root);
    let mut writer = store.open_or_create(&name("a"), &model("m")).expect("opened");
    let mut out = std::io::stdout();
    writeln!(out, "\nopened").and_then(|()| out.flush()).expect("a pipe");
    for n in writer.saved().turns.len() + 1.. {
        writer.append(&model("m"), &turn(n)).expect("saved");
        writeln!(out, "saved {n}").and_then(|()| out.flush()).expect("a pipe");
        if n % 7 == 0 {
            writer.compact().expect("compacted");
        }
    }
}

#[test]
fn sigkill_while_saving_loses_no_turn_that_was_reported() {
    let (folder, store) = store();
    let root = folder.path().join("state/sessions");
    let mut random = Random(3);
    let mut reported = 0;
    for round in 0..20 {
        let (mut child, mut lines) = child_of_test("session_store::child_that_appends", (CHILD_STORE, &root));
        assert!(lines.any(|line| line == "opened"), "round {round}: the child could not open the session");
        let busy = store.open(&name("a")).map(drop).expect_err("the child has it");
        assert!(matches!(busy, Error::SessionBusy(_)), "{busy}");
        let enough = random.below(6);
        let mut saved_number = |line: String| {
            let number = line.strip_prefix("saved ")?.parse().ok();
            reported = number.unwrap_or(reported);
            number
        };
        lines.by_ref().filter_map(&mut saved_number).nth(enough).expect("the child saves");
        (0..random.below(40_000)).for_each(|_| std::hint::spin_loop());
        child.kill().expect("killed");
        lines.for_each(|line| {
            saved_number(line);
        });
        child.wait().expect("gone");
        let turns = turns_of(&store, "a");
        assert!(turns.len() >= reported, "round {round}: {} of {reported} turns", turns.len());
        assert_eq!(turns, first_turns(turns.len()), "round {round}");
    }
    assert!(reported >= 20);
}

#[cfg(unix)]
#[test]
fn a_name_that_something_else_has_is_no_busy_session() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().join("sessions");
    fs::create_dir_all(folder.path().join("other")).expect("a folder");
    fs::create_dir_all(&root).expect("a folder");
    for (session, target) in [("linked", "other"), ("dangling", "nowhere")] {
        std::os::unix::fs::symlink(folder.path().join(target), root.join(session)).expect("a link");
        let refused = SessionStore::new(&root).open_or_create(&name(session), &model("m")).map(drop);
        assert!(matches!(&refused, Err(Error::Store(_))), "{session}: {refused:?}");
    }
}
