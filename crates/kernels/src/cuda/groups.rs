//! Rows of a matrix in groups, whose bounds lie in the memory of a GPU; `groups.cuh` says how.

use super::compile::Source;
use super::device::Device;
use super::error::{Error, Result};
use super::input::Input;
use super::memory::Slice;
use super::pool::{Allocator, Memory};
use super::stream::Stream;
use super::text::{Variants, assemble, entry};
use crate::input::check_len;
use nvfp4_spec::fp8::Tile;
use nvfp4_spec::{BLOCK, GlobalScale, area};

/// What kernels know of groups, to come after the rules.
pub(crate) const GROUPS: &str = include_str!("groups.cuh");

/// Where rows become columns, every group takes a multiple of so many.
pub const GROUP_ROWS: usize = 128;

/// The scales of groups that have one each are so many numbers apart: cuBLASLt reads a scale at a
/// multiple of 16 bytes.
pub const GROUP_SCALES: usize = 4;

/// Where the groups of a direction lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Along {
    /// One after the other along its rows: the row direction of a matrix in groups.
    Rows,
    /// Along K, a matrix by itself each: its column direction.
    K,
}

impl Along {
    /// How many 32-bit scales all groups of an NVFP4 direction of so many rows have.
    pub fn stored_count(self, global: GlobalScale, groups: &Groups, rows: usize) -> nvfp4_spec::Result<usize> {
        Ok(match (global, self) {
            (GlobalScale::PerTensor, _) => groups.count(),
            (GlobalScale::PerRow, Along::Rows) => rows,
            (GlobalScale::PerRow, Along::K) => area(groups.count(), rows)?,
        })
    }

    /// How many scales all groups of an FP8 direction have, of rows and K.
    pub fn scale_count(self, tile: Tile, groups: &Groups, (rows, cols): (usize, usize)) -> nvfp4_spec::Result<usize> {
        // Tiles that span rows begin anew in every group.
        Ok(match (tile, self) {
            (Tile::Tensor, _) => GROUP_SCALES * groups.count(),
            (Tile::Square128, Along::Rows) => tile.scale_count(groups.padded_rows(), cols)?,
            (Tile::Column32, _) => tile.scale_count(groups.padded_rows(), rows)?,
            (tile, _) => tile.scale_count(rows, cols)?,
        })
    }
}

/// The rows of a matrix in groups, one after the other: the tokens of each expert, or its weights.
/// Products and quantizers take all groups in one launch. Sizes may lie in the memory of the GPU,
/// where a router leaves them: nothing waits for them.
#[derive(Debug)]
pub struct Groups {
    bounds: Memory,
    count: usize,
    rows: usize,
    sizes: Option<Vec<usize>>,
}

/// `Groups` of `groups.cuh`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct GroupsParams {
    pub offsets: u64,
    pub padded: u64,
    pub count: u32,
    pub padding: u32,
}

/// A matrix, and its groups if it has several.
pub type Matrix<'a> = (&'a Input<'a>, Option<&'a Groups>);

/// Sizes that come with one call.
const GIVEN: usize = 256;

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    sizes: u64,
    offsets: u64,
    padded: u64,
    first: u32,
    count: u32,
    rows: u32,
    given: [u32; GIVEN],
}

