//! Tools that the user declares with `--tools`: commands in TOML, or functions in OpenAI's form, which is
//! JSON.
//!
//! `chat` runs the commands, `run` only offers them. Invariants: no shell; no command runs without the user's
//! consent, for once or for the chat, and none without a terminal; a command is bounded in time and output,
//! and what it started ends with one that is stopped; its output or failure goes back to the model.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

#[cfg(unix)]
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::cli::error::CommandError;
use crate::cli::mcp::ToolServers;
use crate::cli::terminal::input::read_file;
use crate::cli::terminal::signal::{Companion, Graceful};
use llmctl_engine::turn::ToolUse;
use llmctl_serve::wire::{Problems, tools};

/// Bytes of a command's output that the model gets.
const MAX_OUTPUT: u64 = 64 << 10;

/// Seconds a command may take unless it says otherwise.
const TIMEOUT: u64 = 60;

/// Most seconds that it may say: a day.
const MAX_TIMEOUT: u64 = 24 * 60 * 60;

/// Longest wait for the rest of a command's output after the command has ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval at which a running command is checked.
const POLL: Duration = Duration::from_millis(20);

/// The declared tools, and what was agreed to.
#[derive(Debug)]
pub struct Toolbox {
    pub path: PathBuf,
    /// As templates and APIs have them.
    pub offer: ToolUse,
    /// Those with a command, which JSON has not.
    pub tools: Vec<ChatTool>,
    /// Tools that run without asking again.
    pub always: BTreeSet<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolFile {
    #[serde(default)]
    tool: Vec<ChatTool>,
}

/// One tool.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatTool {
    pub name: String,
    pub description: String,
    /// JSON Schema of the arguments.
    #[serde(default)]
    pub parameters: Map<String, Value>,
    /// The command and its arguments; `{name}` stands for an argument of the call, `{{name}}` for itself in single braces.
    pub argv: Vec<String>,
    /// Seconds, 1 to [`MAX_TIMEOUT`].
    #[serde(default = "default_timeout")]
    pub timeout: u64,
}

fn default_timeout() -> u64 {
    TIMEOUT
}

impl Toolbox {
    /// Reads a file, or what is given if that is JSON itself.
    ///
    /// # Errors
    /// The file cannot be read, or does not declare tools.
    pub fn read(given: &str) -> Result<Self, CommandError> {
        let (path, text) = match is_json(given) {
            true => (PathBuf::from("--tools"), given.to_owned()),
            false => (PathBuf::from(given), read_file(Path::new(given))?),
        };
        let bad = |message: String| CommandError::bad_data(format!("{}: {message}", path.display()));
        if is_json(&text) {
            let offer = functions(&text).map_err(bad)?;
            return Ok(Self { path, offer, tools: Vec::new(), always: BTreeSet::new() });
        }
        let file: ToolFile = toml::from_str(&text).map_err(|error| bad(error.to_string()))?;
        if file.tool.is_empty() {
            return Err(bad("there is no [[tool]]".to_owned()));
        }
        let mut names = BTreeSet::new();
        for tool in &file.tool {
            tool.check().map_err(bad)?;
            if !names.insert(&tool.name) {
                return Err(bad(format!("tool {} is declared twice", tool.name)));
            }
        }
        let definitions = file.tool.iter().map(ChatTool::definition).collect();
        let offer = ToolUse { definitions, is_parallel: true, ..ToolUse::default() };
        Ok(Self { path, offer, tools: file.tool, always: BTreeSet::new() })
    }

    /// Refuses tools whose names are those of MCP servers' tools.
    ///
    /// # Errors
    /// A usage error that names the first.
    pub fn check_names(&self, servers: Option<&ToolServers>) -> Result<(), CommandError> {
        let is_theirs = |name: &&str| servers.is_some_and(|servers| servers.has(name));
        self.names().find(is_theirs).map_or(Ok(()), |name| {
            let path = self.path.display();
            Err(CommandError::usage(format!("{path}: {name} is the name of an MCP server's tool")))
        })
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.offer.definitions.iter().filter_map(|tool| tool["function"]["name"].as_str())
    }

    /// Returns a tool's command.
    pub fn command(&self, name: &str) -> Option<&ChatTool> {
        self.tools.iter().find(|tool| tool.name == name)
    }

