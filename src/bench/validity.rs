//! Reasons to doubt a result: signs of noise, other load and caches in the run itself.
//!
//! Pure: judges a finished document. Each reason is one sentence with its subject and its size.

use super::figures::{Labels, percent};
use super::plan::Work;
use super::record::{CaseResult, Document, HostFacts, Probe};
use super::{cost, serve_report, stats};
use llmctl_models::kv::PAGE_TOKENS;

/// Shares below these are not reported.
const STEAL: f64 = 0.01;
const OTHERS: f64 = 0.05;
const THROTTLED_S: f64 = 0.05;
const SPREAD: f64 = 0.05;
const DRIFT: f64 = 0.03;
/// Largest change of the machine's limits between two probes.
const PROBES: f64 = 0.15;
/// Fewest repetitions that show the spread.
pub const FEW: usize = 3;

/// Adds limits and warnings after the measurements.
pub fn conclude(document: &mut Document) {
    let mut cases = std::mem::take(&mut document.cases);
    for result in &mut cases {
        result.limit = cost::limit_of(document, result);
    }
    document.cases = cases;
    document.warnings = warnings(document);
}

/// Returns all reasons, those about the whole run first.
fn warnings(document: &Document) -> Vec<String> {
    let mut found = Vec::new();
    if document.build.profile == "debug" {
        found.push("this is a debug build, many times slower than a release build".to_owned());
    }
    found.extend(machine(&document.machine));
    let threads = document.cases.iter().map(|result| result.setting.threads).max().unwrap_or(0);
    found.extend(too_many(threads, &document.machine));
    let few = document.cases.iter().map(|result| result.samples.len()).filter(|&count| count < FEW).min();
    if let Some(count) = few {
        let times = if count == 1 { "once".to_owned() } else { format!("{count} times") };
        found.push(format!(
            "some cases were measured only {times}, which shows no spread: -r {FEW} or more does"
        ));
    }
    found.extend(cases(&document.cases));
    found.extend(serve_report::warnings(document));
    found
}

/// Returns reasons about single cases; of many cases with a large spread, only the worst.
fn cases(results: &[CaseResult]) -> Vec<String> {
    let labels = Labels::of(results);
    let mut found = noisy_cases(results, &labels);
    for result in results {
        let label = labels.label(result);
        found.extend(case(result).into_iter().map(|reason| format!("{label}: {reason}")));
    }
    found
}

/// Returns a warning for each case whose samples are spread out, or for the worst one if there are many.
fn noisy_cases(results: &[CaseResult], labels: &Labels) -> Vec<String> {
    const MANY: usize = 3;
    let is_noisy = |result: &&CaseResult| result.samples.len() >= FEW && result.summary.spread() > SPREAD;
    let noisy: Vec<&CaseResult> = results.iter().filter(is_noisy).collect();
    let worst = noisy.iter().max_by(|a, b| a.summary.spread().total_cmp(&b.summary.spread()));
    match worst {
        Some(worst) if noisy.len() > MANY => vec![format!(
            "in {} of {} cases the standard deviation is more than {} of the mean, in {} it is {}",
            noisy.len(),
            results.len(),
            percent(SPREAD),
            labels.label(worst),
            percent(worst.summary.spread())
        )],
        _ => {
            let warning = |result: &&CaseResult| {
                let spread = percent(result.summary.spread());
                format!("{}: the standard deviation is {spread} of the mean", labels.label(result))
            };
            noisy.iter().map(warning).collect()
        }
    }
}

fn machine(machine: &HostFacts) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(load) = &machine.load {
        if load.steal > STEAL {
            found.push(format!(
                "the hypervisor took {} of the processor time (steal): the machine is shared",
                percent(load.steal)
            ));
        }
        if load.others > OTHERS {
            found.push(format!("other processes used {} of the processor time", percent(load.others)));
        }
        if load.throttled_s > THROTTLED_S {
            found.push(format!(
                "the cgroup's CPU quota stopped the process for {:.1} s: use fewer --threads",
                load.throttled_s
            ));
        }
        if load.hot > 0 {
            found.push(format!("the processor slowed down for heat {} times", load.hot));
        }
    }
    found.extend(changed_limits(&machine.probes));
    found
}

/// Returns limits that changed during the run, with the same number of threads.
fn changed_limits(probes: &[Probe]) -> Vec<String> {
    let mut found = Vec::new();
    for (index, before) in probes.iter().enumerate() {
        let Some(after) = probes[index + 1..].iter().rev().find(|after| after.threads == before.threads)
        else {
            continue;
        };
        let change = after.read_gb_s / before.read_gb_s - 1.0;
        if change.abs() > PROBES {
            found.push(format!(
                "memory bandwidth with --threads {} was {:.1} GB/s before and {:.1} after: this machine's speed is not steady",
                before.threads, before.read_gb_s, after.read_gb_s
            ));
        }
    }
    found
}

fn too_many(threads: usize, machine: &HostFacts) -> Option<String> {
    let cpus = machine.processors.map(|count| count as f64);
    let most = machine.quota.into_iter().chain(cpus).min_by(f64::total_cmp)?;
    (threads as f64 > most.ceil())
        .then(|| format!("{threads} threads share {most} CPUs, which is slower than as many threads as CPUs"))
}

