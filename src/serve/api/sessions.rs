//! `/v1/sessions`: what conversations a caller has, what of them is in memory, and what can be done to them
//! between turns.
//!
//! A session is two things: a conversation, which is precious, and a sequence of that name in engines, which
//! can be computed again. The engine is asked first, because it can refuse; what it does not know is no
//! error. A transient session is the second thing alone. Others' sessions are not there.

use std::time::Duration;

use axum::Json;
use axum::http::StatusCode;
use serde_json::{Map, Value, json};

use super::body::{JsonBody, session_name};
use super::listing::{self, known};
use super::session_host::{AskedSession, SessionHost};
use crate::App;
use crate::error::ApiError;
use crate::gate::owner::Caller;
use crate::sessions::SessionKey;
use crate::wire::{Fields, Problems};
use llmctl_base::Error;
use llmctl_engine::EngineClient;
use llmctl_engine::session::store::SessionName;

/// Longest wait of a removal for KV that is being saved.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// Empties a session; it stays, and a branch keeps what was said. Also for one that there is not.
pub async fn reset(asked: AskedSession) -> Result<Json<Value>, ApiError> {
    let reset = asked.answer(|host, caller, key| {
        let opened = known(host, host.open_known(&key))?;
        let mut branch = None;
        match opened {
            Some(mut opened) => {
                in_each(host, |engine| engine.reset_session(&key.engine_name()))?;
                branch = host.sessions().reset(&mut opened)?;
            }
            None => remove_transient(host, caller, &key.name)?,
        }
        let branch = branch.as_ref().map(SessionName::as_str);
        Ok(json!({"reset": true, "session_id": key.name.as_str(), "branch": branch}))
    });
    reset.await
}

/// Removes a session with its branches and all that was said. Also for one that there is not.
pub async fn delete(
    asked: AskedSession,
    listing::OnlyTransient(only_transient): listing::OnlyTransient,
) -> Result<Json<Value>, ApiError> {
    let closed = asked.answer(move |host, caller, key| {
        let mut branches = Vec::new();
        match host.sessions().exists(&key) && !only_transient {
            true => {
                branches = branches_of(host, &key);
                branches.iter().try_for_each(|branch| remove(host, &key.sibling(branch.clone())))?;
                remove(host, &key)?;
            }
            false => remove_transient(host, caller, &key.name)?,
        }
        let branches: Vec<&str> = branches.iter().map(SessionName::as_str).collect();
        Ok(json!({"closed": true, "session_id": key.name.as_str(), "branches": branches}))
    });
    closed.await
}

/// Those of a session; a branch has none of its own.
fn branches_of(host: &SessionHost, key: &SessionKey) -> Vec<SessionName> {
    let is_branch = host.sessions().read(key).is_ok_and(|(saved, _)| saved.branch().is_some());
    let branches = host.sessions().branches(key).ok().filter(|_| !is_branch).unwrap_or_default();
    branches.into_iter().map(|listed| listed.name).collect()
}

/// Removes a session, also from the engines and their pages on disk.
///
/// # Errors
/// `session_busy`; storage errors; 503 without an engine.
pub fn remove(host: &SessionHost, key: &SessionKey) -> Result<(), ApiError> {
    let engine_name = key.engine_name();
    in_each(host, |engine| engine.close_session(&engine_name))?;
    flush(host)?;
    known(host, host.sessions().remove(key))?;
    Ok(())
}

/// Puts KV that waits to be saved on disk, before it is looked for there.
///
/// # Errors
/// 503 without an engine.
pub fn flush(host: &SessionHost) -> Result<(), ApiError> {
    in_each(host, |engine| engine.flush_disk(FLUSH_TIMEOUT).map(drop))
}

/// Removes a transient session. The result of a request that is in one of its branches is dropped, and the
/// engine forgets it then.
fn remove_transient(host: &SessionHost, caller: &Caller, name: &SessionName) -> Result<(), ApiError> {
    let Some(removed) = host.sessions().transients().remove(caller, name.as_str()) else { return Ok(()) };
    for branch in removed.branches {
        in_each(host, |engine| match engine.close_session(&branch.name) {
            Err(Error::SessionBusy(_)) => Ok(()),
            closed => closed,
        })?;
        host.sessions().forget(&branch.name);
    }
    Ok(())
}

/// Begins a session with the turns of another: `{"to": ID, "turns": N}`, all turns without `turns`.
pub async fn fork(asked: AskedSession, JsonBody(body): JsonBody) -> Result<Json<Value>, ApiError> {
    let (to, turns) = fork_body(&asked.host, body)?;
    let forked = asked.answer(move |host, caller, old| {
        let new = SessionKey { owner: caller.owner().clone(), name: to };
        let num_turns = host.sessions().fork(&old, &new, turns).map_err(taken)?;
        if turns.is_none() {
            // If that fails, the next turn reuses as much as it finds.
            host.apps().iter().for_each(|app| drop(fork_in_memory(app, &old, &new)));
        }
        let (from, to) = (old.name.as_str(), new.name.as_str());
        Ok(json!({"forked": true, "session_id": to, "from": from, "turns": num_turns}))
    });
    forked.await
}

/// Reads the name of the new session, and how many turns it begins with; `None` is all.
///
/// # Errors
/// The mistake in the body; `invalid_session_id`.
pub fn fork_body(
    host: &SessionHost,
    body: Map<String, Value>,
) -> Result<(SessionName, Option<usize>), ApiError> {
    let read = |fields: &mut Fields<'_>| (required_text(fields, "to"), fields.size("turns"));
    let ((to, turns), _) = Problems::new(host.is_lenient()).read(body, read)?;
    Ok((session_name(&to).map_err(|error| error.param("to"))?, turns))
}

