//! The actions of the commands. Each takes the chat and its argument; its notices go to stderr.

mod files;
mod session;
mod settings;
mod show;
mod turns;

use super::command::{self, CommandId};
use super::session::Chat;
use super::state::Effect;
use crate::cli::error::{CommandError, Exit};

/// The result of an action.
type Done = Result<Effect, CommandError>;

/// Runs a command.
///
/// # Errors
/// Those of the command.
pub fn run(chat: &mut Chat<'_>, id: CommandId, argument: &str) -> Done {
    match id {
        CommandId::Help => help(chat, argument),
        CommandId::Exit => exit(chat, argument),
        CommandId::New => session::new(chat, argument),
        CommandId::Reset => session::reset(chat, argument),
        CommandId::System => session::system(chat, argument),
        CommandId::Set => settings::set(chat, argument),
        CommandId::Show => show::show(chat, argument),
        CommandId::Save => session::save(chat, argument),
        CommandId::Load => session::load(chat, argument),
        CommandId::Sessions => session::sessions(chat, argument),
        CommandId::Rename => session::rename(chat, argument),
        CommandId::Delete => session::delete(chat, argument),
        CommandId::Undo => turns::undo(chat, argument),
        CommandId::Redo => turns::redo(chat, argument),
        CommandId::Retry => turns::retry(chat, argument),
        CommandId::Edit => turns::edit(chat, argument),
        CommandId::Fork => session::fork(chat, argument),
        CommandId::Branches => session::branches(chat, argument),
        CommandId::GoOn => turns::go_on(chat, argument),
        CommandId::File => files::file(chat, argument),
        CommandId::Think => settings::think(chat, argument),
        CommandId::Context => show::context(chat, argument),
        CommandId::Stats => show::stats(chat, argument),
        CommandId::Why => show::why(chat, argument),
        CommandId::Compact => turns::compact(chat, argument),
        CommandId::Export => files::export(chat, argument),
        CommandId::Copy => files::copy(chat, argument),
        CommandId::Model => settings::model(chat, argument),
        CommandId::Compare => settings::compare(chat, argument),
        CommandId::Json => settings::json(chat, argument),
        CommandId::Tools => settings::tools(chat, argument),
        CommandId::Mcp => settings::mcp(chat, argument),
    }
}

fn help(chat: &mut Chat<'_>, argument: &str) -> Done {
    match argument {
        "" | "all" => {
            chat.ui.terminal.report(&command::help(chat.ui.terminal.columns(), argument == "all"));
        }
        name => match command::find(name) {
            Some(command) => chat.ui.terminal.report(&command::explain(command)),
            None => return Err(command::unknown(&format!("/{}", name.trim_start_matches('/')))),
        },
    }
    Ok(Effect::Prompt)
}

fn exit(_: &mut Chat<'_>, argument: &str) -> Done {
    no_argument("exit", argument)?;
    Ok(Effect::Leave(Exit::Success))
}

/// Refuses an argument that would be ignored.
fn no_argument(name: &str, argument: &str) -> Result<(), CommandError> {
    match argument {
        "" => Ok(()),
        _ => Err(CommandError::usage(format!("/{name}: unexpected argument {argument:?}"))),
    }
}

/// Parses a count that may be left out.
fn count(name: &str, argument: &str, otherwise: usize) -> Result<usize, CommandError> {
    match argument {
        "" => Ok(otherwise),
        _ => argument.parse().ok().filter(|count| *count > 0).ok_or_else(|| {
            CommandError::usage(format!("/{name}: expected a number from 1, got {argument:?}"))
        }),
    }
}
