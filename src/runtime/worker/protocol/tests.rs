//! Every value that is written is read back the same, and every wrong line is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use proptest::prelude::*;
use serde_json::json;

use super::line::read_line_within;
use super::*;
use crate::grammar::{Grammar, GrammarSource};
use crate::request::{
    Difference, DraftStop, Event, ImageDifference, ImageUsage, Limits, LoopGuard, ModelDrafter, Outcome,
    Overflow, PromptImage, ReasoningLimit, Request, Reuse, Timings, Usage,
};
use crate::session::SessionState;
use llmctl_base::error::{GrammarError, LoadError, StoreError};
use llmctl_base::{SAMPLING, SamplerStep, Sampling, SamplingNumbers};
use llmctl_image::{ImageFile, ImageHash, ImageLimits};
use llmctl_models::adapters::{AdapterKey, AdapterUse};
use llmctl_models::images::{ImageKey, ImageSpan};
use llmctl_template::TemplateError;

fn line(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_line(&mut bytes, value).expect("a Vec takes all");
    assert_eq!(bytes.iter().filter(|&&byte| byte == b'\n').count(), 1);
    assert_eq!(bytes.pop(), Some(b'\n'));
    bytes
}

fn named(name: &str) -> EngineSessionName {
    EngineSessionName::parse(name).expect("not empty")
}

fn no_text(text: &str, _: bool) -> Result<Vec<u32>> {
    panic!("{text:?} should be ids")
}

fn no_grammar(_: &GrammarSource) -> Result<Grammar> {
    panic!("there is none")
}

/// Returns the request after a round trip.
fn sent(request: &Request) -> Request {
    let call = WorkerCall { id: Some(Id::Number(7)), op: Op::Generate(Box::new(request.into())) };
    let read_back = WorkerCall::parse(&line(&call)).expect("a call");
    assert_eq!(read_back, call);
    let Op::Generate(generate) = read_back.op else { panic!("{read_back:?}") };
    assert!(!generate.is_work() && generate.events);
    generate.into_request(no_text, no_grammar, Vec::new()).expect("a request")
}

/// The line is one of those that a definition of the schema describes.
#[track_caller]
fn assert_described(definition: &str, line: &[u8]) {
    let line = serde_json::from_slice(line).expect("JSON");
    let mut schema = schema();
    schema["$ref"] = json!(format!("#/$defs/{definition}"));
    schema.as_object_mut().expect("an object").remove("anyOf");
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    assert!(validator.is_valid(&line), "{definition}: {line}");
}

fn schema() -> Value {
    serde_json::from_str(include_str!("../../../../docs/worker-protocol.schema.json")).expect("JSON")
}

fn assert_same(request: &Request) {
    let call = WorkerCall { id: Some(Id::Number(7)), op: Op::Generate(Box::new(request.into())) };
    assert_described("request", &line(&call));
    assert_eq!(format!("{:?}", sent(request)), format!("{request:?}"));
}

