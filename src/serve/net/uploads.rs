//! Limits the slow request bodies of each client, because each holds a connection, and one client must not
//! hold them all.
//!
//! A body counts as slow once it has been on its way for [`PROMPT`]. A client is an IPv4 address or the first
//! 64 bits of an IPv6 address, which is what one site is given. Unix sockets are not counted: all their
//! clients are the owner's.
//!
//! Invariant: at most a given number of slow bodies per client at a time; dropping a [`Slow`] frees its
//! place.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

/// A body that has come within this time is not slow.
pub const PROMPT: Duration = Duration::from_secs(1);

/// The slow bodies of all clients; clones refer to the same counts.
#[derive(Debug, Clone, Default)]
pub struct Uploads {
    /// Limit for each client; 0 is no limit.
    most: usize,
    places: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

impl Uploads {
    pub fn new(most: usize) -> Self {
        Self { most, places: Arc::default() }
    }

    /// Counts one more slow body of this client; `None` if it is at its limit.
    pub fn enter(&self, client: Option<IpAddr>) -> Option<Slow> {
        let Some(client) = client.filter(|_| self.most > 0) else { return Some(Slow(None)) };
        let site = site(client);
        let mut places = self.places.lock();
        let count = places.entry(site).or_default();
        if *count >= self.most {
            return None;
        }
        *count += 1;
        drop(places);
        Some(Slow(Some((self.clone(), site))))
    }
}

/// Counts a slow body until it is dropped.
#[derive(Debug)]
pub struct Slow(Option<(Uploads, IpAddr)>);

impl Drop for Slow {
    fn drop(&mut self) {
        let Some((uploads, site)) = &self.0 else { return };
        let mut places = uploads.places.lock();
        if let Some(count) = places.get_mut(site) {
            *count -= 1;
            if *count == 0 {
                places.remove(site); // as many entries as there are slow bodies, however many addresses come by
            }
        }
    }
}

/// Returns the address that stands for a client.
fn site(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_client_cannot_have_all_places() {
        let uploads = Uploads::new(2);
        let address = |text: &str| Some(text.parse::<IpAddr>().expect("an address"));
        let held: Vec<Slow> = (0..2).filter_map(|_| uploads.enter(address("192.0.2.1"))).collect();
        assert_eq!(held.len(), 2);
        assert!(uploads.enter(address("192.0.2.1")).is_none());
        assert!(uploads.enter(address("::ffff:192.0.2.1")).is_none(), "the same in the other notation");
        let others = [uploads.enter(address("192.0.2.2")), uploads.enter(None)];
        assert!(others.iter().all(Option::is_some));
        drop(held);
        assert!(uploads.enter(address("192.0.2.1")).is_some());
        drop(others);
        assert!(uploads.places.lock().is_empty(), "who is gone is forgotten");
    }

    #[test]
    fn a_site_of_ipv6_is_one_client() {
        let uploads = Uploads::new(1);
        let held = uploads.enter("2001:db8::1".parse().ok());
        assert!(held.is_some() && uploads.enter("2001:db8::ffff:2".parse().ok()).is_none());
        assert!(uploads.enter("2001:db8:0:1::1".parse().ok()).is_some());
    }

    #[test]
    fn without_a_limit_nobody_is_counted() {
        let uploads = Uploads::new(0);
        let held: Vec<Slow> = (0..100).filter_map(|_| uploads.enter("192.0.2.1".parse().ok())).collect();
        assert!(held.len() == 100 && uploads.places.lock().is_empty());
    }
}
