//! The folder that a conversion is written to until it is whole.
//!
//! Everything is written under `TARGET.partial`. A file there has a name ending in `.part` until
//! its bytes are on the disk; the folder gets its own name last. So a name without `.part`, and a
//! folder without `.partial`, are whole. What is already done, and the amaxes that took a pass over
//! the source to find, are noted in a journal. A lock in the folder keeps a second conversion out.
//!
//! A checkpoint that is replaced moves to `TARGET.replaced-N`, a name that nothing has, before the
//! new one takes its place. The journal says so before that. A conversion that is stopped between
//! the two is repaired by the next one ([`mend`]).

use super::existing::{Existing, Outcome};
use super::folder::Kind;
use super::journal::{Done, JOURNAL, Journal, LOCK, read_journal, replaced};
use super::measure::Measure;
use super::room;
use super::sink::Sink;
use super::stamp::Stamp;
use super::there::{There, check_target, entries, exists};
use crate::{Error, Result};
use nvfp4_files::durable::{self, Disk};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// What to write, and where.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order<'a> {
    pub target: &'a Path,
    pub kind: Kind,
    pub existing: Existing,
    /// Files that are copied from the source.
    pub companions: &'a [PathBuf],
    /// How many bytes there will be.
    pub bytes: u64,
}

impl Order<'_> {
    /// Compares with a target that already exists.
    fn compare(&self, disk: &Disk) -> Work {
        Work {
            disk: disk.clone(),
            target: self.target.to_path_buf(),
            kind: self.kind,
            companions: Vec::new(),
            folder: self.target.to_path_buf(),
            state: State::Comparing,
            journal: Journal::default(),
        }
    }
}

/// A conversion on disk.
#[derive(Debug)]
pub(super) struct Work {
    disk: Disk,
    target: PathBuf,
    kind: Kind,
    companions: Vec<PathBuf>,
    folder: PathBuf,
    state: State,
    pub journal: Journal,
}

/// What a conversion has to do.
#[derive(Debug)]
enum State {
    /// To write to a folder that it has locked.
    Writing { _lock: File },
    /// To compare a target that already exists with what it would write.
    Comparing,
}

impl Work {
    /// Makes or finds the working folder.
    pub fn begin(disk: &Disk, order: &Order<'_>, request: Value) -> Result<Self> {
        let Order { target, kind, existing, companions, bytes } = *order;
        if target.file_name().is_none() {
            return Err(Error::Refused(format!("{}: not the name of a folder", target.display())));
        }
        check_length(target)?;
        let folder = durable::beside(target, ".partial");
        let unfinished = match mend(disk, target, kind, &folder)? {
            None => None,
            Some((lock, Err(unreadable))) if existing != Existing::Replace => {
                drop(lock);
                return Err(unreadable);
            }
            Some((lock, journal)) => Some((lock, journal.unwrap_or_default())),
        };
        let asked = match (&unfinished, existing) {
            // A continued conversion treats the target as was asked for at its beginning.
            (Some((_, Some(journal))), Existing::Resume) => journal.existing,
            _ => existing,
        };
        match (check_target(target, kind, asked, companions)?, &unfinished) {
            (There::Finished, None) => return Ok(order.compare(disk)),
            (There::Finished, Some((_, None))) => {
                disk.remove_folder(&folder)?;
                return Ok(order.compare(disk));
            }
            (There::Finished, Some(_)) => return Err(exists(target)),
            (There::Nothing | There::Replaceable, _) => check_disk(target)?,
        }
        let fresh = Journal { request, existing, ..Journal::default() };
        let (lock, journal) = match (existing, unfinished) {
            (_, None) => {
                room::check(durable::parent(target), bytes)?;
                disk.create_folder(&folder)?;
                (lock(disk, &folder)?, fresh)
            }
            (Existing::Refuse, Some(_)) => {
                return Err(Error::Unfinished { path: folder });
            }
            (Existing::Resume, Some((_, Some(journal)))) if journal.request != fresh.request => {
                return Err(Error::OtherRequest { path: folder });
            }
            (_, Some((lock, journal))) => {
                room::check(durable::parent(target), bytes.saturating_sub(room::taken(&folder)))?;
                match journal {
                    Some(journal) if existing == Existing::Resume => (lock, journal),
                    _ => {
                        clear(disk, &folder)?;
                        (lock, fresh)
                    }
                }
            }
        };
        let (target, companions) = (target.to_path_buf(), companions.to_vec());
        let work = Work {
            disk: disk.clone(),
            target,
            kind,
            companions,
            folder,
            state: State::Writing { _lock: lock },
            journal,
        };
        work.note()?;
        Ok(work)
    }

    /// Whether anything is written.
    pub fn outcome(&self) -> Outcome {
        match self.state {
            State::Writing { .. } => Outcome::Written,
            State::Comparing => Outcome::AlreadyThere,
        }
    }

    /// Where everything is written.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The path of a file once it is whole.
    pub fn path(&self, name: &str) -> PathBuf {
        match (&self.state, self.kind) {
            (State::Comparing, Kind::File) => self.target.clone(),
            _ => self.folder.join(name),
        }
    }

