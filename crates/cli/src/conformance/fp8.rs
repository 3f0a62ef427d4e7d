//! FP8 cases (numerics §14): `fp8_current`, `fp8_delayed`, `fp8_block`, `mxfp8`, and their tables.
//! There is one kind of specials, the kernels'.

use super::case::Case;
use super::report::Differences;
use anyhow::{Context, Result, ensure};
use nvfp4_kernels::fp8::dequantize::dequantize;
use nvfp4_kernels::fp8::quantize::{Direction, Outputs, quantize};
use nvfp4_kernels::{Implementation, Input, Values, amax};
use nvfp4_spec::fp8::delayed::{Algorithm, Delayed, Entry};
use nvfp4_spec::fp8::matrix::amaxes;
use nvfp4_spec::fp8::scale::mx_byte;
use nvfp4_spec::fp8::{AmaxRule, Format, MX_BLOCK, Mode, ScaleValues, Scales, Scaling, Side, Tile, View};
use nvfp4_spec::{Precision, Specials, e8m0};

const FORMATS: [(&str, Format); 2] = [("e4m3", Format::E4m3), ("e5m2", Format::E5m2)];

fn rule(case: &Case) -> Result<AmaxRule> {
    let values = case.choice("pow2", &[("0", ScaleValues::Any), ("1", ScaleValues::PowersOfTwo)])?;
    let text = case.meta("epsilon")?;
    // A number of Python, rounded to binary32 as TransformerEngine does.
    let epsilon: f64 = text.parse().with_context(|| format!("metadata 'epsilon': expected a number, got '{text}'"))?;
    Ok(AmaxRule { values, epsilon: epsilon as f32 })
}

/// Says which rule a case has beyond its kind.
fn label(kind: &str, case: &Case, rule: &AmaxRule) -> Result<String> {
    let powers = if rule.values == ScaleValues::PowersOfTwo { " powers of two" } else { "" };
    let epsilon = if rule.epsilon != 0.0 { " epsilon" } else { "" };
    Ok(format!("{kind} {}{powers}{epsilon}", case.meta("format")?))
}

pub fn check_current(case: &Case, implementations: &[Implementation], differences: &mut Differences) -> Result<String> {
    let (format, rule) = (case.choice("format", &FORMATS)?, rule(case)?);
    for &implementation in implementations {
        let amax = amax_of(case, implementation)?;
        differences.compare(&format!("{implementation}: amax"), &case.f32s("amax")?, &[amax]);
        let scale = rule.tensor_scale(amax, format);
        differences.compare(&format!("{implementation}: scale"), &case.f32s("scale")?, &[scale]);
        let mode = Mode { format, scaling: Scaling::Tensor { scale } };
        check_tensor(case, implementation, differences, &mode)?;
    }
    label("fp8_current", case, &rule)
}

