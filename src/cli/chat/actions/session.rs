//! Commands about where the conversation is kept.

use std::time::Duration;

use super::{Done, agrees, told};
use crate::cli::chat::counted;
use crate::cli::chat::model::NextModel;
use crate::cli::chat::session::Chat;
use crate::cli::chat::state::{Effect, SavePlace};
use crate::cli::error::CommandError;
use crate::cli::model::resume;
use crate::cli::sessions as shared;
use crate::cli::terminal::report::age;
use llmctl_base::Error;
use llmctl_engine::session::store::{
    BranchReason, Forgotten, SavedSession, SessionName, SessionStore, SessionSummary, now_ms,
};
use llmctl_engine::turn::session_chat::SessionChat;

/// Longest wait of a removal for KV that is being saved.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// Another conversation; the one before stays where it is saved.
pub fn new(chat: &mut Chat<'_>) -> Done {
    let had_turns = !chat.state.turns().is_empty();
    chat.state.keep_system();
    let old = chat.state.name().cloned().filter(|_| had_turns);
    chat.begin_anew(planned(chat));
    let kept = match &old {
        Some(old) => format!("; session {old} is kept, /load {old} returns to it"),
        None if had_turns => "; the one before was not saved and is gone".to_owned(),
        None => String::new(),
    };
    let system = system_stays(chat);
    told(chat, format!("new conversation{system}{kept}"))
}

/// Removes the session's turns, which stay as a branch. The session keeps its name.
pub fn reset(chat: &mut Chat<'_>) -> Done {
    let turns = chat.state.turns().len();
    if turns == 0 {
        return Err(CommandError::usage("there is no turn yet"));
    }
    let turns = counted(turns, "turn");
    let what = chat.state.name().map_or("this conversation".to_owned(), |name| format!("session {name}"));
    if !agrees(chat, &format!("empty {what} with {turns}? /undo would bring it back."))? {
        return told(chat, "nothing was changed");
    }
    let branch = chat.state.set_aside(BranchReason::Reset)?;
    chat.state.keep_system();
    chat.state.session_chat.rewind(0)?;
    chat.model.reset_session(&chat.state.engine_name())?;
    (chat.state.last, chat.state.has_warned) = (None, false);
    let system = system_stays(chat);
    let kept = branch.map_or(String::new(), |branch| format!(" as {branch}"));
    told(chat, format!("the conversation is empty{system}; {turns} kept{kept}, /undo returns to it"))
}

