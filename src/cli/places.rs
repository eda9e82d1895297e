//! Folders of llmctl's files: the XDG base directories and the shared Hugging Face cache.
//!
//! The only reader of their variables. Creates and reads nothing, except that [`Places::check`] writes a
//! small file and removes it, to find out that a folder is not writable before the user's work depends on it.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::error::{CommandError, Kind};
use llmctl_hub::HubPaths;
use llmctl_models::memory::{LimitKind, memory_limits};

/// Bytes that a probe writes: a block, which a full disk refuses.
const PROBE_BYTES: usize = 4096;

/// Data that llmctl keeps for the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptFiles {
    /// Saved conversations.
    Sessions,
    /// The KV of saved conversations.
    Kv,
    /// Lines typed in chat.
    History,
}

impl KeptFiles {
    pub const ALL: [KeptFiles; 3] = [KeptFiles::Sessions, KeptFiles::Kv, KeptFiles::History];

    /// Returns its name, its name in a sentence about the folder, and the variable of the folder.
    const fn facts(self) -> [&'static str; 3] {
        match self {
            KeptFiles::Sessions => ["sessions", "sessions", "XDG_DATA_HOME"],
            KeptFiles::Kv => ["kv", "the KV of sessions", "XDG_CACHE_HOME"],
            KeptFiles::History => ["history", "the history", "XDG_STATE_HOME"],
        }
    }

    pub const fn name(self) -> &'static str {
        self.facts()[0]
    }
}

/// Directories by purpose; `None` if neither a variable nor the home directory gives one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Places {
    pub home: Option<PathBuf>,
    /// `$XDG_CONFIG_HOME/llmctl`: settings.
    pub config: Option<PathBuf>,
    /// `$XDG_DATA_HOME/llmctl`: sessions, which are precious.
    pub data: Option<PathBuf>,
    /// `$XDG_STATE_HOME/llmctl`: history and logs.
    pub state: Option<PathBuf>,
    /// `$XDG_CACHE_HOME/llmctl`: data that can be computed again.
    pub cache: Option<PathBuf>,
    /// The Hugging Face cache, shared by all tools.
    pub hub: Option<PathBuf>,
    /// The file with the access token of the hub.
    pub hub_token: Option<PathBuf>,
    /// Ollama's model stores: `$OLLAMA_MODELS`, else the user's and the one of Linux's service.
    pub ollama: Vec<PathBuf>,
}

impl Places {
    pub fn from_environment() -> Self {
        Self::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = path("HOME").or_else(|| path("USERPROFILE"));
        // The XDG specification says to ignore relative values.
        let base = |name: &str, default: &str| {
            path(name).filter(|p| p.is_absolute()).or_else(|| Some(home.as_ref()?.join(default)))
        };
        let cache = base("XDG_CACHE_HOME", ".cache");
        let of_user = home.as_ref().map(|home| home.join(".ollama/models"));
        let of_service = of_user.as_ref().map(|_| PathBuf::from("/usr/share/ollama/.ollama/models"));
        let ollama = path("OLLAMA_MODELS")
            .map_or_else(|| of_user.into_iter().chain(of_service).collect(), |path| vec![path]);
        let hf_home = path("HF_HOME").or_else(|| Some(cache.as_ref()?.join("huggingface")));
        Self {
            config: base("XDG_CONFIG_HOME", ".config").map(|p| p.join("llmctl")),
            data: base("XDG_DATA_HOME", ".local/share").map(|p| p.join("llmctl")),
            state: base("XDG_STATE_HOME", ".local/state").map(|p| p.join("llmctl")),
            hub_token: path("HF_TOKEN_PATH").or_else(|| Some(hf_home.as_ref()?.join("token"))),
            hub: path("HF_HUB_CACHE")
                .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
                .or_else(|| Some(hf_home?.join("hub"))),
            cache: cache.map(|p| p.join("llmctl")),
            ollama,
            home,
        }
    }

    /// Returns the folder of saved sessions.
    pub fn sessions(&self) -> Option<PathBuf> {
        Some(self.data.as_ref()?.join("sessions"))
    }

    /// Returns the folder of sessions' KV: as private as they are, but it can be computed again.
    pub fn kv(&self) -> Option<PathBuf> {
        Some(self.cache.as_ref()?.join("kv"))
    }

    /// Returns the folder of packed weights, which can be packed again.
    pub fn packed(&self) -> Option<PathBuf> {
        Some(self.cache.as_ref()?.join("packed"))
    }