impl Groups {
    /// Groups of sizes that are known now.
    pub fn new(stream: &Stream, sizes: &[usize], memory: &dyn Allocator) -> Result<Self> {
        let rows = sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size)).unwrap_or(usize::MAX);
        let groups = Groups::room(stream, sizes.len(), rows, Some(sizes.to_vec()), memory)?;
        for (i, part) in sizes.chunks(GIVEN).enumerate() {
            let mut given = [0; GIVEN];
            given.iter_mut().zip(part).for_each(|(to, &size)| *to = size as u32);
            groups.launch(stream, 0, (i * GIVEN, part.len()), given)?;
        }
        Ok(groups)
    }

    /// Groups of sizes that are read when the work runs: a whole number each, of 64 bits. Of a
    /// matrix of `rows` rows, they may leave out the last ones; groups that reach beyond are cut.
    pub fn in_memory(stream: &Stream, sizes: Slice<'_, u64>, rows: usize, memory: &dyn Allocator) -> Result<Self> {
        sizes.check(stream.device(), "sizes of groups")?;
        sizes.check_aligned(8, "sizes of groups")?;
        // Without rows the sizes are known after all.
        let known = (rows == 0).then(|| vec![0; sizes.len()]);
        let groups = Groups::room(stream, sizes.len(), rows, known, memory)?;
        groups.launch(stream, sizes.address(), (0, sizes.len()), [0; GIVEN])?;
        Ok(groups)
    }

    fn room(
        stream: &Stream,
        count: usize,
        rows: usize,
        sizes: Option<Vec<usize>>,
        memory: &dyn Allocator,
    ) -> Result<Self> {
        // Padded rows are counted in 31 bits too.
        let most = count.checked_mul(GROUP_ROWS).and_then(|more| more.checked_add(rows));
        if most.is_none_or(|most| most >= 1 << 31) {
            return Err(Error::TooManyBlocks { rows, cols: count });
        }
        let bounds = memory.bytes(stream, 8 * (count + 1))?;
        Ok(Groups { bounds, count, rows, sizes })
    }

    fn launch(&self, stream: &Stream, sizes: u64, (first, count): (usize, usize), given: [u32; GIVEN]) -> Result<()> {
        static VARIANTS: Variants<()> = Variants::new();
        let GroupsParams { offsets, padded, .. } = self.params();
        let (first, count) = (first as u32, count as u32);
        let params = Params { sizes, offsets, padded, first, count, rows: self.rows as u32, given };
        let kernel = VARIANTS.get(stream.device(), (), source)?;
        // SAFETY: `Params` is laid out as in groups.cu; the sizes were checked, and the bounds have
        // room for one more than there are groups, twice.
        unsafe { kernel.launch(stream, [1; 3], 32, 0, &params) }
    }

    /// How many groups there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Rows of the matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The sizes, where they are known.
    pub fn sizes(&self) -> Option<&[usize]> {
        self.sizes.as_deref()
    }

    /// Columns of the transposed matrix, in which every group is padded with zeros to a multiple of
    /// [`GROUP_ROWS`]; the most there may be, if the sizes are not known.
    pub fn padded_rows(&self) -> usize {
        match &self.sizes {
            Some(sizes) => sizes.iter().map(|size| size.next_multiple_of(GROUP_ROWS)).sum(),
            // Each group that is not empty adds at most one less than a multiple.
            None => (self.rows + (GROUP_ROWS - 1) * self.count.min(self.rows)) / GROUP_ROWS * GROUP_ROWS,
        }
    }

    /// The sizes as the GPU has them. Waits, unless they are known.
    pub fn read_sizes(&self, stream: &Stream) -> Result<Vec<usize>> {
        if let Some(sizes) = self.sizes() {
            return Ok(sizes.to_vec());
        }
        let bounds = stream.to_host(self.bounds.slice::<u32>().range(0..self.count + 1))?;
        Ok(bounds.windows(2).map(|pair| (pair[1] - pair[0]) as usize).collect())
    }

    /// An error unless these are groups of `rows` rows of a matrix in the memory of `device`.
    pub(crate) fn check(&self, device: Device, rows: usize) -> crate::Result<()> {
        check_len("rows of all groups", self.rows, rows)?;
        Ok(self.bounds.slice::<u32>().check(device, "groups")?)
    }

    /// An error unless `x` is in the memory of `device`, has these groups, and can be quantized in
    /// whole blocks.
    pub(crate) fn check_input(&self, device: Device, x: &Input<'_>) -> crate::Result<()> {
        x.check(device)?;
        self.check(device, x.rows())?;
        if !x.cols().is_multiple_of(BLOCK) {
            let what = "columns of a matrix in groups";
            return Err(nvfp4_spec::Error::Multiple { what, of: BLOCK, got: x.cols() }.into());
        }
        if !x.rows_aligned() {
            let why = "the rows of a matrix in groups begin at multiples of 16 bytes";
            return Err(nvfp4_spec::Error::Combination(why).into());
        }
        Ok(())
    }

    pub(crate) fn params(&self) -> GroupsParams {
        let offsets = self.bounds.address();
        GroupsParams { offsets, padded: offsets + 4 * (self.count as u64 + 1), count: self.count as u32, padding: 0 }
    }
}

fn source((): ()) -> (&'static str, &'static str, String) {
    ("groups", "groups", assemble("", &[GROUPS, include_str!("groups.cu")]))
}

/// Texts for [`crate::sources`].
pub(crate) fn sources() -> Vec<(String, Source)> {
    vec![entry((), source)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_the_same_constants() {
        assert!(GROUPS.contains(&format!("GROUP_ROWS = {GROUP_ROWS};")));
        assert!(include_str!("groups.cu").contains(&format!("GIVEN = {GIVEN};")));
    }
}
