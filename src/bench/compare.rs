//! Comparison of two results: the ratio of medians, its confidence interval, and whether it is worse beyond
//! noise.
//!
//! Cases are matched by name and by the settings that differ within one of the files, so that two versions,
//! machines or models can be compared. Also reads llama-bench's `-o json`.

use std::path::Path;

use serde_json::{Value, json};

use super::figures::{Labels, percent};
use super::point::Point;
use super::record::{Document, SCHEMA};
use super::validity::FEW;
use super::{llama_bench, stats};
use crate::error::BenchError;
use llmctl_base::columns::aligned;

/// Probability that the interval contains the true ratio.
const CONFIDENCE: f64 = 0.95;
const RESAMPLES: usize = 4000;
const SEED: u64 = 1;

/// Relative difference in memory bandwidth from which machines count as different.
const SAME_MACHINE: f64 = 0.1;

/// Values of one figure.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    pub name: String,
    pub unit: String,
    pub more_is_better: bool,
    pub values: Vec<f64>,
}

/// Meaning of the difference between two series.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpeedVerdict {
    Better,
    /// Worse beyond noise.
    Worse,
    /// Equal within noise, or nearly so.
    Same,
    /// Too few repetitions.
    Unknown,
}

impl SpeedVerdict {
    fn name(self) -> &'static str {
        match self {
            SpeedVerdict::Better => "better",
            SpeedVerdict::Worse => "WORSE",
            SpeedVerdict::Same => "same",
            SpeedVerdict::Unknown => "too few runs",
        }
    }
}

/// One figure in two files.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    pub name: String,
    pub unit: String,
    pub before: f64,
    pub after: f64,
    pub ratio: f64,
    pub interval: stats::Interval,
    pub verdict: SpeedVerdict,
}

/// Returns all figures of a document that have several values.
pub fn series(document: &Document, labels: &Labels) -> Vec<Series> {
    let cases = document.cases.iter().filter(|result| !result.samples.is_empty()).map(|result| Series {
        name: labels.label(result),
        unit: result.unit.name().to_owned(),
        more_is_better: result.unit.more_is_better(),
        values: result.values(),
    });
    let points = document.points.iter().flat_map(|point| {
        let ok = || point.turns.iter().filter(|turn| turn.is_ok());
        let latencies = [
            ("ttft", ok().filter_map(|turn| turn.first_ms).collect::<Vec<_>>()),
            ("tpot", ok().filter_map(|turn| turn.tpot_ms()).collect()),
            ("e2e", ok().map(|turn| turn.total_ms).collect()),
        ];
        latencies.into_iter().filter(|(_, values)| !values.is_empty()).map(|(figure, values)| Series {
            name: format!("{figure}, {}", point.name),
            unit: "ms".to_owned(),
            more_is_better: false,
            values,
        })
    });
    cases.chain(points).collect()
}

/// Compares the figures that both have. `threshold` is a share.
pub fn compare(before: &[Series], after: &[Series], threshold: f64) -> Vec<Comparison> {
    let pairs =
        before.iter().filter_map(|a| Some((a, after.iter().find(|b| b.name == a.name && b.unit == a.unit)?)));
    let comparison = |(a, b): (&Series, &Series)| {
        let (ratio, interval) = stats::ratio_of_medians(&a.values, &b.values, CONFIDENCE, RESAMPLES, SEED)?;
        let is_known = a.values.len().min(b.values.len()) >= FEW;
        let (up, down) = match a.more_is_better {
            true => (SpeedVerdict::Better, SpeedVerdict::Worse),
            false => (SpeedVerdict::Worse, SpeedVerdict::Better),
        };
        let verdict = match () {
            () if !is_known => SpeedVerdict::Unknown,
            () if interval.low > 1.0 && ratio > 1.0 + threshold => up,
            () if interval.high < 1.0 && ratio < 1.0 - threshold => down,
            () => SpeedVerdict::Same,
        };
        Some(Comparison {
            name: a.name.clone(),
            unit: a.unit.clone(),
            before: stats::median(&a.values),
            after: stats::median(&b.values),
            ratio,
            interval,
            verdict,
        })
    };
    pairs.filter_map(comparison).collect()
}

/// A result compared with the first.
pub struct Compared {
    pub name: String,
    pub figures: Vec<Comparison>,
    /// Figures that only one of the two has.
    pub unmatched: Vec<String>,
    pub warnings: Vec<String>,
}

