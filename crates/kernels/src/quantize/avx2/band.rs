//! A band is quantized in three sweeps over data that sits in cache: the largest magnitude of every
//! tile, the scale bytes, the codes. What the sweeps cannot decide exactly (NaN in a tile, a factor
//! that is not a positive number, a 4over6 choice within its error bound) is left to the rules of
//! `spec`, tile by tile, at the end.

use super::cuts::Table;
use super::encode::{self, KEEP};
use super::four_over_six::{self, Choices, Tiles};
use super::modelopt::{self, Swept};
use super::search::{self, Searched};
use super::wide::{self, Lookup};
use crate::avx2::small_float::{E4m3, codes, store_bytes};
use crate::avx2::{
    Avx2, abs, infinity_bits, largest_of_eight, load, load_eight, max, philox, value_of, values_of, zero,
};
use crate::avx512::Avx512;
use crate::vector::*;
use nvfp4_spec::block;
use nvfp4_spec::scale::SIXTH;
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::stochastic::Random;
use nvfp4_spec::tile::Rows;
use nvfp4_spec::{BLOCK, Element, ErrorPath, Metric, Precision, Profile, Rounding, ScaleRule, Specials, e2m1};

/// One row of blocks, or sixteen rows that form a row of square tiles. Elements outside the matrix
/// are zeros.
pub(super) struct Band<'a, T> {
    pub data: &'a [T],
    /// Distance between rows.
    pub stride: usize,
    /// 1 or 16.
    pub height: usize,
    /// Blocks of a row.
    pub blocks: usize,
}

impl<'a, T: Element> Band<'a, T> {
    #[inline]
    fn row(&self, r: usize) -> &'a [[T; BLOCK]] {
        self.data[r * self.stride..][..self.blocks * BLOCK].as_chunks::<BLOCK>().0
    }

    /// The tiles from 8·i on.
    #[inline]
    fn tiles(&self, i: usize) -> Tiles<'a, T> {
        let (stride, height, count) = (self.stride, self.height, 8.min(self.blocks - 8 * i));
        Tiles { data: &self.data[8 * i * BLOCK..], stride, height, count }
    }

    fn tile<const H: usize>(&self, b: usize) -> Rows<f32, H> {
        std::array::from_fn(|r| self.row(r)[b].map(|x| x.to_f32()))
    }
}

/// The output buffers of a band: row `r` starts at `r` strides.
pub(super) struct Output<'a> {
    pub codes: &'a mut [u8],
    pub code_stride: usize,
    pub scales: &'a mut [u8],
    pub scale_stride: usize,
}

/// The source of a band's random bytes.
#[derive(Clone, Copy)]
pub(super) struct Draw<'a> {
    pub rounding: Rounding<Random<'a>>,
    /// Index of the band's first block in its direction.
    pub first: usize,
    /// Blocks between two rows of the direction.
    pub pitch: usize,
}

/// What a thread keeps between bands of one direction: all of the same mode and type.
pub(super) struct Worker {
    table: Table,
    /// Proof of AVX-512, for what [`wide`] has.
    wide: Option<Avx512>,
    lookup: Option<Lookup>,
    /// Of the search of scales.
    searched: Searched,
    /// Of ModelOpt's sweep.
    swept: Swept,
    /// Bits of the tiles' largest magnitudes.
    magnitudes: Vec<u32>,
    scales: Vec<u8>,
    random: Vec<[u8; BLOCK]>,
    /// Tiles that the rules decide.
    undecided: Vec<usize>,
}

impl Worker {
    pub fn new(_: Avx2, wide: Option<Avx512>, scaling: &Scaling) -> Self {
        Worker {
            // SAFETY: an Avx2 token is only made after detection.
            table: unsafe { Table::new(scaling) },
            wide,
            lookup: wide.map(Lookup::new),
            searched: Searched::new(),
            swept: Swept::new(),
            magnitudes: Vec::new(),
            scales: Vec::new(),
            random: Vec::new(),
            undecided: Vec::new(),
        }
    }

