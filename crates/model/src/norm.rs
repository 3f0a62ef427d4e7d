//! Root-mean-square norms.

use crate::Result;
use crate::source::Source;
use rayon::prelude::*;

/// A norm: `x / sqrt(mean(x²) + ε) · w`. The mean is binary64.
#[derive(Debug)]
pub struct Norm {
    weight: Vec<f32>,
    epsilon: f32,
}

impl Norm {
    /// The norm of this name and width.
    pub fn read(source: &Source<'_>, name: &str, width: usize) -> Result<Self> {
        let mut weight = source.need_vector(&format!("{name}.weight"), width)?;
        weight.iter_mut().for_each(|w| *w += source.config().norm_offset);
        Ok(Norm { weight, epsilon: source.config().epsilon })
    }

    /// The same if it is there.
    pub fn find(source: &Source<'_>, name: &str, width: usize) -> Result<Option<Self>> {
        match source.vector(&format!("{name}.weight"))? {
            None => Ok(None),
            Some(_) => Self::read(source, name, width).map(Some),
        }
    }

    /// Norms every row in place.
    pub fn apply(&self, x: &mut [f32]) {
        x.par_chunks_exact_mut(self.weight.len()).for_each(|row| {
            let square: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let factor = (1.0 / (square / row.len() as f64 + f64::from(self.epsilon)).sqrt()) as f32;
            row.iter_mut().zip(&self.weight).for_each(|(x, w)| *x = *x * factor * w);
        });
    }

    /// Normed rows.
    pub fn of(&self, x: &[f32]) -> Vec<f32> {
        let mut normed = x.to_vec();
        self.apply(&mut normed);
        normed
    }
}
