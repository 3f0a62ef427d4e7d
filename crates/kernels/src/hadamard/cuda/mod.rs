//! The transform on a GPU; `hadamard.cu` says how.

use super::check;
use crate::cuda::text::{ELEMENTS, PRECISIONS, Variants, assemble, precision};
use crate::cuda::{self, Device, Input, SliceMut, Source, Stream, Uploaded};
use crate::{Result, input};
use half::bf16;
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::{BLOCK, Precision};

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    x: u64,
    out: u64,
    rows: u64,
    cols: u64,
    stride: u64,
    signs: u32,
    padding: u32,
}

/// Transforms every group of 16 along the rows of `x`. Does not wait.
pub fn hadamard(stream: &Stream, x: &Input<'_>, signs: Signs, out: SliceMut<'_, bf16>) -> Result<()> {
    static VARIANTS: Variants<Precision> = Variants::new();
    let (rows, cols) = (x.rows(), x.cols());
    check(rows, cols, out.len())?;
    x.check(stream.device())?;
    out.check(stream.device(), "output")?;
    out.check_aligned(2, "output")?;
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let kernel = VARIANTS.get(stream.device(), x.values().precision(), source)?;
    let groups = u32::try_from((rows * (cols / BLOCK)).div_ceil(256));
    let groups = groups.map_err(|_| cuda::Error::TooManyBlocks { rows, cols })?;
    let params = Params {
        x: x.values().address(),
        out: out.address(),
        rows: rows as u64,
        cols: cols as u64,
        stride: x.stride() as u64,
        signs: signs.0.into(),
        padding: 0,
    };
    // SAFETY: `Params` is laid out as in hadamard.cu; addresses and lengths were checked.
    unsafe { kernel.launch(stream, [groups, 1, 1], 256, 0, &params) }?;
    Ok(())
}

fn source(input: Precision) -> (&'static str, &'static str, String) {
    let settings = format!("constexpr Precision INPUT = {};\n", precision(input));
    ("hadamard", "hadamard_rows", assemble(&settings, &[ELEMENTS, include_str!("hadamard.cu")]))
}

/// Texts for [`crate::sources`]: all there are.
pub(crate) fn sources() -> Vec<(String, Source)> {
    PRECISIONS.map(|p| cuda::entry(p, source)).to_vec()
}

/// The operation on memory of the host.
pub(super) fn on_host(device: Device, x: &input::Input<'_>, signs: Signs, out: &mut [bf16]) -> Result<()> {
    let stream = Stream::new(device)?;
    let (uploaded, mut target) = (Uploaded::new(&stream, x)?, device.alloc(out.len())?);
    hadamard(&stream, &uploaded.input(), signs, target.slice_mut())?;
    stream.download(target.slice(), out)?;
    Ok(())
}
