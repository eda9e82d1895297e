//! Calls as tags: `<function=NAME><parameter=KEY>` value `</parameter></function>`, usually inside a section of their own.
//!
//! Values are plain text and may hold the same tags. A value ends at a close tag that a new parameter or the end of the call
//! follows, and nowhere else; a parameter that is never closed breaks the call, so that no argument is silently lost. Each
//! argument goes out when it is complete.

use super::arguments::Tagging;
use super::coerce::{ArgumentSchema, coerced};
use super::json_text::{quoted, whole_value};
use super::{CallError, CallParser, HeldText, ObjectWriter, ParserResult, ParserStep, PieceSink, met};

/// The tags of one format. A head is what stands between the beginning of a tag and its end: a name, which a quote ends, and
/// attributes.
#[derive(Debug)]
pub struct Tags {
    /// Begins a call; its head follows.
    pub call: &'static str,
    pub head_end: &'static str,
    /// Ends a section; empty where calls stand alone.
    pub section_end: &'static str,
    /// True if a section holds several calls.
    pub is_many: bool,
    /// The template sets values on lines of their own.
    pub has_line_breaks: bool,
    /// A value may stand in `<![CDATA[` and `]]>`.
    pub has_cdata: bool,
    /// The attribute of parameters that are text; without one, the tool's schema tells.
    pub text_attribute: Option<&'static str>,
    /// The beginning and the end of a parameter, and the end of a call.
    pub tagging: Tagging,
}

impl Tags {
    /// Most formats have these, and names between quotes.
    pub const PLAIN: Self = Self {
        call: "",
        head_end: ">",
        section_end: "",
        is_many: false,
        has_line_breaks: false,
        has_cdata: false,
        text_attribute: None,
        tagging: Tagging::named("", "", ""),
    };
}

const CDATA: (&str, &str) = ("<![CDATA[", "]]>");
/// A longer tag is none.
const MAX_KEY: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum XmlState {
    /// Before `<function=`.
    Open,
    Name,
    /// Before a parameter or the end of the function.
    Body,
    Value,
    /// Behind `</function>`.
    Closing,
}

/// Reads one call.
#[derive(Debug)]
pub struct XmlCalls {
    tags: &'static Tags,
    is_wrapped: bool,
    at: HeldText<XmlState>,
    name: String,
    /// Parameters so far; the last one is being read in `Value`.
    keys: Vec<String>,
    /// Of the last one.
    attributes: String,
    writer: ObjectWriter,
}

/// The text that follows a value.
enum XmlNext {
    /// Another parameter of the call.
    Parameter { key: String, attributes: String },
    /// The call ends here, and with it the section.
    Section,
    /// Another call of the section.
    Call,
}

impl XmlCalls {
    pub fn new(tags: &'static Tags, opener: &str) -> Self {
        let is_wrapped = opener != tags.call;
        Self {
            tags,
            is_wrapped,
            at: HeldText::new(if is_wrapped { XmlState::Open } else { XmlState::Name }),
            name: String::new(),
            keys: Vec::new(),
            attributes: String::new(),
            writer: ObjectWriter::default(),
        }
    }

    fn take_open(&mut self) -> ParserResult {
        let is_met = met(&self.at.text, &[self.tags.call])?.is_some();
        if is_met { self.at.enter(XmlState::Name) } else { Ok(ParserStep::More) }
    }

    fn take_name(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        let Some(head) = self.at.text.strip_suffix(self.tags.head_end) else {
            return if self.at.text.len() > MAX_KEY || c == '\n' {
                Err(CallError::Malformed)
            } else {
                Ok(ParserStep::More)
            };
        };
        self.name = split_head(head).0.to_owned();
        sink.name(&self.name)?;
        self.at.enter(XmlState::Body)
    }

