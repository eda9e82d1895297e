//! Promise: each field of a request is honoured, accepted as a hint that is reported, or refused by name; what clients send back of answers is no reason to refuse their next turn.

use crate::common::prelude::*;
use crate::common::server::{ask, both_kinds};

fn server() -> Server {
    Build::answers(&[("hi", "Hello there."), ("Roses are", " red.")]).start()
}

async fn what_had_no_effect_is_reported_in_streams_and_completions_too() {
    let server = server();
    let body = json!({"user": "me", "stream": true, "chat_template_kwargs": {"nobody": 1}});
    assert_eq!(ignored(&server.chat("hi", body).await), "chat_template_kwargs.nobody, user");
    for stream in [false, true] {
        let body = json!({"prompt": "Roses are", "store": true, "stream": stream});
        assert_eq!(ignored(&server.post("/v1/completions", body).await), "store");
    }
    let lenient = Build { lenient: true, ..Build::default() }.start();
    let reply = lenient
        .chat("hi", json!({"temprature": 1, "microstat": 2, "na\u{e9}me, x": 1, "max_tokens": 2}))
        .await;
    assert_eq!((reply.status, ignored(&reply)), (StatusCode::OK, "microstat, na?me??x, temprature"));
    let strict = server.chat("hi", json!({"temprature": 1})).await;
    assert!(strict.text.contains("--lenient"), "{}", strict.text);
}

async fn answers_are_sent_back_as_sdks_do() {
    let server = server();
    let call = json!({"id": "c", "type": "function", "index": 0, "function": {
        "name": "f", "arguments": "{}", "parsed_arguments": {"a": 1},
    }});
    let messages = json!([
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "provider_specific_fields": {"refusal": null}, "refusal": null,
         "annotations": [], "audio": null, "function_call": null, "parsed": {"x": 1}, "images": [],
         "provider_options": {"a": {"b": 1}}, "cache_control": null},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "user", "content": "hi"},
    ]);
    let reply = server.post("/v1/chat/completions", json!({"messages": messages})).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.text);
    assert_eq!(
        ignored(&reply),
        "messages[].parsed, messages[].provider_options, messages[].tool_calls[].function.parsed_arguments"
    );
    let weird = json!({"messages": [{"role": "weird", "content": "x"}]});
    let refused = server.post("/v1/chat/completions", weird).await;
    assert_eq!(refused.error(), (400, "unsupported_parameter".to_owned(), "messages[0].role".to_owned()));
}

async fn errors_are_short_however_much_is_wrong() {
    let server = server();
    let zeros = vec![0; 200_000];
    let biases: Map<String, Value> = (0..20_000).map(|n| (format!("x{n}"), 1.into())).collect();
    for body in [
        json!({"messages": zeros}),
        ask("hi", json!({"tools": zeros})),
        ask("hi", json!({"logit_bias": biases})),
        ask("hi", json!({"y".repeat(100_000): 1})),
        json!({"messages": [{"role": "z".repeat(100_000), "content": "x"}]}),
    ] {
        let reply = server.post("/v1/chat/completions", body).await;
        assert!(reply.status.is_client_error() && reply.text.len() < 4000, "{}", reply.text.len());
    }
    let many = server.post("/v1/chat/completions", json!({"messages": zeros})).await;
    assert!(many.text.contains("and 199992 more"), "{}", many.text);
}

async fn max_tokens_is_an_upper_bound() {
    let small = || Build { context_length: 128, ..Build::answers(&[("hi", "Hello there.")]) };
    let server = small().start();
    let whole = server.chat("hi", json!({"max_tokens": 32_000})).await.ok();
    assert_eq!(whole["choices"][0]["message"]["content"], "Hello there.");
    let full = server.chat("hi", json!({"max_tokens": 32_000, "ignore_eos": true})).await.ok();
    assert_eq!(
        (&full["choices"][0]["finish_reason"], &full["usage"]["total_tokens"]),
        (&json!("length"), &json!(128))
    );
    for name in ["max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict"] {
        let two = server.chat("hi", json!({name: 2})).await.ok();
        assert_eq!(two["usage"]["completion_tokens"], 2, "{name}");
        for value in [32_000, -1] {
            let body = json!({"prompt": "count", name: value, "ignore_eos": true});
            let full = server.post("/v1/completions", body).await.ok();
            assert_eq!(full["usage"]["total_tokens"], 128, "{name} = {value}");
        }
    }
    let within = json!({"options": {"num_predict": 2, "temperature": 0.1, "num_ctx": 32_768}});
    let two = server.chat("hi", within).await;
    assert_eq!(ignored(&two), "options.num_ctx");
    assert_eq!(two.ok()["usage"]["completion_tokens"], 2);
    let outer = server.chat("hi", json!({"options": {"num_predict": 2}, "max_tokens": 3})).await.ok();
    assert_eq!(outer["usage"]["completion_tokens"], 3, "the request's own field counts first");
    for (options, param) in [(json!({"tfs_z": 0.5}), "options.tfs_z"), (json!({"x": 1}), "options.x")] {
        let refused = server.chat("hi", json!({"options": options})).await.error();
        assert_eq!(refused, (400, "unsupported_parameter".to_owned(), param.to_owned()));
    }
    let long = server.chat(&"word ".repeat(4000), json!({"max_tokens": 1})).await;
    assert_eq!((long.error().0, long.error().1.as_str()), (400, "context_length_exceeded"));
    let mut strict = small();
    strict.settings.strict_limits = true;
    let strict = strict.start();
    let reply = strict.chat("hi", json!({"max_tokens": 32_000})).await;
    assert_eq!((reply.error().0, reply.error().1.as_str()), (400, "context_length_exceeded"));
    assert_eq!(strict.chat("hi", json!({"max_tokens": -1})).await.error().2, "max_tokens");
}

