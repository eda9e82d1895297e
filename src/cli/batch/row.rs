//! One row of a batch file: JSON to what is asked and how. Honour or refuse; nothing in a row is ignored.
//!
//! Two forms: OpenAI's batch row (`custom_id`, `method`, `url`, `body`), and the same parameters at top level with
//! `prompt` or `messages`. Every parameter is taken out of the row by name, so what is left over at the end is
//! refused by name. Ranges are the engine's to check. Touches neither files nor the model.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::cli::error::{CommandError, Kind};
use crate::cli::run::llm::Ask;
use crate::runtime::grammar::GrammarSource;
use crate::runtime::{Error, GrammarError, Limits, MAX_LOGPROBS, Sampling};
use crate::template::{Content, Conversation, Message, Role, ToolCall};

/// What the flags say for rows that do not say it themselves.
#[derive(Debug, Clone, Default)]
pub struct Defaults {
    pub sampling: Sampling,
    pub limits: Limits,
    pub logprobs: Option<usize>,
    pub system: Option<String>,
    /// A `prompt` is text to go on with rather than a message to answer.
    pub raw: bool,
    /// What answers must keep to.
    pub grammar: Option<GrammarSource>,
    /// Names under which the model is known; `None` takes rows for any model.
    pub models: Option<Vec<String>>,
}

/// Which of OpenAI's result objects the answer becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Chat,
    Completion,
}

/// A row that can be run.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub form: Form,
    pub ask: Ask,
    pub sampling: Sampling,
    pub limits: Limits,
    pub logprobs: Option<usize>,
    pub grammar: Option<GrammarSource>,
}

/// Why a row has no answer, in OpenAI's words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowError {
    pub status: u16,
    pub code: &'static str,
    /// The parameter at fault, if it is one.
    pub param: Option<String>,
    pub message: String,
}

impl RowError {
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { status: 400, code, param: None, message: message.into() }
    }

    fn invalid(param: &str, message: impl std::fmt::Display) -> Self {
        let param = Some(param.to_owned());
        Self { status: 400, code: "invalid_value", param, message: message.to_string() }
    }

    fn unsupported(param: &str, message: impl std::fmt::Display) -> Self {
        let param = Some(param.to_owned());
        Self { status: 400, code: "unsupported_parameter", param, message: message.to_string() }
    }

    /// The row's own failure, or the command's error when the rest of the batch cannot go on either.
    pub fn from_command(error: CommandError) -> Result<Self, CommandError> {
        let message = error.to_string();
        let row_error = match error.runtime() {
            Some(Error::PromptTooLong { .. } | Error::ContextExceeded { .. }) => {
                Self::new("context_length_exceeded", message)
            }
            Some(Error::InvalidParameter { name, .. }) => Self::invalid(name, message),
            Some(Error::Grammar(GrammarError::Unsupported { .. })) => {
                Self::unsupported("response_format", message)
            }
            Some(Error::Grammar(GrammarError::Failed(_))) => {
                Self { status: 500, ..Self::new("grammar_error", message) }
            }
            Some(Error::Grammar(_)) => Self::invalid("response_format", message),
            Some(Error::Backend(_)) => Self { status: 500, ..Self::new("backend_error", message) },
            _ if matches!(error.kind, Kind::BadData | Kind::Usage) => Self::new("invalid_prompt", message),
            _ => return Err(error),
        };
        Ok(row_error)
    }

    /// OpenAI's error object.
    pub fn to_json(&self) -> Value {
        let kind = if self.status < 500 { "invalid_request_error" } else { "server_error" };
        json!({"message": self.message, "type": kind, "param": self.param, "code": self.code})
    }
}

/// The row's name, and the row or why it is refused. `number` is the line in the file, from 1.
pub fn parse(line: &[u8], number: usize, defaults: &Defaults) -> (String, Result<Row, RowError>) {
    let fallback = format!("line-{number}");
    let value = match serde_json::from_slice(line) {
        Ok(Value::Object(object)) => object,
        Ok(_) => return (fallback, Err(RowError::new("invalid_json", "the row is not a JSON object"))),
        Err(error) => {
            return (fallback, Err(RowError::new("invalid_json", format!("the row is not JSON: {error}"))));
        }
    };
    let mut fields = Fields(value);
    match fields.take("custom_id") {
        None => (fallback, row(fields, defaults)),
        Some(Value::String(id)) if !id.is_empty() => (id, row(fields, defaults)),
        Some(_) => (fallback, Err(RowError::invalid("custom_id", "custom_id is not a string with content"))),
    }
}

