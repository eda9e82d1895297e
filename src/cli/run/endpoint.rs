//! `run` with `--endpoint`, or in a session that an endpoint has answered: the prompt goes to a server that takes messages.

use serde_json::Value;

use super::RunArgs;
use super::answer::Generated;
use super::message_answer::{EndpointGenerated, MessageGeneration};
use super::next_turn::{Next, check_system, messages};
use super::report::{Report, ReportForm, ReportSubject, endpoint_stats};
use crate::cli::endpoint::request::EndpointRequest;
use crate::cli::endpoint::{ChatEndpoint, EndpointChoice, check_flags};
use crate::cli::error::{CommandError, Exit};
use crate::cli::output::{Output, OutputError};
use crate::cli::report::counted;
use crate::cli::sessions;
use crate::cli::signal::Graceful;
use crate::cli::terminal::Terminal;
use crate::runtime::load::GenerationDefaults;
use crate::runtime::session::store::{SavedSession, SessionName, SessionStore, SessionWriter};
use crate::runtime::turn::session_chat::RecordedAnswer;
use crate::runtime::turn::{Answer, Finished, PromptedTurn, SessionChat};
use crate::runtime::{Finish, GrammarSource};
use crate::template::{Message, ToolChoice};

/// Answers one prompt, or shows with `--dry-run` what would be sent.
pub fn run(
    choice: &EndpointChoice,
    args: &RunArgs,
    next: Next,
    terminal: &Terminal,
) -> Result<Exit, CommandError> {
    check_flags(&args.endpoint)?;
    let endpoint = choice.connect(&args.endpoint, terminal)?;
    let messages = messages(&SavedSession::new(&endpoint.fingerprint(), 0), next);
    let asked = EndpointExtras::of(args)?;
    let request = asked.request(&messages, args)?;
    if args.prompt.dry_run {
        return dry_run(&endpoint, &request);
    }
    answer(&endpoint, &request, args, &mut |_| Ok(()), terminal)
}

/// Where the turns of a session are, or will be.
pub struct SessionPlace<'a> {
    pub name: &'a SessionName,
    pub store: &'a SessionStore,
    /// `None` for a session that begins.
    pub opened: Option<SessionWriter>,
}

/// Answers the next turn of a session.
pub fn run_in_session(
    choice: &EndpointChoice,
    place: SessionPlace<'_>,
    args: &RunArgs,
    next: Next,
    terminal: &Terminal,
) -> Result<Exit, CommandError> {
    check_flags(&args.endpoint)?;
    let endpoint = choice.connect(&args.endpoint, terminal)?;
    let (model, is_new) = (endpoint.fingerprint(), place.opened.is_none());
    let writer = match place.opened {
        Some(writer) => writer,
        None => place.store.open_or_create(place.name, &model).map_err(sessions::explain)?,
    };
    let mut session_chat = SessionChat::resume(writer, model);
    let exit = take_turn(&endpoint, place.name, &mut session_chat, args, next, terminal);
    if is_new {
        let _ = session_chat.remove_if_empty(); // an empty session is listed, and harms nobody
    }
    exit
}

fn take_turn(
    endpoint: &ChatEndpoint,
    name: &SessionName,
    session_chat: &mut SessionChat,
    args: &RunArgs,
    next: Next,
    terminal: &Terminal,
) -> Result<Exit, CommandError> {
    check_system(session_chat.saved(), &next)?;
    match session_chat.saved().turns.len() {
        0 => terminal.note(format!("new session {name}")),
        count => terminal.note(format!("continuing session {name} ({})", counted(count, "turn"))),
    }
    session_chat.notices().iter().for_each(|notice| terminal.note(notice));
    let added = messages(session_chat.saved(), next);
    let turn = session_chat.addressed(session_chat.followed_by(added).messages);
    let asked = EndpointExtras::of(args)?;
    let messages = turn.messages().to_vec();
    let request = asked.request(&messages, args)?;
    let mut turn = Some(turn);
    let mut keep = |answer: &Answer| {
        let Some(turn) = turn.take() else { return Ok(()) };
        keep_turn(session_chat, turn, answer, args, (name, terminal))
    };
    answer(endpoint, &request, args, &mut keep, terminal)
}

fn keep_turn(
    session_chat: &mut SessionChat,
    turn: PromptedTurn,
    answer: &Answer,
    args: &RunArgs,
    (name, terminal): (&SessionName, &Terminal),
) -> Result<(), CommandError> {
    let sampling = args.sampling.resolve(&GenerationDefaults::default()).0;
    let is_cut = answer.outcome.finish == Finish::Cancelled;
    match session_chat.record(turn, RecordedAnswer::of(answer, sampling))? {
        Finished::Kept if is_cut => {
            terminal.note(format!("session {name}: the answer so far is kept as a cancelled turn"));
        }
        Finished::Kept => {}
        Finished::Empty => terminal.note(format!("session {name}: nothing was answered, so no turn is kept")),
    }
    Ok(())
}

