//! Restarts an engine whose thread or worker process has died. (A panic inside a step is contained by
//! `step.rs`.)
//!
//! A watcher thread rebuilds the engine, with growing pauses if it fails soon again, and gives up after
//! `max_attempts` failures in a row. Meanwhile requests get 503 with Retry-After. Sessions are restored
//! elsewhere, from disk.
//!
//! Invariant: a late report about an engine that has been replaced harms no request: the watcher asks the
//! current engine whether it is alive before it replaces it. While nothing is asked of the engine, the
//! watcher sleeps until it ends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use serde::Serialize;

use crate::error::ApiError;
use llmctl_engine::EngineClient;

/// Interval at which the watcher checks an engine that works, or has worked lately, and logs its notices.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Looks without a request after which the watcher rests: time for KV to be saved, the source of most notices. Later
/// ones are logged after the next request.
const QUIET_LOOKS: u32 = 10;

/// Longest wait for a dead engine to free its memory before the next one is built.
const UNWIND_TIME: Duration = Duration::from_secs(30);

/// An engine that ran this long, or answered a request, resets the count of failures in a row.
const LASTING: Duration = Duration::from_secs(60);

/// Longest pause between two attempts to bring an engine of this machine back, and what clients are told of one that is given up.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Recipe for restarting a lost engine.
pub struct Recovery {
    /// Name in the log: `the engine`, `worker 2`.
    pub name: String,
    /// Builds a new engine of the same model.
    pub rebuild: Box<dyn FnMut() -> Result<EngineClient, String> + Send>,
    /// Time that the last build took.
    pub build_time: Duration,
    /// Pause before the second attempt; each further pause is twice the one before. The first attempt has none.
    pub pause: Duration,
    pub longest_pause: Duration,
    /// Failed builds in a row, or engines in a row without an answer, after which the watcher gives up.
    pub max_attempts: u32,
    /// Called with the reason when the watcher gives up.
    pub gave_up: Box<dyn FnMut(String) + Send>,
}

/// Health of one engine, by its name in `/health`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Health {
    #[serde(rename = "up")]
    Up,
    /// Lost, or reported lost; a restart is under way.
    #[serde(rename = "restarting")]
    Down,
    /// Lost for good: restarts have failed.
    #[serde(rename = "failed")]
    GivenUp,
}

/// The engine in use, and its replacements.
pub struct EngineSlot {
    state: Arc<SlotState>,
}

struct SlotState {
    engine: RwLock<EngineState>,
    num_restarts: AtomicU64,
    num_answers: AtomicU64,
    /// Requests that asked for the engine.
    num_requests: AtomicU64,
    /// True if the watcher sleeps without a limit, so that a request must wake it.
    is_resting: AtomicBool,
    /// Wakes the watcher thread, which ends when this is dropped; `None` without recovery.
    watch: Option<Sender<()>>,
}

#[derive(Clone)]
enum EngineState {
    /// Answers.
    Up(EngineClient),
    /// Reported lost; the watcher has not checked it yet.
    Doubted(EngineClient),
    /// Is started again at a time.
    Down { back_at: Instant },
    /// Is not started again.
    GivenUp,
}

impl EngineSlot {
    /// Creates a slot without recovery: a lost engine stays lost.
    pub fn new(engine: EngineClient) -> Self {
        Self { state: Arc::new(SlotState::new(engine, None)) }
    }

    /// Creates a slot with a watcher thread.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub fn with_recovery(engine: EngineClient, recovery: Recovery) -> std::io::Result<Self> {
        let (sender, inbox) = mpsc::channel();
        let state = Arc::new(SlotState::new(engine.clone(), Some(sender)));
        state.report_end_of(&engine);
        drop(engine); // a clone here would outlive the slot
        let watch = EngineWatcher {
            slot: Arc::downgrade(&state),
            inbox,
            recovery,
            pace: WatchPace::default(),
            num_short_lived: 0,
            exit_reason: None,
        };
        thread::Builder::new().name("engine-watch".to_owned()).spawn(move || watch.run())?;
        Ok(Self { state })
    }

    /// Returns the engine in use.
    ///
    /// # Errors
    /// 503 with Retry-After while there is none.
    pub fn get(&self) -> Result<EngineClient, ApiError> {
        match self.state.get() {
            EngineState::Up(engine) if engine.is_alive() => {
                self.state.count_request();
                Ok(engine)
            }
            EngineState::Up(_) => {
                self.lost();
                Err(ApiError::engine_down())
            }
            EngineState::Doubted(_) => Err(ApiError::engine_down().retry_after(LOOK_EVERY)),
            EngineState::Down { back_at } => {
                Err(ApiError::engine_down().retry_after(back_at.saturating_duration_since(Instant::now())))
            }
            EngineState::GivenUp => Err(ApiError::engine_down().retry_after(LONGEST_PAUSE)),
        }
    }

    /// Reports that a request found the engine dead.
    pub fn lost(&self) {
        let doubted = |state: &EngineState| match state {
            EngineState::Up(engine) if self.state.watch.is_some() => EngineState::Doubted(engine.clone()),
            EngineState::Up(_) => EngineState::GivenUp,
            other => other.clone(),
        };
        {
            let mut state = self.state.engine.write();
            *state = doubted(&state);
        }
        self.state.wake();
    }

    /// Returns how often the engine has been restarted.
    pub fn num_restarts(&self) -> u64 {
        self.state.num_restarts.load(Ordering::Relaxed)
    }

    /// Records that the engine has answered a request.
    pub fn answered(&self) {
        self.state.num_answers.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns true if this is the engine in use.
    pub fn holds(&self, engine: &EngineClient) -> bool {
        match self.state.get() {
            EngineState::Up(own) | EngineState::Doubted(own) => own.is_same(engine),
            EngineState::Down { .. } | EngineState::GivenUp => false,
        }
    }

    pub fn health(&self) -> Health {
        match self.state.get() {
            EngineState::Up(engine) if engine.is_alive() => Health::Up,
            EngineState::Up(_) | EngineState::Doubted(_) | EngineState::Down { .. } => Health::Down,
            EngineState::GivenUp => Health::GivenUp,
        }
    }
}

