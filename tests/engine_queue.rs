//! Promise: requests that cannot run yet wait in a bounded queue, know their place, are overtaken only so often, and end
//! at their deadline; those that run share every step so that nobody starves; idle sessions give their memory back after
//! a time. Time is a number here: no test waits for it.

use llmctl_engine::engine::MAX_BYPASSES;
use llmctl_engine::{RequestId, SessionState};
use proptest::prelude::*;

use crate::common::prelude::*;
use crate::common::toy::{drain, pages, step};

type Answers = HashMap<RequestId, Answer>;

fn engine_of(config: EngineConfig, rule: Rule) -> (Engine, Log) {
    let model = ToyModel::new(64, rule);
    let log = model.log();
    (Engine::new(Box::new(model), ToyVocabulary::numbers(64), config).expect("valid"), log)
}

/// One request at a time, prompts in chunks of 4.
fn one_at_a_time(max_waiting: usize) -> EngineConfig {
    let setup = Setup { max_running: 1, step_tokens: 4, spare_pages: 24, ..Setup::default() };
    EngineConfig { max_waiting, ..setup.config() }
}

fn due_after(seconds: u64, mut request: Request) -> Request {
    request.limits.deadline = Some(Duration::from_secs(seconds));
    request
}

fn step_at(engine: &mut Engine, now: Instant, answers: &mut Answers) {
    for (id, event) in engine.step_at(now) {
        answers.entry(id).or_default().events.push(event);
    }
}

fn positions(answer: &Answer) -> Vec<usize> {
    let position = |event: &Event| match event {
        Event::Queued { position } => Some(*position),
        _ => None,
    };
    answer.events.iter().filter_map(position).collect()
}

fn has_started(answers: &Answers, id: RequestId) -> bool {
    answers.get(&id).is_some_and(|answer| answer.events.iter().any(|e| matches!(e, Event::Started(_))))
}

fn reuse(answer: &Answer) -> Reuse {
    let started = answer.events.iter().find_map(|event| match event {
        Event::Started(started) => Some(started.reuse),
        _ => None,
    });
    started.expect("it started")
}

fn num_resident(engine: &Engine, session: &str) -> usize {
    engine.inspect_session(&named(session)).expect("open").info.num_resident
}

// ---- the bound

#[test]
fn a_request_beyond_the_queue_is_refused_before_any_work() {
    let (mut engine, log) = engine_of(one_at_a_time(2), counting(64));
    let ids = [1, 10, 20].map(|first| engine.submit(limited(&[first], 5)).expect("room"));
    // As many as may wait, whether those that have a place have taken it yet or not.
    let full = |engine: &mut Engine| {
        let num_sessions = engine.load().num_sessions;
        let refused = engine.submit(within("b", limited(&[30], 5)));
        assert!(matches!(refused, Err(Error::QueueFull { waiting }) if waiting == 2), "{refused:?}");
        assert_eq!(engine.load().num_sessions, num_sessions, "a refusal begins nothing");
    };
    full(&mut engine);
    let mut answers = Answers::new();
    step(&mut engine, &mut answers);
    full(&mut engine);
    assert!(engine.cancel(ids[1]));
    let last = engine.submit(within("a", limited(&[30], 5))).expect("room again");
    full(&mut engine);
    drain(&mut engine, &mut answers);
    assert_eq!(answers[&ids[2]].ids(), [21, 22, 23, 24, 25]);
    assert_eq!(answers[&last].ids(), [31, 32, 33, 34, 35]);
    assert!(!fed_tokens(&log).contains(&10));
}

#[test]
fn without_a_queue_what_cannot_run_is_refused() {
    let (mut engine, _) = engine_of(one_at_a_time(0), counting(64));
    assert_eq!(run_one(&mut engine, limited(&[1], 2)).ids(), [2, 3]);
    engine.submit(limited(&[1], 2)).expect("its place is free");
    assert!(matches!(engine.submit(limited(&[1], 2)), Err(Error::QueueFull { waiting: 0 })));
    engine.step();
    assert!(matches!(engine.submit(limited(&[1], 2)), Err(Error::QueueFull { waiting: 0 })));
}

// ---- the place

