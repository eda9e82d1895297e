//! The first minutes after an installation: a quiet stderr, examples that work, errors that name the source of a value, and
//! help for names that other tools use.

use super::{llmctl, stories};
use crate::common::prelude::*;

const GUIDE: &str =
    "using guide, the built-in demo model (knows only llmctl). Use your own with --model FILE.gguf\n";

/// An answer as the JSON of `run`.
fn json(ran: &Ran) -> Value {
    serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {ran:?}"))
}

#[test]
fn one_line_says_that_guide_answers_and_the_rest_needs_v() {
    let ran = llmctl(&["run", "hello"]);
    assert_eq!(ran.check(0, "").stderr, GUIDE);
    assert_eq!(llmctl(&["run", "-q", "hello"]).check(0, "").stderr, "");
    assert_eq!(llmctl(&["run", "-m", "guide", "hello"]).check(0, "").stderr, "");
    let Some(model) = stories() else { return };
    let args = ["run", "-m", &model, "--raw", "Once", "-n", "4", "--temperature", "1"];
    assert_eq!(llmctl(&args).check(0, "").stderr, "(the answer was cut at --max-tokens)\n");
    let said = llmctl(&[&["-v"], &args[..]].concat());
    said.check(0, "stop tokens: 1, 2 (generation_config.json)\n").check(0, "seed ");
}

#[test]
fn quiet_hides_notices_and_no_warning() {
    let ran = llmctl(&["run", "-q", "-m", "guide", "--regex", "[a-z]{3}", "hello"]);
    ran.check(0, "warning: guide, the built-in model, knows only llmctl: its answer keeps to --regex");
}

#[test]
fn guide_refuses_a_stored_prompt_and_shows_what_it_would_be() {
    let place = Place::new();
    let with_input = |args: &[&str]| finish(place.command(args), "a text to sum up\n");
    let refused = with_input(&["run", "--prompt", "summarize"]);
    refused.check(2, "--prompt summarize needs another model: guide, the built-in one, knows only llmctl");
    assert_eq!(refused.stdout, "");
    with_input(&["run", "-m", "guide", "--prompt", "summarize"]).check(2, "needs another model");
    let shown = with_input(&["run", "--prompt", "summarize", "--dry-run"]);
    assert!(shown.check(0, "").stdout.contains("a text to sum up"), "{shown:?}");
    let Some(model) = stories() else { return };
    with_input(&["run", "-m", &model, "--prompt", "summarize", "-n", "1"]).check(0, "no chat template");
}

#[test]
fn guide_ends_an_answer_that_does_not_end() {
    // Any number matches, of any length.
    let args = ["run", "--regex", "[0-9]+", "--output", "json", "How old is the sun?"];
    let place = Place::new();
    let ran = place.run(&args);
    ran.check(3, "the answer was cut").check(3, "before it satisfied --regex");
    let answer = json(&ran);
    let tokens = answer["usage"]["completion_tokens"].as_u64().expect("a number");
    assert!(tokens <= 400, "{answer}");
    assert_eq!((&answer["finish_reason"], &answer["finish"]["by"]), (&"length".into(), &"max_tokens".into()));
    // Who names a number gets it.
    let ran = place.run(&[&args[..], &["--max-tokens", "100"]].concat());
    assert_eq!(json(ran.check(3, ""))["usage"]["completion_tokens"], 100);
    let ran = place.run(&[&args[..], &["--max-tokens", "-1", "--ctx", "256"]].concat());
    assert_eq!(json(ran.check(3, ""))["finish"]["by"], "context_full");
}

#[test]
fn a_prompt_that_looks_like_a_model_is_pointed_out() {
    let said = |words: &[&str]| llmctl(&[&["run", "--dry-run"], words].concat()).check(0, "").stderr.clone();
    let hint = "looks like a model, and is taken as part of the prompt";
    for model in ["llama3.2:1b", "qwen3", "gemma-3", "org/repo:Q4_K_M", "./model.gguf", "mistral:latest"] {
        assert!(said(&[model, "hi"]).contains(hint), "{model}");
    }
    for text in ["hello", "why", "note:", "12:30", "llama", "What is qwen3?", "a/b"] {
        assert!(!said(&[text, "hi"]).contains(hint), "{text}");
    }
    assert!(!said(&["-m", "guide", "llama3.2:1b"]).contains(hint));
}

