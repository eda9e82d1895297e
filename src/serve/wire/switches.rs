//! Variables of the chat template that requests set: by name in `chat_template_kwargs`, and in the words of
//! several vendors for how much a model is to think.
//!
//! Invariants: the client's own value of a variable counts before one that follows from another field; a
//! variable that the template never reads is reported as without effect; asking a model that cannot think for
//! no thinking asks for nothing.

use serde_json::{Map, Value};

use super::Fields;
use llmctl_template::{Effort, Reasoning, TemplateVariables};

/// Reasoning that a request asks for, each part with the field that says so.
#[derive(Debug, Default, PartialEq)]
pub struct Wish {
    pub thinks: Option<(bool, &'static str)>,
    pub effort: Option<(Effort, &'static str)>,
    /// Most tokens of reasoning; 0 asks for none.
    pub budget: Option<(u64, &'static str)>,
}

/// Template variables of a request, and its wishes for the reasoning in the answer.
pub struct Switches {
    pub kwargs: Map<String, Value>,
    pub reasoning: AnswerReasoning,
}

/// The reasoning in an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerReasoning {
    pub is_shown: bool,
    /// Tokens of reasoning after which it is ended.
    pub budget: Option<usize>,
}

/// All fields that set variables. `default_thinks` is what holds where the request says nothing.
pub fn switches(
    fields: &mut Fields<'_>,
    template: TemplateVariables<'_>,
    default_thinks: Option<bool>,
) -> Switches {
    let mut kwargs = fields.object("chat_template_kwargs").unwrap_or_default();
    let mut is_shown = shown_reasoning(fields, &mut kwargs, template);
    for unread in unread(&kwargs, template) {
        kwargs.shift_remove(&unread);
        fields.ignored(&format!("chat_template_kwargs.{unread}"));
    }
    let wish = wish(fields, &mut is_shown);
    let budget = fulfil(fields, &mut kwargs, template, wish, default_thinks);
    verbosity(fields, &mut kwargs, template);
    Switches { kwargs, reasoning: AnswerReasoning { is_shown, budget } }
}

/// Sets the variables that a wish asks for, unless `kwargs` has them. Returns the limit on the reasoning. Fields that do neither
/// are reported as without effect.
pub fn fulfil(
    fields: &mut Fields<'_>,
    kwargs: &mut Map<String, Value>,
    template: TemplateVariables<'_>,
    wish: Wish,
    default_thinks: Option<bool>,
) -> Option<usize> {
    let off = wish.budget.filter(|(tokens, _)| *tokens == 0).map(|(_, name)| (false, name));
    let wish = Wish { thinks: wish.thinks.or(off), ..wish };
    let (is_on, effort) = (wish.thinks.map(|(thinks, _)| thinks), wish.effort.map(|(effort, _)| effort));
    let unexpressed = Reasoning { is_on, effort }.set(template, kwargs);
    if let Some((_, name)) = wish.thinks.filter(|_| unexpressed.switch) {
        fields.ignored(name);
    }
    if let Some((_, name)) = wish.effort.filter(|_| unexpressed.effort) {
        fields.ignored(name);
    }
    Reasoning { is_on: default_thinks, effort: None }.set(template, kwargs);
    let (budget, name) = wish.budget.filter(|(tokens, _)| *tokens > 0)?;
    if !template.ends_reasoning {
        fields.ignored(name);
    }
    template.ends_reasoning.then_some(usize::try_from(budget).unwrap_or(usize::MAX))
}

fn unread(kwargs: &Map<String, Value>, template: TemplateVariables<'_>) -> Vec<String> {
    let is_unread = |name: &&String| !(template.reads)(name);
    kwargs.keys().filter(is_unread).cloned().collect()
}

/// The reference's switch, which it keeps among the template's variables, and vLLM's beside them.
fn shown_reasoning(
    fields: &mut Fields<'_>,
    kwargs: &mut Map<String, Value>,
    template: TemplateVariables<'_>,
) -> bool {
    const NAME: &str = "return_reasoning";
    let beside = fields.flag("include_reasoning").unwrap_or(true);
    if !kwargs.contains_key(NAME) || (template.reads)(NAME) {
        return beside;
    }
    match kwargs.shift_remove(NAME) {
        Some(Value::Bool(shows)) => shows && beside,
        _ => {
            fields.wrong("chat_template_kwargs", &format!(".{NAME} is neither true nor false"));
            beside
        }
    }
}

/// Reads the fields of several vendors.
fn wish(fields: &mut Fields<'_>, is_shown: &mut bool) -> Wish {
    let mut wish = Wish {
        effort: effort(fields, "reasoning_effort").map(|effort| (effort, "reasoning_effort")),
        thinks: fields.flag("enable_thinking").map(|thinks| (thinks, "enable_thinking")),
        budget: ["thinking_budget", "thinking_token_budget"]
            .into_iter()
            .fold(None, |budget, name| budget.or(fields.count(name).map(|count| (count, name)))),
    };
    if let Some(mut inner) = fields.nested("reasoning") {
        let effort = effort(&mut inner, "effort").map(|effort| (effort, "reasoning.effort"));
        let thinks = inner.flag("enabled").map(|thinks| (thinks, "reasoning.enabled"));
        (wish.effort, wish.thinks) = (wish.effort.or(effort), wish.thinks.or(thinks));
        let budget = inner.count("max_tokens").map(|count| (count, "reasoning.max_tokens"));
        wish.budget = wish.budget.or(budget);
        if inner.flag("exclude") == Some(true) {
            *is_shown = false;
        }
        for name in ["summary", "generate_summary"] {
            inner.hint(name);
        }
        inner.end();
    }
    if let Some(mut inner) = fields.nested("thinking") {
        match inner.text("type").as_deref() {
            Some("disabled") => wish.thinks = wish.thinks.or(Some((false, "thinking"))),
            Some("enabled") => wish.thinks = wish.thinks.or(Some((true, "thinking"))),
            Some("adaptive" | "auto") | None => {}
            Some(_) => inner.out_of_range("type", "is none of enabled, disabled, adaptive and auto"),
        }
        let budget = inner.count("budget_tokens").map(|count| (count, "thinking.budget_tokens"));
        wish.budget = wish.budget.or(budget);
        inner.end();
    }
    ollama(fields, &mut wish);
    wish
}

/// Reads Ollama's `think`: whether to think, or how much.
pub fn ollama(fields: &mut Fields<'_>, wish: &mut Wish) {
    const NAME: &str = "think";
    if fields.is_text(NAME) {
        wish.effort = wish.effort.or(effort(fields, NAME).map(|effort| (effort, NAME)));
    } else if let Some(thinks) = fields.flag(NAME) {
        wish.thinks = wish.thinks.or(Some((thinks, NAME)));
    }
}

/// Reads an effort by its name.
pub fn effort(fields: &mut Fields<'_>, name: &str) -> Option<Effort> {
    let given = fields.text(name)?;
    let known = Effort::ALL.into_iter().find(|known| known.as_str() == given);
    if known.is_none() {
        fields.out_of_range(name, &format!("is none of {}", Effort::ALL.map(Effort::as_str).join(", ")));
    }
    known
}

/// OpenAI's wish for short or long answers, for the templates that know it.
fn verbosity(fields: &mut Fields<'_>, kwargs: &mut Map<String, Value>, template: TemplateVariables<'_>) {
    const NAME: &str = "verbosity";
    let Some(value) = fields.text(NAME) else { return };
    if !["low", "medium", "high"].contains(&value.as_str()) {
        fields.out_of_range(NAME, "is none of low, medium, high");
    } else if (template.reads)(NAME) {
        kwargs.entry(NAME).or_insert(value.into());
    } else {
        fields.ignored(NAME);
    }
}
