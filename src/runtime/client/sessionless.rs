//! An engine that keeps no sessions, has no load and never ends: it only takes requests.

use std::time::Duration;

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
}

impl<F> Sessionless<F>
where
    F: Fn(Request, Sink) -> Result<()> + Send + Sync + 'static,
{
    pub fn new(spec: EngineSpec, start: F) -> Self {
        Self { spec, start }
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

    /// Leaks `guard`: this engine never ends.
    fn drop_at_end(&self, guard: EndGuard) {
        std::mem::forget(guard);
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
