//! Promise: `/v1/messages` takes Anthropic's requests and answers in Anthropic's form, streamed and whole alike, with the bits
//! of a chat completion; what it leaves out or moves is reported, what it cannot honour is refused by its place.

use futures_util::StreamExt;

use crate::common::prelude::*;
use crate::common::server::{MODEL, NOISE, Reply, both_kinds, pieces, request};

const PATH: &str = "/v1/messages";
const CALL: &str =
    "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";

fn build() -> Build {
    let two = format!("{CALL}\n{}", CALL.replace("Oslo", "Rome"));
    let said = format!("Let me see.\n{CALL}");
    let thought = format!("Oslo it is.\n</think>\n\n{CALL}");
    let answers = [
        ("hi", "Hello there."),
        ("weather", CALL),
        ("two", &two),
        ("say and call", &said),
        ("think", "Six times seven.\n</think>\n\nForty-two."),
        ("think and call", &thought),
    ];
    Build { template: Some(QWENISH.to_owned()), ..Build::answers(&answers) }
}

fn with(mut body: Value, more: Value) -> Value {
    let (Value::Object(body_members), Value::Object(more)) = (&mut body, more) else { panic!("objects") };
    body_members.extend(more);
    body
}

fn ask(question: &str, more: Value) -> Value {
    with(json!({"max_tokens": 400, "messages": [{"role": "user", "content": question}]}), more)
}

fn tools() -> Value {
    let schema =
        json!({"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]});
    json!({"tools": [{"name": "get_weather", "description": "Weather of a city", "input_schema": schema}]})
}

fn thinking() -> Value {
    with(tools(), json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}))
}

/// The events of a stream, each under the name that its object has.
#[track_caller]
fn events(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.text);
    let mut blocks: Vec<&str> = reply.text.split("\n\n").collect();
    assert_eq!(blocks.pop(), Some(""), "every event is whole");
    let event = |block: &str| -> Value {
        let (name, data) = block.split_once('\n').expect("two lines");
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(name, format!("event: {}", data["type"].as_str().expect("a type")));
        data
    };
    blocks.into_iter().map(event).filter(|event| event["type"] != "ping").collect()
}

/// The message that a client puts together, which checks that blocks follow each other.
#[track_caller]
fn accumulated(events: &[Value]) -> Value {
    let mut message = events[0]["message"].clone();
    assert_eq!(events[0]["type"], "message_start");
    assert_eq!((&message["content"], &message["stop_reason"]), (&json!([]), &Value::Null));
    let mut open: Option<(Value, String)> = None;
    for event in &events[1..] {
        let blocks = message["content"].as_array_mut().expect("a list");
        match event["type"].as_str().expect("a type") {
            "content_block_start" => {
                assert!(open.is_none() && event["index"] == blocks.len(), "{event}");
                open = Some((event["content_block"].clone(), String::new()));
            }
            "content_block_delta" => {
                assert_eq!(event["index"], blocks.len());
                let (block, input) = open.as_mut().expect("a block is open");
                let delta = &event["delta"];
                let text = |name: &str| delta[name].as_str().expect("text").to_owned();
                let kind = match delta["type"].as_str().expect("a type") {
                    "text_delta" => "text",
                    "thinking_delta" => "thinking",
                    "signature_delta" => "signature",
                    "input_json_delta" => {
                        input.push_str(&text("partial_json"));
                        continue;
                    }
                    other => panic!("{other}"),
                };
                block[kind] = format!("{}{}", block[kind].as_str().expect("text"), text(kind)).into();
            }
            "content_block_stop" => {
                let (mut block, input) = open.take().expect("a block is open");
                if !input.is_empty() {
                    block["input"] = serde_json::from_str(&input).expect("JSON");
                }
                assert_eq!(event["index"], blocks.len());
                blocks.push(block);
            }
            "message_delta" => {
                for (name, value) in event["delta"].as_object().expect("an object") {
                    message[name] = value.clone();
                }
                message["usage"] = event["usage"].clone();
            }
            "message_stop" => assert!(open.is_none()),
            other => panic!("{other}"),
        }
    }
    assert_eq!(events[events.len() - 1]["type"], "message_stop");
    assert_eq!(events[events.len() - 2]["type"], "message_delta");
    message
}

/// A message without its ids and what depends on earlier requests.
fn comparable(mut message: Value) -> Value {
    message["id"] = Value::Null;
    for name in ["input_tokens", "cache_read_input_tokens"] {
        message["usage"][name] = Value::Null;
    }
    for block in message["content"].as_array_mut().expect("a list") {
        if block["type"] == "tool_use" {
            block["id"] = Value::Null;
        }
    }
    message
}

