//! Limits on the requests and sessions of one engine: flags of `serve` and of `worker`.

use clap::Args;

use crate::cli::flags::args::{EngineArgs, EngineOptions, Sharing, TimeSpan, count};

const DEFAULT_PARALLEL: usize = 4;
const DEFAULT_MAX_WAITING: usize = 64;
const DEFAULT_MAX_SESSIONS: usize = 256;

/// Limits on the requests and sessions of an engine.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Capacity")]
pub struct CapacityArgs {
    /// Requests that are computed at the same time (default: 4)
    ///
    /// Each may use the whole context: --kv-memory is shared by all, and without it each gets memory for a full context as far
    /// as memory allows.
    #[arg(long, value_name = "N", value_parser = count(1..=1024))]
    pub parallel: Option<usize>,

    /// Requests that wait for their turn; more are refused, over HTTP with 429 (default: 64)
    #[arg(long, value_name = "N", hide_short_help = true)]
    pub max_waiting: Option<usize>,

    /// Sessions held ready at the same time (default: 256)
    ///
    /// One more takes the slot of the session that has been idle longest, which comes back when it is asked for again. On disk
    /// there may be any number. A worker may hold none, with 0.
    #[arg(long, value_name = "N", hide_short_help = true)]
    pub max_sessions: Option<usize>,

    /// Take a session's memory and slot when it has been idle this long, e.g. 30m (default: when others need them)
    ///
    /// Its turns and its KV stay on disk.
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
