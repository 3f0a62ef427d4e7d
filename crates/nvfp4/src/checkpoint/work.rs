//! The folder that a conversion is written in, until it is whole.
//!
//! Everything is written under `TARGET.partial`. A file there has a name ending in `.part` until its bytes are on the
//! disk; the folder gets its own name last. So a name without `.part`, and a folder without `.partial`, are whole. What
//! is already done, and the amaxes that took a pass over the source to find, are noted in a journal.

use super::folder::Kind;
use super::measure::Measure;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// What to do if the target, or an unfinished conversion to it, is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Existing {
    /// Stop with an error.
    #[default]
    Refuse,
    /// Continue an unfinished conversion, if there is one.
    Resume,
    /// Throw an unfinished conversion away, and replace a finished checkpoint when the new one is whole.
    Replace,
}

const JOURNAL: &str = ".nvfp4-journal.json";

/// What has been done so far.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Journal {
    /// What was asked for, and from what: a resumed run must ask for the same.
    pub request: Value,
    /// The bits of the amax of every weight that is quantized, by module; for MXFP4, the largest exponent of each matrix.
    pub amaxes: Option<BTreeMap<String, Vec<u32>>>,
    /// What each finished file did to its weights.
    pub done: BTreeMap<String, BTreeMap<String, Measure>>,
}

/// A conversion on disk.
#[derive(Debug)]
pub(super) struct Work {
    target: PathBuf,
    kind: Kind,
    folder: PathBuf,
    existing: Existing,
    pub journal: Journal,
}

impl Work {
    /// Makes or finds the working folder.
    pub fn begin(target: &Path, kind: Kind, existing: Existing, request: Value) -> Result<Self> {
        let name = target
            .file_name()
            .ok_or_else(|| Error::Refused(format!("{}: not the name of a folder", target.display())))?;
        let mut partial = name.to_os_string();
        partial.push(".partial");
        let folder = target.with_file_name(partial);
        check_target(target, kind, existing)?;
        let fresh = Journal { request, ..Journal::default() };
        let unfinished = folder.symlink_metadata().is_ok();
        if unfinished && existing != Existing::Refuse && !is_ours(&folder)? {
            let folder = folder.display();
            return Err(Error::Refused(format!("{folder} is in the way and not an unfinished conversion; move it")));
        }
        let journal = match (existing, unfinished) {
            (Existing::Refuse, true) => {
                return Err(Error::Refused(format!(
                    "{} holds an unfinished conversion; continue it with --resume or start over with --force",
                    folder.display()
                )));
            }
            (Existing::Resume, true) => match read_journal(&folder)? {
                Some(journal) if journal.request == fresh.request => journal,
                Some(_) => {
                    return Err(Error::Refused(format!(
                        "{} was begun with other settings or another source; repeat them, or start over with --force",
                        folder.display()
                    )));
                }
                None => {
                    remove(&folder)?;
                    fresh
                }
            },
            (Existing::Replace, true) => {
                remove(&folder)?;
                fresh
            }
            (_, false) => fresh,
        };
        fs::create_dir_all(&folder).map_err(|e| io(&folder, e))?;
        let work = Work { target: target.to_path_buf(), kind, folder, existing, journal };
        work.note()?;
        Ok(work)
    }

    /// Where a file lies once it is whole.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Whether a file is whole.
    pub fn is_done(&self, name: &str) -> bool {
        self.journal.done.contains_key(name) && self.path(name).is_file()
    }