impl SlotState {
    fn new(engine: EngineClient, watch: Option<Sender<()>>) -> Self {
        Self {
            engine: RwLock::new(EngineState::Up(engine)),
            num_restarts: AtomicU64::new(0),
            num_answers: AtomicU64::new(0),
            num_requests: AtomicU64::new(0),
            is_resting: AtomicBool::new(false),
            watch,
        }
    }

    /// Wakes the watcher; no effect after it has given up.
    fn wake(&self) {
        if let Some(watch) = &self.watch {
            let _ = watch.send(());
        }
    }

    /// Wakes the watcher when this engine ends.
    fn report_end_of(&self, engine: &EngineClient) {
        if let Some(watch) = &self.watch {
            engine.drop_at_end(Box::new(EndReport(watch.clone())));
        }
    }

    fn count_request(&self) {
        self.num_requests.fetch_add(1, Ordering::SeqCst);
        if self.is_resting.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Returns the time until the watcher's next look at this engine; `None` to rest until it is woken.
    fn next_look(&self, pace: &mut WatchPace, engine: &EngineClient) -> Option<Duration> {
        let load = engine.last_load();
        let is_busy = load.num_waiting + load.num_running > 0;
        let look = pace.next_look(is_busy, self.num_requests.load(Ordering::SeqCst));
        self.is_resting.store(look.is_none(), Ordering::SeqCst);
        // A request that came before the store has not woken the watcher.
        let is_still = self.num_requests.load(Ordering::SeqCst) == pace.num_requests;
        look.or((!is_still).then_some(LOOK_EVERY))
    }

    fn get(&self) -> EngineState {
        self.engine.read().clone()
    }

    fn set(&self, state: EngineState) {
        *self.engine.write() = state;
    }
}

/// Wakes the watcher when it is dropped, which the engine does when it ends.
struct EndReport(Sender<()>);

impl Drop for EndReport {
    fn drop(&mut self) {
        let _ = self.0.send(()); // fails when the watcher has ended first
    }
}

/// When the watcher looks at the engine.
#[derive(Default)]
struct WatchPace {
    /// Requests until the last look.
    num_requests: u64,
    /// Looks in a row that found no work and no new request.
    num_quiet: u32,
}

impl WatchPace {
    /// Returns the time until the next look; `None` after [`QUIET_LOOKS`].
    fn next_look(&mut self, is_busy: bool, num_requests: u64) -> Option<Duration> {
        let is_quiet = !is_busy && num_requests == self.num_requests;
        self.num_requests = num_requests;
        self.num_quiet = if is_quiet { self.num_quiet + 1 } else { 0 };
        (self.num_quiet < QUIET_LOOKS).then_some(LOOK_EVERY)
    }
}

/// The state of the watcher thread.
struct EngineWatcher {
    /// Weak, so that the last user of the slot ends the engine.
    slot: Weak<SlotState>,
    inbox: Receiver<()>,
    recovery: Recovery,
    pace: WatchPace,
    /// Engines in a row that failed soon.
    num_short_lived: u32,
    /// Why the last engine ended or could not be built; `None` if unknown.
    exit_reason: Option<String>,
}

impl EngineWatcher {
    fn run(mut self) {
        let (mut up_since, mut num_answered) = (Instant::now(), 0);
        let mut next_look = Some(LOOK_EVERY);
        while !self.is_over(next_look) {
            let Some(slot) = self.slot.upgrade() else { return };
            let (EngineState::Up(engine) | EngineState::Doubted(engine)) = slot.get() else { return };
            if let Ok(notices) = engine.take_notices() {
                notices.iter().for_each(|notice| tracing::warn!("{notice}"));
                next_look = slot.next_look(&mut self.pace, &engine);
                slot.set(EngineState::Up(engine));
                continue;
            }
            next_look = Some(LOOK_EVERY);
            slot.set(EngineState::Down { back_at: Instant::now() + self.recovery.build_time });
            let answered = slot.num_answers.load(Ordering::Relaxed);
            drop(slot);
            let lasted = up_since.elapsed() >= LASTING || answered > num_answered;
            self.num_short_lived = if lasted { 0 } else { self.num_short_lived + 1 };
            self.exit_reason = wait_for_end(engine);
            let why = self.exit_reason.as_deref().map_or_else(String::new, |words| format!(": {words}"));
            tracing::error!("{} has stopped, and is brought back{why}", self.recovery.name);
            if self.num_short_lived > self.recovery.max_attempts {
                let count = self.num_short_lived;
                return self.give_up(&format!("has stopped {count} times in a row without an answer"));
            }
            if !self.bring_back() {
                return;
            }
            (up_since, num_answered) = (Instant::now(), answered);
        }
    }

