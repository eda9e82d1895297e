//! llmctl as the engine of another llmctl: `run`, `chat`, `serve` and `bench` compute on a `serve` elsewhere.

use super::texts;
use crate::common::prelude::*;
use crate::serve_ops::binary::{Serving, signal, start_as_told};
use crate::serve_ops::client::ask;

fn chat(at: SocketAddr, text: &str) -> Value {
    let messages = json!([{"role": "user", "content": text}]);
    let body = json!({"messages": messages, "session_id": "trip", "session_append": true, "max_tokens": 6, "temperature": 0});
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json";
    ask(at, head, &body.to_string()).json()
}

#[test]
fn one_llmctl_computes_for_another() {
    let model = texts().to_string_lossy().into_owned();
    let (engine, _) = start_as_told(Place::new(), &["--model", &model, "--ctx", "512"]);
    let (place, url) = (Place::new(), format!("http://{}", engine.address));
    let there = ["--engine", url.as_str(), "--model", model.as_str()];

    // The same greedy text as from the same files here.
    let prompt = ["run", "--raw", "Once upon a time", "--max-tokens", "12", "--temperature", "0", "--quiet"];
    let here = place.run(&[&prompt[..], &["--model", &model]].concat());
    let ran = place.run(&[&prompt[..], &there].concat());
    assert_eq!(ran.check(0, "").stdout, here.check(0, "").stdout);

    let flags = ["chat", "--session", "s", "--max-tokens", "5", "--temperature", "0"];
    let lines =
        |more: &[&str], lines: &str| finish(place.command(&[&flags[..], &there, more].concat()), lines);
    lines(&[], "one\ntwo\n").check(0, "answers come from llmctl at http://127.0.0.1");
    lines(&[], "/undo\nthree\n/context\n").check(0, "of 512 tokens");

    let (front, said) = start_as_told(Place::new(), &there);
    assert!(said.iter().any(|line| line.contains("answers come from llmctl")), "{said:?}");
    let first = chat(front.address, "Hello there, whoever you are.");
    assert_eq!(first["usage"]["engine"]["remote"], true, "{first}");
    let second = chat(front.address, "And again.");
    assert_eq!(second["llmctl"]["kept_turns"], 1, "{second}");
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert!(cached.is_some_and(|cached| cached > 0), "the engine has kept what it computed: {second}");

    // `bench` measures the engine there: both tests are in its report.
    let bench = ["bench", "-p", "64", "-n", "4", "-r", "2", "--output", "json"];
    let measured = place.run(&[&bench[..], &there].concat());
    let measured: Value = serde_json::from_str(&measured.check(0, "").stdout).expect("JSON");
    let text = measured.to_string();
    assert!(text.contains("pp64") && text.contains("tg4"), "{measured}");

    let Serving { child, address: _, place: kept } = front;
    signal(&child, libc::SIGTERM);
    let mut child = child;
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    drop(kept);
    signal(&engine.child, libc::SIGKILL);
    let mut gone = engine.child;
    gone.wait().expect("it ends");
    place.run(&[&prompt[..], &there].concat()).check(69, "cannot be reached");
}
