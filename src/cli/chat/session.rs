//! One chat: opens and leaves sessions, and keeps state, model and engine in step.
//!
//! Invariants: at most one session is open, here and in the engine, and the one in the engine bears the same
//! name; a session that comes to no turn is not left behind. A session gets its name and its place on disk
//! with the first message, so that looking in leaves nothing.

mod greeting;

use super::complete::Catalog;
use super::input::{InputLine, LineInput};
use super::model::{ChatModel, ModelFlags, NextModel};
use super::state::{AnswerRequest, AnswerSchema, ChatState, Effect, SavePlace};
use super::ui::Ui;
use super::{ChatArgs, ChatPromptArgs, grouped};
use crate::cli::declared_tools::Toolbox;
use crate::cli::endpoint::EndpointChoice;
use crate::cli::endpoint::request::EndpointRequest;
use crate::cli::error::{CommandError, Kind};
use crate::cli::mcp::ToolServers;
use crate::cli::model::{resume, starter};
use crate::cli::places::{KeptFiles, Places};
use crate::cli::run::settings::AnswerSettings;
use crate::cli::run::{note_system, system_prompt};
use crate::cli::terminal::Terminal;
use crate::cli::terminal::signal::Graceful;
use crate::cli::think::{Think, Thinking};
use crate::cli::{endpoint, sessions};
use llmctl_base::{Error, Sampling};
use llmctl_engine::GrammarSource;
use llmctl_engine::session::store::{Listed, SavedSession, SessionName, SessionStore, SessionWriter, now_ms};
use llmctl_engine::turn::{PromptedTurn, SessionChat};
use llmctl_hub::builtin::GUIDE;
use llmctl_image::ImageSet;
use llmctl_template::{Conversation, DateTime, Message};

/// Number of tokens that are computed too fast to report.
const TRIFLE: usize = 64;

/// One chat: its state, the terminal, and the model.
pub struct Chat<'a> {
    pub state: ChatState,
    pub ui: Ui<'a>,
    pub model: ChatModel<'a>,
    /// MCP servers, if there are any.
    pub servers: Option<ToolServers>,
    /// Answers in a row whose calls are run.
    pub max_rounds: u32,
    pub places: &'a Places,
}

/// A longer message is not put on the line again.
const MAX_BACK: usize = 4 << 10;

/// Returns the system prompt that the user asks for; one of a variable or a configuration file is for new sessions.
fn system_of(prompt: &ChatPromptArgs, saved: Option<&SavedSession>) -> Result<Option<String>, CommandError> {
    let is_new = saved.is_none_or(|saved| saved.turns.is_empty());
    let system = system_prompt(prompt.system.as_ref(), prompt.system_file.as_ref())?;
    Ok(system.filter(|_| is_new || prompt.is_system_given))
}

