//! `llmctl bench` on a real trained model: forms of output, files, signals, refusals. No figure is judged.

use super::{llmctl, read_line, stories};
use crate::common::prelude::*;

const QUICK: [&str; 6] = ["--no-probe", "-p", "8", "-n", "4", "--quiet"];

fn bench(place: &Place, args: &[&str]) -> Option<Ran> {
    let model = stories()?;
    let runs: &[&str] = if args.contains(&"-r") { &[] } else { &["-r", "2"] };
    Some(place.run(&[&["bench", "--model", &model], &QUICK[..], runs, args].concat()))
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn help_is_as_written() {
    insta::assert_snapshot!("help_bench_short", llmctl(&["bench", "-h"]).check(0, "").stdout);
    insta::assert_snapshot!("help_bench", llmctl(&["bench", "--help"]).check(0, "").stdout);
}

#[test]
fn every_case_is_measured_as_often_as_asked() {
    let place = Place::new();
    let args = ["-d", "0,16", "-b", "1,2", "--threads", "1,2", "--output", "json", "--pg", "8,4"];
    let Some(ran) = bench(&place, &args) else { return };
    let document = parsed(&ran.check(0, "").stdout);
    assert_eq!((&document["schema"], &document["complete"]), (&"llmctl.bench.v1".into(), &true.into()));
    let cases = document["cases"].as_array().expect("cases");
    let names: Vec<_> = cases.iter().map(|case| case["test"].as_str().expect("a name")).collect();
    assert_eq!(names.len(), 3 * 2 * 2 * 2);
    for name in ["pp8", "pp8 x2", "pp8@d16", "pp8@d16 x2", "tg4", "tg4@d16 x2", "pp8+tg4@d16"] {
        assert_eq!(
            names.iter().filter(|found| **found == name).count(),
            2,
            "{name}: once per number of threads"
        );
    }
    for case in cases {
        let samples = case["samples"].as_array().expect("samples");
        assert_eq!(samples.len(), 2);
        let cached =
            case["n_depth"].as_u64().expect("a depth") * case["n_sequences"].as_u64().expect("a count");
        for sample in samples {
            assert!(sample["value"].as_f64().is_some_and(|rate| rate > 0.0), "{case}");
            assert_eq!(sample["cached_tokens"], cached, "{case}");
        }
    }
    assert_eq!(document["models"].as_array().expect("models").len(), 2);
    assert!(document["models"][0]["kv_bytes_per_token"].as_u64().is_some_and(|bytes| bytes > 0));
    assert!(!document["warnings"].to_string().contains("cache"), "{}", document["warnings"]);
}

#[test]
fn sessions_find_what_they_hold() {
    let place = Place::new();
    let args = words("-p 130 -n 0 --turn 8 --sessions warm,restore,fork,shared -b 3 --output json");
    let Some(ran) = bench(&place, &args) else { return };
    let document = parsed(&ran.check(0, "").stdout);
    let cached = |test: &str| -> Vec<u64> {
        let cases = document["cases"].as_array().expect("cases");
        let case = cases.iter().find(|case| case["test"] == test).unwrap_or_else(|| panic!("no {test}"));
        let samples = case["samples"].as_array().expect("samples");
        samples.iter().map(|sample| sample["cached_tokens"].as_u64().expect("a count")).collect()
    };
    assert_eq!(cached("cold130+8"), [0, 0]);
    assert_eq!(cached("cold130+8 x3"), [0, 0]);
    assert_eq!(cached("warm130+8"), [130, 130]);
    assert_eq!(cached("fork130+8 x3"), [390, 390]);
    assert!(cached("restore130+8").iter().all(|&count| count >= 64), "whole pages come back");
    assert!(cached("shared130+8 x3").iter().all(|&count| count > 0), "a page is computed once");
}

#[test]
fn results_are_said_line_by_line_and_saved() {
    let place = Place::new();
    let Some(ran) = bench(&place, &["--output", "jsonl", "--save", "result.json"]) else { return };
    let lines: Vec<Value> = ran.check(0, "").stdout.lines().map(parsed).collect();
    let events: Vec<_> = lines.iter().map(|line| line["event"].as_str().expect("a name")).collect();
    assert_eq!(events, ["started", "sample", "sample", "sample", "sample", "case", "case", "done"]);
    let saved = parsed(&place.read("result.json"));
    assert_eq!(saved["cases"][0]["samples"].as_array().expect("samples").len(), 2);
    assert_eq!(saved["cases"][1]["summary"], lines[6]["summary"]);
    let csv = bench(&place, &["--output", "csv"]).expect("fixtures");
    assert!(
        csv.check(0, "measured only 2 times")
            .stdout
            .lines()
            .nth(1)
            .is_some_and(|line| line.starts_with("pp8,hf,")),
        "{csv:?}"
    );
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let check = |args: &[&str], code: i32, message: &str| {
        llmctl(&[&["bench"], args].concat()).check(code, message);
    };
    check(&["-r", "0"], 2, "must be from 1 to ");
    check(&["-b", "0"], 2, "must be from 1 to ");
    check(&["-p", "0", "-n", "0"], 2, "nothing is left to measure");
    check(&["--pg", "7"], 2, "not of the form P,G");
    check(&["--model", "./none.gguf"], 66, "none.gguf");
    let place = Place::new();
    let Some(deep) = bench(&place, &["-d", "100000"]) else { return };
    deep.check(2, "pp8@d100000 needs a context of 100024 tokens, and hf was made for 512");
    bench(&place, &["--ctx", "8"]).expect("fixtures").check(2, "--ctx is 8");
    bench(&place, &["--save", "no/such/folder.json"]).expect("fixtures").check(74, "no/such/folder.json");
}

#[cfg(unix)]
#[test]
fn an_interruption_prints_and_saves_what_was_measured() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    let flags = words("--no-probe -p 8 -n 4 -r 10000 --output jsonl --save r.json");
    let args = [&["bench", "--model", &model], &flags[..]].concat();
    let mut command = place.command(&args);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("starts");
    let mut stdout = child.stdout.take().expect("a pipe");
    assert_eq!(parsed(&read_line(&mut stdout))["event"], "started");
    assert_eq!(parsed(&read_line(&mut stdout))["event"], "sample");
    // SAFETY: plain system call on a child that has not been waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) };
    let mut rest = String::new();
    Read::read_to_string(&mut stdout, &mut rest).expect("UTF-8");
    assert_eq!(child.wait().expect("ends").code(), Some(130));
    let last = parsed(rest.lines().last().expect("lines"));
    assert_eq!((&last["event"], &last["complete"]), (&"done".into(), &false.into()));
    let saved = parsed(&place.read("r.json"));
    assert_eq!(saved["complete"], false);
    let has_samples = |case: &Value| case["samples"].as_array().is_some_and(|samples| !samples.is_empty());
    assert!(saved["cases"].as_array().is_some_and(|cases| cases.iter().any(has_samples)), "{saved}");
}

