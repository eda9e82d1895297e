//! Tools of MCP servers, for `chat`, `run` and `serve`: the servers that the user's configuration names,
//! their tools, and calls with the user's consent.
//!
//! `config` reads the JSON of other clients, `names` makes the tools' names, `process` and `http` are the two
//! transports, `connection` is one server, `permission` what runs without asking, `result` what the model
//! gets, `call` one call. `shared` has the servers of `serve`, whose clients ask for consent themselves and
//! call at the same time. The protocol is rmcp's. Its tasks run on a thread of their own, and the callers
//! here wait for them. Only a call sees signals while it is waited for.
//!
//! Invariants: no file of the current folder starts a server or allows a call; `chat` and `run` call nothing
//! without the user's consent; a server that fails is reported by name, and the others continue.

mod call;
mod config;
mod connection;
mod http;
mod names;
mod permission;
mod process;
mod result;
mod shared;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

pub use self::call::{CallDesk, CallResult, CallStatus, result_message};
pub use self::config::McpConfig;
use self::config::{ServerConfig, TransportConfig};
use self::connection::{ServerConnection, ServerLoss};
pub use self::connection::{ServerTool, parse_tools};
use self::permission::Permissions;
pub use self::permission::{AllowedTool, CallConsent};
pub use self::result::parse_result;
pub use self::shared::SharedToolServers;
use super::error::{CommandError, Kind};
use super::terminal::Terminal;
use crate::cli::model::hub_access::ca_file;
use crate::cli::terminal::report::{counted, on_one_line};
use llmctl_engine::http_engine::TlsTrust;

/// Most servers of one chat; a signal ends as many process groups.
const MAX_SERVERS: usize = 32;

/// Flags for MCP servers, wherever their tools are called.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "MCP")]
pub struct McpServerArgs {
    /// Offer the model the tools of MCP servers: a JSON file with "mcpServers", as Claude Desktop, Cursor and VS Code write it
    ///
    /// May be repeated. Each call is shown and runs when you agree, or when --allow-tool names it. A folder's llmctl.toml cannot set
    /// it, because it starts programs. docs/mcp.md has the details.
    #[arg(long, value_name = "FILE")]
    pub mcp_config: Vec<PathBuf>,

    /// Longest time of a call of an MCP server's tool, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86400), hide_short_help = true)]
    pub tool_timeout: u32,
}

impl McpServerArgs {
    /// Reads the configuration: its servers, of which there may be none.
    ///
    /// # Errors
    /// A configuration that cannot be used.
    fn configured(&self, terminal: &Terminal) -> Result<Vec<ServerConfig>, CommandError> {
        let config = McpConfig::read(&self.mcp_config, &|name| std::env::var(name).ok())?;
        if config.servers.len() > MAX_SERVERS {
            return Err(Kind::Config.error(format!("--mcp-config: more than {MAX_SERVERS} servers")));
        }
        config.notes.iter().for_each(|note| terminal.note(note));
        Ok(config.servers)
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs(self.tool_timeout.into())
    }
}

/// Flags for tools of MCP servers whose calls are agreed to here.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "MCP")]
pub struct McpArgs {
    #[command(flatten)]
    pub servers: McpServerArgs,

    /// Call this tool without asking: SERVER__TOOL, or SERVER__* for all of a server; may be repeated
    #[arg(long, value_name = "PATTERN")]
    pub allow_tool: Vec<AllowedTool>,

    /// Most answers in a row whose calls are run before the model has to answer
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1000), hide_short_help = true)]
    pub max_tool_rounds: u32,
}

/// Returns what runs the connections.
fn runtime() -> Result<Runtime, CommandError> {
    let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("mcp").enable_all().build();
    runtime.map_err(|error| CommandError::new(Kind::Failure, error))
}

/// The servers of a chat or a run.
pub struct ToolServers {
    servers: Vec<ToolServer>,
    permissions: Permissions,
    timeout: Duration,
    trust: TlsTrust,
    /// Runs their connections. Dropped last.
    runtime: Runtime,
}

/// One server.
struct ToolServer {
    config: ServerConfig,
    state: ToolServerState,
}

