//! Promise: what an answer must keep to, it keeps to. On published schemas a small trained model at temperature 1 writes
//! nothing that an independent validator refuses; what cannot be enforced is refused by name.

use std::path::Path;

use llmctl::runtime::{
    Engine, EngineConfig, Error, Finish, Grammar, GrammarCompiler, GrammarError, GrammarSource, Request,
};
use serde_json::Value;

use crate::common::fixtures;
use crate::common::golden::{exact, load_model};
use crate::common::toy::{limited, run_all, seeded};

/// A trained model with its compiler.
struct Writer {
    engine: Engine,
    compiler: GrammarCompiler,
    prompt: Vec<u32>,
}

impl Writer {
    fn new(fixtures: &Path) -> Self {
        let loaded = load_model(&fixtures.join("models/stories260K/hf"), &exact()).expect("loads");
        let context = loaded.model.spec().context_length;
        let tokenizer = loaded.texts.tokenizer.clone();
        let config = EngineConfig {
            max_running: 16,
            step_tokens: 64,
            ..EngineConfig::new(context, loaded.texts.end_of_generation.clone())
        };
        let prompt = tokenizer.encode_chat("Once upon a time, there was a little girl.\n").expect("encodes");
        let engine = Engine::new(loaded.model, tokenizer.clone(), config).expect("a valid configuration");
        let compiler = GrammarCompiler::new(
            tokenizer,
            engine.spec().vocab_size(),
            &engine.spec().config.end_of_generation,
        );
        Self { engine, compiler, prompt }
    }

    fn request(&self, grammar: &Grammar, seed: u64, max_tokens: usize) -> Request {
        let limited = limited(&self.prompt, max_tokens);
        Request { grammar: Some(grammar.clone()), sampling: seeded(seed), ..limited }
    }
}

#[derive(Debug, Default)]
struct Counts {
    completed: usize,
    cut: usize,
    refused: usize,
    invalid: Vec<String>,
    failed: Vec<String>,
}

fn explore(writer: &mut Writer, schemas: &[(String, Value)], max_tokens: usize) -> Counts {
    let mut counts = Counts::default();
    let mut reasons = std::collections::BTreeMap::<String, usize>::new();
    for chunk in schemas.chunks(16) {
        let mut requests = Vec::new();
        let mut sources = Vec::new();
        for (name, schema) in chunk {
            match writer.compiler.compile(&GrammarSource::JsonSchema(schema.clone())) {
                Ok(grammar) => {
                    requests.push(writer.request(&grammar, 7, max_tokens));
                    sources.push((name, schema));
                }
                Err(error) => {
                    counts.refused += 1;
                    *reasons.entry(format!("{error:?}").chars().take(120).collect()).or_default() += 1;
                }
            }
        }
        for (answer, (name, schema)) in run_all(&mut writer.engine, requests).into_iter().zip(sources) {
            let text = answer.text();
            match answer.events.last() {
                Some(llmctl::runtime::Event::Done(outcome)) => match outcome.finish {
                    Finish::Eos(_) | Finish::Complete => {
                        counts.completed += 1;
                        let value: Result<Value, _> = serde_json::from_str(&text);
                        let validator = jsonschema::options().should_validate_formats(true).build(schema);
                        match (value, validator) {
                            (Ok(value), Ok(validator)) if validator.is_valid(&value) => {}
                            (Ok(_), Err(error)) => {
                                counts.failed.push(format!("{name}: validator: {error}"));
                            }
                            (value, _) => {
                                counts.invalid.push(format!("{name}: {schema} -> {text} {value:?}"))
                            }
                        }
                    }
                    _ => counts.cut += 1,
                },
                other => counts.failed.push(format!("{name}: {other:?}")),
            }
        }
    }
    for (reason, count) in reasons {
        println!("{count:4} {reason}");
    }
    counts
}

fn suite(folder: &Path) -> Vec<(String, Value)> {
    let mut files: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_file()).collect();
    files.sort();
    let mut all = Vec::new();
    for file in files {
        let groups: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        for group in groups.as_array().unwrap() {
            let name = format!("{} {}", file.file_name().unwrap().to_string_lossy(), group["description"]);
            all.push((name, group["schema"].clone()));
        }
    }
    all
}

