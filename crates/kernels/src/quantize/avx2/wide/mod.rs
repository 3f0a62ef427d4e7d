//! What AVX-512 has of its own. AVX2 has the rest. For 16-bit elements under one amax, the rule "six"
//! and rounding to nearest, [`rows`] is the row direction and this file the column direction;
//! [`direct`], [`philox`] and [`four_over_six`] are the sweeps of a band in other modes.
//!
//! A piece is 16 rows of 32 columns, a row per vector, and is not transposed: maxima over its rows
//! are maxima of vectors, and each lane looks up the cuts of its own column's scale byte
//! ([`codes`]). What is transposed is the codes, a quarter of the elements' bytes, when the columns
//! of a panel are written.

mod codes;
pub(super) mod direct;
pub(super) mod four_over_six;
mod hadamard;
pub(super) mod philox;
mod rows;

use super::column::Submatrix;
use super::cuts::Table;
use super::target::ColContext;
use crate::avx2::transpose::{self, Bytes};
use crate::avx512::Avx512;
use codes::Cuts;
pub(super) use hadamard::largest;
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::{BLOCK, Element, GlobalScale, Precision, Rounding, ScaleRule, Tile, e2m1};
pub(super) use rows::Lookup;
use std::arch::x86_64::*;

/// Columns of a piece.
const PIECE: usize = 32;
/// The most rows of a panel: 256 bytes of codes for a column, so that most of them are whole cache
/// lines.
const PANEL: usize = 512;
/// Columns that are processed at a time, with the row direction and without.
const CHUNKS: [usize; 2] = [8192, 2048];
/// Bytes of codes that a column has in a panel.
const COLUMN: usize = PANEL / 2;

/// The elements of a piece.
type Rows = [__m512i; BLOCK];

/// The column direction of one tensor. Also proof of AVX-512.
pub(super) struct Columns {
    scaling: Scaling,
    cuts: Cuts,
}

/// The codes and scales of some columns of a panel, before they are transposed.
pub(super) struct Strip {
    /// For 16 rows: four vectors a piece, of eight columns each. That of index `i` has the columns
    /// [`column_of`].
    codes: Vec<[[[u8; 8]; 8]; 4]>,
    /// For 16 rows: a byte for every column.
    scales: Vec<[u8; PIECE]>,
    /// The codes of eight columns.
    columns: Box<[[u8; COLUMN]; 8]>,
    /// Scales, a row for every column.
    transposed: Vec<u8>,
    /// Pieces of 16 rows.
    pieces: usize,
}

impl Strip {
    pub fn new() -> Self {
        let columns = Box::new([[0; COLUMN]; 8]);
        Strip { codes: Vec::new(), scales: Vec::new(), columns, transposed: Vec::new(), pieces: 0 }
    }

    /// Makes room for `rows` rows of `cols` columns.
    pub fn resize(&mut self, rows: usize, cols: usize) {
        self.pieces = cols.div_ceil(PIECE);
        let bands = rows.div_ceil(BLOCK);
        self.codes.resize(bands * self.pieces, Default::default());
        self.scales.resize(bands * self.pieces, [0; PIECE]);
        self.transposed.resize(self.pieces * PIECE * bands.next_multiple_of(BLOCK), 0);
    }
}

impl Columns {
    /// `None` for settings that AVX2 has.
    pub fn new<T: Element>(token: Option<Avx512>, context: &ColContext<'_>) -> Option<Self> {
        token?;
        let mode = &context.mode;
        let words = match context.transform {
            Some(_) => T::PRECISION == Precision::Bf16,
            None => T::PRECISION != Precision::F32,
        };
        let plain = mode.tile == Tile::Row16
            && mode.global == GlobalScale::PerTensor
            && mode.rule == ScaleRule::Six
            && matches!(context.rounding, Rounding::NearestEven);
        if !words || !plain {
            return None;
        }
        let scaling = Scaling::new(context.amax[0], mode, T::PRECISION);
        // SAFETY: an Avx512 token holds one of AVX2, which is only made after detection.
        let mut table = unsafe { Table::new(&scaling) };
        // SAFETY: as above.
        unsafe { table.set::<T>(&scaling) };
        table.is_complete().then(|| Columns { scaling, cuts: Cuts::new(&table) })
    }

