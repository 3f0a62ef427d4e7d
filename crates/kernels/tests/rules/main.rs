//! The rules of the GPU (`src/cuda/rules.cuh`, `src/cuda/fp8_rules.cuh`), built by g++ and held
//! against `nvfp4_spec`, function by function and bit for bit; then whole tiles, the golden cases
//! among them. Needs g++ but no GPU; without g++ each test is skipped.
#![cfg(feature = "cuda")]

mod driver;
mod fp8;
mod golden;
mod values;

use driver::Driver;
use half::{bf16, f16};
use nvfp4_spec::block;
use nvfp4_spec::hadamard::{self, Signs};
use nvfp4_spec::profile::Factor;
use nvfp4_spec::scale::{self, Global, Unit};
use nvfp4_spec::scaling::Scaling;
use nvfp4_spec::stochastic::{self, Stream};
use nvfp4_spec::tile::{self, Quantized};
use nvfp4_spec::{
    BLOCK, Bound, ErrorPath, GlobalScale, Metric, Mode, Precision, Profile, Rounding, ScaleRule, Specials, Tile,
};
use nvfp4_spec::{e2m1, e4m3, four_over_six, matrix, philox, swizzle};
use nvfp4_testing::{Need, missing};
use values::{pick, records, words};

// In the order of the enums in rules.cuh: an index here is a value there.
const SPECIALS: [Specials; 2] = [Specials::Kernel, Specials::Reference];
const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::F16];
const PROFILES: [Profile; 4] =
    [Profile::TransformerEngine, Profile::ModelOpt, Profile::LlmCompressor, Profile::TorchAo];
const METRICS: [Metric; 2] = [Metric::Mae, Metric::Mse];
const PATHS: [ErrorPath; 2] = [ErrorPath::Strict, ErrorPath::Fast];
const BOUNDS: [Bound; 2] = [Bound::E448, Bound::E256];

fn driver() -> Option<&'static Driver> {
    Driver::get().inspect_err(|reason| missing(Need::Gxx, reason)).ok()
}

fn index<T: PartialEq>(list: &[T], item: T) -> u32 {
    list.iter().position(|x| *x == item).unwrap() as u32
}

/// Bits, with one NaN for all.
fn bits(x: f32) -> u32 {
    if x.is_nan() { 0x7FC0_0000 } else { x.to_bits() }
}

fn float(bits: u32) -> f32 {
    f32::from_bits(bits)
}

fn specials(i: u32) -> Specials {
    SPECIALS[i as usize]
}

fn bound(six_e: u32) -> Bound {
    *BOUNDS.iter().find(|b| b.six_e().to_bits() == six_e).unwrap()
}

/// The global scale of a record that begins with the amax, 6E and the specials.
fn global(record: &[u32]) -> Global {
    Global::new(float(record[0]), bound(record[1]), specials(record[2]))
}

/// Every value with both specials.
fn in_both_edges(values: &[u32]) -> Vec<[u32; 2]> {
    values.iter().flat_map(|&x| [[x, 0], [x, 1]]).collect()
}

/// Global scales of many amaxes (amax, 6E, specials), each followed by a value of `others`.
fn with_globals(key: u32, others: &[u32]) -> Vec<[u32; 4]> {
    let (amaxes, random) = (values::magnitudes(key), words(key + 7, others.len()));
    let record = |(&other, w): (&u32, u32)| {
        let six_e = pick(&BOUNDS, w >> 1).six_e().to_bits();
        [pick(&amaxes, w >> 2), six_e, w & 1, other]
    };
    others.iter().zip(random).map(record).collect()
}

