//! Downloads that clients of the server ask for, into the cache that `pull` writes.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::cli::error::CommandError;
use crate::cli::model::download::Downloads;
use crate::cli::model::hub_access::is_offline;
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
}

impl ModelDownloads for CacheDownloads {
    fn is_open(&self) -> bool {
        self.is_open
    }

    fn pull(&self, name: &str, progress: &(dyn Fn(PullProgress) + Sync)) -> Result<(), String> {
        let cache = self.places.hub.as_ref().map(|folder| folder.display().to_string()).unwrap_or_default();
        // Where the cache is, is for the log.
        self.run(name, progress).map_err(|error| match cache.is_empty() {
            true => error.to_string(),
            false => error.to_string().replace(&cache, "the cache"),
        })
    }
}

impl CacheDownloads {
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
