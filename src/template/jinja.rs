//! A model's own chat template: conversation in, prompt text out, as Hugging Face's `apply_chat_template` does it.
//!
//! A template inside a model file is untrusted: it sees nothing but the conversation, and [`super::environment`] bounds its
//! source size, steps, memory, nesting and output. It can fail in every way that [`TemplateError`] names, never panic.

use std::sync::Arc;

use minijinja::{Environment, UndefinedBehavior};
use serde_json::Value as Json;

use super::clock::DateTime;
use super::environment::{NAME, compile, run};
use super::variables::{
    ADAPTATIONS, Adaptation, Variables, add_functions, complete_tools, conversation_variables,
    describe_parameters, list_no_tools, move_content_to_reasoning, reasoning_names, spell_arguments_out,
};
use super::{Conversation, Role, TemplateError, source};

/// The special tokens of a tokenizer, as text; seen by templates as `bos_token` and `eos_token`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    pub bos: Option<String>,
    pub eos: Option<String>,
}

/// Options of one rendering.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// End with the header of an assistant turn, so that the model answers.
    pub add_generation_prompt: bool,
    /// The last message is an unfinished assistant turn: the text ends right behind its content, without the
    /// template's turn end, and without a generation prompt.
    pub continue_final_message: bool,
    /// The time that `strftime_now` prints.
    pub now: DateTime,
}

/// A compiled chat template. Cloning shares it.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    inner: Arc<CompiledTemplate>,
}

