//! The engine's loss and return, and the server's end.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::mpsc;

use llmctl_models::text::Vocabulary;
use llmctl_serve::engines::Engines;
use llmctl_serve::engines::engine::Recovery;

use super::app::{Options, Site, app, counting_engine, eventually, gated_engine, loading, metric};
use super::client::{ask, connect, get};
use crate::common::prelude::*;

/// The text of this token ends the engine's thread: a bug outside of what a step guards.
const FATAL: u32 = 40;

struct Fragile;

impl Vocabulary for Fragile {
    fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>> {
        assert_ne!(id, FATAL, "a bug of the engine");
        Some(Cow::Owned(format!("{id} ").into_bytes()))
    }

    fn is_special(&self, _: u32) -> bool {
        false
    }
}

/// An engine that is lost when it comes to [`FATAL`], and keeps KV below `root`.
fn fragile_engine(root: &Path) -> EngineClient {
    let config = DiskConfig {
        root: root.to_owned(),
        limit_bytes: u64::MAX,
        fingerprint: "toy".to_owned(),
        description: json!({}),
        queue_bytes: DEFAULT_QUEUE_BYTES,
        vault: None,
    };
    let build = move || {
        let setup = Setup { end_of_generation: vec![30, 63], ..Setup::default() };
        let model = Box::new(ToyModel::new(64, counting(64)));
        let mut engine = Engine::new(model, Arc::new(Fragile), setup.config())?;
        engine.set_disk(DiskStore::open(config)?);
        Ok(engine)
    };
    EngineClient::spawn(build).expect("an engine")
}

fn recovery(rebuild: impl FnMut() -> Result<EngineClient, String> + Send + 'static) -> Recovery {
    Recovery {
        name: "the engine".to_owned(),
        rebuild: Box::new(rebuild),
        build_time: Duration::from_secs(7),
        pause: Duration::from_millis(1),
        longest_pause: Duration::from_secs(60),
        max_attempts: 3,
        gave_up: Box::new(|_| {}),
    }
}

const TURN: &str = "POST /turn HTTP/1.1\r\nHost: localhost";

#[test]
fn a_lost_engine_comes_back_and_finds_its_sessions_on_disk() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().to_owned();
    let (allow, allowed) = mpsc::channel::<()>();
    let rebuild = {
        let root = root.clone();
        move || {
            allowed.recv().map_err(|_| "the test is over".to_owned())?;
            Ok(fragile_engine(&root))
        }
    };
    let slot = EngineSlot::with_recovery(fragile_engine(&root), recovery(rebuild)).expect("a thread");
    let site = Site::with(Options::default(), slot);
    let at = site.address();
    let engine = site.app.engine().expect("up");
    let prompt: Vec<u32> = (0..100).map(|n| n % 25).collect();
    let within = |prompt: &[u32]| Request { session: Some(named("trip")), ..limited(prompt, 3) };
    engine.submit(within(&prompt)).expect("valid").for_each(drop);
    assert!(engine.flush_disk(Duration::from_secs(60)).is_ok_and(|in_time| in_time));
    let tokens = engine.inspect_session(&named("trip")).expect("open").tokens;

    let reply = ask(at, TURN, "35");
    assert!(reply.body.starts_with("36 37 38 39") && reply.body.contains("failed"), "{reply:?}");
    let ready = get(at, "/ready");
    ready.check(503, "engine_unavailable");
    eventually("the loss is known", || get(at, "/ready").header("retry-after") == "7");
    ask(at, TURN, "1").check(503, "engine_unavailable");
    assert!(engine.submit(limited(&[1], 1)).is_err(), "the lost one stays lost");
    assert_eq!(get(at, "/health").status, 200);

    allow.send(()).expect("somebody waits");
    eventually("the engine is back", || get(at, "/ready").status == 200);
    assert!(ask(at, TURN, "25").body.ends_with("done stop"));
    assert_eq!(site.metric("llmctl_engine_restarts_total"), 1.0);
    let engine = site.app.engine().expect("up");
    engine.restore_session(&named("trip"), tokens.clone()).expect("nobody knows it yet");
    let next = [&tokens[..], &[1, 2]].concat();
    let started = engine.submit(within(&next)).expect("valid").find_map(|event| match event {
        Event::Started(started) => Some(started),
        _ => None,
    });
    let reuse = started.expect("it started").reuse;
    assert_eq!(reuse.reason, ReuseReason::Restored);
    assert!(reuse.restored_tokens >= 96, "{reuse:?}");
}

