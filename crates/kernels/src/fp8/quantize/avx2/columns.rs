//! The column direction of an area: scales from maxima over its rows, and codes, transposed except
//! for MXFP8.

use super::part::{Area, Part, Transposed, copy_some};
use super::scales::EightScales;
use super::{AHEAD, CHUNK, COLUMNS, Job, Scratch, encode, scales};
use crate::amax::avx2::row_amax;
use crate::avx2::small_float::SmallFloat;
use crate::avx2::transpose::{self, Bytes};
use crate::vector::__m256;
use nvfp4_spec::fp8::{AmaxRule, BLOCK, MX_BLOCK, Scales, Scaling};
use nvfp4_spec::{Element, Specials};

impl<T: Element, F: SmallFloat> Job<'_, T, F> {
    /// Both directions where the codes of one are those of the other, transposed: one scale for the
    /// matrix, or squares.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    pub(super) fn same_codes(
        &self,
        scratch: &mut Scratch<T>,
        area: Area,
        row: Option<Part<'_>>,
        out: &Transposed<'_>,
    ) -> f32 {
        scratch.codes.resize(BLOCK * CHUNK, 0);
        scratch.scales.resize(CHUNK / BLOCK, 0.0);
        let mut own = Part {
            codes: &mut scratch.codes,
            code_stride: CHUNK,
            scales: Scales::F32(&mut scratch.scales),
            scale_stride: CHUNK / BLOCK,
        };
        let mut row = row;
        let part = row.as_mut().unwrap_or(&mut own);
        let largest = self.rows(area, part);
        if let (Scaling::Square128(_), Scales::F32(scales)) = (self.mode.scaling, &part.scales) {
            let down = self.x.rows().div_ceil(BLOCK);
            for (i, scale) in scales[..area.width.div_ceil(BLOCK)].iter().enumerate() {
                // SAFETY: a panel writes the scales of its own rows only, and is one block high.
                unsafe { out.scales.write((area.col / BLOCK + i) * down + area.row / BLOCK, &[*scale]) };
            }
        }
        let codes = Bytes { data: part.codes, stride: part.code_stride, rows: area.height, cols: area.width };
        self.write_transposed(&mut scratch.transposed, codes, area, out);
        largest
    }

    /// The column direction in blocks of 128 rows of a column.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    pub(super) fn columns(&self, scratch: &mut Scratch<T>, area: Area, rule: AmaxRule, out: &Transposed<'_>) {
        let (first, end, down) = (area.col, area.col + area.width, self.x.rows().div_ceil(BLOCK));
        let rule = |amaxes| scales::of_blocks::<F>(rule, T::PRECISION, amaxes);
        self.find_multipliers(scratch, area, rule, |i, stored| {
            for (c, stored) in (first + i..end).zip(stored) {
                // SAFETY: a panel writes the scales of its own rows only, and is one block high.
                unsafe { out.scales.write(c * down + area.row / BLOCK, &[stored]) };
            }
        });
        scratch.codes.resize(BLOCK * CHUNK, 0);
        self.encode_columns(area, &scratch.multipliers, &mut scratch.codes, CHUNK);
        let codes = Bytes { data: &scratch.codes, stride: CHUNK, rows: area.height, cols: area.width };
        self.write_transposed(&mut scratch.transposed, codes, area, out);
    }

    /// The column direction of one row of MXFP8 blocks, not transposed.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    pub(super) fn mx_columns(&self, scratch: &mut Scratch<T>, area: Area, out: &mut Part<'_>) {
        let Scales::E8m0(scales) = &mut out.scales else { unreachable!("MXFP8 has bytes for scales") };
        let rule = |amaxes| scales::of_mx::<F>(amaxes);
        self.find_multipliers(scratch, area, rule, |i, stored| copy_some(&stored, scales, i, area.width));
        self.encode_columns(area, &scratch.multipliers, out.codes, out.code_stride);
    }

    /// The column direction of one row of MXFP8 squares, and the row direction, which has the same
    /// codes and bytes. A byte is repeated: in the columns of its square here, in its rows there.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    pub(super) fn mx_squares(&self, scratch: &mut Scratch<T>, area: Area, row: Option<Part<'_>>, out: Part<'_>) {
        let squares = area.width.div_ceil(MX_BLOCK);
        scratch.bytes.resize(MX_BLOCK * squares, 0);
        let scales = Scales::E8m0(&mut scratch.bytes[..]);
        self.rows(area, &mut Part { codes: &mut *out.codes, scales, scale_stride: squares, ..out });
        let bytes = &scratch.bytes[..squares];
        let Scales::E8m0(columns) = out.scales else { unreachable!("MXFP8 has bytes for scales") };
        for (columns, byte) in columns[..area.width].chunks_mut(MX_BLOCK).zip(bytes) {
            columns.fill(*byte);
        }
        let Some(Part { codes, code_stride, scales: Scales::E8m0(rows), scale_stride }) = row else { return };
        for r in 0..area.height {
            codes[r * code_stride..][..area.width].copy_from_slice(&out.codes[r * out.code_stride..][..area.width]);
            rows[r * scale_stride..][..squares].copy_from_slice(bytes);
        }
    }

    /// The multipliers of the columns of an area. `store` gets the index of a column of the area,
    /// and the scales of eight columns from there on.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[inline]
    fn find_multipliers<S>(
        &self,
        scratch: &mut Scratch<T>,
        area: Area,
        rule: impl Fn(__m256) -> EightScales<S>,
        mut store: impl FnMut(usize, [S; 8]),
    ) {
        self.find_maxima(scratch, area);
        scratch.multipliers.resize(scratch.maxima.len(), 0.0);
        let eights = scratch.multipliers.as_chunks_mut::<8>().0.iter_mut().zip(scratch.maxima.as_chunks::<8>().0);
        for (i, (multipliers, maxima)) in eights.take(area.width.div_ceil(8)).enumerate() {
            let found = rule(scales::vector(&maxima.map(|m| m.to_f32())));
            *multipliers = found.multipliers;
            store(8 * i, found.stored);
        }
    }

    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    fn encode_columns(&self, area: Area, multipliers: &[f32], codes: &mut [u8], stride: usize) {
        for r in 0..area.height {
            encode::encode_columns::<T, F>(self.row(area, r), multipliers, &mut codes[r * stride..][..area.width]);
        }
    }

    /// The largest magnitudes of the columns of an area, NaN left out; zeros behind them up to a
    /// whole step.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    fn find_maxima(&self, scratch: &mut Scratch<T>, area: Area) {
        for specials in [Specials::Reference, Specials::Kernel] {
            scratch.maxima.clear();
            scratch.maxima.resize(area.width.next_multiple_of(encode::STEP), T::default());
            let maxima = &mut scratch.maxima[..area.width];
            let rows = (0..area.height).map(|r| {
                self.prefetch(area, r + AHEAD);
                row_amax(self.token, self.row(area, r), specials, maxima)
            });
            if !encode::is_nan::<T>(rows.max().unwrap_or(0)) {
                break;
            }
        }
    }

    /// Transposes the codes of an area and writes its columns.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    fn write_transposed(&self, transposed: &mut Vec<u8>, codes: Bytes<'_>, area: Area, out: &Transposed<'_>) {
        transposed.resize(COLUMNS * BLOCK, 0);
        for c in (0..area.width).step_by(COLUMNS) {
            let cols = COLUMNS.min(area.width - c);
            transpose::transpose(Bytes { data: &codes.data[c..], cols, ..codes }, BLOCK, transposed);
            for (i, column) in transposed.chunks_exact(BLOCK).take(cols).enumerate() {
                let at = (area.col + c + i) * self.x.rows() + area.row;
                // SAFETY: a panel writes the codes of its own rows only.
                unsafe { out.codes.write(at, &column[..area.height]) };
            }
        }
    }
}
