//! The scales of the next step on a GPU; `update.cu` says how.

use crate::Result;
use crate::cuda::text::{Variants, assemble_fp8};
use crate::cuda::{self, Slice, SliceMut, Source, Stream};
use crate::input::check_len;
use nvfp4_spec::fp8::delayed::{Algorithm, Delayed};
use nvfp4_spec::{Error, area};

/// What is updated. Twin of [`nvfp4_spec::fp8::delayed::Entry`].
#[derive(Clone, Copy, Debug)]
pub enum Entry<'a> {
    /// One tensor alone. The history always moves on.
    Single,
    /// One tensor of many, after a reduction over devices. A last amax of 0 leaves history and
    /// scale as they are.
    Bulk {
        /// The reduced amaxes of this step, one per tensor, if there was a reduction; 0 stands for
        /// none.
        reduced: Option<Slice<'a, f32>>,
    },
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    history: u64,
    scales: u64,
    reduced: u64,
    length: u32,
    tensors: u32,
    largest: f32,
    most_recent: u32,
    bulk: u32,
    padding: u32,
}

/// Computes the scales of the next step, one per tensor. `history` has one row per step, with an
/// amax per tensor; the first row is the current step. Twin of [`Delayed::update`]. Does not wait.
pub fn update(
    stream: &Stream,
    rule: &Delayed,
    history: SliceMut<'_, f32>,
    scales: SliceMut<'_, f32>,
    entry: Entry<'_>,
) -> Result<()> {
    static VARIANTS: Variants<()> = Variants::new();
    let (device, tensors) = (stream.device(), scales.len());
    let params = plan(rule, &history, &scales, entry)?;
    history.check(device, "amax history")?;
    history.check_aligned(4, "amax history")?;
    scales.check(device, "scales")?;
    scales.check_aligned(4, "scales")?;
    if let Entry::Bulk { reduced: Some(reduced) } = entry {
        reduced.check(device, "reduced amaxes")?;
        reduced.check_aligned(4, "reduced amaxes")?;
    }
    let kernel = VARIANTS.get(device, (), source)?;
    // SAFETY: `Params` is laid out as in update.cu; addresses and lengths were checked.
    unsafe { kernel.launch(stream, [tensors.div_ceil(THREADS as usize) as u32, 1, 1], THREADS, 0, &params) }?;
    Ok(())
}

const THREADS: u32 = 128;

fn plan(rule: &Delayed, history: &SliceMut<'_, f32>, scales: &SliceMut<'_, f32>, entry: Entry<'_>) -> Result<Params> {
    let tensors = scales.len();
    let length = history.len().checked_div(tensors).unwrap_or(1);
    check_len("amax history (rows of an amax per tensor)", area(length.max(1), tensors)?, history.len())?;
    let (bulk, reduced) = match entry {
        Entry::Single => (0, None),
        Entry::Bulk { reduced } => (1, reduced),
    };
    if let Some(reduced) = &reduced {
        check_len("reduced amaxes", tensors, reduced.len())?;
    }
    let count = |n: usize| u32::try_from(n).map_err(|_| Error::TooLarge { rows: length, cols: tensors });
    Ok(Params {
        history: history.address(),
        scales: scales.address(),
        reduced: reduced.map_or(0, |reduced| reduced.address()),
        length: count(length)?,
        tensors: count(tensors)?,
        largest: rule.largest(),
        most_recent: (rule.algorithm == Algorithm::MostRecent).into(),
        bulk,
        padding: 0,
    })
}

fn source((): ()) -> (&'static str, &'static str, String) {
    ("update", "update_scales", assemble_fp8("", &[include_str!("update.cu")]))
}

/// Texts for [`crate::sources`].
pub(crate) fn sources() -> Vec<(String, Source)> {
    vec![cuda::entry((), source)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulated::Emulated;
    use nvfp4_spec::fp8::delayed;

    fn slice(values: &mut [f32]) -> SliceMut<'_, f32> {
        // SAFETY: memory of the host, which only an emulated kernel is given.
        unsafe { SliceMut::from_raw(values.as_mut_ptr() as u64, values.len()) }
    }

    /// Many tensors at once, through the host's compiler.
    #[test]
    fn every_tensor_gets_its_own_scale() {
        let (_, function, text) = source(());
        let Some(kernel) = Emulated::build(function, &text) else { return };
        let (tensors, numbers) = (300, [0.0, 3.0, 448.0, 1e-40, f32::INFINITY, f32::NAN, 7.0]);
        for (length, algorithm) in [(1, Algorithm::Max), (2, Algorithm::MostRecent), (5, Algorithm::Max)] {
            let rule = Delayed { algorithm, margin: 1, ..Delayed::default() };
            let history: Vec<f32> = (0..length * tensors).map(|i| numbers[(i * 5 + i / 7) % 7]).collect();
            let reduced: Vec<f32> = (0..tensors).map(|i| numbers[i % 7]).collect();
            for bulk in [None, Some(None), Some(Some(&reduced))] {
                let (mut after, mut scales) = (history.clone(), vec![5.0; tensors]);
                let mut given = reduced.clone();
                let given = slice(&mut given);
                let entry = match bulk {
                    None => Entry::Single,
                    Some(reduced) => Entry::Bulk { reduced: reduced.map(|_| given.as_slice()) },
                };
                let params = plan(&rule, &slice(&mut after), &slice(&mut scales), entry).unwrap();
                kernel.run((tensors as u32).div_ceil(THREADS), THREADS, &params);
                for t in 0..tensors {
                    let mut column: Vec<f32> = (0..length).map(|i| history[i * tensors + t]).collect();
                    let entry = match bulk {
                        None => delayed::Entry::Single,
                        Some(reduced) => delayed::Entry::Bulk { reduced: reduced.map(|r| r[t]) },
                    };
                    let scale = rule.update(&mut column, 5.0, entry).unwrap();
                    assert_eq!(scales[t], scale, "tensor {t}");
                    let got: Vec<u32> = (0..length).map(|i| after[i * tensors + t].to_bits()).collect();
                    assert_eq!(got, column.iter().map(|x| x.to_bits()).collect::<Vec<u32>>(), "tensor {t}");
                }
            }
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_errors() {
        let (mut history, mut scales) = ([0.0; 7], [1.0; 3]);
        let error = plan(&Delayed::default(), &slice(&mut history), &slice(&mut scales), Entry::Single);
        let message = error.map(drop).unwrap_err().to_string();
        assert_eq!(message, "amax history (rows of an amax per tensor): expected length 6, got 7");
        let error = plan(&Delayed::default(), &slice(&mut history[..0]), &slice(&mut scales), Entry::Single);
        assert!(error.is_err());
    }
}
