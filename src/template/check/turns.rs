//! Checks where turns begin and end: the header that asks for an answer, the tokens in front of the first turn and behind the
//! last.

use serde_json::json;

use super::matrix::{
    ANSWERS, QUESTIONS, RESULT, answer, question, talk, talk_with_tools, weather_call, weather_result,
};
use super::{CheckError, CheckResult, CheckVerdict, Finding, NOW, Subject, quoted};
use crate::{Conversation, DateTime};

/// Without this nothing works: an author who refuses a plain question means another use.
pub fn plain_question(subject: &Subject) -> CheckResult {
    match subject.prompt(&talk([question(0)])) {
        Ok(text) if text.contains(QUESTIONS[0]) => {
            let ids = subject.encode(&text, true)?;
            Ok(Finding::ok(format!("{} {}s: {}", ids.len(), subject.unit(), quoted(&text))))
        }
        Ok(text) => Ok(Finding::fail(format!("the question is not in the prompt: {}", quoted(&text)))),
        Err(trouble) => Ok(Finding { verdict: CheckVerdict::Fail, ..Finding::from(trouble) }),
    }
}

/// The beginning-of-sequence token stands in front once, or the model has none.
pub fn bos(subject: &Subject) -> CheckResult {
    let text = subject.prompt(&talk([question(0)]))?;
    let Some(bos) = subject.bos.as_deref().filter(|bos| !bos.is_empty()) else {
        return Ok(Finding::ok("the model has none"));
    };
    let writes = text.starts_with(bos);
    let Some(tokenizer) = &subject.tokenizer else {
        let is_doubled = text.strip_prefix(bos).is_some_and(|rest| rest.trim_start().starts_with(bos));
        return Ok(match (writes, is_doubled) {
            (_, true) => Finding::fail(format!("the template writes {} twice", quoted(bos))),
            (true, false) => Finding::ok(format!("the template writes {}", quoted(bos))),
            (false, false) => Finding::ok("the template writes none; the tokenizer decides"),
        });
    };
    let ids = subject.encode(&text, true)?;
    let count = ids.iter().take_while(|&&id| Some(id) == tokenizer.bos()).count();
    let by = match (writes, tokenizer.adds_bos()) {
        (true, true) => "written by the template and asked for by the tokenizer, and put in front once",
        (true, false) => "written by the template",
        (false, true) => "put in front by the tokenizer",
        (false, false) => "neither written by the template nor asked for by the tokenizer",
    };
    let detail = json!({"id": tokenizer.bos(), "count": count, "in_template": writes, "by_tokenizer": tokenizer.adds_bos()});
    let finding = match count {
        // A template that writes the text of a token which is none for the tokenizer.
        0 if writes => {
            Finding::fail(format!("the template writes {}, which is text for the tokenizer", quoted(bos)))
        }
        0 | 1 => Finding::ok(format!("{}: {by}", quoted(bos))),
        _ => Finding::fail(format!("{} stands {count} times in front of the prompt", quoted(bos))),
    };
    Ok(finding.with(detail))
}

/// The prompt ends where history has the answer.
pub fn generation_prompt(subject: &Subject) -> CheckResult {
    let findings = subject.modes().into_iter().map(|(mode, kwargs)| {
        let asked = Conversation { kwargs, ..talk([question(0)]) };
        let finding = place_of_answer(subject, &asked)?;
        Ok(Finding { reason: finding.reason + mode, ..finding })
    });
    let findings = findings.collect::<Result<Vec<Finding>, CheckError>>()?;
    Ok(super::worst(findings).unwrap_or_else(|| Finding::skipped("nothing to render")))
}

/// Checks the generation prompt behind a tool's result.
pub fn prompt_after_tools(subject: &Subject) -> CheckResult {
    place_of_answer(subject, &talk_with_tools([question(0), weather_call(), weather_result()]))
}

fn place_of_answer(subject: &Subject, asked: &Conversation) -> CheckResult {
    let (prompt, plain) = (subject.prompt(asked)?, subject.history(asked)?);
    let mut answered = asked.clone();
    answered.messages.push(answer(0));
    let full = subject.history(&answered)?;
    let Some(before) = full.rfind(ANSWERS[0]).map(|at| &full[..at]) else {
        return Ok(Finding::fail(format!("history does not hold the answer: {}", quoted(&full))));
    };
    let has_effect = prompt != plain;
    let added = match prompt.strip_prefix(plain.as_str()) {
        Some("") => "nothing, and needs nothing".to_owned(),
        Some(header) => quoted(header),
        None => format!("{} in place of the end of the history", quoted(tail(&prompt))),
    };
    let (asked_for, printed) = (subject.without_empty_think(&prompt), subject.without_empty_think(before));
    if asked_for == printed {
        return Ok(Finding::ok(format!("add_generation_prompt adds {added}")));
    }
    Ok(match printed.strip_prefix(asked_for) {
        Some(missing) if has_effect || is_markup(subject, missing) => Finding::ok(format!(
            "add_generation_prompt adds {added}; the model writes {} itself",
            quoted(missing)
        )),
        Some(missing) => Finding::fail(format!(
            "add_generation_prompt has no effect: nothing asks for an answer, which history begins with {}",
            quoted(missing)
        )),
        None => Finding::warning(format!(
            "answers are asked for behind {} and stand behind {} in history",
            quoted(tail(asked_for)),
            quoted(tail(printed))
        )),
    })
}

