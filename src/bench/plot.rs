//! Charts of a bench document as SVG files.
//!
//! [`charts`] selects the charts that a document has data for; [`svg`] draws one with plotters. Only
//! [`write`] touches files.

use std::path::Path;

use plotters::coord::Shift;
use plotters::coord::ranged1d::ValueFormatter;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::cost::CaseStep;
use super::figures::Labels;
use super::point::{Latency, Loop, Point};
use super::record::Document;
use super::stats;
use crate::error::BenchError;
use llmctl_base::private_files::replace_file;

/// Size of a chart, in pixels.
const WIDTH: u32 = 720;
const HEIGHT: u32 = 440;

/// Colours that people with colour blindness can tell apart (Okabe and Ito 2008).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
];

const FONT: (&str, u32) = ("sans-serif", 14);
const TITLE_FONT: (&str, u32) = ("sans-serif", 18);

type DrawError = DrawingAreaErrorKind<std::io::Error>;

/// A chart before it is drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// Name of the file, without `.svg`.
    pub name: &'static str,
    pub title: String,
    pub x: String,
    pub y: String,
    /// Both axes logarithmic.
    pub is_log: bool,
    pub series: Vec<ChartSeries>,
}

/// One series of a chart.
#[derive(Debug, Clone, PartialEq)]
pub struct ChartSeries {
    pub name: String,
    pub mark: Mark,
    pub points: Vec<(f64, f64)>,
    /// Text beside each point; empty for none.
    pub labels: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    Line,
    Dots,
    /// A line with dots.
    Path,
    /// Bars from the axis up, equally wide.
    Bars,
}

impl ChartSeries {
    fn new(name: impl Into<String>, mark: Mark, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.into(), mark, points, labels: Vec::new() }
    }
}

/// Writes all charts into a folder, which is created if it is missing. Returns the names of the files.
///
/// # Errors
/// [`BenchError::Write`].
pub fn write(document: &Document, folder: &Path) -> Result<Vec<String>, BenchError> {
    let failed = |path: &Path, error| BenchError::Write { place: path.display().to_string(), error };
    std::fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
    let mut names = Vec::new();
    for chart in charts(document) {
        let path = folder.join(format!("{}.svg", chart.name));
        let page = svg(&chart).map_err(|error| BenchError::Drawing(error.to_string()))?;
        replace_file(&path, page.as_bytes()).map_err(|error| failed(&path, error))?;
        names.push(path.display().to_string());
    }
    Ok(names)
}

/// Returns the charts that the document has data for.
pub fn charts(document: &Document) -> Vec<Chart> {
    let charts = [throughput(document), latency(document), tokens(document), roofline(document)];
    charts.into_iter().flatten().collect()
}

/// Returns the chart of a server's output rate against the time to the first token, one line for each kind of load.
fn throughput(document: &Document) -> Option<Chart> {
    let path = |name: &str, is_closed: bool, latency: fn(&Latency) -> f64| {
        let of_kind = |point: &&Point| matches!(point.kind, Loop::Closed { .. }) == is_closed;
        let points = document.points.iter().filter(of_kind);
        let found: Vec<_> = points
            .filter_map(|point| {
                Some((point.output_tokens_per_second, latency(&point.ttft_ms?), point.name.clone()))
            })
            .collect();
        let mut series = ChartSeries::new(name, Mark::Path, found.iter().map(|(x, y, _)| (*x, *y)).collect());
        series.labels = found.into_iter().map(|(_, _, name)| name).collect();
        series
    };
    let mut series = Vec::new();
    for (is_closed, kind) in [(true, "users"), (false, "arrivals")] {
        let mut median = path(&format!("median, {kind}"), is_closed, |latency| latency.p50);
        median.labels.clear(); // the same words as above it
        let tail = path(&format!("99th percentile, {kind}"), is_closed, |latency| latency.p99);
        series.extend([median, tail].into_iter().filter(|series| !series.points.is_empty()));
    }
    (document.points.len() > 1 && !series.is_empty()).then(|| Chart {
        name: "throughput",
        title: "Throughput and time to the first token".to_owned(),
        x: "output tokens per second".to_owned(),
        y: "time to first token, ms".to_owned(),
        is_log: false,
        series,
    })
}

/// Returns the histogram of the times between tokens.
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
        series: vec![ChartSeries::new("", Mark::Bars, bars)],
    })
}

/// Returns the chart of the tokens so far over time, for each point, and for the last repetition of each case.
fn tokens(document: &Document) -> Option<Chart> {
    let mut series = Vec::new();
    for point in &document.points {
        let mut times: Vec<f64> = Vec::new();
        for turn in point.turns.iter().filter(|turn| turn.is_ok()) {
            let Some(first) = turn.first_ms else { continue };
            times.extend(instants(turn.at_s + first / 1000.0, &turn.gaps_ms));
        }
        series.push(ChartSeries::new(point.name.clone(), Mark::Line, counted(times)));
    }
    let labels = Labels::of(&document.cases);
    for result in document.cases.iter().filter(|result| result.n_gen > 1 && result.n_sequences == 1) {
        let Some(sample) = result.samples.last() else { continue };
        let first = sample.first_token_ms.unwrap_or(0.0) / 1000.0;
        let times = instants(first, &sample.token_ms).collect();
        series.push(ChartSeries::new(labels.label(result), Mark::Line, counted(times)));
    }
    series.truncate(COLOURS.len());
    (!series.is_empty()).then(|| Chart {
        name: "tokens",
        title: "Tokens over time".to_owned(),
        x: "seconds".to_owned(),
        y: "tokens so far".to_owned(),
        is_log: false,
        series,
    })
}

