//! Detects schemas that require themselves without end. Nothing satisfies them, but the grammar library fails
//! only when an answer reaches that point.
//!
//! Pure and conservative: a schema that is refused has no answer; other contradictions are left to the
//! library.

use std::cell::Cell;
use std::collections::HashSet;

use serde_json::Value;

use llmctl_base::error::GrammarError;

/// Most schemas visited; a larger schema is accepted unchecked.
const MAX_WORK: usize = 1 << 20;

/// Checks a schema.
///
/// # Errors
/// [`GrammarError::Invalid`] if it has no finite answer.
pub fn check(root: &Value) -> Result<(), GrammarError> {
    let mut references = HashSet::new();
    gather(root, &mut references);
    let (mut known, work) = (HashSet::new(), Cell::new(0));
    loop {
        let search = SatisfiabilitySearch { root, known: &known, work: &work };
        let is_new = |reference: &&str| !known.contains(*reference) && search.has_answer_at(reference);
        let found: Vec<&str> = references.iter().copied().filter(is_new).collect();
        if found.is_empty() || work.get() > MAX_WORK {
            let search = SatisfiabilitySearch { root, known: &known, work: &work };
            return match search.has_answer(root) || work.get() > MAX_WORK {
                true => Ok(()),
                false => Err(GrammarError::Invalid(
                    "nothing satisfies it: a schema requires itself without end".to_owned(),
                )),
            };
        }
        known.extend(found);
    }
}

/// Collects all references.
pub fn gather<'a>(value: &'a Value, references: &mut HashSet<&'a str>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| gather(item, references)),
        Value::Object(members) => {
            references.extend(members.get("$ref").and_then(Value::as_str));
            members.values().for_each(|member| gather(member, references));
        }
        _ => {}
    }
}

struct SatisfiabilitySearch<'a> {
    root: &'a Value,
    /// References to schemas that are known to have an answer.
    known: &'a HashSet<&'a str>,
    work: &'a Cell<usize>,
}

impl SatisfiabilitySearch<'_> {
    fn has_answer_at(&self, reference: &str) -> bool {
        let target = reference.strip_prefix('#').and_then(|pointer| self.root.pointer(pointer));
        // An unresolved reference is refused elsewhere, by name.
        target.is_none_or(|target| self.has_answer(target))
    }

    /// Returns whether an answer is known that needs no schema whose answer is unknown.
    fn has_answer(&self, schema: &Value) -> bool {
        self.work.set(self.work.get() + 1);
        let Value::Object(members) = schema else { return *schema != Value::Bool(false) };
        let all = |keyword: &str| {
            let items = members.get(keyword).and_then(Value::as_array);
            items.is_none_or(|items| items.iter().all(|item| self.has_answer(item)))
        };
        let any = |keyword: &str| {
            let items = members.get(keyword).and_then(Value::as_array);
            items.is_none_or(|items| items.is_empty() || items.iter().any(|item| self.has_answer(item)))
        };
        let reference = members.get("$ref").and_then(Value::as_str);
        reference.is_none_or(|reference| self.known.contains(reference))
            && all("allOf")
            && any("anyOf")
            && any("oneOf")
            && match members.get("type").and_then(Value::as_str) {
                Some("object") => self.has_members(schema),
                Some("array") => self.has_items(schema),
                _ => true,
            }
    }

    fn has_members(&self, schema: &Value) -> bool {
        let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let mut asked = required.filter_map(|name| schema["properties"].get(name));
        asked.all(|property| self.has_answer(property))
    }

    fn has_items(&self, schema: &Value) -> bool {
        let least = schema["minItems"].as_f64().unwrap_or(0.0);
        let first = schema["prefixItems"].as_array().map_or(&[][..], Vec::as_slice);
        let is_asked = |(index, _): &(usize, &Value)| (*index as f64) < least;
        first.iter().enumerate().filter(is_asked).all(|(_, item)| self.has_answer(item))
            && (least <= first.len() as f64 || schema.get("items").is_none_or(|item| self.has_answer(item)))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_asks_for_itself_without_an_end_has_no_answer() {
        let list = |next: Value, required: Value| {
            json!({"$ref": "#/$defs/n", "$defs": {"n": {
                "type": "object", "properties": {"next": next, "v": {"type": "integer"}}, "required": required,
            }}})
        };
        let itself = || json!({"$ref": "#/$defs/n"});
        for unsatisfiable in [
            json!({"$ref": "#"}),
            json!({"anyOf": [{"$ref": "#"}]}),
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
            list(itself(), json!(["next"])),
            list(json!({"type": "array", "items": itself(), "minItems": 1}), json!(["next"])),
            json!({"type": "object", "properties": {"a": false}, "required": ["a"]}),
        ] {
            assert!(check(&unsatisfiable).is_err(), "{unsatisfiable}");
        }
        for fine in [
            list(itself(), json!([])),
            list(json!({"anyOf": [itself(), {"type": "null"}]}), json!(["next"])),
            list(json!({"type": "array", "items": itself()}), json!(["next"])),
            json!({"type": "object", "properties": {"a": false}}),
            json!({"$ref": "https://example.com/x"}),
            json!({}),
        ] {
            assert!(check(&fine).is_ok(), "{fine}");
        }
    }
}
