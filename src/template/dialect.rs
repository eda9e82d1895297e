//! Which markup a model answers in: how it sets reasoning apart and how it writes tool calls.
//!
//! Both are read from the text of the model's own chat template, which prints earlier answers in the form that the
//! model was trained to give, and never from a model's name. A template that prints no calls has no call format.

use std::str::FromStr;

use super::tool_call::{self, Tools, grammar};

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
    /// `<function=NAME>{...}</function>` (Functionary 3.1)
    FunctionTag,
    /// `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>` (Jamba, Apriel)
    ToolCallsTag,
    /// `<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>` (Command A)
    CommandAction,
    /// `functools[{"name": ..., "arguments": {...}}]` (Firefunction)
    Functools,
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
    "function-tag" => FunctionTag,
    "tool-calls-tag" => ToolCallsTag,
    "command-action" => CommandAction,
    "functools" => Functools,
    "harmony" => Harmony,
]);

/// The markers of a reasoning format.
#[derive(Debug)]
pub(super) struct ReasoningMarks {
    /// What begins it; the longest that fits counts.
    pub opens: &'static [&'static str],
    pub close: &'static str,
    /// Whether it may begin in the middle of text: markers that nobody writes in prose.
    pub is_anywhere: bool,
    /// Markers outside it that mean nothing and are left out.
    pub dropped: &'static [&'static str],
}

impl ReasoningFormat {
    /// Harmony's are those of its messages, see [`super::tool_call::Harmony`].
    pub(super) fn marks(self) -> &'static ReasoningMarks {
        macro_rules! marks {
            ([$($open:literal),*], $close:literal, $anywhere:literal, [$($dropped:literal),*]) => {
                &ReasoningMarks {
                    opens: &[$($open),*],
                    close: $close,
                    is_anywhere: $anywhere,
                    dropped: &[$($dropped),*],
                }
            };
        }
        match self {
            Self::Think => marks!(["<think>"], "</think>", false, []),
            Self::BracketThink => marks!(["[THINK]"], "[/THINK]", false, []),
            Self::SeedThink => marks!(["<seed:think>"], "</seed:think>", false, []),
            Self::GemmaChannel => {
                marks!(["<|channel>thought", "<|channel>"], "<channel|>", true, ["<channel|>", "<|think|>"])
            }
            Self::Harmony => marks!(["<|channel|>analysis<|message|>"], "<|end|>", true, []),
            Self::CommandThinking => marks!(
                ["<|START_THINKING|>"],
                "<|END_THINKING|>",
                true,
                ["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"]
            ),
            Self::InnerThoughts => {
                marks!(["<|inner_prefix|>"], "<|inner_suffix|>", true, ["<|inner_suffix|>"])
            }
        }
    }

    /// Whether the end of a prompt has opened reasoning and not closed it. A turn header behind the opening means that
    /// the opening is part of an earlier message.
    pub(super) fn is_open_in(self, prompt_tail: &str) -> bool {
        let marks = self.marks();
        let opened = marks.opens.iter().filter_map(|open| Some(prompt_tail.rfind(open)? + open.len())).max();
        let Some(inside) = opened.and_then(|at| prompt_tail.get(at..)) else { return false };
        !inside.contains(marks.close) && !TURN_MARKS.iter().any(|mark| inside.contains(mark))
    }
}

/// What headers and ends of turns are written with.
const TURN_MARKS: [&str; 8] = ["<|", "|>", "<｜", "｜>", "[/", "_of_turn>", "<turn|>", "<seed:"];

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

/// What a template must contain to have a format; the first rule that holds counts.
const REASONING_SIGNS: &[(ReasoningFormat, &[&str])] = &[
    (ReasoningFormat::GemmaChannel, &["<|channel>", "<channel|>"]),
    (ReasoningFormat::Harmony, &["<|channel|>analysis<|message|>"]),
    (ReasoningFormat::BracketThink, &["[THINK]"]),
    (ReasoningFormat::SeedThink, &["<seed:think>"]),
    (ReasoningFormat::CommandThinking, &["<|START_THINKING|>"]),
    (ReasoningFormat::InnerThoughts, &["<|inner_prefix|>"]),
    (ReasoningFormat::Think, &["</think>"]),
    (ReasoningFormat::Think, &["<think>"]),
];