fn row(mut fields: Fields, defaults: &Defaults) -> Result<Row, RowError> {
    let is_batch_form = fields.0.contains_key("body") || fields.0.contains_key("url");
    if !is_batch_form {
        return request(fields, None, defaults);
    }
    match fields.take("method") {
        None => {}
        Some(Value::String(method)) if method == "POST" => {}
        Some(_) => return Err(RowError::invalid("method", "method is not \"POST\"")),
    }
    let form = match fields.text("url")?.as_deref() {
        Some("/v1/chat/completions") => Form::Chat,
        Some("/v1/completions") => Form::Completion,
        Some(other) => {
            let message = format!("{other:?} is neither /v1/chat/completions nor /v1/completions");
            return Err(RowError::invalid("url", message));
        }
        None => return Err(RowError::invalid("url", "url is missing")),
    };
    let Some(Value::Object(body)) = fields.take("body") else {
        return Err(RowError::invalid("body", "body is not an object"));
    };
    fields.end()?;
    request(Fields(body), Some(form), defaults)
}

/// The parameters themselves; `form` is `None` in the short form, where `prompt` or `messages` decides.
fn request(mut fields: Fields, form: Option<Form>, defaults: &Defaults) -> Result<Row, RowError> {
    check_model(&mut fields, defaults)?;
    let system = if form.is_none() { fields.text("system")? } else { None };
    let system = system.or_else(|| defaults.system.clone());
    let (form, ask) = match form {
        Some(Form::Chat) => (Form::Chat, Ask::Chat(conversation(&mut fields, system)?)),
        Some(Form::Completion) => (Form::Completion, Ask::Text(prompt(&mut fields)?)),
        None if fields.has("messages") && fields.has("prompt") => {
            return Err(RowError::invalid("prompt", "a row has prompt or messages, not both"));
        }
        None if fields.has("messages") => (Form::Chat, Ask::Chat(conversation(&mut fields, system)?)),
        None if defaults.raw => (Form::Completion, Ask::Text(prompt(&mut fields)?)),
        None => {
            let mut messages = vec![Message::user(prompt(&mut fields)?)];
            messages.splice(0..0, system.map(Message::system));
            let kwargs = template_variables(&mut fields)?;
            (Form::Chat, Ask::Chat(Conversation { messages, kwargs, ..Conversation::default() }))
        }
    };
    let sampling = sampling(&mut fields, &defaults.sampling)?;
    let limits = limits(&mut fields, &defaults.limits)?;
    let logprobs = logprobs(&mut fields, defaults.logprobs)?;
    let grammar = response_format(&mut fields, defaults)?;
    inert(&mut fields)?;
    fields.end()?;
    Ok(Row { form, ask, sampling, limits, logprobs, grammar })
}

fn check_model(fields: &mut Fields, defaults: &Defaults) -> Result<(), RowError> {
    match (fields.text("model")?, &defaults.models) {
        (Some(model), Some(known)) if !known.contains(&model) => Err(RowError {
            status: 404,
            code: "model_not_found",
            param: Some("model".to_owned()),
            message: format!(
                "the row is for model {model:?}, but {:?} is loaded (--any-model answers it all the same)",
                known.first().map_or("", String::as_str)
            ),
        }),
        _ => Ok(()),
    }
}

fn prompt(fields: &mut Fields) -> Result<String, RowError> {
    match fields.take("prompt") {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(mut texts)) if texts.len() == 1 && texts[0].is_string() => {
            Ok(texts.remove(0).as_str().unwrap_or_default().to_owned())
        }
        Some(_) => Err(RowError::invalid("prompt", "prompt is not one string")),
        None => Err(RowError::invalid("prompt", "prompt is missing")),
    }
}

fn conversation(fields: &mut Fields, system: Option<String>) -> Result<Conversation, RowError> {
    let Some(Value::Array(values)) = fields.take("messages") else {
        return Err(RowError::invalid("messages", "messages is not an array"));
    };
    if values.is_empty() {
        return Err(RowError::invalid("messages", "messages is empty"));
    }
    let mut messages = values.into_iter().enumerate().map(message).collect::<Result<Vec<_>, _>>()?;
    let has_system = messages.iter().any(|message| matches!(message.role, Role::System | Role::Developer));
    if let Some(system) = system.filter(|_| !has_system) {
        messages.insert(0, Message::system(system));
    }
    let kwargs = template_variables(fields)?;
    Ok(Conversation { messages, kwargs, ..Conversation::default() })
}

