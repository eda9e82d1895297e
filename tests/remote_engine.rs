//! Promise: an engine elsewhere gives the answer that it would give to its own clients, in llmctl's words: what it cannot honour is
//! refused by name before it is sent, a lost engine costs nothing that was not seen yet, and what was seen is never begun anew.

mod fake;
mod own;
mod sglang;
mod vllm;

use llmctl_engine::grammar::{Grammar, GrammarSource};
use llmctl_engine::http_engine::{
    EngineUrl, HttpEngine, HttpEngineSettings, ServerSettings, WhenLost, rendezvous_order,
};
use llmctl_engine::{EngineTransport, Overflow, Started};
use llmctl_models::load::TextsAlone;

use self::fake::{Deed, FakeEngine, JSON, LENGTH, LOGPROBS, REGEX, STOP};

use crate::common::prelude::*;

/// The folder whose texts the recorded model had.
fn texts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/qwen3")
}

/// The tokens of the recorded greedy answer to [5, 6, 7].
const GREEDY: [u32; 8] = [383, 84, 282, 282, 282, 282, 282, 282];

fn settings(urls: &[&EngineUrl], when_lost: WhenLost) -> HttpEngineSettings {
    let TextsAlone { texts, architecture, vocab_size, context_length } =
        TextsAlone::open(&ModelSource::Folder(texts())).expect("texts");
    HttpEngineSettings {
        urls: urls.iter().map(|url| (*url).clone()).collect(),
        connection: ServerSettings::default(),
        model: "tiny".to_owned(),
        architecture,
        tokenizer: texts.tokenizer,
        vocab_size,
        context_tokens: None,
        most_context_tokens: context_length,
        ends: texts.end_of_generation,
        max_running: 4,
        max_waiting: 4,
        max_sessions: 4,
        salts_cache: false,
        when_lost,
    }
}

fn connect(fakes: &[&FakeEngine]) -> EngineClient {
    let urls: Vec<&EngineUrl> = fakes.iter().map(|fake| &fake.url).collect();
    EngineClient::new(HttpEngine::connect(settings(&urls, WhenLost::Stay)).expect("an engine"))
}

fn request(max_tokens: usize) -> Request {
    let limits = Limits { max_tokens: Some(max_tokens), ..Limits::default() };
    Request { prompt: vec![5, 6, 7], limits, ..Request::default() }
}

fn grammar(engine: &EngineClient, source: &GrammarSource) -> Grammar {
    let tokenizer = settings(&[], WhenLost::Stay).tokenizer;
    engine.spec().grammar_compiler(tokenizer).compile(source).expect("a grammar")
}

/// What came of a request.
#[derive(Debug, Default)]
struct Seen {
    started: Option<Started>,
    text: String,
    tokens: Vec<Token>,
    outcome: Option<Outcome>,
    error: Option<Error>,
}

impl Seen {
    fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    fn outcome(&self) -> &Outcome {
        self.outcome.as_ref().unwrap_or_else(|| panic!("{:?}", self.error))
    }

    fn error(&self) -> String {
        self.error.as_ref().map(ToString::to_string).unwrap_or_default()
    }
}

fn ask(engine: &EngineClient, request: Request) -> Seen {
    let mut seen = Seen::default();
    for event in engine.submit(request).expect("valid") {
        match event {
            Event::Started(started) => seen.started = Some(started),
            Event::Text { text, tokens } => {
                seen.text.push_str(&text);
                seen.tokens.extend(tokens);
            }
            Event::Done(outcome) => seen.outcome = Some(outcome),
            Event::Failed(error) => seen.error = Some(error),
            _ => {}
        }
    }
    seen
}

