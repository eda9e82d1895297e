//! Promise: in the engine a grammar chooses the tokens and changes nothing else: forced tokens are computed together and
//! counted one by one, limits and stop strings hold within them, ends come where the grammar is complete, sessions keep
//! the exact ids, and a grammar that fails takes its own request with it.

use llmctl_base::GrammarError;
use llmctl_engine::{Grammar, GrammarCompiler, GrammarSource, Overflow};
use llmctl_models::text::{TokenKind, VocabSpec};

use crate::common::prelude::*;
use crate::common::toy::{one_hot, request};

const END: u32 = 2;
const CALL: u32 = 3;
const VOCABULARY: usize = 260;

/// Ids 0 to 3 are `<unk>`, `<s>`, `</s>` and `<|call|>`; then comes each byte.
fn letters() -> Arc<Tokenizer> {
    let named = ["<unk>", "<s>", "</s>", "<|call|>"].map(str::to_owned);
    let tokens: Vec<String> =
        named.into_iter().chain((0..=255u8).map(|byte| format!("<0x{byte:02X}>"))).collect();
    let kinds = [TokenKind::Unknown].into_iter().chain([TokenKind::Control; 3]).chain([TokenKind::Byte; 256]);
    let spec = VocabSpec {
        model: "llama".to_owned(),
        scores: vec![0.0; tokens.len()],
        kinds: kinds.collect(),
        tokens,
        bos: Some(1),
        eos: Some(END),
        unk: Some(0),
        add_space_prefix: Some(false),
        ..VocabSpec::default()
    };
    Arc::new(Tokenizer::from_vocab(&spec).expect("a vocabulary"))
}

fn byte(letter: char) -> u32 {
    4 + letter as u32
}

fn setup() -> Setup {
    Setup { vocab_size: VOCABULARY, end_of_generation: vec![END], ..Setup::default() }
}

/// An engine over bytes, with what its forward passes were.
struct Toy {
    engine: Engine,
    log: Log,
}

impl Toy {
    fn new(setup: &Setup, rule: Rule) -> Self {
        Self::over(setup, ToyModel::new(VOCABULARY, rule))
    }

    fn over(setup: &Setup, model: ToyModel) -> Self {
        let log = model.log();
        let engine = Engine::new(Box::new(model), letters(), setup.config()).expect("a valid configuration");
        Self { engine, log }
    }

    fn grammar(&self, source: &GrammarSource) -> Grammar {
        self.engine.spec().grammar_compiler(letters()).compile(source).expect("compiles")
    }

    fn regex(&self, regex: &str) -> Option<Grammar> {
        Some(self.grammar(&GrammarSource::Regex(regex.to_owned())))
    }

    /// Positions of each forward pass since the last call.
    fn passes(&self) -> Vec<Vec<usize>> {
        let mut log = self.log.lock().expect("no panic");
        log.drain(..).map(|rows| rows.iter().map(|row| row.position).collect()).collect()
    }
}

const PROMPT: [u32; 3] = [70, 71, 72];

#[test]
fn forced_tokens_are_computed_in_one_chunk_and_counted_one_by_one() {
    let mut toy = Toy::new(&setup(), hashing(VOCABULARY));
    let asked = Request { grammar: toy.regex("abcdefgh[xy]z"), ..request(&PROMPT) };
    let answer = run_one(&mut toy.engine, asked.clone());
    answer.check_order();
    let text = answer.text();
    assert!(["abcdefghxz", "abcdefghyz"].contains(&&*text), "{text}");
    assert_eq!((answer.finish(), answer.finish().reason()), (&Finish::Complete, "stop"));
    assert_eq!(answer.outcome().usage.completion_tokens, 10);
    let is_token = |event: &&Event| matches!(event, Event::Text { tokens, .. } if tokens.len() == 1);
    assert_eq!(answer.events.iter().filter(is_token).count(), 10);
    assert_eq!(toy.passes(), [(0..3).collect::<Vec<_>>(), (3..11).collect()]);

    let told = run_one(&mut toy.engine, Request { logprobs: Some(1), ..asked });
    assert_eq!(told.ids(), answer.ids());
    assert!(told.tokens().iter().all(|token| token.logprob.is_some()));
    assert!(toy.passes().iter().skip(1).all(|pass| pass.len() == 1), "each row's logits are wanted");
}

