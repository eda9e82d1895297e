//! `llmctl bench serve` against a server of this test, which says what it is told, and against llmctl's own. No figure is judged.

use std::io::Write;
use std::net::TcpListener;

use super::{llmctl, stories};
use crate::common::prelude::*;

/// Answers the completion with this number, from 0.
type Script = fn(usize, &Value) -> String;

/// A server on a free port that closes every connection after one answer. It goes with the process.
fn server(script: Script) -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    let count = Arc::new(AtomicUsize::new(0));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let count = count.clone();
            std::thread::spawn(move || answer(stream, &count, script));
        }
    });
    format!("http://{address}")
}

fn answer(stream: TcpStream, count: &AtomicUsize, script: Script) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut head = Vec::new();
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        if line.trim().is_empty() {
            break;
        }
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
        head.push(line);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let response = if head.first()?.contains("/models") {
        let body = r#"{"object":"list","data":[{"id":"told"}]}"#;
        format!(
            "HTTP/1.1 200 OK\r\nServer: script\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
    } else {
        script(count.fetch_add(1, Ordering::SeqCst), &serde_json::from_slice(&body).ok()?)
    };
    reader.get_mut().write_all(response.as_bytes()).ok()
}

const STREAM: &str =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n";

/// Three parts of two tokens each.
fn stream(request: &Value) -> String {
    let words = request["messages"][0]["content"].as_str().unwrap_or_default().split(' ').count();
    let part = r#"data: {"choices":[{"index":0,"delta":{"content":"ab"},"finish_reason":null}]}"#;
    let end = r#"data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#;
    let usage = format!(
        r#"data: {{"choices":[],"usage":{{"prompt_tokens":{},"completion_tokens":6}}}}"#,
        10 + 2 * words
    );
    format!(
        "{STREAM}{part}\r\n\r\n{part}\r\n\r\n: ping\r\n\r\n{part}\r\n\r\n{end}\r\n\r\n{usage}\r\n\r\ndata: [DONE]\r\n\r\n"
    )
}

fn measured(script: Script, args: &[&str]) -> (Ran, Value) {
    let url = server(script);
    let ran =
        llmctl(&[&["bench", "serve", "--endpoint", &url, "--output", "json", "--quiet"], args].concat());
    let document = serde_json::from_str(&ran.stdout).unwrap_or_default();
    (ran, document)
}

#[test]
fn help_is_as_written() {
    insta::assert_snapshot!("help_bench_serve", llmctl(&["bench", "serve", "--help"]).check(0, "").stdout);
    insta::assert_snapshot!(
        "help_bench_compare",
        llmctl(&["bench", "compare", "--help"]).check(0, "").stdout
    );
}

#[test]
fn flags_without_an_effect_are_refused_by_name_and_the_named_model_is_measured() {
    let mut own = ["--parallel", "2", "--threads", "1", "--ctx", "64", "--kv-type", "f16", "--cpu", "scalar"]
        .chunks(2)
        .map(|flag| [&["bench", "serve", "--endpoint", "http://127.0.0.1:9"][..], flag].concat());
    assert!(own.all(|args| llmctl(&args).check(2, args[4]).stderr.contains("--endpoint")));
    let alone = ["bench", "serve", "--endpoint", "http://127.0.0.1:9"];
    llmctl(&[&alone[..], &["--speed", "2"]].concat()).check(2, "--trace");
    llmctl(&[&alone[..], &["--threshold", "5"]].concat()).check(2, "--baseline");
    let told: Script = |_, request| match request["model"] == "other" {
        true => stream(request),
        false => "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_owned(),
    };
    let (ran, _) = measured(told, &["--model", "other", "-c", "1", "-N", "1"]);
    ran.check(0, "");
}

#[test]
fn users_are_answered_and_prompts_have_the_length_asked_for() {
    let (ran, document) = measured(|_, request| stream(request), &["-c", "1,3", "-N", "6", "-p", "100"]);
    ran.check(0, "");
    let points = document["points"].as_array().expect("points");
    assert_eq!(points.len(), 2);
    assert_eq!(
        (&document["server"]["model"], &document["server"]["software"]),
        (&"told".into(), &"script".into())
    );
    for point in points {
        assert_eq!((&point["requests"], &point["errors"]), (&6.into(), &serde_json::json!({})));
        assert_eq!(point["tokens_per_chunk"], 2.0, "six tokens in three parts");
        for turn in point["turns"].as_array().expect("turns") {
            assert_eq!((&turn["prompt_tokens"], &turn["output_tokens"]), (&100.into(), &6.into()));
            assert_eq!(turn["gaps_ms"].as_array().map(Vec::len), Some(2));
        }
    }
    assert!(document["warnings"].to_string().contains("a part of the stream has 2.0 tokens"));
}

