//! The parameters of a generation: how a token is chosen, when it ends, what is reported. Ranges are the
//! engine's to check, with [`crate::runtime::Sampling::validate`].

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Fields, hints};
use llmctl_base::{GivenSampling, SAMPLING, SamplerStep, TopK};
use llmctl_engine::{Limits, LoopGuard, MAX_LOGPROBS, Overflow};

/// Returns the sampling that the fields give, with `defaults` where they are silent.
pub fn sampling(fields: &mut Fields<'_>, defaults: &GivenSampling) -> GivenSampling {
    // The reference's word for "all"; elsewhere it is what leaving it out means.
    let says_all = fields.is_number("top_k", -1.0);
    let top_k = match fields.size_or_off("top_k") {
        Some(0) => Some(TopK::All),
        Some(count) => Some(TopK::Best(count)),
        None => says_all.then_some(TopK::All),
    };
    let mut sampling = GivenSampling { top_k, ..GivenSampling::default() };
    for number in SAMPLING {
        let name = fields.spelled(number.spellings());
        number.give(&mut sampling.numbers, fields.number(name));
    }
    sampling.logit_bias = logit_bias(fields);
    sampling.samplers = samplers(fields);
    sampling.dry_sequence_breakers = stop(fields, "dry_sequence_breakers");
    let seed = fields.spelled(&["seed", "random_seed"]);
    sampling.seed = fields.seed(seed);
    sampling.or(defaults)
}

/// Returns the sampler that a letter of llama.cpp's stands for; an unknown letter stays.
fn lettered(letter: &str) -> &str {
    match letter {
        "i" => "infill",
        "a" => "adaptive_p",
        _ => "edskypmxt".find(letter).map_or(letter, |at| SamplerStep::NAMES[at].0),
    }
}

/// Reads llama.cpp's order of samplers: their names, in a list or in one text, or in one text their letters.
fn samplers(fields: &mut Fields<'_>) -> Option<Vec<SamplerStep>> {
    const NAME: &str = "samplers";
    let given = fields.take(NAME)?;
    let is_name = |text: &str| text == "infill" || SamplerStep::list([text]).is_ok();
    let names: Option<Vec<&str>> = match &given {
        Value::String(names) if names.contains([',', ';']) || is_name(names) => {
            Some(names.split([',', ';']).filter(|name| !name.is_empty()).collect())
        }
        Value::String(all) => Some(all.split("").filter(|one| !one.is_empty()).map(lettered).collect()),
        Value::Array(names) => names.iter().map(Value::as_str).collect(),
        _ => None,
    };
    // The last of editors' orders; without it the order says nothing that llmctl can keep.
    if names.as_ref().is_some_and(|names| names.contains(&"infill")) {
        fields.ignored(NAME);
        return None;
    }
    let steps = names.map_or_else(|| Err("not a list of names".to_owned()), SamplerStep::list);
    steps.map_err(|message| fields.out_of_range(NAME, &format!("are refused: {message}"))).ok()
}

/// Ids as strings, as JSON wants the names of members; or llama.cpp's pairs of an id and a bias, false for a ban.
fn logit_bias(fields: &mut Fields<'_>) -> Option<BTreeMap<u32, f32>> {
    const BAN: f32 = -100.0;
    if fields.is_list("logit_bias") {
        let pair = |pair: &Value| {
            let (id, bias) = (pair[0].as_u64(), pair[1].as_f64().map(|bias| bias as f32));
            let bias = if pair[1] == false { Some(BAN) } else { bias };
            Some((u32::try_from(id?).ok()?, bias.filter(|_| pair.get(2).is_none())?))
        };
        let pairs: Option<_> = fields.list("logit_bias")?.iter().map(pair).collect();
        return pairs
            .or_else(|| fields.none("logit_bias", "is not an array of pairs of a token id and a bias"));
    }
    let biases = fields.object("logit_bias")?;
    let mut read = BTreeMap::new();
    for (id, bias) in biases {
        match (id.parse(), bias.as_f64()) {
            (Ok(id), Some(bias)) => drop(read.insert(id, bias as f32)),
            (Err(_), _) => fields.out_of_range("logit_bias", &format!("names {id:?}, which is no token id")),
            (_, None) => fields.wrong("logit_bias", &format!("of {id} is not a number")),
        }
    }
    Some(read)
}

