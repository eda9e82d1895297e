//! One recorded answer computed again: up to the first token that differs, with its probabilities; and scored token by token under
//! another model.

use super::AnswerRecord;
use crate::cli::error::CommandError;
use crate::cli::model::load::Loaded;
use llmctl_engine::receipt::{AnswerRecipe, Receipt};
use llmctl_engine::{Event, Finish, Limits, Logprob, MAX_LOGPROBS, Request};

/// The result of computing an answer again.
#[derive(Debug)]
pub struct Computed {
    pub difference: Option<FirstDifference>,
    /// The model's files, the build and the options are those of the record.
    pub is_same_model: bool,
    /// The builds that answered then and now.
    pub builds: [String; 2],
    /// Under another model, the log-probabilities of the answer's tokens, from the first one that was generated.
    pub scores: Option<Vec<Logprob>>,
    pub agreement: Option<Agreement>,
}

/// The first token that differs.
#[derive(Debug, Clone, PartialEq)]
pub struct FirstDifference {
    /// Number of equal tokens of the answer before it.
    pub position: usize,
    pub recorded: ReplayedToken,
    pub replayed: ReplayedToken,
}

/// A token or the end of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplayedToken {
    /// `None` for an end without a token.
    pub id: Option<u32>,
    pub text: String,
    /// Probability under the model that computes it again, before penalties, temperature and grammar.
    pub probability: Option<f32>,
}

impl ReplayedToken {
    fn token(llm: &Loaded, id: u32) -> Self {
        let text = String::from_utf8_lossy(&llm.texts().chat_tokenizer().token_bytes(id)).into_owned();
        Self { id: Some(id), text, probability: None }
    }

    fn end(llm: &Loaded, finish: &Finish) -> Self {
        match finish {
            Finish::Eos(id) => Self::token(llm, *id),
            finish => Self { id: None, text: format!("end ({})", finish.reason()), probability: None },
        }
    }
}

/// Agreement of two models on an answer.
#[derive(Debug)]
pub struct Agreement {
    pub num_tokens: usize,
    /// Number of tokens that the other model finds the most likely.
    pub num_same: usize,
    /// Comparison with the recorded model's probabilities; else why there is none.
    pub divergence: Result<AnswerDivergence, String>,
}

/// Distance of the probabilities of two models.
#[derive(Debug)]
pub struct AnswerDivergence {
    /// Mean Kullback-Leibler divergence in nats from the recorded model to the other, over the tokens that are scored.
    pub mean_kl: f64,
    /// Number of positions at which both find the same token the most likely.
    pub num_same_top: usize,
}

impl Computed {
    pub fn new(difference: Option<FirstDifference>, then: &AnswerRecipe, now: &AnswerRecipe) -> Self {
        let builds = [then.build.clone(), now.build.clone()];
        let is_same_model = then.is_same_model(now);
        Self { difference, is_same_model, builds, scores: None, agreement: None }
    }

    /// Finds the probabilities of the two tokens that differ.
    ///
    /// # Errors
    /// The engine's failure.
    pub fn find_probabilities(&mut self, llm: &Loaded, answer: &AnswerRecord) -> Result<(), CommandError> {
        let Some(difference) = &mut self.difference else { return Ok(()) };
        let before = &answer.receipt.answer[..difference.position];
        for choice in [&mut difference.recorded, &mut difference.replayed] {
            if let Some(id) = choice.id {
                let scores = score(llm, answer, &[before, &[id]].concat(), 0)?;
                choice.probability = scores.last().map(|score| score.logprob.exp());
            }
        }
        Ok(())
    }
}

/// Computes an answer again. Returns where it differs first; the rest is not computed.
///
/// # Errors
/// The engine's refusal or failure.
pub fn replay(llm: &Loaded, answer: &AnswerRecord) -> Result<Option<FirstDifference>, CommandError> {
    let receipt = &answer.receipt;
    let expected = &receipt.answer[receipt.given..];
    if expected.is_empty() && !receipt.ended_by_itself() {
        return Ok(None); // a limit ended it before the model had said anything
    }
    let images = answer.images(llm)?;
    let request = receipt.request(&answer.prompt, images, |source| llm.compiler().compile(source))?;
    let mut at = 0;
    for event in llm.engine().submit(request)? {
        match event {
            Event::Text { tokens, .. } => {
                for token in tokens {
                    if expected.get(at) != Some(&token.id) {
                        return Ok(Some(difference(llm, receipt, at, ReplayedToken::token(llm, token.id))));
                    }
                    at += 1;
                }
            }
            Event::Done(outcome) => {
                let is_as_long = at == expected.len();
                let is_same_end = !receipt.ended_by_itself() || outcome.finish == receipt.finish;
                let end = || difference(llm, receipt, at, ReplayedToken::end(llm, &outcome.finish));
                return Ok((!is_as_long || !is_same_end).then(end));
            }
            Event::Failed(error) => return Err(error.into()),
            _ => {}
        }
    }
    Err(llmctl_base::Error::EngineGone.into())
}

