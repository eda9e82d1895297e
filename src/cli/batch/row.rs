//! One row of a batch file: JSON to what is asked and how. Honour or refuse; nothing in a row is ignored.
//!
//! Two forms: OpenAI's batch row (`custom_id`, `method`, `url`, `body`), and the same parameters at top level
//! with `prompt` or `messages`. The parameters are those of the server, read by the same code. Ranges are the
//! engine's to check. Touches neither files nor the model.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::cli::error::{CommandError, Kind};
use crate::cli::think::Think;
use llmctl_base::{Error, GivenSampling, GrammarError};
use llmctl_engine::turn::{AnswerStart, OutputConstraint, TextPrompt, ToolUse, TurnInput, TurnRequest};
use llmctl_engine::{Limits, Overflow};
use llmctl_models::adapters::AdapterSpec;
use llmctl_serve::error::ApiError;
use llmctl_serve::wire;
use llmctl_serve::wire::image_files::ImageReading;
use llmctl_serve::wire::switches::{AnswerReasoning, Switches, switches};
use llmctl_serve::wire::{Fields, Problems, lora, message, options, params, shape, tools};
use llmctl_template::{Conversation, Message, Role, TemplateVariables};

/// Values of the flags, for rows that do not set them.
#[derive(Debug, Clone, Default)]
pub struct Defaults {
    pub sampling: GivenSampling,
    pub limits: Limits,
    pub logprobs: Option<usize>,
    pub system: Option<String>,
    /// True if a `prompt` is text to continue rather than a message to answer.
    pub raw: bool,
    /// Constraint on answers.
    pub constraint: Option<OutputConstraint>,
    /// Reasoning of the model, and its place in results.
    pub think: Think,
    /// True if the model's template shows tools.
    pub shows_tools: bool,
    /// Refuses a `max_tokens` beyond the context instead of lowering it.
    pub strict_limits: bool,
    /// Objects of the rows' own schemas may have members that the schema does not name.
    pub schema_open: bool,
    /// Names under which the model is known; `None` takes rows for any model.
    pub models: Option<Vec<String>>,
    /// LoRA adapters of the model.
    pub adapters: Vec<AdapterSpec>,
    /// Images that rows may have, and the reason if they may have none.
    pub images: ImageReading,
}

/// OpenAI's result object for the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowFormat {
    Chat,
    Completion,
}

/// A row that can be run.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchRow {
    pub form: RowFormat,
    pub input: TurnInput,
    pub turn: TurnRequest,
    /// Answers to the prompt, with the seeds `seed`, `seed + 1` and so on.
    pub num_choices: usize,
    pub shows_reasoning: bool,
    /// Calls are asked for and reported in OpenAI's older form.
    pub has_functions: bool,
    /// Fields that have no effect.
    pub ignored: Vec<String>,
}

/// Returns the error of a row that is refused.
pub fn refusal(code: &'static str, message: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, Some(code), message)
}

/// Returns the row's own failure, or the command's error if the rest of the batch cannot continue either.
pub fn own_failure(error: CommandError) -> Result<ApiError, CommandError> {
    let message = error.to_string();
    let failed = |code| Ok(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, Some(code), &message));
    let refused = match error.runtime() {
        Some(Error::PromptTooLong { .. } | Error::PromptOversized { .. } | Error::ContextExceeded { .. }) => {
            refusal("context_length_exceeded", message)
        }
        Some(Error::InvalidParameter { name, .. }) => refusal("invalid_value", message).param(*name),
        Some(Error::Grammar(GrammarError::Failed(_))) => return failed("grammar_error"),
        Some(Error::Grammar(error)) => {
            let is_unsupported = matches!(error, GrammarError::Unsupported { .. });
            let code = if is_unsupported { "unsupported_parameter" } else { "invalid_value" };
            refusal(code, message).param("response_format")
        }
        Some(Error::Backend(_) | Error::NotFinite(_)) => return failed("backend_error"),
        _ if matches!(error.kind, Kind::BadData | Kind::Usage) => refusal("invalid_prompt", message),
        _ => return Err(error),
    };
    Ok(refused)
}

