//! A worker in this process, around a toy model that waits at a gate: moments that a real model passes too quickly.

use std::io::{PipeReader, PipeWriter, Write};
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;

use llmctl_base::Notice;
use llmctl_engine::worker::protocol::ModelId;
use llmctl_engine::worker::service::{CallInbox, ShutdownCause, Stopper, WorkerContext, WorkerExit};
use llmctl_engine::{
    EndGuard, EngineLoad, EngineSessionName, EngineSpec, EngineTransport, SessionDetail, SessionInfo, Sink,
    StopHandle,
};

use super::client::Client;
use crate::common::prelude::*;

/// A worker on a thread.
struct Desk {
    stopper: Stopper,
    thread: JoinHandle<WorkerExit>,
}

fn start(engine: EngineClient) -> (Desk, PipeWriter, PipeReader) {
    let (input, to_it) = std::io::pipe().expect("a pipe");
    let (from_it, output) = std::io::pipe().expect("a pipe");
    let tokenizer = Arc::new(from_folder(&parity_folder().join("qwen3")).expect("a tokenizer"));
    let model = ModelId { name: "toy".to_owned(), fingerprint: "toy".to_owned() };
    let reception = CallInbox::open(input, || ()).expect("a thread");
    let stopper = reception.stopper();
    let serve = move || reception.serve(WorkerContext { engine, tokenizer, model }, output).expect("threads");
    (Desk { stopper, thread: std::thread::spawn(serve) }, to_it, from_it)
}

fn start_with_client(engine: EngineClient) -> (Desk, Client) {
    let (desk, input, output) = start(engine);
    let client = Client::new(input, output);
    assert_eq!(client.line()["ready"], true);
    (desk, client)
}

impl Desk {
    fn end(self) -> WorkerExit {
        self.thread.join().expect("no panic")
    }
}

fn spawn(setup: Setup, model: ToyModel) -> EngineClient {
    let build = move || Ok(setup.engine_with(model, ToyVocabulary::numbers(64)).0);
    EngineClient::spawn(build).expect("builds")
}

/// Each forward pass waits for a permit; when the gate is dropped all pass.
fn gated(setup: Setup) -> (EngineClient, Sender<()>) {
    let (gate, permits) = mpsc::channel::<()>();
    let permits = Mutex::new(permits);
    let hook = move || {
        let _ = permits.lock().expect("one engine").recv(); // fails when the gate is open for good
        Ok(())
    };
    (spawn(setup, ToyModel::new(64, counting(64)).with_hook(Box::new(hook))), gate)
}

/// Counts for ever: token 63 does not end it.
fn endless(id: Value, first: u32, max_new_tokens: usize) -> Value {
    json!({
        "id": id, "prompt_segments": [{"ids": [first]}], "max_new_tokens": max_new_tokens, "ignore_eos": true,
    })
}

#[test]
fn a_request_is_cancelled_in_its_prompt() {
    let (engine, gate) = gated(Setup::default());
    let (desk, mut client) = start_with_client(engine);
    let prompt: Vec<u32> = (0..50).collect();
    client.send(&json!({"id": 1, "prompt_segments": [{"ids": prompt}], "events": true}));
    gate.send(()).expect("it waits");
    while client.line().get("progress").is_none() {}
    client.send(&json!({"op": "cancel", "request": 1}));
    assert_eq!(client.line(), json!({"cancelled": 1}), "said while the engine computes");
    drop(gate);
    let answer = client.answer();
    let done = answer.done();
    assert_eq!((&done["finish"]["type"], &done["completion_tokens"]), (&json!("cancelled"), &json!(0)));
    assert!(matches!(done["prompt_tokens"].as_u64(), Some(16 | 32)), "{done}");
    client.close_input();
    assert!(matches!(desk.end().why, ShutdownCause::Input));
}

