//! A server around a toy engine, with endpoints that do what a test needs.

use std::convert::Infallible;
use std::sync::mpsc::{self, Receiver};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Json, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use llmctl_models::load::load_texts;
use llmctl_serve::engines::Engines;
use llmctl_serve::error::ApiError;
use llmctl_serve::front::lifecycle::Lifecycle;
use llmctl_serve::front::listen::{Address, Listener, Server};
use llmctl_serve::gate::policy::Policy;
use llmctl_serve::gate::request_id::HttpRequestId;
use llmctl_serve::net::connection::ConnectionLimits;
use llmctl_serve::telemetry::access_log::AccessLog;
use llmctl_serve::telemetry::metrics::FinishedTurn;
use llmctl_serve::telemetry::observe::Observer;
use llmctl_serve::{App, ServedModel};
use tokio::sync::mpsc::unbounded_channel;

use crate::common::prelude::*;

/// A server on a port of its own.
pub struct Site {
    pub server: Server,
    pub app: App,
}

/// Settings of a test server that differ from the defaults.
#[derive(Default)]
pub struct Options {
    pub policy: Policy,
    pub limits: ConnectionLimits,
    pub log: Option<AccessLog>,
}

impl Site {
    pub fn new(options: Options) -> Self {
        Self::with(options, EngineSlot::new(counting_engine()))
    }

    pub fn with(options: Options, engine: EngineSlot) -> Self {
        let server = loading(options);
        let app = app(engine, server.lifecycle().observer().clone());
        server.open_with(app.clone(), routes());
        Self { server, app }
    }

    pub fn address(&self) -> SocketAddr {
        address(&self.server)
    }

    /// Returns the value of one sample of `/metrics`, named with its labels.
    pub fn metric(&self, name: &str) -> f64 {
        metric(&super::client::get(self.address(), "/metrics").body, name)
    }
}

/// A sample's value; 0 where it is not there, as a counter of nothing is.
pub fn metric(text: &str, name: &str) -> f64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.map_or(0.0, |value| value.parse().expect("a number"))
}

pub fn address(server: &Server) -> SocketAddr {
    match server.address() {
        Address::Tcp(address) => *address,
        Address::Unix(path) => panic!("{} is no port", path.display()),
    }
}

/// A server without a model yet.
pub fn loading(options: Options) -> Server {
    let listener = Listener::tcp("127.0.0.1:0").expect("a port");
    let lifecycle = Lifecycle::new(options.policy, Observer::default(), options.log);
    Server::start(listener, lifecycle, options.limits).expect("a server")
}

pub fn app(engine: EngineSlot, observer: Observer) -> App {
    app_with(engine.into(), observer, ServeSettings::default())
}

pub fn app_with(engines: Engines, observer: Observer, settings: ServeSettings) -> App {
    let files = ModelFiles::open(&ModelSource::Folder(parity_folder().join("llama"))).expect("a model");
    let fingerprint =
        ModelFingerprint { name: "toy".to_owned(), fingerprint: "toy".to_owned(), reference: None };
    let model = ServedModel {
        id: "toy".to_owned(),
        created: 1,
        chat_tokenizer: ChatTokenizer::new(load_texts(&files).expect("texts"), None),
        fingerprint,
        defaults: GivenSampling::GREEDY,
        facts: None,
    };
    App::new(model, engines, None, observer, settings)
}

pub fn counting_engine() -> EngineClient {
    EngineClient::spawn(|| Ok(Setup::default().engine(counting(64)))).expect("an engine")
}

/// Longest wait for a permit. A test that fails drops its server, which waits for the engine's step, before its gate.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(90);

/// Counts, a token for each permit; when the gate is dropped all pass.
pub fn gated_engine() -> (EngineClient, mpsc::Sender<()>) {
    let (gate, permits) = mpsc::channel::<()>();
    let permits: Arc<Mutex<Receiver<()>>> = Arc::new(Mutex::new(permits));
    let mut count = counting(64);
    let rule = move |history: &[u32]| {
        let _ = permits.lock().expect("one engine").recv_timeout(PERMIT_TIMEOUT); // fails at once when the gate is open
        count(history)
    };
    let build = move || {
        Ok(Setup::default().engine_with(ToyModel::new(64, Box::new(rule)), ToyVocabulary::numbers(64)).0)
    };
    (EngineClient::spawn(build).expect("an engine"), gate)
}

