//! Closes schemas: objects allow only the members that are named.
//!
//! JSON Schema allows any other member unless `additionalProperties` forbids it. A small model may never end
//! such an object, so llama.cpp, xgrammar and OpenAI's strict schemas close it; this module does the same.
//!
//! Pure. Invariants: a value that satisfies the closed schema satisfies the original. If a value satisfies
//! the original, one satisfies the closed schema: an object stays open if other parts of the schema add
//! members to it, or require more than it names.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

/// Keywords whose schemas apply to the same object.
pub(super) const IN_PLACE: [&str; 9] =
    ["$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "not"];

/// Keywords that decide about other members explicitly.
const OPENING: [&str; 3] = ["additionalProperties", "unevaluatedProperties", "propertyNames"];

/// Keywords whose schemas apply to a value below.
const BELOW: [&str; 4] = ["items", "prefixItems", "additionalItems", "additionalProperties"];

/// Keywords whose members are schemas for values below.
const MAPS_BELOW: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Most rounds of following references; with longer chains all definitions stay open.
const MAX_ROUNDS: usize = 64;

/// Returns the schema with closed objects, and with `type: object` added to `properties` without a type.
pub fn closed(schema: &Value) -> Value {
    let Some(shared) = shared(schema) else { return schema.clone() };
    let mut schema = schema.clone();
    let mut walk = Walk { shared: &shared, found: BTreeSet::new(), is_closing: true };
    walk.schema(&mut schema, "", false);
    schema
}

/// Returns pointers of schemas that other schemas extend, by following references to a fixed point; `None` if
/// that takes too many rounds.
fn shared(schema: &Value) -> Option<BTreeSet<String>> {
    let mut shared = BTreeSet::new();
    for _ in 0..MAX_ROUNDS {
        let mut walk = Walk { shared: &shared, found: BTreeSet::new(), is_closing: false };
        walk.schema(&mut schema.clone(), "", false);
        let found = &walk.found | &shared;
        if found.len() == shared.len() {
            return Some(shared);
        }
        shared = found;
    }
    None
}

struct Walk<'a> {
    shared: &'a BTreeSet<String>,
    /// Targets of references from schemas that are extended.
    found: BTreeSet<String>,
    is_closing: bool,
}

impl Walk<'_> {
    /// Closes a schema. `is_added_to` tells whether another schema describes the same object.
    fn schema(&mut self, value: &mut Value, at: &str, is_added_to: bool) {
        let Value::Object(schema) = value else { return };
        let is_added_to = is_added_to || self.shared.contains(at);
        let adds = adds_in_place(schema);
        if is_added_to || adds {
            let reference = schema.get("$ref").and_then(Value::as_str);
            self.found.extend(reference.and_then(|text| text.strip_prefix('#')).map(str::to_owned));
        }
        if self.is_closing && !is_added_to && !adds {
            close(schema);
        }
        // An alternative is complete by itself if no sibling keyword adds members.
        let members_are_added_to = is_added_to || adds;
        for keyword in ["allOf", "anyOf", "oneOf"] {
            let Some(Value::Array(items)) = schema.get_mut(keyword) else { continue };
            let each_other = keyword == "allOf" && items.len() > 1;
            for (index, item) in items.iter_mut().enumerate() {
                self.schema(item, &format!("{at}/{keyword}/{index}"), members_are_added_to || each_other);
            }
        }
        self.below(schema, at);
    }

    fn below(&mut self, schema: &mut Map<String, Value>, at: &str) {
        for keyword in BELOW {
            match schema.get_mut(keyword) {
                Some(Value::Array(items)) => {
                    for (index, item) in items.iter_mut().enumerate() {
                        self.schema(item, &format!("{at}/{keyword}/{index}"), false);
                    }
                }
                Some(value) => self.schema(value, &format!("{at}/{keyword}"), false),
                None => {}
            }
        }
        for keyword in MAPS_BELOW {
            let Some(Value::Object(members)) = schema.get_mut(keyword) else { continue };
            for (name, value) in members.iter_mut() {
                let name = name.replace('~', "~0").replace('/', "~1");
                self.schema(value, &format!("{at}/{keyword}/{name}"), false);
            }
        }
    }
}

/// Returns whether a schema describes the members of its object both itself and through another schema, or
/// through several.
fn adds_in_place(schema: &Map<String, Value>) -> bool {
    let speaks = |keyword: &&&str| schema.get(**keyword).is_some_and(speaks_of_members);
    let through_others = IN_PLACE.iter().filter(speaks).count();
    match schema.contains_key("properties") {
        true => through_others > 0,
        false => through_others > 1,
    }
}

