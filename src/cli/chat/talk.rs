//! The state of a chat: the model, the conversation, where it is kept, and what the user has set.
//!
//! Invariants: at most one session is open, here and in the engine, and the one in the engine bears the same name; a
//! session that comes to no turn is not left behind. A session gets its name and its place on disk with the first message,
//! so that looking in leaves nothing.

mod greeting;

use std::time::Duration;

use super::complete::Catalog;
use super::input::{self, Input, Line};
use super::pace::Pace;
use super::settings::Settings;
use super::tools::Toolbox;
use super::turn::LastTurn;
use super::{ChatArgs, command, command::Next, grouped};
use crate::cli::clock::local_time;
use crate::cli::error::{CommandError, Kind};
use crate::cli::input::read_file;
use crate::cli::load::{self, Loaded};
use crate::cli::places::{KeptFiles, Places};
use crate::cli::report::table;
use crate::cli::resume;
use crate::cli::run::note_system;
use crate::cli::sessions;
use crate::cli::signal::Graceful;
use crate::cli::terminal::Terminal;
use crate::cli::think::Think;
use crate::runtime::load::builtin::GUIDE;
use crate::runtime::load::hub;
use crate::runtime::session::store::{
    BranchReason, ModelFingerprint, SavedSession, SessionName, SessionStore, SessionWriter, now_ms,
};
use crate::runtime::turn::SessionChat;
use crate::runtime::{Error, Frontend, Grammar, GrammarSource, Sampling};
use crate::template::TemplateError;

/// So many tokens are computed in no time: nobody has to hear of them.
const TRIFLE: usize = 64;

/// What the engine calls a conversation that is not saved.
const UNSAVED: &str = "unsaved";

/// One chat.
pub struct Chat<'a> {
    pub terminal: &'a Terminal,
    pub places: &'a Places,
    pub args: ChatArgs,
    pub input: Input,
    llm: Option<Loaded>,
    pub session_chat: SessionChat,
    pub keeping: Keeping,
    /// The system prompt of the first turn to come.
    pub system: Option<String>,
    pub settings: Settings,
    pub think: Think,
    pub toolbox: Option<Toolbox>,
    /// What answers are held to.
    pub schema: Option<super::actions::Schema>,
    pub attached: Vec<super::actions::Attachment>,
    /// What the engine answered last, for /stats and /why.
    pub last: Option<LastTurn>,
    /// The turns before one that is being edited.
    pub editing: Option<usize>,
    pub pace: Pace,
    /// What the last /undo, /redo, /retry, /edit or /reset took away.
    pub taken: Option<(Taken, BranchReason)>,
    /// A message that is not part of the conversation yet, and the turns before it.
    pub pending: Option<(usize, String)>,
    /// The warning of a full context has been given.
    pub has_warned: bool,
    pub graceful: Graceful,
}

/// Turns that a command took away, for /redo.
#[derive(Debug, Clone)]
pub enum Taken {
    /// The whole conversation as it was, in a branch of the session.
    Branch(SessionName),
    /// The same, of a conversation that is not saved.
    Unsaved(Box<SavedSession>),
}

/// A longer message is not put on the line again.
const MAX_BACK: usize = 4 << 10;

/// Where the conversation is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Keeping {
    Nowhere,
    /// In a session that gets its place with the first message.
    Planned,
    Saved {
        name: SessionName,
        /// Named after the time, not by the user.
        is_automatic: bool,
        /// Made by this chat, and there was no turn yet.
        is_fresh: bool,
    },
}

