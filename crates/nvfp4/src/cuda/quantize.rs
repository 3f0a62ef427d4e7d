//! Quantizers on the memory of a GPU.

use super::{Direction, Gpu, Groups, Input, Memory, Nvfp4Direction, Offset, QuantTensor, Slice};
use crate::format::{Finite, Nvfp4, Rounding, Side};
use crate::{Error, Nvfp4Description, Profile, Quantizer, Result};
use nvfp4_kernels::cuda::Matrix;
use nvfp4_kernels::quantize::cuda as kernel;
use nvfp4_spec::{GlobalScale, Precision, Rounding as Rule};

/// Random numbers for one call: our position-keyed stream. The row direction draws at the offset, the column direction at the next.
#[derive(Clone, Copy, Debug)]
pub struct Randomness<'a> {
    /// The seed.
    pub seed: u64,
    /// The offset, known now or read from the GPU's memory when the work runs.
    pub offset: Offset<'a>,
}

impl<'a> Randomness<'a> {
    fn random(self, side: Side) -> kernel::Random<'a> {
        let more = match side {
            Side::Row => 0,
            Side::Column => 1,
        };
        let offset = match self.offset {
            Offset::Value(offset) => Offset::Value(offset.wrapping_add(more)),
            Offset::Memory { at, plus } => Offset::Memory { at, plus: plus.wrapping_add(more) },
        };
        kernel::Random::Stream { seed: self.seed, offset, first_block: 0 }
    }
}

/// From one place of the CPU's streams: others exist there only.
impl TryFrom<crate::Randomness<'_>> for Randomness<'_> {
    type Error = Error;

    fn try_from(randomness: crate::Randomness<'_>) -> Result<Self> {
        match randomness {
            crate::Randomness::At { seed, offset } => Ok(Randomness { seed, offset: Offset::Value(offset) }),
            crate::Randomness::Streams { .. } | crate::Randomness::Bytes { .. } => {
                let fix = "a GPU takes its random numbers from a seed and an offset";
                Err(Error::setting(fix.to_string()))
            }
        }
    }
}

/// What a single call may add to a quantizer's settings. Twin of [`crate::Options`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// Random numbers, for stochastic rounding.
    pub randomness: Option<Randomness<'a>>,
    /// The amax of the row direction if it is known: one value, or one per row. It is not looked at, so it must not be negative.
    pub row_amax: Option<Slice<'a, f32>>,
    /// The amax of the column direction if it is known.
    pub col_amax: Option<Slice<'a, f32>>,
    /// One number, read when the work runs: the scale of delayed scaling, in the place of the one that the quantizer was made with. It is
    /// not looked at, so it must be above 0. One scale serves both directions of a uniform spec.
    pub row_scale: Option<Slice<'a, f32>>,
    /// That of the column direction, where it has one of its own.
    pub col_scale: Option<Slice<'a, f32>>,
}

/// A quantized tensor, and what delayed scaling is to remember of it. Twin of [`crate::Observed`].
#[derive(Debug)]
pub struct Observed {
    /// The tensor.
    pub tensor: QuantTensor,
    /// One number: the largest magnitude that the row direction was made from, if its scale comes from earlier steps.
    pub row_amax: Option<Memory>,
    /// That of the column direction.
    pub col_amax: Option<Memory>,
}

impl Gpu {
    /// Quantizes a matrix. Same bits as [`Quantizer::quantize_with`].
    ///
    /// A quantizer that refuses values that are not finite is itself refused: whether there are any is known too late. With a
    /// [`Profile`] other than TransformerEngine's this waits.
    pub fn quantize(&self, quantizer: &Quantizer, x: &Input<'_>, options: &Options<'_>) -> Result<QuantTensor> {
        Ok(quantizer.observe_on(self, x, options)?.tensor)
    }

