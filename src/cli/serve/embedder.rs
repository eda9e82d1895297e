//! A served model that computes vectors or scores of texts: the server's only one, or one beside it.

use super::{EmbeddingArgs, ModelTask, ServeArgs, ServedEmbedder, settings};
use crate::cli::error::CommandError;
use crate::cli::flags::args::ModelArgs;
use crate::cli::model::load::embedder::{embedder_texts, is_embedder, is_reranker_by_name, load_resolved};
use crate::cli::model::{load, models};
use crate::cli::places::Places;
use crate::cli::terminal::Terminal;
use llmctl_base::GivenSampling;
use llmctl_engine::EngineClient;
use llmctl_engine::embed::{EmbedClient, EmbedKind, no_engine};
use llmctl_hub::Resolved;
use llmctl_models::load::{AskedTask, Pooling};
use llmctl_serve::engines::engine::EngineSlot;
use llmctl_serve::shared::ServerShared;
use llmctl_serve::{App, ServedModel};

/// Flags that have no meaning with a model that writes no text.
pub const WITHOUT_MEANING: &str = "\
    draft_model chat_template bos_id eos_id mmproj no_mmproj image_tokens lora kv_type no_warm_resume kv_memory kv_disk speculate parallel \
    max_waiting max_sessions session_ttl session_wait share_sessions warm refuse_special_tokens strict_limits loop_guard \
    schema_open no_think think tool_format reasoning_format mcp_config tool_timeout";

/// Returns the files of `--model` if it is for embeddings or scores: its files say so, or flags do.
pub fn files(args: &ServeArgs, terminal: &Terminal) -> Result<Option<Resolved>, CommandError> {
    let (model, EmbeddingArgs { task, pooling, embedding_model, .. }) = (&args.model, &args.embedding);
    let flag = match (task, pooling) {
        (Some(ModelTask::Embed), _) => Some("--task embed"),
        (Some(ModelTask::Rerank), _) => Some("--task rerank"),
        (None, Some(_)) if embedding_model.is_none() => Some("--pooling"),
        _ => None,
    };
    let Some(reference) = &model.model else {
        return match flag {
            Some(flag) => {
                Err(CommandError::usage(format!("{flag} needs --model: the built-in one only writes text")))
            }
            None => Ok(None),
        };
    };
    match flag {
        Some(flag) if !model.remote.engine.is_empty() => {
            let message = format!("--engine is for models that write text, not for {flag}");
            return Err(CommandError::usage(message));
        }
        None if *task == Some(ModelTask::Chat) || !model.remote.engine.is_empty() => return Ok(None),
        _ => {}
    }
    let resolved = match models::look_up(reference, &Places::from_environment(), &model.aliases) {
        Ok(resolved) => resolved,
        Err(_) => load::resolve(model, terminal)?,
    };
    let is_for_texts = flag.is_some() || is_embedder(&resolved) || is_reranker_by_name(&resolved);
    Ok(is_for_texts.then_some(resolved))
}

/// Returns the task that flags ask for, or the name of the model.
fn asked(
    resolved: &Resolved,
    task: Option<ModelTask>,
    pooling: Option<Pooling>,
) -> Result<Option<AskedTask>, CommandError> {
    Ok(match (task, pooling) {
        (Some(ModelTask::Rerank), Some(_)) => {
            return Err(CommandError::usage("--pooling is for embeddings, not for --task rerank"));
        }
        (_, Some(pooling)) => Some(AskedTask::Pooling(pooling)),
        (Some(ModelTask::Rerank), None) => Some(AskedTask::Rerank),
        (Some(ModelTask::Embed), None) => Some(AskedTask::Embed),
        (Some(ModelTask::Chat) | None, None) => is_reranker_by_name(resolved).then_some(AskedTask::Rerank),
    })
}

/// Refuses flags that say how text is written.
fn check_flags(args: &ServeArgs) -> Result<(), CommandError> {
    if let Some(id) = args.embedding.beside.first() {
        let flag = id.replace('_', "-");
        return Err(CommandError::usage(format!("--{flag} is for models that write text")));
    }
    if args.isolation.num_workers()?.is_some() {
        let message = "--isolate and --workers are for models that write text";
        return Err(CommandError::usage(message));
    }
    if args.embedding.embedding_model.is_some() {
        return Err(CommandError::usage("--embedding-model is for a --model that writes text"));
    }
    Ok(())
}

/// Creates the state of a server whose only model computes vectors or scores.
pub fn alone(
    args: &ServeArgs,
    resolved: &Resolved,
    shared: ServerShared,
    terminal: &Terminal,
) -> Result<App, CommandError> {
    check_flags(args)?;
    let asked = asked(resolved, args.embedding.task, args.embedding.pooling)?;
    let client = load_resolved(resolved, &args.model, asked, terminal)?;
    report(&client, terminal);
    let model = embedder_texts(resolved, client.texts())?
        .into_served(args.listen.model_id.clone(), GivenSampling::default());
    let engine = EngineSlot::new(EngineClient::new(no_engine(client.texts())?));
    let served = ServedEmbedder::new(model.id.clone(), client, true);
    Ok(App::with_embedder(shared, model, engine, settings(args), Some(served)))
}

/// Loads `--embedding-model`; `None` without one.
pub fn beside(args: &ServeArgs, terminal: &Terminal) -> Result<Option<ServedEmbedder>, CommandError> {
    let Some(reference) = &args.embedding.embedding_model else {
        return match args.embedding.pooling {
            Some(_) => Err(CommandError::usage("--pooling is for models that compute embeddings")),
            None => Ok(None),
        };
    };
    let model = ModelArgs {
        model: Some(reference.clone()),
        threads: args.model.threads,
        threads_batch: args.model.threads_batch,
        cpu: args.model.cpu,
        fetch: args.model.fetch.clone(),
        aliases: args.model.aliases.clone(),
        ..ModelArgs::default()
    };
    let resolved = load::resolve(&model, terminal)?;
    let asked = asked(&resolved, None, args.embedding.pooling)?;
    let client = load_resolved(&resolved, &model, asked, terminal)?;
    report(&client, terminal);
    Ok(Some(ServedEmbedder::new(client.texts().name.clone(), client, false)))
}

/// Refuses two models of one name, which requests could not tell apart.
pub fn check_id(model: &ServedModel, beside: Option<&ServedEmbedder>) -> Result<(), CommandError> {
    match beside {
        Some(served) if served.id == model.id => {
            let message = format!("--model and --embedding-model are both called {:?}", model.id);
            Err(CommandError::usage(message).hint("--model-id gives --model another name"))
        }
        _ => Ok(()),
    }
}

fn report(client: &EmbedClient, terminal: &Terminal) {
    let texts = client.texts();
    let what = match texts.kind {
        EmbedKind::Vectors(width) => format!("embeddings of {width} values at /v1/embeddings"),
        EmbedKind::Scores => "scores of pairs at /v1/rerank".to_owned(),
    };
    terminal.note(format!("{}: {what}, at most {} tokens a text", texts.name, texts.spec.context_length));
}
