//! Promise: Ollama's native API and llama.cpp's native routes answer from the same pipeline as the others: streams are lines of
//! JSON with counts and times at their end, what cannot be honoured is refused by name, and no context is cut.

use crate::common::prelude::*;
use crate::common::server::{MODEL, QWENISH, Reply, both_kinds};
use crate::serve_ops::binary::{Serving, post, start_as_told};
use crate::serve_ops::client::{ask, get};

const FIM: [&str; 3] = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"];
const NAME: &str = "org/toy:latest";

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// The lines of a stream: the last one, and those before it.
fn lines(reply: &Reply) -> (Value, Vec<Value>) {
    assert_eq!(
        (reply.status, &reply.headers["content-type"]),
        (StatusCode::OK, &"application/x-ndjson".parse().expect("a type"))
    );
    let mut lines: Vec<Value> =
        reply.text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let last = lines.pop().expect("a line");
    assert!(last["done"] == true && lines.iter().all(|line| line["done"] == false), "{}", reply.text);
    (last, lines)
}

fn joined(lines: &[Value], pointer: &str) -> String {
    lines.iter().filter_map(|line| line.pointer(pointer)?.as_str()).collect()
}

async fn a_chat_is_a_stream_of_lines() {
    let server = Build::answers(&[("sky blue?", "It scatters light.")]).start();
    let asked = json!({"model": MODEL, "messages": [user("sky blue?")]});
    let (last, before) = lines(&server.post("/api/chat", asked.clone()).await);
    assert_eq!(joined(&before, "/message/content"), "It scatters light.");
    assert_eq!(
        (&last["done_reason"], &last["model"], &last["message"]["content"]),
        (&json!("stop"), &json!(NAME), &json!(""))
    );
    for name in
        ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "prompt_eval_count"]
    {
        assert!(last[name].is_u64(), "{name}: {last}");
    }
    let mut whole = asked;
    whole["stream"] = false.into();
    let whole = server.post("/api/chat", whole).await.ok();
    assert_eq!(
        (&whole["message"]["content"], &whole["eval_count"]),
        (&json!("It scatters light."), &last["eval_count"])
    );
    let short = json!({"model": NAME, "messages": [{"role": "USER", "content": "sky blue?"}], "stream": false, "options": {"num_predict": 2}});
    let short = server.post("/api/chat", short).await;
    assert!(!short.headers.contains_key("x-llmctl-ignored"), "a tag and capitals are no other names");
    assert_eq!(short.ok()["done_reason"], "length");
    let begun = json!({"messages": [user("sky blue?"), {"role": "assistant", "content": "It scatters"}], "stream": false});
    assert_eq!(server.post("/api/chat", begun).await.ok()["message"]["content"], " light.");
}

async fn thoughts_and_calls_have_places_of_their_own() {
    let call = "hm\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let build = Build::answers(&[("call", call), ("think", "hm\n</think>\n\nyes"), ("plain", "yes")]);
    let server = Build { template: Some(QWENISH.to_owned()), ..build }.start();
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]);
    let reply =
        server.post("/api/chat", json!({"messages": [user("call")], "tools": tools, "think": true})).await;
    let (last, before) = lines(&reply);
    assert_eq!(joined(&before, "/message/thinking").trim(), "hm", "{}", reply.text);
    let calls: Vec<&Value> = before.iter().filter_map(|line| line["message"].get("tool_calls")).collect();
    assert_eq!(
        (calls.len(), &calls[0][0]["function"]),
        (1, &json!({"index": 0, "name": "f", "arguments": {"a": 1}}))
    );
    assert_eq!(last["done_reason"], "stop");
    let whole = json!({"messages": [user("think")], "stream": false, "think": true});
    let whole = server.post("/api/chat", whole).await.ok();
    assert_eq!(
        (whole["message"]["thinking"].as_str().map(str::trim), &whole["message"]["content"]),
        (Some("hm"), &json!("yes"))
    );
    let history = json!([
        user("x"),
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"index": 0, "name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "tool_name": "f", "content": "2"},
        user("think"),
    ]);
    assert_eq!(
        server.post("/api/chat", json!({"messages": history, "stream": false, "think": true})).await.ok()["message"]
            ["content"],
        "yes"
    );
    let plain = json!({"messages": [user("plain")], "think": false, "stream": false});
    let plain = server.post("/api/chat", plain).await.ok();
    assert_eq!((&plain["message"]["content"], plain["message"].get("thinking")), (&json!("yes"), None));
}

