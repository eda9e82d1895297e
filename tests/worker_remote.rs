//! Promise: an engine at the other end of two pipes answers as one in this process does; and whatever the other end does wrong, it
//! is given up at once, whoever waits for it learns of it, and nobody waits for ever.

use std::sync::mpsc;

use llmctl_engine::worker::remote::{StartError, Timeouts};
use llmctl_engine::{EngineSpec, EventStream, Logprob, SessionState};

use crate::common::prelude::*;
use crate::common::remote::{Other, PATIENT, Script, behind_pipes, connect, pong, scripted, tokenizer};

fn hashing_engine() -> EngineClient {
    let setup = Setup { end_of_generation: vec![], ..Setup::default() };
    EngineClient::spawn(move || Ok(setup.engine(hashing(64)))).expect("an engine")
}

fn spec() -> EngineSpec {
    Setup { context_length: 1 << 18, ..Setup::default() }.engine(counting(64)).spec().clone()
}

/// Returns the events of a stream as text, without times.
fn told(stream: EventStream) -> Vec<String> {
    let shown = |event: Event| match event {
        Event::Done(outcome) => format!("{:?} {:?} {}", outcome.finish, outcome.usage, outcome.seed),
        other => format!("{other:?}"),
    };
    stream.map(shown).collect()
}

fn in_session(prompt: &[u32], name: &str) -> Request {
    Request { session: Some(named(name)), ..limited(prompt, 5) }
}

#[test]
fn it_answers_as_one_in_this_process_does() {
    let engines = [hashing_engine(), behind_pipes(hashing_engine(), tokenizer())];
    assert_eq!(engines[0].spec(), engines[1].spec());
    let check = |ask: &dyn Fn(&EngineClient) -> String| {
        let [here, there] = [ask(&engines[0]), ask(&engines[1])];
        assert_eq!(here, there);
        here
    };
    let stream = |request: &Request| {
        let mut request = request.clone();
        request.sampling.seed.get_or_insert(3); // else each draws its own
        check(&move |engine| format!("{:#?}", engine.submit(request.clone()).map(told)))
    };
    let all = Request { sampling: seeded(7), logprobs: Some(3), ..limited(&(0..40).collect::<Vec<_>>(), 20) };
    assert!(stream(&all).contains("logprob"));
    let mut stopped = limited(&[1, 2, 3], 50);
    stopped.limits.stop = vec!["1 ".to_owned(), "2 ".to_owned()];
    stopped.sampling.logit_bias = [(5, 1.5), (6, -100.0)].into();
    stream(&stopped);
    assert!(stream(&limited(&[], 1)).contains("PromptEmpty"));
    assert!(stream(&in_session(&[4, 5, 6], "a")).contains("New"));
    let tokens = engines.each_ref().map(|engine| engine.inspect_session(&named("a")).expect("open").tokens);
    assert_eq!(tokens[0], tokens[1]);
    assert!(stream(&in_session(&[&tokens[0][..], &[1, 2]].concat(), "a")).contains("ExactPrefix"));
    let calls: [&dyn Fn(&EngineClient) -> String; 15] = [
        &|engine| format!("{:?}", engine.fork_session(&named("a"), &named("b"))),
        &|engine| format!("{:?}", engine.fork_session(&named("a"), &named("b"))),
        &|engine| format!("{:?}", engine.fork_session(&named("none"), &named("c"))),
        &|engine| format!("{:?}", engine.restore_session(&named("d"), vec![1, 2, 3])),
        &|engine| format!("{:?}", engine.restore_session(&named("d"), vec![1, 2, 3])),
        &|engine| format!("{:?}", engine.list_sessions()),
        &|engine| format!("{:?}", engine.inspect_session(&named("d"))),
        &|engine| format!("{:?}", engine.inspect_session(&named("none"))),
        &|engine| format!("{:?}", engine.reset_session(&named("a"))),
        &|engine| format!("{:?}", engine.reset_session(&named("none"))),
        &|engine| format!("{:?}", engine.close_session(&named("b"))),
        &|engine| format!("{:?}", engine.close_session(&named("b"))),
        &|engine| format!("{:?}", engine.flush_disk(Duration::from_secs(5))),
        &|engine| format!("{:?}", engine.take_notices()),
        &|engine| format!("{:?}", engine.load()),
    ];
    calls.iter().for_each(|call| drop(check(call)));
    for name in ["a", "b", "c", "d", "e"] {
        stream(&in_session(&[1], name)); // one more than there is room for
    }
}

