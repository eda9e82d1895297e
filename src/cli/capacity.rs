//! How many requests and sessions one engine serves: the flags of `serve` and of `worker`, which differ in their help only.

use clap::Args;
use clap::builder::RangedU64ValueParser;

use super::args::{EngineArgs, EngineOptions, Sharing, TimeSpan};

const DEFAULT_PARALLEL: usize = 4;
const DEFAULT_MAX_WAITING: usize = 64;
const DEFAULT_MAX_SESSIONS: usize = 256;

/// How many requests and sessions `serve` takes.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Capacity")]
pub struct CapacityArgs {
    /// Requests that are computed at the same time (default: 4)
    ///
    /// Each may use the whole context: --kv-memory is theirs together, and without it there is a full context for each as far
    /// as memory allows.
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=1024))]
    pub parallel: Option<usize>,

    /// Requests that wait for their turn; more get 429 (default: 64)
    #[arg(long, value_name = "N", hide_short_help = true)]
    pub max_waiting: Option<usize>,

    /// Sessions held ready at the same time (default: 256)
    ///
    /// One more takes the slot of the one idle longest, which is brought back when it is asked for again. On disk there may be
    /// any number.
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..), hide_short_help = true)]
    pub max_sessions: Option<usize>,

    /// Take a session's memory and slot when it has been idle this long, e.g. 30m (default: when others need them)
    ///
    /// What it has said stays, and its KV stays on disk.
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub session_ttl: Option<TimeSpan>,
}

/// How many requests and sessions `worker` takes.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Capacity")]
pub struct WorkerCapacityArgs {
    /// Requests that are computed at the same time (default: 4)
    ///
    /// Each may use the whole context: --kv-memory is theirs together, and without it there is a full context for each as far
    /// as memory allows.
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=1024))]
    pub parallel: Option<usize>,

    /// Requests that wait for their turn; more are refused (default: 64)
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(..=1_000_000), hide_short_help = true)]
    pub max_waiting: Option<usize>,

    /// Named sessions kept at the same time, a new one in place of the one idle longest; 0: none (default: 256)
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(..=1_000_000), hide_short_help = true)]
    pub max_sessions: Option<usize>,

    /// Take a session's memory and slot when it has been idle this long, e.g. 30m (default: when others need them)
    ///
    /// Its KV stays on disk.
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub session_ttl: Option<TimeSpan>,
}

impl CapacityArgs {
    /// Returns the options of an engine with this capacity.
    pub fn options(&self, engine: &EngineArgs) -> EngineOptions {
        let sharing = Sharing {
            max_running: self.parallel.unwrap_or(DEFAULT_PARALLEL),
            max_waiting: self.max_waiting.unwrap_or(DEFAULT_MAX_WAITING),
            max_sessions: self.max_sessions.unwrap_or(DEFAULT_MAX_SESSIONS),
            session_ttl: self.session_ttl.map(|span| span.0),
        };
        EngineOptions { sharing, ..engine.resolve(true) }
    }
}

impl WorkerCapacityArgs {
    /// Returns the options of an engine with this capacity.
    pub fn options(&self, engine: &EngineArgs) -> EngineOptions {
        let Self { parallel, max_waiting, max_sessions, session_ttl } = *self;
        CapacityArgs { parallel, max_waiting, max_sessions, session_ttl }.options(engine)
    }
}
