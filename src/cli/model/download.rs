//! Downloads models for `pull`, and for the commands that meet a model for the first time.
//!
//! Decides whether to ask, announces, draws progress and stops at a signal with the partial files kept. Knows
//! nothing of requests or of the cache's layout.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;

use super::hub_access::{hub_settings, is_offline};
use crate::cli::error::{CommandError, Kind};
use crate::cli::flags::args::FetchArgs;
use crate::cli::places::{Places, free_bytes};
use crate::cli::terminal::output::visible;
use crate::cli::terminal::report::{bytes, counted};
use crate::cli::terminal::signal::Graceful;
use crate::cli::terminal::{Terminal, question};
use llmctl_hub::{HubClient, HubError, HubRef, PullEvent, PullExtent, PullObserver, PullPlan};

/// Returns the setting that forbids downloading, if any.
pub fn forbidden_by(fetch: &FetchArgs) -> Option<&'static str> {
    match (fetch.offline, is_offline()) {
        (true, _) => Some("--offline"),
        (false, true) => Some("HF_HUB_OFFLINE"),
        (false, false) => None,
    }
}

/// A connection to the hub, and the signals that stop its downloads.
pub struct Downloads<'a> {
    client: Arc<HubClient>,
    places: &'a Places,
    terminal: &'a Terminal,
    graceful: Graceful,
}

impl<'a> Downloads<'a> {
    /// # Errors
    /// [`Kind::Config`] for a variable that cannot be used.
    pub fn new(places: &'a Places, terminal: &'a Terminal) -> Result<Self, CommandError> {
        let client = HubClient::new(hub_settings(places))?;
        let graceful = Graceful::begin_conversation();
        graceful.work();
        Ok(Self { client, places, terminal, graceful })
    }

    /// Returns the hub's name for the user.
    pub fn host(&self) -> &str {
        self.client.host()
    }

    /// Asks the hub what a reference needs, prints the notices, and checks the free space.
    ///
    /// # Errors
    /// Those of [`PullPlan::new`] and [`PullPlan::check_space`].
    pub fn plan(&self, hub: &HubRef, extent: PullExtent) -> Result<PullPlan, CommandError> {
        let Some(cache) = &self.places.hub else {
            let message = "HOME is not set: there is no folder for models";
            return Err(Kind::Config.error(message).hint("set HOME or HF_HUB_CACHE"));
        };
        self.terminal.status(&format!("asking {} for {}", self.host(), hub.repo_id()));
        let plan = PullPlan::new(
            &self.client,
            hub,
            &self.places.hub_paths(),
            extent,
            &Display::new(self, &[], None),
        );
        self.terminal.status("");
        let plan = plan.map_err(|error| self.failure(error, None))?;
        plan.notices.iter().for_each(|notice| self.terminal.note(notice));
        plan.check_space(free_bytes(cache))?;
        Ok(plan)
    }

    /// Asks whether to download; Enter means yes.
    ///
    /// # Errors
    /// A signal came, or the terminal cannot be read.
    fn is_agreed(&self, question: &str) -> Result<bool, CommandError> {
        let is_cancelled = || self.graceful.received().is_some();
        let answer = question::ask(&format!("{question} [Y/n]"), is_cancelled)
            .map_err(|error| CommandError::new(Kind::Io, error))?;
        if is_cancelled() {
            return Err(self.failure(HubError::Cancelled, None));
        }
        Ok(answer.is_yes(true))
    }

    /// Runs a plan with progress on the terminal; `watch` gets every event with the number of bytes that are here.
    ///
    /// # Errors
    /// Those of [`PullPlan::run`].
    pub fn run(&self, plan: &PullPlan, watch: Option<&EventWatch<'_>>) -> Result<(), CommandError> {
        let start = Instant::now();
        let missing = plan.missing_bytes();
        let display = Display::new(self, &present(plan), watch);
        display.show_bar(plan);
        let ended = plan.run(&self.client, &display);
        display.clear();
        ended.map_err(|error| self.failure(error, Some(&plan.reference)))?;
        if missing > 0 {
            let seconds = start.elapsed().as_secs_f64().max(0.001);
            let rate = bytes((missing as f64 / seconds) as u64);
            self.terminal.note(format!("downloaded {} in {seconds:.1} s ({rate}/s)", bytes(missing)));
        }
        Ok(())
    }

    /// Returns the error of a command; `begun` is what was being downloaded.
    fn failure(&self, error: HubError, begun: Option<&str>) -> CommandError {
        match error {
            HubError::Cancelled => {
                let kind = match self.graceful.received() {
                    Some(number) if i32::from(number) == SIGTERM => Kind::Terminated,
                    _ => Kind::Interrupted,
                };
                match begun {
                    None => kind.error("interrupted before the download began"),
                    Some(reference) => CommandError::new(kind, HubError::Cancelled)
                        .hint(format!("`llmctl pull {reference}` continues where it stopped")),
                }
            }
            other => other.into(),
        }
    }
}

/// SIGTERM on every system that has it.
const SIGTERM: i32 = 15;

/// Downloads a model that a command meets for the first time, or a part of it. On a terminal the user is asked.
///
/// # Errors
/// The hub's refusal; [`Kind::NotFound`] if the user declines.
pub fn first_use(
    hub: &HubRef,
    extent: PullExtent,
    fetch: &FetchArgs,
    places: &Places,
    terminal: &Terminal,
) -> Result<(), CommandError> {
    let downloads = Downloads::new(places, terminal)?;
    let plan = downloads.plan(hub, extent)?;
    let missing = plan.missing_bytes();
    if missing > 0 {
        let what = format!("{} ({})", plan.reference, size(&plan));
        let from = downloads.host();
        let question = format!("{what} is not here. Download it from {from}?");
        if fetch.yes || !question::can_ask() {
            terminal.note(format!("downloading {what} from {from}"));
        } else if !downloads.is_agreed(&question)? {
            let hint = format!("`llmctl pull {}` downloads it", plan.reference);
            return Err(Kind::NotFound.error(format!("{} is not downloaded", plan.reference)).hint(hint));
        }
    }
    downloads.run(&plan, None)
}

