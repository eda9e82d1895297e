//! Template source on its way to minijinja: what is untrusted about it is checked, what is Hugging Face's own is
//! rewritten.
//!
//! minijinja's parser and code generator recurse over expressions and fold constants without a bound, so that a
//! hostile source could overflow the stack or the memory before anything runs. Everything here works on tokens, never
//! on the text, so that strings, comments and raw blocks are left alone. Replacements keep the line structure.

use std::borrow::Cow;

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;

use super::TemplateError;

/// Largest template source. The longest published one has about 30 kB.
const MAX_SOURCE_BYTES: usize = 512 * 1024;
/// Tokens between two tag delimiters; bounds the depth of one expression. Published templates need up to 604.
const MAX_TAG_TOKENS: usize = 1500;
/// `elif` branches in one template; each nests once more in the parser. Published templates need up to 22.
const MAX_ELIFS: usize = 400;
/// Bytes that one constant expression may fold to.
const MAX_FOLDED_BYTES: u64 = 1 << 20;

/// How a source is read: block tags eat the newline after them and the blanks before them in chat templates.
pub(super) fn chat_syntax() -> Result<SyntaxConfig, TemplateError> {
    syntax(true)
}

/// Prompt files keep all of their text.
pub(super) fn prompt_syntax() -> Result<SyntaxConfig, TemplateError> {
    syntax(false)
}

fn syntax(chat: bool) -> Result<SyntaxConfig, TemplateError> {
    let config =
        SyntaxConfig::builder().trim_blocks(chat).lstrip_blocks(chat).keep_trailing_newline(!chat).build();
    config.map_err(|error| TemplateError::Syntax { line: 1, message: error.to_string() })
}

/// Checks a source against the bounds and rewrites what minijinja does not know: `{% generation %}` blocks become
/// `{% with %}` (a scope, as in Hugging Face's extension), a unary `+` becomes a double minus, newlines become `\n`.
///
/// # Errors
/// `TooExpensive` beyond a bound, `Syntax` when the source has no tokens.
pub(super) fn prepare(source: &str, syntax: &SyntaxConfig) -> Result<String, TemplateError> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(too_long(format!("its source has {} bytes, more than {MAX_SOURCE_BYTES}", source.len())));
    }
    let source = match source.contains('\r') {
        true => Cow::Owned(source.replace("\r\n", "\n").replace('\r', "\n")),
        false => Cow::Borrowed(source),
    };
    let mut scan = Scan::default();
    for token in tokenize(&source, false, syntax.clone()) {
        let (token, span) = token.map_err(|error| syntax_error(&error))?;
        scan.see(&token, span.start_offset as usize..span.end_offset as usize, span.start_line.into())?;
    }
    let mut rewritten = source.into_owned();
    for (range, text) in scan.edits.into_iter().rev() {
        rewritten.replace_range(range, text);
    }
    Ok(rewritten)
}

pub(super) fn syntax_error(error: &minijinja::Error) -> TemplateError {
    let message = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    TemplateError::Syntax { line: error.line().unwrap_or(1), message }
}

fn too_long(reason: String) -> TemplateError {
    TemplateError::TooExpensive(reason)
}

/// What was seen of the current tag.
#[derive(Debug, Default)]
struct Scan {
    tag_tokens: usize,
    elifs: usize,
    /// A token that ends an operand was just read, so `+` is binary.
    after_operand: bool,
    tag: Folding,
    edits: Vec<(std::ops::Range<usize>, &'static str)>,
}

/// An upper bound on what minijinja may fold the constants of one tag into.
#[derive(Debug, Default)]
struct Folding {
    multiplies: bool,
    powers: bool,
    literal_bytes: u64,
    factor: u64,
}

impl Scan {
    fn see(
        &mut self,
        token: &Token<'_>,
        range: std::ops::Range<usize>,
        line: usize,
    ) -> Result<(), TemplateError> {
        match token {
            Token::BlockStart | Token::VariableStart => {
                self.tag_tokens = 0;
                self.after_operand = false;
                self.tag = Folding { factor: 1, ..Folding::default() };
                return Ok(());
            }
            Token::TemplateData(_) | Token::BlockEnd | Token::VariableEnd => return Ok(()),
            _ => self.tag_tokens += 1,
        }
        if self.tag_tokens > MAX_TAG_TOKENS {
            return Err(too_long(format!("a tag in line {line} has more than {MAX_TAG_TOKENS} tokens")));
        }
        if self.tag_tokens == 1 {
            self.see_keyword(token, range.clone())?;
        }
        if matches!(token, Token::Plus) && !self.after_operand {
            self.edits.push((range, "--")); // which also makes a number of a bool
        }
        self.after_operand = ends_operand(token);
        self.tag.see(token);
        if self.tag.is_too_large() {
            return Err(too_long(format!("a constant in line {line} is too large")));
        }
        Ok(())
    }

    fn see_keyword(&mut self, token: &Token<'_>, range: std::ops::Range<usize>) -> Result<(), TemplateError> {
        match token {
            Token::Ident("generation") => self.edits.push((range, "with")),
            Token::Ident("endgeneration") => self.edits.push((range, "endwith")),
            Token::Ident("elif") => self.elifs += 1,
            _ => {}
        }
        match self.elifs > MAX_ELIFS {
            true => Err(too_long(format!("it has more than {MAX_ELIFS} elif branches"))),
            false => Ok(()),
        }
    }
}

impl Folding {
    fn see(&mut self, token: &Token<'_>) {
        match token {
            Token::Mul => self.multiplies = true,
            Token::Pow => self.powers = true,
            Token::Str(text) => self.literal_bytes += text.len() as u64,
            Token::String(text) => self.literal_bytes += text.len() as u64,
            Token::BracketOpen | Token::Comma => self.literal_bytes += 1, // lists and tuples can be repeated too
            // The product of the numbers is above every sum and product that can be made of them.
            Token::Int(int) => self.factor = self.factor.saturating_mul((*int).max(1)),
            Token::Int128(_) => self.factor = u64::MAX,
            _ => {}
        }
    }

    fn is_too_large(&self) -> bool {
        let folded = self.literal_bytes.saturating_mul(if self.powers { u64::MAX } else { self.factor });
        self.multiplies && folded > MAX_FOLDED_BYTES
    }
}

fn ends_operand(token: &Token<'_>) -> bool {
    match token {
        Token::Ident(word) => !matches!(
            *word,
            "and" | "or" | "not" | "in" | "is" | "if" | "else" | "elif" | "set" | "for" | "recursive"
        ),
        Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_) => true,
        Token::BracketClose | Token::ParenClose | Token::BraceClose => true,
        _ => false,
    }
}
