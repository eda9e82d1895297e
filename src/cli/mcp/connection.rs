//! One server: started or reached, asked for its tools, called, ended.
//!
//! Invariants: nothing of a server is waited for without a limit; a server that fails is reported with its
//! last words.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rmcp::ClientHandler;
use rmcp::model::{
    CallToolRequest, CallToolRequestParams, CallToolResult, ClientCapabilities, ClientConfig, ClientRequest,
    Implementation, JsonObject, ListToolsRequest, ListToolsResult, PaginatedRequestParams, ServerResult,
    Tool,
};
use rmcp::service::{
    ClientInitializeError, NotificationContext, Peer, PeerRequestOptions, RequestHandle, RoleClient,
    RunningService, ServiceError, ServiceExt,
};
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::transport::streamable_http_client::StreamableHttpError;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::config::{ProcessConfig, ServerConfig, TransportConfig};
use super::http::McpHttp;
use super::names::offered_names;
use super::process::ServerProcess;
use super::result::{ResultText, text_of};
use llmctl_engine::http_engine::{HttpFailure, TlsTrust};

/// Time that a server has to start and to list its tools, or to list them again.
pub const START_TIMEOUT: Duration = Duration::from_secs(15);

/// Time that a connection has to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Time after the end of a server's output in which its exit status is known.
const STATUS_TIMEOUT: Duration = Duration::from_millis(500);

/// The reason of a loss that the other side does not explain.
const CONNECTION_ENDED: &str = "the connection has ended";

/// Most tools of one server. Their descriptions are part of each prompt.
const MAX_TOOLS: usize = 512;

/// Most pages of a list of tools that hold none.
const MAX_EMPTY: usize = 8;

/// A tool of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTool {
    /// The name that models get.
    pub offered: String,
    /// The server's own name of it.
    pub name: String,
    pub description: String,
    /// JSON Schema of the arguments.
    pub parameters: Value,
}

impl ServerTool {
    /// Returns the tool as templates and APIs have it.
    pub fn definition(&self) -> Value {
        let mut parameters = self.parameters.clone();
        if let Value::Object(members) = &mut parameters {
            members.entry("type").or_insert_with(|| "object".into());
            members.entry("properties").or_insert_with(|| json!({}));
        }
        let (name, description) = (&self.offered, &self.description);
        json!({"type": "function", "function": {"name": name, "description": description, "parameters": parameters}})
    }
}

/// Reason why a call has no result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallFailure {
    Timeout,
    /// The user stopped it.
    Stopped,
    /// The server refuses the call, or the call does not reach it; the connection stays.
    Refused(String),
    /// The server has ended or cannot be reached.
    Lost(ServerLoss),
}

/// Why a server has ended, cannot be reached, or did not start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerLoss {
    pub why: String,
    /// The last lines of its standard error, for its user alone; empty without any.
    last_words: String,
}

impl ServerLoss {
    /// A loss of which its process says nothing.
    pub fn new(why: impl Into<String>) -> Self {
        Self { why: why.into(), last_words: String::new() }
    }

    /// Asks a process that has ended, or may end just now, for its status, which is the reason then, and its last words.
    async fn of_process(why: impl Into<String>, process: Option<&mut ServerProcess>) -> Self {
        let Some(process) = process else { return Self::new(why) };
        let ended = async {
            loop {
                match process.exited() {
                    Some(status) => return format!("it has ended ({status})"),
                    None => sleep(Duration::from_millis(10)).await,
                }
            }
        };
        let why = timeout(STATUS_TIMEOUT, ended).await.unwrap_or(why.into());
        Self { why, last_words: process.last_words().await }
    }

    /// Returns the reason for people other than the server's user: without the folder of its command.
    pub fn brief(&self, config: &ServerConfig) -> String {
        let TransportConfig::Process(process) = &config.transport else { return self.why.clone() };
        let name = process.command.file_name().unwrap_or_default().to_string_lossy();
        self.why.replace(&process.command.display().to_string(), &name)
    }
}

impl fmt::Display for ServerLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let before_words = if self.last_words.is_empty() { "" } else { "; its last lines:\n" };
        write!(f, "{}{before_words}{}", self.why, self.last_words)
    }
}

