//! The terminal's modes: remembers them at the start, changes them while an answer is written, and restores
//! them however the process ends. Keeps what is typed meanwhile.
//!
//! [`remember`] is called once; then [`restore`] may be called at any time, also in a signal handler. The
//! line editor (rustyline) sets and undoes its own modes; this file only ensures that they never outlive the
//! process. Knows no signal, and of what is typed only the bytes.

#[cfg(unix)]
pub use unix::{
    LineModes, Silence, drain_typed, forget_typed, has_line, remember, restore, suspend, take_typed,
};

#[cfg(not(unix))]
pub use elsewhere::{LineModes, Silence, drain_typed, forget_typed, has_line, remember, restore, take_typed};

#[cfg(unix)]
mod unix {
    use std::io::{self, PipeReader, PipeWriter};
    use std::os::fd::AsRawFd;
    use std::sync::OnceLock;
    use std::thread::{self, JoinHandle};
    use std::time::Duration;

    use parking_lot::Mutex;

    static MODES: OnceLock<libc::termios> = OnceLock::new();

    /// Colours and attributes off, cursor shown, bracketed paste off.
    const PLAIN: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?2004l";

    /// Bracketed paste on: the terminal sends the two below around what is pasted.
    const MARK_PASTES: &[u8] = b"\x1b[?2004h";
    const PASTE_BEGINS: &[u8] = b"\x1b[200~";
    const PASTE_ENDS: &[u8] = b"\x1b[201~";

    /// Most reads of a paste; one that never ends comes from a program.
    const MAX_DRAINED: usize = 1 << 16;

    /// Longest pause within a paste, in milliseconds: where it is discarded, where its end is marked, where it is not.
    const DRAIN_MS: libc::c_int = 100;
    const PASTE_MS: libc::c_int = 1000;
    const BURST_MS: libc::c_int = 30;

    /// Bytes that are kept of what is typed during an answer; more comes from a program.
    const MAX_TYPED: usize = 1 << 20;

    /// Typed during answers, and not taken yet.
    static TYPED: Mutex<Vec<u8>> = Mutex::new(Vec::new());

    /// The thread that reads what is typed, and the pipe whose end stops it.
    static READER: Mutex<Option<(PipeWriter, JoinHandle<()>)>> = Mutex::new(None);

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

    /// Returns false in the background, where the terminal belongs to another process, and reading or changing it stops this
    /// one. Async-signal-safe.
    fn is_foreground() -> bool {
        // SAFETY: both calls are async-signal-safe and take no memory.
        unsafe { libc::tcgetpgrp(libc::STDIN_FILENO) == libc::getpgrp() }
    }

