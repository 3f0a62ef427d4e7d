//! The row direction of 16-bit elements, 32 of them a vector, under one amax: the rule "six" and
//! rounding to nearest.
//!
//! The cuts of a scale byte are more than 2^[`Lookup::shift`] apart, so that each bucket of that
//! many magnitudes above the first cut has one of them or none. An entry of a bucket has the code
//! of its first magnitudes in the high bits and, below, what is missing to the next code at the
//! cut: magnitude plus entry has the code in its high bits. That is one lookup and nine plain
//! operations for two blocks.

use super::codes::{e4m3_codes, values_of};
use super::largest_of_sixteen;
use crate::avx2::infinity_bits;
use crate::avx512::Avx512;
use crate::quantize::avx2::cuts::Table;
use crate::quantize::avx2::encode::{self, KEEP};
use nvfp4_spec::scale::SIXTH;
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::{BLOCK, Element, Precision, Profile, ScaleRule, Specials, e4m3};
use std::arch::x86_64::*;

/// Buckets of a scale byte.
const BUCKETS: usize = 32;
/// Where the code of an entry starts. Magnitudes above the first cut are smaller.
const CODE: u32 = 13;

/// The byte of NaN: no scale byte has entries.
const NONE: u8 = e4m3::NAN_BYTE;
/// With entries from this byte on, the value 1, most tensors use no smaller one.
const ENOUGH: u8 = 0x38;

/// Entries of one tensor, for all of its scale bytes. Also proof of AVX-512.
pub(in crate::quantize::avx2) struct Lookup {
    /// The scaling that the entries are of.
    scaling: Option<Scaling>,
    /// The smallest scale byte that has entries, as all above it have. The cuts of those below are
    /// among subnormal numbers, too close to each other.
    lowest: u8,
    entries: Box<[[u16; BUCKETS]; 128]>,
    /// The first cut, for all elements of a block.
    firsts: Box<[[u16; BLOCK]; 128]>,
}

impl Lookup {
    pub fn new(_: Avx512) -> Self {
        let (entries, firsts) = (Box::new([[0; BUCKETS]; 128]), Box::new([[0; BLOCK]; 128]));
        Lookup { scaling: None, lowest: NONE, entries, firsts }
    }

    /// Takes over the cuts of a table. Says whether [`Lookup::quantize`] can be called: the settings
    /// are those it has, and large scale bytes have entries.
    pub fn set<T: Element>(&mut self, table: &Table) -> bool {
        let scaling = table.scaling();
        if self.scaling != Some(*scaling) {
            let mode = &scaling.mode;
            self.scaling = Some(*scaling);
            let known = T::PRECISION != Precision::F32
                && mode.profile == Profile::TransformerEngine
                && mode.rule == ScaleRule::Six
                && mode.profile.code_specials(mode.specials) == Specials::Kernel
                && table.is_complete();
            let without = |this: &mut Self| (0..=e4m3::MAX_BYTE).rev().find(|&scale| !this.fill(scale, table));
            self.lowest = if known { without(self).map_or(0, |scale| scale + 1) } else { NONE };
        }
        self.lowest <= ENOUGH
    }

    /// Buckets have 2 to this power magnitudes.
    fn shift(precision: Precision) -> u32 {
        // 51 or 409 magnitudes are between the two cuts that are closest.
        if precision == Precision::F16 { 8 } else { 5 }
    }

    fn fill(&mut self, scale: u8, table: &Table) -> bool {
        let shift = Self::shift(table.scaling().precision);
        let index = usize::from(scale);
        let cuts = table.words(scale);
        self.firsts[index] = [cuts[0]; BLOCK];
        for (bucket, entry) in self.entries[index].iter_mut().enumerate() {
            let (first, last) = ((bucket as u16) << shift, (((bucket + 1) as u32) << shift) as u16 - 1);
            let above = |cut: &&u16| *cut - cuts[0] < first;
            let code = cuts[..7].iter().filter(above).count();
            let inside = cuts[code..7].iter().filter(|&cut| cut - cuts[0] < last).count();
            let cut = if inside == 0 { last } else { cuts[code] - cuts[0] };
            if inside > 1 || bucket == BUCKETS - 1 && code + inside < 7 {
                return false;
            }
            *entry = ((code as u16) << CODE) + ((1 << CODE) - 1 - cut);
        }
        true
    }

