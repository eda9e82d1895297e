//! One ask from admission to its end, in a task of its own: the engine's events in, a wire format's updates out.
//!
//! Invariants: nobody hears of success before every request of the ask is in the queue or further; a reader that goes
//! away stops all of them, at the engine's next step, and what a session has heard by then is kept as a cancelled turn;
//! a turn is on disk, and its session free for the next, before `Finished` says so. An engine that is lost costs an ask of
//! which its client has seen nothing a second attempt, and any other an error, never a shorter answer. Templates, tokenizers and
//! files are used on blocking threads only. The task outlives its reader by as much as that takes. An answer that the server's own
//! end cuts short is no answer: its reader is told so, and a session keeps of it what a stream has shown.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

use super::conversations::{Opened, Placed};
use super::eta::Eta;
use super::line::Turn;
use super::patience::{self, Patience};
use super::prepare::{Prepared, PreparedPrompt, Seat, prepare, seat};
use super::turn::{Answered, Ask, Delta, Progress, Running, Sent, Session, Totals, Update};
use super::voice::Voice;
use crate::runtime::turn::session_chat::{Answer, PromptedTurn};
use crate::runtime::{
    EngineClient, Error, Event, Finish, Grammar, Outcome, Request, ReuseReason, Sampling, Started,
    StopHandle, Token,
};
use crate::serve::App;
use crate::serve::error::ApiError;
use crate::serve::ledger::Ledger;
use crate::serve::observe::TurnRecord;

/// How long an ask whose engine was lost waits for another, and how often it looks.
const RETRY_WITHIN: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Starts an ask; returns when all its requests are admitted.
///
/// # Errors
/// Whatever refuses it, before any of its requests has said anything.
pub async fn begin(app: &App, ask: Ask) -> Result<Running, ApiError> {
    let (updates, inbox) = mpsc::unbounded_channel();
    let (admitted, admission) = oneshot::channel();
    let flight = app.flights().read_owned().await;
    let ledger = Ledger::current();
    if let Some(ledger) = &ledger {
        ledger.asks(&app.model().id);
    }
    let driving = drive(app.clone(), ask, ledger, admitted, updates);
    tokio::spawn(async move {
        driving.await;
        drop(flight);
    });
    let Admitted { prompts, placed } =
        admission.await.map_err(|_| internal("the request's task ended early"))??;
    Ok(Running { prompts, placed, updates: inbox })
}

pub type Admission = Result<Admitted, ApiError>;

/// What is known of an ask when it is taken.
#[derive(Debug, Default)]
pub struct Admitted {
    prompts: Vec<Sent>,
    placed: Option<Placed>,
}

async fn drive(
    app: App,
    ask: Ask,
    ledger: Option<Ledger>,
    admitted: oneshot::Sender<Admission>,
    updates: UnboundedSender<Update>,
) {
    // Both receivers may be gone: then nobody is left to be told.
    let mut admitted = Some(admitted);
    let mut flight = match Flight::prepare(&app, ask, &mut admitted, &updates).await {
        Ok(flight) => flight,
        Err(error) => {
            let error = retriable(&app, error);
            return match admitted {
                Some(admitted) => drop(admitted.send(Err(error))),
                None => drop(updates.send(Update::Failed(error))),
            };
        }
    };
    if let (Some(ledger), Some(placed)) = (&ledger, &flight.placed) {
        ledger.is_in(placed.id.clone());
    }
    flight.ledger = ledger;
    let ended = flight.fly(&mut admitted, &updates).await;
    if let Some(admitted) = admitted {
        flight.close().await;
        let error = ended.err().unwrap_or_else(|| internal("the request ended unadmitted"));
        return drop(admitted.send(Err(retriable(&app, error))));
    }
    let last = match ended {
        Ok(totals) => Update::Ended(totals),
        Err(error) => {
            flight.flush_all(&updates);
            Update::Failed(error)
        }
    };
    flight.close().await;
    let _ = updates.send(last);
}

/// What may go better next time says when.
pub fn retriable(app: &App, error: ApiError) -> ApiError {
    let is_temporary = matches!(
        error.status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::CONFLICT | StatusCode::SERVICE_UNAVAILABLE
    );
    match app.engine() {
        Ok(engine) if is_temporary && error.retry_after.is_none() => {
            error.retry_after(app.observer().retry_after(&engine.last_load()))
        }
        _ => error,
    }
}