#[test]
fn a_request_is_cancelled_in_its_answer_or_in_the_queue() {
    let (engine, gate) = gated(Setup { max_running: 1, ..Setup::default() });
    let (desk, mut client) = start_with_client(engine);
    client.send(&endless(json!("a"), 3, 100));
    gate.send(()).expect("it waits");
    assert_eq!(client.line(), json!({"id": "a", "token": "4 "}));
    client.send(&endless(json!("b"), 9, 100));
    client.send(&json!({"op": "cancel", "id": "c"}));
    assert_eq!(client.line(), json!({"id": "c", "cancelled": 2}));
    drop(gate);
    let answers = client.answers(&[json!("a"), json!("b")]);
    for (answer, most) in answers.iter().zip([2, 0]) {
        assert_eq!(answer.done()["finish"]["type"], "cancelled");
        assert!(answer.done()["completion_tokens"].as_u64() <= Some(most), "{answer:?}");
        assert_eq!(answer.done()["finish_reason"], "stop", "the reference server's word");
    }
    client.send(&json!({"op": "cancel", "request": "a"}));
    assert_eq!(client.line(), json!({"cancelled": 0}), "of what is over");
    client.close_input();
    desk.end();
}

#[test]
fn an_id_in_use_is_refused_until_it_is_free_again() {
    let (engine, gate) = gated(Setup { max_running: 1, ..Setup::default() });
    let (desk, mut client) = start_with_client(engine);
    client.send(&endless(json!("a"), 3, 2));
    client.send(&json!({"op": "ping", "id": "a"}));
    let refused = client.line();
    assert_eq!((&refused["code"], &refused["id"]), (&json!("duplicate_id"), &json!("a")));
    client.send(&json!({"op": "cancel", "id": "a"}));
    assert_eq!(client.line()["code"], "duplicate_id", "nothing was cancelled");
    gate.send(()).expect("it waits");
    assert_eq!(client.line(), json!({"id": "a", "token": "4 "}));
    let mut second = endless(json!("b"), 20, 1);
    second["events"] = true.into();
    client.send(&second);
    client.send(&json!({"op": "cancel", "id": "seen"})); // by then the other is on its way to the engine
    drop(gate);
    let answers = client.answers(&[json!("a"), json!("b"), json!("seen")]);
    answers[0].done();
    answers[1].done();
    assert_eq!(client.told(&json!({"op": "ping", "id": "a"}))["pong"], true);
    client.close_input();
    desk.end();
}

#[test]
fn one_session_takes_one_request_at_a_time() {
    let (engine, gate) = gated(Setup { context_length: 4096, ..Setup::default() });
    let (desk, mut client) = start_with_client(engine);
    let turn = |id: u32| {
        let mut line = endless(json!(id), 3, 4000);
        line["session_id"] = "s".into();
        line
    };
    client.send(&turn(1));
    gate.send(()).expect("it waits");
    assert_eq!(client.line(), json!({"id": 1, "token": "4 "}));
    client.send(&turn(2));
    client.send(&json!({"op": "close", "id": 3, "session_id": "s"}));
    let mut refused = Vec::new();
    while refused.len() < 2 {
        gate.send(()).expect("it waits"); // for a step, which ends with a line
        let line = client.line();
        refused.extend(line.get("error").is_some().then_some(line));
    }
    for line in &refused {
        assert_eq!((&line["code"], &line["session_id"]), (&json!("session_busy"), &json!("s")), "{line}");
        assert_eq!(line["detail"], json!({"type": "session_busy", "value": "s"}));
    }
    client.send(&json!({"op": "cancel", "id": 4, "request": 1}));
    drop(gate);
    let answers = client.answers(&[json!(1), json!(4)]);
    assert_eq!(answers[1].lines[0]["cancelled"], 1);
    assert_eq!(answers[0].done()["finish"], json!({"type": "cancelled"}));
    client.close_input();
    desk.end();
}

#[test]
fn who_waits_is_told_its_place() {
    let (engine, gate) = gated(Setup { context_length: 4096, max_running: 1, ..Setup::default() });
    let (desk, mut client) = start_with_client(engine);
    let with_events = |id: u32, max_new_tokens: usize| {
        let mut line = endless(json!(id), id, max_new_tokens);
        line["events"] = true.into();
        line
    };
    client.send(&with_events(1, 4000));
    gate.send(()).expect("it waits");
    while client.line().get("token").is_none() {}
    client.send(&with_events(2, 3));
    client.send(&with_events(3, 3));
    let mut places = Vec::new();
    // A step of the first request at a time, until both have been told that they wait.
    while places.len() < 2 {
        gate.send(()).expect("it waits");
        let line = client.line();
        places.extend(line.get("queued").map(|place| (line["id"].clone(), place.clone())));
    }
    assert_eq!(places, [(json!(2), json!(1)), (json!(3), json!(2))]);
    client.send(&json!({"op": "cancel", "request": 1}));
    drop(gate);
    let mut num_done = 0;
    while num_done < 2 {
        let line = client.line();
        num_done += usize::from(line["done"] == true && line["id"] != 1);
    }
    client.close_input();
    desk.end();
}

