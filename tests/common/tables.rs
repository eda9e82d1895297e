//! Tables of literals that tests keep in files: `tests/tables/FILE.json` has an object of tables by name, a row a line.

use serde::Deserialize;

use super::prelude::*;

/// Returns the rows of a table. They stay in memory, so that a row can be of texts that are borrowed.
#[track_caller]
pub fn listed<T: Deserialize<'static>>(file: &str, name: &str) -> Vec<T> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/tables/{file}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut tables: BTreeMap<String, Value> =
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let table = tables.remove(name).unwrap_or_else(|| panic!("{}: no table {name}", path.display()));
    Vec::deserialize(&*Box::leak(Box::new(table))).unwrap_or_else(|error| panic!("{file}, {name}: {error}"))
}
