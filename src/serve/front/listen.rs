//! Sockets: listening, accepting connections, draining.
//!
//! Owns the only async runtime, with few threads, because its tasks only translate between HTTP and the
//! engine. The caller's thread stays free to load a model and to wait for a signal.
//!
//! Invariants: the address is bound before the model is loaded, so that an address in use is an error at
//! once; when [`Server::drain`] returns, all sockets are closed.

use std::convert::Infallible;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, Request, Response, StatusCode, Uri, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use parking_lot::RwLock;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};

use super::lifecycle::{Lifecycle, Stage};
use super::router;
use crate::api::body::RequestArrival;
use crate::engines::FLUSH_TIMEOUT;
use crate::error::ApiError;
use crate::fleet;
use crate::fleet::Fleet;
use crate::net::connection::{
    ConnectionInfo, ConnectionLimits, Connections, Metered, OpenConnection, Overdue, Peer,
};
use crate::net::half_open::HalfOpen;
use crate::telemetry::observe::Observer;
use crate::{App, api};

/// Threads of the runtime; they only parse and frame, the engine has its own.
const WORKERS: usize = 2;

/// Most bytes of a request's head, and of read-ahead of a body.
const MAX_HEAD: usize = 64 << 10;

/// Connections that the system holds until they are taken; it may allow fewer. std asks for 128, and who comes to a full queue
/// tries again after a second.
const BACKLOG: i32 = 4096;

/// Pause before the next attempt if the system has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Refused connections that get a response at the same time; further ones are closed without one.
const REFUSALS_AT_ONCE: usize = 64;

/// Time limit for sending the response to a refused connection.
const LAST_WORD_TIME: Duration = Duration::from_secs(1);

/// Time limit for cancelled streams to end.
const CANCEL_TIME: Duration = Duration::from_secs(5);

/// A bound socket that accepts no connections yet.
#[derive(Debug)]
pub enum Listener {
    Tcp(std::net::TcpListener),
    /// The port that Ollama's clients look for.
    Ollama(std::net::TcpListener),
    #[cfg(unix)]
    Unix(unix::Socket),
}

impl Listener {
    /// Binds the first address of `host` that can be bound; port 0 lets the system choose.
    ///
    /// # Errors
    /// Those of the system.
    pub fn tcp(addresses: impl ToSocketAddrs) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind(addresses)?;
        SockRef::from(&listener).listen(BACKLOG)?;
        Ok(Listener::Tcp(listener))
    }

    /// As [`Self::tcp`], for Ollama's clients.
    ///
    /// # Errors
    /// Those of the system.
    pub fn ollama(addresses: impl ToSocketAddrs) -> io::Result<Self> {
        Self::tcp(addresses).map(|listener| match listener {
            Listener::Tcp(listener) => Listener::Ollama(listener),
            other => other,
        })
    }

    /// Binds a Unix socket that only its owner may use. Replaces one that a dead process left behind.
    ///
    /// # Errors
    /// `AddrInUse` if a process listens there; `AlreadyExists` if the path is not a socket; those of the system.
    #[cfg(unix)]
    pub fn unix(path: &std::path::Path) -> io::Result<Self> {
        unix::Socket::bind(path).map(Listener::Unix)
    }

    /// # Errors
    /// The system's.
    pub fn address(&self) -> io::Result<Address> {
        match self {
            Listener::Tcp(listener) | Listener::Ollama(listener) => listener.local_addr().map(Address::Tcp),
            #[cfg(unix)]
            Listener::Unix(socket) => Ok(Address::Unix(socket.path().to_owned())),
        }
    }
}

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    Tcp(SocketAddr),
    Unix(std::path::PathBuf),
}

