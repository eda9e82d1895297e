//! Reads members from the schema of an object. Pure.

use serde_json::{Value, json};

use super::coerce::ArgumentSchema;

/// Keywords of members that only JSON grammars may know.
const UNKNOWN: &str = "$ref allOf anyOf oneOf not if dependencies dependentRequired dependentSchemas propertyNames \
                       patternProperties unevaluatedProperties enum const";

/// The members of an object.
#[derive(Debug, Default)]
pub struct Shape {
    /// Names and schemas; the required ones come first.
    pub members: Vec<(String, Value)>,
    pub num_required: usize,
    /// The schema of members of other names; `None` if there may be none.
    pub others: Option<Value>,
    pub least: usize,
    pub most: Option<usize>,
}

/// Returns the shapes of which an object must have one: several if the schema is nothing but alternatives.
///
/// # Errors
/// A keyword that shapes cannot express.
pub fn shapes(schema: ArgumentSchema<'_>) -> Result<Vec<Shape>, String> {
    let Some(node) = schema.node() else { return Ok(vec![Shape::default()]) };
    match node.get("anyOf").and_then(Value::as_array) {
        Some(options) if node.get("properties").is_none() && node.get("required").is_none() => {
            let options = options.iter().map(|option| schema.at(Some(option)));
            let objects = options.filter(|option| option.types().object || option.types().is_unknown());
            objects.filter_map(ArgumentSchema::node).map(shape).collect()
        }
        _ => Ok(vec![shape(node)?]),
    }
}

fn shape(node: &Value) -> Result<Shape, String> {
    if let Some(keyword) = UNKNOWN.split(' ').find(|keyword| node.get(keyword).is_some()) {
        return Err(keyword.to_owned());
    }
    let properties = node.get("properties").and_then(Value::as_object);
    let others = match node.get("additionalProperties") {
        Some(Value::Bool(false)) => None,
        Some(schema) => Some(schema.clone()),
        // An object that names its members has no others unless it says so; one that is only an object may have any.
        None => (properties.is_none() && node.get("type").is_some()).then(|| json!({})),
    };
    let required: Vec<&str> = node
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let named = |name: &str| properties.and_then(|properties| properties.get(name));
    let of = |name: &&str| {
        let schema = named(name).or(others.as_ref()).cloned().unwrap_or_else(|| json!({}));
        ((*name).to_owned(), schema)
    };
    let mut members: Vec<(String, Value)> = required.iter().map(of).collect();
    let optional = properties.into_iter().flatten().filter(|(name, _)| !required.contains(&name.as_str()));
    let optional = optional.filter(|(_, schema)| **schema != Value::Bool(false));
    members.extend(optional.map(|(name, schema)| (name.clone(), schema.clone())));
    let count =
        |keyword: &str| node.get(keyword).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
    let (least, most) = (count("minProperties").unwrap_or(0), count("maxProperties"));
    Ok(Shape { members, num_required: required.len(), others, least, most })
}
