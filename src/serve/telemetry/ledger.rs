//! The access-log line and the span of one request, gathered while it runs: key, model, session, token
//! counts, response.
//!
//! Invariant: the line is written when the last clone is dropped, that is after the response has been sent or
//! given up and after the engine has finished. So it also counts tokens computed for a client that has left.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use super::access_log::AccessLog;
use super::metrics::FinishedTurn;
use super::observe::Observer;
use super::spans::RequestSpan;
use llmctl_engine::Usage;

tokio::task_local! {
    /// The ledger of the request that this task answers.
    static CURRENT: Ledger;
}

/// The line of one request in the making; clones refer to the same line.
#[derive(Clone)]
pub struct Ledger(Arc<PendingLine>);

struct PendingLine {
    log: Option<AccessLog>,
    observer: Observer,
    span: Option<Box<dyn RequestSpan>>,
    /// The `User-Agent` of the client.
    user_agent: Option<String>,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    /// `None` until the response has ended.
    response: Option<Map<String, Value>>,
    key: Option<String>,
    session: Option<String>,
    model: Option<String>,
    usage: Option<Usage>,
}

impl Ledger {
    pub fn new(
        log: Option<AccessLog>,
        observer: Observer,
        span: Option<Box<dyn RequestSpan>>,
        user_agent: Option<String>,
    ) -> Self {
        Self(Arc::new(PendingLine { log, observer, span, user_agent, entries: Mutex::default() }))
    }

    pub fn user_agent(&self) -> Option<&str> {
        self.0.user_agent.as_deref()
    }

    /// Returns the owner of the request's key.
    pub fn owner(&self) -> Option<String> {
        self.0.entries.lock().key.clone()
    }

    /// Returns the ledger of the request that this task answers; `None` outside of one.
    pub fn current() -> Option<Self> {
        CURRENT.try_with(Clone::clone).ok()
    }

    /// Runs `answering` with this as the current ledger.
    pub async fn of<F: Future>(self, answering: F) -> F::Output {
        CURRENT.scope(self, answering).await
    }

    /// Records the owner of the request's key.
    pub fn key(&self, owner: String) {
        self.0.entries.lock().key = Some(owner);
    }

    /// Records the model that the request names.
    pub fn asks(&self, model: &str) {
        self.0.entries.lock().model = Some(model.to_owned());
    }

    /// Records the session.
    pub fn is_in(&self, session: String) {
        self.0.entries.lock().session = Some(session);
    }

    /// Records the token counts so far.
    pub fn used(&self, usage: &Usage) {
        self.0.entries.lock().usage = Some(usage.clone());
    }

    /// Records an answer in the request's span.
    pub fn turn(&self, record: &FinishedTurn) {
        if let Some(span) = &self.0.span {
            span.turn(record);
        }
    }

    /// Records the response's part of the line.
    pub fn answered(&self, response: Map<String, Value>) {
        self.0.entries.lock().response = Some(response);
    }
}

impl Entries {
    fn line(self) -> Option<Map<String, Value>> {
        let mut line = self.response?;
        let texts = [("key", self.key), ("model", self.model), ("session", self.session)];
        line.extend(texts.into_iter().filter_map(|(name, text)| Some((name.to_owned(), text?.into()))));
        if let Some(Usage { prompt_tokens, cached_tokens, completion_tokens, .. }) = self.usage {
            let counts = [
                ("prompt_tokens", prompt_tokens),
                ("cached_tokens", cached_tokens),
                ("completion_tokens", completion_tokens),
            ];
            line.extend(counts.map(|(name, count)| (name.to_owned(), json!(count))));
        }
        Some(line)
    }
}

impl Drop for PendingLine {
    fn drop(&mut self) {
        let entries = std::mem::take(self.entries.get_mut());
        let Some(line) = entries.line() else { return };
        if let Some(span) = &mut self.span {
            span.end(&line);
        }
        let Some(log) = &self.log else { return };
        if !log.write(&Value::Object(line)) {
            self.observer.metrics().http.log_lines_lost.inc();
        }
    }
}
