//! The engines of a server: one, or one per worker process, and which of them a request goes to.
//!
//! Rendezvous hashing gives each session name an order of all engines. A session goes to the first engine
//! of its order that is up, and stays with it while it lives, because its KV is there. A request without a
//! session goes to the engine with the fewest requests. The directory of sessions keeps their turns
//! outside of the engines, so that any engine can continue them.

pub mod engine;
pub mod preparing;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::error::ApiError;
use crate::engines::engine::{EngineSlot, Health};
use llmctl_engine::http_engine::rendezvous_order;
use llmctl_engine::{EngineClient, EngineLoad, EngineSessionName};

/// Longest wait for the KV of an engine that ends.
pub const FLUSH_TIMEOUT: Duration = Duration::from_secs(30);

/// Sets of engines that this process has had.
static NUM_SETS: AtomicU64 = AtomicU64::new(0);

/// All engines of a model.
pub struct Engines {
    /// Number that no other set of this process has.
    set: u64,
    slots: Vec<EngineSlot>,
}

/// Identifies an engine among all that this process has had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineInstance {
    set: u64,
    slot: usize,
    num_restarts: u64,
}

impl EngineInstance {
    /// Returns true if both are or were engines of the same model.
    pub fn is_of_same_set(self, other: Self) -> bool {
        self.set == other.set
    }
}

/// The status of one engine, for `/health` and `/metrics`.
#[derive(Debug, Clone)]
pub struct EngineStatus {
    pub health: Health,
    pub num_restarts: u64,
    /// `None` while it is not up.
    pub load: Option<EngineLoad>,
}

impl From<EngineSlot> for Engines {
    fn from(slot: EngineSlot) -> Self {
        Self::new(vec![slot])
    }
}

impl Engines {
    /// Creates the set of engines.
    ///
    /// # Panics
    /// If `slots` is empty.
    pub fn new(slots: Vec<EngineSlot>) -> Self {
        assert!(!slots.is_empty(), "a server has an engine");
        let set = NUM_SETS.fetch_add(1, Ordering::Relaxed);
        Self { set, slots }
    }

    pub fn len(&self) -> usize {
        self.slots.len()
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the engine with the fewest requests.
    ///
    /// # Errors
    /// 503 while none is up, with the time until the first one is back.
    pub fn any(&self) -> Result<EngineClient, ApiError> {
        let (mut best, mut soonest) = (None, None);
        for slot in &self.slots {
            match slot.get() {
                Ok(engine) => {
                    let load = engine.last_load();
                    let num_requests = load.num_running + load.num_waiting;
                    if best.as_ref().is_none_or(|(least, _)| num_requests < *least) {
                        best = Some((num_requests, engine));
                    }
                }
                Err(error) => soonest = sooner(soonest, error),
            }
        }
        best.map(|(_, engine)| engine).ok_or_else(|| soonest.unwrap_or_else(ApiError::engine_down))
    }

    /// Returns the engine of a session: the one that it was with, if that is among `known` and still up,
    /// because its KV is there; else the first one of its order that is up.
    ///
    /// # Errors
    /// As [`Self::any`].
    pub fn of(
        &self,
        session: &EngineSessionName,
        known: &[EngineInstance],
    ) -> Result<EngineClient, ApiError> {
        if let Some(engine) = known.iter().find_map(|instance| self.up_as(*instance)) {
            return Ok(engine);
        }
        let mut soonest = None;
        for slot in rendezvous_order(session.as_str(), self.slots.len()) {
            match self.slots[slot].get() {
                Ok(engine) => return Ok(engine),
                Err(error) => soonest = sooner(soonest, error),
            }
        }
        Err(soonest.unwrap_or_else(ApiError::engine_down))
    }

    /// Returns the index of an engine; 0 for one that has been replaced.
    pub fn index_of(&self, engine: &EngineClient) -> usize {
        self.slots.iter().position(|slot| slot.holds(engine)).unwrap_or(0)
    }

    /// Returns a key that no other engine of this server has, before or after it.
    pub fn instance(&self, engine: &EngineClient) -> EngineInstance {
        let slot = self.index_of(engine);
        EngineInstance { set: self.set, slot, num_restarts: self.slots[slot].num_restarts() }
    }

    /// Returns the engine with this key if it is one of these and still up.
    pub fn up_as(&self, instance: EngineInstance) -> Option<EngineClient> {
        let slot = self.slots.get(instance.slot).filter(|_| instance.set == self.set)?;
        if slot.num_restarts() == instance.num_restarts { slot.get().ok() } else { None }
    }

    /// Returns true if the engine with this key is or was one of these.
    pub fn had(&self, instance: EngineInstance) -> bool {
        instance.set == self.set
    }

    /// Returns all engines that are up.
    pub fn up(&self) -> Vec<EngineClient> {
        self.slots.iter().filter_map(|slot| slot.get().ok()).collect()
    }

    /// Saves the KV of all engines that are up, before they end. Returns whether all of it was saved in
    /// time, and what users should know.
    pub fn save_kv(&self) -> (bool, Vec<String>) {
        let (mut is_all_saved, mut notices) = (true, Vec::new());
        for engine in self.up() {
            is_all_saved &= !matches!(engine.flush_disk(FLUSH_TIMEOUT), Ok(false));
            notices.extend(engine.take_notices().unwrap_or_default().iter().map(ToString::to_string));
        }
        (is_all_saved, notices)
    }

    /// Returns the status of each engine.
    pub fn statuses(&self) -> Vec<EngineStatus> {
        let status = |slot: &EngineSlot| EngineStatus {
            health: slot.health(),
            num_restarts: slot.num_restarts(),
            load: slot.get().ok().map(|engine| engine.last_load()),
        };
        self.slots.iter().map(status).collect()
    }

    /// Reports that an engine is dead. Ignored if it has been replaced.
    pub fn lost(&self, engine: &EngineClient) {
        self.slots.iter().filter(|slot| slot.holds(engine)).for_each(EngineSlot::lost);
    }

    /// Records that an engine has answered a request.
    pub fn answered(&self, engine: &EngineClient) {
        self.slots.iter().filter(|slot| slot.holds(engine)).for_each(EngineSlot::answered);
    }

    pub fn num_restarts(&self) -> u64 {
        self.slots.iter().map(EngineSlot::num_restarts).sum()
    }
}

/// Returns the error with the shorter Retry-After.
fn sooner(other: Option<ApiError>, error: ApiError) -> Option<ApiError> {
    match other {
        Some(other) if other.retry_after <= error.retry_after => Some(other),
        _ => Some(error),
    }
}
