//! Tests that need a GPU: misaligned memory, captured graphs, matrices of billions of elements.
//! Without a GPU or NVRTC each test is skipped. The slow ones: `./test --all`.
#![cfg(feature = "cuda")]

#[path = "gpu/fp8.rs"]
mod fp8;

use half::{bf16, f16};
use nvfp4_kernels::cuda::{self, Buffer, Device, Slice, SliceMut, Stream};
use nvfp4_kernels::quantize::cuda::{Amax, Direction, Offset, Random, Written, advance, quantize};
use nvfp4_kernels::quantize::{self as host, Layout};
use nvfp4_kernels::{Error, Implementation, Input, Values, amax, dequantize};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::scale::Unit;
use nvfp4_spec::stochastic;
use nvfp4_spec::{Bound, ErrorPath, GlobalScale, Metric, Mode, Rounding, ScaleRule, Specials, Tile, e2m1};
use nvfp4_testing::{Need, missing};
use rayon::prelude::*;

fn device() -> Option<Device> {
    let ready = Device::open(0).and_then(|device| cuda::compiler_version().map(|_| device));
    ready.inspect_err(|reason| missing(Need::Gpu, reason)).ok()
}

/// Bell-shaped values whose size changes from row to row of 1024, from a hash of the position: fast
/// enough for billions.
fn noise(seed: u32, i: usize) -> bf16 {
    let mut h = (i as u32 ^ (i >> 32) as u32).wrapping_mul(0x9E37_79B9) ^ seed;
    for _ in 0..2 {
        h = (h ^ (h >> 16)).wrapping_mul(0x85EB_CA6B);
        h = (h ^ (h >> 13)).wrapping_mul(0xC2B2_AE35);
    }
    let sum: u32 = (h ^ (h >> 16)).to_le_bytes().iter().map(|&b| u32::from(b)).sum();
    let size = f32::from_bits(((127 - (i / 1024 % 12) as u32) << 23) | 0x0009_ABCD);
    bf16::from_f32((sum as f32 - 509.5) / 148.0 * size)
}

fn matrix(seed: u32, len: usize) -> Vec<bf16> {
    (0..len).into_par_iter().with_min_len(1 << 16).map(|i| noise(seed, i)).collect()
}

/// Codes, scales and amaxes of one direction.
#[derive(PartialEq, Debug)]
struct Output {
    codes: Vec<u8>,
    scales: Vec<u8>,
    amax: Vec<f32>,
}

impl Output {
    fn new(rows: usize, cols: usize, mode: &Mode) -> Self {
        Output {
            codes: vec![0xA5; rows * e2m1::packed_len(cols)],
            scales: vec![0xA5; Layout::Linear.scale_len(rows, cols).unwrap()],
            amax: vec![-1.0; mode.global.count(rows)],
        }
    }

    fn direction<'a>(
        &'a mut self,
        mode: Mode,
        stream: Option<stochastic::Stream>,
        transform: Option<Signs>,
    ) -> host::Direction<'a> {
        host::Direction {
            mode,
            rounding: stream.map_or(Rounding::NearestEven, |s| Rounding::Stochastic(stochastic::Random::Stream(s))),
            transform,
            layout: Layout::Linear,
            amax: host::Amax::Compute(&mut self.amax),
            codes: &mut self.codes,
            scales: &mut self.scales,
        }
    }
}

/// One or both directions of a matrix in an implementation.
fn run(
    implementation: Implementation,
    x: Values<'_>,
    (rows, cols): (usize, usize),
    mode: Mode,
    rounding: Option<[stochastic::Stream; 2]>,
    columns: Columns,
) -> [Output; 2] {
    let mut out = [Output::new(rows, cols, &mode), Output::new(cols, rows, &mode)];
    let input = Input::new(x, rows, cols).unwrap();
    let [row, col] = &mut out;
    let col = match columns {
        Columns::None => None,
        Columns::Plain => Some(col.direction(mode, rounding.map(|r| r[1]), None)),
        Columns::Hadamard => Some(col.direction(mode, rounding.map(|r| r[1]), Some(Signs::FIXED))),
    };
    host::quantize(implementation, &input, Some(row.direction(mode, rounding.map(|r| r[0]), None)), col).unwrap();
    out
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Columns {
    None,
    Plain,
    Hadamard,
}

const STREAMS: [stochastic::Stream; 2] = [
    stochastic::Stream { seed: 3, offset: 8, first_block: 0 },
    stochastic::Stream { seed: 3, offset: 9, first_block: 0 },
];

fn strict(metric: Metric) -> Mode {
    let rule = ScaleRule::FourOverSix { metric, error: ErrorPath::Strict, bound: Bound::E256 };
    Mode { rule, ..Mode::default() }
}

/// A misaligned part of a buffer.
fn part<T: cuda::Plain>(buffer: &mut Buffer<T>, first: usize, len: usize) -> SliceMut<'_, T> {
    buffer.slice_mut().range(first..first + len)
}

