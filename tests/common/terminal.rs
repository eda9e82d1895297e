//! A command in a pseudo-terminal, for expectrl to talk to.
//!
//! Invariants: no other child of this process inherits a descriptor of the terminal (expectrl's own way of starting lets them,
//! and waits for them); the command is gone when its session is dropped.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use expectrl::process::NonBlocking;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::termios::{LocalModes, OptionalActions, Winsize};
use rustix::{fs, process, pty, termios};

pub type Session = expectrl::session::Session<InTerminal, Master>;

/// The command and where its terminal's size is set.
pub struct InTerminal {
    pub child: Child,
    terminal: OwnedFd,
}

/// The user's end: what is written here is typed, what is read was shown.
pub struct Master(File);

/// Starts a command with all three streams on a terminal of this width, which does not echo.
pub fn spawn(mut command: Command, columns: u16) -> io::Result<Session> {
    let flags = pty::OpenptFlags::RDWR | pty::OpenptFlags::NOCTTY;
    #[cfg(not(target_vendor = "apple"))]
    let flags = flags | pty::OpenptFlags::CLOEXEC;
    let master = pty::openpt(flags)?;
    #[cfg(target_vendor = "apple")] // which has no such flag
    rustix::io::fcntl_setfd(&master, rustix::io::FdFlags::CLOEXEC)?;
    pty::grantpt(&master)?;
    pty::unlockpt(&master)?;
    let name = pty::ptsname(&master, Vec::new())?;
    let slave = fs::open(&name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?;
    let mut modes = termios::tcgetattr(&slave)?;
    modes.local_modes.remove(LocalModes::ECHO);
    termios::tcsetattr(&slave, OptionalActions::Now, &modes)?;
    let terminal = master.try_clone()?;
    set_size(&terminal, columns, 30)?;
    command.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave);
    // SAFETY: two system calls, which are async-signal-safe.
    unsafe { command.pre_exec(take_terminal) };
    let child = command.spawn()?;
    Session::new(InTerminal { child, terminal }, Master(master.into()))
}

/// Makes stdin the terminal of a process group of its own.
fn take_terminal() -> io::Result<()> {
    process::setsid()?;
    Ok(process::ioctl_tiocsctty(rustix::stdio::stdin())?)
}

fn set_size(terminal: &OwnedFd, columns: u16, rows: u16) -> io::Result<()> {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(termios::tcsetwinsize(terminal, size)?)
}

impl InTerminal {
    pub fn set_size(&self, columns: u16, rows: u16) {
        set_size(&self.terminal, columns, rows).expect("a size");
    }

    pub fn signal(&self, signal: process::Signal) {
        process::kill_process(process::Pid::from_child(&self.child), signal)
            .expect("it has not been waited for");
    }
}

impl Drop for InTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Read for Master {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self.0.read(bytes) {
            // How Linux says that nobody is left at the other end.
            Err(error) if error.raw_os_error() == Some(Errno::IO.raw_os_error()) => Ok(0),
            read => read,
        }
    }
}

impl Write for Master {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl NonBlocking for Master {
    fn set_blocking(&mut self, on: bool) -> io::Result<()> {
        let mut flags = fs::fcntl_getfl(&self.0)?;
        flags.set(OFlags::NONBLOCK, !on);
        Ok(fs::fcntl_setfl(&self.0, flags)?)
    }
}
