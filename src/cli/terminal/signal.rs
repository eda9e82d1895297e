//! The only owner of SIGINT, SIGTERM, SIGHUP, SIGTSTP and SIGXFSZ in the process.
//!
//! Outside a [`Graceful`] section a signal ends the process at once with 128 + its number, as an unhandled
//! one does in a shell. Inside, the first signal is recorded for the loop to see and the second ends the
//! process; in a conversation no SIGINT does. A signal that was ignored when llmctl started (nohup, a
//! script's background job) stays ignored. The terminal's modes are restored and process groups of
//! [`Companion`]s are ended before the process ends. SIGXFSZ does nothing: a write beyond the limit on file sizes
//! (`ulimit -f`) fails with an error of its own. Knows nothing of the work that is stopped.
//!
//! Windows has Ctrl-C and Ctrl-Break alone, which count as SIGINT, and no companions.

#[cfg(unix)]
use std::io::Read;
#[cfg(unix)]
use std::os::fd::IntoRawFd;
#[cfg(unix)]
use std::sync::atomic::AtomicI64;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
#[cfg(unix)]
use std::thread;

#[cfg(windows)]
use parking_lot::Mutex;

#[cfg(unix)]
use super::tty;

/// One of the constants below.
static MANNER: AtomicU8 = AtomicU8::new(ABRUPT);
const ABRUPT: u8 = 0;
const GRACEFUL: u8 = 1;
const PATIENT: u8 = 2;
const AT_PROMPT: u8 = 3;
static RECEIVED: AtomicI32 = AtomicI32::new(0);
#[cfg(unix)]
static RECEIVED_AT_MS: AtomicI64 = AtomicI64::new(0);
/// Write end of a pipe for waiting threads, which gets a byte at the first signal; negative without one.
#[cfg(unix)]
static WAKE: AtomicI32 = AtomicI32::new(-1);

/// The function that [`Graceful::on_signal`] was given, until the first signal calls it with its number.
#[cfg(windows)]
static TELL: Mutex<Option<Box<dyn FnOnce(u8) + Send>>> = Mutex::new(None);
#[cfg(windows)]
const SIGINT: i32 = 2;

/// Process groups that end with this process when a signal ends it; 0 where there is none.
static COMPANIONS: [AtomicI32; 64] = [const { AtomicI32::new(0) }; 64];

/// Milliseconds that they have after SIGTERM.
#[cfg(unix)]
const COMPANION_GRACE_MS: libc::c_int = 200;

/// Two signals closer than this count as one: `timeout` signals the process and then its whole group.
#[cfg(unix)]
const SAME_WISH_MS: i64 = 200;

/// While it exists, a signal that ends this process ends a process group too. Its holder drops it before it waits for the leader.
#[derive(Debug)]
pub struct Companion {
    group: i32,
}

