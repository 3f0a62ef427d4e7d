//! The two passes of a conversion over its source, in pieces of some rows each: the first finds the
//! amax of every weight, so that weights which servers join can share one; the second quantizes
//! (`rows`). A piece is a function of the source alone, so the bytes do not depend on the number of
//! threads, on the memory, on how often the conversion was interrupted, or on who makes which of
//! its parts.

use super::action::Action;
use super::conversion::{Amaxes, Conversion};
use super::folder::Located;
use super::measure::Measure;
use super::names::KvScale;
use super::plan::Item;
use super::rows::{Memory, Piece, copy};
use super::settings::{Finished, KvCache, Pass};
use super::shards::{Placed, RowOrder, Shard, Unit};
use super::sink::Sink;
use super::target::{Activations, Scale, Target};
use super::weighing::Codes;
use super::weight::{Stored, Weight, sized};
use super::written::{self, Role};
use super::{comfyui, first_not_finite, mxfp4, pool};
use crate::Result;
use nvfp4::{Precision, Specials};
use nvfp4_kernels::{Input, amax};
use nvfp4_spec::Mode;
use nvfp4_spec::scale::Unit as ScaleUnit;
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Some rows of a weight, or bytes of another tensor, and where they go.
type Task<'t, 'p> = (&'t Placed<'p>, Range<usize>);

/// Tasks by the Hessian that decides about their codes, and its columns.
type Batches<'t, 'p> = BTreeMap<Option<(String, usize)>, Vec<Task<'t, 'p>>>;