#[test]
fn a_request_comes_out_as_it_went_in() {
    assert_same(&Request { prompt: vec![1, 2, 3], ..Request::default() });
    assert_same(&Request {
        images: Vec::new(),
        prompt: (0..5000).collect(),
        sampling: Sampling {
            temperature: 0.7,
            top_k: Some(40),
            top_p: 0.95,
            min_p: 0.05,
            repetition_penalty: 1.1,
            presence_penalty: -0.3,
            frequency_penalty: 1.9,
            repeat_last_n: 64.0,
            typical_p: 0.9,
            top_n_sigma: 1.5,
            dry_multiplier: 0.8,
            dry_base: 1.5,
            dry_allowed_length: 3.0,
            dry_penalty_last_n: 256.0,
            xtc_probability: 0.5,
            xtc_threshold: 0.2,
            dynatemp_range: 0.3,
            dynatemp_exponent: 2.0,
            mirostat: 2.0,
            mirostat_tau: 4.0,
            mirostat_eta: 0.2,
            samplers: Some(vec![SamplerStep::Dry, SamplerStep::TypicalP, SamplerStep::Temperature]),
            dry_sequence_breakers: Some(vec!["\n".to_owned(), "user:".to_owned()]),
            logit_bias: BTreeMap::from([(0, -100.0), (383, 0.1)]),
            seed: Some(0),
        },
        limits: Limits {
            max_tokens: Some(1),
            overflow: Overflow::Clamp,
            stop: vec!["\n\n".to_owned(), "\u{2028}\"\\\u{1}".to_owned()],
            stop_ids: vec![7],
            ignore_eos: true,
            deadline: Some(Duration::from_nanos(1_234_567_891)),
            loop_guard: LoopGuard { reasoning: None, answer: Some(16) },
        },
        logprobs: Some(0),
        prompt_logprobs: Some(3),
        render_special: true,
        markup: vec![5, 6].into(),
        grammar: None,
        reasoning: Some(ReasoningLimit {
            max_tokens: Some(9),
            open: Some("<think>".to_owned()),
            close: "</think>".to_owned(),
            closing: vec![7, 8],
        }),
        prediction: vec![3, 1, 2],
        adapters: Some(vec![AdapterUse { key: AdapterKey([3; 32]), scale: -0.25 }]),
        session: Some(named("a b/\u{1F600}")),
    });
    let seeded = Sampling { seed: Some(u64::MAX), ..Sampling::default() };
    assert_same(&Request { sampling: seeded, ..Request::default() });
}

/// All fields are named, so that a new one cannot be left out here, nor in the schema.
#[test]
fn the_schema_has_each_field_of_a_generation() {
    let mut numbers = SamplingNumbers::default();
    SAMPLING
        .iter()
        .for_each(|number| number.give(&mut numbers, Some(if number.facts.is_whole { 1.0 } else { 0.5 })));
    let generate = Generate {
        prompt: Some("a".to_owned()),
        prompt_segments: Some(vec![PromptSegment { text: Some("a".to_owned()), ids: Some(vec![1]) }]),
        images: vec![WorkerImage {
            spans: vec![ImageSpan { rows: 0..1, key: ImageKey([7; 32]), first: 0, grid: [1, 1] }],
            key: ImageKey([7; 32]),
            sha256: "0".repeat(64),
        }],
        adapters: Some(vec![AdapterUse { key: AdapterKey([7; 32]), scale: 0.5 }]),
        max_new_tokens: 9,
        overflow: Overflow::Refuse,
        top_k: 5,
        numbers,
        logit_bias: BTreeMap::from([(3, 1.5)]),
        samplers: Some(SamplerStep::NAMES.map(|(_, step)| step).to_vec()),
        dry_sequence_breakers: Some(vec!["x".to_owned()]),
        seed: 3,
        exact_seed: Some(0),
        stop: vec!["x".to_owned()],
        session_id: Some(named("s")),
        ignore_eos: true,
        render_special: true,
        markup: vec![5],
        logprobs: Some(2),
        prompt_logprobs: Some(3),
        prompt_only: true,
        stop_ids: vec![7],
        grammar: Some(GrammarSource::JsonObject),
        reasoning: Some(ReasoningLimit {
            max_tokens: Some(1),
            closing: vec![4],
            ..ReasoningLimit::default()
        }),
        prediction: vec![1],
        deadline_ms: Some(2.5),
        loop_guard: LoopGuard::OFF,
        events: true,
    };
    let call = WorkerCall { id: Some(Id::Number(1)), op: Op::Generate(Box::new(generate.clone())) };
    let keys = |object: &Value| -> BTreeSet<String> {
        object.as_object().expect("an object").keys().cloned().collect()
    };
    let written = serde_json::to_value(&call).expect("JSON");
    assert_eq!(keys(&written), keys(&schema()["$defs"]["generate"]["properties"]));
    let one_prompt = Generate { prompt: None, ..generate };
    assert_described("generate", &line(&WorkerCall { id: None, op: Op::Generate(Box::new(one_prompt)) }));
}

