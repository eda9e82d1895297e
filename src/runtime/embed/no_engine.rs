//! The engine of a model that writes no text, for a server whose model is an embedder: it has a context, and refuses requests.

use std::ops::ControlFlow;
use std::time::Duration;

use super::EmbedTexts;
use crate::runtime::client::{EndGuard, EngineTransport, Sink};
use crate::runtime::engine::{EngineLoad, SessionDetail, SessionInfo, StopHandle};
use crate::runtime::error::{Error, Result};
use crate::runtime::model::ModelSpec;
use crate::runtime::notice::Notice;
use crate::runtime::request::{EngineSessionName, Event, Request};
use crate::runtime::spec::{EngineConfig, EngineSpec};

/// An engine that generates nothing and never ends.
pub struct NoEngine {
    spec: EngineSpec,
}

impl NoEngine {
    /// # Errors
    /// Those of [`EngineSpec::new`].
    pub fn new(texts: &EmbedTexts) -> Result<Self> {
        let spec = &texts.spec;
        let model = ModelSpec {
            architecture: spec.architecture.to_owned(),
            vocab_size: spec.vocab_size,
            context_length: spec.context_length,
            groups: Vec::new(),
            can_rewind: true,
        };
        Ok(Self { spec: EngineSpec::new(model, EngineConfig::new(spec.context_length, Vec::new()))? })
    }
}

impl EngineTransport for NoEngine {
    fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    fn start(&self, _request: Request, mut sink: Sink, _stop: StopHandle) -> Result<()> {
        let (ControlFlow::Continue(()) | ControlFlow::Break(())) =
            sink(Event::Failed(Error::NotSupported("it computes embeddings and writes no text")));
        Ok(())
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

    fn restore_session(&self, _name: &EngineSessionName, _tokens: Vec<u32>) -> Result<()> {
        Ok(())
    }

    fn inspect_session(&self, name: &EngineSessionName) -> Result<SessionDetail> {
        Err(Error::SessionNotFound(name.to_string()))
    }

    fn list_sessions(&self) -> Result<Vec<SessionInfo>> {
        Ok(Vec::new())
    }
}
