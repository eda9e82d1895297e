//! Where llmctl's files lie: the XDG base directories and the shared Hugging Face cache.
//!
//! The only reader of the variables that say so. Names places; creates, reads and checks nothing.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::runtime::load::hub::HubPaths;

/// Directories by purpose; `None` where neither variable nor home says anything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Places {
    pub home: Option<PathBuf>,
    /// `$XDG_CONFIG_HOME/llmctl`: settings.
    pub config: Option<PathBuf>,
    /// `$XDG_DATA_HOME/llmctl`: sessions; precious.
    pub data: Option<PathBuf>,
    /// `$XDG_STATE_HOME/llmctl`: history and logs.
    pub state: Option<PathBuf>,
    /// `$XDG_CACHE_HOME/llmctl`: what can be computed again.
    pub cache: Option<PathBuf>,
    /// The Hugging Face cache that all tools share.
    pub hub: Option<PathBuf>,
}

impl Places {
    pub fn from_environment() -> Self {
        Self::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = path("HOME").or_else(|| path("USERPROFILE"));
        // The XDG specification has relative values ignored.
        let base = |name: &str, default: &str| {
            path(name).filter(|p| p.is_absolute()).or_else(|| Some(home.as_ref()?.join(default)))
        };
        let cache = base("XDG_CACHE_HOME", ".cache");
        let hf_home = path("HF_HOME").or_else(|| Some(cache.as_ref()?.join("huggingface")));
        Self {
            config: base("XDG_CONFIG_HOME", ".config").map(|p| p.join("llmctl")),
            data: base("XDG_DATA_HOME", ".local/share").map(|p| p.join("llmctl")),
            state: base("XDG_STATE_HOME", ".local/state").map(|p| p.join("llmctl")),
            hub: path("HF_HUB_CACHE").or_else(|| Some(hf_home?.join("hub"))),
            cache: cache.map(|p| p.join("llmctl")),
            home,
        }
    }

    /// The folder of saved sessions.
    pub fn sessions(&self) -> Option<PathBuf> {
        Some(self.data.as_ref()?.join("sessions"))
    }

    /// The folder of sessions' KV: as private as they are, but it can be computed again.
    pub fn kv(&self) -> Option<PathBuf> {
        Some(self.cache.as_ref()?.join("kv"))
    }

    pub fn hub_paths(&self) -> HubPaths {
        HubPaths { cache: self.hub.clone(), home: self.home.clone() }
    }

    /// A path as people write it, with `~` for home.
    pub fn shorten(&self, path: &std::path::Path) -> String {
        match self.home.as_ref().and_then(|home| path.strip_prefix(home).ok()) {
            Some(rest) => format!("~/{}", rest.display()),
            None => path.display().to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    }

    #[test]
    fn nothing_known_is_no_place() {
        assert_eq!(places(&[]), Places::default());
    }
}