fn system_stays(chat: &Chat<'_>) -> &'static str {
    if chat.state.system.is_some() { "; the system prompt stays" } else { "" }
}

/// Changes the system prompt, which begins another conversation: a conversation has one system prompt.
pub fn system(chat: &mut Chat<'_>, argument: &str) -> Done {
    let has_begun = !chat.state.turns().is_empty();
    let now =
        if has_begun { chat.state.saved().system().map(str::to_owned) } else { chat.state.system.clone() };
    if argument.is_empty() {
        return told(chat, now.as_deref().unwrap_or("there is no system prompt"));
    }
    match (has_begun, chat.state.name().cloned()) {
        (false, _) => {}
        (true, None) => {
            let error = CommandError::usage(
                "a new system prompt needs a new conversation, and this one is not saved",
            );
            return Err(error.hint("/save NAME saves it, /new gives it up; then set the system prompt"));
        }
        (true, Some(name)) => {
            chat.begin_anew(planned(chat));
            chat.ui.terminal.report(&format!(
                "a new system prompt needs a new conversation: this is one; session {name} is kept, /load {name} returns \
                 to it"
            ));
        }
    }
    chat.state.system = Some(argument.to_owned());
    told(chat, "the system prompt is set")
}

/// Returns where a new conversation of this chat is saved.
fn planned(chat: &Chat<'_>) -> SavePlace {
    if chat.state.is_ephemeral { SavePlace::Nowhere } else { SavePlace::Planned }
}

pub fn save(chat: &mut Chat<'_>, argument: &str) -> Done {
    let name = if argument.is_empty() { None } else { Some(shared::parse(argument)?) };
    match (chat.state.keeping.clone(), name) {
        (SavePlace::Saved { name, .. }, None) => {
            told(chat, format!("session {name} is saved after every turn"))
        }
        (SavePlace::Planned, None) => told(chat, "the session is saved from the first turn on"),
        (SavePlace::Nowhere, None) => {
            Err(CommandError::usage("/save: a name is needed here").hint("/save NAME saves from now on"))
        }
        (SavePlace::Saved { name: old, is_automatic: true, .. }, Some(new)) => rename_open(chat, &old, &new),
        (SavePlace::Saved { name: old, .. }, Some(new)) => {
            drop(chat.store()?.fork(&old, &new, None).map_err(shared::explain)?);
            told(chat, format!("copied to session {new}; this is still session {old}"))
        }
        (SavePlace::Nowhere | SavePlace::Planned, Some(new)) => {
            let turns = chat.state.turns().to_vec();
            let model = chat.model.fingerprint();
            let mut writer = chat.store()?.create(&new, &model)?;
            let blobs = &chat.state.session_chat.saved().blobs;
            turns.iter().try_for_each(|saved| {
                writer.take_blobs(blobs);
                writer.append(&saved.model, &saved.turn)
            })?;
            chat.model.close_session(&chat.state.engine_name());
            let is_fresh = turns.is_empty();
            chat.state.keeping = SavePlace::Saved { name: new.clone(), is_automatic: false, is_fresh };
            chat.state.session_chat = SessionChat::resume(writer, model);
            chat.tell_engine()?;
            told(chat, format!("this is now session {new}, saved after every turn"))
        }
    }
}

pub fn load(chat: &mut Chat<'_>, argument: &str) -> Done {
    let name = named("load", argument)?;
    if chat.state.name() == Some(&name) {
        return told(chat, format!("this is session {name} already"));
    }
    if chat.state.keeping == SavePlace::Nowhere && !chat.state.turns().is_empty() {
        let error = CommandError::usage("this conversation is not saved");
        return Err(error.hint("/save NAME saves it, /new gives it up; then /load"));
    }
    let store = chat.store()?;
    let writer = store.open(&name).map_err(|error| not_found(error, &store))?;
    take_up_model(chat, &name, writer.saved())?;
    chat.state.system = None;
    let resumed = chat.adopt(writer, false)?;
    let turns = counted(chat.state.turns().len(), "turn");
    let resumed = resumed.map_or(String::new(), |resumed| format!(", {resumed}"));
    chat.ui.terminal.report(&format!("session {name}: {turns}{resumed}"));
    let model = chat.state.saved().model.clone();
    if chat.model.is_named() && !model.is_same(&chat.model.fingerprint()) {
        let reference = model.reference.as_deref().unwrap_or(&model.name);
        chat.ui.terminal.note(format!("(/model {reference} continues it with its own model)"));
    }
    Ok(Effect::Prompt)
}

/// The session's own model is loaded, unless the user has named the one that answers now. A change is said.
fn take_up_model(chat: &mut Chat<'_>, name: &SessionName, saved: &SavedSession) -> Result<(), CommandError> {
    if let Some(choice) = chat.model.endpoint_choice(saved) {
        if chat.model.endpoint().is_some_and(|endpoint| choice.is(endpoint)) {
            return Ok(());
        }
        chat.change_model(&NextModel::There(choice))?;
        chat.ui.terminal.note(format!("model {}, which session {name} continues with", chat.model.spoken()));
        return Ok(());
    }
    let chosen = resume::model_of(&chat.model.args, name, saved, "/model REF")?;
    let is_other = saved.turns.last().is_some_and(|last| !last.model.is_same(&chat.model.fingerprint()));
    match chosen.model {
        Some(reference) if is_other && !chat.model.args.is_named => {
            chat.change_model(&NextModel::Here(reference))?;
            let model = chat.model.spoken();
            chat.ui.terminal.note(format!("model {model}, as session {name} was started with"));
            Ok(())
        }
        _ => Ok(()),
    }
}

pub fn sessions(chat: &mut Chat<'_>) -> Done {
    let rows = shared::rows(&chat.store()?)?;
    if rows.len() < 2 {
        return told(chat, "no sessions yet");
    }
    chat.ui.report_table(&rows);
    Ok(Effect::Prompt)
}

pub fn rename(chat: &mut Chat<'_>, argument: &str) -> Done {
    let words: Vec<&str> = argument.split_whitespace().collect();
    let (from, to) = match words[..] {
        [to] => (None, shared::parse(to)?),
        [from, to] => (Some(shared::parse(from)?), shared::parse(to)?),
        _ => return Err(CommandError::usage("/rename: expected [OLD] NEW")),
    };
    let open = chat.state.name().cloned();
    match (from, open) {
        (None, None) => Err(CommandError::usage("this conversation is not saved yet")
            .hint("/save NAME saves it under a name")),
        (None, Some(open)) => rename_open(chat, &open, &to),
        (Some(from), Some(open)) if from == open => rename_open(chat, &open, &to),
        (Some(from), _) => {
            let store = chat.store()?;
            store.rename(&from, &to).map_err(|error| not_found(error, &store))?;
            told(chat, format!("session {from} is now {to}"))
        }
    }
}

/// Closes the open session while it is renamed, because renaming takes its lock.
fn rename_open(chat: &mut Chat<'_>, from: &SessionName, to: &SessionName) -> Done {
    let model = chat.model.fingerprint();
    let unsaved = chat.state.saved().clone();
    chat.state.session_chat = SessionChat::new(model.clone());
    let renamed = chat.store()?.rename(from, to);
    let now = if renamed.is_ok() { to } else { from };
    let writer = match chat.store()?.open(now) {
        Ok(writer) => writer,
        Err(error) => {
            chat.state.keeping = SavePlace::Nowhere;
            chat.state.session_chat = SessionChat::look_at(unsaved, model);
            let hint = "this conversation is no longer saved; /save NAME saves it";
            return Err(shared::explain(error).hint(hint));
        }
    };
    chat.state.session_chat = SessionChat::resume(writer, model);
    renamed?;
    chat.model.close_session(&from.into());
    let is_fresh = matches!(chat.state.keeping, SavePlace::Saved { is_fresh: true, .. });
    chat.state.keeping = SavePlace::Saved { name: to.clone(), is_automatic: false, is_fresh };
    chat.tell_engine()?;
    told(chat, format!("session {from} is now {to}"))
}

pub fn delete(chat: &mut Chat<'_>, argument: &str) -> Done {
    let open = chat.state.name().cloned();
    let name = match (argument, &open) {
        ("", None) => {
            return Err(CommandError::usage("this conversation is not saved: there is nothing to delete"));
        }
        ("", Some(open)) => open.clone(),
        (name, _) => named("delete", name)?,
    };
    let store = chat.store()?;
    let saved = store.read(&name).map_err(|error| not_found(error, &store));
    let turns = counted(saved.as_ref().map_or(0, |saved| saved.turns.len()), "turn");
    if !chat.ui.is_interactive() {
        let error = CommandError::usage("/delete: there is no terminal to ask on");
        return Err(
            error.hint(format!("`llmctl sessions remove {name} --yes` removes it without a question"))
        );
    }
    if !agrees(chat, &format!("remove session {name} with {turns}?"))? {
        return told(chat, "nothing was removed");
    }
    if open.as_ref() == Some(&name) {
        chat.begin_anew(planned(chat));
    }
    // Waiting turns and KV are written before the session is looked for on disk.
    chat.model.flush(FLUSH_TIMEOUT);
    let forgotten = match store.remove(&name) {
        // The open one had no turn, and is gone with its last use.
        Err(Error::SessionNotFound(_)) if open.as_ref() == Some(&name) => Forgotten::default(),
        removed => removed.map_err(|error| not_found(error, &store))?,
    };
    told(chat, shared::removed_text(&name, &forgotten).trim_end())
}

pub fn fork(chat: &mut Chat<'_>, argument: &str) -> Done {
    let Some(from) = chat.state.name().cloned() else {
        return Err(CommandError::usage("this conversation is not saved")
            .hint("/save NAME saves it; then it can be forked"));
    };
    let to = match argument {
        "" => chat.free_name(&format!("{from}-fork"))?,
        name => shared::parse(name)?,
    };
    let writer = chat.store()?.fork(&from, &to, None).map_err(shared::explain)?;
    let turns = counted(writer.saved().turns.len(), "turn");
    chat.adopt(writer, false)?;
    told(chat, format!("this is now session {to}, with {turns} of {from}; /load {from} returns to that"))
}

/// Sessions that come from one another, as a tree.
pub fn branches(chat: &mut Chat<'_>) -> Done {
    let Some(open) = chat.state.name().cloned() else {
        return Err(CommandError::usage("this conversation is not saved, so it has no branches"));
    };
    let all = chat.store()?.list()?;
    let all: Vec<(&SessionName, &SessionSummary)> =
        all.iter().filter_map(|listed| Some((&listed.name, listed.summary.as_ref().ok()?))).collect();
    let mut rows = Vec::new();
    let mut stack = vec![(root_of(&open, &all), 0)];
    while let Some((name, depth)) = stack.pop() {
        let Some((_, summary)) = all.iter().find(|(known, _)| **known == name) else { continue };
        let mark = if name == open { "*" } else { " " };
        let age = age(now_ms().saturating_sub(summary.last_used_ms));
        let turns = counted(summary.turns, "turn");
        rows.push(vec![format!("{mark} {}{name}", "  ".repeat(depth)), turns, origin(summary, depth), age]);
        let is_child = |(child, summary): &&(&SessionName, &SessionSummary)| {
            **child != name && parent_of(summary, &all).is_some_and(|parent| *parent == name)
        };
        if rows.len() <= all.len() {
            stack.extend(all.iter().rev().filter(is_child).map(|(child, _)| ((*child).clone(), depth + 1)));
        }
    }
    chat.ui.report_table(&rows);
    Ok(Effect::Prompt)
}

/// Returns the origin of a session, for its row.
fn origin(summary: &SessionSummary, depth: usize) -> String {
    let Some(fork) = summary.fork_of.as_ref().filter(|_| depth > 0) else { return String::new() };
    match fork.branch.as_ref().map(|branch| branch.reason) {
        None => format!("{} from {}", counted(fork.turns, "turn"), fork.name),
        Some(BranchReason::Edit) => "before /edit".to_owned(),
        Some(BranchReason::Retry) => "before /retry".to_owned(),
        Some(BranchReason::Undo) => "before /undo".to_owned(),
        Some(BranchReason::Reset) => "before /reset".to_owned(),
        Some(BranchReason::Restore) => "before /redo".to_owned(),
        Some(BranchReason::Request) => "by an HTTP request".to_owned(),
    }
}

/// Returns the session that another comes from, where it is still there: a branch is found by id, a fork by name.
fn parent_of<'a>(
    summary: &SessionSummary,
    all: &[(&'a SessionName, &SessionSummary)],
) -> Option<&'a SessionName> {
    let fork = summary.fork_of.as_ref()?;
    let is_parent = |(name, above): &&(&'a SessionName, &SessionSummary)| match &fork.branch {
        Some(branch) => above.id == branch.of,
        None => name.as_str() == fork.name,
    };
    all.iter().find(is_parent).map(|(name, _)| *name)
}

/// Returns the session that this one comes from in the end.
fn root_of(open: &SessionName, all: &[(&SessionName, &SessionSummary)]) -> SessionName {
    let mut name = open;
    // A renamed session may seem to come from itself: no chain is longer than the list.
    for _ in 0..all.len() {
        let found = all.iter().find(|(known, _)| *known == name);
        match found.and_then(|(_, summary)| parent_of(summary, all)) {
            Some(above) => name = above,
            None => break,
        }
    }
    name.clone()
}

/// As the `sessions` command says it, with the hints of this one.
fn not_found(error: Error, store: &SessionStore) -> CommandError {
    let is_missing = matches!(error, Error::SessionNotFound(_));
    let error = shared::not_found(error, store);
    match error.hint_text() {
        Some(hint) if is_missing && !hint.starts_with("did you mean") => error.hint("/sessions lists them"),
        _ => error,
    }
}

fn named(command: &str, argument: &str) -> Result<SessionName, CommandError> {
    match argument {
        "" => Err(CommandError::usage(format!("/{command}: expected the name of a session"))
            .hint("/sessions lists them")),
        name => shared::parse(name),
    }
}