fn kinds(message: &Value) -> Vec<&str> {
    let blocks = message["content"].as_array().expect("a list").iter();
    blocks.map(|block| block["type"].as_str().expect("a type")).collect()
}

async fn a_stream_says_what_the_whole_answer_says() {
    let server = build().start();
    for (question, more, expected, reason) in [
        ("hi", json!({}), &["text"][..], "end_turn"),
        ("weather", tools(), &["tool_use"], "tool_use"),
        ("two", tools(), &["tool_use", "tool_use"], "tool_use"),
        ("say and call", tools(), &["text", "tool_use"], "tool_use"),
        ("think", thinking(), &["thinking", "text"], "end_turn"),
        ("think and call", thinking(), &["thinking", "tool_use"], "tool_use"),
    ] {
        let whole = server.post(PATH, ask(question, more.clone())).await.ok();
        let streamed = server.post(PATH, ask(question, with(more, json!({"stream": true})))).await;
        let streamed = accumulated(&events(&streamed));
        assert_eq!(kinds(&whole), expected, "{whole}");
        assert_eq!(whole["stop_reason"], reason);
        assert_eq!(comparable(streamed), comparable(whole));
    }
    let thought = server.post(PATH, ask("think", thinking())).await.ok();
    let block = &thought["content"][0];
    assert_eq!(block["thinking"].as_str().map(str::trim), Some("Six times seven."));
    assert!(block["signature"].as_str().is_some_and(|signature| signature.len() > 20), "{block}");
    assert!(thought["usage"]["output_tokens_details"]["thinking_tokens"].as_u64() > Some(0));
    let omitted = json!({"thinking": {"type": "enabled", "display": "omitted"}});
    let hidden = server.post(PATH, ask("think", omitted.clone())).await.ok();
    assert_eq!(
        hidden["content"][0],
        json!({"type": "thinking", "thinking": "", "signature": block["signature"]})
    );
    let streamed = server.post(PATH, ask("think", with(omitted, json!({"stream": true})))).await;
    assert_eq!(comparable(accumulated(&events(&streamed))), comparable(hidden));
}

/// The letters depend on every token of the prompt.
async fn the_same_conversation_gives_the_bits_of_a_chat_completion() {
    let server = Build { template: Some(CHATML.to_owned()), ..build() }.start();
    let messages = [
        json!({"role": "user", "content": "hi"}),
        json!({"role": "assistant", "content": "Hello there."}),
        json!({"role": "user", "content": FREE}),
    ];
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let common = json!({"max_tokens": 20, "temperature": 1});
    let theirs = with(
        common.clone(),
        json!({
            "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
            "messages": messages,
            "tools": [{"name": "f", "description": "d", "input_schema": parameters}], "tool_choice": {"type": "none"},
        }),
    );
    let mut system = vec![json!({"role": "system", "content": "Be brief.\nBe kind."})];
    system.extend(messages);
    let tool =
        json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}});
    let ours = with(common, json!({"messages": system, "seed": 7, "tools": [tool], "tool_choice": "none"}));
    let chat = server.post("/v1/chat/completions", ours).await.ok();
    let message = server.post(PATH, with(theirs.clone(), json!({"seed": 7}))).await.ok();
    let text = chat["choices"][0]["message"]["content"].as_str().expect("text");
    assert!(text.len() > 15);
    assert_eq!(message["content"][0]["text"], text);
    let usage = &message["usage"];
    let prompt = usage["input_tokens"].as_u64().expect("a count")
        + usage["cache_read_input_tokens"].as_u64().expect("a count");
    assert_eq!(chat["usage"]["prompt_tokens"], prompt);
    let ours = with(
        theirs.clone(),
        json!({"seed": 1, "min_p": 0.1, "session_id": "s", "lora": [], "loop_guard": true}),
    );
    let counted = server.post("/v1/messages/count_tokens", ours).await;
    assert_eq!(ignored(&counted), "loop_guard, lora, max_tokens, min_p, seed, session_id, temperature");
    let counted = server.post("/v1/messages/count_tokens", theirs).await;
    assert_eq!(ignored(&counted), "max_tokens, temperature");
    assert_eq!(counted.ok(), json!({"input_tokens": prompt}));
}

