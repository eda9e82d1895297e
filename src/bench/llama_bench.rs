//! Results of llama.cpp's llama-bench (`-o json` or `-o jsonl`), for comparison with ours.
//!
//! Fields as in llama.cpp's tools/llama-bench: `n_prompt`, `n_gen`, `n_depth`, `n_threads`, `type_k`,
//! `model_filename`, `cpu_info`, `build_commit`, `samples_ts`. Fields that it lacks stay empty.

use std::path::Path;

use serde_json::Value;

use super::plan::{Case, Work};
use super::record::{BenchSetting, Build, CaseResult, Document, HostFacts, SCHEMA, Sample};

/// Parses the text; `None` if it has another form.
pub fn read(text: &str) -> Option<Document> {
    let rows: Vec<Value> = match serde_json::from_str(text) {
        Ok(Value::Array(rows)) => rows,
        _ => text.lines().map(serde_json::from_str).collect::<Result<_, _>>().ok()?,
    };
    let first = rows.first()?;
    let text_of = |name: &str| first[name].as_str().map(str::to_owned);
    Some(Document {
        schema: SCHEMA.to_owned(),
        build: Build {
            version: "llama-bench".to_owned(),
            commit: text_of("build_commit"),
            profile: "release".to_owned(),
            ..Build::default()
        },
        complete: true,
        machine: HostFacts { cpu: text_of("cpu_info"), ..HostFacts::default() },
        cases: rows.iter().map(case).collect::<Option<_>>()?,
        ..Document::default()
    })
}

fn case(row: &Value) -> Option<CaseResult> {
    let count = |name: &str| row[name].as_u64().and_then(|count| usize::try_from(count).ok());
    let work = match (count("n_prompt")?, count("n_gen")?) {
        (0, 0) => return None,
        (tokens, 0) => Work::Prompt { tokens },
        (0, tokens) => Work::Generate { tokens },
        (prompt, generate) => Work::Both { prompt, generate },
    };
    let threads = count("n_threads").unwrap_or(0);
    let path = row["model_filename"].as_str().unwrap_or_default();
    let setting = BenchSetting {
        model: Path::new(path)
            .file_stem()
            .map(|stem| stem.to_string_lossy().into_owned())
            .unwrap_or_default(),
        threads,
        threads_batch: threads,
        kv_type: row["type_k"].as_str().unwrap_or_default().to_owned(),
        ..BenchSetting::default()
    };
    let case = Case { work, depth: count("n_depth").unwrap_or(0), sequences: 1 };
    let mut result = CaseResult::new(&case, &setting);
    for value in row["samples_ts"].as_array()? {
        result.push(Sample { value: value.as_f64()?, ..Sample::default() });
    }
    Some(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: &str = r#"{"build_commit":"abc","cpu_info":"C","model_filename":"/m/q.gguf","n_threads":2,"type_k":"f16",
        "n_prompt":512,"n_gen":0,"n_depth":64,"avg_ts":2.0,"samples_ts":[1.0,2.0,3.0]}"#;

    #[test]
    fn a_result_of_llama_bench_becomes_one_of_ours() {
        let one_line = ROW.replace('\n', "");
        for text in [format!("[{ROW}]"), format!("{one_line}\n{one_line}")] {
            let document = read(&text).expect("a document");
            let found = &document.cases[0];
            assert_eq!((found.test.as_str(), found.values()), ("pp512@d64", vec![1.0, 2.0, 3.0]));
            assert_eq!((found.setting.model.as_str(), found.setting.threads), ("q", 2));
        }
    }

    #[test]
    fn anything_else_is_none() {
        for text in ["", "[]", "{}", "[{}]", "no", "[{\"n_prompt\":1,\"n_gen\":0}]"] {
            assert!(read(text).is_none(), "{text}");
        }
    }
}
