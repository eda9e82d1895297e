//! The table of a server's models decides which are loaded. It is plain data, without models, threads or a
//! clock.
//!
//! `pool` locks it, asks for a step, carries the step out, and reports the result.
//!
//! Invariants: the estimates of all members that are loading, loaded or unloading never exceed the budget
//! together; a member with a use under way is never unloaded; a member is loaded once at a time, and all who
//! wait for it share that load and use it before it makes room for others; a pinned member is unloaded only
//! when it has failed.

use std::time::{Duration, Instant};

/// Time for which uses of a model whose load has failed are refused before one of them tries again.
pub const RETRY_AFTER: Duration = Duration::from_secs(30);

/// The members, in order of their index. `T` is what a loaded member is used through.
#[derive(Debug)]
pub struct ModelTable<T> {
    budget: u64,
    num_loads: u64,
    slots: Vec<MemberSlot<T>>,
}

#[derive(Debug)]
struct MemberSlot<T> {
    is_pinned: bool,
    state: MemberState<T>,
    /// Callers that wait for this member.
    num_waiting: usize,
    /// Those of them that insist on room for it.
    num_insisting: usize,
    /// Takes no new use, because this other member insists on its room.
    gives_way_to: Option<usize>,
    /// Idle time after which it is unloaded, if its last request said so.
    keep_alive: Option<Duration>,
}

#[derive(Debug)]
enum MemberState<T> {
    Unloaded,
    Loading { load: LoadId, bytes: u64 },
    Loaded { load: LoadId, bytes: u64, value: T, num_uses: usize, last_use: Instant },
    Unloading { bytes: u64 },
    Failed { why: String, at: Instant },
}

/// Identifies a load of a member, so that a late report about an earlier one changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadId(u64);

/// The next step of a caller that wants to use a member.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<T> {
    /// Use it, and call [`ModelTable::release`] at the end.
    Use { value: T, load: LoadId },
    /// Load it, and call [`ModelTable::loaded`] or [`ModelTable::failed`].
    Load(LoadId),
    /// Unload this other member, call [`ModelTable::unloaded`], and ask again.
    Unload { index: usize, value: T },
    /// Ask again after a change.
    Wait(Reason),
    /// It cannot be used, for this reason.
    Refuse(UseRefusal),
}

/// Reason for a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The member's own load.
    Loading,
    /// Memory that others use, or are giving back.
    Room,
}

/// Reason why a member cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UseRefusal {
    /// It needs more bytes than there could ever be beside the pinned members.
    TooLarge { needed: u64, free: u64, budget: u64 },
    /// The last load failed, or its engine was lost for good.
    Failed(String),
}

/// Reason why a member cannot be unloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnloadRefusal {
    /// It is in use, or being loaded.
    Busy,
    Pinned,
}

/// The state of a member for those who look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    Unloaded,
    Loading,
    Loaded,
    Unloading,
    Failed(String),
}

impl Status {
    /// Returns the name of the state. Reports `unloading` as `unloaded`, since clients need no third state.
    pub fn name(&self) -> &'static str {
        match self {
            Status::Unloaded | Status::Unloading | Status::Failed(_) => "unloaded",
            Status::Loading => "loading",
            Status::Loaded => "loaded",
        }
    }
}

impl<T> MemberSlot<T> {
    /// Returns whether callers that have waited for the member are about to use it.
    fn is_awaited(&self) -> bool {
        self.num_waiting > 0 && self.gives_way_to.is_none()
    }
}

impl<T: Clone> ModelTable<T> {
    /// Creates a table of members that are not loaded; `pinned` holds, for each, true if it stays loaded.
    pub fn new(budget: u64, pinned: impl IntoIterator<Item = bool>) -> Self {
        let slot = |is_pinned| MemberSlot {
            is_pinned,
            state: MemberState::Unloaded,
            num_waiting: 0,
            num_insisting: 0,
            gives_way_to: None,
            keep_alive: None,
        };
        Self { budget, num_loads: 0, slots: pinned.into_iter().map(slot).collect() }
    }

