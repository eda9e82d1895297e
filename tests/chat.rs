//! `llmctl chat` in a terminal and in a pipe: the real binary in a pseudo-terminal, with a tiny model.
//!
//! Most tests take a random one: what it says is noise and nothing depends on it, but what is asked, kept, shown and reused.
//! Where it matters what is said, the model is `common::scripted`. Each step waits for what it expects; a step that waits in
//! vain ends the test with the screen so far.

#![cfg(unix)]

mod transcripts;

use expectrl::Expect;
use rustix::process::Signal;

use crate::common::prelude::*;
use crate::common::scripted::{self, CODE, ENDLESS, NUM_THOUGHTS, PLAIN, THOUGHT};
use crate::common::terminal;

/// Longest wait for one step, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// A context of 2,048 tokens and a ChatML template.
fn model() -> String {
    format!("{}/tests/parity/qwen3", env!("CARGO_MANIFEST_DIR"))
}

/// The command with a short answer, nothing drawn and no colours.
fn command(place: &Place, more: &[&str]) -> Command {
    let model = model();
    let args = ["chat", "--model", &model, "--temperature", "0", "--ignore-eos"];
    let mut command = place.command(&[&args, more].concat());
    command.env("NO_COLOR", "1").env_remove("COLUMNS");
    command
}

/// A chat in a terminal.
pub struct Term {
    session: terminal::Session,
    /// The context's tokens, as the prompt's meter has them.
    context: String,
    seen: String,
}

impl Term {
    fn start(place: &Place, more: &[&str]) -> Self {
        Self::of(command(place, more), 100)
    }

    pub fn of(command: Command, columns: u16) -> Self {
        let mut term = Self::open(command, columns);
        term.prompt();
        term
    }

    pub fn open(command: Command, columns: u16) -> Self {
        let mut session = terminal::spawn(command, columns).expect("a terminal");
        session.set_expect_timeout(Some(PATIENCE));
        Self { session, context: "2,048".to_owned(), seen: String::new() }
    }

    pub fn expect(&mut self, text: &str) -> String {
        match self.session.expect(text) {
            Ok(found) => {
                let bytes = [found.before(), found.get(0).unwrap_or_default()].concat();
                let shown = String::from_utf8_lossy(&bytes).into_owned();
                self.seen.push_str(&shown);
                shown
            }
            Err(error) => {
                let mut rest = vec![0; 1 << 16];
                let count = self.session.try_read(&mut rest).unwrap_or(0);
                let rest = String::from_utf8_lossy(&rest[..count]);
                panic!("{text:?} did not come ({error}) after:\n{}\n-- and then:\n{rest}", self.seen)
            }
        }
    }

    /// Waits for the prompt with its meter.
    pub fn prompt(&mut self) -> String {
        let prompt = format!("/{} > ", self.context);
        self.expect(&prompt)
    }

    pub fn send(&mut self, text: &str) {
        self.session.send(text).expect("the terminal takes it");
    }

    /// Types a line and waits for this, and for the next prompt.
    pub fn line(&mut self, line: &str, expected: &str) -> String {
        self.send(&format!("{line}\r"));
        // What is typed comes back with every key: the end of the line is what counts.
        let echoed = self.expect("\r\n");
        let shown = if expected.is_empty() { String::new() } else { self.expect(expected) };
        let rest = self.prompt();
        echoed + &shown + &rest
    }

    /// Says something and waits until it is answered.
    fn say(&mut self, text: &str) -> String {
        self.line(text, "")
    }

    pub fn leave(mut self) -> String {
        self.send("/exit\r");
        self.end()
    }

    /// Waits for the end, with exit code 0.
    pub fn end(mut self) -> String {
        self.ended(0)
    }

    fn ended(&mut self, code: i32) -> String {
        let rest =
            self.session.expect(expectrl::Eof).map(|found| found.as_bytes().to_vec()).unwrap_or_default();
        self.seen.push_str(&String::from_utf8_lossy(&rest));
        let status = self.session.get_process_mut().child.wait().expect("an end");
        assert_eq!(status.code(), Some(code), "{}", self.seen);
        self.seen.clone()
    }

    fn signal(&self, signal: Signal) {
        self.session.get_process().signal(signal);
    }
}

fn json(place: &Place, args: &[&str]) -> Value {
    let ran = place.run(&[args, &["--output", "json"]].concat());
    serde_json::from_str(&ran.check(0, "").stdout).expect("JSON")
}

fn names(place: &Place) -> Vec<String> {
    let list = json(place, &["sessions"]);
    let sessions = list["sessions"].as_array().expect("a list");
    sessions.iter().map(|session| session["name"].as_str().expect("a name").to_owned()).collect()
}

fn turns(place: &Place, session: &str) -> Vec<Value> {
    json(place, &["sessions", "show", session])["turns"].as_array().expect("turns").clone()
}

/// Returns the user's messages, turn by turn.
fn questions(place: &Place, session: &str) -> Vec<String> {
    let turns = turns(place, session);
    let messages = turns.iter().flat_map(|turn| turn["messages"].as_array().expect("messages").clone());
    let asked = messages.filter(|message| message["role"] == "user");
    asked.map(|message| message["content"].as_str().expect("a text").to_owned()).collect()
}

fn piped(place: &Place, more: &[&str], stdin: &str) -> Ran {
    finish(command(place, more), stdin)
}

const SHORT: [&str; 4] = ["--session", "s", "-n", "6"];

