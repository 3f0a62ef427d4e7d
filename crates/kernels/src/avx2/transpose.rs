//! Transposes bytes: the codes of FP8, the scale bytes of NVFP4.

use crate::vector::*;

/// Rows and columns that are transposed at a time.
const SQUARE: usize = 16;

/// Bytes in rows, `stride` apart.
#[derive(Clone, Copy)]
pub(crate) struct Bytes<'a> {
    pub data: &'a [u8],
    pub stride: usize,
    pub rows: usize,
    pub cols: usize,
}

/// Writes the columns as rows of `pitch` bytes. `pitch` is at least the number of rows rounded up
/// to 16, and `out` has room for the number of columns rounded up to 16.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(crate) fn transpose(x: Bytes<'_>, pitch: usize, out: &mut [u8]) {
    for c in (0..x.cols).step_by(SQUARE) {
        for r in (0..x.rows).step_by(SQUARE) {
            let (height, width) = (SQUARE.min(x.rows - r), SQUARE.min(x.cols - c));
            let out = &mut out[c * pitch + r..];
            if height == SQUARE && width == SQUARE {
                transpose_square(&x.data[r * x.stride + c..], x.stride, pitch, out);
                continue;
            }
            let mut padded = [0; SQUARE * SQUARE];
            for i in 0..height {
                padded[i * SQUARE..][..width].copy_from_slice(&x.data[(r + i) * x.stride + c..][..width]);
            }
            transpose_square(&padded, SQUARE, pitch, out);
        }
    }
}

/// Transposes 16 × 16 bytes. Rows `i` and `i + 8` share a vector; three rounds of unpacking leave
/// eight rows of two columns in each half, and the halves of a column only have to be put side by
/// side.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn transpose_square(x: &[u8], stride: usize, pitch: usize, out: &mut [u8]) {
    // One check for all rows, so that the loads and stores below need none.
    assert!(x.len() >= 15 * stride + SQUARE && out.len() >= 15 * pitch + SQUARE);
    let mut r = [_mm256_setzero_si256(); 8];
    for (i, row) in r.iter_mut().enumerate() {
        // SAFETY: rows 0–15 have 16 bytes from their start on.
        let low = unsafe { _mm_loadu_si128(x.as_ptr().add(i * stride).cast()) };
        // SAFETY: as above.
        let high = unsafe { _mm_loadu_si128(x.as_ptr().add((i + 8) * stride).cast()) };
        *row = _mm256_set_m128i(high, low);
    }
    // Rows 2i and 2i + 1, then four and eight of them; first and second half of the columns.
    let mut pairs = r;
    for i in 0..4 {
        pairs[i] = _mm256_unpacklo_epi8(r[2 * i], r[2 * i + 1]);
        pairs[i + 4] = _mm256_unpackhi_epi8(r[2 * i], r[2 * i + 1]);
    }
    let mut fours = r;
    for half in 0..2 {
        for i in 0..2 {
            let (a, b) = (pairs[4 * half + 2 * i], pairs[4 * half + 2 * i + 1]);
            fours[4 * half + i] = _mm256_unpacklo_epi16(a, b);
            fours[4 * half + 2 + i] = _mm256_unpackhi_epi16(a, b);
        }
    }
    for k in 0..4 {
        let (a, b) = (fours[2 * k], fours[2 * k + 1]);
        for (i, columns) in [_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)].into_iter().enumerate() {
            let columns = _mm256_permute4x64_epi64::<0b11_01_10_00>(columns);
            let column = 4 * k + 2 * i;
            // SAFETY: columns 0–15 have room for 16 bytes.
            unsafe { _mm_storeu_si128(out.as_mut_ptr().add(column * pitch).cast(), _mm256_castsi256_si128(columns)) };
            let next = _mm256_extracti128_si256::<1>(columns);
            // SAFETY: as above.
            unsafe { _mm_storeu_si128(out.as_mut_ptr().add((column + 1) * pitch).cast(), next) };
        }
    }
}
