//! Order of steps for creating, opening and removing sessions concurrently, separated from the file system so
//! that the model checker below can try every order.
//!
//! Invariants: only the holder of a session's lock writes to it or removes it. A lock belongs to the folder
//! that the name leads to, never to one removed in the meantime. Opening or creating a session succeeds or
//! reports that it is busy.

use std::path::Path;

use llmctl_base::error::Result;

/// Most attempts while other processes create and remove the session.
const MAX_TRIES: usize = 100;

/// The single steps. Other processes may run between any two.
pub trait Folders {
    /// An open lock file, valid when its folder is renamed.
    type LockFile;

    /// Opens a folder's lock file, creating it; `None` if there is no such folder.
    ///
    /// # Errors
    /// Errors of the file system.
    fn open_lock(&self, folder: &Path) -> Result<Option<Self::LockFile>>;

    /// Tries to lock the file. Returns false if another process holds the lock.
    ///
    /// # Errors
    /// Errors of the file system.
    fn try_lock(&self, folder: &Path, file: &Self::LockFile) -> Result<bool>;

    /// Returns whether the path still leads to this file. Between opening and locking, the session may have
    /// been removed or replaced.
    fn is_still_there(&self, folder: &Path, file: &Self::LockFile) -> bool;

    fn unlock(&self, file: &Self::LockFile);

    /// Renames a folder to an unused name.
    ///
    /// # Errors
    /// Errors of the file system.
    fn rename(&self, from: &Path, to: &Path) -> Result<()>;
}

/// A lock that is released when dropped.
#[derive(Debug)]
pub struct LockGuard<F: Folders> {
    folders: F,
    file: F::LockFile,
}

impl<F: Folders> Drop for LockGuard<F> {
    fn drop(&mut self) {
        self.folders.unlock(&self.file);
    }
}

/// Result of asking for a lock.
pub enum Attempt<T> {
    Done(T),
    /// Another process holds it.
    Busy,
    /// The folder does not exist, or was removed in the meantime.
    Gone,
}

/// Locks a folder.
///
/// # Errors
/// Errors of the file system.
pub fn lock<F: Folders>(folders: F, folder: &Path) -> Result<Attempt<LockGuard<F>>> {
    let Some(file) = folders.open_lock(folder)? else { return Ok(Attempt::Gone) };
    if !folders.try_lock(folder, &file)? {
        return Ok(Attempt::Busy);
    }
    let held = LockGuard { folders, file };
    Ok(if held.folders.is_still_there(folder, &held.file) { Attempt::Done(held) } else { Attempt::Gone })
}

/// Renames a folder away and only then unlocks it, so that no other process opens it in between.
///
/// # Errors
/// Errors of the file system; the folder is unchanged.
pub fn take_away<F: Folders>(held: LockGuard<F>, folder: &Path, doomed: &Path) -> Result<()> {
    held.folders.rename(folder, doomed)?;
    drop(held);
    Ok(())
}