fn template_variables(fields: &mut Fields) -> Result<Map<String, Value>, RowError> {
    match fields.take("chat_template_kwargs") {
        None => Ok(Map::new()),
        Some(Value::Object(kwargs)) => Ok(kwargs),
        Some(_) => Err(RowError::invalid("chat_template_kwargs", "chat_template_kwargs is not an object")),
    }
}

fn message((index, value): (usize, Value)) -> Result<Message, RowError> {
    let at = |name: &str| format!("messages[{index}].{name}");
    let Value::Object(object) = value else {
        return Err(RowError::invalid(&format!("messages[{index}]"), "a message is not an object"));
    };
    let mut fields = Fields(object);
    let named = |error: RowError| {
        let param = error.param.as_deref().map_or(format!("messages[{index}]"), at);
        RowError { param: Some(param.clone()), message: format!("{param}: {}", error.message), ..error }
    };
    let role = fields.text("role").map_err(named)?;
    let role = role.ok_or_else(|| RowError::invalid(&at("role"), format!("{} is missing", at("role"))))?;
    let content = content(&mut fields).map_err(named)?;
    let reasoning = fields.text("reasoning_content").map_err(named)?;
    let reasoning =
        reasoning.map_or_else(|| fields.text("reasoning").map_err(named), |text| Ok(Some(text)))?;
    let tool_calls = tool_calls(&mut fields).map_err(named)?;
    let tool_call_id = fields.text("tool_call_id").map_err(named)?;
    let name = fields.text("name").map_err(named)?;
    fields.end().map_err(named)?;
    let role = Role::from(role.as_str());
    Ok(Message { role, content, reasoning, tool_calls, tool_call_id, name })
}

/// A string, or parts that are all text: several parts are one text, line by line.
fn content(fields: &mut Fields) -> Result<Option<Content>, RowError> {
    let parts = match fields.take("content") {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(Content::Text(text))),
        Some(Value::Array(parts)) => parts,
        Some(_) => return Err(RowError::invalid("content", "neither a string nor an array of parts")),
    };
    let text = |part: &Value| match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text.to_owned()),
        (kind, _) => {
            let kind = kind.unwrap_or("without a type");
            Err(RowError::unsupported(
                "content",
                format!("parts of type {kind:?} are not supported, only text"),
            ))
        }
    };
    let texts = parts.iter().map(text).collect::<Result<Vec<_>, _>>()?;
    Ok(Some(Content::Text(texts.join("\n"))))
}

fn tool_calls(fields: &mut Fields) -> Result<Vec<ToolCall>, RowError> {
    let calls = match fields.take("tool_calls") {
        None => return Ok(Vec::new()),
        Some(Value::Array(calls)) => calls,
        Some(_) => return Err(RowError::invalid("tool_calls", "not an array")),
    };
    let call = |call: Value| {
        let function = &call["function"];
        let Some(name) = function["name"].as_str() else {
            return Err(RowError::invalid("tool_calls", "a call has no function.name"));
        };
        // OpenAI sends arguments as a string of JSON; templates want the value.
        let arguments = match &function["arguments"] {
            Value::String(text) => serde_json::from_str(text).unwrap_or_else(|_| text.as_str().into()),
            other => other.clone(),
        };
        Ok(ToolCall { id: call["id"].as_str().map(str::to_owned), name: name.to_owned(), arguments })
    };
    calls.into_iter().map(call).collect()
}

fn sampling(fields: &mut Fields, defaults: &Sampling) -> Result<Sampling, RowError> {
    let logit_bias = match fields.take("logit_bias") {
        None => defaults.logit_bias.clone(),
        Some(Value::Object(object)) => object.iter().map(bias).collect::<Result<BTreeMap<_, _>, _>>()?,
        Some(_) => return Err(RowError::invalid("logit_bias", "logit_bias is not an object of id: bias")),
    };
    Ok(Sampling {
        temperature: fields.number("temperature")?.unwrap_or(defaults.temperature),
        top_k: fields.count("top_k")?.or(defaults.top_k),
        top_p: fields.number("top_p")?.unwrap_or(defaults.top_p),
        min_p: fields.number("min_p")?.unwrap_or(defaults.min_p),
        repetition_penalty: fields.number("repetition_penalty")?.unwrap_or(defaults.repetition_penalty),
        presence_penalty: fields.number("presence_penalty")?.unwrap_or(defaults.presence_penalty),
        frequency_penalty: fields.number("frequency_penalty")?.unwrap_or(defaults.frequency_penalty),
        logit_bias,
        seed: fields.count("seed")?.map(|seed| seed as u64).or(defaults.seed),
    })
}