#[test]
fn memory_that_starts_anywhere_gives_the_same_bits() {
    let Some(device) = device() else { return };
    let stream = Stream::new(device).unwrap();
    for (rows, cols) in [(48, 64), (35, 70), (128, 128)] {
        let x = matrix(1, rows * cols);
        for first in 0..9 {
            let mode = Mode::default();
            let expected = run(Implementation::best(), Values::Bf16(&x), (rows, cols), mode, None, Columns::Plain);
            let mut memory = device.alloc::<bf16>(first + x.len()).unwrap();
            stream.upload(&x, part(&mut memory, first, x.len())).unwrap();
            let values = cuda::Values::Bf16(memory.slice().range(first..first + x.len()));
            let input = cuda::Input::new(values, rows, cols).unwrap();
            let mut buffers = expected.each_ref().map(|e| {
                let room = |len| device.alloc::<u8>(first + len).unwrap();
                (room(e.codes.len()), room(e.scales.len()), device.alloc::<f32>(first + 1).unwrap())
            });
            let directions = buffers.each_mut().map(|(codes, scales, amax)| {
                let (code_len, scale_len) = (codes.len() - first, scales.len() - first);
                Direction {
                    mode,
                    rounding: Rounding::NearestEven,
                    transform: None,
                    layout: Layout::Linear,
                    amax: Amax::Compute(part(amax, first, 1)),
                    to: Written::Codes { codes: part(codes, first, code_len), scales: part(scales, first, scale_len) },
                }
            });
            let [row, col] = directions;
            quantize(&stream, &input, Some(row), Some(col)).unwrap();
            for ((codes, scales, amax), expected) in buffers.iter().zip(&expected) {
                let got = Output {
                    codes: stream.to_host(codes.slice().range(first..codes.len())).unwrap(),
                    scales: stream.to_host(scales.slice().range(first..scales.len())).unwrap(),
                    amax: stream.to_host(amax.slice().range(first..first + 1)).unwrap(),
                };
                assert!(got == *expected, "{rows} × {cols}, {first} past the start");
            }
        }
    }
}

/// Rows of one block per thread and of several, the longest that take one pass, and longer ones.
#[test]
fn long_rows_give_the_same_bits() {
    let Some(device) = device() else { return };
    for (rows, cols) in [(3, 2064), (3, 40000), (2, 65536), (2, 70000)] {
        let x = matrix(6, rows * cols);
        let f32s: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        let f16s: Vec<f16> = f32s.iter().map(|&x| f16::from_f32(x)).collect();
        for values in [Values::Bf16(&x), Values::F16(&f16s), Values::F32(&f32s)] {
            for global in [GlobalScale::PerRow, GlobalScale::PerTensor] {
                let mode = Mode { global, ..Mode::default() };
                let [cpu, gpu] = [Implementation::best(), Implementation::Cuda(device)]
                    .map(|i| run(i, values, (rows, cols), mode, None, Columns::None));
                assert!(cpu == gpu, "{rows} × {cols}, {:?}, {global:?}", values.precision());
            }
        }
    }
}

