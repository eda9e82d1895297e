//! Promise: whatever clients, operators and the engine do, the server answers in OpenAI's words, keeps out who may not come in,
//! is not held up by who is slow, says what it does, comes back from the loss of its engine, and ends in good order.
//!
//! Real sockets on 127.0.0.1; the engine is a toy except in `binary`.

pub mod app;
pub mod binary;
pub mod client;
mod connections;
mod engine;
mod images;
mod page;
#[cfg(target_os = "linux")]
mod workers;

use std::io::Write;

use llmctl_serve::gate::owner::KeyLine;
use llmctl_serve::gate::policy::{ApiKeys, Hosts, Policy};
use llmctl_serve::net::connection::ConnectionLimits;
use llmctl_serve::telemetry::access_log::AccessLog;

use app::{Options, Site, address, app, counting_engine, gated_engine, loading};
use client::{ask, connect, get};

use crate::common::prelude::*;

fn with_policy(policy: Policy) -> Site {
    Site::new(Options { policy, ..Options::default() })
}

#[test]
fn every_stage_says_what_it_is() {
    let server = loading(Options::default());
    let at = address(&server);
    assert_eq!(get(at, "/health").json()["status"], "ok");
    get(at, "/ready").check(503, "model_loading");
    get(at, "/metrics").body.lines().find(|line| *line == "llmctl_ready 0").expect("not ready");
    ask(at, "POST /echo HTTP/1.1\r\nHost: localhost", "x").check(503, "model_loading");
    // A connection from before sees the model come.
    let mut early = connect(at);
    early.ask("GET /ready HTTP/1.1\r\nHost: localhost", "").check(503, "model_loading");
    let app = app(EngineSlot::new(counting_engine()), server.lifecycle().observer().clone());
    server.open_with(app.clone(), axum::Router::new());
    assert_eq!(early.ask("GET /ready HTTP/1.1\r\nHost: localhost", "").json()["status"], "ready");
    app.engine_lost(&app.engine().expect("up"));
    early.ask("GET /ready HTTP/1.1\r\nHost: localhost", "").check(503, "engine_unavailable");
    assert_eq!(get(at, "/health").status, 200, "the process lives");
    server.lifecycle().drain();
    early.ask("GET /ready HTTP/1.1\r\nHost: localhost", "").check(503, "shutting_down");
    assert!(early.is_closed(), "one answer is the last of its connection now");
    let mut late = connect(at);
    late.send("HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert_eq!(late.head().status, 200);
}

#[test]
fn every_refusal_is_in_the_envelope() {
    let policy = Policy { max_body: 1000, body_timeout: Duration::from_millis(200), ..Policy::default() };
    let at = with_policy(policy);
    let at = at.address();
    let post = |head: &str, body: &str| ask(at, &format!("POST {head} HTTP/1.1\r\nHost: localhost"), body);
    get(at, "/v1/nothing").check(404, "unknown_url");
    let wrong = get(at, "/echo");
    assert_eq!(wrong.check(405, "method_not_supported").header("allow"), "POST");
    assert!(get(at, "/item/1").check(405, "method_not_supported").header("allow").contains("DELETE"));
    post("/json", "{\"a\": 1}").check(415, "unsupported_media_type");
    let json = |body: &str| {
        ask(at, "POST /json HTTP/1.1\r\nHost: h.localhost\r\nContent-Type: application/json", body)
    };
    assert_eq!(json("{\"a\": 1}").body, "{\"a\":1}");
    assert_eq!(json("{\"a\": ").check(400, "invalid_request").status, 400);
    post("/echo", &"x".repeat(1001)).check(413, "request_too_large");
    assert_eq!(post("/echo", &"x".repeat(1000)).body, "1000");
    assert!(get(at, "/busy").check(429, "queue_full").header("retry-after") == "2");
}

#[test]
fn clients_of_anthropics_get_its_envelope_from_every_layer() {
    let keys = KeyLine::parse("sk-1").expect("a line").expect("a key");
    let policy = Policy { max_body: 1000, keys: ApiKeys::new([keys]), ..Policy::default() };
    let site = with_policy(policy);
    let at = site.address();
    let check = |method: &str, path: &str, more: &str, body: &str, expected: (u16, &str, &str)| {
        let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nx-request-id: mine{more}");
        let reply = ask(at, &head, body);
        assert_eq!(reply.header("request-id"), "mine", "{reply:?}");
        let body = reply.json();
        let told = |name: &str| body["error"][name].as_str().unwrap_or_default().to_owned();
        assert_eq!((reply.status, &*told("type")), (expected.0, expected.1), "{reply:?}");
        assert!(
            !told("message").is_empty() && body["error"]["details"]["error_code"] == expected.2,
            "{reply:?}"
        );
        assert_eq!((&body["type"], &body["request_id"]), (&Value::from("error"), &Value::from("mine")));
        assert_eq!(body.as_object().map(|members| members.len()), Some(3));
        reply
    };
    let key = "\r\nx-api-key: sk-1";
    let version = "\r\nanthropic-version: 2023-06-01\r\nAuthorization: Bearer sk-1";
    check("POST", "/v1/messages", "", "", (401, "authentication_error", "invalid_api_key"));
    check(
        "POST",
        "/v1/messages",
        "\r\nx-api-key: sk-2",
        "",
        (401, "authentication_error", "invalid_api_key"),
    );
    check("GET", "/v1/messages/nothing", key, "", (404, "not_found_error", "unknown_url"));
    check("POST", "/v1/messages", key, &"x".repeat(1001), (413, "request_too_large", "request_too_large"));
    check("GET", "/panic", version, "", (500, "api_error", "internal_error"));
    check("GET", "/echo", version, "", (405, "invalid_request_error", "method_not_supported"));
    let busy = check("GET", "/busy", version, "", (429, "rate_limit_error", "queue_full"));
    assert_eq!(busy.header("retry-after"), "2");
    // The same without the header is OpenAI's.
    let plain = ask(at, "GET /busy HTTP/1.1\r\nHost: localhost\r\nx-api-key: sk-1", "");
    assert_eq!(plain.check(429, "queue_full").header("request-id"), "");
}

/// Agents send the key in one header or the other, or in both for two servers.
#[test]
fn a_key_may_come_in_either_header() {
    let key = KeyLine::parse("sk-1").expect("a line").expect("a key");
    let site = with_policy(Policy { keys: ApiKeys::new([key]), ..Policy::default() });
    let status = |headers: &str| {
        ask(site.address(), &format!("GET /id HTTP/1.1\r\nHost: localhost{headers}"), "").status
    };
    let (good, bad) = ("\r\nx-api-key: sk-1", "\r\nx-api-key: other");
    for (headers, expected) in [
        ("", 401),
        (good, 200),
        (bad, 401),
        ("\r\nAuthorization: Bearer sk-1\r\nx-api-key: other", 200),
        ("\r\nAuthorization: Bearer other\r\nx-api-key: sk-1", 200),
        ("\r\nAuthorization: Bearer other\r\nx-api-key: other", 401),
    ] {
        assert_eq!(status(headers), expected, "{headers:?}");
    }
}

/// A server with the model's own endpoints.
fn with_api(policy: Policy) -> llmctl_serve::front::listen::Server {
    let server = loading(Options { policy, ..Options::default() });
    server.open(app(EngineSlot::new(counting_engine()), server.lifecycle().observer().clone()));
    server
}

const JSON: &str = "Host: localhost\r\nContent-Type: application/json";

#[test]
fn bodies_are_read_up_to_the_operators_limit() {
    let server = with_api(Policy { max_body: 4 << 20, ..Policy::default() });
    let tokenize = |size: usize| {
        let body = r#"{"content": "a"}"#;
        let body = body.replace('}', &format!("{}}}", " ".repeat(size - body.len())));
        ask(address(&server), &format!("POST /tokenize HTTP/1.1\r\n{JSON}"), &body)
    };
    for size in [(2 << 20) + 1, 3_000_000, 4 << 20] {
        assert_eq!(tokenize(size).status, 200, "{size}");
    }
    let refused = tokenize((4 << 20) + 1);
    assert!(refused.check(413, "request_too_large").body.contains("--max-body"), "{refused:?}");
}

#[test]
fn bodies_that_two_readers_would_read_differently_are_refused() {
    let server = with_api(Policy::default());
    let tokenize = |more: &str, body: &str| {
        ask(address(&server), &format!("POST /tokenize HTTP/1.1\r\n{JSON}{more}"), body)
    };
    let plain = tokenize("", r#"{"content": "a"}"#);
    assert_eq!(
        tokenize("", "\u{feff}{\"content\": \"a\"}").body,
        plain.body,
        "a byte-order mark says nothing"
    );
    let twice = tokenize("", r#"{"content": "a", "content": "b"}"#);
    assert!(twice.check(422, "invalid_json").body.contains(r#"\"content\" is given twice"#), "{twice:?}");
    let packed = tokenize("\r\nContent-Encoding: gzip", "{}");
    assert!(packed.check(415, "unsupported_content_encoding").body.contains("gzip"), "{packed:?}");
}

#[test]
fn one_client_cannot_take_all_connections_with_bodies_that_do_not_come() {
    let policy = Policy { max_slow_bodies: 2, ..Policy::default() };
    let limits = ConnectionLimits { max_connections: 4, ..ConnectionLimits::default() };
    let site = Site::new(Options { policy, limits, ..Options::default() });
    let mut slow: Vec<_> = (0..4).map(|_| connect(site.address())).collect();
    for client in &mut slow {
        client.send("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\na");
    }
    let name = "llmctl_http_slow_bodies_refused_total";
    app::eventually("those beyond the limit are sent away", || {
        let reply = get(site.address(), "/metrics");
        reply.status == 200 && app::metric(&reply.body, name) == 2.0
    });
    let mut refused = 0;
    for mut client in slow.drain(..) {
        // Those that have a place are answered when the rest comes; the others have been told.
        let _ = client.try_send("bcd");
        let reply = client.reply();
        match reply.status {
            200 => assert_eq!(reply.body, "4"),
            _ => {
                refused +=
                    usize::from(reply.check(429, "too_many_slow_bodies").body.contains("--max-slow-bodies"))
            }
        }
    }
    assert_eq!(refused, 2);
}

#[test]
fn a_base_url_that_is_not_ours_is_put_right() {
    let server = with_api(Policy::default());
    let at = address(&server);
    let listed = get(at, "/v1/models").json();
    for path in ["/v1/models/", "//v1/models", "///v1/models//", "/v1/models/?a=b"] {
        assert_eq!(get(at, path).json(), listed, "{path}");
    }
    for (path, meant) in
        [("/sessions", "at /v1/sessions:"), ("/v1/v1/models", "at /v1/models:"), ("/v2", "GET / lists")]
    {
        let reply = get(at, path);
        assert!(reply.check(404, "unknown_url").body.contains(meant), "{reply:?}");
    }
}

#[test]
fn the_address_itself_says_what_is_there() {
    let server = loading(Options::default());
    let at = address(&server);
    let index = get(at, "/").json();
    assert_eq!(
        (&index["name"], &index["status"], &index["model"]),
        (&"llmctl".into(), &"loading".into(), &Value::Null)
    );
    server.open(app(EngineSlot::new(counting_engine()), server.lifecycle().observer().clone()));
    let index = get(at, "/").json();
    assert_eq!((&index["status"], &index["model"]), (&"serving".into(), &"toy".into()));
    let mut head = connect(at);
    head.send("HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert_eq!(head.head().status, 200);
    // What it lists is there.
    let endpoints = index["endpoints"].as_array().expect("a list");
    assert!(endpoints.len() > 10);
    for endpoint in endpoints {
        let (method, path) =
            endpoint.as_str().and_then(|text| text.split_once(' ')).expect("a method and a path");
        let path = path.replace("{id}", "x");
        let reply =
            ask(at, &format!("{method} {path} HTTP/1.1\r\n{JSON}"), if method == "POST" { "{}" } else { "" });
        assert!(!reply.body.contains("unknown_url") && reply.status != 405, "{endpoint}: {reply:?}");
    }
    let keys = Policy { keys: keys_of(&["sk-one"]), ..Policy::default() };
    get(with_policy(keys).address(), "/").check(401, "invalid_api_key");
}

#[test]
fn two_lengths_of_a_body_end_the_connection() {
    let site = Site::new(Options::default());
    let mut client = connect(site.address());
    let chunked = "4\r\nfour\r\n0\r\n\r\n";
    for length in [
        "\r\nContent-Length: 9\r\nTransfer-Encoding: chunked",
        "\r\nTransfer-Encoding: chunked\r\nContent-Length: 9",
    ] {
        let mut client = connect(site.address());
        client.send(&format!(
            "POST /echo HTTP/1.1\r\nHost: localhost{length}\r\n\r\n{chunked}GET /id HTTP/1.1\r\n\r\n"
        ));
        client.reply().check(400, "invalid_body");
        assert!(client.is_closed(), "what follows may be what somebody else's proxy took for the body");
    }
    assert_eq!(client.ask("GET /id HTTP/1.1\r\nHost: localhost", "").status, 200);
}

#[test]
fn limits_that_no_clock_can_count_are_no_limits() {
    let policy = Policy { body_timeout: Duration::MAX, ..Policy::default() };
    let limits = ConnectionLimits {
        idle_timeout: Duration::MAX,
        header_timeout: Duration::MAX,
        ..ConnectionLimits::default()
    };
    let site = Site::new(Options { policy, limits, ..Options::default() });
    assert_eq!(ask(site.address(), "POST /echo HTTP/1.1\r\nHost: localhost", "four").body, "4");
    assert_eq!(site.metric("llmctl_http_panics_total"), 0.0);
}

#[test]
fn a_refused_body_does_not_take_the_refusal_with_it() {
    let site = with_policy(Policy { max_body: 1000, ..Policy::default() });
    // Larger than all buffers between here and there: without a reader at the other end, sending would fail.
    let body = "x".repeat(20 << 20);
    ask(site.address(), "POST /echo HTTP/1.1\r\nHost: localhost", &body).check(413, "request_too_large");
    // Chunked, the size is not known beforehand.
    let mut client = connect(site.address());
    client.send("POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n");
    for _ in 0..400 {
        client.send(&format!("2710\r\n{}\r\n", "x".repeat(10_000)));
    }
    client.send("0\r\n\r\n");
    client.reply().check(413, "request_too_large");
    // Who asks first is spared the sending.
    let mut client = connect(site.address());
    client.send(
        "POST /echo HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 5000\r\n\r\n",
    );
    client.reply().check(413, "request_too_large");
}

#[test]
fn bodies_that_do_not_come_are_not_waited_for() {
    let policy = Policy { body_timeout: Duration::from_millis(200), ..Policy::default() };
    let site = with_policy(policy);
    let mut client = connect(site.address());
    client.send("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nabc");
    client.reply().check(408, "request_timeout");
    assert!(client.is_closed());
}

fn keys_of(lines: &[&str]) -> ApiKeys {
    ApiKeys::new(lines.iter().map(|line| KeyLine::parse(line).expect("a line").expect("a key")))
}

#[test]
fn keys_open_the_door() {
    let site = with_policy(Policy { keys: keys_of(&["sk-one", "sk-two owner=anna"]), ..Policy::default() });
    let at = site.address();
    let with =
        |authorization: &str| ask(at, &format!("GET /id HTTP/1.1\r\nHost: localhost{authorization}"), "");
    for refused in [
        "",
        "\r\nAuthorization: Bearer sk-three",
        "\r\nAuthorization: Bearer sk-on",
        "\r\nAuthorization: Bearer ",
        "\r\nAuthorization: Basic sk-one",
        "\r\nAuthorization: sk-one",
        "\r\nX-Api-Key: sk-on",
    ] {
        let reply = with(refused);
        assert_eq!(reply.check(401, "invalid_api_key").header("www-authenticate"), "Bearer", "{refused}");
        assert!(!reply.body.contains("sk-"), "a refusal repeats no key");
    }
    assert_eq!(with("\r\nAuthorization: Bearer sk-one").status, 200);
    assert_eq!(with("\r\nAuthorization: bearer  sk-two").status, 200);
    assert_eq!(get(at, "/health").status, 200);
    assert_eq!(get(at, "/ready").status, 200);
    get(at, "/metrics").check(401, "invalid_api_key");
    get(at, "/nothing").check(401, "invalid_api_key");
    // A page has no key, whatever name it found this server by.
    let evil = "GET /id HTTP/1.1\r\nHost: evil.example\r\nAuthorization: Bearer sk-one";
    assert_eq!(ask(at, evil, "").status, 200);
}

#[test]
fn foreign_names_and_pages_are_turned_away() {
    let hosts = Hosts { names: vec!["llm.example".to_owned()] };
    let site = with_policy(Policy { hosts, ..Policy::default() });
    let at = site.address();
    let as_host = |host: &str| ask(at, &format!("GET /id HTTP/1.1{host}"), "");
    let fine = [
        "127.0.0.1:1",
        "localhost",
        "LOCALHOST.:80",
        "[::1]:8484",
        "192.0.2.7",
        "a.localhost",
        "LLM.Example:80",
    ];
    for host in fine {
        assert_eq!(as_host(&format!("\r\nHost: {host}")).status, 200, "{host}");
    }
    for host in ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "x.llm.example"] {
        as_host(&format!("\r\nHost: {host}:8484")).check(403, "host_not_allowed");
    }
    as_host("").check(400, "invalid_value");
    as_host("\r\nHost: localhost\r\nHost: evil.example").check(400, "invalid_value");
    as_host("\r\nHost: a b").check(400, "invalid_value");
    // The target's own host wins over the header.
    ask(at, "GET http://evil.example/id HTTP/1.1\r\nHost: localhost", "").check(403, "host_not_allowed");
    assert_eq!(connect(at).ask("GET /id HTTP/1.0", "").status, 200, "no browser speaks HTTP/1.0");
    let delete = |origin: &str| {
        ask(at, &format!("DELETE /item/1 HTTP/1.1\r\nHost: localhost:8\r\nOrigin: {origin}"), "")
    };
    assert_eq!(delete("http://localhost:8").body, "gone", "a page served from here");
    for origin in ["https://evil.example", "null", "http://localhost:9", "http://localhost"] {
        delete(origin).check(403, "origin_not_allowed");
    }
}

#[test]
fn pages_of_listed_origins_may_ask() {
    let site = with_policy(Policy { origins: vec!["https://chat.example".to_owned()], ..Policy::default() });
    let preflight = |origin: &str| {
        let head = format!(
            "OPTIONS /echo HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\nAccess-Control-Request-Method: POST\r\n\
             Access-Control-Request-Headers: authorization,x-session-id"
        );
        ask(site.address(), &head, "")
    };
    let allowed = preflight("https://chat.example");
    assert_eq!(allowed.status, 200);
    assert_eq!(allowed.header("access-control-allow-origin"), "https://chat.example");
    assert_eq!(allowed.header("access-control-allow-headers"), "authorization,x-session-id");
    assert_eq!(allowed.header("access-control-allow-private-network"), "", "nobody asked");
    let head = "OPTIONS /echo HTTP/1.1\r\nHost: localhost\r\nOrigin: https://chat.example\r\nAccess-Control-Request-Method: POST\r\n\
                Access-Control-Request-Private-Network: true";
    let private = ask(site.address(), head, "");
    assert_eq!(private.header("access-control-allow-private-network"), "true");
    assert_eq!(preflight("https://evil.example").header("access-control-allow-origin"), "");
    let head = "POST /echo HTTP/1.1\r\nHost: localhost\r\nOrigin: https://chat.example";
    let reply = ask(site.address(), head, "four");
    assert_eq!(
        (reply.body.as_str(), reply.header("access-control-allow-origin")),
        ("4", "https://chat.example")
    );
    for name in ["x-request-id", "x-llmctl-ignored", "x-llmctl-branch"] {
        assert!(reply.header("access-control-expose-headers").contains(name), "{name}: {reply:?}");
    }
    let closed = Site::new(Options::default());
    let head = "OPTIONS /echo HTTP/1.1\r\nHost: localhost\r\nOrigin: https://a.example\r\nAccess-Control-Request-Method: POST";
    assert_eq!(ask(closed.address(), head, "").header("access-control-allow-origin"), "");
}

#[test]
fn requests_have_ids() {
    let site = Site::new(Options::default());
    let with = |id: &str| ask(site.address(), &format!("GET /id HTTP/1.1\r\nHost: localhost{id}"), "");
    let given = with("\r\nX-Request-Id: abc-123");
    assert_eq!((given.body.as_str(), given.header("x-request-id")), ("abc-123", "abc-123"));
    let long = format!("\r\nX-Request-Id: {}", "x".repeat(129));
    for unusable in ["", &long, "\r\nX-Request-Id: two words", "\r\nX-Request-Id: "] {
        let reply = with(unusable);
        assert!(reply.body.starts_with("req_") && reply.body.len() == 36, "{reply:?}");
        assert_eq!(reply.header("x-request-id"), reply.body);
    }
    assert_ne!(with("").body, with("").body);
}

#[test]
fn a_bug_costs_its_request_and_no_more() {
    let site = Site::new(Options::default());
    let mut client = connect(site.address());
    client.ask("GET /panic HTTP/1.1\r\nHost: localhost", "").check(500, "internal_error");
    assert_eq!(client.ask("GET /id HTTP/1.1\r\nHost: localhost", "").status, 200, "the connection is fine");
    let mut client = connect(site.address());
    client.send("GET /panic-later HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert_eq!(client.head().status, 200);
    assert_eq!(client.chunk().as_deref(), Some("begun "));
    assert!(client.is_closed(), "no end is made up");
    assert_eq!(site.metric("llmctl_http_panics_total"), 2.0);
    assert_eq!(get(site.address(), "/ready").status, 200);
}

/// A log in memory.
#[derive(Clone, Default)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl Write for Memory {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn every_request_is_a_line() {
    let memory = Memory::default();
    let log = AccessLog::new(Box::new(memory.clone())).expect("a thread");
    let (engine, gate) = gated_engine();
    let options = Options { log: Some(log.clone()), ..Options::default() };
    let site = Site::with(options, EngineSlot::new(engine));
    let at = site.address();
    ask(
        at,
        "POST /echo?key=secret HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: one\r\nUser-Agent: test\"",
        "abc",
    );
    ask(at, "GET /nothing HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: two", "").check(404, "unknown_url");
    let mut left = connect(at);
    left.send("POST /turn HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: three\r\nContent-Length: 1\r\n\r\n1");
    assert_eq!(left.head().status, 200);
    drop(left);
    drop(gate);
    app::eventually("the third request ends", || site.metric("llmctl_http_requests_in_flight") == 1.0);
    assert!(log.flush(Duration::from_secs(60)));
    let text = String::from_utf8(memory.0.lock().expect("no panic").clone()).expect("UTF-8");
    assert!(!text.contains("secret"), "{text}");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let of = |id: &str| {
        lines.iter().find(|line| line["request_id"] == id).unwrap_or_else(|| panic!("{id}: {text}"))
    };
    let one = of("one");
    assert_eq!(
        (&one["method"], &one["path"], &one["status"]),
        (&"POST".into(), &"/echo".into(), &200.into())
    );
    assert_eq!((&one["bytes"], &one["complete"]), (&1.into(), &true.into()));
    assert!(one["peer"].as_str().is_some_and(|peer| peer.starts_with("127.0.0.1:")), "{one}");
    assert!(one["ms"].as_f64().is_some() && one["time"].as_str().is_some_and(|time| time.ends_with('Z')));
    assert_eq!((&of("two")["status"], &of("two")["complete"]), (&404.into(), &true.into()));
    assert_eq!(of("three")["complete"], false, "its client went away");
}

#[test]
fn the_line_of_a_generation_says_what_it_took() {
    let memory = Memory::default();
    let log = AccessLog::new(Box::new(memory.clone())).expect("a thread");
    let server = loading(Options { log: Some(log.clone()), ..Options::default() });
    server.open(app(EngineSlot::new(counting_engine()), server.lifecycle().observer().clone()));
    let body = r#"{"prompt": [10, 11, 12], "max_tokens": 2}"#;
    let reply = ask(address(&server), &format!("POST /v1/completions HTTP/1.1\r\n{JSON}"), body);
    assert_eq!(reply.status, 200, "{reply:?}");
    let mut line = Value::Null;
    app::eventually("the line is written", || {
        assert!(log.flush(Duration::from_secs(60)));
        let text = String::from_utf8(memory.0.lock().expect("no panic").clone()).expect("UTF-8");
        line = text.lines().next().map_or(Value::Null, |line| serde_json::from_str(line).expect("JSON"));
        !line.is_null()
    });
    assert_eq!((&line["model"], &line["path"]), (&"toy".into(), &"/v1/completions".into()));
    let tokens = ["prompt_tokens", "cached_tokens", "completion_tokens"].map(|name| line[name].as_u64());
    assert_eq!(tokens, [Some(3), Some(0), Some(2)], "{line}");
    assert!(line.get("session").is_none() && line.get("key").is_none());
}

#[test]
fn what_is_done_is_counted() {
    let site = Site::new(Options::default());
    let at = site.address();
    for _ in 0..2 {
        let reply = ask(at, "POST /turn HTTP/1.1\r\nHost: localhost", "10");
        assert!(reply.body.starts_with("11 12 ") && reply.body.ends_with("done stop"), "{reply:?}");
    }
    assert_eq!(ask(at, "DELETE /item/a HTTP/1.1\r\nHost: localhost", "").status, 200);
    assert_eq!(ask(at, "DELETE /item/b HTTP/1.1\r\nHost: localhost", "").status, 200);
    ask(at, "BREW /pot HTTP/1.1\r\nHost: localhost", "");
    let head = format!("GET /metrics HTTP/1.1\r\nHost: {at}");
    let text = ask(at, &head, "");
    assert!(text.header("content-type").starts_with("text/plain; version=0.0.4"));
    let model = "{model_name=\"toy\",engine=\"0\"}";
    for (name, value) in [
        (format!("vllm:num_requests_running{model}"), 0.0),
        (format!("vllm:num_requests_waiting{model}"), 0.0),
        (format!("vllm:kv_cache_usage_perc{model}"), 0.0),
        (format!("vllm:prompt_tokens_total{model}"), 2.0),
        (format!("vllm:prefix_cache_queries_total{model}"), 2.0),
        (format!("vllm:prefix_cache_hits_total{model}"), 0.0),
        (format!("vllm:generation_tokens_total{model}"), 104.0),
        (
            "vllm:request_success_total{model_name=\"toy\",engine=\"0\",finished_reason=\"stop\"}".to_owned(),
            2.0,
        ),
        (format!("vllm:time_to_first_token_seconds_count{model}"), 2.0),
        (format!("vllm:inter_token_latency_seconds_count{model}"), 2.0),
        (format!("vllm:e2e_request_latency_seconds_count{model}"), 2.0),
        ("llmctl_turns_started_total{model_name=\"toy\",engine=\"0\",reason=\"new\"}".to_owned(), 2.0),
        ("llmctl_http_requests_total{method=\"DELETE\",route=\"/item/{id}\",status=\"200\"}".to_owned(), 2.0),
        ("llmctl_http_requests_total{method=\"other\",route=\"none\",status=\"404\"}".to_owned(), 1.0),
        ("llmctl_ready".to_owned(), 1.0),
    ] {
        assert_eq!(app::metric(&text.body, &name), value, "{name} in {}", text.body);
    }
    if cfg!(target_os = "linux") {
        assert!(app::metric(&text.body, "process_resident_memory_bytes") > 1e6);
        assert!(app::metric(&text.body, "process_open_fds") > 3.0);
    }
    let open = ask(at, &format!("{head}\r\nAccept: application/openmetrics-text; version=1.0.0"), "");
    assert!(open.header("content-type").starts_with("application/openmetrics-text"));
    assert!(open.body.ends_with("# EOF\n"));
}
