//! The servers of a process, each with a task that owns it: it starts the connection, looks at it when asked, and ends it.
//!
//! Calls do not pass through the task and may run side by side. Invariants: a server's state has one writer, its task; what a look
//! finds is in the state before the one who asked is answered; all servers have ended when their owner is dropped.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use super::McpServerArgs;
use super::config::ServerConfig;
use super::connection::{CallFailure, ServerCalls, ServerConnection, ServerLoss, ServerTool};
use super::names::{DOWN, absence, server_of};
use super::result::ResultText;
use crate::cli::error::{CommandError, Kind};
use crate::cli::model::hub_access::ca_file;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::report::counted;
use llmctl_engine::http_engine::TlsTrust;

/// Longest wait for a task to look at its server, where others wait.
pub const LOOK_TIMEOUT: Duration = Duration::from_secs(1);

/// Most requests to look that wait for a task; further ones get the result of these.
const MAX_LOOKS: usize = 8;

/// The owner of the servers. Dropped outside of tasks, because it waits.
pub struct OwnedServers {
    pub all: Vec<Arc<OwnedServer>>,
    /// The terminal on which the tasks report what has become of a server; `None` if those who ask do.
    reports: Option<Terminal>,
    /// Runs the connections. Dropped last.
    pub runtime: Runtime,
}

impl OwnedServers {
    /// Reads the configuration and begins to start its servers.
    ///
    /// # Errors
    /// A configuration that cannot be used.
    pub fn begin(
        args: &McpServerArgs,
        terminal: &Terminal,
        reports: Option<Terminal>,
    ) -> Result<Self, CommandError> {
        let configs = args.configured(terminal)?;
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("mcp").enable_all().build();
        let runtime = runtime.map_err(|error| CommandError::new(Kind::Failure, error))?;
        let mut servers = Self { all: Vec::new(), reports, runtime };
        servers.all = configs.into_iter().map(|config| servers.start(config)).collect();
        Ok(servers)
    }

    fn start(&self, config: ServerConfig) -> Arc<OwnedServer> {
        let (looks, inbox) = mpsc::channel(MAX_LOOKS);
        let (state, ending) = (watch::Sender::new(OwnedState::Starting), watch::Sender::new(false));
        let server = Arc::new(OwnedServer { config, state, looks, ending });
        let task = ServerTask { server: Arc::clone(&server), inbox, reports: self.reports.clone() };
        self.runtime.spawn(task.run());
        server
    }

    /// Waits until the server has started.
    ///
    /// # Errors
    /// Why it did not.
    pub fn wait(&self, server: &OwnedServer) -> Result<(), ServerLoss> {
        let mut state = server.state.subscribe();
        self.runtime.block_on(async {
            tokio::select! {
                _ = state.wait_for(|state| !matches!(state, OwnedState::Starting)) => {}
                () = server.looks.closed() => {}
            }
        });
        match server.state() {
            OwnedState::Running { .. } => Ok(()),
            OwnedState::Down(loss) => Err(loss),
            OwnedState::Starting => Err(ServerLoss::new("its task has ended")),
        }
    }

    /// Ends a server and begins to start it anew.
    pub fn restart(&mut self, at: usize) {
        self.all[at].stop();
        self.runtime.block_on(self.all[at].looks.closed());
        self.all[at] = self.start(self.all[at].config.clone());
    }
}

/// Ends all servers at once.
impl Drop for OwnedServers {
    fn drop(&mut self) {
        self.all.iter().for_each(|server| server.stop());
        self.runtime.block_on(async {
            for server in &self.all {
                server.looks.closed().await; // each task has limits of its own
            }
        });
    }
}

/// One server.
pub struct OwnedServer {
    pub config: ServerConfig,
    state: watch::Sender<OwnedState>,
    /// Closed when the task has ended, and the server with it.
    looks: mpsc::Sender<LookRequest>,
    ending: watch::Sender<bool>,
}

#[derive(Clone)]
pub enum OwnedState {
    /// It has not answered yet.
    Starting,
    /// It takes calls.
    Running { about: String, tools: Arc<[ServerTool]>, calls: ServerCalls },
    /// It has ended or could not be started.
    Down(ServerLoss),
}

/// The result of one check of a server.
pub struct ServerNews {
    pub text: String,
    pub has_new_tools: bool,
}

/// Asks a task to look at its server.
struct LookRequest {
    /// Why a call has found the server lost.
    lost: Option<ServerLoss>,
    done: oneshot::Sender<Option<ServerNews>>,
}

impl OwnedServer {
    pub fn state(&self) -> OwnedState {
        self.state.borrow().clone()
    }

    /// Returns the tools of a server that runs.
    pub fn tools(&self) -> Arc<[ServerTool]> {
        match &*self.state.borrow() {
            OwnedState::Running { tools, .. } => Arc::clone(tools),
            _ => Arc::default(),
        }
    }

    /// Asks the task of a running server to look; `None` without one, or if enough ask already. The receiver ends when it has
    /// looked.
    pub fn look(&self, lost: Option<ServerLoss>) -> Option<oneshot::Receiver<Option<ServerNews>>> {
        if !matches!(*self.state.borrow(), OwnedState::Running { .. }) {
            return None;
        }
        let (done, looked) = oneshot::channel();
        self.looks.try_send(LookRequest { lost, done }).ok().map(|()| looked)
    }