    /// One a line.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let row = |tool: &Value| {
            let function = &tool["function"];
            let text = |member: &str| function[member].as_str().unwrap_or_default().to_owned();
            let name = text("name");
            let asks = match self.command(&name) {
                None => "asks you for its result",
                Some(_) if self.always.contains(&name) => "runs without asking",
                Some(_) => "asks before it runs",
            };
            vec![name, asks.to_owned(), text("description")]
        };
        self.offer.definitions.iter().map(row).collect()
    }
}

/// Returns whether a text begins as JSON; TOML's tables begin with two brackets.
fn is_json(text: &str) -> bool {
    let text = text.trim_start();
    text.starts_with('{') || text.strip_prefix('[').is_some_and(|rest| !rest.starts_with('['))
}

/// Reads an array of functions as requests over HTTP have it.
fn functions(text: &str) -> Result<ToolUse, String> {
    let tools: Value = serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))?;
    let object = Map::from_iter([("tools".to_owned(), tools)]);
    let read = Problems::default().read(object, |fields| tools::tools(fields, false));
    read.map(|(offer, _)| offer).map_err(|error| error.message)
}

impl ChatTool {
    /// Validates the declaration; the error says what is wrong.
    fn check(&self) -> Result<(), String> {
        let Self { name, argv, timeout, .. } = self;
        let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if name.is_empty() || name.len() > 64 || !name.chars().all(is_letter) {
            return Err(format!("invalid tool name {name:?} (1 to 64 of a-z, A-Z, 0-9, _ and -)"));
        }
        if argv.first().is_none_or(String::is_empty) {
            return Err(format!("tool {name}: argv names no command"));
        }
        if !(1..=MAX_TIMEOUT).contains(timeout) {
            return Err(format!("tool {name}: timeout {timeout} is not in 1 to {MAX_TIMEOUT} seconds"));
        }
        let parameters = self.parameters.get("properties").and_then(Value::as_object);
        let names: Vec<&str> = parameters.into_iter().flat_map(Map::keys).map(String::as_str).collect();
        let used = argv[1..].iter().flat_map(|word| parts(word));
        let unknown = used.filter_map(|part| match part {
            ArgvPart::Argument(used) if !names.contains(&used) => Some(used),
            _ => None,
        });
        match (unknown.into_iter().next(), &names[..]) {
            (None, _) => Ok(()),
            (Some(unknown), []) => {
                Err(format!("tool {name}: argv has {{{unknown}}}, but the tool has no parameters"))
            }
            (Some(unknown), names) => Err(format!(
                "tool {name}: argv has {{{unknown}}}, which is not one of its parameters ({}); write {{{{{unknown}}}}} \
                 if it is no argument",
                names.join(", ")
            )),
        }
    }

    fn definition(&self) -> Value {
        let mut parameters = self.parameters.clone();
        parameters.entry("type").or_insert_with(|| "object".into());
        parameters.entry("properties").or_insert_with(|| json!({}));
        json!({
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        })
    }

    /// Returns the command line of a call.
    pub fn command_line(&self, arguments: &Value, folder: &Path) -> Vec<String> {
        // The command itself is the user's, never the model's.
        let program = &self.argv[0];
        let is_beside = program.starts_with("./") || program.starts_with("../");
        let program = if is_beside { folder.join(program).display().to_string() } else { program.clone() };
        let rest = self.argv[1..].iter().map(|part| filled(part, arguments));
        std::iter::once(program).chain(rest).collect()
    }

    /// Runs the call to its end: what it returned, or why it failed.
    pub fn run(&self, arguments: &Value, folder: &Path, graceful: &Graceful) -> Result<String, String> {
        let words = self.command_line(arguments, folder);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        match command.spawn() {
            Ok(child) => self.wait(child, arguments, graceful),
            Err(error) => Err(format!("cannot start {} ({})", words[0], reason(&error))),
        }
    }

