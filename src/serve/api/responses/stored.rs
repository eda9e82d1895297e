//! Stored responses: turns of stored sessions whose notes hold response objects.
//!
//! Invariants: an id is found only in the sessions that its caller sees; deleting a response erases its turn
//! where no later turn follows it, and otherwise only what the client could ask for, because the later turns
//! are about it.

use serde_json::{Value, json};
use uuid::Uuid;

use super::super::session_host::SessionHost;
use super::super::sessions;
use crate::error::ApiError;
use crate::gate::owner::Caller;
use crate::sessions::{SessionDirectory, SessionKey, log_forgotten};
use llmctl_base::Error;
use llmctl_engine::session::store::{SavedSession, SessionName};
use llmctl_template::Message;

/// Begins the ids of responses, and the names of the sessions that this API makes.
const PREFIX: &str = "resp_";

/// Characters of the random part of an id that names the turn.
const TURN_CHARS: usize = 16;

/// Member of a note: the response object, or that it was deleted.
const RESPONSE: &str = "response";
const DELETED: &str = "deleted";

/// A stored response.
pub struct StoredResponse {
    /// The session that new turns belong to, themselves or as branches.
    pub session: SessionName,
    /// The turn and its copies in branches, the best one to continue first.
    places: Vec<TurnPlace>,
}

/// A turn of a session or branch.
struct TurnPlace {
    key: SessionKey,
    saved: SavedSession,
    /// Index of the turn.
    turn: usize,
}

impl TurnPlace {
    fn in_session(key: SessionKey, saved: SavedSession, id: &str) -> Option<Self> {
        let note = |turn: usize| saved.turns[turn].note.as_ref();
        let is_it = |turn: &usize| note(*turn).is_some_and(|note| note[RESPONSE]["id"] == id);
        let turn = (0..saved.turns.len()).find(is_it)?;
        Some(Self { key, saved, turn })
    }

    fn is_last(&self) -> bool {
        self.turn + 1 == self.saved.turns.len()
    }
}

impl StoredResponse {
    pub fn object(&self) -> &Value {
        let place = &self.places[0];
        place.saved.turns[place.turn].note.as_ref().map_or(&Value::Null, |note| &note[RESPONSE])
    }

    /// Returns the conversation up to the response, without the instructions, which hold for one response only.
    pub fn messages(&self) -> Vec<Message> {
        let place = &self.places[0];
        let turns = &place.saved.turns[..=place.turn];
        let messages = turns.iter().flat_map(|saved| saved.turn.messages.iter().cloned());
        let num_instructions = usize::from(!self.object()["instructions"].is_null());
        messages.skip(num_instructions).collect()
    }
}

/// Returns a name for a session that no other has.
pub fn new_session() -> String {
    format!("{PREFIX}{}", &Uuid::new_v4().simple().to_string()[..24])
}

/// Returns an id for a new response of a session.
pub fn new_id(session: &str) -> String {
    let turn = Uuid::new_v4().simple().to_string();
    let prefix = if session.starts_with(PREFIX) { "" } else { PREFIX };
    format!("{prefix}{session}_{}", &turn[..TURN_CHARS])
}

/// Returns the names that the session of an id may have.
fn sessions_of(id: &str) -> Vec<SessionName> {
    let Some((session, turn)) = id.rsplit_once('_') else { return Vec::new() };
    if turn.len() != TURN_CHARS || !session.starts_with(PREFIX) {
        return Vec::new();
    }
    let names = [Some(session), session.strip_prefix(PREFIX)];
    names.into_iter().flatten().filter_map(|name| SessionName::new(name).ok()).collect()
}

/// Finds a response by its id; `None` if the caller has none of it.
///
/// # Errors
/// Storage errors.
pub fn find(
    directory: &SessionDirectory,
    caller: &Caller,
    id: &str,
) -> Result<Option<StoredResponse>, ApiError> {
    for session in sessions_of(id) {
        let key = directory.find(caller, &session);
        let mut places = places(directory, &key, id)?;
        if !places.is_empty() {
            places.sort_by_key(|place| !place.is_last());
            return Ok(Some(StoredResponse { session, places }));
        }
    }
    Ok(None)
}

