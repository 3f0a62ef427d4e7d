//! Quantization to FP8 on a GPU: the arguments of a call and their checks. Read `units.cuh`, then
//! the kernels `rows.cu` and `panels.cu`; `launch.rs` chooses among them.

mod host;
mod launch;

pub(super) use host::on_host;
pub(crate) use launch::sources;
#[cfg(test)]
pub(in crate::fp8) use launch::{Grid, Variant};

use super::check;
use crate::Result;
use crate::amax::cuda as maxima;
use crate::cuda::{Along, Device, Groups, Input, Matrix, Slice, SliceMut, Stream};
use crate::input::check_len;
use launch::Launch;
use nvfp4_spec::fp8::{self, AmaxRule, Format, Scales, Side, Tile};
use nvfp4_spec::{Error, Specials, area};

/// The source of the scale of a whole matrix.
#[derive(Clone, Copy, Debug)]
pub enum Scale<'a> {
    /// The caller knows it.
    Value(f32),
    /// One number in GPU memory, read when the work runs: delayed scaling, whose
    /// [`update`](crate::fp8::cuda::update) writes it there.
    Memory(Slice<'a, f32>),
    /// It follows from an amax in GPU memory, read when the work runs: current scaling, after
    /// [`amax`](crate::amax::cuda::amax). Twin of [`AmaxRule::tensor_scale`].
    OfAmax {
        /// One magnitude.
        amax: Slice<'a, f32>,
        /// How the scale follows from it.
        rule: AmaxRule,
    },
}

/// Where scales come from, and which elements share one. Twin of [`nvfp4_spec::fp8::Scaling`].
#[derive(Clone, Copy, Debug)]
pub enum Scaling<'a> {
    /// One scale for the whole matrix.
    Tensor(Scale<'a>),
    /// One scale for 128 neighbours in a row of the direction.
    Row128(AmaxRule),
    /// One scale for a square of 128 × 128.
    Square128(AmaxRule),
    /// MXFP8: an E8M0 byte for 32 neighbours.
    Mx,
    /// MXFP8 in squares: 32 × 32 elements share an E8M0 byte.
    MxSquare,
}

/// How a matrix becomes FP8. Twin of [`nvfp4_spec::fp8::Mode`].
#[derive(Clone, Copy, Debug)]
pub struct Mode<'a> {
    /// What a code is.
    pub format: Format,
    /// Where scales come from.
    pub scaling: Scaling<'a>,
}

impl From<fp8::Mode> for Mode<'_> {
    fn from(mode: fp8::Mode) -> Self {
        let scaling = match mode.scaling {
            fp8::Scaling::Tensor { scale } => Scaling::Tensor(Scale::Value(scale)),
            fp8::Scaling::Row128(rule) => Scaling::Row128(rule),
            fp8::Scaling::Square128(rule) => Scaling::Square128(rule),
            fp8::Scaling::Mx => Scaling::Mx,
            fp8::Scaling::MxSquare => Scaling::MxSquare,
        };
        Mode { format: mode.format, scaling }
    }
}

impl Mode<'_> {
    /// The mode that determines shapes and lengths.
    pub fn shapes(&self) -> fp8::Mode {
        let scaling = match self.scaling {
            Scaling::Tensor(_) => fp8::Scaling::Tensor { scale: 1.0 },
            Scaling::Row128(rule) => fp8::Scaling::Row128(rule),
            Scaling::Square128(rule) => fp8::Scaling::Square128(rule),
            Scaling::Mx => fp8::Scaling::Mx,
            Scaling::MxSquare => fp8::Scaling::MxSquare,
        };
        fp8::Mode { format: self.format, scaling }
    }

    /// Scales and amaxes of a matrix are `count` numbers.
    fn check(&self, device: Device, count: usize) -> Result<()> {
        let (slice, what) = match self.scaling {
            Scaling::Tensor(Scale::Memory(scale)) => (scale, "scale of the tensor"),
            Scaling::Tensor(Scale::OfAmax { amax, .. }) => (amax, "amax of the tensor"),
            _ => return Ok(()),
        };
        check_len(what, count, slice.len())?;
        slice.check(device, what)?;
        Ok(slice.check_aligned(4, what)?)
    }
}