impl<'a> Chat<'a> {
    /// Locks the session, loads its model, and says what there is.
    pub fn begin(
        mut args: ChatArgs,
        terminal: &'a Terminal,
        places: &'a Places,
    ) -> Result<Self, CommandError> {
        let settings = settings(&args)?;
        let think = Think::of_flag(args.prompt.think.as_deref())?;
        let toolbox = args.prompt.tools.as_deref().map(Toolbox::read).transpose()?;
        check_flags(&args, places)?;
        let wanted = wanted_session(&args, places)?;
        // Before the model is loaded, so that a session in use is refused at once.
        let open = |name: &SessionName| sessions::if_there(sessions::store(places)?.open(name));
        let opened = wanted.as_ref().map_or(Ok(None), open)?;
        let saved = opened.as_ref().map(|writer| writer.saved());
        let system = system_of(&args.prompt, saved)?;
        let choice = EndpointChoice::of(&args.endpoint, &args.model, saved);
        match &opened {
            _ if choice.is_some() => {}
            Some(writer) => {
                args.model = resume::model_of(&args.model, writer.name(), writer.saved(), "--model REF")?;
            }
            None if args.prompt.message.is_some() => {}
            None => starter::offer(&mut args.model, places, terminal)?,
        }
        let input = LineInput::open(terminal, places.state.as_deref().filter(|_| !args.session.ephemeral))?;
        let servers = ToolServers::begin(&args.mcp, terminal)?;
        toolbox.as_ref().map_or(Ok(()), |toolbox| toolbox.check_names(servers.as_ref()))?;
        let ChatArgs { model, engine, endpoint, screen, session, mcp, .. } = args;
        choice.as_ref().map_or(Ok(()), |_| endpoint::check_flags(&endpoint))?;
        let flags = ModelFlags { model, engine, endpoint };
        let model = ChatModel::load(flags, choice, !session.ephemeral, (terminal, places))?;
        if let Some(llm) = model.here() {
            note_system(llm.texts().chat_tokenizer(), system.as_deref(), terminal);
        }
        let state = ChatState {
            session_chat: SessionChat::new(model.fingerprint()),
            keeping: if session.ephemeral { SavePlace::Nowhere } else { SavePlace::Planned },
            is_ephemeral: session.ephemeral,
            system,
            settings,
            think,
            toolbox,
            schema: None,
            attached: Vec::new(),
            images: Vec::new(),
            files: ImageSet::default(),
            last: None,
            editing: None,
            taken: None,
            results: None,
            pending: None,
            has_warned: false,
        };
        let ui = Ui { terminal, input, graceful: Graceful::begin_conversation(), is_plain: screen.plain };
        let mut chat = Self { state, ui, model, servers, max_rounds: mcp.max_tool_rounds, places };
        let resumed = chat.open(opened, wanted)?;
        chat.state.think.check_flag(&chat.model.thinking())?;
        chat.check_endpoint()?;
        chat.banner(resumed.as_deref());
        Ok(chat)
    }

    /// Takes up the session that was opened, or makes the one that is wanted; gives what was found of its KV, in words.
    fn open(
        &mut self,
        opened: Option<SessionWriter>,
        wanted: Option<SessionName>,
    ) -> Result<Option<String>, CommandError> {
        self.greet_servers();
        match (opened, wanted) {
            (Some(writer), _) => self.adopt(writer, false),
            (None, Some(name)) => {
                let model = self.model.fingerprint();
                let writer = self.store()?.open_or_create(&name, &model).map_err(sessions::explain)?;
                self.adopt(writer, true)
            }
            (None, None) => Ok(None),
        }
    }

    /// Returns the sampling in force: what was set, else what the model's publisher recommends, else the built-in values.
    pub fn sampling(&self) -> Sampling {
        let given = self.state.settings.sampling.given.clone().or(&self.model.defaults());
        given.sampling(self.state.schema.is_none())
    }

    /// Returns the settings in force, one a line.
    pub fn settings_table(&self) -> Vec<Vec<String>> {
        match self.model.endpoint() {
            Some(_) => self.state.settings.table_at_endpoint(),
            None => self.state.settings.table(&self.sampling()),
        }
    }

    /// Returns what the settings ask of an endpoint, without tools.
    pub fn endpoint_request<'b>(&'b self, messages: &'b [Message]) -> EndpointRequest<'b> {
        EndpointRequest {
            messages,
            images: &self.state.files,
            tools: &[],
            constraint: self.state.schema.as_ref().map(|schema| &schema.source),
            sampling: &self.state.settings.sampling,
            limits: &self.state.settings.limits,
            think: self.state.think,
            seed: None,
        }
    }

    /// Refuses settings that the endpoint, if one answers, is not known to honour.
    pub fn check_endpoint(&self) -> Result<(), CommandError> {
        match self.model.endpoint() {
            Some(endpoint) => endpoint.body(&self.endpoint_request(&[])).map(drop),
            None => Ok(()),
        }
    }

    pub fn store(&self) -> Result<SessionStore, CommandError> {
        sessions::store(self.places)
    }

