//! An answer that is waited for as a whole.

use super::drive;
use super::turn::{Answered, Running, Totals, Update};
use crate::runtime::{Logprob, Token};
use crate::serve::error::ApiError;

/// A whole answer.
pub struct Collected {
    /// Each with its tokens.
    pub choices: Vec<(Answered, Vec<Token>)>,
    /// Of each, what was asked about the tokens of its prompt.
    pub scores: Vec<Vec<Logprob>>,
    pub totals: Totals,
}

/// Waits for the end. Dropping the future cancels the answer.
///
/// # Errors
/// Why there is no answer.
pub async fn all(mut running: Running) -> Result<Collected, ApiError> {
    let mut tokens: Vec<Vec<Token>> = Vec::new();
    let mut scores: Vec<Vec<Logprob>> = Vec::new();
    let mut answers: Vec<Option<Answered>> = Vec::new();
    while let Some(update) = running.updates.recv().await {
        match update {
            Update::Progress(_) => {}
            Update::Again => {
                tokens.clear();
                scores.clear();
                answers.clear();
            }
            Update::Scored { choice, logprobs } => at(&mut scores, choice).extend(logprobs),
            Update::Said { choice, tokens: new, .. } => at(&mut tokens, choice).extend(new),
            Update::Finished { choice, answer } => *at(&mut answers, choice) = Some(answer),
            Update::Ended(totals) => {
                tokens.resize_with(answers.len(), Vec::new);
                scores.resize_with(answers.len(), Vec::new);
                let choices = answers.into_iter().zip(tokens);
                let choices = choices.filter_map(|(answer, tokens)| Some((answer?, tokens))).collect();
                return Ok(Collected { choices, scores, totals });
            }
            Update::Failed(error) => return Err(error),
        }
    }
    Err(drive::internal("the answer ended early"))
}

fn at<T: Default>(items: &mut Vec<T>, index: usize) -> &mut T {
    if items.len() <= index {
        items.resize_with(index + 1, T::default);
    }
    &mut items[index]
}
