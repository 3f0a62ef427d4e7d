//! The searches with tables and in vectors. Twin of [`nvfp4_spec::weighted`].
//!
//! Errors are the rule's own: each element is rounded by comparisons instead of branches, which
//! compilers turn into vectors, and sums keep their order. A row of `H` times `d` is added column by
//! column, for all rows at once. What is not an ordinary number is left to the rule.

use nvfp4_spec::modelopt::{exported, swept_amax, swept_scale};
use nvfp4_spec::profile::Factor;
use nvfp4_spec::scale::amax;
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::tile::Quantized;
use nvfp4_spec::weighted::{BlockHessian, by_columns, by_hessian};
use nvfp4_spec::{BLOCK, e4m3, mse};

/// Whatever depends on the tensor alone.
pub(super) struct Search {
    scaling: Scaling,
    /// How elements are scaled by each byte, and what codes are multiplied by to decode them.
    bytes: [(Factor, f32); 128],
    /// The scales of the sweep.
    swept: [f32; 128],
}

impl Search {
    pub fn new(scaling: Scaling) -> Self {
        let (own, global) = (|byte| (scaling.factor(byte), mse::decode_factor(byte, &scaling)), scaling.global.amax);
        Search {
            scaling,
            bytes: std::array::from_fn(|byte| own(byte as u8)),
            swept: std::array::from_fn(|byte| swept_scale(byte as u8, global)),
        }
    }

    fn quantized(&self, block: &[f32; BLOCK], scale: u8) -> Quantized<1> {
        let (factor, _) = self.bytes[usize::from(scale)];
        Quantized { scale, codes: [block.map(|x| self.scaling.code(factor.apply(x), None))] }
    }

    pub fn by_columns(&self, block: &[f32; BLOCK], weights: &[f32; BLOCK]) -> Quantized<1> {
        let rule = || by_columns(block, weights, &self.scaling);
        let centre = self.scaling.block_scale(amax(block, self.scaling.mode.amax_specials()));
        if centre > e4m3::MAX_BYTE || !block.iter().all(|x| x.is_finite()) {
            return rule();
        }
        let (magnitudes, weights) = (block.map(f32::abs), weights.map(f64::from));
        let (mut best, mut least) = (centre, f64::INFINITY);
        for offset in mse::OFFSETS {
            let byte = i32::from(centre) + offset;
            if offset != 0 && !(1..=i32::from(e4m3::MAX_BYTE)).contains(&byte) {
                continue;
            }
            let (factor, decode) = self.bytes[byte as usize];
            let scaled = match factor {
                Factor::Multiply(f) | Factor::Divide(f) if !(f.is_normal() && f > 0.0) => return rule(),
                Factor::Multiply(f) => magnitudes.map(|x| x * f),
                Factor::Divide(f) => magnitudes.map(|x| x / f),
            };
            let mut squares = [0f64; BLOCK];
            for i in 0..BLOCK {
                let d = f64::from(magnitudes[i]) - f64::from(to_grid(scaled[i]) * decode);
                squares[i] = weights[i] * (d * d);
            }
            let error: f64 = squares.iter().sum();
            if error < least {
                (best, least) = (byte as u8, error);
            }
        }
        self.quantized(block, best)
    }

    /// `turned` is the block's Hessian with rows as columns.
    pub fn by_hessian(&self, block: &[f32; BLOCK], hessian: &BlockHessian, turned: &Turned) -> Quantized<1> {
        let global = self.scaling.global.amax;
        let ordinary = self.swept[1..=usize::from(e4m3::MAX_BYTE)].iter().all(|s| s.is_finite() && *s > 0.0);
        if !(ordinary && global > 0.0 && global.is_finite() && block.iter().all(|x| x.is_finite())) {
            return by_hessian(block, hessian, &self.scaling);
        }
        let (mut best, mut least) = (1, f64::INFINITY);
        for byte in 1..=e4m3::MAX_BYTE {
            let error = turned.error(block, self.swept[usize::from(byte)]);
            if error < least {
                (best, least) = (byte, error);
            }
        }
        self.quantized(block, exported(swept_amax(best, global), global, self.scaling.global.bound))
    }
}

/// A Hessian in binary64, rows as columns.
pub(super) struct Turned([[f64; BLOCK]; BLOCK]);

impl Turned {
    pub fn new(hessian: &BlockHessian) -> Self {
        Turned(std::array::from_fn(|j| std::array::from_fn(|i| f64::from(hessian[i][j]))))
    }

    fn error(&self, block: &[f32; BLOCK], scale: f32) -> f64 {
        let d = block.map(|x| {
            let e = x.abs() - to_grid(x.abs() / scale) * scale;
            f64::from(if x < 0.0 { -e } else { e })
        });
        let mut rows = [0f64; BLOCK];
        for (column, d) in self.0.iter().zip(d) {
            rows.iter_mut().zip(column).for_each(|(sum, h)| *sum += h * d);
        }
        rows.iter().zip(d).map(|(row, d)| d * row).sum()
    }
}

/// The E2M1 number that a magnitude is rounded to, ties to the even code.
fn to_grid(y: f32) -> f32 {
    let step = |over: bool, step: f32| if over { step } else { 0.0 };
    let low = step(y > 0.25, 0.5) + step(y >= 0.75, 0.5) + step(y > 1.25, 0.5) + step(y >= 1.75, 0.5);
    low + step(y > 2.5, 1.0) + step(y >= 3.5, 1.0) + step(y > 5.0, 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_spec::{Specials, e2m1};

    #[test]
    fn comparisons_round_as_codes_do() {
        for bits in (0..0x7F80_0001).step_by(4099).chain([0.25f32, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0].map(f32::to_bits)) {
            for bits in [bits.saturating_sub(1), bits, bits + 1] {
                let y = f32::from_bits(bits);
                if !y.is_nan() {
                    assert_eq!(to_grid(y), e2m1::decode(e2m1::encode(y, Specials::Kernel)), "{y}");
                }
            }
        }
    }
}
