//! Promise: what repeats itself ends, by the ids of its own tokens alone: at the same token cold and warm, alone and beside
//! others, in steps of any size, with drafts of any length, and behind an undone turn.

use llmctl_engine::{LoopGuard, ReasoningLimit};
use proptest::prelude::*;

use crate::common::prelude::*;

/// The token that ends reasoning, and the end of generation.
const CLOSE: u32 = 20;
const END: u32 = 21;

/// Pieces `t0 ` to `t19 `, `</think>` and the end.
fn pieces() -> Vec<String> {
    let words = (0..20).map(|n| format!("t{n} "));
    words.chain(["</think>", ""].map(str::to_owned)).collect()
}

fn setup(step_tokens: usize) -> Setup {
    let vocab_size = pieces().len();
    Setup { vocab_size, context_length: 512, step_tokens, end_of_generation: vec![END], ..Setup::default() }
}

/// Thinks in a cycle of three, or answers in a cycle of five behind the end of its thoughts.
fn circling() -> Rule {
    Box::new(|history| {
        let last = history[history.len() - 1];
        let is_over = history.contains(&CLOSE);
        let next = match (is_over, last) {
            (_, CLOSE) => 10,
            (true, last) => 10 + (last + 1) % 5,
            (false, last) => 1 + last % 3,
        };
        Ok(one_hot(next))
    })
}

fn one_hot(id: u32) -> Vec<f32> {
    crate::common::toy::one_hot(pieces().len(), id)
}

/// Says what is written, whatever was drafted, and then the end. The prompt has one token.
fn reciting(script: Vec<u32>) -> Rule {
    Box::new(move |history| Ok(one_hot(script.get(history.len() - 1).copied().unwrap_or(END))))
}

fn thinking(guard: LoopGuard) -> Request {
    let limit =
        ReasoningLimit { max_tokens: None, open: None, close: "</think>".to_owned(), closing: vec![CLOSE] };
    let mut request = limited(&[0], 200);
    (request.reasoning, request.limits.loop_guard) = (Some(limit), guard);
    request
}

fn engine(step_tokens: usize, rule: Rule, drafts: usize) -> Engine {
    let model = ToyModel::new(pieces().len(), rule);
    let vocabulary = ToyVocabulary::new(&pieces(), &[]);
    let config = setup(step_tokens).config();
    let speculation = if drafts == 0 { config.speculation } else { Speculation::Always(drafts) };
    Engine::new(Box::new(model), vocabulary, EngineConfig { speculation, ..config }).expect("an engine")
}

#[test]
fn reasoning_is_ended_and_the_answer_follows_until_it_circles_too() {
    let answer = run_one(&mut engine(16, circling(), 0), thinking(LoopGuard::both(16)));
    let ids = answer.ids();
    let (thought, rest) = ids.split_at(16);
    assert_eq!(thought, [1, 2, 3].into_iter().cycle().take(16).collect::<Vec<_>>());
    // Five tokens four times over: 20, and the closing one before them.
    assert_eq!((rest[0], rest.len()), (CLOSE, 21), "{rest:?}");
    assert_eq!(answer.finish(), &Finish::Repetition);
    assert_eq!(answer.finish().reason(), "repetition");
    assert!(answer.outcome().usage.looped_reasoning && answer.finish().is_cut());
    answer.check_order();
}

#[test]
fn each_part_is_guarded_by_its_own_setting() {
    let run = |guard| {
        let answer = run_one(&mut engine(16, circling(), 0), thinking(guard));
        (answer.ids().len(), answer.finish().clone(), answer.outcome().usage.looped_reasoning)
    };
    assert_eq!(run(LoopGuard::OFF), (200, Finish::MaxTokens, false));
    assert_eq!(run(LoopGuard { reasoning: None, answer: Some(16) }), (200, Finish::MaxTokens, false));
    assert_eq!(run(LoopGuard { reasoning: Some(16), answer: None }), (200, Finish::MaxTokens, true));
    assert_eq!(run(LoopGuard::both(40)), (40 + 1 + 40, Finish::Repetition, true));
    let default = thinking(LoopGuard::default());
    assert_eq!(run_one(&mut engine(16, circling(), 0), default).ids().len(), 200, "1,000 tokens");
    // A budget that is reached first ends it all the same.
    let mut request = thinking(LoopGuard::both(16));
    request.reasoning.as_mut().expect("a limit").max_tokens = Some(5);
    let answer = run_one(&mut engine(16, circling(), 0), request);
    assert_eq!((answer.ids()[5], answer.outcome().usage.looped_reasoning), (CLOSE, false));
}

