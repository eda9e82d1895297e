//! The append-only file of a session: framed lines with checksums, and recovery after a crash.
//!
//! A line is `{"crc32":"XXXXXXXX","record":BODY}` and a line feed. The checksum covers the previous line's
//! checksum (its eight digits; none for the first line) and BODY, so a line that is changed, lost, doubled or
//! moved is detected. [`Log::append`] returns when the line is on disk. A failed write is undone before the
//! next one.
//!
//! Only the end of the file can be torn, by a crash during a write that was never acknowledged. A torn line
//! has no line feed, or NULs where a block never reached the disk. Everything else that is wrong is damage,
//! which is an error.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Write};

use super::sealing::{SessionSeal, header_of};
use llmctl_base::vault::Vault;

const BEFORE_CRC: &str = r#"{"crc32":""#;
const AFTER_CRC: &str = r#"","record":"#;
const AFTER_BODY: &str = "}";

/// Operations of an append-only file; tests inject faults here.
pub trait LogFile {
    /// Appends bytes.
    ///
    /// # Errors
    /// Errors of the file; part of `bytes` may have been written.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Syncs to disk.
    ///
    /// # Errors
    /// Errors of the file.
    fn sync(&mut self) -> io::Result<()>;

    /// Cuts the file.
    ///
    /// # Errors
    /// Errors of the file.
    fn truncate(&mut self, len: u64) -> io::Result<()>;

    /// Returns the length in bytes.
    ///
    /// # Errors
    /// Errors of the file.
    fn num_bytes(&self) -> io::Result<u64>;
}

impl LogFile for File {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }

    fn truncate(&mut self, len: u64) -> io::Result<()> {
        self.set_len(len)
    }

    fn num_bytes(&self) -> io::Result<u64> {
        self.metadata().map(|metadata| metadata.len())
    }
}

/// Returns one line per body behind a line with the checksum `chain`, and the checksum of the last one.
pub fn lines(mut chain: Option<u32>, bodies: &[String]) -> (String, Option<u32>) {
    let mut lines = String::new();
    for body in bodies {
        let crc = line_crc(chain, body);
        lines.push_str(&format!("{BEFORE_CRC}{crc:08x}{AFTER_CRC}{body}{AFTER_BODY}\n"));
        chain = Some(crc);
    }
    (lines, chain)
}

/// Returns a transcript with plain records, for readers of damaged and later files: lines that cannot be opened stay as they are, and
/// checksums are not those of the records.
///
/// # Errors
/// A sentence that continues "the session is encrypted, and".
pub fn plain<'a>(transcript: &'a [u8], vault: Option<&Vault>) -> Result<Cow<'a, [u8]>, String> {
    let mut lines = transcript.split_inclusive(|byte| *byte == b'\n').enumerate();
    let body = |line: &'a [u8]| record_of(str::from_utf8(line).ok()?.trim_end_matches('\n'));
    let first = lines.next().and_then(|(_, line)| header_of(body(line)?));
    let Some(header) = first else { return Ok(Cow::Borrowed(transcript)) };
    let seal = SessionSeal::find(&header, vault)?;
    let mut plain = Vec::with_capacity(transcript.len());
    for (at, line) in lines {
        match body(line).and_then(|body| seal.open(at, body)) {
            Some(body) => plain.extend_from_slice(unchecked_line(&body).as_bytes()),
            None => plain.extend_from_slice(line),
        }
    }
    Ok(Cow::Owned(plain))
}

/// Returns the record of a line, without its line feed; the checksum is not compared.
fn record_of(line: &str) -> Option<&str> {
    let rest = line.strip_prefix(BEFORE_CRC)?.split_at_checked(8)?.1;
    rest.strip_prefix(AFTER_CRC)?.strip_suffix(AFTER_BODY)
}

/// Returns a line whose checksum stands for none.
fn unchecked_line(body: &str) -> String {
    format!("{BEFORE_CRC}{:08x}{AFTER_CRC}{body}{AFTER_BODY}\n", 0)
}

