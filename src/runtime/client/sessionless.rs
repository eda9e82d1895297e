//! An engine that keeps no sessions, has no load and ends with its last client: it only takes requests.

use std::time::Duration;

use parking_lot::Mutex;

use super::{EndGuard, EngineTransport, Sink};
use crate::engine::{EngineLoad, SessionDetail, SessionInfo, StopHandle};
use crate::request::{EngineSessionName, Request};
use crate::spec::EngineSpec;
use llmctl_base::error::{Error, Result};
use llmctl_base::notice::Notice;
use llmctl_models::kv::TokenBuf;

/// An engine without sessions. `start` answers a request before it returns.
pub struct Sessionless<F> {
    spec: EngineSpec,
    start: F,
    guards: Mutex<Vec<EndGuard>>,
}

impl<F> Sessionless<F>
where
    F: Fn(Request, Sink) -> Result<()> + Send + Sync + 'static,
{
    pub fn new(spec: EngineSpec, start: F) -> Self {
        Self { spec, start, guards: Mutex::default() }
    }
}

impl<F> EngineTransport for Sessionless<F>
where
    F: Fn(Request, Sink) -> Result<()> + Send + Sync + 'static,
{
    fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    fn start(&self, request: Request, sink: Sink, _stop: StopHandle) -> Result<()> {
        (self.start)(request, sink)
    }

    fn load(&self) -> Result<EngineLoad> {
        Ok(self.last_load())
    }

    fn last_load(&self) -> EngineLoad {
        EngineLoad::default()
    }

    fn is_alive(&self) -> bool {
        true
    }

    fn drop_at_end(&self, guard: EndGuard) {
        self.guards.lock().push(guard);
    }

    fn cancel_all(&self) -> Result<()> {
        Ok(())
    }

    fn take_notices(&self) -> Result<Vec<Notice>> {
        Ok(Vec::new())
    }

    fn flush_disk(&self, _timeout: Duration) -> Result<bool> {
        Ok(true)
    }

    fn reset_session(&self, name: &EngineSessionName) -> Result<()> {
        Err(Error::SessionNotFound(name.to_string()))
    }

    fn close_session(&self, name: &EngineSessionName) -> Result<()> {
        Err(Error::SessionNotFound(name.to_string()))
    }

    fn fork_session(&self, from: &EngineSessionName, _to: &EngineSessionName) -> Result<()> {
        Err(Error::SessionNotFound(from.to_string()))
    }

    fn restore_session(&self, _name: &EngineSessionName, _tokens: TokenBuf) -> Result<()> {
        Ok(())
    }

    fn inspect_session(&self, name: &EngineSessionName) -> Result<SessionDetail> {
        Err(Error::SessionNotFound(name.to_string()))
    }

    fn list_sessions(&self) -> Result<Vec<SessionInfo>> {
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, RecvTimeoutError, TryRecvError};

    use llmctl_models::model::ModelSpec;

    use super::*;
    use crate::spec::EngineConfig;

    #[test]
    fn guards_are_dropped_with_the_engine() {
        let model = ModelSpec {
            architecture: "none".to_owned(),
            vocab_size: 1,
            context_length: 8,
            groups: Vec::new(),
            can_rewind: true,
            adapters: Vec::new(),
        };
        let spec = EngineSpec::new(model, EngineConfig::new(8, Vec::new())).expect("a specification");
        let engine = Sessionless::new(spec, |_, _| Ok(()));
        let (guard, ended) = mpsc::channel::<()>();
        engine.drop_at_end(Box::new(guard));
        assert_eq!(ended.try_recv(), Err(TryRecvError::Empty));
        drop(engine);
        assert_eq!(ended.recv_timeout(Duration::from_secs(30)), Err(RecvTimeoutError::Disconnected));
    }
}
