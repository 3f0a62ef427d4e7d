//! A part of a conversion on the disk.
//!
//! Parts are written under `TARGET.parts`, by any number of processes at once. A process works in a
//! folder of its own there, and a file moves out of it, under its name, when it is whole. The
//! journal of the part says so then. So a part may be killed, or made by two processes at the same
//! time: what has a name is whole, and its bytes are the same whoever made it.
//!
//! A lock tells whether the process of such a folder still lives. Nothing else depends on locks,
//! which not every file system has.

use super::conversion::Amaxes;
use super::measure::Measure;
use super::portion::Portion;
use super::room;
use super::sink::{Ranges, Sink};
use super::stamp::Stamp;
use super::there::entries;
use crate::{Error, Result};
use nvfp4_files::durable::{self, Disk};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};

const LOCK: &str = "lock";

/// What a part has done so far.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct PartJournal {
    /// What was asked for, and from what: all parts must be asked for the same.
    pub request: Value,
    /// What the first pass found for the part's own weights.
    pub amaxes: Option<Amaxes>,
    /// Files that are whole.
    pub done: BTreeMap<String, Written>,
}

/// A file that is whole.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Written {
    pub stamp: Stamp,
    /// What it did to its weights.
    pub measures: BTreeMap<String, Measure>,
    /// The bytes that are this part's.
    pub ranges: Ranges,
}

/// Where the parts of a target are.
pub(super) fn folder(target: &Path) -> PathBuf {
    durable::beside(target, ".parts")
}

fn journal_name(part: Portion) -> String {
    format!("part-{}-of-{}.json", part.index(), part.of())
}

/// The part that a file is the journal of.
fn named(name: &str) -> Option<Portion> {
    let (index, of) = name.strip_prefix("part-")?.strip_suffix(".json")?.split_once("-of-")?;
    Portion::new(index.parse().ok()?, of.parse().ok()?)
}

/// The journals of all parts that were begun.
pub(super) fn journals(folder: &Path) -> Result<Vec<(Portion, PartJournal)>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for part in entries(folder)?.iter().filter_map(|name| named(name)) {
        found.extend(read(folder, part)?.map(|journal| (part, journal)));
    }
    found.sort_by_key(|(part, _)| *part);
    Ok(found)
}

fn read(folder: &Path, part: Portion) -> Result<Option<PartJournal>> {
    let path = folder.join(journal_name(part));
    match fs::read(&path) {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map(Some).map_err(|e| Error::DamagedJournal { path, reason: e.to_string() })
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(&path, e)),
    }
}

/// An error if a part was asked for something else.
pub(super) fn check_same(folder: &Path, journals: &[(Portion, PartJournal)], request: &Value) -> Result<()> {
    for (part, journal) in journals {
        if let Some(difference) = difference(&journal.request, request) {
            return Err(Error::OtherPart { path: folder.to_path_buf(), part: *part, difference });
        }
    }
    Ok(())
}

/// The first difference between what was asked for there and here.
fn difference(there: &Value, here: &Value) -> Option<String> {
    const LONG: usize = 60;
    let none = serde_json::Map::new();
    let (there, here) = (there.as_object().unwrap_or(&none), here.as_object().unwrap_or(&none));
    let mut keys: Vec<&String> = here.keys().chain(there.keys()).collect();
    // The layout differs wherever something else does.
    keys.sort_by_key(|key| *key == "layout");
    let key = keys.into_iter().find(|key| there.get(*key) != here.get(*key))?;
    let (there, here) = (there.get(key).unwrap_or(&Value::Null), here.get(key).unwrap_or(&Value::Null));
    if let ("files", Value::Array(there), Value::Array(here)) = (key.as_str(), there, here) {
        let other = here.iter().chain(there).find(|file| !there.contains(file) || !here.contains(file));
        let name = other.and_then(|file| file.get(0)).and_then(Value::as_str).unwrap_or_default();
        return Some(format!("another '{name}' in the source, or at another time of its last change"));
    }
    let (there, here) = (there.to_string(), here.to_string());
    Some(match there.len() > LONG || here.len() > LONG {
        true => format!("another '{key}'"),
        false => format!("'{key}' {there}, and here it is {here}"),
    })
}

/// A process that makes a part.
#[derive(Debug)]
pub(super) struct Attempt {
    disk: Disk,
    folder: PathBuf,
    /// The folder that it writes in.
    own: PathBuf,
    lock: File,
    part: Portion,
    pub journal: PartJournal,
}

