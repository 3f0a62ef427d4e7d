//! A file that is being written, and which of its bytes were.

use crate::Result;
use nvfp4_files::durable::Part;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Mutex;

/// Ranges of bytes, each by its start and end. Ranges that touch are one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<(u64, u64)>", into = "Vec<(u64, u64)>")]
pub(super) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds a range that has no byte in common with the others.
    fn add(&mut self, start: u64, end: u64) {
        let end = self.0.remove(&end).unwrap_or(end);
        match self.0.range_mut(..start).next_back() {
            Some((_, before)) if *before == start => *before = end,
            _ => drop(self.0.insert(start, end)),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = std::ops::Range<u64>> {
        self.0.iter().map(|(&start, &end)| start..end)
    }
}

impl From<Vec<(u64, u64)>> for Ranges {
    fn from(pairs: Vec<(u64, u64)>) -> Self {
        Ranges(pairs.into_iter().filter(|(start, end)| start < end).collect())
    }
}

impl From<Ranges> for Vec<(u64, u64)> {
    fn from(ranges: Ranges) -> Self {
        ranges.0.into_iter().collect()
    }
}

/// A file that is being written. Several threads may write, each byte once.
#[derive(Debug)]
pub(super) struct Sink {
    part: Part,
    written: Mutex<Ranges>,
}

impl Sink {
    pub fn new(part: Part) -> Self {
        Sink { part, written: Mutex::default() }
    }

    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.part.write_at(bytes, offset)?;
        if !bytes.is_empty() {
            let mut written = self.written.lock().expect("no writer panics while it holds this");
            written.add(offset, offset + bytes.len() as u64);
        }
        Ok(())
    }

    /// Writes all of another file.
    pub fn copy(&mut self, from: &mut File) -> Result<()> {
        Ok(self.part.copy(from)?)
    }

    /// Puts the file on the disk and gives it its name. Returns the bytes that were written.
    pub fn finish(self) -> Result<Ranges> {
        self.part.finish()?;
        Ok(self.written.into_inner().expect("the writers are done"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_touch_are_one_in_whatever_order_they_come() {
        let pieces = [(0, 4), (4, 9), (9, 10), (20, 25), (25, 26)];
        for turn in 0..pieces.len() {
            let mut ranges = Ranges::default();
            pieces.iter().cycle().skip(turn).take(pieces.len()).for_each(|&(start, end)| ranges.add(start, end));
            assert_eq!(Vec::from(ranges), [(0, 10), (20, 26)], "from {turn}");
        }
    }
}
