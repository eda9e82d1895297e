//! `llmctl run --session` and `llmctl sessions`: conversations that survive their process, whatever ends it.

use llmctl_engine::session::store::BranchReason;

use super::{finish, llmctl, read_line, stories};
use crate::common::prelude::*;

const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]";

/// A place with a template, and the arguments that every turn has.
struct Chat {
    place: Place,
    model: String,
}

fn chat() -> Option<Chat> {
    let (place, model) = (Place::new(), stories()?);
    place.write("t.jinja", TEMPLATE);
    Some(Chat { place, model })
}

impl Chat {
    fn args<'a>(&'a self, session: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let fixed = ["run", "--model", &self.model, "--chat-template", "t.jinja", "--session", session];
        [&fixed, more].concat()
    }

    fn turn(&self, session: &str, more: &[&str]) -> Ran {
        self.place.run(&self.args(session, more))
    }

    fn json(&self, args: &[&str]) -> Value {
        let ran = self.place.run(&[args, &["--output", "json"]].concat());
        serde_json::from_str(&ran.check(0, "").stdout).expect("JSON")
    }

    fn shown(&self, session: &str) -> Value {
        self.json(&["sessions", "show", session])
    }

    fn num_turns(&self, session: &str) -> usize {
        self.shown(session)["turns"].as_array().expect("turns").len()
    }

    fn transcript(&self, session: &str) -> PathBuf {
        self.place.path(".local/share/llmctl/sessions").join(session).join("transcript.jsonl")
    }

    /// A turn in the middle of its answer, blocked in writing it, and its first line.
    fn blocked(&self, session: &str) -> (Child, String) {
        let more = ["Tell a story", "--ignore-eos", "--output", "jsonl", "--logprobs", "20"];
        let mut command = self.place.command(&self.args(session, &more));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("llmctl starts");
        let stdout = child.stdout.as_mut().expect("a pipe");
        let lines = [(); 6].map(|()| read_line(stdout)); // started, prefill, texts
        let [first, .., last] = lines;
        assert!(last.contains("\"text\""), "{last}");
        (child, first)
    }
}

