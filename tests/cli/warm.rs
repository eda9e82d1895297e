//! `llmctl warm`: a prompt is computed once, stays, travels in a file, and helps `run`, sessions and servers.

use super::llmctl;
use crate::common::prelude::*;
#[cfg(unix)]
use crate::serve_ops::app::metric;
#[cfg(unix)]
use crate::serve_ops::binary::{Serving, post, signal, start_as_told};
#[cfg(unix)]
use crate::serve_ops::client::get;

/// A system prompt of several pages.
fn rules() -> String {
    let rules: Vec<String> =
        (0..20).map(|n| format!("Rule {n}: answer question {n} in one sentence.")).collect();
    format!("You know llmctl. {}", rules.join(" "))
}

fn json_of(place: &Place, args: &[&str]) -> Value {
    let ran = place.run(&[args, &["--output", "json"]].concat());
    serde_json::from_str(&ran.check(0, "").stdout).expect("JSON")
}

fn listed(place: &Place) -> Vec<Value> {
    json_of(place, &["warm"])["prompts"].as_array().expect("a list").clone()
}

fn asked(place: &Place, more: &[&str]) -> Value {
    json_of(
        place,
        &[
            &[
                "run",
                "-m",
                "guide",
                "--system-file",
                "rules.md",
                "--temperature",
                "0",
                "How do I save a session?",
            ],
            more,
        ]
        .concat(),
    )
}

#[test]
fn a_warm_prompt_changes_no_answer_and_saves_its_tokens() {
    let place = Place::new();
    place.write("rules.md", rules());
    assert!(place.run(&["warm"]).check(0, "").stdout.starts_with("no prompt is computed ahead"));
    let cold = asked(&place, &[]);
    assert_eq!(cold["usage"]["cached_tokens"], 0);
    let kept = json_of(&place, &["warm", "rules.md", "-m", "guide"])["prompts"][0].clone();
    let tokens = kept["tokens"].as_u64().expect("a count");
    assert!(tokens > 200 && tokens.is_multiple_of(PAGE_TOKENS as u64), "{kept}");
    assert_eq!((&kept["name"], &kept["hits"], &kept["model"]), (&json!("rules"), &json!(0), &json!("guide")));
    for hits in 1..3 {
        let warm = asked(&place, &[]);
        assert_eq!(
            (&warm["text"], &warm["usage"]["prompt_tokens"]),
            (&cold["text"], &cold["usage"]["prompt_tokens"])
        );
        assert_eq!(
            (&warm["usage"]["cached_tokens"], &warm["reuse"]["reason"]),
            (&json!(tokens), &json!("restored"))
        );
        assert_eq!(listed(&place)[0]["hits"], hits);
    }
    // A session begins with it, and takes its KV along neither into its removal nor into that of its own.
    asked(&place, &["--session", "trip"]);
    place.run(&["sessions", "remove", "trip", "--yes"]).check(0, "");
    assert_eq!(asked(&place, &[])["usage"]["cached_tokens"], tokens);
    let facts = json_of(&place, &["doctor"]);
    assert_eq!(facts["folders"]["warm_prompts"]["hits"], 4, "{facts}");
    // Once more: nothing is computed, and the count goes on.
    let again = place.run(&["warm", "rules.md", "-m", "guide"]).check(0, "").stdout.clone();
    assert!(again.contains(", 1 computed in"), "{again}");
    assert_eq!(listed(&place)[0]["hits"], 4);
    let removed = place.run(&["warm", "--remove", "rules"]).check(0, "").stdout.clone();
    assert_eq!(removed, "rules is forgotten: limits may evict its KV\n");
    assert_eq!(listed(&place), [] as [Value; 0]);
    place.run(&["warm", "--remove", "rules"]).check(66, "no prompt named \"rules\"");
}

