//! However a worker ends, it ends soon, in good order, and with what it has computed saved.

use super::client::{Process, command, generation, some_ids, spawn};
use crate::common::prelude::*;

#[test]
fn the_end_of_input_ends_it_at_any_moment() {
    Process::start(&[]).finish();

    let mut busy = Process::start(&["--parallel", "2"]);
    for id in 0..6 {
        busy.client.send(&generation(json!(id), &some_ids(1500, id), 500));
    }
    busy.client.close_input();
    let mut num_ends = 0;
    while let Some(line) = busy.client.next() {
        num_ends += usize::from(line["done"] == true || line.get("error").is_some());
    }
    assert_eq!(num_ends, 6, "each is told how it ended");
    busy.finish();

    let mut decoding = Process::start(&[]);
    decoding.client.send(&generation(json!(1), &some_ids(5, 1), 2000));
    while decoding.client.line().get("token").is_none() {}
    decoding.client.send_raw(b"{\"half\": ");
    decoding.finish();
}

/// As `llmctl worker < file`: the input has ended before the model is there.
#[test]
fn what_was_asked_without_ids_is_answered_before_the_end() {
    let place = Place::new();
    let asked = "{\"prompt\": \"a\", \"max_new_tokens\": 3}\nnonsense\n{\"op\": \"sessions\"}\n";
    let ran = finish(command(&place, &[]), asked);
    assert_eq!(ran.code, Some(0), "{}", place.read("stderr"));
    let lines: Vec<Value> =
        ran.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines[0]["ready"], true);
    let lasts: Vec<&Value> = lines[1..].iter().filter(|line| line.get("token").is_none()).collect();
    let [done, refused, sessions] = lasts[..] else { panic!("{lines:?}") };
    assert_eq!((&done["done"], &done["completion_tokens"]), (&json!(true), &json!(3)));
    assert!(refused.get("error").is_some() && sessions["sessions"] == json!([]), "{lines:?}");
}

#[test]
fn it_ends_when_the_input_ends_before_it_is_ready() {
    let place = Place::new();
    let ran = finish(command(&place, &[]), "");
    assert_eq!(ran.code, Some(0), "{}", place.read("stderr"));
}

/// The client of a worker that cannot load closes its input when it has read why, which must not hide the exit code.
#[test]
fn a_worker_that_cannot_load_says_so_however_quick_its_client_is() {
    let place = Place::new();
    place.write("broken.gguf", "GGUF and no more");
    for _ in 0..12 {
        let mut child = place
            .command(&["worker", "--model", "broken.gguf"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("llmctl starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        drop(child.stdin.take());
        let line: Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(line["code"], "load_failed", "{line}");
        let ended = child.wait_with_output().expect("it ends");
        assert_eq!(ended.status.code(), Some(65));
        assert!(!ended.stderr.is_empty(), "and says why");
    }
}

#[test]
fn shutdown_is_answered_last() {
    let mut process = Process::start(&[]);
    process.client.send(&generation(json!(1), &some_ids(5, 1), 2000));
    while process.client.line().get("token").is_none() {}
    process.client.send(&json!({"op": "shutdown", "id": "now"}));
    let mut lines = Vec::new();
    while let Some(line) = process.client.next() {
        lines.push(line);
    }
    assert_eq!(lines.pop(), Some(json!({"id": "now", "bye": true})));
    let cancelled = lines.last().expect("the end of the request");
    assert_eq!((&cancelled["id"], &cancelled["finish"]["type"]), (&json!(1), &json!("cancelled")));
    let (code, said, _) = process.end();
    assert_eq!(code, Some(0), "{said}");

    let mut plain = Process::start(&[]);
    plain.client.send(&json!({"prompt": "a", "max_new_tokens": 3}));
    plain.client.send(&json!({"op": "shutdown"}));
    plain.client.answer().done();
    assert_eq!(plain.client.next(), Some(json!({"bye": true})), "after what was asked before");
    assert_eq!(plain.end().0, Some(0));
}

#[cfg(unix)]
#[test]
fn a_signal_ends_it_like_the_end_of_input() {
    for number in [libc::SIGTERM, libc::SIGINT] {
        let mut process = Process::start(&[]);
        process.client.send(&generation(json!(1), &some_ids(500, 1), 1000));
        let pid = i32::try_from(process.child.id()).expect("a process id");
        // SAFETY: sends a signal to a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(pid, number) }, 0);
        let (code, said, _) = process.end();
        assert_eq!(code, Some(0), "{said}");
    }
}

#[test]
fn a_reader_that_goes_away_ends_it() {
    let place = Place::new();
    let (mut child, output) = spawn(&place, &[]);
    let mut output = BufReader::new(output);
    let mut ready = String::new();
    output.read_line(&mut ready).expect("a pipe");
    drop(output);
    let mut input = child.stdin.take().expect("a pipe");
    let line = generation(json!(1), &some_ids(5, 1), 2000);
    std::io::Write::write_all(&mut input, format!("{line}\n").as_bytes()).expect("it reads");
    let status = child.wait().expect("it ends although its input is open");
    assert_eq!(status.code(), Some(0), "{}", place.read("stderr"));
}

#[test]
fn a_model_that_cannot_be_loaded_is_said_on_both_streams() {
    let place = Place::new();
    let (mut child, output) = {
        let mut command = place.command(&["worker", "--model", "/no/such/model"]);
        let piped = Stdio::piped;
        let mut child =
            command.stdin(piped()).stdout(piped()).stderr(piped()).spawn().expect("llmctl starts");
        let output = child.stdout.take().expect("a pipe");
        (child, output)
    };
    let client = super::client::Client::new(child.stdin.take().expect("a pipe"), output);
    let line = client.line();
    assert_eq!(line["code"], "load_failed", "{line}");
    assert!(line["error"].as_str().is_some_and(|message| message.contains("/no/such/model")), "{line}");
    assert_eq!(client.next(), None);
    assert_eq!(child.wait().expect("it ends").code(), Some(66));
}

#[test]
fn what_a_session_has_computed_is_there_for_the_next_worker() {
    let mut process = Process::start(&[]);
    let prompt = some_ids(200, 5);
    let mut turn = generation(json!(1), &prompt, 8);
    turn["session_id"] = "s".into();
    let first = process.client.ask(&turn);
    let mut held: Vec<u64> = prompt.iter().map(|&id| id as u64).collect();
    held.extend(first.ids());
    let place = process.finish();

    let mut process = Process::start_in(place, &[]);
    let restored = process.client.told(&json!({"op": "restore", "session_id": "s", "tokens": held}));
    assert_eq!(restored["restored"], true);
    held.push(60);
    turn["prompt_segments"] = json!([{"ids": held}]);
    let warm = process.client.ask(&turn);
    let started = warm.lines.iter().find_map(|line| line.get("started")).expect("it started");
    assert_eq!(started["reuse"]["reason"], "restored", "{started}");
    assert!(started["reuse"]["restored_tokens"].as_u64() >= Some(128), "{started}");
    turn.as_object_mut().expect("an object").remove("session_id");
    process.finish();
    let mut cold = Process::start(&["--kv-disk", "0"]);
    assert_eq!(cold.client.ask(&turn).text(), warm.text());
    cold.finish();
}
