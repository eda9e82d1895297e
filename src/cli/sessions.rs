//! `llmctl sessions`: lists and manages saved sessions. Also explains, for all commands, why a session cannot
//! be opened.
//!
//! Conversations are continued in other commands. The error for an unknown name suggests a similar one.
//! `listing` and `show` make tables, `export` writes a conversation, `archive` moves a session between machines, `removal` removes what was requested and
//! nothing else.

pub mod archive;
pub mod encryption;
mod export;
mod listing;
mod removal;
mod show;

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use self::export::ExportFormat;
use super::error::{CommandError, Exit, Kind, nearest};
use super::flags::args::{ByteSize, DEFAULT_KV_DISK};
use super::places::Places;
use crate::cli::flags::args::ModelArgs;
use crate::cli::terminal::report::{ReportFormat, print_either};
use llmctl_base::{Error, StoreCause, StoreError};
use llmctl_engine::session::store::{Branch, ForkOf, Import, Repaired, SessionName, SessionStore};

pub(super) use self::export::{put_images, whole_messages};
pub(super) use self::listing::{list, rows};
pub(super) use self::removal::removed_text;
pub(super) use self::show::{message_text, show};

/// List, show and manage saved sessions
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct SessionsArgs {
    #[command(subcommand)]
    pub command: Option<SessionsCommand>,

    /// Use the sessions of this owner of API keys of `llmctl serve`, instead of your own
    ///
    /// Owners are those that the key file names, `anonymous` for a server without keys, and key-... for keys without an owner.
    #[arg(long, value_name = "NAME", global = true, value_parser = NonEmptyStringValueParser::new())]
    pub owner: Option<String>,

    /// Format of stdout: text, or one JSON object
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
    /// Compute a session's answers again, and compare them token by token with what is saved
    Replay(Box<SessionReplayArgs>),
    /// Write a session's conversation to stdout: Markdown, or a list of messages as the API takes them
    Export {
        /// The session
        #[arg(value_name = "NAME")]
        name: String,
        /// Format of the conversation
        #[arg(long = "as", value_enum, value_name = "FORMAT", default_value_t)]
        format: ExportFormat,
        /// Write the session to FILE for `sessions import`: its branches, images and KV too; - is stdout
        ///
        /// A tar archive under zstd, with checksums. It holds the conversation in clear, as the session's own files do.
        #[arg(long, value_name = "FILE", conflicts_with = "format")]
        with_kv: Option<PathBuf>,
        /// Replace FILE if it exists
        #[arg(long, requires = "with_kv")]
        force: bool,
    },
    /// Import a session from a file of `export --with-kv`, warm where the model is the same
    ///
    /// All of the file is checked before anything is written. The session's KV is used by the model that computed it: the same
    /// weights with the same --kv-type, whatever the file's name, place and time, also on another kind of processor. Take files
    /// only from people whom you trust: KV decides on answers, and nothing can tell whether it is what the model computes.
    Import {
        /// The file; - is stdin
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Name of the session (default: the one that it had)
        #[arg(long = "as", value_name = "NAME")]
        name: Option<String>,
        /// Disk for the KV of all saved sessions; 0 imports none (default: 4G)
        #[arg(long, value_name = "SIZE")]
        kv_disk: Option<ByteSize>,
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
    /// Put a branch back in its session's place; the session's previous content becomes a branch
    Restore {
        /// The branch, such as NAME~1
        #[arg(value_name = "BRANCH")]
        branch: String,
    },
    /// Remove sessions, and the KV on disk that no other session uses; asks first on a terminal
    #[command(visible_aliases = ["rm", "delete"])]
    Remove {
        /// The sessions
        #[arg(value_name = "NAME", required = true)]
        names: Vec<String>,
        /// Remove their branches too
        #[arg(long)]
        branches: bool,
        /// Do not ask
        #[arg(long, short)]
        yes: bool,
    },
    /// Erase undone and edited content from a session's file and its KV; its branches are kept
    Purge {
        /// The session
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Encrypt a session that was begun without --encrypt, with its branches and images; its KV is computed again
    Encrypt {
        /// The session
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Keep the lines before the first damaged one of a session's file, and the damaged file beside it
    Repair {
        /// The session
        #[arg(value_name = "NAME")]
        name: String,
    },
}

/// Flags of `sessions replay`.
#[derive(Debug, Clone, Args)]
pub struct SessionReplayArgs {
    /// The session, and the turn (default: the last), as `sessions show` numbers them
    #[arg(value_name = "NAME[@TURN]")]
    pub name: String,

    /// Compute all turns again
    #[arg(long)]
    pub all: bool,

    #[command(flatten)]
    pub model: ModelArgs,
}

const LONG_HELP: &str = include_str!("sessions_help.txt").trim_ascii_end();

/// Runs the subcommand; `replay` computes the turns of a session again.
pub fn run(
    args: SessionsArgs,
    places: &Places,
    replay: impl FnOnce(&SessionReplayArgs, &SessionStore, ReportFormat) -> Result<Exit, CommandError>,
) -> Result<Exit, CommandError> {
    let mut store = store(places)?;
    if let Some(owner) = &args.owner {
        store = owned(&store, owner, matches!(args.command, Some(SessionsCommand::Import { .. })))?;
    }
    let (text, object) = match args.command.unwrap_or(SessionsCommand::List) {
        SessionsCommand::List if args.owner.is_none() => {
            let (mut text, mut object) = list(&store, places)?;
            add_owners(&store, &mut text, &mut object)?;
            (text, object)
        }
        SessionsCommand::List => list(&store, places)?,
        SessionsCommand::Show { name } => {
            let name = parse(&name)?;
            let saved = store.read(&name).map_err(|error| not_found(error, &store))?;
            let (mut text, mut object) = show(&name, &saved);
            show::add_branches(&store.branches(&name)?, &mut text, &mut object);
            (text, object)
        }
        SessionsCommand::Replay(asked) => return replay(&asked, &store, args.output),
        SessionsCommand::Export { name, with_kv: Some(file), force, .. } => {
            match archive::export(&parse(&name)?, (&file, force), &store, places)? {
                Some(report) => report,
                None => return Ok(Exit::Success),
            }
        }
        SessionsCommand::Import { file, name, kv_disk } => {
            let name = name.as_deref().map(parse).transpose()?;
            let kv_limit = kv_disk.map_or(DEFAULT_KV_DISK, |size| size.0);
            let import = Import { name: name.as_ref(), kv_limit };
            archive::import(&file, import, &store)?
        }
        SessionsCommand::Export { name, format, .. } => {
            let name = parse(&name)?;
            let saved = store.read(&name).map_err(|error| not_found(error, &store))?;
            return export::run(&name, &saved, format);
        }
        SessionsCommand::Rename { from, to } => {
            let (from, to) = (parse(&from)?, parse(&to)?);
            store.rename(&from, &to).map_err(|error| not_found(error, &store))?;
            (format!("session {from} is now {to}\n"), json!({"renamed": from.as_str(), "name": to.as_str()}))
        }
        SessionsCommand::Restore { branch } => restore(&parse(&branch)?, &store)?,
        SessionsCommand::Remove { names, branches, yes } => {
            let names = names.iter().map(|name| parse(name)).collect::<Result<Vec<_>, _>>()?;
            removal::remove(names, &removal::Asked { branches, yes }, &store)?
        }
        SessionsCommand::Encrypt { name } => encrypt(&parse(&name)?, &store)?,
        SessionsCommand::Purge { name } => removal::purge(&parse(&name)?, &store)?,
        SessionsCommand::Repair { name } => {
            let repaired = store.repair(&parse(&name)?).map_err(|error| not_found(error, &store))?;
            repair(&parse(&name)?, repaired.as_ref(), places)
        }
    };
    print_either(args.output, &text, "llmctl.sessions.v1", object)
}

/// Returns the store below this user's data folder.
///
/// # Errors
/// Neither `XDG_DATA_HOME` nor a home directory is known; the folder of keys cannot be used.
pub fn store(places: &Places) -> Result<SessionStore, CommandError> {
    let folder = places.sessions().ok_or_else(|| {
        let message = "HOME and XDG_DATA_HOME are not set: there is no folder for sessions";
        Kind::Config.error(message).hint("set HOME or XDG_DATA_HOME")
    })?;
    Ok(SessionStore::new(folder).with_kv(places.kv()).with_vault(encryption::vault()?))
}

/// Returns the store of an owner of API keys, who may be new where sessions come in.
///
/// # Errors
/// `NotFound` with the known owners.
fn owned(store: &SessionStore, owner: &str, may_be_new: bool) -> Result<SessionStore, CommandError> {
    let owners = store.owners();
    if may_be_new || owners.iter().any(|known| known == owner) {
        return Ok(store.of_owner(owner));
    }
    let hint = match owners.is_empty() {
        true => "no server has stored sessions of others".to_owned(),
        false => format!("there are {}", owners.join(", ")),
    };
    Err(Kind::NotFound.error(format!("no owner of API keys named {owner:?} has sessions here")).hint(hint))
}

/// Adds to the list who else has sessions below the same folder.
fn add_owners(store: &SessionStore, text: &mut String, object: &mut Value) -> Result<(), CommandError> {
    let mut counts = Vec::new();
    for owner in store.owners() {
        let count = store.of_owner(&owner).list()?.len();
        if count > 0 {
            counts.push((owner, count));
        }
    }
    let shown: Vec<String> = counts.iter().map(|(owner, count)| format!("{owner} ({count})")).collect();
    if !shown.is_empty() {
        let shown = shown.join(", ");
        text.push_str(&format!("owners of API keys with sessions: {shown}; --owner NAME lists those\n"));
    }
    object["owners"] =
        counts.into_iter().map(|(owner, count)| json!({"owner": owner, "sessions": count})).collect();
    Ok(())
}

/// Returns what was read or opened of a session; `None` if there is no such session.
pub fn if_there<T>(read: Result<T, Error>) -> Result<Option<T>, CommandError> {
    match read {
        Err(Error::SessionNotFound(_)) => Ok(None),
        read => read.map(Some).map_err(explain),
    }
}

/// Adds a hint to the error of opening a session.
pub fn explain(error: Error) -> CommandError {
    let hint = match &error {
        Error::SessionBusy(name) => {
            return Kind::Temporary
                .error(format!("session {name:?} is open in another llmctl process"))
                .hint("try again when that has ended, or take another name");
        }
        Error::Store(StoreError::Io { cause: StoreCause::Full, .. }) => {
            "the disk is full: remove sessions or models, or set XDG_DATA_HOME; `chat --ephemeral` saves nothing"
        }
        Error::Store(StoreError::Io { cause: StoreCause::NotWritable, .. }) => {
            "set XDG_DATA_HOME to a folder that can be written; `chat --ephemeral` saves nothing"
        }
        Error::Store(StoreError::Damaged { line: 1, .. }) => {
            "nothing stands before the damage, so there is nothing to repair; `llmctl sessions remove NAME` frees the name"
        }
        Error::Store(StoreError::Damaged { .. }) => {
            "`llmctl sessions repair NAME` keeps what stands before the damage"
        }
        _ => return error.into(),
    };
    CommandError::from(error).hint(hint)
}

pub(super) fn parse(name: &str) -> Result<SessionName, CommandError> {
    SessionName::new(name).map_err(|error| match error {
        Error::InvalidParameter { message, .. } if message.starts_with("name ") => {
            CommandError::usage(format!("session {message}"))
        }
        Error::InvalidParameter { message, .. } => {
            CommandError::usage(format!("session {name:?}: {message}"))
        }
        other => other.into(),
    })
}

/// Adds a hint to the error of opening a session, and suggests a similar name.
pub(super) fn not_found(error: Error, store: &SessionStore) -> CommandError {
    let Error::SessionNotFound(name) = &error else { return explain(error) };
    let listed = store.list().unwrap_or_default();
    let hint = match nearest(name, listed.iter().map(|listed| listed.name.as_str())) {
        Some(near) => format!("did you mean {near}?"),
        None => "`llmctl sessions` lists them".to_owned(),
    };
    CommandError::from(error).hint(hint)
}

fn restore(branch: &SessionName, store: &SessionStore) -> Result<(String, Value), CommandError> {
    let (session, kept) = store.restore(branch).map_err(|error| match error {
        Error::SessionNotFound(name) if name != branch.as_str() => CommandError::from(
            Error::SessionNotFound(name),
        )
        .hint("its session is removed: `llmctl sessions rename` makes the branch a session of its own"),
        error => not_found(error, store),
    })?;
    let also = kept.as_ref().map_or_else(String::new, |kept| format!("; what it held is {kept}"));
    let object = json!({
        "restored": branch.as_str(),
        "name": session.as_str(),
        "kept_as": kept.as_ref().map(|kept| kept.as_str()),
    });
    Ok((format!("session {session} holds what {branch} held{also}\n"), object))
}

/// Returns the tokens of a session; `None` if its last answer is an endpoint's, which keeps them to itself.
fn counted_tokens(num_tokens: usize, num_turns: usize) -> Option<usize> {
    (num_tokens > 0 || num_turns == 0).then_some(num_tokens)
}

/// `branch` is null for a fork that the user requested.
fn fork_json(fork: &ForkOf) -> Value {
    let branch = |branch: &Branch| json!({"of": branch.of, "reason": branch.reason.as_str()});
    json!({"name": fork.name, "turns": fork.turns, "branch": fork.branch.as_ref().map(branch)})
}

fn encrypt(name: &SessionName, store: &SessionStore) -> Result<(String, Value), CommandError> {
    if !encryption::is_on() {
        return Err(CommandError::usage("--encrypt DIR is missing: it has the keys"));
    }
    // First, because the branches of a sealed session are found in the same way.
    let branches = store.branches(name).map_err(|error| not_found(error, store))?;
    let names = branches.iter().map(|branch| &branch.name).filter(|branch| *branch != name);
    let (mut text, mut done) = (String::new(), Vec::new());
    for name in std::iter::once(name).chain(names) {
        let is_new = store.encrypt(name).map_err(|error| not_found(error, store))?;
        let is = if is_new { "is encrypted" } else { "was encrypted before" };
        text.push_str(&format!("session {name} {is}\n"));
        done.push(json!({"name": name.as_str(), "encrypted_now": is_new}));
    }
    if done.iter().any(|one: &Value| one["encrypted_now"] == true) {
        text.push_str(
            "plain text stays: copies of its files made before, what the disk still holds of them, and lines typed in chat (the file \
             `history` of the state folder)\n",
        );
    }
    Ok((text, json!({"encrypted": done})))
}

fn repair(name: &SessionName, repaired: Option<&Repaired>, places: &Places) -> (String, Value) {
    let Some(Repaired { line, turns, backup }) = repaired else {
        return (
            format!("session {name}: nothing is damaged\n"),
            json!({"name": name.as_str(), "damaged_line": null}),
        );
    };
    let kept = if *turns == 1 { "1 turn is".to_owned() } else { format!("{turns} turns are") };
    let text = format!(
        "session {name}: line {line} was damaged; {kept} kept, the damaged file is {}\n",
        places.shorten(backup)
    );
    (text, json!({"name": name.as_str(), "damaged_line": line, "turns": turns, "backup": backup}))
}