impl Companion {
    /// Returns the companion for a process group. Without room in the table, an orderly end is the only one that it gets.
    pub fn of_group(leader: u32) -> Self {
        let group = i32::try_from(leader).unwrap_or(0);
        let free =
            |slot: &&AtomicI32| slot.compare_exchange(0, group, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        let _ = COMPANIONS.iter().find(free); // as said
        Self { group }
    }
}

impl Drop for Companion {
    fn drop(&mut self) {
        let taken = |slot: &&AtomicI32| {
            slot.compare_exchange(self.group, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        let _ = COMPANIONS.iter().find(taken); // one without room has none
    }
}

/// While it exists, the first signal is left to the holder. At most one exists.
#[derive(Debug)]
pub struct Graceful(());

impl Graceful {
    pub fn begin() -> Self {
        MANNER.store(GRACEFUL, Ordering::SeqCst);
        Self(())
    }

    /// Starts a conversation: no number of SIGINTs ends the process, because Ctrl-C stops the current work,
    /// which the two calls below announce.
    pub fn begin_conversation() -> Self {
        Self(())
    }

    /// Starts work that a signal can stop; earlier signals are forgotten.
    pub fn work(&self) {
        RECEIVED.store(0, Ordering::SeqCst);
        MANNER.store(PATIENT, Ordering::SeqCst);
    }

    /// Ends the work: a signal now ends the process at once. With a line editor, SIGINT belongs to the editor
    /// while it reads, and is ignored around it.
    pub fn wait(&self, has_editor: bool) {
        MANNER.store(if has_editor { AT_PROMPT } else { ABRUPT }, Ordering::SeqCst);
    }

    /// Returns the signal that was received, if any.
    pub fn received(&self) -> Option<u8> {
        received()
    }

    /// Calls `tell` on a thread of its own when a signal comes. Once per process.
    ///
    /// # Errors
    /// The system's if it cannot create a pipe or thread.
    #[cfg(unix)]
    pub fn on_signal(&self, tell: impl FnOnce(u8) + Send + 'static) -> std::io::Result<()> {
        let (mut reader, writer) = std::io::pipe()?;
        // Open for as long as the process lives, because a handler may be about to write.
        WAKE.store(writer.into_raw_fd(), Ordering::SeqCst);
        if self.received().is_some() {
            wake(); // the signal came before the pipe existed
        }
        let wait = move || {
            let woken = reader.read(&mut [0]).is_ok_and(|count| count > 0);
            if let Some(number) = received().filter(|_| woken) {
                tell(number);
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(wait).map(drop)
    }

    #[cfg(windows)]
    pub fn on_signal(&self, tell: impl FnOnce(u8) + Send + 'static) -> std::io::Result<()> {
        *TELL.lock() = Some(Box::new(tell));
        if self.received().is_some() {
            wake(); // the signal came before
        }
        Ok(())
    }
}

/// Reads the answer to a question with the line editor, as at the prompt: SIGINT is the editor's, another signal ends the process.
pub fn at_question<T>(read: impl FnOnce() -> T) -> T {
    let manner = MANNER.swap(AT_PROMPT, Ordering::SeqCst);
    let answer = read();
    MANNER.store(manner, Ordering::SeqCst);
    answer
}

fn received() -> Option<u8> {
    u8::try_from(RECEIVED.load(Ordering::SeqCst)).ok().filter(|&number| number != 0)
}

impl Drop for Graceful {
    fn drop(&mut self) {
        MANNER.store(ABRUPT, Ordering::SeqCst);
    }
}

/// Installs the handlers of all five. Called once, before any long work.
#[cfg(unix)]
pub fn install() {
    let handlers: [(_, extern "C" fn(libc::c_int)); 5] = [
        (libc::SIGINT, on_signal),
        (libc::SIGTERM, on_signal),
        (libc::SIGHUP, on_signal),
        (libc::SIGTSTP, on_stop),
        (libc::SIGXFSZ, on_file_limit),
    ];
    for (number, handler) in handlers {
        // SAFETY: `sigaction` reads and writes the structures it is given, which live on this stack; zeroed is a
        // valid `sigaction` (default disposition, empty mask). The handler calls async-signal-safe functions only.
        unsafe {
            let mut current: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(number, std::ptr::null(), &mut current) == 0
                && current.sa_sigaction == libc::SIG_IGN
            {
                continue;
            }
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_RESTART;
            libc::sigemptyset(&mut action.sa_mask);
            libc::sigaction(number, &action, std::ptr::null_mut());
        }
    }
}

/// Installs the handler of Ctrl-C and Ctrl-Break, which runs on a thread of its own. Without it the system ends the process.
#[cfg(windows)]
pub fn install() {
    let _ = ctrlc::set_handler(on_interrupt); // fails if it is called twice
}

#[cfg(windows)]
fn on_interrupt() {
    match MANNER.load(Ordering::SeqCst) {
        AT_PROMPT => {}
        // One Ctrl-C or many: the work is stopped once.
        PATIENT => RECEIVED.store(SIGINT, Ordering::SeqCst),
        GRACEFUL if RECEIVED.swap(SIGINT, Ordering::SeqCst) == 0 => wake(),
        _ => std::process::exit(128 + SIGINT),
    }
}

#[cfg(windows)]
fn wake() {
    let tell = TELL.lock().take();
    if let Some((tell, number)) = tell.zip(received()) {
        tell(number);
    }
}

#[cfg(unix)]
extern "C" fn on_stop(_: libc::c_int) {
    tty::suspend();
}

/// Does nothing. Other programs that llmctl starts do not inherit it, as they would an ignored signal.
#[cfg(unix)]
extern "C" fn on_file_limit(_: libc::c_int) {}

#[cfg(unix)]
extern "C" fn on_signal(number: libc::c_int) {
    let now = now_ms();
    let manner = MANNER.load(Ordering::SeqCst);
    if manner == AT_PROMPT && number == libc::SIGINT {
        return;
    }
    if manner == PATIENT && number == libc::SIGINT {
        // Keep a SIGTERM that was not yet seen.
        let _ = RECEIVED.compare_exchange(0, number, Ordering::SeqCst, Ordering::SeqCst);
        return;
    }
    let is_abrupt = manner == ABRUPT || manner == AT_PROMPT;
    let earlier = if is_abrupt { 0 } else { RECEIVED.swap(number, Ordering::SeqCst) };
    let is_first = earlier == 0 || (manner == PATIENT && earlier == libc::SIGINT);
    if !is_abrupt && is_first {
        RECEIVED_AT_MS.store(now, Ordering::SeqCst);
        wake();
    } else if is_abrupt || now - RECEIVED_AT_MS.load(Ordering::SeqCst) > SAME_WISH_MS {
        tty::restore();
        end_companions();
        // SAFETY: `_exit` is async-signal-safe and does not return.
        unsafe { libc::_exit(128 + number) }
    }
}

/// Ends the process groups of companions: asks them, waits a little, and kills them. Async-signal-safe.
#[cfg(unix)]
fn end_companions() {
    let signal_all = |number| {
        let groups = COMPANIONS.iter().map(|slot| slot.load(Ordering::SeqCst)).filter(|group| *group > 1);
        // SAFETY: async-signal-safe; a group that has ended is no harm, because its companion is dropped before its number is free.
        groups.map(|group| unsafe { libc::kill(-group, number) }).filter(|sent| *sent == 0).count()
    };
    if signal_all(libc::SIGTERM) > 0 {
        // SAFETY: async-signal-safe; it watches no descriptor.
        unsafe { libc::poll(std::ptr::null_mut(), 0, COMPANION_GRACE_MS) };
        signal_all(libc::SIGKILL);
    }
}

/// Wakes the waiting thread. Async-signal-safe: a byte fits into an empty pipe, so this neither waits nor
/// fails, and errno is unchanged.
#[cfg(unix)]
fn wake() {
    let pipe = WAKE.load(Ordering::SeqCst);
    if pipe >= 0 {
        // SAFETY: `write` is async-signal-safe; the byte lives on this stack and the descriptor is never closed.
        unsafe { libc::write(pipe, [1_u8].as_ptr().cast(), 1) };
    }
}

#[cfg(unix)]
fn now_ms() -> i64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: async-signal-safe; writes the structure it is given. Cannot fail for CLOCK_MONOTONIC.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    // The fields are narrower on some targets.
    #[allow(clippy::unnecessary_cast)]
    let ms = now.tv_sec as i64 * 1000 + now.tv_nsec as i64 / 1_000_000;
    ms
}