impl Address {
    /// Returns the base URL for clients.
    pub fn base_url(&self) -> String {
        match self {
            Address::Tcp(address) => format!("http://{address}/v1"),
            Address::Unix(path) => format!("http://localhost/v1 over {}", path.display()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => write!(f, "http://{address}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(unix)]
mod unix {
    //! A Unix socket whose file is removed on drop.

    use std::fs;
    use std::io;
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::{Path, PathBuf};

    use socket2::SockRef;

    use super::BACKLOG;

    #[derive(Debug)]
    pub struct Socket {
        listener: Option<UnixListener>,
        path: PathBuf,
    }

    impl Socket {
        pub fn bind(path: &Path) -> io::Result<Self> {
            remove_stale(path)?;
            let listener = UnixListener::bind(path)?;
            SockRef::from(&listener).listen(BACKLOG)?;
            let socket = Self { listener: Some(listener), path: path.to_owned() };
            fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
            Ok(socket)
        }

        pub fn path(&self) -> &Path {
            &self.path
        }

        /// Takes the listener; `None` after the first call.
        pub fn take(&mut self) -> io::Result<UnixListener> {
            self.listener.take().ok_or_else(|| io::ErrorKind::NotConnected.into())
        }
    }

    impl Drop for Socket {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.path); // another process may have been quicker
        }
    }

    /// Removes the socket file of a process that was killed.
    fn remove_stale(path: &Path) -> io::Result<()> {
        let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(()) };
        if !metadata.file_type().is_socket() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is a file that is no socket"));
        }
        match UnixStream::connect(path) {
            Ok(_) => Err(io::ErrorKind::AddrInUse.into()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
            Err(error) => Err(error),
        }
    }
}

/// The phase of all connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Open,
    /// Requests under way continue; idle connections close. A new connection gets one response: 503, except for `/health`.
    Draining,
    Over,
}

/// A running server; dropping it stops it at once.
pub struct Server {
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
    shared: Arc<ServerState>,
    phase: watch::Sender<Phase>,
    /// One task for each listener.
    accepting: Vec<JoinHandle<()>>,
    address: Address,
}

struct ServerState {
    lifecycle: Lifecycle,
    /// The router for new requests.
    router: RwLock<Router>,
    connections: Arc<Connections>,
    /// Those that were opened while the server drains, which it does not wait for.
    late: Arc<Connections>,
    refusals: Arc<Semaphore>,
}

/// The result of draining a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drained {
    /// Requests that were still under way at the time limit.
    pub num_cancelled: usize,
}

impl Server {
    /// Starts to accept connections. Endpoints that need a model get 503 until [`Server::open`].
    ///
    /// # Errors
    /// Those of the system.
    pub fn start(listener: Listener, lifecycle: Lifecycle, limits: ConnectionLimits) -> io::Result<Self> {
        let address = listener.address()?;
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(WORKERS).thread_name("http").enable_all().build()?;
        let phase = watch::Sender::new(Phase::Open);
        let shared = Arc::new(ServerState {
            router: RwLock::new(router::router(&lifecycle, Router::new())),
            lifecycle,
            late: Connections::new(limits.clone()),
            connections: Connections::new(limits),
            refusals: Arc::new(Semaphore::new(REFUSALS_AT_ONCE)),
        });
        let mut server = Self { runtime: Some(runtime), shared, phase, accepting: Vec::new(), address };
        server.listen(listener)?;
        Ok(server)
    }

    /// Accepts connections of one more listener.
    ///
    /// # Errors
    /// Those of the system.
    pub fn listen(&mut self, listener: Listener) -> io::Result<()> {
        let Some(runtime) = &self.runtime else { return Ok(()) };
        let socket = {
            let _context = runtime.enter();
            Socket::new(listener)?
        };
        let accepting = accept(socket, Arc::clone(&self.shared), self.phase.subscribe());
        self.accepting.push(runtime.spawn(accepting));
        Ok(())
    }

    /// Serves the model from now on.
    pub fn open(&self, app: App) {
        let routes = api::routes_of(&app);
        self.open_with(app, routes);
    }

