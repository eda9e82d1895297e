//! `llmctl run`: one prompt, or a file of them, to answers.
//!
//! `check` refuses what is wrong before anything is read, `prompt` collects the prompt, `request` makes a
//! turn of prompt and flags, `constraint` reads what the answer must look like, `answer` generates it and
//! `report` writes it; `session` makes it a turn of a saved conversation, with the messages and the session
//! of `next_turn`. `endpoint` sends the prompt to a server that takes messages, and `message_answer` reads
//! the answer. `tool_rounds` runs the calls of an answer and lets the model continue. [`super::batch`]
//! answers many prompts.

pub mod answer;
pub mod check;
pub mod compare;
pub mod constraint;
mod endpoint;
pub mod message_answer;
pub mod next_turn;
pub mod prompt;
pub mod report;
mod request;
pub mod session;
pub mod settings;
mod tool_rounds;

use std::io::StdoutLock;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde_json::json;

use super::endpoint::EndpointChoice;
use super::error::{CommandError, Exit};
use super::images;
use super::mcp::McpArgs;
use super::terminal::Terminal;
use crate::cli::flags::args::{
    ConnectArgs, EndpointArgs, EngineArgs, LimitArgs, ModelArgs, SamplingArgs, most_used,
};
use crate::cli::model::load;
use crate::cli::model::load::{Loaded, ModelInfo, PreparedTexts};
use crate::cli::terminal::input::read_file;
use crate::cli::terminal::output::Output;
use crate::cli::terminal::report::{print, with_schema};
use crate::cli::terminal::signal::Graceful;
use crate::cli::think::Think;
use answer::{AnswerGeneration, LOOPED, STUCK};
use compare::VariedRun;
use constraint::ConstraintArgs;
use llmctl_base::Error;
use llmctl_engine::turn::{Answer, TurnPlan, TurnRequest};
use llmctl_engine::{ChatTokenizer, EngineSessionName, Finish};
use next_turn::{Next, RunTurn};
use prompt::GatheredPrompt;
use report::{AfterAnswer, Report, ReportForm, ReportSubject};
use request::{Rendered, input, rendered, turn_request};
use tool_rounds::ToolRounds;

/// Answer one prompt, or a file of them
///
/// The prompt is the argument; what is piped in follows it after a blank line. The answer alone goes to stdout, as
/// it is generated; everything else goes to stderr.
#[derive(Debug, Clone, Default, Args)]
#[command(after_long_help = LONG_HELP, mut_args(|arg| most_used(arg, &MOST_USED)))]
pub struct RunArgs {
    /// The prompt; several words are joined by spaces, and `-` alone is stdin
    #[arg(value_name = "PROMPT")]
    pub words: Vec<String>,

    #[command(flatten)]
    pub prompt: PromptArgs,

    #[command(flatten)]
    pub session: SessionArgs,

    #[command(flatten)]
    pub constraint: ConstraintArgs,

    #[command(flatten)]
    pub output: OutputArgs,

    #[command(flatten)]
    pub sampling: SamplingArgs,

    #[command(flatten)]
    pub limits: LimitArgs,

    /// Answer the prompt once for each variation, KEY=VALUE words or a model; may be repeated, or apart by |
    ///
    /// The keys are model, prompt, system, think, and the flags for sampling and limits: `temperature=0.2 | temperature=1 seed=7 |
    /// prompt="Explain it to a child"`. Variations of one model share the KV of what their prompts begin with. A table has the
    /// tokens and times of each.
    #[arg(
        long,
        value_name = "VARIATION",
        help_heading = "Compare",
        conflicts_with_all = [
            "batch", "session", "dry_run", "list_prompts", "mcp_config", "endpoint", "logprobs", "no_stream", "fail_on_length",
        ],
    )]
    pub compare: Vec<String>,

    #[command(flatten)]
    pub batch: BatchArgs,

    #[command(flatten)]
    pub model: ModelArgs,

    #[command(flatten)]
    pub connect: ConnectArgs,

    #[command(flatten)]
    pub mcp: McpArgs,

    #[command(flatten)]
    pub endpoint: EndpointArgs,

    #[command(flatten)]
    pub engine: EngineArgs,
}