/// One answer in the making.
struct Choice {
    voice: Voice,
    started: Option<Started>,
    started_at: Instant,
    eta: Eta,
    ids: Vec<u32>,
    last_token_at: Option<Instant>,
    inter_token: Vec<Duration>,
    is_done: bool,
}

impl Choice {
    fn new(voice: Voice) -> Self {
        Self {
            voice,
            started: None,
            started_at: Instant::now(),
            eta: Eta::default(),
            ids: Vec::new(),
            last_token_at: None,
            inter_token: Vec::new(),
            is_done: false,
        }
    }

    fn hear(&mut self, text: &str, tokens: &[Token]) -> Vec<Delta> {
        for token in tokens {
            let now = Instant::now();
            let last = self.last_token_at.replace(now);
            self.inter_token.extend(last.map(|last| now.saturating_duration_since(last)));
            self.ids.push(token.id);
        }
        self.voice.push(text, tokens.len())
    }

    fn progress(&mut self, done: usize, total: usize) -> Progress {
        self.eta.note(done, self.started_at.elapsed());
        Progress::Prompt { done, total, left: self.eta.left(done, total) }
    }
}

/// The requests of one ask, while they run.
struct Flight {
    app: App,
    ask: Ask,
    ledger: Option<Ledger>,
    prompts: Vec<PreparedPrompt>,
    grammar: Option<Grammar>,
    markup: Arc<[u32]>,
    /// Nothing when the engine was lost.
    seat: Option<Seat>,
    begun: Instant,
    /// For its session.
    has_waited: bool,
    has_retried: bool,
    /// The updates tell something of an answer.
    has_spoken: bool,
    choices: Vec<Choice>,
    turn: Option<(Opened, PromptedTurn)>,
    /// The engine's session that the requests are in.
    session: Option<String>,
    placed: Option<Placed>,
    events: UnboundedReceiver<(usize, Event)>,
    /// Came before the answer's first byte.
    backlog: VecDeque<(usize, Event)>,
    stops: Vec<StopHandle>,
    totals: Totals,
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Flight {
    async fn prepare(
        app: &App,
        ask: Ask,
        admitted: &mut Option<oneshot::Sender<Admission>>,
        updates: &UnboundedSender<Update>,
    ) -> Result<Self, ApiError> {
        let begun = Instant::now();
        let mut patience = Patience::new(app, &ask, admitted, updates);
        let turn = match &ask.session {
            Some(Session::Stored(session)) => Some(patience::turn(app, session, &mut patience).await?),
            _ => None,
        };
        let mut ask = ask;
        loop {
            let place = tokio::select! {
                place = app.preparing().enter(ask.prompt.num_bytes()) => place?,
                () = updates.closed() => return Err(internal("nobody waits for the answer any more")),
            };
            let (prepared, back) = prepared(app, ask, turn.clone()).await?;
            drop(place);
            ask = back;
            match prepared {
                Ok(prepared) => {
                    let mut flight = Self::new(app, ask, begun, prepared);
                    flight.has_waited = patience.has_waited();
                    return Ok(flight);
                }
                Err(error) if turn.is_some() && patience::may_pass(&error) => {
                    patience.until(tokio::time::sleep(patience::LOOK_EVERY)).await?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn new(app: &App, ask: Ask, begun: Instant, prepared: Prepared) -> Self {
        let Prepared { seat, prompts, turn, session, placed, grammar, markup } = prepared;
        Self {
            app: app.clone(),
            ask,
            ledger: None,
            prompts,
            grammar,
            markup,
            seat,
            begun,
            has_waited: false,
            has_retried: false,
            has_spoken: false,
            choices: Vec::new(),
            turn,
            session,
            placed,
            events: mpsc::unbounded_channel().1,
            backlog: VecDeque::new(),
            stops: Vec::new(),
            totals: Totals::default(),
        }
    }

    /// To the end, with a second attempt where the first was lost with its engine. `admitted` is taken as soon as the ask is.
    async fn fly(
        &mut self,
        admitted: &mut Option<oneshot::Sender<Admission>>,
        updates: &UnboundedSender<Update>,
    ) -> Result<Totals, ApiError> {
        loop {
            let error = match self.attempt(admitted, updates).await {
                Ok(totals) => return Ok(totals),
                Err(error) => error,
            };
            if self.goes_without_session(&error) {
                continue;
            }
            if !self.may_retry(&error) {
                return Err(error);
            }
            self.stop(); // those of other requests of this ask, which may be with the engine still
            self.move_on(updates).await?;
            self.has_retried = true;
            self.app.observer().metrics().engine.retries.inc();
            tracing::warn!("request {} begins again: its engine was lost", self.ask.request_id);
            if std::mem::take(&mut self.has_spoken) {
                let _ = updates.send(Update::Again); // to nobody, when the reader has gone
            }
        }
    }

    /// A transient session costs its request nothing: where the engine has no slot for it, it is not in it.
    fn goes_without_session(&mut self, error: &ApiError) -> bool {
        let is_hint = self.turn.as_ref().is_some_and(|(opened, _)| opened.is_transient());
        is_hint && patience::may_pass(error) && self.session.take().is_some()
    }

    /// Once, and only what its client has seen nothing of.
    fn may_retry(&self, error: &ApiError) -> bool {
        let is_seen = self.ask.is_streamed && self.has_spoken;
        let is_saved = self.session.is_some() && self.turn.is_none();
        error.is_engine_down() && !self.has_retried && !is_seen && !is_saved
    }

    /// Waits for an engine, for a while.
    async fn move_on(&mut self, updates: &UnboundedSender<Update>) -> Result<(), ApiError> {
        let give_up_at = Instant::now() + RETRY_WITHIN;
        loop {
            let error = match self.take_seat().await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let back_at = Instant::now() + error.retry_after.unwrap_or_default();
            if !error.is_engine_down() || back_at > give_up_at {
                return Err(error);
            }
            tokio::select! {
                () = updates.closed() => return Err(error),
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    }

    async fn take_seat(&mut self) -> Result<(), ApiError> {
        let (app, turn) = (self.app.clone(), self.turn.take());
        let seated = spawn_blocking(move || {
            let seated = seat(&app, turn.as_ref().map(|(opened, _)| opened));
            (seated, turn)
        });
        let (seated, turn) = seated.await.map_err(|_| internal("bringing the session back failed"))?;
        self.turn = turn;
        self.seat = Some(seated?);
        Ok(())
    }

    async fn attempt(
        &mut self,
        admitted: &mut Option<oneshot::Sender<Admission>>,
        updates: &UnboundedSender<Update>,
    ) -> Result<Totals, ApiError> {
        self.submit()?;
        self.wait_for_admission(updates).await?;
        if let Some(admitted) = admitted.take() {
            let sent = |prompt: &mut PreparedPrompt| Sent {
                text: std::mem::take(&mut prompt.text),
                tokens: prompt.tokens.clone(),
            };
            let prompts = self.prompts.iter_mut().map(sent).collect();
            let _ = admitted.send(Ok(Admitted { prompts, placed: self.placed.clone() }));
        }
        self.deliver(updates).await
    }

    /// Hands all requests of the ask to the engine.
    fn submit(&mut self) -> Result<(), ApiError> {
        if self.app.is_cut_short() {
            return Err(cut_short(0));
        }
        let engine = self.seat.as_ref().ok_or_else(ApiError::engine_down)?.engine.clone();
        let (sender, events) = mpsc::unbounded_channel();
        (self.events, self.totals) = (events, Totals::default());
        self.choices.clear();
        self.backlog.clear();
        self.stops.clear();
        for prompt in 0..self.prompts.len() {
            for nth in 0..self.ask.num_choices {
                let request = self.request(prompt, nth);
                let voice = self.prompts[prompt].ear.voice();
                self.submit_one(&engine, request, voice, &sender)?;
            }
        }
        Ok(())
    }

    fn request(&self, prompt: usize, nth: usize) -> Request {
        let ask = &self.ask;
        let seed = ask.sampling.seed.map(|seed| seed.wrapping_add(nth as u64));
        let mut limits = ask.limits.clone();
        if self.has_waited || self.has_retried {
            // It counts from before the wait for the session, and from the first attempt.
            limits.deadline = limits.deadline.map(|deadline| deadline.saturating_sub(self.begun.elapsed()));
        }
        Request {
            prompt: self.prompts[prompt].tokens.clone(),
            sampling: Sampling { seed, ..ask.sampling.clone() },
            limits,
            logprobs: ask.logprobs,
            prompt_logprobs: ask.prompt_logprobs,
            grammar: self.grammar.clone(),
            markup: self.markup.clone(),
            session: self.session.clone(),
            ..Request::default()
        }
    }

    fn submit_one(
        &mut self,
        engine: &EngineClient,
        request: Request,
        voice: Voice,
        events: &UnboundedSender<(usize, Event)>,
    ) -> Result<(), ApiError> {
        let (index, events) = (self.choices.len(), events.clone());
        let sink = move |event| match events.send((index, event)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        };
        let stop = engine.submit_to(request, Box::new(sink)).map_err(|error| self.refused(error))?;
        self.choices.push(Choice::new(voice));
        self.stops.push(stop);
        Ok(())
    }

    fn stop(&self) {
        self.stops.iter().for_each(StopHandle::stop);
    }

    /// Leaves the session to others; where it was not answered, as it was.
    async fn close(&mut self) {
        self.stop();
        if let Some(turn) = self.turn.take() {
            let app = self.app.clone();
            let _ = spawn_blocking(move || leave(&app, turn.0)).await; // a panic there has nothing to tell us
        }
    }

    /// What the engine refuses with. That it is gone is news to others as well, who know when to come back.
    fn refused(&self, error: Error) -> ApiError {
        let Error::EngineGone = error else { return error.into() };
        if let Some(seat) = &self.seat {
            self.app.engine_lost(&seat.engine);
        }
        let other = self.app.engine_of(self.session.as_deref());
        other.err().unwrap_or_else(ApiError::engine_down)
    }

    /// The next event; a reader that goes away meanwhile stops the requests, which then come to their ends.
    async fn next_event(&mut self, updates: &UnboundedSender<Update>) -> Result<(usize, Event), ApiError> {
        let event = tokio::select! {
            biased;
            () = updates.closed(), if !self.is_stopped() => {
                self.stop();
                self.events.recv().await
            }
            event = self.events.recv() => event,
        };
        event.ok_or_else(|| self.refused(Error::EngineGone))
    }

    fn is_stopped(&self) -> bool {
        self.stops.iter().all(StopHandle::is_stopped)
    }

    /// Waits until each request is in the queue or further.
    async fn wait_for_admission(&mut self, updates: &UnboundedSender<Update>) -> Result<(), ApiError> {
        let mut waiting: Vec<usize> = (0..self.choices.len()).collect();
        while !waiting.is_empty() {
            let (index, event) = self.next_event(updates).await?;
            if let Event::Failed(error) = event {
                return Err(self.refused(error));
            }
            waiting.retain(|&other| other != index);
            self.backlog.push_back((index, event));
        }
        Ok(())
    }

    /// Passes on what the requests say until all have ended.
    async fn deliver(&mut self, updates: &UnboundedSender<Update>) -> Result<Totals, ApiError> {
        while !self.choices.iter().all(|choice| choice.is_done) {
            let (index, event) = match self.backlog.pop_front() {
                Some(event) => event,
                None => self.next_event(updates).await?,
            };
            let update = match event {
                Event::Queued { position } => Update::Progress(Progress::Waiting { position }),
                Event::Started(started) => self.start(index, started),
                Event::Prefill { done, total } => Update::Progress(self.choices[index].progress(done, total)),
                Event::Prompt { logprobs } => Update::Scored { choice: index, logprobs },
                Event::Text { text, tokens } => {
                    let deltas = self.choices[index].hear(&text, &tokens);
                    Update::Said { choice: index, deltas, tokens }
                }
                Event::Done(outcome) => self.finish(index, outcome, updates).await?,
                Event::Failed(error) => return Err(self.refused(error)),
            };
            self.has_spoken |=
                matches!(update, Update::Scored { .. } | Update::Said { .. } | Update::Finished { .. });
            let _ = updates.send(update); // to nobody, when the reader has gone
        }
        Ok(std::mem::take(&mut self.totals))
    }

    fn start(&mut self, index: usize, mut started: Started) -> Update {
        let is_brought_back = self.seat.as_ref().is_some_and(|seat| seat.is_brought_back);
        if is_brought_back && started.reuse.reason == ReuseReason::Evicted {
            started.reuse.reason = ReuseReason::EngineLost; // it was not for others that its KV went
        }
        if let (Some(session), Some(seat)) = (&self.session, &self.seat) {
            let engine = self.app.engines().instance(&seat.engine);
            self.app.conversations().note(session, &started, engine);
        }
        let (done, total) = (started.reuse.cached_tokens, started.prompt_tokens);
        let choice = &mut self.choices[index];
        choice.started = Some(started);
        choice.started_at = Instant::now();
        choice.eta = Eta::new(done);
        Update::Progress(choice.progress(done, total))
    }

    /// What the text's reader still holds back.
    fn flush(&mut self, index: usize, is_cut: bool, updates: &UnboundedSender<Update>) {
        let deltas = self.choices[index].voice.finish(is_cut);
        if !deltas.is_empty() {
            self.has_spoken = true;
            let _ = updates.send(Update::Said { choice: index, deltas, tokens: Vec::new() });
        }
    }

    /// Before an error: what was said is not held back with it.
    fn flush_all(&mut self, updates: &UnboundedSender<Update>) {
        for index in 0..self.choices.len() {
            if !self.choices[index].is_done {
                self.flush(index, true, updates);
            }
        }
    }

    async fn finish(
        &mut self,
        index: usize,
        outcome: Outcome,
        updates: &UnboundedSender<Update>,
    ) -> Result<Update, ApiError> {
        let is_cut = !matches!(outcome.finish, Finish::Eos(_) | Finish::Complete);
        self.flush(index, is_cut, updates);
        let choice = &mut self.choices[index];
        choice.is_done = true;
        let reuse = choice.started.as_ref().map(|started| started.reuse).unwrap_or_default();
        let placed = self.placed.clone();
        let answer = Answered { said: choice.voice.said().clone(), outcome, reuse, placed };
        self.totals.add(&answer, index.is_multiple_of(self.ask.num_choices));
        if let Some(ledger) = &self.ledger {
            ledger.used(&self.totals.usage);
        }
        if let Some(seat) = &self.seat {
            self.app.engines().answered(&seat.engine);
        }
        self.record(index, &answer.outcome);
        // Its reader is there, so that it was not for a reader's leaving that it was cancelled.
        let is_cut_short = answer.outcome.finish == Finish::Cancelled && !updates.is_closed();
        if !is_cut_short || self.ask.is_streamed {
            self.save(index, &answer).await?;
        }
        if is_cut_short {
            return Err(cut_short(answer.outcome.usage.completion_tokens));
        }
        Ok(Update::Finished { choice: index, answer })
    }

    fn record(&mut self, index: usize, outcome: &Outcome) {
        let choice = &mut self.choices[index];
        self.app.observer().turn(&TurnRecord {
            request_id: self.ask.request_id.clone(),
            session: self.placed.as_ref().map(|placed| placed.id.clone()),
            engine: self.seat.as_ref().map_or(0, |seat| seat.index),
            started: choice.started.clone(),
            outcome: outcome.clone(),
            inter_token: std::mem::take(&mut choice.inter_token),
        });
    }

    /// Puts the turn into its conversation, which is free for the next one then.
    async fn save(&mut self, index: usize, answer: &Answered) -> Result<(), ApiError> {
        let Some((mut opened, turn)) = self.turn.take() else { return Ok(()) };
        let answer = Answer {
            message: answer.said.to_message(),
            generated: std::mem::take(&mut self.choices[index].ids),
            outcome: answer.outcome.clone(),
            sampling: self.ask.sampling.clone(),
        };
        let app = self.app.clone();
        let save = move || {
            let saved = opened.finish(turn, answer).map(drop);
            leave(&app, opened);
            saved
        };
        let saved = spawn_blocking(save).await;
        saved.map_err(|_| internal("saving the turn failed"))?.map_err(ApiError::from)
    }
}

/// On a thread that may wait; gives the ask back.
async fn prepared(
    app: &App,
    ask: Ask,
    turn: Option<Arc<Turn>>,
) -> Result<(Result<Prepared, ApiError>, Ask), ApiError> {
    let app = app.clone();
    let prepared = spawn_blocking(move || (prepare(&app, &ask, turn), ask));
    prepared.await.map_err(|_| internal("preparing the prompt failed"))
}

/// Gives a conversation up. One that came to nothing takes no slot in the engine either, before its name is free again.
fn leave(app: &App, opened: Opened) {
    let name = opened.engine_name();
    if opened.is_forgotten()
        && let Ok(engine) = app.engine_of(Some(&name))
    {
        let _ = engine.close_session(&name); // it may never have begun there
        app.conversations().forget(&name);
    }
}

/// The server ends before the answer does; so many tokens of it were made.
fn cut_short(num_tokens: usize) -> ApiError {
    let how_far = match num_tokens {
        0 => "this request was begun".to_owned(),
        1 => "the answer was whole: 1 token of it was made".to_owned(),
        many => format!("the answer was whole: {many} tokens of it were made"),
    };
    ApiError::shutting_down(format!("the server was shut down before {how_far}"))
}

/// What should not happen.
pub fn internal(message: &str) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, None, message)
}
