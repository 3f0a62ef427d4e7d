//! Decoding FP8 on a GPU; `dequantize.cu` says how.

use crate::Result;
use crate::cuda::text::{PRECISIONS, Variants, assemble_fp8, format, precision};
use crate::cuda::{self, Buffer, Device, Plain, Slice, SliceMut, Source, Stream, countable, divisor};
use crate::input::check_len;
use half::{bf16, f16};
use nvfp4_spec::fp8::{self, Format, MX_BLOCK, Scales, Tile};
use nvfp4_spec::{BLOCK, Element, Precision, area};

/// Borrowed scales in the memory of a GPU.
pub type ScaleRef<'a> = Scales<Slice<'a, f32>, Slice<'a, u8>>;

/// A borrowed quantized matrix in the memory of a GPU. Twin of [`fp8::View`].
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// What a code is.
    pub format: Format,
    /// Which elements share a scale.
    pub tile: Tile,
    /// Codes, `rows` × `cols`.
    pub codes: Slice<'a, u8>,
    /// Scales, one per tile.
    pub scales: ScaleRef<'a>,
}

impl View<'_> {
    /// An error unless there are codes for every element, and so many scales.
    fn check_lengths(&self, count: usize) -> Result<()> {
        let scales = match &self.scales {
            Scales::F32(scales) => scales.len(),
            Scales::E8m0(scales) => scales.len(),
        };
        check_len("codes", area(self.rows, self.cols)?, self.codes.len())?;
        Ok(check_len("scales", count, scales)?)
    }

    /// Where its scales begin.
    pub(crate) fn scale_address(&self) -> u64 {
        match &self.scales {
            Scales::F32(scales) => scales.address(),
            Scales::E8m0(scales) => scales.address(),
        }
    }

    /// An error unless all parts have the right lengths and are memory of `device`.
    pub(crate) fn check(&self, device: Device) -> Result<()> {
        self.check_with(device, self.tile.scale_count(self.rows, self.cols)?)
    }

    /// [`View::check`] with another number of scales.
    pub(crate) fn check_with(&self, device: Device, count: usize) -> Result<()> {
        self.check_lengths(count)?;
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
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(in crate::fp8) struct Params {
    codes: u64,
    scales: u64,
    out: u64,
    rows: u64,
    cols: u64,
    divisor_magic: u32,
    divisor_shift: u32,
    aligned: u32,
    padding: u32,
}

/// Threads of a group.
pub(in crate::fp8) const THREADS: u32 = 256;
/// Units of 16 bytes that a thread decodes.
const PER_THREAD: usize = 4;

/// Decodes into a contiguous row-major matrix. Does not wait.
pub fn dequantize<T: Element + Plain>(stream: &Stream, q: &View<'_>, out: SliceMut<'_, T>) -> Result<()> {
    static VARIANTS: Variants<Variant> = Variants::new();
    let device = stream.device();
    let launch = plan::<T>(q, &out)?;
    q.check(device)?;
    out.check(device, "output")?;
    out.check_aligned(size_of::<T>(), "output")?;
    let Some(Launch { variant, params, groups }) = launch else { return Ok(()) };
    let kernel = VARIANTS.get(device, variant, Variant::source)?;
    // SAFETY: `Params` is laid out as in dequantize.cu; addresses and lengths were checked.
    unsafe { kernel.launch(stream, [groups, 1, 1], THREADS, 0, &params) }?;
    Ok(())
}

/// One run of the kernel.
pub(in crate::fp8) struct Launch {
    pub variant: Variant,
    pub params: Params,
    pub groups: u32,
}

/// The launch that a call needs, if any.
pub(in crate::fp8) fn plan<T: Element + Plain>(q: &View<'_>, out: &SliceMut<'_, T>) -> Result<Option<Launch>> {
    let (rows, cols) = (q.rows, q.cols);
    q.check_lengths(q.tile.scale_count(q.rows, q.cols)?)?;
    let (scales, kind) = match &q.scales {
        Scales::F32(scales) => (scales.address(), Kind::F32),
        Scales::E8m0(scales) => (scales.address(), Kind::E8m0),
    };
    check_len("output", area(rows, cols)?, out.len())?;
    if !countable(rows, cols) {
        return Err(cuda::Error::TooManyBlocks { rows, cols }.into());
    }
    if rows == 0 || cols == 0 {
        return Ok(None);
    }
    let aligned = cols.is_multiple_of(BLOCK)
        && q.codes.address().is_multiple_of(8)
        && out.address().is_multiple_of(16)
        && (q.tile != Tile::Column32 || scales.is_multiple_of(8));
    let (mut params_rows, mut params_cols) = (rows, cols);
    let one_row = match q.tile {
        Tile::Tensor => true,
        Tile::Row128 => cols.is_multiple_of(fp8::BLOCK),
        Tile::Row32 => cols.is_multiple_of(MX_BLOCK),
        Tile::Square128 | Tile::Column32 => false,
    };
    if aligned && one_row {
        // Contiguous rows of whole tiles are one row.
        (params_rows, params_cols) = (1, rows * cols);
    }
    let (divisor_magic, divisor_shift) = divisor(cols.div_ceil(BLOCK));
    let params = Params {
        codes: q.codes.address(),
        scales,
        out: out.address(),
        rows: params_rows as u64,
        cols: params_cols as u64,
        divisor_magic,
        divisor_shift,
        aligned: aligned.into(),
        padding: 0,
    };
    let variant = Variant { output: T::PRECISION, format: q.format, tile: q.tile, scales: kind };
    let units = rows * cols.div_ceil(BLOCK) * (BLOCK * size_of::<T>() / 16);
    let groups = units.div_ceil(THREADS as usize * PER_THREAD) as u32;
    Ok(Some(Launch { variant, params, groups }))
}

/// The settings of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::fp8) struct Variant {
    output: Precision,
    format: Format,
    tile: Tile,
    scales: Kind,
}