/// Returns the places of a response in a session and its branches.
fn places(directory: &SessionDirectory, key: &SessionKey, id: &str) -> Result<Vec<TurnPlace>, ApiError> {
    let saved = match directory.read(key) {
        Err(Error::SessionNotFound(_)) => return Ok(Vec::new()),
        read => read?.0,
    };
    let mut places: Vec<TurnPlace> = TurnPlace::in_session(key.clone(), saved, id).into_iter().collect();
    for listed in directory.branches(key)? {
        let branch = key.sibling(listed.name);
        if branch != *key
            && let Ok((saved, _)) = directory.read(&branch)
        {
            places.extend(TurnPlace::in_session(branch, saved, id));
        }
    }
    Ok(places)
}

/// Deletes a response everywhere. A session of this API that has no turn left is removed.
///
/// # Errors
/// `session_busy`; storage errors; 503 without an engine.
pub fn delete(host: &SessionHost, response: StoredResponse) -> Result<(), ApiError> {
    let mut root = None;
    for TurnPlace { key, turn, .. } in response.places {
        let is_made_here = response.session.as_str().starts_with(PREFIX);
        let is_empty = delete_in(host, &key, turn, is_made_here)?;
        let is_branch = key.name != response.session;
        if is_empty && is_branch {
            sessions::remove(host, &key)?;
        }
        if is_made_here {
            root = Some(SessionKey { owner: key.owner, name: response.session.clone() });
        }
    }
    root.map_or(Ok(()), |root| remove_if_empty(host, &root))
}

/// Deletes a response in one session; returns whether no turn is left. Turns at the end whose responses are deleted are undone, and
/// erased from a session that only this API writes to.
fn delete_in(
    host: &SessionHost,
    key: &SessionKey,
    turn: usize,
    is_made_here: bool,
) -> Result<bool, ApiError> {
    let opened = host.open_known(key);
    let mut opened = opened.map_err(|error| host.retriable(error.into()))?;
    opened.set_note(turn + 1, json!({DELETED: true}))?;
    let is_kept = |note: &Option<Value>| !note.as_ref().is_some_and(|note| note[DELETED] == true);
    let num_kept =
        opened.saved().turns.iter().rposition(|saved| is_kept(&saved.note)).map_or(0, |last| last + 1);
    if num_kept < opened.saved().turns.len() {
        let name = key.engine_name();
        sessions::in_each(host, |engine| engine.reset_session(&name))?;
        opened.rewind(num_kept)?;
    }
    if is_made_here {
        sessions::flush(host)?;
        log_forgotten(&opened.compact()?);
    }
    Ok(num_kept == 0)
}

/// Removes a session without turns, unless branches belong to it.
fn remove_if_empty(host: &SessionHost, key: &SessionKey) -> Result<(), ApiError> {
    let Ok((saved, _)) = host.sessions().read(key) else { return Ok(()) };
    let is_empty = saved.turns.is_empty() && host.sessions().branches(key)?.is_empty();
    if is_empty { sessions::remove(host, key) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_leads_to_its_session() {
        for session in [new_session(), "mine".to_owned(), "a_b~1".to_owned()] {
            let id = new_id(&session);
            assert!(id.starts_with("resp_"), "{id}");
            assert!(sessions_of(&id).iter().any(|name| name.as_str() == session), "{id}");
            assert_ne!(new_id(&session), id);
        }
        for foreign in ["", "resp_1", "resp_68af2b4ddc5c8199b6d1f0e2a3c4d5e6", "x_0123456789abcdef"] {
            assert!(sessions_of(foreign).is_empty(), "{foreign}");
        }
    }
}
