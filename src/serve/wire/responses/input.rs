//! `input` of the Responses API to messages.
//!
//! Items of one assistant turn (reasoning, message, calls) become one message, as the model wrote it. Text
//! that stands between a call and its result belongs to the message of the call.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value, json};

use super::tools::{INPUT, shown_name};
use crate::wire::Fields;
use crate::wire::fields::shown;
use crate::wire::images::{self, ImagePiece, ImagePlace, image, is_image, left_out};
use crate::wire::message::arguments_of;
use llmctl_template::{Content, Message, Role, ToolCall};

/// Most items of a request: more than any context holds.
const MAX_ITEMS: usize = 1 << 15;

/// The member with a tool's result.
const OUTPUT: &str = "output";

/// Begins the reasoning that a client keeps without reading it.
const SEALED: &str = "llmctl1.";

/// Returns reasoning as a client keeps it without reading it.
pub fn sealed(reasoning: &str) -> String {
    format!("{SEALED}{}", BASE64_STANDARD.encode(reasoning))
}

/// Returns the reasoning of [`sealed`]; `None` if another server made it.
fn unsealed(text: &str) -> Option<String> {
    let bytes = BASE64_STANDARD.decode(text.strip_prefix(SEALED)?).ok()?;
    String::from_utf8(bytes).ok()
}

/// Reads the member `input`: a text, or items.
pub fn input(fields: &mut Fields<'_>) -> Vec<Message> {
    let items = match fields.take("input") {
        None => return Vec::new(),
        Some(Value::String(text)) => return vec![Message::user(text)],
        Some(Value::Array(items)) => items,
        Some(_) => {
            fields.wrong("input", "is neither a string nor an array of items");
            return Vec::new();
        }
    };
    if items.len() > MAX_ITEMS {
        fields.out_of_range("input", &format!("has more than {MAX_ITEMS} items"));
        return Vec::new();
    }
    let mut messages = InputMessages::default();
    for (index, item) in items.into_iter().enumerate() {
        read_item(fields, &mut messages, &format!("input[{index}]"), item);
    }
    messages.close();
    messages.done
}

/// Messages that were read so far.
#[derive(Default)]
struct InputMessages {
    done: Vec<Message>,
    /// The assistant's message that more items may belong to.
    open: Option<Message>,
}

impl InputMessages {
    fn close(&mut self) {
        self.done.extend(self.open.take());
    }

    fn push(&mut self, message: Message) {
        self.close();
        self.done.push(message);
    }

    /// Returns the assistant's message, a new one unless `belongs` to the open one.
    fn assistant(&mut self, belongs: impl FnOnce(&Message) -> bool) -> &mut Message {
        if self.open.as_ref().is_some_and(|open| !belongs(open)) {
            self.close();
        }
        self.open.get_or_insert_with(|| Message { content: None, ..Message::assistant("") })
    }

    fn says(&mut self, text: &str) {
        let message = self.assistant(|open| open.content.is_none() || !open.tool_calls.is_empty());
        match &mut message.content {
            Some(Content::Text(content)) => content.push_str(text),
            content => *content = Some(Content::Text(text.to_owned())),
        }
    }

    fn thinks(&mut self, text: &str) {
        let message = self.assistant(|open| open.content.is_none() || !open.tool_calls.is_empty());
        match &mut message.reasoning {
            Some(reasoning) => *reasoning = format!("{reasoning}\n{text}"),
            None => message.reasoning = Some(text.to_owned()),
        }
    }

    fn calls(&mut self, call: ToolCall) {
        self.assistant(|_| true).tool_calls.push(call);
    }
}

fn read_item(fields: &mut Fields<'_>, messages: &mut InputMessages, at: &str, item: Value) {
    let Value::Object(members) = item else { return fields.wrong(at, "is not an object") };
    let has_role = members.contains_key("role");
    let mut item = fields.inside(at, members);
    ["id", "status"].iter().for_each(|name| drop(item.take(name))); // of this server's own answers
    match item.text("type").as_deref() {
        None if has_role => read_message(item, messages),
        None => item.missing("type"),
        Some("message") => read_message(item, messages),
        Some("reasoning") => read_reasoning(item, messages),
        Some("function_call") => read_call(item, messages, "arguments"),
        Some("custom_tool_call") => read_call(item, messages, INPUT),
        Some("function_call_output" | "custom_tool_call_output") => read_output(item, messages),
        Some(other) => fields.ignored(&format!("input[].{}", shown(other))),
    }
}

