//! `serve --isolate` and `--workers` as processes: workers are killed, stopped and exchanged for liars, and no client ever gets a
//! wrong answer, or none.

use std::sync::atomic::AtomicBool;
use std::thread;

use super::app::{eventually, metric};
use super::binary::{Serving, model, post, signal, start};
use super::client::{Reply, connect, get};
use crate::common::prelude::*;

/// A server with workers, whose standard error is read.
struct Isolated {
    child: Child,
    at: SocketAddr,
    said: Arc<Mutex<String>>,
    /// Lives as long as the server.
    _place: Place,
}

const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]";

impl Isolated {
    fn start(args: &[&str]) -> Self {
        Self::start_in(Place::new(), args)
    }

    fn start_in(place: Place, args: &[&str]) -> Self {
        place.write("t.jinja", TEMPLATE);
        let Serving { mut child, address, place } =
            start(place, &[&["--chat-template", "t.jinja"], args].concat());
        let said = Arc::new(Mutex::new(String::new()));
        let (heard, stderr) = (Arc::clone(&said), child.stderr.take().expect("a pipe"));
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                heard.lock().expect("free").push_str(&format!("{line}\n"));
            }
        });
        Self { child, at: address, said, _place: place }
    }

    /// Its worker processes.
    fn workers(&self) -> Vec<u32> {
        children(self.child.id())
    }

    fn worker(&self) -> u32 {
        let workers = self.workers();
        assert_eq!(workers.len(), 1, "{workers:?}");
        workers[0]
    }

    fn said(&self) -> String {
        self.said.lock().expect("free").clone()
    }

    fn metric(&self, name: &str) -> f64 {
        metric(&get(self.at, "/metrics").body, name)
    }

    /// Waits until all workers are up, after so many restarts of all together.
    fn is_whole_after(&self, restarts: u64) {
        eventually("all workers are back", || {
            let health = get(self.at, "/health").json();
            let workers = health["workers"].as_array().expect("workers").clone();
            let num_restarts: u64 = workers.iter().filter_map(|worker| worker["restarts"].as_u64()).sum();
            num_restarts >= restarts && workers.iter().all(|worker| worker["state"] == "up")
        });
    }

    fn end(mut self) -> (Option<i32>, String) {
        signal(&self.child, libc::SIGTERM);
        let code = self.child.wait().expect("it ends").code();
        (code, self.said())
    }
}

/// A test that fails leaves nobody behind.
impl Drop for Isolated {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Number of the parent, and state, of a process.
fn stat(pid: u32) -> Option<(u32, String)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?.to_owned();
    Some((fields.next()?.parse().ok()?, state))
}

fn children(parent: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").expect("Linux has it");
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|&pid| stat(pid).is_some_and(|(of, state)| of == parent && state != "Z")).collect()
}

/// Whether a thread of it is an engine.
fn has_engine(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let name = |path: PathBuf| std::fs::read_to_string(path.join("comm")).unwrap_or_default();
    threads.filter_map(Result::ok).any(|thread| name(thread.path()) == "engine\n")
}

fn is_gone(pid: u32) -> bool {
    stat(pid).is_none_or(|(_, state)| state == "Z")
}

fn send(pid: u32, number: i32) {
    let pid = i32::try_from(pid).expect("a process id");
    // SAFETY: sends a signal to a process of this test; that it has ended already is no error here.
    unsafe { libc::kill(pid, number) };
}

/// The result of a request.
#[derive(Debug, Clone, PartialEq)]
enum Ending {
    Answer(String),
    /// Refused or failed, with what was said before, in good form.
    Error {
        status: u16,
        code: String,
        partial: String,
    },
}

impl Ending {
    #[track_caller]
    fn answer(self) -> String {
        match self {
            Ending::Answer(text) => text,
            other => panic!("{other:?}"),
        }
    }
}

