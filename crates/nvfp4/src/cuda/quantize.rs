//! Quantizers on the memory of a GPU.

use super::{
    Direction, DirectionValues, Factor, Gpu, Groups, Input, Memory, Nvfp4Direction, Offset, Owned, QuantTensor, Slice,
    values::{self, along},
};
use crate::format::{Directions, Finite, Nvfp4, Rounding, Side};
use crate::{Error, Nvfp4Description, Profile, Quantizer, Result};
use nvfp4_kernels::cuda::Matrix;
use nvfp4_kernels::quantize::cuda as kernel;
use nvfp4_spec::{Precision, Rounding as Rule};

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
    /// The directions that are written as values for the products that come right after, instead of as codes: see [`Gpu::prefers_values`].
    /// NVFP4 alone has them, of a matrix by itself, with one global scale.
    pub values: Option<Directions>,
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
    /// The row direction, if it was written as values.
    pub row_values: Option<DirectionValues>,
    /// The column direction, if it was.
    pub col_values: Option<DirectionValues>,
}

impl Observed {
    /// A direction as a product takes it, written as codes or as values.
    pub fn factor(&self, side: Side) -> Result<Factor<'_>> {
        let values = match side {
            Side::Row => &self.row_values,
            Side::Column => &self.col_values,
        };
        match values {
            Some(values) => Ok(values.into()),
            None => Ok(self.tensor.direction(side)?.into()),
        }
    }
}

