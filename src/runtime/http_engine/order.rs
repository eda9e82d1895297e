//! The order in which a session asks engines. Pure.

/// Returns the order of `count` engines for a name, the same in every process: highest random weight (Thaler and
/// Ravishankar, 1998), over FNV-1a with the finisher of SplitMix64.
pub fn rendezvous_order(name: &str, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(weight(name, index)));
    order
}

fn weight(name: &str, index: usize) -> u64 {
    let bytes = name.bytes().chain((index as u64).to_le_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mixed = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_spread_evenly_and_move_only_when_they_must() {
        let names: Vec<String> = (0..3000).map(|n| format!("session-{n}")).collect();
        let mut counts = [0; 3];
        for name in &names {
            let of_three = rendezvous_order(name, 3);
            counts[of_three[0]] += 1;
            let mut sorted = of_three.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2], "every engine has a place in the order");
            // Without the last engine, the others keep their order.
            let without: Vec<usize> = of_three.into_iter().filter(|&index| index < 2).collect();
            assert_eq!(without, rendezvous_order(name, 2));
        }
        assert!(counts.iter().all(|&count| (850..1150).contains(&count)), "{counts:?}");
    }

    #[test]
    fn the_order_is_that_of_earlier_versions() {
        // A change would send every session to another engine after an update, away from what it has in memory.
        let orders = ["", "a", "trip"].map(|name| rendezvous_order(name, 4));
        assert_eq!(orders, ORDERS);
    }

    const ORDERS: [[usize; 4]; 3] = [[3, 0, 2, 1], [2, 1, 0, 3], [0, 1, 3, 2]];
}
