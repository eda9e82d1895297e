//! Answers that call tools of MCP servers: their calls are run, and the model continues with the results.
//!
//! Invariants: a tool of `--tools` is never run, so that an answer that calls one is the last; the number of
//! answers whose calls are run is bounded.

use std::io::Write;
use std::sync::Arc;

use super::RunArgs;
use super::answer::{Generated, is_closed};
use super::report::Report;
use crate::cli::declared_tools::Toolbox;
use crate::cli::error::{CommandError, Exit, Kind};
use crate::cli::mcp::{CallDesk, CallStatus, ToolServers, result_message};
use crate::cli::terminal::question::TypedAnswer;
use crate::cli::terminal::signal::Graceful;
use crate::cli::terminal::{Terminal, question};
use llmctl_engine::turn::{AnsweredCall, ToolUse};
use llmctl_image::ImageSet;
use llmctl_template::Message;

/// The MCP servers of a run, and the answers whose calls they have run.
pub struct ToolRounds<'a> {
    servers: Option<ToolServers>,
    /// The tools of `--tools`.
    given: ToolUse,
    num_rounds: u32,
    limit: u32,
    is_exhausted: bool,
    /// The model reads images; filled in when it is loaded.
    pub sees: bool,
    terminal: &'a Terminal,
}

impl<'a> ToolRounds<'a> {
    /// Reads the tools of `--tools`, and begins to start the servers of `--mcp-config`.
    ///
    /// # Errors
    /// Tools or a configuration that cannot be used; a name that a tool and a server's tool have.
    pub fn begin(args: &RunArgs, terminal: &'a Terminal) -> Result<Self, CommandError> {
        let toolbox = args.prompt.tools.as_deref().map(Toolbox::read).transpose()?;
        let servers = ToolServers::begin(&args.mcp, terminal)?;
        toolbox.as_ref().map_or(Ok(()), |toolbox| toolbox.check_names(servers.as_ref()))?;
        let given = toolbox.map(|toolbox| toolbox.offer).unwrap_or_default();
        let limit = args.mcp.max_tool_rounds;
        Ok(Self { servers, given, num_rounds: 0, limit, is_exhausted: false, sees: false, terminal })
    }

    /// Returns whether there are servers.
    pub fn is_on(&self) -> bool {
        self.servers.is_some()
    }

    /// Waits for the servers, and returns their tools and those of `--tools`.
    ///
    /// # Errors
    /// A server that does not start, because the answer would be another one without its tools.
    pub fn tools(&mut self) -> Result<ToolUse, CommandError> {
        let Some(servers) = &mut self.servers else { return Ok(self.given.clone()) };
        if let Some(failure) = servers.wait(self.terminal).into_iter().next() {
            let error = Kind::Unavailable.error(failure);
            return Err(error.hint("\"disabled\": true in the configuration leaves a server out"));
        }
        servers.check_permissions(self.terminal);
        Ok(self.offered())
    }

    /// Returns the tools that there are now: those of a server that has ended are gone.
    pub fn offered(&self) -> ToolUse {
        let mut tools = self.given.clone();
        if let Some(servers) = &self.servers {
            tools.definitions.extend(servers.definitions());
            tools.is_parallel = true;
        }
        tools
    }

    /// Runs the calls of an answer, as far as the user agrees, and adds the images of their results to `images`. Returns the messages with their results; `None` if the answer is
    /// the last.
    ///
    /// # Errors
    /// The terminal or stdout fails.
    pub fn results<W: Write>(
        &mut self,
        generated: &Generated,
        images: &mut ImageSet,
        report: &mut Report<'_, W>,
        graceful: &Graceful,
    ) -> Result<Option<Vec<Message>>, CommandError> {
        let is_over = generated.signal.is_some() || generated.is_reader_gone;
        if is_over || !self.may_run(generated) {
            return Ok(None);
        }
        let Some(servers) = &mut self.servers else { return Ok(None) };
        self.num_rounds += 1;
        if is_closed(report.calls(&generated.answer))? {
            return Ok(None);
        }
        let mut ask = |question: &str| asked(question, graceful);
        let mut desk = CallDesk { terminal: self.terminal, graceful, sees: self.sees, ask: &mut ask };
        let mut messages = Vec::new();
        for call in generated.answer.calls_to_run() {
            let result = servers.take(call, &mut desk)?;
            let is_closed = is_closed(report.call_result(call, &result))?;
            if is_closed || result.status == CallStatus::Stopped {
                return Ok(None);
            }
            result.images.iter().for_each(|(_, given)| images.insert(Arc::clone(&given.file)));
            messages.push(result_message(call, result));
        }
        if graceful.received().is_some() {
            return Ok(None);
        }
        servers.news().iter().for_each(|news| self.terminal.warn(news));
        Ok(Some(messages))
    }

    /// Returns whether the calls of an answer are run, and says why if they are not.
    fn may_run(&mut self, generated: &Generated) -> bool {
        let (calls, to_run) = (&generated.answer.tool_calls, generated.answer.calls_to_run());
        if self.servers.is_none() || calls.is_empty() {
            return false;
        }
        if to_run.is_empty() {
            let cut = calls.iter().find(|call| !call.is_whole).unwrap_or(&calls[0]);
            self.terminal.warn(format!("the call of {} was cut off; nothing was called", cut.name));
            return false;
        }
        let is_given = |call: &&AnsweredCall| {
            self.given.definitions.iter().any(|tool| name_of(tool) == Some(&call.name))
        };
        if let Some(call) = to_run.iter().find(is_given) {
            self.terminal.note(format!(
                "{} is a tool of --tools: nothing was called, the calls are in the output",
                call.name
            ));
            return false;
        }
        self.is_exhausted = self.num_rounds == self.limit;
        if self.is_exhausted {
            let limit = self.limit;
            self.terminal.warn(format!(
                "the model has called tools in {limit} answers in a row, and the calls of the next were not run; \
                 --max-tool-rounds N allows more"
            ));
        }
        !self.is_exhausted
    }

    /// Returns the exit code: an answer that is not the last is a cut one.
    pub fn verdict(&self, exit: Exit) -> Exit {
        if self.is_exhausted && exit == Exit::Success { Exit::Cut } else { exit }
    }
}

/// Returns the name of a tool in OpenAI's form.
fn name_of(definition: &serde_json::Value) -> Option<&str> {
    definition["function"]["name"].as_str()
}

/// Asks the user, who must sit at a terminal.
fn asked(question: &str, graceful: &Graceful) -> Result<Option<String>, CommandError> {
    if !question::can_ask() {
        return Ok(None);
    }
    let answer = question::ask(question.trim_end(), || graceful.received().is_some());
    match answer.map_err(|error| CommandError::new(Kind::Io, error))? {
        TypedAnswer::Line(line) => Ok(Some(line)),
        TypedAnswer::None => Ok(Some("no".to_owned())),
    }
}
