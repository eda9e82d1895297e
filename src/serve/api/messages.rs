//! Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`.
//!
//! Invariants: the blocks of a stream follow each other strictly, and each is closed before the next; a
//! stream ends with `message_stop` or with an error.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::body::{Incoming, JsonBody, PostedBody, session_of};
use super::collect::Collected;
use super::generate::{FinishedChoice, GenerateRequest, Prompt, Running, Totals};
use super::reply::Ignored;
use super::request::{AnswerParams, Streaming, check_tools, read_answer, sampling, with_settings};
use super::sse::{self, WireFormat};
use super::text;
use crate::App;
use crate::error::ApiError;
use crate::wire::anthropic::output::{OutputWishes, output};
use crate::wire::anthropic::tools::tools;
use crate::wire::anthropic::{answer, error, hints, messages};
use crate::wire::message::{begun_last, check_continued};
use crate::wire::switches::fulfil;
use crate::wire::{Fields, lora, params, shape};
use llmctl_base::SAMPLING;
use llmctl_engine::turn::{Delta, TurnRequest};
use llmctl_engine::{Limits, Token, Usage};
use llmctl_template::Conversation;

pub async fn post(State(app): State<App>, posted: PostedBody) -> Result<Response, ApiError> {
    let MessagesBody { request, shows_thinking } = posted.read(&app, read).await?;
    let (id, request_id) = (format!("msg_{}", Uuid::new_v4().simple()), request.request_id.clone());
    let format = |running: &mut Running| MessageFormat {
        id,
        model: app.model().id.clone(),
        request_id,
        shows_thinking,
        prompt_tokens: running.prompt_tokens(),
        open: None,
        num_blocks: 0,
        stop: None,
    };
    sse::answer(&app, request, format).await
}

/// Counts the tokens of the prompt that the same body would have at [`post`].
pub async fn count_tokens(
    State(app): State<App>,
    JsonBody(body): JsonBody,
) -> Result<(Ignored, Json<Value>), ApiError> {
    let (ignored, asked) = text::read(&app, body, counted_fields).await?;
    let count = text::count_of(&app, asked.conversation, asked.turn.answer_start).await?;
    Ok((ignored, Json(json!({"input_tokens": count}))))
}

/// Reads the fields of a request for a message that its prompt depends on; the others say nothing of it.
pub fn counted_fields(app: &App, fields: &mut Fields<'_>) -> PromptFields {
    let sampling = SAMPLING.iter().flat_map(|number| number.spellings());
    let others = ["top_k", "seed", "random_seed", "logit_bias", "samplers", "dry_sequence_breakers", "lora"];
    let limits = ["max_tokens", "stop_sequences", "stream", "loop_guard", "session_id"];
    limits.iter().chain(&others).chain(sampling).for_each(|name| fields.hint(name));
    prompt_fields(app, fields)
}

/// Body of a request for a message.
pub struct MessagesBody {
    pub request: GenerateRequest,
    shows_thinking: bool,
}

/// Reads the body of a message.
///
/// # Errors
/// All that is wrong with the body, the first kind of it; `invalid_session_id`; 503 without an engine.
pub fn read(app: &App, body: Map<String, Value>, incoming: Incoming) -> Result<MessagesBody, ApiError> {
    let (params, (conversation, shows_thinking, in_body)) = read_answer(app, body, |engine, fields| {
        let asked = prompt_fields(app, fields);
        let limits = with_settings(app, Limits::default());
        let limits = Limits {
            max_tokens: params::max_tokens(fields, &["max_tokens"], &limits, false),
            stop: params::stop(fields, "stop_sequences").unwrap_or_default(),
            loop_guard: params::loop_guard(fields).unwrap_or(limits.loop_guard),
            ..limits
        };
        let is_on = fields.flag("stream").unwrap_or(false);
        let sampling = sampling(app, engine, fields);
        let adapters = lora::adapters(&engine.spec().model.adapters, fields);
        let turn = TurnRequest { sampling, limits, adapters, ..asked.turn };
        check_continued(fields, "messages", &turn.answer_start, turn.constraint.is_some());
        let params = AnswerParams::new(turn, Streaming { is_on, ..Streaming::default() });
        (params, (asked.conversation, asked.shows_thinking, fields.text("session_id")))
    })?;
    let session = session_of(in_body, false, &incoming.headers, &incoming.caller)?;
    Ok(MessagesBody {
        request: params.request(Prompt::Chat(conversation), session, incoming),
        shows_thinking,
    })
}

/// Fields that the prompt depends on, and those that are read beside them.
pub struct PromptFields {
    conversation: Conversation,
    turn: TurnRequest,
    shows_thinking: bool,
}

/// Reads the fields that both endpoints know.
fn prompt_fields(app: &App, fields: &mut Fields<'_>) -> PromptFields {
    let mut messages = messages::conversation(fields);
    let answer_start = begun_last(fields, &mut messages);
    let schema_open = shape::is_open(fields, app.settings().schema_open);
    let tools = tools(fields, schema_open);
    check_tools(app, fields, &tools);
    let OutputWishes { wish, shows_thinking, constraint } = output(fields, schema_open);
    let mut kwargs = Map::new();
    let reasoning_budget = app.model().chat_tokenizer.with_template(|template| {
        fulfil(fields, &mut kwargs, template, wish, app.settings().enable_thinking)
    });
    hints(fields);
    params::inert(fields);
    let conversation =
        Conversation { messages, tools: tools.definitions.clone(), kwargs, ..Conversation::default() };
    let turn = TurnRequest { tools, constraint, reasoning_budget, answer_start, ..TurnRequest::default() };
    PromptFields { conversation, turn, shows_thinking }
}

