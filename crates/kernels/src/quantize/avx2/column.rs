//! Columns of a panel as rows: the transposed input, Hadamard-transformed if asked. Twin of
//! [`nvfp4_spec::matrix::columns`].

use crate::avx2::{Block, high_halves, load, round_bits, round_or_nan, store, widen, zero};
use crate::vector::*;
use half::bf16;
use nvfp4_spec::hadamard::{FACTOR, Signs};
use nvfp4_spec::{BLOCK, Element, Precision};

/// A submatrix: `rows` × `cols` elements, rows `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct Submatrix<'a, T> {
    pub data: &'a [T],
    pub stride: usize,
    pub rows: usize,
    pub cols: usize,
}

impl<'a, T: Element> Submatrix<'a, T> {
    /// Hands pieces of 16 rows and `WIDTH` columns to `visit`, with the position of their first
    /// element. A ragged one comes as a copy, padded with zeros.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[inline]
    pub fn for_each_piece<const WIDTH: usize>(&self, mut visit: impl FnMut(usize, usize, &[T], usize)) {
        for r in (0..self.rows).step_by(BLOCK) {
            for c in (0..self.cols).step_by(WIDTH) {
                let (height, width) = (BLOCK.min(self.rows - r), WIDTH.min(self.cols - c));
                if height == BLOCK && width == WIDTH {
                    visit(r, c, &self.data[r * self.stride + c..], self.stride);
                    continue;
                }
                let mut padded = [[T::default(); WIDTH]; BLOCK];
                for (i, out) in padded.iter_mut().enumerate().take(height) {
                    let row = &self.data[(r + i) * self.stride + c..][..width];
                    out[..width].copy_from_slice(row);
                }
                visit(r, c, padded.as_flattened(), WIDTH);
            }
        }
    }
}

/// Writes the columns as rows of `pitch` elements, zeros behind the last. `pitch` is the number of
/// rows rounded up to 16, and `out` has room for the number of columns rounded up to 16.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(super) fn transpose<T: Element>(x: &Submatrix<'_, T>, pitch: usize, out: &mut [T]) {
    x.for_each_piece::<BLOCK>(|r, c, square, stride| {
        transpose_square(square, stride, pitch, &mut out[c * pitch + r..])
    });
}

/// The same for the transformed columns.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(super) fn transpose_hadamard<T: Element>(x: &Submatrix<'_, T>, signs: Signs, pitch: usize, out: &mut [bf16]) {
    let flips = flips::<T>(signs);
    let mut rows = [[bf16::ZERO; BLOCK]; BLOCK];
    x.for_each_piece::<BLOCK>(|r, c, square, stride| {
        let left = hadamard::<T, 0>(square, stride, &flips);
        let right = hadamard::<T, 1>(square, stride, &flips);
        let quarter = _mm256_set1_ps(FACTOR);
        let mut unordered = _mm256_setzero_ps();
        for j in 0..BLOCK {
            let (a, b) = (_mm256_mul_ps(left[j], quarter), _mm256_mul_ps(right[j], quarter));
            unordered = _mm256_or_ps(unordered, _mm256_cmp_ps::<_CMP_UNORD_Q>(a, b));
            store(join_bf16::<T>(round_bits(a), round_bits(b)), &mut rows[j]);
        }
        if _mm256_movemask_ps(unordered) != 0 {
            // Rounding the bits of a NaN may carry into the sign; here it is kept a NaN.
            for j in 0..BLOCK {
                let (a, b) = (_mm256_mul_ps(left[j], quarter), _mm256_mul_ps(right[j], quarter));
                store(join_bf16::<T>(round_or_nan(a), round_or_nan(b)), &mut rows[j]);
            }
        }
        transpose_square(rows.as_flattened(), BLOCK, pitch, &mut out[c * pitch + r..]);
    });
}

/// The largest magnitudes of the transformed columns before the factor 1/4 and the rounding to
/// bf16, joined with those in `maxima`. That of column `c` is at [`maximum_of`] it; there is room
/// for a multiple of 16 columns. NaN is passed over; the result says whether there was one.
///
/// Factor and rounding are monotone, so the largest result is that of the largest value; they are
/// left to the caller.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(super) fn hadamard_maxima<T: Element>(x: &Submatrix<'_, T>, signs: Signs, maxima: &mut [f32]) -> bool {
    let flips = flips::<T>(signs);
    let mut nan = false;
    x.for_each_piece::<BLOCK>(|_, c, square, stride| {
        let (left, right) = maxima[c..][..BLOCK].split_at_mut(8);
        nan |= join_maxima(hadamard::<T, 0>(square, stride, &flips), left);
        nan |= join_maxima(hadamard::<T, 1>(square, stride, &flips), right);
    });
    nan
}