    /// Returns the folder of `kept`.
    pub fn folder(&self, kept: KeptFiles) -> Option<PathBuf> {
        match kept {
            KeptFiles::Sessions => self.sessions(),
            KeptFiles::Kv => self.kv(),
            KeptFiles::History => self.state.clone(),
        }
    }

    /// Checks that `kept` can be written, leaving nothing behind.
    ///
    /// # Errors
    /// [`Kind::Config`] if its folder is unknown; [`Kind::Io`] with the folder and the reason.
    pub fn check(&self, kept: KeptFiles) -> Result<(), CommandError> {
        let [_, noun, variable] = kept.facts();
        let Some(folder) = self.folder(kept) else {
            let message = format!("HOME and {variable} are not set: there is no folder for {noun}");
            return Err(Kind::Config.error(message).hint(format!("set HOME or {variable}")));
        };
        probe(&folder).map_err(|error| {
            let shown = self.shorten(&folder);
            CommandError::new(Kind::Io, error).context(format!("{shown}: {noun} cannot be saved"))
        })
    }

    pub fn hub_paths(&self) -> HubPaths {
        // Mapped weights do not count as data. The total, because free memory differs from minute to minute and the same
        // reference should mean the same file.
        let limits = memory_limits(Path::new("/")).into_iter();
        let memory = limits.filter(|limit| limit.kind != LimitKind::Data).map(|limit| limit.total).min();
        HubPaths { cache: self.hub.clone(), home: self.home.clone(), ollama: self.ollama.clone(), memory }
    }

    /// Formats a path with `~` for the home directory.
    pub fn shorten(&self, path: &Path) -> String {
        match self.home.as_ref().and_then(|home| path.strip_prefix(home).ok()) {
            Some(rest) => format!("~/{}", rest.display()),
            None => path.display().to_string(),
        }
    }
}

/// Writes a small file in `folder`, or in the nearest existing folder above it, and removes it.
///
/// # Errors
/// The reason of a failure: no permission, a read-only or full file system, a file in the way.
pub fn probe(folder: &Path) -> io::Result<()> {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let existing = folder.ancestors().find(|folder| folder.exists()).unwrap_or(folder);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = existing.join(format!(".llmctl-probe-{}-{number}", std::process::id()));
    let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&path)?;
    // Removed at once, because a process that is killed meanwhile removes nothing.
    let removed = fs::remove_file(&path);
    let written = file.write_all(&[0; PROBE_BYTES]).and_then(|()| file.sync_data());
    removed.and(written)
}

/// Returns the bytes that this user may still write at `folder`; `None` if the system does not say.
#[cfg(unix)]
pub fn free_bytes(folder: &Path) -> Option<u64> {
    let space = rustix::fs::statvfs(folder.ancestors().find(|folder| folder.exists())?).ok()?;
    space.f_bavail.checked_mul(space.f_frsize)
}

#[cfg(not(unix))]
pub fn free_bytes(_folder: &Path) -> Option<u64> {
    None
}

/// `~/x` below the home folder.
pub fn expand_home(path: &str) -> PathBuf {
    let home = || Places::from_environment().home;
    match path.strip_prefix('~') {
        Some("") => home().unwrap_or_else(|| path.into()),
        Some(rest) if rest.starts_with('/') => {
            home().map_or_else(|| path.into(), |home| home.join(&rest[1..]))
        }
        _ => path.into(),
    }
}