#[test]
fn precisions() {
    let Some(rules) = driver() else { return };
    let patterns: Vec<[u32; 1]> = (0..=0xFFFF).map(|b| [b]).collect();
    rules.check("precision::from_bf16", &patterns, |[b]| [bits(bf16::from_bits(b as u16).to_f32())]);
    rules.check("precision::from_f16", &patterns, |[b]| [bits(f16::from_bits(b as u16).to_f32())]);
    let values = values::all(1);
    let (nan, number): (Vec<u32>, Vec<u32>) = values.iter().partition(|&&x| float(x).is_nan());
    let singles: Vec<[u32; 1]> = number.iter().map(|&x| [x]).collect();
    rules.check("precision::to_bf16", &singles, |[x]| [bf16::from_f32(float(x)).to_bits().into()]);
    rules.check("precision::to_f16", &singles, |[x]| [f16::from_f32(float(x)).to_bits().into()]);
    assert!(rules.call("precision::to_bf16", &nan).into_iter().all(|b| bf16::from_bits(b as u16).is_nan()));
    assert!(rules.call("precision::to_f16", &nan).into_iter().all(|b| f16::from_bits(b as u16).is_nan()));
    let rounded: Vec<[u32; 2]> = values.iter().flat_map(|&x| [0, 1, 2].map(|p| [x, p])).collect();
    rules.check("precision::round", &rounded, |[x, p]| [bits(PRECISIONS[p as usize].round(float(x)))]);
    let all = [[0], [1], [2]];
    rules.check("precision::min_normal", &all, |[p]| [bits(PRECISIONS[p as usize].min_normal())]);
    rules.check("precision::max", &all, |[p]| [bits(PRECISIONS[p as usize].max())]);
}

#[test]
fn small_formats() {
    let Some(rules) = driver() else { return };
    let values = in_both_edges(&values::all(10));
    rules.check("e2m1::encode", &values, |[x, e]| [e2m1::encode(float(x), specials(e)).into()]);
    // Only the low four bits are looked at.
    let codes: Vec<[u32; 1]> = (0..256).chain(words(11, 1000)).map(|code| [code]).collect();
    rules.check("e2m1::decode", &codes, |[code]| [bits(e2m1::decode(code as u8))]);
    let magnitudes: Vec<[u32; 1]> = values::magnitudes(12).into_iter().map(|x| [x]).collect();
    rules.check("e4m3::encode", &magnitudes, |[x]| [e4m3::encode(float(x)).into()]);
    rules.check("e4m3::decode", &codes[..256], |[byte]| [bits(e4m3::decode(byte as u8))]);
}

#[test]
fn scales() {
    let Some(rules) = driver() else { return };
    let values = in_both_edges(&values::all(20));
    rules.check("min_with_max", &values, |[x, e]| [bits(specials(e).min_with_max(float(x)))]);
    rules.check("scale::magnitude_bits", &values, |[x, e]| [scale::magnitude_bits(float(x), specials(e))]);
    let six_es = BOUNDS.map(|b| b.six_e().to_bits());
    let amaxes: Vec<[u32; 3]> = values.iter().flat_map(|&[x, e]| six_es.map(|six_e| [x, six_e, e])).collect();
    rules.check("scale::global", &amaxes, |record| {
        let g = global(&record);
        [g.amax, g.bound.six_e(), g.encode, g.decode].map(bits)
    });
    let magnitudes = with_globals(21, &values::magnitudes(22));
    rules.check("scale::block_scale", &magnitudes, |r| {
        [scale::block_scale(float(r[3]), &global(&r), specials(r[2])).into()]
    });
    let bytes: Vec<u32> = words(23, 400_000).map(|w| w & 0xFF).collect();
    rules.check("scale::inverse_scale", &with_globals(24, &bytes), |r| {
        [bits(scale::inverse_scale(r[3] as u8, &global(&r), specials(r[2])))]
    });
}

