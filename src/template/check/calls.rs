//! Calls there and back: what a template prints for calls in history comes apart into the same calls.

use serde_json::{Value, json};

use super::matrix::{TOOL, call, calls, question, talk_with_tools, tools};
use super::{CheckError, CheckResult, CheckVerdict, Finding, Subject, quoted};
use crate::{Content, Message, PrintedTurn, TemplateError, ToolCall, parse_answer};

/// Calls with every kind of argument, in texts that tempt a parser.
pub fn one_call(subject: &Subject) -> CheckResult {
    let format = subject.calls()?;
    let text = "def f(x):\n\treturn \"<\" if x else 'y'\n";
    let single = [
        call(0, TOOL, json!({"city": "Køge \"old\" harbour", "days": 3, "exact": true})),
        call(0, "write_log", json!({"text": text, "share": 0.5, "tags": ["a", "b c"]})),
        call(0, "write_log", json!({"text": "see </tool_call> and <tool_call|>"})),
        call(0, TOOL, json!({"city": "12"})),
    ];
    let findings = single.into_iter().map(|call| there_and_back(subject, &[call]));
    let findings = findings.collect::<Result<Vec<Finding>, CheckError>>()?;
    let worst = super::worst(findings).filter(|worst| worst.verdict != CheckVerdict::Ok);
    Ok(worst.unwrap_or_else(|| Finding::ok(format!("calls of earlier answers parse back as {format}"))))
}

pub fn two_calls(subject: &Subject) -> CheckResult {
    subject.calls()?;
    let two = [
        call(0, TOOL, json!({"city": "Bergen", "days": 3})),
        call(1, "write_log", json!({"text": "ebb", "tags": []})),
    ];
    there_and_back(subject, &two)
}

/// Renders an answer with these calls, without content and with an empty one, as clients send either.
fn there_and_back(subject: &Subject, wanted: &[ToolCall]) -> CheckResult {
    let empty = Some(Content::Text(String::new()));
    let [absent, empty] = [None, empty].map(|content| {
        let message = Message { content, ..calls(wanted.iter().cloned()) };
        let finding = printed_turn(subject, message).map(|turn| compared(subject, wanted, &turn));
        finding.unwrap_or_else(Finding::from)
    });
    let only =
        |way: &str, other: Finding| Finding::warning(format!("only of answers {way}: {}", other.reason));
    Ok(match (absent.verdict == CheckVerdict::Ok, empty.verdict == CheckVerdict::Ok) {
        (false, true) => only("with empty content; without content", absent),
        (true, false) => only("without content; with empty content", empty),
        _ => absent,
    })
}

/// Compares the calls parsed from a turn with those expected.
fn compared(subject: &Subject, wanted: &[ToolCall], turn: &PrintedTurn) -> Finding {
    let PrintedTurn { tail, turn } = turn;
    let answer = parse_answer(&subject.output_markup, &tools(), tail, turn, false);
    let found: Vec<(String, Value)> = answer
        .calls
        .iter()
        .map(|call| (call.name.clone(), serde_json::from_str(&call.arguments).unwrap_or(Value::Null)))
        .collect();
    let wanted: Vec<(String, Value)> =
        wanted.iter().map(|call| (call.name.clone(), call.arguments.clone())).collect();
    if found == wanted {
        return Finding::ok("the same calls come back");
    }
    let names = wanted.iter().filter(|(name, _)| turn.contains(name.as_str())).count();
    Finding::fail(match found.is_empty() {
        _ if names == 0 => "the calls of an earlier answer are not printed".to_owned(),
        true => format!("no call is found in {}", quoted(turn)),
        false => format!("{} come back as {}", shown(&wanted), shown(&found)),
    })
}

fn shown(calls: &[(String, Value)]) -> String {
    let calls: Vec<String> = calls.iter().map(|(name, arguments)| format!("{name}{arguments}")).collect();
    quoted(&calls.join(" "))
}

/// An answer alone, as history prints it: what stands behind the prompt that asks for it.
fn printed_turn(subject: &Subject, message: Message) -> Result<PrintedTurn, CheckError> {
    let mut conversation = talk_with_tools([question(0)]);
    let (plain, prompt) = (subject.history(&conversation)?, subject.prompt(&conversation)?);
    conversation.messages.push(message);
    let full = subject.history(&conversation)?;
    let missing = || {
        CheckError::from(TemplateError::Render { line: 1, message: "the answer is not printed".to_owned() })
    };
    PrintedTurn::find(&plain, &prompt, &full, &subject.output_markup.markers()).ok_or_else(missing)
}