#[derive(Debug)]
struct CompiledTemplate {
    env: Environment<'static>,
    specials: Variables,
    source: String,
    /// By which names templates get the reasoning of a message.
    reasoning_names: &'static [&'static str],
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// `Syntax` with the line at fault, `TooExpensive` when the source itself is beyond a bound.
    pub fn new(source: &str, specials: SpecialTokens) -> Result<Self, TemplateError> {
        let env = compile(source, source::syntax(true)?, UndefinedBehavior::Lenient)?;
        let named = [("bos_token", specials.bos), ("eos_token", specials.eos)].into_iter();
        let specials =
            named.filter_map(|(name, token)| Some((name.to_owned(), Json::String(token?)))).collect();
        let (reasoning_names, source) = (reasoning_names(source), source.to_owned());
        Ok(Self { inner: Arc::new(CompiledTemplate { env, specials, source, reasoning_names }) })
    }

    /// The template as it was given.
    pub fn source(&self) -> &str {
        &self.inner.source
    }

    /// Returns whether the template has this word between quotes, as templates that distinguish roles do.
    pub fn has_literal(&self, word: &str) -> bool {
        ['\'', '"'].iter().any(|quote| self.inner.source.contains(&format!("{quote}{word}{quote}")))
    }

    /// Returns whether the template reads a variable of this name somewhere. minijinja takes one that gets a default value
    /// (`set x = x | default(true)`, as in Nemotron's and Laguna's) for the template's own.
    pub fn reads(&self, variable: &str) -> bool {
        let template = self.inner.env.get_template(NAME);
        let gets_default = |how: &&str| self.source().contains(&format!("set {variable} = {variable} {how}"));
        template.is_ok_and(|template| template.undeclared_variables(false).contains(variable))
            || ["if ", "| default("].iter().any(gets_default)
    }

    /// Renders a conversation. Where the template fails on tool arguments as a mapping, or escapes them, it gets them as JSON
    /// text; where it fails on messages without content, their content is none or empty; where it fails on tools without a
    /// description or parameters, they have empty ones; where it fails without tools, it gets an empty list.
    ///
    /// # Errors
    /// `Raised` when the template refuses the conversation, `Render` when it fails on it, `TooExpensive` when it hits
    /// a bound.
    pub fn render(
        &self,
        conversation: &Conversation,
        options: &RenderOptions,
    ) -> Result<String, TemplateError> {
        let mut variables = conversation_variables(conversation, self.inner.reasoning_names);
        let prompt = options.add_generation_prompt && !options.continue_final_message;
        variables.insert("add_generation_prompt".to_owned(), Json::Bool(prompt));
        let mut text = self.render_variables(&variables, options.now).or_else(|error| match error {
            TemplateError::Render { .. } => self.render_adapted(&variables, options.now).ok_or(error),
            TemplateError::Raised { .. } => {
                self.render_changed(&variables, &[move_content_to_reasoning], options.now).ok_or(error)
            }
            error => Err(error),
        })?;
        if let Some(unescaped) = self.without_escapes(&variables, options.now, &text) {
            text = unescaped;
        }
        if options.continue_final_message {
            cut_behind_final_message(&mut text, conversation)?;
        }
        Ok(text)
    }

    /// Renders with the conversation in the other forms that templates expect; the first that succeeds.
    fn render_adapted(&self, variables: &Variables, now: DateTime) -> Option<String> {
        const OF_TOOLS: [&[Adaptation]; 5] = [
            &[],
            &[complete_tools],
            &[describe_parameters],
            &[complete_tools, describe_parameters],
            &[list_no_tools],
        ];
        let mut variables = variables.clone();
        add_functions(&mut variables, now);
        OF_TOOLS.iter().find_map(|of_tools| {
            ADAPTATIONS
                .iter()
                .find_map(|changes| self.render_changed(&variables, &[of_tools, *changes].concat(), now))
        })
    }

    /// Renders with all of these changes, if each of them changes something: with one left out it is another form.
    fn render_changed(&self, variables: &Variables, changes: &[Adaptation], now: DateTime) -> Option<String> {
        let mut adapted = variables.clone();
        let num_changed = changes.iter().filter(|change| change(&mut adapted)).count();
        (num_changed == changes.len()).then(|| self.render_variables(&adapted, now).ok()).flatten()
    }

    /// The rendering with tool arguments as JSON text, where that has fewer quotes escaped for HTML. Mistral's own templates
    /// mark arguments as safe and add other text to them, which Jinja then escapes: no model was trained on that.
    fn without_escapes(&self, variables: &Variables, now: DateTime, text: &str) -> Option<String> {
        const QUOTE: &str = "&#34;";
        let num_escaped = text.matches(QUOTE).count();
        if num_escaped == 0 {
            return None;
        }
        let mut adapted = variables.clone();
        spell_arguments_out(&mut adapted).then_some(())?;
        let spelt = self.render_variables(&adapted, now).ok()?;
        (spelt.matches(QUOTE).count() < num_escaped).then_some(spelt)
    }

    /// Renders with variables given by name, on top of the special tokens: the raw form of [`Self::render`].
    ///
    /// # Errors
    /// As [`Self::render`].
    pub fn render_variables(&self, variables: &Variables, now: DateTime) -> Result<String, TemplateError> {
        let mut all = self.inner.specials.clone();
        all.extend(variables.iter().map(|(name, value)| (name.clone(), value.clone())));
        run(&self.inner.env, &all, now)
    }
}

/// Cuts a rendering behind the last message's content, as transformers does for `continue_final_message`: at the last
/// place where the content stands, with its outer white space given up when the template trims it.
fn cut_behind_final_message(text: &mut String, conversation: &Conversation) -> Result<(), TemplateError> {
    let last = conversation.messages.last().filter(|message| message.role == Role::Assistant);
    let content = last.and_then(|message| message.content.as_ref()?.texts().pop()).unwrap_or_default();
    let wanted = content.trim();
    let found = if wanted.is_empty() { None } else { text.rfind(wanted) };
    let Some(at) = found else {
        let message =
            "the last message cannot be continued: its content is not in the rendered text".to_owned();
        return Err(TemplateError::Render { line: 1, message });
    };
    let end = at + wanted.len();
    let trailing = &content[content.trim_end().len()..];
    let keep = if text[end..].starts_with(trailing) { end + trailing.len() } else { end };
    text.truncate(keep);
    Ok(())
}

#[cfg(test)]
mod tests;