fn difference(llm: &Loaded, receipt: &Receipt, at: usize, replayed: ReplayedToken) -> FirstDifference {
    let position = receipt.given + at;
    let recorded = match receipt.answer.get(position) {
        Some(&id) => ReplayedToken::token(llm, id),
        None => ReplayedToken::end(llm, &receipt.finish),
    };
    FirstDifference { position, recorded, replayed }
}

/// Scores all generated tokens of an answer under a model.
///
/// # Errors
/// The engine's refusal or failure.
pub fn scores(llm: &Loaded, answer: &AnswerRecord) -> Result<Vec<Logprob>, CommandError> {
    let mut scores = score(llm, answer, &answer.receipt.answer, MAX_LOGPROBS)?;
    scores.drain(..answer.receipt.given.min(scores.len()));
    Ok(scores)
}

/// Scores tokens behind the prompt, as far as the context reaches.
fn score(
    llm: &Loaded,
    answer: &AnswerRecord,
    tokens: &[u32],
    num_alternatives: usize,
) -> Result<Vec<Logprob>, CommandError> {
    let mut prompt = [&answer.prompt, tokens].concat();
    prompt.truncate(llm.engine().spec().context_length() - 1);
    let from = answer.prompt.len().saturating_sub(1); // the first token of a prompt has no probability
    let request = Request {
        prompt,
        images: answer.images(llm)?,
        limits: Limits { max_tokens: Some(0), ..Limits::default() },
        prompt_logprobs: Some(num_alternatives),
        adapters: Some(answer.receipt.adapters.clone()),
        ..Request::default()
    };
    let mut scores = Vec::new();
    for event in llm.engine().submit(request)? {
        match event {
            Event::Prompt { logprobs } => scores.extend(logprobs),
            Event::Failed(error) => return Err(error.into()),
            _ => {}
        }
    }
    Ok(scores.split_off(from.min(scores.len())))
}

impl Agreement {
    /// Compares the scores of an answer under another model with those of the model that gave it.
    pub fn of(receipt: &Receipt, other: &[Logprob], first: Result<Vec<Logprob>, String>) -> Self {
        let answer = &receipt.answer[receipt.given..];
        let top = |score: &Logprob| score.top.first().map(|(id, _)| *id);
        let num_same = answer.iter().zip(other).filter(|(id, score)| top(score) == Some(**id)).count();
        let divergence = first.map(|first| {
            let pairs = || first.iter().zip(other);
            let sum: f64 = answer.iter().zip(pairs()).map(|(&id, (first, other))| kl(id, first, other)).sum();
            let num_same_top = pairs().filter(|(first, other)| top(first) == top(other)).count();
            AnswerDivergence { mean_kl: sum / other.len().max(1) as f64, num_same_top }
        });
        Self { num_tokens: other.len(), num_same, divergence }
    }
}

/// Returns the Kullback-Leibler divergence in nats of two distributions as far as both are known: of the token, of those among the
/// most likely of both, and of all others as one. It is at most that of the whole distributions.
fn kl(id: u32, first: &Logprob, other: &Logprob) -> f64 {
    let known = |(token, logprob): &(u32, f32)| {
        let of_other = other.top.iter().find(|(other, _)| other == token);
        of_other.filter(|_| *token != id).map(|(_, other)| (*logprob, *other))
    };
    let pairs = first.top.iter().filter_map(known).chain([(first.logprob, other.logprob)]);
    let (mut sum, mut left) = (0.0, [1.0f64; 2]);
    for (p, q) in pairs.map(|(p, q)| (f64::from(p), f64::from(q))) {
        sum += if p == f64::NEG_INFINITY { 0.0 } else { p.exp() * (p - q) };
        left = [left[0] - p.exp(), left[1] - q.exp()];
    }
    let [p, q] = left.map(|rest| rest.max(f64::EPSILON));
    (sum + p * (p / q).ln()).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_that_of_the_formula() {
        let score = |probabilities: &[f32]| {
            let top = (0..).zip(probabilities.iter().map(|p| p.ln())).collect::<Vec<(u32, f32)>>();
            Logprob { logprob: top[0].1, top }
        };
        let (first, other) = (score(&[0.5, 0.25]), score(&[0.25, 0.5]));
        let expected = 0.5 * 2f64.ln() + 0.25 * 0.5f64.ln(); // the rest is a quarter in both
        assert!((kl(0, &first, &other) - expected).abs() < 1e-6);
        assert_eq!(kl(0, &first, &first), 0.0);
        let unknown = Logprob { logprob: 0.25f32.ln(), top: vec![(9, 0.5f32.ln())] };
        let lumped = 0.5 * 2f64.ln() + 0.5 * (0.5f64 / 0.75).ln();
        assert!((kl(0, &first, &unknown) - lumped).abs() < 1e-6, "what one lacks counts as one");
    }
}
