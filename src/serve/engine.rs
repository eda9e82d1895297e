//! The way to the engine thread.

use std::sync::{PoisonError, RwLock};

use super::error::ApiError;
use crate::runtime::EngineHandle;

/// Holds the engine that is in use.
pub struct EngineSlot {
    current: RwLock<Option<EngineHandle>>,
}

impl EngineSlot {
    pub fn new(engine: EngineHandle) -> Self {
        Self { current: RwLock::new(Some(engine)) }
    }

    /// # Errors
    /// 503 while there is none.
    pub fn get(&self) -> Result<EngineHandle, ApiError> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.clone().ok_or_else(ApiError::engine_down)
    }

    /// A request found that the engine is gone.
    pub fn lost(&self) {
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
