//! From flags and prompt to a turn: its input, its tools and what the answer must look like.

use serde_json::{Map, Value};

use super::next_turn::Next;
use super::{OutputFormat, PromptArgs, RunArgs};
use crate::cli::error::CommandError;
use crate::cli::model::load::{Loaded, PreparedTexts};
use crate::cli::terminal::Terminal;
use crate::cli::think::{Think, Thinking};
use llmctl_engine::ChatTokenizer;
use llmctl_engine::turn::{AnswerStart, TextPrompt, ToolUse, TurnInput, TurnRequest};
use llmctl_template::{Content, Conversation, Message};

/// A prompt as the model gets it.
pub struct Rendered {
    pub text: String,
    pub tokens: Vec<u32>,
}

/// Renders and encodes a prompt, followed by the beginning of the answer.
pub fn rendered(texts: &PreparedTexts, input: &TurnInput, prefill: &str) -> Result<Rendered, CommandError> {
    let tokenizer = texts.chat_tokenizer();
    let text = |prompt: String| prompt + prefill;
    let (text, tokens) = match input {
        TurnInput::Chat(conversation) => {
            let text = text(tokenizer.render(conversation, texts.now())?);
            let tokens = tokenizer.encode_chat(&text, conversation)?;
            (text, tokens)
        }
        TurnInput::Text(prompt) => {
            let text = match prompt {
                TextPrompt::Text(prompt) | TextPrompt::WithImages { text: prompt, .. } => {
                    text(prompt.clone())
                }
                TextPrompt::Ids(_) | TextPrompt::Infill(_) => text(String::new()),
            };
            let tokens = tokenizer.encode(&text)?;
            (text, tokens)
        }
    };
    Ok(Rendered { text, tokens })
}

/// Builds the turn request from the flags.
pub fn turn_request(
    llm: &Loaded,
    args: &RunArgs,
    tools: ToolUse,
    terminal: &Terminal,
) -> Result<TurnRequest, CommandError> {
    let prefill = args.prompt.prefill_response.clone();
    let is_text = args.output.output.unwrap_or_default() != OutputFormat::Json;
    Ok(TurnRequest {
        answer_start: prefill.map_or(AnswerStart::Nothing, AnswerStart::Text),
        tools,
        constraint: args.constraint.constraint(),
        is_streamed: is_text && !args.output.no_stream,
        reasoning_budget: args.prompt.think()?.budget,
        sampling: args.sampling.resolve_for(llm.info(), terminal),
        limits: args.limits.resolve(),
        logprobs: args.output.logprobs,
        ..TurnRequest::default()
    })
}

impl PromptArgs {
    /// Returns the reasoning that `--think` asks for.
    pub fn think(&self) -> Result<Think, CommandError> {
        self.varied_think.map_or_else(|| Think::of_flag(self.think.as_deref()), Ok)
    }

    /// Returns the template variables that `--think` sets.
    pub fn thinking_variables(&self, texts: &PreparedTexts) -> Result<Map<String, Value>, CommandError> {
        let (think, thinking) = (self.think()?, Thinking::of(texts.chat_tokenizer()));
        think.check_flag(&thinking)?;
        Ok(think.variables(&thinking))
    }
}

/// Returns a conversation of one turn, or plain text if the user asks for it or the model has no template.
pub fn input(
    texts: &PreparedTexts,
    args: &RunArgs,
    tools: &ToolUse,
    next: Next,
    terminal: &Terminal,
) -> Result<TurnInput, CommandError> {
    let info = texts.info();
    let context = chat_context(texts, args, tools)?;
    let Next { content, system, .. } = next;
    if let Content::Text(text) = &content {
        if args.prompt.raw {
            return Ok(TurnInput::Text(TextPrompt::Text(text.clone())));
        }
        if !info.has_chat_template && system.is_none() {
            terminal
                .note(format!("{} has no chat template: the prompt is completed as plain text", info.name));
            return Ok(TurnInput::Text(TextPrompt::Text(text.clone())));
        }
    }
    let system = system.map(Message::system);
    let messages = system.into_iter().chain([Message::user(content)]).collect();
    Ok(TurnInput::Chat(Conversation { messages, ..context }))
}

/// Returns a conversation without messages: the tools, and the template variables of the flags.
///
/// # Errors
/// `Usage` for tools and reasoning that the model's template does not know.
pub fn chat_context(
    texts: &PreparedTexts,
    args: &RunArgs,
    tools: &ToolUse,
) -> Result<Conversation, CommandError> {
    let kwargs = args.prompt.thinking_variables(texts)?;
    let tools = tools.definitions.clone();
    if !tools.is_empty() {
        let flag = if args.prompt.tools.is_some() { "--tools" } else { "--mcp-config" };
        check_tools(texts.chat_tokenizer(), flag)?;
    }
    Ok(Conversation { kwargs, tools, ..Conversation::default() })
}

/// Refuses tools that the model would never see.
fn check_tools(chat_tokenizer: &ChatTokenizer, flag: &str) -> Result<(), CommandError> {
    if chat_tokenizer.shows_tools() {
        return Ok(());
    }
    Err(CommandError::usage(format!("{flag}: this model's chat template does not show tools")))
}