    /// Quantizes a band whose tensor or row has this scaling.
    pub fn quantize<T: Element>(
        &mut self,
        _: Avx2,
        scaling: &Scaling,
        band: &Band<'_, T>,
        draw: Draw<'_>,
        out: &mut Output<'_>,
    ) {
        // SAFETY: an Avx2 token is only made after detection.
        unsafe { self.run(scaling, band, draw, out) }
    }

    /// The number of tiles of the last band that were left to the rules; a tile left for two
    /// reasons counts twice.
    pub fn undecided(&self) -> usize {
        self.undecided.len()
    }

    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    fn run<T: Element>(&mut self, scaling: &Scaling, band: &Band<'_, T>, draw: Draw<'_>, out: &mut Output<'_>) {
        self.table.set::<T>(scaling);
        let mode = self.table.scaling().mode;
        self.undecided.clear();
        if let Some(lookup) = &mut self.lookup
            && band.height == 1
            && matches!(draw.rounding, Rounding::NearestEven)
            && lookup.set::<T>(&self.table)
        {
            let (scales, codes) = (&mut out.scales[..band.blocks], &mut out.codes[..band.blocks * BLOCK / 2]);
            // SAFETY: a `Lookup` is only made with a token of AVX-512, after detection.
            unsafe { lookup.quantize(band.row(0), &self.table, scales, codes, &mut self.undecided) };
            for i in 0..self.undecided.len() {
                self.decide::<T, 1>(self.undecided[i], band, draw, out);
            }
            return;
        }
        self.find_magnitudes(band);
        self.choose_scales(band);
        let computed = self.wide.filter(|&token| wide::direct::computes(token, self.table.scaling()));
        if computed.is_none() && !self.table.is_complete() {
            for b in 0..band.blocks {
                if !self.table.prepare::<T>(self.scales[b]) {
                    self.undecided.push(b);
                }
            }
        }
        let keep = mode.profile.code_specials(mode.specials) == Specials::Kernel;
        let divide = self.table.divides();
        for r in 0..band.height {
            let codes = &mut out.codes[r * out.code_stride..][..band.blocks * BLOCK / 2];
            out.scales[r * out.scale_stride..][..band.blocks].copy_from_slice(&self.scales[..band.blocks]);
            let (row, scales, table) = (band.row(r), &self.scales[..band.blocks], &self.table);
            let global = &table.scaling().global;
            match draw.rounding {
                Rounding::NearestEven if let Some(token) = computed => {
                    wide::direct::nearest(token, row, scales, global, codes)
                }
                Rounding::NearestEven if keep => encode::nearest::<T, KEEP>(row, scales, table, codes),
                Rounding::NearestEven => encode::nearest::<T, { !KEEP }>(row, scales, table, codes),
                Rounding::Stochastic(random) => {
                    let first = draw.first + r * draw.pitch;
                    fill_random(self.wide, &mut self.random, random, first, band.blocks);
                    let random = &self.random;
                    if let Some(token) = computed {
                        wide::direct::stochastic(token, row, scales, random, global, codes);
                        continue;
                    }
                    match (keep, divide) {
                        (true, false) => encode::stochastic::<T, KEEP, false>(row, scales, random, table, codes),
                        (true, true) => encode::stochastic::<T, KEEP, true>(row, scales, random, table, codes),
                        (false, false) => encode::stochastic::<T, { !KEEP }, false>(row, scales, random, table, codes),
                        (false, true) => encode::stochastic::<T, { !KEEP }, true>(row, scales, random, table, codes),
                    }
                }
            }
        }
        for i in 0..self.undecided.len() {
            match band.height {
                1 => self.decide::<T, 1>(self.undecided[i], band, draw, out),
                _ => self.decide::<T, 16>(self.undecided[i], band, draw, out),
            }
        }
    }

