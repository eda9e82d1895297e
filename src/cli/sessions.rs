//! `llmctl sessions`: what is saved, and its names; and what all commands that open a session say when they cannot.
//!
//! Shows and manages; conversations themselves go on in the commands that answer. A name that is not there is an error
//! that says which one was probably meant.

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::clock::local_time;
use super::error::{CommandError, Exit, Kind, nearest};
use super::places::Places;
use super::report::{ReportFormat, columns, print, print_json};
use crate::runtime::kv::disk;
use crate::runtime::session::store::{
    Branch, ForkOf, Listed, Repaired, SavedSession, SavedTurn, SessionName, SessionStore, now_ms,
};
use crate::runtime::{Error, Finish};
use crate::template::{Content, Message};

/// List, show and manage saved sessions
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct SessionsArgs {
    #[command(subcommand)]
    pub command: Option<SessionsCommand>,

    /// What goes to stdout: text, or one JSON object
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t, global = true)]
    pub output: ReportFormat,
}

#[derive(Debug, Clone, Subcommand)]
pub enum SessionsCommand {
    /// List the sessions, the last used first (the default)
    List,
    /// Show a session's conversation
    Show {
        /// The session
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Give a session another name
    Rename {
        /// The name that it has
        #[arg(value_name = "OLD")]
        from: String,
        /// The name that it gets, which no session has yet
        #[arg(value_name = "NEW")]
        to: String,
    },
    /// Remove a session and its KV on disk
    Remove {
        /// The session
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Keep what stands before the first damaged line of a session's file, and the damaged file beside it
    Repair {
        /// The session
        #[arg(value_name = "NAME")]
        name: String,
    },
}

/// Removes what the conversation has left in the cache: it holds the tokens in clear.
pub(super) fn forget_kv(tokens: &[u32], places: &Places) -> Result<usize, CommandError> {
    let Some(root) = places.kv() else { return Ok(0) };
    disk::forget(&root, tokens).map_err(|error| {
        CommandError::new(Kind::Io, anyhow::anyhow!("{}: {error}", root.display()))
            .hint("the session is removed; the rest of its KV can be deleted by hand")
    })
}

const LONG_HELP: &str = "\
Examples:
  llmctl run -m MODEL --session trip \"Plan a day in Oslo\"
  llmctl sessions
  llmctl sessions show trip --output json | jq -r '.turns[].messages[].content'

Files:
  $XDG_DATA_HOME/llmctl/sessions/    a folder per session, with its conversation in transcript.jsonl

Exit codes:
  0    success
  2    usage: no name, or one that is taken
  65   a session's file is damaged, or a newer llmctl wrote it
  66   there is no session of that name
  74   input or output failed
  75   another process has the session open";

pub fn run(args: SessionsArgs, places: &Places) -> Result<Exit, CommandError> {
    let store = store(places)?;
    let (text, object) = match args.command.unwrap_or(SessionsCommand::List) {
        SessionsCommand::List => list(&store, places)?,
        SessionsCommand::Show { name } => {
            let name = parse(&name)?;
            show(&name, &store.read(&name).map_err(|error| not_found(error, &store))?)
        }
        SessionsCommand::Rename { from, to } => {
            let (from, to) = (parse(&from)?, parse(&to)?);
            store.rename(&from, &to).map_err(|error| not_found(error, &store))?;
            (format!("session {from} is now {to}\n"), json!({"renamed": from.as_str(), "name": to.as_str()}))
        }
        SessionsCommand::Remove { name } => {
            let name = parse(&name)?;
            // What cannot be read has no tokens to find its KV by; that goes when its place on disk is needed.
            let tokens = store.read(&name).map(|saved| saved.tokens()).unwrap_or_default();
            store.remove(&name).map_err(|error| not_found(error, &store))?;
            let num_pages = forget_kv(&tokens, places)?;
            (
                format!("session {name} is removed, with {num_pages} pages of KV\n"),
                json!({"removed": name.as_str(), "kv_pages": num_pages}),
            )
        }
        SessionsCommand::Repair { name } => {
            let name = parse(&name)?;
            let repaired = store.repair(&name).map_err(|error| not_found(error, &store))?;
            repair(&name, repaired.as_ref(), places)
        }
    };
    match args.output {
        ReportFormat::Text => print(&text),
        ReportFormat::Json => {
            let mut whole = json!({"schema": "llmctl.sessions.v1"});
            if let (Value::Object(whole), Value::Object(fields)) = (&mut whole, object) {
                whole.extend(fields);
            }
            print_json(&whole)
        }
    }
}

/// The store below this user's data folder.
///
/// # Errors
/// Neither `XDG_DATA_HOME` nor a home says where that is.
pub fn store(places: &Places) -> Result<SessionStore, CommandError> {
    let folder = places.sessions().ok_or_else(|| {
        let error = anyhow::anyhow!("HOME and XDG_DATA_HOME are not set: there is no folder for sessions");
        CommandError::new(Kind::Config, error).hint("set HOME or XDG_DATA_HOME")
    })?;
    Ok(SessionStore::new(folder))
}

/// What can be done when a session cannot be opened.
pub fn explain(error: Error) -> CommandError {
    let hint = match &error {
        Error::SessionBusy(name) => {
            let error = anyhow::anyhow!("session {name:?} is open in another llmctl process");
            return CommandError::new(Kind::Temporary, error)
                .hint("try again when that has ended, or take another name");
        }
        Error::Store(crate::runtime::StoreError::Damaged { .. }) => {
            "`llmctl sessions repair NAME` keeps what stands before the damage"
        }
        _ => return error.into(),
    };
    CommandError::from(error).hint(hint)
}

pub(super) fn parse(name: &str) -> Result<SessionName, CommandError> {
    SessionName::new(name).map_err(|error| match error {
        Error::InvalidParameter { message, .. } => CommandError::usage(format!("{name:?}: {message}")),
        other => other.into(),
    })
}

/// As [`explain`], and which session was probably meant.
pub(super) fn not_found(error: Error, store: &SessionStore) -> CommandError {
    let Error::SessionNotFound(name) = &error else { return explain(error) };
    let listed = store.list().unwrap_or_default();
    let hint = match nearest(name, listed.iter().map(|listed| listed.name.as_str())) {
        Some(near) => format!("did you mean {near}?"),
        None => "`llmctl sessions` lists them".to_owned(),
    };
    CommandError::from(error).hint(hint)
}

pub(super) fn list(store: &SessionStore, places: &Places) -> Result<(String, Value), CommandError> {
    let listed = by_last_use(store)?;
    let folder = places.sessions();
    let object = json!({"folder": folder, "sessions": listed.iter().map(summary_json).collect::<Vec<_>>()});
    if listed.is_empty() {
        let folder = folder.map_or(String::new(), |folder| places.shorten(&folder));
        return Ok((format!("no sessions in {folder}\n"), object));
    }
    Ok((columns(&rows_of(&listed)), object))
}

/// The list as a table, its head included.
pub(super) fn rows(store: &SessionStore) -> Result<Vec<Vec<String>>, CommandError> {
    Ok(rows_of(&by_last_use(store)?))
}

fn rows_of(listed: &[Listed]) -> Vec<Vec<String>> {
    let head = ["NAME", "TURNS", "TOKENS", "LAST USED", "MODEL"].map(str::to_owned).to_vec();
    let now = now_ms();
    [head].into_iter().chain(listed.iter().map(|listed| row(listed, now))).collect()
}

fn by_last_use(store: &SessionStore) -> Result<Vec<Listed>, CommandError> {
    let mut listed = store.list()?;
    let last_used = |listed: &Listed| listed.summary.as_ref().map_or(0, |summary| summary.last_used_ms);
    listed.sort_by_key(|listed| std::cmp::Reverse(last_used(listed)));
    Ok(listed)
}

fn row(listed: &Listed, now: u64) -> Vec<String> {
    let name = listed.name.to_string();
    match &listed.summary {
        Ok(summary) => vec![
            name,
            summary.turns.to_string(),
            summary.tokens.to_string(),
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
            "tokens": summary.tokens,
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

/// `branch` is null for a fork that was asked for.
fn fork_json(fork: &ForkOf) -> Value {
    let branch = |branch: &Branch| json!({"of": branch.of, "reason": branch.reason.as_str()});
    json!({"name": fork.name, "turns": fork.turns, "branch": fork.branch.as_ref().map(branch)})
}

pub(super) fn show(name: &SessionName, saved: &SavedSession) -> (String, Value) {
    let fork = saved.fork_of.as_ref();
    let mut facts = vec![
        ["session".to_owned(), name.to_string()],
        ["model".to_owned(), saved.model.name.clone()],
        ["reference".to_owned(), saved.model.reference.clone().unwrap_or_else(|| "unknown".to_owned())],
        ["created".to_owned(), when(saved.created_ms)],
        ["last used".to_owned(), when(saved.last_used_ms)],
        ["turns".to_owned(), saved.turns.len().to_string()],
        ["tokens".to_owned(), saved.num_tokens().to_string()],
    ];
    facts.extend(saved.owner.iter().map(|owner| ["owner".to_owned(), owner.clone()]));
    facts.extend(fork.map(|fork| {
        let kind = match &fork.branch {
            None => "fork of".to_owned(),
            Some(branch) => format!("branch ({}) of", branch.reason.as_str()),
        };
        [kind, format!("{}, {}", fork.name, turns(fork.turns))]
    }));
    let mut text = columns(&facts.into_iter().map(Vec::from).collect::<Vec<_>>());
    for (at, turn) in saved.turns.iter().enumerate() {
        text.push_str(&turn_text(at + 1, turn));
    }
    let object = json!({
        "name": name.as_str(),
        "model": saved.model.name,
        "model_reference": saved.model.reference,
        "id": saved.id,
        "owner": saved.owner,
        "created_ms": saved.created_ms,
        "last_used_ms": saved.last_used_ms,
        "tokens": saved.num_tokens(),
        "fork_of": fork.map(fork_json),
        "turns": saved.turns.iter().map(|saved| turn_json(saved)).collect::<Vec<_>>(),
    });
    (text, object)
}

fn turns(count: usize) -> String {
    if count == 1 { "1 turn".to_owned() } else { format!("{count} turns") }
}

fn turn_text(number: usize, saved: &SavedTurn) -> String {
    let turn = &saved.turn;
    let finish = match &turn.finish {
        Finish::Cancelled => "cancelled",
        finish => finish.reason(),
    };
    let (prompt, answer) = (turn.usage.prompt_tokens, turn.usage.completion_tokens);
    let mut text =
        format!("\n-- turn {number}: {}, {prompt} + {answer} tokens, {finish}\n", when(turn.finished_ms));
    for message in &turn.messages {
        text.push_str(&format!("[{}] {}\n", message.role.as_str(), message_text(message)));
    }
    text
}

/// A message for people: its reasoning and calls are named, its text is as it is.
pub(super) fn message_text(message: &Message) -> String {
    let reasoning = message.reasoning.as_ref().map(|text| format!("(reasoning) {text}"));
    let content = match &message.content {
        Some(Content::Text(text)) => Some(text.clone()),
        Some(Content::Parts(parts)) => Some(Value::Array(parts.clone()).to_string()),
        None => None,
    };
    let calls = message.tool_calls.iter().map(|call| format!("(calls {}) {}", call.name, call.arguments));
    reasoning.into_iter().chain(content).chain(calls).collect::<Vec<_>>().join("\n")
}

fn turn_json(saved: &SavedTurn) -> Value {
    let turn = &saved.turn;
    json!({
        "messages": turn.messages.iter().map(message_json).collect::<Vec<_>>(),
        "model": saved.model.name,
        "finish_reason": turn.finish.reason(),
        "usage": super::run::report::usage_json(&turn.usage),
        "seed": turn.sampling.seed,
        "started_ms": turn.started_ms,
        "finished_ms": turn.finished_ms,
    })
}

/// OpenAI's message object; absent fields stay absent.
pub(super) fn message_json(message: &Message) -> Value {
    let content = match &message.content {
        None => Value::Null,
        Some(Content::Text(text)) => Value::String(text.clone()),
        Some(Content::Parts(parts)) => Value::Array(parts.clone()),
    };
    let mut object = json!({"role": message.role.as_str(), "content": content});
    let texts = [
        ("reasoning_content", &message.reasoning),
        ("tool_call_id", &message.tool_call_id),
        ("name", &message.name),
    ];
    for (field, text) in texts {
        if let Some(text) = text {
            object[field] = text.as_str().into();
        }
    }
    if !message.tool_calls.is_empty() {
        let call = |call: &crate::template::ToolCall| {
            let function = json!({"name": call.name, "arguments": call.arguments.to_string()});
            json!({"id": call.id, "type": "function", "function": function})
        };
        object["tool_calls"] = message.tool_calls.iter().map(call).collect();
    }
    object
}

fn repair(name: &SessionName, repaired: Option<&Repaired>, places: &Places) -> (String, Value) {
    let Some(Repaired { line, turns, backup }) = repaired else {
        return (
            format!("session {name}: nothing is damaged\n"),
            json!({"name": name.as_str(), "damaged_line": null}),
        );
    };
    let text = format!(
        "session {name}: line {line} was damaged; {turns} turns are kept, the damaged file is {}\n",
        places.shorten(backup)
    );
    (text, json!({"name": name.as_str(), "damaged_line": line, "turns": turns, "backup": backup}))
}

fn when(ms: u64) -> String {
    local_time(ms).strftime("%F %T")
}

/// How long ago, in its largest whole unit.
pub(super) fn age(ms: u64) -> String {
    let seconds = ms / 1000;
    let units = [("day", 86_400), ("hour", 3_600), ("minute", 60)];
    let unit = units.iter().find(|(_, length)| seconds >= *length);
    match unit.map(|(name, length)| (name, seconds / length)) {
        None => "just now".to_owned(),
        Some((name, 1)) => format!("1 {name} ago"),
        Some((name, count)) => format!("{count} {name}s ago"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::template::{Role, ToolCall};

    #[test]
    fn ages_are_in_the_largest_whole_unit() {
        for (seconds, expected) in [
            (0, "just now"),
            (59, "just now"),
            (60, "1 minute ago"),
            (7_199, "1 hour ago"),
            (7_200, "2 hours ago"),
            (86_400 * 400, "400 days ago"),
        ] {
            assert_eq!(age(seconds * 1000), expected);
        }
    }

    #[test]
    fn messages_show_all_they_have() {
        let mut message = Message::assistant("see");
        message.reasoning = Some("hm".to_owned());
        message.tool_calls =
            vec![ToolCall { id: Some("c1".to_owned()), name: "f".to_owned(), arguments: json!({"a": 1}) }];
        assert_eq!(message_text(&message), "(reasoning) hm\nsee\n(calls f) {\"a\":1}");
        let expected = json!({
            "role": "assistant", "content": "see", "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}}],
        });
        assert_eq!(message_json(&message), expected);
        let result =
            Message { content: None, tool_call_id: Some("c1".to_owned()), ..Message::new(Role::Tool, "") };
        assert_eq!(message_json(&result), json!({"role": "tool", "content": null, "tool_call_id": "c1"}));
    }
}