    /// Like `open`, with these endpoints instead of the model's, for tests.
    pub fn open_with(&self, app: App, api: Router<App>) {
        let api = api.with_state(app.clone());
        let router = router::router(&self.shared.lifecycle, api);
        *self.shared.router.write() = router;
        self.shared.lifecycle.open(app);
    }

    /// Serves several models from now on, and unloads those that have been idle for `keep_alive`, or as their requests ask.
    pub fn open_fleet(&self, fleet: Fleet, keep_alive: Option<Duration>) {
        let router = router::router(&self.shared.lifecycle, fleet::routes(fleet.clone()));
        *self.shared.router.write() = router;
        if let Some(runtime) = &self.runtime {
            runtime.spawn(fleet.clone().expire_idle(keep_alive.unwrap_or(Duration::MAX)));
        }
        self.shared.lifecycle.open_fleet(fleet);
    }

    pub fn address(&self) -> &Address {
        &self.address
    }

    pub fn lifecycle(&self) -> &Lifecycle {
        &self.shared.lifecycle
    }

    /// Refuses new requests and waits for those under way, at most `timeout`; then calls `cancel` and closes what is left. The
    /// address stays bound until then, so that `/ready` says why no request is taken.
    pub fn drain(mut self, timeout: Duration, cancel: impl FnOnce()) -> Drained {
        self.shared.lifecycle.drain();
        self.phase.send_replace(Phase::Draining);
        let Some(runtime) = &self.runtime else { return Drained { num_cancelled: 0 } };
        let accepting = std::mem::take(&mut self.accepting);
        let late = &self.shared.late;
        let connections = &self.shared.connections;
        let fleet = self.shared.lifecycle.fleet();
        runtime.block_on(async {
            let mut drained = Drained { num_cancelled: 0 };
            let is_late = tokio::time::timeout(timeout, connections.emptied()).await.is_err();
            // Requests that wait for a model have had their time, too.
            fleet.into_iter().for_each(Fleet::close);
            if is_late {
                drained.num_cancelled = connections.num_busy();
                // Before the engines are told, so that nothing comes to them afterwards.
                self.shared.lifecycle.apps().iter().for_each(App::cut_short);
                cancel();
                let _ = tokio::time::timeout(CANCEL_TIME, connections.emptied()).await;
                self.phase.send_replace(Phase::Over);
                let _ = tokio::time::timeout(LAST_WORD_TIME, connections.emptied()).await;
            }
            self.phase.send_replace(Phase::Over);
            for accepting in accepting {
                let _ = accepting.await; // a panic there has closed the listener as well
            }
            let _ = tokio::time::timeout(LAST_WORD_TIME, late.emptied()).await;
            // Turns of clients that have left are still to be saved.
            for app in self.shared.lifecycle.apps() {
                let _ = tokio::time::timeout(CANCEL_TIME, app.in_flight().write_owned()).await;
            }
            if let Some(fleet) = fleet {
                // The same time as the engines of loaded models get to save their KV.
                let _ = tokio::time::timeout(FLUSH_TIMEOUT, fleet.settled()).await;
            }
            drained
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.phase.send_replace(Phase::Over);
        if let Some(runtime) = self.runtime.take() {
            // Not without a limit: a blocking task may wait for an engine that does not answer.
            runtime.shutdown_timeout(LAST_WORD_TIME);
        }
    }
}

/// A listener on the runtime.
enum Socket {
    /// A port, and what is known of a client by its address.
    Tcp(tokio::net::TcpListener, fn(SocketAddr) -> Peer),
    #[cfg(unix)]
    Unix { listener: tokio::net::UnixListener, _path: unix::Socket },
}

impl Socket {
    fn new(listener: Listener) -> io::Result<Self> {
        match listener {
            Listener::Tcp(listener) => Self::tcp(listener, Peer::Tcp),
            Listener::Ollama(listener) => Self::tcp(listener, Peer::Ollama),
            #[cfg(unix)]
            Listener::Unix(mut socket) => {
                let listener = socket.take()?;
                listener.set_nonblocking(true)?;
                let listener = tokio::net::UnixListener::from_std(listener)?;
                Ok(Self::Unix { listener, _path: socket })
            }
        }
    }

    fn tcp(listener: std::net::TcpListener, peer: fn(SocketAddr) -> Peer) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self::Tcp(tokio::net::TcpListener::from_std(listener)?, peer))
    }

