//! From the model flags to a model that answers: the one way for every subcommand.

use std::cell::OnceCell;
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::args::{self, ModelArgs, SamplingArgs};
use super::error::{CommandError, Kind};
use super::models;
use super::places::Places;
use super::run::llm::{Events, Llm, ModelInfo};
use super::terminal::Terminal;
use crate::runtime::backend::KvType;
use crate::runtime::backend::candle::DeviceKind;
use crate::runtime::engine::Engine;
use crate::runtime::kernel::Dtype;
use crate::runtime::load::{self, Device, LoadOptions, ModelTexts};
use crate::runtime::machine;
use crate::runtime::memory::{memory_limits, tightest};
use crate::runtime::spec::EngineConfig;
use crate::runtime::thread::{EngineHandle, EventStream};
use crate::runtime::{Error, Event, Request, Sampling};
use crate::template::{ChatTemplate, Conversation, DateTime, RenderOptions, SpecialTokens, TemplateError};

/// Resolves the reference, loads the model and starts its engine; notices and progress go to the terminal.
///
/// # Errors
/// `NotFound` when the reference means nothing, `BadData` for damaged files, `Temporary` when it does not fit.
pub fn load(args: &ModelArgs, terminal: &Terminal) -> Result<Box<dyn Llm>, CommandError> {
    let reference = args.model.as_deref().ok_or_else(no_model)?;
    let started = Instant::now();
    let resolved = models::find(reference, &Places::from_environment(), &args.aliases)?;
    tracing::info!("{reference} is {}", resolved.source.path().display());
    let options = options(args)?;
    let bar = LayerBar::new(terminal, &resolved.name);
    let mut model = load::load(&resolved, &options, &mut |done, total| bar.set(done, total))?;
    bar.finish();
    model.notices.iter().for_each(|notice| terminal.note(notice));
    let template = chat_template(args.chat_template.as_deref(), &model.texts)?;
    let context_tokens = model.model.spec().context_length;
    let vocab_size = model.model.spec().vocab_size;
    let config = EngineConfig::new(context_tokens, std::mem::take(&mut model.texts.end_of_generation));
    let (weights, vocabulary) = (model.model, model.texts.tokenizer.clone());
    let engine = EngineHandle::spawn(move || Engine::new(weights, vocabulary, config))?;
    let info = ModelInfo {
        name: model.name,
        context_tokens,
        vocab_size,
        defaults: model.texts.defaults.clone(),
        defaults_source: model.texts.defaults_source.to_owned(),
        has_chat_template: template.is_some(),
        load_time: started.elapsed(),
    };
    tracing::info!("loaded in {:.2} s, context {context_tokens} tokens", info.load_time.as_secs_f32());
    Ok(Box::new(Loaded { info, engine, texts: model.texts, template, now: OnceCell::new() }))
}

fn no_model() -> CommandError {
    CommandError::usage("no model is named")
        .hint("give --model, set LLMCTL_MODEL, or put `model` in a config file")
}

/// The flags as the loader takes them.
fn options(args: &ModelArgs) -> Result<LoadOptions, CommandError> {
    let dtype = args.dtype.map(|dtype| match dtype {
        args::WeightDtype::F32 => Dtype::F32,
        args::WeightDtype::Bf16 => Dtype::Bf16,
        args::WeightDtype::F16 => Dtype::F16,
    });
    let quantize = args.quantize.map(|quantize| match quantize {
        args::Quantize::Q8_0 => Dtype::Q8_0,
        args::Quantize::Q4_0 => Dtype::Q4_0,
        args::Quantize::Q4K => Dtype::Q4K,
        args::Quantize::Q6K => Dtype::Q6K,
    });
    let kv_type = args.kv_type.map_or(KvType::default(), |kv_type| match kv_type {
        args::KvType::F32 => KvType::F32,
        args::KvType::F16 => KvType::F16,
    });
    let threads = args.threads.unwrap_or_else(machine::default_threads);
    let device = match args.device.unwrap_or_default() {
        args::Device::Auto if cfg!(feature = "cuda") => Device::Candle(DeviceKind::Cuda(0)),
        args::Device::Auto if cfg!(feature = "metal") => Device::Candle(DeviceKind::Metal(0)),
        args::Device::Auto | args::Device::Cpu => Device::Cpu { threads },
        args::Device::Cuda => Device::Candle(DeviceKind::Cuda(0)),
        args::Device::Metal => Device::Candle(DeviceKind::Metal(0)),
    };
    let available_memory = tightest(&memory_limits(Path::new("/"))).map(|limit| limit.available);
    Ok(LoadOptions { device, dtype, quantize, context: args.ctx, kv_type, available_memory })
}

