//! The next turn of a session, with a model here or at an endpoint: its prompt, the messages that it adds,
//! and the session that keeps it.

use std::io::Write;
use std::sync::Arc;

use super::RunArgs;
use super::report::Report;
use super::tool_rounds::ToolRounds;
use crate::cli::error::{CommandError, Exit};
use crate::cli::model::load::Loaded;
use crate::cli::sessions;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::report::counted;
use llmctl_engine::Finish;
use llmctl_engine::session::store::{
    ModelFingerprint, SavedSession, SavedTurn, SessionName, SessionStore, SessionWriter,
};
use llmctl_engine::turn::{Answer, Finished, SessionChat};
use llmctl_image::ImageSet;
use llmctl_template::{Content, Message, Role, ToolCall};

/// The next turn's prompt.
pub struct Next {
    pub content: Content,
    pub system: Option<String>,
    /// Files of the images in `content`.
    pub images: ImageSet,
}

impl Next {
    /// Refuses images for a model that reads text alone.
    ///
    /// # Errors
    /// That it does, and what to do.
    pub fn check_sight(&self, llm: &Loaded) -> Result<(), CommandError> {
        if self.images.is_empty() { Ok(()) } else { llm.vision().map(drop) }
    }
}

/// Returns the text of a message, without its images; empty if it has none.
pub fn text(message: &Message) -> String {
    message.content.as_ref().map(|content| content.texts().concat()).unwrap_or_default()
}

/// A turn that is to be answered: its prompt, and the flags and tools for it.
pub struct RunTurn<'r, 'a> {
    pub args: &'r RunArgs,
    pub next: Next,
    pub rounds: &'r mut ToolRounds<'a>,
    pub terminal: &'r Terminal,
}

/// A session's name and store, and its lock if it exists.
pub struct SessionPlace<'a> {
    pub name: &'a SessionName,
    pub store: &'a SessionStore,
    pub opened: Option<SessionWriter>,
}

/// Takes the turn in a session, which begins here if it does not exist, or in a conversation that is not saved. A session that this
/// begins and that comes to no turn is removed again.
///
/// # Errors
/// The session cannot be created, or has another system prompt; those of `take`.
pub fn with_chat(
    place: Option<SessionPlace<'_>>,
    model: ModelFingerprint,
    turn: RunTurn<'_, '_>,
    take: impl FnOnce(Option<&SessionName>, &mut SessionChat, RunTurn<'_, '_>) -> Result<Exit, CommandError>,
) -> Result<Exit, CommandError> {
    let Some(SessionPlace { name, store, opened }) = place else {
        return take(None, &mut SessionChat::new(model), turn);
    };
    let is_new = opened.is_none();
    let writer = match opened {
        Some(writer) => writer,
        None => store.open_or_create(name, &model).map_err(sessions::explain)?,
    };
    let mut session_chat = SessionChat::resume(writer, model);
    check_system(session_chat.saved(), &turn)?;
    note_session(name, &session_chat, turn.terminal);
    let exit = take(Some(name), &mut session_chat, turn);
    if is_new {
        let _ = session_chat.remove_if_empty(); // an empty session is listed and does no harm
    }
    exit
}

fn note_session(name: &SessionName, session_chat: &SessionChat, terminal: &Terminal) {
    let saved = session_chat.saved();
    let turns = counted(saved.turns.len(), "turn");
    terminal.note(match saved.num_tokens() {
        _ if saved.turns.is_empty() => format!("new session {name}"),
        0 => format!("continuing session {name} ({turns})"), // an endpoint has answered them
        tokens => format!("continuing session {name} ({turns}, {})", counted(tokens, "token")),
    });
    session_chat.notices().iter().for_each(|notice| terminal.note(notice));
}

/// Returns a message without a result for each call at the end of the last turn that has none: llmctl was
/// ended, the user stopped the call, or no server could run it. A call that a server has received may have
/// run. Servers and templates want a result for each call before the next message.
pub fn unanswered(turns: &[Arc<SavedTurn>]) -> Vec<Message> {
    let last = turns.last().and_then(|saved| saved.turn.messages.last());
    let calls = last.map(|message| message.tool_calls.as_slice()).unwrap_or_default();
    let no_result = |call: &ToolCall| {
        let mut message = Message::new(Role::Tool, "error: there is no result of the call; it may have run");
        (message.tool_call_id, message.name) = (call.id.clone(), Some(call.name.clone()));
        message
    };
    calls.iter().map(no_result).collect()
}

/// Says what a session keeps of an answer that was cut or is empty.
pub fn note_kept<W: Write>(
    finished: Finished,
    answer: &Answer,
    name: Option<&SessionName>,
    report: &mut Report<'_, W>,
) {
    let Some(name) = name else { return };
    match finished {
        Finished::Kept if answer.outcome.finish == Finish::Cancelled => {
            report.note(format!("session {name}: the answer so far is kept as a cancelled turn"));
        }
        Finished::Kept => {}
        Finished::Empty => report.note(format!("session {name}: nothing was answered, so no turn is kept")),
    }
}

/// Returns the messages that the next turn adds. The system prompt belongs to the first turn.
pub fn messages(saved: &SavedSession, next: Next) -> Vec<Message> {
    let system = next.system.filter(|_| saved.turns.is_empty()).map(Message::system);
    let before = unanswered(&saved.turns).into_iter().chain(system);
    before.chain([Message::user(next.content)]).collect()
}

/// Returns a conversation that is only looked at, and the messages of its next prompt.
pub fn looked_at(
    saved: Option<SavedSession>,
    model: ModelFingerprint,
    next: Next,
) -> (SessionChat, Vec<Message>) {
    let session_chat = match saved {
        Some(saved) => SessionChat::look_at(saved, model),
        None => SessionChat::new(model),
    };
    let messages = session_chat.followed_by(messages(session_chat.saved(), next)).messages;
    (session_chat, messages)
}

/// A conversation has one system prompt, the one that it began with; the command line cannot ask for another.
pub fn check_system(saved: &SavedSession, turn: &RunTurn<'_, '_>) -> Result<(), CommandError> {
    let system = turn.next.system.as_deref().filter(|_| turn.args.prompt.is_system_given);
    if system.is_none() || system == saved.system() || saved.turns.is_empty() {
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
