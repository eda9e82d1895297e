//! The MCP servers of `serve`: several clients list their tools and call them at the same time.
//!
//! Each server has an owner task, which starts its connection, looks at it when asked, and ends it. Calls do
//! not pass through the owner task and run side by side. Invariants: a server's condition has one writer, its
//! owner task; every wait for an owner task has a limit; a call ends with the future that waits for it, and
//! no later than the servers; all servers have ended when the owner is dropped.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use serde_json::{Map, Value};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::call::{CallResult, CallStatus};
use super::config::ServerConfig;
use super::connection::{CallFailure, ServerCalls, ServerConnection, ServerLoss, ServerTool};
use super::names::{DOWN, absence, server_of};
use super::{McpServerArgs, runtime};
use crate::cli::error::CommandError;
use crate::cli::model::hub_access::ca_file;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::report::counted;
use llmctl_engine::http_engine::TlsTrust;
use llmctl_serve::tools::{
    CallRefusal, HostWork, HostedServer, HostedTool, HostedTools, ServerCondition, ToolHost, ToolOutcome,
};

/// Most calls at the same time, of all clients.
const MAX_CALLS: usize = 64;

/// Longest wait for owner tasks to look at their servers.
const LOOK_TIMEOUT: Duration = Duration::from_secs(1);

/// Most requests to look that wait for an owner task; further ones get the result of these.
const MAX_LOOKS: usize = 8;

/// The owner of the servers. Dropped outside of tasks, because it waits.
pub struct SharedToolServers {
    desk: Arc<SharedDesk>,
    tasks: Vec<JoinHandle<()>>,
    ending: watch::Sender<bool>,
    runtime: Runtime,
}

/// The part of the servers that requests share.
struct SharedDesk {
    servers: Vec<Arc<SharedServer>>,
    places: Arc<Semaphore>,
    timeout: Duration,
    ending: watch::Receiver<bool>,
    handle: Handle,
}

/// One server.
struct SharedServer {
    config: ServerConfig,
    state: RwLock<SharedServerState>,
    looks: mpsc::Sender<LookRequest>,
}

enum SharedServerState {
    Starting,
    Running {
        about: String,
        tools: Arc<[ServerTool]>,
        calls: ServerCalls,
    },
    /// In the words that clients may read.
    Down(String),
}

/// Asks an owner task to look at its server.
struct LookRequest {
    /// Why a call has found the server lost.
    lost: Option<ServerLoss>,
    /// Dropped when the owner task has looked.
    _done: oneshot::Sender<()>,
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
        let configs = args.configured(terminal)?;
        let (ending, is_ending) = watch::channel(false);
        let (trust, runtime) = (TlsTrust(ca_file()), runtime()?);
        let (mut servers, mut tasks) = (Vec::new(), Vec::new());
        for config in configs {
            let (looks, inbox) = mpsc::channel(MAX_LOOKS);
            let state = RwLock::new(SharedServerState::Starting);
            let server = Arc::new(SharedServer { config, state, looks });
            let task = ServerTask { server: Arc::clone(&server), inbox, terminal: terminal.clone() };
            tasks.push(runtime.spawn(task.run(trust.clone(), is_ending.clone())));
            servers.push(server);
        }
        let places = Arc::new(Semaphore::new(MAX_CALLS));
        let (timeout, handle) = (args.timeout(), runtime.handle().clone());
        let desk = Arc::new(SharedDesk { servers, places, timeout, ending: is_ending, handle });
        Ok(Some(Self { desk, tasks, ending, runtime }))
    }

    /// Returns what clients list and call the tools with. It outlives the servers, whose tools are gone then.
    pub fn host(&self) -> Arc<dyn ToolHost> {
        Arc::<SharedDesk>::clone(&self.desk)
    }

    /// Ends calls under way, and begins to end the servers.
    pub fn stop(&self) {
        self.ending.send_replace(true);
    }
}

/// Ends all servers at once.
impl Drop for SharedToolServers {
    fn drop(&mut self) {
        self.stop();
        let tasks = std::mem::take(&mut self.tasks);
        self.runtime.block_on(async {
            for task in tasks {
                let _ = task.await; // each has limits of its own
            }
        });
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
        let (server, tool, calls) = self.find(offered)?;
        let place = Arc::clone(&self.places).try_acquire_owned();
        let place = place.map_err(|_| CallRefusal::Busy(MAX_CALLS))?;
        let (waiting, gone) = oneshot::channel::<()>();
        let (limit, ending) = (self.timeout, self.ending.clone());
        let task = self.handle.spawn(async move {
            let _place = place;
            let stopped = async {
                tokio::select! {
                    _ = gone => {}
                    () = until_end(ending.clone()) => {}
                }
            };
            let made = calls.call(&tool, arguments, limit, stopped).await;
            if let Err(CallFailure::Lost(loss)) = &made
                && let Some(looked) = server.look(Some(loss.clone()))
            {
                let _ = timeout(LOOK_TIMEOUT, looked).await; // the next list should know
            }
            let CallResult { status, text, .. } = CallResult::of(&made, &server.config.name, limit);
            // The call and its server are ended at the same moment: either may be first.
            let is_ended = status != CallStatus::Done && *ending.borrow();
            match status == CallStatus::Stopped || is_ended {
                true => Err(CallRefusal::Ending),
                false => Ok(ToolOutcome { status: status.word(), text }),
            }
        });
        Ok((waiting, task))
    }

