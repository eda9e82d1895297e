//! Promise: `/v1/completions`, `/v1/models` and the endpoints of the text side have the shapes that clients know, and no
//! parameter is passed over.

use llmctl_engine::turn::InfillPrompt;

use crate::common::prelude::*;
use crate::common::server::{MODEL, both_kinds, chat_tokenizer_with, lines, redacted};

fn server() -> Server {
    Build::answers(&[("Once upon", " a time, there was."), ("Roses are", " red.")]).start()
}

async fn complete(server: &Server, body: Value) -> Value {
    server.post("/v1/completions", body).await.ok()
}

async fn a_text_goes_on() {
    let server = server();
    let reply = complete(&server, json!({"model": MODEL, "prompt": "Once upon", "max_tokens": 100})).await;
    insta::assert_snapshot!("completion", format!("{:#}", redacted(&reply)));
    let echoed = complete(&server, json!({"prompt": "Once upon", "max_tokens": 100, "echo": true})).await;
    assert_eq!(echoed["choices"][0]["text"], "Once upon a time, there was.");
    let ids = server.tokenizer.encode_chat("Once upon").expect("encodes");
    let by_ids = complete(&server, json!({"prompt": ids, "max_tokens": 100})).await;
    assert_eq!(by_ids["choices"], reply["choices"]);
    let head = server.tokenizer.encode_chat("Once").expect("encodes");
    let tail = server.tokenizer.encode_chat_rest_for(" upon", None).expect("encodes");
    let parts: Vec<Value> = head.iter().copied().map(Value::from).chain([json!(" upon")]).collect();
    for (prompt, expected) in
        [(parts, [&head[..], &tail].concat()), (vec![json!("Once"), json!(7)], [&head[..], &[7]].concat())]
    {
        let mixed = json!({"prompt": prompt, "max_tokens": 1, "return_token_ids": true});
        assert_eq!(complete(&server, mixed).await["choices"][0]["prompt_token_ids"], json!(expected));
    }
    let cut = complete(&server, json!({"prompt": "unknown", "logit_bias": {ids[0].to_string(): 100}})).await;
    assert_eq!(cut["usage"]["completion_tokens"], 16, "OpenAI's default");
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
}

async fn a_text_as_it_goes_on() {
    let server = server();
    let body = json!({
        "prompt": "Roses are", "stream": true, "stream_options": {"include_usage": true}, "echo": true,
    });
    insta::assert_snapshot!("completion_stream", lines(&server.post("/v1/completions", body).await.events()));
}

async fn several_prompts_with_several_choices() {
    let server = server();
    let ids = server.tokenizer.encode_chat("Roses are").expect("encodes");
    for prompts in [
        json!(["Once upon", "Roses are"]),
        json!([server.tokenizer.encode_chat("Once upon").expect("encodes"), ids]),
    ] {
        let body = json!({"prompt": prompts, "n": 2, "best_of": 2, "max_tokens": 100, "echo": true});
        let reply = complete(&server, body).await;
        let texts: Vec<&str> = reply["choices"]
            .as_array()
            .expect("choices")
            .iter()
            .map(|choice| choice["text"].as_str().expect("text"))
            .collect();
        let [once, roses] = ["Once upon a time, there was.", "Roses are red."];
        assert_eq!(texts, [once, once, roses, roses]);
    }
    let one = complete(&server, json!({"prompt": "Once upon", "max_tokens": 100})).await;
    let three = complete(&server, json!({"prompt": "Once upon", "max_tokens": 100, "n": 3})).await;
    assert_eq!(one["usage"]["prompt_tokens"], three["usage"]["prompt_tokens"]);
    let events = server
        .post(
            "/v1/completions",
            json!({"prompt": ["Once upon", "Roses are"], "stream": true, "max_tokens": 100}),
        )
        .await
        .events();
    for (index, expected) in [" a time, there was.", " red."].iter().enumerate() {
        let of = events.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == index);
        let text: String = of.map(|choice| choice["text"].as_str().expect("text")).collect();
        assert_eq!(&text, expected);
    }
}

async fn log_probabilities_of_a_text() {
    let server = server();
    let body = |stream: bool| json!({"prompt": "Roses are", "logprobs": 2, "stream": stream});
    let reply = complete(&server, body(false)).await;
    let logprobs = &reply["choices"][0]["logprobs"];
    let tokens: Vec<&str> =
        logprobs["tokens"].as_array().expect("tokens").iter().map(|t| t.as_str().expect("text")).collect();
    assert_eq!(tokens.concat(), " red.");
    let mut offset = 0;
    for (index, token) in tokens.iter().enumerate() {
        assert_eq!(logprobs["text_offset"][index], offset);
        assert!(logprobs["top_logprobs"][index].as_object().expect("alternatives").contains_key(*token));
        assert!(logprobs["token_logprobs"][index].as_f64().expect("a number") <= 0.0);
        offset += token.chars().count();
    }
    let events = server.post("/v1/completions", body(true)).await.events();
    let offsets =
        events.iter().filter_map(|event| event["choices"][0]["logprobs"]["text_offset"].as_array()).flatten();
    assert_eq!(&offsets.cloned().collect::<Value>(), &logprobs["text_offset"]);
}

