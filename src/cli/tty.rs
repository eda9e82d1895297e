//! The terminal's modes: what they were when llmctl started, what they are while an answer is written, and their
//! return whatever ends the process.
//!
//! [`remember`] is called once; after it, [`restore`] may be called at any time, in a signal handler too. Line editing
//! sets and undoes its own modes (rustyline); this file only makes sure that they never outlive the process. Knows no
//! signal and no line.

#[cfg(unix)]
pub use unix::{Silence, drain_typed, forget_typed, remember, restore, suspend};

#[cfg(not(unix))]
pub use elsewhere::{Silence, drain_typed, forget_typed, remember, restore};

#[cfg(unix)]
mod unix {
    use std::sync::OnceLock;

    static MODES: OnceLock<libc::termios> = OnceLock::new();

    /// Colours and attributes off, cursor shown, bracketed paste off.
    const PLAIN: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?2004l";

    /// Reads of a paste at most: one that never ends is typed by a machine.
    const MAX_DRAINED: usize = 1 << 16;

    /// A paste has no pauses as long as this.
    const DRAIN_MS: libc::c_int = 100;

    /// Keeps the modes of the terminal on stdin, if there is one.
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

    /// Puts the remembered modes back. Async-signal-safe; does nothing without them, or in the background, where the
    /// terminal belongs to somebody else.
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

    /// Drops what was typed and nobody has read.
    pub fn forget_typed() {
        // SAFETY: a plain call; it does nothing where stdin is no terminal.
        unsafe { libc::tcflush(libc::STDIN_FILENO, libc::TCIFLUSH) };
    }

    /// Reads away what is being typed or pasted, until nothing comes for a moment.
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

    /// Stops the process, as the shell's Ctrl-Z asks, with the terminal as it was found; goes on with it as it is now.
    /// Async-signal-safe.
    pub fn suspend() {
        let modes = current();
        restore();
        // SAFETY: async-signal-safe; returns when the process is continued.
        unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
        if let Some(modes) = &modes {
            set(modes);
        }
    }

    /// While it lives, what is typed is not shown: it would stand in the middle of the answer. It is kept for the next
    /// prompt as it was typed, Enter included, and the keys that interrupt and suspend work as always.
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

    pub fn remember() {}

    pub fn restore() {}

    /// While it lives, what is typed is not shown; there is no way to ask for that here.
    #[derive(Debug)]
    pub struct Silence(());

    impl Silence {
        pub fn begin() -> Self {
            Self(())
        }
    }
}
