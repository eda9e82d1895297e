//! Promise: a session is its owner's: nobody else sees, continues, forks or removes it, or learns that it is there; and what a
//! client's routing header names is warm and never a conversation that is kept, nor a reason to refuse anything.

use llmctl_serve::gate::owner::{KeyLine, Owner};

use crate::common::prelude::*;
use crate::common::server::{Reply, ask, both_kinds, request, whole};

const PATH: &str = "/v1/chat/completions";

fn build(store: Option<SessionStore>) -> Build {
    let answers = [("one?", "uno"), ("two?", "dos"), ("title?", "Counting"), ("three?", "tres")];
    Build { store, ..Build::answers(&answers) }
}

fn owner(name: &str) -> Owner {
    KeyLine::parse(&format!("key-of-{name} owner={name}")).expect("a line").expect("a key").owner
}

/// A request of this owner's.
async fn by(owner: &Owner, server: &Server, method: Method, path: &str, body: Option<Value>) -> Reply {
    let mut request = request(method, path, &[], body);
    request.extensions_mut().insert(owner.clone());
    whole(server.send(request).await).await
}

fn ids(list: &Value) -> Vec<&str> {
    list["data"].as_array().expect("a list").iter().map(|one| one["id"].as_str().expect("an id")).collect()
}

async fn an_owner_sees_own_sessions_alone() {
    for (_folder, store) in stores() {
        let server = build(store).start();
        let (anna, ben) = (owner("anna"), owner("ben"));
        for (who, question) in [(&anna, "one?"), (&ben, "two?")] {
            let body = ask(question, json!({"session_id": "trip"}));
            by(who, &server, Method::POST, PATH, Some(body)).await.ok();
        }
        let body = ask("one?", json!({"session_id": "annas"}));
        by(&anna, &server, Method::POST, PATH, Some(body)).await.ok();
        let get = async |who: &Owner, path: &str| by(who, &server, Method::GET, path, None).await;
        assert_eq!(ids(&get(&anna, "/v1/sessions").await.ok()), ["annas", "trip"]);
        assert_eq!(ids(&get(&ben, "/v1/sessions").await.ok()), ["trip"]);
        let said = get(&ben, "/v1/sessions/trip?messages=true").await.ok()["messages"].clone();
        assert_eq!(said[0]["content"], "two?");
        for path in ["/v1/sessions/annas", "/v1/sessions/annas/explain"] {
            let (others, none) = (get(&ben, path).await, get(&ben, &path.replace("annas", "nobodys")).await);
            assert_eq!((others.error().0, others.error().1.as_str()), (404, "session_not_found"));
            assert_eq!(others.text.replace("annas", "nobodys"), none.text, "as if there were none");
        }
        let fork =
            by(&ben, &server, Method::POST, "/v1/sessions/annas/fork", Some(json!({"to": "mine"}))).await;
        assert_eq!(fork.error().0, 404);
        let restore = Some(json!({"branch": "annas~1"}));
        assert_eq!(
            by(&ben, &server, Method::POST, "/v1/sessions/annas/restore", restore).await.error().0,
            404
        );
        by(&ben, &server, Method::POST, "/v1/sessions/annas/reset", None).await.ok();
        by(&ben, &server, Method::DELETE, "/v1/sessions/annas", None).await.ok();
        by(&ben, &server, Method::DELETE, "/v1/sessions/trip", None).await.ok();
        let annas = get(&anna, "/v1/sessions/trip?messages=true").await.ok();
        assert_eq!((&annas["messages"][0]["content"], &annas["owner"]), (&json!("one?"), &json!("anna")));
        assert_eq!(get(&anna, "/v1/sessions/annas").await.ok()["turns"], 1);
        // A name is free for whoever has none of it.
        let body = ask("two?", json!({"session_id": "annas", "session_append": true}));
        let reply = by(&ben, &server, Method::POST, PATH, Some(body)).await.ok();
        assert_eq!((content(&reply), &reply["llmctl"]["kept_turns"]), ("dos", &json!(0)));
    }
}