async fn the_prompts_own_log_probabilities() {
    let server = Build::default().start();
    let text = format!(
        "<|im_start|>user\n{FREE}<|im_end|>\n<|im_start|>assistant\nroses are \u{1F339} and this goes on and on"
    );
    let text = text.as_str();
    let ids = server.tokenizer.encode_chat(text).expect("encodes");
    let complete = async |more: Value| {
        let mut body =
            json!({"prompt": ids, "echo": true, "logprobs": 3, "max_tokens": 1, "ignore_eos": true});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        server.post("/v1/completions", body).await
    };
    let reply = complete(json!({})).await.ok();
    let logprobs = &reply["choices"][0]["logprobs"];
    let list = |name: &str| logprobs[name].as_array().expect(name).clone();
    assert_eq!(list("tokens").len(), ids.len() + 1, "the prompt and one more");
    assert!(list("token_logprobs")[0].is_null() && list("top_logprobs")[0].is_null());
    assert!(list("token_logprobs")[1..].iter().all(|value| value.as_f64().is_some_and(|value| value <= 0.0)));
    for (own, top) in list("token_logprobs").iter().zip(list("top_logprobs")).skip(1) {
        let best =
            top.as_object().expect("an object").values().filter_map(Value::as_f64).fold(f64::MIN, f64::max);
        assert!(own.as_f64().expect("a number") <= best);
    }
    assert_eq!(list("text_offset")[0], 0);
    // Each is what the model says when the tokens before it are the whole prompt.
    for at in [1, ids.len() / 2, ids.len() - 1] {
        let body =
            json!({"prompt": ids[..at], "max_tokens": 1, "logprobs": 3, "echo": true, "ignore_eos": true});
        let cut = server.post("/v1/completions", body).await.ok();
        let next = cut["choices"][0]["logprobs"]["top_logprobs"][at].clone();
        assert_eq!(next, list("top_logprobs")[at], "token {at}");
    }
    // Nothing is taken from what is computed already, and nothing of it changes.
    let again = complete(json!({})).await.ok();
    assert_eq!(again["choices"], reply["choices"]);
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(again["timings"]["resume_reason"], "prompt_logprobs");
    let alone = complete(json!({"max_tokens": 0})).await.ok();
    assert_eq!(alone["usage"]["completion_tokens"], 0);
    assert_eq!(alone["choices"][0]["logprobs"]["token_logprobs"], json!(list("token_logprobs")[..ids.len()]));
    let events = complete(json!({"stream": true})).await.events();
    let parts =
        events.iter().filter_map(|event| event["choices"][0]["logprobs"]["token_logprobs"].as_array());
    assert_eq!(parts.flatten().cloned().collect::<Vec<_>>(), list("token_logprobs"));
    let several = json!({"prompt": [ids, ids[..3]], "echo": true, "logprobs": 0, "max_tokens": 0});
    let several = server.post("/v1/completions", several).await.ok();
    let lens = [0, 1].map(|n| several["choices"][n]["logprobs"]["tokens"].as_array().expect("tokens").len());
    assert_eq!(lens, [ids.len(), 3]);
}

async fn usage_comes_with_every_chunk() {
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let events = server().chat("hi", json!({"stream": true, "stream_options": options})).await.events();
    let counts: Vec<u64> =
        events.iter().map(|event| event["usage"]["completion_tokens"].as_u64().expect("usage")).collect();
    assert!(counts.is_sorted() && counts[0] == 0 && counts.last() > Some(&1), "{counts:?}");
    assert!(
        events.iter().all(|event| event["usage"]["prompt_tokens"] == events[0]["usage"]["prompt_tokens"])
    );
}

