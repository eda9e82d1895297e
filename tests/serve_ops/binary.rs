//! `llmctl serve` as a process: what it says, its signals and its exit codes.

use std::net::TcpListener;
use std::process::ExitStatus;

use super::app::{eventually, metric};
use super::client::{Reply, ask, connect, get};
use crate::cli::read_line;
use crate::common::prelude::*;

/// A server with a tiny model, that has said where it is.
pub struct Serving {
    pub child: Child,
    pub address: SocketAddr,
    /// Lives as long as the server.
    pub place: Place,
}

pub fn model() -> String {
    parity_folder().join("llama").to_string_lossy().into_owned()
}

pub fn start(place: Place, args: &[&str]) -> Serving {
    let model = model();
    start_as_told(place, &[&["--model", &model], args].concat()).0
}

/// As `start`, of the model that `args` name; also what it said before.
pub fn start_as_told(place: Place, args: &[&str]) -> (Serving, Vec<String>) {
    let mut command = place.command(&[&["serve", "--port", "0"], args].concat());
    let mut child = command.stderr(Stdio::piped()).spawn().expect("llmctl starts");
    let said = until_listening(child.stderr.as_mut().expect("a pipe"));
    let line = said.last().expect("a line");
    let address = line.strip_prefix("listening on http://").unwrap_or_else(|| panic!("{said:?}"));
    let address = address.parse().expect("an address");
    (Serving { address, child, place }, said)
}

/// Returns the lines up to the one with the address, or to the end of the stream.
pub fn until_listening(stderr: &mut impl Read) -> Vec<String> {
    let mut lines = Vec::new();
    while !lines.last().is_some_and(|line: &String| line.is_empty() || line.starts_with("listening on ")) {
        lines.push(read_line(stderr));
    }
    lines
}

impl Serving {
    /// Waits for the end; returns the exit status and what stderr said since the address.
    pub fn end(mut self) -> (ExitStatus, String) {
        let mut said = String::new();
        self.child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("UTF-8");
        let status = self.child.wait().expect("it ends");
        drop(self.place);
        (status, said)
    }
}

#[cfg(unix)]
pub fn signal(child: &Child, number: i32) {
    let pid = i32::try_from(child.id()).expect("a process id");
    // SAFETY: sends a signal to a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(pid, number) }, 0);
}

fn refused(args: &[&str]) -> Ran {
    let model = model();
    Place::new().run(&[&["serve", "--model", &model], args].concat())
}

#[test]
fn what_is_wrong_is_said_before_anything_is_loaded() {
    refused(&["--host", "0.0.0.0", "--port", "0"])
        .check(2, "others can reach this address, and there is no API key")
        .check(2, "--insecure-no-auth");
    refused(&["--host", "no.such.host.invalid"]).check(2, "--host no.such.host.invalid");
    refused(&["--uds", "s", "--port", "1"]).check(2, "cannot be used with");
    refused(&["--cors-origin", "https://a.example/"]).check(2, "not an origin");
    refused(&["--idle-timeout", "0"]).check(2, "must be longer than nothing");
    refused(&["--tool-format", "morse"]).check(2, "unknown tool-call format `morse` (known: ");
    refused(&["--api-key-file", "no-such-file"]).check(66, "no-such-file");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    refused(&["--port", &port]).check(75, &format!("listening on 127.0.0.1:{port}"));
    Place::new().run(&["serve", "--model", "/no/such/model", "--port", "0"]).check(66, "/no/such/model");
}

#[cfg(unix)]
#[test]
fn a_signal_ends_it_in_good_order() {
    for number in [libc::SIGTERM, libc::SIGINT] {
        let serving = start(Place::new(), &[]);
        assert_eq!(get(serving.address, "/ready").status, 200);
        signal(&serving.child, number);
        let (status, said) = serving.end();
        assert_eq!(status.code(), Some(0), "{said}");
        assert!(said.starts_with("stopping"), "{said}");
    }
}