    fn wait(&self, mut child: Child, arguments: &Value, graceful: &Graceful) -> Result<String, String> {
        let companion = Companion::of_group(child.id());
        let stdin = child.stdin.take();
        let given = arguments.to_string();
        let writer = std::thread::spawn(move || {
            // A command that does not read its arguments there is fine.
            stdin.map(|mut stdin| stdin.write_all(given.as_bytes()))
        });
        let (stdout, stderr) = (drained(child.stdout.take()), drained(child.stderr.take()));
        let (start, timeout) = (Instant::now(), Duration::from_secs(self.timeout));
        let ended = loop {
            match child.try_wait() {
                Ok(Some(status)) => break Ok(status),
                Err(error) => break Err(error.to_string()),
                Ok(None) if graceful.received().is_some() => break Err(STOPPED.to_owned()),
                Ok(None) if start.elapsed() > timeout => {
                    break Err(format!("it took longer than {} s", self.timeout));
                }
                Ok(None) => std::thread::sleep(POLL),
            }
        };
        if ended.is_err() {
            #[cfg(unix)]
            let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
            let _ = child.kill();
        }
        drop(companion);
        let _ = child.wait();
        drop(writer);
        // Processes that it left running may hold the streams open for ever.
        let text = |stream: Receiver<String>| stream.recv_timeout(DRAIN_TIMEOUT).unwrap_or_default();
        match ended? {
            status if status.success() => Ok(text(stdout)),
            status => Err(format!("{status}\n{}{}", text(stdout), text(stderr))),
        }
    }
}

/// Why a call ended that the user interrupted.
pub const STOPPED: &str = "the user stopped it";

/// Returns an error of the system in a few words.
fn reason(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::NotFound => "no such file".to_owned(),
        ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    }
}

/// A piece of a word of `argv`.
enum ArgvPart<'a> {
    Text(&'a str),
    /// Replaced by the argument of this name.
    Argument(&'a str),
}

/// `{name}` is an argument, `{{name}}` is `{name}`, any other brace is itself.
fn parts(word: &str) -> Vec<ArgvPart<'_>> {
    let is_name =
        |text: &str| !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || "_-.".contains(c));
    let braced = |text: &str, open: &str, close: &str| {
        let (name, _) = text.strip_prefix(open)?.split_once(close)?;
        is_name(name).then_some(open.len() + name.len() + close.len())
    };
    let (mut parts, mut from, mut at) = (Vec::new(), 0, 0);
    while let Some(found) = word[at..].find('{') {
        at += found;
        let rest = &word[at..];
        let (len, part) = if let Some(len) = braced(rest, "{{", "}}") {
            (len, ArgvPart::Text(&rest[1..len - 1]))
        } else if let Some(len) = braced(rest, "{", "}") {
            (len, ArgvPart::Argument(&rest[1..len - 1]))
        } else {
            at += 1;
            continue;
        };
        parts.extend([ArgvPart::Text(&word[from..at]), part]);
        at += len;
        from = at;
    }
    parts.push(ArgvPart::Text(&word[from..]));
    parts
}

/// Returns the word with its arguments, once: what an argument brings is not filled again. One that the model left out is empty.
fn filled(word: &str, arguments: &Value) -> String {
    let text = |part: ArgvPart<'_>| match part {
        ArgvPart::Text(text) => text.to_owned(),
        ArgvPart::Argument(name) => match arguments.get(name) {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Null) | None => String::new(),
            Some(other) => other.to_string(),
        },
    };
    parts(word).into_iter().map(text).collect()
}

