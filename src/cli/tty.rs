//! The terminal's modes: remembers them at the start, changes them while an answer is written, and restores
//! them however the process ends.
//!
//! [`remember`] is called once; then [`restore`] may be called at any time, also in a signal handler. The
//! line editor (rustyline) sets and undoes its own modes; this file only ensures that they never outlive the
//! process. Knows no signal and no line.

#[cfg(unix)]
pub use unix::{LineModes, Silence, drain_typed, forget_typed, has_line, remember, restore, suspend};

#[cfg(not(unix))]
pub use elsewhere::{LineModes, Silence, drain_typed, forget_typed, has_line, remember, restore};

#[cfg(unix)]
mod unix {
    use std::sync::OnceLock;

    static MODES: OnceLock<libc::termios> = OnceLock::new();

    /// Colours and attributes off, cursor shown, bracketed paste off.
    const PLAIN: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?2004l";

    /// Most reads of a paste; one that never ends comes from a program.
    const MAX_DRAINED: usize = 1 << 16;

    /// Longest pause within a paste, in milliseconds.
    const DRAIN_MS: libc::c_int = 100;

    /// Stores the modes of the terminal on stdin, if there is one.
    pub fn remember() {
        if let Some(modes) = current() {
            let _ = MODES.set(modes);
        }
    }

    fn current() -> Option<libc::termios> {
        // SAFETY: `tcgetattr` writes the structure it is given, for which all zeros are a valid value.
        unsafe {
            let mut modes: libc::termios = std::mem::zeroed();
            (libc::tcgetattr(libc::STDIN_FILENO, &mut modes) == 0).then_some(modes)
        }
    }

    /// Restores the stored modes. Async-signal-safe. Does nothing without them, or in the background, where
    /// the terminal belongs to another process.
    pub fn restore() {
        let Some(modes) = MODES.get() else { return };
        // SAFETY: all calls are async-signal-safe; `modes` is not written to once it is set.
        unsafe {
            if libc::tcgetpgrp(libc::STDIN_FILENO) != libc::getpgrp() {
                return;
            }
            libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, modes);
            for stream in [libc::STDERR_FILENO, libc::STDOUT_FILENO] {
                if libc::isatty(stream) == 1 {
                    libc::write(stream, PLAIN.as_ptr().cast(), PLAIN.len());
                    break;
                }
            }
        }
    }

    /// Discards typed input that was not read.
    pub fn forget_typed() {
        // SAFETY: a plain call; it does nothing where stdin is no terminal.
        unsafe { libc::tcflush(libc::STDIN_FILENO, libc::TCIFLUSH) };
    }

    /// Waits up to 200 ms for a line or the end of input; a signal ends the wait with false.
    ///
    /// # Errors
    /// The system's.
    pub fn has_line() -> std::io::Result<bool> {
        let mut poll = libc::pollfd { fd: libc::STDIN_FILENO, events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` writes the structure it is given, which lives on this stack.
        match unsafe { libc::poll(&mut poll, 1, 200) } {
            0 => Ok(false),
            -1 => match std::io::Error::last_os_error() {
                error if error.kind() == std::io::ErrorKind::Interrupted => Ok(false),
                error => Err(error),
            },
            _ => Ok(true),
        }
    }

    /// Reads and discards input that is being typed or pasted, until a pause.
    pub fn drain_typed() {
        let _silence = Silence::begin();
        let mut bytes = [0_u8; 4096];
        for _ in 0..MAX_DRAINED {
            let mut poll = libc::pollfd { fd: libc::STDIN_FILENO, events: libc::POLLIN, revents: 0 };
            // SAFETY: both calls write only what they are given, which lives on this stack. In these modes `read` waits for a
            // byte, and `poll` has said that there is one.
            let num_read = unsafe {
                match libc::poll(&mut poll, 1, DRAIN_MS) {
                    1 => libc::read(libc::STDIN_FILENO, bytes.as_mut_ptr().cast(), bytes.len()),
                    _ => 0,
                }
            };
            if num_read <= 0 {
                return;
            }
        }
    }

    /// Stops the process, as the shell's Ctrl-Z asks, with the terminal's original modes; restores the
    /// current ones when it continues. Async-signal-safe.
    pub fn suspend() {
        let modes = current();
        restore();
        // SAFETY: async-signal-safe; returns when the process is continued.
        unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
        if let Some(modes) = &modes {
            set(modes);
        }
    }

    /// While it exists, typed input is not echoed into the answer. The input is kept for the next prompt,
    /// Enter included, and the keys that interrupt and suspend work as always.
    #[derive(Debug)]
    pub struct Silence(Option<libc::termios>);

    impl Silence {
        pub fn begin() -> Self {
            let before = current();
            if let Some(mut modes) = before {
                modes.c_lflag &= !(libc::ECHO | libc::ICANON);
                modes.c_iflag &= !libc::ICRNL;
                set(&modes);
            }
            Self(before)
        }
    }

    impl Drop for Silence {
        fn drop(&mut self) {
            if let Some(modes) = &self.0 {
                set(modes);
            }
        }
    }

    /// While it exists, the terminal has its original modes, in which a question is answered with a visible line.
    #[derive(Debug)]
    pub struct LineModes(Option<libc::termios>);

    impl LineModes {
        pub fn begin() -> Self {
            let before = current();
            restore();
            Self(before)
        }
    }

    impl Drop for LineModes {
        fn drop(&mut self) {
            if let Some(modes) = &self.0 {
                set(modes);
            }
        }
    }

    fn set(modes: &libc::termios) {
        // SAFETY: `tcsetattr` reads the structure it is given. A background process must not call it, or it is stopped.
        unsafe {
            if libc::tcgetpgrp(libc::STDIN_FILENO) == libc::getpgrp() {
                libc::tcsetattr(libc::STDIN_FILENO, libc::TCSADRAIN, modes);
            }
        }
    }
}

#[cfg(not(unix))]
mod elsewhere {
    pub fn drain_typed() {}

    pub fn forget_typed() {}

    /// Returns true: the read that follows waits for the line.
    ///
    /// # Errors
    /// None on this system.
    pub fn has_line() -> std::io::Result<bool> {
        Ok(true)
    }

    pub fn remember() {}

    pub fn restore() {}

    /// Does nothing: the modes are never changed on this system.
    #[derive(Debug)]
    pub struct LineModes(());

    impl LineModes {
        pub fn begin() -> Self {
            Self(())
        }
    }

    /// Does nothing: input cannot be hidden on this system.
    #[derive(Debug)]
    pub struct Silence(());

    impl Silence {
        pub fn begin() -> Self {
            Self(())
        }
    }
}
