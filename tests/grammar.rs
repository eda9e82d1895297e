//! Promise: what an answer must keep to, it keeps to. On published schemas a small trained model at temperature 1 writes
//! nothing that an independent validator refuses; what cannot be enforced is refused by name.
//!
//! Samples: the JSON Schema Test Suite, jsonschemabench's maskbench, llama.cpp's converter tests and llguidance's own.

use std::fs;

use llmctl_base::GrammarError;
use llmctl_engine::grammar::{GrammarState, TokenMask};
use llmctl_engine::{Grammar, GrammarCompiler, GrammarSource};

use crate::common::prelude::*;

/// A trained model with its compiler.
struct Writer {
    engine: Engine,
    tokenizer: Arc<Tokenizer>,
    compiler: GrammarCompiler,
    prompt: Vec<u32>,
    /// Makes what ends strings, lists and objects likelier, so that more answers come to an end.
    haste: BTreeMap<u32, f32>,
}

impl Writer {
    fn new(fixtures: &Path) -> Self {
        Self::with(fixtures, |_| ())
    }

    fn with(fixtures: &Path, change: impl FnOnce(&mut EngineConfig)) -> Self {
        let loaded = load_model(&fixtures.join("models/stories260K/hf"), &exact()).expect("loads");
        let context = loaded.model.spec().context_length;
        let tokenizer = loaded.texts.tokenizer.clone();
        let one = EngineConfig::new(context, loaded.texts.end_of_generation.clone());
        let mut config = EngineConfig { max_running: 16, step_tokens: 64, ..one };
        change(&mut config);
        let prompt = tokenizer.encode_chat("Once upon a time, there was a little girl.\n").expect("encodes");
        let engine = Engine::new(loaded.model, tokenizer.clone(), config).expect("a valid configuration");
        let compiler = engine.spec().grammar_compiler(tokenizer.clone());
        let bias = |id: u32| match tokenizer.token_bytes(id).as_deref() {
            Some(b"\"") => Some((id, 6.0)),
            Some(b"]" | b"}") => Some((id, 16.0)), // the model has never seen one
            _ => None,
        };
        let haste = (0..tokenizer.vocab_size() as u32).filter_map(bias).collect();
        Self { engine, tokenizer, compiler, prompt, haste }
    }

    fn compile(&self, source: &GrammarSource) -> Result<Grammar, GrammarError> {
        self.compiler.compile(source).map_err(|error| match error {
            Error::Grammar(error) => error,
            other => panic!("{other:?}"),
        })
    }

    fn request(&self, grammar: &Grammar, seed: u64, max_tokens: usize) -> Request {
        let sampling = seeded(seed);
        Request { grammar: Some(grammar.clone()), sampling, ..limited(&self.prompt, max_tokens) }
    }

    fn hasty(&self, grammar: &Grammar, seed: u64, max_tokens: usize) -> Request {
        let mut request = self.request(grammar, seed, max_tokens);
        request.sampling.logit_bias = self.haste.clone();
        request
    }

    fn write(&mut self, source: &GrammarSource, seed: u64, max_tokens: usize) -> Answer {
        let grammar = self.compile(source).unwrap_or_else(|error| panic!("{source:?}: {error}"));
        let request = self.request(&grammar, seed, max_tokens);
        run_one(&mut self.engine, request)
    }
}

fn is_complete(answer: &Answer) -> bool {
    matches!(answer.finish(), Finish::Eos(_) | Finish::Complete)
}

/// Results over many schemas.
#[derive(Debug, Default)]
struct Counts {
    completed: usize,
    cut: usize,
    unsupported: usize,
    /// Unsatisfiable, or no schemas.
    wrong: usize,
    too_complex: usize,
    problems: Vec<String>,
}

struct Schema {
    name: String,
    schema: Value,
}