/// Buffers for scales: 32-bit numbers, or E8M0 bytes for MXFP8.
pub type ScaleMut<'a> = Scales<SliceMut<'a, f32>, SliceMut<'a, u8>>;

/// What to write for one direction. Twin of [`super::Direction`].
#[derive(Debug)]
pub struct Direction<'a> {
    /// A byte per element.
    pub codes: SliceMut<'a, u8>,
    /// One per tile: [`nvfp4_spec::fp8::Tile::scale_count`].
    pub scales: ScaleMut<'a>,
}

impl Direction<'_> {
    fn check(&self, device: Device, mode: &Mode<'_>, side: Side, shape: (usize, usize)) -> Result<()> {
        let len = match &self.scales {
            Scales::F32(scales) => Scales::F32(scales.len()),
            Scales::E8m0(scales) => Scales::E8m0(scales.len()),
        };
        check(&mode.shapes(), side, shape, self.codes.len(), len)?;
        self.check_memory(device)
    }

    fn check_memory(&self, device: Device) -> Result<()> {
        self.codes.check(device, "codes")?;
        match &self.scales {
            Scales::F32(scales) => {
                scales.check(device, "scales")?;
                scales.check_aligned(4, "scales")?;
            }
            Scales::E8m0(scales) => scales.check(device, "scales")?,
        }
        Ok(())
    }

    fn scale_address(&self) -> u64 {
        match &self.scales {
            Scales::F32(scales) => scales.address(),
            Scales::E8m0(scales) => scales.address(),
        }
    }
}

/// The buffer for the largest magnitude of the matrix: one number.
#[derive(Debug)]
pub enum Amax<'a> {
    /// Replaces the value in the buffer.
    Replace(SliceMut<'a, f32>),
    /// Keeps the larger of the new value and the one in the buffer, which is a magnitude. Delayed
    /// scaling does this in the first row of its history.
    Join(SliceMut<'a, f32>),
}

impl<'a> Amax<'a> {
    fn slice(&self) -> Slice<'_, f32> {
        match self {
            Amax::Replace(amax) | Amax::Join(amax) => amax.as_slice(),
        }
    }

    fn check(&self, device: Device, count: usize) -> Result<()> {
        check_len("amax", count, self.slice().len())?;
        self.slice().check(device, "amax")?;
        Ok(self.slice().check_aligned(4, "amax")?)
    }
}

/// The outputs to compute, any of them in one call. Twin of [`super::Outputs`].
#[derive(Debug, Default)]
pub struct Outputs<'a> {
    /// The row direction.
    pub row: Option<Direction<'a>>,
    /// The column direction.
    pub col: Option<Direction<'a>>,
    /// The largest magnitude of the matrix, without NaN. With a direction it needs no separate
    /// pass.
    pub amax: Option<Amax<'a>>,
}

/// Quantizes `x` in the directions of `outputs`. Does not wait.
pub fn quantize(stream: &Stream, x: &Input<'_>, mode: &Mode<'_>, outputs: Outputs<'_>) -> Result<()> {
    let (device, shape) = (stream.device(), (x.rows(), x.cols()));
    x.check(device)?;
    mode.check(device, 1)?;
    for (direction, side) in [(&outputs.row, Side::Row), (&outputs.col, Side::Column)] {
        direction.as_ref().map_or(Ok(()), |direction| direction.check(device, mode, side, shape))?;
    }
    outputs.amax.as_ref().map_or(Ok(()), |amax| amax.check(device, 1))?;
    checked(stream, (x, None), mode, outputs)
}

