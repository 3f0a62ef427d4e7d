//! What follows attention: a gated MLP, or a choice of several.

use crate::Result;
use crate::config::{Activation, Config, Experts, Family, FeedForward, Routing};
use crate::linear::{Linear, Run};
use crate::projection::{Projection, Weights};
use crate::source::Source;
use rayon::prelude::*;
use std::sync::Arc;

/// Rows that go through an MLP at a time: wide states are not kept for all of them.
pub const ROWS: usize = 1024;

/// Where gates and ups come from.
enum Inputs {
    Apart(Linear, Linear),
    /// In one matrix: gates, then ups.
    Halves(Linear),
    /// In one matrix, in turn, as GPT-OSS has them.
    InTurn(Linear),
}

/// A gated MLP.
pub struct Gated {
    inputs: Inputs,
    down: Linear,
    activation: Activation,
}

impl Gated {
    fn read(source: &Source<'_>, module: &str, width: usize) -> Result<Self> {
        let (name, hidden) = (|part: &str| format!("{module}.{part}"), source.config().hidden);
        let inputs = if source.find(&name("gate_up_proj")).is_some() {
            Inputs::Halves(source.linear(&name("gate_up_proj"), 2 * width, hidden)?)
        } else {
            let (gate, up) = if source.find(&name("w1")).is_some() { ("w1", "w3") } else { ("gate_proj", "up_proj") };
            Inputs::Apart(source.linear(&name(gate), width, hidden)?, source.linear(&name(up), width, hidden)?)
        };
        let down = if source.find(&name("w2")).is_some() { "w2" } else { "down_proj" };
        let down = source.linear(&name(down), hidden, width)?;
        Ok(Gated { inputs, down, activation: source.config().activation })
    }

    /// GPT-OSS's expert, which is a part of the tensors of all.
    fn read_stacked(source: &Source<'_>, module: &str, expert: usize, width: usize) -> Result<Self> {
        let hidden = source.config().hidden;
        let inputs = source.stacked(&format!("{module}.gate_up_proj"), expert, 2 * width, hidden)?;
        let down = source.stacked(&format!("{module}.down_proj"), expert, hidden, width)?;
        Ok(Gated { inputs: Inputs::InTurn(inputs), down, activation: source.config().activation })
    }

    /// Outputs for normed states.
    pub fn apply(&self, x: &[f32], run: &Run<'_>) -> Result<Vec<f32>> {
        let (mut gates, ups) = match &self.inputs {
            Inputs::Apart(gate, up) => (gate.apply(x, run)?, up.apply(x, run)?),
            Inputs::Halves(both) => {
                let (joined, width) = (both.apply(x, run)?, both.outputs());
                let part = |from: usize| -> Vec<f32> {
                    joined.chunks_exact(width).flat_map(|row| &row[from..from + width / 2]).copied().collect()
                };
                (part(0), part(width / 2))
            }
            Inputs::InTurn(both) => both.apply(x, run)?.as_chunks::<2>().0.iter().map(|&[gate, up]| (gate, up)).unzip(),
        };
        gates.par_iter_mut().zip(&ups).for_each(|(gate, &up)| *gate = gated(self.activation, *gate, up));
        self.down.apply(&gates, run)
    }
}

/// A gate and what it lets through.
fn gated(activation: Activation, gate: f32, up: f32) -> f32 {
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::Silu => gate * sigmoid(gate) * up,
        Activation::GeluTanh => {
            let inner = std::f32::consts::FRAC_2_SQRT_PI
                * std::f32::consts::FRAC_1_SQRT_2
                * (gate + 0.044715 * gate * gate * gate);
            0.5 * gate * (1.0 + inner.tanh()) * up
        }
        Activation::Gelu => {
            (0.5 * f64::from(gate) * (1.0 + erf(f64::from(gate) * std::f64::consts::FRAC_1_SQRT_2))) as f32 * up
        }
        Activation::Clamped { limit } => {
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            (up + 1.0) * gate * sigmoid(1.702 * gate)
        }
    }
}

/// The error function, by its series for small arguments and its continued fraction for large ones.
fn erf(x: f64) -> f64 {
    let a = x.abs();
    let value = if a < 2.5 {
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term.abs() > 1e-17 * sum.abs() && n < 200.0 {
            n += 1.0;
            term *= -a * a / n;
            sum += term / (2.0 * n + 1.0);
        }
        std::f64::consts::FRAC_2_SQRT_PI * sum
    } else {
        let fraction = (1..60).rev().fold(0.0, |below, n| f64::from(n) / 2.0 / (a + below));
        1.0 - (-a * a).exp() / (std::f64::consts::PI.sqrt() * (a + fraction))
    };
    value.copysign(x)
}