#[test]
fn decode_factors() {
    let Some(rules) = driver() else { return };
    let units = [Unit::Amax(Bound::E448), Unit::Multiplier, Unit::Divisor, Unit::Amax(Bound::E256)];
    let [e448, e256] = BOUNDS.map(|b| (1.0 / b.six_e()).to_bits());
    let stored = values::all(30);
    let cases: Vec<[u32; 4]> = (stored.iter().zip(words(31, stored.len())))
        .flat_map(|(&x, w)| [[w & 255, x, 0, e448], [w & 255, x, 0, e256], [w & 255, x, 1, 0], [w & 255, x, 2, 0]])
        .collect();
    rules.check("scale::decode_factor", &cases, |[byte, stored, unit, reciprocal]| {
        let unit = if reciprocal == e256 { units[3] } else { units[unit as usize] };
        [bits(unit.decode_factor(byte as u8, float(stored)))]
    });
}

/// The scaling of a record that begins with the amax, 6E, the specials, the profile and the precision.
fn scaling(record: &[u32]) -> Scaling {
    let (profile, specials) = (PROFILES[record[3] as usize], specials(record[2]));
    let mode = Mode { profile, specials, ..Mode::default() };
    let scaling = Scaling::new(float(record[0]), &mode, PRECISIONS[record[4] as usize]);
    Scaling { global: global(record), ..scaling }
}

#[test]
fn profiles() {
    let Some(rules) = driver() else { return };
    let all: Vec<[u32; 2]> = (0..12).map(|i| [i / 3, i % 3]).collect();
    let amaxes: Vec<[u32; 4]> = (values::all(40).iter().enumerate())
        .flat_map(|(i, &x)| all.iter().map(move |&[a, b]| [x, bits(BOUNDS[i % 2].six_e()), a, b]))
        .collect();
    rules.check("profile::stored", &amaxes, |[amax, six_e, profile, precision]| {
        [bits(PROFILES[profile as usize].stored(float(amax), bound(six_e), PRECISIONS[precision as usize]))]
    });
    let globals = with_globals(41, &values::magnitudes(42));
    let blocks: Vec<[u32; 6]> =
        globals.iter().flat_map(|r| all.iter().map(|&[a, b]| [r[0], r[1], r[2], a, b, r[3]])).collect();
    rules.check("profile::block_scale", &blocks, |r| [scaling(&r).block_scale(float(r[5])).into()]);
    let elements = values::all(43);
    let factors: Vec<[u32; 7]> = (blocks.iter().zip(words(44, blocks.len())))
        .map(|(r, w)| [r[0], r[1], r[2], r[3], r[4], w & 255, pick(&elements, w >> 8)])
        .collect();
    rules.check("profile::factor", &factors, |r| {
        let factor = scaling(&r).factor(r[5] as u8);
        let (divide, by) = match factor {
            Factor::Multiply(by) => (0, by),
            Factor::Divide(by) => (1, by),
        };
        [divide, bits(by), bits(factor.apply(float(r[6])))]
    });
    let cases: Vec<[u32; 2]> = (0..8).map(|i| [i / 2, i % 2]).collect();
    rules.check("profile specials", &cases, |[p, e]| {
        let profile = PROFILES[p as usize];
        [index(&SPECIALS, profile.code_specials(specials(e))), index(&SPECIALS, profile.amax_specials(specials(e)))]
    });
}

#[test]
fn randomness() {
    let Some(rules) = driver() else { return };
    let wide = |words: &[u32]| u64::from(words[0]) | u64::from(words[1]) << 32;
    let mut counters: Vec<[u32; 6]> = records(50, 100_000);
    counters.extend([[0; 6], [u32::MAX; 6]]);
    rules.check("philox::philox4x32", &counters, |[a, b, c, d, k0, k1]| philox::philox4x32([a, b, c, d], [k0, k1]));
    rules.check("stochastic::block", &counters, |r| -> [u32; 4] {
        let stream = Stream { seed: wide(&r), offset: wide(&r[2..]), first_block: 0 };
        let bytes = stream.block(wide(&r[4..]));
        std::array::from_fn(|i| u32::from_le_bytes(bytes.as_chunks().0[i]))
    });
}