    /// Returns what to do to use a member that needs `bytes`.
    pub fn step(&mut self, index: usize, bytes: u64, now: Instant) -> Step<T> {
        let slot = &mut self.slots[index];
        match &mut slot.state {
            MemberState::Loaded { .. } if slot.gives_way_to.is_some() => Step::Wait(Reason::Room),
            MemberState::Loaded { load, value, num_uses, last_use, .. } => {
                (*num_uses, *last_use) = (*num_uses + 1, now);
                Step::Use { value: value.clone(), load: *load }
            }
            MemberState::Loading { .. } => Step::Wait(Reason::Loading),
            MemberState::Unloading { .. } => Step::Wait(Reason::Room),
            MemberState::Unloaded | MemberState::Failed { .. } => match self.failure(index, now) {
                Some(why) => Step::Refuse(UseRefusal::Failed(why)),
                None => self.begin(index, bytes),
            },
        }
    }

    /// Returns why uses of a member are refused: for a while after a failure.
    pub fn failure(&self, index: usize, now: Instant) -> Option<String> {
        match &self.slots[index].state {
            MemberState::Failed { why, at } if now.saturating_duration_since(*at) < RETRY_AFTER => {
                Some(why.clone())
            }
            _ => None,
        }
    }

    /// Begins to load a member, or to make room for it.
    fn begin(&mut self, index: usize, bytes: u64) -> Step<T> {
        let free = self.budget.saturating_sub(self.pinned_bytes(index));
        if bytes > free {
            return Step::Refuse(UseRefusal::TooLarge { needed: bytes, free, budget: self.budget });
        }
        let missing = self.used().saturating_add(bytes).saturating_sub(self.budget);
        if missing == 0 {
            self.num_loads += 1;
            let load = LoadId(self.num_loads);
            self.slots[index].state = MemberState::Loading { load, bytes };
            return Step::Load(load);
        }
        let leaving = self.slots.iter().map(|slot| slot.state.leaving_bytes()).sum::<u64>();
        let idle: u64 = self.idle().map(|(_, bytes, _)| bytes).sum();
        // Others are not unloaded for a model that would have to wait all the same.
        let victim = self.idle().min_by_key(|(_, _, last_use)| *last_use).map(|(index, ..)| index);
        let victim = victim.filter(|_| leaving < missing && leaving.saturating_add(idle) >= missing);
        if let Some((index, value)) = victim.and_then(|index| Some((index, self.leave(index)?))) {
            return Step::Unload { index, value };
        }
        if self.slots[index].num_insisting > 0 {
            self.make_way(index, missing.saturating_sub(leaving));
        }
        Step::Wait(Reason::Room)
    }