#[test]
fn those_who_wait_are_told_their_place_when_it_is_news() {
    let (mut engine, _) = engine_of(one_at_a_time(9), counting(64));
    let ids = [1, 2, 3, 4].map(|first| engine.submit(limited(&[first], 3)).expect("room"));
    let mut answers = Answers::new();
    step(&mut engine, &mut answers);
    step(&mut engine, &mut answers);
    let told = |answers: &Answers| ids.map(|id| answers.get(&id).map(positions).unwrap_or_default());
    assert_eq!(told(&answers), [vec![], vec![1], vec![2], vec![3]]);
    engine.cancel(ids[2]);
    step(&mut engine, &mut answers);
    assert_eq!(told(&answers), [vec![], vec![1], vec![2], vec![3, 2]]);
    drain(&mut engine, &mut answers);
    assert_eq!(told(&answers), [vec![], vec![1], vec![2], vec![3, 2, 1]]);
    answers.values().for_each(Answer::check_order);
    assert_eq!(answers[&ids[3]].ids(), [5, 6, 7]);
}

// ---- overtaking

/// Three pages in all, so that three requests of one page run at once, or one of three.
fn three_pages() -> EngineConfig {
    let setup = Setup { context_length: 3 * PAGE_TOKENS, max_running: 3, ..Setup::default() };
    EngineConfig { kv_memory: pages(3), ..setup.config() }
}

fn of_pages(pages: usize) -> Request {
    let mut request = limited(&[1], pages * PAGE_TOKENS - 1);
    request.limits.ignore_eos = true;
    request
}

#[test]
fn a_request_that_does_not_fit_lets_smaller_ones_pass() {
    let (mut engine, _) = engine_of(three_pages(), counting(64));
    let [first, large, small] = [2, 3, 1].map(|pages| engine.submit(of_pages(pages)).expect("valid"));
    let mut answers = Answers::new();
    step(&mut engine, &mut answers);
    let started = [first, large, small].map(|id| has_started(&answers, id));
    assert_eq!(started, [true, false, true]);
    drain(&mut engine, &mut answers);
    assert_eq!(answers[&large].ids().len(), 3 * PAGE_TOKENS - 1);
    assert_eq!(Some(engine.load().kv_free), pages(3));
}

#[test]
fn a_large_request_is_overtaken_only_so_often() {
    let (mut engine, _) = engine_of(three_pages(), counting(64));
    let mut answers = Answers::new();
    engine.submit(of_pages(1)).expect("valid");
    step(&mut engine, &mut answers);
    let large = engine.submit(of_pages(3)).expect("valid");
    let mut later = Vec::new();
    // There are always small ones that would fit, and they never all end at once.
    for _ in 0..(MAX_BYPASSES + 4) * 2 * PAGE_TOKENS {
        if engine.load().num_waiting < 3 {
            later.push(engine.submit(of_pages(1)).expect("valid"));
        }
        if !has_started(&answers, large) {
            step(&mut engine, &mut answers);
        }
    }
    assert!(has_started(&answers, large), "it would wait for ever");
    let overtaking = later.iter().filter(|&&id| has_started(&answers, id)).count();
    assert_eq!(overtaking, MAX_BYPASSES);
    drain(&mut engine, &mut answers);
    assert!(answers.values().all(Answer::has_ended));
}

// ---- deadlines

#[test]
fn a_deadline_that_passes_in_the_queue_fails_the_request_without_work() {
    let (mut engine, log) = engine_of(one_at_a_time(9), counting(64));
    run_one(&mut engine, within("old", limited(&[40], 2)));
    let (begin, mut answers) = (Instant::now(), Answers::new());
    let at = |seconds| begin + Duration::from_secs(seconds);
    let running = engine.submit_at(limited(&[1], 9), begin).expect("room");
    let mut late = |session, first| {
        engine.submit_at(due_after(5, within(session, limited(&[first], 9))), begin).expect("room")
    };
    let late = [late("old", 50), late("new", 51)];
    step_at(&mut engine, at(0), &mut answers);
    step_at(&mut engine, at(4), &mut answers);
    assert_eq!(engine.load().num_waiting, 2);
    assert_eq!(engine.inspect_session(&named("old")).expect("open").info.state, SessionState::Waiting);
    step_at(&mut engine, at(5), &mut answers);
    for id in late {
        answers[&id].check_order();
        let expected = Duration::from_secs(5);
        assert!(
            matches!(answers[&id].error(), Error::DeadlineExceeded { deadline } if *deadline == expected)
        );
        assert!(!has_started(&answers, id));
    }
    assert_eq!((engine.load().num_waiting, engine.load().num_sessions), (0, 1), "nothing began");
    drain(&mut engine, &mut answers);
    assert_eq!(answers[&running].ids().len(), 9);
    assert!(!fed_tokens(&log).iter().any(|token| [50, 51].contains(token)));
    let next = run_one(&mut engine, within("old", limited(&[40, 41, 1], 1)));
    assert_eq!((reuse(&next).cached_tokens, reuse(&next).reason), (2, ReuseReason::ExactPrefix));
}

