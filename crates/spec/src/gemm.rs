//! Products of quantized matrices: `y = α·A·Bᵀ (+ bias) (+ β·C)`, both operands with blocks along K.
//! Source: numerics §0, §9, §9.1, §14.8.
//!
//! A product has two parts, each with two rules: how the terms of the sum are accumulated ([`Accumulate`]), and in what
//! order the global scales, α, the bias and β·C are applied ([`Epilogue`]).
//!
//! A block's term is exact: 16 products of E2M1 values are a multiple of 1/4, two E4M3 scales a multiple of 2⁻¹⁸, so the
//! term is a multiple of 2⁻²⁰ with at most 20 significant bits. A K that is no multiple of 16 ends in zeros.
//!
//! Any other pair is a sum of products of the operands' values ([`Operand`] says which those are), and has a [`bound`].

use crate::matrix::{Matrix, View};
use crate::{BLOCK, Element, Error, GlobalScale, Precision, Result, area, check_len, e2m1, e4m3, fp8, zeros};

/// How the block terms are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Accumulate {
    /// Exactly, then rounded once: independent of any order.
    #[default]
    Exact,
    /// In binary32, block after block, one rounding each (numerics §9).
    Reference,
}

/// In what order the factors are applied. Each step is one rounding in binary32.
///
/// Written for operands that store an amax. One that stores a multiplier `g` has `g` in the place of amax and 1 in the
/// place of 6E; a divisor `g` has `fl(1/g)` and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// numerics §9: `y = fl(fl(fl(amaxA·amaxB) / 36·EA·EB) · acc)`, `·α`, `+ bias`, `+ fl(β·C)`, cast.
    Folded,
    /// numerics §9.1: `g = fl(fl(1/(36·EA·EB)) · acc)`; then `fl(g · fl(amaxA·amaxB))` if a side has a single amax, or
    /// `fl(fl(g · amaxA) · amaxB)` if both are per row; then `·α`, `+ bias`, cast, and `+ β·C` in the output type.
    RowScaled,
}

impl Epilogue {
    /// The epilogue that products use: row-scaled if either operand is.
    pub fn of(a: &Operand<'_>, b: &Operand<'_>) -> Self {
        match (a.global(), b.global()) {
            (GlobalScale::PerTensor, GlobalScale::PerTensor) => Epilogue::Folded,
            _ => Epilogue::RowScaled,
        }
    }
}

/// One side of a product, with rows along K.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// A quantized matrix.
    Nvfp4(View<'a>),
    /// An FP8 or MXFP8 matrix (numerics §14.8). A scale of the whole matrix is its global scale, and its values are those of the
    /// codes; otherwise its values are those that it decodes to in binary32, and its global scale is 1.
    ///
    /// Tiles lie along K: what has tiles of 32 in a column, as MXFP8's column direction, is taken transposed.
    Fp8(fp8::View<'a>),
    /// A matrix of bf16, f16 or f32; its global scale is 1.
    Plain(&'a Matrix),
}

impl<'a> From<&View<'a>> for Operand<'a> {
    fn from(view: &View<'a>) -> Self {
        Operand::Nvfp4(*view)
    }
}

impl<'a> From<&fp8::View<'a>> for Operand<'a> {
    fn from(view: &fp8::View<'a>) -> Self {
        Operand::Fp8(*view)
    }
}

impl<'a> From<&'a Matrix> for Operand<'a> {
    fn from(matrix: &'a Matrix) -> Self {
        Operand::Plain(matrix)
    }
}

