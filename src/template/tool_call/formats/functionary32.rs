//! `>>>NAME`, a line break and `{...}`; text stands behind `>>>all` (Functionary 3.2). The prompt ends with `>>>`.

use super::{Frame, Notation};
use crate::tool_call::grammar::Messages;
use crate::tool_call::recipient::Recipient;

pub const FUNCTIONARY32: Notation = Notation {
    name: "functionary-3.2",
    signs: &[&[">>>all\\n", "'>>>'"], &[">>>all\n", "'>>>'"]],
    openers: &[">>>"],
    prompt_opener: Some(">>>"),
    messages: Some(Messages { texts: &[("all\n", ">>>")], end: "", calls_end: "" }),
    frame: Frame { separator: Some(">>>"), ..Frame::PLAIN },
    call: |writer, tool, _| writer.json_call(&format!("{}\n", tool.name), tool, ""),
    reader: |_| Some(Box::new(Recipient::new())),
    ..Notation::PLAIN
};
