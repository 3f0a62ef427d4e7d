//! Quantization cases: `quantize`, `rht` (Hadamard), `fastmath`, `sr` (stochastic rounding).

use super::case::Case;
use super::report::Differences;
use anyhow::{Result, bail};
use half::bf16;
use nvfp4::Elements;
use nvfp4_kernels::quantize::{Amax, Direction, Layout, quantize};
use nvfp4_kernels::{Implementation, Input, dequantize};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::matrix::{self, Matrix, Quantized, View};
use nvfp4_spec::scale::Unit;
use nvfp4_spec::stochastic::Random;
use nvfp4_spec::{
    BLOCK, Bound, ErrorPath, GlobalScale, Metric, Mode, Rounding, ScaleRule, Specials, Tile, e2m1, upstream,
};

pub const SPECIALS: [Specials; 2] = [Specials::Kernel, Specials::Reference];

pub fn check(case: &Case, implementations: &[Implementation], differences: &mut Differences) -> Result<String> {
    let (tile, global) = scaling(case)?;
    let rule = scale_rule(case)?;
    check_directions(
        case,
        implementations,
        differences,
        |specials| Mode { tile, global, rule, specials, ..Mode::default() },
        None,
    )?;
    let rule_name = match rule {
        ScaleRule::Six => "six".to_string(),
        ScaleRule::Mse => "mse".to_string(),
        ScaleRule::ModelOptMse => "modelopt-mse".to_string(),
        ScaleRule::ModelOptFourOverSix => "modelopt-4over6".to_string(),
        ScaleRule::FourOverSix { error, bound, .. } => {
            let path = if error == ErrorPath::Fast { "fast" } else { "strict" };
            format!("4over6 {} {path} {}", case.meta("err_mode")?, bound.value())
        }
    };
    Ok(format!("quantize {} {rule_name}", case.meta("scaling")?))
}

pub fn check_hadamard(
    case: &Case,
    implementations: &[Implementation],
    differences: &mut Differences,
) -> Result<String> {
    let (tile, global) = scaling(case)?;
    let rule = scale_rule(case)?;
    let (signs, name) = case
        .choice("random_sign_mask", &[("True", (Signs::FIXED, "fixed signs")), ("False", (Signs::NONE, "no signs"))])?;
    let transformed = matrix::columns(&case.matrix("input")?, Some(signs))?;
    let Elements::Bf16(expected) = case.elements("rht_t")? else { bail!("tensor 'rht_t': expected BF16") };
    let got: Vec<bf16> = transformed.data().iter().map(|&x| bf16::from_f32(x)).collect();
    differences.compare("rht_t", &expected, &got);
    check_directions(
        case,
        implementations,
        differences,
        |specials| Mode { tile, global, rule, specials, ..Mode::default() },
        Some(signs),
    )?;
    Ok(format!("rht {} {name}", case.meta("scaling")?))
}

fn scaling(case: &Case) -> Result<(Tile, GlobalScale)> {
    case.choice(
        "scaling",
        &[
            ("tensor1d", (Tile::Row16, GlobalScale::PerTensor)),
            ("row1d", (Tile::Row16, GlobalScale::PerRow)),
            ("tensor2d", (Tile::Square16, GlobalScale::PerTensor)),
        ],
    )
}

pub fn bound(case: &Case, key: &str) -> Result<Bound> {
    case.choice(key, &[("448", Bound::E448), ("256", Bound::E256)])
}

fn scale_rule(case: &Case) -> Result<ScaleRule> {
    if !case.flag("use_4over6")? {
        return match bound(case, "e4m3_max")? {
            Bound::E448 => Ok(ScaleRule::Six),
            Bound::E256 => bail!("metadata 'e4m3_max': 256 goes with 4over6 only"),
        };
    }
    Ok(ScaleRule::FourOverSix {
        metric: case.choice("err_mode", &[("MAE", Metric::Mae), ("MSE", Metric::Mse)])?,
        error: case.choice("fast_math", &[("True", ErrorPath::Fast), ("False", ErrorPath::Strict)])?,
        bound: bound(case, "e4m3_max")?,
    })
}

