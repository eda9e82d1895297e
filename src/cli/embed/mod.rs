//! `llmctl embed`: texts to vectors, one a line.
//!
//! Texts are read, encoded and computed in blocks, so that input of any size takes bounded memory, except for
//! a matrix on its way to stdout, which is held whole. A block is submitted before the results of the one
//! before it are written.

mod input;
mod output;

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use serde_json::Value;

use super::batch::input::open_rows;
use super::config::Config;
use super::error::{CommandError, Exit};
use super::terminal::Terminal;
use crate::cli::flags::args::{
    DTYPES, FetchArgs, INSTRUCTION_SETS, ModelArgs, POOLINGS, QUANTIZED, count, one_of, parse_context,
};
use crate::cli::model::load::embedder::load_embedder;
use crate::cli::terminal::output::OutputError;
use crate::cli::terminal::report::{check_new_file, counted, is_same_file};
use input::{EmbedRow, Rows};
use llmctl_engine::embed::{EmbedClient, EmbedInput, EmbedJob, EmbedKind, EmbedOutput, LongText};
use llmctl_models::load::{AskedTask, Dtype, Isa, Pooling};
use output::VectorFile;

/// Texts that are encoded and submitted together.
const BLOCK: usize = 256;

/// Compute the embeddings of texts: one vector per line
///
/// Reads lines of stdin, unless texts or --input are given, and writes one JSON object per text, or a numpy matrix. The model is
/// an encoder (BERT, ModernBERT, nomic-bert, XLM-RoBERTa) or a decoder that was trained for embeddings (Qwen3-Embedding,
/// EmbeddingGemma).
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct EmbedArgs {
    /// Texts (default: the lines of stdin)
    #[arg(value_name = "TEXT")]
    pub texts: Vec<String>,

    /// Model: a .gguf file, a folder, org/repo[:QUANT][@REVISION] or an alias
    #[arg(long, short, value_name = "REF")]
    pub model: Option<String>,

    /// Read texts from this file, one a line (`-` is stdin)
    #[arg(long, short, value_name = "FILE", conflicts_with = "texts")]
    pub input: Option<PathBuf>,

    /// Read lines as JSON: a string, or an object with a text; its `id` is in the result
    #[arg(long, conflicts_with = "texts")]
    pub jsonl: bool,

    /// Member of the objects that holds the text (default: text)
    #[arg(long, value_name = "NAME", requires = "jsonl")]
    pub field: Option<String>,

    /// Write to this file instead of stdout
    #[arg(long, short, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Replace the file if it exists
    #[arg(long, requires = "out")]
    pub force: bool,

    /// Format of the result (default: npy for a file of that name, else jsonl)
    #[arg(long, visible_alias = "output", value_enum, value_name = "FORMAT")]
    pub format: Option<VectorFormat>,

    /// Put the model's prompt of this name before each text, e.g. query; the model's files list them
    #[arg(long, value_name = "NAME", conflicts_with = "prefix")]
    pub prompt_name: Option<String>,

    /// Put this text before each text
    #[arg(long, value_name = "TEXT")]
    pub prefix: Option<String>,

    /// Keep only the first N values of each vector, for models that were trained for it (Matryoshka)
    #[arg(long, value_name = "N", value_parser = count(1..))]
    pub dimensions: Option<usize>,

    /// Cut texts that are longer than the model reads, instead of ending with an error
    #[arg(long)]
    pub truncate: bool,

    /// Pool hidden states in this way (default: as the model's files say)
    #[arg(long, value_name = "HOW", value_parser = one_of(&POOLINGS), hide_short_help = true)]
    pub pooling: Option<Pooling>,

    /// Most tokens per text (default: as the model was trained)
    #[arg(long, value_name = "N", value_parser = parse_context, hide_short_help = true)]
    pub ctx: Option<usize>,

    /// Type of the weights in memory (default: as they are in the file)
    #[arg(long, value_name = "TYPE", value_parser = one_of(&DTYPES), hide_short_help = true)]
    pub dtype: Option<Dtype>,

    /// Quantise the weights while loading
    #[arg(long, value_name = "TYPE", value_parser = one_of(&QUANTIZED), conflicts_with = "dtype", hide_short_help = true)]
    pub quantize: Option<Dtype>,

    /// Threads to compute with (default: one for each performance core)
    #[arg(long, value_name = "N", value_parser = count(1..=1024), hide_short_help = true)]
    pub threads: Option<usize>,

    /// Instruction set of the CPU kernels (default: the best that the processor has)
    #[arg(long, value_name = "SET", value_parser = one_of(&INSTRUCTION_SETS), hide_short_help = true)]
    pub cpu: Option<Isa>,

    #[command(flatten)]
    pub fetch: FetchArgs,
}