    /// Quantizes a row of blocks; blocks with NaN are added to `undecided`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
    pub fn quantize<T: Element>(
        &self,
        row: &[[T; BLOCK]],
        table: &Table,
        scales: &mut [u8],
        codes: &mut [u8],
        undecided: &mut Vec<usize>,
    ) {
        let (sixteens, rest) = row.as_chunks::<16>();
        let first_of_rest = 16 * sixteens.len();
        for (i, x) in sixteens.iter().enumerate() {
            let scales: &mut [u8; 16] = (&mut scales[16 * i..][..16]).try_into().expect("16 blocks");
            self.scales::<T>(x, 16 * i, table.scaling(), scales, undecided);
        }
        if !rest.is_empty() {
            let mut padded = [[T::default(); BLOCK]; 16];
            padded[..rest.len()].copy_from_slice(rest);
            let mut bytes = [0; 16];
            self.scales::<T>(&padded, first_of_rest, table.scaling(), &mut bytes, undecided);
            scales[first_of_rest..].copy_from_slice(&bytes[..rest.len()]);
        }
        let (eights, rest) = row.as_chunks::<8>();
        for (i, x) in eights.iter().enumerate() {
            let out: &mut [u8; 64] = (&mut codes[64 * i..][..64]).try_into().expect("eight blocks");
            let scales: [u8; 8] = scales[8 * i..][..8].try_into().expect("eight blocks");
            match scales.iter().any(|&scale| scale < self.lowest) {
                true => encode::nearest::<T, KEEP>(x, &scales, table, out),
                false => self.codes::<T>(x, u64::from_le_bytes(scales), out),
            }
        }
        let done = 8 * eights.len();
        encode::nearest::<T, KEEP>(rest, &scales[done..], table, &mut codes[done * BLOCK / 2..]);
    }

    /// The scale bytes of 16 blocks, the first of which has index `first`. A block with NaN is
    /// undecided.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
    #[inline]
    fn scales<T: Element>(
        &self,
        x: &[[T; BLOCK]; 16],
        first: usize,
        scaling: &Scaling,
        scales: &mut [u8; 16],
        undecided: &mut Vec<usize>,
    ) {
        let mut pairs = [_mm512_setzero_si512(); 8];
        for (pair, x) in pairs.iter_mut().zip(x.as_chunks::<2>().0) {
            *pair = _mm512_and_si512(two_blocks(&x[0], &x[1]), _mm512_set1_epi16(0x7FFF));
        }
        let mut largest = largest_of_sixteen(pairs);
        let infinity = _mm256_set1_epi16(infinity_bits(T::PRECISION) as i16);
        let mut nan = _mm256_cmpgt_epi16_mask(largest, infinity);
        largest = _mm256_maskz_mov_epi16(!nan, largest);
        while nan != 0 {
            undecided.push(first + nan.trailing_zeros() as usize);
            nan &= nan - 1;
        }
        let multiplier = _mm512_set1_ps(scaling.global.encode * SIXTH);
        let bytes = e4m3_codes(_mm512_mul_ps(values_of(largest, T::PRECISION), multiplier));
        // SAFETY: the destination is an array of 16 bytes.
        unsafe { _mm_storeu_si128(scales.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(bytes)) };
    }

    /// The codes of eight blocks.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
    #[inline]
    fn codes<T: Element>(&self, x: &[[T; BLOCK]; 8], scales: u64, out: &mut [u8; 64]) {
        let mut words = [_mm512_setzero_si512(); 4];
        for (i, word) in words.iter_mut().enumerate() {
            let (s, t) = ((scales >> (16 * i)) as usize & 127, (scales >> (16 * i + 8)) as usize & 127);
            *word = self.two::<T>(two_blocks(&x[2 * i], &x[2 * i + 1]), s, t);
        }
        let weights = _mm512_set1_epi16(0x1001);
        let pair = |a, b| _mm512_maddubs_epi16(_mm512_packus_epi16(a, b), weights);
        let bytes = _mm512_packus_epi16(pair(words[0], words[1]), pair(words[2], words[3]));
        // The packs work on quarters of registers, so the quarters come out interleaved.
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        let bytes = _mm512_permutexvar_epi32(order, bytes);
        // SAFETY: the destination is an array of 64 bytes.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), bytes) };
    }