#[test]
fn a_replayed_graph_draws_fresh_random_numbers() {
    let Some(device) = device() else { return };
    let (rows, cols, seed) = (64, 256, 11);
    let stream = Stream::new(device).unwrap();
    let x = matrix(2, rows * cols);
    let memory = stream.to_device(&x).unwrap();
    let input = cuda::Input::new(cuda::Values::Bf16(memory.slice()), rows, cols).unwrap();
    let mut offset = stream.to_device(&[40u64]).unwrap();
    let mut out = [0, 1].map(|_| (device.alloc(rows * cols / 2).unwrap(), device.alloc(rows * cols / 16).unwrap()));
    let amax = stream.to_device(&[4.0f32]).unwrap();
    let mut work = |stream: &Stream| -> Result<(), Error> {
        let mut plus = 0;
        let at = offset.slice();
        let directions = out.each_mut().map(|(codes, scales)| {
            let random = Random::Stream { seed, offset: Offset::Memory { at, plus }, first_block: 0 };
            plus += 1;
            Direction {
                mode: Mode::default(),
                rounding: Rounding::Stochastic(random),
                transform: None,
                layout: Layout::Linear,
                amax: Amax::Given(amax.slice()),
                to: Written::Codes { codes: codes.slice_mut(), scales: scales.slice_mut() },
            }
        });
        let [row, col] = directions;
        quantize(stream, &input, Some(row), Some(col))?;
        advance(stream, offset.slice_mut())
    };
    // Kernels are loaded by the first run; a capture only records.
    work(&stream).unwrap();
    let graph = stream.capture(work).unwrap();
    for replay in 1..4 {
        // SAFETY: everything that the graph uses outlives it, and nothing else runs.
        unsafe { graph.launch(&stream) }.unwrap();
        stream.synchronize().unwrap();
        let at = 40 + replay * stochastic::OFFSETS_PER_CALL;
        let streams = [stochastic::Stream::row(seed, at), stochastic::Stream::column(seed, at)];
        let expected = given(&x, (rows, cols), 4.0, streams);
        for ((codes, scales), expected) in out.iter().zip(&expected) {
            assert!(stream.to_host(codes.slice()).unwrap() == expected.codes, "replay {replay}");
            assert!(stream.to_host(scales.slice()).unwrap() == expected.scales, "replay {replay}");
        }
    }
    assert_eq!(stream.to_host(offset.slice()).unwrap(), [48]);
}

/// Both directions on the CPU with a given amax.
fn given(x: &[bf16], (rows, cols): (usize, usize), amax: f32, streams: [stochastic::Stream; 2]) -> [Output; 2] {
    let mode = Mode::default();
    let mut out = [Output::new(rows, cols, &mode), Output::new(cols, rows, &mode)];
    let given = [amax];
    let [row, col] = &mut out;
    let row = host::Direction { amax: host::Amax::Given(&given), ..row.direction(mode, Some(streams[0]), None) };
    let col = host::Direction { amax: host::Amax::Given(&given), ..col.direction(mode, Some(streams[1]), None) };
    host::quantize(Implementation::best(), &Input::new(Values::Bf16(x), rows, cols).unwrap(), Some(row), Some(col))
        .unwrap();
    out
}

#[test]
fn wrong_memory_is_refused_and_the_device_stays_usable() {
    let Some(device) = device() else { return };
    let stream = Stream::new(device).unwrap();
    let values = vec![1.0f32; 64];
    // SAFETY: a host address; it is looked up and refused, not accessed.
    let foreign = unsafe { Slice::<f32>::from_raw(values.as_ptr() as u64, 64) };
    let memory = device.alloc::<f32>(65).unwrap();
    // SAFETY: within the buffer, but misaligned; it is refused.
    let crooked = unsafe { Slice::<f32>::from_raw(memory.slice().address() + 2, 64) };
    for (slice, words) in [(foreign, "input"), (crooked, "input")] {
        let input = cuda::Input::new(cuda::Values::F32(slice), 4, 16).unwrap();
        let mut out = device.alloc::<f32>(1).unwrap();
        let outputs = amax::cuda::Outputs { tensor: Some(out.slice_mut()), ..Default::default() };
        let error = amax::cuda::amax(&stream, &input, Specials::Kernel, outputs).unwrap_err();
        println!("{error}");
        assert!(matches!(error, Error::Cuda(_)) && error.to_string().contains(words), "{error}");
    }
    let x = matrix(3, 4096);
    for columns in [Columns::None, Columns::Hadamard] {
        let [cpu, gpu] = [Implementation::best(), Implementation::Cuda(device)]
            .map(|i| run(i, Values::Bf16(&x), (64, 64), Mode::default(), None, columns));
        assert_eq!(cpu, gpu);
    }
}