#[cfg(unix)]
#[test]
fn a_limit_on_file_sizes_is_an_error_and_no_silent_end() {
    let Some(chat) = chat() else { return };
    let mut command = chat.place.command(&chat.args("small", &["One", "-n", "2"]));
    let limit = libc::rlimit { rlim_cur: 1000, rlim_max: 1000 };
    let limited = move || {
        // SAFETY: a system call that is async-signal-safe and reads a structure of the closure.
        match unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: the closure does nothing but that system call.
    unsafe { std::os::unix::process::CommandExt::pre_exec(&mut command, limited) };
    finish(command, "").check(74, "sessions: sessions cannot be saved: file too large");
}

#[test]
fn turns_follow_each_other_over_processes() {
    let Some(chat) = chat() else { return };
    let first = chat.turn("trip", &["--system", "Be brief.", "One", "-n", "6"]);
    first.check(0, "new session trip");
    let second = chat.turn("trip", &["Two", "-n", "6"]);
    second.check(0, "continuing session trip (1 turn, ");
    let shown = chat.shown("trip");
    let turns = shown["turns"].as_array().expect("turns");
    let texts: Vec<(&str, &str)> = turns
        .iter()
        .flat_map(|turn| turn["messages"].as_array().expect("messages"))
        .map(|m| (m["role"].as_str().expect("a role"), m["content"].as_str().expect("a text")))
        .collect();
    let (one, two) = (first.stdout.trim_end_matches('\n'), second.stdout.trim_end_matches('\n'));
    let expected =
        [("system", "Be brief."), ("user", "One"), ("assistant", one), ("user", "Two"), ("assistant", two)];
    assert_eq!(texts, expected);
    // The whole conversation is what the model gets next, the answers as they came: right behind the header.
    let preview = chat.turn("trip", &["Three", "--dry-run"]);
    assert_eq!(
        preview.check(0, "tokens of a context").stdout,
        format!(
            "[system] Be brief.\n[user] One\n[assistant]{one}\n[user] Two\n[assistant]{two}\n[user] Three\n[assistant]\n"
        ),
    );
    assert_eq!(chat.num_turns("trip"), 2, "a preview is no turn");
    chat.turn("new", &["x", "--dry-run"]).check(0, "");
    chat.place.run(&["sessions", "show", "new"]).check(66, "no session named \"new\"");
}

#[test]
fn what_is_answered_next_is_what_one_process_would_have_answered() {
    let Some(chat) = chat() else { return };
    chat.turn("a", &["Once upon a time", "-n", "12"]).check(0, "");
    let args = chat.args("a", &["And then", "-n", "12", "--output", "json"]);
    let ran = finish(chat.place.command(&args), "");
    let value: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    let reuse = &value["reuse"];
    assert_eq!(reuse["reason"], "restored", "{reuse}");
    assert!(reuse["restored_tokens"].as_u64() >= Some(32), "{reuse}");
    chat.turn("b", &["Once upon a time", "-n", "12"]).check(0, "");
    let cold = chat.turn("b", &["And then", "-n", "12", "--no-warm-resume"]);
    assert_eq!(cold.check(0, "").stdout.trim_end_matches('\n'), value["text"].as_str().expect("a text"));
}

#[test]
fn a_kill_in_the_middle_of_a_turn_keeps_every_finished_one() {
    let Some(chat) = chat() else { return };
    for question in ["One", "Two", "Three"] {
        chat.turn("k", &[question, "-n", "4"]).check(0, "");
    }
    let before = std::fs::read(chat.transcript("k")).expect("a transcript");
    let (mut child, line) = chat.blocked("k");
    assert!(line.contains("\"started\""), "{line}");
    child.kill().expect("killed"); // SIGKILL
    child.wait().expect("ended");
    assert_eq!(std::fs::read(chat.transcript("k")).expect("a transcript"), before);
    assert_eq!(before.iter().filter(|byte| **byte == b'\n').count(), 4, "a header and three turns");
    chat.turn("k", &["Four", "-n", "4"]).check(0, "continuing session k (3 turns, ");
    assert_eq!(chat.num_turns("k"), 4);
}

#[test]
fn a_kill_in_the_first_turn_leaves_a_session_that_can_begin() {
    let Some(chat) = chat() else { return };
    let (mut child, _) = chat.blocked("k");
    child.kill().expect("killed");
    child.wait().expect("ended");
    chat.turn("k", &["One", "-n", "4"]).check(0, "new session k");
    assert_eq!(chat.num_turns("k"), 1);
}

#[cfg(unix)]
#[test]
fn an_interrupted_turn_is_kept_as_cancelled_and_so_is_one_whose_reader_left() {
    let Some(chat) = chat() else { return };
    for (signal, code) in [(libc::SIGINT, 130), (libc::SIGHUP, 129)] {
        let (mut child, _) = chat.blocked("i");
        // SAFETY: plain system call on a child that has not been waited for.
        unsafe { libc::kill(child.id() as libc::pid_t, signal) };
        let mut rest = String::new();
        child.stdout.take().expect("a pipe").read_to_string(&mut rest).expect("UTF-8");
        assert_eq!(child.wait().expect("ended").code(), Some(code));
    }
    let (mut child, _) = chat.blocked("i");
    drop(child.stdout.take());
    assert_eq!(child.wait().expect("ended").code(), Some(0));
    let shown = chat.shown("i");
    for turn in shown["turns"].as_array().expect("turns") {
        assert_eq!(turn["finish_reason"], "cancelled");
        assert!(!turn["messages"][1]["content"].as_str().expect("a text").is_empty());
    }
    assert_eq!(chat.num_turns("i"), 3);
}

#[test]
fn a_session_in_use_is_a_temporary_failure() {
    let Some(chat) = chat() else { return };
    let (mut child, _) = chat.blocked("busy");
    chat.turn("busy", &["hi"]).check(75, "is open in another llmctl process");
    for args in [
        &["sessions", "remove", "busy", "--yes"][..],
        &["sessions", "rename", "busy", "b"],
        &["sessions", "repair", "busy"],
    ] {
        chat.place.run(args).check(75, "session \"busy\"");
    }
    chat.place.run(&["sessions"]).check(0, "");
    child.kill().expect("killed");
    child.wait().expect("ended");
    chat.turn("busy", &["hi", "-n", "2"]).check(0, "");
}

#[test]
fn a_system_prompt_belongs_to_the_first_turn() {
    let Some(chat) = chat() else { return };
    chat.turn("s", &["--system", "A", "One", "-n", "2"]).check(0, "");
    chat.turn("s", &["--system", "A", "Two", "-n", "2"]).check(0, "");
    let refused = chat.turn("s", &["--system", "B", "Three", "-n", "2"]);
    refused.check(2, "began with another system prompt").check(2, "llmctl sessions remove NAME");
    chat.turn("n", &["One", "-n", "2"]).check(0, "");
    chat.turn("n", &["--system", "A", "Two", "--dry-run"]).check(2, "began without a system prompt");
    assert_eq!((chat.num_turns("s"), chat.num_turns("n")), (2, 1));
    // That of a file or a variable is for new sessions: nothing is asked of one that has begun.
    std::fs::create_dir_all(chat.place.path(".config/llmctl")).expect("a folder");
    chat.place.write(".config/llmctl/config.toml", "system = \"B\"\n");
    for name in ["s", "n"] {
        chat.turn(name, &["Again", "-n", "2"]).check(0, "");
        let mut command = chat.place.command(&chat.args(name, &["Again", "-n", "2"]));
        command.env("LLMCTL_SYSTEM", "C");
        finish(command, "").check(0, "");
        let args = ["chat", "--chat-template", "t.jinja", "--session", name, "-n", "2", "Again"];
        chat.place.run(&args).check(0, "");
        chat.turn(name, &["--system", "B", "Again", "-n", "2"]).check(2, "system prompt");
    }
    chat.turn("b", &["One", "-n", "2"]).check(0, "");
    let begins = |name| chat.shown(name)["turns"][0]["messages"][0]["content"].clone();
    assert_eq!([begins("s"), begins("n"), begins("b")], ["A", "One", "B"]);
    assert_eq!((chat.num_turns("s"), chat.num_turns("n")), (5, 4));
}

#[test]
fn what_a_session_cannot_do_is_refused_and_leaves_none_behind() {
    let Some(chat) = chat() else { return };
    chat.turn("x", &["hi", "--raw"]).check(2, "cannot be used with");
    chat.turn("x", &["--batch", "-"]).check(2, "cannot be used with");
    chat.turn("x", &["hi", "--prefill-response", "Sure"]).check(2, "cannot be used with");
    chat.turn("a b", &["hi"]).check(2, "--session: name \"a b\": use letters");
    let model = ["run", "--model", &chat.model, "--session", "x", "hi"];
    chat.place.run(&model).check(65, "--session needs one");
    chat.turn("x", &["hi", "--ctx", "4"]).check(65, "the prompt has");
    chat.turn("x", &["hi", "--stop", "x", "-n", "9999"]).check(65, "--max-tokens");
    let list = chat.json(&["sessions"]);
    assert_eq!(list["sessions"], serde_json::json!([]));
    chat.place.run(&["sessions"]).check(0, "");
    assert_eq!(chat.place.run(&["sessions"]).stdout, "no sessions in ~/.local/share/llmctl/sessions\n");
}

#[test]
fn a_conversation_that_fills_the_context_says_so() {
    let Some(chat) = chat() else { return };
    chat.turn("f", &["One", "--ctx", "64", "--ignore-eos"]).check(0, "the context of 64 tokens is full");
    chat.turn("f", &["Two", "--ctx", "64"]).check(65, "begin another session");
    chat.turn("f", &["Two", "-n", "2"]).check(0, "continuing session f (1 turn, 64 tokens)");
}

#[test]
fn another_model_goes_on_with_the_text_and_says_so() {
    let Some(chat) = chat() else { return };
    chat.turn("m", &["One", "-n", "4"]).check(0, "");
    chat.place.write("other.jinja", format!("{TEMPLATE} "));
    let args =
        ["run", "--model", &chat.model, "--chat-template", "other.jinja", "--session", "m", "Two", "-n", "4"];
    chat.place.run(&args).check(0, "this session was started with hf");
    assert_eq!(chat.num_turns("m"), 2);
}

#[test]
fn verbose_and_stats_say_what_was_reused() {
    let Some(chat) = chat() else { return };
    let ran = chat.turn("v", &["One", "-n", "2", "-v"]);
    ran.check(0, "reuse        0 tokens reused, 0 of them from disk, ").check(0, " prefilled (new)");
    let ran = chat.turn("v", &["Two", "-n", "2", "--stats"]);
    ran.check(0, "reuse        0 tokens reused, 0 of them from disk, ");
    assert_eq!(ran.stderr.matches("reuse  ").count(), 1, "{ran:?}");
    assert!(!chat.turn("v", &["Three", "-n", "2"]).stderr.contains("reuse"));
}

#[test]
fn sessions_of_owners_of_keys_are_counted_listed_and_removed() {
    let place = Place::new();
    let root = SessionStore::new(place.path(".local/share/llmctl/sessions"));
    let name = SessionName::new("trip").expect("a name");
    for owner in ["anna", "Ben"] {
        drop(root.of_owner(owner).create(&name, &ModelFingerprint::default()).expect("new"));
    }
    let list = place.run(&["sessions"]);
    list.check(0, "");
    assert!(list.stdout.contains("Ben (1), anna (1); --owner NAME"), "{}", list.stdout);
    let anna = place.run(&["sessions", "list", "--owner", "anna"]);
    assert!(anna.check(0, "").stdout.lines().any(|line| line.starts_with("trip ")), "{}", anna.stdout);
    place.run(&["sessions", "--owner", "anna", "remove", "--yes", "trip"]).check(0, "");
    assert!(!root.of_owner("anna").exists(&name) && root.of_owner("Ben").exists(&name));
    place.run(&["sessions", "show", "trip"]).check(66, "no session named");
    place.run(&["sessions", "--owner", "carl"]).check(66, "there are Ben, anna");
}

#[test]
fn sessions_are_listed_renamed_and_removed() {
    let Some(chat) = chat() else { return };
    chat.turn("work", &["One", "-n", "3"]).check(0, "");
    chat.turn("play", &["One", "-n", "3"]).check(0, "");
    chat.turn("work", &["Two", "-n", "3"]).check(0, "");
    let run = |args: &[&str]| chat.place.run(&[&["sessions"], args].concat());
    let table = run(&["list"]).stdout;
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["NAME", "TURNS", "TOKENS", "LAST", "USED", "MODEL"]);
    assert_eq!((rows[1][..2].to_vec(), rows[2][..2].to_vec()), (vec!["work", "2"], vec!["play", "1"]));
    assert_eq!((rows[1][3..].to_vec(), rows.len()), (vec!["just", "now", "hf"], 3));
    assert_eq!(run(&[]).stdout, table, "the default");
    let list = chat.json(&["sessions"]);
    assert_eq!((&list["schema"], &list["sessions"][0]["turns"]), (&"llmctl.sessions.v1".into(), &2.into()));

    run(&["rename", "wrok", "x"]).check(66, "did you mean work?");
    run(&["rename", "work", "play"]).check(2, "\"play\" already");
    assert_eq!(run(&["rename", "work", "job"]).check(0, "").stdout, "session work is now job\n");
    chat.turn("job", &["Three", "-n", "3"]).check(0, "continuing session job (2 turns, ");
    run(&["show", "jbo"]).check(66, "did you mean job?");
    run(&["remove", "zzz"]).check(66, "`llmctl sessions` lists them");
    run(&["remove", "a/b"]).check(2, "session name \"a/b\": use letters");
    run(&["remove"]).check(2, "<NAME>");
    assert_eq!(
        run(&["remove", "job", "--yes"]).check(0, "").stdout,
        "session job is removed, with 2 pages of KV\n"
    );
    assert_eq!(chat.json(&["sessions"])["sessions"].as_array().expect("a list").len(), 1);
    llmctl(&["sesions"]).check(2, "'sessions'");
}

