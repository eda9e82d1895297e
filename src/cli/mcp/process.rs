//! The process of a server: started without a shell in a process group of its own, its last words kept, ended
//! in steps.
//!
//! Invariants: no server outlives llmctl: an orderly end waits for it, a signal ends its group, and on Linux
//! the kernel kills it where llmctl is killed (on other systems than Unix only the process itself is ended,
//! not those that it has started); a process group whose leader has been waited for gets no signal, because
//! its number may belong to another.

use std::io;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::config::{PASSED_ON, ProcessConfig};
use crate::cli::terminal::signal::Companion;
#[cfg(unix)]
use llmctl_engine::worker::process::end_with_parent;

/// Time that a server has to end after its input has ended, and again after SIGTERM.
const GRACE: Duration = Duration::from_secs(1);

/// Interval at which it is checked.
const POLL: Duration = Duration::from_millis(10);

/// Time after a server's end in which the rest of its standard error is read.
const WORDS_TIMEOUT: Duration = Duration::from_secs(3);

/// Bytes of a server's standard error that are kept, and lines of them that a message shows.
const MAX_WORDS: usize = 4 << 10;
const SHOWN_LINES: usize = 5;

/// A running server.
pub struct ServerProcess {
    child: Child,
    words: Arc<Mutex<Vec<u8>>>,
    /// Reads them.
    reader: JoinHandle<()>,
    /// Ends the process group if a signal ends llmctl. `None` once the process has been waited for.
    companion: Option<Companion>,
}

impl ServerProcess {
    /// Starts the command. Its group is its own, so that the terminal's Ctrl-C does not reach it.
    ///
    /// # Errors
    /// The system's.
    pub fn start(config: &ProcessConfig) -> io::Result<(Self, ChildStdout, ChildStdin)> {
        let mut command = Command::new(&config.command);
        command
            .args(&config.args)
            .env_clear()
            .envs(PASSED_ON.split(' ').filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.envs(&config.env).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.kill_on_drop(true);
        if let Some(cwd) = &config.cwd {
            command.current_dir(cwd);
        }
        #[cfg(unix)]
        end_with_parent(command.as_std_mut());
        let mut child = command.spawn()?;
        let companion = child.id().map(Companion::of_group);
        let (Some(stdin), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(io::Error::other("a process without streams"));
        };
        let words = Arc::default();
        let reader = tokio::spawn(keep_words(stderr, Arc::clone(&words)));
        Ok((Self { child, words, reader, companion }, stdout, stdin))
    }

    /// Returns the status of a server that has ended. What it has left running is killed.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        if !self.has_exited() {
            return None;
        }
        self.signal(EndSignal::Kill);
        self.companion = None; // before its number is free for another process
        self.child.try_wait().ok().flatten()
    }

    /// Returns the last lines of its standard error, in one text; empty if it wrote none. Of a server that [`Self::exited`], all.
    pub async fn last_words(&mut self) -> String {
        if self.companion.is_none() && !self.reader.is_finished() {
            let _ = timeout(WORDS_TIMEOUT, &mut self.reader).await; // what has been read until then
        }
        let words = self.words.lock();
        let text = String::from_utf8_lossy(&words).into_owned();
        let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
        lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n")
    }

    /// Ends the server, whose input has been closed: it is waited for, asked by SIGTERM, and killed.
    pub async fn end(mut self) {
        for ending in [None, Some(EndSignal::Terminate)] {
            if let Some(ending) = ending {
                self.signal(ending);
            }
            let start = Instant::now();
            while !self.has_exited() && start.elapsed() < GRACE {
                sleep(POLL).await;
            }
        }
        self.signal(EndSignal::Kill); // also what an orderly server has left running
        self.companion = None;
        let _ = self.child.wait().await; // it has been killed
    }
}

/// A server that is dropped instead of ended is killed with its group.
impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.signal(EndSignal::Kill);
    }
}

#[derive(Clone, Copy)]
enum EndSignal {
    Terminate,
    Kill,
}

#[cfg(unix)]
impl ServerProcess {
    /// Returns whether the process has ended. It is not waited for.
    fn has_exited(&self) -> bool {
        use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
        let pid = self.child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        pid.is_none_or(|pid| !matches!(waitid(WaitId::Pid(pid), options), Ok(None)))
    }

