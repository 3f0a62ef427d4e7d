//! The 4over6 choice for sixteen tiles at once. Twin of [`crate::quantize::avx2::four_over_six`],
//! which has the bound: a lane adds at most 32 terms here too, and the lanes add up in 3 more steps.

use super::codes::{e4m3_codes, values_of};
use super::direct::{Pair, RAISED, UNIT, first, inverse, of_pair, rounder, scaled, values_of_bytes};
use crate::avx512::Avx512;
use crate::quantize::avx2::four_over_six::{LARGEST, OF_ERRORS, RANGE, Tiles, of_factors, unit};
use nvfp4_spec::scale::Global;
use nvfp4_spec::{BLOCK, Element, ErrorPath, Precision, e4m3};
use std::arch::x86_64::*;

/// Chooses between six and four for tiles whose largest magnitudes have these bits; tiles that the
/// filter cannot decide are added to `undecided`.
pub(in crate::quantize::avx2) fn choose<T: Element, const MAE: bool>(
    _: Avx512,
    (global, error): (&Global, ErrorPath),
    magnitudes: &[u32],
    tiles: &Tiles<'_, T>,
    scales: &mut [u8],
    undecided: &mut Vec<usize>,
) {
    for b in (0..tiles.count).step_by(16) {
        let count = 16.min(tiles.count - b);
        let sixteen = Tiles { data: &tiles.data[b * BLOCK..], count, ..*tiles };
        let (bits, scales) = (&magnitudes[b..][..count], &mut scales[b..][..count]);
        // SAFETY: an Avx512 token is only made after detection.
        let mut left = unsafe { choose_sixteen::<T, MAE>(global, error, bits, &sixteen, scales) };
        while left != 0 {
            undecided.push(b + left.trailing_zeros() as usize);
            left &= left - 1;
        }
    }
}

/// Chooses for up to 16 tiles. Says which ones are undecided.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn choose_sixteen<T: Element, const MAE: bool>(
    global: &Global,
    error: ErrorPath,
    magnitudes: &[u32],
    tiles: &Tiles<'_, T>,
    out: &mut [u8],
) -> u16 {
    let exist = first(tiles.count);
    assert!(magnitudes.len() == tiles.count && out.len() == tiles.count);
    // SAFETY: the mask has as many bits as there are doublewords.
    let bits = unsafe { _mm512_maskz_loadu_epi32(exist, magnitudes.as_ptr().cast()) };
    let amax = match T::PRECISION {
        Precision::F32 => _mm512_castsi512_ps(bits),
        narrow => values_of(_mm512_cvtepi32_epi16(bits), narrow),
    };
    let base = _mm512_mul_ps(_mm512_div_ps(amax, _mm512_set1_ps(6.0)), _mm512_set1_ps(global.encode));
    let scales = [e4m3_codes(base), e4m3_codes(_mm512_mul_ps(base, _mm512_set1_ps(1.5)))];
    let unit = unit(global, error);
    let mut filtered = exist;
    let (mut inverses, mut factors) = ([_mm512_setzero_ps(); 2], [_mm512_setzero_ps(); 2]);
    for c in 0..2 {
        let value = values_of_bytes(scales[c]);
        inverses[c] = inverse(value, global);
        factors[c] = _mm512_mul_ps(value, _mm512_set1_ps(unit));
        filtered &= _mm512_cmpge_epi32_mask(scales[c], _mm512_set1_epi32(i32::from(e4m3::MIN_NORMAL_BYTE)));
        filtered &= _mm512_cmp_ps_mask::<_CMP_GE_OQ>(factors[c], _mm512_set1_ps(RANGE[0]));
        filtered &= _mm512_cmp_ps_mask::<_CMP_LE_OQ>(factors[c], _mm512_set1_ps(RANGE[1]));
        filtered &= _mm512_cmp_ps_mask::<_CMP_LE_OQ>(_mm512_mul_ps(amax, inverses[c]), _mm512_set1_ps(LARGEST));
    }
    let [six, four] = errors::<T, MAE>(tiles, inverses, factors);

    let mut bound = _mm512_mul_ps(_mm512_set1_ps(OF_ERRORS), _mm512_add_ps(six, four));
    let weight = of_factors(MAE, tiles.height);
    for f in factors {
        let f = if MAE { f } else { _mm512_mul_ps(f, f) };
        bound = _mm512_fmadd_ps(f, _mm512_set1_ps(weight), bound);
    }
    let bound = _mm512_mul_ps(bound, _mm512_set1_ps(f32::EPSILON / 2.0));
    let difference = _mm512_sub_ps(four, six);
    let four_wins = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(difference, _mm512_sub_ps(_mm512_setzero_ps(), bound));
    let six_wins = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(difference, bound);
    // Equal scale bytes tie, and a tie is six.
    let equal = _mm512_cmpeq_epi32_mask(scales[0], scales[1]);
    let bytes = _mm512_cvtepi32_epi8(_mm512_mask_blend_epi32(four_wins, scales[0], scales[1]));
    // SAFETY: the mask has as many bits as there are bytes.
    unsafe { _mm_mask_storeu_epi8(out.as_mut_ptr().cast(), exist, bytes) };
    exist & !(equal | filtered & (four_wins | six_wins))
}

