//! `>>>NAME`, a line break and `{...}`; text stands behind `>>>all` (Functionary 3.2). The prompt ends with `>>>`.

use super::{Frame, ToolCallSpec};
use crate::tool_call::recipient::Recipient;
use crate::tool_call::spec::Messages;

pub const FUNCTIONARY32: ToolCallSpec = ToolCallSpec {
    name: "functionary-3.2",
    signs: &[&[">>>all\\n", "'>>>'"], &[">>>all\n", "'>>>'"]],
    openers: &[">>>"],
    prompt_opener: Some(">>>"),
    messages: Some(Messages { texts: &[("all\n", ">>>")], end: "", calls_end: "" }),
    frame: Frame { separator: Some(">>>"), ..Frame::PLAIN },
    call: |writer, tool, _| writer.json_call(&format!("{}\n", tool.name), tool, ""),
    reader: |_| Some(Box::new(Recipient::new())),
    ..ToolCallSpec::PLAIN
};