#[test]
fn errors_are_counted_by_kind() {
    let (ran, document) = measured(
        |number, request| match number {
            0 | 1 => stream(request), // those that measure words
            2 => "HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
                .to_owned(),
            3 => format!("{STREAM}data: {{\"choices\":[{{\"delta\":{{\"content\":\"a\"}}}}]}}\n\n"),
            4 => format!("{STREAM}data: {{\"error\":{{\"message\":\"engine\"}}}}\n\n"),
            5 => format!("{STREAM}data: nonsense\n\n"),
            _ => stream(request),
        },
        &["-c", "1", "-N", "6"],
    );
    ran.check(0, "");
    let errors = &document["points"][0]["errors"];
    assert_eq!(errors, &serde_json::json!({"broken": 1, "http_429": 1, "malformed": 1, "server": 1}));
}

#[test]
fn arrivals_of_an_open_loop_and_of_a_trace_are_all_sent() {
    let place = Place::new();
    let trace = place.write(
        "trace.jsonl",
        "{\"timestamp\":0,\"input_length\":600,\"output_length\":3,\"hash_ids\":[1,2]}\n\
         {\"timestamp\":20,\"input_length\":40,\"output_length\":9,\"hash_ids\":[1]}\n",
    );
    let trace = trace.to_string_lossy();
    let args =
        ["--rate", "200", "-N", "5", "--trace", &trace, "--speed", "2", "-n", "4", "--slo", "e2e=60000"];
    let (ran, document) = measured(|_, request| stream(request), &args);
    ran.check(0, "");
    let points = document["points"].as_array().expect("points");
    let names: Vec<_> = points.iter().map(|point| (&point["name"], &point["requests"])).collect();
    assert_eq!(names, [(&"200/s".into(), &5.into()), (&"trace x2".into(), &2.into())]);
    assert_eq!(points[1]["turns"][0]["prompt_tokens"], 600);
    assert_eq!(points[1]["turns"][1]["at_s"], 0.01);
    assert_eq!(points[0]["goodput"]["share"], 1.0);
}

#[test]
fn conversations_have_turns() {
    let (ran, document) =
        measured(|_, request| stream(request), &["-c", "1", "-N", "6", "--turns", "3", "--turn", "20"]);
    ran.check(0, "");
    let turns = document["points"][0]["turns"].as_array().expect("turns");
    let numbers: Vec<_> = turns.iter().map(|turn| turn["turn"].as_u64().expect("a number")).collect();
    assert_eq!(numbers, [1, 2, 3, 1, 2, 3]);
}

#[test]
fn servers_that_cannot_be_measured_are_told_apart() {
    let check = |args: &[&str], code: i32, message: &str| {
        llmctl(&[&["bench", "serve"], args].concat()).check(code, message);
    };
    // A port that was free a moment ago.
    let gone =
        TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr()).expect("a port");
    check(&["--endpoint", &format!("http://{gone}")], 69, "cannot connect to http://");
    check(&["--endpoint", "https://127.0.0.1"], 2, "https is not supported");
    check(&["--endpoint", "nowhere"], 2, "does not begin with http://");
    check(&[], 2, "--endpoint");
    check(&["--endpoint", "http://127.0.0.1:1", "--self"], 2, "cannot be used with");
    check(&["--endpoint", "http://127.0.0.1:1", "--rate", "0"], 2, "must be above 0");
    check(&["--endpoint", "http://127.0.0.1:1", "-N", "0"], 2, "must be from 1 to ");
    check(&["--endpoint", "http://127.0.0.1:1", "--slo", "itl=5"], 2, "none of ttft, tpot, e2e");
    check(&["--endpoint", "http://127.0.0.1:1", "--trace", "none.csv"], 66, "none.csv");
    let refused = |_: usize, _: &Value| {
        "HTTP/1.1 401 Unauthorized\r\nContent-Length: 27\r\nConnection: close\r\n\r\n{\"error\":{\"message\":\"key\"}}".to_owned()
    };
    check(&["--endpoint", &server(refused)], 77, "it answers 401: key");
}

#[test]
fn our_own_server_is_measured_in_process() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    let args = [
        "bench", "serve", "--self", "--model", &model, "-c", "2", "-N", "4", "-p", "40", "-n", "8", "--plot",
        "charts", "--save", "r.json",
    ];
    let ran = place.run(&args);
    ran.check(0, "wrote charts/latency.svg");
    assert!(ran.stdout.contains("4 of 4"), "{ran:?}");
    let document: Value = serde_json::from_str(&place.read("r.json")).expect("JSON");
    for turn in document["points"][0]["turns"].as_array().expect("turns") {
        assert_eq!(turn["output_tokens"], 8, "the end of the text is ignored");
        assert!(turn["prompt_tokens"].as_u64().is_some_and(|count| (30..=50).contains(&count)), "{turn}");
    }
    assert!(place.read("charts/latency.svg").starts_with("<svg "));
    place.run(&["bench", "compare", "r.json", "r.json"]).check(0, "");
}
