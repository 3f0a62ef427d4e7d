//! What the AVX2 twins share: the token that proves that the CPU has the instructions, and blocks
//! of 16 elements in registers. On ARM the same twins run with NEON ([`crate::vector`]), and the
//! token that they ask for is that of NEON.
//!
//! Functions here and in the `avx2` files carry `#[target_feature]`, so the compiler lets them use
//! the instructions safely. Only they themselves, or an `unsafe` block that holds a token, may call
//! them.

pub(crate) mod philox;
pub(crate) mod small_float;
pub(crate) mod transpose;

use crate::vector::*;
use nvfp4_spec::{BLOCK, Element, Precision, Specials};

#[cfg(target_arch = "aarch64")]
pub(crate) use crate::vector::Neon as Avx2;

/// Proof that this CPU has AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Avx2(());

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// The token, if the CPU has the instructions.
    pub fn detect() -> Option<Self> {
        let has_all =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has_all.then_some(Avx2(()))
    }
}

/// Prefetches elements.
#[inline]
pub(crate) fn prefetch<T>(x: &[T]) {
    for line in x.chunks(64 / size_of::<T>()) {
        // SAFETY: a prefetch is harmless wherever it points, and this one points into the slice.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
}

/// The bits of 16 elements. 16-bit types fill `lo`; `hi` is then unused. `f32` has elements 0–7 in
/// `lo`, 8–15 in `hi`.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    lo: __m256i,
    hi: __m256i,
}

impl Block {
    /// A block of a 16-bit type from its words.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[inline]
    pub fn of_words(words: __m256i) -> Self {
        Block { lo: words, hi: words }
    }

    /// The words of a 16-bit type.
    #[inline]
    pub fn words(self) -> __m256i {
        self.lo
    }

    /// The bits that differ.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[inline]
    pub fn xor(self, other: Self) -> Self {
        Block { lo: _mm256_xor_si256(self.lo, other.lo), hi: _mm256_xor_si256(self.hi, other.hi) }
    }
}

/// Four rows of four doublewords, transposed.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(crate) fn transposed(rows: [__m128i; 4]) -> [__m128i; 4] {
    let [a, b, c, d] = rows;
    let (t0, t1) = (_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b));
    let (t2, t3) = (_mm_unpacklo_epi32(c, d), _mm_unpackhi_epi32(c, d));
    [_mm_unpacklo_epi64(t0, t2), _mm_unpackhi_epi64(t0, t2), _mm_unpacklo_epi64(t1, t3), _mm_unpackhi_epi64(t1, t3)]
}

/// The 16 codes of 8 bytes, one per byte, in order.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(crate) fn codes_of(bytes: [u8; 8]) -> __m128i {
    let packed = _mm_cvtsi64_si128(i64::from_le_bytes(bytes));
    let mask = _mm_set1_epi8(15);
    let (low, high) = (_mm_and_si128(packed, mask), _mm_and_si128(_mm_srli_epi16::<4>(packed), mask));
    _mm_unpacklo_epi8(low, high)
}

/// The bits of +∞: magnitudes above it are NaN.
pub(crate) const fn infinity_bits(precision: Precision) -> u32 {
    match precision {
        Precision::F32 => 0x7F80_0000,
        Precision::Bf16 => 0x7F80,
        Precision::F16 => 0x7C00,
    }
}

/// A magnitude's bits as a value.
pub(crate) fn value_of(bits: u32, precision: Precision) -> f32 {
    match precision {
        Precision::F32 => f32::from_bits(bits),
        Precision::Bf16 => half::bf16::from_bits(bits as u16).to_f32(),
        Precision::F16 => half::f16::from_bits(bits as u16).to_f32(),
    }
}

#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn load<T: Element>(x: &[T; BLOCK]) -> Block {
    let p = x.as_ptr().cast::<__m256i>();
    match T::PRECISION {
        Precision::F32 => Block {
            // SAFETY: 16 elements of 4 bytes are two vectors; this is the first.
            lo: unsafe { _mm256_loadu_si256(p) },
            // SAFETY: as above; this is the second.
            hi: unsafe { _mm256_loadu_si256(p.add(1)) },
        },
        Precision::Bf16 | Precision::F16 => {
            // SAFETY: 16 elements of 2 bytes are one vector.
            let lo = unsafe { _mm256_loadu_si256(p) };
            Block { lo, hi: lo }
        }
    }
}