/// Writer at the end of a log.
#[derive(Debug)]
pub struct Log<F> {
    file: F,
    /// Whole lines on disk.
    num_lines: usize,
    /// `None` leaves records plain.
    seal: Option<SessionSeal>,
    /// Bytes of whole lines on disk.
    len: u64,
    /// Checksum of the last line.
    chain: Option<u32>,
    /// A failed write may have left bytes after `len`.
    has_debris: bool,
}

impl<F: LogFile> Log<F> {
    /// Creates a log on an empty file.
    pub fn new(file: F) -> Self {
        Self { file, num_lines: 0, seal: None, len: 0, chain: None, has_debris: false }
    }

    /// Seals new lines.
    pub fn with_seal(self, seal: Option<SessionSeal>) -> Self {
        Self { seal, ..self }
    }

    pub fn seal(&self) -> Option<&SessionSeal> {
        self.seal.as_ref()
    }

    /// Returns the bytes of the whole lines.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Continues a scanned log. Cuts off a torn end, or adds the last line's missing line feed.
    ///
    /// # Errors
    /// Errors of the file.
    pub fn resume(file: F, scan: &LogScan<'_>) -> io::Result<Self> {
        let mut log = Self::new(file);
        (log.num_lines, log.len, log.chain) = (scan.bodies.len(), scan.intact_bytes, scan.chain);
        match scan.end {
            LogEnd::Clean => {}
            LogEnd::Torn { .. } => log.take_back()?,
            LogEnd::NoLineFeed => {
                log.take_back()?;
                log.file.append(b"\n")?;
                log.file.sync()?;
                log.len += 1;
            }
        }
        Ok(log)
    }

    /// Appends one line per body, all or none, and syncs.
    ///
    /// # Errors
    /// Errors of the file. The log is unchanged, or is restored before the next write. An error if another process has
    /// written to the file: a network file system may have given the lock of a host that it lost to another.
    pub fn append(&mut self, bodies: &[String]) -> io::Result<()> {
        if self.has_debris {
            self.take_back()?;
        }
        self.check_len()?;
        let sealed = self.seal.as_ref().map(|seal| seal.lines(self.num_lines, bodies));
        let bodies = sealed.as_deref().unwrap_or(bodies);
        let (bytes, chain) = lines(self.chain, bodies);
        let written = self.file.append(bytes.as_bytes()).and_then(|()| self.file.sync());
        if let Err(error) = written {
            // Also after a failed sync: what is on disk then is unknown, and a later sync would not report
            // it.
            self.has_debris = true;
            drop(self.take_back()); // retried before the next line
            return Err(error);
        }
        self.len += bytes.len() as u64;
        self.num_lines += bodies.len();
        self.chain = chain;
        Ok(())
    }

    fn check_len(&self) -> io::Result<()> {
        let (num_bytes, expected) = (self.file.num_bytes()?, self.len);
        if num_bytes == expected {
            return Ok(());
        }
        let message = format!(
            "another process has written to the file: it has {num_bytes} bytes instead of {expected}"
        );
        Err(io::Error::other(message))
    }

    fn take_back(&mut self) -> io::Result<()> {
        self.file.truncate(self.len)?;
        self.file.sync()?;
        self.has_debris = false;
        Ok(())
    }
}

/// Result of scanning a log.
#[derive(Debug)]
pub struct LogScan<'a> {
    /// Bodies of the intact lines, in order.
    pub bodies: Vec<&'a str>,
    pub end: LogEnd,
    /// First damaged line; lines after it were not read.
    pub damage: Option<Damage>,
    /// Length of the intact lines in bytes.
    intact_bytes: u64,
    chain: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogEnd {
    /// The last line is whole.
    Clean,
    /// The last line is incomplete.
    Torn { num_bytes: usize },
    /// The last line lacks only its line feed.
    NoLineFeed,
}

/// Number of the damaged line, from 1, and a description.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    pub line: usize,
    pub message: String,
}

