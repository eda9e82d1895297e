//! `run` with `--endpoint`, or in a session that an endpoint has answered: the prompt goes to a server that takes messages.

use serde_json::{Value, json};

use super::answer::Generated;
use super::message_answer::{EndpointGenerated, MessageGeneration};
use super::next_turn::{Next, SessionPlace, check_system, messages, note_kept};
use super::report::{Report, ReportForm, ReportSubject, endpoint_stats};
use super::{OutputFormat, RunArgs};
use crate::cli::endpoint::request::EndpointRequest;
use crate::cli::endpoint::{ChatEndpoint, EndpointChoice, check_flags, unavailable};
use crate::cli::error::{CommandError, Exit};
use crate::cli::output::{Output, OutputError};
use crate::cli::report::counted;
use crate::cli::signal::Graceful;
use crate::cli::terminal::Terminal;
use crate::runtime::load::GenerationDefaults;
use crate::runtime::session::store::{SavedSession, SessionName};
use crate::runtime::turn::session_chat::RecordedAnswer;
use crate::runtime::turn::{Answer, PromptedTurn, SessionChat};
use crate::runtime::{Finish, GrammarSource};
use crate::template::{Message, ToolChoice};

/// Answers one prompt, or shows with `--dry-run` what would be sent.
pub fn run(
    choice: &EndpointChoice,
    args: &RunArgs,
    next: Next,
    terminal: &Terminal,
) -> Result<Exit, CommandError> {
    if args.prompt.dry_run {
        return preview(choice, None, args, next, terminal);
    }
    check_flags(&args.endpoint)?;
    let endpoint = choice.connect(&args.endpoint, terminal)?;
    let messages = messages(&SavedSession::new(&endpoint.fingerprint(), 0), next);
    let asked = EndpointExtras::of(args)?;
    answer(&endpoint, &asked.request(&messages, args)?, args, &mut |_| Ok(()), terminal)
}

/// `--dry-run`: the request with the whole conversation, of which nothing is sent.
pub fn preview(
    choice: &EndpointChoice,
    saved: Option<SavedSession>,
    args: &RunArgs,
    next: Next,
    terminal: &Terminal,
) -> Result<Exit, CommandError> {
    check_flags(&args.endpoint)?;
    if let Some(saved) = &saved {
        check_system(saved, &next)?;
    }
    let endpoint = choice.connect(&args.endpoint, terminal)?;
    let model = endpoint.fingerprint();
    let session_chat = match saved {
        Some(saved) => SessionChat::look_at(saved, model),
        None => SessionChat::new(model),
    };
    let messages = session_chat.followed_by(messages(session_chat.saved(), next)).messages;
    let asked = EndpointExtras::of(args)?;
    dry_run(&endpoint, &asked.request(&messages, args)?, args.output.output.unwrap_or_default())
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
    place.with_chat(endpoint.fingerprint(), |name, session_chat| {
        take_turn(&endpoint, name, session_chat, args, next, terminal)
    })
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
    let finished = session_chat.record(turn, RecordedAnswer::of(answer, sampling))?;
    note_kept(finished, is_cut, name, terminal);
    Ok(())
}

/// Tools and constraint of a request.
struct EndpointExtras {
    tools: Vec<Value>,
    constraint: Option<GrammarSource>,
}

impl EndpointExtras {
    /// Refuses what changes an answer and has no place in a request; a variable or a configuration file may have set it.
    fn of(args: &RunArgs) -> Result<Self, CommandError> {
        let unknown_there = [
            (args.prompt.raw, "--raw"),
            (args.prompt.prefill_response.is_some(), "--prefill-response"),
            (args.output.logprobs.is_some(), "--logprobs"),
        ];
        if let Some((_, flag)) = unknown_there.into_iter().find(|(is_set, _)| *is_set) {
            return Err(unavailable(flag));
        }
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
    let (subject, form) = (ReportSubject::Endpoint(endpoint, request), ReportForm::of(args)?);
    let mut report = Report::new(subject, form, Output::stdout(), terminal);
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
    // An answer that calls a tool has no text yet that could be JSON.
    let keeps_form =
        !is_json || !answer.tool_calls.is_empty() || serde_json::from_str::<Value>(&answer.content).is_ok();
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

/// Writes the request's body, for people or with its address in one line of JSON.
fn dry_run(
    endpoint: &ChatEndpoint,
    request: &EndpointRequest<'_>,
    format: OutputFormat,
) -> Result<Exit, CommandError> {
    let body = Value::Object(endpoint.body(request)?);
    let text = match format {
        OutputFormat::Text => format!("{body:#}"),
        OutputFormat::Json | OutputFormat::Jsonl => json!({
            "schema": "llmctl.dry-run.v1",
            "endpoint": endpoint.url().to_string(),
            "model": endpoint.model(),
            "request": body,
        })
        .to_string(),
    };
    match Output::stdout().line(&text) {
        Err(OutputError::Failed(error)) => Err(error),
        Err(OutputError::Closed) | Ok(()) => Ok(Exit::Success),
    }
}
