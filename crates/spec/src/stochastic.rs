//! Stochastic rounding to E2M1, and where its random bytes come from.
//!
//! Randomness goes by position: the bytes of a block depend on (seed, offset, index of the block)
//! and on nothing else, so the result does not depend on threads, tiles or device. Source: numerics
//! §0, §7.3.

use crate::philox::{philox4x32, words};
use crate::{BLOCK, Specials, e2m1};

/// Rounds `y` down or up to a neighbouring code, from 8 random bits.
///
/// With `f` the position of |y| between its neighbours, `floor(256·f)` of the 256 possible bytes
/// round away from zero (bar the rounding of the addition, which can carry a value just below a
/// grid point up to it). Over the whole range, values below 1 included; never beyond a neighbour;
/// magnitudes above 6 and infinities give ±6. The sign is kept, also where the result is zero; the
/// specials say what −0 and NaN become.
///
/// With `u = random/256` and `step` the grid spacing at |y|: `t = fma(u, step, |y|)`, one rounding;
/// then the grid spacing at `t` decides what `t` is rounded down to.
pub fn encode(y: f32, random: u8, specials: Specials) -> u8 {
    if y.is_nan() {
        return e2m1::nan_code(specials);
    }
    let u = f32::from(random) / 256.0;
    let t = u.mul_add(grid_step(y.abs()), y.abs());
    let step = grid_step(t);
    let magnitude = ((t / step).floor() * step).min(e2m1::MAX);
    e2m1::encode(magnitude, specials) | e2m1::sign(y, specials)
}

/// The distance between neighbouring E2M1 values at magnitude `a`.
pub fn grid_step(a: f32) -> f32 {
    if a >= 4.0 {
        2.0
    } else if a >= 2.0 {
        1.0
    } else {
        0.5
    }
}

/// Where a direction of a tensor takes its random bytes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Random<'a> {
    /// Our position-keyed stream.
    Stream(Stream),
    /// The caller's own: 16 bytes per block, blocks in row-major order.
    Bytes(&'a [u8]),
}

impl Random<'_> {
    /// The bytes of the block at `index`, counted from the start of the direction's data.
    pub fn block(&self, index: usize) -> [u8; BLOCK] {
        match self {
            Random::Stream(stream) => stream.block(index as u64),
            Random::Bytes(bytes) => bytes[index * BLOCK..][..BLOCK].try_into().expect("a slice of 16 bytes"),
        }
    }
}

/// The position-keyed stream: one Philox call per block of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream {
    /// The Philox key.
    pub seed: u64,
    /// Tells calls apart; see [`Stream::row`] and [`Stream::column`].
    pub offset: u64,
    /// Index of the first block within the whole direction, so that a slice of a tensor draws the
    /// same bytes as the whole.
    pub first_block: u64,
}

/// How many offsets one quantization consumes, whichever directions it writes.
pub const OFFSETS_PER_CALL: u64 = 2;

impl Stream {
    /// The stream of the row direction in a call at `offset`.
    pub fn row(seed: u64, offset: u64) -> Self {
        Stream { seed, offset, first_block: 0 }
    }

    /// The stream of the column direction in the same call: the next offset.
    pub fn column(seed: u64, offset: u64) -> Self {
        Stream { seed, offset: offset.wrapping_add(1), first_block: 0 }
    }

    /// The 16 bytes of the block at `index` after the first: counter words 0, 1 are the block's
    /// index in the direction, words 2, 3 the offset; word `g` serves elements 4g…4g+3, its byte
    /// `i` element 4g+i.
    pub fn block(&self, index: u64) -> [u8; BLOCK] {
        let [b0, b1] = words(self.first_block.wrapping_add(index));
        let [o0, o1] = words(self.offset);
        bytes_of(philox4x32([b0, b1, o0, o1], words(self.seed)))
    }
}