/// llmctl's side of a connection. It offers a server nothing: no sampling, no files, no questions to the user.
#[derive(Clone, Default)]
struct McpClient {
    /// The server has said that its tools have changed.
    has_new_tools: Arc<AtomicBool>,
}

impl ClientHandler for McpClient {
    fn get_info(&self) -> ClientConfig {
        let own = Implementation::new("llmctl", env!("CARGO_PKG_VERSION"));
        ClientConfig::new(ClientCapabilities::default(), own)
    }

    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.has_new_tools.store(true, Ordering::SeqCst);
    }
}

impl McpClient {
    /// Starts a server's process.
    async fn start(
        self,
        config: &ProcessConfig,
        deadline: Instant,
    ) -> Result<(McpService, Option<ServerProcess>), ServerLoss> {
        let failed = |error| ServerLoss::new(format!("cannot start {} ({error})", config.command.display()));
        let (mut process, stdout, stdin) = ServerProcess::start(config).map_err(failed)?;
        let serving = self.serve(AsyncRwTransport::new_client(stdout, stdin));
        let why = match timeout_at(deadline, serving).await {
            Ok(Ok(service)) => return Ok((service, Some(process))),
            Ok(Err(error)) => explained(&error),
            Err(_) => late(),
        };
        let loss = ServerLoss::of_process(why, Some(&mut process)).await;
        process.end().await;
        Err(loss)
    }
}

type McpService = RunningService<RoleClient, McpClient>;

/// A connected server.
pub struct ServerConnection {
    service: McpService,
    /// `None` for a server that is reached with HTTP.
    process: Option<ServerProcess>,
    has_new_tools: Arc<AtomicBool>,
    pub tools: Vec<ServerTool>,
    /// The server's own name and version, and what is wrong with its list of tools.
    pub about: String,
}

impl ServerConnection {
    /// Starts or reaches a server and lists its tools.
    ///
    /// # Errors
    /// Why there is no connection.
    pub async fn open(config: ServerConfig, trust: TlsTrust) -> Result<Self, ServerLoss> {
        let client = McpClient::default();
        let has_new_tools = Arc::clone(&client.has_new_tools);
        let deadline = Instant::now() + START_TIMEOUT;
        let (service, process) = match &config.transport {
            TransportConfig::Process(process) => client.start(process, deadline).await?,
            TransportConfig::Http(http) => {
                let transport = McpHttp::transport(http, trust).map_err(ServerLoss::new)?;
                let serving = timeout_at(deadline, client.serve(transport)).await;
                let service =
                    serving.map_err(|_| late()).and_then(|served| served.map_err(|error| explained(&error)));
                (service.map_err(ServerLoss::new)?, None)
            }
        };
        let mut connection =
            Self { service, process, has_new_tools, tools: Vec::new(), about: String::new() };
        match timeout_at(deadline, connection.list(&config)).await.unwrap_or_else(|_| Err(late())) {
            Ok(tools) => {
                connection.tools = tools;
                Ok(connection)
            }
            Err(why) => {
                let process = connection.process.as_mut();
                let loss = ServerLoss::of_process(format!("its tools: {why}"), process).await;
                connection.end().await;
                Err(loss)
            }
        }
    }

    fn about_server(&self) -> String {
        let info = self.service.peer_info();
        let own = info.as_ref().and_then(|info| info.server_info.as_ref());
        own.map_or(String::new(), |own| format!("{} {}", own.name, own.version).trim().to_owned())
    }

    /// Returns the server's tools without those that the user disabled; none if it says that it has none.
    async fn list(&mut self, config: &ServerConfig) -> Result<Vec<ServerTool>, String> {
        self.about = self.about_server();
        let has_tools = self.service.peer_info().is_some_and(|info| info.capabilities.tools.is_some());
        if !has_tools {
            return Ok(Vec::new());
        }
        let (mut tools, mut cursors, mut num_empty) = (Vec::new(), Vec::<String>::new(), 0);
        loop {
            let page = self.page(cursors.last().cloned()).await?;
            num_empty += usize::from(page.tools.is_empty());
            tools.extend(page.tools);
            if tools.len() > MAX_TOOLS {
                return Err(format!("it has more than {MAX_TOOLS}"));
            }
            match page.next_cursor {
                None => break,
                Some(next) if next.is_empty() => break,
                Some(next) if !cursors.contains(&next) && num_empty <= MAX_EMPTY => cursors.push(next),
                Some(_) => break self.about.push_str("; its list of tools has no end"),
            }
        }
        Ok(offered(tools, &config.name, &config.disabled_tools))
    }

