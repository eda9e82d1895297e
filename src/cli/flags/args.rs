//! Flag groups that several subcommands share, and how they become the engine's own types.
//!
//! Owns: names, help texts and the step from "given or not" to a value in force. Everything unset stays
//! `None` until the model's own defaults are known, so that precedence is decided in one place. Loads
//! nothing, reads no file; ranges are checked by the engine's validator, not here, so that every front door
//! has the same ones.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::ops::RangeBounds;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, ValueEnum, value_parser};

use crate::cli::error::CommandError;
use llmctl_base::{Error, GivenSampling, SAMPLING, SamplerStep, SamplingNumber, SamplingParameter, TopK};
use llmctl_engine::http_engine::{EndpointUrl, EngineUrl};
use llmctl_engine::{Limits, LoopGuard, Overflow, Speculation};
use llmctl_hub::Aliases;
use llmctl_models::load::{AdapterFile, Dtype, Isa, KvType, Pooling};

/// Returns the parser of a flag's whole number.
pub fn count(range: impl RangeBounds<u64>) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(range)
}

/// Moves a flag that is among `ids` to the head of the help, in their order. Headings come in the order of their first flags,
/// so the first flag of the subcommand has to be one of them.
pub fn most_used(arg: Arg, ids: &[&str]) -> Arg {
    match ids.iter().position(|id| arg.get_id() == *id) {
        Some(place) => arg.help_heading("Most used").display_order(place),
        None => arg,
    }
}

/// A value of a flag whose type knows nothing of flags: its name, and what the help says of it.
pub type FlagValue<T> = (&'static str, T, &'static str);

/// Returns the parser of a flag that takes one of these values.
pub fn one_of<T: Copy + Send + Sync>(
    choices: &'static [FlagValue<T>],
) -> impl TypedValueParser<Value = T> + use<T> {
    let value = |&(name, _, help): &FlagValue<T>| match help {
        "" => PossibleValue::new(name),
        help => PossibleValue::new(name).help(help),
    };
    PossibleValuesParser::new(choices.iter().map(value)).map(|name| {
        let choice = choices.iter().find(|choice| choice.0 == name);
        choice.expect("clap has compared it").1
    })
}

/// Flags that every subcommand has.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Global options")]
pub struct GlobalArgs {
    /// Use of colours (default: auto)
    ///
    /// `auto` follows the stream (a terminal or not) and NO_COLOR, CLICOLOR, CLICOLOR_FORCE and TERM=dumb.
    #[arg(long, global = true, value_name = "WHEN", value_enum, hide_short_help = true)]
    pub color: Option<ColorWhen>,

    /// Say nothing on stderr but warnings and errors
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    pub quiet: bool,

    /// Say more on stderr; twice for debugging, three times for everything
    ///
    /// LLMCTL_LOG takes a filter instead, e.g. `llmctl::runtime=debug`, and wins.
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,

    /// Read this configuration file instead of the user's
    #[arg(long, global = true, value_name = "FILE", hide_short_help = true)]
    pub config: Option<PathBuf>,

    /// Encrypt saved sessions, their images and their KV with keys in this folder, which is created at first use
    ///
    /// Each session, image and page of KV has a key of its own, which `sessions remove` erases: copies and backups of it cannot be
    /// read then. Keep DIR out of backups, and do not lose it. See docs/sessions.md.
    #[arg(long, global = true, value_name = "DIR", hide_short_help = true)]
    pub encrypt: Option<PathBuf>,

    /// With --encrypt: derive the master key from what this command prints, e.g. one of the system's keyring
    ///
    /// The secret has 16 random bytes or more. Without a command, the master key is a file in DIR.
    #[arg(long, global = true, value_name = "COMMAND", hide_short_help = true)]
    pub encrypt_key_command: Option<String>,
}

/// `--color`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum ColorWhen {
    #[default]
    Auto,
    Always,
    Never,
}

/// Flags that allow or forbid downloading a missing model.
#[derive(Debug, Clone, Default, Args)]
pub struct FetchArgs {
    /// Download a missing model without asking
    #[arg(long, hide_short_help = true)]
    pub yes: bool,

    /// Download nothing: a model that is not here is an error (as with HF_HUB_OFFLINE=1)
    #[arg(long, hide_short_help = true)]
    pub offline: bool,
}

