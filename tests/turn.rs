//! Promise: the same generated tokens give the same content, reasoning and tool calls in every frontend, and a session that was
//! started in one frontend continues warm in any other.
//!
//! The model is `common::scripted`: the last message decides what is generated.

#![cfg(unix)]

use crate::common::prelude::*;
use crate::common::scripted::{self, NUM_THOUGHTS, PLAIN, THOUGHT};
use crate::serve_ops::binary::{Serving, start_as_told};
use crate::serve_ops::client::ask;

/// The parts of an answer. A call is its tool and its arguments.
#[derive(Debug, Clone, Default, PartialEq)]
struct Parts {
    content: String,
    reasoning: String,
    calls: Vec<(String, Value)>,
    finish_reason: String,
}

/// Tokens of a page of KV.
const PAGE_TOKENS: u64 = 32;

/// Members in alphabetical order, as TOML gives them, so that all frontends render the same prompt.
const TOOLS: &str = r#"[{"type": "function", "function": {"name": "now", "description": "The time",
    "parameters": {"properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"], "type": "object"}}}]"#;

const TOOLS_TOML: &str = "[[tool]]\nname = \"now\"\ndescription = \"The time\"\nargv = [\"true\", \"{zone}\"]\n\
    [tool.parameters]\nproperties = { zone = { enum = [\"UTC\"] } }\nrequired = [\"zone\"]\ntype = \"object\"\n";

/// Messages, and the answers that the scripted model gives.
fn table() -> Vec<(&'static str, Parts)> {
    let thoughts: Vec<String> = (1..=NUM_THOUGHTS).map(|n| format!("w{n}")).collect();
    let considered = Parts {
        content: THOUGHT.to_owned(),
        reasoning: thoughts.join(" "),
        finish_reason: "stop".to_owned(),
        ..Parts::default()
    };
    let call = Parts {
        calls: vec![("now".to_owned(), json!({"zone": "UTC"}))],
        finish_reason: "tool_calls".to_owned(),
        ..Parts::default()
    };
    let plain = Parts { content: PLAIN.to_owned(), finish_reason: "stop".to_owned(), ..Parts::default() };
    // The template itself opens the reasoning of the third.
    vec![
        ("hello", plain),
        ("please think", considered.clone()),
        ("opened", considered),
        ("use the tool", call),
    ]
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().trim().to_owned()
}

/// The calls of a list in OpenAI's form.
fn calls(list: &Value) -> Vec<(String, Value)> {
    let call = |call: &Value| {
        assert!(text(&call["id"]).starts_with("call_"), "{call}");
        let arguments = match &call["function"]["arguments"] {
            Value::String(text) => serde_json::from_str(text).expect("JSON"),
            arguments => arguments.clone(),
        };
        (text(&call["function"]["name"]), arguments)
    };
    list.as_array().into_iter().flatten().map(call).collect()
}

/// The parts of a chat message and its finish reason.
fn of_message(message: &Value, finish_reason: &Value) -> Parts {
    Parts {
        content: text(&message["content"]),
        reasoning: text(&message["reasoning_content"]),
        calls: calls(&message["tool_calls"]),
        finish_reason: text(finish_reason),
    }
}

fn place() -> Place {
    let place = Place::new();
    scripted::write(&place.path("model"));
    place.write("tools.json", TOOLS);
    place.write("tools.toml", TOOLS_TOML);
    place
}

fn run(place: &Place, more: &[&str]) -> String {
    let ran = place.run(&[&["run", "--model", "model", "--tools", "tools.json"], more].concat());
    ran.check(0, "").stdout.clone()
}

fn by_run(place: &Place, question: &str, more: &[&str]) -> Parts {
    let written = run(place, &[&["--output", "json", question], more].concat());
    let object: Value = serde_json::from_str(&written).expect("JSON");
    Parts {
        content: text(&object["text"]),
        reasoning: text(&object["reasoning"]),
        calls: calls(&object["tool_calls"]),
        finish_reason: text(&object["finish_reason"]),
    }
}

