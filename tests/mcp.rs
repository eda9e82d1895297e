//! Promise: `run` and `chat` offer the model the tools of MCP servers, call none without the user's consent, report a server that
//! fails by name, lose no finished turn, and leave no server running. `serve` lists and calls them for its clients.
//!
//! The server is tests/mcp/server.py. Calls come from a fake endpoint, and from the model of `common::scripted`.

#![cfg(unix)]

mod serve;

use std::process::ChildStdout;

use crate::chat::Term;
use crate::common::prelude::*;
use crate::common::scripted::{self, PLAIN};
use crate::endpoint::fake::{Deed, FakeServer, end, part, saying};

/// Longest wait for what has to happen, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

const SERVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mcp/server.py");

/// Returns whether there is a Python, which the server needs, and says if there is none.
fn has_python() -> bool {
    let runs = Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success());
    if !runs {
        crate::common::skip("there is no python3");
    }
    runs
}

/// Arguments of a server that offers one tool, `now`, for the model of `common::scripted`, whose call is a single token. With
/// several tools llguidance forces the common beginning of their calls and spells it with ordinary tokens, of which it takes back
/// only the last few for a longer one, so that a token of the whole call is masked. Real vocabularies have none that long.
const ONE_TOOL: &[&str] = &["--only", "now"];

/// A place with one server, `t`, in mcp.json, which has these arguments and writes its log to `t.log`.
fn place(args: &[&str]) -> Place {
    let place = Place::new();
    write_servers(&place, &[("t", args)]);
    place
}

/// Writes mcp.json with these servers and their arguments.
fn write_servers(place: &Place, servers: &[(&str, &[&str])]) {
    let server = |(name, own): &(&str, &[&str])| {
        let log = place.path(&format!("{name}.log")).display().to_string();
        let args = [&[SERVER, "--log", &log], *own].concat();
        ((*name).to_owned(), json!({"command": "python3", "args": args, "env": {"OWN": "${HOME}"}}))
    };
    let servers: Map<String, Value> = servers.iter().map(server).collect();
    place.write("mcp.json", json!({"mcpServers": servers}).to_string());
}

/// An answer that calls these tools.
fn calling(calls: &[(&str, Value)]) -> Deed {
    let call = |(index, (name, arguments)): (usize, &(&str, Value))| {
        let function = json!({"name": name, "arguments": arguments.to_string()});
        json!({"index": index, "id": format!("c{index}"), "type": "function", "function": function})
    };
    let calls: Vec<Value> = calls.iter().enumerate().map(call).collect();
    Deed::Events([part(json!({"tool_calls": calls}))].into_iter().chain(end("tool_calls")).collect())
}

/// Runs with the servers of mcp.json and these answers.
fn run(place: &Place, deeds: Vec<Deed>, args: &[&str]) -> (Ran, FakeServer) {
    let fake = FakeServer::start(deeds);
    let flags = ["run", "--endpoint", &fake.url, "--mcp-config", "mcp.json"];
    (place.run(&[&flags, args].concat()), fake)
}

/// Returns the results that the model was given with a request.
fn results(fake: &FakeServer, request: usize) -> Vec<String> {
    let messages = fake.asked()[request].messages();
    messages.into_iter().filter(|(role, _)| role == "tool").map(|(_, text)| text).collect()
}

fn log(place: &Place, server: &str) -> String {
    std::fs::read_to_string(place.path(&format!("{server}.log"))).unwrap_or_default()
}

