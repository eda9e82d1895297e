//! `llmctl run` on a real trained model: text, JSON, pipes, disks, signals, damaged files.

use super::{llmctl, read_line, stories};
use crate::common::prelude::*;
use crate::common::scripted::{self, CODE, PLAIN};

const ONCE: &str = "Once upon a time";

/// Runs with the trained model; `None` without fixtures.
fn run(args: &[&str]) -> Option<Ran> {
    let model = stories()?;
    Some(llmctl(&[&["run", "--model", &model], args].concat()))
}

/// The model's greedy continuation.
const STORY: &str = ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball.";

#[test]
fn the_main_job_streams_a_coherent_story() {
    let Some(ran) = run(&["--raw", ONCE, "--max-tokens", "32"]) else { return };
    ran.check(0, "");
    assert!(STORY.starts_with(ran.stdout.trim_end()) && ran.stdout.len() > 60, "{ran:?}");
    assert!(ran.stdout.ends_with('\n') && !ran.stdout.contains('\x1b'), "{ran:?}");
    assert_eq!(
        ran.stderr, "(the answer was cut at --max-tokens)\n",
        "nothing but the answer, and why it ends"
    );
    let whole = run(&["--raw", ONCE, "--max-tokens", "32", "--no-stream"]).expect("fixtures");
    assert_eq!(whole.stdout, ran.stdout);
}

#[test]
fn a_model_without_template_completes_text_and_says_so() {
    let Some(ran) = run(&[ONCE, "--max-tokens", "8"]) else { return };
    ran.check(0, "has no chat template: the prompt is completed as plain text");
    run(&[ONCE, "--system", "Be brief."]).expect("fixtures").check(65, "has no chat template");
    let quiet = run(&[ONCE, "--max-tokens", "8", "--quiet"]).expect("fixtures");
    assert_eq!((quiet.stderr.as_str(), quiet.stdout), ("", ran.stdout));
}

#[test]
fn a_chat_template_from_a_file_is_used() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    place.write("t.jinja", "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[answer]{% endif %}");
    let args = ["run", "--model", &model, "--chat-template", "t.jinja", "--dry-run", "--system", "S", "hi"];
    assert_eq!(place.run(&args).check(0, "").stdout, "[system] S\n[user] hi\n[answer]\n");
    place.write("t.jinja", "{{ raise_exception('no way') }}");
    place.run(&args).check(65, "no way");
    place.write("t.jinja", "{{ broken");
    place.run(&args).check(65, "line 1");
}

#[test]
fn json_has_text_usage_timings_seed_and_model() {
    let args = ["--raw", ONCE, "--max-tokens", "8", "--output", "json", "--logprobs", "2", "--seed", "5"];
    let Some(ran) = run(&args) else { return };
    let value: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    assert_eq!(value["schema"], "llmctl.run.v1");
    assert_eq!(value["usage"]["completion_tokens"], 8);
    assert_eq!(value["usage"]["total_tokens"], value["context"]["used"]);
    assert_eq!((&value["finish_reason"], &value["finish"]["by"]), (&"length".into(), &"max_tokens".into()));
    assert_eq!((&value["seed"], &value["model"]), (&5.into(), &"hf".into()));
    let logprobs = value["logprobs"].as_array().expect("logprobs");
    assert_eq!(logprobs.len(), 8);
    let joined: String = logprobs.iter().map(|token| token["token"].as_str().expect("text")).collect();
    assert_eq!(joined, value["text"].as_str().expect("text"), "one token, one piece of the text");
    for token in logprobs {
        assert_eq!(token["top"].as_array().expect("alternatives").len(), 2);
        assert_eq!(token["top"][0]["id"], token["id"], "greedy takes the best");
    }
}

