//! `/v1/sessions`: what conversations there are, what of them is in memory, and what can be done to them between turns.
//!
//! A session is two things: a conversation, which is precious, and the engine's sequence of that name, which can be
//! computed again. The engine is asked first, because it can refuse; what it does not know is no error.

use std::collections::HashMap;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use serde_json::{Value, json};

use super::blocking;
use super::body::{InPath, JsonBody, session_name};
use super::conversations::{Resume, Resumes};
use super::drive::retriable;
use crate::runtime::session::store::{Listed, SavedSession, SessionName, Summary};
use crate::runtime::{EngineHandle, Error, SessionInfo, SessionState};
use crate::serve::App;
use crate::serve::error::ApiError;
use crate::serve::wire::message::message_json;
use crate::serve::wire::{Fields, Problems};

pub async fn list(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    let data = blocking(&app, |app| {
        let engine = app.engine()?;
        let in_engines = in_engines(app)?;
        let listed = app.conversations().list()?;
        let session = |Listed { name, summary }: Listed| {
            let info = in_engines.get(name.as_str());
            match summary {
                Ok(summary) => session_json(app, &engine, &name, &summary, info),
                Err(error) => {
                    json!({"id": name.as_str(), "object": "session", "error": ApiError::from(error).message})
                }
            }
        };
        Ok(listed.into_iter().map(session).collect::<Vec<_>>())
    });
    Ok(Json(json!({"object": "list", "data": data.await?})))
}