#[test]
fn several_are_removed_at_once_or_none() {
    let Some(chat) = chat() else { return };
    for session in ["a", "b", "c"] {
        chat.turn(session, &[&"One day, and another. ".repeat(8), "-n", "3"]).check(0, "");
    }
    let run = |args: &[&str]| chat.place.run(&[&["sessions"], args].concat());
    run(&["rm", "a", "zzz"]).check(66, "no session named \"zzz\"");
    assert_eq!(chat.json(&["sessions"])["sessions"].as_array().expect("a list").len(), 3, "none is removed");
    let removed = run(&["rm", "b", "a", "--yes"]).check(0, "").stdout.clone();
    assert!(
        removed.starts_with("session a is removed, with 0 pages of KV\nsession b is removed"),
        "{removed}"
    );
    let removed = chat.json(&["sessions", "delete", "--yes", "c"]);
    assert_eq!(
        (&removed["removed"], &removed["branches_kept"]),
        (&serde_json::json!(["c"]), &serde_json::json!([]))
    );
    assert!(removed["kv_pages"].as_u64().expect("a number") > 0, "the last that used it: {removed}");
}

#[test]
fn a_session_says_what_reopens_its_model() {
    let Some(chat) = chat() else { return };
    chat.turn("a", &["One", "-n", "3"]).check(0, "");
    let absolute = std::fs::canonicalize(&chat.model).expect("there");
    let reference = chat.shown("a")["model_reference"].as_str().expect("a text").to_owned();
    assert_eq!(std::fs::canonicalize(&reference).expect("there"), absolute);
    assert!(Path::new(&reference).is_absolute(), "{reference}");
    let list = chat.json(&["sessions"]);
    assert_eq!(list["sessions"][0]["model_reference"], reference.as_str());
    assert!(list["sessions"][0]["owner"].is_null() && list["sessions"][0]["fork_of"].is_null());
}

