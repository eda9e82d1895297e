//! Values that `/set`, `/compare` and `--compare` change: the flags for sampling and limits, by their names.
//!
//! A value is parsed and checked by the same code as the flag; what is refused changes nothing.

use clap::Parser;

use super::answer::WATCHED_LOOP_GUARD;
use crate::cli::error::CommandError;
use crate::cli::flags::args::{LimitArgs, SamplingArgs};
use llmctl_base::{DRY_SEQUENCE_BREAKERS, Error, SamplerStep, Sampling, SamplingParameter};
use llmctl_engine::Overflow;

/// Keys of limits.
const LIMIT_KEYS: &[&str] = &["max-tokens", "stop", "ignore-eos", "loop-guard"];

/// Returns all keys: the sampling parameters and the limits, as their flags are spelled.
pub fn keys() -> Vec<String> {
    let sampling = SamplingParameter::all().map(|parameter| spelled(parameter.name()));
    sampling.chain(LIMIT_KEYS.iter().map(|key| (*key).to_owned())).collect()
}

/// The flags in force.
#[derive(Debug, Clone, Default, Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
pub struct AnswerSettings {
    #[command(flatten)]
    pub sampling: SamplingArgs,

    #[command(flatten)]
    pub limits: LimitArgs,
}

impl AnswerSettings {
    /// Sets `key` for `command`; `default` takes the value back.
    ///
    /// # Errors
    /// A usage error that begins with `command`: there is no such key, or the value is refused.
    pub fn set(&mut self, command: &str, key: &str, value: &str) -> Result<(), CommandError> {
        let key = spelled(key);
        let keys = keys();
        if !keys.contains(&key) {
            let error = CommandError::usage(format!("{command}: unknown key {key:?}"));
            let near = crate::cli::error::nearest(&key, keys.iter().map(String::as_str));
            return Err(error.hint(match near {
                Some(near) => format!("did you mean {near}?"),
                None => format!("the keys are {}", keys.join(", ")),
            }));
        }
        let mut changed = self.clone();
        match (key.as_str(), value) {
            (_, "default") => changed.unset(&key),
            ("ignore-eos", "on" | "true") => changed.limits.ignore_eos = true,
            ("ignore-eos", "off" | "false") => changed.limits.ignore_eos = false,
            ("ignore-eos", _) => {
                return Err(CommandError::usage(format!(
                    "{command} ignore-eos: unknown value {value:?} (on, off)"
                )));
            }
            _ => {
                let flag = format!("--{key}={value}");
                changed.try_update_from([flag]).map_err(|error| refusal(command, &key, &error))?;
                changed.limits.ignore_eos = self.limits.ignore_eos; // a bare flag counts as given
            }
        }
        changed.sampling.check().map_err(|error| match error {
            Error::InvalidParameter { name, message } => {
                CommandError::usage(format!("{command} {}: {message}", spelled(name)))
            }
            other => other.into(),
        })?;
        *self = changed;
        Ok(())
    }

    fn unset(&mut self, key: &str) {
        if let Some(parameter) = SamplingParameter::all().find(|parameter| spelled(parameter.name()) == key) {
            return self.sampling.unset(parameter);
        }
        match key {
            "max-tokens" => self.limits.max_tokens = None,
            "stop" => self.limits.stop.clear(),
            "loop-guard" => self.limits.loop_guard = None,
            _ => self.limits.ignore_eos = false,
        }
    }

    /// Returns all values in force, one a line.
    pub fn table(&self, sampling: &Sampling) -> Vec<Vec<String>> {
        let limits = self.limits.resolve();
        let max_tokens = limits.max_tokens.filter(|count| *count != usize::MAX);
        let or = |value: Option<String>, otherwise: &str| value.unwrap_or_else(|| otherwise.to_owned());
        let list = |list: &[String]| if list.is_empty() { "none".to_owned() } else { list.join(", ") };
        let value = |parameter: SamplingParameter| match parameter {
            SamplingParameter::Number(number) => number.get(sampling).to_string(),
            SamplingParameter::TopK => or(sampling.top_k.map(|k| k.to_string()), "all"),
            SamplingParameter::LogitBias => {
                let bias = sampling.logit_bias.iter().map(|(id, bias)| format!("{id}={bias}"));
                list(&bias.collect::<Vec<_>>())
            }
            SamplingParameter::Seed => {
                or(sampling.seed.map(|seed| seed.to_string()), "random for each answer")
            }
            SamplingParameter::Samplers => {
                let names = |steps: &Vec<SamplerStep>| {
                    list(&steps.iter().map(|step| step.name().to_owned()).collect::<Vec<_>>())
                };
                or(sampling.samplers.as_ref().map(names), "llmctl's order")
            }
            SamplingParameter::DrySequenceBreakers => {
                let own = || DRY_SEQUENCE_BREAKERS.map(str::to_owned).to_vec();
                let breakers = sampling.dry_sequence_breakers.clone().unwrap_or_else(own);
                list(&breakers.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>())
            }
        };
        let limits = [
            ("max-tokens", or(max_tokens.map(|count| count.to_string()), "until the context is nearly full")),
            ("stop", list(&limits.stop.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>())),
            ("ignore-eos", if limits.ignore_eos { "on" } else { "off" }.to_owned()),
            ("loop-guard", self.limits.loop_guard.unwrap_or(WATCHED_LOOP_GUARD).to_string()),
        ];
        let sampling = SamplingParameter::all().map(|one| vec![spelled(one.name()), value(one)]);
        sampling.chain(limits.into_iter().map(|(key, value)| vec![key.to_owned(), value])).collect()
    }

