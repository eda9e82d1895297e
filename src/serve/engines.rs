//! The engines of a server: one, or one per worker process, and which of them a request goes to.
//!
//! Sessions are routed by name: each name has an order of all engines that depends on nothing else (rendezvous hashing), and goes to
//! the first that is up. It then stays there while that one lives, also when an earlier one comes back, because its KV is there.
//! Requests without a session go to whoever has least to do. Engines know nothing of each other; what a session has said is
//! known to the conversations, so that any engine can go on with it.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::engine::{EngineSlot, Standing};
use super::error::ApiError;
use crate::runtime::{EngineClient, EngineLoad};

/// All engines, each in its place.
pub struct Engines {
    slots: Vec<EngineSlot>,
    /// Sessions that are not with the first of their order, because that was down when they were asked for.
    strays: Mutex<HashMap<String, Stray>>,
}

/// Where a session has gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stray {
    slot: usize,
    /// Which engine of that place: it stays while this is the one.
    num_restarts: u64,
}

/// One engine's place, for those who look.
#[derive(Debug, Clone)]
pub struct Place {
    pub standing: Standing,
    pub num_restarts: u64,
    /// Nothing while it is not up.
    pub load: Option<EngineLoad>,
}

impl From<EngineSlot> for Engines {
    fn from(slot: EngineSlot) -> Self {
        Self::new(vec![slot])
    }
}

impl Engines {
    /// # Panics
    /// Without any.
    pub fn new(slots: Vec<EngineSlot>) -> Self {
        assert!(!slots.is_empty(), "a server has an engine");
        Self { slots, strays: Mutex::default() }
    }

    pub fn len(&self) -> usize {
        self.slots.len()
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    /// The one with least to do.
    ///
    /// # Errors
    /// 503 while there is none; with the time until the first is back.
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

    /// The one that a session is with, or goes to.
    ///
    /// # Errors
    /// As [`Self::any`].
    pub fn of(&self, session: &str) -> Result<EngineClient, ApiError> {
        if let [only] = &*self.slots {
            return only.get();
        }
        let mut strays = self.strays();
        if let Some(&Stray { slot, num_restarts }) = strays.get(session)
            && self.slots[slot].num_restarts() == num_restarts
            && let Ok(engine) = self.slots[slot].get()
        {
            return Ok(engine);
        }
        let mut soonest = None;
        for (nth, slot) in order(session, self.slots.len()).into_iter().enumerate() {
            match self.slots[slot].get() {
                Ok(engine) if nth == 0 => {
                    strays.remove(session);
                    return Ok(engine);
                }
                Ok(engine) => {
                    let num_restarts = self.slots[slot].num_restarts();
                    strays.insert(session.to_owned(), Stray { slot, num_restarts });
                    return Ok(engine);
                }
                Err(error) => soonest = sooner(soonest, error),
            }
        }
        Err(soonest.unwrap_or_else(ApiError::engine_down))
    }

    /// There is no such session any more.
    pub fn forget(&self, session: &str) {
        self.strays().remove(session);
    }

    /// The number of an engine; 0 for one that has been replaced.
    pub fn index_of(&self, engine: &EngineClient) -> usize {
        self.slots.iter().position(|slot| slot.holds(engine)).unwrap_or(0)
    }

    /// Which engine it is, of all that there ever were.
    pub fn instance(&self, engine: &EngineClient) -> (usize, u64) {
        let index = self.index_of(engine);
        (index, self.slots[index].num_restarts())
    }

    /// Whether that engine is there still.
    pub fn has(&self, (index, num_restarts): (usize, u64)) -> bool {
        let slot = self.slots.get(index);
        slot.is_some_and(|slot| slot.num_restarts() == num_restarts && slot.get().is_ok())
    }

    /// All that are up.
    pub fn up(&self) -> Vec<EngineClient> {
        self.slots.iter().filter_map(|slot| slot.get().ok()).collect()
    }

    pub fn places(&self) -> Vec<Place> {
        let place = |slot: &EngineSlot| Place {
            standing: slot.standing(),
            num_restarts: slot.num_restarts(),
            load: slot.get().ok().map(|engine| engine.last_load()),
        };
        self.slots.iter().map(place).collect()
    }

    /// Somebody found that this one is gone. Late news of one that has been replaced is none.
    pub fn lost(&self, engine: &EngineClient) {
        self.slots.iter().filter(|slot| slot.holds(engine)).for_each(EngineSlot::lost);
    }

    /// A request of this one has come to its end.
    pub fn answered(&self, engine: &EngineClient) {
        self.slots.iter().filter(|slot| slot.holds(engine)).for_each(EngineSlot::answered);
    }

    pub fn num_restarts(&self) -> u64 {
        self.slots.iter().map(EngineSlot::num_restarts).sum()
    }

    /// What is behind the lock is whole at every moment.
    fn strays(&self) -> MutexGuard<'_, HashMap<String, Stray>> {
        self.strays.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The refusal of whoever is back first.
fn sooner(other: Option<ApiError>, error: ApiError) -> Option<ApiError> {
    match other {
        Some(other) if other.retry_after <= error.retry_after => Some(other),
        _ => Some(error),
    }
}

/// All engines, the one that the name belongs to first. The same in every process: highest random weight (Thaler and
/// Ravishankar, 1998), over FNV-1a with the finisher of SplitMix64.
fn order(name: &str, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(weight(name, index)));
    order
}

fn weight(name: &str, index: usize) -> u64 {
    let bytes = name.bytes().chain((index as u64).to_le_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mixed = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_spread_evenly_and_move_only_when_they_must() {
        let names: Vec<String> = (0..3000).map(|n| format!("session-{n}")).collect();
        let mut counts = [0; 3];
        for name in &names {
            let of_three = order(name, 3);
            counts[of_three[0]] += 1;
            let mut sorted = of_three.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2], "every engine has a place in the order");
            // Without the last engine, the others keep their order.
            let without: Vec<usize> = of_three.into_iter().filter(|&index| index < 2).collect();
            assert_eq!(without, order(name, 2));
        }
        assert!(counts.iter().all(|&count| (850..1150).contains(&count)), "{counts:?}");
    }

    #[test]
    fn the_order_is_that_of_earlier_versions() {
        // A change would send every session to another worker after an update, away from what it has in memory.
        let orders = ["", "a", "trip"].map(|name| order(name, 4));
        assert_eq!(orders, ORDERS);
    }

    const ORDERS: [[usize; 4]; 3] = [[3, 0, 2, 1], [2, 1, 0, 3], [0, 1, 3, 2]];
}