#[test]
fn requests_run_together_and_a_slow_reader_holds_up_nobody() {
    let engine = behind_pipes(hashing_engine(), tokenizer());
    let expected = |first| told(hashing_engine().submit(limited(&[first], 200)).expect("valid"));
    let slow = engine.submit(limited(&[9], 200)).expect("valid");
    let readers: Vec<_> = (0..3)
        .map(|first| {
            let engine = engine.clone();
            std::thread::spawn(move || told(engine.submit(limited(&[first], 200)).expect("valid")))
        })
        .collect();
    let answers: Vec<_> = readers.into_iter().map(|reader| reader.join().expect("no panic")).collect();
    let text =
        |told: &[String]| told.iter().filter(|event| event.starts_with("Text")).cloned().collect::<String>();
    for (first, answer) in (0..).zip(&answers) {
        assert_eq!(text(answer), text(&expected(first)), "{first}");
    }
    assert_eq!(text(&told(slow)), text(&expected(9)));
    let load = engine.last_load();
    assert_eq!((load.num_running, load.num_waiting), (0, 0));
}

#[test]
fn a_stream_that_is_dropped_is_cancelled_and_one_that_has_ended_is_not() {
    let engine = behind_pipes(hashing_engine(), tokenizer());
    let mut stream = engine.submit(in_session(&[1], "a")).expect("valid");
    stream.by_ref().for_each(drop);
    let long = Request { session: Some(named("a")), ..limited(&[1], 250) };
    let mut cancelled = engine.submit(long.clone()).expect("valid");
    assert!(cancelled.next().is_some());
    cancelled.cancel();
    match cancelled.last() {
        Some(Event::Done(outcome)) => {
            assert!(matches!(outcome.finish, Finish::Cancelled | Finish::MaxTokens))
        }
        other => panic!("{other:?}"),
    }
    drop(engine.submit(long).expect("valid"));
    let is_idle =
        || engine.inspect_session(&named("a")).is_ok_and(|detail| detail.info.state == SessionState::Idle);
    assert!((0..6000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        is_idle()
    }));
}