fn by_run_events(place: &Place, question: &str) -> Parts {
    let written = run(place, &["--output", "jsonl", question]);
    let events: Vec<Value> = written.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let joined = |field: &str| events.iter().filter_map(|event| event[field].as_str()).collect::<String>();
    let done = events.last().expect("events");
    Parts {
        content: joined("text").trim().to_owned(),
        reasoning: joined("reasoning").trim().to_owned(),
        calls: calls(&done["tool_calls"]),
        finish_reason: text(&done["finish_reason"]),
    }
}

fn by_batch(place: &Place, question: &str) -> Parts {
    let tools: Value = serde_json::from_str(TOOLS).expect("JSON");
    let body = json!({"messages": [{"role": "user", "content": question}], "tools": tools});
    let row = json!({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body});
    place.write("rows.jsonl", format!("{row}\n"));
    let ran = place.run(&["run", "--model", "model", "--batch", "rows.jsonl"]);
    let result: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    let choice = &result["response"]["body"]["choices"][0];
    of_message(&choice["message"], &choice["finish_reason"])
}

/// Says this in a chat, in a pipe.
fn chat(place: &Place, session: &str, question: &str) {
    let args = ["chat", "--model", "model", "--session", session, "--tools", "tools.toml"];
    finish(place.command(&args), &format!("{question}\n")).check(0, "");
}

/// The messages and the usage of each turn of a session.
fn turns(place: &Place, session: &str) -> Vec<Value> {
    let ran = place.run(&["sessions", "show", session, "--output", "json"]);
    let session: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    session["turns"].as_array().expect("turns").clone()
}

/// The stored answer of a session's first turn; where the reason of the end is not stored as such, `expected` has it.
fn stored(place: &Place, session: &str, expected: &Parts) -> Parts {
    let turns = turns(place, session);
    let messages = turns[0]["messages"].as_array().expect("messages");
    let answer = messages.iter().find(|message| message["role"] == "assistant").expect("an answer");
    of_message(answer, &expected.finish_reason.as_str().into())
}

fn body(question: &str, session: Option<&str>) -> Value {
    let tools: Value = serde_json::from_str(TOOLS).expect("JSON");
    let mut body = json!({"messages": [{"role": "user", "content": question}], "tools": tools});
    if let Some(session) = session {
        body["session_id"] = session.into();
        body["session_append"] = true.into();
    }
    body
}

fn post(address: SocketAddr, body: &Value) -> String {
    let head =
        format!("POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json");
    let reply = ask(address, &head, &body.to_string());
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.body
}

fn by_server(address: SocketAddr, question: &str) -> Parts {
    let whole: Value = serde_json::from_str(&post(address, &body(question, None))).expect("JSON");
    let choice = &whole["choices"][0];
    of_message(&choice["message"], &choice["finish_reason"])
}

fn by_stream(address: SocketAddr, question: &str) -> Parts {
    let mut body = body(question, None);
    body["stream"] = true.into();
    let (mut parts, mut arguments) = (Parts::default(), String::new());
    let stream = post(address, &body);
    let events = stream.lines().filter_map(|line| line.strip_prefix("data: "));
    for event in events.filter(|data| *data != "[DONE]") {
        let event: Value = serde_json::from_str(event).expect("JSON");
        let choice = &event["choices"][0];
        let delta = &choice["delta"];
        parts.content += delta["content"].as_str().unwrap_or_default();
        parts.reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            if let Some(name) = call["function"]["name"].as_str() {
                parts.calls.push((name.to_owned(), Value::Null));
            }
            arguments += call["function"]["arguments"].as_str().unwrap_or_default();
        }
        parts.finish_reason += choice["finish_reason"].as_str().unwrap_or_default();
    }
    if let Some((_, value)) = parts.calls.first_mut() {
        *value = serde_json::from_str(&arguments).expect("JSON");
    }
    parts.reasoning = parts.reasoning.trim().to_owned();
    parts
}

fn serve(place: Place) -> Serving {
    start_as_told(place, &["--model", "model", "--share-sessions"]).0
}

/// Ends the server, which saves its sessions.
fn stop(serving: Serving) -> Place {
    let Serving { mut child, place, .. } = serving;
    crate::serve_ops::binary::signal(&child, libc::SIGTERM);
    assert!(child.wait().expect("it ends").success());
    place
}