/// The flags of `run` that are used most, by id.
const MOST_USED: [&str; 10] =
    ["model", "name", "system", "session", "max_tokens", "temperature", "think", "schema", "output", "stats"];

/// Flags of the prompt.
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
    #[arg(long, short = 'f', value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,

    /// Fill {{KEY}} in the prompt; VALUE may be @FILE (@@ for a real @); may be repeated
    ///
    /// With a --var, a prompt file is a minijinja template; without, its braces are just text, unless its only variable is
    /// `input`. That variable is PROMPT and stdin unless it is given.
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_variable)]
    pub var: Vec<(String, String)>,

    /// Show this image to a model that reads images, or the one on stdin if `-`; may be repeated
    ///
    /// PNG, JPEG, WebP, GIF and BMP. Images stand before the text, unless it has {image} where each of them belongs. An image that is
    /// piped in needs no --image.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["raw", "batch", "list_prompts"])]
    pub image: Vec<PathBuf>,

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

    /// The command line gives the system prompt. One of a variable or a configuration file is for new sessions.
    #[arg(skip)]
    pub is_system_given: bool,

    /// Complete the prompt as plain text, without the chat template
    #[arg(long, conflicts_with_all = ["system", "system_file", "chat_template", "mcp_config"])]
    pub raw: bool,

    /// Reasoning before the answer: on, off, hide, or a budget in tokens, e.g. 500 (default: as the chat template does)
    ///
    /// Reasoning is not part of the answer. A terminal shows it in dim text, unless it is hidden; json and jsonl have it in a
    /// field of its own.
    #[arg(long, value_name = "HOW", conflicts_with = "raw")]
    pub think: Option<String>,

    /// The reasoning of a variation of --compare; set after parsing.
    #[arg(skip)]
    pub varied_think: Option<Think>,

    /// Offer the model these tools: an array of tools as in OpenAI's API, in a file or itself, or a file in TOML as chat's
    ///
    /// run does not run these tools: --output json and jsonl report the calls. --mcp-config offers tools that it runs, and
    /// chat runs the commands of a TOML file (`llmctl chat --help` shows one).
    #[arg(long, value_name = "FILE|JSON", conflicts_with_all = ["raw", "batch"], hide_short_help = true)]
    pub tools: Option<String>,

    /// Begin the answer with this text
    #[arg(long, value_name = "TEXT", conflicts_with = "mcp_config", hide_short_help = true)]
    pub prefill_response: Option<String>,

    /// Print the rendered prompt and its token count instead of an answer; with --endpoint, the request
    ///
    /// A session is read and not changed. --output json has everything in one object.
    #[arg(long)]
    pub dry_run: bool,
}

/// Flag of the session that the prompt continues.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Session")]
pub struct SessionArgs {
    /// Make the prompt the next turn of the saved session NAME, which begins with its first turn
    ///
    /// `llmctl sessions` shows and manages them. A system prompt belongs to the first turn; one that is given again must be
    /// the same. Needs a chat template, so that --raw is refused with it.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["raw", "prefill_response", "batch", "list_prompts"])]
    pub session: Option<String>,
}

/// Flags of the output.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// Format of stdout: the text, one JSON object at the end, or an event per line (default: text)
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
            "words", "name", "prompt_file", "var", "list_prompts", "no_stdin", "dry_run", "prefill_response",
            "output", "no_stream", "fail_on_length", "mcp_config",
        ],
    )]
    pub batch: Option<PathBuf>,

    /// Append the results to this file (default: stdout)
    #[arg(long, value_name = "FILE", requires = "batch")]
    pub out: Option<PathBuf>,

    /// Continue an --out that a previous run left: answered rows are skipped, failed ones are tried again
    #[arg(long, requires = "out")]
    pub resume: bool,

    /// Record each answer and what decides it in a file of this folder, for `llmctl replay DIR`
    #[arg(long, value_name = "DIR", requires = "batch")]
    pub record: Option<PathBuf>,

    /// Answer rows that name another model too, with this one
    #[arg(long, requires = "batch", conflicts_with_all = ["words", "name", "prompt_file"], hide_short_help = true)]
    pub any_model: bool,
}

