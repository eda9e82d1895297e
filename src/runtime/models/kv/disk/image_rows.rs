//! Embeddings of images on disk, beside the pages: `<root>/images/<key>`, so that an image is encoded once.
//!
//! All numbers are little-endian: 8 bytes `llmctlIM`, 4 bytes version, 4 bytes number `n` of deep levels, 8 bytes rows, 8 bytes
//! width, 32 bytes key, `(1 + n) * rows * width` f32, 4 bytes CRC-32 (ISO 3309) of everything before. Files are immutable and
//! named by what they hold; any number of processes may share the folder. A file's modification time is that of its last use.

use std::fs::{self, File, FileTimes};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use llmctl_base::private_files::private_folder;
use llmctl_base::vault::{KeyId, KeyKind, SEALED_HEADER, Vault, open_any, sealed_id};

use super::folder::{replace, unless_gone};
use crate::images::{ImageKey, ImageRows};

const FOLDER: &str = "images";
const MAGIC: &[u8; 8] = b"llmctlIM";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 64;
const CRC_BYTES: usize = 4;

/// Most bytes of all files, unless the pages' limit is lower: an eighth of that.
const LIMIT_BYTES: u64 = 2 << 30;

/// The folder with the embeddings of all models below a root.
#[derive(Debug, Clone)]
pub struct ImageFolder {
    path: PathBuf,
    limit_bytes: u64,
    vault: Option<Vault>,
}

fn path_of(root: &Path, key: ImageKey) -> PathBuf {
    root.join(FOLDER).join(key.to_string())
}

/// Removes the embeddings of these images below `root`, and their keys.
///
/// # Errors
/// Errors of the file system, except that a file is absent.
pub fn forget_images(
    root: &Path,
    keys: impl IntoIterator<Item = ImageKey>,
    vault: Option<&Vault>,
) -> io::Result<()> {
    keys.into_iter().try_for_each(|key| {
        vault.map_or(Ok(()), |vault| vault.erase(KeyKind::Rows, KeyId(key.0)))?;
        unless_gone(fs::remove_file(path_of(root, key))).map(drop)
    })
}

impl ImageFolder {
    /// Takes a folder beside pages with this limit; touches no file.
    pub fn new(root: &Path, page_limit: u64) -> Self {
        Self { path: root.join(FOLDER), limit_bytes: LIMIT_BYTES.min(page_limit / 8), vault: None }
    }

    /// Seals new files, and opens sealed ones.
    pub fn with_vault(self, vault: Option<Vault>) -> Self {
        Self { vault, ..self }
    }

    /// Returns the plain form of a file's content; as it is, if it cannot be opened.
    fn opened(&self, mut file: Vec<u8>) -> Vec<u8> {
        match open_any(self.vault.as_ref(), KeyKind::Rows, &mut file) {
            Ok(plain) => file.split_off(plain.start),
            Err(_) => file,
        }
    }

    /// Returns the file of an image's embeddings; `None` if it is absent or damaged.
    pub fn file(&self, key: ImageKey) -> Option<Vec<u8>> {
        let path = self.path.join(key.to_string());
        let metadata = fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
        let bytes = if metadata.len() <= self.limit_bytes { fs::read(&path).ok()? } else { Vec::new() };
        let bytes = self.opened(bytes);
        decode_any(&bytes, key).map(|_| bytes)
    }

    /// Returns the `num_rows` embeddings of an image; `None` if they are absent or damaged. A damaged file is removed.
    pub fn read(&self, key: ImageKey, num_rows: usize) -> Option<ImageRows> {
        let path = self.path.join(key.to_string());
        // Checked before opening: opening a pipe would wait for a writer.
        let metadata = fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
        let mut bytes = Vec::new();
        if metadata.len() <= self.limit_bytes {
            File::open(&path).ok()?.take(self.limit_bytes).read_to_end(&mut bytes).ok()?;
        }
        if sealed_id(&bytes).is_some() && self.vault.is_none() {
            return None;
        }
        let bytes = self.opened(bytes);
        match decode(&bytes, key, num_rows) {
            Some(rows) => {
                let now = FileTimes::new().set_modified(SystemTime::now());
                drop(File::open(&path).and_then(|file| file.set_times(now))); // else it is removed earlier
                Some(rows)
            }
            None => {
                drop(fs::remove_file(&path)); // else it is replaced when the image was encoded
                None
            }
        }
    }

