//! Checks whether each prompt of a conversation begins with all tokens of the prompt before it: only then can computed KV be
//! reused.
//!
//! Asked twice. As text, which is all that a request without a session has; and with the answers as the ids that were
//! generated, which is how sessions put them back: there the prompt must also hold the answer that it follows.

use serde_json::{Value, json};

use super::matrix::{
    RESULT, SYSTEM, TOOL, answer, call, calls, question, result, talk, talk_with_tools, thoughtful,
};
use super::{CheckResult, Finding, Subject, worst};
use crate::{Conversation, Message, Role};

/// Stands for ids that were generated: no id of a vocabulary, so that only a splice brings them back.
const GENERATED: u32 = 0xFFFF_0000;

/// Units of text shown around a difference.
const AROUND: usize = 8;

/// Three turns of text. The reasoning of the answers, if any, is not sent back.
pub fn plain(subject: &Subject) -> CheckResult {
    with_and_without_system(subject, || [question(0), answer(0), question(1), answer(1), question(2)])
}

/// Three turns whose answers come back with their reasoning.
pub fn with_reasoning(subject: &Subject) -> CheckResult {
    subject.reasoning()?;
    with_and_without_system(subject, || [question(0), thoughtful(0), question(1), thoughtful(1), question(2)])
}

fn with_and_without_system(subject: &Subject, turns: fn() -> [Message; 5]) -> CheckResult {
    in_all_modes(subject, &talk(turns()), &talk([Message::system(SYSTEM)].into_iter().chain(turns())))
}

/// A call, its result and the answer, then another question.
pub fn after_tools(subject: &Subject) -> CheckResult {
    subject.calls()?;
    let called = |city: &str| calls([call(0, TOOL, json!({"city": city}))]);
    let turns = |[first, second]: [Message; 2]| {
        let [one, two] = [RESULT, "a calm"].map(|text| result(0, TOOL, text));
        talk_with_tools([question(0), first, one, second, two, answer(0), question(1)])
    };
    let thought = |call: Message| Message { reasoning: Some("Look it up".to_owned()), ..call };
    let silent = turns([called("Bergen"), called("Bodø")]);
    let thinking = turns([thought(called("Bergen")), thought(called("Bodø"))]);
    let second = if subject.output_markup.reasoning.is_some() { &thinking } else { &silent };
    in_all_modes(subject, &silent, second)
}

/// The worst finding of two conversations in every mode of thinking. One that the template refuses to hold a system prompt is
/// left to its own check.
fn in_all_modes(subject: &Subject, first: &Conversation, second: &Conversation) -> CheckResult {
    let mut findings = Vec::new();
    for (mode, kwargs) in subject.modes() {
        for (at, conversation) in [first, second].into_iter().enumerate() {
            let conversation = Conversation { kwargs: kwargs.clone(), ..conversation.clone() };
            match resumed(subject, &conversation) {
                Ok(finding) => findings.push(Finding { reason: finding.reason + mode, ..finding }),
                Err(_) if at > 0 => {}
                Err(trouble) => return Err(trouble),
            }
        }
    }
    Ok(worst(findings).unwrap_or_else(|| Finding::skipped("nothing to render")))
}

/// The position where a prompt differs from the one before it.
struct Break {
    /// The prompt, from 1.
    turn: usize,
    /// Units that the two have in common, of so many that were there.
    common: usize,
    of: usize,
    was: String,
    is: String,
}

impl Break {
    fn find(subject: &Subject, turn: usize, before: &[u32], now: &[u32]) -> Option<Self> {
        let common = before.iter().zip(now).take_while(|(before, now)| before == now).count();
        if common == before.len() {
            return None;
        }
        let start = common.saturating_sub(AROUND);
        let around = |ids: &[u32]| subject.shown(&ids[start..ids.len().min(common + AROUND)]);
        Some(Self { turn, common, of: before.len(), was: around(before), is: around(now) })
    }

    fn said(&self, subject: &Subject) -> String {
        let Self { turn, common, of, was, is } = self;
        let unit = subject.unit();
        format!("prompt {turn} leaves the one before it at {unit} {common} of {of}: {was} has become {is}")
    }

    fn json(&self, subject: &Subject) -> Value {
        let Self { turn, common, of, was, is } = self;
        json!({"prompt": turn, "unit": subject.unit(), "common": common, "of": of, "was": was, "is": is})
    }
}

/// Follows a conversation from prompt to prompt; it ends with a question.
fn resumed(subject: &Subject, conversation: &Conversation) -> CheckResult {
    let is_answer = |message: &Message| message.role == Role::Assistant;
    let answers = conversation.messages.iter().enumerate().filter(|(_, message)| is_answer(message));
    let ends: Vec<usize> = answers.map(|(at, _)| at).chain([conversation.messages.len()]).collect();
    let (mut text, mut resident) = (Vec::new(), Vec::new());
    let (mut in_text, mut in_session) = (None, None);
    let mut session = (subject.session)();
    for (n, &end) in ends.iter().enumerate() {
        let messages = conversation.messages[..end].to_vec();
        let asked = Conversation { messages, ..conversation.clone() };
        let as_text = subject.encode(&subject.prompt(&asked)?, true)?;
        in_text = in_text.or_else(|| Break::find(subject, n + 1, &text, &as_text));
        text = as_text;
        let arranged = subject.accommodation.arrange(&asked);
        let ids = session.prompt(&arranged, &|shown| subject.prompt(shown), &|text, is_start| {
            subject.encode(text, is_start)
        })?;
        in_session = in_session.or_else(|| Break::find(subject, n + 1, &resident, &ids));
        if let Some(answer) = conversation.messages.get(end) {
            let generated: Vec<u32> = (0..4).map(|id| GENERATED + 16 * n as u32 + id).collect();
            session.record(&asked.messages, answer, &generated);
            resident = [ids, generated].concat();
        }
    }
    Ok(judged(subject, ends.len(), in_text, in_session))
}

fn judged(subject: &Subject, num_prompts: usize, text: Option<Break>, session: Option<Break>) -> Finding {
    let detail = json!({
        "text": text.as_ref().map(|found| found.json(subject)),
        "session": session.as_ref().map(|found| found.json(subject)),
    });
    let finding = match (text, session) {
        (None, None) => {
            Finding::ok(format!("each of {num_prompts} prompts begins with the one before it and its answer"))
        }
        (Some(found), None) => Finding::warning(format!(
            "{}; sessions stay warm, because they put answers back as they were generated",
            found.said(subject)
        )),
        (None, Some(found)) => Finding::warning(format!(
            "answers cannot be put back as they were generated ({}): they are computed again",
            found.said(subject)
        )),
        (Some(found), Some(_)) => Finding::fail(format!("{}, in sessions too", found.said(subject))),
    };
    finding.with(detail)
}