#[test]
fn jsonl_events_join_to_the_same_text() {
    let Some(text) = run(&["--raw", ONCE, "--max-tokens", "32"]) else { return };
    let ran = run(&["--raw", ONCE, "--max-tokens", "32", "--output", "jsonl"]).expect("fixtures");
    let events: Vec<Value> =
        ran.check(0, "").stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let names: Vec<_> = events.iter().map(|event| event["event"].as_str().expect("a name")).collect();
    assert_eq!((names[0], names[names.len() - 1]), ("started", "done"));
    let joined: String = events.iter().filter_map(|event| event["text"].as_str()).collect();
    assert_eq!(joined, text.stdout.trim_end_matches('\n'));
    let tokens: usize = events.iter().filter_map(|event| Some(event["tokens"].as_array()?.len())).sum();
    assert_eq!(tokens, 32);
}

#[test]
fn a_seed_repeats_a_run_and_the_drawn_one_is_told() {
    let sampled = |seed: &[&str]| {
        let args = [&["--raw", ONCE, "-n", "24", "--temperature", "1", "--output", "json"], seed].concat();
        let ran = run(&args)?;
        Some(serde_json::from_str::<Value>(&ran.check(0, "").stdout).expect("JSON"))
    };
    let Some(first) = sampled(&[]) else { return };
    let again = sampled(&["--seed", &first["seed"].to_string()]).expect("fixtures");
    assert_eq!(first["text"], again["text"]);
    let texts: std::collections::HashSet<_> = (0..4)
        .map(|seed| sampled(&["--seed", &seed.to_string()]).expect("fixtures")["text"].to_string())
        .collect();
    assert!(texts.len() > 1, "seeds make a difference");
}

#[test]
fn stop_strings_limits_and_their_exit_codes() {
    let Some(ran) = run(&["--raw", ONCE, "--stop", " Lily", "--stop", "zzz", "--fail-on-length"]) else {
        return;
    };
    assert_eq!(ran.check(0, "").stdout, ", there was a little girl named\n");
    run(&["--raw", ONCE, "-n", "4", "--fail-on-length"]).expect("fixtures").check(3, "");
    run(&["--raw", ONCE, "-n", "4"]).expect("fixtures").check(0, "(the answer was cut at --max-tokens)");
    let full = run(&["--raw", ONCE, "--ctx", "32", "--ignore-eos", "--fail-on-length"]).expect("fixtures");
    full.check(3, "the context of 32 tokens is full");
    run(&["--raw", ONCE, "--ctx", "4"]).expect("fixtures").check(65, "the prompt has");
    run(&["--raw", ONCE, "--ctx", "32", "-n", "64"]).expect("fixtures").check(65, "--max-tokens");
    let clamped = run(&["--raw", ONCE, "--ctx", "32", "-n", "64", "--overflow", "clamp"]).expect("fixtures");
    clamped.check(0, "the context of 32 tokens is full");
    run(&["--raw", ONCE, "--ctx", "100000"]).expect("fixtures").check(2, "100000");
    run(&["--raw", ONCE, "--logit-bias", "999999=1"])
        .expect("fixtures")
        .check(2, "error: --logit-bias: token id 999999 is not in the vocabulary");
}

#[test]
fn stats_go_to_stderr() {
    let Some(ran) = run(&["--raw", ONCE, "-n", "8", "--stats", "--seed", "9"]) else { return };
    for line in ["prefill ", "decode ", "first token ", "context ", "finish       length", "seed         9"] {
        ran.check(0, line);
    }
    assert!(!ran.stdout.contains("seed"));
}

#[test]
fn the_answer_begins_with_its_prefill() {
    let Some(ran) = run(&["--raw", "Once upon", "--prefill-response", " a time", "-n", "32"]) else { return };
    let story = run(&["--raw", ONCE, "-n", "32"]).expect("fixtures").stdout;
    assert_eq!(ran.check(0, "").stdout, format!(" a time{story}"));
}

