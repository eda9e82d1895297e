//! Runs what the table decides: loads and unloads on blocking threads, and lets uses wait for them.
//!
//! Invariants: a load continues when the request that began it leaves; every wait ends: with the load, at the
//! caller's deadline, after [`ROOM_WAIT`] for memory, or when the pool closes; the lock around the table is
//! never held while anything is loaded, dropped or waited for.

use std::future::pending;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{OnceCell, watch};
use tokio::task::spawn_blocking;
use tokio::time::sleep_until;

use super::table::{LoadId, ModelTable, Reason, Status, Step, UnloadRefusal, UseRefusal};

/// Longest wait of a request for memory that other models use.
pub const ROOM_WAIT: Duration = Duration::from_secs(60);

/// Wait for memory after which the models that use it take no new requests.
const INSIST_AFTER: Duration = Duration::from_secs(2);

/// A model that can be used while it is loaded.
pub trait Unload: Clone + Send + Sync + 'static {
    /// Frees its memory, after the last use.
    fn unload(self) -> impl Future<Output = ()> + Send;
}

/// Called with the reason when the engine of a loaded model is lost for good.
pub type OnLost = Arc<dyn Fn(String) + Send + Sync>;

/// The loader of a member.
pub struct Source<T> {
    pub is_pinned: bool,
    /// Computes the bytes that it will need.
    pub estimate: Box<dyn Fn() -> Result<u64, String> + Send + Sync>,
    pub load: Box<dyn Fn(OnLost) -> Result<T, String> + Send + Sync>,
}

/// Why a member is not there for a use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unavailable {
    /// Its use is refused now.
    Refused(UseRefusal),
    /// Others needed the memory for too long.
    NoRoom { needed: u64, free: u64, budget: u64 },
    /// The caller's deadline has passed.
    Late,
    /// The server stops.
    Closed,
}

/// Members that share a budget of memory; clones are the same pool.
#[derive(Clone)]
pub struct ModelPool<T: Unload> {
    state: Arc<ModelPoolState<T>>,
}

struct ModelPoolState<T: Unload> {
    sources: Vec<Source<T>>,
    estimates: Vec<OnceCell<u64>>,
    table: Mutex<ModelTable<T>>,
    /// Notified of every change of the table for which requests may wait.
    changes: watch::Sender<()>,
    is_closed: AtomicBool,
}

/// A use of a loaded member, which is not unloaded while this lives.
pub struct Lease<T: Unload> {
    pool: ModelPool<T>,
    index: usize,
    load: LoadId,
    value: T,
}

impl<T: Unload> Lease<T> {
    pub fn value(&self) -> &T {
        &self.value
    }
}

impl<T: Unload> Drop for Lease<T> {
    fn drop(&mut self) {
        self.pool.change(|table| table.release(self.index, self.load, Instant::now()));
    }
}

/// A wait for a member; see [`ModelTable::wait`].
struct MemberWait<T: Unload> {
    pool: ModelPool<T>,
    index: usize,
    /// Beginning of the wait for memory; `None` while the member has room.
    room_since: Option<Instant>,
    has_insisted: bool,
}

impl<T: Unload> MemberWait<T> {
    /// Waits for memory, and insists on it after a while. Returns when to ask again at the latest; `None` once it has taken too long.
    fn for_room(&mut self) -> Option<Instant> {
        let since = *self.room_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= INSIST_AFTER && !std::mem::replace(&mut self.has_insisted, true) {
            self.pool.change(|table| table.insist(self.index));
        }
        let longest = if self.has_insisted { ROOM_WAIT } else { INSIST_AFTER };
        (since.elapsed() < ROOM_WAIT).then(|| since + longest)
    }
}

impl<T: Unload> Drop for MemberWait<T> {
    fn drop(&mut self) {
        self.pool.change(|table| table.withdraw(self.index, self.has_insisted));
    }
}

