//! A served model that computes vectors or scores of texts: the server's only one, or one beside it.

use super::{ModelTask, ServeArgs, ServedEmbedder, settings};
use crate::cli::args::ModelArgs;
use crate::cli::error::CommandError;
use crate::cli::load;
use crate::cli::load::embedder::{
    embedder_texts, is_embedder, is_reranker_by_name, load_embedder, load_resolved,
};
use crate::cli::models;
use crate::cli::places::Places;
use crate::cli::terminal::Terminal;
use crate::runtime::EngineClient;
use crate::runtime::embed::{EmbedClient, EmbedKind, NoEngine};
use crate::runtime::load::AskedTask;
use crate::runtime::load::hub::Resolved;
use crate::runtime::session::store::SessionStore;
use crate::serve::App;
use crate::serve::engine::EngineSlot;
use crate::serve::observe::Observer;

/// Returns the files of `--model` if it is for embeddings or scores: its files say so, or `--task` does.
pub fn files(args: &ServeArgs, terminal: &Terminal) -> Result<Option<Resolved>, CommandError> {
    let model = &args.model;
    let is_asked = matches!(args.embedding.task, Some(ModelTask::Embed | ModelTask::Rerank));
    let Some(reference) = &model.model else {
        return match is_asked {
            true => Err(CommandError::usage("--task needs --model: the built-in one only writes text")),
            false => Ok(None),
        };
    };
    if args.embedding.task == Some(ModelTask::Chat) || !model.remote.engine.is_empty() {
        return Ok(None);
    }
    let resolved = match models::look_up(reference, &Places::from_environment(), &model.aliases) {
        Ok(resolved) => resolved,
        Err(_) => load::resolve(model, terminal)?,
    };
    Ok((is_asked || is_embedder(&resolved) || is_reranker_by_name(&resolved)).then_some(resolved))
}

/// Creates the state of a server whose only model computes vectors or scores.
pub fn alone(
    args: &ServeArgs,
    resolved: &Resolved,
    store: Option<SessionStore>,
    observer: Observer,
    terminal: &Terminal,
) -> Result<App, CommandError> {
    if args.isolation.num_workers()?.is_some() {
        let message = "--isolate and --workers are for models that write text";
        return Err(CommandError::usage(message));
    }
    if args.embedding.embedding_model.is_some() {
        return Err(CommandError::usage("--embedding-model is for a --model that writes text"));
    }
    let by_name = is_reranker_by_name(resolved) && args.embedding.task.is_none();
    let asked = (by_name || args.embedding.task == Some(ModelTask::Rerank)).then_some(AskedTask::Rerank);
    let client = load_resolved(resolved, &args.model, asked, terminal)?;
    report(&client, terminal);
    let model = embedder_texts(resolved, client.texts())?.into_served(args.listen.model_id.clone());
    let engine = EngineClient::new(NoEngine::new(client.texts())?);
    let served = ServedEmbedder { id: model.id.clone(), client };
    Ok(App::new(model, EngineSlot::new(engine), store, observer, settings(args)).with_embedder(served))
}

/// Loads `--embedding-model`; `None` without one.
pub fn beside(args: &ServeArgs, terminal: &Terminal) -> Result<Option<ServedEmbedder>, CommandError> {
    let Some(reference) = &args.embedding.embedding_model else { return Ok(None) };
    let model = ModelArgs {
        model: Some(reference.clone()),
        threads: args.model.threads,
        threads_batch: args.model.threads_batch,
        cpu: args.model.cpu,
        fetch: args.model.fetch.clone(),
        aliases: args.model.aliases.clone(),
        ..ModelArgs::default()
    };
    let client = load_embedder(&model, None, terminal)?;
    report(&client, terminal);
    Ok(Some(ServedEmbedder { id: client.texts().name.clone(), client }))
}

fn report(client: &EmbedClient, terminal: &Terminal) {
    let texts = client.texts();
    let what = match texts.kind {
        EmbedKind::Vectors(width) => format!("embeddings of {width} values at /v1/embeddings"),
        EmbedKind::Scores => "scores of pairs at /v1/rerank".to_owned(),
    };
    terminal.note(format!("{}: {what}, at most {} tokens a text", texts.name, texts.spec.context_length));
}