/// Reads a stream in a thread, so that its writer never blocks.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn toolbox(text: &str) -> Result<Toolbox, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tools.toml");
        std::fs::write(&path, text).expect("written");
        Toolbox::read(&path.display().to_string()).map_err(|error| error.to_string())
    }

    fn tool(argv: &[&str]) -> ChatTool {
        let argv = argv.iter().map(|word| (*word).to_owned()).collect();
        let (name, description, parameters) = ("t".to_owned(), "d".to_owned(), Map::new());
        ChatTool { name, description, parameters, argv, timeout: 5 }
    }

    fn run(tool: &ChatTool, arguments: Value) -> Result<String, String> {
        tool.run(&arguments, Path::new(""), &Graceful::begin())
    }

    #[test]
    fn tools_are_declared_in_toml_or_json() {
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
        assert_eq!(Value::Array(declared.offer.definitions), expected);
        assert_eq!(declared.tools[0].timeout, TIMEOUT);
        let json = format!(" {expected:#}");
        for declared in [toolbox(&json), Toolbox::read(&json).map_err(|error| error.to_string())] {
            let declared = declared.expect("well-formed");
            assert_eq!(declared.rows(), [["weather", "asks you for its result", "The weather"]]);
            assert_eq!(Value::Array(declared.offer.definitions), expected);
        }
    }

    #[test]
    fn a_wrong_declaration_is_refused_with_its_reason() {
        let tool = |name: &str, argv: &str| {
            format!("[[tool]]\nname = \"{name}\"\ndescription = \"d\"\nargv = {argv}\n")
        };
        for (text, reason) in [
            (String::new(), "there is no [[tool]]"),
            (tool("a b", "[\"x\"]"), "invalid tool name \"a b\""),
            (tool("a", "[]"), "argv names no command"),
            (tool("a", "[\"x\"]") + &tool("a", "[\"y\"]"), "declared twice"),
            (tool("a", "[\"x\"]") + "color = 1\n", "unknown field `color`"),
            (tool("a", "[\"x\", \"in {town}\"]"), "argv has {town}, but the tool has no parameters"),
            (
                tool("a", "[\"x\", \"{town}\"]") + "[tool.parameters]\nproperties = { city = {} }\n",
                "argv has {town}, which is not one of its parameters (city)",
            ),
            (
                tool("a", "[\"x\"]") + "timeout = 9223372036854775807\n",
                "tool a: timeout 9223372036854775807 is not in 1 to 86400 seconds",
            ),
            (tool("a", "[\"x\"]") + "timeout = 0\n", "timeout 0 is not in 1 to 86400 seconds"),
            ("[[tool]]\nname = \"a\"\n".to_owned(), "missing field"),
            ("[{]".to_owned(), "not JSON: "),
            ("{}".to_owned(), "tools"),
        ] {
            let error = toolbox(&text).expect_err(reason);
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn arguments_fill_words_and_never_make_new_ones() {
        let tool = tool(&[
            "./run",
            "{city}",
            "n={n}",
            "<{none}>",
            "{a}{",
            "{",
            "{{city}}",
            "{ city }",
            "{print $1}",
        ]);
        let arguments = json!({"city": "Oslo; rm -rf /", "n": 3, "a": "{city}"});
        let line = tool.command_line(&arguments, Path::new("/tools"));
        let expected = [
            "/tools/./run",
            "Oslo; rm -rf /",
            "n=3",
            "<>",
            "{city}{",
            "{",
            "{city}",
            "{ city }",
            "{print $1}",
        ];
        assert_eq!(line, expected);
    }

    #[cfg(unix)]
    #[test]
    fn a_command_gets_its_arguments_and_its_end_is_reported() {
        assert_eq!(run(&tool(&["cat"]), json!({"a": [1]})), Ok("{\"a\":[1]}".to_owned()));
        assert_eq!(run(&tool(&["echo", "-n", "{a}"]), json!({"a": "$HOME"})), Ok("$HOME".to_owned()));
        let failed = run(&tool(&["sh", "-c", "echo out; echo err >&2; exit 3"]), json!({}));
        assert!(
            failed.as_ref().is_err_and(|text| text.starts_with("exit status: 3\nout\nerr\n")),
            "{failed:?}"
        );
        let missing = run(&tool(&["/no/such/command"]), json!({}));
        assert_eq!(missing, Err("cannot start /no/such/command (no such file)".to_owned()));
        let long = run(&tool(&["sh", "-c", "yes | head -c 100000"]), json!({})).expect("a success");
        assert!(long.len() < 70_000 && long.ends_with("[34464 more bytes]"), "{}", &long[long.len() - 40..]);
        let late = ChatTool { timeout: 0, ..tool(&["sleep", "60"]) };
        assert_eq!(run(&late, json!({})), Err("it took longer than 0 s".to_owned()));
        let leaves = tool(&["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo -n done"]);
        assert_eq!(run(&leaves, json!({})), Ok("done".to_owned()));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_a_command_started_ends_with_it_when_it_takes_too_long() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("pid");
        let script = format!("sleep 600 & echo $! >'{}'; wait", file.display());
        let late = ChatTool { timeout: 3, ..tool(&["sh", "-c", &script]) };
        assert_eq!(run(&late, json!({})), Err("it took longer than 3 s".to_owned()));
        let id = std::fs::read_to_string(file).expect("it has started");
        // Killed, and perhaps not waited for yet.
        let is_gone = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", id.trim()));
            stat.map_or(true, |stat| stat.contains(") Z"))
        };
        assert!((0..500).any(|_| is_gone() || (std::thread::sleep(POLL), false).1), "{id}");
    }
}
