//! A server elsewhere that takes messages: OpenAI's, Ollama's, llama.cpp's, or another llmctl's.
//!
//! `key` reads the API key, `request` builds the body, `answer` joins the parts, `failure` turns HTTP
//! failures into errors of the command. Nothing here knows the terminal: `cli/run/message_answer.rs` shows an
//! answer while it comes.
//!
//! Invariants: the key is neither shown nor saved; what the server is not known to honour is refused by name.

pub mod answer;
mod failure;
mod key;
pub mod request;

use std::cell::RefCell;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::error::{CommandError, Kind};
use super::terminal::Terminal;
use crate::cli::flags::args::{EndpointArgs, ModelArgs};
use crate::cli::model::hub_access::ca_file;
use llmctl_engine::http_engine::{
    EndpointUrl, HttpFailure, MessageServer, MessageStream, ServerKey, ServerSettings, TlsTrust,
};
use llmctl_engine::session::store::{ModelFingerprint, SavedSession};
use request::{EndpointKind, EndpointRequest};

/// Arguments that have no meaning with an endpoint. From a configuration file or a variable they are for models here, except those
/// that change an answer (the last four): these are refused wherever they come from.
pub const WITHOUT_MEANING: &str = "\
draft_model dtype quantize ctx threads threads_batch cpu kv_type device chat_template bos_id eos_id mmproj no_mmproj image_tokens lora \
engine engine_cache_salt no_warm_resume kv_memory kv_disk packed_disk speculate overflow raw \
prefill_response logprobs";

/// Most names that a message lists.
const MAX_LISTED: usize = 30;

/// Characters of a server's words that are shown.
const MAX_SHOWN: usize = 400;

/// A server and one of its models.
pub struct ChatEndpoint {
    url: EndpointUrl,
    model: String,
    kind: EndpointKind,
    key: Option<ServerKey>,
    /// Names of the models that the server lists; empty if it does not say.
    models: Vec<String>,
    server: MessageServer,
    habits: RefCell<BodyHabits>,
}

/// Departures of a server from the usual form, as it has told.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct BodyHabits {
    /// Takes `max_completion_tokens` in place of `max_tokens`.
    renames_limit: bool,
    /// Refuses `stream_options`.
    counts_unasked: bool,
}

impl BodyHabits {
    fn apply(self, body: &mut Map<String, Value>) {
        if self.counts_unasked {
            body.shift_remove("stream_options");
        }
        if self.renames_limit
            && let Some(limit) = body.shift_remove("max_tokens")
        {
            body.insert("max_completion_tokens".to_owned(), limit);
        }
    }
}

/// The endpoint and model that answer next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointChoice {
    pub url: EndpointUrl,
    /// `None` for the only model of the server.
    pub model: Option<String>,
}

impl EndpointChoice {
    /// Parses the reference of a saved session, `https://host/v1#model`; `None` for a model's files.
    pub fn parse(reference: &str) -> Option<Self> {
        let (url, model) = reference.split_once('#').filter(|(_, model)| !model.is_empty())?;
        Some(Self { url: url.parse().ok()?, model: Some(model.to_owned()) })
    }

    /// Returns the endpoint that answers next in a session, or in none; `None` if a model here does. As with models, a session
    /// that has begun continues where it was unless a flag or a variable says otherwise.
    pub fn of(args: &EndpointArgs, model: &ModelArgs, saved: Option<&SavedSession>) -> Option<Self> {
        let saved = saved.filter(|saved| !saved.turns.is_empty());
        // `None` if the last answer is a local model's.
        let own = saved.and_then(|saved| Self::parse(saved.model.reference.as_deref()?));
        let named = model.model.clone().filter(|_| model.is_named);
        match (args.url(), saved) {
            (None, _) if args.is_named => None, // --endpoint none
            (Some(url), saved) if args.is_named || saved.is_none() => {
                let same = own.filter(|own| own.url == *url).and_then(|own| own.model);
                Some(Self { url: url.clone(), model: named.or(same).or_else(|| model.model.clone()) })
            }
            (None, _) if model.is_named => None,
            _ => own.map(|own| Self { model: named.or(own.model), ..own }),
        }
    }

    /// Returns whether an endpoint is the one that is chosen.
    pub fn is(&self, endpoint: &ChatEndpoint) -> bool {
        self.url == endpoint.url && self.model.as_ref().is_none_or(|model| *model == endpoint.model)
    }

    /// Connects to it.
    ///
    /// # Errors
    /// As [`ChatEndpoint::connect`].
    pub fn connect(&self, args: &EndpointArgs, terminal: &Terminal) -> Result<ChatEndpoint, CommandError> {
        let endpoint = ChatEndpoint::connect(self.url.clone(), self.model.as_deref(), args)?;
        endpoint.notice_of_model().iter().for_each(|notice| terminal.warn(notice));
        Ok(endpoint)
    }
}