impl<T: Unload> ModelPool<T> {
    /// Creates a pool in which nothing is loaded.
    pub fn new(budget: u64, sources: Vec<Source<T>>) -> Self {
        let table = ModelTable::new(budget, sources.iter().map(|source| source.is_pinned));
        let state = ModelPoolState {
            estimates: sources.iter().map(|_| OnceCell::new()).collect(),
            sources,
            table: Mutex::new(table),
            changes: watch::Sender::new(()),
            is_closed: AtomicBool::new(false),
        };
        Self { state: Arc::new(state) }
    }

    /// Uses a member, which is loaded for that if it is not yet.
    ///
    /// # Errors
    /// Why it cannot be used; [`Unavailable::Late`] at `deadline`.
    pub async fn acquire(&self, index: usize, deadline: Option<Instant>) -> Result<Lease<T>, Unavailable> {
        let bytes = self.estimate(index).await?;
        let mut changes = self.state.changes.subscribe();
        let mut wait = None;
        loop {
            if self.state.is_closed.load(Ordering::Acquire) {
                return Err(Unavailable::Closed);
            }
            changes.mark_unchanged();
            let wake_at = match self.waiting_step(index, bytes, &mut wait) {
                Step::Use { value, load } => return Ok(Lease { pool: self.clone(), index, load, value }),
                Step::Refuse(refusal) => return Err(Unavailable::Refused(refusal)),
                Step::Load(load) => {
                    let pool = self.clone();
                    drop(spawn_blocking(move || pool.run_load(index, load)));
                    continue;
                }
                Step::Unload { index, value } => {
                    self.begin_unload(index, value);
                    continue;
                }
                Step::Wait(Reason::Loading) => None,
                Step::Wait(Reason::Room) => {
                    let ask_at = wait.as_mut().and_then(MemberWait::for_room);
                    Some(ask_at.ok_or_else(|| self.no_room(bytes))?)
                }
            };
            tokio::select! {
                _ = changes.changed() => {}
                () = at(wake_at) => {}
                () = at(deadline) => return Err(Unavailable::Late),
            }
        }
    }

    /// Returns the next step of a caller, which waits from the first one that is no use.
    fn waiting_step(&self, index: usize, bytes: u64, wait: &mut Option<MemberWait<T>>) -> Step<T> {
        let mut table = self.state.table.lock();
        let step = table.step(index, bytes, Instant::now());
        if wait.is_none() && matches!(step, Step::Wait(_) | Step::Load(_)) {
            table.wait(index);
            *wait = Some(MemberWait { pool: self.clone(), index, room_since: None, has_insisted: false });
        }
        step
    }

    /// Returns the bytes that a member needs, computed once. After a failure, nothing is computed for a while.
    async fn estimate(&self, index: usize) -> Result<u64, Unavailable> {
        let compute = || async {
            if let Some(why) = self.state.table.lock().failure(index, Instant::now()) {
                return Err(why);
            }
            let state = Arc::clone(&self.state);
            let estimated = spawn_blocking(move || contained(|| (state.sources[index].estimate)())).await;
            let estimated = estimated.unwrap_or_else(|_| Err("the server stops".to_owned()));
            estimated.inspect_err(|why| {
                self.change(|table| table.not_estimated(index, why.clone(), Instant::now()));
            })
        };
        let estimated = self.state.estimates[index].get_or_try_init(compute).await;
        estimated.copied().map_err(|why| Unavailable::Refused(UseRefusal::Failed(why)))
    }

    /// Loads a member on this thread, before the server takes requests.
    ///
    /// # Errors
    /// Why it cannot be loaded.
    pub fn load_now(&self, index: usize) -> Result<(), Unavailable> {
        let refused = |why| Unavailable::Refused(UseRefusal::Failed(why));
        let bytes = contained(|| (self.state.sources[index].estimate)()).map_err(refused)?;
        let _ = self.state.estimates[index].set(bytes); // fails if it is known
        let step = self.state.table.lock().step(index, bytes, Instant::now());
        match step {
            Step::Load(load) => self.run_load(index, load),
            Step::Refuse(refusal) => return Err(Unavailable::Refused(refusal)),
            Step::Wait(_) | Step::Unload { .. } => return Err(self.no_room(bytes)),
            Step::Use { load, .. } => self.change(|table| table.release(index, load, Instant::now())),
        }
        match self.status(index) {
            Status::Failed(why) => Err(refused(why)),
            _ => Ok(()),
        }
    }

