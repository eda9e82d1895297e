//! Promise: what people use to talk to OpenAI, to Anthropic and to Ollama talks to llmctl. The official Python and Node clients run
//! their checks (tests/clients/) against the real binary on a loopback port.
//!
//! `LLMCTL_TEST_PYTHON` is a python that has `openai`, `openresponses-types` and `anthropic`, and for Ollama's API `ollama`,
//! `langchain-ollama` and `llama-index-llms-ollama`; `LLMCTL_TEST_NODE` a folder whose `node_modules` has `openai`,
//! `@anthropic-ai/sdk` and `ollama`. `.ci/run` installs them where there is a network; without them the tests say that they are skipped.

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
    /// Starts a server of a model in a folder.
    fn start(model: &Path) -> Self {
        let place = Place::new();
        let mut command = place.command(&["serve", "--port", "0", "--parallel", "4", "--model"]);
        command.arg(model).env("LLMCTL_API_KEY", KEY);
        if model.starts_with(in_repository("tests")) {
            command.arg("--chat-template").arg(in_repository("tests/clients/template.jinja"));
        }
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

/// Runs a script with the server's address and key, and the folder of images; it says `N passed` in its last line.
fn check(client: &mut Command, model: &Path) {
    let served = Served::start(model);
    let images = in_repository("tests/images");
    let output = client.arg(&served.url).arg(KEY).arg(images).output().expect("the client starts");
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

fn text_model() -> PathBuf {
    in_repository("tests/parity/qwen3")
}

/// A model that reads images; `None` without the fixtures.
fn seeing() -> Option<PathBuf> {
    Some(fixtures()?.join("vision/qwen3-vl"))
}

fn python(script: &str, model: &Path) {
    let Some(python) = given("LLMCTL_TEST_PYTHON") else { return };
    let script = in_repository(&format!("tests/clients/{script}"));
    check(Command::new(python).arg(script).env("PYTHONDONTWRITEBYTECODE", "1"), model);
}

/// As [`python`], if the python has the modules.
fn python_with(script: &str, modules: &[&str]) {
    let Some(python) = given("LLMCTL_TEST_PYTHON") else { return };
    let missing = modules.iter().find(|module| {
        let found =
            Command::new(&python).arg("-c").arg(format!("import {module}")).stderr(Stdio::null()).status();
        !found.expect("python starts").success()
    });
    match missing {
        Some(module) => crate::common::skip(format!("python has no {module}")),
        None => self::python(script, &text_model()),
    }
}

fn node(script: &str, model: &Path) {
    let Some(folder) = given("LLMCTL_TEST_NODE").map(PathBuf::from) else { return };
    // Node looks for modules beside the script. Each script has a folder of its own, because tests run at the same time.
    let own = folder.join(script.trim_end_matches(".mjs"));
    std::fs::create_dir_all(&own).expect("the folder is writable");
    for file in [script, "checks.mjs"] {
        std::fs::copy(in_repository(&format!("tests/clients/{file}")), own.join(file))
            .expect("it is writable");
    }
    check(Command::new("node").arg(own.join(script)), model);
}

#[test]
fn openais_python_client_gets_what_it_expects() {
    python("openai_python.py", &text_model());
}

#[test]
fn every_answer_is_of_the_official_types() {
    python("shapes_python.py", &text_model());
}

#[test]
fn openais_node_client_gets_what_it_expects() {
    node("openai_node.mjs", &text_model());
}

#[test]
fn openais_python_client_gets_responses() {
    python("responses_python.py", &text_model());
}

#[test]
fn openais_node_client_gets_responses() {
    node("responses_node.mjs", &text_model());
}

#[test]
fn anthropics_python_client_gets_what_it_expects() {
    python("anthropic_python.py", &text_model());
}

#[test]
fn anthropics_node_client_gets_what_it_expects() {
    node("anthropic_node.mjs", &text_model());
}

#[test]
fn the_python_clients_send_images() {
    seeing().iter().for_each(|model| python("images_python.py", model));
}

#[test]
fn the_node_clients_send_images() {
    seeing().iter().for_each(|model| node("images_node.mjs", model));
}

#[test]
fn ollamas_python_client_gets_what_it_expects() {
    python_with("ollama_python.py", &["ollama"]);
}

#[test]
fn frameworks_for_ollama_get_what_they_expect() {
    python_with("ollama_frameworks.py", &["langchain_ollama", "llama_index.llms.ollama"]);
}

#[test]
fn ollamas_node_client_gets_what_it_expects() {
    let Some(folder) = given("LLMCTL_TEST_NODE").map(PathBuf::from) else { return };
    match folder.join("node_modules/ollama").exists() {
        true => node("ollama_node.mjs", &text_model()),
        false => crate::common::skip("node has no ollama".to_owned()),
    }
}