impl ChatEndpoint {
    /// Connects to a server and asks which models it has. `model` is `None` for the only one.
    ///
    /// # Errors
    /// The key cannot be read or is rejected, the server cannot be reached, or it has several models and none is named.
    pub fn connect(url: EndpointUrl, model: Option<&str>, args: &EndpointArgs) -> Result<Self, CommandError> {
        let (key, kind) = (key::key_for(&url, args)?, EndpointKind::at(&url.address().host));
        let server =
            MessageServer::new(&url, ServerSettings { key: key.clone(), trust: TlsTrust(ca_file()) })?;
        let mut endpoint = Self {
            url,
            model: model.unwrap_or_default().to_owned(),
            kind,
            key,
            models: Vec::new(),
            server,
            habits: RefCell::default(),
        };
        match endpoint.server.get("/models")? {
            Ok(listed) => endpoint.take_list(&listed),
            // A server may have no such list, or keep it from this key; a wrong address or key shows with the first message.
            Err(HttpFailure::Status { code: 400 | 403 | 404 | 405 | 501, .. }) if model.is_some() => {}
            Err(failure) => return Err(endpoint.failure(&failure)),
        }
        if model.is_none() {
            endpoint.model = endpoint.only_model()?;
        }
        Ok(endpoint)
    }

    fn take_list(&mut self, listed: &str) {
        let listed: Value = serde_json::from_str(listed).unwrap_or_default();
        let models = listed["data"].as_array().map(Vec::as_slice).unwrap_or_default();
        let is_shown = |name: &&str| !name.contains(char::is_control);
        let names = models.iter().filter_map(|model| model["id"].as_str()).filter(is_shown);
        self.models = names.map(str::to_owned).collect();
        let meant = models.iter().find(|model| model["id"] == self.model.as_str()).or(models.first());
        let owner = meant.and_then(|model| model["owned_by"].as_str()).unwrap_or_default();
        if self.kind == EndpointKind::Other {
            self.kind = EndpointKind::of(owner);
        }
    }

    fn only_model(&self) -> Result<String, CommandError> {
        match &*self.models {
            [only] => Ok(only.clone()),
            [] => {
                let error = CommandError::usage(format!("{} lists no models", self.url));
                Err(error.hint("--model NAME names the one to ask"))
            }
            _ => {
                let error = CommandError::usage(format!("{} has several models", self.url));
                Err(error.hint(format!("--model NAME names one: {}", self.listed())))
            }
        }
    }

    /// Returns the names of the server's models, the first of many.
    fn listed(&self) -> String {
        let names: Vec<&str> = self.models.iter().take(MAX_LISTED).map(String::as_str).collect();
        let more = self.models.len() - names.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{more}", names.join(", "))
    }

    pub fn url(&self) -> &EndpointUrl {
        &self.url
    }

    pub fn model(&self) -> &str {
        &self.model
    }

    /// Returns the names of the models that the server lists.
    pub fn models(&self) -> &[String] {
        &self.models
    }

    /// Returns a warning if the server lists models and the chosen one is not among them.
    pub fn notice_of_model(&self) -> Option<String> {
        let is_listed = self.models.is_empty() || self.models.contains(&self.model);
        let (url, model) = (&self.url, &self.model);
        (!is_listed).then(|| format!("{url} does not list {model}; it lists: {}", self.listed()))
    }

    /// Returns the endpoint as sessions name it. The key is no part of that.
    pub fn fingerprint(&self) -> ModelFingerprint {
        let reference = format!("{}#{}", self.url, self.model);
        let digest = Sha256::digest(format!("endpoint {reference}"));
        let fingerprint = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        ModelFingerprint { name: self.model.clone(), fingerprint, reference: Some(reference) }
    }

    /// Returns the body of a request.
    ///
    /// # Errors
    /// As [`EndpointRequest::body`].
    pub fn body(&self, request: &EndpointRequest<'_>) -> Result<Map<String, Value>, CommandError> {
        let mut body = request.body(self.kind, &self.model)?;
        self.habits.borrow().apply(&mut body);
        Ok(body)
    }

    /// Sends a request.
    pub fn send(&self, body: &Map<String, Value>) -> MessageStream {
        self.server.stream("/chat/completions", Value::Object(body.clone()))
    }

    /// Changes a body to what the server has just asked for in its refusal. Returns whether it should be sent again.
    pub fn adapt(&self, failure: &HttpFailure, body: &mut Map<String, Value>) -> bool {
        let HttpFailure::Status { code: 400 | 422, message, .. } = failure else { return false };
        let mut habits = self.habits.borrow_mut();
        let before = *habits;
        habits.renames_limit |= body.contains_key("max_tokens") && message.contains("max_completion_tokens");
        habits.counts_unasked |= body.contains_key("stream_options") && message.contains("stream_options");
        habits.apply(body);
        before != *habits
    }

    /// Returns the error for a request that has no answer.
    pub fn failure(&self, failure: &HttpFailure) -> CommandError {
        let url = self.url.to_string();
        let error = failure::explained(failure, &url, self.key.is_some());
        match failure {
            HttpFailure::Status { code: 404, .. } if !self.models.is_empty() => {
                error.hint(format!("it has these models: {}", self.listed()))
            }
            _ => error,
        }
    }