/// Formats what is still to be received: `1.2 GiB`, `300.0 MiB of 1.2 GiB`.
pub fn size(plan: &PullPlan) -> String {
    let files = counted(plan.files().len(), "file");
    match plan.present_bytes {
        0 => format!("{}, {files}", bytes(plan.total_bytes)),
        _ => format!("{} of {}, {files}", bytes(plan.missing_bytes()), bytes(plan.total_bytes)),
    }
}

/// A receiver of events beside the terminal. Gets the bytes that are here, of all files.
pub type EventWatch<'a> = dyn Fn(&PullEvent, u64) + Sync + 'a;

/// Returns each file with the bytes of it that are here.
fn present(plan: &PullPlan) -> Vec<(String, u64, u64)> {
    plan.files().iter().map(|file| (file.path.clone(), plan.present_bytes_of(file), file.size)).collect()
}

/// Bytes of one file: here, and in all.
#[derive(Debug, Clone, Copy)]
struct FileBytes {
    here: u64,
    all: u64,
}

/// Progress on the terminal, and the signals that stop it.
struct Display<'a> {
    terminal: &'a Terminal,
    graceful: &'a Graceful,
    files: Mutex<BTreeMap<String, FileBytes>>,
    bar: Option<ProgressBar>,
    watch: Option<&'a EventWatch<'a>>,
}

impl<'a> Display<'a> {
    fn new(
        downloads: &'a Downloads<'_>,
        files: &[(String, u64, u64)],
        watch: Option<&'a EventWatch<'a>>,
    ) -> Self {
        let terminal = downloads.terminal;
        let style = ProgressStyle::with_template(
            "{msg} {bar:24} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
        )
        .expect("the template is constant and valid");
        let bar = (terminal.shows_progress() && !files.is_empty())
            .then(|| ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()).with_style(style));
        let file =
            |(path, here, all): &(String, u64, u64)| (path.clone(), FileBytes { here: *here, all: *all });
        let files = Mutex::new(files.iter().map(file).collect());
        Self { terminal, graceful: &downloads.graceful, files, bar, watch }
    }

    fn show_bar(&self, plan: &PullPlan) {
        let Some(bar) = self.bar.as_ref().filter(|_| plan.missing_bytes() > 0) else { return };
        bar.set_message(visible(&plan.reference).into_owned());
        bar.set_length(plan.total_bytes);
        bar.set_position(plan.present_bytes);
        // The rate is that of this download, without what was here before.
        bar.reset_eta();
        bar.set_draw_target(ProgressDrawTarget::stderr());
        bar.enable_steady_tick(Duration::from_millis(500));
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// Counts the bytes that are here after an event.
    fn count(&self, event: &PullEvent) -> u64 {
        let mut files = self.files.lock();
        let mut set = |path: &str, change: &dyn Fn(FileBytes) -> u64| {
            if let Some(file) = files.get_mut(path) {
                file.here = change(*file);
            }
        };
        match event {
            PullEvent::Started { path, have, .. } => set(path, &|_| *have),
            PullEvent::Restarted { path, .. } => set(path, &|_| 0),
            PullEvent::Received { path, bytes } => set(path, &|file| file.here + bytes),
            PullEvent::Finished { path, .. } => set(path, &|file| file.all),
            PullEvent::Retrying { .. } | PullEvent::Waiting { .. } => {}
        }
        files.values().map(|file| file.here).sum()
    }

    /// Returns the line for an event that the user should know.
    fn line(event: &PullEvent) -> Option<String> {
        match event {
            PullEvent::Retrying { what, why, seconds } => {
                // A host's failures name it themselves.
                let what = if why.starts_with(what) { String::new() } else { format!("{what}: ") };
                let pause = if *seconds > 0 { format!(" in {seconds} s") } else { String::new() };
                Some(format!("{what}{why}; trying again{pause}"))
            }
            PullEvent::Waiting { path } => {
                Some(format!("{path}: another process is downloading it; waiting for that"))
            }
            PullEvent::Restarted { path, why } => Some(format!("{path}: {why}; starting over")),
            PullEvent::Started { path, have, total } if *have > 0 => {
                Some(format!("{path}: continuing after {} of {}", bytes(*have), bytes(*total)))
            }
            _ => None,
        }
    }
}

impl PullObserver for Display<'_> {
    fn event(&self, event: PullEvent) {
        let here = self.count(&event);
        if let Some(bar) = &self.bar {
            bar.set_position(here);
        }
        if let Some(watch) = self.watch {
            watch(&event, here);
        }
        if let Some(line) = Self::line(&event) {
            match &self.bar {
                Some(bar) => bar.suspend(|| self.terminal.note(line)),
                None => {
                    self.terminal.status("");
                    self.terminal.note(line);
                }
            }
        }
    }

    fn is_cancelled(&self) -> bool {
        self.graceful.received().is_some()
    }
}

/// Returns the cache's folder for the user.
pub fn shown_cache(places: &Places) -> String {
    places.hub.as_deref().map_or_else(|| "no folder".to_owned(), |path: &Path| places.shorten(path))
}