fn ending(reply: &Reply) -> Ending {
    let error = |status, body: &Value, partial| {
        let code = body["error"]["code"].as_str().unwrap_or_default().to_owned();
        Ending::Error { status, code, partial }
    };
    if reply.status != 200 {
        assert!(reply.json()["error"]["message"].is_string(), "{reply:?}");
        return error(reply.status, &reply.json(), String::new());
    }
    let text = |choice: &Value| {
        [&choice["text"], &choice["message"]["content"], &choice["delta"]["content"]]
            .iter()
            .find_map(|text| text.as_str().map(str::to_owned))
            .unwrap_or_default()
    };
    if !reply.header("content-type").starts_with("text/event-stream") {
        return Ending::Answer(text(&reply.json()["choices"][0]));
    }
    assert!(reply.body.ends_with("data: [DONE]\n\n"), "a stream that just ends: {reply:?}");
    let events = reply.body.split("\n\n").filter_map(|event| event.strip_prefix("data: {"));
    let (mut said, mut is_finished) = (String::new(), false);
    for event in events {
        let event: Value = serde_json::from_str(&format!("{{{event}")).expect("JSON");
        if event["error"].is_object() {
            assert!(!is_finished, "an error after the end: {reply:?}");
            return error(200, &event, said);
        }
        said.push_str(&text(&event["choices"][0]));
        is_finished |= event["choices"][0]["finish_reason"].is_string();
    }
    assert!(is_finished, "a stream without an end: {reply:?}");
    Ending::Answer(said)
}

fn completion(prompt: &str, max_tokens: usize, stream: bool) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "stream": stream, "temperature": 0})
}

fn complete(at: SocketAddr, prompt: &str, max_tokens: usize, stream: bool) -> Ending {
    ending(&post(at, "/v1/completions", &completion(prompt, max_tokens, stream)))
}

/// A turn that goes on where its session stands.
fn turn(session: &str, question: &str, stream: bool) -> Value {
    json!({
        "messages": [{"role": "user", "content": question}], "session_id": session, "session_append": true,
        "max_tokens": 12, "stream": stream, "temperature": 0,
    })
}

#[test]
fn the_model_is_in_the_workers_and_the_answers_are_the_same() {
    let prompts = ["Once upon a time", "The sea", "A"];
    let plain = start(Place::new(), &[]);
    let expected = prompts.map(|prompt| complete(plain.address, prompt, 40, false).answer());
    signal(&plain.child, libc::SIGTERM);
    assert_eq!(plain.end().0.code(), Some(0));

    let place = Place::new();
    let isolated = Isolated::start_in(place, &["--workers", "2", "--worker-nice", "3"]);
    for (prompt, expected) in prompts.iter().zip(&expected) {
        assert_eq!(&complete(isolated.at, prompt, 40, false).answer(), expected);
        assert_eq!(&complete(isolated.at, prompt, 40, true).answer(), expected);
    }
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", isolated.child.id())).expect("it runs");
    assert!(!maps.contains("safetensors"), "the server holds no weights");
    assert!(!has_engine(isolated.child.id()));
    let workers = isolated.workers();
    assert_eq!(workers.len(), 2);
    for &worker in &workers {
        assert!(has_engine(worker));
        let stat = std::fs::read_to_string(format!("/proc/{worker}/stat")).expect("it runs");
        let nice = stat.rsplit_once(") ").expect("a name").1.split(' ').nth(16).expect("field 19").to_owned();
        assert_eq!(nice, "3");
    }
    let ready = get(isolated.at, "/ready").json();
    let up = json!({"state": "up", "restarts": 0});
    assert_eq!(ready, json!({"status": "ready", "workers": [up, up]}));
    let metrics = get(isolated.at, "/metrics").body;
    for engine in ["0", "1"] {
        let of = |name: &str| format!("{name}{{model_name=\"llama\",engine=\"{engine}\"}}");
        assert_eq!(metric(&metrics, &of("llmctl_engine_up")), 1.0, "{metrics}");
        assert!(metric(&metrics, &of("llmctl_kv_capacity_bytes")) > 0.0, "{metrics}");
    }
    let (code, said) = isolated.end();
    assert_eq!(code, Some(0), "{said}");
    eventually("no worker is left", || workers.iter().all(|&worker| is_gone(worker)));
}

