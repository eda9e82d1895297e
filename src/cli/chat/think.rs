//! Reasoning: whether the model does it, whether it is shown, and how much of it there may be.
//!
//! Whether is the template's business: the variable `enable_thinking`, which most templates that know reasoning read. A
//! template that does not read it cannot be asked; one whose model always thinks has markup for it all the same, and what it
//! thinks can be hidden and ended. One with neither has no thinking, and every wish about it is refused in the same words.

use serde_json::{Map, Value};

use super::counted;
use crate::template::ReasoningFormat;

/// The variable that templates read.
const VARIABLE: &str = "enable_thinking";

/// What the user wants of reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Think {
    /// `None` leaves it to the template.
    pub is_on: Option<bool>,
    pub is_shown: bool,
    /// Tokens of reasoning before it is ended.
    pub budget: Option<usize>,
}

impl Default for Think {
    fn default() -> Self {
        Self { is_on: None, is_shown: true, budget: None }
    }
}

/// What a template can do about reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thinking {
    /// It reads the variable.
    is_asked: bool,
    format: Option<ReasoningFormat>,
}

impl Thinking {
    pub fn of(template: &str, format: Option<ReasoningFormat>) -> Self {
        Self { is_asked: template.contains(VARIABLE), format }
    }

    pub fn is_there(self) -> bool {
        self.is_asked || self.format.is_some()
    }
}

const NONE: &str = "this model's template has no thinking";

impl Think {
    /// # Errors
    /// What is wrong with the value, for whoever knows where it comes from.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut think = Self::default();
        think.change(text)?;
        Ok(think)
    }

    /// Takes `on`, `off`, `hide`, `show` or `budget N`.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn change(&mut self, text: &str) -> Result<(), String> {
        let budget =
            |text: &str| text.trim_start_matches([' ', '=']).parse::<usize>().ok().filter(|count| *count > 0);
        match text.trim() {
            "on" => *self = Self { is_on: Some(true), ..Self::default() },
            "off" => *self = Self { is_on: Some(false), ..Self::default() },
            "hide" => self.is_shown = false,
            "show" => self.is_shown = true,
            other => {
                let count = other.strip_prefix("budget").and_then(budget);
                let count = count
                    .ok_or_else(|| format!("unknown setting {other:?} (on, off, hide, show, budget N)"))?;
                (self.is_on, self.budget) = (Some(true), Some(count));
            }
        }
        Ok(())
    }

    /// Whether the template can do what is wanted.
    ///
    /// # Errors
    /// What it cannot.
    pub fn check(&self, thinking: Thinking) -> Result<(), String> {
        if *self == Self::default() {
            return Ok(());
        }
        if !thinking.is_there() {
            return Err(NONE.to_owned());
        }
        if self.is_on == Some(false) && !thinking.is_asked {
            return Err("this model's template cannot turn thinking off (/think hide hides it)".to_owned());
        }
        if self.budget.is_some() && thinking.format.and_then(ReasoningFormat::closing).is_none() {
            return Err("this model's thinking cannot be ended, so it takes no budget".to_owned());
        }
        Ok(())
    }

    /// What the template is told.
    pub fn variables(&self, thinking: Thinking) -> Map<String, Value> {
        let is_on = self.is_on.filter(|_| thinking.is_asked);
        is_on.map(|is_on| (VARIABLE.to_owned(), is_on.into())).into_iter().collect()
    }

    /// In words.
    pub fn spoken(&self, thinking: Thinking) -> String {
        if !thinking.is_there() {
            return NONE.to_owned();
        }
        let is_on = match self.is_on {
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

    const ASKED: &str = "{% if enable_thinking %}";

    #[test]
    fn what_is_said_is_what_happens() {
        let mut think = Think::default();
        let thinking = Thinking::of(ASKED, Some(ReasoningFormat::Think));
        assert_eq!(think.spoken(thinking), "thinking: the template's default, shown");
        let mut check = |text: &str, expected: &str| {
            think.change(text).expect(text);
            think.check(thinking).expect(text);
            assert_eq!(think.spoken(thinking), expected);
        };
        check("hide", "thinking: the template's default, hidden");
        check("budget 200", "thinking: on, hidden, at most 200 tokens");
        check("show", "thinking: on, shown, at most 200 tokens");
        check("budget=1", "thinking: on, shown, at most 1 token");
        check("off", "thinking: off");
        check("on", "thinking: on, shown");
        for bad in ["", "maybe", "budget", "budget 0", "budget x"] {
            let error = Think::parse(bad).expect_err(bad);
            assert_eq!(error, format!("unknown setting {bad:?} (on, off, hide, show, budget N)"));
        }
    }

    #[test]
    fn a_template_is_told_only_what_it_reads() {
        let variables = |think: &str, template: &str, format| {
            Think::parse(think).expect(think).variables(Thinking::of(template, format))
        };
        let format = Some(ReasoningFormat::Think);
        assert_eq!(variables("off", ASKED, format)["enable_thinking"], false);
        assert_eq!(variables("budget 9", ASKED, format)["enable_thinking"], true);
        assert!(variables("on", "{{ x }}", format).is_empty());
        assert!(variables("hide", ASKED, format).is_empty());
    }

    #[test]
    fn without_thinking_every_wish_is_refused_in_the_same_words() {
        let check = |text: &str, template, format| {
            Think::parse(text).expect(text).check(Thinking::of(template, format))
        };
        for wish in ["on", "off", "hide", "budget 9"] {
            assert_eq!(check(wish, "{{ x }}", None), Err(NONE.to_owned()), "{wish}");
        }
        assert_eq!(Think::default().spoken(Thinking::of("{{ x }}", None)), NONE);
        assert_eq!(Think::default().check(Thinking::of("{{ x }}", None)), Ok(()));
        let always = Some(ReasoningFormat::Think);
        assert_eq!(check("hide", "{{ x }}", always), Ok(()));
        assert_eq!(check("budget 9", "{{ x }}", always), Ok(()));
        assert!(
            check("off", "{{ x }}", always).is_err_and(|error| error.contains("cannot turn thinking off"))
        );
        assert!(check("budget 9", ASKED, Some(ReasoningFormat::Harmony)).is_err());
    }
}