/// Returns whether a text consists of the format's markers alone.
fn is_markup(subject: &Subject, text: &str) -> bool {
    let markup = subject.output_markup.markers();
    let rest = markup.iter().fold(text.to_owned(), |rest, mark| rest.replace(mark, ""));
    rest.trim().is_empty()
}

/// The last characters of a text.
fn tail(text: &str) -> &str {
    &text[text.floor_char_boundary(text.len().saturating_sub(40))..]
}

/// Checks that history puts a token behind an answer that ends a generation.
pub fn turn_end(subject: &Subject) -> CheckResult {
    let behind = |text: String| text.rfind(ANSWERS[0]).map(|at| text[at + ANSWERS[0].len()..].to_owned());
    let last = behind(subject.history(&talk([question(0), answer(0)]))?);
    let inner = subject.history(&talk([question(0), answer(0), question(1)])).map(behind);
    let places = [("", inner.ok().flatten()), (" (only behind the last answer)", last)];
    ends_with_token(subject, "an answer", &places)
}

/// Checks that history puts such a token behind a call.
pub fn turn_end_of_calls(subject: &Subject) -> CheckResult {
    subject.calls()?;
    let behind = |text: String| {
        let at = text.rfind("Bergen")? + "Bergen".len();
        let end = text[at..].find(RESULT).map_or(text.len(), |end| at + end);
        Some(text[at..end].to_owned())
    };
    let last = behind(subject.history(&talk_with_tools([question(0), weather_call()]))?);
    let inner =
        subject.history(&talk_with_tools([question(0), weather_call(), weather_result()])).map(behind);
    let places = [("", inner.ok().flatten()), (" (only behind the last call)", last)];
    ends_with_token(subject, "a call", &places)
}

/// Looks for an id that ends a generation in the text of the first place that has one.
fn ends_with_token(subject: &Subject, what: &str, places: &[(&str, Option<String>)]) -> CheckResult {
    let tokenizer = subject.tokenizer.as_ref().ok_or(CheckError::Skipped("needs a tokenizer"))?;
    let mut printed = None;
    for (note, text) in places {
        let Some(text) = text else { continue };
        let ids = subject.encode(text, false)?;
        if let Some(&id) = ids.iter().find(|id| subject.end_of_generation.contains(id)) {
            let name = tokenizer.name(id).unwrap_or_default();
            let finding = Finding::ok(format!("{} ({id}) ends {what}{note}", quoted(name)));
            return Ok(finding.with(json!({"id": id, "token": name})));
        }
        printed.get_or_insert_with(|| text.clone());
    }
    let named = |&id| format!("{} ({id})", tokenizer.name(id).unwrap_or("no token"));
    let ends: Vec<String> = subject.end_of_generation.iter().map(named).collect();
    let ends = if ends.is_empty() { "nothing".to_owned() } else { ends.join(", ") };
    Ok(match printed {
        None => Finding::fail(format!("{what} is not in the history")),
        Some(text) => {
            Finding::fail(format!("{what} is followed by {}, and generation ends with {ends}", quoted(&text)))
        }
    })
}

/// Prompts do not change with the time of day.
pub fn clock(subject: &Subject) -> CheckResult {
    let asked = talk([question(0)]);
    let at = |now: DateTime| subject.rendered(&asked, true, now);
    let now = at(NOW)?;
    let (later, tomorrow) =
        (at(DateTime { hour: NOW.hour + 1, ..NOW })?, at(DateTime { day: NOW.day + 1, ..NOW })?);
    Ok(match (now == later, now == tomorrow) {
        (false, _) => Finding::warning(
            "prints the time of day: prompts of different conversations share nothing behind it; one conversation keeps its own",
        ),
        (true, false) => Finding::ok(
            "prints the date: prompts of different days share nothing behind it; one conversation keeps its own",
        ),
        (true, true) => Finding::ok("prompts do not depend on the time"),
    })
}
