//! The layout of scales on a GPU; `swizzle.cu` says how.

use crate::Result;
use crate::cuda::text::{Variants, assemble};
use crate::cuda::{self, Device, Slice, SliceMut, Source, Stream};
use crate::input::check_len;
use nvfp4_spec::{area, swizzle as spec};

/// Row-major `rows` × `cols` scales to swizzled ones; the padding becomes zero. Does not wait.
pub fn swizzle(
    stream: &Stream,
    scales: Slice<'_, u8>,
    rows: usize,
    cols: usize,
    swizzled: SliceMut<'_, u8>,
) -> Result<()> {
    check_len("swizzled scales", spec::len(rows, cols)?, swizzled.len())?;
    check_len("scales", area(rows, cols)?, scales.len())?;
    run(stream, Way::ToTiles, (scales, "scales"), (swizzled, "swizzled scales"), rows, cols)
}

/// Swizzled scales back to row-major `rows` × `cols` ones. Does not wait.
pub fn unswizzle(
    stream: &Stream,
    swizzled: Slice<'_, u8>,
    rows: usize,
    cols: usize,
    scales: SliceMut<'_, u8>,
) -> Result<()> {
    check_len("swizzled scales", spec::len(rows, cols)?, swizzled.len())?;
    check_len("scales", area(rows, cols)?, scales.len())?;
    run(stream, Way::FromTiles, (swizzled, "swizzled scales"), (scales, "scales"), rows, cols)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Way {
    ToTiles,
    FromTiles,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    from: u64,
    to: u64,
    rows: u64,
    cols: u64,
}

fn run(
    stream: &Stream,
    way: Way,
    from: (Slice<'_, u8>, &'static str),
    to: (SliceMut<'_, u8>, &'static str),
    rows: usize,
    cols: usize,
) -> Result<()> {
    static VARIANTS: Variants<Way> = Variants::new();
    from.0.check(stream.device(), from.1)?;
    to.0.check(stream.device(), to.1)?;
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let kernel = VARIANTS.get(stream.device(), way, source)?;
    let fours = rows.next_multiple_of(spec::TILE_ROWS) * cols.div_ceil(spec::TILE_COLS);
    let groups = u32::try_from(fours.div_ceil(256)).map_err(|_| cuda::Error::TooManyBlocks { rows, cols })?;
    let params = Params { from: from.0.address(), to: to.0.address(), rows: rows as u64, cols: cols as u64 };
    // SAFETY: `Params` is laid out as in swizzle.cu; addresses and lengths were checked.
    unsafe { kernel.launch(stream, [groups, 1, 1], 256, 0, &params) }?;
    Ok(())
}

fn source(way: Way) -> (&'static str, &'static str, String) {
    let settings = format!("constexpr bool TO_TILES = {};\n", way == Way::ToTiles);
    ("swizzle", "swizzle_scales", assemble(&settings, &[include_str!("swizzle.cu")]))
}

/// Texts for [`crate::sources`]: all there are.
pub(crate) fn sources() -> Vec<(String, Source)> {
    [Way::ToTiles, Way::FromTiles].map(|way| cuda::entry(way, source)).to_vec()
}

/// Either operation on memory of the host.
pub(super) fn on_host(device: Device, way: Way, from: &[u8], rows: usize, cols: usize, to: &mut [u8]) -> Result<()> {
    let stream = Stream::new(device)?;
    let (source, mut target) = (stream.to_device(from)?, device.alloc(to.len())?);
    match way {
        Way::ToTiles => swizzle(&stream, source.slice(), rows, cols, target.slice_mut())?,
        Way::FromTiles => unswizzle(&stream, source.slice(), rows, cols, target.slice_mut())?,
    }
    stream.download(target.slice(), to)?;
    Ok(())
}
