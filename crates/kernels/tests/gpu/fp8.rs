//! FP8 and MXFP8 in a GPU's memory.

use super::{device, matrix, part};
use half::bf16;
use nvfp4_kernels::cuda::{self, Buffer, Slice, Stream};
use nvfp4_kernels::fp8::cuda::{
    Amax, Direction, Entry, Mode, Outputs, Scale, Scaling, View, dequantize, quantize, update,
};
use nvfp4_kernels::fp8::{dequantize as host_decoding, quantize as host};
use nvfp4_kernels::{Error, Implementation, Input, Values, amax};
use nvfp4_spec::Specials;
use nvfp4_spec::fp8::delayed::{self, Delayed};
use nvfp4_spec::fp8::{self, AmaxRule, Format, ScaleVec, Scales, Side};

fn modes() -> Vec<fp8::Mode> {
    let any = AmaxRule { epsilon: 0.1, ..AmaxRule::CURRENT };
    let scalings = [
        fp8::Scaling::Tensor { scale: 1.7 },
        fp8::Scaling::Row128(AmaxRule::BLOCK),
        fp8::Scaling::Row128(any),
        fp8::Scaling::Square128(AmaxRule::BLOCK),
        fp8::Scaling::Square128(any),
        fp8::Scaling::Mx,
        fp8::Scaling::MxSquare,
    ];
    scalings.into_iter().flat_map(|scaling| Format::ALL.map(|format| fp8::Mode { format, scaling })).collect()
}

/// Both directions and the amax on the CPU.
struct Expected {
    sides: [(Vec<u8>, ScaleVec); 2],
    amax: f32,
}

fn room(mode: &fp8::Mode, side: Side, shape: (usize, usize)) -> (Vec<u8>, ScaleVec) {
    let (rows, cols) = mode.shape(side, shape);
    let count = mode.tile(side).scale_count(rows, cols).unwrap();
    let scales = match mode.scaling {
        fp8::Scaling::Mx | fp8::Scaling::MxSquare => Scales::E8m0(vec![0xA5; count]),
        _ => Scales::F32(vec![-1.0; count]),
    };
    (vec![0xA5; rows * cols], scales)
}

fn host_direction((codes, scales): &mut (Vec<u8>, ScaleVec)) -> host::Direction<'_> {
    let scales = match scales {
        Scales::F32(scales) => Scales::F32(&mut scales[..]),
        Scales::E8m0(scales) => Scales::E8m0(&mut scales[..]),
    };
    host::Direction { codes, scales }
}

fn run(
    implementation: Implementation,
    x: &[bf16],
    shape: (usize, usize),
    mode: &fp8::Mode,
    sides: [bool; 2],
) -> Expected {
    let mut all = [Side::Row, Side::Column].map(|side| room(mode, side, shape));
    let mut amax = -1.0;
    let [row, col] = &mut all;
    let wanted = host::Outputs {
        row: sides[0].then(|| host_direction(row)),
        col: sides[1].then(|| host_direction(col)),
        amax: Some(&mut amax),
    };
    let input = Input::new(Values::Bf16(x), shape.0, shape.1).unwrap();
    host::quantize(implementation, &input, mode, wanted).unwrap();
    Expected { sides: all, amax }
}

/// The buffers of a direction, with `first` elements before what is used.
struct Buffers {
    codes: Buffer<u8>,
    scales: Scales<Buffer<f32>, Buffer<u8>>,
    first: usize,
}

impl Buffers {
    fn new(device: cuda::Device, (codes, scales): &(Vec<u8>, ScaleVec), first: usize) -> Self {
        let scales = match scales {
            Scales::F32(scales) => Scales::F32(device.alloc(first + scales.len()).unwrap()),
            Scales::E8m0(scales) => Scales::E8m0(device.alloc(first + scales.len()).unwrap()),
        };
        Buffers { codes: device.alloc(first + codes.len()).unwrap(), scales, first }
    }

