//! `llmctl run --batch` on a real trained model: results, refusals, kills and resumption.

use std::io::Write;

use super::stories;
use crate::common::prelude::*;

/// Rows that take a moment each.
fn input(rows: usize) -> String {
    let row = |index: usize| {
        json!({
            "custom_id": format!("row-{index}"), "method": "POST", "url": "/v1/completions",
            "body": {"model": "hf", "prompt": format!("Once {index}"), "max_tokens": 40, "seed": index, "temperature": 1},
        })
    };
    (0..rows).map(|index| format!("{}\n", row(index))).collect()
}

fn batch(place: &Place, model: &str, extra: &[&str]) -> Ran {
    place.run(&[&["run", "--model", model, "--batch", "in.jsonl", "--out", "out.jsonl"], extra].concat())
}

fn rows(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Id and text of each result.
fn answers(text: &str) -> Vec<(String, String)> {
    let one = |row: Value| {
        let text = row["response"]["body"]["choices"][0]["text"].as_str().expect("an answer").to_owned();
        (row["custom_id"].as_str().expect("an id").to_owned(), text)
    };
    rows(text).into_iter().map(one).collect()
}

#[test]
fn bad_rows_are_reported_in_their_place() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    let lines = [
        r#"{"custom_id":"plain","prompt":"Once upon a time","max_tokens":4}"#,
        "not json",
        r#"{"custom_id":"hot","prompt":"x","temperature":3}"#,
        "",
        r#"{"custom_id":"long","prompt":"x","max_tokens":4000}"#,
        r#"{"custom_id":"foreign","prompt":"x","model":"gpt-4o"}"#,
        r#"{"custom_id":"unknown","prompt":"x","top_a":3}"#,
        r#"{"custom_id":"plain","prompt":"again"}"#,
        r#"{"custom_id":"last","prompt":"Once","max_tokens":2,"logprobs":2}"#,
    ];
    place.write("in.jsonl", lines.join("\n"));
    let ran = batch(&place, &model, &["--raw"]);
    ran.check(4, "batch: 3 answered, 5 failed")
        .check(4, "row \"hot\" (line 3): temperature: 3 is not in [0, 2]");
    let results = rows(&place.read("out.jsonl"));
    let codes: Vec<_> = results
        .iter()
        .map(|row| (row["custom_id"].as_str().expect("an id"), row["error"]["code"].as_str().unwrap_or("")))
        .collect();
    let expected = [
        ("plain", ""),
        ("line-2", "invalid_json"),
        ("hot", "invalid_value"),
        ("long", ""), // as many as there is room for
        ("foreign", "model_not_found"),
        ("unknown", "unsupported_parameter"),
        ("plain", "duplicate_custom_id"),
        ("last", ""),
    ];
    assert_eq!(codes, expected);
    assert_eq!(results[4]["response"]["status_code"], 404);
    let usage = &results[0]["response"]["body"]["usage"];
    assert_eq!(usage["completion_tokens"], 4);
    assert_eq!(
        results[7]["response"]["body"]["choices"][0]["logprobs"]["tokens"].as_array().expect("tokens").len(),
        2
    );
}

#[test]
fn a_row_is_answered_as_run_answers_it() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    place.write("in.jsonl", r#"{"prompt":"Once upon a time","max_tokens":12}"#);
    batch(&place, &model, &["--raw"]).check(0, "");
    let alone = place.run(&["run", "--model", &model, "--raw", "Once upon a time", "-n", "12"]);
    assert_eq!(
        answers(&place.read("out.jsonl")),
        [("line-1".to_owned(), alone.stdout.trim_end_matches('\n').to_owned())]
    );
}

#[test]
fn results_may_go_to_stdout_and_rows_come_from_stdin() {
    let Some(model) = stories() else { return };
    let ran = finish(Place::new().command(&["run", "--model", &model, "--batch", "-"]), &input(3));
    assert_eq!(answers(&ran.check(0, "3 answered").stdout).len(), 3);
}

