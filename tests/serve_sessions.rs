//! Promise: a session over HTTP is a conversation in the store that the terminal uses: it goes on there and back, each turn
//! is on disk before its answer is complete, and what is in memory is used as far as it goes and explained where not.

use std::time::Duration;

use axum::http::{Method, StatusCode};
use futures_util::StreamExt;
use llmctl::runtime::session::conversation::{Answer, Dialogue};
use llmctl::runtime::session::store::{SessionName, SessionStore};
use llmctl::runtime::{Finish, Outcome, Sampling, Timings, Usage};
use llmctl::template::{Content, Message};
use serde_json::{Value, json};

use crate::common::server::{
    Build, CHATML, FREE, QWENISH, Reply, Server, ask, both_kinds, model_fingerprint, pieces, request, speech,
};

const PATH: &str = "/v1/chat/completions";

fn build(store: Option<SessionStore>) -> Build {
    let answers = [("one?", "uno"), ("two?", "dos"), ("three?", "tres"), ("zwei?", "drei")];
    Build { store, ..Build::answers(&answers) }
}

/// Servers over a folder and over nothing: a session is one on both.
fn both() -> [(Option<tempfile::TempDir>, Server); 2] {
    let folder = tempfile::tempdir().expect("a folder");
    let store = SessionStore::new(folder.path().join("sessions"));
    [(Some(folder), build(Some(store)).start()), (None, build(None).start())]
}

fn on_disk() -> (tempfile::TempDir, SessionStore, Server) {
    let folder = tempfile::tempdir().expect("a folder");
    let store = SessionStore::new(folder.path().join("sessions"));
    let server = build(Some(store.clone())).start();
    (folder, store, server)
}

fn name(name: &str) -> SessionName {
    SessionName::new(name).expect("a name")
}

/// A conversation as its client holds it.
#[derive(Clone)]
struct Client<'a> {
    server: &'a Server,
    session: &'a str,
    messages: Vec<Value>,
}

impl<'a> Client<'a> {
    fn new(server: &'a Server, session: &'a str) -> Self {
        Self { server, session, messages: Vec::new() }
    }

    async fn says(&mut self, question: &str) -> Value {
        self.messages.push(json!({"role": "user", "content": question}));
        let body = json!({"session_id": self.session, "messages": self.messages});
        let reply = self.server.post(PATH, body).await.ok();
        self.messages.push(reply["choices"][0]["message"].clone());
        reply
    }
}

fn content(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().expect("text")
}

fn reason(reply: &Value) -> &str {
    reply["timings"]["resume_reason"].as_str().expect("a reason")
}

async fn delete(server: &Server, session: &str) -> Reply {
    server.call(Method::DELETE, &format!("/v1/sessions/{session}"), &[], None).await
}

async fn reset(server: &Server, session: &str) -> Reply {
    server.call(Method::POST, &format!("/v1/sessions/{session}/reset"), &[], None).await
}

async fn each_turn_computes_only_what_is_new() {
    for (_folder, server) in both() {
        let mut client = Client::new(&server, "s");
        let first = client.says("one?").await;
        assert_eq!((content(&first), reason(&first)), ("uno", "new"));
        let held = first["usage"]["total_tokens"].as_u64();
        let second = client.says("two?").await;
        assert_eq!((content(&second), reason(&second)), ("dos", "exact_prefix"));
        assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64(), held);
        let session = server.get("/v1/sessions/s").await.ok();
        assert_eq!(
            (&session["turns"], &session["last_resume"]["reason"]),
            (&json!(2), &json!("exact_prefix"))
        );
        assert_eq!(session["tokens"], second["usage"]["total_tokens"]);
        assert_eq!(session["resident_tokens"], session["tokens"]);
        assert_eq!(session["state"], "idle");
        assert!(session.get("messages").is_none());
        let full = server.get("/v1/sessions/s?messages=true").await.ok();
        let texts: Vec<&str> = full["messages"]
            .as_array()
            .expect("messages")
            .iter()
            .map(|m| m["content"].as_str().expect("text"))
            .collect();
        assert_eq!(texts, ["one?", "uno", "two?", "dos"]);
        assert_eq!(server.get("/v1/sessions/s?messages=maybe").await.error().0, 400);
    }
}

