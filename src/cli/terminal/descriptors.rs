//! The limit on open files and sockets (`ulimit -n`), and whether stdout is open.

/// Returns whether stdout was closed when the process started (`>&-`). The standard library opens /dev/null
/// in its place before `main`, so an answer would be lost silently; the check runs before that.
pub fn is_stdout_closed() -> bool {
    before_main::is_stdout_closed()
}

#[cfg(any(target_os = "linux", target_os = "macos"))]
mod before_main {
    use std::sync::atomic::{AtomicBool, Ordering};

    static IS_CLOSED: AtomicBool = AtomicBool::new(false);

    /// The loader calls functions in this section before `main`.
    #[used]
    #[cfg_attr(target_os = "linux", unsafe(link_section = ".init_array"))]
    #[cfg_attr(target_os = "macos", unsafe(link_section = "__DATA,__mod_init_func"))]
    static LOOK: extern "C" fn() = look;

    extern "C" fn look() {
        // SAFETY: queries a descriptor; uses nothing of the standard library, which is not set up yet.
        let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
        IS_CLOSED.store(flags == -1, Ordering::Relaxed);
    }

    pub fn is_stdout_closed() -> bool {
        // Named here so that the linker keeps it if this function is used.
        std::hint::black_box(&LOOK);
        IS_CLOSED.load(Ordering::Relaxed)
    }
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod before_main {
    pub fn is_stdout_closed() -> bool {
        false
    }
}

/// Raises the limit to the system's maximum for this process, and returns it; `None` if it is unknown.
#[cfg(unix)]
pub fn raise_limit() -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes the structure it is given, which lives on this stack.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return None;
    }
    let raised = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
    // SAFETY: reads the structure it is given. macOS refuses more than its own maximum; then the old limit stays.
    let is_raised = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raised) } == 0;
    let in_force = if is_raised { raised.rlim_cur } else { limit.rlim_cur };
    // `RLIM_INFINITY` is the largest number.
    Some(usize::try_from(in_force).unwrap_or(usize::MAX))
}

#[cfg(not(unix))]
pub fn raise_limit() -> Option<usize> {
    None
}