    /// Returns a tool's server, its own name there, and what calls it.
    fn find(&self, offered: &str) -> Result<(Arc<SharedServer>, String, ServerCalls), CallRefusal> {
        let refused = |state| CallRefusal::Unknown(absence(offered, state));
        let name = server_of(offered);
        let server = self.servers.iter().find(|server| Some(server.config.name.as_str()) == name);
        let server = server.ok_or_else(|| refused(None))?;
        match &*server.state.read() {
            SharedServerState::Starting => Err(refused(Some("is still starting"))),
            SharedServerState::Down(_) => Err(refused(Some(DOWN))),
            SharedServerState::Running { tools, calls, .. } => {
                let tool = tools.iter().find(|tool| tool.offered == offered);
                let tool = tool.ok_or_else(|| refused(None))?;
                Ok((Arc::clone(server), tool.name.clone(), calls.clone()))
            }
        }
    }
}

fn listed(servers: &[Arc<SharedServer>]) -> HostedTools {
    let mut listed = HostedTools::default();
    for server in servers {
        let name = &server.config.name;
        let condition = match &*server.state.read() {
            SharedServerState::Starting => ServerCondition::Starting,
            SharedServerState::Down(why) => ServerCondition::Down(why.clone()),
            SharedServerState::Running { about, tools, .. } => {
                listed.tools.extend(tools.iter().map(|tool| hosted(name, tool)));
                ServerCondition::Running(about.clone())
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

impl SharedServer {
    /// Asks the owner task of a running server to look; `None` without one, or if enough ask already. The
    /// receiver ends when it has looked.
    fn look(&self, lost: Option<ServerLoss>) -> Option<oneshot::Receiver<()>> {
        if !matches!(*self.state.read(), SharedServerState::Running { .. }) {
            return None;
        }
        let (done, looked) = oneshot::channel();
        self.looks.try_send(LookRequest { lost, _done: done }).ok().map(|()| looked)
    }
}

/// Ends when the servers are to end.
async fn until_end(mut ending: watch::Receiver<bool>) {
    let _ = ending.wait_for(|is_ending| *is_ending).await; // an owner that is gone ends them as well
}

/// The task that owns one server.
struct ServerTask {
    server: Arc<SharedServer>,
    inbox: mpsc::Receiver<LookRequest>,
    terminal: Terminal,
}

impl ServerTask {
    async fn run(mut self, trust: TlsTrust, ending: watch::Receiver<bool>) {
        let opening = ServerConnection::open(self.server.config.clone(), trust);
        let opened = tokio::select! {
            opened = opening => opened,
            () = until_end(ending.clone()) => return, // what was started is dropped, which kills it
        };
        let mut connection = match opened {
            Ok(connection) => connection,
            Err(loss) => return self.is_down(&loss),
        };
        self.is_running(&connection);
        let lost = tokio::select! {
            loss = self.keep(&mut connection) => Some(loss),
            () = until_end(ending) => None,
        };
        if let Some(loss) = lost {
            self.is_down(&loss);
        }
        connection.end().await;
    }

    /// Looks at the server whenever asked. Returns why it is lost.
    async fn keep(&mut self, connection: &mut ServerConnection) -> ServerLoss {
        let name = self.server.config.name.clone();
        loop {
            let Some(look) = self.inbox.recv().await else { return ServerLoss::new("no client asks for it") };
            if let Some(loss) = connection.lost().await.or(look.lost) {
                return loss;
            }
            match connection.renew_tools(&self.server.config).await {
                Ok(false) => {}
                Ok(true) => {
                    self.is_running(connection);
                    let tools = counted(connection.tools.len(), "tool");
                    self.terminal.note(format!("MCP server {name} has changed its tools: {tools} now"));
                }
                Err(why) => self.terminal.warn(format!("MCP server {name}: its tools: {why}")),
            }
        }
    }

    fn is_running(&self, connection: &ServerConnection) {
        let (about, tools, calls) =
            (connection.about.clone(), connection.tools.clone().into(), connection.calls());
        *self.server.state.write() = SharedServerState::Running { about, tools, calls };
    }

    fn is_down(&self, loss: &ServerLoss) {
        let config = &self.server.config;
        *self.server.state.write() = SharedServerState::Down(loss.brief(config));
        self.terminal.warn(format!("MCP server {}: {loss}", config.name));
    }
}