    /// Returns whether nothing more can be done after this error.
    pub fn is_lost(&self, error: &CommandError) -> bool {
        !self.model.is_loaded()
            || matches!(error.runtime(), Some(Error::EngineGone))
            || error.kind == Kind::Bug
    }

    /// Reads the next line, with a prompt that shows how full the context is.
    pub fn read(&mut self, initial: &str) -> Result<InputLine, CommandError> {
        let prompt = self.prompt();
        let catalog = if self.ui.is_interactive() { self.catalog() } else { Catalog::default() };
        self.ui.input.read(&prompt, initial, &catalog, self.ui.terminal)
    }

    fn prompt(&self) -> String {
        let pending = match (self.state.attached.is_empty(), self.state.images.is_empty()) {
            (true, true) => "",
            (true, false) => "+image ",
            (false, true) => "+file ",
            (false, false) => "+file +image ",
        };
        match self.model.context() {
            Some(size) => {
                let used = self.state.saved().num_tokens();
                format!("{pending}{}/{} > ", grouped(used), grouped(size))
            }
            None => format!("{pending}{} > ", self.model.name()),
        }
    }

    fn catalog(&self) -> Catalog {
        let listed = self.store().and_then(|store| Ok(store.list()?)).unwrap_or_default();
        let sessions = listed.into_iter().map(|listed| listed.name.to_string()).collect();
        if let Some(endpoint) = self.model.endpoint() {
            return Catalog { sessions, models: endpoint.models().into() };
        }
        let cached = llmctl_hub::list(self.places.hub.as_deref()).into_iter().map(|model| model.reference);
        let built_in = GUIDE.name.to_owned();
        let models = self.model.args.aliases.keys().cloned().chain([built_in]).chain(cached).collect();
        Catalog { sessions, models }
    }

    /// Returns the prompt, with the message on it that did not become part of the conversation.
    pub fn unsent(&mut self) -> Effect {
        let Some((kept, text)) = self.state.pending.take() else { return Effect::Prompt };
        if !self.ui.is_interactive() {
            return Effect::Prompt;
        }
        if text.len() > MAX_BACK {
            self.ui.terminal.note("(the message is in the history: the key Up brings it back)");
            return Effect::Prompt;
        }
        self.state.editing = Some(kept).filter(|kept| *kept < self.state.turns().len());
        Effect::Edit(text)
    }

    /// Renders the prompt of a request.
    pub fn prompted(&self, asked: &AnswerRequest) -> Result<PromptedTurn, CommandError> {
        let kept = self.state.turns().iter().take(asked.kept);
        let before = kept.flat_map(|saved| &saved.turn.messages);
        let messages = before.chain(&asked.added).cloned().collect();
        let Some(llm) = self.model.here() else {
            return Ok(self.state.session_chat.addressed(messages).with_images(&self.state.files));
        };
        let chat_tokenizer = llm.texts().chat_tokenizer();
        let conversation = self.conversation(messages, self.state.think, &self.model.thinking());
        Ok(self.state.session_chat.prompt(chat_tokenizer, conversation, &self.state.files)?)
    }

    /// Returns a prompt's conversation for a model with this thinking. A schema switches reasoning off.
    pub fn conversation(&self, messages: Vec<Message>, think: Think, thinking: &Thinking) -> Conversation {
        let reasoning = if self.state.schema.is_some() { false.into() } else { think.reasoning };
        let kwargs = Think { reasoning, ..think }.variables(thinking);
        Conversation { messages, tools: self.tool_definitions(), kwargs, ..Conversation::default() }
    }

    /// Ends the chat: waits until turns are on disk, and removes an empty session.
    pub fn end(&mut self) {
        self.leave();
        if self.model.is_loaded()
            && let Some(llm) = self.model.here()
        {
            llm.settle(self.ui.terminal);
        }
        if let Some(llm) = self.model.beside() {
            llm.settle(self.ui.terminal);
        }
    }
}