    /// The codes of two blocks with these scale bytes, as words.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
    #[inline]
    fn two<T: Element>(&self, x: __m512i, s: usize, t: usize) -> __m512i {
        // SAFETY: the source is an array of 32 words.
        let entries = |scale: usize| unsafe { _mm512_loadu_si512(self.entries[scale].as_ptr().cast()) };
        let firsts = two_blocks(&self.firsts[s], &self.firsts[t]);
        let above = _mm512_subs_epu16(_mm512_and_si512(x, _mm512_set1_epi16(0x7FFF)), firsts);
        let shift = Self::shift(T::PRECISION);
        let above = _mm512_min_epu16(above, _mm512_set1_epi16(((BUCKETS << shift) - 1) as i16));
        let buckets = _mm512_srl_epi16(above, _mm_cvtsi32_si128(shift as i32));
        // The second half of the lanes looks at the second block's entries.
        let second = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi16(BUCKETS as i16));
        let found = _mm512_permutex2var_epi16(entries(s), _mm512_or_si512(buckets, second), entries(t));
        let codes = _mm512_srli_epi16::<CODE>(_mm512_add_epi16(above, found));
        let signs = _mm512_srli_epi16::<12>(x);
        // codes | (signs & 8)
        _mm512_ternarylogic_epi32::<0xF8>(codes, signs, _mm512_set1_epi16(8))
    }
}

/// Two blocks of a 16-bit type, which need not lie side by side.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
#[inline]
fn two_blocks<T: Copy>(a: &[T; BLOCK], b: &[T; BLOCK]) -> __m512i {
    assert!(size_of::<T>() == 2);
    // SAFETY: 16 elements of 2 bytes are one vector.
    let a = unsafe { _mm256_loadu_si256(a.as_ptr().cast()) };
    // SAFETY: as above.
    let b = unsafe { _mm256_loadu_si256(b.as_ptr().cast()) };
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_spec::Mode;
    use nvfp4_testing::{Need, missing};

    /// Every magnitude under every scale byte, against the cuts.
    #[test]
    fn a_lookup_counts_cuts() {
        let Some(token) = Avx512::detect() else { return missing(Need::Avx512, "the CPU has no AVX-512") };
        for amax in [0.37, 1.0, 6.0, 448.0, 2688.0, 1e4] {
            check::<half::bf16>(token, amax);
            check::<half::f16>(token, amax);
        }
    }

    fn check<T: Element>(token: Avx512, amax: f32) {
        let scaling = Scaling::new(amax, &Mode::default(), T::PRECISION);
        // SAFETY: the token holds the one of AVX2, which is only made after detection.
        let mut table = unsafe { Table::new(&scaling) };
        // SAFETY: as above.
        unsafe { table.set::<T>(&scaling) };
        let mut lookup = Lookup::new(token);
        assert!(lookup.set::<T>(&table), "{amax}");
        assert!(lookup.lowest == 1 || T::PRECISION == Precision::F16, "{amax}: {}", lookup.lowest);
        let shift = Lookup::shift(T::PRECISION);
        for scale in lookup.lowest..=e4m3::MAX_BYTE {
            let (cuts, entries) = (table.words(scale), &lookup.entries[usize::from(scale)]);
            for a in 0..=infinity_bits(T::PRECISION) as u16 {
                let above = a.saturating_sub(lookup.firsts[usize::from(scale)][0]).min((BUCKETS << shift) as u16 - 1);
                let code = (above + entries[usize::from(above >> shift)]) >> CODE;
                assert_eq!(usize::from(code), cuts[..7].iter().filter(|&&cut| a > cut).count(), "{scale:#x} {a:#x}");
            }
        }
    }
}
