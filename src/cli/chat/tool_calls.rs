//! Runs the tool calls of an answer, each with the user's consent.
//!
//! Invariant: nothing runs that the user has not agreed to, once or for the chat.

use std::path::Path;

use serde_json::Value;

use super::session::Chat;
use super::tools::{ChatTool, STOPPED};
use super::{counted, on_one_line, shortened};
use crate::cli::error::CommandError;
use crate::runtime::turn::{Answer, AnsweredCall};
use crate::template::{Message, Role};

impl Chat<'_> {
    /// Runs the calls of an answer, as far as the user agrees. Returns the messages with their results, `None` if nothing is to
    /// be run.
    pub fn run_tools(&mut self, answer: &Answer) -> Result<Option<Vec<Message>>, CommandError> {
        let (calls, to_run) = (&answer.tool_calls, answer.calls_to_run());
        if calls.is_empty() || self.state.toolbox.is_none() {
            return Ok(None);
        }
        if to_run.is_empty() {
            let cut = calls.iter().find(|call| !call.is_whole).unwrap_or(&calls[0]);
            self.ui.terminal.warn(format!("the call of {} was cut off; nothing was run", cut.name));
            return Ok(None);
        }
        let results = to_run.iter().map(|call| {
            let text = self.run_tool(call)?.unwrap_or_else(|reason| format!("error: {reason}"));
            let mut message = Message::new(Role::Tool, text);
            (message.tool_call_id, message.name) = (Some(call.id.clone()), Some(call.name.clone()));
            Ok(message)
        });
        results.collect::<Result<Vec<_>, CommandError>>().map(Some)
    }

    /// Runs the tool. Returns its result, or why it failed; the model gets either.
    fn run_tool(&mut self, call: &AnsweredCall) -> Result<Result<String, String>, CommandError> {
        let Some(toolbox) = &self.state.toolbox else { return Ok(Err("there are no tools".to_owned())) };
        if self.ui.graceful.received().is_some() {
            return Ok(Err(STOPPED.to_owned()));
        }
        let Some(tool) = toolbox.tools.iter().find(|tool| tool.name == call.name).cloned() else {
            return Ok(Err(format!("there is no tool {}", call.name)));
        };
        let Ok(arguments) = serde_json::from_str::<Value>(&call.arguments) else {
            return Ok(Err("the arguments are not JSON".to_owned()));
        };
        let folder = toolbox.path.parent().map(Path::to_path_buf).unwrap_or_default();
        let is_agreed = toolbox.always.contains(&tool.name) || self.agrees(&tool, &arguments, &folder)?;
        if !is_agreed {
            return Ok(Err("the user refused to run it".to_owned()));
        }
        let result = tool.run(&arguments, &folder, &self.ui.graceful);
        self.ui.terminal.note(&match &result {
            Ok(text) => {
                format!("{} returned {}: {}", tool.name, counted(text.len(), "byte"), shortened(text, 60))
            }
            Err(reason) => format!("{} failed: {}", tool.name, on_one_line(reason, 120)),
        });
        Ok(result)
    }

    /// Asks before a command runs. Without a terminal the answer is no.
    fn agrees(&mut self, tool: &ChatTool, arguments: &Value, folder: &Path) -> Result<bool, CommandError> {
        let words = tool.command_line(arguments, folder);
        let shown: Vec<String> = words.iter().map(|word| format!("{word:?}")).collect();
        self.ui.terminal.report(&format!("{} wants to run: {}", tool.name, shown.join(" ")));
        loop {
            match self.ui.input.ask("run it? y(es), n(o), a(lways in this chat): ")?.as_deref() {
                None => {
                    self.ui
                        .terminal
                        .note("not run: a tool runs only with your consent, which takes a terminal");
                    return Ok(false);
                }
                Some("y" | "yes") => return Ok(true),
                Some("" | "n" | "no") => return Ok(false),
                Some("a" | "always") => {
                    if let Some(toolbox) = &mut self.state.toolbox {
                        toolbox.always.insert(tool.name.clone());
                    }
                    return Ok(true);
                }
                Some(_) => {}
            }
        }
    }
}
