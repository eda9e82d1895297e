//! Looking at sessions: the list, one of them, and why its last prompt was not resumed further.
//!
//! The list comes in pages, so that thousands of sessions cost what one page does beside their summaries. A
//! session that cannot be read is listed with the reason.

use std::collections::HashMap;
use std::convert::Infallible;

use axum::Json;
use axum::extract::{FromRequestParts, Query, State};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue};
use axum::response::AppendHeaders;
use serde_json::{Value, json};

use super::blocking::blocking;
use super::reply;
use super::session_host::{AskedSession, SessionHost};
use crate::App;
use crate::error::ApiError;
use crate::gate::owner::{Caller, Owner};
use crate::sessions::{Resume, Resumes, SessionKey, Transient, TransientBranch};
use crate::wire::message::message_json;
use llmctl_base::Error;
use llmctl_engine::session::store::{ForkOf, Listed, SavedSession, SessionName, SessionSummary};
use llmctl_engine::{Difference, EngineClient, EngineSessionName, SessionInfo, SessionState};

/// Sessions in a page, unless the client says how many, and at most.
const DEFAULT_LIMIT: usize = 100;
const MAX_LIMIT: usize = 1000;

/// `?transient=true`: the transient session is meant, not a stored one of the same id.
pub struct OnlyTransient(pub bool);

impl<S: Send + Sync> FromRequestParts<S> for OnlyTransient {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let query = parts.uri.query().unwrap_or_default();
        Ok(Self(query.split('&').any(|pair| pair == "transient=true")))
    }
}

/// A line of the list.
enum ListEntry {
    Stored(Owner, Listed),
    Transient(Transient),
}

impl ListEntry {
    fn id(&self) -> &str {
        match self {
            Self::Stored(_, listed) => listed.name.as_str(),
            Self::Transient(transient) => &transient.id,
        }
    }
}

/// `?limit=N` at most, `?after=ID` behind that one, by id.
pub async fn list(
    State(host): State<SessionHost>,
    caller: Caller,
    Query(query): Query<HashMap<String, String>>,
) -> Result<Json<Value>, ApiError> {
    let limit = limit(query.get("limit").map(String::as_str))?;
    let after = query.get("after").cloned();
    let page = blocking(&host, move |host| {
        let (entries, roots) = entries(host, &caller)?;
        let is_behind = |entry: &ListEntry| after.as_deref().is_none_or(|after| entry.id() > after);
        let mut entries: Vec<ListEntry> = entries.into_iter().filter(is_behind).collect();
        let end = page_end(&entries, limit);
        let has_more = end < entries.len();
        entries.truncate(end);
        let in_engines = in_engines(host)?;
        let looked = Looking { host, in_engines: &in_engines };
        let data: Vec<Value> = entries.iter().map(|entry| looked.entry(entry, &roots)).collect();
        let last = entries.last().map(ListEntry::id);
        Ok(json!({"object": "list", "data": data, "has_more": has_more, "last_id": last}))
    });
    Ok(Json(page.await?))
}

fn limit(given: Option<&str>) -> Result<usize, ApiError> {
    let Some(given) = given else { return Ok(DEFAULT_LIMIT) };
    let limit = given.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
    limit.ok_or_else(|| ApiError::invalid("limit", format!("limit is not a number in [1, {MAX_LIMIT}]")))
}

/// Two of one id stay on one page.
fn page_end(entries: &[ListEntry], limit: usize) -> usize {
    let mut end = entries.len().min(limit);
    while end > 0 && end < entries.len() && entries[end].id() == entries[end - 1].id() {
        end += 1;
    }
    end
}

/// All that the caller sees, by id, and what the sessions are called that branches belong to, by the sessions' own ids.
fn entries(
    host: &SessionHost,
    caller: &Caller,
) -> Result<(Vec<ListEntry>, HashMap<String, SessionName>), ApiError> {
    let mut entries: Vec<ListEntry> = Vec::new();
    let mut roots = HashMap::new();
    for owner in caller.owners() {
        for listed in host.sessions().list(owner)? {
            if let Ok(summary) = &listed.summary {
                roots.insert(summary.id.clone(), listed.name.clone());
            }
            // One's own hides another's of the same name.
            let is_own = owner == caller.owner();
            if is_own || host.sessions().find(caller, &listed.name).owner == *owner {
                entries.push(ListEntry::Stored(owner.clone(), listed));
            }
        }
    }
    entries.extend(host.sessions().transients().list(caller).into_iter().map(ListEntry::Transient));
    entries.sort_by(|a, b| a.id().cmp(b.id()));
    Ok((entries, roots))
}

