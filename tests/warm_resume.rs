//! Promise: what of a prompt is computed already is not computed again, for sessions and between strangers; what is reused is
//! counted and explained; it changes no answer; and sessions are refused, kept, cut, evicted and closed as promised.

use llmctl_engine::{EngineSessionName, SessionState};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::common::prelude::*;
use crate::common::toy::{drain, pages, step};

#[track_caller]
fn check_reuse(answer: &Answer, cached: usize, reason: ReuseReason, first_difference: Option<usize>) {
    let found = answer.reuse();
    assert_eq!(
        (found.cached_tokens, found.reason, found.first_difference),
        (cached, reason, first_difference)
    );
}

fn tokens(engine: &Engine, session: &str) -> Vec<u32> {
    engine.inspect_session(&named(session)).expect("open").tokens
}

/// `prompt` and what followed.
fn continued(prompt: &[u32], answer: &Answer, next: &[u32]) -> Vec<u32> {
    [prompt, &answer.ids(), next].concat()
}

// ---- what is reused

#[test]
fn a_second_turn_computes_only_what_is_new() {
    let (mut engine, log) = Setup::default().engine_and_log(counting(64));
    let first = run_one(&mut engine, within("a", limited(&[10, 11, 12], 4)));
    check_reuse(&first, 0, ReuseReason::New, None);
    assert_eq!(first.ids(), [13, 14, 15, 16]);
    assert_eq!(tokens(&engine, "a"), [10, 11, 12, 13, 14, 15], "the last token was never fed");
    let computed = fed_tokens(&log).len();
    let prompt = continued(&[10, 11, 12], &first, &[20]);
    let second = run_one(&mut engine, within("a", limited(&prompt, 2)));
    check_reuse(&second, 6, ReuseReason::ExactPrefix, None);
    assert_eq!(second.ids(), [21, 22]);
    assert_eq!(fed_tokens(&log)[computed..], [16, 20, 21]);
}

#[test]
fn an_end_of_generation_is_not_kept() {
    let mut engine = Setup::default().engine(counting(64));
    let first = run_one(&mut engine, within("a", limited(&[60], 9)));
    assert_eq!(first.finish(), &Finish::Eos(63));
    assert_eq!(tokens(&engine, "a"), [60, 61, 62]);
    let second = run_one(&mut engine, within("a", limited(&[60, 61, 62, 63, 5], 1)));
    check_reuse(&second, 3, ReuseReason::ExactPrefix, None);
}

#[test]
fn edited_repeated_and_shortened_prompts_keep_what_they_share() {
    let mut engine = Setup::default().engine(hashing(64));
    let prompt: Vec<u32> = (0..20).collect();
    let mut edited = prompt.clone();
    edited[15] = 50;
    let cases = [
        (edited, 15, ReuseReason::PartialPrefix, Some(15)),
        (prompt[..9].to_vec(), 8, ReuseReason::PartialPrefix, Some(9)),
        (vec![40; 5], 0, ReuseReason::Mismatch, Some(0)),
        (vec![40; 5], 4, ReuseReason::Equal, None),
    ];
    run_one(&mut engine, within("a", limited(&prompt, 1)));
    for (prompt, cached, reason, difference) in cases {
        let cold = run_one(&mut Setup::default().engine(hashing(64)), limited(&prompt, 1));
        let warm = run_one(&mut engine, within("a", limited(&prompt, 1)));
        check_reuse(&warm, cached, reason, difference);
        assert_eq!(warm.tokens(), cold.tokens(), "{reason:?}");
    }
}

