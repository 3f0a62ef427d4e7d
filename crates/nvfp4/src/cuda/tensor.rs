//! Quantized tensors in the memory of a GPU.

use super::{Gpu, Memory, Owned, Plain, Slice, SliceMut};
use crate::direction::Outline;
use crate::format::Family;
use crate::tensor::check_parts;
use crate::{Element, Error, Fp8Code, Fp8Tile, Global, GlobalScale, Layout, Result, Side, Unit};
use nvfp4_kernels::dequantize::cuda as nvfp4_kernel;
use nvfp4_kernels::fp8::cuda as fp8_kernel;
use nvfp4_spec::fp8::Scales;
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::{area, check_len, e2m1};
use std::marker::PhantomData;

/// A quantized tensor in the memory of a GPU. Twin of [`crate::QuantTensor`].
#[derive(Debug)]
pub struct QuantTensor {
    pub(crate) shape: Vec<usize>,
    pub(crate) row: Option<Direction>,
    pub(crate) col: Option<Direction>,
}

/// A matrix along whose rows products run. Twin of [`crate::Direction`]; what is not quantized stays with its owner, whose
/// [`Input`](super::Input) products take as it is.
#[derive(Debug)]
pub enum Direction {
    /// NVFP4.
    Nvfp4(Nvfp4Direction),
    /// FP8 with a scale per tensor or per 128 values, or MXFP8.
    Fp8(Fp8Direction),
}

/// A matrix in NVFP4. Twin of [`crate::Nvfp4Direction`].
#[derive(Debug)]
pub struct Nvfp4Direction {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) codes: Owned<u8>,
    pub(crate) scales: Owned<u8>,
    pub(crate) stored: Owned<f32>,
    pub(crate) global: GlobalScale,
    pub(crate) unit: Unit,
    pub(crate) rotation: Option<Signs>,
    pub(crate) layout: Layout,
}

/// A matrix in FP8. Twin of [`crate::Fp8Direction`].
#[derive(Debug)]
pub struct Fp8Direction {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) code: Fp8Code,
    pub(crate) tile: Fp8Tile,
    pub(crate) codes: Owned<u8>,
    pub(crate) scales: Scales<Owned<f32>, Owned<u8>>,
}

impl QuantTensor {
    /// The shape of the tensor that was quantized.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The row direction, if there is one.
    pub fn row(&self) -> Option<&Direction> {
        self.row.as_ref()
    }

    /// The column direction, if there is one.
    pub fn col(&self) -> Option<&Direction> {
        self.col.as_ref()
    }

    /// A direction, or an error that says which one is missing.
    pub fn direction(&self, side: Side) -> Result<&Direction> {
        let direction = match side {
            Side::Row => &self.row,
            Side::Column => &self.col,
        };
        direction.as_ref().ok_or(Error::MissingDirection(side))
    }

    /// The directions by themselves.
    pub fn into_directions(self) -> (Option<Direction>, Option<Direction>) {
        (self.row, self.col)
    }

    /// Bytes of the GPU's memory that it takes.
    pub fn byte_len(&self) -> usize {
        [&self.row, &self.col].into_iter().flatten().map(Direction::byte_len).sum()
    }

    /// A copy in the memory of the host. Waits.
    pub fn to_host(&self, gpu: &Gpu) -> Result<crate::QuantTensor> {
        let copy = |direction: &Option<Direction>| direction.as_ref().map(|d| d.to_host(gpu)).transpose();
        crate::QuantTensor::from_parts(&self.shape, copy(&self.row)?, copy(&self.col)?)
    }
}

impl crate::QuantTensor {
    /// A copy in the memory of a GPU. Directions that are not quantized are refused: upload what they hold.
    pub fn to_gpu(&self, gpu: &Gpu) -> Result<QuantTensor> {
        let copy = |direction: Option<&crate::Direction>| direction.map(|d| Direction::upload(gpu, d)).transpose();
        Ok(QuantTensor { shape: self.shape.clone(), row: copy(self.row())?, col: copy(self.col())? })
    }
}

