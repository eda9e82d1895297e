//! Promise: one server has many models, each loaded when a request names it and unloaded when others need its memory; the budget
//! holds, sessions come back warm, and the end of one model's engine is nothing to the others.

use std::fs;

use crate::common::prelude::*;
use crate::serve_ops::binary::{Serving, post, signal, start_as_told};
use crate::serve_ops::client::{Reply, ask, get};

fn parity(name: &str) -> String {
    parity_folder().join(name).to_string_lossy().into_owned()
}

fn serve(args: &[&str]) -> Serving {
    serve_in(Place::new(), args)
}

fn serve_in(place: Place, args: &[&str]) -> Serving {
    start_as_told(place, args).0
}

/// A server with the models `llama` and `qwen3`.
fn two(args: &[&str]) -> Serving {
    let models = ["llama", "qwen3"].map(parity);
    serve(&[&["--model", &models[0], "--model", &models[1]], args].concat())
}

impl Serving {
    fn completion(&self, model: &str) -> Reply {
        let body = json!({"model": model, "prompt": "hello", "max_tokens": 4, "seed": 1, "temperature": 0});
        post(self.address, "/v1/completions", &body)
    }

    fn change(&self, model: &str, change: &str) -> Reply {
        let path = format!("/v1/models/{model}/{change}");
        ask(self.address, &format!("POST {path} HTTP/1.1\r\nHost: {}", self.address), "")
    }

    fn stop(self) -> Option<i32> {
        signal(&self.child, libc::SIGTERM);
        self.end().0.code()
    }
}

/// Returns what `GET /v1/models` says of a model.
fn listed(at: SocketAddr, id: &str) -> Value {
    let list = get(at, "/v1/models").json();
    let models = list["data"].as_array().cloned().unwrap_or_default();
    models.into_iter().find(|model| model["id"] == id).unwrap_or_else(|| panic!("{id} in {list}"))
}

fn state(at: SocketAddr, id: &str) -> String {
    listed(at, id)["status"]["value"].as_str().unwrap_or_default().to_owned()
}

fn states(at: SocketAddr) -> [String; 2] {
    ["llama", "qwen3"].map(|id| state(at, id))
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..3000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("not within a minute: {what}");
}

