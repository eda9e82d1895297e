//! Promise: coding agents work with `llmctl serve`. Each completes tasks of three tool calls in a scratch folder, against the
//! server's code on loopback with a scripted model in place of weights (see `model`), and with the settings of `llmctl launch`.
//!
//! `LLMCTL_TEST_AGENTS` is a folder with `node_modules` that holds the agents; `.ci/run` installs them where there is a
//! network. An agent that is not there is skipped with a note. Agents run without the user's files and variables, and all
//! that is not loopback is sent to a proxy that does not exist.

mod client;
mod model;
mod script;
mod server;

use client::{Case, Desk, finish, interrupt, until};
use script::LONG;
use server::Turn;

use crate::common::prelude::*;

/// Tokens that the end of a turn takes back at most: its last one was sampled, but is not computed yet.
const UNCOMPUTED: usize = 1;

/// A row of an image in a prompt.
const IMAGE: &str = "<|image_pad|>";

/// Tokens of a page of KV.
const PAGE: usize = PAGE_TOKENS;

const PI: Case = Case {
    agent: "pi",
    ask: &["-p"],
    go_on: &["-p", "--continue"],
    is_proxied: true,
    calls: |word| {
        [
            ("read", json!({"path": "notes.txt"})),
            ("write", json!({"path": format!("{word}.txt"), "content": format!("seen {word}\n")})),
            ("bash", json!({"command": format!("cat {word}.txt >> log.txt")})),
        ]
    },
};

const OPENCODE: Case = Case {
    agent: "opencode",
    ask: &["run"],
    go_on: &["run", "--continue"],
    is_proxied: true,
    calls: |word| {
        [
            ("read", json!({"filePath": "notes.txt"})),
            ("write", json!({"content": format!("seen {word}\n"), "filePath": format!("{word}.txt")})),
            ("bash", json!({"command": format!("cat {word}.txt >> log.txt")})),
        ]
    },
};

const QWEN: Case = Case {
    agent: "qwen",
    ask: &["--yolo", "-p"],
    go_on: &["--yolo", "--continue", "-p"],
    is_proxied: false,
    calls: |word| {
        let shell =
            |command: String| ("run_shell_command", json!({"command": command, "is_background": false}));
        [
            shell("cat notes.txt".to_owned()),
            shell(format!("echo seen {word} > {word}.txt")),
            shell(format!("cat {word}.txt >> log.txt")),
        ]
    },
};

const CLAUDE: Case = Case {
    agent: "claude",
    ask: &["--allowedTools=Read,Write,Bash", "-p"],
    go_on: &["--allowedTools=Read,Write,Bash", "--continue", "-p"],
    is_proxied: true,
    calls: |word| {
        [
            ("Read", json!({"file_path": "notes.txt"})),
            ("Write", json!({"file_path": format!("{word}.txt"), "content": format!("seen {word}\n")})),
            ("Bash", json!({"command": format!("cat {word}.txt >> log.txt")})),
        ]
    },
};

