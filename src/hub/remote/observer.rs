//! Reports of a running download, and its stop.

use std::time::{Duration, Instant};

use super::error::HubError;

/// Interval at which a waiting download looks whether it is to stop.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A step of a download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullEvent {
    /// A request failed and is repeated after a pause of `seconds`.
    Retrying { what: String, why: String, seconds: u64 },
    /// Another process downloads the file; this one waits for it.
    Waiting { path: String },
    /// Work on a file begins with `have` bytes from an earlier download.
    Started { path: String, have: u64, total: u64 },
    /// The file must be downloaded again from its first byte.
    Restarted { path: String, why: &'static str },
    /// So many more bytes of a file are on disk.
    Received { path: String, bytes: u64 },
    /// The file is complete and its hash is right. `was_cached` if it was there already.
    Finished { path: String, was_cached: bool },
}

/// The caller of a download, from any of its threads.
pub trait PullObserver: Sync {
    fn event(&self, event: PullEvent);

    /// Returns whether the download must stop soon, with its partial files kept.
    fn is_cancelled(&self) -> bool;
}

/// Waits, unless the download is cancelled.
///
/// # Errors
/// [`HubError::Cancelled`].
pub(super) fn pause(duration: Duration, observer: &dyn PullObserver) -> Result<(), HubError> {
    let end = Instant::now() + duration;
    loop {
        if observer.is_cancelled() {
            return Err(HubError::Cancelled);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(LOOK_EVERY));
    }
}
