//! `P = softmax(Q·Kᵀ/√d + mask)`, `O = P·V`, for each head.
//!
//! Q, K and V come packed, [batch, sequence, (heads + 2·groups)·d]: all heads of Q, then of K, then
//! of V; a head of K and V serves heads/groups heads of Q. O is [batch, sequence, heads·d].
//!
//! What the plan quantizes is multiplied as what its codes stand for, with sums in binary32:
//!
//! | product | left | right | sums over |
//! |---|---|---|---|
//! | `Q·Kᵀ` | qkv | qkv | d |
//! | `P·V` | s | qkv | keys |
//! | `dV = Pᵀ·dO` | s | do | queries |
//! | `dP = dO·Vᵀ` | do | qkv | d |
//! | `dQ = dS·K` | dp | qkv | keys |
//! | `dK = dSᵀ·Q` | dp | qkv | queries |
//!
//! `dS = P ∘ (dP − Σ P∘dP)` is dP behind the softmax, which is what products read and what the slot
//! `dp` quantizes. Nothing is kept for the backward pass: candle's graph holds the input, from
//! which the same codes are made again.

use crate::heads::{Along, Heads};
use crate::{Error, Place, Result, Session, sums};
use candle_core::{D, Module, Tensor};
use nvfp4::{Generator, Side};
use nvfp4_recipe::{self as recipe, AttentionPrecision, AttentionSlot, ModulePath, Site};

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Mask {
    /// Its own and earlier ones.
    #[default]
    Causal,
    /// All.
    None,
}

/// Sizes and choices of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionConfig {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, which divide the heads of queries.
    pub groups: usize,
    /// Features of a head.
    pub head_size: usize,
    /// Which keys a query sees.
    pub mask: Mask,
}

/// Attention without the linear layers around it.
#[derive(Clone, Debug)]
pub struct DotProductAttention {
    session: Session,
    path: ModulePath,
    heads: Heads,
    mask: Mask,
}

impl DotProductAttention {
    /// Attention at a place.
    pub fn new(place: &Place, config: AttentionConfig) -> Result<Self> {
        let AttentionConfig { heads, groups, head_size, mask } = config;
        if groups == 0 || !heads.is_multiple_of(groups) {
            return Err(Error::Size {
                module: place.path().to_string(),
                expected: format!("groups that divide {heads} heads"),
                got: groups.to_string(),
                fix: "each head of keys and values serves the same number of heads of queries",
            });
        }
        place.declare(recipe::Module::attention(place.path()));
        let heads = Heads { queries: heads, groups, size: head_size };
        Ok(DotProductAttention { session: place.session().clone(), path: place.path().clone(), heads, mask })
    }

    fn run(&self, x: &Tensor) -> Result<Tensor> {
        self.heads.check(&self.path, x)?;
        if self.is_plain()? {
            let [q, k, v] = self.heads.split(x)?;
            let o = self.probabilities(&q, &k)?.matmul(&self.heads.repeated(&v)?)?;
            let o = self.heads.joined(&o)?;
            self.session.look(&self.path, "output", &o)?;
            return Ok(o);
        }
        let (before, packed) = (self.session.active_generator(), x.detach());
        let o = self.forward(&packed)?;
        let module = self.clone();
        let backward = move |d_o: &Tensor| Ok(vec![Some(module.backward(&packed, &before, d_o)?)]);
        self.session.attach(("attention", &self.path), &[x], o, 0, Box::new(backward))
    }

    /// What the forward pass computes.
    fn forward(&self, packed: &Tensor) -> Result<Tensor> {
        let [q, k, v] = self.operands(packed, Side::Row, [Along::Features, Along::Features, Along::Tokens])?;
        let p = self.probabilities(&q, &k)?;
        let s = self.decoded(AttentionSlot::S, Side::Row, &p, Along::Features)?;
        let o = self.heads.joined(&s.matmul(&self.heads.repeated(&v)?)?)?;
        self.handed(AttentionSlot::O, &o)
    }

    /// The same backwards, from the output to the operands.
    fn backward(&self, packed: &Tensor, before: &Generator, d_o: &Tensor) -> Result<Tensor> {
        use {Along::*, AttentionSlot::*};
        let d_o = self.heads.queries(d_o)?;
        let scale = 1.0 / (self.heads.size as f64).sqrt();
        // What the forward pass made, again.
        let again = || -> Result<_> {
            let [q, k, v] = self.operands(packed, Side::Column, [Features, Features, Features])?;
            let p = self.probabilities(&q, &k)?;
            let s = self.decoded(S, Side::Column, &p, Tokens)?;
            let [q_tokens, k_tokens, _] = self.operands(packed, Side::Column, [Tokens, Tokens, Features])?;
            Ok((p, s, q_tokens, k_tokens, v))
        };
        let (p, s, q, k, v) = self.session.again(before.clone(), again)?;

        let dv = s.t()?.matmul(&self.decoded(DO, Side::Row, &d_o, Tokens)?)?;
        let d_o = self.decoded(DO, Side::Row, &d_o, Features)?;
        let dp = d_o.matmul(&self.heads.repeated(&v)?.t()?)?;
        let ds = p.mul(&dp.broadcast_sub(&sums::sum(&p.mul(&dp)?, D::Minus1)?)?)?;
        let dq = self.decoded(DP, Side::Row, &ds, Features)?.matmul(&self.heads.repeated(&k)?)?;
        let dk = self.decoded(DP, Side::Row, &ds, Tokens)?.t()?.matmul(&q)?;
        let packed = self.heads.packed(&(dq * scale)?, &(dk * scale)?, &dv)?;
        self.handed(DQkv, &packed)
    }

