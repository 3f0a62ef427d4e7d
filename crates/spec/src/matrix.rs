//! Whole matrices: amax, both directions, ragged shapes, and back. Read [`block`] first.
//! Source: numerics §2, §4, §8.
//!
//! The row direction quantizes the matrix as it is, with blocks along its rows. The column
//! direction quantizes the transposed matrix, computed from the same high-precision values and
//! never from the row direction's codes: `quantize(&columns(&x, transform)?, …)`.
//!
//! A quantized row of `C` elements has `ceil(C/2)` bytes of codes and `ceil(C/16)` scale bytes.
//! Where a tile reaches beyond the matrix its missing elements are zeros, and nothing of them is
//! stored: with an odd `C` the last high nibble is 0. A matrix with no rows or no columns is valid
//! and has no codes and no scales; its other dimension may be any number, and no time is spent on
//! it.

use crate::block::{self, TileRounding};
use crate::hadamard::{self, Signs};
use crate::scale::{self, Unit};
use crate::scaling::Scaling;
use crate::stochastic::Random;
use crate::tile::{Quantized as QuantizedTile, Rows};
use crate::{BLOCK, Element, Error, GlobalScale, Mode, Precision, Result, Rounding, Specials, Tile};
use crate::{area, check_len, e2m1, fast_math, zeros};
use half::bf16;

/// A row-major matrix of binary32 values.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    precision: Precision,
    data: Vec<f32>,
}

impl Matrix {
    /// A matrix over `data`, which must have `rows · cols` values; 16-bit types are converted
    /// exactly.
    pub fn new<T: Element>(rows: usize, cols: usize, data: &[T]) -> Result<Self> {
        check_len("matrix", area(rows, cols)?, data.len())?;
        Ok(Matrix { rows, cols, precision: T::PRECISION, data: data.iter().map(|x| x.to_f32()).collect() })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The type that the values came in.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The values, row by row.
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// Whether there are no elements, whatever the other dimension claims.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// One row.
    pub fn row(&self, r: usize) -> &[f32] {
        &self.data[r * self.cols..][..self.cols]
    }

    /// The transposed matrix.
    pub fn transpose(&self) -> Self {
        let column = |c| (0..self.rows).map(move |r| self.data[r * self.cols + c]);
        let data = if self.is_empty() { Vec::new() } else { (0..self.cols).flat_map(column).collect() };
        Matrix { rows: self.cols, cols: self.rows, precision: self.precision, data }
    }

    /// The tile whose first element is (`r`, `c`), zeros where it reaches beyond the matrix.
    fn tile<const H: usize>(&self, r: usize, c: usize) -> Rows<f32, H> {
        let mut tile = [[0.0; BLOCK]; H];
        for (row, values) in tile.iter_mut().zip(r..self.rows) {
            let width = BLOCK.min(self.cols - c);
            row[..width].copy_from_slice(&self.row(values)[c..][..width]);
        }
        tile
    }
}

/// What the column direction quantizes: the transposed matrix, Hadamard-transformed along its rows
/// (the columns of the original) where signs are given. The transform needs a multiple of 16 rows.
pub fn columns(x: &Matrix, signs: Option<Signs>) -> Result<Matrix> {
    match signs {
        Some(signs) => transform(&x.transpose(), signs),
        None => Ok(x.transpose()),
    }
}

/// Transforms every group of 16 along the rows, whose length must be a multiple of 16. The result
/// is a bf16 matrix.
pub fn transform(x: &Matrix, signs: Signs) -> Result<Matrix> {
    if !x.cols().is_multiple_of(BLOCK) {
        let what = "the dimension that the Hadamard transform runs along";
        return Err(Error::Multiple { what, of: BLOCK, got: x.cols() });
    }
    let groups = x.data().as_chunks::<BLOCK>().0.iter();
    let data: Vec<bf16> = groups.flat_map(|&group| hadamard::transform(group, signs)).map(bf16::from_f32).collect();
    Matrix::new(x.rows(), x.cols(), &data)
}

/// The amax of the matrix, or of each row; 0 where there are no elements. With the Hadamard
/// transform it is taken after the transform.
pub fn amax(x: &Matrix, global: GlobalScale, specials: Specials) -> Result<Vec<f32>> {
    let mut amax = zeros(global.count(x.rows), x.rows, x.cols)?;
    match global {
        GlobalScale::PerTensor => amax[0] = scale::amax(&x.data, specials),
        GlobalScale::PerRow if x.is_empty() => {}
        GlobalScale::PerRow => (0..x.rows).for_each(|r| amax[r] = scale::amax(x.row(r), specials)),
    }
    Ok(amax)
}

/// A matrix quantized in one direction.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// Number of rows.
    pub rows: usize,
    /// Number of elements of a row.
    pub cols: usize,
    /// Packed codes, `rows` × `ceil(cols/2)`.
    pub codes: Vec<u8>,
    /// Scale bytes, `rows` × `ceil(cols/16)`.
    pub scales: Vec<u8>,
    /// The stored 32-bit numbers: one, or one per row.
    pub stored: Vec<f32>,
    /// What a stored number belongs to.
    pub global: GlobalScale,
    /// What a stored number means.
    pub unit: Unit,
}

