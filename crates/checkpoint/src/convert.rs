//! A checkpoint becomes an NVFP4 checkpoint, without ever being in memory as a whole.
//!
//! Two passes over the source, in pieces of some rows each: the first finds the amax of every
//! weight, so that weights which servers join can share one; the second quantizes (`rows`). A piece
//! is a function of the source alone, so the bytes do not depend on the number of threads, on the
//! memory, or on how often the conversion was interrupted.

use super::architecture::loading;
use super::beside::{self, Beside};
use super::client::Client;
use super::conversion::Conversion;
use super::dialect::Model;
use super::finding::{Finding, Severity};
use super::inputs;
use super::measure::Measure;
use super::plan::{Action, Item, Plan};
use super::rows::{Memory, Piece, copy};
use super::settings::{Finished, Observer, Pass, Settings, Summary};
use super::shards::{self, Placed, RowOrder, Shard, Unit};
use super::stamp::Stamp;
use super::target::{Activations, Scale, Target};
use super::verify::verify;
use super::weight::{Stored, Weight};
use super::work::{Order, Part, Work};
use super::written::{self, Role};
use super::{Checkpoint, complete, first_not_finite, gguf, mxfp4, pool};
use crate::{Error, Result, Setting};
use nvfp4::{Precision, Specials};
use nvfp4_files::durable::Disk;
use nvfp4_kernels::{Input, amax};
use nvfp4_spec::Mode;
use nvfp4_spec::scale::Unit as ScaleUnit;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// Converts a checkpoint. `stop` may be set from elsewhere: the conversion ends with
/// [`Error::Interrupted`] and can be continued.
///
/// Whatever is wrong with the source, the settings or the disk is an error before anything is
/// written. The result is read back before it gets its name. The summary has what [`verify`] finds
/// in it.
///
/// ```
/// use nvfp4_checkpoint::{Outcome, Settings, convert};
/// use std::sync::atomic::AtomicBool;
///
/// # use safetensors::{Dtype, tensor::TensorView};
/// # let folder = std::env::temp_dir().join(format!("nvfp4-convert-{}", std::process::id()));
/// # let (source, target) = (folder.join("model"), folder.join("model-NVFP4"));
/// # std::fs::create_dir_all(&source).unwrap();
/// # let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}"#;
/// # std::fs::write(source.join("config.json"), config).unwrap();
/// # let bytes = [0x80, 0x3F].repeat(32 * 64); // 1.0 in BF16
/// # let weight = TensorView::new(Dtype::BF16, vec![32, 64], &bytes).unwrap();
/// # let file = source.join("model.safetensors");
/// # safetensors::serialize_to_file([("model.layers.0.mlp.down_proj.weight", weight)], None, &file).unwrap();
/// // `source` is a folder with one BF16 weight of 32 × 64, `target` is not there yet.
/// let stop = AtomicBool::new(false);
/// let summary = convert(&source, &target, &Settings::default(), &(), &stop)?;
/// assert_eq!((summary.outcome, summary.quantized.len()), (Outcome::Written, 1));
/// assert_eq!(summary.quantized[0].measure.largest, 0.0); // all ones: nothing is lost
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok::<(), nvfp4_checkpoint::Error>(())
/// ```
pub fn convert(
    source: &Path,
    target: &Path,
    settings: &Settings,
    observer: &dyn Observer,
    stop: &AtomicBool,
) -> Result<Summary> {
    convert_on(&Disk::default(), source, target, settings, observer, stop)
}