#[test]
fn an_engine_that_dies_alone_is_missed() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().to_owned();
    let engine = fragile_engine(&root);
    let slot = EngineSlot::with_recovery(engine.clone(), recovery(move || Ok(fragile_engine(&root))));
    let site = Site::with(Options::default(), slot.expect("a thread"));
    // Past the server: no handler reports it.
    engine.submit(limited(&[39], 5)).expect("valid").for_each(drop);
    eventually("it is back", || site.metric("llmctl_engine_restarts_total") == 1.0);
    assert!(ask(site.address(), TURN, "25").body.ends_with("done stop"));
}

#[test]
fn a_false_alarm_costs_nobody_his_engine() {
    let num_built = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&num_built);
    let rebuild = move || {
        counted.fetch_add(1, Ordering::SeqCst);
        Ok(counting_engine())
    };
    let slot = EngineSlot::with_recovery(counting_engine(), recovery(rebuild)).expect("a thread");
    let site = Site::with(Options::default(), slot);
    site.app.engine_lost(&site.app.engine().expect("up"));
    eventually("it is up again", || get(site.address(), "/ready").status == 200);
    assert_eq!((num_built.load(Ordering::SeqCst), site.app.engines().num_restarts()), (0, 0));
}

#[test]
fn what_cannot_be_brought_back_is_given_up_and_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let (say, said) = mpsc::channel();
    let num_attempts = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&num_attempts);
    let rebuild = move || match counted.fetch_add(1, Ordering::SeqCst) {
        0 => panic!("a bug in loading"),
        _ => Err("no memory".to_owned()),
    };
    let gave_up = Box::new(move |why: String| drop(say.send(why)));
    let slot =
        EngineSlot::with_recovery(fragile_engine(folder.path()), Recovery { gave_up, ..recovery(rebuild) });
    let site = Site::with(Options::default(), slot.expect("a thread"));
    ask(site.address(), TURN, "39");
    let why = said.recv_timeout(Duration::from_secs(60)).expect("it is said");
    assert_eq!(why, "the engine could not be brought back in 3 attempts; the last time: no memory");
    assert_eq!(num_attempts.load(Ordering::SeqCst), 3);
    get(site.address(), "/ready").check(503, "engine_unavailable");
}

