//! Promise: what people use to talk to OpenAI and to Anthropic talks to llmctl. The official Python and Node clients run their
//! checks (tests/clients/) against the real binary on a loopback port.
//!
//! `LLMCTL_TEST_PYTHON` is a python that has `openai`, `openresponses-types` and `anthropic`; `LLMCTL_TEST_NODE` a folder whose
//! `node_modules` has `openai` and `@anthropic-ai/sdk`. `.ci/run` installs them where there is a network; without them the tests say that they are skipped.

use std::ffi::OsString;
use std::sync::mpsc;

use crate::common::prelude::*;

const KEY: &str = "the-clients-key";
const START_TIME: Duration = Duration::from_secs(120);

fn in_repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// `llmctl serve` on a port of its own; killed when dropped.
struct Served {
    process: Child,
    url: String,
    /// Its folder goes with it.
    _place: Place,
}

impl Served {
    fn start() -> Self {
        let place = Place::new();
        let (model, template) =
            (in_repository("tests/parity/qwen3"), in_repository("tests/clients/template.jinja"));
        let mut command = place.command(&["serve", "--port", "0", "--parallel", "4", "--model"]);
        command.arg(model).arg("--chat-template").arg(template).env("LLMCTL_API_KEY", KEY);
        let mut process =
            command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().expect("llmctl starts");
        let stderr = BufReader::new(process.stderr.take().expect("piped"));
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let mut said = Vec::new();
        let url = loop {
            let line = lines.recv_timeout(START_TIME).unwrap_or_else(|_| panic!("no address in {said:?}"));
            if let Some((_, address)) = line.split_once("listening on ") {
                break format!("{}/v1", address.split_whitespace().next().expect("an address"));
            }
            said.push(line);
        };
        // What it says later is read to its end, so that it never waits for us.
        std::thread::spawn(move || lines.into_iter().for_each(drop));
        Self { process, url, _place: place }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs a script with the server's address and key; it says `N passed` in its last line.
fn check(client: &mut Command) {
    let served = Served::start();
    let output = client.arg(&served.url).arg(KEY).output().expect("the client starts");
    let (said, wrong) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let passed = said.lines().last().and_then(|line| line.strip_suffix(" passed")?.parse::<usize>().ok());
    assert!(output.status.success() && passed.is_some_and(|count| count > 5), "{said}\n{wrong}");
}

fn given(variable: &str) -> Option<OsString> {
    let value = std::env::var_os(variable).filter(|value| !value.is_empty());
    if value.is_none() {
        crate::common::skip(format!("{variable} is not set"));
    }
    value
}

fn python(script: &str) {
    let Some(python) = given("LLMCTL_TEST_PYTHON") else { return };
    let script = in_repository(&format!("tests/clients/{script}"));
    check(Command::new(python).arg(script).env("PYTHONDONTWRITEBYTECODE", "1"));
}

fn node(script: &str) {
    let Some(folder) = given("LLMCTL_TEST_NODE").map(PathBuf::from) else { return };
    // Node looks for modules beside the script. Each script has a folder of its own, because tests run at the same time.
    let own = folder.join(script.trim_end_matches(".mjs"));
    std::fs::create_dir_all(&own).expect("the folder is writable");
    for file in [script, "checks.mjs"] {
        std::fs::copy(in_repository(&format!("tests/clients/{file}")), own.join(file))
            .expect("it is writable");
    }
    check(Command::new("node").arg(own.join(script)));
}

#[test]
fn openais_python_client_gets_what_it_expects() {
    python("openai_python.py");
}

#[test]
fn every_answer_is_of_the_official_types() {
    python("shapes_python.py");
}

#[test]
fn openais_node_client_gets_what_it_expects() {
    node("openai_node.mjs");
}

#[test]
fn openais_python_client_gets_responses() {
    python("responses_python.py");
}

#[test]
fn openais_node_client_gets_responses() {
    node("responses_node.mjs");
}

#[test]
fn anthropics_python_client_gets_what_it_expects() {
    python("anthropic_python.py");
}

#[test]
fn anthropics_node_client_gets_what_it_expects() {
    node("anthropic_node.mjs");
}
