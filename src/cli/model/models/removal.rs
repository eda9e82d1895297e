//! `models rm` and `models prune`: erase what was asked for, after a question, and name the sessions that
//! need it.
//!
//! Without a terminal there is no question, so `--yes` is required. Nothing is erased while a download or a
//! process uses it.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Value, json};

use super::last_use;
use crate::cli::error::{CommandError, Exit, Kind};
use crate::cli::places::Places;
use crate::cli::terminal::output::visible;
use crate::cli::terminal::question;
use crate::cli::terminal::report::{ReportFormat, bytes, columns, counted, print_either};
use crate::cli::{CommandContext, sessions};
use llmctl_engine::session::store::SessionStore;
use llmctl_hub::builtin::GUIDE;
use llmctl_hub::upkeep::{
    BlobFile, DownloadLocks, Erasure, MappedFiles, RemovalScope, RepoScan, SnapshotScan,
};
use llmctl_hub::{Aliases, ModelRef, Repo, Selector};

/// Permission to erase files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Consent {
    /// Ask on the terminal.
    Ask,
    Given,
    /// Show the plan only.
    DryRun,
}

const SCHEMA: &str = "llmctl.models.v1";

/// A session and the path of the model that it continues with; `None` if the session cannot be read.
type SessionModel = (String, Option<PathBuf>);

/// A part of the cache that a user named.
struct CacheTarget {
    reference: String,
    repo: Repo,
    /// The commit; `None` for all revisions.
    commit: Option<String>,
    selector: Option<Selector>,
}

impl CacheTarget {
    /// Finds what a reference means in the cache. Unlike `--model`, a repository alone means all that is cached of it.
    fn of(reference: &str, places: &Places, aliases: &Aliases) -> Result<Self, CommandError> {
        let parsed = ModelRef::parse(reference)?;
        if reference == GUIDE.name && !aliases.contains_key(reference) {
            return Err(CommandError::usage(format!("{reference} is a part of llmctl and cannot be erased")));
        }
        let of_hub = llmctl_hub::remote_form(&parsed, aliases).map_err(|error| {
            CommandError::from(error)
                .hint("`models rm` erases models of the Hugging Face cache; `ollama rm` those of ollama")
        })?;
        let listed = "`llmctl models` lists what you have";
        let repo = llmctl_hub::cached_repo(&parsed, &of_hub, &places.hub_paths(), aliases)
            .map_err(|error| CommandError::from(error).hint(listed))?;
        let is_part = of_hub.revision.is_some() || of_hub.selector.is_some();
        let commit = match is_part.then(|| repo.snapshot(of_hub.revision.as_deref())).transpose() {
            Ok(snapshot) => snapshot.map(|snapshot| snapshot.commit),
            Err(revisions) => {
                let message = format!("{reference}: there is no such revision of {}", repo.id);
                let hint = format!("there are {}", revisions.join(", "));
                return Err(Kind::NotFound.error(message).hint(hint));
            }
        };
        Ok(Self { reference: reference.to_owned(), repo, commit, selector: of_hub.selector })
    }

    fn plan(&self, cache: &Path) -> Result<(RepoScan, Erasure), CommandError> {
        let scan = RepoScan::of(cache, &self.repo);
        let scope = match (&self.commit, &self.selector) {
            (None, _) => RemovalScope::Repository,
            (Some(commit), None) => RemovalScope::Snapshot(commit),
            (Some(commit), Some(selector)) => RemovalScope::Model(commit, selector),
        };
        let plan = scan.removal(scope).map_err(|message| {
            let message = format!("{}: {message}", self.reference);
            Kind::NotFound.error(message).hint("`llmctl models` lists what you have")
        })?;
        Ok((scan, plan))
    }
}