/// Where [`hadamard_maxima`] keeps the maximum of a column.
pub(super) fn maximum_of<T: Element>(column: usize) -> usize {
    let (square, c) = (column / BLOCK * BLOCK, column % BLOCK);
    match T::PRECISION {
        Precision::Bf16 => square + c / 2 + c % 2 * 8,
        Precision::F32 | Precision::F16 => column,
    }
}

/// Joins the magnitudes of 16 transformed rows with the maxima of their eight columns; whether one
/// was NaN.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn join_maxima(rows: [__m256; BLOCK], maxima: &mut [f32]) -> bool {
    let maxima: &mut [f32; 8] = maxima.try_into().expect("eight columns");
    // SAFETY: the source is an array of 8 floats.
    let mut m = unsafe { _mm256_loadu_ps(maxima.as_ptr()) };
    let mut unordered = _mm256_setzero_ps();
    for pair in rows.as_chunks::<2>().0 {
        unordered = _mm256_or_ps(unordered, _mm256_cmp_ps::<_CMP_UNORD_Q>(pair[0], pair[1]));
        for &x in pair {
            // The second operand is what comes out where one is NaN.
            m = _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0), x), m);
        }
    }
    // SAFETY: the destination is an array of 8 floats.
    unsafe { _mm256_storeu_ps(maxima.as_mut_ptr(), m) };
    _mm256_movemask_ps(unordered) != 0
}

/// The butterflies of eight columns of a square, one half (0) or the other (1), before the factor
/// 1/4. Twin of [`nvfp4_spec::hadamard::transform`]: the same additions in the same order, a row
/// per vector.
///
/// The halves of bf16 are the even and the odd columns, which become binary32 by a shift or a mask
/// alone.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn hadamard<T: Element, const HALF: usize>(square: &[T], stride: usize, flips: &[Block; BLOCK]) -> [__m256; BLOCK] {
    let mut v = [_mm256_setzero_ps(); BLOCK];
    for i in 0..BLOCK {
        let row = square[i * stride..].first_chunk().expect("a square has 16 columns");
        let x = load::<T>(row).xor(flips[i]);
        v[i] = match (T::PRECISION, HALF) {
            (Precision::Bf16, 0) => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x.words())),
            (Precision::Bf16, _) => {
                _mm256_castsi256_ps(_mm256_and_si256(x.words(), _mm256_set1_epi32(0xFFFF_0000u32 as i32)))
            }
            _ => widen::<T>(x)[HALF],
        };
    }
    stage::<1>(&mut v);
    stage::<2>(&mut v);
    stage::<4>(&mut v);
    stage::<8>(&mut v);
    v
}

/// The bits of 16 bf16 values in the high halves of two vectors, halves as in [`hadamard`], as a
/// block.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn join_bf16<T: Element>(a: __m256i, b: __m256i) -> Block {
    Block::of_words(match T::PRECISION {
        Precision::Bf16 => _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(a), b),
        Precision::F32 | Precision::F16 => high_halves(a, b),
    })
}

/// The sign bit for the rows that change sign, nothing for the others.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn flips<T: Element>(signs: Signs) -> [Block; BLOCK] {
    let mut flips = [zero(); BLOCK];
    for (i, flip) in flips.iter_mut().enumerate() {
        if signs.negates(i) {
            *flip = load(&[T::from_f32(-0.0); BLOCK]);
        }
    }
    flips
}

/// One stage of butterflies. The distance is a constant so that the loop unrolls and the vectors
/// stay in registers.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn stage<const DISTANCE: usize>(v: &mut [__m256; BLOCK]) {
    for i in 0..BLOCK {
        if i & DISTANCE == 0 {
            let (a, b) = (v[i], v[i + DISTANCE]);
            v[i] = _mm256_add_ps(a, b);
            v[i + DISTANCE] = _mm256_sub_ps(a, b);
        }
    }
}