impl Operand<'_> {
    /// Number of rows: M or N.
    pub fn rows(&self) -> usize {
        match self {
            Operand::Nvfp4(view) => view.rows,
            Operand::Fp8(view) => view.tile.along_k((view.rows, view.cols)).0,
            Operand::Plain(matrix) => matrix.rows(),
        }
    }

    /// K.
    pub fn cols(&self) -> usize {
        match self {
            Operand::Nvfp4(view) => view.cols,
            Operand::Fp8(view) => view.tile.along_k((view.rows, view.cols)).1,
            Operand::Plain(matrix) => matrix.cols(),
        }
    }

    /// What its 32-bit scale belongs to.
    pub fn global(&self) -> GlobalScale {
        match self {
            Operand::Nvfp4(view) => view.global,
            Operand::Fp8(_) | Operand::Plain(_) => GlobalScale::PerTensor,
        }
    }

    /// The scale of row `i` as a fraction.
    fn fraction(&self, i: usize) -> (f32, f32) {
        match self {
            Operand::Nvfp4(view) => view.unit.fraction(view.row_stored(i)),
            Operand::Fp8(view) => (view.tensor_scale().unwrap_or(1.0), 1.0),
            Operand::Plain(_) => (1.0, 1.0),
        }
    }

    /// Element (i, k) without its global scale; exact. A NaN scale gives NaN.
    fn value(&self, i: usize, k: usize) -> f64 {
        match self {
            Operand::Nvfp4(view) => {
                let scale = e4m3::decode(view.scale_row(i)[k / BLOCK]);
                f64::from(e2m1::decode(e2m1::code_at(view.code_row(i), k)) * scale)
            }
            Operand::Fp8(view) => {
                let (r, c) = if view.tile == fp8::Tile::Column32 { (k, i) } else { (i, k) };
                f64::from(match view.tensor_scale() {
                    Some(_) => view.format.decode(view.code_row(r)[c]),
                    None => view.value(r, c),
                })
            }
            Operand::Plain(matrix) => f64::from(matrix.row(i)[k]),
        }
    }

    fn check(&self) -> Result<()> {
        match self {
            Operand::Nvfp4(view) => view.check(),
            Operand::Fp8(view) => view.check(),
            Operand::Plain(_) => Ok(()),
        }
    }
}

/// Everything about a product but its operands.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a, T> {
    /// How the terms are summed.
    pub accumulate: Accumulate,
    /// In what order the factors are applied; `None` picks [`Epilogue::of`] the operands.
    pub epilogue: Option<Epilogue>,
    /// The caller's factor α.
    pub alpha: f32,
    /// One value per output column.
    pub bias: Option<&'a [f32]>,
    /// The matrix C and its factor β. A β of 0 leaves C unread, as in BLAS.
    pub add: Option<(&'a [T], f32)>,
}

impl<T> Product<'_, T> {
    /// Checks it against the shapes of its operands, [M, K] and [N, K], and returns the number of outputs.
    pub fn check(&self, (m, k): (usize, usize), (n, other_k): (usize, usize)) -> Result<usize> {
        if k != other_k {
            return Err(Error::InnerLength { expected: k, got: other_k });
        }
        let outputs = area(m, n)?;
        if let Some(bias) = self.bias {
            check_len("bias", n, bias.len())?;
        }
        if let Some((c, _)) = self.add {
            check_len("C", outputs, c.len())?;
        }
        Ok(outputs)
    }
}

impl<T> Default for Product<'_, T> {
    fn default() -> Self {
        Product { accumulate: Accumulate::Exact, epilogue: None, alpha: 1.0, bias: None, add: None }
    }
}

/// The product of `a` [M, K] and `b` [N, K], transposed: [M, N], row-major.
///
/// A block scale that is NaN makes every output it takes part in NaN. Unless both operands are NVFP4, the sum is taken in binary64,
/// in which every product is exact, and rounded once: what faster versions are held against ([`bound`]), not a rule of bits.
pub fn gemm<'a, T: Element>(
    a: impl Into<Operand<'a>>,
    b: impl Into<Operand<'a>>,
    product: &Product<'_, T>,
) -> Result<Vec<T>> {
    let (a, b) = (&a.into(), &b.into());
    let mut out: Vec<T> = zeros(check(a, b, product)?, a.rows(), b.rows())?;
    if out.is_empty() {
        return Ok(out);
    }
    let sums = Sums::new(a, b, product.accumulate);
    for (i, row) in out.chunks_exact_mut(b.rows()).enumerate() {
        for (j, y) in row.iter_mut().enumerate() {
            let c = product.add.filter(|&(_, beta)| beta != 0.0).map(|(c, beta)| (c[i * b.rows() + j], beta));
            let bias = product.bias.map(|bias| bias[j]);
            *y = OutputScale::new(product.epilogue, (a, i), (b, j)).finish(sums.sum(i, j), product.alpha, bias, c);
        }
    }
    Ok(out)
}