fn read_message(mut item: Fields<'_>, messages: &mut InputMessages) {
    item.require("role");
    let role = item.text("role");
    item.require("content");
    match role.as_deref() {
        Some("assistant") => messages.says(&text(&mut item, "content").unwrap_or_default()),
        Some(role @ ("user" | "system" | "developer")) => {
            let place = if role == "user" { ImagePlace::User } else { ImagePlace::Elsewhere };
            let content = content(&mut item, "content", place);
            messages.push(Message { content, ..Message::new(Role::from(role), "") });
        }
        Some(_) => item.out_of_range("role", "is none of user, system, developer and assistant"),
        None => drop(item.take("content")),
    }
    item.ignore_rest();
}

/// Reads text, or parts that are all text, line by line.
fn text(item: &mut Fields<'_>, name: &str) -> Option<String> {
    match content(item, name, ImagePlace::Elsewhere)? {
        Content::Text(text) => Some(text),
        Content::Parts(_) => None, // no image is read elsewhere
    }
}

/// Reads text, or parts.
fn content(item: &mut Fields<'_>, name: &str, place: ImagePlace) -> Option<Content> {
    match item.take(name)? {
        Value::String(text) => Some(Content::Text(text)),
        Value::Array(parts) => {
            let part = |(index, part)| piece(item, &format!("{name}[{index}]"), part, place);
            Some(images::content(parts.into_iter().enumerate().filter_map(part)))
        }
        _ => item.none(name, "is neither a string nor an array of parts"),
    }
}

fn piece(item: &mut Fields<'_>, at: &str, part: Value, place: ImagePlace) -> Option<ImagePiece> {
    let mut part = item.within(at, part)?;
    let kind = part.text("type");
    let member = match kind.as_deref() {
        Some("input_text" | "output_text" | "text" | "reasoning_text" | "summary_text") => "text",
        Some("refusal") => "refusal",
        Some(kind) if is_image(kind) && place != ImagePlace::Elsewhere => return image(part, kind, place),
        Some(kind) if place == ImagePlace::ToolResult => {
            return Some(ImagePiece::Text(left_out(&mut part, kind)));
        }
        Some(other) => {
            let what = format!("is of type {:?}, which is not supported here", shown(other));
            item.unsupported(at, &what);
            return None;
        }
        None => {
            part.missing("type");
            return None;
        }
    };
    part.require(member);
    let text = part.text(member);
    ["annotations", "logprobs"].iter().for_each(|name| drop(part.take(name))); // of this server's own answers
    part.ignore_rest();
    text.map(ImagePiece::Text)
}

/// Reasoning as text, or else as this server sealed it.
fn read_reasoning(mut item: Fields<'_>, messages: &mut InputMessages) {
    let said = text(&mut item, "content").filter(|text| !text.is_empty());
    let sealed = item.text("encrypted_content");
    let has_sealed = sealed.is_some();
    match said.or_else(|| unsealed(&sealed?)) {
        Some(text) => messages.thinks(&text),
        None if has_sealed => item.ignored("encrypted_content"), // only the server that made it can read it
        None => {}
    }
    let summary = text(&mut item, "summary");
    if summary.is_some_and(|summary| !summary.is_empty()) {
        item.ignored("summary");
    }
    item.ignore_rest();
}

/// A call whose arguments, or text, are in `member`.
fn read_call(mut item: Fields<'_>, messages: &mut InputMessages, member: &str) {
    for name in ["name", "call_id"] {
        item.require(name);
    }
    let (name, id, namespace) = (item.text("name"), item.text("call_id"), item.text("namespace"));
    let text = item.text(member);
    let arguments = match text {
        None => Value::Object(Map::new()),
        Some(text) if member == INPUT => json!({INPUT: text}),
        Some(text) => arguments_of(text),
    };
    if let (Some(name), id @ Some(_)) = (name, id) {
        messages.calls(ToolCall { id, name: shown_name(&name, namespace.as_deref()), arguments });
    }
    item.ignore_rest();
}

