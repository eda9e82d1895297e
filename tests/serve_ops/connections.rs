//! Clients that are slow, silent, many or gone.

use llmctl_serve::net::connection::ConnectionLimits;

use super::app::{Options, Site, eventually, gated_engine};
use super::client::{Client, connect, get};
use crate::common::prelude::*;

fn with_limits(limits: ConnectionLimits) -> Site {
    Site::new(Options { limits, ..Options::default() })
}

fn short() -> ConnectionLimits {
    let time = Duration::from_millis(300);
    ConnectionLimits { header_timeout: time, idle_timeout: time, ..ConnectionLimits::default() }
}

#[test]
fn a_head_that_does_not_end_is_not_waited_for() {
    let site = with_limits(ConnectionLimits { idle_timeout: Duration::from_secs(600), ..short() });
    let mut slow = connect(site.address());
    slow.send("GET /health HTTP/1.1\r\nHost: loc");
    slow.reply().check(408, "request_timeout");
    assert!(slow.is_closed());
    assert_eq!(site.metric("llmctl_http_connections_closed_total{reason=\"slow_header\"}"), 1.0);
}

#[test]
fn silence_ends_a_connection_before_and_after_a_request() {
    let site = with_limits(short());
    assert!(connect(site.address()).is_closed());
    let mut used = connect(site.address());
    assert_eq!(used.ask("GET /health HTTP/1.1\r\nHost: localhost", "").status, 200);
    assert!(used.is_closed());
    assert_eq!(site.metric("llmctl_http_connections_closed_total{reason=\"idle\"}"), 2.0);
}

#[test]
fn a_request_under_way_is_not_silence() {
    let (engine, gate) = gated_engine();
    let site = Site::with(Options { limits: short(), ..Options::default() }, EngineSlot::new(engine));
    let mut client = connect(site.address());
    client.send("POST /turn HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n60");
    assert_eq!(client.head().status, 200);
    // Another connection becomes idle and is closed: longer than that the first has been silent.
    assert!(connect(site.address()).is_closed());
    assert!(connect(site.address()).is_closed());
    drop(gate);
    let mut said = String::new();
    while let Some(chunk) = client.chunk() {
        said.push_str(&chunk);
    }
    assert_eq!(said, "61 62 done stop");
}

#[test]
fn who_does_not_read_is_let_go() {
    let site = with_limits(short());
    let mut client = connect(site.address());
    client.send("GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert_eq!(client.head().status, 200);
    let reason = "llmctl_http_connections_closed_total{reason=\"unread_response\"}";
    eventually("the connection is closed", || site.metric(reason) == 1.0);
    assert!(client.is_closed());
}

#[test]
fn one_more_takes_the_place_of_an_idle_one() {
    let site = with_limits(ConnectionLimits { max_connections: 4, ..ConnectionLimits::default() });
    let mut idle: Vec<Client<TcpStream>> = (0..4).map(|_| connect(site.address())).collect();
    for client in &mut idle {
        assert_eq!(client.ask("GET /health HTTP/1.1\r\nHost: localhost", "").status, 200);
    }
    assert_eq!(get(site.address(), "/health").status, 200);
    assert!(idle[0].is_closed(), "the one that was idle longest");
    assert_eq!(idle[3].ask("GET /health HTTP/1.1\r\nHost: localhost", "").status, 200);
}

#[test]
fn when_all_are_in_use_one_more_is_told_to_come_back() {
    let (engine, gate) = gated_engine();
    let limits = ConnectionLimits { max_connections: 2, ..ConnectionLimits::default() };
    let site = Site::with(Options { limits, ..Options::default() }, EngineSlot::new(engine));
    let mut busy: Vec<Client<TcpStream>> = (0..2).map(|_| connect(site.address())).collect();
    for client in &mut busy {
        client.send("POST /turn HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n60");
        assert_eq!(client.head().status, 200);
    }
    get(site.address(), "/health").check(503, "too_many_connections");
    drop(gate);
    for client in &mut busy {
        while client.chunk().is_some() {}
    }
    assert_eq!(get(site.address(), "/health").status, 200);
}

#[test]
fn whoever_leaves_stops_the_work() {
    let (engine, gate) = gated_engine();
    let site = Site::with(Options::default(), EngineSlot::new(engine));
    let mut client = connect(site.address());
    client.send("POST /turn HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n1");
    gate.send(()).expect("the engine lives");
    assert_eq!((client.head().status, client.chunk().as_deref()), (200, Some("2 ")));
    let running = "vllm:num_requests_running{model_name=\"toy\",engine=\"0\"}";
    eventually("the engine is in a step", || site.metric(running) == 1.0); // published behind the first token
    drop(client);
    // The server sees it when it writes: within a second of the request, an end without a reset may be half an end.
    // The engine takes some steps until then, but not all 62.
    let mut permits = 0;
    eventually("the engine has released it", || {
        permits += 1;
        gate.send(()).expect("the engine lives");
        site.metric(running) == 0.0
    });
    assert!(permits < 60, "the answer came to its end");
    assert_eq!(site.metric("llmctl_http_requests_in_flight"), 1.0, "the one that asks");
    drop(gate); // a step that began before the request was cancelled waits for it, and the engine's end for that step
}

#[test]
fn whoever_ends_its_side_behind_a_request_gets_its_answer() {
    let (engine, gate) = gated_engine();
    let site = Site::with(Options::default(), EngineSlot::new(engine));
    let mut streamed = connect(site.address());
    streamed.send("POST /turn HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n60");
    streamed.end_asking();
    let mut whole = connect(site.address());
    whole.send("GET /id HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: one\r\n\r\n");
    whole.end_asking();
    assert_eq!(whole.reply().body, "one");
    assert!(whole.is_closed(), "and no more is waited for");
    drop(gate);
    assert!(streamed.reply().body.ends_with("done stop"));
    // Half a request is none.
    let mut half = connect(site.address());
    half.send("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc");
    half.end_asking();
    assert!(half.is_closed());
}

#[cfg(target_os = "linux")]
#[test]
fn whoever_is_gone_behind_a_request_is_found_out_without_a_byte() {
    let site = Site::new(Options::default());
    let mut client = connect(site.address());
    client.send("GET /silent HTTP/1.1\r\nHost: localhost\r\n\r\n");
    drop(client);
    eventually("its request is given up", || site.metric("llmctl_http_requests_in_flight") == 1.0);
}