    /// An empty file of this length under a temporary name.
    pub fn create(&self, name: &str, len: u64) -> Result<Part> {
        let last = self.path(name);
        let mut part = last.clone().into_os_string();
        part.push(".part");
        let part = PathBuf::from(part);
        if let Some(parent) = part.parent() {
            fs::create_dir_all(parent).map_err(|e| io(parent, e))?;
        }
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&part);
        let file = file.map_err(|e| io(&part, e))?;
        file.set_len(len).map_err(|e| io(&part, e))?;
        Ok(Part { file, part, last })
    }

    /// Writes a small file.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let mut part = self.create(name, 0)?;
        part.file.write_all(bytes).map_err(|e| io(&part.part, e))?;
        part.finish()
    }

    /// Copies a file.
    pub fn copy(&self, from: &Path, name: &str) -> Result<()> {
        let mut source = File::open(from).map_err(|e| io(from, e))?;
        let mut part = self.create(name, 0)?;
        std::io::copy(&mut source, &mut part.file).map_err(|e| io(&part.part, e))?;
        part.finish()
    }

    /// Writes the journal.
    pub fn note(&self) -> Result<()> {
        let json = serde_json::to_vec(&self.journal).map_err(|e| Error::Refused(e.to_string()))?;
        self.write(JOURNAL, &json)
    }

    /// Gives the folder its name; or `file` in it, if the target is one file.
    pub fn finish(self, file: &str) -> Result<()> {
        sync_folder(&self.folder)?;
        if self.kind == Kind::File {
            fs::rename(self.path(file), &self.target).map_err(|e| io(&self.target, e))?;
            self.sync_parent()?;
            return remove(&self.folder);
        }
        let old = self.folder.with_extension("replaced");
        let replaces = self.existing == Existing::Replace && self.target.symlink_metadata().is_ok();
        if replaces {
            fs::rename(&self.target, &old).map_err(|e| io(&self.target, e))?;
        }
        fs::rename(&self.folder, &self.target).map_err(|e| io(&self.target, e))?;
        self.sync_parent()?;
        let journal = self.target.join(JOURNAL);
        fs::remove_file(&journal).map_err(|e| io(&journal, e))?;
        if replaces { remove(&old) } else { Ok(()) }
    }

    fn sync_parent(&self) -> Result<()> {
        let parent = self.target.parent().filter(|p| !p.as_os_str().is_empty());
        sync_folder(parent.unwrap_or(Path::new(".")))
    }
}

/// A file under its temporary name.
#[derive(Debug)]
pub(super) struct Part {
    pub file: File,
    pub part: PathBuf,
    last: PathBuf,
}

impl Part {
    /// Writes bytes at an offset; several threads may.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        super::positioned::write_all(&self.file, bytes, offset).map_err(|e| io(&self.part, e))
    }

    /// Puts it on the disk and gives it its name.
    pub fn finish(self) -> Result<()> {
        self.file.sync_all().map_err(|e| io(&self.part, e))?;
        fs::rename(&self.part, &self.last).map_err(|e| io(&self.last, e))
    }
}

fn io(path: &Path, source: std::io::Error) -> Error {
    Error::Io { path: path.to_path_buf(), source }
}

fn sync_folder(folder: &Path) -> Result<()> {
    // Only Unix can open a folder; elsewhere a rename is as durable as the system makes it.
    if cfg!(unix) {
        File::open(folder).and_then(|f| f.sync_all()).map_err(|e| io(folder, e))?;
    }
    Ok(())
}

/// A target that exists is replaced only on request, and only if a checkpoint is what it is.
fn check_target(target: &Path, kind: Kind, existing: Existing) -> Result<()> {
    if target.symlink_metadata().is_err() {
        return Ok(());
    }
    if existing != Existing::Replace {
        return Err(Error::Refused(format!(
            "{} already exists; choose another target, or replace it with --force",
            target.display()
        )));
    }
    if kind == Kind::File {
        let gguf = target.is_file() && super::gguf::is_gguf(target);
        let refused = format!("{} is not a GGUF file; --force does not replace it", target.display());
        return if gguf { Ok(()) } else { Err(Error::Refused(refused)) };
    }
    let names: Vec<_> = fs::read_dir(target).map_err(|e| io(target, e))?.flatten().map(|e| e.file_name()).collect();
    let checkpoint = names.iter().any(|n| n.to_string_lossy().ends_with(".safetensors"));
    if names.is_empty() || checkpoint {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "{} is a folder without safetensors files, which --force does not replace; remove it yourself",
        target.display()
    )))
}

/// Whether a folder is an unfinished conversion: it has a journal, or nothing but files that were just begun.
fn is_ours(folder: &Path) -> Result<bool> {
    let mut names = fs::read_dir(folder).map_err(|e| io(folder, e))?.flatten().map(|e| e.file_name());
    Ok(folder.join(JOURNAL).is_file() || names.all(|n| n.to_string_lossy().ends_with(".part")))
}

/// The journal of an unfinished conversion; `None` where it was stopped before it wrote one.
fn read_journal(folder: &Path) -> Result<Option<Journal>> {
    let path = folder.join(JOURNAL);
    match fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|e| Error::Format { path, reason: format!("{e}; start over with --force") }),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io(&path, e)),
    }
}

fn remove(folder: &Path) -> Result<()> {
    fs::remove_dir_all(folder).map_err(|e| io(folder, e))
}
