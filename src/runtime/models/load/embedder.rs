//! Loads a model that reads texts whole: an encoder, or a decoder whose hidden states are wanted.

use std::sync::Arc;

use super::files::ModelFiles;
use super::text_task::{
    AskedTask, Prompts, TextTask, TextTaskFacts, assumed_task, folder_scores, folder_task, gguf_task,
    yes_no_task,
};
use super::{
    Device, LoadOptions, backend, candle, most_heads, quantize, scratch_bytes, target, weight_bytes,
};
use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::memory::Demand;
use crate::model::arch::Description;
use crate::model::decoder::{Decoder, DecoderParts, Matrix, TextDecoder};
use crate::model::encoder::{Encoder, EncoderConfig, EncoderParts, parse_encoder};
use crate::model::recognise::is_bidirectional;
use crate::model::text_head::{EmbeddingHead, Pooling, fit_together};
use crate::model::{TEXT_STEP_TOKENS, TextModel, arch};
use crate::tensor::HostTensor;
use crate::text::Tokenizer;
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_base::notice::Notice;
use llmctl_hub::Resolved;

/// A model that reads texts, and the way from its hidden states to results.
pub struct LoadedEmbedder {
    /// Name of the model for the user.
    pub name: String,
    pub model: Box<dyn TextModel>,
    pub tokenizer: Arc<Tokenizer>,
    pub task: TextTask,
    pub prompts: Prompts,
    /// True if pairs are put into a decoder's dialogue; else they are one text of two parts.
    pub asks_yes_or_no: bool,
    /// Notices for the user that are not errors, one sentence each.
    pub notices: Vec<Notice>,
}

/// The network of a model's files.
enum Network {
    Encoder(Box<EncoderConfig>),
    Decoder { description: Box<Description>, is_bidirectional: bool },
}

impl Network {
    fn of(files: &ModelFiles) -> LoadResult<Option<Self>> {
        let reader = files.config_reader();
        if let Some(config) = parse_encoder(reader)? {
            return Ok(Some(Network::Encoder(Box::new(config))));
        }
        let is_bidirectional = is_bidirectional(reader);
        let description = arch::parse_config(reader)?.map(Box::new);
        Ok(description.map(|description| Network::Decoder { description, is_bidirectional }))
    }

    fn is_encoder(&self) -> bool {
        matches!(self, Network::Encoder(_))
    }

    /// Returns why it cannot read texts without KV; `None` if it can.
    fn refusal(&self) -> Option<&'static str> {
        match self {
            Network::Encoder(_) => None,
            Network::Decoder { description, .. } => TextDecoder::<Cpu>::refusal(&description.config),
        }
    }

    fn hidden_size(&self) -> usize {
        self.sizes()[0]
    }

    fn num_heads(&self) -> usize {
        match self {
            Network::Encoder(config) => config.num_heads,
            Network::Decoder { description, .. } => most_heads(&description.config),
        }
    }

    /// Returns the hidden size, the width of the widest feed-forward part, and the number of positions.
    fn sizes(&self) -> [usize; 3] {
        match self {
            Network::Encoder(config) => [config.hidden_size, config.intermediate_size, config.context_length],
            Network::Decoder { description, .. } => {
                let config = &description.config;
                let widths = config.layers.iter().map(|layer| layer.feed_forward.width());
                [config.hidden_size, widths.max().unwrap_or(0), config.context_length]
            }
        }
    }
}

/// Returns the task of a model for texts, by its files alone; `None` if they name none and it is no encoder.
///
/// # Errors
/// Those of [`load_embedder`] that concern headers and settings.
pub fn text_task(files: &ModelFiles) -> LoadResult<Option<TextTaskFacts>> {
    let Some(network) = Network::of(files)? else { return Ok(None) };
    files_task(files, &network)
}

/// Describes the task of a model for texts to people; `None` if it has none.
pub fn describe(files: &ModelFiles) -> Option<String> {
    let network = Network::of(files).ok()??;
    let facts = files_task(files, &network).ok()??;
    Some(match facts.task {
        TextTask::Scores(_) => "scores of pairs of texts".to_owned(),
        TextTask::Embedding(head) => {
            let width = head.width(network.hidden_size());
            format!("embeddings of {width} values ({} pooling)", head.pooling.name())
        }
    })
}

