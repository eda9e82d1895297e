//! Promise: `/v1/responses` answers as OpenAI's Responses API does: the same answer as a chat completion, whole and streamed; a
//! response is a point of a stored session, which can be continued, forked, read and deleted, also by another server; the
//! text of a custom tool follows its grammar.

use llmctl_serve::gate::owner::KeyLine;

use crate::common::prelude::*;
use crate::common::server::{NOISE, Reply, ask, both_kinds, request, whole};

const PATH: &str = "/v1/responses";

const CALL: &str =
    "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
const SPAWN: &str =
    "On it.<tool_call>\n{\"name\": \"agents__spawn\", \"arguments\": {\"n\": 1}}\n</tool_call>";
const PATCH: &str =
    "<tool_call>\n{\"name\": \"patch\", \"arguments\": {\"input\": \"+\\\"a\\\\b\\n\"}}\n</tool_call>";
const THOUGHT: &str = "Six times seven.\n</think>\n\nForty-two.";

fn build(store: Option<SessionStore>) -> Build {
    let answers = [
        ("weather", CALL),
        ("spawn", SPAWN),
        ("patch", PATCH),
        ("hi", "Hello there."),
        ("think", THOUGHT),
        ("ponder", "Six times seven."),
        ("one?", "uno"),
        ("two?", "dos"),
        ("three?", "tres"),
    ];
    // A request without a key is the local user's then, so that the test's store shows its sessions.
    let settings = ServeSettings { share_sessions: true, ..ServeSettings::default() };
    Build { template: Some(QWENISH.to_owned()), store, settings, ..Build::answers(&answers) }
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

async fn respond(server: &Server, input: &str, more: Value) -> Value {
    server.post(PATH, with(json!({"input": input}), more)).await.ok()
}

async fn get(server: &Server, id: &str) -> Reply {
    server.get(&format!("{PATH}/{id}")).await
}

async fn delete(server: &Server, id: &str) -> Reply {
    server.call(Method::DELETE, &format!("{PATH}/{id}"), &[], None).await
}

/// The events of a stream, each with its name and the next number.
#[track_caller]
fn events(reply: &Reply) -> Vec<Value> {
    assert_eq!(
        (reply.status.as_u16(), &reply.headers["content-type"]),
        (200, &"text/event-stream; charset=utf-8".parse().expect("a value"))
    );
    let blocks = reply.text.strip_suffix("\n\n").expect("every event is whole").split("\n\n");
    let read = |block: &str| -> Value {
        let (name, data) = block.split_once('\n').expect("two lines");
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(name.strip_prefix("event: "), event["type"].as_str());
        event
    };
    let events: Vec<Value> = blocks.filter(|block| !block.starts_with(':')).map(read).collect();
    let numbers = events.iter().map(|event| event["sequence_number"].as_u64().expect("a number"));
    assert!(numbers.eq(0..events.len() as u64), "{events:?}");
    events
}

fn kinds(events: &[Value]) -> Vec<&str> {
    let mut kinds: Vec<&str> =
        events.iter().filter_map(|event| event["type"].as_str()?.strip_prefix("response.")).collect();
    kinds.dedup();
    kinds
}

/// An object without what differs from response to response.
fn bare(mut response: Value) -> Value {
    let id = response["id"].as_str().expect("an id").to_owned();
    let text = response["output"].to_string().replace(&id, "ID");
    response["output"] = serde_json::from_str(&text).expect("JSON");
    for item in response["output"].as_array_mut().expect("items") {
        if item.get("call_id").is_some() {
            item["call_id"] = "CALL".into();
        }
    }
    for name in ["id", "created_at", "completed_at", "timings", "llmctl", "usage"] {
        response[name] = Value::Null;
    }
    response
}

fn cached(response: &Value) -> u64 {
    response["usage"]["input_tokens_details"]["cached_tokens"].as_u64().expect("a count")
}

fn total(response: &Value) -> u64 {
    response["usage"]["total_tokens"].as_u64().expect("a count")
}

fn text(response: &Value) -> String {
    let items = response["output"].as_array().expect("items").iter();
    let parts = items.filter_map(|item| item["content"].as_array()).flatten();
    parts.filter(|part| part["type"] == "output_text").filter_map(|part| part["text"].as_str()).collect()
}

fn weather() -> Value {
    let parameters = json!({
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    });
    json!({"type": "function", "name": "get_weather", "description": "Weather", "parameters": parameters})
}

fn agents() -> Value {
    let spawn = json!({"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}});
    json!({"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [spawn]})
}

fn patch(syntax: &str, definition: &str) -> Value {
    let format = json!({"type": "grammar", "syntax": syntax, "definition": definition});
    json!({"type": "custom", "name": "patch", "description": "Edits files.", "format": format})
}

const LINES: &str = "start: line{1,3}\nline: \"+\" /[ab\"\\\\\\t]{0,4}/ LF -> added\n%import common.LF\n";

fn thinking() -> Value {
    json!({"chat_template_kwargs": {"enable_thinking": true}})
}

async fn a_stream_ends_with_the_whole_response() {
    let server = build(None).start();
    for (question, more) in [
        ("hi", json!({"metadata": {"a": "b"}, "temperature": 0.7, "seed": 1, "instructions": "Be brief."})),
        ("weather", json!({"tools": [weather()]})),
        ("spawn", json!({"tools": [agents(), {"type": "web_search"}]})),
        ("patch", json!({"tools": [patch("lark", LINES)]})),
        ("think", with(thinking(), json!({"include": ["reasoning.encrypted_content"]}))),
        ("hi", json!({"max_output_tokens": 3, "top_logprobs": 2})),
    ] {
        let body = with(json!({"input": question, "store": false}), more);
        let whole = server.post(PATH, body.clone()).await.ok();
        let events = events(&server.post(PATH, with(body, json!({"stream": true}))).await);
        let last = events.last().expect("events");
        let status = whole["status"].as_str().expect("a status");
        assert_eq!(last["type"], format!("response.{status}"), "{last}");
        assert_eq!(bare(last["response"].clone()), bare(whole.clone()), "{question}");
        assert_eq!(last["response"]["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
        let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
        let done: Vec<&Value> = done.map(|event| &event["item"]).collect();
        assert_eq!(json!(done), last["response"]["output"]);
    }
}

async fn an_answer_is_that_of_a_chat_completion() {
    let server = build(None).start();
    for (question, more) in [(NOISE, json!({"seed": 3, "temperature": 0.9})), ("think", thinking())] {
        let chat = server.chat(question, with(json!({"max_tokens": 40}), more.clone())).await.ok();
        let asked = with(json!({"max_output_tokens": 40, "store": false}), more);
        let response = respond(&server, question, asked).await;
        let message = &chat["choices"][0]["message"];
        assert_eq!(text(&response), message["content"].as_str().expect("text"));
        assert_eq!(response["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
        assert_eq!(response["usage"]["output_tokens"], chat["usage"]["completion_tokens"]);
        if question == "think" {
            assert_eq!(response["output"][0]["content"][0]["text"], message["reasoning_content"]);
        }
    }
}

async fn events_come_in_the_order_that_clients_need() {
    let server = build(None).start();
    let kinds_of = async |question: &str, more: Value| {
        let body = with(json!({"input": question, "stream": true}), more);
        kinds(&events(&server.post(PATH, body).await)).join(" ")
    };
    let message = "output_item.added content_part.added output_text.delta output_text.done content_part.done output_item.done";
    assert_eq!(kinds_of("hi", json!({})).await, format!("created in_progress {message} completed"));
    // The model ends in its reasoning: the message is empty, as in the whole answer.
    let pondered = kinds_of("ponder", thinking()).await;
    assert!(
        pondered
            .ends_with(&format!("output_item.done {} completed", message.replace("output_text.delta ", ""))),
        "{pondered}"
    );
    let call =
        "output_item.added function_call_arguments.delta function_call_arguments.done output_item.done";
    assert_eq!(
        kinds_of("spawn", json!({"tools": [agents()]})).await,
        format!("created in_progress {message} {call} completed")
    );
    let reasoning = "output_item.added content_part.added reasoning_text.delta reasoning_text.done content_part.done output_item.done";
    assert_eq!(
        kinds_of("think", thinking()).await,
        format!("created in_progress {reasoning} {message} completed")
    );
    let custom =
        "output_item.added custom_tool_call_input.delta custom_tool_call_input.done output_item.done";
    assert_eq!(
        kinds_of("patch", json!({"tools": [patch("lark", LINES)]})).await,
        format!("created in_progress {custom} completed")
    );
}

async fn a_response_has_all_members() {
    let server = build(None).start();
    let response =
        respond(&server, "hi", json!({"tools": [weather()], "reasoning": {"summary": "auto"}})).await;
    for name in listed::<&str>("serve_responses", "a_response_has_all_members") {
        assert!(response.get(name).is_some(), "{name}: {response}");
    }
    assert_eq!((&response["object"], &response["status"]), (&json!("response"), &json!("completed")));
    assert_eq!((&response["model"], &response["store"]), (&json!("org/toy"), &json!(true)));
    assert_eq!(response["tools"][0].get("strict"), Some(&Value::Null));
}

async fn a_response_is_a_point_in_a_session() {
    let (_folder, store, server) = on_disk(build);
    let first = respond(&server, "one?", json!({})).await;
    assert_eq!(text(&first), "uno");
    let previous = json!({"previous_response_id": first["id"]});
    let second = respond(&server, "two?", previous.clone()).await;
    assert_eq!((text(&second), &second["previous_response_id"]), ("dos".to_owned(), &first["id"]));
    assert_eq!(
        second["usage"]["input_tokens_details"]["cached_tokens"], first["usage"]["total_tokens"],
        "warm"
    );
    assert_eq!(second["timings"]["resume_reason"], "exact_prefix");
    let stored = get(&server, second["id"].as_str().expect("an id")).await.ok();
    assert_eq!(bare(stored.clone()), bare(second.clone()));
    assert_eq!(stored["usage"], second["usage"]);
    let session =
        SessionName::new(second["llmctl"]["session_id"].as_str().expect("a session")).expect("a name");
    assert_eq!(store.read(&session).expect("on disk").turns.len(), 2);

    let fork = respond(&server, "three?", previous).await;
    assert_eq!((text(&fork), &fork["llmctl"]["branch_is_new"]), ("tres".to_owned(), &json!(true)));
    assert!(cached(&fork) >= total(&first), "warm");
    assert_eq!(store.read(&session).expect("as it was").turns.len(), 2);
    for (previous, messages) in [(&fork, 6), (&second, 6)] {
        let next = respond(&server, "hi", json!({"previous_response_id": previous["id"]})).await;
        assert_eq!(next["timings"]["resume_reason"], "exact_prefix");
        let placed = &next["llmctl"];
        let name = placed["branch"].as_str().or(placed["session_id"].as_str()).expect("a name");
        let saved = store.read(&SessionName::new(name).expect("a name")).expect("on disk");
        assert_eq!(saved.messages().count(), messages);
    }

    drop(server);
    let server = build(Some(store.clone())).start();
    assert_eq!(get(&server, first["id"].as_str().expect("an id")).await.ok()["id"], first["id"]);
    let third = respond(&server, "three?", json!({"previous_response_id": second["id"]})).await;
    assert_eq!(text(&third), "tres");
    assert_eq!(third["llmctl"]["kept_turns"], 2);
}

async fn instructions_hold_for_one_response() {
    let (_folder, store, server) = on_disk(build);
    let first = respond(&server, "one?", json!({"instructions": "Be brief."})).await;
    let next = |instructions: Value| {
        let body = json!({"instructions": instructions, "previous_response_id": first["id"]});
        respond(&server, "two?", body)
    };
    let messages = |response: &Value| {
        let placed = &response["llmctl"];
        let name = placed["branch"].as_str().or(placed["session_id"].as_str()).expect("a name");
        let saved = store.read(&SessionName::new(name).expect("a name")).expect("on disk");
        saved.messages().map(|message| message.role.as_str().to_owned()).collect::<Vec<_>>().join(" ")
    };
    let without = next(Value::Null).await;
    assert_eq!(messages(&without), "user assistant user assistant");
    let with_others = next("Be long.".into()).await;
    assert_eq!(messages(&with_others), "system user assistant user assistant");
    let same = next("Be brief.".into()).await;
    assert_eq!((messages(&same), &same["llmctl"]["branch"]), (messages(&with_others), &Value::Null));
}

async fn deleting_a_response_erases_no_other() {
    let (_folder, store, server) = on_disk(build);
    let first = respond(&server, "one?", json!({})).await;
    let second = respond(&server, "two?", json!({"previous_response_id": first["id"]})).await;
    let fork = respond(&server, "three?", json!({"previous_response_id": first["id"]})).await;
    let id = |response: &Value| response["id"].as_str().expect("an id").to_owned();
    let deleted = delete(&server, &id(&first)).await.ok();
    assert_eq!(deleted, json!({"id": id(&first), "object": "response", "deleted": true}));
    assert_eq!(get(&server, &id(&first)).await.error().0, 404);
    let body = json!({"input": "hi", "previous_response_id": first["id"]});
    assert_eq!(server.post(PATH, body).await.error().1, "previous_response_not_found");
    for later in [&second, &fork] {
        assert_eq!(get(&server, &id(later)).await.status, 200);
        let next = respond(&server, "hi", json!({"previous_response_id": later["id"]})).await;
        assert_eq!(text(&next), "Hello there.");
        delete(&server, &id(&next)).await.ok();
    }
    delete(&server, &id(&fork)).await.ok();
    assert_eq!(store.list().expect("a list").len(), 1, "the branch is gone with its last response");
    assert_eq!(get(&server, &id(&second)).await.status, 200);
    delete(&server, &id(&second)).await.ok();
    assert!(store.list().expect("a list").is_empty(), "nothing is left");
    assert_eq!(
        delete(&server, &id(&second)).await.error(),
        (404, "response_not_found".to_owned(), "response_id".to_owned())
    );
}

async fn a_deleted_response_is_not_on_disk() {
    let (folder, _store, server) = on_disk(build);
    let first = respond(&server, "one?", json!({})).await;
    let second = respond(&server, "a secret", json!({"previous_response_id": first["id"]})).await;
    delete(&server, second["id"].as_str().expect("an id")).await.ok();
    let session =
        folder.path().join("sessions").join(first["llmctl"]["session_id"].as_str().expect("a session"));
    let transcript = std::fs::read_to_string(session.join("transcript.jsonl")).expect("there");
    assert!(transcript.contains("uno") && !transcript.contains("secret"), "{transcript}");
}

async fn what_is_not_stored_is_nowhere() {
    let (_folder, store, server) = on_disk(build);
    let body = json!({"input": "one?", "store": false, "prompt_cache_key": "codex-1"});
    let first = server.post(PATH, body).await.ok();
    assert_eq!((&first["store"], &first["prompt_cache_key"]), (&json!(false), &json!("codex-1")));
    assert!(store.list().expect("a list").is_empty());
    assert_eq!(get(&server, first["id"].as_str().expect("an id")).await.error().0, 404);
    let input =
        json!([{"role": "user", "content": "one?"}, first["output"][0], {"role": "user", "content": "two?"}]);
    let body = json!({"input": input, "store": false, "prompt_cache_key": "codex-1"});
    let second = server.post(PATH, body).await.ok();
    assert_eq!(second["usage"]["input_tokens_details"]["cached_tokens"], first["usage"]["total_tokens"]);
    assert_eq!(second["llmctl"]["transient"], true);
    let header = [("session-id", "thread-7")];
    let body = json!({"input": "one?", "store": false});
    let third = server.call(Method::POST, PATH, &header, Some(body)).await.ok();
    assert_eq!(third["llmctl"]["session_id"], "thread-7");
}

async fn unknown_responses_are_not_found() {
    let (_folder, _store, server) = on_disk(build);
    for id in ["resp_1", "resp_68af2b4ddc5c8199b6d1f0e2_a3c4d5e6a3c4d5e6", "../x"] {
        let body = json!({"input": "hi", "previous_response_id": id});
        let expected = (404, "previous_response_not_found".to_owned(), "previous_response_id".to_owned());
        assert_eq!(server.post(PATH, body).await.error(), expected);
    }
    let expected = (404, "item_not_found".to_owned(), "input[0].id".to_owned());
    for reference in [json!([{"type": "item_reference", "id": "msg_1"}]), json!([{"id": "msg_1"}])] {
        assert_eq!(server.post(PATH, json!({"input": reference})).await.error(), expected);
    }
    // Each would be read from disk.
    let many: Vec<Value> =
        (0..300).map(|n| json!({"type": "item_reference", "id": format!("msg_resp_{n}_0")})).collect();
    let expected = (400, "invalid_value".to_owned(), "input".to_owned());
    assert_eq!(server.post(PATH, json!({"input": many})).await.error(), expected);
}

async fn a_response_is_its_owners() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut build = build(Some(SessionStore::new(folder.path().join("sessions"))));
    build.settings = ServeSettings::default();
    let server = build.start();
    let by = async |who: &str, method: Method, path: &str, body: Option<Value>| {
        let mut request = request(method, path, &[], body);
        let line = KeyLine::parse(&format!("key-of-{who} owner={who}")).expect("a line").expect("a key");
        request.extensions_mut().insert(line.owner);
        whole(server.send(request).await).await
    };
    let first = by("anna", Method::POST, PATH, Some(json!({"input": "one?"}))).await.ok();
    let path = format!("{PATH}/{}", first["id"].as_str().expect("an id"));
    assert_eq!(by("anna", Method::GET, &path, None).await.status, 200);
    for method in [Method::GET, Method::DELETE] {
        assert_eq!(by("ben", method, &path, None).await.error().1, "response_not_found");
    }
    let body = json!({"input": "two?", "previous_response_id": first["id"]});
    let refused = by("ben", Method::POST, PATH, Some(body.clone())).await.error();
    assert_eq!(refused.1, "previous_response_not_found");
    let reference = json!({"input": [{"type": "item_reference", "id": first["output"][0]["id"]}]});
    assert_eq!(by("ben", Method::POST, PATH, Some(reference)).await.error().1, "item_not_found");
    assert_eq!(text(&by("anna", Method::POST, PATH, Some(body)).await.ok()), "dos");
}

async fn calls_and_their_results_come_back() {
    let (_folder, _store, server) = on_disk(build);
    for (question, tools, kind) in [
        ("weather", json!([weather()]), "function_call"),
        ("spawn", json!([agents()]), "function_call"),
        ("patch", json!([patch("lark", LINES)]), "custom_tool_call"),
    ] {
        let first =
            respond(&server, question, json!({"tools": tools, "store": false, "prompt_cache_key": question}))
                .await;
        let call = first["output"].as_array().and_then(|items| items.last()).expect("a call");
        assert_eq!(call["type"], kind);
        match question {
            "spawn" => assert_eq!((&call["name"], &call["namespace"]), (&json!("spawn"), &json!("agents"))),
            "patch" => assert_eq!(call["input"], "+\"a\\b\n"),
            _ => assert_eq!(call["arguments"], "{\"city\": \"Oslo\"}"),
        }
        let output = json!({"type": format!("{kind}_output"), "call_id": call["call_id"], "output": "done"});
        let mut input = vec![json!({"role": "user", "content": question})];
        input.extend(first["output"].as_array().expect("items").iter().cloned());
        input.push(output.clone());
        input.push(json!({"role": "user", "content": "hi"}));
        let body = json!({"input": input, "tools": tools, "store": false, "prompt_cache_key": question});
        let second = server.post(PATH, body).await.ok();
        assert_eq!(text(&second), "Hello there.");
        let cached = &second["usage"]["input_tokens_details"]["cached_tokens"];
        assert_eq!(*cached, first["usage"]["total_tokens"], "{question}: every token of the call is reused");

        let stored = respond(&server, question, json!({"tools": tools})).await;
        let call = stored["output"].as_array().and_then(|items| items.last()).expect("a call");
        let output = json!({"type": format!("{kind}_output"), "call_id": call["call_id"], "output": "done"});
        let input = json!([output, {"role": "user", "content": "hi"}]);
        let body = json!({"input": input, "tools": tools, "previous_response_id": stored["id"]});
        let next = server.post(PATH, body).await.ok();
        assert_eq!(next["usage"]["input_tokens"], second["usage"]["input_tokens"]);
        let reference = json!([
            {"role": "user", "content": question}, {"type": "item_reference", "id": call["id"]}, output,
        ]);
        assert_eq!(server.post(PATH, json!({"input": reference, "tools": tools})).await.status, 200);
    }
}

async fn reasoning_comes_back_as_text_or_sealed() {
    let server = build(None).start();
    let asked = with(
        thinking(),
        json!({"include": ["reasoning.encrypted_content"], "store": false, "prompt_cache_key": "t"}),
    );
    let first = respond(&server, "think", asked.clone()).await;
    let [reasoning, message] = &first["output"].as_array().expect("items")[..] else { panic!("{first}") };
    assert!(reasoning["encrypted_content"].is_string(), "{reasoning}");
    let mut sealed = reasoning.clone();
    sealed["content"] = Value::Null;
    let mut open = reasoning.clone();
    open["encrypted_content"] = Value::Null;
    for item in [&sealed, &open] {
        let input =
            json!([{"role": "user", "content": "think"}, item, message, {"role": "user", "content": "hi"}]);
        let next = server.post(PATH, with(asked.clone(), json!({"input": input}))).await.ok();
        assert!(cached(&next) >= total(&first), "the tokens of the answer are reused: {item}");
    }
    let plain = respond(&server, "think", thinking()).await;
    assert_eq!(plain["output"][0].get("encrypted_content"), Some(&Value::Null));
}

/// Whether a text follows [`LINES`].
fn is_lines(text: &str) -> bool {
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let is_line = |line: &&str| {
        let inside = line.strip_prefix('+').and_then(|rest| rest.strip_suffix('\n'));
        inside.is_some_and(|inside| {
            inside.chars().count() <= 4 && inside.chars().all(|c| "ab\"\\\t".contains(c))
        })
    };
    (1..=3).contains(&lines.len()) && lines.iter().all(is_line)
}

async fn the_text_of_a_custom_tool_follows_its_grammar() {
    for format in
        [ToolCallFormat::Hermes, ToolCallFormat::QwenXml, ToolCallFormat::Pythonic, ToolCallFormat::Gemma]
    {
        let mut build = build(None);
        build.settings.tool_format = Some(format);
        let server = build.start();
        for (syntax, definition) in [("lark", LINES), ("regex", "^(\\+[ab\"\\\\\\t]{0,4}\\n){1,3}$")] {
            for seed in 0..6 {
                let body = json!({
                    "tools": [patch(syntax, definition)], "tool_choice": {"type": "custom", "name": "patch"},
                    "temperature": 1.0, "seed": seed, "store": false,
                });
                let response = respond(&server, NOISE, body).await;
                let call = response["output"].as_array().and_then(|items| items.last()).expect("a call");
                assert_eq!(
                    (&response["status"], &call["type"]),
                    (&json!("completed"), &json!("custom_tool_call")),
                    "{response}"
                );
                let input = call["input"].as_str().expect("text");
                assert!(is_lines(input), "{format:?} {syntax}: {input:?}");
            }
        }
    }
}

async fn text_has_the_format_that_is_asked_for() {
    let server = build(None).start();
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]});
    let format = json!({"type": "json_schema", "name": "x", "schema": schema, "strict": true});
    let response = respond(&server, "hi", json!({"text": {"format": format, "verbosity": "low"}})).await;
    assert_eq!(response["text"]["format"], with(format, json!({"description": null})));
    let answer: Value = serde_json::from_str(&text(&response)).expect("JSON");
    assert!(answer["ok"].is_boolean(), "{answer}");
    let body = json!({"text": {"format": {"type": "json_object"}}, "max_output_tokens": 40});
    assert!(text(&respond(&server, "hi", body).await).starts_with('{'));
}

async fn what_is_cut_is_incomplete_and_what_is_too_long_fails() {
    let server = build(None).start();
    let cut = respond(&server, NOISE, json!({"max_output_tokens": 5, "seed": 1})).await;
    assert_eq!(cut["status"], "incomplete");
    assert_eq!(cut["incomplete_details"], json!({"reason": "max_output_tokens"}));
    let long = "x ".repeat(6000);
    let refused = server.post(PATH, json!({"input": long})).await.error();
    assert_eq!((refused.0, &*refused.1), (400, "context_length_exceeded"));
    let events = events(&server.post(PATH, json!({"input": long, "stream": true})).await);
    assert_eq!(kinds(&events), ["created", "in_progress", "failed"]);
    assert_eq!(events[2]["response"]["error"]["code"], "context_length_exceeded");
}

async fn input_tokens_are_those_of_the_prompt() {
    let server = build(None).start();
    let body = json!({"input": "hi", "instructions": "Be brief.", "tools": [weather()]});
    let count = server.post("/v1/responses/input_tokens", body.clone()).await.ok();
    let response = server.post(PATH, body).await.ok();
    assert_eq!(
        count,
        json!({"object": "response.input_tokens", "input_tokens": response["usage"]["input_tokens"]})
    );
}

async fn what_is_not_known_is_left_out_and_reported() {
    let (_folder, _store, server) = on_disk(build);
    let input = json!([{"type": "web_search_call", "id": "ws_1"}, {"role": "user", "content": "hi"}]);
    let tools = json!([weather(), {"type": "web_search"}, {"type": "mcp", "server_label": "x"}]);
    let body = json!({"input": input, "tools": tools, "truncation": "auto", "session_id": "s"});
    let reply = server.post(PATH, body).await;
    let ignored = reply.headers["x-llmctl-ignored"].to_str().expect("ASCII").to_owned();
    for name in ["input[].web_search_call", "tools[].web_search", "tools[].mcp", "truncation"] {
        assert!(ignored.contains(name), "{name}: {ignored}");
    }
    let response = reply.ok();
    assert!(response["id"].as_str().is_some_and(|id| id.starts_with("resp_s_")), "{response}");
    let explained = server.get("/v1/sessions/s/explain").await.ok();
    assert_eq!(explained["notices"].as_array().map(Vec::len), Some(3), "{explained}");
}

async fn what_is_not_done_is_refused_by_name() {
    let server = build(None).start();
    let image = json!({"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "x"}]});
    for (body, status, param) in [
        (json!({}), 422, "input"),
        (json!({"input": "hi", "background": true}), 400, "background"),
        (json!({"input": "hi", "conversation": "c"}), 400, "conversation"),
        (json!({"input": "hi", "prompt": {"id": "p"}}), 400, "prompt"),
        (json!({"input": "hi", "truncation": "some"}), 400, "truncation"),
        (json!({"input": "hi", "top_logprobs": 21}), 400, "top_logprobs"),
        (json!({"input": "hi", "no_such_field": 1}), 400, "no_such_field"),
        (json!({"input": "hi", "text": {"format": {"type": "xml"}}}), 400, "text.format.type"),
        (json!({"input": "hi", "store": false, "session_id": "s"}), 400, "session_id"),
        (json!({"input": [image]}), 400, "input[0].content[1].image_url"),
        (json!({"input": "hi", "tools": [patch("lark", "start: ~/a/")]}), 400, "tools"),
    ] {
        let refused = server.post(PATH, body.clone()).await.error();
        assert_eq!((refused.0, &*refused.2), (status, param), "{body}");
        let streamed = server.post(PATH, with(body, json!({"stream": true}))).await.error();
        assert_eq!(streamed, refused, "before the first byte");
    }
    let turned_off = ask("hi", json!({}));
    assert_eq!(server.post(PATH, turned_off).await.error().2, "input", "messages are not input");
}

both_kinds! {
    a_stream_ends_with_the_whole_response,
    an_answer_is_that_of_a_chat_completion,
    events_come_in_the_order_that_clients_need,
    a_response_has_all_members,
    a_response_is_a_point_in_a_session,
    instructions_hold_for_one_response,
    deleting_a_response_erases_no_other,
    a_deleted_response_is_not_on_disk,
    what_is_not_stored_is_nowhere,
    unknown_responses_are_not_found,
    a_response_is_its_owners,
    calls_and_their_results_come_back,
    reasoning_comes_back_as_text_or_sealed,
    the_text_of_a_custom_tool_follows_its_grammar,
    text_has_the_format_that_is_asked_for,
    what_is_cut_is_incomplete_and_what_is_too_long_fails,
    input_tokens_are_those_of_the_prompt,
    what_is_not_known_is_left_out_and_reported,
    what_is_not_done_is_refused_by_name,
}
