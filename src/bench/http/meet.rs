//! First requests to a server: its models, and how many tokens it makes of a word.

use super::client::LoadClient;
use super::drive::Workload;
use super::text::{self, Ruler};
use crate::error::{BenchError, RequestFailure};
use crate::record::ServerFacts;
use crate::stats::SplitMix64;
use llmctl_engine::http_engine::HttpFailure;

/// Asks the server for its models and measures how it counts. Returns `work` for `model`, or for the first that the server lists.
///
/// # Errors
/// [`BenchError::Request`]; a usage error if no model is named or listed.
pub async fn meet(
    work: Workload,
    model: Option<&str>,
    client: &LoadClient,
) -> Result<(Workload, ServerFacts), BenchError> {
    let (models, software) = match client.models().await {
        // With a model name given, the list is not needed.
        Err(RequestFailure::Http(HttpFailure::Status { code: 404 | 405 | 501, .. })) if model.is_some() => {
            (Vec::new(), None)
        }
        listed => listed.map_err(|failure| client.explained(failure))?,
    };
    let listed = || models.first().map(|model| model.id.clone());
    let Some(model) = model.map(str::to_owned).or_else(listed) else {
        let message = "the server lists no model".to_owned();
        return Err(BenchError::Usage { message, hint: Some("name one with --served-model") });
    };
    let mut work = Workload { model: model.clone(), ..work };
    let ruler = measure_words(client, &work).await?;
    let counts_tokens = ruler.is_some();
    work.ruler = ruler.unwrap_or_default();
    Ok((work, ServerFacts { model, software, counts_tokens, ..ServerFacts::default() }))
}

/// Sends two unmeasured requests, which also warm the server up. Returns `None` if it does not count tokens.
async fn measure_words(client: &LoadClient, work: &Workload) -> Result<Option<Ruler>, BenchError> {
    const OUTPUT: usize = 4;
    let long = (work.prompt_tokens / 2).clamp(16, 128);
    let mut random = SplitMix64::new(!work.seed);
    let mut counted = Vec::new();
    for words in [8, long] {
        let said = [text::words(words, &mut random)];
        let mut body = work.body(&said, OUTPUT);
        // Some servers count tokens only without streaming.
        body["stream"] = false.into();
        body.as_object_mut().map(|fields| fields.remove("stream_options"));
        let answer = client.complete(work.path(), &body).await;
        let answer = answer.map_err(|failure| client.explained(failure))?;
        counted.extend(answer.usage.map(|usage| (words, usage.prompt_tokens)));
    }
    Ok(match counted[..] {
        [short, long] => Ruler::of(short, long),
        _ => None,
    })
}