#[test]
fn an_answer_has_the_engines_tokens_and_what_it_reports() {
    let fake = FakeEngine::start([Deed::Stream(LENGTH)]);
    let engine = connect(&[&fake]);
    assert_eq!(engine.spec().context_length(), 512, "max_model_len, which is less than the model's own");
    let facts = engine.remote().expect("remote");
    assert!(facts.engines[0].starts_with("vLLM 0.32.0 at http://127.0.0.1:"), "{facts:?}");
    let seen = ask(&engine, request(8));
    assert_eq!(seen.ids()[..2], GREEDY[..2]);
    assert_eq!(seen.tokens.len(), 8);
    let outcome = seen.outcome();
    assert_eq!(outcome.finish, Finish::MaxTokens);
    assert_eq!((outcome.usage.prompt_tokens, outcome.usage.completion_tokens), (3, 8));
    assert!(outcome.usage.remote.is_some_and(|remote| remote.reports_cached), "{outcome:?}");
    assert_eq!(seen.started.expect("started").reuse.reason, ReuseReason::RemoteEngine);
    let asked = &fake.asked()[0];
    assert_eq!(asked["prompt"], json!([5, 6, 7]));
    // Every parameter, because the engine has defaults of its own.
    for (name, value) in [
        ("temperature", json!(0.0)),
        ("top_p", json!(1.0)),
        ("min_p", json!(0.0)),
        ("top_k", json!(0)),
        ("repetition_penalty", json!(1.0)),
        ("max_tokens", json!(8)),
        ("return_token_ids", json!(true)),
        ("skip_special_tokens", json!(false)),
        ("ignore_eos", json!(false)),
    ] {
        assert_eq!(asked[name], value, "{name}");
    }
    assert!(asked["stop_token_ids"].as_array().is_some_and(|ids| ids.contains(&json!(1))), "{asked}");
    assert!(asked.get("typical_p").is_none() && asked.get("seed").is_none(), "{asked}");
}

#[test]
fn sampling_is_sent_as_it_was_given() {
    let fake = FakeEngine::start([Deed::Stream(LENGTH)]);
    let engine = connect(&[&fake]);
    let sampling = Sampling {
        temperature: 0.7,
        top_p: 0.9,
        top_k: Some(20),
        seed: Some(7),
        logit_bias: [(9, -1.5)].into(),
        ..Sampling::default()
    };
    ask(&engine, Request { sampling, ..request(8) });
    let asked = &fake.asked()[0];
    assert_eq!(
        (&asked["temperature"], &asked["top_p"], &asked["top_k"], &asked["seed"], &asked["logit_bias"]),
        (&json!(0.7), &json!(0.9), &json!(20), &json!(7), &json!({"9": -1.5}))
    );
}

#[test]
fn log_probabilities_are_those_of_the_tokens() {
    let fake = FakeEngine::start([Deed::Stream(LOGPROBS)]);
    let seen = ask(&connect(&[&fake]), Request { logprobs: Some(2), ..request(8) });
    let first = seen.tokens[0].logprob.as_ref().expect("asked for");
    assert_eq!(first.logprob, -0.627_608_66);
    assert_eq!(first.top, [(383, -0.627_608_66), (19, -1.805_900_9)]);
    assert_eq!(fake.asked()[0]["return_tokens_as_token_ids"], true);
}

#[test]
fn ends_are_the_engines_or_llmctls_own() {
    let fake = FakeEngine::start([Deed::Stream(STOP), Deed::Wait(LENGTH, 3), Deed::Stream(LENGTH)]);
    let engine = connect(&[&fake]);
    let limits = Limits { stop_ids: vec![84], max_tokens: Some(8), ..Limits::default() };
    let seen = ask(&engine, Request { limits, ..request(8) });
    assert_eq!((seen.ids(), &seen.outcome().finish), (vec![383], &Finish::Eos(84)));
    // A stop string is found here, and the engine learns of it by the closed connection.
    let limits = Limits { stop: vec![" p".to_owned()], max_tokens: Some(8), ..Limits::default() };
    let seen = ask(&engine, Request { limits, ..request(8) });
    assert_eq!((seen.text.as_str(), &seen.outcome().finish), (" ofl", &Finish::StopString(" p".to_owned())));
    fake.wait_for_closed(1);
    // The context's own limit is not the request's.
    let limits = Limits { overflow: Overflow::Clamp, max_tokens: Some(600), ..Limits::default() };
    let seen = ask(&engine, Request { limits, ..request(8) });
    assert_eq!(seen.outcome().finish, Finish::ContextFull);
    assert_eq!(fake.asked()[2]["max_tokens"], 509);
}