#[test]
fn a_worker_knows_no_secret() {
    let place = Place::new();
    place.write("t.jinja", TEMPLATE);
    let mut command = place.command(&[
        "serve",
        "--model",
        &model(),
        "--port",
        "0",
        "--isolate",
        "--chat-template",
        "t.jinja",
    ]);
    command.env("LLMCTL_API_KEY", "sk-secret").env("HF_TOKEN", "hf-secret").env("HARMLESS", "seen");
    let mut child = command.stderr(Stdio::piped()).spawn().expect("llmctl starts");
    super::binary::until_listening(child.stderr.as_mut().expect("a pipe"));
    let worker = children(child.id());
    let environment = std::fs::read(format!("/proc/{}/environ", worker[0])).expect("it runs");
    let environment = String::from_utf8_lossy(&environment);
    assert!(environment.contains("HARMLESS=seen"));
    assert!(!environment.contains("secret"), "{environment}");
    let arguments = std::fs::read(format!("/proc/{}/cmdline", worker[0])).expect("it runs");
    assert!(!String::from_utf8_lossy(&arguments).contains("secret"));
    signal(&child, libc::SIGTERM);
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}

#[test]
fn killed_between_turns_a_session_goes_on() {
    let server = Isolated::start(&["--isolate"]);
    let question = "Tell me about the sea and the ships that sail on it. ".repeat(3);
    let calm: Vec<String> = (0..3)
        .map(|_| ending(&post(server.at, "/v1/chat/completions", &turn("calm", &question, false))).answer())
        .collect();
    let mut reasons = BTreeSet::new();
    for (nth, expected) in calm.iter().enumerate() {
        let reply = post(server.at, "/v1/chat/completions", &turn("trip", &question, false));
        assert_eq!(&ending(&reply).answer(), expected);
        reasons.insert(reply.json()["timings"]["resume_reason"].as_str().expect("a reason").to_owned());
        send(server.worker(), libc::SIGKILL);
        server.is_whole_after(nth as u64 + 1);
    }
    let known = ["new", "restored", "engine_lost", "prefix_cache"].map(str::to_owned);
    assert!(reasons.iter().all(|reason| known.contains(reason)) && reasons.len() > 1, "{reasons:?}");
    assert_eq!(get(server.at, "/v1/sessions/trip").json()["turns"], 3);
    assert_eq!(server.metric("llmctl_engine_restarts_total"), 3.0);
    let said = server.said();
    assert!(said.contains("worker 0 has stopped") && said.contains("signal: 9"), "{said}");
}

#[test]
fn without_kv_on_disk_the_reason_is_the_loss() {
    let server = Isolated::start(&["--isolate", "--kv-disk", "0"]);
    let ask = |question: &str| post(server.at, "/v1/chat/completions", &turn("trip", question, false)).json();
    assert_eq!(ask("The sea")["timings"]["resume_reason"], "new");
    assert_eq!(ask("The moon")["timings"]["resume_reason"], "exact_prefix");
    send(server.worker(), libc::SIGKILL);
    server.is_whole_after(1);
    assert_eq!(ask("The stars")["timings"]["resume_reason"], "engine_lost");
    assert_eq!(ask("The sun")["timings"]["resume_reason"], "exact_prefix");
}

/// A worker that does not move, for a request that is sent meanwhile, and is then killed.
fn killed_while_asked(server: &Isolated, body: &Value) -> Reply {
    let worker = server.worker();
    send(worker, libc::SIGSTOP);
    let (at, body) = (server.at, body.clone());
    let path = if body["messages"].is_array() { "/v1/chat/completions" } else { "/v1/completions" };
    let asking = thread::spawn(move || post(at, path, &body));
    eventually("it has been asked", || {
        server.metric("vllm:num_requests_waiting{model_name=\"llama\",engine=\"0\"}") == 1.0
    });
    send(worker, libc::SIGKILL);
    asking.join().expect("no panic")
}

