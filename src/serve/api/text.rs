//! The model's text side alone: `POST /tokenize`, `/detokenize` and `/apply-template`, in the words of
//! llama.cpp's server and of vLLM's, which clients of either may send.

use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value, json};

use super::blocking::blocking;
use super::body::JsonBody;
use super::reply::Ignored;
use super::request::{conversation, read_body, token_ids};
use crate::App;
use crate::engines::preparing::bytes_of;
use crate::error::ApiError;
use crate::wire::Fields;
use llmctl_base::Error;
use llmctl_engine::ChatTokenizer;
use llmctl_engine::turn::AnswerStart;
use llmctl_models::text::Encode;
use llmctl_template::{Conversation, DateTime};

/// Tokens that are shown with their text at once; each takes some hundred bytes.
const MAX_PIECES: usize = 1 << 18;

/// Tokens up to which every text is counted: those of the context, within these bounds.
const LEAST_COUNTED: usize = 1 << 17;
const MOST_COUNTED: usize = 1 << 20;

/// Input to tokenize.
pub enum TextSource {
    Text { text: String, options: Encode },
    Chat(Conversation, AnswerStart),
}

impl TextSource {
    fn num_bytes(&self) -> usize {
        match self {
            TextSource::Text { text, .. } => text.len(),
            TextSource::Chat(conversation, _) => bytes_of(conversation),
        }
    }
}

/// Text (`content` as in llama.cpp, `prompt` as in vLLM, whose defaults differ) or `messages` to token ids.
pub async fn tokenize(State(app): State<App>, JsonBody(body): JsonBody) -> Result<TextResponse, ApiError> {
    let engine = app.engine()?;
    let (ignored, (with_pieces, source)) = read(&app, body, tokenize_fields).await?;
    let place = app.preparing().enter(source.num_bytes()).await?;
    let (count, tokens) = blocking(&app, move |app| {
        let _place = place;
        let chat_tokenizer = &app.model().chat_tokenizer;
        let ids = encode(chat_tokenizer, source)?;
        let count = ids.len();
        if with_pieces && count > MAX_PIECES {
            let message = format!("with_pieces: {count} tokens are more than {MAX_PIECES}");
            return Err(ApiError::invalid("with_pieces", message));
        }
        let tokens: Value = match with_pieces {
            false => ids.into(),
            true => ids.iter().map(|&id| piece(chat_tokenizer, id)).collect(),
        };
        Ok((count, tokens))
    })
    .await?;
    let context = engine.spec().context_length();
    Ok((ignored, Json(json!({"tokens": tokens, "count": count, "max_model_len": context}))))
}

/// Reads whether tokens are shown with their text, and the text.
pub fn tokenize_fields(app: &App, fields: &mut Fields<'_>) -> (bool, TextSource) {
    let asked = ["with_pieces", "return_token_strs"].map(|name| fields.flag(name));
    (asked.contains(&Some(true)), source(app, fields))
}

fn source(app: &App, fields: &mut Fields<'_>) -> TextSource {
    if fields.has("messages") {
        let (conversation, start) = conversation(app, fields);
        return TextSource::Chat(conversation, start);
    }
    let from_llama_cpp = fields.text("content");
    let adds_special = from_llama_cpp.is_none();
    let asked = ["add_special", "add_special_tokens"].map(|name| fields.flag(name));
    let add_special = asked.into_iter().flatten().next().unwrap_or(adds_special);
    let parse_special = fields.flag("parse_special").unwrap_or(true);
    let text = match from_llama_cpp {
        Some(text) => text,
        None if fields.has("prompt") => fields.text("prompt").unwrap_or_default(),
        None => {
            fields.wrong("content", "is missing, and so are prompt and messages");
            String::new()
        }
    };
    TextSource::Text { text, options: Encode { add_special, parse_special } }
}

/// Encodes a whole text, also one that is beyond the context, but not one of any length: clients choose how many are sent.
fn encode(chat_tokenizer: &ChatTokenizer, source: TextSource) -> Result<Vec<u32>, ApiError> {
    let most = chat_tokenizer.context_tokens().clamp(LEAST_COUNTED, MOST_COUNTED);
    let (param, encoded) = match source {
        TextSource::Text { text, options } => {
            ("content", chat_tokenizer.tokenizer().encode_prompt(&text, options, most))
        }
        TextSource::Chat(conversation, start) => {
            let prompt = render(chat_tokenizer, &conversation, &start)?;
            ("messages", encode_chat(chat_tokenizer, &conversation, prompt, most))
        }
    };
    encoded.map_err(|error| match error {
        Error::PromptOversized { least_tokens, .. } => {
            let message = format!("{param}: {least_tokens} tokens or more; this server counts up to {most}");
            ApiError::invalid(param, message)
        }
        other => other.into(),
    })
}

/// Encodes a rendered conversation; of its images the sizes say how many tokens they have.
fn encode_chat(
    chat_tokenizer: &ChatTokenizer,
    conversation: &Conversation,
    prompt: String,
    most: usize,
) -> Result<Vec<u32>, Error> {
    let plans = chat_tokenizer.image_plans(&chat_tokenizer.images(conversation))?;
    let prompt = match chat_tokenizer.vision() {
        Some(vision) => vision.expanded(&prompt, &mut plans.iter(), most)?,
        None => prompt,
    };
    chat_tokenizer.tokenizer().encode_chat_for(&prompt, Some(most))
}