/// Returns the seconds of the first token and of those that follow after so many milliseconds each.
fn instants(first: f64, gaps_ms: &[f64]) -> impl Iterator<Item = f64> {
    let later = gaps_ms.iter().scan(first, |now, gap| {
        *now += gap / 1000.0;
        Some(*now)
    });
    std::iter::once(first).chain(later)
}

/// Returns pairs of a time and the count until then, at most a few hundred of them.
fn counted(mut times: Vec<f64>) -> Vec<(f64, f64)> {
    const MOST: usize = 300;
    times.sort_by(f64::total_cmp);
    let step = times.len().div_ceil(MOST).max(1);
    let last = times.len().saturating_sub(1);
    let kept = times.iter().enumerate().filter(|(index, _)| index % step == 0 || *index == last);
    kept.map(|(index, &time)| (time, (index + 1) as f64)).collect()
}

/// Returns the roofline: operations per second against operations per byte, for the cases with the most threads.
fn roofline(document: &Document) -> Option<Chart> {
    let probe = document.machine.probes.iter().max_by_key(|probe| probe.threads)?;
    let labels = Labels::of(&document.cases);
    let mut dots = ChartSeries::new("measured", Mark::Dots, Vec::new());
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
    // A probe beside other work finds less than the machine can do: what was measured can be done.
    let roof = |x: f64| (x * probe.read_gb_s).min(peak);
    let raise = dots.points.iter().map(|&(x, rate)| rate / roof(x)).fold(1.0, f64::max);
    let (read_gb_s, peak) = (probe.read_gb_s * raise, peak * raise);
    let ridge = peak / read_gb_s;
    let xs = || dots.points.iter().map(|point| point.0);
    let from = xs().fold(ridge, f64::min) / 2.0;
    let to = xs().fold(ridge, f64::max) * 3.0;
    let roof = vec![(from, from * read_gb_s), (ridge, peak), (to, peak)];
    let kind = if is_integer { "int8" } else { "f32" };
    let raised = if raise > 1.0 { ", raised to what was measured" } else { "" };
    let name = format!("limit: {read_gb_s:.1} GB/s, {peak:.0} GOP/s {kind}{raised}");
    Some(Chart {
        name: "roofline",
        title: format!("Roofline with {} threads", probe.threads),
        x: "operations per byte read".to_owned(),
        y: "10⁹ operations per second".to_owned(),
        is_log: true,
        series: vec![ChartSeries::new(name, Mark::Line, roof), dots],
    })
}

/// Draws the chart as an SVG page.
///
/// # Errors
/// Those of the drawing backend.
pub fn svg(chart: &Chart) -> Result<String, DrawError> {
    let mut page = String::new();
    {
        let area = SVGBackend::with_string(&mut page, (WIDTH, HEIGHT)).into_drawing_area();
        area.fill(&WHITE)?;
        draw_chart(&area, chart)?;
        area.present()?;
    }
    Ok(page)
}

/// Draws the frame of the chart, and then its series.
fn draw_chart<'a>(area: &DrawingArea<SVGBackend<'a>, Shift>, chart: &Chart) -> Result<(), DrawError> {
    let bars = chart.series.iter().filter(|series| series.mark == Mark::Bars);
    let half = bars.map(|series| bar_width(&series.points) / 2.0).fold(0.0, f64::max);
    let points = || chart.series.iter().flat_map(|series| &series.points);
    let edges = points().flat_map(|point| [point.0 - half, point.0 + half]);
    let x = bounds(edges, chart.is_log, half == 0.0);
    let y = bounds(points().map(|point| point.1), chart.is_log, true);
    let mut builder = ChartBuilder::on(area);
    builder.margin(12).caption(&chart.title, TITLE_FONT).x_label_area_size(44).y_label_area_size(64);
    match chart.is_log {
        true => {
            draw_series(builder.build_cartesian_2d((x.0..x.1).log_scale(), (y.0..y.1).log_scale())?, chart)
        }
        false => draw_series(builder.build_cartesian_2d(x.0..x.1, y.0..y.1)?, chart),
    }
}

/// Returns the range of an axis, a little wider than its values.
fn bounds(values: impl Iterator<Item = f64> + Clone, is_log: bool, from_zero: bool) -> (f64, f64) {
    let low = values.clone().fold(f64::INFINITY, f64::min);
    let high = values.fold(f64::NEG_INFINITY, f64::max);
    if is_log {
        return (low.max(1e-9) / 1.3, high.max(1e-9) * 1.5);
    }
    let low = if from_zero { low.min(0.0) } else { low };
    (low, if high > low { high + (high - low) * 0.05 } else { low + 1.0 })
}

