//! Promise: `llmctl serve --mcp-config` lists the tools of MCP servers and calls them for clients that may come in, for no page of
//! another origin and for no stranger; a call ends with its client, and a server that fails takes none of the others with it.

use super::{HttpServer, calls, has_python, log, place, wait_for, wait_for_end, write_servers};
use crate::common::prelude::*;
use crate::serve_ops::binary::{Serving, model, signal, start, start_as_told};
use crate::serve_ops::client::{Client, Reply, ask, connect, get};

/// A server with the MCP servers of mcp.json.
fn serving(place: Place, args: &[&str]) -> Serving {
    start(place, &[&["--mcp-config", "mcp.json"], args].concat())
}

/// The head of a call, with more lines.
fn head(serving: &Serving, tool: &str, more: &str) -> String {
    let address = serving.address;
    format!("POST /v1/mcp/tools/{tool} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json{more}")
}

fn post(serving: &Serving, tool: &str, body: &Value) -> Reply {
    ask(serving.address, &head(serving, tool, ""), &body.to_string())
}

/// Calls a tool. Returns status and text.
fn call(serving: &Serving, tool: &str, arguments: Value) -> (String, String) {
    let reply = post(serving, tool, &json!({"arguments": arguments}));
    assert_eq!(reply.status, 200, "{reply:?}");
    let member = |name: &str| reply.json()[name].as_str().expect("a text").to_owned();
    (member("status"), member("text"))
}

/// Begins a call and leaves its connection open.
fn begin(serving: &Serving, tool: &str) -> Client<TcpStream> {
    let mut client = connect(serving.address);
    let body = json!({"arguments": {}}).to_string();
    client.send(&format!("{}\r\nContent-Length: {}\r\n\r\n{body}", head(serving, tool, ""), body.len()));
    client
}

fn listed(serving: &Serving) -> Value {
    get(serving.address, "/v1/mcp").json()
}

/// Waits until no MCP server starts any more; returns the list.
fn settled(serving: &Serving) -> Value {
    wait_for("the MCP servers do not start", || {
        let servers = listed(serving)["servers"].clone();
        !servers.as_array().expect("servers").iter().any(|server| server["state"] == "starting")
    });
    listed(serving)
}

fn tools_of(listed: &Value, server: &str) -> Vec<String> {
    let tools = listed["tools"].as_array().expect("tools").iter().filter(|tool| tool["server"] == server);
    tools.map(|tool| tool["tool"].as_str().expect("a name").to_owned()).collect()
}

/// Ends a server by SIGTERM in good order; returns what stderr said.
fn end(serving: Serving) -> String {
    signal(&serving.child, libc::SIGTERM);
    let (status, said) = serving.end();
    assert_eq!(status.code(), Some(0), "{said}");
    said
}

#[test]
fn tools_are_listed_and_called() {
    if !has_python() {
        return;
    }
    let (serving, said) = {
        let place = place(&["--mode", "noisy"]);
        start_as_told(place, &["--mcp-config", "mcp.json", "--model", &model()])
    };
    let warned = "every user and program of this machine can call the tools of the MCP servers";
    assert!(said.iter().any(|line| line.starts_with(warned)), "{said:?}");
    let first = settled(&serving);
    let server = json!({"name": "t", "state": "running", "about": "test-server 1.2", "reason": null});
    assert_eq!(first["servers"], json!([server]));
    assert_eq!(tools_of(&first, "t").len(), 11, "all pages of the list: {first}");
    let echo = json!({
        "name": "t__echo", "server": "t", "tool": "echo", "description": "Say a text again",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    });
    assert_eq!(first["tools"][0], echo);
    let status = |status: &str, text: &str| (status.to_owned(), text.to_owned());
    assert_eq!(call(&serving, "t__add", json!({"a": 2, "b": 3})), status("done", "{\"sum\":5}"));
    assert_eq!(call(&serving, "t__fail", json!({})), status("failed", "error: no luck"));
    assert_eq!(call(&serving, "t__refuse", json!({})), status("failed", "error: there is no 'luck'"));
    let picture = "[image/png, 12.0 KiB: left out; the model reads no images]";
    assert_eq!(call(&serving, "t__image", json!({})), status("done", picture));
    let (_, flood) = call(&serving, "t__flood", json!({}));
    assert!(flood.ends_with("x\n[cut: 131.3 KiB of 195.3 KiB left out]"), "{} bytes", flood.len());
    assert_eq!(call(&serving, "t__grow", json!({})), status("done", "grown"));
    wait_for("the new tool is not listed", || tools_of(&listed(&serving), "t").len() == 12);
    assert_eq!(calls(&serving.place, "t").len(), 6);
    let said = end(serving);
    assert!(said.contains("MCP server t has changed its tools: 12 tools now"), "{said}");
}

