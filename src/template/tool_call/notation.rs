//! A notation is one way of writing tool calls: one constant in its own file under `formats`, and one row in the table here.
//!
//! What is said of a notation only there: the signs by which a template is known, the markers, who reads it, and how
//! grammars write it.

use super::formats as f;
use super::grammar::{Messages, Writer};
use super::harmony::Protocol;
use super::{Reader, Tool};
use crate::named::formats;

formats! {
    /// How tool calls are written.
    ToolCallFormat, "tool-call format", Notation, [
        /// As `Glm`, every tag with the suffix `:opensource` (Hy3)
        Hy3 => f::hy3::HY3,
        /// `<tool_call>NAME` with `<arg_key>` and `<arg_value>` (GLM 4.5 on)
        Glm => f::glm::GLM,
        /// As `QwenXml`, in `<seed:tool_call>`
        SeedXml => f::seed_xml::SEED_XML,
        /// `<function=NAME><parameter=K>` value `</parameter></function>`, usually in `<tool_call>` (Qwen3-Coder, Qwen 3.5)
        QwenXml => f::qwen_xml::QWEN_XML,
        /// `<function name="NAME"><param name="K">` value `</param></function>` (MiniCPM5)
        MiniCpm5 => f::minicpm5::MINICPM5,
        /// `]<]minimax[>[<tool_call>` with a tag for each parameter (MiniMax M3)
        MiniMaxM3 => f::minimax_m3::MINIMAX_M3,
        /// `<minimax:tool_call><invoke name="NAME"><parameter name="K">` value (MiniMax M2)
        MiniMaxM2 => f::minimax_m2::MINIMAX_M2,
        /// `<｜DSML｜tool_calls><｜DSML｜invoke name="NAME">` (DeepSeek V4)
        DeepSeekV4 => f::deepseek_v4::DEEPSEEK_V4,
        /// `<｜DSML｜function_calls><｜DSML｜invoke name="NAME">` (DeepSeek V3.2)
        DeepSeekV32 => f::deepseek_v32::DEEPSEEK_V32,
        /// ` to=NAME<|message|><atem:function_calls>` (Muse Glimmer)
        MuseGlimmer => f::muse_glimmer::MUSE_GLIMMER,
        /// `<|open|>tools<|sep|><|open|>call tool="NAME"` (Kimi K3)
        KimiK3 => f::kimi_k3::KIMI_K3,
        /// `<|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}` (Solar Open)
        SolarOpen => f::solar_open::SOLAR_OPEN,
        /// `<|tool_call>call:NAME{key:value}<tool_call|>`, strings between `<|"|>` (Gemma 4)
        Gemma => f::gemma::GEMMA,
        /// `[TOOL_CALLS]NAME[ARGS]{...}`, perhaps with `[CALL_ID]` (Mistral v11 on)
        MistralArgs => f::mistral_args::MISTRAL_ARGS,
        /// `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` (Mistral v2 to v7)
        Mistral => f::mistral::MISTRAL,
        /// ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` and a JSON code block (DeepSeek V3, R1)
        DeepSeekV3 => f::deepseek_v3::DEEPSEEK_V3,
        /// ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}`` (DeepSeek V3.1)
        DeepSeekV31 => f::deepseek_v31::DEEPSEEK_V31,
        /// `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` (Kimi K2)
        Kimi => f::kimi::KIMI,
        /// `<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>` (Command A)
        CommandAction => f::command_action::COMMAND_ACTION,
        /// `<|tool_call_start|>[f(a=1)]<|tool_call_end|>` (LFM2)
        Lfm2 => f::lfm2::LFM2,
        /// `<|tool_call|>[{"name": ..., "arguments": {...}}]` (Granite 3)
        Granite => f::granite::GRANITE,
        /// `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>` (gpt-oss)
        Harmony => f::harmony::HARMONY,
        /// `<|tools_prefix|>[{NAME: {...}}]<|tools_suffix|>` (Apertus)
        Apertus => f::apertus::APERTUS,
        /// `<|function_call|>{"name": ..., "arguments": {...}}` (GigaChat 3.1)
        GigaChat31 => f::gigachat31::GIGACHAT31,
        /// A message of the role `function call` (GigaChat 3)
        GigaChat3 => f::gigachat3::GIGACHAT3,
        /// `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>` (Nemotron Nano v2)
        ToolcallTag => f::toolcall_tag::TOOLCALL_TAG,
        /// `>>>NAME` and `{...}` on a line of its own (Functionary 3.2)
        Functionary32 => f::functionary32::FUNCTIONARY32,
        /// `Action:` and a code block with a list of calls (Command R+)
        CommandR => f::command_r::COMMAND_R,
        /// `<tool_calls>` with an object a line (MiniMax M1)
        MiniMaxM1 => f::minimax_m1::MINIMAX_M1,
        /// `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>` (Jamba, Apriel)
        ToolCallsTag => f::tool_calls_tag::TOOL_CALLS_TAG,
        /// `functools[{"name": ..., "arguments": {...}}]` (Firefunction)
        Functools => f::functools::FUNCTOOLS,
        /// `<tool_call>` `{"name": ..., "arguments": {...}}` `</tool_call>` (Qwen 2.5 and 3, Hermes)
        Hermes => f::hermes::HERMES,
        /// `<function=NAME>{...}</function>` (Functionary 3.1)
        FunctionTag => f::function_tag::FUNCTION_TAG,
        /// `[f(a=1), g()]` as the whole answer (Llama 4, LFM2)
        Pythonic => f::pythonic::PYTHONIC,
        /// The whole answer is `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>` (Llama 3.1 on)
        Llama3 => f::llama3::LLAMA3,
        /// As `Hermes`, asked for by a system prompt of llmctl's own: for templates that show no tools or no calls
        Generic => f::generic::GENERIC,
    ]
}

