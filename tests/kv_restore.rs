//! Promise: what a session computed is warm again in another process, with the same answers as if it had never left memory; and
//! whatever has become of the files, answers are right and nothing panics.

use std::fs;
use std::time::SystemTime;

use llmctl_base::Notice;

use crate::common::prelude::*;

const KINDS: [&[KvKind]; 4] = [
    &[KvKind::Full],
    &[KvKind::Full, KvKind::SlidingWindow(40)],
    &[KvKind::Recurrent, KvKind::Full],
    &[KvKind::SlidingWindow(40), KvKind::Recurrent],
];

const PLENTY: Duration = Duration::from_secs(60);

fn store(root: &Path, fingerprint: &str, limit_bytes: u64) -> DiskStore {
    described(root, fingerprint, limit_bytes, json!({ "model": fingerprint }))
}

fn described(root: &Path, fingerprint: &str, limit_bytes: u64, description: Value) -> DiskStore {
    DiskStore::open(DiskConfig {
        root: root.to_owned(),
        limit_bytes,
        fingerprint: fingerprint.to_owned(),
        description,
        queue_bytes: DEFAULT_QUEUE_BYTES,
        vault: None,
    })
    .expect("a store")
}

fn engine(kinds: &[KvKind]) -> Engine {
    let setup =
        Setup { step_tokens: 50, context_length: 512, end_of_generation: Vec::new(), ..Setup::default() };
    setup.engine_with(ToyModel::new(64, hashing(64)).with_groups(kinds), ToyVocabulary::numbers(64)).0
}

/// An engine as another process has it: only what is below `root` is known.
fn engine_on(root: &Path, kinds: &[KvKind]) -> Engine {
    let mut engine = engine(kinds);
    engine.set_disk(store(root, "toy", u64::MAX));
    engine
}

fn within(session: &str, prompt: &[u32], max_tokens: usize) -> Request {
    Request { session: Some(named(session)), sampling: seeded(7), ..limited(prompt, max_tokens) }
}

fn prompt(len: usize) -> Vec<u32> {
    (0..len).map(|n| (n * 7 % 60) as u32).collect()
}

/// The first turn, and what its session holds when the process ends.
fn first_turn(root: &Path, kinds: &[KvKind]) -> Vec<u32> {
    let mut engine = engine_on(root, kinds);
    run_one(&mut engine, within("a", &prompt(150), 60));
    assert!(engine.flush_disk(PLENTY));
    engine.inspect_session(&named("a")).expect("open").tokens
}

/// The second turn in another process; its answer is that of an engine that computes everything.
fn second_turn(root: &Path, kinds: &[KvKind], tokens: &[u32]) -> (Reuse, Vec<Notice>) {
    let mut engine = engine_on(root, kinds);
    engine.restore_session(&named("a"), tokens.to_vec()).expect("a new engine");
    let request = within("a", &[tokens, &[1, 2, 3]].concat(), 9);
    let answer = run_one(&mut engine, request.clone());
    let cold = run_one(&mut self::engine(kinds), Request { session: None, ..request });
    assert_eq!(answer.tokens(), cold.tokens());
    assert!(answer.outcome().usage.cached_tokens >= answer.reuse().cached_tokens);
    assert!(engine.flush_disk(PLENTY));
    (answer.reuse(), engine.take_notices())
}

