//! Checks which kinds of messages a template prints, refuses, or silently leaves out.

use serde_json::json;

use super::matrix::{
    ANSWERS, DESCRIPTION, QUESTIONS, RESULT, SYSTEM, THOUGHTS, TOOL, answer, call, calls, in_parts, question,
    talk, talk_with_tools, thoughtful, weather_call, weather_result,
};
use super::{CheckResult, CheckVerdict, Finding, Subject, quoted};
use crate::{CallEvidence, Content, Conversation, Message, Role, Sign, SystemMessages, ToolCallFormat};

/// Reports the reasoning format that the template shows, and the line.
pub fn reasoning_format(subject: &Subject) -> CheckResult {
    let shown = subject
        .shown
        .reasoning
        .filter(|_| subject.shown.output_markup.reasoning == subject.output_markup.reasoning);
    Ok(match (subject.output_markup.reasoning, shown) {
        (None, _) => Finding::ok("none: the template shows no markup for reasoning"),
        (Some(format), None) => Finding::ok(format!("{format}, as asked for")),
        (Some(format), Some(sign)) => seen(format.name(), sign, ""),
    })
}

/// A format that the template itself shows.
fn seen(format: &str, sign: Sign, more: &str) -> Finding {
    let place = match sign.line {
        0 => "in what the template prints".to_owned(),
        line => format!("in template line {line}"),
    };
    let detail = json!({"format": format, "sign": sign.text, "line": sign.line});
    Finding::ok(format!("{format}: {} {place}{more}", quoted(sign.text))).with(detail)
}

/// Reports the tool-call format that the template shows and the evidence, or the one that llmctl asks for instead.
pub fn tool_format(subject: &Subject) -> CheckResult {
    let Some(format) = subject.output_markup.tool_calls else { return Ok(Finding::ok("none")) };
    let evidence = subject.shown.calls.filter(|_| subject.shown.output_markup.tool_calls == Some(format));
    Ok(match (format, evidence) {
        (ToolCallFormat::Generic, _) => {
            let why = match (subject.shown.tools, subject.shown.output_markup.tool_calls) {
                (false, None) => "the template shows no tools",
                (false, Some(_)) => "the template shows calls, and no tools",
                (true, _) => "the template shows tools, and no calls in a format that llmctl knows",
            };
            let reason = format!("generic: {why}; llmctl describes tools and asks for calls in JSON");
            Finding::ok(reason).with(json!({"format": format.name()}))
        }
        (_, None) => Finding::ok(format!("{format}, as asked for")),
        (_, Some(CallEvidence { sign, is_printed })) => {
            let more =
                if is_printed { ", and a call that it prints reads back" } else { "; it prints no calls" };
            let mut finding = seen(format.name(), sign, more);
            finding.detail["prints_calls"] = is_printed.into();
            finding
        }
    })
}

/// The prompt of a conversation holds all these words.
fn printed(subject: &Subject, conversation: &Conversation, words: &[&str]) -> CheckResult {
    let text = subject.prompt(conversation)?;
    let missing: Vec<String> =
        words.iter().filter(|word| !text.contains(**word)).map(|word| quoted(word)).collect();
    Ok(match &missing[..] {
        [] => Finding::ok("printed"),
        missing => Finding::fail(format!("left out without a word: {}", missing.join(", "))),
    })
}

pub fn system_prompt(subject: &Subject) -> CheckResult {
    let asked = talk([Message::system(SYSTEM), question(0)]);
    let finding = printed(subject, &asked, &[SYSTEM, QUESTIONS[0]])?;
    Ok(with_change(finding, subject.shown.system, "puts it in front of the question"))
}

/// Warns of what llmctl does for a template that does not print a system message itself.
fn with_change(finding: Finding, system: SystemMessages, change: &str) -> Finding {
    let way = match system {
        SystemMessages::Printed => None,
        SystemMessages::Dropped => Some("left out by the template"),
        SystemMessages::Refused => Some("refused by the template"),
    };
    match way.filter(|_| finding.verdict == CheckVerdict::Ok) {
        Some(way) => Finding::warning(format!("{way}; llmctl {change}")),
        None => finding,
    }
}

/// The server sends what a template does not know as a system prompt.
pub fn developer_role(subject: &Subject) -> CheckResult {
    if !subject.template.has_literal(Role::Developer.as_str()) {
        return Ok(Finding::ok("not known to the template, and sent as a system prompt"));
    }
    printed(subject, &talk([Message::new(Role::Developer, SYSTEM), question(0)]), &[SYSTEM, QUESTIONS[0]])
}

