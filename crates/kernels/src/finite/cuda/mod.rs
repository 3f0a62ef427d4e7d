//! The first number in the memory of a GPU that is NaN or infinite; `finite.cu` says how.

use crate::Result;
use crate::cuda::text::{PRECISIONS, Variants, assemble, precision};
use crate::cuda::{self, SliceMut, Source, Stream, Values};
use crate::input::check_len;
use nvfp4_spec::Precision;

/// The result of [`first_not_finite`] if every number is finite. The caller sets it before the
/// call.
pub const ALL_FINITE: u64 = u64::MAX;

/// Writes the index and the kind of the first number that is NaN or infinite to `found`, one value
/// that held [`ALL_FINITE`] before; [`decode`] reads it. Does not wait.
pub fn first_not_finite(stream: &Stream, values: Values<'_>, found: SliceMut<'_, u64>) -> Result<()> {
    static VARIANTS: Variants<Precision> = Variants::new();
    check_len("result of the search for numbers that are not finite", 1, found.len())?;
    found.check(stream.device(), "result of the search for numbers that are not finite")?;
    found.check_aligned(8, "result of the search for numbers that are not finite")?;
    values.check(stream.device(), "input")?;
    if values.is_empty() {
        return Ok(());
    }
    let kernel = VARIANTS.get(stream.device(), values.precision(), source)?;
    let groups = values.len().div_ceil(256 * 16 / values.element_size());
    // No more threads than the device holds.
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
