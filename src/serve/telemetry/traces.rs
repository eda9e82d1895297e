//! OpenTelemetry traces, sent as OTLP over HTTP (cargo feature `otel`).
//!
//! A request is a span of kind server with the HTTP conventions' attributes; each answer in it is a child
//! with those of the GenAI conventions (<https://github.com/open-telemetry/semantic-conventions-genai>, in
//! development in November 2026). The SDK reads the standard variables: OTEL_EXPORTER_OTLP_ENDPOINT, _HEADERS
//! and _PROTOCOL, OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_BSP_*.
//!
//! Invariants: no request waits for a collector: spans go out in batches from a thread of the SDK, and are
//! dropped when its queue is full; no span has the text of a prompt or an answer.

use std::io::Read;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use axum::extract::Request;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span, SpanContext, SpanKind, Status, TraceContextExt, Tracer, TracerProvider};
use opentelemetry::{Array, Context, KeyValue, StringValue};
use opentelemetry_http::{Bytes, HeaderExtractor, HttpClient, HttpError, Response};
use opentelemetry_otlp::{SpanExporter, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use serde_json::{Map, Value};

use super::metrics::FinishedTurn;
use super::spans::{RequestSpan, SpanSource, route_of};

/// Longest wait for one answer of a collector.
const LONGEST_EXPORT: Duration = Duration::from_secs(10);

/// Longest answer of a collector that is read, in bytes.
const MAX_ANSWER: u64 = 1 << 20;

/// Sends spans to a collector.
#[derive(Debug)]
pub struct Traces {
    provider: SdkTracerProvider,
}

impl Traces {
    /// Begins with the settings of the standard variables. `service` is the service's name if they have none.
    ///
    /// # Errors
    /// A variable has a value that the SDK cannot use.
    pub fn from_variables(service: Option<&'static str>) -> Result<Self, String> {
        let exporter = SpanExporter::builder().with_http().with_http_client(CollectorClient::new());
        let exporter = exporter.build().map_err(|error| error.to_string())?;
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let mut resource = Resource::builder().with_attribute(version);
        if let Some(name) = service {
            resource = resource.with_service_name(name);
        }
        let provider = SdkTracerProvider::builder()
            .with_resource(resource.build())
            .with_batch_exporter(exporter)
            .build();
        Ok(Self { provider })
    }
}

impl SpanSource for Traces {
    fn begin(&self, request: &Request) -> Box<dyn RequestSpan> {
        let tracer = self.provider.tracer("llmctl");
        let parent = TraceContextPropagator::new()
            .extract_with_context(&Context::new(), &HeaderExtractor(request.headers()));
        let (method, route) = (request.method().as_str().to_owned(), route_of(request).map(str::to_owned));
        let name = route.as_ref().map_or_else(|| method.clone(), |route| format!("{method} {route}"));
        let mut attributes = vec![
            KeyValue::new("http.request.method", method),
            KeyValue::new("url.path", request.uri().path().to_owned()),
        ];
        attributes.extend(route.clone().map(|route| KeyValue::new("http.route", route)));
        let builder = tracer.span_builder(name).with_kind(SpanKind::Server).with_attributes(attributes);
        let span = builder.start_with_context(&tracer, &parent);
        let context = span.span_context().clone();
        Box::new(OpenSpan { tracer, span, context, operation: operation_of(route.as_deref()) })
    }

    fn finish(&self, longest: Duration) -> Result<(), String> {
        self.provider.shutdown_with_timeout(longest).map_err(|error| error.to_string())
    }
}

/// Returns the conventions' name of what an endpoint does.
fn operation_of(route: Option<&str>) -> &'static str {
    match route {
        Some("/v1/completions" | "/infill") => "text_completion",
        _ => "chat",
    }
}

/// The span of a request under way.
struct OpenSpan {
    tracer: SdkTracer,
    span: opentelemetry_sdk::trace::Span,
    context: SpanContext,
    operation: &'static str,
}

impl RequestSpan for OpenSpan {
    fn turn(&self, record: &FinishedTurn) {
        let (now, timings) = (SystemTime::now(), &record.outcome.timings);
        let start = now.checked_sub(timings.total).unwrap_or(now);
        let parent = Context::new().with_remote_span_context(self.context.clone());
        let name = format!("{} {}", self.operation, record.model);
        let builder = self.tracer.span_builder(name).with_kind(SpanKind::Internal).with_start_time(start);
        let builder = builder.with_attributes(attributes_of(self.operation, record));
        let mut span = builder.start_with_context(&self.tracer, &parent);
        if record.started.is_some() {
            span.add_event_with_timestamp("llmctl.started", start + timings.queue, Vec::new());
        }
        if let Some(first) = timings.time_to_first_token {
            span.add_event_with_timestamp("llmctl.first_token", start + first, Vec::new());
        }
        span.end_with_timestamp(now);
    }

