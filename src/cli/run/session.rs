//! `run --session NAME`: the prompt is the next turn of a saved conversation, which begins with its first.
//!
//! The session is locked from before the model is loaded until the turn is saved, so that a second process is
//! refused before it has done any work. A session that this command began and that came to no turn is removed
//! again.

use super::answer::Generated;
use super::next_turn::{RunTurn, SessionPlace, check_system, looked_at, messages, note_kept, with_chat};
use super::report::Report;
use super::request::{Rendered, chat_context, turn_request};
use super::{RunAnswer, RunArgs, check, dry_run, endpoint, flag_error, load_model, texts_of};
use crate::cli::endpoint::EndpointChoice;
use crate::cli::error::{CommandError, Exit};
use crate::cli::model::{load, resume};
use crate::cli::places::{KeptFiles, Places};
use crate::cli::sessions;
use crate::cli::terminal::signal::Graceful;
use llmctl_base::Error;
use llmctl_engine::session::store::{SavedSession, SessionName};
use llmctl_engine::turn::{SessionChat, ToolUse, TurnRequest};
use llmctl_engine::{ChatTokenizer, EngineSessionName};
use llmctl_image::ImageSet;
use llmctl_template::{Conversation, TemplateError};

/// Answers the next turn, or shows its prompt with `--dry-run`.
pub fn run(name: &str, turn: RunTurn<'_, '_>) -> Result<Exit, CommandError> {
    let args = turn.args;
    let name = SessionName::new(name).map_err(flag_error)?;
    let store = sessions::store(&Places::from_environment())?;
    if args.prompt.dry_run {
        let saved = sessions::if_there(store.read(&name))?;
        saved.as_ref().map_or(Ok(()), |saved| check_system(saved, &turn))?;
        if let Some(choice) = EndpointChoice::of(&args.endpoint, &args.model, saved.as_ref()) {
            return endpoint::preview(&choice, saved, turn);
        }
        let args = &with_model(&turn, &name, saved.as_ref())?;
        return preview(saved, RunTurn { args, ..turn });
    }
    Places::from_environment().check(KeptFiles::Sessions)?;
    let opened = sessions::if_there(store.open(&name))?;
    if let Some(writer) = &opened {
        check_system(writer.saved(), &turn)?;
    }
    let place = SessionPlace { name: &name, store: &store, opened };
    let saved = place.opened.as_ref().map(|writer| writer.saved());
    if let Some(choice) = EndpointChoice::of(&args.endpoint, &args.model, saved) {
        return endpoint::run(&choice, Some(place), turn);
    }
    let args = &with_model(&turn, &name, saved)?;
    answer_turn(Some(place), RunTurn { args, ..turn })
}

/// Answers a prompt in a conversation that is not saved, because the model may call tools.
pub fn run_unsaved(turn: RunTurn<'_, '_>) -> Result<Exit, CommandError> {
    if turn.args.prompt.dry_run {
        return preview(None, turn);
    }
    answer_turn(None, turn)
}

fn answer_turn(place: Option<SessionPlace<'_>>, turn: RunTurn<'_, '_>) -> Result<Exit, CommandError> {
    let llm = loaded(&turn)?;
    turn.next.check_sight(&llm)?;
    let model = llm.texts().fingerprint().clone();
    with_chat(place, model, turn, |name, session_chat, turn| {
        let notice = llm.texts().chat_tokenizer().notice_of_images(session_chat.messages());
        notice.iter().for_each(|notice| turn.terminal.note(notice));
        take_turn(&llm, name, session_chat, turn)
    })
}

/// Loads the model, which must have a chat template.
fn loaded(turn: &RunTurn<'_, '_>) -> Result<load::Loaded, CommandError> {
    let llm = load_model(turn.args, turn.terminal)?;
    check_template(llm.texts().chat_tokenizer(), turn.args)?;
    super::note_system(llm.texts().chat_tokenizer(), turn.next.system.as_deref(), turn.terminal);
    Ok(llm)
}