/// Quantizes what was checked.
fn checked(stream: &Stream, matrix: Matrix<'_>, mode: &Mode<'_>, mut outputs: Outputs<'_>) -> Result<()> {
    let launches = plan(matrix, mode, &outputs)?;
    let on_the_way = outputs.row.is_some() || outputs.col.is_some();
    match &mut outputs.amax {
        None => {}
        Some(Amax::Replace(amax)) if on_the_way => stream.fill_bytes(amax.reborrow(), 0)?,
        Some(Amax::Join(_)) if on_the_way => {}
        Some(Amax::Replace(amax)) => {
            let outputs = maxima::Outputs { tensor: Some(amax.reborrow()), ..Default::default() };
            maxima::run(stream, matrix, Specials::Kernel, maxima::Values::Plain, outputs)?;
        }
        Some(Amax::Join(amax)) => {
            maxima::join(stream, matrix, maxima::Outputs { tensor: Some(amax.reborrow()), ..Default::default() })?;
        }
    }
    launches.iter().try_for_each(|launch| launch.run(stream))
}

/// The rows and columns of the codes of a direction of a matrix in groups, and the number of its
/// scales: MXFP8's column direction has the rows of `x` as they lie, others have
/// [`Groups::padded_rows`] in each row. Tiles begin anew in every group.
pub fn grouped_shape(mode: &Mode<'_>, side: Side, cols: usize, groups: &Groups) -> Result<((usize, usize), usize)> {
    let (along, shape) = match side {
        Side::Row => (Along::Rows, (groups.rows(), cols)),
        Side::Column => (Along::K, (cols, groups.padded_rows())),
    };
    let tile = mode.shapes().tile(side);
    let codes = if tile == Tile::Column32 { (groups.rows(), cols) } else { shape };
    Ok((codes, along.scale_count(tile, groups, shape)?))
}

/// Quantizes the groups of a matrix in the directions of `outputs`, all in one launch. Does not
/// wait.
///
/// Shapes are those of [`grouped_shape`]. What is one number for a matrix is one per group here:
/// scales, amaxes. Each group has the bits that it would have as a matrix by itself, with zeros
/// after its rows.
pub fn quantize_grouped(
    stream: &Stream,
    x: &Input<'_>,
    groups: &Groups,
    mode: &Mode<'_>,
    outputs: Outputs<'_>,
) -> Result<()> {
    let (device, cols) = (stream.device(), x.cols());
    groups.check_input(device, x)?;
    mode.check(device, groups.count())?;
    for (direction, side) in [(&outputs.row, Side::Row), (&outputs.col, Side::Column)] {
        let Some(direction) = direction else { continue };
        let ((rows, cols), scales) = grouped_shape(mode, side, cols, groups)?;
        check_len("codes", area(rows, cols)?, direction.codes.len())?;
        let got = match (&direction.scales, mode.shapes().scaling.is_mx()) {
            (Scales::F32(got), false) => got.len(),
            (Scales::E8m0(got), true) => got.len(),
            _ => return Err(Error::Combination("MXFP8 has scales of a byte, others of 32 bits").into()),
        };
        check_len("scales", scales, got)?;
        direction.check_memory(device)?;
        direction.codes.check_aligned(16, "codes of a matrix in groups")?;
    }
    outputs.amax.as_ref().map_or(Ok(()), |amax| amax.check(device, groups.count()))?;
    checked(stream, (x, Some(groups)), mode, outputs)
}

/// The launches of a call, except that of an amax without a direction.
pub(in crate::fp8) fn plan(matrix: Matrix<'_>, mode: &Mode<'_>, outputs: &Outputs<'_>) -> Result<Vec<Launch>> {
    let (x, _) = matrix;
    let Outputs { row, col, amax } = outputs;
    let amax = amax.as_ref().map(|amax| amax.slice().address());
    if x.rows() == 0 || x.cols() == 0 {
        // The tile of the whole matrix is there even without elements.
        let tensors = matches!(mode.scaling, Scaling::Tensor(_));
        let directions = [row, col].into_iter().flatten().filter(|_| tensors);
        return directions.map(|direction| Launch::rows(matrix, mode, direction, None)).collect();
    }
    match (row, col) {
        (None, None) => Ok(vec![]),
        (Some(row), None) if !mode.scaling.in_squares() => Ok(vec![Launch::rows(matrix, mode, row, amax)?]),
        (row, col) => Ok(vec![Launch::panels(matrix, mode, [row.as_ref(), col.as_ref()], amax)?]),
    }
}
