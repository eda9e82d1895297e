//! Commands about where the conversation is kept.

use std::time::Duration;

use super::{Done, no_argument};
use crate::cli::chat::command::Next;
use crate::cli::chat::talk::{Chat, Keeping};
use crate::cli::error::CommandError;
use crate::cli::report::columns;
use crate::cli::sessions as shared;
use crate::runtime::Error;
use crate::runtime::session::conversation::Dialogue;
use crate::runtime::session::store::{Forgotten, SessionName, now_ms};

/// How long a removal waits for KV that is being saved.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

pub fn reset(chat: &mut Chat<'_>, argument: &str) -> Done {
    no_argument("reset", argument)?;
    let system = chat.dialogue.saved().system().map(str::to_owned);
    chat.dialogue.rewind(0)?;
    chat.system = system.or(chat.system.take());
    match chat.llm().engine().reset_session(chat.engine_name()) {
        Ok(()) | Err(Error::SessionNotFound(_)) => {}
        Err(error) => return Err(error.into()),
    }
    (chat.last, chat.has_warned) = (None, false);
    chat.attached.clear();
    chat.terminal.report(match chat.system {
        Some(_) => "the conversation is forgotten; the system prompt stays",
        None => "the conversation is forgotten",
    });
    Ok(Next::Prompt)
}

/// A conversation has one system prompt, the one it began with: another one is another conversation.
pub fn system(chat: &mut Chat<'_>, argument: &str) -> Done {
    let has_begun = !chat.dialogue.saved().turns.is_empty();
    let now = if has_begun { chat.dialogue.saved().system().map(str::to_owned) } else { chat.system.clone() };
    if argument.is_empty() {
        chat.terminal.report(now.as_deref().unwrap_or("there is no system prompt"));
        return Ok(Next::Prompt);
    }
    match (has_begun, chat.name().cloned()) {
        (false, _) => {}
        (true, None) => {
            let error = CommandError::usage(
                "a system prompt stands at the beginning, and this conversation is not saved",
            );
            return Err(error.hint("/save NAME keeps it, or /reset forgets it; then set the system prompt"));
        }
        (true, Some(name)) => {
            chat.begin_anew(planned(chat));
            chat.terminal.report(&format!(
                "a system prompt stands at the beginning: this is a new conversation; session {name} stays as it is, \
                 /load {name} goes back"
            ));
        }
    }
    chat.system = Some(argument.to_owned());
    chat.terminal.report("the system prompt is set");
    Ok(Next::Prompt)
}

/// How a new conversation of this chat is kept.
fn planned(chat: &Chat<'_>) -> Keeping {
    if chat.args.session.ephemeral { Keeping::Nowhere } else { Keeping::Planned }
}

pub fn save(chat: &mut Chat<'_>, argument: &str) -> Done {
    let keeping = chat.keeping.clone();
    let name = if argument.is_empty() { None } else { Some(shared::parse(argument)?) };
    match (keeping, name) {
        (Keeping::Saved { name, .. }, None) => {
            chat.terminal.report(&format!("session {name} is saved after every turn"));
        }
        (Keeping::Planned, None) => chat.terminal.report("the session is saved from the first turn on"),
        (Keeping::Nowhere, None) => {
            return Err(CommandError::usage("nothing is saved here").hint("/save NAME saves from now on"));
        }
        (Keeping::Saved { name: old, is_automatic: true, .. }, Some(new)) => rename_open(chat, &old, &new)?,
        (Keeping::Saved { name: old, .. }, Some(new)) => {
            drop(chat.store()?.fork(&old, &new, None).map_err(shared::explain)?);
            chat.terminal.report(&format!("a copy is saved as session {new}; this is still session {old}"));
        }
        (Keeping::Nowhere | Keeping::Planned, Some(new)) => {
            let turns = chat.dialogue.saved().turns.clone();
            let model = chat.model();
            let mut writer = chat.store()?.create(&new, &model)?;
            turns.iter().try_for_each(|saved| writer.append(&saved.model, &saved.turn))?;
            let _ = chat.llm().engine().close_session(chat.engine_name()); // there is none before the first turn
            let is_fresh = turns.is_empty();
            chat.keeping = Keeping::Saved { name: new.clone(), is_automatic: false, is_fresh };
            chat.dialogue = Dialogue::resume(writer, model);
            chat.tell_engine()?;
            chat.terminal.report(&format!("this is session {new} now, saved after every turn"));
        }
    }
    Ok(Next::Prompt)
}