#[test]
fn killed_before_the_first_token_a_request_is_begun_again() {
    let server = Isolated::start(&["--isolate"]);
    let expected = complete(server.at, "Once upon", 30, false).answer();
    for stream in [false, true] {
        let reply = killed_while_asked(&server, &completion("Once upon", 30, stream));
        assert_eq!(ending(&reply).answer(), expected);
    }
    let calm = ending(&post(server.at, "/v1/chat/completions", &turn("calm", "The sea", false))).answer();
    let reply = killed_while_asked(&server, &turn("trip", "The sea", false));
    assert_eq!(ending(&reply).answer(), calm);
    assert_eq!(server.metric("llmctl_engine_retries_total"), 3.0);
}

#[test]
fn killed_within_an_answer_a_stream_ends_with_an_error() {
    let server = Isolated::start(&["--isolate"]);
    let expected = complete(server.at, "Once upon", 200, true).answer();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: ",
        server.at
    );
    let body = completion("Once upon", 200, true).to_string();
    let mut num_errors = 0;
    for round in 1..=20 {
        let mut client = connect(server.at);
        client.send(&format!("{head}{}\r\n\r\n{body}", body.len()));
        let mut reply = client.head();
        reply.body = client.chunk().expect("the beginning");
        while !reply.body.contains("\"text\":\"") {
            reply.body.push_str(&client.chunk().expect("more"));
        }
        send(server.worker(), libc::SIGKILL);
        while let Some(chunk) = client.chunk() {
            reply.body.push_str(&chunk);
        }
        match ending(&reply) {
            Ending::Answer(text) => assert_eq!(text, expected, "it was too fast"),
            Ending::Error { code, partial, .. } => {
                assert_eq!(code, "engine_unavailable");
                assert!(expected.starts_with(&partial), "{partial:?}");
                num_errors += 1;
            }
        }
        server.is_whole_after(round);
        if num_errors == 2 {
            break;
        }
    }
    assert!(num_errors > 0, "no stream was ever cut");
    assert_eq!(complete(server.at, "Once upon", 200, true).answer(), expected);
}

#[test]
fn one_that_is_stopped_is_replaced() {
    let server = Isolated::start(&["--isolate", "--worker-timeout", "1s"]);
    let expected = complete(server.at, "Once upon", 30, false).answer();
    let stopped = server.worker();
    send(stopped, libc::SIGSTOP);
    assert_eq!(complete(server.at, "Once upon", 30, true).answer(), expected);
    assert!(is_gone(stopped));
    let said = server.said();
    assert!(said.contains("has not answered for") && said.contains("computes nothing"), "{said}");
}

#[test]
fn one_of_two_is_enough() {
    let server = Isolated::start(&["--workers", "2", "--worker-timeout", "600s"]);
    let names: Vec<String> = (0..8).map(|n| format!("s{n}")).collect();
    let ask =
        |name: &str| ending(&post(server.at, "/v1/chat/completions", &turn(name, "The sea", false))).answer();
    let first: BTreeSet<String> = names.iter().map(|name| ask(name)).collect();
    assert_eq!(first.len(), 1, "whichever worker it is, the answer is the same");
    let listed =
        |server: &Isolated| get(server.at, "/v1/sessions").json()["data"].as_array().expect("a list").len();
    assert_eq!(listed(&server), 8);
    send(server.workers()[0], libc::SIGKILL);
    let second: BTreeSet<String> = names.iter().map(|name| ask(name)).collect();
    assert_eq!(second.len(), 1);
    assert_eq!(get(server.at, "/ready").status, 200);
    server.is_whole_after(1);
    assert_eq!((listed(&server), get(server.at, "/v1/sessions/s3").json()["turns"].as_u64()), (8, Some(2)));
    // A fork may be with the other worker; it goes on all the same.
    for n in 0..4 {
        let to = format!("fork{n}");
        let forked = post(server.at, "/v1/sessions/s0/fork", &json!({"to": to}));
        assert_eq!(forked.status, 200, "{forked:?}");
        assert_eq!(ask(&to), ask(&format!("s{}", n + 1)));
    }
    let delete = format!("DELETE /v1/sessions/s5 HTTP/1.1\r\nHost: {}", server.at);
    assert_eq!(super::client::ask(server.at, &delete, "").status, 200);
    assert_eq!(ask("s5"), first.into_iter().next().expect("one"), "it begins anew");
}

