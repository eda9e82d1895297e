//! The state of a chat that needs neither a terminal nor a model: the conversation, where it is kept, and
//! what the user has set.

use std::sync::Arc;

use super::shortened;
use crate::cli::declared_tools::Toolbox;
use crate::cli::error::{CommandError, Exit};
use crate::cli::images::{GivenImage, shown};
use crate::cli::run::settings::AnswerSettings;
use crate::cli::think::Think;
use llmctl_engine::session::store::{BranchReason, SavedSession, SavedTurn, SessionName};
use llmctl_engine::turn::SessionChat;
use llmctl_engine::{EngineSessionName, GrammarSource, Outcome, Started};
use llmctl_image::ImageSet;
use llmctl_template::{Message, Role};

/// The effect of a command or a message on what the chat does next.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect {
    Prompt,
    /// Prompt with this text on the line.
    Edit(String),
    Leave(Exit),
}

/// The state of one chat.
pub struct ChatState {
    pub session_chat: SessionChat,
    pub keeping: SavePlace,
    /// New conversations are not saved.
    pub is_ephemeral: bool,
    /// The system prompt for the next first turn.
    pub system: Option<String>,
    pub settings: AnswerSettings,
    pub think: Think,
    pub toolbox: Option<Toolbox>,
    /// The output constraint of answers.
    pub schema: Option<AnswerSchema>,
    /// Files for the next message.
    pub attached: Vec<Attachment>,
    /// Images for the next message.
    pub images: Vec<GivenImage>,
    /// Files of the images that this chat has given so far.
    pub files: ImageSet,
    /// The last answer, or prompt of a session, for /stats, /why and /compare.
    pub last: Option<LastTurn>,
    /// The number of turns before the one that is being edited.
    pub editing: Option<usize>,
    /// Turns that the last /undo, /redo, /retry, /edit or /reset removed.
    pub taken: Option<(TakenTurns, BranchReason)>,
    /// Results of calls that no answer has followed yet.
    pub results: Option<CallResults>,
    /// A message that is not part of the conversation yet, and the number of turns before it.
    pub pending: Option<(usize, String)>,
    /// The warning of a nearly full context has been given.
    pub has_warned: bool,
}

/// The results of the calls that a turn ends with.
pub struct CallResults {
    pub turn: Arc<SavedTurn>,
    pub messages: Vec<Message>,
}

/// Turns that a command took away, which /redo brings back.
#[derive(Debug, Clone)]
pub enum TakenTurns {
    /// The whole conversation as it was, in a branch of the session.
    Branch(SessionName),
    /// The whole conversation as it was, if it is not saved.
    Unsaved(Box<SavedSession>),
}

/// Place of the saved conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SavePlace {
    Nowhere,
    /// In a session that is created with the first message.
    Planned,
    Saved {
        name: SessionName,
        /// Named after the time instead of by the user.
        is_automatic: bool,
        /// Created by this chat, without a turn so far.
        is_fresh: bool,
    },
}

/// The output constraint of answers.
pub struct AnswerSchema {
    /// The schema as the user named it.
    pub name: String,
    pub source: GrammarSource,
}

/// A file that is sent with the next message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    pub name: String,
    pub text: String,
}

/// The engine's report of a request.
#[derive(Debug, Clone, Default)]
pub struct LastTurn {
    pub started: Option<Started>,
    /// `None` if its KV was only looked up.
    pub outcome: Option<Outcome>,
}

/// A request for an answer.
#[derive(Debug, Clone, Default)]
pub struct AnswerRequest {
    /// Number of turns before it; it replaces later ones.
    pub kept: usize,
    /// The messages after those turns.
    pub added: Vec<Message>,
    /// True if the attached files are part of it.
    pub has_files: bool,
    /// Tokens of an answer that is continued.
    pub begun: Vec<u32>,
    pub seed: Option<u64>,
    /// Why it replaces turns, which stay as a branch; `None` if it replaces none.
    pub replaces: Option<BranchReason>,
}

impl ChatState {
    /// Returns the conversation so far.
    pub fn saved(&self) -> &SavedSession {
        self.session_chat.saved()
    }

    pub fn turns(&self) -> &[Arc<SavedTurn>] {
        &self.saved().turns
    }

    /// Returns the session's name; `None` if it is not saved.
    pub fn name(&self) -> Option<&SessionName> {
        match &self.keeping {
            SavePlace::Saved { name, .. } => Some(name),
            _ => None,
        }
    }

    /// Returns the conversation's name in the engine.
    pub fn engine_name(&self) -> EngineSessionName {
        self.name().map_or_else(|| EngineSessionName::scoped("chat", "unsaved"), Into::into)
    }

    /// Ends the editing of an earlier message.
    pub fn forget_edit(&mut self) {
        self.editing = None;
    }

    /// Keeps a copy of the conversation before a command takes turns away. Returns the branch that holds it, if it is saved.
    pub fn set_aside(&mut self, reason: BranchReason) -> Result<Option<SessionName>, CommandError> {
        let saved = self.session_chat.saved();
        if saved.turns.is_empty() {
            return Ok(None);
        }
        let branch = self.session_chat.keep(reason)?;
        let taken = match &branch {
            Some(branch) => TakenTurns::Branch(branch.clone()),
            None => TakenTurns::Unsaved(Box::new(saved.clone())),
        };
        self.taken = Some((taken, reason));
        Ok(branch)
    }

    /// Keeps the system prompt of the first turn for the next first one.
    pub fn keep_system(&mut self) {
        let system = self.session_chat.saved().system().map(str::to_owned);
        self.system = system.or(self.system.take());
    }
}

/// Returns the message behind the files, each named and fenced.
pub fn with_attachments(attached: &[Attachment], message: String) -> String {
    let fenced = |Attachment { name, text }: &Attachment| {
        // The fence is longer than any in the file.
        let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
        let fence = "`".repeat(longest.max(2) + 1);
        let end = if text.ends_with('\n') { "" } else { "\n" };
        format!("{name}:\n{fence}\n{text}{end}{fence}\n\n")
    };
    attached.iter().map(fenced).collect::<String>() + &message
}

/// Returns the user's last message.
pub fn question(messages: &[Message]) -> Option<&Message> {
    messages.iter().rfind(|message| message.role == Role::User)
}

/// Returns the question of a turn, shortened.
pub fn opening(saved: &SavedTurn) -> String {
    let content = question(&saved.turn.messages).and_then(|question| question.content.as_ref());
    shortened(&content.map(shown).unwrap_or_default(), 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_and_fenced_whatever_is_in_them() {
        let attached = |text: &str| [Attachment { name: "a.md".to_owned(), text: text.to_owned() }];
        assert_eq!(with_attachments(&attached("x\n"), "why?".to_owned()), "a.md:\n```\nx\n```\n\nwhy?");
        let fenced = with_attachments(&attached("```\nx\n```"), "why?".to_owned());
        assert_eq!(fenced, "a.md:\n````\n```\nx\n```\n````\n\nwhy?");
        assert_eq!(with_attachments(&[], "why?".to_owned()), "why?");
    }
}