#[test]
fn a_wrong_value_is_reported_where_it_is() {
    let place = Place::new();
    let with = |name: &str, value: &str| {
        let mut command = place.command(&["run", "--model", "/no/such/model", "hi"]);
        command.env(name, value);
        finish(command, "")
    };
    with("LLMCTL_TEMPERATURE", "hot").check(2, "error: LLMCTL_TEMPERATURE: \"hot\" is not a number\n");
    with("LLMCTL_TEMPERATURE", "9").check(2, "error: LLMCTL_TEMPERATURE: 9 is not in [0, 2]\n");
    with("LLMCTL_STATS", "perhaps").check(2, "error: LLMCTL_STATS: \"perhaps\" is neither true nor false\n");
    with("LLMCTL_OUTPUT", "yaml")
        .check(2, "error: LLMCTL_OUTPUT: unknown value \"yaml\" (text, json, jsonl)\n");
    with("LLMCTL_MODLE", "x")
        .check(66, "warning: LLMCTL_MODLE is not a variable of llmctl; did you mean LLMCTL_MODEL?");
    place.write("llmctl.toml", "# mine\n[run]\ntemperature = 9\n");
    let args = ["run", "--model", "/no/such/model", "hi"];
    let mut command = place.command(&args);
    command.env_remove("LLMCTL_TEMPERATURE"); // which counts before the file
    finish(command, "").check(78, "error: llmctl.toml:3: temperature: 9 is not in [0, 2]\n");
    place.run(&[&args[..], &["--temperature", "1"]].concat()).check(66, "/no/such/model");
    place
        .run(&[&args[..], &["--temperature", "8"]].concat())
        .check(2, "error: --temperature: 8 is not in [0, 2]\n");
    place.write("llmctl.toml", "seed = -1\n");
    place.run(&args).check(78, "llmctl.toml:1:8: seed: -1 is negative");
}

#[test]
fn doctor_names_unknown_variables_and_folders_that_take_nothing() {
    let place = Place::new();
    let mut command = place.command(&["doctor"]);
    command.env("LLMCTL_MODLE", "x").env("XDG_DATA_HOME", place.write("file", ""));
    let ran = finish(command, "");
    ran.check(0, "");
    assert!(ran.stdout.contains("warning: config variables: LLMCTL_MODLE is not a variable"), "{ran:?}");
    assert!(
        ran.stdout.contains("warning: folders data: ~/file/llmctl/sessions: sessions cannot be saved: "),
        "{ran:?}"
    );
    assert!(!ran.stderr.contains("MODLE"), "said once: {ran:?}");
    assert!(ran.stdout.contains("sessions are saved in plain text (--encrypt)"), "{ran:?}");
    for (keys, is_inside) in [("keys", false), (".local/share/llmctl/keys", true)] {
        let told = place.run(&["doctor", "--encrypt", &place.path(keys).display().to_string()]);
        let warning =
            format!("warning: folders keys: ~/{keys} lies in the data folder: a copy of the sessions has");
        assert_eq!(told.check(0, "").stdout.contains(&warning), is_inside, "{told:?}");
    }
}

#[test]
fn a_session_that_cannot_be_saved_is_refused_before_the_model_is_loaded() {
    let place = Place::new();
    let mut command = place.command(&["run", "-m", "/no/such/model", "--session", "s", "hi"]);
    command.env("XDG_DATA_HOME", place.write("file", ""));
    finish(command, "").check(74, "error: ~/file/llmctl/sessions: sessions cannot be saved: ");
    let mut command = place.command(&["run", "-m", "/no/such/model", "--session", "s", "hi"]);
    command.env_remove("HOME");
    finish(command, "").check(78, "HOME and XDG_DATA_HOME are not set");
}