#[test]
fn strangers_share_the_pages_of_a_system_prompt() {
    let (mut engine, log) = Setup::default().engine_and_log(hashing(64));
    let system: Vec<u32> = (0..70).map(|n| n % 60).collect();
    let asks = |question: &[u32]| limited(&[&system, question].concat(), 3);
    check_reuse(&run_one(&mut engine, asks(&[5, 6])), 0, ReuseReason::New, None);
    let computed = fed_tokens(&log).len();
    let second = run_one(&mut engine, asks(&[7, 8, 9]));
    check_reuse(&second, 64, ReuseReason::PrefixCache, None);
    assert_eq!(fed_tokens(&log).len() - computed, 9 + 2);
    assert_eq!(
        second.tokens(),
        run_one(&mut Setup::default().engine(hashing(64)), asks(&[7, 8, 9])).tokens()
    );
    // Together, while the first still runs, and into a named session.
    let answers = run_all(&mut engine, vec![asks(&[1]), within("a", asks(&[2]))]);
    answers.iter().for_each(|answer| check_reuse(answer, 64, ReuseReason::PrefixCache, None));
    assert_eq!(engine.load().num_sessions, 1, "strangers take no place");
}

/// None of the requests finds the prompt computed when it arrives; it is still computed once.
#[test]
fn strangers_that_come_together_compute_a_system_prompt_once() {
    let (mut engine, log) = Setup { step_tokens: 40, ..Setup::default() }.engine_and_log(counting(64));
    let asks = |tail: &[u32]| limited(&[&[7; 128][..], tail].concat(), 3);
    let answers = run_all(&mut engine, vec![asks(&[1]), asks(&[2, 3]), asks(&[4; 40])]);
    for (answer, ids) in answers.iter().zip([[2, 3, 4], [4, 5, 6], [5, 6, 7]]) {
        assert_eq!(answer.ids(), ids);
    }
    let cached: Vec<_> = answers.iter().map(|answer| answer.outcome().usage.cached_tokens).collect();
    assert_eq!(cached, [0, 128, 128]);
    assert_eq!(fed_tokens(&log).iter().filter(|&&token| token == 7).count(), 128);
}

#[test]
fn a_prompt_that_ends_with_an_indexed_page_still_computes_a_token() {
    let mut engine = Setup::default().engine(hashing(64));
    let prompt: Vec<u32> = (0..64).map(|n| n % 60).collect();
    let first = run_one(&mut engine, limited(&prompt, 40));
    let again = run_one(&mut engine, limited(&prompt, 40));
    check_reuse(&again, 63, ReuseReason::PrefixCache, None);
    assert_eq!(again.tokens(), first.tokens());
}

#[test]
fn without_warm_resume_everything_is_computed() {
    let config = EngineConfig { warm_resume: false, ..Setup::default().config() };
    let model = ToyModel::new(64, hashing(64));
    let log = model.log();
    let mut engine = Engine::new(Box::new(model), ToyVocabulary::numbers(64), config).expect("valid");
    for _ in 0..2 {
        let answer = run_one(&mut engine, within("a", limited(&[3; 40], 1)));
        check_reuse(&answer, 0, ReuseReason::New, None);
    }
    assert_eq!(fed_tokens(&log).len(), 80);
}

#[test]
fn a_model_that_cannot_rewind_resumes_append_only() {
    let model = ToyModel::new(64, counting(64)).without_rewind();
    let (mut engine, _) = Setup::default().engine_with(model, ToyVocabulary::numbers(64));
    let prompt = [7; 40];
    let first = run_one(&mut engine, within("a", limited(&prompt, 2)));
    check_reuse(&run_one(&mut engine, limited(&prompt, 2)), 0, ReuseReason::New, None);
    let longer = continued(&prompt, &first, &[30]);
    check_reuse(&run_one(&mut engine, within("a", limited(&longer, 2))), 41, ReuseReason::ExactPrefix, None);
    check_reuse(&run_one(&mut engine, within("a", limited(&prompt, 2))), 0, ReuseReason::Mismatch, Some(40));
    assert!(matches!(engine.fork_session(&named("a"), &named("b")), Err(Error::NotSupported(_))));
}

// ---- what a session holds after its request

fn speaking(pieces: &[&[u8]]) -> Engine {
    let setup = Setup { vocab_size: pieces.len(), end_of_generation: Vec::new(), ..Setup::default() };
    let model = ToyModel::new(pieces.len(), counting(pieces.len()));
    setup.engine_with(model, ToyVocabulary::new(pieces, &[])).0
}

