//! `llmctl template check`: what it finds in every published template, with real tokenizers, and as a command.

use std::fmt::Write as _;
use std::fs;

use llmctl_engine::template_check::subject;
use llmctl_models::load::TextFiles;
use llmctl_template::check::{Check, CheckVerdict, check};

use crate::common::prelude::*;
use crate::dialects::templates;

fn sign(verdict: CheckVerdict) -> char {
    match verdict {
        CheckVerdict::Skipped => '-',
        CheckVerdict::Ok => '.',
        CheckVerdict::Warning => 'w',
        CheckVerdict::Fail => 'F',
    }
}

/// A letter per check, and a line per template.
#[test]
fn every_published_template_is_judged() {
    let Some(templates) = templates() else { return };
    let check_text =
        |source: &String| check(subject(source, None, Vec::new(), OutputMarkup::default()).as_ref());
    let all: BTreeMap<&String, Vec<Check>> =
        templates.iter().map(|(name, source)| (name, check_text(source))).collect();
    let longest = all.values().max_by_key(|checks| checks.len()).expect("templates");
    let mut table = String::new();
    for (letter, check) in ('a'..).zip(longest) {
        writeln!(table, "{letter} {}", check.name).expect("a string takes everything");
    }
    let letters: String = ('a'..).take(longest.len()).collect();
    writeln!(table, "\n{letters}").expect("a string takes everything");
    for (name, checks) in &all {
        let line: String = checks.iter().map(|check| sign(check.verdict)).collect();
        writeln!(table, "{line:width$} {name}", width = longest.len()).expect("a string takes everything");
    }
    insta::assert_snapshot!("templates", table);
    let mut failures = String::new();
    for (name, checks) in &all {
        for check in checks.iter().filter(|check| check.verdict == CheckVerdict::Fail) {
            writeln!(failures, "{name}: {}: {}", check.name, check.reason)
                .expect("a string takes everything");
        }
    }
    insta::assert_snapshot!("failures", failures);
}

/// A model's text files, from where the fixtures have them: tokenizer.json, folder of settings, template.
const MODELS: [(&str, &str, &str, &str); 8] = [
    ("qwen3", "assembled/qwen3/tokenizer.json", "qwen3", "llama.cpp/Qwen-Qwen3-0.6B.jinja"),
    ("qwen2.5", "assembled/qwen2.5/tokenizer.json", "qwen2.5", "llama.cpp/Qwen-Qwen2.5-7B-Instruct.jinja"),
    ("llama3.2", "assembled/llama3.2/tokenizer.json", "", "llama.cpp/meta-llama-Llama-3.2-3B-Instruct.jinja"),
    ("gpt-oss", "assembled/gpt-oss/tokenizer.json", "gpt-oss", "llama.cpp/openai-gpt-oss-120b.jinja"),
    ("phi-4", "assembled/phi-4/tokenizer.json", "phi-4", ""),
    ("phi-3-mini", "phi-3-mini/tokenizer.json", "phi-3-mini", ""),
    ("mistral-v3", "assembled/mistral-v3/tokenizer.json", "mistral-v1", "mistral-common/v3_spm.jinja"),
    ("llama2", "llama2/tokenizer.json", "llama2", "mistral.rs/llama2.json"),
];

/// Settings of tokenizers that lie elsewhere.
fn settings(name: &str) -> Option<&'static str> {
    (name == "llama3.2").then_some("llama3/tokenizer_config.llama-3.2-1b-instruct.json")
}

fn model_folder(name: &str) -> Option<TempDir> {
    let root = fixtures()?;
    let (_, tokenizer, folder, template) = *MODELS.iter().find(|(known, ..)| *known == name)?;
    let (tokenizers, place) = (root.join("tokenizers"), tempfile::tempdir().expect("a folder"));
    let copy = |from: PathBuf, to: &str| {
        if from.is_file() {
            fs::write(place.path().join(to), fs::read(from).expect("a fixture")).expect("a file");
        }
    };
    copy(tokenizers.join(tokenizer), "tokenizer.json");
    for file in ["tokenizer_config.json", "generation_config.json"] {
        copy(tokenizers.join(folder).join(file), file);
    }
    settings(name).into_iter().for_each(|file| copy(tokenizers.join(file), "tokenizer_config.json"));
    let kind = if template.ends_with(".json") { "chat_template.json" } else { "chat_template.jinja" };
    copy(root.join("templates").join(template), kind);
    Some(place)
}