/// Erases models.
pub fn remove(
    references: &[String],
    consent: Consent,
    CommandContext { config, places, .. }: CommandContext<'_>,
    format: ReportFormat,
) -> Result<Exit, CommandError> {
    let cache = places.hub.clone().unwrap_or_default();
    let aliases = config.aliases();
    let targets = references
        .iter()
        .map(|reference| CacheTarget::of(reference, places, &aliases))
        .collect::<Result<Vec<_>, _>>()?;
    let plans = targets.iter().map(|target| target.plan(&cache)).collect::<Result<Vec<_>, _>>()?;
    let mapped = MappedFiles::read(Path::new("/"));
    for (target, (scan, plan)) in targets.iter().zip(&plans) {
        check_unused(&target.reference, scan, plan, &mapped).map(drop)?;
    }
    let mut models = session_models(places, &aliases);
    models.retain(|(_, path)| path.is_some()); // the user has named what is to go
    let sessions = sessions_with(plans.iter().map(|(_, plan)| plan), &models);
    let total = plans.iter().map(|(_, plan)| plan.bytes).sum();
    let described = described(&targets, &plans);
    if !is_agreed(consent, &format!("{described}{}", needed(&sessions)), total)? {
        let object = json!({"removed": [], "bytes": 0, "sessions": sessions});
        return print_either(format, "nothing is erased\n", SCHEMA, object);
    }
    let (mut text, mapped) = (String::new(), MappedFiles::read(Path::new("/")));
    for target in &targets {
        // Planned again: what went before may have been the last other model of the repository.
        let (scan, plan) = target.plan(&cache)?;
        let freed = erase(&target.reference, &scan, &plan, &mapped, places)?;
        text.push_str(&format!("{} is erased, {} freed{}\n", target.reference, bytes(freed), kept(&plan)));
    }
    text.push_str(&needed(&sessions));
    let object = json!({"removed": references, "bytes": total, "sessions": sessions});
    print_either(format, &visible(&text), SCHEMA, object)
}

/// Erases a model without a question, unless a session continues with it.
pub fn erase_unneeded(reference: &str, places: &Places, aliases: &Aliases) -> Result<(), CommandError> {
    let target = CacheTarget::of(reference, places, aliases)?;
    let (scan, plan) = target.plan(&places.hub.clone().unwrap_or_default())?;
    let sessions = sessions_with([&plan].into_iter(), &session_models(places, aliases));
    if !sessions.is_empty() {
        let message = format!("{reference} is kept for {}", counted(sessions.len(), "session"));
        return Err(Kind::Usage.error(message));
    }
    erase(reference, &scan, &plan, &MappedFiles::read(Path::new("/")), places).map(drop)
}

/// Lists what a question is about.
fn described(targets: &[CacheTarget], plans: &[(RepoScan, Erasure)]) -> String {
    let row = |(target, (_, plan)): (&CacheTarget, &(RepoScan, Erasure))| {
        let revisions = if target.commit.is_none() { ", all revisions" } else { "" };
        let files = counted(plan.blobs.len(), "file");
        format!("{} ({}, {files}{revisions}){}\n", target.reference, bytes(plan.bytes), kept(plan))
    };
    targets.iter().zip(plans).map(row).collect()
}

fn kept(plan: &Erasure) -> String {
    let commits: Vec<&str> = plan.kept_for.iter().map(|commit| commit.get(..12).unwrap_or(commit)).collect();
    if commits.is_empty() { String::new() } else { format!("; kept for revision {}", commits.join(", ")) }
}

fn needed(sessions: &[String]) -> String {
    if sessions.is_empty() {
        String::new()
    } else {
        format!("sessions that continue with it: {}\n", sessions.join(", "))
    }
}

/// Asks the user at a terminal.
///
/// # Errors
/// A usage error without a terminal and without `--yes`.
fn is_agreed(consent: Consent, described: &str, total: u64) -> Result<bool, CommandError> {
    match consent {
        Consent::Given => return Ok(true),
        Consent::DryRun => return Ok(false),
        Consent::Ask => {}
    }
    question::may_erase(&format!("{described}erase {}?", bytes(total)))
}

