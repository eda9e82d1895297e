//! Output items of the Responses API.

use serde_json::{Value, json};

use super::input::sealed;
use super::tools::{INPUT, ToolName, ToolNames};
use llmctl_engine::turn::AnsweredCall;

/// A kind of output item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ItemKind {
    Reasoning,
    Message,
    FunctionCall,
    CustomCall,
}

impl ItemKind {
    pub fn of_call(tool: &ToolName) -> Self {
        if tool.is_custom { Self::CustomCall } else { Self::FunctionCall }
    }

    fn prefix(self) -> &'static str {
        match self {
            Self::Reasoning => "rs",
            Self::Message => "msg",
            Self::FunctionCall => "fc",
            Self::CustomCall => "ctc",
        }
    }
}

/// Returns the id of a response's item.
pub fn item_id(kind: ItemKind, response_id: &str, index: usize) -> String {
    format!("{}_{response_id}_{index}", kind.prefix())
}

/// Splits the id of an item into its response's id and its index; `None` if this server did not make it.
pub fn response_of_item(id: &str) -> Option<(&str, usize)> {
    let (rest, index) = id.rsplit_once('_')?;
    let (prefix, response_id) = rest.split_once('_')?;
    let kinds = [ItemKind::Reasoning, ItemKind::Message, ItemKind::FunctionCall, ItemKind::CustomCall];
    let is_known = kinds.iter().any(|kind| kind.prefix() == prefix);
    Some((response_id, index.parse().ok()?)).filter(|_| is_known)
}

/// Returns `completed` or `incomplete`.
pub fn status(is_whole: bool) -> &'static str {
    if is_whole { "completed" } else { "incomplete" }
}

pub fn reasoning_part(text: &str) -> Value {
    json!({"type": "reasoning_text", "text": text})
}

/// Returns a reasoning item. With `is_sealed` it also holds the text in the form that clients keep without reading it.
pub fn reasoning(id: &str, text: &str, is_sealed: bool, status: &str) -> Value {
    json!({
        "id": id,
        "type": "reasoning",
        "summary": [],
        "content": [reasoning_part(text)],
        "encrypted_content": is_sealed.then(|| sealed(text)),
        "status": status,
    })
}

pub fn text_part(text: &str, logprobs: &Value) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

pub fn message(id: &str, parts: &[Value], status: &str) -> Value {
    json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": parts})
}

/// Returns a call. `text` is the arguments of a function, or the input of a custom tool.
pub fn call(id: &str, call_id: &str, tool: &ToolName, text: &str, status: &str) -> Value {
    let (kind, member) = match tool.is_custom {
        true => ("custom_tool_call", INPUT),
        false => ("function_call", "arguments"),
    };
    let mut item = json!({"id": id, "type": kind, "status": status, "call_id": call_id, "name": tool.name});
    if let Some(namespace) = &tool.namespace {
        item["namespace"] = namespace.as_str().into();
    }
    item[member] = text.into();
    item
}

/// Returns the item of an answer's call.
pub fn answered_call(names: &ToolNames, response_id: &str, index: usize, answered: &AnsweredCall) -> Value {
    let tool = names.called(&answered.name);
    let id = item_id(ItemKind::of_call(&tool), response_id, index);
    let text = match tool.is_custom {
        true => InputText::default().take(&answered.arguments),
        false => answered.arguments.clone(),
    };
    call(&id, &answered.id, &tool, &text, status(answered.is_whole))
}

/// Reads the text of a custom tool out of its arguments, `{"input": "..."}`, while they come.
#[derive(Debug, Default)]
pub struct InputText {
    /// Not read yet.
    held: String,
    place: InputPlace,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum InputPlace {
    #[default]
    Before,
    Inside,
    Behind,
}

impl InputText {
    /// Takes more of the arguments; returns the text that they add.
    pub fn take(&mut self, fragment: &str) -> String {
        self.held.push_str(fragment);
        if self.place == InputPlace::Before
            && let Some(begin) = self.begin()
        {
            self.held.drain(..begin);
            self.place = InputPlace::Inside;
        }
        match self.place {
            InputPlace::Inside => self.take_text(),
            _ => String::new(),
        }
    }

    /// Returns where the text begins: behind the quote that follows the member's name.
    fn begin(&self) -> Option<usize> {
        let name = format!("\"{INPUT}\"");
        let behind_name = self.held.find(&name)? + name.len();
        let rest = &self.held[behind_name..];
        let value = rest.trim_start().strip_prefix(':')?.trim_start();
        value.starts_with('"').then(|| self.held.len() - value.len() + 1)
    }

    fn take_text(&mut self) -> String {
        let (mut end, mut is_over) = (0, false);
        let mut rest = self.held.as_str();
        while let Some(c) = rest.chars().next() {
            let length = match c {
                '"' => {
                    is_over = true;
                    break;
                }
                '\\' => escape_length(rest),
                _ => Some(c.len_utf8()),
            };
            let Some(length) = length else { break };
            end += length;
            rest = &self.held[end..];
        }
        let text = format!("\"{}\"", &self.held[..end]);
        self.held.drain(..end);
        if is_over {
            self.place = InputPlace::Behind;
        }
        serde_json::from_str(&text).unwrap_or_default()
    }
}

/// Returns the length of the escape that a text begins with, both halves of a surrogate pair; `None` if it is not whole yet.
fn escape_length(text: &str) -> Option<usize> {
    match text.as_bytes().get(1)? {
        b'u' => {
            let digits = text.get(2..6)?;
            let is_high = u32::from_str_radix(digits, 16).is_ok_and(|unit| (0xd800..0xdc00).contains(&unit));
            let length = if is_high { 12 } else { 6 };
            (text.len() >= length).then_some(length)
        }
        _ => Some(2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_custom_tool_comes_out_however_its_arguments_are_cut() {
        let text = "*** \"a\"\n\\ \u{1}\u{1f980} é\t";
        for escaped in
            [json!({"input": text}).to_string(), r#"{ "input" : "x\ud83e\udd80\u00e9\/" }"#.to_owned()]
        {
            let whole = InputText::default().take(&escaped);
            let expected = serde_json::from_str::<Value>(&escaped).expect("JSON")["input"].clone();
            assert_eq!(Value::from(whole), expected);
            for cut in (0..escaped.len()).filter(|cut| escaped.is_char_boundary(*cut)) {
                let mut input = InputText::default();
                let [first, second] = [&escaped[..cut], &escaped[cut..]].map(|part| input.take(part));
                assert_eq!(Value::from(first + &second), expected, "cut at {cut}");
            }
            let mut input = InputText::default();
            let each: String = escaped.chars().map(|c| input.take(&c.to_string())).collect();
            assert_eq!(Value::from(each), expected);
        }
    }

    #[test]
    fn an_item_leads_back_to_its_response() {
        let id = item_id(ItemKind::CustomCall, "resp_ab_cd", 12);
        assert_eq!(response_of_item(&id), Some(("resp_ab_cd", 12)));
        for foreign in ["msg_1", "x_resp_ab_cd_1", "rs_resp_ab_cd_x", ""] {
            assert_eq!(response_of_item(foreign), None, "{foreign}");
        }
    }
}
