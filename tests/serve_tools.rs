//! Promise: tool calls and reasoning come in OpenAI's shapes, streamed as they are made; what an answer must look like is
//! what it looks like.

use crate::common::prelude::*;
use crate::common::server::{NOISE, both_kinds, lines};

const CALL: &str =
    "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
const TWO: &str = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>\n\
                   <tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
const THOUGHT: &str =
    "Six times seven:\n{\"name\": \"get_weather\", \"arguments\": {}}\n</think>\n\nForty-two.";

fn server() -> Server {
    let answers = [
        ("weather", CALL),
        ("two", TWO),
        ("hi", "Hello there."),
        ("think", THOUGHT),
        ("think in JSON", "hm</think>\n\n{\"ok\": true}"),
    ];
    Build { template: Some(QWENISH.to_owned()), ..Build::answers(&answers) }.start()
}

fn tools(more: Value) -> Value {
    let parameters = json!({
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    });
    let function =
        json!({"name": "get_weather", "description": "Weather of a city", "parameters": parameters});
    let mut body = json!({"tools": [{"type": "function", "function": function}]});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

async fn a_call_as_a_whole() {
    let server = server();
    let reply = server.chat("weather", tools(json!({"temperature": 0, "max_tokens": 128}))).await.ok();
    let choice = &reply["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &Value::Null)
    );
    let calls = choice["message"]["tool_calls"].as_array().expect("calls");
    let [call] = &calls[..] else { panic!("{calls:?}") };
    assert_eq!(call.as_object().expect("a call").keys().collect::<Vec<_>>(), ["id", "type", "function"]);
    assert!(call["id"].as_str().is_some_and(|id| id.starts_with("call_") && id.len() > 20), "{call}");
    assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("get_weather")));
    let arguments = call["function"]["arguments"].as_str().expect("a string");
    assert_eq!(serde_json::from_str::<Value>(arguments).expect("JSON"), json!({"city": "Oslo"}));
    let two = server.chat("two", tools(json!({}))).await.ok();
    let calls = two["choices"][0]["message"]["tool_calls"].as_array().expect("calls");
    assert_eq!(calls.len(), 2);
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    let text = server.chat("hi", tools(json!({}))).await.ok();
    assert_eq!(text["choices"][0]["message"]["content"], "Hello there.", "tools need not be used");
    assert_eq!(text["choices"][0]["finish_reason"], "stop");
    assert!(text["choices"][0]["message"].get("tool_calls").is_none());
}

async fn a_call_as_it_comes() {
    let server = server();
    let events = server.chat("weather", tools(json!({"stream": true}))).await.events();
    insta::assert_snapshot!("tool_stream", lines(&events));
    let events = server.chat("two", tools(json!({"stream": true}))).await.events();
    let mut calls: Vec<(String, String)> = Vec::new();
    for call in
        events.iter().filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array()).flatten()
    {
        let index = usize::try_from(call["index"].as_u64().expect("an index")).expect("small");
        if let Some(name) = call["function"]["name"].as_str() {
            assert_eq!(index, calls.len());
            assert!(call["id"].is_string() && call["type"] == "function");
            calls.push((name.to_owned(), String::new()));
        }
        calls[index].1.push_str(call["function"]["arguments"].as_str().expect("a fragment"));
    }
    let cities: Vec<Value> =
        calls.iter().map(|(_, text)| serde_json::from_str(text).expect("JSON")).collect();
    assert_eq!(cities, [json!({"city": "Oslo"}), json!({"city": "Rome"})]);
    assert_eq!(events[events.len() - 1]["choices"][0]["finish_reason"], "tool_calls");
}

async fn without_tools_a_call_is_text() {
    let server = server();
    let reply = server.chat("weather", json!({})).await.ok();
    assert_eq!(reply["choices"][0]["message"]["content"], CALL);
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
}

async fn a_choice_of_none_forbids_calls_and_changes_no_prompt() {
    let server = server();
    let prompt = async |body| {
        let shown = server.post("/apply-template", crate::common::server::ask("weather", body)).await.ok();
        shown["prompt"].as_str().expect("text").to_owned()
    };
    let none = tools(json!({"tool_choice": "none"}));
    let with_tools = prompt(tools(json!({}))).await;
    assert!(
        with_tools.contains("Weather of a city") && !prompt(json!({})).await.contains("Weather of a city")
    );
    assert_eq!(prompt(none.clone()).await, with_tools);
    let message = server.chat("weather", none).await.ok()["choices"][0]["message"].clone();
    assert!(message.get("tool_calls").is_none(), "{message}");
    assert!(!message["content"].as_str().expect("text").contains("<tool_call>"), "{message}");
}

