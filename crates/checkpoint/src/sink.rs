//! A file that is being written, and which of its bytes were.

use crate::Result;
use nvfp4_files::durable::Part;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::{Condvar, Mutex};
use std::thread;

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
    flushing: Flushing,
}

/// Bytes that are written before they are put on the disk, while more are made.
const FLUSHED: u64 = 64 << 20;

/// What a thread waits for that puts bytes on the disk.
#[derive(Debug, Default)]
struct Flushing {
    state: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Bytes since the disk was asked last.
    bytes: u64,
    /// Whether no more come.
    over: bool,
}

/// Ends the flushing when it is dropped, also by a panic.
struct Over<'f>(&'f Flushing);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.tell(|state| state.over = true);
    }
}

impl Flushing {
    fn tell(&self, change: impl FnOnce(&mut Waiting)) {
        let mut state = self.state.lock().expect("nobody panics while it holds this");
        change(&mut state);
        if state.over || state.bytes >= FLUSHED {
            self.changed.notify_one();
        }
    }

    /// Waits until there is enough to flush; `false` when no more come.
    fn wait(&self) -> bool {
        let state = self.state.lock().expect("nobody panics while it holds this");
        let enough = |state: &mut Waiting| !state.over && state.bytes < FLUSHED;
        let mut state = self.changed.wait_while(state, enough).expect("nobody panics while it holds this");
        state.bytes = 0;
        !state.over
    }
}

impl Sink {
    pub fn new(part: Part) -> Self {
        Sink { part, written: Mutex::default(), flushing: Flushing::default() }
    }

    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.part.write_at(bytes, offset)?;
        if !bytes.is_empty() {
            let mut written = self.written.lock().expect("no writer panics while it holds this");
            written.add(offset, offset + bytes.len() as u64);
            drop(written);
            self.flushing.tell(|state| state.bytes += bytes.len() as u64);
        }
        Ok(())
    }

    /// Does what writes the file, and puts its bytes on the disk meanwhile, so that the end does not
    /// wait for all of them.
    pub fn flushed<T>(&self, write: impl FnOnce() -> Result<T>) -> Result<T> {
        thread::scope(|scope| {
            let flush = || -> Result<()> {
                while self.flushing.wait() {
                    self.part.flush()?;
                }
                Ok(())
            };
            // Without a thread for it, all is flushed at the end.
            let flusher = thread::Builder::new().spawn_scoped(scope, flush);
            let over = Over(&self.flushing);
            let written = write();
            drop(over);
            if let Ok(flusher) = flusher {
                flusher.join().expect("flushing does not panic")?;
            }
            written
        })
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