/// Runs both directions in every implementation and both specials, then the decoded values.
fn check_directions(
    case: &Case,
    implementations: &[Implementation],
    differences: &mut Differences,
    mode: impl Fn(Specials) -> Mode,
    transform: Option<Signs>,
) -> Result<()> {
    let (rows, cols) = case.shape2("input")?;
    let elements = case.elements("input")?;
    let input = Input::new(elements.values(), rows, cols)?;
    for &implementation in implementations {
        for specials in SPECIALS {
            let mode = mode(specials);
            let mut row = Buffers::new(rows, cols, &mode)?;
            let mut col = Buffers::new(cols, rows, &mode)?;
            quantize(implementation, &input, Some(row.direction(&mode, None)), Some(col.direction(&mode, transform)))?;
            let prefix = format!("{implementation} {}: ", name(specials));
            compare(case, differences, &prefix, "", &row, (rows, cols), &mode)?;
            compare_amax(case, differences, &prefix, "", &row.amax, &mode)?;
            // No kernel produced this direction, so its record holds with reference specials only.
            let unrecorded = mode.global == GlobalScale::PerRow && case.meta("kernel_emulated")? != "tuned_1D";
            if specials == Specials::Reference || !unrecorded {
                compare(case, differences, &prefix, "_t", &col, (cols, rows), &mode)?;
                compare_amax(case, differences, &prefix, "_t", &col.amax, &mode)?;
            }
        }
        for (suffix, rows, cols) in [("", rows, cols), ("_t", cols, rows)] {
            if case.has(&format!("dequant{suffix}")) {
                check_dequantize(case, implementation, differences, suffix, (rows, cols), &mode(Specials::Reference))?;
            }
        }
    }
    Ok(())
}

pub fn name(specials: Specials) -> &'static str {
    match specials {
        Specials::Kernel => "kernel specials",
        Specials::Reference => "reference specials",
    }
}

/// The output buffers of a direction, filled with a value that no case expects everywhere.
pub struct Buffers {
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub amax: Vec<f32>,
}

impl Buffers {
    pub fn new(rows: usize, cols: usize, mode: &Mode) -> Result<Self> {
        let code_len = rows * e2m1::packed_len(cols);
        let scale_len = Layout::Linear.scale_len(rows, cols)?;
        Ok(Buffers {
            codes: vec![0xA5; code_len],
            scales: vec![0xA5; scale_len],
            amax: vec![-1.0; mode.global.count(rows)],
        })
    }

    pub fn direction(&mut self, mode: &Mode, transform: Option<Signs>) -> Direction<'_> {
        Direction {
            mode: *mode,
            rounding: Rounding::NearestEven,
            transform,
            layout: Layout::Linear,
            amax: Amax::Compute(&mut self.amax),
            codes: &mut self.codes,
            scales: &mut self.scales,
        }
    }
}

/// The tensor that records this of a direction (`suffix` "" or "_t") in the mode's specials.
fn recorded(case: &Case, tensor: &str, suffix: &str, mode: &Mode) -> String {
    let kernel = format!("{tensor}{suffix}_kernel");
    if mode.specials == Specials::Kernel && case.has(&kernel) { kernel } else { format!("{tensor}{suffix}") }
}

/// Compares the codes and scales of a direction with what the case records.
fn compare(
    case: &Case,
    differences: &mut Differences,
    prefix: &str,
    suffix: &str,
    got: &Buffers,
    (rows, cols): (usize, usize),
    mode: &Mode,
) -> Result<()> {
    let (data, scale) = (recorded(case, "data", suffix, mode), recorded(case, "scale", suffix, mode));
    differences.compare(&format!("{prefix}{data}"), case.bytes(&data)?, &got.codes);
    let scales = pad_scales(&got.scales, rows, cols, mode.tile, case.shape2(&scale)?.0);
    differences.compare(&format!("{prefix}{scale}"), case.bytes(&scale)?, &scales);
    Ok(())
}

/// Upstream keeps the scale rows of a tile that reaches beyond the matrix: copies of the tile's
/// scale.
fn pad_scales(scales: &[u8], rows: usize, cols: usize, tile: Tile, recorded_rows: usize) -> Vec<u8> {
    let mut padded = scales.to_vec();
    if tile == Tile::Square16 && rows > 0 && recorded_rows == rows.next_multiple_of(BLOCK) {
        let last = &scales[scales.len() - cols.div_ceil(BLOCK)..];
        (rows..recorded_rows).for_each(|_| padded.extend_from_slice(last));
    }
    padded
}

