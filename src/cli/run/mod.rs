//! `llmctl run`: one prompt, or a file of them, to answers.
//!
//! `prompt` finds out what is asked, `llm` is the loaded model as this command sees it, `answer` drives one
//! generation to stdout; [`super::batch`] drives many to a file.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::args::{LimitArgs, ModelArgs, SamplingArgs};
use super::error::{CommandError, Exit};
use super::terminal::Terminal;

/// Answer one prompt, or a file of them
///
/// The prompt is the argument; what is piped in follows it after a blank line. The answer alone goes to stdout, as
/// it is generated; everything else goes to stderr.
#[derive(Debug, Clone, Default, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct RunArgs {
    /// The prompt; several words are joined by spaces
    #[arg(value_name = "PROMPT")]
    pub words: Vec<String>,

    #[command(flatten)]
    pub prompt: PromptArgs,

    #[command(flatten)]
    pub model: ModelArgs,

    #[command(flatten)]
    pub sampling: SamplingArgs,

    #[command(flatten)]
    pub limits: LimitArgs,

    #[command(flatten)]
    pub output: OutputArgs,

    #[command(flatten)]
    pub batch: BatchArgs,
}

/// What is asked.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Prompt")]
pub struct PromptArgs {
    /// Use a prompt that comes with llmctl (--list-prompts); PROMPT and stdin become its input
    #[arg(long = "prompt", short = 'p', value_name = "NAME", conflicts_with = "prompt_file")]
    pub name: Option<String>,

    /// Read the prompt from a file, or from stdin if `-`; PROMPT and stdin follow it
    ///
    /// An empty file is a valid prompt. One line end at the end of the file, as of piped input, is not part of
    /// the prompt.
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,

    /// Fill {{KEY}} in the prompt; VALUE may be @FILE (@@ for a real @); may be repeated
    ///
    /// With a --var, a prompt file is a minijinja template; without, its braces are just text. The variable
    /// `input` is PROMPT and stdin unless it is given.
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_variable)]
    pub var: Vec<(String, String)>,

    /// List the prompts that come with llmctl
    #[arg(long)]
    pub list_prompts: bool,

    /// Do not read stdin, even if something is piped in
    #[arg(long, hide_short_help = true)]
    pub no_stdin: bool,

    /// System prompt
    #[arg(long, short, value_name = "TEXT", conflicts_with = "system_file")]
    pub system: Option<String>,

    /// Read the system prompt from a file
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub system_file: Option<PathBuf>,

    /// Complete the prompt as plain text, without the chat template
    #[arg(long, conflicts_with_all = ["system", "system_file"])]
    pub raw: bool,

    /// Begin the answer with this text
    #[arg(long, value_name = "TEXT", hide_short_help = true)]
    pub prefill_response: Option<String>,

    /// Print the rendered prompt and its token count instead of an answer
    #[arg(long)]
    pub dry_run: bool,
}

/// How the answer comes out.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// What goes to stdout: the text, one JSON object at the end, or an event per line
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub output: Option<OutputFormat>,

    /// Write the text at the end instead of as it is generated
    #[arg(long, hide_short_help = true)]
    pub no_stream: bool,

    /// Report token counts, rates, context use, finish reason and seed on stderr
    #[arg(long)]
    pub stats: bool,

    /// Report each token's log-probability and its N best alternatives (0 to 20); needs json or jsonl
    #[arg(long, value_name = "N", hide_short_help = true)]
    pub logprobs: Option<usize>,

    /// Exit with 3 if the answer was cut by --max-tokens or by the end of the context
    #[arg(long, hide_short_help = true)]
    pub fail_on_length: bool,
}

/// `--output`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    #[default]
    Text,
    Json,
    Jsonl,
}

/// Many prompts from a file.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Batch")]
pub struct BatchArgs {
    /// Answer every row of a JSON Lines file (`-` is stdin)
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = [
            "words", "name", "prompt_file", "var", "list_prompts", "dry_run", "prefill_response", "output",
            "no_stream", "fail_on_length",
        ],
    )]
    pub batch: Option<PathBuf>,

    /// Append the results to this file (default: stdout)
    #[arg(long, value_name = "FILE", requires = "batch")]
    pub out: Option<PathBuf>,

    /// Go on with an --out that a previous run left, skipping the rows it has
    #[arg(long, requires = "out")]
    pub resume: bool,

    /// Answer rows that name another model too, with this one
    #[arg(long, requires = "batch", hide_short_help = true)]
    pub any_model: bool,
}

const LONG_HELP: &str = "\
Examples:
  llmctl run --model ./model.gguf \"Why is the sky blue?\"
  git diff | llmctl run --prompt review-diff --stats
  llmctl run --prompt translate --var language=French < letter.txt > lettre.txt
  llmctl run --raw --seed 7 --temperature 0.8 --max-tokens 64 \"Once upon a time\"
  llmctl run --output json \"Name a colour\" | jq -r .usage.completion_tokens
  llmctl run --batch questions.jsonl --out answers.jsonl --resume

Output:
  The text ends with a line end, added if the model wrote none. To a terminal, control characters that the model
  writes are shown as symbols; pipes and files get them unchanged. json is one object, jsonl one event per line
  (started, prefill, text, done), each with \"schema\": \"llmctl.run.v1\". With --prefill-response the answer
  begins with that text.

Standard input:
  What is piped in is read to its end and appended to the prompt. A terminal, an empty input and /dev/null add
  nothing. A pipe that another program holds open without writing (as some task runners do) would be waited
  for; llmctl says so after two seconds. Give < /dev/null or --no-stdin to go without.

Batch:
  A row is OpenAI's batch form {\"custom_id\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\" or
  \"/v1/completions\", \"body\": {...}}, or {\"prompt\" or \"messages\", \"custom_id\"?, max_tokens, temperature, ...}.
  Flags are the defaults of the rows. A row without custom_id gets line-<N>. Results are in OpenAI's form, one
  row each, synced as they finish; rows that fail are reported in their place, and the exit code is 4. Ctrl-C keeps
  what has finished; --resume skips it.

Exit codes:
  0 success, also when the reader of stdout went away
  1 runtime failure    2 usage    3 cut (--fail-on-length)    4 failed rows in the batch
  65 bad input: a damaged model file, a prompt that is empty, not UTF-8 or longer than the context
  66 prompt or model not found    70 internal bug    74 input or output failed, e.g. the disk is full
  75 not enough memory, or --out is in use    78 bad configuration    130 SIGINT    143 SIGTERM

Environment:
  LLMCTL_<FLAG> sets any flag, e.g. LLMCTL_MODEL; `llmctl --help` lists the other variables and the files.";

fn parse_variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("not of the form KEY=VALUE".to_owned()),
    }
}

pub fn run(_args: RunArgs, _terminal: &Terminal) -> Result<Exit, CommandError> {
    Ok(Exit::Success)
}
