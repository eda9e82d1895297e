//! Prompt files: the user's text with variables, filled by `--var key=value`.
//!
//! The same engine as for chat templates, but strict: a variable that was not given is an error that names it, and one
//! that was given in vain is reported. White space is kept as it is written, and nothing is escaped.

use std::collections::{BTreeMap, BTreeSet};

use minijinja::{Environment, UndefinedBehavior};
use serde_json::{Map, Value as Json};

use super::clock::DateTime;
use super::{TemplateError, environment, source};

/// A compiled prompt file.
#[derive(Debug)]
pub struct PromptTemplate {
    env: Environment<'static>,
    variables: BTreeSet<String>,
}

/// A filled prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedPrompt {
    pub text: String,
    /// Variables that were given but that the file nowhere reads, sorted.
    pub unused: Vec<String>,
}

impl PromptTemplate {
    /// Compiles a prompt file's text. Text without tags is a template too, and renders to itself.
    ///
    /// # Errors
    /// `Syntax` with the line at fault, `TooExpensive` when the text itself is beyond a bound.
    pub fn new(text: &str) -> Result<Self, TemplateError> {
        let env = environment::compile(text, source::syntax(false)?, UndefinedBehavior::Strict)?;
        let mut variables: BTreeSet<String> = BTreeSet::new();
        for (_, template) in env.templates() {
            variables.extend(template.undeclared_variables(false));
        }
        for (name, _) in env.globals() {
            variables.remove(name);
        }
        Ok(Self { env, variables })
    }

    /// The variables that the file reads, sorted. One that it only tests (`is defined`) is among them.
    pub fn variables(&self) -> impl Iterator<Item = &str> {
        self.variables.iter().map(String::as_str)
    }

    /// Fills the variables in.
    ///
    /// # Errors
    /// `UndefinedVariables` naming what is missing and what was given; else as a chat template's rendering.
    pub fn render(&self, vars: &BTreeMap<String, String>) -> Result<RenderedPrompt, TemplateError> {
        let text = self.fill(vars).map_err(|error| self.explain(error, vars))?;
        let unused = vars.keys().filter(|name| !self.variables.contains(*name)).cloned().collect();
        Ok(RenderedPrompt { text, unused })
    }

    fn fill(&self, vars: &BTreeMap<String, String>) -> Result<String, TemplateError> {
        let given: Map<String, Json> =
            vars.iter().map(|(name, value)| (name.clone(), Json::String(value.clone()))).collect();
        environment::run(&self.env, &given, DateTime::local_now())
    }

    /// Those of the missing variables without which the file cannot be filled in, whatever the others are: one that is
    /// only tested (`is defined`) is not among them.
    fn required(&self, missing: &[String], vars: &BTreeMap<String, String>) -> Vec<String> {
        let fails_without = |name: &&String| {
            let others =
                missing.iter().filter(|other| other != name).map(|other| (other.clone(), String::new()));
            self.fill(&vars.clone().into_iter().chain(others).collect()).is_err()
        };
        missing.iter().filter(fails_without).cloned().collect()
    }

    /// A failure while variables are missing is taken to be theirs: strict mode fails on nothing else that is plain.
    fn explain(&self, error: TemplateError, vars: &BTreeMap<String, String>) -> TemplateError {
        let missing: Vec<String> =
            self.variables.iter().filter(|name| !vars.contains_key(*name)).cloned().collect();
        match error {
            TemplateError::Render { .. } if !missing.is_empty() => {
                let required = self.required(&missing, vars);
                let missing = if required.is_empty() { missing } else { required };
                TemplateError::UndefinedVariables { missing, known: vars.keys().cloned().collect() }
            }
            error => error,
        }
    }
}

/// Compiles and fills a prompt file in one go.
///
/// # Errors
/// As [`PromptTemplate::new`] and [`PromptTemplate::render`].
pub fn render_prompt(text: &str, vars: &BTreeMap<String, String>) -> Result<RenderedPrompt, TemplateError> {
    PromptTemplate::new(text)?.render(vars)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn filled(text: &str, pairs: &[(&str, &str)]) -> Result<String, TemplateError> {
        render_prompt(text, &vars(pairs)).map(|prompt| prompt.text)
    }

    #[test]
    fn text_is_kept_and_variables_are_filled() {
        let (source, given) =
            ("Translate to {{ lang }}:\n  <{{ text }}>\n", [("lang", "fr"), ("text", "a & b")]);
        assert_eq!(filled(source, &given).as_deref(), Ok("Translate to fr:\n  <a & b>\n"));
        assert_eq!(filled("plain\n\n", &[]).as_deref(), Ok("plain\n\n"));
        assert_eq!(filled("", &[]).as_deref(), Ok(""));
    }

    #[test]
    fn a_missing_variable_is_named_with_what_was_given() {
        let error =
            render_prompt("{{ a }}{{ b }}", &vars(&[("b", "1"), ("c", "2")])).expect_err("a is missing");
        let (missing, known) = (vec!["a".to_owned()], vec!["b".to_owned(), "c".to_owned()]);
        assert_eq!(error, TemplateError::UndefinedVariables { missing, known });
        assert_eq!(error.to_string(), "undefined variable `a` (given: `b`, `c`)");
    }

    #[test]
    fn a_variable_that_is_only_tested_is_not_called_missing() {
        let source = "{{ a }}{% if b is defined %} {{ b }}{% endif %}{{ c }}";
        let error = render_prompt(source, &vars(&[])).expect_err("a and c are missing");
        let missing = vec!["a".to_owned(), "c".to_owned()];
        assert_eq!(error, TemplateError::UndefinedVariables { missing, known: vec![] });
    }

    #[test]
    fn a_missing_variable_is_an_error_wherever_it_is_used() {
        for source in [
            "{{ a | upper }}",
            "{% if a %}x{% endif %}",
            "{{ 'x' ~ a }}",
            "{% for i in a %}{% endfor %}",
            "{{ a == 'x' }}",
            "{{ a.b }}",
        ] {
            assert!(render_prompt(source, &vars(&[])).is_err(), "{source}");
        }
        for source in ["{{ a | default('x') }}", "{% if a is defined %}{{ a }}{% else %}x{% endif %}"] {
            assert_eq!(filled(source, &[]).as_deref(), Ok("x"), "{source}");
        }
    }

    #[test]
    fn unused_variables_are_reported() {
        let rendered = render_prompt("{{ a }}", &vars(&[("a", "1"), ("b", "2")])).expect("a is given");
        assert_eq!(rendered.unused, ["b"]);
    }

    #[test]
    fn needed_variables_are_listed_without_functions() {
        let template = PromptTemplate::new("{% for i in range(n | int) %}{{ i }}{{ text }}{% endfor %}")
            .expect("a template");
        assert_eq!(template.variables().collect::<Vec<_>>(), ["n", "text"]);
    }
}
