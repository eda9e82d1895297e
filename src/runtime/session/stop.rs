//! The flag that stops a generation from any thread.
//!
//! Invariant: a stop takes effect at the next token boundary and lasts until the handle's owner clears it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Flag that asks a generation to stop at the next token boundary. Clones share the flag and may be used on any thread.
#[derive(Clone, Default)]
pub struct StopHandle(Arc<StopState>);

#[derive(Default)]
struct StopState {
    is_stopped: AtomicBool,
    /// Callback for generations in another process, which cannot see the flag.
    callback: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl StopHandle {
    /// Sets the flag, and calls the callback of [`StopHandle::on_stop`] if the flag was not set.
    pub fn stop(&self) {
        let is_first = !self.0.is_stopped.swap(true, Ordering::SeqCst);
        if let Some(callback) = self.0.callback.get().filter(|_| is_first) {
            callback();
        }
    }

    pub fn is_stopped(&self) -> bool {
        self.0.is_stopped.load(Ordering::SeqCst)
    }

    /// Registers `callback` for the stop, and calls it at once if the flag is set already. Later callbacks are ignored.
    /// A stop during the registration may call it twice.
    pub fn on_stop(&self, callback: impl Fn() + Send + Sync + 'static) {
        let callback = self.0.callback.get_or_init(|| Box::new(callback));
        if self.is_stopped() {
            callback();
        }
    }

    pub(super) fn clear(&self) {
        self.0.is_stopped.store(false, Ordering::SeqCst);
    }
}

impl fmt::Debug for StopHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StopHandle").field(&self.is_stopped()).finish()
    }
}