    /// Calls a tool. A loss that the call finds is in the server's state afterwards, for the next one who lists the tools.
    ///
    /// # Errors
    /// [`CallFailure`], with the last words of a process that has ended.
    pub async fn call(
        &self,
        calls: &ServerCalls,
        tool: &str,
        arguments: Map<String, Value>,
        limit: Duration,
        stopped: impl Future<Output = ()>,
    ) -> Result<ResultText, CallFailure> {
        let made = calls.call(tool, arguments, limit, stopped).await;
        if let Err(CallFailure::Lost(loss)) = &made
            && let Some(looked) = self.look(Some(loss.clone()))
        {
            let _ = timeout(2 * LOOK_TIMEOUT, looked).await; // what the call has found is known all the same
            if let OwnedState::Down(loss) = self.state() {
                return Err(CallFailure::Lost(loss));
            }
        }
        made
    }

    /// Begins to end the server, and calls under way that look at [`Self::until_end`].
    pub fn stop(&self) {
        self.ending.send_replace(true);
    }

    /// Returns whether the server is to end.
    pub fn is_ending(&self) -> bool {
        *self.ending.borrow()
    }

    /// Ends when the server is to end.
    pub async fn until_end(&self) {
        let _ = self.ending.subscribe().wait_for(|is_ending| *is_ending).await; // its sender is here
    }
}

/// Returns an offered tool, its server, and what calls it.
///
/// # Errors
/// Why there is none, for the model.
pub fn find(
    servers: &[Arc<OwnedServer>],
    offered: &str,
) -> Result<(Arc<OwnedServer>, ServerTool, ServerCalls), String> {
    let name = server_of(offered);
    let server = servers.iter().find(|server| Some(server.config.name.as_str()) == name);
    let server = server.ok_or_else(|| absence(offered, None))?;
    match server.state() {
        OwnedState::Starting => Err(absence(offered, Some("is still starting"))),
        OwnedState::Down(_) => Err(absence(offered, Some(DOWN))),
        OwnedState::Running { tools, calls, .. } => {
            let tool = tools.iter().find(|tool| tool.offered == offered);
            let tool = tool.ok_or_else(|| absence(offered, None))?;
            Ok((Arc::clone(server), tool.clone(), calls))
        }
    }
}

/// The task that owns one server.
struct ServerTask {
    server: Arc<OwnedServer>,
    inbox: mpsc::Receiver<LookRequest>,
    reports: Option<Terminal>,
}

impl ServerTask {
    async fn run(mut self) {
        let server = Arc::clone(&self.server);
        let opening = ServerConnection::open(server.config.clone(), TlsTrust(ca_file()));
        let opened = tokio::select! {
            opened = opening => opened,
            () = server.until_end() => return, // what was started is dropped, which kills it
        };
        let mut connection = match opened {
            Ok(connection) => connection,
            Err(loss) => return drop(self.is_down(loss)),
        };
        self.is_running(&connection);
        tokio::select! {
            () = self.keep(&mut connection) => {}
            () = server.until_end() => {}
        }
        connection.end().await;
    }

    /// Looks at the server whenever asked, until it is lost.
    async fn keep(&mut self, connection: &mut ServerConnection) {
        while let Some(LookRequest { lost, done }) = self.inbox.recv().await {
            let lost = connection.lost(lost).await;
            let is_lost = lost.is_some();
            let news = match lost {
                Some(loss) => Some(self.is_down(loss)),
                None => self.renew_tools(connection).await,
            };
            let _ = done.send(news); // who asked may have left
            if is_lost {
                return;
            }
        }
    }

    async fn renew_tools(&self, connection: &mut ServerConnection) -> Option<ServerNews> {
        let name = &self.server.config.name;
        match connection.renew_tools(&self.server.config).await {
            Ok(false) => None,
            Ok(true) => {
                self.is_running(connection);
                let tools = counted(connection.tools.len(), "tool");
                Some(self.news(format!("MCP server {name} has changed its tools: {tools} now"), true))
            }
            Err(why) => Some(self.news(format!("MCP server {name}: its tools: {why}"), false)),
        }
    }

    fn is_running(&self, connection: &ServerConnection) {
        let (about, tools, calls) =
            (connection.about.clone(), connection.tools.clone().into(), connection.calls());
        self.server.state.send_replace(OwnedState::Running { about, tools, calls });
    }

    fn is_down(&self, loss: ServerLoss) -> ServerNews {
        let text = format!("MCP server {}: {loss}", self.server.config.name);
        self.server.state.send_replace(OwnedState::Down(loss));
        self.news(text, false)
    }

    fn news(&self, text: String, has_new_tools: bool) -> ServerNews {
        match &self.reports {
            Some(terminal) if has_new_tools => terminal.note(&text),
            Some(terminal) => terminal.warn(&text),
            None => {}
        }
        ServerNews { text, has_new_tools }
    }
}
