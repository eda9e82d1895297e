//! Command line and terminal. [`main`] parses, dispatches and turns the result into an exit code; each
//! subcommand is one file with its arguments and one function. Nothing outside `cli` knows flags, environment
//! variables, streams or exit codes.

pub mod batch;
pub mod bench;
pub mod chat;
pub mod completions;
pub mod config;
pub mod declared_tools;
pub mod doctor;
pub mod embed;
pub mod endpoint;
pub mod error;
pub mod flags;
#[cfg(test)]
mod guide_facts;
pub(crate) mod images;
pub mod launch;
pub mod man;
pub mod mcp;
pub mod model;
pub mod places;
pub mod replay;
pub mod run;
#[cfg(test)]
mod script;
pub mod serve;
pub mod sessions;
pub mod template_cmd;
pub mod terminal;
mod think;
pub mod warm;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use config::Config;
use config::variables::with_variables;
use error::{CommandError, Exit, Kind};
use flags::args::{ColorWhen, GlobalArgs, ModelArgs};
use flags::origin::Origins;
pub use flags::variable;
use flags::{FlagShape, ScalarType};
use places::Places;
use terminal::Terminal;
use terminal::output::OutputError;

/// Run large language models from the terminal
#[derive(Debug, Parser)]
#[command(
    name = "llmctl",
    version,
    subcommand_required = true,
    after_help = "`llmctl help COMMAND` has examples, exit codes, files and environment.",
    after_long_help = LONG_HELP,
)]
pub struct Cli {
    #[command(flatten)]
    pub global: GlobalArgs,

    #[command(subcommand)]
    pub command: CliCommand,
}

/// Subcommands. The doc comment of each is its line in the help.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    Run(Box<run::RunArgs>),
    Chat(Box<chat::ChatArgs>),
    Serve(Box<serve::ServeArgs>),
    Worker(Box<serve::worker::WorkerArgs>),
    Launch(Box<launch::LaunchArgs>),
    Bench(Box<bench::BenchArgs>),
    Embed(Box<embed::EmbedArgs>),
    Pull(model::pull::PullArgs),
    #[command(alias = "list")]
    Models(model::models::ModelsArgs),
    Quantize(model::quantize::QuantizeArgs),
    Sessions(sessions::SessionsArgs),
    Replay(Box<replay::ReplayArgs>),
    Warm(Box<warm::WarmArgs>),
    Template(template_cmd::TemplateArgs),
    Config(config::config_cmd::ConfigArgs),
    Doctor(doctor::DoctorArgs),
    Completions(completions::CompletionsArgs),
    Man(man::ManArgs),
}

