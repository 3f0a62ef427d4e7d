//! What is learned: a text, cut into a part to train on and a part that is held out, and the
//! batches of each step.

use anyhow::{Result, anyhow, ensure};
use candle_core::{Device, Tensor};
use nvfp4_spec::philox::{philox4x32, words};
use std::path::Path;

/// The text that comes with the program; see `text/README.md`.
const DEFAULT: &str = include_str!("../../text/devils-dictionary.txt");

/// The held-out part is the last tenth of the tokens, at most these many.
const MOST_HELD_OUT: usize = 32768;

/// The largest text that is read.
const MAX_TEXT: u64 = 4 << 30;

/// The text of a file, or the default one.
pub fn read(path: Option<&Path>) -> Result<Vec<u8>> {
    match path {
        None => Ok(DEFAULT.as_bytes().to_vec()),
        Some(path) => nvfp4_files::regular::read(path, MAX_TEXT).map_err(|error| anyhow!("--text {error}")),
    }
}

/// Tokens of a text.
pub struct Corpus {
    train: Vec<u32>,
    held_out: Vec<u32>,
    batch: usize,
    context: usize,
    device: Device,
}

/// Windows of a text and what follows each of their tokens, both [batch, context].
pub struct Batch {
    pub tokens: Tensor,
    pub next: Tensor,
}

impl Corpus {
    /// Cuts a text into its two parts, whose batches lie on a device. Each must have enough for a
    /// batch.
    pub fn new(mut tokens: Vec<u32>, batch: usize, context: usize, device: Device) -> Result<Self> {
        let held_out = (tokens.len() / 10).min(MOST_HELD_OUT);
        let least = 10 * (batch * context + 1);
        ensure!(
            held_out > batch * context,
            "the text has {} tokens, too few: a tenth of it is held out and must fill a batch of {batch} × {context}; \
             take a text of at least {least} tokens (--text), or a smaller --batch or --context",
            tokens.len()
        );
        let held_out = tokens.split_off(tokens.len() - held_out);
        Ok(Corpus { train: tokens, held_out, batch, context, device })
    }

    /// The device of the batches.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How many tokens there are to train on, and how many are held out.
    pub fn sizes(&self) -> (usize, usize) {
        (self.train.len(), self.held_out.len())
    }

    /// The batch of a step: windows that follow from the seed, the step and the row alone, so that
    /// all recipes see the same.
    pub fn batch(&self, seed: u64, step: u64) -> Result<Batch> {
        let places = (self.train.len() - self.context) as u64;
        let start = |row: usize| {
            let [low, high] = words(step);
            let random = philox4x32([low, high, row as u32, u32::from_be_bytes(*b"text")], words(seed));
            ((u64::from(random[0]) << 32 | u64::from(random[1])) % places) as usize
        };
        self.windows(&self.train, (0..self.batch).map(start))
    }

    /// The held-out part, window after window, in whole batches.
    pub fn held_out(&self) -> impl Iterator<Item = Result<Batch>> {
        let windows = (self.held_out.len() - 1) / self.context;
        (0..windows / self.batch).map(move |i| {
            let first = i * self.batch;
            self.windows(&self.held_out, (first..first + self.batch).map(|window| window * self.context))
        })
    }

    fn windows(&self, text: &[u32], starts: impl Iterator<Item = usize> + Clone) -> Result<Batch> {
        let shifted = |by: usize| {
            let rows = starts.clone().flat_map(|start| &text[start + by..start + by + self.context]);
            Tensor::from_vec(rows.copied().collect::<Vec<u32>>(), (self.batch, self.context), &self.device)
        };
        Ok(Batch { tokens: shifted(0)?, next: shifted(1)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corpus() -> Corpus {
        Corpus::new((0..1000).collect(), 2, 16, Device::Cpu).unwrap()
    }

    fn rows(tensor: &Tensor) -> Vec<Vec<u32>> {
        tensor.to_vec2().unwrap()
    }

    #[test]
    fn windows_are_of_the_training_part_and_followed_by_their_next_tokens() {
        for step in 0..50 {
            let batch = corpus().batch(3, step).unwrap();
            for (tokens, next) in rows(&batch.tokens).into_iter().zip(rows(&batch.next)) {
                assert!(tokens.iter().zip(&next).all(|(a, b)| a + 1 == *b) && next[15] < 900);
            }
        }
    }

    #[test]
    fn a_batch_follows_from_seed_and_step() {
        let batch = |seed, step| rows(&corpus().batch(seed, step).unwrap().tokens);
        assert_eq!(batch(3, 7), batch(3, 7));
        assert_ne!(batch(3, 7), batch(3, 8));
        assert_ne!(batch(3, 7), batch(4, 7));
    }

    #[test]
    fn the_held_out_part_is_the_last_tenth_in_order() {
        let corpus = corpus();
        let batches: Vec<Batch> = corpus.held_out().map(Result::unwrap).collect();
        assert_eq!(batches.len(), 3);
        let tokens: Vec<u32> = batches.iter().flat_map(|batch| rows(&batch.tokens).concat()).collect();
        assert_eq!(tokens, (900..996).collect::<Vec<u32>>());
    }

    #[test]
    fn a_short_text_is_refused_with_how_long_it_must_be() {
        let Err(error) = Corpus::new(vec![0; 320], 2, 16, Device::Cpu) else { panic!("accepted") };
        assert!(error.to_string().contains("320 tokens") && error.to_string().contains("at least 330"), "{error}");
        assert!(Corpus::new(vec![0; 330], 2, 16, Device::Cpu).is_ok());
    }
}
