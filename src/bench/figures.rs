//! Formats figures for reports: labels of results, percentages, sparklines, CSV cells. Pure.

use std::collections::BTreeSet;

use super::record::{BenchSetting, CaseResult};

/// Names of the settings that differ within a run, with which every result is labelled.
pub struct Labels {
    varied: Vec<&'static str>,
}

impl Labels {
    pub fn of(results: &[CaseResult]) -> Self {
        let names = settings(&BenchSetting::default()).map(|(name, _)| name);
        let differs = |index: &usize| {
            let values = results.iter().map(|result| settings(&result.setting)[*index].1.clone());
            values.collect::<BTreeSet<_>>().len() > 1
        };
        Self { varied: (0..names.len()).filter(differs).map(|index| names[index]).collect() }
    }

    /// Returns the labels of several runs: the settings that differ within any of them.
    pub fn united(all: impl IntoIterator<Item = Labels>) -> Self {
        let names: BTreeSet<_> = all.into_iter().flat_map(|labels| labels.varied).collect();
        Self { varied: names.into_iter().collect() }
    }

    /// Returns the test's name with the settings that tell it from others: `pp512 (threads 2)`.
    pub fn label(&self, result: &CaseResult) -> String {
        let shown = settings(&result.setting).into_iter();
        let shown = shown.filter(|(name, value)| self.varied.contains(name) && !value.is_empty());
        let shown: Vec<String> = shown.map(|(name, value)| format!("{name} {value}")).collect();
        if shown.is_empty() { result.test.clone() } else { format!("{} ({})", result.test, shown.join(", ")) }
    }
}

fn settings(setting: &BenchSetting) -> [(&'static str, String); 7] {
    [
        ("model", setting.model.clone()),
        ("quantize", setting.quantize.clone().unwrap_or_default()),
        ("kv", setting.kv_type.clone()),
        ("cpu", setting.cpu.clone()),
        ("threads", setting.threads.to_string()),
        // The default number is not shown.
        (
            "threads-batch",
            Some(setting.threads_batch)
                .filter(|&n| n != setting.threads)
                .map_or(String::new(), |n| n.to_string()),
        ),
        ("step", setting.step_tokens.to_string()),
    ]
}

/// Returns `12%`, or `1.2%` below ten percent.
pub fn percent(share: f64) -> String {
    let value = share * 100.0;
    if value < 10.0 { format!("{value:.1}%") } else { format!("{value:.0}%") }
}

/// Returns one bar per value. The lowest and the highest bar are a tenth of the median apart at least, so that little noise looks little.
pub fn sparkline(values: &[f64]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let middle = (low + high) / 2.0;
    let span = (high - low).max(middle.abs() / 10.0);
    let bottom = middle - span / 2.0;
    let bar = |value: &f64| {
        let place = if span > 0.0 { (value - bottom) / span } else { 0.5 };
        BARS[((place * 8.0) as usize).min(7)]
    };
    values.iter().map(bar).collect()
}

/// Quotes a CSV cell as RFC 4180 requires.
pub fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", cell.replace('"', "\"\""))
    } else {
        cell.to_owned()
    }
}
