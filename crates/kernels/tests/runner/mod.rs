//! The agreement runner: quantizes and decodes a generated matrix in every implementation, and
//! compares with the scalar one.

#[path = "../bounded/mod.rs"]
mod bounded;
pub mod fp8;

use half::{bf16, f16};
use nvfp4_kernels::quantize::{Amax, Direction, Layout, quantize};
use nvfp4_kernels::{Implementation, Input, Values, amax, dequantize, gemm, gguf, hadamard, swizzle};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::matrix::View;
use nvfp4_spec::philox::philox4x32;
use nvfp4_spec::scale::Unit;
use nvfp4_spec::stochastic::{Random, Stream};
use nvfp4_spec::{Bound, Element, GlobalScale, Mode, Precision, Rounding, ScaleRule, Specials, Tile, e2m1};

/// Kinds of values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fill {
    Normal,
    /// Many exponents, zeros and −0.
    Wide,
    /// NaN, infinities, −0, subnormals and the largest values among ordinary ones.
    Special,
    /// Midpoints of the code grid and their neighbours.
    Ties,
    /// Blocks far below the tensor's amax, down to zero.
    Small,
    Zero,
}

impl Fill {
    pub const ALL: [Fill; 6] = [Fill::Normal, Fill::Wide, Fill::Special, Fill::Ties, Fill::Small, Fill::Zero];

    fn value(self, i: usize, row: usize) -> f32 {
        let [a, b, c, d] = philox4x32([i as u32, (i >> 32) as u32, 0, self as u32], [7, 11]);
        let normal = normal(a, b);
        let sign = if d & 1 == 0 { 1.0 } else { -1.0 };
        match self {
            Fill::Normal => normal,
            Fill::Wide => match c % 16 {
                0 => 0.0 * sign,
                _ => normal * 2f32.powi((c % 60) as i32 - 30),
            },
            Fill::Special => match c % 64 {
                0 => f32::NAN * sign,
                1 if row.is_multiple_of(3) => f32::INFINITY * sign,
                2 => -0.0,
                3 => 1e-40 * sign,
                4 if row % 3 == 1 => f32::MAX * sign,
                5 => f32::from_bits(0x7FFF_FFFF),
                _ => normal,
            },
            Fill::Ties => {
                let grid = [0.25f32, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 4.5, 3.0, 2.0];
                let tie = grid[(a % 11) as usize];
                let near = f32::from_bits(tie.to_bits().wrapping_add(b % 3).wrapping_sub(1));
                sign * if c % 2 == 0 { tie } else { near } * if i % 160 < 16 { 448.0 } else { 1.0 }
            }
            Fill::Small => normal * 2f32.powi(-(((i / 16) % 40) as i32)),
            Fill::Zero => 0.0 * sign,
        }
    }
}

/// A standard normal value from two random words (Box–Muller).
pub fn normal(a: u32, b: u32) -> f32 {
    let unit = |w: u32| (f64::from(w) + 0.5) / 4294967296.0;
    ((-2.0 * unit(a).ln()).sqrt() * (std::f64::consts::TAU * unit(b)).cos()) as f32
}

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub rows: usize,
    pub cols: usize,
    pub mode: Mode,
    /// The column direction's mode, if it has one of its own.
    pub col_mode: Option<Mode>,
    pub precision: Precision,
    pub fill: Fill,
    /// Elements before the first row, and between rows.
    pub offset: usize,
    pub gap: usize,
    pub amax: Option<f32>,
    pub swizzled: bool,
}

impl Case {
    pub fn new(rows: usize, cols: usize) -> Self {
        Case {
            rows,
            cols,
            mode: Mode::default(),
            col_mode: None,
            precision: Precision::Bf16,
            fill: Fill::Normal,
            offset: 0,
            gap: 0,
            amax: None,
            swizzled: false,
        }
    }
}

/// A case with its values in memory.
pub struct Runner {
    case: Case,
    f32s: Vec<f32>,
    bf16s: Vec<bf16>,
    f16s: Vec<f16>,
}

