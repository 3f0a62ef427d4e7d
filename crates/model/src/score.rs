//! Logits of all positions, a panel of the vocabulary at a time. None is kept: what is measured of a
//! distribution is summed while it goes by.

use crate::decoder::{Decoder, Rows, go_on};
use crate::matrix::Matrix;
use crate::place::{Place, Placed};
use crate::{Result, refused};
use nvfp4_checkpoint::Weight;
use rayon::prelude::*;
use std::sync::atomic::AtomicBool;

/// Words of the vocabulary in a panel.
pub(crate) const WORDS: usize = 1024;
/// Positions whose logits are there at a time.
pub(crate) const POSITIONS: usize = 256;

/// What one model says at one position. `ln Z` is `most + ln(sum)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Said {
    /// The largest logit.
    pub most: f64,
    /// The token that has it.
    pub top: u32,
    /// The sum of `exp(logit − most)`.
    pub sum: f64,
    /// The logit of the token that follows.
    pub label: f64,
    /// `Σ exp(z − most) · (z − z')` for the reference's logits `z` and this model's `z'`, with the
    /// reference's `most`.
    cross: f64,
}

impl Said {
    const NOTHING: Said = Said { most: f64::NEG_INFINITY, top: 0, sum: 0.0, label: f64::NAN, cross: 0.0 };

    fn ln_z(&self) -> f64 {
        self.most + self.sum.ln()
    }

    /// The negative logarithm of the probability of the token that follows.
    pub fn loss(&self) -> f64 {
        self.ln_z() - self.label
    }

    /// The probability of the most likely token.
    pub fn confidence(&self) -> f64 {
        1.0 / self.sum
    }

    /// The divergence of this model from the reference, `Σ p·(ln p − ln q)`.
    pub fn divergence(&self, reference: &Said) -> f64 {
        (self.cross / reference.sum - reference.ln_z() + self.ln_z()).max(0.0)
    }

    /// Takes in logits, of tokens from `first` on.
    fn take(&mut self, logits: &[f32], first: u32, label: u32) {
        let (mut most, mut top) = (self.most, self.top);
        for (i, &z) in logits.iter().enumerate() {
            if f64::from(z) > most {
                (most, top) = (f64::from(z), first + i as u32);
            }
        }
        let rescaled = if most > self.most { self.sum * (self.most - most).exp() } else { self.sum };
        self.sum = rescaled + logits.iter().map(|&z| (f64::from(z) - most).exp()).sum::<f64>();
        (self.most, self.top) = (most, top);
        if let Some(&z) = label.checked_sub(first).and_then(|at| logits.get(at as usize)) {
            self.label = f64::from(z);
        }
    }

    /// Takes in how the reference's logits differ, after the reference took them in: `before` is
    /// what its largest was.
    fn compare(&mut self, own: &[f32], reference: &[f32], before: f64, most: f64) {
        let rescaled = if most > before { self.cross * (before - most).exp() } else { self.cross };
        let added =
            reference.iter().zip(own).map(|(&z, &own)| (f64::from(z) - most).exp() * (f64::from(z) - f64::from(own)));
        self.cross = rescaled + added.sum::<f64>();
    }
}

/// A model and the states before its last norm.
pub struct Speaker<'d, 's, 'a> {
    /// The model.
    pub decoder: &'d Decoder<'s, 'a>,
    /// States of all tokens.
    pub states: Vec<f32>,
}

/// What logits are made of.
struct Ready<'s, 'a> {
    head: &'s Weight<'a>,
    place: &'s Place,
    cap: Option<f32>,
    /// States after the last norm.
    states: Vec<f32>,
}

/// The positions that predict a token of the text: those with a next token in their row, but for the
/// first `given`.
pub fn positions(rows: &Rows, given: usize) -> Vec<usize> {
    rows.ranges().flat_map(|range| range.start + given..range.end.saturating_sub(1)).collect()
}