#[test]
fn a_deadline_that_passes_between_prompt_chunks_ends_the_request_there() {
    let (mut engine, log) = engine_of(one_at_a_time(9), counting(64));
    let (begin, mut answers) = (Instant::now(), Answers::new());
    let prompt: Vec<u32> = (1..=20).collect();
    let request = due_after(10, within("a", limited(&prompt, 9)));
    let id = engine.submit_at(request, begin).expect("room");
    step_at(&mut engine, begin, &mut answers);
    step_at(&mut engine, begin + Duration::from_secs(9), &mut answers);
    step_at(&mut engine, begin + Duration::from_secs(10), &mut answers);
    answers[&id].check_order();
    let outcome = answers[&id].outcome();
    assert_eq!((&outcome.finish, outcome.finish.reason()), (&Finish::Deadline, "length"));
    assert_eq!((outcome.usage.prompt_tokens, outcome.usage.completion_tokens), (8, 0));
    assert_eq!((fed_tokens(&log).len(), engine.is_idle()), (8, true));
    // What has been computed stays with the session.
    let again = run_one(&mut engine, within("a", limited(&prompt, 1)));
    assert_eq!((reuse(&again).cached_tokens, reuse(&again).reason), (8, ReuseReason::ExactPrefix));
    assert_eq!(again.ids(), [21]);
}

#[test]
fn a_deadline_that_passes_while_it_generates_keeps_what_was_said() {
    let (mut engine, _) = engine_of(one_at_a_time(9), counting(64));
    let (begin, mut answers) = (Instant::now(), Answers::new());
    let id = engine.submit_at(due_after(3, within("a", limited(&[1], 50))), begin).expect("room");
    for second in 0..=3 {
        step_at(&mut engine, begin + Duration::from_secs(second), &mut answers);
    }
    assert_eq!((answers[&id].text().as_str(), answers[&id].finish()), ("2 3 4 ", &Finish::Deadline));
    // The last token sampled was never fed; the session holds what was.
    assert_eq!(engine.inspect_session(&named("a")).expect("open").tokens, [1, 2, 3]);
    assert!(!engine.cancel(id), "it has ended");
}

#[test]
fn text_held_back_for_a_stop_string_comes_out_at_the_deadline() {
    let vocabulary = ToyVocabulary::new(&["", "x", "<e", "nd", ">y", "</s>"], &[]);
    let setup = Setup { vocab_size: 6, end_of_generation: vec![5], ..Setup::default() };
    let (mut engine, _) = setup.engine_with(ToyModel::new(6, counting(6)), vocabulary);
    let (begin, mut answers) = (Instant::now(), Answers::new());
    let mut request = due_after(1, limited(&[0], 9));
    request.limits.stop = vec!["<end>".to_owned()];
    let id = engine.submit_at(request, begin).expect("room");
    step_at(&mut engine, begin, &mut answers);
    step_at(&mut engine, begin, &mut answers);
    assert_eq!(answers[&id].text(), "x");
    step_at(&mut engine, begin + Duration::from_secs(1), &mut answers);
    assert_eq!((answers[&id].text().as_str(), answers[&id].finish()), ("x<e", &Finish::Deadline));
}

#[test]
fn a_deadline_that_is_not_reached_changes_nothing() {
    let far = |mut request: Request| {
        request.limits.deadline = Some(Duration::MAX);
        request
    };
    let prompt: Vec<u32> = (0..50).collect();
    let request = Request { sampling: seeded(3), ..limited(&prompt, 20) };
    let plain = run_one(&mut Setup::default().engine(hashing(64)), request.clone());
    let answer = run_one(&mut Setup::default().engine(hashing(64)), far(request));
    assert_eq!((answer.tokens(), answer.finish()), (plain.tokens(), plain.finish()));
    let mut engine = Setup::default().engine(counting(64));
    let spent = run_one(&mut engine, due_after(0, limited(&[1], 1)));
    assert!(matches!(spent.error(), Error::DeadlineExceeded { deadline: Duration::ZERO }));
}