async fn headers_name_a_session_too() {
    let (_folder, store, server) = on_disk();
    for header in ["x-session-id", "X-ExecuTorch-Session-ID", "session_id", "x-session-affinity"] {
        let session = format!("by-{}", header.to_lowercase());
        let reply =
            server.call(Method::POST, PATH, &[(header, &session)], Some(ask("one?", json!({})))).await;
        assert_eq!(reply.status, StatusCode::OK);
        assert_eq!(store.read(&name(&session)).expect("saved").turns.len(), 1, "{header}");
    }
    let reply = server.call(
        Method::POST,
        PATH,
        &[("x-session-id", "header")],
        Some(ask("one?", json!({"session_id": "body"}))),
    );
    assert_eq!(reply.await.status, StatusCode::OK);
    assert!(store.read(&name("body")).is_ok() && store.read(&name("header")).is_err());
    assert_eq!(server.chat("one?", json!({"prompt_cache_key": "k"})).await.status, StatusCode::OK);
    assert!(store.read(&name("k")).is_err(), "a hint is no session");
    for bad in ["", "a b", "a/b", "a\\b", &"x".repeat(129), "\u{e9}"] {
        let reply = server.chat("one?", json!({"session_id": bad})).await;
        assert_eq!(reply.error(), (400, "invalid_session_id".to_owned(), "session_id".to_owned()), "{bad:?}");
    }
    for path in ["/v1/sessions/a%20b", "/v1/sessions/a%2Fb", "/v1/sessions/%FF"] {
        assert_eq!(server.get(path).await.error().1, "invalid_session_id", "{path}");
    }
    assert_eq!(reset(&server, "a%20b").await.error().1, "invalid_session_id");
}

async fn without_a_session_nothing_is_kept() {
    let (_folder, store, server) = on_disk();
    server.chat("one?", json!({})).await.ok();
    assert!(store.list().expect("a list").is_empty());
    assert_eq!(server.get("/v1/sessions").await.ok(), json!({"object": "list", "data": []}));
}

fn terminal_turn(store: &SessionStore, session: &str, question: &str, text: &str) {
    let speech = speech(Some(CHATML));
    let model = model_fingerprint();
    let writer = store.open_or_create(&name(session), &model).expect("opened");
    let mut dialogue = Dialogue::resume(writer, model);
    let turn =
        dialogue.prompt(&speech, dialogue.followed_by(vec![Message::user(question)])).expect("a prompt");
    let generated = speech.encode_rest(text).expect("encodes");
    let usage = Usage { completion_tokens: generated.len(), ..Usage::default() };
    let outcome = Outcome { finish: Finish::Eos(1), usage, timings: Timings::default(), seed: 1 };
    let sampling = Sampling::default();
    dialogue
        .finish(turn, Answer { message: Message::assistant(text), generated, outcome, sampling })
        .expect("kept");
}

