//! `llmctl launch AGENT`: a coding agent with a local model, in one command.
//!
//! Finds a server or runs one of its own in this process, so that it ends with the agent whatever happens.
//! Invariants: the agent is looked for before a model is loaded; a server of its own listens on a free
//! loopback port and takes a key that only the agent gets; the user's files are neither read for settings nor
//! changed (see `agents`).

pub mod agents;

use std::ffi::OsString;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;
use uuid::Uuid;

use super::error::{CommandError, Exit, Kind};
use super::places::Places;
use super::serve::{DEFAULT_HOST, DEFAULT_PORT, ListenArgs, RunningServer, ServeArgs, ServeLimitArgs};
use super::terminal::Terminal;
use super::warm;
use crate::cli::config::variables::KEYS;
use crate::cli::flags::args::{EngineArgs, ModelArgs, TimeSpan, endpoint_text};
use crate::cli::model::load;
use crate::cli::serve::capacity::CapacityArgs;
use crate::cli::terminal::output::visible;
use crate::cli::terminal::report::print;
use crate::cli::terminal::signal::Graceful;
use agents::{AGENTS, Agent, AgentSettings, LaunchTarget};
use llmctl_bench::http::client::{ListedModel, LoadClient, address};
use llmctl_serve::gate::owner::KeyLine;
use llmctl_serve::gate::policy::ApiKeys;

/// Longest wait for the answer of a running server.
const FIND_TIMEOUT: Duration = Duration::from_secs(5);

/// Tokens of a context in which agents have room to work, as docs/agents.md says.
const ROOMY_CONTEXT: usize = 65_536;

/// Longest wait for requests that the agent has left behind.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Start a coding agent with a local model
///
/// Uses the server at http://127.0.0.1:8484 if one runs there and no model is named; otherwise loads the model, serves it on a
/// free loopback port, and stops when the agent ends. The agent gets settings of its own, in llmctl's data folder.
#[derive(Debug, Clone, Default, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct LaunchArgs {
    /// Agent to start; it has to be installed
    #[arg(value_name = "AGENT", value_parser = PossibleValuesParser::new(AGENTS.iter().map(|agent| agent.name)))]
    pub agent: String,

    /// Arguments of the agent
    #[arg(value_name = "ARGS", last = true)]
    pub arguments: Vec<OsString>,

    /// Print the agent's settings instead of starting anything
    #[arg(long)]
    pub print: bool,

    /// Use the server at this address, e.g. http://127.0.0.1:8484; LLMCTL_API_KEY holds its key
    #[arg(long, value_name = "URL", value_parser = endpoint_text, conflicts_with = "model")]
    pub endpoint: Option<String>,

    /// Keep the KV of the agent's own prompt for its next start, as `llmctl warm` does
    #[arg(long, conflicts_with_all = ["print", "endpoint"])]
    pub warm: bool,

    #[command(flatten)]
    pub model: ModelArgs,

    #[command(flatten)]
    pub capacity: CapacityArgs,

    #[command(flatten)]
    pub engine: EngineArgs,
}

const LONG_HELP: &str = include_str!("long_help.txt").trim_ascii_end();

/// Runs the agent. Returns its exit code.
///
/// # Errors
/// `NotFound` without the agent or the model, `Unavailable` if `--endpoint` does not answer, and those of `llmctl serve`.
pub fn run(args: LaunchArgs, terminal: &Terminal, places: &Places) -> Result<Exit, CommandError> {
    let agent = Agent::find(&args.agent).ok_or_else(|| CommandError::usage("no such agent"))?;
    let folder = folder_of(agent, places)?;
    let found = find_server(&args)?;
    if args.print {
        let target = found.map_or_else(|| expected_server(&args, terminal), Ok)?;
        return print(&described(agent, &agent.settings(&target, &folder)));
    }
    let program = program_of(agent)?;
    if let Some(target) = found {
        if args.warm {
            let message =
                format!("--warm: the KV is with the server at {}, and outlives this agent", target.url);
            return Err(CommandError::usage(message).hint("name a --model for a server of the agent's own"));
        }
        terminal.note(format!("using {} at {}", visible(&target.model), target.url));
        warn_of_context(target.context_tokens, terminal);
        return start(&program, agent.settings(&target, &folder), &args.arguments);
    }
    let key = own_key();
    let serve = ServeArgs {
        listen: ListenArgs { port: Some(0), alias: vec!["*".to_owned()], ..ListenArgs::default() },
        limits: ServeLimitArgs { drain_timeout: Some(TimeSpan(DRAIN_TIMEOUT)), ..ServeLimitArgs::default() },
        model: args.model.clone(),
        capacity: args.capacity.clone(),
        engine: args.engine.clone(),
        ..ServeArgs::default()
    };
    let server = RunningServer::start(&serve, ApiKeys::new([key.clone()]), terminal, places)?;
    server.open(terminal);
    let (model, context_tokens) = server.model();
    let target = LaunchTarget {
        url: server.address().to_string(),
        key: key.key,
        model,
        context_tokens: context_tokens.unwrap_or(0),
        sees: server.sees(),
    };
    warn_of_context(target.context_tokens, terminal);
    let ended = start(&program, agent.settings(&target, &folder), &args.arguments);
    if let Some(app) = server.app().filter(|_| args.warm) {
        match warm::keep_agent(&app, agent.name, args.engine.kv_disk, places, terminal) {
            Ok(text) => text.lines().for_each(|line| terminal.note(line)),
            Err(error) => terminal.warn(format!("--warm: {error}")),
        }
    }
    server.finish(terminal);
    ended
}