/// Has an answer written to each schema, and every completed one judged.
fn judge(writer: &mut Writer, schemas: &[Schema], seed: u64, max_tokens: usize) -> Counts {
    let mut counts = Counts::default();
    for chunk in schemas.chunks(16) {
        let mut accepted = Vec::new();
        for schema in chunk {
            match writer.compile(&GrammarSource::JsonSchema(schema.schema.clone())) {
                Ok(grammar) => accepted.push((schema, writer.hasty(&grammar, seed, max_tokens))),
                Err(error) => count_refusal(schema, &error, &mut counts),
            }
        }
        let (accepted, requests): (Vec<_>, Vec<_>) = accepted.into_iter().unzip();
        for (schema, answer) in accepted.into_iter().zip(run_all(&mut writer.engine, requests)) {
            if is_complete(&answer) {
                counts.completed += 1;
                counts.problems.extend(problem(schema, &answer.text()));
            } else {
                assert_eq!(answer.finish(), &Finish::MaxTokens, "{}", schema.name);
                counts.cut += 1;
            }
        }
    }
    let count = counts.problems.len();
    assert!(count == 0, "{count} problems, of these:\n{}", counts.problems[..count.min(20)].join("\n"));
    counts
}

/// A refusal names a keyword that is there, or says that nothing can satisfy the schema, or that it is none.
fn count_refusal(Schema { name, schema }: &Schema, error: &GrammarError, counts: &mut Counts) {
    let is_fair = match error {
        GrammarError::Unsupported { keyword, .. } => {
            counts.unsupported += 1;
            schema.to_string().contains(&format!("\"{keyword}\":"))
        }
        GrammarError::Invalid(message) => {
            counts.wrong += 1;
            let is_unsatisfiable = message.starts_with("Unsatisfiable") || message.starts_with("nothing");
            is_unsatisfiable || !jsonschema::meta::is_valid(schema)
        }
        GrammarError::TooComplex(_) => {
            counts.too_complex += 1;
            true
        }
        GrammarError::Failed(_) => false,
    };
    if !is_fair {
        counts.problems.push(format!("{name}: {error}: {schema}"));
    }
}

/// Returns why a completed answer does not match its schema; `None` if it does.
fn problem(Schema { name, schema }: &Schema, text: &str) -> Option<String> {
    let mut value: Value = match serde_json::from_str(text) {
        Ok(value) => value,
        // JSON allows it, and neither this reader nor the validator can hold it.
        Err(error) if error.to_string().starts_with("number out of range") => return None,
        Err(error) => return Some(format!("{name}: {error}: {text:?} for {schema}")),
    };
    without_negative_zero(&mut value);
    match jsonschema::options().should_validate_formats(true).build(schema) {
        Ok(validator) if validator.is_valid(&value) => None,
        Ok(_) => Some(format!("{name}: {text} for {schema}")),
        Err(error) => Some(format!("{name}: {error}: {schema}")),
    }
}

/// serde_json reads `-0` as a float, which draft 4 does not take for an integer; the text is one.
fn without_negative_zero(value: &mut Value) {
    match value {
        Value::Number(number) if number.as_f64() == Some(0.0) => *value = 0.into(),
        Value::Array(items) => items.iter_mut().for_each(without_negative_zero),
        Value::Object(members) => members.values_mut().for_each(without_negative_zero),
        _ => {}
    }
}

/// The test suite's schemas of a draft, each naming it where it names none.
fn suite(fixtures: &Path, draft: &str, uri: &str) -> Vec<Schema> {
    let folder = fixtures.join("vectors/json-schema-test-suite/tests").join(draft);
    let files = fs::read_dir(folder).expect("readable").map(|entry| entry.expect("an entry").path());
    let mut files: Vec<_> = files.filter(|path| path.is_file()).collect();
    files.sort();
    let mut schemas = Vec::new();
    for file in files {
        let groups: Value = serde_json::from_slice(&fs::read(&file).expect("readable")).expect("JSON");
        for group in groups.as_array().expect("groups") {
            let mut schema = group["schema"].clone();
            if let Some(members) = schema.as_object_mut() {
                members.entry("$schema").or_insert_with(|| uri.into());
            }
            let name = format!("{draft} {:?} {}", file.file_name().expect("a name"), group["description"]);
            schemas.push(Schema { name, schema });
        }
    }
    // The validator has no metaschemas from elsewhere.
    schemas.retain(|schema| !schema.name.contains("vocabulary.json"));
    schemas
}

