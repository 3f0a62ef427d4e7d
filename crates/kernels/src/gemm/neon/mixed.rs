//! Products with an operand that is FP8 or plain. **Bounded**: sums in binary32, see
//! [`nvfp4_spec::gemm::bound`]. Both sides are decoded to binary32: NVFP4 a few rows at a time,
//! FP8 as a whole.

use super::ROWS;
use crate::gemm::Operand;
use crate::gemm::pieces::in_pieces;
use crate::gemm::writer::Writer;
use crate::vector::Neon;
use crate::{Implementation, Result, dequantize, fp8};
use nvfp4_spec::fp8::Scales;
use nvfp4_spec::gemm::Product;
use nvfp4_spec::matrix::{Matrix, View};
use nvfp4_spec::scale::Unit;
use nvfp4_spec::{Element, GlobalScale, fp8 as spec};
use rayon::prelude::*;
use std::arch::aarch64::*;

/// Rows of B that are decoded at a time.
const COLUMNS: usize = 4;

/// The product of operands whose shapes were checked and which have elements.
pub(super) fn gemm<T: Element>(
    token: Neon,
    a: &Operand<'_>,
    b: &Operand<'_>,
    product: &Product<'_, T>,
    out: &mut [T],
) -> Result<()> {
    let gathered = [a.gathered(), b.gathered()];
    let operands = (a.to_spec(gathered[0].as_ref()), b.to_spec(gathered[1].as_ref()));
    let writer = Writer::new(operands, product, out);
    let (m, n, k) = (a.rows(), b.rows(), a.shape().1);
    let (left, right) = (Values::new(token, a, gathered[0].as_ref())?, Values::new(token, b, gathered[1].as_ref())?);
    let rows = left.all(m, k)?;
    in_pieces(n.div_ceil(COLUMNS), COLUMNS * m * k).try_for_each_init(Vec::new, |buffer, piece| {
        let first = piece * COLUMNS;
        let width = COLUMNS.min(n - first);
        let columns = right.rows(first, width, k, buffer)?;
        for group in (0..m).step_by(ROWS) {
            let height = ROWS.min(m - group);
            // A short group repeats its last row; those sums are ignored.
            let some: [&[f32]; ROWS] = std::array::from_fn(|r| &rows[(group + r.min(height - 1)) * k..][..k]);
            let four: [&[f32]; COLUMNS] = std::array::from_fn(|c| &columns[c.min(width - 1) * k..][..k]);
            // SAFETY: a Neon token is only made after detection.
            let sums = unsafe { dots(token, some, four) };
            for (r, sums) in sums[..height].iter().enumerate() {
                // SAFETY: a piece writes the columns of its own rows of B only.
                unsafe { writer.write(group + r, first, &sums[..width]) };
            }
        }
        Ok(())
    })
}

/// An operand's values without its global scale.
enum Values<'a> {
    Borrowed(&'a [f32]),
    Decoded(Vec<f32>),
    Nvfp4(Neon, View<'a>),
}

impl<'a> Values<'a> {
    fn new(token: Neon, operand: &Operand<'a>, gathered: Option<&'a Matrix>) -> Result<Self> {
        Ok(match operand {
            Operand::Plain(_) => Values::Borrowed(gathered.expect("a plain operand was gathered").data()),
            Operand::Nvfp4(view) => Values::Nvfp4(token, *view),
            Operand::Fp8(view) => {
                let one = [1.0];
                let plain = match view.tensor_scale() {
                    Some(_) => spec::View { scales: Scales::F32(&one[..]), ..*view },
                    None => *view,
                };
                let mut values = vec![0.0; view.rows * view.cols];
                fp8::dequantize::dequantize(Implementation::Neon(token), &plain, &mut values)?;
                match view.tile {
                    spec::Tile::Column32 => {
                        Values::Decoded(Matrix::new(view.rows, view.cols, &values)?.transpose().data().to_vec())
                    }
                    _ => Values::Decoded(values),
                }
            }
        })
    }

    /// Some rows of `k` elements.
    fn rows<'b>(&'b self, first: usize, count: usize, k: usize, buffer: &'b mut Vec<f32>) -> Result<&'b [f32]> {
        Ok(match self {
            Values::Borrowed(values) => &values[first * k..][..count * k],
            Values::Decoded(values) => &values[first * k..][..count * k],
            Values::Nvfp4(token, view) => {
                buffer.resize(count * k, 0.0);
                let (bytes, blocks) = (view.code_row(0).len(), view.scale_row(0).len());
                let some = View {
                    rows: count,
                    codes: &view.codes[first * bytes..][..count * bytes],
                    scales: &view.scales[first * blocks..][..count * blocks],
                    stored: &[1.0],
                    global: GlobalScale::PerTensor,
                    unit: Unit::Multiplier,
                    ..*view
                };
                dequantize::dequantize(Implementation::Neon(*token), &some, buffer)?;
                buffer
            }
        })
    }

    fn all(&self, rows: usize, k: usize) -> Result<Vec<f32>> {
        let mut buffer = Vec::new();
        Ok(self.rows(0, rows, k, &mut buffer)?.to_vec())
    }
}

/// The products of four rows with four others, added up in four lanes.
#[target_feature(enable = "neon")]
fn dots(_: Neon, a: [&[f32]; ROWS], b: [&[f32]; COLUMNS]) -> [[f32; COLUMNS]; ROWS] {
    let k = a[0].len();
    let (a, b) = (a.map(|row| &row[..k]), b.map(|row| &row[..k]));
    let mut sums = [[vdupq_n_f32(0.0); COLUMNS]; ROWS];
    for i in (0..k - k % 4).step_by(4) {
        let mut x = [vdupq_n_f32(0.0); ROWS];
        for r in 0..ROWS {
            // SAFETY: four elements from `i` on lie inside the row.
            x[r] = unsafe { vld1q_f32(a[r].as_ptr().add(i)) };
        }
        for c in 0..COLUMNS {
            // SAFETY: as above.
            let y = unsafe { vld1q_f32(b[c].as_ptr().add(i)) };
            for r in 0..ROWS {
                sums[r][c] = vfmaq_f32(sums[r][c], x[r], y);
            }
        }
    }
    let mut out = [[0.0; COLUMNS]; ROWS];
    for r in 0..ROWS {
        for c in 0..COLUMNS {
            let rest = (k - k % 4..k).map(|i| a[r][i] * b[c][i]).sum::<f32>();
            out[r][c] = vaddvq_f32(sums[r][c]) + rest;
        }
    }
    out
}
