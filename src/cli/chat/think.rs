//! Reasoning: whether the model does it, whether it is shown, and how much of it there may be.
//!
//! Whether is the template's business: the variable `enable_thinking`, which most templates that know reasoning read. A
//! template that does not read it cannot be asked, and then this is said.

use serde_json::{Map, Value};

use crate::cli::error::CommandError;

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

impl Think {
    /// # Errors
    /// A usage error that says what there is.
    pub fn parse(text: &str) -> Result<Self, CommandError> {
        let mut think = Self::default();
        think.change(text)?;
        Ok(think)
    }

    /// Takes `on`, `off`, `hide` or `budget N`.
    ///
    /// # Errors
    /// A usage error that says what there is.
    pub fn change(&mut self, text: &str) -> Result<(), CommandError> {
        let budget =
            |text: &str| text.trim_start_matches([' ', '=']).parse::<usize>().ok().filter(|count| *count > 0);
        match text.trim() {
            "on" => *self = Self { is_on: Some(true), ..Self::default() },
            "off" => *self = Self { is_on: Some(false), ..Self::default() },
            "hide" => self.is_shown = false,
            "show" => self.is_shown = true,
            other => {
                let count = other.strip_prefix("budget").and_then(budget);
                let Some(count) = count else {
                    let error = CommandError::usage(format!("{other:?} is no way to think"));
                    return Err(error.hint("on, off, hide, show, or budget N with a number of tokens"));
                };
                (self.is_on, self.budget) = (Some(true), Some(count));
            }
        }
        Ok(())
    }

    /// What the template is told.
    ///
    /// # Errors
    /// A usage error when it would not listen.
    pub fn variables(&self, template: &str) -> Result<Map<String, Value>, CommandError> {
        let reads = template.contains(VARIABLE);
        match self.is_on {
            Some(is_on) if reads => Ok([(VARIABLE.to_owned(), is_on.into())].into_iter().collect()),
            Some(false) => Err(CommandError::usage("the model's template cannot turn thinking off")),
            _ => Ok(Map::new()),
        }
    }

    /// In words.
    pub fn spoken(&self) -> String {
        let is_on = match self.is_on {
            None => "as the template has it",
            Some(true) => "on",
            Some(false) => "off",
        };
        let shown = if self.is_shown { "shown" } else { "hidden" };
        let budget = self.budget.map_or(String::new(), |count| format!(", at most {count} tokens"));
        format!("{is_on}, {shown}{budget}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_what_happens() {
        let mut think = Think::default();
        let mut check = |text: &str, expected: &str| {
            think.change(text).expect(text);
            assert_eq!(think.spoken(), expected);
        };
        check("hide", "as the template has it, hidden");
        check("budget 200", "on, hidden, at most 200 tokens");
        check("show", "on, shown, at most 200 tokens");
        check("off", "off, shown");
        check("on", "on, shown");
        for bad in ["", "maybe", "budget", "budget 0", "budget x"] {
            assert!(Think::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_template_that_does_not_listen_is_not_told() {
        let listens = "{% if enable_thinking %}";
        let variables = |think: &str, template: &str| Think::parse(think).expect(think).variables(template);
        assert_eq!(variables("off", listens).expect("read")["enable_thinking"], false);
        assert_eq!(variables("budget 9", listens).expect("read")["enable_thinking"], true);
        assert!(variables("off", "{{ x }}").is_err());
        assert!(variables("on", "{{ x }}").expect("the model may think all the same").is_empty());
        assert!(variables("hide", listens).expect("read").is_empty());
    }
}