fn files_task(files: &ModelFiles, network: &Network) -> LoadResult<Option<TextTaskFacts>> {
    let hidden = network.hidden_size();
    let facts = match (files.folder(), network) {
        (None, _) => gguf_task(files, hidden)?,
        (Some(folder), Network::Decoder { .. }) => folder_task(folder)?,
        (Some(folder), Network::Encoder(config)) => match folder_task(folder)? {
            Some(facts) => Some(facts),
            None => {
                let prefix = config.names.prefix_in(files.tensors()).unwrap_or_default();
                folder_scores(files, prefix, hidden)?
            }
        },
    };
    if let Some(TextTaskFacts { task: TextTask::Embedding(head), .. }) = &facts
        && !fit_together(&head.dense, hidden)
    {
        let message = format!("dense layers that do not fit behind hidden states of {hidden} values");
        return Err(files.config_reader().unsupported(message));
    }
    Ok(facts.or_else(|| network.is_encoder().then(assumed_task)))
}

/// Returns the task that is asked for, given the task by the files; `None` if they name none and none is asked for.
fn task_asked_for(
    asked: Option<AskedTask>,
    by_files: Option<TextTaskFacts>,
    files: &ModelFiles,
    network: &Network,
    tokenizer: &Tokenizer,
) -> LoadResult<Option<TextTaskFacts>> {
    let scores = |facts: &TextTaskFacts| matches!(facts.task, TextTask::Scores(_));
    let refuse = |what: &str| Err(files.config_reader().unsupported(what));
    match (asked, by_files, network) {
        (Some(AskedTask::Pooling(pooling)), by_files, _) => {
            Ok(Some(pooled_by(pooling, by_files.unwrap_or_else(assumed_task))))
        }
        (Some(AskedTask::Embed), Some(facts), _) if scores(&facts) => {
            refuse("--task embed: the model scores pairs of texts and computes no embeddings")
        }
        (Some(AskedTask::Rerank), Some(facts), _) if scores(&facts) => Ok(Some(facts)),
        (Some(AskedTask::Rerank), _, Network::Encoder(_)) => {
            refuse("--task rerank: the encoder has no classification head")
        }
        (Some(AskedTask::Rerank), _, Network::Decoder { description, .. }) => {
            yes_no_task(files.tensors(), description, yes_no_ids(tokenizer)?).map(Some)
        }
        (None | Some(AskedTask::Embed), by_files, _) => Ok(by_files),
    }
}

fn pooled_by(pooling: Pooling, facts: TextTaskFacts) -> TextTaskFacts {
    let (dense, is_normalized) = match &facts.task {
        TextTask::Embedding(head) => (head.dense.clone(), head.is_normalized),
        TextTask::Scores(_) => (Vec::new(), true),
    };
    let task = TextTask::Embedding(EmbeddingHead { pooling, dense, is_normalized });
    TextTaskFacts { task, is_assumed: false, ..facts }
}

fn yes_no_ids(tokenizer: &Tokenizer) -> LoadResult<[u32; 2]> {
    let id = |word: &str| {
        let missing = || LoadError::Tokenizer(format!("has no token {word:?} to score pairs by"));
        tokenizer.token_to_id(word).ok_or_else(missing)
    };
    Ok([id("yes")?, id("no")?])
}

