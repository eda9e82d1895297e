//! Promise: a session over HTTP is a conversation in the store that the terminal uses: it goes on there and back, each turn
//! is on disk before its answer is complete, and what is in memory is used as far as it goes and explained where not.

use futures_util::StreamExt;
use llmctl_engine::Timings;
use llmctl_engine::turn::session_chat::{RecordedAnswer, SessionChat};

use crate::common::prelude::*;
use crate::common::server::{
    Reply, ask, both_kinds, chat_tokenizer, model_fingerprint, pieces, request, whole,
};

const PATH: &str = "/v1/chat/completions";

fn build(store: Option<SessionStore>) -> Build {
    let answers = [("one?", "uno"), ("two?", "dos"), ("three?", "tres"), ("zwei?", "drei")];
    // Whoever needs no key is the local user then, so that tests find what was said where the terminal does.
    let settings = ServeSettings { share_sessions: true, ..ServeSettings::default() };
    Build { store, settings, ..Build::answers(&answers) }
}

/// Servers over a folder and over nothing: a session is one on both.
fn both() -> [(Option<TempDir>, Server); 2] {
    let folder = tempfile::tempdir().expect("a folder");
    let store = SessionStore::new(folder.path().join("sessions"));
    [(Some(folder), build(Some(store)).start()), (None, build(None).start())]
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
        assert_eq!(full["turn_ends"], json!(vec![json!({"messages": 2, "finish_reason": "stop"}); 2]));
        assert_eq!(server.get("/v1/sessions/s?messages=maybe").await.error().0, 400);
    }
}

async fn headers_name_a_session_too() {
    let (_folder, store, server) = on_disk(build);
    for header in ["x-session-id", "X-ExecuTorch-Session-ID", "session_id"] {
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
    let (_folder, store, server) = on_disk(build);
    server.chat("one?", json!({})).await.ok();
    assert!(store.list().expect("a list").is_empty());
    let list = server.get("/v1/sessions").await.ok();
    assert_eq!(list, json!({"object": "list", "data": [], "has_more": false, "last_id": null}));
}

fn terminal_turn(store: &SessionStore, session: &str, question: &str, text: &str) {
    let chat_tokenizer = chat_tokenizer(Some(CHATML));
    let model = model_fingerprint();
    let writer = store.open_or_create(&name(session), &model).expect("opened");
    let mut session_chat = SessionChat::resume(writer, model);
    let turn = session_chat
        .prompt(
            &chat_tokenizer,
            session_chat.followed_by(vec![Message::user(question)]),
            &llmctl_image::ImageSet::default(),
        )
        .expect("a prompt");
    let generated = chat_tokenizer.encode_rest(text).expect("encodes");
    let usage = Usage { completion_tokens: generated.len(), ..Usage::default() };
    let outcome =
        Outcome { finish: Finish::Eos(1), usage, timings: Timings::default(), seed: 1, adapters: Vec::new() };
    let sampling = Sampling::default();
    session_chat
        .record(turn, RecordedAnswer { message: Message::assistant(text), generated, outcome, sampling })
        .expect("kept");
}

async fn a_conversation_goes_on_between_terminal_and_http() {
    let (_folder, store, server) = on_disk(build);
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
    let (folder, store, server) = on_disk(build);
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
        let explained = server.get("/v1/sessions/s~1/explain").await.ok();
        let miss = &explained["last_miss"];
        assert_eq!((&miss["reason"], &miss["cached_tokens"]), (&json!("partial_prefix"), &miss["position"]));
        assert!(miss["session"]["text"].as_str().expect("text").starts_with("two?"), "{miss}");
        assert!(miss["prompt"]["text"].as_str().expect("text").starts_with("zwei?"), "{miss}");
        assert!(miss["before"].as_str().expect("text").contains("user\\n"), "{miss}");
        let kept = server.get("/v1/sessions/s?messages=true").await.ok();
        assert_eq!((&kept["turns"], &kept["messages"][2]["content"]), (&json!(2), &json!("two?")));
    }
    let (_folder, _, server) = on_disk(build);
    assert_eq!(
        server.get("/v1/sessions/none/explain").await.error(),
        (404, "session_not_found".to_owned(), String::new())
    );
    assert_eq!(server.get("/v1/sessions/none").await.error().0, 404);
}