/// The KV of a session in an engine.
struct ResidentSession {
    info: SessionInfo,
    kv_bytes: usize,
}

impl ResidentSession {
    fn new(info: SessionInfo, engine: &EngineClient) -> Self {
        let kv_bytes =
            if info.num_resident == 0 { 0 } else { engine.spec().sequence_bytes(info.num_resident) };
        Self { info, kv_bytes }
    }

    /// Adds this, unless as much is said of the session by what another model's engine holds.
    fn add_to(self, known: &mut InEngines) {
        let rank = |session: &Self| (session.info.state != SessionState::Idle, session.info.num_resident);
        if known.get(&self.info.name).is_none_or(|other| rank(&self) > rank(other)) {
            known.insert(self.info.name.clone(), self);
        }
    }
}

type InEngines = HashMap<EngineSessionName, ResidentSession>;

/// Sessions of all engines of all loaded models.
fn in_engines(host: &SessionHost) -> Result<InEngines, ApiError> {
    let mut known = InEngines::new();
    for app in host.apps() {
        in_engines_of(app)?.into_values().for_each(|session| session.add_to(&mut known));
    }
    Ok(known)
}

/// Sessions of all engines of a model. An engine that went down meanwhile contributes none.
fn in_engines_of(app: &App) -> Result<InEngines, ApiError> {
    let mut known = InEngines::new();
    for engine in app.engines().up() {
        match engine.list_sessions() {
            Ok(infos) => {
                for info in infos {
                    // One that has moved may have left an older state behind.
                    let is_with = |own: EngineClient| own.is_same(&engine);
                    if !known.contains_key(&info.name) || app.engine_of(Some(&info.name)).is_ok_and(is_with) {
                        known.insert(info.name.clone(), ResidentSession::new(info, &engine));
                    }
                }
            }
            Err(Error::EngineGone) => app.engine_lost(&engine),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(known)
}

/// `?messages=true` adds the conversation.
pub async fn get(
    asked: AskedSession,
    OnlyTransient(only_transient): OnlyTransient,
    Query(query): Query<HashMap<String, String>>,
) -> Result<Json<Value>, ApiError> {
    let with_messages = match query.get("messages").map(String::as_str) {
        None | Some("false") => false,
        Some("true") => true,
        Some(_) => return Err(ApiError::invalid("messages", "messages is neither true nor false")),
    };
    let session =
        asked.answer(move |host, caller, key| match transient(host, caller, &key, only_transient) {
            Some(transient) => look_at_transient(host, &transient, with_messages),
            None => look_at(host, &key, with_messages),
        });
    session.await
}

/// The receipts of all turns, and in a header the hash of the last one.
pub async fn receipt(
    asked: AskedSession,
) -> Result<(AppendHeaders<Option<(HeaderName, HeaderValue)>>, Json<Value>), ApiError> {
    let receipts = asked.answer(|host, _, key| {
        let (saved, _) = host.sessions().read(&key)?;
        let turn = |number: usize| {
            let saved = saved.up_to(number);
            let (receipt, hash) = (saved.last_receipt(), saved.last_receipt_hash());
            let is_intact = receipt.as_ref().map(|receipt| Some(&*receipt.hash()) == hash);
            json!({"turn": number, "hash": hash, "intact": is_intact, "receipt": receipt})
        };
        let turns: Vec<Value> = (1..=saved.turns.len()).map(turn).collect();
        let (id, hash) = (key.name.as_str(), saved.last_receipt_hash());
        Ok(json!({"object": "session.receipt", "session_id": id, "hash": hash, "turns": turns}))
    });
    let receipts = receipts.await?;
    let header = receipts["hash"].as_str().and_then(reply::receipt_header);
    Ok((AppendHeaders(header), receipts))
}

/// The transient session that is meant: where there is no stored one, or it is asked for.
fn transient(
    host: &SessionHost,
    caller: &Caller,
    key: &SessionKey,
    only_transient: bool,
) -> Option<Transient> {
    let is_stored = !only_transient && host.sessions().exists(key);
    host.sessions().transients().get(caller, key.name.as_str()).filter(|_| !is_stored)
}

fn look_at(host: &SessionHost, key: &SessionKey, with_messages: bool) -> Result<Value, ApiError> {
    // Without an engine, as while a worker is brought back, nothing of it is in memory.
    let engines = host.engines_of(&key.engine_name()).unwrap_or_default();
    let (saved, summary) = host.sessions().read(key)?;
    let mut in_engines = InEngines::new();
    for engine in engines {
        let Some(detail) = known(host, engine.inspect_session(&key.engine_name()))? else { continue };
        ResidentSession::new(detail.info, &engine).add_to(&mut in_engines);
    }
    let looked = Looking { host, in_engines: &in_engines };
    let mut session = looked.stored(key, &summary);
    session["fork_of"] = fork_json(summary.fork_of.as_ref());
    let branches = host.sessions().branches(key)?;
    let root = saved.branch().cloned();
    session["branches"] = branches.iter().filter(|_| root.is_none()).map(branch_json).collect();
    if let Some(branch) = root {
        let is_root = |listed: &Listed| listed.summary.as_ref().is_ok_and(|summary| summary.id == branch.of);
        let of = host.sessions().list(&key.owner)?.into_iter().find(is_root);
        let of = of.map(|listed| listed.name.to_string());
        session["branch"] = json!({"of": of, "reason": branch.reason.as_str()});
    }
    if with_messages {
        add_messages(&mut session, &saved);
    }
    Ok(session)
}

fn look_at_transient(
    host: &SessionHost,
    transient: &Transient,
    with_messages: bool,
) -> Result<Value, ApiError> {
    let in_engines = in_engines(host)?;
    let looked = Looking { host, in_engines: &in_engines };
    let mut session = looked.transient(transient);
    let conversation = |branch: &TransientBranch| {
        let mut one = looked.resident(Some(&branch.name));
        one["turns"] = branch.saved.turns.len().into();
        one["tokens"] = branch.saved.num_tokens().into();
        if with_messages {
            add_messages(&mut one, &branch.saved);
        }
        one
    };
    session["conversations"] = transient.branches.iter().map(conversation).collect();
    Ok(session)
}

/// Adds the conversation, and how many of its messages each turn has and why its answer ended.
fn add_messages(session: &mut Value, saved: &SavedSession) {
    session["messages"] = saved.messages().map(message_json).collect();
    let turns = saved.turns.iter().map(|saved| &saved.turn);
    session["turn_ends"] = turns
        .map(|turn| json!({"messages": turn.messages.len(), "finish_reason": turn.finish.reason()}))
        .collect();
}

fn fork_json(fork: Option<&ForkOf>) -> Value {
    fork.map_or(Value::Null, |fork| json!({"id": fork.name, "turns": fork.turns}))
}

fn branch_json(listed: &Listed) -> Value {
    let id = listed.name.as_str();
    let summary = match &listed.summary {
        Ok(summary) => summary,
        Err(error) => return json!({"id": id, "error": ApiError::from(error.clone()).message}),
    };
    json!({
        "id": id,
        "reason": listed.branch().map(|branch| branch.reason.as_str()),
        "kept_turns": summary.fork_of.as_ref().map(|fork| fork.turns),
        "turns": summary.turns,
        "tokens": summary.tokens,
        "created_at": summary.created_ms / 1000,
        "last_used_at": summary.last_used_ms / 1000,
    })
}

/// Data for listing sessions.
struct Looking<'a> {
    host: &'a SessionHost,
    in_engines: &'a InEngines,
}

impl Looking<'_> {
    fn entry(&self, entry: &ListEntry, roots: &HashMap<String, SessionName>) -> Value {
        let (owner, listed) = match entry {
            ListEntry::Transient(transient) => return self.transient(transient),
            ListEntry::Stored(owner, listed) => (owner, listed),
        };
        let key = SessionKey { owner: owner.clone(), name: listed.name.clone() };
        match &listed.summary {
            Err(error) => {
                json!({"id": key.name.as_str(), "object": "session", "error": ApiError::from(error.clone()).message})
            }
            Ok(summary) => {
                let mut session = self.stored(&key, summary);
                if let Some(branch) = listed.branch() {
                    let of = roots.get(&branch.of).map(SessionName::as_str);
                    session["branch"] = json!({"of": of, "reason": branch.reason.as_str()});
                }
                session
            }
        }
    }

    fn stored(&self, key: &SessionKey, summary: &SessionSummary) -> Value {
        let mut session = json!({
            "id": key.name.as_str(),
            "object": "session",
            "transient": false,
            "owner": summary.owner,
            "branch": null,
            "created_at": summary.created_ms / 1000,
            "last_used_at": summary.last_used_ms / 1000,
            "model": summary.model.name,
            "turns": summary.turns,
            "tokens": summary.tokens,
            "bytes": summary.num_bytes,
        });
        merge(&mut session, self.resident(Some(&key.engine_name())));
        session
    }

    fn transient(&self, transient: &Transient) -> Value {
        let last = transient.branches.first();
        let mut session = json!({
            "id": transient.id,
            "object": "session",
            "transient": true,
            "branch": null,
            "created_at": transient.created_ms / 1000,
            "last_used_at": transient.last_used_ms / 1000,
            "model": last.map(|branch| branch.saved.model.name.as_str()),
            "num_conversations": transient.branches.len(),
            "turns": last.map_or(0, |branch| branch.saved.turns.len()),
            "tokens": last.map_or(0, |branch| branch.saved.num_tokens()),
            "bytes": 0,
        });
        merge(&mut session, self.resident(last.map(|branch| &branch.name)));
        session
    }

    /// Part of it in memory, and the start of its last prompt.
    fn resident(&self, engine_name: Option<&EngineSessionName>) -> Value {
        let resident = engine_name.and_then(|name| self.in_engines.get(name));
        let last = engine_name.and_then(|name| self.host.sessions().resumes(name).last);
        json!({
            "state": resident.map_or(SessionState::Idle, |resident| resident.info.state),
            "resident_tokens": resident.map_or(0, |resident| resident.info.num_resident),
            "kv_bytes": resident.map_or(0, |resident| resident.kv_bytes),
            "last_resume": last.map(|resume| resume_json(&resume)),
        })
    }
}