    fn run_load(&self, index: usize, load: LoadId) {
        let weak = Arc::downgrade(&self.state);
        let on_lost: OnLost = Arc::new(move |why| {
            if let Some(state) = weak.upgrade() {
                let pool = ModelPool { state };
                drop(pool.change(|table| table.failed(index, load, why, Instant::now())));
            }
        });
        let unused = match contained(|| (self.state.sources[index].load)(on_lost)) {
            Ok(value) => self.change(|table| table.loaded(index, load, value, Instant::now())),
            Err(why) => self.change(|table| table.failed(index, load, why, Instant::now())),
        };
        drop(unused);
    }

    fn begin_unload(&self, index: usize, value: T) {
        let pool = self.clone();
        drop(tokio::spawn(async move {
            value.unload().await;
            pool.change(|table| table.unloaded(index));
        }));
    }

    /// Unloads a member that is not in use, and waits until its memory is free.
    ///
    /// # Errors
    /// It is pinned, in use, or being loaded.
    pub async fn unload(&self, index: usize) -> Result<(), UnloadRefusal> {
        let mut changes = self.state.changes.subscribe();
        if let Some(value) = self.change(|table| table.unload(index))? {
            self.begin_unload(index, value);
        }
        while self.status(index) == Status::Unloading {
            let _ = changes.changed().await; // the sender is in this pool
        }
        Ok(())
    }

    /// Unloads members that have been idle for `keep_alive`, until the pool closes.
    pub async fn expire_idle(self, keep_alive: Duration) {
        let mut changes = self.state.changes.subscribe();
        while !self.state.is_closed.load(Ordering::Acquire) {
            changes.mark_unchanged();
            let expired = self.state.table.lock().expire(keep_alive, Instant::now());
            if let Some((index, value)) = expired {
                self.begin_unload(index, value);
                continue;
            }
            let next = self.state.table.lock().next_expiry(keep_alive);
            tokio::select! {
                _ = changes.changed() => {}
                () = at(next) => {}
            }
        }
    }

    /// Sets the idle time after which a member is unloaded; `None` is that of all.
    pub fn keep_alive(&self, index: usize, keep_alive: Option<Duration>) {
        self.change(|table| table.keep_alive(index, keep_alive));
    }

    /// Returns the time that is left of a loaded member; `None` is for ever. `keep_alive` is that of all.
    pub fn left(&self, index: usize, keep_alive: Duration) -> Option<Duration> {
        self.state.table.lock().left(index, keep_alive, Instant::now())
    }

    /// Refuses uses and loads from now on.
    pub fn close(&self) {
        self.state.is_closed.store(true, Ordering::Release);
        self.state.changes.send_replace(());
    }

    /// Waits until nothing is unloading.
    pub async fn settled(&self) {
        let mut changes = self.state.changes.subscribe();
        while (0..self.state.sources.len()).any(|index| self.status(index) == Status::Unloading) {
            let _ = changes.changed().await; // the sender is in this pool
        }
    }

    /// Forgets a failure, so that the next use loads the member again.
    pub fn forget_failure(&self, index: usize) {
        self.change(|table| table.forget_failure(index));
    }

    pub fn status(&self, index: usize) -> Status {
        self.state.table.lock().status(index)
    }

    /// Returns the value of a loaded member, without using it.
    pub fn value(&self, index: usize) -> Option<T> {
        self.state.table.lock().value(index).cloned()
    }

    /// Returns the values of all loaded members.
    pub fn values(&self) -> Vec<T> {
        self.state.table.lock().values()
    }

    fn no_room(&self, needed: u64) -> Unavailable {
        let table = self.state.table.lock();
        let budget = table.budget();
        Unavailable::NoRoom { needed, free: budget.saturating_sub(table.used()), budget }
    }

    /// Changes the table, and tells those who wait.
    fn change<R>(&self, change: impl FnOnce(&mut ModelTable<T>) -> R) -> R {
        let result = change(&mut self.state.table.lock());
        self.state.changes.send_replace(());
        result
    }
}