    /// As [`Self::table`], for an endpoint, which has defaults of its own.
    pub fn table_at_endpoint(&self) -> Vec<Vec<String>> {
        let given = SamplingParameter::all().filter(|one| self.sampling.gives(*one));
        let mut given: Vec<String> = given.map(|one| spelled(one.name())).collect();
        given.extend(self.limits.max_tokens.map(|_| "max-tokens".to_owned()));
        given.extend(self.limits.loop_guard.map(|_| "loop-guard".to_owned()));
        let mut rows = self.table(&self.sampling.given.sampling(true));
        for row in rows.iter_mut().filter(|row| !given.contains(&row[0])) {
            if !matches!(row[0].as_str(), "stop" | "ignore-eos") {
                row[1] = "the endpoint's default".to_owned();
            }
        }
        rows
    }

    /// Returns the limits of an answer. Without `max_tokens` it may fill the context: chat asks before a conversation gets
    /// that far.
    pub fn limits(&self) -> llmctl_engine::Limits {
        llmctl_engine::Limits { overflow: Overflow::Clamp, ..self.limits.resolve() }
    }
}

/// Returns the flag's spelling, for either.
pub fn spelled(key: &str) -> String {
    key.replace('_', "-")
}

/// clap's reason without its usage lines, which speak of flags.
fn refusal(command: &str, key: &str, error: &clap::Error) -> CommandError {
    let reason = crate::cli::flags::reason(error).unwrap_or_else(|| "the value is refused".to_owned());
    CommandError::usage(format!("{command} {key}: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_can_be_set_and_taken_back() {
        for key in &keys() {
            let value = match key.as_str() {
                "seed" | "max-tokens" | "top-k" | "repeat-last-n" | "dry-allowed-length"
                | "dry-penalty-last-n" => "7",
                "mirostat" => "1",
                "samplers" => "top_k, temp",
                "logit-bias" => "5=1",
                "stop" => "END",
                "ignore-eos" => "on",
                "loop-guard" => "off",
                _ => "0.5",
            };
            let mut settings = AnswerSettings::default();
            let table = |settings: &AnswerSettings| settings.table(&settings.sampling.given.sampling(false));
            let before = table(&settings);
            settings.set("/set", key, value).expect(key);
            let changed = table(&settings);
            let differing: Vec<_> =
                before.iter().zip(&changed).filter(|(a, b)| a != b).map(|(a, _)| &a[0]).collect();
            assert_eq!(differing, [key], "{key}");
            settings.set("/set", key, "default").expect(key);
            assert_eq!(table(&settings), before, "{key}");
        }
    }

    #[test]
    fn what_is_refused_changes_nothing_and_says_why() {
        let mut settings = AnswerSettings::default();
        let mut check = |key: &str, value: &str, message: &str| {
            let error = settings.set("/set", key, value).expect_err(key);
            let said = format!("{error} {}", error.hint_text().unwrap_or_default());
            assert!(said.contains(message), "{said}");
        };
        check("temperature", "3", "3 is not in [0, 2]");
        check("temperature", "warm", "/set temperature: \"warm\" is not a number");
        check("top-k", "0", "`all` keeps all tokens");
        check("temprature", "1", "did you mean temperature?");
        check("ignore-eos", "maybe", "unknown value \"maybe\" (on, off)");
        check("max-tokens", "0", "must be at least 1");
        check("loop-guard", "1", "unknown value \"1\" (on, off, or 16 to 100000 tokens)");
        assert_eq!(settings.sampling.given.numbers.temperature, None);
        settings.set("/set", "top_p", "0.9").expect("underscores are fine");
    }
}