    /// Returns the error for an answer that ended too soon or cannot be read.
    pub fn broken(&self, why: &str) -> CommandError {
        let why = shown(why, self.key.as_ref());
        Kind::Unavailable.error(format!("{}: {why}", self.url))
    }
}

/// Returns a server's words as a message shows them. The key is hidden before the text is cut, because a part of it would stay.
fn shown(words: &str, key: Option<&ServerKey>) -> String {
    let words = key.map_or(words.to_owned(), |key| key.hidden_in(words));
    words.chars().filter(|c| !c.is_control()).take(MAX_SHOWN).collect()
}

/// Refuses flags on the command line that have no meaning with an endpoint.
///
/// # Errors
/// A usage error that names the first.
pub fn check_flags(args: &EndpointArgs) -> Result<(), CommandError> {
    let Some(id) = args.beside.first() else { return Ok(()) };
    let error = CommandError::usage(format!("{}: has no meaning with an endpoint", request::flag(id)));
    Err(error.hint("leave it out, or set it where that server is started"))
}

/// Returns the refusal of something that needs a model here.
pub fn unavailable(what: &str) -> CommandError {
    let message =
        format!("{what}: not available with --endpoint: the server takes messages and counts its own tokens");
    CommandError::usage(message)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::answer::{EndpointAnswer, PartsEnd};
    use super::*;
    use llmctl_base::Sampling;
    use llmctl_engine::turn::SessionChat;
    use llmctl_engine::turn::session_chat::RecordedAnswer;
    use llmctl_template::Message;

    /// Returns a session of one turn, answered by the model of this reference.
    fn saved_by(reference: &str) -> SavedSession {
        let (name, fingerprint) = ("m".to_owned(), "1".to_owned());
        let model = ModelFingerprint { name, fingerprint, reference: Some(reference.to_owned()) };
        let mut session_chat = SessionChat::new(model);
        let turn = session_chat.addressed(vec![Message::user("q")]);
        let (_, answer) = EndpointAnswer::begin().finish(&PartsEnd::Ended(None), None);
        session_chat.record(turn, RecordedAnswer::of(&answer, Sampling::default())).expect("kept");
        session_chat.saved().clone()
    }

    #[test]
    fn references_of_endpoints_are_no_files() {
        let parsed = EndpointChoice::parse("https://host/v1#org/model#2").expect("an endpoint");
        assert_eq!(
            (parsed.url.to_string().as_str(), parsed.model.as_deref()),
            ("https://host/v1", Some("org/model#2"))
        );
        for file in ["/models/a#b.gguf", "org/repo:Q4_K_M", "guide", "https://host/v1", "https://host/v1#"] {
            assert_eq!(EndpointChoice::parse(file), None, "{file}");
        }
    }

    #[test]
    fn no_part_of_a_key_is_shown() {
        let key = ServerKey::new("sk-very-secret").expect("a key");
        let words = format!("{}{}", "x".repeat(MAX_SHOWN - 5), "sk-very-secret\n and more");
        let shown = shown(&words, Some(&key));
        assert_eq!(shown, format!("{}*** a", "x".repeat(MAX_SHOWN - 5)));
    }

    #[test]
    fn none_leaves_an_endpoint_that_a_file_names() {
        let args = |endpoint: &str, is_named| EndpointArgs {
            endpoint: Some(endpoint.parse().expect("an endpoint")),
            is_named,
            ..EndpointArgs::default()
        };
        let model = ModelArgs::default();
        assert!(EndpointChoice::of(&args("https://host", false), &model, None).is_some());
        assert_eq!(EndpointChoice::of(&args("none", true), &model, None), None);
        let url = "https://host/v1".parse().expect("an address");
        let there = EndpointChoice { url, model: Some("m".to_owned()) };
        let saved = saved_by("https://host/v1#m");
        assert_eq!(EndpointChoice::of(&args("none", true), &model, Some(&saved)), None);
        assert_eq!(EndpointChoice::of(&args("none", false), &model, Some(&saved)), Some(there));
    }

    #[test]
    fn a_known_host_needs_no_list() {
        assert_eq!(EndpointKind::at("api.openai.com"), EndpointKind::OpenAi);
        assert_eq!(EndpointKind::at("api.openai.com.evil.org"), EndpointKind::Other);
    }

    #[test]
    fn a_server_teaches_its_habits() {
        let body = || {
            let body = json!({"max_tokens": 5, "stream_options": {"include_usage": true}, "stream": true});
            body.as_object().expect("an object").clone()
        };
        let mut renamed = body();
        BodyHabits { renames_limit: true, counts_unasked: false }.apply(&mut renamed);
        assert_eq!((renamed.get("max_tokens"), renamed["max_completion_tokens"].as_u64()), (None, Some(5)));
        let mut short = body();
        BodyHabits { renames_limit: false, counts_unasked: true }.apply(&mut short);
        assert_eq!(short.get("stream_options"), None);
    }
}