    /// Whether a file is whole, and unchanged since it became so.
    pub fn is_done(&self, name: &str) -> bool {
        self.journal.done.get(name).is_some_and(|done| Stamp::of(&self.path(name)).is_ok_and(|s| s == done.stamp))
    }

    /// Notes that a file is whole, and what it did to its weights.
    pub fn done(&mut self, name: &str, measures: BTreeMap<String, Measure>) -> Result<()> {
        let done = Done { stamp: Stamp::of(&self.path(name))?, measures };
        self.journal.done.insert(name.to_string(), done);
        self.note()
    }

    /// What all files did to their weights.
    pub fn measures(&self) -> BTreeMap<&str, Measure> {
        let all = self.journal.done.values().flat_map(|done| &done.measures);
        all.map(|(module, measure)| (module.as_str(), *measure)).collect()
    }

    /// An empty file of this length under a temporary name.
    pub fn create(&self, name: &str, len: u64) -> Result<Sink> {
        Ok(Sink::new(match self.state {
            State::Writing { .. } => {
                self.check_inside(name)?;
                self.disk.create(&self.path(name), len)?
            }
            State::Comparing => self.disk.compare(&self.path(name), len)?,
        }))
    }

    /// An error if a folder of a file's path is a link, which would lead out of this folder.
    fn check_inside(&self, name: &str) -> Result<()> {
        let file = self.folder.join(name);
        let mut folders = file.ancestors().skip(1).take_while(|folder| *folder != self.folder);
        match folders.find(|folder| folder.is_symlink()) {
            Some(link) => Err(Error::content(link, "a link, where a folder is expected; remove it")),
            None => Ok(()),
        }
    }

    /// Writes a small file.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let sink = self.create(name, bytes.len() as u64)?;
        sink.write_at(bytes, 0)?;
        sink.finish().map(drop)
    }

    /// Copies a file. One that already exists may have been edited since.
    pub fn copy(&self, from: &Path, name: &str) -> Result<()> {
        if matches!(self.state, State::Comparing) {
            return Ok(());
        }
        let mut source = File::open(from).map_err(|e| io(from, e))?;
        let mut sink = self.create(name, 0)?;
        sink.copy(&mut source)?;
        sink.finish().map(drop)
    }

    /// Writes the journal.
    pub fn note(&self) -> Result<()> {
        if matches!(self.state, State::Comparing) {
            return Ok(());
        }
        let json = serde_json::to_vec(&self.journal).map_err(|e| Error::Refused(e.to_string()))?;
        self.write(JOURNAL, &json)
    }

    /// Gives the folder its name; or `file` in it, if the target is one file. Returns the path of
    /// the checkpoint that was replaced, if it cannot be removed.
    pub fn finish(mut self, file: &str) -> Result<Option<PathBuf>> {
        if matches!(self.state, State::Comparing) {
            return Ok(None);
        }
        // Hours may have passed: somebody may have put something there.
        let there = check_target(&self.target, self.kind, self.journal.existing, &self.companions)?;
        if there == There::Finished {
            return Err(exists(&self.target));
        }
        self.disk.sync_folder(&self.folder)?;
        if self.kind == Kind::File {
            self.disk.rename(&self.path(file), &self.target)?;
            self.disk.sync_folder(durable::parent(&self.target))?;
            drop(self.state);
            self.disk.remove_folder(&self.folder)?;
            return Ok(None);
        }
        let old = durable::aside(&self.target);
        match there {
            There::Replaceable => {
                self.journal.replaced = old.file_name().map(|name| name.to_string_lossy().into_owned());
                self.note()?;
            }
            _ if self.target.exists() => self.disk.remove_empty(&self.target)?,
            _ => {}
        }
        // Windows renames no folder in which a file is open.
        let lock = (!cfg!(windows)).then_some(self.state);
        self.disk.exchange(&self.folder, &self.target, &old)?;
        let left = tidy(&self.disk, &self.target)?;
        drop(lock);
        Ok(left)
    }
}

/// An unfinished conversion: its lock, and its journal, unless it was stopped before it wrote one.
type Unfinished = (File, Result<Option<Journal>>);

/// Completes or takes back the last steps of a conversion that was stopped during them. Returns the
/// unfinished conversion, if there is one.
fn mend(disk: &Disk, target: &Path, kind: Kind, folder: &Path) -> Result<Option<Unfinished>> {
    if kind == Kind::Folder && target.join(JOURNAL).is_file() {
        // The new checkpoint has its name. Another process may be about to do the rest.
        let _lock = lock(disk, target)?;
        tidy(disk, target)?;
    }
    if folder.symlink_metadata().is_err() {
        return Ok(None);
    }
    if !is_ours(folder)? {
        let folder = folder.display();
        return Err(Error::Refused(format!("{folder} is in the way and not an unfinished conversion; move it")));
    }
    let lock = lock(disk, folder)?;
    let journal = read_journal(folder);
    let known = journal.as_ref().ok().and_then(Option::as_ref);
    if let Some(old) = known.and_then(|journal| replaced(target, journal))
        && old.exists()
        && target.symlink_metadata().is_err()
    {
        // The old checkpoint has moved aside, and the new one has not taken its place.
        disk.rename(&old, target)?;
        disk.sync_folder(durable::parent(target))?;
    }
    let only = known.and_then(|journal| journal.done.keys().next());
    if kind == Kind::File && only.is_some_and(|file| !folder.join(file).exists()) && target.exists() {
        // The file has its name.
        drop(lock);
        disk.remove_folder(folder)?;
        return Ok(None);
    }
    Ok(Some((lock, journal)))
}