/// As [`REASONING_SIGNS`]. Markers that only one format has come before those that several share, and what a template
/// prints for calls before what it says about them.
const TOOL_CALL_SIGNS: &[(ToolCallFormat, &[&str])] = &[
    (ToolCallFormat::Glm, &["<arg_key>", "<arg_value>"]),
    (ToolCallFormat::SeedXml, &["<seed:tool_call>", "<function=", "<parameter="]),
    (ToolCallFormat::QwenXml, &["<function=", "<parameter="]),
    (ToolCallFormat::Gemma, &["<|tool_call>", "<tool_call|>"]),
    (ToolCallFormat::MistralArgs, &["[TOOL_CALLS]", "[ARGS]"]),
    (ToolCallFormat::Mistral, &["[TOOL_CALLS]"]),
    (ToolCallFormat::DeepSeekV3, &["<｜tool▁call▁begin｜>", "```json"]),
    (ToolCallFormat::DeepSeekV31, &["<｜tool▁call▁begin｜>"]),
    (ToolCallFormat::Kimi, &["<|tool_call_begin|>", "<|tool_call_argument_begin|>"]),
    (ToolCallFormat::CommandAction, &["<|START_ACTION|>", "tool_name"]),
    (ToolCallFormat::Lfm2, &["<|tool_call_start|>"]),
    // LFM2's own templates print calls only as part of the content; the list of tools is the model's sign.
    (ToolCallFormat::Lfm2, &["<|tool_list_start|>"]),
    (ToolCallFormat::Lfm2, &["List of tools: ["]),
    (ToolCallFormat::Granite, &["<|tool_call|>"]),
    (ToolCallFormat::Harmony, &["functions.", "<|channel|>commentary"]),
    (ToolCallFormat::ToolCallsTag, &["<tool_calls>[", "\"arguments\""]),
    (ToolCallFormat::ToolCallsTag, &["\"<tool_calls>\"", "\\\"arguments\\\""]),
    (ToolCallFormat::Functools, &["functools["]),
    (ToolCallFormat::Hermes, &["<tool_call>", "tools"]),
    (ToolCallFormat::FunctionTag, &["<function=", "</function>"]),
    (ToolCallFormat::Pythonic, &["[func_name1(", "tools"]),
    (ToolCallFormat::Llama3, &["{\"name\": ", "\"parameters\": ", "ipython"]),
];

