//! Worker processes: starts and watches them, and kills their whole process group.
//!
//! Invariants: the thread that starts a process lives as long as the process, because Linux kills the child
//! with that thread. An ended process is reaped at once, so no zombie stays. Its id is used for signals only
//! until it is reaped. This module reads no variable and prints nothing: lines from the worker's standard
//! error go to a callback.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt::Write;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::remote::{ProcessHandle, RemoteEngine, StartError, Timeouts};
#[cfg(unix)]
use super::unix;
#[cfg(unix)]
pub use super::unix::end_with_parent;

/// Lines of standard error that the diagnosis shows, and the most bytes of each.
const KEPT_LINES: usize = 8;
const MAX_LINE_BYTES: usize = 4096;

/// Interval for polling the exit of a process whose standard error has ended.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Processor use in percent below which a process counts as idle.
const LEAST_WORK_PERCENT: u64 = 1;

/// Clock ticks per second in /proc/PID/stat; 100 on every Linux architecture (`USER_HZ`).
const TICKS_PER_SECOND: u64 = 100;

/// Command line and limits of a worker.
#[derive(Clone)]
pub struct Launch {
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// Names of environment variables that are removed.
    pub secrets: Vec<OsString>,
    /// Memory limit in bytes and priority; see [`unix::ProcessLimits`].
    pub memory: Option<u64>,
    pub nice: Option<i32>,
    pub timeouts: Timeouts,
    /// Callback for each line of its standard error. Called on a thread of its own.
    pub on_stderr_line: Arc<dyn Fn(&str) + Send + Sync>,
}

impl Launch {
    /// Starts the worker and waits until it is ready.
    ///
    /// # Errors
    /// [`StartError`], with the exit status and the last lines of standard error.
    pub fn start(&self) -> Result<RemoteEngine, StartError> {
        let (process, input, output) = Process::start(self)?;
        RemoteEngine::connect(output, input, process, self.timeouts)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for name in &self.secrets {
            command.env_remove(name);
        }
        if self.memory.is_some() {
            // Disable backtraces: printing one after a failed allocation needs memory under a lock of the
            // standard library, and would deadlock.
            command.env("RUST_BACKTRACE", "0");
        }
        #[cfg(unix)]
        unix::prepare(&mut command, unix::ProcessLimits { memory: self.memory, nice: self.nice });
        #[cfg(windows)]
        {
            // A group of its own: Ctrl-C reaches the parent alone, which ends the worker.
            const CREATE_NEW_PROCESS_GROUP: u32 = 0x200;
            std::os::windows::process::CommandExt::creation_flags(&mut command, CREATE_NEW_PROCESS_GROUP);
        }
        command
    }
}

/// A child process, running or ended.
struct Process {
    /// Memory limit in bytes.
    memory: Option<u64>,
    state: Mutex<ProcessState>,
    ended: Condvar,
    last_sample: Mutex<CpuSample>,
}

struct ProcessState {
    child: Child,
    status: Option<ExitStatus>,
    last_lines: VecDeque<String>,
}

/// Processor time at the last call of `has_computed`.
struct CpuSample {
    num_ticks: Option<u64>,
    at: Instant,
}

type Pipes = (Arc<Process>, ChildStdin, ChildStdout);

impl Process {
    fn start(launch: &Launch) -> Result<Pipes, StartError> {
        let lost = |error: &dyn std::fmt::Display| {
            StartError::Lost(format!("{} could not be started: {error}", launch.program.display()))
        };
        let (sender, started) = mpsc::channel();
        let (command, on_stderr_line, memory) =
            (launch.command(), Arc::clone(&launch.on_stderr_line), launch.memory);
        let body = move || keep(command, memory, &*on_stderr_line, &sender);
        thread::Builder::new().name("worker".to_owned()).spawn(body).map_err(|error| lost(&error))?;
        let started = started.recv().map_err(|_| lost(&"its thread has failed"))?;
        started.map_err(|error| lost(&error))
    }

    fn new(child: Child, memory: Option<u64>) -> Self {
        let state = ProcessState { child, status: None, last_lines: VecDeque::new() };
        let last_sample = CpuSample { num_ticks: None, at: Instant::now() };
        Self { memory, state: Mutex::new(state), ended: Condvar::new(), last_sample: Mutex::new(last_sample) }
    }

    fn note(&self, line: &str) {
        let lines = &mut self.state.lock().last_lines;
        if lines.len() == KEPT_LINES {
            lines.pop_front();
        }
        lines.push_back(line.to_owned());
    }

    /// Waits for the process and stores its exit status.
    fn reap(&self) {
        loop {
            let mut state = self.state.lock();
            match state.child.try_wait() {
                Ok(None) => {}
                Ok(Some(status)) => {
                    state.status = Some(status);
                    break;
                }
                // Another part of the program has reaped it; the exit status is unknown.
                Err(_) => {
                    state.status = Some(ExitStatus::default());
                    break;
                }
            }
            drop(state);
            thread::sleep(LOOK_EVERY);
        }
        self.ended.notify_all();
    }
}

