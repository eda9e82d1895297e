//! How many files and sockets this process may have open (`ulimit -n`).

/// Raises the limit to what the system allows without asking anybody, and returns it; nothing where it cannot be known.
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
    // `RLIM_INFINITY` is the largest number there is.
    Some(usize::try_from(in_force).unwrap_or(usize::MAX))
}

#[cfg(not(unix))]
pub fn raise_limit() -> Option<usize> {
    None
}