async fn who_breaks_a_prefix_is_told_by_message_character_and_cause() {
    let server = build(None).start();
    let headers = [("x-session-affinity", "agent")]; // the front adds what the client calls itself
    let conversation = |time: &str, question: &str| {
        json!({"messages": [
            {"role": "system", "content": format!("You are a careful helper of people who write programs. It is 2026-11-29 {time} now.")},
            {"role": "user", "content": "one?"},
            {"role": "assistant", "content": "uno"},
            {"role": "user", "content": question},
        ]})
    };
    let ask = async |time: &str, question: &str| {
        let sent = Some(conversation(time, question));
        server.call(Method::POST, PATH, &headers, sent).await.ok()
    };
    let broken =
        async || server.get("/v1/sessions/agent/explain?transient=true").await.ok()["prefix_break"].clone();
    ask("07:36", "two?").await;
    assert_eq!(broken().await, Value::Null);
    let second = ask("07:41", "three?").await;
    let told = broken().await;
    assert_eq!(
        (&told["client"], &told["message"], &told["role"]),
        (&json!("unknown"), &json!(0), &json!("system"))
    );
    assert_eq!(
        (&told["cause"], &told["was"], &told["now"]),
        (&json!("date"), &json!("07:36"), &json!("07:41")),
        "{told}"
    );
    assert_eq!((&told["character"], &told["before"]), (&json!(75), &json!("s 2026-11-29 07:")), "{told}");
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
    let all = second["usage"]["prompt_tokens"].as_u64().expect("a count");
    assert!(
        told["tokens"].as_u64().is_some_and(|tokens| tokens > 0 && tokens <= all - cached),
        "{told} {second}"
    );
    // A request of no session is what the next one is compared with too.
    server.call(Method::POST, PATH, &[], Some(conversation("07:42", "zwei?"))).await.ok();
    ask("07:42", "two?").await;
    assert_eq!(broken().await, Value::Null, "another question behind what was sent last");
}