#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn store<T: Element>(block: Block, out: &mut [T; BLOCK]) {
    let p = out.as_mut_ptr().cast::<__m256i>();
    // SAFETY: 16 elements are at least one vector of plain bits, valid for every element type.
    unsafe { _mm256_storeu_si256(p, block.lo) };
    if T::PRECISION == Precision::F32 {
        // SAFETY: 16 elements of 4 bytes are two vectors; this is the second.
        unsafe { _mm256_storeu_si256(p.add(1), block.hi) };
    }
}

/// A block of zeros.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn zero() -> Block {
    Block { lo: _mm256_setzero_si256(), hi: _mm256_setzero_si256() }
}

/// The magnitudes' bits.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn abs<T: Element>(b: Block) -> Block {
    match T::PRECISION {
        Precision::F32 => {
            let mask = _mm256_set1_epi32(0x7FFF_FFFF);
            Block { lo: _mm256_and_si256(b.lo, mask), hi: _mm256_and_si256(b.hi, mask) }
        }
        Precision::Bf16 | Precision::F16 => {
            let lo = _mm256_and_si256(b.lo, _mm256_set1_epi16(0x7FFF));
            Block { lo, hi: lo }
        }
    }
}

/// The magnitudes' bits as amax sees them: NaN is 0 with kernel specials. Twin of
/// `scale::magnitude_bits`.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn magnitudes<T: Element>(b: Block, specials: Specials) -> Block {
    let a = abs::<T>(b);
    if specials == Specials::Reference {
        return a;
    }
    let infinity = infinity_bits(T::PRECISION);
    match T::PRECISION {
        Precision::F32 => {
            let limit = _mm256_set1_epi32(infinity as i32);
            let visible = |x| _mm256_andnot_si256(_mm256_cmpgt_epi32(x, limit), x);
            Block { lo: visible(a.lo), hi: visible(a.hi) }
        }
        Precision::Bf16 | Precision::F16 => {
            let limit = _mm256_set1_epi16(infinity as i16);
            let lo = _mm256_andnot_si256(_mm256_cmpgt_epi16(a.lo, limit), a.lo);
            Block { lo, hi: lo }
        }
    }
}

/// The larger of two magnitudes, element by element.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn max<T: Element>(a: Block, b: Block) -> Block {
    match T::PRECISION {
        Precision::F32 => Block { lo: _mm256_max_epi32(a.lo, b.lo), hi: _mm256_max_epi32(a.hi, b.hi) },
        Precision::Bf16 | Precision::F16 => {
            let lo = _mm256_max_epu16(a.lo, b.lo);
            Block { lo, hi: lo }
        }
    }
}

/// The largest magnitude's bits.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn largest<T: Element>(a: Block) -> u32 {
    match T::PRECISION {
        Precision::F32 => {
            let m = _mm256_max_epi32(a.lo, a.hi);
            let m = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m));
            let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b01_00_11_10>(m));
            let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b10_11_00_01>(m));
            _mm_cvtsi128_si32(m) as u32
        }
        Precision::Bf16 | Precision::F16 => {
            largest_word(_mm_max_epu16(_mm256_castsi256_si128(a.lo), _mm256_extracti128_si256::<1>(a.lo)))
        }
    }
}

/// The largest of eight words.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn largest_word(words: __m128i) -> u32 {
    // The only horizontal instruction is a minimum, so it looks at the complements.
    let least = _mm_minpos_epu16(_mm_xor_si128(words, _mm_set1_epi16(-1)));
    !_mm_cvtsi128_si32(least) as u32 & 0xFFFF
}

/// The largest magnitude's bits of each of eight blocks, as doublewords. A tree of unpacks and
/// maxima, three operations a block where [`largest`] takes eight.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn largest_of_eight<T: Element>(b: [Block; 8]) -> __m256i {
    let larger = |x, y| match T::PRECISION {
        Precision::F32 => _mm256_max_epi32(x, y),
        Precision::Bf16 | Precision::F16 => _mm256_max_epu16(x, y),
    };
    // Block i in the low half of pairs[i], block i + 4 in the high half.
    let mut pairs = [_mm256_setzero_si256(); 4];
    for (i, pair) in pairs.iter_mut().enumerate() {
        let (x, y) = match T::PRECISION {
            Precision::F32 => (larger(b[i].lo, b[i].hi), larger(b[i + 4].lo, b[i + 4].hi)),
            Precision::Bf16 | Precision::F16 => (b[i].lo, b[i + 4].lo),
        };
        *pair = larger(_mm256_permute2x128_si256::<0x20>(x, y), _mm256_permute2x128_si256::<0x31>(x, y));
    }
    let halve_words = |x, y| larger(_mm256_unpacklo_epi16(x, y), _mm256_unpackhi_epi16(x, y));
    let halve_doubles = |x, y| larger(_mm256_unpacklo_epi32(x, y), _mm256_unpackhi_epi32(x, y));
    let halve_quads = |x, y| larger(_mm256_unpacklo_epi64(x, y), _mm256_unpackhi_epi64(x, y));
    match T::PRECISION {
        Precision::F32 => {
            let (x, y) = (halve_doubles(pairs[0], pairs[1]), halve_doubles(pairs[2], pairs[3]));
            halve_quads(x, y)
        }
        Precision::Bf16 | Precision::F16 => {
            let (x, y) = (halve_words(pairs[0], pairs[1]), halve_words(pairs[2], pairs[3]));
            let x = halve_doubles(x, y);
            let x = larger(x, _mm256_shuffle_epi32::<0b01_00_11_10>(x));
            // The low quarters of both halves hold four words each.
            let x = _mm256_permute4x64_epi64::<0b11_01_10_00>(x);
            _mm256_cvtepu16_epi32(_mm256_castsi256_si128(x))
        }
    }
}

