//! The sums of a product, before any global scale.

use super::Accumulate;
use super::operand::Operand;
use crate::matrix::View;
use crate::{BLOCK, e2m1, e4m3};

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
            // From +0: an iterator's `sum` starts at −0.
            Kind::Values(a, b) => (0..a.cols()).fold(0.0, |sum, k| sum + a.value(i, k) * b.value(j, k)) as f32,
        }
    }

    /// The sum of the products' magnitudes of output (i, j), which error bounds are proportional
    /// to.
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
/// A term is at most 16·12² · (448·512)² < 2⁴⁷ in magnitude, so 2¹⁶ of them (K = 2²⁰) fit an `i64`;
/// longer sums are carried in an `i128`.
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
