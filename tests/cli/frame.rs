//! Help, versions, typos, colours, variables: what needs neither prompt nor model.

use super::llmctl;
use crate::common::prelude::*;

#[test]
fn help_is_as_written() {
    insta::assert_snapshot!("help_short", llmctl(&["-h"]).check(0, "").stdout);
    insta::assert_snapshot!("help", llmctl(&["--help"]).check(0, "").stdout);
    insta::assert_snapshot!("help_run_short", llmctl(&["run", "-h"]).check(0, "").stdout);
    insta::assert_snapshot!("help_run", llmctl(&["run", "--help"]).check(0, "").stdout);
    insta::assert_snapshot!("help_serve_short", llmctl(&["serve", "-h"]).check(0, "").stdout);
    insta::assert_snapshot!("help_serve", llmctl(&["serve", "--help"]).check(0, "").stdout);
    insta::assert_snapshot!("help_worker_short", llmctl(&["worker", "-h"]).check(0, "").stdout);
    insta::assert_snapshot!("help_worker", llmctl(&["worker", "--help"]).check(0, "").stdout);
}

#[test]
fn help_and_version_go_to_stdout_and_no_command_is_a_usage_error() {
    let version = llmctl(&["--version"]);
    assert_eq!(version.check(0, "").stdout, concat!("llmctl ", env!("CARGO_PKG_VERSION"), "\n"));
    let none = llmctl(&[]);
    assert_eq!(none.check(2, "llmctl chat ").stdout, "");
    assert_eq!(none.stderr.lines().count(), 5, "{}", none.stderr);
}

#[test]
fn typos_get_suggestions() {
    llmctl(&["rnu", "hi"]).check(2, "similar subcommand exists: 'run'");
    llmctl(&["run", "--temprature", "1", "hi"]).check(2, "similar argument exists: '--temperature'");
    llmctl(&["run", "--prompt", "sumarize"]).check(66, "did you mean summarize?");
    llmctl(&["run", "--output", "jsn", "hi"]).check(2, "similar value exists: 'json'");
}

#[test]
fn wrong_values_are_refused_before_any_model_is_sought() {
    let check = |args: &[&str], message: &str| {
        let args = [&["run", "--model", "/no/such/model", "hi"], args].concat();
        llmctl(&args).check(2, message);
    };
    check(&["--temperature", "3"], "--temperature: 3 is not in [0, 2]");
    check(&["--temperature", "-1"], "--temperature: -1 is not in [0, 2]");
    check(&["--temperature", "nan"], "--temperature: NaN is not in [0, 2]");
    check(&["--top-p", "0"], "--top-p: 0 is not in (0, 1]");
    check(&["--top-k", "0"], "`all` keeps all tokens");
    check(&["--min-p", "1.5"], "--min-p: 1.5 is not in [0, 1]");
    check(&["--repetition-penalty", "0"], "--repetition-penalty: 0 is not in (0, 2]");
    check(&["--presence-penalty", "-3"], "--presence-penalty: -3 is not in [-2, 2]");
    check(&["--frequency-penalty", "3"], "--frequency-penalty: 3 is not in [-2, 2]");
    check(&["--logit-bias", "5=200"], "--logit-bias: 200 is not in [-100, 100]");
    check(&["--logit-bias", "5"], "not of the form ID=BIAS");
    check(&["--max-tokens", "0"], "--max-tokens: must be at least 1; -1 is no limit");
    check(&["--ctx", "1"], "--ctx: must be at least 2");
    check(&["--seed", "-1"], "--seed: -1 is negative");
    check(&["--logprobs", "21", "--output", "json"], "--logprobs");
    check(&["--logprobs", "2"], "--logprobs: plain text has no room for them");
    check(&["--raw", "--system", "x"], "cannot be used with");
    check(&["--dtype", "f32", "--quantize", "q8_0"], "cannot be used with");
    check(&["--resume"], "--out <FILE>");
}

