//! Each kind of finding, on one small template with one thing wrong at a time.

use super::*;
use llmctl_template::check::{Check, CheckVerdict, check};

/// ChatML with tools and calls in `<tool_call>`, and whatever is to be wrong with it.
fn chatml(changes: &[(&str, &str)]) -> String {
    let mut source = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}\
        {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>\n\
        {\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>\
        {% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        .to_owned();
    for (from, to) in changes {
        assert!(source.contains(from), "{from}");
        source = source.replace(from, to);
    }
    source
}

fn checked(source: &str) -> Vec<Check> {
    check(subject(source, None, Vec::new(), OutputMarkup::default()).as_ref())
}

#[track_caller]
fn finds(changes: &[(&str, &str)], name: &str, verdict: CheckVerdict, reason: &str) {
    let checks = checked(&chatml(changes));
    let found = checks.iter().find(|check| check.name == name).expect("a check of that name");
    assert_eq!(found.verdict, verdict, "{name}: {}", found.reason);
    assert!(found.reason.contains(reason), "{name}: {reason:?} is not in {:?}", found.reason);
}

#[test]
fn a_template_as_it_should_be() {
    let checks = checked(&chatml(&[]));
    let worse = |check: &&Check| check.verdict > CheckVerdict::Ok;
    let worse: Vec<&Check> = checks.iter().filter(worse).filter(|check| check.name != "text-parts").collect();
    assert!(worse.is_empty(), "{worse:#?}");
    finds(&[], "tool-format", CheckVerdict::Ok, "hermes: \"<tool_call>\" in template line");
    finds(&[], "generation-prompt", CheckVerdict::Ok, "adds \"<|im_start|>assistant\\n\"");
    finds(&[], "prefix", CheckVerdict::Ok, "each of 3 prompts");
    finds(&[], "prefix-after-tools", CheckVerdict::Ok, "each of 4 prompts");
    finds(&[], "text-parts", CheckVerdict::Ok, "printed");
}

#[test]
fn a_template_that_does_not_compile_is_one_finding_with_a_line() {
    let checks = checked("a\n{% if %}");
    assert_eq!(checks.len(), 1);
    assert_eq!((checks[0].name, checks[0].verdict), ("syntax", CheckVerdict::Fail));
    assert!(checks[0].reason.contains("line 2"), "{}", checks[0].reason);
}

#[test]
fn what_is_missing_is_found() {
    let no_header = ("{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "");
    finds(&[no_header], "generation-prompt", CheckVerdict::Fail, "has no effect");
    finds(&[no_header], "prompt-after-tools", CheckVerdict::Fail, "has no effect");
    // Calls that do not read back are no evidence of a format, and tools that are not named have to be.
    let no_arguments = ("{{ c.function.arguments | tojson }}", "{}");
    finds(
        &[no_arguments],
        "tool-format",
        CheckVerdict::Ok,
        "generic: the template shows tools, and no calls",
    );
    let no_tools = ("{{ t | tojson }}", "a tool");
    finds(&[no_tools], "tool-format", CheckVerdict::Ok, "generic: the template shows calls, and no tools");
    finds(&[no_tools], "tools", CheckVerdict::Ok, "described by llmctl in the system prompt");
    finds(&[no_tools], "round-trip", CheckVerdict::Ok, "parse back as generic");
    let no_system = ("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}");
    finds(&[no_system], "system-prompt", CheckVerdict::Warning, "left out by the template; llmctl puts it");
    let two_bos = ("{% if tools %}<|im", "{{ bos_token }}{{ bos_token }}{% if tools %}<|im");
    finds(&[two_bos], "bos", CheckVerdict::Fail, "twice");
}

#[test]
fn a_refusal_is_a_warning_with_its_line() {
    let refusal = (
        "{% for m in messages %}",
        "\n{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}",
    );
    finds(&[refusal], "system-prompt", CheckVerdict::Warning, "refused by the template; llmctl puts it");
    finds(&[refusal], "prefix", CheckVerdict::Ok, "each of 3 prompts");
    let picky = ("in m.tool_calls or [] %}", "in m.tool_calls or [] if m.content is not defined %}");
    finds(&[picky], "round-trip", CheckVerdict::Warning, "only of answers without content");
}

#[test]
fn prompts_that_are_not_the_beginning_of_the_next_are_shown_where_they_part() {
    // The number of messages in front: nothing can be used again.
    let counted = ("{% for m in messages %}", "{{ messages | length }}{% for m in messages %}");
    finds(&[counted], "prefix", CheckVerdict::Fail, "prompt 2 leaves the one before it at character 0 of");
    // History has a header that the prompt has not: sessions get over it.
    let scaffold =
        ("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}");
    finds(&[scaffold], "prefix", CheckVerdict::Warning, "sessions stay warm");
    finds(&[scaffold], "generation-prompt", CheckVerdict::Ok, "</think>");
    let clock = ("{% if tools %}", "{{ strftime_now('%H:%M') }}{% if tools %}");
    finds(&[clock], "clock", CheckVerdict::Warning, "time of day");
}
