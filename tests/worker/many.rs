//! Calls with ids run together, and each is told what it asked for.

use super::client::{Process, generation, some_ids};
use crate::common::prelude::*;

const NUM_STREAMS: usize = 8;

#[test]
fn together_they_say_what_each_says_alone() {
    let mut process = Process::start(&["--parallel", "4"]);
    let line = |at: usize, id: Value| {
        let mut line = generation(id, &some_ids(10 + at * 37, at), 24);
        line["temperature"] = (at % 2).into();
        line["seed"] = (at + 1).into();
        line
    };
    let alone: Vec<_> = (0..NUM_STREAMS).map(|at| process.client.ask(&line(at, json!("alone")))).collect();
    let ids: Vec<Value> =
        (0..NUM_STREAMS).map(|at| if at % 2 == 0 { json!(at) } else { json!(format!("é{at}")) }).collect();
    for at in 0..NUM_STREAMS {
        process.client.send(&line(at, ids[at].clone()));
    }
    let together = process.client.answers(&ids);
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!(alone.text(), together.text());
        assert_eq!(alone.ids(), together.ids());
        assert_eq!(alone.ids().len(), 24);
        let (a, b) = (alone.done(), together.done());
        for field in ["prompt_tokens", "completion_tokens", "finish", "seed", "finish_reason"] {
            assert_eq!(a[field], b[field]);
        }
    }
    process.finish();
}

#[test]
fn events_tell_the_whole_course() {
    let mut process = Process::start(&[]);
    let answer = process.client.ask(&generation(json!(1), &some_ids(600, 1), 40));
    let kind = |line: &Value| line.as_object().expect("an object").keys().find(|key| *key != "id").cloned();
    let mut kinds: Vec<String> = answer.lines.iter().filter_map(kind).collect();
    kinds.dedup();
    assert_eq!(kinds, ["started", "progress", "token", "done"]);
    let started = &answer.lines[0]["started"];
    assert_eq!((&started["prompt_tokens"], &started["max_tokens"]), (&json!(600), &json!(40)));
    assert!(answer.lines.iter().filter(|line| line.get("progress").is_some()).count() >= 2);
    let done = answer.done();
    assert_eq!(done["finish"], json!({"type": "max_tokens"}));
    assert!(done["queue_ms"].is_number() && done["ttft_ms"].is_number() && done["seed"].is_number());
    assert!(done.get("generated_token_ids").is_none(), "token lines have told them");
    process.finish();
}

#[test]
fn sessions_are_opened_forked_restored_and_told_of() {
    let mut process = Process::start(&["--max-sessions", "3"]);
    let client = &mut process.client;
    let opened = client.told(&json!({"op": "open", "id": 1, "session_id": "a"}));
    assert_eq!(opened, json!({"id": 1, "opened": true, "session_id": "a", "existed": false}));
    assert_eq!(client.told(&json!({"op": "open", "id": 1, "session_id": "a"}))["existed"], true);
    let prompt = some_ids(50, 4);
    let mut turn = generation(json!(2), &prompt, 6);
    turn["session_id"] = "a".into();
    let first = client.ask(&turn);
    let mut held: Vec<u64> = prompt.iter().map(|&id| id as u64).collect();
    held.extend(first.ids());
    let session = client.told(&json!({"op": "inspect", "id": 3, "session_id": "a"}))["session"].clone();
    let tokens: Vec<u64> = serde_json::from_value(session["tokens"].clone()).expect("ids");
    assert!(held.starts_with(&tokens) && tokens.len() >= held.len() - 1, "{session}");
    assert_eq!(session["state"], "idle");

    let forked = client.told(&json!({"op": "fork", "id": 4, "session_id": "a", "to": "b"}));
    assert_eq!(forked, json!({"id": 4, "forked": true, "session_id": "a", "to": "b"}));
    let restored = client.told(&json!({"op": "restore", "id": 5, "session_id": "c", "tokens": tokens}));
    assert_eq!(restored["restored"], true);
    let opened = client.told(&json!({"op": "open", "id": 6, "session_id": "d"}));
    assert_eq!(opened["existed"], false, "it takes the slot of the one used longest ago");
    let told = client.told(&json!({"op": "sessions", "id": 7}));
    let names: Vec<&str> = told["sessions"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|info| info["name"].as_str())
        .collect();
    assert_eq!(names, ["b", "c", "d"]);
    client.told(&json!({"op": "close", "id": 6, "session_id": "d"}));
    client.told(&json!({"op": "restore", "id": 6, "session_id": "a", "tokens": tokens}));
    held.push(99);
    let answers = ["a", "b", "c"].map(|name| {
        let held: Vec<usize> = held.iter().map(|&id| id as usize).collect();
        let mut turn = generation(json!(8), &held, 10);
        turn["session_id"] = name.into();
        client.ask(&turn)
    });
    assert_eq!(answers[0].text(), answers[1].text());
    assert_eq!(answers[0].text(), answers[2].text());
    let reused = |at: usize| answers[at].done()["reused_prompt_tokens"].as_u64().expect("a number") as usize;
    // What was restored has its full pages, what was never taken away every token.
    assert!(reused(0) >= 32 && reused(1) >= held.len() - 2, "{answers:?}");

    assert_eq!(client.told(&json!({"op": "reset", "id": 9, "session_id": "b"}))["existed"], true);
    assert_eq!(client.told(&json!({"op": "close", "id": 9, "session_id": "b"}))["existed"], true);
    assert_eq!(client.told(&json!({"op": "close", "id": 9, "session_id": "b"}))["existed"], false);
    assert_eq!(client.told(&json!({"op": "reset", "id": 9, "session_id": "b"}))["existed"], false);
    let load = client.told(&json!({"op": "ping", "id": 10}))["load"].clone();
    assert_eq!((&load["num_sessions"], &load["num_running"]), (&json!(2), &json!(0)));
    assert!(client.told(&json!({"op": "notices", "id": 11}))["notices"].is_array());
    assert_eq!(client.told(&json!({"op": "flush", "id": 12, "timeout_ms": 30_000}))["flushed"], true);
    assert_eq!(client.told(&json!({"op": "cancel", "id": 13}))["cancelled"], 0);
    process.finish();
}