/// The sums of a product before any global scale, one output at a time.
pub struct Sums<'a>(Kind<'a>);

enum Kind<'a> {
    Integers(IntegerRows, IntegerRows, Accumulate),
    Values(Operand<'a>, Operand<'a>),
}

impl<'a> Sums<'a> {
    /// Prepares the operands, which have been checked.
    pub fn new(a: &Operand<'a>, b: &Operand<'a>, accumulate: Accumulate) -> Self {
        Sums(match (a, b) {
            (Operand::Nvfp4(a), Operand::Nvfp4(b)) => {
                Kind::Integers(IntegerRows::new(a), IntegerRows::new(b), accumulate)
            }
            _ => Kind::Values(*a, *b),
        })
    }

    /// The sum of output (i, j).
    pub fn sum(&self, i: usize, j: usize) -> f32 {
        match &self.0 {
            Kind::Integers(a, b, Accumulate::Exact) => sum_exact(a.terms(i, b, j)),
            Kind::Integers(a, b, Accumulate::Reference) => sum_reference(a.terms(i, b, j)),
            // From +0, which an iterator's own sum does not start at.
            Kind::Values(a, b) => (0..a.cols()).fold(0.0, |sum, k| sum + a.value(i, k) * b.value(j, k)) as f32,
        }
    }

    /// The sum of the products' magnitudes of output (i, j), which error bounds are proportional to.
    pub fn magnitude(&self, i: usize, j: usize) -> f64 {
        match &self.0 {
            Kind::Integers(a, b, _) => {
                let (p, q) = (a.values(i), b.values(j));
                p.zip(q).map(|(x, y)| (x * y).abs()).sum()
            }
            Kind::Values(a, b) => (0..a.cols()).map(|k| (a.value(i, k) * b.value(j, k)).abs()).sum(),
        }
    }
}

/// The number of outputs, if everything fits.
pub fn check<T>(a: &Operand<'_>, b: &Operand<'_>, product: &Product<'_, T>) -> Result<usize> {
    a.check()?;
    b.check()?;
    product.check((a.rows(), a.cols()), (b.rows(), b.cols()))
}

/// How far a sum in binary32 may be from the exact one, given the sum of the products' magnitudes: `(K + 8)·2⁻²²` of it.
///
/// On a CPU: a chain of K fused or separate multiply-adds errs by at most `K·2⁻²⁴·(1 + …)` of the magnitudes per rounding, and has at
/// most two roundings per step; any order of additions is within that.
///
/// On a GPU this is assumed of tensor cores, whose additions are not documented: an instruction adds its products, which are exact, and the
/// accumulator by aligning all of them to the largest exponent and keeping at least 24 bits of each, cut off or rounded. With 16
/// products each of the 17 summands then loses less than 2⁻²³ of the largest, so K/16 instructions err by at most
/// `17/16·K·2⁻²³` of the magnitudes; fewer products per addition by at most `2·K·2⁻²³`, which is the bound.
///
/// It holds while values, products and partial sums stay in the normal range of binary32, block scales left out: plain values of
/// 2⁻¹²⁶ to 2¹²¹ are enough for NVFP4 on the other side. Beyond, sums may overflow or lose what is subnormal.
///
/// Decoding FP8 adds nothing: an [`Operand`]'s values are by definition what it decodes to, rounded once where a tile has a scale
/// that is no power of two. Values of codes (4 significant bits, 2⁻¹⁶ to 57344) are exact in bf16 and f16, and MXFP8's in bf16 while
/// they are normal numbers; where they are, a product of two is exact in binary32 and only additions round.
pub fn bound(k: usize, magnitude: f64) -> f64 {
    (k + 8) as f64 * 2f64.powi(-22) * magnitude
}