    fn take_body(&mut self) -> ParserResult {
        let held = self.at.text.trim_start();
        if held == self.tags.tagging.end {
            return self.at.enter(XmlState::Closing);
        }
        if let Some(head) = held.strip_prefix(self.tags.tagging.before_key) {
            let is_too_long = head.len() > MAX_KEY;
            if let Some(head) = head.strip_suffix(self.tags.head_end) {
                let (key, attributes) = split_head(head);
                self.keys.push(key.to_owned());
                self.attributes = attributes.to_owned();
                self.at.enter(XmlState::Value)?;
            }
            return if is_too_long { Err(CallError::Malformed) } else { Ok(ParserStep::More) };
        }
        let is_tag =
            self.tags.tagging.end.starts_with(held) || self.tags.tagging.before_key.starts_with(held);
        if is_tag { Ok(ParserStep::More) } else { Err(CallError::Malformed) }
    }

    fn take_value(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        if !matches!(c, '>' | '"') {
            return Ok(ParserStep::More);
        }
        let Some((end, next)) = self.next_parameter().or_else(|| self.end_of_call(self.is_wrapped)) else {
            return Ok(ParserStep::More);
        };
        self.end_value(end, sink)?;
        match next {
            XmlNext::Parameter { key, attributes } => {
                self.keys.push(key);
                self.attributes = attributes;
            }
            XmlNext::Call => {
                self.writer.end(sink);
                return self.begin_next();
            }
            XmlNext::Section => {
                self.writer.end(sink);
                self.at.place = XmlState::Closing;
                if self.is_wrapped {
                    return Ok(ParserStep::Done(String::new()));
                }
            }
        }
        Ok(ParserStep::More)
    }

    fn begin_next(&mut self) -> ParserResult {
        self.keys.clear();
        self.at.enter(XmlState::Name)
    }