/// Opens a session or creates it. `open` returns `None` if it does not exist, `begin` if it does. Returns
/// `None` if other processes created and removed it on every attempt.
///
/// # Errors
/// Errors of the two.
pub fn open_or_begin<T>(
    mut open: impl FnMut() -> Result<Option<T>>,
    mut begin: impl FnMut() -> Result<Option<T>>,
) -> Result<Option<T>> {
    for _ in 0..MAX_TRIES {
        if let Some(opened) = open()? {
            return Ok(Some(opened));
        }
        if let Some(begun) = begin()? {
            return Ok(Some(begun));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    //! Two or three requests on one new session, in thousands of orders of the steps above.

    use std::collections::HashMap;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::path::PathBuf;

    use shuttle::sync::{Arc, Mutex};
    use shuttle::thread;

    use super::*;
    use llmctl_base::error::Error;

    const NAME: &str = "new";

    /// A folder with one session or none.
    #[derive(Debug, Default)]
    struct State {
        /// Session that each name leads to.
        names: HashMap<PathBuf, usize>,
        sessions: Vec<Session>,
    }

    #[derive(Debug, Default)]
    struct Session {
        is_locked: bool,
        turns: Vec<usize>,
    }

    /// Each call is one step: the scheduler may switch at every lock of the mutex.
    #[derive(Debug, Clone, Default)]
    struct FolderModel(Arc<Mutex<State>>);

    impl FolderModel {
        fn with<T>(&self, step: impl FnOnce(&mut State) -> T) -> T {
            step(&mut self.0.lock().expect("no step panics"))
        }

        fn open(&self) -> Result<Option<LockGuard<FolderModel>>> {
            match lock(self.clone(), Path::new(NAME))? {
                Attempt::Done(held) => Ok(Some(held)),
                Attempt::Busy => Err(Error::SessionBusy(NAME.to_owned())),
                Attempt::Gone => Ok(None),
            }
        }

        /// The draft is locked before it becomes visible.
        fn begin(&self) -> Result<Option<LockGuard<FolderModel>>> {
            let (draft, file) = self.with(|state| {
                state.sessions.push(Session { is_locked: true, ..Session::default() });
                let file = state.sessions.len() - 1;
                let draft = PathBuf::from(format!("draft-{file}"));
                state.names.insert(draft.clone(), file);
                (draft, file)
            });
            let held = LockGuard { folders: self.clone(), file };
            match self.rename(&draft, Path::new(NAME)) {
                Ok(()) => Ok(Some(held)),
                Err(_) => Ok(None),
            }
        }

        fn turns(&self) -> Vec<usize> {
            self.with(|state| {
                state
                    .names
                    .get(Path::new(NAME))
                    .map_or(Vec::new(), |&file| state.sessions[file].turns.clone())
            })
        }
    }

    impl Folders for FolderModel {
        type LockFile = usize;

        fn open_lock(&self, folder: &Path) -> Result<Option<usize>> {
            Ok(self.with(|state| state.names.get(folder).copied()))
        }

        fn try_lock(&self, _: &Path, file: &usize) -> Result<bool> {
            Ok(self.with(|state| !std::mem::replace(&mut state.sessions[*file].is_locked, true)))
        }

        fn is_still_there(&self, folder: &Path, file: &usize) -> bool {
            self.with(|state| state.names.get(folder) == Some(file))
        }

        fn unlock(&self, file: &usize) {
            self.with(|state| state.sessions[*file].is_locked = false);
        }

        fn rename(&self, from: &Path, to: &Path) -> Result<()> {
            self.with(|state| {
                if state.names.contains_key(to) {
                    return Err(Error::InvalidParameter { name: "session", message: "taken".to_owned() });
                }
                let file = state.names.remove(from).ok_or_else(|| Error::SessionNotFound(NAME.to_owned()))?;
                state.names.insert(to.to_owned(), file);
                Ok(())
            })
        }
    }

    /// Removal of the empty session of a request without a turn.
    type Leave = fn(&FolderModel, LockGuard<FolderModel>, usize);

    fn leave(_: &FolderModel, held: LockGuard<FolderModel>, number: usize) {
        take_away(held, Path::new(NAME), Path::new(&format!("doomed-{number}"))).expect("nobody else may");
    }

    /// An earlier, wrong order: the lock is released first, then the session is removed by name.
    fn leave_and_come_back(model: &FolderModel, held: LockGuard<FolderModel>, number: usize) {
        drop(held);
        if let Ok(Some(again)) = model.open() {
            leave(model, again, number);
        }
    }

    /// A request. Returns true if it was answered and its turn saved.
    fn request(model: &FolderModel, number: usize, fails: bool, leave: Leave) -> bool {
        let opened = open_or_begin(|| model.open(), || model.begin());
        let held = match opened {
            Ok(Some(held)) => held,
            Ok(None) => panic!("neither there nor to be begun"),
            Err(Error::SessionBusy(_)) => return false,
            Err(error) => panic!("{error}"),
        };
        if !fails {
            model.with(|state| state.sessions[held.file].turns.push(number));
            return true;
        }
        if model.with(|state| state.sessions[held.file].turns.is_empty()) {
            leave(model, held, number);
        }
        false
    }

    /// Runs requests at the same time, some of which fail. Every turn reported as saved is there in the end.
    fn race(fails: &'static [bool], leave: Leave) {
        let model = FolderModel::default();
        let started: Vec<_> = fails
            .iter()
            .enumerate()
            .map(|(number, &fails)| {
                let model = model.clone();
                thread::spawn(move || request(&model, number, fails, leave).then_some(number))
            })
            .collect();
        let saved: Vec<usize> =
            started.into_iter().filter_map(|thread| thread.join().expect("no panic")).collect();
        let there = model.turns();
        assert!(saved.iter().all(|turn| there.contains(turn)), "{saved:?} were saved, {there:?} are there");
        model
            .with(|state| assert!(state.sessions.iter().all(|session| !session.is_locked), "a lock is left"));
    }

    /// Runs random schedules, and schedules with few switches at unfavourable points.
    fn in_many_orders(fails: &'static [bool], leave: Leave) {
        shuttle::check_random(move || race(fails, leave), 3_000);
        shuttle::check_pct(move || race(fails, leave), 3_000, 3);
    }

    #[test]
    fn requests_at_the_same_time_lose_neither_a_turn_nor_the_session() {
        for fails in
            [&[true, false][..], &[false, false], &[true, true], &[true, true, false], &[true, false, false]]
        {
            in_many_orders(fails, leave);
        }
    }

    #[test]
    fn the_model_finds_the_loss_when_the_lock_is_given_up_first() {
        let race = || in_many_orders(&[true, false], leave_and_come_back);
        catch_unwind(AssertUnwindSafe(race)).expect_err("a turn is lost in some interleaving");
    }
}