fn bias((id, bias): (&String, &Value)) -> Result<(u32, f32), RowError> {
    let id = id.parse().map_err(|_| RowError::invalid("logit_bias", format!("{id:?} is not a token id")))?;
    let bias =
        bias.as_f64().ok_or_else(|| RowError::invalid("logit_bias", format!("{bias} is not a number")))?;
    Ok((id, bias as f32))
}

fn limits(fields: &mut Fields, defaults: &Limits) -> Result<Limits, RowError> {
    let (new, old) = (fields.count("max_completion_tokens")?, fields.count("max_tokens")?);
    if new.is_some() && old.is_some() && new != old {
        let message = "max_tokens and max_completion_tokens contradict each other";
        return Err(RowError::invalid("max_completion_tokens", message));
    }
    if new.or(old) == Some(0) {
        return Err(RowError::invalid("max_tokens", "max_tokens must be at least 1"));
    }
    let stop = match fields.take("stop") {
        None => defaults.stop.clone(),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(values)) => {
            let text = |value: Value| match value {
                Value::String(text) => Ok(text),
                other => Err(RowError::invalid("stop", format!("{other} is not a string"))),
            };
            values.into_iter().map(text).collect::<Result<_, _>>()?
        }
        Some(_) => return Err(RowError::invalid("stop", "stop is neither a string nor an array of strings")),
    };
    let ignore_eos = fields.flag("ignore_eos")?.unwrap_or(defaults.ignore_eos);
    Ok(Limits { max_tokens: new.or(old).or(defaults.max_tokens), stop, ignore_eos, ..defaults.clone() })
}

/// `logprobs` is a flag with `top_logprobs` beside it (chat), or the number of alternatives (completions).
fn logprobs(fields: &mut Fields, default: Option<usize>) -> Result<Option<usize>, RowError> {
    let top = fields.count("top_logprobs")?;
    let count = match (fields.take("logprobs"), top) {
        (None, None) => return Ok(default),
        (Some(Value::Bool(true)), top) => Some(top.unwrap_or(0)),
        (Some(Value::Bool(false)), None) => None,
        (Some(Value::Number(number)), None) if number.is_u64() => {
            number.as_u64().and_then(|count| usize::try_from(count).ok())
        }
        (None | Some(Value::Bool(false)), Some(_)) => {
            return Err(RowError::invalid("top_logprobs", "top_logprobs needs logprobs: true"));
        }
        _ => return Err(RowError::invalid("logprobs", "logprobs is neither true, false nor a count")),
    };
    match count.filter(|&count| count > MAX_LOGPROBS) {
        Some(_) => Err(RowError::invalid("top_logprobs", format!("more than {MAX_LOGPROBS} alternatives"))),
        None => Ok(count),
    }
}

/// OpenAI's three forms. A schema is enforced whether it is called strict or not.
fn response_format(fields: &mut Fields, defaults: &Defaults) -> Result<Option<GrammarSource>, RowError> {
    let mut format = match fields.take("response_format") {
        None => return Ok(defaults.grammar.clone()),
        Some(Value::Object(format)) => Fields(format),
        Some(_) => return Err(RowError::invalid("response_format", "response_format is not an object")),
    };
    let below = |error: RowError| {
        let param = error.param.as_deref().unwrap_or_default();
        RowError { param: Some(format!("response_format.{param}")), ..error }
    };
    let source = match format.text("type").map_err(below)?.as_deref() {
        Some("text") => None,
        Some("json_object") => Some(GrammarSource::JsonObject),
        Some("json_schema") => Some(json_schema(&mut format).map_err(below)?),
        Some(other) => {
            let message = format!("response_format.type: {other:?} is not supported");
            return Err(RowError::unsupported("response_format.type", message));
        }
        None => return Err(RowError::invalid("response_format.type", "response_format.type is missing")),
    };
    format.end().map_err(below)?;
    Ok(source)
}

