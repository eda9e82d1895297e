//! `run` with `--endpoint`, or in a session that an endpoint has answered: the prompt goes to a server that
//! takes messages.

use serde_json::{Value, json};

use super::answer::Generated;
use super::message_answer::MessageGeneration;
use super::next_turn::{RunTurn, SessionPlace, looked_at, messages, note_kept, with_chat};
use super::report::{Report, ReportForm, ReportSubject, endpoint_stats};
use super::tool_rounds::ToolRounds;
use super::{CUT_AT_LIMIT, OutputFormat, RunArgs};
use crate::cli::endpoint::request::EndpointRequest;
use crate::cli::endpoint::{ChatEndpoint, EndpointChoice, check_flags, unavailable};
use crate::cli::error::{CommandError, Exit};
use crate::cli::images;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::output::Output;
use crate::cli::terminal::report::print;
use crate::cli::terminal::signal::Graceful;
use llmctl_engine::session::store::{SavedSession, SessionName};
use llmctl_engine::turn::session_chat::RecordedAnswer;
use llmctl_engine::turn::{Answer, PromptedTurn, SessionChat};
use llmctl_engine::{Finish, GrammarSource};
use llmctl_image::ImageSet;
use llmctl_template::{Message, ToolChoice};

/// Answers the next turn of a session or of a conversation that is not saved; `--dry-run` shows what would be sent for the latter.
pub fn run(
    choice: &EndpointChoice,
    place: Option<SessionPlace<'_>>,
    turn: RunTurn<'_, '_>,
) -> Result<Exit, CommandError> {
    if turn.args.prompt.dry_run {
        return preview(choice, None, turn);
    }
    let endpoint = connected(choice, &turn)?;
    with_chat(place, endpoint.fingerprint(), turn, |name, session_chat, turn| {
        take_turn(&endpoint, name, session_chat, turn)
    })
}

fn connected(choice: &EndpointChoice, turn: &RunTurn<'_, '_>) -> Result<ChatEndpoint, CommandError> {
    check_flags(&turn.args.endpoint)?;
    choice.connect(&turn.args.endpoint, turn.terminal)
}

/// `--dry-run`: the request with the whole conversation, of which nothing is sent.
pub fn preview(
    choice: &EndpointChoice,
    saved: Option<SavedSession>,
    turn: RunTurn<'_, '_>,
) -> Result<Exit, CommandError> {
    let endpoint = connected(choice, &turn)?;
    let RunTurn { args, next, rounds, .. } = turn;
    let mut images = next.images.clone();
    saved.iter().for_each(|saved| images::add_kept(&mut images, saved));
    let (_, messages) = looked_at(saved, endpoint.fingerprint(), next);
    let asked = EndpointExtras::of(args, rounds)?;
    dry_run(&endpoint, &asked.request(&messages, &images, args)?, args.output.output.unwrap_or_default())
}

/// Answers the next turn, and the turns that bring the results of its calls. Without a name, nothing is saved.
fn take_turn(
    endpoint: &ChatEndpoint,
    name: Option<&SessionName>,
    session_chat: &mut SessionChat,
    turn: RunTurn<'_, '_>,
) -> Result<Exit, CommandError> {
    let RunTurn { args, next, rounds, terminal } = turn;
    let extras = EndpointExtras::of(args, rounds)?;
    let mut images = next.images.clone();
    images::add_kept(&mut images, session_chat.saved());
    let settings = extras.request(&[], &images, args)?;
    let (subject, form) = (ReportSubject::Endpoint(endpoint, &settings), ReportForm::of(args)?);
    let report = Report::new(subject, form, Output::stdout(), terminal);
    let addressed = |session_chat: &SessionChat, added| {
        session_chat.addressed(session_chat.followed_by(added).messages).with_images(&images)
    };
    let first = (addressed(session_chat, messages(session_chat.saved(), next)), extras.tools.clone());
    let generate =
        |(turn, tools): &(PromptedTurn, Vec<Value>), report: &mut Report<'_, _>, graceful: &Graceful| {
            let request = &EndpointRequest { tools, ..extras.request(turn.messages(), &images, args)? };
            MessageGeneration { endpoint, request, graceful }.run(report)
        };
    let mut after = |(turn, _), generated: &Generated, report: &mut Report<'_, _>, graceful: &Graceful| {
        let record = RecordedAnswer::of(&generated.answer, args.sampling.given.sampling(false));
        note_kept(session_chat.record(turn, record)?, &generated.answer, name, report);
        let Some(results) = rounds.results(generated, &mut ImageSet::default(), report, graceful)? else {
            return Ok(None);
        };
        Ok(Some((addressed(session_chat, results), rounds.offered().definitions)))
    };
    let exit = report.answers(first, &generate, &mut after, |answer, signal| {
        if args.output.stats {
            terminal.report(&endpoint_stats(&answer.outcome, endpoint));
        }
        verdict(answer, signal, args, terminal)
    });
    Ok(rounds.verdict(exit?))
}

/// Tools and constraint of a request.
struct EndpointExtras {
    tools: Vec<Value>,
    constraint: Option<GrammarSource>,
}

impl EndpointExtras {
    /// Refuses what changes an answer and has no place in a request; a variable or a configuration file may have set it.
    fn of(args: &RunArgs, rounds: &mut ToolRounds<'_>) -> Result<Self, CommandError> {
        let unknown_there = [
            (args.prompt.raw, "--raw"),
            (args.prompt.prefill_response.is_some(), "--prefill-response"),
            (args.output.logprobs.is_some(), "--logprobs"),
        ];
        if let Some((_, flag)) = unknown_there.into_iter().find(|(is_set, _)| *is_set) {
            return Err(unavailable(flag));
        }
        let tools = rounds.tools()?;
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
        images: &'a ImageSet,
        args: &'a RunArgs,
    ) -> Result<EndpointRequest<'a>, CommandError> {
        Ok(EndpointRequest {
            messages,
            images,
            tools: &self.tools,
            constraint: self.constraint.as_ref(),
            sampling: &args.sampling,
            limits: &args.limits,
            think: args.prompt.think()?,
            seed: None,
        })
    }
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
    match args.limits.max_tokens {
        _ if !is_cut => {}
        Some(_) => terminal.note(CUT_AT_LIMIT),
        None => terminal.warn("the answer was cut at the endpoint's own limit; --max-tokens N may take more"),
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
    print(&(text + "\n"))
}
