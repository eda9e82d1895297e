//! What the server says about its work: one record per turn.

use std::time::Duration;

use crate::runtime::{Outcome, Started};

/// One finished request, as statistics see it.
#[derive(Debug, Clone)]
pub struct TurnRecord {
    /// The `x-request-id` in force.
    pub request_id: String,
    pub session: Option<String>,
    pub started: Option<Started>,
    pub outcome: Outcome,
    /// Times between tokens, in order; one less than there are tokens.
    pub inter_token: Vec<Duration>,
}

/// Takes records of what was done.
#[derive(Debug, Default)]
pub struct Observer {}

impl Observer {
    pub fn turn(&self, _record: &TurnRecord) {}
}
