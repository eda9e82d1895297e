//! Tools of a chat: commands that the user declares in TOML and the model may call.
//!
//! Invariants: no shell; nothing runs that the user has not agreed to, once or for the chat; a command is bounded in time and
//! output, and what it says, its failure included, goes back to the model. Where nobody can be asked nothing runs.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::answer::Call;
use super::talk::Chat;
use crate::cli::error::CommandError;
use crate::cli::run::prompt::read_file;
use crate::cli::signal::Graceful;
use crate::template::{Message, Role};

/// Bytes of a command's output that the model gets.
const MAX_OUTPUT: u64 = 64 << 10;

/// Seconds a command may take unless it says otherwise.
const TIMEOUT: u64 = 60;

/// How long the end of a command's output is waited for once it has ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// How often a command is looked at.
const POLL: Duration = Duration::from_millis(20);

/// The declared tools, and what was agreed to.
#[derive(Debug)]
pub struct Toolbox {
    pub path: PathBuf,
    pub tools: Vec<Tool>,
    always: BTreeSet<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    tool: Vec<Tool>,
}

/// One tool.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tool {
    pub name: String,
    pub description: String,
    /// JSON Schema of the arguments.
    #[serde(default)]
    pub parameters: Map<String, Value>,
    /// The command and its arguments; `{name}` stands for an argument of the call.
    pub argv: Vec<String>,
    /// Seconds.
    #[serde(default = "default_timeout")]
    pub timeout: u64,
}

fn default_timeout() -> u64 {
    TIMEOUT
}

impl Toolbox {
    /// # Errors
    /// The file cannot be read, or says what is no declaration of tools.
    pub fn read(path: &Path) -> Result<Self, CommandError> {
        let text = read_file(path)?;
        let bad = |message: String| CommandError::bad_data(format!("{}: {message}", path.display()));
        let file: File = toml::from_str(&text).map_err(|error| bad(error.to_string()))?;
        if file.tool.is_empty() {
            return Err(bad("there is no [[tool]]".to_owned()));
        }
        let mut names = BTreeSet::new();
        for tool in &file.tool {
            let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
            if tool.name.is_empty() || tool.name.len() > 64 || !tool.name.chars().all(is_name) {
                return Err(bad(format!("{:?} is no name: 1 to 64 of a-z, A-Z, 0-9, _ and -", tool.name)));
            }
            if tool.argv.first().is_none_or(String::is_empty) {
                return Err(bad(format!("tool {}: argv names no command", tool.name)));
            }
            if !names.insert(&tool.name) {
                return Err(bad(format!("tool {} is declared twice", tool.name)));
            }
        }
        Ok(Self { path: path.into(), tools: file.tool, always: BTreeSet::new() })
    }

    /// As templates and APIs have them.
    pub fn definitions(&self) -> Vec<Value> {
        self.tools.iter().map(Tool::definition).collect()
    }

    /// One a line.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let row = |tool: &Tool| {
            let asks =
                if self.always.contains(&tool.name) { "runs without asking" } else { "asks before it runs" };
            vec![tool.name.clone(), asks.to_owned(), tool.description.clone()]
        };
        self.tools.iter().map(row).collect()
    }
}

impl Tool {
    fn definition(&self) -> Value {
        let mut parameters = self.parameters.clone();
        parameters.entry("type").or_insert_with(|| "object".into());
        parameters.entry("properties").or_insert_with(|| json!({}));
        json!({
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        })
    }

    /// The command line of a call.
    fn command_line(&self, arguments: &Value, folder: &Path) -> Vec<String> {
        // The command itself is the user's, never the model's.
        let program = &self.argv[0];
        let is_beside = program.starts_with("./") || program.starts_with("../");
        let program = if is_beside { folder.join(program).display().to_string() } else { program.clone() };
        let rest = self.argv[1..].iter().map(|part| filled(part, arguments));
        std::iter::once(program).chain(rest).collect()
    }

    /// Runs the call to its end; what it said is for the model.
    fn run(&self, arguments: &Value, folder: &Path, graceful: &Graceful) -> String {
        let words = self.command_line(arguments, folder);
        let child = Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        match child {
            Ok(child) => self.wait(child, arguments, graceful),
            Err(error) => format!("error: {} cannot be started: {error}", words[0]),
        }
    }

