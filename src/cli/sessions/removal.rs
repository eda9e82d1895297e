//! `sessions remove` and `sessions purge`: what was asked for goes, and what stays is named.

use serde_json::{Value, json};

use super::not_found;
use crate::cli::error::{CommandError, Kind};
use crate::cli::terminal::question;
use crate::cli::terminal::report::{bytes, counted};
use llmctl_engine::session::store::{Forgotten, SessionName, SessionStore};

/// Flags of `remove`.
pub struct Asked {
    pub branches: bool,
    pub yes: bool,
}

/// Removes the sessions; none where one of them is not there.
///
/// # Errors
/// There is no such session; another process has it open; input or output failed.
pub fn remove(
    mut names: Vec<SessionName>,
    asked: &Asked,
    store: &SessionStore,
) -> Result<(String, Value), CommandError> {
    let mut branches = Vec::new();
    for name in &names {
        store.num_bytes(name).map_err(|error| not_found(error, store))?; // there, be it damaged
        branches.extend(branches_of(name, store));
    }
    branches.retain(|branch| !names.contains(branch));
    if asked.branches {
        names.append(&mut branches);
    }
    names.sort();
    names.dedup();
    if !asked.yes && !is_agreed(&names, store)? {
        return Ok(("nothing is removed\n".to_owned(), json!({"removed": [], "kv_pages": 0})));
    }
    let (mut text, mut num_pages) = (String::new(), 0);
    for name in &names {
        let forgotten = store.remove(name).map_err(|error| not_found(error, store))?;
        check(&forgotten)?;
        num_pages += forgotten.num_pages;
        text.push_str(&removed_text(name, &forgotten));
    }
    text.push_str(&branches_text(&branches));
    let list = |names: &[SessionName]| names.iter().map(SessionName::as_str).collect::<Value>();
    let object = json!({"removed": list(&names), "kv_pages": num_pages, "branches_kept": list(&branches)});
    Ok((text, object))
}

/// Returns a session's own branches. A branch has none, and an unreadable session has none that are known.
fn branches_of(name: &SessionName, store: &SessionStore) -> Vec<SessionName> {
    let is_branch = store.read(name).map_or(true, |saved| saved.branch().is_some());
    let branches = if is_branch { Vec::new() } else { store.branches(name).unwrap_or_default() };
    branches.into_iter().map(|listed| listed.name).collect()
}

fn branches_text(branches: &[SessionName]) -> String {
    if branches.is_empty() {
        return String::new();
    }
    let names: Vec<&str> = branches.iter().map(SessionName::as_str).collect();
    format!("branches that are kept: {}\n", names.join(", "))
}

fn is_agreed(names: &[SessionName], store: &SessionStore) -> Result<bool, CommandError> {
    let described = |name: &SessionName| match store.read(name) {
        Ok(saved) => format!("{name} ({})", counted(saved.turns.len(), "turn")),
        Err(_) => format!("{name} (cannot be read)"),
    };
    let all: Vec<String> = names.iter().map(described).collect();
    question::may_erase(&format!("remove {}?", all.join(", ")))
}

/// Describes for people what was removed.
pub fn removed_text(name: &SessionName, forgotten: &Forgotten) -> String {
    let removed = counted(forgotten.num_pages, "page");
    format!("session {name} is removed, with {removed} of KV\n{}", warning_text(forgotten))
}

fn warning_text(forgotten: &Forgotten) -> String {
    forgotten.warning().map_or_else(String::new, |warning| warning + "\n")
}

/// KV that should be gone and is not is an error, not a small number.
fn check(forgotten: &Forgotten) -> Result<(), CommandError> {
    match &forgotten.problem {
        None => Ok(()),
        Some(problem) => Err(Kind::Io
            .error(problem)
            .hint("the session is removed; the rest of its KV can be deleted by hand")),
    }
}

/// Erases what does not count any more.
///
/// # Errors
/// As `sessions show`, and when another process has the session open.
pub fn purge(name: &SessionName, store: &SessionStore) -> Result<(String, Value), CommandError> {
    let purged = store.purge(name).map_err(|error| not_found(error, store))?;
    check(&purged.kv)?;
    let (erased, removed) = (bytes(purged.num_bytes), counted(purged.kv.num_pages, "page"));
    let mut text =
        format!("session {name}: {erased} of undone or damaged text erased, with {removed} of KV\n");
    let branches = branches_of(name, store);
    text.push_str(&warning_text(&purged.kv));
    text.push_str(&branches_text(&branches));
    let object = json!({
        "purged": name.as_str(),
        "bytes": purged.num_bytes,
        "kv_pages": purged.kv.num_pages,
        "branches_kept": branches.iter().map(SessionName::as_str).collect::<Value>(),
    });
    Ok((text, object))
}
