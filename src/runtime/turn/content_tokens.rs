//! Selects the tokens of an answer's content; those of its reasoning, calls and markup are left out. Pure.

use crate::request::Token;
use llmctl_template::Piece;

/// Finds the tokens of the content while the answer streams.
#[derive(Debug, Default)]
pub struct ContentTokens {
    /// Tokens behind the last piece that came out, each with the length of its text.
    pending: Vec<(usize, Token)>,
}

impl ContentTokens {
    /// Adds tokens whose pieces are still to come.
    pub fn hold(&mut self, text: &str, tokens: &[Token]) {
        self.pending.extend(tokens.iter().map(|token| (text.len(), token.clone())));
    }

    /// Takes the pieces that came out of the text so far, and returns the tokens of their content: the last ones that are as long
    /// together, with those in front that have no text of their own, as parts of a character. What stands before them is markup.
    pub fn release(&mut self, pieces: &[Piece]) -> Vec<Token> {
        if pieces.is_empty() {
            return Vec::new();
        }
        let mut pending = std::mem::take(&mut self.pending);
        let content = |piece: &Piece| if let Piece::Content(text) = piece { text.len() } else { 0 };
        let mut missing: usize = pieces.iter().map(content).sum();
        let mut begin = pending.len();
        while begin > 0 && (missing > 0 || begin < pending.len() && pending[begin - 1].0 == 0) {
            begin -= 1;
            missing = missing.saturating_sub(pending[begin].0);
        }
        pending.drain(begin..).map(|(_, token)| token).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the ids of the content: `steps` are texts of tokens with what came out of the parser then.
    fn content_of(steps: &[(&str, &[Piece])]) -> Vec<u32> {
        let (mut tokens, mut found) = (ContentTokens::default(), Vec::new());
        for (id, (text, pieces)) in (0..).zip(steps) {
            tokens.hold(text, &[Token { id, logprob: None }]);
            found.extend(tokens.release(pieces));
        }
        found.iter().map(|token| token.id).collect()
    }

    #[test]
    fn markup_reasoning_and_calls_are_no_content() {
        let content = |text: &str| [Piece::Content(text.to_owned())];
        let call =
            [Piece::CallName { index: 0, id: None, name: "f".to_owned() }, Piece::CallEnd { index: 0 }];
        let steps: [(&str, &[Piece]); 9] = [
            ("<think>", &[]),
            ("t", &[Piece::Reasoning("t".to_owned())]),
            ("</think>", &[]),
            ("\n\n", &[]),
            ("t", &content("t")),
            (" <", &[]),
            ("b", &content(" <b")),
            ("<call>", &[]),
            ("f()</call>", &call),
        ];
        assert_eq!(content_of(&steps), [4, 5, 6]);
        let both = [Piece::Reasoning("a".to_owned()), Piece::Content("b".to_owned())];
        assert_eq!(content_of(&[("a</think>b <", &both), ("x", &content(" <x"))]), [0, 1]);
        // The first token is the beginning of a character.
        assert_eq!(content_of(&[("", &[]), ("\u{e9}", &content("\u{e9}"))]), [0, 1]);
    }
}