impl<'a> Chat<'a> {
    /// Locks the session, loads its model, and says what there is.
    pub fn begin(
        mut args: ChatArgs,
        terminal: &'a Terminal,
        places: &'a Places,
    ) -> Result<Self, CommandError> {
        let settings = settings(&args)?;
        let system = system_prompt(&args)?;
        let bad_think = |reason: String| CommandError::usage(format!("--think: {reason}"));
        let think =
            args.prompt.think.as_deref().map_or(Ok(Think::default()), Think::parse).map_err(bad_think)?;
        let toolbox = args.prompt.tools.as_deref().map(Toolbox::read).transpose()?;
        check_flags(&args, places)?;
        let wanted = wanted_session(&args, places)?;
        // Before the model is loaded, so that a session in use is refused at once.
        let opened = wanted.as_ref().map_or(Ok(None), |name| open_if_there(name, places))?;
        if let Some(writer) = &opened {
            args.model = resume::model_of(&args.model, writer.name(), writer.saved(), "--model REF")?;
        }
        let input = Input::open(terminal, places.state.as_deref())?;
        let llm = load::load(&args.model, args.engine.resolve(!args.session.ephemeral), terminal)?
            .for_frontend(Frontend::Chat);
        check_template(&llm)?;
        note_system(llm.texts().chat_tokenizer(), system.as_deref(), terminal);
        let model = llm.texts().fingerprint().clone();
        let pace = Pace::of(&model.fingerprint, places.state.clone());
        let keeping = if args.session.ephemeral { Keeping::Nowhere } else { Keeping::Planned };
        let session_chat = SessionChat::new(model.clone());
        let (attached, schema, last, editing, taken, pending) = Default::default();
        let mut chat = Self {
            terminal,
            places,
            args,
            input,
            llm: Some(llm),
            session_chat,
            keeping,
            system,
            settings,
            think,
            toolbox,
            schema,
            attached,
            last,
            editing,
            taken,
            pending,
            pace,
            has_warned: false,
            graceful: Graceful::begin_conversation(),
        };
        let resumed = chat.open(opened, wanted, &model)?;
        chat.think.check(&chat.thinking()).map_err(bad_think)?;
        chat.banner(resumed.as_deref());
        Ok(chat)
    }

    /// Takes up the session that was opened, or makes the one that is wanted; gives what was found of its KV, in words.
    fn open(
        &mut self,
        opened: Option<SessionWriter>,
        wanted: Option<SessionName>,
        model: &ModelFingerprint,
    ) -> Result<Option<String>, CommandError> {
        match (opened, wanted) {
            (Some(writer), _) => self.adopt(writer, false),
            (None, Some(name)) => {
                let writer = self.store()?.open_or_create(&name, model).map_err(sessions::explain)?;
                self.adopt(writer, true)
            }
            (None, None) => Ok(None),
        }
    }

    pub fn llm(&self) -> &Loaded {
        self.llm.as_ref().expect("there is a model whenever a command or a message is taken")
    }

    pub fn model(&self) -> ModelFingerprint {
        self.llm().texts().fingerprint().clone()
    }

    pub fn context(&self) -> usize {
        self.llm().info().context_tokens
    }

    /// The sampling in force: what was set, else what the model's publisher recommends.
    pub fn sampling(&self) -> Sampling {
        self.settings.sampling.resolve(&self.llm().info().defaults).0
    }