/// Flags that choose the model and how it is held in memory.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Model: a .gguf file, a folder, org/repo[:QUANT][@REVISION] or an alias
    ///
    /// A path that exists wins; repositories are looked up in the Hugging Face cache (HF_HUB_CACHE, HF_HOME), and a missing one is
    /// downloaded, on a terminal after a question. Without any it is
    /// guide, the small model inside llmctl, which knows llmctl and little else.
    #[arg(long, short, value_name = "REF")]
    pub model: Option<String>,

    /// Draft model for speculative decoding, with the vocabulary of --model: a file, a folder, org/repo or an alias
    ///
    /// Its draft tokens are verified by --model. The answer is the same, bit by bit, and comes sooner if the draft model is
    /// much faster and often right. It takes memory of its own, and its cost is measured: when its drafts do not pay, it stops.
    /// --kv-type, --dtype, --quantize and the threads are those of both models. With --speculate off or ngram it is not loaded.
    /// An assistant of Gemma 4 is taken, too: it reads the model's KV.
    #[arg(long, value_name = "REF", hide_short_help = true)]
    pub draft_model: Option<String>,

    /// Type of the weights in memory (default: as they are in the file)
    #[arg(long, value_name = "TYPE", value_parser = one_of(&DTYPES), hide_short_help = true)]
    pub dtype: Option<Dtype>,

    /// Quantise the weights while loading
    #[arg(long, value_name = "TYPE", value_parser = one_of(&QUANTIZED), conflicts_with = "dtype", hide_short_help = true)]
    pub quantize: Option<Dtype>,

    /// Context size in tokens, prompt and answer together, e.g. 4096 or 4k (default: the model's own)
    #[arg(long, value_name = "N", value_parser = parse_context)]
    pub ctx: Option<usize>,

    /// Threads to compute with (default: one for each performance core)
    #[arg(long, value_name = "N", value_parser = count(1..=1024), hide_short_help = true)]
    pub threads: Option<usize>,

    /// Threads for prompts and large batches (default: as --threads)
    ///
    /// Prompts are limited by arithmetic, single tokens by memory: where cores share memory, fewer may do for those.
    #[arg(long, value_name = "N", value_parser = count(1..=1024), hide_short_help = true)]
    pub threads_batch: Option<usize>,

    /// Instruction set of the CPU kernels (default: the best that the processor has)
    ///
    /// All give the same bits, at different speeds: for tests and comparisons. `llmctl doctor` shows what is in use.
    #[arg(long, value_name = "SET", value_parser = one_of(&INSTRUCTION_SETS), hide_short_help = true)]
    pub cpu: Option<Isa>,

    /// Type of the KV cache (default: f16; on the CPU q8_0 takes 53% of that, q6_0 41% and q5_1 36%, with answers further from f16's)
    #[arg(long, value_name = "TYPE", value_parser = one_of(&KV_TYPES), hide_short_help = true)]
    pub kv_type: Option<KvType>,

    /// Device to compute on (default: auto)
    #[arg(long, value_name = "DEVICE", value_parser = one_of(&DEVICES), hide_short_help = true)]
    pub device: Option<DeviceArg>,

    /// Use this Jinja chat template instead of the model's
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub chat_template: Option<PathBuf>,

    /// Begin prompts with this token instead of the model's own; `none` for no token
    #[arg(long, value_name = "ID", hide_short_help = true)]
    pub bos_id: Option<BosId>,

    /// End answers at this token instead of those that the model's files list; may be repeated
    #[arg(long, value_name = "ID", value_delimiter = ',', hide_short_help = true)]
    pub eos_id: Vec<u32>,

    #[command(flatten)]
    pub images: ImageArgs,

    #[command(flatten)]
    pub remote: RemoteArgs,

    /// LoRA adapter to load with the model, a GGUF file or a folder of PEFT, and its factor (repeatable)
    ///
    /// Answers use all adapters that are given, each with its factor (default: 1). FILE=0 loads an adapter for requests that name it:
    /// "lora": [{"id": "NAME", "scale": 1}], or "model": "MODEL:NAME", where NAME is the file's or folder's name without ending. A GGUF
    /// model takes GGUF adapters, a folder takes those of PEFT.
    #[arg(long, value_name = "FILE[=SCALE]", hide_short_help = true)]
    pub lora: Vec<LoraFile>,

    #[command(flatten)]
    pub fetch: FetchArgs,

    /// `--connect`; set after the parse, for subcommands that have it.
    #[arg(skip)]
    pub connects: bool,

    /// Names of models in the configuration files; set after the parse.
    #[arg(skip)]
    pub aliases: Aliases,

    /// A flag or a variable names the model, not a configuration file; filled in after the parse.
    #[arg(skip)]
    pub is_named: bool,
}

/// Flags of the part of a model that reads images.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub struct ImageArgs {
    /// GGUF file with the vision tower of a GGUF model (default: the mmproj file that belongs to it)
    ///
    /// It is found beside the model's file, in its snapshot, or among ollama's layers, and downloaded with the model. A folder in
    /// transformers' form has its tower among its weights.
    #[arg(long, value_name = "FILE", conflicts_with = "no_mmproj", hide_short_help = true)]
    pub mmproj: Option<PathBuf>,

    /// Read no images: neither load nor download the vision tower
    #[arg(long, hide_short_help = true)]
    pub no_mmproj: bool,

    /// Most tokens of an image, or least and most as MIN..MAX, e.g. 256 or 64..1280 (default: the model's own)
    ///
    /// An image that would take more is reduced before the tower sees it: fewer tokens are sooner computed and show less detail.
    /// Models whose images all take the same number of tokens ignore it.
    #[arg(long, value_name = "MAX", hide_short_help = true)]
    pub image_tokens: Option<ImageTokens>,
}

/// `--lora`: an adapter, and the factor of what it adds.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraFile(pub AdapterFile);

impl FromStr for LoraFile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // A file may have "=" in its name.
        let scaled = text.rsplit_once('=').and_then(|(path, scale)| Some((path, scale.parse::<f32>().ok()?)));
        let (path, scale) = scaled.unwrap_or((text, 1.0));
        match !path.is_empty() && scale.is_finite() {
            true => Ok(Self(AdapterFile { path: path.into(), scale })),
            false => Err("neither FILE nor FILE=SCALE".to_owned()),
        }
    }
}