/// Every `step`th of the benchmark's schemas.
fn bench(fixtures: &Path, step: usize) -> Vec<Schema> {
    let path = fixtures.join("vectors/jsonschemabench/maskbench_sample.jsonl");
    let lines = fs::read_to_string(path).expect("readable");
    let schema = |line: &str| {
        let mut row: Value = serde_json::from_str(line).expect("JSON");
        Schema { name: row["id"].to_string(), schema: row["schema"].take() }
    };
    lines.lines().step_by(step).map(schema).collect()
}

const DRAFT_2020: &str = "https://json-schema.org/draft/2020-12/schema";
const DRAFT_7: &str = "http://json-schema.org/draft-07/schema#";

#[test]
fn the_test_suites_schemas_are_satisfied_or_refused_by_name() {
    let Some(fixtures) = fixtures() else { return };
    let mut writer = Writer::new(&fixtures);
    for (draft, uri, floor) in [("draft2020-12", DRAFT_2020, 140), ("draft7", DRAFT_7, 130)] {
        let schemas = suite(&fixtures, draft, uri);
        let counts = judge(&mut writer, &schemas, 7, 80);
        eprintln!("{draft}: {} schemas, {counts:?}", schemas.len());
        assert!(counts.completed >= floor, "{counts:?}");
        assert!(counts.cut * 4 <= counts.completed && counts.too_complex == 0, "{counts:?}");
    }
}

#[test]
fn published_schemas_are_satisfied_or_refused_by_name() {
    let Some(fixtures) = fixtures() else { return };
    let mut writer = Writer::new(&fixtures);
    let counts = judge(&mut writer, &bench(&fixtures, 3), 11, 160);
    eprintln!("a third of maskbench: {counts:?}");
    assert!(counts.completed >= 150, "{counts:?}");
    assert!(counts.unsupported <= 130 && counts.too_complex <= 3, "{counts:?}");
}

#[test]
#[ignore = "minutes: all of the benchmark, with several seeds"]
fn all_published_schemas_with_several_seeds() {
    let Some(fixtures) = fixtures() else { return };
    let mut writer = Writer::new(&fixtures);
    for seed in 0..5 {
        for (draft, uri) in [("draft2020-12", DRAFT_2020), ("draft7", DRAFT_7)] {
            eprintln!("{seed} {draft}: {:?}", judge(&mut writer, &suite(&fixtures, draft, uri), seed, 200));
        }
        eprintln!("{seed} maskbench: {:?}", judge(&mut writer, &bench(&fixtures, 1), seed, 300));
    }
}

#[test]
fn llama_cpps_schemas_are_satisfied_or_refused_by_name() {
    let Some(fixtures) = fixtures() else { return };
    let mut writer = Writer::new(&fixtures);
    let path = fixtures.join("vectors/grammar/llama.cpp-json-schema-to-grammar.json");
    let cases: Value = serde_json::from_slice(&fs::read(path).expect("readable")).expect("JSON");
    let schema = |case: &Value| {
        let schema = serde_json::from_str(case["schema_text"].as_str()?).ok()?;
        let mut schema: Value = schema;
        if schema["items"].is_array() {
            schema["$schema"] = DRAFT_7.into(); // some have the older form of tuples
        }
        (case["expected_status"] == "SUCCESS").then(|| Schema { name: case["name"].to_string(), schema })
    };
    let schemas: Vec<_> = cases.as_array().expect("cases").iter().filter_map(schema).collect();
    assert!(schemas.len() > 60, "{}", schemas.len());
    for seed in 0..3 {
        let counts = judge(&mut writer, &schemas, seed, 120);
        eprintln!("{counts:?}");
        assert!(counts.completed >= 45, "{counts:?}");
    }
}

