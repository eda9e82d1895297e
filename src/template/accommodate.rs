//! Changes a conversation so that a template that cannot show all of it loses nothing.
//!
//! A template that prints no system messages, or refuses them, gets them in the neighbouring user turn; one that takes a
//! system message at the start only gets those behind it there. One that shows the model no tools, or no way to call them,
//! gets the tools described in the system prompt, calls as text of the answers that made them, and results as questions. A developer's
//! message is the system's where the template knows no difference. Calls and results are arranged first (`arrange`). All of it depends on
//! nothing but the template and the messages before the next answer, so that a longer conversation begins with the same text.

use std::borrow::Cow;
use std::fmt::Write as _;

use serde_json::{Value, json};

use super::arrange::{CallIds, arrange, missing_results};
use super::images::{self, ImageMarkup, is_image};
use super::{Content, Conversation, Message, Role, ToolCall, python, text_part};

/// Asks the model for the generic tool-call format; the tools follow, one per line.
const TOOLS: &str = "# Tools\n\nYou may call tools. Write each call as a JSON object between tags:\n<tool_call>\n\
    {\"name\": \"TOOL\", \"arguments\": {\"PARAMETER\": \"VALUE\"}}\n</tool_call>\nAfter your calls, stop: their results come \
    in the next message, between <tool_response> and </tool_response>. Without need of a tool, answer as usual. The tools, with \
    JSON schemas of their parameters:";

/// The changes that a template needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Accommodation {
    /// All system messages go into user turns.
    pub merges_system: bool,
    /// System messages behind the first message go into user turns.
    pub merges_later_system: bool,
    /// Tools, calls and results are shown as text, in the generic format.
    pub spells_tools: bool,
    /// A developer's messages are system messages.
    pub merges_developer: bool,
    /// Every content is a list of parts.
    pub lists_parts: bool,
    pub call_ids: CallIds,
}

impl Accommodation {
    /// Returns the conversation with its calls and results arranged, and as many messages.
    pub fn arrange<'a>(self, conversation: &'a Conversation) -> Cow<'a, Conversation> {
        let mut arranged = Cow::Borrowed(conversation);
        if conversation.messages.iter().any(is_about_tools) {
            arrange(&mut arranged.to_mut().messages, self.call_ids);
        }
        arranged
    }

    /// The conversation as the template gets it; without `images`, for a model that reads text alone.
    pub fn apply<'a>(
        self,
        conversation: &'a Conversation,
        images: Option<&ImageMarkup>,
    ) -> Cow<'a, Conversation> {
        let mut adapted = self.placed(conversation, images);
        if let Some(images) = images.filter(|_| adapted.images().next().is_some()) {
            images.form(&mut adapted.to_mut().messages);
        }
        if self.lists_parts {
            adapted.to_mut().messages.iter_mut().for_each(list_parts);
        }
        adapted
    }

    /// The conversation as the template gets it, but with images that name their files: all that the prompt has, in its order.
    pub fn placed<'a>(
        self,
        conversation: &'a Conversation,
        images: Option<&ImageMarkup>,
    ) -> Cow<'a, Conversation> {
        let has_tools = !conversation.tools.is_empty() || conversation.messages.iter().any(is_about_tools);
        let spells = self.spells_tools && has_tools;
        let mut adapted = self.arrange(conversation);
        if let Some(images) = images {
            images.guard(adapted.to_mut());
        }
        for (index, message) in missing_results(&adapted.messages).into_iter().rev() {
            adapted.to_mut().messages.insert(index, message);
        }
        let is_developers = |message: &Message| self.merges_developer && message.role == Role::Developer;
        if adapted.messages.iter().any(is_developers) {
            merge_developer(&mut adapted.to_mut().messages);
        }
        if num_in_results(&adapted.messages) > 0 {
            match images {
                None => {
                    let results = adapted.to_mut().messages.iter_mut();
                    images::leave_out_images(results.filter(|message| message.role == Role::Tool));
                }
                Some(images) if images.in_tool.is_none() && !spells => {
                    images::move_from_results(&mut adapted.to_mut().messages);
                }
                Some(_) => {}
            }
        }
        if !spells && self.num_moved_system(&adapted.messages) == 0 {
            return adapted;
        }
        let mut adapted = adapted.into_owned();
        if spells {
            spell_tools(&mut adapted);
        }
        if let Some(first) = self.first_moved_system() {
            merge_system(&mut adapted.messages, first);
        }
        Cow::Owned(adapted)
    }

    /// Returns how many system messages the template gets elsewhere than where they stand.
    pub fn num_moved_system(self, messages: &[Message]) -> usize {
        let Some(first) = self.first_moved_system() else { return 0 };
        messages.iter().skip(first).filter(|message| message.role == Role::System).count()
    }

    /// Index from which on system messages are moved; `None` if the template takes them anywhere.
    fn first_moved_system(self) -> Option<usize> {
        match self {
            Self { merges_system: true, .. } => Some(0),
            Self { merges_later_system: true, .. } => Some(1),
            _ => None,
        }
    }
}