#[test]
fn a_stop_string_leaves_the_tokens_that_were_said() {
    let llama = "🦙".as_bytes();
    let pieces: [&[u8]; 8] = [b"", b"x", b"y<", b"en", b"d>", &llama[..2], &llama[2..], b"z"];
    // Token 2 begins the stop string; the animal is two tokens, and one of them says nothing by itself.
    for (stop, prompt, kept) in
        [("<end>", 0, &[0, 1][..]), ("🦙", 3, &[3, 4]), ("z", 3, &[3, 4, 5, 6]), ("en", 0, &[0, 1, 2])]
    {
        let mut engine = speaking(&pieces);
        let mut request = within("a", limited(&[prompt], 9));
        request.limits.stop = vec![stop.to_owned()];
        let answer = run_one(&mut engine, request);
        assert_eq!(answer.finish(), &Finish::StopString(stop.to_owned()));
        assert_eq!(tokens(&engine, "a"), kept, "{stop}");
        let next = [kept, &[1]].concat();
        check_reuse(
            &run_one(&mut engine, within("a", limited(&next, 1))),
            kept.len(),
            ReuseReason::ExactPrefix,
            None,
        );
    }
}

#[test]
fn a_cancelled_turn_keeps_what_was_computed() {
    let setup = Setup { step_tokens: 4, max_running: 1, spare_pages: 24, ..Setup::default() };
    let mut engine = setup.engine(counting(64));
    let prompt: Vec<u32> = (10..20).collect();
    for (steps, held) in [(1, &prompt[..4]), (4, &[10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20][..]), (0, &[])]
    {
        let session = format!("after {steps}");
        let id = engine.submit(within(&session, limited(&prompt, 9))).expect("valid");
        let mut answers: HashMap<_, Answer> = HashMap::new();
        (0..steps).for_each(|_| step(&mut engine, &mut answers));
        assert!(engine.cancel(id));
        drain(&mut engine, &mut answers);
        match steps {
            0 => assert!(engine.inspect_session(&named(&session)).is_err(), "it never began"),
            _ => assert_eq!(tokens(&engine, &session), held),
        }
        let again = run_one(&mut engine, within(&session, limited(&prompt, 2)));
        assert_eq!((again.ids(), again.reuse().cached_tokens), (vec![20, 21], held.len().min(9)));
    }
}

#[test]
fn a_failed_step_resets_its_sessions_and_no_others() {
    let mut count = counting(64);
    let rule: Rule = Box::new(move |history| {
        assert_ne!(history.last(), Some(&33), "the chosen token");
        count(history)
    });
    let mut engine = Setup::default().engine(rule);
    run_one(&mut engine, within("idle", limited(&[1, 2], 2)));
    let answers = run_all(&mut engine, vec![within("a", limited(&[31], 9)), within("b", limited(&[1], 60))]);
    assert!(answers.iter().all(|answer| matches!(answer.error(), Error::Backend(_))));
    assert_eq!((tokens(&engine, "a"), tokens(&engine, "b")), (vec![], vec![]));
    assert_eq!(tokens(&engine, "idle"), [1, 2, 3]);
    check_reuse(&run_one(&mut engine, within("b", limited(&[1, 2], 1))), 0, ReuseReason::Dirty, None);
    check_reuse(
        &run_one(&mut engine, within("b", limited(&[1, 2, 3], 1))),
        2,
        ReuseReason::ExactPrefix,
        None,
    );
    check_reuse(
        &run_one(&mut engine, within("idle", limited(&[1, 2, 3, 4], 1))),
        3,
        ReuseReason::ExactPrefix,
        None,
    );
}

// ---- admission and commands