/// Returns whether a value contains members of an object, or references.
fn speaks_of_members(value: &Value) -> bool {
    match value {
        Value::String(_) => true, // a reference
        Value::Array(items) => items.iter().any(|item| item.is_object() && speaks_of_members(item)),
        Value::Object(members) => members.iter().any(|(keyword, value)| match keyword.as_str() {
            "properties" | "patternProperties" | "$ref" | "$dynamicRef" | "additionalProperties" => true,
            _ => (value.is_object() || value.is_array()) && speaks_of_members(value),
        }),
        _ => false,
    }
}

fn close(schema: &mut Map<String, Value>) {
    let Some(Value::Object(properties)) = schema.get("properties") else { return };
    let is_kept = OPENING.iter().any(|keyword| schema.contains_key(*keyword));
    let is_named = |name: &Value| name.as_str().is_some_and(|name| properties.contains_key(name));
    let asks_for_others =
        schema.get("required").and_then(Value::as_array).is_some_and(|names| !names.iter().all(is_named));
    let least = schema.get("minProperties").and_then(Value::as_f64).unwrap_or(0.0);
    let has_patterns = schema.contains_key("patternProperties");
    let is_enough = !asks_for_others && (least <= properties.len() as f64);
    if !["type", "enum", "const"].iter().any(|keyword| schema.contains_key(*keyword)) {
        schema.insert("type".to_owned(), json!("object"));
    }
    if !is_kept && (is_enough || has_patterns) {
        schema.insert("additionalProperties".to_owned(), json!(false));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(schema: Value, expected: Value) {
        assert_eq!(closed(&schema), expected);
    }

    /// Checks that closing changes nothing.
    #[track_caller]
    fn check_open(schema: Value) {
        check(schema.clone(), schema);
    }

    fn object(name: &str) -> Value {
        json!({"type": "object", "properties": {name: {}}})
    }

    fn shut(name: &str) -> Value {
        json!({"type": "object", "properties": {name: {}}, "additionalProperties": false})
    }

    #[test]
    fn objects_with_named_members_are_closed_wherever_they_lie() {
        check(json!({"properties": {"a": {}}}), {
            json!({"properties": {"a": {}}, "type": "object", "additionalProperties": false})
        });
        check(json!({"items": object("a")}), json!({"items": shut("a")}));
        check(json!({"anyOf": [object("a"), object("b")]}), json!({"anyOf": [shut("a"), shut("b")]}));
        check(json!({"allOf": [object("a")]}), json!({"allOf": [shut("a")]}));
        check(
            json!({"$ref": "#/$defs/x", "$defs": {"x": object("a")}}),
            json!({"$ref": "#/$defs/x", "$defs": {"x": shut("a")}}),
        );
        check(
            json!({"type": "object", "properties": {"a": object("b")}, "required": ["a"]}),
            json!({"type": "object", "properties": {"a": shut("b")}, "required": ["a"], "additionalProperties": false}),
        );
    }

    #[test]
    fn what_opens_an_object_keeps_it_open() {
        check_open(json!({"type": "object", "properties": {"a": {}}, "additionalProperties": true}));
        check_open(
            json!({"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}}),
        );
        check_open(json!({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": false}));
        check_open(json!({"type": "object"}));
        check_open(json!({"type": "object", "patternProperties": {"^a": {}}}));
        check_open(json!(true));
    }

    #[test]
    fn an_object_that_asks_for_more_than_it_names_stays_open() {
        check_open(json!({"type": "object", "properties": {"a": {}}, "required": ["b"]}));
        check_open(json!({"type": "object", "properties": {"a": {}}, "minProperties": 2}));
    }

    #[test]
    fn schemas_that_add_to_each_other_stay_open() {
        check_open(json!({"allOf": [object("a"), object("b")]}));
        check_open(json!({"type": "object", "properties": {"a": {}}, "anyOf": [object("b"), object("c")]}));
        let both = json!({"allOf": [{"$ref": "#/$defs/x"}, object("b")], "$defs": {"x": {"$ref": "#/$defs/y"}, "y": object("a"), "z": object("c")}});
        let mut expected = both.clone();
        expected["$defs"]["z"] = shut("c");
        check(both, expected);
        // Alternatives that only require members must name none.
        check(
            json!({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": []}]}),
            json!({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": []}], "additionalProperties": false}),
        );
    }

    #[test]
    fn names_that_look_like_keywords_are_names() {
        check(
            json!({"type": "object", "properties": {"properties": {"type": "string"}, "items": object("a")}}),
            json!({"type": "object", "properties": {"properties": {"type": "string"}, "items": shut("a")}, "additionalProperties": false}),
        );
    }
}
