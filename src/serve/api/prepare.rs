//! From a request to a plan and an engine: opens the conversation, plans the turn, and brings the session to
//! the engine that it is assigned to. All of that may take long or wait for a disk, but computes nothing: it
//! belongs on blocking threads.

use std::sync::Arc;

use super::generate::{GenerateRequest, Prompt};
use super::plain;
use crate::App;
use crate::error::ApiError;
use crate::sessions::{InSession, Opened, Placed, RequestSession, SessionTurn};
use llmctl_base::Error;
use llmctl_engine::turn::{PlannedTurn, SessionChat, TurnPlan};
use llmctl_engine::{EngineClient, EngineSessionName};
use llmctl_template::{Conversation, DateTime};

/// A planned request.
pub struct Prepared {
    /// `None` if the engine was lost meanwhile.
    pub assignment: Option<Assignment>,
    /// One for each prompt.
    pub plans: Vec<TurnPlan>,
    pub turn: Option<(Opened, PlannedTurn)>,
    /// The engine's session that the requests are in.
    pub session: Option<EngineSessionName>,
    /// Place of the stored turn.
    pub placed: Option<Placed>,
    /// Changes that the chat template needs.
    pub notices: Vec<String>,
}

impl Prepared {
    /// Creates the plan of a request that belongs to no session.
    fn without_session(assignment: Option<Assignment>, plans: Vec<TurnPlan>) -> Self {
        Self { assignment, plans, turn: None, session: None, placed: None, notices: Vec::new() }
    }
}

/// The engine that a request is assigned to, which knows its session.
#[derive(Clone)]
pub struct Assignment {
    pub engine: EngineClient,
    /// The engine's number.
    pub index: usize,
    /// The session was with an engine that has been lost.
    pub is_brought_back: bool,
}

/// Plans a request. `turn` is its place in the line of its stored session.
///
/// # Errors
/// Errors of the prompt, the session and the constraints; 503 without an engine.
pub fn prepare(
    app: &App,
    request: &GenerateRequest,
    turn: Option<Arc<SessionTurn>>,
) -> Result<Prepared, ApiError> {
    let engine = app.engine()?;
    match &request.prompt {
        Prompt::Texts(texts) => {
            let planner = app.planner(&engine);
            let plans = texts.iter().map(|text| planner.plan_text(text, &request.turn));
            let plans = plans.collect::<Result<_, _>>()?;
            if let Some(RequestSession::Transient(key)) = &request.session {
                app.sessions().transients().note(key);
            }
            let assignment = Some(Assignment::of(app, engine));
            Ok(Prepared::without_session(assignment, plans))
        }
        Prompt::Chat(conversation) => prepare_chat(app, &engine, request, conversation, turn),
    }
}

fn prepare_chat(
    app: &App,
    engine: &EngineClient,
    request: &GenerateRequest,
    conversation: &Conversation,
    turn: Option<Arc<SessionTurn>>,
) -> Result<Prepared, ApiError> {
    if app.settings().refuses_special_tokens {
        let chat_tokenizer = &app.model().chat_tokenizer;
        plain::check(chat_tokenizer.tokenizer(), chat_tokenizer.context_tokens(), conversation)?;
    }
    let planner = app.planner(engine);
    let check_out = |session: &RequestSession| {
        app.sessions().check_out(session, turn, &app.model().fingerprint, &conversation.messages)
    };
    let Some(opened) = request.session.as_ref().map(check_out).transpose()?.flatten() else {
        let plan = planner.plan_chat(conversation, DateTime::local_now(), &request.turn)?;
        let assignment = assigned(app, None)?;
        return Ok(Prepared::without_session(assignment, vec![plan]));
    };
    let conversation = match &request.session {
        Some(RequestSession::Stored(InSession { appends: true, .. })) => followed(&opened, conversation),
        _ => conversation.clone(),
    };
    let chat_tokenizer = &app.model().chat_tokenizer;
    let notice = chat_tokenizer.notice_of_moved_system(&conversation.messages);
    let of_images = chat_tokenizer.notice_of_images(conversation.messages.iter());
    let planned = opened.begin(planner, conversation, &request.turn)?;
    let plans = vec![planned.plan.clone()];
    // Several answers are no turn: the client's next request shows which of them the conversation continues.
    if request.num_choices > 1 {
        let assignment = assigned(app, None)?;
        return Ok(Prepared::without_session(assignment, plans));
    }
    let assignment = assigned(app, Some(&opened))?;
    let session = Some(opened.engine_name());
    let placed = Some(opened.placed(planned.prompted.num_kept_turns()));
    Ok(Prepared {
        assignment,
        plans,
        turn: Some((opened, planned)),
        session,
        placed,
        notices: notice.iter().chain(&of_images).map(ToString::to_string).collect(),
    })
}

/// As [`assign`]; `None` if the engine was lost meanwhile.
fn assigned(app: &App, session: Option<&Opened>) -> Result<Option<Assignment>, ApiError> {
    match assign(app, session) {
        Err(error) if error.is_engine_down() => Ok(None),
        assigned => assigned.map(Some),
    }
}

/// Returns the conversation so far and the new messages.
fn followed(session_chat: &SessionChat, added: &Conversation) -> Conversation {
    Conversation { messages: session_chat.followed_by(added.messages.clone()).messages, ..added.clone() }
}

impl Assignment {
    fn of(app: &App, engine: EngineClient) -> Self {
        Self { index: app.engines().index_of(&engine), engine, is_brought_back: false }
    }
}

/// Chooses the engine for a session, or for none, and restores the session there if the engine does not have it.
///
/// # Errors
/// 503 without an engine, or when it was lost meanwhile; what the engine refuses with.
pub fn assign(app: &App, session: Option<&Opened>) -> Result<Assignment, ApiError> {
    let Some(opened) = session else { return Ok(Assignment::of(app, app.engine()?)) };
    let name = opened.engine_name();
    let mut assignment = Assignment::of(app, app.engine_of(Some(&name))?);
    // A fork shares the parent's tokens and knows where the two diverge. If it fails, the prompt is matched by content.
    if opened.parts_from().is_some_and(|from| assignment.engine.fork_session(from, &name).is_ok()) {
        return Ok(assignment);
    }
    let Some(tokens) = opened.saved().tokens_of(&app.model().fingerprint) else { return Ok(assignment) };
    let was_with = app.sessions().resumes(&name).engines.first().copied();
    match assignment.engine.restore_session(&name, tokens) {
        Ok(()) => {
            assignment.is_brought_back = was_with.is_some_and(|engine| app.engines().up_as(engine).is_none())
        }
        Err(Error::InvalidParameter { .. }) => {} // it knows the session already
        Err(Error::SessionsFull { .. }) if opened.is_transient() => {} // it is answered without
        Err(error) => {
            if matches!(error, Error::EngineGone) {
                app.engine_lost(&assignment.engine);
            }
            return Err(error.into());
        }
    }
    Ok(assignment)
}