/// Body of the process's thread: starts it, forwards its standard error, and reaps it.
fn keep(
    mut command: Command,
    memory: Option<u64>,
    on_stderr_line: &dyn Fn(&str),
    started: &Sender<std::io::Result<Pipes>>,
) {
    // Sending fails only if the receiver has panicked.
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return drop(started.send(Err(error))),
    };
    let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let process = Arc::new(Process::new(child, memory));
    let (Some(input), Some(output), Some(errors)) = pipes else { unreachable!("all three were asked for") };
    let _ = started.send(Ok((Arc::clone(&process), input, output)));
    listen(errors, &mut |line| {
        process.note(line);
        on_stderr_line(line);
    });
    process.reap();
}

/// Calls `on_line` for each line up to the end. Long lines are split.
fn listen(errors: ChildStderr, on_line: &mut dyn FnMut(&str)) {
    let mut errors = BufReader::new(errors);
    let mut line = Vec::new();
    loop {
        line.clear();
        let limit = MAX_LINE_BYTES as u64;
        match errors.by_ref().take(limit).read_until(b'\n', &mut line) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(_) => return,
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        if !text.is_empty() {
            on_line(text);
        }
    }
}

impl ProcessHandle for Process {
    fn kill(&self) {
        let mut state = self.state.lock();
        if state.status.is_some() {
            return;
        }
        #[cfg(unix)]
        unix::kill_group(state.child.id());
        // Kill the leader too, in case it has left the group.
        let _ = state.child.kill();
    }

    fn wait(&self) -> String {
        let mut state = self.state.lock();
        self.ended.wait_while(&mut state, |state| state.status.is_none());
        let mut how = state.status.map_or_else(String::new, |status| status.to_string());
        if let Some(memory) = self.memory.filter(|_| has_run_out(&state)) {
            write!(how, "; {OUT_OF_MEMORY} {memory} bytes").expect("a string takes everything");
        }
        if let Some((last, before)) = state.last_lines.iter().collect::<Vec<_>>().split_last() {
            how.push_str("; its last lines were:");
            for line in before.iter().chain([last]) {
                write!(how, "\n  {line}").expect("a string takes everything");
            }
        }
        how
    }

    fn has_computed(&self) -> Option<bool> {
        let num_ticks = num_ticks(self.state.lock().child.id())?;
        let mut last_sample = self.last_sample.lock();
        let now = Instant::now();
        let before = std::mem::replace(&mut *last_sample, CpuSample { num_ticks: Some(num_ticks), at: now });
        let ticks = num_ticks.saturating_sub(before.num_ticks?);
        let elapsed_ms = u64::try_from((now - before.at).as_millis()).unwrap_or(u64::MAX);
        let least = elapsed_ms.saturating_mul(TICKS_PER_SECOND * LEAST_WORK_PERCENT) / 100_000;
        Some(ticks > least)
    }
}

/// Start of the message for a worker that has exhausted its memory; the number of bytes follows.
pub const OUT_OF_MEMORY: &str = "it has run out of the memory that it is allowed,";

/// Returns whether a message reports exhausted memory: a failed allocation, a failed mapping (ENOMEM), or a
/// failed thread stack (EAGAIN).
pub fn tells_of_no_memory(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    let marks = ["memory allocation of", "cannot allocate memory", "resource temporarily unavailable"];
    marks.iter().any(|mark| text.contains(mark)) || text.contains(OUT_OF_MEMORY)
}

/// Returns whether it printed such a message, or crashed as processes do whose stack or loader cannot grow.
fn has_run_out(state: &ProcessState) -> bool {
    state.last_lines.iter().any(|line| tells_of_no_memory(line)) || state.status.is_some_and(is_crash)
}

#[cfg(unix)]
fn is_crash(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    // Exit code 127: the loader could not map a library.
    matches!(status.signal(), Some(libc::SIGSEGV | libc::SIGBUS)) || status.code() == Some(127)
}

#[cfg(not(unix))]
fn is_crash(_: ExitStatus) -> bool {
    false
}