/// Transposes 16 × 16 elements.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn transpose_square<T: Element>(x: &[T], stride: usize, pitch: usize, out: &mut [T]) {
    match T::PRECISION {
        Precision::F32 => {
            for (r, c) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
                transpose_8x8(&x[r * stride + c..], stride, pitch, &mut out[c * pitch + r..]);
            }
        }
        Precision::Bf16 | Precision::F16 => {
            // One check for all rows, so that the loads and stores below need none.
            assert!(x.len() >= 15 * stride + BLOCK && out.len() >= 15 * pitch + BLOCK && size_of::<T>() == 2);
            for c in [0, 8] {
                // SAFETY: rows 0–15 have 16 elements from their start on.
                let columns = unsafe { eight_columns(x.as_ptr().add(c).cast(), stride) };
                for (k, column) in columns.into_iter().enumerate() {
                    // SAFETY: columns 0–15 have room for 16 elements.
                    unsafe { _mm256_storeu_si256(out.as_mut_ptr().add((c + k) * pitch).cast(), column) };
                }
            }
        }
    }
}

/// Sixteen rows of eight two-byte elements as eight columns. Rows `i` and `i + 8` share a vector,
/// so that transposing both halves as 8 × 8 elements leaves a whole column in each.
///
/// # Safety
///
/// Eight elements must be readable at `x` and at each of the 15 rows that follow, `stride` elements
/// apart.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
unsafe fn eight_columns(x: *const u16, stride: usize) -> [__m256i; 8] {
    let mut r = [_mm256_setzero_si256(); 8];
    for (i, row) in r.iter_mut().enumerate() {
        // SAFETY: the caller vouches for row i.
        let low = unsafe { _mm_loadu_si128(x.add(i * stride).cast()) };
        // SAFETY: the caller vouches for row i + 8.
        let high = unsafe { _mm_loadu_si128(x.add((i + 8) * stride).cast()) };
        *row = _mm256_set_m128i(high, low);
    }
    let mut pairs = r;
    for i in 0..4 {
        pairs[i] = _mm256_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
        pairs[i + 4] = _mm256_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
    }
    // pairs[0..4] hold columns 0–3 of rows (0,1), (2,3), (4,5), (6,7); pairs[4..8] columns 4–7.
    let mut out = r;
    for half in 0..2 {
        let p = &pairs[4 * half..];
        let top = [_mm256_unpacklo_epi32(p[0], p[1]), _mm256_unpackhi_epi32(p[0], p[1])];
        let bottom = [_mm256_unpacklo_epi32(p[2], p[3]), _mm256_unpackhi_epi32(p[2], p[3])];
        for i in 0..2 {
            out[4 * half + 2 * i] = _mm256_unpacklo_epi64(top[i], bottom[i]);
            out[4 * half + 2 * i + 1] = _mm256_unpackhi_epi64(top[i], bottom[i]);
        }
    }
    out
}

/// Transposes 8 × 8 four-byte elements.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn transpose_8x8<T: Element>(x: &[T], stride: usize, pitch: usize, out: &mut [T]) {
    let mut r = [_mm256_setzero_si256(); 8];
    for (i, row) in r.iter_mut().enumerate() {
        *row = load_vector(&x[i * stride..][..8]);
    }
    let mut quads = r;
    for half in 0..2 {
        let r = &r[4 * half..];
        let (a, b) = (_mm256_unpacklo_epi32(r[0], r[1]), _mm256_unpackhi_epi32(r[0], r[1]));
        let (c, d) = (_mm256_unpacklo_epi32(r[2], r[3]), _mm256_unpackhi_epi32(r[2], r[3]));
        quads[4 * half] = _mm256_unpacklo_epi64(a, c);
        quads[4 * half + 1] = _mm256_unpackhi_epi64(a, c);
        quads[4 * half + 2] = _mm256_unpacklo_epi64(b, d);
        quads[4 * half + 3] = _mm256_unpackhi_epi64(b, d);
    }
    for i in 0..4 {
        let low = _mm256_permute2x128_si256::<0x20>(quads[i], quads[i + 4]);
        let high = _mm256_permute2x128_si256::<0x31>(quads[i], quads[i + 4]);
        store_vector(low, &mut out[i * pitch..][..8]);
        store_vector(high, &mut out[(4 + i) * pitch..][..8]);
    }
}

/// Loads elements that fill a vector.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn load_vector<T: Element>(x: &[T]) -> __m256i {
    assert_eq!(size_of_val(x), size_of::<__m256i>());
    // SAFETY: the slice is as large as a vector.
    unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
}

/// Stores elements that fill a vector.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn store_vector<T: Element>(x: __m256i, out: &mut [T]) {
    assert_eq!(size_of_val(out), size_of::<__m256i>());
    // SAFETY: the slice is as large as a vector, and any bits are elements.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), x) };
}
