//! A checkpoint becomes an NVFP4 checkpoint, without ever being in memory as a whole.
//!
//! Two passes over the source, in pieces of some rows each: the first finds the amax of every weight, so that weights
//! which servers join can share one; the second quantizes. A piece is a function of the source alone, so the bytes do
//! not depend on the number of threads, on the memory, or on how often the conversion was interrupted.

use super::dialect::{Dialect, Model};
use super::folder::Located;
use super::measure::Measure;
use super::mxfp4;
use super::names::Pattern;
use super::plan::{Action, Item, Plan, Selection};
use super::pool;
use super::shards::{self, Placed, Shard, Shards, Unit};
use super::target::{self, Activations, Role, Scale, Target};
use super::weight::{Buffer, MX_BLOCK, Stored, Weight, sized};
use super::work::{Existing, Part, Work};
use super::{Checkpoint, first_not_finite};
use crate::{Bound, Edge, Error, ErrorPath, GlobalScale, Layout, Metric, Precision, Profile, Result, ScaleRule};
use half::bf16;
use nvfp4_kernels::quantize::{self as kernel, Amax, Direction};
use nvfp4_kernels::{Implementation, Input, Values, amax, dequantize};
use nvfp4_spec::block::Scaling;
use nvfp4_spec::matrix::View;
use nvfp4_spec::scale::Unit as ScaleUnit;
use nvfp4_spec::{BLOCK, Mode, Rounding, e2m1, e8m0, mse};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// How block scales are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ScaleChoice {
    /// The largest magnitude of a block maps to 6.
    #[default]
    Max,
    /// The scale with the smallest squared error around that one; see [`nvfp4_spec::mse`].
    Mse,
    /// To 6 or to 4, whichever has the smaller squared error; see [`nvfp4_spec::four_over_six`].
    FourOverSix,
}

/// The scales of activations.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Acts {
    /// None are written: weights only. An NVFP4 source keeps the ones that it has.
    #[default]
    None,
    /// The same for every weight.
    Constant(f32),
    /// From the largest activation of each module.
    Amaxes(BTreeMap<String, f32>),
}

/// What to convert to, and how.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Whose checkpoint is written.
    pub target: Target,
    /// Whose checkpoint the source is, if it does not say.
    pub source: Option<Dialect>,
    /// Which weights.
    pub selection: Selection,
    /// How block scales are chosen.
    pub scale: ScaleChoice,
    /// Whose arithmetic; ModelOpt's if not given, and TransformerEngine's for 4over6, which only it has.
    pub profile: Option<Profile>,
    /// Scales of activations.
    pub acts: Acts,
    /// How the output is split.
    pub shards: Shards,
    /// Number of threads.
    pub threads: usize,
    /// Bytes of memory to stay below.
    pub memory: u64,
    /// What to do if the target exists.
    pub existing: Existing,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            target: Target::default(),
            source: None,
            selection: Selection::default(),
            scale: ScaleChoice::default(),
            profile: None,
            acts: Acts::default(),
            shards: Shards::AtMost(5_000_000_000),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            memory: 2_000_000_000,
            existing: Existing::default(),
        }
    }
}

/// The two passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Finding the amax of every weight.
    Amax,
    /// Quantizing and writing.
    Write,
}

/// Who is told how far a conversion is. Calls come from several threads.
pub trait Observer: Sync {
    /// A pass begins, over this many bytes of the source.
    fn begin(&self, _pass: Pass, _bytes: u64) {}
    /// Bytes of the source that were dealt with.
    fn advance(&self, _bytes: u64) {}
    /// A weight is quantized.
    fn quantized(&self, _weight: &Finished) {}
}

/// Tells no one.
impl Observer for () {}

/// A weight that was quantized.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Its module.
    pub module: String,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub cols: usize,
    /// Bytes that it took.
    pub before: u64,
    /// Bytes that it takes.
    pub after: u64,
    /// Its error.
    pub measure: Measure,
}

/// What a conversion did.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The weights that were quantized, with their errors. Weights that kept their codes are not among them.
    pub quantized: Vec<Finished>,
    /// Bytes of the source's tensors.
    pub before: u64,
    /// Bytes of the written tensors.
    pub after: u64,
    /// The files that were written.
    pub files: Vec<String>,
}