#[test]
fn engines_that_come_to_nothing_are_given_up() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().to_owned();
    let (say, said) = mpsc::channel();
    let gave_up = Box::new(move |why: String| drop(say.send(why)));
    let rebuild = {
        let root = root.clone();
        move || Ok(fragile_engine(&root))
    };
    let recovery = Recovery { gave_up, ..recovery(rebuild) };
    let slot = EngineSlot::with_recovery(fragile_engine(&root), recovery).expect("a thread");
    let site = Site::with(Options::default(), slot);
    for _ in 0..6000 {
        if let Ok(engine) = site.app.engine() {
            let _ = engine.submit(limited(&[39], 5)).map(|stream| stream.for_each(drop));
        }
        if let Ok(why) = said.try_recv() {
            assert_eq!(why, "the engine has stopped 4 times in a row without an answer");
            assert_eq!(site.app.engines().num_restarts(), 3);
            get(site.address(), "/ready").check(503, "engine_unavailable");
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("it is built again and again");
}

#[test]
fn one_of_several_engines_is_enough() {
    let engines = [counting_engine(), counting_engine(), counting_engine()];
    let slots = engines.each_ref().map(|engine| EngineSlot::new(engine.clone()));
    let server = loading(Options::default());
    let settings = ServeSettings { isolated: true, ..Default::default() };
    let app =
        super::app::app_with(Engines::new(slots.into()), server.lifecycle().observer().clone(), settings);
    server.open_with(app.clone(), axum::Router::new());
    let at = super::app::address(&server);
    let states = |reply: &super::client::Reply| {
        let workers = reply.json()["workers"].as_array().expect("workers").clone();
        workers.iter().map(|worker| worker["state"].as_str().expect("text").to_owned()).collect::<Vec<_>>()
    };
    let home = |name: &str| app.engine_of(Some(&named(name))).expect("up");
    let names: Vec<String> = (0..30).map(|n| format!("s{n}")).collect();
    let homes: Vec<EngineClient> = names.iter().map(|name| home(name)).collect();
    assert!(engines.iter().all(|engine| homes.iter().any(|home| home.is_same(engine))), "each has some");
    assert_eq!(states(&get(at, "/ready")), ["up", "up", "up"]);

    app.engine_lost(&engines[1]);
    assert_eq!(get(at, "/ready").status, 200);
    assert_eq!(states(&get(at, "/ready")), ["up", "failed", "up"]);
    for (name, before) in names.iter().zip(&homes) {
        let now = home(name);
        assert!(!now.is_same(&engines[1]));
        assert!(now.is_same(before) || before.is_same(&engines[1]), "only those move that must");
    }
    let metrics = get(at, "/metrics").body;
    let up = |engine: usize| {
        metric(&metrics, &format!("llmctl_engine_up{{model_name=\"toy\",engine=\"{engine}\"}}"))
    };
    assert_eq!([up(0), up(1), up(2)], [1.0, 0.0, 1.0]);

    app.engine_lost(&engines[0]);
    assert!(names.iter().all(|name| home(name).is_same(&engines[2])));
    assert!(app.engine().expect("one is up").is_same(&engines[2]));
    app.engine_lost(&engines[1]); // late news of one that is not there any more
    app.engine_lost(&engines[2]);
    get(at, "/ready").check(503, "engine_unavailable");
    let health = get(at, "/health");
    assert_eq!((health.status, states(&health)), (200, vec!["failed".to_owned(); 3]));
}

#[test]
fn who_has_least_to_do_is_asked() {
    let (busy, gate) = gated_engine();
    let idle = counting_engine();
    let engines = Engines::new(vec![EngineSlot::new(busy.clone()), EngineSlot::new(idle.clone())]);
    assert!(engines.any().expect("up").is_same(&busy), "the first of equals");
    let stream = busy.submit(limited(&[1], 3)).expect("valid");
    eventually("it is at work", || {
        let load = busy.last_load();
        load.num_running + load.num_waiting == 1
    });
    assert!(engines.any().expect("up").is_same(&idle));
    drop(gate);
    stream.for_each(drop);
    assert!(engines.any().expect("up").is_same(&busy));
}

#[test]
fn streams_come_to_their_end_before_the_server_does() {
    let (engine, gate) = gated_engine();
    let site = Site::with(Options::default(), EngineSlot::new(engine));
    let at = site.address();
    let mut running = connect(at);
    running.send(&format!("{TURN}\r\nContent-Length: 2\r\n\r\n58"));
    gate.send(()).expect("the engine lives");
    assert_eq!((running.head().status, running.chunk().as_deref()), (200, Some("59 ")));
    let mut idle = connect(at);
    assert_eq!(idle.ask("GET /ready HTTP/1.1\r\nHost: localhost", "").status, 200);
    let Site { server, app } = site;
    let lifecycle = server.lifecycle().clone();
    let draining =
        std::thread::spawn(move || server.drain(Duration::from_secs(600), || panic!("there is time")));
    assert!(idle.is_closed(), "who asks nothing is not waited for");
    assert_eq!(lifecycle.check_stage().map_err(|error| error.code), Err(Some("shutting_down")));
    get(at, "/ready").check(503, "shutting_down");
    assert_eq!(get(at, "/health").status, 200);
    let mut late = connect(at);
    let head = format!("{TURN}\r\nContent-Length: 1\r\n\r\n1");
    late.send(&head);
    assert_eq!(late.reply().check(503, "shutting_down").header("connection"), "close");
    assert!(late.is_closed());
    let silent = connect(at);
    drop(gate);
    let mut said = String::new();
    while let Some(chunk) = running.chunk() {
        said.push_str(&chunk);
    }
    assert_eq!(said, "60 61 62 done stop");
    assert!(running.is_closed());
    assert_eq!(draining.join().expect("no panic").num_cancelled, 0);
    drop(silent);
    assert!(TcpStream::connect(at).is_err(), "nothing listens any more");
    assert!(app.engine().is_ok(), "the engine is there to save what sessions hold");
}

#[test]
fn when_the_time_is_over_streams_are_ended_in_order() {
    let (engine, gate) = gated_engine();
    let site = Site::with(Options::default(), EngineSlot::new(engine.clone()));
    let mut running = connect(site.address());
    running.send(&format!("{TURN}\r\nContent-Length: 1\r\n\r\n1"));
    gate.send(()).expect("the engine lives");
    assert_eq!((running.head().status, running.chunk().as_deref()), (200, Some("2 ")));
    let Site { server, .. } = site;
    let cancel = move || {
        engine.cancel_all().expect("the engine lives");
        drop(gate);
    };
    let draining = std::thread::spawn(move || server.drain(Duration::from_millis(50), cancel));
    let mut last = None;
    while let Some(chunk) = running.chunk() {
        last = Some(chunk);
    }
    assert!(last.as_deref().is_some_and(|last| last.ends_with("done cancelled")), "{last:?}");
    assert_eq!(draining.join().expect("no panic").num_cancelled, 1);
}

#[test]
fn what_does_not_end_is_cut() {
    let site = Site::new(Options::default());
    let mut endless = connect(site.address());
    endless.send("GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert_eq!(endless.head().status, 200);
    let was_asked = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&was_asked);
    let drained = site.server.drain(Duration::from_millis(20), move || asked.store(true, Ordering::SeqCst));
    assert_eq!((drained.num_cancelled, was_asked.load(Ordering::SeqCst)), (1, true));
    assert!(endless.is_closed());
}

#[test]
fn a_server_without_a_model_ends_at_once() {
    let server = loading(Options::default());
    let mut waiting = connect(super::app::address(&server));
    drop(server);
    assert!(waiting.is_closed());
    // Also when there is a model, and nobody asked anything.
    let server = loading(Options::default());
    let slot = EngineSlot::new(counting_engine());
    server.open_with(app(slot, server.lifecycle().observer().clone()), axum::Router::new());
    assert_eq!(server.drain(Duration::from_secs(600), || panic!("there is time")).num_cancelled, 0);
}

#[cfg(unix)]
mod unix {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use llmctl_serve::front::lifecycle::Lifecycle;
    use llmctl_serve::front::listen::{Listener, Server};
    use llmctl_serve::gate::policy::Policy;
    use llmctl_serve::net::connection::ConnectionLimits;
    use llmctl_serve::telemetry::observe::Observer;

    use super::super::client::Client;

    fn start(path: &std::path::Path) -> Server {
        let listener = Listener::unix(path).expect("a socket");
        let lifecycle = Lifecycle::new(Policy::default(), Observer::default(), None);
        Server::start(listener, lifecycle, ConnectionLimits::default()).expect("a server")
    }

    #[test]
    fn a_socket_in_the_file_system_is_its_owners() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).expect("a socket")); // as a process leaves it that was killed
        let server = start(&path);
        let mode = std::fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut client = Client::new(UnixStream::connect(&path).expect("somebody listens"));
        let reply = client.ask("GET /health HTTP/1.1\r\nHost: whatever.example", "");
        assert_eq!(reply.status, 200, "no page can come this way");
        let error = Listener::unix(&path).expect_err("it is in use");
        assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
        assert_eq!(client.ask("GET /health HTTP/1.1\r\nHost: x", "").status, 200);
        drop(server);
        assert!(!path.exists());
    }

    #[test]
    fn what_is_no_socket_is_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("notes");
        std::fs::write(&path, "precious").expect("a file");
        let error = Listener::unix(&path).expect_err("it is a file");
        assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read_to_string(&path).expect("still there"), "precious");
    }
}