#[test]
fn files_without_end_are_refused_and_pipes_are_read() {
    let endless = |args: &[&str]| llmctl(&[&["run", "-m", "/no/such/model"], args, &["hi"]].concat());
    if cfg!(target_os = "linux") {
        endless(&["--config", "/dev/zero"])
            .check(78, "/dev/zero: more than 1 MiB is not a configuration file");
        endless(&["--schema", "/dev/zero"]).check(65, "/dev/zero: more than 64 MiB of text");
    }
    #[cfg(unix)]
    {
        let place = Place::new();
        let mut shell = Command::new("bash");
        let llmctl = env!("CARGO_BIN_EXE_llmctl");
        let script = format!("{llmctl} --config <(echo 'temperature = 9') run -m guide hi");
        shell.args(["-c", &script]).current_dir(place.folder.path()).env("HOME", place.folder.path());
        let output = shell.output().expect("bash");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(":1: temperature: 9 is not in [0, 2]"), "{said}");
    }
}

#[cfg(unix)]
#[test]
fn a_closed_stdout_is_an_error() {
    let place = Place::new();
    for args in ["run -q hello", "models", "run -q -m guide --output json hi"] {
        let script = format!("{} {args} >&-", env!("CARGO_BIN_EXE_llmctl"));
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).current_dir(place.folder.path()).env("HOME", place.folder.path());
        let output = shell.stdin(Stdio::null()).output().expect("sh");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(74), "{args}: {said}");
        assert!(said.contains("writing to standard output: it is closed"), "{args}: {said}");
    }
    let null = File::options().read(true).write(true).open("/dev/null").expect("/dev/null");
    let status = place.command(&["run", "-q", "hello"]).stdout(null).status().expect("runs");
    assert_eq!(status.code(), Some(0), "who wants no answer gets none");
}

#[cfg(unix)]
#[test]
fn the_rest_of_a_list_that_a_loop_reads_is_pointed_out() {
    let place = Place::new();
    place.write("list", "one\ntwo\nthree\n");
    let run = |script: &str| {
        let script = script.replace("llmctl", env!("CARGO_BIN_EXE_llmctl"));
        let mut shell = Command::new("bash");
        shell.args(["-c", &script]).current_dir(place.folder.path()).env("HOME", place.folder.path());
        String::from_utf8_lossy(&shell.output().expect("bash").stderr).into_owned()
    };
    let hint = "the rest of the file on stdin (2 lines) became part of the prompt";
    let said = run("while read x; do llmctl run --dry-run \"say $x\"; done < list");
    assert_eq!(said.matches(hint).count(), 1, "{said}");
    let said = run("while read x; do llmctl run --no-stdin --dry-run \"say $x\"; done < list");
    assert!(!said.contains("became part"), "{said}");
    assert!(!run("llmctl run --dry-run hi < list").contains("became part"), "a whole file is meant");
}

#[test]
fn a_dash_is_stdin_and_f_is_a_file() {
    let place = Place::new();
    place.write("ask.txt", "from a file\n");
    let dry = |args: &[&str]| finish(place.command(&[&["run", "--dry-run"], args].concat()), "from stdin\n");
    let shown = dry(&["-"]);
    assert!(shown.check(0, "").stdout.contains("from stdin") && !shown.stdout.contains('-'), "{shown:?}");
    assert!(dry(&["-f", "ask.txt"]).check(0, "").stdout.contains("from a file"));
    dry(&["-", "--no-stdin"]).check(2, "the prompt - reads stdin, and --no-stdin forbids it");
}

/// Whether the program of util-linux is there that starts another with fewer capabilities.
#[cfg(unix)]
fn has_setpriv() -> bool {
    Command::new("setpriv").arg("--version").output().is_ok_and(|ran| ran.status.success())
}

#[cfg(unix)]
impl Place {
    /// Returns a command of root's that may read only what the mode of a file allows.
    fn without_rights_of_root(&self, args: &[&str]) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-dac_override,-dac_read_search", env!("CARGO_BIN_EXE_llmctl")]);
        command.args(args).current_dir(self.folder.path()).env("HOME", self.folder.path());
        command.stdin(Stdio::null());
        command
    }
}

