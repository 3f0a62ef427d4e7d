//! A conversion in parts: each on any machine that sees the files, in any order, as often as one
//! likes. When all are there, they become the checkpoint that one process would have written.
//!
//! A part makes both passes over its own weights. Where one shares its tensor scale with weights of
//! other parts, it finds their amaxes too. That costs another look at a few weights, and no part
//! ever waits for another.

use super::attempt::{self, Attempt, PartJournal, Written, check_same, journals};
use super::conversion::{Conversion, Task, laid_out};
use super::existing::{Existing, Outcome};
use super::journal::read_journal;
use super::portion::{Extent, Portion, Slice};
use super::settings::{Observer, Pass, Settings, Summary};
use super::shards::Shard;
use super::share::{needed, share, slices, source_len, units};
use super::sink::Sink;
use super::stamp::Stamp;
use super::target::Activations;
use super::there::{check_target, exists};
use super::work::Work;
use crate::{Error, Result};
use nvfp4_files::durable::{self, Disk};
use nvfp4_files::{fingerprint, positioned};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// What a part of a conversion did.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PartSummary {
    /// Which part.
    pub part: Portion,
    /// Whether it had anything to do.
    pub outcome: Outcome,
    /// Its weights.
    pub weights: usize,
    /// Bytes of the source that became its own.
    pub before: u64,
    /// Bytes that it has.
    pub after: u64,
    /// The folder that its files are in.
    pub folder: PathBuf,
    /// Its files there.
    pub files: Vec<String>,
}

/// Makes one part of a conversion, or what is missing of it. [`finish`] makes a checkpoint of all.
///
/// Any number of processes may do this at the same time, on any machines that see the same files,
/// and two of them the same part. They must have the same settings, but for the device, the
/// threads and the memory. What is to happen to a target that exists is said to all of them.
pub fn convert_part(
    source: &Path,
    target: &Path,
    settings: &Settings,
    part: Portion,
    observer: &dyn Observer,
    stop: &AtomicBool,
) -> Result<PartSummary> {
    part_on(&Task { disk: &Disk::default(), source, target, settings, observer, stop }, part)
}

/// Makes the checkpoint of parts that are all there. If one is not, it is named, and nothing
/// happens.
///
/// Files that one part wrote get their place by a rename. Files that were divided between parts
/// are copied. If this is stopped, it can be repeated.
pub fn finish(
    source: &Path,
    target: &Path,
    settings: &Settings,
    observer: &dyn Observer,
    stop: &AtomicBool,
) -> Result<Summary> {
    finish_on(&Task { disk: &Disk::default(), source, target, settings, observer, stop })
}

/// Makes a part on a disk.
pub(super) fn part_on(task: &Task<'_>, part: Portion) -> Result<PartSummary> {
    laid_out(task, |mut conversion| {
        conversion.check_free()?;
        let own = slices(conversion.plan, &conversion.files, part.of()).swap_remove(part.index());
        let settings = task.settings;
        let share = share(part, &own, conversion.plan, &conversion.files, settings.target, Activations::Plain);
        let request = conversion.part_request(part.of());
        let mut attempt = Attempt::begin(task.disk, conversion.target, part, request, share.written)?;
        let outcome = conversion.write_part(&mut attempt, &own, part)?;
        attempt.end()?;
        Ok(PartSummary {
            part,
            outcome,
            weights: share.weights,
            before: share.read,
            after: share.written,
            folder: attempt::folder(conversion.target),
            files: own.iter().map(|slice| conversion.part_file(slice, part)).collect(),
        })
    })
}

/// Finishes a conversion on a disk.
pub(super) fn finish_on(task: &Task<'_>) -> Result<Summary> {
    laid_out(task, |conversion| {
        let parts = Parts::find(&conversion)?;
        let largest = parts.files(&conversion).filter(|(_, slices)| slices.len() > 1).map(|(file, _)| file.len).max();
        let bytes = largest.unwrap_or(0) + conversion.beside.bytes;
        // What was moved here cannot be made again: an unfinished end is continued, never cleared.
        let existing = match (parts.end, task.settings.existing) {
            (End::Begun, _) => Existing::Resume,
            (End::Named, _) | (End::Ahead, Existing::Resume) => Existing::Refuse,
            (End::Ahead, existing) => existing,
        };
        let mut work = Work::begin(task.disk, &conversion.order(existing, bytes), parts.request.clone())?;
        if work.outcome() == Outcome::AlreadyThere {
            return Err(exists(conversion.target));
        }
        conversion.copy_companions(&work)?;
        let left: Vec<_> = parts.files(&conversion).filter(|(file, _)| !work.is_done(&file.file)).collect();
        let copied = left.iter().filter(|(_, slices)| slices.len() > 1).map(|(file, _)| file.len);
        conversion.observer.begin(Pass::Join, copied.sum());
        for (file, slices) in left {
            conversion.take(task.disk, &parts, &mut work, file, &slices)?;
        }
        conversion.conclude(work, || match parts.folder.exists() {
            true => Ok(task.disk.remove_folder(&parts.folder)?),
            false => Ok(()),
        })
    })
}

