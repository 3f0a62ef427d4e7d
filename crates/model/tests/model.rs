//! Small generated models, without Python: what is refused, what is continued, what is the same by two ways.

mod generated;

use generated::*;
use nvfp4_checkpoint::{Acts, Checkpoint, Moments, Round, ScaleChoice, Settings, convert};
use nvfp4_model::{
    Activations, Divergence, Generation, Hessians, Lane, Rows, Run, Sampling, Source, StateFile, amaxes, calibrate,
    calibrate_with, generate, perplexity,
};
use serde_json::{Value, json};
use std::sync::atomic::AtomicBool;

#[test]
fn a_model_is_no_further_from_itself_than_nothing() {
    let dir = Folder::new("same");
    let here = dir.join("in");
    model(&here, &config(), usual);
    let found = evaluate(Some(&here), &here, Activations::AsStored).unwrap();
    let [(Lane::Reference, a), (Lane::Served, b)] = &found.said[..] else { panic!("two runs") };
    let divergence = Divergence::of(a, b);
    assert!(divergence.mean.mean < 1e-12 && found.drift.iter().all(|d| d.relative_error() == 0.0));
    assert_eq!(a.len(), 23 + 23 + 8);
}

/// What is summed panel by panel is what whole distributions give.
#[test]
fn perplexity_and_divergence_are_those_of_whole_distributions() {
    let dir = Folder::new("whole");
    let (here, packed) = (dir.join("in"), dir.join("packed"));
    model(&here, &config(), usual);
    converted(&here, &packed, &Settings::default());
    let found = evaluate(Some(&here), &packed, Activations::AsStored).unwrap();
    let (p, q, rows) = (all_logits(&here), all_logits(&packed), rows());
    let log = |z: &[f32]| -> Vec<f64> {
        let sum: f64 = z.iter().map(|&z| f64::from(z).exp()).sum();
        z.iter().map(|&z| f64::from(z) - sum.ln()).collect()
    };
    let (mut loss, mut divergence) = (0.0, 0.0);
    let at = nvfp4_model::positions(&rows, 0);
    for &i in &at {
        let (p, q) = (log(&p[i * WORDS..(i + 1) * WORDS]), log(&q[i * WORDS..(i + 1) * WORDS]));
        loss -= q[rows.tokens()[i + 1] as usize];
        divergence += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
    }
    let count = at.len() as f64;
    let (own, own_kl) =
        (perplexity(&found.said[1].1).mean, Divergence::of(&found.said[0].1, &found.said[1].1).mean.mean);
    assert!((own / (loss / count).exp() - 1.0).abs() < 1e-6, "{own}");
    assert!((own_kl / (divergence / count) - 1.0).abs() < 1e-5, "{own_kl} {}", divergence / count);
    assert!(own_kl > 1e-5 && found.drift[2].relative_error() > 0.01);
}

#[test]
fn calibrated_scales_make_a_model_with_activations_in_4_bits() {
    let dir = Folder::new("acts");
    let (here, packed, stats) = (dir.join("in"), dir.join("packed"), dir.join("stats.safetensors"));
    model(&here, &config(), usual);
    let checkpoint = Checkpoint::open(&here).unwrap();
    let source = Source::new(&checkpoint, None).unwrap();
    calibrate(&source, &rows(), &mut (), &GO).unwrap().save(&stats, &source, 99.9).unwrap();
    let amaxes = amaxes(&stats).unwrap();
    assert_eq!(amaxes.len(), 21);
    let same =
        |a: &str, b: &str| assert_eq!(amaxes[&format!("model.layers.1.{a}")], amaxes[&format!("model.layers.1.{b}")]);
    same("self_attn.q_proj", "self_attn.v_proj");
    same("mlp.gate_proj", "mlp.up_proj");
    let settings = Settings { acts: Acts::Amaxes(amaxes), ..Settings::default() };
    converted(&here, &packed, &settings);
    let found = evaluate(Some(&here), &packed, Activations::AsStored).unwrap();
    let lanes: Vec<Lane> = found.said.iter().map(|(lane, _)| *lane).collect();
    assert_eq!(lanes, [Lane::Reference, Lane::Weights, Lane::Served]);
    let cost = |i: usize| Divergence::of(&found.said[0].1, &found.said[i].1).mean.mean;
    assert!(cost(2) > cost(1), "activations in 4 bits cost something: {} {}", cost(2), cost(1));
    assert_eq!(found.blocks.len(), 21);
    let per_row = evaluate(Some(&here), &packed, Activations::PerRow).unwrap();
    assert!(per_row.blocks.is_empty() && per_row.said.len() == 3);
}