impl Compared {
    pub fn is_worse(&self) -> bool {
        self.figures.iter().any(|figure| figure.verdict == SpeedVerdict::Worse)
    }
}

/// Compares `after`, called `name`, with `before`.
///
/// # Errors
/// A usage error if they have no figure in common.
pub fn compared(
    before: &Document,
    after: &Document,
    name: &str,
    threshold: f64,
) -> Result<Compared, BenchError> {
    let labels = Labels::united([Labels::of(&before.cases), Labels::of(&after.cases)]);
    let (a, b) = (series(before, &labels), series(after, &labels));
    let figures = compare(&a, &b, threshold);
    if figures.is_empty() {
        let hint = "cases are matched by test and by the settings that a sweep varies";
        let message = format!("{name} has no case in common with the first result");
        return Err(BenchError::Usage { message, hint: Some(hint) });
    }
    let is_matched = |series: &&Series| !figures.iter().any(|figure| figure.name == series.name);
    let mut unmatched: Vec<String> =
        a.iter().chain(&b).filter(is_matched).map(|series| series.name.clone()).collect();
    unmatched.sort();
    unmatched.dedup();
    Ok(Compared { name: name.to_owned(), figures, unmatched, warnings: differences(before, after) })
}

/// Share of failed requests from which failures are reported.
const MORE_FAILURES: f64 = 0.01;

/// Returns other differences that may be the cause.
fn differences(before: &Document, after: &Document) -> Vec<String> {
    let mut found = Vec::new();
    let (a, b) = (&before.machine, &after.machine);
    if a.cpu != b.cpu {
        let name = |cpu: &Option<String>| cpu.clone().unwrap_or_else(|| "unknown".to_owned());
        found.push(format!("the processors differ: {} and {}", name(&a.cpu), name(&b.cpu)));
    }
    let read = |document: &Document| {
        let rates: Vec<f64> = document.machine.probes.iter().map(|probe| probe.read_gb_s).collect();
        (!rates.is_empty()).then(|| stats::median(&rates))
    };
    if let (Some(a), Some(b)) = (read(before), read(after))
        && (b / a - 1.0).abs() > SAME_MACHINE
    {
        found.push(format!(
            "memory read {a:.1} GB/s at one time and {b:.1} at the other: measure both in turns before believing a ratio"
        ));
    }
    if before.build.profile != after.build.profile {
        found.push(format!(
            "a {} build is compared with a {} build",
            after.build.profile, before.build.profile
        ));
    }
    for a in &before.points {
        let Some(b) = after.points.iter().find(|b| b.name == a.name) else { continue };
        let failed = |point: &Point| point.turns.iter().filter(|turn| !turn.is_ok()).count() as f64;
        let share = |point: &Point| failed(point) / point.turns.len().max(1) as f64;
        if share(b) > share(a) + MORE_FAILURES {
            let (now, then) = (share(b) * 100.0, share(a) * 100.0);
            found.push(format!("{}: {now:.0}% of the requests failed, {then:.0}% before", a.name));
        }
    }
    if !(before.complete && after.complete) {
        found.push("a result is not complete".to_owned());
    }
    found
}

/// Reads a result of llmctl or llama-bench.
///
/// # Errors
/// Those of [`Document::read`].
pub fn read(path: &Path) -> Result<Document, BenchError> {
    Document::read(path).or_else(|error| {
        match std::fs::read_to_string(path).ok().and_then(|text| llama_bench::read(&text)) {
            Some(document) => Ok(document),
            None => Err(error),
        }
    })
}