/// Returns the calls that a server got.
fn calls(place: &Place, server: &str) -> Vec<String> {
    log(place, server).lines().filter_map(|line| line.strip_prefix("call ").map(str::to_owned)).collect()
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until the server that wrote this log has ended.
fn wait_for_end(place: &Place, server: &str) {
    let log = log(place, server);
    let pid =
        log.lines().rev().find_map(|line| line.strip_prefix("pid ")).expect("it has started").to_owned();
    wait_for("the server runs on", || {
        let shown = Command::new("ps").args(["-o", "stat=", "-p", &pid]).output().expect("ps");
        let state = String::from_utf8_lossy(&shown.stdout).into_owned();
        state.trim().is_empty() || state.trim().starts_with('Z')
    });
}

#[test]
fn a_run_calls_an_allowed_tool_and_answers_with_its_result() {
    if !has_python() {
        return;
    }
    let place = place(&[]);
    let deeds = || {
        vec![
            calling(&[("t__add", json!({"a": 2, "b": 3})), ("t__echo", json!({"text": "hi"}))]),
            saying(&["It is ", "5."]),
        ]
    };
    let allowed = ["--allow-tool", "t__*", "What is 2 + 3?"];
    let (ran, fake) = run(&place, deeds(), &allowed);
    assert_eq!(
        ran.check(0, "calling: MCP server t, tool add, arguments: {\"a\":2,\"b\":3}").stdout,
        "It is 5.\n"
    );
    let offered = fake.asked()[0].body["tools"].clone();
    assert_eq!(offered.as_array().map(Vec::len), Some(11), "all pages of the list: {offered}");
    assert_eq!(offered[0]["function"]["name"], "t__echo");
    assert_eq!(offered[0]["function"]["parameters"]["required"], json!(["text"]));
    assert_eq!(results(&fake, 1), ["{\"sum\":5}", "hi"]);
    assert_eq!(calls(&place, "t"), ["add {\"a\": 2, \"b\": 3}", "echo {\"text\": \"hi\"}"]);
    assert!(log(&place, "t").ends_with("ended\n"), "its input was closed: {}", log(&place, "t"));

    let (ran, _) = run(&place, deeds(), &[&["--output", "json"], &allowed[..]].concat());
    let value: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    assert_eq!((&value["text"], &value["finish_reason"]), (&json!("It is 5."), &json!("stop")));
    let round = &value["tool_rounds"][0];
    assert_eq!(round["tool_calls"][1]["function"]["name"], "t__echo");
    let result = json!({"id": "c0", "name": "t__add", "status": "done", "text": "{\"sum\":5}"});
    assert_eq!(round["results"][0], result);

    let (ran, _) = run(&place, deeds(), &[&["--output", "jsonl"], &allowed[..]].concat());
    let lines: Vec<Value> =
        ran.check(0, "").stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let events: Vec<&str> = lines.iter().filter_map(|line| line["event"].as_str()).collect();
    assert_eq!(events, ["tool_calls", "tool_result", "tool_result", "text", "text", "done"]);
}

#[test]
fn nothing_is_called_without_consent() {
    if !has_python() {
        return;
    }
    let place = place(&[]);
    let call = || calling(&[("t__echo", json!({"text": "x"}))]);
    for flags in [&[][..], &["--allow-tool", "t__add"], &["--allow-tool", "t__ech"]] {
        let (ran, fake) = run(&place, vec![call(), saying(&["no"])], &[flags, &["q"]].concat());
        ran.check(
            0,
            "t__echo was not called: that takes your consent at a terminal, or --allow-tool t__echo",
        );
        assert_eq!(
            (results(&fake, 1), ran.stdout.as_str()),
            (vec!["error: the user refused the call".to_owned()], "no\n")
        );
    }
    assert_eq!(calls(&place, "t"), [] as [&str; 0], "not even one that says that it only reads");
    let (ran, _) = run(&place, vec![saying(&["a"])], &["--allow-tool", "t__nope", "q"]);
    ran.check(0, "--allow-tool t__nope: no MCP server has such a tool");
    place.run(&["run", "--allow-tool", "*", "q"]).check(2, "neither server__tool nor server__*");
}

#[test]
fn what_a_tool_cannot_do_is_said_to_the_user_and_to_the_model() {
    if !has_python() {
        return;
    }
    let place = place(&["--mode", "noisy"]);
    let none = json!({});
    let odd = [
        ("t__image", none.clone()),
        ("t__fail", none.clone()),
        ("t__refuse", none.clone()),
        ("t__nope", none.clone()),
        ("t__flood", none.clone()),
        ("t__variable", json!({"text": "OWN"})),
        ("t__variable", json!({"text": "OTHER"})),
    ];
    let fake = FakeServer::start([calling(&odd), saying(&["done"])]);
    let flags = ["run", "--endpoint", &fake.url, "--mcp-config", "mcp.json", "--allow-tool", "t__*", "q"];
    let mut command = place.command(&flags);
    command.env("OTHER", "sk-secret");
    let ran = finish(command, "");
    ran.check(0, "t__image: image/png, 12.0 KiB: left out; the model reads no images");
    let results = results(&fake, 1);
    let home = place.folder.path().display().to_string();
    let expected = [
        "[image/png, 12.0 KiB: left out; the model reads no images]",
        "error: no luck",
        "error: there is no 'luck'",
        "error: there is no tool t__nope",
    ];
    assert_eq!(results[..4], expected);
    assert!(results[4].ends_with("x\n[cut: 131.3 KiB of 195.3 KiB left out]"), "{:?}", &results[4][65_500..]);
    assert!(ran.stderr.contains("t__flood: cut: 131.3 KiB of 195.3 KiB left out"), "{}", ran.stderr);
    assert_eq!(results[5..], [home, "not set".to_owned()], "a server gets its own variables only");
}

#[test]
fn a_server_that_fails_is_named_and_the_others_go_on() {
    if !has_python() {
        return;
    }
    let place = Place::new();
    write_servers(&place, &[("a", &[]), ("b", &[])]);
    let deeds = vec![
        calling(&[
            ("a__die", json!({})),
            ("a__echo", json!({"text": "x"})),
            ("b__echo", json!({"text": "y"})),
        ]),
        saying(&["done"]),
    ];
    let (ran, fake) = run(&place, deeds, &["--allow-tool", "a__*", "--allow-tool", "b__*", "q"]);
    ran.check(0, "MCP server a: it has ended (exit status: 3); its last lines:\nthe server has had enough");
    let lost = "error: the server a has ended or cannot be reached";
    assert_eq!(results(&fake, 1), [lost, "error: the server a does not run", "y"]);
    let num_tools = |request: usize| fake.asked()[request].body["tools"].as_array().map_or(0, Vec::len);
    assert_eq!((num_tools(0), num_tools(1)), (22, 11), "its tools are no longer offered");

    write_servers(&place, &[("a", &["--mode", "dies"]), ("b", &[])]);
    let (ran, fake) = run(&place, vec![], &["q"]);
    ran.check(
        69,
        "MCP server a: it has ended (exit status: 7); its last lines:\nno configuration\ncannot go on",
    );
    assert_eq!(fake.asked().len(), 0, "a run without a server's tools would be another one");
    wait_for_end(&place, "b");
    place.write("mcp.json", json!({"mcpServers": {"a": {"command": "/no/such"}}}).to_string());
    run(&place, vec![], &["q"]).0.check(69, "MCP server a: cannot start /no/such");
}

#[test]
fn a_list_of_tools_without_end_or_schemas_is_kept() {
    if !has_python() {
        return;
    }
    let place = place(&["--mode", "endless"]);
    let deeds = vec![calling(&[("t__echo", json!({"text": "hi"}))]), saying(&["done"])];
    let (ran, fake) = run(&place, deeds, &["--allow-tool", "t__*", "q"]);
    ran.check(0, "");
    assert_eq!((results(&fake, 1), ran.stdout.as_str()), (vec!["hi".to_owned()], "done\n"));
    let offered = fake.asked()[0].body["tools"].as_array().map(Vec::len);
    assert_eq!(offered, Some(11), "each tool once");
}

#[test]
fn a_call_that_takes_too_long_is_given_up() {
    if !has_python() {
        return;
    }
    let place = place(&[]);
    let deeds = vec![calling(&[("t__hang", json!({}))]), saying(&["late"])];
    let (ran, fake) = run(&place, deeds, &["--allow-tool", "t__*", "--tool-timeout", "1", "q"]);
    ran.check(0, "t__hang: it took longer than 1 s; --tool-timeout gives more time");
    assert_eq!(
        (results(&fake, 1), ran.stdout.as_str()),
        (vec!["error: it took longer than 1 s".to_owned()], "late\n")
    );
    wait_for_end(&place, "t");
}

#[test]
fn the_number_of_rounds_is_bounded() {
    if !has_python() {
        return;
    }
    let place = place(&[]);
    let deeds: Vec<Deed> = (0..4).map(|n| calling(&[("t__echo", json!({"text": n.to_string()}))])).collect();
    let (ran, fake) = run(&place, deeds, &["--allow-tool", "t__*", "--max-tool-rounds", "2", "q"]);
    ran.check(3, "called tools in 2 answers in a row, and the calls of the next were not run");
    assert_eq!((fake.asked().len(), calls(&place, "t").len()), (3, 2));
}

#[test]
fn tools_that_are_not_run_end_the_run_with_their_calls() {
    if !has_python() {
        return;
    }
    let place = place(&[]);
    let tools = r#"[{"type": "function", "function": {"name": "own", "parameters": {"type": "object"}}}]"#;
    let deeds = vec![calling(&[("t__echo", json!({"text": "x"})), ("own", json!({}))])];
    let args = ["--allow-tool", "t__*", "--tools", tools, "--output", "json", "q"];
    let (ran, fake) = run(&place, deeds, &args);
    let value: Value =
        serde_json::from_str(&ran.check(0, "own is a tool of --tools: nothing was called").stdout)
            .expect("JSON");
    assert_eq!((&value["finish_reason"], calls(&place, "t").len()), (&json!("tool_calls"), 0));
    assert_eq!(fake.asked()[0].body["tools"].as_array().map(Vec::len), Some(12));
    let taken = tools.replace("own", "t__echo");
    run(&place, vec![], &["--tools", &taken, "q"]).0.check(2, "t__echo is the name of an MCP server's tool");
}

#[test]
fn a_dry_run_shows_the_tools_and_calls_none() {
    if !has_python() {
        return;
    }
    let place = place(&[]);
    let (ran, fake) = run(&place, vec![], &["--dry-run", "--output", "json", "q"]);
    let value: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    assert_eq!(value["request"]["tools"][1]["function"]["name"], "t__add");
    assert_eq!(fake.asked().len(), 0);
    scripted::write_calling(&place.path("model"), "t__now");
    let ran = place.run(&["run", "--model", "model", "--mcp-config", "mcp.json", "--dry-run", "q"]);
    assert!(ran.check(0, "").stdout.contains("\"name\": \"t__now\""), "{}", ran.stdout);
}

#[test]
fn a_model_here_calls_tools_as_one_elsewhere() {
    if !has_python() {
        return;
    }
    let place = place(ONE_TOOL);
    scripted::write_calling(&place.path("model"), "t__now");
    let flags = ["run", "--model", "model", "--mcp-config", "mcp.json", "--allow-tool", "t__now"];
    let ran = place.run(&[&flags[..], &["--session", "s", "use the tool"]].concat());
    assert_eq!(ran.check(0, "t__now returned (11 B): noon in UTC").stdout, format!("{PLAIN}\n"));
    let shown = place.run(&["sessions", "show", "s", "--output", "json"]);
    let turns = serde_json::from_str::<Value>(&shown.check(0, "").stdout).expect("JSON")["turns"].clone();
    assert_eq!(turns[0]["messages"][1]["tool_calls"][0]["function"]["name"], "t__now");
    assert_eq!(turns[1]["messages"][0]["content"], "noon in UTC");
    assert_eq!(turns[1]["messages"][1]["content"], PLAIN);
    let ran = place.run(&[&flags[..], &["use the tool"]].concat());
    assert_eq!(ran.check(0, "").stdout, format!("{PLAIN}\n"), "without a session");
}

#[test]
fn a_session_that_ends_in_the_middle_of_a_call_goes_on() {
    if !has_python() {
        return;
    }
    let place = place(&[]);
    let fake = FakeServer::start([calling(&[("t__hang", json!({}))]), saying(&["on"])]);
    let flags = ["run", "--endpoint", &fake.url, "--session", "s"];
    let tools = ["--mcp-config", "mcp.json", "--allow-tool", "t__*"];
    let mut child = place.command(&[&flags[..], &tools, &["first"]].concat()).spawn().expect("llmctl starts");
    wait_for("the call does not come", || calls(&place, "t").len() == 1);
    child.kill().expect("it runs");
    child.wait().expect("it has ended");
    wait_for_end(&place, "t");
    let ran = place.run(&[&flags[..], &["second"]].concat());
    assert_eq!(ran.check(0, "continuing session s (1 turn)").stdout, "on\n");
    let texts = fake.asked()[1].messages();
    let no_result = "error: there is no result of the call; it may have run";
    let expected = [("user", "first"), ("assistant", ""), ("tool", no_result), ("user", "second")];
    assert_eq!(texts, expected.map(|(role, text)| (role.to_owned(), text.to_owned())));
    assert_eq!(fake.asked()[1].body["messages"][2]["tool_call_id"], "c0");
}

#[test]
fn no_server_outlives_llmctl() {
    if !has_python() {
        return;
    }
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let place = place(&["--mode", "stubborn"]);
        let fake = FakeServer::start([calling(&[("t__hang", json!({}))])]);
        let flags = ["run", "--endpoint", &fake.url, "--mcp-config", "mcp.json", "--allow-tool", "t__*", "q"];
        let mut child = place.command(&flags).spawn().expect("llmctl starts");
        wait_for("the call does not come", || calls(&place, "t").len() == 1);
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).expect("it runs");
        let code = child.wait().expect("it ends").code();
        assert_eq!(code, Some(128 + signal.as_raw()));
        wait_for_end(&place, "t");
    }
    // Before there is an answer to stop, a signal ends llmctl at once.
    let place = place(&["--mode", "silent"]);
    let mut child = place.command(&["run", "--mcp-config", "mcp.json", "q"]).spawn().expect("llmctl starts");
    wait_for("the server does not start", || log(&place, "t").contains("pid "));
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM)
        .expect("it runs");
    assert_eq!(child.wait().expect("it ends").code(), Some(143));
    wait_for_end(&place, "t");
}