/// Returns the flags with the session's own model, unless the user names one.
fn with_model(
    turn: &RunTurn<'_, '_>,
    name: &SessionName,
    saved: Option<&SavedSession>,
) -> Result<RunArgs, CommandError> {
    let mut args = turn.args.clone();
    if let Some(saved) = saved {
        args.model = resume::model_of(&args.model, name, saved, "--model REF")?;
    }
    if !args.model.is_named {
        check::built_in(&args, turn.terminal)?;
    }
    Ok(args)
}

/// Answers the next turn, and the turns that bring the results of its calls. Without a name, nothing is saved.
fn take_turn(
    llm: &load::Loaded,
    name: Option<&SessionName>,
    session_chat: &mut SessionChat,
    turn: RunTurn<'_, '_>,
) -> Result<Exit, CommandError> {
    let RunTurn { args, next, rounds, terminal } = turn;
    let tools = rounds.tools()?;
    let context = chat_context(llm.texts(), args, &tools)?;
    let engine_name = name.map_or_else(|| EngineSessionName::scoped("run", "unsaved"), Into::into);
    llm.restore(&engine_name, session_chat.saved())?;
    let mut images = next.images.clone();
    rounds.sees = llm.vision().is_ok();
    let request = turn_request(llm, args, tools.clone(), terminal)?;
    let begin = |session_chat: &SessionChat, added, tools: ToolUse, images: &ImageSet| {
        let messages = session_chat.followed_by(added).messages;
        let conversation = Conversation { messages, tools: tools.definitions.clone(), ..context.clone() };
        session_chat.begin(
            llm.planner(),
            conversation,
            &TurnRequest { tools, images: images.clone(), ..request.clone() },
        )
    };
    let first = begin(session_chat, messages(session_chat.saved(), next), tools, &images)?;
    let mut after = |asked, generated: &Generated, report: &mut Report<'_, _>, graceful: &Graceful| {
        let finished = session_chat.finish(asked, &generated.answer)?;
        note_kept(finished, &generated.answer, name, report);
        let Some(results) = rounds.results(generated, &mut images, report, graceful)? else {
            return Ok(None);
        };
        Ok(Some(begin(session_chat, results, rounds.offered(), &images)?))
    };
    let answer = RunAnswer { llm, turn: &request, session: Some(&engine_name), args, terminal };
    let exit = answer.on_stdout(first, |asked| &asked.plan, &mut after);
    llm.settle(terminal);
    let exit = exit.map(|exit| rounds.verdict(exit));
    exit.map_err(|error| match error.runtime() {
        Some(Error::PromptTooLong { .. } | Error::PromptOversized { .. })
            if !session_chat.saved().turns.is_empty() =>
        {
            error.hint("the conversation fills the context: begin another session, or give a larger --ctx if the model allows it")
        }
        _ => error,
    })
}

/// `--dry-run`: the whole conversation as the model would get it.
fn preview(saved: Option<SavedSession>, turn: RunTurn<'_, '_>) -> Result<Exit, CommandError> {
    let RunTurn { args, next, rounds, terminal } = turn;
    let images = next.images.clone();
    let has_images = |saved: &SavedSession| saved.messages().any(|message| message.images().next().is_some());
    let is_text = images.is_empty() && !saved.as_ref().is_some_and(has_images);
    let texts = texts_of(args, is_text, terminal)?;
    check_template(texts.chat_tokenizer(), args)?;
    let (session_chat, messages) = looked_at(saved, texts.fingerprint().clone(), next);
    let tools = rounds.tools()?;
    let conversation = Conversation { messages, ..chat_context(&texts, args, &tools)? };
    let turn = session_chat.prompt(texts.chat_tokenizer(), conversation, &images)?;
    let rendered = Rendered { text: turn.text(texts.chat_tokenizer()), tokens: turn.tokens().to_vec() };
    dry_run(texts.info(), &rendered, args.output.output.unwrap_or_default(), terminal)
}

fn check_template(chat_tokenizer: &ChatTokenizer, args: &RunArgs) -> Result<(), CommandError> {
    if chat_tokenizer.has_template() {
        return Ok(());
    }
    let flag = if args.session.session.is_some() { "--session" } else { "--mcp-config" };
    let hint = format!("{flag} needs one: give it with --chat-template FILE, or leave {flag} out");
    Err(CommandError::from(TemplateError::Missing).hint(hint))
}
