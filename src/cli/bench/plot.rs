//! Charts as SVG, written by hand: no script, no font file, readable on light and dark pages.
//!
//! `charts` chooses what a document can show; the rest draws axes, lines, dots and bars. Pure but for [`write`].

use std::fmt::Write as _;
use std::path::Path;

use super::cost::CaseStep;
use super::figures::Labels;
use super::point::{Latency, Loop, Point};
use super::record::Document;
use super::stats;
use crate::cli::error::{CommandError, Kind};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 60.0;

/// Told apart also by those who see fewer colours (Okabe and Ito 2008).
const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

/// Two coordinates: values, or places on the page.
type Pair = (f64, f64);

/// A chart to be drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// Name of the file, without `.svg`.
    pub name: &'static str,
    pub title: String,
    pub x: String,
    pub y: String,
    /// Both axes logarithmic.
    pub is_log: bool,
    pub layers: Vec<Layer>,
}

/// One series.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    pub name: String,
    pub shape: Shape,
    pub points: Vec<Pair>,
    /// Words beside the points, if there are as many.
    pub labels: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    Line,
    Dots,
    /// A line with dots.
    Path,
    /// From the axis up; equally wide.
    Bars,
}

impl Layer {
    fn new(name: impl Into<String>, shape: Shape, points: Vec<Pair>) -> Self {
        Self { name: name.into(), shape, points, labels: Vec::new() }
    }
}

/// Writes all charts into a folder, which is made if it is not there. Returns the files' names.
///
/// # Errors
/// [`Kind::Io`].
pub fn write(document: &Document, folder: &Path) -> Result<Vec<String>, CommandError> {
    let failed = |path: &Path, error| CommandError::new(Kind::Io, error).context(path.display().to_string());
    std::fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
    let mut names = Vec::new();
    for chart in charts(document) {
        let path = folder.join(format!("{}.svg", chart.name));
        std::fs::write(&path, svg(&chart)).map_err(|error| failed(&path, error))?;
        names.push(path.display().to_string());
    }
    Ok(names)
}

/// What there is to show.
pub fn charts(document: &Document) -> Vec<Chart> {
    let charts = [throughput(document), latency(document), tokens(document), roofline(document)];
    charts.into_iter().flatten().collect()
}

/// Output of a server against what its users wait; closed and open loops are lines of their own.
fn throughput(document: &Document) -> Option<Chart> {
    let path = |name: &str, is_closed: bool, latency: fn(&Latency) -> f64| {
        let of_kind = |point: &&Point| matches!(point.kind, Loop::Closed { .. }) == is_closed;
        let points = document.points.iter().filter(of_kind);
        let found: Vec<_> = points
            .filter_map(|point| {
                Some((point.output_tokens_per_second, latency(&point.ttft_ms?), point.name.clone()))
            })
            .collect();
        let mut layer = Layer::new(name, Shape::Path, found.iter().map(|(x, y, _)| (*x, *y)).collect());
        layer.labels = found.into_iter().map(|(_, _, name)| name).collect();
        layer
    };
    let mut layers = Vec::new();
    for (is_closed, kind) in [(true, "users"), (false, "arrivals")] {
        let mut median = path(&format!("median, {kind}"), is_closed, |latency| latency.p50);
        median.labels.clear(); // the same words as above it
        let tail = path(&format!("99th percentile, {kind}"), is_closed, |latency| latency.p99);
        layers.extend([median, tail].into_iter().filter(|layer| !layer.points.is_empty()));
    }
    (document.points.len() > 1 && !layers.is_empty()).then(|| Chart {
        name: "throughput",
        title: "Throughput and time to the first token".to_owned(),
        x: "output tokens per second".to_owned(),
        y: "time to first token, ms".to_owned(),
        is_log: false,
        layers,
    })
}

/// How often one token follows another after how long.
fn latency(document: &Document) -> Option<Chart> {
    const BINS: usize = 40;
    let engine =
        document.cases.iter().flat_map(|result| result.samples.iter().flat_map(|sample| &sample.token_ms));
    let server = document.points.iter().flat_map(|point| point.turns.iter().flat_map(|turn| &turn.gaps_ms));
    let values: Vec<f64> = engine.chain(server).copied().collect();
    if values.len() < 2 {
        return None;
    }
    // The last bin takes what lies beyond: one long pause would press all others into the first.
    let low = stats::quantile(&values, 0.0);
    let high = stats::quantile(&values, 0.99).max(low * 1.01 + 0.001);
    let width = (high - low) / BINS as f64;
    let mut counts = vec![0usize; BINS];
    for value in &values {
        counts[(((value - low) / width) as usize).min(BINS - 1)] += 1;
    }
    let bars = counts.iter().enumerate();
    let bars = bars.map(|(bin, &count)| (low + (bin as f64 + 0.5) * width, count as f64)).collect();
    Some(Chart {
        name: "latency",
        title: format!(
            "Time from one token to the next, {} in all; the last bar holds all that are longer",
            values.len()
        ),
        x: "ms".to_owned(),
        y: "tokens".to_owned(),
        is_log: false,
        layers: vec![Layer::new("", Shape::Bars, bars)],
    })
}