const LONG_HELP: &str = include_str!("long_help.txt").trim_ascii_end();

fn parse_variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("not of the form KEY=VALUE".to_owned()),
    }
}

/// Checks the flags before the model is loaded, and reads the output constraint.
pub fn prepare(args: &mut RunArgs, terminal: &Terminal) -> Result<(), CommandError> {
    check::flags(args)?;
    check::model(args, terminal)?;
    args.constraint.read(&mut args.prompt, &args.batch, terminal)
}

/// Runs the subcommand for one prompt; [`crate::cli::batch::run`] reads many.
pub fn run(mut args: RunArgs, terminal: &Terminal) -> Result<Exit, CommandError> {
    if args.prompt.list_prompts {
        return list_prompts(args.output.output.unwrap_or_default());
    }
    prepare(&mut args, terminal)?;
    let prompt = prompt::gather(&args.prompt, &args.words, terminal)?;
    check::images(&args, !prompt.images.is_empty())?;
    let system = system_prompt(args.prompt.system.as_ref(), args.prompt.system_file.as_ref())?;
    let mut rounds = ToolRounds::begin(&args, terminal)?;
    if !args.compare.is_empty() {
        return VariedRun { args: &args, prompt, system, tools: rounds.tools()?, terminal }.run();
    }
    let GatheredPrompt { text, images } = prompt;
    let (content, images) = (images::content(&images, text)?, images::set_of(&images));
    let turn = RunTurn { args: &args, next: Next { content, system, images }, rounds: &mut rounds, terminal };
    if let Some(name) = &args.session.session {
        return session::run(name, turn);
    }
    if let Some(choice) = EndpointChoice::of(&args.endpoint, &args.model, None) {
        return endpoint::run(&choice, None, turn);
    }
    if turn.rounds.is_on() {
        return session::run_unsaved(turn);
    }
    answer_once(turn)
}

/// Answers one prompt, or shows it with `--dry-run`: without a session, an endpoint and tools that are run.
fn answer_once(turn: RunTurn<'_, '_>) -> Result<Exit, CommandError> {
    let RunTurn { args, next, rounds, terminal } = turn;
    let tools = rounds.tools()?;
    if args.prompt.dry_run {
        let texts = texts_of(args, next.images.is_empty(), terminal)?;
        note_system(texts.chat_tokenizer(), next.system.as_deref(), terminal);
        let input = input(&texts, args, &tools, next, terminal)?;
        let rendered = rendered(&texts, &input, args.prompt.prefill_response.as_deref().unwrap_or_default())?;
        return dry_run(texts.info(), &rendered, args.output.output.unwrap_or_default(), terminal);
    }
    let llm = load_model(args, terminal)?;
    next.check_sight(&llm)?;
    note_system(llm.texts().chat_tokenizer(), next.system.as_deref(), terminal);
    let images = next.images.clone();
    let input = input(llm.texts(), args, &tools, next, terminal)?;
    let turn = TurnRequest { images, ..turn_request(&llm, args, tools, terminal)? };
    let plan = llm.planner().plan(&input, llm.texts().now(), &turn)?;
    let answer = RunAnswer { llm: &llm, turn: &turn, session: None, args, terminal };
    let exit = answer.on_stdout(plan, |plan| plan, &mut |_, _, _, _| Ok(None));
    llm.settle(terminal);
    exit
}

/// Says what becomes of a system prompt that the template does not print.
pub fn note_system(chat_tokenizer: &ChatTokenizer, system: Option<&str>, terminal: &Terminal) {
    if let Some(notice) = system.and_then(|_| chat_tokenizer.notice_of_system()) {
        terminal.note(notice);
    }
}