impl CliCommand {
    /// Returns the flags of the model that the command loads.
    fn model(&mut self) -> Option<&mut ModelArgs> {
        match self {
            Self::Run(args) => Some(&mut args.model),
            Self::Chat(args) => Some(&mut args.model),
            Self::Serve(args) => Some(&mut args.model),
            Self::Worker(args) => Some(&mut args.model),
            Self::Launch(args) => Some(&mut args.model),
            Self::Replay(args) => Some(&mut args.model),
            Self::Warm(args) => Some(&mut args.model),
            Self::Sessions(args) => match &mut args.command {
                Some(sessions::SessionsCommand::Replay(args)) => Some(&mut args.model),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns whether it helps to repair a broken configuration, or does not use one.
    fn works_without_config(&self) -> bool {
        matches!(self, Self::Config(_) | Self::Doctor(_) | Self::Completions(_) | Self::Man(_))
    }
}

const LONG_HELP: &str = include_str!("long_help.txt").trim_ascii_end();

/// Message for a command line without arguments.
const FIRST_STEPS: &str = "\
llmctl runs large language models on this machine. Next:
  llmctl chat                             talk; without a model it offers some
  llmctl run \"How do I save a session?\"   one answer, from the built-in model
  llmctl serve --model ORG/REPO           API and page at http://127.0.0.1:8484
  llmctl help                             all commands";

/// Runs the program. `args` includes the program's name.
pub fn main(args: Vec<OsString>) -> ExitCode {
    if completions::answer(&args) {
        return ExitCode::SUCCESS;
    }
    let color = peek_color(&args);
    if args.len() <= 1 {
        Terminal::new(color, 0, false).note(FIRST_STEPS);
        return ExitCode::from(Exit::from(Kind::Usage).code());
    }
    let result = std::panic::catch_unwind(|| parse_and_run(args, color));
    // The hook has printed the panic's message.
    let exit = result.unwrap_or_else(|_| {
        let bug = Kind::Bug.error("llmctl stopped at a bug of its own");
        Terminal::new(color, 0, false)
            .error(&bug.hint("please report it with the command and the lines above"));
        Exit::from(Kind::Bug)
    });
    ExitCode::from(exit.code())
}

fn parse_and_run(args: Vec<OsString>, color: ColorWhen) -> Exit {
    let places = Places::from_environment();
    let Parsed { cli, config, command, origins } = match parse(args, color, &places) {
        Ok(parsed) => parsed,
        Err(verdict) => return print_clap(&verdict, color),
    };
    let global = &cli.global;
    let terminal = Terminal::new(global.color.unwrap_or(color), global.verbose, global.quiet);
    terminal.start_log();
    terminal::signal::install();
    if warns_of_variables(&cli.command) {
        config::variables::unknown(&command).iter().for_each(|warning| terminal.warn(warning));
    }
    let context =
        CommandContext { config: &config, places: &places, terminal: &terminal, definition: &command };
    let begun = sessions::encryption::begin(&cli.global, &terminal);
    begun.and_then(|()| dispatch(cli.command, context)).unwrap_or_else(|error| {
        let error = origins.name(error);
        terminal.error(&error);
        Exit::from(error.kind)
    })
}

/// Returns whether to warn of unknown variables. Not in a worker, whose parent has done so, in `doctor`,
/// which reports them itself, or for scripts and manual pages.
fn warns_of_variables(command: &CliCommand) -> bool {
    !matches!(
        command,
        CliCommand::Worker(_) | CliCommand::Doctor(_) | CliCommand::Completions(_) | CliCommand::Man(_)
    )
}

/// Settings that commands use beside their arguments.
#[derive(Clone, Copy)]
pub struct CommandContext<'a> {
    pub config: &'a Config,
    pub places: &'a Places,
    pub terminal: &'a Terminal,
    /// The definition of the command line, with the variables in force.
    pub definition: &'a clap::Command,
}

fn dispatch(mut command: CliCommand, context: CommandContext<'_>) -> Result<Exit, CommandError> {
    let CommandContext { config, places, terminal, .. } = context;
    if !command.works_without_config() {
        config.check()?;
    }
    // Checks that need no file but the configuration's, before a model is loaded.
    if let Some(model) = command.model() {
        model::load::check_machine(model)?;
    }
    match command {
        CliCommand::Run(args) => match args.batch.batch {
            Some(_) if args.endpoint.url().is_some() => {
                let error = CommandError::usage("--batch: has no meaning with an endpoint");
                Err(error.hint("--endpoint none answers it with a model here"))
            }
            Some(_) => batch::run(*args, terminal),
            None => run::run(*args, terminal),
        },
        CliCommand::Serve(args) => serve::run(*args, terminal, places),
        CliCommand::Worker(args) => serve::worker::run(*args, terminal),
        CliCommand::Launch(args) => launch::run(*args, terminal, places),
        CliCommand::Chat(args) => chat::run(*args, terminal, places),
        CliCommand::Embed(args) => embed::run(*args, config, terminal),
        CliCommand::Bench(args) => bench::run(*args, terminal),
        CliCommand::Pull(args) => model::pull::run(args, context),
        CliCommand::Models(args) => model::models::run(args, context),
        CliCommand::Quantize(args) => model::quantize::run(args, context),
        CliCommand::Sessions(args) => sessions::run(args, places, |args, store, format| {
            replay::replay_session(args, store, format, terminal)
        }),
        CliCommand::Replay(args) => replay::run(&args, terminal),
        CliCommand::Warm(args) => warm::run(&args, context),
        CliCommand::Template(args) => template_cmd::run(args, context),
        CliCommand::Config(args) => config::config_cmd::run(args, context),
        CliCommand::Doctor(args) => doctor::run(args, context),
        CliCommand::Completions(args) => completions::run(args, self::command()),
        CliCommand::Man(args) => man::run(args, self::command()),
    }
}

/// Returns the command line's definition, with an `LLMCTL_<FLAG>` variable for every flag of every
/// subcommand.
pub fn command() -> clap::Command {
    with_variables(numbers_may_be_negative(Cli::command())).mut_subcommands(points_to_short_help)
}

/// Begins a long help with the way to the short one, where that has fewer options.
fn points_to_short_help(command: clap::Command) -> clap::Command {
    let is_longer = command.get_arguments().any(clap::Arg::is_hide_short_help_set);
    let line = format!("The options that are used most: `llmctl {} -h`", command.get_name());
    if is_longer { command.before_long_help(line) } else { command }
}

/// Makes `--seed -1` a wrong value instead of an unknown flag.
fn numbers_may_be_negative(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| match FlagShape::of(&arg) {
        FlagShape::One(ScalarType::Integer | ScalarType::Number | ScalarType::TextOrNumber)
            if arg.get_long().is_some() =>
        {
            arg.allow_negative_numbers(true)
        }
        _ => arg,
    });
    command.mut_subcommands(numbers_may_be_negative)
}

/// A valid command line.
struct Parsed {
    cli: Cli,
    config: Config,
    /// The definition with the variables in force.
    command: clap::Command,
    origins: Origins,
}

/// Parses twice: the given arguments, then the same with the configuration files' values as defaults.
fn parse(args: Vec<OsString>, color: ColorWhen, places: &Places) -> Result<Parsed, clap::Error> {
    let mut base = command().color(match color {
        ColorWhen::Auto => clap::ColorChoice::Auto,
        ColorWhen::Always => clap::ColorChoice::Always,
        ColorWhen::Never => clap::ColorChoice::Never,
    });
    let mut command = base.clone();
    let mut parsed = command.try_get_matches_from_mut(&args);
    if parsed.as_ref().is_err_and(|error| error.kind() == ErrorKind::ArgumentConflict) {
        base = config::variables::yield_to(base, &args);
        command = base.clone();
        parsed = command.try_get_matches_from_mut(&args);
    }
    let given = parsed.map_err(|error| config::explain::explain(error, &command, &args))?;
    let named = given.get_one::<std::path::PathBuf>("config");
    let (config, configured) =
        Config::read(named.map(|path| path.as_path()), places, &base).apply(base.clone(), &given);
    let matches = configured.try_get_matches_from(&args)?;
    let mut cli = Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
    complete(&mut cli, &matches, &config);
    let origins = config.origins(&base, &given);
    Ok(Parsed { cli, config, command: base, origins })
}

/// Fills in what only the whole command line and the files tell.
fn complete(cli: &mut Cli, matches: &clap::ArgMatches, config: &Config) {
    if let Some(model) = cli.command.model() {
        model.is_named = names(matches, "model");
        model.aliases = config.aliases();
    }
    let is_system_given = ["system", "system_file"].into_iter().any(|id| is_given(matches, id));
    match &mut cli.command {
        CliCommand::Run(args) => {
            args.prompt.is_system_given = is_system_given;
            args.model.connects = args.connect.connect;
            note_endpoint(&mut args.endpoint, matches);
        }
        CliCommand::Chat(args) => {
            args.prompt.is_system_given = is_system_given;
            args.model.connects = args.connect.connect;
            note_endpoint(&mut args.endpoint, matches);
        }
        CliCommand::Serve(args) => {
            let ids = serve::embedder::WITHOUT_MEANING.split(' ');
            args.embedding.beside = ids.filter(|id| is_given(matches, id)).collect();
            args.fleet.models = all_values(matches, "model");
            args.isolation.passed =
                matches.subcommand().map_or(Vec::new(), |(_, own)| serve::workers::passed(own));
        }
        CliCommand::Bench(args) => args.aliases = config.aliases(),
        _ => {}
    }
}

/// Returns where the innermost subcommand's argument comes from.
fn source_of(matches: &clap::ArgMatches, id: &str) -> Option<ValueSource> {
    let (_, mut given) = matches.subcommand()?;
    while let Some((_, below)) = given.subcommand() {
        given = below;
    }
    given.try_contains_id(id).is_ok().then(|| given.value_source(id)).flatten()
}

/// Returns whether a flag or a variable gives this value; a configuration file only sets a default.
fn names(matches: &clap::ArgMatches, id: &str) -> bool {
    matches!(source_of(matches, id), Some(ValueSource::CommandLine | ValueSource::EnvVariable))
}

/// Returns all values of the subcommand's argument, wherever they are from.
fn all_values(matches: &clap::ArgMatches, id: &str) -> Vec<String> {
    let values = matches.subcommand().and_then(|(_, below)| below.get_many::<String>(id));
    values.into_iter().flatten().cloned().collect()
}

/// Returns whether the command line gives this value.
fn is_given(matches: &clap::ArgMatches, id: &str) -> bool {
    source_of(matches, id) == Some(ValueSource::CommandLine)
}

/// Notes how the endpoint was given, and the flags beside it that have no meaning there.
fn note_endpoint(endpoint: &mut flags::args::EndpointArgs, matches: &clap::ArgMatches) {
    let is_given = |id: &str| is_given(matches, id);
    endpoint.is_named = names(matches, "endpoint");
    endpoint.is_key_named = ["endpoint_key_env", "endpoint_key_file"].into_iter().any(is_given);
    let beside = endpoint::WITHOUT_MEANING.split(' ');
    endpoint.beside = beside.filter(|id| is_given(id)).collect();
}

/// Finds `--color` before parsing, so that help and errors of the parser follow it.
fn peek_color(args: &[OsString]) -> ColorWhen {
    let words: Vec<_> = args.iter().map(|arg| arg.to_string_lossy()).take_while(|arg| arg != "--").collect();
    let given = words.iter().enumerate().rev().find_map(|(at, word)| match word.strip_prefix("--color") {
        Some("") => words.get(at + 1).map(|value| value.to_string()),
        Some(rest) => rest.strip_prefix('=').map(str::to_owned),
        None => None,
    });
    let given = given.or_else(|| std::env::var("LLMCTL_COLOR").ok());
    match given.as_deref() {
        Some("always") => ColorWhen::Always,
        Some("never") => ColorWhen::Never,
        _ => ColorWhen::Auto,
    }
}

/// Prints help and version to stdout as a success, and usage errors to stderr.
fn print_clap(verdict: &clap::Error, color: ColorWhen) -> Exit {
    let printed = verdict.print().and_then(|()| std::io::stdout().flush());
    if verdict.use_stderr() {
        return Exit::from(Kind::Usage);
    }
    match printed.map_err(|error| OutputError::new("standard output", error)) {
        Err(OutputError::Failed(error)) => {
            Terminal::new(color, 0, false).error(&error);
            Exit::from(error.kind)
        }
        Err(OutputError::Closed) | Ok(()) => Exit::Success,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_well_formed() {
        command().debug_assert();
    }

    #[test]
    fn every_flag_has_a_variable() {
        fn check(command: &clap::Command) {
            for arg in command.get_arguments() {
                if let Some(name) = variable(arg) {
                    let env = arg.get_env().map(|env| env.to_string_lossy().into_owned());
                    assert_eq!(
                        env.as_deref(),
                        Some(name.as_str()),
                        "{} {}",
                        command.get_name(),
                        arg.get_id()
                    );
                }
            }
            command.get_subcommands().for_each(check);
        }
        check(&command());
    }

    #[test]
    fn color_is_known_before_the_parse() {
        let peek = |words: &[&str]| peek_color(&words.iter().map(OsString::from).collect::<Vec<_>>());
        assert_eq!(peek(&["llmctl", "run", "--color", "always"]), ColorWhen::Always);
        assert_eq!(peek(&["llmctl", "--color=always", "--color=never"]), ColorWhen::Never);
        assert_eq!(peek(&["llmctl", "run", "--", "--color=always"]), ColorWhen::Auto);
        assert_eq!(peek(&["llmctl", "--color"]), ColorWhen::Auto);
    }
}
