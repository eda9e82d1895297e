//! The other end of a worker: sends lines, and takes those that come apart by id. Each line is held against the schema.

use std::io::Write;
use std::process::ChildStdout;
use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver};

use crate::common::prelude::*;

/// Far beyond what anything here takes: a worker that says nothing for so long hangs.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Judges lines by one of the schema's definitions.
pub fn validator(definition: &str) -> jsonschema::Validator {
    let text = include_str!("../../docs/worker-protocol.schema.json");
    let mut schema: Value = serde_json::from_str(text).expect("JSON");
    let object = schema.as_object_mut().expect("an object");
    object.remove("anyOf");
    object.insert("$ref".to_owned(), format!("#/$defs/{definition}").into());
    jsonschema::validator_for(&schema).expect("a schema")
}

#[track_caller]
pub fn check_request(line: &Value) {
    static REQUEST: OnceLock<jsonschema::Validator> = OnceLock::new();
    check(REQUEST.get_or_init(|| validator("request")), line);
}

#[track_caller]
fn check_reply(line: &Value) {
    static REPLY: OnceLock<jsonschema::Validator> = OnceLock::new();
    check(REPLY.get_or_init(|| validator("reply")), line);
}

#[track_caller]
pub fn check(validator: &jsonschema::Validator, line: &Value) {
    if let Err(error) = validator.validate(line) {
        panic!("{error}: {line}");
    }
}

/// A worker's two streams.
pub struct Client {
    input: Option<Box<dyn Write + Send>>,
    lines: Receiver<String>,
}

/// All that answers one call.
#[derive(Debug, Clone)]
pub struct ReplyBody {
    pub lines: Vec<Value>,
}

impl Client {
    pub fn new(input: impl Write + Send + 'static, output: impl Read + Send + 'static) -> Self {
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            // A line ends with a line feed or was never whole.
            let mut output = BufReader::new(output);
            let mut line = String::new();
            while output.read_line(&mut line).is_ok_and(|count| count > 0) {
                assert_eq!(line.pop(), Some('\n'), "half a line: {line}");
                if sender.send(std::mem::take(&mut line)).is_err() {
                    return;
                }
            }
        });
        Self { input: Some(Box::new(input)), lines }
    }

    #[track_caller]
    pub fn send(&mut self, line: &Value) {
        check_request(line);
        self.send_raw(format!("{line}\n").as_bytes());
    }

    /// Sends bytes that need not be a valid line.
    #[track_caller]
    pub fn send_raw(&mut self, bytes: &[u8]) {
        let input = self.input.as_mut().expect("not closed");
        input.write_all(bytes).and_then(|()| input.flush()).expect("the worker reads");
    }

    pub fn close_input(&mut self) {
        self.input = None;
    }

    /// The next line; nothing at the end.
    #[track_caller]
    pub fn next(&self) -> Option<Value> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => {
                let line = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
                check_reply(&line);
                Some(line)
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => None,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("the worker hangs"),
        }
    }

    #[track_caller]
    pub fn line(&self) -> Value {
        self.next().expect("a line")
    }

    /// The lines of one call, when no other is under way.
    #[track_caller]
    pub fn answer(&self) -> ReplyBody {
        let mut lines = vec![self.line()];
        while !is_last(&lines[lines.len() - 1]) {
            lines.push(self.line());
        }
        ReplyBody { lines }
    }

    #[track_caller]
    pub fn ask(&mut self, line: &Value) -> ReplyBody {
        self.send(line);
        let answer = self.answer();
        assert!(answer.lines.iter().all(|answer| answer.get("id") == line.get("id")), "{answer:?}");
        answer
    }

    /// As `ask`, for what is answered with one line.
    #[track_caller]
    pub fn told(&mut self, line: &Value) -> Value {
        let answer = self.ask(line);
        assert_eq!(answer.lines.len(), 1, "{answer:?}");
        answer.lines.into_iter().next().expect("one")
    }

    /// The answers to these ids, however their lines come.
    #[track_caller]
    pub fn answers(&self, ids: &[Value]) -> Vec<ReplyBody> {
        let mut answers = vec![ReplyBody { lines: Vec::new() }; ids.len()];
        let is_over = |answer: &ReplyBody| answer.lines.last().is_some_and(is_last);
        while !answers.iter().all(is_over) {
            let line = self.line();
            let at =
                ids.iter().position(|id| *id == line["id"]).unwrap_or_else(|| panic!("of no call: {line}"));
            assert!(!is_over(&answers[at]), "after the end: {line}");
            answers[at].lines.push(line);
        }
        answers
    }
}

