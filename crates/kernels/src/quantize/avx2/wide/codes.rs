//! The codes of a piece, each lane with the cuts of its own column.

use super::{PIECE, Rows};
use crate::avx2::{infinity_bits, value_of};
use crate::quantize::avx2::cuts::Table;
use nvfp4_spec::scale::SIXTH;
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::{BLOCK, Precision, Profile, Rounding, Specials, block, e2m1, e4m3};
use std::arch::x86_64::*;

/// The cuts of a tensor: for each of the eight a table over scale bytes.
pub(super) struct Cuts(Box<[[u16; 128]; 8]>);

impl Cuts {
    /// Of a complete table of a 16-bit type.
    pub fn new(table: &Table) -> Self {
        let mut cuts = Box::new([[0; 128]; 8]);
        for scale in 0..128 {
            for (cuts, word) in cuts.iter_mut().zip(table.words(scale)) {
                cuts[usize::from(scale)] = word;
            }
        }
        Cuts(cuts)
    }

    /// Cut `k` of 32 scale bytes, which are words here.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
    #[inline]
    fn of(&self, k: usize, scales: __m512i) -> __m512i {
        let words = self.0[k].as_ptr();
        // SAFETY: a table is four vectors of 32 words.
        let part = |i: usize| unsafe { _mm512_loadu_si512(words.add(PIECE * i).cast()) };
        let low = _mm512_permutex2var_epi16(part(0), scales, part(1));
        let high = _mm512_permutex2var_epi16(part(2), scales, part(3));
        _mm512_mask_blend_epi16(_mm512_test_epi16_mask(scales, _mm512_set1_epi16(64)), low, high)
    }
}

/// Quantizes the columns of a piece: eight bytes of codes and a scale byte each. A column with NaN
/// is left to the rule.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
#[inline]
pub(super) fn quantize(
    rows: &Rows,
    scaling: &Scaling,
    cuts: &Cuts,
    codes: &mut [[[u8; 8]; 8]; 4],
    scales: &mut [u8; PIECE],
) {
    let mut maxima = [_mm512_setzero_si512(); 4];
    for four in rows.as_chunks::<4>().0 {
        for (m, &x) in maxima.iter_mut().zip(four) {
            *m = _mm512_max_epu16(*m, _mm512_and_si512(x, _mm512_set1_epi16(0x7FFF)));
        }
    }
    let [a, b, d, e] = maxima;
    let largest = _mm512_max_epu16(_mm512_max_epu16(a, b), _mm512_max_epu16(d, e));
    let infinity = _mm512_set1_epi16(infinity_bits(scaling.precision) as i16);
    let nan = _mm512_cmpgt_epi16_mask(largest, infinity);
    let bytes = six(scaling, _mm512_maskz_mov_epi16(!nan, largest));
    // SAFETY: the destination is an array of 32 bytes.
    unsafe { _mm256_storeu_si256(scales.as_mut_ptr().cast(), _mm512_cvtepi16_epi8(bytes)) };
    let mode = &scaling.mode;
    let words = match mode.profile.code_specials(mode.specials) == Specials::Kernel {
        true => code_words::<true>(rows, bytes, cuts),
        false => code_words::<false>(rows, bytes, cuts),
    };
    let (a, b) = (_mm512_unpacklo_epi16(words[0], words[1]), _mm512_unpackhi_epi16(words[0], words[1]));
    let (d, e) = (_mm512_unpacklo_epi16(words[2], words[3]), _mm512_unpackhi_epi16(words[2], words[3]));
    let quads = [
        _mm512_unpacklo_epi32(a, d),
        _mm512_unpackhi_epi32(a, d),
        _mm512_unpacklo_epi32(b, e),
        _mm512_unpackhi_epi32(b, e),
    ];
    for (out, quads) in codes.iter_mut().zip(quads) {
        // SAFETY: the destination is an array of 64 bytes.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), quads) };
    }
    if nan != 0 {
        decide(rows, nan, scaling, codes, scales);
    }
}

/// The scale bytes of 32 columns as words, from the bits of their largest magnitudes. Twin of
/// [`Scaling::block_scale`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
#[inline]
fn six(scaling: &Scaling, largest: __m512i) -> __m512i {
    if scaling.mode.profile != Profile::TransformerEngine {
        // SAFETY: a vector is 32 words of plain bits.
        let bits: [u16; PIECE] = unsafe { std::mem::transmute(largest) };
        let scales = bits.map(|b| u16::from(scaling.block_scale(value_of(u32::from(b), scaling.precision))));
        // SAFETY: as above.
        return unsafe { std::mem::transmute::<[u16; PIECE], __m512i>(scales) };
    }
    let multiplier = _mm512_set1_ps(scaling.global.encode * SIXTH);
    let sixteen = |bits: __m256i| {
        let values = values_of(bits, scaling.precision);
        _mm512_cvtepi32_epi16(e4m3_codes(_mm512_mul_ps(values, multiplier)))
    };
    let (low, high) = (_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64::<1>(largest));
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(sixteen(low)), sixteen(high))
}