#[test]
fn a_token_that_the_vocabulary_lacks_is_refused_and_not_delivered() {
    let stream = LENGTH.replacen(&format!("\"token_ids\":[{}]", GREEDY[1]), "\"token_ids\":[2147483647]", 1);
    assert_ne!(stream, LENGTH);
    let fake = FakeEngine::start([Deed::Stream(stream.leak())]);
    let seen = ask(&connect(&[&fake]), request(8));
    assert_eq!(seen.ids(), GREEDY[..1]);
    assert!(seen.error().contains("answer has token 2147483647, and there are"), "{}", seen.error());
}

#[test]
fn a_reader_that_goes_ends_the_engines_work() {
    let fake = FakeEngine::start([Deed::Wait(LENGTH, 2), Deed::Wait(LENGTH, 2)]);
    let engine = connect(&[&fake]);
    let mut events = engine.submit(request(8)).expect("valid");
    let first = events.find(|event| matches!(event, Event::Text { .. }));
    assert!(first.is_some());
    drop(events);
    fake.wait_for_closed(1);
    let mut events = engine.submit(request(8)).expect("valid");
    events.find(|event| matches!(event, Event::Text { .. }));
    engine.cancel_all().expect("alive");
    let last = events.last().expect("an end");
    assert!(matches!(&last, Event::Done(outcome) if outcome.finish == Finish::Cancelled), "{last:?}");
    fake.wait_for_closed(2);
    assert_eq!(engine.load().expect("alive").num_running, 0);
}

#[test]
fn what_vllm_cannot_honour_is_refused_by_name_before_it_is_asked() {
    let fake = FakeEngine::start([]);
    let engine = connect(&[&fake]);
    let with = |change: &dyn Fn(&mut Request)| {
        let mut request = request(8);
        request.sampling.temperature = 0.5;
        change(&mut request);
        ask(&engine, request).error()
    };
    for (name, error) in [
        ("typical_p", with(&|request| request.sampling.typical_p = 0.5)),
        ("top_n_sigma", with(&|request| request.sampling.top_n_sigma = 1.0)),
        ("temperature", with(&|request| request.sampling.temperature = 0.005)),
        ("seed", with(&|request| request.sampling.seed = Some(u64::MAX))),
        ("prompt_logprobs", with(&|request| request.prompt_logprobs = Some(1))),
        ("min_p", with(&|request| (request.sampling.min_p, request.sampling.top_p) = (0.1, 0.9))),
        (
            "logprobs",
            with(&|request| {
                request.logprobs = Some(1);
                request.sampling.repetition_penalty = 1.5;
            }),
        ),
    ] {
        assert!(error.starts_with(&format!("{name}: vLLM ")), "{name}: {error:?}");
    }
    assert_eq!(fake.asked().len(), 0);
    // They change no greedy answer.
    let mut greedy = request(8);
    (greedy.sampling.typical_p, greedy.sampling.min_p) = (0.5, 0.1);
    assert_eq!(ask(&engine, greedy).outcome().finish, Finish::MaxTokens);
}

#[test]
fn constraints_are_compiled_there_by_the_same_library_or_refused() {
    let lark = GrammarSource::Lark("start: \"ab\" | \"cd\"\n".to_owned());
    let schema = GrammarSource::JsonSchema(json!({"enum": ["yes", "no"]}));
    let regex = GrammarSource::Regex("(ab|cd){2}".to_owned());
    // The first request of each asks whether the library is there.
    let fake = FakeEngine::start([
        Deed::Stream("{}"),
        Deed::Stream(JSON),
        Deed::Stream(REGEX),
        Deed::Stream(LENGTH),
    ]);
    let engine = connect(&[&fake]);
    let seen = ask(&engine, Request { grammar: Some(grammar(&engine, &schema)), ..request(60) });
    assert_eq!((seen.text.as_str(), &seen.outcome().finish), ("\"yes\"", &Finish::Eos(1)));
    let seen = ask(&engine, Request { grammar: Some(grammar(&engine, &regex)), ..request(60) });
    assert!(matches!(seen.outcome().finish, Finish::Eos(1) | Finish::Complete), "{seen:?}");
    let seen = ask(&engine, Request { grammar: Some(grammar(&engine, &regex)), ..request(8) });
    assert!(seen.error().contains("does not keep to the constraint"), "{seen:?}");
    let asked = fake.asked();
    let sent =
        |nth: usize| asked[nth]["structured_outputs"]["grammar"].as_str().unwrap_or_default().to_owned();
    assert!(sent(1).starts_with("%llguidance {}\nstart: %json {"), "{}", sent(1));
    assert_eq!(sent(2), "%llguidance {}\nstart: /(ab|cd){2}/\n");
    // Another library takes JSON Schema and regular expressions, and no Lark.
    let refusal = r#"{"error":{"message":"Invalid grammar specification."}}"#;
    let fake = FakeEngine::start([Deed::Refuse(400, refusal), Deed::Stream(JSON)]);
    let engine = connect(&[&fake]);
    let seen = ask(&engine, Request { grammar: Some(grammar(&engine, &lark)), ..request(60) });
    assert!(seen.error().starts_with("grammar: this vLLM does not take"), "{seen:?}");
    ask(&engine, Request { grammar: Some(grammar(&engine, &schema)), ..request(60) });
    assert_eq!(fake.asked()[1]["structured_outputs"], json!({"json": {"enum": ["yes", "no"]}}));
}

