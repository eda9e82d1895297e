//! Promise: configuration files and helper subcommands behave in the built program as `llmctl config --help` says.

use std::fs;
use std::process::Output;

use crate::common::prelude::*;

/// A user with a home and a project folder of their own; nothing of the real environment shows through.
struct User {
    dir: TempDir,
}

impl User {
    fn new() -> Self {
        let user = Self { dir: tempfile::tempdir().expect("tempdir") };
        fs::create_dir_all(user.path("project")).expect("mkdir");
        user
    }

    fn path(&self, relative: &str) -> PathBuf {
        self.dir.path().join(relative)
    }

    fn write(&self, relative: &str, text: &str) -> PathBuf {
        let path = self.path(relative);
        fs::create_dir_all(path.parent().expect("a parent")).expect("mkdir");
        fs::write(&path, text).expect("write");
        path
    }

    fn user_file(&self, text: &str) {
        self.write("home/.config/llmctl/config.toml", text);
    }

    fn project_file(&self, text: &str) {
        self.write("project/llmctl.toml", text);
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_llmctl"));
        command
            .args(words)
            .env_clear()
            .env("HF_HUB_OFFLINE", "1")
            .env("HOME", self.path("home"))
            .current_dir(self.path("project"));
        command
    }

    fn output(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("llmctl starts")
    }

    fn stdout(&self, words: &[&str]) -> String {
        text(&self.output(words))
    }

    fn json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.stdout(words)).expect("JSON on stdout")
    }
}

/// stdout of a success.
#[track_caller]
fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