#[test]
fn a_reader_that_leaves_ends_the_run_quietly() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    let args =
        ["bench", "--model", &model, "--no-probe", "-p", "8", "-n", "4", "-r", "10000", "--output", "jsonl"];
    let mut command = place.command(&args);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
    read_line(&mut child.stdout.take().expect("a pipe"));
    let output = child.wait_with_output().expect("ends");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn results_are_compared_and_a_baseline_judges() {
    let place = Place::new();
    if bench(&place, &["-r", "3", "--save", "a.json"]).is_none() {
        return;
    }
    let mut slower: Value = parsed(&place.read("a.json"));
    for case in slower["cases"].as_array_mut().expect("cases") {
        for (index, sample) in case["samples"].as_array_mut().expect("samples").iter_mut().enumerate() {
            sample["value"] = (1.0 + index as f64 / 1000.0).into();
        }
    }
    place.write("slow.json", slower.to_string());
    place.run(&["bench", "compare", "a.json", "a.json"]).check(0, "");
    let ran = place.run(&["bench", "compare", "a.json", "slow.json"]);
    assert!(ran.check(1, "").stdout.contains("2 figures are worse beyond noise"), "{ran:?}");
    let json = place.run(&["bench", "compare", "slow.json", "a.json", "slow.json", "--output", "json"]);
    let json = parsed(&json.check(0, "").stdout);
    assert_eq!(json["results"][0]["figures"][0]["verdict"], "better");
    assert_eq!(json["results"][1]["figures"][0]["verdict"], "same");
    let judged = bench(&place, &["-r", "3", "--baseline", "slow.json"]).expect("fixtures");
    assert!(judged.check(0, "").stdout.contains("this run against slow.json"), "{judged:?}");
    place.run(&["bench", "compare", "a.json"]).check(2, "2 values");
    place.run(&["bench", "compare", "a.json", "none.json"]).check(66, "none.json");
    place.write("other.json", "{\"schema\":\"x\"}");
    place.run(&["bench", "compare", "a.json", "other.json"]).check(65, "its schema is \"x\"");
    place.write("half.json", "{\"schema\":");
    place.run(&["bench", "compare", "a.json", "half.json"]).check(65, "half.json");
}
