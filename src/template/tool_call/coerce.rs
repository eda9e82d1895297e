//! Text to JSON by the tool's schema, for forms that write arguments as plain text.
//!
//! A type that allows strings keeps the text exactly. Any other type is taken only when the text is a value of that type
//! (`true`, digits, a finite number, JSON); what fits no type stays a string, so that nothing is lost and the tool can
//! see what was meant. Text without a type is JSON when it parses as JSON and a string otherwise.

use serde_json::Value;

use super::json_text::{is_json_number, quoted, whole_value};
use super::{TEXT_GRAMMAR, python_literal};

/// A schema with the document that its references point into.
#[derive(Debug, Clone, Copy)]
pub struct ArgumentSchema<'a> {
    root: &'a Value,
    node: Option<&'a Value>,
}

/// The JSON types that a schema allows; none where it does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Types {
    pub string: bool,
    pub boolean: bool,
    pub integer: bool,
    pub number: bool,
    pub null: bool,
    pub array: bool,
    pub object: bool,
}

impl Types {
    fn add(&mut self, name: &str) {
        match name {
            "string" => self.string = true,
            "boolean" => self.boolean = true,
            "integer" => self.integer = true,
            "number" => self.number = true,
            "null" => self.null = true,
            "array" => self.array = true,
            "object" => self.object = true,
            _ => {}
        }
    }

    fn add_value(&mut self, value: &Value) {
        self.add(match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(number) if number.is_f64() => "number",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        });
    }

    /// Returns whether a value is of one of the types.
    pub fn allows(self, value: &Value) -> bool {
        match value {
            Value::Null => self.null,
            Value::Bool(_) => self.boolean,
            Value::Number(number) => self.number || self.integer && !number.is_f64(),
            Value::String(_) => self.string,
            Value::Array(_) => self.array,
            Value::Object(_) => self.object,
        }
    }

    pub fn is_unknown(self) -> bool {
        self == Self::default()
    }

    /// Returns whether a value may be any text: strings are allowed, or the schema names no type.
    pub fn is_text(self) -> bool {
        self.string || self.is_unknown()
    }
}

/// Keywords of JSON Schema that are counts; their value may be written with a decimal point.
pub const COUNT_KEYWORDS: &str = "minLength maxLength minItems maxItems minProperties maxProperties";

/// Returns whether `word` is one of `words`, between which are spaces.
pub fn has_word(words: &str, word: &str) -> bool {
    words.split(' ').any(|known| known == word)
}

/// Longer integers overflow the doubles of JSON readers.
const MAX_DIGITS: usize = 300;
/// References followed before giving up: a schema may point at itself.
const MAX_REFERENCES: usize = 32;
/// Most schemas that apply to one value.
const MAX_SCHEMAS: usize = 256;

impl<'a> ArgumentSchema<'a> {
    pub fn new(root: &'a Value) -> Self {
        Self { root, node: Some(root) }
    }

    /// A schema of the same document.
    pub fn at(self, node: Option<&'a Value>) -> Self {
        Self { root: self.root, node }
    }

    /// The schema of a member, by `properties` or else `additionalProperties`.
    pub fn property(self, key: &str) -> Self {
        let nodes = self.nodes();
        let named = |node: &&'a Value| node.get("properties")?.get(key);
        let more = |node: &&'a Value| node.get("additionalProperties").filter(|more| more.is_object());
        self.at(nodes.iter().find_map(named).or_else(|| nodes.iter().find_map(more)))
    }

    /// The schema of a list's items.
    pub fn items(self) -> Self {
        self.at(self.nodes().iter().find_map(|node| node.get("items").filter(|items| items.is_object())))
    }

