//! Promise: `run` and `chat` ask any server with OpenAI's interface: streamed, with tools, reasoning and sessions as with a model
//! here. What is not available there is refused by name, no finished turn is lost, and the key is nowhere but in the request.

mod choice;
pub mod fake;

use std::fs;

use self::fake::{Deed, FakeServer, behind_tls, end, part, saying};

use crate::common::prelude::*;

const KEY: &str = "sk-very-secret-7f3a";

/// A command that leaves the temperature to the server.
fn command(place: &Place, args: &[&str]) -> Command {
    let mut command = place.command(args);
    command.env_remove("LLMCTL_TEMPERATURE");
    command
}

fn run(place: &Place, fake: &FakeServer, args: &[&str]) -> Ran {
    finish(command(place, &[&["run", "--endpoint", &fake.url], args].concat()), "")
}

/// A chat whose lines come from a pipe.
fn chat(place: &Place, args: &[&str], lines: &str) -> Ran {
    finish(command(place, &[&["chat"], args].concat()), lines)
}

fn turns(place: &Place, session: &str) -> Vec<Value> {
    let ran = place.run(&["sessions", "show", session, "--output", "json"]);
    let value: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    value["turns"].as_array().expect("turns").clone()
}

fn answers(place: &Place, session: &str) -> Vec<String> {
    let answer = |turn: &Value| {
        let messages = turn["messages"].as_array().expect("messages");
        messages.last().and_then(|message| message["content"].as_str()).unwrap_or_default().to_owned()
    };
    turns(place, session).iter().map(answer).collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(role, text)| ((*role).to_owned(), (*text).to_owned())).collect()
}

#[test]
fn run_streams_the_text_and_sends_only_what_was_given() {
    let (place, fake) = (Place::new(), FakeServer::start([saying(&["Hel", "lo"]), saying(&["{\"a\": 1}"])]));
    let ran = run(&place, &fake, &["--system", "Be brief.", "Hi", "there"]);
    assert_eq!(ran.check(0, "").stdout, "Hello\n");
    assert_eq!(ran.stderr, "");
    let asked = &fake.asked()[0];
    assert_eq!(asked.messages(), pairs(&[("system", "Be brief."), ("user", "Hi there")]));
    let names: Vec<&String> = asked.body.as_object().expect("an object").keys().collect();
    assert_eq!(names, ["model", "messages", "stream", "stream_options"], "the server's defaults hold");
    assert_eq!((asked.body["model"].as_str(), &asked.key), (Some("tiny"), &None), "the only model");

    let schema = r#"{"type": "object"}"#;
    let flags =
        ["--temperature", "0.2", "--max-tokens", "9", "--stop", "X", "--seed", "7", "--schema", schema];
    run(&place, &fake, &[&["--model", "tiny", "q"], &flags[..]].concat()).check(0, "");
    let body = &fake.asked()[1].body;
    assert_eq!(
        (&body["temperature"], &body["max_tokens"], &body["seed"]),
        (&json!(0.2), &json!(9), &json!(7))
    );
    assert_eq!((&body["stop"], &body["response_format"]["type"]), (&json!(["X"]), &json!("json_schema")));
}