#[test]
fn requests_documents_and_rows_are_prompts_too() {
    let place = Place::new();
    let tools =
        json!([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]);
    let system = json!({"role": "system", "content": rules()});
    let request =
        |question: &str| json!({"messages": [system, {"role": "user", "content": question}], "tools": tools});
    let streamed = |question: &str| {
        let mut request = request(question);
        request["stream"] = true.into();
        request
    };
    place.write("agent.json", format!("{:#}", streamed("Read this.")));
    place.write("rows.jsonl", format!("{}\n\n{}\n", json!({"prompt": rules()}), request("x")));
    place.write("manual.txt", rules());
    let warmed =
        json_of(&place, &["warm", "agent.json", "rows.jsonl", "manual.txt", "--role", "user", "-m", "guide"]);
    let names: Vec<&Value> =
        warmed["prompts"].as_array().expect("a list").iter().map(|row| &row["name"]).collect();
    assert_eq!(names, ["agent", "rows-2", "rows-3", "manual"]);
    // Questions that go on in the last message of the user.
    place.write(
        "batch.jsonl",
        format!(
            "{}\n{}\n",
            request("Read this. And that?"),
            json!({"prompt": format!("{} What now?", rules())})
        ),
    );
    place
        .run(&["run", "-m", "guide", "--batch", "batch.jsonl", "--max-tokens", "4", "--out", "answers.jsonl"])
        .check(0, "");
    for answer in place.read("answers.jsonl").lines() {
        let answer: Value = serde_json::from_str(answer).expect("JSON");
        let usage = &answer["response"]["body"]["usage"];
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
        assert!(
            cached + 2 * PAGE_TOKENS as u64 > usage["prompt_tokens"].as_u64().expect("a count"),
            "{usage}"
        );
    }
}

#[cfg(unix)]
#[test]
fn bodies_of_every_api_are_prompts_for_its_clients() {
    let place = Place::new();
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let message = |text: &str| json!([{"role": "user", "content": text}]);
    let bodies = |text: &str| {
        let tool = json!({"name": "weather", "input_schema": schema});
        let function = json!({"type": "function", "name": "weather", "parameters": schema});
        let block = json!([{"type": "text", "text": rules()}]);
        [
            (
                "/v1/messages",
                json!({"system": block, "messages": message(text), "tools": [tool], "max_tokens": 2, "model": "claude"}),
            ),
            (
                "/v1/responses",
                json!({"instructions": format!("For Codex. {}", rules()), "input": text, "tools": [function],
                    "store": false, "max_output_tokens": 2}),
            ),
            ("/v1/completions", json!({"prompt": format!("{} {text}", rules()), "max_tokens": 2})),
        ]
    };
    let [(_, messages), (_, responses), (path, completion)] = bodies("Read this.");
    place.write("claude.json", messages.to_string());
    place.write("codex.json", responses.to_string());
    place.write("plain.json", json!({"custom_id": "1", "url": path, "body": completion}).to_string());
    place.write("wrong.json", json!({"url": "/v1/embeddings", "body": {"input": "x"}}).to_string());
    let args = ["warm", "-m", "guide", "claude.json", "codex.json", "plain.json"];
    let warmed = json_of(&place, &args)["prompts"].as_array().expect("a list").clone();
    place.run(&["warm", "-m", "guide", "wrong.json"]).check(65, "url: \"/v1/embeddings\" is none of");
    place.write("wrong.json", json!({"body": {"prompt": "x"}, "sytem": "x"}).to_string());
    place.run(&["warm", "-m", "guide", "wrong.json"]).check(65, "sytem: is no field beside a body");
    let (serving, _) = start_as_told(place, &["-m", "guide", "--alias", "*"]);
    let follow_ups = bodies("Read this. And that?");
    for ((path, body), warmed) in follow_ups.into_iter().zip(warmed) {
        let answer = post(serving.address, path, &body).json();
        let usage = &answer["usage"];
        let cached = [
            "/cache_read_input_tokens",
            "/input_tokens_details/cached_tokens",
            "/prompt_tokens_details/cached_tokens",
        ];
        let cached = cached.iter().find_map(|place| usage.pointer(place)?.as_u64());
        assert_eq!(cached, warmed["tokens"].as_u64(), "{path} {answer}");
    }
    signal(&serving.child, libc::SIGTERM);
    let Serving { mut child, .. } = serving;
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}