fn required_text(fields: &mut Fields<'_>, name: &str) -> String {
    fields.require(name);
    fields.text(name).unwrap_or_default()
}

/// Shares what is in memory; with an engine that is another's, only the tokens, whose KV may be on disk.
fn fork_in_memory(app: &App, from: &SessionKey, to: &SessionKey) -> Result<(), ApiError> {
    let (old, new) = (app.engine_of(Some(&from.engine_name()))?, app.engine_of(Some(&to.engine_name()))?);
    if old.is_same(&new) {
        return Ok(old.fork_session(&from.engine_name(), &to.engine_name())?);
    }
    let saved = app.sessions().read(to)?.0;
    match saved.tokens_of(&app.model().fingerprint) {
        Some(tokens) => Ok(new.restore_session(&to.engine_name(), tokens)?),
        None => Ok(()),
    }
}

/// Hands what engines hold and what is known of a session's prompts to the session that has its turns now. The turns are on disk
/// there already, so no failure counts: the next turn finds what it can, and computes the rest.
fn become_in_memory(host: &SessionHost, from: &SessionKey, to: &SessionKey) {
    let (old, new) = (from.engine_name(), to.engine_name());
    for app in host.apps() {
        if let (Ok(engine), Ok(next)) = (app.engine_of(Some(&old)), app.engine_of(Some(&new)))
            && engine.is_same(&next)
        {
            let _ = engine.fork_session(&old, &new);
        }
    }
    host.sessions().hand_over(&old, &new);
    let _ = in_each(host, |engine| engine.close_session(&old));
}

/// Puts a branch in its session's place: `{"branch": ID}`. What the session held becomes a branch.
pub async fn restore(asked: AskedSession, JsonBody(body): JsonBody) -> Result<Json<Value>, ApiError> {
    let branch = only_name(&asked.host, body, "branch")?;
    let restored = asked.answer(move |host, _, key| {
        let from = key.sibling(branch);
        let opened = host.open_known(&key);
        let mut opened = opened.map_err(|error| host.retriable(error.into()))?;
        in_each(host, |engine| engine.close_session(&key.engine_name()))?;
        let kept = host.sessions().restore(&mut opened, &from.name);
        let kept = kept.map_err(|error| host.retriable(error.into()))?;
        become_in_memory(host, &from, &key);
        let (name, branch) = (key.name.as_str(), from.name.as_str());
        let kept = kept.as_ref().map(SessionName::as_str);
        let turns = opened.saved().turns.len();
        Ok(json!({"restored": true, "session_id": name, "branch": branch, "turns": turns, "kept_as": kept}))
    });
    restored.await
}

/// Gives a session another name: `{"to": ID}`. A branch that gets a name of its own becomes a session.
pub async fn rename(asked: AskedSession, JsonBody(body): JsonBody) -> Result<Json<Value>, ApiError> {
    let to = only_name(&asked.host, body, "to")?;
    let renamed = asked.answer(move |host, caller, old| {
        let new = old.sibling(to);
        // A session of the caller's would hide one of the local user's that gets its name.
        if old != new && host.sessions().exists(&host.sessions().find(caller, &new.name)) {
            let message = format!("there is a session named {:?} already", new.name.as_str());
            return Err(ApiError::new(StatusCode::CONFLICT, Some("session_exists"), message).param("to"));
        }
        host.check()?;
        host.sessions().rename(&old, &new).map_err(|error| not_renamed(host, error))?;
        if old != new {
            become_in_memory(host, &old, &new);
        }
        Ok(json!({"renamed": true, "session_id": new.name.as_str(), "from": old.name.as_str()}))
    });
    renamed.await
}

/// Reads a body whose only member names a session.
///
/// # Errors
/// The mistake in the body; `invalid_session_id`.
pub fn only_name(
    host: &SessionHost,
    body: Map<String, Value>,
    member: &'static str,
) -> Result<SessionName, ApiError> {
    let (name, _) = Problems::new(host.is_lenient()).read(body, |fields| required_text(fields, member))?;
    session_name(&name).map_err(|error| error.param(member))
}

/// Asks every engine that is up: a session that has moved may have left something behind. There must be one; what goes down
/// meanwhile takes its sessions with it.
///
/// # Errors
/// 503 without an engine; what an engine refuses with.
pub fn in_each(
    host: &SessionHost,
    ask: impl Fn(&EngineClient) -> llmctl_base::Result<()>,
) -> Result<(), ApiError> {
    host.check()?;
    let mut refusal = Ok(());
    for app in host.apps() {
        for engine in app.engines().up() {
            let answer = ask(&engine);
            if matches!(answer, Err(Error::EngineGone)) {
                app.engine_lost(&engine);
                if app.engines().len() > 1 || host.apps().len() > 1 {
                    continue;
                }
            }
            refusal = refusal.and(known(host, answer).map(drop));
        }
    }
    refusal
}

/// A busy session may be free later; a name that is taken stays so.
fn not_renamed(host: &SessionHost, error: Error) -> ApiError {
    match error {
        Error::InvalidParameter { name: "session", .. } => taken(error),
        other => host.retriable(other.into()),
    }
}

/// A session of that name is a conflict, not a wrong value.
fn taken(error: Error) -> ApiError {
    match error {
        Error::InvalidParameter { name: "session", message } => {
            ApiError::new(StatusCode::CONFLICT, Some("session_exists"), message).param("to")
        }
        other => other.into(),
    }
}
