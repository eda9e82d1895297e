//! The system prompt and the messages of a body.
//!
//! Invariants: a turn of the user becomes the results of tools, in their order, and the text behind them; text blocks of the
//! assistant are joined without anything between, so that an answer that comes back is the text that was generated; turns of
//! one role that follow each other are one turn, as in Anthropic's API. Thinking is the reasoning of its message, and its
//! signature means nothing here.

use serde_json::{Map, Value};

use super::super::Fields;
use super::super::fields::shown;
use super::super::message::{as_arguments, echoed};
use crate::template::{Content, Message, Role, ToolCall};

/// The most messages of a request, as in Anthropic's API.
const MAX_MESSAGES: usize = 100_000;

/// Beginning of a system block that Claude Code sends for its bill. It may differ in every request, so that no prompt that
/// holds it can be resumed.
const BILLING: &str = "x-anthropic-billing-header:";

/// Reads `system` and `messages`.
pub fn conversation(fields: &mut Fields<'_>) -> Vec<Message> {
    let mut read: Vec<Message> = system(fields).into_iter().collect();
    if !fields.has("messages") {
        fields.wrong("messages", "is missing");
    }
    let values = fields.list("messages").unwrap_or_default();
    match values.len() {
        0 => fields.out_of_range("messages", "is empty"),
        MAX_MESSAGES.. => fields.out_of_range("messages", &format!("are {MAX_MESSAGES} or more")),
        len => {
            for (index, value) in values.into_iter().enumerate() {
                for message in turn(fields, &format!("messages.{index}"), value) {
                    push(&mut read, message);
                }
            }
            if read.last().is_some_and(|message| message.role == Role::Assistant) {
                let what = "is the assistant's: an answer that is begun is not continued here";
                fields.unsupported(&format!("messages.{}", len - 1), what);
            }
        }
    }
    read
}

/// Reads the system prompt without the block for the bill.
fn system(fields: &mut Fields<'_>) -> Option<Message> {
    let mut texts = match fields.take("system")? {
        Value::String(text) => vec![without_bill(&text).to_owned()],
        Value::Array(blocks) => texts(fields, "system", blocks),
        _ => {
            fields.wrong("system", "is neither a string nor an array of text blocks");
            return None;
        }
    };
    let num_blocks = texts.len();
    texts.retain(|text| !text.starts_with(BILLING));
    if texts.len() < num_blocks {
        let dropped = format!("the part of the system prompt that begins with {BILLING} was left out");
        fields.problems().notice(dropped);
    }
    (!texts.is_empty()).then(|| Message::system(texts.join("\n")))
}

/// Returns a system prompt without a first line for the bill, unless there is no other line.
fn without_bill(text: &str) -> &str {
    match text.split_once('\n') {
        Some((first, rest)) if first.starts_with(BILLING) => rest.trim_start(),
        _ => text,
    }
}

/// Joins a message to the one before it where both are one turn.
fn push(messages: &mut Vec<Message>, message: Message) {
    match messages.last_mut() {
        Some(last) if last.role == message.role && last.role == Role::User => {
            last.content = joined(last.content.take(), message.content, "\n");
        }
        Some(last) if last.role == message.role && last.role == Role::Assistant => {
            last.content = joined(last.content.take(), message.content, "");
            let reasoning = last.reasoning.take().into_iter().chain(message.reasoning).collect::<String>();
            last.reasoning = Some(reasoning).filter(|text| !text.is_empty());
            last.tool_calls.extend(message.tool_calls);
        }
        _ => messages.push(message),
    }
}

fn joined(first: Option<Content>, second: Option<Content>, between: &str) -> Option<Content> {
    match (first, second) {
        (Some(Content::Text(first)), Some(Content::Text(second))) => {
            Some(Content::Text(format!("{first}{between}{second}")))
        }
        (first, second) => first.or(second),
    }
}

/// Reads one message.
fn turn(fields: &mut Fields<'_>, at: &str, value: Value) -> Vec<Message> {
    let Value::Object(members) = value else {
        fields.wrong(at, "is not an object");
        return Vec::new();
    };
    let mut fields = fields.inside(at, members);
    if !fields.has("role") {
        fields.wrong("role", "is missing");
    }
    let role = fields.text("role");
    let blocks = match fields.take("content") {
        Some(Value::String(text)) => vec![Block::Text(text)],
        Some(Value::Array(blocks)) => {
            let read = |(index, block)| self::block(&mut fields, &format!("content.{index}"), block);
            blocks.into_iter().enumerate().filter_map(read).collect()
        }
        None => {
            fields.wrong("content", "is missing");
            Vec::new()
        }
        Some(_) => {
            fields.wrong("content", "is neither a string nor an array of blocks");
            Vec::new()
        }
    };
    let messages = match role.as_deref() {
        Some("user") => user(&mut fields, blocks),
        Some("assistant") => vec![assistant(&mut fields, blocks)],
        Some("system") => vec![Message::system(only_texts(&mut fields, blocks, "system").join("\n"))],
        Some(other) => {
            fields
                .unsupported("role", &format!("= {:?} is none of user, assistant and system", shown(other)));
            Vec::new()
        }
        None => Vec::new(),
    };
    fields.end();
    messages
}

/// A block of content.
enum Block {
    Text(String),
    Thinking(String),
    Call(ToolCall),
    Result(Message),
}

impl Block {
    fn name(&self) -> &'static str {
        match self {
            Block::Text(_) => "text",
            Block::Thinking(_) => "thinking",
            Block::Call(_) => "tool_use",
            Block::Result(_) => "tool_result",
        }
    }
}

