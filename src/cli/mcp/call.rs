//! One call: looked up, agreed to, made, reported.
//!
//! Invariant: the user sees server, tool and arguments before anything is called, unless the tool is allowed
//! beforehand.

use std::time::Duration;

use serde_json::Value;
use tokio::time::sleep;

use super::ToolServers;
use super::connection::{CallFailure, ServerTool};
use super::owned::find;
use super::permission::{AllowedTool, AskUser, CallConsent, QUESTION, shown};
use super::result::ResultText;
use crate::cli::error::CommandError;
use crate::cli::images::{GivenImage, marked_content};
use crate::cli::terminal::Terminal;
use crate::cli::terminal::report::{bytes, on_one_line};
use crate::cli::terminal::signal::Graceful;
use llmctl_engine::turn::AnsweredCall;
use llmctl_template::{Message, Role};

/// Interval at which signals are checked during a call.
const POLL: Duration = Duration::from_millis(25);

/// Most characters of a result that the user is shown.
const MAX_SHOWN: usize = 100;

/// Terminal and consent for calls.
pub struct CallDesk<'a> {
    pub terminal: &'a Terminal,
    pub graceful: &'a Graceful,
    /// The model reads images.
    pub sees: bool,
    pub ask: AskUser<'a>,
}

/// The end of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallStatus {
    Done,
    /// The tool or the server failed, or the call was not one.
    Failed,
    /// The user refused it, or no user could be asked.
    Refused,
    /// The user stopped it.
    Stopped,
}

impl CallStatus {
    pub fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Refused => "refused",
            Self::Stopped => "stopped",
        }
    }
}

/// The result of a call, as the model gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallResult {
    pub status: CallStatus,
    pub text: String,
    /// Images for a model that reads them, each with what stands for it in `text`.
    pub images: Vec<(String, GivenImage)>,
}

impl CallResult {
    /// Returns the result of a call that failed: the reason, for the model.
    pub fn error(status: CallStatus, why: &str) -> Self {
        Self { status, text: format!("error: {why}"), images: Vec::new() }
    }

    /// Returns a text as the result of a call.
    pub fn done(text: String) -> Self {
        Self { status: CallStatus::Done, text, images: Vec::new() }
    }

    /// Returns the result of a call that was made, without its images, with this limit.
    pub fn of(made: &Result<ResultText, CallFailure>, server: &str, limit: Duration) -> Self {
        let failed = |why: &str| Self::error(CallStatus::Failed, why);
        match made {
            Ok(ResultText { text, is_error: true, .. }) => failed(text),
            Ok(ResultText { text, .. }) => Self::done(text.clone()),
            Err(CallFailure::Refused(why)) => failed(why),
            Err(CallFailure::Timeout) => failed(&late(limit)),
            Err(CallFailure::Stopped) => Self::error(CallStatus::Stopped, "the user stopped it"),
            Err(CallFailure::Lost(_)) => {
                failed(&format!("the server {server} has ended or cannot be reached"))
            }
        }
    }
}

fn late(limit: Duration) -> String {
    format!("it took longer than {} s", limit.as_secs())
}

/// Returns the message that brings the model the result of a call.
pub fn result_message(call: &AnsweredCall, result: CallResult) -> Message {
    let mut message = Message::new(Role::Tool, marked_content(result.text, &result.images));
    (message.tool_call_id, message.name) = (Some(call.id.clone()), Some(call.name.clone()));
    message
}

impl ToolServers {
    /// Makes a call if the user agrees.
    ///
    /// # Errors
    /// That the user cannot be asked because the terminal fails.
    pub fn take(&mut self, call: &AnsweredCall, desk: &mut CallDesk<'_>) -> Result<CallResult, CommandError> {
        if desk.graceful.received().is_some() {
            return Ok(CallResult::error(CallStatus::Stopped, "the user stopped it"));
        }
        let (server, tool, calls) = match find(&self.servers.all, &call.name) {
            Ok(found) => found,
            Err(why) => return Ok(CallResult::error(CallStatus::Failed, &why)),
        };
        let arguments = match serde_json::from_str::<Value>(&call.arguments) {
            Ok(Value::Object(arguments)) => arguments,
            Ok(_) | Err(_) => {
                return Ok(CallResult::error(CallStatus::Failed, "the arguments are not a JSON object"));
            }
        };
        if !self.is_agreed(&server.config.name, call, &tool, desk)? {
            return Ok(CallResult::error(CallStatus::Refused, "the user refused the call"));
        }
        desk.terminal.status(&format!("calling {}", call.name));
        let stopped = async {
            while desk.graceful.received().is_none() {
                sleep(POLL).await;
            }
        };
        let made = server.call(&calls, &tool.name, arguments, self.timeout, stopped);
        let made = self.servers.runtime.block_on(made);
        desk.terminal.status("");
        Ok(self.told(&server.config.name, call, made, desk))
    }

    /// Returns true if the user agrees to a call; false without a terminal to ask on.
    fn is_agreed(
        &mut self,
        server: &str,
        call: &AnsweredCall,
        tool: &ServerTool,
        desk: &mut CallDesk<'_>,
    ) -> Result<bool, CommandError> {
        let (name, arguments) = (shown(&tool.name), shown(&call.arguments));
        let sentence = format!("MCP server {server}, tool {name}, arguments: {arguments}");
        if self.permissions.allows(server, tool) {
            desk.terminal.note(format!("calling: {sentence}"));
            return Ok(true);
        }
        desk.terminal.report(&format!("The model wants to call: {sentence}"));
        let consent = CallConsent::ask(QUESTION, desk.ask)?;
        match consent {
            Some(CallConsent::Always) => self.permissions.allow_always(server, tool),
            Some(CallConsent::Once | CallConsent::No) => {}
            None => desk.terminal.warn(format!(
                "{} was not called: that takes your consent at a terminal, or --allow-tool {}",
                call.name,
                AllowedTool::of(server, tool)
            )),
        }
        Ok(consent.is_some_and(CallConsent::is_given))
    }

    /// Tells the user what became of a call, and returns what the model gets.
    fn told(
        &self,
        server: &str,
        call: &AnsweredCall,
        mut made: Result<ResultText, CallFailure>,
        desk: &CallDesk<'_>,
    ) -> CallResult {
        let terminal = desk.terminal;
        let images = match &mut made {
            Ok(result) if desk.sees => result.take_images(),
            _ => Vec::new(),
        };
        let tool = &call.name;
        match &made {
            Ok(ResultText { text, is_error, notes, .. }) => {
                notes.iter().for_each(|note| terminal.warn(format!("{tool}: {note}")));
                let verb = if *is_error { "failed" } else { "returned" };
                let size = bytes(text.len() as u64);
                terminal.note(format!("{tool} {verb} ({size}): {}", on_one_line(text, MAX_SHOWN)));
            }
            Err(CallFailure::Refused(why)) => {
                terminal.note(format!("{tool} failed: {}", on_one_line(why, MAX_SHOWN)))
            }
            Err(CallFailure::Timeout) => {
                let why = late(self.timeout);
                terminal.warn(format!("{tool}: {why}; --tool-timeout gives more time"));
            }
            Err(CallFailure::Stopped) => {}
            Err(CallFailure::Lost(loss)) => terminal.warn(format!("MCP server {server}: {loss}")),
        }
        CallResult { images, ..CallResult::of(&made, server, self.timeout) }
    }
}
