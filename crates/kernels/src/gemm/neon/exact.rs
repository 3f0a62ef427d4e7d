//! NVFP4 × NVFP4. **Exact**: twin of [`nvfp4_spec::gemm`].
//!
//! E2M1 values doubled are integers of at most 12, so a block's 16 products add up in integers. A
//! block's term is that integer times both scales, at most 20 significant bits: exact in binary32.
//! Terms are added in binary64 over runs of 64 blocks, which is exact whatever the scales:
//! 64·2304·(448·2⁹)² < 2⁵³. Runs are added as integers.

use super::ROWS;
use crate::gemm::pieces::{in_pieces, rows_in_pieces};
use crate::gemm::writer::{MOST, Writer};
use crate::vector::Neon;
use nvfp4_spec::gemm::{Accumulate, Product, TERM_UNIT};
use nvfp4_spec::matrix::View;
use nvfp4_spec::{BLOCK, Element, e2m1, e4m3};
use rayon::prelude::*;
use std::arch::aarch64::*;
use std::arch::asm;

/// Four blocks of a row of A: even elements of two blocks in a vector, odd ones in another, as the
/// nibbles of B come; and the blocks' scales.
#[derive(Clone, Copy)]
#[repr(C)]
struct Four {
    even: [[i8; 16]; 2],
    odd: [[i8; 16]; 2],
    scales: [f32; 4],
}

/// Groups of four blocks in a run.
const RUN: usize = 16;

/// The product of two quantized matrices whose shapes were checked and which have elements.
pub(super) fn gemm<T: Element>(token: Neon, a: &View<'_>, b: &View<'_>, product: &Product<'_, T>, out: &mut [T]) {
    let rows: Vec<Vec<Four>> = rows_in_pieces(a.rows, a.cols).map(|i| fours(a, i)).collect();
    let writer = Writer::new((a.into(), b.into()), product, out);
    in_pieces(b.rows.div_ceil(MOST), MOST * a.rows * a.cols).for_each(|piece| {
        let first = piece * MOST;
        let width = MOST.min(b.rows - first);
        for (group, some) in rows.chunks(ROWS).enumerate() {
            let mut sums = [[0f32; MOST]; ROWS];
            for c in 0..width {
                // A short group repeats its last row; those sums are ignored.
                let some: [&[Four]; ROWS] = std::array::from_fn(|r| &some[r.min(some.len() - 1)][..]);
                let column = column(token, some, b, first + c, product.accumulate);
                sums.iter_mut().zip(column).for_each(|(sums, sum)| sums[c] = sum);
            }
            for (r, sums) in sums[..some.len()].iter().enumerate() {
                // SAFETY: a piece writes the columns of its own rows of B only.
                unsafe { writer.write(group * ROWS + r, first, &sums[..width]) };
            }
        }
    });
}

/// Row `i` of A, and zeros up to a whole group.
fn fours(a: &View<'_>, i: usize) -> Vec<Four> {
    let (codes, scales) = (a.code_row(i), a.scale_row(i));
    let doubled = |at: usize| if at < a.cols { (2.0 * e2m1::decode(e2m1::code_at(codes, at))) as i8 } else { 0 };
    // The elements of two blocks that are even, or odd.
    let elements = |block: usize, odd| std::array::from_fn(|e| doubled(block * BLOCK + 2 * e + odd));
    let four = |g: usize| Four {
        even: std::array::from_fn(|pair| elements(4 * g + 2 * pair, 0)),
        odd: std::array::from_fn(|pair| elements(4 * g + 2 * pair, 1)),
        scales: std::array::from_fn(|k| scales.get(4 * g + k).map_or(0.0, |&byte| e4m3::decode(byte))),
    };
    (0..scales.len().div_ceil(4)).map(four).collect()
}

