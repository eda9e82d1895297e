//! The MCP servers of `serve`: several clients list their tools and call them at the same time.
//!
//! Invariants: every wait for a server's task has a limit; a call ends with the future that waits for it, and no later than its
//! server.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::McpServerArgs;
use super::call::{CallResult, CallStatus};
use super::connection::ServerTool;
use super::owned::{LOOK_TIMEOUT, OwnedServer, OwnedServers, OwnedState, find};
use crate::cli::error::CommandError;
use crate::cli::terminal::Terminal;
use llmctl_serve::tools::{
    CallRefusal, HostWork, HostedServer, HostedTool, HostedTools, ServerCondition, ToolHost, ToolOutcome,
};

/// Most calls at the same time, of all clients.
const MAX_CALLS: usize = 64;

/// The owner of the servers. Dropped outside of tasks, because it waits.
pub struct SharedToolServers {
    desk: Arc<SharedDesk>,
    servers: OwnedServers,
}

/// The part of the servers that requests share.
struct SharedDesk {
    servers: Vec<Arc<OwnedServer>>,
    places: Arc<Semaphore>,
    timeout: Duration,
    handle: Handle,
}

impl SharedToolServers {
    /// Reads the configuration and begins to start its servers; `None` without one. A server that fails is reported on `terminal`.
    ///
    /// # Errors
    /// A configuration that cannot be used.
    pub fn begin(args: &McpServerArgs, terminal: &Terminal) -> Result<Option<Self>, CommandError> {
        if args.mcp_config.is_empty() {
            return Ok(None);
        }
        let servers = OwnedServers::begin(args, terminal, Some(terminal.clone()))?;
        let desk = Arc::new(SharedDesk {
            servers: servers.all.clone(),
            places: Arc::new(Semaphore::new(MAX_CALLS)),
            timeout: args.timeout(),
            handle: servers.runtime.handle().clone(),
        });
        Ok(Some(Self { desk, servers }))
    }

    /// Returns what clients list and call the tools with. It outlives the servers, whose tools are gone then.
    pub fn host(&self) -> Arc<dyn ToolHost> {
        Arc::<SharedDesk>::clone(&self.desk)
    }

    /// Ends calls under way, and begins to end the servers.
    pub fn stop(&self) {
        self.servers.all.iter().for_each(|server| server.stop());
    }
}

impl ToolHost for SharedDesk {
    fn list(&self) -> HostWork<HostedTools> {
        let servers = self.servers.clone();
        Box::pin(async move {
            let looked: Vec<_> = servers.iter().filter_map(|server| server.look(None)).collect();
            let all = async {
                for looked in looked {
                    let _ = looked.await; // the owner task has looked, or has ended
                }
            };
            let _ = timeout(LOOK_TIMEOUT, all).await; // what is known until then is told
            listed(&servers)
        })
    }

    fn call(&self, name: &str, arguments: Map<String, Value>) -> HostWork<Result<ToolOutcome, CallRefusal>> {
        let made = self.begin_call(name, arguments);
        Box::pin(async move {
            // Held while a caller waits.
            let (_waiting, made) = made?;
            made.await.unwrap_or(Err(CallRefusal::Ending))
        })
    }
}

type CallTask = JoinHandle<Result<ToolOutcome, CallRefusal>>;

impl SharedDesk {
    /// Begins a call. It ends early when the sender is dropped.
    fn begin_call(
        &self,
        offered: &str,
        arguments: Map<String, Value>,
    ) -> Result<(oneshot::Sender<()>, CallTask), CallRefusal> {
        let found = find(&self.servers, offered).map_err(CallRefusal::Unknown);
        let (server, tool, calls) = found?;
        let place = Arc::clone(&self.places).try_acquire_owned();
        let place = place.map_err(|_| CallRefusal::Busy(MAX_CALLS))?;
        let (waiting, gone) = oneshot::channel::<()>();
        let limit = self.timeout;
        let task = self.handle.spawn(async move {
            let _place = place;
            let stopped = async {
                tokio::select! {
                    _ = gone => {}
                    () = server.until_end() => {}
                }
            };
            let made = server.call(&calls, &tool.name, arguments, limit, stopped).await;
            let CallResult { status, text, .. } = CallResult::of(&made, &server.config.name, limit);
            // The call and its server are ended at the same moment: either may be first.
            let is_ended = status != CallStatus::Done && server.is_ending();
            match status == CallStatus::Stopped || is_ended {
                true => Err(CallRefusal::Ending),
                false => Ok(ToolOutcome { status: status.word(), text }),
            }
        });
        Ok((waiting, task))
    }
}

fn listed(servers: &[Arc<OwnedServer>]) -> HostedTools {
    let mut listed = HostedTools::default();
    for server in servers {
        let name = &server.config.name;
        let condition = match server.state() {
            OwnedState::Starting => ServerCondition::Starting,
            OwnedState::Down(loss) => ServerCondition::Down(loss.brief(&server.config)),
            OwnedState::Running { about, tools, .. } => {
                listed.tools.extend(tools.iter().map(|tool| hosted(name, tool)));
                ServerCondition::Running(about)
            }
        };
        listed.servers.push(HostedServer { name: name.clone(), condition });
    }
    listed
}

fn hosted(server: &str, tool: &ServerTool) -> HostedTool {
    let mut definition = tool.definition();
    HostedTool {
        name: tool.offered.clone(),
        server: server.to_owned(),
        tool: tool.name.clone(),
        description: tool.description.clone(),
        parameters: definition["function"]["parameters"].take(),
    }
}