/// Converts a checkpoint onto a disk.
pub(super) fn convert_on(
    disk: &Disk,
    source: &Path,
    target: &Path,
    settings: &Settings,
    observer: &dyn Observer,
    stop: &AtomicBool,
) -> Result<Summary> {
    let mode = settings.mode()?;
    // `out/.` and `out/` mean `out`, to which a folder can be renamed.
    let target = &target.components().collect::<PathBuf>();
    if settings.target == Target::Gguf && target.extension().is_none_or(|e| e != "gguf") {
        let name = target.display();
        return Err(Error::Refused(format!("{name}: GGUF is one file; give the target a name that ends in .gguf")));
    }
    let checkpoint = Checkpoint::open(source)?;
    check_apart(source, target)?;
    let model = match settings.source {
        Some(dialect) => Model::with_dialect(&checkpoint, dialect)?,
        None => Model::new(&checkpoint)?,
    };
    complete::refuse_incomplete(&model)?;
    let plan = match settings.target {
        Target::Plain(_) => Plan::decode(&model),
        target => Plan::new(&model, &settings.selection, target)?,
    };
    if !matches!(settings.target, Target::Plain(_)) && plan.quantized().next().is_none() {
        return Err(Error::NothingToQuantize);
    }
    if settings.target == Target::CompressedTensors && plan.quantized().any(|item| item.weight.is_transposed()) {
        let reason = "compressed-tensors has no form for experts in one tensor; convert to ModelOpt's form";
        return Err(Error::setting(Setting::Target, reason));
    }
    let extras = inputs::extras(settings, &model, &plan)?;
    let files = match settings.target {
        Target::Gguf => vec![gguf::lay_out(&model, &plan, extras.activations)?],
        target => shards::lay_out(&model, &plan, target, extras, settings.shards)?,
    };
    let inputs = inputs::scales(settings, &plan, extras.activations)?;
    let beside = Beside::new(settings.target, &model, &plan, extras, &files)?;
    let stamps = beside::stamps(&checkpoint, &beside.companions)?;
    let order = Order {
        target,
        kind: settings.target.kind(),
        existing: settings.existing,
        companions: &beside.companions,
        bytes: files.iter().map(|f| f.len).sum::<u64>() + beside.bytes,
    };
    let work = Work::begin(disk, &order, settings.request(&stamps))?;
    let mut conversion =
        Conversion { settings, mode, model: &model, plan: &plan, files, inputs, beside, stamps, work, observer, stop };
    conversion.find_amaxes()?;
    conversion.write()
}