impl Quantized {
    /// A borrowed view.
    pub fn view(&self) -> View<'_> {
        View {
            rows: self.rows,
            cols: self.cols,
            codes: &self.codes,
            scales: &self.scales,
            stored: &self.stored,
            global: self.global,
            unit: self.unit,
        }
    }
}

/// A borrowed quantized matrix, its buffers checked when it is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct View<'a> {
    /// Number of rows.
    pub rows: usize,
    /// Number of elements of a row.
    pub cols: usize,
    /// Packed codes, `rows` × `ceil(cols/2)`.
    pub codes: &'a [u8],
    /// Scale bytes, `rows` × `ceil(cols/16)`.
    pub scales: &'a [u8],
    /// The stored 32-bit numbers: one, or one per row.
    pub stored: &'a [f32],
    /// What a stored number belongs to.
    pub global: GlobalScale,
    /// What a stored number means.
    pub unit: Unit,
}

impl<'a> View<'a> {
    /// Checks that every buffer has the length the shape asks for.
    pub fn check(&self) -> Result<()> {
        area(self.rows, self.cols)?;
        check_len("codes", area(self.rows, e2m1::packed_len(self.cols))?, self.codes.len())?;
        check_len("scales", area(self.rows, self.cols.div_ceil(BLOCK))?, self.scales.len())?;
        check_len("global scale", self.global.count(self.rows), self.stored.len())
    }

    /// The packed codes of a row.
    pub fn code_row(&self, r: usize) -> &'a [u8] {
        let bytes = e2m1::packed_len(self.cols);
        &self.codes[r * bytes..][..bytes]
    }

    /// The scale bytes of a row.
    pub fn scale_row(&self, r: usize) -> &'a [u8] {
        let blocks = self.cols.div_ceil(BLOCK);
        &self.scales[r * blocks..][..blocks]
    }

    /// The stored number that row `r` was scaled by.
    pub fn row_stored(&self, r: usize) -> f32 {
        match self.global {
            GlobalScale::PerTensor => self.stored[0],
            GlobalScale::PerRow => self.stored[r],
        }
    }
}

/// Quantizes a matrix along its rows, with the amax of the tensor or of each row given ([`amax`]
/// computes it).
///
/// A given amax need not be the true one; values beyond it saturate.
pub fn quantize(x: &Matrix, amax: &[f32], mode: &Mode, rounding: Rounding<Random<'_>>) -> Result<Quantized> {
    mode.check(&rounding)?;
    check_randomness(x, &rounding)?;
    match mode.tile {
        Tile::Row16 => quantize_tiles::<1>(x, amax, mode, rounding, block::quantize),
        Tile::Square16 => quantize_tiles::<16>(x, amax, mode, rounding, block::quantize),
    }
}

/// Quantizes a bf16 matrix along its rows by [`fast_math`], which has 1×16 tiles, the rule "six"
/// and rounds to nearest.
pub fn quantize_fast_math(x: &Matrix, amax: &[f32], global: GlobalScale, specials: Specials) -> Result<Quantized> {
    let mode = Mode { global, specials, ..Mode::default() };
    quantize_tiles::<1>(x, amax, &mode, Rounding::NearestEven, |tile, scaling, _| {
        fast_math::quantize(&tile[0], &scaling.global, specials)
    })
}

