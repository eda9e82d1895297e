//! Promise: guide is taught the truth. Every flag, subcommand, chat command, variable, endpoint and exit code
//! that its training data names in code exists in this program, so the model cannot become outdated
//! unnoticed.
//!
//! Tests only. Reads `assets/guide/train/facts/*.toml`, the source of guide's answers.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde::Deserialize;

use super::chat::command::TABLE;
use super::error::{Exit, Kind};

#[derive(Deserialize)]
struct FactsFile {
    fact: Vec<TaughtFact>,
}

#[derive(Deserialize)]
struct TaughtFact {
    id: String,
    answers: Vec<String>,
    example: Option<String>,
}

/// Names that the program has.
struct Truth {
    command: clap::Command,
    /// Flags of all subcommands.
    flags: BTreeSet<String>,
    variables: BTreeSet<String>,
    chat_commands: BTreeSet<&'static str>,
    exit_codes: BTreeSet<u8>,
}

/// Variables that are not the rule of a flag.
const OTHER_VARIABLES: [&str; 4] = ["LLMCTL_API_KEY", "LLMCTL_CPU", "LLMCTL_LOG", "LLMCTL_CONFIG"];

impl Truth {
    fn new() -> Self {
        let mut command = super::command();
        command.build();
        let (mut flags, mut variables) = (BTreeSet::new(), BTreeSet::new());
        visit(&command, &mut |command| {
            for arg in command.get_arguments() {
                flags.extend(arg.get_long().map(|name| format!("--{name}")));
                flags
                    .extend(arg.get_all_aliases().unwrap_or_default().iter().map(|name| format!("--{name}")));
                flags.extend(
                    arg.get_short_and_visible_aliases().unwrap_or_default().iter().map(|c| format!("-{c}")),
                );
                variables.extend(super::variable(arg));
            }
        });
        variables.extend(OTHER_VARIABLES.map(str::to_owned));
        let kinds = [
            Kind::Failure,
            Kind::Usage,
            Kind::BadData,
            Kind::NotFound,
            Kind::Unavailable,
            Kind::Bug,
            Kind::Io,
            Kind::Temporary,
            Kind::Auth,
            Kind::Config,
        ];
        // llmctl handles SIGHUP, SIGINT and SIGTERM; the system reports a kill (9) and a closed pipe (13).
        let signals = [1, 2, 9, 13, 15].map(Exit::Signal);
        let exits = [Exit::Success, Exit::Cut, Exit::FailedRows]
            .into_iter()
            .chain(kinds.map(Exit::Error))
            .chain(signals);
        Self {
            command,
            flags,
            variables,
            chat_commands: TABLE.iter().flat_map(|command| command.names()).collect(),
            exit_codes: exits.map(Exit::code).collect(),
        }
    }

    /// Returns the errors in a piece of code, which may be several commands.
    fn faults_of_code(&self, code: &str) -> Vec<String> {
        code.split(['|', ';']).flat_map(|command| self.faults_of_command(command)).collect()
    }

    fn faults_of_command(&self, code: &str) -> Vec<String> {
        let words: Vec<&str> = code
            .split_whitespace()
            .map(|word| word.trim_matches(['"', '\'', ',', ';', '(', ')', '[', ']', '.', ':', '…']))
            .collect();
        let mut faults = Vec::new();
        let own = words.iter().position(|word| *word == "llmctl");
        let is_foreign = own.is_none() && words.first().is_some_and(|word| FOREIGN.contains(word));
        if let Some(sub) = own.and_then(|at| words.get(at + 1)).filter(|sub| is_name(sub))
            && self.command.find_subcommand(sub).is_none()
        {
            faults.push(format!("no subcommand {sub}"));
        }
        for word in &words {
            let flag = word.split('=').next().unwrap_or_default();
            if flag.starts_with("--") && flag.len() > 2 && !is_foreign && !self.flags.contains(flag) {
                faults.push(format!("no flag {flag}"));
            }
            let variable = flag.trim_start_matches('$');
            if variable.starts_with("LLMCTL_")
                && variable != "LLMCTL_"
                && !variable.contains('<')
                && !self.variables.contains(variable)
            {
                faults.push(format!("no variable {variable}"));
            }
        }
        if let Some(command) = words.first().and_then(|word| word.strip_prefix('/'))
            && is_name(command)
            && !self.chat_commands.contains(command)
            && !is_endpoint(words[0])
        {
            faults.push(format!("neither a chat command nor an endpoint: /{command}"));
        }
        if words.first().is_some_and(|word| word.starts_with("/v1")) && !is_endpoint(words[0]) {
            faults.push(format!("no endpoint {}", words[0]));
        }
        faults
    }

    fn faults(&self, text: &str) -> Vec<String> {
        let code = text.split('`').skip(1).step_by(2);
        let mut faults: Vec<String> = code.flat_map(|code| self.faults_of_code(code)).collect();
        let unknown = exit_codes(text).into_iter().filter(|code| !self.exit_codes.contains(code));
        faults.extend(unknown.map(|code| format!("no exit code {code}")));
        faults
    }
}

