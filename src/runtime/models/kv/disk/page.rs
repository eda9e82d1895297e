//! File format of one page: a header that identifies the page, the payload, and a checksum over both.
//!
//! All numbers are little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `llmctlKV` |
//! | 4 | [`FORMAT_VERSION`] |
//! | 4 | group |
//! | 4 | number of tokens `n` |
//! | 4 | 1 with a parent, 0 without |
//! | 8 | bytes of payload `p` |
//! | 32 | name |
//! | 32 | parent's name, zeros without |
//! | 4 `n` | tokens |
//! | `p` | payload |
//! | 4 | CRC-32 (ISO 3309) of everything before |
//!
//! A sealed page is such a file in the form of [`sealed_id`]'s module, with the bytes before the tokens in the clear.
//!
//! The tokens are those of [`PageLabel::tokens`], with what names the images among them.
//!
//! The expected header is known before the file is opened, so it is compared as a whole, and no size from the
//! file is trusted for an allocation. The checksum is verified first: the header of a damaged file means
//! nothing.

use std::io::{self, Read, Write};
use std::ops::Range;

use super::super::PageContent;
use super::{DiskPageKey, MissingReason, PageLabel, PageName};
use llmctl_base::vault::{SEALED_HEADER, sealed_id};

/// Version of the file format and of the folders' layout.
pub const FORMAT_VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"llmctlKV";
const CRC_BYTES: usize = 4;

const FORMAT: Range<usize> = 0..12;
const GROUP: Range<usize> = 12..16;
const NUM_TOKENS: Range<usize> = 16..20;
const HAS_PARENT: Range<usize> = 20..24;
const NUM_BYTES: Range<usize> = 24..32;
const NAME: Range<usize> = 32..64;
const PARENT: Range<usize> = 64..96;
/// Bytes before the tokens.
pub const TOKENS_START: usize = 96;

/// Returns the length of the file with a payload of `num_bytes`.
pub fn file_len(label: &PageLabel, num_bytes: usize) -> u64 {
    whole_len(label.tokens.len() as u64, num_bytes as u64)
}

fn whole_len(num_tokens: u64, num_bytes: u64) -> u64 {
    let header = (TOKENS_START + CRC_BYTES) as u64;
    header.saturating_add(num_tokens.saturating_mul(4)).saturating_add(num_bytes)
}

fn header(label: &PageLabel, num_bytes: usize) -> Vec<u8> {
    let mut header = vec![0; TOKENS_START];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    header[GROUP].copy_from_slice(&u32::from(label.key.group).to_le_bytes());
    header[NUM_TOKENS].copy_from_slice(&(label.tokens.len() as u32).to_le_bytes());
    header[NUM_BYTES].copy_from_slice(&(num_bytes as u64).to_le_bytes());
    header[NAME].copy_from_slice(&label.key.name.0);
    if let Some(parent) = label.parent {
        header[HAS_PARENT].copy_from_slice(&1u32.to_le_bytes());
        header[PARENT].copy_from_slice(&parent.0);
    }
    header.extend(label.tokens.iter().flat_map(|token| token.to_le_bytes()));
    header
}

/// # Errors
/// Errors of `file`; part of the page may have been written.
pub fn write(file: &mut impl Write, label: &PageLabel, payload: &[u8]) -> io::Result<()> {
    let header = header(label, payload.len());
    let mut crc = crc32fast::Hasher::new();
    crc.update(&header);
    crc.update(payload);
    file.write_all(&header)?;
    file.write_all(payload)?;
    file.write_all(&crc.finalize().to_le_bytes())
}

/// Checks all bytes of a file, and returns which of them are the payload of the page `label`, `num_bytes` long.
///
/// # Errors
/// [`MissingReason`], never `Absent`, if the file is not exactly what [`write`] produces for this page.
pub fn find_payload(file: &[u8], label: &PageLabel, num_bytes: usize) -> Result<Range<usize>, MissingReason> {
    check_len(&mut &*file, file.len() as u64, label, num_bytes)?;
    let expected = header(label, num_bytes);
    let payload = expected.len()..expected.len() + num_bytes;
    let (content, stored) = file.split_at(payload.end);
    if crc32fast::hash(content).to_le_bytes() != *stored {
        return Err(MissingReason::Damaged("the checksum is wrong".to_owned()));
    }
    let found = &content[..payload.start];
    if found != expected {
        return Err(MissingReason::Mismatch(difference(found, &expected)));
    }
    Ok(payload)
}

/// Checks the length of a file, `len` bytes, before more than its beginning is read.
///
/// # Errors
/// [`MissingReason::Mismatch`] if it is a page of another size, otherwise that the file is damaged or cannot be read.
pub fn check_len(
    file: &mut impl Read,
    len: u64,
    label: &PageLabel,
    num_bytes: usize,
) -> Result<(), MissingReason> {
    let expected = file_len(label, num_bytes);
    if len == expected { Ok(()) } else { Err(wrong_length(file, len, expected)) }
}

