//! Promise: the engine behind its thread answers many callers at once, stops working for those who have gone, is not held
//! up by slow readers, and says so when it is gone. No test here depends on time: models wait at gates.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};

use llmctl_engine::{EventStream, NotYet};

use crate::common::prelude::*;
use crate::common::toy::{TOY_PAGE_BYTES, request};

fn spawn(setup: Setup, rule: Rule) -> (EngineClient, Log) {
    spawn_model(setup, ToyModel::new(64, rule))
}

fn spawn_model(setup: Setup, model: ToyModel) -> (EngineClient, Log) {
    let log = model.log();
    let build = move || Ok(setup.engine_with(model, ToyVocabulary::numbers(64)).0);
    (EngineClient::spawn(build).expect("builds"), log)
}

/// Counts, but each sampling waits for a permit; when the gate is dropped all pass.
fn gated() -> (Rule, Sender<()>) {
    let (gate, permits) = mpsc::channel();
    let mut count = counting(64);
    let rule = move |history: &[u32]| {
        let _ = permits.recv(); // fails when the gate is open for good
        count(history)
    };
    (Box::new(rule), gate)
}

fn read(stream: EventStream) -> Answer {
    let answer = Answer { events: stream.collect() };
    answer.check_order();
    answer
}

fn wait_for(stream: &mut EventStream, wanted: impl Fn(&Event) -> bool) {
    assert!(stream.any(|event| wanted(&event)), "the event never came");
}

fn is_text(event: &Event) -> bool {
    matches!(event, Event::Text { .. })
}

#[test]
fn the_handle_may_be_shared() {
    fn check<T: Send + Sync + Clone + 'static>() {}
    fn check_stream<T: Send + 'static>() {}
    check::<EngineClient>();
    check_stream::<EventStream>();
}

#[test]
fn many_callers_each_get_their_own_answer() {
    let (handle, _) = spawn(Setup::default(), hashing(64));
    let callers: Vec<_> = (0..12u32)
        .map(|caller| {
            let handle = handle.clone();
            std::thread::spawn(move || {
                let prompt: Vec<u32> = (0..=caller * 3).collect();
                let request = Request { sampling: seeded(caller.into()), ..limited(&prompt, 25) };
                let stream = handle.submit(request.clone()).expect("valid");
                (request, read(stream))
            })
        })
        .collect();
    for caller in callers {
        let (request, answer) = caller.join().expect("no panic");
        let alone = run_one(&mut Setup::default().engine(hashing(64)), request);
        assert_eq!(answer.ids(), alone.ids());
        assert_eq!(answer.finish(), alone.finish());
    }
}

#[test]
fn bad_requests_are_refused_by_value_without_work() {
    let (handle, log) = spawn(Setup::default(), counting(64));
    assert!(matches!(handle.submit(request(&[])), Err(Error::PromptEmpty)));
    assert!(matches!(handle.submit(request(&[1; 256])), Err(Error::PromptTooLong { .. })));
    let sampling = Sampling { temperature: 3.0, ..Sampling::default() };
    let refused = handle.submit(Request { sampling, ..request(&[1]) });
    assert!(matches!(refused, Err(Error::InvalidParameter { name: "temperature", .. })));
    drop(handle);
    assert_eq!(num_forwards(&log), 0);
}

#[test]
fn a_refusal_that_depends_on_the_engines_state_is_the_first_event() {
    let setup = Setup { max_running: 1, ..Setup::default() };
    let build = move || {
        let mut engine = setup.engine(counting(64));
        engine.create_session()?; // holds all pages
        Ok(engine)
    };
    let handle = EngineClient::spawn(build).expect("builds");
    let answer = read(handle.submit(request(&[1])).expect("valid in itself"));
    assert!(matches!(answer.events[..], [Event::Failed(Error::SessionsFull { capacity: 1 })]));
}

#[test]
fn a_dropped_stream_stops_its_generation_within_a_step() {
    let (rule, gate) = gated();
    let (handle, log) = spawn(Setup::default(), rule);
    let mut stream = handle.submit(limited(&[1], 200)).expect("valid");
    gate.send(()).expect("the engine lives");
    wait_for(&mut stream, is_text);
    drop(stream);
    drop(gate);
    let answer = read(handle.submit(limited(&[30], 5)).expect("valid"));
    assert_eq!(answer.ids(), [31, 32, 33, 34, 35]);
    drop(handle);
    // The prompt, and at most the one step that had begun when the stream was dropped.
    let dropped: Vec<u32> = fed_tokens(&log).into_iter().filter(|&token| token < 30).collect();
    assert!([&[1][..], &[1, 2]].contains(&&dropped[..]), "{dropped:?}");
}