#[test]
fn a_folder_starts_no_server_and_allows_no_call() {
    let place = Place::new();
    for (key, value) in [("mcp-config", "[\"mcp.json\"]"), ("allow-tool", "[\"t__*\"]")] {
        place.write("llmctl.toml", format!("{key} = {value}\n"));
        place.run(&["run", "q"]).check(78, &format!("{key}: only your own configuration file may set it"));
    }
    place.write("llmctl.toml", "");
    place.write("mcp.json", "{\"mcpServers\": {\"a\": {\"command\": \"/no/such\"}}}");
    let ran = place.run(&["run", "--max-tokens", "3", "q"]);
    assert!(!ran.check(0, "").stderr.contains("MCP"), "mcp.json of the folder is not read: {}", ran.stderr);
}

/// The server behind HTTP, ended with its handle.
struct HttpServer {
    child: Child,
    url: String,
    _stdout: ChildStdout,
}

impl HttpServer {
    fn start(place: &Place, args: &[&str]) -> Self {
        use std::io::BufRead;
        let log = place.path("h.log").display().to_string();
        let mut command = Command::new("python3");
        command
            .args([SERVER, "--http", "--log", &log])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = command.spawn().expect("Python starts");
        let mut stdout = child.stdout.take().expect("a pipe");
        let mut port = String::new();
        BufReader::new(&mut stdout).read_line(&mut port).expect("a port");
        Self { child, url: format!("http://127.0.0.1:{}/mcp?x=1", port.trim()), _stdout: stdout }
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_server_behind_http_is_called_with_its_key() {
    if !has_python() {
        return;
    }
    let place = Place::new();
    let server = HttpServer::start(&place, &["--key", "k-secret"]);
    let config = |key: &str| {
        let headers = json!({"Authorization": format!("Bearer {key}")});
        place.write(
            "mcp.json",
            json!({"servers": {"h": {"type": "http", "url": server.url, "headers": headers}}}).to_string(),
        );
    };
    config("${KEY}");
    let fake = FakeServer::start([calling(&[("h__add", json!({"a": 1, "b": 2}))]), saying(&["3"])]);
    let flags = ["run", "--endpoint", &fake.url, "--mcp-config", "mcp.json", "--allow-tool", "h__*", "q"];
    let mut command = place.command(&flags);
    command.env("KEY", "k-secret");
    let ran = finish(command, "");
    assert_eq!(ran.check(0, "").stdout, "3\n");
    assert_eq!((results(&fake, 1), calls(&place, "h").len()), (vec!["{\"sum\":3}".to_owned()], 1));
    assert!(log(&place, "h").ends_with("delete session-1\n"), "{}", log(&place, "h"));
    assert!(!ran.stderr.contains("k-secret"), "{}", ran.stderr);

    config("wrong-key");
    let (ran, _) = run(&place, vec![], &["q"]);
    ran.check(69, "MCP server h: it answers 401: it wants a key");
    assert!(!ran.stderr.contains("wrong-key"), "{}", ran.stderr);
    drop(server);
    run(&place, vec![], &["q"]).0.check(69, "MCP server h: it cannot be reached");
}

#[test]
fn a_request_that_fails_is_not_the_end_of_a_server_behind_http() {
    if !has_python() {
        return;
    }
    let place = Place::new();
    let server = HttpServer::start(&place, &["--busy"]);
    place.write("mcp.json", json!({"mcpServers": {"h": {"url": server.url}}}).to_string());
    let call = || calling(&[("h__echo", json!({"text": "x"}))]);
    let (ran, fake) = run(&place, vec![call(), call(), saying(&["done"])], &["--allow-tool", "h__*", "q"]);
    assert_eq!(ran.check(0, "").stdout, "done\n");
    let results = results(&fake, 2);
    assert!(results[0].starts_with("error: ") && results[0].contains("503"), "{results:?}");
    assert_eq!(results[1], "x");
}

#[test]
fn a_chat_that_is_stopped_between_calls_keeps_the_results_for_the_next_message() {
    if !has_python() {
        return;
    }
    let place = place(&[]);
    let calls_of_turn = calling(&[("t__echo", json!({"text": "x"})), ("t__hang", json!({}))]);
    let fake = FakeServer::start([calls_of_turn, saying(&["on we go"])]);
    let flags = ["chat", "--endpoint", &fake.url, "--mcp-config", "mcp.json", "--allow-tool", "t__*"];
    let mut command = place.command(&flags);
    command.env("NO_COLOR", "1").env_remove("COLUMNS");
    let mut term = Term::open(command, 100);
    term.expect("tiny > ");
    term.send("first\r");
    wait_for("the second call does not come", || calls(&place, "t").len() == 2);
    term.send("\x03");
    term.expect("stopped; the results of the calls go with the next message");
    term.expect("tiny > ");
    assert_eq!(fake.asked().len(), 1, "no answer is asked for");
    term.send("second\r");
    term.expect("on we go");
    term.expect("tiny > ");
    term.leave();
    assert_eq!(results(&fake, 1), ["x", "error: the user stopped it"]);
}

#[test]
fn a_chat_asks_before_each_call() {
    if !has_python() {
        return;
    }
    let place = place(ONE_TOOL);
    scripted::write_calling(&place.path("model"), "t__now");
    let flags = ["chat", "--model", "model", "--session", "s", "--mcp-config", "mcp.json"];
    let mut command = place.command(&flags);
    command.env("NO_COLOR", "1").env_remove("COLUMNS");
    let mut term = Term::of(command, 100);
    term.line("/mcp", "running, 1 tool");
    let asks = |term: &mut Term, answer: &str| {
        term.send("use the tool\r");
        term.expect("The model wants to call: MCP server t, tool now, arguments: {\"zone\": \"UTC\"}");
        term.expect("call it? y(es), n(o), a(lways");
        term.send(&format!("{answer}\r"));
        term.expect(PLAIN);
        term.prompt();
    };
    asks(&mut term, "n");
    asks(&mut term, "y");
    asks(&mut term, "a");
    term.send("use the tool\r");
    term.expect("calling: MCP server t, tool now");
    term.expect("t__now returned (11 B): noon in UTC");
    term.expect(PLAIN);
    term.prompt();
    term.line("/mcp", "t__now  runs without asking");
    term.line("/mcp restart t", "MCP server t runs; 1 MCP server, 1 tool");
    asks(&mut term, "n");
    term.line("/mcp restart u", "there is no MCP server u");
    term.leave();
    assert_eq!(calls(&place, "t").len(), 3);
    wait_for_end(&place, "t");
}

#[test]
fn a_chat_goes_on_without_a_server_that_has_ended() {
    if !has_python() {
        return;
    }
    let place = Place::new();
    write_servers(&place, &[("a", &["--mode", "dies"]), ("b", &[])]);
    let deeds = [
        calling(&[("b__grow", json!({}))]),
        saying(&["one"]),
        calling(&[("b__grown", json!({})), ("b__die", json!({}))]),
        saying(&["two"]),
        saying(&["three"]),
    ];
    let fake = FakeServer::start(deeds);
    let more = words("--session s --mcp-config mcp.json --allow-tool b__*");
    let flags = [&["chat", "--endpoint", &fake.url], &more[..]].concat();
    let lines = "first\nsecond\n/mcp\nthird\n/mcp restart b\n/mcp\n";
    let ran = finish(place.command(&flags), lines);
    assert_eq!(ran.check(0, "MCP server a: it has ended (exit status: 7)").stdout, "one\ntwo\nthree\n");
    for said in [
        "1 MCP server, 11 tools",
        "MCP server b has changed its tools: 12 tools now",
        "MCP server b: it has ended (exit status: 3); its last lines:\nthe server has had enough",
        "MCP server b runs; 1 MCP server, 11 tools",
    ] {
        assert!(ran.stderr.contains(said), "{said}: {}", ran.stderr);
    }
    let num_tools = |request: usize| fake.asked()[request].body["tools"].as_array().map_or(0, Vec::len);
    assert_eq!((num_tools(0), num_tools(2), num_tools(4)), (11, 12, 0));
    assert_eq!(results(&fake, 3)[2], "error: the server b has ended or cannot be reached");
}