/// A direction that is to be written.
enum Room {
    Codes(Nvfp4Direction),
    Values(DirectionValues),
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
    ) -> Result<Observed> {
        if [row, col].into_iter().flatten().any(|format| format.finite == Finite::Refuse) {
            return Err(Error::FiniteOnGpu);
        }
        let random = |format: &Nvfp4, side| {
            let stochastic = format.rounding() == Rounding::Stochastic;
            options.randomness.filter(|_| stochastic).map(|randomness| randomness.random(side))
        };
        let (rows, cols) = (x.rows(), x.cols());
        let padded = groups.map_or(rows, Groups::padded_rows);
        let count = |format: &Nvfp4, side: Side, rows: usize| match groups {
            Some(groups) => along(side).stored_count(format.mode.global, groups, rows),
            None => Ok(format.mode.global.count(rows)),
        };
        let row_about = row.map(|row| row.description(rows, cols, None));
        let col_about = col.map(|col| col.description(cols, padded, col.transform().signs()));
        let scratch = self.scratch(options, groups, [row_about, col_about])?;
        let [row_values, col_values, maxima] = scratch;
        let row_room = row.zip(row_about).map(|(row, about)| match row_values {
            Some(memory) => Ok(Room::Values(DirectionValues::over(about, memory))),
            None => self.room(Side::Row, about, count(row, Side::Row, rows)?),
        });
        let col_room = col.zip(col_about).map(|(col, about)| match col_values {
            Some(memory) => Ok(Room::Values(DirectionValues::over(about, memory))),
            None => self.room(Side::Column, about, count(col, Side::Column, cols)?),
        });
        let (mut row_room, mut col_room) = (row_room.transpose()?, col_room.transpose()?);
        let row_target =
            row.zip(row_room.as_mut()).map(|(f, room)| room.target(f, random(f, Side::Row), options.row_amax));
        let col_target =
            col.zip(col_room.as_mut()).map(|(f, room)| room.target(f, random(f, Side::Column), options.col_amax));
        match groups {
            None => {
                let mut maxima = maxima;
                let scratch = maxima.as_mut().map(Memory::slice_mut);
                kernel::quantize_in(&self.stream, x, row_target, col_target, scratch)?;
            }
            Some(groups) => kernel::quantize_grouped(&self.stream, x, groups, row_target, col_target)?,
        }
        for (format, room, amax) in [(row, &mut row_room, options.row_amax), (col, &mut col_room, options.col_amax)] {
            if let (Some(format), Some(room)) = (format, room) {
                self.store_global(format, room, amax, x.values().precision())?;
            }
        }
        let apart = |room: Option<Room>| match room {
            None => (None, None),
            Some(Room::Codes(direction)) => (Some(Direction::Nvfp4(direction)), None),
            Some(Room::Values(values)) => (None, Some(values)),
        };
        let ((row, row_values), (col, col_values)) = (apart(row_room), apart(col_room));
        let tensor = QuantTensor { shape: vec![rows, cols], row, col };
        Ok(Observed { tensor, row_amax: None, col_amax: None, row_values, col_values })
    }

    /// What a call needs for itself, in one allocation: room for the directions that are written as values, and scratch for the kernels
    /// if both directions have an amax to find.
    fn scratch(
        &self,
        options: &Options<'_>,
        groups: Option<&Groups>,
        abouts: [Option<Nvfp4Description>; 2],
    ) -> Result<[Option<Memory>; 3]> {
        let finds = groups.is_none()
            && abouts.iter().all(Option::is_some)
            && options.row_amax.is_none()
            && options.col_amax.is_none();
        let mut lens = [0, 0, if finds { kernel::SCRATCH } else { 0 }];
        for (at, side) in [Side::Row, Side::Column].into_iter().enumerate() {
            if let Some(about) = abouts[at].filter(|_| options.values.is_some_and(|values| values.has(side))) {
                lens[at] = DirectionValues::byte_len(&about)?;
            }
        }
        if lens == [0; 3] {
            return Ok([None, None, None]);
        }
        // Allocators align to 16.
        let memory = self.memory.bytes(&self.stream, lens.iter().sum::<usize>() + values::ALIGNED - 16)?;
        let mut end = (memory.address().next_multiple_of(values::ALIGNED as u64) - memory.address()) as usize;
        let ranges = lens.map(|len| {
            end += len;
            end - len..end
        });
        let parts = memory.parts(ranges);
        Ok(parts.map(|part| Some(part).filter(|part| !part.is_empty())))
    }

    /// A direction with room for its bytes and so many global scales.
    fn room(&self, side: Side, about: Nvfp4Description, stored: usize) -> Result<Room> {
        let [codes, scales, stored] = self.block(side, about.block_of(stored)?)?;
        Ok(Room::Codes(Nvfp4Direction { about, codes: codes.into(), scales: scales.into(), stored: stored.into() }))
    }

    /// Brings the stored numbers of a direction in place, which hold its amax if that was not given.
    fn store_global(
        &self,
        format: &Nvfp4,
        room: &mut Room,
        amax: Option<Slice<'_, f32>>,
        precision: Precision,
    ) -> Result<()> {
        let (about, stored) = room.stored();
        if let Some(amax) = amax {
            self.stream.copy(amax, stored.slice_mut())?;
        }
        let (profile, bound) = (format.mode.profile, format.mode.rule.bound());
        if profile != Profile::TransformerEngine {
            let precision = about.rotation.map_or(precision, |_| nvfp4_spec::hadamard::PRECISION);
            let amax = self.stream.to_host(stored.slice())?;
            let numbers: Vec<f32> = amax.into_iter().map(|amax| profile.stored(amax, bound, precision)).collect();
            self.stream.upload(&numbers, stored.slice_mut())?;
        }
        Ok(())
    }
}

impl Room {
    /// The description, and the stored numbers.
    fn stored(&mut self) -> (Nvfp4Description, &mut Owned<f32>) {
        match self {
            Room::Codes(direction) => (direction.about, &mut direction.stored),
            Room::Values(values) => (values.about, &mut values.stored),
        }
    }

    fn target<'a>(
        &'a mut self,
        format: &Nvfp4,
        random: Option<kernel::Random<'a>>,
        amax: Option<Slice<'a, f32>>,
    ) -> kernel::Direction<'a> {
        let (about, stored, to) = match self {
            Room::Codes(Nvfp4Direction { about, codes, scales, stored }) => {
                (about, stored, kernel::Written::Codes { codes: codes.slice_mut(), scales: scales.slice_mut() })
            }
            Room::Values(DirectionValues { about, values, stored }) => {
                (about, stored, kernel::Written::Values(values.slice_mut()))
            }
        };
        kernel::Direction {
            mode: format.mode,
            rounding: random.map_or(Rule::NearestEven, Rule::Stochastic),
            transform: about.rotation,
            layout: about.layout,
            amax: match amax {
                Some(amax) => kernel::Amax::Given(amax),
                None => kernel::Amax::Compute(stored.slice_mut()),
            },
            to,
        }
    }
}