#[test]
fn json_reports_what_the_server_reports() {
    let deeds = [
        Deed::Events(
            [part(json!({"reasoning_content": "hm"})), part(json!({"content": "ok"}))]
                .into_iter()
                .chain(end("length"))
                .collect(),
        ),
        saying(&["a", "b"]),
    ];
    let (place, fake) = (Place::new(), FakeServer::with_models(&[("tiny", "llamacpp")], deeds));
    let sampling = ["--temperature", "0.5", "--top-k", "7", "--logit-bias", "5=-2"];
    let ran = run(&place, &fake, &[&["q", "--output", "json", "--stats"], &sampling[..]].concat());
    let value: Value =
        serde_json::from_str(&ran.check(0, "cut at the endpoint's own limit").stdout).expect("JSON");
    assert_eq!(
        (&value["text"], &value["reasoning"], &value["model"]),
        (&json!("ok"), &json!("hm"), &json!("tiny"))
    );
    assert_eq!((&value["finish_reason"], &value["usage"]["prompt_tokens"]), (&json!("length"), &json!(11)));
    let sent = json!({"temperature": 0.5, "top_k": 7, "logit_bias": {"5": -2.0}});
    assert_eq!((&value["sampling"], &value["seed"]), (&sent, &Value::Null));
    assert_eq!(value["endpoint"], format!("{}/v1", fake.url));
    assert!(ran.stderr.contains("prompt 11, 0 cached; answer 3"), "{}", ran.stderr);

    let ran = run(&place, &fake, &["q", "--output", "jsonl"]);
    let events: Vec<Value> =
        ran.check(0, "").stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let texts: String = events.iter().filter_map(|event| event["text"].as_str()).collect();
    assert_eq!((texts.as_str(), events.last().expect("events")["event"].as_str()), ("ab", Some("done")));
}

#[test]
fn a_chat_is_saved_as_text_and_continues_at_its_endpoint() {
    let deeds = ["one", "two", "three", "four"].map(|text| saying(&[text]));
    let (place, fake) = (Place::new(), FakeServer::start(deeds));
    let flags = ["--endpoint", &fake.url, "--session", "s", "--system", "Be brief."];
    let ran = chat(&place, &flags, "first\nsecond\n");
    assert_eq!(ran.check(0, "tiny \u{b7} at ").stdout, "one\ntwo\n");
    let begun = [("system", "Be brief."), ("user", "first"), ("assistant", "one"), ("user", "second")];
    assert_eq!(fake.asked()[1].messages(), pairs(&begun));

    // Without --endpoint: the session knows it.
    let ran = chat(&place, &["--session", "s"], "/undo\nthird\n/export md all.md\n/model\n");
    assert_eq!(ran.check(0, "").stdout, "three\n");
    assert!(ran.stderr.contains("taken back: \u{201c}second\u{201d}"), "{}", ran.stderr);
    assert!(ran.stderr.contains(&format!("tiny at {}/v1", fake.url)), "{}", ran.stderr);
    let third = [("system", "Be brief."), ("user", "first"), ("assistant", "one"), ("user", "third")];
    assert_eq!(fake.asked()[2].messages(), pairs(&third));
    assert!(place.read("all.md").contains("## Assistant\n\nthree"), "{}", place.read("all.md"));
    assert_eq!(answers(&place, "s"), ["one", "three"]);

    let ran = place.run(&["run", "--session", "s", "fourth"]);
    assert_eq!(ran.check(0, "continuing session s (2 turns)").stdout, "four\n");
    assert_eq!(fake.asked()[3].messages().len(), 6);
}

#[test]
fn other_models_of_an_endpoint_are_compared() {
    let deeds = ["one", "two", "three", "four"].map(|text| saying(&[text]));
    let (place, fake) = (Place::new(), FakeServer::with_models(&[("tiny", "x"), ("big", "x")], deeds));
    let flags = ["--endpoint", fake.url.as_str(), "--model", "tiny", "--session", "s"];
    let lines = format!("first\n/compare big\n/compare {}/v1#tiny\nsecond\n", fake.url);
    let ran = chat(&place, &flags, &lines);
    assert_eq!(ran.check(0, "VARIATION").stdout, "one\ntwo\nthree\nfour\n");
    assert_eq!(fake.asked()[1].messages(), pairs(&[("user", "first")]));
    assert_eq!(
        (&fake.asked()[1].body["model"], &fake.asked()[2].body["model"]),
        (&json!("big"), &json!("tiny"))
    );
    let last = [("user", "first"), ("assistant", "one"), ("user", "second")];
    assert_eq!((fake.asked()[3].messages(), answers(&place, "s").len()), (pairs(&last), 2));
}