#[test]
fn a_lost_engine_is_replaced_while_nothing_was_seen_of_its_answer() {
    for broken in [0, 1] {
        let deed = |nth| if nth == broken { Deed::Break(LENGTH, 0) } else { Deed::Stream(LENGTH) };
        let fakes = [0, 1].map(|nth| FakeEngine::start([deed(nth)]));
        let engine = connect(&[&fakes[0], &fakes[1]]);
        let mut names = (0..100).map(|n| format!("session-{n}"));
        let first_there =
            names.find(|name| rendezvous_order(name, 2)[0] == broken).expect("one of a hundred");
        let seen = ask(&engine, Request { session: Some(named(&first_there)), ..request(8) });
        assert_eq!(seen.tokens.len(), 8, "{seen:?}");
        let notices = engine.take_notices().expect("alive");
        assert_eq!(notices.len(), 1, "{notices:?}");
        let notice = notices[0].to_string();
        assert!(notice.starts_with(&format!("{}: ", fakes[broken].url)), "{notice}");
        assert!(notice.ends_with(&format!("; the request goes to {}", fakes[1 - broken].url)), "{notice}");
    }
}

#[test]
fn an_answer_that_was_seen_is_not_begun_anew() {
    let fakes = [FakeEngine::start([Deed::Break(LENGTH, 2)]), FakeEngine::start([Deed::Break(LENGTH, 2)])];
    let engine = connect(&[&fakes[0], &fakes[1]]);
    let seen = ask(&engine, request(8));
    assert_eq!(seen.ids(), GREEDY[..2]);
    assert!(matches!(seen.error, Some(Error::RemoteLost(_))), "{seen:?}");
    assert!(
        seen.error().contains(&fakes[0].url.to_string()) || seen.error().contains(&fakes[1].url.to_string())
    );
    assert_eq!(fakes[0].asked().len() + fakes[1].asked().len(), 1);
}

#[test]
fn a_session_keeps_to_one_engine_and_others_go_to_the_idle_one() {
    let fakes = [FakeEngine::start([]), FakeEngine::start([])];
    let engine = connect(&[&fakes[0], &fakes[1]]);
    for _ in 0..4 {
        ask(&engine, Request { session: Some(named("trip")), ..request(8) });
    }
    let counts = fakes.each_ref().map(|fake| fake.asked().len());
    assert!(counts == [4, 0] || counts == [0, 4], "{counts:?}");
    let seen = engine.inspect_session(&named("trip")).expect("known");
    assert_eq!((seen.tokens.len(), seen.info.num_resident), (11, 0), "the KV is elsewhere");
    let again = ask(&engine, Request { session: Some(named("trip")), prompt: vec![5, 6, 9], ..request(8) });
    assert_eq!(again.started.and_then(|started| started.reuse.first_difference), Some(2));
}