/// `--image-tokens`: least and most tokens of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageTokens(pub [Option<u32>; 2]);

impl FromStr for ImageTokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let count = |text: &str| text.parse().ok().filter(|count| *count > 0);
        let (least, most) = text.split_once("..").map_or((None, text), |(least, most)| (Some(least), most));
        match (least.map(count), count(most)) {
            (None, Some(most)) => Ok(Self([None, Some(most)])),
            (Some(Some(least)), Some(most)) if least <= most => Ok(Self([Some(least), Some(most)])),
            _ => Err("neither a number of tokens nor MIN..MAX".to_owned()),
        }
    }
}

/// Flags of engines elsewhere.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub struct RemoteArgs {
    /// Compute with this vLLM, SGLang or llmctl server instead of here, e.g. http://127.0.0.1:8000; may be repeated
    ///
    /// Token ids go there and come back: template, tools, constraints and sessions stay here, so --model names the model that the
    /// server runs, without its weights (`llmctl pull --texts`). Of several engines a session keeps to one, and goes to another
    /// with a notice if that is lost. LLMCTL_ENGINE_KEY holds the server's API key. docs/remote-engine.md says what a remote engine
    /// cannot promise.
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub engine: Vec<EngineUrl>,

    /// Keep the cache of each session in a remote vLLM apart from all others (cache_salt)
    #[arg(long, hide_short_help = true)]
    pub engine_cache_salt: bool,

    /// The engine is a server of this user, which calls the model so; filled in when it was found.
    #[arg(skip)]
    pub connected_model: Option<String>,
}

/// Flag of a server that runs already.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub struct ConnectArgs {
    /// Compute with a running `llmctl serve` of this user that has the model, instead of loading it again
    ///
    /// The text side and sessions are as without it, and so is every bit of an answer. The server must have the same file with the same
    /// --dtype, --quantize, --kv-type and --device, and the context that --ctx names or the model has. LLMCTL_API_KEY holds its key, if
    /// it has keys. Where there is none, a notice says so and the model is loaded here.
    #[arg(long, conflicts_with_all = ["engine", "endpoint"])]
    pub connect: bool,
}

/// Flags of a server that takes messages.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Endpoint")]
pub struct EndpointArgs {
    /// Ask this server with OpenAI's interface instead of a model here, e.g. https://api.openai.com/v1 or http://127.0.0.1:11434
    ///
    /// Messages go there and text comes back, so --model is the server's name of the model; without it, the only one that the
    /// server lists. Sessions are saved here, as text. Flags that the server cannot honour are refused by name. docs/endpoint.md
    /// says what is not available there. `none` asks a model here, where a configuration file names an endpoint.
    #[arg(long, value_name = "URL")]
    pub endpoint: Option<EndpointArg>,

    /// Name of the variable that holds the endpoint's API key
    ///
    /// No flag takes the key itself, because every user of the machine can read the command line. The key goes to --endpoint's
    /// server only; without --endpoint, a name given on the command line is for the servers of the conversation. It is neither
    /// printed nor saved.
    #[arg(long, value_name = "NAME", alias = "api-key-env", conflicts_with = "endpoint_key_file")]
    pub endpoint_key_env: Option<String>,

    /// File that holds the endpoint's API key
    #[arg(long, value_name = "FILE", alias = "api-key-file")]
    pub endpoint_key_file: Option<PathBuf>,

    /// A flag or a variable names the endpoint, not a configuration file; filled in after the parse.
    #[arg(skip)]
    pub is_named: bool,

    /// The command line says where the key is, neither a variable nor a configuration file; filled in after the parse.
    #[arg(skip)]
    pub is_key_named: bool,

    /// Flags on the command line that have no meaning with an endpoint; filled in after the parse.
    #[arg(skip)]
    pub beside: Vec<&'static str>,
}

impl EndpointArgs {
    /// Returns the address; `None` without one, and for `none`.
    pub fn url(&self) -> Option<&EndpointUrl> {
        self.endpoint.as_ref()?.0.as_ref()
    }
}

/// `--endpoint`: an address, or `none`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointArg(pub Option<EndpointUrl>);

impl FromStr for EndpointArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self(None)),
            url => url.parse().map(|url| Self(Some(url))),
        }
    }
}

/// Parses the `--endpoint` of subcommands that keep its text. A configuration file's value has to fit one of the flags of that
/// name, so all of them refuse what is no address.
///
/// # Errors
/// Why it is no address.
pub fn endpoint_text(text: &str) -> Result<String, String> {
    text.parse::<EndpointUrl>().map(|_| text.to_owned())
}

/// `--bos-id`: a token id, or `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BosId(pub Option<u32>);

impl FromStr for BosId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self(None)),
            id => id.parse().map(|id| Self(Some(id))).map_err(|_| "neither a token id nor `none`".to_owned()),
        }
    }
}

/// `--dtype`.
pub const DTYPES: [FlagValue<Dtype>; 3] =
    [("f32", Dtype::F32, ""), ("bf16", Dtype::Bf16, ""), ("f16", Dtype::F16, "")];

