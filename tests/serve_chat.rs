//! Promise: `POST /v1/chat/completions` has OpenAI's shapes, streamed or not, and every parameter is honoured or refused.

use crate::common::prelude::*;
use crate::common::server::{MODEL, ask, both_kinds, lines, redacted};

const UNICODE: &str = "Grüße, 世界 \u{1F600}\u{1F468}\u{200D}\u{1F469}!";

fn talker() -> Build {
    Build::answers(&[("hi", "Hello there."), ("unicode", UNICODE), ("list", "one, two, END three")])
}

async fn a_whole_answer() {
    let server = talker().start();
    let reply = server.chat("hi", json!({"model": MODEL, "max_tokens": 16, "seed": 1})).await.ok();
    insta::assert_snapshot!("chat_whole", format!("{:#}", redacted(&reply)));
    let id = reply["id"].as_str().expect("an id");
    assert!(id.strip_prefix("chatcmpl-").is_some_and(|hex| hex.len() == 32), "{id}");
    let usage = &reply["usage"];
    let [prompt, completion] =
        ["prompt_tokens", "completion_tokens"].map(|name| usage[name].as_u64().expect(name));
    assert!(prompt > 0 && completion > 0);
    assert_eq!(usage["total_tokens"], prompt + completion);
}

async fn a_streamed_answer() {
    let server = talker().start();
    let body = json!({"stream": true, "stream_options": {"include_usage": true}, "max_tokens": 32});
    let reply = server.chat("hi", body).await;
    assert_eq!(reply.headers["cache-control"], "no-cache");
    insta::assert_snapshot!("chat_stream", lines(&reply.events()));
    let without_usage = server.chat("hi", json!({"stream": true, "max_tokens": 4})).await.events();
    insta::assert_snapshot!("chat_stream_cut", lines(&without_usage));
}

async fn text_is_intact_however_it_comes() {
    let server = talker().start();
    let whole = server.chat("unicode", json!({})).await.ok();
    assert_eq!(whole["choices"][0]["message"]["content"], UNICODE);
    let events = server.chat("unicode", json!({"stream": true})).await.events();
    let contents: Vec<&str> =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(contents.concat(), UNICODE);
    assert!(contents.len() > 5, "it comes in pieces");
    let created: Vec<&Value> = events.iter().map(|event| &event["created"]).collect();
    assert!(created.windows(2).all(|pair| pair[0] == pair[1]));
}

async fn an_empty_answer_is_an_empty_string() {
    let server = Build::answers(&[("nothing", "")]).start();
    let reply = server.chat("nothing", json!({})).await.ok();
    assert_eq!(reply["choices"][0]["message"]["content"], "");
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    assert_eq!(reply["usage"]["completion_tokens"], 0);
}

async fn why_it_ended() {
    let server = talker().start();
    let check = async |question: &str, more: Value, content: &str, reason: &str| {
        let reply = server.chat(question, more.clone()).await.ok();
        let choice = &reply["choices"][0];
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!(content), &json!(reason))
        );
        let mut streamed = more;
        streamed["stream"] = true.into();
        let events = server.chat(question, streamed).await.events();
        let said: String =
            events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(
            (said.as_str(), &events[events.len() - 1]["choices"][0]["finish_reason"]),
            (content, &json!(reason))
        );
    };
    check("hi", json!({}), "Hello there.", "stop").await;
    let tokens = server.tokenizer.encode_chat_rest("Hello there.").expect("encodes").len();
    check("hi", json!({"max_tokens": tokens}), "Hello there.", "length").await;
    check("list", json!({"stop": "END"}), "one, two, ", "stop").await;
    check("list", json!({"stop": ["zzz", "", "END", "three"]}), "one, two, ", "stop").await;
    check("list", json!({"stop": ["a", "b", "c", "d", "f", "g", "th"]}), "one, two, END ", "stop").await;
    let upto = server.tokenizer.encode_chat_rest("one, two, END").expect("encodes").len();
    check("list", json!({"stop": "END", "max_tokens": upto}), "one, two, ", "stop").await;
}