/// The filtered errors of 16 tiles: of six, of four.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn errors<T: Element, const MAE: bool>(
    tiles: &Tiles<'_, T>,
    inverses: [__m512; 2],
    factors: [__m512; 2],
) -> [__m512; 2] {
    let inverses = inverses.map(|inverse| _mm512_mul_ps(inverse, _mm512_set1_ps(UNIT)));
    // Rounded magnitudes come out as RAISED times their value in units of UNIT.
    let factors = factors.map(|factor| _mm512_mul_ps(factor, _mm512_set1_ps(1.0 / (UNIT * RAISED))));
    let (mut six, mut four) = ([_mm512_setzero_ps(); 8], [_mm512_setzero_ps(); 8]);
    for (k, (six, four)) in six.iter_mut().zip(&mut four).enumerate().take(tiles.count.div_ceil(2)) {
        let inverse = [of_pair(inverses[0], k), of_pair(inverses[1], k)];
        let factor = [of_pair(factors[0], k), of_pair(factors[1], k)];
        let mut sum = [_mm512_setzero_ps(); 2];
        for r in 0..tiles.height {
            let row = &tiles.data[r * tiles.stride + 2 * k * BLOCK..][..BLOCK * 2.min(tiles.count - 2 * k)];
            let pair = Pair::load(row.as_chunks::<BLOCK>().0);
            for x in pair.values {
                for c in 0..2 {
                    let y = scaled(x, inverse[c]);
                    let added = rounder(y);
                    let q = _mm512_sub_ps(_mm512_fmadd_ps(y, _mm512_set1_ps(RAISED), added), added);
                    let e = _mm512_fmsub_ps(q, factor[c], x);
                    sum[c] = match MAE {
                        true => _mm512_add_ps(sum[c], _mm512_abs_ps(e)),
                        false => _mm512_fmadd_ps(e, e, sum[c]),
                    };
                }
            }
        }
        [*six, *four] = sum;
    }
    [sum_of_each(&six), sum_of_each(&four)]
}

/// The sums of halves of vectors, eight lanes each.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn sum_of_each(pairs: &[__m512; 8]) -> __m512 {
    // Tiles 4i to 4i + 3 in the quarters of fours[i].
    let mut fours = [_mm512_setzero_ps(); 4];
    for (four, p) in fours.iter_mut().zip(pairs.as_chunks::<2>().0) {
        let (low, high) = (_mm512_shuffle_f32x4::<0x88>(p[0], p[1]), _mm512_shuffle_f32x4::<0xDD>(p[0], p[1]));
        *four = _mm512_add_ps(low, high);
    }
    let halve = |x, y| _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    let (x, y) = (halve(fours[0], fours[1]), halve(fours[2], fours[3]));
    let (x, y) = (_mm512_castps_pd(x), _mm512_castps_pd(y));
    let (low, high) = (_mm512_unpacklo_pd(x, y), _mm512_unpackhi_pd(x, y));
    let sums = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    // Tile 4i + j is lane i of quarter j.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_ps(order, sums)
}