pub fn late_system_prompt(subject: &Subject) -> CheckResult {
    let messages = [question(0), answer(0), Message::system(SYSTEM), question(1)];
    let finding = printed(subject, &talk(messages), &[QUESTIONS[0], ANSWERS[0], SYSTEM, QUESTIONS[1]])?;
    Ok(with_change(finding, subject.shown.later_system, "puts it into the user turn beside it"))
}

pub fn two_questions(subject: &Subject) -> CheckResult {
    printed(subject, &talk([question(0), question(1)]), &QUESTIONS[..2])
}

pub fn answer_first(subject: &Subject) -> CheckResult {
    printed(subject, &talk([answer(0), question(0)]), &[ANSWERS[0], QUESTIONS[0]])
}

pub fn empty_answer(subject: &Subject) -> CheckResult {
    printed(subject, &talk([question(0), Message::assistant(""), question(1)]), &QUESTIONS[..2])
}

/// Only a warning where it is not printed: the server joins text parts before the template sees them.
pub fn text_parts(subject: &Subject) -> CheckResult {
    let finding = printed(subject, &talk([in_parts([QUESTIONS[0], QUESTIONS[1]])]), &QUESTIONS[..2]);
    let finding = finding.unwrap_or_else(Finding::from);
    Ok(match finding.verdict {
        CheckVerdict::Fail | CheckVerdict::Warning => {
            Finding::warning(format!("{}; the server sends parts as one text", finding.reason))
        }
        _ => finding,
    })
}

/// Tools are described to the model. Where they are not, requests with tools are refused.
pub fn tools(subject: &Subject) -> CheckResult {
    let words = [TOOL, DESCRIPTION, "Name of the harbour", QUESTIONS[0]];
    let alone = printed(subject, &talk_with_tools([question(0)]), &words)?;
    let beside_system = talk_with_tools([Message::system(SYSTEM), question(0)]);
    if subject.output_markup.tool_calls == Some(ToolCallFormat::Generic) && alone.verdict == CheckVerdict::Ok
    {
        return Ok(Finding::ok("described by llmctl in the system prompt"));
    }
    // Another check reports a template that refuses system prompts.
    Ok(match printed(subject, &beside_system, &words) {
        Ok(beside) if beside.verdict > alone.verdict => {
            Finding { reason: format!("beside a system prompt: {}", beside.reason), ..beside }
        }
        _ => alone,
    })
}

pub fn tool_results(subject: &Subject) -> CheckResult {
    let asked = talk_with_tools([question(0), weather_call(), weather_result()]);
    printed(subject, &asked, &[QUESTIONS[0], RESULT])
}

/// An answer with content and a call.
pub fn call_with_text(subject: &Subject) -> CheckResult {
    subject.calls()?;
    let content = Some(Content::Text(ANSWERS[0].to_owned()));
    let called = Message { content, ..calls([call(0, TOOL, json!({"city": "Bergen"}))]) };
    printed(subject, &talk_with_tools([question(0), called, weather_result()]), &[ANSWERS[0], "Bergen"])
}

/// Checks whether the template prints the reasoning of earlier turns.
pub fn reasoning_in_history(subject: &Subject) -> CheckResult {
    let format = subject.reasoning()?;
    let earlier = subject.prompt(&talk([question(0), thoughtful(0), question(1)]))?.contains(THOUGHTS[0]);
    let call = Message { reasoning: Some(THOUGHTS[0].to_owned()), ..weather_call() };
    let in_loop = subject.prompt(&talk_with_tools([question(0), call, weather_result()]));
    let in_loop = in_loop.ok().map(|text| text.contains(THOUGHTS[0]));
    let word = |is_kept: bool| if is_kept { "kept" } else { "left out" };
    let within =
        in_loop.map_or_else(String::new, |kept| format!(", {} between calls of one turn", word(kept)));
    let (open, close) = subject.output_markup.may_reason("").unwrap_or_default();
    let inline = Message::assistant(format!("{open}\n{}\n{close}\n\n{}", THOUGHTS[0], ANSWERS[0]));
    let text = subject.prompt(&talk([question(0), inline, question(1)]))?;
    let last = subject.history(&talk([question(0), thoughtful(0)]))?.contains(THOUGHTS[0]);
    let reason = format!("reasoning of earlier turns is {}{within}", word(earlier));
    let is_inline = !open.is_empty() && text.contains(THOUGHTS[0]) && !earlier;
    let finding = if !earlier && !last && in_loop != Some(true) {
        Finding::warning("no reasoning that comes with a message is shown, of no turn")
    } else if is_inline {
        // Clients that do not know of reasoning send it back as part of the content.
        Finding::ok(format!("{reason}; what a client sends back inside the content stays"))
    } else {
        Finding::ok(reason)
    };
    Ok(finding.with(json!({"format": format.name(), "earlier_turns": earlier, "between_calls": in_loop})))
}