async fn a_conversation_goes_on_between_terminal_and_http() {
    let (_folder, store, server) = on_disk();
    terminal_turn(&store, "trip", "hello", "Hei!");
    // The client sends only what is new.
    let body = ask("one?", json!({"session_id": "trip", "session_append": true}));
    let reply = server.post(PATH, body).await.ok();
    assert_eq!(content(&reply), "uno");
    terminal_turn(&store, "trip", "two?", "zwo");
    let body = ask("three?", json!({"session_id": "trip", "session_append": true, "stream": true}));
    server.post(PATH, body).await.events();
    let saved = store.read(&name("trip")).expect("saved");
    let texts: Vec<String> = saved
        .messages()
        .map(|message| match &message.content {
            Some(Content::Text(text)) => text.clone(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(texts, ["hello", "Hei!", "one?", "uno", "two?", "zwo", "three?", "tres"]);
    // A client with the whole history goes on just as well.
    let mut messages = server.get("/v1/sessions/trip?messages=true").await.ok()["messages"].clone();
    messages.as_array_mut().expect("a list").push(json!({"role": "user", "content": "one?"}));
    let reply = server.post(PATH, json!({"session_id": "trip", "messages": messages})).await.ok();
    assert_eq!(reason(&reply), "exact_prefix");
    assert_eq!(store.read(&name("trip")).expect("saved").turns.len(), 5);
    let reply = server.post(PATH, ask("one?", json!({"session_append": true}))).await;
    assert_eq!(reply.error().2, "session_append", "there is nothing to append to");
}

async fn another_server_goes_on_where_this_one_ended() {
    let (folder, store, server) = on_disk();
    let mut client = Client::new(&server, "s");
    client.says("one?").await;
    let messages = client.messages.clone();
    drop(server);
    let server = build(Some(store)).start();
    let mut client = Client { server: &server, session: "s", messages };
    let reply = client.says("two?").await;
    assert_eq!(content(&reply), "dos");
    assert_eq!(reason(&reply), "evicted", "the engine was told what the session held");
    drop(folder);
}

async fn an_edit_is_resumed_as_far_as_it_goes_and_explained() {
    for (_folder, server) in both() {
        let mut client = Client::new(&server, "s");
        client.says("one?").await;
        assert_eq!(server.get("/v1/sessions/s/explain").await.ok()["last_miss"], Value::Null);
        client.says("two?").await;
        client.messages[2]["content"] = "zwei?".into();
        client.messages.truncate(3);
        let last = client.messages.pop().expect("a message");
        let reply = client.says(last["content"].as_str().expect("text")).await;
        assert_eq!((content(&reply), reason(&reply)), ("drei", "partial_prefix"));
        let explained = server.get("/v1/sessions/s/explain").await.ok();
        let miss = &explained["last_miss"];
        assert_eq!((&miss["reason"], &miss["cached_tokens"]), (&json!("partial_prefix"), &miss["position"]));
        assert!(miss["session"]["text"].as_str().expect("text").starts_with("two?"), "{miss}");
        assert!(miss["prompt"]["text"].as_str().expect("text").starts_with("zwei?"), "{miss}");
        assert!(miss["before"].as_str().expect("text").contains("user\\n"), "{miss}");
        assert_eq!(
            server.get("/v1/sessions/s").await.ok()["turns"],
            2,
            "the edit takes the old turn's place"
        );
    }
    let (_folder, _, server) = on_disk();
    assert_eq!(
        server.get("/v1/sessions/none/explain").await.error(),
        (404, "session_not_found".to_owned(), String::new())
    );
    assert_eq!(server.get("/v1/sessions/none").await.error().0, 404);
}

async fn reset_and_delete_may_be_said_twice() {
    for (_folder, server) in both() {
        for _ in 0..2 {
            assert_eq!(reset(&server, "none").await.ok(), json!({"reset": true, "session_id": "none"}));
            assert_eq!(delete(&server, "none").await.ok(), json!({"closed": true, "session_id": "none"}));
        }
        let mut client = Client::new(&server, "s");
        client.says("one?").await;
        reset(&server, "s").await.ok();
        let session = server.get("/v1/sessions/s?messages=true").await.ok();
        assert_eq!(
            (&session["turns"], &session["tokens"], &session["messages"]),
            (&json!(0), &json!(0), &json!([]))
        );
        let again = client.says("two?").await;
        assert_ne!(reason(&again), "exact_prefix");
        delete(&server, "s").await.ok();
        assert_eq!(server.get("/v1/sessions/s").await.error().0, 404);
        assert_eq!(server.get("/v1/sessions").await.ok()["data"], json!([]));
        let anew = Client::new(&server, "s").says("one?").await;
        assert_eq!(content(&anew), "uno");
    }
}

async fn a_fork_goes_its_own_way() {
    for (_folder, server) in both() {
        let mut client = Client::new(&server, "a");
        client.says("one?").await;
        client.says("two?").await;
        let fork = async |body: Value| server.post("/v1/sessions/a/fork", body).await;
        let whole = fork(json!({"to": "b"})).await.ok();
        assert_eq!(whole, json!({"forked": true, "session_id": "b", "from": "a", "turns": 2}));
        let part = fork(json!({"to": "c", "turns": 1})).await.ok();
        assert_eq!(part["turns"], 1);
        let mut on_fork = Client { session: "b", ..client.clone() };
        assert_eq!(reason(&on_fork.says("three?").await), "exact_prefix");
        let mut on_part = Client { session: "c", ..client.clone() };
        on_part.messages.truncate(2);
        on_part.says("three?").await;
        let turns = async |session: &str| server.get(&format!("/v1/sessions/{session}")).await.ok();
        assert_eq!(turns("a").await["turns"], 2);
        assert_eq!((&turns("b").await["turns"], &turns("c").await["turns"]), (&json!(3), &json!(2)));
        assert_eq!(turns("c").await["fork_of"], json!({"id": "a", "turns": 1}));
        for (body, status, code) in [
            (json!({"to": "b"}), 409, "session_exists"),
            (json!({"to": "x y"}), 400, "invalid_session_id"),
            (json!({"to": "d", "turns": 9}), 400, "invalid_value"),
            (json!({}), 422, "invalid_value"),
            (json!({"to": "d", "strange": 1}), 400, "unsupported_parameter"),
        ] {
            let error = fork(body.clone()).await.error();
            assert_eq!((error.0, error.1.as_str()), (status, code), "{body}");
        }
        assert_eq!(server.post("/v1/sessions/none/fork", json!({"to": "d"})).await.error().0, 404);
    }
}

async fn all_sessions_are_listed() {
    for (folder, server) in both() {
        for session in ["b", "a"] {
            Client::new(&server, session).says("one?").await;
        }
        let list = server.get("/v1/sessions").await.ok();
        let data = list["data"].as_array().expect("a list");
        let ids: Vec<&Value> = data.iter().map(|session| &session["id"]).collect();
        assert_eq!(ids, ["a", "b"]);
        for session in data {
            assert_eq!(
                (&session["object"], &session["model"], &session["turns"]),
                (&json!("session"), &json!("org/toy"), &json!(1))
            );
            assert_eq!(session["bytes"].as_u64().expect("a count") > 0, folder.is_some());
            assert!(session["kv_bytes"].as_u64().expect("a count") > 0);
            assert!(
                session["last_used_at"].as_u64().expect("a time")
                    >= session["created_at"].as_u64().expect("a time")
            );
            assert_eq!(session["last_resume"]["reason"], "new");
        }
    }
}

async fn one_turn_at_a_time() {
    for (_folder, server) in both() {
        Client::new(&server, "s").says("one?").await;
        server.gate.close_after(20);
        let long = ask(FREE, json!({"stream": true, "max_tokens": 500, "session_id": "s"}));
        let response = server.send(request(Method::POST, PATH, &[], Some(long))).await;
        assert_eq!(response.status(), StatusCode::OK);
        for reply in [server.chat("two?", json!({"session_id": "s"})).await, reset_later(&server).await] {
            assert_eq!((reply.error().0, reply.error().1.as_str()), (409, "session_busy"));
            assert!(reply.headers.contains_key("retry-after"));
        }
        let read = server.call(Method::GET, "/v1/sessions/s/explain", &[], None).await;
        assert_eq!(read.status, StatusCode::OK, "it can be read meanwhile");
        server.gate.open();
        drop(response);
        let reply = retried(&server, "s").await;
        assert_eq!(content(&reply), "dos", "it is free when the other has gone");
    }
}

async fn reset_later(server: &Server) -> Reply {
    reset(server, "s").await
}

/// Asks until the session is free.
async fn retried(server: &Server, session: &str) -> Value {
    for _ in 0..1000 {
        let reply = server.chat("two?", json!({"session_id": session})).await;
        if reply.status == StatusCode::OK {
            return reply.json();
        }
        assert_eq!(reply.error().1, "session_busy");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the session stays busy");
}

async fn what_the_terminal_has_open_is_busy() {
    let (_folder, store, server) = on_disk();
    let writer = store.open_or_create(&name("s"), &model_fingerprint()).expect("opened");
    for reply in [
        server.chat("one?", json!({"session_id": "s"})).await,
        reset(&server, "s").await,
        delete(&server, "s").await,
    ] {
        assert_eq!((reply.error().0, reply.error().1.as_str()), (409, "session_busy"));
    }
    drop(writer);
    assert_eq!(server.chat("one?", json!({"session_id": "s"})).await.status, StatusCode::OK);
}

async fn as_many_sessions_as_there_are_places() {
    let mut build = build(None);
    build.max_sessions = 1;
    let server = build.start();
    Client::new(&server, "a").says("one?").await;
    let full = async || server.chat("one?", json!({"session_id": "b", "stream": true})).await;
    let reply = full().await;
    assert_eq!((reply.error().0, reply.error().1.as_str()), (429, "capacity_exhausted"));
    assert!(reply.headers.contains_key("retry-after"));
    assert_eq!(server.get("/v1/sessions/b").await.error().0, 404, "a session that came to nothing is none");
    reset(&server, "a").await.ok();
    assert_eq!(full().await.error().0, 429, "a reset keeps the place");
    assert_eq!(server.chat("one?", json!({})).await.status, StatusCode::OK, "no session needs no place");
    delete(&server, "a").await.ok();
    assert_eq!(full().await.status, StatusCode::OK);
}

async fn a_turn_is_on_disk_before_its_answer_is_complete() {
    let (_folder, store, server) = on_disk();
    let body = ask("one?", json!({"session_id": "s", "stream": true}));
    let response = server.send(request(Method::POST, PATH, &[], Some(body))).await;
    let mut body = pieces(response);
    while let Some(piece) = body.next().await {
        let text = String::from_utf8(piece.to_vec()).expect("UTF-8");
        if text.contains("\"finish_reason\":\"stop\"") {
            assert_eq!(store.read(&name("s")).expect("saved").turns.len(), 1);
            assert!(store.open(&name("s")).is_ok(), "and nobody holds it any more");
            return;
        }
    }
    panic!("no finish");
}

async fn what_was_heard_of_a_cancelled_answer_is_kept() {
    let (_folder, store, server) = on_disk();
    let body = ask(FREE, json!({"session_id": "s", "stream": true, "max_tokens": 3900}));
    let response = server.send(request(Method::POST, PATH, &[], Some(body))).await;
    let mut body = pieces(response);
    for _ in 0..6 {
        body.next().await.expect("more");
    }
    drop(body);
    let reply = retried(&server, "s").await;
    assert_eq!(content(&reply), "dos");
    // The client did not send what it had not got: its new turn took the place of the cancelled one.
    assert_eq!(store.read(&name("s")).expect("saved").turns.len(), 1);
    let body = ask(FREE, json!({"session_id": "t", "stream": true, "max_tokens": 3900}));
    let mut body = pieces(server.send(request(Method::POST, PATH, &[], Some(body))).await);
    for _ in 0..6 {
        body.next().await.expect("more");
    }
    drop(body);
    for _ in 0..1000 {
        if store.read(&name("t")).is_ok_and(|saved| !saved.turns.is_empty()) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let saved = store.read(&name("t")).expect("saved");
    assert_eq!(saved.turns[0].turn.finish, Finish::Cancelled);
    assert!(!saved.turns[0].turn.generated.is_empty());
}

async fn a_failed_turn_leaves_the_conversation_as_it_was() {
    for (_folder, server) in both() {
        let mut client = Client::new(&server, "s");
        client.says("one?").await;
        server.gate.fail_after(1, llmctl::runtime::Error::Backend("gone".to_owned()));
        let reply = server.chat("two?", json!({"session_id": "s"})).await;
        assert_eq!(reply.error().0, 500);
        let session = server.get("/v1/sessions/s?messages=true").await.ok();
        assert_eq!((&session["turns"], &session["messages"][1]["content"]), (&json!(1), &json!("uno")));
        assert_eq!(content(&client.says("two?").await), "dos");
    }
}

async fn what_the_servers_end_cuts_leaves_what_its_reader_got() {
    for is_streamed in [false, true] {
        let (_folder, store, server) = on_disk();
        Client::new(&server, "s").says("one?").await;
        server.gate.close_after(20);
        let body = ask(FREE, json!({"session_id": "s", "session_append": true, "stream": is_streamed}));
        let running = server.spawn(request(Method::POST, PATH, &[], Some(body)));
        server.gate.reached().await;
        server.app.cut_short();
        server.app.engine().expect("an engine").cancel_all().expect("it lives");
        server.gate.open();
        let reply = running.await.expect("no panic");
        assert!(reply.text.contains("shutting_down"), "{reply:?}");
        let turns = store.read(&name("s")).expect("saved").turns;
        // Whoever asks again for a whole answer must not find the question asked already.
        assert_eq!(turns.len(), if is_streamed { 2 } else { 1 });
        assert!(!is_streamed || turns[1].turn.finish == Finish::Cancelled);
    }
}

async fn one_answer_per_turn() {
    let (_folder, _, server) = on_disk();
    let reply = server.chat("one?", json!({"session_id": "s", "n": 2})).await;
    assert_eq!(reply.error(), (400, "unsupported_parameter".to_owned(), "n".to_owned()));
}

async fn tool_calls_go_back_as_they_were_made() {
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": [2]}}\n</tool_call>";
    let folder = tempfile::tempdir().expect("a folder");
    let store = SessionStore::new(folder.path().join("sessions"));
    let build =
        Build { template: Some(QWENISH.to_owned()), store: Some(store), ..Build::answers(&[("call", call)]) };
    let server = build.start();
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let mut messages = vec![json!({"role": "user", "content": "call"})];
    let body = |messages: &[Value]| json!({"session_id": "s", "messages": messages, "tools": tools});
    let first = server.post(PATH, body(&messages)).await.ok();
    let message = first["choices"][0]["message"].clone();
    assert_eq!(first["choices"][0]["finish_reason"], "tool_calls", "{first}");
    let id = message["tool_calls"][0]["id"].clone();
    messages.push(message);
    messages.push(json!({"role": "tool", "tool_call_id": id, "content": "done"}));
    messages.push(json!({"role": "user", "content": "thanks"}));
    let second = server.post(PATH, body(&messages)).await.ok();
    assert_eq!((content(&second), reason(&second)), ("echo: thanks", "exact_prefix"));
}

both_kinds! {
    each_turn_computes_only_what_is_new,
    headers_name_a_session_too,
    without_a_session_nothing_is_kept,
    a_conversation_goes_on_between_terminal_and_http,
    another_server_goes_on_where_this_one_ended,
    an_edit_is_resumed_as_far_as_it_goes_and_explained,
    reset_and_delete_may_be_said_twice,
    a_fork_goes_its_own_way,
    all_sessions_are_listed,
    one_turn_at_a_time,
    what_the_terminal_has_open_is_busy,
    as_many_sessions_as_there_are_places,
    a_turn_is_on_disk_before_its_answer_is_complete,
    what_was_heard_of_a_cancelled_answer_is_kept,
    a_failed_turn_leaves_the_conversation_as_it_was,
    what_the_servers_end_cuts_leaves_what_its_reader_got,
    one_answer_per_turn,
    tool_calls_go_back_as_they_were_made,
}