impl Direction {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        match self {
            Direction::Nvfp4(d) => d.rows,
            Direction::Fp8(d) => d.rows,
        }
    }

    /// Number of elements of a row.
    pub fn cols(&self) -> usize {
        match self {
            Direction::Nvfp4(d) => d.cols,
            Direction::Fp8(d) => d.cols,
        }
    }

    /// The formats that it can be multiplied with.
    pub fn family(&self) -> Family {
        match self {
            Direction::Nvfp4(_) => Family::Nvfp4,
            Direction::Fp8(d) => Family::of_fp8(d.tile),
        }
    }

    /// The signs of the Hadamard transform that the values went through.
    pub fn rotation(&self) -> Option<Signs> {
        match self {
            Direction::Nvfp4(d) => d.rotation,
            Direction::Fp8(_) => None,
        }
    }

    fn outline(&self) -> Outline {
        let tile = match self {
            Direction::Nvfp4(_) => None,
            Direction::Fp8(d) => Some(d.tile),
        };
        Outline { rows: self.rows(), cols: self.cols(), rotation: self.rotation(), tile }
    }

    /// Bytes that it takes.
    pub fn byte_len(&self) -> usize {
        match self {
            Direction::Nvfp4(d) => d.codes.slice().bytes() + d.scales.slice().bytes() + d.stored.slice().bytes(),
            Direction::Fp8(d) => {
                let scales = match &d.scales {
                    Scales::F32(scales) => scales.slice().bytes(),
                    Scales::E8m0(scales) => scales.slice().bytes(),
                };
                d.codes.slice().bytes() + scales
            }
        }
    }

    /// Decodes into a row-major matrix: `rows` × `cols`, or for MXFP8's column direction, which lies as the tensor does, `cols` × `rows`.
    /// Rotated values stay so.
    pub fn dequantize<T: Element + Plain>(&self, gpu: &Gpu, out: SliceMut<'_, T>) -> Result<()> {
        match self {
            Direction::Nvfp4(d) => nvfp4_kernel::dequantize(gpu.stream(), &d.view(), out)?,
            Direction::Fp8(d) => fp8_kernel::dequantize(gpu.stream(), &d.view(), out)?,
        }
        Ok(())
    }

    /// A copy in the memory of the host. Waits.
    pub fn to_host(&self, gpu: &Gpu) -> Result<crate::Direction> {
        let (bytes, numbers) =
            (|slice: Slice<'_, u8>| gpu.stream().to_host(slice), |slice: Slice<'_, f32>| gpu.stream().to_host(slice));
        Ok(match self {
            Direction::Nvfp4(d) => crate::Nvfp4Direction::from_parts(
                d.rows,
                d.cols,
                bytes(d.codes.slice())?,
                bytes(d.scales.slice())?,
                Global::from_values(d.global, numbers(d.stored.slice())?),
                d.unit,
                d.rotation,
                d.layout,
            )?
            .into(),
            Direction::Fp8(d) => {
                let scales = match &d.scales {
                    Scales::F32(scales) => Scales::F32(numbers(scales.slice())?),
                    Scales::E8m0(scales) => Scales::E8m0(bytes(scales.slice())?),
                };
                crate::Fp8Direction::from_parts(d.rows, d.cols, d.code, d.tile, bytes(d.codes.slice())?, scales)?.into()
            }
        })
    }

    fn upload(gpu: &Gpu, direction: &crate::Direction) -> Result<Self> {
        Ok(match direction {
            crate::Direction::Nvfp4(d) => Direction::Nvfp4(Nvfp4Direction {
                rows: d.rows,
                cols: d.cols,
                codes: gpu.upload(&d.codes)?,
                scales: gpu.upload(&d.scales)?,
                stored: gpu.upload(d.global.values())?,
                global: d.global.scope(),
                unit: d.unit,
                rotation: d.rotation,
                layout: d.layout,
            }),
            crate::Direction::Fp8(d) => Direction::Fp8(Fp8Direction {
                rows: d.rows,
                cols: d.cols,
                code: d.code,
                tile: d.tile,
                codes: gpu.upload(&d.codes)?,
                scales: match &d.scales {
                    Scales::F32(scales) => Scales::F32(gpu.upload(scales)?),
                    Scales::E8m0(scales) => Scales::E8m0(gpu.upload(scales)?),
                },
            }),
            crate::Direction::Plain(_) => return Err(Error::NotNvfp4 { got: direction.family() }),
        })
    }
}

impl Gpu {
    /// A copy of the host's elements.
    pub fn upload<T: Plain>(&self, values: &[T]) -> Result<Owned<T>> {
        let mut owned = self.alloc(values.len())?;
        self.stream().upload(values, owned.slice_mut())?;
        Ok(owned)
    }
}

impl Nvfp4Direction {
    /// Packed codes, `rows` × `ceil(cols/2)`.
    pub fn codes(&self) -> &Owned<u8> {
        &self.codes
    }

    /// E4M3 scale bytes in the layout of this direction.
    pub fn scales(&self) -> &Owned<u8> {
        &self.scales
    }

    /// The stored 32-bit scale: one number, or one per row.
    pub fn stored(&self) -> &Owned<f32> {
        &self.stored
    }