    /// Writes an image's embeddings, and removes the least recently used ones of others for them. Does nothing if they are
    /// larger than the limit.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn write(&self, key: ImageKey, rows: &ImageRows) -> io::Result<()> {
        let sealing = self.vault.as_ref().map_or(0, |_| SEALED_HEADER);
        let num_bytes = (sealing + HEADER_BYTES + rows.bytes() + CRC_BYTES) as u64;
        if num_bytes > self.limit_bytes {
            return Ok(());
        }
        private_folder(&self.path, true)?;
        self.make_room(num_bytes)?;
        let mut bytes = encode(key, rows);
        if let Some(vault) = &self.vault {
            bytes = vault.seal_file(KeyKind::Rows, KeyId(key.0), &bytes, 0)?;
        }
        replace(&self.path, &self.path.join(key.to_string()), |file| file.write_all(&bytes))
    }

    fn make_room(&self, num_bytes: u64) -> io::Result<()> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            if let Some(metadata) = unless_gone(entry.metadata())?.filter(fs::Metadata::is_file) {
                found.push((metadata.modified()?, metadata.len(), entry.path()));
            }
        }
        found.sort_unstable();
        let mut used: u64 = found.iter().map(|(_, len, _)| len).sum();
        for (_, len, path) in found {
            if used.saturating_add(num_bytes) <= self.limit_bytes {
                break;
            }
            let key = path.file_name().and_then(|name| KeyId::from_hex(name.to_str()?));
            if let Some((vault, key)) = self.vault.as_ref().zip(key) {
                vault.erase(KeyKind::Rows, key)?;
            }
            unless_gone(fs::remove_file(path))?;
            used -= len;
        }
        Ok(())
    }
}

fn encode(key: ImageKey, rows: &ImageRows) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + rows.bytes() + CRC_BYTES);
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((rows.deep.len() as u32).to_le_bytes());
    bytes.extend((rows.len() as u64).to_le_bytes());
    bytes.extend((rows.width as u64).to_le_bytes());
    bytes.extend(key.0);
    let values = rows.deep.iter().fold(rows.embeddings.clone(), |all, level| [all, level.clone()].concat());
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    bytes
}

/// Reads a file of as many rows as it says, as `decode`.
pub fn decode_any(bytes: &[u8], key: ImageKey) -> Option<ImageRows> {
    let num_rows = bytes.get(16..24).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes)?;
    decode(bytes, key, usize::try_from(num_rows).ok()?)
}

/// Reads a file back; `None` unless it is exactly what `encode` makes for this image. No size in it is trusted.
fn decode(bytes: &[u8], key: ImageKey, num_rows: usize) -> Option<ImageRows> {
    let (content, crc) = bytes.split_last_chunk::<CRC_BYTES>().map(|(content, crc)| (content, *crc))?;
    let (header, values) = content.split_at_checked(HEADER_BYTES)?;
    let number =
        |at: usize| header.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
    let is_known =
        header.starts_with(MAGIC) && header[8..12] == VERSION.to_le_bytes() && header[32..] == key.0;
    if !is_known || crc32fast::hash(content).to_le_bytes() != crc || number(16)? != num_rows as u64 {
        return None;
    }
    let (num_levels, width) = (1 + (number(8)? >> 32), usize::try_from(number(24)?).ok()?);
    let level = num_rows.checked_mul(width).filter(|level| *level > 0)?;
    let num_bytes = usize::try_from(num_levels).ok()?.checked_mul(level)?.checked_mul(size_of::<f32>())?;
    if values.len() != num_bytes {
        return None;
    }
    let values: Vec<f32> = values.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let mut levels = values.chunks_exact(level).map(<[f32]>::to_vec);
    Some(ImageRows { width, embeddings: levels.next()?, deep: levels.collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: ImageKey = ImageKey([7; 32]);

    fn rows(num_rows: usize, num_deep: usize) -> ImageRows {
        let level = |level: usize| (0..num_rows * 3).map(|n| (n + 100 * level) as f32 / 7.0).collect();
        ImageRows { width: 3, embeddings: level(0), deep: (1..=num_deep).map(level).collect() }
    }

    #[test]
    fn rows_come_back_as_they_went_and_every_damage_is_noticed() {
        for num_deep in [0, 2] {
            let file = encode(KEY, &rows(4, num_deep));
            assert_eq!(decode(&file, KEY, 4), Some(rows(4, num_deep)));
            assert_eq!((decode(&file, ImageKey([8; 32]), 4), decode(&file, KEY, 3)), (None, None));
            for bit in 0..file.len() * 8 {
                let mut changed = file.clone();
                changed[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(decode(&changed, KEY, 4), None, "bit {bit}");
            }
            assert!((0..file.len()).all(|cut| decode(&file[..cut], KEY, 4).is_none()));
        }
    }

    #[test]
    fn the_least_recently_used_make_room_and_a_damaged_file_goes() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = ImageFolder { limit_bytes: 250, ..ImageFolder::new(root.path(), u64::MAX) };
        let key = |n| ImageKey([n; 32]);
        for n in 1..=3 {
            folder.write(key(n), &rows(4, 0)).expect("written"); // 116 bytes each
            let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(n.into());
            let file = File::open(path_of(root.path(), key(n))).expect("there");
            file.set_times(FileTimes::new().set_modified(time)).expect("set");
        }
        assert_eq!([1, 2, 3].map(|n| folder.read(key(n), 4).is_some()), [false, true, true]);
        folder.write(key(4), &rows(40, 0)).expect("left out");
        assert!(folder.read(key(4), 40).is_none() && folder.read(key(3), 4).is_some());
        let path = path_of(root.path(), key(2));
        let mut bytes = fs::read(&path).expect("there");
        bytes[70] ^= 1;
        fs::write(&path, bytes).expect("written");
        assert!(folder.read(key(2), 4).is_none() && !path.exists());
        forget_images(root.path(), [key(3), key(9)], None).expect("removed");
        assert!(folder.read(key(3), 4).is_none());
    }
}
