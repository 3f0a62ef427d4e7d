//! Whole FP8 matrices. Read [`fp8`](crate::fp8) first. Source: numerics §14.3, §14.6.
//!
//! Codes are row-major, a byte each; scales are row-major too, one per tile. Where a tile reaches
//! beyond the matrix, only the elements that exist count.

use super::{Format, MX_BLOCK, Mode, Scaling, Side, Tile};
use crate::matrix::Matrix;
use crate::{Element, Result, Specials, area, check_len, e8m0, scale, zeros};
use std::ops::Range;

/// Scales of one of two kinds: single ones, vectors, borrowed or to be written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scales<F, E> {
    /// 32-bit multipliers, the inverses of what elements were multiplied by.
    F32(F),
    /// E8M0 bytes.
    E8m0(E),
}

/// Scales that are owned.
pub type ScaleVec = Scales<Vec<f32>, Vec<u8>>;

/// Borrowed scales.
pub type ScaleRef<'a> = Scales<&'a [f32], &'a [u8]>;

impl ScaleVec {
    /// A borrowed view.
    pub fn view(&self) -> ScaleRef<'_> {
        match self {
            Scales::F32(scales) => Scales::F32(scales),
            Scales::E8m0(scales) => Scales::E8m0(scales),
        }
    }
}

impl ScaleRef<'_> {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Scales::F32(scales) => scales.len(),
            Scales::E8m0(scales) => scales.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What the code values of tile `i` are multiplied by.
    pub fn factor(&self, i: usize) -> f32 {
        match self {
            Scales::F32(scales) => scales[i],
            Scales::E8m0(scales) => e8m0::decode(scales[i]),
        }
    }
}

/// A quantized matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// What a code is.
    pub format: Format,
    /// Which elements share a scale.
    pub tile: Tile,
    /// Codes, `rows` × `cols`.
    pub codes: Vec<u8>,
    /// Scales, one per tile.
    pub scales: ScaleVec,
}

impl Quantized {
    /// A borrowed view.
    pub fn view(&self) -> View<'_> {
        let Quantized { rows, cols, format, tile, ref codes, ref scales } = *self;
        View { rows, cols, format, tile, codes, scales: scales.view() }
    }
}

/// A borrowed quantized matrix, its buffers checked when it is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct View<'a> {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// What a code is.
    pub format: Format,
    /// Which elements share a scale.
    pub tile: Tile,
    /// Codes, `rows` × `cols`.
    pub codes: &'a [u8],
    /// Scales, one per tile.
    pub scales: ScaleRef<'a>,
}

impl<'a> View<'a> {
    /// Checks that every buffer has the length the shape asks for.
    pub fn check(&self) -> Result<()> {
        check_len("codes", area(self.rows, self.cols)?, self.codes.len())?;
        check_len("scales", self.tile.scale_count(self.rows, self.cols)?, self.scales.len())
    }

    /// The codes of a row.
    pub fn code_row(&self, r: usize) -> &'a [u8] {
        &self.codes[r * self.cols..][..self.cols]
    }

    /// The value of an element: `fl(code value · scale)`.
    pub fn value(&self, r: usize, c: usize) -> f32 {
        let tile = self.tile.index((self.rows, self.cols), (r, c));
        self.format.decode(self.code_row(r)[c]) * self.scales.factor(tile)
    }

    /// The scale of the whole matrix, if it has a single 32-bit one.
    pub fn tensor_scale(&self) -> Option<f32> {
        match (self.tile, self.scales) {
            (Tile::Tensor, Scales::F32(scales)) => scales.first().copied(),
            _ => None,
        }
    }
}

/// The tiles of a matrix in the order of their scales: which rows, which columns.
fn tiles(tile: Tile, rows: usize, cols: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let ((height, width), (down, across)) = (tile.size(rows, cols), tile.grid(rows, cols));
    // Without columns there may be any number of rows of no tiles.
    let down = if across == 0 { 0 } else { down };
    (0..down).flat_map(move |i| {
        (0..across).map(move |j| (i * height..rows.min((i + 1) * height), j * width..cols.min((j + 1) * width)))
    })
}