async fn a_second_turn_reuses_the_first() {
    let server = build().start();
    let headers = [("x-claude-code-session-id", "claude")];
    let send = async |body: Value| server.call(Method::POST, PATH, &headers, Some(body)).await;
    let first = send(ask("think and call", thinking())).await.ok();
    let id = &first["content"][1]["id"];
    let result =
        json!({"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": "Rain."}]});
    let more = json!([
        {"role": "user", "content": "think and call"},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "hi"}]},
    ]);
    let second = send(ask("", with(thinking(), json!({"messages": more})))).await;
    assert_eq!(ignored(&second), "");
    let second = second.ok();
    let usage = |reply: &Value, name: &str| reply["usage"][name].as_u64().expect("a count");
    // The toy's template begins each answer with a thought; what it says then ends it.
    let first_tokens = usage(&first, "input_tokens") + usage(&first, "output_tokens");
    let reused = usage(&second, "cache_read_input_tokens");
    assert!(reused + 2 >= first_tokens, "{reused} of {first_tokens}: {second}");
    assert!(usage(&second, "input_tokens") > 0 && usage(&first, "cache_read_input_tokens") == 0);
    let explained = server.get("/v1/sessions/claude/explain?transient=true").await.ok();
    assert_eq!(explained["last_resume"]["reason"], "exact_prefix", "{explained}");
    // The same conversation in a stream, from a client that has kept no thoughts.
    let forgotten = json!([
        {"role": "user", "content": "think and call"},
        {"role": "assistant", "content": [first["content"][1]]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "Rain."}, {"type": "text", "text": "hi"}]},
    ]);
    let body = ask("", with(thinking(), json!({"messages": forgotten, "stream": true})));
    let third = accumulated(&events(&send(body).await));
    assert!(usage(&third, "cache_read_input_tokens") >= reused, "{third}");
}

/// The toy answers what stands in the last question, which this template puts the thoughts of before into.
async fn thoughts_that_come_back_are_shown_where_the_template_shows_them() {
    let shows = CHATML.replace(
        "{{ m.content }}",
        "{{ m.content }}{% if loop.last %}{% for b in messages %}{{ b.reasoning_content or '' }}{% endfor %}{% endif %}",
    );
    let server = Build { template: Some(shows), ..build() }.start();
    let thought = json!([
        {"type": "thinking", "thinking": "[hm]", "signature": "of another server"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Hello."},
    ]);
    let messages = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": thought},
        {"role": "user", "content": "well? "},
    ]);
    let reply = server.post(PATH, json!({"max_tokens": 50, "messages": messages})).await;
    assert_eq!(ignored(&reply), "messages[].content[].redacted_thinking");
    assert_eq!(reply.ok()["content"][0]["text"], "echo: well? [hm]");
}

async fn later_system_messages_are_folded_and_reported() {
    let strict = CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first only') }}{% endif %}",
    );
    let server = Build { template: Some(strict), ..build() }.start();
    let body = json!({
        "max_tokens": 50,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be kind."}],
        "messages": [{"role": "user", "content": "one"}, {"role": "system", "content": "two"}],
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
    });
    let headers = [("x-session-affinity", "s")];
    let reply = server.call(Method::POST, PATH, &headers, Some(body.clone())).await;
    assert_eq!(ignored(&reply), "tools.web_search_20250305");
    assert_eq!(reply.ok()["content"][0]["text"], "echo: one\n\ntwo");
    let notices = server.get("/v1/sessions/s/explain").await.ok()["notices"].clone();
    let notices: Vec<&str> = notices.as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    for (notice, expected) in notices.iter().zip(["billing", "web_search", "1 system message is put"]) {
        assert!(notice.contains(expected), "{notices:?}");
    }
    assert_eq!(notices.len(), 3, "{notices:?}");
    // A bill that differs makes no other prompt.
    let count = async |bill: &str| {
        let mut body = body.clone();
        body["system"][0]["text"] = format!("x-anthropic-billing-header: cch={bill};").into();
        server.post("/v1/messages/count_tokens", body).await.ok()["input_tokens"].clone()
    };
    assert_eq!(count("1").await, count("a longer one").await);
    let chat =
        json!({"messages": [{"role": "user", "content": "one"}, {"role": "system", "content": "two"}]});
    let chat = server.post("/v1/chat/completions", chat).await.ok();
    assert_eq!(
        chat["choices"][0]["message"]["content"], "echo: one\n\ntwo",
        "chat completions fold them too"
    );
}

