//! Computes the tokens of a prompt that are the same whatever is asked. The prompt is rendered with two questions after it, and
//! what both begin with is computed and kept, so that no template has to be known.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Map, Value, json};

use super::{TextRole, WarmArgs};
use crate::cli::batch::input::{open_rows, read_row};
use crate::cli::error::{CommandError, Kind};
use crate::cli::model::load::settle;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::input::{read_all_stdin, read_file};
use crate::cli::terminal::report::{bytes, counted};
use llmctl_engine::session::store::now_ms;
use llmctl_engine::turn::{TextPrompt, TurnInput, TurnRequest};
use llmctl_engine::{EngineClient, EngineSessionName, Event, Limits, Outcome, Overflow, Request};
use llmctl_models::adapters::AdapterUse;
use llmctl_models::kv::disk::{WarmPrompt, names, pinned_bytes};
use llmctl_models::kv::{PAGE_TOKENS, TokenBuf};
use llmctl_serve::api::ahead::prompts_of;
use llmctl_serve::{App, wire};
use llmctl_template::{Content, Conversation, DateTime, Message, Role, text_part};

/// Two questions that begin with different tokens.
const QUESTIONS: [&str; 2] = ["a", "Z"];

/// Seconds after which templates that write a date write another one.
const TOMORROW_MS: u64 = 86_400_000;

/// A prompt as it was read.
pub struct PromptSource {
    name: String,
    content: SourceContent,
}

enum SourceContent {
    Text(TextRole, String),
    /// A row of a batch, as JSON.
    Request(Vec<u8>),
}

/// A prompt to compute.
pub struct AheadPrompt {
    name: String,
    /// Its tokens, whole pages of them, and one more.
    request: Request,
    /// Full pages.
    num_pages: usize,
    /// The template writes the date into it.
    has_date: bool,
}

/// Reads the files, without the model.
///
/// # Errors
/// A file that cannot be read; two prompts of one name.
pub fn read(
    files: &[&PathBuf],
    args: &WarmArgs,
    terminal: &Terminal,
) -> Result<Vec<PromptSource>, CommandError> {
    let mut sources = Vec::new();
    for file in files {
        let is_stdin = file.as_os_str() == "-";
        let stem = if is_stdin {
            "stdin".to_owned()
        } else {
            plain(&file.file_stem().unwrap_or_default().to_string_lossy())
        };
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("jsonl") => {
                let mut rows = open_rows(file, false)?.0;
                let reading = |error| CommandError::reading(file, error);
                while let Some(row) = read_row(rows.as_mut()).map_err(reading)? {
                    if !row.trim_ascii().is_empty() {
                        let name = format!("{stem}-{}", sources.len() + 1);
                        sources.push(PromptSource { name, content: SourceContent::Request(row) });
                    }
                }
            }
            Some("json") => {
                let content = SourceContent::Request(read_file(file)?.into_bytes());
                sources.push(PromptSource { name: stem, content });
            }
            _ => {
                let text =
                    if is_stdin { read_all_stdin(terminal)?.unwrap_or_default() } else { read_file(file)? };
                sources.push(PromptSource { name: stem, content: SourceContent::Text(args.role, text) });
            }
        }
    }
    if let Some(name) = &args.name {
        let [source] = &mut *sources else {
            return Err(CommandError::usage("--name names one prompt, and the files have several"));
        };
        source.name.clone_from(name);
    }
    let mut seen = BTreeSet::new();
    match sources.iter().find(|source| !seen.insert(&source.name)) {
        None => Ok(sources),
        Some(twice) => Err(CommandError::usage(format!("two prompts are named {:?}", twice.name))
            .hint("warm them one after the other, with --name")),
    }
}

/// Returns a file's name as one of a prompt.
fn plain(stem: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
    stem.chars().map(plain).take(100).collect()
}

/// Computes prompts and keeps their KV.
pub struct Ahead<'a> {
    app: &'a App,
    engine: EngineClient,
    root: &'a Path,
    kv_limit: u64,
    terminal: &'a Terminal,
}

impl<'a> Ahead<'a> {
    /// `root` is the folder of KV, `kv_limit` the bytes of all KV in it.
    ///
    /// # Errors
    /// The engine has ended.
    pub fn new(
        app: &'a App,
        root: &'a Path,
        kv_limit: u64,
        terminal: &'a Terminal,
    ) -> Result<Self, CommandError> {
        let engine = app.engine().map_err(|_| llmctl_base::Error::EngineGone)?;
        Ok(Self { app, engine, root, kv_limit, terminal })
    }

    /// Renders all prompts, before the first is computed.
    ///
    /// # Errors
    /// A request that is refused, by the prompt's name; a prompt of less than a page.
    pub fn prompts(&self, sources: Vec<PromptSource>) -> Result<Vec<AheadPrompt>, CommandError> {
        let rendered = |PromptSource { name, content }: PromptSource| {
            let read =
                self.input(content).and_then(|(input, turn)| self.rendered(name.clone(), &input, &turn));
            read.map_err(|error| error.context(format!("prompt {name:?}")))
        };
        sources.into_iter().map(rendered).collect()
    }

