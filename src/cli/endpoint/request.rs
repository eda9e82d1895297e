//! The body of a request in OpenAI's form, with the fields that this kind of server honours beyond it.
//!
//! Invariants: only what the user gave is sent, because an endpoint has defaults of its own; a parameter that
//! this kind of server is not known to honour is refused by name.

use serde_json::{Map, Value, json};

use crate::cli::error::CommandError;
use crate::cli::flags::args::{LimitArgs, MaxTokens, SamplingArgs};
use crate::cli::images::as_data_urls;
use crate::cli::terminal::report::decimal;
use crate::cli::think::Think;
use llmctl_base::sampling::Support;
use llmctl_base::{SAMPLING, SamplingNumber, TopK};
use llmctl_engine::GrammarSource;
use llmctl_image::ImageSet;
use llmctl_serve::wire::message::message_json;
use llmctl_template::{Message, Role};

/// Make of a server, as its list of models says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndpointKind {
    OpenAi,
    Llmctl,
    Vllm,
    LlamaCpp,
    Ollama,
    Other,
}

impl EndpointKind {
    /// Returns the kind of a server that lists a model with this `owned_by`.
    pub fn of(owned_by: &str) -> Self {
        match owned_by {
            "llmctl" => Self::Llmctl,
            "vllm" => Self::Vllm,
            "llamacpp" => Self::LlamaCpp,
            "library" => Self::Ollama,
            "openai" | "openai-internal" | "system" => Self::OpenAi,
            _ => Self::Other,
        }
    }

    /// Returns the kind of the server at a host that is known; `Other` elsewhere.
    pub fn at(host: &str) -> Self {
        if host == "api.openai.com" { Self::OpenAi } else { Self::Other }
    }

    /// Returns the field of a sampling number, if it is honoured.
    fn field(self, number: &SamplingNumber) -> Option<&'static str> {
        let is_honoured = match number.facts.support {
            Support::Everywhere => true,
            Support::OpenEngines => self.is_open_engine(),
            Support::LlamaCpp => matches!(self, Self::Llmctl | Self::LlamaCpp),
        };
        let name = match (number.name, self) {
            ("repetition_penalty", Self::LlamaCpp) => "repeat_penalty",
            (name, _) => name,
        };
        is_honoured.then_some(name)
    }

    /// Returns whether fields of engines for open models are honoured: `top_k`, `ignore_eos`, template variables.
    fn is_open_engine(self) -> bool {
        matches!(self, Self::Llmctl | Self::Vllm | Self::LlamaCpp)
    }
}

/// Inputs of a request's body.
#[derive(Clone, Copy)]
pub struct EndpointRequest<'a> {
    pub messages: &'a [Message],
    /// Files of the messages' images.
    pub images: &'a ImageSet,
    /// In OpenAI's form.
    pub tools: &'a [Value],
    pub constraint: Option<&'a GrammarSource>,
    pub sampling: &'a SamplingArgs,
    pub limits: &'a LimitArgs,
    pub think: Think,
    /// In place of the sampling's seed.
    pub seed: Option<u64>,
}

fn refused(name: &str) -> CommandError {
    CommandError::usage(format!("{name}: this endpoint is not known to honour it"))
        .hint("leave it out, also of the configuration file")
}

