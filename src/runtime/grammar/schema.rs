//! Prepares JSON Schemas for llguidance: checks them, removes keywords without effect, sets the layout of
//! answers, and translates the library's errors.
//!
//! Invariant: an answer that satisfies the prepared schema satisfies the original.

use std::collections::HashSet;
use std::fmt::Display;

use serde_json::{Map, Value, json};

use super::{GrammarSource, satisfiable};
use crate::runtime::error::GrammarError;

/// Most nested arrays and objects.
const MAX_DEPTH: usize = 64;

/// Most schemas on a path from the root through references, with those that enclose them. The library follows
/// them by recursion, and its stack is sized for as many.
pub const MAX_CHAIN: usize = 2048;

/// Member from which llguidance reads its options.
const OPTIONS: &str = "x-guidance";

/// Keywords whose value is a schema, or a list of them.
const SCHEMAS: [&str; 15] = [
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "oneOf",
    "prefixItems",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
];

/// Keywords whose members are schemas.
const SCHEMA_MAPS: [&str; 6] =
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"];

/// Keywords that are counts; their value may be written with a decimal point.
const COUNTS: [&str; 6] =
    ["maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"];

/// Formats that JSON Schema defines. Any other is an annotation without effect (2020-12, validation, 7.2.3).
const FORMATS: [&str; 19] = [
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "idn-email",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "time",
    "uri",
    "uri-reference",
    "uri-template",
    "uuid",
];

/// Returns the schema for the library, with our options in it.
///
/// # Errors
/// [`GrammarError::Invalid`] for an invalid schema, [`GrammarError::TooComplex`] for one too deep, and
/// [`GrammarError::Unsupported`] for one with library options of its own, which could disable keywords.
pub fn prepare(schema: &Value) -> Result<Value, GrammarError> {
    if depth(schema) > MAX_DEPTH {
        return Err(GrammarError::TooComplex(format!("more than {MAX_DEPTH} levels deep")));
    }
    let mut schema = match schema {
        Value::Object(members) => members.clone(),
        Value::Bool(true) => Map::new(),
        Value::Bool(false) => {
            return Err(GrammarError::Invalid("nothing satisfies the schema false".to_owned()));
        }
        _ => return Err(GrammarError::Invalid("a schema is an object or a boolean".to_owned())),
    };
    if schema.contains_key(OPTIONS) {
        return Err(unsupported(OPTIONS, "options of the grammar library are not for requests"));
    }
    check_resources(&schema)?;
    simplify(&mut schema);
    let whole = Value::Object(schema);
    check_chain(&whole)?;
    satisfiable::check(&whole)?;
    let Value::Object(mut schema) = whole else { unreachable!("made above") };
    schema.insert(OPTIONS.to_owned(), layout());
    Ok(Value::Object(schema))
}

/// Returns a schema without keywords that have no effect, to embed in our own grammars. A schema that is not
/// an object stays unchanged.
pub fn simplified(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if depth(&schema) <= MAX_DEPTH
        && let Some(members) = schema.as_object_mut()
    {
        simplify(members);
    }
    schema
}