#[test]
fn a_session_takes_one_request_at_a_time() {
    let (mut engine, log) =
        Setup { max_running: 1, spare_pages: 8, ..Setup::default() }.engine_and_log(counting(64));
    let running = engine.submit(within("a", limited(&[1], 9))).expect("free");
    let waiting = engine.submit(within("b", limited(&[1], 9))).expect("free");
    engine.step();
    let state = |engine: &Engine, name| engine.inspect_session(&named(name)).expect("open").info.state;
    assert_eq!((state(&engine, "a"), state(&engine, "b")), (SessionState::Running, SessionState::Waiting));
    let computed = num_forwards(&log);
    for name in ["a", "b"] {
        let busy = |result: Result<(), Error>| {
            assert!(matches!(result, Err(Error::SessionBusy(busy)) if busy == name));
        };
        busy(engine.submit(within(name, limited(&[1], 1))).map(drop));
        busy(engine.reset_session(&named(name)));
        busy(engine.close_session(&named(name)));
        busy(engine.fork_session(&named(name), &named("c")));
    }
    assert_eq!((num_forwards(&log), engine.load().num_waiting), (computed, 1));
    engine.cancel(waiting);
    engine.cancel(running);
    assert_eq!(state(&engine, "a"), SessionState::Idle);
    assert!(matches!(engine.inspect_session(&named("b")), Err(Error::SessionNotFound(_))), "it never began");
    engine.step();
    run_one(&mut engine, within("b", limited(&[1], 1)));
}

#[test]
fn sessions_are_full_by_count_only_where_none_is_idle() {
    let setup = Setup { max_sessions: 2, ..Setup::default() };
    let (mut engine, log) = setup.engine_and_log(counting(64));
    engine.create_session().expect("room");
    let running = engine.submit(within("a", limited(&[1], 20))).expect("room");
    let computed = num_forwards(&log);
    let refused = engine.submit(within("b", limited(&[1], 1)));
    assert!(matches!(refused, Err(Error::SessionsFull { capacity: 2 })));
    assert!(matches!(engine.create_session(), Err(Error::SessionsFull { capacity: 2 })));
    assert!(matches!(engine.restore_session(&named("b"), vec![1]), Err(Error::SessionsFull { capacity: 2 })));
    assert_eq!(num_forwards(&log), computed);
    assert!(
        matches!(engine.inspect_session(&named("b")), Err(Error::SessionNotFound(_))),
        "a refusal begins nothing"
    );
    engine.cancel(running);
    engine.step();
    run_one(&mut engine, limited(&[1], 1));
    run_one(&mut engine, within("b", limited(&[1], 1)));
    let forked = engine.fork_session(&named("b"), &named("c"));
    assert!(matches!(forked, Err(Error::SessionsFull { capacity: 2 })), "not from a session that has gone");
    assert!(engine.inspect_session(&named("b")).is_ok());
}

#[test]
fn a_new_session_takes_the_slot_of_the_idle_one_used_longest_ago() {
    let setup = Setup { max_sessions: 3, ..Setup::default() };
    let mut engine = setup.engine(counting(64));
    let names = |engine: &Engine| {
        engine.list_sessions().iter().map(|info| info.name.as_str()).collect::<Vec<_>>().join(" ")
    };
    for name in ["a", "b", "c", "a", "d"] {
        run_one(&mut engine, within(name, limited(&(1..40).collect::<Vec<_>>(), 1)));
    }
    assert_eq!(names(&engine), "a c d");
    // One that a request is in stays, however old.
    let running = engine.submit(within("c", limited(&[1, 2, 3], 20))).expect("idle");
    engine.step();
    for name in ["e", "f", "g"] {
        engine.submit(within(name, limited(&[1], 1))).expect("the slot of an idle one");
        (0..3).for_each(|_| drop(engine.step()));
    }
    assert_eq!(names(&engine), "c f g");
    engine.cancel(running);
    // Whoever knows what one held brings it back, and its full pages are still there.
    engine.restore_session(&named("a"), (1..40).collect::<Vec<u32>>()).expect("a slot");
    let back = run_one(&mut engine, within("a", limited(&(1..45).collect::<Vec<_>>(), 1)));
    check_reuse(&back, 32, ReuseReason::PrefixCache, None);
}

