//! A loaded model as the commands use it: facts, text side, engine client and grammar compiler.

use std::cell::OnceCell;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::cli::error::CommandError;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::output::visible;
use llmctl_base::{Error, GivenSampling};
use llmctl_engine::session::store::{ModelFingerprint, SavedSession};
use llmctl_engine::turn::Planner;
use llmctl_engine::{ChatTokenizer, EngineClient, EngineSessionName, GrammarCompiler};
use llmctl_hub::{ModelSource, Resolved};
use llmctl_models::hints::Frontend;
use llmctl_models::images::VisionSpec;
use llmctl_models::load;
use llmctl_models::load::{ModelTexts, model_facts};
use llmctl_models::text::Vocabulary;
use llmctl_serve::ServedModel;
use llmctl_template::DateTime;

/// Longest wait at the end of a turn for KV to be saved.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(30);

/// Facts about a loaded model that reports and defaults read.
#[derive(Debug, Clone, Default)]
pub struct ModelInfo {
    /// The name in results.
    pub name: String,
    /// Most tokens of prompt and answer together.
    pub context_tokens: usize,
    pub vocab_size: usize,
    pub defaults: GivenSampling,
    /// The file that `defaults` were read from, e.g. `generation_config.json`.
    pub defaults_source: String,
    pub has_chat_template: bool,
    /// It reads images, as far as its files are read.
    pub sees: bool,
    /// `--speculate` asks for drafts, and the model cannot drop rows.
    pub refuses_drafts: bool,
    pub load_time: Duration,
}

/// A model without its weights.
pub struct PreparedTexts {
    pub(super) info: ModelInfo,
    pub(super) chat_tokenizer: ChatTokenizer,
    fingerprint: ModelFingerprint,
    /// The model's files; `None` for a scripted model.
    source: Option<ModelSource>,
    /// Advice for a request with images that the model cannot read.
    pub(super) why_blind: &'static str,
    /// One clock per run, so that every row of a batch sees the same date.
    now: OnceCell<DateTime>,
}

impl PreparedTexts {
    pub(super) fn new(
        resolved: &Resolved,
        texts: ModelTexts,
        template: Option<&str>,
        context_tokens: usize,
    ) -> Self {
        let (defaults, defaults_source) = (texts.defaults.clone(), texts.defaults_source.to_owned());
        let identity = texts.identity.clone();
        let chat_tokenizer = ChatTokenizer::new(texts, template);
        let info = ModelInfo {
            name: resolved.name.clone(),
            context_tokens,
            defaults,
            defaults_source,
            has_chat_template: chat_tokenizer.has_template(),
            ..ModelInfo::default()
        };
        let fingerprint = load::with_template(&identity, chat_tokenizer.template_source());
        let (name, reference) = (resolved.name.clone(), resolved.reference());
        let fingerprint = ModelFingerprint { name, fingerprint, reference };
        let source = Some(resolved.source.clone());
        let why_blind = why_blind(resolved);
        Self { info, chat_tokenizer, fingerprint, source, why_blind, now: OnceCell::new() }
    }

    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    pub fn chat_tokenizer(&self) -> &ChatTokenizer {
        &self.chat_tokenizer
    }

    pub fn fingerprint(&self) -> &ModelFingerprint {
        &self.fingerprint
    }

    /// Returns the tokens as the engine's explanations read them.
    pub fn vocabulary(&self) -> &dyn Vocabulary {
        &**self.chat_tokenizer.tokenizer()
    }

    /// Returns the time that chat templates see.
    pub fn now(&self) -> DateTime {
        *self.now.get_or_init(DateTime::local_now)
    }

    /// Sets the frontend of the conversations; see [`ChatTokenizer::set_frontend`].
    pub fn for_frontend(mut self, frontend: Frontend) -> Self {
        self.chat_tokenizer.set_frontend(frontend);
        self
    }

    /// Returns the model as a server offers it, under `id` or its own name. `sampling` counts before the publisher's.
    pub fn into_served(self, id: Option<String>, sampling: GivenSampling) -> ServedModel {
        let Self { info, chat_tokenizer, fingerprint, source, .. } = self;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let id = id.unwrap_or(info.name);
        let facts = source.and_then(|source| model_facts(&source).ok());
        let defaults = sampling.or(&info.defaults);
        ServedModel { id, created, chat_tokenizer, fingerprint, defaults, facts }
    }
}