/// Splits a log into its bodies, up to the first line that is damaged or torn.
pub fn scan(bytes: &[u8]) -> LogScan<'_> {
    let mut scan =
        LogScan { bodies: Vec::new(), end: LogEnd::Clean, damage: None, intact_bytes: 0, chain: None };
    let mut rest = bytes;
    while let Some(end) = rest.iter().position(|&b| b == b'\n') {
        match unframe(scan.chain, &rest[..end]) {
            Ok((body, crc)) => scan.accept(body, crc, end + 1),
            Err(_) if rest[end + 1..].iter().all(|&b| b == 0) && has_hole(&rest[..end]) => break,
            Err(message) => {
                scan.damage = Some(Damage { line: scan.bodies.len() + 1, message: message.to_owned() });
                return scan;
            }
        }
        rest = &rest[end + 1..];
    }
    scan.read_tail(rest);
    scan
}

impl<'a> LogScan<'a> {
    fn accept(&mut self, body: &'a str, crc: u32, num_bytes: usize) {
        self.bodies.push(body);
        self.chain = Some(crc);
        self.intact_bytes += num_bytes as u64;
    }

    /// Reads the bytes after the last line feed. The line feed may be missing or replaced by another byte.
    fn read_tail(&mut self, tail: &'a [u8]) {
        let Some((_, all_but_one)) = tail.split_last() else { return };
        for line in [tail, all_but_one] {
            if let Ok((body, crc)) = unframe(self.chain, line) {
                self.accept(body, crc, line.len());
                self.end = LogEnd::NoLineFeed;
                return;
            }
        }
        self.end = LogEnd::Torn { num_bytes: tail.len() };
    }
}

/// Returns whether a block of the line never reached the disk. A single NUL may be a flipped bit; a hole is
/// at least a sector long, or as long as the line's part of it.
fn has_hole(line: &[u8]) -> bool {
    line.windows(8).any(|window| window.iter().all(|&b| b == 0))
}

/// Parses a line into body and checksum. Accepts exactly the frame that `append` writes.
fn unframe(chain: Option<u32>, line: &[u8]) -> Result<(&str, u32), &'static str> {
    let line = str::from_utf8(line).map_err(|_| "is not UTF-8")?;
    let not_a_line = "is not a line of a session";
    let rest = line.strip_prefix(BEFORE_CRC).ok_or(not_a_line)?;
    let (digits, rest) = rest.split_at_checked(8).ok_or(not_a_line)?;
    let body =
        rest.strip_prefix(AFTER_CRC).and_then(|rest| rest.strip_suffix(AFTER_BODY)).ok_or(not_a_line)?;
    let crc = line_crc(chain, body);
    if digits == format!("{crc:08x}") { Ok((body, crc)) } else { Err("the checksum is wrong") }
}