impl Attempt {
    /// Begins or continues a part of `bytes` bytes.
    pub fn begin(disk: &Disk, target: &Path, part: Portion, request: Value, bytes: u64) -> Result<Self> {
        let folder = folder(target);
        let begun = journals(&folder)?;
        if begun.is_empty() && folder.exists() && !is_ours(&folder)? {
            let folder = folder.display();
            return Err(Error::Refused(format!("{folder} is in the way and holds no parts of a conversion; move it")));
        }
        check_same(&folder, &begun, &request)?;
        disk.create_folder(&folder)?;
        sweep(disk, &folder, part)?;
        let mut journal = read(&folder, part)?.unwrap_or_default();
        journal.request = request;
        let done = journal.done.keys().filter_map(|name| Some(folder.join(name).metadata().ok()?.len()));
        room::check(durable::parent(target), bytes.saturating_sub(done.sum()))?;
        let (own, lock) = own_folder(disk, &folder, part)?;
        let attempt = Attempt { disk: disk.clone(), folder, own, lock, part, journal };
        attempt.note()?;
        // Another part may have been begun with another request at the same moment.
        check_same(&attempt.folder, &journals(&attempt.folder)?, &attempt.journal.request)?;
        Ok(attempt)
    }

    /// Whether a file is whole, and unchanged since it became so. Another process may have made it.
    pub fn is_done(&mut self, name: &str) -> Result<bool> {
        if let Some(there) = read(&self.folder, self.part)? {
            self.journal.done.extend(there.done);
        }
        let stamp = Stamp::of(&self.folder.join(name)).ok();
        Ok(self.journal.done.get(name).is_some_and(|done| Some(&done.stamp) == stamp.as_ref()))
    }

    /// An empty file of this length that nobody else writes to.
    pub fn create(&self, name: &str, len: u64) -> Result<Sink> {
        self.check_there()?;
        Ok(Sink::new(self.disk.create(&self.own.join(name), len)?))
    }

    /// Gives a file its name, unless another process was faster.
    pub fn done(&mut self, name: &str, sink: Sink, measures: BTreeMap<String, Measure>) -> Result<()> {
        let ranges = sink.finish()?;
        let (own, last) = (self.own.join(name), self.folder.join(name));
        if self.is_done(name)? {
            return Ok(self.disk.remove_file(&own)?);
        }
        self.disk.rename(&own, &last)?;
        self.disk.sync_folder(&self.folder)?;
        self.journal.done.insert(name.to_string(), Written { stamp: Stamp::of(&last)?, measures, ranges });
        self.note()
    }

    /// Writes the journal.
    pub fn note(&self) -> Result<()> {
        let json = serde_json::to_vec(&self.journal).map_err(|e| Error::Refused(e.to_string()))?;
        let name = journal_name(self.part);
        let sink = self.create(&name, json.len() as u64)?;
        sink.write_at(&json, 0)?;
        sink.finish()?;
        self.disk.rename(&self.own.join(&name), &self.folder.join(&name))?;
        Ok(self.disk.sync_folder(&self.folder)?)
    }

    /// An error if somebody finished the conversion meanwhile.
    fn check_there(&self) -> Result<()> {
        match self.own.is_dir() {
            true => Ok(()),
            false => {
                let own = self.own.display();
                let text =
                    format!("{own} was removed: the conversion was finished, or this part begun again elsewhere");
                Err(Error::Refused(text))
            }
        }
    }

    /// Removes what only this process needs.
    pub fn end(self) -> Result<()> {
        drop(self.lock);
        Ok(self.disk.remove_folder(&self.own)?)
    }
}

/// Whether a folder without journals holds nothing but what comes before them.
fn is_ours(folder: &Path) -> Result<bool> {
    Ok(entries(folder)?.iter().all(|name| name.starts_with("part-") && folder.join(name).is_dir()))
}

/// What the folders of the processes that make a part begin with.
fn prefix(part: Portion) -> String {
    format!("part-{}-of-{}-", part.index(), part.of())
}

/// A folder for this process, and its lock.
fn own_folder(disk: &Disk, folder: &Path, part: Portion) -> Result<(PathBuf, File)> {
    loop {
        // Process numbers are the same on several machines.
        let random = RandomState::new().hash_one(std::process::id());
        let own = folder.join(format!("{}{random:016x}", prefix(part)));
        disk.create_folder(&own)?;
        // Another process that begins this part may take it for one that was left behind.
        match disk.lock(&own.join(LOCK)) {
            Ok(Some(lock)) if own.join(LOCK).exists() => return Ok((own, lock)),
            Ok(_) => {}
            Err(_) if !own.exists() => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Removes the folders of processes that were killed.
fn sweep(disk: &Disk, folder: &Path, part: Portion) -> Result<()> {
    let prefix = prefix(part);
    for name in entries(folder)?.iter().filter(|name| name.starts_with(&prefix)) {
        let left = folder.join(name);
        let Ok(Some(lock)) = disk.lock(&left.join(LOCK)) else { continue };
        drop(lock);
        // Another process may do the same.
        if let Err(error) = disk.remove_folder(&left)
            && left.exists()
        {
            return Err(error.into());
        }
    }
    Ok(())
}