    /// Returns index, bytes and last use of the members that may be unloaded now.
    fn idle(&self) -> impl Iterator<Item = (usize, u64, Instant)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| match slot.state {
            MemberState::Loaded { bytes, num_uses: 0, last_use, .. }
                if !slot.is_pinned && !slot.is_awaited() =>
            {
                Some((index, bytes, last_use))
            }
            _ => None,
        })
    }

    /// Returns the bytes of all that is in memory, or on its way in or out.
    pub fn used(&self) -> u64 {
        self.slots.iter().map(|slot| slot.state.bytes()).sum()
    }

    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Returns the bytes of pinned members other than this one.
    fn pinned_bytes(&self, index: usize) -> u64 {
        let others = self.slots.iter().enumerate().filter(|(other, slot)| *other != index && slot.is_pinned);
        others.map(|(_, slot)| slot.state.bytes()).sum()
    }

    /// Takes the value out of a loaded member, which is unloading from now on.
    fn leave(&mut self, index: usize) -> Option<T> {
        let state = &mut self.slots[index].state;
        let MemberState::Loaded { bytes, value, .. } = state else { return None };
        let (bytes, value) = (*bytes, value.clone());
        *state = MemberState::Unloading { bytes };
        Some(value)
    }

    /// Reports that a load has ended. Returns the value if no request waits for it.
    #[must_use]
    pub fn loaded(&mut self, index: usize, load: LoadId, value: T, now: Instant) -> Option<T> {
        let slot = &mut self.slots[index];
        match slot.state {
            MemberState::Loading { load: own, bytes, .. } if own == load => {
                slot.state = MemberState::Loaded { load, bytes, value, num_uses: 0, last_use: now };
                slot.gives_way_to = None;
                self.yield_no_more_to(index);
                None
            }
            _ => Some(value),
        }
    }

    /// Reports that a load has failed, or that the engine of a loaded member is lost for good. Returns the value of a loaded member.
    #[must_use]
    pub fn failed(&mut self, index: usize, load: LoadId, why: String, now: Instant) -> Option<T> {
        let slot = &mut self.slots[index];
        let (own, value) = match &slot.state {
            MemberState::Loading { load, .. } => (*load, None),
            MemberState::Loaded { load, value, .. } => (*load, Some(value.clone())),
            _ => return None,
        };
        if own != load {
            return None;
        }
        slot.state = MemberState::Failed { why, at: now };
        slot.gives_way_to = None;
        self.yield_no_more_to(index);
        value
    }

    /// Reports that the memory of a member is free.
    pub fn unloaded(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        if matches!(slot.state, MemberState::Unloading { .. }) {
            (slot.state, slot.gives_way_to) = (MemberState::Unloaded, None);
        }
    }

    /// Ends a use.
    pub fn release(&mut self, index: usize, load: LoadId, now: Instant) {
        if let MemberState::Loaded { load: own, num_uses, last_use, .. } = &mut self.slots[index].state
            && *own == load
        {
            (*num_uses, *last_use) = (num_uses.saturating_sub(1), now);
        }
    }

    /// Reports that the bytes of a member that is not loaded cannot be told, so that it cannot be loaded.
    pub fn not_estimated(&mut self, index: usize, why: String, now: Instant) {
        let state = &mut self.slots[index].state;
        if matches!(state, MemberState::Unloaded | MemberState::Failed { .. }) {
            *state = MemberState::Failed { why, at: now };
        }
    }

    /// Counts a caller that waits for a member, so that it can use the member before others get its room. Each call is followed by
    /// [`Self::withdraw`].
    pub fn wait(&mut self, index: usize) {
        self.slots[index].num_waiting += 1;
    }

    /// Lets a caller that waits insist: while the member has no room, members that are in use take no further use until it is loaded.
    pub fn insist(&mut self, index: usize) {
        self.slots[index].num_insisting += 1;
    }

    /// Ends a wait, which has insisted or not.
    pub fn withdraw(&mut self, index: usize, has_insisted: bool) {
        let slot = &mut self.slots[index];
        slot.num_waiting = slot.num_waiting.saturating_sub(1);
        slot.num_insisting = slot.num_insisting.saturating_sub(usize::from(has_insisted));
        if slot.num_insisting == 0 {
            self.yield_no_more_to(index);
        }
    }

    /// Lets the members used longest ago give way to this one, as many as it takes to free `missing` bytes.
    fn make_way(&mut self, index: usize, mut missing: u64) {
        let mut candidates: Vec<(Instant, usize, u64)> = Vec::new();
        for (other, slot) in self.slots.iter().enumerate() {
            let MemberState::Loaded { bytes, last_use, .. } = slot.state else { continue };
            match slot.gives_way_to {
                Some(to) if to == index => missing = missing.saturating_sub(bytes),
                None if !slot.is_pinned && !slot.is_awaited() => candidates.push((last_use, other, bytes)),
                _ => {}
            }
        }
        candidates.sort_unstable();
        for (_, other, bytes) in candidates {
            if missing == 0 {
                return;
            }
            self.slots[other].gives_way_to = Some(index);
            missing = missing.saturating_sub(bytes);
        }
    }

    fn yield_no_more_to(&mut self, index: usize) {
        let yielding = self.slots.iter_mut().filter(|slot| slot.gives_way_to == Some(index));
        yielding.for_each(|slot| slot.gives_way_to = None);
    }

    /// Begins to unload a member on request. Returns what is to be unloaded; `None` if it is unloaded
    /// already.
    ///
    /// # Errors
    /// It is pinned, in use, or being loaded.
    pub fn unload(&mut self, index: usize) -> Result<Option<T>, UnloadRefusal> {
        let slot = &mut self.slots[index];
        match slot.state {
            MemberState::Loading { .. } | MemberState::Loaded { .. } if slot.is_pinned => {
                Err(UnloadRefusal::Pinned)
            }
            MemberState::Loading { .. } => Err(UnloadRefusal::Busy),
            MemberState::Loaded { num_uses, .. } if num_uses > 0 => Err(UnloadRefusal::Busy),
            MemberState::Loaded { .. } => Ok(self.leave(index)),
            MemberState::Failed { .. } => {
                slot.state = MemberState::Unloaded;
                Ok(None)
            }
            MemberState::Unloaded | MemberState::Unloading { .. } => Ok(None),
        }
    }

    /// Forgets a failure, so that the next step loads the member again.
    pub fn forget_failure(&mut self, index: usize) {
        let state = &mut self.slots[index].state;
        if matches!(state, MemberState::Failed { .. }) {
            *state = MemberState::Unloaded;
        }
    }

    /// Sets the idle time after which a member is unloaded; `None` is that of all.
    pub fn keep_alive(&mut self, index: usize, keep_alive: Option<Duration>) {
        self.slots[index].keep_alive = keep_alive;
    }

    /// Returns when a loaded member expires that is idle from `last_use` on; `None` is never. `keep_alive` is that of all.
    fn expiry(&self, index: usize, last_use: Instant, keep_alive: Duration) -> Option<Instant> {
        last_use.checked_add(self.slots[index].keep_alive.unwrap_or(keep_alive))
    }

    /// Returns the time that is left of a loaded member, were it idle from now on; `None` is for ever.
    pub fn left(&self, index: usize, keep_alive: Duration, now: Instant) -> Option<Duration> {
        let last_use = match self.slots[index].state {
            _ if self.slots[index].is_pinned => return None,
            MemberState::Loaded { num_uses: 0, last_use, .. } => last_use,
            _ => now,
        };
        self.expiry(index, last_use, keep_alive).map(|end| end.saturating_duration_since(now))
    }

    /// Begins to unload a member that has been idle for `keep_alive`, or for its own time.
    pub fn expire(&mut self, keep_alive: Duration, now: Instant) -> Option<(usize, T)> {
        let is_over = |(index, _, last_use): &(usize, u64, Instant)| {
            self.expiry(*index, *last_use, keep_alive).is_some_and(|end| end <= now)
        };
        let (index, ..) = self.idle().find(is_over)?;
        self.leave(index).map(|value| (index, value))
    }

    /// Returns when the next idle member expires.
    pub fn next_expiry(&self, keep_alive: Duration) -> Option<Instant> {
        self.idle().filter_map(|(index, _, last_use)| self.expiry(index, last_use, keep_alive)).min()
    }

    pub fn status(&self, index: usize) -> Status {
        match &self.slots[index].state {
            MemberState::Unloaded => Status::Unloaded,
            MemberState::Loading { .. } => Status::Loading,
            MemberState::Loaded { .. } => Status::Loaded,
            MemberState::Unloading { .. } => Status::Unloading,
            MemberState::Failed { why, .. } => Status::Failed(why.clone()),
        }
    }

    /// Returns the value of a loaded member, without using it.
    pub fn value(&self, index: usize) -> Option<&T> {
        match &self.slots[index].state {
            MemberState::Loaded { value, .. } => Some(value),
            _ => None,
        }
    }

    /// Returns the values of all loaded members.
    pub fn values(&self) -> Vec<T> {
        (0..self.slots.len()).filter_map(|index| self.value(index).cloned()).collect()
    }
}