/// Cases with NaN in the input record the kernel's amax of the row direction only. A tensor's amax
/// is the same in both directions; a column's is then not on record where the reference has NaN,
/// and its scale bytes speak for it.
fn compare_amax(
    case: &Case,
    differences: &mut Differences,
    prefix: &str,
    suffix: &str,
    got: &[f32],
    mode: &Mode,
) -> Result<()> {
    let tensor = &recorded(case, "amax", suffix, mode);
    let mut expected = case.f32s(tensor)?;
    if mode.specials == Specials::Kernel && tensor == "amax_t" && case.has("amax_kernel") {
        match mode.global {
            GlobalScale::PerTensor => expected = case.f32s("amax_kernel")?,
            GlobalScale::PerRow => {
                for (expected, &got) in expected.iter_mut().zip(got).filter(|(e, _)| e.is_nan()) {
                    *expected = got;
                }
            }
        }
    }
    differences.compare(&format!("{prefix}{tensor}"), &expected, got);
    Ok(())
}

/// Decodes the recorded codes and compares with the recorded values.
fn check_dequantize(
    case: &Case,
    implementation: Implementation,
    differences: &mut Differences,
    suffix: &str,
    (rows, cols): (usize, usize),
    mode: &Mode,
) -> Result<()> {
    let tensor = |name: &str| format!("{name}{suffix}");
    let scales = case.bytes(&tensor("scale"))?;
    let amax = case.f32s(&tensor("amax"))?;
    let view = View {
        rows,
        cols,
        codes: case.bytes(&tensor("data"))?,
        scales: scales.get(..rows * cols.div_ceil(BLOCK)).unwrap_or(scales),
        stored: &amax,
        global: mode.global,
        unit: Unit::Amax(mode.rule.bound()),
    };
    let mut got = vec![0.0; rows * cols];
    dequantize::dequantize(implementation, &view, &mut got)?;
    let expected = case.f32s(&tensor("dequant"))?;
    differences.compare(&format!("{implementation}: {}", tensor("dequant")), &expected, &got);
    Ok(())
}

/// TransformerEngine's fast-math variant, which only the spec has.
pub fn check_fast_math(case: &Case, differences: &mut Differences) -> Result<String> {
    let (Tile::Row16, global) = scaling(case)? else { bail!("metadata 'scaling': fast math has 1×16 tiles only") };
    let mode = Mode { global, ..Mode::default() };
    check_spec(case, differences, &mode, |x, amax, _| {
        Ok(matrix::quantize_fast_math(x, amax, mode.global, mode.specials)?)
    })?;
    Ok(format!("fastmath {} (spec)", case.meta("scaling")?))
}

/// Stochastic rounding in TransformerEngine's word orders, which only the spec has.
pub fn check_stochastic(case: &Case, differences: &mut Differences) -> Result<String> {
    let (tile, global) = scaling(case)?;
    let mode = Mode { tile, global, ..Mode::default() };
    let kernel = case.choice(
        "kernel",
        &[("vector_blockwise", upstream::Kernel::VectorBlockwise), ("tuned_1D", upstream::Kernel::Tuned1d)],
    )?;
    let [seed, offset] = case.u64s("rng_state")?[..] else { bail!("tensor 'rng_state': expected two values") };
    let (rows, cols) = case.shape2("input")?;
    let directions =
        case.choice("columnwise", &[("True", upstream::Directions::Both), ("False", upstream::Directions::Row)])?;
    let random = upstream::random_bytes(kernel, rows, cols, seed, offset, directions)?;
    check_spec(case, differences, &mode, |x, amax, suffix| {
        let bytes = if suffix.is_empty() { &random.row } else { &random.col };
        Ok(matrix::quantize(x, amax, &mode, Rounding::Stochastic(Random::Bytes(bytes)))?)
    })?;
    Ok(format!("sr {} {} (spec)", case.meta("kernel")?, case.meta("scaling")?))
}

/// Runs the directions that a case records through a rule of the spec, with kernel specials:
/// kernels produced them.
fn check_spec(
    case: &Case,
    differences: &mut Differences,
    mode: &Mode,
    quantize: impl Fn(&Matrix, &[f32], &str) -> Result<Quantized>,
) -> Result<()> {
    let x = case.matrix("input")?;
    for (suffix, x) in [("", x.clone()), ("_t", x.transpose())] {
        if suffix.is_empty() || case.has(&format!("data{suffix}")) {
            let amax = matrix::amax(&x, mode.global, mode.specials)?;
            let q = quantize(&x, &amax, suffix)?;
            let got = Buffers { codes: q.codes, scales: q.scales, amax };
            compare(case, differences, "spec: ", suffix, &got, (x.rows(), x.cols()), mode)?;
            // These kinds record the amax of the row direction, and that of the columns where it is
            // another one.
            if suffix.is_empty() || case.has("amax_t") {
                compare_amax(case, differences, "spec: ", suffix, &got.amax, mode)?;
            }
        }
    }
    Ok(())
}