/// `--quantize`.
pub const QUANTIZED: [FlagValue<Dtype>; 4] = [
    ("q8_0", Dtype::Q8_0, ""),
    ("q4_0", Dtype::Q4_0, ""),
    ("q4_k", Dtype::Q4K, ""),
    ("q6_k", Dtype::Q6K, ""),
];

/// `--cpu`.
pub const INSTRUCTION_SETS: [FlagValue<Isa>; 7] = [
    ("scalar", Isa::Scalar, "Plain Rust, as the build targets"),
    ("avx2", Isa::Avx2, "AVX2 with FMA and F16C, and AVX-VNNI where there is"),
    ("avx512", Isa::Avx512, "AVX-512, and its VNNI where there is"),
    ("amx", Isa::Amx, "AVX-512 with VNNI, and AMX tiles for integer products of many rows"),
    ("neon", Isa::Neon, "NEON of 64-bit ARM"),
    ("dotprod", Isa::Dotprod, "NEON with dot products of bytes"),
    ("i8mm", Isa::I8mm, "NEON with dot products and matrix products of bytes"),
];

/// Checks that a processor that has `available` can compute with the instruction set of `--cpu`.
///
/// # Errors
/// A usage error that lists what there is.
pub fn check_isa(isa: Isa, available: &[Isa]) -> Result<(), CommandError> {
    if available.contains(&isa) {
        return Ok(());
    }
    let names: Vec<_> = available.iter().map(|isa| isa.name()).collect();
    let hint = format!("it has {}", names.join(", "));
    Err(CommandError::usage(format!("--cpu (LLMCTL_CPU): this processor has no {}", isa.name())).hint(hint))
}

/// `--pooling`.
pub const POOLINGS: [FlagValue<Pooling>; 4] = [
    ("mean", Pooling::Mean, ""),
    ("cls", Pooling::Cls, ""),
    ("last", Pooling::Last, ""),
    ("max", Pooling::Max, ""),
];

/// `--kv-type`.
pub const KV_TYPES: [FlagValue<KvType>; 5] = [
    ("f32", KvType::F32, ""),
    ("f16", KvType::F16, ""),
    ("q8_0", KvType::Q8_0, ""),
    ("q6_0", KvType::Q6_0, ""),
    ("q5_1", KvType::Q5_1, ""),
];

/// `--device`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceArg {
    #[default]
    Auto,
    Cpu,
    Cuda,
    Metal,
}

pub const DEVICES: [FlagValue<DeviceArg>; 4] = [
    ("auto", DeviceArg::Auto, ""),
    ("cpu", DeviceArg::Cpu, ""),
    ("cuda", DeviceArg::Cuda, ""),
    ("metal", DeviceArg::Metal, ""),
];

/// Flags of the engine; none changes an answer.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Compute every prompt from its first token, for comparison
    ///
    /// KV of a session or of an earlier prompt is not used. The answer is the same.
    #[arg(long, hide_short_help = true)]
    pub no_warm_resume: bool,

    /// Memory for the KV cache, e.g. 512M or 4G (default: what one full context takes)
    ///
    /// Without --ctx the context is limited to what this holds. The rows of a batch share it; without it they have up to eight
    /// full contexts, as far as memory allows.
    #[arg(long, value_name = "SIZE", hide_short_help = true)]
    pub kv_memory: Option<ByteSize>,

    /// Disk for the KV of saved sessions, which makes them warm after a restart; 0 keeps none (default: 4G)
    ///
    /// Lies in the cache folder and may be deleted at any time: then the next turn computes its prompt again. The pages used
    /// longest ago are removed first, and pages that several sessions begin with last. Without --session nothing is kept.
    #[arg(long, value_name = "SIZE", hide_short_help = true)]
    pub kv_disk: Option<ByteSize>,

    /// Disk for packed weights, which a later start reads instead of packing them again; 0 keeps none (default: 20G)
    ///
    /// Of models of 64 MiB and more, as they are in the file. Lies in the cache folder and may be deleted at any time. The files
    /// used longest ago are removed first; the default is at most half of the disk space that is free.
    #[arg(long, value_name = "SIZE", hide_short_help = true)]
    pub packed_disk: Option<ByteSize>,

    /// Speculative decoding: where draft tokens come from (default: auto)
    ///
    /// Draft tokens are verified in one step, and the answer is the same, bit by bit. They come from a grammar, from the text
    /// itself and, where these have none, from --draft-model or from the block for multi-token prediction in the model's own
    /// file (Qwen 3.5). A draft is as long as pays by the times measured.
    #[arg(long, value_name = "FROM", value_parser = one_of(&SPECULATIONS), hide_short_help = true)]
    pub speculate: Option<Speculation>,
}

/// Default for bytes of KV kept on disk.
pub const DEFAULT_KV_DISK: u64 = 4 << 30;

/// `--speculate`.
pub const SPECULATIONS: [FlagValue<Speculation>; 5] = [
    ("off", Speculation::Off, "One token in each step"),
    ("auto", Speculation::Auto, "Every source"),
    ("ngram", Speculation::Ngram, "The text that followed the same tokens earlier"),
    ("draft", Speculation::Draft, "--draft-model alone"),
    ("mtp", Speculation::Mtp, "The model's own block for multi-token prediction, or its assistant, alone"),
];