/// A block that has begun in a stream.
enum OpenBlock {
    Text,
    /// With all its text.
    Thinking(String),
    /// The call of this index.
    Call(usize),
}

/// Encoding of a message.
struct MessageFormat {
    id: String,
    model: String,
    request_id: String,
    shows_thinking: bool,
    prompt_tokens: usize,
    open: Option<OpenBlock>,
    num_blocks: usize,
    /// Reason of the end and stop string; `None` while the answer continues.
    stop: Option<(&'static str, Option<String>)>,
}

impl MessageFormat {
    fn block_delta(&self, delta: Value) -> Value {
        json!({"type": "content_block_delta", "index": self.num_blocks - 1, "delta": delta})
    }

    /// Ends the block that is open.
    fn close(&mut self, events: &mut Vec<Value>) {
        let Some(open) = self.open.take() else { return };
        if let OpenBlock::Thinking(text) = open {
            let signature = answer::signature(&text);
            events.push(self.block_delta(json!({"type": "signature_delta", "signature": signature})));
        }
        events.push(json!({"type": "content_block_stop", "index": self.num_blocks - 1}));
    }

    /// Begins a block behind the one that is open.
    fn begin(&mut self, events: &mut Vec<Value>, open: OpenBlock, block: &Value) {
        self.close(events);
        events.push(json!({"type": "content_block_start", "index": self.num_blocks, "content_block": block}));
        self.num_blocks += 1;
        self.open = Some(open);
    }

    fn text(&mut self, events: &mut Vec<Value>, text: &str) {
        if !matches!(self.open, Some(OpenBlock::Text)) {
            self.begin(events, OpenBlock::Text, &answer::text_block(""));
        }
        events.push(self.block_delta(json!({"type": "text_delta", "text": text})));
    }

    fn thinking(&mut self, events: &mut Vec<Value>, text: &str) {
        if !matches!(self.open, Some(OpenBlock::Thinking(_))) {
            let block = json!({"type": "thinking", "thinking": "", "signature": ""});
            self.begin(events, OpenBlock::Thinking(String::new()), &block);
        }
        if let Some(OpenBlock::Thinking(all)) = &mut self.open {
            all.push_str(text);
        }
        if self.shows_thinking {
            events.push(self.block_delta(json!({"type": "thinking_delta", "thinking": text})));
        }
    }

    fn delta(&mut self, delta: Delta, events: &mut Vec<Value>) {
        match delta {
            Delta::Content(text) if text.is_empty() => {}
            Delta::Content(text) => self.text(events, &text),
            Delta::Reasoning(text) if text.is_empty() => {}
            Delta::Reasoning(text) => self.thinking(events, &text),
            Delta::Call { index, id, name } => {
                self.begin(events, OpenBlock::Call(index), &answer::call_block(&id, &name, &json!({})));
            }
            // Calls come one after another: what belongs to no open one cannot be written any more.
            Delta::Arguments { index, fragment } if self.is_open_call(index) => {
                events.push(self.block_delta(json!({"type": "input_json_delta", "partial_json": fragment})));
            }
            Delta::CallEnd { index } if self.is_open_call(index) => self.close(events),
            Delta::Arguments { .. } | Delta::CallEnd { .. } => {}
        }
    }

    fn is_open_call(&self, index: usize) -> bool {
        matches!(self.open, Some(OpenBlock::Call(open)) if open == index)
    }
}

impl WireFormat for MessageFormat {
    const NAMES_EVENTS: bool = true;
    const ENDS_WITH_DONE: bool = false;

    fn whole(self, collected: &Collected) -> Result<Value, ApiError> {
        let answer = collected.choices.first().map(|choice| &choice.answer);
        let content = answer.map(|answer| answer::content(answer, self.shows_thinking)).unwrap_or_default();
        let usage = answer::usage(&collected.totals.usage, collected.totals.num_reasoning_tokens);
        Ok(answer::message(&self.id, &self.model, content, answer.map(answer::stop), usage))
    }

    fn opening(&mut self) -> Vec<Value> {
        // The engine reports the reused tokens later: `message_delta` has them.
        let usage = Usage { prompt_tokens: self.prompt_tokens, ..Usage::default() };
        let usage = answer::usage(&usage, 0);
        let message = answer::message(&self.id, &self.model, Vec::new(), None, usage);
        vec![json!({"type": "message_start", "message": message})]
    }

    fn deltas(&mut self, _choice: usize, deltas: Vec<Delta>, _tokens: Vec<Token>) -> Vec<Value> {
        let mut events = Vec::new();
        deltas.into_iter().for_each(|delta| self.delta(delta, &mut events));
        events
    }

    fn finished(&mut self, _choice: usize, finished: &FinishedChoice) -> Vec<Value> {
        let (reason, sequence) = answer::stop(&finished.answer);
        self.stop = Some((reason, sequence.map(str::to_owned)));
        let mut events = Vec::new();
        self.close(&mut events);
        events
    }

    fn ending(&mut self, totals: &Totals) -> Vec<Value> {
        let (reason, sequence) = self.stop.take().unzip();
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence.flatten()});
        let usage = answer::usage(&totals.usage, totals.num_reasoning_tokens);
        vec![
            json!({"type": "message_delta", "delta": delta, "usage": usage}),
            json!({"type": "message_stop"}),
        ]
    }

    fn failed(&mut self, error: &ApiError) -> Vec<Value> {
        vec![error::body(error, &self.request_id)]
    }

    fn keep_alive(&mut self) -> Option<Value> {
        Some(json!({"type": "ping"}))
    }
}
