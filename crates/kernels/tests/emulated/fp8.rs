//! The FP8 kernels, built by the host's compiler, against `spec`, bit for bit: launches as they are
//! planned, many shapes, strides and alignments. Needs g++ but no GPU.

use super::cuda::{Amax, Direction, Mode, Outputs, Scale, Scaling, View};
use super::dequantize::cuda as decoding;
use super::quantize::cuda as encoding;
use crate::cuda::{Input, Plain, Slice, SliceMut, Values};
use crate::emulated::Emulated;
use half::{bf16, f16};
use nvfp4_spec::fp8::{self, AmaxRule, Format, ScaleValues, Scales, Side, Tile};
use nvfp4_spec::matrix::Matrix;
use nvfp4_spec::philox::philox4x32;
use nvfp4_spec::{Element, Precision, Specials, scale};
use rayon::prelude::*;
use std::collections::HashMap;
use std::hash::Hash;

/// Kernels that were built, by variant; `None` without g++.
struct Built<V>(HashMap<V, Option<Emulated>>);

impl<V: Copy + Eq + Hash> Built<V> {
    fn run<P: Copy>(
        &mut self,
        variant: V,
        source: impl Fn(V) -> (&'static str, &'static str, String),
        grid: u32,
        threads: u32,
        params: &P,
    ) -> bool {
        let build = || {
            let (_, function, text) = source(variant);
            Emulated::build(function, &text)
        };
        let kernel = self.0.entry(variant).or_insert_with(build);
        kernel.as_ref().inspect(|kernel| kernel.run(grid, threads, params)).is_some()
    }
}

/// Memory that begins `offset` elements after a multiple of 16 bytes, with a pattern before and
/// after it.
struct Memory<T> {
    words: Vec<u128>,
    first: usize,
    len: usize,
    kind: std::marker::PhantomData<T>,
}

const PATTERN: u128 = u128::from_ne_bytes([0xA5; 16]);

impl<T: Plain> Memory<T> {
    fn new(len: usize, offset: usize) -> Self {
        let first = 16 / size_of::<T>() + offset;
        let words = vec![PATTERN; ((first + len) * size_of::<T>()).div_ceil(16) + 1];
        Memory { words, first, len, kind: std::marker::PhantomData }
    }

    fn of(values: &[T], offset: usize) -> Self {
        let mut memory = Self::new(values.len(), offset);
        memory.values_mut().copy_from_slice(values);
        memory
    }

    fn all(&mut self) -> &mut [T] {
        let len = self.words.len() * 16 / size_of::<T>();
        // SAFETY: the words are that many elements, for which any bits are a value, and aligned to
        // more than they need.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), len) }
    }

    fn values_mut(&mut self) -> &mut [T] {
        let (first, len) = (self.first, self.len);
        &mut self.all()[first..first + len]
    }

    fn slice(&self) -> Slice<'_, T> {
        let address = self.words.as_ptr() as u64 + (self.first * size_of::<T>()) as u64;
        // SAFETY: memory of the host, which only an emulated kernel is given.
        unsafe { Slice::from_raw(address, self.len) }
    }

    fn slice_mut(&mut self) -> SliceMut<'_, T> {
        let address = self.values_mut().as_mut_ptr() as u64;
        // SAFETY: as above.
        unsafe { SliceMut::from_raw(address, self.len) }
    }

    /// The values; an error if anything around them was written.
    fn finish(&mut self) -> Vec<T> {
        let values = self.values_mut().to_vec();
        let bytes = size_of::<T>();
        let (before, after) = (self.first * bytes, (self.first + self.len) * bytes);
        let all: Vec<u8> = self.words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert!(all[..before].iter().chain(&all[after..]).all(|&b| b == 0xA5), "memory beyond the end was written");
        values
    }
}

impl<T: Element + Plain> Memory<T> {
    /// The elements as those of a matrix.
    fn values(&self) -> Values<'_> {
        let (address, len) = (self.slice().address(), self.len);
        // SAFETY: the same memory, of elements of the type that `T` is.
        unsafe {
            match T::PRECISION {
                Precision::F32 => Values::F32(Slice::from_raw(address, len)),
                Precision::Bf16 => Values::Bf16(Slice::from_raw(address, len)),
                Precision::F16 => Values::F16(Slice::from_raw(address, len)),
            }
        }
    }
}