    /// The bits of each tile's largest magnitude. A tile with NaN is undecided.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    fn find_magnitudes<T: Element>(&mut self, band: &Band<'_, T>) {
        // Whole vectors of eight, for what follows.
        self.magnitudes.resize(band.blocks.next_multiple_of(8), 0);
        let infinity = infinity_bits(T::PRECISION);
        if let Some(token) = self.wide
            && T::PRECISION != Precision::F32
        {
            let (real, padding) = self.magnitudes.split_at_mut(band.blocks);
            padding.fill(0);
            if wide::direct::magnitudes(token, band.data, (band.stride, band.height), real, infinity) {
                self.leave_nan(infinity);
            }
            return;
        }
        let mut all = _mm256_setzero_si256();
        for (i, out) in self.magnitudes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let bits = match band.row(0)[8 * i..].first_chunk::<8>() {
                Some(x) if band.height == 1 => largest_of_eight::<T>([
                    abs::<T>(load(&x[0])),
                    abs::<T>(load(&x[1])),
                    abs::<T>(load(&x[2])),
                    abs::<T>(load(&x[3])),
                    abs::<T>(load(&x[4])),
                    abs::<T>(load(&x[5])),
                    abs::<T>(load(&x[6])),
                    abs::<T>(load(&x[7])),
                ]),
                _ => {
                    let mut eight = [zero(); 8];
                    for (j, m) in eight.iter_mut().enumerate().take(band.blocks - 8 * i) {
                        for r in 0..band.height {
                            *m = max::<T>(*m, abs::<T>(load(&band.row(r)[8 * i + j])));
                        }
                    }
                    largest_of_eight::<T>(eight)
                }
            };
            all = _mm256_max_epu32(all, bits);
            // SAFETY: the destination is an array of 8 doublewords.
            unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), bits) };
        }
        let nan = _mm256_cmpgt_epi32(all, _mm256_set1_epi32(infinity as i32));
        if _mm256_movemask_epi8(nan) != 0 {
            self.leave_nan(infinity);
        }
    }

    /// Tiles with NaN, whose bits are above those of infinity, are undecided.
    #[cold]
    fn leave_nan(&mut self, infinity: u32) {
        for (b, bits) in self.magnitudes.iter_mut().enumerate() {
            if *bits > infinity {
                *bits = 0;
                self.undecided.push(b);
            }
        }
    }

    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    fn choose_scales<T: Element>(&mut self, band: &Band<'_, T>) {
        self.scales.resize(self.magnitudes.len(), 0);
        match self.table.scaling().mode.rule {
            ScaleRule::Six => self.map_to_six(),
            ScaleRule::FourOverSix { metric: Metric::Mae, error, .. } => {
                self.choose_four_over_six::<T, true>(band, error)
            }
            ScaleRule::FourOverSix { metric: Metric::Mse, error, .. } => {
                self.choose_four_over_six::<T, false>(band, error)
            }
            ScaleRule::Mse => {
                self.map_to_six();
                self.search(band);
            }
            ScaleRule::ModelOptMse => {
                self.map_to_six();
                self.swept.set(self.table.scaling());
                for i in 0..self.magnitudes.len() / 8 {
                    let amaxes = values_of(load_eight(&self.magnitudes.as_chunks::<8>().0[i]), T::PRECISION);
                    let centres = &self.scales.as_chunks::<8>().0[i];
                    self.take(i, modelopt::sweep(&self.swept, centres, amaxes, &band.tiles(i)));
                }
            }
            ScaleRule::ModelOptFourOverSix => {
                let global = self.table.scaling().global;
                for i in 0..self.magnitudes.len() / 8 {
                    let amaxes = values_of(load_eight(&self.magnitudes.as_chunks::<8>().0[i]), T::PRECISION);
                    self.take(i, modelopt::four_over_six(&global, amaxes, &band.tiles(i)));
                }
            }
        }
    }

    /// The scales of the rule "six".
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    fn map_to_six(&mut self) {
        let scaling = *self.table.scaling();
        let eights = self.magnitudes.as_chunks::<8>().0.iter().zip(self.scales.as_chunks_mut::<8>().0);
        for (bits, scales) in eights {
            six(&scaling, bits, scales);
        }
    }

    /// The better of two scales for every tile; a tile that the filter cannot decide is undecided.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    fn choose_four_over_six<T: Element, const MAE: bool>(&mut self, band: &Band<'_, T>, error: ErrorPath) {
        let global = self.table.scaling().global;
        if let Some(token) = self.wide {
            let tiles = Tiles { data: band.data, stride: band.stride, height: band.height, count: band.blocks };
            let (scales, undecided) = (&mut self.scales, &mut self.undecided);
            let global = (&global, error);
            wide::four_over_six::choose::<T, MAE>(token, global, &self.magnitudes, &tiles, scales, undecided);
            return;
        }
        for i in 0..self.magnitudes.len() / 8 {
            let amaxes = values_of(load_eight(&self.magnitudes.as_chunks::<8>().0[i]), T::PRECISION);
            self.take(i, four_over_six::choose::<T, MAE>(&global, error, amaxes, &band.tiles(i)));
        }
    }

    /// The best of the scales around those of the rule "six"; a tile that the filter cannot decide
    /// is undecided.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    fn search<T: Element>(&mut self, band: &Band<'_, T>) {
        self.searched.set(self.table.scaling());
        for i in 0..self.magnitudes.len() / 8 {
            let amaxes = values_of(load_eight(&self.magnitudes.as_chunks::<8>().0[i]), T::PRECISION);
            let centres = &self.scales.as_chunks::<8>().0[i];
            self.take(i, search::choose(&self.searched, centres, amaxes, &band.tiles(i)));
        }
    }

    /// The choices for the tiles from 8·i on.
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[inline]
    fn take(&mut self, i: usize, choices: Choices) {
        store_bytes(choices.scales, &mut self.scales.as_chunks_mut::<8>().0[i]);
        let mut undecided = choices.undecided;
        while undecided != 0 {
            self.undecided.push(8 * i + undecided.trailing_zeros() as usize);
            undecided &= undecided - 1;
        }
    }

    /// A tile by the rules as written.
    #[cold]
    fn decide<T: Element, const H: usize>(&self, b: usize, band: &Band<'_, T>, draw: Draw<'_>, out: &mut Output<'_>) {
        let random: Rows<u8, H>;
        let rounding = match draw.rounding {
            Rounding::NearestEven => Rounding::NearestEven,
            Rounding::Stochastic(source) => {
                random = std::array::from_fn(|r| random_block(source, draw.first + r * draw.pitch + b));
                Rounding::Stochastic(&random)
            }
        };
        let q = block::quantize(&band.tile::<H>(b), self.table.scaling(), rounding);
        for (r, codes) in q.codes.iter().enumerate() {
            out.scales[r * out.scale_stride + b] = q.scale;
            let bytes = &mut out.codes[r * out.code_stride + b * BLOCK / 2..][..BLOCK / 2];
            for (byte, pair) in bytes.iter_mut().zip(codes.as_chunks::<2>().0) {
                *byte = e2m1::pack(pair[0], pair[1]);
            }
        }
    }
}