#[cfg(unix)]
#[test]
fn what_may_not_be_read_is_told_from_what_is_not_there() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let denied = place.write("denied.txt", "x");
    std::fs::set_permissions(&denied, std::fs::Permissions::from_mode(0o000)).expect("chmod");
    // Root reads everything, unless it gives that right up.
    let is_root = std::fs::read(&denied).is_ok();
    let as_user = |args: &[&str]| match is_root {
        false => place.run(args),
        true => finish(place.without_rights_of_root(args), ""),
    };
    if is_root && !has_setpriv() {
        crate::common::skip("as root, and without setpriv, no file is unreadable");
    } else {
        as_user(&["run", "-f", "denied.txt", "hi"]).check(77, "error: denied.txt: permission denied\n");
        as_user(&["run", "-m", "./denied.txt", "hi"]).check(77, "error: ./denied.txt: permission denied\n");
    }
    place.run(&["run", "-f", "gone.txt", "hi"]).check(66, "error: gone.txt: no such file or directory\n");
    place
        .run(&["run", "-m", "./gone.gguf", "hi"])
        .check(66, "error: ./gone.gguf: no such file or directory\n");
}

#[test]
fn models_that_are_not_there_come_with_the_way_to_get_them() {
    llmctl(&["run", "-m", "org/repo:Q4_K_M", "hi"])
        .check(66, "error: model \"org/repo:Q4_K_M\" not found\n")
        .check(66, "HF_HUB_OFFLINE forbids downloading it");
    llmctl(&["run", "--offline", "-m", "org/repo", "hi"]).check(66, "--offline forbids downloading it");
    llmctl(&["run", "-m", "llama3", "hi"]).check(66, "'llmctl pull ORG/REPO' downloads a model");
    for slip in ["Guide", "guid"] {
        llmctl(&["run", "-m", slip, "hi"]).check(66, "did you mean guide?");
    }
    assert_eq!(llmctl(&["models", "list"]).check(0, "").stdout, llmctl(&["models"]).stdout);
    let place = Place::new();
    let mut command = place.command(&["models"]);
    command.env_remove("HOME");
    assert!(finish(command, "").stdout.contains("no models found (HOME is not set"));
    std::fs::create_dir(place.path("lora")).expect("a folder");
    place.write("lora/adapter_config.json", "{}");
    place.run(&["run", "-m", "./lora", "hi"]).check(65, "is a LoRA adapter");
}

#[test]
fn what_is_set_is_shown_and_the_rest_is_there_for_who_asks() {
    let place = Place::new();
    let shown = || {
        let mut command = place.command(&["config", "show"]);
        command.env_remove("LLMCTL_CPU"); // set where the suite runs on one instruction set
        command.env_remove("LLMCTL_TEMPERATURE");
        finish(command, "").check(0, "").stdout.clone()
    };
    assert!(shown().starts_with("# nothing is set"));
    place.write("llmctl.toml", "seed = 7\n");
    assert_eq!(shown().trim(), "seed = 7");
    let all = place.run(&["config", "show", "--all", "--origin"]);
    assert!(all.check(0, "").stdout.lines().count() > 100, "{all:?}");
}

#[test]
fn results_of_a_benchmark_are_told_from_notes_and_servers_by_address() {
    let place = Place::new();
    place.write("note.txt", "hello");
    let refused = place.run(&["bench", "compare", "note.txt", "note.txt"]);
    refused.check(65, "note.txt: not a result of `llmctl bench`");
    let refused = place.run(&["bench", "serve", "--endpoint", "http://127.0.0.1:9"]);
    refused.check(69, "cannot connect to http://127.0.0.1:9/v1: connection refused\n");
}