#[cfg(unix)]
#[test]
fn keys_come_from_the_environment_and_a_file() {
    let place = Place::new();
    place.write("keys", "# of the team\nsk-file\n");
    let model = model();
    let args = ["serve", "--model", &model, "--port", "0", "--api-key-file", "keys", "--host", "0.0.0.0"];
    let mut command = place.command(&args);
    command.env("LLMCTL_API_KEY", "sk-env").env("LLMCTL_ACCESS_LOG", "access.jsonl");
    let mut child = command.stderr(Stdio::piped()).spawn().expect("llmctl starts");
    let lines = until_listening(child.stderr.as_mut().expect("a pipe"));
    let line = lines.last().expect("a line");
    let port = line.rsplit(':').next().and_then(|port| port.parse::<u16>().ok()).expect("a port");
    let serving = Serving { child, address: ([127, 0, 0, 1], port).into(), place };
    let with = |key: &str| {
        let head = format!("GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}");
        ask(serving.address, &head, "")
    };
    assert_eq!((with("sk-env").status, with("sk-file").status), (200, 200));
    with("sk-other").check(401, "invalid_api_key");
    signal(&serving.child, libc::SIGTERM);
    let log = serving.place.path("access.jsonl");
    let mut child = serving.child;
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    let log = std::fs::read_to_string(log).expect("a log");
    assert_eq!(log.lines().count(), 3, "all lines are there at the end: {log}");
    assert!(!log.contains("sk-"), "{log}");
}

#[cfg(unix)]
#[test]
fn other_names_of_the_model_are_given_in_any_number() {
    let serving = start(Place::new(), &["--alias", "gpt-4o,small", "--alias", "claude"]);
    let list = get(serving.address, "/v1/models").json();
    assert_eq!(list["data"][0]["aliases"], json!(["gpt-4o", "small", "claude"]));
    let ask = |model: &str| {
        let body = json!({"model": model, "prompt": "Once", "max_tokens": 1});
        post(serving.address, "/v1/completions", &body)
    };
    assert_eq!(ask("small").json()["model"], list["data"][0]["id"]);
    assert_eq!(ask("gpt-5").header("x-llmctl-ignored"), "model");
}

#[cfg(unix)]
#[test]
fn a_socket_in_the_file_system_instead_of_a_port() {
    use std::os::unix::net::UnixStream;
    let place = Place::new();
    let path = place.path("s");
    let model = model();
    let mut command = place.command(&["serve", "--model", &model, "--uds", "s"]);
    let mut child = command.stderr(Stdio::piped()).spawn().expect("llmctl starts");
    let lines = until_listening(child.stderr.as_mut().expect("a pipe"));
    assert_eq!(lines.last().map(String::as_str), Some("listening on unix:s"));
    let mut client = super::client::Client::new(UnixStream::connect(&path).expect("it listens"));
    assert_eq!(client.ask("GET /ready HTTP/1.1\r\nHost: x", "").status, 200);
    signal(&child, libc::SIGTERM);
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    assert!(!path.exists());
}

#[cfg(unix)]
#[test]
fn kv_of_text_that_is_deleted_or_not_to_be_stored_is_not_on_disk() {
    let serving = start(Place::new(), &[]);
    let (at, long) = (serving.address, "Once upon a time there was a little dog. ".repeat(12));
    let respond = |head: &str, more: Value| {
        let mut body = json!({"input": long, "max_output_tokens": 8});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let head =
            format!("POST /v1/responses HTTP/1.1\r\nHost: {at}\r\nContent-Type: application/json{head}");
        let reply = ask(at, &head, &body.to_string());
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.json()["id"].as_str().expect("an id").to_owned()
    };
    let unstored =
        |n: usize| json!({"store": false, "instructions": format!("{n}"), "prompt_cache_key": "k"});
    respond("", unstored(1));
    respond("\r\nx-session-affinity: a", unstored(2));
    respond("\r\nx-session-affinity: a", unstored(3));
    let first = respond("", json!({"instructions": "4"}));
    let second = respond("", json!({"previous_response_id": first}));
    let num_pages = || files_below(&serving.place.path(".cache/llmctl/kv"), "kv");
    eventually("KV of stored responses is saved", || num_pages() > 0);
    for id in [second, first] {
        let head = format!("DELETE /v1/responses/{id} HTTP/1.1\r\nHost: {at}");
        assert_eq!(ask(at, &head, "").status, 200);
    }
    assert_eq!(num_pages(), 0, "nor what waited to be saved");
    signal(&serving.child, libc::SIGTERM);
    assert_eq!(serving.end().0.code(), Some(0));
}