/// Warns of a context that the agent's own prompt nearly fills; 0 is unknown.
fn warn_of_context(size: usize, terminal: &Terminal) {
    if (1..ROOMY_CONTEXT).contains(&size) {
        terminal.warn(format!("the context has {size} tokens; agents send up to 20,000 before the first question, and have room to work from {ROOMY_CONTEXT} on (--ctx N)"));
    }
}

/// Returns a key for one launch. All launches are one owner, so that stored answers are found again.
fn own_key() -> KeyLine {
    let line = format!("llmctl-{} owner=launch", Uuid::new_v4().simple());
    KeyLine::parse(&line).ok().flatten().expect("the line is well formed")
}

fn folder_of(agent: &Agent, places: &Places) -> Result<PathBuf, CommandError> {
    let data = places.data.as_ref().ok_or_else(|| {
        let message = "HOME and XDG_DATA_HOME are not set: there is no folder for settings";
        Kind::Config.error(message).hint("set HOME or XDG_DATA_HOME")
    })?;
    Ok(data.join("agents").join(agent.name))
}

/// Returns the running server to use: that of `--endpoint`, or one at the default address unless a model is named.
fn find_server(args: &LaunchArgs) -> Result<Option<LaunchTarget>, CommandError> {
    let usual = format!("http://{DEFAULT_HOST}:{DEFAULT_PORT}");
    match &args.endpoint {
        Some(url) => Ok(Some(ask(url)?)),
        // Without a usable server at the default address, the caller starts one.
        None if !args.model.is_named => Ok(ask(&usual).ok()),
        None => Ok(None),
    }
}

/// Asks a server for its model.
fn ask(url: &str) -> Result<LaunchTarget, CommandError> {
    let endpoint = address(url)?;
    let key = std::env::var("LLMCTL_API_KEY").ok().filter(|key| !key.is_empty());
    let client = LoadClient::new(endpoint.clone(), key.as_deref(), FIND_TIMEOUT)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| CommandError::new(Kind::Failure, error))?;
    let listed = runtime.block_on(client.models());
    let (models, _) = listed.map_err(|failure| client.explained(failure))?;
    let told = models.into_iter().find_map(|model| Some((model.context_tokens?, model)));
    let Some((context_tokens, ListedModel { id: model, sees, .. })) = told else {
        return Err(Kind::Failure.error(format!("{url} does not list a model with its context length")));
    };
    let url = format!("http://{}", endpoint.address().authority());
    Ok(LaunchTarget { url, key: key.unwrap_or_else(|| "none".to_owned()), model, context_tokens, sees })
}

/// Returns what `llmctl serve` would be with these flags, from the headers of the model alone.
fn expected_server(args: &LaunchArgs, terminal: &Terminal) -> Result<LaunchTarget, CommandError> {
    let texts = load::load_texts(&args.model, args.capacity.options(&args.engine), terminal)?;
    Ok(LaunchTarget {
        url: format!("http://{DEFAULT_HOST}:{DEFAULT_PORT}"),
        key: "none".to_owned(),
        model: texts.info().name.clone(),
        context_tokens: texts.info().context_tokens,
        sees: texts.info().sees,
    })
}