#[cfg(unix)]
#[test]
fn a_file_of_prompts_is_used_by_a_server_elsewhere() {
    let (here, there) = (Place::new(), Place::new());
    here.write("rules.md", rules());
    here.run(&["warm", "rules.md", "-m", "guide", "--out", "rules.llmctl"]).check(0, "");
    here.run(&["warm", "--out", "rules.llmctl"]).check(2, "--force replaces it");
    let again = here.run(&["warm", "--out", "rules.llmctl", "--force"]).check(0, "").stdout.clone();
    assert!(again.starts_with("1 prompt in rules.llmctl: "), "{again}");
    here.run(&["sessions", "import", "rules.llmctl"]).check(65, "`llmctl warm FILE` takes it");
    let bytes = std::fs::read(here.path("rules.llmctl")).expect("there");
    let (file, cut) =
        (there.write("rules.llmctl", &bytes), there.write("cut.llmctl", &bytes[..bytes.len() - 9]));
    there
        .run(&["serve", "-m", "guide", "--port", "0", "--warm", &cut.display().to_string()])
        .check(65, "cut.llmctl");
    assert_eq!(listed(&there), [] as [Value; 0]);
    let mut place = there;
    for said_first in ["pages of KV", "all were here already"] {
        let (serving, said) = start_as_told(place, &["-m", "guide", "--warm", &file.display().to_string()]);
        assert!(said.iter().any(|line| line.ends_with(said_first)), "{said:?}");
        let body = json!({"messages": [
            {"role": "system", "content": rules()}, {"role": "user", "content": "How do I save a session?"},
        ]});
        let answer = post(serving.address, "/v1/chat/completions", &body).json();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
        let metrics = get(serving.address, "/metrics").body;
        for name in ["llmctl_warm_hits", "llmctl_warm_prompts"] {
            let name = format!("{name}{{model_name=\"guide\",engine=\"0\"}}");
            assert_eq!(metric(&metrics, &name), 1.0, "{metrics}");
        }
        signal(&serving.child, libc::SIGTERM);
        let Serving { mut child, place: left, .. } = serving;
        assert_eq!(child.wait().expect("it ends").code(), Some(0));
        assert_eq!(Some(cached), listed(&left)[0]["tokens"].as_u64(), "{answer}");
        place = left;
    }
    place.run(&["warm", &file.display().to_string()]).check(0, "");
}

#[test]
fn what_cannot_be_warmed_is_refused_by_name() {
    let place = Place::new();
    place.write("short.md", "Hi.");
    place.write("rules.md", rules());
    place.write("bad.json", "{\"prompt\": \"x\", \"temprature\": 1}");
    let warm = |args: &[&str]| place.run(&[&["warm", "-m", "guide"], args].concat());
    warm(&["nowhere.md"]).check(66, "nowhere.md");
    warm(&["short.md"]).check(65, "prompt \"short\": it has ").check(65, "pages of 32");
    warm(&["bad.json"]).check(65, "prompt \"bad\": temprature");
    warm(&["rules.md", "rules.md"]).check(2, "two prompts are named \"rules\"");
    warm(&["rules.md", "short.md", "--name", "x"]).check(2, "--name names one prompt");
    warm(&["rules.md", "--name", "../x"]).check(2, "is no name");
    warm(&["rules.md", "--kv-disk", "0"]).check(2, "--kv-disk");
    warm(&["rules.md", "--kv-disk", "300K"]).check(2, "more than");
    assert_eq!(listed(&place), [] as [Value; 0]);
    warm(&["--out", "x"]).check(2, "no prompt is computed ahead");
    llmctl(&["warm", "--remove"]).check(2, "<NAME>");
}