fn merge(object: &mut Value, more: Value) {
    if let (Value::Object(object), Value::Object(more)) = (object, more) {
        object.extend(more);
    }
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

/// Explains why the session's last prompt that did not continue at its end was not resumed further: where the
/// two part, and the text there. Also the changes that were made to the last request.
pub async fn explain(
    asked: AskedSession,
    OnlyTransient(only_transient): OnlyTransient,
) -> Result<Json<Value>, ApiError> {
    let explained = asked.answer(move |host, caller, key| {
        let engine_name = match transient(host, caller, &key, only_transient) {
            Some(transient) => transient.branches.first().map(|branch| branch.name.clone()),
            None => {
                host.sessions().read(&key)?;
                Some(key.engine_name())
            }
        };
        let resumes = engine_name.as_ref().map(|name| host.sessions().resumes(name));
        let Resumes { last, last_miss, notices, engines } = resumes.unwrap_or_default();
        // Tokens are text to the model that the session was with; one that is unloaded reads none.
        let was_with = engines.first();
        let was_with = was_with.and_then(|engine| host.apps().iter().find(|app| app.engines().had(*engine)));
        let miss = last_miss.map(|(resume, difference)| miss_json(&resume, &difference, was_with));
        let last = last.map(|resume| resume_json(&resume));
        let broken = engine_name.and_then(|name| host.prefixes().last(&name));
        Ok(json!({
            "session_id": key.name.as_str(), "last_resume": last, "last_miss": miss, "notices": notices,
            "prefix_break": broken.map(|broken| broken.to_json()),
        }))
    });
    explained.await
}

/// Returns where a prompt and its session part; the texts there are null without the model.
fn miss_json(resume: &Resume, difference: &Difference, model: Option<&App>) -> Value {
    let explained = model.map(|app| difference.explain(&**app.model().chat_tokenizer.tokenizer()));
    let mut miss = resume_json(resume);
    miss["position"] = difference.position.into();
    miss["before"] = json!(explained.as_ref().map(|texts| &texts.before));
    miss["session"] =
        json!({"tokens": difference.session, "text": explained.as_ref().map(|texts| &texts.session)});
    miss["prompt"] =
        json!({"tokens": difference.prompt, "text": explained.as_ref().map(|texts| &texts.prompt)});
    miss
}

/// Returns the result of work on a session, or `None` if there is no such session.
///
/// # Errors
/// All other errors of the work.
pub fn known<T>(host: &SessionHost, result: llmctl_base::Result<T>) -> Result<Option<T>, ApiError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(Error::SessionNotFound(_)) => Ok(None),
        Err(error) => Err(host.retriable(error.into())),
    }
}