/// White space as written by Python's `json.dumps`, which models have seen most. A fixed layout forces names
/// and punctuation, and prevents endless white space.
fn layout() -> Value {
    json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "})
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(members) => 1 + members.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// Walks the schema as the library does: depth first in the order of members, each reference once,
/// definitions only where they are referenced.
///
/// # Errors
/// [`GrammarError::TooComplex`] beyond [`MAX_CHAIN`].
pub fn check_chain(root: &Value) -> Result<(), GrammarError> {
    let mut seen = HashSet::new();
    let mut ahead = vec![(root, 1)];
    while let Some((value, depth)) = ahead.pop() {
        if depth > MAX_CHAIN {
            let message = format!("references lead more than {MAX_CHAIN} schemas deep");
            return Err(GrammarError::TooComplex(message));
        }
        let target = |reference: &str| reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
        match value {
            Value::Array(items) => ahead.extend(items.iter().rev().map(|item| (item, depth + 1))),
            Value::Object(members) => {
                for (keyword, member) in members.iter().rev() {
                    match member {
                        Value::String(reference) if keyword == "$ref" => {
                            let is_new = seen.insert(reference);
                            ahead
                                .extend(target(reference).filter(|_| is_new).map(|found| (found, depth + 1)));
                        }
                        _ if keyword == "$defs" || keyword == "definitions" => {}
                        _ => ahead.push((member, depth + 1)),
                    }
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Removes keywords without effect and writes counts as integers, in a schema and those below it.
fn simplify(schema: &mut Map<String, Value>) {
    if schema.get("uniqueItems") == Some(&Value::Bool(false)) {
        schema.shift_remove("uniqueItems");
    }
    if schema.get("format").and_then(Value::as_str).is_some_and(|name| !FORMATS.contains(&name)) {
        schema.shift_remove("format");
    }
    for count in COUNTS {
        if let Some(count) = schema.get_mut(count)
            && let Some(number) = count.as_f64().filter(|n| n.fract() == 0.0 && (0.0..1e15).contains(n))
        {
            *count = Value::from(number as u64);
        }
    }
    for (keyword, value) in schema.iter_mut() {
        match value {
            Value::Object(members) if SCHEMA_MAPS.contains(&&**keyword) => {
                members.values_mut().filter_map(Value::as_object_mut).for_each(simplify);
            }
            Value::Object(schema) if SCHEMAS.contains(&&**keyword) => simplify(schema),
            Value::Array(schemas) if SCHEMAS.contains(&&**keyword) => {
                schemas.iter_mut().filter_map(Value::as_object_mut).for_each(simplify);
            }
            _ => {}
        }
    }
}

/// Refuses references below an identifier that starts a resource of its own, because references are resolved
/// from the root.
fn check_resources(root: &Map<String, Value>) -> Result<(), GrammarError> {
    // Until draft 4 the keyword was `id`; since then that is an ordinary name.
    let draft = root.get("$schema").and_then(Value::as_str).unwrap_or_default();
    let keyword = if draft.contains("draft-04") || draft.contains("draft-03") { "id" } else { "$id" };
    let begins_resource = |schema: &Value| {
        let id = schema.get(keyword).and_then(Value::as_str);
        id.is_some_and(|id| !id.starts_with('#')) && any(schema, &|value| value.get("$ref").is_some())
    };
    match root.values().any(|value| any(value, &begins_resource)) {
        true => Err(unsupported(keyword, "below the root, with references under it")),
        false => Ok(()),
    }
}

/// Returns whether `found` holds for a value or any value in it.
fn any(value: &Value, found: &dyn Fn(&Value) -> bool) -> bool {
    found(value)
        || match value {
            Value::Array(items) => items.iter().any(|item| any(item, found)),
            Value::Object(members) => members.values().any(|member| any(member, found)),
            _ => false,
        }
}

fn unsupported(keyword: &str, message: impl Into<String>) -> GrammarError {
    GrammarError::Unsupported { keyword: keyword.to_owned(), message: message.into() }
}

/// Rewrites an error in terms of the source: the library says `min/maxProperties` even if only one is
/// present, and reports a regular expression as the Lark grammar that it becomes.
pub fn in_words_of(source: &GrammarSource, error: GrammarError) -> GrammarError {
    match (error, source) {
        (GrammarError::Unsupported { keyword, message }, GrammarSource::JsonSchema(schema))
            if keyword == "minProperties" && !any(schema, &|value| value.get(&keyword).is_some()) =>
        {
            unsupported("maxProperties", message)
        }
        (GrammarError::Invalid(message), GrammarSource::Regex(_)) => {
            let reason = message.lines().find_map(|line| line.strip_prefix("error: "));
            GrammarError::Invalid(format!("not a regular expression: {}", reason.unwrap_or(&message)))
        }
        (error, _) => error,
    }
}

/// Prefixes of the library's messages about missing features, and the keyword of each.
const LACKING: [(&str, &str); 8] = [
    ("Unknown format", "format"),
    ("Only absolute $ref's", "$ref"),
    ("Reference segment", "$ref"),
    ("patternProperty regexes", "patternProperties"),
    ("can't determine if patternProperty", "patternProperties"),
    ("min/maxProperties", "minProperties"),
    ("Value for 'multipleOf' has too many digits", "multipleOf"),
    ("Unable to determine if regex is empty", "pattern"),
];

/// Words in its messages about limits.
const LIMITS: [&str; 7] =
    ["too complex", "too large", "too big", "too many", "stack level exceeded", "fuel", "limit"];

/// Classifies a refusal of the library, which has messages but no kinds of errors. Unknown messages mean that
/// the source is invalid.
pub fn explain(error: &impl Display) -> GrammarError {
    let message = error.to_string().trim_end().to_owned();
    if message.starts_with("panic: ") {
        let first = message.lines().next().unwrap_or_default();
        // Symbols have numbers of 16 bits.
        return match first.contains("symbols.len()") {
            true => GrammarError::TooComplex("more than 65,000 symbols".to_owned()),
            false => GrammarError::Failed(first.to_owned()),
        };
    }
    if let Some(list) = message.strip_prefix("Unimplemented keys: ") {
        let list = list.lines().next().unwrap_or(list);
        let keywords: Vec<String> = serde_json::from_str(list).unwrap_or_default();
        let first = keywords.first().map_or(list, String::as_str);
        return unsupported(first, format!("not implemented: {}", keywords.join(", ")));
    }
    if message.starts_with("oneOf constraints are not supported") {
        return unsupported("oneOf", "its options are not certain to exclude each other; anyOf may serve");
    }
    if let Some((_, keyword)) = LACKING.iter().find(|(start, _)| message.starts_with(start)) {
        return unsupported(keyword, message);
    }
    let lower = message.to_lowercase();
    match LIMITS.iter().any(|words| lower.contains(words)) {
        true => GrammarError::TooComplex(message),
        false => GrammarError::Invalid(message),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Checks the prepared schema, without our options.
    #[track_caller]
    fn check(schema: Value, expected: Value) {
        let mut prepared = prepare(&schema).expect("a schema");
        assert_eq!(prepared.as_object_mut().expect("an object").shift_remove(OPTIONS), Some(layout()));
        assert_eq!(prepared, expected);
    }

    #[test]
    fn what_says_nothing_is_left_out_where_it_is_a_keyword() {
        check(json!(true), json!({}));
        check(json!({"format": "path", "uniqueItems": false, "maxItems": 2.0}), json!({"maxItems": 2}));
        let kept = json!({
            "properties": {"format": {"type": "string", "format": "date"}, "uniqueItems": false},
            "enum": [{"format": "path"}],
            "uniqueItems": true,
            "maxLength": 1.5,
        });
        check(kept.clone(), kept);
        check(
            json!({"items": [{"format": "x"}], "$defs": {"a": {"anyOf": [{"minLength": 1.0}]}}}),
            json!({"items": [{}], "$defs": {"a": {"anyOf": [{"minLength": 1}]}}}),
        );
    }

    #[test]
    fn options_and_resources_are_refused_by_name() {
        let named = |schema: Value| match prepare(&schema) {
            Err(GrammarError::Unsupported { keyword, .. }) => keyword,
            other => panic!("{other:?}"),
        };
        assert_eq!(named(json!({"x-guidance": {}})), "x-guidance");
        assert_eq!(named(json!({"$defs": {"a": {"$id": "b", "items": {"$ref": "#/c"}}}})), "$id");
        check(json!({"$id": "a", "items": {"$ref": "#/c"}}), json!({"$id": "a", "items": {"$ref": "#/c"}}));
        check(json!({"items": {"$id": "b"}}), json!({"items": {"$id": "b"}}));
        let old = |draft: &str| json!({"$schema": draft, "items": {"id": "b", "items": {"$ref": "#/c"}}});
        assert_eq!(named(old("http://json-schema.org/draft-04/schema#")), "id");
        let new = old("https://json-schema.org/draft/2020-12/schema");
        check(new.clone(), new);
    }

    #[test]
    fn depth_is_bounded() {
        let nested = |levels| (1..levels).fold(json!({}), |inner, _| json!({"items": inner}));
        assert!(prepare(&nested(MAX_DEPTH)).is_ok());
        assert!(matches!(prepare(&nested(MAX_DEPTH + 1)), Err(GrammarError::TooComplex(_))));
    }

    /// Returns definitions that each refer to the next.
    pub fn chain(levels: usize) -> Value {
        let definition = |n: usize| (format!("d{n}"), json!({"$ref": format!("#/$defs/d{}", n + 1)}));
        let mut definitions: Map<String, Value> = (0..levels).map(definition).collect();
        definitions.insert(format!("d{levels}"), json!({"type": "null"}));
        json!({"$ref": "#/$defs/d0", "$defs": definitions})
    }

    #[test]
    fn chains_of_references_are_bounded_and_circles_are_not_chains() {
        assert!(prepare(&chain(MAX_CHAIN - 3)).is_ok());
        assert!(matches!(prepare(&chain(MAX_CHAIN)), Err(GrammarError::TooComplex(_))));
        let circle = json!({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"items": {"$ref": "#"}}}});
        assert!(prepare(&circle).is_ok());
        let unused = json!({"type": "null", "$defs": chain(MAX_CHAIN)["$defs"]});
        assert!(prepare(&unused).is_ok());
    }

    #[test]
    fn the_librarys_words_become_kinds() {
        let named = |message: &str| match explain(&message) {
            GrammarError::Unsupported { keyword, .. } => keyword,
            other => panic!("{other:?}"),
        };
        assert_eq!(named("Unimplemented keys: [\"if\", \"then\"]\n  while processing #/$defs/a"), "if");
        assert_eq!(named("oneOf constraints are not supported. Enable"), "oneOf");
        assert_eq!(named("Unknown format: iri"), "format");
        let explained = |message: &str| explain(&message);
        assert!(matches!(
            explained("initial lexer configuration exceeded fuel"),
            GrammarError::TooComplex(_)
        ));
        assert!(matches!(explained("Unsatisfiable schema: x"), GrammarError::Invalid(_)));
        assert_eq!(
            explained("panic: index out of bounds\n<backtrace>\n0: x"),
            GrammarError::Failed("panic: index out of bounds".to_owned())
        );
        let regex = GrammarSource::Regex("(".to_owned());
        let message =
            "at 1(8): invalid regex \"(\" (in regex): regex parse error:\n    (\nerror: unclosed group\n";
        assert_eq!(
            in_words_of(&regex, explained(message)),
            GrammarError::Invalid("not a regular expression: unclosed group".to_owned())
        );
    }
}
