//! `--engine`: the texts of a model from here, its tokens from engines elsewhere.
//!
//! Decides which flags have a meaning then. A flag that would change answers is refused, one that cannot is
//! reported.

use std::sync::Arc;
use std::time::Instant;

use super::loaded::{Loaded, PreparedTexts};
use super::{TextFlags, resolve};
use crate::cli::error::CommandError;
use crate::cli::flags::args::{EngineOptions, ModelArgs, Sharing};
use crate::cli::model::hub_access::ca_file;
use crate::cli::terminal::Terminal;
use llmctl_base::Error;
use llmctl_engine::http_engine::{
    HttpEngine, HttpEngineSettings, ServerKey, ServerSettings, TlsTrust, WhenLost,
};
use llmctl_engine::{EngineClient, RemoteEngineFacts};
use llmctl_hub::Resolved;
use llmctl_models::load::TextsAlone;

/// Variable with the API key of remote engines. Not a flag, because every user of the machine can read the command line.
const KEY_VARIABLE: &str = "LLMCTL_ENGINE_KEY";

/// Variable with the API key of `serve`.
const SERVER_KEY_VARIABLE: &str = "LLMCTL_API_KEY";

/// Opens a model whose engine is elsewhere.
///
/// # Errors
/// Those of [`open`] and [`connect`].
pub fn load(args: &ModelArgs, asked: EngineOptions, terminal: &Terminal) -> Result<Loaded, CommandError> {
    let (texts, settings) = open(args, asked, terminal)?;
    let engine = connect(settings)?;
    report(&engine, terminal);
    Ok(joined(texts, engine))
}

/// Opens a model, whose files are found already, at a server of this user.
///
/// # Errors
/// As [`load`].
pub fn load_connected(
    args: &ModelArgs,
    resolved: &Resolved,
    asked: EngineOptions,
    terminal: &Terminal,
) -> Result<Loaded, CommandError> {
    check(args, asked, terminal)?;
    let (texts, settings) = prepared(args, resolved, asked)?;
    Ok(joined(texts, connect(settings)?))
}

/// Joins the texts with a connected engine, whose limits are in force.
pub fn joined(mut texts: PreparedTexts, engine: EngineClient) -> Loaded {
    set_limits(&mut texts, &engine);
    let compiler = engine.spec().grammar_compiler(Arc::clone(texts.chat_tokenizer.tokenizer()));
    Loaded { texts, engine, compiler }
}

/// Writes the limits of the engine into the facts about the model.
pub fn set_limits(texts: &mut PreparedTexts, engine: &EngineClient) {
    let context_tokens = engine.spec().context_length();
    texts.chat_tokenizer.set_context_tokens(context_tokens);
    texts.chat_tokenizer.set_build(&engine.spec().config.build);
    texts.chat_tokenizer.set_vision(&engine.spec().model.architecture, engine.spec().vision.as_ref());
    texts.info.context_tokens = context_tokens;
    texts.info.vocab_size = engine.spec().vocab_size();
}

/// Reads the texts of the model, and returns what a connection to its engines needs.
///
/// # Errors
/// A usage error for a flag that no remote engine can honour; those of the model's files.
pub fn open(
    args: &ModelArgs,
    asked: EngineOptions,
    terminal: &Terminal,
) -> Result<(PreparedTexts, HttpEngineSettings), CommandError> {
    check(args, asked, terminal)?;
    prepared(args, &resolve(args, terminal)?, asked)
}

fn prepared(
    args: &ModelArgs,
    resolved: &Resolved,
    asked: EngineOptions,
) -> Result<(PreparedTexts, HttpEngineSettings), CommandError> {
    let start = Instant::now();
    let text = TextFlags::new(args)?;
    let TextsAlone { texts, architecture, vocab_size, context_length } = TextsAlone::open(&resolved.source)?;
    let context_tokens = args.ctx.or(context_length).unwrap_or_default();
    let mut prepared = text.apply(resolved, texts, context_tokens)?;
    prepared.info.vocab_size = vocab_size;
    prepared.info.load_time = start.elapsed();
    prepared.why_blind =
        "--engine and --connect send tokens, and no images: load the model here, or use --endpoint";
    let Sharing { max_running, max_waiting, max_sessions, .. } = asked.sharing;
    let settings = HttpEngineSettings {
        urls: args.remote.engine.clone(),
        connection: ServerSettings { key: key(args)?, trust: TlsTrust(ca_file()) },
        model: name_there(args, resolved),
        architecture,
        tokenizer: Arc::clone(prepared.chat_tokenizer.tokenizer()),
        vocab_size,
        context_tokens: args.ctx,
        most_context_tokens: context_length,
        ends: prepared.chat_tokenizer.texts().end_of_generation.clone(),
        max_running,
        max_waiting,
        max_sessions,
        salts_cache: args.remote.engine_cache_salt,
        when_lost: WhenLost::Stay,
    };
    Ok((prepared, settings))
}