async fn a_call_that_is_cut_is_none() {
    let server = server();
    let upto = server.tokenizer.encode_chat_rest(&CALL[..50]).expect("encodes").len();
    let reply = server.chat("weather", tools(json!({"max_tokens": upto}))).await.ok();
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    assert!(reply["choices"][0]["message"].get("tool_calls").is_none(), "{reply}");
    let events = server.chat("weather", tools(json!({"max_tokens": upto, "stream": true}))).await.events();
    assert_eq!(events[events.len() - 1]["choices"][0]["finish_reason"], "length");
    // A complete call in front of it counts, whole and streamed.
    let upto = server.tokenizer.encode_chat_rest(&TWO[..CALL.len() + 50]).expect("encodes").len();
    let reply = server.chat("two", tools(json!({"max_tokens": upto}))).await.ok();
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    assert_eq!(reply["choices"][0]["message"]["content"], Value::Null);
    let calls = reply["choices"][0]["message"]["tool_calls"].as_array().expect("calls");
    assert_eq!(calls.len(), 1, "{reply}");
    assert_eq!(calls[0]["function"]["arguments"], "{\"city\": \"Oslo\"}");
    let events = server.chat("two", tools(json!({"max_tokens": upto, "stream": true}))).await.events();
    assert_eq!(events[events.len() - 1]["choices"][0]["finish_reason"], "length");
    let stopped = server.chat("weather", tools(json!({"stop": "<tool_call>"}))).await.ok();
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop", "a stop before a call suppresses it");
    assert_eq!(stopped["choices"][0]["message"]["content"], "");
}

