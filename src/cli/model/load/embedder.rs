//! From flags to a running embedder.

use std::sync::Arc;

use super::{LoadBar, PreparedTexts, check_machine, options, resolve};
use crate::cli::error::CommandError;
use crate::cli::flags::args::{EngineArgs, ModelArgs};
use crate::cli::model::models;
use crate::cli::places::Places;
use crate::cli::terminal::Terminal;
use llmctl_engine::embed::{EmbedClient, EmbedTexts};
use llmctl_hub::Resolved;
use llmctl_models::load;
use llmctl_models::load::{AskedTask, ChatTemplates, ModelFiles};

/// Resolves the reference, loads the model and starts its thread. Notices and progress go to the terminal.
///
/// # Errors
/// As for other models; [`load::load_embedder`]'s for one without a task for texts.
pub fn load_embedder(
    args: &ModelArgs,
    asked: Option<AskedTask>,
    terminal: &Terminal,
) -> Result<EmbedClient, CommandError> {
    check_machine(args)?;
    let resolved = resolve(args, terminal)?;
    load_resolved(&resolved, args, asked, terminal)
}

/// Loads an embedder as [`load_embedder`] does, from these files.
///
/// # Errors
/// Those of [`load_embedder`].
pub fn load_resolved(
    resolved: &Resolved,
    args: &ModelArgs,
    asked: Option<AskedTask>,
    terminal: &Terminal,
) -> Result<EmbedClient, CommandError> {
    let options = options(args, EngineArgs::default().resolve(false), terminal)?;
    let bar = LoadBar::new(terminal, &resolved.name);
    let loaded = load::load_embedder(resolved, asked, &options, &mut |done, total| bar.show(done, total));
    bar.clear();
    let loaded = loaded?;
    models::record_use(resolved, &Places::from_environment());
    loaded.notices.iter().for_each(|notice| terminal.note(notice));
    Ok(EmbedClient::spawn(loaded)?)
}

/// Returns whether a model's files say that it computes vectors or scores. A file that cannot be read is reported where it is
/// loaded.
pub fn is_embedder(resolved: &Resolved) -> bool {
    let task = ModelFiles::open(&resolved.source).and_then(|files| load::embedder::text_task(&files));
    matches!(task, Ok(Some(_)))
}

/// Returns whether a decoder is a reranker by its name: the files of Qwen3-Reranker are those of a model that writes text.
pub fn is_reranker_by_name(resolved: &Resolved) -> bool {
    resolved.name.to_lowercase().contains("qwen3-reranker")
}

/// Returns the text side of an embedder for the endpoints that every served model has. It has no chat template.
///
/// # Errors
/// Those of [`load::load_texts_with`].
pub fn embedder_texts(resolved: &Resolved, texts: &EmbedTexts) -> Result<PreparedTexts, CommandError> {
    let files = ModelFiles::open(&resolved.source)?;
    let mut side = load::load_texts_with(&files, Arc::clone(texts.tokenizer()))?;
    side.chat_templates = ChatTemplates::default();
    Ok(PreparedTexts::new(resolved, side, None, texts.spec.context_length))
}