/// Returns the row's name, and the row or why it is refused. `number` is the line in the file, from 1.
pub fn parse(
    line: &[u8],
    number: usize,
    defaults: &Defaults,
    template: TemplateVariables<'_>,
) -> (String, Result<BatchRow, ApiError>) {
    let fallback = format!("line-{number}");
    let object = match wire::json::object(line, "the row") {
        Ok(object) => object,
        Err(message) => return (fallback, Err(refusal("invalid_json", message))),
    };
    let mut problems = Problems::default().with_images(defaults.images.clone());
    let mut fields = Fields::new(object, &mut problems);
    let id = fields.text("custom_id");
    if id.as_deref() == Some("") {
        fields.out_of_range("custom_id", "is empty");
    }
    let row = row(fields, Given { defaults, template });
    let images = problems.check().and_then(|()| problems.images().decode());
    let ignored = problems.take_ignored();
    let row = images.map(|images| BatchRow { turn: TurnRequest { images, ..row.turn }, ignored, ..row });
    (id.filter(|id| !id.is_empty()).unwrap_or(fallback), row)
}

/// Context of reading a row.
#[derive(Clone, Copy)]
struct Given<'a> {
    defaults: &'a Defaults,
    template: TemplateVariables<'a>,
}

/// Returns the row. If fields are wrong, they are noted and the row is not used.
fn row(mut fields: Fields<'_>, given: Given<'_>) -> BatchRow {
    if !fields.has("body") && !fields.has("url") {
        return request(fields, None, given);
    }
    fields.only("method", &[json!("POST")]);
    let form = match fields.text("url").as_deref() {
        Some("/v1/completions") => RowFormat::Completion,
        Some("/v1/chat/completions") => RowFormat::Chat,
        Some(other) => {
            let known = format!("= {other:?} is neither /v1/chat/completions nor /v1/completions");
            fields.wrong("url", &known); // told before what its body lacks for a chat
            RowFormat::Chat
        }
        None => {
            fields.missing("url");
            RowFormat::Chat
        }
    };
    if !fields.has("body") {
        fields.missing("body");
    }
    let body = fields.object("body").unwrap_or_default();
    let read = request(fields.on_its_own(body), Some(form), given);
    fields.end();
    read
}

/// Reads the parameters. `form` is `None` in the short form, where `prompt` or `messages` decides.
fn request(mut fields: Fields<'_>, form: Option<RowFormat>, given: Given<'_>) -> BatchRow {
    let defaults = given.defaults;
    check_model(&mut fields, defaults);
    let (form, mut input, reasoning) = input(&mut fields, form, given);
    let answer_start = match &mut input {
        TurnInput::Chat(conversation) => message::continued(&mut fields, &mut conversation.messages),
        TurnInput::Text(_) => AnswerStart::Nothing,
    };
    let (sampling, limits) = generation(&mut fields, defaults);
    let logprobs = params::logprobs(&mut fields, defaults.logprobs);
    let has_format = fields.has("response_format");
    let schema_open = shape::is_open(&mut fields, defaults.schema_open);
    let constraint = match shape::shape(&mut fields, schema_open) {
        None if has_format => None, // it asks for plain text
        constraint => constraint.or_else(|| defaults.constraint.clone()),
    };
    message::check_continued(&mut fields, "continue_final_message", &answer_start, constraint.is_some());
    let has_functions = fields.has("functions");
    let tools = tools(&mut fields, &mut input, defaults, schema_open);
    let num_choices = params::num_choices(&mut fields, params::MAX_CHOICES);
    inert(&mut fields);
    let prediction = params::prediction(&mut fields);
    let adapters = lora::adapters(&defaults.adapters, &mut fields);
    params::labels(&mut fields);
    fields.end();
    let reasoning_budget = reasoning.budget.or(defaults.think.budget);
    let shows_reasoning = reasoning.is_shown;
    let turn = TurnRequest {
        answer_start,
        tools,
        constraint,
        reasoning_budget,
        sampling,
        limits,
        logprobs,
        prediction,
        adapters,
        ..TurnRequest::default()
    };
    BatchRow { form, input, turn, num_choices, shows_reasoning, has_functions, ignored: Vec::new() }
}