    fn direction(&mut self) -> Direction<'_> {
        let first = self.first;
        let len = self.codes.len() - first;
        let scales = match &mut self.scales {
            Scales::F32(scales) => {
                let len = scales.len() - first;
                Scales::F32(part(scales, first, len))
            }
            Scales::E8m0(scales) => {
                let len = scales.len() - first;
                Scales::E8m0(part(scales, first, len))
            }
        };
        Direction { codes: part(&mut self.codes, first, len), scales }
    }

    fn codes(&self) -> Slice<'_, u8> {
        self.codes.slice().range(self.first..self.codes.len())
    }

    fn scales(&self) -> Scales<Slice<'_, f32>, Slice<'_, u8>> {
        match &self.scales {
            Scales::F32(scales) => Scales::F32(scales.slice().range(self.first..scales.len())),
            Scales::E8m0(scales) => Scales::E8m0(scales.slice().range(self.first..scales.len())),
        }
    }

    fn check(&self, stream: &Stream, (codes, scales): &(Vec<u8>, ScaleVec), what: &str) {
        assert!(stream.to_host(self.codes()).unwrap() == *codes, "codes: {what}");
        let got = match self.scales() {
            Scales::F32(scales) => Scales::F32(stream.to_host(scales).unwrap()),
            Scales::E8m0(scales) => Scales::E8m0(stream.to_host(scales).unwrap()),
        };
        assert!(got == *scales, "scales: {what}");
    }
}

#[test]
fn memory_that_starts_anywhere_gives_the_same_bits_of_fp8() {
    let Some(device) = device() else { return };
    let stream = Stream::new(device).unwrap();
    for shape @ (rows, cols) in [(48, 64), (35, 70), (128, 128), (256, 384)] {
        let x = matrix(1, rows * cols);
        for mode in modes() {
            let expected = run(Implementation::best(), &x, shape, &mode, [true, true]);
            for first in [0, 1, 3, 8, 16] {
                let what = format!("{mode:?}, {rows} × {cols}, {first} past the start");
                let mut memory = device.alloc::<bf16>(first + x.len()).unwrap();
                stream.upload(&x, part(&mut memory, first, x.len())).unwrap();
                let values = cuda::Values::Bf16(memory.slice().range(first..first + x.len()));
                let input = cuda::Input::new(values, rows, cols).unwrap();
                let mut outputs = expected.sides.each_ref().map(|side| Buffers::new(device, side, first));
                let mut largest = device.alloc::<f32>(first + 1).unwrap();
                let [row, col] = &mut outputs;
                let wanted = Outputs {
                    row: Some(row.direction()),
                    col: Some(col.direction()),
                    amax: Some(Amax::Replace(part(&mut largest, first, 1))),
                };
                quantize(&stream, &input, &Mode::from(mode), wanted).unwrap();
                assert_eq!(stream.to_host(largest.slice().range(first..first + 1)).unwrap(), [expected.amax], "{what}");
                for ((outputs, expected), side) in outputs.iter().zip(&expected.sides).zip([Side::Row, Side::Column]) {
                    outputs.check(&stream, expected, &format!("{side:?} of {what}"));
                    let (rows, cols) = mode.shape(side, shape);
                    let (format, tile) = (mode.format, mode.tile(side));
                    let view = View { rows, cols, format, tile, codes: outputs.codes(), scales: outputs.scales() };
                    let mut out = device.alloc::<bf16>(first + x.len()).unwrap();
                    dequantize(&stream, &view, part(&mut out, first, x.len())).unwrap();
                    let (codes, scales) = (&expected.0[..], expected.1.view());
                    let view = fp8::View { rows, cols, format, tile, codes, scales };
                    let mut decoded = vec![bf16::ONE; x.len()];
                    host_decoding::dequantize(Implementation::best(), &view, &mut decoded).unwrap();
                    assert!(stream.to_host(out.slice().range(first..first + x.len())).unwrap() == decoded, "{what}");
                }
            }
        }
    }
}

