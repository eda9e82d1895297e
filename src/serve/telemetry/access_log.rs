//! The access log: lines in a bounded queue, and the thread that writes them.
//!
//! Invariant: a log that cannot be written to blocks no request; [`AccessLog::write`] says when a line is
//! lost.

use std::io::Write;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Most lines waiting to be written.
const LOG_QUEUE: usize = 4096;

/// A log with one JSON object a line, written by a thread of its own.
#[derive(Clone)]
pub struct AccessLog {
    lines: SyncSender<LogMessage>,
}

enum LogMessage {
    Request(String),
    /// Replies after all lines before it have been written.
    Flush(mpsc::Sender<()>),
}

impl AccessLog {
    /// Starts the thread that writes to `out`.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub fn new(out: Box<dyn Write + Send>) -> std::io::Result<Self> {
        let (lines, inbox) = mpsc::sync_channel(LOG_QUEUE);
        thread::Builder::new().name("access-log".to_owned()).spawn(move || write_lines(out, &inbox))?;
        Ok(Self { lines })
    }

    /// Queues a line; false if the queue is full.
    pub fn write(&self, line: &Value) -> bool {
        self.lines.try_send(LogMessage::Request(format!("{line}\n"))).is_ok()
    }

    /// Waits until all lines so far have been written; false after `timeout`.
    pub fn flush(&self, timeout: Duration) -> bool {
        let (reply, done) = mpsc::channel();
        let give_up_at = Instant::now() + timeout;
        // The queue may be full because its reader is stuck, so this must not block.
        while self.lines.try_send(LogMessage::Flush(reply.clone())).is_err() {
            if Instant::now() >= give_up_at {
                return false;
            }
            thread::sleep(Duration::from_millis(10));
        }
        drop(reply);
        done.recv_timeout(give_up_at.saturating_duration_since(Instant::now())).is_ok()
    }
}

fn write_lines(mut out: Box<dyn Write + Send>, inbox: &Receiver<LogMessage>) {
    let mut is_failing = false;
    for line in inbox {
        let written = match line {
            LogMessage::Request(line) => out.write_all(line.as_bytes()).and_then(|()| out.flush()),
            LogMessage::Flush(reply) => {
                let _ = reply.send(()); // the caller may have given up
                continue;
            }
        };
        if let Err(error) = &written
            && !is_failing
        {
            tracing::error!("the access log cannot be written: {error}");
        }
        is_failing = written.is_err();
    }
}