/// Returns the agent's program in PATH.
fn program_of(agent: &Agent) -> Result<PathBuf, CommandError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let suffixes: &[&str] = if cfg!(windows) { &[".cmd", ".exe", ""] } else { &[""] };
    let names = suffixes.iter().map(|suffix| format!("{}{suffix}", agent.program));
    let names: Vec<String> = names.collect();
    let in_folder =
        |folder: PathBuf| names.iter().map(move |name| folder.join(name)).find(|path| path.is_file());
    std::env::split_paths(&path).find_map(in_folder).ok_or_else(|| {
        let message = format!("{} is not installed: no {} in PATH", agent.name, agent.program);
        Kind::NotFound.error(message).hint(agent.install_command())
    })
}

/// Starts the agent in this terminal and waits for its end.
fn start(program: &Path, settings: AgentSettings, more: &[OsString]) -> Result<Exit, CommandError> {
    let writing = CommandError::io("writing the agent's settings");
    settings.write().map_err(writing)?;
    // Ctrl-C is the agent's: it is in the same process group.
    let graceful = Graceful::begin_conversation();
    graceful.work();
    let mut command = Command::new(program);
    for name in KEYS {
        command.env_remove(name);
    }
    command.args(&settings.arguments).args(more).envs(settings.variables);
    let starting = |error| CommandError::new(Kind::Failure, error).context(program.display().to_string());
    let mut child = command.spawn().map_err(starting)?;
    end_with_us(&graceful, &child).map_err(starting)?;
    let status = child.wait().map_err(starting)?;
    graceful.wait(false);
    Ok(exit_of(status))
}

/// Passes SIGTERM on to the agent.
#[cfg(unix)]
fn end_with_us(graceful: &Graceful, child: &Child) -> std::io::Result<()> {
    let id = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
    graceful.on_signal(move |_| {
        // Fails only if the agent has ended already.
        let _ = id.map(|id| rustix::process::kill_process(id, rustix::process::Signal::TERM));
    })
}

#[cfg(not(unix))]
fn end_with_us(_: &Graceful, _: &Child) -> std::io::Result<()> {
    Ok(())
}

fn exit_of(status: ExitStatus) -> Exit {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return Exit::Signal(u8::try_from(signal).unwrap_or(u8::MAX));
    }
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Exit::Agent(code.unwrap_or(Kind::Failure.code()))
}

/// Returns the settings as a shell takes them, after the files that they need.
pub fn described(agent: &Agent, settings: &AgentSettings) -> String {
    let mut text = String::new();
    let mut add = |line: &str| writeln!(text, "{line}").expect("a string takes everything");
    for file in &settings.files {
        add(&format!("# {}", file.path.display()));
        add(file.content.trim_end());
        add("");
    }
    for (name, value) in &settings.variables {
        add(&format!("export {name}={}", shell_word(value)));
    }
    let words = std::iter::once(agent.program).chain(settings.arguments.iter().map(String::as_str));
    add(&words.map(shell_word).collect::<Vec<_>>().join(" "));
    text
}

/// Quotes a word for a POSIX shell if it needs quotes.
fn shell_word(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:@=".contains(&byte);
    match !text.is_empty() && text.bytes().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        for (text, word) in [("a/b:c-1", "a/b:c-1"), ("", "''"), ("a b", "'a b'"), ("it's", "'it'\\''s'")] {
            assert_eq!(shell_word(text), word);
        }
    }

    #[test]
    fn the_settings_are_a_script() {
        let target = LaunchTarget {
            url: "http://127.0.0.1:1".to_owned(),
            key: "k".to_owned(),
            model: "m".to_owned(),
            context_tokens: 65_536,
            sees: false,
        };
        let agent = Agent::find("pi").expect("a row");
        let text = described(agent, &agent.settings(&target, Path::new("/f")));
        assert!(text.starts_with("# /f/models.json\n{\n"), "{text}");
        assert!(text.ends_with("export PI_TELEMETRY=0\npi --provider llmctl --model m\n"), "{text}");
    }

    #[cfg(unix)]
    #[test]
    fn the_agents_exit_code_is_passed_on() {
        let status = |script: &str| Command::new("sh").args(["-c", script]).status().expect("a shell");
        assert_eq!(exit_of(status("exit 0")).code(), 0);
        assert_eq!(exit_of(status("exit 7")).code(), 7);
        assert_eq!(exit_of(status("kill -TERM $$")).code(), 143);
    }
}