async fn several_choices_have_a_seed_each_and_share_the_prompt() {
    let server = Build::default().start();
    let body = |more: Value| {
        let mut body = json!({"temperature": 1, "max_tokens": 12});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        body
    };
    let together = server.chat(FREE, body(json!({"n": 3, "seed": 7}))).await.ok();
    let choices = together["choices"].as_array().expect("choices");
    assert_eq!(choices.len(), 3);
    let mut alone = Vec::new();
    for seed in 7..10 {
        let reply = server.chat(FREE, body(json!({"seed": seed}))).await.ok();
        alone.push(reply["choices"][0]["message"]["content"].clone());
        assert_eq!(reply["usage"]["prompt_tokens"], together["usage"]["prompt_tokens"]);
    }
    for (index, (choice, alone)) in choices.iter().zip(&alone).enumerate() {
        assert_eq!((&choice["index"], &choice["message"]["content"]), (&json!(index), alone));
    }
    assert_ne!(alone[0], alone[1]);
    assert_eq!(together["usage"]["completion_tokens"], 36, "all choices count");
    let one = server.chat(FREE, body(json!({"seed": 7}))).await.ok();
    assert_eq!(together["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"], "the prompt counts once");

    let events = server.chat(FREE, body(json!({"n": 2, "seed": 8, "stream": true}))).await.events();
    for (index, alone) in alone[1..].iter().enumerate() {
        let of_choice = events.iter().filter_map(|event| {
            let choice = &event["choices"][0];
            (choice["index"] == index).then(|| choice["delta"]["content"].as_str().unwrap_or_default())
        });
        assert_eq!(&json!(of_choice.collect::<String>()), alone);
    }
    let ends = events.iter().filter(|event| event["choices"][0]["finish_reason"] == "length");
    assert_eq!(ends.count(), 2);
}

