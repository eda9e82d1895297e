//! The actions of the commands. Each takes the chat and its argument; its notices go to stderr.

mod files;
mod session;
mod settings;
mod show;
mod turns;

use super::command::{self, ArgumentKind, ChatCommand, CommandId};
use super::session::Chat;
use super::state::Effect;
use crate::cli::error::{CommandError, Exit};
pub use files::attach;

/// The result of an action.
type Done = Result<Effect, CommandError>;

/// Runs a command.
///
/// # Errors
/// Those of the command.
pub fn run(chat: &mut Chat<'_>, command: &ChatCommand, argument: &str) -> Done {
    // An argument would be ignored.
    if command.argument == ArgumentKind::None && !argument.is_empty() {
        return Err(CommandError::usage(format!("/{}: unexpected argument {argument:?}", command.name)));
    }
    match command.id {
        CommandId::Help => help(chat, argument),
        CommandId::Exit => Ok(Effect::Leave(Exit::Success)),
        CommandId::New => session::new(chat),
        CommandId::Reset => session::reset(chat),
        CommandId::System => session::system(chat, argument),
        CommandId::Set => settings::set(chat, argument),
        CommandId::Show => show::show(chat, argument),
        CommandId::Save => session::save(chat, argument),
        CommandId::Load => session::load(chat, argument),
        CommandId::Sessions => session::sessions(chat),
        CommandId::Rename => session::rename(chat, argument),
        CommandId::Delete => session::delete(chat, argument),
        CommandId::Undo => turns::undo(chat, argument),
        CommandId::Redo => turns::redo(chat),
        CommandId::Retry => turns::retry(chat, argument),
        CommandId::Edit => turns::edit(chat, argument),
        CommandId::Fork => session::fork(chat, argument),
        CommandId::Branches => session::branches(chat),
        CommandId::GoOn => turns::go_on(chat),
        CommandId::File => files::file(chat, argument),
        CommandId::Image => files::image(chat, argument),
        CommandId::Think => settings::think(chat, argument),
        CommandId::Context => show::context(chat),
        CommandId::Stats => show::stats(chat),
        CommandId::Why => show::why(chat),
        CommandId::Compact => turns::compact(chat),
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
    match (argument, command::find(argument)) {
        ("" | "all", _) => told(chat, command::help(chat.ui.terminal.columns(), argument == "all")),
        (_, Some(command)) => told(chat, command::explain(command)),
        (name, None) => Err(command::unknown(&format!("/{}", name.trim_start_matches('/')))),
    }
}

/// Reports the outcome of a command that is done.
fn told(chat: &Chat<'_>, text: impl AsRef<str>) -> Done {
    chat.ui.terminal.report(text.as_ref());
    Ok(Effect::Prompt)
}

/// Asks before something is taken away that can be brought back. A script is not asked.
fn agrees(chat: &mut Chat<'_>, question: &str) -> Result<bool, CommandError> {
    let answer = chat.ui.input.ask(&format!("{question} y(es), n(o): "))?;
    Ok(matches!(answer.as_deref(), None | Some("y" | "yes")))
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