const CODEX: Case = Case {
    agent: "codex",
    ask: &["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
    go_on: &[
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "resume",
        "--last",
    ],
    is_proxied: true,
    calls: |word| {
        let shell = |command: String| ("exec_command", json!({"cmd": command}));
        [
            shell("cat notes.txt".to_owned()),
            shell(format!("echo seen {word} > {word}.txt")),
            shell(format!("cat {word}.txt >> log.txt")),
        ]
    },
};

const COPILOT: Case = Case {
    agent: "copilot",
    ask: &["--allow-all-tools", "-p"],
    go_on: &["--allow-all-tools", "--continue", "-p"],
    is_proxied: true,
    calls: |word| {
        [
            ("view", json!({"path": "notes.txt"})),
            ("create", json!({"path": format!("{word}.txt"), "file_text": format!("seen {word}\n")})),
            ("bash", json!({"command": format!("cat {word}.txt >> log.txt"), "description": "log it"})),
        ]
    },
};

/// It needs Node 24.
const KIMI: Case = Case {
    agent: "kimi",
    ask: &["-p"],
    go_on: &["--continue", "-p"],
    is_proxied: true,
    calls: |word| {
        [
            ("Read", json!({"path": "notes.txt"})),
            ("Write", json!({"path": format!("{word}.txt"), "content": format!("seen {word}\n")})),
            ("Bash", json!({"command": format!("cat {word}.txt >> log.txt")})),
        ]
    },
};

/// The turns of the conversation itself: agents ask for titles and the like with much shorter prompts.
fn main_turns(turns: &[Turn]) -> Vec<Turn> {
    let longest = turns.iter().map(|turn| turn.prompt_tokens).max().unwrap_or_default();
    turns.iter().filter(|turn| turn.prompt_tokens * 2 > longest).cloned().collect()
}

/// Checks that each turn after the first computes only what the one before it did not have.
fn check_warm(turns: &[Turn]) {
    assert!(turns.len() > 3, "three calls and an answer: {turns:?}");
    for pair in turns.windows(2) {
        let known = pair[0].prompt_tokens + pair[0].completion_tokens;
        assert!(pair[1].cached_tokens + UNCOMPUTED >= known, "{pair:?} of {turns:?}");
    }
}

fn complete_a_task(case: &Case) {
    let Some(desk) = Desk::new(case) else { return };
    let server = desk.server();
    desk.ask(&server, case.ask, "one");
    let turns = main_turns(&server.turns());
    check_warm(&turns);
    let asked = server.first_prompt();
    server.stop();

    // The next question in the same conversation, to a server that starts anew.
    let server = desk.server();
    desk.ask(&server, case.go_on, "two");
    let again = main_turns(&server.turns());
    // An agent may change the end of its own instructions between two starts.
    let shared = asked.iter().zip(server.first_prompt()).take_while(|(old, new)| *old == new).count();
    assert!(shared * 50 > asked.len() * 49, "{shared} of {} tokens are the same", asked.len());
    // Codex asks that nothing be stored.
    let whole_pages = if case.agent == "codex" { 0 } else { shared / PAGE * PAGE };
    assert!(again[0].cached_tokens >= whole_pages, "{again:?} after {turns:?}, which share {shared}");
    assert!(server.restored_tokens() >= whole_pages, "{} of {shared}", server.restored_tokens());
    check_warm(&again);
    server.stop();
    eprintln!(
        "{}: {} tokens of prompt, {} restored after the restart",
        case.agent, turns[0].prompt_tokens, again[0].cached_tokens
    );
}

#[test]
fn pi_completes_a_task() {
    complete_a_task(&PI);
}

#[test]
fn opencode_completes_a_task() {
    complete_a_task(&OPENCODE);
}

#[test]
fn qwen_code_completes_a_task() {
    complete_a_task(&QWEN);
}

#[test]
fn claude_code_completes_a_task() {
    complete_a_task(&CLAUDE);
}

#[test]
fn codex_completes_a_task() {
    complete_a_task(&CODEX);
}

#[test]
fn copilot_completes_a_task() {
    complete_a_task(&COPILOT);
}

#[test]
fn kimi_code_completes_a_task() {
    complete_a_task(&KIMI);
}

/// Lets an agent show the model the picture of its folder, and checks that it works on.
fn show_a_picture(case: &Case, sees: bool, told: &str) {
    let Some(desk) = Desk::of(case, sees) else { return };
    let server = desk.server();
    desk.ask(&server, case.ask, "one");
    assert!(server.was_told(told), "{told}: {:?}", server.turns());
    check_warm(&main_turns(&server.turns()));
    server.stop();
}

/// Claude Code, which looks at the picture instead of the notes.
const LOOKING_CLAUDE: Case = Case {
    calls: |word| {
        let [_, write, run] = (CLAUDE.calls)(word);
        [("Read", json!({"file_path": "picture.png"})), write, run]
    },
    ..CLAUDE
};

const SHOWING_CODEX: Case = Case {
    ask: &[
        "exec",
        "-i",
        "picture.png",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
    ],
    ..CODEX
};

#[test]
fn claude_code_reads_a_picture() {
    show_a_picture(&LOOKING_CLAUDE, true, IMAGE);
}

#[test]
fn claude_code_goes_on_behind_a_picture_that_the_model_cannot_see() {
    show_a_picture(&LOOKING_CLAUDE, false, "left out; this model reads only text");
}

#[test]
fn codex_sends_a_picture() {
    show_a_picture(&SHOWING_CODEX, true, IMAGE);
}

#[test]
fn two_conversations_do_not_disturb_each_other() {
    let (Some(desk), Some(other)) = (Desk::new(&PI), Desk::new(&PI)) else { return };
    let server = desk.server();
    let running =
        [(&desk, "one"), (&other, "two")].map(|(desk, word)| (desk.start(&server, PI.ask, word), desk, word));
    for (child, desk, word) in running {
        desk.check(&server, &finish(child), word);
    }
    let turns = server.turns();
    let sessions: BTreeSet<&str> = turns.iter().map(|turn| turn.session.as_str()).collect();
    assert_eq!(sessions.len(), 2, "{turns:?}");
    for session in sessions {
        let own: Vec<Turn> = turns.iter().filter(|turn| turn.session == session).cloned().collect();
        check_warm(&own);
    }
    server.stop();
}

#[test]
fn an_aborted_turn_continues() {
    let Some(desk) = Desk::new(&PI) else { return };
    let server = desk.server();
    desk.ask(&server, PI.ask, "one");
    let before = server.turns();
    let child = desk.start(&server, PI.go_on, LONG);
    until("the long answer begins", || server.num_running() > 0);
    interrupt(&child);
    finish(child);
    until("the turn is cancelled", || server.turns().len() > before.len());
    let aborted = &server.turns()[before.len()];
    assert!(aborted.completion_tokens < script::LONG_TOKENS, "{aborted:?}");

    desk.ask(&server, PI.go_on, "two");
    let turns = server.turns();
    let again = main_turns(&turns[before.len() + 1..]);
    assert!(again[0].cached_tokens + PAGE >= before[0].prompt_tokens, "{again:?} after {before:?}");
    check_warm(&again);
    server.stop();
}
