//! The next turn of a session, with a model here or at an endpoint: its prompt, the messages that it adds, and the session that
//! keeps it.

use std::sync::Arc;

use crate::cli::error::{CommandError, Exit};
use crate::cli::sessions;
use crate::cli::terminal::Terminal;
use crate::runtime::session::store::{
    ModelFingerprint, SavedSession, SavedTurn, SessionName, SessionStore, SessionWriter,
};
use crate::runtime::turn::{Finished, SessionChat};
use crate::template::{Message, Role, ToolCall};

/// The next turn's prompt.
pub struct Next {
    pub text: String,
    pub system: Option<String>,
}

/// A session's name and store, and its lock if it exists.
pub struct SessionPlace<'a> {
    pub name: &'a SessionName,
    pub store: &'a SessionStore,
    pub opened: Option<SessionWriter>,
}

impl SessionPlace<'_> {
    /// Begins the session if it does not exist, and works in it. One that this begins and that comes to no turn is removed again.
    ///
    /// # Errors
    /// The session cannot be created; those of `work`.
    pub fn with_chat(
        self,
        model: ModelFingerprint,
        work: impl FnOnce(&SessionName, &mut SessionChat) -> Result<Exit, CommandError>,
    ) -> Result<Exit, CommandError> {
        let is_new = self.opened.is_none();
        let writer = match self.opened {
            Some(writer) => writer,
            None => self.store.open_or_create(self.name, &model).map_err(sessions::explain)?,
        };
        let mut session_chat = SessionChat::resume(writer, model);
        let exit = work(self.name, &mut session_chat);
        if is_new {
            let _ = session_chat.remove_if_empty(); // an empty session is listed, and harms nobody
        }
        exit
    }
}

/// Returns the messages that say of calls which the last turn ends with that they were not run: llmctl was ended, the user stopped
/// them, or there was nobody to run them. Servers and templates want a result for each call before the next message.
pub fn unanswered(turns: &[Arc<SavedTurn>]) -> Vec<Message> {
    let last = turns.last().and_then(|saved| saved.turn.messages.last());
    let calls = last.map(|message| message.tool_calls.as_slice()).unwrap_or_default();
    let not_run = |call: &ToolCall| {
        let mut message = Message::new(Role::Tool, "error: the call was not run");
        (message.tool_call_id, message.name) = (call.id.clone(), Some(call.name.clone()));
        message
    };
    calls.iter().map(not_run).collect()
}

/// Says what is kept of an answer that was cut or is empty.
pub fn note_kept(finished: Finished, is_cut: bool, name: &SessionName, terminal: &Terminal) {
    match finished {
        Finished::Kept if is_cut => {
            terminal.note(format!("session {name}: the answer so far is kept as a cancelled turn"));
        }
        Finished::Kept => {}
        Finished::Empty => terminal.note(format!("session {name}: nothing was answered, so no turn is kept")),
    }
}

/// Returns the messages that the next turn adds. The system prompt belongs to the first turn.
pub fn messages(saved: &SavedSession, next: Next) -> Vec<Message> {
    let system = next.system.filter(|_| saved.turns.is_empty()).map(Message::system);
    let before = unanswered(&saved.turns).into_iter().chain(system);
    before.chain([Message::user(next.text)]).collect()
}

/// A conversation has one system prompt, the one that it began with.
pub fn check_system(saved: &SavedSession, next: &Next) -> Result<(), CommandError> {
    let is_same = next.system.is_none() || next.system.as_deref() == saved.system();
    if is_same || saved.turns.is_empty() {
        return Ok(());
    }
    let began = match saved.system() {
        Some(_) => "the session began with another system prompt",
        None => "the session began without a system prompt",
    };
    let hint = "leave --system out to continue with it; start anew with another --session NAME, or after \
                `llmctl sessions remove NAME`";
    Err(CommandError::usage(began).hint(hint))
}
