//! Two checkpoints side by side: the error of one against the other, and whether their bytes are
//! the same.

use super::dialect::Model;
use super::measure::Measure;
use super::pool;
use super::weight::{Buffer, Stored, Weight};
use crate::{Error, Result};
use nvfp4_kernels::Values;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

/// A weight that both checkpoints have.
#[derive(Clone, Debug)]
pub struct Compared {
    /// Its module.
    pub module: String,
    /// What the second is stored as.
    pub format: String,
    /// The error of the second against the first.
    pub measure: Measure,
}

/// Weights with their errors, and the modules that only one checkpoint has.
#[derive(Clone, Debug, Default)]
pub struct Comparison {
    /// Weights of both, in the order of the first.
    pub weights: Vec<Compared>,
    /// Modules of the first alone.
    pub only_first: Vec<String>,
    /// Modules of the second alone.
    pub only_second: Vec<String>,
}

/// Measures every weight of `second` against the one of the same name in `first`. Weights that are
/// plain in both are left out.
pub fn compare(first: &Model<'_>, second: &Model<'_>, threads: usize) -> Result<Comparison> {
    let by_name: BTreeMap<&str, &Weight<'_>> = second.weights.iter().map(|w| (w.module.as_str(), w)).collect();
    let names: BTreeMap<&str, ()> = first.weights.iter().map(|w| (w.module.as_str(), ())).collect();
    let mut comparison = Comparison {
        only_second: by_name.keys().filter(|n| !names.contains_key(*n)).map(|n| n.to_string()).collect(),
        ..Comparison::default()
    };
    let mut pairs = Vec::new();
    for a in &first.weights {
        match by_name.get(a.module.as_str()) {
            None => comparison.only_first.push(a.module.clone()),
            Some(b) if (a.rows, a.cols) != (b.rows, b.cols) => {
                let shapes = format!("{}×{} in the first and {}×{} in the second", a.rows, a.cols, b.rows, b.cols);
                return Err(Error::Refused(format!("'{}' is {shapes}", a.module)));
            }
            Some(b) if matches!((&a.stored, &b.stored), (Stored::Plain(_), Stored::Plain(_))) => {}
            Some(b) => pairs.push((pairs.len(), a, *b)),
        }
    }
    let measures: Vec<Mutex<Measure>> = pairs.iter().map(|_| Mutex::default()).collect();
    type Memory = (Buffer, Buffer, Vec<f32>, Vec<u8>, Vec<u8>);
    pool::run(threads, &pairs, &AtomicBool::new(false), |&(i, a, b), memory: &mut Memory| {
        let (x_buffer, y_buffer, decoded, codes, scales) = memory;
        let (mut sum, step) = (Measure::default(), ((1 << 20) / a.cols.max(1)).max(1));
        for start in (0..a.rows).step_by(step) {
            let rows = start..(start + step).min(a.rows);
            let x = a.values(rows.clone(), x_buffer)?;
            let y: &[f32] = match b.values(rows.clone(), y_buffer)? {
                Values::F32(y) => y,
                other => {
                    decoded.clear();
                    decoded.extend((0..other.len()).map(|i| other.get(i)));
                    decoded
                }
            };
            let mut part = Measure::of(&x, y);
            if let Stored::Nvfp4(parts) = &b.stored {
                parts.codes_and_scales(rows, b.cols, codes, scales)?;
                part.count_clipped(&x, y, codes);
            }
            sum.add(&part);
        }
        *measures[i].lock().expect("no worker panics while it holds this") = sum;
        Ok(())
    })?;
    comparison.weights = pairs
        .iter()
        .zip(measures)
        .map(|((_, a, b), m)| Compared {
            module: a.module.clone(),
            format: b.format(),
            measure: m.into_inner().expect("the workers are done"),
        })
        .collect();
    Ok(comparison)
}

/// How two checkpoints differ in bytes.
///
/// Exhaustive on purpose: a program that shows differences has words for each of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// Only the first has the tensor.
    OnlyFirst(String),
    /// Only the second has it.
    OnlySecond(String),
    /// Types or shapes differ; the text says how.
    Form(String, String),
    /// This many bytes differ, the first of them here.
    Bytes {
        /// The tensor.
        name: String,
        /// How many.
        count: u64,
        /// Where the first is.
        first: u64,
    },
}

/// Compares all tensors byte by byte, by name. An empty list means that they are equal.
pub fn differences(first: &super::Checkpoint, second: &super::Checkpoint) -> Result<Vec<Difference>> {
    const PIECE: usize = 4 << 20;
    let mut found = Vec::new();
    let (mut x, mut y) = (Vec::new(), Vec::new());
    for a in first.tensors() {
        let name = &a.info.name;
        let Some(b) = second.get(name) else {
            found.push(Difference::OnlyFirst(name.clone()));
            continue;
        };
        if (a.info.dtype, &a.info.shape) != (b.info.dtype, &b.info.shape) {
            let form = |t: &super::Located<'_>| format!("{:?} {:?}", t.info.dtype, t.info.shape);
            found.push(Difference::Form(name.clone(), format!("{} and {}", form(&a), form(&b))));
            continue;
        }
        let (mut count, mut at_first) = (0, None);
        for start in (0..a.info.len).step_by(PIECE) {
            let len = (a.info.len - start).min(PIECE as u64) as usize;
            x.resize(len, 0);
            y.resize(len, 0);
            a.read(start, &mut x)?;
            b.read(start, &mut y)?;
            if x != y {
                let differing = || x.iter().zip(&y).enumerate().filter(|(_, (p, q))| p != q);
                at_first = at_first.or_else(|| differing().next().map(|(i, _)| start + i as u64));
                count += differing().count() as u64;
            }
        }
        if let Some(first) = at_first {
            found.push(Difference::Bytes { name: name.clone(), count, first });
        }
    }
    let only = second.tensors().filter(|t| first.get(&t.info.name).is_none());
    found.extend(only.map(|t| Difference::OnlySecond(t.info.name.clone())));
    Ok(found)
}
