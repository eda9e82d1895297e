//! JSON Schemas (draft 2020-12, as in OpenAPI 3.1) of bodies, from the fields that their readers ask for.
//!
//! Invariants: `null` counts as absent, so that every field but a required one may be null; an object of the
//! top level has only the fields that are recorded, as the server refuses others unless it is lenient.

use serde_json::{Map, Value, json};

use crate::wire::record::{FieldRecord, FieldType};
use llmctl_base::FREE_TEXT;
use llmctl_base::{SAMPLING, SamplingNumber};

/// The fields of an object, in the order in which they were recorded.
#[derive(Default)]
struct Members(Vec<(String, FieldNode)>);

struct FieldNode {
    path: String,
    kind: FieldType,
    members: Members,
    /// Members of the objects in a list; `None` if no reader looked into one.
    items: Option<Members>,
}

impl Members {
    fn get(&mut self, name: &str, path: &str) -> &mut FieldNode {
        let at = self.0.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
            let (path, members) = (path.to_owned(), Members::default());
            self.0.push((name.to_owned(), FieldNode { path, kind: FieldType::Any, members, items: None }));
            self.0.len() - 1
        });
        &mut self.0[at].1
    }

    /// Puts a field where its path says: `messages[].content` is a member of the objects in the list `messages`.
    fn add(&mut self, path: &str, kind: FieldType) {
        let mut members = self;
        let mut end = 0;
        let parts: Vec<&str> = path.split('.').collect();
        for (nth, part) in parts.iter().enumerate() {
            let name = part.trim_end_matches("[]");
            let here = &path[..end + name.len()];
            end += part.len() + 1;
            let field = members.get(name, here);
            if nth + 1 == parts.len() {
                if name == *part {
                    field.kind = kind;
                }
                return;
            }
            members = match name == *part {
                true => &mut field.members,
                false => field.items.get_or_insert_default(),
            };
        }
    }
}

/// Returns the schema of a body. `facts` has descriptions and limits of fields by their paths; they replace the keywords that follow from
/// the record.
pub fn schema(record: &FieldRecord, facts: &Map<String, Value>) -> Value {
    let mut members = Members::default();
    for (path, kind) in &record.fields {
        members.add(path, kind.clone());
    }
    let is_alias =
        |field: &FieldNode, name: &str| matches!(field.kind, FieldType::SameAs(first) if first == name);
    let has_alias = |name: &str| members.0.iter().any(|(_, field)| is_alias(field, name));
    // JSON Schema's `required` knows no second names.
    let is_required = |name: &str| record.required.contains(name) && !has_alias(name);
    let required: Vec<&String> =
        members.0.iter().map(|(name, _)| name).filter(|name| is_required(name)).collect();
    let mut schema = json!({
        "type": "object",
        "properties": properties(&members, facts, &is_required),
        "additionalProperties": false,
    });
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema
}

fn properties(members: &Members, facts: &Map<String, Value>, is_required: &dyn Fn(&str) -> bool) -> Value {
    let property = |(name, field): &(String, FieldNode)| {
        let mut schema = match &field.kind {
            FieldType::SameAs(first) => {
                let first = members.0.iter().find(|(other, _)| other == first);
                first.map_or_else(|| json!({}), |(_, field)| field_schema(field, facts))
            }
            _ => field_schema(field, facts),
        };
        if !is_required(name) {
            allow_null(&mut schema);
        }
        (name.clone(), schema)
    };
    members.0.iter().map(property).collect::<Map<_, _>>().into()
}

