//! `llmctl launch`: an agent's settings, its server and its exit code. The agent is a script that uses what it is given.

#[cfg(unix)]
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use llmctl::cli::launch::agents::{AGENTS, LaunchTarget};
use llmctl::cli::launch::described;

use super::finish;
use crate::common::prelude::*;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/parity/qwen3");

/// Asks the server of pi's settings for its models, with and without the key.
const AGENT: &str = r#"#!/bin/bash
file=$PI_CODING_AGENT_DIR/models.json
address=$(sed -n 's|.*"http://\(.*\)/v1",|\1|p' "$file")
ask() {
    exec 3<> "/dev/tcp/${address%:*}/${address#*:}"
    printf 'GET /v1/models HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nConnection: close\r\n\r\n' "$address" "$1" >&3
    head -1 <&3
    exec 3>&-
}
echo "arguments: $*"
echo "the user's key: ${LLMCTL_ENGINE_KEY-none}"
ask "$LLMCTL_API_KEY"
ask wrong
exit 7
"#;

/// Asks the server of pi's settings for an answer to `request.json`.
#[cfg(unix)]
const ASKING_AGENT: &str = r#"#!/bin/bash
address=$(sed -n 's|.*"http://\(.*\)/v1",|\1|p' "$PI_CODING_AGENT_DIR/models.json")
exec 3<> "/dev/tcp/${address%:*}/${address#*:}"
printf 'POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %s\r\nConnection: close\r\n\r\n' \
    "$address" "$LLMCTL_API_KEY" "$(wc -c < request.json)" >&3
cat request.json >&3
tail -1 <&3
"#;

/// Installs `script` as pi.
#[cfg(unix)]
fn install(place: &Place, script: &str) {
    std::fs::create_dir(place.path("bin")).expect("a folder");
    let program = place.write("bin/pi", script);
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("ours");
}

/// `llmctl launch pi` with what is installed.
#[cfg(unix)]
fn command_of(place: &Place, args: &[&str]) -> Command {
    let mut command = place.command(&[&["launch", "pi"], args].concat());
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", place.path("bin").display()));
    command
}

#[test]
fn the_manual_has_the_settings_of_every_agent() {
    let manual = include_str!("../../docs/agents.md");
    for agent in AGENTS {
        let target = LaunchTarget {
            url: "http://127.0.0.1:8484".to_owned(),
            key: "none".to_owned(),
            model: "my-model".to_owned(),
            context_tokens: 65_536,
            sees: false,
        };
        let folder = format!("/home/you/.local/share/llmctl/agents/{}", agent.name);
        let settings = described(agent, &agent.settings(&target, folder.as_ref()));
        assert!(manual.contains(&format!("```sh\n{settings}```")), "docs/agents.md lacks {settings}");
        assert!(manual.contains(&format!("`{}`", agent.install_command())), "{}", agent.name);
        assert!(manual.contains(&format!("Its endpoint is `{}`", agent.endpoint)), "{}", agent.name);
    }
}

#[test]
fn help_is_as_written() {
    insta::assert_snapshot!("help_launch", Place::new().run(&["launch", "--help"]).check(0, "").stdout);
    insta::assert_snapshot!("help_launch_short", Place::new().run(&["launch", "-h"]).check(0, "").stdout);
}

#[test]
fn settings_are_printed_and_nothing_is_written() {
    let place = Place::new();
    let ran = place.run(&["launch", "codex", "--print", "--model", MODEL]);
    let printed = &ran.check(0, "").stdout;
    for expected in
        ["model_context_window = 2048", "base_url = \"http://127.0.0.1:8484/v1\"", "export CODEX_HOME="]
    {
        assert!(printed.contains(expected), "{expected} is not in {printed}");
    }
    assert_eq!(std::fs::read_dir(place.folder.path()).expect("a folder").count(), 0);
}

#[test]
fn what_is_missing_is_an_error_before_a_model_is_loaded() {
    let place = Place::new();
    let mut command = place.command(&["launch", "pi", "--model", "/no/such/model"]);
    command.env("PATH", place.folder.path());
    finish(command, "").check(66, "npm install -g @earendil-works/pi-coding-agent");
    place.run(&["launch", "pi", "--endpoint", "http://127.0.0.1:1"]).check(69, "cannot connect to");
    place
        .run(&["launch", "vi"])
        .check(2, "possible values: claude, cline, codex, copilot, droid, goose, kimi, opencode, pi, qwen");
}

#[cfg(unix)]
#[test]
fn the_agents_own_prompt_stays_warm_for_its_next_start() {
    let place = Place::new();
    install(&place, ASKING_AGENT);
    let ask = |more: &[&str], question: &str| {
        let parameters = json!({"type": "object", "properties": {"path": {"type": "string"}}});
        let tool = json!({"type": "function", "function": {"name": "read_file", "parameters": parameters}});
        let system = "You are pi, and read files before you answer. ".repeat(12);
        let body = json!({"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
            "tools": [tool], "max_tokens": 2});
        place.write("request.json", body.to_string());
        let ran = finish(command_of(&place, &[&["--model", MODEL][..], more].concat()), "");
        let answer: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
        (answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64(), ran.stderr.clone())
    };
    let (cached, said) = ask(&["--warm"], "What is in a.rs?");
    assert_eq!(cached, Some(0), "{said}");
    let listed = place.run(&["warm", "--output", "json"]).check(0, "").stdout.clone();
    let listed: Value = serde_json::from_str(&listed).expect("JSON");
    let prompt = &listed["prompts"][0];
    let tokens = prompt["tokens"].as_u64().expect("a count");
    assert!(said.contains(&format!("pi: {tokens} tokens in ")), "{said}");
    assert_eq!(prompt["name"], "pi");
    // Another conversation, whose question has another length, begins with these tokens.
    assert_eq!(ask(&[], "And what is in the other file, b.rs?").0, Some(tokens));
    let endpoint = command_of(&place, &["--warm", "--endpoint", "http://127.0.0.1:1"]);
    finish(endpoint, "").check(2, "--endpoint");
}

#[cfg(unix)]
#[test]
fn an_agent_gets_a_server_of_its_own_and_its_exit_code_is_passed_on() {
    let place = Place::new();
    install(&place, AGENT);
    let mut command = command_of(&place, &["--model", MODEL, "--", "-p", "a question"]);
    command.env("LLMCTL_ENGINE_KEY", "sk-engine").env("LLMCTL_API_KEY", "sk-mine");
    let ran = finish(command, "");
    ran.check(7, "warning: the context has 2048 tokens; agents send up to");
    assert!(!ran.stderr.contains("not a variable"), "{ran:?}");
    let said = &ran.check(7, "listening on http://127.0.0.1:").stdout;
    let lines: Vec<&str> = said.lines().map(str::trim_end).collect();
    let expected = [
        "arguments: --provider llmctl --model qwen3 -p a question",
        "the user's key: none",
        "HTTP/1.1 200 OK",
        "HTTP/1.1 401 Unauthorized",
    ];
    assert_eq!(lines, expected, "{ran:?}");
    assert!(place.path(".local/share/llmctl/agents/pi/models.json").is_file());
    assert!(!place.path(".pi").exists());
}
