//! Philox for sixteen blocks at once. Twin of [`crate::avx2::philox`].
//!
//! A word of a block has 64 bits here, of which the low half counts: a product is 64 bits, its low
//! word is where the next multiplication looks for it, and nothing is shuffled until the end.

use crate::avx512::Avx512;
use nvfp4_spec::BLOCK;
use nvfp4_spec::philox::{KEY_STEPS, MULTIPLIERS, ROUNDS, words};
use nvfp4_spec::stochastic::Stream;
use std::arch::x86_64::*;

/// The random bytes of consecutive blocks: block `first + i` of the stream at `out[i]`.
pub(in crate::quantize::avx2) fn fill(_: Avx512, stream: &Stream, first: u64, out: &mut [[u8; BLOCK]]) {
    // SAFETY: an Avx512 token is only made after detection.
    unsafe { sixteens(stream, stream.first_block.wrapping_add(first), out) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
fn sixteens(stream: &Stream, start: u64, out: &mut [[u8; BLOCK]]) {
    let mut keys = [words(stream.seed); ROUNDS];
    for i in 1..ROUNDS {
        keys[i] = [keys[i - 1][0].wrapping_add(KEY_STEPS[0]), keys[i - 1][1].wrapping_add(KEY_STEPS[1])];
    }
    let (whole, rest) = out.as_chunks_mut::<16>();
    let rest_at = start.wrapping_add(16 * whole.len() as u64);
    for (i, sixteen) in whole.iter_mut().enumerate() {
        sixteen_blocks(stream.offset, &keys, start.wrapping_add(16 * i as u64), sixteen);
    }
    if !rest.is_empty() {
        let mut sixteen = [[0; BLOCK]; 16];
        sixteen_blocks(stream.offset, &keys, rest_at, &mut sixteen);
        rest.copy_from_slice(&sixteen[..rest.len()]);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
#[inline]
fn sixteen_blocks(offset: u64, keys: &[[u32; 2]; ROUNDS], start: u64, out: &mut [[u8; BLOCK]; 16]) {
    let count = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    let offset = words(offset).map(|word| _mm512_set1_epi64(i64::from(word)));
    let multipliers = MULTIPLIERS.map(|m| _mm512_set1_epi64(i64::from(m)));
    let mut eights = [[_mm512_setzero_si512(); 4]; 2];
    for (i, c) in eights.iter_mut().enumerate() {
        let index = _mm512_add_epi64(count, _mm512_set1_epi64(start.wrapping_add(8 * i as u64) as i64));
        *c = [index, _mm512_srli_epi64::<32>(index), offset[0], offset[1]];
    }
    for key in keys {
        let key = key.map(|word| _mm512_set1_epi32(word as i32));
        for c in &mut eights {
            let products = [_mm512_mul_epu32(c[0], multipliers[0]), _mm512_mul_epu32(c[2], multipliers[1])];
            let high = products.map(|product| _mm512_srli_epi64::<32>(product));
            // The exclusive or of three.
            *c = [
                _mm512_ternarylogic_epi32::<0x96>(high[1], c[1], key[0]),
                products[1],
                _mm512_ternarylogic_epi32::<0x96>(high[0], c[3], key[1]),
                products[0],
            ];
        }
    }
    for (out, c) in out.as_chunks_mut::<8>().0.iter_mut().zip(eights) {
        let join = |low, high| _mm512_mask_blend_epi32(0xAAAA, low, _mm512_slli_epi64::<32>(high));
        let (a, b) = (join(c[0], c[1]), join(c[2], c[3]));
        let order = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
        for (i, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let order = _mm512_add_epi64(order, _mm512_set1_epi64(4 * i as i64));
            // SAFETY: the destination is four arrays of 16 bytes.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_permutex2var_epi64(a, order, b)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_testing::{Need, missing};

    #[test]
    fn blocks_are_those_of_the_stream() {
        let Some(token) = Avx512::detect() else { return missing(Need::Avx512, "the CPU has no AVX-512") };
        for first_block in [0, (1 << 32) - 5, u64::MAX - 20] {
            let stream = Stream { seed: 0x0123_4567_89AB_CDEF, offset: (7 << 32) + 5, first_block };
            for len in [1, 15, 16, 35] {
                let mut out = vec![[0; BLOCK]; len];
                fill(token, &stream, 3, &mut out);
                for (i, block) in out.into_iter().enumerate() {
                    assert_eq!(block, stream.block(3 + i as u64), "{first_block} {i}");
                }
            }
        }
    }
}
