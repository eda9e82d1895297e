//! The way to one engine, a thread or a worker process, and the engine's way back after it was lost.
//!
//! A panic in a step fails that step's requests and no more; what is meant here is the loss of the thread itself, or of the
//! process. A watching thread then builds the engine anew, with pauses that grow while it does not last, and gives up after so
//! many failures, or so many engines that came to nothing, in a row. Whoever asks meanwhile is told when to come back. Sessions
//! are not this file's matter: what they had on disk is found there again.
//!
//! Invariant: a report of loss that is late, about an engine that has been replaced, costs the new one no request: it is
//! asked before it is given up.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::error::ApiError;
use crate::runtime::EngineClient;

/// How often the watching thread looks after the engine, and passes its notices on.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long an engine that is gone may take to give its memory back before the next one is built.
const UNWIND_TIME: Duration = Duration::from_secs(30);

/// An engine that lasted this long, or has answered a request, is not held responsible for what came before.
const LASTING: Duration = Duration::from_secs(60);

const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// How a lost engine comes back.
pub struct Recovery {
    /// What it is called in the log: `the engine`, `worker 2`.
    pub name: String,
    /// Makes a new engine of the same model, or says why it cannot.
    pub rebuild: Box<dyn FnMut() -> Result<EngineClient, String> + Send>,
    /// How long that takes, as far as is known.
    pub build_time: Duration,
    /// The first attempt is made at once; this is the pause before the second, and each is twice the one before.
    pub pause: Duration,
    /// Failures in a row after which it is given up, and engines in a row that came to nothing.
    pub max_attempts: u32,
    /// Told when it has been given up, and why.
    pub gave_up: Box<dyn FnMut(String) + Send>,
}

/// What can be said of an engine's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    Up,
    /// Lost, or said to be; it is being brought back.
    Down,
    /// Not brought back any more.
    GivenUp,
}

impl Standing {
    /// Its name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Standing::Up => "up",
            Standing::Down => "restarting",
            Standing::GivenUp => "failed",
        }
    }
}

/// Holds the engine that is in use.
pub struct EngineSlot {
    shared: Arc<Shared>,
    /// Wakes the watching thread; it ends when this goes.
    watch: Option<Sender<()>>,
}

struct Shared {
    state: RwLock<State>,
    num_restarts: AtomicU64,
    num_answers: AtomicU64,
}

#[derive(Clone)]
enum State {
    Up(EngineClient),
    /// Somebody says that it is gone; to be asked.
    Doubted(EngineClient),
    Down {
        back_at: Instant,
    },
    GivenUp,
}

impl EngineSlot {
    /// Without recovery: an engine that is lost stays lost.
    pub fn new(engine: EngineClient) -> Self {
        let shared = Shared {
            state: RwLock::new(State::Up(engine)),
            num_restarts: AtomicU64::new(0),
            num_answers: AtomicU64::new(0),
        };
        Self { shared: Arc::new(shared), watch: None }
    }

    /// # Errors
    /// The system's, when it has no thread to give.
    pub fn with_recovery(engine: EngineClient, recovery: Recovery) -> std::io::Result<Self> {
        let slot = Self::new(engine);
        let (sender, inbox) = mpsc::channel();
        let watch = Watch {
            slot: Arc::downgrade(&slot.shared),
            inbox,
            recovery,
            num_short_lived: 0,
            exit_reason: None,
        };
        thread::Builder::new().name("engine-watch".to_owned()).spawn(move || watch.run())?;
        Ok(Self { watch: Some(sender), ..slot })
    }

    /// # Errors
    /// 503 while there is none.
    pub fn get(&self) -> Result<EngineClient, ApiError> {
        match self.shared.state() {
            State::Up(engine) if engine.is_alive() => Ok(engine),
            State::Up(_) => {
                self.lost();
                Err(ApiError::engine_down())
            }
            State::Doubted(_) => Err(ApiError::engine_down().retry_after(LOOK_EVERY)),
            State::Down { back_at } => {
                Err(ApiError::engine_down().retry_after(back_at.saturating_duration_since(Instant::now())))
            }
            State::GivenUp => Err(ApiError::engine_down().retry_after(LONGEST_PAUSE)),
        }
    }