/// Settings of the engine beside those of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineOptions {
    pub warm_resume: bool,
    /// True if there are sessions whose KV is worth keeping on disk.
    pub keeps_sessions: bool,
    /// Bytes; `None` leaves it to the engine, here and below.
    pub kv_memory: Option<u64>,
    pub kv_disk: Option<u64>,
    pub packed_disk: Option<u64>,
    pub speculation: Speculation,
    pub sharing: Sharing,
}

/// Limits on simultaneous use of the engine; the default is one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sharing {
    pub max_running: usize,
    pub max_waiting: usize,
    pub max_sessions: usize,
    pub session_ttl: Option<Duration>,
}

impl Default for Sharing {
    fn default() -> Self {
        Self { max_running: 1, max_waiting: 64, max_sessions: 1, session_ttl: None }
    }
}

impl EngineArgs {
    pub fn resolve(&self, keeps_sessions: bool) -> EngineOptions {
        EngineOptions {
            sharing: Sharing::default(),
            warm_resume: !self.no_warm_resume,
            keeps_sessions,
            kv_memory: self.kv_memory.map(|size| size.0),
            kv_disk: self.kv_disk.map(|size| size.0),
            packed_disk: self.packed_disk.map(|size| size.0),
            speculation: self.speculate.unwrap_or(Speculation::Auto),
        }
    }
}

/// A number of bytes: `4096`, `512M`, `4G`, `4GiB`; the units are powers of 1024.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub u64);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refusal = || "not a size like 512M, 4G or a number of bytes (units: K, M, G, T)".to_owned();
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let shift = match &text[digits.len()..] {
            "" | "B" => 0,
            "K" | "k" | "KiB" => 10,
            "M" | "m" | "MiB" => 20,
            "G" | "g" | "GiB" => 30,
            "T" | "t" | "TiB" => 40,
            _ => return Err(refusal()),
        };
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(refusal());
        }
        let bytes = digits.parse::<u64>().ok().and_then(|count| count.checked_mul(1 << shift));
        bytes.map(Self).ok_or_else(|| "more bytes than can be counted".to_owned())
    }
}

/// Longer times are mistakes, and clocks cannot count them.
const LONGEST_SPAN: Duration = Duration::from_secs(36_500 * 86_400);

/// A time: `30s`, `1.5h`, `500ms`; a number alone is seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeSpan(pub Duration);

impl FromStr for TimeSpan {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refusal = || "not a time like 30s, 5m, 1h or 500ms (units: ms, s, m, h, d)".to_owned();
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = match &text[digits.len()..] {
            "ms" => 1e-3,
            "" | "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            "d" => 86_400.0,
            _ => return Err(refusal()),
        };
        if !digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
            return Err(refusal());
        }
        let seconds = digits.parse::<f64>().map_err(|_| refusal())? * unit;
        if seconds > LONGEST_SPAN.as_secs_f64() {
            return Err("is more than a hundred years (36500d)".to_owned());
        }
        let span = Duration::try_from_secs_f64(seconds).map_err(|_| refusal())?;
        if span.is_zero() { Err("must be longer than nothing".to_owned()) } else { Ok(Self(span)) }
    }
}

/// Sampling options. Unset ones come from the model's publisher, else from [`GivenSampling::sampling`].
///
/// The numbers are flags by their definition in [`SAMPLING`].
#[derive(Debug, Clone, Default)]
pub struct SamplingArgs {
    pub given: GivenSampling,
    /// A token that `--logit-bias` names twice.
    pub twice: Option<u32>,
}

impl Args for SamplingArgs {
    fn augment_args(command: Command) -> Command {
        let heading = "Sampling (unset: what the model recommends, else temperature 0.8, top-k 40, top-p 0.95 for free text)";
        command.next_help_heading(heading).args(SamplingParameter::all().map(sampling_flag))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Returns the flag that sets `parameter`.
fn sampling_flag(parameter: SamplingParameter) -> Arg {
    let name = parameter.name();
    let flag = Arg::new(name).long(name.replace('_', "-"));
    match parameter {
        SamplingParameter::Number(number) => flag
            .help(number.help.trim())
            .value_name(number.facts.value_name)
            .value_parser(value_parser!(f32))
            .allow_negative_numbers(true)
            .hide_short_help(!number.facts.is_common),
        SamplingParameter::TopK => flag
            .help("Choose among the K most likely tokens; `all` or -1 for no limit")
            .value_name("K")
            .value_parser(parse_top_k),
        SamplingParameter::LogitBias => flag
            .help("Add BIAS (-100 to 100) to the logit of token ID; may be repeated")
            .value_name("ID=BIAS")
            .value_parser(parse_bias)
            .action(ArgAction::Append)
            .value_delimiter(',')
            .hide_short_help(true),
        SamplingParameter::Seed => flag
            .help("Seed of the random choices; a drawn one is shown with -v and --stats, and is in json")
            .value_name("N")
            .value_parser(value_parser!(u64)),
        SamplingParameter::Samplers => flag
            .help("Apply these samplers in this order, and no others: penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature")
            .value_name("LIST")
            // With commas or semicolons between them.
            .value_parser(|text: &str| SamplerStep::list(text.split([',', ';'])))
            .hide_short_help(true),
        SamplingParameter::DrySequenceBreakers => flag
            .help("DRY: texts that no repetition goes across, `\\n` for the end of a line; may be repeated; `none` for none (default: the end of a line, `:`, `\"` and `*`)")
            .alias("dry-sequence-breaker")
            .value_name("TEXT")
            .value_parser(|text: &str| Ok::<_, Infallible>(text.replace("\\n", "\n")))
            .action(ArgAction::Append)
            .hide_short_help(true),
    }
}

impl FromArgMatches for SamplingArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut args = Self::default();
        args.update_from_arg_matches(matches)?;
        Ok(args)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        let given = &mut self.given;
        for number in SAMPLING {
            if let Some(&value) = matches.get_one(number.name) {
                number.give(&mut given.numbers, Some(value));
            }
        }
        given.top_k = matches.get_one("top_k").copied().or(given.top_k);
        if let Some(biases) = matches.get_many::<(u32, f32)>("logit_bias") {
            let mut seen = BTreeSet::new();
            self.twice = biases.clone().find(|(id, _)| !seen.insert(*id)).map(|(id, _)| *id);
            given.logit_bias = Some(biases.copied().collect());
        }
        given.seed = matches.get_one("seed").copied().or(given.seed);
        given.samplers = matches.get_one("samplers").cloned().or(given.samplers.take());
        if let Some(breakers) = matches.get_many::<String>("dry_sequence_breakers") {
            let is_none = breakers.len() == 1 && breakers.clone().all(|text| text == "none");
            given.dry_sequence_breakers = Some(breakers.filter(|_| !is_none).cloned().collect());
        }
        Ok(())
    }
}