/// Names of the most tokens of an answer: Ollama's, llama.cpp's and OpenAI's three. The last that is given counts.
pub const LIMIT_NAMES: [&str; 5] =
    ["num_predict", "n_predict", "max_tokens", "max_output_tokens", "max_completion_tokens"];

/// Reads when an answer ends. With `may_be_none` a request may ask about its prompt without an answer.
pub fn limits(fields: &mut Fields<'_>, defaults: &Limits, may_be_none: bool) -> Limits {
    Limits {
        max_tokens: max_tokens(fields, &LIMIT_NAMES, defaults, may_be_none),
        stop: stop(fields, "stop").unwrap_or_else(|| defaults.stop.clone()),
        stop_ids: stop_ids(fields).unwrap_or_else(|| defaults.stop_ids.clone()),
        ignore_eos: fields.flag("ignore_eos").unwrap_or(defaults.ignore_eos),
        loop_guard: loop_guard(fields).unwrap_or(defaults.loop_guard),
        ..defaults.clone()
    }
}

/// Reads what ends generations that repeat themselves: true, false, or the tokens of a repetition; as text too, as the flag.
pub fn loop_guard(fields: &mut Fields<'_>) -> Option<LoopGuard> {
    const NAME: &str = "loop_guard";
    let text = match fields.take(NAME)? {
        Value::Bool(true) => "on".to_owned(),
        Value::Bool(false) => "off".to_owned(),
        Value::String(text) => text,
        other => other.to_string(),
    };
    text.parse().map_err(|message: String| fields.out_of_range(NAME, &format!("has an {message}"))).ok()
}

/// Reads the most tokens of an answer, the last of the names counts; `None` is as many as the context holds, which -1 asks for,
/// and Ollama's -2. Strict limits know neither, as the reference.
pub fn max_tokens(
    fields: &mut Fields<'_>,
    names: &[&str],
    defaults: &Limits,
    may_be_none: bool,
) -> Option<usize> {
    let mut max_tokens = defaults.max_tokens;
    for name in names {
        let is_open = fields.is_number(name, -1.0) || *name == LIMIT_NAMES[0] && fields.is_number(name, -2.0);
        if defaults.overflow != Overflow::Refuse && is_open {
            fields.take(name);
            max_tokens = None;
            continue;
        }
        match fields.size(name) {
            Some(0) if !may_be_none => {
                fields.out_of_range(name, "must be at least 1; leave it out to use the whole context")
            }
            count => max_tokens = count.or(max_tokens),
        }
    }
    max_tokens
}

/// Reads the predicted output as OpenAI writes it: a text, or parts of text; empty without one. A value of another form
/// is a hint without effect.
pub fn prediction(fields: &mut Fields<'_>) -> String {
    const NAME: &str = "prediction";
    let Some(value) = fields.take(NAME) else { return String::new() };
    let text: Option<String> = match &value["content"] {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts.iter().map(|part| part["text"].as_str()).collect(),
        _ => None,
    };
    text.filter(|_| value["type"] == "content").unwrap_or_else(|| {
        fields.ignored(NAME);
        String::new()
    })
}

/// The most answers that one request may ask for, as in OpenAI's API.
pub const MAX_CHOICES: usize = 128;

/// Reads `n`, the number of answers to one prompt, and `best_of`, which must agree with it.
pub fn num_choices(fields: &mut Fields<'_>, most: usize) -> usize {
    let count = match fields.size("n") {
        None => 1,
        Some(n) if (1..=most).contains(&n) => n,
        Some(_) => {
            fields.out_of_range("n", &format!("is not in [1, {most}]"));
            1
        }
    };
    fields.only("best_of", &[count.into()]);
    count
}

/// The most tokens of a request that end its answer.
const MAX_STOP_IDS: usize = 256;

/// Ids of tokens that end the answer, as vLLM takes them.
fn stop_ids(fields: &mut Fields<'_>) -> Option<Vec<u32>> {
    const NAME: &str = "stop_token_ids";
    let values = fields.list(NAME)?;
    let ids: Option<Vec<u32>> = values.iter().map(|value| u32::try_from(value.as_u64()?).ok()).collect();
    if ids.is_none() {
        fields.wrong(NAME, "is not an array of token ids");
    }
    if values.len() > MAX_STOP_IDS {
        fields.out_of_range(NAME, &format!("are more than {MAX_STOP_IDS}"));
        return None;
    }
    ids
}