    /// A request found that the engine is gone.
    pub fn lost(&self) {
        let doubted = |state: &State| match state {
            State::Up(engine) if self.watch.is_some() => State::Doubted(engine.clone()),
            State::Up(_) => State::GivenUp,
            other => other.clone(),
        };
        {
            let mut state = self.shared.state.write().unwrap_or_else(PoisonError::into_inner);
            *state = doubted(&state);
        }
        if let Some(watch) = &self.watch {
            // The watching thread ends before this only when the engine has been given up.
            let _ = watch.send(());
        }
    }

    /// How often the engine has been brought back.
    pub fn num_restarts(&self) -> u64 {
        self.shared.num_restarts.load(Ordering::Relaxed)
    }

    /// A request has come to its end, which speaks for the engine.
    pub fn answered(&self) {
        self.shared.num_answers.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether this is the engine in use.
    pub fn holds(&self, engine: &EngineClient) -> bool {
        match self.shared.state() {
            State::Up(own) | State::Doubted(own) => own.is_same(engine),
            State::Down { .. } | State::GivenUp => false,
        }
    }

    pub fn standing(&self) -> Standing {
        match self.shared.state() {
            State::Up(engine) if engine.is_alive() => Standing::Up,
            State::Up(_) | State::Doubted(_) | State::Down { .. } => Standing::Down,
            State::GivenUp => Standing::GivenUp,
        }
    }
}

impl Shared {
    fn state(&self) -> State {
        self.state.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, state: State) {
        *self.state.write().unwrap_or_else(PoisonError::into_inner) = state;
    }
}

/// The watching thread's own.
struct Watch {
    /// Weak, so that the last user of the slot ends the engine.
    slot: Weak<Shared>,
    inbox: Receiver<()>,
    recovery: Recovery,
    /// Engines in a row that did not last.
    num_short_lived: u32,
    /// What the last one that was lost, or could not be built, said.
    exit_reason: Option<String>,
}

impl Watch {
    fn run(mut self) {
        let (mut up_since, mut num_answered) = (Instant::now(), 0);
        while !self.is_over(LOOK_EVERY) {
            let Some(slot) = self.slot.upgrade() else { return };
            let (State::Up(engine) | State::Doubted(engine)) = slot.state() else { return };
            if let Ok(notices) = engine.take_notices() {
                notices.iter().for_each(|notice| tracing::warn!("{notice}"));
                slot.set(State::Up(engine));
                continue;
            }
            slot.set(State::Down { back_at: Instant::now() + self.recovery.build_time });
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

    /// Waits so long for news; true when nobody uses the slot any more.
    fn is_over(&self, timeout: Duration) -> bool {
        matches!(self.inbox.recv_timeout(timeout), Err(RecvTimeoutError::Disconnected))
    }

    /// False when there is nothing more to do for this thread.
    fn bring_back(&mut self) -> bool {
        for attempt in 0..self.recovery.max_attempts {
            let pause = self.pause(attempt);
            let ready_at = Instant::now() + pause;
            let Some(slot) = self.slot.upgrade() else { return false };
            slot.set(State::Down { back_at: ready_at + self.recovery.build_time });
            drop(slot);
            while let Some(left) = ready_at.checked_duration_since(Instant::now()).filter(|d| !d.is_zero()) {
                if self.is_over(left) {
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
                    slot.set(State::Up(engine));
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
            slot.set(State::GivenUp);
        }
        let why =
            self.exit_reason.take().map_or_else(String::new, |words| format!("; the last time: {words}"));
        (self.recovery.gave_up)(format!("{} {what}{why}", self.recovery.name));
    }

    /// The first attempt is made at once, unless engines do not last.
    fn pause(&self, attempt: u32) -> Duration {
        let num_before = self.num_short_lived.saturating_sub(1) + attempt;
        num_before.checked_sub(1).map_or(Duration::ZERO, |doublings| {
            let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
            self.recovery.pause.saturating_mul(factor).min(LONGEST_PAUSE)
        })
    }
}

/// Its memory is needed for the next one. Returns how it ended, where that is known.
fn wait_for_end(engine: EngineClient) -> Option<String> {
    let give_up_at = Instant::now() + UNWIND_TIME;
    while engine.is_alive() && Instant::now() < give_up_at {
        thread::sleep(Duration::from_millis(5));
    }
    engine.exit_reason()
}