#[test]
fn commands_about_turns_work_as_with_a_model_here() {
    let deeds = ["one", "two", "three", "four", "five"].map(|text| saying(&[text]));
    let (place, fake) = (Place::new(), FakeServer::start(deeds));
    let flags = ["--endpoint", fake.url.as_str(), "--session", "s"];
    let lines = "first\n/retry\n/redo\n/edit 1 changed\n/fork t\nmore\n/stats\n/show\n";
    let ran = chat(&place, &flags, lines);
    assert_eq!(ran.check(0, "").stdout, "one\ntwo\nthree\nfour\n");
    assert_eq!(fake.asked()[1].messages(), pairs(&[("user", "first")]), "/retry");
    assert_eq!(fake.asked()[2].messages(), pairs(&[("user", "changed")]), "/edit");
    let more = [("user", "changed"), ("assistant", "three"), ("user", "more")];
    assert_eq!(fake.asked()[3].messages(), pairs(&more), "/fork");
    assert_eq!(
        (answers(&place, "s"), answers(&place, "t")),
        (vec!["three".to_owned()], vec!["three".to_owned(), "four".to_owned()])
    );
    assert!(ran.stderr.contains("prompt 11, 0 cached; answer 3"), "{}", ran.stderr);
    assert!(ran.stderr.contains("[assistant] four"), "{}", ran.stderr);
}

#[test]
fn what_needs_a_model_here_is_refused_by_name() {
    let (place, fake) = (Place::new(), FakeServer::start([]));
    for line in [
        "/why",
        "/context",
        "/compact",
        "/continue",
        "/show template",
        "/show prompt",
        "/set top-k 5",
        "/think off",
    ] {
        let lines = format!("hello\n{line}\n");
        let ran = chat(&place, &["--endpoint", &fake.url, "--ephemeral"], &lines);
        assert_eq!(ran.code, Some(2), "{line}: {ran:?}");
        let said = ["not available with --endpoint", "this endpoint is not known to honour it"];
        assert!(said.iter().any(|said| ran.stderr.contains(said)), "{line}: {}", ran.stderr);
    }
    let num_asked = fake.asked().len();
    for flag in [
        &["--speculate", "ngram"][..],
        &["--cpu", "scalar"],
        &["--kv-type", "q8_0"],
        &["--kv-disk", "1G"],
        &["--ctx", "512"],
        &["--raw"],
        &["--prefill-response", "x"],
        &["--logprobs", "2", "--output", "json"],
        &["--top-k", "5"],
        &["--min-p", "0.1"],
        &["--regex", "a+"],
        &["--ignore-eos"],
        &["--max-tokens", "-1"],
        &["--think", "500"],
        &["--chat-template", "t.jinja"],
    ] {
        let ran = run(&place, &fake, &[&["q"], flag].concat());
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{flag:?}: {ran:?}");
        let name = if flag[0] == "--think" { "thinking with a budget" } else { flag[0] };
        assert!(ran.stderr.contains(name), "{flag:?}: {}", ran.stderr);
    }
    for (variable, value) in [
        ("LLMCTL_RAW", "1"),
        ("LLMCTL_PREFILL_RESPONSE", "x"),
        ("LLMCTL_LOGPROBS", "2"),
        ("LLMCTL_OVERFLOW", "clamp"),
    ] {
        let mut command = place.command(&["run", "--endpoint", &fake.url, "--output", "json", "q"]);
        command.env(variable, value);
        finish(command, "").check(2, variable);
    }
    assert_eq!(fake.asked().len(), num_asked, "nothing was sent");
    // A server whose make is known takes more.
    let engine = FakeServer::with_models(&[("tiny", "llamacpp")], []);
    run(&place, &engine, &["q", "--top-k", "5", "--min-p", "0.1", "--think", "off"]).check(0, "");
    let body = &engine.asked()[0].body;
    assert_eq!((&body["top_k"], &body["min_p"]), (&json!(5), &json!(0.1)));
    assert_eq!(body["chat_template_kwargs"], json!({"enable_thinking": false}));
}

