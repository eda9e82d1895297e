//! The next turn of a session: its prompt, and the messages that it adds.

use crate::cli::error::CommandError;
use crate::runtime::session::store::SavedSession;
use crate::template::Message;

/// The next turn's prompt.
pub struct Next {
    pub text: String,
    pub system: Option<String>,
}

/// Returns the messages that the next turn adds. The system prompt belongs to the first turn.
pub fn messages(saved: &SavedSession, next: Next) -> Vec<Message> {
    let system = next.system.filter(|_| saved.turns.is_empty()).map(Message::system);
    system.into_iter().chain([Message::user(next.text)]).collect()
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
