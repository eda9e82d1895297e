//! The state that all models of a server share: sessions, queues for them, counters, tools and the limits on
//! prompts that are read at once.
//!
//! Invariant: all models of a server use the same value, so that two of them never have one session open at
//! the same time.

use std::sync::Arc;

use super::conversations::Conversations;
use super::session_queue::SessionQueues;
use super::transient::Transients;
use crate::engines::preparing::Preparing;
use crate::telemetry::observe::Observer;
use crate::tools::ToolHost;
use llmctl_engine::session::store::SessionStore;

/// The state that the models of a server share; clones refer to the same server.
#[derive(Clone)]
pub struct ServerShared {
    state: Arc<ServerSharedState>,
    tools: Option<Arc<dyn ToolHost>>,
}

struct ServerSharedState {
    sessions: Option<SessionStore>,
    conversations: Conversations,
    transients: Transients,
    queues: SessionQueues,
    observer: Observer,
    preparing: Preparing,
}

impl ServerShared {
    /// Creates the state. `sessions` keeps named sessions on disk; with `None` they live as long as the server. `max_strands` bounds
    /// the conversations of transient sessions: as many as an engine keeps.
    pub fn new(sessions: Option<SessionStore>, observer: Observer, max_strands: usize) -> Self {
        let state = ServerSharedState {
            conversations: Conversations::new(sessions.clone()),
            transients: Transients::new(max_strands),
            queues: SessionQueues::default(),
            sessions,
            observer,
            preparing: Preparing::default(),
        };
        Self { state: Arc::new(state), tools: None }
    }

    /// Lets clients list and call these tools.
    #[must_use]
    pub fn with_tools(self, tools: Option<Arc<dyn ToolHost>>) -> Self {
        Self { tools, ..self }
    }

    pub(crate) fn tools(&self) -> Option<&Arc<dyn ToolHost>> {
        self.tools.as_ref()
    }

    pub fn sessions(&self) -> Option<&SessionStore> {
        self.state.sessions.as_ref()
    }

    pub(crate) fn conversations(&self) -> &Conversations {
        &self.state.conversations
    }

    pub(crate) fn transients(&self) -> &Transients {
        &self.state.transients
    }

    pub(crate) fn session_queues(&self) -> &SessionQueues {
        &self.state.queues
    }

    pub fn observer(&self) -> &Observer {
        &self.state.observer
    }

    /// Returns the limits on texts being tokenised.
    pub(crate) fn preparing(&self) -> &Preparing {
        &self.state.preparing
    }
}
