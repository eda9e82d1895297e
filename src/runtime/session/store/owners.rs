//! Sessions of several owners below one root. The local user's are in the root, those of an API key's owner
//! in `.owners/<owner>/`, so the names of different owners never clash.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use super::SessionStore;
use super::listing::Summaries;
use super::name::{owner_folder, owner_of_folder};

/// Folder of the owners' folders; no session's folder has this name.
const FOLDER: &str = ".owners";

/// State shared by the stores of all owners.
#[derive(Debug)]
pub struct Owners {
    root: PathBuf,
    /// Cached summaries, by owner.
    summaries: Mutex<HashMap<String, Arc<Summaries>>>,
}

impl Owners {
    pub fn new(root: PathBuf) -> Self {
        Self { root, summaries: Mutex::default() }
    }

    /// Returns all folders that hold sessions.
    pub fn roots(&self) -> Vec<PathBuf> {
        std::iter::once(self.root.clone()).chain(self.folders()).collect()
    }

    fn folders(&self) -> impl Iterator<Item = PathBuf> {
        let owners = fs::read_dir(self.root.join(FOLDER)).into_iter().flatten().flatten();
        owners.map(|entry| entry.path())
    }
}

impl SessionStore {
    /// Returns the owners of API keys who have sessions, or had some, in alphabetical order.
    pub fn owners(&self) -> Vec<String> {
        let name = |folder: PathBuf| owner_of_folder(folder.file_name()?.to_str()?);
        let mut owners: Vec<String> = self.owners.folders().filter_map(name).collect();
        owners.sort();
        owners
    }

    /// Returns the store of an API key's owner.
    pub fn of_owner(&self, owner: &str) -> Self {
        let mut summaries = self.owners.summaries.lock();
        let summaries = Arc::clone(summaries.entry(owner.to_owned()).or_default());
        let root = self.owners.root.join(FOLDER).join(owner_folder(owner));
        Self { root, summaries, owner: Some(owner.to_owned()), ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ModelFingerprint, SessionName};
    use super::*;

    #[test]
    fn names_of_one_owner_are_nothing_to_another() {
        let folder = tempfile::TempDir::new().expect("a scratch folder");
        let store = SessionStore::new(folder.path());
        let name = SessionName::new("trip").expect("a name");
        let model = ModelFingerprint::default();
        let owners = ["anna", "Anna", "a.b@c", ".."].map(|owner| (owner, store.of_owner(owner)));
        for (owner, own) in &owners {
            assert!(!own.exists(&name), "{owner}");
            drop(own.create(&name, &model).expect("created"));
        }
        assert!(!store.exists(&name) && store.list().expect("a list").is_empty());
        for (owner, own) in &owners {
            assert_eq!(own.read(&name).expect("there").owner.as_deref(), Some(*owner));
            assert_eq!(own.list().expect("a list").len(), 1);
        }
        let inside = owners[0].1.owners.roots();
        assert_eq!(store.owners(), ["..", "Anna", "a.b@c", "anna"]);
        assert_eq!(inside.len(), 5, "the root and each owner's: {inside:?}");
        assert!(inside.iter().all(|root| root.starts_with(folder.path()) && !root.ends_with("..")));
    }
}