#[test]
fn a_program_may_write_a_row_when_it_has_read_the_last_result() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    let mut command = place.command(&["run", "--model", &model, "--batch", "-"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("starts");
    let mut rows = child.stdin.take().expect("a pipe");
    let mut results = BufReader::new(child.stdout.take().expect("a pipe"));
    for row in input(3).lines() {
        writeln!(rows, "{row}").expect("it reads");
        let mut result = String::new();
        results.read_line(&mut result).expect("a result");
        assert_eq!(answers(&result)[0].0, serde_json::from_str::<Value>(row).expect("JSON")["custom_id"]);
    }
    drop(rows);
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}

#[test]
fn rows_that_are_computed_together_have_the_answers_of_rows_alone() {
    let Some(model) = stories() else { return };
    let (together, alone) = (Place::new(), Place::new());
    together.write("in.jsonl", input(20));
    batch(&together, &model, &[]).check(0, "20 answered");
    let found = answers(&together.read("out.jsonl"));
    let expected: Vec<_> = input(20)
        .lines()
        .flat_map(|row| {
            alone.write("row.jsonl", row);
            answers(&alone.run(&["run", "--model", &model, "--batch", "row.jsonl"]).check(0, "").stdout)
        })
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn an_existing_file_is_neither_overwritten_nor_appended_to() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    place.write("in.jsonl", input(1));
    place.write("out.jsonl", "precious");
    batch(&place, &model, &[]).check(2, "out.jsonl exists and is not empty");
    batch(&place, &model, &["--resume"]).check(65, "does not hold the results of a batch");
    assert_eq!(place.read("out.jsonl"), "precious");
    let foreign = r#"{"custom_id":"a","prompt":"one"}
{"custom_id":"b","prompt":"precious last"}"#;
    place.write("out.jsonl", foreign);
    batch(&place, &model, &["--resume"]).check(65, "not the result of a batch");
    assert_eq!(place.read("out.jsonl"), foreign);
    place.run(&["run", "--model", &model, "--batch", "none.jsonl", "--out", "new"]).check(66, "none.jsonl");
}

#[test]
fn a_system_prompt_that_rows_have_no_place_for_is_told_of_or_refused() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    place.write("in.jsonl", input(2));
    let ran = batch(&place, &model, &["--system", "Be brief."]);
    ran.check(0, "row \"row-0\" (line 1) is a text completion, to which the system prompt is not given");
    assert_eq!(ran.stderr.matches("system prompt").count(), 1, "{ran:?}");
    place.write("rows.jsonl", "{\"prompt\": \"x\", \"system\": \"s\"}\n");
    let raw = place.run(&["run", "--model", &model, "--raw", "--batch", "rows.jsonl"]);
    raw.check(4, "system has no place in a prompt that is completed as plain text (--raw)");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_ends_the_batch() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    place.write("in.jsonl", input(2));
    let args = ["run", "--model", &model, "--batch", "in.jsonl", "--out", "/dev/full"];
    place.run(&args).check(74, "writing to /dev/full: no space left");
}

/// Starts a long batch, sends the signal once some rows are finished, and returns the exit code.
#[cfg(unix)]
fn interrupted(place: &Place, model: &str, signal: i32) -> Option<i32> {
    let args = ["run", "--model", model, "--batch", "in.jsonl", "--out", "out.jsonl"];
    let mut child = place.command(&args).stderr(Stdio::null()).spawn().expect("starts");
    let out = place.path("out.jsonl");
    while finished(&out) < 3 {
        assert!(child.try_wait().expect("a child").is_none(), "ended before three rows were finished");
        std::thread::yield_now();
    }
    // SAFETY: plain system call on a child that has not been waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, signal) };
    child.wait().expect("ends").code()
}

#[cfg(unix)]
fn finished(out: &Path) -> usize {
    std::fs::read(out).map_or(0, |bytes| bytes.iter().filter(|byte| **byte == b'\n').count())
}

#[cfg(unix)]
#[test]
fn a_batch_that_was_killed_goes_on_where_it_was() {
    let Some(model) = stories() else { return };
    let rows = 120;
    let whole = Place::new();
    whole.write("in.jsonl", input(rows));
    batch(&whole, &model, &[]).check(0, "120 answered");
    let whole = answers(&whole.read("out.jsonl"));
    assert_eq!(whole.len(), rows);
    for (signal, code) in [(libc::SIGKILL, None), (libc::SIGINT, Some(130)), (libc::SIGTERM, Some(143))] {
        let place = Place::new();
        place.write("in.jsonl", input(rows));
        assert_eq!(interrupted(&place, &model, signal), code);
        let kept = finished(&place.path("out.jsonl"));
        assert!((3..rows).contains(&kept), "{kept} rows were finished");
        let ran = batch(&place, &model, &["--resume"]);
        ran.check(0, &format!("{} answered, 0 failed, {kept} skipped", rows - kept));
        assert_eq!(answers(&place.read("out.jsonl")), whole);
    }
}

#[test]
fn resume_with_nothing_left_changes_nothing_and_failures_stay_visible() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    place.write("in.jsonl", format!("{}not json\n", input(2)));
    batch(&place, &model, &[]).check(4, "2 answered, 1 failed");
    let first = place.read("out.jsonl");
    batch(&place, &model, &["--resume"]).check(4, "0 answered, 1 failed, 2 skipped");
    assert_eq!(place.read("out.jsonl"), first);
}

#[test]
fn one_out_has_one_writer() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    place.write("in.jsonl", input(1));
    let held = File::create(place.path("out.jsonl")).expect("a file");
    held.lock().expect("a lock");
    batch(&place, &model, &[]).check(75, "in use by another batch");
}