#[test]
fn thresholds_out_of_range_are_refused_by_name() {
    for tokens in [0, 15, 100_001] {
        let refused = engine(16, circling(), 0).submit(thinking(LoopGuard::both(tokens)));
        assert!(matches!(refused, Err(Error::InvalidParameter { name: "loop_guard", .. })), "{refused:?}");
    }
}

/// What an answer is, apart from its times.
fn said(answer: &Answer) -> (Vec<u32>, Finish, bool) {
    (answer.ids(), answer.finish().clone(), answer.outcome().usage.looped_reasoning)
}

#[test]
fn it_ends_at_the_same_token_however_it_is_computed() {
    let truth = said(&run_one(&mut engine(16, circling(), 0), thinking(LoopGuard::both(17))));
    assert_eq!(truth.1, Finish::Repetition);
    for (step_tokens, drafts) in [(1, 0), (3, 0), (16, 1), (16, 3), (16, 7), (64, 30)] {
        let mut engine = engine(step_tokens.max(4), circling(), drafts);
        let hinted = Request { prediction: truth.0.clone(), ..thinking(LoopGuard::both(17)) };
        let answers = run_all(&mut engine, vec![hinted.clone(), thinking(LoopGuard::OFF), hinted.clone()]);
        let label = format!("steps of {step_tokens}, drafts of {drafts}");
        assert_eq!((said(&answers[0]), said(&answers[2])), (truth.clone(), truth.clone()), "{label}");
        // Warm: the prompt is there, and so are pages of the answer.
        let warm = run_one(&mut engine, within("a", hinted.clone()));
        assert_eq!(said(&warm), truth, "{label}, warm");
        // The turn is undone and asked again: the session goes back, and nothing of the guard stays.
        let again = run_one(&mut engine, within("a", hinted));
        assert_eq!(said(&again), truth, "{label}, again");
    }
}

#[test]
fn tokens_of_the_prompt_do_not_count() {
    let mut request = thinking(LoopGuard::both(16));
    let cycle: Vec<u32> = [1, 2, 3].into_iter().cycle().take(60).collect();
    request.prompt = [&[0], &cycle[..]].concat();
    let answer = run_one(&mut engine(16, circling(), 0), request);
    assert_eq!(answer.ids().iter().position(|&id| id == CLOSE), Some(16));
}

/// Where the last tokens are first a cycle of `threshold` tokens and four times at least, by its definition.
fn defined(tokens: &[u32], threshold: usize) -> Option<usize> {
    let circles = |end: usize, length: usize| {
        let needed = threshold.max(4 * length);
        end >= needed && (end - needed + length..end).all(|at| tokens[at] == tokens[at - length])
    };
    (1..=tokens.len()).find(|&end| (1..=end / 4).any(|length| circles(end, length)))
}

/// Runs of few different tokens, so that cycles of all lengths come and go.
fn script() -> impl Strategy<Value = Vec<u32>> {
    let run = (prop::collection::vec(1_u32..4, 1..7), 1_usize..9);
    let runs = prop::collection::vec(run, 1..6);
    runs.prop_map(|runs| runs.into_iter().flat_map(|(run, times)| run.repeat(times)).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn an_answer_ends_where_the_rule_says(script in script(), threshold in 16_usize..40, drafts in 0_usize..6) {
        let expected = defined(&script, threshold);
        let mut request = limited(&[0], 400);
        request.limits.loop_guard = LoopGuard::both(threshold);
        request.prediction = script.clone();
        let answer = run_one(&mut engine(16, reciting(script.clone()), drafts), request);
        let finish = if expected.is_some() { Finish::Repetition } else { Finish::Eos(END) };
        prop_assert_eq!(answer.ids().len(), expected.unwrap_or(script.len()));
        prop_assert_eq!(answer.finish(), &finish);
    }
}
