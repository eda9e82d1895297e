//! What the commands of the table do. Each takes the chat and its argument; what it says goes to stderr.

mod files;
mod session;
mod settings;
mod show;
mod turns;

pub use files::{Attachment, copy, export, file, with_attachments};
pub use session::{branches, delete, fork, load, new, rename, reset, save, sessions, system};
pub use settings::{Schema, json, model, set, think, tools};
pub use show::{context, show, stats, why};
pub use turns::{compact, edit, go_on, redo, retry, undo};

use super::command::{self, Next};
use super::talk::Chat;
use crate::cli::error::{CommandError, Exit};

/// What an action gives.
type Done = Result<Next, CommandError>;

pub fn help(chat: &mut Chat<'_>, argument: &str) -> Done {
    match argument {
        "" => chat.terminal.report(&command::help(chat.terminal.columns())),
        name => match command::find(name) {
            Some(command) => chat.terminal.report(&command::explain(command)),
            None => return Err(command::unknown(&format!("/{}", name.trim_start_matches('/')))),
        },
    }
    Ok(Next::Prompt)
}

pub fn exit(_: &mut Chat<'_>, argument: &str) -> Done {
    no_argument("exit", argument)?;
    Ok(Next::Leave(Exit::Success))
}

/// Refuses an argument that would be ignored.
fn no_argument(name: &str, argument: &str) -> Result<(), CommandError> {
    match argument {
        "" => Ok(()),
        _ => Err(CommandError::usage(format!("/{name}: unexpected argument {argument:?}"))),
    }
}

/// A count that may be left out.
fn count(name: &str, argument: &str, otherwise: usize) -> Result<usize, CommandError> {
    match argument {
        "" => Ok(otherwise),
        _ => argument.parse().ok().filter(|count| *count > 0).ok_or_else(|| {
            CommandError::usage(format!("/{name}: expected a number from 1, got {argument:?}"))
        }),
    }
}