/// Returns the texts of the model; what images take in a prompt is known when the whole model is loaded.
fn texts_of(args: &RunArgs, is_text: bool, terminal: &Terminal) -> Result<PreparedTexts, CommandError> {
    match is_text {
        true => load::load_texts(&args.model, args.engine.resolve(args.session.session.is_some()), terminal),
        false => Ok(load_model(args, terminal)?.into_parts().0),
    }
}

fn load_model(args: &RunArgs, terminal: &Terminal) -> Result<Loaded, CommandError> {
    load::load(&args.model, args.engine.resolve(args.session.session.is_some()), terminal)
}

/// Turns an error of a parameter into one of the flag.
pub(super) fn flag_error(error: Error) -> CommandError {
    match error {
        Error::InvalidParameter { name, message } => {
            CommandError::usage(format!("--{}: {message}", name.replace('_', "-")))
        }
        other => other.into(),
    }
}

/// As [`flag_error`], for what only the engine can refuse, e.g. an id that is no token of this model. The prompt is no flag.
fn late_flag_error(error: CommandError) -> CommandError {
    match error.runtime() {
        Some(Error::InvalidParameter { name, message }) if *name != "prompt" => {
            flag_error(Error::InvalidParameter { name, message: message.clone() })
        }
        _ => error,
    }
}

/// Returns the system prompt of `--system` or `--system-file`.
pub fn system_prompt(text: Option<&String>, file: Option<&PathBuf>) -> Result<Option<String>, CommandError> {
    text.map_or_else(|| file.map(|path| read_file(path)).transpose(), |text| Ok(Some(text.clone())))
}

/// Answers of a model here in a run.
struct RunAnswer<'a> {
    llm: &'a Loaded,
    turn: &'a TurnRequest,
    session: Option<&'a EngineSessionName>,
    args: &'a RunArgs,
    terminal: &'a Terminal,
}

impl RunAnswer<'_> {
    /// Answers on stdout, as [`Report::answers`].
    fn on_stdout<T>(
        self,
        first: T,
        plan_of: impl Fn(&T) -> &TurnPlan,
        after: &mut AfterAnswer<'_, T, StdoutLock<'static>>,
    ) -> Result<Exit, CommandError> {
        let Self { llm, turn, session, args, terminal } = self;
        plan_of(&first).notices().for_each(|notice| terminal.note(notice));
        let sampling = turn.sampling();
        let prefill = args.prompt.prefill_response.as_deref().unwrap_or_default();
        let subject = ReportSubject::Model { texts: llm.texts(), sampling: &sampling, prefill };
        let report = Report::new(subject, ReportForm::of(args)?, Output::stdout(), terminal);
        let generate = |asked: &T, report: &mut Report<'_, _>, graceful: &Graceful| {
            let generation = AnswerGeneration { llm, turn, plan: plan_of(asked), session, graceful };
            generation.run(report).map_err(late_flag_error)
        };
        report.answers(first, &generate, after, |answer, signal| {
            let drawn = sampling.seed.is_none() && sampling.temperature > 0.0;
            conclude(llm, answer, drawn, &args.output, terminal);
            verdict(llm, answer, signal, args, terminal)
        })
    }
}

/// Notice of an answer that the user's own limit has ended.
const CUT_AT_LIMIT: &str = "(the answer was cut at --max-tokens)";

/// Returns the exit code of an answer, and warns of one that was cut.
fn verdict(llm: &Loaded, answer: &Answer, signal: Option<u8>, args: &RunArgs, terminal: &Terminal) -> Exit {
    let outcome = &answer.outcome;
    if outcome.usage.looped_reasoning {
        terminal.note(LOOPED);
    }
    if outcome.finish == Finish::Repetition {
        terminal
            .warn(format!("{STUCK}; run it again for another answer, with --temperature 0.8 if that is 0"));
    }
    match args.limits.max_tokens {
        _ if outcome.finish != Finish::MaxTokens => {}
        Some(_) => terminal.note(CUT_AT_LIMIT),
        None => terminal.warn(format!(
            "the answer was cut: {}'s answers are short, and this one was long or went round in circles; \
             --max-tokens N takes more",
            llm.info().name
        )),
    }
    let is_cut = matches!(
        outcome.finish,
        Finish::MaxTokens | Finish::ContextFull | Finish::Deadline | Finish::Repetition
    );
    match signal {
        Some(number) => Exit::Signal(number),
        None if is_cut && args.constraint.source.is_some() => {
            let flag = args.constraint.flag();
            terminal.warn(format!("the answer was cut before it satisfied {flag}"));
            Exit::Cut
        }
        None if is_cut && args.output.fail_on_length => Exit::Cut,
        None => Exit::Success,
    }
}

