//! ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` and a JSON code block (DeepSeek V3, R1)

use super::deepseek_v31::DEEPSEEK_V31;
use super::{Frame, ToolCallSpec};

pub const DEEPSEEK_V3: ToolCallSpec = ToolCallSpec {
    name: "deepseek-v3",
    signs: &[&["<｜tool▁call▁begin｜>", "```json"]],
    frame: Frame { separator: Some("\n"), close: "<｜tool▁calls▁end｜>", ..Frame::PLAIN },
    call: |writer, tool, _| {
        let head = format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n", tool.name);
        writer.json_call(&head, tool, "\n```<｜tool▁call▁end｜>")
    },
    ..DEEPSEEK_V31
};