async fn an_answer_says_why_it_ended() {
    let server = Build { context_length: 300, ..build() }.start();
    let ended = async |question: &str, more: Value| {
        let reply = server.post(PATH, ask(question, more)).await.ok();
        (reply["stop_reason"].as_str().expect("a word").to_owned(), reply["stop_sequence"].clone())
    };
    assert_eq!(ended("hi", json!({"max_tokens": 1_000_000})).await, ("end_turn".to_owned(), Value::Null));
    assert_eq!(ended("hi", json!({"max_tokens": 1})).await.0, "max_tokens");
    assert_eq!(
        ended("hi", json!({"stop_sequences": ["nothing", "there"]})).await,
        ("stop_sequence".to_owned(), json!("there"))
    );
    let full = json!({"max_tokens": 1_000_000, "output_config": {"format": {"type": "json_schema",
        "schema": {"type": "object", "properties": {"x": {"type": "string", "minLength": 2000}}, "required": ["x"]}}}});
    assert_eq!(ended("hi", full).await.0, "model_context_window_exceeded");
}

async fn calls_are_made_as_the_choice_says() {
    let server = build().start();
    let noise = |choice: Value| {
        let sampling =
            json!({"temperature": 1, "seed": 3, "tool_choice": choice, "thinking": {"type": "disabled"}});
        ask(NOISE, with(tools(), sampling))
    };
    for choice in [json!({"type": "any"}), json!({"type": "tool", "name": "get_weather"})] {
        let choice = with(choice, json!({"disable_parallel_tool_use": true}));
        let reply = server.post(PATH, noise(choice)).await.ok();
        assert_eq!((kinds(&reply), &reply["stop_reason"]), (vec!["tool_use"], &json!("tool_use")), "{reply}");
        assert!(reply["content"][0]["input"]["city"].is_string(), "{reply}");
    }
    let none = json!({"tool_choice": {"type": "none"}, "max_tokens": 9});
    let text = server.post(PATH, ask("weather", with(tools(), none))).await.ok();
    assert!(!text.to_string().contains("tool_use") && !text.to_string().contains("<tool_call>"), "{text}");
    let one = with(tools(), json!({"tool_choice": {"type": "auto", "disable_parallel_tool_use": true}}));
    assert_eq!(kinds(&server.post(PATH, ask("two", one)).await.ok()), ["tool_use"]);
}

async fn a_format_is_enforced_and_an_effort_heard() {
    let server = build().start();
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]});
    let format = json!({"type": "json_schema", "schema": schema});
    for more in [json!({"output_config": {"format": format}}), json!({"output_format": format})] {
        let more = with(more, json!({"temperature": 1, "seed": 1, "thinking": {"type": "disabled"}}));
        let reply = server.post(PATH, ask(NOISE, more)).await.ok();
        let text = reply["content"][0]["text"].as_str().expect("text");
        let value: Value = serde_json::from_str(text).expect("JSON");
        assert!(value["ok"].is_boolean() && value.as_object().map(Map::len) == Some(1), "{text}");
    }
    // The template knows no efforts, but a switch, which an effort turns on.
    let thinks = server.post(PATH, ask("think", json!({"output_config": {"effort": "high"}}))).await;
    assert_eq!((ignored(&thinks), kinds(&thinks.json())), ("", vec!["thinking", "text"]));
    let plain = Build { template: Some(CHATML.replace("enable_thinking", "x")), ..build() }.start();
    let body =
        json!({"output_config": {"effort": "max"}, "thinking": {"type": "enabled", "budget_tokens": 2048}});
    // The budget holds without a switch: it ends what the markup lets it end.
    assert_eq!(ignored(&plain.post(PATH, ask("hi", body)).await), "output_config.effort, thinking");
}

async fn an_answer_that_is_begun_is_continued_and_not_repeated() {
    let server = build().start();
    let begun =
        json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]});
    let body = with(json!({"max_tokens": 50}), begun);
    let whole = server.post(PATH, body.clone()).await.ok();
    assert_eq!(whole["content"], json!([{"type": "text", "text": " there."}]));
    let streamed = server.post(PATH, with(body.clone(), json!({"stream": true}))).await;
    assert_eq!(comparable(accumulated(&events(&streamed))), comparable(whole.clone()));
    let counted = server.post("/v1/messages/count_tokens", body.clone()).await.ok();
    let usage = |name: &str| whole["usage"][name].as_u64().expect("a count");
    assert_eq!(counted["input_tokens"], usage("input_tokens") + usage("cache_read_input_tokens"));
    let format = json!({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}});
    assert_eq!(server.post(PATH, with(body, format)).await.error().2, "messages");
}

