//! Waits for a whole answer.

use super::generate::{FinishedChoice, Running, Totals, Update};
use crate::error::ApiError;
use llmctl_engine::Logprob;

/// A whole answer.
pub struct Collected {
    pub choices: Vec<FinishedChoice>,
    /// Of each choice, the log-probabilities of its prompt's tokens.
    pub scores: Vec<Vec<Logprob>>,
    pub totals: Totals,
}

/// Waits for the end. Dropping the future cancels the answer.
///
/// # Errors
/// Why there is no answer.
pub async fn all(mut running: Running) -> Result<Collected, ApiError> {
    let mut scores: Vec<Vec<Logprob>> = Vec::new();
    let mut choices: Vec<Option<FinishedChoice>> = Vec::new();
    while let Some(update) = running.updates.recv().await {
        match update {
            Update::Progress(_) | Update::Deltas { .. } => {}
            Update::Restarted => {
                scores.clear();
                choices.clear();
            }
            Update::Scored { choice, logprobs } => at(&mut scores, choice).extend(logprobs),
            Update::Finished { choice, finished } => *at(&mut choices, choice) = Some(finished),
            Update::Ended(totals) => {
                scores.resize_with(choices.len(), Vec::new);
                return Ok(Collected { choices: choices.into_iter().flatten().collect(), scores, totals });
            }
            Update::Failed(error) => return Err(error),
        }
    }
    Err(ApiError::internal("the answer ended early"))
}

fn at<T: Default>(items: &mut Vec<T>, index: usize) -> &mut T {
    if items.len() <= index {
        items.resize_with(index + 1, T::default);
    }
    &mut items[index]
}