/// Tokens so far, over the time of a point or of a case's last repetition.
fn tokens(document: &Document) -> Option<Chart> {
    let mut layers = Vec::new();
    for point in &document.points {
        let mut times: Vec<f64> = Vec::new();
        for turn in point.turns.iter().filter(|turn| turn.is_ok()) {
            let Some(first) = turn.first_ms else { continue };
            let mut now = turn.at_s + first / 1000.0;
            times.push(now);
            for gap in &turn.gaps_ms {
                now += gap / 1000.0;
                times.push(now);
            }
        }
        layers.push(Layer::new(point.name.clone(), Shape::Line, counted(times)));
    }
    let labels = Labels::of(&document.cases);
    for result in document.cases.iter().filter(|result| result.n_gen > 1 && result.n_sequences == 1) {
        let Some(sample) = result.samples.last() else { continue };
        let mut now = sample.first_token_ms.unwrap_or(0.0) / 1000.0;
        let mut times = vec![now];
        for gap in &sample.token_ms {
            now += gap / 1000.0;
            times.push(now);
        }
        layers.push(Layer::new(labels.label(result), Shape::Line, counted(times)));
    }
    layers.truncate(COLOURS.len());
    (!layers.is_empty()).then(|| Chart {
        name: "tokens",
        title: "Tokens over time".to_owned(),
        x: "seconds".to_owned(),
        y: "tokens so far".to_owned(),
        is_log: false,
        layers,
    })
}

/// (time, how many until then), at most a few hundred of them.
fn counted(mut times: Vec<f64>) -> Vec<Pair> {
    const MOST: usize = 300;
    times.sort_by(f64::total_cmp);
    let step = times.len().div_ceil(MOST).max(1);
    let last = times.len().saturating_sub(1);
    let kept = times.iter().enumerate().filter(|(index, _)| index % step == 0 || *index == last);
    kept.map(|(index, &time)| (time, (index + 1) as f64)).collect()
}

/// Operations per second against operations per byte, under the machine's limits with the most threads.
fn roofline(document: &Document) -> Option<Chart> {
    let probe = document.machine.probes.iter().max_by_key(|probe| probe.threads)?;
    let labels = Labels::of(&document.cases);
    let mut dots = Layer::new("measured", Shape::Dots, Vec::new());
    let mut is_integer = false;
    for result in document.cases.iter().filter(|result| result.setting.threads == probe.threads) {
        let model = document.models.iter().find(|model| model.setting == result.setting);
        let Some(cost) = model.and_then(|model| model.cost) else { continue };
        let Some(step) = CaseStep::of(&result.case, result.setting.step_tokens) else { continue };
        let operations = step.operations(&cost) as f64;
        let intensity = operations / step.bytes(&cost) as f64;
        let rate = operations * result.summary.median / step.rows as f64 / 1e9;
        if rate > 0.0 {
            is_integer |= cost.is_integer;
            dots.points.push((intensity, rate));
            dots.labels.push(labels.label(result));
        }
    }
    let peak = if is_integer { probe.int8_gop_s } else { probe.f32_gop_s }?;
    if dots.points.is_empty() || probe.read_gb_s <= 0.0 {
        return None;
    }
    let ridge = peak / probe.read_gb_s;
    let xs = || dots.points.iter().map(|point| point.0);
    let from = xs().fold(ridge, f64::min) / 2.0;
    let to = xs().fold(ridge, f64::max) * 3.0;
    let roof = vec![(from, from * probe.read_gb_s), (ridge, peak), (to, peak)];
    let kind = if is_integer { "int8" } else { "f32" };
    let name = format!("limit: {:.1} GB/s, {peak:.0} GOP/s {kind}", probe.read_gb_s);
    Some(Chart {
        name: "roofline",
        title: format!("Roofline with {} threads", probe.threads),
        x: "operations per byte read".to_owned(),
        y: "10⁹ operations per second".to_owned(),
        is_log: true,
        layers: vec![Layer::new(name, Shape::Line, roof), dots],
    })
}