pub fn check_delayed(case: &Case, implementations: &[Implementation], differences: &mut Differences) -> Result<String> {
    let format = case.choice("format", &FORMATS)?;
    let algorithm = case.choice("algo", &[("max", Algorithm::Max), ("most_recent", Algorithm::MostRecent)])?;
    let margin = case.meta("margin")?;
    let margin = margin.parse().with_context(|| format!("metadata 'margin': expected a number, got '{margin}'"))?;
    let rule = Delayed { format, margin, algorithm };
    let (length, tensors) = case.shape2("amax_history")?;
    let (history, before) = (case.f32s("amax_history")?, case.f32s("scale_before")?);
    ensure!(tensors > 0 && before.len() == tensors, "tensors 'amax_history' and 'scale_before' differ in length");
    let reduced = match case.has("amax_reduction_buffer") {
        true => Some(case.f32s("amax_reduction_buffer")?),
        false => None,
    };
    let fits = |reduced: &Vec<f32>| reduced.len() == tensors;
    ensure!(reduced.as_ref().is_none_or(fits), "tensor 'amax_reduction_buffer': expected {tensors} elements");
    let single = case.choice("entry", &[("single", true), ("bulk", false)])?;
    let (mut after, mut scales) = (history.clone(), Vec::new());
    for t in 0..tensors {
        // A column of the history belongs to a tensor.
        let mut column: Vec<f32> = (0..length).map(|i| history[i * tensors + t]).collect();
        let reduced = reduced.as_ref().map(|reduced| reduced[t]);
        let entry = if single { Entry::Single } else { Entry::Bulk { reduced } };
        scales.push(rule.update(&mut column, before[t], entry)?);
        column.into_iter().enumerate().for_each(|(i, amax)| after[i * tensors + t] = amax);
    }
    differences.compare("amax_history_after", &case.f32s("amax_history_after")?, &after);
    differences.compare("scale", &case.f32s("scale")?, &scales);
    let inverses: Vec<f32> = scales.iter().map(|scale| 1.0 / scale).collect();
    differences.compare("scale_inv", &case.f32s("scale_inv")?, &inverses);
    for &implementation in implementations {
        let mode = Mode { format, scaling: Scaling::Tensor { scale: scales[0] } };
        let found = check_tensor(case, implementation, differences, &mode)?;
        differences.compare(&format!("{implementation}: amax"), &case.f32s("amax")?, &[found]);
    }
    Ok(format!("fp8_delayed {} {} {}", case.meta("format")?, case.meta("algo")?, case.meta("entry")?))
}

pub fn check_block(case: &Case, implementations: &[Implementation], differences: &mut Differences) -> Result<String> {
    let (format, rule) = (case.choice("format", &FORMATS)?, rule(case)?);
    let tiles = [("1x128", Scaling::Row128(rule)), ("128x128", Scaling::Square128(rule))];
    check_tiles(case, implementations, differences, &Mode { format, scaling: case.choice("tile", &tiles)? })?;
    label(&format!("fp8_block {}", case.meta("tile")?), case, &rule)
}

pub fn check_mx(case: &Case, implementations: &[Implementation], differences: &mut Differences) -> Result<String> {
    let format = case.choice("format", &FORMATS)?;
    check_tiles(case, implementations, differences, &Mode { format, scaling: Scaling::Mx })?;
    Ok(format!("mxfp8 {}", case.meta("format")?))
}

fn amax_of(case: &Case, implementation: Implementation) -> Result<f32> {
    let ((rows, cols), elements) = (case.shape2("input")?, case.elements("input")?);
    let mut tensor = 0.0;
    let wanted = amax::Outputs { tensor: Some(&mut tensor), ..Default::default() };
    amax::amax(implementation, &Input::new(elements.values(), rows, cols)?, Specials::Kernel, wanted)?;
    Ok(tensor)
}

/// What a direction came out as.
struct Buffers {
    rows: usize,
    cols: usize,
    codes: Vec<u8>,
    wide: Vec<f32>,
    bytes: Vec<u8>,
}

impl Buffers {
    fn new(mode: &Mode, side: Side, shape: (usize, usize)) -> Result<Self> {
        let (rows, cols) = mode.shape(side, shape);
        let count = mode.tile(side).scale_count(rows, cols)?;
        let (wide, bytes) = if mode.scaling.is_mx() { (0, count) } else { (count, 0) };
        Ok(Buffers { rows, cols, codes: vec![0xA5; rows * cols], wide: vec![-1.0; wide], bytes: vec![0xA5; bytes] })
    }

    fn direction(&mut self, mode: &Mode) -> Direction<'_> {
        let scales = match mode.scaling {
            Scaling::Mx | Scaling::MxSquare => Scales::E8m0(&mut self.bytes[..]),
            _ => Scales::F32(&mut self.wide[..]),
        };
        Direction { codes: &mut self.codes, scales }
    }
}

