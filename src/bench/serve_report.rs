//! Reports of `bench serve`: the points of a sweep as a table, CSV or Markdown, and warnings about them.

use super::figures::{percent, quoted, sparkline};
use super::point::{Latency, Point};
use super::record::Document;
use super::stats;
use llmctl_base::columns::aligned;

/// A column of a table: its head, and the cell of a point.
type PointColumn = (&'static str, fn(&Point) -> String);

const TABLE: [PointColumn; 12] = [
    ("load", |point| point.name.clone()),
    ("answered", answered),
    ("req/s", |point| format!("{:.2}", point.requests_per_second)),
    ("output t/s", |point| format!("{:.1}", point.output_tokens_per_second)),
    ("ttft p50 / p99 ms", |point| pair(point.ttft_ms)),
    ("itl p50 / p99", |point| pair(point.itl_ms)),
    ("tpot p50 / p99", |point| pair(point.tpot_ms)),
    ("e2e p50 / p99", |point| pair(point.e2e_ms)),
    ("per part", |point| point.tokens_per_chunk.map_or(String::new(), |count| format!("{count:.2}"))),
    ("cached", |point| percent(point.cached_share)),
    ("good", |point| {
        let good = point.goodput.map(|good| format!("{} {:.2}/s", percent(good.share), good.per_second));
        good.unwrap_or_default()
    }),
    ("ttft over time", course),
];

/// Renders one row per point, with latencies as median and 99th percentile.
pub fn table(document: &Document, widest: usize) -> String {
    let mut text = String::new();
    if let Some(server) = &document.server {
        let software = server.software.as_deref().map_or(String::new(), |name| format!(" ({name})"));
        text.push_str(&format!("{} at {}{software}\n\n", server.model, server.endpoint));
    }
    let head = TABLE.map(|(head, _)| head.to_owned()).to_vec();
    let rows = document.points.iter().map(|point| TABLE.map(|(_, cell)| cell(point)).to_vec());
    text + &aligned(&std::iter::once(head).chain(rows).collect::<Vec<_>>(), widest)
}

fn failed(point: &Point) -> usize {
    point.errors.values().sum()
}

fn answered(point: &Point) -> String {
    format!("{} of {}", point.requests - failed(point), point.requests)
}

fn pair(latency: Option<Latency>) -> String {
    let number = |value: f64| if value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") };
    latency.map_or("-".to_owned(), |latency| format!("{} / {}", number(latency.p50), number(latency.p99)))
}

/// Renders the course of the time to the first token over the point: means of up to twelve parts.
fn course(point: &Point) -> String {
    const PARTS: usize = 12;
    let times: Vec<f64> = point.turns.iter().filter_map(|turn| turn.first_ms).collect();
    let size = times.len().div_ceil(PARTS).max(1);
    let means: Vec<f64> = times.chunks(size).map(stats::mean).collect();
    sparkline(&means)
}

const FIGURES: [&str; 6] = ["mean", "p50", "p90", "p95", "p99", "max"];

fn figures(latency: Option<Latency>) -> Vec<String> {
    match latency {
        None => vec![String::new(); FIGURES.len()],
        Some(l) => [l.mean, l.p50, l.p90, l.p95, l.p99, l.max].map(|value| value.to_string()).to_vec(),
    }
}

const CSV: [PointColumn; 11] = [
    ("load", |point| point.name.clone()),
    ("requests", |point| point.requests.to_string()),
    ("failed", |point| failed(point).to_string()),
    ("seconds", |point| point.seconds.to_string()),
    ("requests_per_second", |point| point.requests_per_second.to_string()),
    ("prompt_tokens_per_second", |point| point.prompt_tokens_per_second.to_string()),
    ("output_tokens_per_second", |point| point.output_tokens_per_second.to_string()),
    ("cached_share", |point| point.cached_share.to_string()),
    ("tokens_per_chunk", |point| option(point.tokens_per_chunk)),
    ("good_share", |point| option(point.goodput.map(|good| good.share))),
    ("good_per_second", |point| option(point.goodput.map(|good| good.per_second))),
];

fn option(value: Option<f64>) -> String {
    value.map_or(String::new(), |value| value.to_string())
}

pub fn csv(document: &Document) -> String {
    let mut header = CSV.map(|(head, _)| head.to_owned()).to_vec();
    for name in ["ttft", "itl", "tpot", "e2e", "late"] {
        header.extend(FIGURES.map(|figure| format!("{name}_{figure}_ms")));
    }
    let mut text = header.join(",") + "\n";
    for point in &document.points {
        let mut cells = CSV.map(|(_, cell)| cell(point)).to_vec();
        for latency in [point.ttft_ms, point.itl_ms, point.tpot_ms, point.e2e_ms, point.late_ms] {
            cells.extend(figures(latency));
        }
        text.push_str(&(cells.iter().map(|cell| quoted(cell)).collect::<Vec<_>>().join(",") + "\n"));
    }
    text
}

pub fn markdown(document: &Document) -> String {
    let mut text = String::from(
        "| load | answered | req/s | output t/s | TTFT p50 / p99 ms | ITL p50 / p99 ms | TPOT p50 / p99 ms | E2E p50 / p99 ms |\n\
         | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for point in &document.points {
        text.push_str(&format!(
            "| {} | {} | {:.2} | {:.1} | {} | {} | {} | {} |\n",
            point.name,
            answered(point),
            point.requests_per_second,
            point.output_tokens_per_second,
            pair(point.ttft_ms),
            pair(point.itl_ms),
            pair(point.tpot_ms),
            pair(point.e2e_ms),
        ));
    }
    text
}

/// Returns reasons to doubt the points.
pub fn warnings(document: &Document) -> Vec<String> {
    let mut found = Vec::new();
    if document.server.as_ref().is_some_and(|server| !server.counts_tokens) {
        found.push("the server does not count tokens: each part of a stream counts as one token".to_owned());
    }
    for point in &document.points {
        let name = &point.name;
        for (kind, count) in &point.errors {
            found.push(format!("{name}: {count} of {} requests failed ({kind})", point.requests));
        }
        let answered = point.turns.iter().filter(|turn| turn.is_ok()).count();
        if answered > 0 && answered < 100 {
            found.push(format!("{name}: the 99th percentile of {answered} requests is about their maximum"));
        }
        if let Some(late) = point.late_ms.filter(|late| late.p99 > 20.0) {
            found.push(format!(
                "{name}: requests were sent up to {:.0} ms late: this client did not keep up",
                late.max
            ));
        }
        if point.cached_share > 0.5 && point.turns.iter().all(|turn| turn.turn == 1) {
            found.push(format!(
                "{name}: {} of the prompts' tokens came from the server's cache",
                percent(point.cached_share)
            ));
        }
        if let Some(count) = point.tokens_per_chunk.filter(|count| *count > 1.2) {
            found.push(format!(
                "{name}: a part of the stream has {count:.1} tokens: itl is not the time per token, tpot is"
            ));
        }
    }
    found
}

#[cfg(test)]
pub mod sample {
    use super::super::point::Loop;
    use super::super::point::tests::turn;
    use super::*;

    /// Points with declared times.
    pub fn points() -> Vec<Point> {
        let slo = "ttft=200,tpot=50".parse().ok();
        let of = |concurrency: usize| {
            let slower = concurrency as f64;
            let turns: Vec<_> = (0..8)
                .map(|n| {
                    turn(f64::from(n) * 0.5, 90.0 * slower + 5.0 * f64::from(n), &[20.0 * slower; 15], 16)
                })
                .collect();
            Point::new(Loop::Closed { concurrency }, turns, 4.0 / slower, slo)
        };
        let mut points = vec![of(1), of(4)];
        points[1].turns[0].error = Some("timeout".to_owned());
        let four = std::mem::take(&mut points[1].turns);
        points[1] = Point::new(Loop::Closed { concurrency: 4 }, four, 1.0, slo);
        points
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::ServerFacts;
    use crate::report;

    #[test]
    fn points_in_every_form() {
        let mut document = report::sample::document(1.0);
        document.cases.clear();
        document.points = sample::points();
        document.server = Some(ServerFacts {
            endpoint: "http://127.0.0.1:8484/v1".to_owned(),
            model: "m".to_owned(),
            software: Some("uvicorn".to_owned()),
            counts_tokens: false,
        });
        insta::assert_snapshot!("serve_table", table(&document, usize::MAX));
        insta::assert_snapshot!("serve_csv", csv(&document));
        insta::assert_snapshot!("serve_md", markdown(&document));
        insta::assert_snapshot!("serve_warnings", warnings(&document).join("\n"));
    }
}