#[cfg(unix)]
#[test]
fn a_downloaded_model_is_erased_for_clients_where_that_is_allowed() {
    let place = Place::new();
    let repo = ".cache/huggingface/hub/models--o--m";
    let commit = "0123456789012345678901234567890123456789";
    for folder in ["refs", &format!("snapshots/{commit}")] {
        std::fs::create_dir_all(place.path(&format!("{repo}/{folder}"))).expect("a folder");
    }
    place.write(&format!("{repo}/refs/main"), commit);
    place.write(&format!("{repo}/snapshots/{commit}/m-Q4_0.gguf"), "four");
    place.write(&format!("{repo}/snapshots/{commit}/m-Q8_0.gguf"), "eight");
    let serving = start(place, &["--allow-delete"]);
    let at = serving.address;
    let erase = |model: &str| {
        let head = format!("DELETE /api/delete HTTP/1.1\r\nHost: {at}\r\nContent-Type: application/json");
        ask(at, &head, &json!({"model": model}).to_string()).status
    };
    let is_here = |file: &str| serving.place.path(&format!("{repo}/snapshots/{commit}/{file}")).exists();
    assert_eq!([erase("llama"), erase("o/other"), erase("o/m:Q5_0")], [409, 404, 404]);
    assert_eq!((erase("o/m:Q8_0"), is_here("m-Q8_0.gguf"), is_here("m-Q4_0.gguf")), (200, false, true));
    assert_eq!([erase("o/m"), erase("o/m")], [200, 404]);
    signal(&serving.child, libc::SIGTERM);
    assert_eq!(serving.end().0.code(), Some(0));
}

/// Counts the files of an extension below a folder.
fn files_below(folder: &Path, extension: &str) -> usize {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let count = |entry: std::fs::DirEntry| match entry.path() {
        path if path.is_dir() => files_below(&path, extension),
        path => usize::from(path.extension().is_some_and(|found| found == extension)),
    };
    entries.map(count).sum()
}

/// The soft limit on open files of this process.
fn descriptors() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap_or("1024");
    line.split_whitespace().next().and_then(|soft| soft.parse().ok()).unwrap_or(1024)
}

#[cfg(target_os = "linux")]
#[test]
fn ten_thousand_idle_connections_do_no_harm() {
    let num_connections = if descriptors() >= 12_000 { 10_000 } else { descriptors() / 2 };
    if num_connections < 10_000 {
        eprintln!("only {num_connections} connections: the limit on open files (ulimit -n) allows no more");
    }
    let serving = start(Place::new(), &["--max-connections", "1000"]);
    let at = serving.address;
    let look = |name: &str| metric(&get(at, "/metrics").body, name);
    let before = (look("process_resident_memory_bytes"), look("process_open_fds"));
    let crowd: Vec<TcpStream> =
        (0..num_connections).map(|_| TcpStream::connect(at).expect("the server accepts")).collect();
    assert_eq!(get(at, "/ready").status, 200, "the next one is served");
    eventually("the oldest made room", || look("llmctl_http_connections") <= 1001.0);
    let closed = look("llmctl_http_connections_closed_total{reason=\"made_room\"}");
    assert!(closed >= (num_connections - 1000) as f64, "{closed}");
    let memory = look("process_resident_memory_bytes");
    assert!(memory <= before.0 + (64 << 20) as f64, "memory: {before:?}, then {memory}");
    eventually("those that made room are gone", || look("process_open_fds") <= before.1 + 1010.0);
    drop(crowd);
    eventually("all descriptors are back", || look("process_open_fds") <= before.1 + 2.0);
    signal(&serving.child, libc::SIGTERM);
    let (status, said) = serving.end();
    assert_eq!(status.code(), Some(0), "{said}");
}

#[cfg(unix)]
#[test]
fn health_is_answered_while_the_model_loads() {
    // A model that takes its time: its chat template is a pipe that nobody writes to.
    let place = Place::new();
    let pipe = place.path("template");
    assert!(Command::new("mkfifo").arg(pipe).status().expect("mkfifo runs").success());
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = free.local_addr().expect("an address");
    drop(free);
    let port = address.port().to_string();
    let model = model();
    let args = ["serve", "--model", &model, "--chat-template", "template", "--port", &port];
    let mut command = place.command(&args);
    let mut child = command.stderr(Stdio::null()).spawn().expect("llmctl starts");
    eventually("it listens", || TcpStream::connect(address).is_ok());
    assert_eq!(get(address, "/health").status, 200);
    get(address, "/ready").check(503, "model_loading");
    get(address, "/v1/models").check(503, "model_loading");
    signal(&child, libc::SIGTERM);
    assert_eq!(child.wait().expect("it ends").code(), Some(143), "nothing was under way");
}