/// The largest magnitude of every tile; NaN is passed over. Tiles are those that `mode` has in a
/// direction; where squares share a scale, it is the largest magnitude of the tile's square.
pub fn amaxes(x: &Matrix, mode: &Mode, side: Side) -> Vec<f32> {
    amaxes_as_directed(&directed(x, mode, side), mode, side)
}

fn amaxes_as_directed(x: &Matrix, mode: &Mode, side: Side) -> Vec<f32> {
    let tiles = || tiles(mode.tile(side), x.rows(), x.cols());
    let amaxes = tiles().map(|(rows, cols)| amax(x, rows, cols));
    match mode.scaling {
        Scaling::Tensor { .. } | Scaling::Row128(_) | Scaling::Square128(_) | Scaling::Mx => amaxes.collect(),
        Scaling::MxSquare => {
            let across = x.cols().div_ceil(MX_BLOCK);
            let square =
                |rows: Range<usize>, cols: Range<usize>| rows.start / MX_BLOCK * across + cols.start / MX_BLOCK;
            let mut squares = vec![0f32; tiles().last().map_or(0, |(rows, cols)| square(rows, cols) + 1)];
            for ((rows, cols), amax) in tiles().zip(amaxes) {
                let largest = &mut squares[square(rows, cols)];
                *largest = largest.max(amax);
            }
            tiles().map(|(rows, cols)| squares[square(rows, cols)]).collect()
        }
    }
}

fn amax(x: &Matrix, rows: Range<usize>, cols: Range<usize>) -> f32 {
    let rows = if x.is_empty() { 0..0 } else { rows };
    scale::amax(rows.flat_map(|r| &x.row(r)[cols.clone()]), Specials::Kernel)
}

/// The matrix that a direction quantizes.
fn directed(x: &Matrix, mode: &Mode, side: Side) -> Matrix {
    match side {
        Side::Column if !mode.scaling.is_mx() => x.transpose(),
        Side::Row | Side::Column => x.clone(),
    }
}

/// Quantizes a matrix: an element becomes the code nearest to `fl(x · multiplier)` of its tile.
pub fn quantize(x: &Matrix, mode: &Mode, side: Side) -> Quantized {
    let x = &directed(x, mode, side);
    let tile = mode.tile(side);
    let mut codes = vec![0; x.data().len()];
    let (mut wide, mut bytes) = (Vec::new(), Vec::new());
    let amaxes = amaxes_as_directed(x, mode, side);
    for ((rows, cols), amax) in tiles(tile, x.rows(), x.cols()).zip(amaxes) {
        let scale = mode.tile_scale(amax, x.precision());
        match scale.stored {
            Scales::F32(scale) => wide.push(scale),
            Scales::E8m0(scale) => bytes.push(scale),
        }
        for r in if x.is_empty() { 0..0 } else { rows } {
            let out = &mut codes[r * x.cols()..][cols.clone()];
            for (code, &value) in out.iter_mut().zip(&x.row(r)[cols.clone()]) {
                *code = mode.format.encode(value * scale.multiplier);
            }
        }
    }
    let scales = if mode.scaling.is_mx() { Scales::E8m0(bytes) } else { Scales::F32(wide) };
    Quantized { rows: x.rows(), cols: x.cols(), format: mode.format, tile, codes, scales }
}

