//! Tools of MCP servers, for `chat`, `run` and `serve`: the servers that the user's configuration names,
//! their tools, and calls with the user's consent.
//!
//! `config` reads the JSON of other clients, `names` makes the tools' names, `process` and `http` are the two
//! transports, `connection` is one server, `permission` what runs without asking, `result` what the model
//! gets, `call` one call, `owned` starts servers, looks at them and ends them. `shared` has those of `serve`, whose clients ask
//! for consent themselves and call at the same time. The protocol is rmcp's. Its tasks run on a thread of their own, and the callers
//! here wait for them. Only a call sees signals while it is waited for.
//!
//! Invariants: no file of the current folder starts a server or allows a call; `chat` and `run` call nothing
//! without the user's consent; a server that fails is reported by name, and the others continue.

mod call;
mod config;
mod connection;
mod http;
mod names;
mod owned;
mod permission;
mod process;
mod result;
mod shared;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use serde_json::Value;

pub use self::call::{CallDesk, CallResult, CallStatus, result_message};
pub use self::config::McpConfig;
use self::config::{ServerConfig, TransportConfig};
pub use self::connection::{ServerTool, parse_tools};
use self::owned::{OwnedServer, OwnedServers, OwnedState, ServerNews};
use self::permission::Permissions;
pub use self::permission::{AllowedTool, CallConsent};
pub use self::result::parse_result;
pub use self::shared::SharedToolServers;
use super::error::{CommandError, Kind};
use super::terminal::Terminal;
use crate::cli::terminal::report::{counted, on_one_line};

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

/// The servers of a chat or a run.
pub struct ToolServers {
    servers: OwnedServers,
    permissions: Permissions,
    timeout: Duration,
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
        Ok(Some(Self {
            servers: OwnedServers::begin(&args.servers, terminal, None)?,
            permissions: Permissions::new(args.allow_tool.clone()),
            timeout: args.servers.timeout(),
        }))
    }

    /// Waits until each server has started or failed. Returns a message for each failure.
    pub fn wait(&self, terminal: &Terminal) -> Vec<String> {
        self.servers.all.iter().filter_map(|server| self.failure(server, terminal)).collect()
    }

    /// Waits until a server has started. Returns a message if it does not.
    fn failure(&self, server: &OwnedServer, terminal: &Terminal) -> Option<String> {
        let name = &server.config.name;
        terminal.status(&format!("starting MCP server {name}"));
        let started = self.servers.wait(server);
        terminal.status("");
        started.err().map(|loss| format!("MCP server {name}: {loss}"))
    }

    /// Warns of permissions that name no tool of these servers.
    pub fn check_permissions(&self, terminal: &Terminal) {
        for allowed in self.permissions.without_use(&self.tools()) {
            terminal.warn(format!("--allow-tool {allowed}: no MCP server has such a tool"));
        }
    }

    /// Returns the tools of all servers that run, with the servers' names.
    fn tools(&self) -> Vec<(&str, ServerTool)> {
        let mut tools = Vec::new();
        for server in &self.servers.all {
            let name = server.config.name.as_str();
            tools.extend(server.tools().iter().map(|tool| (name, tool.clone())));
        }
        tools
    }

    /// Returns the tools as templates and APIs have them.
    pub fn definitions(&self) -> Vec<Value> {
        self.tools().iter().map(|(_, tool)| tool.definition()).collect()
    }

    /// Returns whether a name is one of a server's tool, or was.
    pub fn has(&self, offered: &str) -> bool {
        names::server_of(offered).is_some_and(|server| self.names().contains(&server))
    }

    /// Returns the names of all servers.
    pub fn names(&self) -> Vec<&str> {
        self.servers.all.iter().map(|server| server.config.name.as_str()).collect()
    }

    /// Describes the servers in a few words: `2 MCP servers, 9 tools`.
    pub fn spoken(&self) -> String {
        let is_running = |server: &&Arc<OwnedServer>| matches!(server.state(), OwnedState::Running { .. });
        let num_running = self.servers.all.iter().filter(is_running).count();
        format!("{}, {}", counted(num_running, "MCP server"), counted(self.tools().len(), "tool"))
    }

    /// Returns servers and tools, one a line.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let mut rows = Vec::new();
        for server in &self.servers.all {
            let config = &server.config;
            let (state, own_name) = match server.state() {
                OwnedState::Starting => ("starting".to_owned(), String::new()),
                OwnedState::Running { about, tools, .. } => {
                    (format!("running, {}", counted(tools.len(), "tool")), about)
                }
                OwnedState::Down(loss) => {
                    (format!("down: {}", loss.why.lines().next().unwrap_or_default()), String::new())
                }
            };
            let place = match &config.transport {
                _ if !own_name.is_empty() => own_name,
                TransportConfig::Process(process) => process.command.display().to_string(),
                TransportConfig::Http(_) => "http".to_owned(),
            };
            rows.push(vec![config.name.clone(), state, place]);
            rows.extend(server.tools().iter().map(|tool| self.row(&config.name, tool)));
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
        for server in &self.servers.all {
            let looked = server.look(None).map(|looked| self.servers.runtime.block_on(looked));
            let Some(Ok(Some(ServerNews { text, has_new_tools }))) = looked else { continue };
            if has_new_tools {
                self.permissions.forget(&server.config.name);
            }
            news.push(text);
        }
        news
    }

    /// Ends a server and starts it anew. What the user allowed in this chat for its tools is asked again.
    ///
    /// # Errors
    /// There is no such server, or why it does not start.
    pub fn restart(&mut self, name: &str, terminal: &Terminal) -> Result<(), CommandError> {
        let Some(at) = self.names().iter().position(|one| *one == name) else {
            let error = CommandError::usage(format!("there is no MCP server {name}"));
            return Err(error.hint(format!("there are: {}", self.names().join(", "))));
        };
        self.servers.restart(at);
        self.permissions.forget(name);
        match self.failure(&self.servers.all[at], terminal) {
            None => Ok(()),
            Some(failure) => Err(Kind::Unavailable.error(failure)),
        }
    }
}
