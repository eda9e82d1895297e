//! `--encrypt`: the folder of keys, opened when a command first needs it.
//!
//! Owns what the command line asked for, once for the process: sessions and KV are opened in many places, and all have to use the
//! same keys. Invariant: no message and no argument of another process shows a secret.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use parking_lot::Mutex;

use crate::cli::error::{CommandError, Kind};
use crate::cli::flags::args::GlobalArgs;
use crate::cli::places::expand_home;
use crate::cli::terminal::Terminal;
use llmctl_base::{Error, Vault};

/// Most bytes of a secret.
const MAX_SECRET_BYTES: u64 = 4096;

/// An empty one is an error, unlike other variables.
const VARIABLE: &str = "LLMCTL_ENCRYPT";

static ASKED: OnceLock<Encryption> = OnceLock::new();

/// The flags for encryption.
#[derive(Debug)]
struct Encryption {
    folder: PathBuf,
    key_command: Option<String>,
    vault: Mutex<Option<Vault>>,
}

/// Notes the flags of the process.
///
/// # Errors
/// A usage error for a command without a folder.
pub fn begin(args: &GlobalArgs, terminal: &Terminal) -> Result<(), CommandError> {
    let key_command = args.encrypt_key_command.clone();
    match &args.encrypt {
        Some(folder) => {
            let folder = folder.to_str().map_or_else(|| folder.clone(), expand_home);
            if !folder.join("check.key").exists() {
                terminal.note(format!("--encrypt: {} is a new folder of keys", folder.display()));
            }
            // A second call keeps the flags of the first: there is one command line.
            let _ = ASKED.set(Encryption { folder, key_command, vault: Mutex::default() });
            Ok(())
        }
        None if std::env::var_os(VARIABLE).is_some() => {
            let error =
                CommandError::usage(format!("{VARIABLE} is empty: sessions would be saved in plain text"));
            Err(error.hint("set it to a folder of keys, or unset it"))
        }
        None if key_command.is_some() => {
            let error = CommandError::usage("--encrypt-key-command: there is no folder of keys");
            Err(error.hint("give --encrypt DIR too"))
        }
        None => Ok(()),
    }
}

/// Returns whether `--encrypt` is given.
pub fn is_on() -> bool {
    folder().is_some()
}

/// Returns the folder of keys; `None` without `--encrypt`.
pub fn folder() -> Option<&'static Path> {
    ASKED.get().map(|asked| asked.folder.as_path())
}

/// Returns the folder for a text that another program edits: that of the keys, which is in no backup, if there is one.
pub fn draft_folder() -> PathBuf {
    let keys = ASKED.get().map(|asked| asked.folder.clone()).filter(|folder| folder.exists());
    keys.unwrap_or_else(std::env::temp_dir)
}

/// Opens the folder of keys; `None` without `--encrypt`.
///
/// # Errors
/// The folder or its master key cannot be used; the command for the secret fails.
pub fn vault() -> Result<Option<Vault>, CommandError> {
    let Some(asked) = ASKED.get() else { return Ok(None) };
    let mut vault = asked.vault.lock();
    if vault.is_none() {
        *vault = Some(open(&asked.folder, asked.key_command.as_deref())?);
    }
    Ok(vault.clone())
}

fn open(folder: &Path, key_command: Option<&str>) -> Result<Vault, CommandError> {
    let secret = key_command.map(secret).transpose()?;
    let opened = Vault::open(folder, secret.as_deref());
    opened.map_err(|error| CommandError::from(Error::from(error)).context("--encrypt"))
}

/// Returns what a command of the user's shell prints, without the end of its line. It may ask on the terminal.
fn secret(command: &str) -> Result<Vec<u8>, CommandError> {
    let failed = |what: String| Kind::Failure.error(format!("--encrypt-key-command: the command {what}"));
    let shell = if cfg!(windows) { ["cmd", "/C"] } else { ["sh", "-c"] };
    let child = Command::new(shell[0]).args([shell[1], command]).stdout(Stdio::piped()).spawn();
    let mut child = child.map_err(|error| failed(format!("does not start: {error}")))?;
    let mut secret = Vec::new();
    let read = child.stdout.take().map(|out| out.take(MAX_SECRET_BYTES + 1).read_to_end(&mut secret));
    let status = child.wait().map_err(|error| failed(error.to_string()))?;
    match read {
        _ if secret.len() as u64 > MAX_SECRET_BYTES => {
            Err(failed(format!("printed more than {MAX_SECRET_BYTES} bytes")))
        }
        _ if !status.success() => Err(failed(format!("failed: {status}"))),
        Some(Err(error)) => Err(failed(error.to_string())),
        _ => Ok(secret.trim_ascii_end().to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_secret_is_what_a_command_prints() {
        assert_eq!(secret("printf 'a b\\n'").expect("printed"), b"a b");
        let long = "more than 4096 bytes";
        for (command, message) in
            [("exit 3", "failed: exit status: 3"), ("yes", long), ("head -c 5000 /dev/zero", long)]
        {
            let error = secret(command).expect_err("no secret").to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