/// Returns the number of images in tool results.
fn num_in_results(messages: &[Message]) -> usize {
    messages.iter().filter(|message| message.role == Role::Tool).flat_map(Message::images).count()
}

fn list_parts(message: &mut Message) {
    message.content = message.content.take().map(|content| content.into_parts().into());
}

fn is_about_tools(message: &Message) -> bool {
    message.role == Role::Tool || !message.tool_calls.is_empty()
}

fn spell_tools(conversation: &mut Conversation) {
    let tools = std::mem::take(&mut conversation.tools);
    let mut messages: Vec<Message> = Vec::with_capacity(conversation.messages.len() + 1);
    let mut is_behind_result = false;
    for mut message in std::mem::take(&mut conversation.messages) {
        let is_result = message.role == Role::Tool;
        if is_result {
            let mut response = Message::user("<tool_response>\n");
            join(&mut response, "", message);
            add(&mut response, "\n</tool_response>".to_owned(), false);
            message = response;
        } else if !message.tool_calls.is_empty() {
            let calls = std::mem::take(&mut message.tool_calls);
            message.content = Some(Content::Text(with_calls(&text_of(&message), &calls)));
        }
        // Roles take turns: results and the question behind them are one message.
        match messages.last_mut() {
            Some(last) if is_behind_result && message.role == Role::User => join(last, "\n", message),
            _ => messages.push(message),
        }
        is_behind_result = is_result;
    }
    if !tools.is_empty() {
        describe(&tools, &mut messages);
    }
    conversation.messages = messages;
}

/// Says in the system prompt what tools there are.
fn describe(tools: &[Value], messages: &mut Vec<Message>) {
    let mut text = TOOLS.to_owned();
    for tool in tools {
        let function = tool.get("function").unwrap_or(tool);
        let shown = ["name", "description", "parameters"].into_iter();
        let shown = shown.filter_map(|key| Some((key.to_owned(), function.get(key)?.clone())));
        let _ = write!(text, "\n{}", spelt(&Value::Object(shown.collect())));
    }
    match messages.first_mut().filter(|message| message.role == Role::System) {
        Some(system) => add(system, format!("\n\n{text}"), false),
        None => messages.insert(0, Message::system(text)),
    }
}

fn with_calls(text: &str, calls: &[ToolCall]) -> String {
    let call = |call: &ToolCall| {
        let object = json!({"name": call.name, "arguments": call.arguments});
        format!("<tool_call>\n{}\n</tool_call>", spelt(&object))
    };
    let calls = calls.iter().map(call);
    let text = Some(text.to_owned()).filter(|text| !text.is_empty());
    text.into_iter().chain(calls).collect::<Vec<_>>().join("\n")
}

/// JSON spaced as grammars have models write it.
fn spelt(value: &Value) -> String {
    python::dumps(value).unwrap_or_else(|_| value.to_string())
}

/// Makes system messages of a developer's; behind another system message, a part of it.
fn merge_developer(messages: &mut Vec<Message>) {
    let mut merged: Vec<Message> = Vec::with_capacity(messages.len());
    for message in std::mem::take(messages) {
        match (&message.role, merged.last_mut()) {
            (Role::Developer, Some(last)) if last.role == Role::System => {
                add(last, format!("\n\n{}", text_of(&message)), false);
            }
            (Role::Developer, _) => merged.push(Message { role: Role::System, ..message }),
            _ => merged.push(message),
        }
    }
    *messages = merged;
}

/// Moves system messages from `first` on behind the user turn that they follow, else in front of the one that follows them. A
/// tool's result counts as the user's; between two answers a system message becomes a user turn of its own.
fn merge_system(messages: &mut Vec<Message>, first: usize) {
    let mut waiting: Vec<String> = Vec::new();
    let mut merged: Vec<Message> = Vec::with_capacity(messages.len());
    let mut is_behind_moved = false;
    for (index, mut message) in std::mem::take(messages).into_iter().enumerate() {
        let is_input = matches!(message.role, Role::User | Role::Tool);
        if message.role == Role::System && index >= first {
            let text = text_of(&message);
            match merged.last_mut().filter(|last| waiting.is_empty() && last.role != Role::Assistant) {
                Some(last) => add(last, format!("\n\n{text}"), false),
                None => waiting.push(text),
            }
            is_behind_moved = true;
            continue;
        }
        let follows_moved = std::mem::take(&mut is_behind_moved);
        // Roles take turns: what stood between two questions joins them.
        if let Some(last) = merged.last_mut().filter(|last| {
            follows_moved && waiting.is_empty() && last.role == Role::User && message.role == Role::User
        }) {
            join(last, "\n\n", message);
            continue;
        }
        if is_input && !waiting.is_empty() {
            add(&mut message, std::mem::take(&mut waiting).join("\n\n") + "\n\n", true);
        } else if !waiting.is_empty() {
            merged.push(Message::user(std::mem::take(&mut waiting).join("\n\n")));
        }
        merged.push(message);
    }
    if !waiting.is_empty() {
        merged.push(Message::user(waiting.join("\n\n")));
    }
    *messages = merged;
}

