//! `sessions list`: a table, the last used first, branches below their sessions.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::{counted_tokens, fork_json};
use crate::cli::error::CommandError;
use crate::cli::places::Places;
use crate::cli::terminal::report::{age, columns};
use llmctl_engine::session::store::{Listed, SessionStore, now_ms};

pub fn list(store: &SessionStore, places: &Places) -> Result<(String, Value), CommandError> {
    let listed = by_last_use(store)?;
    let folder = places.sessions();
    let object = json!({"folder": folder, "sessions": listed.iter().map(summary_json).collect::<Vec<_>>()});
    if listed.is_empty() {
        let folder = folder.map_or(String::new(), |folder| places.shorten(&folder));
        return Ok((format!("no sessions in {folder}\n"), object));
    }
    Ok((columns(&rows_of(&listed)), object))
}

/// Returns the list as a table, its head included.
pub fn rows(store: &SessionStore) -> Result<Vec<Vec<String>>, CommandError> {
    Ok(rows_of(&by_last_use(store)?))
}

fn by_last_use(store: &SessionStore) -> Result<Vec<Listed>, CommandError> {
    let mut listed = store.list()?;
    let last_used = |listed: &Listed| listed.summary.as_ref().map_or(0, |summary| summary.last_used_ms);
    listed.sort_by_key(|listed| std::cmp::Reverse(last_used(listed)));
    Ok(listed)
}

fn rows_of(listed: &[Listed]) -> Vec<Vec<String>> {
    let head = ["NAME", "TURNS", "TOKENS", "LAST USED", "MODEL"].map(str::to_owned).to_vec();
    let now = now_ms();
    let rows = grouped(listed).into_iter().map(|(listed, is_below)| row(listed, is_below, now));
    [head].into_iter().chain(rows).collect()
}

/// Branches follow their session, where there is one; true for those.
fn grouped(listed: &[Listed]) -> Vec<(&Listed, bool)> {
    let id = |listed: &Listed| listed.summary.as_ref().ok().map(|summary| summary.id.clone());
    let roots = listed.iter().filter(|listed| listed.branch().is_none());
    let ids: HashSet<String> = roots.filter_map(id).collect();
    let is_below = |listed: &&Listed| listed.branch().is_some_and(|branch| ids.contains(&branch.of));
    let (branches, roots): (Vec<&Listed>, Vec<&Listed>) = listed.iter().partition(is_below);
    let mut grouped = Vec::with_capacity(listed.len());
    for root in roots {
        grouped.push((root, false));
        let id = id(root);
        let own = branches.iter().filter(|listed| listed.branch().map(|branch| &branch.of) == id.as_ref());
        grouped.extend(own.map(|branch| (*branch, true)));
    }
    grouped
}

fn row(listed: &Listed, is_below: bool, now: u64) -> Vec<String> {
    let reason = listed.branch().map_or_else(String::new, |branch| format!(" ({})", branch.reason.as_str()));
    let name = format!("{}{}{reason}", if is_below { "  " } else { "" }, listed.name);
    match &listed.summary {
        Ok(summary) => vec![
            name,
            summary.turns.to_string(),
            counted_tokens(summary.tokens, summary.turns).map_or("-".to_owned(), |tokens| tokens.to_string()),
            age(now.saturating_sub(summary.last_used_ms)),
            summary.model.name.clone(),
        ],
        Err(error) => {
            let unknown = || "?".to_owned();
            vec![name, unknown(), unknown(), unknown(), format!("cannot be read: {error}")]
        }
    }
}

fn summary_json(listed: &Listed) -> Value {
    match &listed.summary {
        Ok(summary) => json!({
            "name": listed.name.as_str(),
            "turns": summary.turns,
            "tokens": counted_tokens(summary.tokens, summary.turns),
            "created_ms": summary.created_ms,
            "last_used_ms": summary.last_used_ms,
            "model": summary.model.name,
            "model_reference": summary.model.reference,
            "id": summary.id,
            "owner": summary.owner,
            "fork_of": summary.fork_of.as_ref().map(fork_json),
            "bytes": summary.num_bytes,
            "error": null,
        }),
        Err(error) => json!({"name": listed.name.as_str(), "error": error.to_string()}),
    }
}
