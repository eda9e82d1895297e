//! Runs the tool calls of an answer, each with the user's consent: commands of `--tools`, and tools of MCP
//! servers.
//!
//! Invariant: nothing runs that the user has not agreed to, once or for the chat.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::session::Chat;
use super::{counted, on_one_line, shortened};
use crate::cli::declared_tools::{ChatTool, STOPPED, Toolbox};
use crate::cli::error::CommandError;
use crate::cli::mcp::{CallConsent, CallDesk, CallResult, ToolServers, result_message};
use llmctl_engine::turn::{Answer, AnsweredCall};
use llmctl_template::Message;

/// The tools of MCP servers.
impl Chat<'_> {
    /// Waits for the servers, and says which did not start.
    pub fn greet_servers(&mut self) {
        let Some(servers) = &mut self.servers else { return };
        servers.wait(self.ui.terminal).iter().for_each(|failure| self.ui.terminal.warn(failure));
        servers.check_permissions(self.ui.terminal);
        self.warn_of_tools();
    }

    /// Says what the model's template makes of tools.
    pub fn warn_of_tools(&self) {
        let here = self.model.here();
        let notice = here.and_then(|llm| llm.texts().chat_tokenizer().notice_of_tools());
        notice.iter().for_each(|notice| self.ui.terminal.warn(notice));
    }

    /// Says which servers have ended or changed their tools.
    pub fn tell_news(&mut self) {
        let news = self.servers.as_mut().map(ToolServers::news).unwrap_or_default();
        news.iter().for_each(|news| self.ui.terminal.warn(news));
    }

    /// Returns all tools as templates and APIs have them.
    pub fn tool_definitions(&self) -> Vec<Value> {
        let own = self.state.toolbox.as_ref().map(|own| own.offer.definitions.clone()).unwrap_or_default();
        let theirs = self.servers.as_ref().map(ToolServers::definitions).unwrap_or_default();
        own.into_iter().chain(theirs).collect()
    }
}

/// Calls.
impl Chat<'_> {
    /// Runs the calls of an answer, as far as the user agrees. Returns the messages with their results, `None` if nothing is to
    /// be run.
    pub fn run_tools(&mut self, answer: &Answer) -> Result<Option<Vec<Message>>, CommandError> {
        let (calls, to_run) = (&answer.tool_calls, answer.calls_to_run());
        if calls.is_empty() || self.state.toolbox.is_none() && self.servers.is_none() {
            return Ok(None);
        }
        if to_run.is_empty() {
            let cut = calls.iter().find(|call| !call.is_whole).unwrap_or(&calls[0]);
            self.ui.terminal.warn(format!("the call of {} was cut off; nothing was run", cut.name));
            return Ok(None);
        }
        let mut messages = Vec::new();
        for call in to_run {
            let result = self.result_of(call)?;
            result.images.iter().for_each(|(_, given)| self.state.files.insert(Arc::clone(&given.file)));
            messages.push(result_message(call, result));
        }
        Ok(Some(messages))
    }

    /// Returns what the model gets of a call.
    fn result_of(&mut self, call: &AnsweredCall) -> Result<CallResult, CommandError> {
        let sees = self.model.here().is_some_and(|llm| llm.vision().is_ok());
        if let Some(servers) = self.servers.as_mut().filter(|servers| servers.has(&call.name)) {
            let input = &mut self.ui.input;
            let mut ask = |question: &str| input.ask(question);
            let (terminal, graceful) = (self.ui.terminal, &self.ui.graceful);
            return servers.take(call, &mut CallDesk { terminal, graceful, sees, ask: &mut ask });
        }
        Ok(CallResult::done(self.run_tool(call)?.unwrap_or_else(|reason| format!("error: {reason}"))))
    }

    /// Runs the tool. Returns its result, or why it failed; the model gets either.
    fn run_tool(&mut self, call: &AnsweredCall) -> Result<Result<String, String>, CommandError> {
        if self.ui.graceful.received().is_some() {
            return Ok(Err(STOPPED.to_owned()));
        }
        let offering = |toolbox: &&Toolbox| toolbox.names().any(|name| name == call.name);
        let Some(toolbox) = self.state.toolbox.as_ref().filter(offering) else {
            return Ok(Err(format!("there is no tool {}", call.name)));
        };
        let Some(tool) = toolbox.command(&call.name).cloned() else {
            let question = format!("{} has no command; its result: ", call.name);
            return Ok(self.ui.input.ask(&question)?.ok_or_else(|| "it was not run".to_owned()));
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
        let mut ask = |question: &str| self.ui.input.ask(question);
        let consent = CallConsent::ask("run it? y(es), n(o), a(lways in this chat): ", &mut ask)?;
        match (consent, &mut self.state.toolbox) {
            (Some(CallConsent::Always), Some(toolbox)) => drop(toolbox.always.insert(tool.name.clone())),
            (Some(_), _) => {}
            (None, _) => {
                self.ui.terminal.note("not run: a tool runs only with your consent, which takes a terminal");
            }
        }
        Ok(consent.is_some_and(CallConsent::is_given))
    }
}
