//! Blocks under another tensor scale. **Exact.** Read [`nvfp4_spec::rescale`] first.
//!
//! What the rule computes of an element depends on its code, the block's scale byte and the
//! candidate alone. So its squared errors and new codes are tables, made by the rule's own operations
//! once for each scale byte that occurs (`Entry`). The errors of the candidates lie side by side,
//! and a block's are added up in the order of the rule: the sums have its bits, and nothing is left
//! undecided, as a filter like that of `--scale mse` would. It takes 16 additions of 12 lanes a block.
//!
//! There is one text. AVX2 compiles it once more for its own registers.

#[cfg(target_arch = "x86_64")]
mod avx2;

use crate::input::check_len;
use crate::{Implementation, Result};
use nvfp4_spec::rescale::{Change, SIGN, block, change, code};
use nvfp4_spec::scale::Unit;
use nvfp4_spec::{BLOCK, e2m1, mse};

/// Expresses blocks with the stored number `to` instead of `from`, in place. A GPU leaves it to the
/// CPU. On the calling thread.
pub fn rescale(
    implementation: Implementation,
    codes: &mut [u8],
    scales: &mut [u8],
    from: f32,
    to: f32,
    unit: Unit,
) -> Result<()> {
    check_len("codes", scales.len() * (BLOCK / 2), codes.len())?;
    let (codes, change) = (codes.as_chunks_mut().0, Rescaling { from, to, unit });
    match implementation {
        Implementation::Scalar => by_rule(codes, scales, change),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx2(token) => avx2::by_table(token, codes, scales, change),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx512(token) => avx2::by_table(token.avx2(), codes, scales, change),
        #[cfg(any(feature = "cuda", target_arch = "aarch64"))]
        _ => by_table(codes, scales, change),
    }
    Ok(())
}

/// Two stored numbers of one meaning.
#[derive(Clone, Copy)]
struct Rescaling {
    from: f32,
    to: f32,
    unit: Unit,
}

/// The codes of a block, two in a byte.
type Packed = [u8; BLOCK / 2];

fn by_rule(codes: &mut [Packed], scales: &mut [u8], Rescaling { from, to, unit }: Rescaling) {
    for (packed, scale) in codes.iter_mut().zip(scales) {
        let codes = std::array::from_fn(|i| e2m1::code_at(packed, i));
        let block = block(&codes, *scale, from, to, unit);
        *scale = block.scale;
        *packed = std::array::from_fn(|i| e2m1::pack(block.codes[0][2 * i], block.codes[0][2 * i + 1]));
    }
}

#[inline(always)]
fn by_table(codes: &mut [Packed], scales: &mut [u8], change: Rescaling) {
    let mut entries = [const { None }; SIGN as usize];
    for (packed, scale) in codes.iter_mut().zip(scales) {
        let word = u64::from_le_bytes(*packed);
        if word & 0x7777_7777_7777_7777 == 0 {
            continue;
        }
        let (sign, magnitude) = (*scale & SIGN, *scale & !SIGN);
        match entries[usize::from(magnitude)].get_or_insert_with(|| Entry::new(magnitude, change)) {
            Entry::Scale(byte) => *scale = sign | *byte,
            Entry::Search(search) => {
                let best = search.best(word);
                *scale = sign | search.bytes[best];
                *packed = search.codes(best, word).to_le_bytes();
            }
        }
    }
}

/// Room for the 11 candidates, in whole vectors.
const LANES: usize = 12;

/// What becomes of the blocks with a scale byte.
enum Entry {
    Scale(u8),
    Search(Box<Search>),
}

/// The candidates, in the order of the rule: the first of those with the least error wins.
struct Search {
    /// Of each code with each candidate; infinite where there is no candidate.
    errors: [[f64; LANES]; 16],
    bytes: [u8; LANES],
    /// The new codes of all codes, one in a byte.
    codes: [[u8; 16]; LANES],
}

impl Entry {
    #[cold]
    fn new(magnitude: u8, Rescaling { from, to, unit }: Rescaling) -> Self {
        let nearest = match change(magnitude, from, to, unit) {
            Change::Scale(byte) => return Entry::Scale(byte),
            Change::Search(nearest) => nearest,
        };
        let (errors, bytes, codes) = ([[f64::INFINITY; LANES]; 16], [0; LANES], [[0; 16]; LANES]);
        let mut search = Box::new(Search { errors, bytes, codes });
        let before = unit.decode_factor(magnitude, from);
        for (lane, byte) in mse::candidates(nearest).enumerate() {
            let after = unit.decode_factor(byte, to);
            search.bytes[lane] = byte;
            for old in 0..16 {
                let x = e2m1::decode(old as u8) * before;
                let new = code(x, after);
                search.errors[old][lane] = mse::squared(x, new, after);
                search.codes[lane][old] = new;
            }
        }
        Entry::Search(search)
    }
}