fn routes() -> Router<App> {
    Router::new()
        .route("/echo", post(|body: Bytes| async move { body.len().to_string() }))
        .route("/json", post(|Json(value): Json<Value>| async move { Json(value) }))
        .route("/id", get(|id: HttpRequestId| async move { id.0 }))
        .route("/item/{id}", delete(|| async { "gone" }))
        .route("/panic", get(panic_at_once))
        .route("/panic-later", get(panic_later))
        .route("/endless", get(endless))
        .route("/silent", get(std::future::pending::<()>))
        .route("/busy", get(|| async { ApiError::from(Error::QueueFull { waiting: 3 }) }))
        .route("/turn", post(turn))
}

async fn panic_at_once() -> &'static str {
    panic!("a handler's bug")
}

async fn panic_later() -> Response {
    let first = futures_util::stream::once(async { Ok::<_, Infallible>("begun ") });
    let rest = futures_util::stream::once(async {
        tokio::task::yield_now().await; // what was said before is on its way
        panic!("a stream's bug")
    });
    Body::from_stream(futures_util::StreamExt::chain(first, rest)).into_response()
}

/// As much as the client takes.
async fn endless() -> Response {
    Body::from_stream(futures_util::stream::repeat(Ok::<_, Infallible>(Bytes::from_static(&[b'x'; 65536]))))
        .into_response()
}

/// Counts on from the number in the body, a chunk per number; ends with `done` and why, or `failed` and why.
async fn turn(State(app): State<App>, id: HttpRequestId, body: String) -> Result<Response, ApiError> {
    let words: Vec<&str> = body.split(' ').collect();
    let first = words[0].parse().map_err(|_| ApiError::invalid("body", "not a number"))?;
    let request = Request { session: words.get(1).map(|name| named(name)), ..limited(&[first], 200) };
    let session = request.session.clone();
    let engine = app.engine()?;
    let (events, mut inbox) = unbounded_channel();
    let sink = move |event| match events.send(event) {
        Ok(()) => std::ops::ControlFlow::Continue(()),
        Err(_) => std::ops::ControlFlow::Break(()),
    };
    engine.submit_to(request, Box::new(sink))?;
    let mut started = None;
    let mut is_over = false;
    let stream = futures_util::stream::poll_fn(move |cx| {
        loop {
            if is_over {
                return std::task::Poll::Ready(None);
            }
            let event = std::task::ready!(inbox.poll_recv(cx));
            is_over = matches!(event, None | Some(Event::Done(_) | Event::Failed(_)));
            let said = match event {
                Some(Event::Text { text, .. }) => text,
                Some(Event::Started(begun)) => {
                    started = Some(begun);
                    continue;
                }
                Some(Event::Done(outcome)) => {
                    let said = format!("done {}", outcome.finish.reason());
                    let (request_id, started) = (id.0.clone(), started.take());
                    let inter_token = vec![Duration::from_millis(1)];
                    app.observer().turn(&FinishedTurn {
                        model: app.model().id.clone(),
                        request_id,
                        session: session.as_ref().map(ToString::to_string),
                        engine: 0,
                        started,
                        outcome,
                        inter_token,
                    });
                    said
                }
                Some(Event::Failed(error)) => format!("failed {error}"),
                None => {
                    app.engine_lost(&engine);
                    "failed: the engine is gone".to_owned()
                }
                Some(_) => continue,
            };
            return std::task::Poll::Ready(Some(Ok::<_, Infallible>(said)));
        }
    });
    Ok(Body::from_stream(stream).into_response())
}

/// Waits for what happens elsewhere, with a limit that no working machine reaches.
#[track_caller]
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..6000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("not within a minute: {what}");
}