#[test]
fn any_object_is_an_object() {
    let Some(fixtures) = fixtures() else { return };
    let mut writer = Writer::new(&fixtures);
    let grammar = writer.compile(&GrammarSource::JsonObject).expect("compiles");
    let requests = (0..12).map(|seed| writer.hasty(&grammar, seed, 120)).collect();
    let answers = run_all(&mut writer.engine, requests);
    let complete: Vec<_> = answers.into_iter().filter(is_complete).collect();
    assert!(complete.len() >= 6, "{}", complete.len());
    for answer in complete {
        let value: Value = serde_json::from_str(&answer.text()).expect("JSON");
        assert!(value.is_object(), "{value}");
    }
}

#[test]
fn regular_expressions_are_matched_whole() {
    let Some(fixtures) = fixtures() else { return };
    let mut writer = Writer::new(&fixtures);
    for regex in [
        r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])",
        r"[a-z]{2,8}( [a-z]{2,8}){0,3}\.",
        r"yes|no|perhaps",
        r"\+?[0-9]{3,12}",
        r"(?i)[abc]{1,6}/\d{2}",
        r"[äöüß€😀]{1,4}",
        r#""[^"\\]{0,10}""#,
    ] {
        let regex_there = regex.replace("(?i)[abc]", "[abcABC]"); // ECMA-262 has no such flag
        let schema = json!({"pattern": format!("^(?:{regex_there})$")});
        let judge = jsonschema::validator_for(&schema).expect("a schema");
        for seed in 0..4 {
            let answer = writer.write(&GrammarSource::Regex(regex.to_owned()), seed, 100);
            assert!(is_complete(&answer), "{regex}: {:?} {:?}", answer.text(), answer.finish());
            assert!(judge.is_valid(&json!(answer.text())), "{regex}: {:?}", answer.text());
        }
    }
}

/// Sums of products with brackets, as the grammar below writes them; what is left of the text behind one.
fn skip_sum(text: &str) -> Option<&str> {
    let mut rest = skip_atom(text)?;
    while let Some(next) = rest.strip_prefix(['+', '*']) {
        rest = skip_atom(next)?;
    }
    Some(rest)
}

fn skip_atom(text: &str) -> Option<&str> {
    match text.strip_prefix('(') {
        Some(inner) => skip_sum(inner)?.strip_prefix(')'),
        None => {
            Some(text.trim_start_matches(|c: char| c.is_ascii_digit())).filter(|rest| rest.len() < text.len())
        }
    }
}

#[test]
fn lark_grammars_are_kept_to_though_they_nest() {
    let Some(fixtures) = fixtures() else { return };
    let mut writer = Writer::new(&fixtures);
    let lark = "start: sum\nsum: atom ((\"+\" | \"*\") atom)*\natom: NUMBER | \"(\" sum \")\"\nNUMBER: /[1-9][0-9]{0,3}/\n";
    let grammar = writer.compile(&GrammarSource::Lark(lark.to_owned())).expect("compiles");
    let bracket = writer.tokenizer.encode_plain_rest("(").expect("encodes")[0];
    let asked = |seed| {
        let mut request = writer.request(&grammar, seed, 160);
        request.sampling.logit_bias = [(bracket, 3.0)].into();
        request
    };
    let requests = (0..12).map(asked).collect();
    let answers = run_all(&mut writer.engine, requests).into_iter();
    let complete: Vec<_> = answers.filter(is_complete).map(|answer| answer.text()).collect();
    assert!(complete.len() >= 6, "{complete:?}");
    assert!(complete.iter().all(|text| skip_sum(text) == Some("")), "{complete:?}");
    assert!(complete.iter().any(|text| text.contains('(')), "{complete:?}");
}

