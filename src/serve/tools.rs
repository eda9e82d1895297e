//! Tools that the server calls for its clients: those of MCP servers.
//!
//! Invariants: a call is made because a request asks for it, so a client that is let in may call; nothing
//! here knows what the model wants. Lists and outcomes name no place on this machine.

use std::pin::Pin;

use serde_json::{Map, Value};

/// Work of a host, which ends early when it is dropped.
pub type HostWork<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The servers of the tools. Any number of requests use them at the same time.
pub trait ToolHost: Send + Sync {
    /// Returns all servers and tools as they are now.
    fn list(&self) -> HostWork<HostedTools>;

    /// Calls a tool by the name that models get. Dropping the work tells the tool's server that the caller
    /// has left.
    fn call(&self, name: &str, arguments: Map<String, Value>) -> HostWork<Result<ToolOutcome, CallRefusal>>;
}

/// Servers and tools at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HostedTools {
    pub servers: Vec<HostedServer>,
    /// Those of the servers that run, in the servers' order.
    pub tools: Vec<HostedTool>,
}

/// A server.
#[derive(Debug, Clone, PartialEq)]
pub struct HostedServer {
    /// The beginning of its tools' names.
    pub name: String,
    pub condition: ServerCondition,
}

/// State of a server.
#[derive(Debug, Clone, PartialEq)]
pub enum ServerCondition {
    Starting,
    /// It takes calls; with its own name and version, which may be empty.
    Running(String),
    /// It takes none any more, and why.
    Down(String),
}

/// A tool of a server.
#[derive(Debug, Clone, PartialEq)]
pub struct HostedTool {
    /// The name that models get: `SERVER__TOOL`.
    pub name: String,
    pub server: String,
    /// The server's own name of it.
    pub tool: String,
    pub description: String,
    /// JSON Schema of the arguments.
    pub parameters: Value,
}

/// The end of a call that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolOutcome {
    /// `done` or `failed`.
    pub status: &'static str,
    /// Text of the result for the model, at most 64 KiB.
    pub text: String,
}

/// Why a call was not made, or has no end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallRefusal {
    /// There is no such tool now, in words.
    Unknown(String),
    /// So many calls are under way already.
    Busy(usize),
    /// The server is about to end.
    Ending,
}