    /// # Errors
    /// What of the source cannot be enforced.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, CommandError> {
        Ok(self.llm().compiler().compile(source)?)
    }

    pub fn store(&self) -> Result<SessionStore, CommandError> {
        sessions::store(self.places)
    }

    pub fn is_interactive(&self) -> bool {
        self.input.is_terminal()
    }

    /// Whether nothing more can be done after this error.
    pub fn is_lost(&self, error: &CommandError) -> bool {
        self.llm.is_none() || matches!(error.runtime(), Some(Error::EngineGone)) || error.kind == Kind::Bug
    }

    /// The next line, behind a prompt that shows how full the context is.
    pub fn read(&mut self, initial: &str) -> Result<Line, CommandError> {
        let prompt = self.prompt();
        let catalog = if self.is_interactive() { self.catalog() } else { Catalog::default() };
        self.input.read(&prompt, initial, &catalog, self.terminal)
    }

    fn prompt(&self) -> String {
        let pending = if self.attached.is_empty() { "" } else { "+file " };
        format!("{pending}{}/{} > ", grouped(self.session_chat.saved().num_tokens()), grouped(self.context()))
    }

    fn catalog(&self) -> Catalog {
        let listed = self.store().and_then(|store| Ok(store.list()?)).unwrap_or_default();
        let sessions = listed.into_iter().map(|listed| listed.name.to_string()).collect();
        let cached = hub::list(self.places.hub.as_deref()).into_iter().map(|model| model.reference);
        let built_in = GUIDE.name.to_owned();
        let models = self.args.model.aliases.keys().cloned().chain([built_in]).chain(cached).collect();
        Catalog { sessions, models }
    }

    /// Takes a line: a command or a message.
    pub fn take(&mut self, line: &str) -> Result<Next, CommandError> {
        if line.trim().is_empty() {
            self.forget_edit();
            return Ok(Next::Prompt);
        }
        self.input.remember(line, self.terminal);
        if self.is_interactive() && matches!(line.trim_end(), "exit" | "quit") {
            let word = line.trim_end();
            self.terminal.note(&format!(
                "(/exit or Ctrl-D leaves the chat; a blank before \u{201c}{word}\u{201d} sends it to the model)"
            ));
            return Ok(Next::Prompt);
        }
        if let Some(kept) = self.editing.take()
            && command::of(line).is_none()
        {
            return self.say_instead(kept, input::unquoted(line).to_owned());
        }
        match command::of(line) {
            Some((command, argument)) => (command.action)(self, argument),
            None if command::is_meant(line) => Err(command::unknown(line)),
            None => self.say(input::unquoted(line).to_owned()),
        }
    }

    /// A message that was to be edited is not.
    pub fn forget_edit(&mut self) {
        self.editing = None;
    }

    /// The prompt, with the message on it that did not become part of the conversation.
    pub fn unsent(&mut self) -> Next {
        let Some((kept, text)) = self.pending.take() else { return Next::Prompt };
        if !self.is_interactive() {
            return Next::Prompt;
        }
        if text.len() > MAX_BACK {
            self.terminal.note("(the message is in the history: the key Up brings it back)");
            return Next::Prompt;
        }
        self.editing = Some(kept).filter(|kept| *kept < self.session_chat.saved().turns.len());
        Next::Edit(text)
    }

    /// Rows for people, as wide as the terminal.
    pub fn report_table(&self, rows: &[Vec<String>]) {
        self.terminal.report(table(rows, self.terminal.columns()).trim_end());
    }

    /// The last words: what is saved is on disk, and what is empty is gone.
    pub fn end(&mut self) {
        self.leave();
        if let Some(llm) = &self.llm {
            llm.settle(self.terminal);
        }
    }
}

/// Sessions: one is open, or none.
impl Chat<'_> {
    pub fn name(&self) -> Option<&SessionName> {
        match &self.keeping {
            Keeping::Saved { name, .. } => Some(name),
            _ => None,
        }
    }

    /// What the engine calls the conversation.
    pub fn engine_name(&self) -> &str {
        self.name().map_or(UNSAVED, SessionName::as_str)
    }

    /// Lets go of the session that is open; one that came to no turn is removed.
    fn leave(&mut self) {
        if self.llm.is_some() {
            let _ = self.llm().engine().close_session(self.engine_name()); // there is none before the first turn
        }
        let left = std::mem::replace(&mut self.keeping, Keeping::Planned);
        let model = self.session_chat.saved().model.clone();
        let session_chat = std::mem::replace(&mut self.session_chat, SessionChat::new((*model).clone()));
        if let Keeping::Saved { is_fresh: true, .. } = left {
            // An empty session that stays is listed, and harms nobody.
            let _ = session_chat.remove_if_empty();
        }
        (self.last, self.has_warned, self.taken) = (None, false, None);
    }

    /// Goes on with an opened session; gives what was found of its KV, in words.
    pub fn adopt(&mut self, writer: SessionWriter, is_fresh: bool) -> Result<Option<String>, CommandError> {
        self.leave();
        self.keeping = Keeping::Saved { name: writer.name().clone(), is_automatic: false, is_fresh };
        self.session_chat = SessionChat::resume(writer, self.model());
        self.session_chat.notices().iter().for_each(|notice| self.terminal.note(notice));
        if let (Some(system), false) = (&self.system, self.session_chat.saved().turns.is_empty())
            && Some(system.as_str()) != self.session_chat.saved().system()
        {
            let error =
                CommandError::usage("the session was started with another system prompt, or without one");
            return Err(error.hint("continue it without --system, or start another with --session NAME"));
        }
        self.tell_engine()?;
        self.warm_up()
    }

    /// Leaves the session and begins one that gets its place with the first message.
    pub fn begin_anew(&mut self, keeping: Keeping) {
        self.leave();
        self.session_chat = SessionChat::new(self.model());
        self.keeping = keeping;
    }

    /// Tells the engine what the conversation holds, so that it can say what of it is reused.
    pub fn tell_engine(&self) -> Result<(), CommandError> {
        Ok(self.llm().restore(self.engine_name(), self.session_chat.saved())?)
    }

    /// A planned session gets its place.
    pub fn take_place(&mut self) -> Result<(), CommandError> {
        if !matches!(self.keeping, Keeping::Planned) {
            return Ok(());
        }
        let base = planned_name();
        let writer = self.create_near(&base)?;
        self.keeping = Keeping::Saved { name: writer.name().clone(), is_automatic: true, is_fresh: true };
        self.session_chat = SessionChat::resume(writer, self.model());
        Ok(())
    }

    /// A new session of this name, or with the first number behind it that makes one.
    fn create_near(&self, base: &str) -> Result<SessionWriter, CommandError> {
        let name = self.free_name(base)?;
        Ok(self.store()?.create(&name, &self.model())?)
    }

    /// The name, or with the first number behind it that no session has.
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
    /// Loads another model in place of this one; when that fails, this one is loaded again.
    pub fn change_model(&mut self, reference: &str) -> Result<(), CommandError> {
        let before = self.args.model.clone();
        // Two models rarely fit: the old one goes first.
        self.llm = None;
        self.args.model.model = Some(reference.to_owned());
        let failure = match self.load() {
            Ok(llm) => {
                self.llm = Some(llm);
                None
            }
            Err(error) => {
                self.args.model = before;
                self.llm = Some(self.load()?);
                Some(error)
            }
        };
        let model = self.model();
        let session_chat = std::mem::replace(&mut self.session_chat, SessionChat::new(model.clone()));
        self.session_chat = session_chat.answered_by(model.clone());
        self.pace = Pace::of(&model.fingerprint, self.places.state.clone());
        self.last = None;
        self.tell_engine()?;
        self.carry_over()?;
        failure.map_or(Ok(()), Err)
    }

    fn load(&self) -> Result<Loaded, CommandError> {
        let engine = self.args.engine.resolve(self.keeping != Keeping::Nowhere);
        let llm = load::load(&self.args.model, engine, self.terminal)?.for_frontend(Frontend::Chat);
        check_template(&llm)?;
        Ok(llm)
    }
}