pub fn load(chat: &mut Chat<'_>, argument: &str) -> Done {
    let name = named("load", argument)?;
    if chat.name() == Some(&name) {
        return Err(CommandError::usage(format!("session {name} is open already")));
    }
    if chat.keeping == Keeping::Nowhere && !chat.dialogue.saved().turns.is_empty() {
        let error = CommandError::usage("this conversation is not saved");
        return Err(error.hint("/save NAME keeps it, or /reset forgets it; then /load"));
    }
    let store = chat.store()?;
    let writer = store.open(&name).map_err(|error| shared::not_found(error, &store))?;
    chat.system = None;
    let resumed = chat.adopt(writer, false)?;
    let turns = counted(chat.dialogue.saved().turns.len());
    let resumed = resumed.map_or(String::new(), |resumed| format!(", {resumed}"));
    chat.terminal.report(&format!("session {name}: {turns}{resumed}"));
    Ok(Next::Prompt)
}

pub fn sessions(chat: &mut Chat<'_>, argument: &str) -> Done {
    no_argument("sessions", argument)?;
    let (text, _) = shared::list(&chat.store()?, chat.places)?;
    chat.terminal.report(text.trim_end());
    Ok(Next::Prompt)
}

pub fn rename(chat: &mut Chat<'_>, argument: &str) -> Done {
    let words: Vec<&str> = argument.split_whitespace().collect();
    let (from, to) = match words[..] {
        [to] => (None, shared::parse(to)?),
        [from, to] => (Some(shared::parse(from)?), shared::parse(to)?),
        _ => return Err(CommandError::usage("/rename [OLD] NEW")),
    };
    let open = chat.name().cloned();
    match (from, open) {
        (None, None) => {
            return Err(
                CommandError::usage("this conversation has no session yet").hint("/save NAME gives it one")
            );
        }
        (None, Some(open)) => rename_open(chat, &open, &to)?,
        (Some(from), Some(open)) if from == open => rename_open(chat, &open, &to)?,
        (Some(from), _) => {
            let store = chat.store()?;
            store.rename(&from, &to).map_err(|error| shared::not_found(error, &store))?;
            chat.terminal.report(&format!("session {from} is now {to}"));
        }
    }
    Ok(Next::Prompt)
}

/// The open session is let go of for as long as it takes: a name is changed by whoever holds the lock.
fn rename_open(chat: &mut Chat<'_>, from: &SessionName, to: &SessionName) -> Result<(), CommandError> {
    let model = chat.model();
    let unsaved = chat.dialogue.saved().clone();
    chat.dialogue = Dialogue::new(model.clone());
    let renamed = chat.store()?.rename(from, to);
    let now = if renamed.is_ok() { to } else { from };
    let writer = match chat.store()?.open(now) {
        Ok(writer) => writer,
        Err(error) => {
            chat.keeping = Keeping::Nowhere;
            chat.dialogue = Dialogue::look_at(unsaved, model);
            let hint = "this conversation is not saved any more; /save NAME saves it";
            return Err(shared::explain(error).hint(hint));
        }
    };
    chat.dialogue = Dialogue::resume(writer, model);
    renamed?;
    let _ = chat.llm().engine().close_session(from.as_str()); // there is none before the first turn
    let is_fresh = matches!(chat.keeping, Keeping::Saved { is_fresh: true, .. });
    chat.keeping = Keeping::Saved { name: to.clone(), is_automatic: false, is_fresh };
    chat.tell_engine()?;
    chat.terminal.report(&format!("session {from} is now {to}"));
    Ok(())
}