/// The elements in binary32: 0–7, then 8–15.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn widen<T: Element>(b: Block) -> [__m256; 2] {
    match T::PRECISION {
        Precision::F32 => [_mm256_castsi256_ps(b.lo), _mm256_castsi256_ps(b.hi)],
        Precision::Bf16 => {
            let shift = |x| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x)));
            [shift(_mm256_castsi256_si128(b.lo)), shift(_mm256_extracti128_si256::<1>(b.lo))]
        }
        Precision::F16 => {
            [_mm256_cvtph_ps(_mm256_castsi256_si128(b.lo)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(b.lo))]
        }
    }
}

/// Eight doublewords.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn load_eight(x: &[u32; 8]) -> __m256i {
    // SAFETY: the source is an array of 8 doublewords.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

/// Eight magnitudes' bits in doublewords, of a 16-bit or 32-bit type, as values. Twin of
/// [`value_of`].
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn values_of(bits: __m256i, precision: Precision) -> __m256 {
    match precision {
        Precision::F32 => _mm256_castsi256_ps(bits),
        Precision::Bf16 => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)),
        Precision::F16 => _mm256_cvtph_ps(_mm256_castsi256_si128(narrow(bits, bits))),
    }
}

/// Bits whose high half is the nearest bf16 value, ties to even; not for a NaN with low bits set.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn round_bits(x: __m256) -> __m256i {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)))
}

/// As [`round_bits`], and a quiet NaN for NaN.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn round_or_nan(x: __m256) -> __m256i {
    let quiet = _mm256_or_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x0040_0000));
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
    _mm256_blendv_epi8(round_bits(x), quiet, nan)
}

/// The high halves of 16 doublewords, 0–7 and 8–15, as words in order.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn high_halves(lo: __m256i, hi: __m256i) -> __m256i {
    let (lo, hi) = (_mm256_srli_epi32::<16>(lo), _mm256_srli_epi32::<16>(hi));
    _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(lo, hi))
}

/// 16 words with the elements' signs in bit 3, everything else clear: the sign bits of E2M1 codes.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn code_signs<T: Element>(b: Block) -> __m256i {
    let words = match T::PRECISION {
        Precision::F32 => narrow(b.lo, b.hi),
        Precision::Bf16 | Precision::F16 => b.lo,
    };
    _mm256_and_si256(_mm256_srli_epi16::<12>(words), _mm256_set1_epi16(8))
}

/// 16 doublewords, 0–7 and 8–15, as 16 words in order, saturated with their signs.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn narrow(lo: __m256i, hi: __m256i) -> __m256i {
    _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(lo, hi))
}

/// Minus the number of cuts that each magnitude exceeds, as 16 words. A cut is a vector of equal
/// magnitudes.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
pub(crate) fn count_above<T: Element>(a: Block, cuts: &[__m256i]) -> __m256i {
    match T::PRECISION {
        Precision::F32 => {
            let mut sums = [_mm256_setzero_si256(); 2];
            for &cut in cuts {
                sums[0] = _mm256_add_epi32(sums[0], _mm256_cmpgt_epi32(a.lo, cut));
                sums[1] = _mm256_add_epi32(sums[1], _mm256_cmpgt_epi32(a.hi, cut));
            }
            narrow(sums[0], sums[1])
        }
        Precision::Bf16 | Precision::F16 => {
            let mut sum = _mm256_setzero_si256();
            for &cut in cuts {
                sum = _mm256_add_epi16(sum, _mm256_cmpgt_epi16(a.lo, cut));
            }
            sum
        }
    }
}