/// Where an output may lie whose sum is within the [`bound`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The exact output, in binary64: NaN if it is.
    pub exact: f64,
    /// How far from it: the bound of the sum, scaled, and the roundings after it.
    pub allowed: f64,
}

impl Interval {
    /// That of output (i, j) of type `T`; `sums` are the operands' own.
    pub fn new<T: Element>(
        (a, i): (&Operand<'_>, usize),
        (b, j): (&Operand<'_>, usize),
        product: &Product<'_, T>,
        sums: &Sums<'_>,
    ) -> Self {
        let factors = match OutputScale::new(product.epilogue, (a, i), (b, j)) {
            OutputScale::Folded(x) => [x, 1.0, 1.0],
            OutputScale::OneRow(x, y) => [x, y, 1.0],
            OutputScale::BothRows(x, y, z) => [x, y, z],
        };
        let scale = factors.into_iter().chain([product.alpha]).map(f64::from).product::<f64>();
        let (sum, magnitude) = (f64::from(sums.sum(i, j)), sums.magnitude(i, j));
        let bias = product.bias.map_or(0.0, |bias| f64::from(bias[j]));
        let add = product.add.filter(|&(_, beta)| beta != 0.0);
        let c = add.map_or(0.0, |(c, beta)| f64::from(beta) * f64::from(c[i * b.rows() + j].to_f32()));
        let before = sum * scale + bias;
        let exact = before + c;
        // Half a unit in the last place of the output's type, and of its subnormal numbers.
        let (unit, least) = match T::PRECISION {
            Precision::F32 => (2f64.powi(-24), 2f64.powi(-150)),
            Precision::Bf16 => (2f64.powi(-8), 2f64.powi(-134)),
            Precision::F16 => (2f64.powi(-11), 2f64.powi(-25)),
        };
        // What is rounded to that type: the result, and both of its parts where they are rounded before.
        let rounded = match (product.epilogue.unwrap_or_else(|| Epilogue::of(a, b)), add) {
            (Epilogue::RowScaled, Some(_)) => exact.abs() + before.abs() + c.abs(),
            _ => exact.abs(),
        };
        // The sum is rounded here, and there are at most seven roundings to binary32 after it; 1 % is for what they do to each other.
        let wide = 8.0 * 2f64.powi(-24) * ((magnitude * scale).abs() + bias.abs() + c.abs());
        let allowed = bound(a.cols(), magnitude) * scale.abs() + wide + 1.01 * unit * rounded + 3.0 * least;
        Interval { exact, allowed }
    }

    /// Whether an output lies within. Where the exact one is NaN, NaN does.
    pub fn holds(&self, output: f32) -> bool {
        if self.exact.is_nan() { output.is_nan() } else { (f64::from(output) - self.exact).abs() <= self.allowed }
    }
}

/// The units that block terms are counted in.
pub const TERM_UNIT: f32 = 1.0 / (1 << 20) as f32;

/// A matrix's codes doubled and its scales in units of 2⁻⁹, as integers; `None` is a NaN scale.
struct IntegerRows {
    blocks: usize,
    codes: Vec<[i64; BLOCK]>,
    scales: Vec<Option<i64>>,
}

impl IntegerRows {
    fn new(q: &View<'_>) -> Self {
        let blocks = q.cols.div_ceil(BLOCK);
        let codes = (0..q.rows * blocks)
            .map(|index| {
                let (row, first) = (q.code_row(index / blocks), index % blocks * BLOCK);
                std::array::from_fn(|i| match first + i < q.cols {
                    true => (2.0 * e2m1::decode(e2m1::code_at(row, first + i))) as i64,
                    false => 0,
                })
            })
            .collect();
        IntegerRows { blocks, codes, scales: q.scales.iter().map(|&s| e4m3::decode_units(s)).collect() }
    }

    /// The values of a row without the global scale; a NaN scale gives NaN.
    fn values(&self, i: usize) -> impl Iterator<Item = f64> {
        (0..self.blocks).flat_map(move |k| {
            let p = i * self.blocks + k;
            let scale = self.scales[p].map_or(f64::NAN, |s| s as f64 / 512.0);
            self.codes[p].iter().map(move |&c| c as f64 / 2.0 * scale)
        })
    }

    /// The block terms of output (i, j) in units of 2⁻²⁰, in order; each is below 2⁴⁷ in magnitude.
    fn terms(&self, i: usize, other: &Self, j: usize) -> impl Iterator<Item = Option<i64>> {
        (0..self.blocks).map(move |k| {
            let (p, q) = (i * self.blocks + k, j * self.blocks + k);
            let dot: i64 = self.codes[p].iter().zip(&other.codes[q]).map(|(x, y)| x * y).sum();
            Some(dot * self.scales[p]? * other.scales[q]?)
        })
    }
}

/// The sum rounded once to binary32.
///
/// A term is at most 16·12² · (448·512)² < 2⁴⁷ in magnitude, so 2¹⁶ of them (K = 2²⁰) fit an `i64`; longer sums are
/// carried in an `i128`.
fn sum_exact(terms: impl Iterator<Item = Option<i64>>) -> f32 {
    let (mut total, mut partial) = (0i128, 0i64);
    for (k, term) in terms.enumerate() {
        let Some(term) = term else { return f32::NAN };
        partial += term;
        if k % (1 << 16) == (1 << 16) - 1 {
            total += i128::from(partial);
            partial = 0;
        }
    }
    // An integer converts with one rounding to nearest even; the power of two is exact.
    (total + i128::from(partial)) as f32 * TERM_UNIT
}

/// `acc = +0`, then `acc = fl(acc + term)` for every block in order.
fn sum_reference(terms: impl Iterator<Item = Option<i64>>) -> f32 {
    // A term has at most 20 significant bits, so its conversion is exact.
    terms.fold(0.0, |acc, term| acc + term.map_or(f32::NAN, |t| t as f32 * TERM_UNIT))
}

/// What the sum of an output is multiplied by, in the epilogue's order. With numerators `na`, `nb` and the product of the
/// denominators `d`, which is exact for amaxes: 36·EA·EB = 7225344, 4128768 or 2359296.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OutputScale {
    /// [`Epilogue::Folded`]: by `fl(fl(na·nb) / d)`.
    Folded(f32),
    /// [`Epilogue::RowScaled`], a side with a single scale: by `fl(1/d)`, then by `fl(na·nb)`.
    OneRow(f32, f32),
    /// [`Epilogue::RowScaled`], both per row: by `fl(1/d)`, `na`, `nb`.
    BothRows(f32, f32, f32),
}

impl OutputScale {
    /// That of output (i, j); `None` picks [`Epilogue::of`] the operands.
    pub fn new(epilogue: Option<Epilogue>, (a, i): (&Operand<'_>, usize), (b, j): (&Operand<'_>, usize)) -> Self {
        let ((na, da), (nb, db)) = (a.fraction(i), b.fraction(j));
        let denominator = da * db;
        match (epilogue.unwrap_or_else(|| Epilogue::of(a, b)), a.global(), b.global()) {
            (Epilogue::Folded, ..) => OutputScale::Folded(na * nb / denominator),
            (Epilogue::RowScaled, GlobalScale::PerRow, GlobalScale::PerRow) => {
                OutputScale::BothRows(1.0 / denominator, na, nb)
            }
            (Epilogue::RowScaled, ..) => OutputScale::OneRow(1.0 / denominator, na * nb),
        }
    }