/// A value for every position, of many kinds.
fn value(i: usize, key: u32) -> f32 {
    let [a, b, c, _] = philox4x32([i as u32, key, 0, 0], [5, 17]);
    let sign = if a & 1 == 0 { 1.0 } else { -1.0 };
    let ordinary = sign * (b as f32 / 4294967296.0) * 2f32.powi((a >> 8) as i32 % 12 - 6);
    match c % 97 {
        0 => f32::NAN * sign,
        1 => -0.0,
        2 => 1e-40 * sign,
        3 => 1e30 * sign,
        4 if c % 5 == 0 => f32::INFINITY * sign,
        5 => f32::from_bits(0xFFFF_FFFF),
        _ => ordinary,
    }
}

/// A matrix and where it lies.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    cols: usize,
    gap: usize,
    /// The offset of all memory from a multiple of 16 bytes, in elements.
    offset: usize,
}

/// Bits, with one NaN for all.
fn bits(x: f32) -> u32 {
    if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
}

fn scale_bits(scales: &fp8::ScaleVec) -> Vec<u32> {
    match scales {
        Scales::F32(scales) => scales.iter().map(|&x| bits(x)).collect(),
        Scales::E8m0(scales) => scales.iter().map(|&x| x.into()).collect(),
    }
}

/// The buffers of a direction.
struct Buffers {
    codes: Memory<u8>,
    scales: Scales<Memory<f32>, Memory<u8>>,
}

impl Buffers {
    fn new(mode: &fp8::Mode, side: Side, case: Case) -> Self {
        let (rows, cols) = mode.shape(side, (case.rows, case.cols));
        let count = mode.tile(side).scale_count(rows, cols).unwrap();
        let scales = match mode.scaling {
            fp8::Scaling::Mx | fp8::Scaling::MxSquare => Scales::E8m0(Memory::new(count, case.offset)),
            _ => Scales::F32(Memory::new(count, case.offset)),
        };
        Buffers { codes: Memory::new(rows * cols, case.offset), scales }
    }

    fn direction(&mut self) -> Direction<'_> {
        let scales = match &mut self.scales {
            Scales::F32(scales) => Scales::F32(scales.slice_mut()),
            Scales::E8m0(scales) => Scales::E8m0(scales.slice_mut()),
        };
        Direction { codes: self.codes.slice_mut(), scales }
    }

    fn finish(&mut self) -> (Vec<u8>, fp8::ScaleVec) {
        let scales = match &mut self.scales {
            Scales::F32(scales) => Scales::F32(scales.finish()),
            Scales::E8m0(scales) => Scales::E8m0(scales.finish()),
        };
        (self.codes.finish(), scales)
    }
}

/// How a scaling is asked of a kernel: one of [`Scaling`] without memory.
#[derive(Clone, Copy, Debug)]
enum Asked {
    Given,
    InMemory,
    OfAmax(AmaxRule),
    Tiles(fp8::Scaling),
}

const SCALE: f32 = 3.7;

const ASKED: [Asked; 10] = {
    const POWERS: AmaxRule = AmaxRule { values: ScaleValues::PowersOfTwo, epsilon: 0.3 };
    [
        Asked::Given,
        Asked::InMemory,
        Asked::OfAmax(AmaxRule::CURRENT),
        Asked::OfAmax(POWERS),
        Asked::Tiles(fp8::Scaling::Row128(AmaxRule::CURRENT)),
        Asked::Tiles(fp8::Scaling::Row128(POWERS)),
        Asked::Tiles(fp8::Scaling::Square128(AmaxRule::BLOCK)),
        Asked::Tiles(fp8::Scaling::Square128(AmaxRule { values: ScaleValues::Any, epsilon: 0.3 })),
        Asked::Tiles(fp8::Scaling::Mx),
        Asked::Tiles(fp8::Scaling::MxSquare),
    ]
};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Joined {
    Nothing,
    Small,
    Large,
}