/// What follows attention in a layer.
pub enum Mlp {
    /// One for all tokens.
    Dense(Box<Gated>),
    /// Several, which are read when they are needed.
    Experts(Router),
}

/// What decides which experts a token goes to.
pub struct Router {
    module: String,
    weights: Weights,
    bias: Option<Vec<f32>>,
    experts: Experts,
    layout: Layout,
}

/// How experts are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    Apart,
    Stacked,
}

impl Mlp {
    /// Reads what follows attention in a layer; of experts, the router.
    pub fn read(source: &Source<'_>, layer: usize) -> Result<Self> {
        let config: &Config = source.config();
        let name = |part: &str| source.name(&format!("layers.{layer}.{part}"));
        let experts = match config.feed_forward[layer] {
            FeedForward::Dense(width) => return Ok(Mlp::Dense(Box::new(Gated::read(source, &name("mlp"), width)?))),
            FeedForward::Experts(experts) => experts,
        };
        let old = name("block_sparse_moe");
        let parent = if source.find(&format!("{old}.gate")).is_some() { old } else { name("mlp") };
        let router =
            if config.family == Family::GptOss { format!("{parent}.router") } else { format!("{parent}.gate") };
        let weight = source.weight(&router)?;
        if (weight.rows, weight.cols) != (experts.count, config.hidden) {
            let (rows, cols, count, hidden) = (weight.rows, weight.cols, experts.count, config.hidden);
            return Err(crate::refused(format!(
                "'{router}' is {rows} × {cols}; config.json asks for {count} × {hidden}"
            )));
        }
        let weights = Weights(Arc::new(source.matrix(weight, 0..weight.rows)?));
        let bias = format!("{router}.bias");
        let bias = source.vector(&bias)?.map(|_| source.need_vector(&bias, experts.count)).transpose()?;
        let module = format!("{parent}.experts");
        let layout = if config.family == Family::GptOss { Layout::Stacked } else { Layout::Apart };
        Ok(Mlp::Experts(Router { module, weights, bias, experts, layout }))
    }
}

impl Router {
    /// The tokens of each expert, with their weights.
    fn route(&self, x: &[f32], rows: usize, run: &Run<'_>) -> Result<Vec<Vec<(usize, f32)>>> {
        let Experts { count, chosen, routing, .. } = self.experts;
        let mut logits = self.weights.apply(x, rows)?;
        if let Some(bias) = &self.bias {
            logits.chunks_exact_mut(count).for_each(|row| row.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
        }
        let mut routed = vec![Vec::new(); count];
        for (token, logits) in logits.chunks_exact(count).enumerate() {
            let mut order: Vec<usize> = (0..count).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            let most = logits[order[0]];
            let shares: Vec<f64> = order.iter().map(|&e| f64::from(logits[e] - most).exp()).collect();
            let taken = if routing == Routing::Normalized { chosen } else { count };
            let sum: f64 = shares[..taken].iter().sum();
            for (&expert, share) in order.iter().zip(&shares).take(chosen) {
                routed[expert].push((token, (share / sum) as f32));
            }
        }
        let counts: Vec<u64> = routed.iter().map(|tokens| tokens.len() as u64).collect();
        run.watch.routed(&self.module, &counts);
        Ok(routed)
    }

    /// Outputs for normed states, in one way to run it or several: experts are read once for all.
    pub fn apply(&self, source: &Source<'_>, inputs: &[Vec<f32>], runs: &[Run<'_>]) -> Result<Vec<Vec<f32>>> {
        let hidden = source.config().hidden;
        let routed = inputs.iter().zip(runs).map(|(x, run)| self.route(x, x.len() / hidden, run));
        let routed = routed.collect::<Result<Vec<_>>>()?;
        let mut out: Vec<Vec<f32>> = inputs.iter().map(|x| vec![0.0; x.len()]).collect();
        for expert in 0..self.experts.count {
            if routed.iter().all(|routed| routed[expert].is_empty()) {
                continue;
            }
            let mlp = match self.layout {
                Layout::Stacked => Gated::read_stacked(source, &self.module, expert, self.experts.width)?,
                Layout::Apart => Gated::read(source, &format!("{}.{expert}", self.module), self.experts.width)?,
            };
            for (((x, run), routed), out) in inputs.iter().zip(runs).zip(&routed).zip(&mut out) {
                for tokens in routed[expert].chunks(ROWS) {
                    let x: Vec<f32> =
                        tokens.iter().flat_map(|(t, _)| &x[t * hidden..(t + 1) * hidden]).copied().collect();
                    let mixed = mlp.apply(&x, run)?;
                    for ((t, share), row) in tokens.iter().zip(mixed.chunks_exact(hidden)) {
                        out[t * hidden..(t + 1) * hidden].iter_mut().zip(row).for_each(|(y, x)| *y += share * x);
                    }
                }
            }
        }
        Ok(out)
    }
}
