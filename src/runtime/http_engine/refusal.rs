//! Refuses by name, before anything is sent, the parameters that an engine of another make cannot honour.
//! Pure.

use super::wire::EngineKind;
use crate::grammar::GrammarSource;
use crate::request::Request;
use llmctl_base::error::Error;
use llmctl_base::{SAMPLING, Sampling, SamplingNumber};

/// vLLM raises lower temperatures to this one.
const LEAST_VLLM_TEMPERATURE: f32 = 0.01;

/// Checks that an engine of `kind` gives the request the meaning that it has here.
///
/// # Errors
/// [`Error::InvalidParameter`] naming the first parameter that it lacks or defines otherwise.
pub fn check(kind: EngineKind, request: &Request) -> Result<(), Error> {
    let refusals = [images(request), sampling(kind, request), logprobs(kind, request), reasoning(request)];
    match refusals.into_iter().flatten().next() {
        None => Ok(()),
        Some((name, why)) => Err(Error::InvalidParameter { name, message: format!("{} {why}", kind.name()) }),
    }
}

/// Refuses a Lark grammar for an engine that was asked, and whose grammar library is another than llmctl's.
pub fn lark(kind: EngineKind, request: &Request) -> Option<Error> {
    let GrammarSource::Lark(_) = request.grammar.as_ref()?.source() else { return None };
    let flags = match kind {
        EngineKind::Sglang => "--grammar-backend llguidance",
        EngineKind::Vllm => "--structured-outputs-config.backend auto or guidance",
        EngineKind::Llmctl => return None,
    };
    let name = kind.name();
    let message = format!(
        "this {name} does not take llmctl's grammars, which tool calls and answers after reasoning need too: start it with {flags}"
    );
    Some(Error::InvalidParameter { name: "grammar", message })
}

type NamedRefusal = Option<(&'static str, String)>;

fn images(request: &Request) -> NamedRefusal {
    let why = "is sent the prompt as tokens, which hold no images; --endpoint sends messages with them";
    (!request.images.is_empty()).then(|| ("images", why.to_owned()))
}

fn sampling(kind: EngineKind, request: &Request) -> NamedRefusal {
    let sampling = &request.sampling;
    if kind == EngineKind::Sglang && sampling.repetition_penalty != 1.0 {
        return Some((
            "repetition_penalty",
            "counts the tokens of the answer alone, not the prompt's".to_owned(),
        ));
    }
    if kind != EngineKind::Llmctl && sampling.samplers.is_some() {
        return Some(("samplers", "has an order of its own".to_owned()));
    }
    if kind != EngineKind::Llmctl && sampling.uses_dry() {
        return Some(("dry_multiplier", "has no such parameter".to_owned()));
    }
    if sampling.temperature == 0.0 || kind == EngineKind::Llmctl {
        return None; // a greedy choice knows no truncation
    }
    let plain = Sampling::default();
    let is_lacking =
        |number: &&SamplingNumber| kind.lacks(number) && number.get(sampling) != number.get(&plain);
    if let Some(number) = SAMPLING.iter().find(is_lacking) {
        return Some((number.name, "has no such parameter".to_owned()));
    }
    match kind {
        EngineKind::Vllm if sampling.temperature < LEAST_VLLM_TEMPERATURE => {
            Some(("temperature", format!("takes 0, and nothing else below {LEAST_VLLM_TEMPERATURE}")))
        }
        EngineKind::Vllm if sampling.min_p > 0.0 && sampling.top_p < 1.0 => {
            Some(("min_p", "applies it before top_p, not after it: give one of the two".to_owned()))
        }
        EngineKind::Vllm if sampling.seed.is_some_and(|seed| i64::try_from(seed).is_err()) => {
            Some(("seed", format!("takes seeds up to {}", i64::MAX)))
        }
        EngineKind::Sglang if sampling.seed.is_some() => {
            Some(("seed", "repeats an answer only as a whole server is set to".to_owned()))
        }
        EngineKind::Sglang if sampling.top_k.is_some() && sampling.top_p < 1.0 => {
            let why = "takes it of all tokens, not of those that top_k leaves: give one of the two (top_k 0 keeps all tokens)";
            Some(("top_p", why.to_owned()))
        }
        _ => None,
    }
}

fn logprobs(kind: EngineKind, request: &Request) -> NamedRefusal {
    let sampling = &request.sampling;
    let is_edited = sampling.repetition_penalty != 1.0
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0
        || !sampling.logit_bias.is_empty();
    if request.prompt_logprobs.is_some() {
        return Some(("prompt_logprobs", "is not asked for the log-probabilities of a prompt".to_owned()));
    }
    request.logprobs?;
    let why = match kind {
        EngineKind::Llmctl => "reports them by text, not by token",
        EngineKind::Vllm if is_edited => "reports them before penalties and logit_bias, not after them",
        EngineKind::Sglang if ![0.0, 1.0].contains(&sampling.temperature) => {
            "reports them after the temperature, not before it: give temperature 0 or 1"
        }
        EngineKind::Sglang if request.grammar.is_some() => {
            "reports them among the tokens that a constraint allows, not among all"
        }
        EngineKind::Vllm | EngineKind::Sglang => return None,
    };
    Some(("logprobs", why.to_owned()))
}

/// The usual guard against loops is left out where it cannot be kept.
fn reasoning(request: &Request) -> NamedRefusal {
    let (limit, beside) = (request.reasoning.as_ref()?, beside_limited_reasoning(request)?);
    let is_asked = limit.max_tokens.is_some() || !request.limits.loop_guard.is_default();
    is_asked.then(|| ("reasoning", format!("cannot keep a limit on the reasoning beside {beside}")))
}

/// Returns what forbids a limit on the reasoning, which is kept by ending the generation and asking for the rest of the answer.
pub fn beside_limited_reasoning(request: &Request) -> Option<&'static str> {
    let sampling = &request.sampling;
    match () {
        () if request.grammar.is_some() => Some("a constraint on the answer"),
        () if request.logprobs.is_some() => Some("logprobs"),
        () if sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0 => Some("penalties"),
        () if sampling.mirostat > 0.0 => Some("mirostat"),
        () => None,
    }
}
