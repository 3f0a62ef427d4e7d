//! Product cases: `qgemm` (numerics §9) and `row_scaled_gemm` (numerics §9.1), accumulated in the
//! reference order. A GPU has an order of its own: its outputs must lie within the bound, which the
//! recorded ones do too.

use super::case::Case;
use super::quantize::{Buffers, SPECIALS, bound, name as specials_name};
use super::report::{Bits, Differences};
use anyhow::{Result, bail};
use half::{bf16, f16};
use nvfp4::Elements;
use nvfp4_kernels::gemm::{Accumulate, Epilogue, Product, gemm};
use nvfp4_kernels::quantize::quantize;
use nvfp4_kernels::{Implementation, Input};
use nvfp4_spec::gemm::{Interval, Sums};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::matrix::View;
use nvfp4_spec::scale::Unit;
use nvfp4_spec::{Element, ErrorPath, GlobalScale, Metric, Mode, ScaleRule, Tile};

pub fn check(case: &Case, implementations: &[Implementation], differences: &mut Differences) -> Result<String> {
    let (a, b) = (Operand::read(case, "a")?, Operand::read(case, "b")?);
    let (a_side, b_side) = case.choice(
        "op",
        &[("fprop", (Side::Row, Side::Row)), ("dgrad", (Side::Row, Side::Col)), ("wgrad", (Side::Col, Side::Col))],
    )?;
    check_operand(case, implementations, differences, ("a", "a_input"), &a, a_side)?;
    check_operand(case, implementations, differences, ("b", "b_input"), &b, b_side)?;
    check_outputs(case, implementations, differences, &a.view(), &b.view(), Epilogue::Folded)?;
    let row_scaled = match (a.global, b.global) {
        (GlobalScale::PerTensor, GlobalScale::PerTensor) => "",
        (GlobalScale::PerRow, GlobalScale::PerTensor) => " row-scaled left",
        (GlobalScale::PerTensor, GlobalScale::PerRow) => " row-scaled right",
        (GlobalScale::PerRow, GlobalScale::PerRow) => " row-scaled both",
    };
    Ok(format!("qgemm {} {}{row_scaled}", case.meta("op")?, case.meta("out_dtype")?))
}

pub fn check_row_scaled(
    case: &Case,
    implementations: &[Implementation],
    differences: &mut Differences,
) -> Result<String> {
    let (x, w) = (Operand::read(case, "x")?, Operand::read(case, "w")?);
    check_operand(case, implementations, differences, ("x", "x"), &x, Side::Row)?;
    check_operand(case, implementations, differences, ("w", "w"), &w, Side::Row)?;
    check_outputs(case, implementations, differences, &x.view(), &w.view(), Epilogue::RowScaled)?;
    // The product with every amax replaced by 1.
    let expected = case.f32s("gemm_fp32")?;
    let (left, right) =
        (View { stored: &vec![1.0; x.amax.len()], ..x.view() }, View { stored: &vec![1.0; w.amax.len()], ..w.view() });
    let product =
        Product { accumulate: Accumulate::Reference, epilogue: Some(Epilogue::RowScaled), ..Product::default() };
    for &implementation in implementations {
        let mut got = vec![0.0; x.rows * w.rows];
        gemm(implementation, &left, &right, &product, &mut got)?;
        differences.compare(&format!("{implementation}: gemm_fp32"), &expected, &got);
    }
    let with = |key: &str, word: &'static str| Ok::<_, anyhow::Error>(if case.flag(key)? { word } else { "" });
    Ok(format!(
        "row_scaled_gemm {}{}{}",
        case.meta("out_dtype")?,
        with("bias", " bias")?,
        with("accumulate", " accumulate")?
    ))
}

/// A quantized operand of a case.
struct Operand<'a> {
    rows: usize,
    k: usize,
    codes: &'a [u8],
    scales: &'a [u8],
    amax: Vec<f32>,
    global: GlobalScale,
    bound: nvfp4_spec::Bound,
}

impl<'a> Operand<'a> {
    fn read(case: &'a Case, name: &str) -> Result<Self> {
        let tensor = |what: &str| format!("{name}_{what}");
        Ok(Operand {
            rows: case.shape2(&tensor("data"))?.0,
            k: case.number("K")?,
            codes: case.bytes(&tensor("data"))?,
            scales: case.bytes(&tensor("scale"))?,
            amax: case.f32s(&tensor("amax"))?,
            global: match case.flag(&tensor("row_scaled"))? {
                true => GlobalScale::PerRow,
                false => GlobalScale::PerTensor,
            },
            bound: bound(case, &tensor("e4m3_max"))?,
        })
    }

    fn view(&self) -> View<'_> {
        let Operand { rows, k, codes, scales, ref amax, global, bound } = *self;
        View { rows, cols: k, codes, scales, stored: amax, global, unit: Unit::Amax(bound) }
    }
}

/// Which direction of an input a product consumes.
#[derive(Clone, Copy)]
enum Side {
    Row,
    Col,
}