#[test]
fn nobody_outlives_a_server_that_is_killed() {
    let mut server = Isolated::start(&["--workers", "2"]);
    let workers = server.workers();
    let at = server.at;
    let busy = thread::spawn(move || {
        let body = completion("Once upon", 300, true).to_string();
        let head = format!("POST /v1/completions HTTP/1.1\r\nHost: {at}\r\nContent-Type: application/json");
        connect(at).send(&format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()));
    });
    busy.join().expect("it was sent");
    server.child.kill().expect("it runs");
    server.child.wait().expect("it ends");
    eventually("no worker is left", || workers.iter().all(|&worker| is_gone(worker)));
}

/// `serve --isolate` with this script in the place of its worker.
fn with_program(script: &str, args: &[&str]) -> Ran {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let path = place.write("worker.sh", format!("#!/bin/sh\n{script}\n"));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).expect("ours");
    let mut command =
        place.command(&[&["serve", "--model", &model(), "--port", "0", "--isolate"], args].concat());
    command.env("LLMCTL_WORKER_PROGRAM", &path);
    finish(command, "")
}

#[test]
fn a_worker_that_cannot_start_is_an_error_with_a_diagnosis() {
    with_program("echo 'no such library' >&2; exit 127", &[])
        .check(1, "worker 0: it has ended; exit status: 127")
        .check(1, "no such library");
    with_program("echo hello; exec sleep 600", &[]).check(1, "does not say that it is ready: \"hello\"");
    with_program("exec sleep 600", &["--worker-start-timeout", "500ms"])
        .check(1, "was not ready within 500ms");
    with_program("kill -ABRT $$", &[]).check(1, "signal: 6");
    with_program("", &["--workers", "2", "--worker-nice", "99"]).check(2, "99");
    let place = Place::new();
    place
        .run(&["serve", "--model", &model(), "--port", "0", "--worker-nice", "1"])
        .check(2, "there are none");
    place
        .run(&["serve", "--model", &model(), "--port", "0", "--isolate", "--ctx", "100000000"])
        .check(2, "context");
}

#[test]
fn a_worker_with_too_little_memory_ends_wherever_it_runs_out_of_it() {
    // Less than --worker-memory takes, because that would be refused.
    for kibibytes in [4096, 6144, 8192, 9216, 10240, 10240, 10240] {
        let program = env!("CARGO_BIN_EXE_llmctl");
        let script = format!("ulimit -d {kibibytes}; export RUST_BACKTRACE=0; exec {program} \"$@\"");
        let ran = with_program(&script, &["--worker-memory", "16M"]);
        ran.check(75, "worker 0: 16.0 MiB of --worker-memory are too little to start with");
    }
    let place = Place::new();
    for little in ["1", "15M"] {
        let args = ["serve", "--model", &model(), "--port", "0", "--isolate", "--worker-memory", little];
        place.run(&args).check(2, "--worker-memory: no worker starts with").check(2, "the least is 16.0 MiB");
    }
}

