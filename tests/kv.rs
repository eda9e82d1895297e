//! Promise: whatever is shared, forked, cut, indexed and evicted, every table reads its own tokens, no page that another
//! may read is written, the index never lies, and no page is lost.

use std::collections::HashMap;

use llmctl_models::kv::{KvGroup, KvKind, PAGE_TOKENS, PagePool, PageRef, PageTable};
use proptest::prelude::*;
use proptest::sample::Index;

#[derive(Debug, Clone)]
enum Action {
    Create,
    /// A new table from the index, for tokens that begin like an existing table's.
    Adopt(Index, usize),
    Extend(Index, Vec<u32>),
    Truncate(Index, Index),
    Fork(Index),
    Publish(Index),
    Drop(Index),
}

/// Few different tokens, so that different tables come to the same content.
fn actions() -> impl Strategy<Value = Vec<Action>> {
    let any = any::<Index>;
    let tokens = prop_oneof![
        prop::collection::vec(0u32..2, 1..6),
        (0u32..2, 1usize..3 * PAGE_TOKENS).prop_map(|(token, len)| vec![token; len]),
    ];
    let action = prop_oneof![
        1 => Just(Action::Create),
        2 => (any(), 0usize..200).prop_map(|(table, len)| Action::Adopt(table, len)),
        5 => (any(), tokens).prop_map(|(table, tokens)| Action::Extend(table, tokens)),
        2 => (any(), any()).prop_map(|(table, len)| Action::Truncate(table, len)),
        2 => any().prop_map(Action::Fork),
        3 => any().prop_map(Action::Publish),
        2 => any().prop_map(Action::Drop),
    ];
    prop::collection::vec(action, 1..80)
}

/// Tables with the tokens they should hold, and a memory that holds what was written.
struct World {
    kinds: &'static [KvKind],
    pool: PagePool,
    tables: Vec<(PageTable, Vec<u32>)>,
    rows: HashMap<(PageRef, usize), u32>,
    states: HashMap<PageRef, Vec<u32>>,
}

impl World {
    fn run(&mut self, action: Action) {
        match action {
            Action::Create => self.tables.push((PageTable::new(&self.pool), Vec::new())),
            _ if self.tables.is_empty() => {}
            Action::Adopt(which, len) => {
                let mut wanted = which.get(&self.tables).1.clone();
                wanted.resize(len, 1);
                let most = len.saturating_sub(len % 3); // also within a page
                let (table, known) = PageTable::from_index(&self.pool, &wanted, most);
                assert!(table.len() <= known && known <= most);
                wanted.truncate(table.len());
                self.tables.push((table, wanted));
            }
            Action::Extend(which, tokens) => self.extend(which.index(self.tables.len()), &tokens),
            Action::Truncate(which, len) => {
                let at = which.index(self.tables.len());
                let (table, tokens) = &mut self.tables[at];
                let len = table.resumable(&tokens[..], len.index(tokens.len() + 1));
                assert!(table.truncate(&tokens[..], len));
                tokens.truncate(len);
            }
            Action::Fork(which) => {
                let (table, tokens) = which.get(&self.tables);
                let fork = (table.fork(), tokens.clone());
                self.tables.push(fork);
            }
            Action::Publish(which) => {
                let at = which.index(self.tables.len());
                let (table, tokens) = &mut self.tables[at];
                table.publish(&tokens[..]);
                table.publish_state(&tokens[..]);
            }
            Action::Drop(which) => drop(self.tables.remove(which.index(self.tables.len()))),
        }
    }

    fn extend(&mut self, at: usize, tokens: &[u32]) {
        let (free, needed) = (self.pool.free_bytes(), self.tables[at].0.bytes_needed(tokens.len()));
        let (table, expected) = &mut self.tables[at];
        let Ok(copies) = table.extend(tokens.len()) else {
            return assert!(needed > free, "{needed} of {free} bytes were free");
        };
        assert!(needed <= free);
        for place in self.pool.take_dropped() {
            self.rows.retain(|(at, _), _| *at != place);
            self.states.remove(&place);
        }
        for copy in copies {
            for offset in 0..PAGE_TOKENS {
                if let Some(&token) = self.rows.get(&(copy.from, offset)) {
                    self.rows.insert((copy.to, offset), token);
                }
            }
            if let Some(state) = self.states.get(&copy.from).cloned() {
                self.states.insert(copy.to, state);
            }
        }
        for (group, kind) in self.kinds.iter().enumerate() {
            if *kind == KvKind::Recurrent {
                let Some(page) = table.state(group) else { continue };
                let state = self.states.entry(PageRef { group, page }).or_default();
                if expected.is_empty() {
                    state.clear();
                }
                state.extend(tokens);
                continue;
            }
            for (index, &token) in tokens.iter().enumerate() {
                let (page, offset) = table.slot(group, expected.len() + index);
                self.rows.insert((PageRef { group, page }, offset), token);
            }
        }
        expected.extend(tokens);
    }

    /// That tables read their tokens shows that no write went into a page of another.
    fn check(&self) {
        self.pool.check(self.tables.iter().map(|(table, _)| table)).expect("the books are in order");
        for (table, tokens) in &self.tables {
            self.check_table(table, tokens, "a table");
            let (found, _) = PageTable::from_index(&self.pool, tokens, tokens.len());
            self.check_table(&found, &tokens[..found.len()], "the index lies");
        }
    }

    /// The next token can see what it should.
    fn check_table(&self, table: &PageTable, tokens: &[u32], what: &str) {
        assert_eq!(table.len(), tokens.len());
        for (group, kind) in self.kinds.iter().enumerate() {
            let from = match *kind {
                KvKind::Full => 0,
                KvKind::SlidingWindow(window) => (tokens.len() + 1).saturating_sub(window),
                KvKind::Recurrent => {
                    let state = table.state(group).map(|page| &self.states[&PageRef { group, page }]);
                    assert_eq!(state.map_or(&[][..], |state| state), tokens, "{what}");
                    continue;
                }
            };
            let token = |position| {
                let (page, offset) = table.slot(group, position);
                self.rows[&(PageRef { group, page }, offset)]
            };
            let visible = from..tokens.len();
            assert_eq!(visible.clone().map(token).collect::<Vec<_>>(), tokens[visible], "{what}");
        }
    }
}

const KINDS: [&[KvKind]; 5] = [
    &[KvKind::Full],
    &[KvKind::Full, KvKind::SlidingWindow(20)],
    &[KvKind::Recurrent, KvKind::Full],
    &[KvKind::SlidingWindow(1), KvKind::SlidingWindow(40), KvKind::Recurrent],
    &[KvKind::Recurrent],
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn tables_read_their_own_tokens_whatever_is_shared(
        actions in actions(), capacity in 1usize..20, kind in 0..KINDS.len(),
    ) {
        let kinds = KINDS[kind];
        let group = |(index, &kind)| KvGroup { kind, page_bytes: 2 + index };
        let groups: Vec<_> = kinds.iter().enumerate().map(group).collect();
        let (pool, tables, capacity) = (PagePool::new(&groups, 2 * capacity), Vec::new(), 2 * capacity);
        let mut world = World { kinds, pool, tables, rows: HashMap::new(), states: HashMap::new() };
        for action in actions {
            world.run(action);
            world.check();
        }
        world.tables.clear();
        prop_assert_eq!(world.pool.free_bytes(), capacity);
        world.pool.check([]).expect("the books are in order");
    }
}