enum ToolServerState {
    Starting(JoinHandle<Result<ServerConnection, ServerLoss>>),
    Ready(Box<ServerConnection>),
    /// It has ended or could not be started, for this reason.
    Down(String),
}

impl ToolServerState {
    fn connection(&self) -> Option<&ServerConnection> {
        match self {
            Self::Ready(connection) => Some(connection),
            _ => None,
        }
    }

    /// Returns the tools of a server that runs.
    fn tools(&self) -> &[ServerTool] {
        self.connection().map(|connection| connection.tools.as_slice()).unwrap_or_default()
    }
}

impl ToolServers {
    /// Reads the configuration and begins to start its servers; `None` without one. [`Self::wait`] waits for them.
    ///
    /// # Errors
    /// A configuration that cannot be used.
    pub fn begin(args: &McpArgs, terminal: &Terminal) -> Result<Option<Self>, CommandError> {
        if args.servers.mcp_config.is_empty() {
            if let Some(allowed) = args.allow_tool.first() {
                terminal.warn(format!(
                    "--allow-tool {allowed}: there are no MCP servers; --mcp-config FILE names some"
                ));
            }
            return Ok(None);
        }
        let configs = args.servers.configured(terminal)?;
        let mut servers = Self {
            servers: Vec::new(),
            permissions: Permissions::new(args.allow_tool.clone()),
            timeout: args.servers.timeout(),
            trust: TlsTrust(ca_file()),
            runtime: runtime()?,
        };
        for config in configs {
            let state = servers.starting(&config);
            servers.servers.push(ToolServer { config, state });
        }
        Ok(Some(servers))
    }

    fn starting(&self, config: &ServerConfig) -> ToolServerState {
        ToolServerState::Starting(
            self.runtime.spawn(ServerConnection::open(config.clone(), self.trust.clone())),
        )
    }

    /// Waits until each server has started or failed. Returns a message for each failure.
    pub fn wait(&mut self, terminal: &Terminal) -> Vec<String> {
        let mut failures = Vec::new();
        let is_starting = |server: &&mut ToolServer| matches!(server.state, ToolServerState::Starting(_));
        for ToolServer { config, state } in self.servers.iter_mut().filter(is_starting) {
            let ToolServerState::Starting(task) = state else { continue };
            terminal.status(&format!("starting MCP server {}", config.name));
            let opened = self.runtime.block_on(task);
            *state = match opened.unwrap_or_else(|error| Err(ServerLoss::new(error.to_string()))) {
                Ok(connection) => ToolServerState::Ready(Box::new(connection)),
                Err(loss) => {
                    failures.push(format!("MCP server {}: {loss}", config.name));
                    ToolServerState::Down(loss.why)
                }
            };
        }
        terminal.status("");
        failures
    }

    /// Warns of permissions that name no tool of these servers.
    pub fn check_permissions(&self, terminal: &Terminal) {
        let tools: Vec<(&str, &ServerTool)> = self.tools().collect();
        for allowed in self.permissions.without_use(&tools) {
            terminal.warn(format!("--allow-tool {allowed}: no MCP server has such a tool"));
        }
    }

    /// Returns the tools of all servers that run, with the servers' names.
    fn tools(&self) -> impl Iterator<Item = (&str, &ServerTool)> {
        self.servers.iter().flat_map(|ToolServer { config, state }| {
            state.tools().iter().map(|tool| (config.name.as_str(), tool))
        })
    }

    /// Returns the tools as templates and APIs have them.
    pub fn definitions(&self) -> Vec<Value> {
        self.tools().map(|(_, tool)| tool.definition()).collect()
    }

    /// Returns whether a name is one of a server's tool, or was.
    pub fn has(&self, offered: &str) -> bool {
        let server = names::server_of(offered);
        self.servers.iter().any(|one| Some(one.config.name.as_str()) == server)
    }

    /// Returns the names of all servers.
    pub fn names(&self) -> Vec<&str> {
        self.servers.iter().map(|server| server.config.name.as_str()).collect()
    }

    /// Describes the servers in a few words: `2 MCP servers, 9 tools`.
    pub fn spoken(&self) -> String {
        let num_running = self.servers.iter().filter(|server| server.state.connection().is_some()).count();
        format!("{}, {}", counted(num_running, "MCP server"), counted(self.tools().count(), "tool"))
    }