/// What is known of one format.
pub struct Notation {
    /// The word for flags and reports.
    pub name: &'static str,
    /// What a template contains that has the notation: any of these sets of texts, whole.
    pub signs: &'static [&'static [&'static str]],
    /// The markers that begin a span of calls; grammars write the first.
    pub openers: &'static [&'static str],
    /// The other markers that a tokenizer may have as tokens of their own.
    pub marks: &'static [&'static str],
    /// Markers that mean nothing and are left out.
    pub dropped: &'static [&'static str],
    /// Ends a span of calls; empty where no marker does. Notations with one are looked for in reasoning too.
    pub end: &'static str,
    /// An opener that the prompt may end with.
    pub prompt_opener: Option<&'static str>,
    /// Who reads the answers that are rows of messages with headers.
    pub protocol: Option<Protocol>,
    /// What stands around calls, where text has markers too.
    pub messages: Option<Messages>,
    /// The character that may begin a call without a marker, where an answer begins.
    pub bare: Option<char>,
    /// A regular expression for answers that begin like a call, where grammars write calls without a marker.
    pub bare_call: Option<&'static str>,
    pub frame: Frame,
    /// One call as a grammar writes it; the text stands in front of the tool's name.
    pub call: fn(&mut Writer<'_>, &Tool, &str) -> String,
    /// The reader for what follows an opener; an empty opener is the bare one, whose character the reader gets. Harmony has
    /// none: its messages are read by [`super::Harmony`].
    pub reader: fn(&'static str) -> Option<Box<dyn Reader>>,
}

/// How the calls of a format stand to each other, around what is written for each of them.
pub struct Frame {
    /// Between the marker and the first call.
    pub open: &'static str,
    /// In front of the first call's name, where the call begins with it and text may begin alike.
    pub lead: &'static str,
    /// Between calls that share a marker; `None` where each call has its own.
    pub separator: Option<&'static str>,
    pub close: &'static str,
    /// Between spans with a marker each.
    pub between: &'static str,
}

impl Notation {
    /// What most notations leave empty.
    pub const PLAIN: Self = Self {
        name: "",
        signs: &[],
        openers: &[],
        marks: &[],
        dropped: &[],
        end: "",
        prompt_opener: None,
        protocol: None,
        messages: None,
        bare: None,
        bare_call: None,
        frame: Frame::PLAIN,
        call: |_, _, _| String::new(),
        reader: |_| None,
    };
}

impl Frame {
    pub const PLAIN: Self = Self { open: "", lead: "", separator: None, close: "", between: "" };
}

impl std::fmt::Debug for Notation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Notation").field("name", &self.name).finish_non_exhaustive()
    }
}

impl ToolCallFormat {
    /// Every marker that a tokenizer may have as a token of its own.
    pub(crate) fn markup(self) -> impl Iterator<Item = &'static str> {
        let Notation { openers, dropped, marks, .. } = self.row();
        let is_token = |marker: &&&str| marker.ends_with(['>', ']']);
        openers.iter().filter(is_token).chain(*dropped).chain(*marks).copied()
    }
}