/// Quantizes an operand's input and compares it with the operand as recorded. Inputs have no NaN
/// and no −0, so the record holds with both specials.
fn check_operand(
    case: &Case,
    implementations: &[Implementation],
    differences: &mut Differences,
    (name, input): (&str, &str),
    recorded: &Operand<'_>,
    side: Side,
) -> Result<()> {
    let meta = |what: &str| format!("{name}_{what}");
    let rule = match case.flag(&meta("use_4over6"))? {
        false => ScaleRule::Six,
        true => ScaleRule::FourOverSix {
            metric: case.choice(&meta("err_mode"), &[("MAE", Metric::Mae), ("MSE", Metric::Mse)])?,
            error: ErrorPath::Strict,
            bound: recorded.bound,
        },
    };
    let tile = if case.flag(&meta("two_d"))? { Tile::Square16 } else { Tile::Row16 };
    let transform = case.flag(&meta("rht"))?.then_some(Signs::FIXED);
    let (rows, cols) = case.shape2(input)?;
    let elements = case.elements(input)?;
    let x = Input::new(elements.values(), rows, cols)?;
    for (implementation, specials) in implementations.iter().flat_map(|&i| SPECIALS.map(|specials| (i, specials))) {
        let mode = Mode { tile, global: recorded.global, rule, specials, ..Mode::default() };
        let got = match side {
            Side::Row => {
                let mut got = Buffers::new(rows, cols, &mode)?;
                quantize(implementation, &x, Some(got.direction(&mode, None)), None)?;
                got
            }
            Side::Col => {
                let mut got = Buffers::new(cols, rows, &mode)?;
                quantize(implementation, &x, None, Some(got.direction(&mode, transform)))?;
                got
            }
        };
        let what = |tensor: &str| format!("{implementation} {}: {name}_{tensor}", specials_name(specials));
        differences.compare(&what("data"), recorded.codes, &got.codes);
        differences.compare(&what("scale"), recorded.scales, &got.scales);
        differences.compare(&what("amax"), &recorded.amax, &got.amax);
    }
    Ok(())
}

/// Compares `out`, in its own type.
fn check_outputs(
    case: &Case,
    implementations: &[Implementation],
    differences: &mut Differences,
    a: &View<'_>,
    b: &View<'_>,
    epilogue: Epilogue,
) -> Result<()> {
    let bias = if case.has("bias") { Some(case.elements("bias")?.to_vec()) } else { None };
    let c = if case.has("out_in") { Some(case.elements("out_in")?) } else { None };
    let mut run = Run { implementations, differences, a, b, bias: bias.as_deref(), epilogue };
    match (case.elements("out")?, &c) {
        (Elements::F32(out), None) => run.compare::<f32>(&out, None),
        (Elements::F32(out), Some(Elements::F32(c))) => run.compare(&out, Some(c)),
        (Elements::Bf16(out), None) => run.compare::<bf16>(&out, None),
        (Elements::Bf16(out), Some(Elements::Bf16(c))) => run.compare(&out, Some(c)),
        (Elements::F16(out), None) => run.compare::<f16>(&out, None),
        (Elements::F16(out), Some(Elements::F16(c))) => run.compare(&out, Some(c)),
        _ => bail!("tensors 'out' and 'out_in' differ in type"),
    }
}

struct Run<'a> {
    implementations: &'a [Implementation],
    differences: &'a mut Differences,
    a: &'a View<'a>,
    b: &'a View<'a>,
    bias: Option<&'a [f32]>,
    epilogue: Epilogue,
}

impl Run<'_> {
    fn compare<T: Element + Bits>(&mut self, expected: &[T], c: Option<&[T]>) -> Result<()> {
        let product = Product {
            accumulate: Accumulate::Reference,
            epilogue: Some(self.epilogue),
            bias: self.bias,
            add: c.map(|c| (c, 1.0)),
            ..Product::default()
        };
        for &implementation in self.implementations {
            let mut got = vec![T::default(); expected.len()];
            gemm(implementation, self.a, self.b, &product, &mut got)?;
            self.differences.compare(&format!("{implementation}: out"), expected, &got);
            if implementation.is_gpu() {
                gemm(implementation, self.a, self.b, &Product { accumulate: Accumulate::Exact, ..product }, &mut got)?;
                self.differences.compare(
                    &format!("{implementation}: out within the bound"),
                    &self.admitted(&got, expected, &product),
                    &got,
                );
            }
        }
        Ok(())
    }

    /// The result where it is within its bound, the expected value elsewhere.
    fn admitted<T: Element>(&self, got: &[T], expected: &[T], product: &Product<'_, T>) -> Vec<T> {
        let (a, b) = (self.a.into(), self.b.into());
        let sums = Sums::new(&a, &b, Accumulate::Exact);
        let admitted = got.iter().zip(expected).enumerate().map(|(at, (&got, &expected))| {
            let interval = Interval::new((&a, at / self.b.rows), (&b, at % self.b.rows), product, &sums);
            if interval.holds(got.to_f32()) { got } else { expected }
        });
        admitted.collect()
    }
}