/// Numbers on an axis and the way to the page.
struct Axis {
    low: f64,
    high: f64,
    is_log: bool,
    ticks: Vec<f64>,
}

impl Axis {
    fn new(values: impl Iterator<Item = f64> + Clone, is_log: bool, from_zero: bool) -> Self {
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(f64::NEG_INFINITY, f64::max);
        if is_log {
            let (low, high) = (low.max(1e-9), high.max(1e-9));
            return Self {
                low: low / 1.3,
                high: high * 1.5,
                is_log,
                ticks: log_ticks(low / 1.3, high * 1.5),
            };
        }
        let low = if from_zero { low.min(0.0) } else { low };
        let high = if high > low { high + (high - low) * 0.05 } else { low + 1.0 };
        let ticks = ticks(low, high);
        Self { low, high, is_log, ticks }
    }

    /// In [0, 1].
    fn place(&self, value: f64) -> f64 {
        match self.is_log {
            true => (value / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        }
    }
}

/// Round numbers, five to ten of them.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * power).find(|step| *step >= rough).unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last).map(|n| n as f64 * step).collect()
}

/// 1, 2 and 5 times powers of ten; powers alone where there are many.
fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let factors: &[f64] = if last - first > 4 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let all = (first..=last).flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)));
    all.filter(|tick| (low..=high).contains(tick)).collect()
}

fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if size >= 10_000.0 => format!("{:.0}k", value / 1000.0),
        size if size >= 1.0 => format!("{}", (value * 100.0).round() / 100.0),
        _ => format!("{}", (value * 10_000.0).round() / 10_000.0),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The chart as a page of its own.
pub fn svg(chart: &Chart) -> String {
    let points = || chart.layers.iter().flat_map(|layer| layer.points.iter());
    let has_bars = chart.layers.iter().any(|layer| layer.shape == Shape::Bars);
    let mut xs: Vec<f64> = points().map(|point| point.0).collect();
    if let Some(bars) = chart.layers.iter().find(|layer| layer.shape == Shape::Bars) {
        // Bars stand around their middle.
        let half =
            bars.points.windows(2).map(|pair| pair[1].0 - pair[0].0).fold(f64::INFINITY, f64::min) / 2.0;
        xs.extend(
            bars.points.iter().flat_map(|point| [point.0 - half, point.0 + half]).filter(|x| x.is_finite()),
        );
    }
    let x = Axis::new(xs.iter().copied(), chart.is_log, !has_bars);
    let y = Axis::new(points().map(|point| point.1), chart.is_log, true);
    let at = |point: &Pair| {
        let (right, down) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
        (LEFT + x.place(point.0) * right, HEIGHT - BOTTOM - y.place(point.1) * down)
    };
    let mut page = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"15\" fill=\"#222222\">{}</text>\n",
        escaped(&chart.title)
    );
    draw_axes(&mut page, chart, &x, &y);
    for (index, layer) in chart.layers.iter().enumerate() {
        draw(&mut page, layer, COLOURS[index % COLOURS.len()], &at);
    }
    draw_legend(&mut page, chart);
    page + "</svg>\n"
}

fn draw_axes(page: &mut String, chart: &Chart, x: &Axis, y: &Axis) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for &tick in &x.ticks {
        let at = LEFT + x.place(tick) * (right - LEFT);
        let _ = writeln!(
            page,
            "<line x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\" stroke=\"#e4e4e4\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#444444\">{}</text>",
            bottom + 18.0,
            number(tick)
        );
    }
    for &tick in &y.ticks {
        let at = bottom - y.place(tick) * (bottom - TOP);
        let _ = writeln!(
            page,
            "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\" stroke=\"#e4e4e4\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#444444\">{}</text>",
            LEFT - 8.0,
            at + 4.0,
            number(tick)
        );
    }
    let middle = (TOP + bottom) / 2.0;
    let _ = writeln!(
        page,
        "<path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"#444444\"/>\n\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#222222\">{}</text>\n\
         <text x=\"18\" y=\"{middle:.1}\" text-anchor=\"middle\" fill=\"#222222\" transform=\"rotate(-90 18 {middle:.1})\">{}</text>",
        (LEFT + right) / 2.0,
        HEIGHT - 16.0,
        escaped(&chart.x),
        escaped(&chart.y)
    );
}