/// The most stop strings, and bytes of one: each is looked for at every token.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 1024;

/// Reads stop strings: one string or several.
pub fn stop(fields: &mut Fields<'_>, name: &str) -> Option<Vec<String>> {
    let values = match fields.take(name)? {
        text @ Value::String(_) => vec![text],
        Value::Array(values) => values,
        _ => Vec::from([Value::Null]), // refused below
    };
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let texts: Option<Vec<String>> = values.iter().map(text).collect();
    if texts.is_none() {
        fields.wrong(name, "is neither a string nor an array of strings");
    }
    if texts.as_ref().is_some_and(|texts| !texts.is_empty() && texts.iter().all(String::is_empty)) {
        fields.ignored(name);
    }
    if texts.iter().flatten().any(|text| text.len() > MAX_STOP_BYTES)
        || texts.iter().flatten().count() > MAX_STOPS
    {
        let message = format!("is more than {MAX_STOPS} strings, or one of more than {MAX_STOP_BYTES} bytes");
        fields.out_of_range(name, &message);
        return None;
    }
    texts
}

/// `logprobs` is a flag with `top_logprobs` beside it (chat), or the number of alternatives (completions).
pub fn logprobs(fields: &mut Fields<'_>, default: Option<usize>) -> Option<usize> {
    let top = fields.size("top_logprobs");
    // llama.cpp's name; 0 asks for nothing, as `inert` takes it.
    let n_probs = if fields.is_number("n_probs", 0.0) { None } else { fields.size("n_probs") };
    let (name, count) = match (fields.take("logprobs"), top) {
        (None, None) if n_probs.is_none() => return default,
        (None, None) => ("n_probs", n_probs),
        (Some(Value::Bool(true)), None) if n_probs.is_some() => ("n_probs", n_probs),
        _ if n_probs.is_some() => {
            fields.out_of_range("n_probs", "is another name of what logprobs says");
            return None;
        }
        (Some(Value::Bool(true)), top) => ("top_logprobs", Some(top.unwrap_or(0))),
        (Some(Value::Bool(false)), None | Some(0)) => return None,
        (None | Some(Value::Bool(false)), Some(_)) => {
            fields.out_of_range("top_logprobs", "needs logprobs: true");
            return None;
        }
        (Some(Value::Number(number)), None) if number.as_i64().is_some() => {
            ("logprobs", number.as_u64().map(|count| usize::try_from(count).unwrap_or(usize::MAX)))
        }
        _ => {
            return fields.none("logprobs", "is neither true, false nor a count");
        }
    };
    if count.is_none_or(|count| count > MAX_LOGPROBS) {
        fields.out_of_range(name, &format!("is not in [0, {MAX_LOGPROBS}]"));
    }
    count
}

/// Fields on which no answer depends, and settings that ask for nothing. The types of OpenAI's own are checked.
pub fn labels(fields: &mut Fields<'_>) {
    for name in ["user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"] {
        if fields.text(name).is_some() {
            fields.ignored(name);
        }
    }
    if fields.object("metadata").is_some() {
        fields.ignored("metadata");
    }
    inert(fields);
}

/// Takes settings of other servers that ask for nothing; with any other value they are refused.
pub fn inert(fields: &mut Fields<'_>) {
    for (name, values) in hints::inert_settings() {
        fields.only(name, values);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;
    use crate::wire::Problems;

    #[test]
    fn samplers_are_names_or_letters() {
        let read = |given: &str| {
            let body = Map::from_iter([("samplers".to_owned(), Value::from(given))]);
            Problems::new(false).read(body, samplers).map(|(steps, _)| steps)
        };
        let all = SamplerStep::NAMES.map(|(_, step)| step).to_vec();
        assert_eq!(read("edskypmxt"), Ok(Some(all)));
        assert_eq!(read("kat"), Ok(Some(vec![SamplerStep::TopK, SamplerStep::Temperature])));
        assert_eq!(read("dry"), Ok(Some(vec![SamplerStep::Dry])), "a name is no letters");
        assert_eq!(read("top_k;xtc"), Ok(Some(vec![SamplerStep::TopK, SamplerStep::Xtc])));
        assert_eq!(read("ki"), Ok(None), "infill has no effect");
        let refused = read("kzt").expect_err("no sampler").message;
        assert!(refused.contains("samplers are refused: unknown sampler \"z\""), "{refused}");
    }
}