impl<T> MemberState<T> {
    fn bytes(&self) -> u64 {
        match self {
            MemberState::Loading { bytes, .. }
            | MemberState::Loaded { bytes, .. }
            | MemberState::Unloading { bytes } => *bytes,
            MemberState::Unloaded | MemberState::Failed { .. } => 0,
        }
    }

    /// Returns the bytes that will be free without another unload.
    fn leaving_bytes(&self) -> u64 {
        match self {
            MemberState::Unloading { bytes } => *bytes,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(budget: u64, pinned: &[bool]) -> (ModelTable<&'static str>, Instant) {
        (ModelTable::new(budget, pinned.iter().copied()), Instant::now())
    }

    /// Loads a member that fits, and returns its load.
    fn load(table: &mut ModelTable<&'static str>, index: usize, bytes: u64, now: Instant) -> LoadId {
        let Step::Load(load) = table.step(index, bytes, now) else { panic!("it does not fit") };
        assert_eq!(table.loaded(index, load, "model", now), None);
        load
    }

    fn uses(table: &mut ModelTable<&'static str>, index: usize, now: Instant) -> LoadId {
        let Step::Use { load, .. } = table.step(index, 1, now) else { panic!("it is not loaded") };
        load
    }

    /// Waits for a member that has no room, and insists on it.
    fn insist(table: &mut ModelTable<&'static str>, index: usize, bytes: u64, now: Instant) {
        table.wait(index);
        table.insist(index);
        assert_eq!(table.step(index, bytes, now), Step::Wait(Reason::Room));
    }

    #[test]
    fn a_member_is_loaded_once_for_all_who_wait() {
        let (mut table, now) = table(10, &[false]);
        let Step::Load(first) = table.step(0, 4, now) else { panic!("a load") };
        assert_eq!(table.step(0, 4, now), Step::Wait(Reason::Loading));
        assert_eq!(table.loaded(0, first, "a", now), None);
        assert_eq!(table.step(0, 4, now), Step::Use { value: "a", load: first });
        assert_eq!((table.used(), table.status(0)), (4, Status::Loaded));
        assert_eq!(table.loaded(0, first, "b", now), Some("b"), "nobody asked for a second one");
    }

    #[test]
    fn the_idle_member_used_longest_ago_makes_room() {
        let (mut table, now) = table(10, &[false, false, false]);
        let later = now + Duration::from_secs(1);
        load(&mut table, 0, 4, later);
        load(&mut table, 1, 4, now);
        assert_eq!(table.step(2, 4, later), Step::Unload { index: 1, value: "model" });
        assert_eq!(table.step(2, 4, later), Step::Wait(Reason::Room), "its memory is not free yet");
        assert_eq!(table.used(), 8);
        table.unloaded(1);
        assert!(matches!(table.step(2, 4, later), Step::Load(_)));
        assert_eq!(table.used(), 8);
    }

    #[test]
    fn a_member_in_use_or_pinned_stays() {
        let (mut table, now) = table(10, &[false, true, false]);
        let used = load(&mut table, 0, 4, now);
        uses(&mut table, 0, now);
        load(&mut table, 1, 4, now);
        assert_eq!(table.step(2, 4, now), Step::Wait(Reason::Room));
        assert_eq!(
            (table.unload(0), table.unload(1)),
            (Err(UnloadRefusal::Busy), Err(UnloadRefusal::Pinned))
        );
        assert_eq!(
            table.step(2, 7, now),
            Step::Refuse(UseRefusal::TooLarge { needed: 7, free: 6, budget: 10 })
        );
        table.release(0, used, now);
        assert_eq!(table.step(2, 4, now), Step::Unload { index: 0, value: "model" });
    }

    #[test]
    fn nothing_is_unloaded_for_a_member_that_has_to_wait_all_the_same() {
        let (mut table, now) = table(10, &[false, false, false]);
        load(&mut table, 0, 2, now);
        load(&mut table, 1, 8, now);
        uses(&mut table, 1, now);
        assert_eq!(table.step(2, 5, now), Step::Wait(Reason::Room));
        assert_eq!(table.status(0), Status::Loaded);
    }

    #[test]
    fn a_failure_is_told_for_a_while_and_then_tried_again() {
        let (mut table, now) = table(10, &[false]);
        let Step::Load(load) = table.step(0, 4, now) else { panic!("a load") };
        assert_eq!(table.failed(0, load, "no file".to_owned(), now), None);
        let failed = Step::Refuse(UseRefusal::Failed("no file".to_owned()));
        assert_eq!((table.step(0, 4, now), table.used()), (failed, 0));
        assert!(matches!(table.step(0, 4, now + RETRY_AFTER), Step::Load(_)));
        let (mut table, now) = self::table(10, &[true]);
        let load = self::load(&mut table, 0, 4, now);
        assert_eq!(table.failed(0, load, "lost".to_owned(), now), Some("model"));
        table.forget_failure(0);
        let Step::Load(second) = table.step(0, 4, now) else { panic!("a load") };
        assert_eq!(table.failed(0, load, "late".to_owned(), now), None);
        assert_eq!(table.loaded(0, second, "b", now), None, "the report of the first load was late");
        table.release(0, load, now);
        assert_eq!(table.status(0), Status::Loaded);
    }

    #[test]
    fn idle_members_expire_in_time() {
        let (mut table, now) = table(10, &[false, true]);
        let second = Duration::from_secs(1);
        let used = load(&mut table, 0, 4, now);
        load(&mut table, 1, 4, now);
        uses(&mut table, 0, now);
        assert_eq!((table.expire(second, now + second), table.next_expiry(second)), (None, None));
        table.release(0, used, now + second);
        assert_eq!(table.next_expiry(second), Some(now + 2 * second));
        assert_eq!(table.expire(second, now + second), None);
        assert_eq!(table.expire(second, now + 2 * second), Some((0, "model")));
        assert_eq!(table.expire(second, now + 9 * second), None, "it is leaving, and the other is pinned");
    }

    #[test]
    fn members_in_use_give_way_to_one_that_insists() {
        let (mut table, now) = table(10, &[false, false]);
        let first = load(&mut table, 0, 8, now);
        uses(&mut table, 0, now);
        assert_eq!(table.step(1, 8, now), Step::Wait(Reason::Room));
        insist(&mut table, 1, 8, now);
        assert_eq!(table.step(0, 8, now), Step::Wait(Reason::Room), "no further use");
        table.withdraw(1, true);
        uses(&mut table, 0, now);
        insist(&mut table, 1, 8, now);
        (0..2).for_each(|_| table.release(0, first, now));
        assert_eq!(table.step(1, 8, now), Step::Unload { index: 0, value: "model" });
        table.unloaded(0);
        load(&mut table, 1, 8, now);
        table.withdraw(1, true);
        assert_eq!(table.step(0, 8, now), Step::Unload { index: 1, value: "model" }, "in turns");
    }

    #[test]
    fn a_loaded_member_is_used_by_those_who_waited_before_it_makes_room() {
        let (mut table, now) = table(10, &[false, false]);
        table.wait(0);
        let used = load(&mut table, 0, 8, now);
        assert_eq!(table.step(1, 8, now), Step::Wait(Reason::Room), "nobody has used it yet");
        assert_eq!((table.expire(Duration::ZERO, now), table.next_expiry(Duration::ZERO)), (None, None));
        insist(&mut table, 1, 8, now);
        assert_eq!(uses(&mut table, 0, now), used, "it gives way after them");
        table.withdraw(0, false);
        assert_eq!(table.step(1, 8, now), Step::Wait(Reason::Room));
        assert_eq!(table.step(0, 8, now), Step::Wait(Reason::Room), "it gives way now");
        table.wait(0);
        table.release(0, used, now);
        let leaves = Step::Unload { index: 0, value: "model" };
        assert_eq!(table.step(1, 8, now), leaves, "those who wait for it now come later");
    }

    #[test]
    fn two_members_that_insist_take_turns() {
        let (mut table, now) = table(10, &[false, false]);
        let mut load_of_user = load(&mut table, 0, 8, now);
        uses(&mut table, 0, now);
        for turn in 0..4 {
            let (user, other) = (turn % 2, (turn + 1) % 2);
            insist(&mut table, other, 8, now);
            assert_eq!(table.step(user, 8, now), Step::Wait(Reason::Room), "no further use");
            table.release(user, load_of_user, now);
            assert!(matches!(table.step(other, 8, now), Step::Unload { .. }));
            // Insists while the other is not loaded yet.
            insist(&mut table, user, 8, now);
            table.unloaded(user);
            load_of_user = load(&mut table, other, 8, now);
            assert_eq!(table.step(user, 8, now), Step::Wait(Reason::Room));
            assert_eq!(uses(&mut table, other, now), load_of_user);
            table.withdraw(other, true);
            table.withdraw(user, true);
        }
    }

    #[test]
    fn waits_for_a_member_that_gives_way_hold_up_no_third_one() {
        let (mut table, now) = table(10, &[false, false, false]);
        load(&mut table, 0, 6, now);
        uses(&mut table, 0, now);
        load(&mut table, 2, 4, now);
        insist(&mut table, 1, 6, now);
        insist(&mut table, 0, 6, now);
        uses(&mut table, 2, now);
    }

    #[test]
    fn a_member_that_cannot_be_estimated_has_failed() {
        let (mut table, now) = table(10, &[false]);
        table.not_estimated(0, "no file".to_owned(), now);
        assert_eq!(table.status(0), Status::Failed("no file".to_owned()));
        assert_eq!(table.step(0, 4, now), Step::Refuse(UseRefusal::Failed("no file".to_owned())));
        assert_eq!(table.failure(0, now + RETRY_AFTER), None);
        load(&mut table, 0, 4, now + RETRY_AFTER);
        table.not_estimated(0, "no file".to_owned(), now);
        assert_eq!(table.status(0), Status::Loaded);
    }
}