async fn a_prompt_is_a_question_a_text_or_between_two() {
    let server = Build {
        special_tokens: &FIM,
        ..Build::answers(&[("One", "1"), ("Two", "2"), ("Once upon", " a time")])
    }
    .start();
    let ask = |more: Value| {
        let mut body = json!({"stream": false});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        server.post("/api/generate", body)
    };
    let first = ask(json!({"prompt": "One"})).await.ok();
    assert_eq!((&first["response"], &first["done_reason"]), (&json!("1"), &json!("stop")));
    let second = ask(json!({"prompt": "Two", "context": first["context"], "system": "Be brief."})).await.ok();
    assert_eq!(second["response"], "2");
    let bytes: Vec<u8> = second["context"]
        .as_array()
        .expect("a context")
        .iter()
        .map(|byte| byte.as_u64().expect("a byte") as u8)
        .collect();
    let kept: Value = serde_json::from_slice(&bytes).expect("JSON");
    let roles: Vec<&str> =
        kept["messages"].as_array().expect("messages").iter().filter_map(|m| m["role"].as_str()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    let raw = ask(json!({"prompt": "Once upon", "raw": true})).await.ok();
    assert_eq!((&raw["response"], raw.get("context")), (&json!(" a time"), None));
    let infill = ask(json!({"prompt": "a", "suffix": "b", "options": {"num_predict": 2}})).await;
    assert_eq!(infill.status, StatusCode::OK, "{}", infill.text);
    for (more, code, param) in [
        (json!({"prompt": "x", "context": [1, 2, 300]}), 400, "context"),
        (json!({"prompt": "x", "context": [123, 125]}), 422, "context.messages"),
        (json!({"prompt": "x", "raw": true, "system": "s"}), 400, "system"),
        (json!({"prompt": "x", "template": "{{ .Prompt }}"}), 400, "template"),
        (json!({"prompt": "x", "images": ["aGk="]}), 400, "images[0]"),
        (json!({"prompt": "x", "options": {"no_such": 2}}), 400, "options.no_such"),
        (json!({"prompt": "x", "format": "yaml"}), 422, "format"),
        (json!({"prompt": "x ".repeat(9000)}), 400, ""),
    ] {
        let reply = ask(more.clone()).await;
        let (status, _, named) = reply.error();
        assert_eq!((status, named.as_str()), (code, param), "{more}: {}", reply.text);
    }
    let raw = ask(json!({"prompt": "One", "raw": true, "think": true, "options": {"penalize_newline": false, "stop": [""]}})).await;
    assert_eq!(raw.headers["x-llmctl-ignored"], "options.penalize_newline, options.stop, think");
    let asked = json!({"model": MODEL, "prompt": "One", "raw": true, "stream": false});
    let session = server.call(Method::POST, "/api/generate", &[("x-session-id", "s")], Some(asked)).await;
    assert_eq!(session.status, StatusCode::BAD_REQUEST, "{}", session.text);
    let hints = ask(json!({"prompt": "One", "truncate": true, "shift": true, "keep_alive": "5m", "options": {"num_ctx": 99}})).await;
    assert_eq!(hints.headers["x-llmctl-ignored"], "keep_alive, options.num_ctx, shift, truncate");
}

async fn a_request_without_a_text_loads_the_model() {
    let server = Build::default().start();
    for (path, body) in
        [("/api/generate", json!({"model": MODEL})), ("/api/chat", json!({"model": MODEL, "messages": []}))]
    {
        let reply = server.post(path, body).await.ok();
        assert_eq!(
            (&reply["done"], &reply["done_reason"]),
            (&json!(true), &json!("load")),
            "{path}: {reply}"
        );
    }
}

async fn the_model_is_listed_and_shown() {
    let settings =
        ServeSettings { aliases: vec!["other:3b".to_owned(), "*".to_owned()], ..ServeSettings::default() };
    let server = Build { settings, special_tokens: &FIM, ..Build::default() }.start();
    let tags = server.get("/api/tags").await.ok();
    let names: Vec<&str> =
        tags["models"].as_array().expect("models").iter().filter_map(|m| m["name"].as_str()).collect();
    assert_eq!(names, [NAME, "other:3b"]);
    let running = server.get("/api/ps").await.ok()["models"][0].clone();
    assert_eq!(
        (&running["expires_at"], &running["context_length"]),
        (&json!("9999-12-31T23:59:59Z"), &json!(4096)),
        "{running}"
    );
    let shown = server.post("/api/show", json!({"name": "other:3b", "verbose": true})).await.ok();
    assert_eq!(
        (&shown["details"]["family"], &shown["model_info"]["llama.context_length"]),
        (&json!("llama"), &json!(4096)),
        "{shown}"
    );
    let capabilities = shown["capabilities"].as_array().expect("a list");
    assert!(
        ["completion", "tools", "insert"].iter().all(|name| capabilities.contains(&json!(name))),
        "{shown}"
    );
    assert!(server.get("/api/version").await.ok()["version"].is_string());
    let refused = server.call(Method::DELETE, "/api/delete", &[], Some(json!({"model": MODEL}))).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN, "{}", refused.text);
    let refused = server.post("/api/copy", json!({"source": MODEL, "destination": "other"})).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN, "{}", refused.text);
    let pull = |name: &str| server.post("/api/pull", json!({"model": name}));
    assert_eq!(pull("org/other").await.status, StatusCode::FORBIDDEN);
    assert_eq!(lines_of_pull(&pull(MODEL).await), [json!({"status": "success"})]);
}

