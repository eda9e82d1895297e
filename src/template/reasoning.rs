//! Reasoning formats: one constant per format, one row each in the table.

use super::named::formats;
use super::tool_call::Protocol;

formats! {
    /// The markup that sets reasoning apart from the answer.
    ReasoningFormat, "reasoning format", Markers, [
        /// `<|channel>thought` newline ... `<channel|>` (Gemma 4)
        GemmaChannel => GEMMA_CHANNEL,
        /// `<|channel|>analysis<|message|>` ... `<|end|>` (gpt-oss)
        Harmony => HARMONY,
        /// ` to=self<|message|>` ... `<|eom|>` (Muse Glimmer)
        Atem => ATEM,
        /// `<|open|>think<|sep|>` ... `<|close|>think<|sep|>` (Kimi K3)
        KimiK3 => KIMI_K3,
        /// `<|think|>` ... `<|end|>` (Solar Open)
        SolarThink => SOLAR_THINK,
        /// `Here are my reasoning steps:` ... `[BEGIN FINAL RESPONSE]` (Apriel 1.6)
        FinalResponse => FINAL_RESPONSE,
        /// No reasoning, but `all` and a line break before text (Functionary 3.2)
        AllLine => ALL_LINE,
        /// `<mm:think>` ... `</mm:think>` (MiniMax M3)
        MiniMaxThink => MINIMAX_THINK,
        /// `<think:opensource>` ... `</think:opensource>` (Hy3)
        Hy3Think => HY3_THINK,
        /// `[THINK]` ... `[/THINK]` (Mistral v13 on)
        BracketThink => BRACKET_THINK,
        /// `<seed:think>` ... `</seed:think>`
        SeedThink => SEED_THINK,
        /// `<|START_THINKING|>` ... `<|END_THINKING|>` (Command A)
        CommandThinking => COMMAND_THINKING,
        /// `<|inner_prefix|>` ... `<|inner_suffix|>` (Apertus)
        InnerThoughts => INNER_THOUGHTS,
        /// `<think>` ... `</think>`
        Think => THINK,
    ]
}

/// The markers of a reasoning format.
#[derive(Debug)]
pub(super) struct Markers {
    pub name: &'static str,
    /// Texts by which a template is recognised: all texts of any of these sets.
    pub signs: &'static [&'static [&'static str]],
    /// Markers that open reasoning; the longest match counts.
    pub opens: &'static [&'static str],
    pub close: &'static str,
    /// Markers of what follows reasoning, which end it where its own end is missing.
    pub followers: &'static [&'static str],
    /// True if reasoning may begin in the middle of text, because its markers do not occur in prose.
    pub is_anywhere: bool,
    /// Markers outside reasoning that carry no meaning and are dropped.
    pub dropped: &'static [&'static str],
    /// Parts of its markers that some tokenizers have as tokens.
    pub tokens: &'static [&'static str],
    /// `(prompt end, text)`: the text is dropped at the start of an answer to a prompt with that end.
    pub lead: Option<(&'static str, &'static str)>,
    /// The protocol, if answers are rows of messages.
    pub protocol: Option<Protocol>,
    /// Text that makes a model stop thinking; `None` if the markup needs more than an end.
    pub closing: Option<&'static str>,
}

