//! What the bytes of an NVFP4 weight look like: how often each code and each scale occurs.

use super::weight::{Stored, Weight};
use super::{Model, pool};
use crate::Result;
use nvfp4_spec::{BLOCK, e4m3};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

/// Counts over a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statistics {
    /// How often each code occurs.
    pub codes: [u64; 16],
    /// How often each scale byte occurs.
    pub scales: [u64; 256],
    /// Blocks whose scale is zero though their codes are not: they decode to zeros.
    pub vanished: u64,
}

impl Default for Statistics {
    fn default() -> Self {
        Statistics { codes: [0; 16], scales: [0; 256], vanished: 0 }
    }
}

impl Statistics {
    /// Counts the codes and linear scales of some rows.
    pub fn count(&mut self, codes: &[u8], scales: &[u8]) {
        let mut bytes = [0u64; 256];
        codes.iter().for_each(|&b| bytes[usize::from(b)] += 1);
        for (byte, n) in bytes.into_iter().enumerate() {
            self.codes[byte & 15] += n;
            self.codes[byte >> 4] += n;
        }
        for (i, &scale) in scales.iter().enumerate() {
            self.scales[usize::from(scale)] += 1;
            if scale & 0x7F == 0 {
                self.vanished += u64::from(codes[i * BLOCK / 2..][..BLOCK / 2].iter().any(|b| b & 0x77 != 0));
            }
        }
    }

    /// Adds the counts of another.
    pub fn add(&mut self, other: &Statistics) {
        self.codes.iter_mut().zip(other.codes).for_each(|(a, b)| *a += b);
        self.scales.iter_mut().zip(other.scales).for_each(|(a, b)| *a += b);
        self.vanished += other.vanished;
    }

    /// Scale bytes that are NaN.
    pub fn nan_scales(&self) -> u64 {
        self.scales[usize::from(e4m3::NAN_BYTE)] + self.scales[usize::from(e4m3::NAN_BYTE | 0x80)]
    }

    /// Scale bytes that are negative, NaN aside.
    pub fn negative_scales(&self) -> u64 {
        self.scales[0x80..0xFF].iter().sum()
    }

    /// The smallest and the largest scale byte among positive numbers.
    pub fn scale_range(&self) -> Option<(u8, u8)> {
        let positive = || (1..=e4m3::MAX_BYTE).filter(|&b| self.scales[usize::from(b)] > 0);
        Some((positive().next()?, positive().next_back()?))
    }

    /// Bits of information per code.
    pub fn entropy(&self) -> f64 {
        let total: u64 = self.codes.iter().sum();
        let share = |&n: &u64| n as f64 / total as f64;
        -self.codes.iter().filter(|n| **n > 0).map(|n| share(n) * share(n).log2()).sum::<f64>()
    }
}

/// The statistics of every NVFP4 weight, in the order of [`Model::weights`]; `None` for other
/// weights.
pub fn statistics(model: &Model<'_>, threads: usize) -> Result<Vec<Option<Statistics>>> {
    let found: Vec<Mutex<Option<Statistics>>> = model.weights.iter().map(|_| Mutex::new(None)).collect();
    let tasks: Vec<(usize, &Weight<'_>)> = model.weights.iter().enumerate().collect();
    pool::run(threads, &tasks, &AtomicBool::new(false), |&(i, weight), memory: &mut (Vec<u8>, Vec<u8>)| {
        let Stored::Nvfp4(parts) = &weight.stored else { return Ok(()) };
        let (mut sum, step) = (Statistics::default(), ((8 << 20) / weight.cols.max(1)).max(1));
        for start in (0..weight.rows).step_by(step) {
            let rows = start..(start + step).min(weight.rows);
            parts.codes_and_scales(rows, weight.cols, &mut memory.0, &mut memory.1)?;
            sum.count(&memory.0, &memory.1);
        }
        *found[i].lock().expect("no worker panics while it holds this") = Some(sum);
        Ok(())
    })?;
    Ok(found.into_iter().map(|m| m.into_inner().expect("the workers are done")).collect())
}