/// 16 magnitudes' bits of a 16-bit type as values. Twin of [`value_of`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
#[inline]
pub(super) fn values_of(bits: __m256i, precision: Precision) -> __m512 {
    match precision {
        Precision::F16 => _mm512_cvtph_ps(bits),
        Precision::Bf16 | Precision::F32 => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits))),
    }
}

/// The E4M3 codes of 16 magnitudes, as doublewords. Not for NaN. Twin of
/// [`crate::avx2::small_float::codes`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
#[inline]
pub(super) fn e4m3_codes(a: __m512) -> __m512i {
    const SHIFT: i32 = 7 - e4m3::MANTISSA;
    let a = _mm512_min_ps(a, _mm512_set1_ps(e4m3::MAX));
    let exponent = _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7F80_0000));
    let exponent = _mm512_max_epi32(exponent, _mm512_set1_epi32(e4m3::MIN_NORMAL.to_bits() as i32));
    let power = _mm512_add_epi32(exponent, _mm512_set1_epi32((23 - e4m3::MANTISSA) << 23));
    let sum = _mm512_castps_si512(_mm512_add_ps(a, _mm512_castsi512_ps(power)));
    let shifted = _mm512_madd_epi16(sum, _mm512_set1_epi32(1 << 16 | 1 << SHIFT));
    let offset = _mm512_set1_epi32((e4m3::MIN_NORMAL.to_bits() >> 16) as i32 + ((23 - e4m3::MANTISSA) << 7));
    _mm512_srli_epi32::<{ SHIFT as u32 }>(_mm512_sub_epi32(shifted, offset))
}

/// Four rows' codes to a word, the first in the lowest bits. A code is the number of cuts below the
/// magnitude, found by bisection: three comparisons.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
#[inline]
fn code_words<const KEEP_ZERO_SIGN: bool>(rows: &Rows, scales: __m512i, cuts: &Cuts) -> [__m512i; 4] {
    let mut c = [_mm512_setzero_si512(); 8];
    for (k, cut) in c.iter_mut().enumerate() {
        *cut = cuts.of(k, scales);
    }
    let mut words = [_mm512_setzero_si512(); 4];
    for (word, four) in words.iter_mut().zip(rows.as_chunks::<4>().0) {
        for (place, &x) in four.iter().enumerate() {
            let a = _mm512_and_si512(x, _mm512_set1_epi16(0x7FFF));
            let four = _mm512_cmpgt_epi16_mask(a, c[3]);
            let two = _mm512_cmpgt_epi16_mask(a, _mm512_mask_blend_epi16(four, c[1], c[5]));
            let last = _mm512_mask_blend_epi16(
                two,
                _mm512_mask_blend_epi16(four, c[0], c[4]),
                _mm512_mask_blend_epi16(four, c[2], c[6]),
            );
            let one = _mm512_cmpgt_epi16_mask(a, last);
            let mut minus = _mm512_movepi16_mask(x);
            if !KEEP_ZERO_SIGN {
                minus = _mm512_mask_cmpgt_epi16_mask(minus, a, c[7]);
            }
            for (mask, bit) in [(minus, 8), (four, 4), (two, 2), (one, 1)] {
                // Subtracted, since the compiler makes two instructions of an addition.
                let minus_bit = _mm512_set1_epi16(-(bit << (4 * place)) as i16);
                *word = _mm512_mask_sub_epi16(*word, mask, *word, minus_bit);
            }
        }
    }
    words
}

/// The columns of a mask by the rule as written.
#[cold]
fn decide(rows: &Rows, mut mask: u32, scaling: &Scaling, codes: &mut [[[u8; 8]; 8]; 4], scales: &mut [u8; PIECE]) {
    // SAFETY: a vector is 32 words of plain bits.
    let rows: [[u16; PIECE]; BLOCK] = unsafe { std::mem::transmute(*rows) };
    while mask != 0 {
        let c = mask.trailing_zeros() as usize;
        mask &= mask - 1;
        let column = std::array::from_fn(|r| value_of(u32::from(rows[r][c]), scaling.precision));
        let q = block::quantize(&[column], scaling, Rounding::NearestEven);
        scales[c] = q.scale;
        let (i, j) = (c % 8 / 2, c / 8 * 2 + c % 2);
        for (byte, pair) in codes[i][j].iter_mut().zip(q.codes[0].as_chunks::<2>().0) {
            *byte = e2m1::pack(pair[0], pair[1]);
        }
    }
}