pub fn post(address: SocketAddr, path: &str, body: &Value) -> Reply {
    let head = format!("POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json");
    ask(address, &head, &body.to_string())
}

#[cfg(unix)]
#[test]
fn a_signal_cuts_no_stream() {
    const NUM_STREAMS: usize = 20;
    let serving = start(Place::new(), &["--parallel", "1"]);
    let at = serving.address;
    let body = json!({"prompt": "Once", "max_tokens": 300, "stream": true}).to_string();
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: {at}\r\nContent-Type: application/json");
    let mut streams: Vec<_> = (0..NUM_STREAMS).map(|_| connect(at)).collect();
    for stream in &mut streams {
        stream.send(&format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()));
    }
    eventually("all are taken", || {
        let text = get(at, "/metrics").body;
        let name = "llmctl_http_requests_total{method=\"POST\",route=\"/v1/completions\",status=\"200\"}";
        let num_taken = metric(&text, "llmctl_http_requests_in_flight") - 1.0 + metric(&text, name);
        num_taken >= NUM_STREAMS as f64
    });
    signal(&serving.child, libc::SIGTERM);
    for mut stream in streams {
        let reply = stream.reply();
        assert_eq!(reply.status, 200, "{reply:?}");
        assert!(reply.body.ends_with("data: [DONE]\n\n"), "{reply:?}");
        assert!(!reply.body.contains("\"error\"") && !reply.body.contains("cancelled"), "{reply:?}");
    }
    let (status, said) = serving.end();
    assert_eq!(status.code(), Some(0), "{said}");
    assert!(!said.contains("warning"), "{said}");
}

#[cfg(unix)]
#[test]
fn a_conversation_goes_on_warm_after_a_restart() {
    let place = Place::new();
    place.write("t.jinja", "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]");
    let first = start(place, &["--chat-template", "t.jinja"]);
    let question =
        json!({"role": "user", "content": "Tell me about the sea and the ships that sail on it. ".repeat(3)});
    let turn = |at: SocketAddr, messages: Value| {
        let body = json!({"messages": messages, "session_id": "trip", "max_tokens": 8});
        let reply = post(at, "/v1/chat/completions", &body);
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.json()
    };
    let answer = turn(first.address, json!([question]));
    signal(&first.child, libc::SIGTERM);
    let mut child = first.child;
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    let second = start(first.place, &["--chat-template", "t.jinja"]);
    let next = json!({"role": "user", "content": "And the moon?"});
    let said = &answer["choices"][0]["message"];
    let more = turn(second.address, json!([question, said, next]));
    assert_eq!(more["timings"]["resume_reason"], "restored", "{more}");
    assert!(more["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() >= Some(32), "{more}");
    signal(&second.child, libc::SIGTERM);
    assert_eq!(second.end().0.code(), Some(0));
}

#[cfg(unix)]
#[test]
fn deleting_a_session_leaves_no_text_of_it_and_takes_no_page_of_another() {
    let place = Place::new();
    place.write("t.jinja", "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]");
    let serving = start(place, &["--chat-template", "t.jinja"]);
    let at = serving.address;
    let question = json!({"role": "user", "content": "Tell me about the sea and the ships. ".repeat(6)});
    for session in ["a", "b"] {
        let body = json!({"messages": [question], "session_id": session, "max_tokens": 8});
        assert_eq!(post(at, "/v1/chat/completions", &body).status, 200);
    }
    let delete = |session: &str| {
        let reply = ask(at, &format!("DELETE /v1/sessions/{session} HTTP/1.1\r\nHost: {at}"), "");
        assert_eq!(reply.status, 200, "{reply:?}");
        num_pages(&serving.place.path(".cache/llmctl/kv"))
    };
    assert!(delete("a") > 0, "b said the same");
    assert_eq!(delete("b"), 0);
    signal(&serving.child, libc::SIGTERM);
    assert_eq!(serving.end().0.code(), Some(0));
}

#[cfg(unix)]
fn num_pages(folder: &Path) -> usize {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let pages = entries.map(|entry| match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
        true => num_pages(&entry.path()),
        false => usize::from(entry.path().extension().is_some_and(|extension| extension == "kv")),
    });
    pages.sum()
}