    fn end(&mut self, line: &Map<String, Value>) {
        let text = |name: &str| line.get(name).and_then(Value::as_str).map(str::to_owned);
        let named = [
            ("user_agent.original", text("user_agent")),
            ("llmctl.request_id", text("request_id")),
            ("gen_ai.request.model", text("model")),
            ("gen_ai.conversation.id", text("session")),
        ];
        let named = named.into_iter().filter_map(|(name, value)| Some(KeyValue::new(name, value?)));
        self.span.set_attributes(named);
        if let Some(peer) = text("peer").and_then(|peer| peer.parse::<SocketAddr>().ok()) {
            self.span.set_attribute(KeyValue::new("network.peer.address", peer.ip().to_string()));
            self.span.set_attribute(KeyValue::new("network.peer.port", i64::from(peer.port())));
        }
        let status = line.get("status").and_then(Value::as_i64).unwrap_or_default();
        self.span.set_attribute(KeyValue::new("http.response.status_code", status));
        if status >= 500 {
            self.span.set_attribute(KeyValue::new("error.type", status.to_string()));
            self.span.set_status(Status::error(""));
        }
    }
}

/// Returns the attributes of an answer.
fn attributes_of(operation: &'static str, record: &FinishedTurn) -> Vec<KeyValue> {
    let (usage, timings) = (&record.outcome.usage, &record.outcome.timings);
    let count =
        |name: &'static str, count: usize| KeyValue::new(name, i64::try_from(count).unwrap_or(i64::MAX));
    let seconds = |name: &'static str, time: Duration| KeyValue::new(name, time.as_secs_f64());
    let reason = StringValue::from(record.outcome.finish.reason());
    let mut attributes = vec![
        KeyValue::new("gen_ai.operation.name", operation),
        KeyValue::new("gen_ai.provider.name", "llmctl"),
        KeyValue::new("gen_ai.request.model", record.model.clone()),
        KeyValue::new("gen_ai.response.model", record.model.clone()),
        KeyValue::new(
            "gen_ai.response.finish_reasons",
            opentelemetry::Value::Array(Array::String(vec![reason])),
        ),
        count("gen_ai.usage.input_tokens", usage.prompt_tokens),
        count("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens),
        count("gen_ai.usage.output_tokens", usage.completion_tokens),
        seconds("llmctl.queue_seconds", timings.queue),
        seconds("llmctl.prefill_seconds", timings.prefill),
        seconds("llmctl.decode_seconds", timings.decode),
    ];
    attributes.extend(record.session.clone().map(|session| KeyValue::new("gen_ai.conversation.id", session)));
    let first = timings.time_to_first_token;
    attributes.extend(first.map(|first| seconds("gen_ai.response.time_to_first_chunk", first)));
    if let Some(started) = &record.started {
        attributes.push(count("gen_ai.request.max_tokens", started.max_tokens));
        attributes.push(KeyValue::new("llmctl.cache_reason", started.reuse.reason.name()));
    }
    attributes
}

/// The client of downloads, which blocks: the SDK calls it on a thread of its own.
#[derive(Debug)]
struct CollectorClient(ureq::Agent);

impl CollectorClient {
    fn new() -> Self {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(LONGEST_EXPORT))
            .build();
        Self(config.new_agent())
    }
}