impl<'p> Conversion<'_, 'p> {
    /// The first pass. A conversion that is continued after it finds its results in the journal.
    fn find_amaxes(&mut self) -> Result<()> {
        if self.work.journal.amaxes.as_ref().is_some_and(|amaxes| self.fits(amaxes)) {
            return Ok(());
        }
        let items = || self.plan.items.iter().enumerate().filter(|(_, item)| item.action == Action::Quantize);
        let order = RowOrder::AsStored;
        let tasks: Vec<(usize, Range<usize>)> =
            items().flat_map(|(i, item)| self.pieces(item, order).map(move |rows| (i, rows))).collect();
        self.observer.begin(Pass::Amax, items().map(|(_, item)| item.weight.byte_len()).sum());
        // A weight that holds several matrices has a number for each.
        let found: Vec<Vec<AtomicU32>> =
            self.plan.items.iter().map(|i| (0..i.weight.matrices()).map(|_| AtomicU32::new(0)).collect()).collect();
        pool::run(self.settings.threads, &tasks, self.stop, |(i, rows), memory: &mut Memory| {
            let weight = &self.plan.items[*i].weight;
            let largest = match weight.stored {
                Stored::MxFp4 { .. } => mxfp4::top(weight, rows, &mut memory.codes, &mut memory.exponents)?,
                _ => self.find_amax(weight, rows, memory)?.to_bits(),
            };
            found[*i][rows.start / weight.matrix_rows()].fetch_max(largest, Ordering::Relaxed);
            self.observer.advance(bytes_of(weight.byte_len(), weight.rows, rows.len()));
            Ok(())
        })?;
        let mut bits: Vec<Vec<u32>> =
            found.into_iter().map(|all| all.into_iter().map(AtomicU32::into_inner).collect()).collect();
        for group in &self.plan.groups {
            let shared = group.members.iter().flat_map(|&i| &bits[i]).copied().max().unwrap_or(0);
            group.members.iter().for_each(|&i| bits[i].fill(shared));
        }
        let amaxes = items().map(|(i, item)| (item.weight.module.clone(), std::mem::take(&mut bits[i]))).collect();
        self.work.journal.amaxes = Some(amaxes);
        self.work.note()
    }

    /// Whether a journal has a number for every matrix, and one that the first pass can find:
    /// somebody may have changed the file.
    fn fits(&self, amaxes: &BTreeMap<String, Vec<u32>>) -> bool {
        self.plan.items.iter().filter(|item| item.action == Action::Quantize).all(|item| {
            let possible = |&found: &u32| match item.weight.stored {
                Stored::MxFp4 { .. } => found < 255,
                _ => found <= f32::MAX.to_bits(),
            };
            let found = amaxes.get(&item.weight.module);
            found.is_some_and(|found| found.len() == item.weight.matrices() && found.iter().all(possible))
        })
    }

    /// The second pass, and everything around it.
    fn write(mut self) -> Result<Summary> {
        let root = self.model.checkpoint.root();
        for path in &self.beside.companions {
            self.work.copy(&root.join(path), &path.to_string_lossy())?;
        }
        let files = std::mem::take(&mut self.files);
        let unfinished: Vec<&Shard<'p>> = files.iter().filter(|f| !self.work.is_done(&f.file)).collect();
        let bytes = unfinished.iter().flat_map(|f| &f.units).map(|u| self.source_len(u)).sum();
        self.observer.begin(Pass::Write, bytes);
        for file in unfinished {
            let measures = self.write_file(file)?;
            self.check_source()?;
            self.work.done(&file.file, measures)?;
        }
        for (name, bytes) in &self.beside.written {
            self.work.write(name, bytes)?;
        }
        self.check_source()?;
        let mut summary = self.summary(&files)?;
        if let Some(left) = self.work.finish(gguf::FILE)? {
            let text = "the checkpoint that was replaced is still there, because it cannot be removed";
            summary.findings.push(Finding::note(left.display().to_string(), text));
        }
        Ok(summary)
    }

    /// An error if a file of the source is not what it was when the conversion began.
    fn check_source(&self) -> Result<()> {
        for (path, stamp) in &self.stamps {
            if Stamp::of(path)? != *stamp {
                return Err(Error::SourceChanged { path: path.clone() });
            }
        }
        Ok(())
    }

    /// Reads the result as a stranger would, before it has its name.
    fn read_back(&self) -> Result<(Vec<Finding>, Option<Finding>)> {
        let unreadable = |error: Error| Error::NotReadBack { error: Box::new(error) };
        match self.settings.target {
            Target::Gguf => {
                let file = gguf::GgufFile::open(&self.work.path(gguf::FILE)).map_err(unreadable)?;
                Ok((gguf::verify(&file).map_err(unreadable)?, None))
            }
            Target::Plain(_) => Checkpoint::open(self.work.folder()).map(|_| (Vec::new(), None)).map_err(unreadable),
            Target::ModelOpt | Target::CompressedTensors => {
                let checkpoint = Checkpoint::open(self.work.folder()).map_err(unreadable)?;
                let model = Model::new(&checkpoint).map_err(unreadable)?;
                let loading = loading(&model, Client::Vllm);
                let unserved = loading.filter(|finding| finding.severity == Severity::Problem);
                let mut findings = verify(&model, Client::Vllm, self.settings.threads).map_err(unreadable)?;
                findings.retain(|finding| Some(finding) != unserved.as_ref());
                Ok((findings, unserved))
            }
        }
    }

    /// One file: all its units in pieces, then the disk, then its name.
    fn write_file(&self, shard: &Shard<'p>) -> Result<BTreeMap<String, Measure>> {
        let part = self.work.create(&shard.file, shard.len)?;
        part.write_at(&shard.header, 0)?;
        for (at, bytes) in &shard.constants {
            part.write_at(bytes, *at)?;
        }
        let mut tasks: Vec<(&Placed<'p>, Range<usize>)> = Vec::new();
        let mut left = BTreeMap::new();
        for placed in &shard.units {
            let pieces: Vec<Range<usize>> = match placed.unit {
                Unit::Weight(i) => self.pieces(&self.plan.items[i], placed.order).collect(),
                Unit::Other(tensor) => self.byte_pieces(&tensor, placed.order).collect(),
            };
            if let Unit::Weight(i) = placed.unit {
                self.write_scalars(&part, i, &placed.offsets)?;
                left.insert(i, (AtomicUsize::new(pieces.len()), Mutex::new(Measure::default())));
            }
            tasks.extend(pieces.into_iter().map(|piece| (placed, piece)));
        }
        pool::run(self.settings.threads, &tasks, self.stop, |(placed, range), memory: &mut Memory| {
            let i = match placed.unit {
                Unit::Other(tensor) => {
                    copy(&tensor, range, &part, placed, memory)?;
                    self.observer.advance(range.len() as u64);
                    return Ok(());
                }
                Unit::Weight(i) => i,
            };
            let item = &self.plan.items[i];
            let piece = Piece { item, rows: range, part: &part, to: placed };
            let measure = self.write_rows(&piece, memory)?;
            self.observer.advance(bytes_of(item.weight.byte_len(), item.weight.rows, range.len()));
            let (pieces, sum) = &left[&i];
            sum.lock().expect("no worker panics while it holds this").add(&measure);
            if pieces.fetch_sub(1, Ordering::AcqRel) == 1 {
                let measure = *sum.lock().expect("no worker panics while it holds this");
                self.observer.finished(&self.finished(item, measure));
            }
            Ok(())
        })?;
        part.finish()?;
        let measured = |(i, (_, sum)): (usize, (AtomicUsize, Mutex<Measure>))| {
            let item = &self.plan.items[i];
            let measure = sum.into_inner().expect("the workers are done");
            item.action.is_measured().then(|| (item.weight.module.clone(), measure))
        };
        Ok(left.into_iter().filter_map(measured).collect())
    }

    fn write_scalars(&self, part: &Part, i: usize, offsets: &BTreeMap<Role, u64>) -> Result<()> {
        let item = &self.plan.items[i];
        if let Some(&at) = offsets.get(&Role::Global) {
            for matrix in 0..item.weight.matrices() {
                let scale = match &item.weight.stored {
                    Stored::Nvfp4(source) => {
                        let stored = match self.rescaled(item) {
                            Some(shared) => shared[matrix],
                            None => source.global(matrix)?,
                        };
                        if source.unit == ScaleUnit::Divisor {
                            Scale::Divisor(stored)
                        } else {
                            Scale::Multiplier(stored)
                        }
                    }
                    Stored::MxFp4 { .. } => Scale::Multiplier(mxfp4::scale(self.found(item, matrix))),
                    _ => tensor_scale(&self.mode, self.amax(item), item.weight.precision(), self.settings.target),
                };
                part.write_at(&self.settings.target.stored(scale).to_le_bytes(), at + 4 * matrix as u64)?;
            }
        }
        if let Some(&at) = offsets.get(&Role::KvScale) {
            part.write_at(&1f32.to_le_bytes(), at)?;
        }
        match offsets.get(&Role::Input) {
            Some(&at) => Ok(part.write_at(&self.inputs[&item.weight.module].to_le_bytes(), at)?),
            None => Ok(()),
        }
    }

    fn find_amax(&self, weight: &Weight<'_>, rows: &Range<usize>, memory: &mut Memory) -> Result<f32> {
        let values = weight.values(rows.clone(), &mut memory.source)?;
        let input = Input::new(values, rows.len(), weight.cols)?;
        let mut amax = 0.0;
        let wanted = amax::Outputs { tensor: Some(&mut amax), ..amax::Outputs::default() };
        amax::amax(self.settings.implementation, &input, Specials::Reference, wanted)?;
        if amax.is_finite() { Ok(amax) } else { Err(first_not_finite(weight, rows.start, &values)) }
    }

    fn source_len(&self, placed: &Placed<'_>) -> u64 {
        match placed.unit {
            Unit::Weight(i) => self.plan.items[i].weight.byte_len(),
            Unit::Other(tensor) => tensor.info.len,
        }
    }

    fn finished(&self, item: &Item<'_>, measure: Measure) -> Finished {
        let weight = &item.weight;
        let parts = self.settings.target.parts(item, Activations::Plain);
        let after = parts.iter().map(written::Part::len).sum();
        Finished {
            module: weight.module.clone(),
            rows: weight.rows,
            cols: weight.cols,
            before: weight.byte_len(),
            after,
            action: item.action.clone(),
            group: item.group.map(|g| self.plan.groups[g].kind.clone()),
            measure,
        }
    }

    fn summary(&self, files: &[Shard<'p>]) -> Result<Summary> {
        let measures = self.work.measures();
        let done = |item: &Item<'_>| {
            let measure = measures.get(item.weight.module.as_str())?;
            Some(self.finished(item, *measure))
        };
        let (mut quantized, mut rescaled, mut decoded) = (Vec::new(), Vec::new(), Vec::new());
        for weight in self.plan.items.iter().filter_map(done) {
            match weight.action {
                Action::Rescale => rescaled.push(weight),
                Action::Decode(_) => decoded.push(weight),
                _ => quantized.push(weight),
            }
        }
        let (findings, unserved) = self.read_back()?;
        Ok(Summary {
            outcome: self.work.outcome(),
            quantized,
            rescaled,
            decoded,
            before: self.model.checkpoint.byte_len(),
            after: shards::byte_len(files),
            files: files.iter().map(|f| f.file.clone()).collect(),
            findings,
            unserved,
        })
    }
}