/// The scales of eight tiles by the rule "six", from the bits of their largest magnitudes.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[inline]
fn six(scaling: &Scaling, bits: &[u32; 8], scales: &mut [u8; 8]) {
    if scaling.mode.profile == Profile::TransformerEngine {
        // Twin of `scale::block_scale`.
        let multiplier = _mm256_set1_ps(scaling.global.encode * SIXTH);
        let amaxes = values_of(load_eight(bits), scaling.precision);
        store_bytes(codes::<E4m3>(_mm256_mul_ps(amaxes, multiplier)), scales);
    } else {
        *scales = bits.map(|b| scaling.block_scale(value_of(b, scaling.precision)));
    }
}

/// The random bytes of `blocks` blocks from `first` on.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
fn fill_random(wide: Option<Avx512>, out: &mut Vec<[u8; BLOCK]>, random: Random<'_>, first: usize, blocks: usize) {
    out.resize(blocks, [0; BLOCK]);
    match (random, wide) {
        (Random::Stream(stream), Some(token)) => wide::philox::fill(token, &stream, first as u64, out),
        (Random::Stream(stream), None) => philox::fill(&stream, first as u64, out),
        (Random::Bytes(_), _) => {
            for (i, block) in out.iter_mut().enumerate() {
                *block = random_block(random, first + i);
            }
        }
    }
}

/// The bytes of a block; a square tile may reach beyond the matrix, where they do not matter.
fn random_block(random: Random<'_>, index: usize) -> [u8; BLOCK] {
    match random {
        Random::Bytes(bytes) if (index + 1) * BLOCK > bytes.len() => [0; BLOCK],
        random => random.block(index),
    }
}