/// Checks that all files lie in the cache and that no download and no process needs them, and keeps downloads from starting.
fn check_unused(
    what: &str,
    scan: &RepoScan,
    plan: &Erasure,
    mapped: &MappedFiles,
) -> Result<DownloadLocks, CommandError> {
    if let Some(path) = plan.behind_link() {
        let message = format!("{what}: {} lies behind a link, outside of the cache", path.display());
        return Err(Kind::Io.error(message).hint("erase the link, or what it leads to, by hand"));
    }
    let locks = DownloadLocks::take(scan.locks(), plan.hashes()).map_err(|hash| {
        let message =
            format!("{what}: a download of it is running (file {})", hash.get(..12).unwrap_or(&hash));
        Kind::Temporary.error(message).hint("try again when it has ended, or stop it")
    })?;
    let users = mapped.users(&plan.contents());
    if users.is_empty() {
        return Ok(locks);
    }
    let message = format!("{what} is in use by {}", users.join(", "));
    Err(Kind::Temporary.error(message).hint("end that process first"))
}

fn erase(
    what: &str,
    scan: &RepoScan,
    plan: &Erasure,
    mapped: &MappedFiles,
    places: &Places,
) -> Result<u64, CommandError> {
    let _locks = check_unused(what, scan, plan, mapped)?;
    for model in loaded_paths(scan, plan) {
        last_use::forget(&model, places);
    }
    plan.run().map_err(|(path, error)| {
        CommandError::new(Kind::Io, error).context(format!("{}: cannot be erased", places.shorten(&path)))
    })?;
    Ok(plan.bytes)
}

/// Returns the paths that records of use may be about: folders of snapshots, and their files.
fn loaded_paths(scan: &RepoScan, plan: &Erasure) -> Vec<PathBuf> {
    let folders = scan.snapshots.iter().map(|snapshot| &snapshot.snapshot.dir);
    let files = scan.snapshots.iter().flat_map(|snapshot| &snapshot.files).map(|file| &file.path);
    folders.chain(files).filter(|path| plan.covers(path)).cloned().collect()
}

/// Lists the sessions whose model a plan erases, or may erase because it is not known.
fn sessions_with<'a>(plans: impl Iterator<Item = &'a Erasure>, models: &[SessionModel]) -> Vec<String> {
    let plans: Vec<&Erasure> =
        plans.filter(|plan| !plan.files.is_empty() || !plan.folders.is_empty()).collect();
    let name = |(name, path): &SessionModel| match path {
        Some(path) => plans.iter().any(|plan| plan.covers(path)).then(|| name.clone()),
        None if plans.is_empty() => None,
        None => Some(format!(
            "{name} (cannot be read: its model is not known; an encrypted one needs --encrypt DIR)"
        )),
    };
    models.iter().filter_map(name).collect()
}

/// Returns each session whose model is found, with the path of the model, and those that cannot be read. Sessions of owners of
/// API keys are written `owner/name`.
fn session_models(places: &Places, aliases: &Aliases) -> Vec<SessionModel> {
    let own = match sessions::store(places) {
        Ok(own) => own,
        Err(_) if places.sessions().is_none() => return Vec::new(),
        Err(_) => return vec![("all sessions".to_owned(), None)],
    };
    let owners = own.owners().into_iter().map(|owner| (format!("{owner}/"), own.of_owner(&owner)));
    let stores: Vec<(String, SessionStore)> = owners.collect();
    let mut models = Vec::new();
    for (prefix, store) in
        [(String::new(), &own)].into_iter().chain(stores.iter().map(|(p, s)| (p.clone(), s)))
    {
        for listed in store.list().unwrap_or_default() {
            let name = format!("{prefix}{}", listed.name);
            let Ok(summary) = listed.summary else {
                models.push((name, None));
                continue;
            };
            let parsed = summary.model.reference.and_then(|reference| ModelRef::parse(&reference).ok());
            let found =
                parsed.and_then(|parsed| llmctl_hub::resolve(&parsed, &places.hub_paths(), aliases).ok());
            models.extend(found.map(|found| (name, Some(found.source.path().to_path_buf()))));
        }
    }
    models
}

/// Something that no model needs.
struct Garbage {
    path: PathBuf,
    reason: &'static str,
    scan: RepoScan,
    plan: Erasure,
    /// Reason why it cannot be erased now; `None` if it can.
    obstacle: Option<String>,
}