fn line_crc(chain: Option<u32>, body: &str) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    if let Some(crc) = chain {
        hasher.update(format!("{crc:08x}").as_bytes());
    }
    hasher.update(body.as_bytes());
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk of `room` bytes that can also refuse to sync or truncate.
    #[derive(Debug, Default)]
    struct Disk {
        bytes: Vec<u8>,
        room: usize,
        fail_syncs: usize,
        fail_truncates: usize,
    }

    impl LogFile for Disk {
        fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
            let fits = bytes.len().min(self.room - self.bytes.len());
            self.bytes.extend_from_slice(&bytes[..fits]);
            if fits == bytes.len() { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
        }

        fn sync(&mut self) -> io::Result<()> {
            take(&mut self.fail_syncs)
        }

        fn truncate(&mut self, len: u64) -> io::Result<()> {
            take(&mut self.fail_truncates)?;
            self.bytes.truncate(len as usize);
            Ok(())
        }

        fn num_bytes(&self) -> io::Result<u64> {
            Ok(self.bytes.len() as u64)
        }
    }

    fn take(failures: &mut usize) -> io::Result<()> {
        match failures.checked_sub(1) {
            Some(left) => {
                *failures = left;
                Err(io::Error::other("no luck"))
            }
            None => Ok(()),
        }
    }

    fn body(n: usize) -> String {
        format!(r#"{{"n":{n},"text":"zwölf € \n"}}"#)
    }

    fn log_of(lines: usize) -> Log<Disk> {
        let mut log = Log::new(Disk { room: 1 << 20, ..Disk::default() });
        for n in 0..lines {
            log.append(&[body(n)]).expect("room enough");
        }
        log
    }

    /// Ends of the lines, including the start of the file.
    fn boundaries(bytes: &[u8]) -> Vec<usize> {
        let ends = bytes.iter().enumerate().filter(|(_, b)| **b == b'\n').map(|(at, _)| at + 1);
        std::iter::once(0).chain(ends).collect()
    }

    #[test]
    fn a_checksum_is_the_catalogued_crc32() {
        assert_eq!(line_crc(None, "123456789"), 0xCBF4_3926);
        assert_eq!(line_crc(Some(0x1234_5678), "9"), 0xCBF4_3926, "the digits of the line before come first");
    }

    #[test]
    fn lines_come_back_as_they_went() {
        let log = log_of(5);
        let scan = scan(&log.file.bytes);
        assert_eq!(scan.bodies, (0..5).map(body).collect::<Vec<_>>());
        assert_eq!((scan.end, scan.damage), (LogEnd::Clean, None));
        for line in str::from_utf8(&log.file.bytes).expect("text").lines() {
            let line: serde_json::Value = serde_json::from_str(line).expect("each line is JSON");
            assert!(line["record"]["n"].is_number());
        }
    }

    #[test]
    fn a_cut_anywhere_keeps_every_whole_line_and_the_log_goes_on() {
        let whole = log_of(4).file.bytes;
        let ends = boundaries(&whole);
        for cut in 0..=whole.len() {
            let bytes = whole[..cut].to_vec();
            let scan = scan(&bytes);
            let all_but_feed = ends.contains(&(cut + 1)) && cut + 1 > ends[1] - 1;
            let kept = ends.iter().filter(|end| **end <= cut).count() - 1 + usize::from(all_but_feed);
            assert_eq!(scan.damage, None, "cut at {cut}");
            assert_eq!(scan.bodies, (0..kept).map(body).collect::<Vec<_>>(), "cut at {cut}");
            let torn = if all_but_feed || ends.contains(&cut) { 0 } else { cut - ends[kept] };
            let end = match torn {
                0 if all_but_feed => LogEnd::NoLineFeed,
                0 => LogEnd::Clean,
                num_bytes => LogEnd::Torn { num_bytes },
            };
            assert_eq!(scan.end, end, "cut at {cut}");
            let file = Disk { bytes: bytes.clone(), room: 1 << 20, ..Disk::default() };
            let mut log = Log::resume(file, &scan).expect("a healthy disk");
            (kept..4).for_each(|n| log.append(&[body(n)]).expect("room enough"));
            assert_eq!(log.file.bytes, whole, "cut at {cut}");
        }
    }

    #[test]
    fn no_flipped_bit_passes_and_nothing_before_it_is_lost() {
        let whole = log_of(3).file.bytes;
        let ends = boundaries(&whole);
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << bit;
                let scan = scan(&bytes);
                let line = ends.iter().filter(|end| **end <= at).count();
                if at == whole.len() - 1 {
                    assert_eq!(
                        (scan.bodies.len(), scan.end),
                        (3, LogEnd::NoLineFeed),
                        "bit {bit} of the last byte"
                    );
                    let repaired =
                        Log::resume(Disk { bytes: bytes.clone(), room: 1 << 20, ..Disk::default() }, &scan);
                    assert_eq!(repaired.expect("a healthy disk").file.bytes, whole);
                    continue;
                }
                assert_eq!(scan.bodies.len(), line - 1, "bit {bit} of byte {at}");
                assert_eq!(scan.damage.map(|damage| damage.line), Some(line), "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn lines_lost_doubled_or_swapped_are_damage() {
        let whole = log_of(4).file.bytes;
        let lines: Vec<&[u8]> = whole.split_inclusive(|&b| b == b'\n').collect();
        for (order, damaged_line) in
            [(vec![0, 2, 3], 2), (vec![0, 1, 1, 2], 3), (vec![0, 2, 1, 3], 2), (vec![1], 1)]
        {
            let bytes = order.iter().map(|&n| lines[n]).collect::<Vec<_>>().concat();
            let scan = scan(&bytes);
            assert_eq!(scan.damage.map(|damage| damage.line), Some(damaged_line), "{order:?}");
        }
    }

    #[test]
    fn blocks_that_never_reached_the_disk_are_torn_only_at_the_end() {
        let whole = log_of(3).file.bytes;
        let ends = boundaries(&whole);
        let mut bytes = whole.clone();
        bytes[ends[2] + 20..].fill(0);
        assert_eq!(scan(&bytes).end, LogEnd::Torn { num_bytes: whole.len() - ends[2] });
        let mut bytes = whole.clone();
        bytes[ends[2] + 20..whole.len() - 3].fill(0); // the line feed reached the disk
        assert_eq!(scan(&bytes).end, LogEnd::Torn { num_bytes: whole.len() - ends[2] });
        let mut bytes = whole.clone();
        bytes[ends[1] + 20..ends[2] - 3].fill(0);
        assert_eq!(scan(&bytes).damage.map(|damage| damage.line), Some(2));
    }

    #[test]
    fn a_full_disk_at_any_byte_takes_the_line_back() {
        let whole = log_of(3).file.bytes;
        let ends = boundaries(&whole);
        for room in ends[2]..whole.len() {
            let mut log = log_of(2);
            log.file.room = room;
            let error = log.append(&[body(2)]).expect_err("no room");
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            assert_eq!(log.file.bytes, whole[..ends[2]], "room for {room}");
            log.file.room = 1 << 20;
            log.append(&[body(2)]).expect("room again");
            assert_eq!(log.file.bytes, whole);
        }
    }

    #[test]
    fn what_cannot_be_taken_back_at_once_is_before_the_next_line() {
        for (syncs, truncates) in [(1, 0), (2, 0), (1, 1), (1, 2), (3, 1)] {
            let mut log = log_of(2);
            (log.file.fail_syncs, log.file.fail_truncates) = (syncs, truncates);
            let failures = (0..10).take_while(|_| log.append(&[body(2)]).is_err()).count();
            assert!((1..=4).contains(&failures), "{failures}");
            assert_eq!(log.file.bytes, log_of(3).file.bytes, "{syncs} {truncates}");
        }
    }

    #[test]
    fn a_line_of_another_writer_is_kept_and_ours_refused() {
        let mut log = log_of(2);
        let mut other = Log { file: Disk { room: 1 << 20, ..Disk::default() }, len: log.len, ..log_of(2) };
        other.file.bytes = log.file.bytes.clone();
        other.append(&[body(7)]).expect("the holder of the lock");
        log.file.bytes = other.file.bytes.clone();
        let error = log.append(&[body(2)]).expect_err("the lock was lost");
        assert!(error.to_string().contains("another process has written"), "{error}");
        assert_eq!(log.file.bytes, other.file.bytes, "nothing of the other writer is cut off");
    }

    #[test]
    fn several_lines_are_all_or_none() {
        let mut log = log_of(1);
        log.file.room = log_of(2).file.bytes.len() + 10;
        log.append(&[body(1), body(2)]).expect_err("no room for both");
        assert_eq!(log.file.bytes, log_of(1).file.bytes);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn dev_full_is_an_error() {
        let Ok(file) = File::options().append(true).open("/dev/full") else {
            eprintln!("skipped: no /dev/full");
            return;
        };
        let mut log = Log::new(file);
        for _ in 0..3 {
            log.append(&[body(0)]).expect_err("always full");
        }
    }
}