    /// The output: the scaled sum, `·α`, `+ bias`, and `β·C` as the epilogue has it.
    #[inline]
    pub fn finish<T: Element>(self, sum: f32, alpha: f32, bias: Option<f32>, c: Option<(T, f32)>) -> T {
        let scaled = match self {
            OutputScale::Folded(factor) => factor * sum,
            OutputScale::OneRow(reciprocal, factor) => reciprocal * sum * factor,
            OutputScale::BothRows(reciprocal, na, nb) => reciprocal * sum * na * nb,
        };
        let mut y = scaled * alpha;
        if let Some(bias) = bias {
            y += bias;
        }
        match (c, self) {
            (None, _) => T::from_f32(y),
            (Some((c, beta)), OutputScale::Folded(_)) => T::from_f32(y + beta * c.to_f32()),
            // In the output type: β·C is rounded to it, and so is the sum.
            (Some((c, beta)), _) => {
                let y = T::from_f32(y);
                T::from_f32(y.to_f32() + T::from_f32(beta * c.to_f32()).to_f32())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::{self, Quantized};
    use crate::{Edge, Mode, Rounding};
    use half::bf16;

    fn quantized(rows: usize, cols: usize, global: GlobalScale) -> Quantized {
        let data: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919) % 257) as f32 / 16.0 - 8.0).collect();
        let x = Matrix::new(rows, cols, &data).unwrap();
        let mode = Mode { global, ..Mode::default() };
        matrix::quantize(&x, &matrix::amax(&x, global, mode.edge).unwrap(), &mode, Rounding::NearestEven).unwrap()
    }

