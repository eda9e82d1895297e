//! An answer that is held to a form, within what the model's own markup puts around it: reasoning that comes first, and
//! Harmony's messages.
//!
//! Pure but for the compiler's cache. A form on its own would forbid the markup that the model writes, and its reader would
//! miss the answer in what is left.

use serde_json::{Value, json};

use crate::runtime::chat_tokenizer::ChatTokenizer;
use crate::runtime::error::{Error, GrammarError, Result};
use crate::runtime::grammar::{Grammar, GrammarCompiler, GrammarSource, prepare_schema};
use crate::template::{Dialect, ReasoningFormat};

/// Where an answer with a form is going to stand.
#[derive(Clone, Copy)]
pub struct AnswerForm<'a> {
    pub chat_tokenizer: &'a ChatTokenizer,
    /// The markup in force.
    pub dialect: &'a Dialect,
    /// The end of the rendered prompt: the template may have begun the reasoning there, or ended it.
    pub prompt_tail: &'a str,
}

impl AnswerForm<'_> {
    /// The grammar of the whole answer, `source` being that of what its reader gets.
    ///
    /// # Errors
    /// Those of [`GrammarCompiler::compile`]; [`GrammarError::Unsupported`] where the markup cannot be written, or stands around
    /// a grammar of the user's own, which holds for the whole.
    pub fn compile(&self, compiler: &GrammarCompiler, source: &GrammarSource) -> Result<Grammar> {
        let alone = compiler.compile(source)?;
        let is_own = matches!(source, GrammarSource::Lark(_));
        match self.frame(is_own)? {
            Some(_) if is_own => Ok(alone), // it may leave the reasoning out
            Some(frame) => {
                let whole = format!("{frame}answer: {}\n", body(source)?);
                compiler.compile(&GrammarSource::Lark(whole))
            }
            None => Ok(alone),
        }
    }

    /// The grammar of the whole answer as Lark, for a part of another: it begins with its rule `start`.
    ///
    /// # Errors
    /// As [`Self::compile`], and for a grammar of the user's own.
    pub fn lark(&self, source: &GrammarSource) -> Result<String> {
        let body = body(source)?;
        let frame = self.frame(false)?.unwrap_or_else(|| "start: answer\n".to_owned());
        Ok(format!("{frame}answer: {body}\n"))
    }

    /// Lark rules for what stands around the answer, which is their rule `answer`; nothing where it is all there is.
    fn frame(&self, is_own: bool) -> Result<Option<String>> {
        let Self { chat_tokenizer, dialect, prompt_tail } = *self;
        if dialect.reasoning == Some(ReasoningFormat::Harmony) {
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
        if let Some(close) = dialect.open_reasoning(prompt_tail) {
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
        Ok(dialect.may_reason(prompt_tail).map(|(open, close)| {
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

/// A source as the right side of a Lark rule.
fn body(source: &GrammarSource) -> Result<String> {
    let json = |schema: &Value| Ok(format!("%json {}", prepare_schema(schema).map_err(Error::Grammar)?));
    match source {
        GrammarSource::JsonObject => json(&json!({"type": "object"})),
        GrammarSource::JsonSchema(schema) => json(schema),
        GrammarSource::Regex(regex) => Ok(format!("/{}/", slashed(regex))),
        GrammarSource::Lark(_) => Err(refusal("it cannot be part of another one")),
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
        None => format!("thought[lazy]: THOUGHT\nTHOUGHT: /(?s:.*){}/\n", escaped(close)),
    };
    format!("{thought}SPACE: /[ \\t\\r\\n]{{1,4}}/\n")
}

/// For a regular expression between slashes.
fn escaped(text: &str) -> String {
    let is_meta = |c: char| "\\.+*?()|[]{}^$#&-~/".contains(c);
    text.chars().flat_map(|c| is_meta(c).then_some('\\').into_iter().chain([c])).collect()
}

/// A regular expression for between slashes: those that are not escaped yet are.
fn slashed(regex: &str) -> String {
    let (mut text, mut is_escaped) = (String::with_capacity(regex.len()), false);
    for c in regex.chars() {
        if c == '/' && !is_escaped {
            text.push('\\');
        }
        is_escaped = c == '\\' && !is_escaped;
        text.push(c);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_in_a_regular_expression_is_escaped_once() {
        for (given, between_slashes) in
            [("a/b", "a\\/b"), ("a\\/b", "a\\/b"), ("\\\\/", "\\\\\\/"), ("ab", "ab")]
        {
            assert_eq!(slashed(given), between_slashes, "{given}");
        }
    }
}