/// Whether nothing follows it from the same call.
pub fn is_last(line: &Value) -> bool {
    !["token", "queued", "started", "progress"].iter().any(|name| line.get(name).is_some())
}

impl ReplyBody {
    pub fn text(&self) -> String {
        self.lines.iter().filter_map(|line| line["token"].as_str()).collect()
    }

    #[track_caller]
    pub fn done(&self) -> &Value {
        let last = self.lines.last().expect("a line");
        assert_eq!(last["done"], true, "{last}");
        last
    }

    /// Its code and message.
    #[track_caller]
    pub fn error(&self) -> (&str, &str) {
        let last = self.lines.last().expect("a line");
        (last["code"].as_str().unwrap_or_default(), last["error"].as_str().expect("an error"))
    }

    #[track_caller]
    pub fn check_error(&self, code: &str, part: &str) {
        let (is, message) = self.error();
        assert_eq!(is, code, "{message}");
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }

    /// The ids that lines with `events` told.
    pub fn ids(&self) -> Vec<u64> {
        let told = self.lines.iter().filter_map(|line| line.get("tokens")?.as_array());
        told.flatten().map(|token| token["id"].as_u64().expect("an id")).collect()
    }
}

/// `llmctl worker` with a tiny model.
pub struct Process {
    pub client: Client,
    pub ready: Value,
    pub child: Child,
    pub place: Place,
}

pub fn model() -> String {
    parity_folder().join("qwen3").to_string_lossy().into_owned()
}

impl Process {
    /// Waits until it is ready.
    #[track_caller]
    pub fn start(args: &[&str]) -> Self {
        Self::start_in(Place::new(), args)
    }

    #[track_caller]
    pub fn start_in(place: Place, args: &[&str]) -> Self {
        let (mut child, output) = spawn(&place, args);
        let client = Client::new(child.stdin.take().expect("a pipe"), output);
        let ready = client.line();
        assert_eq!(ready["ready"], true, "{ready}");
        Self { client, ready, child, place }
    }

    /// Waits for the end; its exit code, and what it said on stderr.
    #[track_caller]
    pub fn end(mut self) -> (Option<i32>, String, Place) {
        let code = self.child.wait().expect("it ends").code();
        let said = self.place.read("stderr");
        (code, said, self.place)
    }

    /// Closes its input and waits for a good end.
    #[track_caller]
    pub fn finish(mut self) -> Place {
        self.client.close_input();
        let (code, said, place) = self.end();
        assert_eq!(code, Some(0), "{said}");
        place
    }
}

/// The worker and its output; stderr goes to a file.
pub fn spawn(place: &Place, args: &[&str]) -> (Child, ChildStdout) {
    let mut command = command(place, args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("llmctl starts");
    let output = child.stdout.take().expect("a pipe");
    (child, output)
}

pub fn command(place: &Place, args: &[&str]) -> Command {
    let model = model();
    let mut command = place.command(&[&["worker", "--model", &model, "--threads", "1"], args].concat());
    command.stderr(File::create(place.path("stderr")).expect("a file"));
    command
}

/// Ids of the model's 384 tokens, none of them special.
pub fn some_ids(count: usize, seed: usize) -> Vec<usize> {
    (0..count).map(|at| 10 + (at * 7 + seed * 31 + at * at % 13) % 300).collect()
}

/// A greedy generation with all events that its model does not end by itself.
pub fn generation(id: Value, prompt: &[usize], max_new_tokens: usize) -> Value {
    json!({
        "id": id, "prompt_segments": [{"ids": prompt}], "max_new_tokens": max_new_tokens, "ignore_eos": true,
        "events": true,
    })
}