    /// Accepts one connection and spawns its task.
    async fn accept(&self, shared: &Arc<ServerState>, phases: &watch::Receiver<Phase>) -> io::Result<()> {
        match self {
            Self::Tcp(listener, kind) => {
                let (stream, peer) = listener.accept().await?;
                let _ = stream.set_nodelay(true); // tokens should not wait for each other
                shared.take(stream, kind(peer), phases);
            }
            #[cfg(unix)]
            Self::Unix { listener, .. } => {
                let (stream, _) = listener.accept().await?;
                shared.take(stream, Peer::Local, phases);
            }
        }
        Ok(())
    }
}

/// Runs until the last phase.
async fn accept(socket: Socket, shared: Arc<ServerState>, phases: watch::Receiver<Phase>) {
    let mut phase = phases.clone();
    let mut is_failing = false;
    loop {
        let accepted = tokio::select! {
            biased;
            _ = phase.wait_for(|phase| *phase == Phase::Over) => return,
            accepted = socket.accept(&shared, &phases) => accepted,
        };
        if let Err(error) = &accepted {
            if !is_failing {
                tracing::error!("no connection can be accepted: {error}");
            }
            sleep(ACCEPT_PAUSE).await;
        }
        is_failing = accepted.is_err();
    }
}

impl ServerState {
    fn take<S>(self: &Arc<Self>, stream: S, peer: Peer, phases: &watch::Receiver<Phase>)
    where
        S: AsyncRead + AsyncWrite + HalfOpen + Unpin + Send + 'static,
    {
        let http = &self.lifecycle.observer().metrics().http;
        let connections = match *phases.borrow() {
            Phase::Open => &self.connections,
            Phase::Draining | Phase::Over => &self.late,
        };
        match connections.enter(peer) {
            Ok((place, makes_room)) => {
                if makes_room {
                    http.closed("made_room");
                }
                tokio::spawn(Arc::clone(self).serve(stream, place, phases.clone()));
            }
            Err(_) => {
                http.closed("refused");
                self.refuse(stream);
            }
        }
    }

    fn refuse<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(&self, stream: S) {
        let Ok(permit) = Arc::clone(&self.refusals).try_acquire_owned() else { return };
        let message = "as many connections are in use as may";
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Some("too_many_connections"), message);
        let word = last_word(error.retry_after(self.lifecycle.retry_after()));
        tokio::spawn(async move {
            say(stream, &word).await;
            drop(permit);
        });
    }

    /// Serves one connection until it closes.
    async fn serve<S>(self: Arc<Self>, stream: S, place: OpenConnection, mut phases: watch::Receiver<Phase>)
    where
        S: AsyncRead + AsyncWrite + HalfOpen + Unpin + Send + 'static,
    {
        if *phases.borrow_and_update() == Phase::Over {
            return;
        }
        let _open = CountedConnection::new(&self.lifecycle);
        let info = place.info().clone();
        let service = {
            let (shared, info) = (Arc::clone(&self), info.clone());
            service_fn(move |request| answer(Arc::clone(&shared), info.clone(), request))
        };
        let stream = TokioIo::new(Metered::new(stream, info.clone()));
        let mut builder = http1::Builder::new();
        // The time limits are ours: hyper's knows no difference between idle and slow.
        builder.timer(TokioTimer::new()).header_read_timeout(None).max_buf_size(MAX_HEAD);
        let mut connection = builder.serve_connection(stream, service);
        let mut timer = pin!(sleep_until(Instant::now()));
        let mut is_ending = false;
        let overdue = loop {
            let moved = until_overdue(&mut connection, &info, timer.as_mut());
            let must_end = tokio::select! {
                biased;
                overdue = moved => match overdue {
                    Some(Overdue::Look) => {
                        if info.look() {
                            Pin::new(&mut connection).graceful_shutdown();
                        }
                        continue;
                    }
                    over => break over,
                },
                changed = phases.changed() => changed.is_err() || *phases.borrow() == Phase::Over,
                () = info.must_go(), if !is_ending => false,
            };
            is_ending = true;
            if must_end || !info.is_busy() {
                break None;
            }
            Pin::new(&mut connection).graceful_shutdown();
        };
        if let Some(overdue) = overdue {
            self.lifecycle.observer().metrics().http.closed(overdue.reason());
            if overdue == Overdue::Header {
                let message = "the head of the request did not arrive in time";
                let error = ApiError::new(StatusCode::REQUEST_TIMEOUT, Some("request_timeout"), message);
                say(connection.into_parts().io.into_inner(), &last_word(error)).await;
            }
        }
    }
}