async fn a_format_beside_tools_is_one_or_the_other() {
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let build = |template: &str| {
        let answers = [
            ("call", call),
            ("answer", "{\"ok\": true}"),
            ("prose", "It is fine."),
            ("think", "hm</think>\n\n{\"ok\": true}"),
        ];
        Build { template: Some(template.to_owned()), ..Build::answers(&answers) }.start()
    };
    let server = build(QWENISH);
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]});
    let with = |more: Value| {
        let parameters =
            json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
        let mut body = json!({
            "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            "temperature": 0, "max_tokens": 200, "reasoning_effort": "none",
        });
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        body
    };
    let message = async |question: &str, more: Value| {
        let reply = server.chat(question, with(more)).await.ok();
        reply["choices"][0]["message"].clone()
    };
    let is_call = |message: &Value| message["tool_calls"][0]["function"]["arguments"] == "{\"a\": 1}";
    let parsed = |message: &Value| {
        serde_json::from_str::<Value>(message["content"].as_str().unwrap_or("")).unwrap_or(Value::Null)
    };
    assert!(is_call(&message("call", json!({})).await));
    assert_eq!(parsed(&message("answer", json!({})).await), json!({"ok": true}));
    assert_ne!(message("prose", json!({})).await["content"], "It is fine.", "neither a call nor the form");
    let only = message("answer", json!({"tool_choice": "required"})).await;
    assert!(parsed(&only)["ok"].is_null(), "{only}");
    let none = message("call", json!({"tool_choice": "none"})).await;
    assert!(parsed(&none)["ok"].is_boolean(), "{none}");
    let thought = message("think", json!({"chat_template_kwargs": {"enable_thinking": true}})).await;
    assert_eq!(
        (&thought["reasoning_content"], parsed(&thought)),
        (&json!("hm"), json!({"ok": true})),
        "{thought}"
    );
    let events = server.chat("answer", with(json!({"stream": true}))).await.events();
    let said: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(said, "{\"ok\": true}");
    let text = server.chat("prose", with(json!({"response_format": {"type": "text"}}))).await.ok();
    assert_eq!(text["choices"][0]["message"]["content"], "It is fine.");
    let lark = json!({"response_format": null, "lark": "start: \"a\""});
    assert_eq!(
        server.chat("call", with(lark)).await.error().2,
        "lark",
        "a grammar of one's own holds for the whole"
    );
}

async fn what_nothing_satisfies_is_refused_before_the_first_byte() {
    let server = server();
    for more in [
        json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}),
        json!({"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}}),
        json!({"lark": "start: start"}),
        json!({"grammar": "root ::= root"}),
        json!({"grammar": "root ::= \"a"}),
    ] {
        for stream in [false, true] {
            let mut body = more.clone();
            body["stream"] = stream.into();
            assert_eq!(server.chat("hi", body).await.error().0, 400, "{more}");
        }
    }
    let gbnf = server.chat("hi", json!({"grammar": "root ::= (\n \"a\" b)"})).await;
    assert!(gbnf.text.contains("GBNF: rule root, line 2: no rule is called b"), "{}", gbnf.text);
}