/// A step of delayed scaling, captured once: each replay quantizes with the scale that the previous
/// one computed, and no replay waits for the host.
#[test]
fn a_replayed_graph_moves_delayed_scaling_on() {
    let Some(device) = device() else { return };
    let (shape @ (rows, cols), stream) = ((64, 256), Stream::new(device).unwrap());
    let rule = Delayed { margin: 1, ..Delayed::default() };
    let mut memory = device.alloc::<bf16>(rows * cols).unwrap();
    let (mut history, mut scale) = (stream.to_device(&[0.0f32; 4]).unwrap(), stream.to_device(&[1.0f32]).unwrap());
    let (mut expected_history, mut expected_scale) = ([0.0f32; 4], 1.0);
    let mut tensor = fp8::Mode { format: rule.format, scaling: fp8::Scaling::Tensor { scale: 1.0 } };
    let first = [Side::Row, Side::Column].map(|side| room(&tensor, side, shape));
    let mut outputs = first.each_ref().map(|side| Buffers::new(device, side, 0));
    let steps: Vec<Vec<bf16>> = (0..6).map(|seed| matrix(seed, rows * cols)).collect();
    let mut graph = None;
    for (step, x) in steps.iter().enumerate() {
        let x: Vec<bf16> = x.iter().map(|x| bf16::from_f32(x.to_f32() * (step * step) as f32)).collect();
        stream.upload(&x, memory.slice_mut()).unwrap();
        let mut work = |stream: &Stream| -> Result<(), Error> {
            let input = cuda::Input::new(cuda::Values::Bf16(memory.slice()), rows, cols)?;
            let [row, col] = &mut outputs;
            let wanted = Outputs {
                row: Some(row.direction()),
                col: Some(col.direction()),
                amax: Some(Amax::Join(history.slice_mut().range(0..1))),
            };
            let scaling = Scaling::Tensor(Scale::Memory(scale.slice()));
            quantize(stream, &input, &Mode { format: rule.format, scaling }, wanted)?;
            update(stream, &rule, history.slice_mut(), scale.slice_mut(), Entry::Bulk { reduced: None })
        };
        match &graph {
            // Kernels are loaded by the first run; a capture only records.
            None if step == 0 => work(&stream).unwrap(),
            None => graph = Some(stream.capture(work).unwrap()),
            Some(_) => {}
        }
        if let Some(graph) = &graph {
            // SAFETY: everything that the graph uses outlives it, and nothing else runs.
            unsafe { graph.launch(&stream) }.unwrap();
            stream.synchronize().unwrap();
        }
        tensor.scaling = fp8::Scaling::Tensor { scale: expected_scale };
        let expected = run(Implementation::best(), &x, shape, &tensor, [true, true]);
        delayed::record(&mut expected_history, expected.amax);
        let entry = delayed::Entry::Bulk { reduced: None };
        expected_scale = rule.update(&mut expected_history, expected_scale, entry).unwrap();
        for (outputs, expected) in outputs.iter().zip(&expected.sides) {
            outputs.check(&stream, expected, &format!("step {step}"));
        }
        assert_eq!(stream.to_host(history.slice()).unwrap(), expected_history, "step {step}");
        assert_eq!(stream.to_host(scale.slice()).unwrap(), [expected_scale], "step {step}");
    }
}

#[test]
fn current_scaling_needs_no_word_from_the_host() {
    let Some(device) = device() else { return };
    let (shape @ (rows, cols), stream) = ((130, 272), Stream::new(device).unwrap());
    let x = matrix(5, rows * cols);
    let memory = stream.to_device(&x).unwrap();
    let input = cuda::Input::new(cuda::Values::Bf16(memory.slice()), rows, cols).unwrap();
    for rule in [AmaxRule::CURRENT, AmaxRule::BLOCK, AmaxRule { epsilon: 1e6, ..AmaxRule::CURRENT }] {
        for format in Format::ALL {
            let mut largest = device.alloc::<f32>(1).unwrap();
            let wanted = amax::cuda::Outputs { tensor: Some(largest.slice_mut()), ..Default::default() };
            amax::cuda::amax(&stream, &input, Specials::Kernel, wanted).unwrap();
            let host_amax = x.iter().fold(0.0, |m: f32, x| m.max(x.to_f32().abs()));
            let scale = rule.tensor_scale(host_amax, format);
            let mode = fp8::Mode { format, scaling: fp8::Scaling::Tensor { scale } };
            let expected = run(Implementation::best(), &x, shape, &mode, [true, true]);
            let mut outputs = expected.sides.each_ref().map(|side| Buffers::new(device, side, 0));
            let [row, col] = &mut outputs;
            let wanted = Outputs { row: Some(row.direction()), col: Some(col.direction()), amax: None };
            let scaling = Scaling::Tensor(Scale::OfAmax { amax: largest.slice(), rule });
            quantize(&stream, &input, &Mode { format, scaling }, wanted).unwrap();
            for (outputs, expected) in outputs.iter().zip(&expected.sides) {
                outputs.check(&stream, expected, &format!("{rule:?} {format:?}"));
            }
        }
    }
}

