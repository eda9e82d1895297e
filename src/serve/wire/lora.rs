//! LoRA adapters of a request, in llama.cpp's form.

use llmctl_models::adapters::{AdapterSpec, AdapterUse};
use serde_json::{Value, json};

use super::Fields;

const NAME: &str = "lora";

/// Reads a list of adapters by their number or name, each with its scale; those that are not in it are not used.
pub fn adapters(known: &[AdapterSpec], fields: &mut Fields<'_>) -> Option<Vec<AdapterUse>> {
    let mut uses = Vec::new();
    for (index, item) in fields.list(NAME)?.into_iter().enumerate() {
        let at = format!("{NAME}[{index}]");
        let mut item = fields.within(&at, item)?;
        let id = item.take("id");
        let spec = match &id {
            Some(Value::String(name)) => known.iter().find(|spec| spec.name == *name),
            Some(number) => number.as_u64().and_then(|number| known.get(usize::try_from(number).ok()?)),
            None => None,
        };
        let scale = item.number("scale").unwrap_or(1.0);
        match spec {
            Some(spec) => uses.push(AdapterUse { key: spec.key, scale }),
            None if known.is_empty() => {
                item.out_of_range("id", "names an adapter, and none is loaded (--lora)")
            }
            None => item.out_of_range("id", "is no number or name of an adapter that is loaded"),
        }
        item.end();
    }
    let list = AdapterUse::list(uses);
    list.map_err(|scale| fields.out_of_range(NAME, &format!("has a scale of {scale}"))).ok()
}

/// Asks for an adapter alone, by its name, as `MODEL:ADAPTER` does. Returns false if there is none.
pub fn name(known: &[AdapterSpec], name: &str, fields: &mut Fields<'_>) -> bool {
    let Some(spec) = known.iter().find(|spec| spec.name == name) else { return false };
    match fields.has(NAME) {
        true => fields.out_of_range(NAME, "contradicts the adapter that \"model\" names"),
        false => {
            let scale = if spec.scale == 0.0 { 1.0 } else { spec.scale };
            fields.put(NAME, json!([{"id": name, "scale": scale}]));
        }
    }
    true
}