#[test]
fn every_frontend_gives_the_same_answer() {
    let mut place = place();
    for (at, (question, expected)) in table().iter().enumerate() {
        assert_eq!(&by_run(&place, question, &[]), expected, "run --output json");
        assert_eq!(&by_run_events(&place, question), expected, "run --output jsonl");
        assert_eq!(&by_batch(&place, question), expected, "a batch row");
        let (in_run, in_chat) = (format!("run-{at}"), format!("chat-{at}"));
        by_run(&place, question, &["--session", &in_run]);
        assert_eq!(&stored(&place, &in_run, expected), expected, "the turn of run");
        chat(&place, &in_chat, question);
        assert_eq!(&stored(&place, &in_chat, expected), expected, "the turn of chat");
    }
    let serving = serve(place);
    for (question, expected) in &table() {
        assert_eq!(&by_server(serving.address, question), expected, "a whole completion");
        assert_eq!(&by_stream(serving.address, question), expected, "a streamed completion");
        post(serving.address, &body(question, Some(&question.replace(' ', "-"))));
    }
    let whole: Value =
        serde_json::from_str(&post(serving.address, &body("please think", None))).expect("JSON");
    let count = &whole["usage"]["completion_tokens_details"]["reasoning_tokens"];
    assert_eq!(*count, NUM_THOUGHTS, "the markup is not counted, as chat does not count it");
    place = stop(serving);
    for (question, expected) in &table() {
        assert_eq!(&stored(&place, &question.replace(' ', "-"), expected), expected, "the turn of serve");
    }
}

/// Takes a turn of a session in a frontend.
fn take_turn(place: Place, frontend: &str, session: &str, question: &str) -> Place {
    match frontend {
        "run" => drop(by_run(&place, question, &["--session", session])),
        "chat" => chat(&place, session, question),
        _ => {
            let serving = serve(place);
            post(serving.address, &body(question, Some(session)));
            return stop(serving);
        }
    }
    place
}

#[test]
fn a_session_of_one_frontend_continues_warm_in_each_other() {
    let mut place = place();
    let frontends = ["run", "chat", "serve"];
    let answers = table();
    for first in frontends {
        for second in frontends {
            for (question, expected) in answers.iter().filter(|(question, _)| *question != "hello") {
                let session = format!("{first}-{second}-{}", question.replace(' ', "-"));
                place = take_turn(place, first, &session, question);
                let before = turns(&place, &session);
                place = take_turn(place, second, &session, "hello");
                let after = turns(&place, &session);
                assert_eq!(after.len(), before.len() + 1, "{session}");
                assert_eq!(after[0]["messages"], before[0]["messages"], "{session}");
                assert_eq!(&stored(&place, &session, expected), expected, "{session}");
                let usage = |turn: &Value, field: &str| turn["usage"][field].as_u64().expect("a count");
                let last = before.last().expect("a turn");
                let resident = usage(last, "prompt_tokens") + usage(last, "completion_tokens") - 1;
                let resident = resident / PAGE_TOKENS * PAGE_TOKENS; // the disk holds whole pages
                let cached = usage(after.last().expect("a turn"), "cached_tokens");
                assert!(cached >= resident, "{session}: {cached} of {resident} tokens are reused");
            }
        }
    }
}

#[test]
fn a_constrained_answer_leaves_room_for_reasoning() {
    let place = place();
    let schema = r#"{"const": "A"}"#;
    let thoughts = table().remove(2).1.reasoning;
    let ran = place.run(&["run", "--model", "model", "--schema", schema, "--output", "json", "opened"]);
    let object: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    assert_eq!((text(&object["text"]), text(&object["reasoning"])), ("\"A\"".to_owned(), thoughts.clone()));
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "A"}}});
    let row = json!({"messages": [{"role": "user", "content": "opened"}], "response_format": format});
    place.write("rows.jsonl", format!("{row}\n"));
    let ran = place.run(&["run", "--model", "model", "--batch", "rows.jsonl"]);
    let result: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    let message = &result["response"]["body"]["choices"][0]["message"];
    assert_eq!(
        (text(&message["content"]), text(&message["reasoning_content"])),
        ("\"A\"".to_owned(), thoughts)
    );
}