/// Returns the name of the model at the engine, as far as it is known.
fn name_there(args: &ModelArgs, resolved: &Resolved) -> String {
    let known = args.remote.connected_model.clone().or_else(|| args.model.clone());
    known.unwrap_or_else(|| resolved.name.clone())
}

/// Returns the key for remote engines, or for a server of this user.
fn key(args: &ModelArgs) -> Result<Option<ServerKey>, CommandError> {
    let variable = args.remote.connected_model.as_ref().map_or(KEY_VARIABLE, |_| SERVER_KEY_VARIABLE);
    let text = std::env::var(variable).unwrap_or_default();
    let key = (!text.is_empty()).then(|| ServerKey::new(&text)).transpose();
    key.map_err(|why| CommandError::usage(format!("{variable} {why}")))
}

/// Connects to the engines.
///
/// # Errors
/// Those of [`HttpEngine::connect`].
pub fn connect(settings: HttpEngineSettings) -> Result<EngineClient, CommandError> {
    let engine = HttpEngine::connect(settings).map_err(|error| match error {
        Error::InvalidParameter { name: "context_length", message } => {
            CommandError::usage(format!("--ctx: the remote engine's context: {message}"))
        }
        other => other.into(),
    })?;
    Ok(EngineClient::new(engine))
}

/// Names the engines that answer, and the promises that do not hold there.
pub fn report(engine: &EngineClient, terminal: &Terminal) {
    let Some(RemoteEngineFacts { engines, unreachable }) = engine.remote() else { return };
    terminal.note(format!(
        "answers come from {}: neither the same bits each time nor KV on this disk is promised there",
        engines.join(", ")
    ));
    for reason in unreachable {
        terminal.warn(format!("{reason}; it is asked again later"));
    }
}

/// Refuses flags that choose how this machine computes, where they would change answers.
fn check(args: &ModelArgs, asked: EngineOptions, terminal: &Terminal) -> Result<(), CommandError> {
    let connection = args.remote.connected_model.as_ref().map_or("--engine", |_| "--connect");
    let changing = [
        (args.dtype.is_some(), "--dtype"),
        (args.quantize.is_some(), "--quantize"),
        (args.kv_type.is_some(), "--kv-type"),
        (args.draft_model.is_some(), "--draft-model"),
        (args.images.mmproj.is_some(), "--mmproj"),
        (args.images.image_tokens.is_some(), "--image-tokens"),
        (!args.lora.is_empty(), "--lora"),
        (!asked.warm_resume, "--no-warm-resume"),
    ];
    if let Some((_, flag)) = changing.iter().find(|(is_given, _)| *is_given) {
        let message = format!("{flag}: the remote engine of {connection} decides that");
        return Err(CommandError::usage(message).hint("set it where that engine is started"));
    }
    let harmless = [
        (args.threads.is_some(), "--threads"),
        (args.threads_batch.is_some(), "--threads-batch"),
        (args.cpu.is_some(), "--cpu"),
        (args.device.is_some(), "--device"),
        (asked.kv_memory.is_some(), "--kv-memory"),
        (asked.kv_disk.is_some(), "--kv-disk"),
        (asked.packed_disk.is_some_and(|bytes| bytes > 0), "--packed-disk"),
    ];
    let without_effect: Vec<&str> =
        harmless.into_iter().filter(|(is_given, _)| *is_given).map(|(_, flag)| flag).collect();
    if !without_effect.is_empty() {
        terminal.note(format!("with {connection}, these have no effect: {}", without_effect.join(", ")));
    }
    Ok(())
}