    /// Rows of a panel and columns of a chunk for a matrix of `rows` rows, whose row direction is
    /// computed too or not.
    pub fn panel(&self, rows: usize, with_rows: bool) -> (usize, usize) {
        let height = rows.div_ceil(rayon::current_num_threads()).next_multiple_of(8 * BLOCK).min(PANEL);
        (height, if with_rows { CHUNKS[0] } else { CHUNKS[1] })
    }

    /// Quantizes 16 rows of a panel, the `band`th of their kind, into the strip.
    pub fn band<T: Element>(&self, x: &Submatrix<'_, T>, context: &ColContext<'_>, band: usize, strip: &mut Strip) {
        // SAFETY: `Columns` are only made with a token, after detection.
        unsafe { self.quantize(x, context, band, strip) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
    fn quantize<T: Element>(&self, x: &Submatrix<'_, T>, context: &ColContext<'_>, band: usize, strip: &mut Strip) {
        let at = band * strip.pieces;
        let (codes, scales) = (&mut strip.codes[at..], &mut strip.scales[at..]);
        let flips = context.transform.map(|signs| hadamard::flips(signs));
        x.for_each_piece::<PIECE>(|_, c, piece, stride| {
            let mut rows = load(piece, stride);
            if let Some(flips) = &flips {
                rows = hadamard::transform(&rows, flips);
            }
            let (codes, scales) = (&mut codes[c / PIECE], &mut scales[c / PIECE]);
            codes::quantize(&rows, &self.scaling, &self.cuts, codes, scales);
        });
    }

    /// Writes the columns of a strip, `cols` from `c` on, of the rows `first..end`.
    pub fn write(
        &self,
        strip: &mut Strip,
        (first, end): (usize, usize),
        (c, cols): (usize, usize),
        rows: usize,
        context: &ColContext<'_>,
    ) {
        let bands = (end - first).div_ceil(BLOCK);
        let (bytes, blocks) = (e2m1::packed_len(rows), rows.div_ceil(BLOCK));
        let len = (end - first).div_ceil(2);
        for p in 0..strip.pieces {
            for i in 0..4 {
                // SAFETY: `Columns` are only made with a token, after detection.
                unsafe { transpose_codes(&strip.codes[p..], strip.pieces, i, bands, &mut strip.columns) };
                for (j, column) in strip.columns.iter().enumerate() {
                    let column_index = p * PIECE + column_of(i, j);
                    if column_index < cols {
                        // SAFETY: a panel writes the blocks of its own rows only, and panels start
                        // at whole blocks.
                        unsafe { context.codes.stream((c + column_index) * bytes + first / 2, &column[..len]) };
                    }
                }
            }
        }
        // SAFETY: SSE is part of x86-64. What was written past the cache is seen by other threads
        // from here on.
        unsafe { _mm_sfence() };
        let pitch = bands.next_multiple_of(BLOCK);
        let stride = strip.pieces * PIECE;
        let scales = Bytes { data: strip.scales.as_flattened(), stride, rows: bands, cols: stride };
        // SAFETY: an Avx512 token holds one of AVX2, which is only made after detection.
        unsafe { transpose::transpose(scales, pitch, &mut strip.transposed) };
        for (i, column) in strip.transposed.chunks_exact(pitch).take(cols).enumerate() {
            // SAFETY: as for the codes.
            unsafe { context.scales.write((c + i) * blocks + first / BLOCK, &column[..bands]) };
        }
    }
}

/// The column of a piece whose codes are in place `j` of vector `i`: words of four codes were
/// unpacked by quarters of a vector.
fn column_of(i: usize, j: usize) -> usize {
    j / 2 * 8 + 2 * i + j % 2
}

/// 16 rows of 32 words.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
#[inline]
fn load<T: Element>(piece: &[T], stride: usize) -> Rows {
    assert!(piece.len() >= 15 * stride + PIECE && size_of::<T>() == 2);
    let mut rows = [_mm512_setzero_si512(); BLOCK];
    for (r, row) in rows.iter_mut().enumerate() {
        // SAFETY: rows 0–15 have 32 elements of two bytes from their start on.
        *row = unsafe { _mm512_loadu_si512(piece.as_ptr().add(r * stride).cast()) };
    }
    rows
}

/// The codes of eight columns, eight bytes for each of `bands` pieces, which are `pitch` apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
fn transpose_codes(codes: &[[[[u8; 8]; 8]; 4]], pitch: usize, i: usize, bands: usize, columns: &mut [[u8; COLUMN]; 8]) {
    for b in (0..bands).step_by(8) {
        let mut r = [_mm512_setzero_si512(); 8];
        for (k, row) in r.iter_mut().enumerate().take(bands - b) {
            // SAFETY: the source is an array of 64 bytes.
            *row = unsafe { _mm512_loadu_si512(codes[(b + k) * pitch][i].as_ptr().cast()) };
        }
        // Pairs of bands, then four and eight of them: first and second column of each pair.
        let mut pairs = r;
        for k in 0..4 {
            pairs[k] = _mm512_unpacklo_epi64(r[2 * k], r[2 * k + 1]);
            pairs[k + 4] = _mm512_unpackhi_epi64(r[2 * k], r[2 * k + 1]);
        }
        for odd in 0..2 {
            let p = &pairs[4 * odd..][..4];
            // Quarter k of each belongs to column 2k, or 2k + 1. First quarters 0 and 2, then 1 and 3.
            let even = [_mm512_shuffle_i64x2::<0x88>(p[0], p[1]), _mm512_shuffle_i64x2::<0x88>(p[2], p[3])];
            let uneven = [_mm512_shuffle_i64x2::<0xDD>(p[0], p[1]), _mm512_shuffle_i64x2::<0xDD>(p[2], p[3])];
            let quarters = [
                _mm512_shuffle_i64x2::<0x88>(even[0], even[1]),
                _mm512_shuffle_i64x2::<0x88>(uneven[0], uneven[1]),
                _mm512_shuffle_i64x2::<0xDD>(even[0], even[1]),
                _mm512_shuffle_i64x2::<0xDD>(uneven[0], uneven[1]),
            ];
            for (k, column) in quarters.into_iter().enumerate() {
                let out = &mut columns[2 * k + odd][8 * b..][..64];
                // SAFETY: the destination has 64 bytes.
                unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), column) };
            }
        }
    }
}

/// The largest words of 16 blocks, of which each vector has two.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
#[inline]
fn largest_of_sixteen(pairs: [__m512i; 8]) -> __m256i {
    // Blocks 4i to 4i + 3 in the quarters of fours[i], eight words each.
    let mut fours = [_mm512_setzero_si512(); 4];
    for (four, p) in fours.iter_mut().zip(pairs.as_chunks::<2>().0) {
        let (low, high) = (_mm512_shuffle_i64x2::<0x88>(p[0], p[1]), _mm512_shuffle_i64x2::<0xDD>(p[0], p[1]));
        *four = _mm512_max_epu16(low, high);
    }
    let halve_words = |x, y| _mm512_max_epu16(_mm512_unpacklo_epi16(x, y), _mm512_unpackhi_epi16(x, y));
    let (x, y) = (halve_words(fours[0], fours[1]), halve_words(fours[2], fours[3]));
    let x = _mm512_max_epu16(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
    let x = _mm512_max_epu16(x, _mm512_shuffle_epi32::<0b01_00_11_10>(x));
    // Block 4j + i is word j of quarter i.
    let order = _mm256_setr_epi16(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    _mm512_castsi512_si256(_mm512_permutexvar_epi16(_mm512_castsi256_si512(order), x))
}