#[test]
fn a_constrained_answer_has_no_room_for_reasoning_that_is_off() {
    let place = place();
    let schema = r#"{"const": "A"}"#;
    let run = |more: &[&str]| {
        let args = ["run", "--model", "model", "--schema", schema, "--output", "json", "stubborn"];
        let object: Value =
            serde_json::from_str(&place.run(&[&args[..], more].concat()).check(0, "").stdout).expect("JSON");
        (text(&object["text"]), text(&object["reasoning"]))
    };
    let (answer, thoughts) = run(&[]);
    assert!(answer == "\"A\"" && !thoughts.is_empty(), "{answer}, {thoughts}");
    assert_eq!(run(&["--think", "off"]), ("\"A\"".to_owned(), String::new()));
    assert_eq!(run(&["--think", "off", "--session", "s"]), ("\"A\"".to_owned(), String::new()));
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "A"}}});
    let kwargs = json!({"enable_thinking": false});
    let row = json!({"messages": [{"role": "user", "content": "stubborn"}], "response_format": format,
        "chat_template_kwargs": kwargs});
    place.write("rows.jsonl", format!("{row}\n"));
    let ran = place.run(&["run", "--model", "model", "--batch", "rows.jsonl"]);
    let result: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    let message = &result["response"]["body"]["choices"][0]["message"];
    assert_eq!(
        (text(&message["content"]), text(&message["reasoning_content"])),
        ("\"A\"".to_owned(), String::new())
    );
}

/// An answer whose reasoning was ended after five tokens.
fn ended() -> Parts {
    let reasoning = "w1 w2 w3 w4 w5".to_owned();
    Parts { content: PLAIN.to_owned(), reasoning, finish_reason: "stop".to_owned(), ..Parts::default() }
}

#[test]
fn a_budget_ends_reasoning_in_every_frontend() {
    let place = place();
    for question in ["please think", "opened"] {
        assert_eq!(by_run(&place, question, &["--think", "budget 5"]), ended(), "run, {question}");
    }
    let row = json!({"messages": [{"role": "user", "content": "please think"}], "thinking_budget": 5});
    place.write("rows.jsonl", format!("{row}\n"));
    let ran = place.run(&["run", "--model", "model", "--batch", "rows.jsonl"]);
    let result: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    let choice = &result["response"]["body"]["choices"][0];
    assert_eq!(of_message(&choice["message"], &choice["finish_reason"]), ended(), "a batch row");

    let serving = serve(place);
    let with = |question: &str, more: Value| {
        let mut body = body(question, None);
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let whole: Value = serde_json::from_str(&post(serving.address, &body)).expect("JSON");
        let choice = whole["choices"][0].clone();
        (of_message(&choice["message"], &choice["finish_reason"]), choice, whole["usage"].clone())
    };
    for field in [
        json!({"thinking_budget": 5}),
        json!({"thinking_token_budget": 5}),
        json!({"reasoning": {"max_tokens": 5}}),
        json!({"thinking": {"type": "enabled", "budget_tokens": 5}}),
    ] {
        assert_eq!(with("opened", field.clone()).0, ended(), "{field}");
        let (parts, _, usage) = with("please think", field.clone());
        assert_eq!(parts, ended(), "{field}");
        assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], 5, "{field}");
    }
    let (_, whole, _) = with("please think", json!({"thinking_budget": 5, "logprobs": true}));
    let logprobs = whole["logprobs"]["content"].as_array().expect("a list");
    let told: String = logprobs.iter().filter_map(|token| token["token"].as_str()).collect();
    assert_eq!(told, PLAIN, "tokens of the reasoning have none");
    assert!(logprobs.iter().all(|token| token["logprob"].is_number()));
    // Under a grammar, whose place for reasoning is used as far as the budget goes.
    let schema = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "A"}}});
    let (parts, ..) =
        with("please think", json!({"thinking_budget": 5, "tools": [], "response_format": schema}));
    assert_eq!((parts.content.as_str(), parts.reasoning), ("\"A\"", ended().reasoning));
    let (parts, ..) = with("please think", json!({"thinking_budget": 0}));
    assert_eq!((parts.content.as_str(), parts.reasoning.as_str()), (PLAIN, ""), "0 switches it off");
    let head =
        format!("POST /v1/messages HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json", serving.address);
    let body = json!({"max_tokens": 99, "messages": [{"role": "user", "content": "please think"}],
        "thinking": {"type": "enabled", "budget_tokens": 5}});
    let message = ask(serving.address, &head, &body.to_string()).json();
    assert_eq!(text(&message["content"][0]["thinking"]), ended().reasoning, "{message}");
    assert_eq!(text(&message["content"][1]["text"]), PLAIN);
    stop(serving);
}