async fn local_sessions_are_exposed_only_where_they_are_shared() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = SessionStore::new(folder.path().join("sessions"));
    let name = SessionName::new("diary").expect("a name");
    let model = crate::common::server::model_fingerprint();
    drop(store.create(&name, &model).expect("created"));
    let server = build(Some(store.clone())).start();
    assert_eq!(server.get("/v1/sessions/diary").await.error().0, 404);
    assert_eq!(ids(&server.get("/v1/sessions").await.ok()), Vec::<&str>::new());
    server.chat("one?", json!({"session_id": "diary"})).await.ok();
    assert!(store.read(&name).expect("there").turns.is_empty(), "another session of that name has begun");
    let anna = owner("anna");
    let shared = ServeSettings { share_sessions: true, ..ServeSettings::default() };
    let server = Build { settings: shared, ..build(Some(store.clone())) }.start();
    let seen = by(&anna, &server, Method::GET, "/v1/sessions/diary", None).await.ok();
    assert_eq!((&seen["turns"], &seen["owner"]), (&json!(0), &Value::Null));
    let body = ask("one?", json!({"session_id": "diary"}));
    by(&anna, &server, Method::POST, PATH, Some(body)).await.ok();
    assert_eq!(store.read(&name).expect("there").turns.len(), 1);
    // What a key begins is its owner's all the same.
    let body = ask("one?", json!({"session_id": "new"}));
    by(&anna, &server, Method::POST, PATH, Some(body)).await.ok();
    assert!(store.read(&SessionName::new("new").expect("a name")).is_err());
    assert_eq!(ids(&by(&anna, &server, Method::GET, "/v1/sessions", None).await.ok()), ["diary", "new"]);
}

async fn the_list_comes_in_pages() {
    for (_folder, store) in stores() {
        let server = build(store).start();
        for session in ["e", "a", "c", "b", "d"] {
            server.chat("one?", json!({"session_id": session})).await.ok();
        }
        let page = async |query: &str| server.get(&format!("/v1/sessions?{query}")).await.ok();
        let first = page("limit=2").await;
        assert_eq!(
            (ids(&first), &first["has_more"], &first["last_id"]),
            (vec!["a", "b"], &json!(true), &json!("b"))
        );
        let second = page("limit=2&after=b").await;
        assert_eq!((ids(&second), &second["has_more"]), (vec!["c", "d"], &json!(true)));
        let last = page("limit=2&after=d").await;
        assert_eq!((ids(&last), &last["has_more"]), (vec!["e"], &json!(false)));
        assert_eq!(ids(&page("after=bb").await), ["c", "d", "e"]);
        for bad in ["limit=0", "limit=1001", "limit=x"] {
            assert_eq!(server.get(&format!("/v1/sessions?{bad}")).await.error().2, "limit");
        }
    }
}

/// A client that sends a routing header with every request, and holds a conversation itself.
struct Agent<'a> {
    server: &'a Server,
    headers: &'a [(&'a str, &'a str)],
    messages: Vec<Value>,
}

impl<'a> Agent<'a> {
    fn new(server: &'a Server, headers: &'a [(&'a str, &'a str)]) -> Self {
        Self { server, headers, messages: Vec::new() }
    }

    async fn says(&mut self, question: &str) -> Value {
        self.messages.push(json!({"role": "user", "content": question}));
        let body = json!({"messages": self.messages});
        let reply = self.server.call(Method::POST, PATH, self.headers, Some(body)).await.ok();
        self.messages.push(reply["choices"][0]["message"].clone());
        reply
    }
}

async fn a_routing_header_keeps_several_conversations_warm_and_none_on_disk() {
    for (_folder, store) in stores() {
        let server = build(store.clone()).start();
        // As opencode: both headers, one value for its title and its main turns.
        let headers = [("x-session-id", "ses_1"), ("x-session-affinity", "ses_1")];
        let (mut title, mut main) = (Agent::new(&server, &headers), Agent::new(&server, &headers));
        assert_eq!(content(&title.says("title?").await), "Counting");
        assert_eq!(reason(&main.says("one?").await), "new");
        for question in ["two?", "three?"] {
            let reply = main.says(question).await;
            assert_eq!(reason(&reply), "exact_prefix", "{question}");
            let again = title.says(question).await;
            assert_eq!(reason(&again), "exact_prefix", "{question}");
        }
        let list = server.get("/v1/sessions").await.ok();
        let session = &list["data"][0];
        assert_eq!(
            (&session["id"], &session["transient"], &session["num_conversations"], &session["turns"]),
            (&json!("ses_1"), &json!(true), &json!(2), &json!(3))
        );
        let session = server.get("/v1/sessions/ses_1?messages=true").await.ok();
        assert_eq!(session["conversations"][1]["messages"][0]["content"], "one?");
        assert_eq!(session["last_resume"]["reason"], "exact_prefix");
        assert_eq!(server.get("/v1/sessions/ses_1/explain").await.ok()["last_miss"], Value::Null);
        if let Some(store) = store {
            assert!(store.list().expect("a list").is_empty());
            assert!(store.of_owner("anonymous").list().expect("a list").is_empty());
        }
        let deleted = server.call(Method::DELETE, "/v1/sessions/ses_1", &[], None).await.ok();
        assert_eq!(deleted["closed"], true);
        assert_eq!(server.get("/v1/sessions/ses_1").await.error().0, 404);
        assert_eq!(server.app.engine().expect("up").load().expect("up").num_sessions, 0);
        assert_eq!(content(&main.says("one?").await), "uno", "it begins again");
    }
}