#[test]
fn stochastic_rounding() {
    let Some(rules) = driver() else { return };
    let values = values::all(60);
    let steps: Vec<[u32; 1]> = values.iter().map(|&x| [x]).collect();
    rules.check("stochastic::grid_step", &steps, |[x]| [bits(stochastic::grid_step(float(x)))]);
    let encode = |[y, random, e]: [u32; 3]| [stochastic::encode(float(y), random as u8, specials(e)).into()];
    let both = |(y, random)| [[y, random, 0], [y, random, 1]];
    // Every byte at and around the grid's values and ties; a few bytes everywhere.
    let near: Vec<u32> =
        values::specials().iter().copied().filter(|&y| (0.125..8.0).contains(&float(y).abs())).collect();
    let every: Vec<[u32; 3]> = near.iter().flat_map(|&y| (0..256).map(move |r| (y, r))).flat_map(both).collect();
    rules.check("stochastic::encode", &every, encode);
    let few: Vec<[u32; 3]> = (values.iter().zip(words(61, values.len())))
        .flat_map(|(&y, w)| [0, 1, 127, 128, 255, w & 255].map(|r| (y, r)))
        .flat_map(both)
        .collect();
    rules.check("stochastic::encode", &few, encode);
}

#[test]
fn hadamard() {
    let Some(rules) = driver() else { return };
    let cases: Vec<[u32; 17]> = (words(70, 60_000).enumerate())
        .map(|(i, w)| {
            let values = values::tile(i as u32, BLOCK);
            let signs = [Signs::FIXED.0.into(), 0, w & 0xFFFF][i % 3];
            std::array::from_fn(|k| if k < BLOCK { values[k] } else { signs })
        })
        .collect();
    rules.check("hadamard::transform", &cases, |r| {
        hadamard::transform(std::array::from_fn(|i| float(r[i])), Signs(r[BLOCK] as u16)).map(bits)
    });
}

#[test]
fn four_over_six_parts() {
    let Some(rules) = driver() else { return };
    let magnitudes = with_globals(80, &values::magnitudes(81));
    rules.check("four_over_six::candidate_scales", &magnitudes, |r| {
        four_over_six::candidate_scales(float(r[3]), &global(&r), specials(r[2])).map(u32::from)
    });
    let amaxes = values::magnitudes(82);
    let rows: Vec<[u32; 22]> = (words(83, 60_000).enumerate())
        .map(|(i, w)| {
            let x = values::tile(i as u32, BLOCK);
            // Half of the amaxes are close to that of the row.
            let amax = if w >> 31 == 0 { 1f32.to_bits() + (w & 0x00FF_FFFF) } else { pick(&amaxes, w) };
            let head = [amax, pick(&BOUNDS, w >> 5).six_e().to_bits(), w & 1, w >> 1 & 1, w >> 2 & 1, w >> 8 & 0x7F];
            std::array::from_fn(|k| if k < 6 { head[k] } else { x[k - 6] })
        })
        .collect();
    rules.check("four_over_six::row_error", &rows, |r| {
        let (g, specials, byte) = (global(&r), specials(r[2]), r[5] as u8);
        let tile = [std::array::from_fn(|i| float(r[6 + i]))];
        let codes = tile::encode(&tile, scale::inverse_scale(byte, &g, specials), specials);
        let (metric, path) = (METRICS[r[3] as usize], PATHS[r[4] as usize]);
        [bits(four_over_six::tile_error(&tile, &Quantized { scale: byte, codes }, &g, metric, path))]
    });
    let sums: Vec<[u32; 17]> = (0..30_000)
        .map(|i| {
            let errors = values::tile(i, BLOCK);
            std::array::from_fn(|k| if k == 0 { 1 + i % 3 } else { errors[k - 1] })
        })
        .collect();
    rules.check("four_over_six::sum_rows", &sums, |r| {
        [bits(four_over_six::sum_rows::<16>(std::array::from_fn(|i| float(r[1 + i]))))]
    });
}

