//! Layers with activations in 4 bits give what the rule gives, to the bit, for stored scales of any value.

mod generated;

use generated::*;
use nvfp4_checkpoint::{Acts, Settings, Target};
use nvfp4_model::{Activations, KeysValues, Matrix, Run, Source, input_scale, open};
use nvfp4_spec::scale::Unit;
use nvfp4_spec::{BLOCK, e2m1, e4m3};

/// Code values times block scales of packed rows, which binary64 holds exactly.
fn decoded(codes: &[u8], scales: &[u8]) -> Vec<f64> {
    let code = |code: u8| f64::from(e2m1::decode(code));
    let values = codes.iter().flat_map(|&byte| e2m1::unpack(byte)).map(code);
    values.enumerate().map(|(i, x)| x * f64::from(e4m3::decode(scales[i / BLOCK]))).collect()
}

#[test]
fn every_layer_gives_the_bits_of_the_rule_for_scales_that_are_no_amax_over_2688() {
    let dir = Folder::new("four");
    model(&dir.join("in"), &moe_config(32), usual);
    for target in [Target::ModelOpt, Target::CompressedTensors] {
        // The first two saturate or lose blocks; none is what an amax over 2688 rounds to.
        for (i, scale) in [1e-5, 3.7, 0.001_234_568_f32].into_iter().enumerate() {
            let made = dir.join(&format!("{target}-{i}"));
            let settings = Settings { target, acts: Acts::Constant(scale), ..Settings::default() };
            converted(&dir.join("in"), &made, &settings);
            let (checkpoint, seen) = (open(&made).unwrap(), Seen::default());
            let run = Run { activations: Activations::AsStored, keys_values: KeysValues::AsStored, watch: &seen };
            logits_of(&checkpoint, &run).unwrap();
            let (source, seen) = (Source::new(&checkpoint, None).unwrap(), seen.0.into_inner().unwrap());
            assert_eq!(seen.len(), 3 * (4 + 4 * 3));
            for (module, (x, y)) in seen {
                let weight = source.weight(&module).unwrap();
                let matrix = Matrix::read(weight, 0..weight.rows).unwrap();
                let parts = matrix.codes().unwrap().nvfp4().unwrap();
                let (g, stored) = (input_scale(weight).unwrap().unwrap(), parts.stored()[0]);
                let factor = g * if parts.unit() == Unit::Divisor { 1.0 / stored } else { stored };
                let (x, w) = (rounded(&x, g), decoded(parts.codes(), parts.scales()));
                let expected = x.chunks_exact(weight.cols).flat_map(|x| {
                    w.chunks_exact(weight.cols).map(move |w| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>() as f32)
                });
                assert!(expected.map(|sum| factor * sum).eq(y), "{module}");
            }
        }
    }
}