/// Reads a page that is not known before: checks the file as a whole, and that the name is that of the content. Returns its
/// label, with a depth of 0, and which bytes are the payload.
///
/// # Errors
/// A sentence that says what is wrong.
pub fn read_any(file: &[u8]) -> Result<(PageLabel, Range<usize>), String> {
    let header = file.get(..TOKENS_START).ok_or("the file is too short for a page")?;
    let group = u8::try_from(number(&header[GROUP])).map_err(|_| "the file claims an unknown group")?;
    let name = |range: Range<usize>| header[range].try_into().map(PageName).map_err(|_| "no name");
    let parent = (number(&header[HAS_PARENT]) != 0).then(|| name(PARENT)).transpose()?;
    // Of what the file claims, nothing is taken that it does not have.
    let num_tokens = usize::try_from(number(&header[NUM_TOKENS])).unwrap_or(usize::MAX);
    let tokens =
        file[TOKENS_START..].as_chunks().0.iter().take(num_tokens).map(|token| u32::from_le_bytes(*token));
    let tokens: Box<[u32]> = tokens.collect();
    let num_bytes = usize::try_from(number(&header[NUM_BYTES])).unwrap_or(usize::MAX);
    let label = PageLabel { key: DiskPageKey { name: name(NAME)?, group }, parent, tokens, depth: 0 };
    let payload = find_payload(file, &label, num_bytes).map_err(|reason| reason.to_string())?;
    if PageName::of(PageContent { parent, tokens: &label.tokens }) != label.key.name {
        return Err("the page's name is not that of its content".to_owned());
    }
    Ok((label, payload))
}

/// Reads the name of the preceding page, also of a sealed one, without verifying the rest of the file; `None` if there is none.
pub fn read_parent(file: &mut impl Read) -> Option<PageName> {
    let mut found = [0; TOKENS_START];
    file.read_exact(&mut found).ok()?;
    if sealed_id(&found).is_some() {
        let read = found.len() - SEALED_HEADER;
        found.copy_within(SEALED_HEADER.., 0);
        file.read_exact(&mut found[read..]).ok()?;
    }
    let is_page = found[..8] == *MAGIC && found[8..12] == FORMAT_VERSION.to_le_bytes();
    let has_parent = found[HAS_PARENT] == 1u32.to_le_bytes();
    let parent = found[PARENT].try_into().ok().filter(|_| is_page && has_parent)?;
    Some(PageName(parent))
}

/// Classifies a file of unexpected length: another page's size if its header agrees with the length, otherwise
/// damage.
fn wrong_length(file: &mut impl Read, len: u64, expected: u64) -> MissingReason {
    let message = format!("the file has {len} bytes instead of {expected}");
    let mut found = [0; TOKENS_START];
    if let Err(error) = file.read_exact(&mut found) {
        return match error.kind() {
            io::ErrorKind::UnexpectedEof => MissingReason::Damaged(message),
            _ => MissingReason::Io(error.to_string()),
        };
    }
    let num_tokens = number(&found[NUM_TOKENS]);
    let num_bytes = number(&found[NUM_BYTES]);
    if found.starts_with(MAGIC) && whole_len(num_tokens, num_bytes) == len {
        MissingReason::Mismatch(message)
    } else {
        MissingReason::Damaged(message)
    }
}