#[test]
fn commands_reset_close_list_and_fork() {
    let mut engine = Setup::default().engine(hashing(64));
    for name in ["close", "reset", "fork"] {
        assert!(
            matches!(engine.inspect_session(&named(name)), Err(Error::SessionNotFound(found)) if found == name)
        );
        let prompt: Vec<u32> = (0..40).collect();
        run_one(&mut engine, within(name, limited(&prompt, 3)));
    }
    engine.close_session(&named("close")).expect("idle");
    engine.reset_session(&named("reset")).expect("idle");
    engine.fork_session(&named("fork"), &named("twin")).expect("idle");
    assert!(matches!(
        engine.fork_session(&named("fork"), &named("twin")),
        Err(Error::InvalidParameter { .. })
    ));
    let listed: Vec<_> = engine
        .list_sessions()
        .into_iter()
        .map(|info| (info.name, info.num_tokens, info.num_resident))
        .collect();
    let expected = [("fork", 42, 42), ("reset", 0, 0), ("twin", 42, 42)];
    assert_eq!(listed, expected.map(|(name, tokens, resident)| (named(name), tokens, resident)));
    // The twins part: each goes on as it would have alone.
    let held = tokens(&engine, "fork");
    let turn = |next| limited(&[&held[..], &[next]].concat(), 20);
    let answers = run_all(&mut engine, vec![within("fork", turn(5)), within("twin", turn(6))]);
    for (answer, next) in answers.iter().zip([5, 6]) {
        check_reuse(answer, 42, ReuseReason::ExactPrefix, None);
        assert_eq!(answer.tokens(), run_one(&mut Setup::default().engine(hashing(64)), turn(next)).tokens());
    }
}

// ---- eviction

/// An engine with places for three sessions of 128 tokens, and not a page more.
fn tight(rule: Rule) -> (Engine, Log) {
    let model = ToyModel::new(64, rule);
    let log = model.log();
    let setup = Setup { max_running: 3, max_sessions: 3, ..Setup::default() };
    let config = EngineConfig { context_length: 128, kv_memory: pages(12), ..setup.config() };
    (Engine::new(Box::new(model), ToyVocabulary::numbers(64), config).expect("valid"), log)
}

#[test]
fn idle_sessions_give_way_the_longest_unused_first_and_come_back() {
    let (mut engine, _) = tight(hashing(64));
    let prompt = |n: u32| (0..100).map(|i| (i * n + n) % 60).collect::<Vec<u32>>();
    let resident =
        |engine: &Engine| engine.list_sessions().iter().map(|info| info.num_resident).collect::<Vec<_>>();
    for (n, name) in [(1, "a"), (2, "b"), (3, "c")] {
        run_one(&mut engine, within(name, limited(&prompt(n), 1)));
    }
    assert_eq!(resident(&engine), [100, 100, 100]);
    run_one(&mut engine, within("a", limited(&prompt(1), 1)));
    // A stranger needs one page: the longest unused session gives way, its tokens stay.
    run_one(&mut engine, limited(&[7; 10], 1));
    assert_eq!(resident(&engine), [100, 0, 100]);
    assert_eq!(engine.inspect_session(&named("b")).expect("open").info.num_tokens, 100);
    // Its full pages are still found; only the last was partly filled.
    let back = run_one(&mut engine, within("b", limited(&[&prompt(2)[..], &[1, 2]].concat(), 1)));
    check_reuse(&back, 96, ReuseReason::PrefixCache, None);
    // Strangers that need all pages leave nothing of anybody.
    run_all(&mut engine, [20, 21, 22].map(|fill| limited(&[fill; 127], 1)).into());
    assert_eq!(resident(&engine), [0, 0, 0]);
    let mut edited = prompt(1);
    edited[60] = 61;
    check_reuse(&run_one(&mut engine, within("a", limited(&edited, 1))), 0, ReuseReason::Evicted, Some(60));
}

#[test]
fn a_request_that_is_stopped_early_leaves_what_the_session_stands_for() {
    let (mut engine, _) = tight(hashing(64));
    let saved: Vec<u32> = (0..100).map(|i| i % 60).collect();
    engine.restore_session(&named("a"), saved.clone()).expect("room");
    let id = engine.submit(within("a", limited(&[&saved[..], &[1, 2]].concat(), 1))).expect("fits");
    engine.step(); // a part of the prompt
    engine.cancel(id);
    for _ in 0..20 {
        engine.step();
    }
    assert!(engine.is_idle());
    assert_eq!(tokens(&engine, "a"), saved);
    let back = run_one(&mut engine, within("a", limited(&[&saved[..], &[1, 2]].concat(), 1)));
    assert_eq!(back.reuse().first_difference, None, "it goes on where the session ended: {:?}", back.reuse());
    assert_ne!(back.reuse().reason, ReuseReason::New);
}

