//! OpenAI's messages to the crate's vocabulary and back.

use serde_json::{Map, Value, json};

use super::Fields;
use super::hints::OTHER_SERVERS;
use super::images::{self, ImagePiece, ImagePlace, is_image, left_out};
use llmctl_engine::turn::AnswerStart;
use llmctl_models::text::without_lone_surrogates;
use llmctl_template::{Content, Message, Role, ToolCall};

/// The member `messages`: at least one. `knows_role` tells which other roles the template tells apart.
pub fn messages(fields: &mut Fields<'_>, knows_role: &dyn Fn(&str) -> bool) -> Vec<Message> {
    if !fields.has("messages") {
        fields.missing("messages");
        return Vec::new();
    }
    let Some(values) = fields.list("messages") else { return Vec::new() };
    if values.is_empty() {
        fields.out_of_range("messages", "is empty");
    }
    let read = |(index, value)| message(fields.within(&format!("messages[{index}]"), value)?, knows_role);
    values.into_iter().enumerate().filter_map(read).collect()
}

fn message(mut fields: Fields<'_>, knows_role: &dyn Fn(&str) -> bool) -> Option<Message> {
    fields.require("role");
    let role = fields.text("role").map(|name| known_role(&mut fields, &name, knows_role));
    let place = match role {
        Some(Role::Tool) => ImagePlace::ToolResult,
        Some(Role::User | Role::Other(_)) => ImagePlace::User,
        _ => ImagePlace::Elsewhere,
    };
    let ContentParts { content, thoughts } = content(&mut fields, place);
    let content = content.or_else(|| refusal(&mut fields));
    let content = with_images_beside(&mut fields, content, place);
    // Templates show these in messages of their own roles.
    for (name, owner) in [("reasoning_content", Role::Assistant), ("tool_call_id", Role::Tool)] {
        if fields.has(name) && role.as_ref().is_some_and(|role| *role != owner) {
            fields.ignored(name);
        }
    }
    let reasoning = reasoning(&mut fields, thoughts);
    let mut tool_calls = tool_calls(&mut fields);
    tool_calls.extend(function_call(&mut fields));
    let tool_call_id = fields.text("tool_call_id");
    let name = fields.text("name");
    if role != Some(Role::Assistant) {
        refuse_sound(&mut fields);
    }
    OTHER_SERVERS.echoed.iter().for_each(|name| echoed(&mut fields, name));
    fields.end();
    Some(Message { role: role?, content, reasoning, tool_calls, tool_call_id, name })
}

/// Puts images that stand beside the text of a message, as Ollama's clients send them, before it.
fn with_images_beside(
    fields: &mut Fields<'_>,
    content: Option<Content>,
    place: ImagePlace,
) -> Option<Content> {
    let beside = if place == ImagePlace::Elsewhere { vec![] } else { images::list(fields, "images", place) };
    match beside.is_empty() {
        true => content,
        false => {
            Some(images::content(beside.into_iter().chain(content.into_iter().flat_map(images::pieces))))
        }
    }
}

/// Refuses sound that stands beside the text of a message. Without it the answer would be another one. An answer that comes back may
/// carry what its model made.
fn refuse_sound(fields: &mut Fields<'_>) {
    if fields.take("audio").is_some_and(|value| !is_empty(&value)) {
        fields.unsupported("audio", "is sound, and only text and images are supported");
    }
}