impl Settings {
    /// The mode that blocks are quantized in.
    fn mode(&self) -> Result<Mode> {
        let (rule, default) = match self.scale {
            ScaleChoice::Max | ScaleChoice::Mse => (ScaleRule::Six, Profile::ModelOpt),
            ScaleChoice::FourOverSix => (
                ScaleRule::FourOverSix { metric: Metric::Mse, error: ErrorPath::Strict, bound: Bound::E256 },
                Profile::TransformerEngine,
            ),
        };
        let mode = Mode { rule, profile: self.profile.unwrap_or(default), ..Mode::default() };
        mode.check(&Rounding::<()>::NearestEven)?;
        Ok(mode)
    }

    /// What must be the same for a conversion to be continued: everything that decides about bytes.
    fn request(&self, source: &Checkpoint) -> Result<Value> {
        let patterns = |patterns: &[Pattern]| patterns.iter().map(Pattern::to_string).collect::<Vec<_>>();
        let stamp = |path: &Path| -> Result<Value> {
            let io = |source| Error::Io { path: path.to_path_buf(), source };
            let metadata = std::fs::metadata(path).map_err(io)?;
            let modified = metadata.modified().ok().and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            Ok(json!([name, metadata.len(), modified.map(|d| format!("{}.{:09}", d.as_secs(), d.subsec_nanos()))]))
        };
        let s = &self.selection;
        Ok(json!({
            "version": env!("CARGO_PKG_VERSION"),
            "target": self.target.to_string(),
            "source": self.source.map(|d| d.to_string()),
            "preset": s.preset.to_string(),
            "skip": patterns(&s.skip),
            "only": patterns(&s.only),
            "default_skips": format!("{:?}", s.default_skips),
            "fuse": format!("{:?}", s.fuse),
            "scale": format!("{:?}", self.scale),
            "profile": format!("{:?}", self.profile),
            "acts": format!("{:?}", self.acts),
            "shards": format!("{:?}", self.shards),
            "files": source.files().iter().map(|f| stamp(f.path())).collect::<Result<Vec<_>>>()?,
        }))
    }

    /// Bytes of the source that a piece may have.
    fn piece(&self) -> u64 {
        // A piece is in memory as it was read, decoded, as codes and scales, and decoded again for its error: at most
        // 12 bytes for 2 of a source in BF16. A third is left to the rest.
        let each = self.memory / self.threads.max(1) as u64 / 9;
        each.clamp(1 << 16, 8 << 20)
    }
}

/// Converts a checkpoint. `stop` may be set from elsewhere: the conversion ends with [`Error::Interrupted`] and can be
/// continued.
pub fn convert(
    source: &Path,
    target: &Path,
    settings: &Settings,
    observer: &dyn Observer,
    stop: &AtomicBool,
) -> Result<Summary> {
    let mode = settings.mode()?;
    let checkpoint = Checkpoint::open(source)?;
    let model = match settings.source {
        Some(dialect) => Model::with_dialect(&checkpoint, dialect)?,
        None => Model::new(&checkpoint)?,
    };
    let plan = match settings.target {
        Target::Bf16 => Plan::decode(&model)?,
        Target::ModelOpt | Target::CompressedTensors => Plan::new(&model, &settings.selection)?,
    };
    if settings.target != Target::Bf16 && plan.quantized().next().is_none() {
        return Err(Error::Refused("no weight would be quantized; `nvfp4 plan` says why".to_string()));
    }
    if settings.target == Target::CompressedTensors && model.dialect == Dialect::MxFp4 {
        let reason = "compressed-tensors has no form for experts in one tensor; convert to modelopt (--to modelopt)";
        return Err(Error::Refused(reason.to_string()));
    }
    let mut conversion = Conversion {
        settings,
        mode,
        model: &model,
        plan: &plan,
        work: Work::begin(target, settings.existing, settings.request(&checkpoint)?)?,
        observer,
        stop,
    };
    conversion.find_amaxes()?;
    conversion.write()
}