fn check<T: Element + Plain>(
    built: &mut Built<encoding::Variant>,
    (asked, format): (Asked, Format),
    [row, col]: [bool; 2],
    joined: Joined,
    case: Case,
) {
    let Case { rows, cols, gap, offset } = case;
    let stride = cols + gap;
    let raw: Vec<T> = (0..rows * stride).map(|i| T::from_f32(value(i, rows as u32))).collect();
    let data: Vec<T> = (0..rows).flat_map(|r| &raw[r * stride..][..cols]).copied().collect();
    let matrix = Matrix::new(rows, cols, &data).unwrap();
    let amax = scale::amax(matrix.data(), Specials::Kernel);
    let (x, scale, of_tensor) = (Memory::of(&raw, offset), Memory::of(&[SCALE], offset), Memory::of(&[amax], offset));
    let (scaling, expected_scaling) = match asked {
        Asked::Given => (Scaling::Tensor(Scale::Value(SCALE)), fp8::Scaling::Tensor { scale: SCALE }),
        Asked::InMemory => (Scaling::Tensor(Scale::Memory(scale.slice())), fp8::Scaling::Tensor { scale: SCALE }),
        Asked::OfAmax(rule) => (
            Scaling::Tensor(Scale::OfAmax { amax: of_tensor.slice(), rule }),
            fp8::Scaling::Tensor { scale: rule.tensor_scale(amax, format) },
        ),
        Asked::Tiles(scaling) => (Mode::from(fp8::Mode { format, scaling }).scaling, scaling),
    };
    let mode = fp8::Mode { format, scaling: expected_scaling };
    let mut outputs = [Side::Row, Side::Column].map(|side| Buffers::new(&mode, side, case));
    let before = match joined {
        Joined::Large => 1e32,
        _ => 0.0,
    };
    let mut found = Memory::of(&[before], offset);
    let [first, second] = &mut outputs;
    let wanted = Outputs {
        row: row.then(|| first.direction()),
        col: col.then(|| second.direction()),
        amax: (joined != Joined::Nothing).then(|| Amax::Join(found.slice_mut())),
    };
    let input = Input::strided(x.values(), rows, cols, stride).unwrap();
    let what = || format!("{asked:?} {format:?} {:?} {case:?} rows {row} columns {col} {joined:?}", T::PRECISION);
    for launch in encoding::plan((&input, None), &Mode { format, scaling }, &wanted).unwrap() {
        // Few groups, so that those that persist have several shares.
        let grid = match launch.grid {
            encoding::Grid::All(groups) => groups,
            encoding::Grid::AtOnce(groups) => groups.min(2),
        };
        let (variant, threads) = (launch.variant, launch.variant.threads());
        if !built.run(variant, encoding::Variant::source, grid, threads, &launch.params) {
            return;
        }
    }
    for (output, (side, asked_for)) in outputs.iter_mut().zip([(Side::Row, row), (Side::Column, col)]) {
        let (codes, scales) = output.finish();
        if !asked_for {
            assert!(codes.iter().all(|&c| c == 0xA5), "{}", what());
            continue;
        }
        let expected = fp8::quantize(&matrix, &mode, side);
        let wrong = codes.iter().zip(&expected.codes).position(|(a, b)| a != b);
        assert_eq!(wrong.map(|i| (i, codes[i], expected.codes[i])), None, "{side:?} {}", what());
        assert_eq!(scale_bits(&scales), scale_bits(&expected.scales), "{side:?} {}", what());
    }
    let largest = if joined == Joined::Nothing || rows * cols == 0 { before } else { before.max(amax) };
    assert_eq!(found.finish()[0].to_bits(), largest.to_bits(), "{}", what());
}

/// Whole matrices with and without gaps, whole units that are not whole tiles, ragged ones, and
/// ones that start anywhere.
const CASES: [Case; 13] = {
    const fn case(rows: usize, cols: usize) -> Case {
        Case { rows, cols, gap: 0, offset: 0 }
    }
    [
        case(144, 256),
        case(16, 1152),
        Case { gap: 16, ..case(129, 144) },
        case(34, 48),
        case(130, 16),
        case(1, 1),
        case(33, 31),
        Case { gap: 3, ..case(150, 131) },
        Case { offset: 1, ..case(32, 64) },
        Case { offset: 3, gap: 5, ..case(17, 300) },
        case(0, 40),
        case(40, 0),
        case(257, 2),
    ]
};