#[test]
fn a_model_that_reads_text_alone_refuses_images_and_takes_paths_as_text() {
    let place = Place::new();
    let mut term = Term::start(&place, &["--max-tokens", "2"]);
    term.line("/image a.png", "takes no images");
    term.line("/image drop", "there are 0 images");
    term.leave();
}

#[test]
fn a_script_cannot_delete_a_session_without_being_asked() {
    let place = Place::new();
    piped(&place, &SHORT, "hello\n").check(0, "");
    for command in ["/delete\n", "/delete s\n"] {
        piped(&place, &SHORT, command).check(2, "/delete: there is no terminal to ask on");
    }
    assert_eq!(questions(&place, "s"), ["hello"]);
}

#[test]
fn a_new_and_an_emptied_conversation_keep_the_files_for_the_next_message() {
    let place = Place::new();
    place.write("notes.txt", "some notes\n");
    let lines = "one\n/file notes.txt\n/reset\ntwo\n/file notes.txt\n/new\nthree\n";
    piped(&place, &SHORT, lines).check(0, "");
    let mut asked: Vec<_> = names(&place).iter().flat_map(|name| questions(&place, name)).collect();
    asked.retain(|text| text.starts_with("notes.txt:"));
    asked.sort();
    assert_eq!(asked, ["three", "two"].map(|text| format!("notes.txt:\n```\nsome notes\n```\n\n{text}")));
}

/// Tests of their names in chat/transcripts.txt.
macro_rules! transcripts {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            transcripts::play(stringify!($name));
        })*
    };
}

transcripts! {
    a_saved_conversation_whose_kv_is_gone_is_not_called_unknown
    a_conversation_is_saved_and_goes_on_warm
    help_and_typos
    turns_are_taken_back_answered_again_and_edited
    commands_during_an_edit_are_not_sent_and_do_not_end_it
    an_answer_that_was_cut_goes_on_as_if_it_had_not_been
    sessions_are_named_copied_switched_and_removed
    a_reset_asks_first_and_undo_brings_everything_back
    what_is_undone_retried_or_edited_stays_as_a_branch_and_comes_back
    settings_are_shown_and_changed
    tools_are_declared_and_listed
    a_tool_that_cannot_start_says_so
    tools_that_come_late_are_in_the_next_prompt
    another_model_goes_on_with_the_text
    a_model_that_is_missing_is_named_and_never_replaced
    a_loaded_session_brings_its_model_unless_one_was_named
    an_interrupted_answer_is_kept_and_marked
    interrupts_at_the_prompt_clear_the_line_and_two_leave
    fences_and_line_breaks_make_one_message
    an_editor_takes_the_line_and_gives_it_back
    a_message_that_fits_no_context_is_not_asked_about_and_stays_on_the_line
    a_conversation_far_beyond_a_smaller_context_can_drop_turns
    an_answer_that_never_ends_leaves_room_for_the_next_message
    an_answer_that_goes_round_in_circles_is_stopped_with_a_reason
    words_that_mean_to_leave_are_explained
    the_first_message_may_be_an_argument_and_a_file_may_be_quoted
    tab_completes_commands_and_sessions
    a_kill_loses_nothing_that_was_finished
    a_second_terminal_on_a_session_is_refused
    a_termination_puts_the_terminal_back
    colours_are_for_those_who_want_them
    an_opening_message_comes_from_a_file
    run_and_chat_share_a_session
    a_suspended_chat_goes_on
}

#[test]
fn looking_in_leaves_nothing_and_the_first_message_a_session_named_after_the_time() {
    let place = Place::new();
    Term::start(&place, &[]).leave();
    assert_eq!(names(&place), [""; 0]);
    let mut term = Term::start(&place, &["-n", "3"]);
    term.say("hi");
    term.leave();
    let names = names(&place);
    assert_eq!(names.len(), 1);
    assert!(names[0].starts_with("20") && names[0].len() == "2026-11-21-2124".len(), "{names:?}");
    piped(&place, &["--ephemeral", "-n", "3"], "hi\n").check(0, "not saved");
    assert_eq!(json(&place, &["sessions"])["sessions"].as_array().map(Vec::len), Some(1));
}

fn names_sorted(place: &Place) -> Vec<String> {
    let mut names = names(place);
    names.sort();
    names
}

#[test]
fn a_new_conversation_leaves_the_old_one_and_a_system_prompt_begins_anew() {
    let place = Place::new();
    let mut term = Term::start(&place, &SHORT);
    term.line("/system Be kind.", "the system prompt is set");
    term.say("one");
    term.line("/new", "new conversation; the system prompt stays; session s is kept, /load s returns to it");
    term.line("/show", "[system] Be kind.");
    term.say("two");
    assert_eq!(questions(&place, "s"), ["one"]);
    term.line("/clear", "is kept, /load 2");
    term.line("/load s", "session s: 1 turn");
    term.line("/system Be terse.", "session s is kept, /load s returns to it");
    term.say("three");
    term.line("/system", "Be terse.");
    term.leave();
    assert_eq!(questions(&place, "s"), ["one"]);
    assert_eq!(names(&place).len(), 3);
    let said: Vec<String> = names(&place).iter().flat_map(|name| questions(&place, name)).collect();
    assert!(["one", "two", "three"].iter().all(|text| said.contains(&(*text).to_owned())), "{said:?}");
    let refused = piped(&place, &["--session", "s", "--system", "Other"], "");
    refused.check(2, "was started with another system prompt");
}

