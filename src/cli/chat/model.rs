//! The model of a chat: loaded here or at an endpoint, replaced, and asked for its facts.

use super::grouped;
use super::throughput::ThroughputEstimate;
use crate::cli::endpoint::{ChatEndpoint, EndpointChoice, unavailable};
use crate::cli::error::CommandError;
use crate::cli::flags::args::{EndpointArgs, EngineArgs, ModelArgs};
use crate::cli::model::load;
use crate::cli::model::load::Loaded;
use crate::cli::places::Places;
use crate::cli::terminal::Terminal;
use crate::cli::think::Thinking;
use llmctl_base::{Error, GivenSampling, Notice};
use llmctl_engine::session::store::{ModelFingerprint, SavedSession};
use llmctl_engine::{EngineClient, EngineSessionName, Grammar, GrammarSource};
use llmctl_hub::builtin::GUIDE;
use llmctl_models::hints::Frontend;
use llmctl_template::TemplateError;

/// Source of a chat's answers.
pub enum Answerer {
    Loaded(Box<Loaded>),
    /// A server that takes messages.
    Endpoint(Box<ChatEndpoint>),
}

/// The flags that choose the source of answers.
pub struct ModelFlags {
    pub model: ModelArgs,
    pub engine: EngineArgs,
    pub endpoint: EndpointArgs,
}

/// A model to change to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextModel {
    /// A model here.
    Here(String),
    /// A model of an endpoint.
    There(EndpointChoice),
}

/// A model that is loaded and does not answer.
struct SpareModel {
    args: ModelArgs,
    /// Its sessions' KV is saved.
    is_saved: bool,
    llm: Box<Loaded>,
}

impl SpareModel {
    /// Returns whether it is the model that these arguments name.
    fn is(&self, args: &ModelArgs, is_saved: bool) -> bool {
        let reference = |args: &ModelArgs| args.model.clone().unwrap_or_else(|| GUIDE.name.to_owned());
        self.is_saved == is_saved && reference(&self.args) == reference(args)
    }
}

/// The model of a chat.
pub struct ChatModel<'a> {
    /// `None` only while another model is loaded, and after that has failed.
    answerer: Option<Answerer>,
    pub args: ModelArgs,
    engine: EngineArgs,
    endpoint_args: EndpointArgs,
    terminal: &'a Terminal,
    places: &'a Places,
    /// The user's last choice in the chat, which sessions that are loaded later keep to. The address is not put among the arguments
    /// of the endpoint, because the key would go there.
    named: Option<NextModel>,
    /// A second model in memory: the one that answered before, or that of /compare.
    spare: Option<SpareModel>,
    pub throughput: ThroughputEstimate,
}

impl<'a> ChatModel<'a> {
    /// Loads the model that the flags name, or connects to the endpoint `choice`.
    ///
    /// # Errors
    /// Why it cannot be loaded or reached, or that it has no chat template.
    pub fn load(
        flags: ModelFlags,
        choice: Option<EndpointChoice>,
        is_saved: bool,
        (terminal, places): (&'a Terminal, &'a Places),
    ) -> Result<Self, CommandError> {
        let ModelFlags { model: args, engine, endpoint: endpoint_args } = flags;
        let (answerer, named, spare, throughput) = Default::default();
        let mut model =
            Self { answerer, args, engine, endpoint_args, terminal, places, named, spare, throughput };
        model.answerer = Some(match choice {
            Some(choice) => Answerer::Endpoint(Box::new(model.connect(&choice)?)),
            None => Answerer::Loaded(Box::new(model.load_llm(&model.args, is_saved)?)),
        });
        model.measure_anew();
        Ok(model)
    }

    fn measure_anew(&mut self) {
        self.throughput = ThroughputEstimate::of(&self.fingerprint().fingerprint, self.places.state.clone());
    }

    /// Takes another model in place of this one; if that fails, this one answers again, and the failure is inside.
    ///
    /// # Errors
    /// That this one cannot be loaded again.
    pub fn change(&mut self, next: &NextModel, is_saved: bool) -> Result<Option<CommandError>, CommandError> {
        let failure = match next {
            NextModel::Here(reference) => self.change_here(reference, is_saved)?,
            NextModel::There(choice) => match self.connect(choice) {
                Ok(endpoint) => {
                    self.answerer = Some(Answerer::Endpoint(Box::new(endpoint)));
                    None
                }
                Err(error) => Some(error),
            },
        };
        self.measure_anew();
        Ok(failure)
    }