/// Characters, tokens, and text that a longer lexeme would take, with the tokens of a real vocabulary.
#[test]
fn gbnf_grammars_are_kept_to_and_take_what_is_theirs() {
    let Some(fixtures) = fixtures() else { return };
    let mut writer = Writer::new(&fixtures);
    let sum = "root ::= term ([+*] term)*\nterm ::= num | \"(\" root \")\"\nnum ::= [1-9] [0-9]{0,3}\n";
    let sum = GrammarSource::grammar(sum.to_owned());
    assert!(matches!(sum, GrammarSource::Gbnf(_)));
    let complete = (0..12).map(|seed| writer.write(&sum, seed, 160)).filter(is_complete);
    let complete: Vec<String> = complete.map(|answer| answer.text()).collect();
    assert!(complete.len() >= 6, "{complete:?}");
    assert!(complete.iter().all(|text| skip_sum(text) == Some("")), "{complete:?}");
    assert!(takes(&writer, &sum, "(1+20)*3") && !takes(&writer, &sum, "(1+)"));
    let story = GrammarSource::grammar("root ::= \"<\" root \">\" | [a-z ]+ \"the end\"".to_owned());
    assert!(takes(&writer, &story, "<a day in the woods the end>") && !takes(&writer, &story, "<a day>"));
    let eos = writer.tokenizer.eos().expect("a token");
    let name = writer.tokenizer.id_to_token(eos).expect("a name").to_owned();
    let tokens = GrammarSource::grammar(format!("root ::= \"a\" ({name} | <[1]>)"));
    let compiled = writer.compile(&tokens).expect("compiles");
    let GrammarSource::Lark(lark) = compiled.source() else { panic!("{:?}", compiled.source()) };
    assert!(lark.contains(&format!("<[{eos}]>")), "engines elsewhere get Lark: {lark}");
}

/// Whether a grammar takes the text, spelt in the tokenizer's own way.
fn takes(writer: &Writer, source: &GrammarSource, text: &str) -> bool {
    let grammar = writer.compile(source).unwrap_or_else(|error| panic!("{error}"));
    let mut state = GrammarState::new(&grammar, false);
    let ids = writer.tokenizer.encode_plain_rest(text).expect("encodes");
    ids.into_iter().all(|id| state.accept(id).is_ok())
}

#[test]
fn the_grammar_that_llguidance_is_tested_with_takes_its_sample() {
    let Some(fixtures) = fixtures() else { return };
    let writer = Writer::new(&fixtures);
    let read = |name: &str| fs::read_to_string(fixtures.join("vectors/llguidance").join(name)).expect(name);
    let rfc = GrammarSource::Lark(read("rfc.lark").replace("start: root", "start: root NL?\nNL: /\\n/"));
    let sample: String = read("rfc.xml").chars().take(6000).collect();
    assert!(takes(&writer, &rfc, &sample));
    assert!(!takes(&writer, &rfc, &sample.replacen("<front>", "<frond>", 1)));
}

#[test]
fn other_alphabets_and_escapes_come_through_split_tokens() {
    let Some(fixtures) = fixtures() else { return };
    let mut writer = Writer::new(&fixtures);
    let names = ["größe", "日本語", "smile 😀 \u{200d}", "quote\"back\\slash", "tab\tand\nline", "\u{1}"];
    for name in names {
        let schema = json!({
            "type": "object",
            "properties": {name: {"enum": [name, "é\u{301}"]}},
            "required": [name],
            "additionalProperties": false,
        });
        let answer = writer.write(&GrammarSource::JsonSchema(schema.clone()), 3, 200);
        assert!(is_complete(&answer), "{name:?}: {:?}", answer.text());
        assert_eq!(problem(&Schema { name: name.to_owned(), schema }, &answer.text()), None);
    }
}