    /// What a stored number belongs to.
    pub fn global(&self) -> GlobalScale {
        self.global
    }

    /// What a stored number means.
    pub fn unit(&self) -> Unit {
        self.unit
    }

    /// How scales are laid out.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// As kernels take it.
    pub fn view(&self) -> nvfp4_kernel::View<'_> {
        nvfp4_kernel::View {
            rows: self.rows,
            cols: self.cols,
            codes: self.codes.slice(),
            scales: self.scales.slice(),
            layout: self.layout,
            stored: self.stored.slice(),
            global: self.global,
            unit: self.unit,
        }
    }
}

impl Fp8Direction {
    /// A byte per element: `rows` × `cols`, or with [`Fp8Tile::Column32`] `cols` × `rows`.
    pub fn codes(&self) -> &Owned<u8> {
        &self.codes
    }

    /// What code values are multiplied by, one per tile, row by row as the codes lie.
    pub fn scales(&self) -> &Scales<Owned<f32>, Owned<u8>> {
        &self.scales
    }

    /// What a code is.
    pub fn code(&self) -> Fp8Code {
        self.code
    }

    /// Which elements share a scale.
    pub fn tile(&self) -> Fp8Tile {
        self.tile
    }

    /// As kernels take it.
    pub fn view(&self) -> fp8_kernel::View<'_> {
        let (rows, cols) = self.tile.along_k((self.rows, self.cols));
        let scales = match &self.scales {
            Scales::F32(scales) => Scales::F32(scales.slice()),
            Scales::E8m0(scales) => Scales::E8m0(scales.slice()),
        };
        fp8_kernel::View { rows, cols, format: self.code, tile: self.tile, codes: self.codes.slice(), scales }
    }
}

/// Memory as elements: as many whole ones as it holds.
impl<T: Plain> From<Memory> for Owned<T> {
    fn from(memory: Memory) -> Self {
        Owned { memory, elements: PhantomData }
    }
}

impl QuantTensor {
    /// A tensor over existing directions, at least one, of the flattened shape. Twin of [`crate::QuantTensor::from_parts`], by the same
    /// check.
    pub fn from_parts(shape: &[usize], row: Option<Direction>, col: Option<Direction>) -> Result<Self> {
        check_parts(shape, row.as_ref().map(Direction::outline), col.as_ref().map(Direction::outline))?;
        Ok(QuantTensor { shape: shape.to_vec(), row, col })
    }
}

impl Direction {
    /// A direction of `rows` × `cols` over existing memory, in the format and with the settings of `like`: codes, scales, and for NVFP4 the
    /// stored 32-bit scale. Lengths are checked.
    pub fn over(like: &crate::Direction, rows: usize, cols: usize, parts: Vec<Memory>) -> Result<Self> {
        let expected = match like {
            crate::Direction::Nvfp4(_) => 3,
            crate::Direction::Fp8(_) => 2,
            crate::Direction::Plain(_) => return Err(Error::PlainOnGpu),
        };
        check_len("arrays of a direction", expected, parts.len())?;
        let mut parts = parts.into_iter();
        let mut next = |what: &'static str, len: usize| -> Result<Memory> {
            let part = parts.next().expect("as many as were counted");
            check_len(what, len, part.len())?;
            Ok(part)
        };
        Ok(match like {
            crate::Direction::Nvfp4(like) => Direction::Nvfp4(Nvfp4Direction {
                rows,
                cols,
                codes: next("codes, in bytes", area(rows, e2m1::packed_len(cols))?)?.into(),
                scales: next("scales, in bytes", like.layout.scale_len(rows, cols)?)?.into(),
                stored: next("global scale, in bytes", area(4, like.global.scope().count(rows))?)?.into(),
                global: like.global.scope(),
                unit: like.unit,
                rotation: like.rotation,
                layout: like.layout,
            }),
            crate::Direction::Fp8(like) => {
                let (down, across) = like.tile.along_k((rows, cols));
                let (codes, scales) = (area(rows, cols)?, like.tile.scale_count(down, across)?);
                Direction::Fp8(Fp8Direction {
                    rows,
                    cols,
                    code: like.code,
                    tile: like.tile,
                    codes: next("codes, in bytes", codes)?.into(),
                    scales: match like.scales {
                        Scales::F32(_) => Scales::F32(next("scales, in bytes", area(4, scales)?)?.into()),
                        Scales::E8m0(_) => Scales::E8m0(next("scales, in bytes", scales)?.into()),
                    },
                })
            }
            crate::Direction::Plain(_) => return Err(Error::PlainOnGpu),
        })
    }
}