async fn hints_are_taken_and_reported() {
    let server = build().start();
    let body = json!({
        "model": MODEL,
        "metadata": {"user_id": "u"}, "service_tier": "auto", "container": null, "inference_geo": "eu",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "adaptive"}, "betas": ["x"], "cache_control": {"type": "ephemeral"},
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}],
    });
    let reply = server.post(PATH, body).await;
    assert_eq!(
        ignored(&reply),
        "betas, cache_control, context_management, inference_geo, messages[].content[].cache_control, metadata, \
         service_tier, system[].cache_control"
    );
    assert_eq!(reply.ok()["model"], MODEL);
}

async fn malformed_items_are_named_by_their_place() {
    let server = build().start();
    let user = |content: Value| json!({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": content}]});
    // Bodies, the content of a second message, and more fields of a question.
    for (kind, value, expected, place) in listed::<(&str, Value, u16, &str)>("http_refusals", "messages") {
        let body = match kind {
            "user" => user(value),
            "ask" => ask("x", value),
            _ => value,
        };
        let (status, _, param) = server.post(PATH, body.clone()).await.error();
        assert_eq!((status, param.as_str()), (expected, place), "{body}");
    }
    let dropped = json!([{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, {"type": "text", "text": "a"}]);
    let body = json!({"messages": [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": dropped}, {"role": "user", "content": "hi"},
    ]});
    let reply = server.post(PATH, body).await;
    assert_eq!(ignored(&reply), "messages[].content[].server_tool_use");
    assert_eq!(reply.ok()["content"][0]["text"], "Hello there.");
}

async fn a_silent_stream_pings_and_a_broken_one_says_so() {
    let server = build().start();
    server.gate.close_after(1); // the prompt with its first token
    let body = ask("hi", json!({"stream": true}));
    let headers = [("x-request-id", "mine")];
    let response = server.send(request(Method::POST, PATH, &headers, Some(body))).await;
    let mut stream = pieces(response);
    let mut text = String::new();
    while !text.contains("event: ping\ndata: {\"type\":\"ping\"}\n\n") {
        let piece = stream.next().await.unwrap_or_else(|| panic!("no ping in {text}"));
        text.push_str(std::str::from_utf8(&piece).expect("UTF-8"));
    }
    assert!(text.starts_with("event: message_start\n"), "{text}");
    server.gate.fail_after(1, Error::Backend("a bug".to_owned()));
    server.gate.open();
    let mut rest = String::new();
    while let Some(piece) = stream.next().await {
        rest.push_str(std::str::from_utf8(&piece).expect("UTF-8"));
    }
    let last = rest.trim_end().rsplit("\n\n").next().expect("an event");
    let data = last.strip_prefix("event: error\ndata: ").unwrap_or_else(|| panic!("{rest}"));
    let error: Value = serde_json::from_str(data).expect("JSON");
    assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("api_error")));
    assert_eq!(error["request_id"], "mine");
}

async fn models_are_listed_in_the_form_of_the_client() {
    let server = build().start();
    let headers = [("anthropic-version", "2023-06-01")];
    let list = server.call(Method::GET, "/v1/models", &headers, None).await.ok();
    let model = &list["data"][0];
    assert_eq!(
        (&model["type"], &model["id"], &model["display_name"]),
        (&json!("model"), &json!(MODEL), &json!(MODEL))
    );
    assert_eq!(
        (&model["created_at"], &model["max_input_tokens"]),
        (&json!("2023-11-14T22:13:20Z"), &json!(4096))
    );
    assert_eq!(
        (&list["has_more"], &list["first_id"], &list["last_id"]),
        (&json!(false), &json!(MODEL), &json!(MODEL))
    );
    let one = server.call(Method::GET, &format!("/v1/models/{MODEL}"), &headers, None).await.ok();
    assert_eq!(one, *model);
    assert_eq!(server.get("/v1/models").await.ok()["object"], "list");
}

both_kinds! {
    a_stream_says_what_the_whole_answer_says,
    the_same_conversation_gives_the_bits_of_a_chat_completion,
    a_second_turn_reuses_the_first,
    thoughts_that_come_back_are_shown_where_the_template_shows_them,
    later_system_messages_are_folded_and_reported,
    an_answer_says_why_it_ended,
    calls_are_made_as_the_choice_says,
    a_format_is_enforced_and_an_effort_heard,
    an_answer_that_is_begun_is_continued_and_not_repeated,
    hints_are_taken_and_reported,
    malformed_items_are_named_by_their_place,
    a_silent_stream_pings_and_a_broken_one_says_so,
    models_are_listed_in_the_form_of_the_client,
}