#[test]
fn every_flag_has_a_variable_and_the_flag_wins() {
    let place = Place::new();
    let with = |name: &str, value: &str, args: &[&str]| {
        let mut command = place.command(&[&["run", "--model", "/no/such/model", "hi"], args].concat());
        command.env(name, value);
        finish(command, "")
    };
    with("LLMCTL_TEMPERATURE", "3", &[]).check(2, "LLMCTL_TEMPERATURE: 3 is not in");
    with("LLMCTL_TEMPERATURE", "3", &["--temperature", "1"]).check(66, "/no/such/model");
    with("LLMCTL_TEMPERATURE", "", &[]).check(66, "/no/such/model");
    with("LLMCTL_STATS", "perhaps", &[]).check(2, "LLMCTL_STATS: ");
    with("LLMCTL_STATS", "yes", &[]).check(66, "/no/such/model");
    with("LLMCTL_OUTPUT", "yaml", &[]).check(2, "LLMCTL_OUTPUT: ");
}

/// `llmctl run` of a model that is not there, which is found out (66) once the flags are accepted.
fn accepted(place: &Place, variables: &[(&str, &str)], args: &[&str]) {
    let mut command = place.command(&[&["run", "--model", "/no/such/model"], args].concat());
    command.envs(variables.iter().copied());
    finish(command, "").check(66, "/no/such/model");
}

#[test]
fn a_variable_that_says_off_is_not_a_flag_that_is_given() {
    let place = Place::new();
    place.write("rows.jsonl", "");
    accepted(&place, &[("LLMCTL_RAW", "0")], &["--system", "x", "hi"]);
    accepted(&place, &[("LLMCTL_NO_STREAM", "false")], &["--batch", "rows.jsonl"]);
    accepted(&place, &[("LLMCTL_QUIET", "0")], &["-v", "hi"]);
    accepted(&place, &[("LLMCTL_VERBOSE", "0")], &["--quiet", "hi"]);
    accepted(&place, &[("LLMCTL_RESUME", "no")], &["hi"]);
    let mut chat = place.command(&["chat", "--model", "/no/such/model", "-c"]);
    chat.env("LLMCTL_EPHEMERAL", "off");
    finish(chat, "").check(66, "");
    // It still says off to who says on with less weight.
    place.write("llmctl.toml", "[run]\nraw = true\n");
    accepted(&place, &[("LLMCTL_RAW", "0")], &["--system", "x", "hi"]);
    let Some(model) = super::stories() else { return };
    let said_plain = |value: &str| {
        let mut command = place.command(&["run", "--model", &model, "--dry-run", "hi"]);
        command.env("LLMCTL_RAW", value);
        finish(command, "").check(0, "").stderr.contains("has no chat template")
    };
    assert_eq!((said_plain("0"), said_plain(""), said_plain("1")), (true, false, false));
}

#[test]
fn a_flag_wins_over_a_variable_that_it_excludes() {
    let place = Place::new();
    place.write("rows.jsonl", "");
    accepted(&place, &[("LLMCTL_DTYPE", "f16")], &["--quantize", "q8_0", "hi"]);
    accepted(&place, &[("LLMCTL_QUANTIZE", "q8_0")], &["--dtype", "f16", "hi"]);
    accepted(&place, &[("LLMCTL_RAW", "1")], &["--system", "x", "hi"]);
    accepted(&place, &[("LLMCTL_QUIET", "1")], &["--verbose", "hi"]);
    accepted(&place, &[("LLMCTL_NO_STREAM", "1")], &["--batch", "rows.jsonl"]);
    let mut both = place.command(&["run", "hi"]);
    both.env("LLMCTL_DTYPE", "f16").env("LLMCTL_QUANTIZE", "q8_0");
    finish(both, "").check(2, "cannot be used with");
    place.run(&["run", "--dtype", "f16", "--quantize", "q8_0", "hi"]).check(2, "cannot be used with");
}