fn page_files(root: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![root.join("toy")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.file_name().is_some_and(|name| name != "manifest.json") {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

#[test]
fn a_session_is_warm_in_another_process() {
    for kinds in KINDS {
        let root = tempfile::tempdir().expect("tempdir");
        let tokens = first_turn(root.path(), kinds);
        assert_eq!(tokens.len(), 209);
        let (reuse, notices) = second_turn(root.path(), kinds, &tokens);
        let whole = tokens.len() / PAGE_TOKENS * PAGE_TOKENS;
        assert_eq!((reuse.cached_tokens, reuse.restored_tokens), (whole, whole), "{kinds:?}");
        assert_eq!((reuse.reason, reuse.first_difference), (ReuseReason::Restored, None));
        assert!(notices.is_empty(), "{notices:?}");
        // The second turn was saved too, and adds to the first.
        let saved = page_files(root.path()).len();
        let (again, _) = second_turn(root.path(), kinds, &tokens);
        assert_eq!((again.cached_tokens, page_files(root.path()).len()), (whole, saved));
    }
}

#[test]
fn another_model_finds_nothing() {
    let root = tempfile::tempdir().expect("tempdir");
    let tokens = first_turn(root.path(), KINDS[0]);
    let mut engine = engine(KINDS[0]);
    engine.set_disk(store(root.path(), "other", u64::MAX));
    engine.restore_session(&named("a"), tokens.clone()).expect("new");
    let answer = run_one(&mut engine, within("a", &[&tokens[..], &[1]].concat(), 3));
    assert_eq!((answer.reuse().cached_tokens, answer.reuse().reason), (0, ReuseReason::Evicted));
}

#[test]
fn kv_of_another_kv_type_or_time_is_named() {
    let facts = |kv_type: &str, time: u32| json!({"kv_type": kv_type, "weights": [{"modified_ns": time}]});
    let said = |theirs: &Value, ours: &Value| {
        let root = tempfile::tempdir().expect("tempdir");
        let engine_with = |fingerprint: &str, description: &Value| {
            let mut engine = engine(KINDS[0]);
            engine.set_disk(described(root.path(), fingerprint, u64::MAX, description.clone()));
            engine
        };
        let mut first = engine_with("theirs", theirs);
        let answer = run_one(&mut first, within("a", &prompt(150), 60));
        assert!(first.flush_disk(PLENTY));
        let mut second = engine_with("ours", ours);
        let next = [prompt(150), answer.ids(), vec![1]].concat();
        assert_eq!(run_one(&mut second, within("b", &next, 3)).reuse().cached_tokens, 0);
        second.take_notices().iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    };
    let typed = said(&facts("q8_0", 1), &facts("f16", 1));
    assert!(typed.contains("computed with --kv-type q8_0, and it is f16 now"), "{typed}");
    let touched = said(&facts("f16", 1), &facts("f16", 2));
    assert!(touched.contains("the model's file had another time"), "{touched}");
    let mut other = facts("q8_0", 1);
    other["llmctl"] = "another".into();
    assert_eq!(said(&other, &facts("f16", 1)), "", "of another model or build nothing is said");
}

/// Without the page at hand a prefix of what was saved is warm, or nothing.
#[test]
fn whatever_has_become_of_a_file_the_answer_is_right() {
    type Damage = (&'static str, fn(&Path));
    let damage: [Damage; 4] = [
        ("gone", |path| fs::remove_file(path).expect("it is there")),
        ("empty", |path| fs::write(path, b"").expect("writable")),
        ("cut", |path| {
            let bytes = fs::read(path).expect("readable");
            fs::write(path, &bytes[..bytes.len() * 2 / 3]).expect("writable");
        }),
        ("flipped", |path| {
            let mut bytes = fs::read(path).expect("readable");
            let at = bytes.len() - 20;
            bytes[at] ^= 4;
            fs::write(path, bytes).expect("writable");
        }),
    ];
    for kinds in KINDS {
        let root = tempfile::tempdir().expect("tempdir");
        let tokens = first_turn(root.path(), kinds);
        let files = page_files(root.path());
        for (index, file) in files.iter().enumerate() {
            let (what, damage) = damage[index % damage.len()];
            let intact = fs::read(file).expect("readable");
            damage(file);
            let (reuse, notices) = second_turn(root.path(), kinds, &tokens);
            assert!(reuse.cached_tokens < 209, "{kinds:?}: {what}: {reuse:?}");
            let is_said = notices.iter().any(|notice| matches!(notice, Notice::KvPagesRecomputed { .. }));
            assert!(what == "gone" || is_said || reuse.cached_tokens == 192, "{what}: {notices:?}");
            assert_eq!(reuse.cached_tokens > 0, reuse.reason == ReuseReason::Restored, "{what}: {reuse:?}");
            // What was computed instead has been saved in its place, the same to the byte; what only an earlier end of the
            // conversation needs is not computed for its own sake.
            let again = fs::read(file).ok();
            assert!(kinds.len() > 1 || again.as_ref() == Some(&intact), "{kinds:?}: {what}");
            fs::write(file, intact).expect("writable");
        }
    }
}

#[test]
fn a_page_of_the_wrong_size_is_not_believed() {
    let root = tempfile::tempdir().expect("tempdir");
    let tokens = first_turn(root.path(), &[KvKind::Full]);
    // As if two builds of different page sizes had the same fingerprint.
    let (reuse, _) = second_turn(root.path(), &[KvKind::Full, KvKind::Full], &tokens);
    assert!(reuse.cached_tokens < 209);
}

#[test]
fn evicted_sessions_come_back_from_disk_in_the_same_process() {
    let root = tempfile::tempdir().expect("tempdir");
    let setup =
        Setup { max_running: 1, context_length: 256, end_of_generation: Vec::new(), ..Setup::default() };
    let mut engine = setup.engine(hashing(64));
    engine.set_disk(store(root.path(), "toy", u64::MAX));
    for round in 0..3 {
        for name in ["a", "b", "c"] {
            let tokens = engine.inspect_session(&named(name)).map(|detail| detail.tokens).unwrap_or_default();
            let first: Vec<u32> =
                name.bytes().map(u32::from).map(|byte| byte % 60).chain(prompt(100)).collect();
            let request = within(name, &[if round == 0 { &first } else { &tokens }, &[5][..]].concat(), 20);
            let answer = run_one(&mut engine, request.clone());
            let cold = run_one(&mut setup.engine(hashing(64)), Request { session: None, ..request });
            assert_eq!(answer.tokens(), cold.tokens());
            if round > 0 {
                let whole = tokens.len() / PAGE_TOKENS * PAGE_TOKENS;
                assert_eq!(answer.reuse().cached_tokens, whole, "round {round}: {:?}", answer.reuse());
            }
        }
    }
}

#[test]
fn several_requests_are_restored_at_once_and_a_cancelled_one_leaves_no_trace() {
    let root = tempfile::tempdir().expect("tempdir");
    let tokens = first_turn(root.path(), KINDS[0]);
    let mut engine = engine_on(root.path(), KINDS[0]);
    let asks = |tail: u32| Request { session: None, ..within("unused", &[&tokens[..], &[tail]].concat(), 5) };
    let cancelled = engine.submit(within("a", &[&tokens[..], &[9]].concat(), 5)).expect("room");
    let mut overdue = asks(8);
    overdue.limits.deadline = Some(Duration::from_secs(5));
    let overdue = engine.submit(overdue).expect("room");
    let mut events = engine.step(); // both wait for the disk, or have just started
    assert!(engine.cancel(cancelled));
    events.extend(engine.step_at(Instant::now() + Duration::from_secs(6)));
    let answers = run_all(&mut engine, vec![asks(1), asks(2)]);
    for (answer, tail) in answers.iter().zip([1, 2]) {
        let cold = run_one(&mut self::engine(KINDS[0]), asks(tail));
        assert_eq!(answer.tokens(), cold.tokens());
        assert_eq!(answer.outcome().usage.cached_tokens, 192);
    }
    let last = |id| events.iter().rev().find(|(of, _)| *of == id).map(|(_, event)| event);
    assert!(matches!(last(cancelled), Some(Event::Done(outcome)) if outcome.finish == Finish::Cancelled));
    let is_over = |event: &Event| match event {
        Event::Failed(Error::DeadlineExceeded { .. }) => true,
        Event::Done(outcome) => outcome.finish == Finish::Deadline,
        _ => false,
    };
    assert!(last(overdue).is_some_and(is_over), "{events:?}");
    let load = engine.load();
    assert_eq!((load.num_running, load.num_waiting), (0, 0));
}

#[test]
fn a_folder_that_cannot_be_written_is_said_once_and_costs_nothing_else() {
    let root = tempfile::tempdir().expect("tempdir");
    let blocked = root.path().join("file");
    fs::write(&blocked, b"not a folder").expect("writable");
    let mut engine = engine_on(&blocked, KINDS[0]);
    let mut notices = Vec::new();
    for turn in 1..4 {
        let answer = run_one(&mut engine, within("a", &prompt(60 * turn), 9));
        assert_eq!(answer.finish(), &Finish::MaxTokens);
        assert!(engine.flush_disk(PLENTY));
        notices.extend(engine.take_notices());
    }
    assert_eq!(notices.len(), 1, "{notices:?}");
}

#[test]
fn a_limit_below_a_page_is_said() {
    let root = tempfile::tempdir().expect("tempdir");
    let mut engine = engine(KINDS[0]);
    engine.set_disk(store(root.path(), "toy", 100));
    run_one(&mut engine, within("a", &prompt(60), 9));
    assert!(engine.flush_disk(PLENTY));
    let notices = engine.take_notices();
    assert!(notices.len() == 1 && matches!(notices[0], Notice::KvLimitBelowPage { .. }), "{notices:?}");
}

/// Restoring pages from disk must not evict a session's pages that are in memory.
#[test]
fn sessions_that_take_turns_in_too_little_memory_come_back_whole() {
    let root = tempfile::tempdir().expect("tempdir");
    let setup = Setup {
        max_running: 1,
        spare_pages: 3,
        context_length: 256,
        end_of_generation: Vec::new(),
        ..Setup::default()
    };
    let mut engine = setup.engine(hashing(64));
    engine.set_disk(store(root.path(), "toy", u64::MAX));
    let turn = |engine: &mut Engine, name: &str, first: u32| {
        let tokens =
            engine.inspect_session(&named(name)).map(|detail| detail.tokens).unwrap_or(vec![first; 150]);
        let answer = run_one(engine, within(name, &[&tokens[..], &[3]].concat(), 5));
        (tokens.len() / PAGE_TOKENS * PAGE_TOKENS, answer.reuse().cached_tokens)
    };
    for round in 0..4 {
        for (name, first) in [("a", 1), ("b", 2)] {
            let (whole, cached) = turn(&mut engine, name, first);
            assert!(round == 0 || cached >= whole, "round {round}: {cached} of {whole}");
        }
    }
}

#[test]
fn requests_without_a_session_leave_nothing_on_disk_and_without_reuse_nothing_is_read() {
    let root = tempfile::tempdir().expect("tempdir");
    let mut engine = engine_on(root.path(), KINDS[0]);
    let answer: Answer = run_one(&mut engine, limited(&prompt(150), 20));
    assert_eq!(answer.finish(), &Finish::MaxTokens);
    assert!(engine.flush_disk(PLENTY) && !root.path().join("toy").exists());
}

/// A conversation that goes on is used as a whole, though its beginning was written long ago.
#[test]
fn a_turn_counts_as_a_use_of_all_that_the_session_has_on_disk() {
    let root = tempfile::tempdir().expect("tempdir");
    let mut engine = engine_on(root.path(), KINDS[0]);
    let answer = run_one(&mut engine, within("a", &prompt(150), 20));
    assert!(engine.flush_disk(PLENTY));
    let old = SystemTime::now() - Duration::from_secs(24 * 3600);
    for file in page_files(root.path()) {
        let file = File::options().write(true).open(file).expect("ours");
        file.set_modified(old).expect("a time");
    }
    let next = [&prompt(150)[..], &answer.ids(), &[1]].concat();
    run_one(&mut engine, within("a", &next, 5));
    assert!(engine.flush_disk(PLENTY));
    for file in page_files(root.path()) {
        let used = fs::metadata(&file).and_then(|metadata| metadata.modified()).expect("a time");
        assert!(used > old + Duration::from_secs(3600), "{file:?}");
    }
}

/// Counts pages whose last use lies in the future: those that are removed after all others.
fn num_shared(root: &Path) -> usize {
    let now = SystemTime::now();
    let is_shared =
        |path: &&PathBuf| fs::metadata(path).and_then(|file| file.modified()).expect("a time") > now;
    page_files(root).iter().filter(is_shared).count()
}

#[test]
fn what_a_new_session_takes_over_is_removed_last_and_a_sessions_own_pages_are_not() {
    let root = tempfile::tempdir().expect("tempdir");
    let system = &prompt(150)[..4 * PAGE_TOKENS];
    let mut engine = engine_on(root.path(), &[KvKind::Full]);
    let mut turn = |session: &str, prompt: &[u32]| {
        run_one(&mut engine, within(session, prompt, 5));
        assert!(engine.flush_disk(PLENTY));
        (engine.inspect_session(&named(session)).expect("open").tokens, num_shared(root.path()))
    };
    let (tokens, shared) = turn("a", &[system, &[9; 40]].concat());
    assert_eq!(shared, 0);
    let (tokens, shared) = turn("a", &[&tokens[..], &[3; 40]].concat());
    assert_eq!(shared, 0, "its own pages");
    assert_eq!(turn("b", &[system, &[11; 40]].concat()).1, 4);
    drop(engine);

    let mut engine = engine_on(root.path(), &[KvKind::Full]);
    engine.restore_session(&named("a"), tokens.clone()).expect("a new engine");
    run_one(&mut engine, within("a", &[&tokens[..], &[4; 40]].concat(), 5));
    assert!(engine.flush_disk(PLENTY));
    assert_eq!(num_shared(root.path()), 4, "its own pages, read from disk");
}