#[test]
fn a_request_that_is_no_call_calls_nothing() {
    if !has_python() {
        return;
    }
    let serving = serving(place(&[]), &[]);
    settled(&serving);
    let unknown = post(&serving, "t__nope", &json!({"arguments": {}}));
    unknown.check(404, "tool_not_found");
    assert_eq!(unknown.json()["error"]["message"], "there is no tool t__nope");
    post(&serving, "nobody__echo", &json!({"arguments": {}})).check(404, "tool_not_found");
    post(&serving, &"x".repeat(5000), &json!({"arguments": {}})).check(404, "tool_not_found");
    post(&serving, "%ff", &json!({"arguments": {}})).check(400, "invalid_value");
    for wrong in
        [json!({}), json!({"arguments": null}), json!({"arguments": [1]}), json!({"arguments": "{}"})]
    {
        let reply = post(&serving, "t__echo", &wrong);
        reply.check(422, "invalid_value");
        assert_eq!(reply.json()["error"]["param"], "arguments", "{wrong}");
    }
    post(&serving, "t__echo", &json!({"arguments": {"text": "x"}, "more": 1}))
        .check(400, "unsupported_parameter");
    post(&serving, "t__echo", &json!([])).check(422, "invalid_json");
    let plain = head(&serving, "t__echo", "").replace("application/json", "text/plain");
    ask(serving.address, &plain, "{\"arguments\": {\"text\": \"x\"}}").check(415, "unsupported_media_type");
    get(serving.address, "/v1/mcp/tools/t__echo").check(405, "method_not_supported");
    assert_eq!(calls(&serving.place, "t"), [] as [&str; 0]);
    end(serving);
}

#[test]
fn no_page_of_another_origin_lists_or_calls_a_tool() {
    if !has_python() {
        return;
    }
    let body = json!({"arguments": {"text": "x"}}).to_string();
    for (args, key) in [
        (&[][..], ""),
        (&["--cors-origin", "*"], ""),
        (&["--cors-origin", "https://evil.example"], ""),
        (&["--cors-origin", "*"], "sk-right"),
    ] {
        let place = place(&[]);
        place.write("keys", key);
        let keys = ["--api-key-file", "keys"];
        let serving = serving(place, &[args, if key.is_empty() { &[] } else { &keys[..] }].concat());
        let with_key =
            if key.is_empty() { String::new() } else { format!("\r\nAuthorization: Bearer {key}") };
        let list = |more: &str| {
            let address = serving.address;
            ask(address, &format!("GET /v1/mcp HTTP/1.1\r\nHost: {address}{with_key}{more}"), "")
        };
        wait_for("the server does not start", || list("").json()["servers"][0]["state"] == "running");
        let call = |more: &str| {
            ask(serving.address, &head(&serving, "t__echo", &format!("{with_key}{more}")), &body)
        };
        for origin in ["https://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1.evil.example"]
        {
            let origin = format!("\r\nOrigin: {origin}");
            list(&origin).check(403, "origin_not_allowed");
            call(&origin).check(403, "origin_not_allowed");
        }
        assert_eq!(calls(&serving.place, "t"), [] as [&str; 0], "{args:?}");
        let own = format!("\r\nOrigin: http://{}", serving.address);
        assert_eq!((list(&own).status, call(&own).status, call("").status), (200, 200, 200), "{args:?}");
        end(serving);
    }
}

