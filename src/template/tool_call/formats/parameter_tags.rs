//! Formats with a tag for each parameter.

use super::{Frame, Notation, ToolCallSpec};
use crate::tool_call::arguments::Tagging;
use crate::tool_call::minimax_m3::{M3Calls, TOKEN};
use crate::tool_call::spec::Messages;
use crate::tool_call::xml::Tags;

/// `<function=NAME><parameter=K>` value `</parameter></function>`, usually in `<tool_call>` (Qwen3-Coder, Qwen 3.5)
pub const QWEN_XML: ToolCallSpec = ToolCallSpec {
    name: "qwen-xml",
    signs: &[&["<function=", "<parameter="]],
    openers: &["<tool_call>", "<function="],
    end: "</tool_call>",
    frame: Frame { open: "\n<function=", close: "\n</tool_call>", between: "\n", ..Frame::PLAIN },
    notation: Notation::Tags(QWEN_TAGS),
    ..ToolCallSpec::PLAIN
};

const QWEN_TAGS: Tags = Tags {
    call: "<function=",
    section_end: "</tool_call>",
    has_line_breaks: true,
    tagging: Tagging {
        behind_name: ">",
        before_key: "<parameter=",
        behind_key: |_| &[">\n"],
        behind_value: "</parameter>",
        end: "</function>",
    },
    ..Tags::PLAIN
};

/// As `qwen_xml`, in `<seed:tool_call>` and with values on the lines of their tags (Seed-OSS)
pub const SEED_XML: ToolCallSpec = ToolCallSpec {
    name: "seed-xml",
    signs: &[&["<seed:tool_call>", "<function=", "<parameter="]],
    openers: &["<seed:tool_call>", "<function="],
    end: "</seed:tool_call>",
    frame: Frame { close: "\n</seed:tool_call>", ..QWEN_XML.frame },
    notation: Notation::Tags(Tags {
        section_end: "</seed:tool_call>",
        has_line_breaks: false,
        tagging: Tagging { behind_key: |_| &[">"], ..QWEN_TAGS.tagging },
        ..QWEN_TAGS
    }),
    ..QWEN_XML
};

/// `<function name="NAME"><param name="K">` value `</param></function>`, values with markup in CDATA (MiniCPM5)
pub const MINICPM5: ToolCallSpec = ToolCallSpec {
    marks: &["<param", "</param>"],
    frame: Frame { between: "\n", ..Frame::PLAIN },
    notation: Notation::Tags(Tags {
        call: "<function name=\"",
        has_cdata: true,
        tagging: Tagging::named("<param name=\"", "</param>", "</function>"),
        ..Tags::PLAIN
    }),
    ..ToolCallSpec::new(
        "minicpm5",
        &[&["<function name=\"", "<param name=\""]],
        &["<function name=\""],
        "</function>",
    )
};

/// `<minimax:tool_call><invoke name="NAME"><parameter name="K">` value `</parameter></invoke></minimax:tool_call>` (MiniMax M2)
pub const MINIMAX_M2: ToolCallSpec = ToolCallSpec {
    name: "minimax-m2",
    signs: &[&["<minimax:tool_call>", "<invoke name="]],
    openers: &["<minimax:tool_call>"],
    end: "</minimax:tool_call>",
    frame: Frame::each("\n<invoke name=\"", "\n</minimax:tool_call>"),
    notation: Notation::Tags(Tags {
        call: "<invoke name=\"",
        section_end: "</minimax:tool_call>",
        is_many: true,
        tagging: Tagging::named("<parameter name=\"", "</parameter>", "</invoke>"),
        ..Tags::PLAIN
    }),
    ..ToolCallSpec::PLAIN
};

/// `<｜DSML｜function_calls><｜DSML｜invoke name="NAME"><｜DSML｜parameter name="K" string="true">` value (DeepSeek V3.2)
pub const DEEPSEEK_V32: ToolCallSpec = ToolCallSpec {
    name: "deepseek-v3.2",
    signs: &[&["｜DSML｜", "function_calls>"]],
    openers: &["<｜DSML｜function_calls>"],
    marks: &["｜DSML｜"],
    end: "</｜DSML｜function_calls>",
    frame: Frame::each("\n<｜DSML｜invoke name=\"", "\n</｜DSML｜function_calls>"),
    notation: Notation::Tags(DSML_TAGS),
    ..ToolCallSpec::PLAIN
};