/// When to stop.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Generate at most N tokens; -1 is no limit (default: to the end of the context)
    #[arg(long, short = 'n', value_name = "N")]
    pub max_tokens: Option<MaxTokens>,

    /// Policy for a prompt that exceeds the context together with --max-tokens (default: refuse)
    #[arg(long, value_name = "POLICY", value_parser = one_of(&OVERFLOWS), hide_short_help = true)]
    pub overflow: Option<Overflow>,

    /// Stop before this text; may be repeated
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,

    /// Continue past the model's end-of-generation tokens
    #[arg(long, hide_short_help = true)]
    pub ignore_eos: bool,

    /// End what repeats itself: on, off, or the least tokens of a repetition (default: 1000, reasoning only)
    ///
    /// The last N tokens are one cycle over and over, four times at least. Reasoning is ended and the answer follows; an answer
    /// stops. `on` is 1000, and like a number guards both. On a terminal, answers are guarded too unless this says otherwise.
    #[arg(long, value_name = "on|off|N", hide_short_help = true)]
    pub loop_guard: Option<LoopGuard>,
}

/// `--ctx`: a number of tokens, `4k` for 4,096.
pub fn parse_context(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 1024),
        None => (text, 1),
    };
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    match digits.parse::<usize>().ok().and_then(|count| count.checked_mul(unit)) {
        Some(0 | 1) => Err("must be at least 2".to_owned()),
        Some(count) => Ok(count),
        None if is_number => Err("more tokens than can be counted".to_owned()),
        None => Err("not a number of tokens like 4096 or 4k".to_owned()),
    }
}

/// `--max-tokens`: a number, or -1 as in other tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaxTokens {
    /// To the end of the context, whatever the model usually does.
    NoLimit,
    Most(usize),
}

impl FromStr for MaxTokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.parse::<i128>() {
            Ok(-1) => Ok(Self::NoLimit),
            Ok(count) if count < 1 => Err("must be at least 1; -1 is no limit".to_owned()),
            Ok(count) => usize::try_from(count).map(Self::Most).map_err(|_| "too large".to_owned()),
            Err(_) => Err("not a number of tokens".to_owned()),
        }
    }
}

/// `--overflow`.
const OVERFLOWS: [FlagValue<Overflow>; 2] = [
    ("refuse", Overflow::Refuse, "Say so and exit with 65"),
    ("clamp", Overflow::Clamp, "Generate as much as fits"),
];

/// Parses `--top-k`: a number, or `all` to undo what the model's publisher recommends.
fn parse_top_k(text: &str) -> Result<TopK, String> {
    match text.parse() {
        _ if matches!(text, "all" | "-1") => Ok(TopK::All),
        Ok(0) => Err("must be at least 1; `all` keeps all tokens".to_owned()),
        Ok(count) => Ok(TopK::Best(count)),
        Err(_) => Err("not a number or `all`".to_owned()),
    }
}

/// Parses `--logit-bias`: a token id and what is added to its logit.
fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let (id, bias) = text.split_once('=').ok_or("not of the form ID=BIAS")?;
    let id = id.trim().parse().map_err(|_| format!("{id:?} is not a token id"))?;
    let bias = bias.trim().parse().map_err(|_| format!("{bias:?} is not a number"))?;
    Ok((id, bias))
}

impl SamplingArgs {
    /// Validates what does not depend on a model. The engine refuses ids beyond its vocabulary.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] naming the field.
    pub fn check(&self) -> Result<(), Error> {
        if let Some(id) = self.twice {
            let message = format!("token {id} is given twice");
            return Err(Error::InvalidParameter { name: "logit_bias", message });
        }
        self.given.sampling(true).validate(usize::MAX)
    }

