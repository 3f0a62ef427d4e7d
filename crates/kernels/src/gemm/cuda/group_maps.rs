//! Maps for copies in bulk of groups along K; `group_maps.cu` says how.

use super::COPIES;
use crate::Result;
use crate::cuda::text::{Variants, assemble};
use crate::cuda::{GROUPS, Groups, GroupsParams, Source, Stream, entry};
use crate::fp8::cuda::View;

const THREADS: u32 = 64;
/// Bytes of a map.
const MAP: usize = 128;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Params {
    a: [u64; 16],
    b: [u64; 16],
    values: [u64; 2],
    rows: [u64; 2],
    groups: GroupsParams,
    maps: u64,
}

const _: () = assert!(size_of::<Params>() == 320);

/// Bytes of the maps of so many groups.
pub(super) fn bytes(groups: usize) -> usize {
    2 * MAP * groups
}

/// Writes the maps of both operands' groups to scratch, given those of the whole operands.
pub(super) fn write(
    stream: &Stream,
    [a_map, b_map]: [[u64; 16]; 2],
    (a, b): (&View<'_>, &View<'_>),
    groups: &Groups,
    maps: u64,
) -> Result<()> {
    static VARIANTS: Variants<()> = Variants::new();
    let params = Params {
        a: a_map,
        b: b_map,
        values: [a.codes.address(), b.codes.address()],
        rows: [a.rows as u64, b.rows as u64],
        groups: groups.params(),
        maps,
    };
    let kernel = VARIANTS.get(stream.device(), (), source)?;
    let blocks = (2 * groups.count() as u32).div_ceil(THREADS);
    // SAFETY: `Params` is laid out as in group_maps.cu; the scratch has room for two maps per group,
    // and belongs to this stream alone.
    unsafe { kernel.launch(stream, [blocks, 1, 1], THREADS, 0, &params) }?;
    Ok(())
}

fn source((): ()) -> (&'static str, &'static str, String) {
    ("gemm_group_maps", "gemm_group_maps", assemble("", &[GROUPS, COPIES, include_str!("group_maps.cu")]))
}

pub(super) fn sources() -> Vec<(String, Source)> {
    vec![entry((), source)]
}