/// What a direction came out as.
#[derive(PartialEq)]
struct Bytes {
    codes: Vec<u8>,
    scales: Vec<u8>,
    amax: Vec<u32>,
}

/// Output buffers, filled with a value that is nowhere expected throughout.
struct Buffers {
    codes: Vec<u8>,
    scales: Vec<u8>,
    amax: Vec<f32>,
    blocks: usize,
}

/// How codes are rounded, and where random bytes come from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    Nearest,
    Stream,
    /// A stream whose block index runs over the end of 64 bits.
    LateStream,
    Bytes,
}

/// What a run asks for beyond the case.
#[derive(Clone, Copy, Debug)]
struct Request {
    row: bool,
    col: bool,
    rounding: Source,
    transform: Option<Signs>,
}

impl Runner {
    pub fn new(case: Case) -> Self {
        let stride = case.cols + case.gap;
        let values = (0..case.offset + case.rows * stride).map(|i| {
            let at = i.wrapping_sub(case.offset);
            case.fill.value(at, at.checked_div(stride).unwrap_or(0))
        });
        Runner::of(case, values.collect())
    }

    /// A case with its values, offset and gaps included.
    pub fn of(case: Case, f32s: Vec<f32>) -> Self {
        let (mut bf16s, mut f16s): (Vec<bf16>, Vec<f16>) = (vec![], vec![]);
        match case.precision {
            Precision::F32 => {}
            Precision::Bf16 => bf16s = f32s.iter().map(|&x| Element::from_f32(x)).collect(),
            Precision::F16 => f16s = f32s.iter().map(|&x| Element::from_f32(x)).collect(),
        }
        Runner { case, f32s, bf16s, f16s }
    }