#[test]
fn a_call_needs_the_servers_name_and_its_key() {
    if !has_python() {
        return;
    }
    let body = json!({"arguments": {"text": "x"}}).to_string();
    let open = serving(place(&[]), &[]);
    settled(&open);
    let rebound = head(&open, "t__echo", "").replace(&open.address.to_string(), "evil.example");
    ask(open.address, &format!("{rebound}\r\nOrigin: http://evil.example"), &body)
        .check(403, "host_not_allowed");
    assert_eq!(calls(&open.place, "t").len(), 0);
    end(open);
    let place = place(&[]);
    place.write("keys", "sk-one owner=anna\nsk-two owner=bert\n");
    let closed = serving(place, &["--api-key-file", "keys"]);
    get(closed.address, "/v1/mcp").check(401, "invalid_api_key");
    for key in ["", "\r\nAuthorization: Bearer sk-three"] {
        ask(closed.address, &head(&closed, "t__echo", key), &body).check(401, "invalid_api_key");
    }
    // Every key may call.
    for key in ["sk-one", "sk-two"] {
        let with = head(&closed, "t__echo", &format!("\r\nAuthorization: Bearer {key}"));
        wait_for("the server does not start", || ask(closed.address, &with, &body).status == 200);
    }
    assert_eq!(calls(&closed.place, "t").len(), 2);
    end(closed);
}

#[test]
fn strangers_and_folders_get_no_tools() {
    let place = Place::new();
    place.write("mcp.json", json!({"mcpServers": {"a": {"command": "/no/such"}}}).to_string());
    let model = model();
    let serve = ["serve", "--model", &model, "--port", "0"];
    let strangers = ["--mcp-config", "mcp.json", "--host", "0.0.0.0", "--insecure-no-auth"];
    place
        .run(&[&serve[..], &strangers].concat())
        .check(2, "--mcp-config: others can reach 0.0.0.0, and would call the tools without an API key");
    place.run(&[&serve[..], &["--mcp-config", "none.json"]].concat()).check(66, "none.json");
    place.write("wrong.json", "{}");
    place.run(&[&serve[..], &["--mcp-config", "wrong.json"]].concat()).check(78, "it has no mcpServers");
    place.run(&[&serve[..], &["--allow-tool", "a__b"]].concat()).check(2, "--allow-tool");
    place.write("llmctl.toml", "[serve]\nmcp-config = [\"mcp.json\"]\n");
    place.run(&serve).check(78, "mcp-config: only your own configuration file may set it");
}

#[test]
fn without_a_configuration_there_are_no_tools() {
    let serving = start(Place::new(), &[]);
    assert_eq!(listed(&serving), json!({"servers": [], "tools": []}));
    let none = post(&serving, "t__echo", &json!({"arguments": {}}));
    none.check(404, "tool_not_found");
    assert!(none.json()["error"]["message"].as_str().is_some_and(|why| why.contains("--mcp-config")));
    end(serving);
}

/// Starts a server with calls under way that end with their clients.
fn with_hanging_calls(count: usize) -> Option<(Serving, Vec<Client<TcpStream>>)> {
    if !has_python() {
        return None;
    }
    let serving = serving(place(&["--mode", "parallel"]), &[]);
    settled(&serving);
    let hanging = (0..count).map(|_| begin(&serving, "t__hang")).collect();
    wait_for("the calls do not come", || calls(&serving.place, "t").len() == count);
    Some((serving, hanging))
}

#[test]
fn calls_run_side_by_side_and_end_with_their_client() {
    let Some((serving, hanging)) = with_hanging_calls(3) else { return };
    assert_eq!(call(&serving, "t__echo", json!({"text": "beside"})).1, "beside");
    let num_cancelled = || log(&serving.place, "t").matches("notifications/cancelled").count();
    assert_eq!(num_cancelled(), 0, "their clients wait");
    drop(hanging);
    wait_for("the server is not told that nobody waits", || num_cancelled() == 3);
    assert_eq!(call(&serving, "t__echo", json!({"text": "after"})).1, "after");
    end(serving);
}