#[test]
fn a_cancelled_request_takes_the_session_with_it_that_would_have_begun() {
    let (mut engine, _) = engine_of(one_at_a_time(9), counting(64));
    run_one(&mut engine, within("old", limited(&[1], 2)));
    engine.submit(limited(&[1], 9)).expect("room");
    let waiting = ["old", "new"].map(|name| engine.submit(within(name, limited(&[2], 9))).expect("room"));
    engine.step();
    assert_eq!(engine.load().num_sessions, 2);
    waiting.iter().for_each(|&id| assert!(engine.cancel(id)));
    let left: Vec<_> = engine.list_sessions().into_iter().map(|info| (info.name, info.state)).collect();
    assert_eq!(left, [(named("old"), SessionState::Idle)]);
}

// ---- shares of a step

#[test]
fn running_streams_get_a_token_in_every_step_whatever_prompts_come() {
    let setup = Setup { step_tokens: 16, max_running: 8, context_length: 512, ..Setup::default() };
    let (mut engine, log) = setup.engine_and_log(hashing(64));
    let mut answers = Answers::new();
    let endless = |first| {
        let mut request = limited(&[first], 300);
        request.limits.ignore_eos = true;
        request
    };
    let streams = [1, 2, 3].map(|first| engine.submit(endless(first)).expect("valid"));
    step(&mut engine, &mut answers);
    let prompts = [400u32, 300, 5, 350]
        .map(|len| engine.submit(limited(&vec![len / 8 % 60; len as usize], 1)).expect("valid"));
    for generated in 2..=110 {
        step(&mut engine, &mut answers);
        for id in streams {
            assert_eq!(answers[&id].ids().len(), generated);
        }
        let done: Vec<_> = prompts.iter().map(|id| answers[id].has_ended()).collect();
        assert_eq!(done[2], generated >= 4, "a short prompt passes the long ones: {done:?}");
    }
    assert!(prompts.iter().all(|id| answers[id].has_ended()));
    assert!(log.lock().expect("unpoisoned").iter().all(|rows| rows.len() <= 16));
}

#[test]
fn more_sequences_than_rows_take_turns_and_answer_the_same() {
    let requests = || -> Vec<Request> {
        let prompt = |n: u32| (0..n * 5 + 1).map(|i| (i * 7 + n) % 60).collect::<Vec<_>>();
        (0..6).map(|n| Request { sampling: seeded(n.into()), ..limited(&prompt(n), 20) }).collect()
    };
    let alone: Vec<_> =
        requests().into_iter().map(|r| run_one(&mut Setup::default().engine(hashing(64)), r)).collect();
    for step_tokens in [1, 2, 5] {
        let setup = Setup { step_tokens, max_running: 6, ..Setup::default() };
        let (mut engine, log) = setup.engine_and_log(hashing(64));
        let together = run_all(&mut engine, requests());
        for (alone, together) in alone.iter().zip(&together) {
            assert_eq!(alone.tokens(), together.tokens(), "steps of {step_tokens}");
        }
        assert!(log.lock().expect("unpoisoned").iter().all(|rows| rows.len() <= step_tokens));
    }
}

#[test]
fn nobody_goes_without_a_token_for_long() {
    let setup = Setup { step_tokens: 2, max_running: 5, ..Setup::default() };
    let mut engine = setup.engine(counting(64));
    let ids: Vec<_> = (0..5).map(|_| engine.submit(of_pages(2)).expect("valid")).collect();
    let mut answers = Answers::new();
    for steps in 1..=50usize {
        step(&mut engine, &mut answers);
        for id in &ids {
            let generated = answers.get(id).map_or(0, |answer| answer.ids().len());
            assert!(
                [steps * 2 / 5, (steps * 2).div_ceil(5)].contains(&generated),
                "{generated} after {steps}"
            );
        }
    }
}

// ---- idle sessions

fn with_ttl(seconds: u64) -> EngineConfig {
    EngineConfig { session_ttl: Some(Duration::from_secs(seconds)), ..Setup::default().config() }
}

/// Steps until nothing is in flight, all at one time.
fn run_at(engine: &mut Engine, now: Instant, request: Request) -> Answer {
    let id = engine.submit_at(request, now).expect("valid");
    let mut answers = Answers::new();
    while !engine.is_idle() {
        step_at(engine, now, &mut answers);
    }
    answers.remove(&id).expect("answered")
}

