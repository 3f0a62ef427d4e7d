//! The first number in the memory of a GPU that is NaN or infinite; `finite.cu` says how.

use crate::Result;
use crate::cuda::text::{PRECISIONS, Variants, assemble, precision};
use crate::cuda::{self, SliceMut, Source, Stream, Values};
use crate::input::check_len;
use nvfp4_spec::Precision;

/// What [`first_not_finite`] leaves alone where every number is finite, and what the place for its answer holds at first.
pub const ALL_FINITE: u64 = u64::MAX;

/// Leaves in `found`, one value that held [`ALL_FINITE`], where the first number lies that is NaN or infinite, and which of them it is:
/// [`decode`] reads it. Does not wait.
pub fn first_not_finite(stream: &Stream, values: Values<'_>, found: SliceMut<'_, u64>) -> Result<()> {
    static VARIANTS: Variants<Precision> = Variants::new();
    check_len("place of a number that is not finite", 1, found.len())?;
    found.check(stream.device(), "place of a number that is not finite")?;
    found.check_aligned(8, "place of a number that is not finite")?;
    values.check(stream.device())?;
    if values.is_empty() {
        return Ok(());
    }
    let kernel = VARIANTS.get(stream.device(), values.precision(), source)?;
    let groups = values.len().div_ceil(256 * 16 / values.element_size());
    // As many threads as the device holds.
    let most = (8 * stream.device().multiprocessors()) as usize;
    let params = Params {
        x: values.address(),
        len: values.len() as u64,
        found: found.address(),
        aligned: values.address().is_multiple_of(16).into(),
        padding: 0,
    };
    // SAFETY: `Params` is laid out as in finite.cu; addresses and lengths were checked.
    unsafe { kernel.launch(stream, [groups.min(most) as u32, 1, 1], 256, 0, &params) }?;
    Ok(())
}

/// Index and value of the number that [`first_not_finite`] found.
pub fn decode(found: u64) -> Option<(usize, f32)> {
    let value = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::NAN][(found % 4) as usize];
    (found != ALL_FINITE).then_some(((found / 4) as usize, value))
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    x: u64,
    len: u64,
    found: u64,
    aligned: u32,
    padding: u32,
}

fn source(p: Precision) -> (&'static str, &'static str, String) {
    let settings = format!("constexpr Precision INPUT = {};\n", precision(p));
    ("finite", "first_not_finite", assemble(&settings, &[include_str!("finite.cu")]))
}

/// Texts for [`crate::sources`]: all there are.
pub(crate) fn sources() -> Vec<(String, Source)> {
    PRECISIONS.map(|precision| cuda::entry(precision, source)).to_vec()
}
