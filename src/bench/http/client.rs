//! Requests to an OpenAI-compatible server, with the time of each part of the answer.
//!
//! Without TLS, which would be part of the figures. Connections are used again, as clients do it. Failures
//! are [`RequestFailure`]s with a kind, because they are counted, not fatal.

use std::time::{Duration, Instant};

use hyper::header::SERVER;
use serde_json::Value;
use tokio::time::timeout;

use super::sse::{self, ChunkUsage};
use crate::error::{BenchError, RequestFailure};
use llmctl_engine::http_engine::{
    EndpointUrl, EngineHttp, HttpFailure, ServerKey, ServerSettings, SseStream,
};

/// Longest wait for the end of a response whose stream of events has ended.
const AFTERWARDS: Duration = Duration::from_secs(1);

/// Parses the address of a server, with or without `/v1`.
///
/// # Errors
/// A usage error for anything else, including https.
pub fn address(text: &str) -> Result<EndpointUrl, BenchError> {
    let refuse = |why: &str, hint| BenchError::Usage { message: format!("--endpoint {text}: {why}"), hint };
    let url: EndpointUrl = text.parse().map_err(|why: String| refuse(&why, None))?;
    let hint = "measure without TLS, on the server's own machine or through `ssh -L`: TLS would be part of the figures";
    let is_https = url.address().is_https;
    if is_https { Err(refuse("https is not supported", Some(hint))) } else { Ok(url) }
}

/// An answer with the times of its parts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TimedAnswer {
    pub text: String,
    /// Time of each part with text, since the request was sent.
    pub chunks: Vec<Duration>,
    pub end: Duration,
    pub finish: Option<String>,
    pub usage: Option<ChunkUsage>,
}

/// A model in a server's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedModel {
    pub id: String,
    /// `None` if the server does not say.
    pub context_tokens: Option<usize>,
    /// It reads images.
    pub sees: bool,
}

impl ListedModel {
    fn read(model: &Value) -> Option<Self> {
        let context_tokens = model["max_model_len"].as_u64().and_then(|count| usize::try_from(count).ok());
        let sees = model["capabilities"]["vision"] == true;
        Some(Self { id: model["id"].as_str()?.to_owned(), context_tokens, sees })
    }
}

/// A server and its connections.
pub struct LoadClient {
    url: EndpointUrl,
    http: EngineHttp,
    timeout: Duration,
}

impl LoadClient {
    /// # Errors
    /// A usage error for a text that is no key.
    pub fn new(url: EndpointUrl, key: Option<&str>, timeout: Duration) -> Result<Self, BenchError> {
        let key = key.map(ServerKey::new).transpose();
        let key = key.map_err(|why| BenchError::usage(format!("the API key {why}")))?;
        let settings = ServerSettings { key, ..ServerSettings::default() };
        let http = EngineHttp::keeping_connections(url.address().clone(), settings);
        Ok(Self { url, http, timeout })
    }

    /// Returns the models that the server lists, each as it describes it, and its `Server` header.
    ///
    /// # Errors
    /// [`RequestFailure`].
    pub async fn models(&self) -> Result<(Vec<ListedModel>, Option<String>), RequestFailure> {
        self.in_time(async {
            let (head, text) = self.http.get_with_head("/models").await?;
            let software = head.get(SERVER).and_then(|value| value.to_str().ok()).map(str::to_owned);
            let value: Value =
                serde_json::from_str(&text).map_err(|error| HttpFailure::Malformed(error.to_string()))?;
            let models = value["data"].as_array().into_iter().flatten();
            Ok((models.filter_map(ListedModel::read).collect(), software))
        })
        .await
    }

    /// Sends a completion request and reads the stream to its end.
    ///
    /// # Errors
    /// [`RequestFailure`].
    pub async fn complete(&self, path: &str, body: &Value) -> Result<TimedAnswer, RequestFailure> {
        self.in_time(async {
            let sent = Instant::now();
            let stream = self.http.stream(path, body).await?;
            if stream.content_type.starts_with("text/event-stream") {
                return hear(stream, sent).await;
            }
            let mut answer = TimedAnswer::default();
            take(&mut answer, &stream.whole().await?, sent)?;
            Ok(TimedAnswer { end: sent.elapsed(), ..answer })
        })
        .await
    }

    async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, RequestFailure>>,
    ) -> Result<T, RequestFailure> {
        timeout(self.timeout, work).await.unwrap_or(Err(HttpFailure::Timeout.into()))
    }

    /// Returns the error for a request that everything after it needs.
    pub fn explained(&self, failure: RequestFailure) -> BenchError {
        BenchError::Request { url: self.url.address().to_string(), failure }
    }
}

/// Reads a stream to its end. One without `[DONE]` and finish reason was cut.
async fn hear(mut stream: SseStream, sent: Instant) -> Result<TimedAnswer, RequestFailure> {
    let mut answer = TimedAnswer::default();
    while let Some(data) = stream.next().await? {
        if data.trim() == "[DONE]" {
            answer.end = sent.elapsed();
            // The connection is used again if the response ends too; one that stays open is dropped.
            let _ = timeout(AFTERWARDS, async { while let Ok(Some(_)) = stream.next().await {} }).await;
            return Ok(answer);
        }
        take(&mut answer, &data, sent)?;
    }
    answer.end = sent.elapsed();
    match answer.finish {
        Some(_) => Ok(answer),
        None => Err(HttpFailure::Broken("the stream has no end".to_owned()).into()),
    }
}

fn take(answer: &mut TimedAnswer, data: &str, sent: Instant) -> Result<(), RequestFailure> {
    let chunk = sse::chunk(data).map_err(HttpFailure::Malformed)?;
    if let Some(message) = chunk.error {
        return Err(RequestFailure::Server(message));
    }
    if !chunk.text.is_empty() {
        answer.text.push_str(&chunk.text);
        answer.chunks.push(sent.elapsed());
    }
    answer.finish = chunk.finish.or(answer.finish.take());
    answer.usage = chunk.usage.or(answer.usage);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints() {
        let check = |text: &str, expected: &str| {
            assert_eq!(address(text).expect("an endpoint").address().to_string(), expected);
        };
        check("http://127.0.0.1:8484", "http://127.0.0.1:8484/v1");
        check("http://localhost/", "http://localhost:80/v1");
        check("http://[::1]:1/api/v3/", "http://[::1]:1/api/v3");
        for (wrong, why) in [
            ("https://127.0.0.1", "https is not supported"),
            ("127.0.0.1:80", "does not begin with http://"),
            ("ftp://x", "does not begin with http://"),
            ("", "not an address"),
        ] {
            let error = address(wrong).unwrap_err();
            assert!(matches!(error, BenchError::Usage { .. }), "{wrong}");
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