/// Adds a text behind, or in front of (`is_first`), what a message says.
fn add(message: &mut Message, text: String, is_first: bool) {
    if let Some(Content::Parts(parts)) = &mut message.content {
        let at = if is_first { 0 } else { parts.len() };
        return parts.insert(at, text_part(&text));
    }
    let said = text_of(message);
    message.content = Some(Content::Text(if is_first { text + &said } else { said + &text }));
}

/// Adds what another message says behind what a message says, with its images.
fn join(message: &mut Message, between: &str, other: Message) {
    match other.content {
        Some(Content::Parts(parts)) if parts.iter().any(is_image) => {
            let mut all = message.content.take().map(Content::into_parts).unwrap_or_default();
            all.extend([text_part(between)].into_iter().chain(parts));
            message.content = Some(all.into());
        }
        _ => add(message, format!("{between}{}", text_of(&other)), false),
    }
}

/// Returns the text of a message, its parts joined.
fn text_of(message: &Message) -> String {
    message.content.as_ref().map(|content| content.texts().join("\n")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(
        accommodation: Accommodation,
        messages: Vec<Message>,
        tools: Vec<Value>,
    ) -> Vec<(String, String)> {
        let conversation = Conversation { messages, tools, ..Conversation::default() };
        let shown = accommodation.apply(&conversation, None);
        assert!(shown.tools.is_empty() || !accommodation.spells_tools);
        let text = |message: &Message| (message.role.as_str().to_owned(), text_of(message));
        shown.messages.iter().map(text).collect()
    }

    fn pair(role: &str, text: &str) -> (String, String) {
        (role.to_owned(), text.to_owned())
    }

    #[test]
    fn system_messages_go_in_front_of_the_next_question() {
        let merging = Accommodation { merges_system: true, ..Accommodation::default() };
        let messages = vec![
            Message::system("Be brief."),
            Message::user("Hi"),
            Message::assistant("Hello."),
            Message::system("Be long."),
            Message::user("Go on"),
        ];
        let expected =
            [pair("user", "Be brief.\n\nHi"), pair("assistant", "Hello."), pair("user", "Be long.\n\nGo on")];
        assert_eq!(applied(merging, messages.clone(), vec![]), expected);
        assert_eq!(applied(merging, vec![Message::system("Only")], vec![]), [pair("user", "Only")]);
        assert_eq!(applied(Accommodation::default(), messages, vec![]).len(), 5);
    }

    #[test]
    fn later_system_messages_go_into_the_turn_beside_them() {
        let merging = Accommodation { merges_later_system: true, ..Accommodation::default() };
        let check = |messages: &[Message], expected: &[(String, String)]| {
            assert_eq!(applied(merging, messages.to_vec(), vec![]), expected);
        };
        let tool = Message::new(Role::Tool, "noon");
        let conversation = [
            Message::system("Be brief."),
            Message::system("Be kind."),
            Message::user("Hi"),
            Message::system("A file changed."),
            Message::assistant("Hello."),
            Message::system("It is late."),
            Message::user("Go on"),
            Message::assistant("calls"),
            tool,
            Message::system("Tests failed."),
        ];
        let expected = [
            pair("system", "Be brief.\n\nBe kind."),
            pair("user", "Hi\n\nA file changed."),
            pair("assistant", "Hello."),
            pair("user", "It is late.\n\nGo on"),
            pair("assistant", "calls"),
            pair("tool", "noon\n\nTests failed."),
        ];
        check(&conversation, &expected);
        assert_eq!(merging.num_moved_system(&conversation), 4);
        // Whatever was asked with before is a prefix of what is asked with later.
        for end in [4, 7, 10] {
            let shown = applied(merging, conversation[..end].to_vec(), vec![]);
            assert_eq!(shown, expected[..shown.len()], "{end} messages");
        }
        let between = [Message::assistant("a"), Message::system("s"), Message::assistant("b")];
        check(&between, &[pair("assistant", "a"), pair("user", "s"), pair("assistant", "b")]);
    }

    #[test]
    fn tools_calls_and_results_are_spelt_out() {
        let spelling = Accommodation { spells_tools: true, ..Accommodation::default() };
        let tool = json!({"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}});
        let call = ToolCall { id: None, name: "now".to_owned(), arguments: json!({"zone": "UTC"}) };
        let messages = vec![
            Message::user("When?"),
            Message { content: None, tool_calls: vec![call], ..Message::assistant("") },
            Message::new(Role::Tool, "noon"),
            Message::user("Thanks"),
        ];
        let shown = applied(spelling, messages, vec![tool]);
        assert_eq!(shown[0].0, "system");
        assert!(
            shown[0].1.ends_with("\n{\"name\": \"now\", \"parameters\": {\"type\": \"object\"}}"),
            "{}",
            shown[0].1
        );
        let expected = [
            pair("user", "When?"),
            pair(
                "assistant",
                "<tool_call>\n{\"name\": \"now\", \"arguments\": {\"zone\": \"UTC\"}}\n</tool_call>",
            ),
            pair("user", "<tool_response>\nnoon\n</tool_response>\nThanks"),
        ];
        assert_eq!(shown[1..], expected);
    }
}