/// The sums of row `j` of B with a few rows of A.
fn column(token: Neon, rows: [&[Four]; ROWS], b: &View<'_>, j: usize, accumulate: Accumulate) -> [f32; ROWS] {
    let (codes, scales) = (b.code_row(j), b.scale_row(j));
    let groups = rows[0].len();
    match accumulate {
        Accumulate::Reference => {
            let mut sums = [0f32; ROWS];
            // SAFETY: a Neon token is only made after detection; it says which products there are.
            unsafe { visit(token, rows, (codes, scales), 0..groups, &mut Reference(&mut sums)) };
            sums
        }
        Accumulate::Exact => {
            let mut totals = [Some(0i128); ROWS];
            for first in (0..groups).step_by(RUN) {
                let mut run = Exact::default();
                let range = first..groups.min(first + RUN);
                // SAFETY: as above.
                unsafe { visit(token, rows, (codes, scales), range, &mut run) };
                for (total, sum) in totals.iter_mut().zip(run.0) {
                    // Values were doubled on both sides. A sum that is NaN stays so.
                    let sum = (sum[0] + sum[1] + (sum[2] + sum[3])) * 0.25 / f64::from(TERM_UNIT);
                    *total = total.filter(|_| !sum.is_nan()).map(|total| total + i128::from(sum as i64));
                }
            }
            totals.map(|total| total.map_or(f32::NAN, |total| total as f32 * TERM_UNIT))
        }
    }
}

/// Adds up the terms of four blocks, for row `r` of A.
trait Terms {
    fn add(&mut self, r: usize, terms: float32x4_t);
}

/// In binary64: a lane has every fourth block.
#[derive(Default)]
struct Exact([[f64; 4]; ROWS]);

impl Terms for Exact {
    #[inline(always)]
    fn add(&mut self, r: usize, terms: float32x4_t) {
        // SAFETY: terms come from a function with NEON. A vector is plain bits.
        let lanes: [f32; 4] = unsafe { std::mem::transmute(terms) };
        for (sum, term) in self.0[r].iter_mut().zip(lanes) {
            *sum += f64::from(term);
        }
    }
}

/// In binary32, block after block.
struct Reference<'a>(&'a mut [f32; ROWS]);

impl Terms for Reference<'_> {
    #[inline(always)]
    fn add(&mut self, r: usize, terms: float32x4_t) {
        // SAFETY: as above.
        let lanes: [f32; 4] = unsafe { std::mem::transmute(terms) };
        for term in lanes {
            // Quartered: the values were doubled. Exact.
            self.0[r] += term * 0.25;
        }
    }
}

/// Visits the terms of a row of B, in groups of four blocks.
///
/// # Safety
///
/// The CPU must have NEON, as the token says.
unsafe fn visit(
    token: Neon,
    rows: [&[Four]; ROWS],
    b: (&[u8], &[u8]),
    groups: std::ops::Range<usize>,
    terms: &mut impl Terms,
) {
    match token.has_dotprod() {
        // SAFETY: the token says so.
        true => unsafe { by_dot_products(rows, b, groups, terms) },
        // SAFETY: the token says so.
        false => unsafe { by_words(rows, b, groups, terms) },
    }
}

/// The loop, for a way to multiply blocks.
macro_rules! visitor {
    ($name:ident, $features:literal, $dots:ident) => {
        #[target_feature(enable = $features)]
        fn $name(
            rows: [&[Four]; ROWS],
            (codes, scales): (&[u8], &[u8]),
            groups: std::ops::Range<usize>,
            terms: &mut impl Terms,
        ) {
            let rows = rows.map(|row| &row[groups.clone()]);
            for (k, g) in groups.enumerate() {
                let (low, high) = values(&codes[32 * g..]);
                let b_scales = decoded(&scales[4 * g..]);
                for r in 0..ROWS {
                    let a = &rows[r][k];
                    let dots = vcvtq_f32_s32($dots(low, high, a));
                    // SAFETY: the source is an array of 4 floats.
                    let a_scales = unsafe { vld1q_f32(a.scales.as_ptr()) };
                    terms.add(r, vmulq_f32(vmulq_f32(dots, b_scales), a_scales));
                }
            }
        }
    };
}

visitor!(by_dot_products, "neon,dotprod", dot_products);
visitor!(by_words, "neon", words);