#[test]
fn a_refused_call_by_hand_takes_no_pages_from_idle_sessions() {
    let (mut engine, _) = tight(counting(64));
    run_one(&mut engine, within("a", limited(&[5; 100], 1)));
    let by_hand = engine.create_session().expect("room");
    let refused = engine.prefill_tokens(by_hand, &[1; 4000], &Sampling::default());
    assert!(matches!(refused, Err(Error::PromptTooLong { .. })));
    assert_eq!(engine.inspect_session(&named("a")).expect("open").info.num_resident, 100);
}

#[test]
fn sessions_driven_by_hand_get_pages_from_idle_ones() {
    let (mut engine, _) = tight(counting(64));
    let by_hand = [(); 2].map(|()| engine.create_session().expect("room"));
    run_one(&mut engine, within("a", limited(&[5; 100], 1)));
    for id in by_hand {
        engine.prefill_tokens(id, &[1; 127], &Sampling::default()).expect("promised");
    }
    assert_eq!(
        engine.inspect_session(&named("a")).expect("open").info.num_resident,
        100,
        "there was room for all"
    );
    run_one(&mut engine, limited(&[6; 20], 1));
    assert_eq!(engine.inspect_session(&named("a")).expect("open").info.num_resident, 0);
    assert_eq!(engine.position(by_hand[0]).expect("open"), 127, "never theirs");
}

// ---- properties

#[derive(Debug, Clone)]
enum Action {
    /// A turn in one of three sessions or in none: keeps part of what that session holds, and adds to it.
    Submit {
        session: usize,
        keep: Index,
        more: Vec<u32>,
        max_tokens: usize,
        seed: u64,
    },
    Cancel(Index),
    Steps(usize),
    Fork(usize, usize),
    Reset(usize),
    Close(usize),
    /// Another process goes on with the sessions, and with what is on disk.
    Restart,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let more = prop_oneof![
        prop::collection::vec(0u32..3, 1..6),
        (0u32..3, 1usize..2 * PAGE_TOKENS).prop_map(|(token, len)| vec![token; len]),
    ];
    let submit = (0usize..4, any::<Index>(), more, 1usize..40, 0u64..3).prop_map(
        |(session, keep, more, max_tokens, seed)| Action::Submit { session, keep, more, max_tokens, seed },
    );
    let action = prop_oneof![
        6 => submit,
        1 => any::<Index>().prop_map(Action::Cancel),
        6 => (1usize..20).prop_map(Action::Steps),
        1 => (0usize..3, 0usize..3).prop_map(|(from, to)| Action::Fork(from, to)),
        1 => (0usize..3).prop_map(Action::Reset),
        1 => (0usize..3).prop_map(Action::Close),
        1 => Just(Action::Restart),
    ];
    prop::collection::vec(action, 1..50)
}

/// Plain, windowed, hybrid and recurrent models.
const KINDS: [&[KvKind]; 4] = [
    &[KvKind::Full],
    &[KvKind::Full, KvKind::SlidingWindow(20)],
    &[KvKind::Recurrent, KvKind::Full],
    &[KvKind::SlidingWindow(30), KvKind::Recurrent],
];

const NAMES: [&str; 3] = ["a", "b", "c"];