/// A chart with its two axes.
type AxesContext<'a, 'b, X, Y> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<X, Y>>;

/// Draws the axes, the series and the legend.
fn draw_series<'a, X, Y>(mut context: AxesContext<'a, 'a, X, Y>, chart: &Chart) -> Result<(), DrawError>
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let label = |value: &f64| number(*value);
    let mut mesh = context.configure_mesh();
    mesh.x_desc(&chart.x).y_desc(&chart.y).label_style(FONT).axis_desc_style(FONT);
    mesh.x_label_formatter(&label).y_label_formatter(&label).light_line_style(TRANSPARENT).draw()?;
    for (series, colour) in chart.series.iter().zip(COLOURS.iter().cycle()) {
        let (points, style) = (series.points.iter().copied(), colour.filled());
        let drawn = match series.mark {
            Mark::Line => context.draw_series(LineSeries::new(points, colour.stroke_width(2)))?,
            Mark::Path => {
                context.draw_series(LineSeries::new(points, colour.stroke_width(2)).point_size(4))?
            }
            Mark::Dots => context.draw_series(points.map(|point| Circle::new(point, 4, style)))?,
            Mark::Bars => {
                let half = bar_width(&series.points) * 0.45;
                context.draw_series(
                    points.map(|(x, y)| Rectangle::new([(x - half, 0.0), (x + half, y)], style)),
                )?
            }
        };
        if !series.name.is_empty() {
            drawn
                .label(&series.name)
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 10, y + 5)], style));
        }
        draw_labels(&context, series)?;
    }
    let mut legend = context.configure_series_labels();
    legend.position(SeriesLabelPosition::UpperLeft).label_font(FONT).background_style(WHITE.mix(0.8)).draw()
}

/// Returns the distance between two bars.
fn bar_width(points: &[(f64, f64)]) -> f64 {
    points.windows(2).map(|pair| pair[1].0 - pair[0].0).fold(f64::INFINITY, f64::min)
}

/// Writes the labels beside the points, each moved down until it overlaps no other.
fn draw_labels<X, Y>(context: &AxesContext<'_, '_, X, Y>, series: &ChartSeries) -> Result<(), DrawError>
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    let page = context.plotting_area().strip_coord_spec();
    let (left, top) = page.get_base_pixel();
    let mut taken: Vec<(i32, i32, i32)> = Vec::new();
    for (point, label) in series.points.iter().zip(&series.labels) {
        let (x, mut y) = context.backend_coord(point);
        let width = 7 * label.chars().count() as i32 + 16;
        let overlaps = |y: i32| {
            taken.iter().any(|&(tx, ty, other)| (tx - x).abs() < width.max(other) && (ty - y).abs() < 13)
        };
        while overlaps(y) {
            y += 13;
        }
        taken.push((x, y, width));
        let (shift, side) = if x > WIDTH as i32 * 3 / 4 { (-8, HPos::Right) } else { (8, HPos::Left) };
        let style = TextStyle::from(FONT.into_font()).pos(Pos::new(side, VPos::Center));
        page.draw(&Text::new(label.as_str(), (x + shift - left, y - top), style))?;
    }
    Ok(())
}

/// Formats a tick, with `k` for thousands.
fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if size >= 10_000.0 => format!("{:.0}k", value / 1000.0),
        size if size >= 1.0 => format!("{}", (value * 100.0).round() / 100.0),
        _ => format!("{}", (value * 10_000.0).round() / 10_000.0),
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
        let page = svg(&roofline(&document).expect("a chart")).expect("drawn");
        let count = |what: &str| page.matches(what).count();
        assert_eq!(
            (count("stroke=\"#0072B2\""), count("<circle")),
            (1, 2),
            "a roof, and the cases with the most threads"
        );
        assert!(!page.contains("raised"), "no case is above what the probe found");
        document.cases.iter_mut().for_each(|result| result.summary.median *= 1e3);
        let [roof, dots] = &roofline(&document).expect("a chart").series[..] else { panic!("two series") };
        let highest = dots.points.iter().map(|point| point.1).fold(0.0, f64::max);
        assert!(
            roof.name.ends_with("raised to what was measured") && roof.points[2].1 >= highest,
            "{roof:?}"
        );
        assert!(page.contains("pp512 (threads 2)\n</text>") && page.contains("40.0 GB/s, 1000 GOP/s int8"));
    }

    #[test]
    fn ticks_are_short() {
        assert_eq!([number(12_000.0), number(1.5), number(0.02), number(0.0)], ["12k", "1.5", "0.02", "0"]);
    }

    #[test]
    fn labels_are_escaped() {
        let mut chart = roofline(&sample::document(1.0)).expect("a chart");
        chart.series[1].labels[0] = "<a & b>".to_owned();
        let page = svg(&chart).expect("drawn");
        assert!(page.contains("&lt;a &amp; b&gt;") && !page.contains("<a &"), "{page}");
    }
}