/// Takes the conversation or the text of a row, with its format and its reasoning.
fn input(
    fields: &mut Fields<'_>,
    form: Option<RowFormat>,
    given: Given<'_>,
) -> (RowFormat, TurnInput, AnswerReasoning) {
    let defaults = given.defaults;
    let own_system = if form.is_none() { fields.text("system") } else { None };
    let has_messages = fields.has("messages");
    let text = |text| {
        let reasoning = AnswerReasoning { is_shown: defaults.think.is_shown, budget: None };
        (RowFormat::Completion, TurnInput::Text(TextPrompt::Text(text)), reasoning)
    };
    let chat = |(conversation, asked): (Conversation, AnswerReasoning)| {
        let is_shown = defaults.think.is_shown && asked.is_shown;
        (RowFormat::Chat, TurnInput::Chat(conversation), AnswerReasoning { is_shown, ..asked })
    };
    match form {
        Some(RowFormat::Chat) => chat(conversation(fields, None, given)),
        Some(RowFormat::Completion) => text(prompt(fields)),
        None if has_messages => {
            if fields.has("prompt") {
                fields.out_of_range("prompt", "and messages are two questions, and a row has one");
            }
            chat(conversation(fields, own_system, given))
        }
        None if defaults.raw => {
            if own_system.is_some() {
                fields.out_of_range(
                    "system",
                    "has no place in a prompt that is completed as plain text (--raw)",
                );
            }
            text(prompt(fields))
        }
        None => {
            let messages = vec![Message::user(prompt(fields))];
            chat(with_switches(fields, messages, own_system, given))
        }
    }
}

/// Takes the sampling and the limits of a row. A limit of its own beyond the context is lowered to what the prompt leaves, as
/// over HTTP; a flag is not.
fn generation(fields: &mut Fields<'_>, defaults: &Defaults) -> (GivenSampling, Limits) {
    let overflow = match options::has_limit(fields) && !defaults.strict_limits {
        true => Overflow::Clamp,
        false => defaults.limits.overflow,
    };
    let limits = Limits { overflow, ..defaults.limits.clone() };
    options::generation(fields, &defaults.sampling, &limits, false)
}

/// Takes the tools of a row and offers them to its conversation; a text has none.
fn tools(fields: &mut Fields<'_>, input: &mut TurnInput, defaults: &Defaults, schema_open: bool) -> ToolUse {
    let TurnInput::Chat(conversation) = input else { return ToolUse::default() };
    let tools = tools::tools(fields, schema_open);
    conversation.tools = tools.definitions.clone();
    if tools.is_on() && !defaults.shows_tools {
        fields.unsupported("tools", "are not shown to the model by its chat template");
    }
    tools
}

fn check_model(fields: &mut Fields<'_>, defaults: &Defaults) {
    let (Some(model), Some(known)) = (fields.text("model"), &defaults.models) else { return };
    let adapter = model.rsplit_once(':').filter(|(base, _)| known.iter().any(|known| known == base));
    if known.contains(&model) || adapter.is_some_and(|(_, name)| lora::name(&defaults.adapters, name, fields))
    {
        return;
    }
    let message = format!(
        "the row is for model {model:?}, but {:?} is loaded (--any-model answers it all the same)",
        known.first().map_or("", String::as_str)
    );
    let refusal = ApiError::new(StatusCode::NOT_FOUND, Some("model_not_found"), message);
    fields.problems().no_model(refusal.param("model"));
}

fn prompt(fields: &mut Fields<'_>) -> String {
    match fields.take("prompt") {
        Some(Value::String(text)) => return text,
        Some(Value::Array(texts)) => match &texts[..] {
            [Value::String(text)] => return text.clone(),
            _ => fields.unsupported("prompt", "is not one string"),
        },
        Some(_) => fields.wrong("prompt", "is not one string"),
        None => fields.missing("prompt"),
    }
    String::new()
}