#[test]
fn branches_are_listed_below_their_session_and_restored() {
    let Some(chat) = chat() else { return };
    for question in ["One", "Two"] {
        chat.turn("w", &[question, "-n", "3"]).check(0, "");
    }
    chat.turn("z", &["One", "-n", "3"]).check(0, "");
    let name = |name: &str| SessionName::new(name).expect("a name");
    let store = SessionStore::new(chat.place.path(".local/share/llmctl/sessions"));
    let mut writer = store.open(&name("w")).expect("opened");
    writer.keep(BranchReason::Undo).expect("kept");
    writer.truncate(1).expect("undone");
    drop(writer);
    let run = |args: &[&str]| chat.place.run(&[&["sessions"], args].concat());
    let table = run(&[]).check(0, "").stdout.clone();
    let names: Vec<&str> =
        table.lines().map(|line| line.split("  ").find(|cell| !cell.is_empty()).expect("a cell")).collect();
    assert_eq!(names, ["NAME", "w", "w~1 (undo)", "z"], "{table}");
    assert!(table.contains("\n  w~1 (undo)"), "{table}");
    let shown = chat.shown("w~1");
    assert_eq!(shown["fork_of"]["branch"]["reason"], "undo");
    assert_eq!(chat.shown("w")["branches"], serde_json::json!(["w~1"]));
    assert!(run(&["show", "w"]).stdout.ends_with("\nbranches: w~1\n"));

    run(&["restore", "w"]).check(2, "not a branch");
    assert_eq!(run(&["restore", "w~1"]).check(0, "").stdout, "session w holds what w~1 held\n");
    assert_eq!(chat.num_turns("w"), 2);
    run(&["restore", "w~1"]).check(66, "no session named \"w~1\"");

    store.open(&name("w")).expect("opened").keep(BranchReason::Edit).expect("kept");
    let removed = run(&["remove", "w", "--yes"]).check(0, "").stdout.clone();
    assert!(removed.ends_with("\nbranches that are kept: w~1\n"), "{removed}");
    run(&["restore", "w~1"]).check(66, "makes the branch a session of its own");
    run(&["rename", "w~1", "v"]).check(0, "");
    assert!(chat.shown("v")["fork_of"]["branch"].is_null());
    store.open(&name("v")).expect("opened").keep(BranchReason::Edit).expect("kept");
    let removed = chat.json(&["sessions", "remove", "v", "--branches", "--yes"]);
    assert_eq!(removed["removed"], serde_json::json!(["v", "v~1"]));
}