    /// Names what `defaults` give and the flags do not, e.g. `temperature 0.6`.
    pub fn taken_from(&self, defaults: &GivenSampling) -> Vec<String> {
        let not_here = |number: &&SamplingNumber| number.given(&self.given.numbers).is_none();
        let numbers = SAMPLING.iter().filter(not_here).filter_map(|number| {
            let value = number.given(&defaults.numbers)?;
            Some(format!("{} {value}", number.name))
        });
        let top_k = match (self.given.top_k, defaults.top_k) {
            (None, Some(TopK::Best(count))) => Some(format!("top_k {count}")),
            _ => None,
        };
        numbers.chain(top_k).collect()
    }

    /// Returns whether a flag or a file sets a parameter.
    pub fn gives(&self, parameter: SamplingParameter) -> bool {
        let mut without = self.clone();
        without.unset(parameter);
        without.given != self.given
    }

    /// Takes back the value of a parameter.
    pub fn unset(&mut self, parameter: SamplingParameter) {
        let given = &mut self.given;
        match parameter {
            SamplingParameter::Number(number) => number.give(&mut given.numbers, None),
            SamplingParameter::TopK => given.top_k = None,
            SamplingParameter::LogitBias => (given.logit_bias, self.twice) = (None, None),
            SamplingParameter::Seed => given.seed = None,
            SamplingParameter::Samplers => given.samplers = None,
            SamplingParameter::DrySequenceBreakers => given.dry_sequence_breakers = None,
        }
    }
}

