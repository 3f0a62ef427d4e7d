//! Products of any operands; `decoded.cu` says how.

use super::OUTPUT;
use super::operand::Operand;
use super::output::{self, Add, Kind, Order, Output};
use crate::Result;
use crate::cuda::text::{ELEMENTS, PRECISIONS, Variants, assemble};
use crate::cuda::{Source, Stream, entry};
use crate::quantize::Layout;
use nvfp4_spec::{GlobalScale, Precision, e2m1};

/// Outputs of a block, along each side.
const SIDE: usize = 64;
/// The most blocks along the second side of a grid.
const HIGHEST: usize = 65535;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Values {
    Nvfp4,
    Plain(Precision),
}

impl Values {
    fn name(self) -> &'static str {
        match self {
            Values::Nvfp4 => "NVFP4",
            Values::Plain(Precision::F32) => "WIDE",
            Values::Plain(Precision::Bf16) => "BRAIN",
            Values::Plain(Precision::F16) => "HALF",
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Side {
    values: u64,
    scales: u64,
    stride: u64,
    swizzled: u32,
    padding: u32,
}

impl Side {
    fn new(operand: &Operand<'_>) -> (Values, Side) {
        match operand {
            Operand::Nvfp4(q) => {
                let (values, scales, stride) = (q.codes.address(), q.scales.address(), e2m1::packed_len(q.cols) as u64);
                let swizzled = (q.layout == Layout::Swizzled).into();
                (Values::Nvfp4, Side { values, scales, stride, swizzled, padding: 0 })
            }
            Operand::Plain(x) => {
                let values = x.values();
                // The stride of a single row leads nowhere.
                let stride = if x.rows() <= 1 { 0 } else { (x.stride() * values.element_size()) as u64 };
                let side = Side { values: values.address(), scales: 0, stride, swizzled: 0, padding: 0 };
                (Values::Plain(values.precision()), side)
            }
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    a: Side,
    b: Side,
    output: output::Params,
    k: u64,
    first_row: u64,
}

const _: () = assert!(size_of::<Params>() == 184);

type Variant = (Values, Values, Kind);

/// The product of operands that were checked and have outputs.
pub(super) fn run(stream: &Stream, a: &Operand<'_>, b: &Operand<'_>, output: &Output) -> Result<()> {
    static VARIANTS: Variants<Variant> = Variants::new();
    let ((left, a_side), (right, b_side)) = (Side::new(a), Side::new(b));
    let kernel = VARIANTS.get(stream.device(), (left, right, output.kind), source)?;
    let (high, wide) = (a.rows().div_ceil(SIDE), b.rows().div_ceil(SIDE));
    for first in (0..high).step_by(HIGHEST) {
        let first_row = (first * SIDE) as u64;
        let params = Params { a: a_side, b: b_side, output: output.part(0, a.rows()), k: a.cols() as u64, first_row };
        let grid = [u32::try_from(wide).unwrap_or(u32::MAX), (high - first).min(HIGHEST) as u32, 1];
        // SAFETY: `Params` is laid out as in decoded.cu; operands and outputs were checked.
        unsafe { kernel.launch(stream, grid, 256, 0, &params) }?;
    }
    Ok(())
}

fn source((a, b, kind): Variant) -> (&'static str, &'static str, String) {
    let settings = format!(
        "enum Kind {{ NVFP4, WIDE, BRAIN, HALF }};\nconstexpr Kind A = {}, B = {};\n{}",
        a.name(),
        b.name(),
        kind.settings()
    );
    ("gemm_decoded", "gemm_decoded", assemble(&settings, &[ELEMENTS, OUTPUT, include_str!("decoded.cu")]))
}

/// Every kind on both sides, and every kind of output.
pub(super) fn sources() -> Vec<(String, Source)> {
    let kinds = [Values::Nvfp4].into_iter().chain(PRECISIONS.map(Values::Plain));
    let plain =
        Kind { precision: Precision::F32, order: Order::Folded, left: GlobalScale::PerTensor, add: Add::Nothing };
    let pairs = kinds.map(|values| entry((values, Values::Nvfp4, plain), source));
    let outputs = PRECISIONS.into_iter().zip([Order::Folded, Order::OneRow, Order::BothRows]);
    let outputs = outputs.map(|(precision, order)| {
        let plain = Values::Plain(precision);
        entry((plain, plain, Kind { precision, order, left: GlobalScale::PerTensor, add: Add::C }), source)
    });
    pairs.chain(outputs).collect()
}