#[test]
fn the_schema_has_each_reason_and_each_code() {
    let listed = |pointer: &str| schema().pointer(pointer).unwrap_or_else(|| panic!("{pointer}")).clone();
    let reasons = listed("/$defs/done/properties/session_reset_reason/enum");
    assert_eq!(listed("/$defs/started/properties/reuse/properties/reason/enum"), reasons);
    let is_known = |name: &Value| serde_json::from_value::<ReuseReason>(name.clone()).is_ok();
    assert!(reasons.as_array().expect("a list").iter().all(is_known), "{reasons}");
    // The derived reader lists all names when it meets another.
    let all = serde_json::from_str::<ReuseReason>("\"?\"").expect_err("no reason").to_string();
    assert_eq!(all.matches('`').count() / 2 - 1, reasons.as_array().expect("a list").len(), "{all}");
    let codes = listed("/$defs/error/properties/code/enum");
    let all = serde_json::from_str::<ErrorCode>("\"?\"").expect_err("no code").to_string();
    assert_eq!(all.matches('`').count() / 2 - 1, codes.as_array().expect("a list").len(), "{all}");
}

#[test]
fn a_grammar_travels_as_its_source() {
    let schema = json!({"type": "object", "properties": {"a": {"const": 1.5}, "7": true}});
    for source in [
        GrammarSource::JsonObject,
        GrammarSource::JsonSchema(schema),
        GrammarSource::JsonSchema(json!(true)),
        GrammarSource::Regex("[a-z]+\n".to_owned()),
        GrammarSource::Lark("start: \"x\"".to_owned()),
        GrammarSource::Gbnf("root ::= \"x\"".to_owned()),
    ] {
        let generate = Generate { grammar: Some(source.clone()), ..Generate::default() };
        let call = WorkerCall { id: None, op: Op::Generate(Box::new(generate)) };
        assert_eq!(WorkerCall::parse(&line(&call)).expect("a call"), call);
        let Ok(WorkerCall { op: Op::Generate(generate), .. }) = WorkerCall::parse(&line(&call)) else {
            panic!()
        };
        assert!(generate.is_work());
        assert_eq!(generate.grammar, Some(source));
    }
}

proptest! {
    #[test]
    fn numbers_keep_their_bits(bits in any::<u32>(), nanos in 0_u64..86_400_000_000_000, seed in any::<u64>()) {
        let number = f32::from_bits(bits);
        prop_assume!(number.is_finite());
        let sampling = Sampling { temperature: number, seed: Some(seed), ..Sampling::default() };
        let limits = Limits { deadline: Some(Duration::from_nanos(nanos)), ..Limits::default() };
        let request = Request { sampling, limits, ..Request::default() };
        let read_back = sent(&request);
        prop_assert_eq!(read_back.sampling.temperature.to_bits(), bits);
        prop_assert_eq!(read_back.limits, request.limits);
        prop_assert_eq!(read_back.sampling.seed, Some(seed));
        let logprob = -number.abs();
        let token = Token { id: 1, logprob: Some(Logprob { logprob, top: vec![(2, logprob)] }) };
        prop_assert_eq!(round_trip(Event::Text { text: String::new(), tokens: vec![token.clone()] }),
            format!("{:?}", Event::Text { text: String::new(), tokens: vec![token] }));
    }
}

/// Returns an event as it is at the other end.
fn round_trip(event: Event) -> String {
    let answer = EventEncoder::new(Detail::Events).encode(event).expect("all are told");
    let reply = Reply { id: Some(Id::Text("x".to_owned())), answer };
    assert_described("reply", &line(&reply));
    let read_back = Reply::parse(&line(&reply)).expect("a reply");
    assert_eq!(read_back.id, reply.id);
    format!("{:?}", read_back.answer.into_event().expect("an event"))
}

