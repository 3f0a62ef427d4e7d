//! The 16-point randomized Hadamard transform: it spreads an outlier over its group before
//! quantization, and cancels in a product of two operands transformed alike. Source: numerics §0,
//! §6.

use crate::{BLOCK, Precision};

/// What the sums are multiplied by: 1/√16.
pub const FACTOR: f32 = 0.25;

/// The type of a transformed matrix.
pub const PRECISION: Precision = Precision::Bf16;

/// Which elements of a group change sign before the transform: bit `i` set means element `i` is
/// negated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Signs(pub u16);

impl Signs {
    /// TransformerEngine's fixed sign vector, + + + − + − − − − − − + − + − −.
    pub const FIXED: Signs = Signs(0xD7E8);
    /// No sign changes.
    pub const NONE: Signs = Signs(0);

    /// Whether element `i` is negated.
    pub const fn negates(self, i: usize) -> bool {
        self.0 >> i & 1 == 1
    }
}

/// Transforms 16 values and rounds them to bf16: `out[j] = Σᵢ v[i]·g[i]·(−1)^popcount(i & j) / 4`.
///
/// The order of additions is the fast butterfly in binary32: signs, then stages of distance 1, 2,
/// 4, 8 (`a + b`, `a − b`), then × 0.25, then one rounding to bf16. Infinities and NaN go the way
/// of IEEE arithmetic. Returned in binary32, exactly.
pub fn transform(mut v: [f32; BLOCK], signs: Signs) -> [f32; BLOCK] {
    for (i, x) in v.iter_mut().enumerate() {
        if signs.negates(i) {
            *x = -*x;
        }
    }
    for distance in [1, 2, 4, 8] {
        for i in (0..BLOCK).filter(|i| i & distance == 0) {
            let (a, b) = (v[i], v[i + distance]);
            (v[i], v[i + distance]) = (a + b, a - b);
        }
    }
    v.map(|x| PRECISION.round(x * FACTOR))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn unit_vectors_give_the_rows_of_the_matrix() {
        for signs in [Signs::FIXED, Signs::NONE, Signs(0x0001)] {
            for i in 0..BLOCK {
                let unit = std::array::from_fn(|k| f32::from(u8::from(k == i)));
                let sign = if signs.negates(i) { -0.25 } else { 0.25 };
                let expected = std::array::from_fn(|j| if (i & j).count_ones() % 2 == 0 { sign } else { -sign });
                assert_eq!(transform(unit, signs), expected);
            }
        }
    }

    /// An input (all bf16) on which the order of additions shows: stages of distance 8, 4, 2, 1
    /// would give −100.5.
    #[test]
    fn near_neighbours_are_added_first() {
        let v = [
            0.05444336,
            -0.0012283325,
            -0.040527344,
            0.080078125,
            2.453125,
            0.00011205673,
            -0.049072266,
            -0.011108398,
            0.32617188,
            -16.125,
            -1.390625,
            -0.00065612793,
            -434.0,
            0.0068969727,
            -7.9631805e-5,
            45.75,
        ];
        assert!(v.iter().all(|&x| bf16::from_f32(x).to_f32() == x));
        assert_eq!(transform(v, Signs::FIXED)[8], -101.0);
    }

    #[test]
    fn twice_without_signs_is_the_identity() {
        let v = std::array::from_fn(|i| i as f32 - 5.0);
        assert_eq!(transform(transform(v, Signs::NONE), Signs::NONE), v);
    }
}