#[test]
fn a_variable_is_for_the_subcommands_whose_flag_takes_its_value() {
    let place = Place::new();
    let with = |value: &str, args: &[&str]| {
        let mut command = place.command(args);
        command.env("LLMCTL_OUTPUT", value);
        finish(command, "")
    };
    for args in [
        &["models"][..],
        &["sessions"],
        &["sessions", "list"],
        &["doctor"],
        &["config", "show"],
        &["config", "path"],
    ] {
        with("jsonl", args).check(0, "");
        with("yaml", args).check(2, "LLMCTL_OUTPUT: unknown value \"yaml\"");
    }
    assert!(with("jsonl", &["run", "--list-prompts"]).check(0, "").stdout.starts_with("{\"schema\":"));
    assert!(with("json", &["models"]).check(0, "").stdout.starts_with('{'));
    with("md", &["run", "--model", "/no/such/model", "hi"]).check(66, "/no/such/model");
}

#[cfg(target_os = "linux")]
#[test]
fn a_stderr_that_cannot_be_written_to_is_no_error() {
    let full = || File::options().write(true).open("/dev/full").expect("/dev/full");
    let run = |args: &[&str]| {
        Place::new().command(args).stdout(Stdio::null()).stderr(full()).status().expect("runs").code()
    };
    assert_eq!(run(&["-v", "run", "--model", "/no/such/model", "hi"]), Some(66));
    let Some(model) = super::stories() else { return };
    assert_eq!(run(&["-vvv", "run", "--model", &model, "--raw", "hi", "-n", "1"]), Some(0));
}

#[test]
fn devices_that_are_not_built_in_are_refused() {
    let Some(model) = super::stories() else { return };
    for (device, built) in [("cuda", cfg!(feature = "cuda")), ("metal", cfg!(feature = "metal"))] {
        if !built {
            let ran = llmctl(&["run", "--model", &model, "--device", device, "--raw", "hi"]);
            ran.check(2, "this build has no support for").check(2, "--device cpu");
        }
    }
}

#[test]
fn colours_are_for_terminals_and_those_who_ask() {
    let place = Place::new();
    let args = ["run", "--prompt", "none"];
    let plain = |ran: &Ran| !ran.stderr.contains('\x1b') && !ran.stdout.contains('\x1b');
    assert!(plain(&place.run(&args)));
    assert!(plain(&place.run(&["run", "--none"])));
    assert!(plain(&place.run(&["--help"])));
    assert!(!plain(&place.run(&["--color", "always", "run", "--prompt", "none"])));
    assert!(!plain(&place.run(&["--color", "always", "run", "--none"])));
    let with = |name: &str, value: &str, args: &[&str]| {
        let mut command = place.command(args);
        command.env(name, value);
        finish(command, "")
    };
    assert!(!plain(&with("CLICOLOR_FORCE", "1", &args)));
    assert!(!plain(&with("LLMCTL_COLOR", "always", &args)));
    assert!(plain(&with("CLICOLOR_FORCE", "1", &["--color", "never", "run", "--prompt", "none"])));
}

#[test]
fn a_reader_of_help_that_leaves_is_no_failure() {
    let place = Place::new();
    let mut child = place.command(&["run", "--help"]).stdout(Stdio::piped()).spawn().expect("starts");
    let mut first = [0; 10];
    child.stdout.take().expect("a pipe").read_exact(&mut first).expect("some help");
    assert_eq!(child.wait().expect("ends").code(), Some(0));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error_also_for_help_and_lists() {
    for args in [&["--help"][..], &["run", "--list-prompts"]] {
        let full = File::options().write(true).open("/dev/full").expect("/dev/full");
        let output = Place::new().command(args).stdout(full).output().expect("runs");
        assert_eq!(output.status.code(), Some(74), "{args:?}");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(stderr.contains("error: writing to standard output: no space left"), "{args:?}: {stderr}");
    }
}