    /// `softmax(Q·Kᵀ/√d + mask)`.
    fn probabilities(&self, q: &Tensor, k: &Tensor) -> Result<Tensor> {
        let scale = 1.0 / (self.heads.size as f64).sqrt();
        let scores = (q.matmul(&self.heads.repeated(k)?.t()?)? * scale)?;
        let scores = match self.mask {
            Mask::None => scores,
            Mask::Causal => scores.broadcast_add(&causal(&scores)?)?,
        };
        Ok(candle_nn::ops::softmax(&scores, D::Minus1)?)
    }

    fn site(&self, slot: AttentionSlot) -> Site {
        Site::new(&self.path, slot)
    }

    fn is_plain(&self) -> Result<bool> {
        let plan = self.session.planned()?;
        let mode = plan.attention(&self.path).ok_or_else(|| Error::OtherModel {
            recipe: plan.recipe().to_string(),
            model: self.path.to_string(),
            plan: "no such attention".to_string(),
        })?;
        let high = AttentionPrecision::HighPrecision;
        Ok(mode.forward == high && mode.backward.is_none_or(|backward| backward == high))
    }

    /// Q, K and V as products read them, each with a sum along an axis. They share a scale where
    /// there is one per tensor.
    fn operands(&self, packed: &Tensor, side: Side, along: [Along; 3]) -> Result<[Tensor; 3]> {
        let site = self.site(AttentionSlot::Qkv);
        if self.session.is_handed_over(&site)? {
            return self.heads.split(packed);
        }
        let plan = self.session.planned()?;
        let spec = plan.spec(&site).ok_or(Error::NoPlan)?;
        if !crate::heads::has_axes(&spec.format(side)) {
            let (batch, tokens, features) = packed.dims3()?;
            let matrix = self.session.decoded(&site, side, &packed.reshape((batch * tokens, features))?)?;
            return self.heads.split(&matrix.reshape((batch, tokens, features))?);
        }
        let [q, k, v] = self.heads.split(packed)?;
        Ok([
            self.decoded(AttentionSlot::Qkv, side, &q, along[0])?,
            self.decoded(AttentionSlot::Qkv, side, &k, along[1])?,
            self.decoded(AttentionSlot::Qkv, side, &v, along[2])?,
        ])
    }

    /// A tensor [batch, heads, tokens, features] as products read it whose sums run along an axis.
    fn decoded(&self, slot: AttentionSlot, side: Side, x: &Tensor, along: Along) -> Result<Tensor> {
        let site = self.site(slot);
        if self.session.is_handed_over(&site)? {
            return Ok(x.clone());
        }
        let turned = match along {
            Along::Features => x.clone(),
            Along::Tokens => x.t()?.contiguous()?,
        };
        let (batch, heads, rows, cols) = turned.dims4()?;
        let matrix = self.session.decoded(&site, side, &turned.reshape((batch * heads * rows, cols))?)?;
        let matrix = matrix.reshape((batch, heads, rows, cols))?;
        Ok(match along {
            Along::Features => matrix,
            Along::Tokens => matrix.t()?.contiguous()?,
        })
    }

    /// What attention hands on, [batch, tokens, features]: quantized, left for a consumer that
    /// takes codes, and decoded.
    fn handed(&self, slot: AttentionSlot, x: &Tensor) -> Result<Tensor> {
        let (batch, tokens, features) = x.dims3()?;
        let matrix = x.reshape((batch * tokens, features))?;
        Ok(self.session.hand_over(&self.site(slot), &matrix)?.reshape((batch, tokens, features))?)
    }
}

/// 0 where a query sees a key, −∞ where it does not.
fn causal(scores: &Tensor) -> Result<Tensor> {
    let (queries, keys) = (scores.dim(D::Minus2)?, scores.dim(D::Minus1)?);
    // The last query sees all keys.
    let last_seen = Tensor::arange((keys - queries) as u32, keys as u32, scores.device())?.unsqueeze(1)?;
    let hidden = Tensor::arange(0, keys as u32, scores.device())?.unsqueeze(0)?.broadcast_gt(&last_seen)?;
    let zeros = Tensor::zeros((queries, keys), scores.dtype(), scores.device())?;
    Ok(hidden.where_cond(&(&zeros + f64::NEG_INFINITY)?, &zeros)?)
}

impl Module for DotProductAttention {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.run(x)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Init;
    use candle_core::{DType, Device};
    use nvfp4_spec::gemm::bound;