    fn input(&self) -> Input<'_> {
        let Case { rows, cols, offset, gap, .. } = self.case;
        let values = match self.case.precision {
            Precision::F32 => Values::F32(&self.f32s[offset..]),
            Precision::Bf16 => Values::Bf16(&self.bf16s[offset..]),
            Precision::F16 => Values::F16(&self.f16s[offset..]),
        };
        Input::strided(values, rows, cols, cols + gap).unwrap()
    }

    /// Rows, columns and both; nearest and stochastic; with and without the transform; then
    /// decoded.
    pub fn check(&self) {
        let plain = Request { row: true, col: true, rounding: Source::Nearest, transform: None };
        let mut requests = vec![plain, Request { col: false, ..plain }, Request { row: false, ..plain }];
        let six = |mode: Mode| mode.rule == ScaleRule::Six;
        if six(self.case.mode) && self.case.col_mode.is_none_or(six) {
            for rounding in [Source::Stream, Source::LateStream, Source::Bytes] {
                requests.push(Request { rounding, ..plain });
            }
        }
        if self.case.rows.is_multiple_of(16) {
            for signs in [Signs::FIXED, Signs(0x0F31)] {
                requests.push(Request { transform: Some(signs), ..plain });
                requests.push(Request { row: false, transform: Some(signs), ..plain });
            }
        }
        for request in requests {
            let expected = self.quantize(Implementation::Scalar, request);
            for implementation in Implementation::available() {
                let got = self.quantize(implementation, request);
                for ((side, got), expected) in ["row", "column"].iter().zip(&got).zip(&expected) {
                    self.compare(implementation, request, side, got, expected);
                }
            }
            if !self.case.swizzled {
                self.check_decoded(&expected[0], request);
            }
        }
    }

    fn compare(&self, implementation: Implementation, request: Request, side: &str, got: &Bytes, expected: &Bytes) {
        let first = |a: &[u8], b: &[u8]| a.iter().zip(b).position(|(a, b)| a != b);
        let place = match (first(&got.codes, &expected.codes), first(&got.scales, &expected.scales)) {
            (Some(i), _) => format!("code byte {i}: {:#04x} instead of {:#04x}", got.codes[i], expected.codes[i]),
            (_, Some(i)) => format!("scale {i}: {:#04x} instead of {:#04x}", got.scales[i], expected.scales[i]),
            _ => format!("amax {:x?} instead of {:x?}", got.amax, expected.amax),
        };
        assert!(got == expected, "{implementation}, {side}: {place}\n{:?}\n{request:?}", self.case);
    }

    fn quantize(&self, implementation: Implementation, request: Request) -> [Bytes; 2] {
        let Case { rows, cols, amax, .. } = self.case;
        let given = amax.map(|a| vec![a; rows.max(cols)]);
        let col_mode = self.case.col_mode.unwrap_or(self.case.mode);
        let mut row = self.buffers(rows, cols, &self.case.mode);
        let mut col = self.buffers(cols, rows, &col_mode);
        let random: Vec<u8> = (0..16 * (row.blocks.max(col.blocks))).map(|i| (i * 151 + i / 7) as u8).collect();
        let row_target = request.row.then(|| self.direction(request, &mut row, given.as_deref(), &random, false));
        let col_target = request.col.then(|| self.direction(request, &mut col, given.as_deref(), &random, true));
        quantize(implementation, &self.input(), row_target, col_target).unwrap();
        [row, col].map(|b| Bytes {
            codes: b.codes,
            scales: b.scales,
            amax: b.amax.into_iter().map(canonical).collect(),
        })
    }

    fn layout(&self) -> Layout {
        if self.case.swizzled { Layout::Swizzled } else { Layout::Linear }
    }

    fn buffers(&self, rows: usize, cols: usize, mode: &Mode) -> Buffers {
        Buffers {
            codes: vec![0xA5; rows * e2m1::packed_len(cols)],
            scales: vec![0xA5; self.layout().scale_len(rows, cols).unwrap()],
            amax: vec![-1.0; mode.global.count(rows)],
            blocks: Layout::Linear.scale_len(rows, cols).unwrap(),
        }
    }

    fn direction<'a>(
        &self,
        request: Request,
        buffers: &'a mut Buffers,
        given: Option<&'a [f32]>,
        random: &'a [u8],
        column: bool,
    ) -> Direction<'a> {
        let stream = if column { Stream::column(3, 5) } else { Stream::row(3, 5) };
        let late = Stream { first_block: u64::MAX - 5, ..stream };
        Direction {
            mode: self.case.col_mode.filter(|_| column).unwrap_or(self.case.mode),
            rounding: match request.rounding {
                Source::Nearest => Rounding::NearestEven,
                Source::Stream => Rounding::Stochastic(Random::Stream(stream)),
                Source::LateStream => Rounding::Stochastic(Random::Stream(late)),
                Source::Bytes => Rounding::Stochastic(Random::Bytes(&random[..16 * buffers.blocks])),
            },
            transform: request.transform.filter(|_| column),
            layout: self.layout(),
            amax: match given {
                Some(given) => Amax::Given(&given[..buffers.amax.len()]),
                None => Amax::Compute(&mut buffers.amax),
            },
            codes: &mut buffers.codes,
            scales: &mut buffers.scales,
        }
    }

    /// Decodes the row direction in all three types.
    fn check_decoded(&self, q: &Bytes, request: Request) {
        let Case { rows, cols, mode, .. } = self.case;
        if !request.row {
            return;
        }
        let stored: Vec<f32> = match self.case.amax {
            Some(amax) => vec![amax; mode.global.count(rows)],
            None => q.amax.iter().map(|&bits| f32::from_bits(bits)).collect(),
        };
        let stored: Vec<f32> =
            stored.iter().map(|&a| mode.profile.stored(a, mode.rule.bound(), self.case.precision)).collect();
        let unit = mode.profile.unit(mode.rule.bound());
        let view = View { rows, cols, codes: &q.codes, scales: &q.scales, stored: &stored, global: mode.global, unit };
        self.check_type::<f32>(&view);
        self.check_type::<bf16>(&view);
        self.check_type::<f16>(&view);
    }

    fn check_type<T: Element>(&self, view: &View<'_>) {
        let decode = |implementation| {
            let mut out = vec![T::from_f32(77.0); view.rows * view.cols];
            dequantize::dequantize(implementation, view, &mut out).unwrap();
            out.into_iter().map(|x| canonical(x.to_f32())).collect::<Vec<u32>>()
        };
        for implementation in Implementation::available() {
            assert!(decode(implementation) == decode(Implementation::Scalar), "{implementation} {:?}", self.case);
        }
    }
}