pub fn delete(chat: &mut Chat<'_>, argument: &str) -> Done {
    let open = chat.name().cloned();
    let name = match (argument, &open) {
        ("", None) => return Err(CommandError::usage("this conversation has no session to delete")),
        ("", Some(open)) => open.clone(),
        (name, _) => named("delete", name)?,
    };
    let store = chat.store()?;
    let saved = store.read(&name).map_err(|error| shared::not_found(error, &store));
    let turns = counted(saved.as_ref().map_or(0, |saved| saved.turns.len()));
    let question = format!("remove session {name} with {turns}? y(es), n(o): ");
    match chat.input.ask(&question)?.as_deref() {
        // A script has said what it wants.
        None | Some("y" | "yes") => {}
        Some(_) => {
            chat.terminal.report("nothing is removed");
            return Ok(Next::Prompt);
        }
    }
    if open.as_ref() == Some(&name) {
        chat.begin_anew(planned(chat));
    }
    // What waits to be saved is on disk before it is looked for there.
    let _ = chat.llm().engine().flush_disk(FLUSH_TIMEOUT);
    let forgotten = match store.remove(&name) {
        // The open one had no turn, and is gone with its last use.
        Err(Error::SessionNotFound(_)) if open.as_ref() == Some(&name) => Forgotten::default(),
        removed => removed.map_err(|error| shared::not_found(error, &store))?,
    };
    chat.terminal.report(shared::removed_text(&name, &forgotten).trim_end());
    Ok(Next::Prompt)
}

pub fn fork(chat: &mut Chat<'_>, argument: &str) -> Done {
    let Some(from) = chat.name().cloned() else {
        return Err(CommandError::usage("this conversation is not saved")
            .hint("/save NAME saves it; then it can be forked"));
    };
    let to = match argument {
        "" => chat.free_name(&format!("{from}-fork"))?,
        name => shared::parse(name)?,
    };
    let writer = chat.store()?.fork(&from, &to, None).map_err(shared::explain)?;
    let turns = counted(writer.saved().turns.len());
    chat.adopt(writer, false)?;
    chat.terminal
        .report(&format!("this is session {to} now, with {turns} of {from}; /load {from} goes back"));
    Ok(Next::Prompt)
}

/// Sessions that come from one another, as a tree.
pub fn branches(chat: &mut Chat<'_>, argument: &str) -> Done {
    no_argument("branches", argument)?;
    let store = chat.store()?;
    let listed = store.list()?;
    let read = |name: &SessionName| store.read(name).ok().map(|saved| (name.clone(), saved));
    let all: Vec<_> = listed.iter().filter_map(|listed| read(&listed.name)).collect();
    let parent = |saved: &crate::runtime::session::store::SavedSession| {
        let fork = saved.fork_of.as_ref()?;
        all.iter().any(|(name, _)| name.as_str() == fork.name).then(|| fork.name.clone())
    };
    let root_of = |name: &str| {
        let mut name = name.to_owned();
        // A renamed session may seem to come from itself: no chain is longer than the list.
        for _ in 0..all.len() {
            let found = all.iter().find(|(known, _)| known.as_str() == name);
            match found.and_then(|(_, saved)| parent(saved)) {
                Some(above) => name = above,
                None => break,
            }
        }
        name
    };
    let Some(open) = chat.name().map(SessionName::to_string) else {
        return Err(CommandError::usage("this conversation has no session, and so no branches"));
    };
    let root = root_of(&open);
    let mut rows = Vec::new();
    let mut stack = vec![(root, 0)];
    while let Some((name, depth)) = stack.pop() {
        let Some((_, saved)) = all.iter().find(|(known, _)| known.as_str() == name) else { continue };
        let mark = if name == open { "*" } else { " " };
        let shared_turns = match (&saved.fork_of, depth) {
            (Some(fork), 1..) => format!("{} of them from {}", fork.turns, fork.name),
            _ => String::new(),
        };
        let turns = counted(saved.turns.len());
        let age = shared::age(now_ms().saturating_sub(saved.last_used_ms));
        rows.push(vec![format!("{mark} {}{name}", "  ".repeat(depth)), turns, shared_turns, age]);
        let is_child =
            |saved: &crate::runtime::session::store::SavedSession| parent(saved).as_deref() == Some(&name);
        let children = all.iter().filter(|(child, saved)| is_child(saved) && child.as_str() != name);
        if rows.len() <= all.len() {
            stack.extend(children.map(|(child, _)| (child.to_string(), depth + 1)));
        }
    }
    chat.terminal.report(columns(&rows).trim_end());
    Ok(Next::Prompt)
}

fn counted(turns: usize) -> String {
    if turns == 1 { "1 turn".to_owned() } else { format!("{turns} turns") }
}

fn named(command: &str, argument: &str) -> Result<SessionName, CommandError> {
    match argument {
        "" => Err(CommandError::usage(format!("/{command} NAME")).hint("/sessions lists them")),
        name => shared::parse(name),
    }
}
