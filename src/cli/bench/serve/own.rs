//! llmctl's own server in this process, for `--self`: real sockets on loopback, closed at the end of the run.

use std::time::Duration;

use crate::cli::error::CommandError;
use crate::cli::flags::args::{EngineArgs, EngineOptions, ModelArgs, Sharing};
use crate::cli::model::load;
use crate::cli::terminal::Terminal;
use llmctl_base::GivenSampling;
use llmctl_engine::Speculation;
use llmctl_serve::engines::engine::EngineSlot;
use llmctl_serve::front::lifecycle::Lifecycle;
use llmctl_serve::front::listen::{Listener, Server};
use llmctl_serve::gate::policy::Policy;
use llmctl_serve::net::connection::ConnectionLimits;
use llmctl_serve::telemetry::observe::Observer;
use llmctl_serve::{App, ServeSettings};

/// Longest wait for open requests at the end of the run.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Most waiting requests: a benchmark measures their wait instead of refusing them.
const MAX_WAITING: usize = 4096;

/// A running server.
pub struct OwnServer {
    server: Server,
    app: App,
    has_chat_template: bool,
}

impl OwnServer {
    pub fn url(&self) -> String {
        self.server.address().to_string()
    }

    pub fn has_chat_template(&self) -> bool {
        self.has_chat_template
    }

    /// Stops it. Requests that an interrupted run has left are cancelled.
    pub fn stop(self) {
        let engine = self.app.engine().ok();
        self.server.drain(DRAIN_TIMEOUT, || {
            // Without an engine there is nothing to cancel.
            let _ = engine.as_ref().map(|engine| engine.cancel_all());
        });
    }
}

/// Loads the model and serves it on a free port of 127.0.0.1, `parallel` requests at a time.
///
/// # Errors
/// Those of loading; [`Kind::Io`] if no port or thread is available.
pub fn start(
    model: &ModelArgs,
    context: usize,
    parallel: usize,
    terminal: &Terminal,
) -> Result<OwnServer, CommandError> {
    let listener = Listener::tcp(("127.0.0.1", 0)).map_err(CommandError::io("listening on 127.0.0.1"))?;
    let lifecycle = Lifecycle::new(Policy::default(), Observer::default(), None);
    let server = Server::start(listener, lifecycle, ConnectionLimits::default())
        .map_err(CommandError::io("starting the server"))?;
    let most =
        llmctl_models::load::model_facts(&load::resolve(model, terminal)?.source)?.decoder?.context_length;
    let model = ModelArgs { ctx: Some(context.min(most)), ..model.clone() };
    let sharing = Sharing {
        max_running: parallel,
        max_waiting: MAX_WAITING,
        max_sessions: parallel,
        session_ttl: None,
    };
    let asked = EngineOptions {
        packed_disk: Some(0), // nothing is written while times are taken
        speculation: Speculation::Off,
        sharing,
        ..EngineArgs::default().resolve(false)
    };
    let (texts, engine) = load::load(&model, asked, terminal)?.into_parts();
    let has_chat_template = texts.info().has_chat_template;
    let model = texts.into_served(None, GivenSampling::default());
    let observer = server.lifecycle().observer().clone();
    let app = App::new(model, EngineSlot::new(engine), None, observer, ServeSettings::default());
    server.open(app.clone());
    Ok(OwnServer { server, app, has_chat_template })
}