    fn change_here(&mut self, reference: &str, is_saved: bool) -> Result<Option<CommandError>, CommandError> {
        let before = self.args.clone();
        let next = ModelArgs { model: Some(reference.to_owned()), ..before.clone() };
        if let Some(spare) = self.spare.take_if(|spare| spare.is(&next, is_saved)) {
            self.set_aside(is_saved);
            (self.args, self.answerer) = (next, Some(Answerer::Loaded(spare.llm)));
            return Ok(None);
        }
        self.spare = None;
        let has_room = load::fits_beside(&next, self.engine.resolve(is_saved), self.terminal);
        // This one is dropped first, unless both fit into memory. An endpoint takes none.
        let is_kept = has_room || self.endpoint().is_some();
        let left = self.answerer.take().filter(|_| is_kept);
        match self.load_llm(&next, is_saved) {
            Ok(llm) => {
                self.answerer = left;
                self.set_aside(is_saved);
                (self.args, self.answerer) = (next, Some(Answerer::Loaded(Box::new(llm))));
                Ok(None)
            }
            Err(error) => {
                self.answerer = Some(match left {
                    Some(answerer) => answerer,
                    None => Answerer::Loaded(Box::new(self.load_llm(&before, is_saved)?)),
                });
                Ok(Some(error))
            }
        }
    }

    /// Makes the model that is loaded here the second one.
    fn set_aside(&mut self, is_saved: bool) {
        if let Some(Answerer::Loaded(llm)) = self.answerer.take() {
            self.spare = Some(SpareModel { args: self.args.clone(), is_saved, llm });
        }
    }

    /// Connects to a model of an endpoint.
    ///
    /// # Errors
    /// As [`EndpointChoice::connect`].
    pub fn connect(&self, choice: &EndpointChoice) -> Result<ChatEndpoint, CommandError> {
        choice.connect(&self.endpoint_args, self.terminal)
    }

    fn load_llm(&self, args: &ModelArgs, is_saved: bool) -> Result<Loaded, CommandError> {
        let llm =
            load::load(args, self.engine.resolve(is_saved), self.terminal)?.for_frontend(Frontend::Chat);
        check_template(&llm)?;
        Ok(llm)
    }

    /// Loads a second model beside the one that answers; one that is loaded already stays.
    ///
    /// # Errors
    /// Why it cannot be loaded, e.g. that it does not fit into memory beside the first.
    pub fn load_beside(&mut self, reference: &str, is_saved: bool) -> Result<(), CommandError> {
        let args = ModelArgs { model: Some(reference.to_owned()), ..self.args.clone() };
        if self.spare.as_ref().is_some_and(|spare| spare.is(&args, is_saved)) {
            return Ok(());
        }
        self.spare = None;
        let llm = Box::new(self.load_llm(&args, is_saved)?);
        self.spare = Some(SpareModel { args, is_saved, llm });
        Ok(())
    }

    /// Returns the model that a reference means: of an endpoint, or here.
    pub fn meant(&self, reference: &str) -> NextModel {
        match (EndpointChoice::parse(reference), self.endpoint()) {
            (Some(choice), _) => NextModel::There(choice),
            (None, Some(endpoint)) => {
                let (url, model) = (endpoint.url().clone(), Some(reference.to_owned()));
                NextModel::There(EndpointChoice { url, model })
            }
            (None, None) => NextModel::Here(reference.to_owned()),
        }
    }

    /// Returns the second model.
    pub fn beside(&self) -> Option<&Loaded> {
        self.spare.as_ref().map(|spare| &*spare.llm)
    }

    /// Returns the source of answers.
    pub fn answerer(&self) -> &Answerer {
        self.answerer.as_ref().expect("a model is there whenever a command or a message is taken")
    }

    /// Returns the model that is loaded here; `None` at an endpoint.
    pub fn here(&self) -> Option<&Loaded> {
        match self.answerer() {
            Answerer::Loaded(llm) => Some(llm),
            Answerer::Endpoint(_) => None,
        }
    }

    /// Returns the endpoint, if one answers.
    pub fn endpoint(&self) -> Option<&ChatEndpoint> {
        match self.answerer() {
            Answerer::Loaded(_) => None,
            Answerer::Endpoint(endpoint) => Some(endpoint),
        }
    }

    /// Notes the model that the user has named in the chat, after the change to it.
    pub fn note_named(&mut self, named: NextModel) {
        self.args.is_named |= matches!(named, NextModel::Here(_));
        self.named = Some(named);
    }

    /// Returns whether the user names the model, in the chat or before it.
    pub fn is_named(&self) -> bool {
        self.args.is_named || self.named.is_some()
    }