fn check_randomness(x: &Matrix, rounding: &Rounding<Random<'_>>) -> Result<()> {
    match rounding {
        Rounding::Stochastic(Random::Bytes(bytes)) => {
            let blocks = area(x.rows, x.cols.div_ceil(BLOCK))?;
            check_len("random bytes (16 per block)", area(blocks, BLOCK)?, bytes.len())
        }
        _ => Ok(()),
    }
}

/// Walks the tiles of a matrix, quantizes each and stores what lies inside the matrix.
fn quantize_tiles<const H: usize>(
    x: &Matrix,
    amax: &[f32],
    mode: &Mode,
    rounding: Rounding<Random<'_>>,
    quantize_tile: impl Fn(&Rows<f32, H>, &Scaling, TileRounding<'_, H>) -> QuantizedTile<H>,
) -> Result<Quantized> {
    check_len("amax", mode.global.count(x.rows), amax.len())?;
    if let Some(index) = amax.iter().position(|&a| a < 0.0) {
        return Err(Error::NegativeAmax { index, value: amax[index] });
    }
    let (bytes, blocks) = (e2m1::packed_len(x.cols), x.cols.div_ceil(BLOCK));
    let mut codes = vec![0; x.rows * bytes];
    let mut scales = vec![0; x.rows * blocks];
    let rows = if x.is_empty() { 0 } else { x.rows };
    for r in (0..rows).step_by(H) {
        let amax = if mode.global == GlobalScale::PerRow { amax[r] } else { amax[0] };
        let scaling = Scaling::new(amax, mode, x.precision);
        for b in 0..blocks {
            let random = match rounding {
                Rounding::NearestEven => None,
                Rounding::Stochastic(random) => Some(std::array::from_fn(|i| {
                    if r + i < x.rows { random.block((r + i) * blocks + b) } else { [0; BLOCK] }
                })),
            };
            let tile_rounding = random.as_ref().map_or(Rounding::NearestEven, Rounding::Stochastic);
            let tile = quantize_tile(&x.tile(r, b * BLOCK), &scaling, tile_rounding);
            for (row, tile_codes) in (r..x.rows).zip(&tile.codes) {
                scales[row * blocks + b] = tile.scale;
                let width = BLOCK.min(x.cols - b * BLOCK);
                let out = &mut codes[row * bytes + b * BLOCK / 2..];
                for (byte, pair) in out.iter_mut().zip(tile_codes[..width].chunks(2)) {
                    *byte = e2m1::pack(pair[0], *pair.get(1).unwrap_or(&0));
                }
            }
        }
    }
    let stored = amax.iter().map(|&a| mode.profile.stored(a, mode.rule.bound(), x.precision)).collect();
    let unit = mode.profile.unit(mode.rule.bound());
    Ok(Quantized { rows: x.rows, cols: x.cols, codes, scales, stored, global: mode.global, unit })
}

/// Decodes a matrix: `fl(code value · f)` with [`Unit::decode_factor`] `f`, then one rounding to
/// the output type.
///
/// A block whose scale is 0 decodes to zeros with the signs of its codes; a NaN scale decodes to
/// NaN.
///
/// ```
/// use nvfp4_spec::matrix::{self, Matrix};
/// use nvfp4_spec::{Mode, Rounding};
///
/// let x = Matrix::new(1, 4, &[6.0f32, 3.0, 0.4, -1.0])?;
/// let q = matrix::quantize(&x, &[6.0], &Mode::default(), Rounding::NearestEven)?;
/// assert_eq!(matrix::dequantize::<f32>(&q.view())?, [6.0, 3.0, 0.5, -1.0]);
/// # Ok::<(), nvfp4_spec::Error>(())
/// ```
pub fn dequantize<T: Element>(q: &View<'_>) -> Result<Vec<T>> {
    q.check()?;
    let mut out: Vec<T> = zeros(area(q.rows, q.cols)?, q.rows, q.cols)?;
    if out.is_empty() {
        return Ok(out);
    }
    for (r, row) in out.chunks_exact_mut(q.cols).enumerate() {
        let (codes, scales) = (q.code_row(r), q.scale_row(r));
        for (c, value) in row.iter_mut().enumerate() {
            let factor = q.unit.decode_factor(scales[c / BLOCK], q.row_stored(r));
            *value = T::from_f32(e2m1::decode(e2m1::code_at(codes, c)) * factor);
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stochastic::Stream;
    use crate::{Bound, ErrorPath, Metric, ScaleRule};

    fn ramp(rows: usize, cols: usize) -> Matrix {
        let data: Vec<f32> = (0..rows * cols).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
        Matrix::new(rows, cols, &data).unwrap()
    }

    fn quantize_all(x: &Matrix, mode: &Mode) -> Result<Quantized> {
        quantize(x, &amax(x, mode.global, mode.amax_specials())?, mode, Rounding::NearestEven)
    }

    #[test]
    fn odd_lengths_store_a_zero_in_the_last_nibble() {
        let q = quantize_all(&ramp(3, 19), &Mode::default()).unwrap();
        assert_eq!((q.codes.len(), q.scales.len()), (3 * 10, 3 * 2));
        assert!((0..3).all(|r| q.view().code_row(r)[9] >> 4 == 0));
        assert_eq!(dequantize::<f32>(&q.view()).unwrap().len(), 57);
    }

    #[test]
    fn a_ragged_matrix_equals_the_crop_of_its_zero_padded_one() {
        for tile in [Tile::Row16, Tile::Square16] {
            let mode = Mode { tile, ..Mode::default() };
            let (x, mut padded) = (ramp(5, 18), vec![0.0; 16 * 32]);
            for r in 0..5 {
                padded[r * 32..][..18].copy_from_slice(x.row(r));
            }
            let q = quantize_all(&x, &mode).unwrap();
            let whole = quantize_all(&Matrix::new(16, 32, &padded).unwrap(), &mode).unwrap();
            for r in 0..5 {
                assert_eq!(q.view().code_row(r), &whole.view().code_row(r)[..9]);
                assert_eq!(q.view().scale_row(r), whole.view().scale_row(r));
            }
        }
    }

    #[test]
    fn empty_matrices_are_valid() {
        for (rows, cols) in [(0, 0), (0, 33), (7, 0)] {
            for tile in [Tile::Row16, Tile::Square16] {
                let mode = Mode { tile, ..Mode::default() };
                let q = quantize_all(&ramp(rows, cols), &mode).unwrap();
                assert!(q.codes.is_empty() && q.scales.is_empty() && q.stored == [0.0]);
                assert_eq!(dequantize::<f32>(&q.view()), Ok(vec![]));
            }
            assert_eq!(columns(&ramp(rows, cols), None).unwrap().rows(), cols);
        }
    }

    #[test]
    fn a_huge_dimension_without_elements_takes_no_time_and_no_memory() {
        for (rows, cols) in [(1 << 62, 0), (0, 1 << 62), (usize::MAX, 0), (0, usize::MAX)] {
            let x = Matrix::new::<f32>(rows, cols, &[]).unwrap();
            assert_eq!((x.transpose().rows(), x.transpose().cols()), (cols, rows));
            for tile in [Tile::Row16, Tile::Square16] {
                let q = quantize_all(&x, &Mode { tile, ..Mode::default() }).unwrap();
                assert_eq!((q.rows, q.cols, q.codes.len(), q.scales.len()), (rows, cols, 0, 0));
                assert_eq!(dequantize::<f32>(&q.view()), Ok(vec![]));
            }
        }
        let endless = Matrix::new::<f32>(1 << 62, 0, &[]).unwrap();
        let error = amax(&endless, GlobalScale::PerRow, Specials::Kernel).unwrap_err();
        assert_eq!(error, Error::TooLarge { rows: 1 << 62, cols: 0 }, "an amax per row needs memory");
        assert_eq!(amax(&endless.transpose(), GlobalScale::PerRow, Specials::Kernel), Ok(vec![]));
    }

    #[test]
    fn lengths_that_do_not_fit_are_errors() {
        let message = |r: Result<Quantized>| r.unwrap_err().to_string();
        assert_eq!(Matrix::new(2, 3, &[0.0f32; 5]).unwrap_err().to_string(), "matrix: expected length 6, got 5");
        assert!(Matrix::new::<f32>(usize::MAX, 2, &[]).is_err());
        let (x, mode) = (ramp(4, 16), Mode { global: GlobalScale::PerRow, ..Mode::default() });
        assert_eq!(message(quantize(&x, &[1.0], &mode, Rounding::NearestEven)), "amax: expected length 4, got 1");
        assert_eq!(
            message(quantize(&x, &[1.0; 4], &Mode::default(), Rounding::NearestEven)),
            "amax: expected length 1, got 4"
        );
        assert_eq!(
            message(quantize(&x, &[-2.0], &Mode::default(), Rounding::NearestEven)),
            "amax: expected a magnitude, got -2 at index 0"
        );
        let random = Rounding::Stochastic(Random::Bytes(&[0; 63]));
        assert_eq!(
            message(quantize(&x, &[1.0], &Mode::default(), random)),
            "random bytes (16 per block): expected length 64, got 63"
        );
        let q = quantize_all(&x, &Mode::default()).unwrap();
        let short = View { codes: &q.codes[1..], ..q.view() };
        assert_eq!(dequantize::<f32>(&short).unwrap_err().to_string(), "codes: expected length 32, got 31");
    }

    #[test]
    fn meaningless_combinations_are_errors() {
        let x = ramp(16, 16);
        let square = Mode { tile: Tile::Square16, global: GlobalScale::PerRow, ..Mode::default() };
        assert!(matches!(quantize(&x, &[1.0; 16], &square, Rounding::NearestEven), Err(Error::Combination(_))));
        let rule = ScaleRule::FourOverSix { metric: Metric::Mae, error: ErrorPath::Strict, bound: Bound::E256 };
        let random = Rounding::Stochastic(Random::Stream(Stream::row(0, 0)));
        let mode = Mode { rule, ..Mode::default() };
        assert!(matches!(quantize(&x, &[1.0], &mode, random), Err(Error::Combination(_))));
    }

    #[test]
    fn a_given_amax_of_nan_saturates_and_decodes_to_nan() {
        for (specials, scale, code) in [(Specials::Kernel, 0x7E, 7), (Specials::Reference, 0x7F, 0)] {
            let mode = Mode { specials, ..Mode::default() };
            let x = Matrix::new(1, 16, &[1.0f32; 16]).unwrap();
            let q = quantize(&x, &[f32::NAN], &mode, Rounding::NearestEven).unwrap();
            assert_eq!((&q.scales[..], &q.codes[..]), (&[scale][..], &[code << 4 | code; 8][..]));
            assert!(dequantize::<f32>(&q.view()).unwrap().iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn a_row_slice_with_its_first_block_equals_the_slice_of_the_whole() {
        let (x, mode) = (ramp(6, 40), Mode::default());
        let at = |first_block| Rounding::Stochastic(Random::Stream(Stream { first_block, ..Stream::row(1, 2) }));
        let whole = quantize(&x, &[50.0], &mode, at(0)).unwrap();
        let slice = Matrix::new(3, 40, &x.data()[120..]).unwrap();
        let part = quantize(&slice, &[50.0], &mode, at(3 * 3)).unwrap();
        assert_eq!(part.codes, whole.codes[60..]);
    }

    #[test]
    fn stochastic_codes_are_nearest_neighbours_of_the_value() {
        let (x, mode) = (ramp(8, 48), Mode::default());
        let nearest = quantize(&x, &[50.0], &mode, Rounding::NearestEven).unwrap();
        let random = Rounding::Stochastic(Random::Stream(Stream::row(1, 2)));
        let q = quantize(&x, &[50.0], &mode, random).unwrap();
        assert_eq!(q.scales, nearest.scales, "rounding does not touch the scales");
        assert_ne!(q.codes, nearest.codes);
        for (a, b) in q.codes.iter().zip(&nearest.codes) {
            for (a, b) in e2m1::unpack(*a).into_iter().zip(e2m1::unpack(*b)) {
                assert!((a & 7).abs_diff(b & 7) <= 1);
            }
        }
    }

    #[test]
    fn square_tiles_give_transposed_codes_in_the_column_direction() {
        let (x, mode) = (ramp(32, 48), Mode { tile: Tile::Square16, ..Mode::default() });
        let row = quantize_all(&x, &mode).unwrap();
        let col = quantize_all(&columns(&x, None).unwrap(), &mode).unwrap();
        for (r, c) in (0..32).flat_map(|r| (0..48).map(move |c| (r, c))) {
            let (left, right) = (row.view(), col.view());
            assert_eq!(e2m1::code_at(left.code_row(r), c), e2m1::code_at(right.code_row(c), r));
        }
    }

    #[test]
    fn the_transform_refuses_a_ragged_row() {
        let error = transform(&Matrix::new(1, 24, &[0.0f32; 24]).unwrap(), Signs::FIXED).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the dimension that the Hadamard transform runs along: expected a multiple of 16, got 24"
        );
    }
}