impl EndpointRequest<'_> {
    /// Returns the seed that is asked for.
    pub fn seed(&self) -> Option<u64> {
        self.seed.or(self.sampling.given.seed)
    }

    /// Returns the body of the request.
    ///
    /// # Errors
    /// The parameter that this kind of server is not known to honour.
    pub fn body(&self, kind: EndpointKind, model: &str) -> Result<Map<String, Value>, CommandError> {
        let messages: Vec<Value> =
            self.messages.iter().map(|message| self.message_of(message, kind)).collect();
        let mut body = Map::new();
        body.insert("model".to_owned(), model.into());
        body.insert("messages".to_owned(), messages.into());
        body.insert("stream".to_owned(), true.into());
        body.insert("stream_options".to_owned(), json!({"include_usage": true}));
        if !self.tools.is_empty() {
            body.insert("tools".to_owned(), self.tools.into());
        }
        self.sampling_fields(kind, &mut body)?;
        self.limit_fields(kind, &mut body)?;
        self.constraint_fields(kind, &mut body)?;
        self.reasoning_fields(kind, &mut body)?;
        Ok(body)
    }

    /// Returns a message without earlier reasoning, unless the server's templates may need it, and with images as data URLs.
    fn message_of(&self, message: &Message, kind: EndpointKind) -> Value {
        let reasoning = message.reasoning.clone().filter(|_| kind.is_open_engine());
        let mut value = message_json(&Message { reasoning, ..message.clone() });
        if message.role == Role::Tool && value["content"].is_null() {
            value["content"] = "".into();
        }
        as_data_urls(&mut value["content"], self.images);
        value
    }

    fn sampling_fields(&self, kind: EndpointKind, body: &mut Map<String, Value>) -> Result<(), CommandError> {
        let given = &self.sampling.given;
        for number in SAMPLING {
            let Some(value) = number.given(&given.numbers) else { continue };
            let field = kind.field(number).ok_or_else(|| refused(&flag(number.name)))?;
            let value = if number.facts.is_whole { (value as i64).into() } else { decimal(value) };
            body.insert(field.to_owned(), value);
        }
        match given.top_k {
            None => {}
            Some(_) if !kind.is_open_engine() => return Err(refused("--top-k")),
            Some(TopK::Best(count)) => drop(body.insert("top_k".to_owned(), count.into())),
            Some(TopK::All) => drop(body.insert("top_k".to_owned(), 0.into())),
        }
        if let Some(bias) = &given.logit_bias {
            if kind == EndpointKind::Ollama {
                return Err(refused("--logit-bias"));
            }
            let bias: Map<String, Value> =
                bias.iter().map(|(id, bias)| (id.to_string(), decimal(*bias))).collect();
            body.insert("logit_bias".to_owned(), bias.into());
        }
        let has_lists = matches!(kind, EndpointKind::Llmctl | EndpointKind::LlamaCpp);
        for (name, list) in [
            ("samplers", given.samplers.as_ref().map(|steps| json!(steps))),
            ("dry_sequence_breakers", given.dry_sequence_breakers.as_ref().map(|texts| json!(texts))),
        ] {
            let Some(list) = list else { continue };
            if !has_lists {
                return Err(refused(&flag(name)));
            }
            body.insert(name.to_owned(), list);
        }
        body.extend(self.seed().map(|seed| ("seed".to_owned(), seed.into())));
        Ok(())
    }

    fn limit_fields(&self, kind: EndpointKind, body: &mut Map<String, Value>) -> Result<(), CommandError> {
        if self.limits.overflow.is_some() {
            return Err(refused("--overflow"));
        }
        match self.limits.max_tokens {
            None => {}
            Some(MaxTokens::Most(count)) => drop(body.insert("max_tokens".to_owned(), count.into())),
            Some(MaxTokens::NoLimit) => {
                let error = CommandError::usage("--max-tokens -1: an endpoint has limits of its own");
                return Err(error.hint("leave it out"));
            }
        }
        if !self.limits.stop.is_empty() {
            body.insert("stop".to_owned(), self.limits.stop.clone().into());
        }
        match self.limits.loop_guard {
            Some(_) if kind != EndpointKind::Llmctl => return Err(refused("--loop-guard")),
            guard => body.extend(guard.map(|guard| ("loop_guard".to_owned(), guard.to_string().into()))),
        }
        match self.limits.ignore_eos {
            true if !kind.is_open_engine() => Err(refused("--ignore-eos")),
            true => {
                body.insert("ignore_eos".to_owned(), true.into());
                Ok(())
            }
            false => Ok(()),
        }
    }

    fn constraint_fields(
        &self,
        kind: EndpointKind,
        body: &mut Map<String, Value>,
    ) -> Result<(), CommandError> {
        let (field, value) = match (self.constraint, kind) {
            (None, _) => return Ok(()),
            (Some(GrammarSource::JsonObject), _) => ("response_format", json!({"type": "json_object"})),
            (Some(GrammarSource::JsonSchema(schema)), _) => {
                let named = json!({"name": "answer", "strict": true, "schema": schema});
                ("response_format", json!({"type": "json_schema", "json_schema": named}))
            }
            (Some(GrammarSource::Regex(regex)), EndpointKind::Llmctl | EndpointKind::Vllm) => {
                ("structured_outputs", json!({"regex": regex}))
            }
            (Some(GrammarSource::Lark(lark)), EndpointKind::Llmctl) => ("lark", lark.as_str().into()),
            (Some(GrammarSource::Gbnf(gbnf)), EndpointKind::Llmctl | EndpointKind::LlamaCpp) => {
                ("grammar", gbnf.as_str().into())
            }
            (Some(GrammarSource::Regex(_)), _) => return Err(refused("--regex")),
            (Some(_), _) => return Err(refused("--grammar")),
        };
        body.insert(field.to_owned(), value);
        Ok(())
    }

    fn reasoning_fields(
        &self,
        kind: EndpointKind,
        body: &mut Map<String, Value>,
    ) -> Result<(), CommandError> {
        let Think { reasoning, budget, .. } = self.think;
        if budget.is_some() && kind != EndpointKind::Llmctl {
            return Err(refused("thinking with a budget"));
        }
        body.extend(budget.map(|count| ("thinking_budget".to_owned(), count.into())));
        let Some(is_on) = reasoning.is_on else { return Ok(()) };
        let (field, value) = match kind {
            EndpointKind::Llmctl => ("enable_thinking", is_on.into()),
            EndpointKind::Vllm | EndpointKind::LlamaCpp => {
                ("chat_template_kwargs", json!({"enable_thinking": is_on}))
            }
            EndpointKind::OpenAi | EndpointKind::Ollama => {
                ("reasoning_effort", if is_on { "medium" } else { "none" }.into())
            }
            EndpointKind::Other => return Err(refused("turning thinking on or off")),
        };
        body.insert(field.to_owned(), value);
        Ok(())
    }
}