#[test]
fn a_conversation_is_exported_and_purged() {
    let Some(chat) = chat() else { return };
    chat.turn("w", &["--system", "S", "Old words", "-n", "3"]).check(0, "");
    let store = SessionStore::new(chat.place.path(".local/share/llmctl/sessions"));
    store.open(&SessionName::new("w").expect("a name")).expect("opened").truncate(0).expect("undone");
    let answer = chat.turn("w", &["--system", "S", "New words", "-n", "3"]).stdout.trim().to_owned();
    let run = |args: &[&str]| chat.place.run(&[&["sessions"], args].concat());
    let markdown = run(&["export", "w"]).check(0, "").stdout.clone();
    assert!(
        markdown.starts_with("# w\n\n## System\n\nS\n\n## User\n\nNew words\n\n## Assistant\n\n"),
        "{markdown}"
    );
    assert!(markdown.contains(&answer), "{markdown}");
    let exported = run(&["export", "w", "--as", "json"]).check(0, "").stdout.clone();
    let exported: Value = serde_json::from_str(&exported).expect("JSON");
    assert_eq!(exported["messages"][1], serde_json::json!({"role": "user", "content": "New words"}));
    assert_eq!(exported["messages"].as_array().expect("a list").len(), 3);

    let text = || std::fs::read_to_string(chat.transcript("w")).expect("a transcript");
    assert!(text().contains("Old words"));
    let purged = run(&["purge", "w"]).check(0, "").stdout.clone();
    assert!(purged.contains("of undone or damaged text erased, with "), "{purged}");
    assert!(!text().contains("Old words") && text().contains("New words"));
    chat.turn("w", &["Go on", "-n", "3"]).check(0, "continuing session w (1 turn");
}

