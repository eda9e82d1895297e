//! The command line as a user meets it: the real binary, its streams and its exit codes.
//!
//! Every command runs in an empty folder with an empty home and no LLMCTL_* variables, so that a developer's own
//! configuration changes nothing. Tests that need a model take a small trained one from the fixtures.

mod batch;
mod bench;
mod bench_serve;
mod first_minutes;
mod frame;
mod images;
mod launch;
mod portable;
mod prompt;
mod run;
mod session;
mod warm;

use std::io::Write;

use crate::common::prelude::*;

/// Exit code and output of a command.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn check(&self, code: i32, stderr_contains: &str) -> &Self {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(self.stderr.contains(stderr_contains), "{stderr_contains:?} is not in {self:?}");
        self
    }
}

/// A place to run commands in.
pub struct Place {
    pub folder: TempDir,
}

impl Place {
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a folder") }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, content).expect("a file");
        path
    }

    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).expect("a text file")
    }

    /// The command, with nothing on stdin and nothing of this process's environment but what no test may depend on: with another
    /// temporary folder, language or instruction set everything is the same.
    pub fn command<S: AsRef<std::ffi::OsStr>>(&self, args: &[S]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_llmctl"));
        let kept = ["PATH", "TMPDIR", "LANG", "LC_ALL", crate::common::CPU].into_iter();
        command.env_clear().envs(kept.filter_map(|name| Some((name, std::env::var_os(name)?))));
        // No test may depend on a network: those of downloading have a hub of their own.
        command.env("HF_HUB_OFFLINE", "1");
        command.env("HOME", self.folder.path()).env("TERM", "xterm").env("COLUMNS", "100");
        // The same answer each time, unless a test asks for another temperature.
        command.env("LLMCTL_TEMPERATURE", "0");
        command.current_dir(self.folder.path()).args(args).stdin(Stdio::null());
        #[cfg(unix)]
        bounded(&mut command);
        command
    }

    pub fn run<S: AsRef<std::ffi::OsStr>>(&self, args: &[S]) -> Ran {
        finish(self.command(args), "")
    }
}

/// Leaves no command behind: it ends with the test that started it, and by SIGALRM after ten minutes, so that no test waits for
/// ever. What this process ignores, as all that a script starts in the background ignores SIGINT, the command does not.
#[cfg(unix)]
fn bounded(command: &mut Command) {
    let before_exec = || {
        // SAFETY: system calls that are async-signal-safe.
        unsafe {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            libc::signal(libc::SIGHUP, libc::SIG_DFL);
            libc::alarm(600);
            #[cfg(target_os = "linux")]
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        }
        Ok(())
    };
    // SAFETY: the closure does nothing but those system calls.
    unsafe { std::os::unix::process::CommandExt::pre_exec(command, before_exec) };
}

/// Runs a command to its end with this on its stdin.
pub fn finish(mut command: Command, stdin: &str) -> Ran {
    if !stdin.is_empty() {
        command.stdin(Stdio::piped());
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("llmctl starts");
    if let Some(mut pipe) = child.stdin.take() {
        // A command that refuses early does not read its input.
        let _ = pipe.write_all(stdin.as_bytes());
    }
    let output = child.wait_with_output().expect("llmctl ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Runs in a new place.
pub fn llmctl(args: &[&str]) -> Ran {
    Place::new().run(args)
}

/// A small trained model, or `None` (said on stderr) where the fixtures are not there.
pub fn stories() -> Option<String> {
    let folder = fixtures()?.join("models/stories260K/hf");
    if !folder.is_dir() {
        crate::common::skip(format!("no model at {}", folder.display()));
        return None;
    }
    Some(folder.to_string_lossy().into_owned())
}

/// Reads one line without reading ahead.
pub fn read_line(from: &mut impl Read) -> String {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while from.read(&mut byte).expect("a pipe") == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    String::from_utf8(line).expect("UTF-8")
}