fn check_template(llm: &Loaded) -> Result<(), CommandError> {
    if llm.texts().chat_tokenizer().has_template() {
        return Ok(());
    }
    let hint = "give one with --chat-template FILE; `llmctl run --raw` completes plain text without one";
    Err(CommandError::from(TemplateError::Missing).hint(hint))
}

fn system_prompt(args: &ChatArgs) -> Result<Option<String>, CommandError> {
    match (&args.prompt.system, &args.prompt.system_file) {
        (Some(text), _) => Ok(Some(text.clone())),
        (None, Some(path)) => read_file(path).map(Some),
        (None, None) => Ok(None),
    }
}

/// The session that the flags name.
fn wanted_session(args: &ChatArgs, places: &Places) -> Result<Option<SessionName>, CommandError> {
    if let Some(name) = &args.session.session {
        return sessions::parse(name).map(Some);
    }
    if !args.session.r#continue {
        return Ok(None);
    }
    let listed = sessions::store(places)?.list()?;
    let own = listed.iter().filter(|listed| listed.branch().is_none());
    let used = own.filter_map(|listed| Some((listed.summary.as_ref().ok()?, &listed.name)));
    let last = used.filter(|(summary, _)| summary.turns > 0).max_by_key(|(summary, _)| summary.last_used_ms);
    last.map(|(_, name)| Some(name.clone())).ok_or_else(|| {
        let error = CommandError::new(Kind::NotFound, anyhow::anyhow!("there is no session to continue"));
        error.hint("start one without --continue")
    })
}

/// The session, where there is one of that name.
fn open_if_there(name: &SessionName, places: &Places) -> Result<Option<SessionWriter>, CommandError> {
    match sessions::store(places)?.open(name) {
        Err(Error::SessionNotFound(_)) => Ok(None),
        opened => Ok(Some(opened.map_err(sessions::explain)?)),
    }
}

fn settings(args: &ChatArgs) -> Result<Settings, CommandError> {
    let settings = Settings { sampling: args.sampling.clone(), limits: args.limits.clone() };
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
    local_time(now_ms()).strftime("%Y-%m-%d-%H%M")
}

/// A pause that is worth being told of.
pub const NOTICEABLE: Duration = Duration::from_millis(500);