#[async_trait::async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(
        &self,
        request: opentelemetry_http::Request<Bytes>,
    ) -> Result<Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let answer = self.0.run(ureq::http::Request::from_parts(parts, &body[..]))?;
        let (parts, body) = answer.into_parts();
        let mut bytes = Vec::new();
        body.into_reader().take(MAX_ANSWER).read_to_end(&mut bytes)?;
        Ok(Response::from_parts(parts, bytes.into()))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::thread;

    use serde_json::json;

    use super::*;
    use llmctl_engine::{Finish, Outcome, Timings, Usage};

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    /// A collector that takes one request; returns its path and its JSON.
    fn collector() -> (String, thread::JoinHandle<(String, Value)>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let serving = thread::spawn(move || {
            let (stream, _) = listener.accept().expect("a request");
            let mut lines = BufReader::new(&stream);
            let (mut first, mut length) = (String::new(), 0);
            lines.read_line(&mut first).expect("a line");
            loop {
                let mut line = String::new();
                lines.read_line(&mut line).expect("a header");
                let line = line.to_ascii_lowercase();
                if let Some(value) = line.strip_prefix("content-length:") {
                    length = value.trim().parse().expect("a length");
                }
                if line.trim().is_empty() {
                    break;
                }
            }
            let mut body = vec![0; length];
            lines.read_exact(&mut body).expect("a body");
            (&stream)
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
                .expect("an answer");
            (first, serde_json::from_slice(&body).expect("JSON"))
        });
        (url, serving)
    }

    fn traces_to(url: &str) -> Traces {
        use opentelemetry_otlp::{Protocol, WithExportConfig};
        let exporter = SpanExporter::builder().with_http().with_http_client(CollectorClient::new());
        let exporter = exporter.with_protocol(Protocol::HttpJson).with_endpoint(format!("{url}/v1/traces"));
        let exporter = exporter.build().expect("an exporter");
        Traces { provider: SdkTracerProvider::builder().with_batch_exporter(exporter).build() }
    }

    fn record() -> FinishedTurn {
        let ms = Duration::from_millis;
        let timings = Timings {
            encode: Duration::ZERO,
            queue: ms(5),
            prefill: ms(20),
            decode: ms(70),
            time_to_first_token: Some(ms(25)),
            total: ms(100),
        };
        let usage = Usage { prompt_tokens: 10, cached_tokens: 6, completion_tokens: 5, ..Usage::default() };
        FinishedTurn {
            model: "m".to_owned(),
            request_id: "r".to_owned(),
            session: Some("s".to_owned()),
            engine: 0,
            started: None,
            outcome: Outcome { finish: Finish::MaxTokens, usage, timings, seed: 1, adapters: Vec::new() },
            inter_token: Vec::new(),
        }
    }

    /// The value of a span's attribute.
    fn attribute<'a>(span: &'a Value, name: &str) -> &'a Value {
        let attributes = span["attributes"].as_array().expect("attributes");
        let found = attributes.iter().find(|attribute| attribute["key"] == name);
        &found.unwrap_or_else(|| panic!("{name} is missing: {span}"))["value"]
    }

    #[test]
    fn a_request_and_its_answer_reach_the_collector_below_the_clients_span() {
        let (url, collector) = collector();
        let traces = traces_to(&url);
        let request =
            Request::builder().method("POST").uri("/v1/chat/completions").header("traceparent", PARENT);
        let mut span = traces.begin(&request.body(axum::body::Body::empty()).expect("a request"));
        span.turn(&record());
        let line = json!({"status": 503, "peer": "127.0.0.1:1", "model": "m", "request_id": "r"});
        span.end(line.as_object().expect("an object"));
        drop(span);
        traces.finish(Duration::from_secs(20)).expect("it is sent");
        let (first, sent) = collector.join().expect("it was asked");
        assert!(first.starts_with("POST /v1/traces "), "{first}");
        let spans = sent["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().expect("spans");
        let named =
            |name: &str| spans.iter().find(|span| span["name"] == name).unwrap_or_else(|| panic!("{sent}"));
        let (outer, inner) = (named("POST"), named("chat m"));
        for span in [outer, inner] {
            assert_eq!(span["traceId"], "0af7651916cd43dd8448eb211c80319c");
        }
        assert_eq!(outer["parentSpanId"], "b7ad6b7169203331");
        assert_eq!(inner["parentSpanId"], outer["spanId"]);
        assert_eq!(attribute(outer, "http.response.status_code")["intValue"], json!("503"));
        assert_eq!(attribute(outer, "network.peer.address")["stringValue"], "127.0.0.1");
        assert_eq!(attribute(inner, "gen_ai.usage.input_tokens")["intValue"], json!("10"));
        assert_eq!(attribute(inner, "gen_ai.usage.cache_read.input_tokens")["intValue"], json!("6"));
        let reasons = &attribute(inner, "gen_ai.response.finish_reasons")["arrayValue"]["values"];
        assert_eq!(reasons[0]["stringValue"], "length");
        let time =
            |name: &str| inner[name].as_str().and_then(|time| time.parse::<u64>().ok()).expect("nanoseconds");
        assert_eq!(time("endTimeUnixNano") - time("startTimeUnixNano"), 100_000_000);
    }
}