async fn a_routing_header_refuses_nothing() {
    let server = build(None).start();
    for value in ["a b", "a/b", "~", "%41", &"x".repeat(4000)] {
        let headers = [("x-session-affinity", value)];
        let call =
            async |path: &str, body: Value| server.call(Method::POST, path, &headers, Some(body)).await;
        assert_eq!(call(PATH, ask("one?", json!({}))).await.status, StatusCode::OK, "{value}");
        let many = call(PATH, ask("one?", json!({"n": 3}))).await.ok();
        assert_eq!(many["choices"].as_array().map(Vec::len), Some(3));
        assert_eq!(call("/v1/completions", json!({"prompt": "one?"})).await.status, StatusCode::OK);
        let id = server.get("/v1/sessions").await.ok()["data"][0]["id"].as_str().expect("an id").to_owned();
        let path = format!("/v1/sessions/{}", id.replace('%', "%25"));
        server.call(Method::DELETE, &path, &[], None).await.ok();
        assert_eq!(ids(&server.get("/v1/sessions").await.ok()), Vec::<&str>::new(), "{value}");
    }
    let headers = [("x-session-affinity", "s")];
    let body = ask("one?", json!({"session_append": true}));
    let reply = server.call(Method::POST, PATH, &headers, Some(body)).await;
    assert_eq!(reply.error().2, "session_append", "there is nothing to append to");
}

async fn requests_of_one_routing_header_run_at_the_same_time() {
    let server = build(None).start();
    let headers = [("x-session-affinity", "busy")];
    server.gate.close();
    let send = |body: Value| server.spawn(request(Method::POST, PATH, &headers, Some(body)));
    let first = send(ask(FREE, json!({"max_tokens": 9})));
    server.gate.reached().await;
    let others: Vec<_> =
        ["one?", "two?", "one?"].into_iter().map(|question| send(ask(question, json!({})))).collect();
    server.gate.open();
    assert_eq!(first.await.expect("no panic").status, StatusCode::OK);
    for (other, answer) in others.into_iter().zip(["uno", "dos", "uno"]) {
        assert_eq!(content(&other.await.expect("no panic").ok()), answer);
    }
    assert_eq!(server.get("/v1/sessions/busy").await.ok()["num_conversations"], 4);
}

async fn an_edit_under_a_routing_header_keeps_both_conversations_warm() {
    let server = build(None).start();
    let headers = [("x-session-affinity", "pi")];
    let mut main = Agent::new(&server, &headers);
    main.says("one?").await;
    let mut other = Agent { messages: main.messages.clone(), ..Agent::new(&server, &headers) };
    main.says("two?").await;
    let parted = other.says("three?").await;
    assert_eq!((content(&parted), reason(&parted)), ("tres", "partial_prefix"));
    assert_eq!(reason(&main.says("three?").await), "exact_prefix");
    assert_eq!(reason(&other.says("one?").await), "exact_prefix");
}

async fn transient_sessions_are_their_owners_and_go_by_use() {
    let server = Build { max_sessions: 2, ..build(None) }.start();
    let call = async |who: &Owner, value: &str, question: &str| {
        let mut request =
            request(Method::POST, PATH, &[("x-session-affinity", value)], Some(ask(question, json!({}))));
        request.extensions_mut().insert(who.clone());
        whole(server.send(request).await).await.ok()
    };
    let (anna, ben) = (owner("anna"), owner("ben"));
    call(&anna, "a", "one?").await;
    call(&ben, "a", "two?").await;
    let seen = by(&ben, &server, Method::GET, "/v1/sessions/a?messages=true", None).await.ok();
    assert_eq!(seen["conversations"][0]["messages"][0]["content"], "two?");
    by(&ben, &server, Method::DELETE, "/v1/sessions/a", None).await.ok();
    assert_eq!(by(&anna, &server, Method::GET, "/v1/sessions/a", None).await.ok()["num_conversations"], 1);
    for value in ["b", "c", "d"] {
        call(&anna, value, "one?").await;
    }
    let list = by(&anna, &server, Method::GET, "/v1/sessions", None).await.ok();
    let counts: Vec<&Value> =
        list["data"].as_array().expect("a list").iter().map(|one| &one["num_conversations"]).collect();
    assert_eq!(counts, [0, 0, 1, 1], "those used longest ago have given theirs up");
}

both_kinds! {
    an_owner_sees_own_sessions_alone,
    local_sessions_are_exposed_only_where_they_are_shared,
    the_list_comes_in_pages,
    a_routing_header_keeps_several_conversations_warm_and_none_on_disk,
    a_routing_header_refuses_nothing,
    requests_of_one_routing_header_run_at_the_same_time,
    an_edit_under_a_routing_header_keeps_both_conversations_warm,
    transient_sessions_are_their_owners_and_go_by_use,
}
