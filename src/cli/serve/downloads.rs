//! Downloads and removals that clients of the server ask for, in the cache that `pull` writes.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::cli::error::{CommandError, Kind};
use crate::cli::model::download::Downloads;
use crate::cli::model::hub_access::is_offline;
use crate::cli::model::models::removal;
use crate::cli::model::pull;
use crate::cli::places::Places;
use crate::cli::terminal::Terminal;
use llmctl_hub::{Aliases, PullEvent, PullExtent};
use llmctl_serve::downloads::{ModelDownloads, PullProgress};

/// Reports of one download, at most.
const MAX_REPORTS: u64 = 200;

/// The cache of models, and who may have it filled.
pub struct CacheDownloads {
    pub places: Places,
    pub aliases: Aliases,
    pub terminal: Terminal,
    /// `--allow-pull`.
    pub is_open: bool,
    /// `--allow-delete`.
    pub may_erase: bool,
}

impl ModelDownloads for CacheDownloads {
    fn is_open(&self) -> bool {
        self.is_open
    }

    fn pull(&self, name: &str, progress: &(dyn Fn(PullProgress) + Sync)) -> Result<(), String> {
        self.run(name, progress).map_err(|error| self.told(&error))
    }

    fn may_erase(&self) -> bool {
        self.may_erase
    }

    fn erase(&self, name: &str) -> Result<bool, String> {
        match removal::erase_unneeded(name, &self.places, &self.aliases) {
            Ok(()) => Ok(true),
            Err(error) if error.kind == Kind::NotFound => Ok(false),
            Err(error) => Err(self.told(&error)),
        }
    }
}

impl CacheDownloads {
    /// Returns an error as clients may know it: where the cache is, is for the log.
    fn told(&self, error: &CommandError) -> String {
        let cache = self.places.hub.as_ref().map(|folder| folder.display().to_string());
        let cache = cache.filter(|cache| !cache.is_empty());
        cache.map_or_else(|| error.to_string(), |cache| error.to_string().replace(&cache, "the cache"))
    }

    fn run(&self, name: &str, progress: &(dyn Fn(PullProgress) + Sync)) -> Result<(), CommandError> {
        if is_offline() {
            return Err(CommandError::offline("HF_HUB_OFFLINE"));
        }
        let hosts = ["hf.co/", "huggingface.co/"]; // as Ollama writes it
        let name = hosts.iter().find_map(|host| name.strip_prefix(host)).unwrap_or(name);
        let hub = pull::reference(name, &self.aliases)?;
        let downloads = Downloads::new(&self.places, &self.terminal)?;
        let plan = downloads.plan(&hub, PullExtent::Whole)?;
        let largest = plan.files().iter().max_by_key(|file| file.size);
        let (digest, total) = (largest.map(|file| file.hash.hex()).unwrap_or_default(), plan.total_bytes);
        let tell = |completed| progress(PullProgress { digest: digest.to_owned(), total, completed });
        tell(plan.present_bytes);
        let told = AtomicU64::new(plan.present_bytes);
        let watch = |_: &PullEvent, here: u64| {
            if here > told.load(Ordering::Relaxed) + total / MAX_REPORTS {
                told.store(here, Ordering::Relaxed);
                tell(here);
            }
        };
        downloads.run(&plan, Some(&watch))?;
        tell(total);
        Ok(())
    }
}
