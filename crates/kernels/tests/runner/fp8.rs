//! FP8 in the runner: quantizes and decodes in every implementation, and compares with the scalar
//! one.

use super::{Runner, canonical};
use half::{bf16, f16};
use nvfp4_kernels::Implementation;
use nvfp4_kernels::fp8::dequantize::dequantize;
use nvfp4_kernels::fp8::quantize::{Direction, Outputs, quantize};
use nvfp4_spec::Element;
use nvfp4_spec::fp8::{AmaxRule, Format, Mode, ScaleValues, ScaleVec, Scales, Scaling, Side, View};

/// Every scaling, with scales that are any numbers and powers of two.
pub fn modes() -> Vec<Mode> {
    let mut scalings = vec![Scaling::Mx, Scaling::MxSquare];
    scalings.extend([1.0, 0.0371, 448.0 / 3.3, 1e-30, f32::MAX].map(|scale| Scaling::Tensor { scale }));
    for values in [ScaleValues::Any, ScaleValues::PowersOfTwo] {
        for epsilon in [0.0, 0.7] {
            let rule = AmaxRule { values, epsilon };
            scalings.extend([Scaling::Row128(rule), Scaling::Square128(rule)]);
        }
    }
    scalings.into_iter().flat_map(|scaling| Format::ALL.map(|format| Mode { format, scaling })).collect()
}

/// What a direction came out as.
struct Bytes {
    codes: Vec<u8>,
    scales: ScaleVec,
}

impl Bytes {
    /// The bits of the scales.
    fn scale_bits(&self) -> Vec<u32> {
        match &self.scales {
            Scales::F32(scales) => scales.iter().map(|&x| canonical(x)).collect(),
            Scales::E8m0(scales) => scales.iter().map(|&x| u32::from(x)).collect(),
        }
    }

    fn direction(&mut self) -> Direction<'_> {
        let scales = match &mut self.scales {
            Scales::F32(scales) => Scales::F32(&mut scales[..]),
            Scales::E8m0(scales) => Scales::E8m0(&mut scales[..]),
        };
        Direction { codes: &mut self.codes, scales }
    }
}

/// Which outputs are asked for.
const REQUESTS: [[bool; 3]; 5] =
    [[true, true, true], [true, false, true], [false, true, true], [true, true, false], [false, false, true]];

impl Runner {
    /// Rows, columns and both, with and without the amax, then decoded.
    pub fn check_fp8(&self, mode: &Mode) {
        for request in REQUESTS {
            let (expected, amax) = self.quantize_fp8(Implementation::Scalar, mode, request);
            for implementation in Implementation::available() {
                let (got, got_amax) = self.quantize_fp8(implementation, mode, request);
                let place = format!("{implementation} {mode:?} {request:?}\n{:?}", self.case);
                for ((side, got), expected) in ["row", "column"].iter().zip(&got).zip(&expected) {
                    let at = got.codes.iter().zip(&expected.codes).position(|(a, b)| a != b);
                    if let Some(i) = at {
                        panic!(
                            "{side}: code {i}: {:#04x} instead of {:#04x}\n{place}",
                            got.codes[i], expected.codes[i]
                        );
                    }
                    assert!(got.scale_bits() == expected.scale_bits(), "{side}: scales differ\n{place}");
                }
                assert_eq!(canonical(got_amax), canonical(amax), "amax\n{place}");
            }
            if request == REQUESTS[0] {
                for (bytes, side) in expected.iter().zip([Side::Row, Side::Column]) {
                    let (rows, cols) = mode.shape(side, (self.case.rows, self.case.cols));
                    let (format, tile, scales) = (mode.format, mode.tile(side), bytes.scales.view());
                    check_decoded(&View { rows, cols, format, tile, codes: &bytes.codes, scales });
                }
            }
        }
    }

    fn quantize_fp8(
        &self,
        implementation: Implementation,
        mode: &Mode,
        [row, col, amax]: [bool; 3],
    ) -> ([Bytes; 2], f32) {
        let mut both = [Side::Row, Side::Column].map(|side| {
            let (rows, cols) = mode.shape(side, (self.case.rows, self.case.cols));
            let count = mode.tile(side).scale_count(rows, cols).unwrap();
            let scales = match mode.scaling {
                Scaling::Mx | Scaling::MxSquare => Scales::E8m0(vec![0xA5; count]),
                _ => Scales::F32(vec![-77.0; count]),
            };
            Bytes { codes: vec![0xA5; rows * cols], scales }
        });
        let mut found = -77.0;
        let [first, second] = &mut both;
        let outputs = Outputs {
            row: row.then(|| first.direction()),
            col: col.then(|| second.direction()),
            amax: amax.then_some(&mut found),
        };
        quantize(implementation, &self.input(), mode, outputs).unwrap();
        (both, found)
    }
}

/// Decodes to all three types in every implementation.
pub fn check_decoded(view: &View<'_>) {
    check_type::<f32>(view);
    check_type::<bf16>(view);
    check_type::<f16>(view);
}

fn check_type<T: Element>(view: &View<'_>) {
    let decode = |implementation| {
        let mut out = vec![T::from_f32(77.0); view.rows * view.cols];
        dequantize(implementation, view, &mut out).unwrap();
        out.into_iter().map(|x| canonical(x.to_f32())).collect::<Vec<u32>>()
    };
    let expected = decode(Implementation::Scalar);
    for implementation in Implementation::available() {
        let got = decode(implementation);
        if let Some(i) = got.iter().zip(&expected).position(|(a, b)| a != b) {
            let (View { rows, cols, format, tile, .. }, a, b) = (view, got[i], expected[i]);
            panic!("{implementation} {format:?} {tile:?} {rows} × {cols}: value {i} is {a:#x} instead of {b:#x}");
        }
    }
}
