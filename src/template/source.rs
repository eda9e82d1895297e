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

/// Returns the syntax of chat templates, whose block tags eat the newline after them and the blanks before them, or of prompt
/// files, which keep all of their text.
pub(super) fn syntax(chat: bool) -> Result<SyntaxConfig, TemplateError> {
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
        return Err(TemplateError::TooExpensive(format!(
            "its source has {} bytes, more than {MAX_SOURCE_BYTES}",
            source.len()
        )));
    }
    let source = match source.contains('\r') {
        true => Cow::Owned(source.replace("\r\n", "\n").replace('\r', "\n")),
        false => Cow::Borrowed(source),
    };
    let mut scan = SourceScan::default();
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

/// The part of the current tag read so far.
#[derive(Debug, Default)]
struct SourceScan {
    tag_tokens: usize,
    elifs: usize,
    /// A token that ends an operand was just read, so `+` is binary.
    after_operand: bool,
    tag: Folding,
    blocks: Blocks,
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

impl SourceScan {
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
            Token::BlockEnd => {
                self.blocks.end_tag();
                return Ok(());
            }
            Token::TemplateData(_) | Token::VariableEnd => return Ok(()),
            _ => self.tag_tokens += 1,
        }
        if self.tag_tokens > MAX_TAG_TOKENS {
            return Err(TemplateError::TooExpensive(format!(
                "a tag in line {line} has more than {MAX_TAG_TOKENS} tokens"
            )));
        }
        if self.tag_tokens == 1 {
            self.see_keyword(token, range.clone())?;
            self.blocks.see_keyword(token, line)?;
        } else {
            self.blocks.see(token);
        }
        if matches!(token, Token::Plus) && !self.after_operand {
            self.edits.push((range, "--")); // which also makes a number of a bool
        }
        self.after_operand = ends_operand(token);
        self.tag.see(token);
        if self.tag.is_too_large() {
            return Err(TemplateError::TooExpensive(format!("a constant in line {line} is too large")));
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
            true => Err(TemplateError::TooExpensive(format!("it has more than {MAX_ELIFS} elif branches"))),
            false => Ok(()),
        }
    }
}

/// The open blocks that have a frame of their own in minijinja, innermost last: true is a loop.
#[derive(Debug, Default)]
struct Blocks {
    open: Vec<bool>,
    /// Inside a `set` tag that has shown no `=` outside of parentheses, so that it opens a block.
    set_block: bool,
    parens: usize,
}

impl Blocks {
    fn see_keyword(&mut self, token: &Token<'_>, line: usize) -> Result<(), TemplateError> {
        let Token::Ident(word) = token else { return Ok(()) };
        (self.set_block, self.parens) = (*word == "set", 0);
        match *word {
            "for" => self.open.push(true),
            "with" | "generation" | "filter" | "autoescape" | "call" | "macro" | "block" => {
                self.open.push(false)
            }
            "endfor" | "endwith" | "endgeneration" | "endfilter" | "endautoescape" | "endcall"
            | "endmacro" | "endblock" | "endset" => drop(self.open.pop()),
            // minijinja would leave the inner frame on its stack and fail on it later.
            "break" | "continue" if self.open.last() == Some(&false) => {
                let message = format!("`{word}` cannot leave the block around it");
                return Err(TemplateError::Syntax { line, message });
            }
            _ => {}
        }
        Ok(())
    }

    fn see(&mut self, token: &Token<'_>) {
        match token {
            Token::ParenOpen => self.parens += 1,
            Token::ParenClose => self.parens = self.parens.saturating_sub(1),
            Token::Assign if self.parens == 0 => self.set_block = false,
            _ => {}
        }
    }

    fn end_tag(&mut self) {
        if std::mem::take(&mut self.set_block) {
            self.open.push(false);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(source: &str) -> Result<String, TemplateError> {
        prepare(source, &syntax(true)?)
    }

    #[test]
    fn generation_blocks_become_scopes_but_only_as_tags() {
        let source = "{%- generation -%}a{% endgeneration %}{# generation #}{{ 'generation' }}{% raw %}{% generation %}{% endraw %}";
        let wanted = "{%- with -%}a{% endwith %}{# generation #}{{ 'generation' }}{% raw %}{% generation %}{% endraw %}";
        assert_eq!(prepared(source).as_deref(), Ok(wanted));
    }

    #[test]
    fn only_a_unary_plus_is_rewritten() {
        assert_eq!(
            prepared("{{ a + b }}{{ +a }}{{ [1, +2] }}").as_deref(),
            Ok("{{ a + b }}{{ --a }}{{ [1, --2] }}")
        );
    }

    #[test]
    fn newlines_are_normalised() {
        assert_eq!(prepared("a\r\nb\rc").as_deref(), Ok("a\nb\nc"));
    }

    #[test]
    fn sources_beyond_a_bound_are_refused() {
        let refused = |source: String| matches!(prepared(&source), Err(TemplateError::TooExpensive(_)));
        assert!(refused("x".repeat(MAX_SOURCE_BYTES + 1)));
        assert!(refused(format!("{{{{ 1{} }}}}", "+1".repeat(MAX_TAG_TOKENS))));
        assert!(refused(format!("{{% if a %}}{}{{% endif %}}", "{% elif b %}".repeat(MAX_ELIFS + 1))));
        assert!(refused("{{ 'abc' * 1000 * 1000 }}".to_owned()));
        assert!(refused("{{ [1] * 10 ** 8 }}".to_owned()));
        assert!(!refused("{{ '-' * 80 }}{{ 1000 * 1000 * 1000 * 1000 }}".to_owned()));
    }

    #[test]
    fn leaving_a_scope_by_break_is_a_syntax_error() {
        for block in ["with", "set x", "filter upper"] {
            let name = block.split(' ').next().unwrap_or_default();
            let source =
                format!("{{% for i in a %}}\n{{% {block} %}}{{% break %}}{{% end{name} %}}{{% endfor %}}");
            assert!(matches!(prepared(&source), Err(TemplateError::Syntax { line: 2, .. })), "{source}");
        }
        let fine = "{% for i in a %}{% set x = 1 %}{% if x %}{% break %}{% endif %}{% endfor %}";
        assert_eq!(prepared(fine).as_deref(), Ok(fine));
    }
}
