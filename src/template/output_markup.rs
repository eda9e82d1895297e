//! The markup of a model's answers: its reasoning format and its tool-call format.
//!
//! Both are read from the model's own chat template, which prints earlier answers in the form that the model was trained to
//! give, and never from a model's name: see `probe`.

use super::reasoning::ReasoningFormat;
use super::tool_call::writer::Writer;
use super::tool_call::{Protocol, ToolCallFormat, ToolDefinitions};
use super::tool_grammar::{GrammarRequest, lark, unwritable};

/// The formats of reasoning and tool calls in a model's answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OutputMarkup {
    pub reasoning: Option<ReasoningFormat>,
    pub tool_calls: Option<ToolCallFormat>,
}

/// The tools that an answer may or must call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// Text, or calls.
    #[default]
    Auto,
    /// No call: text only.
    None,
    /// At least one call.
    Required,
    /// A call of this tool.
    Named(String),
}

impl OutputMarkup {
    /// Returns the protocol of answers that are rows of messages with headers.
    pub(super) fn protocol(&self) -> Option<Protocol> {
        let of_reasoning = self.reasoning.and_then(|format| format.row().protocol);
        of_reasoning.or_else(|| self.tool_calls.and_then(|format| format.row().protocol))
    }

    /// Returns the marker that will close the reasoning that the end of a prompt has opened. `None` if it has opened none.
    pub fn open_reasoning(&self, prompt_tail: &str) -> Option<&'static str> {
        let format = self.reasoning.filter(|format| format.is_open_in(prompt_tail))?;
        Some(format.row().close)
    }

    /// Returns what opens and closes the reasoning that an answer may begin with, if the prompt has neither opened nor closed it
    /// already. `None` for messages with headers.
    pub fn may_reason(&self, prompt_tail: &str) -> Option<(&'static str, &'static str)> {
        let has_headers = self.reasoning.is_some_and(|format| format.row().protocol.is_some());
        self.first_reasoning(prompt_tail).filter(|_| !has_headers)
    }

    /// Returns what [`Self::may_reason`] returns, also for messages with headers.
    pub fn first_reasoning(&self, prompt_tail: &str) -> Option<(&'static str, &'static str)> {
        let marks = self.reasoning.filter(|format| !format.is_open_in(prompt_tail))?.row();
        let open = *marks.opens.first()?;
        (!prompt_tail.trim_end().ends_with(marks.close)).then_some((open, marks.close))
    }

    /// Returns all markers, for a tokenizer that has special tokens of those names: they must reach
    /// the parser although special tokens are otherwise left out of the text.
    pub fn markers(&self) -> Vec<&'static str> {
        let mut markup = Vec::new();
        if let Some(format) = self.reasoning {
            let marks = format.row();
            // A channel's name is no part of its token.
            markup.extend(marks.opens.iter().filter(|open| open.ends_with(['>', ']'])));
            markup.extend([marks.close].into_iter().filter(|close| !close.is_empty()));
            markup.extend(marks.dropped);
            markup.extend(marks.tokens);
        }
        if let Some(format) = self.tool_calls {
            markup.extend(format.markers());
        }
        if self.protocol() == Some(Protocol::Harmony) {
            markup.extend(ToolCallFormat::Harmony.markers());
        }
        markup.sort_unstable();
        markup.dedup();
        markup
    }

    /// Returns the tools whose arguments [`Self::tool_grammar`] cannot write by their schemas, by name, and the first keyword of
    /// each that it cannot express: it allows any arguments there.
    pub fn unwritable_tools(&self, tools: &[serde_json::Value]) -> Vec<(String, String)> {
        let Some(format) = self.tool_calls else { return Vec::new() };
        unwritable(format, &ToolDefinitions::new(tools), &mut Writer::new(Vec::new(), &|_| None))
    }

    /// Returns a grammar (Lark text as llguidance takes it) for answers with tool calls: arguments follow each tool's schema, see
    /// the header of `tool_call/arguments.rs`. Reasoning may come first, and must end first where `prompt_tail`, the end of
    /// the rendered prompt, has opened it. `is_parallel` allows several calls. `special` gives the id of a special token by
    /// its text; a marker that it does not know is ordinary text.
    ///
    /// `None` if there is nothing to constrain: no call format, no (such) tool. With [`ToolChoice::None`] no call can begin, and the
    /// caller leaves the tools out of parsing.
    pub fn tool_grammar(
        &self,
        tools: &[serde_json::Value],
        choice: &ToolChoice,
        is_parallel: bool,
        prompt_tail: &str,
        special: &dyn Fn(&str) -> Option<u32>,
    ) -> Option<String> {
        let format = self.tool_calls?;
        let tools = ToolDefinitions::new(tools);
        let (tools, is_optional, is_parallel) = match choice {
            ToolChoice::Auto | ToolChoice::None => (tools, true, is_parallel),
            ToolChoice::Required => (tools, false, is_parallel),
            ToolChoice::Named(name) => (tools.only(name), false, false),
        };
        let is_none = *choice == ToolChoice::None;
        if tools.is_empty() && !is_none {
            return None;
        }
        let reasoning = self.reasoning;
        let request = GrammarRequest {
            reasoning,
            format,
            tools: &tools,
            is_optional,
            is_none,
            is_parallel,
            prompt_tail,
        };
        Some(lark(&request, Writer::new(self.markers(), special)))
    }
}