/// The tensor scale of a weight with this amax. A weight of zeros has 1, which every reader can
/// multiply or divide by.
fn tensor_scale(mode: &Mode, amax: f32, precision: Precision, target: Target) -> Scale {
    let stored = mode.profile.stored(amax, precision);
    match (mode.profile.unit(mode.rule.bound()), target) {
        (ScaleUnit::Multiplier, _) => Scale::Multiplier(stored),
        (ScaleUnit::Divisor, _) => Scale::Divisor(stored),
        (ScaleUnit::Amax(_), _) if amax == 0.0 => Scale::Multiplier(1.0),
        (ScaleUnit::Amax(bound), Target::ModelOpt | Target::Gguf | Target::Plain(_)) => {
            Scale::Multiplier((amax / bound.six_e()).max(f32::from_bits(1)))
        }
        (ScaleUnit::Amax(bound), Target::CompressedTensors) => Scale::Divisor((bound.six_e() / amax).min(f32::MAX)),
    }
}

/// Neither of source and target may be inside the other: what is written would be read as part of
/// the source, or replacing the target would remove the source.
fn check_apart(source: &Path, target: &Path) -> Result<()> {
    let real = |path: &Path| path.canonicalize().map_err(|source| Error::io(path, source));
    let parent = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let there = match (real(target), parent.canonicalize()) {
        (Ok(there), _) => there,
        (Err(_), Ok(parent)) => parent.join(target.file_name().unwrap_or_default()),
        // Folders that do not exist yet hold nothing.
        (Err(_), Err(_)) => return Ok(()),
    };
    let from = real(source)?;
    if there.starts_with(&from) || from.starts_with(&there) {
        let (source, target) = (source.display(), target.display());
        return Err(Error::Refused(format!(
            "one of {target} and the source {source} is inside the other; choose another target"
        )));
    }
    Ok(())
}

/// The bytes of some rows of a weight.
fn bytes_of(total: u64, rows: usize, part: usize) -> u64 {
    (u128::from(total) * part as u128 / rows.max(1) as u128) as u64
}