/// Drives a connection until it ends or exceeds a time limit.
async fn until_overdue<C: Future + Unpin>(
    connection: &mut C,
    info: &ConnectionInfo,
    mut timer: Pin<&mut Sleep>,
) -> Option<Overdue> {
    poll_fn(|cx| {
        if Pin::new(&mut *connection).poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        // Only the connection's own progress changes its deadline, so it is enough to look after that.
        let Some((at, overdue)) = info.deadline() else { return Poll::Pending };
        if timer.deadline() != at {
            timer.as_mut().reset(at);
        }
        timer.as_mut().poll(cx).map(|()| Some(overdue))
    })
    .await
}

/// Passes a request to the current router.
async fn answer(
    shared: Arc<ServerState>,
    info: ConnectionInfo,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    request.extensions_mut().insert(info);
    request.extensions_mut().insert(RequestArrival(std::time::Instant::now()));
    if let Some(uri) = without_stray_slashes(request.uri()) {
        *request.uri_mut() = uri;
    }
    let router = shared.router.read().clone();
    let mut answered = TowerToHyperService::new(router).call(request).await;
    if let Ok(response) = &mut answered
        && shared.lifecycle.stage() == Stage::Draining
    {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    answered
}

/// The target as it was meant where a base URL and a path were joined with a slash too many: at the start or the end of the path.
fn without_stray_slashes(uri: &Uri) -> Option<Uri> {
    let path = uri.path();
    let meant = format!("/{}", path.trim_matches('/'));
    if meant == path {
        return None;
    }
    let target = uri.query().map_or(meant.clone(), |query| format!("{meant}?{query}"));
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(target.parse().ok()?);
    Uri::from_parts(parts).ok()
}

/// Returns an error as the bytes of a whole response, for connections that hyper does not serve.
fn last_word(error: ApiError) -> Vec<u8> {
    let body = error.body().to_string();
    let retry_after = error
        .retry_after
        .map_or_else(String::new, |wait| format!("retry-after: {}\r\n", wait.as_secs_f64().ceil() as u64));
    let head = format!(
        "HTTP/1.1 {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{retry_after}connection: close\r\n\r\n",
        error.status,
        body.len(),
    );
    (head + &body).into_bytes()
}

/// Writes the response and waits until the client has read it: closing with unread data would discard it.
async fn say<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, word: &[u8]) {
    let said = async {
        stream.write_all(word).await?;
        stream.shutdown().await?;
        let mut rest = [0; 1024];
        while stream.read(&mut rest).await? > 0 {}
        io::Result::Ok(())
    };
    let _ = timeout(LAST_WORD_TIME, said).await; // the client may be gone
}

/// Counts an open connection in the metrics until it is dropped.
struct CountedConnection(Observer);

impl CountedConnection {
    fn new(lifecycle: &Lifecycle) -> Self {
        let observer = lifecycle.observer().clone();
        observer.metrics().http.connections.inc();
        Self(observer)
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.0.metrics().http.connections.dec();
    }
}