    #[test]
    fn equals_the_product_of_the_decoded_values_in_f64() {
        for global in [GlobalScale::PerTensor, GlobalScale::PerRow] {
            let (a, b) = (quantized(3, 50, global), quantized(5, 50, GlobalScale::PerTensor));
            let y = gemm::<f32>(&a.view(), &b.view(), &Product::default()).unwrap();
            let decode = |q: &Quantized| matrix::dequantize::<f32>(&q.view()).unwrap();
            let (da, db) = (decode(&a), decode(&b));
            for (i, j) in (0..3).flat_map(|i| (0..5).map(move |j| (i, j))) {
                let products = (0..50).map(|k| f64::from(da[i * 50 + k]) * f64::from(db[j * 50 + k]));
                let (exact, magnitude) = products.fold((0.0, 0.0), |(s, m), p| (s + p, m + p.abs()));
                // Each decoded value carries 3 roundings, the product a handful more.
                assert!((f64::from(y[i * 5 + j]) - exact).abs() <= magnitude * 12.0 * 2f64.powi(-24));
            }
        }
    }

    #[test]
    fn a_nan_scale_makes_its_outputs_nan() {
        let (mut a, b) = (quantized(2, 32, GlobalScale::PerTensor), quantized(2, 32, GlobalScale::PerTensor));
        a.scales[3] = 0x7F;
        for accumulate in [Accumulate::Exact, Accumulate::Reference] {
            let product = Product { accumulate, ..Product::default() };
            let y = gemm::<f32>(&a.view(), &b.view(), &product).unwrap();
            assert_eq!(y.map_nan(), [false, false, true, true]);
        }
    }

    trait MapNan {
        fn map_nan(&self) -> Vec<bool>;
    }
    impl MapNan for Vec<f32> {
        fn map_nan(&self) -> Vec<bool> {
            self.iter().map(|x| x.is_nan()).collect()
        }
    }