impl<'p> Conversion<'_, 'p> {
    /// The first pass, over some weights; all that share a tensor scale must be among them.
    pub fn find_amaxes(&self, needed: &BTreeSet<usize>) -> Result<Amaxes> {
        let items = || needed.iter().map(|&i| (i, &self.plan.items[i]));
        let order = RowOrder::AsStored;
        let tasks: Vec<(usize, Range<usize>)> =
            items().flat_map(|(i, item)| self.pieces(item, order).map(move |rows| (i, rows))).collect();
        self.observer.begin(Pass::Amax, items().map(|(_, item)| item.weight.byte_len()).sum());
        // A weight that holds several matrices has a number for each.
        let found: Vec<Vec<AtomicU32>> =
            self.plan.items.iter().map(|i| (0..i.weight.matrices()).map(|_| AtomicU32::new(0)).collect()).collect();
        pool::run(self.settings.threads, &tasks, self.stop, |(i, rows), memory: &mut Memory| {
            let Item { weight, action, .. } = &self.plan.items[*i];
            let largest = match weight.stored {
                Stored::MxFp4 { .. } if *action == Action::Quantize => {
                    mxfp4::top(weight, rows, &mut memory.codes, &mut memory.exponents)?
                }
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
        Ok(items().map(|(i, item)| (item.weight.module.clone(), std::mem::take(&mut bits[i]))).collect())
    }

    /// Whether a journal has a number for every matrix, and one that the first pass can find:
    /// somebody may have changed the file.
    pub fn fits(&self, amaxes: &Amaxes, needed: &BTreeSet<usize>) -> bool {
        needed.iter().map(|&i| &self.plan.items[i]).all(|item| {
            let possible = |&found: &u32| match item.weight.stored {
                Stored::MxFp4 { .. } if item.action == Action::Quantize => found < 255,
                _ => found <= f32::MAX.to_bits(),
            };
            let found = amaxes.get(&item.weight.module);
            found.is_some_and(|found| found.len() == item.weight.matrices() && found.iter().all(possible))
        })
    }

    /// What a file has beside its units.
    pub fn write_frame(&self, shard: &Shard<'p>, sink: &Sink) -> Result<()> {
        sink.write_at(&shard.header, 0)?;
        shard.constants.iter().try_for_each(|(at, bytes)| sink.write_at(bytes, *at))
    }

    /// The second pass, over some units of a file.
    pub fn write_units(&self, units: &[Placed<'p>], sink: &Sink) -> Result<BTreeMap<String, Measure>> {
        let mut tasks: Vec<Task<'_, 'p>> = Vec::new();
        let mut left = BTreeMap::new();
        for placed in units {
            let pieces: Vec<Range<usize>> = match placed.unit {
                Unit::Weight(i) => self.pieces(&self.plan.items[i], placed.order).collect(),
                Unit::Other(tensor) => self.byte_pieces(&tensor, placed.order).collect(),
            };
            if let Unit::Weight(i) = placed.unit {
                self.write_scalars(sink, i, &placed.offsets)?;
                left.insert(i, (AtomicUsize::new(pieces.len()), Mutex::new(Measure::default())));
            }
            tasks.extend(pieces.into_iter().map(|piece| (placed, piece)));
        }
        for (hessian, tasks) in self.batches(tasks) {
            let factor = hessian
                .map(|(module, cols)| pool::divided(self.settings.threads, || self.weighing.factor(&module, cols))?);
            let factor = factor.transpose()?;
            let codes = match &factor {
                None => Codes::Nearest,
                Some(None) => Codes::Unfactored,
                Some(Some(factor)) => Codes::Mended(factor),
            };
            pool::run(self.settings.threads, &tasks, self.stop, |(placed, range), memory: &mut Memory| {
                let i = match placed.unit {
                    Unit::Other(tensor) => {
                        copy(&tensor, range, sink, placed, memory)?;
                        self.observer.advance(range.len() as u64);
                        return Ok(());
                    }
                    Unit::Weight(i) => i,
                };
                let item = &self.plan.items[i];
                let piece = Piece { item, rows: range, sink, to: placed, codes };
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
        }
        let measured = |(i, (_, sum)): (usize, (AtomicUsize, Mutex<Measure>))| {
            let item = &self.plan.items[i];
            let measure = sum.into_inner().expect("the workers are done");
            item.action.is_measured().then(|| (item.weight.module.clone(), measure))
        };
        Ok(left.into_iter().filter_map(measured).collect())
    }

    /// Tasks whose codes one Hessian decides about together, so that one factor is in memory at a
    /// time; all others first.
    fn batches<'t>(&self, tasks: Vec<Task<'t, 'p>>) -> Batches<'t, 'p> {
        let mut batches = Batches::new();
        for task in tasks {
            let hessian = match task.0.unit {
                Unit::Weight(i) => {
                    let item = &self.plan.items[i];
                    self.weighing.hessian_of(item).map(|module| (module.to_string(), item.weight.cols))
                }
                Unit::Other(_) => None,
            };
            batches.entry(hessian).or_default().push(task);
        }
        batches
    }

    fn write_scalars(&self, sink: &Sink, i: usize, offsets: &BTreeMap<Role, u64>) -> Result<()> {
        let item = &self.plan.items[i];
        if let (Action::Retain(_), Stored::Fp8 { scale, input, .. }) = (&item.action, &item.weight.stored) {
            copy_whole(scale, sink, offsets[&Role::Scales])?;
            // An activation scale of another type is written as a number.
            let same = input.filter(|input| input.info.dtype == Dtype::F32 || self.settings.target != Target::ModelOpt);
            if let (Some(input), Some(&at)) = (same, offsets.get(&Role::Input)) {
                copy_whole(&input, sink, at)?;
                return self.write_kv_scale(sink, item, offsets);
            }
        }
        if let (Action::RetainMxFp4, Stored::MxFp4 { scales, .. }) = (&item.action, &item.weight.stored) {
            copy_whole(scales, sink, offsets[&Role::Scales])?;
        }
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
                sink.write_at(&self.settings.target.stored(scale).to_le_bytes(), at + 4 * matrix as u64)?;
            }
        }
        self.write_kv_scale(sink, item, offsets)?;
        if let Some(&at) = offsets.get(&Role::Marker) {
            sink.write_at(comfyui::MARKER, at)?;
        }
        match offsets.get(&Role::Input) {
            Some(&at) => sink.write_at(&self.inputs[&item.weight.module].to_le_bytes(), at),
            None => Ok(()),
        }
    }

    /// The scale of keys or values that the source has none for: the one that is given, or 1.
    fn write_kv_scale(&self, sink: &Sink, item: &Item<'_>, offsets: &BTreeMap<Role, u64>) -> Result<()> {
        let Some(&at) = offsets.get(&Role::KvScale) else { return Ok(()) };
        let scale = match (&self.settings.kv, KvScale::of_projection(&item.weight.module)) {
            (KvCache::Fp8(scales), Some(own)) => scales[&own.compressed_tensors()],
            _ => 1.0,
        };
        sink.write_at(&scale.to_le_bytes(), at)
    }

    fn find_amax(&self, weight: &Weight<'_>, rows: &Range<usize>, memory: &mut Memory) -> Result<f32> {
        let values = weight.values(rows.clone(), &mut memory.source)?;
        let input = Input::new(values, rows.len(), weight.cols)?;
        let mut amax = 0.0;
        let wanted = amax::Outputs { tensor: Some(&mut amax), ..amax::Outputs::default() };
        amax::amax(self.settings.implementation, &input, Specials::Reference, wanted)?;
        if amax.is_finite() { Ok(amax) } else { Err(first_not_finite(weight, rows.start, &values)) }
    }

    pub fn finished(&self, item: &Item<'_>, measure: Measure) -> Finished {
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
}

/// The tensor scale of a weight with this amax. A weight of zeros has 1, which every reader can
/// multiply or divide by.
fn tensor_scale(mode: &Mode, amax: f32, precision: Precision, target: Target) -> Scale {
    let stored = mode.profile.stored(amax, mode.rule.bound(), precision);
    match (mode.profile.unit(mode.rule.bound()), target) {
        (ScaleUnit::Multiplier, _) => Scale::Multiplier(stored),
        (ScaleUnit::Divisor, _) => Scale::Divisor(stored),
        (ScaleUnit::Amax(_), _) if amax == 0.0 => Scale::Multiplier(1.0),
        (ScaleUnit::Amax(bound), Target::CompressedTensors) => Scale::Divisor((bound.six_e() / amax).min(f32::MAX)),
        (ScaleUnit::Amax(bound), _) => Scale::Multiplier((amax / bound.six_e()).max(f32::from_bits(1))),
    }
}

/// Copies a small tensor, in pieces.
fn copy_whole(tensor: &Located<'_>, sink: &Sink, at: u64) -> Result<()> {
    const PIECE: u64 = 1 << 20;
    let mut bytes = Vec::new();
    for start in (0..tensor.info.len).step_by(PIECE as usize) {
        let piece = sized(&mut bytes, (tensor.info.len - start).min(PIECE) as usize);
        tensor.read(start, piece)?;
        sink.write_at(piece, at + start)?;
    }
    Ok(())
}

/// The bytes of some rows of a weight.
fn bytes_of(total: u64, rows: usize, part: usize) -> u64 {
    (u128::from(total) * part as u128 / rows.max(1) as u128) as u64
}