fn draw(page: &mut String, layer: &Layer, colour: &str, at: &dyn Fn(&Pair) -> Pair) {
    let places: Vec<Pair> = layer.points.iter().map(at).collect();
    if matches!(layer.shape, Shape::Line | Shape::Path) {
        let corners: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            page,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            corners.join(" ")
        );
    }
    if matches!(layer.shape, Shape::Dots | Shape::Path) {
        for (x, y) in &places {
            let _ = writeln!(page, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/>");
        }
    }
    if layer.shape == Shape::Bars {
        let width =
            places.windows(2).map(|pair| pair[1].0 - pair[0].0).fold(f64::INFINITY, f64::min).min(60.0);
        for (x, y) in &places {
            let height = HEIGHT - BOTTOM - y;
            let _ = writeln!(
                page,
                "<rect x=\"{:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>",
                x - width / 2.0 + 0.5,
                (width - 1.0).max(0.5)
            );
        }
    }
    if layer.labels.len() != places.len() {
        return;
    }
    // Words that would lie on each other are moved down.
    let mut taken: Vec<Pair> = Vec::new();
    for ((x, y), label) in places.iter().zip(&layer.labels) {
        let is_right = *x > WIDTH * 0.75;
        let mut line = y + 4.0;
        let width = 7.0 * label.chars().count() as f64 + 16.0;
        while taken.iter().any(|(tx, ty)| (tx - x).abs() < width && (ty - line).abs() < 13.0) {
            line += 13.0;
        }
        taken.push((*x, line));
        let (shift, anchor) = if is_right { (-8.0, "end") } else { (8.0, "start") };
        let _ = writeln!(
            page,
            "<text x=\"{:.1}\" y=\"{line:.1}\" text-anchor=\"{anchor}\" fill=\"#444444\">{}</text>",
            x + shift,
            escaped(label)
        );
    }
}

fn draw_legend(page: &mut String, chart: &Chart) {
    let named: Vec<_> = chart.layers.iter().enumerate().filter(|(_, layer)| !layer.name.is_empty()).collect();
    let mut x = LEFT;
    for (index, layer) in named {
        let colour = COLOURS[index % COLOURS.len()];
        let _ = writeln!(
            page,
            "<rect x=\"{x:.1}\" y=\"32\" width=\"10\" height=\"10\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"41\" fill=\"#444444\">{}</text>",
            x + 14.0,
            escaped(&layer.name)
        );
        x += 32.0 + 6.6 * layer.name.chars().count() as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::sample;
    use super::super::serve_report;
    use super::*;

    #[test]
    fn a_document_gives_the_charts_that_it_can() {
        let mut document = sample::document(1.0);
        let names = |document: &Document| charts(document).iter().map(|chart| chart.name).collect::<Vec<_>>();
        assert_eq!(names(&document), ["tokens", "roofline"]);
        document.points = serve_report::sample::points();
        assert_eq!(names(&document), ["throughput", "latency", "tokens", "roofline"]);
        document.cases.clear();
        document.points.clear();
        assert!(charts(&document).is_empty());
    }

    #[test]
    fn charts_are_whole_and_hold_no_number_that_is_none() {
        let mut document = sample::document(1.0);
        document.points = serve_report::sample::points();
        let folder = tempfile::tempdir().expect("tempdir");
        let names = write(&document, &folder.path().join("plots")).expect("written");
        assert_eq!(names.len(), 4);
        for name in names {
            let text = std::fs::read_to_string(&name).expect("a file");
            assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"), "{name}");
            assert!(!text.contains("NaN") && !text.contains("inf"), "{name}: {text}");
        }
        let page = svg(&roofline(&document).expect("a chart"));
        let count = |what: &str| page.matches(what).count();
        assert_eq!(
            (count("<polyline"), count("<circle")),
            (1, 2),
            "a roof and the cases with the most threads"
        );
        assert!(page.contains(">pp512 (threads 2)</text>") && page.contains("40.0 GB/s, 1000 GOP/s int8"));
    }

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!(ticks(0.0, 10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(
            ticks(3.0, 3.5),
            [3.0, 3.1, 3.2, 3.3, 3.4, 3.5].map(|tick: f64| (tick * 10.0).round() * 0.1)
        );
        assert_eq!(log_ticks(1.5, 30.0), [2.0, 5.0, 10.0, 20.0]);
        assert_eq!([number(12_000.0), number(1.5), number(0.02), number(0.0)], ["12k", "1.5", "0.02", "0"]);
    }

    #[test]
    fn words_cannot_leave_their_place() {
        assert_eq!(escaped("<a & \"b\">"), "&lt;a &amp; &quot;b&quot;&gt;");
    }
}
