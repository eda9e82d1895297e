//! What the scripted model says: three tool calls one after another, then an answer; a short text where it has no tools.
//!
//! The question names a task as `TASK-WORD`, and the number of tool results after it says how far the task is. Tool results
//! must not hold such a name.

use super::model::Script;
use crate::common::prelude::*;

/// The three calls of a task: the tools' names and arguments.
pub type Calls = fn(&str) -> [(&'static str, Value); 3];

/// A task whose answer is a text that takes long.
pub const LONG: &str = "long";
/// Fewer tokens than that text has.
pub const LONG_TOKENS: usize = 8000;

const TASK: &str = "TASK-";
const RESULT: &str = "<tool_response>";

pub fn question(word: &str) -> String {
    format!("Do what the notes say. {TASK}{word}")
}

/// Returns the last text of a task.
pub fn answer(word: &str) -> String {
    format!("Done with {word}.")
}

pub fn script(calls: Calls) -> Script {
    Arc::new(move |prompt| {
        let Some(at) = prompt.rfind(TASK).filter(|_| prompt.contains("<tools>")) else {
            return "Notes".to_owned();
        };
        let task = &prompt[at + TASK.len()..];
        let word: String = task.chars().take_while(char::is_ascii_alphanumeric).collect();
        if word == LONG {
            return "and so on ".repeat(LONG_TOKENS / 2);
        }
        match calls(&word).get(task.matches(RESULT).count()) {
            Some((name, arguments)) => format!(
                "<think>\nI use {name}.\n</think>\n\n<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {}}}\n</tool_call>",
                spaced(arguments)
            ),
            None => format!("<think>\nThat was all.\n</think>\n\n{}", answer(&word)),
        }
    })
}

/// Writes an object as the template's `tojson` does, which the grammar of calls asks for.
fn spaced(arguments: &Value) -> String {
    let members = arguments.as_object().into_iter().flatten();
    let members = members.map(|(name, value)| format!("{}: {value}", Value::from(name.as_str())));
    format!("{{{}}}", members.collect::<Vec<_>>().join(", "))
}
