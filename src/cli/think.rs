//! `--think` and `/think`: whether the model reasons, whether the reasoning is shown, and how long it may be.
//!
//! The template switches reasoning: most templates that know it read a variable. A template that reads none
//! cannot be asked. If its model always reasons, the reasoning can still be hidden and ended. With neither,
//! every setting is refused.

use serde_json::{Map, Value};

use crate::cli::error::CommandError;
use crate::cli::terminal::report::counted;
use llmctl_engine::ChatTokenizer;
use llmctl_template::{Reasoning, ReasoningFormat};

/// The user's setting of reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Think {
    pub reasoning: Reasoning,
    pub is_shown: bool,
    /// Tokens of reasoning before it is ended.
    pub budget: Option<usize>,
}

impl Default for Think {
    fn default() -> Self {
        Self { reasoning: Reasoning::default(), is_shown: true, budget: None }
    }
}

/// A template's support of reasoning.
#[derive(Debug, Clone, PartialEq)]
pub struct Thinking {
    /// The variables that switch it on; empty if the template reads none.
    on: Map<String, Value>,
    /// The variables that switch it off.
    off: Map<String, Value>,
    format: Option<ReasoningFormat>,
    /// A server elsewhere takes the wish, and refuses it if it cannot be fulfilled.
    is_elsewhere: bool,
}

impl Thinking {
    /// Returns the reasoning of a model whose template is not here.
    pub fn elsewhere() -> Self {
        Self { on: Map::new(), off: Map::new(), format: None, is_elsewhere: true }
    }

    pub fn of(chat_tokenizer: &ChatTokenizer) -> Self {
        Self {
            on: chat_tokenizer.reasoning_variables(true.into()),
            off: chat_tokenizer.reasoning_variables(false.into()),
            format: chat_tokenizer.output_markup().reasoning,
            is_elsewhere: false,
        }
    }

    fn has_switch(&self) -> bool {
        !self.on.is_empty()
    }

    fn is_there(&self) -> bool {
        self.is_elsewhere || self.has_switch() || self.format.is_some()
    }
}

fn refused_flag(reason: String) -> CommandError {
    CommandError::usage(format!("--think: {reason}"))
}

const NONE: &str = "this model's template has no thinking";