/// A conversion under way.
struct Conversion<'a, 'p> {
    settings: &'a Settings,
    mode: Mode,
    model: &'p Model<'p>,
    plan: &'a Plan<'p>,
    work: Work,
    observer: &'a dyn Observer,
    stop: &'a AtomicBool,
}

/// Some rows of a weight.
struct Rows {
    item: usize,
    rows: Range<usize>,
}

impl<'p> Conversion<'_, 'p> {
    /// The first pass. A conversion that is continued after it finds its results in the journal.
    fn find_amaxes(&mut self) -> Result<()> {
        if self.work.journal.amaxes.is_some() {
            return Ok(());
        }
        // MXFP4 keeps its codes: what their scale is, the second pass sees as it reads them.
        let mxfp4 = |item: &Item<'_>| matches!(item.weight.stored, Stored::MxFp4 { .. });
        let wanted = |item: &Item<'_>| item.action == Action::Quantize && !mxfp4(item);
        let items = || self.plan.items.iter().enumerate().filter(|(_, item)| wanted(item));
        let tasks: Vec<Rows> = items().flat_map(|(i, item)| self.pieces(i, item)).collect();
        self.observer.begin(Pass::Amax, items().map(|(_, item)| item.weight.byte_len()).sum());
        let found: Vec<AtomicU32> = self.plan.items.iter().map(|_| AtomicU32::new(0)).collect();
        pool::run(self.settings.threads, &tasks, self.stop, |task, buffer: &mut Buffer| {
            let weight = &self.plan.items[task.item].weight;
            let values = weight.values(task.rows.clone(), buffer)?;
            let input = Input::new(values, task.rows.len(), weight.cols)?;
            let mut amax = 0.0;
            let wanted = amax::Wanted { tensor: Some(&mut amax), ..amax::Wanted::default() };
            amax::amax(Implementation::best(), &input, Edge::Reference, wanted)?;
            if !amax.is_finite() {
                return Err(first_not_finite(weight, task.rows.start, &values));
            }
            found[task.item].fetch_max(amax.to_bits(), Ordering::Relaxed);
            self.observer.advance(bytes_of(weight.byte_len(), weight.rows, task.rows.len()));
            Ok(())
        })?;
        let mut bits: Vec<u32> = found.into_iter().map(AtomicU32::into_inner).collect();
        for group in &self.plan.groups {
            let shared = group.members.iter().map(|&i| bits[i]).max().unwrap_or(0);
            group.members.iter().for_each(|&i| bits[i] = shared);
        }
        let amaxes = items().map(|(i, item)| (item.weight.module.clone(), bits[i])).collect();
        self.work.journal.amaxes = Some(amaxes);
        self.work.note()
    }

    /// The second pass, and everything around it.
    fn write(mut self) -> Result<Summary> {
        let activations = self.activations()?;
        let (target, checkpoint) = (self.settings.target, self.model.checkpoint);
        let files = shards::lay_out(self.model, self.plan, target, activations, self.settings.shards);
        let ignored = target::ignored(self.plan, self.model);
        let pretty = |value: &Value| serde_json::to_vec_pretty(value).map_err(|e| Error::Refused(e.to_string()));
        for path in checkpoint.companions()? {
            self.work.copy(&checkpoint.root().join(&path), &path.to_string_lossy())?;
        }
        self.work.write("config.json", &pretty(&target.config(checkpoint.config(), &ignored, activations))?)?;
        if let Some(quantization) = target.quantization(&ignored, activations) {
            self.work.write("hf_quant_config.json", &pretty(&quantization)?)?;
        }
        let inputs = self.inputs(activations)?;
        let unfinished = files.iter().filter(|f| !self.work.is_done(&f.file));
        self.observer.begin(Pass::Write, unfinished.flat_map(|f| &f.units).map(|u| self.source_len(u)).sum());
        for file in &files {
            if !self.work.is_done(&file.file) {
                let measures = self.write_file(file, &inputs)?;
                self.work.journal.done.insert(file.file.clone(), measures);
                self.work.note()?;
            }
        }
        if let Some(name) = shards::index_name(&files) {
            self.work.write(&name, &pretty(&shards::index(&files))?)?;
        }
        let summary = self.summary(&files);
        self.work.finish()?;
        Ok(summary)
    }

    /// One file: all its units in pieces, then the disk, then its name.
    fn write_file(&self, shard: &Shard<'p>, inputs: &BTreeMap<String, f32>) -> Result<BTreeMap<String, Measure>> {
        let part = self.work.create(&shard.file, shard.len)?;
        part.write_at(&shard.header, 0)?;
        let mut tasks: Vec<(&Placed<'p>, Range<usize>)> = Vec::new();
        let mut left = BTreeMap::new();
        for placed in &shard.units {
            let pieces: Vec<Range<usize>> = match placed.unit {
                Unit::Weight(i) => self.pieces(i, &self.plan.items[i]).map(|piece| piece.rows).collect(),
                Unit::Other(tensor) => ranges(tensor.info.len as usize, self.settings.piece() as usize).collect(),
            };
            if let Unit::Weight(i) = placed.unit {
                self.write_scalars(&part, i, &placed.offsets, inputs)?;
                left.insert(i, (AtomicUsize::new(pieces.len()), Mutex::new(Measure::default())));
            }
            tasks.extend(pieces.into_iter().map(|piece| (placed, piece)));
        }
        pool::run(self.settings.threads, &tasks, self.stop, |(placed, range), memory: &mut Memory| {
            let i = match placed.unit {
                Unit::Other(tensor) => {
                    copy(&tensor, range, &part, placed.offsets[&Role::Whole], memory)?;
                    self.observer.advance(range.len() as u64);
                    return Ok(());
                }
                Unit::Weight(i) => i,
            };
            let item = &self.plan.items[i];
            let measure = self.write_rows(item, range, &part, &placed.offsets, memory)?;
            self.observer.advance(bytes_of(item.weight.byte_len(), item.weight.rows, range.len()));
            let (pieces, sum) = &left[&i];
            sum.lock().expect("no worker panics while it holds this").add(&measure);
            if pieces.fetch_sub(1, Ordering::AcqRel) == 1 && item.action == Action::Quantize {
                let measure = *sum.lock().expect("no worker panics while it holds this");
                self.observer.quantized(&self.finished(item, measure));
            }
            Ok(())
        })?;
        part.finish()?;
        let measured = |(i, (_, sum)): (usize, (AtomicUsize, Mutex<Measure>))| {
            let item = &self.plan.items[i];
            let measure = sum.into_inner().expect("the workers are done");
            (item.action == Action::Quantize).then(|| (item.weight.module.clone(), measure))
        };
        Ok(left.into_iter().filter_map(measured).collect())
    }

    fn write_scalars(
        &self,
        part: &Part,
        i: usize,
        offsets: &BTreeMap<Role, u64>,
        inputs: &BTreeMap<String, f32>,
    ) -> Result<()> {
        let item = &self.plan.items[i];
        let cast = matches!(item.weight.stored, Stored::MxFp4 { .. });
        if let Some(&at) = offsets.get(&Role::Global).filter(|_| !cast) {
            let scale = match &item.weight.stored {
                Stored::Nvfp4(source) => match source.unit {
                    ScaleUnit::Divisor => Scale::Divisor(source.global()?),
                    _ => Scale::Multiplier(source.global()?),
                },
                _ => tensor_scale(&self.mode, self.amax(item), item.weight.precision(), self.settings.target),
            };
            part.write_at(&self.settings.target.stored(scale).to_le_bytes(), at)?;
        }
        match offsets.get(&Role::Input) {
            Some(&at) => part.write_at(&inputs[&item.weight.module].to_le_bytes(), at),
            None => Ok(()),
        }
    }

    fn amax(&self, item: &Item<'_>) -> f32 {
        let amaxes = self.work.journal.amaxes.as_ref().expect("the first pass is over");
        f32::from_bits(amaxes[&item.weight.module])
    }

    /// Some rows of a weight, in its new form. Returns their error where they were quantized.
    fn write_rows(
        &self,
        item: &Item<'_>,
        rows: &Range<usize>,
        part: &Part,
        offsets: &BTreeMap<Role, u64>,
        memory: &mut Memory,
    ) -> Result<Measure> {
        let weight = &item.weight;
        let (cols, count) = (weight.cols, rows.len());
        let at = |role: Role, row_bytes: usize| offsets[&role] + (rows.start * row_bytes) as u64;
        match (&item.action, &weight.stored) {
            (Action::Keep(_), Stored::Plain(tensor)) => {
                let row = cols * tensor.info.dtype.bitsize() / 8;
                copy(tensor, &(rows.start * row..rows.end * row), part, offsets[&Role::Whole], memory)?;
                Ok(Measure::default())
            }
            (Action::Keep(_) | Action::Decode(_), _) => {
                let values = weight.values(rows.clone(), &mut memory.source)?;
                let halves: Vec<bf16> = (0..values.len()).map(|i| bf16::from_f32(values.get(i))).collect();
                part.write_at(bytemuck::cast_slice(&halves), at(Role::Whole, 2 * cols))?;
                Ok(Measure::default())
            }
            (Action::Relabel, Stored::Nvfp4(source)) => {
                source.codes_and_scales(rows.clone(), cols, &mut memory.codes, &mut memory.scales)?;
                part.write_at(&memory.codes, at(Role::Codes, cols / 2))?;
                part.write_at(&memory.scales, at(Role::Scales, cols / BLOCK))?;
                Ok(Measure::default())
            }
            (Action::Quantize, Stored::MxFp4 { experts, .. }) => {
                let expert = rows.start / (weight.rows / experts);
                self.cast(weight, rows, expert as u64, part, offsets, memory)
            }
            (Action::Quantize | Action::Relabel, _) => {
                let values = weight.values(rows.clone(), &mut memory.source)?;
                let codes = sized(&mut memory.codes, count * cols / 2);
                let scales = sized(&mut memory.scales, count * cols / BLOCK);
                let amax = self.amax(item);
                self.quantize(&values, (count, cols), amax, codes, scales)?;
                part.write_at(codes, at(Role::Codes, cols / 2))?;
                part.write_at(scales, at(Role::Scales, cols / BLOCK))?;
                let decoded = sized(&mut memory.decoded, count * cols);
                let profile = self.mode.profile;
                let view = View {
                    rows: count,
                    cols,
                    codes,
                    scales,
                    stored: &[profile.stored(amax, weight.precision())],
                    global: GlobalScale::PerTensor,
                    unit: profile.unit(self.mode.rule.bound()),
                };
                dequantize::dequantize(Implementation::best(), &view, decoded)?;
                Ok(Measure::of(&values, decoded))
            }
        }
    }

    /// The rows of one expert in MXFP4: the same codes with other scales, transposed.
    fn cast(
        &self,
        weight: &Weight<'_>,
        rows: &Range<usize>,
        expert: u64,
        part: &Part,
        offsets: &BTreeMap<Role, u64>,
        memory: &mut Memory,
    ) -> Result<Measure> {
        let (cols, count) = (weight.cols, rows.len());
        let mut exponents = Vec::new();
        weight.mxfp4(rows.clone(), &mut memory.codes, &mut exponents)?;
        if let Some(at) = exponents.iter().position(|&e| e == e8m0::NAN_BYTE) {
            let blocks = cols / MX_BLOCK;
            let (row, col) = (rows.start + at / blocks, at % blocks * MX_BLOCK);
            return Err(Error::WeightNotFinite { module: weight.module.clone(), row, col, value: f32::NAN });
        }
        let scales = sized(&mut memory.scales, count * cols / BLOCK);
        let global = mxfp4::cast(&mut memory.codes, &exponents, scales);
        let decoded = sized(&mut memory.decoded, count * cols);
        let view = View {
            rows: count,
            cols,
            codes: &memory.codes,
            scales,
            stored: &[global],
            global: GlobalScale::PerTensor,
            unit: ScaleUnit::Multiplier,
        };
        dequantize::dequantize(Implementation::best(), &view, decoded)?;
        let measure = Measure::of(&weight.values(rows.clone(), &mut memory.source)?, decoded);
        for (role, bytes, width) in
            [(Role::Codes, &memory.codes, cols / 2), (Role::Scales, &memory.scales, cols / BLOCK)]
        {
            let transposed = sized(&mut memory.bytes, bytes.len());
            mxfp4::transpose(bytes, count, width, transposed);
            part.write_at(transposed, offsets[&role] + expert * bytes.len() as u64)?;
        }
        part.write_at(&global.to_le_bytes(), offsets[&Role::Global] + expert * 4)?;
        Ok(measure)
    }

    /// Codes and scales of some rows.
    fn quantize(
        &self,
        values: &Values<'_>,
        (rows, cols): (usize, usize),
        amax: f32,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<()> {
        if self.settings.scale == ScaleChoice::Mse {
            let scaling = Scaling::new(amax, &self.mode, values.precision());
            for (b, (codes, scale)) in codes.chunks_exact_mut(BLOCK / 2).zip(scales).enumerate() {
                let row = std::array::from_fn(|i| values.get(b * BLOCK + i));
                let quantized = mse::quantize(&row, &scaling);
                *scale = quantized.scale;
                let pairs = quantized.codes[0].as_chunks::<2>().0;
                codes.iter_mut().zip(pairs).for_each(|(byte, &[even, odd])| *byte = e2m1::pack(even, odd));
            }
            return Ok(());
        }
        let direction = Direction {
            mode: self.mode,
            rounding: Rounding::NearestEven,
            transform: None,
            layout: Layout::Linear,
            amax: Amax::Given(&[amax]),
            codes,
            scales,
        };
        Ok(kernel::quantize(Implementation::best(), &Input::new(*values, rows, cols)?, Some(direction), None)?)
    }

    /// The rows of a weight in pieces of bounded size.
    fn pieces(&self, item: usize, of: &Item<'_>) -> impl Iterator<Item = Rows> + use<> {
        let row = (of.weight.byte_len() / of.weight.rows.max(1) as u64).max(1);
        let rows = match (&of.weight.stored, &of.action) {
            (Stored::MxFp4 { experts, .. }, Action::Quantize) => of.weight.rows / experts,
            _ => (self.settings.piece() / row).max(1) as usize,
        };
        ranges(of.weight.rows, rows).map(move |rows| Rows { item, rows })
    }

    fn source_len(&self, placed: &Placed<'_>) -> u64 {
        match placed.unit {
            Unit::Weight(i) => self.plan.items[i].weight.byte_len(),
            Unit::Other(tensor) => tensor.info.len,
        }
    }

    /// Whether scales of activations are written. An NVFP4 source that has them for all of its weights keeps them.
    fn activations(&self) -> Result<Activations> {
        if self.settings.acts != Acts::None {
            return Ok(Activations::Nvfp4);
        }
        let has = |item: &Item<'_>| matches!(&item.weight.stored, Stored::Nvfp4(n) if n.input.is_some());
        let (with, without): (Vec<_>, Vec<_>) = self.plan.quantized().partition(|item| has(item));
        match (with.first(), without.first()) {
            (None, _) => Ok(Activations::Plain),
            (Some(_), None) => Ok(Activations::Nvfp4),
            (Some(_), Some(missing)) => Err(Error::Refused(format!(
                "the source has scales of activations, but none for '{}'; give them with --acts",
                missing.weight.module
            ))),
        }
    }

    /// The scale of the activations of every weight, as the target stores it. Weights that are joined share the largest.
    fn inputs(&self, activations: Activations) -> Result<BTreeMap<String, f32>> {
        if activations == Activations::Plain {
            return Ok(BTreeMap::new());
        }
        let target = self.settings.target;
        let six_e = Bound::E448.six_e();
        let own = |item: &Item<'_>| -> Result<f32> {
            let module = &item.weight.module;
            match (&self.settings.acts, &item.weight.stored) {
                (Acts::Constant(scale), _) => Ok(*scale),
                (Acts::Amaxes(amaxes), _) => match amaxes.get(module) {
                    Some(amax) if amax.is_finite() && *amax > 0.0 => Ok(*amax / six_e),
                    Some(amax) => Err(Error::Refused(format!(
                        "--acts: '{module}' has the amax {amax}; expected a positive number"
                    ))),
                    None => Err(Error::Refused(format!("--acts: no amax for '{module}'"))),
                },
                (Acts::None, Stored::Nvfp4(source)) => {
                    let stored = source.input()?.unwrap_or(1.0);
                    Ok(if source.unit == ScaleUnit::Divisor { 1.0 / stored } else { stored })
                }
                (Acts::None, _) => Ok(1.0),
            }
        };
        let mut multipliers = vec![0f32; self.plan.items.len()];
        for (i, item) in self.plan.items.iter().enumerate() {
            if matches!(item.action, Action::Quantize | Action::Relabel) {
                multipliers[i] = own(item)?;
            }
        }
        if self.settings.acts != Acts::None {
            for group in &self.plan.groups {
                let shared = group.members.iter().map(|&i| multipliers[i]).fold(0.0, f32::max);
                group.members.iter().for_each(|&i| multipliers[i] = shared);
            }
        }
        let stored = |(i, item): (usize, &Item<'_>)| {
            (item.weight.module.clone(), target.stored(Scale::Multiplier(multipliers[i])))
        };
        Ok(self.plan.items.iter().enumerate().map(stored).collect())
    }

    fn finished(&self, item: &Item<'_>, measure: Measure) -> Finished {
        let weight = &item.weight;
        let parts = self.settings.target.parts(item, Activations::Plain);
        let after = parts.iter().map(super::target::Part::len).sum();
        Finished {
            module: weight.module.clone(),
            rows: weight.rows,
            cols: weight.cols,
            before: weight.byte_len(),
            after,
            measure,
        }
    }

    fn summary(&self, files: &[Shard<'p>]) -> Summary {
        let measures: BTreeMap<&str, Measure> =
            self.work.journal.done.values().flatten().map(|(module, m)| (module.as_str(), *m)).collect();
        let done = |item: &Item<'_>| {
            let measure = measures.get(item.weight.module.as_str())?;
            Some(self.finished(item, *measure))
        };
        Summary {
            quantized: self.plan.items.iter().filter_map(done).collect(),
            before: self.model.checkpoint.byte_len(),
            after: files.iter().map(|f| f.len - f.header.len() as u64).sum(),
            files: files.iter().map(|f| f.file.clone()).collect(),
        }
    }
}

