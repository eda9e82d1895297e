//! `models verify`: compares every file of the cache with the hash that is its name.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::cli::CommandContext;
use crate::cli::config::Config;
use crate::cli::error::{CommandError, Exit, Kind};
use crate::cli::places::Places;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::output::visible;
use crate::cli::terminal::report::{ReportFormat, bytes, counted, print, print_json};
use llmctl_hub::upkeep::{BlobCheck, BlobState, RepoScan, check_blob};
use llmctl_hub::{ModelRef, Repo};

/// Result of checking the cache or some of its repositories.
#[derive(Default)]
struct CacheReport {
    num_good: usize,
    bytes: u64,
    damaged: Vec<(Repo, BlobCheck)>,
    /// Links to missing files, and missing parts of models.
    missing: Vec<PathBuf>,
    /// Partial files, and files whose name is no hash.
    unchecked: Vec<PathBuf>,
}

/// Checks the repositories that `references` name, or all.
///
/// # Errors
/// `BadData` if a file is damaged or missing; the report is on stdout.
pub fn verify(
    references: &[String],
    context: CommandContext<'_>,
    format: ReportFormat,
) -> Result<Exit, CommandError> {
    let CommandContext { config, places, terminal, .. } = context;
    let repos = named_repos(references, config, places)?;
    let cache = places.hub.clone().unwrap_or_default();
    let report = checked(&repos, &cache, terminal);
    match format {
        ReportFormat::Text => print(&visible(&report.text(places)))?,
        ReportFormat::Json => print_json(&report.to_json())?,
    };
    let num_bad = report.damaged.len() + report.missing.len();
    if num_bad == 0 {
        return Ok(Exit::Success);
    }
    let first = report.damaged.first().map_or("ORG/REPO", |(repo, _)| &repo.id);
    let hint =
        format!("`llmctl models rm {first}` erases a repository; it is downloaded again when it is used");
    Err(Kind::BadData.error(format!("{} of the cache cannot be used", counted(num_bad, "file"))).hint(hint))
}

fn named_repos(references: &[String], config: &Config, places: &Places) -> Result<Vec<Repo>, CommandError> {
    if references.is_empty() {
        return Ok(llmctl_hub::repos(places.hub.as_deref()));
    }
    let aliases = config.aliases();
    let mut repos: Vec<Repo> = Vec::new();
    for reference in references {
        let parsed = ModelRef::parse(reference)?;
        let of_hub = llmctl_hub::remote_form(&parsed, &aliases)?;
        let repo = llmctl_hub::cached_repo(&parsed, &of_hub, &places.hub_paths(), &aliases)?;
        if !repos.contains(&repo) {
            repos.push(repo);
        }
    }
    Ok(repos)
}

fn checked(repos: &[Repo], cache: &Path, terminal: &Terminal) -> CacheReport {
    let scans: Vec<RepoScan> = repos.iter().map(|repo| RepoScan::of(cache, repo)).collect();
    let whole = || scans.iter().flat_map(|scan| &scan.blobs).filter(|blob| !blob.is_partial);
    let form = "verifying {bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec}, {eta} left";
    let bar = terminal.bar(whole().map(|blob| blob.bytes).sum(), form);
    let mut report = CacheReport::default();
    for scan in &scans {
        report.missing.extend(scan.dangling().map(|file| file.path.clone()));
        for blob in &scan.blobs {
            if blob.is_partial {
                report.unchecked.push(blob.path.clone());
                continue;
            }
            let result = check_blob(blob, &mut |count| bar.inc(count));
            match result.state {
                BlobState::Good => {
                    report.num_good += 1;
                    report.bytes += blob.bytes;
                }
                BlobState::Unnamed => report.unchecked.push(blob.path.clone()),
                BlobState::Damaged(_) | BlobState::Unreadable(_) => {
                    report.damaged.push((scan.repo.clone(), result))
                }
            }
        }
    }
    bar.finish_and_clear();
    let models = llmctl_hub::list(Some(cache)).into_iter();
    let of_repos = models.filter(|model| repos.iter().any(|repo| model.path.starts_with(&repo.dir)));
    report.missing.extend(of_repos.filter_map(|model| model.missing));
    report.missing.sort();
    report.missing.dedup();
    report
}

impl CacheReport {
    fn text(&self, places: &Places) -> String {
        let mut text = String::new();
        for (repo, check) in &self.damaged {
            let path = places.shorten(&check.blob.path);
            text.push_str(&match &check.state {
                BlobState::Damaged(hash) => format!("damaged: {path} of {}: its hash is {hash}\n", repo.id),
                BlobState::Unreadable(message) => format!("damaged: {path} of {}: {message}\n", repo.id),
                BlobState::Good | BlobState::Unnamed => String::new(),
            });
        }
        let each = |what: &str, paths: &[PathBuf]| {
            paths.iter().map(|path| format!("{what}: {}\n", places.shorten(path))).collect::<String>()
        };
        text.push_str(&each("missing", &self.missing));
        text.push_str(&each("not checked", &self.unchecked));
        let (good, size) = (counted(self.num_good, "file"), bytes(self.bytes));
        let rest = format!("{} damaged, {} missing", self.damaged.len(), self.missing.len());
        text.push_str(&format!("hashes compared: {good} ({size}) undamaged, {rest}\n"));
        text
    }

    fn to_json(&self) -> Value {
        let damaged = |(repo, check): &(Repo, BlobCheck)| {
            let (hash, error) = match &check.state {
                BlobState::Damaged(hash) => (Some(hash), None),
                BlobState::Unreadable(message) => (None, Some(message)),
                BlobState::Good | BlobState::Unnamed => (None, None),
            };
            json!({"repo": repo.id, "path": check.blob.path, "hash": hash, "error": error})
        };
        json!({
            "schema": "llmctl.models.v1",
            "good": self.num_good,
            "bytes": self.bytes,
            "damaged": self.damaged.iter().map(damaged).collect::<Vec<_>>(),
            "missing": self.missing,
            "unchecked": self.unchecked,
        })
    }
}