#[test]
fn files_come_in_and_the_conversation_goes_out() {
    let place = Place::new();
    place.write("notes.md", "the notes\n");
    let mut term = Term::start(&place, &SHORT);
    term.line("/file nowhere.md", "nowhere.md");
    term.line("/file notes.md", "notes.md (");
    term.say("what is in it?");
    assert_eq!(questions(&place, "s"), ["notes.md:\n```\nthe notes\n```\n\nwhat is in it?"]);
    term.say("and now?");
    assert_eq!(questions(&place, "s")[1], "and now?", "a file goes with one message");
    term.line("/export md out.md", "wrote 2 turns to out.md");
    term.line("/export json out.json", "wrote 2 turns to");
    term.line("/export jsonl out.jsonl", "wrote 2 turns to");
    term.line("/export pdf out.pdf", "unknown format \"pdf\" (md, json, jsonl)");
    term.send("/export md out.md\r");
    term.expect("exists; replace it?");
    term.send("n\r");
    term.expect("nothing was written");
    term.prompt();
    term.send("/copy\r");
    term.expect("\x1b]52;c;");
    term.prompt();
    term.line("/copy code", "has no block of code");
    term.leave();
    assert!(place.read("out.md").contains("## You\n\nnotes.md:"), "{}", place.read("out.md"));
    let whole: Value = serde_json::from_str(&place.read("out.json")).expect("JSON");
    assert_eq!(whole, json_of_show(&place, "s"));
    assert_eq!(place.read("out.jsonl").lines().count(), 4);
}

fn json_of_show(place: &Place, session: &str) -> Value {
    let mut shown = json(place, &["sessions", "show", session]);
    let object = shown.as_object_mut().expect("an object");
    object.shift_remove("schema");
    object.shift_remove("branches"); // of the store, not of the conversation
    shown
}

#[test]
fn answers_are_held_to_a_schema() {
    let place = Place::new();
    place.write("schema.json", r#"{"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": false}"#);
    let model = model();
    let args = ["chat", "--model", &model, "--session", "j", "--temperature", "0"];
    let mut command = place.command(&args);
    command.env("NO_COLOR", "1");
    let mut term = Term::of(command, 100);
    term.line("/json nowhere.json", "nowhere.json");
    term.line("/json {not json", "not JSON");
    term.line("/json schema.json", "answers are JSON");
    term.say("a number?");
    term.line("/json", "schema.json");
    term.line("/json off", "answers are text");
    term.leave();
    let answer = turns(&place, "j")[0]["messages"][1]["content"].as_str().expect("a text").to_owned();
    assert_eq!(serde_json::from_str::<Value>(&answer).expect("JSON"), serde_json::json!({"n": 7}));
}

/// A chat with the model that says what it is told to.
fn scripted(place: &Place, more: &[&str]) -> Command {
    scripted::write(&place.path("model"));
    let mut command = place.command(&[&["chat", "--model", "model", "--session", "t"], more].concat());
    command.env("NO_COLOR", "1").env_remove("COLUMNS");
    command
}

/// As [`scripted`], with a context that takes minutes to fill: the engine does not wait for the terminal, and is not done before an
/// answer is stopped.
fn long(place: &Place, more: &[&str]) -> Command {
    let command = scripted(place, more);
    let config = place.path("model/config.json");
    let text = std::fs::read_to_string(&config).expect("the model's configuration");
    let long = text.replace("\"max_position_embeddings\":2048", "\"max_position_embeddings\":131072");
    assert_ne!(long, text);
    std::fs::write(&config, long).expect("a file");
    command
}

fn answers(place: &Place, session: &str) -> Vec<Value> {
    let turns = turns(place, session);
    turns
        .iter()
        .map(|turn| turn["messages"].as_array().and_then(|all| all.last()).expect("an answer").clone())
        .collect()
}

#[test]
fn a_tool_runs_when_the_user_agrees_and_its_result_is_answered() {
    let place = Place::new();
    place.write(
        "tools.toml",
        "[[tool]]\nname = \"now\"\ndescription = \"The time\"\nargv = [\"sh\", \"-c\", \"echo noon in $0; cat\", \"{zone}\"]\n\
         [tool.parameters]\nrequired = [\"zone\"]\nproperties = { zone = { enum = [\"UTC\"] } }\n",
    );
    let mut term = Term::of(scripted(&place, &["--tools", "tools.toml"]), 100);
    let asks = |term: &mut Term, answer: &str| {
        term.send("use the tool\r");
        term.expect("calls now {\"zone\": \"UTC\"}");
        term.expect("now wants to run: \"sh\" \"-c\" \"echo noon in $0; cat\" \"UTC\"");
        term.expect("run it?");
        term.send(&format!("{answer}\r"));
    };
    asks(&mut term, "n");
    term.expect(PLAIN);
    term.prompt();
    asks(&mut term, "y");
    term.expect("now returned ");
    term.expect(PLAIN);
    term.prompt();
    asks(&mut term, "a");
    term.expect(PLAIN);
    term.prompt();
    term.line("/tools", "runs without asking");
    term.send("use the tool\r");
    term.expect("now returned ");
    term.expect(PLAIN);
    term.prompt();
    term.line("/undo", "taken back: \u{201c}use the tool\u{201d}");
    term.leave();
    let turns = turns(&place, "t");
    assert_eq!(turns.len(), 6, "three questions, and three results");
    let result = |at: usize| turns[at]["messages"][0]["content"].as_str().expect("a result").to_owned();
    assert_eq!(result(1), "error: the user refused to run it");
    assert_eq!(result(3), "noon in UTC\n{\"zone\":\"UTC\"}");
    let call = &answers(&place, "t")[2]["tool_calls"][0]["function"];
    assert_eq!(call, &serde_json::json!({"name": "now", "arguments": "{\"zone\":\"UTC\"}"}));

    let alone = finish(scripted(&place, &["--tools", "tools.toml"]), "use the tool\n");
    alone.check(0, "not run: a tool runs only with your consent");
    assert_eq!(alone.stdout, format!("{PLAIN}\n"));
}

#[test]
fn another_models_answer_stands_beside_the_first_and_changes_nothing() {
    let place = Place::new();
    scripted::write(&place.path("other"));
    let mut term = Term::of(scripted(&place, &[]), 100);
    term.line("/compare", "/compare: expected a model");
    term.line("/compare other", "/compare: there is no answer yet");
    term.say("hello");
    let shown = term.line("/compare other", "(not part of the conversation");
    let row = shown.lines().find(|line| line.contains(PLAIN)).expect("a row");
    assert_eq!(row.matches(PLAIN).count(), 2, "side by side: {shown}");
    assert_eq!(table_row(&shown, "other")[..2], ["other", "other"], "{shown}");
    assert_eq!(table_row(&shown, "the answer")[2], "model", "{shown}");
    term.line("/compare nowhere/none", "nowhere/none");
    assert_eq!(turns(&place, "t").len(), 1);
    // Both stay loaded: changing to and fro loads nothing.
    term.line("/model other", "model other");
    std::fs::remove_dir_all(place.path("model")).expect("the first one's files");
    term.line("/model model", "model model");
    term.line("again", PLAIN);
    term.line("/compare other", "(not part of the conversation");
    term.leave();

    let ran = finish(scripted(&place, &[]), "code\n/compare other\n");
    assert_eq!(ran.check(0, "other:\n").stdout, format!("{CODE}\n{CODE}\n"));
    assert_eq!(table_row(&ran.stderr, "other")[1], "other", "{}", ran.stderr);
}

/// The words of the line that begins so.
fn table_row<'t>(shown: &'t str, start: &str) -> Vec<&'t str> {
    let row = shown.lines().rfind(|line| line.starts_with(start));
    row.unwrap_or_else(|| panic!("no {start:?}: {shown}")).split_whitespace().collect()
}