    /// The text in front of a value's close tag, which the given text ends with.
    fn value_before<'a>(&self, text: &'a str) -> Option<&'a str> {
        let value = text.trim_end().strip_suffix(self.tags.tagging.behind_value)?;
        let is_open = self.tags.has_cdata && value.starts_with(CDATA.0) && !value.ends_with(CDATA.1);
        (!is_open).then_some(value)
    }

    /// The value's length and the next parameter, when the text ends with a close tag and the tag of a parameter that has
    /// not come yet.
    fn next_parameter(&self) -> Option<(usize, XmlNext)> {
        let before_head = self.at.text.strip_suffix(self.tags.head_end)?;
        let parameter = self.tags.tagging.before_key;
        let longest = before_head.len().saturating_sub(parameter.len() + MAX_KEY);
        let start = before_head.floor_char_boundary(longest);
        let tag = start + before_head[start..].rfind(parameter)?;
        let (key, attributes) = split_head(&before_head[tag + parameter.len()..]);
        let is_key =
            !key.is_empty() && !key.contains(['<', '>', '\n']) && !self.keys.iter().any(|seen| seen == key);
        let before = self.value_before(&self.at.text[..tag])?;
        let next = XmlNext::Parameter { key: key.to_owned(), attributes: attributes.to_owned() };
        is_key.then_some((before.len(), next))
    }

    /// The value's length, when the text ends with all that ends a call.
    fn end_of_call(&self, with_wrapper: bool) -> Option<(usize, XmlNext)> {
        let Tags { call, section_end, is_many, tagging, .. } = self.tags;
        let text = self.at.text.trim_end();
        let (text, next) = match with_wrapper {
            false => (text, XmlNext::Section),
            true => match text.strip_suffix(section_end) {
                Some(text) => (text, XmlNext::Section),
                None if *is_many => (text.strip_suffix(call)?, XmlNext::Call),
                None => return None,
            },
        };
        let value = self.value_before(text.trim_end().strip_suffix(tagging.end)?)?;
        Some((value.len(), next))
    }

    fn end_value(&mut self, len: usize, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        let mut text = std::mem::take(&mut self.at.text);
        text.truncate(len);
        let key = self.keys.last().ok_or(CallError::Malformed)?;
        let parameters = &sink.tools.get(&self.name).ok_or(CallError::Malformed)?.parameters;
        if self.hides_a_parameter(&text, parameters) {
            return Err(CallError::Malformed);
        }
        let value = self.value(&text, ArgumentSchema::new(parameters).property(key));
        self.writer.member(key, &value, sink);
        Ok(())
    }

    /// A value's text as JSON.
    fn value(&self, text: &str, schema: ArgumentSchema<'_>) -> String {
        if let Some(attribute) = self.tags.text_attribute {
            return match self.attributes.contains(attribute) {
                true => quoted(text),
                false => whole_value(text).unwrap_or_else(|_| coerced(text, schema)),
            };
        }
        let inside = text.strip_prefix(CDATA.0).and_then(|text| text.strip_suffix(CDATA.1));
        match inside.filter(|_| self.tags.has_cdata) {
            Some(inside) => coerced(inside, schema),
            None if self.tags.has_line_breaks => coerced(without_line_breaks(text), schema),
            None => coerced(text, schema),
        }
    }

    /// Returns whether the value swallowed a parameter of this tool because a close tag is missing.
    fn hides_a_parameter(&self, text: &str, parameters: &serde_json::Value) -> bool {
        let Tagging { before_key: parameter, behind_value, .. } = self.tags.tagging;
        if text.matches(parameter).count() <= text.matches(behind_value).count() {
            return false;
        }
        let properties = parameters.get("properties").and_then(serde_json::Value::as_object);
        let unseen = properties.into_iter().flat_map(|all| all.keys()).filter(|key| !self.keys.contains(key));
        let heads =
            text.split(parameter).skip(1).map(|rest| split_head(rest.split('>').next().unwrap_or(rest)).0);
        let heads: Vec<&str> = heads.collect();
        unseen.map(String::as_str).any(|key| heads.contains(&key))
    }

    fn take_closing(&mut self, sink: &mut PieceSink<'_>) -> ParserResult {
        let Tags { call, section_end, is_many, .. } = self.tags;
        let next_call = if *is_many && self.is_wrapped { call } else { "" };
        match met(&self.at.text, &[section_end, next_call]) {
            Ok(Some(0)) => {
                self.end_open(sink);
                Ok(ParserStep::Done(String::new()))
            }
            Ok(Some(_)) => {
                self.end_open(sink);
                self.begin_next()
            }
            Ok(None) if !section_end.is_empty() => Ok(ParserStep::More),
            _ if self.is_wrapped => Err(CallError::Malformed),
            _ => Ok(ParserStep::Done(std::mem::take(&mut self.at.text))),
        }
    }

    fn end_open(&mut self, sink: &mut PieceSink<'_>) {
        if sink.calls.is_open {
            self.writer.end(sink);
        }
    }
}

impl CallParser for XmlCalls {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        self.at.text.push(c);
        match self.at.place {
            XmlState::Open => self.take_open(),
            XmlState::Name => self.take_name(c, sink),
            XmlState::Body => {
                let step = self.take_body();
                if self.at.place == XmlState::Closing && !self.is_wrapped {
                    self.writer.end(sink);
                }
                step
            }
            XmlState::Value => self.take_value(c, sink),
            XmlState::Closing => self.take_closing(sink),
        }
    }

    fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        let is_whole = match self.at.place {
            XmlState::Closing => true,
            XmlState::Value if !is_cut => match self.end_of_call(false) {
                Some((end, _)) => {
                    self.end_value(end, sink)?;
                    true
                }
                None => false,
            },
            _ => false,
        };
        if !is_whole || (is_cut && sink.calls.is_open) {
            return Err(CallError::Malformed);
        }
        self.end_open(sink);
        Ok(())
    }
}

/// The name in a head, and its attributes.
fn split_head(head: &str) -> (&str, &str) {
    let (name, attributes) = head.split_once('"').unwrap_or((head, ""));
    (name.trim(), attributes)
}

/// Without the line break that the template sets behind the opening tag and before the closing one.
fn without_line_breaks(text: &str) -> &str {
    let text = text.strip_prefix("\r\n").or_else(|| text.strip_prefix('\n')).unwrap_or(text);
    text.strip_suffix("\r\n").or_else(|| text.strip_suffix('\n')).unwrap_or(text)
}
