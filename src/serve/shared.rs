//! The state that all models of a server share: sessions, counters, tools and the limits on prompts that
//! are read at once.
//!
//! Invariant: all models of a server use the same value, so that two of them never have one session open
//! at the same time.

use std::sync::Arc;

use crate::downloads::ModelDownloads;
use crate::engines::preparing::Preparing;
use crate::sessions::SessionDirectory;
use crate::telemetry::observe::Observer;
use crate::tools::ToolHost;
use llmctl_engine::session::store::SessionStore;

/// The state that the models of a server share; clones refer to the same server.
#[derive(Clone)]
pub struct ServerShared {
    state: Arc<ServerSharedState>,
    tools: Option<Arc<dyn ToolHost>>,
    downloads: Option<Arc<dyn ModelDownloads>>,
}

struct ServerSharedState {
    sessions: SessionDirectory,
    observer: Observer,
    preparing: Preparing,
}

impl ServerShared {
    /// Creates the state; see [`SessionDirectory::new`].
    pub fn new(sessions: Option<SessionStore>, observer: Observer, max_branches: usize) -> Self {
        let sessions = SessionDirectory::new(sessions, max_branches);
        let preparing = Preparing::default();
        Self {
            state: Arc::new(ServerSharedState { sessions, observer, preparing }),
            tools: None,
            downloads: None,
        }
    }

    /// Lets clients list and call these tools.
    #[must_use]
    pub fn with_tools(self, tools: Option<Arc<dyn ToolHost>>) -> Self {
        Self { tools, ..self }
    }

    /// Lets clients ask for downloads of models.
    #[must_use]
    pub fn with_downloads(self, downloads: Arc<dyn ModelDownloads>) -> Self {
        Self { downloads: Some(downloads), ..self }
    }

    pub(crate) fn downloads(&self) -> Option<&Arc<dyn ModelDownloads>> {
        self.downloads.as_ref()
    }

    pub(crate) fn tools(&self) -> Option<&Arc<dyn ToolHost>> {
        self.tools.as_ref()
    }

    pub(crate) fn sessions(&self) -> &SessionDirectory {
        &self.state.sessions
    }

    pub fn observer(&self) -> &Observer {
        &self.state.observer
    }

    /// Returns the limits on texts being tokenised.
    pub(crate) fn preparing(&self) -> &Preparing {
        &self.state.preparing
    }
}