fn outcome(finish: Finish) -> Outcome {
    Outcome {
        finish,
        usage: Usage {
            prompt_tokens: 10,
            cached_tokens: 4,
            completion_tokens: 3,
            drafted_tokens: 7,
            accepted_tokens: 2,
            draft_model: Some(DraftModelUsage {
                drafter: ModelDrafter::PredictionBlock,
                drafted_tokens: 4,
                accepted_tokens: 1,
                stop: Some(DraftStop::Context),
            }),
            looped_reasoning: true,
            images: ImageUsage { encoded: 1, found: 2 },
            remote: None,
        },
        timings: Timings {
            queue: Duration::ZERO,
            encode: Duration::from_nanos(77),
            prefill: Duration::from_nanos(1),
            decode: Duration::from_secs(86_400),
            time_to_first_token: Some(Duration::from_micros(333)),
            total: Duration::from_nanos(123_456_789_012),
        },
        seed: u64::MAX,
        adapters: vec![AdapterUse { key: AdapterKey([7; 32]), scale: 0.5 }],
    }
}

#[test]
fn events_come_out_as_they_went_in() {
    let reuse = Reuse {
        cached_tokens: 1,
        restored_tokens: 1,
        reason: ReuseReason::Restored,
        first_difference: Some(9),
    };
    let difference =
        Difference { position: 9, before: vec![1], session: vec![], prompt: vec![2, 3], image: None };
    let image = Some(ImageDifference { index: 1, in_session: true, in_prompt: false });
    let at_image = Difference { image, ..difference.clone() };
    let started =
        Started { prompt_tokens: 10, max_tokens: 5, seed: u64::MAX, reuse, difference: Some(difference) };
    let parted = Started { difference: Some(at_image), ..started.clone() };
    let plain = Started { reuse: Reuse::default(), difference: None, ..started.clone() };
    let ruled_out = Logprob { logprob: f32::NEG_INFINITY, top: vec![] };
    let tokens = vec![Token { id: 3, logprob: Some(ruled_out) }, Token { id: 4, logprob: None }];
    let mut events = vec![
        Event::Queued { position: 3 },
        Event::Started(started),
        Event::Started(parted),
        Event::Started(plain),
        Event::Encoding { done: 5, total: 10 },
        Event::Prefill { done: 5, total: 10 },
        Event::Prompt { logprobs: vec![Logprob { logprob: -1.5, top: vec![(4, -0.25)] }] },
        Event::Text { text: "\"\n\u{0}\u{fffd}é".to_owned(), tokens },
        Event::Text { text: String::new(), tokens: Vec::new() },
        Event::Failed(Error::Poisoned),
    ];
    let finishes = [
        Finish::Eos(2),
        Finish::Complete,
        Finish::StopString("\n".to_owned()),
        Finish::MaxTokens,
        Finish::ContextFull,
        Finish::Cancelled,
        Finish::Deadline,
        Finish::Repetition,
    ];
    events.extend(finishes.map(outcome).map(Event::Done));
    let unstarted = Timings { time_to_first_token: None, ..Timings::default() };
    events.push(Event::Done(Outcome { timings: unstarted, ..outcome(Finish::Cancelled) }));
    for event in events {
        assert_eq!(round_trip(event.clone()), format!("{event:?}"));
    }
}