fn read_output(mut item: Fields<'_>, messages: &mut InputMessages) {
    for name in ["call_id", OUTPUT] {
        item.require(name);
    }
    let id = item.text("call_id");
    let content = content(&mut item, OUTPUT, ImagePlace::ToolResult);
    messages.push(Message { tool_call_id: id, content, ..Message::new(Role::Tool, "") });
    item.ignore_rest();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ApiError;
    use crate::wire::Problems;

    fn read(items: Value) -> (Vec<Message>, Vec<String>, Result<(), ApiError>) {
        let mut problems = Problems::new(false);
        let mut fields = Fields::new(Map::from_iter([("input".to_owned(), items)]), &mut problems);
        let messages = input(&mut fields);
        fields.end();
        let checked = problems.check();
        (messages, problems.take_ignored(), checked)
    }

    #[test]
    fn items_of_one_assistant_turn_are_one_message() {
        let (messages, ignored, checked) = read(json!([
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
            {"role": "user", "content": "q"},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "id": "m", "status": "completed", "role": "assistant",
             "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "id": "fc", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{\"x\":1}"},
            {"type": "message", "role": "assistant", "content": "b"},
            {"type": "custom_tool_call", "call_id": "d", "name": "p", "input": "text"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "2"}]},
            {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_image", "image_url": "x"}]},
            {"type": "web_search_call", "id": "ws"},
        ]));
        let passed_over = ["input[].output[].input_image", "input[].web_search_call"].map(str::to_owned);
        assert_eq!((checked, ignored), (Ok(()), passed_over.to_vec()));
        let call = |id: &str, name: &str, arguments: Value| ToolCall {
            id: Some(id.to_owned()),
            name: name.to_owned(),
            arguments,
        };
        let tool = |id: &str, text: &str| Message {
            tool_call_id: Some(id.to_owned()),
            ..Message::new(Role::Tool, text)
        };
        let assistant = Message {
            reasoning: Some("hm".to_owned()),
            tool_calls: vec![call("c", "n__f", json!({"x": 1})), call("d", "p", json!({"input": "text"}))],
            ..Message::assistant("ab")
        };
        let expected = [
            Message::new(Role::Developer, "d"),
            Message::user("q"),
            assistant,
            tool("c", "1\n2"),
            tool("d", "[input_image: left out; this model reads only text]"),
        ];
        assert_eq!(messages, expected);
    }

    #[test]
    fn sealed_reasoning_is_read_by_the_server_that_sealed_it() {
        let thought = |sealed: String| {
            let item =
                json!({"type": "reasoning", "summary": [], "content": null, "encrypted_content": sealed});
            let (messages, ignored, checked) = read(json!([item, {"role": "assistant", "content": "a"}]));
            assert_eq!((checked, messages.len()), (Ok(()), 1));
            (messages[0].reasoning.clone(), ignored)
        };
        assert_eq!(thought(sealed("hm 🦀")), (Some("hm 🦀".to_owned()), vec![]));
        let foreign = vec!["input[].encrypted_content".to_owned()];
        assert_eq!(thought("gAAAAB".to_owned()), (None, foreign));
    }

    #[test]
    fn two_messages_of_the_assistant_stay_two() {
        let (messages, ..) = read(json!([
            {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"},
        ]));
        assert_eq!(messages, [Message::assistant("a"), Message::assistant("b")]);
    }

    #[test]
    fn a_malformed_item_is_named_by_its_index() {
        let refused = |item: Value| {
            let error = read(json!([{"role": "user", "content": "a"}, item])).2.expect_err("refused");
            (error.status.as_u16(), error.param.expect("a parameter"))
        };
        let image = json!({"type": "input_image", "image_url": "x"});
        let text = json!({"type": "input_text", "text": "x"});
        for (item, status, param) in [
            (json!(1), 422, "input[1]"),
            (json!({"content": "x"}), 422, "input[1].type"),
            (json!({"role": "critic", "content": "x"}), 400, "input[1].role"),
            (json!({"role": "user"}), 422, "input[1].content"),
            (json!({"role": "user", "content": [text, image]}), 400, "input[1].content[1].image_url"),
            (json!({"role": "system", "content": [text, image]}), 400, "input[1].content[1]"),
            (json!({"role": "user", "content": [{"type": "input_text"}]}), 422, "input[1].content[0].text"),
            (json!({"type": "function_call", "name": "f"}), 422, "input[1].call_id"),
            (json!({"type": "function_call_output", "call_id": "c"}), 422, "input[1].output"),
        ] {
            assert_eq!(refused(item.clone()), (status, param.to_owned()), "{item}");
        }
        assert_eq!(read(json!(1)).2.expect_err("refused").param.as_deref(), Some("input"));
    }
}