/// The type of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    F32,
    E8m0,
}

impl Variant {
    /// Name, function and text.
    pub fn source(self) -> (&'static str, &'static str, String) {
        let tile = match self.tile {
            Tile::Tensor => "TENSOR",
            Tile::Row128 => "ROW_128",
            Tile::Square128 => "SQUARE_128",
            Tile::Row32 => "ROW_32",
            Tile::Column32 => "COLUMN_32",
        };
        let settings = format!(
            "constexpr Precision OUTPUT = {};\nconstexpr Format FORMAT = {};\nconstexpr Tile TILE = {tile};\n\
             constexpr bool E8M0 = {};\n",
            precision(self.output),
            format(self.format),
            self.scales == Kind::E8m0,
        );
        ("fp8 dequantize", "dequantize_fp8", assemble_fp8(&settings, &[include_str!("dequantize.cu")]))
    }
}

/// Texts for [`crate::sources`]: every tile with either kind of scales. Formats and types
/// alternate.
pub(crate) fn sources() -> Vec<(String, Source)> {
    let mut all = Vec::new();
    for (i, tile) in Tile::ALL.into_iter().enumerate() {
        for (j, scales) in [Kind::F32, Kind::E8m0].into_iter().enumerate() {
            for (k, format) in Format::ALL.into_iter().enumerate() {
                let variant = Variant { output: PRECISIONS[(i + j + k) % 3], format, tile, scales };
                all.push(cuda::entry(variant, Variant::source));
            }
        }
    }
    all
}

/// An FP8 matrix that was copied to a GPU.
#[derive(Debug)]
pub(crate) struct Copied<'a> {
    of: fp8::View<'a>,
    codes: Buffer<u8>,
    scales: Scales<Buffer<f32>, Buffer<u8>>,
}

impl<'a> Copied<'a> {
    pub fn new(stream: &Stream, of: fp8::View<'a>) -> Result<Self> {
        let scales = match of.scales {
            Scales::F32(scales) => Scales::F32(stream.to_device(scales)?),
            Scales::E8m0(scales) => Scales::E8m0(stream.to_device(scales)?),
        };
        Ok(Copied { of, codes: stream.to_device(of.codes)?, scales })
    }

    pub fn view(&self) -> View<'_> {
        let fp8::View { rows, cols, format, tile, .. } = self.of;
        let scales = match &self.scales {
            Scales::F32(scales) => Scales::F32(scales.slice()),
            Scales::E8m0(scales) => Scales::E8m0(scales.slice()),
        };
        View { rows, cols, format, tile, codes: self.codes.slice(), scales }
    }
}

/// The operation on memory of the host.
pub(super) fn on_host<T: Element>(device: Device, q: &fp8::View<'_>, out: &mut [T]) -> Result<()> {
    let stream = Stream::new(device)?;
    let copied = Copied::new(&stream, *q)?;
    // Only its precision tells which of the three types `T` is.
    match T::PRECISION {
        Precision::F32 => stream.fetch::<f32, T>(out, |out| dequantize(&stream, &copied.view(), out)),
        Precision::Bf16 => stream.fetch::<bf16, T>(out, |out| dequantize(&stream, &copied.view(), out)),
        Precision::F16 => stream.fetch::<f16, T>(out, |out| dequantize(&stream, &copied.view(), out)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_have_the_size_that_the_kernel_expects() {
        assert_eq!(size_of::<Params>(), 56);
    }
}
