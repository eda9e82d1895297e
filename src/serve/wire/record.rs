//! Records the fields that the readers of bodies ask for. `/openapi.json` is made from the record, so that
//! it names those fields and no others.
//!
//! Invariant: only reading within [`recorded`] is recorded, in the thread that calls it; all other reading
//! costs one look at a variable of its thread.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::Value;

/// The values that a reader takes for a field. `null` counts as absent everywhere.
#[derive(Debug, Clone, PartialEq)]
pub enum FieldType {
    /// More than one type, which the reader tells apart.
    Any,
    /// Anything, without effect.
    Hint,
    Text,
    Flag,
    List,
    Object,
    Number,
    /// A whole number from 0.
    Count,
    /// A count, or -1 for none.
    CountOrOff,
    Whole,
    /// These values and no others.
    Only(Vec<Value>),
    /// As another field of the same object, whose second name this is.
    SameAs(&'static str),
}

/// The fields of a body, in the order in which they were asked for.
#[derive(Debug, Default)]
pub struct FieldRecord {
    /// Path of each field, e.g. `messages[].content`, and its type.
    pub fields: Vec<(String, FieldType)>,
    /// Paths of fields that were missing.
    pub required: BTreeSet<String>,
}

thread_local! {
    static RECORD: RefCell<Option<FieldRecord>> = const { RefCell::new(None) };
}

/// Returns the fields that `read` asks for.
pub fn recorded(read: impl FnOnce()) -> FieldRecord {
    RECORD.set(Some(FieldRecord::default()));
    read();
    RECORD.take().unwrap_or_default()
}

/// Records that a reader asked for a field: its path and type.
pub fn note(field: impl FnOnce() -> (String, FieldType)) {
    with_record(|record| {
        let (path, kind) = field();
        match record.fields.iter_mut().find(|(known, _)| *known == path) {
            None => record.fields.push((path, kind)),
            // Some readers look at a field before they read it as what it is.
            Some((_, known)) if *known == FieldType::Any => *known = kind,
            Some(_) => {}
        }
    });
}

/// Records that a reader missed a field.
pub fn note_missing(path: impl FnOnce() -> String) {
    with_record(|record| {
        record.required.insert(path());
    });
}

/// Records that a reader accepts these fields without effect.
pub fn note_hints<'a>(names: impl Iterator<Item = &'a str>) {
    with_record(|record| {
        for name in names {
            if !record.fields.iter().any(|(known, _)| known == name) {
                record.fields.push((name.to_owned(), FieldType::Hint));
            }
        }
    });
}

fn with_record(change: impl FnOnce(&mut FieldRecord)) {
    RECORD.with_borrow_mut(|record| {
        if let Some(record) = record {
            change(record);
        }
    });
}