    /// Restores the stored modes. Async-signal-safe. Does nothing without them, or in the background.
    pub fn restore() {
        let Some(modes) = MODES.get().filter(|_| is_foreground()) else { return };
        // SAFETY: async-signal-safe; `modes` is not written to once it is set.
        unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, modes) };
        show(PLAIN);
    }

    /// Writes to the terminal, wherever stdout goes. Async-signal-safe.
    fn show(bytes: &[u8]) {
        let streams = [libc::STDERR_FILENO, libc::STDOUT_FILENO];
        // SAFETY: both calls are async-signal-safe; `write` reads `bytes`.
        unsafe {
            if let Some(&stream) = streams.iter().find(|stream| libc::isatty(**stream) == 1) {
                libc::write(stream, bytes.as_ptr().cast(), bytes.len());
            }
        }
    }

    /// Discards typed input that was not read.
    pub fn forget_typed() {
        // SAFETY: a plain call; it does nothing where stdin is no terminal.
        unsafe { libc::tcflush(libc::STDIN_FILENO, libc::TCIFLUSH) };
    }

    /// Returns the bytes that were typed during answers, and keeps them no longer.
    pub fn take_typed() -> Vec<u8> {
        std::mem::take(&mut *TYPED.lock())
    }

    /// Waits so many milliseconds for one of them, for ever if the number is negative; a signal ends the wait with false.
    fn poll(watched: &mut [libc::pollfd], ms: libc::c_int) -> io::Result<bool> {
        // SAFETY: `poll` writes the structures it is given, as many as there are.
        match unsafe { libc::poll(watched.as_mut_ptr(), watched.len() as libc::nfds_t, ms) } {
            0 => Ok(false),
            -1 => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => Ok(false),
                error => Err(error),
            },
            _ => Ok(true),
        }
    }

    fn readable(fd: libc::c_int) -> libc::pollfd {
        libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
    }

    /// Waits up to 200 ms for a line or the end of input; a signal ends the wait with false.
    ///
    /// # Errors
    /// The system's.
    pub fn has_line() -> io::Result<bool> {
        poll(&mut [readable(libc::STDIN_FILENO)], 200)
    }

    /// Reads what there is of typed input, at most so much. In the modes of [`Modes::quiet`] it waits for a byte.
    fn read_some(bytes: &mut [u8; 4096]) -> usize {
        // SAFETY: `read` writes at most as many bytes as it is told.
        let count = unsafe { libc::read(libc::STDIN_FILENO, bytes.as_mut_ptr().cast(), bytes.len()) };
        usize::try_from(count).unwrap_or(0)
    }

    /// Reads and discards input that is being typed or pasted, until a pause.
    pub fn drain_typed() {
        let _quiet = Modes::quiet();
        let has_more = || poll(&mut [readable(libc::STDIN_FILENO)], DRAIN_MS).unwrap_or(false);
        let mut bytes = [0; 4096];
        for _ in 0..MAX_DRAINED {
            if !has_more() || read_some(&mut bytes) == 0 {
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
            // Only where the lines of a paste are told apart are keys read one by one.
            if modes.c_lflag & libc::ICANON == 0 {
                show(MARK_PASTES);
            }
        }
    }

    /// The terminal's modes before a change, which its end restores.
    #[derive(Debug)]
    struct Modes(Option<libc::termios>);

    impl Modes {
        /// Input is not echoed, comes key by key, and Enter as itself; the keys that interrupt and suspend work, and discard nothing.
        fn quiet() -> Self {
            let before = current();
            if let Some(mut modes) = before {
                modes.c_lflag &= !(libc::ECHO | libc::ICANON);
                modes.c_lflag |= libc::NOFLSH;
                modes.c_iflag &= !libc::ICRNL;
                set(&modes);
            }
            Self(before)
        }

        /// Those of the beginning.
        fn original() -> Self {
            let before = current();
            restore();
            Self(before)
        }
    }

    impl Drop for Modes {
        fn drop(&mut self) {
            if let Some(modes) = &self.0 {
                set(modes);
            }
        }
    }

    fn set(modes: &libc::termios) {
        if is_foreground() {
            // SAFETY: `tcsetattr` reads the structure it is given.
            unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSADRAIN, modes) };
        }
    }

    /// Starts to read what is typed. Otherwise the system's buffer of 4,096 bytes would be full some time, and then the terminal
    /// takes no key any more, not even Ctrl-C. Does nothing where the line editor could not show what was typed.
    fn start_reading() {
        let term = std::env::var("TERM").unwrap_or_default();
        if current().is_none() || ["dumb", "cons25", "emacs"].contains(&term.as_str()) {
            return;
        }
        let Ok((stopped, stop)) = io::pipe() else { return };
        if let Ok(thread) = thread::Builder::new().spawn(move || read_typed(&stopped)) {
            *READER.lock() = Some((stop, thread));
            show(MARK_PASTES);
        }
    }

    /// Returns when all is read that was typed until now, a paste to its end; false if nothing read.
    fn stop_reading() -> bool {
        let Some((stop, thread)) = READER.lock().take() else { return false };
        drop(stop);
        let _ = thread.join();
        show(PLAIN);
        true
    }

    /// Keeps what is typed, until the other end of the pipe is gone and nothing more comes.
    fn read_typed(stopped: &PipeReader) {
        let (mut is_stopped, mut pause, mut bytes) = (false, 0, [0; 4096]);
        loop {
            let mut watched = [readable(libc::STDIN_FILENO), readable(stopped.as_raw_fd())];
            let (count, ms) = if is_stopped { (1, pause) } else { (2, -1) };
            let is_woken = poll(&mut watched[..count], ms).unwrap_or(false);
            let is_background = !is_foreground();
            if is_stopped && (!is_woken || is_background) {
                return;
            }
            is_stopped |= watched[1].revents != 0;
            if is_background {
                thread::sleep(Duration::from_millis(100));
            } else if watched[0].revents != 0 {
                match read_some(&mut bytes) {
                    0 => return, // the terminal is gone
                    count => pause = if keep(&bytes[..count]) { PASTE_MS } else { BURST_MS },
                }
            }
        }
    }

    /// Returns whether they end within a paste.
    fn keep(bytes: &[u8]) -> bool {
        let mut typed = TYPED.lock();
        let room = MAX_TYPED - typed.len();
        typed.extend(&bytes[..bytes.len().min(room)]);
        let last = |mark: &[u8]| typed.windows(mark.len()).rposition(|window| window == mark);
        last(PASTE_BEGINS) > last(PASTE_ENDS)
    }

    /// While it exists, typed input is not echoed into the answer, but kept for [`take_typed`]; the keys that interrupt and
    /// suspend work as always. At most one exists.
    #[derive(Debug)]
    pub struct Silence {
        _modes: Modes,
    }

    impl Silence {
        pub fn begin() -> Self {
            let silence = Self { _modes: Modes::quiet() };
            start_reading();
            silence
        }
    }

    impl Drop for Silence {
        fn drop(&mut self) {
            stop_reading();
        }
    }

    /// While it exists, the terminal has its original modes, in which a question is answered with a visible line, and nothing
    /// else reads it.
    #[derive(Debug)]
    pub struct LineModes {
        was_reading: bool,
        _modes: Modes,
    }

    impl LineModes {
        pub fn begin() -> Self {
            Self { was_reading: stop_reading(), _modes: Modes::original() }
        }
    }

    impl Drop for LineModes {
        fn drop(&mut self) {
            if self.was_reading {
                start_reading();
            }
        }
    }
}

#[cfg(not(unix))]
mod elsewhere {
    pub fn drain_typed() {}

    /// Returns nothing: what is typed during an answer stays in the console's own buffer, which holds it all.
    pub fn take_typed() -> Vec<u8> {
        Vec::new()
    }

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