impl Search {
    /// The candidate with the least error for a block of codes.
    #[inline(always)]
    fn best(&self, codes: u64) -> usize {
        let mut sums = [0f64; LANES];
        for i in 0..BLOCK {
            let errors = &self.errors[(codes >> (4 * i) & 15) as usize];
            for lane in 0..LANES {
                sums[lane] += errors[lane];
            }
        }
        // NaN is less than nothing: as infinity, which leaves the rule at its first candidate.
        let less = |a: f64, b: f64| if a < b { a } else { b };
        let sums = sums.map(|sum| less(sum, f64::INFINITY));
        let [a, b, c, d]: [f64; 4] = std::array::from_fn(|i| less(less(sums[i], sums[i + 4]), sums[i + 8]));
        let least = less(less(a, b), less(c, d));
        let mut equal = 0u32;
        for (lane, &sum) in sums.iter().enumerate() {
            equal |= u32::from(sum == least) << lane;
        }
        equal.trailing_zeros() as usize
    }

    /// The codes of a block with this candidate.
    #[inline(always)]
    fn codes(&self, candidate: usize, codes: u64) -> u64 {
        let table = &self.codes[candidate];
        (0..BLOCK).fold(0, |new, i| new | u64::from(table[(codes >> (4 * i) & 15) as usize]) << (4 * i))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_spec::Bound;
    use nvfp4_spec::philox::philox4x32;

    /// Blocks with every scale byte, of many kinds: all codes, few, ends of the range, zeros.
    fn blocks(seed: u32) -> (Vec<u8>, Vec<u8>) {
        let scales: Vec<u8> = (0..256 * 24).map(|i| i as u8).collect();
        let kinds = [u64::MAX, 0x9999_9999_9999_9999, 0xF0F0_F0F0_0000_F00F, 0x8888_8888_8888_8888, 7 << 20];
        let word = |i: usize| {
            let [a, b, ..] = philox4x32([i as u32, 0, 0, 0], [seed, 3]);
            (u64::from(a) << 32 | u64::from(b)) & kinds[if i / 256 < 16 { 0 } else { i / 256 % 5 }]
        };
        ((0..scales.len()).flat_map(|i| word(i).to_le_bytes()).collect(), scales)
    }

    #[test]
    fn every_implementation_gives_the_bytes_of_the_rule() {
        let numbers = [
            (0.3f32, 1.0f32),
            (0.91, 1.0),
            (1.0, 1.0),
            (1.2, 0.3),
            (0.777e-4, 1e-4),
            (1e-4, 0.3e-4),
            (36864.0, 33536.0),
            // Subnormal factors, and those that underflow or overflow.
            (1e-40, 3e-40),
            (3e-38, 1e-36),
            (1e-45, 1e-45),
            (1e-45, 1e-44),
            (1e-30, 1.0),
            (1.0, 1e-30),
            (3e38, 1e38),
            (2e38, 3e38),
            (1e36, 1e37),
            (1.0, 3e38),
            (1e-40, 3e38),
            // What no producer writes.
            (0.0, 1.0),
            (1.0, 0.0),
            (0.0, 0.0),
            (-0.0, 0.7),
            (-0.3, 1.0),
            (0.3, -1.0),
            (-0.3, -1.0),
            (f32::NAN, 1.0),
            (1.0, f32::NAN),
            (f32::INFINITY, 1.0),
            (1.0, f32::INFINITY),
            (f32::INFINITY, f32::INFINITY),
            (f32::NEG_INFINITY, f32::INFINITY),
        ];
        for (i, (from, to)) in numbers.into_iter().enumerate() {
            for unit in [Unit::Multiplier, Unit::Divisor, Unit::Amax(Bound::E448), Unit::Amax(Bound::E256)] {
                let original = blocks(i as u32);
                let mut expected = original.clone();
                rescale(Implementation::Scalar, &mut expected.0, &mut expected.1, from, to, unit).unwrap();
                for implementation in Implementation::available() {
                    let (mut codes, mut scales) = original.clone();
                    rescale(implementation, &mut codes, &mut scales, from, to, unit).unwrap();
                    assert!((codes, scales) == expected, "{implementation}: {unit:?} from {from} to {to}");
                }
                // The text as it is compiled for every CPU.
                let (mut codes, mut scales) = original;
                by_table(codes.as_chunks_mut().0, &mut scales, Rescaling { from, to, unit });
                assert!((codes, scales) == expected, "plain: {unit:?} from {from} to {to}");
            }
        }
    }

    #[test]
    fn lengths_must_agree() {
        assert!(rescale(Implementation::best(), &mut [0; 9], &mut [0; 1], 1.0, 1.0, Unit::Multiplier).is_err());
    }
}