impl<'p> Conversion<'_, 'p> {
    /// An error if a target exists and may not.
    fn check_free(&self) -> Result<()> {
        let existing = match self.settings.existing {
            Existing::Resume => Existing::Refuse,
            existing => existing,
        };
        check_target(self.target, self.settings.target.kind(), existing, &self.beside.companions).map(drop)
    }

    /// What a slice is called in the folder of the parts.
    fn part_file(&self, slice: &Slice, part: Portion) -> String {
        slice.name(&self.files[slice.file].file, part)
    }

    /// What all parts must be asked for: everything that decides about bytes, how many parts there
    /// are, and where every byte goes.
    fn part_request(&self, parts: usize) -> Value {
        let names = self.files.iter().flat_map(|file| file.file.bytes().chain(file.header.iter().copied()));
        let constants = self.files.iter().flat_map(|file| &file.constants).flat_map(|(_, bytes)| bytes);
        let beside = self.beside.written.iter().flat_map(|(name, bytes)| name.bytes().chain(bytes.iter().copied()));
        let mut request = self.settings.request(&self.stamps);
        request["parts"] = json!(parts);
        request["layout"] = json!(format!("{:016x}", fingerprint(names.chain(constants.copied()).chain(beside))));
        request
    }

    /// Both passes over the weights of a part.
    fn write_part(&mut self, attempt: &mut Attempt, own: &[Slice], part: Portion) -> Result<Outcome> {
        let mut outcome = Outcome::AlreadyThere;
        loop {
            let mut left = Vec::new();
            for slice in own {
                if !attempt.is_done(&self.part_file(slice, part))? {
                    left.push(slice);
                }
            }
            if left.is_empty() {
                attempt.note()?;
                return Ok(outcome);
            }
            outcome = Outcome::Written;
            self.find_own_amaxes(attempt, &left)?;
            let placed = || left.iter().flat_map(|slice| units(&self.files, slice));
            self.observer.begin(Pass::Write, placed().map(|placed| source_len(self.plan, placed)).sum());
            for slice in left {
                let (file, name) = (&self.files[slice.file], self.part_file(slice, part));
                // Another process may have made it meanwhile.
                if attempt.is_done(&name)? {
                    continue;
                }
                let sink = attempt.create(&name, file.len)?;
                if slice.extent == Extent::Whole {
                    self.write_frame(file, &sink)?;
                }
                let measures = sink.flushed(|| self.write_units(units(&self.files, slice), &sink))?;
                self.check_source()?;
                attempt.done(&name, sink, measures)?;
            }
        }
    }

    /// The first pass over the weights of a part. One that is continued finds its results in the
    /// journal.
    fn find_own_amaxes(&mut self, attempt: &mut Attempt, left: &[&Slice]) -> Result<()> {
        let needed = needed(self.plan, left.iter().flat_map(|slice| units(&self.files, slice)));
        match attempt.journal.amaxes.as_ref().filter(|amaxes| self.fits(amaxes, &needed)) {
            Some(amaxes) => self.amaxes = amaxes.clone(),
            None => {
                self.amaxes = self.find_amaxes(&needed)?;
                self.check_source()?;
                attempt.journal.amaxes = Some(self.amaxes.clone());
                attempt.note()?;
            }
        }
        Ok(())
    }

    /// Gives a file its place in the checkpoint.
    fn take(
        &self,
        disk: &Disk,
        parts: &Parts,
        work: &mut Work,
        file: &Shard<'p>,
        slices: &[(Portion, Slice)],
    ) -> Result<()> {
        let mut measures = BTreeMap::new();
        if let [(part, slice)] = slices {
            let (path, name) = (work.path(&file.file), self.part_file(slice, *part));
            let written = parts.written(*part, &name)?;
            if Stamp::of(&path).ok().as_ref() != Some(&written.stamp) {
                disk.rename(&parts.folder.join(&name), &path)?;
            }
            disk.sync_folder(work.folder())?;
            measures.extend(written.measures.clone());
            return work.done(&file.file, measures);
        }
        let sink = work.create(&file.file, file.len)?;
        self.write_frame(file, &sink)?;
        for (part, slice) in slices {
            let name = self.part_file(slice, *part);
            let written = parts.written(*part, &name)?;
            self.copy_ranges(&parts.folder.join(&name), written, &sink)?;
            measures.extend(written.measures.clone());
        }
        sink.finish()?;
        self.check_source()?;
        work.done(&file.file, measures)?;
        // The disk needs room for one file twice, not for all.
        let copied = slices.iter().map(|(part, slice)| parts.folder.join(self.part_file(slice, *part)));
        copied.filter(|path| path.exists()).try_for_each(|path| Ok(disk.remove_file(&path)?))
    }

    /// Copies the bytes of a part to their places.
    fn copy_ranges(&self, path: &Path, written: &Written, sink: &Sink) -> Result<()> {
        const PIECE: u64 = 8 << 20;
        let io = |e| Error::io(path, e);
        let from = File::open(path).map_err(io)?;
        let mut bytes = Vec::new();
        for range in written.ranges.iter() {
            for start in range.clone().step_by(PIECE as usize) {
                if self.stop.load(Ordering::Relaxed) {
                    return Err(Error::Interrupted);
                }
                bytes.resize(PIECE.min(range.end - start) as usize, 0);
                positioned::read_exact(&from, &mut bytes, start).map_err(io)?;
                sink.write_at(&bytes, start)?;
                self.observer.advance(bytes.len() as u64);
            }
        }
        Ok(())
    }
}