    /// Signals the group of a process that has not been waited for.
    fn signal(&self, ending: EndSignal) {
        use rustix::process::{Pid, Signal, kill_process_group};
        let group =
            self.companion.as_ref().and(self.child.id()).and_then(|id| Pid::from_raw(id.cast_signed()));
        let signal = match ending {
            EndSignal::Terminate => Signal::TERM,
            EndSignal::Kill => Signal::KILL,
        };
        if let Some(group) = group {
            let _ = kill_process_group(group, signal); // it may have ended just now
        }
    }
}

#[cfg(not(unix))]
impl ServerProcess {
    fn has_exited(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    fn signal(&mut self, ending: EndSignal) {
        if matches!(ending, EndSignal::Kill) {
            let _ = self.child.start_kill(); // it may have ended just now
        }
    }
}

/// Reads a stream to its end, so that its writer never waits, and keeps the last bytes.
async fn keep_words(mut stream: impl AsyncRead + Unpin, words: Arc<Mutex<Vec<u8>>>) {
    let mut part = [0; 1024];
    while let Ok(count @ 1..) = stream.read(&mut part).await {
        let mut words = words.lock();
        words.extend_from_slice(&part[..count]);
        let surplus = words.len().saturating_sub(MAX_WORDS);
        words.drain(..surplus);
    }
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;

    fn shell(script: &str) -> ProcessConfig {
        let args = vec!["-c".to_owned(), script.to_owned()];
        ProcessConfig { command: "/bin/sh".into(), args, env: Default::default(), cwd: None }
    }

    fn block_on<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(work)
    }

    /// Returns whether a process runs; one that has ended and was not waited for does not.
    fn is_running(id: &str) -> bool {
        let status = std::process::Command::new("ps").args(["-o", "stat=", "-p", id]).output().expect("ps");
        let status = String::from_utf8_lossy(&status.stdout).into_owned();
        !status.trim().is_empty() && !status.trim().starts_with('Z')
    }

    async fn first_line(stdout: &mut ChildStdout) -> String {
        let mut line = String::new();
        while !line.ends_with('\n') {
            let mut byte = [0];
            assert_eq!(stdout.read(&mut byte).await.expect("readable"), 1, "{line:?}");
            line.push(char::from(byte[0]));
        }
        line.trim().to_owned()
    }

    #[test]
    fn a_server_ends_with_its_input_or_by_force_and_leaves_nothing_running() {
        block_on(async {
            for script in
                ["sleep 60 & echo $!; cat", "trap '' TERM; sleep 60 & echo $!; while true; do sleep 1; done"]
            {
                let (process, mut stdout, stdin) = ServerProcess::start(&shell(script)).expect("started");
                let left = first_line(&mut stdout).await;
                assert!(is_running(&left), "{script}");
                drop(stdin);
                process.end().await;
                assert!(!is_running(&left), "{script}");
            }
        });
    }

    #[test]
    fn the_last_words_of_a_server_and_its_status_are_known() {
        block_on(async {
            let script = "sleep 60 & echo $!; i=0; while [ $i -lt 3000 ]; do echo line $i >&2; i=$((i+1)); done; exit 3";
            let (mut process, mut stdout, _stdin) = ServerProcess::start(&shell(script)).expect("started");
            let left = first_line(&mut stdout).await;
            let status = loop {
                if let Some(status) = process.exited() {
                    break status;
                }
                sleep(POLL).await;
            };
            assert_eq!(status.code(), Some(3));
            assert!(!is_running(&left));
            let words = process.last_words().await;
            assert!(words.ends_with("line 2999") && words.lines().count() == SHOWN_LINES, "{words}");
        });
    }

    #[test]
    fn a_server_gets_its_own_variables_and_no_others() {
        block_on(async {
            let mut config = shell("echo \"$KEY,$CARGO_MANIFEST_DIR,$PATH\"");
            config.env.insert("KEY".to_owned(), "k".to_owned());
            let (process, mut stdout, _stdin) = ServerProcess::start(&config).expect("started");
            let line = first_line(&mut stdout).await;
            process.end().await;
            assert_eq!(line, format!("k,,{}", std::env::var("PATH").expect("a PATH")));
        });
    }
}