#[test]
fn tools_are_offered_and_their_results_go_back() {
    let call = |id: &str, arguments: &str| {
        let function = json!({"name": "add", "arguments": arguments});
        part(json!({"tool_calls": [{"index": 0, "id": id, "type": "function", "function": function}]}))
    };
    let more = part(json!({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}));
    let calling = Deed::Events([call("c1", "{\"x\": "), more].into_iter().chain(end("tool_calls")).collect());
    let calling_again = calling.clone();
    let deeds = [calling.clone(), calling, saying(&["two"]), calling_again, saying(&["no JSON"])];
    let (place, fake) = (Place::new(), FakeServer::start(deeds));
    let tools = r#"[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]"#;
    let ran = run(&place, &fake, &["q", "--tools", tools, "--output", "json"]);
    let value: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    assert_eq!(value["finish_reason"], "tool_calls");
    assert_eq!(value["tool_calls"][0]["function"], json!({"name": "add", "arguments": "{\"x\": 1}"}));
    assert_eq!(fake.asked()[0].body["tools"][0]["function"]["name"], "add");

    place.write("tools.toml", "[[tool]]\nname = \"add\"\ndescription = \"adds\"\nargv = [\"true\"]\n");
    let flags = ["--endpoint", fake.url.as_str(), "--tools", "tools.toml", "--session", "s"];
    let ran = chat(&place, &flags, "add\n");
    assert_eq!(ran.check(0, "add wants to run").stdout, "two\n");
    let messages = fake.asked()[2].body["messages"].clone();
    assert_eq!(messages[1]["tool_calls"][0]["id"], "c1");
    let result = (&messages[2]["role"], &messages[2]["tool_call_id"], &messages[2]["content"]);
    assert_eq!(result, (&json!("tool"), &json!("c1"), &json!("error: the user refused to run it")));

    // A call is no answer yet that could keep to the schema.
    let flags = ["q", "--tools", tools, "--schema", r#"{"type": "object"}"#, "--output", "json"];
    let value: Value = serde_json::from_str(&run(&place, &fake, &flags).check(0, "").stdout).expect("JSON");
    assert_eq!(value["tool_calls"][0]["function"]["name"], "add");
    run(&place, &fake, &flags).check(3, "the answer is no JSON");
}

#[test]
fn a_dry_run_shows_the_request_and_sends_nothing() {
    let (place, fake) = (Place::new(), FakeServer::start([saying(&["one"])]));
    run(&place, &fake, &["--session", "s", "--system", "Be brief.", "first"]).check(0, "");
    let num_asked = fake.asked().len();
    let shown =
        |args: &[&str]| run(&place, &fake, &[&["--dry-run"], args].concat()).check(0, "").stdout.clone();

    let body: Value = serde_json::from_str(&shown(&["--max-tokens", "9", "q"])).expect("JSON");
    assert_eq!((&body["model"], &body["max_tokens"]), (&json!("tiny"), &json!(9)));
    assert_eq!(body["messages"], json!([{"role": "user", "content": "q"}]));
    for format in ["json", "jsonl"] {
        let text = shown(&["--output", format, "q"]);
        assert_eq!(text.lines().count(), 1, "{text}");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(
            (&value["schema"], &value["endpoint"], &value["model"]),
            (&json!("llmctl.dry-run.v1"), &json!(format!("{}/v1", fake.url)), &json!("tiny"))
        );
        assert_eq!(value["request"]["messages"][0]["content"], "q");
    }
    // In a session, its turns are in the request, and it is left as it is.
    let body: Value = serde_json::from_str(&shown(&["--session", "s", "second"])).expect("JSON");
    let texts: Vec<&Value> =
        body["messages"].as_array().expect("messages").iter().map(|message| &message["content"]).collect();
    assert_eq!(texts, ["Be brief.", "first", "one", "second"]);
    assert_eq!(answers(&place, "s"), ["one"]);
    shown(&["--session", "new", "first"]);
    place.run(&["sessions", "show", "new"]).check(66, "");
    assert_eq!(fake.asked().len(), num_asked);
}

#[test]
fn errors_say_what_is_wrong_and_what_helps() {
    let json = "Content-Type: application/json";
    let message = |text: &str| json!({"error": {"message": text, "type": "x"}}).to_string();
    let check = |deed: Deed, code: i32, said: &[&str]| {
        let (place, fake) = (Place::new(), FakeServer::with_models(&[("a", "x"), ("b", "x")], [deed]));
        let ran = run(&place, &fake, &["--model", "a", "--session", "s", "q"]);
        for said in said {
            ran.check(code, said);
        }
        // No turn, no session.
        place.run(&["sessions", "show", "s"]).check(66, "");
    };
    check(
        Deed::Plain(401, json, message("no key")),
        77,
        &["asks for a key (401): no key", "--endpoint-key-env NAME"],
    );
    check(
        Deed::Plain(404, json, message("no such model")),
        66,
        &["(404): no such model", "it has these models: a, b"],
    );
    let busy = "Content-Type: application/json\r\nRetry-After: 12";
    check(Deed::Plain(429, busy, message("slow down")), 75, &["(429): slow down", "try again in 12 s"]);
    check(Deed::Plain(500, json, message("oops")), 69, &["has failed (500): oops"]);
    check(
        Deed::Plain(400, json, message("maximum context length is 9")),
        65,
        &["longer than the model's context"],
    );
    check(Deed::Plain(200, "Content-Type: text/html", "<html>".to_owned()), 69, &["a web page", "/v1"]);
    check(
        Deed::Plain(200, "Content-Type: text/event-stream", String::new()),
        69,
        &["without the events of a stream"],
    );
    check(Deed::Plain(200, json, "{\"ok\": true}".to_owned()), 69, &["cannot be read"]);
    check(
        Deed::Events(vec![json!({"error": {"message": "overloaded"}})]),
        69,
        &["reports an error: overloaded"],
    );

    let place = Place::new();
    let ran = place.run(&["run", "--endpoint", "http://127.0.0.1:9", "q"]);
    ran.check(69, "http://127.0.0.1:9/v1 cannot be reached").check(69, "whether the server runs");
    let several = FakeServer::with_models(&[("a", "x"), ("b", "x")], []);
    run(&place, &several, &["q"]).check(2, "has several models").check(2, "--model NAME names one: a, b");
    run(&place, &several, &["-m", "c", "q"]).check(0, "does not list c; it lists: a, b");
}

#[test]
fn a_server_that_does_not_stream_answers_too() {
    let whole =
        json!({"choices": [{"message": {"role": "assistant", "content": "whole"}, "finish_reason": "stop"}]});
    let deed = Deed::Plain(200, "Content-Type: application/json; charset=utf-8", whole.to_string());
    let (place, fake) = (Place::new(), FakeServer::start([deed]));
    assert_eq!(run(&place, &fake, &["q"]).check(0, "").stdout, "whole\n");
}

#[test]
fn a_lost_server_leaves_the_answer_so_far_as_a_cancelled_turn() {
    let half = || vec![part(json!({"content": "half "})), part(json!({"content": "an answer"}))];
    let (place, fake) =
        (Place::new(), FakeServer::start([Deed::Break(half()), Deed::Break(half()), saying(&["whole"])]));
    let ran = run(&place, &fake, &["--session", "s", "q"]);
    assert_eq!(ran.check(69, "the connection ended").stdout, "half an answer\n");
    assert!(ran.stderr.contains("kept as a cancelled turn"), "{}", ran.stderr);
    assert_eq!(
        (answers(&place, "s"), &turns(&place, "s")[0]["finish_reason"]),
        (vec!["half an answer".to_owned()], &json!("cancelled"))
    );
    let ran = chat(&place, &["--session", "s"], "/undo\nagain\n");
    ran.check(69, "the answer so far is kept as a cancelled turn");
    let ran = chat(&place, &["--session", "s"], "/retry\n");
    assert_eq!(
        (ran.check(0, "").stdout.as_str(), answers(&place, "s")),
        ("whole\n", vec!["whole".to_owned()])
    );
}

#[test]
fn finished_turns_survive_a_kill_and_the_server_notices() {
    let waiting = Deed::Wait(vec![part(json!({"content": "begun"}))]);
    let (place, fake) = (Place::new(), FakeServer::start([saying(&["one"]), waiting, saying(&["two"])]));
    let mut command = place.command(&["chat", "--endpoint", &fake.url, "--session", "s"]);
    let place_of = |name: &str| File::create(place.path(name)).expect("a file");
    command.stdin(Stdio::piped()).stdout(place_of("out")).stderr(place_of("err"));
    let mut child = command.spawn().expect("llmctl starts");
    let mut input = child.stdin.take().expect("a pipe");
    std::io::Write::write_all(&mut input, b"first\nsecond\n").expect("it reads");
    fake.wait_for_waiting(1);
    child.kill().expect("SIGKILL");
    child.wait().expect("an end");
    fake.wait_for_closed(1);
    assert_eq!(answers(&place, "s"), ["one"]);
    let ran = chat(&place, &["--session", "s"], "second\n");
    assert_eq!((ran.check(0, "").stdout.as_str(), answers(&place, "s").len()), ("two\n", 2));
}

#[test]
fn a_request_is_put_as_the_server_asks_for_it() {
    let json = "Content-Type: application/json";
    let refuse = |text: &str| Deed::Plain(400, json, json!({"error": {"message": text}}).to_string());
    let deeds = [
        refuse("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."),
        refuse("stream_options is not permitted"),
        saying(&["yes"]),
        saying(&["again"]),
    ];
    let (place, fake) = (Place::new(), FakeServer::start(deeds));
    let flags = ["--endpoint", fake.url.as_str(), "--max-tokens", "5", "--ephemeral"];
    assert_eq!(chat(&place, &flags, "q\nr\n").check(0, "").stdout, "yes\nagain\n");
    for asked in &fake.asked()[2..] {
        assert_eq!((asked.body.get("max_tokens"), &asked.body["max_completion_tokens"]), (None, &json!(5)));
        assert_eq!(asked.body.get("stream_options"), None);
    }
}

/// Writes the user's configuration file.
fn configure(place: &Place, text: &str) {
    let folder = place.path(".config/llmctl");
    fs::create_dir_all(&folder).expect("a folder");
    fs::write(folder.join("config.toml"), text).expect("written");
}

/// All files below a folder, as text.
fn all_text(folder: &Path) -> String {
    let mut text = String::new();
    for entry in fs::read_dir(folder).expect("readable") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => text.push_str(&all_text(&path)),
            false => text.push_str(&String::from_utf8_lossy(&fs::read(&path).unwrap_or_default())),
        }
    }
    text
}