#[track_caller]
fn failure(output: &Output, code: i32) -> String {
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

#[test]
fn show_says_where_each_value_comes_from() {
    let user = User::new();
    user.user_file("model = \"o/user\"\ntemperature = 0.5\n\n[run]\nstop = [\"a\", \"b#\\\"\"]\n");
    user.project_file("# the project's\nmodel = \"o/project\"\n[aliases]\nsmall = \"o/m:Q4_0\"\n");
    let output = user
        .command(&["--quiet", "config", "show", "--origin", "--all"])
        .env("LLMCTL_MAX_TOKENS", "7")
        .output();
    let shown = text(&output.expect("llmctl starts"));
    let origin = |key: &str| {
        let line = shown.lines().find(|line| line.starts_with(&format!("{key} ")))?;
        let (value, origin) = line.rsplit_once(" # ")?;
        Some((value.trim().to_owned(), origin.to_owned()))
    };
    for (key, value, from) in [
        ("quiet", "quiet = true", "flag"),
        ("model", "model = \"o/project\"", "llmctl.toml:2"),
        ("temperature", "temperature = 0.5", "~/.config/llmctl/config.toml:2"),
        ("max-tokens", "max-tokens = 7", "LLMCTL_MAX_TOKENS"),
        ("stop", "stop = [\"a\", 'b#\"']", "~/.config/llmctl/config.toml:5"),
        ("\"small\"", "\"small\" = \"o/m:Q4_0\"", "llmctl.toml:4"),
    ] {
        assert_eq!(origin(key), Some((value.to_owned(), from.to_owned())), "{key} in\n{shown}");
    }
    assert!(shown.contains("# top-k is not set"), "{shown}");
}

#[test]
fn what_show_prints_is_a_configuration_file() {
    let user = User::new();
    user.user_file(
        "model = \"o/m\"\ntop-k = \"all\"\n[run]\ntemperature = 1\nraw = true\nlogit-bias = [\"1=2\", \"3=-4\"]\n\
         stop = [\"a\\nb\", \"\\u0000\"]\nverbose = 2\n[aliases]\n\"x:1\" = \"o/x\"\n",
    );
    let shown = user.stdout(&["config", "show"]);
    for key in ["model", "top-k", "temperature", "raw", "logit-bias", "stop", "verbose", "\"x:1\""] {
        assert!(shown.contains(&format!("{key} = ")), "{key} in\n{shown}");
    }
    let other = User::new();
    other.user_file(&shown);
    assert_eq!(other.stdout(&["config", "show"]), shown);
    assert_eq!(user.json(&["config", "show", "--output", "json"])["schema"], "llmctl.config.v1");
}

#[test]
fn large_numbers_are_read_back_as_they_are_shown() {
    let user = User::new();
    user.user_file("[run]\nseed = 18446744073709551615\nmax-tokens = 7\n");
    let shown = user.stdout(&["config", "show"]);
    assert!(shown.contains("seed = 18446744073709551615\n"), "{shown}");
    let other = User::new();
    other.user_file(&shown);
    assert_eq!(other.stdout(&["config", "show"]), shown);
    let json = user.json(&["config", "show", "--output", "json"]);
    let values = json["values"].as_array().expect("a list");
    let seed = values.iter().find(|value| value["key"] == "seed" && value["command"] == "run");
    assert_eq!(seed.expect("a seed")["value"], u64::MAX);
}

#[test]
fn nested_subcommands_have_tables_of_their_own() {
    let user = User::new();
    user.user_file("timeout = \"7s\"\n[bench]\nrepetitions = 2\n[bench.serve]\nconcurrency = [1, 2]\nendpoint = \"http://127.0.0.1:1\"\n");
    let shown = user.stdout(&["config", "show", "--origin"]);
    let origin = "# ~/.config/llmctl/config.toml:";
    for (key, line) in [("timeout = \"7s\"", 1), ("repetitions = 2", 3), ("concurrency = [1, 2]", 5)] {
        let line = format!("{origin}{line}");
        assert!(shown.lines().any(|l| l.starts_with(key) && l.ends_with(&line)), "{key} {line} in\n{shown}");
    }
    let table = shown.split("[bench.serve]").nth(1).expect("a table");
    assert!(table.contains("concurrency") && table.contains("endpoint = "), "{shown}");
    // The endpoint is used: nobody listens there.
    failure(&user.output(&["bench", "serve"]), 69);
    user.user_file("[bench]\nconcurrency = 4\n");
    let said = failure(&user.output(&["models"]), 78);
    assert!(said.contains("unknown key \"concurrency\"; it belongs in [bench.serve]"), "{said}");
}

#[test]
fn a_files_defaults_for_batches_leave_other_runs_alone() {
    let user = User::new();
    user.user_file("[run]\nany-model = true\n");
    failure(&user.output(&["run", "--model", "/no/such/model", "hello"]), 66);
}

#[test]
fn a_switch_that_a_variable_turns_off_is_shown_as_off() {
    let user = User::new();
    user.user_file("quiet = true\n[run]\nraw = true\n");
    let show = ["config", "show", "--origin", "--all"];
    let output = user.command(&show).env("LLMCTL_RAW", "no").output();
    let shown = text(&output.expect("llmctl starts"));
    let line = |key: &str| shown.lines().find(|line| line.starts_with(key)).unwrap_or_default().to_owned();
    assert!(line("raw = ").starts_with("raw = false") && line("raw = ").ends_with("# LLMCTL_RAW"), "{shown}");
    let excluded = user.command(&[&["-v"], &show[..]].concat()).env("LLMCTL_QUIET", "1").output();
    let shown = text(&excluded.expect("llmctl starts"));
    assert!(shown.contains("verbose = 1") && shown.contains("# quiet is not set"), "{shown}");
}

#[test]
fn doctor_says_which_variables_are_wrong_and_believes_the_others() {
    let user = User::new();
    let mut command = user.command(&["doctor", "--output", "json"]);
    command.envs([("LLMCTL_TEMPERATURE", "warm"), ("LLMCTL_THREADS", "3"), ("LLMCTL_MODEL", "o/gone")]);
    let json: Value = serde_json::from_str(&text(&command.output().expect("llmctl starts"))).expect("JSON");
    assert_eq!(json["cpu"]["threads"], 3);
    assert_eq!(json["models"]["default"], "o/gone");
    let names = serde_json::json!(["LLMCTL_MODEL", "LLMCTL_TEMPERATURE", "LLMCTL_THREADS"]);
    assert_eq!(json["config"]["variables"], names);
    let warnings = json["warnings"].as_array().expect("a list");
    let wrong = warnings.iter().find(|warning| warning["name"] == "variables").expect("a warning");
    let message = wrong["message"].as_str().expect("text");
    assert!(message.starts_with("LLMCTL_TEMPERATURE: \"warm\" is not a number"), "{message}");
}

#[test]
fn mistakes_are_exit_78_with_positions_and_suggestions() {
    let user = User::new();
    user.user_file("ctx = 100\ntemprature = 1\n");
    user.project_file("[run]\nmax_tokens = \"many\"\n");
    let said = failure(&user.output(&["run", "hello"]), 78);
    assert!(
        said.contains("config.toml:2:1: unknown key \"temprature\"; did you mean \"temperature\"?"),
        "{said}"
    );
    assert!(said.contains("llmctl.toml:2:14: max-tokens: expected an integer, found a string"), "{said}");
    for words in [&["models"][..], &["config", "show"]] {
        failure(&user.output(words), 78);
    }
}

/// Flags that a project's file may not set.
const PERSONAL: &str = "access-log allow-delete allow-pull allow-tool allowed-host api-key-file baseline batch branches chat-template check config connect \
    compare continue cors-origin encrypt encrypt-key-command endpoint endpoint-key-env endpoint-key-file engine engine-cache-salt ephemeral force grammar host imatrix image image-urls \
    input insecure-no-auth kv-disk lora mcp-config mmproj models-folder name new offline ollama-port out owner packed-disk plot prompt-file record refuse-special-tokens \
    remove resume role save schema self session share-sessions system-file tools trace uds var warm with-kv yes";

/// Whoever adds a flag decides: a name belongs to `PROJECT_KEYS` of src/cli/config/mod.rs or to the list above. A value that is a
/// file, a folder or an address is nothing for a project.
#[test]
fn each_flag_has_a_decision_whether_a_projects_file_may_set_it() {
    fn check(command: &clap::Command, undecided: &mut Vec<String>) {
        for arg in
            command.get_arguments().filter(|arg| !matches!(arg.get_long(), None | Some("help" | "version")))
        {
            let long = arg.get_long().expect("filtered");
            let (suits, is_personal) = (
                llmctl::cli::config::suits_project(long),
                PERSONAL.split_whitespace().any(|name| name == long),
            );
            let names = arg.get_value_names().unwrap_or_default().join(" ");
            let opens =
                ["FILE", "DIR", "PATH", "URL", "ADDRESS", "ORIGIN"].iter().any(|word| names.contains(word));
            if suits == is_personal || (suits && opens && arg.get_action().takes_values()) {
                undecided.push(format!("{} --{long} {names}", command.get_name()));
            }
        }
        command.get_subcommands().for_each(|below| check(below, undecided));
    }
    let mut undecided = Vec::new();
    check(&llmctl::cli::command(), &mut undecided);
    assert!(undecided.is_empty(), "{undecided:#?}");
}

#[test]
fn a_folder_opens_no_server_and_writes_and_reads_no_file() {
    let user = User::new();
    let text = "share_sessions = true\nyes = true\n[serve]\nhost = \"0.0.0.0\"\ninsecure-no-auth = true\ncors-origin = [\"*\"]\n\
                access-log = \"../home/x\"\napi-key-file = \"k\"\n[embed]\nout = \"x\"\n[bench.serve]\nsave = \"x\"\n[chat]\nsession = \"s\"\n";
    user.project_file(text);
    let said = failure(&user.output(&["serve"]), 78);
    let lines = [
        "1: share-sessions",
        "2: yes",
        "4: host",
        "5: insecure-no-auth",
        "6: cors-origin",
        "7: access-log",
        "8: api-key-file",
    ];
    for refused in lines.into_iter().chain(["10: out", "12: save", "14: session"]) {
        let line = format!("llmctl.toml:{refused}: only your own configuration file may set it");
        assert!(said.contains(&line), "{line} in\n{said}");
    }
    assert!(!user.path("home/x").exists());
    let named = user.path("project/llmctl.toml");
    fs::remove_file(&named).expect("removed");
    user.user_file(text);
    user.stdout(&["config", "show"]);
}

#[cfg(unix)]
#[test]
fn a_pipe_in_the_folder_holds_up_no_command() {
    let user = User::new();
    user.project_file("");
    let path = user.path("project/llmctl.toml");
    fs::remove_file(&path).expect("removed");
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).expect("a pipe");
    assert!(failure(&user.output(&["models"]), 78).contains("llmctl.toml: is not a regular file"));
}