/// Four words as the 16 bytes of a block, least significant byte of each word first.
pub fn bytes_of(random: [u32; 4]) -> [u8; BLOCK] {
    let mut bytes = [0; BLOCK];
    for (four, word) in bytes.chunks_exact_mut(4).zip(random) {
        four.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// How many of the 256 random bytes round `y` away from its lower neighbour.
    fn ups(y: f32) -> usize {
        let floor = encode(y, 0, Specials::Kernel);
        (0..=255).filter(|&r| encode(y, r, Specials::Kernel) != floor).count()
    }

    #[test]
    fn exactly_floor_256_f_bytes_round_up() {
        for (pair, lower) in e2m1::MAGNITUDES.windows(2).zip(0u8..) {
            for k in 0..1024 {
                let y = pair[0] + (pair[1] - pair[0]) * (k as f32 / 1024.0);
                assert_eq!(ups(y), k / 4, "{y}");
                assert_eq!(ups(-y), k / 4, "-{y}");
                for r in 0..=255 {
                    let code = encode(y, r, Specials::Kernel);
                    assert!(code == lower || code == lower + 1, "{y} with {r} went beyond a neighbour");
                    assert_eq!(encode(-y, r, Specials::Kernel), code | e2m1::SIGN);
                }
            }
        }
    }

    #[test]
    fn saturates_and_keeps_signs() {
        for r in [0, 1, 128, 255] {
            for y in [6.0, 6.5, 1e30, f32::INFINITY] {
                assert_eq!([encode(y, r, Specials::Kernel), encode(-y, r, Specials::Reference)], [7, 15]);
            }
            assert_eq!([encode(-0.0, r, Specials::Kernel), encode(-0.0, r, Specials::Reference)], [8, 0]);
            assert_eq!([encode(-f32::NAN, r, Specials::Kernel), encode(f32::NAN, r, Specials::Reference)], [7, 0]);
        }
        assert_eq!([encode(-1e-30, 0, Specials::Kernel), encode(-1e-30, 0, Specials::Reference)], [8, 8]);
    }

    #[test]
    fn the_addition_may_carry_a_value_up_to_a_grid_point() {
        // Just below 1/256 of a step: by the exact sum no byte would round it up.
        let y = (0.5f32 / 256.0).next_down();
        assert_eq!([encode(y, 255, Specials::Kernel), encode(y, 254, Specials::Kernel)], [1, 0]);
    }

    /// An independent statement, exact in f64 for 16-bit inputs: with the neighbours `lower` and
    /// `upper` of |y| and f = (|y| − lower)/(upper − lower), the last floor(256·f) of the 256 bytes
    /// round up.
    fn by_neighbours(y: f32, random: u8, specials: Specials) -> u8 {
        if y.is_nan() {
            return if specials == Specials::Kernel { 7 } else { 0 };
        }
        let a = f64::from(y.abs());
        let lower = e2m1::MAGNITUDES.iter().rposition(|&m| f64::from(m) <= a).unwrap();
        let up = e2m1::MAGNITUDES.get(lower + 1).is_some_and(|&upper| {
            let bottom = f64::from(e2m1::MAGNITUDES[lower]);
            let count = (256.0 * (a - bottom) / (f64::from(upper) - bottom)).floor();
            f64::from(random) >= 256.0 - count
        });
        let negative = y < 0.0 || specials == Specials::Kernel && y.is_sign_negative();
        lower as u8 + u8::from(up) + if negative { 8 } else { 0 }
    }

    #[test]
    fn every_16_bit_input_goes_to_the_neighbour_that_the_byte_picks() {
        for bits in 0..=u16::MAX {
            for y in [bf16::from_bits(bits).to_f32(), f16::from_bits(bits).to_f32()] {
                for random in [0, 1, 2, 63, 127, 128, 129, 200, 254, 255] {
                    for specials in [Specials::Kernel, Specials::Reference] {
                        let expected = by_neighbours(y, random, specials);
                        assert_eq!(encode(y, random, specials), expected, "{y:e} with {random}, {specials:?}");
                    }
                }
            }
        }
    }

    /// The known answers of numerics §0: seed, offset and block index all have a high word.
    #[test]
    fn the_stream_has_its_known_answers() {
        let (seed, offset, block) = (0x0123_4567_89AB_CDEF, (7 << 32) + 5, (1 << 32) + 3);
        assert_eq!(u128::from_be_bytes(Stream::row(seed, offset).block(block)), 0x49eeff83_d91d9048_0d58cb7c_616d1830);
        assert_eq!(
            u128::from_be_bytes(Stream::column(seed, offset).block(block)),
            0xd4a6c4d5_189137f4_1f2ade3c_090441f9
        );
    }

    #[test]
    fn directions_calls_and_distant_blocks_draw_different_bytes() {
        let (row, column) = (Stream::row(7, 40), Stream::column(7, 40));
        let next = Stream::row(7, 40 + OFFSETS_PER_CALL);
        let mut seen = std::collections::HashSet::new();
        for index in (0..64).chain((1 << 32) - 2..(1 << 32) + 64) {
            for stream in [row, column, next] {
                assert!(seen.insert(stream.block(index)), "block {index} repeats");
            }
        }
    }

    #[test]
    fn a_slice_draws_the_same_bytes_as_the_whole() {
        let whole = Stream::row(3, 9);
        let slice = Stream { first_block: 1 << 32, ..whole };
        assert_eq!(slice.block(5), whole.block((1 << 32) + 5));
    }

    /// Mean of the decoded values of `y` over many blocks of a stream.
    fn mean(y: f32, stream: Stream) -> f64 {
        let blocks = 20_000;
        let sum: f64 = (0..blocks)
            .flat_map(|b| stream.block(b))
            .map(|r| f64::from(e2m1::decode(encode(y, r, Specials::Kernel))))
            .sum();
        sum / (blocks * BLOCK as u64) as f64
    }

    #[test]
    fn means_are_unbiased_below_and_above_one_and_at_midpoints() {
        for y in [0.1f32, 0.25, 0.3, 0.75, 0.9, 1.1, 1.75, 2.5, 2.9, 3.5, 4.4, 5.0, -0.2, -5.5] {
            let step = grid_step(y.abs());
            // 8 random bits resolve the position to 1/256 of a step, rounded down in magnitude;
            // 320,000 draws of a variable of deviation at most step/2 have a mean within 6
            // deviations = 0.0054 steps.
            let (resolution, noise) = (step / 256.0, 0.0054 * step);
            let bias = (mean(y, Stream::row(11, 4)) - f64::from(y)) * f64::from(y.signum());
            assert!(bias <= noise.into() && bias >= -f64::from(resolution + noise), "{y}: bias {bias}");
        }
    }
}