async fn what_a_completion_refuses() {
    let server = server();
    for (name, value, status, code) in listed::<(&str, Value, u16, &str)>("http_refusals", "completions") {
        let mut body = json!({"prompt": "Roses are"});
        body[name] = value.clone();
        let reply = server.post("/v1/completions", body).await;
        assert_eq!(reply.error(), (status, code.to_owned(), name.to_owned()), "{value}: {}", reply.text);
    }
    let empty = server.post("/v1/completions", json!({"prompt": []})).await;
    assert_eq!(empty.error().0, 400);
    for fine in [json!({"suffix": null}), json!({"suffix": ""}), json!({"best_of": 1})] {
        let mut body = json!({"prompt": "Roses are"});
        body.as_object_mut().expect("an object").extend(fine.as_object().expect("an object").clone());
        assert_eq!(server.post("/v1/completions", body).await.status, StatusCode::OK);
    }
}

async fn choices_of_a_text_have_a_seed_each() {
    let server = Build::default().start();
    let prompt = format!("<|im_start|>user\n{FREE}<|im_end|>\n<|im_start|>assistant\n");
    let body = |n: usize, seed: u64| json!({"prompt": prompt, "temperature": 1.5, "n": n, "seed": seed, "max_tokens": 9});
    let both = complete(&server, body(2, 40)).await;
    let second = complete(&server, body(1, 41)).await;
    assert_eq!(both["choices"][1]["text"], second["choices"][0]["text"]);
    assert_ne!(both["choices"][0]["text"], second["choices"][0]["text"]);
}

async fn the_model_by_its_name() {
    let server = server();
    let list = server.get("/v1/models").await.ok();
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!(MODEL)));
    let model = server.get("/v1/models/org/toy").await.ok();
    assert_eq!(model, list["data"][0], "ids may contain slashes");
    assert_eq!((&model["object"], &model["created"]), (&json!("model"), &json!(1_700_000_000)));
    for name in ["max_model_len", "context_length", "max_context_length"] {
        assert_eq!(model[name], 4096, "{name}");
    }
    let meta = &model["meta"];
    assert_eq!((&meta["n_ctx"], &meta["n_ctx_train"]), (&json!(4096), &json!(2048)));
    assert_eq!((&meta["n_params"], &meta["size"]), (&json!(61_728), &json!(155_824)));
    assert_eq!(server.get("/models").await.ok(), list, "llama.cpp's and Ollama's path");
    assert_eq!(server.get("/models/org/toy").await.ok(), model);
    let props = server.get("/props").await.ok();
    assert_eq!(props["default_generation_settings"]["n_ctx"], 4096);
    assert_eq!((&props["total_slots"], &props["model_alias"]), (&json!(4), &json!(MODEL)));
    assert_eq!(props["chat_template"], CHATML);
    assert_eq!(
        server.get("/v1/models/gpt-4").await.error(),
        (404, "model_not_found".to_owned(), "model".to_owned())
    );
}

async fn text_to_tokens_and_back() {
    let server = server();
    let text = "Grüße <|im_start|> \u{1F600}";
    let ids = server.tokenizer.encode_chat_rest(text).expect("encodes");
    let tokens = server.post("/tokenize", json!({"content": text})).await.ok();
    assert_eq!((&tokens["tokens"], &tokens["count"]), (&json!(ids), &json!(ids.len())));
    assert_eq!(tokens["max_model_len"], 4096);
    let back = server.post("/detokenize", json!({"tokens": ids})).await.ok();
    assert_eq!((&back["content"], &back["prompt"]), (&json!(text), &json!(text)));
    let pieces = server.post("/tokenize", json!({"content": "\u{1F600}a", "with_pieces": true})).await.ok();
    let mut bytes = Vec::new();
    for piece in pieces["tokens"].as_array().expect("pieces") {
        match &piece["piece"] {
            Value::String(text) => bytes.extend(text.bytes()),
            list => bytes
                .extend(list.as_array().expect("bytes").iter().map(|b| b.as_u64().expect("a byte") as u8)),
        }
    }
    assert_eq!(bytes, "\u{1F600}a".as_bytes());
    let plain = server.post("/tokenize", json!({"content": "hi"})).await.ok();
    let special = server.post("/tokenize", json!({"content": "hi", "add_special": true})).await.ok();
    let vllm = server.post("/tokenize", json!({"prompt": "hi"})).await.ok();
    assert_eq!(vllm["tokens"], special["tokens"]);
    let bare = server.post("/tokenize", json!({"prompt": "hi", "add_special_tokens": false})).await.ok();
    assert_eq!(bare["tokens"], plain["tokens"]);
}

