//! Downloads and removals of models that clients ask for.

/// The models that are downloaded on this machine.
pub trait ModelDownloads: Send + Sync {
    /// Returns whether everyone who may send requests may ask for a download. Otherwise it is for this machine, where there are no keys.
    fn is_open(&self) -> bool;

    /// Downloads a model, as far as it is not here, and tells how far it is. Waits for the end.
    ///
    /// # Errors
    /// Why it is not downloaded, for the client.
    fn pull(&self, name: &str, progress: &(dyn Fn(PullProgress) + Sync)) -> Result<(), String>;

    /// Returns whether everyone who may send requests may have a model erased; otherwise nobody may.
    fn may_erase(&self) -> bool;

    /// Erases a model that no process uses and no session continues with. Returns false if it is not here.
    ///
    /// # Errors
    /// Why it is not erased, for the client.
    fn erase(&self, name: &str) -> Result<bool, String>;
}

/// Progress of a download, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullProgress {
    /// Names what is downloaded, in hexadecimal digits.
    pub digest: String,
    pub total: u64,
    pub completed: u64,
}