#[test]
fn variations_of_one_answer_share_its_prompt_and_change_nothing() {
    let place = Place::new();
    let lines = "hello, this is a message of more than one page of tokens, so that there is one to share\n\
                 /compare seed=3 temperature=1 | max-tokens=1 prompt=\"code please\" | system='Be brief.'\n\
                 /set\nmore\n";
    let ran = finish(scripted(&place, &["--seed", "5"]), lines);
    ran.check(0, "seed=3 temperature=1:\n");
    let begun = CODE.split("```").next().expect("text");
    assert!(ran.stdout.starts_with(&format!("{PLAIN}\n{PLAIN}\n{begun}")), "{ran:?}");
    let cached = |row: &str, at: usize| table_row(&ran.stderr, row)[at].parse::<usize>();
    assert!(cached("seed=3 temperature=1", 4).is_ok_and(|count| count >= 32), "{}", ran.stderr);
    assert_eq!(table_row(&ran.stderr, "max-tokens=1").last(), Some(&"length"), "{}", ran.stderr);
    assert_eq!(table_row(&ran.stderr, "seed ")[1], "5", "{}", ran.stderr);
    assert_eq!(turns(&place, "t").len(), 2);
    for (words, message) in [
        ("temprature=1", "/compare: unknown key \"temprature\""),
        ("temperature=9", "/compare temperature: 9 is not in [0, 2]"),
        ("think=maybe", "/compare think: unknown value \"maybe\""),
        ("seed=1 other model", "/compare: a second model in"),
        ("prompt=\"open", "/compare: a quote is not closed"),
    ] {
        let ran = finish(scripted(&place, &[]), &format!("hello\n/compare {words}\n"));
        assert!(ran.stderr.contains(message), "{words}: {}", ran.stderr);
    }
}

#[test]
fn the_tools_of_the_help_can_be_copied() {
    let place = Place::new();
    for columns in ["60", "80", "200"] {
        let mut help = place.command(&["chat", "--help"]);
        help.env("COLUMNS", columns);
        let shown = finish(help, "").stdout;
        let example: String = shown
            .lines()
            .skip_while(|line| line.trim() != "[[tool]]")
            .take_while(|line| !line.trim().is_empty())
            .map(|line| format!("{line}\n"))
            .collect();
        place.write("copied.toml", &example);
        piped(&place, &["--session", "t", "--tools", "copied.toml"], "/tools\n")
            .check(0, "weather  asks before");
    }
}

