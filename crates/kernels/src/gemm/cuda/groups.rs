//! Operands in groups: those of a layer of experts, whose rows lie one after the other.

use super::operand::Operand;
use crate::Result;
use crate::cuda::{Along, Device, GROUP_ROWS, GROUP_SCALES, Groups, GroupsParams};
use crate::dequantize::cuda::View;
use crate::fp8::cuda::View as Fp8View;
use crate::input::check_len;
use crate::quantize::Layout;
use nvfp4_spec::fp8::{BLOCK as WIDE, MX_BLOCK, Scales, Tile};
use nvfp4_spec::{BLOCK, Error, GlobalScale};

/// The operands of all groups, as [`quantize_grouped`](crate::quantize::cuda::quantize_grouped) or
/// [FP8's](crate::fp8::cuda::quantize_grouped) writes them.
#[derive(Clone, Copy, Debug)]
pub struct GroupedOperand<'a> {
    /// Everything as one operand, with the scales of all groups: rows and K of the whole, where K
    /// counts padded rows.
    pub operand: Operand<'a>,
    /// Where groups lie.
    pub along: Along,
    /// The groups.
    pub groups: &'a Groups,
}

/// What kernels do with one group, to come after `groups.cuh` and `output.cuh`.
pub(super) const PARTS: &str = include_str!("parts.cuh");

/// `Part` of `parts.cuh`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Part {
    groups: GroupsParams,
    rows: u64,
    along_k: u32,
    transposed: u32,
    high: u32,
    wide: u32,
    scale_bytes: u32,
    padding: u32,
}

/// What is in groups, as kernels know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Grouping {
    /// Nothing.
    Alone,
    /// The rows of A ("tokens"), with a part of B for each group.
    Tokens,
    /// K, with outputs for each group.
    K,
}

impl Grouping {
    /// The settings of kernels.
    pub fn settings(self) -> String {
        let name = match self {
            Grouping::Alone => "ALONE",
            Grouping::Tokens => "GROUPED_TOKENS",
            Grouping::K => "GROUPED_K",
        };
        format!("enum Grouping {{ ALONE, GROUPED_TOKENS, GROUPED_K }};\nconstexpr Grouping GROUPING = {name};\n")
    }
}

impl<'a> GroupedOperand<'a> {
    /// How many rows all groups have, or each if they lie along K.
    pub(super) fn rows(&self) -> usize {
        self.operand.rows()
    }

    /// `Part` of `parts.cuh`, of an FP8 operand.
    pub(super) fn part(&self, view: &Fp8View<'_>) -> Part {
        let (high, wide, scale_bytes) = match view.tile {
            Tile::Tensor => (0, 0, 0),
            Tile::Row128 => (0, 7, 4),
            Tile::Square128 => (7, 7, 4),
            Tile::Row32 => (0, 5, 1),
            Tile::Column32 => (5, 0, 1),
        };
        Part {
            groups: self.groups.params(),
            rows: view.rows as u64,
            along_k: (self.along == Along::K).into(),
            transposed: self.lies_as_rows().into(),
            high,
            wide,
            scale_bytes,
            padding: 0,
        }
    }

    /// Whether the transposed operand lies there, unpadded: MXFP8's column direction.
    pub(super) fn lies_as_rows(&self) -> bool {
        matches!(&self.operand, Operand::Fp8(view) if view.tile == Tile::Column32)
    }

    /// The size of every group, if it is one number.
    pub(super) fn each(&self) -> Option<usize> {
        let sizes = self.groups.sizes()?;
        sizes.iter().all(|size| *size == sizes[0]).then(|| sizes.first().copied().unwrap_or(0))
    }