async fn the_tokenizer_by_its_configuration() {
    let server = server();
    let info = server.get("/tokenizer_info").await.ok();
    let eos = info["eos_token"].as_str().expect("a token");
    assert_eq!(server.tokenizer.token_to_id(eos), server.tokenizer.eos());
    assert_eq!((&info["model_max_length"], &info["chat_template"]), (&json!(4096), &json!(CHATML)));
    assert_eq!(info["vocab_size"], server.tokenizer.vocab_size());
}

async fn a_conversation_to_its_prompt() {
    let server = server();
    let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]);
    let prompt = server.post("/apply-template", json!({"messages": messages})).await.ok();
    let text = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(prompt, json!({"prompt": text}));
    let tokens = server.post("/tokenize", json!({"messages": messages})).await.ok();
    let chat = server.post("/v1/chat/completions", json!({"messages": messages, "max_tokens": 1})).await.ok();
    assert_eq!(tokens["count"], chat["usage"]["prompt_tokens"]);
    for (path, body, param) in [
        ("/tokenize", json!({}), "content"),
        ("/tokenize", json!({"content": "x", "strange": 1}), "strange"),
        ("/tokenize", json!({"content": "0123456789".repeat(100_000)}), "content"),
        (
            "/tokenize",
            json!({"messages": [{"role": "user", "content": "0123456789".repeat(100_000)}]}),
            "messages",
        ),
        ("/detokenize", json!({"tokens": "x"}), "tokens"),
        ("/detokenize", json!({"tokens": [99_999_999]}), "tokens"),
        ("/apply-template", json!({}), "messages"),
        (
            "/apply-template",
            json!({"messages": messages, "add_generation_prompt": false}),
            "add_generation_prompt",
        ),
    ] {
        assert_eq!(server.post(path, body).await.error().2, param, "{path}");
    }
}

async fn the_model_by_other_names() {
    let with = |aliases: &[&str]| {
        let aliases = aliases.iter().map(|&alias| alias.to_owned()).collect();
        let other_models = vec!["coder".to_owned()];
        let settings = ServeSettings { aliases, other_models, ..ServeSettings::default() };
        Build { settings, ..Build::default() }.start()
    };
    let ask = |model: &str| json!({"model": model, "prompt": "x", "max_tokens": 1});
    let named = with(&["gpt-4o", "dummy"]);
    for model in ["gpt-4o", "dummy", MODEL] {
        assert_eq!(complete(&named, ask(model)).await["model"], MODEL, "the answer has its own name");
        let path = format!("/v1/models/{model}");
        assert_eq!(named.get(&path).await.ok()["id"], MODEL);
    }
    let unknown = named.post("/v1/completions", ask("gpt-5")).await;
    assert_eq!(unknown.headers["x-llmctl-ignored"], "model");
    assert_eq!(unknown.ok()["model"], MODEL);
    let refused = named.post("/v1/completions", ask("coder")).await.error();
    assert_eq!(refused, (404, "model_not_found".to_owned(), "model".to_owned()), "another model's name");
    assert_eq!(named.get("/v1/models").await.ok()["data"].as_array().map(Vec::len), Some(1));
    assert_eq!(complete(&with(&["*"]), ask("anything at all")).await["model"], MODEL);
}

async fn special_tokens_in_messages_are_refused_where_the_operator_says_so() {
    let with = |refuses_special_tokens| {
        let settings = ServeSettings { refuses_special_tokens, ..ServeSettings::default() };
        Build { settings, ..Build::default() }.start()
    };
    let ask = |text: &str| json!({"messages": [{"role": "user", "content": text}], "max_tokens": 1});
    let strict = with(true);
    let special = strict.tokenizer.special_tokens().next().expect("it has some").1.to_owned();
    let text = format!("a {special} b");
    let refused = strict.post("/v1/chat/completions", ask(&text)).await;
    let expected = (400, "special_token_in_text".to_owned(), "messages[0]".to_owned());
    assert_eq!(refused.error(), expected, "{refused:?}");
    assert!(refused.text.contains(&special), "{refused:?}");
    strict.post("/v1/chat/completions", ask("a b")).await.ok();
    strict.post("/v1/completions", json!({"prompt": text, "max_tokens": 1})).await.ok();
    with(false).post("/v1/chat/completions", ask(&text)).await.ok();
}