#[test]
fn tools_without_a_command_ask_for_their_result_and_run_takes_both_forms() {
    let place = Place::new();
    place.write(
        "tools.toml",
        "[[tool]]\nname = \"now\"\ndescription = \"d\"\nargv = [\"date\"]\n\
         [tool.parameters]\nrequired = [\"zone\"]\nproperties = { zone = { enum = [\"UTC\"] } }\n",
    );
    let parameters = serde_json::json!({"type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]});
    let function = serde_json::json!({"name": "now", "description": "d", "parameters": parameters});
    let tools = serde_json::json!([{"type": "function", "function": function}]).to_string();
    let mut term = Term::of(scripted(&place, &["--tools", &tools]), 100);
    term.line("/tools", "asks you for its result");
    term.send("use the tool\r");
    term.expect("now has no command; its result: ");
    term.send("noon\r");
    term.expect(PLAIN);
    term.prompt();
    term.leave();
    assert_eq!(turns(&place, "t")[1]["messages"][0]["content"], "noon");
    for tools in [&tools, "tools.toml"] {
        let ran =
            place.run(&["run", "--model", "model", "--tools", tools, "--output", "json", "use the tool"]);
        let written: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
        assert_eq!(written["tool_calls"][0]["function"]["name"], "now", "{written}");
    }
}

#[test]
fn thinking_is_shown_hidden_ended_and_turned_off() {
    let place = Place::new();
    let mut term = Term::of(scripted(&place, &[]), 100);
    let shown = term.say("think");
    assert!(shown.contains("w1 w2 ") && shown.contains(THOUGHT), "{shown:?}");
    term.line("/think hide", "hidden");
    let hidden = term.line("think", &format!("(thought for {NUM_THOUGHTS} tokens"));
    assert!(!hidden.contains("w2 ") && hidden.contains(THOUGHT), "{hidden:?}");
    term.line("/show thinking", &format!("w{NUM_THOUGHTS}"));
    term.line("/think budget 5", "at most 5 tokens");
    term.say("think");
    term.line("/think off", "thinking: off");
    term.line("think", PLAIN);
    term.leave();
    let answers = answers(&place, "t");
    let reasoning =
        |at: usize| answers[at]["reasoning_content"].as_str().unwrap_or_default().trim().to_owned();
    assert_eq!(reasoning(0).split(' ').count(), NUM_THOUGHTS);
    assert_eq!(reasoning(1), reasoning(0));
    assert_eq!(reasoning(2), "w1 w2 w3 w4 w5", "however far the engine has run ahead");
    assert_eq!(answers[2]["content"], PLAIN, "the answer goes on behind the end of the reasoning");
    assert_eq!((reasoning(3).as_str(), &answers[3]["content"]), ("", &PLAIN.into()));

    let piped = finish(scripted(&place, &["--think", "hide"]), "think\n");
    assert_eq!(piped.check(0, "").stdout, format!("{THOUGHT}\n"), "a pipe gets the answer alone");
}

#[test]
fn markdown_and_code_are_coloured_and_copied_as_they_are() {
    let place = Place::new();
    let mut colored = scripted(&place, &[]);
    colored.env_remove("NO_COLOR");
    let mut term = Term::of(colored, 40);
    let shown = term.line("show code", "\u{65e5}\u{672c}.");
    for styled in ["\x1b[2m```rust", "\x1b[35mfn", "\x1b[34mmain", "\x1b[1m**all**\x1b[0m"] {
        assert!(shown.contains(styled), "{styled:?} is not in {shown:?}");
    }
    term.send("/copy code\r");
    term.expect("\x1b]52;c;Zm4gbWFpbigpIHt9Cg==\x07");
    term.prompt();
    term.leave();
    let mut plain = Term::of(scripted(&place, &["--plain", "--color", "always"]), 40);
    let shown = plain.line("show code", "\u{65e5}\u{672c}.");
    assert!(shown.contains(&CODE.replace('\n', "\r\n")), "{shown:?}");
    plain.leave();
}

#[test]
fn a_session_goes_on_with_its_own_model_unless_another_is_named() {
    let place = Place::new();
    let (own, other) = (model(), model().replace("qwen3", "llama"));
    let chat = |more: &[&str], stdin: &str| {
        let mut command = place.command(&[&["chat", "-n", "3", "--temperature", "0"], more].concat());
        command.env("NO_COLOR", "1");
        finish(command, stdin)
    };
    chat(&["--model", &own, "--session", "lit"], "hello\n").check(0, "qwen3");
    let models = || -> Vec<Value> { turns(&place, "lit").iter().map(|turn| turn["model"].clone()).collect() };
    let continued = chat(&["-c"], "and now\n");
    continued.check(0, "qwen3");
    assert!(
        !continued.stderr.contains("guide") && !continued.stderr.contains("was started with"),
        "{continued:?}"
    );
    chat(&["--session", "lit"], "again\n").check(0, "session lit, 2 turns");
    place
        .run(&["run", "-n", "3", "--session", "lit", "by run"])
        .check(0, "continuing session lit (3 turns, ");
    std::fs::create_dir(place.path(".local/share/llmctl/sessions/torn")).expect("a folder");
    place.write(".local/share/llmctl/sessions/torn/transcript.jsonl", "damaged\n");
    // Times of files are coarser than the clock.
    let torn =
        File::options().write(true).open(place.path(".local/share/llmctl/sessions/torn/transcript.jsonl"));
    let later = std::time::SystemTime::now() + Duration::from_secs(60);
    torn.expect("a file").set_modified(later).expect("a time");
    let torn = chat(&["-c"], "to whom?\n");
    torn.check(65, "session torn is newer than others and cannot be read").check(65, "--session NAME");
    place.run(&["sessions", "remove", "torn", "--yes"]).check(0, "");
    place.write("llmctl.toml", format!("model = \"{other}\"\n"));
    chat(&["-c"], "a configuration is for new sessions\n").check(0, "qwen3");
    chat(&["--session", "new"], "hi\n").check(0, "llama");
    assert_eq!(models(), ["qwen3"; 5]);
    chat(&["--session", "lit", "--model", &other], "named\n")
        .check(0, "this session was started with qwen3; the text is kept");
    let mut variable = place.command(&["chat", "-n", "3", "--session", "lit"]);
    variable.env("LLMCTL_MODEL", &own);
    finish(variable, "by a variable\n").check(0, "qwen3");
    assert_eq!(models()[5..], ["llama", "qwen3"]);
}

#[test]
fn a_full_context_is_asked_about_and_nothing_is_dropped_silently() {
    let place = Place::new();
    let long = "word ".repeat(60);
    let model = model();
    let flags = words("--session f --temperature 0 --ignore-eos -n 8 --ctx 1024");
    let args = [&["chat", "--model", &model], &flags[..]].concat();
    let mut fill = place.command(&args);
    fill.env("NO_COLOR", "1");
    let text: String = (1..=20).map(|n| format!("{n}: {long}\n")).collect();
    let full = finish(fill, &text);
    full.check(65, "of the context is used").check(65, "start over with /new");
    let before = questions(&place, "f");
    assert!(before.len() > 2, "{full:?}");

    let mut command = place.command(&args);
    command.env("NO_COLOR", "1");
    let mut term = Term::open(command, 100);
    term.expect("/1,024 > ");
    term.send(&format!("{long}\r"));
    term.expect("The context is full");
    term.expect("drop the oldest");
    term.expect("1: word");
    term.expect("d, c or s?");
    term.send("s\r");
    term.expect("(not sent");
    term.expect("/1,024 > word word");
    assert_eq!(questions(&place, "f"), before);
    term.send("\r"); // the message is on the line again
    term.expect("d, c or s?");
    term.send("d\r");
    term.expect("the whole conversation is kept as session f-whole");
    term.expect("/1,024 > ");
    let after = questions(&place, "f");
    assert!(before.contains(&after[0]) && after[0] != before[0], "{after:?}");
    assert_eq!(questions(&place, "f-whole"), before);

    term.send("/compact\r");
    term.expect(" became a summary of ");
    term.expect("/1,024 > ");
    let compacted = questions(&place, "f");
    assert_eq!(compacted[0], "Summarise our conversation so far.");
    assert_eq!(compacted.last(), after.last());
    assert_eq!(questions(&place, "f-whole-2").len(), after.len());
    term.leave();
}

/// In the middle of an answer that does not end by itself, and that nothing ends however slow this machine is.
fn endless(place: &Place) -> Term {
    let command = long(place, &["--loop-guard", "off", "--ignore-eos"]);
    let mut term = Term::open(command, 100);
    term.expect("/131,072 > ");
    term.send("endless\r");
    term.expect(ENDLESS.trim_end());
    term
}

#[test]
fn what_is_typed_during_an_answer_waits_unsent_and_never_stands_before_ctrl_c() {
    let place = Place::new();
    let mut term = endless(&place);
    let long = "x".repeat(5_000); // more than the system's buffer of typed keys
    term.send(&format!(
        "FIRST\rSECOND \u{65e5}\u{672c}\x7f\u{8a9e}\r{long}\r\x1b[200~a\rpaste\x1b[201~\r\x03"
    ));
    term.expect("(stopped; the answer so far is kept, /continue resumes it)");
    term.expect("/131,072 > FIRST");
    assert_eq!(questions(&place, "t"), ["endless"]);
    term.send(" and more\r");
    term.expect(PLAIN);
    term.send("\x03"); // this one does not end by itself, either
    term.expect("(stopped");
    term.expect("/131,072 > ");
    term.leave();
    let typed = format!("FIRST\nSECOND \u{65e5}\u{8a9e}\n{long}\na\npaste and more");
    assert_eq!(questions(&place, "t"), ["endless", &typed]);
}

#[test]
fn a_closed_terminal_keeps_the_answer_so_far() {
    let place = Place::new();
    let mut term = endless(&place);
    term.signal(Signal::HUP);
    term.ended(129);
    assert_eq!(turns(&place, "t")[0]["finish_reason"], "cancelled");
}

#[test]
fn a_signal_ends_a_chat_that_asks() {
    let place = Place::new();
    let mut term = Term::start(&place, &SHORT);
    term.say("hello");
    term.send("/reset\r");
    term.expect("y(es), n(o): ");
    term.signal(Signal::TERM);
    term.ended(143);
    assert_eq!(questions(&place, "s"), ["hello"]);
}

#[test]
fn an_interrupt_while_the_prompt_is_computed_leaves_the_chat_as_it_was() {
    let place = Place::new();
    let mut term = Term::start(&place, &["--session", "p"]);
    place.write("long.txt", "word ".repeat(500));
    term.line("/file long.txt", "goes with the next message");
    term.send("go\r");
    term.expect("\r\n");
    // The line editor has given the terminal back: from here on it is a signal, which finds a prompt that is being computed,
    // or an answer; in either case it ends that and nothing else.
    term.signal(Signal::INT);
    term.expect("(stopped");
    term.prompt();
    term.send("\x03"); // a message that was not sent is on the line
    term.prompt();
    let before = turns(&place, "p").len();
    term.line("/set max-tokens 2", "max-tokens: 2");
    term.say("hi");
    assert_eq!(turns(&place, "p").len(), before + 1, "{}", term.seen);
    term.leave();
}

#[test]
fn a_paste_of_200_lines_is_one_message() {
    let place = Place::new();
    let mut term = Term::start(&place, &SHORT);
    let pasted: Vec<String> = (1..=200).map(|n| format!("l{n}")).collect();
    term.send(&format!("\x1b[200~{}\x1b[201~", pasted.join("\r")));
    term.expect("l200");
    term.send("\r");
    term.expect("(cut at max-tokens");
    term.prompt();
    term.leave();
    assert_eq!(questions(&place, "s"), [pasted.join("\n")]);
}

#[test]
fn history_is_private_and_found_again() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let mut term = Term::start(&place, &SHORT);
    term.say("remember the harbour");
    term.line(" not this one", "");
    term.leave();
    let path = place.path(".local/state/llmctl/history");
    let mut term = Term::start(&place, &["--ephemeral", "-n", "3"]);
    term.say("a SECRET");
    term.line("/save kept", "kept");
    term.say("a second SECRET");
    term.leave();
    let mode = std::fs::metadata(&path).expect("a history").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let text = std::fs::read_to_string(&path).expect("a history");
    assert!(text.contains("remember the harbour"), "{text}");
    assert!(!text.contains("not this one") && !text.contains("SECRET"), "{text}");
    let mut term = Term::start(&place, &SHORT);
    term.send("\x12harb");
    term.expect("remember the harbour");
    term.send("\r");
    term.expect("(cut at max-tokens");
    term.prompt();
    term.leave();
    assert_eq!(questions(&place, "s").last().map(String::as_str), Some("remember the harbour"));
}

#[test]
fn long_entries_stay_out_of_the_history_file_and_a_link_is_not_followed() {
    let place = Place::new();
    let mut term = Term::start(&place, &SHORT);
    let long = "x".repeat(40_000);
    term.send(&format!("\x1b[200~{long}\x1b[201~"));
    term.send("\r");
    term.expect("in the history of this chat, not in the history file)");
    term.expect("the message needs at least ");
    term.prompt();
    term.say("short");
    term.leave();
    let path = place.path(".local/state/llmctl/history");
    let text = std::fs::read_to_string(&path).expect("a history");
    assert!(text.contains("short") && !text.contains("xxxx"), "{} bytes", text.len());

    std::fs::remove_file(&path).expect("removed");
    place.write("elsewhere", "");
    std::os::unix::fs::symlink(place.path("elsewhere"), &path).expect("a link");
    let mut term = Term::start(&place, &SHORT);
    assert!(term.seen.contains("is a symbolic link; no history is kept"), "{}", term.seen);
    term.say("not written");
    term.leave();
    assert_eq!(place.read("elsewhere"), "");
}

#[test]
fn what_is_not_utf_8_does_not_end_the_chat() {
    let place = Place::new();
    let mut term = Term::start(&place, &["--ephemeral", "-n", "4"]);
    term.say("one");
    term.send("kept ");
    term.expect("kept");
    term.session.send(&b"\x1b[200~bad \xff\xfe bytes\x1b[201~"[..]).expect("the terminal takes it");
    term.expect("is not UTF-8 text and was left out; the line before it is kept");
    term.expect("> kept ");
    term.send("line\r");
    term.expect("(cut at max-tokens");
    term.prompt();
    term.line("/show", "[user] kept line");
    term.leave();
}

#[test]
fn a_resize_draws_the_typed_line_from_where_it_began() {
    let place = Place::new();
    let mut term = Term::start(&place, &SHORT);
    term.send(&format!("{}END", "x".repeat(147)));
    term.expect("END");
    term.session.get_process().set_size(60, 30);
    // 10 of the prompt and 150 typed: two lines of 100 columns, three of 60, so it began one line higher than before.
    term.expect("\x1b[1A\r\x1b[J");
    term.prompt(); // drawn again; what is typed behind an interrupt that is not seen yet would be lost
    term.send("\x03");
    term.prompt();
    term.leave();
}

#[test]
fn a_place_that_cannot_be_written_is_said_before_the_greeting() {
    let place = Place::new();
    place.write("file", "");
    let with = |name: &str, value: &str, more: &[&str]| {
        let mut command = command(&place, more);
        command.env(name, value);
        finish(command, "hi\n")
    };
    let refused = with("XDG_DATA_HOME", &place.path("file").display().to_string(), &["-n", "3"]);
    refused.check(74, "sessions cannot be saved").check(74, "use --ephemeral");
    assert!(refused.stdout.is_empty() && !refused.stderr.contains("context 2,048"), "{refused:?}");
    let data = place.path("file").display().to_string();
    with("XDG_DATA_HOME", &data, &["-n", "3", "--ephemeral"]).check(0, "not saved");
    let mut homeless = command(&place, &["-n", "3"]);
    homeless.env_remove("HOME").env_remove("XDG_DATA_HOME");
    finish(homeless, "hi\n").check(78, "or use --ephemeral");
}

#[test]
fn a_narrow_terminal_shows_what_the_model_wrote() {
    let place = Place::new();
    let mut term = Term::of(command(&place, &["--session", "n", "-n", "120"]), 40);
    let shown = term.line("Tell me a very long story", "");
    term.leave();
    let turn = turns(&place, "n").remove(0);
    let answer = turn["messages"][1]["content"].as_str().expect("a text").to_owned();
    assert_shows(&shown, &answer);
}

/// The answer is on the screen, with line breaks for blanks at most.
fn assert_shows(shown: &str, answer: &str) {
    let letters = |text: &str| text.chars().filter(|c| !c.is_whitespace()).collect::<String>();
    assert!(letters(shown).contains(&letters(&visible(answer))), "{answer:?} is not in {shown:?}");
}

#[test]
fn words_stay_whole_on_a_terminal_and_a_pipe_gets_the_text_as_it_is() {
    let place = Place::new();
    let check = |shown: &str, columns: u16| {
        let text = ENDLESS.trim_end();
        assert!(!shown.contains(text), "it is longer than a line: {shown:?}");
        let start = shown.find("on and on").expect("the answer");
        let lines: Vec<&str> = shown[start..]
            .lines()
            .take_while(|line| line.starts_with("on ") || line.starts_with("and "))
            .collect();
        assert!(lines.len() > 1 && lines.iter().all(|line| line.len() <= usize::from(columns)), "{lines:?}");
        assert_eq!(lines.join(" "), text, "broken between words, and nowhere else");
    };
    let alone = |args: &[&str], columns| {
        let mut command = place.command(args);
        command.env("NO_COLOR", "1").env_remove("COLUMNS");
        Term::open(command, columns)
    };
    for columns in [40, 80] {
        let mut term = Term::of(scripted(&place, &["-n", "1"]), columns);
        check(&term.line("endless", "(cut at max-tokens"), columns);
        term.leave();
        check(&alone(&["run", "--model", "model", "-n", "1", "endless"], columns).end(), columns);
        let mut first = alone(&[], columns);
        let shown = first.ended(2);
        assert!(shown.lines().all(|line| line.len() <= usize::from(columns)), "{shown:?}");
        assert!(shown.contains("http://127.0.0.1:8484"), "{shown:?}");
    }
    assert!(alone(&["man"], 80).ended(2).contains("llmctl man | man -l -"));
    let mut plain = Term::of(scripted(&place, &["-n", "1", "--plain"]), 40);
    assert!(plain.line("endless", "(cut at max-tokens").contains(ENDLESS.trim_end()));
    plain.leave();
    let piped = finish(scripted(&place, &["-n", "1"]), "endless\n");
    assert_eq!(piped.check(0, "").stdout, ENDLESS);
}

#[test]
fn notices_and_tables_fit_a_narrow_terminal() {
    let place = Place::new();
    let mut term = Term::of(command(&place, &["--session", "a-session-with-a-long-name", "-n", "2"]), 40);
    term.say("hi");
    let shown = term.line("/sessions", "model qwen3");
    let help = term.line("/help edit", "branch");
    term.leave();
    for line in shown.lines().chain(help.lines()).filter(|line| !line.contains('\x1b')) {
        assert!(line.chars().count() <= 40, "{line:?}");
    }
    assert!(shown.contains("a-session-with-a-long-name\r\n    turns 1 \u{b7} "), "{shown:?}");
}

/// As a terminal gets it.
fn visible(text: &str) -> String {
    let symbol = |c: char| match c {
        '\n' | '\t' => c,
        '\x7f' => '\u{2421}',
        _ if c < ' ' => char::from_u32(c as u32 + 0x2400).expect("a symbol"),
        _ if c.is_control() => char::REPLACEMENT_CHARACTER,
        _ => c,
    };
    text.chars().map(symbol).collect()
}

#[test]
fn a_resize_in_the_middle_of_an_answer_changes_nothing_of_it() {
    let place = Place::new();
    let mut term = Term::start(&place, &["--session", "r", "-n", "400"]);
    term.send("Count\r");
    term.expect("\r\n");
    for columns in [60, 33, 120] {
        term.session.get_process().set_size(columns, 20);
        std::thread::sleep(Duration::from_millis(20));
    }
    let shown = term.prompt().replace("\r\n", "\n");
    term.leave();
    let turn = turns(&place, "r").remove(0);
    let answer = turn["messages"][1]["content"].as_str().expect("a text").to_owned();
    assert_shows(&shown, &answer);
}

#[test]
fn a_pipe_gets_answers_and_nothing_else() {
    let place = Place::new();
    let first = piped(&place, &["--session", "a", "-n", "8"], "One\n\n/stats\nTwo\n/exit\nnever said\n");
    first.check(0, "decode       8 tokens");
    assert_eq!(questions(&place, "a"), ["One", "Two"]);
    let answers: Vec<String> = turns(&place, "a")
        .iter()
        .map(|turn| turn["messages"][1]["content"].as_str().expect("a text").to_owned())
        .collect();
    let expected: String = answers
        .iter()
        .map(|answer| format!("{answer}{}", if answer.ends_with('\n') { "" } else { "\n" }))
        .collect();
    assert_eq!(first.stdout, expected);
    let fenced = piped(&place, &["--session", "b", "-n", "3"], "```\nx\n\ny\n```\n\"\"\"\nq\n\"\"\"\n");
    fenced.check(0, "");
    assert_eq!(questions(&place, "b"), ["```\nx\n\ny\n```", "q"]);
    piped(&place, &[], "").check(0, "");
    piped(&place, &["--session", "e"], "/nothing\nhi\n").check(2, "unknown command /nothing");
    piped(&place, &["-c", "--session", "a"], "").check(2, "cannot be used with");
    let nowhere = Place::new();
    piped(&nowhere, &["-c"], "").check(66, "there is no session to continue");
}

#[test]
fn a_reader_that_leaves_ends_the_chat_quietly() {
    let place = Place::new();
    let mut command = command(&place, &["--session", "q", "--prompt-file", "open.txt"]);
    place.write("open.txt", "hi");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("llmctl starts");
    drop(child.stdout.take());
    assert_eq!(child.wait().expect("an end").code(), Some(0));
}

#[test]
fn help_of_the_subcommand_is_as_written() {
    insta::assert_snapshot!("help_chat_short", crate::cli::llmctl(&["chat", "-h"]).check(0, "").stdout);
    insta::assert_snapshot!("help_chat", crate::cli::llmctl(&["chat", "--help"]).check(0, "").stdout);
}
