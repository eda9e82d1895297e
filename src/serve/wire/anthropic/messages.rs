//! The system prompt and the messages of a body.
//!
//! Invariants: a turn of the user becomes the results of tools, in their order, and the text and images behind them;
//! text blocks of the assistant are joined without anything between, so that an answer that comes back is the
//! text that was generated; turns of one role that follow each other are one turn, as in Anthropic's API.
//! Thinking is the reasoning of its message, a line for each block, and its signature means nothing here.

use serde_json::Value;

use super::super::Fields;
use super::super::fields::shown;
use super::super::images::{self, ImagePiece, ImagePlace, image, is_image, left_out};
use super::super::message::{as_arguments, echoed};
use llmctl_template::{Content, Message, Role, ToolCall};

/// The most messages of a request, as in Anthropic's API.
const MAX_MESSAGES: usize = 100_000;

/// Beginning of a system block that Claude Code sends for its bill. It may differ in every request, so that no prompt that
/// holds it can be resumed.
const BILLING: &str = "x-anthropic-billing-header:";

/// Reads `system` and `messages`.
pub fn conversation(fields: &mut Fields<'_>) -> Vec<Message> {
    let mut read: Vec<Message> = system(fields).into_iter().collect();
    fields.require("messages");
    let values = fields.list("messages").unwrap_or_default();
    match values.len() {
        0 => fields.out_of_range("messages", "is empty"),
        MAX_MESSAGES.. => fields.out_of_range("messages", &format!("are {MAX_MESSAGES} or more")),
        _ => {
            for (index, value) in values.into_iter().enumerate() {
                for message in turn(fields, &format!("messages.{index}"), value) {
                    push(&mut read, message);
                }
            }
        }
    }
    read
}

/// Reads the system prompt without the block for the bill.
fn system(fields: &mut Fields<'_>) -> Option<Message> {
    let mut texts = match fields.take("system")? {
        // A bill in one text is its first line.
        Value::String(text) if text.starts_with(BILLING) => {
            let (bill, rest) = text.split_once('\n').unwrap_or((&text, ""));
            vec![bill.to_owned(), rest.trim_start().to_owned()]
        }
        Value::String(text) => vec![text],
        Value::Array(blocks) => texts(fields, "system", blocks),
        _ => {
            return fields.none("system", "is neither a string nor an array of text blocks");
        }
    };
    let num_blocks = texts.len();
    texts.retain(|text| !text.starts_with(BILLING));
    if texts.len() < num_blocks {
        let dropped = format!("the part of the system prompt that begins with {BILLING} was left out");
        fields.problems().notice(dropped);
    }
    let text = texts.join("\n");
    (!text.is_empty()).then(|| Message::system(text))
}

/// Joins a message to the one before it where both are one turn.
fn push(messages: &mut Vec<Message>, message: Message) {
    match messages.last_mut() {
        Some(last) if last.role == message.role && last.role == Role::User => {
            let both = last.content.take().into_iter().chain(message.content);
            last.content = Some(images::content(both.flat_map(images::pieces)));
        }
        Some(last) if last.role == message.role && last.role == Role::Assistant => {
            last.content = joined(last.content.take(), message.content);
            let thoughts: Vec<String> = last.reasoning.take().into_iter().chain(message.reasoning).collect();
            last.reasoning = Some(thoughts.join("\n")).filter(|text| !text.is_empty());
            last.tool_calls.extend(message.tool_calls);
        }
        _ => messages.push(message),
    }
}

/// Joins what an assistant says, which is text alone.
fn joined(first: Option<Content>, second: Option<Content>) -> Option<Content> {
    match (first, second) {
        (Some(Content::Text(first)), Some(Content::Text(second))) => Some(Content::Text(first + &second)),
        (first, second) => first.or(second),
    }
}

