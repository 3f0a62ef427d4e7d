//! Decoding on a GPU; `dequantize.cu` says how.

use crate::Result;
use crate::cuda::text::{ELEMENTS, PRECISIONS, Variants, assemble, precision};
use crate::cuda::{self, Buffer, Device, Plain, Slice, SliceMut, Source, Stream, countable, divisor};
use crate::input::check_len;
use crate::quantize::Layout;
use half::{bf16, f16};
use nvfp4_spec::scale::Unit;
use nvfp4_spec::{BLOCK, Element, GlobalScale, Precision, area, e2m1, matrix};

/// A borrowed quantized matrix in the memory of a GPU. Twin of [`matrix::View`].
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Number of rows.
    pub rows: usize,
    /// Number of elements of a row.
    pub cols: usize,
    /// Packed codes, `rows` × `ceil(cols/2)`.
    pub codes: Slice<'a, u8>,
    /// Scale bytes, as laid out.
    pub scales: Slice<'a, u8>,
    /// How scales are laid out.
    pub layout: Layout,
    /// The stored 32-bit numbers: one, or one per row.
    pub stored: Slice<'a, f32>,
    /// What a stored number belongs to.
    pub global: GlobalScale,
    /// What a stored number means.
    pub unit: Unit,
}

impl View<'_> {
    /// An error unless all parts have the right lengths and are memory of `device`.
    pub(crate) fn check(&self, device: Device) -> Result<()> {
        self.check_with(device, self.global.count(self.rows))
    }

    /// [`View::check`] with another number of global scales.
    pub(crate) fn check_with(&self, device: Device, count: usize) -> Result<()> {
        let View { rows, cols, codes, scales, layout, stored, .. } = *self;
        check_len("codes", area(rows, e2m1::packed_len(cols))?, codes.len())?;
        check_len("scales", layout.scale_len(rows, cols)?, scales.len())?;
        check_len("global scale", count, stored.len())?;
        codes.check(device, "codes")?;
        scales.check(device, "scales")?;
        stored.check(device, "global scale")?;
        Ok(stored.check_aligned(4, "global scale")?)
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    codes: u64,
    scales: u64,
    stored: u64,
    out: u64,
    rows: u64,
    cols: u64,
    per_row: u32,
    unit: u32,
    swizzled: u32,
    aligned: u32,
    reciprocal: f32,
    divisor_magic: u32,
    divisor_shift: u32,
    padding: u32,
}

const THREADS: usize = 256;
/// Units of 16 bytes that a thread decodes.
const PER_THREAD: usize = 4;

/// Decodes into a contiguous row-major matrix. Does not wait.
pub fn dequantize<T: Element + Plain>(stream: &Stream, q: &View<'_>, out: SliceMut<'_, T>) -> Result<()> {
    static VARIANTS: Variants<Precision> = Variants::new();
    let (rows, cols, device) = (q.rows, q.cols, stream.device());
    q.check(device)?;
    check_len("output", area(rows, cols)?, out.len())?;
    out.check(device, "output")?;
    out.check_aligned(size_of::<T>(), "output")?;
    if !countable(rows, cols) {
        return Err(cuda::Error::TooManyBlocks { rows, cols }.into());
    }
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let aligned = cols.is_multiple_of(BLOCK)
        && q.layout == Layout::Linear
        && q.codes.address().is_multiple_of(4)
        && out.address().is_multiple_of(16);
    let (mut params_rows, mut params_cols) = (rows, cols);
    if aligned && q.global == GlobalScale::PerTensor {
        // Contiguous rows are one row.
        (params_rows, params_cols) = (1, rows * cols);
    }
    let (unit, reciprocal) = match q.unit {
        Unit::Amax(bound) => (0, 1.0 / bound.six_e()),
        Unit::Multiplier => (1, 0.0),
        Unit::Divisor => (2, 0.0),
    };
    let (divisor_magic, divisor_shift) = divisor(cols.div_ceil(BLOCK));
    let params = Params {
        codes: q.codes.address(),
        scales: q.scales.address(),
        stored: q.stored.address(),
        out: out.address(),
        rows: params_rows as u64,
        cols: params_cols as u64,
        per_row: (q.global == GlobalScale::PerRow).into(),
        unit,
        swizzled: (q.layout == Layout::Swizzled).into(),
        aligned: aligned.into(),
        reciprocal,
        divisor_magic,
        divisor_shift,
        padding: 0,
    };
    let kernel = VARIANTS.get(device, T::PRECISION, source)?;
    let units = rows * cols.div_ceil(BLOCK) * (BLOCK * size_of::<T>() / 16);
    let groups = units.div_ceil(THREADS * PER_THREAD) as u32;
    // SAFETY: `Params` is laid out as in dequantize.cu; addresses and lengths were checked.
    unsafe { kernel.launch(stream, [groups, 1, 1], THREADS as u32, 0, &params) }?;
    Ok(())
}

fn source(output: Precision) -> (&'static str, &'static str, String) {
    let settings = format!("constexpr Precision OUTPUT = {};\n", precision(output));
    ("dequantize", "dequantize", assemble(&settings, &[ELEMENTS, include_str!("dequantize.cu")]))
}

/// Texts for [`crate::sources`]: all there are.
pub(crate) fn sources() -> Vec<(String, Source)> {
    PRECISIONS.map(|p| cuda::entry(p, source)).to_vec()
}

/// A quantized matrix that was copied to a GPU.
#[derive(Debug)]
pub(crate) struct Copied<'a> {
    of: matrix::View<'a>,
    codes: Buffer<u8>,
    scales: Buffer<u8>,
    stored: Buffer<f32>,
}

impl<'a> Copied<'a> {
    pub fn new(stream: &Stream, of: matrix::View<'a>) -> Result<Self> {
        let (codes, scales) = (stream.to_device(of.codes)?, stream.to_device(of.scales)?);
        Ok(Copied { of, codes, scales, stored: stream.to_device(of.stored)? })
    }

    pub fn view(&self) -> View<'_> {
        View {
            rows: self.of.rows,
            cols: self.of.cols,
            codes: self.codes.slice(),
            scales: self.scales.slice(),
            layout: Layout::Linear,
            stored: self.stored.slice(),
            global: self.of.global,
            unit: self.of.unit,
        }
    }
}

/// The operation on memory of the host.
pub(super) fn on_host<T: Element>(device: Device, q: &matrix::View<'_>, out: &mut [T]) -> Result<()> {
    let stream = Stream::new(device)?;
    let copied = Copied::new(&stream, *q)?;
    // Only its precision tells which of the three types `T` is.
    match T::PRECISION {
        Precision::F32 => stream.fetch::<f32, T>(out, |out| dequantize(&stream, &copied.view(), out)),
        Precision::Bf16 => stream.fetch::<bf16, T>(out, |out| dequantize(&stream, &copied.view(), out)),
        Precision::F16 => stream.fetch::<f16, T>(out, |out| dequantize(&stream, &copied.view(), out)),
    }
}