#[test]
fn a_broken_file_does_not_take_away_what_helps_to_repair_it() {
    let user = User::new();
    user.user_file("what is this");
    let path = user.path("home/.config/llmctl/config.toml").display().to_string();
    assert_eq!(user.stdout(&["config", "path"]).trim_end(), path);
    assert!(user.stdout(&["doctor"]).contains("config.toml:1:6:"));
    for words in [&["--help"][..], &["run", "--help"], &["--version"], &["completions", "bash"], &["man"]] {
        user.stdout(words);
    }
}

#[test]
fn a_named_file_replaces_the_users_and_must_be_there() {
    let user = User::new();
    user.user_file("seed = 1\n");
    let named = user.write("other.toml", "seed = 2\n");
    let named = named.to_str().expect("UTF-8");
    assert!(user.stdout(&["config", "show", "--config", named]).contains("seed = 2"));
    let output = user.command(&["config", "show"]).env("LLMCTL_CONFIG", named).output();
    assert!(text(&output.expect("llmctl starts")).contains("seed = 2"));
    let said = failure(&user.output(&["--config", "missing.toml", "config", "show"]), 78);
    assert!(said.contains("missing.toml"), "{said}");
    assert_eq!(user.stdout(&["config", "path", "--config", named]).trim_end(), named);
}

