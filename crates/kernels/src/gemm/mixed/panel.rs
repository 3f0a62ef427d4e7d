//! Panels of a few rows of B: unpacked once, side by side, as pairs of 16-bit values, which stay in
//! cache while all rows of A pass over them.

use crate::gemm::pieces::in_pieces;
use crate::gemm::writer::Writer;
use nvfp4_spec::matrix::View;
use nvfp4_spec::{BLOCK, Element};
use rayon::prelude::*;
use std::ops::Range;

/// A block of `N` rows of B side by side: pairs of unscaled values, and scales.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct PanelStep<const N: usize> {
    pub pairs: [[u32; N]; BLOCK / 2],
    pub scales: [f32; N],
}

/// The rows of A, of which up to `R` are multiplied with a panel at a time.
pub(super) trait Tiles<const N: usize, const R: usize>: Sync {
    fn rows(&self) -> usize;
    /// Unpacks up to `N` rows of B from row `first` on; a panel of fewer is zero before.
    fn unpack(&self, b: &View<'_>, first: usize, panel: &mut [PanelStep<N>]);
    /// The sums of some rows of A with those of a panel.
    fn tile(&self, group: Range<usize>, panel: &[PanelStep<N>], out: &mut [[f32; N]; R]);
}

/// The product, panel by panel.
pub(super) fn run_panels<T: Element, const N: usize, const R: usize>(
    rows: &impl Tiles<N, R>,
    weights: &View<'_>,
    writer: &Writer<'_, T>,
) {
    let (blocks, columns) = (weights.cols.div_ceil(BLOCK), weights.rows);
    let empty = PanelStep { pairs: [[0; N]; BLOCK / 2], scales: [0.0; N] };
    in_pieces(columns.div_ceil(N), N * rows.rows() * weights.cols).for_each_init(
        || vec![empty; blocks],
        |panel, p| {
            let first = p * N;
            let width = N.min(columns - first);
            if width < N {
                panel.fill(empty);
            }
            rows.unpack(weights, first, panel);
            let mut tile = [[0f32; N]; R];
            for group in (0..rows.rows()).step_by(R) {
                let height = R.min(rows.rows() - group);
                rows.tile(group..group + height, panel, &mut tile);
                for (r, sums) in tile[..height].iter().enumerate() {
                    // SAFETY: a panel writes the columns of its own rows of B only.
                    unsafe { writer.write(group + r, first, &sums[..width]) };
                }
            }
        },
    );
}