#[test]
fn the_key_is_in_the_request_and_nowhere_else() {
    let echo = json!({"error": {"message": format!("Incorrect API key provided: {KEY}")}}).to_string();
    let deeds = [
        saying(&["a"]),
        saying(&["b"]),
        Deed::Plain(401, "Content-Type: application/json", echo),
        Deed::Events(vec![json!({"error": {"message": format!("bad key {KEY}")}})]),
        saying(&["c"]),
    ];
    let (place, fake) = (Place::new(), FakeServer::start(deeds));
    let with_variable = |args: &[&str]| {
        let mut command = place.command(&[&["run", "-vvv", "--endpoint", &fake.url, "q"], args].concat());
        command.env("MY_KEY", KEY);
        finish(command, "")
    };
    let mut shown = String::new();
    let ran = with_variable(&["--endpoint-key-env", "MY_KEY", "--session", "s", "--output", "json"]);
    shown.push_str(&format!("{:?}", ran.check(0, "")));
    let key_file = tempfile::NamedTempFile::new().expect("a file");
    fs::write(key_file.path(), format!("{KEY}\n")).expect("written");
    let path = key_file.path().to_str().expect("UTF-8");
    shown.push_str(&format!(
        "{:?}",
        run(&place, &fake, &["q", "-v", "--endpoint-key-file", path]).check(0, "")
    ));
    let ran = with_variable(&["--endpoint-key-env", "MY_KEY", "--session", "s"]);
    shown.push_str(&format!("{:?}", ran.check(77, "rejects the key (401): Incorrect API key provided: ***")));
    let ran = with_variable(&["--endpoint-key-env", "MY_KEY"]);
    shown.push_str(&format!("{:?}", ran.check(69, "reports an error: bad key ***")));
    configure(&place, &format!("endpoint = \"{}\"\nendpoint-key-file = \"{path}\"\n", fake.url));
    shown.push_str(&format!("{:?}", place.run(&["run", "-v", "q"]).check(0, "")));
    shown.push_str(&format!("{:?}", place.run(&["config", "show", "--origin"])));
    assert!(fake.asked().iter().all(|asked| asked.key.as_deref() == Some(KEY)));
    assert!(!shown.contains(KEY), "{shown}");
    let kept = all_text(place.folder.path());
    assert!(kept.contains("\"user\"") && !kept.contains(KEY), "the session's file");
}

