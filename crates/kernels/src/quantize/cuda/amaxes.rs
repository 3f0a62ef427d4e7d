//! The amaxes that a quantization has to compute before it.

use super::{Amax, Direction};
use crate::Result;
use crate::amax::cuda as maxima;
use crate::cuda::{Groups, Input, SliceMut, Stream};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::{GlobalScale, Specials};

/// Computes the missing amaxes, in one pass where that is possible.
pub(super) fn find_amaxes(
    stream: &Stream,
    x: (&Input<'_>, Option<&Groups>),
    row: Option<&mut Direction<'_>>,
    col: Option<&mut Direction<'_>>,
) -> Result<()> {
    let (row, col) = (missing_amax(row, Along::Rows), missing_amax(col, Along::Columns));
    let on_the_way = row.as_ref().zip(col.as_ref()).and_then(|(row, col)| row.on_the_way_to(col));
    match (row, col, on_the_way) {
        (Some(mut row), Some(col), _) if (row.specials, row.values) == (col.specials, col.values) => {
            let (specials, values, mut both) = (row.specials, row.values, maxima::Outputs::default());
            if (row.global, col.global) == (GlobalScale::PerTensor, GlobalScale::PerTensor) {
                // The maximum of all is the same in both directions; the copy comes after it in the
                // stream.
                both.tensor = Some(row.out.reborrow());
                maxima::run(stream, x, specials, values, both)?;
                return Ok(stream.copy(row.out.as_slice(), col.out)?);
            }
            row.add_to(&mut both);
            col.add_to(&mut both);
            maxima::run(stream, x, specials, values, both)
        }
        (Some(row), Some(col), Some(signs)) => {
            let (specials, mut after) = (col.specials, maxima::Outputs::default());
            col.add_to(&mut after);
            maxima::run_with_plain(stream, x, specials, signs, after, row.out)
        }
        (row, col, _) => [row, col].into_iter().flatten().try_for_each(|one| {
            let (specials, values, mut alone) = (one.specials, one.values, maxima::Outputs::default());
            one.add_to(&mut alone);
            maxima::run(stream, x, specials, values, alone)
        }),
    }
}

/// The maxima of the parts of a matrix, which the kernel after finds the largest of: so nothing has
/// to be cleared before. Addresses for the row and the column direction.
pub(super) struct Parts {
    pub row: u64,
    pub col: u64,
    pub count: u32,
}

/// Bytes for the most maxima of both directions.
pub(super) const SCRATCH: usize = 2 * 4 * maxima::MOST_PARTS;

/// Finds the maxima of parts, if one pass finds those of both directions and they are few.
pub(super) fn find_parts(
    stream: &Stream,
    x: &Input<'_>,
    row: &mut Direction<'_>,
    col: &mut Direction<'_>,
    scratch: SliceMut<'_, f32>,
) -> Result<Option<Parts>> {
    let (row, col) = (missing_amax(Some(row), Along::Rows), missing_amax(Some(col), Along::Columns));
    let Some((row, col)) = row.zip(col) else { return Ok(None) };
    let one = (row.global, row.specials) == (GlobalScale::PerTensor, col.specials) && row.global == col.global;
    let same = row.values == col.values;
    let before = row.on_the_way_to(&col).is_some();
    let Some(count) = maxima::part_count(stream.device(), x, col.values).filter(|_| one && (same || before)) else {
        return Ok(None);
    };
    if 4 * scratch.len() < SCRATCH {
        return Ok(None);
    }
    scratch.check(stream.device(), "scratch of a quantization")?;
    scratch.check_aligned(16, "scratch of a quantization")?;
    let start = scratch.address();
    // Both begin at multiples of 16 bytes.
    let second = count.next_multiple_of(4);
    let (own, plain) = scratch.range(0..second + count).split_at(second);
    let own = own.range(0..count);
    let [row_at, col_at] = [if same { start } else { plain.address() }, start];
    let plain = (!same).then_some(plain);
    maxima::run_parts(stream, x, (col.specials, col.values), own, plain)?;
    Ok(Some(Parts { row: row_at, col: col_at, count: count as u32 }))
}

/// Whether a direction runs along rows or along columns.
#[derive(Clone, Copy)]
enum Along {
    Rows,
    Columns,
}

/// An amax that has to be computed, or one per row of a direction.
struct MissingAmax<'a> {
    along: Along,
    global: GlobalScale,
    specials: Specials,
    values: maxima::Values,
    out: SliceMut<'a, f32>,
}

/// The amax that a direction has to compute, if any.
fn missing_amax<'a>(d: Option<&'a mut Direction<'_>>, along: Along) -> Option<MissingAmax<'a>> {
    let d = d?;
    let values = match (d.transform, along) {
        (None, _) => maxima::Values::Plain,
        (Some(signs), Along::Rows) => maxima::Values::AlongRows(signs),
        (Some(signs), Along::Columns) => maxima::Values::AlongColumns(signs),
    };
    let (global, specials) = (d.mode.global, d.mode.amax_specials());
    match &mut d.amax {
        Amax::Given(_) => None,
        Amax::Compute(out) => Some(MissingAmax { along, global, specials, values, out: out.reborrow() }),
    }
}

impl<'a> MissingAmax<'a> {
    /// The signs of the transform along columns, if `other` is the maximum after it and this one,
    /// the maximum before it, can be computed in the same pass.
    fn on_the_way_to(&self, other: &MissingAmax<'_>) -> Option<Signs> {
        let plain = (self.specials, self.global, self.values)
            == (other.specials, GlobalScale::PerTensor, maxima::Values::Plain);
        match other.values {
            maxima::Values::AlongColumns(signs) if plain => Some(signs),
            _ => None,
        }
    }

    fn add_to(self, pass: &mut maxima::Outputs<'a>) {
        let slot = match (self.global, self.along) {
            (GlobalScale::PerTensor, _) => &mut pass.tensor,
            (GlobalScale::PerRow, Along::Rows) => &mut pass.rows,
            (GlobalScale::PerRow, Along::Columns) => &mut pass.cols,
        };
        *slot = Some(self.out);
    }
}