/// The row and the column direction of a case's input, and its amax.
fn both(case: &Case, implementation: Implementation, mode: &Mode) -> Result<([Buffers; 2], f32)> {
    let (shape, elements) = (case.shape2("input")?, case.elements("input")?);
    let x = Input::new(elements.values(), shape.0, shape.1)?;
    let (mut row, mut col) = (Buffers::new(mode, Side::Row, shape)?, Buffers::new(mode, Side::Column, shape)?);
    let mut amax = 0.0;
    let wanted = Outputs { row: Some(row.direction(mode)), col: Some(col.direction(mode)), amax: Some(&mut amax) };
    quantize(implementation, &x, mode, wanted)?;
    Ok(([row, col], amax))
}

/// Compares what one scale for the whole matrix makes of a case's input; its amax.
fn check_tensor(
    case: &Case,
    implementation: Implementation,
    differences: &mut Differences,
    mode: &Mode,
) -> Result<f32> {
    let ([row, col], amax) = both(case, implementation, mode)?;
    let what = |tensor: &str| format!("{implementation}: {tensor}");
    let inverse = case.f32s("scale_inv")?;
    ensure!(!inverse.is_empty(), "tensor 'scale_inv': expected an element");
    differences.compare(&what("scale_inv"), &inverse[..1], &row.wide);
    differences.compare(&what("scale_inv (column direction)"), &inverse[..1], &col.wide);
    differences.compare(&what("data"), case.bytes("data")?, &row.codes);
    differences.compare(&what("data_t"), case.bytes("data_t")?, &col.codes);
    let (codes, scales) = (case.bytes("data")?, Scales::F32(&inverse[..1]));
    let view = View { rows: row.rows, cols: row.cols, format: mode.format, tile: Tile::Tensor, codes, scales };
    check_decoded(case, implementation, differences, "dequant", &view)?;
    Ok(amax)
}

fn check_decoded(
    case: &Case,
    implementation: Implementation,
    differences: &mut Differences,
    name: &str,
    view: &View<'_>,
) -> Result<()> {
    view.check()?;
    let mut got = vec![-1.0; view.codes.len()];
    dequantize(implementation, view, &mut got)?;
    differences.compare(&format!("{implementation}: {name}"), &case.f32s(name)?, &got);
    Ok(())
}

/// Compares both directions of a case with a scale per tile.
fn check_tiles(
    case: &Case,
    implementations: &[Implementation],
    differences: &mut Differences,
    mode: &Mode,
) -> Result<()> {
    let matrix = case.matrix("input")?;
    for (suffix, side) in [("", Side::Row), ("_t", Side::Column)] {
        differences.compare(
            &format!("amax{suffix}"),
            &case.f32s(&format!("amax{suffix}"))?,
            &amaxes(&matrix, mode, side),
        );
    }
    for &implementation in implementations {
        let (directions, _) = both(case, implementation, mode)?;
        for ((suffix, side), got) in [("", Side::Row), ("_t", Side::Column)].into_iter().zip(&directions) {
            let name = |tensor: &str| format!("{tensor}{suffix}");
            let what = |tensor: &str| format!("{implementation}: {tensor}{suffix}");
            let codes = case.bytes(&name("data"))?;
            differences.compare(&what("data"), codes, &got.codes);
            let wide;
            let scales = match mode.scaling {
                Scaling::Mx | Scaling::MxSquare => {
                    let bytes = case.bytes(&name("scale_inv"))?;
                    differences.compare(&what("scale_inv"), bytes, &got.bytes);
                    Scales::E8m0(bytes)
                }
                _ => {
                    wide = case.f32s(&name("scale_inv"))?;
                    differences.compare(&what("scale_inv"), &wide, &got.wide);
                    Scales::F32(&wide[..])
                }
            };
            let (format, tile) = (mode.format, mode.tile(side));
            let view = View { rows: got.rows, cols: got.cols, format, tile, codes, scales };
            check_decoded(case, implementation, differences, &name("dequant"), &view)?;
        }
    }
    Ok(())
}

