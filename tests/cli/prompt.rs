//! Where a prompt comes from, seen through `--dry-run`, which prints what the model would get.

use super::{llmctl, stories};
use crate::common::prelude::*;

/// The rendered prompt, without a chat template, for these arguments and this stdin.
fn rendered(place: &Place, args: &[&str], stdin: &str) -> Option<Ran> {
    let model = stories()?;
    let args = [&["run", "--model", &model, "--raw", "--dry-run"], args].concat();
    Some(finish(place.command(&args), stdin))
}

#[test]
fn prompts_are_listed_and_usable_by_name() {
    let list = llmctl(&["run", "--list-prompts"]);
    insta::assert_snapshot!("list_prompts", list.check(0, "").stdout);
    let json = llmctl(&["run", "--list-prompts", "--output", "json"]);
    let json: Value = serde_json::from_str(&json.check(0, "").stdout).expect("JSON");
    assert_eq!(json["prompts"].as_array().expect("prompts").len(), list.stdout.lines().count());

    let lines = llmctl(&["run", "--list-prompts", "--output", "jsonl"]);
    for line in lines.check(0, "").stdout.lines() {
        let line: Value = serde_json::from_str(line).expect("JSON per line");
        assert!(line["schema"] == "llmctl.prompts.v1" && line["name"].is_string(), "{line}");
    }

    let place = Place::new();
    let Some(ran) = rendered(&place, &["--prompt", "translate", "--var", "language=Dutch"], "Good day.\n")
    else {
        return;
    };
    assert!(ran.check(0, " tokens of a context of 512").stdout.contains("into Dutch."), "{ran:?}");
    assert!(ran.stdout.ends_with("---\nGood day.\n---\n"), "{ran:?}");
}

#[test]
fn argument_file_and_stdin_are_joined_by_blank_lines() {
    let place = Place::new();
    let file = place.write("ask.txt", "from {{ file }}\n");
    let file = file.to_str().expect("UTF-8");
    let check = |args: &[&str], stdin: &str, expected: &str| {
        let Some(ran) = rendered(&place, args, stdin) else { return };
        assert_eq!(ran.check(0, "").stdout, expected, "{args:?} {stdin:?}");
    };
    check(&["two", "words"], "", "two words\n");
    check(&["ask"], "data\n", "ask\n\ndata\n");
    check(&[], "data", "data\n");
    check(&["ask", "--no-stdin"], "data", "ask\n");
    check(&["--prompt-file", file, "ask"], "data", "from {{ file }}\n\nask\n\ndata\n");
    check(&["--prompt-file", "-"], "data", "data\n");
    check(&["--prompt-file", file, "--var", "file=F"], "", "from F\n");
    check(&["--prompt-file", file, "--var", &format!("file=@{file}")], "", "from from {{ file }}\n");
    let wants = place.write("wants.txt", "<{{ input }}>\n");
    let wants = wants.to_str().expect("UTF-8");
    check(&["--prompt-file", wants], "data", "<data>\n");
    check(&["--prompt-file", wants, "ask"], "", "<ask>\n");
    check(&["--prompt-file", wants], "", "<{{ input }}>\n");
    let both = place.write("both.txt", "{{ file }} <{{ input }}>\n");
    check(&["--prompt-file", both.to_str().expect("UTF-8")], "data", "{{ file }} <{{ input }}>\n\ndata\n");
    check(&["ask", "--prefill-response", "Well"], "", "askWell\n");
}

#[test]
fn a_prompt_that_is_not_there_is_66_and_one_not_given_is_2() {
    let place = Place::new();
    place.run(&["run"]).check(2, "no prompt given");
    place.run(&["run", "--prompt-file", "none.txt"]).check(66, "none.txt");
    place.run(&["run", "--prompt-file", "summarize"]).check(66, "--prompt summarize");
    place.run(&["run", "hi", "--system-file", "none.txt"]).check(66, "none.txt");
    place.run(&["run", "--prompt-file", "."]).check(66, "directory");
    place.run(&["run", "-m", "/no/such/model", "--prompt", "summarize"]).check(2, "needs an input");
    place.run(&["run", "--prompt-file", "-", "--no-stdin"]).check(2, "--no-stdin forbids it");
    place.run(&["run", "hi", "--schema", "-", "--no-stdin"]).check(2, "--no-stdin forbids it");
    place
        .run(&words("run -m /no/such/model --prompt translate --var language=a --var language=b hi"))
        .check(2, "\"language\" is given twice");
    place.run(&["run", "hi", "--logit-bias", "5=1,5=2"]).check(2, "--logit-bias: token 5 is given twice");
    place.run(&["run", "hi", "--var", "a=b"]).check(2, "--var fills a prompt file");
    place.run(&["run", "-m", "/no/such/model", "--prompt", "translate", "hi"]).check(2, "language");
    place
        .run(&["run", "-m", "/no/such/model", "--prompt", "translate", "--var", "tongue=x", "hi"])
        .check(2, "no variable \"tongue\"");
    let binary = place.write("binary", b"a\xff\n");
    place
        .run(&["run", "--prompt-file", binary.to_str().expect("UTF-8")])
        .check(65, "not UTF-8 text (at byte 1)");
}

#[test]
fn an_empty_file_is_a_prompt() {
    let place = Place::new();
    place.write("empty", "");
    let Some(ran) = rendered(&place, &["--prompt-file", "empty"], "") else { return };
    // The BOS token alone.
    ran.check(0, "1 tokens of a context of 512");
    assert_eq!(ran.stdout, "");
}

#[cfg(unix)]
#[test]
fn a_terminal_as_stdin_is_not_waited_for() {
    use std::os::fd::{FromRawFd, OwnedFd};
    let (mut master, mut slave) = (0, 0);
    let null = std::ptr::null_mut();
    // SAFETY: `openpty` writes two descriptors; the optional arguments may be null.
    let opened = unsafe { libc::openpty(&mut master, &mut slave, null, null.cast(), null.cast()) };
    assert_eq!(opened, 0, "a pseudo-terminal");
    // SAFETY: both descriptors were opened just now and belong to nobody else.
    let (_master, slave) = unsafe { (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
    let place = Place::new();
    let mut command = place.command(&["run"]);
    let output = command.stdin(Stdio::from(slave)).output().expect("ends");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