/// A text of one token goes to two of four experts. The others get the scales that those have.
#[test]
fn experts_that_saw_no_token_take_the_amax_of_their_layer() {
    let dir = Folder::new("unseen");
    model(&dir.join("in"), &moe_config(32), usual);
    let checkpoint = Checkpoint::open(&dir.join("in")).unwrap();
    let source = Source::new(&checkpoint, None).unwrap();
    let found = calibrate(&source, &Rows::new([&[5][..]]), &mut (), &GO).unwrap();
    assert_eq!(found.unseen().values().collect::<Vec<_>>(), [&2, &2, &2]);
    let amaxes = found.amaxes(&source);
    for layer in 0..3 {
        for part in ["gate_proj", "up_proj", "down_proj"] {
            let own = |expert: usize| amaxes[&format!("model.layers.{layer}.mlp.experts.{expert}.{part}")];
            assert!(own(0) > 0.0 && (1..4).all(|expert| own(expert) == own(0)));
        }
    }
    converted(&dir.join("in"), &dir.join("packed"), &Settings { acts: Acts::Amaxes(amaxes), ..Settings::default() });
}

/// One pass writes the products of columns with each other, once for modules with the same input, and
/// conversions read them.
#[test]
fn calibration_keeps_products_of_inputs() {
    let dir = Folder::new("products");
    let (here, there) = (dir.join("in"), dir.join("stats"));
    std::fs::create_dir(&there).unwrap();
    model(&here, &config(), usual);
    let checkpoint = Checkpoint::open(&here).unwrap();
    let source = Source::new(&checkpoint, None).unwrap();
    let stats = |hessians: Hessians, name: &str| {
        let path = there.join(name);
        let found = calibrate_with(&source, &rows(), hessians, &path, &mut (), &GO).unwrap();
        found.save(&path, &source, 99.9).unwrap();
        drop(found);
        path
    };
    let (none, local) = (stats(Hessians::None, "none.safetensors"), stats(Hessians::Local, "local.safetensors"));
    let full = stats(Hessians::Full(64), "full.safetensors");
    assert_eq!(std::fs::read_dir(&there).unwrap().count(), 3, "nothing else is left");
    let [none, blocks, whole] = [&none, &local, &full].map(|path| Moments::open(path).unwrap());
    assert!(!none.has_any(Moments::HESSIAN) && !none.has_any(Moments::BLOCK_HESSIANS));
    let (q, v, down) =
        ("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "model.layers.2.mlp.down_proj");
    assert_eq!((whole.owner(v), whole.owner(q)), (q, q));
    // 96 columns are more than 64.
    assert!(whole.has(v, Moments::HESSIAN) && !whole.has(down, Moments::HESSIAN));
    assert_eq!(whole.block_hessians(down, 96).unwrap(), blocks.block_hessians(down, 96).unwrap());
    let (all, squares) = (whole.hessian(v, HIDDEN).unwrap(), none.mean_squares(v, HIDDEN).unwrap());
    let near = |a: f32, b: f32| (a - b).abs() <= 1e-5 * squares.iter().fold(0.0, |most: f32, x| most.max(*x));
    let own = blocks.block_hessians(q, HIDDEN).unwrap();
    for i in 0..HIDDEN {
        assert!(near(all[i * HIDDEN + i], squares[i]), "{i}");
        for j in 0..HIDDEN {
            assert_eq!(all[i * HIDDEN + j], all[j * HIDDEN + i]);
            assert!(i / 16 != j / 16 || near(all[i * HIDDEN + j], own[i * 16 + j % 16]), "{i} {j}");
        }
    }
    let round = Round::Gptq { order: nvfp4_spec::gptq::Order::Activation, damping: 0.01 };
    let settings =
        Settings { scale: ScaleChoice::LocalHessian, round, statistics: Some(full.clone()), ..Settings::default() };
    let summary = convert(&here, &there.join("gptq"), &settings, &(), &GO).unwrap();
    assert_eq!(summary.plain.len(), 3);
    let found = evaluate(Some(&here), &there.join("gptq"), Activations::AsStored).unwrap();
    assert!(Divergence::of(&found.said[0].1, &found.said[1].1).mean.mean < 0.05);
}

#[test]
fn an_evaluation_that_was_stopped_continues_to_the_same_numbers() {
    let dir = Folder::new("stop");
    let (here, stop) = (dir.join("in"), AtomicBool::new(false));
    model(&here, &config(), usual);
    let (path, whole) = (here.join("state"), evaluate(None, &here, Activations::AsStored).unwrap());
    let state = StateFile::new(&path, "this".to_string());
    let stopped = run(None, &here, Activations::AsStored, Some(&state), &mut StopAfter(&stop, "layer 2"), &stop);
    assert!(matches!(stopped.unwrap_err(), nvfp4_model::Error::Interrupted));
    assert!(path.exists());
    let other = StateFile::new(&path, "that".to_string());
    let refused = run(None, &here, Activations::AsStored, Some(&other), &mut (), &GO).unwrap_err();
    assert!(refused.to_string().contains("other models"), "{refused}");
    let continued = run(None, &here, Activations::AsStored, Some(&state), &mut (), &GO).unwrap();
    assert_eq!(continued.said, whole.said);
    assert!(!path.exists(), "it is removed when all is done");
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let dir = Folder::new("refused");
    let here = dir.join("in");
    let error = |config: &Value, value: &dyn Fn(&str, usize) -> f32| {
        model(&here, config, value);
        evaluate(None, &here, Activations::AsStored).unwrap_err().to_string()
    };
    let with = |name: &str, value: Value| with(config(), name, value);
    let nan = |name: &str, i: usize| {
        if name == "model.layers.1.mlp.up_proj" && i == 70 { f32::NAN } else { usual(name, i) }
    };
    for (said, wanted) in [
        (error(&with("model_type", json!("mamba")), &usual), "'mamba' is not run"),
        (error(&with("num_attention_heads", json!(8)), &usual), "'model.layers.0.self_attn.k_proj' is 32 × 64"),
        (error(&with("hidden_size", json!(32)), &usual), "they are not of one model"),
        (error(&with("vocab_size", json!(200)), &usual), "they are not of one model"),
        (error(&with("rope_scaling", json!({ "type": "ntk" })), &usual), "'ntk' is not run"),
        (error(&config(), &nan), "'model.layers.1.mlp' gives NaN"),
    ] {
        assert!(said.contains(wanted), "{said}");
    }
}

/// A token at a time, with keys and values kept, gives what the whole context gives.
#[test]
fn generation_continues_with_the_most_likely_token_of_the_whole_context() {
    let dir = Folder::new("generate");
    let here = dir.join("in");
    model(&here, &config(), usual);
    let checkpoint = Checkpoint::open(&here).unwrap();
    let source = Source::new(&checkpoint, None).unwrap();
    let greedy = greedy_tokens_are_the_most_likely(&source);
    let random = |seed| {
        let sampling = Sampling::Random { temperature: 1.0, top_p: 0.9, seed };
        generate(&source, &Generation { sampling, ..greedy }, &Run::AS_STORED, &GO, |_| Ok(())).unwrap()
    };
    assert_eq!(random(1), random(1));
    assert_ne!(random(1), random(2));
}
