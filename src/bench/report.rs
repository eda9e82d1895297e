//! Reports of a document for people and programs: table, JSON, JSON Lines, CSV, Markdown.
//!
//! Formats only; measures and judges nothing.

use serde_json::{Value, json};

use super::figures::{Labels, percent, quoted, sparkline};
use super::plan::Unit;
use super::record::{BenchModel, CaseResult, Document, SCHEMA, Sample};
use super::serve_report;
use llmctl_base::columns::aligned;
use llmctl_base::units::bytes;

/// Form of a report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BenchFormat {
    /// For people
    #[default]
    Table,
    /// One object with every measured value, at the end
    Json,
    /// A line for each measurement as it comes
    Jsonl,
    /// A row per case
    Csv,
    /// A Markdown table in the form of llama-bench
    Md,
}

/// Renders the whole document, for formats that are written at the end. Cells of a table have `widest` columns at most.
pub fn render(document: &Document, format: BenchFormat, widest: usize) -> String {
    match format {
        BenchFormat::Table => table(document, widest),
        BenchFormat::Json => document.text(),
        BenchFormat::Jsonl => last_lines(document),
        BenchFormat::Csv if document.server.is_some() => serve_report::csv(document),
        BenchFormat::Csv => csv(document),
        BenchFormat::Md if document.server.is_some() => serve_report::markdown(document),
        BenchFormat::Md => markdown(document),
    }
}

/// Renders machine, models, a row per case, and warnings.
fn table(document: &Document, widest: usize) -> String {
    let mut text = heading(document);
    if !document.cases.is_empty() {
        text.push_str(&aligned(&rows(document), widest));
    }
    if document.server.is_some() {
        text.push_str(&serve_report::table(document, widest));
    }
    if !document.complete {
        text.push_str("\nnot complete: it was interrupted\n");
    }
    if !document.warnings.is_empty() {
        text.push('\n');
    }
    for warning in &document.warnings {
        text.push_str(&format!("warning: {warning}\n"));
    }
    text
}

/// Returns the lines about machine, models and memory, and an empty one.
fn heading(document: &Document) -> String {
    let mut text = format!("{}\n", machine_line(document));
    for model in &document.models {
        text.push_str(&format!("{}\n", model_line(model)));
    }
    if let Some(peak) = document.machine.peak_memory {
        text.push_str(&format!("peak memory {}\n", bytes(peak)));
    }
    text + "\n"
}

fn machine_line(document: &Document) -> String {
    let build = &document.build;
    let mut parts = vec![format!("llmctl {} {}", build.version, build.profile)];
    parts.extend(document.machine.cpu.clone());
    if let Some(count) = document.machine.processors {
        parts.push(format!("{count} CPUs"));
    }
    parts.extend(document.machine.quota.map(|quota| format!("quota {quota:.2} CPUs")));
    let mut line = parts.join(", ");
    let probes = &document.machine.probes;
    for (index, probe) in probes.iter().enumerate() {
        if probes[..index].iter().any(|earlier| earlier.threads == probe.threads) {
            continue; // the second probe
        }
        let threads = if probe.threads == 1 { "thread reads" } else { "threads read" };
        line.push_str(&format!("\n{} {threads} {:.1} GB/s", probe.threads, probe.read_gb_s));
        line.push_str(&probe.int8_gop_s.map_or(String::new(), |gop| format!(", int8 {gop:.0} GOP/s")));
        line.push_str(&probe.f32_gop_s.map_or(String::new(), |gop| format!(", f32 {gop:.0} GFLOP/s")));
    }
    line
}

fn model_line(model: &BenchModel) -> String {
    let mut parts = vec![];
    parts.extend(model.architecture.clone());
    parts.extend(model.parameters.map(|count| format!("{} parameters", count_of(count))));
    parts.extend(model.quantization.clone());
    parts.extend(model.bytes.map(bytes));
    parts.push(format!("threads {}", model.setting.threads));
    parts.push(format!("kernels {}", model.kernels.as_deref().unwrap_or(&model.setting.cpu)));
    if let Some(kv) = model.kv_bytes_per_token {
        parts.push(format!("KV {} per token ({})", bytes(kv), model.setting.kv_type));
    }
    parts.extend(model.draft_model.as_ref().map(|name| format!("draft model {name}")));
    if let Some(load) = model.load_s.first() {
        parts.push(format!("loaded in {load:.2} s"));
    }
    format!("{}: {}", model.setting.model, parts.join(", "))
}

