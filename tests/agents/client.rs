//! An agent's process: its settings from `llmctl launch`, a scratch folder, a bounded time, and nothing of the user's.

use std::process::Output;

use llmctl::cli::launch::agents::{Agent, LaunchTarget};

use super::model::{CONTEXT_TOKENS, write_checkpoint};
use super::script::{self, Calls};
use super::server::{AgentServer, MODEL};
use crate::common::prelude::*;

/// Longest run of an agent.
const TASK_TIME: Duration = Duration::from_secs(180);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A proxy that does not exist.
const NOWHERE: &str = "http://127.0.0.1:9";

/// How an agent is used in a script.
pub struct Case {
    /// Its row in `launch`.
    pub agent: &'static str,
    /// Arguments before a question.
    pub ask: &'static [&'static str],
    /// Arguments before another question of the last conversation.
    pub go_on: &'static [&'static str],
    pub calls: Calls,
    /// It heeds NO_PROXY, so that a proxy can keep it from the network.
    pub is_proxied: bool,
}

/// An agent, and the folders of one test.
pub struct Desk {
    agent: &'static Agent,
    calls: Calls,
    is_proxied: bool,
    program: PathBuf,
    folder: TempDir,
    sees: bool,
}

impl Desk {
    /// Returns `None`, with a note, where the agent or the fixtures are missing.
    pub fn new(case: &Case) -> Option<Self> {
        Self::of(case, false)
    }

    /// As [`Self::new`], with a model that reads images, if it `sees`, and a picture in the agent's folder.
    pub fn of(case: &Case, sees: bool) -> Option<Self> {
        let agent = Agent::find(case.agent).expect("a row");
        let Some(agents) = std::env::var_os("LLMCTL_TEST_AGENTS").filter(|folder| !folder.is_empty()) else {
            crate::common::skip("LLMCTL_TEST_AGENTS is not set");
            return None;
        };
        let program = Path::new(&agents).join("node_modules/.bin").join(agent.program);
        if !program.exists() {
            crate::common::skip(format!("{} is not installed in {}", agent.name, agents.display()));
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["model", "state", "home", "settings", "work"] {
            std::fs::create_dir(folder.path().join(name)).expect("a folder");
        }
        std::fs::write(folder.path().join("work/notes.txt"), "Write a file and log it.\n").expect("a file");
        let picture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/images/rgba.png");
        std::fs::copy(picture, folder.path().join("work/picture.png")).expect("a file");
        let desk = Self { agent, calls: case.calls, is_proxied: case.is_proxied, program, folder, sees };
        write_checkpoint(&desk.path("model"), sees).then_some(desk)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts a server with what earlier ones of this desk have kept.
    pub fn server(&self) -> AgentServer {
        AgentServer::start(&self.path("model"), &self.path("state"), script::script(self.calls))
    }

    /// Lets the agent do a task, and checks what it has done.
    pub fn ask(&self, server: &AgentServer, arguments: &[&str], word: &str) {
        let output = finish(self.start(server, arguments, word));
        self.check(server, &output, word);
    }

    pub fn check(&self, server: &AgentServer, output: &Output, word: &str) {
        let (said, wrong) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let outcome = format!("{said}\n{wrong}\n{:?}", server.turns());
        assert!(output.status.success() && said.contains(&script::answer(word)), "{outcome}");
        let written = std::fs::read_to_string(self.path("work").join(format!("{word}.txt")));
        assert_eq!(written.ok(), Some(format!("seen {word}\n")), "{outcome}");
        let log = std::fs::read_to_string(self.path("work/log.txt")).unwrap_or_default();
        assert!(log.ends_with(&format!("seen {word}\n")), "{outcome}");
    }

    pub fn start(&self, server: &AgentServer, arguments: &[&str], word: &str) -> Child {
        let target = LaunchTarget {
            url: server.url(),
            key: "none".to_owned(),
            model: MODEL.to_owned(),
            context_tokens: CONTEXT_TOKENS,
            sees: self.sees,
        };
        let settings = self.agent.settings(&target, &self.path("settings"));
        settings.write().expect("files");
        let proxies =
            [("HTTP_PROXY", NOWHERE), ("HTTPS_PROXY", NOWHERE), ("NO_PROXY", "127.0.0.1,localhost")];
        let mut command = Command::new(&self.program);
        command
            .args(&settings.arguments)
            .args(arguments)
            .arg(script::question(word))
            .current_dir(self.path("work"))
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.path("home"))
            .envs(proxies.into_iter().filter(|_| self.is_proxied))
            .envs(settings.variables)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().expect("the agent starts")
    }
}

/// Waits for the agent's end; one that takes too long is killed, which the caller sees in its status.
pub fn finish(mut child: Child) -> Output {
    let end = Instant::now() + TASK_TIME;
    let (stdout, stderr) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let readers = [reader(stdout), reader(stderr)];
    let status = loop {
        match child.try_wait().expect("a child") {
            Some(status) => break status,
            None if Instant::now() > end => drop(child.kill()),
            None => std::thread::sleep(LOOK_EVERY),
        }
    };
    let [stdout, stderr] = readers.map(|reader| reader.join().expect("no reader panics"));
    Output { status, stdout, stderr }
}

/// Ctrl-C.
pub fn interrupt(child: &Child) {
    let id = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(id, rustix::process::Signal::INT).expect("a running agent");
}

/// Waits until `is_so`.
pub fn until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + TASK_TIME;
    while !is_so() {
        assert!(Instant::now() < end, "{what}: not in time");
        std::thread::sleep(LOOK_EVERY);
    }
}

fn reader(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).expect("a pipe");
        bytes
    })
}