#[test]
fn a_conversation_is_shown_turn_by_turn() {
    let Some(chat) = chat() else { return };
    let ran = chat.turn("w", &["--system", "S", "One", "-n", "3"]);
    let text = chat.place.run(&["sessions", "show", "w"]).check(0, "").stdout.clone();
    for line in ["session    w", "model      hf", "turns      1", "-- turn 1: ", "[system] S", "[user] One"] {
        assert!(text.lines().any(|found| found.starts_with(line)), "{line:?} is not in {text}");
    }
    assert!(text.ends_with(&format!("[assistant] {}\n", ran.stdout.trim_end_matches('\n'))), "{text}");
    assert!(text.contains(" tokens, length\n"), "{text}");
}

#[test]
fn damage_is_named_by_line_and_repaired_when_asked() {
    let Some(chat) = chat() else { return };
    for question in ["One", "Two", "Three"] {
        chat.turn("d", &[question, "-n", "3"]).check(0, "");
    }
    let path = chat.transcript("d");
    let text = std::fs::read_to_string(&path).expect("a transcript");
    let sane = chat.place.run(&["sessions", "repair", "d"]);
    assert_eq!(sane.check(0, "").stdout, "session d: nothing is damaged\n");
    std::fs::write(&path, text.replacen("Three", "Trhee", 1)).expect("written");
    chat.turn("d", &["Four"]).check(65, "line 4").check(65, "llmctl sessions repair NAME");
    chat.place.run(&["sessions", "show", "d"]).check(65, "line 4");
    assert!(chat.place.run(&["sessions"]).check(0, "").stdout.contains("cannot be read: "));
    let repaired = chat.place.run(&["sessions", "repair", "d"]);
    assert!(repaired.check(0, "").stdout.contains("line 4 was damaged; 2 turns are kept"), "{repaired:?}");
    chat.turn("d", &["Four", "-n", "3"]).check(0, "continuing session d (2 turns, ");
    // Repair keeps the lines before a damage, and the first line has none before it.
    for damaged in ["", "{}\n"] {
        std::fs::write(&path, damaged).expect("written");
        for args in [&["sessions", "repair", "d"][..], &["sessions", "show", "d"]] {
            let refused = chat.place.run(args);
            refused.check(65, "line 1").check(65, "`llmctl sessions remove NAME` frees the name");
            assert!(!refused.stderr.contains("sessions repair"), "{refused:?}");
        }
    }
    chat.place.run(&["sessions", "remove", "d", "--yes"]).check(0, "");
    chat.turn("d", &["One", "-n", "3"]).check(0, "new session d");
}

#[test]
fn help_says_how() {
    insta::assert_snapshot!("help_sessions", llmctl(&["sessions", "--help"]).check(0, "").stdout);
    insta::assert_snapshot!("help_sessions_show", llmctl(&["sessions", "show", "-h"]).check(0, "").stdout);
}
