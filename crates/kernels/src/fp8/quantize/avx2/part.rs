//! The output of a direction: its buffers, and the parts of them that each panel writes.

use super::{Direction, ScaleMut};
use crate::scatter::Scatter;
use nvfp4_spec::fp8::{Mode, Scales, Scaling, Side, Tile};

/// A rectangle of the matrix: its first row and column, its height and width.
#[derive(Clone, Copy)]
pub(super) struct Area {
    pub row: usize,
    pub col: usize,
    pub height: usize,
    pub width: usize,
}

/// The output of a panel or a chunk of it: rows of codes and scales, and their strides.
pub(super) struct Part<'a> {
    pub codes: &'a mut [u8],
    pub code_stride: usize,
    pub scales: ScaleMut<'a>,
    pub scale_stride: usize,
}

impl<'a> Part<'a> {
    /// From row `r` and column `c` on, where a tile starts.
    pub fn at(&mut self, (r, c): (usize, usize), tile: Tile) -> Part<'_> {
        let (height, width) = tile.size(1, 1);
        let first = r / height * self.scale_stride + c / width;
        let scales = match &mut self.scales {
            Scales::F32([]) => Scales::F32(&mut [][..]),
            Scales::F32(scales) => Scales::F32(&mut scales[first..]),
            Scales::E8m0(scales) => Scales::E8m0(&mut scales[first..]),
        };
        Part { codes: &mut self.codes[r * self.code_stride + c..], scales, ..*self }
    }

    /// A direction that is not transposed, in parts of `height` rows. The single scale of a tensor
    /// is in none of them.
    pub fn split(direction: Direction<'a>, mode: &Mode, side: Side, cols: usize, height: usize) -> Vec<Self> {
        let (tile_height, _) = mode.tile(side).size(1, 1);
        let (_, scale_stride) = mode.tile(side).grid(1, cols);
        let len = scale_stride * height / tile_height;
        let codes = direction.codes.chunks_mut(height * cols);
        let scales: Vec<ScaleMut<'a>> = match direction.scales {
            Scales::F32(_) if is_tensor(mode) => (0..codes.len()).map(|_| Scales::F32(&mut [][..])).collect(),
            Scales::F32(scales) => scales.chunks_mut(len).map(Scales::F32).collect(),
            Scales::E8m0(scales) => scales.chunks_mut(len).map(Scales::E8m0).collect(),
        };
        codes.zip(scales).map(|(codes, scales)| Part { codes, code_stride: cols, scales, scale_stride }).collect()
    }
}

/// Stores up to eight values from index `at` on, stopping at `end`.
pub(super) fn copy_some<S: Copy>(eight: &[S; 8], out: &mut [S], at: usize, end: usize) {
    let out = &mut out[at..end.min(at + 8)];
    match out.first_chunk_mut::<8>() {
        Some(out) => *out = *eight,
        None => out.copy_from_slice(&eight[..out.len()]),
    }
}

pub(super) fn is_tensor(mode: &Mode) -> bool {
    matches!(mode.scaling, Scaling::Tensor { .. })
}

/// A transposed column direction, which all panels write to.
pub(super) struct Transposed<'a> {
    pub codes: Scatter<'a, u8>,
    pub scales: Scatter<'a, f32>,
}

/// What a panel writes for the column direction.
pub(super) enum Columns<'a> {
    Transposed(&'a Transposed<'a>),
    AsTheyLie(Part<'a>),
}
