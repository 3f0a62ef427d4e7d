//! How far decoded values are from the originals: sums in binary64. **Exact**: every implementation
//! adds in the same order.
//!
//! There is one text. AVX2 compiles it once more for its own registers; nothing is contracted, so
//! its sums have the same bits.

use crate::input::check_len;
use crate::{Implementation, Result, Values};
#[cfg(target_arch = "x86_64")]
mod avx2;

/// Sums over the elements of an original `x` and what it decodes to, `y`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// Of `(x − y)²`.
    pub error: f64,
    /// Of `x²`.
    pub norm: f64,
    /// Of `y²`.
    pub decoded: f64,
    /// Of `x·y`.
    pub product: f64,
    /// The largest `|x − y|`, as rounded to binary32. NaN is passed over.
    pub largest: f32,
    /// How many are not zero and decode to zero.
    pub zeroed: u64,
}

/// The sums of all elements. A GPU leaves them to the CPU, where the values are.
pub fn differences(implementation: Implementation, x: &Values<'_>, y: &[f32]) -> Result<Sums> {
    check_len("decoded values", x.len(), y.len())?;
    Ok(match implementation {
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx2(token) => avx2::differences(token, x, y),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx512(token) => avx2::differences(token.avx2(), x, y),
        _ => of_values(x, y),
    })
}

#[inline(always)]
fn of_values(x: &Values<'_>, y: &[f32]) -> Sums {
    match x {
        Values::F32(x) => add_up(x, y, |x| x),
        // As `to_f32`, but for the bits of a NaN, which no sum shows.
        Values::Bf16(x) => add_up(x, y, |x| f32::from_bits(u32::from(x.to_bits()) << 16)),
        Values::F16(x) => add_up(x, y, |x| x.to_f32()),
    }
}

/// Elements whose sums run beside each other: additions in one sum would wait for each other.
const LANES: usize = 8;

#[inline(always)]
fn add_up<T: Copy>(x: &[T], y: &[f32], value: impl Fn(T) -> f32) -> Sums {
    let mut lanes = Lanes::default();
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in xs.iter().zip(ys) {
        lanes.add(&x.map(&value), y);
    }
    let mut last = [[0f32; LANES]; 2];
    for (i, (&x, &y)) in x_rest.iter().zip(y_rest).enumerate() {
        (last[0][i], last[1][i]) = (value(x), y);
    }
    lanes.add(&last[0], &last[1]);
    Sums {
        error: lanes.error.iter().sum(),
        norm: lanes.norm.iter().sum(),
        decoded: lanes.decoded.iter().sum(),
        product: lanes.product.iter().sum(),
        largest: lanes.largest.into_iter().fold(0.0, f32::max),
        zeroed: lanes.zeroed.iter().sum(),
    }
}

#[derive(Default)]
struct Lanes {
    error: [f64; LANES],
    norm: [f64; LANES],
    decoded: [f64; LANES],
    product: [f64; LANES],
    largest: [f32; LANES],
    zeroed: [u64; LANES],
}

impl Lanes {
    #[inline(always)]
    fn add(&mut self, x: &[f32; LANES], y: &[f32; LANES]) {
        for i in 0..LANES {
            let (a, b) = (f64::from(x[i]), f64::from(y[i]));
            self.error[i] += (a - b) * (a - b);
            self.norm[i] += a * a;
            self.decoded[i] += b * b;
            self.product[i] += a * b;
        }
        for i in 0..LANES {
            let e = (x[i] - y[i]).abs();
            self.largest[i] = if e > self.largest[i] { e } else { self.largest[i] };
            self.zeroed[i] += u64::from(y[i] == 0.0) & u64::from(x[i] != 0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn every_implementation_has_the_same_sums() {
        let word = |i: usize| nvfp4_spec::philox::philox4x32([i as u32, 0, 0, 0], [5, 6])[0];
        let x: Vec<f32> = (0..1037).map(|i| (word(i) as f32 / 4294967296.0 - 0.5) * 3.0).collect();
        let y: Vec<f32> = x.iter().map(|x| (x * 4.0).round() / 4.0).collect();
        let brains: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
        let halves: Vec<f16> = x.iter().map(|&x| f16::from_f32(x)).collect();
        for len in [0, 1, 7, 8, 9, 1037] {
            for values in [Values::F32(&x[..len]), Values::Bf16(&brains[..len]), Values::F16(&halves[..len])] {
                let expected = of_values(&values, &y[..len]);
                for implementation in Implementation::available() {
                    assert_eq!(differences(implementation, &values, &y[..len]).unwrap(), expected, "{implementation}");
                }
            }
        }
        assert!(differences(Implementation::Scalar, &Values::F32(&x), &y[1..]).is_err());
    }

    #[test]
    fn sums_of_a_few_numbers() {
        let (x, y) = ([1.0, -2.0, 0.5, 0.0], [1.5, -2.0, 0.0, 0.0]);
        let expected = Sums { error: 0.5, norm: 5.25, decoded: 6.25, product: 5.5, largest: 0.5, zeroed: 1 };
        assert_eq!(differences(Implementation::best(), &Values::F32(&x), &y).unwrap(), expected);
    }
}
