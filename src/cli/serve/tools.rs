//! The MCP servers of a server, and what is said at the start about who may call their tools.
//!
//! Consent to a call is asked for by the page, or is up to the program that calls. Invariant: they run only
//! where something writes text that could call them.

use super::ServeArgs;
use crate::cli::error::CommandError;
use crate::cli::mcp::SharedToolServers;
use crate::cli::terminal::Terminal;
use llmctl_serve::front::lifecycle::ServedModels;
use llmctl_serve::front::listen::{Address, Server};

/// `--mcp-config` of `serve`, whose clients ask for consent.
pub const MCP_CONFIG_HELP: &str = "\
Offer the model the tools of MCP servers: a JSON file with \"mcpServers\", as Claude Desktop, Cursor and VS Code write it

May be repeated. The page shows each call and runs it when you agree; programs call with POST /v1/mcp/tools/NAME. A folder's \
llmctl.toml cannot set it, because it starts programs. docs/mcp.md has the details.";

/// Begins to start the servers of `--mcp-config`; `None` without one.
///
/// # Errors
/// A configuration that cannot be used.
pub fn begin(
    args: &ServeArgs,
    server: &Server,
    terminal: &Terminal,
) -> Result<Option<SharedToolServers>, CommandError> {
    let tools = SharedToolServers::begin(&args.mcp, terminal)?;
    if tools.is_some() {
        let policy = server.lifecycle().policy();
        if policy.keys.is_empty() && matches!(server.address(), Address::Tcp(_)) {
            terminal.note(
                "every user and program of this machine can call the tools of the MCP servers: LLMCTL_API_KEY keeps others out",
            );
        }
        if !policy.page {
            terminal.note("--no-page: the tools of the MCP servers are for programs, which call without a question here");
        }
    }
    Ok(tools)
}

/// Ends the servers again where nothing writes text that could call their tools.
pub fn for_text(
    tools: Option<SharedToolServers>,
    served: &ServedModels,
    terminal: &Terminal,
) -> Option<SharedToolServers> {
    match served {
        ServedModels::Model(app) if tools.is_some() && !app.writes_text() => {
            terminal.note(format!(
                "no MCP servers: {} writes no text that could call their tools",
                app.model().id
            ));
            None
        }
        _ => tools,
    }
}
