//! Cases that tabulate a single rule, and the scale swizzle.

use super::case::Case;
use super::report::Differences;
use anyhow::{Result, bail, ensure};
use half::bf16;
use nvfp4::Elements;
use nvfp4_kernels::{Implementation, swizzle};
use nvfp4_spec::hadamard::{Signs, transform};
use nvfp4_spec::philox::{philox4x32, words};
use nvfp4_spec::{Specials, e2m1, e4m3, four_over_six, stochastic};

pub fn check_swizzle(case: &Case, implementations: &[Implementation], differences: &mut Differences) -> Result<String> {
    for suffix in ["", "_t"] {
        let (linear, swizzled) = (format!("scale{suffix}"), format!("scale_swizzled{suffix}"));
        let (rows, cols) = case.shape2(&linear)?;
        for &implementation in implementations {
            let mut got = vec![0xA5; nvfp4_spec::swizzle::len(rows, cols)?];
            swizzle::swizzle(implementation, case.bytes(&linear)?, rows, cols, &mut got)?;
            differences.compare(&format!("{implementation}: {swizzled}"), case.bytes(&swizzled)?, &got);
            let mut back = vec![0xA5; rows * cols];
            swizzle::unswizzle(implementation, case.bytes(&swizzled)?, rows, cols, &mut back)?;
            differences.compare(&format!("{implementation}: {linear}"), case.bytes(&linear)?, &back);
        }
    }
    Ok("swizzle".into())
}

pub fn check(case: &Case, differences: &mut Differences) -> Result<String> {
    let table = case.meta("table")?;
    match table {
        "e2m1_cast" => {
            let codes: Vec<u8> = case.f32s("input")?.iter().map(|&x| e2m1::encode(x, Specials::Reference)).collect();
            let packed: Vec<u8> = codes.chunks(2).map(|p| e2m1::pack(p[0], *p.get(1).unwrap_or(&0))).collect();
            differences.compare("packed", case.bytes("packed")?, &packed);
        }
        "e2m1_cast_satfinite" => {
            let codes: Vec<u8> = case.f32s("input")?.iter().map(|&x| e2m1::encode(x, Specials::Kernel)).collect();
            differences.compare("code", case.bytes("code")?, &codes);
        }
        "e2m1_decode" => {
            let values: Vec<f32> =
                case.bytes("packed")?.iter().flat_map(|&b| e2m1::unpack(b)).map(e2m1::decode).collect();
            differences.compare("values", &case.f32s("values")?, &values);
        }
        "e4m3_cast" | "e4m3_cast_satfinite" => {
            let bits: Vec<u8> = case.f32s("input")?.iter().map(|&x| e4m3::encode(x)).collect();
            differences.compare("bits", case.bytes("bits")?, &bits);
        }
        "e4m3_decode" => {
            let values: Vec<f32> = case.bytes("bits")?.iter().map(|&b| e4m3::decode(b)).collect();
            differences.compare("values", &case.f32s("values")?, &values);
        }
        "fp16_candidate" => {
            let candidates: Vec<f32> = (0..16)
                .flat_map(|code| (0..=e4m3::MAX_BYTE).map(move |scale| four_over_six::fast_candidate(code, scale)))
                .collect();
            differences.compare("candidate", &case.f32s("candidate")?, &candidates);
        }
        "tree16" => check_tree(case, differences)?,
        "hadamard" => check_hadamard_matrix(case, differences)?,
        "philox" => check_philox(case, differences)?,
        "sr_software" => check_stochastic_rounding(case, differences)?,
        other => bail!("unknown table '{other}'"),
    }
    Ok(format!("table {table} (spec)"))
}

/// `err` holds the sums of 16 rows per tile, one tile below the other; `total` their tree sums.
fn check_tree(case: &Case, differences: &mut Differences) -> Result<()> {
    let (rows, cols) = case.shape2("err")?;
    let errors = case.f32s("err")?;
    ensure!(rows.is_multiple_of(16), "tensor 'err': expected a multiple of 16 rows, got {rows}");
    let totals: Vec<f32> = (0..rows / 16)
        .flat_map(|t| (0..cols).map(move |c| (t, c)))
        .map(|(t, c)| four_over_six::sum_rows::<16>(std::array::from_fn(|r| errors[(t * 16 + r) * cols + c])))
        .collect();
    differences.compare("total", &case.f32s("total")?, &totals);
    Ok(())
}

/// Row `i` of the matrix is the transform of the unit vector `i`.
fn check_hadamard_matrix(case: &Case, differences: &mut Differences) -> Result<()> {
    let signs = case.choice("random_sign_mask", &[("True", Signs::FIXED), ("False", Signs::NONE)])?;
    let got: Vec<bf16> = (0..16)
        .flat_map(|i| transform(std::array::from_fn(|k| if k == i { 1.0 } else { 0.0 }), signs))
        .map(bf16::from_f32)
        .collect();
    let Elements::Bf16(expected) = case.elements("matrix")? else { bail!("tensor 'matrix': expected BF16") };
    differences.compare("matrix", &expected, &got);
    Ok(())
}

/// Five successive calls of each generator; the counter is subsequence (high) and offset (low).
fn check_philox(case: &Case, differences: &mut Differences) -> Result<()> {
    let (seeds, subsequences, offsets) = (case.u64s("seed")?, case.u64s("subsequence")?, case.u64s("offset")?);
    ensure!(
        seeds.len() == subsequences.len() && seeds.len() == offsets.len(),
        "tensors 'seed', 'subsequence' and 'offset' differ in length"
    );
    let mut got = Vec::new();
    for ((&seed, &subsequence), &offset) in seeds.iter().zip(&subsequences).zip(&offsets) {
        for call in 0..5 {
            let counter = ((u128::from(subsequence) << 64) + u128::from(offset)).wrapping_add(call);
            let ([c0, c1], [c2, c3]) = (words(counter as u64), words((counter >> 64) as u64));
            got.extend(philox4x32([c0, c1, c2, c3], words(seed)));
        }
    }
    differences.compare("out", &case.u32s("out")?, &got);
    Ok(())
}

fn check_stochastic_rounding(case: &Case, differences: &mut Differences) -> Result<()> {
    let (x, random) = (case.f32s("x")?, case.bytes("rbits8")?);
    ensure!(x.len() == random.len(), "tensors 'x' and 'rbits8' differ in length");
    let values: Vec<f32> =
        x.iter().zip(random).map(|(&x, &r)| e2m1::decode(stochastic::encode(x, r, Specials::Kernel))).collect();
    differences.compare("value", &case.f32s("value")?, &values);
    Ok(())
}