#[test]
fn a_reader_that_leaves_ends_the_run_quietly() {
    let Some(model) = stories() else { return };
    // Far more than a pipe holds, so that the command must notice.
    let args =
        ["run", "--model", &model, "--raw", ONCE, "--ignore-eos", "--output", "jsonl", "--logprobs", "20"];
    let place = Place::new();
    let mut child =
        place.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
    read_line(&mut child.stdout.take().expect("a pipe"));
    let output = child.wait_with_output().expect("ends");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_input_output_error() {
    let Some(model) = stories() else { return };
    for format in ["text", "json", "jsonl"] {
        let full = File::options().write(true).open("/dev/full").expect("/dev/full");
        let place = Place::new();
        let mut command =
            place.command(&["run", "--model", &model, "--raw", ONCE, "-n", "4", "--output", format]);
        let output = command.stdout(full).output().expect("ends");
        assert_eq!(output.status.code(), Some(74), "{format}");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(stderr.contains("writing to standard output: no space left"), "{stderr}");
    }
}

/// Starts a run that is blocked in writing its answer, signals it, and returns how it ended and all it wrote.
#[cfg(unix)]
fn signalled(signals: &[i32], reads_on: bool) -> Option<(Option<i32>, String)> {
    let model = stories()?;
    let args =
        ["run", "--model", &model, "--raw", ONCE, "--ignore-eos", "--output", "jsonl", "--logprobs", "20"];
    let place = Place::new();
    let mut child =
        place.command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("starts");
    let mut stdout = child.stdout.take().expect("a pipe");
    let mut text = read_line(&mut stdout) + "\n";
    for (index, signal) in signals.iter().enumerate() {
        if index > 0 {
            // Longer than two signals may be one wish.
            std::thread::sleep(Duration::from_millis(300));
        }
        // SAFETY: plain system call on a child that has not been waited for.
        unsafe { libc::kill(child.id() as libc::pid_t, *signal) };
    }
    if reads_on {
        stdout.read_to_string(&mut text).expect("UTF-8");
    }
    Some((child.wait().expect("ends").code(), text))
}

#[cfg(unix)]
#[test]
fn the_first_signal_ends_in_good_order() {
    for (signal, code) in [(libc::SIGINT, 130), (libc::SIGTERM, 143), (libc::SIGHUP, 129)] {
        let Some((ended, text)) = signalled(&[signal], true) else { return };
        assert_eq!(ended, Some(code));
        let last: Value = serde_json::from_str(text.lines().last().expect("lines")).expect("JSON");
        assert_eq!(last["event"], "done");
    }
}

#[cfg(unix)]
#[test]
fn the_second_signal_ends_at_once() {
    let Some((ended, _)) = signalled(&[libc::SIGINT, libc::SIGINT], false) else { return };
    assert_eq!(ended, Some(130));
}

#[test]
fn models_that_are_missing_or_damaged_are_told_apart() {
    let place = Place::new();
    place.run(&["run", "hi", "--model", "./none.gguf"]).check(66, "none.gguf");
    place.write("text.gguf", "this is no model");
    place.run(&["run", "hi", "--model", "./text.gguf"]).check(65, "text.gguf");
    let Some(folder) = fixtures() else { return };
    let whole = std::fs::read(folder.join("models/stories260K/gguf/stories260K-f32.gguf"))
        .or_else(|_| std::fs::read(folder.join("models/llama-2-tiny-random.gguf")));
    let Ok(whole) = whole else { return };
    for part in [8, whole.len() / 3, whole.len() - 7] {
        place.write("cut.gguf", &whole[..part]);
        place.run(&["run", "hi", "--model", "./cut.gguf"]).check(65, "cut.gguf");
    }
}

#[test]
fn weights_that_are_no_numbers_are_a_damaged_model() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    for entry in std::fs::read_dir(&model).expect("the model's files") {
        let entry = entry.expect("a file");
        place.write(&entry.file_name().to_string_lossy(), std::fs::read(entry.path()).expect("reads"));
    }
    let path = place.path("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("the weights");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    bytes[8 + header..].fill(0xff); // NaN in every float type
    std::fs::write(&path, bytes).expect("written");
    let ran = place.run(&["run", "--model", ".", "--raw", ONCE, "-n", "4"]);
    ran.check(65, "the model's logits hold NaN").check(65, "hint: the model's weights are probably damaged");
}

#[test]
fn a_dry_run_has_the_context_of_a_real_one() {
    let prompt = ["--raw", "one two three four five six"];
    let Some(real) = run(&[&prompt[..], &["--kv-memory", "24K"]].concat()) else { return };
    let dry = run(&[&prompt[..], &["--kv-memory", "24K", "--dry-run"]].concat()).expect("fixtures");
    let refusal = |ran: &Ran| {
        ran.check(65, "by --kv-memory");
        ran.stderr
            .lines()
            .filter(|line| line.contains("limited") || line.starts_with("error"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(refusal(&dry), refusal(&real));
    run(&[&prompt[..], &["--kv-memory", "1", "--dry-run"]].concat())
        .expect("fixtures")
        .check(2, "--kv-memory");
    run(&[&prompt[..], &["--ctx", "100000", "--dry-run"]].concat()).expect("fixtures").check(2, "100000");
    let shown = run(&[&prompt[..], &["--ctx", "64", "--dry-run"]].concat()).expect("fixtures");
    shown.check(0, "of a context of 64");
}

#[test]
fn a_long_prompt_through_stdin_arrives_whole() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    let long = "word ".repeat(100_000);
    let ran = finish(place.command(&["run", "--model", &model, "--raw", "--dry-run"]), &long);
    ran.check(65, "but the context holds 512");
    assert_eq!(ran.stdout, format!("{long}\n"));
}

const COLOUR: &str = r#"{"type": "object", "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"], "additionalProperties": false}"#;

#[test]
fn answers_keep_to_a_schema_a_grammar_or_a_regular_expression() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    let run = |flags: &[&str]| {
        let base =
            ["run", "--model", &model, "--raw", "--seed", "3", "--temperature", "1", "Once upon a time"];
        place.command(&[&base, flags].concat())
    };
    let schema = place.write("schema.json", COLOUR);
    let colours = ["{\"colour\": \"red\"}\n", "{\"colour\": \"green\"}\n"];
    for ran in [
        finish(run(&["--schema", COLOUR]), ""),
        finish(run(&["--schema", schema.to_str().expect("UTF-8")]), ""),
        finish(run(&["--schema", "-"]), COLOUR),
    ] {
        ran.check(0, "");
        assert!(colours.contains(&&*ran.stdout), "{ran:?}");
    }
    let ran = finish(run(&["--regex", "[0-9]{4}", "--output", "json"]), "");
    ran.check(0, "");
    let object: Value = serde_json::from_str(&ran.stdout).expect("JSON");
    let text = object["text"].as_str().expect("a text");
    assert!(text.len() == 4 && text.bytes().all(|byte| byte.is_ascii_digit()), "{object}");
    assert_eq!(object["finish_reason"], "stop");
    let grammar = place.write("list.lark", "start: WORD (\", \" WORD){2}\nWORD: \"yes\" | \"no\"\n");
    let ran = finish(run(&["--grammar", grammar.to_str().expect("UTF-8")]), "");
    ran.check(0, "");
    assert_eq!(ran.stdout.trim_end().split(", ").filter(|word| ["yes", "no"].contains(word)).count(), 3);
}

#[test]
fn an_answer_cut_before_it_is_complete_exits_with_3_and_what_cannot_be_kept_to_is_refused() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    let run = |flags: &[&str]| place.run(&[&["run", "--model", &model, "--raw", "hi"], flags].concat());
    run(&["--schema", COLOUR, "--max-tokens", "4"])
        .check(3, "the answer was cut before it satisfied --schema");
    run(&["--regex", "[a-z]{500}", "--max-tokens", "4"]).check(3, "before it satisfied --regex");
    run(&["--schema", r#"{"not": {}}"#]).check(65, "--schema: \"not\" cannot be enforced");
    run(&["--schema", r#"{"type": "#]).check(65, "--schema: not JSON");
    run(&["--schema", "./none.json"]).check(66, "none.json");
    run(&["--regex", "("]).check(65, "--regex: ");
    run(&["--regex", "a", "--schema", COLOUR]).check(2, "cannot be used with");
    run(&["--regex", "a", "--prefill-response", "b"]).check(2, "cannot be used with");
    run(&["--schema", "-", "--prompt-file", "-"]).check(2, "cannot both be read from stdin");
}

#[test]
fn batch_rows_say_what_their_answers_keep_to() {
    let Some(model) = stories() else { return };
    let place = Place::new();
    let row = |id: &str, format: Value| {
        serde_json::json!({"custom_id": id, "prompt": "Once", "max_tokens": 60, "response_format": format})
            .to_string()
    };
    let schema: Value = serde_json::from_str(COLOUR).expect("JSON");
    let rows = [
        row(
            "schema",
            serde_json::json!({"type": "json_schema", "json_schema": {"name": "c", "schema": schema, "strict": true}}),
        ),
        row("text", serde_json::json!({"type": "text"})),
        row("not", serde_json::json!({"type": "json_schema", "json_schema": {"schema": {"not": {}}}})),
    ];
    place.write("rows.jsonl", rows.join("\n"));
    let ran = place.run(&["run", "--model", &model, "--raw", "--batch", "rows.jsonl"]);
    ran.check(4, "\"not\" cannot be enforced");
    let results: Vec<Value> =
        ran.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let text = results[0]["response"]["body"]["choices"][0]["text"].as_str().expect("a text");
    assert!(["{\"colour\": \"red\"}", "{\"colour\": \"green\"}"].contains(&text), "{text}");
    assert!(results[1]["response"]["body"]["choices"][0]["text"].is_string());
    let error = results[2].to_string();
    assert!(error.contains("unsupported_parameter") && error.contains("response_format"), "{error}");
}

#[test]
fn slow_kernels_are_noted_once_unless_chosen_or_quiet() {
    let ask =
        |args: &[&str]| llmctl(&[&["run", "--model", "guide", "--max-tokens", "1", "hello"], args].concat());
    let num_notes = |args: &[&str]| {
        let ran = ask(args);
        ran.check(0, "");
        ran.stderr.matches("prompts take about").count()
    };
    assert_eq!(num_notes(&["-v", "--cpu", "scalar"]), 1);
    assert_eq!(num_notes(&["--cpu", "scalar"]), 0);
    assert_eq!(num_notes(&["-q", "--cpu", "scalar"]), 0);
    let is_slow = llmctl_models::load::Isa::detect() == llmctl_models::load::Isa::Scalar;
    let is_chosen = std::env::var_os(crate::common::CPU).is_some();
    assert_eq!(num_notes(&[]), usize::from(is_slow && !is_chosen));
    assert_eq!(num_notes(&["-q"]), 0);
}

/// Runs with a model that says what a test wants.
fn scripted_run(place: &Place, more: &[&str]) -> Ran {
    scripted::write(&place.path("model"));
    scripted::write(&place.path("other"));
    place.run(&[&["run", "--model", "model", "--system", &"Be kind. ".repeat(20)], more].concat())
}

#[test]
fn a_prompt_is_compared_under_variations_that_share_its_pages() {
    let place = Place::new();
    let both = "temperature=0 | prompt='some code'";
    let args = ["say it", "--compare", both, "--compare", "other seed=7", "--compare", "seed=8"];
    let ran = scripted_run(&place, &args);
    ran.check(0, "");
    assert!(ran.stdout.starts_with(&format!("== temperature=0\n{PLAIN}\n\n== prompt=some code\n{CODE}\n\n")));
    assert!(
        ran.stdout.contains(&format!("== other seed=7\n{PLAIN}\n\n== seed=8\n{PLAIN}\n\nVARIATION  ")),
        "{ran:?}"
    );
    let ran = scripted_run(&place, &[&args[..], &["--output", "json"]].concat());
    let value: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    assert_eq!(value["schema"], "llmctl.compare.v1");
    let rows = value["variations"].as_array().expect("rows");
    let cached =
        |row: &Value| row["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
    let models: Vec<_> = rows.iter().map(|row| row["model"].as_str().expect("a name")).collect();
    assert_eq!(models, ["model", "model", "other", "model"]);
    assert_eq!(cached(&rows[0]), 0);
    assert!(cached(&rows[1]) >= 32 && cached(&rows[3]) >= cached(&rows[1]), "{value:#}");
    assert_eq!(cached(&rows[2]), 0, "another model has pages of its own");
    assert_eq!((&rows[2]["seed"], &rows[3]["seed"]), (&7.into(), &8.into()));
    assert_eq!(rows[1]["message"]["content"], CODE);
    assert!(rows.iter().all(|row| row["finish_reason"] == "stop" && row["timings"]["total_ms"].is_number()));
}

#[test]
fn a_template_prints_the_date_of_the_time_zone() {
    let place = Place::new();
    scripted::write(&place.path("model"));
    place.write("dated.jinja", "{{ strftime_now('%F') }} {{ messages[0].content }}");
    // More than a day apart: rules, and names where the system has a database of them.
    let has_names = Path::new("/usr/share/zoneinfo/Pacific/Kiritimati").exists();
    let zones = [["WEST+12", "EAST-14"], ["Etc/GMT+12", "Pacific/Kiritimati"]];
    for zones in &zones[..1 + usize::from(has_names)] {
        let dates = zones.map(|zone| {
            let args = ["run", "--model", "model", "--chat-template", "dated.jinja", "--dry-run", "hi"];
            let mut command = place.command(&args);
            command.env("TZ", zone);
            finish(command, "").check(0, "").stdout.clone()
        });
        assert_ne!(dates[0], dates[1], "{zones:?}");
    }
}

#[test]
fn a_variation_changes_how_the_flags_think() {
    let place = Place::new();
    let args =
        ["think", "--think", "6", "--compare", "think=hide | think=show | think=on", "--output", "json"];
    let ran = scripted_run(&place, &args);
    let value: Value = serde_json::from_str(&ran.check(0, "").stdout).expect("JSON");
    let (hidden, shown, on) = (&value["variations"][0], &value["variations"][1], &value["variations"][2]);
    assert_eq!(hidden["message"].get("reasoning_content"), None, "{value:#}");
    assert!(shown["message"]["reasoning_content"].is_string(), "{value:#}");
    let count = |row: &Value| row["usage"]["completion_tokens"].as_u64().expect("a count");
    assert!(count(hidden) == count(shown) && count(shown) < count(on), "{value:#}");
}

#[test]
fn a_variation_that_fails_is_named_and_the_others_are_answered() {
    let place = Place::new();
    let long = format!("prompt='{}'", "word ".repeat(3000));
    let ran = scripted_run(&place, &["say it", "--compare", "nowhere | seed=1", "--compare", &long]);
    ran.check(4, "nowhere: ");
    assert!(
        ran.stdout.contains("== nowhere\nerror: ") && ran.stdout.contains(&format!("== seed=1\n{PLAIN}\n"))
    );
    assert!(ran.stdout.contains("error: the prompt"), "{}", ran.stdout);
    scripted_run(&place, &["say it", "--compare", "sed=1"]).check(2, "--compare: unknown key \"sed\"");
    scripted_run(&place, &["say it", "--compare", "seed=x"]).check(2, "--compare seed: ");
    scripted_run(&place, &["say it", "--compare", "seed=1", "--session", "s"]).check(2, "--session");
}
