//! `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>` (Nemotron Nano v2)

use super::tool_calls_tag::TOOL_CALLS_TAG;
use super::{Frame, ToolCallSpec, objects};

pub const TOOLCALL_TAG: ToolCallSpec = ToolCallSpec {
    name: "toolcall-tag",
    signs: &[&["<TOOLCALL>["]],
    openers: &["<TOOLCALL>"],
    marks: &["</TOOLCALL>"],
    end: "</TOOLCALL>",
    frame: Frame { open: "[", separator: Some(", "), close: "]</TOOLCALL>", ..Frame::PLAIN },
    reader: |_| objects(Some("</TOOLCALL>")),
    ..TOOL_CALLS_TAG
};