fn act(engine: &mut Engine, action: Action, submitted: &mut Vec<(llmctl_engine::RequestId, Request)>) {
    match action {
        Action::Submit { session, keep, more, max_tokens, seed } => {
            let name = NAMES.get(session);
            let held =
                name.and_then(|name| engine.inspect_session(&named(name)).ok()).map(|detail| detail.tokens);
            let mut prompt = held.unwrap_or_default();
            prompt.truncate(keep.index(prompt.len() + 1).min(60));
            prompt.extend(more);
            let mut request = Request {
                session: name.map(|name| named(name)),
                sampling: varied(seed),
                ..limited(&prompt, max_tokens.min(127 - prompt.len().min(126)))
            };
            // Drafts are mostly right.
            request.prediction = recomputed(&request, 64, 63);
            request.prediction.iter_mut().step_by(4).for_each(|id| *id = (*id + 1) % 63);
            match engine.submit(request.clone()) {
                Ok(id) => submitted.push((id, request)),
                Err(error) => assert!(
                    matches!(
                        error,
                        Error::SessionBusy(_)
                            | Error::PromptTooLong { .. }
                            | Error::ContextExceeded { .. }
                            | Error::SessionsFull { .. }
                    ),
                    "{error}"
                ),
            }
        }
        Action::Cancel(which) if !submitted.is_empty() => drop(engine.cancel(which.get(submitted).0)),
        Action::Cancel(_) | Action::Steps(_) | Action::Restart => {}
        // Refused while busy, unknown or full: then nothing may change, which the answers show.
        Action::Fork(from, to) => drop(engine.fork_session(&named(NAMES[from]), &named(NAMES[to]))),
        Action::Reset(which) => drop(engine.reset_session(&named(NAMES[which]))),
        Action::Close(which) => drop(engine.close_session(&named(NAMES[which]))),
    }
}

/// Another engine with the sessions of one whose process has ended.
fn restarted(mut engine: Engine, start: impl Fn() -> Engine) -> Engine {
    assert!(engine.flush_disk(Duration::from_secs(60)));
    let sessions = engine.list_sessions().into_iter().map(|info| info.name);
    let tokens = |name: EngineSessionName| (engine.inspect_session(&name).expect("listed").tokens, name);
    let sessions: Vec<_> = sessions.map(tokens).collect();
    let mut other = start();
    for (tokens, name) in sessions {
        other.restore_session(&name, tokens).expect("room");
    }
    other
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Few pages, so that sessions are evicted all the time. The toy model checks every row it reads, the engine its books
    /// at every idle moment.
    #[test]
    fn whatever_sessions_share_lose_and_get_back_answers_are_as_if_all_was_computed(
        actions in actions(), step_tokens in 1usize..40, max_running in 1usize..4, num_pages in 4usize..16,
        kind in 0..KINDS.len(), draft_len in 0usize..6,
    ) {
        let setup = Setup { step_tokens, max_running, max_sessions: 3, context_length: 128, ..Setup::default() };
        let kv_memory = pages(num_pages * KINDS[kind].len());
        let speculation = Speculation::Always(draft_len);
        let config = EngineConfig { kv_memory, speculation, ..setup.config() };
        let root = tempfile::tempdir().expect("tempdir");
        let start = || {
            let model = Box::new(ToyModel::new(64, hashing(64)).with_groups(KINDS[kind]));
            let mut engine = Engine::new(model, ToyVocabulary::numbers(64), config.clone()).expect("valid");
            engine.set_disk(kv_store(root.path(), "toy"));
            engine
        };
        let mut engine = start();
        let (mut answers, mut submitted) = (HashMap::new(), Vec::new());
        let (mut all_answers, mut all_submitted) = (Vec::new(), Vec::new());
        for action in actions {
            match action {
                Action::Steps(count) => (0..count).for_each(|_| step(&mut engine, &mut answers)),
                Action::Restart => {
                    drain(&mut engine, &mut answers);
                    all_answers.push(std::mem::take(&mut answers));
                    all_submitted.push(std::mem::take(&mut submitted));
                    engine = restarted(engine, start);
                }
                _ => act(&mut engine, action, &mut submitted),
            }
        }
        drain(&mut engine, &mut answers);
        all_answers.push(answers);
        all_submitted.push(submitted);
        for (answers, submitted) in all_answers.iter().zip(&all_submitted) {
            for (id, request) in submitted {
                let answer = &answers[id];
                answer.check_order();
                let expected = recomputed(request, 64, 63);
                match &answer.outcome().finish {
                    Finish::Cancelled => prop_assert!(expected.starts_with(&answer.ids())),
                    _ => prop_assert_eq!(answer.ids(), expected),
                }
            }
        }
        for name in NAMES {
            let _ = engine.close_session(&named(name));
        }
        engine.step();
        prop_assert_eq!(engine.load().kv_free, engine.load().kv_capacity);
    }
}