fn lines_of_pull(reply: &Reply) -> Vec<Value> {
    reply.text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

async fn llama_cpps_completion_tells_probabilities() {
    let server = Build::answers(&[("Roses are", " red"), ("Violets are", " blue")]).start();
    let asked = json!({"prompt": "Roses are", "n_predict": 2, "n_probs": 2, "return_tokens": true, "cache_prompt": true, "id_slot": 0});
    let reply = server.post("/completion", asked.clone()).await;
    assert_eq!(reply.headers["x-llmctl-ignored"], "cache_prompt, id_slot");
    let whole = reply.ok();
    assert!(" red".starts_with(whole["content"].as_str().expect("text")), "{whole}");
    let probs = whole["completion_probabilities"].as_array().expect("a list");
    assert_eq!((probs.len(), probs[0]["top_logprobs"].as_array().map(Vec::len)), (2, Some(2)));
    assert_eq!(
        (&probs[0]["id"], &probs[0]["top_logprobs"][0]["id"]),
        (&whole["tokens"][0], &whole["tokens"][0])
    );
    let mut streamed = asked;
    streamed["stream"] = true.into();
    let text = server.post("/completion", streamed).await.text;
    let events: Vec<Value> = text
        .split("\n\n")
        .filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok())
        .collect();
    assert_eq!(joined(&events, "/content"), whole["content"].as_str().expect("text"));
    let told: Vec<Value> = events
        .iter()
        .flat_map(|event| event["completion_probabilities"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!((&told, events.last().map(|event| &event["stop"])), (probs, Some(&json!(true))));
    let both = server.post("/completion", json!({"prompt": ["Roses are", "Violets are"]})).await.ok();
    assert_eq!(
        (&both[0]["content"], &both[1]["content"], &both[1]["index"]),
        (&json!(" red"), &json!(" blue"), &json!(1))
    );
    let warms = server.post("/completion", json!({"prompt": "Roses are", "n_predict": 0})).await.ok();
    assert_eq!((&warms["content"], &warms["tokens_predicted"]), (&json!(""), &json!(0)), "{warms}");
    let first = whole["tokens"][0].clone();
    let banned = json!({"prompt": "Roses are", "n_predict": 1, "return_tokens": true, "logit_bias": [[first, false], [15, 1.0]]});
    assert_ne!(server.post("/completion", banned).await.ok()["tokens"][0], whole["tokens"][0]);
    for pairs in [json!([[1]]), json!([["a", 1]]), json!([[1, 2, 3]])] {
        let refused = server.post("/completion", json!({"prompt": "x", "logit_bias": pairs})).await;
        assert_eq!((refused.error().0, refused.error().2.as_str()), (422, "logit_bias"), "{pairs}");
    }
    let slots = server.get("/slots").await.ok();
    assert!(
        slots.as_array().is_some_and(|slots| !slots.is_empty() && slots[0]["is_processing"] == false),
        "{slots}"
    );
    assert_eq!(server.get("/lora-adapters").await.ok(), json!([]));
    let refused = server.post("/lora-adapters", json!([{"id": 0, "scale": 1}])).await;
    assert_eq!((refused.error().0, refused.error().2.as_str()), (400, "lora"));
    let lora = server.post("/completion", json!({"prompt": "x", "lora": [{"id": 0, "scale": 1}]})).await;
    assert_eq!((lora.error().0, lora.error().2.as_str()), (400, "lora[0].id"));
}

both_kinds! {
    a_chat_is_a_stream_of_lines,
    thoughts_and_calls_have_places_of_their_own,
    a_prompt_is_a_question_a_text_or_between_two,
    a_request_without_a_text_loads_the_model,
    the_model_is_listed_and_shown,
    llama_cpps_completion_tells_probabilities,
}

fn serve(args: &[&str]) -> (Serving, Vec<String>) {
    let models = ["llama", "qwen3"].map(|name| parity_folder().join(name).to_string_lossy().into_owned());
    start_as_told(Place::new(), &[&["--model", &models[0], "--model", &models[1]], args].concat())
}

fn running(at: SocketAddr) -> Vec<String> {
    let models = get(at, "/api/ps").json()["models"].take();
    models
        .as_array()
        .expect("models")
        .iter()
        .map(|model| model["name"].as_str().expect("a name").to_owned())
        .collect()
}

fn error(at: SocketAddr, path: &str, body: &Value) -> (u16, String) {
    let reply = post(at, path, body);
    (reply.status, reply.json()["error"].as_str().unwrap_or_default().to_owned())
}

#[test]
fn models_come_and_go_as_ollamas_clients_ask() {
    let server = serve(&[]).0;
    let at = server.address;
    let tags = get(at, "/api/tags").json();
    let names: Vec<&str> =
        tags["models"].as_array().expect("models").iter().filter_map(|m| m["model"].as_str()).collect();
    assert_eq!(names, ["llama:latest", "qwen3:latest"]);
    assert_eq!(tags["models"][1]["details"]["family"], "qwen3", "the headers are read, not the weights");
    let shown = post(at, "/api/show", &json!({"model": "qwen3"})).json();
    assert!(shown["model_info"]["qwen3.context_length"].is_u64(), "{shown}");
    assert_eq!(running(at), [""; 0]);
    let prompt = json!({"model": "qwen3:latest", "prompt": "hello", "raw": true, "stream": false, "options": {"num_predict": 4}});
    assert_eq!(post(at, "/api/generate", &prompt).json()["model"], "qwen3:latest");
    assert_eq!(running(at), ["qwen3:latest"]);
    let unload = post(at, "/api/generate", &json!({"model": "qwen3", "keep_alive": 0}));
    assert_eq!(unload.json()["done_reason"], "unload", "{unload:?}");
    assert_eq!(running(at), [""; 0]);
    let mut leaves = prompt;
    leaves["keep_alive"] = "0s".into();
    assert_eq!(post(at, "/api/generate", &leaves).status, 200);
    let is_gone = || {
        std::thread::sleep(Duration::from_millis(20));
        running(at).is_empty()
    };
    assert!((0..3000).any(|_| is_gone()), "it is unloaded after its answer");
    // It counts until the next request that is answered, of whichever API.
    let expires = || get(at, "/api/ps").json()["models"][0]["expires_at"].as_str().map(str::to_owned);
    let completion = json!({"model": "qwen3", "prompt": "hello", "max_tokens": 2});
    assert_eq!(post(at, "/v1/completions", &completion).status, 200);
    let of_all = expires();
    assert_ne!(
        error(at, "/api/generate", &json!({"model": "qwen3", "prompt": 7, "keep_alive": "1h"})).0,
        200
    );
    assert_eq!(expires(), of_all, "a refused request says nothing");
    leaves["keep_alive"] = "1h".into();
    assert_eq!(post(at, "/api/generate", &leaves).status, 200);
    assert_ne!(expires(), of_all);
    assert_eq!(post(at, "/v1/completions", &completion).status, 200);
    assert_eq!(expires(), of_all);
    assert_eq!(post(at, "/api/generate", &json!({"model": "qwen3", "keep_alive": 0})).status, 200);
    assert_eq!(
        post(at, "/api/generate", &json!({"model": "llama", "keep_alive": "1h"})).json()["done_reason"],
        "load"
    );
    let until =
        get(at, "/api/ps").json()["models"][0]["expires_at"].as_str().map(|time| time.starts_with("20"));
    assert_eq!(until, Some(true));
    let (status, message) = error(at, "/api/chat", &json!({"model": "mistral", "messages": []}));
    assert!(status == 404 && message.contains("mistral"), "{status} {message}");
    let (status, message) =
        error(at, "/api/generate", &json!({"model": "llama", "prompt": "x", "keep_alive": "soon"}));
    assert!(status == 400 && message.contains("keep_alive"), "{status} {message}");
}

#[test]
fn errors_have_ollamas_form_from_every_layer() {
    let server = serve(&["--max-body", "1000"]).0;
    let at = server.address;
    for (path, body, status) in [
        ("/api/chat", json!({"messages": 7}), 400),
        ("/api/chat", json!({"messages": [], "pad": "x".repeat(1000)}), 413),
        ("/api/nothing", json!({}), 404),
        ("/api/tags", json!({}), 405),
        ("/api/pull", json!({"model": "no-owner", "stream": false}), 502),
    ] {
        let (told, message) = error(at, path, &body);
        assert!(told == status && !message.is_empty(), "{path}: {told} {message}");
    }
    let stream = post(at, "/api/pull", &json!({"model": "no-owner"})).body;
    assert!(stream.starts_with("{\"status\":\"pulling manifest\"}\n{\"error\":\"HF_HUB_OFFLINE"), "{stream}");
}

#[test]
fn a_second_port_is_where_ollamas_clients_look() {
    let place = Place::new();
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|port| port.local_addr()).expect("a port");
    let model = parity_folder().join("llama").to_string_lossy().into_owned();
    let port = free.port().to_string();
    let (server, said) = start_as_told(place, &["--model", &model, "--ollama-port", &port]);
    assert!(
        said.iter().any(|line| line.contains(&format!("Ollama's clients find the server at http://{free}"))),
        "{said:?}"
    );
    assert_eq!(get(free, "/").body, "Ollama is running");
    assert_eq!(get(server.address, "/").json()["name"], "llmctl");
    let head = ask(free, &format!("GET / HTTP/1.1\r\nAccept: text/html\r\nHost: {free}"), "");
    assert!(head.body.starts_with("<!"), "a browser gets the page");
    assert_eq!(get(free, "/api/tags").json()["models"][0]["name"], "llama:latest");
}
