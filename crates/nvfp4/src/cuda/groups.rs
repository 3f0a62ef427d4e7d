//! The tensors of experts, quantized and multiplied together.

use super::matmul::check;
use super::values::{along, operand};
use super::{
    Direction, Fp8Direction, Gpu, Groups, Input, Memory, Nvfp4Direction, Options, Plain, Product, Slice, SliceMut,
};
use crate::format::Side;
use crate::{Element, Error, Fp8Description, Fp8Tile, Nvfp4Description, Quantizer, Result};
use nvfp4_kernels::gemm::cuda::{GroupedOperand, Operand, multiply_groups};
use nvfp4_spec::check_len;
use nvfp4_spec::fp8::Scales;
use std::sync::Arc;

/// A matrix whose rows are in groups, such as the tokens of experts: each group is quantized as a tensor by itself, all of them in one
/// launch.
///
/// In the column direction, a group's rows are padded with zeros to a multiple of 128.
///
/// ```no_run
/// use half::bf16;
/// use nvfp4::cuda::{Device, Gpu, Input, Options, Product, Values};
/// use nvfp4::{Quantizer, Side};
///
/// # fn main() -> nvfp4::Result<()> {
/// let gpu = Gpu::new(Device::open(0)?)?;
/// let (n, k, quantizer, options) = (256, 512, Quantizer::default(), Options::default());
/// let x = gpu.upload(&vec![bf16::ONE; 300 * k])?;
/// let w = gpu.upload(&vec![bf16::ONE; 3 * n * k])?;
/// // 300 tokens for three experts, of which one has none.
/// let (tokens, weights) = (gpu.groups(&[120, 0, 180])?, gpu.groups(&[n; 3])?);
/// let x = Input::new(Values::Bf16(x.slice()), 300, k)?;
/// let w = Input::new(Values::Bf16(w.slice()), 3 * n, k)?;
/// let x = gpu.quantize_groups(&quantizer, &x, &tokens, &options)?.tensor;
/// let w = gpu.quantize_groups(&quantizer, &w, &weights, &options)?.tensor;
/// let mut y = gpu.alloc::<bf16>(300 * n)?;
/// gpu.matmul_groups((&x, Side::Row), (&w, Side::Row), &Product::default(), y.slice_mut())
/// # }
/// ```
#[derive(Debug)]
pub struct GroupedTensor {
    groups: Arc<Groups>,
    cols: usize,
    // Of all groups, with as many scales.
    row: Option<Direction>,
    col: Option<Direction>,
}

/// Quantized groups, and what delayed scaling is to remember of them. Twin of [`Observed`](super::Observed).
#[derive(Debug)]
pub struct GroupedObserved {
    /// The groups.
    pub tensor: GroupedTensor,
    /// The largest magnitude of each group that the row direction was made from, if its scale comes from earlier steps.
    pub row_amax: Option<Memory>,
    /// That of the column direction.
    pub col_amax: Option<Memory>,
}

/// A copy of one group's directions.
#[derive(Debug, Default)]
pub struct GroupOnHost {
    /// The row direction.
    pub row: Option<crate::Direction>,
    /// The column direction, padded.
    pub col: Option<crate::Direction>,
}

impl GroupedTensor {
    /// The groups of its rows.
    pub fn groups(&self) -> &Arc<Groups> {
        &self.groups
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Copies of every group's directions in the memory of the host. Waits.
    pub fn to_host(&self, gpu: &Gpu) -> Result<Vec<GroupOnHost>> {
        let sizes = self.groups.read_sizes(gpu.stream()).map_err(nvfp4_kernels::Error::from)?;
        let mut all: Vec<GroupOnHost> = sizes.iter().map(|_| GroupOnHost::default()).collect();
        for side in [Side::Row, Side::Column] {
            let Ok(whole) = self.direction(side) else { continue };
            for (part, group) in self.operand(side)?.parts(&sizes).into_iter().zip(&mut all) {
                let direction = Some(download(gpu, whole, part)?);
                match side {
                    Side::Row => group.row = direction,
                    Side::Column => group.col = direction,
                }
            }
        }
        Ok(all)
    }

    fn direction(&self, side: Side) -> Result<&Direction> {
        let direction = match side {
            Side::Row => &self.row,
            Side::Column => &self.col,
        };
        direction.as_ref().ok_or(Error::MissingDirection(side))
    }

    fn operand(&self, side: Side) -> Result<GroupedOperand<'_>> {
        Ok(GroupedOperand { operand: operand(self.direction(side)?), along: along(side), groups: &self.groups })
    }