#[test]
fn a_request_without_an_id_waits_for_the_one_before_it_and_nothing_else_does() {
    let (engine, gate) = gated(Setup::default());
    let (desk, mut client) = start_with_client(engine);
    let plain = |first: u32| json!({"prompt_segments": [{"ids": [first]}], "max_new_tokens": 2});
    client.send(&plain(3));
    client.send(&plain(20));
    client.send_raw(b"nonsense\n");
    client.send(&json!({"op": "cancel", "request": 99, "id": "x"}));
    assert_eq!(client.line(), json!({"id": "x", "cancelled": 0}));
    client.send_raw(b"{\"id\": 5, \"op\": \"nonsense\"}\n");
    assert_eq!(client.line()["id"], 5);
    client.send(&endless(json!(7), 30, 2));
    drop(gate);
    let (mut heard, mut num_over) = (String::new(), 0);
    while num_over < 4 {
        let line = client.line();
        num_over += usize::from(line.get("token").is_none());
        if line.get("id").is_none() {
            let end = if line["done"] == true { "| " } else { "refused" };
            heard.push_str(line["token"].as_str().unwrap_or(end));
        }
    }
    assert_eq!(heard, "4 5 | 21 22 | refused");
    client.close_input();
    desk.end();
}

/// Requests that say more than any pipe holds, together.
const NUM_REQUESTS: usize = 12;
const NUM_TOKENS: usize = 700;