const FIM: [&str; 3] = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"];

/// The text of the prompt that asks for what stands between two others.
fn between(files: &[(&str, &str)], prefix: &str, suffix: &str) -> &'static str {
    let chat_tokenizer = chat_tokenizer_with(&FIM, None);
    let file = |(name, text): &(&str, &str)| ((*name).to_owned(), (*text).to_owned());
    let asked = InfillPrompt {
        files: files.iter().map(file).collect(),
        prefix: prefix.to_owned(),
        suffix: suffix.to_owned(),
        ..InfillPrompt::default()
    };
    let infill = chat_tokenizer.infill().expect("it has the tokens");
    let ids = infill.prompt(chat_tokenizer.tokenizer(), &asked, 1000).expect("encodes");
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| chat_tokenizer.token_bytes(id).into_owned()).collect();
    Box::leak(String::from_utf8(bytes).expect("UTF-8").into_boxed_str())
}

async fn the_text_between_two_others() {
    let files = [("sum.py", "def add(a, b): pass")];
    let (plain, informed) = (between(&[], "add(", ")"), between(&files, "add(", ")"));
    let answers = [(plain, "1, 2"), (informed, "a, b")];
    let server = Build { special_tokens: &FIM, ..Build::answers(&answers) }.start();
    let asked = json!({"input_prefix": "add(", "input_suffix": ")"});
    let with = |more: Value| {
        let mut body = asked.clone();
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        body
    };
    let whole = server.post("/infill", asked.clone()).await.ok();
    assert_eq!(
        (&whole["content"], &whole["stop_type"], &whole["stop"]),
        (&json!("1, 2"), &json!("eos"), &json!(true))
    );
    let extra = json!({"input_extra": [{"filename": files[0].0, "text": files[0].1, "time": 12}]});
    assert_eq!(server.post("/infill", with(extra)).await.ok()["content"], "a, b");
    // What an editor sends with each request, and the members that it reads.
    let editor = with(json!({
        "prompt": "1,", "n_predict": 64, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": true,
        "t_max_predict_ms": 1000, "response_fields": ["content", "timings/predicted_n"],
    }));
    let as_text = with(json!({"samplers": "top_k;infill"}));
    assert_eq!(server.post("/infill", as_text).await.headers["x-llmctl-ignored"], "samplers");
    let reply = server.post("/infill", editor).await;
    assert_eq!(reply.headers["x-llmctl-ignored"], "cache_prompt, samplers, t_max_predict_ms");
    let reply = reply.ok();
    assert_eq!(reply["content"], " 2", "behind what is there of the text");
    assert_eq!(reply.as_object().map(|members| members.len()), Some(2), "{reply}");
    assert!(reply["timings/predicted_n"].is_u64(), "{reply}");
    let warms = server.post("/infill", with(json!({"n_predict": 0}))).await.ok();
    assert_eq!((&warms["content"], &warms["tokens_predicted"]), (&json!(""), &json!(0)), "{warms}");
    let session = server.call(Method::POST, "/infill", &[("x-session-id", "s")], Some(asked.clone())).await;
    assert_eq!((session.error().0, session.error().2.as_str()), (400, "session_id"));
    let stream = server.post("/infill", with(json!({"stream": true, "n_predict": 2}))).await;
    let events: Vec<Value> = stream
        .text
        .split("\n\n")
        .filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok())
        .collect();
    let (last, before) = events.split_last().expect("events");
    let text: String = before.iter().filter_map(|event| event["content"].as_str()).collect();
    assert!("1, 2".starts_with(&text) && !text.is_empty(), "{text}");
    assert_eq!((&last["stop_type"], &last["tokens_predicted"]), (&json!("limit"), &json!(2)));
    let completion = json!({"prompt": "add(", "suffix": ")"});
    assert_eq!(complete(&server, completion).await["choices"][0]["text"], "1, 2", "OpenAI's form of it");
    let missing = server.post("/infill", json!({"input_prefix": "x"})).await;
    assert_eq!((missing.error().0, missing.error().2.as_str()), (422, "input_suffix"));
    let without = Build::default().start().post("/infill", asked).await;
    assert_eq!((without.error().0, without.error().2.as_str()), (400, "input_prefix"));
}

both_kinds! {
    the_text_between_two_others,
    the_model_by_other_names,
    special_tokens_in_messages_are_refused_where_the_operator_says_so,
    a_text_goes_on,
    a_text_as_it_goes_on,
    several_prompts_with_several_choices,
    log_probabilities_of_a_text,
    what_a_completion_refuses,
    choices_of_a_text_have_a_seed_each,
    the_model_by_its_name,
    text_to_tokens_and_back,
    the_tokenizer_by_its_configuration,
    a_conversation_to_its_prompt,
}