fn checked(folder: &Path) -> Vec<Check> {
    let files = TextFiles::open(&ModelSource::Folder(folder.to_owned())).expect("text files");
    let template = files.chat_templates.default.expect("a template");
    check(subject(&template, files.tokenizer, files.end_of_generation, OutputMarkup::default()).as_ref())
}

#[test]
fn real_tokenizers_judge_by_their_tokens() {
    let mut report = String::new();
    for (name, ..) in MODELS {
        let Some(folder) = model_folder(name) else { return };
        writeln!(report, "{name}").expect("a string takes everything");
        for check in checked(folder.path()) {
            let (verdict, reason) = (check.verdict.word(), check.reason);
            writeln!(report, "  {verdict:8}{:22}{reason}", check.name).expect("a string takes everything");
        }
    }
    insta::assert_snapshot!("real_tokenizers", report);
}

fn verdict_of<'a>(report: &'a Value, name: &str) -> (&'a str, &'a Value) {
    let checks = report["checks"].as_array().expect("checks");
    let check = checks.iter().find(|check| check["check"] == name).expect("a check of that name");
    (check["verdict"].as_str().expect("a word"), &check["detail"])
}

#[test]
fn the_command_reports_and_its_exit_code_tells() {
    let place = Place::new();
    let model = parity_folder().join("llama").to_string_lossy().into_owned();
    let chatml = place.write(
        "good.jinja",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
         {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    );
    let good = place.run(&["template", "check", &model, "--chat-template", "good.jinja"]);
    good.check(0, "");
    assert!(good.stdout.contains("template   good.jinja\ntokenizer  384 tokens\n"), "{}", good.stdout);
    assert!(good.stdout.ends_with("0 failed, 2 skipped\n"), "{}", good.stdout);
    let json = place.run(&["template", "check", &model, "--chat-template", "good.jinja", "--output", "json"]);
    let report: Value = serde_json::from_str(&json.check(0, "").stdout).expect("JSON");
    assert_eq!(report["schema"], "llmctl.template_check.v1");
    assert_eq!((report["tokenizer_tokens"].as_u64(), report["num_failed"].as_u64()), (Some(384), Some(0)));
    let (verdict, detail) = verdict_of(&report, "turn-end");
    assert_eq!((verdict, detail["id"].as_u64()), ("ok", Some(4)));
    let (verdict, detail) = verdict_of(&report, "bos");
    assert_eq!((verdict, detail["count"].as_u64(), &detail["in_template"]), ("ok", Some(0), &false.into()));
    // A template alone, and one that forgets to ask for the answer.
    place.run(&["template", "check", "good.jinja"]).check(0, "");
    let text = fs::read_to_string(chatml).expect("text");
    place.write("bad.jinja", text.split("{% if add").next().expect("text"));
    let bad = place.run(&["template", "check", "bad.jinja"]);
    bad.check(1, "");
    let line = bad.stdout.lines().find(|line| line.contains("generation-prompt")).expect("a line");
    assert!(line.starts_with("fail ") && line.contains("has no effect"), "{line}");
    place.write("broken.jinja", "a\n{% if %}");
    let broken = place.run(&["template", "check", "broken.jinja"]);
    assert!(broken.check(1, "").stdout.contains("template line 2"), "{}", broken.stdout);
}

#[test]
fn what_cannot_be_checked_is_an_error() {
    let place = Place::new();
    place.run(&["template", "check", "/no/such/model"]).check(66, "/no/such/model");
    place.run(&["template", "check", "none.jinja"]).check(66, "none.jinja");
    place.write("a.jinja", "x");
    place.run(&["template", "check", "a.jinja", "--chat-template", "a.jinja"]).check(2, "a template itself");
    place.run(&["template"]).check(2, "Usage");
    // A tokenizer without weights is enough; one without a template is not.
    let tokenizer = fs::read(parity_folder().join("llama/tokenizer.json")).expect("a tokenizer");
    fs::create_dir(place.path("texts")).expect("a folder");
    place.write("texts/tokenizer.json", tokenizer);
    place.run(&["template", "check", "texts"]).check(65, "no chat template");
    place.write("texts/chat_template.jinja", "{% for m in messages %}{{ m.content }}\n{% endfor %}> ");
    let report = place.run(&["template", "check", "texts"]);
    assert!(report.stdout.contains("tokenizer  384 tokens"), "{report:?}");
    place.write("texts/tokenizer.json", "{");
    place.run(&["template", "check", "texts"]).check(65, "tokenizer.json");
}