    /// Returns servers and tools, one a line.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let mut rows = Vec::new();
        for ToolServer { config, state } in &self.servers {
            let about = match state {
                ToolServerState::Starting(_) => "starting".to_owned(),
                ToolServerState::Ready(connection) => {
                    format!("running, {}", counted(connection.tools.len(), "tool"))
                }
                ToolServerState::Down(why) => format!("down: {}", why.lines().next().unwrap_or_default()),
            };
            let place =
                match (&config.transport, state.connection().map(|connection| connection.about.as_str())) {
                    (_, Some(about)) if !about.is_empty() => about.to_owned(),
                    (TransportConfig::Process(process), _) => process.command.display().to_string(),
                    (TransportConfig::Http(_), _) => "http".to_owned(),
                };
            rows.push(vec![config.name.clone(), about, place]);
            rows.extend(state.tools().iter().map(|tool| self.row(&config.name, tool)));
        }
        rows
    }

    fn row(&self, server: &str, tool: &ServerTool) -> Vec<String> {
        let asks = match self.permissions.allows(server, tool) {
            true => "runs without asking",
            false => "asks before it runs",
        };
        let description = on_one_line(&tool.description, usize::MAX);
        vec![format!("  {}", tool.offered), asks.to_owned(), description]
    }

    /// Returns a message for each server that has ended, or has changed its tools, since the last call. What the user allowed when
    /// asked is asked again for the tools of a server that has changed them.
    pub fn news(&mut self) -> Vec<String> {
        let mut news = Vec::new();
        for ToolServer { config, state } in &mut self.servers {
            let ToolServerState::Ready(connection) = state else { continue };
            let name = &config.name;
            if let Some(loss) = self.runtime.block_on(connection.lost()) {
                news.push(format!("MCP server {name}: {loss}"));
                let down = std::mem::replace(state, ToolServerState::Down(loss.why));
                self.runtime.block_on(ended(down));
                continue;
            }
            match self.runtime.block_on(connection.renew_tools(config)) {
                Ok(false) => {}
                Ok(true) => {
                    self.permissions.forget(name);
                    let tools = counted(connection.tools.len(), "tool");
                    news.push(format!("MCP server {name} has changed its tools: {tools} now"));
                }
                Err(why) => news.push(format!("MCP server {name}: its tools: {why}")),
            }
        }
        news
    }

    /// Ends a server and starts it anew. What the user allowed in this chat for its tools is asked again.
    ///
    /// # Errors
    /// There is no such server, or why it does not start.
    pub fn restart(&mut self, name: &str, terminal: &Terminal) -> Result<(), CommandError> {
        let Some(at) = self.servers.iter().position(|server| server.config.name == name) else {
            let error = CommandError::usage(format!("there is no MCP server {name}"));
            return Err(error.hint(format!("there are: {}", self.names().join(", "))));
        };
        let before = std::mem::replace(&mut self.servers[at].state, ToolServerState::Down(String::new()));
        self.runtime.block_on(ended(before));
        self.permissions.forget(name);
        self.servers[at].state = self.starting(&self.servers[at].config);
        match self.wait(terminal).pop() {
            None => Ok(()),
            Some(failure) => Err(Kind::Unavailable.error(failure)),
        }
    }
}

/// Ends all servers at once.
impl Drop for ToolServers {
    fn drop(&mut self) {
        let states = self.servers.drain(..).map(|server| server.state);
        let ending: Vec<_> = states.map(|state| self.runtime.spawn(ended(state))).collect();
        self.runtime.block_on(async {
            for task in ending {
                let _ = task.await; // each has limits of its own
            }
        });
    }
}

/// Ends a server; one that is starting is dropped, which kills it.
async fn ended(state: ToolServerState) {
    match state {
        ToolServerState::Starting(task) => match task.is_finished() {
            true => {
                if let Ok(Ok(connection)) = task.await {
                    connection.end().await;
                }
            }
            false => task.abort(),
        },
        ToolServerState::Ready(connection) => connection.end().await,
        ToolServerState::Down(_) => {}
    }
}