/// Reads one block. `None` if it is left out or refused.
fn block(fields: &mut Fields<'_>, at: &str, value: Value) -> Option<Block> {
    let Value::Object(members) = value else {
        fields.wrong(at, "is not an object");
        return None;
    };
    let mut block = fields.inside(at, members);
    block.hint("cache_control");
    if !block.has("type") {
        block.wrong("type", "is missing");
    }
    let read = match block.text("type")?.as_str() {
        "text" => text(&mut block).map(Block::Text),
        "thinking" => {
            block.take("signature");
            required(&mut block, "thinking").map(Block::Thinking)
        }
        "redacted_thinking" => {
            block.take("data");
            block.ignored("redacted_thinking");
            None
        }
        "tool_use" => tool_use(&mut block).map(Block::Call),
        "tool_result" => tool_result(&mut block).map(Block::Result),
        kind if is_of_server(kind) => {
            let notice =
                format!("a block of type {} was left out: tools of Anthropic's servers", shown(kind));
            block.problems().notice(notice);
            block.ignored(kind);
            return None;
        }
        kind => {
            let known = "text, thinking, redacted_thinking, tool_use and tool_result";
            block.unsupported("type", &format!("= {:?} is not supported, only {known}", shown(kind)));
            return None;
        }
    };
    block.end();
    read
}

/// Whether a block tells of a tool that Anthropic's servers have run.
fn is_of_server(kind: &str) -> bool {
    matches!(kind, "server_tool_use" | "mcp_tool_use" | "container_upload") || kind.ends_with("_tool_result")
}

fn required(fields: &mut Fields<'_>, name: &str) -> Option<String> {
    if !fields.has(name) {
        fields.wrong(name, "is missing");
    }
    fields.text(name)
}

fn text(block: &mut Fields<'_>) -> Option<String> {
    echoed(block, "citations");
    required(block, "text")
}

fn tool_use(block: &mut Fields<'_>) -> Option<ToolCall> {
    let id = required(block, "id");
    let name = required(block, "name");
    for name in ["caller", "toolset_name"] {
        block.take(name); // who may call and which set a tool is of: the answers say what the client said
    }
    let arguments = block.object("input").unwrap_or_else(Map::new);
    Some(ToolCall { id: Some(id?), name: name?, arguments: as_arguments(Value::Object(arguments)) })
}

/// Reads the result of a tool. The text of a failure begins with a word that says so, because templates have no place for it.
fn tool_result(block: &mut Fields<'_>) -> Option<Message> {
    let id = required(block, "tool_use_id");
    block.take("toolset_name");
    let text = match block.take("content") {
        None => String::new(),
        Some(Value::String(text)) => text,
        Some(Value::Array(blocks)) => texts(block, "content", blocks).join("\n"),
        Some(_) => {
            block.wrong("content", "is neither a string nor an array of text blocks");
            String::new()
        }
    };
    let is_told = text.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("error"));
    let text = match block.flag("is_error") {
        Some(true) if !is_told => format!("Error: {text}"),
        _ => text,
    };
    Some(Message { tool_call_id: Some(id?), ..Message::new(Role::Tool, text) })
}

/// Reads a list of text blocks at `at`.
fn texts(fields: &mut Fields<'_>, at: &str, values: Vec<Value>) -> Vec<String> {
    let read = |(index, value)| match block(fields, &format!("{at}.{index}"), value)? {
        Block::Text(text) => Some(text),
        other => {
            misplaced(fields, &format!("{at}.{index}"), &other, "here");
            None
        }
    };
    values.into_iter().enumerate().filter_map(read).collect()
}

fn misplaced(fields: &mut Fields<'_>, at: &str, block: &Block, place: &str) {
    fields.out_of_range(at, &format!("is of type {}, which has no place {place}", block.name()));
}

fn only_texts(fields: &mut Fields<'_>, blocks: Vec<Block>, role: &str) -> Vec<String> {
    let read = |block| match block {
        Block::Text(text) => Some(text),
        other => {
            misplaced(fields, "content", &other, &format!("in a message of role {role}"));
            None
        }
    };
    blocks.into_iter().filter_map(read).collect()
}

/// Results come first: they answer the calls right before them.
fn user(fields: &mut Fields<'_>, blocks: Vec<Block>) -> Vec<Message> {
    let (results, others): (Vec<Block>, Vec<Block>) =
        blocks.into_iter().partition(|block| matches!(block, Block::Result(_)));
    let texts = only_texts(fields, others, "user");
    let is_text_wanted = !texts.is_empty() || results.is_empty();
    let result = |block| match block {
        Block::Result(message) => Some(message),
        _ => None,
    };
    let results = results.into_iter().filter_map(result);
    results.chain(is_text_wanted.then(|| Message::user(texts.join("\n")))).collect()
}

fn assistant(fields: &mut Fields<'_>, blocks: Vec<Block>) -> Message {
    let (mut content, mut reasoning, mut tool_calls) = (None::<String>, String::new(), Vec::new());
    for block in blocks {
        match block {
            Block::Text(text) => content.get_or_insert_default().push_str(&text),
            Block::Thinking(text) => reasoning.push_str(&text),
            Block::Call(call) => tool_calls.push(call),
            result @ Block::Result(_) => {
                misplaced(fields, "content", &result, "in a message of role assistant");
            }
        }
    }
    let content = content.or_else(|| tool_calls.is_empty().then(String::new));
    Message {
        content: content.map(Content::Text),
        reasoning: Some(reasoning).filter(|text| !text.is_empty()),
        tool_calls,
        ..Message::new(Role::Assistant, "")
    }
}