    fn attention(dtype: DType, recipe: &str, groups: usize, mask: Mask) -> (DotProductAttention, crate::Parameter) {
        let session = Session::new(5);
        let place = session.place(dtype, &Device::Cpu);
        let x = place.parameter("x", (2, 24, (4 + 2 * groups) * 16), Init::Normal(1.0)).unwrap();
        let config = AttentionConfig { heads: 4, groups, head_size: 16, mask };
        let module = DotProductAttention::new(&place.child("m"), config).unwrap();
        session.apply(&recipe.parse().unwrap()).unwrap();
        (module, x)
    }

    fn numbers(x: &Tensor) -> Vec<f64> {
        x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    /// The node's own passes, where no tensor is quantized, against candle's graph of the plain
    /// formula, in binary64: both sum the same terms in another order, fewer than 1000 of them,
    /// none above the largest gradient times 1000.
    #[test]
    fn the_backward_pass_is_that_of_the_formula() {
        for (groups, mask) in [(4, Mask::Causal), (2, Mask::Causal), (1, Mask::None)] {
            let (module, x) = attention(DType::F64, "high_precision", groups, mask);
            let o = module.run(x.var.as_tensor()).unwrap();
            let weights = (&o * 1.7).unwrap().sin().unwrap().detach();
            let loss = o.mul(&weights).unwrap().sum_all().unwrap();
            let expected = numbers(loss.backward().unwrap().get(&x.var).unwrap());

            let packed = x.var.as_detached_tensor();
            assert!(numbers(&module.forward(&packed).unwrap()) == numbers(&o), "the same operations");
            let found = module.backward(&packed, &module.session.active_generator(), &weights).unwrap();
            let largest = expected.iter().fold(0f64, |m, x| m.max(x.abs()));
            for (found, expected) in numbers(&found).iter().zip(&expected) {
                assert!((found - expected).abs() < 1e6 * 2f64.powi(-53) * largest, "{found} for {expected}");
            }
        }
    }

    /// Both products of the forward pass against what their operands decode to, multiplied exactly,
    /// within the bound of sums in binary32; scores have the roundings of their scale beside it.
    #[test]
    fn products_of_codes_are_within_the_bound() {
        for recipe in ["current_scaling+attention", "delayed_scaling+attention", "mxfp8+attention"] {
            let (module, x) = attention(DType::F32, recipe, 2, Mask::None);
            let packed = x.var.as_detached_tensor();
            let along = [Along::Features, Along::Features, Along::Tokens];
            let [q, k, v] = module.operands(&packed, Side::Row, along).unwrap();
            let split = module.heads.split(&packed).unwrap();
            assert!(numbers(&q) != numbers(&split[0]), "{recipe}: quantized");
            let (k, v) = (module.heads.repeated(&k).unwrap(), module.heads.repeated(&v).unwrap());
            let p = module.probabilities(&q, &module.operands(&packed, Side::Row, along).unwrap()[1]).unwrap();
            let s = module.decoded(AttentionSlot::S, Side::Row, &p, Along::Features).unwrap();
            check(&q, &k.t().unwrap(), &q.matmul(&k.t().unwrap()).unwrap(), recipe);
            check(&s, &v, &s.matmul(&v).unwrap(), recipe);
        }
    }

    fn check(a: &Tensor, b: &Tensor, got: &Tensor, what: &str) {
        let wide = |x: &Tensor| x.to_dtype(DType::F64).unwrap().contiguous().unwrap();
        let (a, b) = (wide(a), wide(b));
        let exact = numbers(&a.matmul(&b).unwrap());
        let magnitudes = numbers(&a.abs().unwrap().matmul(&b.abs().unwrap()).unwrap());
        let k = a.dim(D::Minus1).unwrap();
        for ((got, exact), magnitude) in numbers(got).iter().zip(exact).zip(magnitudes) {
            assert!((got - exact).abs() <= bound(k, magnitude), "{what}: {got} for {exact}");
        }
    }

    /// MXFP8's blocks lie along the sum. Values that fall from token to token keep their digits in
    /// blocks along features, and lose them beside larger ones in blocks along tokens; a scale per
    /// tensor knows no axis.
    #[test]
    fn blocks_lie_along_the_sum() {
        for (recipe, same) in [("mxfp8+attention", false), ("current_scaling+attention", true)] {
            let (module, x) = attention(DType::F32, recipe, 2, Mask::None);
            let [_, _, v] = module.heads.split(&x.var.as_detached_tensor()).unwrap();
            let falling: Vec<f32> = (0..24).map(|token| 0.5f32.powi(token)).collect();
            let v = v.broadcast_mul(&Tensor::from_vec(falling, (24, 1), &Device::Cpu).unwrap()).unwrap();
            let decoded = |along| numbers(&module.decoded(AttentionSlot::Qkv, Side::Row, &v, along).unwrap());
            assert!((decoded(Along::Features) == decoded(Along::Tokens)) == same, "{recipe}");
        }
    }
}