async fn llama_cpp_s_grammars_are_kept_to() {
    let server = server();
    let gbnf = "# two words\nroot ::= word \" \" word\nword ::= [x-z]{2}";
    for field in [
        json!({"grammar": gbnf}),
        json!({"guided_grammar": gbnf}),
        json!({"structured_outputs": {"grammar": gbnf}}),
    ] {
        let reply = server.chat("hi", field.clone()).await.ok();
        let text = reply["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
        let is_word = |word: &str| word.len() == 2 && word.bytes().all(|byte| (b'x'..=b'z').contains(&byte));
        assert!(text.split(' ').count() == 2 && text.split(' ').all(is_word), "{field}: {text}");
    }
    for none in [json!({"grammar": ""}), json!({"guided_grammar": "", "guided_json": {"const": 1}})] {
        server.chat("hi", none).await.ok();
    }
    let lark = server.chat("hi", json!({"lark": gbnf})).await;
    assert_eq!(lark.error().0, 400, "`lark` is Lark alone");
}

async fn objects_are_closed_unless_the_schema_or_the_request_opens_them() {
    let server = Build::answers(&[("q", "{\"a\": true, \"b\": true}")]).start();
    let schema = json!({"properties": {"a": {"type": "boolean"}}, "required": ["a"]});
    let names = async |more: Value| {
        let mut body = json!({"guided_json": schema, "temperature": 0, "max_tokens": 60});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let reply = server.chat("q", body).await.ok();
        let text = reply["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
        let members: Map<String, Value> =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        members.keys().cloned().collect::<Vec<_>>()
    };
    assert_eq!(names(json!({})).await, ["a"]);
    assert_eq!(names(json!({"schema_open": true})).await, ["a", "b"]);
    let mut opened = schema.clone();
    opened["additionalProperties"] = true.into();
    assert_eq!(names(json!({"guided_json": opened})).await, ["a", "b"]);
}

async fn older_functions_are_answered_in_their_form() {
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let build = Build { template: Some(QWENISH.to_owned()), ..Build::answers(&[("call", call)]) };
    let server = build.start();
    let functions =
        json!([{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]);
    let reply = server.chat("call", json!({"functions": functions})).await.ok();
    let choice = &reply["choices"][0];
    assert_eq!(choice["finish_reason"], "function_call");
    assert_eq!(choice["message"]["function_call"], json!({"name": "f", "arguments": "{\"a\": 1}"}));
    let events = server.chat("call", json!({"functions": functions, "stream": true})).await.events();
    let arguments =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["function_call"]["arguments"].as_str());
    let arguments: Value = serde_json::from_str(&arguments.collect::<String>()).expect("JSON");
    assert_eq!(arguments, json!({"a": 1}));
    let named = json!({"functions": functions, "function_call": {"name": "f"}});
    assert_eq!(server.chat("call", named).await.ok()["choices"][0]["finish_reason"], "function_call");
}

async fn choices_of_tools_in_other_words() {
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    let build = Build { template: Some(QWENISH.to_owned()), ..Build::answers(&[("call", call)]) };
    let server = build.start();
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    let with =
        |choice: Value| json!({"tools": [tool("f"), tool("g")], "tool_choice": choice, "max_tokens": 100});
    for choice in [
        json!("any"),
        json!({"type": "function", "name": "f"}),
        json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("f")]}}),
        json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}),
    ] {
        let reply = server.chat("call", with(choice.clone())).await.ok();
        assert_eq!(reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "f", "{choice}");
    }
    let unknown =
        json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "h"}]});
    assert_eq!(server.chat("call", with(unknown)).await.error().2, "tool_choice");
}

async fn what_ends_an_answer_may_be_a_token() {
    let server = server();
    let ids = server.tokenizer.encode_chat_rest("Hello there.").expect("encodes");
    let reply = server.chat("hi", json!({"stop_token_ids": [ids[2]]})).await.ok();
    let choice = &reply["choices"][0];
    assert_eq!((&choice["finish_reason"], &reply["usage"]["completion_tokens"]), (&json!("stop"), &json!(2)));
    assert_eq!(server.chat("hi", json!({"stop_token_ids": [9_999_999]})).await.error().2, "stop_token_ids");
}

async fn a_model_that_cannot_reason_takes_an_effort() {
    let build = Build { template: Some("{{ messages[0].content }}".to_owned()), ..Build::default() };
    let server = build.start();
    for (more, expected) in [
        (json!({"reasoning_effort": "none"}), ""),
        (json!({"reasoning_effort": "minimal"}), ""),
        (json!({"reasoning_effort": "high"}), "reasoning_effort"),
        (json!({"reasoning": {"effort": "high"}}), "reasoning.effort"),
        (json!({"think": true}), "think"),
        (json!({"think": "high"}), "think"),
        (json!({"think": false}), ""),
        (json!({"enable_thinking": false}), ""),
        (json!({"enable_thinking": true}), "enable_thinking"),
    ] {
        let mut body = more.clone();
        body["max_tokens"] = 1.into();
        let reply = server.chat("hi", body).await;
        assert_eq!((reply.status, ignored(&reply)), (StatusCode::OK, expected), "{more}: {}", reply.text);
    }
    let both = Build { template: Some(format!("[{{{{ reasoning_effort }}}}]{CHATML}")), ..Build::default() };
    let reply =
        both.start().post("/apply-template", ask("hi", json!({"reasoning_effort": "max"}))).await.ok();
    assert!(reply["prompt"].as_str().is_some_and(|text| text.starts_with("[high]")), "{reply}");
}

both_kinds! {
    what_had_no_effect_is_reported_in_streams_and_completions_too,
    answers_are_sent_back_as_sdks_do,
    errors_are_short_however_much_is_wrong,
    max_tokens_is_an_upper_bound,
    the_prompts_own_log_probabilities,
    usage_comes_with_every_chunk,
    a_format_beside_tools_is_one_or_the_other,
    what_nothing_satisfies_is_refused_before_the_first_byte,
    llama_cpp_s_grammars_are_kept_to,
    objects_are_closed_unless_the_schema_or_the_request_opens_them,
    older_functions_are_answered_in_their_form,
    choices_of_tools_in_other_words,
    what_ends_an_answer_may_be_a_token,
    a_model_that_cannot_reason_takes_an_effort,
}