fn field_schema(field: &FieldNode, facts: &Map<String, Value>) -> Value {
    let mut schema = match &field.kind {
        FieldType::Any | FieldType::SameAs(_) => json!({}),
        FieldType::Hint => json!({"description": "Accepted without effect."}),
        FieldType::Text => json!({"type": "string"}),
        FieldType::Flag => json!({"type": "boolean"}),
        FieldType::List => json!({"type": "array"}),
        FieldType::Object => json!({"type": "object"}),
        FieldType::Number => json!({"type": "number"}),
        FieldType::Count => json!({"type": "integer", "minimum": 0}),
        FieldType::Whole => json!({"type": "integer"}),
        FieldType::CountOrOff => json!({"type": "integer", "minimum": -1}),
        FieldType::Only(values) => {
            json!({"enum": values, "description": "Another server's setting: only values that ask for nothing."})
        }
    };
    let any = &|_: &str| false;
    if !field.members.0.is_empty() {
        schema["properties"] = properties(&field.members, facts, any);
    }
    if let Some(items) = &field.items {
        let list = json!({"type": "array", "items": {"type": "object", "properties": properties(items, facts, any)}});
        match field.kind {
            FieldType::List => schema = list,
            _ => schema["anyOf"] = json!([{"type": "string"}, list]),
        }
    }
    let name = field.path.rsplit('.').next().unwrap_or_default();
    if let Some(number) = SAMPLING.iter().find(|number| number.spellings().contains(&name)) {
        add_range(&mut schema, number);
    }
    if let (Some(Value::Object(facts)), Some(schema)) = (facts.get(&field.path), schema.as_object_mut()) {
        schema.extend(facts.clone());
    }
    schema
}

/// Adds help and range of a sampling parameter.
fn add_range(schema: &mut Value, number: &SamplingNumber) {
    let range = number.facts.range;
    let default = number.given(&FREE_TEXT.numbers);
    let default = default.map(|value| format!(". Free text without a temperature: {value}"));
    schema["description"] = format!("{}{}", number.help.trim(), default.unwrap_or_default()).into();
    schema[if range.excludes_low { "exclusiveMinimum" } else { "minimum" }] = range.low.into();
    schema["maximum"] = range.high.into();
}

fn allow_null(schema: &mut Value) {
    if let Some(kind) = schema["type"].as_str() {
        schema["type"] = json!([kind, "null"]);
    }
    for alternatives in ["anyOf", "enum"] {
        if let Some(values) = schema.get_mut(alternatives).and_then(Value::as_array_mut) {
            values.push(if alternatives == "enum" { Value::Null } else { json!({"type": "null"}) });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn members_stand_where_their_paths_say() {
        let fields = [
            ("a", FieldType::List),
            ("a[].b", FieldType::Text),
            ("a[].c", FieldType::Any),
            ("a[].c[].d", FieldType::Flag),
            ("o", FieldType::Object),
            ("o.n", FieldType::CountOrOff),
            ("m", FieldType::SameAs("o")),
            ("x", FieldType::Only(vec![json!(1)])),
        ];
        let record = FieldRecord {
            fields: fields.map(|(path, kind)| (path.to_owned(), kind)).to_vec(),
            required: BTreeSet::from(["a".to_owned()]),
        };
        let facts = json!({"o.n": {"minimum": 5}});
        let schema = schema(&record, facts.as_object().expect("an object"));
        let text = json!({"type": ["string", "null"]});
        let flags = json!({"type": "object", "properties": {"d": {"type": ["boolean", "null"]}}});
        assert_eq!(schema["required"], json!(["a"]));
        assert_eq!(schema["properties"]["a"]["type"], "array");
        let items = &schema["properties"]["a"]["items"]["properties"];
        assert_eq!(items["b"], text);
        let parts = json!({"type": "array", "items": flags});
        assert_eq!(items["c"], json!({"anyOf": [{"type": "string"}, parts, {"type": "null"}]}));
        let object = json!({"type": ["object", "null"], "properties": {"n": {"type": ["integer", "null"], "minimum": 5}}});
        assert_eq!((&schema["properties"]["o"], &schema["properties"]["m"]), (&object, &object));
        assert_eq!(schema["properties"]["x"]["enum"], json!([1, null]));
    }
}