    /// Returns a page of the list of tools.
    async fn page(&self, cursor: Option<String>) -> Result<ListToolsResult, String> {
        let params = cursor.map(|cursor| PaginatedRequestParams::default().with_cursor(Some(cursor)));
        let request = ListToolsRequest { params, ..ListToolsRequest::default() };
        let answer = self.service.send_request(ClientRequest::ListToolsRequest(request)).await;
        match answer.map_err(|error| error.to_string())? {
            ServerResult::ListToolsResult(page) => Ok(page),
            other => page_of(serde_json::to_value(other).unwrap_or_default()),
        }
    }

    /// Lists the tools again if the server has said that they changed. Returns whether they have.
    ///
    /// # Errors
    /// Why they cannot be listed; the earlier list stays.
    pub async fn renew_tools(&mut self, config: &ServerConfig) -> Result<bool, String> {
        if !self.has_new_tools.swap(false, Ordering::SeqCst) {
            return Ok(false);
        }
        let tools = timeout(START_TIMEOUT, self.list(config)).await.unwrap_or_else(|_| Err(late()))?;
        let before = std::mem::replace(&mut self.tools, tools);
        Ok(before != self.tools)
    }

    /// Returns what makes calls, beside others.
    pub fn calls(&self) -> ServerCalls {
        ServerCalls { peer: self.service.peer().clone(), is_process: self.process.is_some() }
    }

    /// Returns why the server has ended, if it has, or a call says so.
    pub async fn lost(&mut self, called: Option<ServerLoss>) -> Option<ServerLoss> {
        let is_closed = self.service.is_closed() || self.service.peer().is_transport_closed();
        let has_exited = self.process.as_mut().is_some_and(|process| process.exited().is_some());
        let why = match called {
            Some(loss) => loss.why,
            None if is_closed || has_exited => CONNECTION_ENDED.to_owned(),
            None => return None,
        };
        Some(ServerLoss::of_process(why, self.process.as_mut()).await)
    }

    /// Ends the connection and the server's process.
    pub async fn end(self) {
        let Self { mut service, process, .. } = self;
        let _ = service.close_with_timeout(CLOSE_TIMEOUT).await; // its process is ended below all the same
        drop(service);
        if let Some(process) = process {
            process.end().await;
        }
    }
}

/// Reads a page of a list of tools. A tool without a schema has no parameters.
fn page_of(mut listed: Value) -> Result<ListToolsResult, String> {
    let tools = listed.get_mut("tools").and_then(Value::as_array_mut);
    for tool in tools.into_iter().flatten().filter_map(Value::as_object_mut) {
        tool.entry("inputSchema").or_insert_with(|| json!({"type": "object"}));
    }
    serde_json::from_value(listed).map_err(|error| format!("its answer is no list ({error})"))
}

/// Returns the tools of a server of this name as models get them; of several of one name the first, and none that is disabled.
fn offered(mut tools: Vec<Tool>, server: &str, disabled: &[String]) -> Vec<ServerTool> {
    let mut names = HashSet::new();
    tools.retain(|tool| names.insert(tool.name.clone()));
    tools.retain(|tool| !disabled.iter().any(|name| *name == tool.name));
    let offered = offered_names(server, tools.iter().map(|tool| &*tool.name));
    let described = |(tool, offered): (Tool, String)| ServerTool {
        offered,
        description: tool.description.or(tool.title.map(Into::into)).unwrap_or_default().into_owned(),
        parameters: Value::Object((*tool.input_schema).clone()),
        name: tool.name.into_owned(),
    };
    tools.into_iter().zip(offered).map(described).collect()
}