#[test]
fn limits_and_stop_strings_hold_within_forced_tokens() {
    let mut toy = Toy::new(&setup(), hashing(VOCABULARY));
    let grammar = toy.regex("abcdefghijkl[xy]");
    let answer = run_one(&mut toy.engine, Request { grammar: grammar.clone(), ..limited(&PROMPT, 4) });
    assert_eq!((answer.text().as_str(), answer.finish()), ("abcd", &Finish::MaxTokens));

    let mut stopped = Request { grammar: grammar.clone(), ..request(&PROMPT) };
    stopped.limits.stop = vec!["efg".to_owned()];
    let answer = run_one(&mut toy.engine, stopped);
    assert_eq!((answer.text().as_str(), answer.finish()), ("abcd", &Finish::StopString("efg".to_owned())));

    let mut small = Toy::new(&Setup { context_length: 8, ..setup() }, hashing(VOCABULARY));
    let mut full = Request { grammar: small.regex("abcdefghijkl[xy]"), ..request(&PROMPT) };
    let answer = run_one(&mut small.engine, full.clone());
    assert_eq!((answer.text().as_str(), answer.finish()), ("abcde", &Finish::ContextFull));
    full.limits.max_tokens = Some(30);
    full.limits.overflow = Overflow::Clamp;
    assert_eq!(run_one(&mut small.engine, full).text(), "abcde");
    let load = small.engine.load();
    assert_eq!(load.kv_free, load.kv_capacity);
}

#[test]
fn a_long_forced_text_comes_in_chunks_of_a_step() {
    let long = "q".repeat(100);
    let mut toy = Toy::new(&Setup { step_tokens: 7, ..setup() }, hashing(VOCABULARY));
    let asked = Request { grammar: toy.regex(&format!("{long}[xy]{{3}}")), ..request(&PROMPT) };
    let answer = run_one(&mut toy.engine, asked.clone());
    assert!(answer.text().starts_with(&long) && answer.text().len() == 103, "{}", answer.text());
    let passes = toy.passes();
    assert!(passes.iter().all(|pass| pass.len() <= 7) && passes.len() <= 1 + 100_usize.div_ceil(7) + 3);
    assert_eq!(passes.concat(), (0..PROMPT.len() + 102).collect::<Vec<_>>(), "each row once");
    let mut wide = Toy::new(&Setup { step_tokens: 200, ..setup() }, hashing(VOCABULARY));
    assert_eq!(run_one(&mut wide.engine, asked).ids(), answer.ids());
}

#[test]
fn ends_come_where_the_grammar_is_complete() {
    let eager = || -> Rule { Box::new(|_| Ok(one_hot(VOCABULARY, END))) };
    let mut toy = Toy::new(&setup(), eager());
    let mut asked = Request { grammar: toy.regex("a{3,5}"), ..request(&PROMPT) };
    let answer = run_one(&mut toy.engine, asked.clone());
    assert_eq!((answer.text().as_str(), answer.finish()), ("aaa", &Finish::Eos(END)));
    asked.limits.ignore_eos = true;
    let answer = run_one(&mut toy.engine, asked);
    assert_eq!((answer.text().as_str(), answer.finish()), ("aaaaa", &Finish::Complete));

    let empty = Request {
        grammar: Some(toy.grammar(&GrammarSource::Lark("start: \"\"".to_owned()))),
        ..request(&PROMPT)
    };
    let answer = run_one(&mut toy.engine, empty);
    assert_eq!((answer.ids(), answer.outcome().usage.completion_tokens), (Vec::new(), 0));

    // Without tokens that end anything, a complete answer still ends.
    let mut endless = Toy::new(&Setup { end_of_generation: Vec::new(), ..setup() }, eager());
    let asked = Request { grammar: endless.regex("a{3,5}"), ..request(&PROMPT) };
    let answer = run_one(&mut endless.engine, asked);
    assert_eq!((answer.text().as_str(), answer.finish()), ("aaaaa", &Finish::Complete));
}

#[test]
fn company_with_and_without_grammars_changes_nothing() {
    let config = Setup { max_running: 12, step_tokens: 40, context_length: 128, ..setup() };
    let mut alone = Toy::new(&config, hashing(VOCABULARY));
    let regexes = ["[a-f]{20}", "key=[0-9]{1,9};", "(ab|ba){4,9}"];
    let asked: Vec<Request> = (0..12)
        .map(|seed| Request {
            grammar: (seed % 4 != 3).then(|| alone.regex(regexes[seed % 3])).flatten(),
            sampling: seeded(seed as u64),
            ..limited(&PROMPT[..1 + seed % 3], 30)
        })
        .collect();
    let expected: Vec<_> =
        asked.iter().map(|asked| run_one(&mut alone.engine, asked.clone()).ids()).collect();
    let mut shared = Toy::new(&config, hashing(VOCABULARY));
    let together: Vec<_> = run_all(&mut shared.engine, asked).iter().map(|answer| answer.ids()).collect();
    assert_eq!(together, expected);
    assert!(shared.passes().iter().any(|pass| pass.len() >= 12), "they ran in one step");
}

#[test]
fn a_session_goes_on_from_the_exact_ids() {
    let mut toy = Toy::new(&setup(), hashing(VOCABULARY));
    let in_session = |prompt: &[u32], grammar: Option<Grammar>| Request {
        grammar,
        session: Some(named("s")),
        sampling: seeded(5),
        ..limited(prompt, 40)
    };
    let first = in_session(&PROMPT, toy.regex("value: [0-9]{12}, unit: (cm|km)"));
    let answer = run_one(&mut toy.engine, first);
    let mut prompt = [&PROMPT[..], &answer.ids()].concat();
    prompt.extend([90, 91]);
    let second = in_session(&prompt, toy.regex("[a-z]{4}, done"));
    let warm = run_one(&mut toy.engine, second.clone());
    let reuse = warm.reuse();
    assert_eq!((reuse.first_difference, reuse.reason), (None, ReuseReason::ExactPrefix));
    assert!(reuse.cached_tokens > PROMPT.len() + 12, "{reuse:?}");
    let mut cold = Toy::new(&setup(), hashing(VOCABULARY));
    assert_eq!(run_one(&mut cold.engine, Request { session: None, ..second }).ids(), warm.ids());
}