/// A thread's memory.
#[derive(Default)]
struct Memory {
    source: Buffer,
    bytes: Vec<u8>,
    codes: Vec<u8>,
    scales: Vec<u8>,
    decoded: Vec<f32>,
}

/// The tensor scale of a weight with this amax. A weight of zeros has 1, which every reader can multiply or divide by.
fn tensor_scale(mode: &Mode, amax: f32, precision: Precision, target: Target) -> Scale {
    let stored = mode.profile.stored(amax, precision);
    match (mode.profile.unit(mode.rule.bound()), target) {
        (ScaleUnit::Multiplier, _) => Scale::Multiplier(stored),
        (ScaleUnit::Divisor, _) => Scale::Divisor(stored),
        (ScaleUnit::Amax(_), _) if amax == 0.0 => Scale::Multiplier(1.0),
        (ScaleUnit::Amax(bound), Target::ModelOpt | Target::Bf16) => {
            Scale::Multiplier((amax / bound.six_e()).max(f32::from_bits(1)))
        }
        (ScaleUnit::Amax(bound), Target::CompressedTensors) => Scale::Divisor((bound.six_e() / amax).min(f32::MAX)),
    }
}

/// Copies a range of a tensor's bytes to where the tensor starts in the output.
fn copy(tensor: &Located<'_>, range: &Range<usize>, part: &Part, start: u64, memory: &mut Memory) -> Result<()> {
    let bytes = sized(&mut memory.bytes, range.len());
    tensor.read(range.start as u64, bytes)?;
    part.write_at(bytes, start + range.start as u64)
}

/// `0..len` in ranges of `step`.
fn ranges(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(step.max(1)).map(move |start| start..(start + step).min(len))
}

/// The part of a weight's bytes that some of its rows make up.
fn bytes_of(total: u64, rows: usize, part: usize) -> u64 {
    (u128::from(total) * part as u128 / rows.max(1) as u128) as u64
}
