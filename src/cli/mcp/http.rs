//! Streamable HTTP: a POST for each message, whose answer is JSON or a stream of events.
//!
//! rmcp has the protocol; here are its requests, over the connections of remote engines. Invariants: headers
//! of the configuration go to the server that they were given for, because redirections are not followed; no
//! message shows them; what is read whole, and each event, is bounded.

use std::collections::HashMap;
use std::str::FromStr;
use std::sync::Arc;

use futures_util::stream::{BoxStream, iter, unfold};
use futures_util::{StreamExt, TryStreamExt};
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST, HeaderName, HeaderValue, USER_AGENT};
use hyper::{Method, Request, StatusCode};
use rmcp::model::{ClientJsonRpcMessage, ServerJsonRpcMessage};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::common::http_header::{
    EVENT_STREAM_MIME_TYPE, HEADER_LAST_EVENT_ID, HEADER_SESSION_ID, JSON_MIME_TYPE,
};
use rmcp::transport::streamable_http_client::{
    SseError, StreamableHttpClient, StreamableHttpClientTransportConfig, StreamableHttpError,
    StreamableHttpPostResponse,
};
use sse_stream::Sse;

use super::config::HttpConfig;
use llmctl_engine::http_engine::{
    EngineHttp, EngineUrl, HttpAnswer, HttpFailure, ServerSettings, SseEvent, SseParser, TlsTrust,
};

/// Characters of a server's refusal that are shown.
const MAX_SHOWN: usize = 300;

type McpHttpFailure = StreamableHttpError<HttpFailure>;

/// Requests to one server.
#[derive(Clone)]
pub struct McpHttp {
    http: EngineHttp,
    authority: String,
    path: String,
}

impl McpHttp {
    /// Returns the transport of a server.
    ///
    /// # Errors
    /// A URL or header that is none.
    pub fn transport(
        config: &HttpConfig,
        trust: TlsTrust,
    ) -> Result<StreamableHttpClientTransport<Self>, String> {
        let (url, path) = EngineUrl::with_query(&config.url).map_err(|why| format!("url: {why}"))?;
        let authority = url.authority();
        let http = EngineHttp::new(url, ServerSettings { key: None, trust });
        let mut settings = StreamableHttpClientTransportConfig::with_uri(config.url.clone());
        settings.custom_headers = headers(&config.headers)?;
        Ok(StreamableHttpClientTransport::with_client(Self { http, authority, path }, settings))
    }

    async fn ask(
        &self,
        method: Method,
        body: String,
        session: Option<Arc<str>>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<HttpAnswer, McpHttpFailure> {
        let mut request = Request::builder()
            .method(method)
            .uri(&self.path)
            .header(HOST, &self.authority)
            .header(USER_AGENT, concat!("llmctl/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, format!("{JSON_MIME_TYPE}, {EVENT_STREAM_MIME_TYPE}"));
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, JSON_MIME_TYPE);
        }
        for (name, value) in headers {
            request = request.header(name, value);
        }
        if let Some(session) = session {
            request = request.header(HEADER_SESSION_ID, &*session);
        }
        let request = request.body(body).map_err(|error| broken(error.to_string()))?;
        self.http.request(request).await.map_err(StreamableHttpError::Client)
    }
}

impl StreamableHttpClient for McpHttp {
    type Error = HttpFailure;