#[test]
fn swizzled_places() {
    let Some(rules) = driver() else { return };
    let mut cases: Vec<[u32; 6]> = Vec::new();
    for cols in [1, 3, 4, 5, 64, 257] {
        cases.extend((0..300).flat_map(|r| (0..cols).map(move |c| [r, 0, c, 0, cols, 0])));
    }
    // Rows beyond 32 bits.
    let rows_beyond = |[r, high, c]: [u32; 3]| {
        let cols = (c >> 10) | 1;
        [r, high & 255, c % cols, 0, cols, 0]
    };
    cases.extend(records(90, 10_000).into_iter().map(rows_beyond));
    rules.check("swizzle::offset", &cases, |r| {
        let place = swizzle::offset(r[0] as usize | (r[1] as usize) << 32, r[2] as usize, r[4] as usize);
        philox::words(place as u64)
    });
}

/// The record of a tile of H rows: settings, elements, random bytes.
fn record(amax: f32, mode: &Mode, precision: Precision, x: &[u32], random: Option<&[u32]>) -> Vec<u32> {
    let (rule, path) = match mode.rule {
        ScaleRule::Six => (0, 0),
        ScaleRule::FourOverSix { metric, error, .. } => (1 + index(&METRICS, metric), index(&PATHS, error)),
        ScaleRule::Mse => (3, 0),
        ScaleRule::ModelOptMse => (4, 0),
        ScaleRule::ModelOptFourOverSix => (5, 0),
    };
    let six_e = mode.rule.bound().six_e().to_bits();
    let (precision, profile) = (index(&PRECISIONS, precision), index(&PROFILES, mode.profile));
    let mut words = vec![amax.to_bits(), six_e, index(&SPECIALS, mode.specials), precision, profile, rule, path];
    words.push(random.is_some().into());
    words.extend(x);
    words.extend(random.unwrap_or(&vec![0; x.len() / 4]));
    words
}

/// Every mode that has a meaning, of one tile.
fn modes(tile: Tile) -> Vec<Mode> {
    let mut modes = Vec::new();
    for specials in SPECIALS {
        modes.extend(ScaleRule::ALL.map(|rule| Mode { tile, rule, specials, ..Mode::default() }));
    }
    for rule in ScaleRule::ALL {
        modes.extend(PROFILES[1..].iter().map(|&profile| Mode { tile, profile, rule, ..Mode::default() }));
    }
    // The search of scales is not for square tiles.
    modes.retain(|mode| mode.check(&Rounding::<()>::NearestEven).is_ok());
    modes
}

/// Random tiles of H rows in every mode, to nearest and stochastic.
fn check_tiles<const H: usize>(rules: &Driver, tile: Tile, count: u32) {
    let function = format!("quantize {H}x16");
    let (mut inputs, mut expected) = (Vec::new(), Vec::new());
    let amaxes = values::magnitudes(100);
    for (m, mode) in (0..).zip(modes(tile)) {
        for i in 0..count {
            let key = m * count + i;
            let mut x = values::tile(key, H * BLOCK);
            let precision = PRECISIONS[i as usize / 8 % 3];
            for x in &mut x {
                *x = precision.round(float(*x)).to_bits();
            }
            let values: Vec<f32> = x.iter().map(|&x| float(x)).collect();
            // The tile's own amax, a larger one, or any.
            let own = scale::amax(&values, mode.amax_specials());
            let amax = [own, own * 37.0, float(pick(&amaxes, key * 31))][i as usize % 3];
            let random: Vec<u32> = words(key + 1_000_000, H * 4).collect();
            let scaling = Scaling::new(amax, &mode, precision);
            let rows = std::array::from_fn(|r| *values[r * BLOCK..].first_chunk::<BLOCK>().unwrap());
            let bytes = std::array::from_fn(|r| stochastic::bytes_of(*random[r * 4..].first_chunk::<4>().unwrap()));
            let roundings = [Rounding::NearestEven, Rounding::Stochastic(&bytes)];
            for (rounding, random) in roundings.into_iter().zip([None, Some(&random[..])]) {
                if mode.check(&rounding).is_ok() {
                    inputs.extend(record(amax, &mode, precision, &x, random));
                    let q = block::quantize::<H>(&rows, &scaling, rounding);
                    expected.push((q, format!("{mode:?}, {precision:?}, {rounding:?}, amax {amax:e}, {rows:?}")));
                }
            }
        }
    }
    let results = rules.call(&function, &inputs);
    assert_eq!(results.len(), expected.len() * (1 + H * BLOCK));
    for ((q, what), got) in expected.iter().zip(results.chunks(1 + H * BLOCK)) {
        let codes: Vec<u32> = q.codes.as_flattened().iter().map(|&c| c.into()).collect();
        assert!(got[0] == u32::from(q.scale) && got[1..] == codes, "{what}: {got:x?} instead of {q:x?}");
    }
    println!("{function}: {} tiles", expected.len());
}

