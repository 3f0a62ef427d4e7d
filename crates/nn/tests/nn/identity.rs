//! A recipe that quantizes nothing is candle, bit for bit, over several steps of an optimizer.

use crate::cases::*;
use candle_core::{D, DType, Module, Result, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use nvfp4_nn::AdamW;
use std::collections::BTreeMap;

/// The formulas once more, with nothing but candle.
struct Plain(BTreeMap<String, Var>);

impl Plain {
    fn get(&self, name: &str) -> &Tensor {
        self.0[name].as_tensor()
    }

    fn linear(&self, path: &str, x: &Tensor) -> Result<Tensor> {
        let bias = self.0.get(&format!("{path}.bias")).map(|bias| bias.as_tensor().clone());
        candle_nn::Linear::new(self.get(&format!("{path}.weight")).clone(), bias).forward(x)
    }

    fn norm(&self, path: &str, x: &Tensor) -> Result<Tensor> {
        let weight = self.get(&format!("{path}.layer_norm_weight"));
        match self.0.get(&format!("{path}.layer_norm_bias")) {
            Some(bias) => candle_nn::ops::layer_norm_slow(x, weight, bias, 1e-5),
            None => candle_nn::ops::rms_norm_slow(x, weight, 1e-5),
        }
    }

    fn mlp(&self, path: &str, x: &Tensor, activation: fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let h = self.linear(&format!("{path}.fc1"), &self.norm(path, x)?)?;
        self.linear(&format!("{path}.fc2"), &activation(&h)?)
    }

    fn attention(&self, x: &Tensor, heads: usize, groups: usize) -> Result<Tensor> {
        let (b, t, _) = x.dims3()?;
        let part = |from: usize, n: usize| {
            x.narrow(2, from * 16, n * 16)?.reshape((b, t, n, 16))?.transpose(1, 2)?.contiguous()
        };
        let each = |x: Tensor| match heads / groups {
            1 => Ok(x),
            n => x.unsqueeze(2)?.expand((b, groups, n, t, 16))?.reshape((b, heads, t, 16)),
        };
        let (q, k, v) = (part(0, heads)?, each(part(heads, groups)?)?, each(part(heads + groups, groups)?)?);
        let mask: Vec<f32> = (0..t * t).map(|i| if i % t <= i / t { 0.0 } else { f32::NEG_INFINITY }).collect();
        let mask = Tensor::from_vec(mask, (t, t), x.device())?;
        let scores = (q.matmul(&k.t()?)? * 0.25)?.broadcast_add(&mask)?;
        let o = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
        o.transpose(1, 2)?.reshape((b, t, heads * 16))
    }

    fn multihead(&self, path: &str, x: &Tensor, groups: usize) -> Result<Tensor> {
        let qkv = format!("{path}.linear_qkv");
        let x = match self.0.contains_key(&format!("{qkv}.layer_norm_weight")) {
            true => self.norm(&qkv, x)?,
            false => x.clone(),
        };
        let o = self.attention(&self.linear(&qkv, &x)?, 4, groups)?;
        self.linear(&format!("{path}.proj"), &o)
    }

    fn layer(&self, x: &Tensor, groups: usize, activation: fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let h = x.add(&self.multihead("m.self_attention", x, groups)?)?;
        h.add(&self.mlp("m.layernorm_mlp", &h, activation)?)
    }

    fn forward(&self, kind: &str) -> Result<Tensor> {
        let x = self.get("x");
        match kind {
            "linear" | "linear without bias" => self.linear("m", x),
            "layer norm linear" | "rms norm linear" => self.linear("m", &self.norm("m", x)?),
            "gelu mlp" => self.mlp("m", x, |h| h.gelu()),
            "swiglu mlp" => self.mlp("m", x, candle_nn::ops::swiglu),
            "grouped linear" => {
                let starts = SPLITS.iter().scan(0, |sum, n| Some(std::mem::replace(sum, *sum + n)));
                let groups = starts.zip(SPLITS).enumerate().filter(|(_, (_, n))| *n > 0);
                let rows = groups.map(|(e, (from, n))| self.linear(&format!("m.{e}"), &x.narrow(0, from, n)?));
                Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)
            }
            "attention" => self.attention(x, 4, 4),
            "grouped-query attention" => self.attention(x, 4, 2),
            "multihead attention" | "multihead attention with norm" => self.multihead("m", x, 4),
            "gpt layer" => self.layer(x, 4, |h| h.gelu()),
            "llama layer" => self.layer(x, 2, candle_nn::ops::swiglu),
            other => panic!("no such module: {other}"),
        }
    }
}