    /// The document.
    pub fn root(self) -> &'a Value {
        self.root
    }

    /// The schema itself, behind its references.
    pub fn node(self) -> Option<&'a Value> {
        let mut node = self.node?;
        for _ in 0..MAX_REFERENCES {
            let Some(reference) = node.get("$ref").and_then(Value::as_str) else { return Some(node) };
            node = resolve(self.root, reference)?;
        }
        None
    }

    /// The number that a keyword gives.
    pub fn number(self, keyword: &str) -> Option<u64> {
        self.node()?.get(keyword)?.as_u64()
    }

    /// A schema of one type, with those of the keywords that it has.
    pub fn part(self, kind: &str, keywords: &[&str]) -> Value {
        let given =
            keywords.iter().filter_map(|name| Some(((*name).to_owned(), self.node()?.get(*name)?.clone())));
        std::iter::once(("type".to_owned(), kind.into())).chain(given).collect()
    }

    /// The least and the greatest number that two keywords give, as in a regular expression's repetition.
    pub fn range(self, least: &str, greatest: &str) -> String {
        let greatest = self.number(greatest).map_or_else(String::new, |number| number.to_string());
        format!("{},{greatest}", self.number(least).unwrap_or(0))
    }

    /// The strings that an `enum` or `const` allows.
    pub fn strings(self) -> Option<Vec<String>> {
        let node = self.node()?;
        let values: Vec<&Value> = match node.get("const") {
            Some(value) => vec![value],
            None => node.get("enum")?.as_array()?.iter().collect(),
        };
        Some(values.into_iter().filter_map(|value| value.as_str().map(str::to_owned)).collect())
    }

    /// The grammar of a string's text, of one kind.
    pub fn text_grammar(self, kind: &str) -> Option<&'a str> {
        self.node()?.get(TEXT_GRAMMAR)?.get(kind)?.as_str()
    }

    /// Returns the schema and those that it refers to or combines, each once.
    fn nodes(self) -> Vec<&'a Value> {
        let mut nodes: Vec<&Value> = self.node.into_iter().collect();
        let mut at = 0;
        while let Some(node) = nodes.get(at).copied().filter(|_| at < MAX_SCHEMAS) {
            let target =
                node.get("$ref").and_then(Value::as_str).and_then(|target| resolve(self.root, target));
            let options = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|key| node.get(key)?.as_array());
            for next in target.into_iter().chain(options.flatten()) {
                if !nodes.iter().any(|known| std::ptr::eq(*known, next)) {
                    nodes.push(next);
                }
            }
            at += 1;
        }
        nodes
    }

    /// Returns the types that a value may have.
    pub fn types(self) -> Types {
        let mut types = Types::default();
        for node in self.nodes() {
            match node.get("type") {
                Some(Value::String(name)) => types.add(name),
                Some(Value::Array(names)) => {
                    names.iter().filter_map(Value::as_str).for_each(|name| types.add(name))
                }
                _ => {
                    let values = node.get("enum").and_then(Value::as_array).into_iter().flatten();
                    values.chain(node.get("const")).for_each(|value| types.add_value(value));
                }
            }
            types.null |= node.get("nullable") == Some(&Value::Bool(true));
        }
        types
    }
}

/// Returns the schema that a reference within a document points to. Its path may be percent-encoded (RFC 6901, section 6).
pub fn resolve<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    let pointer = reference.strip_prefix('#')?;
    if !pointer.contains('%') {
        return root.pointer(pointer);
    }
    let mut parts = pointer.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend(&part.as_bytes()[2..]);
    }
    root.pointer(str::from_utf8(&bytes).ok()?)
}

/// JSON text for an argument written as plain text.
pub fn coerced(raw: &str, schema: ArgumentSchema<'_>) -> String {
    let types = schema.types();
    let text = raw.trim();
    if types.is_unknown() {
        return whole_value(text).unwrap_or_else(|_| quoted(raw));
    }
    typed(text, types)
        .filter(|_| !types.string || is_null(text) || text.starts_with(['{', '[']))
        .unwrap_or_else(|| quoted(raw))
}

