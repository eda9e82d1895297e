//! Promise: an engine that is lost costs a client nothing of which it has seen nothing yet, and an error where it has; what was
//! said before is kept, and the next turn says what became of its KV.

use futures_util::StreamExt;
use serde_json::{Value, json};

use crate::common::server::{Build, Reply, Server, ask, both_kinds, content, pieces, request};

const ANSWER: &str = "one, two, three, four, five, six, seven, eight, nine, ten";

fn server() -> Server {
    let build = Build::answers(&[("count", ANSWER), ("hi", "Hello there.")]);
    Build { recovers: true, ..build }.start()
}

/// The text of a stream, and its error.
fn streamed(events: &[Value]) -> (String, Option<Value>) {
    let text = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    (text, events.last().filter(|event| event["error"].is_object()).cloned())
}

fn num_retries(server: &Server) -> u64 {
    server.app.observer().metrics().engine.retries.get()
}

async fn a_whole_answer_is_begun_again_wherever_it_was() {
    let server = server();
    for num_steps in [0, 3, 20] {
        server.gate.close_after(num_steps);
        let asked = server.spawn(request(
            axum::http::Method::POST,
            "/v1/chat/completions",
            &[],
            Some(ask("count", json!({"n": 2, "max_tokens": 200}))),
        ));
        server.gate.reached().await;
        server.fatal.set(1);
        server.gate.open();
        let reply = asked.await.expect("no panic").ok();
        assert_eq!(content(&reply), ANSWER);
        assert_eq!(reply["choices"][1]["message"]["content"], ANSWER);
        assert_eq!(
            reply["usage"]["completion_tokens"].as_u64().map(|count| count % 2),
            Some(0),
            "each counts once"
        );
    }
    assert_eq!((num_retries(&server), server.app.engines().num_restarts()), (3, 3));
}

async fn a_stream_is_begun_again_while_nothing_was_said() {
    let server = server();
    server.fatal.set(1);
    let events = server.chat("count", json!({"stream": true})).await.events();
    assert_eq!(streamed(&events), (ANSWER.to_owned(), None));
    assert_eq!(num_retries(&server), 1);
}

async fn a_stream_that_has_said_something_ends_with_an_error() {
    let server = server();
    server.gate.close_after(12);
    let body = ask("count", json!({"stream": true}));
    let response =
        server.send(request(axum::http::Method::POST, "/v1/chat/completions", &[], Some(body))).await;
    server.gate.reached().await;
    server.fatal.set(1);
    server.gate.open();
    let (headers, status) = (response.headers().clone(), response.status());
    let pieces: Vec<_> = pieces(response).collect().await;
    let text = pieces.iter().map(|piece| std::str::from_utf8(piece).expect("UTF-8")).collect();
    let (text, error) = streamed(&Reply { status, headers, text }.events());
    assert!(!text.is_empty() && text.len() < ANSWER.len() && ANSWER.starts_with(&text), "{text:?}");
    let error = error.expect("an error");
    assert_eq!(error["error"]["code"], "engine_unavailable");
    assert_eq!(num_retries(&server), 0);
}

async fn a_second_loss_is_the_clients_to_know() {
    let server = server();
    server.fatal.set(2);
    let reply = server.chat("count", json!({})).await;
    assert_eq!(reply.error().0, 503);
    assert_eq!(reply.error().1, "engine_unavailable");
    assert!(reply.headers.contains_key("retry-after"));
    assert_eq!(num_retries(&server), 1);
    for _ in 0..6000 {
        if server.app.engine().is_ok() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(content(&server.chat("count", json!({})).await.ok()), ANSWER);
}

async fn without_a_way_back_it_is_said_at_once() {
    let server = Build::answers(&[("count", ANSWER)]).start();
    server.fatal.set(1);
    let reply = server.chat("count", json!({})).await;
    assert_eq!(reply.error().0, 503);
    assert_eq!(num_retries(&server), 0);
}

async fn a_session_goes_on_with_another_engine() {
    let server = server();
    let turn = async |question: &str| {
        let more = json!({"session_id": "trip", "session_append": true});
        server.chat(question, more).await.ok()
    };
    let reason = |reply: &Value| reply["timings"]["resume_reason"].as_str().expect("a reason").to_owned();
    assert_eq!(reason(&turn("hi").await), "new");
    assert_eq!(reason(&turn("hi").await), "exact_prefix");
    server.fatal.set(1);
    let reply = turn("count").await;
    assert_eq!((content(&reply), reason(&reply)), (ANSWER, "engine_lost".to_owned()));
    assert_eq!(reason(&turn("hi").await), "exact_prefix");
    let session = server.get("/v1/sessions/trip").await.ok();
    assert_eq!((&session["turns"], &session["last_resume"]["reason"]), (&json!(4), &json!("exact_prefix")));
}

async fn a_session_that_begins_with_the_loss_is_one_afterwards() {
    let server = server();
    server.fatal.set(1);
    let reply = server.chat("count", json!({"session_id": "new"})).await.ok();
    assert_eq!(content(&reply), ANSWER);
    assert_eq!(server.get("/v1/sessions/new").await.ok()["turns"], 1);
}

both_kinds! {
    a_whole_answer_is_begun_again_wherever_it_was,
    a_stream_is_begun_again_while_nothing_was_said,
    a_stream_that_has_said_something_ends_with_an_error,
    a_second_loss_is_the_clients_to_know,
    without_a_way_back_it_is_said_at_once,
    a_session_goes_on_with_another_engine,
    a_session_that_begins_with_the_loss_is_one_afterwards,
}
