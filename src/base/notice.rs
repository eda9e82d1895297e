//! Notices for the user about a model, a session or the engine, as data.
//!
//! Every notice is worded here, by thiserror, although none is ever an error. Each frontend shows it in its
//! way: a line on stderr, a log entry, a line in chat.

use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::units;

/// A fact that the user should know and that stops nothing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Notice {
    #[error("{name} is an alias of {target}")]
    Alias { name: String, target: String },
    #[error("{repo} is now {name} on the hub; it stays {repo} in the cache")]
    Renamed { repo: String, name: String },
    /// Several models of one repository, of which the user named none.
    #[error(
        "{repo} {} {}; using {chosen}{reason}", if *.is_cached { "is cached as" } else { "has" }, shortened(.names)
    )]
    FileChoice { repo: String, is_cached: bool, names: Vec<String>, chosen: String, reason: ChoiceReason },
    /// Parts of a model in ollama's store beside its weights.
    #[error("of {model} only the weights are used, not ollama's {}", .kinds.join(", "))]
    UnusedLayers { model: String, kinds: Vec<String> },
    #[error(
        "the model has more chat templates ({}); {}", .names.join(", "),
        if *.has_default { "the default one is used" } else { "none is marked as the default" }
    )]
    UnusedChatTemplates { names: Vec<String>, has_default: bool },
    #[error(
        "the model's files do not say how its vectors are pooled: by the mean of all tokens (--pooling chooses)"
    )]
    AssumedPooling,
    #[error("the tokenizer has {num_tokens} tokens, but the model has only {num_rows} rows for them")]
    TokensWithoutRows { num_tokens: usize, num_rows: usize },
    #[error("the end-of-generation id {0} is ignored: the model has no such token")]
    EndWithoutRow(u32),
    #[error("the file types {} as plain text; read as special", .0.join(", "))]
    MistypedTokens(Vec<String>),
    #[error("images are not read: {family}: {reason}")]
    NoVision { family: String, reason: String },
    #[error("{}: its encoder of audio is not read", .path.display())]
    NoAudio { path: PathBuf },
    #[error("model.safetensors is used, not the shards of model.safetensors.index.json beside it")]
    UnusedShards,
    #[error("context limited to {context} of {most} tokens by {by}")]
    ContextLimited { context: usize, most: usize, by: &'static str },
    #[error(
        "{count} {} in {dtype} instead of {asked}: token tables keep a finer type, rows that are not whole blocks get another \
         type, quantised weights keep theirs",
        if *.count == 1 { "matrix is" } else { "matrices are" }
    )]
    WeightTypes { count: usize, dtype: &'static str, asked: &'static str },
    #[error("KV is kept in f16: only the CPU computes with q8_0, q6_0 and q5_1")]
    KvInHalves,
    #[error(
        "weights in {} take {mebibytes} MiB more in memory than in the file: indices of groups of values become a number for \
         each value",
        .types.join(", ")
    )]
    WidenedTypes { types: Vec<&'static str>, mebibytes: usize },
    /// `rounded` is set if some of them are kept in bf16.
    #[error(
        "{count} matrices in {form} are converted on load and take {} MiB{}", .bytes >> 20,
        if *.rounded {
            " (partly rounded to bf16: --dtype f32 keeps every bit, --quantize q8_0 takes half the memory)"
        } else { ", without loss" }
    )]
    PackedWeights { form: &'static str, count: usize, bytes: u64, rounded: bool },
    #[error(
        "the CUDA kernel {kernel} is not used on this GPU, where candle's operations are slower: {reason}"
    )]
    UnusedKernel { kernel: String, reason: String },
    #[error("the packed weights kept in {} are damaged ({reason}): the model was packed again", .path.display())]
    DamagedPanels { path: PathBuf, reason: String },
    #[error("packed weights cannot be kept in {}: {reason} (--packed-disk 0 keeps none)", .path.display())]
    PanelsNotKept { path: PathBuf, reason: String },
    /// `prompts` describes how candle-transformers computes prompts of the family.
    #[error(
        "{name} is not a native family of llmctl and runs through candle-transformers: slower, in f32, one sequence at a \
         time, {prompts}; sessions only grow (no rewinding, no forks, no sharing) and their KV is not saved on disk; candle \
         chooses its instruction set (--cpu has no effect)"
    )]
    CandleFamily { name: &'static str, prompts: &'static str },
    #[error(
        "the context is {window} tokens instead of {context}: candle-transformers does not apply this family's sliding window"
    )]
    NoSlidingWindow { window: usize, context: usize },
    #[error("candle-transformers approximates the GELU of falcon models, so their logits differ slightly")]
    ApproximateGelu,
    #[error(
        "the chat template shows no {}: tools are described in the system prompt, and calls asked for in a generic JSON format",
        if *.shows_tools { "format of calls that is known" } else { "tools" }
    )]
    GenericTools { shows_tools: bool },
    #[error(
        "the chat template {} system prompts: they go in front of the first question",
        if *.is_refused { "refuses" } else { "drops" }
    )]
    FoldedSystem { is_refused: bool },
    #[error(
        "{count} system {} put into the user turn beside: the chat template takes {}",
        if *.count == 1 { "message is" } else { "messages are" },
        if *.takes_none { "none" } else { "one at the start only" }
    )]
    MovedSystem { count: usize, takes_none: bool },
    #[error(
        "{count} {} {}",
        if *.count == 1 { "image" } else { "images" },
        if *.is_shown { "of tool results moved to the user turn behind: the chat template prints none in results" }
        else { "left out: this model reads text alone" }
    )]
    MovedImages { count: usize, is_shown: bool },
    #[error(
        "session {session}: a turn was being saved when llmctl was interrupted; its {num_bytes} bytes were dropped"
    )]
    TornTurn { session: String, num_bytes: usize },
    #[error("session {session}: the end of the last line was missing and was restored")]
    LineEndRestored { session: String },
    /// Turns that another model answered. With `is_same_name`, it has other weights, another tokenizer or template.
    #[error(
        "{} with {model}{}; the text is kept, the cache cannot be used for it", answered(*.num_foreign, *.num_turns),
        if *.is_same_name { " when it had other weights, another tokenizer or template" } else { "" }
    )]
    ForeignTurns { model: String, num_foreign: usize, num_turns: usize, is_same_name: bool },
    #[error("no KV is kept on disk: {limit_bytes} bytes are less than a page of this model, {page_bytes}")]
    KvLimitBelowPage { limit_bytes: u64, page_bytes: usize },
    #[error("saving of KV pages is off: {0}")]
    KvSavingOff(String),
    #[error(
        "{count} KV pages that several sessions begin with were removed from disk: all others are gone, and the limit is \
         {limit_bytes} bytes"
    )]
    KvSharedPagesRemoved { count: usize, limit_bytes: u64 },
    #[error("a KV page is not saved: {0}")]
    KvPageNotSaved(String),
    #[error("a KV page from disk cannot be used: {0}")]
    KvPageUnusable(String),
    #[error("{count} KV pages on disk cannot be used and are recomputed: {reason}")]
    KvPagesRecomputed { count: usize, reason: String },
    #[error("{drafter} failed and drafts nothing more: {reason}")]
    DrafterFailed { drafter: &'static str, reason: String },
    #[error(
        "the draft model takes {draft:.1?} for a token and the model {own:.1?}: its drafts cannot pay, so there are \
         none (a draft model that pays is several times faster)"
    )]
    DraftModelTooSlow { draft: Duration, own: Duration },
    #[error(
        "the file's blocks that predict further tokens are not used: those of {architecture} are not supported"
    )]
    UnusedPrediction { architecture: &'static str },
    #[error("{path} is not enforced: the grammar of this model's calls cannot express it")]
    Unenforced { path: String },
    /// A notice of an engine in another process, which sends it in words.
    #[error("{0}")]
    Remote(String),
}

/// Reason for choosing a file. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ChoiceReason {
    /// It is the usual choice.
    #[error("")]
    Preferred,
    /// The usual choice does not fit the machine's memory.
    #[error(
        " ({}), because {wanted} ({}) does not fit this machine's memory ({})",
        units::bytes(*.chosen_bytes), units::bytes(*.bytes), units::bytes(*.memory)
    )]
    Smaller { wanted: String, bytes: u64, chosen_bytes: u64, memory: u64 },
    /// It is the smallest one.
    #[error(
        " ({}), the smallest, although it does not fit this machine's memory ({})",
        units::bytes(*.chosen_bytes), units::bytes(*.memory)
    )]
    NoneFits { chosen_bytes: u64, memory: u64 },
}

/// Lists the first names, and the number of the others.
fn shortened(names: &[String]) -> String {
    const SHOWN: usize = 8;
    match names.len().checked_sub(SHOWN + 1) {
        None => names.join(", "),
        Some(more) => format!("{} and {} others", names[..SHOWN].join(", "), more + 1),
    }
}

fn answered(num_foreign: usize, num_turns: usize) -> String {
    match num_foreign {
        all if all == num_turns => "this session was started".to_owned(),
        some => format!("{some} of {num_turns} turns were answered"),
    }
}