/// A gate for every forward pass, for prompts whose chunks sample nothing.
fn held(model: ToyModel, gate: mpsc::Receiver<()>) -> ToyModel {
    model.with_hook(Box::new(move || {
        let _ = gate.recv(); // fails when the gate is open for good
        Ok(())
    }))
}

#[test]
fn a_dropped_stream_stops_its_prompt_between_chunks() {
    let setup = Setup { step_tokens: 4, ..Setup::default() };
    let (gate, permits) = mpsc::channel();
    let model = ToyModel::new(64, counting(64));
    let log = model.log();
    let build = move || {
        let model = Box::new(held(model, permits));
        Engine::new(model, ToyVocabulary::numbers(64), setup.config())
    };
    let handle = EngineClient::spawn(build).expect("builds");
    let mut stream = handle.submit(limited(&[9; 100], 10)).expect("valid");
    gate.send(()).expect("the engine lives");
    wait_for(&mut stream, |event| matches!(event, Event::Prefill { done: 4, total: 100 }));
    drop(stream);
    drop(gate);
    assert_eq!(read(handle.submit(limited(&[30], 2)).expect("valid")).ids(), [31, 32]);
    drop(handle);
    let computed = fed_tokens(&log).iter().filter(|&&token| token == 9).count();
    assert!([4, 8].contains(&computed), "{computed} of 100 prompt tokens were computed");
}

#[test]
fn an_explicit_cancel_still_delivers_the_end() {
    let (rule, gate) = gated();
    let (handle, _) = spawn(Setup::default(), rule);
    let mut stream = handle.submit(limited(&[1], 200)).expect("valid");
    (0..3).for_each(|_| gate.send(()).expect("the engine lives"));
    (0..3).for_each(|_| wait_for(&mut stream, is_text));
    let stop = stream.stop_handle();
    std::thread::spawn(move || stop.stop()).join().expect("no panic");
    drop(gate);
    let rest = Answer { events: stream.by_ref().collect() };
    let outcome = rest.outcome();
    assert_eq!((&outcome.finish, outcome.usage.prompt_tokens), (&Finish::Cancelled, 1));
    assert_eq!(outcome.usage.completion_tokens, 3 + rest.ids().len());
    assert!(rest.ids().len() <= 1);
    assert!(stream.next().is_none(), "nothing follows the end");
}

#[test]
fn a_cancelled_request_that_waits_never_starts() {
    let (rule, gate) = gated();
    let (handle, log) = spawn(Setup { max_running: 1, ..Setup::default() }, rule);
    let running = handle.submit(limited(&[1], 3)).expect("valid");
    let waiting = handle.submit(limited(&[40], 3)).expect("valid");
    waiting.cancel();
    drop(gate);
    let answer = read(waiting);
    assert!(matches!(&answer.events[..], [Event::Done(outcome)] if outcome.finish == Finish::Cancelled));
    assert_eq!(read(running).ids(), [2, 3, 4]);
    drop(handle);
    assert!(!fed_tokens(&log).contains(&40));
}

#[test]
fn a_reader_that_does_not_read_holds_up_nobody() {
    let (handle, _) = spawn(Setup { max_running: 2, ..Setup::default() }, counting(64));
    let mut ignored = request(&[1]);
    ignored.limits.ignore_eos = true;
    let unread = handle.submit(ignored).expect("valid");
    for _ in 0..5 {
        assert_eq!(read(handle.submit(limited(&[5], 40)).expect("valid")).ids().len(), 40);
    }
    let late = read(unread);
    assert_eq!(
        (late.ids().len(), late.finish()),
        (255, &Finish::ContextFull),
        "all is there when it reads at last"
    );
}

#[test]
fn next_timeout_gives_up_and_goes_on() {
    let (rule, gate) = gated();
    let (handle, _) = spawn(Setup::default(), rule);
    let mut stream = handle.submit(limited(&[1], 2)).expect("valid");
    assert!(matches!(stream.next_timeout(Duration::from_millis(1)), Err(NotYet)), "the gate is closed");
    drop(gate);
    let mut answer = Answer::default();
    loop {
        match stream.next_timeout(Duration::from_secs(3600)) {
            Ok(Some(event)) => answer.events.push(event),
            Ok(None) => break,
            Err(NotYet) => panic!("an hour has passed"),
        }
    }
    assert_eq!(answer.ids(), [2, 3]);
    answer.check_order();
}