/// Sessions: one is open, or none.
impl Chat<'_> {
    /// Lets go of the session that is open; one that came to no turn is removed.
    fn leave(&mut self) {
        if self.model.is_loaded() {
            self.model.close_session(&self.state.engine_name());
        }
        let left = std::mem::replace(&mut self.state.keeping, SavePlace::Planned);
        let model = self.state.saved().model.clone();
        let session_chat =
            std::mem::replace(&mut self.state.session_chat, SessionChat::new((*model).clone()));
        if let SavePlace::Saved { is_fresh: true, .. } = left {
            // If the removal fails, an empty session stays in the list.
            let _ = session_chat.remove_if_empty();
        }
        (self.state.last, self.state.has_warned, self.state.taken) = (None, false, None);
    }

    /// Says what the model cannot use of the conversation.
    pub fn note_conversation(&self) {
        let session_chat = &self.state.session_chat;
        let tokenizer = self.model.here().map(|llm| llm.texts().chat_tokenizer());
        let images = tokenizer.and_then(|tokenizer| tokenizer.notice_of_images(session_chat.messages()));
        session_chat.notices().iter().chain(&images).for_each(|notice| self.ui.terminal.note(notice));
    }

    /// Goes on with an opened session; gives what was found of its KV, in words.
    pub fn adopt(&mut self, writer: SessionWriter, is_fresh: bool) -> Result<Option<String>, CommandError> {
        self.leave();
        self.state.keeping = SavePlace::Saved { name: writer.name().clone(), is_automatic: false, is_fresh };
        self.state.session_chat = SessionChat::resume(writer, self.model.fingerprint());
        self.note_conversation();
        if let (Some(system), false) = (&self.state.system, self.state.turns().is_empty())
            && Some(system.as_str()) != self.state.saved().system()
        {
            let error =
                CommandError::usage("the session was started with another system prompt, or without one");
            return Err(error.hint("continue it without --system, or start another with --session NAME"));
        }
        self.tell_engine()?;
        self.warm_up()
    }

    /// Leaves the session and begins one that gets its place with the first message.
    pub fn begin_anew(&mut self, keeping: SavePlace) {
        self.leave();
        self.state.session_chat = SessionChat::new(self.model.fingerprint());
        self.state.keeping = keeping;
    }

    /// Tells the engine what the conversation holds, so that it can say what of it is reused.
    pub fn tell_engine(&self) -> Result<(), CommandError> {
        Ok(self.model.restore_session(&self.state.engine_name(), self.state.saved())?)
    }

    /// A planned session gets its place.
    pub fn take_place(&mut self) -> Result<(), CommandError> {
        if !matches!(self.state.keeping, SavePlace::Planned) {
            return Ok(());
        }
        let base = planned_name();
        let writer = self.create_near(&base)?;
        self.state.keeping =
            SavePlace::Saved { name: writer.name().clone(), is_automatic: true, is_fresh: true };
        self.state.session_chat = SessionChat::resume(writer, self.model.fingerprint());
        Ok(())
    }

    /// Creates a session of this name, or of the name with the first free number behind it.
    fn create_near(&self, base: &str) -> Result<SessionWriter, CommandError> {
        let name = self.free_name(base)?;
        Ok(self.store()?.create(&name, &self.model.fingerprint())?)
    }

    /// Returns the name, or the name with the first number behind it that no session has.
    pub fn free_name(&self, base: &str) -> Result<SessionName, CommandError> {
        let taken = self.store()?.list()?;
        let is_free = |name: &str| taken.iter().all(|listed| listed.name.as_str() != name);
        let name = std::iter::once(base.to_owned())
            .chain((2..).map(|n| format!("{base}-{n}")))
            .find(|name| is_free(name))
            .expect("a list has an end, and the numbers have none");
        Ok(SessionName::new(&name)?)
    }
}