/// Advice for a model that reads text alone.
fn why_blind(resolved: &Resolved) -> &'static str {
    match (&resolved.source, &resolved.mmproj) {
        (ModelSource::Gguf(_), None) => {
            "a GGUF model reads images with its mmproj file, and there is none: name it with --mmproj FILE, or \
             download it with `llmctl pull`"
        }
        _ => "`llmctl models show REF` says whether a model reads images",
    }
}

/// A loaded model and its engine.
pub struct Loaded {
    pub(super) texts: PreparedTexts,
    pub(super) engine: EngineClient,
    pub(super) compiler: GrammarCompiler,
}

impl Loaded {
    pub fn info(&self) -> &ModelInfo {
        &self.texts.info
    }

    pub fn texts(&self) -> &PreparedTexts {
        &self.texts
    }

    pub fn engine(&self) -> &EngineClient {
        &self.engine
    }

    /// Returns what the model knows of images.
    ///
    /// # Errors
    /// That it takes none, and what to do.
    pub fn vision(&self) -> Result<&VisionSpec, CommandError> {
        self.engine.spec().vision.as_deref().ok_or_else(|| {
            let name = visible(&self.texts.info.name);
            CommandError::usage(format!("{name} takes no images")).hint(self.texts.why_blind)
        })
    }

    /// Compiles grammars for this model's answers.
    pub fn compiler(&self) -> &GrammarCompiler {
        &self.compiler
    }

    pub fn planner(&self) -> Planner<'_> {
        Planner { chat_tokenizer: &self.texts.chat_tokenizer, grammars: &self.compiler }
    }

    /// Sets the frontend of the conversations; see [`ChatTokenizer::set_frontend`].
    pub fn for_frontend(self, frontend: Frontend) -> Self {
        Self { texts: self.texts.for_frontend(frontend), ..self }
    }

    pub fn into_parts(self) -> (PreparedTexts, EngineClient) {
        (self.texts, self.engine)
    }

    /// Gives the engine the tokens of a saved session's last turn, so that it can report what of them is reused, and why
    /// not more.
    ///
    /// # Errors
    /// [`Error::EngineGone`].
    pub fn restore(&self, name: &EngineSessionName, saved: &SavedSession) -> Result<(), Error> {
        match saved.tokens_of(&self.texts.fingerprint) {
            Some(tokens) => self.engine.restore_session(name, tokens),
            None => Ok(()),
        }
    }

    /// As [`settle`].
    pub fn settle(&self, terminal: &Terminal) {
        settle(&self.engine, terminal);
    }
}

/// Waits until the KV of this turn is on disk, and shows what the engine has noticed.
pub fn settle(engine: &EngineClient, terminal: &Terminal) {
    if let Ok(false) = engine.flush_disk(FLUSH_TIMEOUT) {
        terminal.warn("the disk is slow: not all KV was saved, and the next turn computes the rest again");
    }
    engine.take_notices().unwrap_or_default().iter().for_each(|notice| terminal.warn(notice));
}

#[cfg(test)]
mod scripted {
    use super::*;
    use crate::cli::script::Script;

    impl Loaded {
        /// Returns a model whose engine is `script`.
        pub fn scripted(script: &Script) -> Self {
            let (chat_tokenizer, spec) = (script.chat_tokenizer(), script.spec());
            let info = ModelInfo {
                name: script.name.clone(),
                context_tokens: spec.context_length(),
                vocab_size: spec.vocab_size(),
                has_chat_template: chat_tokenizer.has_template(),
                defaults_source: "generation_config.json".to_owned(),
                ..ModelInfo::default()
            };
            let fingerprint =
                ModelFingerprint { name: script.name.clone(), fingerprint: "0".repeat(16), reference: None };
            let compiler = spec.grammar_compiler(chat_tokenizer.tokenizer().clone());
            let texts = PreparedTexts {
                info,
                chat_tokenizer,
                fingerprint,
                source: None,
                why_blind: "",
                now: OnceCell::new(),
            };
            Self { texts, engine: EngineClient::new(script.engine()), compiler }
        }
    }
}
