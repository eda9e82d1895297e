//! The parameters of a generation: how a token is chosen, when it ends, what is reported. Ranges are the engine's to
//! check, with [`Sampling::validate`].

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::Fields;
use crate::runtime::grammar::GrammarSource;
use crate::runtime::{Limits, MAX_LOGPROBS, Sampling};

/// What `defaults` say where the fields do not.
pub fn sampling(fields: &mut Fields<'_>, defaults: &Sampling) -> Sampling {
    // The reference's word for "all"; elsewhere it is what leaving it out means.
    let top_k = match fields.size("top_k") {
        Some(0) => None,
        Some(count) => Some(count),
        None => defaults.top_k,
    };
    Sampling {
        temperature: fields.number("temperature").unwrap_or(defaults.temperature),
        top_k,
        top_p: fields.number("top_p").unwrap_or(defaults.top_p),
        min_p: fields.number("min_p").unwrap_or(defaults.min_p),
        repetition_penalty: fields.number("repetition_penalty").unwrap_or(defaults.repetition_penalty),
        presence_penalty: fields.number("presence_penalty").unwrap_or(defaults.presence_penalty),
        frequency_penalty: fields.number("frequency_penalty").unwrap_or(defaults.frequency_penalty),
        logit_bias: logit_bias(fields).unwrap_or_else(|| defaults.logit_bias.clone()),
        seed: fields.count("seed").or(defaults.seed),
    }
}

/// Ids as strings, as JSON wants the names of members.
fn logit_bias(fields: &mut Fields<'_>) -> Option<BTreeMap<u32, f32>> {
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

/// `max_completion_tokens` is what counts beside `max_tokens`, its older name.
pub fn limits(fields: &mut Fields<'_>, defaults: &Limits) -> Limits {
    let mut max_tokens = None;
    for name in ["max_tokens", "max_completion_tokens"] {
        match fields.size(name) {
            Some(0) => fields.out_of_range(name, "must be at least 1; leave it out to use the whole context"),
            count => max_tokens = count.or(max_tokens),
        }
    }
    Limits {
        max_tokens: max_tokens.or(defaults.max_tokens),
        stop: stop(fields).unwrap_or_else(|| defaults.stop.clone()),
        ignore_eos: fields.flag("ignore_eos").unwrap_or(defaults.ignore_eos),
        ..defaults.clone()
    }
}

/// The most stop strings, and bytes of one: each is looked for at every token.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 1024;

/// One string or several.
fn stop(fields: &mut Fields<'_>) -> Option<Vec<String>> {
    let values = match fields.take("stop")? {
        text @ Value::String(_) => vec![text],
        Value::Array(values) => values,
        _ => Vec::from([Value::Null]), // refused below
    };
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let texts: Option<Vec<String>> = values.iter().map(text).collect();
    if texts.is_none() {
        fields.wrong("stop", "is neither a string nor an array of strings");
    }
    if texts.iter().flatten().any(|text| text.len() > MAX_STOP_BYTES)
        || texts.iter().flatten().count() > MAX_STOPS
    {
        let message = format!("is more than {MAX_STOPS} strings, or one of more than {MAX_STOP_BYTES} bytes");
        fields.out_of_range("stop", &message);
        return None;
    }
    texts
}

/// `logprobs` is a flag with `top_logprobs` beside it (chat), or the number of alternatives (completions).
pub fn logprobs(fields: &mut Fields<'_>, default: Option<usize>) -> Option<usize> {
    let top = fields.size("top_logprobs");
    let (name, count) = match (fields.take("logprobs"), top) {
        (None, None) => return default,
        (Some(Value::Bool(true)), top) => ("top_logprobs", Some(top.unwrap_or(0))),
        (Some(Value::Bool(false)), None) => return None,
        (None | Some(Value::Bool(false)), Some(_)) => {
            fields.out_of_range("top_logprobs", "needs logprobs: true");
            return None;
        }
        (Some(Value::Number(number)), None) if number.as_i64().is_some() => {
            ("logprobs", number.as_u64().map(|count| usize::try_from(count).unwrap_or(usize::MAX)))
        }
        _ => {
            fields.wrong("logprobs", "is neither true, false nor a count");
            return None;
        }
    };
    if count.is_none_or(|count| count > MAX_LOGPROBS) {
        fields.out_of_range(name, &format!("is not in [0, {MAX_LOGPROBS}]"));
    }
    count
}

/// OpenAI's three forms. A schema is enforced whether it is called strict or not.
pub fn response_format(fields: &mut Fields<'_>, default: Option<GrammarSource>) -> Option<GrammarSource> {
    if !fields.has("response_format") {
        return default;
    }
    let format = fields.object("response_format")?;
    let mut format = fields.inside("response_format", format);
    let source = match format.text("type").as_deref() {
        None | Some("text") => None,
        Some("json_object") => Some(GrammarSource::JsonObject),
        Some("json_schema") => json_schema(&mut format),
        Some(other) => {
            let known = format!("= {other:?} is not supported, only text, json_object and json_schema");
            format.unsupported("type", &known);
            None
        }
    };
    format.end();
    source
}

fn json_schema(format: &mut Fields<'_>) -> Option<GrammarSource> {
    if !format.has("json_schema") {
        format.wrong("json_schema", "is missing");
    }
    let wrapped = format.object("json_schema")?;
    let mut wrapped = format.inside("json_schema", wrapped);
    wrapped.text("name");
    wrapped.text("description");
    wrapped.flag("strict");
    let schema = wrapped.take("schema");
    if schema.is_none() {
        wrapped.wrong("schema", "is missing");
    }
    wrapped.end();
    schema.map(GrammarSource::JsonSchema)
}

/// Labels of a request, and hints: nothing of the answer depends on them.
pub fn labels(fields: &mut Fields<'_>) {
    for name in ["user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"] {
        fields.text(name);
    }
    fields.object("metadata");
    fields.only("service_tier", &[json!("auto"), json!("default")]);
    fields.only("store", &[json!(false)]);
}