async fn reasoning_is_told_apart() {
    let server = server();
    let body = |more: Value| {
        let mut body = tools(json!({"chat_template_kwargs": {"enable_thinking": true}}));
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        body
    };
    let reply = server.chat("think", body(json!({}))).await.ok();
    let message = &reply["choices"][0]["message"];
    assert_eq!(message["content"], "Forty-two.");
    let reasoning = message["reasoning_content"].as_str().expect("reasoning");
    assert!(reasoning.starts_with("Six times seven:") && reasoning.contains("get_weather"), "{reasoning}");
    assert!(message.get("tool_calls").is_none(), "what is thought is not called");
    let tokens = |reply: &Value| {
        reply["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().expect("a count")
    };
    let whole = reply["usage"]["completion_tokens"].as_u64().expect("a count");
    assert!(tokens(&reply) > 0 && tokens(&reply) < whole);

    let events = server.chat("think", body(json!({"stream": true}))).await.events();
    let kinds = events.iter().filter_map(|event| {
        let delta = event["choices"][0]["delta"].as_object()?;
        ["reasoning_content", "content"]
            .into_iter()
            .find(|kind| delta.contains_key(*kind) && delta[*kind] != "")
    });
    let kinds: Vec<&str> = kinds.collect();
    assert!(kinds.is_sorted_by(|a, b| a >= b) && kinds[0] == "reasoning_content", "{kinds:?}");
    let joined = |kind: &str| {
        events.iter().filter_map(|event| event["choices"][0]["delta"][kind].as_str()).collect::<String>()
    };
    assert_eq!(
        (joined("content"), joined("reasoning_content")),
        ("Forty-two.".to_owned(), reasoning.to_owned())
    );

    // Log-probabilities are those of the content.
    let scored = body(json!({"logprobs": true}));
    let text = |entries: &Value| {
        let entries = entries.as_array().into_iter().flatten();
        entries.filter_map(|entry| entry["token"].as_str()).collect::<String>()
    };
    let reply = server.chat("think", scored.clone()).await.ok();
    assert_eq!(text(&reply["choices"][0]["logprobs"]["content"]), "Forty-two.");
    let mut streamed = scored;
    streamed["stream"] = true.into();
    let chunks = server.chat("think", streamed).await.events();
    let chunks = chunks.iter().map(|chunk| &chunk["choices"][0]);
    let chunks: Vec<_> = chunks.filter(|choice| choice["logprobs"].is_object()).collect();
    assert!(chunks.iter().all(|choice| choice["delta"]["content"].is_string()), "{chunks:?}");
    let streamed: String = chunks.iter().map(|choice| text(&choice["logprobs"]["content"])).collect();
    assert_eq!(streamed, "Forty-two.");

    let hidden = json!({"chat_template_kwargs": {"enable_thinking": true, "return_reasoning": false}});
    let reply = server.chat("think", hidden).await.ok();
    assert!(reply["choices"][0]["message"].get("reasoning_content").is_none());
    assert!(tokens(&reply) > 0, "it was thought all the same");

    let cut = server.chat("think", body(json!({"max_tokens": 3}))).await.ok();
    assert_eq!(cut["choices"][0]["message"]["content"], "", "a string, also when all of it was reasoning");
}

async fn thinking_is_switched_for_all_and_by_each() {
    let mut build = Build { template: Some(QWENISH.to_owned()), ..Build::default() };
    build.settings.enable_thinking = Some(false);
    let server = build.start();
    let prompt = async |more: Value| {
        let reply = server.post("/apply-template", crate::common::server::ask("hi", more)).await.ok();
        reply["prompt"].as_str().expect("text").to_owned()
    };
    assert!(prompt(json!({})).await.ends_with("</think>\n\n"));
    assert!(prompt(json!({"reasoning_effort": "high"})).await.ends_with("<think>\n"));
    assert!(prompt(json!({"chat_template_kwargs": {"enable_thinking": true}})).await.ends_with("<think>\n"));
}

async fn tools_that_cannot_be_used_are_refused() {
    let refused = async |server: &Server, body: Value| server.chat("hi", body).await.error();
    let unsupported = |param: &str| (400, "unsupported_parameter".to_owned(), param.to_owned());
    let mut build = Build { template: Some(CHATML.to_owned()), ..Build::answers(&[("hi", CALL)]) };
    build.settings.tool_format = Some(ToolCallFormat::Hermes);
    let told = build.start();
    let reply = told.chat("hi", tools(json!({}))).await.ok();
    assert_eq!(reply["choices"][0]["finish_reason"], "tool_calls", "a flag tells what the template does not");
    let mut build = Build { template: Some("{{ messages[0].content }}".to_owned()), ..Build::default() };
    build.settings.tool_format = Some(ToolCallFormat::Mistral);
    assert_eq!(
        refused(&build.start(), tools(json!({}))).await,
        unsupported("tools"),
        "the model would not see them"
    );

    let server = server();
    // Whether with tools, the body, and the refusal.
    for (has_tools, body, status, code, param) in
        listed::<(bool, Value, u16, &str, &str)>("http_refusals", "tools")
    {
        let body = if has_tools { tools(body) } else { body };
        let expected = (status, code.to_owned(), param.to_owned());
        assert_eq!(refused(&server, body.clone()).await, expected, "{body}");
    }
}

/// Other tools stay enforced, and strict ones are never relaxed.
async fn a_keyword_that_cannot_be_enforced_is_left_out_of_its_tool_and_named() {
    let server = server();
    let tool = |name: &str, more: Value| {
        let mut k = json!({"type": "integer", "minimum": 1, "maximum": 3});
        k.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let parameters = json!({"type": "object", "properties": {"k": k}, "required": ["k"]});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    let asked = |tools: &Value, seed: u64| json!({"tools": tools, "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 300, "seed": seed});
    let mut tools =
        json!([tool("a", json!({})), tool("b", json!({"not": {"const": 2}})), tool("c", json!({}))]);
    for seed in 0..4 {
        let reply = server.chat(NOISE, asked(&tools, seed)).await;
        assert_eq!(reply.headers["x-llmctl-ignored"], "tools.b.not");
        let answer = reply.ok();
        let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        let value: Value = serde_json::from_str(call["arguments"].as_str().expect("a call")).expect("JSON");
        assert!(value["k"].as_i64().is_some_and(|k| (1..=3).contains(&k)), "{answer}");
    }
    tools[1]["function"]["strict"] = true.into();
    let (status, _, param) = server.chat(NOISE, asked(&tools, 1)).await.error();
    assert_eq!((status, param.as_str()), (400, "tools"));
    // Names that the schema leaves open could come twice.
    let map = json!({"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 2});
    let reply = server.chat(NOISE, asked(&json!([tool("d", map)]), 1)).await;
    assert_eq!(reply.headers["x-llmctl-ignored"], "tools.d.minProperties");
}

/// A template that shows no tools, or none that it shows the calls of: tools are described in the system prompt, calls are
/// asked for as JSON, and results come back as questions.
async fn a_template_without_tools_gets_them_described() {
    let silent = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    for template in [silent, CHATML] {
        let answers = [("weather", CALL), ("<tool_response>\nRain.\n</tool_response>", "It rains.")];
        let server = Build { template: Some(template.to_owned()), ..Build::answers(&answers) }.start();
        let reply = server.chat("weather", tools(json!({"temperature": 0, "tool_choice": "required"}))).await;
        assert_eq!(reply.headers["x-llmctl-tool-format"], "generic");
        let answer = reply.ok();
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{answer}");
        let message = answer["choices"][0]["message"].clone();
        assert_eq!(message["tool_calls"][0]["function"]["name"], "get_weather");
        let id = message["tool_calls"][0]["id"].clone();
        let result = json!({"role": "tool", "tool_call_id": id, "content": "Rain."});
        let asked = json!({"role": "user", "content": "weather"});
        let follow_up = tools(json!({"messages": [asked, message, result]}));
        let shown = server.post("/apply-template", follow_up.clone()).await.ok();
        let prompt = shown["prompt"].as_str().expect("text");
        assert!(prompt.contains("\"description\": \"Weather of a city\""), "{prompt}");
        assert!(
            prompt.contains(CALL) && prompt.contains("<tool_response>\nRain.\n</tool_response>"),
            "{prompt}"
        );
        let answer = server.post("/v1/chat/completions", follow_up).await.ok();
        assert_eq!(answer["choices"][0]["message"]["content"], "It rains.", "{answer}");
        // Without calls nothing is told of their format.
        let reply = server.chat("weather", tools(json!({"tool_choice": "none", "max_tokens": 9}))).await;
        assert!(reply.headers.get("x-llmctl-tool-format").is_none());
        assert_eq!(reply.status, StatusCode::OK);
    }
}

async fn an_answer_has_the_form_that_is_asked_for() {
    let server = server();
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["ok", "size"],
        "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    });
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
    let said = async |more: Value| {
        let mut body = json!({"temperature": 1, "seed": 5, "max_tokens": 300, "reasoning_effort": "none"});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let reply = server.chat(NOISE, body).await.ok();
        assert_eq!(reply["choices"][0]["finish_reason"], "stop", "{reply}");
        reply["choices"][0]["message"]["content"].as_str().expect("text").to_owned()
    };
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    for seed in 0..4 {
        let text = said(json!({"response_format": format, "seed": seed})).await;
        let value: Value = serde_json::from_str(&text).expect("JSON");
        assert!(validator.is_valid(&value), "{text}");
    }
    let bare =
        json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}}});
    assert!(["true", "false"].contains(&said(bare).await.as_str()));
    let digits = said(json!({"regex": "[0-9]{3}-[0-9]{2}"})).await;
    assert!(digits.len() == 6 && digits.as_bytes()[3] == b'-', "{digits}");
    for name in ["lark", "grammar"] {
        let text = said(json!({name: "start: \"yes\" | \"no\""})).await;
        assert!(["yes", "no"].contains(&text.as_str()), "{text}");
    }
    let object = server
        .chat(
            "hi",
            json!({"response_format": {"type": "json_object"}, "max_tokens": 1, "reasoning_effort": "none"}),
        )
        .await
        .ok();
    assert_eq!(
        object["choices"][0]["message"]["content"].as_str().map(|text| text.starts_with('{')),
        Some(true)
    );
    let completion = server.post("/v1/completions", json!({"prompt": "x", "regex": "ab|cd"})).await.ok();
    assert!(["ab", "cd"].contains(&completion["choices"][0]["text"].as_str().expect("text")));
}

async fn a_thought_comes_before_the_form() {
    let server = server();
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]});
    let body = json!({
        "chat_template_kwargs": {"enable_thinking": true},
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    });
    let reply = server.chat("think in JSON", body).await.ok();
    let message = &reply["choices"][0]["message"];
    assert_eq!(
        (&message["content"], &message["reasoning_content"]),
        (&json!("{\"ok\": true}"), &json!("hm"))
    );
    let own = json!({"chat_template_kwargs": {"enable_thinking": true}, "lark": "start: \"x\""});
    assert_eq!(server.chat("hi", own).await.error().1, "unsupported_parameter");
}

async fn forms_that_are_none_are_refused() {
    let server = server();
    for (body, status, param) in listed::<(Value, u16, &str)>("http_refusals", "forms") {
        let (got, _, named) = server.chat("hi", body.clone()).await.error();
        assert_eq!((got, named.as_str()), (status, param), "{body}");
    }
    let reply = server.chat("hi", json!({"response_format": {"type": "text"}})).await;
    assert_eq!(reply.status, StatusCode::OK);
    assert_eq!(server.chat("hi", json!({"response_format": {}})).await.status, StatusCode::OK);
}

both_kinds! {
    a_call_as_a_whole,
    a_call_as_it_comes,
    without_tools_a_call_is_text,
    a_choice_of_none_forbids_calls_and_changes_no_prompt,
    a_call_that_is_cut_is_none,
    reasoning_is_told_apart,
    thinking_is_switched_for_all_and_by_each,
    a_template_without_tools_gets_them_described,
    tools_that_cannot_be_used_are_refused,
    a_keyword_that_cannot_be_enforced_is_left_out_of_its_tool_and_named,
    an_answer_has_the_form_that_is_asked_for,
    a_thought_comes_before_the_form,
    forms_that_are_none_are_refused,
}