fn json_schema(format: &mut Fields) -> Result<GrammarSource, RowError> {
    let Some(Value::Object(object)) = format.take("json_schema") else {
        return Err(RowError::invalid("json_schema", "json_schema is not an object"));
    };
    let mut object = Fields(object);
    let schema = object.take("schema");
    object.text("name")?;
    object.text("description")?;
    object.flag("strict")?;
    object.end()?;
    schema
        .map(GrammarSource::JsonSchema)
        .ok_or_else(|| RowError::invalid("json_schema", "json_schema.schema is missing"))
}

/// Parameters with one value that asks for nothing; any other value is refused. Labels ask for nothing at all.
fn inert(fields: &mut Fields) -> Result<(), RowError> {
    let supported = [
        ("n", json!(1)),
        ("best_of", json!(1)),
        ("stream", json!(false)),
        ("echo", json!(false)),
        ("store", json!(false)),
        ("tools", json!([])),
        ("tool_choice", json!("none")),
        ("modalities", json!(["text"])),
    ];
    for (name, only) in supported {
        if let Some(value) = fields.take(name).filter(|value| *value != only) {
            return Err(RowError::unsupported(
                name,
                format!("{name}: {value} is not supported, only {only}"),
            ));
        }
    }
    for label in ["user", "metadata", "safety_identifier"] {
        fields.take(label);
    }
    Ok(())
}

/// A JSON object whose members are taken out one by one. `null` counts as absent, as in OpenAI's API.
struct Fields(Map<String, Value>);