/// Kills workers at random under 16 clients, so many times.
fn storm(num_kills: usize) {
    const MAX_ASKS: usize = 6000;
    const PROMPTS: [&str; 6] =
        ["Once upon a time", "The sea", "A", "One two three", "Where", "Long ago there was a king"];
    let server = Isolated::start(&["--workers", "2", "--parallel", "8"]);
    let at = server.at;
    let expected: Arc<Vec<String>> =
        Arc::new(PROMPTS.iter().map(|prompt| complete(at, prompt, 60, false).answer()).collect());
    let questions = ["The sea", "And the moon", "Who"];
    let calm: Arc<Vec<String>> = Arc::new(
        questions
            .iter()
            .map(|question| {
                ending(&post(at, "/v1/chat/completions", &turn("calm", question, false))).answer()
            })
            .collect(),
    );
    let is_over = Arc::new(AtomicBool::new(false));
    let (num_right, num_errors) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let judge = {
        let (num_right, num_errors) = (Arc::clone(&num_right), Arc::clone(&num_errors));
        move |ending: Ending, expected: &str| match ending {
            Ending::Answer(text) => {
                assert_eq!(text, expected, "a wrong answer");
                num_right.fetch_add(1, Ordering::SeqCst);
                true
            }
            Ending::Error { status, code, partial } => {
                assert!(expected.starts_with(&partial), "{partial:?} is no beginning of {expected:?}");
                assert_eq!(code, "engine_unavailable", "{status}");
                num_errors.fetch_add(1, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(20));
                false
            }
        }
    };
    let clients: Vec<_> = (0..16_usize)
        .map(|client| {
            let (is_over, expected, calm, judge) =
                (Arc::clone(&is_over), Arc::clone(&expected), Arc::clone(&calm), judge.clone());
            thread::spawn(move || {
                for round in 0.. {
                    if is_over.load(Ordering::SeqCst) {
                        return;
                    }
                    let stream = (client + round) % 2 == 0;
                    if client < 12 {
                        let nth = (client + round) % PROMPTS.len();
                        judge(complete(at, PROMPTS[nth], 60, stream), &expected[nth]);
                        continue;
                    }
                    let session = format!("storm-{client}-{round}");
                    for (question, expected) in questions.iter().zip(&*calm) {
                        let ask =
                            || ending(&post(at, "/v1/chat/completions", &turn(&session, question, stream)));
                        // A turn that failed was not kept.
                        let is_answered = (0..MAX_ASKS).any(|_| judge(ask(), expected));
                        assert!(is_answered, "{session}: {question}");
                    }
                    let kept = get(at, &format!("/v1/sessions/{session}"));
                    assert!(kept.status == 503 || kept.json()["turns"] == 3, "{kept:?}");
                }
            })
        })
        .collect();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for kill in 0..num_kills {
        let before = num_right.load(Ordering::SeqCst);
        eventually("requests are answered", || num_right.load(Ordering::SeqCst) >= before + 16);
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        thread::sleep(Duration::from_millis((random >> 32) & 0xff));
        let workers = server.workers();
        send(workers[usize::try_from(random >> 60).expect("small") % workers.len()], libc::SIGKILL);
        server.is_whole_after(kill as u64 + 1);
    }
    is_over.store(true, Ordering::SeqCst);
    for client in clients {
        client.join().expect("no wrong answer");
    }
    for (prompt, expected) in PROMPTS.iter().zip(&*expected) {
        assert_eq!(&complete(at, prompt, 60, false).answer(), expected);
    }
    let retries = server.metric("llmctl_engine_retries_total");
    eprintln!(
        "{num_kills} kills: {} right answers, {} errors, {retries} second attempts",
        num_right.load(Ordering::SeqCst),
        num_errors.load(Ordering::SeqCst)
    );
    let (code, said) = server.end();
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn killed_at_random_nobody_gets_a_wrong_answer() {
    storm(5);
}

/// Takes minutes: `cargo test --test main a_hundred_times -- --ignored --nocapture`.
#[test]
#[ignore = "takes minutes"]
fn killed_at_random_a_hundred_times() {
    storm(100);
}