impl LimitArgs {
    pub fn resolve(&self) -> Limits {
        let overflow = self.overflow.unwrap_or(Overflow::Refuse);
        // No limit is as much as fits: then the end of the context is reached, not a number of tokens.
        let (max_tokens, overflow) = match self.max_tokens {
            None => (None, overflow),
            Some(MaxTokens::Most(count)) => (Some(count), overflow),
            Some(MaxTokens::NoLimit) => (Some(usize::MAX), Overflow::Clamp),
        };
        let stop = self.stop.clone();
        let loop_guard = self.loop_guard.unwrap_or_default();
        Limits { max_tokens, stop, ignore_eos: self.ignore_eos, overflow, loop_guard, ..Limits::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::error::Kind;
    use llmctl_base::{Sampling, SamplingNumbers};

    #[test]
    fn flags_win_over_the_models_defaults_and_what_is_taken_from_them_is_named() {
        let none = SamplingNumbers::default();
        let numbers = SamplingNumbers { temperature: Some(0.6), top_p: Some(0.95), ..none };
        let defaults = GivenSampling { numbers, top_k: Some(TopK::Best(20)), ..GivenSampling::default() };
        let check = |numbers, top_k, in_force, taken: &[&str]| {
            let given = GivenSampling { numbers, top_k, ..GivenSampling::default() };
            let args = SamplingArgs { given, ..SamplingArgs::default() };
            let Sampling { temperature, top_k, top_p, .. } = args.given.clone().or(&defaults).sampling(true);
            assert_eq!((temperature, top_k, top_p), in_force);
            assert_eq!(args.taken_from(&defaults), taken);
        };
        let cold = SamplingNumbers { temperature: Some(0.0), ..none };
        check(cold, None, (0.0, Some(20), 0.95), &["top_p 0.95", "top_k 20"]);
        let narrow = SamplingNumbers { top_p: Some(0.5), ..none };
        check(narrow, Some(TopK::All), (0.6, None, 0.5), &["temperature 0.6"]);
        assert!(SamplingArgs::default().taken_from(&GivenSampling::default()).is_empty());
    }

    #[test]
    fn an_instruction_set_is_taken_where_the_processor_has_it() {
        let all = Isa::ALL;
        assert_eq!(INSTRUCTION_SETS.map(|(_, isa, _)| isa), all);
        for (asked, isa) in all.into_iter().enumerate() {
            for best in 0..all.len() {
                let found = check_isa(isa, &all[..=best]);
                assert_eq!(found.is_ok(), asked <= best);
                let Err(error) = found else { continue };
                let names: Vec<_> = all[..=best].iter().map(|isa| isa.name()).collect();
                assert_eq!(error.kind, Kind::Usage);
                assert!(error.to_string().contains(&format!("has no {}", isa.name())), "{error}");
                assert!(error.hint_text().is_some_and(|hint| hint.contains(&names.join(", "))), "{error:?}");
            }
        }
    }

    #[test]
    fn a_token_has_one_bias() {
        let check = |biases: &str| {
            let command = SamplingArgs::augment_args(Command::new("c"));
            let matches = command.get_matches_from(["c", "--logit-bias", biases]);
            let args = SamplingArgs::from_arg_matches(&matches).expect("they are numbers");
            args.check().map_err(|error| error.to_string())
        };
        assert_eq!(check("5=1,6=1"), Ok(()));
        assert_eq!(check("5=1,6=1,5=1"), Err("logit_bias: token 5 is given twice".to_owned()));
    }

    #[test]
    fn top_k_has_no_zero_sentinel() {
        assert_eq!(parse_top_k("all"), Ok(TopK::All));
        assert_eq!(parse_top_k("7"), Ok(TopK::Best(7)));
        assert!(parse_top_k("0").unwrap_err().contains("`all`"));
        assert_eq!(parse_top_k("-1"), Ok(TopK::All), "as in other tools");
        assert!(parse_top_k("-2").is_err());
    }

    #[test]
    fn contexts_may_be_counted_in_thousands() {
        for (text, tokens) in [("4096", 4096), ("4k", 4096), ("128K", 131_072), ("2", 2)] {
            assert_eq!(parse_context(text), Ok(tokens), "{text}");
        }
        for bad in ["", "k", "1", "0k", "-4k", "4kk", "4 k", "4M", "99999999999999999999"] {
            assert!(parse_context(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn no_limit_is_as_much_as_fits() {
        let resolved = |text: &str| {
            let max_tokens = Some(text.parse().expect(text));
            let limits = LimitArgs { max_tokens, ..LimitArgs::default() }.resolve();
            (limits.max_tokens, limits.overflow)
        };
        assert_eq!(resolved("-1"), (Some(usize::MAX), Overflow::Clamp));
        assert_eq!(resolved("7"), (Some(7), Overflow::Refuse));
        assert_eq!(LimitArgs::default().resolve().max_tokens, None);
        for bad in ["0", "-2", "x", "", "99999999999999999999999999999999999999999"] {
            assert!(bad.parse::<MaxTokens>().is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_are_bytes_or_powers_of_1024() {
        let check = |text: &str, bytes: u64| assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        check("0", 0);
        check("4096", 4096);
        check("17B", 17);
        check("512M", 512 << 20);
        check("4g", 4 << 30);
        check("3KiB", 3 << 10);
        check("2T", 2 << 40);
        for bad in
            ["", "M", "-1", "1.5G", "4 G", "4GB", "4X", "4MM", "0x10", "16777216T", "99999999999999999999"]
        {
            assert!(bad.parse::<ByteSize>().is_err(), "{bad}");
        }
    }

    #[test]
    fn times_are_seconds_or_have_a_unit() {
        let check = |text: &str, ms: u64| {
            assert_eq!(text.parse(), Ok(TimeSpan(Duration::from_millis(ms))), "{text}");
        };
        check("30", 30_000);
        check("30s", 30_000);
        check("500ms", 500);
        check("1.5h", 5_400_000);
        check("2d", 172_800_000);
        check("0.25", 250);
        for bad in ["", "s", "-1", "1 s", "0", "0ms", "1w", "1.2.3", "1e3", "inf", "nan", "1m30s", "1S"] {
            assert!(bad.parse::<TimeSpan>().is_err(), "{bad}");
        }
        assert_eq!("36500d".parse(), Ok(TimeSpan(LONGEST_SPAN)));
        for bad in ["36501d", "9223372036854775807s", "99999999999999999999"] {
            let refused = bad.parse::<TimeSpan>().expect_err(bad);
            assert_eq!(refused, "is more than a hundred years (36500d)", "{bad}");
        }
    }

    #[test]
    fn engine_flags_become_options() {
        #[derive(Debug, clap::Parser)]
        struct Probe {
            #[command(flatten)]
            engine: EngineArgs,
        }
        let parse = |words: &[&str]| {
            let probe = <Probe as clap::Parser>::try_parse_from([&["probe"], words].concat());
            probe.map(|probe| probe.engine.resolve(true)).map_err(|error| error.to_string())
        };
        let unset = EngineOptions {
            warm_resume: true,
            keeps_sessions: true,
            kv_memory: None,
            kv_disk: None,
            packed_disk: None,
            speculation: Speculation::Auto,
            sharing: Sharing::default(),
        };
        assert_eq!(parse(&[]), Ok(unset));
        let ngram = EngineOptions { speculation: Speculation::Ngram, ..unset };
        assert_eq!(parse(&["--speculate", "ngram"]), Ok(ngram));
        let given = EngineOptions {
            warm_resume: false,
            keeps_sessions: true,
            kv_memory: Some(512 << 20),
            kv_disk: Some(0),
            packed_disk: Some(1 << 30),
            ..unset
        };
        let words = ["--no-warm-resume", "--kv-memory", "512M", "--kv-disk", "0", "--packed-disk", "1G"];
        assert_eq!(parse(&words), Ok(given));
        let refusal = parse(&["--kv-disk", "lots"]).expect_err("no size");
        assert!(refusal.contains("--kv-disk <SIZE>") && refusal.contains("512M"), "{refusal}");
    }

    #[test]
    fn an_endpoint_is_an_address_or_none() {
        let url = |text: &str| text.parse::<EndpointArg>().map(|arg| arg.0.map(|url| url.to_string()));
        assert_eq!(url("none"), Ok(None));
        assert_eq!(url("http://127.0.0.1:8080"), Ok(Some("http://127.0.0.1:8080/v1".to_owned())));
        assert!(url("None").is_err() && endpoint_text("none").is_err() && endpoint_text("x").is_err());
        assert_eq!(endpoint_text("http://127.0.0.1:8484"), Ok("http://127.0.0.1:8484".to_owned()));
    }

    #[test]
    fn a_bias_is_an_id_and_a_number() {
        assert_eq!(parse_bias("5=-100"), Ok((5, -100.0)));
        for bad in ["5", "=1", "5=", "-5=1", "x=1", "5=much"] {
            assert!(parse_bias(bad).is_err(), "{bad}");
        }
    }
}