/// Facts that name something unknown, and why they may.
const EXCEPTIONS: [(&str, &str, &str); 6] = [
    ("chat-tab", "neither a chat command nor an endpoint: /lo", "half a command, for Tab to complete"),
    ("chat-literal-slash", "neither a chat command nor an endpoint: /etc", "text that is no command"),
    ("srv-embeddings", "no endpoint /v1/embeddings", "it says that there is none"),
    ("err-device", "no flag --features", "a flag of cargo build"),
    ("about-gpu", "no flag --features", "a flag of cargo build"),
    ("run-device", "no flag --features", "a flag of cargo build"),
];

/// Other programs whose flags answers may name.
const FOREIGN: [&str; 8] = ["curl", "hf", "cargo", "ollama", "pip", "npm", "python", "git"];

const ENDPOINTS: [&str; 13] = [
    "/health",
    "/ready",
    "/metrics",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/sessions",
    "/v1",
];

/// Returns whether the path is an endpoint or below one.
fn is_endpoint(path: &str) -> bool {
    ENDPOINTS.iter().any(|endpoint| {
        let rest = path.strip_prefix(endpoint);
        rest.is_some_and(|rest| {
            rest.is_empty() || rest == "/" || (*endpoint != "/v1" && rest.starts_with('/'))
        })
    })
}

/// Returns the numbers after "exit code", "exit status" and "exits with".
fn exit_codes(text: &str) -> Vec<u8> {
    let text = text.to_lowercase();
    let number = |phrase: &str| -> Vec<u8> {
        let behind = text.split(phrase).skip(1);
        behind.filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()).collect()
    };
    ["exit code ", "exit status ", "exits with "].into_iter().flat_map(number).collect()
}

fn is_name(word: &str) -> bool {
    !word.is_empty()
        && word.chars().all(|c| c.is_ascii_lowercase() || c == '-')
        && word.starts_with(|c: char| c.is_ascii_lowercase())
}

fn visit(command: &clap::Command, see: &mut dyn FnMut(&clap::Command)) {
    see(command);
    command.get_subcommands().for_each(|command| visit(command, see));
}

fn facts() -> Vec<TaughtFact> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/guide/train/facts");
    let mut paths: Vec<_> =
        fs::read_dir(&folder).expect("guide's facts").map(|entry| entry.expect("a file").path()).collect();
    paths.sort();
    let read = |path| {
        let text = fs::read_to_string(path).expect("reads");
        toml::from_str::<FactsFile>(&text).unwrap_or_else(|error| panic!("{error}")).fact
    };
    paths.iter().flat_map(read).collect()
}

#[test]
fn what_guide_is_taught_is_true() {
    let truth = Truth::new();
    let facts = facts();
    assert!(facts.len() > 200, "the facts are there: {}", facts.len());
    let mut faults = Vec::new();
    for fact in &facts {
        let mut found: Vec<String> = fact.answers.iter().flat_map(|answer| truth.faults(answer)).collect();
        found.extend(fact.example.iter().flat_map(|example| truth.faults_of_code(example.trim_matches('`'))));
        found.retain(|fault| !EXCEPTIONS.iter().any(|(id, excepted, _)| *id == fact.id && excepted == fault));
        faults.extend(found.into_iter().map(|fault| format!("{}: {fault}", fact.id)));
    }
    assert!(
        faults.is_empty(),
        "{} of {} facts are not true of this program:\n{}",
        faults.len(),
        facts.len(),
        faults.join("\n")
    );
}

#[test]
fn untruth_is_found() {
    let truth = Truth::new();
    for (text, fault) in [
        ("Use `--frobnicate N`.", "no flag --frobnicate"),
        ("Run `llmctl frob`.", "no subcommand frob"),
        ("Type `/frob NAME`.", "neither a chat command nor an endpoint: /frob"),
        ("Set `LLMCTL_FROB=1`.", "no variable LLMCTL_FROB"),
        ("Ask `/v1/frobs`.", "no endpoint /v1/frobs"),
        ("It ends with exit code 99.", "no exit code 99"),
    ] {
        assert_eq!(truth.faults(text), [fault], "{text}");
    }
    for text in [
        "Use `--seed N` or `LLMCTL_SEED`.",
        "Type `/save NAME`; `/health` is there.",
        "`curl -N --no-buffer URL`",
        "exit code 130",
    ] {
        assert_eq!(truth.faults(text), [""; 0], "{text}");
    }
}

#[test]
fn the_endpoints_are_routes() {
    let routes = [include_str!("../serve/api/mod.rs"), include_str!("../serve/front/router.rs")].concat();
    for endpoint in ENDPOINTS.iter().filter(|endpoint| **endpoint != "/v1") {
        assert!(routes.contains(&format!(".route(\"{endpoint}\"")), "{endpoint}");
    }
}
