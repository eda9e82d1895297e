//! Promise: whatever is shared, forked, cut, indexed and evicted, every table reads its own tokens, no page that another
//! may read is written, the index never lies, and no page is lost.

use std::collections::HashMap;

use llmctl::runtime::kv::{PAGE_TOKENS, PageId, PagePool, PageTable};
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
    pool: PagePool,
    tables: Vec<(PageTable, Vec<u32>)>,
    memory: HashMap<(PageId, usize), u32>,
}

impl World {
    fn run(&mut self, action: Action) {
        match action {
            Action::Create => self.tables.push((PageTable::new(&self.pool), Vec::new())),
            _ if self.tables.is_empty() => {}
            Action::Adopt(which, len) => {
                let mut wanted = which.get(&self.tables).1.clone();
                wanted.resize(len, 1);
                let table = PageTable::from_index(&self.pool, &wanted);
                assert!(table.len() <= len && table.len().is_multiple_of(PAGE_TOKENS));
                wanted.truncate(table.len());
                self.tables.push((table, wanted));
            }
            Action::Extend(which, tokens) => self.extend(which.index(self.tables.len()), &tokens),
            Action::Truncate(which, len) => {
                let at = which.index(self.tables.len());
                let (table, tokens) = &mut self.tables[at];
                let len = len.index(tokens.len() + 1);
                table.truncate(len);
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
                table.publish(tokens);
            }
            Action::Drop(which) => drop(self.tables.remove(which.index(self.tables.len()))),
        }
    }

    fn extend(&mut self, at: usize, tokens: &[u32]) {
        let (free, needed) = (self.pool.num_free(), self.tables[at].0.num_needed(tokens.len()));
        let (table, expected) = &mut self.tables[at];
        let Ok(copy) = table.extend(tokens.len()) else {
            return assert!(needed > free, "{needed} of {free} pages were free");
        };
        assert!(needed <= free);
        for offset in 0..PAGE_TOKENS {
            if let Some(copy) = copy
                && let Some(&token) = self.memory.get(&(copy.from, offset))
            {
                self.memory.insert((copy.to, offset), token);
            }
        }
        for (index, &token) in tokens.iter().enumerate() {
            self.memory.insert(table.slot(expected.len() + index), token);
        }
        expected.extend(tokens);
    }

    /// That tables read their tokens shows that no write went into a page of another.
    fn check(&self) {
        self.pool.check(self.tables.iter().map(|(table, _)| table)).expect("the books are in order");
        for (table, tokens) in &self.tables {
            assert_eq!(&self.read(table), tokens);
            let found = PageTable::from_index(&self.pool, tokens);
            assert_eq!(self.read(&found), tokens[..found.len()], "the index lies");
        }
    }

    fn read(&self, table: &PageTable) -> Vec<u32> {
        (0..table.len()).map(|position| self.memory[&table.slot(position)]).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn tables_read_their_own_tokens_whatever_is_shared(actions in actions(), capacity in 1usize..12) {
        let mut world =
            World { pool: PagePool::new(capacity), tables: Vec::new(), memory: HashMap::new() };
        for action in actions {
            world.run(action);
            world.check();
        }
        world.tables.clear();
        prop_assert_eq!(world.pool.num_free(), capacity);
        world.pool.check([]).expect("the books are in order");
    }
}