const DSML_TAGS: Tags = Tags {
    call: "<｜DSML｜invoke name=\"",
    section_end: "</｜DSML｜function_calls>",
    is_many: true,
    text_attribute: Some("string=\"true\""),
    tagging: Tagging {
        behind_key: |types| {
            if types.is_text() { &["\" string=\"true\">"] } else { &["\" string=\"false\">"] }
        },
        ..Tagging::named("<｜DSML｜parameter name=\"", "</｜DSML｜parameter>", "</｜DSML｜invoke>")
    },
    ..Tags::PLAIN
};

/// As `deepseek_v32`, in `<｜DSML｜tool_calls>` (DeepSeek V4)
pub const DEEPSEEK_V4: ToolCallSpec = ToolCallSpec {
    name: "deepseek-v4",
    signs: &[&["｜DSML｜", "tool_calls>"]],
    openers: &["<｜DSML｜tool_calls>"],
    end: "</｜DSML｜tool_calls>",
    frame: Frame { close: "\n</｜DSML｜tool_calls>", ..DEEPSEEK_V32.frame },
    notation: Notation::Tags(Tags { section_end: "</｜DSML｜tool_calls>", ..DSML_TAGS }),
    ..DEEPSEEK_V32
};

/// `<|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="K" type="string"<|sep|>` value `<|close|>argument<|sep|>` in
/// `<|open|>tools<|sep|>` (Kimi K3)
pub const KIMI_K3: ToolCallSpec = ToolCallSpec {
    name: "kimi-k3",
    signs: &[&["<|open|>", "<|close|>", "<|sep|>"]],
    openers: &["<|open|>tools<|sep|>"],
    marks: &["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    end: "<|close|>tools<|sep|>",
    messages: Some(Messages {
        texts: &[
            ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
            ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        ],
        end: "<|close|>message<|sep|>",
        calls_end: "<|close|>message<|sep|>",
    }),
    frame: Frame {
        open: "<|open|>tools<|sep|><|open|>call tool=\"",
        ..Frame::each("<|open|>call tool=\"", "<|close|>tools<|sep|>")
    },
    notation: Notation::Tags(KIMI_TAGS),
    call: |_, writer, tool, _| {
        let number = writer.terminal("/[1-9][0-9]{0,3}/");
        let head = writer.literal(&format!("{}\" index=\"", tool.name));
        let body = writer.tagged_body(tool, &KIMI_TAGS.tagging);
        format!("{head} {number} {} {body}", writer.literal("\"<|sep|>"))
    },
    ..ToolCallSpec::PLAIN
};

const KIMI_TAGS: Tags = Tags {
    call: "<|open|>call tool=\"",
    head_end: "<|sep|>",
    section_end: "<|close|>tools<|sep|>",
    is_many: true,
    text_attribute: Some("type=\"string\""),
    tagging: Tagging {
        behind_name: "",
        behind_key: |types| {
            if types.is_text() {
                return &["\" type=\"string\"<|sep|>"];
            }
            &[
                "\" type=\"number\"<|sep|>",
                "\" type=\"boolean\"<|sep|>",
                "\" type=\"object\"<|sep|>",
                "\" type=\"array\"<|sep|>",
                "\" type=\"null\"<|sep|>",
            ]
        },
        ..Tagging::named("<|open|>argument key=\"", "<|close|>argument<|sep|>", "<|close|>call<|sep|>")
    },
    ..Tags::PLAIN
};

/// `<tool_call><invoke name="NAME"><K>` value `</K></invoke></tool_call>`, the token `]<]minimax[>[` in front of every tag
/// (MiniMax M3)
pub const MINIMAX_M3: ToolCallSpec = ToolCallSpec {
    name: "minimax-m3",
    signs: &[&[TOKEN, "<invoke name="]],
    openers: &["]<]minimax[>[<tool_call>"],
    marks: &[TOKEN],
    end: "]<]minimax[>[</tool_call>",
    frame: Frame::each("\n]<]minimax[>[<invoke name=\"", "\n]<]minimax[>[</tool_call>"),
    notation: Notation::Own(|_| Box::new(M3Calls::default())),
    call: |_, writer, tool, _| {
        let head = writer.literal(&format!("{}\">", tool.name));
        let members = writer.elements(&tool.parameters, TOKEN);
        format!("{head} {members} {}", writer.literal("]<]minimax[>[</invoke>"))
    },
    ..ToolCallSpec::PLAIN
};