#[test]
fn a_key_of_the_configuration_goes_to_its_own_server_only() {
    let (place, fake, other) = (Place::new(), FakeServer::start([]), FakeServer::start([]));
    run(&place, &other, &["--session", "s", "q"]).check(0, "");
    place.write("key", KEY);
    configure(&place, &format!("endpoint = \"{}\"\nendpoint-key-file = \"key\"\n", fake.url));
    place.run(&["run", "q"]).check(0, "");
    place.run(&["run", "--session", "s", "q"]).check(0, "continuing session s (1 turn)");
    assert_eq!(fake.asked()[0].key.as_deref(), Some(KEY));
    assert_eq!(other.asked().len(), 2, "a session continues where it was");
    assert!(other.asked().iter().all(|asked| asked.key.is_none()));
}

#[test]
fn a_folder_sends_nothing_elsewhere() {
    let (place, fake) = (Place::new(), FakeServer::start([]));
    place.write("llmctl.toml", format!("endpoint = \"{}\"\nendpoint-key-env = \"HOME\"\n", fake.url));
    let ran = place.run(&["run", "q"]);
    ran.check(78, "llmctl.toml:1: endpoint: only your own")
        .check(78, "llmctl.toml:2: endpoint-key-env: only your own");
    assert!(fake.asked().is_empty());
}

