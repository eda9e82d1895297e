//! Generation with drafts beside generation without: `cargo bench --bench speculation -- MODEL [threads=N] [runs=N]
//! [lines=N] [draft=MODEL] [assistant=FILE] [only=TEXT] [scripts=FILE] [real=FILE]`. A model is a GGUF file, or a folder whose matrices are then quantised to Q4_0.
//! `scripts=FILE` writes the texts as token ids, for benches/lookup.py, and measures nothing.
//!
//! The text sets how many drafts are accepted, the model's shape what rows cost. So the model computes every row, and
//! its logits are then replaced by a script: a source file that is rewritten with small edits, a JSON list of its
//! functions, the calls of an agent that edits it, and prose. Runs with and without drafts take turns; medians of tokens per second of decoding, and their ratio.
//!
//! `real=FILE` takes prompts instead, a JSON object of their names and token ids, and the model's own likeliest answers of at most
//! [`REAL_TOKENS`] tokens: of a trained model they say what drafts gain in use. `scripts=FILE` writes these, too.
//!
//! With a draft model or an assistant, whose logits are the script too but for a part of the tokens, prose is decoded once for each part: what
//! it costs if it is never right, and what it gains.
#![allow(clippy::print_stdout, reason = "a benchmark's product is its table")]

use std::collections::BTreeMap;
use std::sync::Arc;

use llmctl_base::Result;
use llmctl_engine::{Engine, EngineConfig, Event, Request, Speculation, Usage};
use llmctl_hub::{ModelSource, Resolved};
use llmctl_models::kv::PageRef;
use llmctl_models::load;
use llmctl_models::load::{CpuOptions, Device, Dtype, KvType, LoadOptions, LoadedModel, PredictionUse};
use llmctl_models::model::{Batch, Logits, Model, ModelSpec};
use llmctl_models::tensor::SharedBytes;
use llmctl_models::text::Tokenizer;

const SOURCE: &str = include_str!("../src/runtime/sample.rs");
const PROSE: &str = include_str!("../ARCHITECTURE.md");

/// Parts of the tokens that a draft model expects, in percent.
const RIGHT: [usize; 4] = [0, 60, 80, 95];

/// Tokens of a real prompt, and of its answer, at most.
const MOST_PROMPT: usize = 4096;
const REAL_TOKENS: usize = 400;

/// A model whose sequence goes on as written, whatever it computes. The hidden state of a row, which a prediction block reads, begins
/// with the row's position in the script.
struct Scripted {
    model: Box<dyn Model>,
    script: Vec<u32>,
    /// Tokens of a hundred that it tells right, and that a block or an assistant tells right.
    right: usize,
    predicted_right: usize,
    hidden: Vec<f32>,
}

impl Scripted {
    fn new(model: Box<dyn Model>, script: &[u32], right: usize) -> Self {
        Self { model, script: script.to_vec(), right, predicted_right: right, hidden: Vec::new() }
    }

    /// Replaces the logits of rows at `positions` of the script.
    fn tell(&mut self, batch: &Batch<'_>, positions: &[usize], right: usize, logits: &mut Logits) {
        let wanted = batch.rows.iter().zip(positions).filter(|(row, _)| row.wants_logits);
        for ((_, &position), values) in wanted.zip(logits.values.chunks_exact_mut(logits.vocab_size)) {
            let next = self.script.get(position + 1).copied().unwrap_or_default();
            let next = if is_right(position, right) { next } else { next ^ 1 };
            values[next as usize] = 1e9;
        }
        self.hidden.clear();
        self.hidden.extend_from_slice(self.model.hidden());
        let width = self.hidden.len() / positions.len();
        for (row, &position) in self.hidden.chunks_exact_mut(width.max(1)).zip(positions) {
            row[0] = position as f32;
        }
    }
}