#[test]
fn errors_come_out_as_they_went_in() {
    let path = PathBuf::from("/a b/c");
    let message = "m \"x\"".to_owned();
    let (keyword, what, name) = (message.clone(), message.clone(), message.clone());
    let known = vec!["a".to_owned()];
    let errors = vec![
        Error::PromptEmpty,
        Error::PromptTooLong { prompt_tokens: 1, context_tokens: 2 },
        Error::PromptOversized { least_tokens: 1, context_tokens: 2 },
        Error::ContextExceeded { prompt_tokens: 1, max_tokens: 2, context_tokens: 3 },
        Error::InvalidParameter { name: "top_p", message: message.clone() },
        Error::NotSupported("forking a session"),
        Error::InvalidState("no pending token"),
        Error::NotFinite("NaN"),
        Error::Poisoned,
        Error::SessionBusy(name.clone()),
        Error::SessionsFull { capacity: 0 },
        Error::QueueFull { waiting: 9 },
        Error::ImagesBusy { most_bytes: 9 },
        Error::DeadlineExceeded { deadline: Duration::from_nanos(17) },
        Error::SessionNotFound(name.clone()),
        LoadError::NotFound(path.clone()).into(),
        LoadError::TooBig { needed: 9, available: 5, context: 4, largest_context: None }.into(),
        LoadError::UnknownArchitecture { name, known, nearest: Some("b".to_owned()) }.into(),
        LoadError::Malformed { path: path.clone(), what, message: message.clone() }.into(),
        TemplateError::Missing.into(),
        TemplateError::Syntax { line: 3, message: message.clone() }.into(),
        StoreError::Damaged { path, line: 3, message: message.clone() }.into(),
        GrammarError::Unsupported { keyword, message: message.clone() }.into(),
        GrammarError::Invalid(message.clone()).into(),
        Error::Backend(message),
        Error::EngineGone,
    ];
    for error in errors {
        let reply = Reply { id: None, answer: ReplyBody::Error(ErrorLine::new(&error, true)) };
        let ReplyBody::Error(read_back) = Reply::parse(&line(&reply)).expect("a reply").answer else {
            panic!()
        };
        assert_eq!(read_back.code, Some(ErrorCode::of(&error)));
        assert_eq!(read_back.error, error.to_string());
        assert_eq!(format!("{:?}", read_back.into_error()), format!("{error:?}"));
    }
    let foreign = ErrorLine {
        error: "hm".to_owned(),
        code: None,
        detail: Some(json!({"type": "new"})),
        session_id: None,
    };
    assert!(matches!(foreign.into_error(), Error::Backend(message) if message == "hm"));
}