/// Reads a path as typed: in quotes, with backslashes before blanks, or plain. A file of exactly that name wins.
pub fn typed_path(typed: &str) -> PathBuf {
    let plain = expand_home(typed);
    if plain.exists() {
        return plain;
    }
    let quoted = ['\'', '"'].iter().find_map(|&quote| {
        let inner = typed.strip_prefix(quote)?.strip_suffix(quote)?;
        (!inner.contains(quote)).then(|| inner.to_owned())
    });
    match quoted {
        Some(inner) => expand_home(&inner),
        None if cfg!(unix) && typed.contains('\\') => {
            let mut chars = typed.chars();
            let unescaped: String = std::iter::from_fn(|| {
                chars.next().and_then(|c| if c == '\\' { chars.next() } else { Some(c) })
            })
            .collect();
            expand_home(&unescaped)
        }
        None => plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_may_be_quoted_or_escaped_as_in_a_shell() {
        for (typed, path) in [
            ("a b.md", "a b.md"),
            ("'a b.md'", "a b.md"),
            ("\"it's.md\"", "it's.md"),
            ("'it's.md'", "'it's.md'"),
            ("'", "'"),
        ] {
            assert_eq!(typed_path(typed), PathBuf::from(path), "{typed}");
        }
        #[cfg(unix)]
        assert_eq!(typed_path("a\\ b\\'.md"), PathBuf::from("a b'.md"));
        let folder = tempfile::tempdir().expect("a folder");
        let odd = folder.path().join("'x'");
        fs::write(&odd, "").expect("written");
        assert_eq!(typed_path(&odd.display().to_string()), odd, "what is there wins");
    }

    #[test]
    fn what_cannot_be_kept_is_said_with_folder_and_reason() {
        let home = tempfile::tempdir().expect("tempdir");
        let at = |data: PathBuf| Places { data: Some(data), ..Places::default() };
        let free = at(home.path().join("a/b"));
        assert!(free.check(KeptFiles::Sessions).is_ok(), "a missing folder is made when needed");
        assert_eq!(fs::read_dir(home.path()).expect("readable").count(), 0, "the probe is gone");

        let file = home.path().join("file");
        fs::write(&file, "").expect("write");
        let error = at(file).check(KeptFiles::Sessions).expect_err("a file in the way");
        assert_eq!(error.kind, Kind::Io);
        assert!(error.to_string().contains("sessions: sessions cannot be saved: "), "{error}");

        let error = Places::default().check(KeptFiles::History).expect_err("no home");
        assert_eq!(error.kind, Kind::Config);
        assert_eq!(
            error.to_string(),
            "HOME and XDG_STATE_HOME are not set: there is no folder for the history"
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_place_that_takes_no_file_is_found_out() {
        // No user, not even root, can create a file here.
        let error = probe(Path::new("/proc/self/llmctl")).expect_err("no file system for files");
        assert_ne!(error.kind(), io::ErrorKind::AlreadyExists, "{error}");
    }

    fn places(variables: &[(&str, &str)]) -> Places {
        Places::from_variables(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn defaults_below_home() {
        let places = places(&[("HOME", "/home/u"), ("XDG_CONFIG_HOME", ""), ("XDG_DATA_HOME", "relative")]);
        assert_eq!(places.config, Some("/home/u/.config/llmctl".into()));
        assert_eq!(places.data, Some("/home/u/.local/share/llmctl".into()));
        assert_eq!(places.sessions(), Some("/home/u/.local/share/llmctl/sessions".into()));
        assert_eq!(places.state, Some("/home/u/.local/state/llmctl".into()));
        assert_eq!(places.cache, Some("/home/u/.cache/llmctl".into()));
        assert_eq!(places.hub, Some("/home/u/.cache/huggingface/hub".into()));
        assert_eq!(places.hub_token, Some("/home/u/.cache/huggingface/token".into()));
        assert_eq!(places.shorten("/home/u/x/y".as_ref()), "~/x/y");
        assert_eq!(places.shorten("/home/user/x".as_ref()), "/home/user/x");
    }

    #[test]
    fn variables_win() {
        let xdg = [("HOME", "/h"), ("XDG_CACHE_HOME", "/c"), ("XDG_CONFIG_HOME", "/x")];
        assert_eq!(places(&xdg).hub, Some("/c/huggingface/hub".into()));
        assert_eq!(places(&xdg).config, Some("/x/llmctl".into()));
        assert_eq!(places(&[("HOME", "/h"), ("HF_HOME", "/hf")]).hub, Some("/hf/hub".into()));
        let both = [("HOME", "/h"), ("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/cache")];
        assert_eq!(places(&both).hub, Some("/cache".into()));
        assert_eq!(places(&both).hub_token, Some("/hf/token".into()));
        assert_eq!(places(&[("HF_TOKEN_PATH", "/t")]).hub_token, Some("/t".into()));
        let service = "/usr/share/ollama/.ollama/models";
        assert_eq!(places(&xdg).ollama, [PathBuf::from("/h/.ollama/models"), service.into()]);
        assert_eq!(places(&[("HOME", "/h"), ("OLLAMA_MODELS", "/o")]).ollama, [PathBuf::from("/o")]);
    }

    #[test]
    fn nothing_known_is_no_place() {
        assert_eq!(places(&[]), Places::default());
    }
}