    /// One direction of groups over the block that [`Gpu::quantize_groups`] made of it, in the format and with the settings of `like`. The
    /// length is checked.
    pub fn over_block(
        like: &crate::Direction,
        side: Side,
        groups: &Arc<Groups>,
        cols: usize,
        block: Memory,
    ) -> Result<Self> {
        let shape = |padded: bool| match side {
            Side::Row => (groups.rows(), cols),
            Side::Column if padded => (cols, groups.padded_rows()),
            Side::Column => (cols, groups.rows()),
        };
        let whole = |len| check_len("block of a direction of groups", len, block.len());
        let direction = match like {
            crate::Direction::Nvfp4(like) => {
                let (rows, cols) = shape(true);
                let about = Nvfp4Description { rows, cols, ..like.about };
                let arrays = about.block_of(along(side).stored_count(about.global, groups, rows)?)?;
                whole(arrays.len)?;
                let [codes, scales, stored] = block.parts(arrays.arrays);
                let (codes, scales, stored) = (codes.into(), scales.into(), stored.into());
                Direction::Nvfp4(Nvfp4Direction { about, codes, scales, stored })
            }
            crate::Direction::Fp8(like) => {
                let (rows, cols) = shape(like.about.tile != Fp8Tile::Column32);
                let about = Fp8Description { rows, cols, ..like.about };
                let arrays = about.block_of(along(side).scale_count(about.tile, groups, (rows, cols))?)?;
                whole(arrays.len)?;
                let [codes, scales] = block.parts(arrays.arrays);
                let scales = match like.scales {
                    Scales::F32(_) => Scales::F32(scales.into()),
                    Scales::E8m0(_) => Scales::E8m0(scales.into()),
                };
                Direction::Fp8(Fp8Direction { about, codes: codes.into(), scales })
            }
            crate::Direction::Plain(_) => return Err(Error::PlainOnGpu),
        };
        let (row, col) = match side {
            Side::Row => (Some(direction), None),
            Side::Column => (None, Some(direction)),
        };
        Ok(GroupedTensor { groups: groups.clone(), cols, row, col })
    }
}

impl Gpu {
    /// Groups of sizes that are known now.
    pub fn groups(&self, sizes: &[usize]) -> Result<Arc<Groups>> {
        Ok(Arc::new(Groups::new(self.stream(), sizes, &*self.memory).map_err(nvfp4_kernels::Error::from)?))
    }

    /// Groups of a matrix of `rows` rows, of sizes that lie in the GPU's memory: whole numbers of 64 bits, read when the work runs. Nothing
    /// waits for them. Rows after the last group belong to none; groups that reach beyond the matrix are cut.
    pub fn groups_in_memory(&self, sizes: Slice<'_, u64>, rows: usize) -> Result<Arc<Groups>> {
        let groups =
            Groups::in_memory(self.stream(), sizes, rows, &*self.memory).map_err(nvfp4_kernels::Error::from)?;
        Ok(Arc::new(groups))
    }

    /// Quantizes each group of a matrix as [`Gpu::quantize`] quantizes a matrix, all in one launch.
    ///
    /// What `options` has one of for a tensor, it has one of per group here: amaxes, and scales of delayed scaling. A group draws its random
    /// numbers two offsets after the group before it. Columns are a multiple of 16, and rows begin at multiples of 16 bytes.
    pub fn quantize_groups(
        &self,
        quantizer: &Quantizer,
        x: &Input<'_>,
        groups: &Arc<Groups>,
        options: &Options<'_>,
    ) -> Result<GroupedObserved> {
        let made = quantizer.observe_matrix(self, (x, Some(&**groups)), options)?;
        let (row, col) = (made.tensor.row, made.tensor.col);
        let tensor = GroupedTensor { groups: groups.clone(), cols: x.cols(), row, col };
        Ok(GroupedObserved { tensor, row_amax: made.row_amax, col_amax: made.col_amax })
    }

    /// The products of all groups, `α·A·Bᵀ (+ bias) (+ β·C)` each. Where sizes lie in the GPU's memory, one launch multiplies them all, and
    /// nothing waits.
    ///
    /// | | `a` | `b` | result |
    /// |---|---|---|---|
    /// | y = x·wᵀ | rows of x | rows of w | as many rows as x |
    /// | dx = dy·w | rows of dy | columns of w | as many rows as dy |
    /// | dw = dyᵀ·x | columns of dy | columns of x | a matrix per group |
    ///
    /// Every group of w has the same size, which is known; for dx a multiple of 128. A bias has as many values as the weights have rows.
    pub fn matmul_groups<T: Element + Plain>(
        &self,
        (a, a_side): (&GroupedTensor, Side),
        (b, b_side): (&GroupedTensor, Side),
        product: &Product<'_, T>,
        out: SliceMut<'_, T>,
    ) -> Result<()> {
        check(a.direction(a_side)?, b.direction(b_side)?)?;
        Ok(multiply_groups(self.stream(), a.operand(a_side)?, b.operand(b_side)?, product, out, &*self.memory)?)
    }
}

/// A part of a direction in the memory of the host.
fn download(gpu: &Gpu, whole: &Direction, part: Operand<'_>) -> Result<crate::Direction> {
    let stream = gpu.stream();
    Ok(match (whole, part) {
        (Direction::Nvfp4(whole), Operand::Nvfp4(part)) => {
            let about = Nvfp4Description { rows: part.rows, cols: part.cols, ..whole.about };
            let (codes, scales) = (stream.to_host(part.codes)?, stream.to_host(part.scales)?);
            crate::Nvfp4Direction::from_parts(about, codes, scales, stream.to_host(part.stored)?)?.into()
        }
        (Direction::Fp8(whole), Operand::Fp8(part)) => {
            let (rows, cols) = part.tile.along_k((part.rows, part.cols));
            let about = Fp8Description { rows, cols, ..whole.about };
            let scales = match part.scales {
                Scales::F32(scales) => Scales::F32(stream.to_host(scales)?),
                Scales::E8m0(scales) => Scales::E8m0(stream.to_host(scales)?),
            };
            crate::Fp8Direction::from_parts(about, stream.to_host(part.codes)?, scales)?.into()
        }
        _ => return Err(Error::PlainOnGpu),
    })
}
