//! The model of a chat: loaded, replaced, and asked for its facts.

use super::throughput::ThroughputEstimate;
use crate::cli::args::{EngineArgs, ModelArgs};
use crate::cli::error::CommandError;
use crate::cli::load::{self, Loaded};
use crate::cli::places::Places;
use crate::cli::terminal::Terminal;
use crate::cli::think::Thinking;
use crate::runtime::session::store::ModelFingerprint;
use crate::runtime::{Frontend, Grammar, GrammarSource};
use crate::template::TemplateError;

/// The model of a chat.
pub struct ChatModel {
    /// `None` only while another model is loaded, and after that has failed.
    llm: Option<Loaded>,
    pub args: ModelArgs,
    engine: EngineArgs,
    pub throughput: ThroughputEstimate,
}

impl ChatModel {
    /// Loads the model that `args` names.
    ///
    /// # Errors
    /// Why it cannot be loaded, or that it has no chat template.
    pub fn load(
        args: ModelArgs,
        engine: EngineArgs,
        is_saved: bool,
        terminal: &Terminal,
        places: &Places,
    ) -> Result<Self, CommandError> {
        let llm = load_llm(&args, &engine, is_saved, terminal)?;
        let throughput = ThroughputEstimate::of(&llm.texts().fingerprint().fingerprint, places.state.clone());
        Ok(Self { llm: Some(llm), args, engine, throughput })
    }

    /// Loads another model in place of this one; if that fails, loads this one again and returns the failure inside.
    ///
    /// # Errors
    /// That this one cannot be loaded again.
    pub fn change(
        &mut self,
        reference: &str,
        is_saved: bool,
        terminal: &Terminal,
        places: &Places,
    ) -> Result<Option<CommandError>, CommandError> {
        let before = self.args.clone();
        // Two models rarely fit into memory together, so this one is dropped first.
        self.llm = None;
        self.args.model = Some(reference.to_owned());
        let failure = match load_llm(&self.args, &self.engine, is_saved, terminal) {
            Ok(llm) => {
                self.llm = Some(llm);
                None
            }
            Err(error) => {
                self.args = before;
                self.llm = Some(load_llm(&self.args, &self.engine, is_saved, terminal)?);
                Some(error)
            }
        };
        self.throughput = ThroughputEstimate::of(&self.fingerprint().fingerprint, places.state.clone());
        Ok(failure)
    }

    /// Returns the loaded model.
    pub fn llm(&self) -> &Loaded {
        self.llm.as_ref().expect("a model is loaded whenever a command or a message is taken")
    }

    /// Returns whether a model is loaded.
    pub fn is_loaded(&self) -> bool {
        self.llm.is_some()
    }

    pub fn fingerprint(&self) -> ModelFingerprint {
        self.llm().texts().fingerprint().clone()
    }

    /// Returns the size of the context, in tokens.
    pub fn context(&self) -> usize {
        self.llm().info().context_tokens
    }

    /// Returns what the model's template can do about thinking.
    pub fn thinking(&self) -> Thinking {
        Thinking::of(self.llm().texts().chat_tokenizer())
    }

    /// Compiles a grammar.
    ///
    /// # Errors
    /// A part of the source that cannot be enforced.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, CommandError> {
        Ok(self.llm().compiler().compile(source)?)
    }
}

fn load_llm(
    args: &ModelArgs,
    engine: &EngineArgs,
    is_saved: bool,
    terminal: &Terminal,
) -> Result<Loaded, CommandError> {
    let llm = load::load(args, engine.resolve(is_saved), terminal)?.for_frontend(Frontend::Chat);
    check_template(&llm)?;
    Ok(llm)
}

fn check_template(llm: &Loaded) -> Result<(), CommandError> {
    if llm.texts().chat_tokenizer().has_template() {
        return Ok(());
    }
    let hint = "give one with --chat-template FILE; `llmctl run --raw` completes plain text without one";
    Err(CommandError::from(TemplateError::Missing).hint(hint))
}