/// Decodes a matrix: `fl(code value · scale)`, then one rounding to the output type.
pub fn dequantize<T: Element>(q: &View<'_>) -> Result<Vec<T>> {
    q.check()?;
    let mut out: Vec<T> = zeros(area(q.rows, q.cols)?, q.rows, q.cols)?;
    if out.is_empty() {
        return Ok(out);
    }
    for (i, (rows, cols)) in tiles(q.tile, q.rows, q.cols).enumerate() {
        let factor = q.scales.factor(i);
        for r in rows {
            for (value, &code) in out[r * q.cols..][cols.clone()].iter_mut().zip(&q.code_row(r)[cols.clone()]) {
                *value = T::from_f32(q.format.decode(code) * factor);
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fp8::AmaxRule;
    use crate::fp8::scale::mx_byte as scale_of;

    fn ramp(rows: usize, cols: usize) -> Matrix {
        let data: Vec<f32> =
            (0..rows * cols).map(|i| ((i * 37 % 101) as f32 - 50.0) * 1.1f32.powi(i as i32 % 40)).collect();
        Matrix::new(rows, cols, &data).unwrap()
    }

    fn modes() -> Vec<Mode> {
        let scalings = [
            Scaling::Tensor { scale: 3.7 },
            Scaling::Row128(AmaxRule::CURRENT),
            Scaling::Row128(AmaxRule::BLOCK),
            Scaling::Square128(AmaxRule::BLOCK),
            Scaling::Mx,
            Scaling::MxSquare,
        ];
        scalings.into_iter().flat_map(|scaling| Format::ALL.map(|format| Mode { format, scaling })).collect()
    }

    #[test]
    fn shapes_and_numbers_of_scales() {
        let x = ramp(130, 70);
        let counts = |scaling: Scaling| {
            [Side::Row, Side::Column].map(|side| {
                let q = quantize(&x, &Mode { format: Format::E4m3, scaling }, side);
                (q.rows, q.cols, q.scales.view().len())
            })
        };
        assert_eq!(counts(Scaling::Tensor { scale: 1.0 }), [(130, 70, 1), (70, 130, 1)]);
        assert_eq!(counts(Scaling::Row128(AmaxRule::BLOCK)), [(130, 70, 130), (70, 130, 140)]);
        assert_eq!(counts(Scaling::Square128(AmaxRule::BLOCK)), [(130, 70, 2), (70, 130, 2)]);
        for scaling in [Scaling::Mx, Scaling::MxSquare] {
            assert_eq!(counts(scaling), [(130, 70, 130 * 3), (130, 70, 5 * 70)]);
        }
    }

    #[test]
    fn empty_matrices_are_valid_whatever_they_claim() {
        for (rows, cols) in [(0, 0), (0, 33), (7, 0), (1 << 62, 0), (0, usize::MAX)] {
            let x = Matrix::new::<f32>(rows, cols, &[]).unwrap();
            for (mode, side) in modes().into_iter().flat_map(|m| [Side::Row, Side::Column].map(|side| (m, side))) {
                let q = quantize(&x, &mode, side);
                assert_eq!((q.rows, q.cols), mode.shape(side, (rows, cols)));
                assert_eq!(q.scales.view().len(), usize::from(q.tile == Tile::Tensor));
                assert_eq!(dequantize::<f32>(&q.view()), Ok(vec![]));
            }
        }
    }

    #[test]
    fn tensors_and_squares_give_transposed_codes_in_the_column_direction() {
        let x = ramp(140, 150);
        for mode in modes() {
            if let Scaling::Tensor { .. } | Scaling::Square128(_) = mode.scaling {
                let [row, col] = [Side::Row, Side::Column].map(|side| quantize(&x, &mode, side));
                for (r, c) in (0..140).flat_map(|r| (0..150).map(move |c| (r, c))) {
                    assert_eq!(row.codes[r * 150 + c], col.codes[c * 140 + r]);
                }
            }
        }
    }

    #[test]
    fn columns_of_mxfp8_are_those_of_the_transposed_matrix_as_they_lie() {
        let x = ramp(70, 40);
        let mode = Mode { format: Format::E5m2, scaling: Scaling::Mx };
        let (col, transposed) = (quantize(&x, &mode, Side::Column), quantize(&x.transpose(), &mode, Side::Row));
        let (Scales::E8m0(scales), Scales::E8m0(transposed_scales)) = (&col.scales, &transposed.scales) else {
            panic!()
        };
        for (r, c) in (0..70).flat_map(|r| (0..40).map(move |c| (r, c))) {
            assert_eq!(col.codes[r * 40 + c], transposed.codes[c * 70 + r]);
            assert_eq!(scales[r / 32 * 40 + c], transposed_scales[c * 3 + r / 32]);
        }
    }

    fn bytes(q: &Quantized) -> &[u8] {
        match &q.scales {
            Scales::E8m0(bytes) => bytes,
            Scales::F32(_) => panic!("MXFP8 has bytes"),
        }
    }

    #[test]
    fn a_square_has_the_byte_of_its_amax_in_both_directions_and_so_the_same_codes() {
        // Squares at the edges have 6 rows or 8 columns.
        let (rows, cols) = (70, 40);
        let x = ramp(rows, cols);
        for format in Format::ALL {
            let mode = Mode { format, scaling: Scaling::MxSquare };
            let [row, col] = [Side::Row, Side::Column].map(|side| quantize(&x, &mode, side));
            for (r, c) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
                let (top, left) = (r / 32 * 32, c / 32 * 32);
                let square = (top..rows.min(top + 32)).flat_map(|r| &x.row(r)[left..cols.min(left + 32)]);
                let byte = scale_of(square.fold(0.0, |m: f32, x| m.max(x.abs())), format);
                assert_eq!((bytes(&row)[r * 2 + c / 32], bytes(&col)[r / 32 * cols + c]), (byte, byte), "({r}, {c})");
            }
            assert_eq!(row.codes, col.codes);
        }
    }

    #[test]
    fn squares_whose_rows_have_one_amax_are_blocks_of_a_row() {
        // Every row of a square is a permutation of the same 32 values.
        let data: Vec<f32> = (0..64 * 64).map(|i| ((i + i / 64) % 32) as f32 - 11.3 * (i / 2048) as f32).collect();
        let x = Matrix::new(64, 64, &data).unwrap();
        let quantized = |scaling| quantize(&x, &Mode { format: Format::E4m3, scaling }, Side::Row);
        assert_eq!(quantized(Scaling::MxSquare), quantized(Scaling::Mx));
    }

    #[test]
    fn values_that_are_no_numbers_in_a_square() {
        let mut data = vec![1.0f32; 33 * 33];
        (data[33 * 20 + 3], data[5]) = (f32::INFINITY, -f32::NAN);
        let x = Matrix::new(33, 33, &data).unwrap();
        let q = quantize(&x, &Mode { format: Format::E5m2, scaling: Scaling::MxSquare }, Side::Row);
        // An infinity takes its whole square along, and not the next ones; NaN is no magnitude.
        assert_eq!((&bytes(&q)[..2], &bytes(&q)[2 * 32..]), (&[254, 112][..], &[112, 112][..]));
        assert_eq!([33 * 20 + 3, 5, 0, 32].map(|i| q.codes[i]), [0x7B, 0x7F, 0x00, 0x78]);
    }

    #[test]
    fn values_that_are_no_numbers() {
        let mut data = vec![1.0f32; 32];
        data[3] = f32::NEG_INFINITY;
        data[5] = -f32::NAN;
        let x = Matrix::new(1, 32, &data).unwrap();
        for scaling in [Scaling::Row128(AmaxRule::BLOCK), Scaling::Square128(AmaxRule::BLOCK)] {
            let q = quantize(&x, &Mode { format: Format::E4m3, scaling }, Side::Row);
            assert_eq!((&q.codes[3..6], &q.scales), (&[0xFE, 0x38, 0x7F][..], &Scales::F32(vec![1.0])));
        }
        let q = quantize(&x, &Mode { format: Format::E5m2, scaling: Scaling::Mx }, Side::Row);
        assert_eq!((&q.codes[3..6], &q.scales), (&[0xFB, 0x00, 0x7F][..], &Scales::E8m0(vec![254])));
        assert_eq!(dequantize::<f32>(&q.view()).unwrap()[3], f32::NEG_INFINITY, "57344 · 2¹²⁷");
    }

    #[test]
    fn lengths_that_do_not_fit_are_errors() {
        let x = ramp(4, 40);
        let q = quantize(&x, &Mode { format: Format::E4m3, scaling: Scaling::Mx }, Side::Row);
        let message = |view: View<'_>| dequantize::<f32>(&view).unwrap_err().to_string();
        assert_eq!(message(View { codes: &q.codes[1..], ..q.view() }), "codes: expected length 160, got 159");
        assert_eq!(message(View { tile: Tile::Column32, ..q.view() }), "scales: expected length 40, got 8");
        assert!(message(View { rows: usize::MAX, ..q.view() }).ends_with("is too large"));
    }
}