const LONG_HELP: &str = include_str!("long_help.txt").trim_ascii_end();

/// `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum VectorFormat {
    Jsonl,
    Npy,
}

/// Computes the embeddings of all texts.
pub fn run(args: EmbedArgs, config: &Config, terminal: &Terminal) -> Result<Exit, CommandError> {
    check_files(&args)?;
    let client = load_embedder(&model_args(&args, config)?, asked(&args), terminal)?;
    let width = check(&args, &client)?;
    let prefix = match &args.prefix {
        Some(prefix) => prefix.clone(),
        None => client.texts().prompt(args.prompt_name.as_deref())?.to_owned(),
    };
    let (rows, total) = rows(&args)?;
    let mut file = VectorFile::create(args.out.as_deref(), args.format(), width)?;
    let bar = terminal.progress(total, "texts");
    let start = Instant::now();
    let mut work =
        EmbedWork { client: &client, args: &args, prefix, num_texts: 0, num_tokens: 0, num_cut: 0 };
    let done = work.compute_all(rows, &mut file, &bar);
    bar.finish_and_clear();
    match done.and_then(|()| file.finish()) {
        Ok(()) => {}
        Err(OutputError::Closed) => return Ok(Exit::Success),
        Err(OutputError::Failed(error)) => return Err(error),
    }
    if work.num_cut > 0 {
        let texts = counted(work.num_cut, "text");
        terminal.warn(format!("{texts} cut to {} tokens", client.texts().spec.context_length));
    }
    let seconds = start.elapsed().as_secs_f64();
    let (texts, rate) = (counted(work.num_texts, "text"), work.num_texts as f64 / seconds.max(1e-9));
    terminal.detail(&format!("{texts}, {} tokens in {seconds:.2} s ({rate:.1}/s)", work.num_tokens));
    Ok(Exit::Success)
}

impl EmbedArgs {
    /// Returns the format that is asked for, by the name of the file if by no flag.
    fn format(&self) -> VectorFormat {
        let extension = self.out.as_deref().and_then(Path::extension);
        let is_npy = extension.is_some_and(|extension| extension == "npy");
        self.format.unwrap_or(if is_npy { VectorFormat::Npy } else { VectorFormat::Jsonl })
    }
}

/// Refuses an output that would overwrite the input, and a binary one on a terminal.
fn check_files(args: &EmbedArgs) -> Result<(), CommandError> {
    if let (Some(input), Some(out)) = (&args.input, &args.out)
        && is_same_file(input, out)
    {
        return Err(CommandError::usage("--input and --out are the same file"));
    }
    args.out.as_deref().map_or(Ok(()), |out| check_new_file(out, args.force))?;
    if args.out.is_none() && args.format() == VectorFormat::Npy && io::stdout().is_terminal() {
        let error = CommandError::usage("--format npy: a terminal shows no matrix");
        return Err(error.hint("--out FILE writes it to a file"));
    }
    Ok(())
}

/// Opens the input; also returns the number of texts, if known.
fn rows(args: &EmbedArgs) -> Result<(Rows<'static>, Option<u64>), CommandError> {
    if !args.texts.is_empty() {
        return Ok((Rows::given(args.texts.clone()), Some(args.texts.len() as u64)));
    }
    let path = args.input.as_deref().unwrap_or(Path::new("-"));
    let (lines, total) = open_rows(path, !args.jsonl)?;
    let field = args.jsonl.then(|| args.field.clone().unwrap_or_else(|| "text".to_owned()));
    Ok((Rows::lines(lines, field), total))
}

fn model_args(args: &EmbedArgs, config: &Config) -> Result<ModelArgs, CommandError> {
    if args.model.is_none() {
        let hint = "name an embedding model with --model, e.g. sentence-transformers/all-MiniLM-L6-v2";
        return Err(CommandError::usage("no model: the built-in one computes no embeddings").hint(hint));
    }
    Ok(ModelArgs {
        model: args.model.clone(),
        ctx: args.ctx,
        dtype: args.dtype,
        quantize: args.quantize,
        threads: args.threads,
        cpu: args.cpu,
        fetch: args.fetch.clone(),
        aliases: config.aliases(),
        ..ModelArgs::default()
    })
}