/// Loads a model for texts. `progress` is called with the number of loaded layers and their total.
///
/// # Errors
/// [`LoadError::Unsupported`] if the model has no task for texts, or another than `asked`; [`LoadError::TooBig`] before any
/// weight is read if it does not fit; otherwise [`LoadError`] naming the file, and the tensor or key at fault.
pub fn load_embedder(
    resolved: &Resolved,
    asked: Option<AskedTask>,
    options: &LoadOptions,
    progress: &mut dyn FnMut(usize, usize),
) -> LoadResult<LoadedEmbedder> {
    let files = ModelFiles::open(&resolved.source)?;
    let reader = files.config_reader();
    let architecture = reader.architecture()?;
    let unsupported = |what: &str| reader.unsupported(format!("architecture {architecture}: {what}"));
    let mut network =
        Network::of(&files)?.ok_or_else(|| unsupported("llmctl computes no embeddings with it"))?;
    let by_files = files_task(&files, &network)?;
    let tokenizer = files.tokenizer()?;
    let facts = task_asked_for(asked, by_files, &files, &network, &tokenizer)?.ok_or_else(|| {
        unsupported(
            "its files name no pooling, so it computes no embeddings unless one is chosen (--pooling last)",
        )
    })?;
    if let Some(reason) = network.refusal() {
        return Err(unsupported(reason));
    }
    let mut notices = resolved.notices.clone();
    notices.extend(files.notices()?);
    notices.extend(facts.is_assumed.then_some(Notice::AssumedPooling));
    let context = context(&files, &network, &facts, options, &mut notices)?;
    if let (TextTask::Embedding(_), Network::Decoder { description, .. }) = (&facts.task, &mut network) {
        // Vectors take no output matrix, which files of embedding models leave out whatever they say of ties.
        description.naming.tied = description.naming.tied.filter(|is_tied| *is_tied);
    }
    let asks_yes_or_no = !network.is_encoder();
    let model = match options.device {
        Device::Cpu(cpu) => {
            let cpu = Cpu::with(cpu).map_err(backend)?;
            load_network(&files, network, context, options, cpu, progress)?
        }
        Device::Candle(kind) => {
            let candle = candle(kind, &mut notices)?;
            load_network(&files, network, context, options, candle, progress)?
        }
    };
    Ok(LoadedEmbedder {
        name: resolved.name.clone(),
        model,
        tokenizer: Arc::new(tokenizer),
        task: facts.task,
        prompts: facts.prompts,
        asks_yes_or_no,
        notices,
    })
}

/// Loads the network that reads texts of up to `context_length` tokens.
fn load_network<B: Backend>(
    files: &ModelFiles,
    network: Network,
    context_length: usize,
    options: &LoadOptions,
    backend: B,
    progress: &mut dyn FnMut(usize, usize),
) -> LoadResult<Box<dyn TextModel>> {
    let source = files.tensors();
    let convert = |name: &str, matrix: Matrix, tensor: HostTensor| {
        let wanted = target(options, matrix, tensor.dtype);
        quantize::convert(name, &tensor, wanted)
    };
    let model: Box<dyn TextModel> = match network {
        Network::Encoder(config) => {
            let parts = EncoderParts { config: *config, source, context_length, convert: &convert, progress };
            Box::new(Encoder::load(backend, parts)?)
        }
        Network::Decoder { description, is_bidirectional } => {
            let Description { config, naming, .. } = *description;
            let kv_type = options.kv_type;
            let parts = DecoderParts {
                config,
                naming,
                source,
                context_length,
                kv_type,
                convert: &convert,
                adapters: &[],
                progress,
            };
            Box::new(TextDecoder::new(Decoder::load(backend, parts)?, is_bidirectional))
        }
    };
    Ok(model)
}

/// Returns the limit of tokens per text: the flag's, or that of the training, or the model's positions, as far as a text of that
/// length fits into memory.
fn context(
    files: &ModelFiles,
    network: &Network,
    facts: &TextTaskFacts,
    options: &LoadOptions,
    notices: &mut Vec<Notice>,
) -> LoadResult<usize> {
    let mut weights = 0u64;
    for name in files.tensors().names() {
        let Some((shape, dtype)) = files.tensors().describe(&name) else { continue };
        let dtype = quantize::converted_dtype(&shape, dtype, target(options, Matrix::Projection, dtype));
        let bytes = weight_bytes(options.device, dtype, &shape)
            .map_err(|message| LoadError::Tensor { tensor: name.into_owned(), message })?;
        weights = weights.saturating_add(bytes as u64);
    }
    // A step holds the rows of one long text, or TEXT_STEP_TOKENS rows of several: hidden states of the residual stream,
    // attention and result, and both sides of the feed-forward part, generously.
    let [hidden, inner, positions] = network.sizes();
    let row_bytes = 4 * (8 * hidden as u64 + 2 * inner as u64);
    let scratch = scratch_bytes(network.num_heads(), options.device, positions);
    let fixed = TEXT_STEP_TOKENS as u64 * row_bytes + scratch;
    let demand = Demand { weights, kv_per_token: row_bytes, kv_fixed: 0, fixed };
    let most = match options.context {
        None => facts.max_tokens.map_or(positions, |trained| trained.min(positions)),
        Some(_) => positions,
    };
    super::context(most, |_| Ok(demand), options, notices)
}
