//! Text, a token at a time, with the keys and values of earlier ones.

use crate::attention::Cache;
use crate::decoder::{Decoder, Layer, go_on};
use crate::linear::Run;
use crate::projection::{Projection, Weights};
use crate::source::Source;
use crate::{Result, refused};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sampling {
    /// The most likely one.
    Greedy,
    /// A random one of the most likely.
    Random {
        /// What logits are divided by.
        temperature: f32,
        /// The share of probability that is drawn from.
        top_p: f32,
        /// Where random numbers begin.
        seed: u64,
    },
}

/// What to generate.
#[derive(Clone, Copy, Debug)]
pub struct Generation<'g> {
    /// What it continues.
    pub prompt: &'g [u32],
    /// How many tokens at most.
    pub most: usize,
    /// Tokens that end it.
    pub ends: &'g [u32],
    /// How tokens are chosen.
    pub sampling: Sampling,
}

/// Generates tokens, and hands out each as it comes. All layers are in memory, on a GPU where
/// that multiplies; experts are read when a token goes to them.
pub fn generate(
    source: &Source<'_>,
    generation: &Generation<'_>,
    run: &Run<'_>,
    stop: &AtomicBool,
    mut said: impl FnMut(u32) -> Result<()>,
) -> Result<Vec<u32>> {
    let (decoder, config) = (Decoder::new(source), source.config());
    if generation.prompt.is_empty() {
        return Err(refused("the prompt has no tokens; give some text"));
    }
    let length = generation.prompt.len().saturating_add(generation.most);
    if length > config.positions {
        let (prompt, most, known) = (generation.prompt.len(), generation.most, config.positions);
        return Err(refused(format!(
            "a prompt of {prompt} tokens and {most} new ones are more than the {known} positions that the model knows; \
             give a shorter prompt, or ask for fewer tokens"
        )));
    }
    let layers = (0..config.layers).map(|layer| decoder.layer(layer)).collect::<Result<Vec<Layer>>>()?;
    let head = Weights(Arc::new(source.matrix(decoder.head()?, 0..config.vocabulary)?));
    let norm = decoder.last_norm()?;
    let mut caches = vec![Cache::default(); config.layers];
    let (mut next, mut out) = (generation.prompt.to_vec(), Vec::new());
    let mut random = match generation.sampling {
        Sampling::Greedy => 0,
        Sampling::Random { seed, .. } => seed,
    };
    for _ in 0..generation.most {
        let mut state = decoder.embed(&next)?;
        for (layer, cache) in layers.iter().zip(&mut caches) {
            go_on(stop)?;
            decoder.step(layer, &mut state, cache, length, run)?;
        }
        let mut last = state.split_off(state.len() - config.hidden);
        norm.apply(&mut last);
        let mut logits = head.apply(&last, 1)?;
        if let Some(cap) = config.logit_cap {
            logits.iter_mut().for_each(|z| *z = (*z / cap).tanh() * cap);
        }
        if logits.iter().any(|z| z.is_nan()) {
            return Err(refused("the logits are not numbers; `nvfp4 eval` names the layer"));
        }
        let token = choose(&logits, generation.sampling, &mut random);
        if generation.ends.contains(&token) {
            break;
        }
        out.push(token);
        said(token)?;
        next = vec![token];
    }
    Ok(out)
}

/// The next token.
fn choose(logits: &[f32], sampling: Sampling, random: &mut u64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let Sampling::Random { temperature, top_p, .. } = sampling else {
        return order.into_iter().min_by(by_logit).unwrap_or(0);
    };
    order.sort_by(by_logit);
    let most = logits[order[0] as usize];
    let weights: Vec<f64> = order.iter().map(|&t| f64::from((logits[t as usize] - most) / temperature).exp()).collect();
    let share = weights.iter().sum::<f64>() * f64::from(top_p);
    let mut kept = 0.0;
    let before = |&&weight: &&f64| {
        kept += weight;
        kept - weight < share
    };
    let count = weights.iter().take_while(before).count().max(1);
    let mut drawn = uniform(random) * weights[..count].iter().sum::<f64>();
    let found = order[..count].iter().zip(&weights).find(|(_, weight)| {
        drawn -= **weight;
        drawn < 0.0
    });
    *found.map_or(&order[count - 1], |(token, _)| token)
}

/// A number from 0 to 1, by splitmix64.
fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}
