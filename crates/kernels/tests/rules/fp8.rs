//! The rules of FP8 and MXFP8.

use super::{PRECISIONS, bits, driver, float, values};
use nvfp4_spec::e8m0;
use nvfp4_spec::fp8::delayed::{Algorithm, Delayed, Entry};
use nvfp4_spec::fp8::scale::mx_byte;
use nvfp4_spec::fp8::{AmaxRule, Format, ScaleValues};
use values::{pick, words};

// In the order of the enums in fp8_rules.cuh: an index here is a value there.
const FORMATS: [Format; 2] = Format::ALL;
const SCALE_VALUES: [ScaleValues; 2] = [ScaleValues::Any, ScaleValues::PowersOfTwo];
const ALGORITHMS: [Algorithm; 2] = [Algorithm::Max, Algorithm::MostRecent];

fn format(i: u32) -> Format {
    FORMATS[i as usize]
}

fn in_both_formats(values: impl IntoIterator<Item = u32>) -> Vec<[u32; 2]> {
    values.into_iter().flat_map(|x| [[x, 0], [x, 1]]).collect()
}

/// Rounding drops at least 20 bits, so the low 16 count only as zero, half, less or more: every
/// upper half with each is every case.
#[test]
fn every_rounding_of_a_number_to_a_code() {
    let Some(rules) = driver() else { return };
    let lows = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
    let cases = (0..=0xFFFFu32).flat_map(|high| lows.map(|low| high << 16 | low));
    rules.check("fp8::encode", &in_both_formats(cases), |[x, f]| [format(f).encode(float(x)).into()]);
    rules.check("fp8::encode", &in_both_formats(values::all(80)), |[x, f]| [format(f).encode(float(x)).into()]);
    let fours: Vec<[u32; 5]> = values::records::<4>(81, 50_000)
        .into_iter()
        .flat_map(|[a, b, c, d]| [0, 1].map(|f| [a, b & 0x807F_FFFF | 0x3F80_0000, c, d, f]))
        .collect();
    rules.check("fp8::encode_four", &fours, |[a, b, c, d, f]| {
        [u32::from_le_bytes([a, b, c, d].map(|x| format(f).encode(float(x))))]
    });
}

#[test]
fn every_code_has_its_value() {
    let Some(rules) = driver() else { return };
    rules.check("fp8::max", &[[0], [1]], |[f]| [bits(format(f).max())]);
    rules.check("fp8::decode", &in_both_formats(0..256), |[code, f]| [bits(format(f).decode(code as u8))]);
    let fours = in_both_formats((0..256).map(|c: u32| c | (c ^ 255) << 8 | (c ^ 85) << 16 | (c ^ 170) << 24));
    rules.check("fp8::decode_four", &fours, |[codes, f]| codes.to_le_bytes().map(|c| bits(format(f).decode(c))));
    let bytes: Vec<[u32; 1]> = (0..256).map(|b| [b]).collect();
    rules.check("e8m0::decode", &bytes, |[b]| [bits(e8m0::decode(b as u8))]);
    rules.check("e8m0::reciprocal", &bytes, |[b]| [bits(e8m0::reciprocal(b as u8))]);
    let values: Vec<[u32; 1]> = values::magnitudes(82).into_iter().map(|x| [x]).collect();
    rules.check("e8m0::encode_up", &values, |[x]| [e8m0::encode_up(float(x)).into()]);
}

/// Magnitudes, among them those around every power of two times the largest values.
fn amaxes(key: u32) -> Vec<u32> {
    let largest = (-149..128).flat_map(|n| FORMATS.map(|f| (f64::from(f.max()) * 2f64.powi(n)) as f32));
    let near = largest.flat_map(|x| [x.next_down(), x, x.next_up()]).map(|x| x.to_bits() & 0x7FFF_FFFF);
    values::magnitudes(key).into_iter().chain(near).collect()
}

#[test]
fn scales_follow_from_amaxes() {
    let Some(rules) = driver() else { return };
    let amaxes = amaxes(83);
    rules.check("fp8::mx_byte", &in_both_formats(amaxes.clone()), |[a, f]| [mx_byte(float(a), format(f)).into()]);
    let epsilons = [0.0f32, 0.7, 1e-30, 3e-45, 1e30, f32::INFINITY].map(f32::to_bits);
    let cases: Vec<[u32; 5]> = (amaxes.iter().zip(words(84, amaxes.len())))
        .flat_map(|(&a, w)| [0, 1, 2].map(|p| [a, w & 1, w >> 1 & 1, pick(&epsilons, w >> 2), p]))
        .collect();
    rules.check("fp8::scale", &cases, |[amax, f, values, epsilon, precision]| {
        let rule = AmaxRule { values: SCALE_VALUES[values as usize], epsilon: float(epsilon) };
        let precision = PRECISIONS[precision as usize];
        if precision == nvfp4_spec::Precision::F32 {
            assert_eq!(
                rule.tensor_scale(float(amax), format(f)),
                rule.block_scale(float(amax), format(f), precision),
                "a tensor's scale is that of a block of binary32"
            );
        }
        [bits(rule.block_scale(float(amax), format(f), precision))]
    });
}

#[test]
fn scales_follow_from_history() {
    let Some(rules) = driver() else { return };
    let amaxes: Vec<u32> = [0.0, -0.0, 3.0, 448.0, 0.1, 7.5, 1e-40, 1e-38, f32::MAX, f32::INFINITY, f32::NAN]
        .map(f32::to_bits)
        .into_iter()
        .chain(words(85, 5).map(|w| w & 0x7FFF_FFFF))
        .collect();
    let random = values::records::<14>(86, 100_000);
    let cases: Vec<[u32; 14]> = random
        .into_iter()
        .map(|mut r| {
            let rule = Delayed { format: format(r[0] & 1), margin: (r[0] >> 1) as i32 % 12, ..Delayed::default() };
            r[0] = rule.largest().to_bits();
            (r[1], r[2]) = (r[1] & 1, r[2] & 1);
            // A third have no reduction.
            r[3] = if r[3] % 3 == 0 { 0 } else { pick(&amaxes, r[3]) };
            r[4] = pick(&[5.0f32, 1.0, f32::INFINITY, 1e-30, f32::MAX], r[4]).to_bits();
            r[5] = 1 + r[5] % 4;
            r[6..].iter_mut().for_each(|x| *x = pick(&amaxes, *x));
            r
        })
        .collect();
    rules.check("fp8::update", &cases, |r| {
        let length = r[5] as usize;
        let mut column: Vec<f32> = (0..length).map(|i| float(r[6 + 2 * i])).collect();
        let reduced = Some(float(r[3]));
        let entry = if r[2] == 1 { Entry::Bulk { reduced } } else { Entry::Single };
        // The format and the margin are only seen through `largest`.
        let margins =
            (-20..20).flat_map(|margin| FORMATS.map(|format| Delayed { format, margin, ..Delayed::default() }));
        let rule = margins.into_iter().find(|rule| rule.largest().to_bits() == r[0]).unwrap();
        let rule = Delayed { algorithm: ALGORITHMS[r[1] as usize], ..rule };
        let scale = rule.update(&mut column, float(r[4]), entry).unwrap();
        let mut out = [0; 9];
        out[0] = bits(scale);
        out[1..].copy_from_slice(&r[6..14]);
        out[1..].iter_mut().for_each(|x| *x = bits(float(*x)));
        column.iter().enumerate().for_each(|(i, &x)| out[1 + 2 * i] = bits(x));
        out
    });
}
