//! System calls for child processes that the standard library lacks: limits set before exec, and killing a
//! process group.
//!
//! The only file of the workers and of MCP servers' processes with `unsafe`. Code between fork and exec makes
//! system calls only. It allocates nothing, because another thread may hold the allocator's lock for ever.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Resource limits of a child process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessLimits {
    /// Limit on private writable memory in bytes (`RLIMIT_DATA`, Linux): KV, packed weights, buffers and
    /// stacks. Read-only file mappings do not count.
    pub memory: Option<u64>,
    /// Priority from -20 to 19; see nice(2).
    pub nice: Option<i32>,
}

/// Configures the child before exec: a process group of its own, so that this terminal's Ctrl-C does not
/// reach it; SIGINT, SIGTERM and SIGHUP ignored, because the parent handles them; `limits`; and on Linux, death with
/// the thread that starts it.
pub fn prepare(command: &mut Command, limits: ProcessLimits) {
    command.process_group(0);
    // SAFETY: reads a number.
    let parent = unsafe { libc::getpid() };
    let before_exec = move || {
        ignore_signals()?;
        limit_memory(limits.memory)?;
        lower_priority(limits.nice)?;
        die_with_parent(parent)
    };
    // SAFETY: the closure and what it calls make system calls on values that lie in it and on its stack, and take no memory: an
    // `io::Error` of a system's number has none.
    unsafe { command.pre_exec(before_exec) };
}

/// Configures the child before exec: a process group of its own, and on Linux, death with the thread that starts it.
pub fn end_with_parent(command: &mut Command) {
    command.process_group(0);
    // SAFETY: reads a number.
    let parent = unsafe { libc::getpid() };
    // SAFETY: as in `prepare`.
    unsafe { command.pre_exec(move || die_with_parent(parent)) };
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn ignore_signals() -> io::Result<()> {
    for number in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: async-signal-safe; sets a disposition that has no handler.
        if unsafe { libc::signal(number, libc::SIG_IGN) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn limit_memory(bytes: Option<u64>) -> io::Result<()> {
    let Some(bytes) = bytes else { return Ok(()) };
    #[allow(clippy::unnecessary_cast)] // narrower on some targets
    let limit = libc::rlimit { rlim_cur: bytes as libc::rlim_t, rlim_max: bytes as libc::rlim_t };
    // SAFETY: reads the structure it is given, which lives on this stack.
    checked(unsafe { libc::setrlimit(libc::RLIMIT_DATA, &limit) })
}

fn lower_priority(nice: Option<i32>) -> io::Result<()> {
    let Some(nice) = nice else { return Ok(()) };
    // SAFETY: 0 is the calling process.
    checked(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) })
}

#[cfg(target_os = "linux")]
fn die_with_parent(parent: libc::pid_t) -> io::Result<()> {
    // SAFETY: takes numbers; the signal cannot be caught or ignored.
    checked(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) })?;
    // SAFETY: reads a number.
    let is_orphan = unsafe { libc::getppid() } != parent;
    if is_orphan { Err(io::Error::from_raw_os_error(libc::ESRCH)) } else { Ok(()) }
}

/// Does nothing: on other systems the child ends when its standard input does.
#[cfg(not(target_os = "linux"))]
fn die_with_parent(_: libc::pid_t) -> io::Result<()> {
    Ok(())
}

/// Kills a process group. The caller must not have waited for its leader, or the id may belong to another
/// process.
pub fn kill_group(leader: u32) {
    if let Ok(leader @ 2..) = libc::pid_t::try_from(leader) {
        // SAFETY: sends a signal. An error because the group is empty is harmless.
        unsafe { libc::kill(-leader, libc::SIGKILL) };
    }
}
