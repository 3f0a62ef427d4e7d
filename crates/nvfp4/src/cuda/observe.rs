//! Quantizers of any format on the memory of a GPU.

use super::{
    Direction, Fp8Direction, Gpu, Groups, Input, Memory, Observed, Options, Owned, QuantTensor, Slice, Values,
};
use crate::format::{BlockTile, ColumnSource, Directions, Finite, Fp8Code, MxTile, Side};
use crate::quantizer::{Maker, Makers, Scale};
use crate::{Error, Fp8Description, Precision, Quantizer, Result};
use half::{bf16, f16};
use nvfp4_kernels::amax::cuda as amax;
use nvfp4_kernels::cuda::Matrix;
use nvfp4_kernels::fp8::cuda as kernel;
use nvfp4_spec::fp8::{self, Scales};
use nvfp4_spec::{Specials, area};

impl Quantizer {
    /// Quantizes a matrix in the memory of a GPU: same bits as [`Quantizer::observe`]. Directions in high precision are refused: products
    /// take the matrix itself.
    pub fn observe_on(&self, gpu: &Gpu, x: &Input<'_>, options: &Options<'_>) -> Result<Observed> {
        self.observe_matrix(gpu, (x, None), options)
    }

    /// Quantizes a matrix or its groups.
    pub(super) fn observe_matrix(&self, gpu: &Gpu, x: Matrix<'_>, options: &Options<'_>) -> Result<Observed> {
        let amaxes = Directions::of(options.row_amax.is_some(), options.col_amax.is_some());
        self.check_options(amaxes, options.randomness.is_some(), self.directions)?;
        if self.finite() == Finite::Refuse {
            return Err(Error::FiniteOnGpu);
        }
        match &self.makers {
            Makers::Uniform(maker) => maker.make_on(gpu, x, self.directions, options),
            Makers::Split { row, col, source } => {
                let mut made = split_on(gpu, x, options, (row.as_ref(), col.as_ref()), *source)?;
                made.tensor.row = made.tensor.row.filter(|_| self.directions.has(Side::Row));
                Ok(made)
            }
        }
    }
}

/// A direction after the other. Twin of `make_split` on the CPU.
fn split_on(
    gpu: &Gpu,
    matrix: Matrix<'_>,
    options: &Options<'_>,
    (row, col): (Option<&Maker>, Option<&Maker>),
    source: ColumnSource,
) -> Result<Observed> {
    let (x, groups) = matrix;
    if let (Some(Maker::Nvfp4(row)), Some(Maker::Nvfp4(col)), ColumnSource::Original) = (row, col, source) {
        // One pass for both.
        return gpu.quantize_each(matrix, (Some(row), Some(col)), options);
    }
    let concern = |maker: &Maker| Options {
        randomness: options.randomness.filter(|_| maker.is_stochastic()),
        ..Options::default()
    };
    let mut made = match row {
        Some(row) => {
            let (row_amax, row_scale) = (options.row_amax, options.row_scale);
            // Columns of decoded rows need their codes.
            let values = options.values.filter(|_| source == ColumnSource::Original);
            let options = Options { row_amax, row_scale, values, ..concern(row) };
            row.make_on(gpu, matrix, Directions::Row, &options)?
        }
        None => blank(x),
    };
    if let Some(col) = col {
        let (col_amax, col_scale) = (options.col_amax, options.col_scale);
        let options = Options { col_amax, col_scale, values: options.values, ..concern(col) };
        let second = match source {
            ColumnSource::Original => col.make_on(gpu, matrix, Directions::Column, &options)?,
            ColumnSource::RowDequantized if groups.is_some() => {
                let why = "columns of decoded rows: quantize the groups one by one";
                return Err(Error::setting(why.to_string()));
            }
            ColumnSource::RowDequantized => {
                let row = made.tensor.direction(Side::Row)?;
                let decoded = Decoded::new(gpu, row, x.values().precision())?;
                col.make_on(gpu, (&decoded.input(x)?, None), Directions::Column, &options)?
            }
        };
        (made.tensor.col, made.col_amax) = (second.tensor.col, second.col_amax);
        made.col_values = second.col_values;
    }
    Ok(made)
}

/// What a direction stands for, in the type that the tensor came in.
enum Decoded {
    F32(Owned<f32>),
    Bf16(Owned<bf16>),
    F16(Owned<f16>),
}

impl Decoded {
    fn new(gpu: &Gpu, row: &Direction, precision: Precision) -> Result<Self> {
        let count = area(row.rows(), row.cols())?;
        macro_rules! decode {
            ($variant:ident) => {{
                let mut out = gpu.alloc(count)?;
                row.dequantize(gpu, out.slice_mut())?;
                Decoded::$variant(out)
            }};
        }
        Ok(match precision {
            Precision::F32 => decode!(F32),
            Precision::Bf16 => decode!(Bf16),
            Precision::F16 => decode!(F16),
        })
    }