#[test]
fn an_idle_session_loses_its_pages_and_its_slot_after_a_time_and_can_be_brought_back() {
    let (mut engine, _) = engine_of(with_ttl(60), counting(64));
    let begin = Instant::now();
    let at = |seconds| begin + Duration::from_secs(seconds);
    run_at(&mut engine, at(0), within("a", limited(&[1, 2, 3], 3)));
    run_at(&mut engine, at(10), within("b", limited(&[11, 12, 13], 3)));
    assert_eq!(engine.next_wakeup(), Some(at(60)));
    engine.step_at(at(59));
    assert_eq!((num_resident(&engine, "a"), num_resident(&engine, "b")), (5, 5));
    engine.step_at(at(60));
    assert!(matches!(engine.inspect_session(&named("a")), Err(Error::SessionNotFound(_))));
    assert_eq!((engine.load().num_sessions, num_resident(&engine, "b")), (1, 5));
    // Use counts from its end on.
    assert_eq!(engine.next_wakeup(), Some(at(70)));
    run_at(&mut engine, at(65), within("b", limited(&[11, 12, 13, 14, 15, 16], 1)));
    assert_eq!(engine.next_wakeup(), Some(at(125)));
    engine.step_at(at(1000));
    assert_eq!(engine.next_wakeup(), None, "nothing is left to lose");
    assert_eq!(engine.load().kv_free, engine.load().kv_capacity);
    assert_eq!(engine.load().num_sessions, 0);
    engine.restore_session(&named("a"), vec![1, 2, 3, 4, 5]).expect("a slot");
    let back = run_at(&mut engine, at(1001), within("a", limited(&[1, 2, 3, 4, 5, 6], 1)));
    assert_eq!((reuse(&back).cached_tokens, reuse(&back).reason), (0, ReuseReason::Evicted));
}

#[test]
fn a_session_with_a_request_is_not_idle() {
    let (mut engine, _) = engine_of(EngineConfig { max_running: 1, ..with_ttl(60) }, counting(64));
    let begin = Instant::now();
    let at = |seconds| begin + Duration::from_secs(seconds);
    run_at(&mut engine, at(0), within("waits", limited(&[1, 2, 3], 3)));
    let runs = engine.submit_at(within("runs", limited(&[21], 30)), at(1)).expect("room");
    let waits = engine.submit_at(within("waits", limited(&[1, 2, 3, 4, 5, 6], 2)), at(1)).expect("room");
    let mut answers = Answers::new();
    for second in [50, 100, 200] {
        step_at(&mut engine, at(second), &mut answers);
    }
    assert_eq!((num_resident(&engine, "runs"), num_resident(&engine, "waits")), (3, 5));
    while !engine.is_idle() {
        step_at(&mut engine, at(200), &mut answers);
    }
    assert_eq!(answers[&runs].ids().len(), 30);
    assert_eq!(reuse(&answers[&waits]).cached_tokens, 5);
    assert_eq!(engine.next_wakeup(), Some(at(260)));
}

#[test]
fn a_fork_is_a_use_and_without_a_time_to_live_nobody_is_woken() {
    let (mut engine, _) = engine_of(with_ttl(60), counting(64));
    let begin = Instant::now();
    run_at(&mut engine, begin, within("a", limited(&[1, 2, 3], 3)));
    engine.fork_session(&named("a"), &named("b")).expect("idle");
    assert!(
        engine.next_wakeup().is_some_and(|at| at <= Instant::now()),
        "its time begins with the next step"
    );
    engine.step_at(begin + Duration::from_secs(30));
    engine.step_at(begin + Duration::from_secs(60));
    assert_eq!((engine.load().num_sessions, num_resident(&engine, "b")), (1, 5));
    assert_eq!(engine.next_wakeup(), Some(begin + Duration::from_secs(90)));

    let (mut engine, _) = engine_of(Setup::default().config(), counting(64));
    run_at(&mut engine, begin, within("a", limited(&[1, 2, 3], 3)));
    assert_eq!(engine.next_wakeup(), None);
    engine.step_at(begin + Duration::from_secs(1 << 30));
    assert_eq!(num_resident(&engine, "a"), 5);
}

#[test]
fn a_session_that_never_held_anything_gives_its_slot_back_too() {
    let (mut engine, _) = engine_of(with_ttl(60), counting(64));
    let begin = Instant::now();
    engine.restore_session(&named("a"), vec![1, 2, 3]).expect("a slot");
    engine.step_at(begin);
    assert_eq!(engine.next_wakeup(), Some(begin + Duration::from_secs(60)));
    engine.step_at(begin + Duration::from_secs(60));
    assert_eq!((engine.load().num_sessions, engine.next_wakeup()), (0, None));
}

