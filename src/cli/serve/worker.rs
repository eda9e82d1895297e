//! `llmctl worker`: an engine behind standard input and output, for programs that speak the worker protocol.
//!
//! Standard output carries only the protocol, from the first byte on. The input is read from the first
//! moment, so that a worker whose parent has died ends even while it loads.

use std::{io, process};

use clap::Args;

use super::capacity::CapacityArgs;
use crate::cli::error::{CommandError, Exit, Kind};
use crate::cli::flags::args::{EngineArgs, ModelArgs};
use crate::cli::model::load;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::signal::Graceful;
use llmctl_base::Error;
use llmctl_engine::worker::protocol::{ErrorCode, ErrorLine, ModelId, Reply, ReplyBody, write_line};
use llmctl_engine::worker::service::{CallInbox, ShutdownCause, WorkerContext, WorkerExit};

/// Answer requests on standard input, one JSON object a line (for programs)
///
/// An engine in a process of its own. The protocol is that of docs/worker-protocol.md: requests with an `id` run together,
/// those without one after the other, as clients of ExecuTorch's worker expect.
#[derive(Debug, Clone, Default, Args)]
#[command(
    after_long_help = LONG_HELP,
    // A worker never downloads, so the flags for it are accepted from the parent and not shown.
    mut_arg("yes", |arg| arg.hide(true)),
    mut_arg("offline", |arg| arg.hide(true))
)]
pub struct WorkerArgs {
    #[command(flatten)]
    pub model: ModelArgs,

    #[command(flatten)]
    pub capacity: CapacityArgs,

    #[command(flatten)]
    pub engine: EngineArgs,
}

const LONG_HELP: &str = include_str!("worker_help.txt").trim_ascii_end();

/// Runs the subcommand.
pub fn run(args: WorkerArgs, terminal: &Terminal) -> Result<Exit, CommandError> {
    let reception = CallInbox::open(io::stdin(), || process::exit(i32::from(Exit::Success.code())))
        .map_err(CommandError::io("reading the input"))?;
    let worker = load_worker(&args, terminal).inspect_err(|error| {
        // The parent closes the input when it reads the error line, which must not change the exit code.
        reception.stay();
        say_why(error);
    })?;
    let graceful = Graceful::begin();
    let stopper = reception.stopper();
    graceful.on_signal(move |_| stopper.stop()).map_err(CommandError::io("waiting for signals"))?;
    let ended = reception.serve(worker, io::stdout()).map_err(CommandError::io("starting"))?;
    conclude(ended, terminal)
}

fn load_worker(args: &WorkerArgs, terminal: &Terminal) -> Result<WorkerContext, CommandError> {
    let options = args.capacity.options(&args.engine);
    let mut model = args.model.clone();
    // The parent has the files; a worker has no terminal to ask on.
    model.fetch.offline = true;
    let (texts, engine) = load::load(&model, options, terminal)?.into_parts();
    let fingerprint = texts.fingerprint().fingerprint.clone();
    let model = ModelId { name: texts.info().name.clone(), fingerprint };
    Ok(WorkerContext { engine, tokenizer: texts.chat_tokenizer().tokenizer().clone(), model })
}

/// Reports the error to the parent, which waits for a line.
fn say_why(error: &CommandError) {
    let detail = error.runtime().and_then(|error| serde_json::to_value(error).ok());
    let code = Some(ErrorCode::LoadFailed);
    let line = ErrorLine { error: error.to_string(), code, detail, session_id: None };
    // A parent that does not read gets the exit code.
    let _ = write_line(&mut io::stdout(), &Reply { id: None, answer: ReplyBody::Error(line) });
}

fn conclude(ended: WorkerExit, terminal: &Terminal) -> Result<Exit, CommandError> {
    if !ended.is_saved && !matches!(ended.why, ShutdownCause::EngineGone) {
        terminal.warn("the disk is slow: not all KV was saved, and the next turns compute the rest again");
    }
    ended.notices.iter().for_each(|notice| terminal.warn(notice));
    match ended.why {
        ShutdownCause::Input
        | ShutdownCause::Shutdown(_)
        | ShutdownCause::Stopped
        | ShutdownCause::ReaderGone => Ok(Exit::Success),
        ShutdownCause::OutputFailed(error) => Err(CommandError::io("writing to standard output")(error)),
        ShutdownCause::EngineGone => Err(CommandError::new(Kind::Failure, Error::EngineGone)),
    }
}