/// All parts of a conversion, which are whole.
struct Parts {
    folder: PathBuf,
    request: Value,
    slices: Vec<Vec<Slice>>,
    journals: BTreeMap<Portion, PartJournal>,
    end: End,
}

/// How far earlier processes came with the end of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Nobody tried.
    Ahead,
    /// One was stopped.
    Begun,
    /// One was stopped when the result had its name.
    Named,
}

impl Parts {
    /// Finds the parts, and refuses if one is missing or was made for something else.
    fn find(conversion: &Conversion<'_, '_>) -> Result<Self> {
        let target = conversion.target;
        let (folder, partial) = (attempt::folder(target), durable::beside(target, ".partial"));
        let read = |folder: &Path| read_journal(folder).ok().flatten();
        let begun = read(&partial).or_else(|| read(target));
        let found = journals(&folder)?;
        // An earlier process may have come so far that the parts are gone.
        let counted = begun.as_ref().and_then(|journal| usize::try_from(journal.request["parts"].as_u64()?).ok());
        let Some(count) = found.first().map(|(part, _)| part.of()).or(counted) else {
            let target = target.display();
            return Err(Error::Refused(format!("{target}: there are no parts of a conversion to it; make them first")));
        };
        let request = conversion.part_request(count);
        check_same(&folder, &found, &request)?;
        let slices = slices(conversion.plan, &conversion.files, count);
        let journals: BTreeMap<Portion, PartJournal> = found.into_iter().collect();
        let same = begun.as_ref().is_some_and(|journal| journal.request == request);
        let end = match (partial.is_dir(), &begun) {
            // One that was stopped before it wrote a journal has nothing yet.
            (true, None) => End::Begun,
            (true, Some(_)) if same => End::Begun,
            (false, Some(_)) if same => End::Named,
            _ => End::Ahead,
        };
        let parts = Parts { folder, request, slices, journals, end };
        let taken = |name: &str| same && begun.as_ref().is_some_and(|journal| journal.done.contains_key(name));
        let there = |part: Portion, slice: &Slice| {
            let (file, name) = (&conversion.files[slice.file].file, conversion.part_file(slice, part));
            let moved = (slice.extent == Extent::Whole && end == End::Begun).then(|| partial.join(file));
            let is = |path: &Path, written: &Written| Stamp::of(path).is_ok_and(|stamp| stamp == written.stamp);
            let whole = |written: &Written| {
                is(&parts.folder.join(&name), written) || moved.as_ref().is_some_and(|path| is(path, written))
            };
            taken(file) || parts.written(part, &name).is_ok_and(whole)
        };
        let missing = |part: &Portion| !parts.slices[part.index()].iter().all(|slice| there(*part, slice));
        let missing: Vec<Portion> = Portion::all(count).filter(missing).collect();
        if missing.is_empty() { Ok(parts) } else { Err(Error::MissingParts { path: parts.folder, missing }) }
    }

    /// What a part says about one of its files.
    fn written(&self, part: Portion, name: &str) -> Result<&Written> {
        let written = self.journals.get(&part).and_then(|journal| journal.done.get(name));
        written.ok_or_else(|| Error::MissingParts { path: self.folder.clone(), missing: vec![part] })
    }

    /// Every file, with the parts that have some of it.
    fn files<'c, 'p>(
        &self,
        conversion: &'c Conversion<'_, 'p>,
    ) -> impl Iterator<Item = (&'c Shard<'p>, Vec<(Portion, Slice)>)> {
        let count = self.slices.len();
        let own = move |file: usize| {
            let of_part = |(part, slices): (Portion, &Vec<Slice>)| {
                slices.iter().find(|slice| slice.file == file).map(|slice| (part, slice.clone()))
            };
            Portion::all(count).zip(&self.slices).filter_map(of_part).collect()
        };
        conversion.files.iter().enumerate().map(move |(i, file)| (file, own(i)))
    }
}