/// Asks a scripted worker, and what it says of its end.
fn lost(other: Other, timeouts: Timeouts, script: impl FnOnce(&mut Script) + Send + 'static) -> String {
    let (engine, other) = scripted(&spec(), other, timeouts, script);
    let events = told(engine.submit(in_session(&[1, 2], "a")).expect("valid"));
    assert_eq!(events.last().map(String::as_str), Some("Failed(EngineGone)"), "{events:?}");
    assert!(matches!(engine.load(), Err(Error::EngineGone)));
    assert!(matches!(engine.list_sessions(), Err(Error::EngineGone)));
    assert!(matches!(engine.submit(limited(&[1], 1)), Err(Error::EngineGone)));
    for _ in 0..6000 {
        if !engine.is_alive() {
            assert!(other.is_killed());
            return engine.exit_reason().expect("it has ended");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("it does not end");
}

const STARTED: &str = r#""started":{"prompt_tokens":2,"max_tokens":5,"seed":1,"reuse":{"cached_tokens":0,"restored_tokens":0,"reason":"new","first_difference":null},"difference":null}"#;

#[test]
fn what_breaks_the_protocol_is_given_up() {
    let check = |lines: &'static [&'static str], why: &str| {
        let words = lost(Other::default(), PATIENT, move |worker| {
            let id = worker.hear().expect("a request")["id"].to_string();
            lines.iter().for_each(|line| worker.say(&line.replace("ID", &id)));
            worker.other.hang();
        });
        assert!(words.contains(why) && words.ends_with("; it was killed"), "{words}");
    };
    check(&["<html>"], "sent a line that is no answer");
    check(&[r#"{"id":ID,"token":"x","tokens":[],"more":1}"#], "sent a line that is no answer");
    check(&[r#"{"token":"x","tokens":[]}"#], "an answer without an id");
    check(&[r#"{"id":999,"token":"x","tokens":[]}"#], "answered 999, which is not open");
    check(&[r#"{"id":ID,"bye":true}"#], "answered a generation with");
    check(&[r#"{"id":ID,"token":"x"}"#], "answered a generation with");
    check(&[r#"{"id":ID,"done":true}"#], "sent a line that is no answer");
    check(&["\u{0}\u{1}\u{2}"], "sent a line that is no answer");
}

#[test]
fn a_token_after_the_end_is_given_up() {
    let (engine, other) = scripted(&spec(), Other::default(), PATIENT, |worker| {
        let id = worker.hear().expect("a request")["id"].clone();
        worker.say(&format!(r#"{{"id":{id},{STARTED}}}"#));
        worker.say(&format!(r#"{{"id":{id},"error":"no","code":"backend"}}"#));
        worker.say(&format!(r#"{{"id":{id},"token":"x","tokens":[]}}"#));
        worker.other.hang();
    });
    let (guard, dropped) = mpsc::channel::<()>();
    engine.drop_at_end(Box::new(guard));
    let events = told(engine.submit(limited(&[1, 2], 5)).expect("valid"));
    assert!(events.last().is_some_and(|event| event.starts_with("Failed(Backend")), "{events:?}");
    assert_eq!(dropped.recv_timeout(Duration::from_secs(60)), Err(mpsc::RecvTimeoutError::Disconnected));
    assert!((0..6000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        other.is_killed() && !engine.is_alive()
    }));
}

#[test]
fn an_end_within_a_line_or_an_answer_is_a_loss() {
    let words = lost(Other::default(), PATIENT, |worker| {
        let id = worker.hear().expect("a request")["id"].clone();
        worker.say(&format!(r#"{{"id":{id},{STARTED}}}"#));
        worker.say_half(r#"{"id":1,"tok"#);
    });
    assert!(words.starts_with("it ended within a line"), "{words}");
    let words = lost(Other::default(), PATIENT, |worker| {
        let id = worker.hear().expect("a request")["id"].clone();
        worker.say(&format!(r#"{{"id":{id},"token":"x","tokens":[{{"id":3}}]}}"#));
    });
    assert!(words.starts_with("it has ended"), "{words}");
}

const SHORT: Timeouts = Timeouts { start: Duration::from_secs(60), answer: Duration::from_millis(400) };

#[test]
fn one_that_does_not_answer_is_given_up() {
    let words = lost(Other::default(), SHORT, |worker| worker.other.hang());
    assert!(words.contains("has not answered for") && words.contains("computes nothing"), "{words}");
    let words = lost(Other::default().working(true), SHORT, |worker| worker.other.hang());
    assert!(words.contains("does nothing but compute"), "{words}");
}

#[test]
fn one_that_computes_is_waited_for() {
    let timeouts = Timeouts { answer: Duration::from_secs(1), ..SHORT };
    let (engine, other) = scripted(&spec(), Other::default().working(true), timeouts, |worker| {
        let id = worker.hear().expect("a request")["id"].clone();
        std::thread::sleep(Duration::from_millis(2500)); // a long step
        worker.say(&format!(r#"{{"id":{id},{STARTED}}}"#));
        worker.say(&format!(r#"{{"id":{id},"error":"no","code":"backend"}}"#));
        while worker.hear().is_some() {}
    });
    let events = told(engine.submit(limited(&[1, 2], 5)).expect("valid"));
    assert_eq!(events.len(), 2, "{events:?}");
    assert!(!other.is_killed());
}

#[test]
fn a_pipe_that_is_full_blocks_nobody() {
    let (engine, other) = scripted(&spec(), Other::default(), SHORT, |worker| worker.other.hang());
    // More than a pipe holds, and then more than is kept. Nobody reads.
    let num_refused = Arc::new(AtomicUsize::new(0));
    let mut num_lost = 0;
    let mut streams = Vec::new();
    for _ in 0..400 {
        match engine.submit(limited(&vec![7; 200_000], 1)) {
            Ok(stream) => streams.push(stream),
            Err(Error::EngineGone) => num_lost += 1, // it has been given up meanwhile
            Err(other) => panic!("{other:?}"),
        }
    }
    for mut stream in streams {
        match stream.next() {
            Some(Event::Failed(Error::QueueFull { .. })) => drop(num_refused.fetch_add(1, Ordering::SeqCst)),
            Some(Event::Failed(Error::EngineGone)) => num_lost += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(num_refused.load(Ordering::SeqCst) + num_lost, 400);
    assert!(num_lost > 0 && other.is_killed());
}

#[test]
fn the_last_handle_asks_it_to_leave() {
    let (heard, hears) = mpsc::channel();
    let (engine, other) = scripted(&spec(), Other::default(), PATIENT, move |worker| {
        while let Some(call) = worker.hear() {
            let _ = heard.send(call["op"].as_str().expect("text").to_owned());
        }
    });
    let stream = engine.submit(limited(&[1], 1)).expect("valid");
    drop(engine);
    assert_eq!(told(stream), ["Failed(EngineGone)"]);
    assert_eq!(hears.iter().collect::<Vec<_>>(), ["generate", "shutdown"]);
    // It left by itself; the order to kill what is not there any more harms nobody.
    let _ = other;
}

#[test]
fn what_is_not_ready_is_no_engine() {
    let start = |line: &'static str| {
        let body = move |_, mut output: std::io::PipeWriter| {
            std::io::Write::write_all(&mut output, line.as_bytes()).expect("somebody reads");
        };
        match connect(Arc::default(), PATIENT, body) {
            Ok(_) => panic!("{line}"),
            Err(error) => error,
        }
    };
    assert!(matches!(start(""), StartError::Lost(why) if why.starts_with("it has ended")));
    assert!(
        matches!(start("hello\n"), StartError::Lost(why) if why.contains("does not say that it is ready"))
    );
    let load_failed = r#"{"error":"x","code":"load_failed","detail":{"type":"prompt_empty"}}"#;
    assert!(matches!(
        start(&*Box::leak(format!("{load_failed}\n").into_boxed_str())),
        StartError::Refused(Error::PromptEmpty)
    ));
    let slow = Timeouts { start: Duration::from_millis(300), ..PATIENT };
    let other = Arc::new(Other::default());
    let its = Arc::clone(&other);
    let never = connect(Arc::clone(&other), slow, move |_input, _output| its.hang());
    assert!(matches!(never, Err(StartError::Lost(why)) if why.starts_with("it was not ready within 300ms")));
    assert!(other.is_killed());
}

#[test]
fn pings_tell_the_load_and_open_requests_are_counted_here() {
    let (engine, _) = scripted(&spec(), Other::default(), PATIENT, |worker| {
        let id = worker.hear().expect("a request")["id"].clone();
        worker.hear().expect("a second one");
        worker.say(&format!(r#"{{"id":{id},{STARTED}}}"#));
        while let Some(call) = worker.hear() {
            worker.say(&pong(&call["id"])); // the wrong answer to everything else
        }
    });
    let _open = [1, 2].map(|first| engine.submit(limited(&[first, 2], 5)).expect("valid"));
    let load = engine.load().expect("it answers");
    assert_eq!((load.num_sessions, load.kv_capacity), (2, 3));
    assert!((0..6000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        let load = engine.last_load();
        (load.num_running, load.num_waiting) == (1, 1)
    }));
    assert!(matches!(engine.list_sessions(), Err(Error::EngineGone)), "that was no list");
}

/// A worker that is told of the running request first could start a waiting one in its place.
#[test]
fn all_are_cancelled_with_the_running_one_last() {
    let (told, cancelled) = mpsc::channel();
    let (engine, _) = scripted(&spec(), Other::default(), PATIENT, move |worker| {
        let ids: Vec<Value> = (0..6).map(|_| worker.hear().expect("a request")["id"].clone()).collect();
        worker.say(&format!(r#"{{"id":{},{STARTED}}}"#, ids[2]));
        let cancelled: Vec<Value> =
            (0..6).map(|_| worker.hear().expect("a cancel")["request"].clone()).collect();
        told.send((ids, cancelled)).expect("the test waits");
    });
    let _open: Vec<EventStream> =
        (1..=6).map(|first| engine.submit(limited(&[first, 2], 5)).expect("valid")).collect();
    assert!((0..6000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        engine.last_load().num_running == 1
    }));
    engine.cancel_all().expect("it lives");
    let (ids, cancelled) = cancelled.recv_timeout(Duration::from_secs(60)).expect("six cancels");
    assert_eq!(cancelled, [5, 4, 3, 1, 0, 2].map(|index: usize| ids[index].clone()));
}

#[test]
fn probabilities_of_nothing_survive_the_way() {
    let logprob = Logprob { logprob: f32::MIN, top: vec![(1, -1e30), (2, -0.1)] };
    let token = Token { id: 1, logprob: Some(logprob) };
    let text = serde_json::to_string(&token).expect("plain data");
    assert_eq!(serde_json::from_str::<Token>(&text).expect("the same"), token);
}