impl Think {
    /// # Errors
    /// A description of the wrong value; the caller names the flag or command.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut think = Self::default();
        think.change(text)?;
        Ok(think)
    }

    /// Reads `--think`.
    ///
    /// # Errors
    /// `Usage` for a wrong value.
    pub fn of_flag(given: Option<&str>) -> Result<Self, CommandError> {
        given.map_or(Ok(Self::default()), Self::parse).map_err(refused_flag)
    }

    /// As [`Self::check`], for `--think`.
    pub fn check_flag(&self, thinking: &Thinking) -> Result<(), CommandError> {
        self.check(thinking).map_err(refused_flag)
    }

    /// Takes `on`, `off`, `hide`, `show`, or a budget in tokens as `N` or `budget N`.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn change(&mut self, text: &str) -> Result<(), String> {
        let budget =
            |text: &str| text.trim_start_matches([' ', '=']).parse::<usize>().ok().filter(|count| *count > 0);
        match text.trim() {
            "on" => *self = Self { reasoning: true.into(), ..Self::default() },
            "off" => *self = Self { reasoning: false.into(), ..Self::default() },
            "hide" => self.is_shown = false,
            "show" => self.is_shown = true,
            other => {
                let count = budget(other.strip_prefix("budget").unwrap_or(other));
                let count = count.ok_or_else(|| {
                    format!("unknown value {other:?} (on, off, hide, show, or a budget in tokens: 500)")
                })?;
                (self.reasoning, self.budget) = (true.into(), Some(count));
            }
        }
        Ok(())
    }

    /// Checks that the template can do what is wanted.
    ///
    /// # Errors
    /// The setting that the template does not support.
    pub fn check(&self, thinking: &Thinking) -> Result<(), String> {
        if *self == Self::default() || thinking.is_elsewhere {
            return Ok(());
        }
        if !thinking.is_there() {
            // Without thinking there is none to turn off or to hide.
            return if self.reasoning.is_on == Some(true) { Err(NONE.to_owned()) } else { Ok(()) };
        }
        if self.reasoning.is_on == Some(false) && !thinking.has_switch() {
            return Err("this model's template cannot turn thinking off (hide hides it)".to_owned());
        }
        if self.budget.is_some() && thinking.format.and_then(ReasoningFormat::closing).is_none() {
            return Err("this model's thinking cannot be ended, so it takes no budget".to_owned());
        }
        Ok(())
    }

    /// Returns the variables that the template gets.
    pub fn variables(&self, thinking: &Thinking) -> Map<String, Value> {
        match self.reasoning.is_on {
            None => Map::new(),
            Some(true) => thinking.on.clone(),
            Some(false) => thinking.off.clone(),
        }
    }

    /// In words.
    pub fn spoken(&self, thinking: &Thinking) -> String {
        if !thinking.is_there() {
            return NONE.to_owned();
        }
        let is_on = match self.reasoning.is_on {
            None => "thinking: the template's default",
            Some(true) => "thinking: on",
            Some(false) => return "thinking: off".to_owned(),
        };
        let shown = if self.is_shown { "shown" } else { "hidden" };
        let budget =
            self.budget.map_or(String::new(), |count| format!(", at most {}", counted(count, "token")));
        format!("{is_on}, {shown}{budget}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A template that reads one switch, or none.
    fn of(switch: Option<&str>, format: Option<ReasoningFormat>) -> Thinking {
        let variables =
            |is_on: bool| switch.map(|name| (name.to_owned(), is_on.into())).into_iter().collect();
        Thinking { on: variables(true), off: variables(false), format, is_elsewhere: false }
    }

    const ASKED: Option<&str> = Some("enable_thinking");

    #[test]
    fn what_is_said_is_what_happens() {
        let mut think = Think::default();
        let thinking = of(ASKED, Some(ReasoningFormat::Think));
        assert_eq!(think.spoken(&thinking), "thinking: the template's default, shown");
        let mut check = |text: &str, expected: &str| {
            think.change(text).expect(text);
            think.check(&thinking).expect(text);
            assert_eq!(think.spoken(&thinking), expected);
        };
        check("hide", "thinking: the template's default, hidden");
        check("budget 200", "thinking: on, hidden, at most 200 tokens");
        check("show", "thinking: on, shown, at most 200 tokens");
        check("300", "thinking: on, shown, at most 300 tokens");
        check("budget=1", "thinking: on, shown, at most 1 token");
        check("off", "thinking: off");
        check("on", "thinking: on, shown");
        for bad in ["", "maybe", "budget", "budget 0", "budget x", "0", "-1"] {
            let error = Think::parse(bad).expect_err(bad);
            assert_eq!(
                error,
                format!("unknown value {bad:?} (on, off, hide, show, or a budget in tokens: 500)")
            );
        }
    }

    #[test]
    fn a_template_is_told_only_what_it_reads() {
        let variables =
            |think: &str, switch, format| Think::parse(think).expect(think).variables(&of(switch, format));
        let format = Some(ReasoningFormat::Think);
        assert_eq!(variables("off", ASKED, format)["enable_thinking"], false);
        assert_eq!(variables("budget 9", ASKED, format)["enable_thinking"], true);
        assert!(variables("on", None, format).is_empty());
        assert!(variables("hide", ASKED, format).is_empty());
    }

    #[test]
    fn without_thinking_only_a_wish_for_it_is_refused() {
        let check = |text: &str, switch, format| Think::parse(text).expect(text).check(&of(switch, format));
        let refused = || Err(NONE.to_owned());
        for (wish, expected) in
            [("on", refused()), ("budget 9", refused()), ("off", Ok(())), ("hide", Ok(()))]
        {
            assert_eq!(check(wish, None, None), expected, "{wish}");
        }
        assert_eq!(Think::default().spoken(&of(None, None)), NONE);
        assert_eq!(Think::default().check(&of(None, None)), Ok(()));
        let always = Some(ReasoningFormat::Think);
        assert_eq!(check("hide", None, always), Ok(()));
        assert_eq!(check("budget 9", None, always), Ok(()));
        assert!(check("off", None, always).is_err_and(|error| error.contains("cannot turn thinking off")));
        assert_eq!(check("budget 9", ASKED, Some(ReasoningFormat::Harmony)), Ok(()));
        assert!(check("budget 9", ASKED, Some(ReasoningFormat::Atem)).is_err());
    }
}