    fn input(&self, content: SourceContent) -> Result<(TurnInput, TurnRequest), CommandError> {
        Ok(match content {
            SourceContent::Text(_, text) if !self.app.model().chat_tokenizer.has_template() => {
                (TurnInput::Text(TextPrompt::Text(text)), TurnRequest::default())
            }
            SourceContent::Text(role, text) => {
                let message =
                    if role == TextRole::System { Message::system(text) } else { Message::user(text) };
                let conversation = Conversation { messages: vec![message], ..Conversation::default() };
                (TurnInput::Chat(conversation), TurnRequest::default())
            }
            SourceContent::Request(json) => {
                let row = wire::json::object(&json, "the request").map_err(CommandError::bad_data)?;
                let (path, body) = body_of(row)?;
                let read = prompts_of(self.app, &path, body);
                let (inputs, turn) = read.map_err(|error| CommandError::bad_data(error.message))?;
                let [input] = <[TurnInput; 1]>::try_from(inputs).map_err(|inputs| {
                    CommandError::bad_data(format!("it has {}", counted(inputs.len(), "prompt")))
                })?;
                (input, turn)
            }
        })
    }

    /// Renders a prompt.
    ///
    /// # Errors
    /// Those of the template; a prompt of less than a page.
    pub fn rendered(
        &self,
        name: String,
        input: &TurnInput,
        turn: &TurnRequest,
    ) -> Result<AheadPrompt, CommandError> {
        let plan = |question, now| -> Result<Request, CommandError> {
            let planner = self.app.planner(&self.engine);
            Ok(planner.plan(&followed_by(input, question)?, now, turn)?.request(turn))
        };
        let ms = now_ms();
        let [now, tomorrow] = [ms, ms + TOMORROW_MS].map(DateTime::local);
        let first = plan(QUESTIONS[0], now)?;
        let common =
            |other: &Request| tokens(&first, &[]).as_tokens().common_prefix(tokens(other, &[]).as_tokens());
        let len = common(&plan(QUESTIONS[1], now)?);
        let has_date = common(&plan(QUESTIONS[1], tomorrow)?) < len;
        let (request, num_pages) = cut(first, len);
        if num_pages == 0 {
            let message =
                format!("it has {}, and KV is kept by pages of {PAGE_TOKENS}", counted(len, "token"));
            return Err(CommandError::bad_data(message));
        }
        Ok(AheadPrompt { name, request, num_pages, has_date })
    }

    /// Computes a prompt, as far as its KV is not on disk, and keeps it. Returns it with what to say of it.
    ///
    /// # Errors
    /// The engine's failure; KV that could not be written, or for which there is no room.
    pub fn keep(
        &self,
        AheadPrompt { name, request, num_pages, has_date }: AheadPrompt,
    ) -> Result<(WarmPrompt, String), CommandError> {
        let start = Instant::now();
        let outcome = self.compute(&name, request.clone())?;
        settle(&self.engine, self.terminal);
        let pages = names(tokens(&request, &outcome.adapters).as_tokens()).take(num_pages).collect();
        let fingerprint = &self.app.model().fingerprint;
        let model = fingerprint.reference.clone().unwrap_or_else(|| fingerprint.name.clone());
        let prompt = WarmPrompt::new(name, model, now_ms(), pages).map_err(CommandError::usage)?;
        let unwritten = CommandError::io(self.root.display());
        let sizes = WarmPrompt::bytes_on_disk(std::slice::from_ref(&prompt), self.root);
        let [Some(num_bytes)] = sizes.map_err(&unwritten)?[..] else {
            let message = format!("the KV of {:?} could not be written", prompt.name);
            return Err(Kind::Io.error(message).hint("the warnings above say why"));
        };
        prompt.keep(self.root).map_err(&unwritten)?;
        let (pinned, most) =
            (pinned_bytes(self.root).map_err(&unwritten)?, self.kv_limit - self.kv_limit / 8);
        if pinned > most {
            prompt.remove(self.root).map_err(&unwritten)?;
            let message = format!(
                "{:?} would bring the KV of prompts to {}, more than {}",
                prompt.name,
                bytes(pinned),
                bytes(most)
            );
            return Err(CommandError::usage(message)
                .hint("a larger --kv-disk has room; `llmctl warm --remove NAME` makes some"));
        }
        let mut text = format!(
            "{}: {} in {} of KV, {} computed in {:.1} s\n",
            prompt.name,
            counted(prompt.num_tokens(), "token"),
            bytes(num_bytes),
            outcome.usage.prompt_tokens - outcome.usage.cached_tokens,
            start.elapsed().as_secs_f64()
        );
        if has_date {
            text.push_str("  the chat template writes the date or the time into it, so that it helps no other day: give the model a template without (--chat-template)\n");
        }
        Ok((prompt, text))
    }