/// Removes what a conversion leaves beside and in a target that has its name. The checkpoint that
/// was replaced may be another user's and stay: then returns its path.
fn tidy(disk: &Disk, target: &Path) -> Result<Option<PathBuf>> {
    let old = read_journal(target).ok().flatten().and_then(|journal| replaced(target, &journal));
    let left = old.filter(|old| old.exists() && disk.remove_folder(old).is_err());
    for name in [LOCK, JOURNAL] {
        if target.join(name).exists() {
            disk.remove_file(&target.join(name))?;
        }
    }
    Ok(left)
}

/// The names beside a target must fit too: file systems take names of 255 bytes.
fn check_length(target: &Path) -> Result<()> {
    const LONGEST: usize = 255;
    let names = [durable::beside(target, ".partial"), durable::aside(target)];
    let longest = names.iter().filter_map(|name| name.file_name()).map(|name| name.len()).max().unwrap_or(0);
    if longest > LONGEST {
        let (target, by) = (target.display(), longest - LONGEST);
        let text =
            format!("{target}: this name is too long for the names that are made from it; shorten it by {by} bytes");
        return Err(Error::Refused(text));
    }
    Ok(())
}

/// An error if a target is a mount point: no folder beside it can take its place.
fn check_disk(target: &Path) -> Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let there = target.symlink_metadata().ok().zip(durable::parent(target).metadata().ok());
        if there.is_some_and(|(target, parent)| target.dev() != parent.dev()) {
            let target = target.display();
            return Err(Error::Refused(format!(
                "{target} is a mount point, which cannot be replaced; name a target inside it"
            )));
        }
    }
    Ok(())
}

/// Locks a folder against other processes.
fn lock(disk: &Disk, folder: &Path) -> Result<File> {
    let path = folder.join(LOCK);
    let busy = || {
        let folder = folder.display();
        Error::Refused(format!("another conversion is writing {folder}; wait for it, or choose another target"))
    };
    let lock = disk.lock(&path)?.ok_or_else(busy)?;
    // A conversion that has just ended may have removed the folder.
    if path.exists() { Ok(lock) } else { Err(busy()) }
}

/// Whether a folder is an unfinished conversion: it has a journal, or nothing but what comes before
/// one.
fn is_ours(folder: &Path) -> Result<bool> {
    let begun = |name: &String| name.strip_suffix(".part") == Some(JOURNAL) || name == LOCK;
    Ok(folder.join(JOURNAL).is_file() || (folder.is_dir() && entries(folder)?.iter().all(begun)))
}

/// Removes everything but the lock; the journal last, because it marks the folder as ours.
fn clear(disk: &Disk, folder: &Path) -> Result<()> {
    let mut names = entries(folder)?;
    names.sort_by_key(|name| name == JOURNAL);
    for name in names.iter().filter(|name| *name != LOCK) {
        let path = folder.join(name);
        if path.is_dir() && !path.is_symlink() { disk.remove_folder(&path)? } else { disk.remove_file(&path)? }
    }
    Ok(())
}

fn io(path: &Path, source: std::io::Error) -> Error {
    Error::io(path, source)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A file, which is removed as no folder is, stands for another user's files.
    #[test]
    fn a_replaced_checkpoint_that_cannot_be_removed_is_named_and_is_no_error_twice() {
        let dir = std::env::temp_dir().join(format!("nvfp4-work-left-{}", std::process::id()));
        let (target, old) = (dir.join("t"), dir.join("t.replaced-1"));
        fs::create_dir_all(&target).unwrap();
        fs::write(&old, "").unwrap();
        let journal = Journal { replaced: Some("t.replaced-1".to_string()), ..Journal::default() };
        fs::write(target.join(JOURNAL), serde_json::to_vec(&journal).unwrap()).unwrap();
        assert_eq!(tidy(&Disk::default(), &target).unwrap(), Some(old.clone()));
        assert!(old.exists() && entries(&target).unwrap().is_empty());
        assert_eq!(tidy(&Disk::default(), &target).unwrap(), None);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_mount_point_is_no_target() {
        let said = check_disk(Path::new("/proc")).unwrap_err().to_string();
        assert!(said.contains("/proc is a mount point"), "{said}");
        check_disk(Path::new("/proc/self/nothing")).unwrap();
        check_disk(Path::new("src")).unwrap();
    }
}