fn case(result: &CaseResult) -> Vec<String> {
    let values = result.values();
    let mut found = Vec::new();
    let far: Vec<String> = stats::outliers(&values).iter().map(|index| (index + 1).to_string()).collect();
    if !far.is_empty() {
        let runs = if far.len() == 1 { "run" } else { "runs" };
        found.push(format!("{runs} {} far off the others", far.join(", ")));
    }
    if let Some(drift) = stats::drift(&values).filter(|drift| drift.abs() > DRIFT) {
        let way = if drift > 0.0 { "rose" } else { "fell" };
        found.push(format!("values {way} by {} from the first to the last", percent(drift.abs())));
    }
    let beyond = result.limit.as_ref().map(|limit| limit.share).filter(|share| *share > 1.0 + SPREAD);
    let beyond =
        beyond.map(percent).map(|share| format!("{share} of the limit: the probe found too low a one"));
    found.extend(beyond);
    found.extend(cached(result));
    found
}

/// Returns a reason if the reused tokens are not those that the case requires.
fn cached(result: &CaseResult) -> Option<String> {
    if matches!(result.case.work, Work::Shared { .. }) {
        return None; // the number of shared tokens is what it measures
    }
    let expected = result.case.cached() * result.case.sequences;
    let slack = PAGE_TOKENS * result.case.sequences;
    let most = result.samples.iter().map(|sample| sample.cached_tokens).max()?;
    let least = result.samples.iter().map(|sample| sample.cached_tokens).min()?;
    if most > expected {
        Some(format!("a cache was hit: {most} prompt tokens were not computed instead of {expected}"))
    } else if least + slack <= expected {
        Some(format!(
            "only {least} of {expected} tokens were found in the KV cache, the rest was computed again"
        ))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::Case;
    use super::super::record::{BenchSetting, Load, Sample};
    use super::*;

    fn result(work: Work, depth: usize, samples: &[(f64, usize)]) -> CaseResult {
        let mut result = CaseResult::new(&Case { work, depth, sequences: 1 }, &BenchSetting::default());
        for &(value, cached_tokens) in samples {
            result.push(Sample { value, cached_tokens, ..Sample::default() });
        }
        result
    }

    fn reason_of(result: &CaseResult) -> String {
        case(result).join("; ")
    }

    #[test]
    fn a_steady_case_has_nothing_against_it() {
        let work = Work::Generate { tokens: 8 };
        assert_eq!(reason_of(&result(work, 0, &[(10.0, 0), (10.1, 0), (9.9, 0)])), "");
        assert_eq!(reason_of(&result(work, 2048, &[(10.0, 2048), (10.1, 2048), (9.9, 2048)])), "");
    }

    #[test]
    fn noise_outliers_and_drift_are_named() {
        let of = |values: &[f64]| {
            let samples: Vec<_> = values.iter().map(|&value| (value, 0)).collect();
            reason_of(&result(Work::Prompt { tokens: 8 }, 0, &samples))
        };
        let noisy = result(Work::Prompt { tokens: 8 }, 0, &[(8.0, 0), (12.0, 0), (10.0, 0)]);
        assert_eq!(cases(std::slice::from_ref(&noisy)), ["pp8: the standard deviation is 20% of the mean"]);
        let all = cases(&[noisy.clone(), noisy.clone(), noisy.clone(), noisy]);
        assert_eq!(
            all,
            ["in 4 of 4 cases the standard deviation is more than 5.0% of the mean, in pp8 it is 20%"]
        );
        assert!(of(&[10.0, 10.01, 9.99, 10.02, 3.0]).contains("run 5 far off the others"));
        assert_eq!(
            of(&[100.0, 98.0, 97.0, 95.0, 93.0, 92.0]),
            "values fell by 8.7% from the first to the last"
        );
    }

    #[test]
    fn caches_that_were_hit_or_missed_are_named() {
        let work = Work::Prompt { tokens: 512 };
        assert!(reason_of(&result(work, 0, &[(1.0, 0), (1.0, 64)])).contains("a cache was hit: 64"));
        assert!(reason_of(&result(work, 4096, &[(1.0, 4096), (1.0, 0)])).contains("only 0 of 4096"));
        let shared = Work::Shared { first: 64, turn: 8 };
        assert_eq!(reason_of(&result(shared, 0, &[(1.0, 192)])), "");
    }

    #[test]
    fn a_busy_throttled_and_changing_machine_is_named() {
        let load = Load { steal: 0.02, others: 0.31, throttled_s: 1.25, hot: 2 };
        let probe = |read_gb_s| Probe { threads: 2, read_gb_s, int8_gop_s: None, f32_gop_s: None };
        let busy = HostFacts {
            load: Some(load),
            probes: vec![probe(40.0), probe(70.0)],
            processors: Some(8),
            quota: Some(1.5),
            ..HostFacts::default()
        };
        insta::assert_snapshot!("bench_busy", machine(&busy).join("\n"));
        assert_eq!(too_many(2, &busy), None, "one and a half CPUs keep two threads busy");
        assert!(too_many(4, &busy).is_some_and(|said| said.starts_with("4 threads share 1.5 CPUs")));
        let quiet = Load { steal: 0.0, others: 0.01, ..Load::default() };
        let quiet =
            HostFacts { load: Some(quiet), probes: vec![probe(40.0), probe(41.0)], ..HostFacts::default() };
        assert!(machine(&quiet).is_empty());
    }
}