#[test]
fn another_model_and_a_model_here_continue_a_session() {
    let fake = FakeServer::with_models(&[("a", "x"), ("b", "x")], []);
    let place = Place::new();
    let ran = chat(&place, &["--endpoint", &fake.url, "--model", "a", "--session", "s"], "q\n/model b\nr\n");
    ran.check(0, &format!("model b at {}/v1", fake.url));
    assert_eq!(
        (fake.asked()[0].body["model"].as_str(), fake.asked()[1].body["model"].as_str()),
        (Some("a"), Some("b"))
    );
    let ran =
        chat(&place, &["--session", "s", "--model", "guide", "--max-tokens", "1"], "What is a session?\n");
    assert_eq!(ran.check(0, "").code, Some(0));
    assert_eq!(turns(&place, "s").len(), 3);
    assert_eq!(fake.asked().len(), 2, "guide answers");
    // The last answer is guide's, so the session stays with it.
    chat(&place, &["--session", "s"], "/model\n").check(0, "guide, context");
}

#[test]
fn https_is_trusted_by_its_authority() {
    let (place, fake) = (Place::new(), FakeServer::start([saying(&["safe"])]));
    let url = behind_tls(&fake);
    let ran = place.run(&["run", "--endpoint", &url, "q"]);
    ran.check(69, "cannot be reached").check(69, "SSL_CERT_FILE");
    let mut command = place.command(&["run", "--endpoint", &url, "q"]);
    let authority = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/endpoint/authority.pem");
    command.env("SSL_CERT_FILE", authority);
    assert_eq!(finish(command, "").check(0, "").stdout, "safe\n");
    for url in ["https://me:secret@host", "me:secret@host", "https://me:secret@host/v1"] {
        let wrong = place.run(&["run", "--endpoint", url, "q"]);
        assert!(!wrong.check(2, "no user name, password or key").stderr.contains("secret"), "{wrong:?}");
    }
}