    /// Returns the endpoint that a session continues with; `None` if a model here does. What the user named in the chat wins.
    pub fn endpoint_choice(&self, saved: &SavedSession) -> Option<EndpointChoice> {
        match &self.named {
            Some(NextModel::There(choice)) => Some(choice.clone()),
            Some(NextModel::Here(_)) => None,
            None => EndpointChoice::of(&self.endpoint_args, &self.args, Some(saved)),
        }
    }

    /// Returns the model that is loaded here.
    ///
    /// # Errors
    /// At an endpoint, that `what` is not available there.
    pub fn needed_for(&self, what: &str) -> Result<&Loaded, CommandError> {
        self.here().ok_or_else(|| unavailable(what))
    }

    /// Returns whether there is a model.
    pub fn is_loaded(&self) -> bool {
        self.answerer.is_some()
    }

    /// Returns the model's name.
    pub fn name(&self) -> &str {
        match self.answerer() {
            Answerer::Loaded(llm) => &llm.info().name,
            Answerer::Endpoint(endpoint) => endpoint.model(),
        }
    }

    pub fn fingerprint(&self) -> ModelFingerprint {
        self.answerer().fingerprint()
    }

    /// Returns the size of the context, in tokens; `None` at an endpoint, which does not say.
    pub fn context(&self) -> Option<usize> {
        self.here().map(|llm| llm.info().context_tokens)
    }

    /// Describes the model in a few words: its name, and the size of its context or its endpoint.
    pub fn spoken(&self) -> String {
        match self.answerer() {
            Answerer::Loaded(llm) => {
                let info = llm.info();
                format!("{}, context {}", info.name, grouped(info.context_tokens))
            }
            Answerer::Endpoint(endpoint) => format!("{} at {}", endpoint.model(), endpoint.url()),
        }
    }

    /// Returns what the model's publisher recommends; nothing at an endpoint, which has defaults of its own.
    pub fn defaults(&self) -> GivenSampling {
        self.here().map(|llm| llm.info().defaults.clone()).unwrap_or_default()
    }

    /// Returns what can be done about the model's thinking.
    pub fn thinking(&self) -> Thinking {
        match self.answerer() {
            Answerer::Loaded(llm) => Thinking::of(llm.texts().chat_tokenizer()),
            Answerer::Endpoint(_) => Thinking::elsewhere(),
        }
    }

    /// Compiles a grammar.
    ///
    /// # Errors
    /// A part of the source that cannot be enforced. An endpoint says that with the first message.
    pub fn compile(&self, source: &GrammarSource) -> Result<Option<Grammar>, CommandError> {
        Ok(self.here().map(|llm| llm.compiler().compile(source)).transpose()?)
    }
}

/// The engine's side of a session. An endpoint knows nothing of sessions.
impl ChatModel<'_> {
    fn engine(&self) -> Option<&EngineClient> {
        self.here().map(Loaded::engine)
    }

    /// Forgets a session's tokens; there may be none.
    ///
    /// # Errors
    /// As [`EngineTransport::reset_session`](llmctl_engine::EngineTransport::reset_session).
    pub fn reset_session(&self, name: &EngineSessionName) -> Result<(), Error> {
        match self.engine().map_or(Ok(()), |engine| engine.reset_session(name)) {
            Err(Error::SessionNotFound(_)) => Ok(()),
            reset => reset,
        }
    }

    /// Closes a session; there is none before the first turn.
    pub fn close_session(&self, name: &EngineSessionName) {
        if let Some(engine) = self.engine() {
            let _ = engine.close_session(name); // as said
        }
    }

    /// As [`Loaded::restore`].
    ///
    /// # Errors
    /// [`Error::EngineGone`].
    pub fn restore_session(&self, name: &EngineSessionName, saved: &SavedSession) -> Result<(), Error> {
        self.here().map_or(Ok(()), |llm| llm.restore(name, saved))
    }

    /// Waits until KV is on disk.
    pub fn flush(&self, timeout: std::time::Duration) {
        if let Some(engine) = self.engine() {
            let _ = engine.flush_disk(timeout); // what is missing is computed again
        }
    }

    pub fn take_notices(&self) -> Vec<Notice> {
        self.engine().map(|engine| engine.take_notices().unwrap_or_default()).unwrap_or_default()
    }
}

impl Answerer {
    fn fingerprint(&self) -> ModelFingerprint {
        match self {
            Self::Loaded(llm) => llm.texts().fingerprint().clone(),
            Self::Endpoint(endpoint) => endpoint.fingerprint(),
        }
    }
}

fn check_template(llm: &Loaded) -> Result<(), CommandError> {
    if llm.texts().chat_tokenizer().has_template() {
        return Ok(());
    }
    let hint = "give one with --chat-template FILE; `llmctl run --raw` completes plain text without one";
    Err(CommandError::from(TemplateError::Missing).hint(hint))
}