    fn compute(&self, name: &str, request: Request) -> Result<Outcome, CommandError> {
        let limits = Limits { max_tokens: Some(1), overflow: Overflow::Clamp, ..Limits::default() };
        let session = Some(EngineSessionName::ahead(name));
        let Request { prompt, images, adapters, .. } = request;
        let request = Request { prompt, images, adapters, limits, session, ..Request::default() };
        for event in self.engine.submit(request)? {
            match event {
                Event::Prefill { done, total } => {
                    self.terminal.status(&format!("{name}: {done} of {total} tokens"))
                }
                Event::Done(outcome) => {
                    self.terminal.status("");
                    return Ok(outcome);
                }
                Event::Failed(error) => return Err(error.into()),
                _ => {}
            }
        }
        Err(llmctl_base::Error::EngineGone.into())
    }
}

/// Cuts a prompt to the full pages among its first `len` tokens, and one token more, because the last one of a prompt is computed for
/// its answer alone. No page ends within an image. Returns the number of pages too.
fn cut(mut request: Request, len: usize) -> (Request, usize) {
    let is_within = |end: usize| {
        let mut spans =
            request.images.iter().filter_map(|image| Some((image.spans.first()?, image.spans.last()?)));
        spans.any(|(first, last)| first.rows.start < end && end < last.rows.end)
    };
    let num_pages = (0..=len / PAGE_TOKENS).rev().find(|pages| !is_within(pages * PAGE_TOKENS)).unwrap_or(0);
    let end = num_pages * PAGE_TOKENS;
    request.images.retain(|image| image.spans.first().is_some_and(|span| span.rows.start < end));
    request.prompt.truncate(end + 1);
    let repeated = request.prompt.first().copied().filter(|_| request.prompt.len() == end);
    request.prompt.extend(repeated);
    (request, num_pages)
}

fn tokens(request: &Request, adapters: &[AdapterUse]) -> TokenBuf {
    TokenBuf { ids: request.prompt.clone(), images: request.spans(), adapters: adapters.to_vec() }
}

/// Returns the path and the body of a request: a batch's row, a body alone, or a prompt with its system prompt.
fn body_of(mut row: Map<String, Value>) -> Result<(String, Map<String, Value>), CommandError> {
    if let Some(body) = row.remove("body") {
        let Value::Object(body) = body else { return Err(CommandError::bad_data("body: is not an object")) };
        let path = row.get("url").and_then(Value::as_str).unwrap_or("/v1/chat/completions").to_owned();
        let is_other = |key: &&String| !["custom_id", "method", "url"].contains(&key.as_str());
        let refused = |key| Err(CommandError::bad_data(format!("{key}: is no field beside a body")));
        return row.keys().find(is_other).map_or(Ok((path, body)), refused);
    }
    let is_of_anthropic = |tool: &Value| tool.get("input_schema").is_some();
    let mut tools = row.get("tools").and_then(Value::as_array).into_iter().flatten();
    let path = match () {
        () if row.contains_key("input") => "/v1/responses",
        () if row.get("system").is_some_and(Value::is_array) || tools.any(is_of_anthropic) => "/v1/messages",
        () => "/v1/chat/completions",
    };
    row.remove("custom_id");
    if path == "/v1/chat/completions" {
        let message = |role: &str, content: Value| json!({"role": role, "content": content});
        let system = row.remove("system").map(|text| message("system", text));
        let given = match row.remove("messages") {
            Some(Value::Array(messages)) => messages,
            Some(_) => return Err(CommandError::bad_data("messages: is not an array")),
            None => row.remove("prompt").map(|text| message("user", text)).into_iter().collect(),
        };
        row.insert("messages".to_owned(), system.into_iter().chain(given).collect());
    }
    Ok((path.to_owned(), row))
}

/// Adds a question: to a last message of the user, else as a message of its own.
fn followed_by(input: &TurnInput, question: &str) -> Result<TurnInput, CommandError> {
    let mut input = input.clone();
    match &mut input {
        TurnInput::Chat(conversation) => match conversation.messages.last_mut() {
            Some(Message { role: Role::User, content: Some(content), .. }) => match content {
                Content::Text(text) => text.push_str(question),
                Content::Parts(parts) => parts.push(text_part(question)),
            },
            _ => conversation.messages.push(Message::user(question)),
        },
        TurnInput::Text(TextPrompt::Text(text) | TextPrompt::WithImages { text, .. }) => {
            text.push_str(question)
        }
        TurnInput::Text(TextPrompt::Ids(_)) => {}
        TurnInput::Text(TextPrompt::Infill(_)) => {
            return Err(CommandError::bad_data(
                "suffix: a prompt with a text behind it has no beginning of its own",
            ));
        }
    }
    Ok(input)
}