/// Bits, with one NaN for all.
fn canonical(x: f32) -> u32 {
    if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
}

pub fn check_amax(case: &Case) {
    let runner = Runner::new(*case);
    for specials in [Specials::Kernel, Specials::Reference] {
        let all = |implementation| {
            let (mut tensor, mut rows, mut cols) = (0.0, vec![0.0; case.rows], vec![0.0; case.cols]);
            let outputs = amax::Outputs { tensor: Some(&mut tensor), rows: Some(&mut rows), cols: Some(&mut cols) };
            amax::amax(implementation, &runner.input(), specials, outputs).unwrap();
            let mut alone = 0.0;
            let outputs = amax::Outputs { tensor: Some(&mut alone), ..Default::default() };
            amax::amax(implementation, &runner.input(), specials, outputs).unwrap();
            [vec![tensor, alone], rows, cols].map(|v| v.into_iter().map(canonical).collect::<Vec<u32>>())
        };
        for implementation in Implementation::available() {
            assert_eq!(all(implementation), all(Implementation::Scalar), "{implementation} {specials:?} {case:?}");
        }
    }
}

/// Decodes every scale byte, negative ones and NaN among them, with every code.
pub fn check_scale_bytes() {
    let (rows, cols) = (256, 32);
    let runner = Runner::new(Case::new(rows, cols));
    let codes: Vec<u8> = (0..rows * cols / 2).map(|i| (i * 37 + i / 16) as u8).collect();
    let scales: Vec<u8> = (0..2 * rows).map(|i| (i / 2) as u8).collect();
    for unit in [Unit::Amax(Bound::E448), Unit::Multiplier, Unit::Divisor] {
        let view =
            View { rows, cols, codes: &codes, scales: &scales, stored: &[0.7], global: GlobalScale::PerTensor, unit };
        runner.check_type::<f32>(&view);
        runner.check_type::<bf16>(&view);
        runner.check_type::<f16>(&view);
    }
}

/// The Hadamard transform along rows: alone, and in the row direction of a quantization with either
/// global scale.
pub fn check_hadamard(case: &Case) {
    let runner = Runner::new(*case);
    for signs in [Signs::FIXED, Signs::NONE, Signs(0x0F31)] {
        let transformed = |implementation| {
            let mut out = vec![bf16::from_f32(77.0); case.rows * case.cols];
            hadamard::hadamard(implementation, &runner.input(), signs, &mut out).unwrap();
            out.into_iter().map(|x| canonical(x.to_f32())).collect::<Vec<u32>>()
        };
        let quantized = |implementation, mode: Mode| {
            let mut row = runner.buffers(case.rows, case.cols, &mode);
            let direction = Direction {
                mode,
                rounding: Rounding::NearestEven,
                transform: Some(signs),
                layout: Layout::Linear,
                amax: Amax::Compute(&mut row.amax),
                codes: &mut row.codes,
                scales: &mut row.scales,
            };
            quantize(implementation, &runner.input(), Some(direction), None).unwrap();
            (row.codes, row.scales, row.amax.into_iter().map(canonical).collect::<Vec<u32>>())
        };
        for implementation in Implementation::available() {
            assert!(transformed(implementation) == transformed(Implementation::Scalar), "{implementation} {case:?}");
            for (tile, global) in [
                (Tile::Row16, GlobalScale::PerTensor),
                (Tile::Row16, GlobalScale::PerRow),
                (Tile::Square16, GlobalScale::PerTensor),
            ] {
                let mode = Mode { tile, global, ..case.mode };
                let same = quantized(implementation, mode) == quantized(Implementation::Scalar, mode);
                assert!(same, "{implementation} {mode:?} {case:?}");
            }
        }
    }
}