#[test]
fn a_model_is_loaded_when_a_request_names_it() {
    let server = two(&[]);
    let at = server.address;
    assert_eq!((states(at), get(at, "/ready").status), (["unloaded", "unloaded"].map(str::to_owned), 200));
    let unloaded = listed(at, "qwen3");
    assert_eq!((&unloaded["max_model_len"], &unloaded["meta"]), (&Value::Null, &Value::Null));
    let answer = server.completion("qwen3");
    assert_eq!((answer.status, &answer.json()["model"]), (200, &json!("qwen3")), "{answer:?}");
    assert_eq!(states(at), ["unloaded", "loaded"]);
    assert!(listed(at, "qwen3")["max_model_len"].is_u64());
    let unnamed = post(at, "/v1/completions", &json!({"prompt": "hello", "max_tokens": 2}));
    assert_eq!(unnamed.json()["model"], "llama", "the first one");
    let unknown = server.completion("mistral");
    unknown.check(404, "model_not_found");
    assert!(unknown.body.contains("llama") && unknown.body.contains("qwen3"), "{unknown:?}");
    let malformed = post(at, "/v1/completions", &json!({"model": "llama", "prompt": 7}));
    assert_eq!(malformed.status, 422, "{malformed:?}");
    assert_eq!(get(at, "/health").json()["models"], json!({"llama": "loaded", "qwen3": "loaded"}));
    let metrics = get(at, "/metrics").body;
    for model in ["llama", "qwen3"] {
        let line = format!("vllm:generation_tokens_total{{model_name=\"{model}\",engine=\"0\"}} ");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
    assert_eq!(get(at, "/props?model=qwen3").json()["model_alias"], "qwen3");
    assert_eq!(server.stop(), Some(0));
}

#[test]
fn models_are_loaded_and_unloaded_by_hand() {
    let server = two(&["--pin", "llama"]);
    let at = server.address;
    assert_eq!(states(at), ["loaded", "unloaded"], "what is pinned is there from the start");
    for _ in 0..2 {
        let loaded = server.change("qwen3", "load");
        assert_eq!((loaded.status, &loaded.json()["status"]["value"]), (200, &json!("loaded")), "{loaded:?}");
    }
    for _ in 0..2 {
        let unloaded = server.change("qwen3", "unload");
        assert_eq!(unloaded.json()["status"]["value"], "unloaded", "{unloaded:?}");
    }
    server.change("llama", "unload").check(409, "model_pinned");
    server.change("mistral", "load").check(404, "model_not_found");
    server.change("llama", "explode").check(404, "unknown_url");
    assert_eq!(server.stop(), Some(0));
    let alone = serve(&["--model", &parity("llama")]);
    assert_eq!(alone.change("llama", "load").status, 200);
    alone.change("llama", "unload").check(409, "model_pinned");
    assert_eq!(state(alone.address, "llama"), "loaded");
}

#[test]
fn an_idle_model_leaves_after_keep_alive() {
    let server = serve(&["--model", &parity("llama"), "--keep-alive", "300ms"]);
    assert_eq!(server.completion("llama").status, 200);
    eventually("it is unloaded", || state(server.address, "llama") == "unloaded");
    assert_eq!(server.completion("llama").status, 200, "and comes back");
}

/// A folder with two models that chat: the one inside llmctl, twice.
fn guides(place: &Place) -> PathBuf {
    let folder = place.path("models");
    fs::create_dir(&folder).expect("a folder");
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("assets/guide/guide.gguf");
    for name in ["first", "second"] {
        fs::copy(&file, folder.join(format!("{name}.gguf"))).expect("a copy");
    }
    folder
}

fn chat(at: SocketAddr, model: &str, session: &str, messages: &Value) -> Value {
    let body = json!({
        "model": model, "session_id": session, "messages": messages, "max_tokens": 8, "temperature": 0,
    });
    let reply = post(at, "/v1/chat/completions", &body);
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.json()
}

/// Returns the number before `MiB` after a text.
fn mebibytes_after(text: &str, begin: &str) -> f64 {
    let rest = text.split(begin).nth(1).unwrap_or_else(|| panic!("{begin:?} in {text}"));
    rest.split(" MiB").next().and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

#[test]
fn a_model_makes_room_for_another_and_its_sessions_come_back_warm() {
    let place = Place::new();
    let folder = guides(&place).to_string_lossy().into_owned();
    let small = serve_in(place, &["--models-folder", &folder, "--ctx", "1024", "--model-memory", "1M"]);
    // KV on disk is exact to the page.
    let asked = "What does llmctl serve do, and how do I stop it? ".repeat(12);
    let question = json!([{"role": "user", "content": asked}]);
    let body = json!({"model": "first", "messages": question});
    let refused = post(small.address, "/v1/chat/completions", &body);
    refused.check(503, "insufficient_memory");
    let message = refused.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("there are 1.0 MiB (--model-memory 1.0 MiB)"), "{message}");
    let needed = mebibytes_after(&message, "needs ");
    signal(&small.child, libc::SIGTERM);
    small.child.wait_with_output().expect("it ends");

    let budget = format!("{}", (needed * 1.5 * 1048576.0) as u64);
    let server =
        serve_in(small.place, &["--models-folder", &folder, "--ctx", "1024", "--model-memory", &budget]);
    let at = server.address;
    let first = chat(at, "first", "s", &question);
    let said = first["choices"][0]["message"]["content"].clone();
    chat(at, "second", "other", &question);
    assert_eq!((state(at, "first"), state(at, "second")), ("unloaded".to_owned(), "loaded".to_owned()));
    let session = get(at, "/v1/sessions/s").json();
    assert_eq!((&session["turns"], &session["resident_tokens"]), (&json!(1), &json!(0)), "{session}");
    let more = json!([
        question[0], {"role": "assistant", "content": said}, {"role": "user", "content": "And how do I start it?"},
    ]);
    let second = chat(at, "first", "s", &more);
    let usage = &second["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default();
    let before = first["usage"]["prompt_tokens"].as_u64().unwrap_or(u64::MAX);
    assert!(cached > 0 && cached + 64 > before, "{usage}");
    assert_eq!(second["timings"]["resume_reason"], "restored", "{second}");
    assert_eq!(state(at, "second"), "unloaded");
    assert_eq!(get(at, "/v1/sessions").json()["data"].as_array().map(Vec::len), Some(2));
    let gone = ask(at, &format!("DELETE /v1/sessions/other HTTP/1.1\r\nHost: {at}"), "");
    assert_eq!(gone.status, 200, "{gone:?}: its model is not loaded");
    assert_eq!(server.stop(), Some(0));
}

#[test]
fn wrong_flags_are_refused_by_name() {
    let models = ["llama", "qwen3"].map(parity);
    let both = ["--model", &models[0], "--model", &models[1]];
    let run = |args: &[&str]| Place::new().run(&[&["serve", "--port", "0"], args].concat());
    run(&[&both[..], &["--model-id", "x"]].concat()).check(2, "--model-id is for one model");
    run(&[&both[..], &["--bos-id", "1"]].concat()).check(2, "--bos-id is for one model");
    run(&[&both[..], &["--pin", "mistral"]].concat()).check(2, "--pin mistral: the models are llama, qwen3");
    run(&[&both[..], &["--model", "./nothing.gguf"]].concat()).check(66, "nothing.gguf");
    run(&["--models-folder", "./nowhere"]).check(66, "--models-folder");
    run(&["--model", &models[0], "--pin", "llama", "--model-memory", "1K"]).check(1, "needs");
    let place = Place::new();
    fs::create_dir(place.path("llama")).expect("a folder");
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        fs::copy(PathBuf::from(&models[0]).join(file), place.path("llama").join(file)).expect("a copy");
    }
    let twice = ["serve", "--port", "0", "--model", &models[0], "--model", "./llama"];
    place.run(&twice).check(2, "two models are called \"llama\"");
}

#[test]
fn a_configuration_file_names_several_models() {
    let place = Place::new();
    let [first, second] = ["llama", "qwen3"].map(parity);
    let text = format!("[serve]\nmodel = [{first:?}, \"small\"]\n[aliases]\nsmall = {second:?}\n");
    place.write("llmctl.toml", text);
    let server = serve_in(place, &[]);
    let by_alias = server.completion("small");
    assert_eq!(by_alias.status, 200, "{by_alias:?}");
    assert_eq!(states(server.address), ["unloaded", "loaded"]);
}

/// A program for workers that waits before it begins.
#[cfg(target_os = "linux")]
fn slow_worker(place: &Place) -> String {
    let program = env!("CARGO_BIN_EXE_llmctl");
    let path = place.write("worker.sh", format!("#!/bin/sh\nsleep 4\nexec {program} \"$@\"\n"));
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("a mode");
    path.to_string_lossy().into_owned()
}

#[cfg(target_os = "linux")]
#[test]
fn a_stream_says_that_its_model_is_loading() {
    use std::process::Stdio;

    use crate::serve_ops::binary::until_listening;
    use crate::serve_ops::client::connect;

    let place = Place::new();
    let worker = slow_worker(&place);
    let models = ["llama", "qwen3"].map(parity);
    let args = ["serve", "--port", "0", "--isolate", "--model", &models[0], "--model", &models[1]];
    let mut command = place.command(&args);
    command.env("LLMCTL_WORKER_PROGRAM", &worker).stderr(Stdio::piped());
    let mut child = command.spawn().expect("llmctl starts");
    let said = until_listening(child.stderr.as_mut().expect("a pipe"));
    let address = said.last().and_then(|line| line.strip_prefix("listening on http://")).expect("an address");
    let address: SocketAddr = address.parse().expect("an address");
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json");
    let body = json!({"model": "qwen3", "prompt": "hello", "max_tokens": 3, "stream": true});
    let mut client = connect(address);
    let reply = client.ask(&head, &body.to_string());
    assert_eq!((reply.status, reply.header("content-type")), (200, "text/event-stream; charset=utf-8"));
    let comment = reply.body.find(": loading qwen3, ").unwrap_or_else(|| panic!("{reply:?}"));
    let data = reply.body.find("data: {").unwrap_or_else(|| panic!("{reply:?}"));
    assert!(comment < data && reply.body.ends_with("data: [DONE]\n\n"), "{reply:?}");
    // A refusal after the head is an event, in the API's form.
    let wrong = json!({"model": "llama", "prompt": "hello", "max_tokens": -3, "stream": true});
    let refused = connect(address).ask(&head, &wrong.to_string());
    assert!(
        refused.body.contains("data: {\"error\":") && refused.body.ends_with("data: [DONE]\n\n"),
        "{refused:?}"
    );
    signal(&child, libc::SIGTERM);
    assert_eq!(child.wait().ok().and_then(|status| status.code()), Some(0));
}

/// Returns the child processes.
#[cfg(target_os = "linux")]
fn children(of: u32) -> Vec<i32> {
    let path = format!("/proc/{of}/task");
    let tasks = fs::read_dir(path).expect("a process").filter_map(Result::ok);
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let text: String = lists.collect::<Vec<_>>().join(" ");
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

#[cfg(target_os = "linux")]
#[test]
fn the_end_of_one_models_worker_is_nothing_to_the_others() {
    let server = two(&["--isolate"]);
    let at = server.address;
    assert_eq!(server.completion("llama").status, 200);
    let [worker] = children(server.child.id())[..] else { panic!("one worker") };
    let expected = server.completion("qwen3").json()["choices"][0]["text"].clone();
    assert_eq!(children(server.child.id()).len(), 2);
    // SAFETY: sends a signal to a process that the server has not waited for.
    assert_eq!(unsafe { libc::kill(worker, libc::SIGKILL) }, 0);
    for _ in 0..5 {
        let answer = server.completion("qwen3");
        assert_eq!((answer.status, &answer.json()["choices"][0]["text"]), (200, &expected), "{answer:?}");
    }
    eventually("the other comes back", || server.completion("llama").status == 200);
    let health = get(at, "/health").json();
    let restarts = |model: &str| {
        let workers = health["workers"].as_array().cloned().unwrap_or_default();
        workers.into_iter().find(|worker| worker["model"] == model).map(|worker| worker["restarts"].clone())
    };
    assert_eq!((restarts("llama"), restarts("qwen3")), (Some(json!(1)), Some(json!(0))), "{health}");
    assert_eq!(server.change("qwen3", "unload").status, 200);
    assert_eq!(children(server.child.id()).len(), 1, "its process has ended");
    assert_eq!(server.stop(), Some(0));
}

#[test]
fn run_connects_to_a_running_server_and_answers_with_the_same_bits() {
    let place = Place::new();
    let folder = guides(&place).to_string_lossy().into_owned();
    let model = PathBuf::from(&folder).join("second.gguf").to_string_lossy().into_owned();
    let question = "What is a session in llmctl?";
    let run = |place: &Place, more: &[&str]| {
        let args = ["run", question, "--model", &model, "--ctx", "1024", "--seed", "7", "--max-tokens", "24"];
        place.run(&[&args[..], &["--temperature", "0.9"], more].concat())
    };
    let alone = run(&place, &["--connect"]);
    alone.check(0, "no server of yours is running; the model is loaded here");
    std::os::unix::fs::symlink("nowhere", PathBuf::from(&folder).join("dangling.gguf")).expect("a link");
    let server = serve_in(place, &["--models-folder", &folder, "--ctx", "1024"]);
    let connected = run(&server.place, &["--connect"]);
    connected.check(0, "connected to http://127.0.0.1:").check(0, "which has second");
    assert_eq!((&connected.stdout, connected.stdout.is_empty()), (&alone.stdout, false));
    assert_eq!(state(server.address, "second"), "loaded", "it was computed there");
    let other = run(&server.place, &["--connect", "--kv-type", "f32"]);
    other.check(0, "no running server has second with these settings; the model is loaded here");
    run(&server.place, &["--connect", "--engine", "http://127.0.0.1:1"]).check(2, "cannot be used with");
    let Serving { child, place, .. } = server;
    let records = || fs::read_dir(place.path(".local/state/llmctl/servers")).expect("a folder").count();
    assert_eq!(records(), 1);
    signal(&child, libc::SIGTERM);
    child.wait_with_output().expect("it ends");
    assert_eq!(records(), 0);
}

#[test]
fn a_wrong_model_is_refused_before_anything_is_loaded() {
    let server = two(&[]);
    let at = server.address;
    let refused = post(at, "/v1/completions", &json!({"model": 7, "prompt": "hello"}));
    refused.check(422, "invalid_value");
    assert_eq!(states(at), ["unloaded", "unloaded"]);
    for path in ["/props?model=qwen%33", "/slots?model=qwen3"] {
        let refused = get(at, path);
        refused.check(400, "model_not_loaded");
        assert!(refused.body.contains("/v1/models/qwen3/load"), "a query is decoded: {refused:?}");
    }
    get(at, "/props").check(400, "model_not_loaded");
    assert_eq!(states(at), ["unloaded", "unloaded"], "a question about the status loads nothing");
    assert_eq!(server.stop(), Some(0));
}

#[test]
fn a_folder_may_hold_a_model_that_a_flag_names_and_one_of_vectors() {
    let Some(fixtures) = fixtures() else { return };
    let place = Place::new();
    let folder = guides(&place);
    let encoder = folder.join("aaa");
    fs::create_dir_all(encoder.join("1_Pooling")).expect("a folder");
    for file in
        ["config.json", "model.safetensors", "modules.json", "tokenizer.json", "1_Pooling/config.json"]
    {
        fs::copy(fixtures.join("encoders/bert-cls").join(file), encoder.join(file)).expect("a copy");
    }
    let folder = folder.to_string_lossy().into_owned();
    let again = format!("{folder}/../{}/first.gguf", folder.rsplit('/').next().expect("a name"));
    let server = serve_in(place, &["--models-folder", &folder, "--model", &again]);
    let at = server.address;
    let ids: Vec<Value> = get(at, "/v1/models").json()["data"].as_array().expect("a list").clone();
    let ids: Vec<&str> = ids.iter().filter_map(|model| model["id"].as_str()).collect();
    assert_eq!(ids, ["first", "aaa", "second"]);
    let texts = post(at, "/v1/embeddings", &json!({"input": "hello"}));
    assert_eq!((texts.status, &texts.json()["model"]), (200, &json!("aaa")), "{texts:?}");
    assert_eq!(server.stop(), Some(0));
}
