//! Throughput of prompts, measured in this chat and saved for the next.
//!
//! The last rate of each model is kept in `$XDG_STATE_HOME/llmctl/prefill.json`, so that chat can estimate
//! "about 54 s" before it computes anything. If the file cannot be read or written, only the estimate is
//! missing.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use llmctl_base::private_files::{private_file, private_folder};
use llmctl_engine::{Timings, Usage};

/// Fewer computed tokens say little of the rate.
const MIN_TOKENS: usize = 128;

/// Models whose rates are kept.
const MAX_MODELS: usize = 64;

/// The rate of one model.
#[derive(Debug, Default)]
pub struct ThroughputEstimate {
    path: Option<PathBuf>,
    model: String,
    tokens_per_second: Option<f64>,
}

impl ThroughputEstimate {
    /// `model` is its fingerprint.
    pub fn of(model: &str, state: Option<PathBuf>) -> Self {
        let path = state.map(|folder| folder.join("prefill.json"));
        let mut pace = Self { path, model: model.to_owned(), tokens_per_second: None };
        pace.tokens_per_second =
            pace.read().get(model).copied().filter(|rate| rate.is_finite() && *rate > 0.0);
        pace
    }

    /// Takes in what a turn has shown.
    pub fn note(&mut self, usage: &Usage, timings: &Timings) {
        let computed = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
        let rate = timings.prefill_rate(usage).filter(|_| computed >= MIN_TOKENS);
        if rate.is_some() {
            self.tokens_per_second = rate;
            self.write();
        }
    }

    /// Returns the time for this many tokens; `None` if it is unknown.
    pub fn time(&self, num_tokens: usize) -> Option<Duration> {
        let seconds = num_tokens as f64 / self.tokens_per_second?;
        Duration::try_from_secs_f64(seconds).ok()
    }

    fn read(&self) -> BTreeMap<String, f64> {
        let text = self.path.as_ref().and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    fn write(&self) {
        let (Some(path), Some(rate)) = (&self.path, self.tokens_per_second) else { return };
        let mut rates = self.read();
        if rates.len() >= MAX_MODELS && !rates.contains_key(&self.model) {
            rates.clear();
        }
        rates.insert(self.model.clone(), (rate * 10.0).round() / 10.0);
        let text = serde_json::to_string_pretty(&rates).unwrap_or_default();
        let new = path.with_extension(format!("{}.new", std::process::id()));
        let written = path.parent().map_or(Ok(()), |folder| private_folder(folder, true)).and_then(|()| {
            private_file(OpenOptions::new().write(true).create(true).truncate(true), &new)?
                .write_all(text.as_bytes())?;
            std::fs::rename(&new, path)
        });
        if written.is_err() {
            let _ = std::fs::remove_file(&new);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_measured_remembered_and_used() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = Some(folder.path().join("state"));
        let mut pace = ThroughputEstimate::of("m", state.clone());
        assert_eq!(pace.time(100), None);
        let timings = Timings { prefill: Duration::from_secs(2), ..Timings::default() };
        let usage = |prompt_tokens, cached_tokens| Usage {
            prompt_tokens,
            cached_tokens,
            completion_tokens: 1,
            ..Usage::default()
        };
        pace.note(&usage(100, 0), &timings);
        assert_eq!(pace.time(100), None, "too few to tell");
        pace.note(&usage(1000, 600), &timings);
        assert_eq!(pace.time(100), Some(Duration::from_millis(500)), "200 computed tokens a second");
        assert_eq!(ThroughputEstimate::of("m", state.clone()).time(100), Some(Duration::from_millis(500)));
        assert_eq!(ThroughputEstimate::of("other", state).time(100), None);
        assert_eq!(ThroughputEstimate::of("m", None).time(100), None);
    }

    #[test]
    fn a_broken_file_is_no_rate() {
        let folder = tempfile::tempdir().expect("a folder");
        for broken in ["", "{", "{\"m\": -1}", "{\"m\": \"fast\"}"] {
            std::fs::write(folder.path().join("prefill.json"), broken).expect("written");
            assert_eq!(ThroughputEstimate::of("m", Some(folder.path().into())).time(1), None, "{broken}");
        }
    }
}