/// Returns the row's messages behind its system prompt, or behind the default one where it has none of its own; and its
/// reasoning.
fn conversation(
    fields: &mut Fields<'_>,
    own_system: Option<String>,
    given: Given<'_>,
) -> (Conversation, AnswerReasoning) {
    let messages = message::messages(fields, given.template.says);
    let has_system = messages.iter().any(|message| matches!(message.role, Role::System | Role::Developer));
    if has_system && own_system.is_some() {
        fields.out_of_range("system", "and a system message are two system prompts, and a row has one");
    }
    with_switches(fields, messages, own_system, given)
}

/// Puts the system prompt in front of messages that have none, and reads the template's variables.
fn with_switches(
    fields: &mut Fields<'_>,
    mut messages: Vec<Message>,
    own_system: Option<String>,
    given: Given<'_>,
) -> (Conversation, AnswerReasoning) {
    let Given { defaults, template } = given;
    let has_system = messages.iter().any(|message| matches!(message.role, Role::System | Role::Developer));
    let system = own_system.or_else(|| defaults.system.clone());
    if let Some(system) = system.filter(|_| !has_system) {
        messages.insert(0, Message::system(system));
    }
    let Switches { kwargs, reasoning } = switches(fields, template, defaults.think.reasoning.is_on);
    (Conversation { messages, kwargs, ..Conversation::default() }, reasoning)
}

