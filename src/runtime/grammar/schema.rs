//! Prepares JSON Schemas for llguidance: checks them, removes keywords without effect, sets the layout of
//! answers, and translates the library's errors.
//!
//! Invariant: an answer that satisfies the prepared schema satisfies the original.

use std::collections::HashSet;
use std::fmt::Display;

use serde_json::{Map, Value, json};

use super::plain::plain;
use super::{GrammarSource, satisfiable};
use llmctl_base::error::GrammarError;
use llmctl_template::{COUNT_KEYWORDS, has_word, resolve_reference};

/// Most nested arrays and objects.
const MAX_DEPTH: usize = 64;

/// Most schemas on a path from the root through references, with those that enclose them. The library follows
/// them by recursion, and its stack is sized for as many.
pub const MAX_CHAIN: usize = 2048;

/// Member from which llguidance reads its options.
const OPTIONS: &str = "x-guidance";

/// Keywords whose value is a schema, or a list of them.
const SCHEMAS: &str = "additionalItems additionalProperties allOf anyOf contains else if items not oneOf prefixItems \
                       propertyNames then unevaluatedItems unevaluatedProperties";

/// Keywords whose members are schemas.
const SCHEMA_MAPS: &str = "$defs definitions dependencies dependentSchemas patternProperties properties";

/// Keywords that only describe.
const ANNOTATIONS: &str = "title description default examples $comment deprecated readOnly writeOnly";

/// Formats that JSON Schema defines. Any other is an annotation without effect (2020-12, validation, 7.2.3).
const FORMATS: &str = "date date-time duration email hostname idn-email idn-hostname ipv4 ipv6 iri iri-reference json-pointer \
                       regex relative-json-pointer time uri uri-reference uri-template uuid";