#[test]
fn sources_are_refused_for_what_is_wrong_with_them() {
    let Some(fixtures) = fixtures() else { return };
    let writer = Writer::new(&fixtures);
    let refuse = |source: GrammarSource| match writer.compile(&source) {
        Ok(_) => panic!("accepted: {source:?}"),
        Err(error) => error,
    };
    let schema = |schema: Value| refuse(GrammarSource::JsonSchema(schema));
    let named = |error: GrammarError, expected: &str| match error {
        GrammarError::Unsupported { keyword, .. } => assert_eq!(keyword, expected),
        other => panic!("{expected}: {other:?}"),
    };
    named(schema(json!({"not": {"type": "string"}})), "not");
    named(schema(json!({"type": "array", "uniqueItems": true})), "uniqueItems");
    named(schema(json!({"type": "string", "format": "idn-email"})), "format");
    named(schema(json!({"$ref": "https://example.com/a.json"})), "$ref");
    named(schema(json!({"oneOf": [{"type": "integer"}, {"minimum": 2}]})), "oneOf");
    named(schema(json!({"x-guidance": {"lenient": true}, "not": {}})), "x-guidance");
    named(refuse(GrammarSource::Lark("start[temperature=0.5]: /a/".to_owned())), "temperature");
    for source in [
        GrammarSource::JsonSchema(json!({"type": "strin"})),
        GrammarSource::JsonSchema(json!({"enum": []})),
        GrammarSource::JsonSchema(json!({"type": "integer", "minimum": 3, "maximum": 2})),
        GrammarSource::JsonSchema(json!("string")),
        GrammarSource::Regex("(".to_owned()),
        GrammarSource::Regex("a(?=b)".to_owned()),
        GrammarSource::Lark("start: missing".to_owned()),
        GrammarSource::Lark(String::new()),
    ] {
        let error = refuse(source.clone());
        assert!(matches!(error, GrammarError::Invalid(_)), "{source:?}: {error:?}");
    }
    let far_apart = (b'a'..=b'z').map(|letter| format!("/(.*{}.{{30}}.*)/", char::from(letter)));
    let far_apart: Vec<_> = far_apart.cycle().take(200).collect();
    let nested = (0..70).fold(json!({"type": "string"}), |inner, _| json!({"items": inner}));
    for source in [
        GrammarSource::JsonSchema(nested),
        GrammarSource::JsonSchema(json!({"const": "x".repeat(1 << 20)})),
        GrammarSource::Regex(format!("{}a{}", "(".repeat(200), ")".repeat(200))),
        GrammarSource::Lark(format!("start: {}\n", "/a{1,90}/ ".repeat(90_000))),
        GrammarSource::Lark(format!("start: R\nR: {}\n", far_apart.join(" & "))),
    ] {
        let error = refuse(source);
        assert!(matches!(error, GrammarError::TooComplex(_)), "{error:?}");
    }
}

#[test]
fn an_answer_is_the_same_alone_in_company_warm_and_after_a_cancelled_run() {
    let Some(fixtures) = fixtures() else { return };
    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "favourite_colour": {"enum": ["red", "green"]}, "age": {"type": "integer"}},
        "required": ["name", "favourite_colour", "age"],
        "additionalProperties": false,
    });
    let sources = [
        GrammarSource::JsonSchema(schema),
        GrammarSource::Regex("[a-z ]{40}".to_owned()),
        GrammarSource::JsonObject,
    ];
    let requests = |writer: &Writer| -> Vec<Request> {
        let with = |(seed, source): (u64, &GrammarSource)| {
            writer.request(&writer.compile(source).expect("compiles"), seed, 60)
        };
        (0..9).zip(sources.iter().cycle()).map(with).collect()
    };
    let mut alone = Writer::with(&fixtures, |config| config.max_running = 1);
    let expected: Vec<_> =
        requests(&alone).into_iter().map(|request| run_one(&mut alone.engine, request).ids()).collect();
    assert!(expected.iter().all(|ids| ids.len() > 5));

    let mut shared = Writer::with(&fixtures, |config| config.step_tokens = 17);
    for round in ["cold", "warm"] {
        let all = requests(&shared);
        let together: Vec<_> = run_all(&mut shared.engine, all).iter().map(Answer::ids).collect();
        assert_eq!(together, expected, "{round}");
    }
    let mut all = requests(&shared);
    let (second, first) = (all.remove(1), all.remove(0));
    let id = shared.engine.submit(second.clone()).expect("room");
    (0..8).for_each(|_| drop(shared.engine.step()));
    assert!(shared.engine.cancel(id), "in the middle of it");
    assert_eq!(run_one(&mut shared.engine, second).ids(), expected[1], "after a cancelled run");

    // With log-probabilities, forced tokens are computed one by one.
    let told = Request { logprobs: Some(2), ..first };
    let answer = run_one(&mut shared.engine, told);
    assert_eq!(answer.ids(), expected[0], "token by token");
    let logprobs: Vec<_> =
        answer.tokens().into_iter().map(|token| token.logprob.expect("asked for")).collect();
    assert!(
        logprobs.iter().any(|told| told.top.iter().all(|&(_, best)| best > told.logprob)),
        "before the mask"
    );
    assert!(matches!(answer.events.last(), Some(Event::Done(_))));
}