/// Returns a panic as an error.
fn contained<R>(work: impl FnOnce() -> Result<R, String>) -> Result<R, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        Err(format!("a bug of llmctl, while loading: {}", llmctl_base::panic_text(&*panic)))
    })
}

/// Waits until a moment; without one, for ever.
async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment.into()).await,
        None => pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    /// Bytes that all models together have in memory, and the most of them so far.
    #[derive(Default)]
    struct Memory {
        now: AtomicU64,
        most: AtomicU64,
        num_loads: AtomicU64,
    }

    impl Memory {
        fn take(&self, bytes: u64) {
            let now = self.now.fetch_add(bytes, Ordering::SeqCst) + bytes;
            self.most.fetch_max(now, Ordering::SeqCst);
            self.num_loads.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[derive(Clone)]
    struct Model {
        bytes: u64,
        memory: Arc<Memory>,
        on_lost: OnLost,
    }

    impl Unload for Model {
        async fn unload(self) {
            tokio::time::sleep(Duration::from_millis(self.bytes % 3)).await;
            self.memory.now.fetch_sub(self.bytes, Ordering::SeqCst);
        }
    }

    fn source(bytes: u64, memory: &Arc<Memory>) -> Source<Model> {
        let memory = Arc::clone(memory);
        let load = move |on_lost: OnLost| {
            memory.take(bytes);
            std::thread::sleep(Duration::from_millis(bytes % 4));
            Ok(Model { bytes, memory: Arc::clone(&memory), on_lost })
        };
        Source { is_pinned: false, estimate: Box::new(move || Ok(bytes)), load: Box::new(load) }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn a_storm_of_uses_keeps_to_the_budget_and_ends() {
        let memory = Arc::new(Memory::default());
        let sizes = [5, 4, 3, 7, 2, 6];
        let pool = ModelPool::new(10, sizes.iter().map(|bytes| source(*bytes, &memory)).collect());
        let mut storm = tokio::task::JoinSet::new();
        for client in 0..32_usize {
            let pool = pool.clone();
            storm.spawn(async move {
                for round in 0..12 {
                    let index = (client * 7 + round * 5) % sizes.len();
                    if round % 4 == 3 {
                        let _ = pool.unload(index).await; // refused while others use it
                    }
                    let lease = pool.acquire(index, None).await.map_err(|why| format!("{why:?}"))?;
                    assert_eq!(lease.value().bytes, sizes[index]);
                    tokio::time::sleep(Duration::from_millis(client as u64 % 3)).await;
                }
                Ok::<_, String>(())
            });
        }
        let all =
            tokio::time::timeout(Duration::from_secs(120), storm.join_all()).await.expect("no deadlock");
        assert!(all.iter().all(Result::is_ok), "{all:?}");
        let most = memory.most.load(Ordering::SeqCst);
        assert!(most <= 10, "{most} bytes of 10");
        assert!(memory.num_loads.load(Ordering::SeqCst) > 6, "models made room for each other");
    }

    #[tokio::test]
    async fn an_engine_that_is_lost_for_good_fails_its_member_alone() {
        let memory = Arc::new(Memory::default());
        let pool = ModelPool::new(10, vec![source(4, &memory), source(5, &memory)]);
        let lease = pool.acquire(0, None).await.expect("it loads");
        let other = pool.acquire(1, None).await.expect("it loads");
        (lease.value().on_lost)("crashed".to_owned());
        assert_eq!(pool.status(0), Status::Failed("crashed".to_owned()));
        let refused = pool.acquire(0, None).await.err();
        assert_eq!(refused, Some(Unavailable::Refused(UseRefusal::Failed("crashed".to_owned()))));
        drop(lease);
        drop(other);
        assert!(pool.acquire(1, None).await.is_ok());
        pool.forget_failure(0);
        let lease = pool.acquire(0, None).await.expect("it is tried again");
        (lease.value().on_lost)("again".to_owned());
        assert_eq!(pool.status(0), Status::Failed("again".to_owned()));
    }

    #[tokio::test]
    async fn waits_end_at_their_deadline_and_when_the_pool_closes() {
        let memory = Arc::new(Memory::default());
        let pool = ModelPool::new(10, vec![source(6, &memory), source(7, &memory)]);
        let lease = pool.acquire(0, None).await.expect("it loads");
        let soon = Instant::now() + Duration::from_millis(20);
        assert_eq!(pool.acquire(1, Some(soon)).await.err(), Some(Unavailable::Late));
        let waiting = tokio::spawn({
            let pool = pool.clone();
            async move { pool.acquire(1, None).await.err() }
        });
        tokio::task::yield_now().await;
        pool.close();
        assert_eq!(waiting.await.ok(), Some(Some(Unavailable::Closed)));
        drop(lease);
    }

    #[tokio::test]
    async fn a_panic_in_a_load_is_a_failure() {
        let estimate = Box::new(|| Ok(1));
        let load = Box::new(|_: OnLost| -> Result<Model, String> { panic!("no such tensor") });
        let pool = ModelPool::new(10, vec![Source { is_pinned: false, estimate, load }]);
        let Some(Unavailable::Refused(UseRefusal::Failed(why))) = pool.acquire(0, None).await.err() else {
            panic!("it cannot be used");
        };
        assert!(why.contains("no such tensor"), "{why}");
    }

    /// A source of a model of one byte, and how often its estimate was computed. The first `num_failures` estimates fail.
    fn estimated(num_failures: u64) -> (Source<Model>, Arc<AtomicU64>) {
        let (source, count) = (source(1, &Arc::default()), Arc::new(AtomicU64::new(0)));
        let counted = Arc::clone(&count);
        let estimate = move || match counted.fetch_add(1, Ordering::SeqCst) < num_failures {
            true => Err("no file".to_owned()),
            false => Ok(1),
        };
        (Source { estimate: Box::new(estimate), ..source }, count)
    }

    #[tokio::test]
    async fn an_estimate_is_computed_once() {
        let (source, count) = estimated(0);
        let pool = ModelPool::new(10, vec![source]);
        assert_eq!(pool.load_now(0), Ok(()));
        drop(pool.acquire(0, None).await.expect("it is loaded"));
        assert_eq!(count.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn an_estimate_that_fails_is_a_failure_of_its_member() {
        let (source, count) = estimated(1);
        let pool = ModelPool::new(10, vec![source]);
        for _ in 0..2 {
            let refused = Unavailable::Refused(UseRefusal::Failed("no file".to_owned()));
            assert_eq!(pool.acquire(0, None).await.err(), Some(refused));
            assert_eq!(pool.status(0), Status::Failed("no file".to_owned()));
        }
        assert_eq!(count.load(Ordering::SeqCst), 1, "the second use was told of the first failure");
        pool.forget_failure(0);
        assert!(pool.acquire(0, None).await.is_ok());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn models_that_take_turns_are_used_each_time() {
        let memory = Arc::new(Memory::default());
        let pool = ModelPool::new(10, vec![source(6, &memory), source(7, &memory)]);
        let expiring = tokio::spawn(pool.clone().expire_idle(Duration::ZERO));
        for round in 0..40 {
            let used = async |index: usize| drop(pool.acquire(index, None).await.expect("it loads"));
            tokio::join!(used(round % 2), used((round + 1) % 2));
        }
        let num_loads = memory.num_loads.load(Ordering::SeqCst);
        assert!(num_loads <= 80, "{num_loads} loads for 80 uses");
        pool.close();
        expiring.await.expect("it ends");
    }

    #[tokio::test]
    async fn idle_members_leave_by_themselves() {
        let memory = Arc::new(Memory::default());
        let pool = ModelPool::new(10, vec![source(6, &memory)]);
        let expiring = tokio::spawn(pool.clone().expire_idle(Duration::from_millis(10)));
        drop(pool.acquire(0, None).await.expect("it loads"));
        let gone = async {
            while memory.now.load(Ordering::SeqCst) > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), gone).await.expect("it is unloaded");
        pool.close();
        expiring.await.expect("it ends");
    }
}