    async fn post_message(
        &self,
        _: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<StreamableHttpPostResponse, McpHttpFailure> {
        let awaits_answer = matches!(message, ClientJsonRpcMessage::Request(_));
        let has_session = session.is_some();
        let answer = self.ask(Method::POST, serde_json::to_string(&message)?, session, headers).await?;
        let kind = content_type(&answer);
        let session =
            answer.headers.get(HEADER_SESSION_ID).and_then(|value| value.to_str().ok()).map(str::to_owned);
        match answer.status {
            StatusCode::ACCEPTED | StatusCode::NO_CONTENT => Ok(StreamableHttpPostResponse::Accepted),
            StatusCode::NOT_FOUND if has_session => Err(StreamableHttpError::SessionExpired),
            status if !status.is_success() => refused(answer).await,
            _ if kind == EVENT_STREAM_MIME_TYPE => {
                Ok(StreamableHttpPostResponse::Sse(events(answer), session))
            }
            _ if !awaits_answer => Ok(StreamableHttpPostResponse::Accepted),
            _ if kind == JSON_MIME_TYPE => {
                let message =
                    serde_json::from_str(&answer.text().await.map_err(StreamableHttpError::Client)?)?;
                Ok(StreamableHttpPostResponse::Json(message, session))
            }
            _ => Err(StreamableHttpError::UnexpectedContentType(Some(kind))),
        }
    }

    async fn delete_session(
        &self,
        _: Arc<str>,
        session: Arc<str>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<(), McpHttpFailure> {
        let answer = self.ask(Method::DELETE, String::new(), Some(session), headers).await?;
        match answer.status {
            StatusCode::METHOD_NOT_ALLOWED => Err(StreamableHttpError::ServerDoesNotSupportDeleteSession),
            _ => Ok(()), // the session is not used any more
        }
    }

    async fn get_stream(
        &self,
        _: Arc<str>,
        session: Option<Arc<str>>,
        last_event: Option<String>,
        _: Option<String>,
        mut headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, McpHttpFailure> {
        if let Some(last) = last_event.and_then(|last| HeaderValue::from_str(&last).ok()) {
            headers
                .insert(HeaderName::from_bytes(HEADER_LAST_EVENT_ID.as_bytes()).expect("a constant"), last);
        }
        let answer = self.ask(Method::GET, String::new(), session, headers).await?;
        match (answer.status, content_type(&answer)) {
            (StatusCode::OK, kind) if kind == EVENT_STREAM_MIME_TYPE => Ok(events(answer)),
            (StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED, _) => {
                Err(StreamableHttpError::ServerDoesNotSupportSse)
            }
            (status, _) => Err(broken(format!("it answers {status} to a request for events"))),
        }
    }
}

fn broken(why: String) -> McpHttpFailure {
    StreamableHttpError::Client(HttpFailure::Malformed(why))
}

fn content_type(answer: &HttpAnswer) -> String {
    let value = answer.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Returns a refusal: the server's own message in the protocol, else an error with its status.
async fn refused(answer: HttpAnswer) -> Result<StreamableHttpPostResponse, McpHttpFailure> {
    let status = answer.status;
    let text = answer.text().await.unwrap_or_default();
    if let Ok(message @ ServerJsonRpcMessage::Error(_)) = serde_json::from_str(&text) {
        return Ok(StreamableHttpPostResponse::Json(message, None));
    }
    let words: Vec<&str> = text.split_whitespace().collect();
    let message: String = words.join(" ").chars().filter(|c| !c.is_control()).take(MAX_SHOWN).collect();
    let message = match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            "it wants a key: headers in the configuration hold one, e.g. \"Authorization\": \"Bearer ${TOKEN}\" \
             (OAuth is not supported)"
                .to_owned()
        }
        _ => message,
    };
    Err(StreamableHttpError::Client(HttpFailure::Status {
        code: status.as_u16(),
        message,
        retry_after: None,
    }))
}

/// Returns the events of an answer.
fn events(answer: HttpAnswer) -> BoxStream<'static, Result<Sse, SseError>> {
    let parts = unfold(Some((answer, SseParser::default())), |state| async {
        let (mut answer, mut parser) = state?;
        let part = answer.events(&mut parser).await.transpose()?;
        let next = part.is_ok().then_some((answer, parser));
        Some((part.map_err(|failure| SseError::Body(Box::new(failure))), next))
    });
    let events = parts.map_ok(|events| iter(events.into_iter().map(|event| Ok(rmcp_event(event)))));
    events.try_flatten().boxed()
}

fn rmcp_event(SseEvent { name, data, id, retry }: SseEvent) -> Sse {
    Sse { event: name, data, id, retry }
}

/// Reads the headers of the configuration. Their values are secrets.
fn headers(given: &[(String, String)]) -> Result<HashMap<HeaderName, HeaderValue>, String> {
    let header = |(name, value): &(String, String)| {
        let header =
            HeaderName::from_str(name).map_err(|_| format!("headers: {name:?} is no name of a header"))?;
        let value =
            HeaderValue::from_str(value).map_err(|_| format!("headers.{name}: not a value of a header"));
        let mut value = value?;
        value.set_sensitive(true);
        Ok((header, value))
    };
    given.iter().map(header).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_headers_are_checked_without_being_repeated() {
        let transport = |url: &str, headers: &[(&str, &str)]| {
            let headers =
                headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            McpHttp::transport(&HttpConfig { url: url.to_owned(), headers }, TlsTrust::default()).map(drop)
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let _guard = runtime.enter();
        assert_eq!(transport("https://host/mcp?x=1", &[("X-Key", "k")]), Ok(()));
        for (url, headers, why) in [
            ("host:80", &[] as &[(&str, &str)], "http://"),
            ("https://me:s3cret@host/mcp", &[], "password"),
            ("https://host", &[("a b", "s3cret")], "name of a header"),
            ("https://host", &[("X-Key", "s3cret\n")], "headers.X-Key"),
        ] {
            let error = transport(url, headers).expect_err(why);
            assert!(error.contains(why) && !error.contains("s3cret"), "{error}");
        }
    }
}