#[test]
fn recurrent_states_are_left_at_page_ends_though_forced_tokens_come_in_chunks() {
    let model = || ToyModel::new(VOCABULARY, hashing(VOCABULARY)).with_groups(&[KvKind::Recurrent]);
    let config = Setup { step_tokens: 3 * PAGE_TOKENS, ..setup() };
    let mut toy = Toy::over(&config, model());
    let asked =
        Request { grammar: toy.regex(&format!("{}[xy]", "w".repeat(2 * PAGE_TOKENS))), ..request(&PROMPT) };
    let answer = run_one(&mut toy.engine, asked);
    assert_eq!((answer.ids().len(), answer.finish()), (2 * PAGE_TOKENS + 1, &Finish::Complete));
    let passes = toy.passes();
    assert!(passes.iter().any(|pass| pass.len() == PAGE_TOKENS), "{passes:?}");
    let crosses = |pass: &Vec<usize>| pass[0] / PAGE_TOKENS != pass[pass.len() - 1] / PAGE_TOKENS;
    assert!(!passes.iter().any(crosses), "{passes:?}");
}

#[test]
fn special_tokens_come_by_name_and_appear_where_they_are_markup() {
    let mut toy = Toy::new(&setup(), hashing(VOCABULARY));
    for lark in ["start: <|call|> \"go\"", "start: <[3]> \"go\""] {
        let grammar = Some(toy.grammar(&GrammarSource::Lark(lark.to_owned())));
        let mut asked = Request { grammar, ..request(&PROMPT) };
        let answer = run_one(&mut toy.engine, asked.clone());
        assert_eq!((answer.text().as_str(), answer.ids()[0]), ("go", CALL), "{lark}");
        asked.markup = [CALL].into();
        assert_eq!(run_one(&mut toy.engine, asked.clone()).text(), "<|call|>go");
        asked.limits.stop = vec!["|>g".to_owned()];
        assert_eq!(run_one(&mut toy.engine, asked).text(), "<|call", "stop strings see it");
    }
    let text = Request { grammar: toy.regex("[<|cal>]{8}"), ..request(&PROMPT) };
    assert!(!run_one(&mut toy.engine, text).ids().contains(&CALL), "text is spelt in text");
}

#[test]
fn a_grammar_that_gets_too_complex_fails_its_request_alone() {
    let config = Setup { context_length: 4096, step_tokens: 64, max_running: 2, ..setup() };
    let mut toy = Toy::new(&config, Box::new(|_| Ok(one_hot(VOCABULARY, byte('a')))));
    // Each token leaves one more rule open (right recursion), up to the library's limit on a row of its chart.
    let deep = toy.grammar(&GrammarSource::Lark("start: A start | A\nA: \"a\"".to_owned()));
    let failing = Request { grammar: Some(deep), session: Some(named("s")), ..request(&PROMPT) };
    let other = Request { sampling: Sampling::default(), ..limited(&[90], 50) };
    let answers = run_all(&mut toy.engine, vec![failing, other.clone()]);
    assert!(
        matches!(answers[0].error(), Error::Grammar(GrammarError::TooComplex(_))),
        "{:?}",
        answers[0].error()
    );
    let said = answers[0].ids();
    assert!(said.len() > 100, "{}", said.len());
    assert_eq!(answers[1].ids(), vec![byte('a'); 50]);
    let prompt = [&PROMPT[..], &said, &[90]].concat();
    let next = run_one(&mut toy.engine, Request { session: Some(named("s")), ..limited(&prompt, 2) });
    assert_eq!(next.reuse().first_difference, None, "the session holds what was said");
    assert!(next.reuse().cached_tokens + 2 >= prompt.len() - 1);
}

#[test]
fn what_belongs_to_another_model_is_refused() {
    let mut toy = Toy::new(&setup(), hashing(VOCABULARY));
    let parameter = |result: Result<_, Error>| match result {
        Err(Error::InvalidParameter { name, .. }) => name,
        other => panic!("{other:?}"),
    };
    let markup = Request { markup: [VOCABULARY as u32].into(), ..request(&PROMPT) };
    assert_eq!(parameter(toy.engine.submit(markup)), "markup");
    let foreign = GrammarCompiler::new(letters(), VOCABULARY + 1, &[END]);
    let grammar = foreign.compile(&GrammarSource::JsonObject).expect("compiles");
    assert_eq!(
        parameter(toy.engine.submit(Request { grammar: Some(grammar), ..request(&PROMPT) })),
        "grammar"
    );
}