/// Returns the processor time of all threads in clock ticks: `utime` + `stime` of proc_pid_stat(5). `None` if
/// there is no such file.
fn num_ticks(pid: u32) -> Option<u64> {
    ticks_of(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn ticks_of(stat: &str) -> Option<u64> {
    // The second field is a name in parentheses that may contain anything, so start after its end.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    Some(field(14)? + field(15)?)
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;

    fn launch(script: &str, lines: Arc<Mutex<Vec<String>>>) -> Launch {
        let timeouts = Timeouts { start: Duration::from_secs(60), answer: Duration::from_millis(300) };
        let on_stderr_line = Arc::new(move |line: &str| lines.lock().push(line.to_owned()));
        let args = ["-c", script].map(OsString::from).to_vec();
        let secrets = vec!["CARGO_MANIFEST_DIR".into()]; // cargo sets it for tests
        Launch {
            program: "/bin/sh".into(),
            args,
            secrets,
            memory: None,
            nice: None,
            timeouts,
            on_stderr_line,
        }
    }

    fn failure(launch: &Launch) -> String {
        match launch.start() {
            Ok(_) => panic!("a shell is no engine"),
            Err(error) => error.to_string(),
        }
    }

    fn diagnose(script: &str) -> (String, Vec<String>) {
        let lines = Arc::default();
        let why = failure(&launch(script, Arc::clone(&lines)));
        let lines = lines.lock().clone();
        (why, lines)
    }

    #[test]
    fn what_cannot_be_started_is_named() {
        let launch = Launch { program: "/no/such/llmctl".into(), ..launch("", Arc::default()) };
        assert!(failure(&launch).starts_with("/no/such/llmctl could not be started: "));
    }

    #[test]
    fn the_diagnosis_has_status_and_last_lines() {
        let (why, lines) = diagnose("for n in 1 2 3 4 5 6 7 8 9; do echo line $n >&2; done; exit 7");
        assert!(why.starts_with("it has ended; exit status: 7; its last lines were:\n  line 2\n"), "{why}");
        assert!(why.ends_with("  line 9"), "{why}");
        assert_eq!(lines.len(), 9);
        let (why, _) = diagnose("kill -SEGV $$");
        assert!(why.contains("signal: 11"), "{why}");
    }

    #[test]
    fn one_that_has_run_out_of_its_memory_is_told_from_others() {
        let why =
            |script: &str, memory: Option<u64>| failure(&Launch { memory, ..launch(script, Arc::default()) });
        let ran_out = format!("{OUT_OF_MEMORY} 67108864 bytes");
        for script in [
            "kill -SEGV $$",
            "echo 'memory allocation of 9 bytes failed' >&2; kill -ABRT $$",
            "echo 'starting: resource temporarily unavailable' >&2",
            "exit 127",
        ] {
            assert!(why(script, Some(64 << 20)).contains(&ran_out), "{script}");
            assert!(!why(script, None).contains(OUT_OF_MEMORY), "{script}");
        }
        assert!(!why("exit 1", Some(64 << 20)).contains(OUT_OF_MEMORY));
    }

    #[test]
    fn a_wrong_first_line_is_shown() {
        let (why, _) = diagnose("echo hello; sleep 600");
        assert!(
            why.contains("does not say that it is ready: \"hello\"") && why.contains("signal: 9"),
            "{why}"
        );
        let (why, _) = diagnose("printf '{\"ready\":true'; exit 0");
        assert!(why.contains("ended within a line"), "{why}");
        let (why, _) = diagnose("echo '{\"error\":\"no such tensor\",\"code\":\"load_failed\"}'; exit 65");
        assert_eq!(why, "backend failure: no such tensor");
    }

    #[test]
    fn one_that_says_nothing_is_killed_with_all_that_it_has_begun() {
        let mut silent = launch("sleep 600 & echo $! >&2; wait", Arc::default());
        let lines = Arc::new(Mutex::new(String::new()));
        let seen = Arc::clone(&lines);
        silent.on_stderr_line = Arc::new(move |line| seen.lock().push_str(line));
        silent.timeouts.start = Duration::from_millis(500);
        let why = failure(&silent);
        assert!(why.starts_with("it was not ready within 500ms; signal: 9"), "{why}");
        let grandchild = lines.lock().clone();
        let is_gone = || {
            let stat = std::fs::read_to_string(format!("/proc/{grandchild}/stat"));
            stat.map_or(true, |stat| stat.contains(") Z "))
        };
        assert!(
            !cfg!(target_os = "linux")
                || (0..1000).any(|_| {
                    thread::sleep(Duration::from_millis(10));
                    is_gone()
                })
        );
    }

    #[test]
    fn limits_are_in_force_and_secrets_are_not_there() {
        let mut limited = launch(
            "ulimit -d >&2; nice >&2; echo \"<$CARGO_MANIFEST_DIR>\" >&2; kill -TERM $$; echo alive >&2",
            Arc::default(),
        );
        (limited.memory, limited.nice) = (Some(64 << 20), Some(5));
        let lines = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&lines);
        limited.on_stderr_line = Arc::new(move |line| seen.lock().push(line.to_owned()));
        failure(&limited);
        let lines = lines.lock().clone();
        assert_eq!(lines, ["65536", "5", "<>", "alive"]);
    }

    #[test]
    fn ticks_are_read_whatever_the_name() {
        let stat = "1 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 30 12 13 14 15";
        assert_eq!(ticks_of(stat), Some(42));
        assert_eq!(ticks_of("1 (a) S 1 2"), None);
    }
}