#[test]
fn a_grammar_of_llama_cpp_is_kept_to_and_one_that_is_wrong_is_explained() {
    let place = Place::new();
    place.write("a.gbnf", "root ::= \"yes\" | \"no\"\n");
    let answer = place.run(&["run", "-m", "guide", "--grammar", "a.gbnf", "hi"]).check(0, "").stdout.clone();
    assert!(["yes\n", "no\n"].contains(&answer.as_str()), "{answer:?}");
    place.write("b.gbnf", "root ::= \"yes\" |\n  [0-\n");
    let refused = place.run(&["run", "-m", "guide", "--grammar", "b.gbnf", "hi"]);
    refused.check(65, "GBNF: rule root, line 2: a class is not closed");
}

/// The lines of all helps that call llmctl, with what is joined to them.
fn examples() -> Vec<String> {
    let mut found = Vec::new();
    for page in " run chat serve worker bench models sessions template config man completions".split(' ') {
        let args: Vec<&str> = page.split_whitespace().chain(["--help"]).collect();
        let help = llmctl(&args);
        let text = help.check(0, "").stdout.replace("\\\n", " ");
        let lines = text.lines().skip_while(|line| !line.starts_with("Examples:")).skip(1);
        let examples = lines.take_while(|line| line.starts_with("  "));
        found.extend(examples.map(|line| line.trim().to_owned()).filter(|line| line.contains("llmctl ")));
    }
    found
}

/// Examples that need a model of the user's name it in their error.
#[test]
fn every_example_runs_as_it_stands_or_names_a_model() {
    let examples = examples();
    assert!(examples.len() > 20, "{examples:?}");
    let names_a_model = |example: &str| {
        ["-m MODEL", "--model ", "bench compare", "MODEL is a "].iter().any(|word| example.contains(word))
            || ["./model.gguf", "org/repo", "--endpoint", ".jinja"].iter().any(|word| example.contains(word))
    };
    let mut num_run = 0;
    for example in examples.iter().filter(|example| !names_a_model(example)) {
        // What takes another program, the user's shell or a terminal is for the tests of that.
        let script = example.split(['|', '>']).next().unwrap_or_default().trim().to_owned();
        let script = if example.starts_with("printf") { example.clone() } else { script };
        if !script.contains("llmctl ") {
            continue;
        }
        let place = Place::new();
        place.write("notes.md", "What is a session?\n");
        place.write("tools.toml", "[[tool]]\nname = \"t\"\ndescription = \"d\"\nargv = [\"true\"]\n");
        // What an example goes on with, or shows.
        let name = if example.contains("llmctl sessions ") { "trip" } else { "other" };
        place.run(&["run", "-q", "--session", name, "hello"]).check(0, "");
        if example.contains("sessions import") {
            let file = place.folder.path().join("trip.archive").display().to_string();
            place.run(&["sessions", "export", "trip", "--with-kv", &file]).check(0, "");
            place.run(&["sessions", "remove", "--yes", "trip"]).check(0, "");
        }
        let script = script.replace("llmctl ", &format!("{} ", env!("CARGO_BIN_EXE_llmctl")));
        // There is no terminal to ask on.
        let script = script.replace("sessions remove ", "sessions remove --yes ");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).current_dir(place.folder.path()).env("HOME", place.folder.path());
        shell.env_remove("XDG_DATA_HOME").stdin(Stdio::null());
        let output = shell.output().expect("sh");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{example}: {said}");
        num_run += 1;
    }
    assert!(num_run > 4, "{num_run} of {examples:?}");
}