/// Formats a count as llama-bench does: `1.2 B`.
fn count_of(count: u64) -> String {
    match count as f64 {
        count if count >= 1e9 => format!("{:.2} B", count / 1e9),
        count if count >= 1e6 => format!("{:.2} M", count / 1e6),
        count => format!("{:.0} K", count / 1e3),
    }
}

fn rows(document: &Document) -> Vec<Vec<String>> {
    let labels = Labels::of(&document.cases);
    let header = ["test", "mean", "", "median", "of limit", "first token", "cached", "runs"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for result in document.cases.iter().filter(|result| !result.samples.is_empty()) {
        let summary = &result.summary;
        let limit = result.limit.as_ref();
        let cached = result.samples.last().map_or(0, |sample| sample.cached_tokens);
        rows.push(vec![
            labels.label(result),
            format!("{:.2} ± {:.2}", summary.mean, summary.stddev),
            result.unit.name().to_owned(),
            format!("{:.2}", summary.median),
            limit.map_or(String::new(), |limit| format!("{} {}", percent(limit.share), limit.by)),
            result.first_token_ms().map_or(String::new(), |ms| format!("{ms:.1} ms")),
            if cached > 0 { cached.to_string() } else { String::new() },
            sparkline(&result.values()),
        ]);
    }
    add_drafts(document, &mut rows);
    rows
}

/// Adds a column of accepted and drafted tokens if any were drafted.
fn add_drafts(document: &Document, rows: &mut [Vec<String>]) {
    let measured = document.cases.iter().filter(|result| !result.samples.is_empty());
    let cell = |result: &CaseResult| {
        let sum = |count: fn(&Sample) -> usize| result.samples.iter().map(count).sum::<usize>();
        let (drafted, accepted) = (sum(|sample| sample.drafted_tokens), sum(|sample| sample.accepted_tokens));
        let by_model: Vec<_> = result.samples.iter().filter_map(|sample| sample.draft_model).collect();
        let by_model = match by_model.iter().map(|usage| usage.drafted_tokens).sum::<usize>() {
            0 => String::new(),
            drafted => {
                let accepted: usize = by_model.iter().map(|usage| usage.accepted_tokens).sum();
                format!(" (draft model {accepted} of {drafted})")
            }
        };
        if drafted > 0 { format!("{accepted} of {drafted}{by_model}") } else { String::new() }
    };
    let cells: Vec<String> = measured.map(cell).collect();
    if cells.iter().any(|cell| !cell.is_empty()) {
        let column = std::iter::once("drafts accepted".to_owned()).chain(cells);
        rows.iter_mut().zip(column).for_each(|(row, cell)| row.push(cell));
    }
}

/// Renders a table in llama-bench's form, so that rows of both fit in one table.
fn markdown(document: &Document) -> String {
    let mut text = String::from(
        "| model | size | params | backend | threads | test | t/s |\n| --- | ---: | ---: | --- | ---: | ---: | ---: |\n",
    );
    for result in document.cases.iter().filter(|result| !result.samples.is_empty()) {
        let setting = &result.setting;
        let model = document.models.iter().find(|model| model.setting == *setting);
        let size = model.and_then(|model| model.bytes).map_or(String::new(), bytes);
        let params = model.and_then(|model| model.parameters).map_or(String::new(), count_of);
        let unit = if result.unit == Unit::TokensPerSecond { "" } else { " ms" };
        text.push_str(&format!(
            "| {} | {size} | {params} | {} | {} | {} | {:.2} ± {:.2}{unit} |\n",
            setting.model.replace('|', "\\|"),
            setting.cpu,
            setting.threads,
            result.test,
            result.summary.mean,
            result.summary.stddev,
        ));
    }
    let build = &document.build;
    text.push_str(&format!(
        "\nbuild: llmctl {} ({})\n",
        build.version,
        build.commit.as_deref().unwrap_or(&build.profile)
    ));
    text
}

fn csv(document: &Document) -> String {
    const COLUMNS: &str = "test,model,quantize,kv_type,cpu,threads,threads_batch,step_tokens,n_prompt,n_gen,n_depth,n_sequences,\
                           unit,mean,stddev,median,min,max,limit_by,limit_share,first_token_ms,cached_tokens,runs";
    let mut text = format!("{COLUMNS}\n");
    for result in document.cases.iter().filter(|result| !result.samples.is_empty()) {
        let (setting, summary) = (&result.setting, &result.summary);
        let limit = result.limit.as_ref();
        let cells = [
            result.test.clone(),
            setting.model.clone(),
            setting.quantize.clone().unwrap_or_default(),
            setting.kv_type.clone(),
            setting.cpu.clone(),
            setting.threads.to_string(),
            setting.threads_batch.to_string(),
            setting.step_tokens.to_string(),
            result.n_prompt.to_string(),
            result.n_gen.to_string(),
            result.n_depth.to_string(),
            result.n_sequences.to_string(),
            result.unit.name().to_owned(),
            summary.mean.to_string(),
            summary.stddev.to_string(),
            summary.median.to_string(),
            summary.min.to_string(),
            summary.max.to_string(),
            limit.map_or(String::new(), |limit| limit.by.clone()),
            limit.map_or(String::new(), |limit| limit.share.to_string()),
            result.first_token_ms().map_or(String::new(), |ms| ms.to_string()),
            result.samples.last().map_or(0, |sample| sample.cached_tokens).to_string(),
            result.samples.len().to_string(),
        ];
        text.push_str(&(cells.map(|cell| quoted(&cell)).join(",") + "\n"));
    }
    text
}

fn event(name: &str, rest: Value) -> String {
    let mut line = json!({"schema": SCHEMA, "event": name});
    if let (Some(line), Value::Object(rest)) = (line.as_object_mut(), rest) {
        line.extend(rest);
    }
    format!("{line}\n")
}

/// Returns the first line of JSON Lines: facts known before the measurements.
pub fn first_line(document: &Document) -> String {
    let Document { build, command, started, machine, models, .. } = document;
    event(
        "started",
        json!({"build": build, "command": command, "started": started, "machine": machine, "models": models}),
    )
}

/// Returns the line of a measurement, the last sample of `result`.
pub fn sample_line(result: &CaseResult) -> String {
    let CaseResult { test, setting, unit, samples, .. } = result;
    event("sample", json!({"test": test, "unit": unit, "setting": setting, "sample": samples.last()}))
}

/// Returns the last lines: a summary of each case, then of the run.
fn last_lines(document: &Document) -> String {
    let mut text = String::new();
    for result in document.cases.iter().filter(|result| !result.samples.is_empty()) {
        let mut value = json!(result);
        if let Some(fields) = value.as_object_mut() {
            fields.remove("samples"); // reported in their own lines
        }
        text.push_str(&event("case", value));
    }
    for point in &document.points {
        text.push_str(&event("point", json!(point)));
    }
    let Document { machine, warnings, complete, .. } = document;
    text + &event("done", json!({"complete": complete, "machine": machine, "warnings": warnings}))
}

#[cfg(test)]
pub mod sample {
    //! A whole document, measured on mock engines.

    use super::super::plan::{self, CaseSweep};
    use super::super::record::{BenchSetting, Build, HostFacts, Load, Probe, TokenCost};
    use super::super::runner::mock::{Counting, Mock};
    use super::super::runner::{self, Rounds};
    use super::*;

    fn model(setting: &BenchSetting) -> BenchModel {
        let cost = TokenCost {
            operations: 1_000_000_000,
            head_operations: 300_000_000,
            weight_bytes: 400_000_000,
            kv_bytes: 1000,
            is_integer: true,
        };
        BenchModel {
            setting: setting.clone(),
            architecture: Some("qwen3".to_owned()),
            parameters: Some(596_000_000),
            bytes: Some(400_000_000),
            quantization: Some("Q4_K_M".to_owned()),
            context: Some(528),
            kv_bytes_per_token: Some(1000),
            kernels: Some("avx512-vnni".to_owned()),
            load_s: vec![0.75],
            cost: Some(cost),
            ..BenchModel::default()
        }
    }

    fn machine() -> HostFacts {
        let probe = |threads: usize| Probe {
            threads,
            read_gb_s: 20.0 * threads as f64,
            int8_gop_s: Some(1000.0),
            f32_gop_s: None,
        };
        HostFacts {
            cpu: Some("A processor".to_owned()),
            processors: Some(2),
            probes: vec![probe(1), probe(2)],
            peak_memory: Some(1 << 30),
            load: Some(Load { others: 0.25, ..Load::default() }),
            ..HostFacts::default()
        }
    }

    fn build() -> Build {
        Build {
            version: "1.2.3".to_owned(),
            commit: Some("abc123".to_owned()),
            profile: "release".to_owned(),
            target: "x86_64-linux".to_owned(),
        }
    }

    /// Two engines, one prompt test and one at depth. `faster` multiplies the rates.
    pub fn document(faster: f64) -> Document {
        let sweep = CaseSweep {
            prompts: vec![512],
            generated: vec![128],
            depths: vec![0],
            sequences: vec![1],
            ..CaseSweep::default()
        };
        let cases = plan::cases(&sweep).expect("cases");
        let times = |values: &[f64]| values.iter().map(|value| value * faster).collect::<Vec<_>>();
        let mut one = Mock::new(1)
            .declare("pp512", &times(&[50.0, 200.0, 201.0, 199.0, 200.0, 202.0]))
            .declare("tg128", &times(&[9.0, 30.0, 31.0, 29.0, 24.0, 33.0]));
        let mut two = Mock::new(2)
            .declare("pp512", &times(&[90.0, 400.0, 396.0, 390.0, 386.0, 380.0]))
            .declare("tg128", &times(&[20.0, 50.0, 50.5, 49.5, 50.0, 51.0]));
        let mut results = Vec::new();
        let rounds = Rounds { repetitions: 5, warm_up: true };
        let ended =
            runner::run(&mut [&mut one, &mut two], &cases, rounds, &mut results, &mut Counting::default());
        assert!(matches!(ended, Ok(None)), "{ended:?}");
        let mut document = Document {
            schema: SCHEMA.to_owned(),
            build: build(),
            command: vec!["bench".to_owned()],
            started: 1_700_000_000,
            complete: true,
            machine: machine(),
            models: vec![model(&one.setting), model(&two.setting)],
            server: None,
            cases: results,
            points: Vec::new(),
            warnings: Vec::new(),
        };
        super::super::validity::conclude(&mut document);
        document
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_report_in_every_form() {
        let document = sample::document(1.0);
        for (name, format) in [
            ("bench_table", BenchFormat::Table),
            ("bench_csv", BenchFormat::Csv),
            ("bench_md", BenchFormat::Md),
            ("bench_jsonl", BenchFormat::Jsonl),
        ] {
            insta::assert_snapshot!(name, render(&document, format, usize::MAX));
        }
        insta::assert_snapshot!("bench_started", first_line(&document));
        insta::assert_snapshot!("bench_sample", sample_line(&document.cases[0]));
    }

    #[test]
    fn json_is_read_back_as_it_was() {
        let document = sample::document(1.0);
        let folder = tempfile::tempdir().expect("tempdir");
        let path = folder.path().join("result.json");
        document.save(&path).expect("saved");
        assert_eq!(
            std::fs::read_to_string(&path).expect("a file"),
            render(&document, BenchFormat::Json, usize::MAX)
        );
        assert_eq!(Document::read(&path).expect("a document"), document);
        assert!(!folder.path().join("result.json.part").exists());
    }

    #[test]
    fn small_noise_has_small_bars() {
        assert_eq!(sparkline(&[100.0, 101.0, 99.0]), "▅▅▄");
        assert_eq!(sparkline(&[1.0, 2.0, 3.0]), "▁▅█");
        assert_eq!(sparkline(&[0.0, 0.0]), "▅▅");
        assert_eq!(sparkline(&[]), "");
    }

    #[test]
    fn cells_are_quoted_where_they_must_be() {
        assert_eq!(quoted("plain"), "plain");
        assert_eq!(quoted("a,\"b\""), "\"a,\"\"b\"\"\"");
    }
}