/// What each model says at each position. The first is the reference of the others.
pub fn score(
    speakers: Vec<Speaker<'_, '_, '_>>,
    rows: &Rows,
    positions: &[usize],
    stop: &AtomicBool,
    done: &mut dyn FnMut(usize),
) -> Result<Vec<Vec<Said>>> {
    let hidden = speakers[0].decoder.source().config().hidden;
    let vocabulary = speakers[0].decoder.source().config().vocabulary;
    let mut normed = Vec::with_capacity(speakers.len());
    for speaker in speakers {
        let head = speaker.decoder.head()?;
        let (config, place) = (speaker.decoder.source().config(), speaker.decoder.source().place());
        let mut states = speaker.states;
        speaker.decoder.last_norm()?.apply(&mut states);
        normed.push(Ready { head, place, cap: config.logit_cap, states });
    }
    let mut said = vec![vec![Said::NOTHING; positions.len()]; normed.len()];
    for first in (0..vocabulary).step_by(WORDS) {
        let words = WORDS.min(vocabulary - first);
        // Ways to run one model share its weights.
        let mut panels: Vec<(*const Weight<'_>, Placed)> = Vec::new();
        let mut which = Vec::new();
        for Ready { head, place, .. } in &normed {
            let key = std::ptr::from_ref(*head);
            let at = panels.iter().position(|(other, _)| *other == key);
            which.push(at.unwrap_or(panels.len()));
            if at.is_none() {
                panels.push((key, place.hold_for_many(Matrix::read(head, first..first + words)?)?));
            }
        }
        for (block, positions) in positions.chunks(POSITIONS).enumerate() {
            go_on(stop)?;
            let logits = normed
                .iter()
                .zip(&which)
                .map(|(Ready { cap, states, .. }, &panel)| {
                    let x: Vec<f32> =
                        positions.iter().flat_map(|&p| &states[p * hidden..(p + 1) * hidden]).copied().collect();
                    let mut out = panels[panel].1.multiply(&x, positions.len())?;
                    if let Some(cap) = cap {
                        out.par_iter_mut().for_each(|z| *z = (*z / cap).tanh() * cap);
                    }
                    Ok(out)
                })
                .collect::<Result<Vec<Vec<f32>>>>()?;
            let (head, tail) = said.split_at_mut(1);
            let at = block * POSITIONS..block * POSITIONS + positions.len();
            let labels = positions.iter().map(|&p| rows.tokens()[p + 1]);
            for (i, label) in labels.enumerate() {
                let range = i * words..(i + 1) * words;
                let own = &logits[0][range.clone()];
                let before = head[0][at.start + i].most;
                head[0][at.start + i].take(own, first as u32, label);
                let most = head[0][at.start + i].most;
                for (said, logits) in tail.iter_mut().zip(&logits[1..]) {
                    said[at.start + i].take(&logits[range.clone()], first as u32, label);
                    said[at.start + i].compare(&logits[range.clone()], own, before, most);
                }
            }
        }
        done(words);
    }
    for (said, Ready { head, .. }) in said.iter().zip(&normed) {
        if said.iter().any(|said| !(said.ln_z().is_finite() && said.label.is_finite())) {
            return Err(refused(format!("the logits are not numbers; '{}' or the last norm is damaged", head.module)));
        }
    }
    Ok(said)
}

/// All logits of a small model, `[tokens, vocabulary]`: for tests.
pub fn logits(decoder: &Decoder<'_, '_>, mut states: Vec<f32>) -> Result<Vec<f32>> {
    let (config, head) = (decoder.source().config(), decoder.head()?);
    decoder.last_norm()?.apply(&mut states);
    let matrix = decoder.source().place().hold_for_many(Matrix::read(head, 0..config.vocabulary)?)?;
    let mut out = matrix.multiply(&states, states.len() / config.hidden)?;
    if let Some(cap) = config.logit_cap {
        out.iter_mut().for_each(|z| *z = (*z / cap).tanh() * cap);
    }
    Ok(out)
}