fn number(little_endian: &[u8]) -> u64 {
    little_endian.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Describes how the header of an intact file differs from the expected one.
fn difference(found: &[u8], expected: &[u8]) -> String {
    let fields = [
        (FORMAT, "format"),
        (GROUP, "group"),
        (NUM_TOKENS, "number of tokens"),
        (HAS_PARENT, "parent"),
        (NUM_BYTES, "length"),
        (NAME, "name"),
        (PARENT, "parent"),
    ];
    let differs = |range: &Range<usize>| found[range.clone()] != expected[range.clone()];
    let what = fields.iter().find(|(range, _)| differs(range)).map_or("tokens", |(_, what)| what);
    format!("the file holds a page with another {what}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label() -> PageLabel {
        PageLabel {
            key: DiskPageKey { name: PageName([7; 32]), group: 3 },
            parent: Some(PageName([9; 32])),
            tokens: [1, 2, 300_000, u32::MAX].into(),
            depth: 5,
        }
    }

    fn payload() -> Vec<u8> {
        (0..257u32).map(|n| (n * 31) as u8).collect()
    }

    fn written(label: &PageLabel) -> Vec<u8> {
        let mut file = Vec::new();
        write(&mut file, label, &payload()).expect("memory takes it");
        file
    }

    fn read_back(file: &[u8], label: &PageLabel, num_bytes: usize) -> Result<Vec<u8>, MissingReason> {
        find_payload(file, label, num_bytes).map(|payload| file[payload].to_vec())
    }

    #[test]
    fn a_page_comes_back_as_it_went() {
        let first = PageLabel { parent: None, ..label() };
        for label in [label(), first, PageLabel { tokens: [].into(), ..label() }] {
            let file = written(&label);
            assert_eq!(file.len() as u64, file_len(&label, payload().len()));
            assert_eq!(read_back(&file, &label, payload().len()), Ok(payload()));
        }
        let mut empty = Vec::new();
        write(&mut empty, &label(), &[]).expect("memory takes it");
        assert_eq!(read_back(&empty, &label(), 0), Ok(Vec::new()));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let file = written(&label());
        for bit in 0..file.len() * 8 {
            let mut changed = file.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            let reason = read_back(&changed, &label(), payload().len()).expect_err("changed");
            assert!(matches!(reason, MissingReason::Damaged(_)), "bit {bit}: {reason}");
        }
    }

    #[test]
    fn every_cut_and_every_addition_is_noticed() {
        let file = written(&label());
        let mut longer = file.clone();
        longer.push(0);
        for bytes in (0..file.len()).map(|cut| &file[..cut]).chain([&longer[..]]) {
            let reason = read_back(bytes, &label(), payload().len()).expect_err("another length");
            assert!(matches!(reason, MissingReason::Damaged(_)), "{} bytes: {reason}", bytes.len());
            let measured = check_len(&mut &bytes[..], bytes.len() as u64, &label(), payload().len());
            assert_eq!(measured, Err(reason), "found before the file is read");
        }
    }

    #[test]
    fn an_intact_file_of_another_page_is_a_mismatch_that_says_where() {
        let file = written(&label());
        let wrong = |change: fn(&mut PageLabel)| {
            let mut label = label();
            change(&mut label);
            read_back(&file, &label, payload().len()).expect_err("another page").to_string()
        };
        assert!(wrong(|label| label.key.group = 4).contains("group"));
        assert!(wrong(|label| label.key.name = PageName([8; 32])).contains("name"));
        assert!(wrong(|label| label.parent = None).contains("parent"));
        assert!(wrong(|label| label.parent = Some(PageName([1; 32]))).contains("parent"));
        assert!(wrong(|label| label.tokens[2] = 4).contains("tokens"));
        assert!(wrong(|label| label.tokens = [1].into()).contains("bytes instead of"));
        let reason = read_back(&file, &label(), 256).expect_err("another length");
        assert!(matches!(reason, MissingReason::Mismatch(_)), "{reason}");
        // A page with one token less and four more payload bytes has the same length.
        let same_length = PageLabel { tokens: [1, 2, 300_000].into(), ..label() };
        let reason = read_back(&file, &same_length, payload().len() + 4).expect_err("another split");
        assert!(matches!(reason, MissingReason::Mismatch(_)), "{reason}");
    }

    #[test]
    fn a_page_of_which_nothing_is_known_is_read_if_its_name_is_that_of_its_content() {
        let content = PageContent { parent: label().parent, tokens: &label().tokens };
        let named =
            PageLabel { key: DiskPageKey { name: PageName::of(content), group: 3 }, depth: 0, ..label() };
        let file = written(&named);
        let (found, range) = read_any(&file).expect("a page");
        assert_eq!((found, &file[range]), (named, &payload()[..]));
        assert!(read_any(&written(&label())).is_err(), "intact, under a name of another");
        for end in 0..file.len() {
            assert!(read_any(&file[..end]).is_err(), "{end} bytes");
        }
        for bit in 0..file.len() * 8 {
            let mut changed = file.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(read_any(&changed).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn lengths_that_a_file_claims_are_not_believed() {
        let mut file = written(&label());
        file[NUM_BYTES].fill(0xFF);
        let reason = read_back(&file[..200], &label(), payload().len()).expect_err("nonsense");
        assert!(matches!(reason, MissingReason::Damaged(_)), "{reason}");
    }

    /// A file that accepts `room` bytes and then fails.
    struct FullDisk {
        taken: Vec<u8>,
        room: usize,
    }

    impl Write for FullDisk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let fits = bytes.len().min(self.room - self.taken.len());
            self.taken.extend_from_slice(&bytes[..fits]);
            if fits == 0 && !bytes.is_empty() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(fits) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_disk_that_fills_up_at_any_byte_is_an_error_and_leaves_no_page() {
        let whole = written(&label());
        for room in 0..whole.len() {
            let mut file = FullDisk { taken: Vec::new(), room };
            let error = write(&mut file, &label(), &payload()).expect_err("no room");
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            assert!(read_back(&file.taken, &label(), payload().len()).is_err(), "{room} bytes");
        }
    }
}
