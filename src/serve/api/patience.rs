//! Waiting for a session that has another request in it, here or in another process.
//!
//! Invariants: the wait ends at its deadline, or when the client has gone; a stream that waits for long has
//! begun, so that its reader hears that it waits, and a refusal then comes as an event of it.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use tokio::time::{Instant, sleep_until};

use super::blocking::blocking;
use super::generate::{Admitted, GenerateRequest, Progress, Reader, Update};
use crate::App;
use crate::error::ApiError;
use crate::sessions::{InSession, RequestSession, SessionTurn};
use llmctl_base::Error;

/// Time that a stream's head is held back, so that an early refusal has a status of its own.
const HEAD_AFTER: Duration = Duration::from_secs(1);

/// Interval for retrying a session that another process holds.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The time that a request has for waiting.
pub struct Patience<'a> {
    reader: &'a mut Reader,
    is_streamed: bool,
    begun: Instant,
    /// Nothing: as long as it takes.
    give_up_at: Option<Instant>,
    /// The error after the deadline.
    refusal: ApiError,
}

impl<'a> Patience<'a> {
    pub fn new(app: &App, request: &GenerateRequest, reader: &'a mut Reader) -> Self {
        let (begun, longest) = (Instant::now(), app.settings().session_wait);
        let left = |deadline: Duration| deadline.saturating_sub(request.begun.elapsed());
        let deadline = request.turn.limits.deadline.filter(|deadline| left(*deadline) < longest);
        let refusal = match (deadline, &request.session) {
            (Some(deadline), _) => Error::DeadlineExceeded { deadline }.into(),
            (None, Some(RequestSession::Stored(session))) => still_busy(session, longest),
            (None, _) => ApiError::internal("nothing is waited for"),
        };
        let give_up_at = begun.checked_add(deadline.map_or(longest, left));
        Self { reader, is_streamed: request.turn.is_streamed, begun, give_up_at, refusal }
    }

    /// Waits for the future until the deadline.
    ///
    /// # Errors
    /// The deadline has passed, or the client has left.
    pub async fn until<T>(&mut self, future: impl Future<Output = T>) -> Result<T, ApiError> {
        let mut future = pin!(future);
        let far = self.begun + Duration::from_secs(60 * 60 * 24 * 365);
        loop {
            let holds_head = self.is_streamed && self.reader.admitted.is_some();
            tokio::select! {
                biased;
                () = self.left() => return Err(self.refusal.clone()), // the client has gone, and takes no turn
                value = &mut future => return Ok(value),
                () = sleep_until(self.give_up_at.unwrap_or(far)), if self.give_up_at.is_some() => {
                    return Err(self.refusal.clone());
                }
                () = sleep_until(self.begun + HEAD_AFTER), if holds_head => self.open_head(),
            }
        }
    }

    /// Waits until the reader leaves.
    pub async fn left(&self) {
        self.reader.left().await;
    }

    fn open_head(&mut self) {
        self.reader.admit(Admitted::default());
        self.reader.send(Update::Progress(Progress::Session));
    }
}

/// Waits for the session's turn.
///
/// # Errors
/// 409 when that takes too long; 429 when too many wait already.
pub async fn turn(
    app: &App,
    session: &InSession,
    patience: &mut Patience<'_>,
) -> Result<Arc<SessionTurn>, ApiError> {
    let (caller, name) = (session.caller.clone(), session.name.clone());
    let key = blocking(app, move |app| Ok(app.sessions().find(&caller, &name))).await?;
    let most_waiting = app.engine()?.spec().config.max_waiting;
    Ok(Arc::new(patience.until(app.sessions().turn(&key, most_waiting)).await??))
}

fn still_busy(session: &InSession, waited: Duration) -> ApiError {
    let message = match waited.is_zero() {
        true => Error::SessionBusy(session.name.to_string()).to_string(),
        false => format!(
            "session {:?} has been busy with other requests for {} s (--session-wait)",
            session.name.as_str(),
            waited.as_secs_f64()
        ),
    };
    ApiError::new(StatusCode::CONFLICT, Some("session_busy"), message)
}

/// Returns true if the request may succeed a little later: another process has the session, or all slots have
/// requests in them.
pub fn may_pass(error: &ApiError) -> bool {
    matches!(error.code, Some("session_busy" | "capacity_exhausted"))
}
