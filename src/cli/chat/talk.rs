//! The state of a chat: the model, the conversation, where it is kept, and what the user has set.
//!
//! Invariants: at most one session is open, here and in the engine, and the one in the engine bears the same name; a
//! session that comes to no turn is not left behind. A session gets its name and its place on disk with the first message,
//! so that looking in leaves nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::complete::Catalog;
use super::input::{self, Input, Line};
use super::pace::Pace;
use super::settings::Settings;
use super::think::Think;
use super::tools::Toolbox;
use super::turn::LastTurn;
use super::{ChatArgs, command, command::Next, grouped, spoken};
use crate::cli::error::{CommandError, Kind};
use crate::cli::load::{self, LoadedLlm};
use crate::cli::places::Places;
use crate::cli::run::llm::Texts;
use crate::cli::run::note_system;
use crate::cli::run::prompt::read_file;
use crate::cli::sessions;
use crate::cli::signal::Graceful;
use crate::cli::terminal::Terminal;
use crate::runtime::load::builtin::GUIDE;
use crate::runtime::load::hub;
use crate::runtime::session::conversation::Dialogue;
use crate::runtime::session::store::{ModelFingerprint, SessionName, SessionStore, SessionWriter, now_ms};
use crate::runtime::{
    AnswerForm, Error, Event, Frontend, Grammar, GrammarCompiler, GrammarSource, Limits, Overflow, Request,
    ReuseReason, Sampling, Started,
};
use crate::template::{DateTime, Dialect, TemplateError, ToolChoice};

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
    llm: Option<LoadedLlm>,
    pub dialogue: Dialogue,
    pub keeping: Keeping,
    /// The system prompt of the first turn to come.
    pub system: Option<String>,
    pub settings: Settings,
    pub think: Think,
    pub toolbox: Option<Toolbox>,
    /// What answers are held to.
    pub schema: Option<super::actions::Schema>,
    grammars: GrammarCompiler,
    pub attached: Vec<super::actions::Attachment>,
    /// What the engine answered last, for /stats and /why.
    pub last: Option<LastTurn>,
    /// The turns before one that is being edited.
    pub editing: Option<usize>,
    pub pace: Pace,
    /// The warning of a full context has been given.
    pub has_warned: bool,
    pub graceful: Graceful,
}

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
    /// Locks the session, loads the model, and says what there is.
    pub fn begin(args: ChatArgs, terminal: &'a Terminal, places: &'a Places) -> Result<Self, CommandError> {
        let settings = Settings { sampling: args.sampling.clone(), limits: args.limits.clone() };
        settings.sampling.check().map_err(crate::cli::run::flag_error)?;
        let system = system_prompt(&args)?;
        let think = args.prompt.think.as_deref().map_or(Ok(Think::default()), Think::parse)?;
        let toolbox = args.prompt.tools.as_deref().map(Toolbox::read).transpose()?;
        let wanted = wanted_session(&args, places)?;
        if args.limits.overflow.is_some() {
            let error =
                CommandError::usage("--overflow is not for chat, which asks when the context is full");
            return Err(error.hint("leave it out"));
        }
        // Before the model is loaded, so that a session in use is refused at once.
        let opened = match &wanted {
            None => None,
            Some(name) => match sessions::store(places)?.open(name) {
                Err(Error::SessionNotFound(_)) => None,
                opened => Some(opened.map_err(sessions::explain)?),
            },
        };
        let input = Input::open(terminal, places.state.as_deref())?;
        let llm = load::load(&args.model, args.engine.resolve(!args.session.ephemeral), terminal)?
            .for_frontend(Frontend::Chat);
        check_template(&llm)?;
        note_system(llm.texts().speech(), system.as_deref(), terminal);
        let model = llm.texts().fingerprint().clone();
        let grammars = grammars(&llm);
        let pace = Pace::of(&model.fingerprint, places.state.clone());
        let keeping = if args.session.ephemeral { Keeping::Nowhere } else { Keeping::Planned };
        let dialogue = Dialogue::new(model.clone());
        let (attached, schema, last, editing) = Default::default();
        let mut chat = Self {
            terminal,
            places,
            args,
            input,
            llm: Some(llm),
            dialogue,
            keeping,
            system,
            settings,
            think,
            toolbox,
            schema,
            attached,
            last,
            editing,
            pace,
            grammars,
            has_warned: false,
            graceful: Graceful::begin_conversation(),
        };
        let resumed = match (opened, wanted) {
            (Some(writer), _) => chat.adopt(writer, false)?,
            (None, Some(name)) => {
                let writer = chat.store()?.open_or_create(&name, &model).map_err(sessions::explain)?;
                chat.adopt(writer, true)?
            }
            (None, None) => None,
        };
        chat.check_think()?;
        chat.banner(resumed.as_deref());
        Ok(chat)
    }

    pub fn llm(&self) -> &LoadedLlm {
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

    /// The markup of the next answer: that of the model's template, without calls where a schema says what an answer is.
    pub fn dialect(&self) -> Dialect {
        let dialect = self.llm().texts().speech().dialect();
        if self.schema.is_some() { Dialect { tool_calls: None, ..dialect } } else { dialect }
    }

    /// Ids of the markup that the tokenizer has as special tokens: it must reach the parser.
    pub fn markup(&self) -> Arc<[u32]> {
        self.llm().texts().speech().markup(&self.dialect())
    }

    /// What the next answer is held to: the schema, else well-formed calls of the tools. `prompt_tail` is the end of its prompt.
    pub fn grammar(&self, prompt_tail: &str) -> Result<Option<Grammar>, CommandError> {
        let speech = self.llm().texts().speech();
        if let Some(schema) = &self.schema {
            let form = AnswerForm { speech, dialect: &self.dialect(), prompt_tail };
            return Ok(Some(form.compile(&self.grammars, &schema.source)?));
        }
        let special = |text: &str| speech.special(text);
        let tools = self.tool_definitions();
        let lark = self.dialect().tool_grammar(&tools, &ToolChoice::Auto, true, prompt_tail, &special);
        lark.map(|lark| self.compile(&GrammarSource::Lark(lark))).transpose()
    }

    /// # Errors
    /// What of the source cannot be enforced.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, CommandError> {
        Ok(self.grammars.compile(source)?)
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
        format!("{pending}{}/{} > ", grouped(self.dialogue.saved().num_tokens()), grouped(self.context()))
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
        self.input.remember(line);
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
        let model = self.dialogue.saved().model.clone();
        self.dialogue = Dialogue::new((*model).clone());
        if let Keeping::Saved { name, is_fresh: true, .. } = left {
            // An empty session that stays is listed, and harms nobody.
            let _ = self.store().map(|store| store.remove(&name));
        }
        (self.last, self.has_warned) = (None, false);
    }

    /// Goes on with an opened session; gives what was found of its KV, in words.
    pub fn adopt(&mut self, writer: SessionWriter, is_fresh: bool) -> Result<Option<String>, CommandError> {
        self.leave();
        self.keeping = Keeping::Saved { name: writer.name().clone(), is_automatic: false, is_fresh };
        self.dialogue = Dialogue::resume(writer, self.model());
        self.dialogue.notices().iter().for_each(|notice| self.terminal.note(notice));
        if let (Some(system), false) = (&self.system, self.dialogue.saved().turns.is_empty())
            && Some(system.as_str()) != self.dialogue.saved().system()
        {
            let error = CommandError::usage("the session began with another system prompt, or without one");
            return Err(
                error.hint("leave --system out to go on with it; /system in the chat begins a new one")
            );
        }
        self.tell_engine()?;
        self.warm_up()
    }

    /// Leaves the session and begins one that gets its place with the first message.
    pub fn begin_anew(&mut self, keeping: Keeping) {
        self.leave();
        self.dialogue = Dialogue::new(self.model());
        self.keeping = keeping;
    }

    /// Tells the engine what the conversation holds, so that it can say what of it is reused.
    pub fn tell_engine(&self) -> Result<(), CommandError> {
        Ok(self.llm().restore(self.engine_name(), self.dialogue.saved())?)
    }

    /// A planned session gets its place.
    pub fn take_place(&mut self) -> Result<(), CommandError> {
        if !matches!(self.keeping, Keeping::Planned) {
            return Ok(());
        }
        let base = planned_name();
        let writer = self.create_near(&base)?;
        self.keeping = Keeping::Saved { name: writer.name().clone(), is_automatic: true, is_fresh: true };
        self.dialogue = Dialogue::resume(writer, self.model());
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

    /// Brings the session's KV back before the first message: the conversation is asked for as a prompt, outside of its
    /// session, and left when work on it would begin. Its pages stay where the first message finds them.
    fn warm_up(&mut self) -> Result<Option<String>, CommandError> {
        let saved = self.dialogue.saved();
        let is_ours =
            saved.turns.last().is_some_and(|turn| turn.model.is_same(self.llm().texts().fingerprint()));
        let tokens = saved.tokens();
        let num_tokens = tokens.len();
        if !is_ours || num_tokens == 0 {
            return Ok(None);
        }
        if num_tokens >= self.context() {
            let said = format!("{} tokens, more than the context holds", grouped(num_tokens));
            return Ok(Some(said));
        }
        let start = Instant::now();
        let mut started = match self.look_for(tokens) {
            Ok(started) => started,
            // The first message will say it, if it is still so.
            Err(error) => return Ok(Some(format!("not resumed: {error}"))),
        };
        // Asked for outside of its session, a conversation seems new; it is saved, so its KV was there once.
        if started.reuse.reason == ReuseReason::New {
            started.reuse.reason = ReuseReason::Evicted;
        }
        let cached = started.reuse.cached_tokens;
        self.last = Some(LastTurn { started: Some(started), outcome: None });
        let estimate = |count| self.pace.time(count).map(spoken);
        if num_tokens - cached < TRIFLE && cached * 2 < num_tokens {
            return Ok(None);
        }
        let said = if cached * 2 < num_tokens {
            // What is left is said, and computed with the first message.
            let time = estimate(num_tokens - cached).map_or(String::new(), |time| format!(", about {time}"));
            let missing = grouped(num_tokens - cached);
            format!("{missing} of {} tokens are to be computed again{time} (/why)", grouped(num_tokens))
        } else {
            let cost = estimate(num_tokens)
                .map_or(String::new(), |time| format!(", re-prefill would take about {time}"));
            format!("resumed {} tokens in {}{cost}", grouped(cached), spoken(start.elapsed()))
        };
        Ok(Some(said))
    }

    /// What the engine finds of these tokens.
    fn look_for(&self, prompt: Vec<u32>) -> Result<Started, CommandError> {
        let limits = Limits { max_tokens: Some(1), overflow: Overflow::Clamp, ..Limits::default() };
        let mut events = self.llm().engine().submit(Request { prompt, limits, ..Request::default() })?;
        let mut found = None;
        while let Some(event) = events.next() {
            match event {
                Event::Started(started) => {
                    found = Some(started);
                    events.cancel();
                }
                Event::Failed(error) => return Err(error.into()),
                _ => {}
            }
        }
        found.ok_or_else(|| Error::EngineGone.into())
    }

    fn banner(&self, resumed: Option<&str>) {
        let info = self.llm().info();
        let session = match &self.keeping {
            Keeping::Nowhere => "nothing is saved".to_owned(),
            Keeping::Planned => format!("session {}", planned_name()),
            Keeping::Saved { name, .. } => match self.dialogue.saved().turns.len() {
                0 => format!("session {name}, new"),
                1 => format!("session {name}, 1 turn"),
                count => format!("session {name}, {count} turns"),
            },
        };
        let context = format!("context {}", grouped(info.context_tokens));
        let help = self.is_interactive().then(|| "/help".to_owned());
        let parts =
            [info.name.clone(), context, session].into_iter().chain(resumed.map(str::to_owned)).chain(help);
        self.terminal.note(&parts.collect::<Vec<_>>().join(" \u{b7} "));
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
        let dialogue = std::mem::replace(&mut self.dialogue, Dialogue::new(model.clone()));
        self.dialogue = dialogue.answered_by(model.clone());
        self.grammars = grammars(self.llm());
        self.pace = Pace::of(&model.fingerprint, self.places.state.clone());
        self.last = None;
        self.tell_engine()?;
        failure.map_or(Ok(()), Err)
    }

    fn load(&self) -> Result<LoadedLlm, CommandError> {
        let engine = self.args.engine.resolve(self.keeping != Keeping::Nowhere);
        let llm = load::load(&self.args.model, engine, self.terminal)?.for_frontend(Frontend::Chat);
        check_template(&llm)?;
        Ok(llm)
    }
}