#[test]
fn a_server_learns_that_its_engine_is_lost_and_why() {
    let fake = FakeEngine::start([]);
    let engine = HttpEngine::connect(settings(&[&fake.url], WhenLost::End)).expect("an engine");
    let spec = engine.spec().clone();
    let engine = EngineClient::new(engine);
    assert!(engine.is_alive() && engine.take_notices().is_ok());
    fake.kill();
    let seen = ask(&engine, request(8));
    assert!(matches!(seen.error, Some(Error::RemoteLost(_))), "{seen:?}");
    assert!(!engine.is_alive() && matches!(engine.take_notices(), Err(Error::EngineGone)));
    assert!(engine.exit_reason().is_some_and(|why| why.contains("connection")), "{:?}", engine.exit_reason());
    let absent = HttpEngine::connect_as(settings(&[&fake.url], WhenLost::End), &spec).expect("a thread");
    assert!(!absent.is_alive());
    fake.revive();
    let back = HttpEngine::connect_as(settings(&[&fake.url], WhenLost::End), &spec).expect("a thread");
    assert_eq!(ask(&EngineClient::new(back), request(8)).tokens.len(), 8);
}

#[test]
fn requests_beyond_the_limit_wait_and_a_deadline_ends_them() {
    let fake = FakeEngine::start([Deed::Wait(LENGTH, 2), Deed::Stream(LENGTH)]);
    let settings =
        HttpEngineSettings { max_running: 1, max_waiting: 1, ..settings(&[&fake.url], WhenLost::Stay) };
    let engine = EngineClient::new(HttpEngine::connect(settings).expect("an engine"));
    let mut first = engine.submit(request(8)).expect("valid");
    first.find(|event| matches!(event, Event::Text { .. }));
    let mut second = engine.submit(request(8)).expect("valid");
    assert!(matches!(second.next(), Some(Event::Queued { position: 1 })));
    assert!(matches!(ask(&engine, request(8)).error, Some(Error::QueueFull { waiting: 1 })));
    drop(first);
    assert!(matches!(second.last(), Some(Event::Done(outcome)) if outcome.finish == Finish::MaxTokens));
    let fake = FakeEngine::start([Deed::Wait(LENGTH, 2)]);
    let engine = connect(&[&fake]);
    let limits = Limits { deadline: Some(Duration::from_millis(300)), ..request(8).limits };
    assert_eq!(ask(&engine, Request { limits, ..request(8) }).outcome().finish, Finish::Deadline);
}

#[test]
fn engines_that_are_not_meant_are_refused() {
    let refusal = |models: &str| {
        let fake = FakeEngine::with_models(models, []);
        let refused = HttpEngine::connect(settings(&[&fake.url], WhenLost::Stay));
        refused.err().map(|error| error.to_string()).unwrap_or_default()
    };
    let other = r#"{"data":[{"id":"x","owned_by":"ollama"}]}"#;
    assert!(refusal(other).contains("neither vLLM nor SGLang nor llmctl"), "{}", refusal(other));
    assert!(refusal("{}").contains("lists no models"));
    let fake = FakeEngine::start([]);
    let mut foreign = settings(&[&fake.url], WhenLost::Stay);
    let guide = ModelSource::BuiltIn(&llmctl_hub::builtin::GUIDE);
    foreign.tokenizer = TextsAlone::open(&guide).expect("texts").texts.tokenizer;
    let error = HttpEngine::connect(foreign).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("has another tokenizer"), "{error}");
}

#[test]
fn run_answers_from_an_engine_elsewhere_without_weights_here() {
    let fake = FakeEngine::start([]);
    let place = Place::new();
    let folder = place.path("tiny");
    std::fs::create_dir(&folder).expect("a folder");
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(texts().join(name), folder.join(name)).expect("a copy");
    }
    let url = fake.url.to_string();
    let args =
        ["run", "--engine", &url, "--model", "./tiny", "--max-tokens", "8", "--output", "json", "Hello"];
    let run = place.run(&args);
    run.check(0, "answers come from vLLM 0.32.0 at http://127.0.0.1:");
    let said: Value = serde_json::from_str(&run.stdout).expect("JSON");
    assert_eq!(said["usage"]["completion_tokens"], 8);
    assert_eq!(said["reuse"]["reason"], "remote_engine");
    assert_eq!(said["reuse"]["cached_tokens"], said["usage"]["cached_tokens"]);
    assert_eq!(said["usage"]["engine"]["same_bits"], false);
    for (args, expected) in [
        (vec!["--dtype", "f32"], "--dtype: the remote engine"),
        (vec!["--typical-p", "0.5", "--temperature", "1"], "--typical-p: vLLM has no such parameter"),
    ] {
        let all = [&["run", "--engine", &url, "--model", "./tiny", "Hello"][..], &args].concat();
        place.run(&all).check(2, expected);
    }
}