/// Reads one message.
fn turn(fields: &mut Fields<'_>, at: &str, value: Value) -> Vec<Message> {
    let Some(mut fields) = fields.within(at, value) else { return Vec::new() };
    fields.require("role");
    let role = fields.text("role");
    let place = if role.as_deref() == Some("user") { ImagePlace::User } else { ImagePlace::Elsewhere };
    let blocks = match fields.take("content") {
        Some(Value::String(text)) => vec![Block::Said(ImagePiece::Text(text))],
        Some(Value::Array(blocks)) => {
            let read = |(index, block)| self::block(&mut fields, &format!("content.{index}"), block, place);
            blocks.into_iter().enumerate().filter_map(read).collect()
        }
        None => {
            fields.missing("content");
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
        Some("system") => vec![said(&mut fields, blocks, Role::System)],
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
    Said(ImagePiece),
    Thinking(String),
    Call(ToolCall),
    Result(Message),
}

impl Block {
    fn name(&self) -> &'static str {
        match self {
            Block::Said(ImagePiece::Text(_)) => "text",
            Block::Said(ImagePiece::Image(_)) => "image",
            Block::Thinking(_) => "thinking",
            Block::Call(_) => "tool_use",
            Block::Result(_) => "tool_result",
        }
    }
}

/// Reads one block. `None` if it is left out or refused.
fn block(fields: &mut Fields<'_>, at: &str, value: Value, place: ImagePlace) -> Option<Block> {
    if let Some(text) = text_within(&value) {
        let mut block = fields.within(at, value)?;
        block.hint("cache_control");
        if block.take("citations").is_some_and(|citations| citations["enabled"] != false) {
            block.ignored("citations");
        }
        return Some(Block::Said(ImagePiece::Text(text)));
    }
    let mut block = fields.within(at, value)?;
    block.hint("cache_control");
    block.require("type");
    let read = match block.text("type")?.as_str() {
        "text" => text(&mut block).map(|text| Block::Said(ImagePiece::Text(text))),
        kind if is_image(kind) && place != ImagePlace::Elsewhere => {
            return image(block, kind, place).map(Block::Said);
        }
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
            let known = "text, image (of a user), document (of text), search_result, thinking, redacted_thinking, tool_use and tool_result";
            block.unsupported("type", &format!("= {:?} is not supported, only {known}", shown(kind)));
            return None;
        }
    };
    block.end();
    read
}

/// Returns true if a block reports a tool that Anthropic's servers have run.
fn is_of_server(kind: &str) -> bool {
    matches!(kind, "server_tool_use" | "mcp_tool_use" | "container_upload") || kind.ends_with("_tool_result")
}

fn required(fields: &mut Fields<'_>, name: &str) -> Option<String> {
    fields.require(name);
    fields.text(name)
}

fn text(block: &mut Fields<'_>) -> Option<String> {
    echoed(block, "citations");
    required(block, "text")
}

/// Returns the text of a block that holds text in another form: a document, what a search found, or the name of a tool.
fn text_within(block: &Value) -> Option<String> {
    let parts = block["source"]["content"].as_array().into_iter().flatten();
    let is_text = parts.clone().all(|part| part["type"] == "text");
    let places: &[&str] = match block["type"].as_str()? {
        "tool_reference" => &["/tool_name"],
        "document" if block["source"]["type"] == "text" => &["/title", "/context", "/source/data"],
        "document" if block["source"]["type"] == "content" && is_text => {
            &["/title", "/context", "/source/content"]
        }
        "search_result" => &["/title", "/source"],
        _ => return None,
    };
    let content = block["content"].as_array().into_iter().flatten().chain(parts).map(|part| &part["text"]);
    let texts = places.iter().filter_map(|place| block.pointer(place)).chain(content);
    Some(texts.filter_map(Value::as_str).collect::<Vec<_>>().join("\n"))
}

/// Reads the content of a tool's result. Blocks that are neither text nor images are left out, and named.
fn result_pieces(block: &mut Fields<'_>, values: Vec<Value>) -> Vec<ImagePiece> {
    let read = |(index, value): (usize, Value)| {
        let at = format!("content.{index}");
        let kind = value["type"].as_str().filter(|kind| *kind != "text" && !is_image(kind));
        match kind.filter(|_| text_within(&value).is_none()).map(str::to_owned) {
            Some(kind) => Some(ImagePiece::Text(left_out(&mut block.within(&at, value)?, &kind))),
            None => piece(block, &at, value, ImagePlace::ToolResult),
        }
    };
    values.into_iter().enumerate().filter_map(read).collect()
}

fn tool_use(block: &mut Fields<'_>) -> Option<ToolCall> {
    let id = required(block, "id");
    let name = required(block, "name");
    for name in ["caller", "toolset_name"] {
        block.take(name); // who may call and which set a tool is of: the answers say what the client said
    }
    let arguments = block.object("input").unwrap_or_default();
    Some(ToolCall { id: Some(id?), name: name?, arguments: as_arguments(Value::Object(arguments)) })
}

/// Reads the result of a tool. The text of a failure begins with a word that says so, because templates have no place for it.
fn tool_result(block: &mut Fields<'_>) -> Option<Message> {
    let id = required(block, "tool_use_id");
    block.take("toolset_name");
    let mut pieces = match block.take("content") {
        None => Vec::new(),
        Some(Value::String(text)) => vec![ImagePiece::Text(text)],
        Some(Value::Array(blocks)) => result_pieces(block, blocks),
        Some(_) => {
            block.wrong("content", "is neither a string nor an array of blocks");
            Vec::new()
        }
    };
    if block.flag("is_error") == Some(true) {
        mark_failure(&mut pieces);
    }
    Some(Message { tool_call_id: Some(id?), ..Message::new(Role::Tool, images::content(pieces)) })
}