fn grammars(llm: &LoadedLlm) -> GrammarCompiler {
    let speech = llm.texts().speech();
    let ends = &speech.texts().end_of_generation;
    GrammarCompiler::new(speech.tokenizer().clone(), llm.info().vocab_size, ends)
}

fn check_template(llm: &LoadedLlm) -> Result<(), CommandError> {
    if llm.texts().speech().has_template() {
        return Ok(());
    }
    let hint = "chat needs one: give it with --chat-template FILE; `llmctl run --raw` completes plain text";
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
    let used = listed.iter().filter_map(|listed| Some((listed.summary.as_ref().ok()?, &listed.name)));
    let last = used.filter(|(summary, _)| summary.turns > 0).max_by_key(|(summary, _)| summary.last_used_ms);
    last.map(|(_, name)| Some(name.clone())).ok_or_else(|| {
        let error = CommandError::new(Kind::NotFound, anyhow::anyhow!("there is no session to go on with"));
        error.hint("leave --continue out to begin one")
    })
}

/// `2026-11-21-2124`, in UTC.
fn planned_name() -> String {
    let now = DateTime::from_unix(i64::try_from(now_ms() / 1000).unwrap_or_default());
    now.strftime("%Y-%m-%d-%H%M")
}

/// A pause that is worth being told of.
pub const NOTICEABLE: Duration = Duration::from_millis(500);