#[test]
fn a_wrong_variable_is_a_usage_error_that_names_it() {
    let user = User::new();
    let output = user.command(&["config", "show"]).env("LLMCTL_TEMPERATURE", "warm").output();
    let said = failure(&output.expect("llmctl starts"), 2);
    assert!(said.contains("LLMCTL_TEMPERATURE"), "{said}");
}

/// A Hugging Face cache with one GGUF of two quantisations.
fn with_cache(user: &User) -> PathBuf {
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let snapshot = format!("hub/models--o--m/snapshots/{commit}");
    user.write(&format!("{snapshot}/m-Q4_0.gguf"), "GGUF");
    user.write(&format!("{snapshot}/m-Q8_0.gguf"), "GGUF and more");
    user.path("hub")
}

#[test]
fn models_are_listed_with_aliases() {
    let user = User::new();
    let hub = with_cache(&user);
    user.project_file("[aliases]\nsmall = \"o/m:Q4_0\"\ngone = \"o/gone\"\n");
    let listed = text(&user.command(&["models"]).env("HF_HUB_CACHE", &hub).output().expect("llmctl starts"));
    let names: Vec<&str> = listed.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["MODEL", "guide", "o/m:Q4_0", "o/m:Q8_0", "gone", "small"]);
    let output = user.command(&["list", "--output", "json"]).env("HF_HUB_CACHE", &hub).output();
    let json: Value = serde_json::from_str(&text(&output.expect("llmctl starts"))).expect("JSON");
    assert_eq!(json["built_in"][0]["reference"], "guide");
    assert_eq!(json["models"][1]["bytes"], 13);
    assert_eq!(json["models"][1]["type"], "Q8_0");
    assert!(json["aliases"][0]["error"].as_str().is_some_and(|error| error.contains("o/gone")), "{json}");
    assert!(json["aliases"][1]["path"].as_str().is_some_and(|path| path.ends_with("m-Q4_0.gguf")), "{json}");
}

#[test]
fn a_missing_model_is_exit_66_with_the_command_that_downloads_it() {
    let user = User::new();
    let hub = with_cache(&user);
    let output = user.command(&["models", "show", "o/n"]).env("HF_HUB_CACHE", &hub).output();
    let said = failure(&output.expect("llmctl starts"), 66);
    assert!(said.contains("'llmctl pull o/n' downloads it"), "{said}");
    failure(&user.output(&["models", "show", "./nothing.gguf"]), 66);
    failure(&user.output(&["models", "show", "hf:../../etc"]), 2);
}

#[test]
fn a_real_model_is_described_without_loading_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/llama");
    if !folder.is_dir() {
        crate::common::skip(format!("no copy of the parity models at {}", folder.display()));
        return;
    }
    let json = User::new().json(&["models", "show", folder.to_str().expect("UTF-8"), "--output", "json"]);
    assert_eq!(json["architecture"], "llama");
    assert_eq!((&json["runs"], &json["kind"]), (&Value::Bool(true), &Value::from("safetensors")));
    assert!(json["parameters"].as_u64() > Some(1000) && json["context_length"].as_u64() > Some(0), "{json}");
}

#[test]
fn doctor_reports_and_warns() {
    let user = User::new();
    user.project_file("model = \"o/gone\"\n");
    let json = user.json(&["doctor", "--output", "json"]);
    assert_eq!(json["schema"], "llmctl.doctor.v1");
    assert_eq!(json["build"]["version"], env!("CARGO_PKG_VERSION"));
    assert!(json["cpu"]["threads"].as_u64() >= Some(1), "{json}");
    assert_eq!(json["config"]["project"]["exists"], true);
    assert_eq!(json["models"]["default"], "o/gone");
    let warnings = json["warnings"].as_array().expect("a list");
    let about = |name: &str| warnings.iter().any(|warning| warning["name"] == name);
    assert!(about("default") && !about("state"), "{json}");
    assert_eq!(about("profile"), cfg!(debug_assertions));
}