    /// An error unless all parts have the right lengths and are memory of `device`.
    pub(super) fn check(&self, device: Device) -> Result<()> {
        let (groups, along) = (self.groups, self.along);
        let (rows, cols) = (self.operand.rows(), self.operand.cols());
        match along {
            Along::Rows => groups.check(device, rows)?,
            Along::K if self.lies_as_rows() => groups.check(device, cols)?,
            Along::K => {
                check_len("padded rows of all groups", groups.padded_rows(), cols)?;
                groups.check(device, groups.rows())?;
            }
        }
        match &self.operand {
            Operand::Plain(_) | Operand::Values(_) => {
                Err(Error::Combination("operands in groups are NVFP4 or FP8").into())
            }
            Operand::Nvfp4(view) if view.layout != Layout::Linear => {
                Err(Error::Combination("operands in groups have linear scales").into())
            }
            Operand::Nvfp4(view) => view.check_with(device, along.stored_count(view.global, groups, rows)?),
            Operand::Fp8(view) => view.check_with(device, along.scale_count(view.tile, groups, (rows, cols))?),
        }
    }

    /// The operand of each group, given their sizes.
    ///
    /// # Panics
    ///
    /// If the groups are larger than the operand.
    pub fn parts(&self, sizes: &[usize]) -> Vec<Operand<'a>> {
        let (mut first, mut padded) = (0, 0);
        let part = |(number, &size): (usize, &usize)| {
            let start = (first, padded);
            (first, padded) = (first + size, padded + size.next_multiple_of(GROUP_ROWS));
            match self.operand {
                Operand::Nvfp4(view) => part_of_nvfp4(view, self.along, number, start, size).into(),
                Operand::Fp8(view) => part_of_fp8(view, self.along, number, start, size).into(),
                Operand::Plain(_) | Operand::Values(_) => self.operand,
            }
        };
        sizes.iter().enumerate().map(part).collect()
    }
}

fn part_of_nvfp4<'a>(
    view: View<'a>,
    along: Along,
    number: usize,
    (first, padded): (usize, usize),
    size: usize,
) -> View<'a> {
    let (rows, cols, before) = match along {
        Along::Rows => (size, view.cols, first * view.cols),
        Along::K => (view.rows, size.next_multiple_of(GROUP_ROWS), view.rows * padded),
    };
    let stored = match (view.global, along) {
        (GlobalScale::PerTensor, _) => number..number + 1,
        (GlobalScale::PerRow, Along::Rows) => first..first + size,
        (GlobalScale::PerRow, Along::K) => number * rows..(number + 1) * rows,
    };
    let elements = before..before + rows * cols;
    View {
        rows,
        cols,
        codes: view.codes.range(elements.start / 2..elements.end / 2),
        scales: view.scales.range(elements.start / BLOCK..elements.end / BLOCK),
        stored: view.stored.range(stored),
        ..view
    }
}

fn part_of_fp8<'a>(
    view: Fp8View<'a>,
    along: Along,
    number: usize,
    (first, padded): (usize, usize),
    size: usize,
) -> Fp8View<'a> {
    // MXFP8's column direction lies as the matrix does.
    let (rows, cols, before) = match along {
        Along::K if view.tile != Tile::Column32 => (view.rows, size.next_multiple_of(GROUP_ROWS), view.rows * padded),
        Along::Rows | Along::K => (size, view.cols, first * view.cols),
    };
    let (down, across) = view.tile.grid(rows, cols);
    let start = match (view.tile, along) {
        (Tile::Tensor, _) => GROUP_SCALES * number,
        (Tile::Row128 | Tile::Row32, Along::Rows) => first * across,
        (Tile::Square128, Along::Rows) => padded / WIDE * across,
        (Tile::Column32, _) => padded / MX_BLOCK * across,
        (Tile::Row128, Along::K) => rows * (padded / WIDE),
        (Tile::Row32, Along::K) => rows * (padded / MX_BLOCK),
        (Tile::Square128, Along::K) => rows.div_ceil(WIDE) * (padded / WIDE),
    };
    let scales = start..start + down * across;
    Fp8View {
        rows,
        cols,
        codes: view.codes.range(before..before + rows * cols),
        scales: match view.scales {
            Scales::F32(all) => Scales::F32(all.range(scales)),
            Scales::E8m0(all) => Scales::E8m0(all.range(scales)),
        },
        ..view
    }
}
