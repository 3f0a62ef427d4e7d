//! Values by key, of which those that were not asked for lately are dropped.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;

/// Two generations: when the young one is full it becomes the old one, and what was old is dropped.
/// So at least `most` values are there, those that were asked for last, and at most twice as many.
pub(super) struct Recent<K, V> {
    young: HashMap<K, V>,
    old: HashMap<K, V>,
    most: usize,
}

impl<K: Copy + Eq + Hash, V> Recent<K, V> {
    pub fn new(most: usize) -> Self {
        Recent { young: HashMap::new(), old: HashMap::new(), most }
    }

    /// The value of a key, made if it is not there.
    pub fn get_or_try_make<E>(&mut self, key: &K, make: impl FnOnce() -> Result<V, E>) -> Result<&V, E> {
        let Recent { young, old, most } = self;
        if young.len() == *most && !young.contains_key(key) {
            let asked = old.remove(key);
            *old = std::mem::take(young);
            young.extend(asked.map(|value| (*key, value)));
        }
        match young.entry(*key) {
            Entry::Occupied(found) => Ok(found.into_mut()),
            Entry::Vacant(place) => Ok(place.insert(old.remove(key).map_or_else(make, Ok)?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn ask(recent: &mut Recent<u32, u32>, key: u32, made: &mut Vec<u32>) {
        let make = || {
            made.push(key);
            Ok::<_, Infallible>(key * 10)
        };
        assert_eq!(recent.get_or_try_make(&key, make), Ok(&(key * 10)));
    }

    #[test]
    fn what_is_asked_for_again_and_again_is_made_once() {
        let (mut recent, mut made) = (Recent::new(4), Vec::new());
        for new in 1000..2000 {
            ask(&mut recent, 1, &mut made);
            ask(&mut recent, new, &mut made);
            assert!(recent.young.len() + recent.old.len() <= 8);
        }
        assert_eq!(made.len(), 1001);
        assert_eq!(made.iter().filter(|&&key| key == 1).count(), 1);
    }

    #[test]
    fn the_last_ones_are_there_and_earlier_ones_are_made_anew() {
        let (mut recent, mut made) = (Recent::new(4), Vec::new());
        (0..20).for_each(|key| ask(&mut recent, key, &mut made));
        made.clear();
        (16..20).for_each(|key| ask(&mut recent, key, &mut made));
        assert_eq!(made, [0; 0]);
        ask(&mut recent, 3, &mut made);
        assert_eq!(made, [3]);
    }

    #[test]
    fn an_error_is_not_kept() {
        let mut recent: Recent<u32, u32> = Recent::new(4);
        assert_eq!(recent.get_or_try_make(&1, || Err("no")), Err("no"));
        assert_eq!(recent.get_or_try_make(&1, || Ok::<_, &str>(5)), Ok(&5));
    }
}