#[test]
fn a_call_that_takes_too_long_fails() {
    if !has_python() {
        return;
    }
    let serving = serving(place(&["--mode", "parallel"]), &["--tool-timeout", "1"]);
    settled(&serving);
    let late = ("failed".to_owned(), "error: it took longer than 1 s".to_owned());
    assert_eq!(call(&serving, "t__hang", json!({})), late);
    wait_for("the server is not told", || log(&serving.place, "t").contains("notifications/cancelled"));
    end(serving);
}

#[test]
fn too_many_calls_at_once_are_refused() {
    let Some((serving, hanging)) = with_hanging_calls(64) else { return };
    post(&serving, "t__echo", &json!({"arguments": {"text": "x"}})).check(429, "queue_full");
    drop(hanging);
    wait_for("the places do not get free", || {
        post(&serving, "t__echo", &json!({"arguments": {"text": "x"}})).status == 200
    });
    end(serving);
}

#[test]
fn a_server_that_fails_is_down_and_the_others_go_on() {
    if !has_python() {
        return;
    }
    let place = Place::new();
    write_servers(&place, &[("a", &[]), ("b", &[]), ("c", &[]), ("dies", &["--mode", "dies"])]);
    let mut config: Value = serde_json::from_str(&place.read("mcp.json")).expect("JSON");
    config["mcpServers"]["missing"] = json!({"command": "/no/such/folder/program"});
    place.write("mcp.json", config.to_string());
    let args = ["--mcp-config", "mcp.json", "--model", &model()];
    let (serving, before) = start_as_told(place, &args);
    let first = settled(&serving);
    let condition = |listed: &Value, name: &str| {
        let servers = listed["servers"].as_array().expect("servers");
        let server = servers.iter().find(|server| server["name"] == name).expect("a server");
        (server["state"].as_str().expect("a state").to_owned(), server["reason"].clone())
    };
    let down = |reason: &str| ("down".to_owned(), json!(reason));
    assert_eq!(condition(&first, "dies"), down("it has ended (exit status: 7)"));
    let (state, reason) = condition(&first, "missing");
    let reason = reason.as_str().expect("a reason").to_owned();
    assert!(state == "down" && reason.starts_with("cannot start program") && !reason.contains("/no/such"));
    assert_eq!(first["tools"].as_array().map(Vec::len), Some(33));

    let lost = ("failed".to_owned(), "error: the server a has ended or cannot be reached".to_owned());
    assert_eq!(call(&serving, "a__die", json!({})), lost);
    let after = listed(&serving);
    assert_eq!(condition(&after, "a"), down("it has ended (exit status: 3)"));
    assert_eq!(tools_of(&after, "a"), [] as [&str; 0]);
    let gone = post(&serving, "a__echo", &json!({"arguments": {"text": "x"}}));
    gone.check(404, "tool_not_found");
    assert_eq!(gone.json()["error"]["message"], "the server a does not run");
    assert_eq!(call(&serving, "b__echo", json!({"text": "y"})).1, "y");

    // The next request finds a server that has ended while nobody called it.
    let pid = log(&serving.place, "c").lines().find_map(|line| line.strip_prefix("pid ")?.parse().ok());
    let pid = pid.and_then(rustix::process::Pid::from_raw).expect("a process id");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it runs");
    wait_for("its end is not noticed", || condition(&listed(&serving), "c").0 == "down");
    let said = before.join("\n") + &end(serving);
    for line in [
        "MCP server dies: it has ended (exit status: 7); its last lines:\nno configuration\ncannot go on",
        "MCP server missing: cannot start /no/such/folder/program",
        "MCP server a: it has ended (exit status: 3); its last lines:\nthe server has had enough",
        "MCP server c: it has ended (signal: 9",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
}

#[test]
fn a_server_behind_http_is_called_too() {
    if !has_python() {
        return;
    }
    let place = Place::new();
    let behind = HttpServer::start(&place, &[]);
    place.write("mcp.json", json!({"mcpServers": {"h": {"url": behind.url}}}).to_string());
    let serving = serving(place, &[]);
    settled(&serving);
    assert_eq!(call(&serving, "h__add", json!({"a": 1, "b": 2})).1, "{\"sum\":3}");
    drop(behind);
    let (status, text) = call(&serving, "h__add", json!({"a": 1, "b": 2}));
    assert!(status == "failed" && text.starts_with("error: it cannot be reached"), "{text}");
    end(serving);
}

#[test]
fn no_mcp_server_outlives_the_server() {
    if !has_python() {
        return;
    }
    for number in [libc::SIGTERM, libc::SIGINT] {
        let place = Place::new();
        let servers: [(&str, &[&str]); 3] =
            [("calm", &[]), ("stubborn", &["--mode", "stubborn"]), ("silent", &["--mode", "silent"])];
        write_servers(&place, &servers);
        let serving = serving(place, &["--drain-timeout", "1s"]);
        wait_for("they do not run", || {
            let states = listed(&serving)["servers"].clone();
            states[0]["state"] == "running" && states[1]["state"] == "running"
        });
        assert_eq!(listed(&serving)["servers"][2]["state"], "starting");
        wait_for("it does not start", || log(&serving.place, "silent").contains("pid "));
        let mut waiting = begin(&serving, "stubborn__hang");
        wait_for("the call does not come", || calls(&serving.place, "stubborn").len() == 1);
        signal(&serving.child, number);
        waiting.reply().check(503, "shutting_down");
        let (mut child, place) = (serving.child, serving.place);
        assert_eq!(child.wait().expect("it ends").code(), Some(0));
        for (name, _) in servers {
            wait_for_end(&place, name);
        }
        assert!(log(&place, "calm").ends_with("ended\n"), "its input was closed: {}", log(&place, "calm"));
    }
}

#[test]
fn a_call_under_way_is_waited_for_at_the_end() {
    if !has_python() {
        return;
    }
    let serving = serving(place(&["--mode", "parallel"]), &["--tool-timeout", "3"]);
    settled(&serving);
    let mut waiting = begin(&serving, "t__hang");
    wait_for("the call does not come", || calls(&serving.place, "t").len() == 1);
    signal(&serving.child, libc::SIGTERM);
    let reply = waiting.reply();
    assert_eq!((reply.status, reply.json()["text"].clone()), (200, json!("error: it took longer than 3 s")));
    let (status, said) = serving.end();
    assert_eq!(status.code(), Some(0), "{said}");
}

#[test]
fn an_engine_elsewhere_changes_nothing_about_tools() {
    if !has_python() {
        return;
    }
    let engine = start(Place::new(), &[]);
    let url = format!("http://{}", engine.address);
    let args = ["--engine", &url, "--model", &model(), "--mcp-config", "mcp.json"];
    let (serving, _) = start_as_told(place(&[]), &args);
    assert_eq!(tools_of(&settled(&serving), "t").len(), 11);
    assert_eq!(call(&serving, "t__echo", json!({"text": "x"})).1, "x");
    end(serving);
    end(engine);
}

#[test]
fn several_models_share_the_tools() {
    if !has_python() {
        return;
    }
    let qwen = parity_folder().join("qwen2").to_string_lossy().into_owned();
    let args = ["--model", &model(), "--model", &qwen, "--mcp-config", "mcp.json", "--no-page"];
    let (serving, said) = start_as_told(place(&[]), &args);
    assert!(
        said.iter().any(|line| line.starts_with("--no-page: the tools of the MCP servers are for programs"))
    );
    assert_eq!(tools_of(&settled(&serving), "t").len(), 11);
    assert_eq!(call(&serving, "t__echo", json!({"text": "x"})).1, "x");
    let models = get(serving.address, "/v1/models").json();
    let is_loaded = |model: &Value| model["status"]["value"] == "loaded";
    assert!(
        !models["data"].as_array().expect("models").iter().any(is_loaded),
        "no call loads a model: {models}"
    );
    end(serving);
}