/// Takes a member of an answer that came back, and reports it unless it is empty.
pub fn echoed(fields: &mut Fields<'_>, name: &str) {
    if fields.take(name).is_some_and(|value| !is_empty(&value)) {
        fields.ignored(name);
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.values().all(Value::is_null),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// Roles that every chat has, those that the template names, and OpenAI's older word for a tool.
fn known_role(fields: &mut Fields<'_>, name: &str, knows_role: &dyn Fn(&str) -> bool) -> Role {
    match Role::from(name) {
        Role::Other(name) if name == "function" => Role::Tool,
        Role::Other(name) if !knows_role(&name) => {
            let known = format!(
                "= {:?} is not supported, only system, developer, user, assistant and tool",
                super::fields::shown(&name)
            );
            fields.unsupported("role", &known);
            Role::User
        }
        role => role,
    }
}

/// The words of an assistant that refused stand in a member of their own, and it has said nothing else.
fn refusal(fields: &mut Fields<'_>) -> Option<Content> {
    fields.text("refusal").filter(|text| !text.is_empty()).map(Content::Text)
}

/// Returns the reasoning of an echoed answer: the first member with text, of the names that clients use. Members with another
/// text are reported as ignored.
fn reasoning(fields: &mut Fields<'_>, thoughts: Vec<String>) -> Option<String> {
    let named = ["reasoning_content", "reasoning", "thinking"].map(|name| (name, fields.text(name)));
    let said = thoughts.join("\n");
    let first = named.iter().find_map(|(_, text)| text.clone().filter(|text| !text.is_empty()));
    for (name, text) in &named {
        if text.as_ref().is_some_and(|text| !text.is_empty() && Some(text) != first.as_ref()) {
            fields.ignored(name);
        }
    }
    let mut reasoning = first.or(Some(said).filter(|text| !text.is_empty()));
    for name in ["reasoning_details", "thinking_blocks"] {
        let Some(items) = fields.list(name) else { continue };
        let texts = items.iter().filter_map(|item| {
            ["text", "thinking", "summary"].iter().find_map(|member| item[member].as_str())
        });
        let told: String = texts.collect();
        match &reasoning {
            None if !told.is_empty() => reasoning = Some(told),
            Some(same) if *same == told => {}
            _ if items.is_empty() => {}
            _ => fields.ignored(name),
        }
    }
    reasoning
}

/// Content of a message.
#[derive(Default)]
struct ContentParts {
    content: Option<Content>,
    /// ContentParts that were thought and not said.
    thoughts: Vec<String>,
}

/// A string, or parts, beside those of a thought: several texts are one, line by line. Of a tool's result parts of other types are left
/// out.
fn content(fields: &mut Fields<'_>, place: ImagePlace) -> ContentParts {
    let parts = match fields.take("content") {
        None => return ContentParts::default(),
        Some(Value::String(text)) => {
            // An empty answer beside the words of a refusal is no answer.
            let refused = text.is_empty() && fields.has("refusal");
            return ContentParts {
                content: (!refused).then_some(Content::Text(text)),
                ..ContentParts::default()
            };
        }
        Some(Value::Array(parts)) => parts,
        Some(_) => {
            fields.wrong("content", "is neither a string nor an array of parts");
            return ContentParts::default();
        }
    };
    let (mut said, mut thoughts) = (Vec::new(), Vec::new());
    for (index, value) in parts.into_iter().enumerate() {
        match part(fields, &format!("content[{index}]"), value, place) {
            Some(ContentPart::Said(piece)) => said.push(piece),
            Some(ContentPart::Thought(text)) => thoughts.push(text),
            None => {}
        }
    }
    ContentParts { content: Some(images::content(said)), thoughts }
}

enum ContentPart {
    Said(ImagePiece),
    Thought(String),
}

fn part(fields: &mut Fields<'_>, at: &str, part: Value, place: ImagePlace) -> Option<ContentPart> {
    let mut part = fields.within(at, part)?;
    let kind = part.text("type");
    let member = match kind.as_deref() {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some("thinking" | "reasoning") => part.spelled(&["text", "thinking", "reasoning"]),
        Some(kind) if is_image(kind) && place != ImagePlace::Elsewhere => {
            return images::image(part, kind, place).map(ContentPart::Said);
        }
        Some(kind) if place == ImagePlace::ToolResult => {
            return Some(ContentPart::Said(ImagePiece::Text(left_out(&mut part, kind))));
        }
        Some(kind) => {
            let message =
                format!("has a part of type {:?}, which is not supported here", super::fields::shown(kind));
            fields.unsupported("content", &message);
            return None;
        }
        None => {
            part.missing("type");
            return None;
        }
    };
    part.require(member);
    let text = part.text(member);
    for name in ["annotations", "signature", "id", "providerOptions", "provider_options", "cache_control"] {
        echoed(&mut part, name);
    }
    part.end();
    match kind.as_deref() {
        Some("thinking" | "reasoning") => text.map(ContentPart::Thought),
        _ => text.map(|text| ContentPart::Said(ImagePiece::Text(text))),
    }
}

fn tool_calls(fields: &mut Fields<'_>) -> Vec<ToolCall> {
    let calls = fields.list("tool_calls").unwrap_or_default();
    let read = |(index, value)| tool_call(fields.within(&format!("tool_calls[{index}]"), value)?);
    calls.into_iter().enumerate().filter_map(read).collect()
}

/// Levels of arguments that are read as JSON, as of a model's own calls; deeper ones stay text, since what they become part of
/// has to be read back too.
const MAX_DEPTH: usize = 100;

/// Returns true if no array or object lies in this many others.
fn is_within(value: &Value, levels: usize) -> bool {
    let below = |value| levels.checked_sub(1).is_some_and(|levels| is_within(value, levels));
    match value {
        Value::Array(items) => levels > 0 && items.iter().all(below),
        Value::Object(members) => levels > 0 && members.values().all(below),
        _ => true,
    }
}

/// Returns a value as arguments of a call: as it is, or as text if it lies too deep.
pub fn as_arguments(value: Value) -> Value {
    if is_within(&value, MAX_DEPTH) { value } else { Value::String(value.to_string()) }
}

fn tool_call(mut fields: Fields<'_>) -> Option<ToolCall> {
    let id = fields.text("id");
    fields.only("type", &[json!("function")]);
    let Some(function) = fields.object("function") else {
        fields.missing("function");
        return None;
    };
    let called = called(fields.inside("function", function));
    OTHER_SERVERS.echoed_in_calls.iter().for_each(|name| echoed_in_call(&mut fields, name));
    fields.end();
    let (name, arguments) = called?;
    Some(ToolCall { id, name, arguments })
}

/// The place of a call in a stream says nothing; the rest is reported.
fn echoed_in_call(fields: &mut Fields<'_>, name: &str) {
    match name {
        "index" => drop(fields.take(name)),
        _ => echoed(fields, name),
    }
}

/// OpenAI's older form of a call.
fn function_call(fields: &mut Fields<'_>) -> Option<ToolCall> {
    let (name, arguments) = called(fields.nested("function_call")?)?;
    Some(ToolCall { id: None, name, arguments })
}

/// Returns the value of arguments that are JSON text; other text stays a string.
pub fn arguments_of(text: String) -> Value {
    match serde_json::from_slice(&without_lone_surrogates(text.as_bytes())) {
        Ok(value) if is_within(&value, MAX_DEPTH) => value,
        _ => Value::String(text),
    }
}

/// The name and the arguments of a call.
fn called(mut function: Fields<'_>) -> Option<(String, Value)> {
    function.require("name");
    let name = function.text("name");
    // OpenAI sends arguments as a string of JSON; templates want the value.
    let arguments = match function.take("arguments") {
        None => Value::Object(Map::new()),
        Some(Value::String(text)) => arguments_of(text),
        Some(other) => other,
    };
    OTHER_SERVERS.echoed_in_calls.iter().for_each(|name| echoed_in_call(&mut function, name));
    function.end();
    Some((name?, arguments))
}

/// Takes the last message as the beginning of the answer if the request says so: with `continue_final_message`, or by asking
/// for no header of another answer.
pub fn continued(fields: &mut Fields<'_>, messages: &mut Vec<Message>) -> AnswerStart {
    const CONTINUES: &str = "continue_final_message";
    const ADDS: &str = "add_generation_prompt";
    let (continues, adds) = (fields.flag(CONTINUES), fields.flag(ADDS));
    let name = match (continues, adds) {
        (Some(true), Some(true)) => {
            fields.out_of_range(CONTINUES, "and add_generation_prompt exclude each other");
            return AnswerStart::Nothing;
        }
        (Some(true), _) => CONTINUES,
        (None, Some(false)) => ADDS,
        (Some(false), Some(false)) => {
            fields.unsupported(ADDS, "= false is supported only where the last message is continued");
            return AnswerStart::Nothing;
        }
        _ => return AnswerStart::Nothing,
    };
    let begun = messages.last().and_then(begun);
    match &begun {
        Some(_) => drop(messages.pop()),
        None => fields.unsupported(name, "needs an answer without tool calls as the last message"),
    }
    begun.unwrap_or_default()
}

/// Takes a last message of the assistant as the beginning of the answer, as Anthropic's and Ollama's APIs do.
pub fn begun_last(fields: &mut Fields<'_>, messages: &mut Vec<Message>) -> AnswerStart {
    let Some(last) = messages.pop_if(|last| last.role == Role::Assistant) else {
        return AnswerStart::Nothing;
    };
    begun(&last).unwrap_or_else(|| {
        fields.unsupported("messages", "ends with calls of tools, whose results must follow");
        AnswerStart::Nothing
    })
}

/// Returns a message as the beginning of an answer; `None` unless it is one of the assistant's without calls.
fn begun(message: &Message) -> Option<AnswerStart> {
    let content = match &message.content {
        Some(Content::Text(text)) => text.clone(),
        None => String::new(),
        Some(Content::Parts(_)) => return None,
    };
    let reasoning = message.reasoning.clone().unwrap_or_default();
    let is_answer = message.role == Role::Assistant && message.tool_calls.is_empty();
    is_answer.then_some(AnswerStart::Message { reasoning, content })
}

/// Refuses to continue an answer under a constraint, which holds for whole answers. `param` is the field that begins it.
pub fn check_continued(
    fields: &mut Fields<'_>,
    param: &str,
    answer_start: &AnswerStart,
    has_constraint: bool,
) {
    if has_constraint && *answer_start != AnswerStart::Nothing {
        fields.unsupported(param, "has no place beside a constraint, which holds for the whole answer");
    }
}

/// A message as OpenAI's API shows it.
pub fn message_json(message: &Message) -> Value {
    let mut members = Map::new();
    members.insert("role".to_owned(), message.role.as_str().into());
    let content = match &message.content {
        None => Value::Null,
        Some(Content::Text(text)) if text.is_empty() && !message.tool_calls.is_empty() => Value::Null,
        Some(Content::Text(text)) => text.as_str().into(),
        Some(Content::Parts(parts)) => Value::Array(parts.clone()),
    };
    members.insert("content".to_owned(), content);
    for (name, value) in [
        ("reasoning_content", &message.reasoning),
        ("tool_call_id", &message.tool_call_id),
        ("name", &message.name),
    ] {
        if let Some(value) = value {
            members.insert(name.to_owned(), value.as_str().into());
        }
    }
    if !message.tool_calls.is_empty() {
        members.insert("tool_calls".to_owned(), message.tool_calls.iter().map(tool_call_json).collect());
    }
    Value::Object(members)
}

/// A call with its arguments as text, as OpenAI's API shows it.
pub fn tool_call_json(call: &ToolCall) -> Value {
    let arguments = match &call.arguments {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    };
    json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
}

#[cfg(test)]
mod tests {
    use super::super::Problems;
    use super::*;
    use crate::error::ApiError;

    fn read(values: Value) -> (Vec<Message>, Result<(), ApiError>) {
        let mut problems = Problems::default();
        let body = Map::from_iter([("messages".to_owned(), values)]);
        let mut fields = Fields::new(body, &mut problems);
        let messages = messages(&mut fields, &|role| role == "critic");
        fields.end();
        (messages, problems.check())
    }

    #[test]
    fn a_message_goes_there_and_back() {
        let sent = json!([
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q", "name": "me"},
            {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\":[1,null]}"}},
                {"id": "d", "type": "function", "function": {"name": "g", "arguments": "not json"}},
            ]},
            {"role": "tool", "content": "r", "tool_call_id": "c"},
        ]);
        let (messages, checked) = read(sent.clone());
        assert_eq!(checked, Ok(()));
        assert_eq!(messages[2].tool_calls[0].arguments, json!({"a": [1, null]}));
        assert_eq!(messages.iter().map(message_json).collect::<Value>(), sent);
    }

    /// Arguments lie deeper in the record of a turn than in their own text, and the record must stay readable.
    #[test]
    fn arguments_that_lie_too_deep_stay_text() {
        let nested = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
        let read = |arguments: String| {
            let call =
                json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
            let (messages, checked) =
                read(json!([{"role": "assistant", "content": null, "tool_calls": [call]}]));
            assert_eq!(checked, Ok(()));
            messages[0].tool_calls[0].arguments.clone()
        };
        assert!(read(nested(MAX_DEPTH)).is_array());
        for levels in [MAX_DEPTH + 1, 127] {
            assert_eq!(read(nested(levels)), Value::String(nested(levels)));
        }
    }

    #[test]
    fn what_clients_send_back_of_answers_is_taken() {
        let (messages, checked) = read(json!([{
            "role": "assistant", "content": "x", "refusal": null, "annotations": [], "audio": null,
            "function_call": null, "tool_calls": null, "images": [], "parsed": {"a": 1},
            "provider_specific_fields": {"refusal": null},
        }, {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]));
        assert_eq!((checked, messages), (Ok(()), vec![Message::assistant("x"), Message::user("a")]));
    }

    #[test]
    fn what_was_thought_is_taken_once() {
        let thought = |members: Value| {
            let mut message = json!({"role": "assistant", "content": "x"});
            message.as_object_mut().expect("an object").extend(members.as_object().expect("one").clone());
            let mut problems = Problems::default();
            let body = Map::from_iter([("messages".to_owned(), json!([message]))]);
            let mut fields = Fields::new(body, &mut problems);
            let read = messages(&mut fields, &|_| false);
            fields.end();
            assert_eq!(problems.check(), Ok(()), "{message}");
            assert_eq!(read[0].content, Some(Content::Text("x".to_owned())));
            (read[0].reasoning.clone(), problems.take_ignored())
        };
        let hm = || Some("hm".to_owned());
        let none = Vec::<String>::new;
        let blocks = json!([{"type": "thinking", "thinking": "hm", "signature": "s"}]);
        assert_eq!(thought(json!({"reasoning": "hm", "reasoning_content": "hm"})), (hm(), none()));
        assert_eq!(thought(json!({"thinking_blocks": blocks, "reasoning_content": "hm"})), (hm(), none()));
        assert_eq!(thought(json!({"thinking_blocks": blocks})), (hm(), none()));
        assert_eq!(
            thought(json!({"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]})),
            (hm(), none())
        );
        assert_eq!(
            thought(json!({"reasoning": "other", "reasoning_content": "hm"})),
            (hm(), vec!["messages[].reasoning".to_owned()])
        );
        let parts = json!([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}]);
        assert_eq!(thought(json!({"content": parts})), (hm(), none()));
        let parts = json!([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]);
        for (members, reasoning, ignored) in [
            (json!({"role": "user", "reasoning_content": "hm"}), hm(), "messages[].reasoning_content"),
            (json!({"role": "user", "tool_call_id": "c"}), None, "messages[].tool_call_id"),
            (json!({"content": parts}), None, "messages[].content[].cache_control"),
        ] {
            assert_eq!(thought(members), (reasoning, vec![ignored.to_owned()]));
        }
    }

    #[test]
    fn what_a_result_holds_beside_text_is_named_in_it() {
        let parts = json!([{"type": "text", "text": "t"}, {"type": "image_url", "image_url": {"url": "x"}}]);
        let (messages, checked) =
            read(json!([{"role": "tool", "tool_call_id": "c", "content": parts, "phase": "x"}]));
        let expected = "t\n[image_url: left out; this model reads only text]";
        assert_eq!((&messages[0].content, checked), (&Some(Content::Text(expected.to_owned())), Ok(())));
    }

    #[test]
    fn older_forms_of_calls_and_refusals_are_read() {
        let (messages, checked) = read(json!([
            {"role": "assistant", "content": null, "function_call": {"name": "f", "arguments": "{\"a\":1}"}},
            {"role": "function", "name": "f", "content": "2"},
            {"role": "assistant", "content": null, "refusal": "no"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}},
            ]},
            {"role": "critic", "content": "hm"},
        ]));
        assert_eq!(checked, Ok(()));
        assert_eq!(messages[0].tool_calls[0].arguments, json!({"a": 1}));
        assert_eq!(messages[1].role, Role::Tool);
        assert_eq!(messages[2].content, Some(Content::Text("no".to_owned())));
        assert_eq!(messages[4].role, Role::Other("critic".to_owned()), "the template knows it");
    }

    #[test]
    fn what_is_wrong_is_named_by_its_place() {
        let refused = |message: Value| {
            let error = read(json!([{"role": "user", "content": "a"}, message])).1.expect_err("refused");
            (error.status.as_u16(), error.param.expect("a parameter"))
        };
        for (message, status, param) in [
            (json!("x"), 422, "messages[1]"),
            (json!({"content": "x"}), 422, "messages[1].role"),
            (json!({"role": 1, "content": "x"}), 422, "messages[1].role"),
            (json!({"role": "weird", "content": "x"}), 400, "messages[1].role"),
            (json!({"role": "user", "content": 1}), 422, "messages[1].content"),
            (json!({"role": "user", "content": [{"type": "text"}]}), 422, "messages[1].content[0].text"),
            (
                json!({"role": "user", "content": [{"type": "image_url"}]}),
                422,
                "messages[1].content[0].image_url",
            ),
            (
                json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}),
                400,
                "messages[1].content[0].image_url",
            ),
            (json!({"role": "user", "content": "x", "images": ["iVBORw0K"]}), 400, "messages[1].images[0]"),
            (json!({"role": "system", "content": [{"type": "image"}]}), 400, "messages[1].content"),
            (json!({"role": "user", "content": "x", "audio": {"data": "x"}}), 400, "messages[1].audio"),
            (json!({"role": "user", "content": "x", "cached": true}), 400, "messages[1].cached"),
            (json!({"role": "assistant", "tool_calls": [{}]}), 422, "messages[1].tool_calls[0].function"),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}),
                422,
                "messages[1].tool_calls[0].function.name",
            ),
        ] {
            assert_eq!(refused(message), (status, param.to_owned()));
        }
        assert_eq!(read(json!([])).1.expect_err("refused").status, 400);
        assert_eq!(read(json!({})).1.expect_err("refused").status, 422);
    }
}
