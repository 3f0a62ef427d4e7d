//! Numbers about many positions.

use crate::score::Said;
use serde::Serialize;

/// A mean and its standard error.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Mean {
    /// The mean.
    pub mean: f64,
    /// How far it may be from the mean of all texts of this kind.
    pub error: f64,
}

impl Mean {
    /// Of these values; of none, 0.
    pub fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        let count = values.clone().count() as f64;
        let mean = values.clone().sum::<f64>() / count.max(1.0);
        let spread = values.map(|x| (x - mean) * (x - mean)).sum::<f64>() / (count - 1.0).max(1.0);
        Mean { mean, error: (spread / count.max(1.0)).sqrt() }
    }
}

/// `exp` of the mean loss; its error is the loss's, to first order.
pub fn perplexity(said: &[Said]) -> Mean {
    let loss = Mean::of(said.iter().map(Said::loss));
    Mean { mean: loss.mean.exp(), error: loss.mean.exp() * loss.error }
}

/// The perplexity of one model over another's, on the same tokens.
pub fn ratio(reference: &[Said], model: &[Said]) -> Mean {
    let change = Mean::of(reference.iter().zip(model).map(|(a, b)| b.loss() - a.loss()));
    Mean { mean: change.mean.exp(), error: change.mean.exp() * change.error }
}

/// How a model's distributions differ from the reference's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Divergence {
    /// The mean of all positions.
    pub mean: Mean,
    /// The share of positions, in percent, and the divergence that it stays below.
    pub percentiles: Vec<(f64, f64)>,
    /// By the probability of the reference's most likely token: from, to, positions, mean.
    pub by_confidence: Vec<(f64, f64, usize, f64)>,
}

/// The shares that are given.
const PERCENTILES: [f64; 9] = [0.0, 1.0, 10.0, 50.0, 90.0, 95.0, 99.0, 99.9, 100.0];

/// Five bands of confidence.
const BANDS: [(f64, f64); 5] = [(0.0, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1.0)];

impl Divergence {
    /// Of a model from the reference.
    pub fn of(reference: &[Said], model: &[Said]) -> Self {
        let each: Vec<f64> = reference.iter().zip(model).map(|(a, b)| b.divergence(a)).collect();
        let mut sorted = each.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| sorted.get(((sorted.len() as f64 - 1.0) * share / 100.0).round() as usize);
        let band = |&(from, to): &(f64, f64)| {
            let inside =
                |said: &Said| (from..to).contains(&said.confidence()) || (to == 1.0 && said.confidence() >= to);
            let own: Vec<f64> =
                reference.iter().zip(&each).filter(|(said, _)| inside(said)).map(|(_, kl)| *kl).collect();
            (from, to, own.len(), Mean::of(own.iter().copied()).mean)
        };
        Divergence {
            mean: Mean::of(each.iter().copied()),
            percentiles: PERCENTILES.iter().map(|&share| (share, at(share).copied().unwrap_or(0.0))).collect(),
            by_confidence: BANDS.iter().map(band).collect(),
        }
    }

    /// The divergence that half of the positions stay below.
    pub fn median(&self) -> f64 {
        self.percentiles[3].1
    }
}

/// The share of positions where both have the same most likely token.
pub fn agreement(reference: &[Said], model: &[Said]) -> Mean {
    Mean::of(reference.iter().zip(model).map(|(a, b)| f64::from(a.top == b.top)))
}

/// A judgement of a mean divergence, in the words that people use for them.
pub fn verdict(divergence: f64) -> &'static str {
    match divergence {
        d if d < 1e-4 => "the same",
        d if d < 5e-3 => "very close",
        d if d < 2e-2 => "close",
        d if d < 5e-2 => "as usual for 4 bits",
        d if d < 1e-1 => "worse than usual for 4 bits",
        _ => "damaged",
    }
}
