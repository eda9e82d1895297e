//! Output constraints, placed within the markup that the model writes around its answer: reasoning that comes
//! first, and Harmony's messages.
//!
//! Pure but for the compiler's cache. A constraint on the whole text would forbid the model's markup, and the
//! parser would not find the answer in what is left.

use serde_json::{Value, json};

use super::TurnError;
use crate::chat_tokenizer::ChatTokenizer;
use crate::grammar::{Grammar, GrammarCompiler, GrammarSource, between_slashes, prepare_schema};
use llmctl_base::error::{Error, GrammarError, Result};
use llmctl_template::{OutputMarkup, ReasoningFormat};

/// Constraint on an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputConstraint {
    pub source: GrammarSource,
    /// The field or flag that asks for it, which errors name.
    pub param: &'static str,
}

impl OutputConstraint {
    /// Blames an error on this constraint's parameter.
    pub(super) fn blamed(&self) -> impl Fn(Error) -> TurnError + use<> {
        let param = self.param;
        move |error| TurnError::Param { param, error }
    }
}

/// The place of a constrained answer.
#[derive(Clone, Copy)]
pub struct AnswerForm<'a> {
    pub chat_tokenizer: &'a ChatTokenizer,
    /// The markup that the model may write.
    pub output_markup: &'a OutputMarkup,
    pub end: PromptEnd<'a>,
}

/// End of the prompt, behind which the answer begins.
#[derive(Clone, Copy)]
pub struct PromptEnd<'a> {
    /// The end of the rendered prompt, where the template may have begun the reasoning or ended it.
    pub text: &'a str,
    /// The request switches reasoning off, so that a constrained answer has no room for it.
    pub is_reasoning_off: bool,
}

impl AnswerForm<'_> {
    /// Compiles the grammar of the whole answer. `source` is the grammar of what the reader gets.
    ///
    /// # Errors
    /// As [`GrammarCompiler::compile`]; [`GrammarError::Unsupported`] if a grammar cannot express the markup, or if `source` is a
    /// grammar of the user's own, which applies to the whole answer, and the markup would surround it.
    pub fn compile(&self, compiler: &GrammarCompiler, source: &GrammarSource) -> Result<Grammar> {
        let alone = compiler.compile(source)?;
        let is_own = matches!(source, GrammarSource::Lark(_) | GrammarSource::Gbnf(_));
        match self.frame(is_own)? {
            Some(_) if is_own => Ok(alone), // it may leave the reasoning out
            Some(frame) => {
                let whole = format!("{frame}answer: {}\n", body(source)?);
                compiler.compile(&GrammarSource::Lark(whole))
            }
            None => Ok(alone),
        }
    }

    /// Returns the grammar of the whole answer as Lark text that begins with its rule `start`, as a part of another grammar.
    ///
    /// # Errors
    /// As [`Self::compile`]; any grammar of the user's own is refused.
    pub fn lark(&self, source: &GrammarSource) -> Result<String> {
        let body = body(source)?;
        let frame = self.frame(false)?.unwrap_or_else(|| "start: answer\n".to_owned());
        Ok(format!("{frame}answer: {body}\n"))
    }

    /// Returns Lark rules for the markup around the answer, which is their rule `answer`; `None` if there is no markup.
    fn frame(&self, is_own: bool) -> Result<Option<String>> {
        let Self { chat_tokenizer, output_markup, end } = *self;
        if output_markup.reasoning == Some(ReasoningFormat::Harmony) {
            if is_own {
                return Err(refusal(
                    "it holds for the whole answer, and this model's answers come in messages",
                ));
            }
            let rules = harmony_rules(chat_tokenizer);
            return rules
                .map(Some)
                .ok_or_else(|| refusal("this model's messages have no tokens of their own"));
        }
        if let Some(close) = output_markup.open_reasoning(end.text) {
            if is_own {
                return Err(refusal(
                    "it holds for the whole answer, and this prompt has begun with reasoning, which can be switched off",
                ));
            }
            return Ok(Some(format!(
                "start: thought SPACE? answer\n{}",
                thought_rules(chat_tokenizer, close)
            )));
        }
        let may_reason = output_markup.may_reason(end.text).filter(|_| !end.is_reasoning_off);
        Ok(may_reason.map(|(open, close)| {
            let open = match chat_tokenizer.special(open) {
                Some(id) => format!("<[{id}]>"),
                None => json!(open).to_string(),
            };
            format!("start: ({open} thought SPACE?)? answer\n{}", thought_rules(chat_tokenizer, close))
        }))
    }
}

fn refusal(message: &str) -> Error {
    Error::Grammar(GrammarError::Unsupported { keyword: "grammar".to_owned(), message: message.to_owned() })
}

/// Returns a source as the right side of a Lark rule.
fn body(source: &GrammarSource) -> Result<String> {
    let json = |schema: &Value| Ok(format!("%json {}", prepare_schema(schema).map_err(Error::Grammar)?));
    match source {
        GrammarSource::JsonObject => json(&json!({"type": "object"})),
        GrammarSource::JsonSchema(schema) => json(schema),
        GrammarSource::Regex(regex) => Ok(format!("/{}/", between_slashes(regex))),
        GrammarSource::Lark(_) | GrammarSource::Gbnf(_) => Err(refusal("it cannot be part of another one")),
    }
}

/// One message of analysis if the model likes, then the final one.
fn harmony_rules(chat_tokenizer: &ChatTokenizer) -> Option<String> {
    let mark = |text| chat_tokenizer.special(text).map(|id| format!("<[{id}]>"));
    let [channel, message, end, start] =
        [mark("<|channel|>")?, mark("<|message|>")?, mark("<|end|>")?, mark("<|start|>")?];
    Some(format!(
        "start: ({channel} \"analysis\" {message} TEXT? {end} {start} \"assistant\")? {channel} \"final\" {message} answer\n\
         TEXT: /(?s:.+)/\n"
    ))
}

/// Lark rules for the rest of a thought that ends with `close`, and the space that models put behind it. A marker that is a
/// special token is that token, which no text can contain; any other ends the thought where it first stands.
fn thought_rules(chat_tokenizer: &ChatTokenizer, close: &str) -> String {
    let thought = match chat_tokenizer.special(close) {
        Some(id) => format!("thought: TEXT? <[{id}]>\nTEXT: /(?s:.+)/\n"),
        None => format!(
            "thought[lazy]: THOUGHT\nTHOUGHT: /(?s:.*){}/\n",
            between_slashes(&regex_syntax::escape(close))
        ),
    };
    format!("{thought}SPACE: /[ \\t\\r\\n]{{1,4}}/\n")
}