/// Reads a list of tools in JSON, as models get those of a server of this name.
///
/// # Errors
/// The fault, if the answer holds no list.
pub fn parse_tools(server: &str, json: &[u8]) -> Result<Vec<ServerTool>, String> {
    let listed = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    Ok(offered(page_of(listed)?.tools, server, &[]))
}

/// Makes the calls of a server's tools, any number at the same time.
#[derive(Clone)]
pub struct ServerCalls {
    peer: Peer<RoleClient>,
    /// Its messages are one stream, whose end is the server's.
    is_process: bool,
}

impl ServerCalls {
    /// Calls a tool. The server is told when the caller has left.
    ///
    /// # Errors
    /// [`CallFailure`].
    pub async fn call(
        &self,
        tool: &str,
        arguments: JsonObject,
        limit: Duration,
        stopped: impl Future<Output = ()>,
    ) -> Result<ResultText, CallFailure> {
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        let request = ClientRequest::CallToolRequest(CallToolRequest::new(params));
        let sent =
            timeout(limit, self.peer.send_cancellable_request(request, PeerRequestOptions::no_options()));
        let answered = match sent.await {
            Err(_) => return Err(CallFailure::Timeout),
            Ok(Err(error)) => Err(error),
            Ok(Ok(handle)) => answer_to(handle, limit, stopped).await?,
        };
        match answered {
            Ok(ServerResult::CallToolResult(result)) => Ok(text_of(&result)),
            Ok(ServerResult::EmptyResult(_)) => Ok(text_of(&CallToolResult::success(Vec::new()))),
            Ok(ServerResult::InputRequiredResult(_)) => {
                Err(CallFailure::Refused("it asks for more input, which llmctl does not give".to_owned()))
            }
            Ok(_) => Err(CallFailure::Refused("its answer is no result of a call".to_owned())),
            Err(error) => Err(self.failure(error)),
        }
    }

    fn failure(&self, error: ServiceError) -> CallFailure {
        match error {
            ServiceError::McpError(error) => CallFailure::Refused(error.message.into_owned()),
            // Each message is a request of its own: the next one may succeed.
            ServiceError::TransportSend(error) if !self.is_process => {
                CallFailure::Refused(words_of(&*error.error))
            }
            ServiceError::TransportSend(error) => CallFailure::Lost(ServerLoss::new(words_of(&*error.error))),
            ServiceError::TransportClosed => CallFailure::Lost(ServerLoss::new(CONNECTION_ENDED)),
            other => CallFailure::Lost(ServerLoss::new(other.to_string())),
        }
    }
}

/// Waits for the answer to a request.
async fn answer_to(
    mut handle: RequestHandle<RoleClient>,
    limit: Duration,
    stopped: impl Future<Output = ()>,
) -> Result<Result<ServerResult, ServiceError>, CallFailure> {
    let failure = tokio::select! {
        answer = &mut handle.rx => return Ok(answer.unwrap_or(Err(ServiceError::TransportClosed))),
        () = sleep(limit) => CallFailure::Timeout,
        () = stopped => CallFailure::Stopped,
    };
    let reason = if failure == CallFailure::Timeout { "timeout" } else { "stopped by the user" };
    let _ = timeout(CLOSE_TIMEOUT, handle.cancel(Some(reason.to_owned()))).await; // it may be stuck
    Err(failure)
}

fn late() -> String {
    format!("no answer within {} s", START_TIMEOUT.as_secs())
}

/// Returns an error of the beginning of a connection in few words.
fn explained(error: &ClientInitializeError) -> String {
    match error {
        ClientInitializeError::JsonRpcError(error) => format!("it refuses: {}", error.message),
        ClientInitializeError::ConnectionClosed(_) => "the connection ended before it began".to_owned(),
        ClientInitializeError::TransportError { error, .. } => words_of(&*error.error),
        other => other.to_string(),
    }
}

/// Returns an error of a transport in few words.
fn words_of(error: &(dyn std::error::Error + Send + Sync + 'static)) -> String {
    match error.downcast_ref::<StreamableHttpError<HttpFailure>>() {
        Some(StreamableHttpError::Client(failure)) => failure.to_string(),
        _ => error.to_string(),
    }
}