async fn reset_and_delete_may_be_said_twice() {
    for (_folder, server) in both() {
        for _ in 0..2 {
            let done = json!({"reset": true, "session_id": "none", "branch": null});
            assert_eq!(reset(&server, "none").await.ok(), done);
            let done = json!({"closed": true, "session_id": "none", "branches": []});
            assert_eq!(delete(&server, "none").await.ok(), done);
        }
        let mut client = Client::new(&server, "s");
        client.says("one?").await;
        assert_eq!(reset(&server, "s").await.ok()["branch"], "s~1", "what was said is kept");
        let session = server.get("/v1/sessions/s?messages=true").await.ok();
        assert_eq!(
            (&session["turns"], &session["tokens"], &session["messages"]),
            (&json!(0), &json!(0), &json!([]))
        );
        let again = client.says("two?").await;
        assert_ne!(reason(&again), "exact_prefix");
        assert_eq!(delete(&server, "s").await.ok()["branches"], json!(["s~1"]));
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

async fn a_turn_has_a_receipt() {
    for (_folder, server) in both() {
        let say = |question: &str, more: Value| {
            let mut body = json!({"session_id": "r", "messages": [{"role": "user", "content": question}]});
            body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
            body
        };
        let reply = server.post(PATH, say("one?", json!({"temperature": 0.5, "stop": ["zzz"]}))).await;
        let header = reply.headers["x-llmctl-receipt"].to_str().expect("a text").to_owned();
        assert_eq!(reply.ok()["llmctl"]["receipt"], header.as_str());
        let listed = server.get("/v1/sessions/r/receipt").await;
        assert_eq!(listed.headers["x-llmctl-receipt"], header.as_str());
        let listed = listed.ok();
        let turn = &listed["turns"][0];
        let facts = (&turn["turn"], &turn["hash"], &turn["intact"], &listed["hash"]);
        assert_eq!(facts, (&json!(1), &json!(header), &json!(true), &json!(header)));
        assert_eq!(turn["receipt"]["recipe"]["stop"], json!(["zzz"]));
        assert_eq!(turn["receipt"]["sampling"]["temperature"], 0.5);
        assert!(turn["receipt"]["sampling"]["seed"].is_u64(), "the one that was drawn: {turn}");
        assert!(turn["receipt"]["previous"].is_null());
        // A stream knows it at its end, and the next receipt continues the chain.
        let mut client = Client::new(&server, "r");
        client.messages =
            vec![json!({"role": "user", "content": "one?"}), json!({"role": "assistant", "content": "uno"})];
        client.messages.push(json!({"role": "user", "content": "two?"}));
        let body = json!({"session_id": "r", "messages": client.messages, "stream": true});
        let reply = server.post(PATH, body).await;
        assert!(!reply.headers.contains_key("x-llmctl-receipt"));
        let told = reply
            .events()
            .iter()
            .rev()
            .find_map(|event| event["llmctl"]["receipt"].as_str().map(str::to_owned));
        let listed = server.get("/v1/sessions/r/receipt").await.ok();
        assert_eq!(listed["turns"][1]["hash"], told.expect("in the last chunk").as_str());
        assert_eq!(listed["turns"][1]["receipt"]["previous"], header.as_str());
        assert_eq!(server.get("/v1/sessions/none/receipt").await.error().0, 404);
        // Nothing is kept of a request without a session.
        let reply = server.post(PATH, json!({"messages": [{"role": "user", "content": "one?"}]})).await;
        assert!(!reply.headers.contains_key("x-llmctl-receipt"));
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
        let long = json!({"stream": true, "max_tokens": 500, "session_id": "s", "session_append": true});
        let long = ask(FREE, long);
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
    let (_folder, store, server) = on_disk(build);
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

async fn slots_are_no_limit_for_names() {
    for (_folder, store) in stores() {
        let server = Build { max_sessions: 3, ..build(store) }.start();
        let mut clients: Vec<Client<'_>> =
            ["a", "b", "c", "d"].into_iter().map(|name| Client::new(&server, name)).collect();
        for client in &mut clients {
            assert_eq!(content(&client.says("one?").await), "uno", "{}", client.session);
        }
        let state = async |session: &str| server.get(&format!("/v1/sessions/{session}")).await.ok();
        assert_eq!(state("a").await["resident_tokens"], 0, "it was used longest ago");
        assert_eq!(state("b").await["resident_tokens"], state("b").await["tokens"]);
        // It is brought back, and says why it had to be.
        let back = clients[0].says("two?").await;
        assert_eq!((content(&back), reason(&back)), ("dos", "evicted"));
        let explained = server.get("/v1/sessions/a/explain").await.ok();
        assert_eq!(explained["last_resume"]["reason"], "evicted");
        assert_eq!(explained["last_miss"], Value::Null, "it went on where it ended");
        for fork in ["e", "f", "g", "h"] {
            server.post("/v1/sessions/a/fork", json!({"to": fork})).await.ok();
        }
        assert_eq!(content(&clients[3].says("two?").await), "dos");
        assert_eq!(server.app.engine().expect("up").load().expect("up").num_sessions, 3);
    }
}

async fn a_session_finds_no_slot_while_all_have_requests_in_them() {
    let server = Build { max_sessions: 1, ..build(None) }.start();
    server.gate.close();
    let long = ask(FREE, json!({"max_tokens": 5, "session_id": "a"}));
    let running = server.spawn(request(Method::POST, PATH, &[], Some(long)));
    server.gate.reached().await;
    let waiting =
        server.spawn(request(Method::POST, PATH, &[], Some(ask("one?", json!({"session_id": "b"})))));
    let hint = [("x-session-affinity", "c")];
    let hinted = server.spawn(request(Method::POST, PATH, &hint, Some(ask("one?", json!({})))));
    server.gate.open();
    assert_eq!(running.await.expect("no panic").status, StatusCode::OK);
    // Without --session-wait it is told to come back; a hint costs nothing.
    let reply = waiting.await.expect("no panic");
    if reply.status != StatusCode::OK {
        assert_eq!((reply.error().0, reply.error().1.as_str()), (429, "capacity_exhausted"));
        assert!(reply.headers.contains_key("retry-after"));
    }
    assert_eq!(content(&hinted.await.expect("no panic").ok()), "uno");
}

async fn a_turn_is_on_disk_before_its_answer_is_complete() {
    let (_folder, store, server) = on_disk(build);
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
    let (_folder, store, server) = on_disk(build);
    let body = ask(FREE, json!({"session_id": "s", "stream": true, "max_tokens": 3900}));
    let response = server.send(request(Method::POST, PATH, &[], Some(body))).await;
    let mut body = pieces(response);
    for _ in 0..6 {
        body.next().await.expect("more");
    }
    drop(body);
    let reply = retried(&server, "s").await;
    assert_eq!(content(&reply), "dos");
    // The client did not send what it had not got: its new turn is a branch, beside the cancelled one.
    assert_eq!(store.read(&name("s")).expect("saved").turns[0].turn.finish, Finish::Cancelled);
    assert_eq!((&reply["llmctl"]["branch"], &reply["llmctl"]["kept_turns"]), (&json!("s~1"), &json!(0)));
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
        server.gate.fail_after(1, Error::Backend("gone".to_owned()));
        let reply = server.chat("two?", json!({"session_id": "s"})).await;
        assert_eq!(reply.error().0, 500);
        let session = server.get("/v1/sessions/s?messages=true").await.ok();
        assert_eq!((&session["turns"], &session["messages"][1]["content"]), (&json!(1), &json!("uno")));
        assert_eq!(content(&client.says("two?").await), "dos");
    }
}

async fn what_the_servers_end_cuts_leaves_what_its_reader_got() {
    for is_streamed in [false, true] {
        let (_folder, store, server) = on_disk(build);
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
    let (_folder, _, server) = on_disk(build);
    let reply = server.chat("one?", json!({"session_id": "s", "n": 2})).await;
    assert_eq!(reply.error(), (400, "unsupported_parameter".to_owned(), "n".to_owned()));
}

fn patient(store: Option<SessionStore>) -> Server {
    let settings = ServeSettings {
        session_wait: Duration::from_secs(60),
        share_sessions: true,
        ..ServeSettings::default()
    };
    Build { settings, ..build(store) }.start()
}

fn in_session(question: &str, more: Value) -> axum::http::Request<axum::body::Body> {
    let mut body = ask(question, more);
    body["session_id"] = "s".into();
    body["session_append"] = true.into();
    request(Method::POST, PATH, &[], Some(body))
}

async fn a_busy_session_is_waited_for_in_the_order_of_arrival() {
    for (_folder, store) in stores() {
        let server = patient(store);
        server.gate.close();
        let first = server.spawn(in_session("one?", json!({})));
        server.gate.reached().await;
        // The stream has begun, and says that it waits; the next has come later.
        let second = server.send(in_session("two?", json!({"stream": true}))).await;
        assert_eq!(second.status(), StatusCode::OK);
        let third = server.spawn(in_session("three?", json!({})));
        let mut second = pieces(second);
        let mut heard = String::new();
        while !heard.contains(": waiting: the session is busy") {
            heard.push_str(&String::from_utf8_lossy(&second.next().await.expect("more")));
        }
        assert!(!third.is_finished());
        server.gate.open();
        assert_eq!(content(&first.await.expect("no panic").ok()), "uno");
        while let Some(piece) = second.next().await {
            heard.push_str(&String::from_utf8_lossy(&piece));
        }
        assert!(heard.ends_with("data: [DONE]\n\n") && heard.contains("\"content\":\"d"), "{heard}");
        assert_eq!(content(&third.await.expect("no panic").ok()), "tres");
        let session = server.get("/v1/sessions/s?messages=true").await.ok();
        let said: Vec<&str> = session["messages"]
            .as_array()
            .expect("messages")
            .iter()
            .map(|message| message["content"].as_str().expect("text"))
            .collect();
        assert_eq!(said, ["one?", "uno", "two?", "dos", "three?", "tres"]);
    }
}

async fn whoever_leaves_while_waiting_frees_the_place() {
    let server = patient(None);
    server.gate.close();
    let first = server.spawn(in_session("one?", json!({})));
    server.gate.reached().await;
    let second = server.send(in_session("two?", json!({"stream": true}))).await;
    let third = server.spawn(in_session("three?", json!({})));
    drop(second);
    server.gate.open();
    assert_eq!(content(&first.await.expect("no panic").ok()), "uno");
    assert_eq!(content(&third.await.expect("no panic").ok()), "tres");
    assert_eq!(server.get("/v1/sessions/s").await.ok()["turns"], 2);
}

async fn only_so_many_wait_for_sessions() {
    let settings = ServeSettings {
        session_wait: Duration::from_secs(60),
        share_sessions: true,
        ..ServeSettings::default()
    };
    let server = Build { settings, max_waiting: 1, ..build(None) }.start();
    server.gate.close();
    let first = server.spawn(in_session("one?", json!({})));
    server.gate.reached().await;
    let second = server.send(in_session("two?", json!({"stream": true}))).await;
    let reply = whole(server.send(in_session("three?", json!({}))).await).await;
    assert_eq!((reply.error().0, reply.error().1.as_str()), (429, "queue_full"));
    assert!(reply.headers.contains_key("retry-after"));
    server.gate.open();
    whole(second).await.events();
    first.await.expect("no panic").ok();
}

async fn what_the_terminal_has_open_is_waited_for() {
    let (_folder, store) = stores().into_iter().next().expect("with a store");
    let store = store.expect("a store");
    let server = patient(Some(store.clone()));
    let writer = store.open_or_create(&name("s"), &model_fingerprint()).expect("opened");
    let waiting = server.send(in_session("one?", json!({"stream": true}))).await;
    assert_eq!(waiting.status(), StatusCode::OK, "it has begun to wait");
    drop(writer);
    whole(waiting).await.events();
    assert_eq!(store.read(&name("s")).expect("saved").turns.len(), 1);
}

async fn what_does_not_continue_a_session_takes_nothing_from_it() {
    for (_folder, store) in stores() {
        let server = build(store).start();
        let mut client = Client::new(&server, "keepme");
        client.says("one?").await;
        client.says("two?").await;
        let whole =
            async |session: &str| server.get(&format!("/v1/sessions/{session}?messages=true")).await.ok();
        let before = whole("keepme").await["messages"].clone();
        let header = [("x-session-id", "keepme")];
        let reply = server.call(Method::POST, PATH, &header, Some(ask("three?", json!({})))).await;
        assert_eq!(reply.headers["x-llmctl-branch"], "keepme~1");
        let reply = reply.ok();
        let placed = json!({
            "session_id": "keepme", "transient": false, "branch": "keepme~1", "branch_is_new": true, "kept_turns": 0,
        });
        let mut told = reply["llmctl"].clone();
        assert!(
            told.as_object_mut().and_then(|told| told.remove("receipt")).is_some_and(|hash| hash.is_string())
        );
        assert_eq!(told, placed);
        assert_eq!(whole("keepme").await["messages"], before);
        // Whoever goes on with it goes on there, and warm.
        let mut other = Client { messages: Vec::new(), ..client.clone() };
        other.messages.push(json!({"role": "user", "content": "three?"}));
        other.messages.push(reply["choices"][0]["message"].clone());
        let second = other.says("two?").await;
        assert_eq!((content(&second), reason(&second)), ("dos", "exact_prefix"));
        assert_eq!(second["llmctl"]["branch"], "keepme~1");
        assert_eq!(second["llmctl"]["branch_is_new"], false);
        // The last answer anew: the same messages again.
        client.messages.pop();
        let body = json!({"session_id": "keepme", "messages": client.messages, "stream": true});
        let response = server.call(Method::POST, PATH, &[], Some(body)).await;
        assert_eq!(response.headers["x-llmctl-branch"], "keepme~2");
        let events = response.events();
        let finish = events.iter().find(|event| event["llmctl"].is_object()).expect("a stream tells it too");
        assert_eq!(
            (&finish["llmctl"]["branch"], &finish["llmctl"]["kept_turns"]),
            (&json!("keepme~2"), &json!(1))
        );
        assert_eq!(whole("keepme").await["messages"], before);
        let branches = whole("keepme").await["branches"].clone();
        let ids: Vec<&Value> =
            branches.as_array().expect("a list").iter().map(|branch| &branch["id"]).collect();
        assert_eq!(ids, ["keepme~1", "keepme~2"]);
        assert_eq!((&branches[0]["turns"], &branches[0]["reason"]), (&json!(2), &json!("request")));
        let list = server.get("/v1/sessions").await.ok();
        let listed: Vec<(&Value, &Value)> = list["data"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|session| (&session["id"], &session["branch"]["of"]))
            .collect();
        let (own, of, null) = (json!("keepme"), json!("keepme"), Value::Null);
        assert_eq!(listed, [(&own, &null), (&json!("keepme~1"), &of), (&json!("keepme~2"), &of)]);
    }
}

async fn a_branch_is_restored_and_what_the_session_held_is_a_branch_then() {
    for (_folder, store) in stores() {
        let server = build(store).start();
        let mut client = Client::new(&server, "s");
        client.says("one?").await;
        client.says("two?").await;
        server.chat("three?", json!({"session_id": "s"})).await.ok();
        let restore = async |session: &str, body: Value| {
            server.post(&format!("/v1/sessions/{session}/restore"), body).await
        };
        let restored = restore("s", json!({"branch": "s~1"})).await.ok();
        assert_eq!((&restored["turns"], &restored["session_id"]), (&json!(1), &json!("s")));
        let kept = restored["kept_as"].as_str().expect("what it held is kept").to_owned();
        assert_eq!(server.get("/v1/sessions/s?messages=true").await.ok()["messages"][0]["content"], "three?");
        assert_eq!(server.get(&format!("/v1/sessions/{kept}")).await.ok()["turns"], 2);
        // The conversation that was there goes on under the same id.
        let reply = client.says("three?").await;
        assert_eq!((content(&reply), &reply["llmctl"]["branch"]), ("tres", &json!(kept)));
        for (session, body, status) in [
            ("s", json!({"branch": "none"}), 404),
            ("none", json!({"branch": kept}), 404),
            ("s", json!({}), 422),
            ("s", json!({"branch": "a b"}), 400),
        ] {
            assert_eq!(restore(session, body.clone()).await.error().0, status, "{session} {body}");
        }
        Client::new(&server, "other").says("one?").await;
        assert_eq!(restore("s", json!({"branch": "other"})).await.error().0, 400, "it is no branch of s");
    }
}

async fn a_renamed_session_goes_on_warm_under_its_new_name() {
    for (_folder, server) in both() {
        let mut client = Client::new(&server, "a");
        client.says("one?").await;
        server.chat("three?", json!({"session_id": "a"})).await.ok();
        Client::new(&server, "taken").says("one?").await;
        let rename = async |session: &str, body: Value| {
            server.post(&format!("/v1/sessions/{session}/rename"), body).await
        };
        for (session, body, status, code) in [
            ("a", json!({"to": "taken"}), 409, "session_exists"),
            ("a", json!({"to": "x y"}), 400, "invalid_session_id"),
            ("a", json!({}), 422, "invalid_value"),
            ("a", json!({"to": "b", "strange": 1}), 400, "unsupported_parameter"),
            ("none", json!({"to": "b"}), 404, "session_not_found"),
        ] {
            let error = rename(session, body.clone()).await.error();
            assert_eq!((error.0, error.1.as_str()), (status, code), "{session} {body}");
        }
        let renamed = rename("a", json!({"to": "b"})).await.ok();
        assert_eq!(renamed, json!({"renamed": true, "session_id": "b", "from": "a"}));
        assert_eq!(rename("b", json!({"to": "b"})).await.status, StatusCode::OK);
        assert_eq!(server.get("/v1/sessions/a").await.error().0, 404);
        let session = server.get("/v1/sessions/b").await.ok();
        assert_eq!((&session["branches"][0]["id"], &session["turns"]), (&json!("a~1"), &json!(1)));
        assert_eq!(session["last_resume"]["reason"], "new", "what is known of its prompts has moved, too");
        let mut client = Client { session: "b", ..client };
        assert_eq!(reason(&client.says("two?").await), "exact_prefix");
        // A branch with a name of its own belongs to nobody.
        rename("a~1", json!({"to": "c"})).await.ok();
        assert_eq!(server.get("/v1/sessions/c").await.ok()["branch"], Value::Null);
        assert_eq!(server.get("/v1/sessions/b").await.ok()["branches"], json!([]));
    }
}

async fn a_restored_branch_is_warm_and_its_prompt_is_explained() {
    for (_folder, server) in both() {
        let mut client = Client::new(&server, "s");
        client.says("one?").await;
        client.says("two?").await;
        let mut edited = client.clone();
        edited.messages.truncate(2);
        let reply = edited.says("three?").await;
        let branch = reply["llmctl"]["branch"].clone();
        server.post("/v1/sessions/s/restore", json!({"branch": branch})).await.ok();
        let explained = server.get("/v1/sessions/s/explain").await.ok();
        assert_eq!(explained["last_miss"]["reason"], "partial_prefix", "{explained}");
        let resident = server.get("/v1/sessions/s").await.ok()["resident_tokens"].clone();
        assert_eq!(resident, reply["usage"]["total_tokens"]);
        let next = edited.says("one?").await;
        assert_eq!((reason(&next), &next["llmctl"]["branch"]), ("exact_prefix", &Value::Null));
    }
}

async fn a_session_has_only_so_many_branches() {
    let server = build(None).start();
    Client::new(&server, "s").says("one?").await;
    for n in 0..100 {
        server.chat(&format!("other {n}"), json!({"session_id": "s", "max_tokens": 1})).await.ok();
    }
    let reply = server.chat("one more", json!({"session_id": "s"})).await;
    assert_eq!((reply.error().0, reply.error().1.as_str()), (409, "too_many_branches"));
    delete(&server, "s~7").await.ok();
    assert_eq!(server.chat("one more", json!({"session_id": "s"})).await.status, StatusCode::OK);
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

async fn a_merged_system_prompt_leaves_a_session_warm() {
    let without_system =
        CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}");
    let answers = [("Be brief.\n\none?", "uno"), ("two?", "dos"), ("three?", "tres")];
    let server = Build { template: Some(without_system), ..Build::answers(&answers) }.start();
    let mut client = Client::new(&server, "merged");
    client.messages.push(json!({"role": "system", "content": "Be brief."}));
    assert_eq!(content(&client.says("one?").await), "uno", "the system prompt is in front of the question");
    let second = client.says("two?").await;
    assert_eq!((content(&second), reason(&second)), ("dos", "exact_prefix"));
    let third = client.says("three?").await;
    assert_eq!((content(&third), reason(&third)), ("tres", "exact_prefix"));
    // Another system prompt is another conversation: nothing of the first answer's prompt is taken for it.
    client.messages[0] = json!({"role": "system", "content": "Be long."});
    client.messages.truncate(1);
    let other = client.says("one?").await;
    assert_eq!(content(&other), "echo: Be long.\n\none?");
}

both_kinds! {
    a_merged_system_prompt_leaves_a_session_warm,
    each_turn_computes_only_what_is_new,
    headers_name_a_session_too,
    without_a_session_nothing_is_kept,
    a_conversation_goes_on_between_terminal_and_http,
    another_server_goes_on_where_this_one_ended,
    an_edit_is_resumed_as_far_as_it_goes_and_explained,
    who_breaks_a_prefix_is_told_by_message_character_and_cause,
    reset_and_delete_may_be_said_twice,
    a_fork_goes_its_own_way,
    a_turn_has_a_receipt,
    all_sessions_are_listed,
    one_turn_at_a_time,
    what_the_terminal_has_open_is_busy,
    slots_are_no_limit_for_names,
    a_session_finds_no_slot_while_all_have_requests_in_them,
    a_turn_is_on_disk_before_its_answer_is_complete,
    what_was_heard_of_a_cancelled_answer_is_kept,
    a_failed_turn_leaves_the_conversation_as_it_was,
    what_the_servers_end_cuts_leaves_what_its_reader_got,
    one_answer_per_turn,
    a_busy_session_is_waited_for_in_the_order_of_arrival,
    whoever_leaves_while_waiting_frees_the_place,
    only_so_many_wait_for_sessions,
    what_the_terminal_has_open_is_waited_for,
    what_does_not_continue_a_session_takes_nothing_from_it,
    a_branch_is_restored_and_what_the_session_held_is_a_branch_then,
    a_renamed_session_goes_on_warm_under_its_new_name,
    a_restored_branch_is_warm_and_its_prompt_is_explained,
    a_session_has_only_so_many_branches,
    tool_calls_go_back_as_they_were_made,
}
