//! What the standard library does not say about child processes: limits that they begin with, and the end of a whole group.
//!
//! The one file of the workers with `unsafe`. What runs between fork and exec calls the system and nothing else: no memory is
//! taken there, because another thread may hold the allocator's lock for ever.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// What a child is held to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessLimits {
    /// Bytes of memory that it may reserve for itself (`RLIMIT_DATA`, Linux): private memory that it can write to, which is KV, packed
    /// weights, buffers and stacks. Files that are mapped to be read do not count.
    pub memory: Option<u64>,
    /// -20 to 19; see nice(2).
    pub nice: Option<i32>,
}

/// Has the child begin in a process group of its own, where no Ctrl-C of this terminal reaches it, without ears for SIGINT and
/// SIGTERM, which are its parent's business, held to `limits`, and on Linux with its life tied to the thread that starts it.
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

fn checked(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn ignore_signals() -> io::Result<()> {
    for number in [libc::SIGINT, libc::SIGTERM] {
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

/// Elsewhere the end of its standard input has to do.
#[cfg(not(target_os = "linux"))]
fn die_with_parent(_: libc::pid_t) -> io::Result<()> {
    Ok(())
}

/// Kills a process group. The caller knows that its first process has not been waited for, so that the number is still its own.
pub fn kill_group(leader: u32) {
    if let Ok(leader @ 2..) = libc::pid_t::try_from(leader) {
        // SAFETY: sends a signal. That nobody is left to get it is no error here.
        unsafe { libc::kill(-leader, libc::SIGKILL) };
    }
}
