//! Ollama's `POST /api/pull`: a download into the cache of models, with its progress; and `DELETE /api/delete`.
//!
//! Invariant: nobody but this machine starts a download, and nobody erases a model, unless the server was started so that others
//! may. A download continues when its client leaves.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRef, FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::spawn_blocking;

use super::super::body::JsonBody;
use super::super::sse::{line, stream_response};
use super::models::name_of;
use super::models::read_name;
use crate::App;
use crate::downloads::{ModelDownloads, PullProgress};
use crate::error::ApiError;
use crate::gate::owner::Owner;
use crate::net::connection::ConnectionInfo;
use crate::wire::Problems;
use crate::wire::ollama::{error_body, is_same_name};

/// The downloads of a server, if it can.
#[derive(Clone)]
pub struct ServedDownloads {
    pub host: Option<Arc<dyn ModelDownloads>>,
    /// Unknown fields are ignored.
    pub lenient: bool,
    /// Names of the models that are served.
    pub names: Vec<String>,
}

impl FromRef<App> for ServedDownloads {
    fn from_ref(app: &App) -> Self {
        let names = app.settings().aliases.iter().chain([&app.model().id]).cloned().collect();
        Self { host: app.shared().downloads().cloned(), lenient: app.settings().lenient, names }
    }
}

/// Whether a request comes from this machine to a server without keys.
pub struct FromHere(bool);

impl<S: Sync> FromRequestParts<S> for FromHere {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let connection = parts.extensions.get::<ConnectionInfo>();
        let is_here = connection.is_some_and(|connection| {
            connection.address().is_none_or(|address| address.to_canonical().is_loopback())
        });
        // Behind a proxy of this machine everyone seems to be here.
        let is_forwarded =
            ["forwarded", "x-forwarded-for"].iter().any(|name| parts.headers.contains_key(*name));
        Ok(Self(is_here && !is_forwarded && parts.extensions.get() == Some(&Owner::anonymous())))
    }
}

/// Downloads a model. One that is served is there.
pub async fn pull(
    State(served): State<ServedDownloads>,
    FromHere(is_from_here): FromHere,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    let (name, is_streamed) = pull_body(&served, body)?;
    let (news, lines) = mpsc::unbounded_channel();
    if served.names.iter().any(|known| is_same_name(known, &name)) {
        let _ = news.send(Ok(json!({"status": "success"})));
        drop(news);
        return answer(lines, is_streamed).await;
    }
    let Some(host) = served.host.filter(|host| is_from_here || host.is_open()) else {
        let message = "downloads are for this machine, where the server has no keys; serve --allow-pull allows them to everyone who may send requests";
        return Err(ApiError::new(StatusCode::FORBIDDEN, Some("not_allowed"), message));
    };
    spawn_blocking(move || run(&*host, &name, &news));
    answer(lines, is_streamed).await
}

/// Erases a model that nothing needs.
pub async fn erase(
    State(served): State<ServedDownloads>,
    JsonBody(body): JsonBody,
) -> Result<StatusCode, ApiError> {
    let (_, name) = read_name(served.lenient, body)?;
    let Some(host) = served.host.filter(|host| host.may_erase()) else {
        let message = "models are erased by `llmctl models rm`; serve --allow-delete lets everyone who may send requests erase them";
        return Err(ApiError::new(StatusCode::FORBIDDEN, Some("not_allowed"), message));
    };
    let kept = |why: String| Err(ApiError::new(StatusCode::CONFLICT, Some("not_erased"), why).param("model"));
    if served.names.iter().any(|known| is_same_name(known, &name)) {
        return kept(format!("{name} is served"));
    }
    let asked = name.clone();
    match spawn_blocking(move || host.erase(&asked)).await {
        Ok(Ok(true)) => Ok(StatusCode::OK),
        Ok(Ok(false)) => Err(ApiError::new(
            StatusCode::NOT_FOUND,
            Some("model_not_found"),
            format!("{name} is not in the cache"),
        )
        .param("model")),
        Ok(Err(why)) => kept(why),
        Err(error) => Err(ApiError::internal(&error.to_string())),
    }
}

/// Reads a request for a download: the name, and whether progress is told.
///
/// # Errors
/// All that is wrong with the body, the first kind of it.
pub fn pull_body(served: &ServedDownloads, body: Map<String, Value>) -> Result<(String, bool), ApiError> {
    let (asked, _) = Problems::new(served.lenient).read(body, |fields| {
        let asked = (name_of(fields), fields.flag("stream").unwrap_or(true));
        ["insecure", "username", "password"].iter().for_each(|hint| fields.hint(hint));
        asked
    })?;
    Ok(asked)
}

type News = Result<Value, ApiError>;

/// Runs a download on this thread.
fn run(host: &dyn ModelDownloads, name: &str, news: &UnboundedSender<News>) {
    let tell = |told: News| drop(news.send(told)); // the client may have left
    tell(Ok(json!({"status": "pulling manifest"})));
    let progress = |PullProgress { digest, total, completed }: PullProgress| {
        let short: String = digest.chars().take(12).collect();
        tell(Ok(json!({
            "status": format!("pulling {short}"), "digest": format!("sha256:{digest}"), "total": total, "completed": completed,
        })));
    };
    match host.pull(name, &progress) {
        Ok(()) => {
            tell(Ok(
                json!({"status": format!("{name} is here; it is served once the server is started with --model {name}")}),
            ));
            tell(Ok(json!({"status": "success"})));
        }
        Err(why) => {
            tell(Err(ApiError::new(StatusCode::BAD_GATEWAY, Some("pull_failed"), why).param("model")))
        }
    }
}

/// Streams the news of a download, or waits for the last.
async fn answer(mut lines: UnboundedReceiver<News>, is_streamed: bool) -> Result<Response, ApiError> {
    if !is_streamed {
        let mut last = Err(ApiError::internal("the download ended early"));
        while let Some(news) = lines.recv().await {
            last = news;
        }
        return last.map(|news| Json(news).into_response());
    }
    let news = stream::unfold(lines, |mut lines| async { Some((lines.recv().await?, lines)) });
    let lines = news.map(|news| Ok::<_, Infallible>(line(&news.unwrap_or_else(|error| error_body(&error)))));
    Ok(stream_response(lines, true))
}