#[test]
#[ignore = "exploration"]
fn explore_all() {
    let fixtures = fixtures().unwrap();
    let mut writer = Writer::new(&fixtures);
    for draft in ["draft2020-12", "draft7"] {
        let schemas = suite(&fixtures.join("vectors/json-schema-test-suite/tests").join(draft));
        let start = std::time::Instant::now();
        let counts = explore(&mut writer, &schemas, 96);
        println!("{draft}: {} in {:?}: {counts:#?}", schemas.len(), start.elapsed());
    }
    let lines =
        std::fs::read_to_string(fixtures.join("vectors/jsonschemabench/maskbench_sample.jsonl")).unwrap();
    let schemas: Vec<_> = lines
        .lines()
        .map(|line| {
            let row: Value = serde_json::from_str(line).unwrap();
            (row["id"].as_str().unwrap().to_owned(), row["schema"].clone())
        })
        .collect();
    let start = std::time::Instant::now();
    let counts = explore(&mut writer, &schemas, 96);
    println!("bench: {} in {:?}: {counts:#?}", schemas.len(), start.elapsed());
}

#[test]
#[ignore = "a measurement; run it with --release --nocapture"]
fn measure_masks() {
    let fixtures = fixtures().expect("fixtures");
    for (name, file) in [("llama2", "llama2/tokenizer.json"), ("qwen3", "assembled/qwen3/tokenizer.json")] {
        let json = std::fs::read(fixtures.join("tokenizers").join(file)).expect("readable");
        let tokenizer = std::sync::Arc::new(
            llmctl::runtime::text::Tokenizer::from_json(&json, &Default::default()).expect("a tokenizer"),
        );
        measure(name, &tokenizer);
    }
}

fn measure(name: &str, tokenizer: &std::sync::Arc<llmctl::runtime::text::Tokenizer>) {
    use llmctl::runtime::grammar::{GrammarState, TokenMask};
    use std::time::{Duration, Instant};
    let vocab_size = tokenizer.vocab_size();
    let compiler = GrammarCompiler::new(tokenizer.clone(), vocab_size, &[2]);
    let start = Instant::now();
    compiler.compile(&GrammarSource::JsonObject).expect("compiles");
    println!("{name}: vocabulary {vocab_size}, trie and first grammar {:?}", start.elapsed());
    let schema = serde_json::json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "format": "email"},
            "tags": {"type": "array", "items": {"type": "string", "enum": ["red", "green", "blue"]}, "maxItems": 5},
            "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}, "required": ["street", "zip"], "additionalProperties": false}
        },
        "required": ["name", "age", "email", "tags", "address"],
        "additionalProperties": false
    });
    let start = Instant::now();
    let source = GrammarSource::JsonSchema(schema);
    let grammar = compiler.compile(&source).expect("compiles");
    println!("  compile {:?}", start.elapsed());
    let start = Instant::now();
    compiler.compile(&source).expect("compiles");
    println!("  compile again {:?}", start.elapsed());
    for round in 0..3u64 {
        let start = Instant::now();
        let mut state = GrammarState::new(&grammar, false);
        let begin = start.elapsed();
        let (mut masks, mut forced, mut accept_time, mut mask_times) = (0u32, 0, Duration::ZERO, Vec::new());
        let mut seed = round + 1;
        let mut text = Vec::new();
        for _ in 0..400 {
            let start = Instant::now();
            let Some(mask) = state.mask().expect("a mask") else { break };
            let id = match mask {
                TokenMask::Forced(id) => {
                    forced += 1;
                    id
                }
                TokenMask::Allowed(allowed) => {
                    mask_times.push(start.elapsed());
                    masks += 1;
                    let mut ids = Vec::new();
                    allowed.for_each(|id| ids.push(id as u32));
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    // A quote where it may come, one time in eight: strings end.
                    let quote = tokenizer.token_to_id("\"").filter(|id| ids.contains(id) && seed >> 61 == 0);
                    quote.unwrap_or(ids[(seed >> 33) as usize % ids.len()])
                }
            };
            if id == 2 {
                break;
            }
            text.extend_from_slice(&tokenizer.token_bytes(id).unwrap_or_default());
            let start = Instant::now();
            state.accept(id).expect("allowed");
            accept_time += start.elapsed();
        }
        mask_times.sort();
        let total: Duration = mask_times.iter().sum();
        println!(
            "  begin {begin:?}; {masks} masks, mean {:?}, median {:?}, p99 {:?}, max {:?}; {forced} forced; accept mean {:?}",
            total / masks,
            mask_times[mask_times.len() / 2],
            mask_times[mask_times.len() * 99 / 100],
            mask_times.last().unwrap(),
            accept_time / (masks + forced)
        );
        if round == 0 {
            println!("  {}", String::from_utf8_lossy(&text).chars().take(300).collect::<String>());
        }
    }
}