    /// Waits for a report, at most `timeout`, or without a limit; true if the slot has been dropped.
    fn is_over(&self, timeout: Option<Duration>) -> bool {
        match timeout {
            Some(timeout) => matches!(self.inbox.recv_timeout(timeout), Err(RecvTimeoutError::Disconnected)),
            None => self.inbox.recv().is_err(),
        }
    }

    /// Restarts the engine; false if the slot has been dropped or all attempts failed.
    fn bring_back(&mut self) -> bool {
        for attempt in 0..self.recovery.max_attempts {
            let pause = self.pause(attempt);
            let ready_at = Instant::now() + pause;
            let Some(slot) = self.slot.upgrade() else { return false };
            slot.set(EngineState::Down { back_at: ready_at + self.recovery.build_time });
            drop(slot);
            while let Some(left) = ready_at.checked_duration_since(Instant::now()).filter(|d| !d.is_zero()) {
                if self.is_over(Some(left)) {
                    return false;
                }
            }
            let rebuild = &mut self.recovery.rebuild;
            let start = Instant::now();
            match catch_unwind(AssertUnwindSafe(rebuild)).unwrap_or_else(|_| Err("it panicked".to_owned())) {
                Ok(engine) => {
                    self.recovery.build_time = start.elapsed();
                    let Some(slot) = self.slot.upgrade() else { return false };
                    slot.num_restarts.fetch_add(1, Ordering::Relaxed);
                    slot.report_end_of(&engine);
                    slot.set(EngineState::Up(engine));
                    let seconds = start.elapsed().as_secs_f64();
                    tracing::warn!("{} is back after {seconds:.1} s of loading", self.recovery.name);
                    return true;
                }
                Err(error) => {
                    tracing::error!("{} could not be brought back: {error}", self.recovery.name);
                    self.exit_reason = Some(error);
                }
            }
        }
        let attempts = self.recovery.max_attempts;
        self.give_up(&format!("could not be brought back in {attempts} attempts"));
        false
    }

    fn give_up(&mut self, what: &str) {
        if let Some(slot) = self.slot.upgrade() {
            slot.set(EngineState::GivenUp);
        }
        let why =
            self.exit_reason.take().map_or_else(String::new, |words| format!("; the last time: {words}"));
        (self.recovery.gave_up)(format!("{} {what}{why}", self.recovery.name));
    }

    /// Returns the pause before an attempt: none before the first one, unless engines keep failing.
    fn pause(&self, attempt: u32) -> Duration {
        let num_before = self.num_short_lived.saturating_sub(1) + attempt;
        num_before.checked_sub(1).map_or(Duration::ZERO, |doublings| {
            let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
            self.recovery.pause.saturating_mul(factor).min(self.recovery.longest_pause)
        })
    }
}

/// Waits until the engine has freed its memory, which the next one needs. Returns why it ended; `None` if unknown.
fn wait_for_end(engine: EngineClient) -> Option<String> {
    let give_up_at = Instant::now() + UNWIND_TIME;
    while engine.is_alive() && Instant::now() < give_up_at {
        thread::sleep(Duration::from_millis(5));
    }
    engine.exit_reason()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watcher_rests_after_some_looks_without_work() {
        let mut pace = WatchPace::default();
        let quiet = |pace: &mut WatchPace, requests| {
            std::iter::repeat_with(|| pace.next_look(false, requests)).take_while(Option::is_some).count()
        };
        assert_eq!(quiet(&mut pace, 0) as u32, QUIET_LOOKS - 1);
        assert_eq!(pace.next_look(false, 0), None, "it stays at rest");
        assert_eq!(pace.next_look(true, 0), Some(LOOK_EVERY), "work");
        assert_eq!(quiet(&mut pace, 1) as u32, QUIET_LOOKS, "a request that has ended between two looks");
    }
}
