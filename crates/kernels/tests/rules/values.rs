//! Numbers to try the rules with.

use half::{bf16, f16};
use nvfp4_spec::philox::philox4x32;
use nvfp4_spec::{e2m1, e4m3};
use std::sync::LazyLock;

/// Random words: the same ones at every run for the same `key`.
pub fn words(key: u32, count: usize) -> impl Iterator<Item = u32> {
    (0..count.div_ceil(4) as u32).flat_map(move |i| philox4x32([i, 0, 0, 0], [key, 0])).take(count)
}

/// Records of random words.
pub fn records<const N: usize>(key: u32, count: usize) -> Vec<[u32; N]> {
    words(key, N * count).collect::<Vec<u32>>().as_chunks().0.to_vec()
}

/// The bits of zeros, subnormals, the largest and smallest numbers, infinities, NaNs, and where the
/// two small formats change their rounding, with neighbours; of both signs.
pub fn specials() -> &'static [u32] {
    static SPECIALS: LazyLock<Vec<u32>> = LazyLock::new(find_edges);
    &SPECIALS
}

fn find_edges() -> Vec<u32> {
    let mut values = vec![0.0, f32::MIN_POSITIVE, 1.0, 6.0, 448.0, 464.0, 2688.0, 1536.0, 65504.0, 65520.0, f32::MAX];
    values.extend(e2m1::FIRSTS.iter().chain(&e2m1::MAGNITUDES));
    let scales: Vec<f32> = (0..=e4m3::MAX_BYTE).map(e4m3::decode).collect();
    values.extend(scales.windows(2).flat_map(|pair| [pair[0], (pair[0] + pair[1]) / 2.0]));
    values.extend((-149..128).map(|n| 2f32.powi(n)));
    values.extend([1, 2, 0x0020_0000, 0x007F_FFFF].map(f32::from_bits));
    let near = |x: f32| [x.next_down(), x, x.next_up()].map(|x| x.to_bits() & 0x7FFF_FFFF);
    let mut bits: Vec<u32> = values.into_iter().flat_map(near).collect();
    // An infinity; NaNs that are quiet, signalling, and full of ones.
    bits.extend([0x7F80_0000, 0x7FC0_0000, 0x7F80_0001, 0x7FBF_FFFF, 0x7FFF_FFFF, 0x7FC1_2345]);
    bits.sort_unstable();
    bits.dedup();
    bits.iter().flat_map(|&b| [b, b | 0x8000_0000]).collect()
}

/// The bits of every number that bf16 and f16 have.
pub fn sixteen_bit() -> Vec<u32> {
    let both = |bits| [bf16::from_bits(bits).to_f32(), f16::from_bits(bits).to_f32()];
    (0..=u16::MAX).flat_map(both).map(f32::to_bits).collect()
}

/// [`specials`], [`sixteen_bit`], random bits, and random bits with exponents around 1.
pub fn all(key: u32) -> Vec<u32> {
    let ordinary = |w: u32| (w & 0x807F_FFFF) | (112 + (w >> 23) % 32) << 23;
    let random = words(key, 150_000).chain(words(key + 1, 150_000).map(ordinary));
    specials().iter().copied().chain(sixteen_bit()).chain(random).collect()
}

/// Those of [`all`] that a magnitude can be: not negative, or NaN.
pub fn magnitudes(key: u32) -> Vec<u32> {
    all(key).into_iter().filter(|&b| b >> 31 == 0 || f32::from_bits(b).is_nan()).collect()
}

/// One of the numbers `list` for every random word.
pub fn pick<T: Copy>(list: &[T], random: u32) -> T {
    list[random as usize % list.len()]
}

/// A vector of 16·H numbers of one kind: ordinary, of many exponents, near the code grid's ties, or
/// with [`specials`] among them.
pub fn tile(key: u32, len: usize) -> Vec<u32> {
    let (specials, random) = (specials(), words(key, 2 * len).collect::<Vec<u32>>());
    let ties = [0.25f32, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 4.0];
    let value = |pair: &[u32]| {
        let (a, b) = (pair[0], pair[1]);
        let unit = (a as i32) as f32 / 2147483648.0;
        match key % 8 {
            0 => (unit * 2f32.powi((b % 40) as i32 - 20)).to_bits(),
            1 => pick(&ties, b).to_bits().wrapping_add(b >> 8 & 1) | a & 0x8000_0000,
            2 if b % 8 == 0 => pick(specials, a),
            3 => (unit * 1e-38).to_bits(),
            4 => (unit * 3e38).to_bits(),
            _ => unit.to_bits(),
        }
    };
    random.chunks(2).map(value).collect()
}