/// Reports on stderr after the answer. If the seed was `drawn`, it is needed to repeat the run.
fn conclude(llm: &Loaded, answer: &Answer, drawn: bool, args: &OutputArgs, terminal: &Terminal) {
    let (info, outcome, started) = (llm.info(), &answer.outcome, answer.started.as_ref());
    if outcome.finish == Finish::ContextFull {
        terminal.warn(format!("the answer was cut: the context of {} tokens is full", info.context_tokens));
    }
    if args.stats {
        terminal.report(&report::stats(outcome, started, llm.texts()));
        return;
    }
    if let Some(started) = started {
        terminal.detail(&report::reuse(started, llm.texts()));
    }
    if drawn && args.output.unwrap_or_default() == OutputFormat::Text {
        terminal.detail(&format!("seed {}", outcome.seed));
    }
}

/// `--dry-run`: the prompt as the model would get it.
fn dry_run(
    info: &ModelInfo,
    rendered: &Rendered,
    format: OutputFormat,
    terminal: &Terminal,
) -> Result<Exit, CommandError> {
    let (count, context) = (rendered.tokens.len(), info.context_tokens);
    let object = json!({
        "schema": "llmctl.dry-run.v1",
        "model": info.name,
        "prompt": rendered.text,
        "prompt_tokens": count,
        "tokens": rendered.tokens,
        "context": {"size": context},
    });
    let text = match format {
        OutputFormat::Text => rendered.text.clone(),
        OutputFormat::Json => format!("{object:#}"),
        OutputFormat::Jsonl => object.to_string(),
    };
    let line_end = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    print(&(text + line_end))?;
    if format == OutputFormat::Text {
        terminal.report(&format!("{count} tokens of a context of {context}"));
    }
    if count >= context {
        return Err(Error::PromptTooLong { prompt_tokens: count, context_tokens: context }.into());
    }
    Ok(Exit::Success)
}

/// `--list-prompts`.
fn list_prompts(format: OutputFormat) -> Result<Exit, CommandError> {
    let width = prompt::STORED.iter().map(|prompt| prompt.name.len()).max().unwrap_or(0);
    const SCHEMA: &str = "llmctl.prompts.v1";
    let object = |prompt: &prompt::StoredPrompt| json!({"name": prompt.name, "description": prompt.description(), "text": prompt.text()});
    let lines: Vec<_> = match format {
        OutputFormat::Text => {
            let line =
                |prompt: &prompt::StoredPrompt| format!("{:width$}  {}", prompt.name, prompt.description());
            prompt::STORED.iter().map(line).collect()
        }
        OutputFormat::Json => {
            let all: Vec<_> = prompt::STORED.iter().map(object).collect();
            vec![format!("{:#}", json!({"schema": SCHEMA, "prompts": all}))]
        }
        OutputFormat::Jsonl => {
            let line = |prompt| with_schema(SCHEMA, object(prompt)).to_string();
            prompt::STORED.iter().map(line).collect()
        }
    };
    print(&(lines.join("\n") + "\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_refusals_name_flags_too() {
        let late = |name| {
            let message = "is wrong".to_owned();
            late_flag_error(Error::InvalidParameter { name, message }.into()).to_string()
        };
        assert_eq!(late("logit_bias"), "--logit-bias: is wrong");
        assert_eq!(late("prompt"), "prompt: is wrong", "--prompt names a stored one");
        assert_eq!(
            late_flag_error(Error::PromptEmpty.into()).kind,
            CommandError::from(Error::PromptEmpty).kind
        );
    }
}