/// Returns the schema for the library, with our options in it.
///
/// # Errors
/// [`GrammarError::Invalid`] for an invalid schema, [`GrammarError::TooComplex`] for one too deep, and
/// [`GrammarError::Unsupported`] for one with library options of its own, which could disable keywords.
pub fn prepare(schema: &Value) -> Result<Value, GrammarError> {
    if depth(schema) > MAX_DEPTH {
        return Err(GrammarError::TooComplex(format!("more than {MAX_DEPTH} levels deep")));
    }
    let schema = match schema {
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
    let schema = simplify_all(schema, &|reference| reference.contains(['~', '%']));
    let whole = Value::Object(schema);
    check_repeats(&whole)?;
    check_chain(&whole)?;
    satisfiable::check(&whole)?;
    let Value::Object(mut schema) = whole else { unreachable!("made above") };
    schema.insert(OPTIONS.to_owned(), layout());
    Ok(Value::Object(schema))
}

/// Returns the schema of a tool's parameters as the library reads it exactly, without keywords that have no effect, to embed its
/// parts in our own grammars. A schema that is not an object stays unchanged.
pub fn simplified(schema: &Value) -> Value {
    let is_moved = |reference: &str| {
        reference.contains(['~', '%'])
            || !reference.starts_with("#/$defs/") && !reference.starts_with("#/definitions/")
    };
    match schema {
        Value::Object(members) if depth(schema) <= MAX_DEPTH => {
            plain(&Value::Object(simplify_all(members.clone(), &is_moved)))
        }
        _ => schema.clone(),
    }
}

/// Takes a keyword that cannot be enforced out of a schema and all below it, of formats and references only those that cannot;
/// `oneOf` becomes `anyOf`. Returns whether anything was there.
pub fn without(schema: &mut Value, keyword: &str, message: &str) -> bool {
    let root = schema.clone();
    let mut is_found = false;
    let Some(members) = schema.as_object_mut() else { return false };
    walk(members, &mut |schema| {
        let is_enforced = |value: &Value| match (keyword, value) {
            // The library names a format that it does not know; a format of calls may have none at all.
            ("format", Value::String(name)) => {
                message.contains("format: ") && !message.ends_with(name.as_str())
            }
            ("$ref", Value::String(reference)) => resolve_reference(&root, reference).is_some(),
            _ => false,
        };
        let Some(options) = schema.get(keyword).filter(|value| !is_enforced(value)).cloned() else { return };
        is_found = true;
        schema.shift_remove(keyword);
        match keyword {
            "oneOf" if !schema.contains_key("anyOf") => drop(schema.insert("anyOf".to_owned(), options)),
            "minProperties" => drop(schema.shift_remove("maxProperties")),
            _ => {}
        }
    });
    is_found
}

/// Checks `minProperties` in a schema and all below it.
///
/// # Errors
/// [`GrammarError::Unsupported`] if one name that comes twice could count as two members.
pub fn check_repeats(schema: &Value) -> Result<(), GrammarError> {
    let (mut schema, mut has_repeats) = (schema.as_object().cloned().unwrap_or_default(), false);
    walk(&mut schema, &mut |schema| has_repeats |= counts_repeats(schema));
    let message = "more than one member beyond those of \"required\": a name could come twice";
    if has_repeats { Err(unsupported("minProperties", message)) } else { Ok(()) }
}

/// Returns whether the library could reach `minProperties` by one name twice, which is one member: names that `required` does not
/// fix may repeat.
fn counts_repeats(schema: &Map<String, Value>) -> bool {
    let least = schema.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    let fixed = schema.get("required").and_then(Value::as_array).map_or(0, Vec::len) as u64;
    let may_be_object = schema.get("type").is_none_or(|kind| any(kind, &|kind| kind == "object"));
    may_be_object && least > fixed + 1
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
        match value {
            Value::Array(items) => ahead.extend(items.iter().rev().map(|item| (item, depth + 1))),
            Value::Object(members) => {
                for (keyword, member) in members.iter().rev() {
                    match member {
                        Value::String(reference) if keyword == "$ref" => {
                            let is_new = seen.insert(reference);
                            ahead.extend(
                                resolve_reference(root, reference)
                                    .filter(|_| is_new)
                                    .map(|found| (found, depth + 1)),
                            );
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

/// Calls `change` for a schema and all below it.
fn walk(schema: &mut Map<String, Value>, change: &mut dyn FnMut(&mut Map<String, Value>)) {
    change(schema);
    for (keyword, value) in schema.iter_mut() {
        match value {
            Value::Object(members) if has_word(SCHEMA_MAPS, keyword) => {
                members.values_mut().filter_map(Value::as_object_mut).for_each(|below| walk(below, change));
            }
            Value::Object(schema) if has_word(SCHEMAS, keyword) => walk(schema, change),
            Value::Array(schemas) if has_word(SCHEMAS, keyword) => {
                schemas.iter_mut().filter_map(Value::as_object_mut).for_each(|below| walk(below, change));
            }
            _ => {}
        }
    }
}

fn simplify_all(mut schema: Map<String, Value>, is_moved: &dyn Fn(&str) -> bool) -> Map<String, Value> {
    walk(&mut schema, &mut simplify);
    moved_references(schema, is_moved)
}

/// Removes keywords without effect and writes others as the library understands them.
fn simplify(schema: &mut Map<String, Value>) {
    schema.retain(|keyword, _| !has_word(ANNOTATIONS, keyword));
    if schema.get("uniqueItems") == Some(&Value::Bool(false)) {
        schema.shift_remove("uniqueItems");
    }
    if schema.get("format").and_then(Value::as_str).is_some_and(|name| !has_word(FORMATS, name)) {
        schema.shift_remove("format");
    }
    // Without other schemas for the same object, members that are not evaluated are those that are not named.
    let is_alone = !super::closed::IN_PLACE.iter().any(|keyword| schema.contains_key(*keyword));
    let unevaluated = schema.get("unevaluatedProperties");
    if let Some(members) = unevaluated.filter(|members| is_alone || **members == Value::Bool(true)).cloned() {
        schema.shift_remove("unevaluatedProperties");
        schema.entry("additionalProperties").or_insert(members);
    }
    for count in COUNT_KEYWORDS.split(' ') {
        if let Some(count) = schema.get_mut(count)
            && let Some(number) = count.as_f64().filter(|n| n.fract() == 0.0 && (0.0..1e15).contains(n))
        {
            *count = Value::from(number as u64);
        }
    }
    if let Some(Value::String(pattern)) = schema.get_mut("pattern") {
        *pattern = with_ecma_classes(pattern);
    }
    if let Some(Value::Object(members)) = schema.get_mut("patternProperties") {
        *members = std::mem::take(members)
            .into_iter()
            .map(|(name, value)| (with_ecma_classes(&name), value))
            .collect();
    }
    plain_bounds(schema);
}

/// Writes excluded bounds as numbers, which they are since draft 6. The library allows an excluded integer if the other bound is
/// closer than one: such a bound becomes the next number of twelve decimals.
fn plain_bounds(schema: &mut Map<String, Value>) {
    let sides = [("minimum", "exclusiveMinimum", 1.0), ("maximum", "exclusiveMaximum", -1.0)];
    for (bound, excluded, _) in sides {
        let Some(Value::Bool(is_excluded)) = schema.get(excluded).cloned() else { continue };
        schema.shift_remove(excluded);
        if let Some(value) = schema.get(bound).cloned().filter(|_| is_excluded) {
            schema.shift_remove(bound);
            schema.insert(excluded.to_owned(), value);
        }
    }
    let number = |schema: &Map<String, Value>, keyword: &str| schema.get(keyword).and_then(Value::as_f64);
    for ((bound, excluded, sign), (opposite, apart, _)) in [(sides[0], sides[1]), (sides[1], sides[0])] {
        let Some(n) = number(schema, excluded).map(|n| n * sign).filter(|n| n.fract() == 0.0 && *n >= 0.0)
        else {
            continue;
        };
        let others = [opposite, apart].into_iter().filter_map(|keyword| number(schema, keyword));
        let other = others.map(|other| other * sign).fold(f64::INFINITY, f64::min);
        // A bound that comes from another schema is not seen here.
        let is_far = (n + 1.0..f64::INFINITY).contains(&other) || other <= n;
        if is_far || schema.get("type").is_some_and(|name| name == "integer") {
            continue;
        }
        let next = (n + 1e-12).max(n.next_up());
        let next = if next < other { next } else { n + (other - n) / 2.0 };
        schema.shift_remove(excluded);
        let least = number(schema, bound).map_or(next, |least| next.max(least * sign));
        schema.insert(bound.to_owned(), Value::from(least * sign));
    }
}

/// Rewrites a pattern's classes with the characters that ECMA-262 counts among them.
fn with_ecma_classes(pattern: &str) -> String {
    const SPACE: &str =
        r"\t\n\x0B\x0C\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}";
    let (mut plain, mut is_escaped, mut is_in_class) = (String::with_capacity(pattern.len()), false, false);
    for c in pattern.chars() {
        let class = match c.to_ascii_lowercase() {
            'd' => "0-9",
            'w' => "0-9A-Za-z_",
            's' => SPACE,
            _ => "",
        };
        match c {
            '\\' if !is_escaped => {
                is_escaped = true;
                continue;
            }
            _ if is_escaped && !class.is_empty() => match (c.is_uppercase(), is_in_class) {
                (true, _) => plain.push_str(&format!("[^{class}]")),
                (false, false) => plain.push_str(&format!("[{class}]")),
                (false, true) => plain.push_str(class),
            },
            _ if is_escaped => plain.extend(['\\', c]),
            '.' if !is_in_class => plain.push_str(r"[^\n\r\x{2028}\x{2029}]"),
            // Classes within classes and their operators are not ECMA's.
            '[' | '&' | '~' if is_in_class => plain.extend(['\\', c]),
            _ => plain.push(c),
        }
        is_in_class = if is_escaped { is_in_class } else { c == '[' || is_in_class && c != ']' };
        is_escaped = false;
    }
    if is_escaped { plain + "\\" } else { plain }
}

/// Copies what some references point to under names that the library can follow, wherever parts of the schema go.
fn moved_references(schema: Map<String, Value>, is_moved: &dyn Fn(&str) -> bool) -> Map<String, Value> {
    let whole = Value::Object(schema);
    let mut references = HashSet::new();
    satisfiable::gather(&whole, &mut references);
    let mut moved: Vec<&str> = references.into_iter().filter(|text| is_moved(text)).collect();
    moved.sort_unstable();
    let targets: Vec<(String, Value)> = moved
        .into_iter()
        .filter_map(|text| Some((text.to_owned(), resolve_reference(&whole, text)?.clone())))
        .collect();
    let Value::Object(mut schema) = whole else { unreachable!("made above") };
    if targets.is_empty() {
        return schema;
    }
    let names: Vec<String> = (0..targets.len()).map(|number| format!("x-llmctl-{number}")).collect();
    if let Value::Object(definitions) = schema.entry("$defs").or_insert_with(|| json!({})) {
        definitions.extend(names.iter().cloned().zip(targets.iter().map(|(_, target)| target.clone())));
    }
    walk(&mut schema, &mut |schema| {
        let Some(Value::String(reference)) = schema.get_mut("$ref") else { return };
        if let Some(number) = targets.iter().position(|(text, _)| text == reference) {
            *reference = format!("#/$defs/{}", names[number]);
        }
    });
    schema
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
    // A schema within a grammar.
    let message =
        message.split_once("failed to compile JSON schema: ").map_or(&*message, |(_, rest)| rest).to_owned();
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
        check(
            json!({"items": {"properties": {"a": {}}, "unevaluatedProperties": false}}),
            json!({"items": {"properties": {"a": {}}, "additionalProperties": false}}),
        );
        check(
            json!({"additionalProperties": {"type": "null"}, "unevaluatedProperties": false}),
            json!({"additionalProperties": {"type": "null"}}),
        );
        check(
            json!({"allOf": [{}], "unevaluatedProperties": true}),
            json!({"allOf": [{}], "additionalProperties": true}),
        );
        let others_count = json!({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": false});
        check(others_count.clone(), others_count);
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
    fn excluded_bounds_near_the_other_bound_are_raised() {
        for (schema, expected) in [
            (json!({"exclusiveMinimum": 0, "maximum": 0.5}), json!({"maximum": 0.5, "minimum": 1e-12})),
            (
                json!({"minimum": 2, "exclusiveMinimum": true, "maximum": 2.5}),
                json!({"maximum": 2.5, "minimum": 2.000000000001}),
            ),
            (json!({"minimum": -0.5, "exclusiveMaximum": 0}), json!({"minimum": -0.5, "maximum": -1e-12})),
            (json!({"exclusiveMinimum": 0, "maximum": 1e-13}), json!({"maximum": 1e-13, "minimum": 5e-14})),
            (json!({"exclusiveMinimum": 0}), json!({"minimum": 1e-12})),
            (json!({"minimum": 0, "exclusiveMinimum": false}), json!({"minimum": 0})),
            (
                json!({"type": "integer", "exclusiveMinimum": 0}),
                json!({"type": "integer", "exclusiveMinimum": 0}),
            ),
            (json!({"exclusiveMinimum": 0, "maximum": 3}), json!({"exclusiveMinimum": 0, "maximum": 3})),
            (json!({"exclusiveMaximum": 2.5}), json!({"exclusiveMaximum": 2.5})),
        ] {
            check(schema, expected);
        }
    }

    #[test]
    fn patterns_have_the_classes_of_ecma() {
        for (pattern, expected) in [
            (r"^\d{4}-[\d\w]+$", "^[0-9]{4}-[0-90-9A-Za-z_]+$"),
            (r"\D[^\W]\\d\.", r"[^0-9][^[^0-9A-Za-z_]]\\d\."),
            ("a.[.[&]", r"a[^\n\r\x{2028}\x{2029}][.\[\&]"),
        ] {
            check(json!({"pattern": pattern}), json!({"pattern": expected}));
        }
    }

    #[test]
    fn references_with_escapes_are_followed() {
        let schema =
            |reference: &str| json!({"items": {"$ref": reference}, "$defs": {"a/b%": {"type": "null"}}});
        for reference in ["#/$defs/a~1b%25", "#/%24defs/a~1b%25", "#/$defs/a%7E1b%25"] {
            let expected = json!({"items": {"$ref": "#/$defs/x-llmctl-0"}, "$defs": {"a/b%": {"type": "null"}, "x-llmctl-0": {"type": "null"}}});
            check(schema(reference), expected);
        }
        check(schema("#/$defs/c~1"), schema("#/$defs/c~1"));
    }

    #[test]
    fn options_and_resources_are_refused_by_name() {
        let named = |schema: Value| match prepare(&schema) {
            Err(GrammarError::Unsupported { keyword, .. }) => keyword,
            other => panic!("{other:?}"),
        };
        assert_eq!(named(json!({"x-guidance": {}})), "x-guidance");
        assert_eq!(named(json!({"$defs": {"a": {"$id": "b", "items": {"$ref": "#/c"}}}})), "$id");
        assert_eq!(named(json!({"items": {"type": "object", "minProperties": 2}})), "minProperties");
        for fixed in [
            json!({"type": "object", "minProperties": 1}),
            json!({"type": "object", "required": ["a"], "minProperties": 2}),
            json!({"type": "array", "minProperties": 2}),
        ] {
            assert!(prepare(&fixed).is_ok(), "{fixed}");
        }
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