/// Begins a failure's text with the word, unless it says so already.
fn mark_failure(pieces: &mut Vec<ImagePiece>) {
    if !matches!(pieces.first(), Some(ImagePiece::Text(_))) {
        pieces.insert(0, ImagePiece::Text(String::new()));
    }
    if let Some(ImagePiece::Text(text)) = pieces.first_mut()
        && !text.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("error"))
    {
        text.insert_str(0, "Error: ");
    }
}

/// Reads a list of text blocks at `at`.
fn texts(fields: &mut Fields<'_>, at: &str, values: Vec<Value>) -> Vec<String> {
    let read = |(index, value)| match piece(fields, &format!("{at}.{index}"), value, ImagePlace::Elsewhere)? {
        ImagePiece::Text(text) => Some(text),
        ImagePiece::Image(_) => None, // none is read elsewhere
    };
    values.into_iter().enumerate().filter_map(read).collect()
}

/// Reads a block that says something.
fn piece(fields: &mut Fields<'_>, at: &str, value: Value, place: ImagePlace) -> Option<ImagePiece> {
    match block(fields, at, value, place)? {
        Block::Said(piece) => Some(piece),
        other => {
            misplaced(fields, at, &other, "here");
            None
        }
    }
}

fn misplaced(fields: &mut Fields<'_>, at: &str, block: &Block, place: &str) {
    fields.out_of_range(at, &format!("is of type {}, which has no place {place}", block.name()));
}

/// Returns the message of a role that says blocks and does nothing else.
fn said(fields: &mut Fields<'_>, blocks: Vec<Block>, role: Role) -> Message {
    let read = |block| match block {
        Block::Said(piece) => Some(piece),
        other => {
            misplaced(fields, "content", &other, &format!("in a message of role {}", role.as_str()));
            None
        }
    };
    let content = images::content(blocks.into_iter().filter_map(read));
    Message::new(role, content)
}

/// Results come first: they answer the calls right before them.
fn user(fields: &mut Fields<'_>, blocks: Vec<Block>) -> Vec<Message> {
    let (results, others): (Vec<Block>, Vec<Block>) =
        blocks.into_iter().partition(|block| matches!(block, Block::Result(_)));
    let says = others.iter().any(|block| matches!(block, Block::Said(_))) || results.is_empty();
    let said = Some(said(fields, others, Role::User)).filter(|_| says);
    let result = |block| match block {
        Block::Result(message) => Some(message),
        _ => None,
    };
    results.into_iter().filter_map(result).chain(said).collect()
}