#[test]
#[ignore = "a measurement; with --nocapture"]
fn what_masks_cost() {
    let Some(fixtures) = fixtures() else { return };
    for (name, file) in [("llama2", "llama2/tokenizer.json"), ("qwen3", "assembled/qwen3/tokenizer.json")] {
        let json = fs::read(fixtures.join("tokenizers").join(file)).expect("readable");
        let tokenizer = Arc::new(Tokenizer::from_json(&json, &HfSettings::default()).expect("a tokenizer"));
        let compiler = GrammarCompiler::new(tokenizer.clone(), tokenizer.vocab_size(), &[2]);
        let start = Instant::now();
        compiler.compile(&GrammarSource::JsonObject).expect("compiles");
        eprintln!("{name}: {} tokens, trie and first grammar {:?}", tokenizer.vocab_size(), start.elapsed());
        let start = Instant::now();
        let grammar = compiler.compile(&GrammarSource::JsonSchema(person())).expect("compiles");
        eprintln!("  compiled in {:?}", start.elapsed());
        for seed in 1..4 {
            time_masks(&grammar, &tokenizer, seed);
        }
    }
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "format": "email"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
            "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        },
        "required": ["name", "age", "email", "tags", "zip"],
        "additionalProperties": false,
    })
}

/// Walks through an answer of tokens drawn evenly, strings kept short.
fn time_masks(grammar: &Grammar, tokenizer: &Tokenizer, mut seed: u64) {
    let start = Instant::now();
    let mut state = GrammarState::new(grammar, false);
    let begin = start.elapsed();
    let quote = tokenizer.token_to_id("\"");
    let (mut times, mut forced, mut accepting) = (Vec::new(), 0, Duration::ZERO);
    for _ in 0..400 {
        let start = Instant::now();
        let id = match state.mask().expect("a mask") {
            None => break,
            Some(TokenMask::Forced(id)) => {
                forced += 1;
                id
            }
            Some(TokenMask::Allowed(allowed)) => {
                times.push(start.elapsed());
                let mut ids = Vec::new();
                allowed.for_each(|id| ids.push(id as u32));
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let drawn = ids[(seed >> 33) as usize % ids.len()];
                quote.filter(|&id| allowed.contains(id) && seed >> 61 == 0).unwrap_or(drawn)
            }
        };
        let start = Instant::now();
        state.accept(id).expect("allowed");
        accepting += start.elapsed();
    }
    times.sort();
    let at = |part: usize| times[(times.len() * part / 100).min(times.len() - 1)];
    eprintln!(
        "  begun in {begin:?}; {} masks: mean {:?}, median {:?}, 99% {:?}, most {:?}; {forced} forced; accepted in {:?}",
        times.len(),
        times.iter().sum::<Duration>() / times.len() as u32,
        at(50),
        at(99),
        at(100),
        accepting / (times.len() + forced) as u32,
    );
}