/// Returns whether the token at a position is among so many of a hundred, spread as by chance.
fn is_right(position: usize, right: usize) -> bool {
    let drawn = ((position as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % 100;
    drawn < right as u64
}

impl Model for Scripted {
    fn spec(&self) -> &ModelSpec {
        self.model.spec()
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits> {
        let mut logits = self.model.forward(batch)?;
        let positions: Vec<usize> = batch.rows.iter().map(|row| row.position).collect();
        self.tell(batch, &positions, self.right, &mut logits);
        Ok(logits)
    }

    fn hidden_width(&self) -> Option<usize> {
        self.model.hidden_width()
    }

    fn predict(&mut self, batch: &Batch<'_>, hidden: &[f32]) -> Result<Logits> {
        let mut logits = self.model.predict(batch, hidden)?;
        let before = hidden.chunks_exact(hidden.len() / batch.rows.len());
        let positions: Vec<usize> = before.map(|row| row[0] as usize + 1).collect();
        self.tell(batch, &positions, self.predicted_right, &mut logits);
        Ok(logits)
    }

    fn hidden(&self) -> &[f32] {
        &self.hidden
    }

    fn reuse(&mut self, logits: Logits) {
        self.model.reuse(logits);
    }

    fn keep_drafted(&mut self, state: PageRef, count: usize) -> Result<()> {
        self.model.keep_drafted(state, count)
    }

    fn copy_page(&mut self, from: PageRef, to: PageRef) -> Result<()> {
        self.model.copy_page(from, to)
    }

    fn free_page(&mut self, page_ref: PageRef) {
        self.model.free_page(page_ref);
    }

    fn export_page(&self, page_ref: PageRef, out: &mut Vec<u8>) -> Result<()> {
        self.model.export_page(page_ref, out)
    }

    fn import_page(&mut self, page_ref: PageRef, bytes: SharedBytes) -> Result<()> {
        self.model.import_page(page_ref, bytes)
    }
}

/// Cuts a text into words and signs, with an id for each by its content, so that any model's vocabulary serves.
fn tokens(text: &str, vocab_size: usize) -> Vec<u32> {
    let mut words: Vec<String> = Vec::new();
    let mut last = ' ';
    for c in text.chars() {
        let goes_on =
            (c.is_alphanumeric() && (last.is_alphanumeric() || last == ' ')) || (c == ' ' && last == ' ');
        match words.last_mut().filter(|word| goes_on && word.len() < 8) {
            Some(word) => word.push(c),
            None => words.push(c.to_string()),
        }
        last = c;
    }
    let id = |word: &String| {
        word.bytes().fold(17_u64, |hash, byte| hash.wrapping_mul(0x0100_0000_01b3) ^ u64::from(byte))
    };
    words.iter().map(|word| ((id(word) >> 7) % vocab_size as u64) as u32).collect()
}

/// A prompt and its answer.
fn rewrite(lines: usize, vocab_size: usize) -> (Vec<u32>, Vec<u32>) {
    let source: Vec<&str> = SOURCE.lines().take(lines).collect();
    let edit = |(index, line): (usize, &&str)| match index % 12 {
        7 => line.replacen("self", "this", 1).replacen("let ", "let mut ", 1).replacen("the ", "each ", 1),
        _ => (*line).to_owned(),
    };
    let edited: Vec<String> = source.iter().enumerate().map(edit).collect();
    let prompt = format!("{}\n\nWrite this file again with small edits.\n", source.join("\n"));
    (tokens(&prompt, vocab_size), tokens(&edited.join("\n"), vocab_size))
}

/// The functions of the source as JSON: the keys repeat, names are quoted from the prompt.
fn json(lines: usize, vocab_size: usize) -> (Vec<u32>, Vec<u32>) {
    let source: Vec<&str> = SOURCE.lines().take(lines).collect();
    let objects = source.iter().enumerate().filter_map(|(index, line)| {
        let (before, rest) = line.split_once("fn ")?;
        let (name, arguments) = rest.split_once('(')?;
        let visibility = if before.contains("pub") { "public" } else { "private" };
        let arguments = arguments.split(')').next().unwrap_or_default();
        Some(format!(
            "  {{\n    \"name\": \"{name}\",\n    \"line\": {index},\n    \"visibility\": \"{visibility}\",\n    \
             \"arguments\": \"{arguments}\"\n  }}"
        ))
    });
    let answer = format!("[\n{}\n]", objects.collect::<Vec<_>>().join(",\n"));
    let prompt = format!("{}\n\nList the functions as JSON.\n", source.join("\n"));
    (tokens(&prompt, vocab_size), tokens(&answer, vocab_size))
}

/// Calls of an editing tool, each with the lines that it replaces: what a coding agent writes after it has read a file.
fn calls(lines: usize, vocab_size: usize) -> (Vec<u32>, Vec<u32>) {
    let source: Vec<&str> = SOURCE.lines().take(lines).collect();
    let call = |old: &[&str]| {
        let old = old.join("\\n");
        let new = old.replacen("let ", "let mut ", 1).replacen("the ", "each ", 1);
        format!(
            "<tool_call>\n{{\"name\": \"edit\", \"arguments\": {{\"path\": \"src/runtime/sample.rs\", \
             \"old\": \"{old}\", \"new\": \"{new}\"}}}}\n</tool_call>\nThe edit is applied.\n"
        )
    };
    let answer: String = source.chunks(12).map(|lines| call(&lines[..lines.len().min(4)])).collect();
    let prompt = format!("{}\n\nMake small edits.\n", source.join("\n"));
    (tokens(&prompt, vocab_size), tokens(&answer, vocab_size))
}

fn prose(vocab_size: usize) -> (Vec<u32>, Vec<u32>) {
    let text = tokens(PROSE, vocab_size);
    (tokens("Describe how this program is made.", vocab_size), text[..text.len().min(1500)].to_vec())
}

/// Tokens per second of decoding, what drafts came to, and the answer's tokens.
fn run(engine: &mut Engine, prompt: &[u32], max_tokens: usize) -> (f64, Usage, Vec<u32>) {
    let mut request = Request { prompt: prompt.to_vec(), ..Request::default() };
    request.limits.max_tokens = Some(max_tokens);
    request.sampling.temperature = 0.0;
    engine.submit(request).expect("room");
    let mut ids = Vec::new();
    loop {
        for (_, event) in engine.step() {
            match event {
                Event::Text { tokens, .. } => ids.extend(tokens.iter().map(|token| token.id)),
                Event::Done(outcome) => {
                    return (
                        outcome.timings.decode_rate(&outcome.usage).expect("tokens"),
                        outcome.usage,
                        ids,
                    );
                }
                Event::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
    }
}

struct Options {
    model: String,
    threads: usize,
    runs: usize,
    lines: usize,
    draft: Option<String>,
    assistant: Option<String>,
    only: Option<String>,
    scripts: Option<String>,
    real: Option<String>,
}

impl Options {
    fn wants(&self, name: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only == name)
    }
}

fn options() -> Options {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (model, runs, lines) = (String::new(), 3, 300);
    let (draft, assistant, only, scripts, real) = (None, None, None, None, None);
    let mut options = Options { model, threads, runs, lines, draft, assistant, only, scripts, real };
    for arg in std::env::args().skip(1).filter(|arg| !arg.starts_with("--")) {
        match arg.split_once('=') {
            Some(("threads", n)) => options.threads = n.parse().expect("threads=N"),
            Some(("runs", n)) => options.runs = n.parse().expect("runs=N"),
            Some(("lines", n)) => options.lines = n.parse().expect("lines=N"),
            Some(("draft", model)) => options.draft = Some(model.to_owned()),
            Some(("assistant", file)) => options.assistant = Some(file.to_owned()),
            Some(("only", name)) => options.only = Some(name.to_owned()),
            Some(("scripts", file)) => options.scripts = Some(file.to_owned()),
            Some(("real", file)) => options.real = Some(file.to_owned()),
            _ => options.model = arg,
        }
    }
    options
}

fn load_plain(path: &str, options: &Options, script_len: usize) -> LoadedModel {
    let is_folder = std::path::Path::new(path).is_dir();
    let source = if is_folder { ModelSource::Folder } else { ModelSource::Gguf };
    let load_options = LoadOptions {
        images: load::ImageUse::default(),
        device: Device::Cpu(CpuOptions::new(options.threads)),
        dtype: None,
        quantize: is_folder.then_some(Dtype::Q4_0),
        context: Some(script_len + 64),
        kv_type: KvType::F16,
        kv_memory: None,
        available_memory: None,
        packed: None,
        prediction: match options.draft.as_deref() {
            Some("mtp") => PredictionUse::Required,
            _ => PredictionUse::Never,
        },
        adapters: Vec::new(),
    };
    let resolved = Resolved::new(path.to_owned(), source(path.into()));
    let assistant = options.assistant.clone();
    let assistant = assistant.map(|path| Resolved::new(path.clone(), ModelSource::Gguf(path.into())));
    load::load_with_draft(&resolved, assistant.as_ref(), &load_options, &mut |_, _| ()).expect("loads")
}

struct ScriptedModels {
    model: Box<dyn Model>,
    block: Option<Box<dyn Model>>,
    vocabulary: Arc<Tokenizer>,
}

/// The model as scripted, and its own block, which tells `right` tokens of a hundred, as its assistant does.
fn load_scripted(path: &str, options: &Options, script: &[u32], right: usize) -> ScriptedModels {
    let loaded = load_plain(path, options, script.len());
    let model = Scripted { predicted_right: right, ..Scripted::new(loaded.model, script, 100) };
    let model = Box::new(model);
    let block = loaded.draft.and_then(|draft| draft.model);
    let block = block.map(|block| Box::new(Scripted::new(block, script, right)) as Box<dyn Model>);
    ScriptedModels { model, block, vocabulary: loaded.texts.tokenizer }
}

/// An engine, and with drafts the model's own block, which tells `right` tokens of a hundred.
fn engine(options: &Options, script: &[u32], speculation: Speculation, right: usize) -> Engine {
    let ScriptedModels { model, block, vocabulary } = load_scripted(&options.model, options, script, right);
    let config = EngineConfig { speculation, ..EngineConfig::new(script.len() + 64, Vec::new()) };
    let mut engine = Engine::new(model, vocabulary, config).expect("valid");
    let block = block.filter(|_| speculation != Speculation::Off);
    block.into_iter().for_each(|block| engine.set_draft_model(block).expect("a block"));
    engine
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Decodes the answer with both engines in turns. Prints the medians and what drafts came to.
fn compare(name: &str, engines: &mut [Engine; 2], options: &Options, prompt: &[u32], answer: &[u32]) {
    let mut rates = [Vec::new(), Vec::new()];
    let mut usage = Usage::default();
    for _ in 0..options.runs {
        for (engine, rates) in engines.iter_mut().zip(&mut rates) {
            let (rate, used, ids) = run(engine, prompt, answer.len());
            assert_eq!(ids, answer, "the script, or the answer without drafts");
            rates.push(rate);
            usage = used;
        }
    }
    let [off, auto] = rates.map(median);
    let Usage { drafted_tokens, accepted_tokens, completion_tokens, .. } = usage;
    println!(
        "{name}: {off:.1} tok/s off, {auto:.1} tok/s auto, ratio {:.2}; {completion_tokens} tokens, {drafted_tokens} drafted, \
         {accepted_tokens} accepted",
        auto / off
    );
}

/// Prose with a draft model, a block or an assistant that is right for so many tokens of a hundred.
fn compare_drafted(draft: &str, options: &Options, vocab_size: usize) {
    let own = draft == "mtp" || options.assistant.is_some();
    let path = if own { &options.model } else { draft };
    let draft_vocab = load_scripted(path, options, &[0; 64], 100).model.spec().vocab_size;
    let (prompt, answer) = prose(vocab_size.min(draft_vocab) & !1);
    let answer = &answer[..answer.len().min(400)];
    let script = [&prompt[..], answer].concat();
    for right in RIGHT {
        let mut engines =
            [Speculation::Off, Speculation::Auto].map(|mode| engine(options, &script, mode, right));
        if !own {
            let model = Scripted::new(load_plain(draft, options, script.len()).model, &script, right);
            engines[1].set_draft_model(Box::new(model)).expect("a draft model");
        }
        compare(&format!("prose, {right}% right"), &mut engines, options, &prompt, answer);
    }
}

/// A prompt by name, and its answer.
type Text = (String, (Vec<u32>, Vec<u32>));

/// Engines of the model itself, without drafts and with them, and its answers to the prompts of a file.
fn real(options: &Options, file: &str) -> ([Engine; 2], Vec<Text>) {
    let prompts = std::fs::read_to_string(file).expect("a file of prompts");
    let mut prompts: BTreeMap<String, Vec<u32>> = serde_json::from_str(&prompts).expect("an object of ids");
    prompts.retain(|name, _| options.wants(name));
    let mut engines = [Speculation::Off, Speculation::Auto].map(|speculation| {
        let LoadedModel { model, texts, .. } = load_plain(&options.model, options, MOST_PROMPT + REAL_TOKENS);
        let config = EngineConfig {
            speculation,
            ..EngineConfig::new(MOST_PROMPT + REAL_TOKENS, texts.end_of_generation)
        };
        Engine::new(model, texts.tokenizer, config).expect("valid")
    });
    let answered = prompts.into_iter().map(|(name, prompt)| {
        let (_, _, answer) = run(&mut engines[0], &prompt, REAL_TOKENS);
        (name, (prompt, answer))
    });
    let texts = answered.collect();
    (engines, texts)
}

fn write_scripts(file: &str, texts: &[Text]) {
    let texts = texts.iter().map(|(name, (prompt, answer))| {
        (name.clone(), serde_json::json!({ "prompt": prompt, "answer": answer }))
    });
    let texts = serde_json::Value::Object(texts.collect());
    std::fs::write(file, texts.to_string()).expect("a file");
}

fn main() {
    let options = options();
    if let Some(file) = &options.real {
        let (mut engines, texts) = real(&options, file);
        if let Some(file) = &options.scripts {
            return write_scripts(file, &texts);
        }
        for (name, (prompt, answer)) in &texts {
            compare(name, &mut engines, &options, prompt, answer);
        }
        return;
    }
    let probe = engine(&options, &[0; 64], Speculation::Off, 100);
    let vocab_size = probe.spec().vocab_size();
    drop(probe);
    if let Some(draft) = options.draft.as_ref().or(options.assistant.as_ref()) {
        return compare_drafted(draft, &options, vocab_size);
    }
    let scripts = [
        ("rewrite", rewrite(options.lines, vocab_size)),
        ("JSON", json(options.lines, vocab_size)),
        ("tool calls", calls(options.lines, vocab_size)),
        ("prose", prose(vocab_size)),
    ];
    let scripts = scripts.map(|(name, text)| (name.to_owned(), text));
    if let Some(file) = &options.scripts {
        return write_scripts(file, &scripts);
    }
    for (name, (prompt, answer)) in scripts.into_iter().filter(|(name, _)| options.wants(name)) {
        let script = [&prompt[..], &answer].concat();
        let mut engines =
            [Speculation::Off, Speculation::Auto].map(|mode| engine(&options, &script, mode, 100));
        compare(&name, &mut engines, &options, &prompt, &answer);
    }
}