    fn wait(&self, mut child: Child, arguments: &Value, graceful: &Graceful) -> String {
        let stdin = child.stdin.take();
        let given = arguments.to_string();
        let writer = std::thread::spawn(move || {
            // A command that does not read its arguments there is fine.
            stdin.map(|mut stdin| stdin.write_all(given.as_bytes()))
        });
        let (stdout, stderr) = (drained(child.stdout.take()), drained(child.stderr.take()));
        let deadline = Instant::now() + Duration::from_secs(self.timeout);
        let ended = loop {
            match child.try_wait() {
                Ok(Some(status)) => break Ended::Status(status),
                Err(error) => break Ended::Unknown(error.to_string()),
                Ok(None) if graceful.received().is_some() => break Ended::Stopped,
                Ok(None) if Instant::now() > deadline => break Ended::Late,
                Ok(None) => std::thread::sleep(POLL),
            }
        };
        if !matches!(ended, Ended::Status(_)) {
            let _ = child.kill();
            let _ = child.wait();
        }
        drop(writer);
        // What it left running may hold the streams open for ever.
        let text = |stream: Receiver<String>| stream.recv_timeout(DRAIN_TIMEOUT).unwrap_or_default();
        match ended {
            Ended::Status(status) if status.success() => text(stdout),
            Ended::Status(status) => format!("error: {status}\n{}{}", text(stdout), text(stderr)),
            Ended::Late => format!("error: it took longer than {} s", self.timeout),
            Ended::Stopped => "error: the user stopped it".to_owned(),
            Ended::Unknown(error) => format!("error: {error}"),
        }
    }
}

/// `{name}` replaced by the argument of that name, once: what an argument brings is not filled again.
fn filled(part: &str, arguments: &Value) -> String {
    let (mut text, mut rest) = (String::new(), part);
    while let Some((before, after)) = rest.split_once('{') {
        text.push_str(before);
        let found = after.split_once('}').and_then(|(name, after)| Some((arguments.get(name)?, after)));
        match found {
            Some((value, after)) => {
                text.push_str(&value.as_str().map_or_else(|| value.to_string(), str::to_owned));
                rest = after;
            }
            None => {
                text.push('{');
                rest = after;
            }
        }
    }
    text + rest
}

enum Ended {
    Status(ExitStatus),
    Late,
    Stopped,
    Unknown(String),
}

/// What a stream says, read so that its writer never waits.
fn drained(stream: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let Some(mut stream) = stream else { return };
        let mut bytes = Vec::new();
        let _ = stream.by_ref().take(MAX_OUTPUT).read_to_end(&mut bytes);
        let rest = std::io::copy(&mut stream, &mut std::io::sink()).unwrap_or(0);
        let cut = if rest > 0 { format!("\n[{rest} more bytes]") } else { String::new() };
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned() + &cut);
    });
    receiver
}