/// The tables of FP8 rules. Tables of codes are checked in every implementation, those of scales
/// only in `spec`.
pub fn check_table(
    case: &Case,
    implementations: &[Implementation],
    differences: &mut Differences,
) -> Result<Option<String>> {
    let table = case.meta("table")?;
    match table {
        "encode" => check_encode(case, implementations, differences)?,
        "decode" if case.meta("format")? == "e8m0" => check_e8m0(case, implementations, differences)?,
        "decode" => {
            let (format, codes) = (case.choice("format", &FORMATS)?, case.bytes("data")?);
            let scales = Scales::F32(&[1.0][..]);
            let view = View { rows: 1, cols: codes.len(), format, tile: Tile::Tensor, codes, scales };
            for &implementation in implementations {
                check_decoded(case, implementation, differences, "dequant", &view)?;
            }
        }
        "amax_to_e8m0" => {
            let (format, amaxes) = (case.choice("format", &FORMATS)?, case.f32s("amax")?);
            let scaled: Vec<f32> = amaxes.iter().map(|amax| amax * (1.0 / format.max())).collect();
            differences.compare("scaled", &case.f32s("scaled")?, &scaled);
            let bytes: Vec<u8> = amaxes.iter().map(|&amax| mx_byte(amax, format)).collect();
            differences.compare("scale_inv", case.bytes("scale_inv")?, &bytes);
        }
        "amax_to_scale" => {
            let (format, rule, amaxes) = (case.choice("format", &FORMATS)?, rule(case)?, case.f32s("amax")?);
            for (name, precision) in [
                ("scale_vinf_f32", Precision::F32),
                ("scale_vinf_bf16", Precision::Bf16),
                ("scale_vinf_f16", Precision::F16),
            ] {
                let scales: Vec<f32> = amaxes.iter().map(|&a| rule.block_scale(a, format, precision)).collect();
                differences.compare(name, &case.f32s(name)?, &scales);
            }
            let tensor: Vec<f32> = amaxes.iter().map(|&amax| rule.tensor_scale(amax, format)).collect();
            differences.compare("scale_vinf_f32 (of a tensor)", &case.f32s("scale_vinf_f32")?, &tensor);
        }
        _ => return Ok(None),
    }
    Ok(Some(format!("table {table} {}", case.meta("format")?)))
}

/// A matrix of one row, multiplied by 1.
fn check_encode(case: &Case, implementations: &[Implementation], differences: &mut Differences) -> Result<()> {
    let (format, input) = (case.choice("format", &FORMATS)?, case.f32s("input")?);
    let mode = Mode { format, scaling: Scaling::Tensor { scale: 1.0 } };
    let x = Input::new(Values::F32(&input), 1, input.len())?;
    for &implementation in implementations {
        let mut got = Buffers::new(&mode, Side::Row, (1, input.len()))?;
        let wanted = Outputs { row: Some(got.direction(&mode)), ..Default::default() };
        quantize(implementation, &x, &mode, wanted)?;
        differences.compare(&format!("{implementation}: data"), case.bytes("data")?, &got.codes);
    }
    Ok(())
}

/// The scales of blocks of ones; reciprocals are asked of `spec`.
fn check_e8m0(case: &Case, implementations: &[Implementation], differences: &mut Differences) -> Result<()> {
    let bytes = case.bytes("data")?;
    let reciprocals: Vec<f32> = bytes.iter().map(|&b| e8m0::reciprocal(b)).collect();
    differences.compare("reciprocal", &case.f32s("reciprocal")?, &reciprocals);
    let codes = vec![Format::E4m3.encode(1.0); bytes.len() * MX_BLOCK];
    let (rows, scales) = (bytes.len(), Scales::E8m0(bytes));
    let view = View { rows, cols: MX_BLOCK, format: Format::E4m3, tile: Tile::Row32, codes: &codes, scales };
    for &implementation in implementations {
        let mut got = vec![-1.0; codes.len()];
        dequantize(implementation, &view, &mut got)?;
        let firsts: Vec<f32> = got.iter().copied().step_by(MX_BLOCK).collect();
        differences.compare(&format!("{implementation}: dequant"), &case.f32s("dequant")?, &firsts);
    }
    Ok(())
}