/// Renders a table. `first` is the name of the result that was compared with; cells have `widest` columns at most.
pub fn text(first: &str, compared: &Compared, widest: usize) -> String {
    let header = ["figure", "before", "after", "unit", "ratio", "95% interval", "verdict"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for figure in &compared.figures {
        rows.push(vec![
            figure.name.clone(),
            format!("{:.2}", figure.before),
            format!("{:.2}", figure.after),
            figure.unit.clone(),
            format!("{:.3}", figure.ratio),
            format!("{:.3} to {:.3}", figure.interval.low, figure.interval.high),
            figure.verdict.name().to_owned(),
        ]);
    }
    let mut text = format!("{} against {first}\n\n{}", compared.name, aligned(&rows, widest));
    if !compared.unmatched.is_empty() {
        text.push_str(&format!("\nin one of them only: {}\n", compared.unmatched.join("; ")));
    }
    for warning in &compared.warnings {
        text.push_str(&format!("\nwarning: {warning}\n"));
    }
    let worse = compared.figures.iter().filter(|figure| figure.verdict == SpeedVerdict::Worse);
    let worst = worse.clone().map(|figure| (figure.ratio - 1.0).abs()).fold(0.0, f64::max);
    match worse.count() {
        0 => {}
        1 => text.push_str(&format!("\none figure is worse beyond noise, by {}\n", percent(worst))),
        count => {
            text.push_str(&format!("\n{count} figures are worse beyond noise, by up to {}\n", percent(worst)))
        }
    }
    text
}

pub fn to_json(compared: &Compared) -> Value {
    let figure = |figure: &Comparison| {
        json!({
            "name": figure.name,
            "unit": figure.unit,
            "before": figure.before,
            "after": figure.after,
            "ratio": figure.ratio,
            "low": figure.interval.low,
            "high": figure.interval.high,
            "verdict": figure.verdict.name().to_lowercase().replace(' ', "_"),
        })
    };
    let figures: Vec<_> = compared.figures.iter().map(figure).collect();
    json!({
        "name": compared.name,
        "is_worse": compared.is_worse(),
        "figures": figures,
        "unmatched": compared.unmatched,
        "warnings": compared.warnings,
        "document_schema": SCHEMA,
    })
}

#[cfg(test)]
mod tests {
    use super::super::report::sample;
    use super::*;

    #[test]
    fn a_regression_is_found_and_the_table_says_so() {
        let (before, after) = (sample::document(1.0), sample::document(0.8));
        let slower = compared(&before, &after, "after.json", 0.02).expect("cases in common");
        assert!(slower.is_worse());
        insta::assert_snapshot!("bench_compare", text("before.json", &slower, usize::MAX));
        let faster = compared(&after, &before, "x", 0.02).expect("cases in common");
        assert!(
            !faster.is_worse() && faster.figures.iter().any(|figure| figure.verdict == SpeedVerdict::Better)
        );
        let same = compared(&before, &before, "x", 0.02).expect("cases in common");
        assert!(same.figures.iter().all(|figure| figure.verdict == SpeedVerdict::Same));
        assert!(!same.is_worse());
    }

    fn judge(before: &[f64], after: &[f64], more_is_better: bool, threshold: f64) -> SpeedVerdict {
        let of = |values: &[f64]| {
            let (name, unit) = ("x".to_owned(), "y".to_owned());
            [Series { name, unit, more_is_better, values: values.to_vec() }]
        };
        compare(&of(before), &of(after), threshold)[0].verdict
    }

    #[test]
    fn verdicts_know_noise_direction_and_threshold() {
        let base = [100.0, 101.0, 99.0, 100.0, 100.5];
        let times = |factor: f64| base.map(|value| value * factor);
        assert_eq!(judge(&base, &times(0.9), true, 0.02), SpeedVerdict::Worse);
        assert_eq!(judge(&base, &times(0.9), false, 0.02), SpeedVerdict::Better);
        assert_eq!(judge(&base, &times(0.9), true, 0.15), SpeedVerdict::Same, "below the threshold");
        assert_eq!(judge(&base, &[60.0, 130.0, 95.0, 120.0, 70.0], true, 0.02), SpeedVerdict::Same, "noise");
        assert_eq!(judge(&base, &[50.0, 50.0], true, 0.02), SpeedVerdict::Unknown);
    }

    #[test]
    fn other_machines_and_other_cases_are_told() {
        let before = sample::document(1.0);
        let mut after = before.clone();
        after.machine.cpu = Some("Another".to_owned());
        after.machine.probes.iter_mut().for_each(|probe| probe.read_gb_s *= 2.0);
        after.cases.pop();
        let found = compared(&before, &after, "x", 0.02).expect("cases in common");
        assert_eq!(found.unmatched, ["tg128 (threads 2)"]);
        assert_eq!(found.warnings.len(), 2);
        after.cases.clear();
        assert!(matches!(compared(&before, &after, "x", 0.02), Err(BenchError::Usage { hint: Some(_), .. })));
    }
}