    fn input(&self, like: &Input<'_>) -> Result<Input<'_>> {
        let values = match self {
            Decoded::F32(x) => Values::F32(x.slice()),
            Decoded::Bf16(x) => Values::Bf16(x.slice()),
            Decoded::F16(x) => Values::F16(x.slice()),
        };
        Ok(Input::new(values, like.rows(), like.cols())?)
    }
}

fn blank(x: &Input<'_>) -> Observed {
    let tensor = QuantTensor { shape: vec![x.rows(), x.cols()], row: None, col: None };
    Observed { tensor, row_amax: None, col_amax: None, row_values: None, col_values: None }
}

impl Maker {
    fn make_on(&self, gpu: &Gpu, x: Matrix<'_>, directions: Directions, options: &Options<'_>) -> Result<Observed> {
        match self {
            Maker::Plain(_) => Err(Error::PlainOnGpu),
            Maker::Fp8(code, scale) => {
                let given = options.row_amax.or(options.col_amax);
                if !matches!(scale, Scale::Current(_)) && given.is_some() {
                    let side = if options.row_amax.is_some() { Side::Row } else { Side::Column };
                    return Err(Error::NoAmax { side, format: self.format_name().to_string() });
                }
                fp8_on(gpu, x, directions, (*code, *scale), given, options.row_scale.or(options.col_scale))
            }
            Maker::Nvfp4(format) => {
                let has = |side| directions.has(side).then_some(format);
                gpu.quantize_each(x, (has(Side::Row), has(Side::Column)), options)
            }
        }
    }
}

/// Twin of `fp8::quantize` on the CPU.
fn fp8_on(
    gpu: &Gpu,
    matrix: Matrix<'_>,
    directions: Directions,
    (code, scale): (Fp8Code, Scale),
    given: Option<Slice<'_, f32>>,
    kept: Option<Slice<'_, f32>>,
) -> Result<Observed> {
    let (stream, (x, groups)) = (gpu.stream(), matrix);
    let count = groups.map_or(1, Groups::count);
    let mut found = None;
    let scaling = match scale {
        Scale::Current(rule) => {
            let amax = match given {
                Some(amax) => amax,
                None => {
                    let found = found.insert(gpu.alloc::<f32>(count)?);
                    let wanted = amax::Outputs { tensor: Some(found.slice_mut()), ..Default::default() };
                    match groups {
                        None => amax::amax(stream, x, Specials::Kernel, wanted)?,
                        Some(groups) => amax::amax_grouped(stream, x, groups, Specials::Kernel, wanted)?,
                    }
                    found.slice()
                }
            };
            kernel::Scaling::Tensor(kernel::Scale::OfAmax { amax, rule })
        }
        Scale::Delayed(scale) => {
            kernel::Scaling::Tensor(kept.map_or(kernel::Scale::Value(scale), kernel::Scale::Memory))
        }
        Scale::Block(BlockTile::Row128, rule) => kernel::Scaling::Row128(rule),
        Scale::Block(BlockTile::Square128, rule) => kernel::Scaling::Square128(rule),
        Scale::Mx(MxTile::Row32) => kernel::Scaling::Mx,
        Scale::Mx(MxTile::Square32) => kernel::Scaling::MxSquare,
    };
    let mode = kernel::Mode { format: code, scaling };
    let room = |side, wanted| directions.has(wanted).then(|| room(gpu, &mode, side, matrix)).transpose();
    let (mut row, mut col) = (room(fp8::Side::Row, Side::Row)?, room(fp8::Side::Column, Side::Column)?);
    let mut seen = match scale {
        Scale::Delayed(_) => Some(gpu.alloc::<f32>(count)?),
        Scale::Current(_) | Scale::Block(..) | Scale::Mx(_) => None,
    };
    let wanted = kernel::Outputs {
        row: row.as_mut().map(target),
        col: col.as_mut().map(target),
        amax: seen.as_mut().map(|seen| kernel::Amax::Replace(seen.slice_mut())),
    };
    match groups {
        None => kernel::quantize(stream, x, &mode, wanted)?,
        Some(groups) => kernel::quantize_grouped(stream, x, groups, &mode, wanted)?,
    }
    let mut made = blank(x);
    if let Some(seen) = seen {
        // Both directions saw the same matrix.
        if directions == Directions::Both {
            let mut copy = gpu.alloc::<f32>(count)?;
            stream.copy(seen.slice(), copy.slice_mut())?;
            made.col_amax = Some(copy.into_memory());
        }
        let place: &mut Option<Memory> =
            if directions.has(Side::Row) { &mut made.row_amax } else { &mut made.col_amax };
        *place = Some(seen.into_memory());
    }
    (made.tensor.row, made.tensor.col) = (row.map(Direction::Fp8), col.map(Direction::Fp8));
    Ok(made)
}

/// A direction with room for its bytes.
fn room(gpu: &Gpu, mode: &kernel::Mode<'_>, side: fp8::Side, (x, groups): Matrix<'_>) -> Result<Fp8Direction> {
    let shapes = mode.shapes();
    let tile = shapes.tile(side);
    let (stored, count) = match groups {
        None => (shapes.shape(side, (x.rows(), x.cols())), None),
        Some(groups) => {
            let (stored, count) = kernel::grouped_shape(mode, side, x.cols(), groups)?;
            (stored, Some(count))
        }
    };
    let (rows, cols) = tile.along_k(stored);
    let about = Fp8Description { rows, cols, code: mode.format, tile };
    let whose = match side {
        fp8::Side::Row => Side::Row,
        fp8::Side::Column => Side::Column,
    };
    let [codes, scales] = gpu.block(whose, about.block_of(count.map_or_else(|| about.scale_len(), Ok)?)?)?;
    let scales = match mode.scaling {
        kernel::Scaling::Mx | kernel::Scaling::MxSquare => Scales::E8m0(scales.into()),
        kernel::Scaling::Tensor(_) | kernel::Scaling::Row128(_) | kernel::Scaling::Square128(_) => {
            Scales::F32(scales.into())
        }
    };
    Ok(Fp8Direction { about, codes: codes.into(), scales })
}

fn target(direction: &mut Fp8Direction) -> kernel::Direction<'_> {
    let scales = match &mut direction.scales {
        Scales::F32(scales) => Scales::F32(scales.slice_mut()),
        Scales::E8m0(scales) => Scales::E8m0(scales.slice_mut()),
    };
    kernel::Direction { codes: direction.codes.slice_mut(), scales }
}
