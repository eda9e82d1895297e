//! The tracer of a server, if the standard variables of OpenTelemetry name a collector.

use crate::cli::error::CommandError;
use crate::cli::terminal::Terminal;
use llmctl_serve::telemetry::spans::SpanSource;

/// Variables that name a collector.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// Values of variables that this program honours; the SDK takes others for its default.
#[cfg(feature = "otel")]
const KNOWN_VALUES: [(&str, &[&str]); 4] = [
    ("OTEL_TRACES_EXPORTER", &["otlp"]),
    ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", &["http/protobuf", "http/json"]),
    ("OTEL_EXPORTER_OTLP_PROTOCOL", &["http/protobuf", "http/json"]),
    (
        "OTEL_TRACES_SAMPLER",
        &[
            "always_on",
            "traceidratio",
            "parentbased_always_on",
            "parentbased_always_off",
            "parentbased_traceidratio",
        ],
    ),
];

/// Returns the variable that names a collector, unless another one turns traces off.
fn named_collector(variable: impl Fn(&str) -> String) -> Option<&'static str> {
    let is_off = variable("OTEL_SDK_DISABLED").eq_ignore_ascii_case("true")
        || variable("OTEL_TRACES_EXPORTER") == "none"
        || variable("OTEL_TRACES_SAMPLER") == "always_off";
    ENDPOINTS.into_iter().find(|name| !is_off && !variable(name).is_empty())
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

/// Returns true if the variables name the service.
#[cfg(feature = "otel")]
fn names_service() -> bool {
    let attributes = variable("OTEL_RESOURCE_ATTRIBUTES");
    !variable("OTEL_SERVICE_NAME").is_empty()
        || attributes.split(',').any(|attribute| attribute.trim().starts_with("service.name="))
}

/// Begins to send spans; `None` without a collector.
///
/// # Errors
/// A variable has a value that cannot be honoured.
#[cfg(feature = "otel")]
pub fn begin(terminal: &Terminal) -> Result<Option<Box<dyn SpanSource>>, CommandError> {
    use crate::cli::error::Kind;
    use llmctl_serve::telemetry::traces::Traces;

    let Some(named) = named_collector(variable) else { return Ok(None) };
    let wrong = |message: String| Kind::Config.error(message);
    for (name, known) in KNOWN_VALUES {
        let value = variable(name);
        if !value.is_empty() && !known.contains(&value.as_str()) {
            return Err(wrong(format!("{name}: unknown value {value:?} ({})", known.join(", "))));
        }
    }
    let traces = Traces::from_variables((!names_service()).then_some("llmctl"))
        .map_err(|error| wrong(format!("{named}: {error}")))?;
    terminal.note(format!("spans of requests are sent to the collector that {named} names"));
    Ok(Some(Box::new(traces)))
}

/// Says that this build sends no spans, where a collector is named.
///
/// # Errors
/// None.
#[cfg(not(feature = "otel"))]
pub fn begin(terminal: &Terminal) -> Result<Option<Box<dyn SpanSource>>, CommandError> {
    if let Some(named) = named_collector(variable) {
        terminal
            .note(format!("{named} is set, but this llmctl was built without traces (cargo feature otel)"));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_is_named_unless_traces_are_off() {
        let check = |set: &[(&str, &str)], expected: Option<&str>| {
            let variable = |name: &str| {
                set.iter()
                    .find(|(set, _)| *set == name)
                    .map_or_else(String::new, |(_, value)| (*value).to_owned())
            };
            assert_eq!(named_collector(variable), expected, "{set:?}");
        };
        let (all, own) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
        check(&[], None);
        check(&[(all, "")], None);
        check(&[(all, "http://collector:4318")], Some(all));
        check(&[(all, "http://a"), (own, "http://b")], Some(own));
        for off in [
            ("OTEL_SDK_DISABLED", "TRUE"),
            ("OTEL_TRACES_EXPORTER", "none"),
            ("OTEL_TRACES_SAMPLER", "always_off"),
        ] {
            check(&[(all, "http://a"), off], None);
        }
    }
}