#[test]
fn tiles_in_every_mode() {
    let Some(rules) = driver() else { return };
    check_tiles::<1>(rules, Tile::Row16, 5000);
    check_tiles::<16>(rules, Tile::Square16, 400);
}

#[test]
fn golden_cases() {
    let Some(rules) = driver() else { return };
    let (count, cases) = golden::quantize_cases();
    assert_eq!(count, 607);
    for tile in [Tile::Row16, Tile::Square16] {
        check_golden(rules, tile.height(), cases.iter().filter(|case| case.mode.tile == tile).collect());
    }
}

/// Golden cases whose tiles have `height` rows.
fn check_golden(rules: &Driver, height: usize, cases: Vec<&golden::Expected>) {
    let (mut inputs, mut tiles) = (Vec::new(), 0);
    walk(&cases, height, |case, amax, r, b| {
        let at = |r: usize, c: usize| {
            let inside = r < case.input.rows() && c < case.input.cols();
            if inside { case.input.row(r)[c].to_bits() } else { 0 }
        };
        let x: Vec<u32> = (0..height * BLOCK).map(|i| at(r + i / BLOCK, b * BLOCK + i % BLOCK)).collect();
        inputs.extend(record(amax, &case.mode, case.input.precision(), &x, None));
    });
    let results = rules.call(&format!("quantize {height}x16"), &inputs);
    let mut results = results.chunks(1 + height * BLOCK);
    walk(&cases, height, |case, _, r, b| {
        let (got, cols) = (results.next().unwrap(), case.input.cols());
        for (row, codes) in (r..case.input.rows()).zip(got[1..].chunks(BLOCK)) {
            let scale = case.scales[row * cols.div_ceil(BLOCK) + b];
            assert_eq!(got[0], u32::from(scale), "{}: scale of row {row}, block {b}", case.name);
            let packed = &case.codes[row * e2m1::packed_len(cols)..];
            for (c, &code) in (b * BLOCK..cols).zip(codes) {
                let expected = e2m1::code_at(packed, c);
                assert_eq!(code, u32::from(expected), "{}: code of row {row}, column {c}", case.name);
            }
        }
        tiles += 1;
    });
    assert!(results.next().is_none());
    println!("golden cases: {tiles} tiles of {height}x16 in {} directions", cases.len());
}

/// Visits the tiles of all cases with the amax that each goes by, its first row and its block.
fn walk<'a>(
    cases: &[&'a golden::Expected],
    height: usize,
    mut visit: impl FnMut(&'a golden::Expected, f32, usize, usize),
) {
    for case in cases {
        let amax = matrix::amax(&case.input, case.mode.global, case.mode.amax_specials()).unwrap();
        for r in (0..case.input.rows()).step_by(height) {
            let amax = if case.mode.global == GlobalScale::PerRow { amax[r] } else { amax[0] };
            (0..case.input.cols().div_ceil(BLOCK)).for_each(|b| visit(case, amax, r, b));
        }
    }
}