fn assistant(fields: &mut Fields<'_>, blocks: Vec<Block>) -> Message {
    let (mut content, mut reasoning, mut tool_calls) = (None::<String>, Vec::new(), Vec::new());
    for block in blocks {
        match block {
            Block::Said(ImagePiece::Text(text)) => content.get_or_insert_default().push_str(&text),
            Block::Thinking(text) => reasoning.push(text),
            Block::Call(call) => tool_calls.push(call),
            other => misplaced(fields, "content", &other, "in a message of role assistant"),
        }
    }
    let content = content.or_else(|| tool_calls.is_empty().then(String::new));
    Message {
        content: content.map(Content::Text),
        reasoning: Some(reasoning.join("\n")).filter(|text| !text.is_empty()),
        tool_calls,
        ..Message::new(Role::Assistant, "")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::Problems;
    use super::*;
    use crate::error::ApiError;

    fn read(body: Value) -> (Vec<Message>, Result<(), ApiError>, Problems) {
        let Value::Object(members) = body else { panic!("an object") };
        let mut problems = Problems::default();
        let mut fields = Fields::new(members, &mut problems);
        let messages = conversation(&mut fields);
        fields.end();
        let checked = problems.check();
        (messages, checked, problems)
    }

    fn messages(values: Value) -> Vec<Message> {
        let (messages, checked, _) = read(json!({"messages": values}));
        assert_eq!(checked, Ok(()));
        messages
    }

    #[test]
    fn blocks_of_an_answer_are_the_message_that_was_generated() {
        let call = json!({"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}});
        let read = messages(json!([
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "h", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "m", "signature": ""},
                {"type": "text", "text": "a\n", "citations": null},
                {"type": "text", "text": "b"},
                call,
            ]},
            {"role": "user", "content": [
                {"type": "text", "text": "and"},
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}, {"type": "text", "text": "s"}]},
                {"type": "text", "text": "then"},
            ]},
        ]));
        let call = ToolCall { id: Some("c".to_owned()), name: "f".to_owned(), arguments: json!({"a": 1}) };
        let answer = Message {
            reasoning: Some("h\nm".to_owned()),
            tool_calls: vec![call],
            ..Message::assistant("a\nb")
        };
        let result = Message { tool_call_id: Some("c".to_owned()), ..Message::new(Role::Tool, "r\ns") };
        assert_eq!(read, [Message::user("q"), answer, result, Message::user("and\nthen")]);
    }

    #[test]
    fn an_answer_of_calls_alone_has_no_content() {
        let call = json!({"type": "tool_use", "id": "c", "name": "f", "input": {}});
        let read =
            messages(json!([{"role": "assistant", "content": [call]}, {"role": "user", "content": "x"}]));
        assert_eq!((&read[0].content, read[0].tool_calls.len()), (&None, 1));
    }

    #[test]
    fn a_failure_begins_with_a_word_that_says_so() {
        let result = |content: Value, is_error: bool| {
            let block =
                json!({"type": "tool_result", "tool_use_id": "c", "content": content, "is_error": is_error});
            messages(json!([{"role": "user", "content": [block]}])).remove(0).content
        };
        let text = |text: &str| Some(Content::Text(text.to_owned()));
        assert_eq!(result(json!("no such file"), true), text("Error: no such file"));
        assert_eq!(result(json!("ERROR 5"), true), text("ERROR 5"));
        assert_eq!(result(Value::Null, true), text("Error: "));
        assert_eq!(result(json!("fine"), false), text("fine"));
    }

    #[test]
    fn what_is_text_in_a_result_is_read_and_the_rest_is_named() {
        let source = |kind: &str| json!({"type": kind, "media_type": "text/plain", "data": "d"});
        let text = json!([{"type": "text", "text": "t"}]);
        for (block, expected) in [
            (json!({"type": "tool_reference", "tool_name": "f"}), "f"),
            (json!({"type": "document", "title": "T", "source": source("text")}), "T\nd"),
            (json!({"type": "document", "source": source("text"), "citations": {"enabled": true}}), "d"),
            (json!({"type": "document", "source": {"type": "content", "content": text}}), "t"),
            (json!({"type": "search_result", "title": "T", "source": "s", "content": text}), "T\ns\nt"),
            (
                json!({"type": "document", "source": source("base64")}),
                "[document: left out; llmctl reads only text and images]",
            ),
            (
                json!({"type": "image", "source": source("base64")}),
                "[image: left out; this model reads only text]",
            ),
        ] {
            let result = json!({"type": "tool_result", "tool_use_id": "c", "content": [block.clone()]});
            let read = messages(json!([{"role": "user", "content": [result]}]));
            assert_eq!(read[0].content, Some(Content::Text(expected.to_owned())), "{block}");
            let cites = block.get("citations").is_some();
            let mut asked = self::read(json!({"messages": [{"role": "user", "content": [block]}]}));
            let ignored = asked.2.take_ignored();
            assert_eq!(ignored.iter().any(|name| name == "messages[].content[].citations"), cites);
            assert_eq!(asked.1.is_ok(), !expected.starts_with('['), "a question: {expected}");
        }
    }

    #[test]
    fn turns_of_one_role_are_one() {
        let read = messages(json!([
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "assistant", "content": "d"},
            {"role": "system", "content": "s"},
            {"role": "user", "content": "e"},
        ]));
        let expected =
            [Message::user("a\nb"), Message::assistant("cd"), Message::system("s"), Message::user("e")];
        assert_eq!(read, expected);
    }

    #[test]
    fn the_bill_is_no_part_of_the_prompt() {
        let system = |system: Value| {
            let (mut messages, checked, mut problems) =
                read(json!({"system": system, "messages": [{"role": "user", "content": "q"}]}));
            assert_eq!(checked, Ok(()));
            let first = messages.remove(0);
            (first, problems.take_notices().len())
        };
        let text = |text: &str| json!({"type": "text", "text": text});
        let bill = "x-anthropic-billing-header: cch=1;";
        assert_eq!(system(json!([text(bill), text("a"), text("b")])), (Message::system("a\nb"), 1));
        assert_eq!(system(json!([text(bill)])), (Message::user("q"), 1));
        assert_eq!(system(json!(format!("{bill}\n\na"))), (Message::system("a"), 1));
        assert_eq!(system(json!("a")), (Message::system("a"), 0));
    }

    #[test]
    fn there_may_be_only_so_many_messages() {
        let many = vec![json!({"role": "user", "content": "x"}); MAX_MESSAGES];
        let (messages, checked, _) = read(json!({"messages": many}));
        assert!(messages.is_empty() && checked.is_err());
    }
}