#[test]
fn sessions_driven_by_hand_do_not_expire() {
    let (mut engine, log) = engine_of(with_ttl(1), counting(64));
    let id = engine.create_session().expect("room");
    engine.prefill_tokens(id, &[1, 2, 3], &seeded(1)).expect("valid");
    assert_eq!(engine.next_wakeup(), None);
    engine.step_at(Instant::now() + Duration::from_secs(100));
    assert_eq!((engine.position(id).expect("open"), num_forwards(&log)), (3, 1));
}

// ---- properties

#[derive(Debug, Clone)]
enum Action {
    Submit {
        session: usize,
        prompt: Vec<u32>,
        max_tokens: usize,
        deadline: Option<u64>,
    },
    Cancel(prop::sample::Index),
    /// A step, so many seconds after the one before.
    Step(u64),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let prompt = prop::collection::vec(0u32..60, 1..60);
    let submit = (0usize..4, prompt, 1usize..60, prop::option::of(0u64..12));
    let submit = submit.prop_map(|(session, prompt, max_tokens, deadline)| Action::Submit {
        session,
        prompt,
        max_tokens,
        deadline,
    });
    let cancel = any::<prop::sample::Index>().prop_map(Action::Cancel);
    prop::collection::vec(prop_oneof![3 => submit, 1 => cancel, 6 => (0u64..3).prop_map(Action::Step)], 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// The engine checks its books at every idle moment, the toy model every row it reads.
    #[test]
    fn whatever_waits_expires_or_is_cancelled_the_answers_are_those_of_requests_alone(
        actions in actions(), step_tokens in 1usize..20, max_running in 1usize..5, max_waiting in 0usize..6,
        num_pages in 4usize..10, ttl in prop::option::of(0u64..10),
    ) {
        let config = EngineConfig {
            step_tokens, max_running, max_waiting, kv_memory: pages(num_pages), max_sessions: 2, context_length: 128,
            session_ttl: ttl.map(Duration::from_secs), ..Setup::default().config()
        };
        let (mut engine, _) = engine_of(config, hashing(64));
        let (mut answers, mut submitted, mut now) = (Answers::new(), Vec::new(), Instant::now());
        for action in actions {
            match action {
                Action::Submit { session, prompt, max_tokens, deadline } => {
                    let request = Request {
                        session: ["a", "b", "c"].get(session).map(|name| named(name)),
                        sampling: seeded(7),
                        ..limited(&prompt, max_tokens)
                    };
                    let due = deadline.map_or(request.clone(), |deadline| due_after(deadline, request.clone()));
                    match engine.submit_at(due, now) {
                        Ok(id) => submitted.push((id, request)),
                        Err(Error::QueueFull { waiting }) => prop_assert_eq!(waiting, max_waiting),
                        Err(error) => prop_assert!(
                            matches!(error, Error::SessionBusy(_) | Error::SessionsFull { .. }), "{}", error
                        ),
                    }
                    prop_assert!(engine.load().num_waiting <= max_running + max_waiting);
                }
                Action::Cancel(which) if !submitted.is_empty() => drop(engine.cancel(which.get(&submitted).0)),
                Action::Cancel(_) => {}
                Action::Step(seconds) => {
                    now += Duration::from_secs(seconds);
                    step_at(&mut engine, now, &mut answers);
                }
            }
        }
        while !engine.is_idle() {
            step_at(&mut engine, now, &mut answers);
        }
        for (id, request) in submitted {
            let answer = &answers[&id];
            answer.check_order();
            prop_assert!(positions(answer).windows(2).all(|pair| pair[0] > pair[1]), "only ever better");
            if matches!(answer.events.last(), Some(Event::Failed(Error::DeadlineExceeded { .. }))) {
                prop_assert_eq!(positions(answer).len() + 1, answer.events.len(), "it never started");
                continue;
            }
            let alone = run_one(&mut Setup::default().engine(hashing(64)), Request { session: None, ..request });
            match answer.finish() {
                Finish::Cancelled | Finish::Deadline => prop_assert!(alone.ids().starts_with(&answer.ids())),
                finish => prop_assert_eq!((answer.ids(), finish), (alone.ids(), alone.finish())),
            }
        }
        engine.step_at(now + Duration::from_secs(100));
        if ttl.is_some() {
            prop_assert_eq!(engine.load().kv_free, engine.load().kv_capacity);
            prop_assert_eq!(engine.next_wakeup(), None);
        }
    }
}