fn asked(args: &EmbedArgs) -> Option<AskedTask> {
    args.pooling.map(AskedTask::Pooling)
}

/// Returns the number of values of a vector.
fn check(args: &EmbedArgs, client: &EmbedClient) -> Result<usize, CommandError> {
    let name = &client.texts().name;
    let EmbedKind::Vectors(width) = client.texts().kind else {
        return Err(CommandError::bad_data(format!(
            "{name} is a reranker: it scores pairs of texts, which \
            `llmctl serve` does at /v1/rerank"
        )));
    };
    match args.dimensions {
        Some(dimensions) if dimensions > width => Err(CommandError::usage(format!(
            "--dimensions {dimensions}: the vectors of {name} have {width} values"
        ))),
        dimensions => Ok(dimensions.unwrap_or(width)),
    }
}

/// The texts of a command under way.
struct EmbedWork<'a> {
    client: &'a EmbedClient,
    args: &'a EmbedArgs,
    prefix: String,
    num_texts: usize,
    num_tokens: usize,
    num_cut: usize,
}

/// A block of texts that is being computed.
struct EmbedBlock {
    ids: Vec<Option<Value>>,
    job: EmbedJob,
}

impl EmbedWork<'_> {
    fn compute_all(
        &mut self,
        mut rows: Rows<'_>,
        file: &mut VectorFile,
        bar: &ProgressBar,
    ) -> Result<(), OutputError> {
        let mut computing: Option<EmbedBlock> = None;
        loop {
            let (next, read) = self.submit(&mut rows);
            if let Some(block) = computing.take() {
                self.write(block, file, bar)?;
            }
            if let Err(error) = read {
                // The texts before a wrong line are written.
                next.map_or(Ok(()), |block| self.write(block, file, bar))?;
                return Err(OutputError::Failed(error));
            }
            match next {
                Some(block) => computing = Some(block),
                None => return Ok(()),
            }
        }
    }

    /// Encodes and submits the next block, as far as texts can be read and encoded; `None` if that is not one text.
    fn submit(&mut self, rows: &mut Rows<'_>) -> (Option<EmbedBlock>, Result<(), CommandError>) {
        let (mut ids, mut inputs) = (Vec::new(), Vec::new());
        let mut read = Ok(());
        while inputs.len() < BLOCK {
            match self.next_input(rows) {
                Ok(Some((id, input))) => {
                    inputs.push(input);
                    ids.push(id);
                }
                Ok(None) => break,
                Err(error) => {
                    read = Err(error);
                    break;
                }
            }
        }
        if inputs.is_empty() {
            return (None, read);
        }
        match self.client.submit(inputs, self.args.dimensions) {
            Ok(job) => (Some(EmbedBlock { ids, job }), read),
            Err(error) => (None, Err(error.into())),
        }
    }

    /// Reads and encodes the next text; also returns its id.
    fn next_input(
        &mut self,
        rows: &mut Rows<'_>,
    ) -> Result<Option<(Option<Value>, EmbedInput)>, CommandError> {
        let Some(EmbedRow { line, id, text }) = rows.next_row()? else { return Ok(None) };
        let long = if self.args.truncate { LongText::Cut } else { LongText::Refuse };
        let encoded = self.client.texts().encode(&self.prefix, &text, long).map_err(|error| {
            let error = CommandError::bad_data(error).context(format!("text {line}"));
            if self.args.truncate { error } else { error.hint("--truncate cuts long texts") }
        });
        let input = encoded?;
        self.num_tokens += input.num_tokens();
        self.num_cut += usize::from(input.is_cut());
        Ok(Some((id, input)))
    }

    fn write(
        &mut self,
        block: EmbedBlock,
        file: &mut VectorFile,
        bar: &ProgressBar,
    ) -> Result<(), OutputError> {
        let EmbedBlock { ids, mut job } = block;
        for id in ids {
            let output = job.next().unwrap_or(Err(llmctl_base::Error::EngineGone));
            let vector = match output.map_err(|error| OutputError::Failed(error.into()))? {
                EmbedOutput::Vector(vector) => vector,
                EmbedOutput::Score(_) => unreachable!("the kind of the model was checked"),
            };
            file.write(self.num_texts, id, &vector)?;
            self.num_texts += 1;
            bar.inc(1);
        }
        Ok(())
    }
}
