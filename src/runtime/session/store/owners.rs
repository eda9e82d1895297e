//! Sessions of several owners below one root: the local user's lie in the root itself, those of an API key's owner in
//! `.owners/<owner>/`, so that the names of one owner's sessions are nothing to another's.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::SessionStore;
use super::listing::Summaries;
use super::name::owner_folder;

/// Holds a folder of sessions for each owner. No session's folder is called so.
const FOLDER: &str = ".owners";

/// What the stores of all owners share.
#[derive(Debug)]
pub struct Owners {
    root: PathBuf,
    /// What each remembers of its sessions.
    summaries: Mutex<HashMap<String, Arc<Summaries>>>,
}

impl Owners {
    pub fn new(root: PathBuf) -> Self {
        Self { root, summaries: Mutex::default() }
    }

    /// All folders that hold sessions.
    pub fn roots(&self) -> Vec<PathBuf> {
        let owners = fs::read_dir(self.root.join(FOLDER)).into_iter().flatten().flatten();
        std::iter::once(self.root.clone()).chain(owners.map(|entry| entry.path())).collect()
    }
}

impl SessionStore {
    /// The sessions of the owner of an API key.
    pub fn of_owner(&self, owner: &str) -> Self {
        let mut summaries = self.owners.summaries.lock().unwrap_or_else(PoisonError::into_inner);
        let summaries = Arc::clone(summaries.entry(owner.to_owned()).or_default());
        let root = self.owners.root.join(FOLDER).join(owner_folder(owner));
        Self { root, kv: self.kv.clone(), summaries, owners: Arc::clone(&self.owners) }
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
            drop(own.create_for(&name, &model, Some(owner)).expect("created"));
        }
        assert!(!store.exists(&name) && store.list().expect("a list").is_empty());
        for (owner, own) in &owners {
            assert_eq!(own.read(&name).expect("there").owner.as_deref(), Some(*owner));
            assert_eq!(own.list().expect("a list").len(), 1);
        }
        let inside = owners[0].1.owners.roots();
        assert_eq!(inside.len(), 5, "the root and each owner's: {inside:?}");
        assert!(inside.iter().all(|root| root.starts_with(folder.path()) && !root.ends_with("..")));
    }
}