#[test]
fn instruction_sets_and_threads_are_forced_by_variables_and_shown_by_doctor() {
    let user = User::new();
    let doctor = |variables: &[(&str, &str)]| {
        let mut command = user.command(&["doctor", "--output", "json"]);
        command.envs(variables.iter().copied());
        let output = command.output().expect("runs");
        serde_json::from_slice::<Value>(&output.stdout).expect("JSON")
    };
    let json = doctor(&[("LLMCTL_CPU", "scalar"), ("LLMCTL_THREADS", "3"), ("LLMCTL_THREADS_BATCH", "5")]);
    assert_eq!(json["cpu"]["kernels"]["products"], "scalar");
    assert_eq!((&json["cpu"]["threads"], &json["cpu"]["threads_batch"]), (&Value::from(3), &Value::from(5)));
    let json = doctor(&[]);
    let available = json["cpu"]["kernels"]["available"].as_array().expect("a list").clone();
    assert_eq!(json["cpu"]["kernels"]["instruction_set"], *available.last().expect("at least one"));
}

/// No file is looked at before a flag's value is known to mean something here: the code says usage, not that a model is missing.
/// src/cli/args.rs tests every combination of instruction sets; this one needs a real processor.
#[test]
fn what_this_machine_lacks_is_a_usage_error_wherever_the_model_is() {
    let user = User::new();
    let shown = user.json(&["doctor", "--output", "json"]);
    let available = shown["cpu"]["kernels"]["available"].as_array().expect("a list").clone();
    let lacking = ["avx2", "avx512", "amx", "neon", "dotprod", "i8mm", "mmx"].into_iter();
    let mut lacking: Vec<_> = lacking.filter(|set| available.iter().all(|has| has != set)).collect();
    assert_eq!(lacking.pop(), Some("mmx"), "never known");
    let present = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/parity/llama");
    let commands: [&[&str]; 5] = [
        &["run", "--raw", "x"],
        &["chat", "--ephemeral"],
        &["serve", "--port", "0"],
        &["bench", "-p", "4", "-n", "1", "-r", "1"],
        &["bench", "serve", "--self"],
    ];
    for (words, model) in commands.iter().flat_map(|words| [(words, "gone/nowhere"), (words, present)]) {
        let refused = |variable: &str, value: &str, named: &[&str]| {
            let mut command = user.command(&[words, &["--model", model][..]].concat());
            let output = command.env(variable, value).output().expect("runs");
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(2), "{words:?} {model} {value}: {message}");
            assert!(named.iter().all(|name| message.contains(name)), "{words:?} {model} {value}: {message}");
        };
        refused("LLMCTL_CPU", "mmx", &["mmx", "scalar"]);
        lacking.iter().for_each(|set| refused("LLMCTL_CPU", set, &["LLMCTL_CPU", set, "scalar"]));
        // What a build lacks takes the same way on every machine. A load on a server of one's own takes no device.
        if cfg!(not(feature = "metal")) && !words.contains(&"--self") {
            refused("LLMCTL_DEVICE", "metal", &["metal", "--device cpu"]);
        }
    }
}

#[test]
fn completions_and_manual_pages() {
    let user = User::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = user.stdout(&["completions", shell]);
        assert!(script.contains("llmctl") && script.contains("_LLMCTL_COMPLETE"), "{shell}: {script}");
    }
    assert!(user.stdout(&["man"]).contains(".TH llmctl 1"));
    user.stdout(&["man", "--out", "pages"]);
    let page = |name: &str| fs::read_to_string(user.path("project/pages").join(name)).expect("a page");
    assert!(
        page("llmctl-run.1").contains("llmctl run") && page("llmctl-run.1").contains("\\-\\-max\\-tokens")
    );
    assert!(page("llmctl-config-show.1").contains("\\-\\-origin"));
}

#[test]
fn every_shell_completion_and_page_survives_a_closed_pipe() {
    use std::process::Stdio;
    let user = User::new();
    let mut child =
        user.command(&["man"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("ends");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}