/// A worker that has said everything to a reader who has not read any of it.
fn start_unread() -> (Desk, PipeWriter, PipeReader) {
    let setup = Setup { context_length: 1024, max_running: 4, ..Setup::default() };
    let engine = spawn(setup, ToyModel::new(64, counting(64)));
    let (desk, mut input, output) = start(engine.clone());
    for id in 0..NUM_REQUESTS {
        let line = endless(json!(id), 1, NUM_TOKENS);
        input.write_all(format!("{line}\n").as_bytes()).expect("a pipe");
    }
    let is_idle = || engine.load().is_ok_and(|load| load.num_running + load.num_waiting == 0);
    let mut has_begun = false;
    for _ in 0..12_000 {
        has_begun |= !is_idle();
        if has_begun && is_idle() {
            return (desk, input, output);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the engine waits for the reader");
}

#[test]
fn a_reader_that_does_not_read_holds_nobody_up() {
    let (desk, input, output) = start_unread();
    let client = Client::new(input, output);
    assert_eq!(client.line()["ready"], true);
    let ids: Vec<Value> = (0..NUM_REQUESTS).map(Value::from).collect();
    for answer in client.answers(&ids) {
        assert_eq!(answer.lines.len(), NUM_TOKENS + 1);
        assert_eq!(answer.done()["completion_tokens"], NUM_TOKENS);
    }
    drop(client);
    assert!(matches!(desk.end().why, ShutdownCause::Input));
}

#[test]
fn a_flood_of_lines_is_answered_as_fast_as_it_is_read() {
    const NUM_LINES: usize = 5000;
    let (desk, mut input, output) = start(spawn(Setup::default(), ToyModel::new(64, counting(64))));
    let flood = std::thread::spawn(move || {
        for _ in 0..NUM_LINES {
            input.write_all(b"nonsense\n").expect("a pipe");
        }
        input
    });
    // More lines than may be open, and more answers than a pipe holds.
    let client = Client::new(std::io::sink(), output);
    assert_eq!(client.line()["ready"], true);
    for _ in 0..NUM_LINES {
        client.answer().check_error("invalid_request", "not a JSON object");
    }
    drop(flood.join().expect("no panic"));
    assert!(matches!(desk.end().why, ShutdownCause::Input));
}

#[test]
fn it_ends_although_nobody_reads_its_last_lines() {
    let (desk, input, output) = start_unread();
    desk.stopper.stop();
    assert!(matches!(desk.end().why, ShutdownCause::Stopped));
    drop((input, output));
}

#[test]
fn a_reader_that_goes_away_ends_it_and_so_does_a_stop() {
    let (engine, gate) = gated(Setup::default());
    let (desk, mut input, output) = start(engine);
    drop((output, gate));
    // More than one request: a process that another test starts holds the reading end until it executes its program.
    for id in 0..2000 {
        let request = format!("{}\n", endless(json!(id), 1, 100));
        if desk.thread.is_finished() || input.write_all(request.as_bytes()).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(matches!(desk.end().why, ShutdownCause::ReaderGone));

    let (desk, client) = start_with_client(spawn(Setup::default(), ToyModel::new(64, counting(64))));
    desk.stopper.stop();
    let ended = desk.end();
    assert!(matches!(ended.why, ShutdownCause::Stopped) && ended.is_saved);
    assert_eq!(client.next(), None);
}

#[test]
fn a_step_that_fails_fails_its_requests_and_no_others() {
    let mut count = counting(64);
    let rule: Rule = Box::new(move |history| match history[0] {
        9 => panic!("a bug in a step"),
        _ => count(history),
    });
    let (desk, mut client) = start_with_client(spawn(Setup::default(), ToyModel::new(64, rule)));
    let failed = client.ask(&endless(json!(1), 9, 5));
    failed.check_error("backend", "a bug in a step");
    assert_eq!(failed.lines[0]["detail"]["type"], "backend");
    assert_eq!(client.ask(&endless(json!(1), 4, 2)).text(), "5 6 ");
    client.close_input();
    desk.end();
}

/// An engine that is gone as soon as it is asked for something.
struct Gone(EngineSpec);

impl EngineTransport for Gone {
    fn spec(&self) -> &EngineSpec {
        &self.0
    }

    fn start(&self, _: Request, sink: Sink, _: StopHandle) -> Result<(), Error> {
        drop(sink);
        Ok(())
    }

    fn load(&self) -> Result<EngineLoad, Error> {
        Err(Error::EngineGone)
    }

    fn last_load(&self) -> EngineLoad {
        unreachable!("nobody asks")
    }

    fn is_alive(&self) -> bool {
        false
    }

    fn drop_at_end(&self, guard: EndGuard) {
        drop(guard);
    }

    fn cancel_all(&self) -> Result<(), Error> {
        Err(Error::EngineGone)
    }

    fn take_notices(&self) -> Result<Vec<Notice>, Error> {
        Err(Error::EngineGone)
    }

    fn flush_disk(&self, _: Duration) -> Result<bool, Error> {
        Err(Error::EngineGone)
    }

    fn reset_session(&self, _: &EngineSessionName) -> Result<(), Error> {
        Err(Error::EngineGone)
    }

    fn close_session(&self, _: &EngineSessionName) -> Result<(), Error> {
        Err(Error::EngineGone)
    }

    fn fork_session(&self, _: &EngineSessionName, _: &EngineSessionName) -> Result<(), Error> {
        Err(Error::EngineGone)
    }

    fn restore_session(&self, _: &EngineSessionName, _: llmctl_models::kv::TokenBuf) -> Result<(), Error> {
        Err(Error::EngineGone)
    }

    fn inspect_session(&self, _: &EngineSessionName) -> Result<SessionDetail, Error> {
        Err(Error::EngineGone)
    }

    fn list_sessions(&self) -> Result<Vec<SessionInfo>, Error> {
        Err(Error::EngineGone)
    }
}

#[test]
fn an_engine_that_is_gone_is_said_and_ends_the_worker() {
    let spec = Setup::default().engine(counting(64)).spec().clone();
    for call in [endless(json!(1), 1, 5), json!({"op": "ping", "id": 1}), json!({"op": "ping"})] {
        let (desk, mut client) = start_with_client(EngineClient::new(Gone(spec.clone())));
        let answer = client.ask(&call);
        answer.check_error("engine_gone", "the engine has stopped");
        assert!(matches!(desk.end().why, ShutdownCause::EngineGone));
        assert_eq!(client.next(), None);
    }
}