impl Chat<'_> {
    pub fn tool_definitions(&self) -> Vec<Value> {
        self.toolbox.as_ref().map(Toolbox::definitions).unwrap_or_default()
    }

    /// Runs what an answer calls, as far as the user agrees; the messages that answer the calls, or nothing when there are
    /// none.
    pub fn run_tools(&mut self, calls: &[Call]) -> Result<Option<Vec<Message>>, CommandError> {
        if calls.is_empty() || self.toolbox.is_none() {
            return Ok(None);
        }
        if let Some(broken) = calls.iter().find(|call| !call.is_whole) {
            self.terminal.warn(&format!("the call of {} is not whole: nothing is run", broken.name));
            return Ok(None);
        }
        let results = calls.iter().enumerate().map(|(n, call)| {
            let text = self.run_tool(call)?;
            let mut message = Message::new(Role::Tool, text);
            (message.tool_call_id, message.name) = (Some(format!("call_{}", n + 1)), Some(call.name.clone()));
            Ok(message)
        });
        results.collect::<Result<Vec<_>, CommandError>>().map(Some)
    }

    fn run_tool(&mut self, call: &Call) -> Result<String, CommandError> {
        let Some(toolbox) = &self.toolbox else { return Ok(String::new()) };
        if self.graceful.received().is_some() {
            return Ok("error: the user stopped it".to_owned());
        }
        let Some(tool) = toolbox.tools.iter().find(|tool| tool.name == call.name).cloned() else {
            return Ok(format!("error: there is no tool {}", call.name));
        };
        let Ok(arguments) = serde_json::from_str::<Value>(&call.arguments) else {
            return Ok("error: the arguments are not JSON".to_owned());
        };
        let folder = toolbox.path.parent().map(Path::to_path_buf).unwrap_or_default();
        let is_agreed = toolbox.always.contains(&tool.name) || self.agrees(&tool, &arguments, &folder)?;
        if !is_agreed {
            return Ok("error: the user does not want this to be run".to_owned());
        }
        let result = tool.run(&arguments, &folder, &self.graceful);
        let first = super::room::shortened(&result, 60);
        self.terminal.note(&format!("{} said {} bytes: {first}", tool.name, result.len()));
        Ok(result)
    }

    /// Asks before a command runs. Nobody to ask is a no.
    fn agrees(&mut self, tool: &Tool, arguments: &Value, folder: &Path) -> Result<bool, CommandError> {
        let words = tool.command_line(arguments, folder);
        let shown: Vec<String> = words.iter().map(|word| format!("{word:?}")).collect();
        self.terminal.report(&format!("{} wants to run: {}", tool.name, shown.join(" ")));
        loop {
            match self.input.ask("run it? y(es), n(o), a(lways in this chat): ")?.as_deref() {
                None => {
                    self.terminal.note("nobody can be asked here: it is not run");
                    return Ok(false);
                }
                Some("y" | "yes") => return Ok(true),
                Some("" | "n" | "no") => return Ok(false),
                Some("a" | "always") => {
                    if let Some(toolbox) = &mut self.toolbox {
                        toolbox.always.insert(tool.name.clone());
                    }
                    return Ok(true);
                }
                Some(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toolbox(text: &str) -> Result<Toolbox, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tools.toml");
        std::fs::write(&path, text).expect("written");
        Toolbox::read(&path).map_err(|error| error.to_string())
    }

    fn tool(argv: &[&str]) -> Tool {
        let argv = argv.iter().map(|word| (*word).to_owned()).collect();
        let (name, description, parameters) = ("t".to_owned(), "d".to_owned(), Map::new());
        Tool { name, description, parameters, argv, timeout: 5 }
    }

    fn said(tool: &Tool, arguments: Value) -> String {
        tool.run(&arguments, Path::new(""), &Graceful::begin())
    }

    #[test]
    fn tools_are_declared_in_toml() {
        let text = r#"
            [[tool]]
            name = "weather"
            description = "The weather"
            argv = ["weather", "{city}"]
            [tool.parameters]
            type = "object"
            properties = { city = { type = "string" } }
            required = ["city"]
        "#;
        let declared = toolbox(text).expect("well-formed");
        let expected = json!([{"type": "function", "function": {
            "name": "weather", "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        }}]);
        assert_eq!(Value::Array(declared.definitions()), expected);
        assert_eq!(declared.tools[0].timeout, TIMEOUT);
    }

    #[test]
    fn what_is_no_declaration_is_refused_with_its_reason() {
        let tool = |name: &str, argv: &str| {
            format!("[[tool]]\nname = \"{name}\"\ndescription = \"d\"\nargv = {argv}\n")
        };
        for (text, reason) in [
            (String::new(), "there is no [[tool]]"),
            (tool("a b", "[\"x\"]"), "is no name"),
            (tool("a", "[]"), "argv names no command"),
            (tool("a", "[\"x\"]") + &tool("a", "[\"y\"]"), "declared twice"),
            (tool("a", "[\"x\"]") + "color = 1\n", "unknown field `color`"),
            ("[[tool]]\nname = \"a\"\n".to_owned(), "missing field"),
        ] {
            let error = toolbox(&text).expect_err(reason);
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn arguments_fill_words_and_never_make_new_ones() {
        let tool = tool(&["./run", "{city}", "n={n}", "{none}", "{a}{", "{"]);
        let arguments = json!({"city": "Oslo; rm -rf /", "n": 3, "a": "{city}"});
        let line = tool.command_line(&arguments, Path::new("/tools"));
        assert_eq!(line, ["/tools/./run", "Oslo; rm -rf /", "n=3", "{none}", "{city}{", "{"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_command_gets_its_arguments_and_its_end_is_reported() {
        assert_eq!(said(&tool(&["cat"]), json!({"a": [1]})), "{\"a\":[1]}");
        assert_eq!(said(&tool(&["echo", "-n", "{a}"]), json!({"a": "$HOME"})), "$HOME");
        let failed = said(&tool(&["sh", "-c", "echo out; echo err >&2; exit 3"]), json!({}));
        assert!(failed.starts_with("error: exit status: 3\nout\nerr\n"), "{failed}");
        assert!(said(&tool(&["/no/such/command"]), json!({})).contains("cannot be started"));
        let long = said(&tool(&["sh", "-c", "yes | head -c 100000"]), json!({}));
        assert!(long.len() < 70_000 && long.ends_with("[34464 more bytes]"), "{}", &long[long.len() - 40..]);
        let late = Tool { timeout: 0, ..tool(&["sleep", "60"]) };
        assert_eq!(said(&late, json!({})), "error: it took longer than 0 s");
        let leaves = tool(&["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo -n done"]);
        assert_eq!(said(&leaves, json!({})), "done");
    }
}
