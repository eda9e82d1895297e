//! What one request came to, for its line in the access log: who asked, in which session, and for how many tokens.
//!
//! The line is written when nobody adds to it any more: after the response has been sent or given up, and after the engine has let
//! go, so that what was computed for a client that left is in it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Map, Value, json};

use super::access::AccessLog;
use super::observe::Observer;
use crate::runtime::Usage;

tokio::task_local! {
    /// Of the request that this task answers.
    static CURRENT: Ledger;
}

/// One request's; clones are the same.
#[derive(Clone)]
pub struct Ledger(Arc<Record>);

struct Record {
    log: Option<AccessLog>,
    observer: Observer,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    /// Nothing until the response is over.
    response: Option<Map<String, Value>>,
    key: Option<String>,
    session: Option<String>,
    model: Option<String>,
    usage: Option<Usage>,
}

impl Ledger {
    pub fn new(log: Option<AccessLog>, observer: Observer) -> Self {
        Self(Arc::new(Record { log, observer, entries: Mutex::default() }))
    }

    /// That of the request being answered; nothing outside of one.
    pub fn current() -> Option<Self> {
        CURRENT.try_with(Clone::clone).ok()
    }

    /// Answers a request whose ledger this is.
    pub async fn of<F: Future>(self, answering: F) -> F::Output {
        CURRENT.scope(self, answering).await
    }

    /// Whose key it came with.
    pub fn key(&self, owner: String) {
        self.entries().key = Some(owner);
    }

    pub fn asks(&self, model: &str) {
        self.entries().model = Some(model.to_owned());
    }

    /// The session that it is a turn of.
    pub fn is_in(&self, session: String) {
        self.entries().session = Some(session);
    }

    /// All tokens so far.
    pub fn used(&self, usage: &Usage) {
        self.entries().usage = Some(usage.clone());
    }

    /// How it was answered.
    pub fn answered(&self, response: Map<String, Value>) {
        self.entries().response = Some(response);
    }

    /// What is behind the lock is whole at every moment.
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.entries.lock().unwrap_or_else(PoisonError::into_inner)
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

impl Drop for Record {
    fn drop(&mut self) {
        let entries = std::mem::take(self.entries.get_mut().unwrap_or_else(PoisonError::into_inner));
        let (Some(log), Some(line)) = (&self.log, entries.line()) else { return };
        if !log.write(&Value::Object(line)) {
            self.observer.metrics().http.log_lines_lost.inc();
        }
    }
}