/// The doubled values of four blocks: even and odd elements of two blocks each. What is missing at
/// the end of a row meets zeros of A.
#[target_feature(enable = "neon")]
#[inline]
fn values(codes: &[u8]) -> ([int8x16_t; 2], [int8x16_t; 2]) {
    const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
    let mut padded = [0; 32];
    let codes = match codes.first_chunk::<32>() {
        Some(codes) => codes,
        None => {
            padded[..codes.len()].copy_from_slice(codes);
            &padded
        }
    };
    // SAFETY: the source is an array of 16 bytes.
    let table = unsafe { vld1q_s8(DOUBLED.as_ptr()) };
    // SAFETY: the source has 32 bytes; these are the first.
    let first = unsafe { vld1q_u8(codes.as_ptr()) };
    // SAFETY: as above; these are the last.
    let second = unsafe { vld1q_u8(codes.as_ptr().add(16)) };
    let low = |x| vqtbl1q_s8(table, vandq_u8(x, vdupq_n_u8(15)));
    let high = |x| vqtbl1q_s8(table, vshrq_n_u8::<4>(x));
    ([low(first), low(second)], [high(first), high(second)])
}

/// The values of four scale bytes, or of what is left of them and zeros. Twin of [`e4m3::decode`].
#[target_feature(enable = "neon")]
#[inline]
fn decoded(scales: &[u8]) -> float32x4_t {
    let mut four = [0; 4];
    match scales.first_chunk::<4>() {
        Some(scales) => four = *scales,
        None => four[..scales.len()].copy_from_slice(scales),
    }
    let words = vmovl_u8(vcreate_u8(u64::from(u32::from_le_bytes(four))));
    let bytes = vmovl_u16(vget_low_u16(words));
    let magnitude = vandq_u32(bytes, vdupq_n_u32(0x7F));
    let sign = vshlq_n_u32::<24>(vbicq_u32(bytes, vdupq_n_u32(0x7F)));
    // Shifted into place the exponent is 120 too small; the product is exact and normalises
    // subnormals.
    let bits = vreinterpretq_f32_u32(vorrq_u32(vshlq_n_u32::<20>(magnitude), sign));
    let value = vmulq_f32(bits, vdupq_n_f32(f32::from_bits((127 + 120) << 23)));
    vbslq_f32(vceqq_u32(magnitude, vdupq_n_u32(0x7F)), vdupq_n_f32(f32::NAN), value)
}

#[target_feature(enable = "neon")]
#[inline]
fn load(x: &[i8; 16]) -> int8x16_t {
    // SAFETY: the source is an array of 16 bytes.
    unsafe { vld1q_s8(x.as_ptr()) }
}

/// Adds the products of four bytes to each lane. The compiler has no stable name for it yet.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn dot_product(sums: int32x4_t, x: int8x16_t, y: int8x16_t) -> int32x4_t {
    let mut sums = sums;
    // SAFETY: the instruction reads and writes these registers only, and the CPU has it.
    unsafe {
        asm!("sdot {s:v}.4s, {x:v}.16b, {y:v}.16b", s = inout(vreg) sums, x = in(vreg) x, y = in(vreg) y,
            options(pure, nomem, nostack, preserves_flags));
    }
    sums
}

/// The sums of four blocks, by dot products of four bytes.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn dot_products(low: [int8x16_t; 2], high: [int8x16_t; 2], a: &Four) -> int32x4_t {
    let pair = |i: usize| {
        let even = dot_product(vdupq_n_s32(0), low[i], load(&a.even[i]));
        dot_product(even, high[i], load(&a.odd[i]))
    };
    vpaddq_s32(pair(0), pair(1))
}

/// The sums of four blocks, by products of bytes in words: two of them are at most 288.
#[target_feature(enable = "neon")]
#[inline]
fn words(low: [int8x16_t; 2], high: [int8x16_t; 2], a: &Four) -> int32x4_t {
    let pair = |i: usize| {
        let (even, odd) = (load(&a.even[i]), load(&a.odd[i]));
        let first = vmull_s8(vget_low_s8(low[i]), vget_low_s8(even));
        let first = vmlal_s8(first, vget_low_s8(high[i]), vget_low_s8(odd));
        let second = vmlal_high_s8(vmull_high_s8(low[i], even), high[i], odd);
        vpaddq_s16(first, second)
    };
    vpaddlq_s16(vpaddq_s16(pair(0), pair(1)))
}