/// test_identity_recipe_matches_bf16_bitwise, test_identity_matches_bf16_multistep_training_bitwise,
/// test_identity_bias_path_matches_bf16_bitwise, test_whole_layer_hp_matches_bf16_bitwise.
#[test]
fn every_module_trains_as_candle_does() {
    for kind in KINDS {
        let case = Case::with(kind, &recipe("high_precision"), 21);
        // Copies, with an optimizer of candle's.
        let copies = case.session.parameters().into_iter().map(|(name, var)| {
            let copy = Var::from_tensor(&var.as_detached_tensor().copy().unwrap()).unwrap();
            (name, copy)
        });
        let plain = Plain(copies.collect());
        let config = ParamsAdamW { lr: 0.01, ..Default::default() };
        let mut ours = AdamW::new(case.session.parameters(), config.clone()).unwrap();
        let mut theirs = candle_nn::AdamW::new(plain.0.values().cloned().collect(), config).unwrap();
        for step in 0..3 {
            let (y, loss) = case.loss();
            case.session.backward(&loss).unwrap();
            ours.step(&case.session.gradients().unwrap()).unwrap();
            case.session.next_step().unwrap();

            let expected = plain.forward(kind).unwrap();
            let loss = expected.mul(&weights_like(&expected)).unwrap().sum_all().unwrap();
            theirs.step(&loss.backward().unwrap()).unwrap();
            assert!(bits(&y) == bits(&expected), "{kind}, step {step}");
            for (name, var) in case.session.parameters() {
                assert!(bits(&var) == bits(&plain.0[&name]), "{kind}, step {step}: {name}");
            }
        }
    }
}

/// TestIdentityLinear: a split spec whose directions are both high precision is the same.
#[test]
fn splits_without_codes_change_nothing() {
    for spec in ["high-precision / high-precision", "high-precision / high-precision from row"] {
        for kind in ["linear", "layer norm linear", "gelu mlp", "grouped linear"] {
            let plain = Case::with(kind, &recipe("high_precision"), 5).run();
            let split = Case::with(kind, &operands(spec, spec, "high-precision"), 5).run();
            assert!(plain == split, "{kind}, {spec}");
        }
    }
}

/// Operands in bf16, sums in binary32: what "training in bf16" is on a machine without bf16 products.
#[test]
fn bf16_operands_are_rounded_once() {
    let case = Case::with("linear without bias", &all("high-precision(bf16)"), 6);
    let round = |x: &Tensor| x.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
    let (y, loss) = case.loss();
    case.session.backward(&loss).unwrap();
    let found = case.session.gradients().unwrap();
    let w = case.session.parameters()["m.weight"].as_detached_tensor();
    let (x, w) = (round(&case.x.var.detach().reshape((BATCH * TOKENS, HIDDEN)).unwrap()), round(&w));
    let dy = round(&weights_like(&y).reshape((BATCH * TOKENS, 48)).unwrap());
    assert!(bits(&y) == bits(&x.matmul(&w.t().unwrap()).unwrap()));
    assert!(bits(found.get(&case.x.var).unwrap()) == bits(&dy.matmul(&w).unwrap()));
    let dw = x.t().unwrap().matmul(&dy).unwrap().t().unwrap();
    assert!(bits(found.get(&case.session.parameters()["m.weight"]).unwrap()) == bits(&dw));
}