/// Returns the flag of an argument, from its id.
pub fn flag(id: &str) -> String {
    format!("--{}", id.replace('_', "-"))
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;
    use llmctl_base::{GivenSampling, SamplerStep, SamplingNumbers};
    use llmctl_engine::Overflow;
    use llmctl_template::ToolCall;

    /// Returns a request with one question and nothing else.
    fn plain() -> EndpointRequest<'static> {
        static QUESTION: LazyLock<[Message; 1]> = LazyLock::new(|| [Message::user("q")]);
        static IMAGES: LazyLock<ImageSet> = LazyLock::new(ImageSet::default);
        static SAMPLING: LazyLock<SamplingArgs> = LazyLock::new(SamplingArgs::default);
        static LIMITS: LazyLock<LimitArgs> = LazyLock::new(LimitArgs::default);
        EndpointRequest {
            messages: &*QUESTION,
            images: LazyLock::force(&IMAGES),
            tools: &[],
            constraint: None,
            sampling: &SAMPLING,
            limits: &LIMITS,
            think: Think::default(),
            seed: None,
        }
    }

    fn body<'a>(kind: EndpointKind, change: impl FnOnce(&mut EndpointRequest<'a>)) -> Result<Value, String> {
        let mut request: EndpointRequest<'a> = plain();
        change(&mut request);
        request.body(kind, "m").map(Value::Object).map_err(|error| error.to_string())
    }

    #[test]
    fn only_what_was_given_is_sent() {
        let expected = json!({
            "model": "m", "messages": [{"role": "user", "content": "q"}], "stream": true,
            "stream_options": {"include_usage": true},
        });
        assert_eq!(body(EndpointKind::OpenAi, |_| {}), Ok(expected));
    }

    #[test]
    fn parameters_go_by_the_servers_name_or_are_refused_by_theirs() {
        let numbers = |name: &str| {
            let mut numbers = SamplingNumbers::default();
            let number = SAMPLING.iter().find(|number| number.name == name).expect(name);
            number.give(&mut numbers, Some(0.6));
            SamplingArgs {
                given: GivenSampling { numbers, ..GivenSampling::default() },
                ..SamplingArgs::default()
            }
        };
        let asked = |kind, name: &str| {
            let sampling = numbers(name);
            body(kind, |request| request.sampling = &sampling)
        };
        assert_eq!(asked(EndpointKind::OpenAi, "temperature").expect("sent")["temperature"], 0.6);
        assert_eq!(asked(EndpointKind::LlamaCpp, "repetition_penalty").expect("sent")["repeat_penalty"], 0.6);
        assert_eq!(asked(EndpointKind::Vllm, "min_p").expect("sent")["min_p"], 0.6);
        let samplers = Some(SamplerStep::list(["top_k", "temp"]).expect("an order"));
        let ordered = SamplingArgs {
            given: GivenSampling { samplers, ..GivenSampling::default() },
            ..SamplingArgs::default()
        };
        let asked_in_order = |kind| body(kind, |request| request.sampling = &ordered);
        let sent = asked_in_order(EndpointKind::LlamaCpp).expect("sent");
        assert_eq!(sent["samplers"], json!(["top_k", "temperature"]));
        let refusal = asked_in_order(EndpointKind::Vllm).expect_err("no order there");
        assert!(refusal.starts_with("--samplers"), "{refusal}");
        for (kind, name) in [
            (EndpointKind::OpenAi, "min_p"),
            (EndpointKind::Ollama, "repetition_penalty"),
            (EndpointKind::Vllm, "typical_p"),
            (EndpointKind::Other, "top_n_sigma"),
            (EndpointKind::Ollama, "mirostat"),
        ] {
            let refusal = asked(kind, name).expect_err(name);
            assert!(refusal.starts_with(&flag(name)), "{refusal}");
        }
    }

    #[test]
    fn limits_and_constraints() {
        let limits = |max_tokens| LimitArgs { max_tokens: Some(max_tokens), ..LimitArgs::default() };
        let most = limits(MaxTokens::Most(7));
        let sent = body(EndpointKind::Other, |request| request.limits = &most).expect("sent");
        assert_eq!(sent["max_tokens"], 7);
        let clamp = LimitArgs { overflow: Some(Overflow::Clamp), ..LimitArgs::default() };
        let refusal = body(EndpointKind::Llmctl, |request| request.limits = &clamp);
        assert!(refusal.is_err_and(|error| error.starts_with("--overflow")));
        let none = limits(MaxTokens::NoLimit);
        assert!(body(EndpointKind::Llmctl, |request| request.limits = &none).is_err());
        let schema = GrammarSource::JsonSchema(json!({"type": "object"}));
        let sent = body(EndpointKind::Other, |request| request.constraint = Some(&schema)).expect("sent");
        assert_eq!(sent["response_format"]["json_schema"]["schema"], json!({"type": "object"}));
        let regex = GrammarSource::Regex("a+".to_owned());
        let sent = body(EndpointKind::Vllm, |request| request.constraint = Some(&regex)).expect("sent");
        assert_eq!(sent["structured_outputs"]["regex"], "a+");
        let refusal = body(EndpointKind::OpenAi, |request| request.constraint = Some(&regex));
        assert_eq!(refusal, Err("--regex: this endpoint is not known to honour it".to_owned()));
    }

    #[test]
    fn reasoning_is_asked_for_in_the_servers_words_and_goes_back_only_where_it_is_used() {
        let off = Think { reasoning: false.into(), ..Think::default() };
        let sent = |kind| body(kind, |request| request.think = off);
        assert_eq!(sent(EndpointKind::Llmctl).expect("sent")["enable_thinking"], false);
        assert_eq!(sent(EndpointKind::Ollama).expect("sent")["reasoning_effort"], "none");
        assert!(sent(EndpointKind::Other).is_err());
        let mut earlier = Message::assistant("a");
        earlier.reasoning = Some("hm".to_owned());
        earlier.tool_calls =
            vec![ToolCall { id: Some("c".to_owned()), name: "f".to_owned(), arguments: json!({"x": 1}) }];
        let messages = [earlier];
        let sent =
            |kind| body(kind, |request| request.messages = &messages).expect("sent")["messages"][0].clone();
        assert_eq!(sent(EndpointKind::LlamaCpp)["reasoning_content"], "hm");
        assert_eq!(sent(EndpointKind::OpenAi).get("reasoning_content"), None);
        assert_eq!(sent(EndpointKind::OpenAi)["tool_calls"][0]["function"]["arguments"], "{\"x\":1}");
    }
}