/// Every legal mode in both directions at the shape of the benchmark, and a ragged one near it.
#[test]
#[ignore = "needs a GPU, 16 GB of memory and minutes"]
fn large_matrices_in_every_mode() {
    let Some(device) = device() else { return };
    for (rows, cols) in [(16384, 6144), (16383, 6143)] {
        let x = matrix(4, rows * cols);
        let mut checked = 0;
        for (tile, global) in [
            (Tile::Row16, GlobalScale::PerTensor),
            (Tile::Row16, GlobalScale::PerRow),
            (Tile::Square16, GlobalScale::PerTensor),
        ] {
            for rule in ScaleRule::ALL {
                let mode = Mode { tile, global, rule, ..Mode::default() };
                if mode.check(&Rounding::<()>::NearestEven).is_err() {
                    continue; // a search of scales is not for square tiles
                }
                let stochastic = (rule == ScaleRule::Six).then_some(STREAMS);
                for columns in [Columns::None, Columns::Plain, Columns::Hadamard] {
                    if columns == Columns::Hadamard && rows % 16 != 0 {
                        continue;
                    }
                    for rounding in [None, stochastic].into_iter().take(1 + usize::from(stochastic.is_some())) {
                        let go = |i| run(i, Values::Bf16(&x), (rows, cols), mode, rounding, columns);
                        let same = go(Implementation::best()) == go(Implementation::Cuda(device));
                        assert!(same, "{rows} × {cols}, {mode:?}, {columns:?}, {rounding:?}");
                        checked += 1;
                    }
                }
            }
        }
        println!("{rows} × {cols}: {checked} runs, no different bit");
    }
}

/// A tensor of more than 2³¹ elements: its maxima found, quantized along rows and in both
/// directions, decoded.
#[test]
#[ignore = "needs a GPU, 40 GB of memory and minutes"]
fn more_elements_than_31_bits_count() {
    let Some(device) = device() else { return };
    for (rows, cols) in [(131_200, 16_400), (16_400, 131_216)] {
        assert!(rows * cols > 1 << 31);
        let x = matrix(5, rows * cols);
        for mode in [
            Mode::default(),
            Mode { global: GlobalScale::PerRow, ..Mode::default() },
            Mode { tile: Tile::Square16, ..Mode::default() },
        ] {
            let go = |columns| {
                let [cpu, gpu] = [Implementation::best(), Implementation::Cuda(device)]
                    .map(|i| run(i, Values::Bf16(&x), (rows, cols), mode, Some(STREAMS), columns));
                assert!(cpu == gpu, "{rows} × {cols}, {mode:?}, {columns:?}");
                cpu
            };
            go(Columns::None);
            let cpu = go(Columns::Plain);
            let q = nvfp4_spec::matrix::View {
                rows,
                cols,
                codes: &cpu[0].codes,
                scales: &cpu[0].scales,
                stored: &cpu[0].amax,
                global: mode.global,
                unit: Unit::Amax(Bound::E448),
            };
            let [cpu, gpu] = [Implementation::best(), Implementation::Cuda(device)].map(|i| {
                let mut out = vec![bf16::ONE; rows * cols];
                dequantize::dequantize(i, &q, &mut out).unwrap();
                out
            });
            assert!(cpu == gpu, "{rows} × {cols} decoded");
        }
        println!("{rows} × {cols} = {} elements: no different bit", rows * cols);
    }
}

/// 10⁹ blocks by 4over6 with the strict error, half by MAE and half by MSE, and 10⁹ rounded
/// stochastically.
#[test]
#[ignore = "needs a GPU and minutes"]
fn a_billion_random_blocks() {
    let Some(device) = device() else { return };
    let (rows, cols) = (65536, 8192);
    let per_matrix = rows * cols / 16;
    for (name, modes, rounding) in [
        ("4over6 strict", [strict(Metric::Mae), strict(Metric::Mse)], None),
        ("stochastic", [Mode::default(); 2], Some(STREAMS)),
    ] {
        let mut blocks = 0usize;
        for seed in 0.. {
            let x = matrix(100 + seed, rows * cols);
            let mode = modes[seed as usize % 2];
            let go = |i| run(i, Values::Bf16(&x), (rows, cols), mode, rounding, Columns::None);
            assert!(go(Implementation::best()) == go(Implementation::Cuda(device)), "{mode:?}, matrix {seed}");
            blocks += per_matrix;
            if blocks >= 1_000_000_000 {
                break;
            }
        }
        println!("{name}: {blocks} blocks, no different bit");
    }
}