/// What the flags ask for beside the messages.
struct EndpointExtras {
    tools: Vec<Value>,
    constraint: Option<GrammarSource>,
}

impl EndpointExtras {
    fn of(args: &RunArgs) -> Result<Self, CommandError> {
        let tools = args.prompt.tools()?;
        if !tools.inputs.is_empty() || tools.choice != ToolChoice::Auto {
            return Err(CommandError::usage(
                "--tools: an endpoint takes functions only, without grammars of their own",
            ));
        }
        Ok(Self { tools: tools.definitions, constraint: args.constraint.source.clone() })
    }

    fn request<'a>(
        &'a self,
        messages: &'a [Message],
        args: &'a RunArgs,
    ) -> Result<EndpointRequest<'a>, CommandError> {
        Ok(EndpointRequest {
            messages,
            tools: &self.tools,
            constraint: self.constraint.as_ref(),
            sampling: &args.sampling,
            limits: &args.limits,
            think: args.prompt.think()?,
            seed: None,
        })
    }
}

/// Answers on stdout. `keep` gets the answer before it is reported as done.
fn answer(
    endpoint: &ChatEndpoint,
    request: &EndpointRequest<'_>,
    args: &RunArgs,
    keep: &mut dyn FnMut(&Answer) -> Result<(), CommandError>,
    terminal: &Terminal,
) -> Result<Exit, CommandError> {
    let form = ReportForm {
        format: args.output.output.unwrap_or_default(),
        stream: !args.output.no_stream,
        logprobs: false,
        shows_reasoning: request.think.is_shown,
    };
    let mut report =
        Report::new(ReportSubject::Endpoint(endpoint, request), form, Output::stdout(), terminal);
    let graceful = Graceful::begin();
    let generation = MessageGeneration { endpoint, request, graceful: &graceful };
    let generated = generation.run(&mut report).and_then(|generated| {
        keep(&generated.generated.answer)?;
        Ok(generated)
    });
    let generated = generated.inspect_err(|error| report.fail(error.kind.word(), &error.to_string()))?;
    let EndpointGenerated { generated: Generated { answer, signal, is_reader_gone }, failure, notice } =
        generated;
    if let Some(failure) = failure {
        report.fail(failure.kind.word(), &failure.to_string());
        return Err(failure);
    }
    if is_reader_gone {
        return Ok(signal.map_or(Exit::Success, Exit::Signal));
    }
    if let Err(OutputError::Failed(error)) = report.finish(&answer) {
        return Err(error);
    }
    drop(report);
    notice.iter().for_each(|notice| terminal.warn(notice));
    if args.output.stats {
        terminal.report(&endpoint_stats(&answer.outcome, endpoint));
    }
    Ok(verdict(&answer, signal, args, terminal))
}

/// Returns the exit code of an answer, and warns of one that is cut or is not what was asked for.
fn verdict(answer: &Answer, signal: Option<u8>, args: &RunArgs, terminal: &Terminal) -> Exit {
    let is_cut = answer.outcome.finish == Finish::MaxTokens;
    let is_json =
        matches!(args.constraint.source, Some(GrammarSource::JsonSchema(_) | GrammarSource::JsonObject));
    let keeps_form = !is_json || serde_json::from_str::<Value>(&answer.content).is_ok();
    if let Some(number) = signal {
        return Exit::Signal(number);
    }
    if is_cut && args.limits.max_tokens.is_none() {
        terminal.warn("the answer was cut at the endpoint's own limit; --max-tokens N may take more");
    }
    if args.constraint.source.is_some() && (is_cut || !keeps_form) {
        let flag = args.constraint.flag();
        terminal.warn(match is_cut {
            true => format!("the answer was cut before it satisfied {flag}"),
            false => format!("the endpoint did not keep to {flag}: the answer is no JSON"),
        });
        return Exit::Cut;
    }
    if is_cut && args.output.fail_on_length { Exit::Cut } else { Exit::Success }
}

/// `--dry-run`: the request's body.
fn dry_run(endpoint: &ChatEndpoint, request: &EndpointRequest<'_>) -> Result<Exit, CommandError> {
    let body = Value::Object(endpoint.body(request)?);
    match Output::stdout().line(&format!("{body:#}")) {
        Err(OutputError::Failed(error)) => Err(error),
        Err(OutputError::Closed) | Ok(()) => Ok(Exit::Success),
    }
}