/// What the engines know of their sessions. One that went down meanwhile knows nothing.
fn in_engines(app: &App) -> Result<HashMap<String, SessionInfo>, ApiError> {
    let mut known: HashMap<String, SessionInfo> = HashMap::new();
    for engine in app.engines().up() {
        match engine.list_sessions() {
            Ok(infos) => {
                for info in infos {
                    // One that has moved may have left an older state behind.
                    if !known.contains_key(&info.name) || is_with(app, &info.name, &engine) {
                        known.insert(info.name.clone(), info);
                    }
                }
            }
            Err(Error::EngineGone) => app.engine_lost(&engine),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(known)
}

fn is_with(app: &App, name: &str, engine: &EngineHandle) -> bool {
    app.engines().of(name).is_ok_and(|own| own.is_same(engine))
}

/// `?messages=true` adds the conversation.
pub async fn get(
    State(app): State<App>,
    InPath(name): InPath,
    Query(query): Query<HashMap<String, String>>,
) -> Result<Json<Value>, ApiError> {
    let with_messages = match query.get("messages").map(String::as_str) {
        None | Some("false") => false,
        Some("true") => true,
        Some(_) => return Err(ApiError::invalid("messages", "messages is neither true nor false")),
    };
    let session = blocking(&app, move |app| {
        let engine = app.engine_of(Some(&name))?;
        let (saved, summary) = app.conversations().read(&name)?;
        let info = known(app, engine.inspect_session(name.as_str()))?.map(|detail| detail.info);
        let mut session = session_json(app, &engine, &name, &summary, info.as_ref());
        session["fork_of"] = fork_json(&saved);
        if with_messages {
            session["messages"] = saved.messages().map(message_json).collect();
        }
        Ok(session)
    });
    Ok(Json(session.await?))
}

fn fork_json(saved: &SavedSession) -> Value {
    saved.fork_of.as_ref().map_or(Value::Null, |fork| json!({"id": fork.name, "turns": fork.turns}))
}

fn session_json(
    app: &App,
    engine: &EngineHandle,
    name: &SessionName,
    summary: &Summary,
    info: Option<&SessionInfo>,
) -> Value {
    let Resumes { last, .. } = app.conversations().resumes(name);
    let num_resident = info.map_or(0, |info| info.num_resident);
    let state = info.map_or("idle", |info| match info.state {
        SessionState::Idle => "idle",
        SessionState::Waiting => "waiting",
        SessionState::Running => "running",
    });
    json!({
        "id": name.as_str(),
        "object": "session",
        "created_at": summary.created_ms / 1000,
        "last_used_at": summary.last_used_ms / 1000,
        "model": summary.model.name,
        "turns": summary.turns,
        "tokens": summary.tokens,
        "bytes": summary.num_bytes,
        "state": state,
        "resident_tokens": num_resident,
        "kv_bytes": if num_resident == 0 { 0 } else { engine.spec().sequence_bytes(num_resident) },
        "last_resume": last.map(|resume| resume_json(&resume)),
    })
}

fn resume_json(resume: &Resume) -> Value {
    json!({
        "reason": resume.reuse.reason.name(),
        "prompt_tokens": resume.prompt_tokens,
        "cached_tokens": resume.reuse.cached_tokens,
        "restored_tokens": resume.reuse.restored_tokens,
        "first_difference": resume.reuse.first_difference,
        "at": resume.at_ms / 1000,
    })
}

/// Why the session's last prompt that did not simply go on was not resumed further: where the two part, and the text
/// there.
pub async fn explain(State(app): State<App>, InPath(name): InPath) -> Result<Json<Value>, ApiError> {
    let explained = blocking(&app, move |app| {
        app.conversations().read(&name)?;
        let Resumes { last, last_miss } = app.conversations().resumes(&name);
        let miss = last_miss.map(|(resume, difference)| {
            let explained = difference.explain(&**app.model().speech.tokenizer());
            let mut miss = resume_json(&resume);
            miss["position"] = explained.position.into();
            miss["before"] = explained.before.into();
            miss["session"] = json!({"tokens": difference.session, "text": explained.session});
            miss["prompt"] = json!({"tokens": difference.prompt, "text": explained.prompt});
            miss
        });
        let last = last.map(|resume| resume_json(&resume));
        Ok(json!({"session_id": name.as_str(), "last_resume": last, "last_miss": miss}))
    });
    Ok(Json(explained.await?))
}

/// Forgets what was said; the session stays. Also for one that there is not.
pub async fn reset(State(app): State<App>, InPath(name): InPath) -> Result<Json<Value>, ApiError> {
    let id = name.clone();
    blocking(&app, move |app| {
        let opened = known(app, app.conversations().open_known(&name, &app.model().fingerprint))?;
        in_each(app, |engine| engine.reset_session(name.as_str()))?;
        match opened {
            Some(mut opened) => Ok(opened.rewind(0)?),
            None => Ok(()),
        }
    })
    .await?;
    Ok(Json(json!({"reset": true, "session_id": id.as_str()})))
}

/// Removes a session with all that was said. Also for one that there is not.
pub async fn delete(State(app): State<App>, InPath(name): InPath) -> Result<Json<Value>, ApiError> {
    let id = name.clone();
    blocking(&app, move |app| {
        in_each(app, |engine| engine.close_session(name.as_str()))?;
        known(app, app.conversations().remove(&name))?;
        app.engines().forget(name.as_str());
        Ok(())
    })
    .await?;
    Ok(Json(json!({"closed": true, "session_id": id.as_str()})))
}

/// Begins a session with the turns of another: `{"to": ID, "turns": N}`, all turns without `turns`.
pub async fn fork(
    State(app): State<App>,
    InPath(from): InPath,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let mut problems = Problems::new(app.settings().lenient);
    let mut fields = Fields::new(body, &mut problems);
    if !fields.has("to") {
        fields.wrong("to", "is missing");
    }
    let to = fields.text("to").unwrap_or_default();
    let turns = fields.size("turns");
    fields.end();
    problems.check(Ok(()))?;
    let to = session_name(&to).map_err(|error| error.param("to"))?;
    let forked = blocking(&app, move |app| {
        let model = &app.model().fingerprint;
        let num_turns = app.conversations().fork(&from, &to, turns, model).map_err(taken)?;
        if turns.is_none() {
            // Where that does not work out, the next turn finds what it can.
            let _ = fork_in_memory(app, &from, &to);
        }
        Ok(json!({"forked": true, "session_id": to.as_str(), "from": from.as_str(), "turns": num_turns}))
    });
    Ok(Json(forked.await?))
}

/// Shares what is in memory; with an engine that is another's, only the tokens, whose KV may be on disk.
fn fork_in_memory(app: &App, from: &SessionName, to: &SessionName) -> Result<(), ApiError> {
    let (old, new) = (app.engine_of(Some(from))?, app.engine_of(Some(to))?);
    if old.is_same(&new) {
        return Ok(old.fork_session(from.as_str(), to.as_str())?);
    }
    let saved = app.conversations().read(to)?.0;
    match saved.tokens_of(&app.model().fingerprint) {
        Some(tokens) => Ok(new.restore_session(to.as_str(), tokens)?),
        None => Ok(()),
    }
}

/// Asks every engine that is up: a session that has moved may have left something behind. There must be one; what goes down
/// meanwhile takes its sessions with it.
fn in_each(app: &App, ask: impl Fn(&EngineHandle) -> crate::runtime::Result<()>) -> Result<(), ApiError> {
    app.engine()?;
    let mut refusal = Ok(());
    for engine in app.engines().up() {
        let answer = ask(&engine);
        if matches!(answer, Err(Error::EngineGone)) {
            app.engine_lost(&engine);
            if app.engines().len() > 1 {
                continue;
            }
        }
        refusal = refusal.and(known(app, answer).map(drop));
    }
    refusal
}

/// A session of that name is a conflict, not a wrong value.
fn taken(error: Error) -> ApiError {
    match error {
        Error::InvalidParameter { name: "session", message } => {
            ApiError::new(StatusCode::CONFLICT, Some("session_exists"), message).param("to")
        }
        other => other.into(),
    }
}

/// `None` for a session that there is not.
fn known<T>(app: &App, result: crate::runtime::Result<T>) -> Result<Option<T>, ApiError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(Error::SessionNotFound(_)) => Ok(None),
        Err(error) => Err(retriable(app, error.into())),
    }
}
