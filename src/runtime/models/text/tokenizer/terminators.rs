//! Names of special tokens that end a turn.
//!
//! Files list some end-of-generation ids (often only the tokenizer's EOS), but chat models end their turns
//! with others, and a generation that continues past one invents the user's next turn. So each name below
//! ends a generation *if the tokenizer registers it as a special token*; as plain vocabulary text it would
//! end answers wrongly. Markers within a turn (`<tool_call>`, `<|end_of_role|>`, which closes a role's
//! header, `<|channel|>`) must never be listed: they would cut an answer short.

/// Ends a turn wherever it is special.
const ALWAYS: &[&str] = &[
    "<|im_end|>",       // ChatML: Qwen, SmolLM, LFM2
    "<|endoftext|>",    // GPT-2 and everything after; end of document
    "<|eot_id|>",       // Llama 3
    "<|eom_id|>",       // Llama 3: end of message, a tool answers next
    "<|eot|>",          // Llama 4
    "<|eom|>",          // Llama 4
    "<|end_of_text|>",  // Llama 3, Granite
    "<end_of_turn>",    // Gemma 2 and 3
    "<turn|>",          // Gemma 4
    "<|tool_response>", // Gemma 4: follows a call; a tool answers next
    "</s>",             // Llama 2, Mistral
];

/// Ends a turn in phi-3, but only a message *within* a turn in Harmony (gpt-oss), where analysis, commentary and
/// final answer are messages of one turn.
const UNLESS_HARMONY: &[&str] = &["<|end|>"];

/// Harmony's own: end of the final answer; a tool is called and answers next.
const HARMONY: &[&str] = &["<|return|>", "<|call|>"];

/// Registered as special by Harmony vocabularies and no others.
const HARMONY_MARK: &str = "<|channel|>";

/// Returns whether a text can only be a token that ends a turn, whatever its type.
pub fn is_turn_end(text: &str) -> bool {
    text != "</s>" && ALWAYS.iter().chain(UNLESS_HARMONY).any(|end| *end == text)
}

/// Returns the ids among `special` (id, text) that end a turn, ascending.
pub(super) fn turn_terminators<'a>(special: impl Iterator<Item = (u32, &'a str)> + Clone) -> Vec<u32> {
    let harmony = special.clone().any(|(_, text)| text == HARMONY_MARK);
    let by_dialect = if harmony { HARMONY } else { UNLESS_HARMONY };
    let ends_turn = |text: &str| ALWAYS.contains(&text) || by_dialect.contains(&text);
    let mut ids: Vec<u32> = special.filter(|(_, text)| ends_turn(text)).map(|(id, _)| id).collect();
    ids.sort_unstable();
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(special: &[&str], expected: &[&str]) {
        let numbered = (0u32..).zip(special.iter().copied());
        let found: Vec<&str> =
            turn_terminators(numbered).into_iter().map(|id| special[id as usize]).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn families() {
        check(&["<|endoftext|>", "<|im_start|>", "<|im_end|>"], &["<|endoftext|>", "<|im_end|>"]);
        check(&["<|begin_of_text|>", "<|eom_id|>", "<|eot_id|>"], &["<|eom_id|>", "<|eot_id|>"]);
        check(&["<|user|>", "<|assistant|>", "<|end|>"], &["<|end|>"]);
        check(
            &["<|return|>", "<|channel|>", "<|end|>", "<|call|>", "<|message|>"],
            &["<|return|>", "<|call|>"],
        );
        check(&["<|start_of_role|>", "<|end_of_role|>", "<tool_call>"], &[]);
        check(&["<|return|>", "<|call|>"], &[]);
    }
}
