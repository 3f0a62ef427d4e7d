//! The error of decoded values against the originals.

use nvfp4_kernels::differences::differences;
use nvfp4_kernels::{Implementation, Values};
use nvfp4_spec::e2m1;
use serde::{Deserialize, Serialize};

/// Sums over the elements of a weight. Adding two of them measures their elements together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measure {
    /// Number of elements.
    pub elements: u64,
    /// Sum of squared differences.
    #[serde(with = "bits")]
    pub error: f64,
    /// Sum of squared originals.
    #[serde(with = "bits")]
    pub norm: f64,
    /// Sum of squared decoded values.
    #[serde(with = "bits")]
    pub decoded: f64,
    /// Sum of products of original and decoded.
    #[serde(with = "bits")]
    pub product: f64,
    /// The largest difference.
    #[serde(with = "bits")]
    pub largest: f64,
    /// Elements that are not zero and decode to zero.
    pub zeroed: u64,
    /// Elements beyond what their block can hold: coded as ±6 and nearer to a 7 or more. Counted
    /// where codes are known.
    pub clipped: u64,
    /// Elements that were rounded to nearest, where GPTQ found no factor of the Hessian.
    #[serde(default)]
    pub unfactored: u64,
}

impl Measure {
    /// Measures values against what they decode to.
    pub fn of(original: &Values<'_>, decoded: &[f32]) -> Self {
        let sums = differences(Implementation::best(), original, decoded).expect("as many decoded as there are");
        Measure {
            elements: decoded.len() as u64,
            error: sums.error,
            norm: sums.norm,
            decoded: sums.decoded,
            product: sums.product,
            largest: f64::from(sums.largest),
            zeroed: sums.zeroed,
            clipped: 0,
            unfactored: 0,
        }
    }

    /// Counts the elements that were clipped, from packed codes.
    pub fn count_clipped(&mut self, original: &Values<'_>, decoded: &[f32], codes: &[u8]) {
        let largest = |i: &usize| e2m1::code_at(codes, *i) & 7 == 7;
        let beyond = |i: &usize| original.get(*i).abs() > decoded[*i].abs() * (7.0 / 6.0);
        self.clipped += (0..decoded.len()).filter(largest).filter(beyond).count() as u64;
    }

    /// Adds the elements of another.
    pub fn add(&mut self, other: &Measure) {
        self.elements += other.elements;
        self.error += other.error;
        self.norm += other.norm;
        self.decoded += other.decoded;
        self.product += other.product;
        self.largest = self.largest.max(other.largest);
        self.zeroed += other.zeroed;
        self.clipped += other.clipped;
        self.unfactored += other.unfactored;
    }

    /// The norm of the error over the norm of the values.
    pub fn relative_error(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { (self.error / self.norm).sqrt() }
    }

    /// The same in decibels.
    pub fn sqnr(&self) -> f64 {
        -20.0 * self.relative_error().log10()
    }

    /// The cosine of the angle between original and decoded values.
    pub fn cosine(&self) -> f64 {
        let length = (self.norm * self.decoded).sqrt();
        if length == 0.0 { 1.0 } else { self.product / length }
    }
}

/// A sum in a journal is its bits: JSON has no NaN, which a source's scale may be, and no infinity.
mod bits {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(sum: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(sum.to_bits())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        u64::deserialize(deserializer).map(f64::from_bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_small_example() {
        let (x, y) = ([3.0f32, -4.0, 0.5, 7.5], [3.0f32, -3.0, 0.0, 6.0]);
        let mut m = Measure::of(&Values::F32(&x), &y);
        assert_eq!((m.error, m.norm, m.largest, m.zeroed), (1.0 + 0.25 + 2.25, 9.0 + 16.0 + 0.25 + 56.25, 1.5, 1));
        assert_eq!(m.relative_error(), (3.5f64 / 81.5).sqrt());
        m.count_clipped(&Values::F32(&x), &y, &[0xD5, 0x70]);
        assert_eq!(m.clipped, 1);
        let exact = Measure::of(&Values::F32(&x), &x);
        assert_eq!((exact.relative_error(), exact.cosine(), exact.sqnr()), (0.0, 1.0, f64::INFINITY));
        let mut both = exact;
        both.add(&m);
        assert_eq!((both.elements, both.error), (8, 3.5));
    }
}