/// JSON text for a bare word (no quotes around it), by any type but string.
pub fn typed(text: &str, types: Types) -> Option<String> {
    let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if types.null && is_null(text) {
        return Some("null".to_owned());
    }
    let lower = text.to_ascii_lowercase();
    if types.boolean && matches!(&*lower, "true" | "false") {
        return Some(lower);
    }
    if (types.integer || types.number) && is_digits(text.strip_prefix(['-', '+']).unwrap_or(text)) {
        let digits = text.trim_start_matches(['-', '+']).trim_start_matches('0');
        if digits.len() > MAX_DIGITS {
            return None;
        }
        let sign = if text.starts_with('-') && !digits.is_empty() { "-" } else { "" };
        return Some(format!("{sign}{}", if digits.is_empty() { "0" } else { digits }));
    }
    if types.number
        && let Some(number) = finite(text)
    {
        return Some(number);
    }
    let opens = |open: char, allowed: bool| allowed && text.starts_with(open);
    if opens('[', types.array) || opens('{', types.object) {
        return whole_value(text).ok().or_else(|| python_literal::whole_value(text));
    }
    None
}

fn is_null(text: &str) -> bool {
    matches!(text, "null" | "None")
}

/// A finite number in any common spelling (`1.`, `.5`, `+2.5`), as JSON.
fn finite(text: &str) -> Option<String> {
    let value: f64 = text.parse().ok().filter(|value: &f64| value.is_finite())?;
    let is_numeric = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-'));
    match is_json_number(text) {
        true => Some(text.to_owned()),
        false if is_numeric => serde_json::to_string(&value).ok(),
        false => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(schema: &Value, raw: &str, expected: &Value) {
        let root =
            json!({"type": "object", "properties": {"x": schema}, "$defs": {"count": {"type": "integer"}}});
        let text = coerced(raw, ArgumentSchema::new(&root).property("x"));
        let got: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(&got, expected, "{schema} {raw:?}");
    }

    #[test]
    fn strings_keep_their_text() {
        for schema in
            [json!({"type": "string"}), json!({"type": ["string", "null"]}), json!({"enum": ["12", "a"]})]
        {
            for raw in ["12", "true", "  indented\n\tcode  ", "", "NaN", "007"] {
                check(&schema, raw, &json!(raw));
            }
        }
        check(&json!({"anyOf": [{"type": "string"}, {"type": "integer"}]}), "12", &json!("12"));
        check(&json!({"type": ["string", "array"]}), "[1]", &json!([1]));
        check(&json!({"type": ["string", "null"]}), "null", &json!(null));
    }

    #[test]
    fn other_types_are_taken_or_left() {
        check(&json!({"type": "boolean"}), "True", &json!(true));
        check(&json!({"type": "boolean"}), "1", &json!("1"));
        check(&json!({"type": "integer"}), "-12", &json!(-12));
        check(&json!({"type": "integer"}), "007", &json!(7));
        check(&json!({"type": "integer"}), "10.0", &json!("10.0"));
        check(&json!({"type": "integer"}), "1_000", &json!("1_000"));
        check(&json!({"$ref": "#/$defs/count"}), " 3\n", &json!(3));
        check(&json!({"type": "number"}), "2.5", &json!(2.5));
        check(&json!({"type": "number"}), ".5", &json!(0.5));
        for text in ["NaN", "inf", "-Infinity", "1e999"] {
            check(&json!({"type": "number"}), text, &json!(text));
        }
        check(&json!({"type": "object"}), "{\"a\": [1]}", &json!({"a": [1]}));
        check(&json!({"type": "object"}), "{'a': True}", &json!({"a": true}));
        check(&json!({"type": "array"}), "{}", &json!("{}"));
        check(&json!({"type": ["integer", "null"]}), "None", &json!(null));
    }

    #[test]
    fn text_without_a_type_is_guessed() {
        check(&json!({}), "12", &json!(12));
        check(&json!({}), "NaN", &json!("NaN"));
        check(&json!({}), "a b", &json!("a b"));
        check(&json!({}), "[1, 2", &json!("[1, 2"));
    }

    #[test]
    fn a_schema_that_points_at_itself_ends() {
        let root = json!({"properties": {"x": {"$ref": "#/properties/x"}, "y": {"anyOf": [{"$ref": "#/properties/y"}]}}});
        assert!(ArgumentSchema::new(&root).property("x").types().is_unknown());
        assert!(ArgumentSchema::new(&root).property("y").types().is_unknown());
    }
}
