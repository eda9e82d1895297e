//! `/v1/mcp`: the MCP servers of the server, their tools, and calls of them.
//!
//! Invariants: no page of another origin lists or calls a tool, whatever `--cors-origin` says; a call is made
//! for a JSON body alone, which a browser sends across origins only after a preflight request, which this
//! server never answers; a client that leaves ends its call.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRef, FromRequestParts, Path, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde_json::{Map, Value, json};

use super::body::JsonBody;
use crate::App;
use crate::error::ApiError;
use crate::gate::policy::check_own_origin;
use crate::tools::{CallRefusal, HostedServer, HostedTool, HostedTools, ServerCondition, ToolHost};
use crate::wire::Problems;

/// Retry-After where too many calls are under way.
const BUSY_WAIT: Duration = Duration::from_secs(1);

/// The tools of a server, if it has any.
#[derive(Clone)]
pub struct ServedTools {
    pub host: Option<Arc<dyn ToolHost>>,
    /// Unknown fields are ignored.
    pub lenient: bool,
}

impl FromRef<App> for ServedTools {
    fn from_ref(app: &App) -> Self {
        Self { host: app.shared().tools().cloned(), lenient: app.settings().lenient }
    }
}

/// A request that no page of another origin has sent.
pub struct FromOwnPage;

impl<S: Sync> FromRequestParts<S> for FromOwnPage {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        check_own_origin(&parts.uri, &parts.headers).map(|()| Self)
    }
}

/// `GET /v1/mcp`. Both lists are empty without MCP servers.
pub async fn list(State(served): State<ServedTools>, _: FromOwnPage) -> Json<Value> {
    let HostedTools { servers, tools } = match &served.host {
        Some(host) => host.list().await,
        None => HostedTools::default(),
    };
    let servers: Vec<Value> = servers.iter().map(server_json).collect();
    let tools: Vec<Value> = tools.iter().map(tool_json).collect();
    Json(json!({"servers": servers, "tools": tools}))
}

fn server_json(HostedServer { name, condition }: &HostedServer) -> Value {
    let (state, about, reason) = match condition {
        ServerCondition::Starting => ("starting", None, None),
        ServerCondition::Running(about) => ("running", Some(about).filter(|about| !about.is_empty()), None),
        ServerCondition::Down(reason) => ("down", None, Some(reason)),
    };
    json!({"name": name, "state": state, "about": about, "reason": reason})
}

fn tool_json(tool: &HostedTool) -> Value {
    let HostedTool { name, server, tool, description, parameters } = tool;
    json!({"name": name, "server": server, "tool": tool, "description": description, "parameters": parameters})
}

/// `POST /v1/mcp/tools/{name}`: calls a tool with `{"arguments": {...}}`.
pub async fn call(
    State(served): State<ServedTools>,
    _: FromOwnPage,
    name: Result<Path<String>, PathRejection>,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let Path(name) = name.map_err(|error| ApiError::invalid("name", error.to_string()))?;
    let arguments = call_body(&served, body)?;
    let Some(host) = served.host else {
        return Err(unknown("there are no MCP servers (serve --mcp-config FILE names some)"));
    };
    let outcome = host.call(&name, arguments).await.map_err(refused)?;
    Ok(Json(json!({"status": outcome.status, "text": outcome.text})))
}

/// Reads the arguments of a call.
///
/// # Errors
/// 422 with every field that is missing, unknown or of another type.
pub fn call_body(served: &ServedTools, body: Map<String, Value>) -> Result<Map<String, Value>, ApiError> {
    let (arguments, _) = Problems::new(served.lenient).read(body, |fields| {
        fields.require("arguments");
        fields.object("arguments").unwrap_or_default()
    })?;
    Ok(arguments)
}

fn unknown(message: &str) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, Some("tool_not_found"), message).param("name")
}

fn refused(refusal: CallRefusal) -> ApiError {
    match refusal {
        CallRefusal::Unknown(message) => unknown(&message),
        CallRefusal::Busy(most) => {
            let message = format!("{most} calls are under way already");
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, Some("queue_full"), message).retry_after(BUSY_WAIT)
        }
        CallRefusal::Ending => ApiError::shutting_down("the server is shutting down"),
    }
}