impl Garbage {
    fn of_blob(scan: &RepoScan, blob: &BlobFile) -> Self {
        let reason = if blob.is_partial { "download given up" } else { "no revision has it" };
        Self {
            path: blob.path.clone(),
            reason,
            scan: scan.clone(),
            plan: Erasure::of_blobs(&[blob]),
            obstacle: None,
        }
    }

    fn of_snapshot(scan: &RepoScan, snapshot: &SnapshotScan) -> Option<Self> {
        let plan = scan.removal(RemovalScope::Snapshot(&snapshot.snapshot.commit)).ok()?;
        let (path, reason) = (snapshot.snapshot.dir.clone(), "replaced revision");
        Some(Self { path, reason, scan: scan.clone(), plan, obstacle: None })
    }
}

/// Erases what no model needs.
pub fn prune(
    consent: Consent,
    CommandContext { config, places, .. }: CommandContext<'_>,
    format: ReportFormat,
) -> Result<Exit, CommandError> {
    let mut found = garbage(places, &config.aliases());
    let total = found.iter().filter(|one| one.obstacle.is_none()).map(|one| one.plan.bytes).sum();
    let erasable = found.iter().filter(|one| one.obstacle.is_none()).count();
    let list = columns(&found.iter().map(|one| row(one, places)).collect::<Vec<_>>());
    let is_agreed = erasable > 0 && is_agreed(consent, &list, total)?;
    if is_agreed {
        // Another process may have begun to use it since the question.
        let mapped = MappedFiles::read(Path::new("/"));
        for one in found.iter_mut().filter(|one| one.obstacle.is_none()) {
            let what = places.shorten(&one.path);
            let erased = erase(&what, &one.scan, &one.plan, &mapped, places);
            one.obstacle = erased.err().map(|error| error.to_string());
        }
    }
    let erased: Vec<&Garbage> = found.iter().filter(|one| is_agreed && one.obstacle.is_none()).collect();
    let freed: u64 = erased.iter().map(|one| one.plan.bytes).sum();
    let entries: Vec<Value> = found.iter().map(entry).collect();
    let fields = json!({"garbage": entries, "erased": erased.len(), "bytes": freed, "dry_run": consent == Consent::DryRun});
    let summary = match (erasable, is_agreed) {
        (0, _) => "nothing to erase\n".to_owned(),
        (_, true) => format!("{} erased, {} freed\n", counted(erased.len(), "item"), bytes(freed)),
        (_, false) => format!("{} could be freed; nothing is erased\n", bytes(total)),
    };
    print_either(format, &visible(&format!("{list}{summary}")), SCHEMA, fields)
}

/// Finds what no model needs, in all repositories of the cache.
fn garbage(places: &Places, aliases: &Aliases) -> Vec<Garbage> {
    let Some(cache) = places.hub.as_deref() else { return Vec::new() };
    let models = session_models(places, aliases);
    let mut found = Vec::new();
    for repo in llmctl_hub::repos(Some(cache)) {
        let scan = RepoScan::of(cache, &repo);
        let blobs = scan.unreferenced(SystemTime::now());
        found.extend(blobs.into_iter().map(|blob| Garbage::of_blob(&scan, blob)));
        found
            .extend(scan.detached().into_iter().filter_map(|snapshot| Garbage::of_snapshot(&scan, snapshot)));
    }
    let mapped = MappedFiles::read(Path::new("/"));
    for one in &mut found {
        let sessions = sessions_with([&one.plan].into_iter(), &models);
        one.obstacle = match sessions.is_empty() {
            false => Some(format!("kept for {}", sessions.join(", "))),
            true => check_unused("it", &one.scan, &one.plan, &mapped).err().map(|error| error.to_string()),
        };
    }
    found
}

fn row(one: &Garbage, places: &Places) -> Vec<String> {
    let obstacle =
        one.obstacle.as_ref().map_or_else(String::new, |obstacle| format!("not erased: {obstacle}"));
    vec![places.shorten(&one.path), bytes(one.plan.bytes), one.reason.to_owned(), obstacle]
}

fn entry(one: &Garbage) -> Value {
    json!({"path": one.path, "bytes": one.plan.bytes, "reason": one.reason, "kept_because": one.obstacle})
}