async fn log_probabilities() {
    let server = talker().start();
    let reply = server.chat("hi", json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 3})).await.ok();
    let entries = reply["choices"][0]["logprobs"]["content"].as_array().expect("entries");
    let joined: String = entries.iter().map(|entry| entry["token"].as_str().expect("a token")).collect();
    assert_eq!(json!(joined), reply["choices"][0]["message"]["content"]);
    for entry in entries {
        let token = entry["token"].as_str().expect("a token");
        assert_eq!(entry["bytes"], json!(token.as_bytes()));
        assert_eq!(entry["top_logprobs"].as_array().expect("alternatives").len(), 2);
        assert_eq!(entry["top_logprobs"][0]["token"], token, "the model is sure");
        assert!(entry["logprob"].as_f64().expect("a number") <= 0.0);
    }
    let body = json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 3, "stream": true});
    let events = server.chat("hi", body).await.events();
    let streamed: Vec<Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(&streamed, entries, "streamed, each token is told once");
    let without = server.chat("hi", json!({"logprobs": true})).await.ok();
    assert_eq!(without["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
}

async fn the_way_tokens_are_chosen_is_honoured() {
    let server = talker().start();
    let first = async |more: Value| {
        let reply = server.chat("hi", more).await.ok();
        reply["choices"][0]["message"]["content"].as_str().expect("text").to_owned()
    };
    let h = server.tokenizer.encode_chat_rest("Hello there.").expect("encodes")[0];
    let banned = first(json!({"logit_bias": {h.to_string(): -100}, "max_tokens": 1})).await;
    assert!(!banned.starts_with('H'), "{banned}");
    let x = server.tokenizer.encode_chat_rest("x").expect("encodes")[0];
    assert_eq!(first(json!({"logit_bias": {x.to_string(): 100}, "max_tokens": 3})).await, "xxx");
    let drawn = async |more: Value| {
        let mut body = json!({"temperature": 2, "seed": 3, "max_tokens": 20});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let reply = server.chat(FREE, body).await.ok();
        reply["choices"][0]["message"]["content"].as_str().expect("text").to_owned()
    };
    let distinct = |text: &str| text.chars().collect::<BTreeSet<_>>().len();
    let greedy = drawn(json!({"temperature": 0})).await;
    for same in [json!({"top_k": 1}), json!({"top_p": 1e-6}), json!({"min_p": 1})] {
        assert_eq!(drawn(same.clone()).await, greedy, "{same}");
    }
    assert_ne!(drawn(json!({})).await, greedy);
    assert_eq!(drawn(json!({})).await, drawn(json!({})).await, "the seed repeats it");
    for same in [
        json!({"mirostat": 2, "mirostat_tau": 0, "mirostat_eta": 0}),
        json!({"options": {"mirostat": 1, "mirostat_tau": 0, "mirostat_eta": 0}}),
        json!({"samplers": "top_k;temp", "top_k": 1}),
        json!({"samplers": ["min_p"], "min_p": 1, "temperature": 0}),
    ] {
        assert_eq!(drawn(same.clone()).await, greedy, "{same}");
    }
    let plain = drawn(json!({})).await;
    for other in [
        json!({"mirostat": 2, "mirostat_tau": 2}),
        json!({"xtc_probability": 1, "xtc_threshold": 0.001}),
        json!({"dynatemp_range": 2, "dynatemp_exponent": 3}),
        json!({"samplers": [], "top_k": 1}),
    ] {
        let drawn = [drawn(other.clone()).await, drawn(other.clone()).await];
        assert!(drawn[0] == drawn[1] && drawn[0] != greedy, "{other}: {drawn:?}");
        assert!(drawn[0] != plain || other["samplers"].is_array(), "{other}: {drawn:?}");
    }
    let dry =
        json!({"temperature": 0, "dry_multiplier": 90, "dry_allowed_length": 0, "dry_sequence_breakers": []});
    assert_ne!(drawn(dry).await, greedy);
    assert_eq!(drawn(json!({"top_k": 0})).await, drawn(json!({})).await, "0 keeps all");
    let bias: Value = ["a", "b", "c"]
        .iter()
        .map(|letter| {
            let id = server.tokenizer.encode_chat_rest(letter).expect("a letter")[0];
            (id.to_string(), json!(40))
        })
        .collect();
    let plain = drawn(json!({"temperature": 0, "logit_bias": bias})).await;
    assert!(distinct(&plain) <= 3, "{plain}");
    for (name, value) in [("presence_penalty", 2.0), ("frequency_penalty", 2.0), ("repetition_penalty", 1.9)]
    {
        let penalised = drawn(json!({"temperature": 0, name: value})).await;
        assert_ne!(penalised, greedy, "{name}");
    }
}

async fn what_the_model_recommends_is_the_default() {
    let mut recommended = GivenSampling::default();
    recommended.numbers.temperature = Some(2.0);
    let built_in = json!({"temperature": 0.8, "top_k": 40, "top_p": 0.95});
    for (defaults, same) in [(recommended, json!({"temperature": 2})), (GivenSampling::default(), built_in)] {
        let is_built_in = defaults == GivenSampling::default();
        let server = Build { defaults, ..talker() }.start();
        let drawn = async |more: Value| {
            let mut body = json!({"seed": 3, "max_tokens": 20});
            body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
            server.chat(FREE, body).await.ok()["choices"][0]["message"]["content"].clone()
        };
        assert_eq!(drawn(json!({})).await, drawn(same).await);
        assert_ne!(drawn(json!({})).await, drawn(json!({"temperature": 0})).await);
        // A form leaves no room for variety, unless the model's publisher gives a temperature.
        let form = async |more: Value| drawn(json!({"regex": "[a-z]{9}", "temperature": more})).await;
        assert_eq!(form(Value::Null).await == form(json!(0)).await, is_built_in);
    }
}

async fn a_seed_that_was_drawn_is_told_and_repeats_the_answer() {
    let server = Build { defaults: GivenSampling::default(), ..talker() }.start();
    let ask = async |path: &str, mut body: Value| {
        let members = body.as_object_mut().expect("an object");
        members.insert("max_tokens".to_owned(), 20.into());
        let reply = server.post(path, body.clone()).await;
        let seed = reply.headers.get("x-llmctl-seed").map(|seed| seed.to_str().expect("text").to_owned());
        (seed.map(|seed| seed.parse::<u64>().expect("a number")), reply.ok())
    };
    let messages = json!([{"role": "user", "content": FREE}]);
    for (path, body, text) in [
        ("/v1/chat/completions", json!({"messages": messages}), "/choices/0/message/content"),
        ("/v1/completions", json!({"prompt": FREE}), "/choices/0/text"),
        ("/v1/messages", json!({"messages": messages}), "/content/0/text"),
    ] {
        let (seed, first) = ask(path, body.clone()).await;
        let mut again = body.clone();
        again["seed"] = seed.expect("a seed").into();
        let (told, second) = ask(path, again).await;
        assert_eq!((told, second.pointer(text)), (seed, first.pointer(text)), "{path}");
        let mut greedy = body;
        greedy["temperature"] = 0.into();
        assert_eq!(ask(path, greedy).await.0, None, "{path}");
    }
}

async fn parameters_out_of_range_are_refused() {
    let server = talker().start();
    let vocab_size = server.tokenizer.vocab_size() + 1;
    let beyond = ("logit_bias", json!({vocab_size.to_string(): 1}), 400);
    let rows = listed::<(&str, Value, u16)>("http_refusals", "chat");
    for (name, value, status) in rows.into_iter().chain([beyond]) {
        let reply = server.chat("hi", json!({name: value})).await;
        let code = "invalid_value".to_owned();
        assert_eq!(reply.error(), (status, code, name.to_owned()), "{}", reply.text);
    }
    server.chat("hi", json!({"logprobs": false, "top_logprobs": 0})).await.ok();
    let reply = server.chat("hi", json!({"logprobs": true, "top_logprobs": 21})).await;
    assert_eq!(reply.error().0, 400);
    for (wrong, says) in [
        (json!({"samplers": ["top_k", "nope"]}), "samplers are refused: unknown sampler \"nope\""),
        (json!({"samplers": 3}), "samplers are refused: not a list of names"),
        (
            json!({"dry_sequence_breakers": [""]}),
            "dry_sequence_breakers: not up to 64 texts of 1 to 40 bytes",
        ),
        (json!({"mirostat": 1.5}), "mirostat: 1.5 is not a whole number"),
        (json!({"n_probs": 21}), "n_probs is not in [0, 20]"),
        (
            json!({"n_probs": 2, "logprobs": true, "top_logprobs": 3}),
            "n_probs is another name of what logprobs says",
        ),
    ] {
        let reply = server.chat("hi", wrong.clone()).await;
        let text = reply.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert!(reply.status == StatusCode::BAD_REQUEST && text.contains(says), "{wrong}: {}", reply.text);
    }
    let scored = server.chat("hi", json!({"n_probs": 2, "max_tokens": 1})).await.json();
    let top = &scored["choices"][0]["logprobs"]["content"][0]["top_logprobs"];
    assert_eq!(top.as_array().map(Vec::len), Some(2), "{scored}");
    for accepted in [
        json!({"temperature": 0}),
        json!({"temperature": 1, "seed": 0}),
        json!({"temperature": 2.0, "seed": i64::MAX}),
        json!({"temperature": 2.0, "seed": i64::MIN}),
        json!({"top_p": 1, "top_k": 0, "min_p": 0, "n": null, "stop": null, "logit_bias": {}}),
        json!({"presence_penalty": 0, "frequency_penalty": 0, "logprobs": false, "n": 1}),
        json!({"max_tokens": 1000, "max_completion_tokens": 2}),
        json!({"user": "me", "metadata": {"a": "b"}, "prompt_cache_key": "k", "store": false}),
        json!({"modalities": ["text"], "service_tier": "auto", "stream_options": {"include_usage": true}}),
    ] {
        let reply = server.chat("hi", accepted.clone()).await;
        assert_eq!(reply.status, StatusCode::OK, "{accepted}: {}", reply.text);
        if accepted.get("max_completion_tokens").is_some() {
            assert_eq!(reply.json()["usage"]["completion_tokens"], 2, "the newer name counts");
        }
    }
}

async fn what_is_not_supported_is_refused_by_name_all_at_once() {
    let server = talker().start();
    let reply = server.chat("hi", json!({"audio": {}, "temprature": 1, "web_search_options": {}})).await;
    let (status, code, _) = reply.error();
    assert_eq!((status, code.as_str()), (400, "unsupported_parameter"));
    let message = reply.json()["error"]["message"].as_str().expect("a message").to_owned();
    for name in ["audio", "temprature", "web_search_options"] {
        assert!(message.contains(name), "{message}");
    }
    let reply = server.chat("hi", json!({"stream_options": {"strange": true}})).await;
    assert_eq!(reply.error().2, "stream_options.strange");
    let mut build = talker();
    build.lenient = true;
    let lenient = build.start();
    assert_eq!(lenient.chat("hi", json!({"temprature": 1})).await.status, StatusCode::OK);
    let reply = lenient.chat("hi", json!({"messages": [{"role": "weird", "content": "x"}]})).await;
    assert_eq!(reply.error().2, "messages[0].role", "what a prompt is made of is never passed over");
}

async fn checks_come_in_the_references_order() {
    let settings = ServeSettings { other_models: vec!["other".to_owned()], ..ServeSettings::default() };
    let server = Build { settings, ..talker() }.start();
    let mut body = json!({
        "model": "other", "temperature": 9, "strange": [], "session_id": "a b", "stop": 1,
        "messages": [{"role": "user", "content": "hi"}],
    });
    let mut codes = Vec::new();
    for fix in [
        ("stop", json!(null)),
        ("model", json!(null)),
        ("temperature", json!(0)),
        ("strange", json!(null)),
        ("session_id", json!(null)),
    ] {
        codes.push(server.post("/v1/chat/completions", body.clone()).await.error());
        body[fix.0] = fix.1;
    }
    let expected = [
        (422, "invalid_value", "stop"),
        (404, "model_not_found", "model"),
        (400, "invalid_value", "temperature"),
        (400, "unsupported_parameter", "strange"),
        (400, "invalid_session_id", "session_id"),
    ];
    let expected = expected.map(|(status, code, param)| (status, code.to_owned(), param.to_owned()));
    assert_eq!(codes, expected);
    assert_eq!(server.post("/v1/chat/completions", body).await.status, StatusCode::OK);
}

async fn bodies_that_are_none() {
    let server = talker().start();
    let send = async |content_type: Option<&str>, body: &str| {
        let mut request = axum::http::Request::builder().method(Method::POST).uri("/v1/chat/completions");
        if let Some(content_type) = content_type {
            request = request.header("content-type", content_type);
        }
        let request = request.body(axum::body::Body::from(body.to_owned())).expect("a request");
        crate::common::server::whole(server.send(request).await).await.error()
    };
    let json = Some("application/json");
    assert_eq!(send(json, "{").await.0, 422);
    assert_eq!(send(json, "").await.0, 422);
    assert_eq!(send(json, "[]").await.0, 422);
    assert_eq!(send(json, "{\"messages\": \"\\ud800\"}").await.0, 422);
    assert_eq!(send(json, &"[".repeat(100_000)).await.0, 422, "deeper than anything");
    assert_eq!(send(json, "{}").await, (422, "invalid_value".to_owned(), "messages".to_owned()));
    assert_eq!(send(None, "{}").await.0, 415);
    assert_eq!(send(Some("text/plain"), "{}").await.0, 415);
    assert_eq!(send(json, &format!("{{\"x\": \"{}\"}}", "x".repeat(3 << 20))).await.0, 413);
}

async fn the_context_is_never_cut_silently() {
    let mut build = talker();
    build.context_length = 128;
    build.settings.strict_limits = true;
    let server = build.start();
    let long = "word ".repeat(40_000);
    for stream in [false, true] {
        let reply = server.chat(&long, json!({"max_tokens": 8, "stream": stream})).await;
        assert_eq!(reply.error().1, "context_length_exceeded");
        let message = reply.json()["error"]["message"].as_str().expect("a message").to_owned();
        assert!(
            message.contains("128") && message.chars().filter(char::is_ascii_digit).count() > 6,
            "{message}"
        );
        let reply = server.chat("hi", json!({"max_tokens": 127, "stream": stream})).await;
        assert_eq!((reply.error().0, reply.error().1.as_str()), (400, "context_length_exceeded"));
    }
    let prompt = server.chat("hi", json!({"max_tokens": 1})).await.ok()["usage"]["prompt_tokens"].clone();
    let room = 128 - prompt.as_u64().expect("a count");
    assert_eq!(server.chat("hi", json!({"max_tokens": room})).await.status, StatusCode::OK);
    assert_eq!(server.chat("hi", json!({"max_tokens": room + 1})).await.error().0, 400);
    let filled = server.chat(&"x".repeat(40), json!({})).await.ok();
    assert_eq!(filled["choices"][0]["finish_reason"], "stop");
}

async fn templates_that_refuse_are_the_clients_business() {
    let mut build = talker();
    build.template = Some(format!(
        "{{% if messages[0].role != 'user' %}}{{{{ raise_exception('user first') }}}}{{% endif %}}{CHATML}"
    ));
    let server = build.start();
    let body = json!({"messages": [{"role": "assistant", "content": "hi"}]});
    let reply = server.post("/v1/chat/completions", body).await;
    assert_eq!((reply.error().0, reply.error().1.as_str()), (400, "template_error"));
    assert!(reply.text.contains("user first"));
    let mut build = talker();
    build.template = None;
    let reply = build.start().chat("hi", json!({})).await;
    assert_eq!(reply.error().1, "template_error");
}

async fn reasoning_effort_becomes_what_the_template_reads() {
    let rendered = async |template: &str, more: Value| {
        let mut build = talker();
        build.template = Some(format!("{template}{CHATML}"));
        build.start().post("/apply-template", ask("hi", more)).await
    };
    let prompt = async |template: &str, more: Value| {
        rendered(template, more).await.ok()["prompt"].as_str().expect("text").to_owned()
    };
    for (effort, thinks) in
        [("none", false), ("minimal", false), ("low", true), ("high", true), ("xhigh", true)]
    {
        let text = prompt("", json!({"reasoning_effort": effort})).await;
        assert_eq!(text.ends_with("<think>\n"), thinks, "{effort}");
    }
    let both = "[{{ reasoning_effort }}]";
    assert!(prompt(both, json!({"reasoning_effort": "high"})).await.starts_with("[high]"));
    let own = json!({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": false}});
    assert!(!prompt(both, own).await.ends_with("<think>\n"), "what the client says itself counts");
    let mut build = talker();
    build.template = Some("{{ messages[0].content }}".to_owned());
    let reply = build.start().chat("hi", json!({"reasoning_effort": "low", "max_tokens": 1})).await;
    assert_eq!(
        (reply.status, reply.headers["x-llmctl-ignored"].as_bytes()),
        (StatusCode::OK, &b"reasoning_effort"[..])
    );
}

async fn a_developer_is_a_system_where_the_template_knows_no_other() {
    let body =
        json!({"messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "q"}]});
    let prompt = async |template: &str| {
        let mut build = talker();
        build.template = Some(template.to_owned());
        let reply = build.start().post("/apply-template", body.clone()).await.ok();
        reply["prompt"].as_str().expect("text").to_owned()
    };
    assert!(prompt(CHATML).await.starts_with("<|im_start|>system\nbe brief"));
    assert!(
        prompt(&format!("{CHATML}{{# 'developer' #}}")).await.starts_with("<|im_start|>developer\nbe brief")
    );
}

async fn an_answer_that_is_given_is_continued() {
    let answer = "One, two, three, four and five.";
    let build = Build { template: Some(QWENISH.to_owned()), ..Build::answers(&[("count", answer)]) };
    let server = build.start();
    let ids = server.tokenizer.encode_chat_rest(answer).expect("encodes");
    let (begun, rest) = answer.split_at(server.tokenizer.decode(&ids[..5], false).trim_start().len());
    let last = json!({"role": "assistant", "content": begun});
    let messages = json!([{"role": "user", "content": "count"}, last]);
    for more in [
        json!({"continue_final_message": true}),
        json!({"continue_final_message": true, "add_generation_prompt": false}),
        json!({"add_generation_prompt": false, "session_id": "counting"}),
    ] {
        let mut body = more.clone();
        body["messages"] = messages.clone();
        let whole = server.post("/v1/chat/completions", body.clone()).await.ok();
        let choice = &whole["choices"][0];
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(rest), &json!("stop")));
        if body["session_id"].is_null() {
            body["stream"] = true.into();
            let events = server.post("/v1/chat/completions", body).await.events();
            let said = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
            assert_eq!(said.collect::<String>(), rest, "{more}");
        }
    }
    // The session holds the whole answer, as the model's own tokens.
    let next =
        json!([messages[0], {"role": "assistant", "content": answer}, {"role": "user", "content": "x"}]);
    let body = json!({"messages": next, "session_id": "counting"});
    let next = server.post("/v1/chat/completions", body).await.ok();
    assert_eq!(next["timings"]["resume_reason"], "exact_prefix", "{next}");

    let body = json!({"messages": messages, "continue_final_message": true});
    let prompt = server.post("/apply-template", body).await.ok()["prompt"].clone();
    assert!(prompt.as_str().is_some_and(|text| text.ends_with(&format!("assistant\n{begun}"))), "{prompt}");
    let asked = json!([messages[0]]);
    for (more, param) in [
        (json!({"messages": asked, "continue_final_message": true}), "continue_final_message"),
        (json!({"messages": asked, "add_generation_prompt": false}), "add_generation_prompt"),
        (json!({"continue_final_message": true, "add_generation_prompt": true}), "continue_final_message"),
        (json!({"continue_final_message": false, "add_generation_prompt": false}), "add_generation_prompt"),
        (json!({"continue_final_message": true, "regex": "a"}), "continue_final_message"),
    ] {
        let mut body = json!({"messages": messages});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        assert_eq!(server.post("/v1/chat/completions", body).await.error().2, param, "{more}");
    }
}

async fn an_answer_is_continued_behind_its_reasoning() {
    let answers = [("think", "Counting.\n</think>\n\nOne, two.")];
    let build = Build { template: Some(QWENISH.to_owned()), ..Build::answers(&answers) };
    let last = json!({"role": "assistant", "reasoning_content": "Counting.", "content": "One,"});
    let body = json!({
        "messages": [{"role": "user", "content": "think"}, last],
        "enable_thinking": true, "continue_final_message": true,
    });
    let reply = build.start().post("/v1/chat/completions", body).await.ok();
    let message = &reply["choices"][0]["message"];
    assert_eq!((&message["content"], message.get("reasoning_content")), (&json!(" two."), None), "{reply}");
}

both_kinds! {
    an_answer_that_is_given_is_continued,
    an_answer_is_continued_behind_its_reasoning,
    a_whole_answer,
    a_streamed_answer,
    text_is_intact_however_it_comes,
    an_empty_answer_is_an_empty_string,
    why_it_ended,
    several_choices_have_a_seed_each_and_share_the_prompt,
    log_probabilities,
    the_way_tokens_are_chosen_is_honoured,
    what_the_model_recommends_is_the_default,
    a_seed_that_was_drawn_is_told_and_repeats_the_answer,
    parameters_out_of_range_are_refused,
    what_is_not_supported_is_refused_by_name_all_at_once,
    checks_come_in_the_references_order,
    bodies_that_are_none,
    the_context_is_never_cut_silently,
    templates_that_refuse_are_the_clients_business,
    reasoning_effort_becomes_what_the_template_reads,
    a_developer_is_a_system_where_the_template_knows_no_other,
}