    #[test]
    fn alpha_bias_and_c_in_the_order_of_each_epilogue() {
        let (a, b) = (quantized(2, 64, GlobalScale::PerRow), quantized(3, 64, GlobalScale::PerTensor));
        let (bias, c) = ([0.5, -1.0, 2.0], [bf16::from_f32(3.25); 6]);
        let plain = gemm::<f32>(&a.view(), &b.view(), &Product::default()).unwrap();
        let add = Some((&c[..], 0.3));
        let y = gemm(&a.view(), &b.view(), &Product { alpha: 1.7, bias: Some(&bias), add, ..Product::default() });
        let expected: Vec<bf16> = (0..6)
            .map(|i| {
                let y = bf16::from_f32(plain[i] * 1.7 + bias[i % 3]);
                bf16::from_f32(y.to_f32() + bf16::from_f32(0.3 * 3.25).to_f32())
            })
            .collect();
        assert_eq!(y.unwrap(), expected);

        let folded = Product { epilogue: Some(Epilogue::Folded), ..Product::default() };
        let plain = gemm::<f32>(&a.view(), &b.view(), &folded).unwrap();
        let y = gemm(&a.view(), &b.view(), &Product { alpha: 1.7, bias: Some(&bias), add, ..folded.cast() });
        let expected: Vec<bf16> =
            (0..6).map(|i| bf16::from_f32(plain[i] * 1.7 + bias[i % 3] + 0.3f32 * 3.25)).collect();
        assert_eq!(y.unwrap(), expected);
    }