/// `--chat-template`, else the model's own.
fn chat_template(file: Option<&Path>, texts: &ModelTexts) -> Result<Option<ChatTemplate>, CommandError> {
    let source = match file {
        Some(path) => Some(super::run::prompt::read_file(path)?),
        None => texts.chat_templates.default.clone(),
    };
    let Some(source) = source else { return Ok(None) };
    let text = |id: Option<u32>| id.and_then(|id| texts.tokenizer.id_to_token(id)).map(str::to_owned);
    let specials = SpecialTokens {
        bos: text(texts.tokenizer.bos()),
        eos: text(texts.tokenizer.eos()),
        ..SpecialTokens::default()
    };
    let place = file.map_or("the model's chat template".to_owned(), |path| path.display().to_string());
    let template = ChatTemplate::new(&source, specials);
    template.map(Some).map_err(|error| CommandError::from(error).context(place))
}

impl From<TemplateError> for CommandError {
    fn from(error: TemplateError) -> Self {
        let hint = match &error {
            TemplateError::Missing => {
                "complete plain text with --raw, or give a template with --chat-template FILE"
            }
            TemplateError::Raised(_) => {
                "change the messages, or give another template with --chat-template FILE"
            }
            TemplateError::UndefinedVariables { .. } => "give each with --var NAME=VALUE",
            _ => "give another template with --chat-template FILE, or complete plain text with --raw",
        };
        CommandError::new(Kind::BadData, error).hint(hint)
    }
}

/// Layers loaded, drawn when it takes long enough to be worth it.
struct LayerBar<'a> {
    bar: Option<ProgressBar>,
    name: &'a str,
    since: Instant,
}

impl<'a> LayerBar<'a> {
    fn new(terminal: &Terminal, name: &'a str) -> Self {
        let bar = terminal.shows_progress().then(ProgressBar::hidden);
        Self { bar, name, since: Instant::now() }
    }

    fn set(&self, done: usize, total: usize) {
        let Some(bar) = &self.bar else { return };
        if bar.is_hidden() && self.since.elapsed() > Duration::from_millis(300) {
            let style = ProgressStyle::with_template("loading {msg} {bar:30} layer {pos}/{len}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_message(self.name.to_owned());
            bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
        }
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A loaded model behind its engine.
struct Loaded {
    info: ModelInfo,
    engine: EngineHandle,
    texts: ModelTexts,
    template: Option<ChatTemplate>,
    /// One clock per run, so that every row of a batch sees the same date.
    now: OnceCell<DateTime>,
}

impl Llm for Loaded {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn render(&self, conversation: &Conversation) -> Result<String, CommandError> {
        let template = self.template.as_ref().ok_or(TemplateError::Missing)?;
        let now = *self.now.get_or_init(DateTime::utc_now);
        let options = RenderOptions { add_generation_prompt: true, now, ..RenderOptions::default() };
        Ok(template.render(conversation, &options)?)
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, CommandError> {
        Ok(self.texts.tokenizer.encode_chat(text)?)
    }

    fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.texts.tokenizer.token_bytes(id).unwrap_or_default().into_owned()
    }

    fn submit(&self, request: Request) -> Result<Box<dyn Events + '_>, Error> {
        Ok(Box::new(Stream(self.engine.submit(request)?)))
    }
}

struct Stream(EventStream);

impl Events for Stream {
    fn next(&mut self, timeout: Duration) -> Result<Option<Event>, Error> {
        match self.0.next_timeout(timeout) {
            Ok(Some(event)) => Ok(Some(event)),
            Ok(None) => Err(Error::EngineGone),
            Err(_not_yet) => Ok(None),
        }
    }

    fn cancel(&mut self) {
        self.0.cancel();
    }
}

impl SamplingArgs {
    /// The sampling in force for this model; says what was taken from the model's own defaults.
    pub fn resolve_for(&self, llm: &dyn Llm, terminal: &Terminal) -> Sampling {
        let info = llm.info();
        let (sampling, taken) = self.resolve(&info.defaults);
        if !taken.is_empty() {
            terminal.note(&format!("sampling defaults from {}: {}", info.defaults_source, taken.join(", ")));
        }
        sampling
    }
}