impl Markers {
    /// Markers of which the first of `signs` opens reasoning.
    const fn new(
        name: &'static str,
        signs: &'static [&'static [&'static str]],
        close: &'static str,
        closing: Option<&'static str>,
    ) -> Self {
        Self {
            name,
            signs,
            opens: signs[0],
            close,
            followers: &[],
            is_anywhere: false,
            dropped: &[],
            tokens: &[],
            lead: None,
            protocol: None,
            closing,
        }
    }
}

const THINK: Markers = Markers {
    opens: &["<think>"],
    ..Markers::new("think", &[&["</think>"], &["<think>"]], "</think>", Some("\n</think>\n\n"))
};

const BRACKET_THINK: Markers = Markers::new("bracket-think", &[&["[THINK]"]], "[/THINK]", Some("[/THINK]"));

const SEED_THINK: Markers =
    Markers::new("seed-think", &[&["<seed:think>"]], "</seed:think>", Some("\n</seed:think>\n"));

const GEMMA_CHANNEL: Markers = Markers {
    opens: &["<|channel>thought", "<|channel>"],
    is_anywhere: true,
    dropped: &["<channel|>", "<|think|>"],
    ..Markers::new("gemma-channel", &[&["<|channel>", "<channel|>"]], "<channel|>", Some("\n<channel|>"))
};

/// Its messages are parsed by [`super::tool_call::Harmony`].
const HARMONY: Markers = Markers {
    is_anywhere: true,
    protocol: Some(Protocol::Harmony),
    closing: Some("<|end|><|start|>assistant<|channel|>final<|message|>"),
    ..Markers::new("harmony", &[&["<|channel|>analysis<|message|>"]], "<|end|>", None)
};

const COMMAND_THINKING: Markers = Markers {
    is_anywhere: true,
    dropped: &["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"],
    closing: Some("<|END_THINKING|>"),
    ..Markers::new("command-thinking", &[&["<|START_THINKING|>"]], "<|END_THINKING|>", None)
};

const INNER_THOUGHTS: Markers = Markers {
    is_anywhere: true,
    dropped: &["<|inner_suffix|>"],
    closing: Some("<|inner_suffix|>"),
    ..Markers::new("inner-thoughts", &[&["<|inner_prefix|>"]], "<|inner_suffix|>", None)
};

const MINIMAX_THINK: Markers =
    Markers::new("minimax-think", &[&["<mm:think>"]], "</mm:think>", Some("\n</mm:think>\n\n"));

const HY3_THINK: Markers = Markers {
    opens: &["<think:opensource>"],
    closing: Some("</think:opensource>"),
    // Its template puts the tags together.
    ..Markers::new(
        "hy3-think",
        &[&["<think{}>", ":opensource"], &["<think:opensource>"]],
        "</think:opensource>",
        None,
    )
};

/// As Harmony's.
const ATEM: Markers = Markers {
    tokens: &["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"],
    protocol: Some(Protocol::Atem),
    ..Markers::new("atem", &[&["<|start|>assistant to=self<|message|>"]], "<|eom|>", None)
};

const KIMI_K3: Markers = Markers {
    opens: &["<|open|>think<|sep|>"],
    followers: &["<|open|>response<|sep|>"],
    is_anywhere: true,
    dropped: &[
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
        "<|end_of_msg|>",
    ],
    tokens: &["<|open|>", "<|close|>", "<|sep|>"],
    closing: Some("<|close|>think<|sep|><|open|>response<|sep|>"),
    ..Markers::new(
        "kimi-k3",
        &[&["<|open|>", "<|close|>", "<|sep|>", "think"]],
        "<|close|>think<|sep|>",
        None,
    )
};

const SOLAR_THINK: Markers = Markers {
    opens: &["<|think|>"],
    is_anywhere: true,
    dropped: &["<|begin|>assistant", "<|content|>", "<|end|>", "<|flush|>", "<|calls|>"],
    tokens: &["<|begin|>"],
    closing: Some("<|end|><|begin|>assistant<|content|>"),
    ..Markers::new("solar-think", &[&["<|begin|>assistant", "<|think|>"]], "<|end|>", None)
};

const FINAL_RESPONSE: Markers = Markers {
    opens: &["Here are my reasoning steps:"],
    dropped: &["[END FINAL RESPONSE]"],
    closing: Some("\n[BEGIN FINAL RESPONSE]\n"),
    ..Markers::new("final-response", &[&["[BEGIN FINAL RESPONSE]"]], "[BEGIN FINAL RESPONSE]", None)
};

const ALL_LINE: Markers = Markers {
    opens: &[],
    lead: Some((">>>", "all\n")),
    ..Markers::new("all-line", &[&[">>>all\\n"], &[">>>all\n"]], "", None)
};

/// Parts of the markers that begin and end turns.
const TURN_MARKS: [&str; 8] = ["<|", "|>", "<｜", "｜>", "[/", "_of_turn>", "<turn|>", "<seed:"];

impl ReasoningFormat {
    /// Returns the text that makes a model stop thinking. `None` if the markup needs more than an end.
    pub fn closing(self) -> Option<&'static str> {
        self.row().closing
    }

    /// Returns whether the end of a prompt has opened reasoning and not closed it. A turn header behind the opening means that
    /// the opening is part of an earlier message.
    pub(super) fn is_open_in(self, prompt_tail: &str) -> bool {
        let marks = self.row();
        let opened = marks.opens.iter().filter_map(|open| Some(prompt_tail.rfind(open)? + open.len())).max();
        let Some(inside) = opened.and_then(|at| prompt_tail.get(at..)) else { return false };
        !inside.contains(marks.close) && !TURN_MARKS.iter().any(|mark| inside.contains(mark))
    }
}
