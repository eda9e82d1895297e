//! Dialects: every published template is recognised by its own text, answers come apart the same however they are split,
//! grammars let through only calls that parse, and calls rendered into history parse back.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use llmctl::template::Dialect;

use crate::common::fixtures;

/// The source of a template file: as it is, or the `chat_template` member of a JSON file.
fn template_source(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).expect("a template is text");
    match path.extension()?.to_str()? {
        "json" => {
            let json: serde_json::Value = serde_json::from_str(&text).ok()?;
            Some(json.get("chat_template")?.as_str()?.to_owned())
        }
        _ => Some(text),
    }
}

/// Every Jinja template of the fixtures, by `folder/file`.
fn templates() -> Option<BTreeMap<String, String>> {
    let root = fixtures()?.join("templates");
    let mut all = BTreeMap::new();
    for folder in std::fs::read_dir(&root).expect("the folder of templates").flatten() {
        for file in std::fs::read_dir(folder.path()).expect("a folder of templates").flatten() {
            let path = file.path();
            let name = path.strip_prefix(&root).expect("below the root").display().to_string();
            if !name.ends_with(".gotmpl")
                && let Some(source) = template_source(&path)
            {
                all.insert(name, source);
            }
        }
    }
    Some(all)
}

#[test]
fn templates_are_recognised_by_their_own_text() {
    let Some(templates) = templates() else { return };
    let mut table = String::new();
    for (name, source) in &templates {
        let dialect = Dialect::detect(source);
        let reasoning = dialect.reasoning.map_or("-", |format| format.name());
        let tool_calls = dialect.tool_calls.map_or("-", |format| format.name());
        writeln!(table, "{tool_calls:15} {reasoning:17} {name}").expect("a string takes everything");
    }
    insta::assert_snapshot!(table);
}
