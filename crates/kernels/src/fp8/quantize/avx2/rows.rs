//! The row direction of an area.

use super::part::{Area, Part, copy_some};
use super::scales::EightScales;
use super::tiles::{self, Band};
use super::{AHEAD, Job, encode, scales};
use crate::amax::avx2::row_amax;
use crate::avx2::small_float::SmallFloat;
use crate::avx2::value_of;
use crate::vector::__m256;
use nvfp4_spec::fp8::{BLOCK, MX_BLOCK, Scales, Scaling};
use nvfp4_spec::{Element, Specials};

impl<T: Element, F: SmallFloat> Job<'_, T, F> {
    /// Quantizes an area in the row direction; its largest magnitude, where there is one scale for
    /// the whole matrix.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    pub(super) fn rows(&self, area: Area, out: &mut Part<'_>) -> f32 {
        let Part { codes, code_stride, scales, scale_stride } = out;
        let codes = (&mut **codes, *code_stride);
        match (self.mode.scaling, scales) {
            (Scaling::Tensor { scale }, _) => return self.tensor_rows(area, scale, codes),
            (Scaling::Row128(rule), Scales::F32(scales)) => {
                let rule = |amaxes| scales::of_blocks::<F>(rule, T::PRECISION, amaxes);
                self.tile_rows::<_, BLOCK>(area, (1, 1), rule, codes, (scales, *scale_stride));
            }
            (Scaling::Square128(rule), Scales::F32(scales)) => {
                let rule = |amaxes| scales::of_blocks::<F>(rule, T::PRECISION, amaxes);
                self.tile_rows::<_, BLOCK>(area, (BLOCK, 1), rule, codes, (scales, *scale_stride));
            }
            (Scaling::Mx, Scales::E8m0(scales)) => {
                let rule = |amaxes| scales::of_mx::<F>(amaxes);
                self.tile_rows::<_, MX_BLOCK>(area, (1, 1), rule, codes, (scales, *scale_stride));
            }
            (Scaling::MxSquare, Scales::E8m0(scales)) => {
                let rule = |amaxes| scales::of_mx::<F>(amaxes);
                self.tile_rows::<_, MX_BLOCK>(area, (MX_BLOCK, MX_BLOCK), rule, codes, (scales, *scale_stride));
            }
            _ => unreachable!("the kind of scales was checked"),
        }
        0.0
    }

    /// Rows with one multiplier; their largest magnitude.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    fn tensor_rows(&self, area: Area, scale: f32, (codes, stride): (&mut [u8], usize)) -> f32 {
        let mut largest = 0;
        for r in 0..area.height {
            self.prefetch(area, r + AHEAD);
            let x = self.row(area, r);
            let bits = encode::encode::<T, F>(x, scale, &mut codes[r * stride..][..area.width]);
            let nan = encode::is_nan::<T>(bits);
            largest = largest.max(if nan { row_amax(self.token, x, Specials::Kernel, &mut []) } else { bits });
        }
        value_of(largest, T::PRECISION)
    }

    /// Tiles of `TILE` columns and `height` rows, whose scales are stored in `times` rows of
    /// scales. Codes and scales come with their strides.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[inline]
    fn tile_rows<S: Copy, const TILE: usize>(
        &self,
        area: Area,
        (height, times): (usize, usize),
        rule: impl Fn(__m256) -> EightScales<S>,
        (codes, code_stride): (&mut [u8], usize),
        (scales, scale_stride): (&mut [S], usize),
    ) {
        let tiles = area.width.div_ceil(TILE);
        for r in (0..area.height).step_by(height) {
            self.prefetch(area, r + AHEAD);
            let scales = &mut scales[r / height * times * scale_stride..];
            let times = times.min(area.height - r);
            for c in (0..area.width).step_by(8 * TILE) {
                let band = self.band(area, (r, height), (c, 8 * TILE));
                let codes = &mut codes[r * code_stride + c..];
                let found = tiles::quantize::<T, F, S, TILE>(band, &rule, codes, code_stride);
                for i in 0..times {
                    copy_some(&found, &mut scales[i * scale_stride..], c / TILE, tiles);
                }
            }
        }
    }

    /// Up to `height` rows and `width` columns of an area.
    fn band(&self, area: Area, (r, height): (usize, usize), (c, width): (usize, usize)) -> Band<'_, T> {
        let stride = self.x.stride();
        Band {
            data: &self.values[(area.row + r) * stride + area.col + c..],
            stride,
            height: height.min(area.height - r),
            width: width.min(area.width - c),
        }
    }
}