/// An amax alone, and one that is joined with what was seen before.
#[test]
fn an_amax_is_replaced_or_joined() {
    let Some(device) = device() else { return };
    let stream = Stream::new(device).unwrap();
    let memory = stream.to_device(&[1.0f32, -3.0, f32::NAN, 2.0]).unwrap();
    let input = cuda::Input::new(cuda::Values::F32(memory.slice()), 2, 2).unwrap();
    for before in [0.5f32, 7.0] {
        let mut found = stream.to_device(&[before]).unwrap();
        let go = |amax: Amax<'_>| {
            let wanted = Outputs { amax: Some(amax), ..Outputs::default() };
            quantize(&stream, &input, &modes()[0].into(), wanted).unwrap();
        };
        go(Amax::Join(found.slice_mut()));
        assert_eq!(stream.to_host(found.slice()).unwrap(), [before.max(3.0)]);
        go(Amax::Replace(found.slice_mut()));
        assert_eq!(stream.to_host(found.slice()).unwrap(), [3.0]);
    }
}

#[test]
fn wrong_memory_is_refused_by_fp8() {
    let Some(device) = device() else { return };
    let stream = Stream::new(device).unwrap();
    let values = [1.0f32; 64];
    // SAFETY: a host address; it is looked up and refused, not accessed.
    let foreign = unsafe { Slice::<f32>::from_raw(values.as_ptr() as u64, 1) };
    let memory = stream.to_device(&values).unwrap();
    let input = cuda::Input::new(cuda::Values::F32(memory.slice()), 4, 16).unwrap();
    let mode = modes()[0];
    for scale in [Scale::Memory(foreign), Scale::OfAmax { amax: foreign, rule: AmaxRule::CURRENT }] {
        let mut outputs = Buffers::new(device, &room(&mode, Side::Row, (4, 16)), 0);
        let wanted = Outputs { row: Some(outputs.direction()), ..Outputs::default() };
        let scaling = Scaling::Tensor(scale);
        let error = quantize(&stream, &input, &Mode { format: mode.format, scaling }, wanted).unwrap_err();
        assert!(matches!(error, Error::Cuda(_)) && error.to_string().contains("of the tensor"), "{error}");
    }
    let mut outputs = Buffers::new(device, &room(&mode, Side::Row, (4, 17)), 0);
    let wanted = Outputs { row: Some(outputs.direction()), ..Outputs::default() };
    let error = quantize(&stream, &input, &mode.into(), wanted).unwrap_err();
    assert_eq!(error.to_string(), "codes: expected length 64, got 68");
}

/// Every mode at the shape of the benchmark, a ragged one near it, and one of more than 2³¹
/// elements.
#[test]
#[ignore = "needs a GPU, 32 GB of memory and minutes"]
fn large_matrices_in_every_mode_of_fp8() {
    let Some(device) = device() else { return };
    for (shape @ (rows, cols), modes) in
        [((16384, 6144), modes()), ((16383, 6143), modes()), ((65600, 32800), modes().into_iter().step_by(5).collect())]
    {
        let x = matrix(7, rows * cols);
        for mode in modes {
            for sides in [[true, false], [true, true]] {
                let [cpu, gpu] = [Implementation::best(), Implementation::Cuda(device)]
                    .map(|implementation| run(implementation, &x, shape, &mode, sides));
                assert!(cpu.sides == gpu.sides && cpu.amax == gpu.amax, "{rows} × {cols}, {mode:?}, {sides:?}");
                if sides == [true, true] {
                    for ((codes, scales), side) in cpu.sides.iter().zip([Side::Row, Side::Column]) {
                        let (rows, cols) = mode.shape(side, shape);
                        let (format, tile, scales) = (mode.format, mode.tile(side), scales.view());
                        let view = fp8::View { rows, cols, format, tile, codes, scales };
                        let [cpu, gpu] = [Implementation::best(), Implementation::Cuda(device)].map(|implementation| {
                            let mut out = vec![bf16::ONE; rows * cols];
                            host_decoding::dequantize(implementation, &view, &mut out).unwrap();
                            out
                        });
                        assert!(cpu == gpu, "{rows} × {cols} decoded, {mode:?}, {side:?}");
                    }
                }
            }
        }
        println!("{rows} × {cols} = {} elements: no different bit", rows * cols);
    }
}