/// Renders a prompt with the given beginning of its answer.
fn render(
    chat_tokenizer: &ChatTokenizer,
    conversation: &Conversation,
    start: &AnswerStart,
) -> Result<String, ApiError> {
    let rendered = chat_tokenizer.render(conversation, DateTime::local_now());
    let prompt = rendered.map_err(Error::from)?;
    let start = start.in_markup(chat_tokenizer.output_markup(), &prompt)?;
    Ok(prompt + &start)
}

/// Tokenizer configuration with vLLM's field names.
pub async fn tokenizer_info(State(app): State<App>) -> Json<Value> {
    let chat_tokenizer = &app.model().chat_tokenizer;
    let tokenizer = chat_tokenizer.tokenizer();
    let text = |id: Option<u32>| id.and_then(|id| tokenizer.id_to_token(id)).map(str::to_owned);
    let context = app.engine().ok().map(|engine| engine.spec().context_length());
    let specials: Vec<&str> = tokenizer.special_tokens().map(|(_, text)| text).collect();
    Json(json!({
        "tokenizer_class": "llmctl",
        "vocab_size": tokenizer.vocab_size(),
        "bos_token": text(tokenizer.bos()),
        "eos_token": text(tokenizer.eos()),
        "pad_token": text(tokenizer.eos()),
        "add_bos_token": tokenizer.adds_bos(),
        "additional_special_tokens": specials,
        "model_max_length": context,
        "chat_template": chat_tokenizer.template_source(),
    }))
}

/// The text of a token, or its bytes where they are not whole characters.
fn piece(chat_tokenizer: &ChatTokenizer, id: u32) -> Value {
    let bytes = chat_tokenizer.token_bytes(id);
    let text = str::from_utf8(&bytes).map(Value::from);
    json!({"id": id, "piece": text.unwrap_or_else(|_| bytes.to_vec().into())})
}

pub async fn detokenize(State(app): State<App>, JsonBody(body): JsonBody) -> Result<TextResponse, ApiError> {
    let (ignored, ids) = read(&app, body, detokenize_fields).await?;
    let text =
        blocking(&app, move |app| Ok(app.model().chat_tokenizer.tokenizer().decode(&ids, false))).await?;
    Ok((ignored, Json(json!({"content": text, "prompt": text}))))
}

/// Reads token ids of the model's vocabulary.
pub fn detokenize_fields(app: &App, fields: &mut Fields<'_>) -> Vec<u32> {
    let vocab_size = app.model().chat_tokenizer.tokenizer().vocab_size();
    let has_tokens = fields.has("tokens");
    let ids = fields.take("tokens");
    let ids = ids.as_ref().and_then(Value::as_array).and_then(|items| token_ids(items));
    if !has_tokens {
        fields.missing("tokens");
    } else if ids.is_none() {
        fields.wrong("tokens", "is not an array of token ids");
    }
    let ids = ids.unwrap_or_default();
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
        fields.out_of_range("tokens", &format!("hold {id}, but the vocabulary has {vocab_size}"));
    }
    ids
}

/// The prompt that a chat completion with these messages begins with.
pub async fn apply_template(
    State(app): State<App>,
    JsonBody(body): JsonBody,
) -> Result<TextResponse, ApiError> {
    let (ignored, (conversation, start)) = read(&app, body, conversation).await?;
    let place = app.preparing().enter(bytes_of(&conversation)).await?;
    let rendered = blocking(&app, move |app| {
        let _place = place;
        render(&app.model().chat_tokenizer, &conversation, &start)
    });
    let prompt = rendered.await?;
    Ok((ignored, Json(json!({"prompt": prompt}))))
}

/// Response of these endpoints.
type TextResponse = (Ignored, Json<Value>);

/// Counts the tokens of a conversation's prompt, also beyond the context.
pub async fn count_of(app: &App, conversation: Conversation, start: AnswerStart) -> Result<usize, ApiError> {
    let source = TextSource::Chat(conversation, start);
    let place = app.preparing().enter(source.num_bytes()).await?;
    let counted = blocking(app, move |app| {
        let _place = place;
        Ok(encode(&app.model().chat_tokenizer, source)?.len())
    });
    counted.await
}

/// Reads a body whole, all fields of which mean something for the prompt.
pub async fn read<T: Send + 'static>(
    app: &App,
    body: Map<String, Value>,
    read: impl FnOnce(&App, &mut Fields<'_>) -> T + Send + 'static,
) -> Result<(Ignored, T), ApiError> {
    blocking(app, move |app| read_fields(app, body, read)).await
}

/// As [`read`], without waiting.
///
/// # Errors
/// All that is wrong with the body, the first kind of it.
pub fn read_fields<T>(
    app: &App,
    body: Map<String, Value>,
    read: impl FnOnce(&App, &mut Fields<'_>) -> T,
) -> Result<(Ignored, T), ApiError> {
    let (read, mut problems) = read_body(app, body, |fields| read(app, fields))?;
    Ok((Ignored(problems.take_ignored()), read))
}