    /// Quantizes a matrix, or its groups, in both directions at once, each to NVFP4 by its own settings.
    pub(crate) fn quantize_each(
        &self,
        (x, groups): Matrix<'_>,
        (row, col): (Option<&Nvfp4>, Option<&Nvfp4>),
        options: &Options<'_>,
    ) -> Result<QuantTensor> {
        if [row, col].into_iter().flatten().any(|format| format.finite == Finite::Refuse) {
            return Err(Error::FiniteOnGpu);
        }
        let random = |format: &Nvfp4, side| {
            let stochastic = format.rounding() == Rounding::Stochastic;
            options.randomness.filter(|_| stochastic).map(|randomness| randomness.random(side))
        };
        let (rows, cols) = (x.rows(), x.cols());
        let padded = groups.map_or(rows, Groups::padded_rows);
        let count = |format: &Nvfp4, rows: usize, repeated: usize| match (format.mode.global, groups) {
            (GlobalScale::PerTensor, Some(groups)) => groups.count(),
            (global, _) => global.count(rows) * repeated,
        };
        let row_room = row.map(|row| {
            let about = row.description(rows, cols, None);
            self.room(Side::Row, about, count(row, rows, 1))
        });
        let col_room = col.map(|col| {
            let about = col.description(cols, padded, col.transform().signs());
            self.room(Side::Column, about, count(col, cols, groups.map_or(1, Groups::count)))
        });
        let (mut row_room, mut col_room) = (row_room.transpose()?, col_room.transpose()?);
        let row_target =
            row.zip(row_room.as_mut()).map(|(f, room)| room.target(f, random(f, Side::Row), options.row_amax));
        let col_target =
            col.zip(col_room.as_mut()).map(|(f, room)| room.target(f, random(f, Side::Column), options.col_amax));
        match groups {
            None => kernel::quantize(&self.stream, x, row_target, col_target)?,
            Some(groups) => kernel::quantize_grouped(&self.stream, x, groups, row_target, col_target)?,
        }
        for (format, room, amax) in [(row, &mut row_room, options.row_amax), (col, &mut col_room, options.col_amax)] {
            if let (Some(format), Some(room)) = (format, room) {
                self.store_global(format, room, amax, x.values().precision())?;
            }
        }
        let (row, col) = (row_room.map(Direction::Nvfp4), col_room.map(Direction::Nvfp4));
        Ok(QuantTensor { shape: vec![rows, cols], row, col })
    }

    /// A direction with room for its bytes and so many global scales.
    fn room(&self, side: Side, about: Nvfp4Description, stored: usize) -> Result<Nvfp4Direction> {
        let [codes, scales, stored] = self.block(side, about.block_of(stored)?)?;
        Ok(Nvfp4Direction { about, codes: codes.into(), scales: scales.into(), stored: stored.into() })
    }

    /// Brings the stored numbers of a direction in place, which hold its amax if that was not given.
    fn store_global(
        &self,
        format: &Nvfp4,
        room: &mut Nvfp4Direction,
        amax: Option<Slice<'_, f32>>,
        precision: Precision,
    ) -> Result<()> {
        if let Some(amax) = amax {
            self.stream.copy(amax, room.stored.slice_mut())?;
        }
        let profile = format.mode.profile;
        if profile != Profile::TransformerEngine {
            let precision = room.about.rotation.map_or(precision, |_| nvfp4_spec::hadamard::PRECISION);
            let amax = self.stream.to_host(room.stored.slice())?;
            let stored: Vec<f32> = amax.into_iter().map(|amax| profile.stored(amax, precision)).collect();
            self.stream.upload(&stored, room.stored.slice_mut())?;
        }
        Ok(())
    }
}

impl Nvfp4Direction {
    fn target<'a>(
        &'a mut self,
        format: &Nvfp4,
        random: Option<kernel::Random<'a>>,
        amax: Option<Slice<'a, f32>>,
    ) -> kernel::Direction<'a> {
        kernel::Direction {
            mode: format.mode,
            rounding: random.map_or(Rule::NearestEven, Rule::Stochastic),
            transform: self.about.rotation,
            layout: self.about.layout,
            amax: match amax {
                Some(amax) => kernel::Amax::Given(amax),
                None => kernel::Amax::Compute(self.stored.slice_mut()),
            },
            codes: self.codes.slice_mut(),
            scales: self.scales.slice_mut(),
        }
    }
}