/// Checks the combinations of settings whose number `pick` accepts, in all cases.
fn check_all(pick: impl Fn(usize) -> bool + Sync) {
    let mut all = Vec::new();
    for asked in ASKED {
        for direction in [[true, false], [false, true], [true, true]] {
            for format in Format::ALL {
                for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
                    for joined in [Joined::Nothing, Joined::Small, Joined::Large] {
                        all.push((asked, direction, format, precision, joined));
                    }
                }
            }
        }
    }
    all.into_par_iter().enumerate().filter(|(n, _)| pick(*n)).for_each(|(_, settings)| {
        let (asked, direction, format, precision, joined) = settings;
        let mut built = Built(HashMap::new());
        for case in CASES {
            match precision {
                Precision::F32 => check::<f32>(&mut built, (asked, format), direction, joined, case),
                Precision::Bf16 => check::<bf16>(&mut built, (asked, format), direction, joined, case),
                Precision::F16 => check::<f16>(&mut built, (asked, format), direction, joined, case),
            }
        }
    });
}

/// Every scaling in every direction; types, formats and amaxes alternate. 18 numbers are one
/// scaling in one direction.
#[test]
fn kernels_quantize_by_the_rules() {
    check_all(|n| n % 19 == 0 || n % 19 == 7);
}

#[test]
#[ignore = "builds every variant: minutes"]
fn every_variant_quantizes_by_the_rules() {
    check_all(|_| true);
}

fn check_decoded<T: Element + Plain>(built: &mut Built<decoding::Variant>, view: &fp8::View<'_>, offset: usize) {
    let codes = Memory::of(view.codes, offset);
    let (wide, bytes);
    let scales = match view.scales {
        Scales::F32(scales) => {
            wide = Memory::of(scales, offset);
            Scales::F32(wide.slice())
        }
        Scales::E8m0(scales) => {
            bytes = Memory::of(scales, offset);
            Scales::E8m0(bytes.slice())
        }
    };
    let fp8::View { rows, cols, format, tile, .. } = *view;
    let q = View { rows, cols, format, tile, codes: codes.slice(), scales };
    let mut out = Memory::<T>::new(rows * cols, offset);
    let launch = decoding::plan::<T>(&q, &out.slice_mut()).unwrap();
    if let Some(launch) = launch
        && !built.run(launch.variant, decoding::Variant::source, launch.groups, decoding::THREADS, &launch.params)
    {
        return;
    }
    let got: Vec<u32> = out.finish().into_iter().map(|x: T| bits(x.to_f32())).collect();
    let expected: Vec<u32> = fp8::dequantize::<T>(view).unwrap().into_iter().map(|x| bits(x.to_f32())).collect();
    let wrong = got.iter().zip(&expected).position(|(a, b)| a != b);
    let what = format!("{format:?} {tile:?} {:?} {rows} × {cols}, offset {offset}", T::PRECISION);
    assert_eq!(wrong.map(|i| (i, got[i], expected[i])), None, "{what}");
}

#[test]
fn kernels_decode_by_the_rules() {
    let numbers = [0.0, -1.5, 1e-45, 1e-38, 0.1, 448.0, 1e35, 2e36, f32::MAX, f32::INFINITY, f32::NAN];
    let shapes = [(144, 256), (16, 1152), (34, 48), (130, 16), (1, 1), (33, 31), (150, 131), (0, 5)];
    let variants: Vec<_> = Tile::ALL.into_iter().flat_map(|tile| (0..2).map(move |kind| (tile, kind))).collect();
    variants.into_par_iter().enumerate().for_each(|(i, (tile, kind))| {
        let (mut built, format) = (Built(HashMap::new()), Format::ALL[i / 2 % 2]);
        for (rows, cols) in shapes {
            let codes: Vec<u8> = (0..rows * cols).map(|i| (i * 7 + i / 256) as u8).collect();
            let count = tile.scale_count(rows, cols).unwrap();
            let wide: Vec<f32> = (0..count).map(|i| numbers[i % numbers.len()]).collect();
            let bytes: Vec<u8> = (0..count).map(|i| (i + i / 256) as u8).collect();
            let scales = if kind == 0 { Scales::F32(&wide[..]) } else { Scales::E8m0(&bytes[..]) };
            let view = fp8::View { rows, cols, format, tile, codes: &codes, scales };
            for offset in [0, 1, 8] {
                match i % 3 {
                    0 => check_decoded::<bf16>(&mut built, &view, offset),
                    1 => check_decoded::<f32>(&mut built, &view, offset),
                    _ => check_decoded::<f16>(&mut built, &view, offset),
                }
            }
        }
    });
}