/// A product of quantized matrices of any bytes, in every implementation, exact but on a GPU, which
/// is within the bound; and of one of them with a plain matrix, within the bound everywhere.
pub fn check_product(m: usize, n: usize, k: usize) {
    let bytes = |len: usize, salt: usize| (0..len).map(|i| (i * 37 + salt) as u8 & 0x7B).collect::<Vec<u8>>();
    let codes = [m, n].map(|rows| bytes(rows * e2m1::packed_len(k), 11));
    let scales = [m, n].map(|rows| bytes(rows * k.div_ceil(16), 5));
    let view = |side: usize, rows| View {
        rows,
        cols: k,
        codes: &codes[side],
        scales: &scales[side],
        stored: &[2.5],
        global: GlobalScale::PerTensor,
        unit: Unit::Amax(Bound::E448),
    };
    let plain: Vec<bf16> = (0..m * k).map(|i| bf16::from_f32((i * 29 % 61) as f32 / 8.0 - 3.0)).collect();
    for implementation in Implementation::available() {
        let (a, b) = (view(0, m), view(1, n));
        let product = |implementation| {
            let mut out = vec![77f32; m * n];
            gemm::gemm(implementation, &a, &b, &gemm::Product::default(), &mut out).unwrap();
            out
        };
        match implementation.is_gpu() {
            true => bounded::check(
                &(&a).into(),
                &(&b).into(),
                &gemm::Product::default(),
                &product(implementation),
                &implementation.to_string(),
            ),
            false => assert_eq!(product(implementation), product(Implementation::Scalar), "{implementation}"),
        }
        let mut out = vec![77f32; m * n];
        let x = Input::new(Values::Bf16(&plain), m, k).unwrap();
        gemm::gemm(implementation, &x, &b, &gemm::Product::default(), &mut out).unwrap();
        let name = format!("{implementation}, plain");
        bounded::check(&(&x.to_matrix()).into(), &(&b).into(), &gemm::Product::default(), &out, &name);
    }
}

pub fn check_layouts() {
    for (rows, cols) in [(0, 5), (5, 0), (1, 1), (128, 4), (130, 7), (300, 65)] {
        let scales: Vec<u8> = (0..rows * cols).map(|i| (i * 31 % 127) as u8).collect();
        let swizzled = |implementation| {
            let mut out = vec![0xA5; nvfp4_spec::swizzle::len(rows, cols).unwrap()];
            swizzle::swizzle(implementation, &scales, rows, cols, &mut out).unwrap();
            out
        };
        for implementation in Implementation::available() {
            assert_eq!(swizzled(implementation), swizzled(Implementation::Scalar));
            let mut back = vec![0xA5; rows * cols];
            swizzle::unswizzle(implementation, &swizzled(implementation), rows, cols, &mut back).unwrap();
            assert_eq!(back, scales);
        }
    }
    for (rows, cols) in [(0, 64), (1, 64), (3, 192), (70, 4096)] {
        let codes: Vec<u8> = (0..rows * cols / 2).map(|i| (i * 37 % 251) as u8).collect();
        let scales: Vec<u8> = (0..rows * cols / 16).map(|i| (i * 31 % 127) as u8).collect();
        let packed = |implementation| {
            let mut out = vec![0xA5; rows * cols / 64 * 36];
            gguf::pack(implementation, &codes, &scales, rows, cols, &mut out).unwrap();
            out
        };
        for implementation in Implementation::available() {
            assert_eq!(packed(implementation), packed(Implementation::Scalar));
            let (mut code_out, mut scale_out) = (vec![0xA5; codes.len()], vec![0xA5; scales.len()]);
            gguf::unpack(implementation, &packed(implementation), rows, cols, &mut code_out, &mut scale_out).unwrap();
            assert!(code_out == codes && scale_out == scales);
        }
    }
}