/// Another model.
impl Chat<'_> {
    /// Loads another model in place of this one; if that fails, this one is loaded again.
    pub fn change_model(&mut self, next: &NextModel) -> Result<(), CommandError> {
        let is_saved = self.state.keeping != SavePlace::Nowhere;
        self.model.close_session(&self.state.engine_name());
        let failure = self.model.change(next, is_saved)?;
        let model = self.model.fingerprint();
        let session_chat = std::mem::replace(&mut self.state.session_chat, SessionChat::new(model.clone()));
        self.state.session_chat = session_chat.answered_by(model);
        self.state.last = None;
        self.tell_engine()?;
        self.carry_over()?;
        failure.map_or(Ok(()), Err)
    }

    /// Applies the settings of the earlier model to this one, as far as it supports them.
    pub fn carry_over(&mut self) -> Result<(), CommandError> {
        if let Err(reason) = self.state.think.check(&self.model.thinking()) {
            self.state.think = Think::default();
            self.ui.terminal.warn(format!("{reason}: /think is as it was at the beginning"));
        }
        if let Some(AnswerSchema { name, source }) = self.state.schema.take() {
            self.state.schema = Some(self.compiled(name, source)?);
        }
        Ok(())
    }

    /// Returns the schema after compiling it, so that it is refused now rather than with the next message.
    pub fn compiled(&self, name: String, source: GrammarSource) -> Result<AnswerSchema, CommandError> {
        self.model.compile(&source)?;
        Ok(AnswerSchema { name, source })
    }
}

/// Returns the session that the flags name.
fn wanted_session(args: &ChatArgs, places: &Places) -> Result<Option<SessionName>, CommandError> {
    if let Some(name) = &args.session.session {
        return sessions::parse(name).map(Some);
    }
    if !args.session.r#continue {
        return Ok(None);
    }
    let store = sessions::store(places)?;
    let listed = store.list()?;
    let own = listed.iter().filter(|listed| listed.branch().is_none());
    let used = own.filter_map(|listed| Some((listed.summary.as_ref().ok()?, &listed.name)));
    let last = used.filter(|(summary, _)| summary.turns > 0).max_by_key(|(summary, _)| summary.last_used_ms);
    let last_ms = last.map_or(0, |(summary, _)| summary.last_used_ms);
    let mut newer = listed.iter().filter(|listed| store.written_ms(&listed.name) > last_ms);
    let is_unread = |listed: &&Listed| listed.summary.is_err() && !listed.name.is_of_branch();
    if let Some(Listed { name, summary: Err(error) }) = newer.find(is_unread) {
        let error = sessions::explain(error.clone());
        return Err(error.context(format!(
            "session {name} is newer than others and cannot be read; --session NAME continues another"
        )));
    }
    last.map(|(_, name)| Some(name.clone())).ok_or_else(|| {
        let error = Kind::NotFound.error("there is no session to continue");
        error.hint("start one without --continue")
    })
}

fn settings(args: &ChatArgs) -> Result<AnswerSettings, CommandError> {
    let settings = AnswerSettings { sampling: args.sampling.clone(), limits: args.limits.clone() };
    settings.sampling.check().map_err(crate::cli::run::flag_error)?;
    Ok(settings)
}

/// Refuses what chat has no use for, and a place where nothing could be saved.
fn check_flags(args: &ChatArgs, places: &Places) -> Result<(), CommandError> {
    if args.limits.overflow.is_some() {
        let error = CommandError::usage("--overflow: chat asks when the context is full");
        return Err(error.hint("leave it out"));
    }
    match args.session.ephemeral {
        true => Ok(()),
        false => places.check(KeptFiles::Sessions).map_err(|error| match error.kind {
            Kind::Config => error.hint("set HOME or XDG_DATA_HOME, or use --ephemeral"),
            _ => error.hint("use --ephemeral to chat without saving"),
        }),
    }
}

/// `2026-11-21-2124`, by the user's clock.
fn planned_name() -> String {
    DateTime::local(now_ms()).strftime("%Y-%m-%d-%H%M")
}
