//! The table of tool-call formats: each is one constant under `formats`, and one row here.

use super::formats as f;
use super::spec::ToolCallSpec;
use crate::named::formats;

formats! {
    /// The markup of tool calls.
    ToolCallFormat, "tool-call format", ToolCallSpec, [
        /// As `Glm`, every tag with the suffix `:opensource` (Hy3)
        Hy3 => f::glm::HY3,
        /// `<tool_call>NAME` with `<arg_key>` and `<arg_value>` (GLM 4.5 on)
        Glm => f::glm::GLM,
        /// As `QwenXml`, in `<seed:tool_call>`
        SeedXml => f::parameter_tags::SEED_XML,
        /// `<function=NAME><parameter=K>` value `</parameter></function>`, usually in `<tool_call>` (Qwen3-Coder, Qwen 3.5)
        QwenXml => f::parameter_tags::QWEN_XML,
        /// `<function name="NAME"><param name="K">` value `</param></function>` (MiniCPM5)
        MiniCpm5 => f::parameter_tags::MINICPM5,
        /// `]<]minimax[>[<tool_call>` with a tag for each parameter (MiniMax M3)
        MiniMaxM3 => f::parameter_tags::MINIMAX_M3,
        /// `<minimax:tool_call><invoke name="NAME"><parameter name="K">` value (MiniMax M2)
        MiniMaxM2 => f::parameter_tags::MINIMAX_M2,
        /// `<｜DSML｜tool_calls><｜DSML｜invoke name="NAME">` (DeepSeek V4)
        DeepSeekV4 => f::parameter_tags::DEEPSEEK_V4,
        /// `<｜DSML｜function_calls><｜DSML｜invoke name="NAME">` (DeepSeek V3.2)
        DeepSeekV32 => f::parameter_tags::DEEPSEEK_V32,
        /// ` to=NAME<|message|><atem:function_calls>` (Muse Glimmer)
        MuseGlimmer => f::headed::MUSE_GLIMMER,
        /// `<|open|>tools<|sep|><|open|>call tool="NAME"` (Kimi K3)
        KimiK3 => f::parameter_tags::KIMI_K3,
        /// `<|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}` (Solar Open)
        SolarOpen => f::named_json::SOLAR_OPEN,
        /// `<|tool_call>call:NAME{key:value}<tool_call|>`, strings between `<|"|>` (Gemma 4)
        Gemma => f::plain::GEMMA,
        /// `[TOOL_CALLS]NAME[ARGS]{...}`, perhaps with `[CALL_ID]` (Mistral v11 on)
        MistralArgs => f::plain::MISTRAL_ARGS,
        /// `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` (Mistral v2 to v7)
        Mistral => f::plain::MISTRAL,
        /// ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` and a JSON code block (DeepSeek V3, R1)
        DeepSeekV3 => f::named_json::DEEPSEEK_V3,
        /// ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}`` (DeepSeek V3.1)
        DeepSeekV31 => f::named_json::DEEPSEEK_V31,
        /// `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` (Kimi K2)
        Kimi => f::named_json::KIMI,
        /// `<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>` (Command A)
        CommandAction => f::plain::COMMAND_ACTION,
        /// `<|tool_call_start|>[f(a=1)]<|tool_call_end|>` (LFM2)
        Lfm2 => f::plain::LFM2,
        /// `<|tool_call|>[{"name": ..., "arguments": {...}}]` (Granite 3)
        Granite => f::plain::GRANITE,
        /// `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>` (gpt-oss)
        Harmony => f::headed::HARMONY,
        /// `<|tools_prefix|>[{NAME: {...}}]<|tools_suffix|>` (Apertus)
        Apertus => f::plain::APERTUS,
        /// `<|function_call|>{"name": ..., "arguments": {...}}` (GigaChat 3.1)
        GigaChat31 => f::plain::GIGACHAT31,
        /// A message of the role `function call` (GigaChat 3)
        GigaChat3 => f::plain::GIGACHAT3,
        /// `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>` (Nemotron Nano v2)
        ToolcallTag => f::plain::TOOLCALL_TAG,
        /// `>>>NAME` and `{...}` on a line of its own (Functionary 3.2)
        Functionary32 => f::plain::FUNCTIONARY32,
        /// `Action:` and a code block with a list of calls (Command R+)
        CommandR => f::plain::COMMAND_R,
        /// `<tool_calls>` with an object a line (MiniMax M1)
        MiniMaxM1 => f::plain::MINIMAX_M1,
        /// `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>` (Jamba, Apriel)
        ToolCallsTag => f::plain::TOOL_CALLS_TAG,
        /// `functools[{"name": ..., "arguments": {...}}]` (Firefunction)
        Functools => f::plain::FUNCTOOLS,
        /// `<tool_call>` `{"name": ..., "arguments": {...}}` `</tool_call>` (Qwen 2.5 and 3, Hermes)
        Hermes => f::plain::HERMES,
        /// `<function=NAME>{...}</function>` (Functionary 3.1)
        FunctionTag => f::named_json::FUNCTION_TAG,
        /// `[f(a=1), g()]` as the whole answer (Llama 4, LFM2)
        Pythonic => f::plain::PYTHONIC,
        /// The whole answer is `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>` (Llama 3.1 on)
        Llama3 => f::plain::LLAMA3,
        /// As `Hermes`, asked for by a system prompt of llmctl's own: for templates that show no tools or no calls
        Generic => f::plain::GENERIC,
    ]
}

impl ToolCallFormat {
    /// Every marker that a tokenizer may have as a token of its own.
    pub(crate) fn markers(self) -> impl Iterator<Item = &'static str> {
        let ToolCallSpec { openers, unwritten_openers, dropped, marks, end, .. } = self.row();
        let is_token = |marker: &&&str| marker.ends_with(['>', ']']);
        let tokens = openers.iter().chain([end]).filter(is_token);
        tokens.chain(*unwritten_openers).chain(*dropped).chain(*marks).copied()
    }
}
