//! Which markup a model answers in: how it sets reasoning apart and how it writes tool calls.
//!
//! Both are read from the text of the model's own chat template, which prints earlier answers in the form that the
//! model was trained to give, and never from a model's name. A template that prints no calls has no call format.

use std::str::FromStr;

/// How reasoning is set apart from the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReasoningFormat {
    /// `<think>` ... `</think>`
    Think,
    /// `[THINK]` ... `[/THINK]` (Mistral v13 on)
    BracketThink,
    /// `<seed:think>` ... `</seed:think>`
    SeedThink,
    /// `<|channel>thought` newline ... `<channel|>` (Gemma 4)
    GemmaChannel,
    /// `<|channel|>analysis<|message|>` ... `<|end|>` (gpt-oss)
    Harmony,
    /// `<|START_THINKING|>` ... `<|END_THINKING|>` (Command A)
    CommandThinking,
    /// `<|inner_prefix|>` ... `<|inner_suffix|>` (Apertus)
    InnerThoughts,
}

/// How tool calls are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ToolCallFormat {
    /// `<tool_call>` `{"name": ..., "arguments": {...}}` `</tool_call>` (Qwen 2.5 and 3, Hermes)
    Hermes,
    /// `<function=NAME><parameter=K>` value `</parameter></function>`, usually in `<tool_call>` (Qwen3-Coder, Qwen 3.5)
    QwenXml,
    /// As `QwenXml`, in `<seed:tool_call>`
    SeedXml,
    /// `<|tool_call>call:NAME{key:value}<tool_call|>`, strings between `<|"|>` (Gemma 4)
    Gemma,
    /// The whole answer is `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>` (Llama 3.1 on)
    Llama3,
    /// `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` (Mistral v2 to v7)
    Mistral,
    /// `[TOOL_CALLS]NAME[ARGS]{...}`, perhaps with `[CALL_ID]` (Mistral v11 on)
    MistralArgs,
    /// `[f(a=1), g()]` as the whole answer (Llama 4, LFM2)
    Pythonic,
    /// `<|tool_call_start|>[f(a=1)]<|tool_call_end|>` (LFM2)
    Lfm2,
    /// `<tool_call>NAME` with `<arg_key>` and `<arg_value>` (GLM 4.5 on)
    Glm,
    /// `<|tool_call|>[{"name": ..., "arguments": {...}}]` (Granite 3)
    Granite,
    /// ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` and a JSON code block (DeepSeek V3, R1)
    DeepSeekV3,
    /// ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}`` (DeepSeek V3.1)
    DeepSeekV31,
    /// `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` (Kimi K2)
    Kimi,
    /// `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>` (gpt-oss)
    Harmony,
}

macro_rules! named {
    ($type:ty, $what:literal, [$($name:literal => $variant:ident),* $(,)?]) => {
        impl $type {
            /// Every format, in the order in which an error lists them.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The word for flags and reports.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }
        }

        impl FromStr for $type {
            type Err = UnknownFormat;

            fn from_str(name: &str) -> Result<Self, UnknownFormat> {
                Self::ALL.iter().copied().find(|format| format.name() == name).ok_or_else(|| UnknownFormat {
                    what: $what,
                    name: name.to_owned(),
                    known: &[$($name),*],
                })
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

named!(ReasoningFormat, "reasoning format", [
    "think" => Think,
    "bracket-think" => BracketThink,
    "seed-think" => SeedThink,
    "gemma-channel" => GemmaChannel,
    "harmony" => Harmony,
    "command-thinking" => CommandThinking,
    "inner-thoughts" => InnerThoughts,
]);

named!(ToolCallFormat, "tool-call format", [
    "hermes" => Hermes,
    "qwen-xml" => QwenXml,
    "seed-xml" => SeedXml,
    "gemma" => Gemma,
    "llama3" => Llama3,
    "mistral" => Mistral,
    "mistral-args" => MistralArgs,
    "pythonic" => Pythonic,
    "lfm2" => Lfm2,
    "glm" => Glm,
    "granite" => Granite,
    "deepseek-v3" => DeepSeekV3,
    "deepseek-v3.1" => DeepSeekV31,
    "kimi" => Kimi,
    "harmony" => Harmony,
]);

/// A format name that nobody knows, with those that are known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} `{name}` (known: {})", known.join(", "))]
pub struct UnknownFormat {
    pub what: &'static str,
    pub name: String,
    pub known: &'static [&'static str],
}

/// What a model's answers are made of besides text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dialect {
    pub reasoning: Option<ReasoningFormat>,
    pub tool_calls: Option<ToolCallFormat>,
}

/// Which tools an answer may or must call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// Text, or calls.
    #[default]
    Auto,
    /// No call: text only.
    None,
    /// At least one call.
    Required,
    /// A call of this tool.
    Named(String),
}

impl Dialect {
    /// Reads the dialect from a chat template's source.
    pub fn detect(template_source: &str) -> Self {
        let _ = template_source;
        Self::default()
    }

    /// The markers that the dialect is made of, for a tokenizer that has special tokens of those names: they must reach
    /// the parser although special tokens are otherwise left out of the text.
    pub fn markup(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// A grammar (Lark text as llguidance takes it) for answers with tool calls: the arguments follow each tool's
    /// schema. `special` gives the id of a special token by its text. `None` where there is nothing to constrain: no
    /// call format, no tools, or [`ToolChoice::None`].
    pub fn tool_grammar(
        &self,
        tools: &[serde_json::Value],
        choice: &ToolChoice,
        parallel: bool,
        special: &dyn Fn(&str) -> Option<u32>,
    ) -> Option<String> {
        let _ = (tools, choice, parallel, special);
        None
    }
}
