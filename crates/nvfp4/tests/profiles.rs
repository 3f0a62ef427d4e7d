//! The profiles against files that the real libraries wrote (`testdata/profiles`), and against bytes worked out by hand.

use half::{bf16, f16};
use nvfp4::*;
use nvfp4_spec::{e2m1, e4m3};
use safetensors::{Dtype, SafeTensors};
use std::path::Path;

/// Quantizes the `input` of a case; the input's type matters to one profile.
fn quantize(profile: Profile, rule: ScaleRule, file: &SafeTensors<'_>) -> QuantTensor {
    let quantizer = Quantizer::builder().profile(profile).scale_rule(rule).build().unwrap();
    let (x, input) = (inputs(file), file.tensor("input").unwrap());
    let tensor = |values: Values| quantizer.quantize(&TensorRef::new(values, input.shape()).unwrap()).unwrap();
    match input.dtype() {
        Dtype::F32 => tensor(Values::F32(&x)),
        Dtype::BF16 => tensor(Values::Bf16(&x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>())),
        Dtype::F16 => tensor(Values::F16(&x.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>())),
        other => panic!("an input of type {other:?}"),
    }
}

/// The `input` of a case in binary32.
fn inputs(file: &SafeTensors<'_>) -> Vec<f32> {
    let input = file.tensor("input").unwrap();
    let halves = || input.data().as_chunks::<2>().0.iter().map(|&b| u16::from_le_bytes(b));
    match input.dtype() {
        Dtype::BF16 => halves().map(|h| bf16::from_bits(h).to_f32()).collect(),
        Dtype::F16 => halves().map(|h| f16::from_bits(h).to_f32()).collect(),
        _ => input.data().as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
    }
}

/// An element on its way to a code.
fn scaled(profile: Profile, x: f32, scale: u8, stored: f32) -> f32 {
    match profile {
        Profile::LlmCompressor => x / (e4m3::decode(scale) / stored),
        Profile::TorchAo => x * (1.0 / stored / e4m3::decode(scale)),
        Profile::ModelOpt | Profile::TransformerEngine => unreachable!("these say what NaN becomes"),
    }
}

#[test]
fn every_case_has_the_bytes_that_its_producer_wrote() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/profiles");
    let mut cases = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let Some(case) = name.strip_suffix(".safetensors") else { continue };
        let (profile, rule) = match case.split("__").next().unwrap() {
            "modelopt" => (Profile::ModelOpt, ScaleRule::Six),
            "modelopt_mse" => (Profile::ModelOpt, ScaleRule::ModelOptMse),
            "modelopt_4over6" => (Profile::ModelOpt, ScaleRule::ModelOptFourOverSix),
            "llm_compressor" => (Profile::LlmCompressor, ScaleRule::Six),
            "torchao" => (Profile::TorchAo, ScaleRule::Six),
            other => panic!("unknown profile {other}"),
        };
        let bytes = std::fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let q = quantize(profile, rule, &file);
        let row = q.nvfp4(Side::Row).unwrap();
        let recorded = |tensor: &str| file.tensor(tensor).unwrap().data().to_vec();
        assert_eq!(row.scales(), recorded("scales"), "{case}: scales");
        let global = f32::from_le_bytes(recorded("global").try_into().unwrap());
        let stored = row.stored()[0];
        assert!(
            stored.to_bits() == global.to_bits() || stored.is_nan() && global.is_nan(),
            "{case}: {stored} {global}"
        );
        let decoded = inputs(&file);
        let expected = recorded("codes");
        for (i, &x) in decoded.iter().enumerate() {
            let code = |bytes: &[u8]| e2m1::code_at(bytes, i);
            // Two producers have no rule for an element that is NaN after scaling.
            if profile == Profile::ModelOpt || !scaled(profile, x, row.scales()[i / 16], stored).is_nan() {
                assert_eq!(code(row.codes()), code(&expected), "{case}: code {i}, of {x:e}");
            }
        }
        cases += 1;
    }
    assert_eq!(cases, 173);
}

/// Midpoints of the grid, in units of scale × global scale.
#[test]
fn the_worked_example_has_the_published_bytes() {
    let grid = [6.0f32, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0];
    // A second block holds the tensor's amax, so that the first one's scale is exactly 1 and g is a power of two.
    for g in [1.0, 0.25] {
        let x: Vec<f32> = grid.iter().copied().chain([2688.0; 16]).map(|x| x * g).collect();
        for profile in [Profile::ModelOpt, Profile::LlmCompressor, Profile::TorchAo, Profile::TransformerEngine] {
            let quantizer = Quantizer::builder().profile(profile).build().unwrap();
            let q = quantizer.quantize(&TensorRef::new(&x[..], &[1, 32]).unwrap()).unwrap();
            let row = q.nvfp4(Side::Row).unwrap();
            assert_eq!(row.codes()[..8], [0x67, 0x46, 0x24, 0x02, 0xA8, 0xCA, 0xEC, 0xFE], "{profile:?}");
            assert_eq!(row.scales()[..], [0x38, 0x7E]);
            let expected = match profile {
                Profile::TransformerEngine => 2688.0 * g,
                Profile::ModelOpt | Profile::TorchAo => g,
                Profile::LlmCompressor => 1.0 / g,
            };
            assert_eq!((row.global(), row.stored()), (GlobalScale::PerTensor, &[expected][..]));
        }
    }
}

#[test]
fn a_tensor_of_zeros_is_finite_and_decodes_to_zeros_in_every_profile() {
    let scales = [
        (Profile::TransformerEngine, 0x00, 0.0),
        (Profile::ModelOpt, 0x38, 1.0),
        (Profile::LlmCompressor, 0x20, 1.0),
        (Profile::TorchAo, 0x08, 1.0),
    ];
    for (profile, scale, global) in scales {
        let quantizer = Quantizer::builder().profile(profile).build().unwrap();
        let q = quantizer.quantize(&TensorRef::new(&[0f32; 32][..], &[2, 16]).unwrap()).unwrap();
        let row = q.nvfp4(Side::Row).unwrap();
        assert_eq!((row.scales(), row.stored()), (&[scale; 2][..], &[global][..]), "{profile:?}");
        assert_eq!(q.dequantize::<f32>(Side::Row).unwrap(), [0.0; 32]);
    }
}