#[test]
fn every_answer_is_told_from_the_others() {
    let info = SessionInfo { name: named("s"), state: SessionState::Waiting, num_tokens: 2, num_resident: 0 };
    let session_id = named("s");
    let load = EngineLoad {
        num_waiting: 1,
        num_running: 2,
        num_sessions: 3,
        kv_free: 4,
        kv_capacity: usize::MAX,
        kv_allocated: 6,
        warm_prompts: 7,
        warm_bytes: 8,
        warm_hits: 9,
    };
    let answers = vec![
        ReplyBody::Opened { opened: Yes, session_id: session_id.clone(), existed: Some(false) },
        ReplyBody::Closed { closed: Yes, session_id: session_id.clone(), existed: None },
        ReplyBody::Reset { reset: Yes, session_id: session_id.clone(), existed: Some(true) },
        ReplyBody::Forked { forked: Yes, session_id: session_id.clone(), to: named("t") },
        ReplyBody::Restored { restored: Yes, session_id },
        ReplyBody::Session { session: SessionDetail { info: info.clone(), tokens: vec![1, 2] } },
        ReplyBody::Sessions { sessions: vec![info] },
        ReplyBody::Sessions { sessions: vec![] },
        ReplyBody::Cancelled { cancelled: 0 },
        ReplyBody::Pong { pong: Yes, load },
        ReplyBody::Stored { stored: Yes, sha256: "0".repeat(64) },
        ReplyBody::Notices { notices: vec!["n".to_owned()] },
        ReplyBody::Flushed { flushed: false },
        ReplyBody::Bye { bye: Yes },
    ];
    for answer in answers {
        for id in [None, Some(Id::Number(i64::MIN)), Some(Id::Text(String::new()))] {
            let reply = Reply { id, answer: answer.clone() };
            assert_eq!(Reply::parse(&line(&reply)), Ok(reply));
        }
    }
    for bad in ["", "{}", "[]", r#"{"opened":false,"session_id":"s"}"#, r#"{"token":"a","x":1}"#, r#"{"tok"#]
    {
        assert!(Reply::parse(bad.as_bytes()).is_err(), "{bad}");
    }
}

#[test]
fn calls_come_out_as_they_went_in() {
    let of_session = || Named { session_id: named("s") };
    let span = ImageSpan { rows: 1..2, key: ImageKey([7; 32]), first: 0, grid: [1, 1] };
    let ops = vec![
        Op::Generate(Box::default()),
        Op::Image(ImageUpload { blob: "aQ==".to_owned() }),
        Op::Open(of_session()),
        Op::Close(of_session()),
        Op::Reset(of_session()),
        Op::Fork(Fork { session_id: named("s"), to: named("t") }),
        Op::Restore(Restore {
            session_id: named("s"),
            tokens: vec![1, 2],
            images: vec![span],
            adapters: Vec::new(),
        }),
        Op::Inspect(of_session()),
        Op::Sessions(Nothing {}),
        Op::Cancel(Cancel { request: Some(Id::Text("a".to_owned())) }),
        Op::Ping(Nothing {}),
        Op::Notices(Nothing {}),
        Op::Flush(Flush { timeout_ms: 5 }),
        Op::Shutdown(Nothing {}),
    ];
    assert_eq!(ops.iter().map(Op::name).collect::<Vec<_>>(), OPS);
    for op in ops {
        let call = WorkerCall { id: Some(Id::Text("é".to_owned())), op };
        assert_eq!(WorkerCall::parse(&line(&call)), Ok(call));
    }
}

#[track_caller]
fn check_refused(line: &[u8], code: ErrorCode, id: Option<Id>, part: &str) {
    let refusal = WorkerCall::parse(line).expect_err("not a call");
    assert_eq!((refusal.code, &refusal.id), (code, &id), "{refusal:?}");
    assert!(refusal.message.contains(part), "{part:?} is not in {refusal:?}");
}

#[test]
fn what_is_no_call_is_refused_with_its_id_and_the_field() {
    let id = || Some(Id::Number(1));
    let deep = [&[b'['; 100_000][..], b"1"].concat();
    for (line, part) in [
        (&b"{"[..], "not a JSON object: EOF"),
        (b"[1]", "invalid type: sequence"),
        (b"nonsense", "not a JSON object"),
        (b"{\"prompt\": \"a\"} x", "trailing"),
        (b"\xff\xfe", "not a JSON object"),
        (&deep, "not a JSON object"),
        (b"{\"id\": 1.5}", "neither a string nor a whole number"),
        (b"{\"id\": null}", "neither a string nor a whole number"),
    ] {
        check_refused(line, ErrorCode::InvalidRequest, None, part);
    }
    let long = format!("{{\"id\": \"{}\"}}", "x".repeat(MAX_ID_BYTES + 1));
    check_refused(long.as_bytes(), ErrorCode::InvalidRequest, None, "more than 256 bytes");
    check_refused(
        br#"{"id":1,"op":"think"}"#,
        ErrorCode::UnknownOp,
        id(),
        "unknown op \"think\" (known: generate",
    );
    for (line, part) in [
        (&br#"{"id":1,"op":3}"#[..], "op: 3 is not a string"),
        (br#"{"id":1,"prompt":"a","max_tokens":3}"#, "unknown field `max_tokens`"),
        (br#"{"id":1,"prompt":"a","temperature":"hot"}"#, "temperature: invalid type: string"),
        (br#"{"id":1,"prompt":"a","top_k":-1}"#, "top_k: invalid value"),
        (br#"{"id":1,"prompt":"a","seed":-1}"#, "seed: invalid value"),
        (br#"{"id":1,"prompt":"a","max_new_tokens":1.5}"#, "max_new_tokens: invalid type"),
        (br#"{"id":1,"prompt_segments":[{"txt":"a"}]}"#, "unknown field `txt`"),
        (br#"{"id":1,"prompt_segments":[{"ids":[-1]}]}"#, "prompt_segments: invalid value"),
        (br#"{"id":1,"grammar":{"type":"poem"}}"#, "poem"),
        (br#"{"id":1,"op":"open"}"#, "missing field `session_id`"),
        (br#"{"id":1,"op":"open","session_id":""}"#, "session_id: must not be empty"),
        (br#"{"id":1,"op":"fork","session_id":"s","to":""}"#, "to: must not be empty"),
        (br#"{"id":1,"op":"open","session_id":7}"#, "session_id: invalid type"),
        (br#"{"id":1,"op":"ping","x":1}"#, "unknown field `x`"),
    ] {
        check_refused(line, ErrorCode::InvalidRequest, id(), part);
    }
}

const IMAGE: &[u8] = include_bytes!("../../../../tests/images/bits.png");

fn span(key: u8, rows: std::ops::Range<usize>) -> ImageSpan {
    ImageSpan { rows, key: ImageKey([key; 32]), first: 0, grid: [1, 2] }
}

#[test]
fn images_come_out_as_they_went_in() {
    let file = ImageFile::read(IMAGE.into(), &ImageLimits::default()).expect("an image");
    let image = |key, rows| PromptImage {
        file: Arc::clone(&file),
        key: ImageKey([key; 32]),
        spans: vec![span(key, rows)],
    };
    let request =
        Request { prompt: vec![7; 9], images: vec![image(1, 1..3), image(2, 5..7)], ..Request::default() };
    let call = WorkerCall { id: Some(Id::Number(7)), op: Op::Generate(Box::new(Generate::from(&request))) };
    assert_described("request", &line(&call));
    let Op::Generate(generate) = WorkerCall::parse(&line(&call)).expect("a call").op else { panic!() };
    assert!(generate.is_work(), "an image has to be decoded");
    let mut kept = KeptImages::default();
    let (files, missing) = kept.files(&generate.images).expect("hashes");
    assert_eq!((files.len(), &missing[..]), (0, &[file.hash.to_string(), file.hash.to_string()][..]));

    let unknown = Reply { id: None, answer: ReplyBody::Error(ErrorLine::unknown_images(missing)) };
    assert_described("reply", &line(&unknown));
    let upload = WorkerCall { id: None, op: Op::Image(ImageUpload::of(&file)) };
    assert_described("request", &line(&upload));
    let Op::Image(ImageUpload { blob }) = WorkerCall::parse(&line(&upload)).expect("a call").op else {
        panic!()
    };
    assert_eq!(kept.add(&blob).expect("base64"), file.hash);
    let (files, missing) = kept.files(&generate.images).expect("hashes");
    assert_eq!((files.len(), missing.len()), (2, 0));
    let again = generate.into_request(no_text, no_grammar, files).expect("a request");
    assert_eq!(format!("{again:?}"), format!("{request:?}"));
}

#[test]
fn what_is_no_hash_and_no_file_is_refused() {
    let spans = vec![span(1, 0..1)];
    let image = WorkerImage { spans, key: ImageKey([1; 32]), sha256: "x".to_owned() };
    let mut kept = KeptImages::default();
    assert!(kept.files(&[image]).is_err_and(|e| e.to_string().contains("no hash")));
    assert!(kept.add("!").is_err_and(|e| e.to_string().contains("not base64")));
}

#[test]
fn files_used_last_are_kept() {
    let mut kept = KeptImages::default();
    let blob = |byte: u8| BASE64_STANDARD.encode(vec![byte; 20 << 20]);
    let hashes: Vec<ImageHash> = (0..12).map(|byte| kept.add(&blob(byte)).expect("kept")).collect();
    assert!(kept.get(&hashes[0]).is_some(), "12 times 20 MiB fit, and this one was used last");
    let last = kept.add(&blob(12)).expect("kept");
    assert!(kept.get(&hashes[1]).is_none(), "its place was needed");
    assert!(kept.get(&hashes[0]).is_some() && kept.get(&last).is_some());
    assert!(kept.add(&BASE64_STANDARD.encode(vec![0; (20 << 20) + 1])).is_err(), "too large");
}

#[test]
fn a_prompt_is_text_or_segments_and_ids_win() {
    let encode = |text: &str, is_behind: bool| {
        Ok(text.bytes().map(|byte| u32::from(byte) + 1000 * u32::from(is_behind)).collect())
    };
    let check = |line: &str| {
        let call = WorkerCall::parse(line.as_bytes()).expect("a call");
        let Op::Generate(generate) = call.op else { panic!() };
        generate
            .into_request(encode, no_grammar, Vec::new())
            .map(|request| request.prompt)
            .map_err(|e| e.to_string())
    };
    assert_eq!(check(r#"{"prompt":"a"}"#), Ok(vec![97]));
    assert_eq!(
        check(r#"{"prompt_segments":[{"text":"a"},{"ids":[1,2]},{"text":"b"}]}"#),
        Ok(vec![97, 1, 2, 1098])
    );
    assert_eq!(check(r#"{"prompt_segments":[{"text":"a","ids":[5]}]}"#), Ok(vec![5]));
    assert_eq!(check(r#"{"prompt_segments":[]}"#), Ok(vec![]));
    assert!(check("{}").expect_err("none").contains("neither prompt nor prompt_segments"));
    assert!(check(r#"{"prompt":"a","prompt_segments":[]}"#).expect_err("two").contains("exclude"));
    assert!(check(r#"{"prompt_segments":[{}]}"#).expect_err("empty").contains("neither text nor ids"));
    assert!(check(r#"{"prompt":"a","deadline_ms":-1}"#).expect_err("no time").contains("deadline_ms"));
}

#[test]
fn the_defaults_are_the_reference_servers() {
    let Ok(WorkerCall { op: Op::Generate(generate), id: None }) = WorkerCall::parse(br#"{"prompt":"a"}"#)
    else {
        panic!()
    };
    let request = generate.into_request(|_, _| Ok(vec![1]), no_grammar, Vec::new()).expect("a request");
    assert_eq!(request.sampling, Sampling::default());
    assert_eq!(request.limits, Limits { overflow: Overflow::Clamp, ..Limits::default() });
    assert_eq!((request.logprobs, request.session), (None, None));
}

#[test]
fn calls_without_an_id_hear_what_the_reference_server_says() {
    let mut encoder = EventEncoder::new(Detail::Reference);
    assert!(encoder.encode(Event::Queued { position: 1 }).is_none());
    assert!(encoder.encode(Event::Prefill { done: 1, total: 1 }).is_none());
    let tokens = vec![Token { id: 7, logprob: None }];
    assert!(encoder.encode(Event::Text { text: String::new(), tokens: tokens.clone() }).is_none());
    let answer = encoder.encode(Event::Text { text: "é".to_owned(), tokens }).expect("text");
    assert_eq!(line(&answer), r#"{"token":"é"}"#.as_bytes());
    let done = encoder.encode(Event::Done(outcome(Finish::Cancelled))).expect("an end");
    let done: Value = serde_json::from_slice(&line(&done)).expect("JSON");
    let fields: Vec<&String> = done.as_object().expect("an object").keys().collect();
    assert_eq!(
        fields,
        [
            "done",
            "prompt_tokens",
            "completion_tokens",
            "finish_reason",
            "reused_prompt_tokens",
            "prefilled_prompt_tokens",
            "session_reset_reason",
            "prefill_ms",
            "decode_ms",
            "total_ms",
            "prefill_tok_s",
            "decode_tok_s",
            "generated_token_ids"
        ]
    );
    assert_eq!(done["finish_reason"], "stop");
    assert_eq!(done["generated_token_ids"], json!([7, 7]));
    let stopped = outcome(Finish::StopString("x".to_owned()));
    let cut = EventEncoder::new(Detail::Reference).encode(Event::Done(stopped)).expect("an end");
    assert!(!String::from_utf8(line(&cut)).expect("UTF-8").contains("generated_token_ids"));
}

#[test]
fn lines_are_found_however_they_arrive() {
    let input = b"one\n\ntoo long for this\nexact!\n\xff\ntorn";
    for size in 1..input.len() {
        let mut reader = io::BufReader::with_capacity(size, &input[..]);
        let (mut line, mut found) = (Vec::new(), Vec::new());
        loop {
            let received = read_line_within(&mut reader, &mut line, 6).expect("a slice");
            found.push((received, line.clone()));
            if matches!(received, Received::Torn | Received::End) {
                break;
            }
        }
        let whole = |text: &[u8]| (Received::Line, text.to_vec());
        let torn = (Received::Torn, b"torn".to_vec());
        let expected =
            [whole(b"one"), whole(b""), (Received::TooLong, vec![]), whole(b"exact!"), whole(b"\xff"), torn];
        assert_eq!(found, expected, "{size}");
        let after = read_line_within(&mut reader, &mut line, 6).expect("a slice");
        assert_eq!((after, line), (Received::End, vec![]));
    }
}