/// Takes the fields that the server supports and a batch does not. Only their neutral values are accepted.
fn inert(fields: &mut Fields<'_>) {
    let words = || vec![json!("none"), json!("auto")];
    for (name, only) in [
        ("stream", vec![json!(false)]),
        ("echo", vec![json!(false)]),
        ("suffix", vec![json!("")]),
        ("tools", vec![json!([])]),
        ("functions", vec![json!([])]),
        ("tool_choice", words()),
        ("function_call", words()),
        ("parallel_tool_calls", vec![json!(true), json!(false)]),
        ("modalities", vec![json!(["text"])]),
    ] {
        fields.only(name, &only);
    }
    fields.hint("stream_options");
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use llmctl_base::{SamplerStep, Sampling};
    use llmctl_engine::grammar::GrammarSource;

    /// A template that switches reasoning.
    const THINKER: TemplateVariables<'static> = TemplateVariables {
        reads: &|name| name == "enable_thinking",
        says: &|_| false,
        ends_reasoning: true,
    };

    fn parsed(row: Value) -> Result<BatchRow, ApiError> {
        let defaults = Defaults {
            limits: Limits { max_tokens: Some(9), ..Limits::default() },
            models: Some(vec!["tiny".to_owned()]),
            ..Defaults::default()
        };
        parse(row.to_string().as_bytes(), 3, &defaults, THINKER).1
    }

    /// The parameter and code of a refused row.
    fn refused(row: Value) -> (String, &'static str) {
        let error = parsed(row).expect_err("refused");
        (error.param.unwrap_or_default(), error.code.unwrap_or_default())
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
                "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "typ_p": 0.8, "top_n_sigma": 2, "repetition_penalty": 1.1,
                "presence_penalty": -1, "frequency_penalty": 1, "logit_bias": {"5": -100}, "seed": 7,
                "samplers": ["dry", "typ_p", "temperature"], "dry_sequence_breakers": ["\n"], "dry_multiplier": 0.8,
                "mirostat": 2, "xtc_probability": 0.5,
                "max_completion_tokens": 3, "stop": ["x", "y"], "ignore_eos": true, "logprobs": true,
                "top_logprobs": 2, "n": 1, "stream": false, "user": "me", "response_format": {"type": "text"},
                "chat_template_kwargs": {"enable_thinking": false},
            },
        }))
        .expect("a row");
        let TurnInput::Chat(conversation) = &row.input else { panic!("{row:?}") };
        assert_eq!(conversation.messages, [Message::system("Be brief."), Message::user("a\nb")]);
        assert_eq!(conversation.kwargs["enable_thinking"], false);
        let expected = Sampling {
            temperature: 0.5,
            top_p: 0.9,
            top_k: Some(40),
            min_p: 0.1,
            typical_p: 0.8,
            top_n_sigma: 2.0,
            samplers: Some(vec![SamplerStep::Dry, SamplerStep::TypicalP, SamplerStep::Temperature]),
            dry_sequence_breakers: Some(vec!["\n".to_owned()]),
            dry_multiplier: 0.8,
            mirostat: 2.0,
            xtc_probability: 0.5,
            repetition_penalty: 1.1,
            presence_penalty: -1.0,
            frequency_penalty: 1.0,
            logit_bias: BTreeMap::from([(5, -100.0)]),
            seed: Some(7),
            ..Sampling::default()
        };
        assert_eq!(row.turn.sampling(), expected);
        assert_eq!(
            (row.turn.limits.max_tokens, row.turn.limits.stop.len(), row.turn.limits.ignore_eos),
            (Some(3), 2, true)
        );
        assert_eq!(row.turn.logprobs, Some(2));
    }

    #[test]
    fn the_short_form_takes_a_prompt_or_messages() {
        let row = parsed(json!({"prompt": "hi", "system": "s"})).expect("a row");
        let TurnInput::Chat(conversation) = row.input else { panic!("{row:?}") };
        assert_eq!(conversation.messages, [Message::system("s"), Message::user("hi")]);
        assert_eq!(row.turn.limits.max_tokens, Some(9), "the flag is the default");
        let row = parsed(json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}));
        assert_eq!(row.expect("a row").turn.limits.max_tokens, Some(2));
        assert_eq!(refused(json!({"prompt": "a", "messages": []})).0, "prompt");
        assert_eq!(refused(json!({"temperature": 0.5})).0, "prompt");
        let embedding = json!({"url": "/v1/embeddings", "body": {"model": "tiny", "input": "a"}});
        assert_eq!(refused(embedding).0, "url");
    }

    #[test]
    fn a_system_prompt_is_never_dropped() {
        let system = "system".to_owned();
        let both = json!({"messages": [{"role": "system", "content": "a"}], "system": "b"});
        assert_eq!(refused(both), (system.clone(), "invalid_value"));
        let defaults = Defaults { raw: true, system: Some("flag".to_owned()), ..Defaults::default() };
        let raw = |row: Value| parse(row.to_string().as_bytes(), 1, &defaults, THINKER).1;
        let error = raw(json!({"prompt": "x", "system": "s"})).expect_err("nowhere to put it");
        assert_eq!((error.param, error.code), (Some(system), Some("invalid_value")));
        let chat =
            raw(json!({"messages": [{"role": "user", "content": "x"}], "system": "s"})).expect("a row");
        let TurnInput::Chat(conversation) = chat.input else { panic!("a chat") };
        assert_eq!(conversation.messages[0], Message::system("s"), "its own before the flag's");
        let messages = json!([{"role": "developer", "content": "d"}, {"role": "user", "content": "x"}]);
        let TurnInput::Chat(conversation) = raw(json!({"messages": messages})).expect("a row").input else {
            panic!("a chat")
        };
        assert_eq!(conversation.messages.len(), 2, "the flag is a default only");
    }

    #[test]
    fn a_completion_is_plain_text() {
        let row = parsed(json!({
            "url": "/v1/completions", "body": {"model": "tiny", "prompt": "Once", "logprobs": 3, "echo": false},
        }));
        let row = row.expect("a row");
        assert_eq!(
            (row.form, row.input, row.turn.logprobs),
            (RowFormat::Completion, TurnInput::Text(TextPrompt::Text("Once".into())), Some(3))
        );
    }

    #[test]
    fn the_last_answer_of_a_row_is_continued() {
        let messages =
            json!([{"role": "user", "content": "count"}, {"role": "assistant", "content": "One,"}]);
        let row = parsed(json!({"messages": messages, "continue_final_message": true})).expect("a row");
        let content = "One,".to_owned();
        assert_eq!(row.turn.answer_start, AnswerStart::Message { reasoning: String::new(), content });
        let TurnInput::Chat(conversation) = row.input else { panic!("a conversation") };
        assert_eq!(conversation.messages, [Message::user("count")]);
        let constrained = json!({"messages": messages, "continue_final_message": true, "regex": "a"});
        assert_eq!(refused(constrained), ("continue_final_message".to_owned(), "unsupported_parameter"));
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
        check("n", json!(0), "invalid_value");
        check("n", json!(129), "invalid_value");
        check("best_of", json!(2), "unsupported_parameter");
        check("stream", json!(true), "unsupported_parameter");
        let tool = json!([{"type": "function", "function": {"name": "f"}}]);
        check("tools", tool, "unsupported_parameter"); // this template shows none
        let format = |format: Value| with("response_format", format);
        let unsupported = ("response_format.type".to_owned(), "unsupported_parameter");
        assert_eq!(format(json!({"type": "xml"})), unsupported);
        let missing = ("response_format.json_schema".to_owned(), "invalid_value");
        assert_eq!(format(json!({"type": "json_schema"})), missing);
        check("response_format", json!("json_object"), "invalid_value");
        check("temprature", json!(1), "unsupported_parameter");
        check("temperature", json!("hot"), "invalid_value");
        check("max_tokens", json!(0), "invalid_value");
        check("max_tokens", json!(-2), "invalid_value");
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
    fn the_servers_rules_hold_for_rows() {
        let row = parsed(json!({
            "messages": [
                {"role": "assistant", "content": "a", "provider_specific_fields": {"refusal": null}, "parsed": {"a": 1}},
                {"role": "user", "content": "x"},
            ],
            "user": "me", "store": true, "max_tokens": 99999, "top_k": -1, "repeat_penalty": 1.5, "mirostat": 0,
            "guided_regex": "a+", "reasoning_effort": "none", "chat_template_kwargs": {"unread": 1},
        }));
        let row = row.expect("a row");
        assert_eq!(row.ignored, ["chat_template_kwargs.unread", "messages[].parsed", "store", "user"]);
        assert_eq!((row.turn.limits.max_tokens, row.turn.limits.overflow), (Some(99999), Overflow::Clamp));
        let sampling = row.turn.sampling();
        assert_eq!((sampling.top_k, sampling.repetition_penalty), (None, 1.5));
        assert_eq!(
            row.turn.constraint.map(|constraint| constraint.source),
            Some(GrammarSource::Regex("a+".to_owned()))
        );
        let TurnInput::Chat(conversation) = row.input else { panic!("a chat") };
        assert_eq!(Value::Object(conversation.kwargs), json!({"enable_thinking": false}));
    }

    #[test]
    fn messages_say_where_they_are_wrong() {
        let message =
            |message: Value| refused(json!({"messages": [{"role": "user", "content": "a"}, message]})).0;
        assert_eq!(message(json!({"content": "x"})), "messages[1].role");
        assert_eq!(message(json!({"role": "user", "content": 1})), "messages[1].content");
        let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]});
        assert_eq!(message(image), "messages[1].content[0].image_url");
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
        let TurnInput::Chat(conversation) = row.expect("a row").input else { panic!("a chat") };
        let calls = &conversation.messages[0].tool_calls;
        assert_eq!((calls[0].name.as_str(), &calls[0].arguments), ("f", &json!({"a": 1})));
        assert_eq!(conversation.messages[1].tool_call_id.as_deref(), Some("c1"));
    }

    #[test]
    fn a_row_without_a_name_is_named_by_its_line() {
        let id = |line: &str| parse(line.as_bytes(), 7, &Defaults::default(), THINKER).0;
        assert_eq!(id(r#"{"custom_id": "x", "prompt": ""}"#), "x");
        assert_eq!(id(r#"{"prompt": ""}"#), "line-7");
        assert_eq!(id("not json"), "line-7");
        assert_eq!(id(r#"{"custom_id": 5}"#), "line-7");
    }
}