#[test]
fn a_sink_gets_the_events_and_can_end_the_generation() {
    let (handle, log) = spawn(Setup::default(), counting(64));
    let events = Arc::new(Mutex::new(Vec::new()));
    let (done, ended) = mpsc::channel();
    let seen = events.clone();
    let sink = move |event: Event| {
        let is_last = matches!(event, Event::Done(_) | Event::Failed(_));
        let mut seen = seen.lock().expect("unpoisoned");
        seen.push(event);
        if is_last {
            let _ = done.send(());
        }
        let enough = seen.iter().filter(|event| is_text(event)).count() == 3;
        if enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    handle.submit_to(limited(&[1], 100), Box::new(sink)).expect("valid");
    ended.recv().expect("the end comes");
    let answer = Answer { events: events.lock().expect("unpoisoned").clone() };
    assert_eq!((answer.ids(), answer.finish()), (vec![2, 3, 4], &Finish::Cancelled));
    drop(handle);
    assert_eq!(fed_tokens(&log), [1, 2, 3], "cancelled before the next step");
}

#[test]
fn dropping_the_last_handle_ends_the_thread_and_what_runs() {
    let (rule, gate) = gated();
    let (handle, log) = spawn(Setup::default(), rule);
    let clone = handle.clone();
    let mut stream = handle.submit(limited(&[1], 200)).expect("valid");
    gate.send(()).expect("the engine lives");
    wait_for(&mut stream, is_text);
    drop(handle);
    let mut second = clone.submit(limited(&[30], 200)).expect("a clone is enough");
    drop(gate);
    wait_for(&mut second, is_text);
    drop(clone);
    assert_eq!(Arc::strong_count(&log), 1, "the thread is gone, and the model with it");
    for stream in [stream, second] {
        let events: Vec<Event> = stream.collect();
        let gone = matches!(events.last(), Some(Event::Failed(Error::EngineGone)));
        assert!(gone || matches!(events.last(), Some(Event::Done(_))), "{:?}", events.last());
    }
}

#[test]
fn an_engine_that_cannot_be_built_is_an_error() {
    let refused = EngineClient::spawn(|| Err(Error::Backend("no device".to_owned())));
    assert!(matches!(refused, Err(Error::Backend(message)) if message == "no device"));
    let panicked = EngineClient::spawn(|| panic!("while building"));
    assert!(matches!(panicked, Err(Error::EngineGone)));
}

#[test]
fn a_dead_engine_is_reported_to_all() {
    let (handle, _) = spawn(Setup::default(), counting(64));
    let guarded = || {
        let (guard, dropped) = mpsc::channel::<()>();
        handle.drop_at_end(Box::new(guard));
        dropped
    };
    let guard = guarded();
    assert_eq!(guard.recv_timeout(Duration::from_millis(20)), Err(RecvTimeoutError::Timeout), "it lives");
    let other = handle.submit(request(&[1])).expect("valid");
    let mut broken = false;
    let sink = move |_| {
        if !std::mem::replace(&mut broken, true) {
            panic!("a sink must not");
        }
        ControlFlow::Continue(())
    };
    handle.submit_to(limited(&[1], 3), Box::new(sink)).expect("valid");
    assert!(
        other.last().is_some_and(|event| matches!(event, Event::Failed(Error::EngineGone) | Event::Done(_)))
    );
    // The thread is dying: at the latest after a few tries every request fails with the same word.
    let gone = std::iter::repeat_with(|| handle.submit(limited(&[1], 1)).map(|stream| stream.last()));
    let mut gone = gone.map(|result| matches!(result, Err(Error::EngineGone)));
    assert!(gone.by_ref().take(1_000_000).any(|gone| gone));
    for guard in [guard, guarded()] {
        assert_eq!(guard.recv_timeout(Duration::from_secs(60)), Err(RecvTimeoutError::Disconnected));
    }
}

#[test]
fn a_model_that_panics_fails_its_requests_and_the_thread_lives_on() {
    let mut count = counting(64);
    let rule: Rule = Box::new(move |history| {
        assert_ne!(history.last(), Some(&33), "the chosen token");
        count(history)
    });
    let (handle, _) = spawn(Setup::default(), rule);
    let failed = read(handle.submit(limited(&[31], 9)).expect("valid"));
    assert_eq!(failed.ids(), [32, 33]);
    assert!(matches!(failed.error(), Error::Backend(message) if message.contains("the chosen token")));
    assert_eq!(read(handle.submit(limited(&[1], 3)).expect("valid")).ids(), [2, 3, 4]);
}

#[test]
fn sessions_are_asked_for_through_the_handle_while_others_run() {
    let (rule, gate) = gated();
    let (handle, _) = spawn(Setup::default(), rule);
    let within = |name: &str, request| Request { session: Some(named(name)), ..request };
    let mut stream = handle.submit(within("a", limited(&[1], 50))).expect("valid");
    gate.send(()).expect("the engine lives");
    wait_for(&mut stream, is_text);
    let second = handle.submit(within("a", limited(&[1], 1))).expect("valid in itself");
    drop(gate);
    assert!(matches!(read(second).error(), Error::SessionBusy(name) if name == "a"));
    while stream.next().is_some() {}
    handle.fork_session(&named("a"), &named("b")).expect("idle");
    handle.reset_session(&named("a")).expect("idle");
    let listed = handle.list_sessions().expect("the engine lives");
    let listed: Vec<_> = listed.iter().map(|info| (info.name.as_str(), info.num_tokens)).collect();
    assert_eq!(listed, [("a", 0), ("b", 50)]);
    assert_eq!(handle.inspect_session(&named("b")).expect("open").tokens, (1..=50).collect::<Vec<_>>());
    handle.close_session(&named("b")).expect("idle");
    assert!(matches!(handle.close_session(&named("b")), Err(Error::SessionNotFound(name)) if name == "b"));
}

#[test]
fn drawn_seeds_differ_between_requests() {
    let (handle, _) = spawn(Setup::default(), hashing(64));
    let seed = |_| read(handle.submit(limited(&[1], 1)).expect("valid")).outcome().seed;
    assert!((0..8).map(seed).collect::<HashSet<u64>>().len() > 1);
}

// ---- the queue

/// One request runs, and stands at its gate; whatever else is submitted waits.
fn crowded(max_waiting: usize, ttl: Option<Duration>) -> (EngineClient, Log, Sender<()>) {
    let (rule, gate) = gated();
    let model = ToyModel::new(64, rule);
    let log = model.log();
    let build = move || {
        let one = Setup { max_running: 1, ..Setup::default() }.config();
        let config = EngineConfig { max_waiting, session_ttl: ttl, ..one };
        Engine::new(Box::new(model), ToyVocabulary::numbers(64), config)
    };
    (EngineClient::spawn(build).expect("builds"), log, gate)
}

#[test]
fn a_full_queue_is_the_first_event_and_a_place_in_it_another() {
    let (handle, _, gate) = crowded(1, None);
    let mut running = handle.submit(limited(&[1], 5)).expect("valid");
    gate.send(()).expect("the engine lives");
    wait_for(&mut running, is_text);
    let mut waiting = handle.submit(limited(&[10], 2)).expect("valid");
    let refused = handle.submit(limited(&[20], 2)).expect("valid in itself");
    // One permit for the step that has begun, and one for the first that knows of the others.
    (0..2).for_each(|_| gate.send(()).expect("the engine lives"));
    wait_for(&mut waiting, |event| matches!(event, Event::Queued { position: 1 }));
    drop(gate);
    let refused = read(refused);
    assert!(matches!(refused.events[..], [Event::Failed(Error::QueueFull { waiting: 1 })]));
    assert_eq!(read(waiting).ids(), [11, 12]);
}

#[test]
fn a_deadline_ends_a_waiting_request_while_another_runs() {
    let (handle, log, gate) = crowded(9, None);
    let running = handle.submit(limited(&[1], 5)).expect("valid");
    let mut late = limited(&[40], 2);
    late.limits.deadline = Some(Duration::ZERO);
    let late = handle.submit(late).expect("valid");
    drop(gate);
    assert!(matches!(read(late).error(), Error::DeadlineExceeded { .. }));
    assert_eq!(read(running).ids().len(), 5);
    assert_eq!(handle.load().expect("the engine lives").num_waiting, 0);
    drop(handle);
    assert!(!fed_tokens(&log).contains(&40));
}

#[test]
fn a_deadline_ends_a_running_request_with_what_it_said() {
    // Would run for as many tokens as a test can bear, but the deadline comes first, whenever that is.
    let setup = Setup { context_length: 1 << 20, max_running: 1, ..Setup::default() };
    let (handle, _) = spawn(setup, counting(64));
    let mut endless = request(&[1]);
    endless.limits.ignore_eos = true;
    endless.limits.deadline = Some(Duration::from_millis(20));
    let answer = read(handle.submit(endless).expect("valid"));
    match answer.events.last() {
        Some(Event::Done(outcome)) => assert_eq!(outcome.finish, Finish::Deadline),
        // The machine was so slow that it had not even begun.
        other => assert!(matches!(other, Some(Event::Failed(Error::DeadlineExceeded { .. }))), "{other:?}"),
    }
}

#[test]
fn an_idle_engine_wakes_to_take_an_idle_sessions_pages_and_slot() {
    let (handle, _, gate) = crowded(9, Some(Duration::from_millis(1)));
    drop(gate);
    let within = Request { session: Some(named("a")), ..limited(&[1, 2], 2) };
    assert_eq!(read(handle.submit(within).expect("valid")).ids(), [3, 4]);
    // Asking is a command, after which the loop sleeps again until the session's time is up.
    let num_sessions = || handle.list_sessions().expect("the engine lives").len();
    let expired = std::iter::repeat_with(num_sessions).take(1_000_000).any(|count| count == 0);
    assert!(expired, "its slot was never taken");
    let load = handle.load().expect("the engine lives");
    assert_eq!((load.num_sessions, load.kv_free), (0, load.kv_capacity));
}

#[test]
fn an_idle_engine_prepares_memory_until_enough_is_ready() {
    let (asked, asks) = mpsc::channel();
    let mut left: i32 = 3;
    let model = ToyModel::new(64, counting(64)).with_preparation(move |most| {
        left -= 1;
        asked.send(most).is_ok() && left > 0
    });
    let setup = Setup { context_length: 80 * PAGE_TOKENS, max_running: 1, ..Setup::default() };
    let (handle, _) = spawn_model(setup, model);
    let most = || asks.recv().expect("the engine lives");
    assert_eq!([most(), most(), most()], [10 * TOY_PAGE_BYTES; 3], "an eighth");
    read(handle.submit(limited(&[1; 76 * PAGE_TOKENS], 3)).expect("valid"));
    assert_eq!(most(), 3 * TOY_PAGE_BYTES, "what 77 pages leave of 80");
    assert!(asks.try_recv().is_err(), "enough was ready");
}

#[test]
fn the_last_load_is_known_without_waiting_for_the_step() {
    let (rule, gate) = gated();
    let (handle, _) = spawn(Setup { max_running: 1, ..Setup::default() }, rule);
    assert_eq!(handle.last_load(), handle.load().expect("it lives"));
    let mut running = handle.submit(limited(&[1], 50)).expect("valid");
    let mut waiting = handle.submit(limited(&[2], 50)).expect("valid");
    // Two steps: the first may have begun before the second request was there.
    (0..2).for_each(|_| gate.send(()).expect("the engine lives"));
    wait_for(&mut running, is_text);
    wait_for(&mut waiting, |event| matches!(event, Event::Queued { position: 1 }));
    // The engine waits in a step; to ask it would take until the gate opens.
    let load = handle.last_load();
    assert_eq!((load.num_running, load.num_waiting), (1, 1));
    drop(gate);
    read(running);
    read(waiting);
    assert_eq!(handle.last_load().num_running, 0, "whoever heard the end finds it gone");
}

#[test]
fn all_can_be_cancelled_at_once() {
    let (rule, gate) = gated();
    let (handle, _) = spawn(Setup { max_running: 1, ..Setup::default() }, rule);
    let mut running = handle.submit(limited(&[1], 50)).expect("valid");
    let waiting = handle.submit(limited(&[2], 50)).expect("valid");
    gate.send(()).expect("the engine lives");
    wait_for(&mut running, is_text);
    handle.cancel_all().expect("the engine lives");
    drop(gate);
    for stream in [running, waiting] {
        let last = stream.last();
        assert!(
            matches!(&last, Some(Event::Done(outcome)) if outcome.finish == Finish::Cancelled),
            "{last:?}"
        );
    }
    let after = read(handle.submit(limited(&[5], 2)).expect("valid"));
    assert_eq!(after.ids(), [6, 7], "what comes later is not meant");
}
