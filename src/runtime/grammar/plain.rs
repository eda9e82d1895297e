//! Rewrites the schemas of tools' parameters as alternatives that combine nothing: call formats that are not
//! JSON write only such objects.
//!
//! Pure. Invariant: a value follows the rewritten schema exactly if it follows the original.

use serde_json::{Map, Value, json};

use llmctl_template::resolve_reference;

/// Most alternatives of one schema, and most schemas within each other.
const MAX_ALTERNATIVES: usize = 32;

/// Keywords that stay at the root, where references lead.
const AT_ROOT: [&str; 3] = ["$schema", "$defs", "definitions"];

type Schema = Map<String, Value>;
/// The error is a keyword that alternatives cannot express, e.g. `oneOf` with options that may overlap.
type Result<T> = std::result::Result<T, String>;

/// Returns the schema of an object as one of plain objects; unchanged if that cannot be.
pub fn plain(schema: &Value) -> Value {
    let Ok(mut found) = alternatives(schema, schema, 0) else { return schema.clone() };
    found.retain(may_be_object);
    for object in &mut found {
        object.retain(|keyword, _| !AT_ROOT.contains(&keyword.as_str()));
        for value in
            object.get_mut("properties").and_then(Value::as_object_mut).into_iter().flat_map(Map::values_mut)
        {
            if value.get("allOf").is_some()
                && let Ok([one]) = alternatives(schema, value, 0).as_deref()
            {
                *value = Value::Object(one.clone());
            }
        }
    }
    let mut plain = match <[Schema; 1]>::try_from(found) {
        Ok([only]) => Value::Object(only),
        Err(found) if found.is_empty() => return schema.clone(),
        Err(found) => json!({"anyOf": found}),
    };
    for keyword in AT_ROOT {
        if let Some(value) = schema.get(keyword) {
            plain[keyword] = value.clone();
        }
    }
    plain
}

/// Returns the alternatives of a schema; none if nothing satisfies it.
fn alternatives(root: &Value, node: &Value, depth: usize) -> Result<Vec<Schema>> {
    let Value::Object(node) = node else {
        return Ok(if *node == Value::Bool(false) { Vec::new() } else { vec![Schema::new()] });
    };
    let mut own = node.clone();
    own.retain(|keyword, _| !["$ref", "allOf", "anyOf", "oneOf"].contains(&keyword.as_str()));
    let mut found = vec![own];
    for (keyword, value) in node {
        let below = |value: &Value| alternatives(root, value, depth + 1);
        let options = || value.as_array().into_iter().flatten().map(below).collect::<Result<Vec<_>>>();
        found = match keyword.as_str() {
            "$ref" | "allOf" | "anyOf" | "oneOf" if depth > MAX_ALTERNATIVES => return Err(keyword.clone()),
            "$ref" => {
                let target =
                    value.as_str().and_then(|reference| resolve_reference(root, reference)).ok_or("$ref")?;
                both(&found, &below(target)?)?
            }
            "allOf" => options()?.iter().try_fold(found, |found, option| both(&found, option))?,
            "anyOf" => both(&found, &options()?.concat())?,
            "oneOf" => match options()? {
                options if exclude_each_other(&options) => both(&found, &options.concat())?,
                _ => return Err(keyword.clone()),
            },
            _ => continue,
        };
        if found.len() > MAX_ALTERNATIVES {
            return Err(keyword.clone());
        }
    }
    Ok(found)
}

/// Returns the alternatives under which two schemas hold.
fn both(some: &[Schema], others: &[Schema]) -> Result<Vec<Schema>> {
    some.iter().flat_map(|one| others.iter().map(move |other| merged(one, other))).collect()
}

/// Returns the schema under which two hold. Each side's schema of other members applies to the members that only the other side
/// names.
fn merged(one: &Schema, other: &Schema) -> Result<Schema> {
    let mut merged = one.clone();
    for (keyword, value) in other {
        let value = match one.get(keyword) {
            Some(present) if keyword == "required" => union(present, value),
            Some(present) if keyword == "additionalProperties" => joined(present, value),
            Some(present) if keyword != "properties" && present != value => return Err(keyword.clone()),
            _ => value.clone(),
        };
        merged.insert(keyword.clone(), value);
    }
    let mut properties = Schema::new();
    for (side, opposite) in [(one, other), (other, one)] {
        for (name, schema) in side.get("properties").and_then(Value::as_object).into_iter().flatten() {
            let beside = named(opposite, name).or_else(|| opposite.get("additionalProperties"));
            let schema = beside.map_or_else(|| schema.clone(), |beside| joined(schema, beside));
            properties.entry(name.clone()).or_insert(schema);
        }
    }
    if merged.contains_key("properties") {
        merged.insert("properties".to_owned(), properties.into());
    }
    Ok(merged)
}

fn named<'a>(schema: &'a Schema, name: &str) -> Option<&'a Value> {
    schema.get("properties")?.get(name)
}

/// Returns a schema for values that follow two.
fn joined(one: &Value, other: &Value) -> Value {
    match (one, other) {
        (Value::Bool(false), _) | (_, Value::Bool(false)) => false.into(),
        (Value::Bool(true), schema) | (schema, Value::Bool(true)) => schema.clone(),
        (one, other) if one == other => one.clone(),
        (one, other) => json!({"allOf": [one, other]}),
    }
}

fn values(value: &Value) -> &[Value] {
    value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice)
}

fn union(one: &Value, other: &Value) -> Value {
    let more = values(other).iter().filter(|value| !values(one).contains(value));
    values(one).iter().chain(more).cloned().collect()
}

/// Returns whether no two of the options can hold for one value.
fn exclude_each_other(options: &[Vec<Schema>]) -> bool {
    let others = |at: usize| options[at + 1..].iter().flatten();
    options.iter().enumerate().all(|(at, option)| {
        option.iter().all(|one| others(at).all(|other| excludes(one, other) || excludes(other, one)))
    })
}

/// Returns whether a value that follows `one` cannot follow `other`: constants differ, here or in a member that both require, or
/// `one` requires a member that `other` forbids.
fn excludes(one: &Schema, other: &Schema) -> bool {
    let is_closed = other.get("additionalProperties") == Some(&Value::Bool(false));
    let choices =
        |schema: &Schema| schema.get("const").map(|value| json!([value])).or(schema.get("enum").cloned());
    let differ = |one: &Schema, other: &Schema| match (choices(one), choices(other)) {
        (Some(one), Some(other)) => !values(&one).iter().any(|value| values(&other).contains(value)),
        _ => false,
    };
    differ(one, other)
        || required(one).iter().any(|name| match (named(one, name), named(other, name)) {
            (_, None) => is_closed,
            (Some(Value::Object(one)), Some(Value::Object(same))) => {
                required(other).contains(name) && differ(one, same)
            }
            _ => false,
        })
}

/// Returns whether an object may follow a schema: no required member is forbidden.
fn may_be_object(node: &Schema) -> bool {
    let is_closed = node.get("additionalProperties") == Some(&Value::Bool(false));
    let is_forbidden =
        |name: &&str| named(node, name).map_or(is_closed, |schema| *schema == Value::Bool(false));
    node.get("type").is_none_or(|types| values(types).iter().any(|name| name == "object"))
        && !required(node).iter().any(is_forbidden)
}

fn required(node: &Schema) -> Vec<&str> {
    node.get("required").into_iter().flat_map(values).filter_map(Value::as_str).collect()
}