/// The first format whose signs are all in the source, and the first of these.
fn first_sign<F: Copy>(rules: &[(F, &[&'static str])], source: &str) -> Option<(F, &'static str)> {
    let rule = rules.iter().find(|(_, signs)| signs.iter().all(|sign| source.contains(sign)));
    rule.map(|(format, signs)| (*format, signs[0]))
}

/// Without Jinja's comments, which may speak of other formats; their line breaks stay.
fn without_comments(source: &str) -> String {
    let mut rest = source;
    let mut text = String::with_capacity(source.len());
    while let Some((before, comment)) = rest.split_once("{#") {
        text.push_str(before);
        let (comment, after) = comment.split_once("#}").unwrap_or((comment, ""));
        text.extend(comment.chars().filter(|&c| c == '\n'));
        rest = after;
    }
    text + rest
}

/// What in a template tells a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sign {
    pub text: &'static str,
    /// Of the template, from 1.
    pub line: usize,
}

impl Sign {
    fn find(text: &'static str, source: &str) -> Self {
        let before = source.split(text).next().unwrap_or_default();
        Self { text, line: before.matches('\n').count() + 1 }
    }
}

impl Dialect {
    /// Reads the dialect from a chat template's source. Its comments do not count.
    pub fn detect(template_source: &str) -> Self {
        let source = without_comments(template_source);
        Self {
            reasoning: first_sign(REASONING_SIGNS, &source).map(|(format, _)| format),
            tool_calls: first_sign(TOOL_CALL_SIGNS, &source).map(|(format, _)| format),
        }
    }

    /// What [`Self::detect`] goes by: the sign of the reasoning format and that of the call format.
    pub fn signs(template_source: &str) -> (Option<Sign>, Option<Sign>) {
        let source = without_comments(template_source);
        let find = |text| Sign::find(text, &source);
        (
            first_sign(REASONING_SIGNS, &source).map(|(_, text)| find(text)),
            first_sign(TOOL_CALL_SIGNS, &source).map(|(_, text)| find(text)),
        )
    }

    /// Whether the end of a prompt has opened reasoning: the marker that will close it.
    pub fn open_reasoning(&self, prompt_tail: &str) -> Option<&'static str> {
        let format = self.reasoning.filter(|format| format.is_open_in(prompt_tail))?;
        Some(format.marks().close)
    }

    /// What opens and closes the reasoning that an answer may begin with, where the prompt has neither opened nor closed it
    /// already. Harmony's messages are no such thing.
    pub fn may_reason(&self, prompt_tail: &str) -> Option<(&'static str, &'static str)> {
        let is_free =
            |format: &ReasoningFormat| *format != ReasoningFormat::Harmony && !format.is_open_in(prompt_tail);
        let marks = self.reasoning.filter(is_free)?.marks();
        (!prompt_tail.trim_end().ends_with(marks.close)).then_some((marks.opens[0], marks.close))
    }

    /// The markers that the dialect is made of, for a tokenizer that has special tokens of those names: they must reach
    /// the parser although special tokens are otherwise left out of the text.
    pub fn markup(&self) -> Vec<&'static str> {
        let mut markup = Vec::new();
        if let Some(format) = self.reasoning {
            let marks = format.marks();
            // A channel's name is no part of its token.
            markup.extend(marks.opens.iter().filter(|open| open.ends_with(['>', ']'])));
            markup.push(marks.close);
            markup.extend(marks.dropped);
        }
        if let Some(format) = self.tool_calls {
            markup.extend(tool_call::markup(format));
        }
        if self.reasoning == Some(ReasoningFormat::Harmony) {
            markup.extend(tool_call::markup(ToolCallFormat::Harmony));
        }
        markup.sort_unstable();
        markup.dedup();
        markup
    }

    /// A grammar (Lark text as llguidance takes it) for answers with tool calls: arguments follow each tool's schema, see
    /// the header of `tool_call/grammar.rs`. Reasoning may come first, and must end first where `prompt_tail`, the end of
    /// the rendered prompt, has opened it. `is_parallel` allows several calls. `special` gives the id of a special token by
    /// its text; a marker that it does not know is ordinary text.
    ///
    /// `None` where there is nothing to constrain: no call format, no (such) tool, or [`ToolChoice::None`], for which the
    /// caller leaves the tools out of parsing too.
    pub fn tool_grammar(
        &self,
        tools: &[serde_json::Value],
        choice: &ToolChoice,
        is_parallel: bool,
        prompt_tail: &str,
        special: &dyn Fn(&str) -> Option<u32>,
    ) -> Option<String> {
        let format = self.tool_calls?;
        let tools = Tools::new(tools);
        let (tools, is_optional, is_parallel) = match choice {
            ToolChoice::None => return None,
            ToolChoice::Auto => (tools, true, is_parallel),
            ToolChoice::Required => (tools, false, is_parallel),
            ToolChoice::Named(name) => (tools.only(name), false, false),
        };
        if tools.is_empty() {
            return None;
        }
        let request = grammar::Request {
            dialect: self,
            format,
            tools: &tools,
            is_optional,
            is_parallel,
            prompt_tail,
            special,
        };
        Some(grammar::lark(&request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_stand_where_the_template_has_them() {
        let source = "{# <tool_call>\n <think> #}{{ tools }}\n{{ '</think>' }}\n<tool_call>";
        let (reasoning, tool_calls) = Dialect::signs(source);
        assert_eq!(reasoning, Some(Sign { text: "</think>", line: 3 }));
        assert_eq!(tool_calls, Some(Sign { text: "<tool_call>", line: 4 }));
        assert_eq!(Dialect::signs("{{ messages }}"), (None, None));
    }
}