#[test]
fn a_guard_ends_an_answer_that_repeats_itself_in_every_frontend() {
    let place = place();
    let expected = by_run(&place, "endless", &["--loop-guard", "16"]);
    assert_eq!(expected.finish_reason, "repetition");
    assert_eq!(expected.content.matches(scripted::ENDLESS.trim()).count(), 16, "{expected:?}");
    let unguarded = by_run(&place, "endless", &["--loop-guard", "off", "--max-tokens", "40"]);
    assert_eq!(unguarded.finish_reason, "length");
    let row = json!({"messages": [{"role": "user", "content": "endless"}], "loop_guard": 16});
    place.write("rows.jsonl", format!("{row}\n"));
    let ran = place.run(&["run", "--model", "model", "--batch", "rows.jsonl"]);
    let result: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    let choice = &result["response"]["body"]["choices"][0];
    assert_eq!(of_message(&choice["message"], &choice["finish_reason"]), expected, "a batch row");

    let serving = serve(place);
    let to = |path: &str, body: Value| {
        let address = serving.address;
        let head = format!("POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json");
        ask(address, &head, &body.to_string()).json()
    };
    let messages = json!([{"role": "user", "content": "endless"}]);
    for guard in [json!(16), json!("16")] {
        let body = json!({"messages": messages, "loop_guard": guard, "session_id": "s"});
        let reply = to("/v1/chat/completions", body);
        let choice = &reply["choices"][0];
        assert_eq!(of_message(&choice["message"], &choice["finish_reason"]), expected, "{guard}");
    }
    let message = to("/v1/messages", json!({"messages": messages, "loop_guard": 16, "max_tokens": 99}));
    assert_eq!(
        (&message["stop_reason"], text(&message["content"][0]["text"])),
        (&json!("max_tokens"), expected.content.clone())
    );
    let response = to("/v1/responses", json!({"input": "endless", "loop_guard": 16}));
    assert_eq!(response["incomplete_details"], json!({"reason": "repetition"}), "{response}");
    for wrong in [json!(15), json!("maybe"), json!({})] {
        let refused = to("/v1/chat/completions", json!({"messages": messages, "loop_guard": wrong}));
        assert_eq!(refused["error"]["param"], "loop_guard", "{refused}");
    }
    let place = stop(serving);
    let saved: Value =
        serde_json::from_str(&place.run(&["sessions", "show", "s", "--output", "json"]).check(0, "").stdout)
            .expect("JSON");
    assert_eq!(saved["turns"][0]["finish_reason"], "repetition", "{saved}");
}

#[test]
fn run_and_batch_switch_and_end_reasoning() {
    let place = place();
    let off = by_run(&place, "please think", &["--think", "off"]);
    assert_eq!((off.content.as_str(), off.reasoning.as_str()), (PLAIN, ""));
    let hidden = by_run(&place, "please think", &["--think", "hide"]);
    assert_eq!((hidden.content.as_str(), hidden.reasoning.as_str()), (THOUGHT, ""));
    let budget = by_run(&place, "please think", &["--think", "budget 5"]);
    assert_eq!((budget.content.as_str(), budget.reasoning.as_str()), (PLAIN, "w1 w2 w3 w4 w5"));
    let shown = place.run(&["run", "--model", "model", "please think"]);
    assert_eq!(shown.check(0, "").stdout, format!("{THOUGHT}\n"), "a pipe gets the answer alone");
    place.write("rows.jsonl", "{\"prompt\": \"please think\"}\n");
    let ran = place.run(&["run", "--model", "model", "--batch", "rows.jsonl", "--think", "off"]);
    assert!(ran.check(0, "").stdout.contains(PLAIN), "{ran:?}");
    place.run(&["run", "--model", "model", "--think", "maybe", "x"]).check(2, "--think: unknown value");
}