#[cfg(unix)]
#[test]
fn completion_scripts_offer_names() {
    let place = Place::new();
    place.run(&["run", "-q", "--session", "trip-to-oslo", "hello"]).check(0, "");
    place.write("llmctl.toml", "[aliases]\nsmall = \"org/repo:Q4_K_M\"\n\"big:one\" = \"guide\"\n");
    std::fs::create_dir(place.path("folder")).expect("a folder");
    place.write("folder/model.gguf", "");
    let bin = Path::new(env!("CARGO_BIN_EXE_llmctl")).parent().expect("a folder");
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let ask = |shell: &str, script: &str| {
        let mut command = Command::new(shell);
        command.args(["-c", script]).current_dir(place.folder.path()).env("HOME", place.folder.path());
        command.env("PATH", &path).stdin(Stdio::null());
        let output = command.output().expect(shell);
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    // As bash calls a completion function: the line, its words split at colons, and the word it will replace.
    let bash = |line: &str, word: &str| {
        let script = format!(
            "source <(llmctl completions bash); COMP_LINE='{line}'; COMP_POINT={}; COMP_WORDS=(llmctl); COMP_CWORD=1; \
             _llmctl llmctl '{word}' llmctl; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            line.len()
        );
        let answer = ask("bash", &script);
        answer.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    for line in [
        "llmctl chat --session tr",
        "llmctl run --session tr",
        "llmctl sessions show tr",
        "llmctl sessions remove tr",
    ] {
        assert_eq!(bash(line, "tr"), ["trip-to-oslo"], "{line}");
    }
    assert_eq!(bash("llmctl run --prompt sum", "sum"), ["summarize"]);
    assert_eq!(bash("llmctl run -m sm", "sm"), ["small"]);
    assert_eq!(bash("llmctl run -m gui", "gui"), ["guide"]);
    assert_eq!(bash("llmctl run -m big:o", "o"), ["one"], "only what stands behind the colon");
    assert_eq!(bash("llmctl run -m folder/m", "folder/m"), ["folder/model.gguf"]);
    assert!(bash("llmctl ses", "ses").contains(&"sessions".to_owned()));
    assert!(bash("llmctl run --temp", "--temp").contains(&"--temperature".to_owned()));
    assert_eq!(bash("llmctl run --output jsonl", "jsonl"), ["jsonl"]);

    let has = |shell: &str| Command::new(shell).arg("--version").stdout(Stdio::null()).status().is_ok();
    if has("fish") {
        let fish =
            |line: &str| ask("fish", &format!("llmctl completions fish | source; complete -C '{line}'"));
        assert!(fish("llmctl chat --session tr").contains("trip-to-oslo"));
        assert!(
            fish("llmctl run --prompt sum").contains("summarize\tSummarise"),
            "{}",
            fish("llmctl run --prompt sum")
        );
        assert!(fish("llmctl run -m sm").contains("small"));
    }
    if has("zsh") {
        // zsh completes in its line editor only; what its script would be told is asked for here, and that it loads.
        let loads = "autoload -U compinit && compinit -D && source <(llmctl completions zsh) && echo ${_comps[llmctl]}";
        assert_eq!(ask("zsh", loads).trim(), "_clap_dynamic_completer_llmctl");
        let told = "_LLMCTL_COMPLETE=zsh _CLAP_COMPLETE_INDEX=3 llmctl -- llmctl chat --session tr";
        assert!(ask("zsh", told).contains("trip-to-oslo"));
    }
}

#[cfg(unix)]
#[test]
fn a_batch_without_a_chat_template_is_answered_and_failed_rows_are_tried_again() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    place.write("in.jsonl", "{\"custom_id\":\"a\",\"prompt\":\"Once\"}\n{\"custom_id\":\"b\",\"prompt\":\"Once\",\"max_tokens\":0}\n");
    let args = ["run", "-m", &model, "-n", "4", "--batch", "in.jsonl", "--out", "out.jsonl"];
    let ran = place.run(&args);
    ran.check(4, "has no chat template: prompts are completed as plain text")
        .check(4, "batch: 1 answered, 1 failed, 0 skipped");
    place.write(
        "in.jsonl",
        "{\"custom_id\":\"a\",\"prompt\":\"Once\"}\n{\"custom_id\":\"b\",\"prompt\":\"Once\"}\n",
    );
    let ran = place.run(&[&args[..], &["--resume"]].concat());
    ran.check(0, "1 row of a previous run failed: tried again")
        .check(0, "batch: 1 answered, 0 failed, 1 skipped");
    let rows: Vec<Value> =
        place.read("out.jsonl").lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let ids: Vec<_> = rows.iter().map(|row| row["custom_id"].as_str().expect("an id")).collect();
    assert_eq!(ids, ["a", "b"]);
}