impl Fields {
    fn has(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| !value.is_null())
    }

    fn take(&mut self, name: &str) -> Option<Value> {
        self.0.shift_remove(name).filter(|value| !value.is_null())
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, RowError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(RowError::invalid(name, format!("{name} is not a string"))),
        }
    }

    fn number(&mut self, name: &str) -> Result<Option<f32>, RowError> {
        let number = |value: Value| {
            let number = value.as_f64().map(|number| number as f32);
            number.ok_or_else(|| RowError::invalid(name, format!("{name} is not a number")))
        };
        self.take(name).map(number).transpose()
    }

    fn count(&mut self, name: &str) -> Result<Option<usize>, RowError> {
        let count = |value: Value| {
            let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
            count.ok_or_else(|| RowError::invalid(name, format!("{name} is not a whole number from 0")))
        };
        self.take(name).map(count).transpose()
    }

    fn flag(&mut self, name: &str) -> Result<Option<bool>, RowError> {
        let flag = |value: Value| {
            value
                .as_bool()
                .ok_or_else(|| RowError::invalid(name, format!("{name} is neither true nor false")))
        };
        self.take(name).map(flag).transpose()
    }

    /// Nothing may be left.
    fn end(self) -> Result<(), RowError> {
        match self.0.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => Err(RowError::unsupported(name, format!("{name} is not supported"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(row: Value) -> Result<Row, RowError> {
        let defaults = Defaults {
            limits: Limits { max_tokens: Some(9), ..Limits::default() },
            models: Some(vec!["tiny".to_owned()]),
            ..Defaults::default()
        };
        parse(row.to_string().as_bytes(), 3, &defaults).1
    }

    /// The parameter and code of a refused row.
    fn refused(row: Value) -> (String, &'static str) {
        let error = parsed(row).expect_err("refused");
        (error.param.unwrap_or_default(), error.code)
    }

    #[test]
    fn openais_form_is_honoured() {
        let row = parsed(json!({
            "custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
            "body": {
                "model": "tiny",
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                ],
                "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1,
                "presence_penalty": -1, "frequency_penalty": 1, "logit_bias": {"5": -100}, "seed": 7,
                "max_completion_tokens": 3, "stop": ["x", "y"], "ignore_eos": true, "logprobs": true,
                "top_logprobs": 2, "n": 1, "stream": false, "user": "me", "response_format": {"type": "text"},
                "chat_template_kwargs": {"enable_thinking": false},
            },
        }))
        .expect("a row");
        let Ask::Chat(conversation) = &row.ask else { panic!("{row:?}") };
        assert_eq!(conversation.messages, [Message::system("Be brief."), Message::user("a\nb")]);
        assert_eq!(conversation.kwargs["enable_thinking"], false);
        let expected = Sampling {
            temperature: 0.5,
            top_p: 0.9,
            top_k: Some(40),
            min_p: 0.1,
            repetition_penalty: 1.1,
            presence_penalty: -1.0,
            frequency_penalty: 1.0,
            logit_bias: BTreeMap::from([(5, -100.0)]),
            seed: Some(7),
        };
        assert_eq!(row.sampling, expected);
        assert_eq!((row.limits.max_tokens, row.limits.stop.len(), row.limits.ignore_eos), (Some(3), 2, true));
        assert_eq!(row.logprobs, Some(2));
    }

    #[test]
    fn the_short_form_takes_a_prompt_or_messages() {
        let row = parsed(json!({"prompt": "hi", "system": "s"})).expect("a row");
        let Ask::Chat(conversation) = row.ask else { panic!("{row:?}") };
        assert_eq!(conversation.messages, [Message::system("s"), Message::user("hi")]);
        assert_eq!(row.limits.max_tokens, Some(9), "the flag is the default");
        let row = parsed(json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}));
        assert_eq!(row.expect("a row").limits.max_tokens, Some(2));
        assert_eq!(refused(json!({"prompt": "a", "messages": []})).0, "prompt");
        assert_eq!(refused(json!({"temperature": 0.5})).0, "prompt");
    }

    #[test]
    fn a_completion_is_plain_text() {
        let row = parsed(json!({
            "url": "/v1/completions", "body": {"model": "tiny", "prompt": "Once", "logprobs": 3, "echo": false},
        }));
        let row = row.expect("a row");
        assert_eq!((row.form, row.ask, row.logprobs), (Form::Completion, Ask::Text("Once".into()), Some(3)));
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        let with = |name: &str, value: Value| {
            let mut row = json!({"prompt": "x"});
            row[name] = value;
            refused(row)
        };
        let check = |name: &str, value: Value, code: &'static str| {
            assert_eq!(with(name, value), (name.to_owned(), code));
        };
        check("n", json!(2), "unsupported_parameter");
        check("stream", json!(true), "unsupported_parameter");
        check("tools", json!([{"type": "function"}]), "unsupported_parameter");
        check("response_format", json!({"type": "xml"}), "unsupported_parameter");
        check("response_format", json!({"type": "json_schema"}), "invalid_value");
        check("response_format", json!("json_object"), "invalid_value");
        check("temprature", json!(1), "unsupported_parameter");
        check("temperature", json!("hot"), "invalid_value");
        check("max_tokens", json!(0), "invalid_value");
        check("max_tokens", json!(-1), "invalid_value");
        check("seed", json!(1.5), "invalid_value");
        check("stop", json!([1]), "invalid_value");
        check("logit_bias", json!({"x": 1}), "invalid_value");
        check("top_logprobs", json!(2), "invalid_value");
        check("model", json!("gpt-4"), "model_not_found");
        assert!(
            parsed(json!({"prompt": "x", "temperature": null, "suffix": null})).is_ok(),
            "null is absent"
        );
    }

    #[test]
    fn messages_say_where_they_are_wrong() {
        let message =
            |message: Value| refused(json!({"messages": [{"role": "user", "content": "a"}, message]})).0;
        assert_eq!(message(json!({"content": "x"})), "messages[1].role");
        assert_eq!(message(json!({"role": "user", "content": 1})), "messages[1].content");
        let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]});
        assert_eq!(message(image), "messages[1].content");
        assert_eq!(message(json!({"role": "user", "content": "x", "cached": true})), "messages[1].cached");
        assert_eq!(message(json!("x")), "messages[1]");
    }

    #[test]
    fn tool_turns_become_the_neutral_vocabulary() {
        let call =
            json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}});
        let row = parsed(json!({"messages": [
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]}));
        let Ask::Chat(conversation) = row.expect("a row").ask else { panic!("a chat") };
        let calls = &conversation.messages[0].tool_calls;
        assert_eq!((calls[0].name.as_str(), &calls[0].arguments), ("f", &json!({"a": 1})));
        assert_eq!(conversation.messages[1].tool_call_id.as_deref(), Some("c1"));
    }

    #[test]
    fn a_row_without_a_name_is_named_by_its_line() {
        let id = |line: &str| parse(line.as_bytes(), 7, &Defaults::default()).0;
        assert_eq!(id(r#"{"custom_id": "x", "prompt": ""}"#), "x");
        assert_eq!(id(r#"{"prompt": ""}"#), "line-7");
        assert_eq!(id("not json"), "line-7");
        assert_eq!(id(r#"{"custom_id": 5}"#), "line-7");
    }
}
