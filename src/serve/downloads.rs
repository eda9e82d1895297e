//! Downloads of models that clients ask for.

/// A downloader of models.
pub trait ModelDownloads: Send + Sync {
    /// Returns whether everyone who may send requests may ask for a download. Otherwise it is for this machine, where there are no keys.
    fn is_open(&self) -> bool;

    /// Downloads a model, as far as it is not here, and tells how far it is. Waits for the end.
    ///
    /// # Errors
    /// Why it is not downloaded, for the client.
    fn pull(&self, name: &str, progress: &(dyn Fn(PullProgress) + Sync)) -> Result<(), String>;
}

/// Progress of a download, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullProgress {
    /// Names what is downloaded, in hexadecimal digits.
    pub digest: String,
    pub total: u64,
    pub completed: u64,
}