    impl Product<'_, f32> {
        /// The same choices for another output type.
        fn cast<T>(&self) -> Product<'static, T> {
            Product { accumulate: self.accumulate, epilogue: self.epilogue, ..Product::default() }
        }
    }

    /// 1 + β·C, where β·C is just above half an ulp of bf16 at 1: rounded to bf16 first, it is exactly half.
    #[test]
    fn beta_times_c_is_rounded_to_the_output_type_in_the_row_scaled_epilogue_only() {
        let (zero, half_ulp) = (quantized(1, 0, GlobalScale::PerTensor), 1.0 / 256.0);
        let add = Some((&[bf16::ONE][..], half_ulp * (1.0 + 1.0 / 512.0)));
        let product = |epilogue| Product { epilogue: Some(epilogue), bias: Some(&[1.0]), add, ..Product::default() };
        let y = |epilogue| gemm::<bf16>(&zero.view(), &zero.view(), &product(epilogue)).unwrap()[0].to_f32();
        assert_eq!([y(Epilogue::RowScaled), y(Epilogue::Folded)], [1.0, 1.0 + 2.0 * half_ulp]);
    }

    #[test]
    fn outputs_by_the_rule_lie_within_their_intervals_and_others_do_not() {
        let c: Vec<bf16> = (0..15).map(|i| bf16::from_f32(i as f32 - 7.0)).collect();
        for (global, add) in
            [GlobalScale::PerTensor, GlobalScale::PerRow].into_iter().flat_map(|g| [(g, None), (g, Some(0.3))])
        {
            let (a, b) = (quantized(3, 50, global), quantized(5, 50, GlobalScale::PerTensor));
            let (a, b): (Operand<'_>, Operand<'_>) = ((&a.view()).into(), (&b.view()).into());
            let product = Product { add: add.map(|beta| (&c[..], beta)), bias: Some(&[0.5; 5]), ..Product::default() };
            let sums = Sums::new(&a, &b, Accumulate::Exact);
            for (at, y) in gemm(a, b, &product).unwrap().iter().enumerate() {
                let interval = Interval::new((&a, at / 5), (&b, at % 5), &product, &sums);
                assert!(interval.holds(y.to_f32()), "{y} {interval:?}");
                let beyond = (interval.exact + interval.allowed * 1.001) as f32;
                assert!(!interval.holds(beyond) && !interval.holds(f32::NAN));
            }
        }
    }

    #[test]
    fn two_divisors_of_tiny_tensors_do_not_overflow() {
        // The divisors are 2688/7e-17 = 3.8e19 each, their product would be 1.5e39.
        let mode = Mode { profile: crate::Profile::LlmCompressor, ..Mode::default() };
        let operand = |rows: usize, global| {
            let data: Vec<f32> = (0..rows * 32).map(|i| 7e-17 * ((i * 31 % 15) as f32 - 7.0) / 7.0).collect();
            let x = Matrix::new(rows, 32, &data).unwrap();
            let mode = Mode { global, ..mode };
            matrix::quantize(&x, &matrix::amax(&x, global, Edge::Reference).unwrap(), &mode, Rounding::NearestEven)
        };
        for global in [GlobalScale::PerTensor, GlobalScale::PerRow] {
            let (a, b) = (operand(2, global).unwrap(), operand(3, global).unwrap());
            let y = gemm::<f32>(&a.view(), &b.view(), &Product::default()).unwrap();
            let decode = |q: &Quantized| matrix::dequantize::<f32>(&q.view()).unwrap();
            let (da, db) = (decode(&a), decode(&b));
            for (i, j) in (0..2).flat_map(|i| (0..3).map(move |j| (i, j))) {
                let exact: f64 = (0..32).map(|k| f64::from(da[i * 32 + k]) * f64::from(db[j * 32 + k])).sum();
                let got = f64::from(y[i * 3 + j]);
                // The product of two factors of 2.6e-20 is subnormal, with 19 bits.
                assert!(exact.abs() > 1e-33 && (got - exact).abs() <= exact.abs() * 1e-5, "{got:e} {exact:e}");
            }
        }
    }

    #[test]
    fn beta_zero_leaves_c_unread() {
        let (a, b) = (quantized(2, 16, GlobalScale::PerTensor), quantized(2, 16, GlobalScale::PerTensor));
        let add = Some((&[f32::NAN; 4][..], 0.0));
        let y = gemm(&a.view(), &b.view(), &Product { add, ..Product::default() });
        assert_eq!(y, gemm(&a.view(), &b.view(), &Product::default()));
    }

    #[test]
    fn shapes_that_do_not_fit_are_errors() {
        let (a, b) = (quantized(2, 32, GlobalScale::PerTensor), quantized(3, 48, GlobalScale::PerTensor));
        let message = |product| gemm::<f32>(&a.view(), &a.view(), &product).unwrap_err().to_string();
        assert_eq!(
            gemm::<f32>(&a.view(), &b.view(), &Product::default()).unwrap_err().to_string(),
            "matmul: expected K = 32, got K = 48"
        );
        assert_eq!(message(Product { bias: Some(&[0.0]), ..Product::default() }), "bias: expected length 2, got 1");
        assert_eq!(message(Product { add: Some((&[0.0], 1.0)), ..Product::default() }), "C: expected length 4, got 1");
    }

    #[test]
    fn empty_operands_give_empty_or_zero_products() {
        let (none, some) = (quantized(0, 32, GlobalScale::PerTensor), quantized(2, 32, GlobalScale::PerTensor));
        assert_eq!(gemm::<f32>(&none.view(), &some.view(), &Product::default()), Ok(vec![]));
        let empty_k = quantized(2, 0, GlobalScale::PerRow);
        assert_eq!(gemm::<f32>(&empty_k.view(), &empty_k.view(), &Product::default()), Ok(vec![0.0; 4]));
    }

    #[test]
    fn operands_without_elements_may_claim_any_number_of_rows() {
        let operand = |rows| Quantized { rows, ..quantized(0, 0, GlobalScale::PerTensor) };
        let product = |a, b| gemm::<f32>(&operand(a).view(), &operand(b).view(), &Product::default());
        assert_eq!([product(1 << 62, 0), product(0, 1 << 62)], [Ok(vec![]), Ok(vec![])]);
        assert_eq!(product(1 << 30, 1 << 30), Err(Error::TooLarge { rows: 1 << 30, cols: 1 << 30 }));
        assert_eq!(product(1 << 62, 4), Err(Error::TooLarge { rows: 1 << 62, cols: 4 }));
    }
}
