//! Downloads models from a Hugging Face hub into the shared cache.
//!
//! [`PullPlan`] asks the hub what a reference needs, checks the space and downloads. `client` makes requests
//! and knows what refusals mean; `listing` reads a repository's files; `selection` chooses among them;
//! `parts` transfers one file into its `partial` file; `store` writes the cache's layout. Blocking: the
//! caller provides the thread.
//!
//! Invariant: no content gets its name in the cache before its hash was compared with the hub's.

mod client;
mod error;
mod listing;
mod observer;
mod partial;
mod parts;
mod pull;
mod selection;
mod settings;
mod store;

pub use client::HubClient;
pub use error::HubError;
pub use listing::{FileHash, RemoteFile};
pub use observer::{PullEvent, PullObserver};
pub(crate) use partial::RunningHash;
pub use pull::PullPlan;
pub use selection::PullExtent;
pub use settings::{HubProxies, HubSettings, HubToken, RetrySettings};
