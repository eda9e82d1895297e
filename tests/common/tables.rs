//! Tables of literals that tests keep in files: `tests/tables/FILE.json` has an object of tables by name, a row a line.

use serde::Deserialize;

use super::prelude::*;

/// Returns the rows of a table. Files stay in memory, so that a row can be of texts that are borrowed.
#[track_caller]
pub fn listed<T: Deserialize<'static>>(file: &str, table: &str) -> Vec<T> {
    let rows = tables(file).get(table).unwrap_or_else(|| panic!("{file} has no table {table}"));
    Vec::deserialize(rows).unwrap_or_else(|error| panic!("{file}, {table}: {error}"))
}

fn tables(file: &str) -> &'static Value {
    static READ: Mutex<BTreeMap<String, &Value>> = Mutex::new(BTreeMap::new());
    let read = || {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/tables/{file}.json"));
        let text = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let tables = serde_json::from_slice(&text);
        &*Box::leak(Box::new(tables.unwrap_or_else(|error| panic!("{}: {error}", path.display()))))
    };
    READ.lock().expect("a file that was read").entry(file.to_owned()).or_insert_with(read)
}
