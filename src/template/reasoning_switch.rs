//! The reasoning that a request asks for, and the template variables that tell the model.
//!
//! Invariant: a variable that is set already keeps its value, because the client may set variables by name.

use serde_json::{Map, Value};

/// The variables by which chat templates switch reasoning on and off.
pub const THINKING_SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];

/// The variable that takes an effort in words.
const EFFORT: &str = "reasoning_effort";

/// The reasoning that a request asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reasoning {
    /// `None` leaves it to the template.
    pub is_on: Option<bool>,
    pub effort: Option<Effort>,
}

/// Amount of reasoning, the least first, in the order of their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    None,
    Minimal,
    Low,
    Medium,
    High,
    ExtraHigh,
    Max,
}

/// The variables and words that a chat template knows.
#[derive(Clone, Copy)]
pub struct TemplateVariables<'a> {
    /// Returns whether it reads a variable of this name.
    pub reads: &'a dyn Fn(&str) -> bool,
    /// Returns whether this word is written out in it.
    pub says: &'a dyn Fn(&str) -> bool,
    /// True if reasoning in its markup can be ended in the model's place.
    pub ends_reasoning: bool,
}

/// The parts of a [`Reasoning`] that no variable of the template expresses. Asking a model that cannot reason for no reasoning
/// asks for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unexpressed {
    pub switch: bool,
    pub effort: bool,
}

impl From<bool> for Reasoning {
    fn from(is_on: bool) -> Self {
        Self { is_on: Some(is_on), effort: None }
    }
}

impl Reasoning {
    /// Sets the variables that the template reads.
    pub fn set(self, template: TemplateVariables<'_>, variables: &mut Map<String, Value>) -> Unexpressed {
        let known: Vec<&str> = THINKING_SWITCHES.into_iter().filter(|name| (template.reads)(name)).collect();
        let switch = |is_on: bool, variables: &mut Map<String, Value>| {
            for name in &known {
                variables.entry(*name).or_insert(is_on.into());
            }
            !known.is_empty()
        };
        let is_switched = self.is_on.is_none_or(|is_on| switch(is_on, variables) || !is_on);
        let Some(effort) = self.effort else {
            return Unexpressed { switch: !is_switched, effort: false };
        };
        let mut is_effort_set = switch(effort.is_reasoning(), variables) || !effort.is_reasoning();
        if (template.reads)(EFFORT) {
            variables.entry(EFFORT).or_insert(effort.word_for(template).into());
            is_effort_set = true;
        }
        Unexpressed { switch: !is_switched, effort: !is_effort_set }
    }

    /// Returns whether variables of a template switch reasoning off.
    pub fn is_off_in(variables: &Map<String, Value>) -> bool {
        THINKING_SWITCHES.iter().any(|name| variables.get(*name) == Some(&Value::Bool(false)))
    }
}

impl Effort {
    pub const ALL: [Self; 7] =
        [Self::None, Self::Minimal, Self::Low, Self::Medium, Self::High, Self::ExtraHigh, Self::Max];

    /// Returns the effort's name in requests.
    pub fn as_str(self) -> &'static str {
        ["none", "minimal", "low", "medium", "high", "xhigh", "max"][self as usize]
    }

    fn is_reasoning(self) -> bool {
        !matches!(self, Self::None | Self::Minimal)
    }

    /// Returns a word that the model knows: one that its template writes out, or one of the three that all know.
    fn word_for(self, template: TemplateVariables<'_>) -> &'static str {
        match self {
            known if (template.says)(known.as_str()) => known.as_str(),
            Self::None | Self::Minimal => Self::Low.as_str(),
            Self::ExtraHigh | Self::Max => Self::High.as_str(),
            other => other.as_str(),
        }
    }
}
